"""What ``memserve bench cost`` finds (level 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from memserve import __version__
from memserve.bench.sheet import Spent

HBM, DRAM = "HBM", "DRAM"


@dataclass(frozen=True, slots=True)
class Foretold:
    """One measurement that the curves have not seen, beside what they say."""

    curve: str
    """``prefill``, ``prefill from DRAM``, ``prefill in batches``, ``decode``, ``swap_in``, ``swap_out``, ``same_host``
    or ``network``."""
    expected_ns: int
    spent: Spent
    batch: int = 1
    tokens: int = 0
    """Of the prompt, or attended to by each sequence."""
    cached: int = 0
    """Of the prompt's tokens."""
    blocks: int = 0
    """Moved in all."""
    pieces: int = 0

    @property
    def error(self) -> float:
        """What the curve says too much, as a share of the measured time."""
        return (self.expected_ns - self.spent.median_ns) / self.spent.median_ns

    @property
    def cached_ratio(self) -> float:
        """Of the prompt."""
        return self.cached / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well a curve foretells: relative errors, 0.1 = 10 %."""

    points: int
    median_error: float
    p90_error: float
    worst_error: float
    bias: float
    """The median with its sign: above zero, the curve says too much."""


def accuracy(points: Sequence[Foretold]) -> dict[str, Accuracy]:
    """By curve, in the order in which they were measured."""
    found = {}
    for curve in dict.fromkeys(point.curve for point in points):
        errors = [point.error for point in points if point.curve == curve]
        sizes = [abs(error) for error in errors]
        p90 = float(np.percentile(sizes, 90))
        found[curve] = Accuracy(len(sizes), median(sizes), p90, max(sizes), median(errors))
    return found


@dataclass(slots=True)
class CostResults:
    """A whole run; ``points`` grow as it goes."""

    command: str
    profile: dict[str, Any] = field(default_factory=dict)
    """As ``memserve profile`` writes it: samples, coefficients, their quality."""
    points: list[Foretold] = field(default_factory=list)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    saved: str | None = None
    """Where the profile is kept, which ``serve`` and ``instance`` read."""
    model: str = ""
    block_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    partial: str | None = None
    version: str = __version__
