"""Drawing tokens from logits: temperature, top-k, top-p, min-p, by one uniform number per row.

Inverse transform sampling over the tokens in order of their id: the number decides, and the result moves only if
rounding moves a boundary across it. The number comes from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) and needs no state: it depends on the sequence's seed, its index and the token's position,
never on other rows of the batch, and never on whether the sequence was preempted or moved. So from equal logits a
sequence draws equal tokens, alone and in any batch.

The rule is implemented twice: :func:`draw` in torch, for any device, and :func:`draw_native` in C++, much faster on a
CPU. Both sum in float64 over float32 weights; they give the same token unless the uniform number, or the
mass at which top-p ends, lies within float32 rounding (1e-6 of the mass) of a boundary between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from memserve import _kernels

_HEAD_TOKENS = 256
"""Top-k and top-p usually keep fewer; rows that keep more are sorted whole."""
_CHUNK_TOKENS = 256
_DRAWN_ROWS = 4
"""Rows drawn at a time on a CPU, so that their weights stay in its cache."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How each row is drawn. All tensors ``[n]`` on the logits' device."""

    temperature: Tensor  # float32, > 0
    top_k: Tensor  # int64, 0 = off
    top_p: Tensor  # float32, 1 = off
    min_p: Tensor  # float32, 0 = off
    uniform: Tensor  # float64 in [0, 1)

    def rows(self, rows: Tensor | slice) -> Truncation:
        """The part of these ``rows``."""
        return Truncation(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def draw(logits: Tensor, how: Truncation) -> Tensor:
    """One token per row: ``logits [n, vocab]`` float32 -> ``[n]`` int64.

    Order of the filters: temperature, top-k, top-p over what top-k kept, min-p relative to the best token.
    """
    if logits.device.type == "cpu" and len(logits) > _DRAWN_ROWS:
        pieces = [slice(first, first + _DRAWN_ROWS) for first in range(0, len(logits), _DRAWN_ROWS)]
        return torch.cat([draw(logits[piece], how.rows(piece)) for piece in pieces])
    weights = logits - logits.amax(-1, keepdim=True)  # before the temperature: no overflow however small that is
    weights = weights.div_(how.temperature[:, None]).exp_()
    ranked = (how.top_k > 0) | (how.top_p < 1)
    if bool(ranked.all()):
        return _draw_ranked(weights, how)
    tokens = _draw_plain(weights, how)
    if bool(ranked.any()):
        rows = ranked.nonzero()[:, 0]
        tokens[rows] = _draw_ranked(weights[rows], how.rows(rows))
    return tokens


def draw_unseen(logits: Tensor, how: Truncation, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """As :func:`draw`, decided by the host's own ``top_k [n]`` and ``top_p [n]`` (those of ``how``): it never waits for
    the device, which may compute more for it."""
    weights = logits - logits.amax(-1, keepdim=True)
    weights = weights.div_(how.temperature[:, None]).exp_()
    ranked = (top_k > 0) | (top_p < 1)
    kept = weights.masked_fill(weights < how.min_p[:, None], 0.0)
    plain = _invert(kept, how.uniform)
    if not ranked.any():
        return plain
    few = (top_k > 0) & (top_k <= _HEAD_TOKENS)
    width = min(_HEAD_TOKENS if few[ranked].all() else weights.shape[-1], weights.shape[-1])
    drawn, _ = _draw_head(weights, how, width)
    return torch.where((how.top_k > 0) | (how.top_p < 1), drawn, plain)


def draw_native(logits: Tensor, rows: Tensor, how: Truncation) -> NDArray[np.int64]:
    """One token for each of ``rows [n]`` int64 of ``logits [r, vocab]`` (float32, CPU), drawn as ``how`` says.

    A row without a possible token gives token 0. Among equal weights the filters keep the lower id.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    columns = (rows, how.temperature, how.top_k, how.top_p, how.min_p, how.uniform)
    row, temperature, top_k, top_p, min_p, uniform = (column.contiguous() for column in columns)
    tokens = np.empty(len(rows), np.int64)
    _kernels.draw(
        logits.data_ptr(), logits.stride(0), logits.shape[1], row.data_ptr(), temperature.data_ptr(), top_k.data_ptr(),
        top_p.data_ptr(), min_p.data_ptr(), uniform.data_ptr(), tokens.ctypes.data, len(tokens),
    )  # fmt: skip
    return tokens


def _draw_plain(weights: Tensor, how: Truncation) -> Tensor:
    if bool((how.min_p > 0).any()):
        weights = weights.masked_fill(weights < how.min_p[:, None], 0.0)
    return _invert(weights, how.uniform)


def _draw_ranked(weights: Tensor, how: Truncation) -> Tensor:
    tokens, done = _draw_head(weights, how, min(_HEAD_TOKENS, weights.shape[-1]))
    if not bool(done.all()):
        rows = (~done).nonzero()[:, 0]
        tokens[rows], _ = _draw_head(weights[rows], how.rows(rows), weights.shape[-1])
    return tokens


def _draw_head(weights: Tensor, how: Truncation, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the ``width`` best tokens; also says, for each row, whether those are all that the filters keep."""
    vocab = weights.shape[-1]
    values, ids = weights.topk(width, dim=-1)
    limit = torch.where(how.top_k > 0, how.top_k.clamp(max=vocab), vocab)
    before = values.double().cumsum(-1)
    limit_mass = before.gather(1, (limit.clamp(max=width) - 1)[:, None])[:, 0]
    mass = torch.where(limit <= width, limit_mass, weights.sum(-1, dtype=torch.float64))
    before -= values
    keep = (torch.arange(width, device=weights.device) < limit[:, None]) & (values >= how.min_p[:, None])
    keep &= (before < (how.top_p * mass)[:, None]) | (how.top_p >= 1)[:, None]
    keep[:, 0] = True
    done = (limit <= width) | ((limit == vocab) & ~keep[:, -1])
    ordered, order = torch.where(keep, ids, vocab).sort(dim=-1)  # back to the order of ids
    kept = torch.where(keep, values, 0.0).gather(1, order)
    return ordered.gather(1, _invert(kept, how.uniform)[:, None])[:, 0], done


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index where the cumulated weight exceeds ``uniform`` of the total, by chunk first, then inside it."""
    count, width = weights.shape
    if width <= _CHUNK_TOKENS:
        cumulated = weights.cumsum(-1, dtype=torch.float64)
        return _first_beyond(cumulated, uniform * cumulated[:, -1])
    chunks = F.pad(weights, (0, -width % _CHUNK_TOKENS)).view(count, -1, _CHUNK_TOKENS)
    sums = chunks.sum(-1).double()
    ends = sums.cumsum(-1)
    target = uniform * ends[:, -1]
    chunk = _first_beyond(ends, target)
    rest = target - (ends - sums).gather(1, chunk[:, None])[:, 0]
    inside = chunks[torch.arange(count, device=weights.device), chunk]
    return chunk * _CHUNK_TOKENS + _first_beyond(inside.cumsum(-1, dtype=torch.float64), rest)


def _first_beyond(cumulated: Tensor, target: Tensor) -> Tensor:
    """The first index with ``cumulated [n, w] > target [n]``. ``target`` is kept below the total, so that no index
    without weight is found."""
    below = torch.nextafter(cumulated[:, -1], torch.zeros_like(target))
    return torch.searchsorted(cumulated, torch.minimum(target, below)[:, None], right=True)[:, 0]


# -- uniform numbers

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
    """One number in ``[0, 1)`` (53 random bits) per row, for the key ``(seed, index)`` and the counter ``position``."""
    position_bits, index_bits = position.astype(np.uint64), index.astype(np.uint64)
    counter = (position_bits & _LOW, position_bits >> _HALF, index_bits & _LOW, index_bits >> _HALF)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _HALF))
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
