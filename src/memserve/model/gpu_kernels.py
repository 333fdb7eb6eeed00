"""Bytes of KV on a GPU: copies of pages, and the seal of ``src/core/transfer/seal_sums.h``, with or without a copy on
the way.

Sources and targets may lie in the device's memory, in that of another process (mapped), or in pinned memory of the
host. Importing this module needs the package ``triton``; ``TRITON_INTERPRET=1`` runs its kernels on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.errors import check
from memserve.model.attention.triton_bytes import copy_rows_kernel, seal_kernel
from memserve.units import ceil_div

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


class Sealing:
    """Seals that a stream computes: read them when what was enqueued is done."""

    def __init__(
        self,
        source: Tensor,
        src_at: NDArray[np.int64],
        range_bytes: int,
        target: Tensor | None = None,
        dst_at: NDArray[np.int64] | None = None,
    ) -> None:
        """Enqueue it in the stream in use. ``source``, ``target``: flat bytes; offsets ``[n]`` in bytes. With
        ``target`` the ranges are copied there on the way."""
        check(range_bytes > 0 and range_bytes % 8 == 0, f"ranges of whole words, not of {range_bytes} bytes")
        device = source.device if target is None or source.device.type == "cuda" else target.device
        places = np.stack((src_at, src_at if dst_at is None else dst_at)).astype(np.int64)
        check(not (places % 8).any(), "ranges begin at whole words")
        self._range_bytes = range_bytes
        words, stripes = range_bytes // 8, ceil_div(range_bytes, 64)
        parts = ceil_div(stripes, _STRIPES * _TURNS)
        sent = _on(torch.from_numpy(np.concatenate((places.ravel() // 8, KEYS))), device)
        count = len(src_at)
        self._sums = torch.empty((count, parts, 16), dtype=torch.int64, device=device)
        if count:
            seal_kernel[(count, parts)](
                source.view(torch.int64), sent, (source if target is None else target).view(torch.int64), sent[count:],
                sent[2 * count :], self._sums, words, stripes, _GOLDEN - (1 << 64),
                STRIPES=_STRIPES, TURNS=_TURNS, COPIES=target is not None,
            )  # fmt: skip
        self._lanes = self._sums.sum(1)

    def result(self) -> NDArray[np.uint64]:
        """The seals ``[n]``; waits for the stream in use."""
        lanes = self._lanes.cpu().numpy().view(np.uint64)
        with np.errstate(over="ignore"):
            lanes = lanes[:, :8] + lanes[:, 8:][:, np.arange(8) ^ 1]
        seals = np.full(len(lanes), scatter(np.array([self._range_bytes], np.uint64))[0])
        for lane in range(8):
            seals = scatter(seals ^ lanes[:, lane])
        return seals


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
