"""How many instances there should be, by what the router sees: looks in, counts with their reasons out.

Nothing here starts or ends anything: a supervisor (``runtime/scaling.py``), Ray, or whatever reads ``--scale-file``
does, and drains what is to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memserve.cluster.report import InstanceView
from memserve.errors import check
from memserve.messages import Peer
from memserve.placement import ScalingOptions
from memserve.policy.scaling import WAIT_NS, RoleLoad, RoleScaling, Wanted
from memserve.types import Role
from memserve.units import NS_PER_S

LOOK_NS = NS_PER_S
"""Between two looks."""
SETTLE_NS = 60 * NS_PER_S
"""How long a decision may take to be carried out, until another one is made."""
BUSY_NS = 4 * NS_PER_S
"""Over which the share of a device's time is taken: instances tell their totals every two seconds."""
FULL = 0.05
"""Share of free blocks below which memory counts as full."""
READS_PROMPTS = (Role.PREFILL, Role.COLOCATED)


@dataclass(frozen=True, slots=True)
class Totals:
    """What an instance has counted since its start."""

    device_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0

    def since(self, earlier: Totals) -> Totals:
        """The difference."""
        names = self.__dataclass_fields__
        return Totals(**{name: max(0, getattr(self, name) - getattr(earlier, name)) for name in names})


@dataclass(frozen=True, slots=True)
class MemberLook:
    """One instance."""

    peer: Peer
    role: Role
    is_open: bool
    """Whether it takes requests."""
    requests: int = 0
    waiting: int = 0
    prompt_ns: int = 0
    """Estimated time to compute the prompts that it has."""
    kv_held: float = 0.0
    """Share of its KV memory that requests hold."""
    free: float = 1.0
    """Share of its KV memory that not even the cache uses."""
    totals: Totals | None = None
    """None: it has not told them yet."""

    @classmethod
    def of(cls, view: InstanceView, device_ns: int, stats: Any | None) -> MemberLook:
        """From what the router knows. ``stats``: an ``InstanceStats``; None: the instance has not told any."""
        held = 1.0 - view.load.hbm_blocks_available / view.hbm_blocks if view.hbm_blocks else 0.0
        plain = (view.peer, view.role, view.state == "live", view.requests, view.load.requests_waiting)
        if stats is None:
            return cls(*plain)
        met, tiers = stats.objectives, (stats.hbm, stats.dram)
        blocks = sum(tier.blocks_total for tier in tiers)
        return cls(
            *plain,
            view.prefill_tokens * stats.prefill_ns_per_token,
            max(0.0, held),
            sum(tier.blocks_free for tier in tiers) / blocks if blocks else 1.0,
            Totals(
                device_ns, stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens,
                met.ttft_met, met.ttft_missed, met.tpot_met, met.tpot_missed,
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """All instances at one moment, and what waits for one of them."""

    members: tuple[MemberLook, ...]
    unplaced: int = 0
    """Requests that no instance has, and that more instances could take."""
    prompt_tokens: int = 0
    """Of all requests so far."""
    new_tokens: float = 0.0
    """Of them: not even an unlimited cache would have had their KV."""


@dataclass(frozen=True, slots=True)
class ScaleRole:
    """There should be another number of instances of a role."""

    role: Role
    instances: int
    """Counted."""
    wanted: int
    why: str

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.role.value}: {self.instances} -> {self.wanted}, because {self.why}"


@dataclass(frozen=True, slots=True)
class RoleCount:
    """A role whose count follows the load, for metrics."""

    role: Role
    least: int
    most: int
    wanted: int
    """By the last decision; before the first one the least."""
    more: int
    """Decisions for more instances so far."""
    fewer: int


@dataclass(slots=True)
class _Known:
    """An instance at earlier looks."""

    totals: Totals
    busy_from_ns: int
    device_ns: int
    """At that time."""
    busy: float = 0.0


@dataclass(slots=True)
class _Reuse:
    """Prompt tokens of a time, and how many of them could have been cached."""

    prompt_tokens: int = 0
    new_tokens: float = 0.0
    attainable: float = 0.0
    """Share."""

    def look(self, look: ClusterLook) -> None:
        seen = look.prompt_tokens - self.prompt_tokens
        if seen > 0:
            self.attainable = min(1.0, max(0.0, 1.0 - (look.new_tokens - self.new_tokens) / seen))
        self.prompt_tokens, self.new_tokens = look.prompt_tokens, look.new_tokens


class Scaling:
    """Makes of each look what the policy of each role needs, and says which counts are to change. Deterministic."""

    def __init__(self, options: ScalingOptions, slo_ttft_ns: int | None = None) -> None:
        """``slo_ttft_ns``: within what time a first token is wanted."""
        self._roles = {
            role: RoleScaling(allowed, options.up_ns, options.down_ns, SETTLE_NS)
            for role, allowed in options.by_role().items()
        }
        self._wait_max_ns = WAIT_NS if slo_ttft_ns is None else max(1, slo_ttft_ns // 2)
        self._known: dict[Peer, _Known] = {}
        self._reuse = _Reuse()
        self._counts = {
            role: RoleCount(role, *allowed, allowed.least, 0, 0) for role, allowed in options.by_role().items()
        }

    def handle(self, look: ClusterLook, now: int) -> list[ScaleRole]:
        """Take a look at time ``now`` (ns) into account."""
        self._reuse.look(look)
        fresh = {member.peer: self._news(member, now) for member in look.members}
        self._known = {peer: known for peer, known in self._known.items() if peer in fresh}
        unplaced, orders = look.unplaced, []
        for role, policy in self._roles.items():
            members = [member for member in look.members if member.role is role]
            load = self._load(role, members, fresh, unplaced if role in READS_PROMPTS else 0)
            unplaced = 0 if role in READS_PROMPTS else unplaced
            found = policy.look(load, now)
            if found is not None:
                self._decided(role, found)
                orders.append(ScaleRole(role, found.instances, found.wanted, found.why))
        return orders

    def _decided(self, role: Role, found: Wanted) -> None:
        count, is_more = self._counts[role], found.wanted > found.instances
        more, fewer = count.more + is_more, count.fewer + (not is_more)
        self._counts[role] = replace(count, wanted=found.wanted, more=more, fewer=fewer)

    def counts(self) -> tuple[RoleCount, ...]:
        """What was decided so far, by role."""
        return tuple(self._counts.values())

    def _news(self, member: MemberLook, now: int) -> Totals:
        """What it has counted since the last look."""
        totals, known = member.totals, self._known.get(member.peer)
        if totals is None:
            return Totals()
        if known is None:
            self._known[member.peer] = _Known(totals, now, totals.device_ns)
            return Totals()
        news, known.totals = totals.since(known.totals), totals
        if now - known.busy_from_ns >= BUSY_NS:
            known.busy = min(1.0, (totals.device_ns - known.device_ns) / (now - known.busy_from_ns))
            known.busy_from_ns, known.device_ns = now, totals.device_ns
        return news

    def _load(self, role: Role, members: Iterable[MemberLook], fresh: Mapping[Peer, Totals], unplaced: int) -> RoleLoad:
        able = [member for member in members if member.is_open]
        news, count = [fresh[member.peer] for member in able], len(able)
        prompts = sum(one.prompt_tokens for one in news)
        late = sum(one.ttft_missed for one in news) if role in READS_PROMPTS else 0
        late += sum(one.tpot_missed for one in news) if role is not Role.PREFILL else 0
        met = sum(one.ttft_met for one in news) if role in READS_PROMPTS else 0
        met += sum(one.tpot_met for one in news) if role is not Role.PREFILL else 0
        queues = sum(member.requests for member in able) > count  # else nothing waits but for its own prompt
        lost = self._reuse.attainable * prompts - sum(one.cached_tokens for one in news)
        known = [self._known[member.peer] for member in able if member.peer in self._known]
        return RoleLoad(
            count,
            waiting=unplaced + sum(member.waiting for member in able),
            prompt_wait_ns=sum(member.prompt_ns for member in able) // count if queues and count else 0,
            wait_max_ns=self._wait_max_ns,
            busy=sum(one.busy for one in known) if role is Role.PREFILL else 0.0,
            kv_held=sum(member.kv_held for member in able),
            served_tokens=sum(one.prompt_tokens + one.generated_tokens for one in news),
            answers=late + met,
            late=late,
            prompt_tokens=prompts if role in READS_PROMPTS else 0,
            lost_tokens=max(0.0, lost) if role in READS_PROMPTS else 0,
            is_full=bool(able) and all(member.free < FULL for member in able),
        )

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a decision is outside of what is allowed."""
        for role, count in self._counts.items():
            check(count.least <= count.wanted <= count.most, "{} of {} are not allowed", count.wanted, role.value)
        check(all(0 <= known.busy <= 1 for known in self._known.values()), "a device was busy for longer than it was")
