"""The start of an instance of several workers on GPUs: as on a CPU (:mod:`memserve.model.workers.processes`), but that
each worker has a GPU, and a memory, of its own.

    leader                                           worker 1, 2, ...
    loads its part, connects                         the same; says how many blocks of KV its GPU has room for
    the least of that: configuration   --socket->    device, graphs
    device, graphs                     <-socket--    where its KV lies
    maps that: others read it through the leader     follows (:mod:`memserve.model.workers.gpu_steps`)
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from memserve import _core
from memserve.base.config import EngineOptions, InstanceConfig
from memserve.base.errors import UserError, check
from memserve.base.kv_layout import Share, shares
from memserve.base.units import MIB
from memserve.model.gpu.setup import check_pages, device_with_graphs, kv_bytes_here
from memserve.model.workers.gpu_group import GpuWorkerGroup, Ranks, TorchCommunicator
from memserve.model.workers.gpu_steps import DividedGpu, follow_leader
from memserve.model.workers.plans import plan_division, refuse_division
from memserve.model.workers.processes import (
    LOAD_S,
    STEP_S,
    Processes,
    begin_worker,
    refuse_stages_by_layer,
    send_failure,
)
from memserve.protocol.peers import ShardPlace
from memserve.system.gpus import Driver, DriverError, gpu_count, show_first
from memserve.system.imports import leave_compiler_out
from memserve.system.memory import objects_that_stay, usable_cores
from memserve.transport.links.gpu_memory import GpuMemory, MappedMemory, WorkerMemory, shard_place
from memserve.transport.links.nixl import ServingAgent
from memserve.transport.ranges import shard_of

if TYPE_CHECKING:
    from torch import Tensor

    from memserve.model.gpu.streams import Gpu
    from memserve.model.loading.loader import LoadedModel
    from memserve.model.workers.gpu_steps import GpuPart

log = logging.getLogger(__name__)

T = TypeVar("T")

_TRIED_BYTES = 2 * MIB
_LOOK_S = 0.1
"""How often the leader looks whether a worker has ended while all of them start."""
_HANDLING, _KEEPS, _ENDS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "3"
"""What torch does where an operation fails or takes too long: a worker's process it may end, without calling the
operation off (the worker would report a step that is none); the leader's it leaves alone: that ends its waits by
itself."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What a worker is told when it starts. Descriptors are inherited."""

    share: Share
    options: EngineOptions
    parent_pid: int
    meeting: Path
    dram: tuple[int, int] | None
    """Descriptor and bytes of the second tier of all workers. None: there is none."""
    nixl_at: str | None
    """Where peers read its KV over NIXL. None: they do not."""


@dataclass(frozen=True, slots=True)
class _Room:
    """What a worker says before there is a device."""

    blocks: int
    """Of KV, that its GPU has room for."""
    exported: bytes
    """Some of its memory, to see whether the leader can map it."""
    why: str
    """Why the driver exports none; empty: it does."""


class GpuWorkers(Processes):
    """The processes beside the leader, and the leader's own part until it is a device."""

    module = __spec__.name if __spec__ is not None else __name__
    """What the other processes run."""

    def __init__(
        self,
        options: EngineOptions,
        model: LoadedModel,
        gpu: Gpu,
        *,
        shared: bool = False,
        nixl_at: str | None = None,
    ) -> None:
        """Start them. ``model``: on the host; what is left of it is on the leader's GPU afterwards. ``shared``: other
        processes are to read the KV, over NIXL at ``nixl_at``, if that is given.

        Raises :class:`UserError` for a model that cannot be divided."""
        super().__init__()
        self._shared, self._nixl_at = shared, nixl_at
        #: why other processes cannot read the KV; empty: they can
        self.why_unshared = "" if shared else "it is not asked for"
        refuse_stages_by_layer(options.parallel, options.scheduler.layerwise)
        only_stages = options.parallel.tensor == 1
        if not plan_division(model.module, model.geometry, only_stages=only_stages).is_planned:
            raise refuse_division(model.module, "GPUs have whole heads, columns and rows alone, as its plan says")
        worker_shares = shares(options.parallel, model.geometry)
        check_pages(shard_of(worker_shares[0], model.geometry).run_bytes)
        self._options, self._model, self._gpu, self._share = options, model, gpu, worker_shares[0]
        self._meeting = Path(tempfile.mkdtemp(prefix="memserve-workers-"))
        size = options.dram_memory_bytes // model.geometry.block_bytes * model.geometry.block_bytes
        self._dram = _core.SharedArena(size, sealed=False) if size else None
        described = None if self._dram is None else (self._dram.fd, size)
        gpus = gpu_count()
        try:
            for share in worker_shares[1:]:
                order = _Order(share, options, os.getpid(), self._meeting / "store", described, nixl_at)
                shown = {"CUDA_VISIBLE_DEVICES": show_first(share.rank, os.environ, gpus), _HANDLING: _ENDS}
                self._start_process(self.module, order, [] if described is None else [described[0]], shown)
            os.environ.setdefault(_HANDLING, _KEEPS)
            self._crew = self._run_together(lambda: _connected(self._share, model, gpu, self._meeting / "store"))
        except BaseException:
            self.close()
            raise

    def kv_bytes(self) -> int:
        """Memory for KV of the whole instance: as many blocks as fit on every GPU. Raises :class:`UserError`."""
        own_blocks = _blocks_here(self._share, self._options, self._model)
        rooms = [_check_kind(message, _Room) for message in self.receive_all()]
        if self._dram is not None:
            self._dram.seal()
        for rank, room in enumerate(rooms, 1):
            if self._shared and not self.why_unshared and (why := room.why or _why_unmapped(room.exported)):
                self.why_unshared = f"GPU 0 of this instance cannot read the memory of GPU {rank}: {why}"
        return min([own_blocks, *(room.blocks for room in rooms)]) * self._model.geometry.block_bytes

    def build_device(self, model: LoadedModel, config: InstanceConfig) -> DividedGpu:
        """The device of all workers. ``model``: the leader's, as it is served. Raises :class:`UserError`; the caller
        closes the workers then."""
        for line in self._connections:
            line.send(config)
        part = self._run_together(lambda: _part(model, config, self._gpu, self._crew, self._dram))
        places = [_check_kind(message, ShardPlace) for message in self.receive_all()]
        memory = None if self.why_unshared else self._export_memory(part, model, places)
        return DividedGpu(part, self, self._crew, memory=memory)

    def _export_memory(self, part: GpuPart, model: LoadedModel, places: list[ShardPlace]) -> GpuMemory:
        """The KV of all workers, as other processes read it."""
        every = tuple(shard_of(share, model.geometry) for share in shares(self._options.parallel, model.geometry))
        driver = Driver()
        try:
            maps = [MappedMemory(driver, place.exported, place.arena_bytes) for place in places]
        except DriverError as error:
            raise UserError(f"the GPUs of this instance cannot read one another's memory: {error}") from error
        worker_memories = [WorkerMemory(*pair) for pair in zip(places, maps, strict=True)]
        memory = GpuMemory(part.hbm, driver, shards=every, worker_memories=worker_memories)
        if self._nixl_at is not None:
            memory.on_expected = self.expect_reads
        return memory

    def expect_reads(self) -> None:
        """Peers will read the workers' KV in a moment."""
        with suppress(OSError):  # they have ended
            self.send_all()

    def close(self) -> None:
        """End them."""
        super().close()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _run_together(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, in which all workers wait for one another. Raises :class:`UserError` where one has ended
        meanwhile, or it takes too long: then a thread stays behind, until this process ends."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="memserve-start", daemon=True)
        thread.start()
        began = time.monotonic()
        while thread.is_alive():
            thread.join(_LOOK_S)
            late = time.monotonic() - began > LOAD_S
            dead_rank = next((rank for rank, process in enumerate(self._processes, 1) if process.poll() is not None), 0)
            if thread.is_alive() and (dead_rank or late):
                if dead_rank:
                    self._receive_from(
                        dead_rank, self._connections[dead_rank - 1]
                    )  # raises with what it has said, if it did
                why = f"worker {dead_rank} has ended" if dead_rank else f"they are not ready after {LOAD_S:.0f} s"
                raise UserError(f"the workers of this instance cannot start: {why}", hint="their logs say more")
        if errors:
            for rank, line in enumerate(self._connections, 1):
                if line.poll(_LOOK_S):  # the reason may be there, and the own error nothing but its consequence
                    self._receive_from(rank, line)
            raise errors[0]
        return results[0]


def _connected(share: Share, model: LoadedModel, gpu: Gpu, meeting: Path) -> GpuWorkerGroup:
    """Cut ``model``, bring it to this process's GPU, and connect to the others."""
    from memserve.model.workers.sharding import shard

    vocabularies = shard(model.module, share, model.geometry, model.adapters)
    model.module.to(model.device)
    if model.adapters is not None:
        model.adapters.move_to(model.device)

    def connect(ranks: Ranks) -> TorchCommunicator:
        return TorchCommunicator(meeting, ranks, share.rank, 2 * STEP_S)  # later than the leader gives up

    with gpu.compute.use():  # as all operations later: they are in one order
        crew = GpuWorkerGroup(share, vocabularies, connect, model.device)
    gpu.compute.wait()
    return crew


def _blocks_here(share: Share, options: EngineOptions, model: LoadedModel) -> int:
    """Blocks that this GPU has room for. Raises :class:`UserError` where those asked for do not fit."""
    from memserve.model.loading.loader import model_sizes

    share_bytes, whole = shard_of(share, model.geometry).local_geometry.block_bytes, model.geometry.block_bytes
    blocks = options.kv_memory_bytes // whole
    return kv_bytes_here(replace(options, kv_memory_bytes=blocks * share_bytes), model_sizes(model)) // share_bytes


def _part(
    model: LoadedModel, config: InstanceConfig, gpu: Gpu, crew: GpuWorkerGroup, dram: _core.SharedArena | None
) -> GpuPart:
    from memserve.model.capture.forward import best_forward
    from memserve.model.workers.gpu_steps import GpuPart

    with gpu.compute.use():
        forward = best_forward(model.module, crew)
    part = GpuPart(model, config, gpu, crew, forward, dram=dram)
    device_with_graphs(part)
    return part


def _check_kind(message: object, kind: type[T]) -> T:
    check(isinstance(message, kind), "a worker says something else than it is asked for")
    return cast("T", message)


def _why_unmapped(exported: bytes) -> str:
    """Why this process cannot map another worker's memory; empty: it can."""
    try:
        MappedMemory(Driver(), exported, _TRIED_BYTES)
    except DriverError as error:
        return str(error)
    return ""


# -- a worker


def main(descriptor: int) -> None:
    """The process of one worker: loads its part, then follows the leader until that closes the line, or is gone."""
    order: _Order
    line, order = begin_worker(descriptor)
    try:
        with objects_that_stay():
            leave_compiler_out(order.options.device)
            part, agent = _loaded_part(order, line)
    except UserError as error:
        send_failure(line, error.message)
        return
    except Exception as error:
        log.exception("worker %d cannot start", order.share.rank)
        send_failure(line, f"{type(error).__name__}: {error}")
        return
    status = 1
    try:
        follow_leader(line, part, agent.expect_reads if agent is not None else lambda: None)
        status = 0
    except Exception:
        log.exception("worker %d ends", order.share.rank)
    os._exit(status)  # its device may wait for others for ever: nothing here may wait for it


def _loaded_part(order: _Order, line: Connection) -> tuple[GpuPart, ServingAgent | None]:
    import torch

    from memserve.model.gpu.streams import Cuda
    from memserve.model.loading.loader import load_model

    options, share = order.options, order.share
    threads = options.parallel.threads_each(options.threads or usable_cores())
    model = load_model(
        options.model, options.dtype, "cuda", block_tokens=options.block_tokens, threads=threads, lora=options.lora,
        on_host=True, quantization=options.quantization, updates=options.lora_updates,
    ).keep_kv_as(options.kv_dtype)  # fmt: skip
    gpu = Cuda(model.device, options.gpu_memory_share)
    crew = _connected(share, model, gpu, order.meeting)
    dram = None if order.dram is None else _core.SharedArena.attach(*order.dram)  # before the leader seals it
    tried = gpu.zeros(_TRIED_BYTES, dtype=torch.uint8)
    line.send(_Room(_blocks_here(share, options, model), *_exported(tried)))
    config: InstanceConfig = line.recv()
    del tried
    part = _part(model, config, gpu, crew, dram)
    agent = _agent(part, order.nixl_at)
    shard, memory = shard_of(share, model.geometry), part.hbm
    place = shard_place(
        shard, memory.data_ptr(), memory.numel(), _exported(memory)[0], agent.metadata if agent else b""
    )
    line.send(place)
    return part, agent


def _exported(memory: Tensor) -> tuple[bytes, str]:
    """What the leader maps it with, and why it cannot, if so."""
    try:
        return Driver().export(memory.data_ptr()), ""
    except DriverError as error:
        return b"", str(error)


def _agent(part: GpuPart, nixl_at: str | None) -> ServingAgent | None:
    """What lets peers on other hosts read this worker's KV. None: they do not, or not over NIXL."""
    if nixl_at is None:
        return None
    try:
        return ServingAgent(GpuMemory(part.hbm), nixl_at)
    except UserError as error:
        log.warning("NIXL does not start, and KV of this worker goes through its leader: %s", error)
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
