"""The process of one instance: loads the model, joins the cluster, works until it is told to leave (level 3)."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memserve.config import EngineOptions
from memserve.messages import Peer, PeerInfo
from memserve.runtime.build import Parts, build_parts
from memserve.runtime.links.data import open_data_port
from memserve.runtime.links.mailbox import ZmqMailbox
from memserve.runtime.member import Member, new_generation
from memserve.runtime.memory import objects_that_stay
from memserve.runtime.meta_children import end_when_orphaned
from memserve.types import Role

JOIN_TIMEOUT_S = 30.0
"""How long the router may take to answer, once the model is loaded."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """An instance's place in a cluster."""

    role: Role
    name: str
    join: tuple[str, ...]
    """Where the router's mailbox may be, ``tcp://host:port`` each."""
    secret: str
    """The cluster's."""
    host: str = "127.0.0.1"
    """Where its own mailbox listens."""
    port: int = 0
    advertise: str | None = None
    """The host by which others reach it."""
    link: str = "auto"
    """How KV moves: ``auto``, ``shm`` or ``nixl``."""
    drain_s: float = 0.0
    """How long it may finish what it has when it is told to end; what is left then goes on elsewhere."""


def run_instance(
    options: EngineOptions, place: MemberOptions, on_ready: Callable[[], None], *, outlive: Path | None = None
) -> None:
    """Run one instance until it is drained, expelled for good or signalled; ``on_ready`` is called when it has joined.
    ``outlive``: the state folder of a router that it waits for when that is killed.

    Raises :class:`UserError` when the model cannot be served, no router answers, or the router refuses it.
    """
    me = Peer(place.name, new_generation())
    members: list[Member] = []
    if outlive is not None:
        end_when_orphaned(outlive, lambda: members[0].router if members else None)
    with objects_that_stay():
        parts = build_parts(options, me=me, role=place.role)
    member = _open_member(parts, place, me)
    members.append(member)
    patience_s = itertools.chain([place.drain_s], itertools.repeat(0.0))  # a second signal is meant
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: member.drain(next(patience_s)))
    try:
        member.start()
        member.wait_joined(JOIN_TIMEOUT_S)
        on_ready()
        member.wait()
    finally:
        member.close()


def die_with(parent_pid: int) -> None:
    """From now on this process is killed when its parent ends, however that ends, and even while it is stopped.

    The kernel watches the parent's *thread*: whoever starts instances keeps the thread that did.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it has ended already
        os._exit(1)


def _open_member(parts: Parts, place: MemberOptions, me: Peer) -> Member:
    geometry, arenas = parts.model.geometry, parts.device.shared_arenas
    return Member(
        parts.machine,
        parts.device,
        _introduce(parts, place, me),
        place.join,
        lambda me, on_message: ZmqMailbox(
            me, place.secret, place.host, place.port, on_message, advertise=place.advertise
        ),
        lambda on_pages: open_data_port(place.link, geometry, arenas, on_pages, place.advertise or place.host),
    )


def _introduce(parts: Parts, place: MemberOptions, me: Peer) -> PeerInfo:
    from memserve.model.loading.card import ModelCard

    config = parts.config
    return PeerInfo(
        peer=me,
        role=place.role,
        address="",  # the mailbox knows
        namespace=config.namespace,
        geometry=parts.model.geometry,
        hbm_blocks=config.pool.hbm_blocks,
        dram_blocks=config.pool.dram_blocks,
        context_tokens=parts.machine.context_tokens,
        caching=config.pool.caching,
        publishes_events=config.exchange.event_capacity > 0,
        model_card=ModelCard.of(parts.model, parts.costs).encode(),
    )
