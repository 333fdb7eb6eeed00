"""``memserve serve``: the OpenAI API in front of a cluster, or of one engine in this process."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer

from memserve.api.http.config import ApiConfig, EdgeConfig, ServerConfig
from memserve.base.config import AdmissionConfig, ClusterConfig, EngineOptions
from memserve.base.deployment import PlacementOptions, StoreOptions
from memserve.base.errors import UserError
from memserve.base.types import Admission, Caching
from memserve.cli import credentials
from memserve.cli import flags as opt
from memserve.cli.cluster.beside import with_engines_file
from memserve.cli.cluster.fleet import run_fleet
from memserve.cli.cluster.http import (
    Served,
    followers_at,
    listening,
    lora_folder_of,
    own_listener,
    serve_until_signal,
)
from memserve.cli.cluster.members import (
    READS,
    ClusterOptions,
    EngineMembers,
    ServeArguments,
    devices_for,
    running_cluster,
)
from memserve.cli.cluster.models import Models, NamedModel, has_store, read_models
from memserve.cli.cluster.picker import OwnRouters, urls_of_routers
from memserve.cli.cluster.several import refuse_names, run_models
from memserve.cli.cluster.topology import choose_counts, room_text, shape_text
from memserve.cli.output import print_lines
from memserve.fleet.messages import FleetOptions
from memserve.journal.folder import BATCHES
from memserve.journal.keeper import metadata_place
from memserve.model.loading.lora import read_adapters
from memserve.store.host.files import with_absolute_folders
from memserve.system.gpus import device_here

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
    model: Models = None,
    engine: Annotated[EngineOptions, opt.Without("model")],
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
    """Serve models over the OpenAI HTTP API: a router and instances; with ``--engine``, servers of other projects."""
    cluster.admission.refuse_idle()
    opt.set_up_logging(server.log_level)
    is_fleet = fleet.relays.are_given and not (model or fleet.member_specs)
    _check_shape(engine, routers, standalone=in_process, engines=is_fleet)
    beside = opt.EnginesBeside(fleet.relays, cluster) if fleet.relays.are_given else None
    http = opt.HttpOptions(server, *keys.read_keys(), keys.read_tls(), edge, api, beside)
    shape_options = (prefill, decode, colocated, cluster_port, placement.used_option)
    if is_fleet and beside is not None:
        has_instances = in_process or any(option is not None for option in shape_options)
        run_fleet(http, beside, None if has_instances else store, routers)
        return
    models = read_models(model or [], engine, (prefill, decode, colocated), store)
    engines = EngineMembers.of_models(fleet, [model.name for model in models], standalone=in_process)
    if in_process:
        refuse_names(models, "leave out --in-process, or give one --model PATH without a name")
        store.refuse_options("leave out --in-process")
        run_server(_standalone_options(models[0].engine, cluster.admission, *shape_options), http, None)
        return
    records = metadata_place(metadata, server.port, credentials.etcd_access(metadata_credentials))
    has_others = cluster_port is not None or any(map(has_store, models))
    secret = credentials.secret_of(cluster_secret_file, is_needed=has_others)

    def options_of(model: NamedModel) -> ClusterOptions:
        local, config = _local_options(model, placement, cluster)
        shape = choose_counts(*model.counts, local, placement.scaling)
        return ClusterOptions(
            shape.prefill, shape.decode, shape.colocated, config, link, cluster_host, cluster_port, secret, records,
            shape_text(shape), with_absolute_folders(model.store), placement, routers, model_name=model.name,
            engines=engines.for_model(model.name),
        )  # fmt: skip

    if models[0].name:
        run_models(models, engine, options_of, http, records)
    else:
        run_server(models[0].engine, http, options_of(models[0]))


def _local_options(
    model: NamedModel, placement: PlacementOptions, cluster: ClusterConfig
) -> tuple[EngineOptions, ClusterConfig]:
    """As this host needs them: where Ray runs the instances, Ray has the GPUs; nothing is cached where they do not."""
    on_ray = placement.remote_place is not None
    local = dataclasses.replace(model.engine, device="cpu") if on_ray else model.engine
    return local, cluster if local.caching else dataclasses.replace(cluster, caching=Caching.OFF)


def _check_shape(engine: EngineOptions, routers: int, *, standalone: bool, engines: bool) -> None:
    """Raise :class:`UserError` for what neither an engine alone has, nor engines of others (``engines``)."""
    if engine.lora_updates.lora_folder and engines:
        message = "adapters of --engine do not come and go here"
        raise UserError(message, hint="load them there", param="lora_folder")
    if routers > 1 and standalone:
        raise UserError("--in-process runs one engine without a router", hint="leave out --routers or --in-process")


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
    if admission.mode == Admission.NONE:
        return options
    if admission.mode != Admission.BOUNDED or admission.active_max is None or admission.waiting_max < 1:
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
    adapters = read_adapters(engine_options.lora)
    is_shared = cluster is not None and cluster.routers > 1
    with listening(http, is_shared=is_shared) as listener, ExitStack() as stack:
        listeners = [listener]
        print_lines(f"loading {engine_options.model} ...")
        if cluster is not None and is_shared:
            http = stack.enter_context(with_engines_file(http, cluster.metadata.folder, is_shared=True))
            listeners.append(stack.enter_context(own_listener(http.server.host, listener)))
            model = EngineOptions(model=engine_options.model, lora=engine_options.lora)
            cluster = dataclasses.replace(cluster, followers=followers_at(listeners, http, model, cluster.config))
        log_level = http.server.log_level
        backend = _engine(engine_options) if cluster is None else _cluster(engine_options, cluster, log_level)
        with backend as served:
            serve_until_signal(served, engine_options.model, adapters, listeners, http, started)


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
        text = room_text(model.kv_tokens, model.max_model_tokens, options.scheduler.max_running)
        yield Served(engine, model, text, lora_folder=lora_folder_of(options))
    finally:
        engine.close(ENGINE_CLOSE_S)


@contextmanager
def _cluster(options: EngineOptions, cluster: ClusterOptions, log_level: str) -> Iterator[Served]:
    for why in (devices_for(options, cluster).why, cluster.why):
        if why:
            print_lines(why)
    with running_cluster(options, cluster, log_level, print_lines) as running:
        folder = None if running.folder is None else running.folder / BATCHES
        parts = running.engine, running.model, running.text, running.on_end, folder
        routers = OwnRouters(cluster.host, lambda: urls_of_routers(running.engine.members()))
        yield Served(*parts, lora_folder_of(options), routers)
