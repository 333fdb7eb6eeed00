"""The workers of an instance on a CPU as threads of one process: cut copies of one model, that meet in memory."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from memserve import _core, _kernels
from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.kv_layout import Parallel, Share
from memserve.instance.events import StepFinished, StepPlan
from memserve.model.device import ModelDevice
from memserve.model.forward import EagerForward
from memserve.model.loading.loader import LoadedModel
from memserve.model.workers import processes
from memserve.model.workers.group import GroupMemory, WorkerGroup
from memserve.model.workers.plans import plan_division
from memserve.model.workers.processes import shares_of
from memserve.model.workers.sharding import shard
from tiny_models import CONTEXT_TOKENS

SLOT_BYTES = 4096


def crews(
    found: list[Share], vocabularies: tuple[int, ...], hbm: _core.SharedArena | None = None
) -> tuple[list[WorkerGroup], list[_core.SharedArena]]:
    """Of all workers; and the memory in which they meet."""
    first = found[0]
    sizes = [*[first.parts] * first.stages, first.ranks]
    regions = [_core.SharedArena(_kernels.Collective.region_bytes(size, SLOT_BYTES)) for size in sizes]
    made = []
    for share in found:
        stage = _kernels.Collective(regions[share.stage].address, share.part, share.parts, SLOT_BYTES, 30.0)
        whole = _kernels.Collective(regions[-1].address, share.rank, share.ranks, SLOT_BYTES, 30.0)
        made.append(WorkerGroup(share, stage, whole, vocabularies, GroupMemory(hbm)))
    return made, regions


def run_workers(works: list[tuple[WorkerGroup, Callable[[], Any]]]) -> list[Any]:
    """What each of them gives, all at once. Raises what the first one raises that fails; the waits of all end then."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(rank: int, crew: WorkerGroup, work: Callable[[], Any]) -> None:
        try:
            results[rank] = work()
        except BaseException as error:
            errors.append(error)
            crew.mark_broken(str(error))

    threads = [threading.Thread(target=run, args=(rank, *pair)) for rank, pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    return results


def divided_modules(model: LoadedModel, parallel: Parallel) -> tuple[list[Share], list[Any], tuple[int, ...]]:
    """Cut copies of a model, by rank."""
    division = plan_division(model.module, model.geometry, only_stages=parallel.tensor == 1)
    found = shares_of(parallel, model, division)
    modules = [copy.deepcopy(model.module) for _ in found]
    vocabularies = {shard(module, share, model.geometry) for module, share in zip(modules, found, strict=True)}
    assert len(vocabularies) == 1
    return found, modules, vocabularies.pop()


class ThreadedWorkers:
    """A device of several workers, with what a test looks at in the one that leads."""

    def __init__(self, model: LoadedModel, parallel: Parallel, blocks: int = 64) -> None:
        found, modules, vocabularies = divided_modules(model, parallel)
        hbm = _core.SharedArena(blocks * model.geometry.block_bytes, sealed=False)
        self._crews, self._regions = crews(found, vocabularies, hbm)
        config = InstanceConfig(CONTEXT_TOKENS, pool=PoolConfig(blocks), scheduler=SchedulerConfig(max_running=8))
        self._devices = []
        for crew, module in zip(self._crews, modules, strict=True):
            own = LoadedModel(**{name: getattr(model, name) for name in model.__slots__} | {"module": module})
            self._devices.append(ModelDevice(own, config, EagerForward(module, pack=False), crew=crew))
        self.leader = self._devices[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.leader, name)

    def execute(self, plan: StepPlan) -> StepFinished:
        """One step of all workers."""
        sampled, late = self.leader.take_sampled(), self.leader.late_slots
        works: list[tuple[WorkerGroup, Callable[[], Any]]] = [(self._crews[0], lambda: self.leader.execute(plan))]
        for crew, device in zip(self._crews[1:], self._devices[1:], strict=True):
            works.append((crew, lambda device=device: device.follow_step(sampled, late, plan)))
        finished: StepFinished = run_workers(works)[0]
        return finished


class WorkerThread:
    """A worker of an engine as a thread of this process, which is quicker to start; for its leader it is a process."""

    def __init__(self, order: Any, line: Connection) -> None:
        def own(part: tuple[int, int] | None) -> tuple[int, int] | None:
            return None if part is None else (os.dup(part[0]), part[1])  # as a child inherits it

        order = replace(order, memory=tuple(map(own, order.memory)), regions=tuple(map(own, order.regions)))
        self._thread = threading.Thread(target=self._follow, args=(order, line), name="memserve-worker", daemon=True)
        self._thread.start()

    @staticmethod
    def _follow(order: Any, line: Connection) -> None:
        with line:
            device = processes._load(order, line)
            memory = processes._mapped_memory.pop()
            try:
                while True:
                    device.follow_step(*pickle.loads(line.recv_bytes()))
            except (EOFError, OSError):
                device.close()
                del device, memory

    def wait(self, timeout_s: float | None = None) -> int:
        """As a process's."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "a worker goes on without its leader"
        return 0


def start_workers_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on engines of this process do."""

    def start(self: processes.Processes, module: str, order: object, inherited: object, environment: object) -> None:
        assert module == processes.__name__
        ours, theirs = socket.socketpair()
        worker: Any = WorkerThread(order, Connection(theirs.detach()))
        self._processes.append(worker)
        self._connections.append(Connection(ours.detach()))

    one_at_a_time, load_model = threading.Lock(), processes.load_model

    def load_alone(*args: Any, **options: Any) -> LoadedModel:
        """While a model is loaded, transformers' way to make weights is another, for all threads."""
        with one_at_a_time:
            return load_model(*args, **options)

    monkeypatch.setattr(processes, "load_model", load_alone)
    monkeypatch.setattr(processes.Processes, "_start_process", start)


def worker_threads() -> int:
    """How many workers of engines run in this process."""
    return sum(thread.name == "memserve-worker" for thread in threading.enumerate())
