"""``memserve serve --engine``: the router in front of servers of other projects.

``memserve engine join|leave|list``: servers of other projects behind a router that runs (``serve --engine``).
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.base.config import ClusterConfig
from memserve.base.deployment import Followers, StoreOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.cli.cluster.beside import fleet_app, host_of, links_of, with_engines_file
from memserve.cli.cluster.http import followers_at, listening, own_listener, serve_app
from memserve.cli.cluster.picker import Endpoints
from memserve.cli.credentials import read_secret
from memserve.cli.flags import EnginesBeside, HttpOptions
from memserve.fleet.messages import FleetOptions, read_engine

if TYPE_CHECKING:
    from memserve.fleet.host import FleetHost

log = logging.getLogger(__name__)

WITHOUT_MODEL = "without_model"
"""In what a further router is told at its start: it has engines alone. Its command line does not say that: one without
``--model`` is for the bundled one."""


def refuse_members(config: ClusterConfig, store: StoreOptions | None) -> None:
    """Raise :class:`UserError` for options that do not go together with ``--engine`` without ``--model``. ``store``
    None: instances are asked for as well."""
    if store is None:
        hint = "add --model PATH, or leave out --in-process, --prefill, --decode, --colocated and --cluster-port"
        raise UserError("--engine alone has no instances of its own: they need a model", hint=hint, param="model")
    store.refuse_options("leave out --engine, or add --model PATH")
    if config.admission.counts_memory:
        hint = "use --admission bounded --max-active N"
        raise UserError("the memory of other servers is not known block by block", hint=hint, param="mode")


def run_fleet(http: HttpOptions, beside: EnginesBeside, store: StoreOptions | None, routers: int) -> None:
    """Bind, look at the engines of ``beside``, serve, drain; with further routers as children. Raises
    :class:`UserError` for wrong options, as :func:`refuse_members` does."""
    refuse_members(beside.config, store)
    started = time.perf_counter()
    with ExitStack() as stack:
        http = stack.enter_context(with_engines_file(http, None, is_shared=routers > 1))
        beside = http.beside or beside
        host = host_of(beside, beside.config)
        host.links = links_of(host, beside, http.server.drain_s)
        listeners = [stack.enter_context(listening(http, is_shared=routers > 1))]
        on_end: Callable[[], None] = lambda: None  # noqa: E731  # as the further routers' below
        if routers > 1:
            listeners.append(stack.enter_context(own_listener(http.server.host, listeners[0])))
            followers = followers_at(listeners, http, beside.config)
            on_end = stack.enter_context(_further_routers(followers, routers))

        def ready_lines() -> list[str]:
            views = host.machine.engine_views()
            models = ", ".join(host.machine.engines_by_model()) or "no model yet"
            urls = [http.api_url(part.getsockname()[1]) for part in listeners]
            up = sum(view.up for view in views)
            lines = [f"ready in {time.perf_counter() - started:.1f} s: {models} at {urls[0]}"]
            lines.append(f"{up} of {len(views)} engines take requests")
            lines += [f"{routers} routers; engines join and leave at {url.removesuffix('/v1')}" for url in urls[1:]]
            return lines

        _serve_fleet(host, beside.fleet, listeners, http, ready_lines, on_end)


def run_further_router(http: HttpOptions, beside: EnginesBeside) -> None:
    """A router beside that of :func:`run_fleet`, which has started it, and says in a file which engines there are."""
    host = host_of(beside, beside.config)
    host.links = links_of(host, beside, http.server.drain_s)
    with listening(http, is_shared=True) as listener:
        _serve_fleet(host, beside.fleet, [listener], http, list)


@contextmanager
def _further_routers(followers: Followers, routers: int) -> Iterator[Callable[[], None]]:
    """Routers of the same engines, kept alive as long as the block runs; what it is given begins their end."""
    from memserve.host.supervisor import ChildOrder, ChildStart, Supervisor

    flags = ("--join", "127.0.0.1:1", *followers.flags)  # there is no cluster to join
    orders = [ChildOrder(f"router-{number}", Role.ROUTER, flags, followers.drain_s) for number in range(2, routers + 1)]
    start = ChildStart(secrets.token_hex(16), {**followers.keys, WITHOUT_MODEL: True})
    supervisor = Supervisor(orders, start, lambda name, how: log.error("%s has ended: %s", name, how))
    supervisor.start()
    supervisor.confirm_started()
    try:
        yield supervisor.begin_retiring
    finally:
        supervisor.close()


def _serve_fleet(
    host: FleetHost, options: FleetOptions, listeners: list[socket.socket], http: HttpOptions,
    ready_lines: Callable[[], list[str]], on_end: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    from memserve.api.http.middleware import KeyRing

    endpoints = Endpoints(host, KeyRing(http.api_keys.follow_keys()), options.silence_s)
    serve_app(fleet_app(host, options, http), listeners, http, ready_lines, on_end, endpoints)


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
    engine: Annotated[
        str, typer.Argument(help="vllm=http://HOST:PORT[,events=...][,replay=...], or another one, as --engine has it.")
    ],
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
    name: Annotated[str, typer.Argument(help="HOST:PORT of the server, with its base if it has one.")],
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
        if answer.status_code == 307:  # of several routers the first one decides on engines
            answer = httpx.request(method, answer.headers["location"], json=body, headers=headers, timeout=timeout_s)
        reply: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(f"no answer from {router}: {error}", hint=hint) from None
    if answer.status_code != 200:
        raise UserError(str(reply.get("error", {}).get("message", answer.status_code)))
    return reply
