"""Contenders in turns, and figures of rounds: a machine's speed changes from minute to minute.

In each round every contender is measured once, and each round begins with another one. A figure is the median of the
rounds; a ratio is the median of the rounds' ratios, so that a slow round changes both of its sides.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
median, mean = statistics.median, statistics.fmean


def turns(rounds: int, contenders: Iterable[T], *, warm: int = 0) -> Iterator[tuple[int, T]]:
    """Number of the round, and contender. Rounds below 0 warm up: there are ``warm`` of them."""
    line = list(contenders)
    for number in range(-warm, rounds):
        place = number % len(line) if line else 0
        for contender in line[place:] + line[:place]:
            yield number, contender


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measured(contenders: Mapping[str, Callable[[], object]], rounds: int, *, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of each contender, round by round."""
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for number, name in turns(rounds, contenders, warm=warm):
        spent_s = seconds(contenders[name])
        if number >= 0:
            spent[name].append(spent_s)
    return spent


class Samples(defaultdict[Any, list[float]]):
    """Values by contender, or by whatever key, in the order of the rounds."""

    def __init__(self) -> None:
        super().__init__(list)

    def median(self, key: Any) -> float:
        """Of the rounds."""
        return median(self[key])

    def ratio(self, key: Any, base: Any) -> float:
        """See :func:`ratio`."""
        return ratio(self[key], self[base])


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round."""
    return [value / base_value for value, base_value in zip(values, base, strict=True)]


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return median(ratios(values, base))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """A quarter of the values lies below the first, half below the second, three quarters below the third."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return ordered[quarter], median(ordered), ordered[-1 - quarter]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each field of rows that have the same."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


def spread(values: Sequence[float], text: str = "{:.3f}") -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = (text.format(value) for value in quartiles(values))
    return f"{middle} ({low} to {high})"


class Timer:
    """Times single calls: by the clock, and this thread's CPU time, which other processes disturb less."""

    def __init__(self) -> None:
        self.us: list[float] = []
        self.cpu_us: list[float] = []

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        """``call(*args)``, timed."""
        cpu_begin_ns = time.thread_time_ns()
        begin_ns = time.perf_counter_ns()
        result = call(*args)
        end_ns = time.perf_counter_ns()
        self.cpu_us.append((time.thread_time_ns() - cpu_begin_ns) / 1e3)
        self.us.append((end_ns - begin_ns) / 1e3)
        return result

    def record(self, op: str, **extra: Any) -> dict[str, Any]:
        """Median, p99 and maximum by the clock, and p99 of the thread's own time."""
        figures = {
            "median_us": median(self.us), "p99_us": percentile(self.us, 0.99), "max_us": max(self.us),
            "cpu_p99_us": percentile(self.cpu_us, 0.99),
        }  # fmt: skip
        rounded = {name: round(value, 2) for name, value in figures.items()}
        return {"op": op, **rounded, "n": len(self.us), **extra}
