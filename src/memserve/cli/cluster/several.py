"""Several models in one server: a router, instances and a store of each, behind one HTTP front and one mailbox."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from memserve.base.config import EngineOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.cli import flags as opt
from memserve.cli.cluster.beside import engine_lines, with_engines_file
from memserve.cli.cluster.http import (
    app_of,
    followers_at,
    listening,
    lora_folder_of,
    open_front,
    own_listener,
    precision_lines,
    ready_text,
    serve_app,
)
from memserve.cli.cluster.members import (
    READS,
    ClusterBase,
    ClusterOptions,
    OtherModels,
    RunningCluster,
    at_last_port,
    devices_for,
    mailbox_at,
    memory_bytes_of,
    starting_cluster,
    workers_of,
)
from memserve.cli.cluster.models import NamedModel, read_model, slug_of, split_model
from memserve.cli.cluster.picker import OwnRouters, urls_of_routers
from memserve.cli.credentials import followed_key
from memserve.cli.output import print_lines, progress_bar
from memserve.journal.folder import BATCHES, write_private
from memserve.journal.keeper import Metadata, MetadataPlace, open_folder, open_metadata
from memserve.model.loading.lora import Adapter, read_adapters
from memserve.protocol.peers import ROUTER
from memserve.store.host.files import stored_secret
from memserve.system.secrets import Followed, as_followed

if TYPE_CHECKING:
    from memserve.api.model_table import ModelPart, OwnersModels
    from memserve.api.sleeping import ModelSleep
    from memserve.host.router import RouterEngine
    from memserve.model.loading.card import RemoteModel
    from memserve.transport.shared_mailbox import SharedMailbox

log = logging.getLogger(__name__)

Planned = tuple[NamedModel, ClusterOptions]
Plan = Callable[[NamedModel], ClusterOptions]
ADDED = "added.json"
"""Of the models that were added while a server ran: it has them again when it is started anew."""


def refuse_names(models: Sequence[NamedModel], hint: str) -> None:
    """Raise :class:`UserError` for named models where there is one, without a router."""
    if models[0].name:
        raise UserError(f"the model {models[0].name!r} needs a router", hint=hint, param="model")


def _check_options(models: Sequence[NamedModel], http: opt.HttpOptions, options: ClusterOptions) -> None:
    """Raise :class:`UserError` for what does not go with named models yet."""
    if http.server.served_model_names:
        hint = "leave out --served-model-name: clients ask for the names of --model"
        raise UserError("models have two kinds of names", hint=hint, param="served_model_name")
    if options.placement.remote_place is not None or READS.get() is not None:
        raise UserError("Ray places instances of one model", hint="--model PATH, without a name", param="on")
    if options.routers > 1:
        refuse_only_sleepers(models)


def refuse_only_sleepers(models: Sequence[NamedModel]) -> None:
    """Raise :class:`UserError` for ``models`` that leave nothing to do for a router beside the owner."""
    if all(model.sleep_after_s is not None for model in models):
        hint = "leave out --routers, or sleep-after of one model"
        raise UserError("models that sleep are the first router's alone", hint=hint, param="routers")


def run_models(
    models: Sequence[NamedModel], engine: EngineOptions, plan: Plan, http: opt.HttpOptions, place: MetadataPlace
) -> None:
    """Bind, load, serve, drain. ``engine``: what holds for models that are added. ``plan``: the options of a model's
    cluster. ``place``: where all keep their records.

    Raises :class:`UserError`: for wrong options before anything is loaded."""
    from memserve.api.front import ModelAdmin

    _check_options(models, http, options := plan(models[0]))
    started, file = time.perf_counter(), http.server.admin_key_file
    admin_key = None if file is None else followed_key(Path(file))
    is_shared = options.routers > 1
    with ExitStack() as stack:
        http = stack.enter_context(with_engines_file(http, place.folder, is_shared=is_shared))
        listeners = [stack.enter_context(listening(http, is_shared=is_shared))]
        if is_shared:
            listeners.append(stack.enter_context(own_listener(http.server.host, listeners[0])))
        shared_names = {model.name for model in models if is_shared and model.sleep_after_s is None}
        plan = _with_followers(plan, models, http, listeners)
        running = stack.enter_context(ModelSet(engine, plan, http, place, shared_names))
        running.open_models(models)
        admin = None if admin_key is None else ModelAdmin(running, admin_key, http.server.drain_s)
        front = open_front(running.parts, http, running.edge, running.batches_folder, admin)
        url = http.api_url(listeners[0].getsockname()[1])

        def ready_lines() -> list[str]:
            seconds, needs_key = time.perf_counter() - started, http.api_keys.are_given
            ready = ready_text([part.name for part in front.table.parts], url, seconds, needs_key)
            return [ready, *running.lines, *engine_lines(front.table.relayed)]

        routers = OwnRouters(options.host, running.router_urls)
        endpoints = routers.endpoints(http, listeners[0].getsockname()[1])
        serve_app(front, listeners, http, ready_lines, running.begin_end, endpoints)


def _with_followers(
    plan: Plan, models: Sequence[NamedModel], http: opt.HttpOptions, listeners: Sequence[socket.socket]
) -> Plan:
    """``plan``, where the cluster of the first model that does not sleep starts the further routers, which are those of
    all models."""
    first = next((model for model in models if model.sleep_after_s is None), models[0])

    def plan_model(model: NamedModel) -> ClusterOptions:
        options = plan(model)
        if options.routers == 1 or model.name != first.name:
            return dataclasses.replace(options, routers=1)
        followers = followers_at(listeners, http, options.config)
        model_flags = tuple(word for model in models for word in ("--model", model.text))
        flags = followers.flags + model_flags
        return dataclasses.replace(options, followers=dataclasses.replace(followers, flags=flags))

    return plan_model


@dataclass(frozen=True, slots=True)
class FollowedModel:
    """One model of a router beside the owner."""

    model: NamedModel
    engine: RouterEngine
    card: RemoteModel
    adapters: tuple[Adapter, ...]


def serve_followed(
    models: Sequence[FollowedModel], owners: OwnersModels | None, listener: socket.socket, http: opt.HttpOptions,
    started: float,
) -> None:  # fmt: skip
    """Answer for all ``models``, beside their owner, until a signal asks for the end. ``owners``: as of
    :class:`memserve.api.model_table.ModelTable`."""
    from memserve.api.http.limits import Edge
    from memserve.api.metrics.http import ApiMetrics
    from memserve.api.model_table import ModelPart

    edge = Edge(http.limits, ApiMetrics())
    parts = []
    for followed in models:
        model, http_of = followed.model, _named_http(http, followed.model.name)
        app, _ = app_of(followed.engine, followed.card, model.engine.model, followed.adapters, http_of, edge=edge)
        parts.append(ModelPart(model.name, app, source=model.text))
    front, url = open_front(parts, http, edge, owners=owners), http.api_url(listener.getsockname()[1])

    def ready_lines() -> list[str]:
        seconds = time.perf_counter() - started
        names = [*(part.name for part in parts), *(owners.names if owners is not None else ())]
        text = ready_text(names, url, seconds, http.api_keys.are_given)
        return [text, *engine_lines(front.table.relayed)]

    serve_app(front, [listener], http, ready_lines, lambda: None)


def _named_http(http: opt.HttpOptions, name: str) -> opt.HttpOptions:
    return dataclasses.replace(http, server=dataclasses.replace(http.server, served_model_names=(name,)))


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The cluster of one model, and what ends it."""

    model: NamedModel
    options: ClusterOptions
    stack: ExitStack
    wait_until_ready: Callable[[], RunningCluster]


class ModelSet:
    """The clusters of all models of this process: started side by side, and one by one while it serves.

    A context: what was opened inside ends with it."""

    def __init__(
        self, engine: EngineOptions, plan: Plan, http: opt.HttpOptions, place: MetadataPlace,
        shared_names: Collection[str] = (),
    ) -> None:  # fmt: skip
        """``shared_names``: of models for which further routers place requests."""
        from memserve.api.http.limits import Edge
        from memserve.api.metrics.http import ApiMetrics

        self._engine, self._plan, self._http, self._place = engine, plan, http, place
        self._shared_names = shared_names
        self._stack = ExitStack()
        self._clusters: dict[str, _Cluster] = {}
        self._running: dict[str, RunningCluster] = {}
        self._added: list[str] = []
        self.edge = Edge(http.limits, ApiMetrics())
        self.parts: list[ModelPart] = []
        self.lines: list[str] = []
        """What is said of each model at the start."""

    def __enter__(self) -> ModelSet:
        self._folder = self._stack.enter_context(open_folder(self._place, print_lines))
        return self

    def __exit__(self, *failure: object) -> None:
        with self._stack:
            for name in reversed(list(self._clusters)):
                self._stack.callback(self._clusters[name].stack.close)

    @property
    def batches_folder(self) -> Path | None:
        """Where files and batches are kept. None: nowhere."""
        return None if self._folder.folder is None else self._folder.folder / BATCHES

    def router_urls(self) -> list[str]:
        """Where clients find the routers beside this one, which are those of all models."""
        return [url for running in self._running.values() for url in urls_of_routers(running.engine.members())]

    def open_models(self, models: Sequence[NamedModel]) -> None:
        """Start ``models``, and those that were added to the last server of this folder. Raises :class:`UserError`."""
        names = {model.name for model in models}
        self._added = [text for text in self._read_added() if split_model(text)[0] not in names]
        plans = [(model, self._plan(model)) for model in models]
        for added_text in self._added:
            with _left_out(split_model(added_text)[0], not_in=names):
                model = self._read_model(added_text)
                plans.append((model, self._plan(model)))
        disk_secret = next((text for _, options in plans if (text := stored_secret(options.store))), None)
        self._secret = as_followed(
            plans[0][1].secret or self._folder.secret or disk_secret or secrets.token_urlsafe(32)
        )
        records = [self._open_records(model, options) for model, options in plans]
        self._mailbox = _open_mailbox(plans, [opened for _, opened in records], self._secret)
        self._stack.callback(self._mailbox.close)
        for (model, options), (stack, opened) in zip(_with_others(plans), records, strict=True):
            with _left_out(model.name, not_in=names):
                self._start_cluster(model, options, stack, opened)
        for name, cluster in list(self._clusters.items()):
            with _left_out(name, not_in=names):
                self.parts.append(self._finish(cluster))

    def open_model(self, text: str) -> ModelPart:
        """As :class:`memserve.api.front.ModelHost` has it."""
        model = self._read_model(text)
        slugs = {slug_of(name).casefold() for name in self._clusters}
        if slug_of(model.name).casefold() in slugs:
            raise UserError(f"there is a model {model.name!r} already", hint="take another name", param="model")
        plans = [(cluster.model, cluster.options) for cluster in self._clusters.values()]
        *_, (_, options) = _with_others([*plans, (model, self._plan(model))])
        options = dataclasses.replace(
            options, others=dataclasses.replace(options.others, memory_bytes=0)
        )  # it is taken
        cluster = self._start_cluster(model, options, *self._open_records(model, options))
        part = self._finish(cluster)
        self._added.append(text)
        self._write_added()
        return part

    def close_model(self, name: str) -> None:
        """As :class:`memserve.api.front.ModelHost` has it. One of the command line comes back with the next server."""
        cluster = self._clusters.pop(name)
        self._running.pop(name).on_end()
        self._added = [text for text in self._added if split_model(text)[0] != name]
        self._write_added()
        cluster.stack.close()

    def begin_end(self) -> None:
        """The server is about to end: instances that end later are not started again."""
        for running in self._running.values():
            running.on_end()

    def _read_model(self, text: str) -> NamedModel:
        return read_model(text, self._engine, (None, None, None))

    def _open_records(self, model: NamedModel, options: ClusterOptions) -> tuple[ExitStack, Metadata]:
        stack = ExitStack()
        place = options.metadata.for_model(slug_of(model.name))
        return stack, stack.enter_context(open_metadata(place, print_lines, self._secret.initial_value))

    def _start_cluster(
        self, model: NamedModel, options: ClusterOptions, stack: ExitStack, records: Metadata
    ) -> _Cluster:
        from memserve.model.loading.sources import resolve_source

        print_lines(f"loading {model.engine.model} as {model.name} ...")
        reasons = devices_for(model.engine, options).why, options.why
        print_lines(*(f"{model.name}: {why}" for why in reasons if why))
        try:
            with progress_bar("preparing the model"):
                folder = resolve_source(model.engine.model, "float32", keep_file=model.engine.may_keep_file)
            base = ClusterBase(records, self._secret, folder, self._mailbox)
            starting = starting_cluster(model.engine, options, base, self._http.server.log_level, print_lines)
            cluster = _Cluster(model, options, stack, stack.enter_context(starting))
        except BaseException:
            stack.close()
            raise
        self._clusters[model.name] = cluster
        return cluster

    def _finish(self, cluster: _Cluster) -> ModelPart:
        """Wait until it is ready; what answers for it."""
        from memserve.api.model_table import ModelPart

        model, http = cluster.model, _named_http(self._http, cluster.model.name)
        try:
            running = cluster.wait_until_ready()
            adapters = read_adapters(model.engine.lora)
            parts = running.engine, running.model, model.engine.model, adapters, http
            app, card = app_of(*parts, lora_folder=lora_folder_of(model.engine), edge=self.edge)
        except BaseException:
            self._clusters.pop(model.name).stack.close()
            raise
        self._running[model.name] = running
        self.lines += [f"{model.name}: {line}" for line in [running.text, *precision_lines(card, adapters)]]

        def has_routers() -> bool:
            members = running.engine.members().values()  # those of `memserve router` on other hosts are, too
            return model.name in self._shared_names or any(info.role is Role.ROUTER for info in members)

        return ModelPart(model.name, app, _sleep_of(cluster, running), model.text, has_routers)

    def _read_added(self) -> list[str]:
        path = self._added_path
        try:
            return [] if path is None else [str(text) for text in json.loads(path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            hint = "remove the file: models that were added to a running server are then forgotten"
            raise UserError(f"cannot read {path}: {error}", hint=hint, param="metadata") from None

    def _write_added(self) -> None:
        if self._added_path is not None:
            write_private(self._added_path, json.dumps(self._added) + "\n")

    @property
    def _added_path(self) -> Path | None:
        return None if self._folder.folder is None else self._folder.folder / ADDED


@contextmanager
def _left_out(name: str, not_in: Collection[str]) -> Iterator[None]:
    """A model that was added to an earlier server, and does not start now, must not keep those of the command line
    (``not_in``) from it: it is left out, and said so. It may start the next time."""
    try:
        yield
    except UserError as error:
        if name in not_in:
            raise
        log.error("the model %s, which was added to an earlier server, is left out: %s", name, error.message)


def _sleep_of(cluster: _Cluster, running: RunningCluster) -> ModelSleep | None:
    """None: the instances are not this server's alone, or their number follows the load."""
    from memserve.api.sleeping import ModelSleep

    options = cluster.options
    counts = {Role.PREFILL: options.prefill, Role.DECODE: options.decode, Role.COLOCATED: options.colocated}
    if not options.instance_count or options.placement.scaling.scale:
        return None

    def perform(is_awake: bool) -> None:
        running.scale({role: count if is_awake else 0 for role, count in counts.items() if count})

    return ModelSleep(cluster.model.name, cluster.model.sleep_after_s, perform)


def _with_others(models: Sequence[Planned]) -> list[Planned]:
    """Each with what the others take of this host: they look for memory and GPUs at the same time."""
    plans: list[Planned] = []
    workers = [workers_of(model.engine, options.at_most) for model, options in models]
    memory_bytes = 0
    for index, (model, options) in enumerate(models):
        before, after = (tuple(chain.from_iterable(part)) for part in (workers[:index], workers[index + 1 :]))
        plans.append((model, dataclasses.replace(options, others=OtherModels(before, after, memory_bytes))))
        roles = [Role.COLOCATED] * options.instance_count + [Role.STORE] * options.store.is_wanted
        memory_bytes += memory_bytes_of(roles, model.engine, options)
    return plans


def _open_mailbox(models: Sequence[Planned], metadata: Sequence[Metadata], secret: Followed[str]) -> SharedMailbox:
    from memserve.system.process import new_generation
    from memserve.transport.shared_mailbox import SharedMailbox

    _, options = models[0]
    generation = new_generation()
    self_peer = max((records.next_router(ROUTER, generation) for records in metadata), key=lambda peer: peer.generation)
    last = next((address for records in metadata if (address := records.recovered_state.address)), "")
    names = [model.name for model, _ in models]

    def open_at(port: int) -> SharedMailbox:
        return SharedMailbox(partial(mailbox_at, options, secret, self_peer, port), self_peer, names)

    return at_last_port(options, last, open_at)
