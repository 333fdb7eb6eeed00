"""Arenas of KV blocks and the copies between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve import _core
from memserve.base.errors import check
from memserve.base.kv_layout import lower_page_bytes
from memserve.base.types import AS_COMPUTED, CopyBlocks, KVGeometry, Tier
from memserve.base.units import MIB, ceil_div
from memserve.model.tier_file import TierFile

Int32s = NDArray[np.int32]

_COPY_THREADS = 2
_HUGE_PAGE = 2 * MIB
_HUGE_STEP_BYTES = 4 * MIB
"""What a plan puts on huge pages at least while there is more to do: about 2 ms, for which all of its rows wait."""


def lower_pages(geometry: KVGeometry, lower_dtype: str) -> _core.LowerPages | None:
    """What converts pages between the tiers. None: they lie alike in both."""
    if lower_dtype == AS_COMPUTED:
        return None
    check(geometry.kv_dtype == AS_COMPUTED, "codes are not rounded again")
    sizes = geometry.num_kv_heads, *geometry.kept_dims, geometry.block_tokens
    pages = _core.LowerPages(*sizes, geometry.dtype, lower_dtype)
    check(pages.lower_page_bytes == lower_page_bytes(geometry, lower_dtype), "a lower page has another size")
    return pages


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """How much KV each tier holds, in blocks of ``block_bytes`` as they are computed."""

    block_bytes: int
    hbm_blocks: int
    dram_blocks: int
    ssd_blocks: int = 0
    """In a file behind those of DRAM."""
    ssd_folder: str = ""
    block_pages: int = 1


class KvArenas:
    """The blocks of each tier of a machine without a GPU, as bytes: ``[blocks, block_bytes]`` uint8. With ``lower``,
    those of DRAM are smaller, and copies between the tiers convert.

    Both tiers are the core's arenas, zeroed by the kernel when first touched; ``shared`` ones lie in memory that other
    processes may map.
    """

    def __init__(
        self,
        sizes: ArenaSizes,
        *,
        shared: bool = False,
        lower: _core.LowerPages | None = None,
        hbm: _core.SharedArena | None = None,
        dram: _core.SharedArena | None = None,
        worker: tuple[int, int] = (0, 1),
    ) -> None:
        """``hbm``, ``dram``: memory that the workers of an instance share, for the tiers of these names. None: its own.
        ``worker``: this worker's number and how many there are, each of which prepares its part of that memory."""
        self.block_bytes = block_bytes = sizes.block_bytes
        hbm_blocks, dram_blocks = sizes.hbm_blocks, sizes.dram_blocks
        self._copied_ns = 0
        self._lower = lower
        #: the tiers that peers can read; only with ``shared``, only those that have blocks
        self.shared: dict[Tier, _core.SharedArena] = {}
        self._pages = block_bytes // lower.page_bytes if lower is not None else 1  # of a block
        lower_bytes = self._pages * lower.lower_page_bytes if lower is not None else block_bytes
        # of the HBM arena, from its start: requested to be on huge pages, and used so far
        self._huge_bytes, self._used_bytes = 0, 0
        self._workers = worker
        self._hbm_arena = hbm
        #: None: the lower tier ends with DRAM
        self.file: TierFile | None = None
        if sizes.ssd_blocks:
            page_bytes = block_bytes // sizes.block_pages
            self.file = TierFile(sizes.ssd_folder, dram_blocks, sizes.ssd_blocks, sizes.block_pages, page_bytes)
            self._pages = sizes.block_pages
        self._lower_blocks = dram_blocks + sizes.ssd_blocks
        if shared:
            self.hbm = self._create_shared(Tier.HBM, hbm_blocks, hbm)
            self._hbm_arena = self.shared[Tier.HBM]
            # peers know of one kind of page: with ``lower`` nothing of DRAM is offered to them
            self.dram = (
                self._create_shared(Tier.DRAM, dram_blocks, dram)
                if lower is None
                else _mapped(dram_blocks, lower_bytes)
            )
        else:
            self.hbm = _mapped(hbm_blocks, block_bytes) if hbm is None else blocks_of(hbm, block_bytes)
            self.dram = _mapped(dram_blocks, lower_bytes) if dram is None else blocks_of(dram, lower_bytes)

    @property
    def hbm_address(self) -> int:
        """Address of the HBM arena."""
        return self.hbm.data_ptr()

    def will_use(self, blocks: Sequence[int]) -> None:
        """HBM blocks that attention is about to read, from this plan on: they are to lie on huge pages."""
        if self._hbm_arena is not None and blocks:
            self._used_bytes = max(self._used_bytes, (max(blocks) + 1) * self.block_bytes)

    def prepare_pages(self, written_blocks: int) -> None:
        """Put some of the used part of the arena on huge pages; a plan that writes ``written_blocks`` blocks waits.

        Shared memory comes in small pages, which cost attention a few per cent; so the used part of the arena is moved
        to huge ones (the pool hands out low blocks first), where the operating system can do that. A little with each
        plan, and as much as it computes: the KV of requests that come from elsewhere uses much at once, and no row may
        wait until all of that has moved.
        """
        arena = self._hbm_arena
        if arena is None or self._huge_bytes >= self._used_bytes:
            return
        step_bytes = max(_HUGE_STEP_BYTES, written_blocks * self.block_bytes)
        step_bytes = min(step_bytes, self._used_bytes - self._huge_bytes)
        step_bytes = min(ceil_div(step_bytes, _HUGE_PAGE) * _HUGE_PAGE, arena.nbytes - self._huge_bytes)
        worker, workers = self._workers
        own_bytes = ceil_div(step_bytes, workers)  # the first touch of memory is slow
        first = min(worker * own_bytes, step_bytes)
        arena.collapse(self._huge_bytes + first, min(own_bytes, step_bytes - first))
        self._huge_bytes += step_bytes

    def will_use_dram(self) -> None:
        """Steps are about to read and write DRAM themselves: here they do so in the order of the copies."""

    def copy_blocks(self, order: CopyBlocks) -> None:
        """Copy whole blocks, in the order given (an earlier destination may be a later source)."""
        began_ns = time.perf_counter_ns()
        self._copy_untimed(order)
        self._copied_ns += time.perf_counter_ns() - began_ns if order.src_tier != order.dst_tier else 0

    def take_copied_ns(self) -> int:
        """Time of the copies between tiers since the last call."""
        copied_ns, self._copied_ns = self._copied_ns, 0
        return copied_ns

    def _copy_untimed(self, order: CopyBlocks) -> None:
        source, target = self._arena_of(order.src_tier), self._arena_of(order.dst_tier)
        chained = order.src_tier == order.dst_tier and not set(order.src).isdisjoint(order.dst)
        if chained:
            for src, dst in zip(order.src, order.dst, strict=True):
                target[dst].copy_(source[src])
            return
        src_ids, dst_ids = np.array(order.src, np.int32), np.array(order.dst, np.int32)
        self.check_blocks(order.src_tier, src_ids)
        self.check_blocks(order.dst_tier, dst_ids)
        ends = target.data_ptr(), source.data_ptr()
        if self.file is not None and order.src_tier != order.dst_tier:
            pages = self._pages_of(src_ids), self._pages_of(dst_ids)
            copy_pages(*ends, self.block_bytes // self._pages, *pages, self.file, down=order.dst_tier is Tier.DRAM)
            return
        if self._lower is None or order.src_tier == order.dst_tier:
            _core.copy_blocks(*ends, source.shape[1], src_ids, dst_ids, _COPY_THREADS)
            return
        convert = self._lower.down if order.dst_tier is Tier.DRAM else self._lower.up
        convert(*ends, self._pages_of(src_ids), self._pages_of(dst_ids), _COPY_THREADS)

    def _pages_of(self, blocks: Int32s) -> Int32s:
        firsts: Int32s = np.repeat(blocks, self._pages) * np.int32(self._pages)
        return firsts + np.tile(np.arange(self._pages, dtype=np.int32), len(blocks))

    def _create_shared(self, tier: Tier, blocks: int, arena: _core.SharedArena | None = None) -> Tensor:
        if blocks == 0:
            return _mapped(0, self.block_bytes)
        self.shared[tier] = arena or _core.SharedArena(blocks * self.block_bytes)
        return blocks_of(self.shared[tier], self.block_bytes)

    def _arena_of(self, tier: Tier) -> Tensor:
        return self.hbm if tier is Tier.HBM else self.dram

    def check_blocks(self, tier: Tier, blocks: Int32s) -> None:
        """Raise :class:`IndexError` unless ``tier`` has all of ``blocks``."""
        total = len(self.hbm) if tier is Tier.HBM else self._lower_blocks
        # the core trusts addresses: a wrong id would corrupt memory
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < total):
            raise IndexError(f"blocks {blocks.min()} to {blocks.max()} are not all in a tier of {total} blocks")


def copy_pages(
    target: int, source: int, page_bytes: int, src: Int32s, dst: Int32s, file: TierFile, *, down: bool
) -> None:
    """Copy pages between HBM and the lower tier, whose last ones lie in ``file``. ``down``: out of HBM."""
    lies_there = file.in_file(dst if down else src)
    in_memory = ~lies_there
    _core.copy_blocks(target, source, page_bytes, src[in_memory], dst[in_memory], 1)
    if lies_there.any() and down:
        file.write_pages(dst[lies_there], source, src[lies_there])
    elif lies_there.any():
        file.read_pages(src[lies_there], target, dst[lies_there])


def _mapped(blocks: int, block_bytes: int) -> Tensor:
    if blocks == 0:
        return torch.empty((0, block_bytes), dtype=torch.uint8)
    return torch.frombuffer(_core.Arena(blocks * block_bytes), dtype=torch.uint8).view(blocks, block_bytes)


def blocks_of(arena: _core.SharedArena, block_bytes: int) -> Tensor:
    """All that it has, ``[blocks, block_bytes]`` uint8; keeps the arena alive."""
    return torch.frombuffer(arena, dtype=torch.uint8).view(-1, block_bytes)
