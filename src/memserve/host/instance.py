"""The process of one instance: loads the model, joins the cluster, works until it is told to leave."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from memserve.base.config import EngineOptions
from memserve.base.types import KV_CODECS, KvCodecMode
from memserve.host.build import Parts, build_parts
from memserve.host.member import MemberLinks, MemberProcess
from memserve.host.profile_file import LearntProfile, SharedLengths
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.gpus import take_gpu
from memserve.system.imports import leave_compiler_out
from memserve.system.memory import keep_heap_small, objects_that_stay, trim_heap, usable_cores
from memserve.system.process import new_generation
from memserve.transport.data_port import open_data_port, uses_nixl
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.member_place import MemberPlace
from memserve.transport.network_devices import ListenAddress
from memserve.transport.probe import no_router_error, probe_all, waiting_lines

if TYPE_CHECKING:
    from memserve.model.attention.query_server import SegmentPort
    from memserve.model.device import ModelDevice

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
"""How long the router may take to answer, once the model is loaded."""

WAITING_TOLD_S = (1.0, 2.0, 4.0, 8.0)
"""Until it is said again what an instance waits for."""


def run_instance(
    options: EngineOptions,
    place: MemberPlace,
    on_ready: Callable[[], None],
    *,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Run one instance until it is drained, expelled for good or signalled; ``on_ready`` is called when it has joined,
    ``say`` with what it waits for until then.

    Raises :class:`UserError` when the model cannot be served, no router answers, or the router refuses it.
    """
    keep_heap_small()
    own_gpus = options.parallel.for_role(place.role).worker_count
    options = replace(options, device=take_gpu(options.device, own_gpus))  # before torch looks
    health = place.open_health()
    self_peer = Peer(place.name, new_generation())
    members: list[MemberProcess] = []
    place.end_when_orphaned(lambda: members[0].router if members else None)
    with objects_that_stay():
        leave_compiler_out(options.device)
        key, nixl_at = place.identity_key, _nixl_host(place)
        parts = build_parts(options, self_peer=self_peer, role=place.role, identity_key=key, nixl_at=nixl_at)
    member = _open_member(parts, place, self_peer, KV_CODECS[options.kv_codec])
    members.append(member)
    counter = place.follow_signals(member.drain_and_leave)
    keep_costs = _costs_keeper(parts, member)

    def tell_health() -> None:
        keep_costs()
        if health is not None and (standing := member.health_state) is not None:
            health.write_state(standing)

    try:
        member.start()
        if wait_joined(member, place, say):
            _keep_vocabulary(parts)
            on_ready()
            tell_health()
            member.wait_for_end(tell_health)
        elif counter.names:
            say(f"ended by {counter.names[0]} before it was a member")
    finally:
        if health is not None:
            health.remove_file()
        member.close()


def _nixl_host(place: MemberPlace) -> str | None:
    """The host at which NIXL listens; None: it is not used."""
    host = place.advertise or place.host
    return host if uses_nixl(place.link, host) else None


def _costs_keeper(parts: Parts, member: MemberProcess) -> Callable[[], None]:
    """What is called now and then to keep what the instance learns of its costs and answers. Warns where nothing is
    known yet."""
    learnt, lengths = LearntProfile(parts.profile_path, parts.costs), SharedLengths(parts.profile_path)
    if not parts.costs.is_measured:
        log.warning(
            "what computing and moving KV costs here is assumed until requests have shown it; memserve profile"
            " measures it beforehand"
        )

    def keep() -> None:
        if parts.machine.state.costs.is_complete:
            learnt.save_costs(member.reported_costs, time.monotonic())
        if parts.machine.state.objectives is not None and lengths.is_due(time.monotonic()):
            member.share_answers(lengths.exchange_answers)

    return keep


def wait_joined(member: MemberProcess, place: MemberPlace, say: Callable[[str], None]) -> bool:
    """Wait until ``member`` is one, and say what it waits for: after a second, then at growing intervals. ``False``:
    the end was asked for.

    Raises :class:`UserError` when the router refuses it, or none has answered within ``JOIN_TIMEOUT_S``.
    """
    started = time.monotonic()
    for pause_s in itertools.chain(WAITING_TOLD_S, itertools.repeat(WAITING_TOLD_S[-1])):
        time_left_s = JOIN_TIMEOUT_S - (time.monotonic() - started)
        if member.wait_joined(max(0.0, min(pause_s, time_left_s))):
            return True
        if member.has_ended:
            return False
        probes = probe_all(place.join, place.secret)
        if time_left_s <= pause_s:
            raise no_router_error(probes, "a router")
        for line in waiting_lines(probes, "a router"):
            say(line)
    raise AssertionError("unreachable: the pauses do not end")


def _open_member(parts: Parts, place: MemberPlace, self_peer: Peer, kv_codec: KvCodecMode) -> MemberProcess:
    geometry, arenas = parts.model.geometry, parts.device.shared_arenas
    segments = _open_segments(parts, place)
    info = _describe_peer(parts, place, self_peer, segments)
    _free_tokenizer(parts)
    links = MemberLinks(
        lambda self_peer, on_message: ZmqMailbox(self_peer, place, on_message),
        lambda on_pages: open_data_port(place.link, geometry, arenas, on_pages, place, kv_codec=kv_codec),
        segments,
    )
    return MemberProcess(parts.machine, parts.device, info, place.join, links)


def _keep_vocabulary(parts: Parts) -> None:
    """Of the tokenizer, grammars need the text alone: a megabyte."""
    if parts.device.grammars is not None:
        parts.device.grammars.keep_vocabulary()
        trim_heap()


def _open_segments(parts: Parts, listen_address: ListenAddress) -> SegmentPort | None:
    """Where it may compute parts of longer sequences. None: its model or its options do not allow that."""
    able = parts.model.attends_plainly and parts.config.scheduler.layerwise == "off"
    if not able or getattr(parts.device, "held_kv", None) is None:
        return None
    from memserve.model.attention.query_server import SegmentPort

    device, dtype = cast("ModelDevice", parts.device), parts.model.geometry.dtype
    return SegmentPort(device, listen_address, dtype)


def _free_tokenizer(parts: Parts) -> None:
    """Once the model card is written, text is the router's: the tokenizer of a small model is 13 MB."""
    parts.model.tokenizer = None
    gc.collect()
    trim_heap()


def _describe_peer(parts: Parts, place: MemberPlace, self_peer: Peer, segments: SegmentPort | None) -> PeerInfo:
    import torch

    from memserve.model.loading.card import ModelCard

    config = parts.config
    return PeerInfo(
        peer=self_peer,
        role=place.role,
        address="",  # the mailbox knows
        namespace=config.namespace,
        geometry=parts.model.geometry,
        hbm_blocks=config.pool.hbm_blocks,
        dram_blocks=config.pool.dram_blocks,
        context_tokens=parts.machine.context_tokens,
        caching=config.pool.caching,
        publishes_events=config.exchange.event_capacity > 0,
        model_card=ModelCard.of_model(parts.model).encode(),
        costs=parts.costs.to_json() if parts.costs.is_measured else b"",
        segments_at=segments.address if segments is not None else "",
        sequence_tokens=config.max_model_tokens if segments is not None else 0,
        state_blocks=parts.machine.pool.state_blocks if config.exchange.shares_kv else 0,
        reports_layers=config.exchange.reports_layers,
        step_tokens=config.scheduler.step_tokens,
        computes_stripes=_computes_stripes(parts),
        cores_share=torch.get_num_threads() / usable_cores() if parts.model.device.type == "cpu" else 0.0,
        model=place.model,
        windows=config.pool.windows if config.exchange.shares_kv else None,
    )


def _computes_stripes(parts: Parts) -> bool:
    """Whether KV may come into its blocks layer by layer while it computes. On a GPU layers are not waited for, and of
    several workers none waits for the others' parts."""
    config, exchange = parts.config, parts.config.exchange
    has_gates = hasattr(parts.device, "gates") and parts.model.device.type == "cpu"
    whole = config.scheduler.layerwise == "off" and config.pool.states is None and config.pool.windows is None
    return has_gates and whole and exchange.shares_kv and exchange.reports_layers
