"""An instance of several workers: the processes beside the one that leads, and the device that they are together.

    leader (this process)                      worker 1, 2, ...
    plan k, what k - 1 has drawn  --socket-->  the same step with other heads, columns, layers
    copies, forward, draw         <=memory=>   forward: parts of sums, hidden states, logits

The KV of all workers is one memory: each writes and reads its heads and layers of every page. So nothing outside knows
that an instance has workers: pool, swapping, transfers between instances of other degrees, stores.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from memserve import _core, _kernels
from memserve.base.config import EngineOptions, InstanceConfig
from memserve.base.errors import UserError, check
from memserve.base.kv_layout import Parallel, Share, shares
from memserve.base.types import KVGeometry
from memserve.base.units import MIB
from memserve.instance.events import StepFinished, StepPlan
from memserve.model.capture.forward import best_forward
from memserve.model.device import ModelDevice
from memserve.model.grammar.masks import Grammars, OnBuilt
from memserve.model.loading.loader import LoadedModel, load_model
from memserve.model.workers.gpu_group import GpuWorkerGroup
from memserve.model.workers.group import WorkerGroup
from memserve.model.workers.sharding import shard
from memserve.system.imports import leave_compiler_out
from memserve.system.memory import keep_heap_small, objects_that_stay, usable_cores
from memserve.system.process import die_with, ignore_terminal, module_command, set_thread_environment
from memserve.transport.ports import Arenas, Device, OnLayer

log = logging.getLogger(__name__)

SLOT_BYTES = MIB
"""A worker's part of one operation; longer ones go in pieces."""

STEP_S = 120.0
"""How long a worker waits for another within a step."""

LOAD_S = 600.0
"""How long workers may take to load their parts."""

_END_S = 5.0


class WorkersBroken(Exception):
    """No step can be computed any more: a worker has ended, or they have lost one another."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What a worker is told when it starts. Descriptors are inherited."""

    share: Share
    options: EngineOptions
    config: InstanceConfig
    threads: int
    parent_pid: int
    hbm: tuple[int, int]
    """Descriptor and bytes of the memory of KV."""
    regions: tuple[tuple[int, int], ...]
    """Of the collective of each stage, then of all workers."""


class Processes:
    """The processes beside the leader, and its lines to them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        self._telling = threading.Lock()
        self.ending = False
        """Whether they are being ended, in good order."""

    @property
    def lines(self) -> list[Connection]:
        """To each of them, by rank."""
        return self._lines

    def _start(self, module: str, order: object, inherited: list[int], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = module_command(module, str(theirs.fileno()))
            together = {**os.environ, **environment}
            process = subprocess.Popen(command, pass_fds=[*inherited, theirs.fileno()], env=together)
        line = Connection(ours.detach())
        self._processes.append(process)
        self._lines.append(line)
        line.send(order)

    def hear(self) -> list[object]:
        """What each of them says about its start. Raises :class:`UserError` where one cannot, or says nothing."""
        return [self._hear(rank, line) for rank, line in enumerate(self._lines, 1)]

    def _hear(self, rank: int, line: Connection) -> object:
        try:
            said = line.recv() if line.poll(LOAD_S) else f"it did not load its part within {LOAD_S:.0f} s"
        except (EOFError, OSError):
            said = f"it has ended with status {self._processes[rank - 1].wait(_END_S)}"
        if said and isinstance(said, str):
            self.close()
            raise UserError(f"worker {rank} of this instance cannot start: {said}", hint="its log says more")
        return said

    def watch(self, crew: WorkerGroup | GpuWorkerGroup, device: Divided) -> None:
        """From now on a worker that ends ends the waits of all."""
        for rank, process in enumerate(self._processes, 1):
            args = (rank, process, crew, device)
            threading.Thread(target=self._watch, args=args, name=f"memserve-worker-{rank}", daemon=True).start()

    def _watch(
        self, rank: int, process: subprocess.Popen[bytes], crew: WorkerGroup | GpuWorkerGroup, device: Divided
    ) -> None:
        status = process.wait()
        if self.ending:
            return
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
        log.error("worker %d of this instance %s: the instance cannot go on", rank, how)
        crew.abandon(f"worker {rank} {how}")
        device.broke()

    def tell(self, *letter: object) -> None:
        """Say something to all of them. From any thread."""
        told = pickle.dumps(letter, pickle.HIGHEST_PROTOCOL)
        with self._telling:
            for line in self._lines:
                line.send_bytes(told)

    def close(self) -> None:
        """End them."""
        self.ending = True
        for line in self._lines:
            hang_up(line)  # the end of its orders
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def hang_up(line: Connection) -> None:
    """Close a line, also for a thread that waits for what comes over it."""
    with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as both:
        both.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        line.close()


class Workers(Processes):
    """The processes beside the leader, on a CPU."""

    def __init__(self, options: EngineOptions, config: InstanceConfig, geometry: KVGeometry, query_heads: int) -> None:
        """Start them; they load their parts meanwhile. Raises :class:`UserError` for a model that cannot be divided."""
        super().__init__()
        self.shares = shares(options.parallel, geometry, query_heads)
        refuse_stages_by_layer(options.parallel, config.scheduler.layerwise)
        self.hbm = _core.SharedArena(config.pool.hbm_blocks * geometry.block_bytes, sealed=False)
        first = self.shares[0]
        sizes = [*[first.parts] * first.stages, first.ranks]
        bytes_each = [_kernels.Collective.region_bytes(size, SLOT_BYTES) for size in sizes]
        self._regions = [_core.SharedArena(nbytes, sealed=False) for nbytes in bytes_each]
        described = tuple((region.fd, region.nbytes) for region in self._regions)
        hbm = self.hbm.fd, self.hbm.nbytes
        threads = options.parallel.threads_each(options.threads or usable_cores())
        for share in self.shares[1:]:
            order = _Order(share, options, config, threads, os.getpid(), hbm, described)
            inherited = [hbm[0], *(fd for fd, _ in described)]
            self._start("memserve.model.workers.processes", order, inherited, {"OMP_NUM_THREADS": str(threads)})

    def wait_loaded(self) -> None:
        """Return when all have loaded their parts. Raises :class:`UserError` with what went wrong in one of them."""
        self.hear()
        self.hbm.seal()

    def crew(self, vocabularies: tuple[int, ...]) -> WorkerGroup:
        """The leader's connection to them."""
        stage, whole = self._regions[0], self._regions[-1]
        return _crew(self.shares[0], stage, whole, vocabularies, self.hbm)


class Divided(Device):
    """The device of an instance with workers (:class:`memserve.transport.ports.Device`)."""

    def __init__(self, own: ModelDevice, workers: Processes, crew: WorkerGroup | GpuWorkerGroup) -> None:
        """``own``: the leader's part."""
        self._own, self._workers, self._crew = own, workers, crew
        self.bound_bytes = own.bound_bytes
        workers.watch(crew, self)

    @property
    def on_layer(self) -> OnLayer | None:
        """See :class:`memserve.transport.ports.Device`."""
        return self._own.on_layer

    @on_layer.setter
    def on_layer(self, on_layer: OnLayer | None) -> None:
        self._own.on_layer = on_layer

    @property
    def shared_arenas(self) -> Arenas:
        """What peers can read, tier by tier."""
        return self._own.shared_arenas

    @property
    def waited_ns(self) -> int:
        """How long the leader has waited for the others so far."""
        return self._crew.waited_ns

    def execute(self, plan: StepPlan) -> StepFinished:
        """One step of all workers. Raises :class:`WorkersBroken` from the first failure on."""
        if self._crew.broken:
            raise WorkersBroken(self._crew.broken)
        try:
            self._workers.tell(self._own.take_drawn(), plan)
            return self._own.execute(plan)
        except BaseException as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> WorkersBroken:
        """The workers may be at different operations now, and could not be brought together again."""
        self._crew.abandon(f"a step failed: {type(error).__name__}: {error}")
        self.broke()
        return WorkersBroken(self._crew.broken)

    def build_grammar(self, job_id: int, grammar: str, on_built: OnBuilt) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        self._own.build_grammar(job_id, grammar, on_built)

    def forget_grammar(self, job_id: int) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        self._own.forget_grammar(job_id)

    def await_mask(self, slot: int, on_mask: Callable[[], None]) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        self._own.await_mask(slot, on_mask)

    @property
    def grammars(self) -> Grammars | None:
        """Of the worker that draws."""
        return self._own.grammars

    def broke(self) -> None:
        """Say so, once."""
        tell, self.on_broken = self.on_broken, None
        if tell is not None:
            tell()

    def close(self) -> None:
        """End the workers; release the arenas with the last reference."""
        self._workers.close()
        self._own.close()


def refuse_stages_by_layer(parallel: Parallel, layerwise: str) -> None:
    """Raise :class:`UserError` for KV by layer where no worker has all layers."""
    if layerwise != "off" and parallel.pipeline > 1:
        hint = "use --tensor-parallel, or leave out --layerwise"
        raise UserError("layers of several stages cannot be placed by layer", hint=hint, param="layerwise")


def build_divided(model: LoadedModel, options: EngineOptions, config: InstanceConfig, *, shared: bool) -> Divided:
    """A device of several workers on a CPU. Raises :class:`UserError` for what cannot be divided."""
    workers = Workers(options, config, model.geometry, model.query_heads)
    try:
        vocabularies = shard(model.module, workers.shares[0], model.geometry, model.adapters)
        workers.wait_loaded()
        crew = workers.crew(vocabularies)
        forward = best_forward(model.module, crew)
        own = ModelDevice(model, config, forward, shared=shared, crew=crew)
    except BaseException:
        workers.close()
        raise
    return Divided(own, workers, crew)


def _crew(
    share: Share,
    stage: _core.SharedArena,
    whole: _core.SharedArena,
    vocabularies: tuple[int, ...],
    hbm: _core.SharedArena | None,
) -> WorkerGroup:
    return WorkerGroup(
        share,
        _kernels.Collective(stage.address, share.part, share.parts, SLOT_BYTES, STEP_S),
        _kernels.Collective(whole.address, share.rank, share.ranks, SLOT_BYTES, STEP_S),
        vocabularies,
        hbm,
    )


# -- a worker


def begin_worker(descriptor: int) -> tuple[Connection, Any]:
    """The line to the leader and its order, in a process that ends with the leader's."""
    ignore_terminal()
    line = Connection(descriptor)
    order = line.recv()
    die_with(order.parent_pid)
    set_thread_environment()
    keep_heap_small()
    return line, order


def say_why(line: Connection, message: str) -> None:
    """To the leader, why this worker cannot start; the leader may have ended for the same reason."""
    with suppress(OSError):
        line.send(message)


def main(descriptor: int) -> None:
    """The process of one worker: loads its part, then follows the leader until that closes the line, or is gone."""
    order: _Order
    line, order = begin_worker(descriptor)
    try:
        with objects_that_stay():
            leave_compiler_out(order.options.device)
            device = _load(order, line)
    except UserError as error:
        say_why(line, error.message)
        return
    while True:
        try:
            drawn, plan = pickle.loads(line.recv_bytes())
        except (EOFError, OSError):
            return
        device.follow(drawn, plan)


def _load(order: _Order, line: Connection) -> ModelDevice:
    options, share = order.options, order.share
    tokens, threads = options.block_tokens, order.threads
    model = load_model(options.model, options.dtype, "cpu", block_tokens=tokens, threads=threads, lora=options.lora)
    vocabularies = shard(model.module, share, model.geometry, model.adapters)
    stage, whole = (_core.SharedArena.attach(*order.regions[at]) for at in (share.stage, -1))
    hbm = _core.SharedArena.attach(*order.hbm)
    check(hbm.nbytes == order.config.pool.hbm_blocks * model.geometry.block_bytes, "the arena has another size")
    line.send("")
    crew = _crew(share, stage, whole, vocabularies, hbm)
    forward = best_forward(model.module, crew)
    config = replace(order.config, pool=replace(order.config.pool, dram_blocks=0))
    device = ModelDevice(model, config, forward, crew=crew)
    _kept.append((stage, whole, hbm))
    return device


_kept: list[object] = []
"""Memory that the crew knows by address."""


if __name__ == "__main__":
    main(int(sys.argv[1]))
