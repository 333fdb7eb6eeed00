"""Curves fitted by the native core and by numpy's least squares, over each subset of the coefficients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from memserve._core import fit_curve

Floats = NDArray[np.float64]


def solve_not_negative(rows: Floats, weights: Floats) -> Floats:
    """Coefficients >= 0 that bring ``rows @ coefficients`` closest to 1, the squares weighted by ``weights ** 2``."""
    scale = np.maximum(rows.max(axis=0), 1e-300)
    scaled, best, best_loss = rows / scale * weights[:, None], np.zeros(3), float(np.square(weights).sum())
    for subset in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        solution = np.linalg.lstsq(scaled[:, subset], weights, rcond=None)[0]
        loss = float(np.square(scaled[:, subset] @ solution - weights).sum())
        if (solution >= 0).all() and loss < best_loss:
            best, best_loss = np.zeros(3), loss
            best[subset] = solution
    return best / scale


def fit(features: Floats, times_ns: Floats) -> Floats:
    """As ``fit_curve``."""
    relative, weights = features / times_ns[:, None], np.ones(len(times_ns))
    for _ in range(8):
        coefficients = solve_not_negative(relative, weights)
        errors = np.abs(relative @ coefficients - 1.0)
        usual = max(float(np.median(errors)), 0.005) * 1.5
        weights = np.sqrt(np.minimum(1.0, usual / np.maximum(errors, 1e-12)))
    return coefficients


@pytest.mark.parametrize("truth", [*itertools.product((0.0, 1e6), (-3e4, 0.0, 2e5), (-40.0, 0.0, 30.0))])
def test_curves_are_those_of_numpys_least_squares(truth: tuple[float, float, float]) -> None:
    """Some coefficients would be negative, some columns say nothing, and some times are far off."""
    rng = np.random.default_rng(7)
    for count in (3, 4, 10, 64):
        features = np.stack([np.ones(count), rng.integers(1, 9, count), rng.integers(10, 3000, count)], 1)
        for silent in (None, 0, 1, 2):
            if silent is not None:
                features = features * (np.arange(3) != silent)
            times_ns = np.maximum(features @ np.array(truth) + 2e5, 1e3) * rng.uniform(0.8, 1.6, count)
            times_ns[0] *= 5
            found, expected = np.array(fit_curve(features, times_ns)), fit(features, times_ns)
            assert (found >= 0).all()
            assert features @ found == pytest.approx(features @ expected, rel=1e-9)


def test_cost_of_features_that_are_alike_is_shared_or_the_firsts() -> None:
    """A batch of one size: the times cannot say what a step costs and what a row does."""
    features = np.stack([np.ones(20), np.full(20, 4.0), np.arange(20.0)], 1)
    assert fit_curve(features, 1e6 + 50 * features[:, 2]) == pytest.approx((5e5, 1.25e5, 50))
    assert fit_curve(features, 1e6 - 50 * features[:, 2])[1:] == (0, 0)
    with pytest.raises(ValueError):
        fit_curve(features, np.ones(19))
