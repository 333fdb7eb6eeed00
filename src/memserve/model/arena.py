"""Arenas of KV blocks and the copies between them (level 3)."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.types import CopyBlocks, Tier


class KvArenas:
    """The blocks of each tier as bytes: ``[blocks, block_bytes]`` uint8, in device memory (HBM) or host memory (DRAM).

    On a CPU both tiers are anonymous mappings, zeroed by the kernel when first touched. On CUDA the DRAM tier is
    pinned, so that copies run at the bus's speed.
    """

    def __init__(self, device: torch.device, block_bytes: int, hbm_blocks: int, dram_blocks: int) -> None:
        self.block_bytes = block_bytes
        if device.type == "cpu":
            self.hbm = _mapped(hbm_blocks, block_bytes)
            self.dram = _mapped(dram_blocks, block_bytes)
        else:
            self.hbm = torch.zeros((hbm_blocks, block_bytes), dtype=torch.uint8, device=device)
            self.dram = torch.empty((dram_blocks, block_bytes), dtype=torch.uint8, pin_memory=dram_blocks > 0)
        self._host: dict[Tier, NDArray[np.uint8]] = {}
        if device.type == "cpu":
            self._host = {Tier.HBM: self.hbm.numpy(), Tier.DRAM: self.dram.numpy()}

    @property
    def base(self) -> int:
        """Address of the HBM arena."""
        return self.hbm.data_ptr()

    def copy(self, order: CopyBlocks) -> None:
        """Copy whole blocks, in the order given (an earlier destination may be a later source)."""
        if self._host:
            source, target = self._host[order.src_tier], self._host[order.dst_tier]
            for src, dst in zip(order.src, order.dst, strict=True):
                target[dst] = source[src]
            return
        source_tensor, target_tensor = self._tier(order.src_tier), self._tier(order.dst_tier)
        for src, dst in zip(order.src, order.dst, strict=True):
            target_tensor[dst].copy_(source_tensor[src], non_blocking=True)

    def _tier(self, tier: Tier) -> Tensor:
        return self.hbm if tier is Tier.HBM else self.dram


def _mapped(blocks: int, block_bytes: int) -> Tensor:
    if blocks * block_bytes == 0:
        return torch.empty((0, block_bytes), dtype=torch.uint8)
    memory = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a step touches many scattered pages of KV: spare the TLB
    return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, block_bytes)
