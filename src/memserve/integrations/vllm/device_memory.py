"""vLLM's KV on a CUDA device: blocks pass through pinned memory of a bounded size, in streams of their own.

    device -- saving stream --> slots -- a thread, sealed --> memory out of which the store takes values
    device <-- loading stream -- slots <-- a thread, compared -- the store's memory

A slot has room for one block. It lies by piece, not by block: ``[pieces][slots][bytes]``, so that blocks that lie side
by side on the device are one copy of a copy engine, and no kernel of the device runs for it.

The order, by events alone. What is saved is copied behind the work that computed it; what vLLM enqueues after the step
comes behind these copies, since it may write into the blocks. What is loaded is copied behind everything that vLLM had
enqueued when the load began; each layer's attention comes behind the copies into this layer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memserve.base.errors import UserError
from memserve.base.units import human_bytes
from memserve.integrations.store_cache import Piece
from memserve.integrations.vllm.memory import BlockMemory, runs_of
from memserve.model.gpu.streams import Gpu, Mark


@dataclass(frozen=True, slots=True)
class Landing:
    """Places in the loading stream: blocks are there when they are past."""

    shared: Mark
    """Behind what belongs to several layers."""
    layers: Mapping[str, Mark]
    last: Mark


class Slots:
    """Numbers of slots that are free. Thread-safe."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.count = len(numbers)
        self._free = list(numbers)
        self._changed = threading.Condition()

    def take_slots(self, most: int, end_s: float = 0.0) -> list[int]:
        """Between one and ``most`` of them, in order; empty: none was free until ``end_s`` of ``time.monotonic()``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free), max(0.0, end_s - time.monotonic()))
            slots, self._free = self._free[:most], self._free[most:]
            return slots

    def give_back(self, numbers: Sequence[int]) -> None:
        """They are free again."""
        with self._changed:
            self._free = sorted([*self._free, *numbers])  # side by side: one copy for many blocks
            self._changed.notify_all()


class DeviceMemory(BlockMemory):
    """The KV of all layers of one group on one device, and the pinned memory beside it."""

    def __init__(self, caches: Mapping[str, Any], num_blocks: int, gpu: Gpu, staging_bytes: int) -> None:
        """``staging_bytes``: of pinned memory, one half for saves, one for loads; less is taken where it is more than
        all blocks. Raises :class:`UserError` for memory that this class does not understand, and where no two blocks
        have room or the system does not pin."""
        super().__init__(caches, num_blocks)
        self.gpu = gpu
        half = min(staging_bytes // 2 // self.layout.nbytes, num_blocks)
        if half < 1:
            message = f"two blocks have no room in {human_bytes(staging_bytes)}"
            hint = f"staging_bytes of {2 * self.layout.nbytes} and more, times the groups of KV"
            raise UserError(message, hint=hint, param="staging_bytes")
        self.saving, self.loading = Slots(range(half)), Slots(range(half, 2 * half))
        self._save_stream, self._load_stream = gpu.new_stream(), gpu.new_stream()
        self._rows = [row for tensor in self._own_tensors(caches) for row in _rows(tensor, num_blocks)]
        staging = torch.zeros(2 * half * self.layout.nbytes, dtype=torch.uint8)
        try:
            gpu.pin_memory(staging)
        except UserError as error:
            hint = "fewer staging_bytes, or a higher limit of locked memory (ulimit -l)"
            raise UserError(str(error), hint=hint, param="staging_bytes") from error
        self._regions, first = list[Any](), 0
        for nbytes in self.layout.piece_bytes:
            self._regions.append(staging[first : first + 2 * half * nbytes].view(2 * half, nbytes))
            first += 2 * half * nbytes

    def _own_tensors(self, caches: Mapping[str, Any]) -> list[Any]:
        tensors = dict[tuple[int, tuple[int, ...]], Any]()
        for tensor in caches.values():
            tensors.setdefault((tensor.data_ptr(), tuple(tensor.stride())), tensor)
        return list(tensors.values())

    def slot_pieces(self, slot: int) -> list[Piece]:
        """Address and length of each piece of the block in this slot, in host memory."""
        return [(region.data_ptr() + slot * region.shape[1], region.shape[1]) for region in self._regions]

    # -- from the device

    def stage_pieces(self, numbers: Sequence[int], slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy these pieces of the blocks to the slots, behind all that the stream in use has enqueued by now."""
        self._save_stream.wait_for(self.gpu.current_stream().record_mark())
        for number in numbers:
            self._save_stream.copy_blocks(self._regions[number], self._rows[number], list(slots), list(block_ids))

    def mark_staged(self) -> Mark:
        """All copies so far. What is enqueued in the stream in use from now on comes behind them."""
        mark = self._save_stream.record_mark()
        self.gpu.current_stream().wait_for(mark)
        return mark

    # -- to the device

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int], behind: Mark) -> Landing:
        """Copy the slots into the blocks, behind ``behind``, layer by layer. Called in any thread, by one at a time."""
        self._load_stream.wait_for(behind)
        of_layers = {number for numbers in self.layers.values() for number in numbers}
        self._copy_pieces([number for number in range(len(self._regions)) if number not in of_layers], slots, block_ids)
        shared, layers = self._load_stream.record_mark(), dict[str, Mark]()
        for layer, numbers in self.layers.items():
            self._copy_pieces(numbers, slots, block_ids)
            layers[layer] = self._load_stream.record_mark()
        return Landing(shared, layers, self._load_stream.record_mark())

    def _copy_pieces(self, numbers: Sequence[int], slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for number in numbers:
            self._load_stream.copy_blocks(self._rows[number], self._regions[number], list(block_ids), list(slots))


def _rows(tensor: Any, num_blocks: int) -> list[Any]:
    """Each piece of all blocks as bytes ``[blocks, bytes]``, in the order of :attr:`BlockLayout.piece_bytes`."""
    item, kernel_blocks = tensor.element_size(), tensor.shape[0] // num_blocks
    offsets, run = runs_of(tensor)
    storage, first, step = tensor.untyped_storage(), tensor.storage_offset() * item, tensor.stride()[0] * item
    rows = list[Any]()
    for kernel_block in range(kernel_blocks):
        for offset in offsets:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            start = first + kernel_block * step + offset * item
            rows.append(flat.set_(storage, start, (num_blocks, run * item), (kernel_blocks * step, 1)))
    return rows
