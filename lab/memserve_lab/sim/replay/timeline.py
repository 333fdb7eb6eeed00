"""What every instance was doing, second by second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memserve.base.units import NS_PER_S
from memserve.kv.events import TierReport
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.replay.nodes import ReplayNode

LOOKS_MAX = 400
"""At this number every other sample is dropped, and samples become half as frequent."""


@dataclass(frozen=True, slots=True)
class Look:
    """One sample: all instances at one moment, in the order of the list of names."""

    at_s: float
    waiting: tuple[int, ...]
    running: tuple[int, ...]
    blocks_used: tuple[float, ...]
    """Share of HBM that holds KV, cached or in use."""
    busy: tuple[float, ...]
    """Share of the time since the last sample that the device worked."""
    served: int
    """Requests answered so far."""
    blocks: tuple[tuple[int, ...], ...] = ()
    """Of each instance: used, cached and free blocks of HBM, then of DRAM."""


class Timeline:
    """Samples a world at even distances, and changes nothing."""

    def __init__(
        self, clock: Clock, instances: Sequence[ReplayNode], answered: Callable[[], int], every_ns: int = NS_PER_S
    ) -> None:
        """``answered``: requests answered so far."""
        self._clock, self._instances, self._answered = clock, instances, answered
        self._every_ns = every_ns
        self._busy_ns: dict[str, int] = {}
        self._start_ns = self._last_ns = 0
        self.looks: list[Look] = []

    def begin_workload(self) -> None:
        """Start: now is second 0 of the workload."""
        self._start_ns = self._last_ns = self._clock.now
        self._clock.call_after(self._every_ns, self._look_again)

    def _look_again(self) -> None:
        self.record_sample()
        if len(self.looks) >= LOOKS_MAX:
            del self.looks[::2]
            self._every_ns *= 2
        self._clock.call_after(self._every_ns, self._look_again)

    def record_sample(self) -> None:
        """Record one sample."""
        now = self._clock.now
        if now <= self._last_ns:
            return
        waiting, running, used, busy, blocks = [], [], [], [], []
        for node in self._instances:
            in_line, at_work = node.machine.state.waiting_and_running()
            waiting.append(in_line)
            running.append(at_work)
            used.append(round(1 - node.machine.pool.blocks_free / node.host.setup.machine.hbm_blocks, 4))
            blocks.append(tuple(count for tier in node.machine.pool.report().tiers for count in _states(tier)))
            before = self._busy_ns.get(node.peer.name, 0)
            self._busy_ns[node.peer.name] = node.device.busy_ns
            busy.append(round(min(1.0, max(0, node.device.busy_ns - before) / (now - self._last_ns)), 4))
        at_s = round((now - self._start_ns) / NS_PER_S, 3)
        shares = tuple(used), tuple(busy)
        self.looks.append(Look(at_s, tuple(waiting), tuple(running), *shares, self._answered(), tuple(blocks)))
        self._last_ns = now


def padded(looks: Sequence[Look], instances: int) -> list[Look]:
    """``looks`` with nothing for those of ``instances`` that did not exist yet."""
    no_counts, nothing, no_blocks = (0,), (0.0,), ((0,) * 6,)
    return [
        replace(
            look, waiting=look.waiting + no_counts * more, running=look.running + no_counts * more,
            busy=look.busy + nothing * more, blocks_used=look.blocks_used + nothing * more,
            blocks=look.blocks + no_blocks * more,
        )
        for look, more in ((look, instances - len(look.waiting)) for look in looks)
    ]  # fmt: skip


def _states(tier: TierReport) -> tuple[int, int, int]:
    """Used, cached and free blocks: what could be evicted counts as cached."""
    cached = tier.blocks_evictable
    return tier.blocks_total - tier.blocks_free - cached, cached, tier.blocks_free
