"""What an engine counts about itself: the scheduler's own time beside the device's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import msgspec

from memserve.host.supervisor import ChildStats
from memserve.instance.stats import InstanceStats
from memserve.journal.keeper import Durability
from memserve.router.members.autoscaling import RoleCount
from memserve.router.report import ClusterStats, InstanceView
from memserve.transport.outbound import MailboxCounters


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals count from the engine's start."""

    steps: int = 0
    machine_ns: int = 0
    """Time the instance machine took to think, in total."""
    device_ns: int = 0
    """Time the device worked, in total."""
    machine_step_ns: int = 0
    """Median thinking time a step, over the last steps."""
    device_step_ns: int = 0
    """Median device time a step, over the last steps."""
    instance: InstanceStats | None = None
    """The machine's own counters and its pool report."""
    resident_bytes: int = 0
    """What its process has resident, shared maps included."""
    bound_bytes: int = 0
    """What it should have at most; 0: not known."""
    read_at_ns: int = 0
    """Unix time at which all of this was read; 0: not known."""

    @property
    def scheduler_share(self) -> float:
        """Thinking time as a share of the device's time, over everything so far."""
        return self.machine_ns / self.device_ns if self.device_ns else 0.0

    @property
    def serving(self) -> bool:
        """Whether a request could be run now."""
        return True

    def encode(self) -> bytes:
        """As msgpack, for a heartbeat."""
        return msgspec.msgpack.encode(self)


@dataclass(frozen=True, slots=True)
class MemberStats:
    """What the router knows of one instance."""

    view: InstanceView
    engine: EngineStats | None
    """As its last heartbeat with statistics said."""
    store: Mapping[str, int] = field(default_factory=dict)
    """The same of a store: sizes and totals by name."""


@dataclass(frozen=True, slots=True)
class RouterStats(EngineStats):
    """A cluster's statistics: the instances' added up (step times: of the slowest), and the router's own."""

    cluster: ClusterStats | None = None
    router_ns: int = 0
    """Time the cluster machine took to think, in total."""
    members: tuple[MemberStats, ...] = ()
    children: Mapping[str, ChildStats] = field(default_factory=dict)
    """Name -> what became of the process, for the instances that this host runs."""
    scaling: tuple[RoleCount, ...] = ()
    """Roles whose count follows the load."""
    mailbox: MailboxCounters = field(default_factory=MailboxCounters)
    metadata: Durability = field(default_factory=Durability)

    @classmethod
    def from_cluster(cls, cluster: ClusterStats, views: Sequence[InstanceView], router_ns: int) -> RouterStats:
        """Put together what the router's machine says of itself and of its members."""
        members = tuple(
            MemberStats(view, None, _decode_numbers(view.stats))
            if not view.role.has_model
            else MemberStats(view, _decode_engine_stats(view.stats))
            for view in views
        )
        engines = [member.engine for member in members if member.engine is not None]
        total = reduce(_add_stats, engines, EngineStats(instance=InstanceStats()))
        sums = {part.name: getattr(total, part.name) for part in dataclasses.fields(EngineStats)}
        return cls(**sums, cluster=cluster, router_ns=router_ns, members=members)

    @property
    def serving(self) -> bool:
        """Whether there is a member that takes new requests."""
        return any(member.view.state == "live" and member.view.role.has_model for member in self.members)


_NOT_ADDITIVE = ("machine_step_ns", "device_step_ns", "prefill_ns_per_token", "read_at_ns")
"""Medians, means and a moment: of several instances the slowest is told, and the last."""


# Made here, in one thread: two that decode a dataclass for the first time at once end the process (msgspec 0.22).
_DECODER = msgspec.msgpack.Decoder(EngineStats)


def _decode_engine_stats(stats: bytes) -> EngineStats | None:
    try:
        return _DECODER.decode(stats) if stats else None
    except msgspec.MsgspecError:
        return None  # of another version: the statistics of the others are still told


def _decode_numbers(stats: bytes) -> dict[str, int]:
    try:
        return msgspec.msgpack.decode(stats, type=dict[str, int]) if stats else {}
    except msgspec.MsgspecError:
        return {}


def _add_stats(first: Any, second: Any) -> Any:
    """The sum of two statistics of one kind, field by field."""
    if second is None:
        return first
    if isinstance(first, dict):
        return {key: first.get(key, 0) + second.get(key, 0) for key in [*first, *(k for k in second if k not in first)]}
    if not dataclasses.is_dataclass(first):
        return first + second
    sums = {}
    for part in dataclasses.fields(first):
        first_value, second_value = getattr(first, part.name), getattr(second, part.name)
        sums[part.name] = (
            max(first_value, second_value) if part.name in _NOT_ADDITIVE else _add_stats(first_value, second_value)
        )
    kind: Any = type(first)
    return kind(**sums)
