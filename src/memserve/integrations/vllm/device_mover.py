"""Blocks come out of a device's memory and into it by slots of pinned memory, layer by layer, ordered by events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from memserve.integrations.block_cache import BlockCache, CacheJobs
from memserve.integrations.store_cache import Value
from memserve.integrations.vllm.device_memory import DeviceMemory, Landing
from memserve.integrations.vllm.lookups import RankNames
from memserve.integrations.vllm.worker import Block
from memserve.model.gpu.streams import Mark


class DeviceMover:
    """See :class:`memserve.integrations.vllm.worker.Mover`."""

    def __init__(
        self, pool: BlockCache, memories: Sequence[DeviceMemory], names: Sequence[RankNames], *, by_layer: bool
    ) -> None:
        """``by_layer``: vLLM says in every forward when a layer begins. False: it may replay whole forwards, which wait
        for all layers at once."""
        self._pool, self._memories, self._names = pool, memories, names
        self._by_layer = by_layer
        self._known_layers: set[str] = set()
        self._landing = threading.Lock()
        self._behind: Mark | None = None
        self._coming: dict[str, list[Landing]] = {}
        """By request: loads whose copies were enqueued since the last step."""
        self._outstanding: list[Landing] = []
        """Those that the layers of this forward wait for, each for its own."""

    # -- saves

    def begin_saves(self, blocks: Sequence[Block]) -> _DeviceSaving | None:
        """See :class:`~memserve.integrations.vllm.worker.Mover`. What finds no free slot is not saved."""
        if not self._pool.is_up:
            return None
        saves = list[tuple[DeviceMemory, list[Block], list[int]]]()
        for group, memory in enumerate(self._memories):
            of_group = [block for block in blocks if block[0] == group]
            slots = memory.saving.take_slots(len(of_group)) if of_group else []
            self._pool.counts["refused"] += len(of_group) - len(slots)
            if slots:
                saves.append((memory, of_group[: len(slots)], slots))
        return _DeviceSaving(self, saves) if saves else None

    def put_saved(self, saved: Sequence[tuple[DeviceMemory, list[Block], list[int]]], marks: Sequence[Mark]) -> None:
        """Give to the store what is in the slots once ``marks`` are past. In a thread that may wait."""
        collected = []
        try:
            for (memory, blocks, slots), mark in zip(saved, marks, strict=True):
                mark.wait()
                collected += self._pool.collect_copies(self._slot_values(memory, blocks, slots))
        finally:
            self.give_back(saved)
        if collected:
            self._pool.put_collected(collected)

    @staticmethod
    def give_back(saved: Sequence[tuple[DeviceMemory, list[Block], list[int]]]) -> None:
        """The slots are free: no copy uses them."""
        for memory, _, slots in saved:
            memory.saving.give_back(slots)

    def _slot_values(self, memory: DeviceMemory, blocks: Sequence[Block], slots: Sequence[int]) -> list[Value]:
        return [
            self._names[group].value_of(block_hash, memory.slot_pieces(slot))
            for (group, block_hash, _), slot in zip(blocks, slots, strict=True)
        ]

    # -- loads

    def before_loads(self) -> None:
        """See :class:`~memserve.integrations.vllm.worker.Mover`. All that vLLM has enqueued so far may concern
        earlier owners of the blocks."""
        self._behind = self._memories[0].gpu.current_stream().record_mark()

    def load_blocks(
        self, request_id: str, blocks: Sequence[Block], end_s: float, over: Callable[[list[bool]], None]
    ) -> None:
        """See :class:`~memserve.integrations.vllm.worker.Mover`. ``over`` is told when all copies are enqueued:
        each layer of the request's first forward waits for its own."""
        behind, hits = self._behind, [False] * len(blocks)
        under_way: tuple[DeviceMemory, list[int], Mark] | None = None
        try:
            for group, memory in enumerate(self._memories):
                indices_left = [index for index, block in enumerate(blocks) if block[0] == group]
                while indices_left:
                    _free_slots(under_way)
                    under_way = None
                    slots = memory.loading.take_slots(len(indices_left), end_s)
                    if not slots or time.monotonic() >= end_s:
                        memory.loading.give_back(slots)
                        break
                    batch, indices_left = indices_left[: len(slots)], indices_left[len(slots) :]
                    under_way = self._load_batch(memory, request_id, blocks, slots, batch, hits, behind)
            over(hits)
        finally:
            _free_slots(under_way)

    def _load_batch(
        self,
        memory: DeviceMemory,
        request_id: str,
        blocks: Sequence[Block],
        slots: list[int],
        indices: Sequence[int],
        hits: list[bool],
        behind: Mark | None,
    ) -> tuple[DeviceMemory, list[int], Mark] | None:
        """Bring the blocks ``indices`` into slots, and enqueue the copies of those that are right."""
        try:
            read_flags = self._pool.get_values(self._slot_values(memory, [blocks[index] for index in indices], slots))
            right = [(slot, index) for slot, index, ok in zip(slots, indices, read_flags, strict=False) if ok]
            if not right or behind is None:
                memory.loading.give_back(slots)
                return None
            with self._landing:
                marks = memory.load_blocks(
                    [slot for slot, _ in right], [blocks[index][2] for _, index in right], behind
                )
                self._coming.setdefault(request_id, []).append(marks)
        except BaseException:
            memory.loading.give_back(slots)
            raise
        for _, index in right:
            hits[index] = True
        return memory, slots, marks.last

    # -- the order

    def before_step(self, started_ids: Sequence[str]) -> None:
        """See :class:`~memserve.integrations.vllm.worker.Mover`. A request that does not run may have lost its
        blocks to one that writes into them at once: what comes for it is waited for as a whole."""
        with self._landing:
            coming, self._coming = self._coming, {}
        stream, by_layer = self._memories[0].gpu.current_stream(), set(started_ids) if self._by_layer else set()
        for request_id, loads in coming.items():
            for marks in loads:
                if request_id not in by_layer:
                    stream.wait_for(marks.last)
                    continue
                self._outstanding.append(marks)
                stream.wait_for(marks.shared)
                for layer, mark in marks.layers.items():
                    if layer not in self._known_layers:
                        stream.wait_for(mark)

    def wait_for_layer(self, layer: str) -> None:
        """See :class:`~memserve.integrations.vllm.worker.Mover`."""
        self._known_layers.add(layer)
        for marks in self._outstanding:
            if layer in marks.layers:
                self._memories[0].gpu.current_stream().wait_for(marks.layers[layer])

    def after_step(self) -> None:
        """See :class:`~memserve.integrations.vllm.worker.Mover`."""
        for marks in self._outstanding:
            self._memories[0].gpu.current_stream().wait_for(marks.last)
        self._outstanding.clear()


def _free_slots(under_way: tuple[DeviceMemory, list[int], Mark] | None) -> None:
    """The copies out of these slots are done: the slots are free."""
    if under_way is not None:
        memory, slots, mark = under_way
        mark.wait()
        memory.loading.give_back(slots)


class _DeviceSaving:
    def __init__(self, mover: DeviceMover, saved: list[tuple[DeviceMemory, list[Block], list[int]]]) -> None:
        self._mover, self._saved = mover, saved
        self._pieces_left = [set(range(len(memory.layout.piece_bytes))) for memory, _, _ in saved]

    def save_layer(self, layer: str) -> None:
        for index, (memory, _, _) in enumerate(self._saved):
            self._stage_pieces(index, memory.layers.get(layer, ()))

    def _stage_pieces(self, index: int, numbers: Sequence[int]) -> None:
        memory, blocks, slots = self._saved[index]
        if numbers:
            memory.stage_pieces(numbers, slots, [block_id for _, _, block_id in blocks])
            self._pieces_left[index] -= set(numbers)

    def finish_save(self, savers: CacheJobs) -> None:
        for index, pieces_left in enumerate(self._pieces_left):
            self._stage_pieces(index, sorted(pieces_left))
        marks = [memory.mark_staged() for memory, _, _ in self._saved]
        if not savers.start(partial(self._mover.put_saved, self._saved, marks)):
            self._give_back(marks)

    def drop_save(self) -> None:
        self._give_back([memory.mark_staged() for memory, _, _ in self._saved])

    def _give_back(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            mark.wait()
        self._mover.give_back(self._saved)
