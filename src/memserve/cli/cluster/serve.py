"""``memserve serve``: the OpenAI API in front of a cluster, or of one engine in this process."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.api.http.config import ApiConfig, EdgeConfig, ServerConfig
from memserve.base.config import AdmissionConfig, ClusterConfig, EngineOptions
from memserve.base.deployment import Followers, PlacementOptions, StoreOptions
from memserve.base.errors import UserError
from memserve.base.options import command_line_of
from memserve.base.types import AS_COMPUTED, Admission, Caching
from memserve.cli import credentials
from memserve.cli import flags as opt
from memserve.cli.cluster.fleet import run_fleet
from memserve.cli.cluster.members import READS, ClusterOptions, ServeArguments, devices_for, running_cluster
from memserve.cli.cluster.topology import choose_counts, room_text, shape_text
from memserve.cli.output import print_lines
from memserve.fleet.messages import FleetOptions
from memserve.journal.folder import BATCHES
from memserve.journal.keeper import metadata_place
from memserve.model.loading.lora import Adapter, read_adapters
from memserve.store.host.files import with_absolute_folders
from memserve.system.gpus import device_here
from memserve.system.process import EndRequested, on_ending_signals, signals_raise

if TYPE_CHECKING:
    from memserve.api.openai.interfaces import ServingEngine
    from memserve.model.loading.card import RemoteModel
    from memserve.model.loading.loader import LoadedModel

log = logging.getLogger(__name__)

ENGINE_CLOSE_S = 5.0
Count = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="Instances of this role on this host. Default: what suits the machine."),
]

MetadataOption = Annotated[
    str,
    typer.Option(help="Where the router keeps records: a folder, etcd://HOST:PORT or none; auto: a folder per --port."),
]
RouterCount = Annotated[
    int, typer.Option(min=1, max=64, help="Router processes that share the port, each placing requests by itself.")
]
ClusterHost = Annotated[str, typer.Option(help="Address by which other hosts reach this one: router and instances.")]
ClusterPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Let instances of other hosts join at this port.")
]


@opt.grouped
def serve(
    *,
    server: ServerConfig,
    engine: EngineOptions,
    api: ApiConfig,
    keys: credentials.KeyOptions,
    edge: EdgeConfig,
    prefill: Count = None,
    decode: Count = None,
    colocated: Count = None,
    cluster: ClusterConfig,
    routers: RouterCount = 1,
    store: StoreOptions,
    link: opt.Link = opt.DEFAULT_LINK,
    cluster_host: ClusterHost = opt.DEFAULT_HOST,
    cluster_port: ClusterPort = None,
    cluster_secret_file: credentials.ClusterSecretFile = None,
    metadata: MetadataOption = "auto",
    metadata_credentials: credentials.MetadataCredentials = None,
    in_process: Annotated[bool, typer.Option(help="Run one engine in this process, without a cluster.")] = False,
    fleet: FleetOptions,
    placement: PlacementOptions,
) -> None:
    """Serve a model over the OpenAI HTTP API: a router and instances; with ``--engine``, servers of other projects."""
    cluster.admission.refuse_idle()
    opt.set_up_logging(server.log_level)
    _check_routers(routers, placement, standalone=in_process, engines=bool(fleet.engines))
    http = opt.HttpOptions(server, *keys.read_keys(), keys.read_tls(), edge, api)
    if fleet.engines or fleet.admin_key_file is not None:
        shape_options = (prefill, decode, colocated, cluster_port, placement.used_option)
        has_instances = in_process or any(option is not None for option in shape_options)
        run_fleet(fleet, http, cluster, None if has_instances else store)
        return
    if in_process:
        store.refuse_options("leave out --in-process")
        cluster_options = (prefill, decode, colocated, cluster_port, placement.used_option)
        run_server(_standalone_options(engine, cluster.admission, *cluster_options), http, None)
        return
    config = cluster if engine.caching else dataclasses.replace(cluster, caching=Caching.OFF)
    local = engine if placement.remote_place is None else dataclasses.replace(engine, device="cpu")  # Ray has the GPUs
    shape = choose_counts(prefill, decode, colocated, local, placement.scaling)
    records = metadata_place(metadata, server.port, credentials.etcd_access(metadata_credentials))
    secret = credentials.secret_of(cluster_secret_file, is_needed=cluster_port is not None or store.at is not None)
    members = (cluster_host, cluster_port, secret, records, shape_text(shape), with_absolute_folders(store), placement)
    run = ClusterOptions(shape.prefill, shape.decode, shape.colocated, config, link, *members, routers=routers)
    run_server(engine, http, run)


def _check_routers(routers: int, placement: PlacementOptions, *, standalone: bool, engines: bool) -> None:
    """Raise :class:`UserError` for what one router alone can do."""
    if routers == 1:
        return
    if standalone:
        raise UserError("--in-process runs one engine without a router", hint="leave out --routers or --in-process")
    if engines:
        hint = "leave out --routers; start several servers with the same engines"
        raise UserError("--routers is for instances, not for --engine", hint=hint, param="routers")
    if placement.remote_place is not None:
        raise UserError(
            "--routers is for one host", hint="start `memserve router --join` on the others", param="routers"
        )


def _standalone_options(options: EngineOptions, admission: AdmissionConfig, *cluster_options: object) -> EngineOptions:
    """The options of an engine without a router: its own queue replaces admission; it admits by memory anyway."""
    if any(option is not None for option in cluster_options):
        raise UserError(
            "--in-process runs one engine without a cluster",
            hint="leave it out, or leave out --prefill, --decode, --colocated and --cluster-port",
        )
    if admission.weights or admission.objectives or admission.priority_across_tenants:
        hint = "leave out --in-process, or --tenant-weight, --tenant-slo and --priority-across-tenants"
        raise UserError("one engine alone treats all tenants alike", hint=hint)
    if admission.mode is Admission.NONE:
        return options
    if admission.mode is not Admission.BOUNDED or admission.active_max is None or admission.waiting_max < 1:
        hint = "use --admission bounded with a queue, or leave out --in-process"
        raise UserError("one engine alone admits by memory anyway, and needs a queue", hint=hint)
    running = min(options.scheduler.max_running, admission.active_max)
    limits = dataclasses.replace(options.scheduler, max_running=running, max_waiting=admission.waiting_max)
    return dataclasses.replace(options, scheduler=limits)


def run_server(engine_options: EngineOptions, http: opt.HttpOptions, cluster: ClusterOptions | None) -> None:
    """Bind, load, serve, drain. ``cluster`` None: one engine in this process.

    Raises :class:`UserError`: for wrong options before anything is loaded."""
    reads = READS.get()
    if reads is not None:
        reads(ServeArguments(engine_options, http, cluster))
        return
    if cluster is not None and cluster.placement.remote_place is not None:
        from memserve.cli.cluster.ray import run_on_ray

        run_on_ray(engine_options, http, cluster)
        return
    started = time.perf_counter()
    from memserve.api.http.middleware import KeyRing
    from memserve.api.http.server import bind
    from memserve.system.memory import keep_heap_small

    if http.api.otlp_endpoint:
        from memserve.api.metrics.traces import refuse_without_package

        refuse_without_package()
    adapters = read_adapters(engine_options.lora)
    for keys in (http.api_keys, http.metrics_keys):
        KeyRing(keys.read_keys())  # refuses malformed keys
    keep_heap_small()
    try:
        is_shared = cluster is not None and cluster.routers > 1
        with signals_raise(), ExitStack() as open_sockets:
            listener = open_sockets.enter_context(bind(http.server.host, http.server.port, is_shared=is_shared))
            listeners = [listener]
            print_lines(f"loading {engine_options.model} ...")
            if cluster is not None and is_shared:
                listeners.append(open_sockets.enter_context(_own_listener(http.server.host, listener)))
                cluster = dataclasses.replace(cluster, followers=_followers(engine_options, cluster, http, listeners))
            log_level = http.server.log_level
            backend = _engine(engine_options) if cluster is None else _cluster(engine_options, cluster, log_level)
            with backend as served:
                serve_until_signal(served, engine_options.model, adapters, listeners, http, started)
    except EndRequested as end_request:
        log.warning("%s: stopped before it was ready", end_request.signal_name)


def _own_listener(host: str, shared: socket.socket) -> socket.socket:
    """The socket of the owner alone: at the next port if that is free, so that followers find it there again after a
    crash."""
    from memserve.api.http.server import bind

    port = shared.getsockname()[1] + 1
    try:
        return bind(host, port if port < 65536 else 0)
    except UserError:
        return bind(host, 0)


def _followers(
    engine: EngineOptions, cluster: ClusterOptions, http: opt.HttpOptions, listeners: list[socket.socket]
) -> Followers:
    """How this server's further routers are started, at the port of the first of ``listeners``; the other one is the
    owner's own."""
    shared, own_port = (part.getsockname()[1] for part in listeners)
    tls = () if http.tls is None else ("--tls-cert", str(http.tls.files[0]), "--tls-key", str(http.tls.files[1]))
    model, server = EngineOptions(model=engine.model, lora=engine.lora), dataclasses.replace(http.server, port=shared)
    parts = (server, model, http.api, http.limits, cluster.config)
    configs = [word for part in parts for word in command_line_of(part)]
    owner = "--owner-url", http.api_url(own_port).removesuffix("/v1")
    keys = {"api_keys": http.api_keys.as_payload(), "metrics_keys": http.metrics_keys.as_payload()}
    return Followers((*owner, *tls, *configs), keys)


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


@contextmanager
def _engine(options: EngineOptions) -> Iterator[Served]:
    from memserve.system.process import set_thread_environment

    set_thread_environment()
    from memserve.host.build import build_engine
    from memserve.system.gpus import take_gpu
    from memserve.system.imports import leave_compiler_out
    from memserve.system.memory import objects_that_stay

    options = dataclasses.replace(options, device=take_gpu(options.device, options.parallel.worker_count))
    if why := device_here(options.device).why:
        print_lines(why)
    with objects_that_stay():
        leave_compiler_out(options.device)
        engine, model = build_engine(options)
    try:
        yield Served(engine, model, room_text(model.kv_tokens, model.max_model_tokens, options.scheduler.max_running))
    finally:
        engine.close(ENGINE_CLOSE_S)


@contextmanager
def _cluster(options: EngineOptions, cluster: ClusterOptions, log_level: str) -> Iterator[Served]:
    for why in (devices_for(options, cluster).why, cluster.why):
        if why:
            print_lines(why)
    with running_cluster(options, cluster, log_level, print_lines) as running:
        folder = None if running.folder is None else running.folder / BATCHES
        yield Served(running.engine, running.model, running.text, running.on_end, folder)


def app_of(
    engine: ServingEngine, model: LoadedModel | RemoteModel, source: str, adapters: tuple[Adapter, ...],
    http: opt.HttpOptions, batches_folder: Path | None = None,
) -> tuple[Any, LoadedModel | RemoteModel]:  # fmt: skip
    """The application in front of ``engine``, and ``model`` as clients know it. ``source``: as it was configured.
    ``batches_folder``: as of :func:`memserve.api.app.create_app`."""
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
        config=http.api, batches_folder=batches_folder,
    )  # fmt: skip
    return app, model


def serve_until_signal(
    served: Served, source: str, adapters: tuple[Adapter, ...], listeners: list[socket.socket], http: opt.HttpOptions,
    started: float,
) -> None:  # fmt: skip
    """Answer clients at ``listeners`` until a signal asks for the end; then let streams finish."""
    from memserve.api.http.limits import make_room_for_connections
    from memserve.api.http.server import Server
    from memserve.system.memory import collect_rarely

    collect_rarely()
    make_room_for_connections(http.limits.connections_max)
    app, model = app_of(served.engine, served.model, source, adapters, http, served.folder)
    port = listeners[0].getsockname()[1]

    def on_ready() -> None:
        text = [ready_text(model.name, http.api_url(port), time.perf_counter() - started, http.api_keys.are_given)]
        if served.text:
            text.append(served.text)
        if len(listeners) > 1:
            own_url = http.api_url(listeners[1].getsockname()[1])
            text.append(
                f"documents, sessions, stored responses and batches are the owner's, which answers at {own_url} as well"
            )
        if adapters:
            text.append(f"adapters: {', '.join(adapter.name for adapter in adapters)}")
        if model.kv_dtype != AS_COMPUTED:
            text.append(f"not lossless: KV is rounded to {model.kv_dtype}, and answers may differ")
        elif model.kv_lower_dtype != AS_COMPUTED:
            text.append(f"not lossless: KV in DRAM is rounded to {model.kv_lower_dtype}, and answers may differ")
        if model.quantization != "none":
            how = "as they are stored" if model.quantization == "auto" else f"rounded to {model.quantization}"
            rounded = f"; activations are rounded to {model.activation_bits} bits" if model.activation_bits else ""
            text.append(f"weights: {how}{rounded}")
        print_lines(*text, result=True)

    ends = {"on_ready": on_ready, "on_end": served.on_end}
    server = Server(app, drain_s=http.server.drain_s, log_level=http.server.log_level, tls=http.tls, **ends)
    on_ending_signals(
        server.handle_exit
    )  # uvicorn restores these handlers when it returns: a later signal must not kill the process
    server.run(sockets=listeners)


def ready_text(name: str, url: str, seconds: float, needs_key: bool) -> str:
    """The ready line, and a line to copy that talks to the server."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": name, "temperature": 0, "messages": [question]}  # greedy: a small model wanders otherwise
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    example = f"curl {url}/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    return f"ready in {seconds:.1f} s: {name} at {url}\ntry: {example}"
