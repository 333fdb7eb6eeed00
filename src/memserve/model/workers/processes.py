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
from memserve.base.units import MIB
from memserve.instance.events import StepFinished, StepPlan
from memserve.model.capture.forward import best_forward
from memserve.model.device import ModelDevice
from memserve.model.grammar.masks import Grammars, OnBuilt
from memserve.model.loading.loader import LoadedModel, load_model
from memserve.model.loading.stored import stored_of
from memserve.model.workers.gpu_group import GpuWorkerGroup
from memserve.model.workers.group import GroupMemory, WorkerGroup
from memserve.model.workers.plans import Division, plan_division
from memserve.model.workers.sharding import shard, share_states
from memserve.model.workers.trial import Trial, follow_trial
from memserve.protocol.messages import AdapterFiles
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
    activation_bits: int
    """The leader's (:class:`~memserve.model.loading.loader.LoadedModel`)."""
    parent_pid: int
    memory: tuple[tuple[int, int] | None, ...]
    """Descriptors and bytes, as :class:`~memserve.model.workers.group.GroupMemory` has them."""
    regions: tuple[tuple[int, int], ...]
    """Of the collective of each stage, then of all workers."""


class Processes:
    """The processes beside the leader, and its lines to them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._send_lock = threading.Lock()
        self.ending = False
        """Whether they are being ended, in good order."""

    @property
    def connections(self) -> list[Connection]:
        """To each of them, by rank."""
        return self._connections

    def _start_process(self, module: str, order: object, inherited: list[int], environment: Mapping[str, str]) -> None:
        ours, child_socket = socket.socketpair()
        with child_socket:
            command = module_command(module, str(child_socket.fileno()))
            together = {**os.environ, **environment}
            process = subprocess.Popen(command, pass_fds=[*inherited, child_socket.fileno()], env=together)
        line = Connection(ours.detach())
        self._processes.append(process)
        self._connections.append(line)
        line.send(order)

    def receive_all(self) -> list[Any]:
        """What each of them says about its start, or about an adapter. Raises :class:`UserError` where one cannot
        start, or says nothing."""
        return [self._receive_from(rank, line) for rank, line in enumerate(self._connections, 1)]

    def _receive_from(self, rank: int, line: Connection) -> object:
        try:
            message = line.recv() if line.poll(LOAD_S) else f"it did not load its part within {LOAD_S:.0f} s"
        except (EOFError, OSError):
            message = f"it has ended with status {self._processes[rank - 1].wait(_END_S)}"
        if message and isinstance(message, str):
            self.close()
            raise UserError(f"worker {rank} of this instance cannot start: {message}", hint="its log says more")
        return message

    def watch_processes(self, crew: WorkerGroup | GpuWorkerGroup, device: Divided) -> None:
        """From now on a worker that ends ends the waits of all."""
        for rank, process in enumerate(self._processes, 1):
            args = (rank, process, crew, device)
            threading.Thread(target=self._watch_process, args=args, name=f"memserve-worker-{rank}", daemon=True).start()

    def _watch_process(
        self, rank: int, process: subprocess.Popen[bytes], crew: WorkerGroup | GpuWorkerGroup, device: Divided
    ) -> None:
        status = process.wait()
        if self.ending:
            return
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
        log.error("worker %d of this instance %s: the instance cannot go on", rank, how)
        crew.mark_broken(f"worker {rank} {how}")
        device.report_broken()

    def send_all(self, *command: object) -> None:
        """Send ``command`` to all of them. From any thread."""
        data = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        with self._send_lock:
            for line in self._connections:
                line.send_bytes(data)

    def close(self) -> None:
        """End them."""
        self.ending = True
        for line in self._connections:
            disconnect(line)  # the end of its orders
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def disconnect(line: Connection) -> None:
    """Close a line, also for a thread that waits for what comes over it."""
    with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        line.close()


class Workers(Processes):
    """The processes beside the leader, on a CPU."""

    def __init__(self, options: EngineOptions, config: InstanceConfig, model: LoadedModel, division: Division) -> None:
        """Start them; they load their parts meanwhile. Raises :class:`UserError` for a model that cannot be divided."""
        super().__init__()
        geometry = model.geometry
        self.shares = shares_of(options.parallel, model, division)
        refuse_stages_by_layer(options.parallel, config.scheduler.layerwise)
        dram_blocks = config.pool.dram_blocks if model.states else 0
        sizes = [config.pool.hbm_blocks * geometry.block_bytes, dram_blocks * geometry.block_bytes]
        arenas = [_core.SharedArena(size, sealed=False) if size else None for size in sizes]
        self.memory = GroupMemory(*arenas)
        first = self.shares[0]
        counts = [*[first.parts] * first.stages, first.ranks]
        bytes_each = [_kernels.Collective.region_bytes(size, SLOT_BYTES) for size in counts]
        self._regions = [_core.SharedArena(nbytes, sealed=False) for nbytes in bytes_each]
        described = tuple((region.fd, region.nbytes) for region in self._regions)
        memory = tuple(None if arena is None else (arena.fd, arena.nbytes) for arena in arenas)
        threads = options.parallel.threads_each(options.threads or usable_cores())
        for share in self.shares[1:]:
            order = _Order(
                share, options, config, threads, model.activation_bits, os.getpid(), memory, described
            )  # fmt: skip
            inherited = [fd for fd, _ in (*described, *filter(None, memory))]
            self._start_process("memserve.model.workers.processes", order, inherited, {"OMP_NUM_THREADS": str(threads)})

    def wait_loaded(self) -> None:
        """Return when all have loaded their parts. Raises :class:`UserError` with what went wrong in one of them."""
        self.receive_all()
        self.memory.seal()

    def connect_group(self, vocabularies: tuple[int, ...]) -> WorkerGroup:
        """The leader's connection to them."""
        stage, whole = self._regions[0], self._regions[-1]
        return _connect_group(self.shares[0], (stage, whole), vocabularies, self.memory)


class Divided(Device):
    """The device of an instance with workers (:class:`memserve.transport.ports.Device`)."""

    def __init__(self, leader: ModelDevice, workers: Processes, crew: WorkerGroup | GpuWorkerGroup) -> None:
        """``leader``: the leader's part."""
        self._leader, self._workers, self._crew = leader, workers, crew
        self.bound_bytes = leader.bound_bytes
        workers.watch_processes(crew, self)

    @property
    def on_layer(self) -> OnLayer | None:
        return self._leader.on_layer

    @on_layer.setter
    def on_layer(self, on_layer: OnLayer | None) -> None:
        self._leader.on_layer = on_layer

    @property
    def shared_arenas(self) -> Arenas:
        """What peers can read, tier by tier."""
        return self._leader.shared_arenas

    @property
    def waited_ns(self) -> int:
        """How long the leader has waited for the others so far."""
        return self._crew.waited_ns

    def execute(self, plan: StepPlan) -> StepFinished:
        """One step of all workers. Raises :class:`WorkersBroken` from the first failure on."""
        if self._crew.broken:
            raise WorkersBroken(self._crew.broken)
        try:
            self._workers.send_all(self._leader.take_sampled(), self._leader.late_slots, plan)
            return self._leader.execute(plan)
        except BaseException as error:
            raise self._mark_broken(error) from error

    def read_adapter(self, files: AdapterFiles) -> Callable[[], None]:
        """See :class:`memserve.transport.ports.Device`. The workers read it between steps."""
        install = self._leader.read_adapter(files)

        def install_everywhere() -> None:
            self._workers.send_all(files)
            try:
                install()
            finally:
                reasons = [reply for (reply,) in self._workers.receive_all() if reply]
            if reasons:
                self.drop_adapter(files.digest)
                raise UserError(reasons[0], hint="its folder must be readable by all workers", param="lora_path")

        return install_everywhere

    def drop_adapter(self, digest: str) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        self._workers.send_all(digest)
        self._leader.drop_adapter(digest)

    def _mark_broken(self, error: BaseException) -> WorkersBroken:
        """The workers may be at different operations now, and could not be brought together again."""
        self._crew.mark_broken(f"a step failed: {type(error).__name__}: {error}")
        self.report_broken()
        return WorkersBroken(self._crew.broken)

    def build_grammar(self, job_id: int, grammar: str, on_built: OnBuilt) -> None:
        self._leader.build_grammar(job_id, grammar, on_built)

    def forget_grammar(self, job_id: int) -> None:
        self._leader.forget_grammar(job_id)

    def await_mask(self, slot: int, on_mask: Callable[[], None]) -> None:
        self._leader.await_mask(slot, on_mask)

    @property
    def grammars(self) -> Grammars | None:
        """Of the worker that draws."""
        return self._leader.grammars

    def report_broken(self) -> None:
        """Say so, once."""
        tell, self.on_broken = self.on_broken, None
        if tell is not None:
            tell()

    def close(self) -> None:
        """End the workers; release the arenas with the last reference."""
        self._workers.close()
        self._leader.close()


def refuse_stages_by_layer(parallel: Parallel, layerwise: str) -> None:
    """Raise :class:`UserError` for KV by layer where no worker has all layers."""
    if layerwise != "off" and parallel.pipeline > 1:
        hint = "use --tensor-parallel, or leave out --layerwise"
        raise UserError("layers of several stages cannot be placed by layer", hint=hint, param="layerwise")


def build_divided(model: LoadedModel, options: EngineOptions, config: InstanceConfig, *, shared: bool) -> Divided:
    """A device of several workers on a CPU. Raises :class:`UserError` for what cannot be divided."""
    division = plan_division(model.module, model.whole_geometry, only_stages=options.parallel.tensor == 1)
    workers = Workers(options, config, model, division)
    try:
        trial = None if division.is_planned else Trial(model.module, model.geometry.dtype)
        vocabularies = shard(model.module, workers.shares[0], model.whole_geometry, model.adapters)
        workers.wait_loaded()
        crew = workers.connect_group(vocabularies)
        if trial is not None:
            trial.compare_together(crew)
        forward = best_forward(model.module, crew)
        leader = ModelDevice(model, config, forward, shared=shared, crew=crew)
    except BaseException:
        workers.close()
        raise
    return Divided(leader, workers, crew)


def shares_of(parallel: Parallel, model: LoadedModel, division: Division) -> list[Share]:
    """What each worker has of ``model``. Raises :class:`UserError`."""
    # what is compared by the workers is compared without lent heads, which only the kernel has
    query_heads = model.query_heads if division.is_planned else 0
    whole_heads, layers = not division.divides_heads, len(division.layers)
    return shares(parallel, model.geometry, query_heads, whole_heads=whole_heads, layers=layers)


def slot_bytes(parallel: Parallel, model: LoadedModel) -> int:
    """What all workers together have of the recurrent state of one sequence, ``model`` being whole. Raises
    :class:`UserError` for a model that cannot be divided."""
    if not model.states or parallel.worker_count == 1:
        return model.states.nbytes
    division = plan_division(model.module, model.whole_geometry, only_stages=parallel.tensor == 1)
    found = shares_of(parallel, model, division)
    return sum(share_states(model.module, division.layers, share).held.nbytes for share in found)


def _connect_group(
    share: Share,
    regions: tuple[_core.SharedArena, _core.SharedArena],
    vocabularies: tuple[int, ...],
    memory: GroupMemory,
) -> WorkerGroup:
    """``regions``: of the collectives of its stage, and of all workers."""
    stage, whole = regions
    return WorkerGroup(
        share,
        _kernels.Collective(stage.address, share.part, share.parts, SLOT_BYTES, STEP_S),
        _kernels.Collective(whole.address, share.rank, share.ranks, SLOT_BYTES, STEP_S),
        vocabularies,
        memory,
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


def send_failure(line: Connection, message: str) -> None:
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
        send_failure(line, error.message)
        return
    while True:
        try:
            command = pickle.loads(line.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # to destroy torch's objects takes half a second, and frees nothing
        match command:
            case (AdapterFiles() as files,):
                line.send((_read_adapter(device, files),))
            case (str() as digest,):
                device.drop_adapter(digest)
            case _:
                device.follow_step(*command)


def _read_adapter(device: ModelDevice, files: AdapterFiles) -> str:
    """Why this worker cannot have the adapter; empty: it has it."""
    try:
        device.read_adapter(files)()
    except UserError as error:
        return error.message
    except Exception as error:
        log.exception("the adapter %s cannot be loaded", files.name)
        return f"{type(error).__name__}: {error}"
    return ""


def _load(order: _Order, line: Connection) -> ModelDevice:
    options, share = order.options, order.share
    tokens, threads = options.block_tokens, order.threads
    model = load_model(
        options.model, options.dtype, "cpu", block_tokens=tokens, threads=threads, lora=options.lora,
        quantization=options.quantization, updates=options.lora_updates,
    )  # fmt: skip
    if order.activation_bits:
        stored_of(model.module).activation_bits = order.activation_bits
    model = model.keep_kv_as(options.kv_dtype)
    model = model.lay_out_kv(windows_apart=order.config.pool.windows is not None, shares_kv=False)
    is_planned = plan_division(model.module, model.whole_geometry, only_stages=share.parts == 1).is_planned
    vocabularies = shard(model.module, share, model.whole_geometry, model.adapters)
    stage, whole = (_core.SharedArena.attach(*order.regions[index]) for index in (share.stage, -1))
    memory = GroupMemory(*(None if part is None else _core.SharedArena.attach(*part) for part in order.memory))
    size = 0 if memory.hbm is None else memory.hbm.nbytes
    check(size == order.config.pool.hbm_blocks * model.geometry.block_bytes, "the arena has another size")
    line.send("")
    crew = _connect_group(share, (stage, whole), vocabularies, memory)
    if not is_planned:
        follow_trial(model.module, model.geometry.dtype, crew)
    forward = best_forward(model.module, crew)
    config = replace(order.config, pool=replace(order.config.pool, dram_blocks=0))
    device = ModelDevice(model, config, forward, crew=crew)
    _mapped_memory.append((stage, whole, memory))
    return device


_mapped_memory: list[object] = []
"""Memory that the crew knows by address."""


if __name__ == "__main__":
    main(int(sys.argv[1]))
