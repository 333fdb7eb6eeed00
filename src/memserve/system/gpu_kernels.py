"""Bytes of KV on a GPU: copies of pages, and the seal of ``src/core/transfer/seal_sums.h``, with or without a copy on
the way.

Sources and targets may lie in the device's memory, in that of another process (mapped), or in pinned memory of the
host. Importing this module needs the package ``triton``; ``TRITON_INTERPRET=1`` runs its kernels on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import check
from memserve.base.units import ceil_div
from memserve.system.triton_bytes import copy_rows_kernel, seal_kernel

_GOLDEN = 0x9E3779B97F4A7C15
_WORDS = 1024  # 8 bytes each, that a program copies at a time
_STRIPES = 128  # of 64 bytes, that a program seals at a time
_TURNS = 8  # such pieces of a program


def scatter(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``scatter`` of the seal's C++: a counter through a bijective mixer. ``[...]`` uint64."""
    with np.errstate(over="ignore"):
        x = x * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


KEYS = scatter(np.arange(1, 9, dtype=np.uint64)).view(np.int64)
"""Of the eight lanes."""


def copy_rows(target: Tensor, source: Tensor, dst: Tensor, src: Tensor) -> None:
    """``target[dst[i]] = source[src[i]]``: rows of bytes ``[n, bytes]``, contiguous; ``dst``, ``src`` int32 on the
    device. No two rows of ``dst`` are equal, and none is read."""
    check(target.shape[1] == source.shape[1] and target.shape[1] % 8 == 0, "rows of whole words, equally long")
    words = target.shape[1] // 8
    if len(dst):
        copy_rows_kernel[(len(dst), ceil_div(words, _WORDS))](
            target.view(torch.int64), source.view(torch.int64), dst, src, words, WORDS=_WORDS
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of ranges, equally long, ``[n]`` each."""

    piece_bytes: int
    src: NDArray[np.int64]
    """Addresses that the device reads."""
    dst: NDArray[np.int64] | None
    """Addresses that it writes; None: nothing is copied."""
    begins: NDArray[np.int64]
    """Bytes from the begin of the range that a piece is of."""
    owners: NDArray[np.int64]
    """Which range that is."""


class Sealing:
    """Seals that a stream computes: read them when what was enqueued is done."""

    def __init__(self, batches: Sequence[Batch], count: int, range_bytes: int, device: torch.device) -> None:
        """Enqueue it in the stream in use: the seals of ``count`` ranges, whose pieces are in ``batches``, each word
        once. Pieces with a target are copied there on the way. Addresses are of this process: memory of its devices, of
        other processes' (mapped), or pinned memory of the host."""
        check(range_bytes > 0 and range_bytes % 8 == 0, f"ranges of whole words, not of {range_bytes} bytes")
        self._range_bytes, self._device = range_bytes, device
        self._lanes = torch.zeros((count, 16), dtype=torch.int64, device=device)
        for batch in batches:
            if len(batch.src):
                self._enqueue_batch(batch)

    def _enqueue_batch(self, batch: Batch) -> None:
        dst = batch.src if batch.dst is None else batch.dst
        places = np.stack((batch.src, dst, batch.begins))
        check(not (places % 8).any() and batch.piece_bytes % 8 == 0, "pieces begin and end at whole words")
        count, words = len(batch.src), batch.piece_bytes // 8
        stripes = ceil_div(words + int((batch.begins // 8 % 8).max()), 8)
        parts = ceil_div(stripes, _STRIPES * _TURNS)
        places[2] //= 8
        inputs = _to_device(torch.from_numpy(np.concatenate((places.ravel(), batch.owners, KEYS))), self._device)
        sums = torch.empty((count, parts, 16), dtype=torch.int64, device=self._device)
        seal_kernel[(count, parts)](
            inputs, inputs[count:], inputs[2 * count :], inputs[4 * count :], sums, words, _GOLDEN - (1 << 64),
            STRIPES=_STRIPES, TURNS=_TURNS, COPIES=batch.dst is not None,
        )  # fmt: skip
        self._lanes.index_add_(0, inputs[3 * count : 4 * count], sums.sum(1))

    def read_checksums(self) -> NDArray[np.uint64]:
        """The seals ``[n]``; waits for the stream in use."""
        lanes = self._lanes.cpu().numpy().view(np.uint64)
        with np.errstate(over="ignore"):
            lanes = lanes[:, :8] + lanes[:, 8:][:, np.arange(8) ^ 1] + _padding(self._range_bytes // 8)
        seals = np.full(len(lanes), scatter(np.array([self._range_bytes], np.uint64))[0])
        for lane in range(8):
            seals = scatter(seals ^ lanes[:, lane])
        return seals


def _padding(words: int) -> NDArray[np.uint64]:
    """The products, by lane, of the zeros that fill the last stripe of so many words."""
    products = np.zeros(8, np.uint64)
    with np.errstate(over="ignore"):
        for word in range(words, ceil_div(words, 8) * 8):
            x = KEYS.view(np.uint64)[word % 8] + np.uint64(word // 8) * np.uint64(_GOLDEN)
            products[word % 8] = (x & np.uint64(0xFFFFFFFF)) * (x >> np.uint64(32))
    return products


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
