"""Where chance comes from: one generator for each purpose, all fixed by one seed (level 1)."""

from __future__ import annotations

import zlib

import numpy as np

Draws = np.random.Generator


def draws(seed: int, *purpose: str | int) -> Draws:
    """A generator of its own for ``(seed, purpose)``: drawing more for one purpose leaves the others as they were."""
    return np.random.default_rng([seed, *(zlib.crc32(str(part).encode()) for part in purpose)])


def lognormal_count(rng: Draws, *, median: float, spread: float, at_most: int) -> int:
    """A whole number of at least 1: lengths and turns of real traffic are roughly log-normal."""
    return int(min(max(1.0, np.round(rng.lognormal(np.log(median), spread))), at_most))
