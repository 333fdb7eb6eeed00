"""Steps of a forward without an engine: random modules, and pages that hold zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memserve.base.types import KVGeometry
from memserve.model.attention.context import StepAttention, StepRows
from memserve.model.attention.latents import choose_attention

BLOCK_TOKENS = 32


def random_module(config: Any, dtype: str) -> Any:
    """Of a transformers ``config``, with random weights of ``dtype``."""
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    finally:
        torch.set_default_dtype(torch.float32)
    return module.eval().requires_grad_(False)


def some_ids(count: int, vocab: int) -> Tensor:
    """``[count]`` int64, alike for all contenders."""
    return torch.arange(count) * 7919 % vocab


@dataclass(frozen=True, eq=False)
class PagedStep:
    """New tokens of several sequences, each behind a context of zeros in pages of its own."""

    ids: Tensor
    positions: Tensor
    last: Tensor
    """The last row of each sequence."""
    arena: Tensor
    """Kernels know its address: it lives as long as the step."""
    _attention: Any
    _rows: StepRows

    def attention(self) -> StepAttention:
        """For one run."""
        step: StepAttention = self._attention(self._rows)
        return step


def paged_step(geometry: KVGeometry, vocab: int, sequences: int, count: int, context: int) -> PagedStep:
    """``count`` new tokens of each sequence, the last of ``context``."""
    blocks = -(-context // BLOCK_TOKENS)
    arena = torch.zeros(sequences * blocks * geometry.block_bytes, dtype=torch.uint8)
    tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
    starts = (np.arange(sequences + 1) * count).astype(np.int32)
    rows = StepRows(tables, np.arange(sequences, dtype=np.int32), starts, np.full(sequences, context, np.int32))
    positions = torch.arange(context - count, context).repeat(sequences)
    last = torch.as_tensor(starts[1:] - 1).long()
    ids = some_ids(sequences * count, vocab)
    return PagedStep(ids, positions, last, arena, choose_attention(arena, geometry), rows)
