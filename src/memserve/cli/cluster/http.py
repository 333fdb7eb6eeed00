"""The HTTP server of a command: its socket, the application in front of an engine, what is said at the start."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memserve.base.config import EngineOptions
from memserve.base.deployment import Followers
from memserve.base.errors import UserError
from memserve.base.options import command_line_of
from memserve.base.types import AS_COMPUTED
from memserve.cli import flags as opt
from memserve.cli.cluster.beside import engine_lines, follower_words, open_beside, write_engines_of
from memserve.cli.cluster.picker import Endpoints, OwnRouters, check_picker, in_turn, with_picker
from memserve.cli.output import print_lines
from memserve.model.loading.lora import Adapter
from memserve.system.process import EndRequested, on_ending_signals, signals_raise

if TYPE_CHECKING:
    from memserve.api.app import Application
    from memserve.api.front import ModelAdmin, ModelFront
    from memserve.api.http.limits import Edge
    from memserve.api.http.server import DrainedApp
    from memserve.api.model_table import ModelPart, OwnersModels, RelayedModels
    from memserve.api.openai.interfaces import ServingEngine
    from memserve.model.loading.card import RemoteModel
    from memserve.model.loading.loader import LoadedModel

log = logging.getLogger(__name__)


@contextmanager
def listening(http: opt.HttpOptions, *, is_shared: bool = False) -> Iterator[socket.socket]:
    """Check what the HTTP server is given, and bind its socket; a signal ends what runs inside, quietly.

    Raises :class:`UserError` for wrong options before anything is loaded."""
    from memserve.api.http.middleware import KeyRing
    from memserve.api.http.server import bind
    from memserve.system.memory import keep_heap_small

    if http.api.otlp_endpoint:
        from memserve.api.metrics.traces import refuse_without_package

        refuse_without_package()
    check_picker(http)
    for keys in (http.api_keys, http.metrics_keys):
        KeyRing(keys.read_keys())  # refuses malformed keys
    keep_heap_small()
    try:
        with signals_raise(), bind(http.server.host, http.server.port, is_shared=is_shared) as listener:
            yield listener
    except EndRequested as end_request:
        log.warning("%s: stopped before it was ready", end_request.signal_name)


def own_listener(host: str, shared: socket.socket) -> socket.socket:
    """The socket of the owner alone: at the next port if that is free, so that followers find it there again after a
    crash."""
    from memserve.api.http.server import bind

    port = shared.getsockname()[1] + 1
    try:
        return bind(host, port if port < 65536 else 0)
    except UserError:
        return bind(host, 0)


def followers_at(listeners: Sequence[socket.socket], http: opt.HttpOptions, *parts: object) -> Followers:
    """How this server's further routers are started, with the options of ``parts``: at the port of the first of
    ``listeners``; the other one is the owner's own."""
    shared, own_port = (part.getsockname()[1] for part in listeners)
    tls = () if http.tls is None else ("--tls-cert", str(http.tls.files[0]), "--tls-key", str(http.tls.files[1]))
    server = dataclasses.replace(http.server, port=shared, endpoint_picker=None)  # the owner picks for all of them
    configs = (server, http.api, http.limits, *parts)
    words = [word for config in configs for word in command_line_of(config)]
    owner = "--owner-url", http.api_url(own_port).removesuffix("/v1")
    keys = {"api_keys": http.api_keys.as_payload(), "metrics_keys": http.metrics_keys.as_payload()}
    flags = (*owner, *tls, *words, *follower_words(http))
    return Followers(flags, keys, partial(write_engines_of, http), http.server.drain_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What answers requests."""

    engine: ServingEngine
    model: LoadedModel | RemoteModel
    text: str = ""
    """What is printed about it at the start."""
    on_end: Callable[[], None] = lambda: None
    """Called when the server begins to shut down."""
    folder: Path | None = None
    """Where files and batches are kept. None: there are none."""
    lora_folder: Path | None = None
    """Adapters may be loaded from below it. None: they are those of the start."""
    routers: OwnRouters = dataclasses.field(default_factory=lambda: OwnRouters())
    """Where the endpoint picker sends requests."""


def lora_folder_of(engine: EngineOptions) -> Path | None:
    """Below which adapters lie that may be loaded. None: they are those of the start."""
    folder = engine.lora_updates.lora_folder
    return Path(folder) if folder else None


def app_of(
    engine: ServingEngine, model: LoadedModel | RemoteModel, source: str, adapters: tuple[Adapter, ...],
    http: opt.HttpOptions, batches_folder: Path | None = None, lora_folder: Path | None = None,
    edge: Edge | None = None,
) -> tuple[Application, LoadedModel | RemoteModel]:  # fmt: skip
    """The application in front of ``engine``, and ``model`` as clients know it. ``source``: as it was configured.
    ``batches_folder``, ``lora_folder``, ``edge``: as of :func:`memserve.api.app.create_app`."""
    from memserve.api.app import create_app

    aliases = (source, model.name)  # as it was configured, and as it calls itself
    if http.server.served_model_names:
        model = dataclasses.replace(model, name=http.server.served_model_names[0])
    if not http.server.generation_config:
        model = dataclasses.replace(model, generation_defaults={})
    model = dataclasses.replace(model, default_max_tokens=http.server.default_max_tokens or None)
    app = create_app(
        engine, model, aliases=aliases, further_names=http.server.served_model_names[1:], adapters=adapters,
        api_keys=http.api_keys.follow_keys(), metrics_keys=http.metrics_keys.follow_keys(), limits=http.limits,
        config=http.api, batches_folder=batches_folder, lora_folder=lora_folder, edge=edge,
    )  # fmt: skip
    return app, model


def serve_until_signal(
    served: Served, source: str, adapters: tuple[Adapter, ...], listeners: list[socket.socket], http: opt.HttpOptions,
    started: float,
) -> None:  # fmt: skip
    """Answer clients at ``listeners`` until a signal asks for the end; then let streams finish."""
    app: DrainedApp
    relayed: RelayedModels | None = None
    if http.beside is None:
        app, model = app_of(served.engine, served.model, source, adapters, http, served.folder, served.lora_folder)
    else:
        app, model = _front_of_one(served, source, adapters, http)
        relayed = app.table.relayed
    port = listeners[0].getsockname()[1]

    def ready_lines() -> list[str]:
        text = [ready_text([model.name], http.api_url(port), time.perf_counter() - started, http.api_keys.are_given)]
        text += engine_lines(relayed)
        if served.text:
            text.append(served.text)
        if len(listeners) > 1:
            own_url = http.api_url(listeners[1].getsockname()[1])
            text.append(f"files and batches are the owner's, which answers at {own_url} as well")
        return text + precision_lines(model, adapters)

    serve_app(app, listeners, http, ready_lines, served.on_end, served.routers.endpoints(http, port))


def _front_of_one(
    served: Served, source: str, adapters: tuple[Adapter, ...], http: opt.HttpOptions
) -> tuple[ModelFront, LoadedModel | RemoteModel]:
    """One model, and those of other servers, behind one front."""
    from memserve.api.http.limits import Edge
    from memserve.api.metrics.http import ApiMetrics
    from memserve.api.model_table import ModelPart

    edge = Edge(http.limits, ApiMetrics())
    answering = served.engine, served.model, source, adapters, http
    app, model = app_of(*answering, lora_folder=served.lora_folder, edge=edge)
    return open_front([ModelPart(model.name, app, source=source)], http, edge, served.folder), model


def open_front(
    parts: Sequence[ModelPart], http: opt.HttpOptions, edge: Edge, batches_folder: Path | None = None,
    admin: ModelAdmin | None = None, owners: OwnersModels | None = None,
) -> ModelFront:  # fmt: skip
    """What answers for ``parts``, and for the models of other servers that ``http`` names, whose fleet it opens.
    ``owners``: as of :class:`memserve.api.model_table.ModelTable`."""
    from memserve.api.front import ModelFront, ServerKeys
    from memserve.api.model_table import ModelTable

    table = ModelTable(parts, open_beside(http, edge), owners)
    keys = ServerKeys(http.api_keys.follow_keys(), http.metrics_keys.follow_keys())
    return ModelFront(table, edge, keys=keys, config=http.api, batches_folder=batches_folder, admin=admin)


def precision_lines(model: LoadedModel | RemoteModel, adapters: tuple[Adapter, ...]) -> list[str]:
    """What is said at the start of a model's adapters, and of what is rounded."""
    text = [f"adapters: {', '.join(adapter.name for adapter in adapters)}"] if adapters else []
    if model.kv_dtype != AS_COMPUTED:
        text.append(f"not lossless: KV is rounded to {model.kv_dtype}, and answers may differ")
    elif model.kv_lower_dtype != AS_COMPUTED:
        text.append(f"not lossless: KV in DRAM is rounded to {model.kv_lower_dtype}, and answers may differ")
    if model.quantization != "none":
        how = "as they are stored" if model.quantization == "auto" else f"rounded to {model.quantization}"
        rounded = f"; activations are rounded to {model.activation_bits} bits" if model.activation_bits else ""
        text.append(f"weights: {how}{rounded}")
    return text


def serve_app(
    app: DrainedApp, listeners: list[socket.socket], http: opt.HttpOptions,
    ready_lines: Callable[[], list[str]], on_end: Callable[[], None], endpoints: Endpoints | None = None,
) -> None:  # fmt: skip
    """Run ``app`` until a signal asks for the end; ``ready_lines`` are printed when it accepts connections.
    ``endpoints``: those of the endpoint picker, where there is one."""
    from memserve.api.http.limits import make_room_for_connections
    from memserve.api.http.server import Server
    from memserve.system.memory import collect_rarely

    collect_rarely()
    make_room_for_connections(http.limits.connections_max)
    with_gateways = None if endpoints is None else with_picker(app, http, endpoints)
    if with_gateways is not None:
        app, on_end = with_gateways, in_turn(with_gateways.begin_drain, on_end)
    ends = {"on_ready": lambda: print_lines(*ready_lines(), result=True), "on_end": on_end}
    server = Server(app, drain_s=http.server.drain_s, log_level=http.server.log_level, tls=http.tls, **ends)
    on_ending_signals(
        server.handle_exit
    )  # uvicorn restores these handlers when it returns: a later signal must not kill the process
    server.run(sockets=listeners)
    if with_gateways is not None and with_gateways.failure is not None:
        raise with_gateways.failure


def ready_text(names: Sequence[str], url: str, seconds: float, needs_key: bool) -> str:
    """The ready line, and a line to copy that talks to the server."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": names[0], "temperature": 0, "messages": [question]}  # greedy: a small model wanders otherwise
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    example = f"curl {url}/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    return f"ready in {seconds:.1f} s: {', '.join(names)} at {url}\ntry: {example}"
