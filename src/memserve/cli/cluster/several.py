"""Several models in one server: a router, instances and a store of each, behind one HTTP front and one mailbox."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from memserve.base.deployment import PlacementOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.cli import flags as opt
from memserve.cli.cluster.http import app_of, listening, precision_lines, ready_text, serve_app
from memserve.cli.cluster.members import (
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
from memserve.cli.cluster.models import NamedModel, slug_of
from memserve.cli.output import print_lines, progress_bar
from memserve.journal.folder import BATCHES
from memserve.journal.keeper import Metadata, open_folder, open_metadata
from memserve.model.loading.lora import Adapter, read_adapters
from memserve.protocol.peers import ROUTER
from memserve.store.host.files import stored_secret
from memserve.system.secrets import Followed, as_followed

if TYPE_CHECKING:
    from memserve.api.front import ModelFront
    from memserve.model.loading.card import RemoteModel
    from memserve.model.loading.loader import LoadedModel
    from memserve.transport.shared_mailbox import SharedMailbox

Planned = tuple[NamedModel, ClusterOptions]


def refuse_names(models: Sequence[NamedModel], hint: str) -> None:
    """Raise :class:`UserError` for named models where there is one, without a router."""
    if models[0].name:
        raise UserError(f"the model {models[0].name!r} needs a router", hint=hint, param="model")


def check_models(
    models: Sequence[NamedModel], http: opt.HttpOptions, placement: PlacementOptions, routers: int
) -> None:
    """Raise :class:`UserError` for what does not go with named models yet."""
    if http.server.served_model_names:
        hint = "leave out --served-model-name: clients ask for the names of --model"
        raise UserError("models have two kinds of names", hint=hint, param="served_model_name")
    if placement.remote_place is not None:
        raise UserError("Ray places instances of one model", hint="--model PATH, without a name", param="on")
    if routers > 1:
        raise UserError("several models have one router", hint="leave out --routers", param="routers")
    for model in models:
        if model.store.at is not None:
            hint = "start one for each model here: --ssd DIR=20GiB"
            raise UserError("a store that runs already keeps the KV of one model", hint=hint, param="store")


def run_models(models: Sequence[Planned], http: opt.HttpOptions) -> None:
    """Bind, load, serve, drain. Raises :class:`UserError`: for wrong options before anything is loaded."""
    started = time.perf_counter()
    adapters = [read_adapters(model.engine.lora) for model, _ in models]
    with listening(http) as listener:
        print_lines(*(f"loading {model.engine.model} as {model.name} ..." for model, _ in models))
        with _running(_with_others(models), http.server.log_level) as (folder, running):
            front, served = _front_of(models, running, adapters, http, folder)
            url = http.api_url(listener.getsockname()[1])

            def ready_lines() -> list[str]:
                seconds, needs_key = time.perf_counter() - started, http.api_keys.are_given
                text = [ready_text([part.name for part in front.parts], url, seconds, needs_key)]
                for (model, _), cluster, card, loras in zip(models, running, served, adapters, strict=True):
                    text += [f"{model.name}: {line}" for line in [cluster.text, *precision_lines(card, loras)]]
                return text

            def on_end() -> None:
                for cluster in running:
                    cluster.on_end()

            serve_app(front, [listener], http, ready_lines, on_end)


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


@contextmanager
def _running(models: Sequence[Planned], log_level: str) -> Iterator[tuple[Metadata, list[RunningCluster]]]:
    """All clusters, ready: they start side by side."""
    from memserve.model.loading.card import import_tokenizers
    from memserve.model.loading.sources import resolve_source

    _, first = models[0]
    with ExitStack() as stack:
        for model, options in models:
            reasons = devices_for(model.engine, options).why, options.why
            print_lines(*(f"{model.name}: {why}" for why in reasons if why))
        place = stack.enter_context(open_folder(first.metadata, print_lines))
        disk_secret = next((text for _, options in models if (text := stored_secret(options.store))), None)
        secret = as_followed(first.secret or place.secret or disk_secret or secrets.token_urlsafe(32))
        if first.metadata.etcd:
            import_tokenizers()
        metadata = [
            stack.enter_context(
                open_metadata(options.metadata.for_model(slug_of(model.name)), print_lines, secret.initial_value)
            )
            for model, options in models
        ]
        shared = _open_mailbox(models, metadata, secret)
        stack.callback(shared.close)
        starts = []
        for (model, options), records in zip(models, metadata, strict=True):
            with progress_bar("preparing the model"):
                folder = resolve_source(model.engine.model, "float32", keep_file=model.engine.may_keep_file)
            base = ClusterBase(records, secret, folder, shared)
            starting = starting_cluster(model.engine, options, base, log_level, print_lines)
            starts.append(stack.enter_context(starting))
        yield place, [start() for start in starts]


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


def _front_of(
    models: Sequence[Planned],
    running: Sequence[RunningCluster],
    adapters: Sequence[tuple[Adapter, ...]],
    http: opt.HttpOptions,
    place: Metadata,
) -> tuple[ModelFront, list[LoadedModel | RemoteModel]]:
    """The application in front of all, and each model as clients know it."""
    from memserve.api.front import ModelFront, ModelPart
    from memserve.api.http.limits import Edge
    from memserve.api.metrics.http import ApiMetrics

    edge = Edge(http.limits, ApiMetrics())
    parts, served = [], []
    for (model, _), cluster, loras in zip(models, running, adapters, strict=True):
        named_http = dataclasses.replace(
            http, server=dataclasses.replace(http.server, served_model_names=(model.name,))
        )
        app, card = app_of(cluster.engine, cluster.model, model.engine.model, loras, named_http, edge=edge)
        parts.append(ModelPart(model.name, app))
        served.append(card)
    folder = None if place.folder is None else place.folder / BATCHES
    keys = {"api_keys": http.api_keys.follow_keys(), "metrics_keys": http.metrics_keys.follow_keys()}
    return ModelFront(parts, edge, config=http.api, batches_folder=folder, **keys), served
