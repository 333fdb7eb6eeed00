"""An instance of several workers on fake GPUs: each worker is a thread, its lines to the leader are real ones."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from typing import Any

import numpy as np
import torch

from fake_driver import FakeDriver
from fake_gpu import FakeCommunicator, FakeGpu, FakeWorld
from memserve import _core
from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.kv_layout import Parallel, Share, shares
from memserve.base.types import CopyBlocks, KVGeometry, Tier
from memserve.instance.events import OpenSequence
from memserve.model.attention.backends import TritonAttention
from memserve.model.forward import EagerForward
from memserve.model.gpu.device import GpuDevice
from memserve.model.workers.gpu_group import GpuWorkerGroup
from memserve.model.workers.gpu_steps import DividedGpu, GpuPart, follow_leader
from memserve.model.workers.processes import Processes
from memserve.model.workers.sharding import shard
from memserve.transport.links.gpu_memory import ArenaParts, GpuMemory, MappedMemory, WorkerMemory, shard_place
from memserve.transport.ranges import Ranges, cut_pieces, shard_of
from tiny_models import CONTEXT_TOKENS, GREEDY, Driver, loaded, prompt, sequence


class Watched(TritonAttention):
    """Tells the fake of its ``gpu`` which pages it reads and writes."""

    def __init__(self, gpu: FakeGpu, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gpu = gpu

    def run_attention(self, layer: int, q: Any, k: Any, v: Any, **more: Any) -> Any:
        batch, g = self.batch, self.batch.geometry
        memory = batch.arena.view(torch.uint8)
        contexts, starts = batch.contexts.tolist(), batch.q_starts.tolist()
        for row, context in enumerate(contexts):
            count = starts[row + 1] - starts[row]
            for entry in range(-(-context // g.block_tokens)):
                page = int(batch.tables[int(batch.table_rows[row]), entry]) * g.num_layers + layer - self._first_layer
                written = (entry + 1) * g.block_tokens > context - count
                bytes_of = memory[page * g.page_bytes : (page + 1) * g.page_bytes]
                self._gpu.access(self._gpu.compute, bytes_of, writes=written)
        return super().run_attention(layer, q, k, v, **more)


class Part(GpuPart):
    """A worker's part; ``finishing`` is called before it finishes a step, and ``began`` counts those that it began."""

    finishing: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.began = threading.Semaphore(0)

    @property
    def _is_triton(self) -> bool:
        return True

    def begin_part(self, *letter: Any) -> Any:
        finish = super().begin_part(*letter)
        self.began.release()

        def held() -> Any:
            self.finishing()
            return finish()

        return held


class WatchedMemory(GpuMemory):
    """KV of all workers that is read and written as other processes do: an error where a device may still touch it."""

    def __init__(self, parts: list[Any], geometry: KVGeometry, gpus: list[FakeGpu], parallel: Parallel) -> None:
        """``parts``: each worker's memory."""
        driver, every = FakeDriver(), tuple(shard_of(share, geometry) for share in shares(parallel, geometry))
        others = []
        for own, part in zip(every[1:], parts[1:], strict=True):
            exported, nbytes = driver.export(part.data_ptr()), part.numel()
            place = shard_place(own, part.data_ptr(), nbytes, exported)
            others.append(WorkerMemory(place, MappedMemory(driver, exported, nbytes)))
        super().__init__(parts[0], driver, shards=every if len(every) > 1 else (), worker_memories=others)
        self._watched = [(part.view(-1), gpu) for part, gpu in zip(parts, gpus, strict=True)]

    def copy_and_seal(self, source: ArenaParts, ranges: Ranges, target: ArenaParts | None) -> Any:
        if source is self.arena_parts:
            for piece in cut_pieces(ranges, self.arena_parts.shards):
                self._look(piece.source, piece.ranges.src_offsets, piece.ranges.range_bytes, "host_reads")
        if target is self.arena_parts:
            for piece in cut_pieces(ranges, (), self.arena_parts.shards):
                self._look(piece.target, piece.ranges.dst_offsets, piece.ranges.range_bytes, "host_writes")
        return super().copy_and_seal(source, ranges, target)

    def _look(self, worker: int, offsets: Any, nbytes: int, access: str) -> None:
        memory, gpu = self._watched[worker]
        for offset in offsets.tolist():
            getattr(gpu, access)(memory[offset : offset + nbytes])


class _OnGpu(GpuDevice):
    @property
    def _is_triton(self) -> bool:
        return True


class Alone:
    """As :class:`Together`, but one worker: its device is one on a GPU."""

    def __init__(self, module: Any) -> None:
        model, self._gpu = loaded(copy.deepcopy(module)), FakeGpu()
        self.geometry = model.geometry
        config = InstanceConfig(CONTEXT_TOKENS, pool=PoolConfig(64, 8), scheduler=SchedulerConfig(max_running=8))
        device, choose = sys.modules["memserve.model.device"], sys.modules["memserve.model.device"].choose_attention
        device.choose_attention = lambda arena, geometry, crew=None: partial(
            Watched, self._gpu, arena.view(-1), geometry
        )
        try:
            self.driver = Driver.__new__(Driver)
            self.driver.device, self.driver.steps = _OnGpu(model, config, self._gpu, shared=True), 0
        finally:
            device.choose_attention = choose
        self.dram = self.driver.device._arenas.shared_dram

    def memory(self) -> WatchedMemory:
        """Its KV."""
        return WatchedMemory([self.driver.device._arenas.hbm], self.geometry, [self._gpu], Parallel(1))

    def close(self) -> None:
        self.driver.device.close()


class Together:
    """The workers. ``driver``: see :class:`tiny_models.Driver`."""

    def __init__(
        self,
        module: Any,
        parallel: Parallel,
        *,
        blocks: int = 64,
        dram_blocks: int = 8,
        limit_s: float = 60.0,
        graphs: bool = False,
        kv_dtype: str = "auto",
        prepare: Callable[[int, FakeGpu], object] = lambda rank, gpu: None,
    ) -> None:
        """``prepare`` gets each worker's rank and GPU before anything runs there."""
        self.world, self.errors, self._parallel = FakeWorld(limit_s), [], parallel
        model = loaded(copy.deepcopy(module), kv_dtype=kv_dtype)
        self._kv_dtype, self.geometry = kv_dtype, model.geometry
        self.config = InstanceConfig(
            CONTEXT_TOKENS, pool=PoolConfig(blocks, dram_blocks), scheduler=SchedulerConfig(max_running=8)
        )
        self.dram = _core.SharedArena(dram_blocks * model.geometry.block_bytes)
        self.gpus = [FakeGpu() for _ in range(parallel.worker_count)]
        for rank, gpu in enumerate(self.gpus):
            prepare(rank, gpu)
        self.parts: dict[int, Part] = {}
        device, choose = sys.modules["memserve.model.device"], sys.modules["memserve.model.device"].choose_attention
        device.choose_attention = self._choose
        try:
            found = shares(parallel, model.geometry)
            threads = [threading.Thread(target=self._make, args=(module, share, graphs)) for share in found]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        finally:
            device.choose_attention = choose
        assert not self.errors and len(self.parts) == parallel.worker_count, self.errors
        self.processes = Processes()
        self.followers = []
        for rank in range(1, parallel.worker_count):
            ours, theirs = Pipe()
            self.processes.connections.append(ours)
            args = theirs, self.parts[rank]
            self.followers.append(threading.Thread(target=self._follow, args=args, daemon=True))
        self.driver = Driver.__new__(Driver)
        self.driver.steps = 0
        self.broken: list[str] = []
        for thread in self.followers:
            thread.start()
        self.device = DividedGpu(self.parts[0], self.processes, self.parts[0]._gpu_crew, limit_s=limit_s)
        self.device.on_broken = lambda: self.broken.append(self.parts[0]._gpu_crew.broken)
        self.driver.device = self.device

    def dram_block(self, block: int) -> torch.Tensor:
        """A block of the second tier as the host reads it now: an error where a device may still write it."""
        memory = torch.frombuffer(self.dram, dtype=torch.uint8).view(-1, self.geometry.block_bytes)[block]
        for gpu in self.gpus:
            gpu.host_reads(memory)
        return memory

    def memory(self) -> WatchedMemory:
        """The KV of all workers."""
        parts = [self.parts[rank].hbm for rank in range(len(self.parts))]
        return WatchedMemory(parts, self.geometry, self.gpus, self._parallel)

    def close(self) -> None:
        self.device.close()
        for thread in self.followers:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.followers)

    def _make(self, module: Any, share: Share, graphs: bool) -> None:
        try:
            model, gpu = loaded(copy.deepcopy(module), kv_dtype=self._kv_dtype), self.gpus[share.rank]
            with gpu.compute.use():
                vocabularies = shard(model.module, share, model.geometry)
                crew = GpuWorkerGroup(
                    share,
                    vocabularies,
                    lambda ranks: FakeCommunicator(self.world, ranks, share.rank, gpu),
                    model.device,
                )
                crew.gpu = gpu
                forward = EagerForward(model.module)
                part = Part(model, self.config, gpu, crew, forward, dram=self.dram)
            self.parts[share.rank] = part
            if graphs:
                part.capture_graphs()
        except BaseException as error:
            self.errors.append(error)
            self.world.end(f"{type(error).__name__}: {error}")

    @staticmethod
    def _choose(arena: Any, geometry: Any, crew: Any = None) -> Any:
        first_layer = crew.share.own_layers.start
        return partial(Watched, crew.gpu, arena.view(-1), geometry, first_layer=first_layer)

    def _follow(self, line: Any, part: Part) -> None:
        try:
            follow_leader(line, part)
        except BaseException as error:
            self.errors.append(error)
            self.world.end(f"{type(error).__name__}: {error}")


def swapped_steps(driver: Any) -> list[int]:
    """Two chunks, a decode, out to DRAM (blocks 6 and 0) while another sequence takes the blocks, back elsewhere, two
    decodes: the tokens that are drawn."""
    tokens, intruder = prompt(37, 8), prompt(34, 9)
    driver.step([(0, 0, 33, ())], open=[sequence(0, tokens, [1, 2])])
    got = driver.step([(0, 33, 4, (0,))]).tokens + driver.decode(0, 37, 1)
    out = CopyBlocks(Tier.HBM, Tier.DRAM, [1, 2], [6, 0])
    driver.step([(1, 0, 34, ())], close=[0], copies=[out], open=[sequence(1, intruder, [2, 1])])
    back = CopyBlocks(Tier.DRAM, Tier.HBM, [6, 0], [11, 10])
    known = np.concatenate([tokens, got]).astype(np.int32)
    resumed = OpenSequence(5, known, 37, 0, GREEDY, [11, 10])
    return got + driver.step([(5, 38, 1, (5,))], copies=[back], open=[resumed]).tokens + driver.decode(5, 39, 1)
