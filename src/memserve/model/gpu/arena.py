"""Blocks of both tiers on a machine with a GPU, and the copies between them beside what is computed.

    HBM -> DRAM  (evictions, preempted sequences)   down: beside the steps; a block that is given away again meanwhile
                                                    makes the next step wait until it has been read
    DRAM -> HBM  (prefixes that are matched)        up: the step that brought them waits
    HBM -> HBM   (copies on write)                  in the computing stream

DRAM is pinned, so that the copy engines reach it. As on a CPU it is memory that other processes of the host may map;
HBM is exported to them as a handle (``transport/links/gpu_memory.py``).

Of an instance of several workers each has its heads and layers of every block in its own HBM. DRAM is one memory with
whole blocks: each worker copies its part of them, the runs of its heads, by a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve import _core
from memserve.base.errors import check
from memserve.base.types import CopyBlocks, Tier
from memserve.instance.events import LinkUse
from memserve.model.arena import ArenaSizes
from memserve.model.copier import Copy
from memserve.model.gpu.streams import Gpu, Mark, Stream
from memserve.transport.ranges import Shard

Int32s = NDArray[np.int32]


class GpuArenas:
    """Rows of bytes ``[blocks, block_bytes]`` uint8: ``hbm`` on the device, ``dram`` on the host."""

    file = None
    """The lower tier ends with DRAM."""

    def __init__(
        self,
        gpu: Gpu,
        sizes: ArenaSizes,
        *,
        shared: bool = False,
        part: Shard | None = None,
        dram: _core.SharedArena | None = None,
    ) -> None:
        """``shared``: other processes may read both. ``part``: what blocks of HBM have of those of the model, which lie
        in ``dram``, memory of all workers. Raises :class:`UserError` where there is no room."""
        self._gpu = gpu
        self.block_bytes = block_bytes = sizes.block_bytes
        hbm_blocks, dram_blocks = sizes.hbm_blocks, sizes.dram_blocks
        self.part = part
        whole = gpu.zeros(hbm_blocks + 1, block_bytes, dtype=torch.uint8)
        self.hbm = whole[:hbm_blocks]
        #: the block that rows write which pad a batch: no sequence has it
        self.scratch_block = hbm_blocks
        #: host memory of the second tier that peers map; None: there is none, or none is shared
        self.shared_dram: _core.SharedArena | None = None
        self.is_shared = shared
        lower_bytes = block_bytes if part is None else part.model.block_bytes
        if dram_blocks == 0:
            self.dram = torch.empty((0, lower_bytes), dtype=torch.uint8)
        else:
            arena = dram or (_core.SharedArena if shared else _core.Arena)(dram_blocks * lower_bytes)
            self.shared_dram = arena if isinstance(arena, _core.SharedArena) else None
            self.dram = torch.frombuffer(arena, dtype=torch.uint8).view(dram_blocks, lower_bytes)
            gpu.pin_memory(self.dram)
        self._up, self._down = gpu.new_stream(urgent=True), gpu.new_stream()
        self._leaving: dict[int, Mark] = {}  # HBM blocks that ``down`` still reads
        self._down_mark: Mark | None = None  # behind all that went down

    @property
    def hbm_address(self) -> int:
        """Address of the HBM arena."""
        return self.hbm.data_ptr()

    def order_after_compute(self, stream: Stream) -> None:
        """What ``stream`` does from now on comes behind what is computed, and behind what went down."""
        stream.wait_for(self._gpu.compute.record_mark())
        if self._down_mark is not None:
            stream.wait_for(self._down_mark)

    def will_use(self, blocks: Sequence[int]) -> None:
        """HBM blocks are given to a sequence, or a frame: what is computed from now on may write them."""
        for block in blocks if self._leaving else ():
            mark = self._leaving.pop(block, None)
            if mark is not None:
                self._gpu.compute.wait_for(mark)

    def prepare_pages(self, written_blocks: int) -> None:
        """A GPU's memory needs no preparing: it is there from the start."""

    def will_use_dram(self) -> None:
        """What is computed from now on reads and writes DRAM behind what went down."""
        if self._down_mark is not None:
            self._gpu.compute.wait_for(self._down_mark)

    def copy_blocks(self, order: CopyBlocks) -> None:
        """Copy whole blocks, in the order given (an earlier destination may be a later source)."""
        source, target = self._arena_of(order.src_tier), self._arena_of(order.dst_tier)
        self.check_blocks(order.src_tier, np.array(order.src, np.int32))
        self.check_blocks(order.dst_tier, np.array(order.dst, np.int32))
        compute = self._gpu.compute
        if order.dst_tier is Tier.DRAM:
            self._down.wait_for(compute.record_mark())
            self._copy_dram(self._down, order)
            self._down_mark = self._down.record_mark()
            if order.src_tier is Tier.HBM:
                self._leaving.update(dict.fromkeys(order.src, self._down_mark))
            else:
                compute.wait_for(self._down_mark)
            return
        self.will_use(order.dst)
        if order.src_tier is Tier.HBM:
            compute.copy_blocks(target, source, order.dst, order.src)
            return
        self.order_after_compute(self._up)
        self._copy_dram(self._up, order)
        compute.wait_for(self._up.record_mark())

    def _copy_dram(self, stream: Stream, order: CopyBlocks) -> None:
        """From or to DRAM."""
        part, tiers = self.part, (order.dst_tier, order.src_tier)
        if part is None:
            stream.copy_blocks(self._arena_of(tiers[0]), self._arena_of(tiers[1]), order.dst, order.src)
            return
        layers = np.arange(part.local_geometry.num_layers, dtype=np.int32)
        for dst, src in _unchained(order):
            pages = [(np.array(blocks, np.int32)[:, None] * len(layers) + layers).ravel() for blocks in (dst, src)]
            rows = [self.page_rows(tier, page_ids, part.run_bytes) for tier, page_ids in zip(tiers, pages, strict=True)]
            stream.copy_pages(rows[0][0], rows[1][0], rows[0][1], rows[1][1])

    def page_rows(self, tier: Tier, pages: Int32s, row_bytes: int) -> tuple[Tensor, Tensor]:
        """A tier as rows of bytes, and which of them are ``pages``: int32 on the host. ``row_bytes``: of a page, or of
        one head's run where DRAM has whole blocks."""
        if self.part is not None:
            pages = self.part.run_numbers(pages, of_model=tier is Tier.DRAM)
        return self._arena_of(tier).view(-1, row_bytes), torch.from_numpy(pages)

    def copies_mark(self) -> Mark | None:
        """What must be past before all copies so far are done, beside what is computed; None: nothing."""
        for block in [block for block, mark in self._leaving.items() if mark.is_past()]:
            del self._leaving[block]
        return self._down_mark

    def check_blocks(self, tier: Tier, blocks: Int32s) -> None:
        """Raise :class:`IndexError` unless ``tier`` has all of ``blocks``."""
        count = len(self._arena_of(tier))
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < count):
            raise IndexError(f"blocks {blocks.min()} to {blocks.max()} are not all in a tier of {count} blocks")

    def _arena_of(self, tier: Tier) -> Tensor:
        return self.hbm if tier is Tier.HBM else self.dram


def _unchained(order: CopyBlocks) -> Iterator[tuple[list[int], list[int]]]:
    """Pieces of an order in which no destination is also a source: rows of one kernel are in no order."""
    if order.src_tier is order.dst_tier and not set(order.src).isdisjoint(order.dst):
        yield from (([dst], [src]) for dst, src in zip(order.dst, order.src, strict=True))
    else:
        yield order.dst, order.src


class StreamCopier:
    """Copies of pages beside a running step; as :class:`memserve.model.copier.PageCopier`, but that only streams wait.

    What the next layers read comes up in one stream, what leaves goes down in another, whole blocks that leave or stay
    in a third that gives way to both.
    """

    def __init__(self, gpu: Gpu, arenas: GpuArenas, page_bytes: int) -> None:
        self._gpu, self._arenas = gpu, arenas
        tiers = {Tier.HBM: arenas.hbm, Tier.DRAM: arenas.dram}
        self._tiers = {memory.data_ptr(): tier for tier, memory in tiers.items() if len(memory)}
        self._row_bytes = page_bytes if arenas.part is None else arenas.part.run_bytes
        self._streams = gpu.new_stream(urgent=True), gpu.new_stream(urgent=True), gpu.new_stream()
        self._down_mark: Mark | None = None
        self._ends: dict[int, Mark] = {}
        self._spans: list[tuple[Copy, Mark, Mark]] = []
        self._waits: list[tuple[Mark, Mark]] = []

    def start_copy(self, copy: Copy, *, urgent: bool) -> None:
        """Enqueue a copy behind what is computed so far."""
        up, down, aside = self._streams
        stream = aside if not urgent else up if copy.direction is Tier.HBM else down
        self._arenas.order_after_compute(stream)
        if self._down_mark is not None:
            stream.wait_for(self._down_mark)  # a buffer is filled again behind what leaves it
        began = stream.record_mark(timed=True)
        target, dst = self._arenas.page_rows(self._tiers[copy.target], copy.dst, self._row_bytes)
        source, src = self._arenas.page_rows(self._tiers[copy.source], copy.src, self._row_bytes)
        stream.copy_pages(target, source, dst, src)
        end = self._ends[id(copy)] = stream.record_mark(timed=True)
        if urgent and stream is down:
            self._down_mark = end
        self._spans.append((copy, began, end))

    def wait_for(self, copy: Copy) -> None:
        """What is computed from now on comes behind ``copy``."""
        compute, end = self._gpu.compute, self._ends.pop(id(copy))
        before = compute.record_mark(timed=True)
        compute.wait_for(end)
        self._waits.append((before, compute.record_mark(timed=True)))

    def take_copy_times(self) -> CopyTimes:
        """The copies since the last cut: all have been waited for."""
        check(not self._ends, "a step ends with copies that it has not waited for")
        times = CopyTimes(self._spans, self._waits)
        self._spans, self._waits = [], []
        return times

    def cancel_copies(self) -> None:
        """A step has failed: wait for what was begun, and forget it."""
        for stream in self._streams:
            stream.wait()
        self._spans, self._waits, self._down_mark = [], [], None
        self._ends.clear()

    def close(self) -> None:
        """Wait for what was begun."""
        self.cancel_copies()


class CopyTimes:
    """How long a step's copies took, once they are done."""

    def __init__(self, spans: list[tuple[Copy, Mark, Mark]], waits: list[tuple[Mark, Mark]]) -> None:
        self._spans, self._waits = spans, waits

    def link_use(self) -> LinkUse | None:
        """None: nothing was copied."""
        if not self._spans:
            return None
        use = LinkUse()
        for copy, began, end in self._spans:
            use.busy_ns += end.ns_since(began)
            if copy.direction is Tier.HBM:
                use.up_bytes += copy.nbytes
            elif copy.direction is Tier.DRAM:
                use.down_bytes += copy.nbytes
        use.waited_ns = sum(after.ns_since(before) for before, after in self._waits)
        return use
