"""The largest rate that a setting bears: queue bounded, SLO kept, found by bisection (level 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memserve.bench.load.record import RequestRecord
from memserve.bench.metrics import Figures, Slo, figures

GROWTH_MAX, SPARE_REQUESTS = 1.3, 2.0
"""A queue is bounded when its last third is at most so much longer, on average, than its middle third, plus so many.
One that grows steadily is 5/3 as long."""
STEPS_MAX = 24


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate, tried."""

    rate: float
    figures: Figures
    backlog_middle: float
    """Requests that had come and not ended, on average over the arrivals of the middle third."""
    backlog_last: float
    borne: bool
    why: str
    """Why it was not borne; empty when it was."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the search found for one setting."""

    setting: str
    rate: float | None
    """The largest rate that was borne; ``None``: none was."""
    probes: tuple[Probe, ...]
    partial: str | None = None


def judge(rate: float, records: Sequence[RequestRecord], slo: Slo, violations_max: float) -> Probe:
    """Whether ``rate`` was borne: the backlog does not grow, and all but ``violations_max`` of the requests kept it."""
    found = figures(records, slo=slo)
    middle, last = _thirds(backlog(records))
    why = []
    if last > GROWTH_MAX * middle + SPARE_REQUESTS:
        why.append(f"the queue grows: {middle:.1f}, then {last:.1f} requests")
    if found.slo_violations > violations_max:
        why.append(f"{found.slo_violations:.1%} of the requests miss the SLO")
    return Probe(rate, found, middle, last, not why, "; ".join(why))


def backlog(records: Sequence[RequestRecord]) -> list[int]:
    """At every arrival, in order: how many requests had come before and not ended yet."""
    came = sorted(record.scheduled_ns for record in records)
    ended = sorted(record.end_ns for record in records if record.end_ns is not None)
    gone, counts = 0, []
    for number, now_ns in enumerate(came):
        while gone < len(ended) and ended[gone] <= now_ns:
            gone += 1
        counts.append(number - gone)
    return counts


def _thirds(counts: Sequence[int]) -> tuple[float, float]:
    """Means of the middle and of the last third."""
    third = max(1, len(counts) // 3)
    middle, last = counts[third : 2 * third], counts[-third:]
    return sum(middle) / max(1, len(middle)), sum(last) / max(1, len(last))


def search(
    setting: str,
    try_rate: Callable[[float], Probe | None],
    *,
    start: float,
    precision: float = 0.1,
    lowest: float = 0.0,
) -> Capacity:
    """Double (or halve) from ``start`` until one rate is borne and one is not, then halve the gap between them, down to
    ``precision`` of the rate; nothing below ``lowest`` is tried. ``try_rate`` answers ``None`` to end the search."""
    probes: list[Probe] = []
    low: float | None = None
    high: float | None = None
    rate = start
    for _ in range(STEPS_MAX):
        probe = try_rate(rate)
        if probe is None:
            return Capacity(setting, low, tuple(probes), "the search was ended early")
        probes.append(probe)
        if probe.borne:
            low = rate if low is None else max(low, rate)
        else:
            high = rate if high is None else min(high, rate)
        if low is not None and high is not None and high - low <= precision * high:
            break
        rate = _next_rate(low, high)
        if rate < lowest:
            break
    return Capacity(setting, low, tuple(probes))


def _next_rate(low: float | None, high: float | None) -> float:
    if low is None:
        assert high is not None, "something was tried"
        return high / 2
    return low * 2 if high is None else (low + high) / 2
