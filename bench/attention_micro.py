"""Paged attention beside torch's SDPA on contiguous tensors, and decode beside the machine's memory bandwidth.

Usage: ``python bench/attention_micro.py [--threads 2] [--rounds 7]``. Shapes are SmolLM2-135M's: 30 layers, 9 heads,
3 KV heads of 64. The contenders take turns inside each round; the figures are medians over the rounds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness.flags import options, save
from harness.rounds import measured, median
from harness.tables import Table

from memserve import _kernels

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 32
SHAPES = ((1, 1, 256), (8, 1, 256), (32, 1, 256), (1, 1, 4096), (1, 512, 512), (1, 2048, 2048))
"""(rows, new tokens, context) of the steps."""


def huge_pages(elements: int, kind: torch.dtype) -> torch.Tensor:
    """Memory like the pool's arena: one mapping that asks for huge pages."""
    mapping = mmap.mmap(-1, elements * kind.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=kind)


@dataclass
class Step:
    """One step of all layers: ``rows`` sequences with ``count`` new tokens each, ``context`` tokens afterwards."""

    rows: int
    count: int
    context: int
    dtype: str

    def __post_init__(self) -> None:
        self.kind = getattr(torch, self.dtype)
        blocks = -(-self.context // BLOCK)
        self.arena = huge_pages(self.rows * blocks * LAYERS * KV_HEADS * BLOCK * 2 * DIM, self.kind)
        self.arena.copy_(torch.randn(1 << 20)[torch.arange(self.arena.numel()) % (1 << 20)])
        tables = np.random.default_rng(0).permutation(self.rows * blocks).astype(np.int32).reshape(self.rows, blocks)
        self.batch = _kernels.PagedBatch(
            self.arena.data_ptr(),
            (LAYERS, KV_HEADS, DIM, DIM, BLOCK, self.dtype, "auto"),
            tables,
            np.arange(self.rows, dtype=np.int32),
            (np.arange(self.rows + 1) * self.count).astype(np.int32),
            np.full(self.rows, self.context, np.int32),
        )
        tokens = self.rows * self.count
        self.q, self.out = (torch.randn(tokens, HEADS, DIM).to(self.kind) for _ in range(2))
        self.k, self.v = (torch.randn(tokens, KV_HEADS, DIM).to(self.kind) for _ in range(2))
        self.dense_q = torch.randn(self.rows, HEADS, self.count, DIM).to(self.kind)
        # Dense rivals get one layer's KV per layer only for decode, where reading memory is the work.
        layers = LAYERS if self.count == 1 else 1
        shape = (layers, 2, self.rows, KV_HEADS, self.context, DIM)
        self.dense = torch.randn(shape).to(self.kind)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one step reads."""
        return self.rows * self.context * LAYERS * KV_HEADS * 2 * DIM * self.kind.itemsize

    @property
    def flop(self) -> float:
        """Multiplications and additions of one step, causal half only."""
        visible = self.count * (self.context - self.count) + self.count * (self.count + 1) / 2
        return self.rows * LAYERS * HEADS * visible * 4 * DIM

    def paged(self) -> None:
        """Our kernel over all layers."""
        addresses = [(t.data_ptr(), t.stride(0), t.stride(1)) for t in (self.q, self.k, self.v, self.out)]
        for layer in range(LAYERS):
            _kernels.attend(self.batch, layer, HEADS, *addresses, DIM**-0.5)

    def sdpa(self) -> None:
        """torch on dense tensors that hold the same tokens: no paging, no writing of K and V."""
        causal = self.count > 1
        for layer in range(LAYERS):
            k, v = self.dense[layer % len(self.dense)]
            F.scaled_dot_product_attention(self.dense_q, k, v, is_causal=causal, enable_gqa=True)


COLUMNS = {
    "dtype": "{dtype}", "rows": "{rows}", "new": "{count}", "context": "{context}", "paged": "{paged:.2f} ms",
    "sdpa": "{sdpa:.2f} ms", "sdpa / paged": "{ratio:.2f}", "GFLOP/s": "{gflop_s:.0f}",
    "KV read": "{kv_gb_s:.1f} of {machine_gb_s:.1f} GB/s",
}  # fmt: skip


def compare(step: Step, read: torch.Tensor, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    contenders: dict[str, Callable[[], object]] = {"paged": step.paged, "sdpa": step.sdpa}
    if step.count == 1:
        contenders["read"] = read.sum
    spent_s = {name: median(times) for name, times in measured(contenders, rounds).items()}
    row: dict[str, Any] = {name: getattr(step, name) for name in ("dtype", "rows", "count", "context")}
    row |= {
        "paged": spent_s["paged"] * 1e3,
        "sdpa": spent_s["sdpa"] * 1e3,
        "gflop_s": step.flop / spent_s["paged"] / 1e9,
    }
    if step.count == 1:
        row["kv_gb_s"], row["machine_gb_s"] = (
            step.kv_bytes / spent_s["paged"] / 1e9,
            read.nbytes / spent_s["read"] / 1e9,
        )
    return row | {"ratio": row["sdpa"] / row["paged"]}


def main() -> None:
    """Measure decode at several batch sizes and prefill at several lengths."""
    args = options(__doc__, threads=torch.get_num_threads(), rounds=7)
    torch.set_num_threads(args.threads)
    read, rows = torch.ones(1 << 26), []
    print(f"isa {_kernels.isa()}, {args.threads} threads, torch {torch.__version__}")
    table = Table(COLUMNS)
    for dtype in ("bfloat16", "float32"):
        for sizes in SHAPES:
            rows.append(compare(Step(*sizes, dtype), read, args.rounds))
            table.show(rows[-1])
    save(args, rows)


if __name__ == "__main__":
    main()
