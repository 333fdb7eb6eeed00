"""Counter-based random numbers: Philox-4x32-10, vectorised over rows (level 3).

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. No state: the number that a token is drawn with
depends on its sequence's seed, its index and its position only, never on who else is in the batch, and never on
whether the sequence was preempted or moved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

UInt64s = NDArray[np.uint64]


def philox4x32(counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[UInt64s, UInt64s]) -> tuple[UInt64s, ...]:
    """Four 32-bit words for each row. All arrays ``[n]`` uint64 holding 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniforms(seed: UInt64s, index: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in ``[0, 1)`` (53 random bits) a row, for the key ``(seed, index)`` and the counter ``position``."""
    position_bits, index_bits = position.astype(np.uint64), index.astype(np.uint64)
    counter = (position_bits & _LOW, position_bits >> _HALF, index_bits & _LOW, index_bits >> _HALF)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _HALF))
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
