"""``memserve engine join|leave|list``: servers of other projects behind a router that runs (``serve --engine``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from memserve.cli.credentials import read_secret
from memserve.errors import UserError
from memserve.fleet.words import read_engine

CALL_S = 10.0
"""A router looks at a server that joins, and that may take it a few seconds."""

Router = Annotated[str, typer.Option(help="Address of the router.")]
KeyFile = Annotated[
    Path, typer.Option("--engine-admin-key-file", help="File with the key that the router has for this.")
]
DEFAULT_ROUTER = "http://127.0.0.1:8000"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Servers of other projects behind a router that runs (`memserve serve --engine`).",
)


@app.command()
def join(
    engine: Annotated[str, typer.Argument(help="vllm=http://HOST:PORT[,events=...][,replay=...], or sglang=...")],
    *,
    engine_admin_key_file: KeyFile,
    router: Router = DEFAULT_ROUTER,
) -> None:
    """Add a server: requests may go there as soon as it answers."""
    read_engine(engine)
    told = _call("POST", router, "", engine_admin_key_file, {"engine": engine})
    typer.echo(f"{told['name']} has joined" + ("" if told["up"] else ", and does not answer yet"))


@app.command()
def leave(
    name: Annotated[str, typer.Argument(help="HOST:PORT of the server.")],
    *,
    engine_admin_key_file: KeyFile,
    router: Router = DEFAULT_ROUTER,
) -> None:
    """Send no new requests to a server; it is gone when those that it has have ended."""
    told = _call("DELETE", router, f"/{name}", engine_admin_key_file)
    left = told["requests_open"]
    typer.echo(f"{name} has left" if not left else f"{name} leaves: {left} requests have not ended")


@app.command("list")
def show(
    *,
    engine_admin_key_file: KeyFile,
    router: Router = DEFAULT_ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the servers: what they are, whether they take requests, their requests, blocks and models."""
    for one in _call("GET", router, "", engine_admin_key_file)["engines"]:
        state = "up" if one["up"] else "down"
        line = f"{one['name']}  {one['kind']}  {state}  {one['requests_open']} requests  {one['cached_blocks']} blocks"
        typer.echo(json.dumps(one) if as_json else f"{line}  {', '.join(one['models'])}")


def _call(method: str, router: str, path: str, key_file: Path, body: dict[str, Any] | None = None) -> dict[str, Any]:
    import httpx

    headers = {"authorization": f"Bearer {read_secret(key_file, 'a key')}"}
    url = f"{router.rstrip('/').removesuffix('/v1')}/engines{path}"
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=CALL_S)
        told: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        hint = "is --router the address of `memserve serve --engine`?"
        raise UserError(f"no answer from {router}: {error}", hint=hint) from None
    if answer.status_code != 200:
        raise UserError(str(told.get("error", {}).get("message", answer.status_code)))
    return told
