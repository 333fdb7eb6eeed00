"""How many instances this machine gets where the options do not say so, what fits into them, and what clients are told
of that."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memserve.base.config import EngineOptions
from memserve.base.deployment import ScalingOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.instance.scheduler.capacity import (
    APART_CORES_MIN,
    CLIENT_TOKENS,
    Hardware,
    Shape,
    choose_shape,
    clients_that_fit,
    instance_bytes,
)
from memserve.protocol.peers import PeerInfo
from memserve.system.gpus import device_here
from memserve.system.memory import available_memory_bytes, usable_cores

if TYPE_CHECKING:
    from memserve.host.router import RouterEngine
    from memserve.model.loading.card import ModelCard, RemoteModel
    from memserve.model.loading.sources import ModelFolder

FIXED = ScalingOptions()


def choose_counts(
    prefill: int | None,
    decode: int | None,
    colocated: int | None,
    engine: EngineOptions,
    scaling: ScalingOptions = FIXED,
) -> Shape:
    """Instances of each role, as the options set them; ``prefill`` or ``decode`` alone adds one of the other, and a
    role whose count ``scaling`` changes begins with the least that is allowed.

    All None: what suits this machine (:func:`memserve.instance.scheduler.capacity.choose_shape`), with the reason.
    """
    if not scaling.told_in:
        roles = (Role.PREFILL, prefill), (Role.DECODE, decode), (Role.COLOCATED, colocated)
        prefill, decode, colocated = (scaling.initial_count(role, count) for role, count in roles)
    if prefill is decode is colocated is None:
        return shape_here(engine)
    pairs = prefill is not None or decode is not None
    return Shape(
        prefill if prefill is not None else int(pairs), decode if decode is not None else int(pairs), colocated or 0
    )


def shape_here(engine: EngineOptions) -> Shape:
    """The shape that suits this machine, for engines with these options."""
    from memserve.model.loading.sources import weight_bytes

    gpus, workers = len(device_here(engine.device).gpus), engine.parallel.worker_count
    if gpus and workers > 1:  # the only shape: their KV cannot be handed over
        return Shape(0, 0, max(1, gpus // workers))
    machine = Hardware(usable_cores(), available_memory_bytes(), gpus)
    weights = weight_bytes(engine.model) if machine.cores >= APART_CORES_MIN and not machine.gpus else None
    kv_bytes = engine.kv_memory_bytes + engine.dram_memory_bytes
    return choose_shape(machine, None if weights is None else instance_bytes(kv_bytes, weights))


def shape_text(shape: Shape) -> str:
    """The chosen shape, the reason, and the flags for the other shape; empty where nothing was chosen."""
    if not shape.reason:
        return ""
    if shape.colocated > 1:
        return f"shape: {shape.colocated} colocated instances ({shape.reason}); for one: --colocated 1"
    if shape.colocated:
        return f"shape: one colocated instance ({shape.reason}); for the other shape: --prefill 1 --decode 1"
    return f"shape: one prefill and one decode instance ({shape.reason}); for the other shape: --colocated 1"


def room_text(kv_tokens: int, context_tokens: int, running_max: int) -> str:
    """A line: tokens of KV, the longest context, and about how many clients fit."""
    clients = clients_that_fit(kv_tokens, context_tokens, running_max)
    client_tokens = min(CLIENT_TOKENS, context_tokens)
    return (
        f"memory: {kv_tokens:,} tokens of KV, contexts up to {context_tokens:,}:"
        f" about {clients:,} client{'s' if clients != 1 else ''} at once with {client_tokens:,} tokens each"
    )


def with_models(members: dict[str, PeerInfo]) -> dict[str, PeerInfo]:
    """Those of ``members`` that say what the model is, by name."""
    return {name: info for name, info in members.items() if info.role.shares_kv}


def model_of(infos: list[PeerInfo], folder: ModelFolder, instances_max: int, early: Any = None) -> RemoteModel:
    """What the edge must know of the model that ``infos`` serve, at most ``instances_max`` of them one sequence.
    ``early``: the folder's :func:`~memserve.model.loading.card.early_tokenizer`."""
    from memserve.model.loading.card import remote_model

    return remote_model(_card_of(infos, instances_max), folder, early)


def follow_context(engine: RouterEngine, model: RemoteModel, instances_max: int) -> None:
    """``model`` takes what members take, at most ``instances_max`` of them together; also those that join later."""

    def refresh() -> None:
        with suppress(UserError):  # that of another release: what is served stays as it is
            if infos := list(with_models(engine.members()).values()):
                model.context.grow_to(_card_of(infos, instances_max))

    engine.on_joined = refresh
    refresh()


def _card_of(infos: list[PeerInfo], instances_max: int) -> ModelCard:
    from memserve.model.loading.card import ModelCard
    from memserve.router.placement.shards import longest_sequence

    largest = max(infos, key=lambda info: info.context_tokens)  # a request goes where its context fits
    card = ModelCard.decode(largest.model_card)
    shared = longest_sequence(infos, instances_max)  # or to several instances
    if shared > card.max_model_tokens:
        note = "" if shared == largest.sequence_tokens else card.context_note
        card = dataclasses.replace(card, max_model_tokens=shared, context_note=note)
    return card
