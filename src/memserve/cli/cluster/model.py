"""``memserve model``: models of a server that runs come and go, sleep and wake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from memserve.cli.cluster.fleet import DEFAULT_ROUTER, Router, call_router
from memserve.cli.cluster.models import split_model
from memserve.cli.credentials import read_secret

START_S = 630.0
"""A model may take so long until its instances are ready."""

KeyFile = Annotated[Path, typer.Option("--admin-key-file", help="File with the key that the server has for this.")]
Name = Annotated[str, typer.Argument(help="Name of the model.")]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Models of a server that runs (`memserve serve --model NAME=PATH --admin-key-file FILE`).",
)


@app.command()
def add(
    model: Annotated[str, typer.Argument(help="NAME=PATH[,option=value...], as of `memserve serve --model`.")],
    *,
    admin_key_file: KeyFile,
    router: Router = DEFAULT_ROUTER,
) -> None:
    """Start a model; it answers when this returns, and is there again when the server is started anew."""
    name, text = split_model(model)
    path, comma, rest = text.partition(",")
    local = Path(path).expanduser()
    if name and local.exists():  # the server may have been started elsewhere
        model = f"{name}={local.absolute()}{comma}{rest}"
    state = _call("POST", router, "", admin_key_file, {"model": model})
    typer.echo(f"{state['name']} has been added: {state['state']}")


@app.command()
def remove(name: Name, *, admin_key_file: KeyFile, router: Router = DEFAULT_ROUTER) -> None:
    """Take a model away: new requests get 404, those that it has may end in their time."""
    _call("DELETE", router, f"/{quote(name)}", admin_key_file)
    typer.echo(f"{name} has been removed")


@app.command()
def sleep(name: Name, *, admin_key_file: KeyFile, router: Router = DEFAULT_ROUTER) -> None:
    """End the instances of a model until it is asked again; its store keeps the KV."""
    _call("POST", router, f"/{quote(name)}/sleep", admin_key_file)
    typer.echo(f"{name} sleeps")


@app.command()
def wake(name: Name, *, admin_key_file: KeyFile, router: Router = DEFAULT_ROUTER) -> None:
    """Start the instances of a model that sleeps."""
    state = _call("POST", router, f"/{quote(name)}/wake", admin_key_file)
    typer.echo(f"{name} is awake: the last time it took {state['wake_s']:.1f} s")


@app.command("list")
def show(
    *,
    admin_key_file: KeyFile,
    router: Router = DEFAULT_ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models, the default first: their states, requests, and what they were given."""
    for state in _call("GET", router, "", admin_key_file)["models"]:
        line = f"{state['name']}  {state['state']}  {state['requests']} requests  {state['source']}"
        typer.echo(json.dumps(state) if as_json else line)


def _call(method: str, router: str, path: str, key_file: Path, body: dict[str, Any] | None = None) -> dict[str, Any]:
    hint = "is --router the address of `memserve serve --model NAME=PATH --admin-key-file FILE`?"
    return call_router(method, router, f"/models{path}", read_secret(key_file, "a key"), hint, START_S, body)
