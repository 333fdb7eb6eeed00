"""How many instances there should be, by what the router sees: looks in, counts with their reasons out.

Nothing here starts or ends anything: a supervisor (``host/autoscaling.py``), Ray, or whatever reads ``--scale-file``
does, and drains what is to go.

How many instances of a role there should be: what they have to do in, a count and its reason out.

::

    too much for n instances, for up_ns        -> n + 1; 2 n where it is twice too much
    little enough for n - 1, for down_ns       -> n - 1
    a change                                   -> both times begin again when its instances are there

What is too much is said by several signals, some of which do not say how much fewer instances could carry: the time
that a prompt waits may double with one instance less, or grow without limit. So the count that was too small is
remembered together with the tokens a second that were served then: it is not tried again until clearly less is asked
for. Under a constant load a count that has failed never comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memserve.base.deployment import Range, ScalingOptions
from memserve.base.errors import check
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.protocol.peers import Peer
from memserve.router.report import InstanceView

HIGH, LOW = 0.85, 0.6
"""Share of KV memory, or of device time, above which there is too much to do, and below which fewer can do it."""
WAITING_MAX = 2
"""Requests that may wait for each instance."""
WAIT_NS = NS_PER_S
"""Time that a prompt may wait to be computed, where its first token has no objective."""
LATE_MAX, LATE_FEW = 0.05, 0.01
"""Share of answers that may miss an objective, and the share that counts as none."""
LOST_MAX, LOST_FEW = 0.2, 0.1
"""Share of prompt tokens whose KV was there once, and had to be computed again because memory is full."""
SAMPLE_MIN, TOKENS_MIN = 5.0, 2000.0
"""Answers, and prompt tokens, on which a share is based."""
FADES = 0.9
"""What is left of a look's counts at the next one."""
MARGIN = 0.7
"""Share of the load at which a count was too small, up to which it is tried again."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """One look at all instances of a role that take requests."""

    instances: int
    waiting: int = 0
    """Requests that wait, at the instances or for one of them."""
    prompt_wait_ns: int = 0
    """Estimate of the time until an instance has computed the prompts that it has; the mean over instances."""
    wait_max_ns: int = WAIT_NS
    """What of it is allowed."""
    busy: float = 0.0
    """Device time since the last look, in instances: 0 to ``instances``. 0 where a device that is never idle may
    still have room, as in decoding."""
    kv_held: float = 0.0
    """KV memory that running requests hold, in instances: 0 to ``instances``."""
    served_tokens: float = 0.0
    """Prompt and generated tokens since the last look."""
    answers: int = 0
    """Tokens or requests with an objective since the last look."""
    late: int = 0
    """Of them: missed it."""
    prompt_tokens: float = 0.0
    """Since the last look."""
    lost_tokens: float = 0.0
    """Of them: an unlimited cache would have had their KV, and these instances did not."""
    is_full: bool = False
    """Whether the memory of the instances is full of KV, that of finished requests included."""


@dataclass(frozen=True, slots=True)
class InstancesWanted:
    """A decision: another count."""

    instances: int
    """Counted when it was made."""
    target: int
    why: str
    """A reason in words, with its numbers."""


@dataclass(frozen=True, slots=True)
class _Excess:
    """A signal above its limit."""

    times: float
    """The limit; at least 1."""
    why: str


class RoleScaling:
    """Decides for one role, look by look."""

    def __init__(self, allowed: Range, up_ns: int, down_ns: int, settle_ns: int) -> None:
        """``settle_ns``: how long instances that were asked for may take to come, or to go; then the decision counts
        as not carried out."""
        self._range, self._up_ns, self._down_ns, self._settle_ns = allowed, up_ns, down_ns, settle_ns
        self._requested: int | None = None
        self._requested_ns = 0
        self._full_ns: int | None = None  # since when there is too much to do
        self._full_tokens = 0.0  # served since then
        self._calm_ns: int | None = None  # since when fewer could do it
        #: counts that were too small, with the tokens a second that were served then
        self._failed: dict[int, float] = {}
        self._last_ns: int | None = None
        self._tokens_s = self._answers = self._late = self._prompts = self._lost = 0.0

    def observe_load(self, load: RoleLoad, now_ns: int) -> InstancesWanted | None:
        """Take a look into account. None: the count stays."""
        self._count_load(load, now_ns)
        count = load.instances
        if self._requested is not None:
            if count != self._requested and now_ns - self._requested_ns < self._settle_ns:
                return None
            self._requested = self._full_ns = self._calm_ns = None
            self._answers = self._late = self._prompts = self._lost = 0.0  # what fewer or more instances did
        if count > self._range.most:
            return self._request_count(count, self._range.most, f"at most {self._range.most} are allowed", now_ns)
        if count < self._range.least:  # what has died is started again by its supervisor
            return None
        worst = max(self._excesses_of(load), key=lambda excess: excess.times, default=None)
        if worst is not None and count < self._range.most:
            return self._decide_growth(load, worst, now_ns)
        self._full_ns = None
        return self._decide_shrink(load, now_ns) if worst is None else None

    def _count_load(self, load: RoleLoad, now_ns: int) -> None:
        if self._last_ns is not None and now_ns > self._last_ns:
            rate = load.served_tokens * NS_PER_S / (now_ns - self._last_ns)
            self._tokens_s += (rate - self._tokens_s) * (1 - FADES)
        self._last_ns = now_ns
        self._answers, self._late = FADES * self._answers + load.answers, FADES * self._late + load.late
        self._prompts, self._lost = FADES * self._prompts + load.prompt_tokens, FADES * self._lost + load.lost_tokens

    def _decide_growth(self, load: RoleLoad, worst: _Excess, now_ns: int) -> InstancesWanted | None:
        self._calm_ns, count = None, load.instances
        if self._full_ns is None:
            self._full_ns, self._full_tokens = now_ns, 0.0
        else:
            self._full_tokens += load.served_tokens
        full_ns = now_ns - self._full_ns
        if full_ns < self._up_ns:
            return None
        target = min(self._range.most, count * 2 if worst.times >= 2 else count + 1)
        self._failed[count] = max(self._tokens_s, self._full_tokens * NS_PER_S / full_ns if full_ns else 0.0)
        return self._request_count(count, target, worst.why, now_ns)

    def _decide_shrink(self, load: RoleLoad, now_ns: int) -> InstancesWanted | None:
        if load.instances <= self._range.least or not self._could_be_fewer(load):
            self._calm_ns = None
            return None
        self._calm_ns = now_ns if self._calm_ns is None else self._calm_ns
        if now_ns - self._calm_ns < self._down_ns:
            return None
        count = load.instances
        seconds = f"{self._down_ns / NS_PER_S:g} s"
        return self._request_count(
            count, count - 1, f"{count - 1} could have done what came in the last {seconds}", now_ns
        )

    def _request_count(self, count: int, target: int, why: str, now_ns: int) -> InstancesWanted:
        self._requested, self._requested_ns = target, now_ns
        self._full_ns = self._calm_ns = None
        return InstancesWanted(count, target, why)

    def _excesses_of(self, load: RoleLoad) -> Iterator[_Excess]:
        count = load.instances
        waiting = load.waiting / (WAITING_MAX * max(1, count))
        yield from _above(waiting, f"{load.waiting} requests wait, {WAITING_MAX} for each instance are allowed")
        wait_s, most_s = load.prompt_wait_ns / NS_PER_S, load.wait_max_ns / NS_PER_S
        yield from _above(wait_s / most_s, f"prompts wait for {wait_s:.2f} s, {most_s:.2f} s are allowed")
        if count:
            yield from _above(load.busy / count / HIGH, f"the devices work {load.busy / count:.0%} of the time")
            yield from _above(load.kv_held / count / HIGH, f"requests hold {load.kv_held / count:.0%} of KV memory")
        late, lost = self._late_share, self._lost_share
        yield from _above(late / LATE_MAX, f"{late:.0%} of answers miss their objective")
        if load.is_full:
            yield from _above(lost / LOST_MAX, f"{lost:.0%} of prompt tokens were cached once, and memory is full")

    @property
    def _late_share(self) -> float:
        return self._late / self._answers if self._answers >= SAMPLE_MIN else 0.0

    @property
    def _lost_share(self) -> float:
        return self._lost / self._prompts if self._prompts >= TOKENS_MIN else 0.0

    def _could_be_fewer(self, load: RoleLoad) -> bool:
        fewer = load.instances - 1
        if load.waiting or max(load.busy, load.kv_held) > LOW * fewer:
            return False
        if load.prompt_wait_ns * load.instances > load.wait_max_ns // 2 * fewer:
            return False
        if self._late_share > LATE_FEW or (load.is_full and self._lost_share > LOST_FEW):
            return False
        return all(self._tokens_s <= MARGIN * failed for count, failed in self._failed.items() if count >= fewer)


def _above(times: float, why: str) -> Iterator[_Excess]:
    if times > 1:
        yield _Excess(times, why)


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

    def increase_since(self, earlier: Totals) -> Totals:
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
    def from_view(cls, view: InstanceView, device_ns: int, stats: Any | None) -> MemberLook:
        """From what the router knows. ``stats``: an ``InstanceStats``; None: the instance has not told any."""
        held_share = 1.0 - view.load.hbm_blocks_available / view.hbm_blocks if view.hbm_blocks else 0.0
        plain = (view.peer, view.role, view.state == "live", view.requests, view.load.requests_waiting)
        if stats is None:
            return cls(*plain)
        met, tiers = stats.objectives, (stats.hbm, stats.dram)
        blocks = sum(tier.blocks_total for tier in tiers)
        return cls(
            *plain,
            view.prefill_tokens * stats.prefill_ns_per_token,
            max(0.0, held_share),
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
    target: int
    why: str

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.role.value}: {self.instances} -> {self.target}, because {self.why}"


@dataclass(frozen=True, slots=True)
class RoleCount:
    """A role whose count follows the load, for metrics."""

    role: Role
    least: int
    most: int
    target: int
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

    def update_share(self, look: ClusterLook) -> None:
        tokens = look.prompt_tokens - self.prompt_tokens
        if tokens > 0:
            self.attainable = min(1.0, max(0.0, 1.0 - (look.new_tokens - self.new_tokens) / tokens))
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
        self._earlier: dict[Peer, _Known] = {}
        self._reuse = _Reuse()
        self._counts = {
            role: RoleCount(role, *allowed, allowed.least, 0, 0) for role, allowed in options.by_role().items()
        }

    def handle(self, look: ClusterLook, now_ns: int) -> list[ScaleRole]:
        """Take a look at time ``now_ns`` (ns) into account."""
        self._reuse.update_share(look)
        fresh = {member.peer: self._new_totals(member, now_ns) for member in look.members}
        self._earlier = {peer: earlier for peer, earlier in self._earlier.items() if peer in fresh}
        unplaced, orders = look.unplaced, []
        for role, policy in self._roles.items():
            members = [member for member in look.members if member.role is role]
            load = self._role_load(role, members, fresh, unplaced if role in READS_PROMPTS else 0)
            unplaced = 0 if role in READS_PROMPTS else unplaced
            decision = policy.observe_load(load, now_ns)
            if decision is not None:
                self._record_decision(role, decision)
                orders.append(ScaleRole(role, decision.instances, decision.target, decision.why))
        return orders

    def _record_decision(self, role: Role, decision: InstancesWanted) -> None:
        count, is_more = self._counts[role], decision.target > decision.instances
        more, fewer = count.more + is_more, count.fewer + (not is_more)
        self._counts[role] = replace(count, target=decision.target, more=more, fewer=fewer)

    def role_counts(self) -> tuple[RoleCount, ...]:
        """What was decided so far, by role."""
        return tuple(self._counts.values())

    def _new_totals(self, member: MemberLook, now_ns: int) -> Totals:
        """What it has counted since the last look."""
        totals, earlier = member.totals, self._earlier.get(member.peer)
        if totals is None:
            return Totals()
        if earlier is None:
            self._earlier[member.peer] = _Known(totals, now_ns, totals.device_ns)
            return Totals()
        increase, earlier.totals = totals.increase_since(earlier.totals), totals
        if now_ns - earlier.busy_from_ns >= BUSY_NS:
            earlier.busy = min(1.0, (totals.device_ns - earlier.device_ns) / (now_ns - earlier.busy_from_ns))
            earlier.busy_from_ns, earlier.device_ns = now_ns, totals.device_ns
        return increase

    def _role_load(
        self, role: Role, members: Iterable[MemberLook], fresh: Mapping[Peer, Totals], unplaced: int
    ) -> RoleLoad:
        able = [member for member in members if member.is_open]
        increases, count = [fresh[member.peer] for member in able], len(able)
        prompts = sum(entry.prompt_tokens for entry in increases)
        late = sum(entry.ttft_missed for entry in increases) if role in READS_PROMPTS else 0
        late += sum(entry.tpot_missed for entry in increases) if role is not Role.PREFILL else 0
        met = sum(entry.ttft_met for entry in increases) if role in READS_PROMPTS else 0
        met += sum(entry.tpot_met for entry in increases) if role is not Role.PREFILL else 0
        queues = sum(member.requests for member in able) > count  # else nothing waits but for its own prompt
        lost = self._reuse.attainable * prompts - sum(entry.cached_tokens for entry in increases)
        earlier = [self._earlier[member.peer] for member in able if member.peer in self._earlier]
        return RoleLoad(
            count,
            waiting=unplaced + sum(member.waiting for member in able),
            prompt_wait_ns=sum(member.prompt_ns for member in able) // count if queues and count else 0,
            wait_max_ns=self._wait_max_ns,
            busy=sum(entry.busy for entry in earlier) if role is Role.PREFILL else 0.0,
            kv_held=sum(member.kv_held for member in able),
            served_tokens=sum(entry.prompt_tokens + entry.generated_tokens for entry in increases),
            answers=late + met,
            late=late,
            prompt_tokens=prompts if role in READS_PROMPTS else 0,
            lost_tokens=max(0.0, lost) if role in READS_PROMPTS else 0,
            is_full=bool(able) and all(member.free < FULL for member in able),
        )

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a decision is outside of what is allowed."""
        for role, count in self._counts.items():
            check(count.least <= count.target <= count.most, "{} of {} are not allowed", count.target, role.value)
        check(
            all(0 <= earlier.busy <= 1 for earlier in self._earlier.values()),
            "a device was busy for longer than it was",
        )
