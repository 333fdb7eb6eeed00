"""Curves from measurements (level 1): least squares of the *relative* error, with coefficients that are not negative.

Relative, since a prompt of 100 tokens shall be estimated as well as one of 8,000. Not negative, since only then more
work can never be estimated to take less time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memserve.errors import UserError
from memserve.policy.curves import CopyCurve, DecodeCurve, PrefillCurve, attended_pairs

_REFITS = 8
_FAR = 1.5
"""Errors beyond so many times the median one weigh less."""
_ERROR_MIN = 0.005

Curve = TypeVar("Curve", PrefillCurve, DecodeCurve, CopyCurve)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: the two arguments of a curve's ``ns``, and the time that it really took.

    Prefill: new tokens, cached tokens. Decode: batch, tokens attended to. Copies: bytes, pieces.
    """

    first: int
    second: int
    ns: int


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a curve foretells samples that it was not fitted to: relative errors, 0.1 = 10 %."""

    samples: int
    median_error: float
    worst_error: float


def fit_prefill(samples: Sequence[Sample]) -> PrefillCurve:
    """From samples of (new tokens, cached tokens). Raises :class:`UserError` for fewer than three."""
    rows = [(1, sample.first, attended_pairs(sample.first, sample.second)) for sample in samples]
    return PrefillCurve(*_coefficients(rows, samples))


def fit_decode(samples: Sequence[Sample]) -> DecodeCurve:
    """From samples of (batch, tokens attended to). Raises :class:`UserError` for fewer than three."""
    return DecodeCurve(*_coefficients([(1, sample.first, sample.second) for sample in samples], samples))


def fit_copy(samples: Sequence[Sample]) -> CopyCurve:
    """From samples of (bytes, pieces). Raises :class:`UserError` for fewer than three.

    When all pieces were of one size, bytes and pieces cannot be told apart: then bytes bear all of the cost.
    """
    one_size = len({sample.first * samples[0].second - samples[0].first * sample.second for sample in samples}) == 1
    rows = [(1, 0 if one_size else sample.second, sample.first) for sample in samples]
    return CopyCurve(*_coefficients(rows, samples))


def fit_held_out(samples: Sequence[Sample], fit: Callable[[Sequence[Sample]], Curve]) -> tuple[Curve, Quality]:
    """The curve through all samples, and how well one through two thirds of them foretells the rest.

    A third of the samples is left out, three times over, so that each is foretold once by a curve that has not seen it.
    The thirds run diagonally through a grid of any width, so that none of them is a whole row or column.
    """
    ordered = sorted(samples, key=lambda sample: (sample.first, sample.second))
    errors: list[float] = []
    for turn in range(3):
        curve = fit([sample for at, sample in enumerate(ordered) if (at + at // 3) % 3 != turn])
        unseen = [sample for at, sample in enumerate(ordered) if (at + at // 3) % 3 == turn]
        errors += [relative_error(curve, sample) for sample in unseen]
    return fit(ordered), Quality(len(errors), median(errors), max(errors))


def relative_error(curve: PrefillCurve | DecodeCurve | CopyCurve, sample: Sample) -> float:
    """How far the curve is from the sample, as a share of the sample."""
    return abs(curve.ns(sample.first, sample.second) - sample.ns) / sample.ns


def _coefficients(features: list[tuple[int, int, int]], samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Fitted again and again with less weight on what lies far off (Huber): one slow moment of the machine shall not
    bend the curve."""
    if len(samples) < 3 or any(sample.ns <= 0 for sample in samples):
        raise UserError(f"{len(samples)} samples cannot tell a curve", hint="measure at least three, all above zero")
    times = np.array([sample.ns for sample in samples], dtype=np.float64)
    relative = np.array(features, dtype=np.float64) / times[:, None]
    weights = np.ones(len(samples))
    for _ in range(_REFITS):
        found = _solve_not_negative(relative, weights)
        errors = np.abs(relative @ found - 1.0)
        usual = max(float(np.median(errors)), _ERROR_MIN) * _FAR
        weights = np.sqrt(np.minimum(1.0, usual / np.maximum(errors, 1e-12)))
    first, second, third = (float(value) for value in found)
    return first, second, third


def _solve_not_negative(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients >= 0 that bring ``rows @ coefficients`` closest to 1, the squares weighted by ``weights ** 2``.

    The best solution uses some subset of the columns and is a plain least-squares solution there; three columns have
    seven subsets.
    """
    columns = rows.shape[1]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    scaled = rows / scale * weights[:, None]
    best, best_loss = np.zeros(columns), float(np.square(weights).sum())
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part = scaled[:, chosen]
            solution = np.linalg.lstsq(part, weights, rcond=None)[0]
            loss = float(np.square(part @ solution - weights).sum())
            if (solution >= 0).all() and loss < best_loss:
                best, best_loss = np.zeros(columns), loss
                best[list(chosen)] = solution
    return np.asarray(best / scale)
