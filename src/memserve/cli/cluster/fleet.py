"""``memserve serve --engine``: the router in front of servers of other projects.

``memserve engine join|leave|list``: servers of other projects behind a router that runs (``serve --engine``).
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from memserve.base.config import ClusterConfig
from memserve.base.deployment import StoreOptions
from memserve.base.errors import UserError
from memserve.cli.credentials import followed_key, read_secret
from memserve.cli.flags import HttpOptions
from memserve.cli.output import print_lines
from memserve.fleet.messages import FleetOptions, read_engine
from memserve.system.process import EndRequested, on_ending_signals, signals_raise

log = logging.getLogger(__name__)


def refuse_members(config: ClusterConfig, store: StoreOptions | None) -> None:
    """Raise :class:`UserError` for options that do not go together with ``--engine``. ``store`` None: instances are
    asked for as well."""
    if store is None:
        hint = "leave out --in-process, --prefill, --decode, --colocated and --cluster-port, or --engine"
        raise UserError("--engine serves through other servers, and has no instances of its own", hint=hint)
    store.refuse_options("leave out --engine")
    if config.admission.counts_memory:
        hint = "use --admission bounded --max-active N"
        raise UserError("the memory of other servers is not known block by block", hint=hint, param="mode")


def run_fleet(options: FleetOptions, http: HttpOptions, config: ClusterConfig, store: StoreOptions | None) -> None:
    """Bind, look at the engines, serve, drain. Raises :class:`UserError` for wrong options, as
    :func:`refuse_members` does."""
    refuse_members(config, store)
    started = time.perf_counter()
    from memserve.api.http.limits import make_room_for_connections
    from memserve.api.http.server import Server, bind
    from memserve.fleet.app import create_fleet_app
    from memserve.fleet.host import FleetHost

    engine_key, engines_key = (
        followed_key(Path(path)) if path is not None else None for path in (options.key_file, options.admin_key_file)
    )
    host = FleetHost(
        options.read_specs(),
        config,
        identity_key=secrets.token_bytes(16),
        engine_key=engine_key,
        prefill_tokens=options.prefill_tokens,
    )
    app = create_fleet_app(
        host,
        api_keys=http.api_keys.follow_keys(),
        metrics_keys=http.metrics_keys.follow_keys(),
        engines_key=engines_key,
        limits=http.limits,
        silence_s=options.silence_s,
    )

    def on_ready() -> None:
        views = host.machine.engine_views()
        models = ", ".join(host.machine.engines_by_model()) or "no model yet"
        url = http.api_url(listener.getsockname()[1])
        up = sum(view.up for view in views)
        ready = f"ready in {time.perf_counter() - started:.1f} s: {models} at {url}"
        print_lines(ready, f"{up} of {len(views)} engines take requests", result=True)

    try:
        with signals_raise(), bind(http.server.host, http.server.port) as listener:
            make_room_for_connections(http.limits.connections_max)
            server = Server(
                app, drain_s=http.server.drain_s, log_level=http.server.log_level, tls=http.tls, on_ready=on_ready
            )
            on_ending_signals(server.handle_exit)
            server.run(sockets=[listener])
    except EndRequested as end_request:
        log.warning("%s: stopped before it was ready", end_request.signal_name)


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
    reply = _call_engines("POST", router, "", engine_admin_key_file, {"engine": engine})
    typer.echo(f"{reply['name']} has joined" + ("" if reply["up"] else ", and does not answer yet"))


@app.command()
def leave(
    name: Annotated[str, typer.Argument(help="HOST:PORT of the server.")],
    *,
    engine_admin_key_file: KeyFile,
    router: Router = DEFAULT_ROUTER,
) -> None:
    """Send no new requests to a server; it is gone when those that it has have ended."""
    reply = _call_engines("DELETE", router, f"/{name}", engine_admin_key_file)
    requests_open = reply["requests_open"]
    typer.echo(f"{name} has left" if not requests_open else f"{name} leaves: {requests_open} requests have not ended")


@app.command("list")
def show(
    *,
    engine_admin_key_file: KeyFile,
    router: Router = DEFAULT_ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the servers: what they are, whether they take requests, their requests, blocks and models."""
    for card in _call_engines("GET", router, "", engine_admin_key_file)["engines"]:
        state = "up" if card["up"] else "down"
        line = (
            f"{card['name']}  {card['kind']}  {state}  {card['requests_open']} requests  {card['cached_blocks']} blocks"
        )
        typer.echo(json.dumps(card) if as_json else f"{line}  {', '.join(card['models'])}")


def _call_engines(
    method: str, router: str, path: str, key_file: Path, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    hint = "is --router the address of `memserve serve --engine`?"
    return call_router(method, router, f"/engines{path}", read_secret(key_file, "a key"), hint, CALL_S, body)


def call_router(
    method: str, router: str, path: str, key: str, hint: str, timeout_s: float, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What the server at ``router`` answers to its operator. Raises :class:`UserError` where it refuses, and with
    ``hint`` where it does not answer."""
    import httpx

    url = f"{router.rstrip('/').removesuffix('/v1')}{path}"
    headers = {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=timeout_s)
        reply: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(f"no answer from {router}: {error}", hint=hint) from None
    if answer.status_code != 200:
        raise UserError(str(reply.get("error", {}).get("message", answer.status_code)))
    return reply
