"""Steps of an instance of several workers on GPUs, as its leader and the other workers do them together.

    leader                                             worker 1, 2, ...
    plan k    what waits for the host --socket->       begins its part; its host waits for nothing
              begins its part         <=NCCL=>
    finish k  own part is done        <-socket--       k is done here: computed, and copied

A plan has finished when it has on all of them. Before that, a worker may still read or write its part of a block of
DRAM, which peers, stores and later plans may then do.

One worker's part of a device on several GPUs: as :class:`memserve.model.gpu.device.GpuDevice`, in step with the
others.

    leader          begin_part(k)   forward, draw -> hands out what is drawn     finish: what was drawn
    other workers   begin_part(k)   forward, gives its logits, gets the tokens   finish: copies are done

What is enqueued is the same everywhere, because all decide alike: by the plan, by what the leader says beside it
(whether it waits for the host), and by what all agreed on at the start (graphs).

HBM has this worker's heads and layers of every block, under the numbers that the machine knows. DRAM has whole blocks,
in memory that all workers map: what lies there is the instance's, and looks like that of one worker.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memserve import _core
from memserve.base.config import InstanceConfig
from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.instance.events import StepFinished, StepPlan
from memserve.model.arena import ArenaSizes
from memserve.model.attention.context import StepAttention
from memserve.model.device import Drawing
from memserve.model.forward import Forward
from memserve.model.gpu.arena import GpuArenas
from memserve.model.gpu.device import GpuDevice
from memserve.model.gpu.sampling import BegunDraw
from memserve.model.gpu.streams import Gpu
from memserve.model.loading.loader import LoadedModel
from memserve.model.slots import Int64s
from memserve.model.workers.gpu_group import GpuWorkerGroup
from memserve.model.workers.processes import STEP_S, Divided, Processes, WorkersBroken, disconnect
from memserve.transport.ports import Arenas
from memserve.transport.ranges import shard_of

if TYPE_CHECKING:
    from memserve.transport.links.gpu_memory import GpuMemory


log = logging.getLogger(__name__)


class Reports:
    """What the other workers say of steps: which have finished there."""

    def __init__(self, lines: list[Connection], lost: Callable[[str], None]) -> None:
        """``lost``: called with the reason when a worker says no more."""
        self._lines, self._on_lost = lines, lost
        self._done = [0] * len(lines)
        self._changed = threading.Condition()
        self._over = ""

    def start_listening(self) -> None:
        for index, line in enumerate(self._lines):
            threading.Thread(
                target=self._read_reports, args=(index, line), name=f"memserve-reports-{index + 1}", daemon=True
            ).start()

    def wait_finished(self, number: int) -> None:
        """Return when step ``number`` has finished on all. Raises :class:`WorkersBroken` where it will not."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._over or min(self._done) >= number, STEP_S)
        if self._over or not in_time:
            raise WorkersBroken(self._over or f"a step takes more than {STEP_S:.0f} s on another worker")

    def end_waits(self, why: str) -> None:
        """No step will finish any more."""
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()

    def _read_reports(self, index: int, line: Connection) -> None:
        try:
            while True:
                number = int.from_bytes(line.recv_bytes(), "little")
                with self._changed:
                    self._done[index] = number
                    self._changed.notify_all()
        except (EOFError, OSError):
            self._on_lost(f"worker {index + 1} reports no more")


class StepGuard:
    """Calls off what takes too long."""

    def __init__(self, limit_s: float, late: Callable[[str], None]) -> None:
        self._limit_s, self._late = limit_s, late
        self._began: dict[object, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch_steps, name="memserve-guard", daemon=True).start()

    @contextmanager
    def limit_step(self) -> Iterator[None]:
        """What is done inside may not take longer. Thread-safe."""
        key = object()
        self._began[key] = time.monotonic()
        try:
            yield
        finally:
            del self._began[key]

    def close(self) -> None:
        """End."""
        self._closed.set()

    def _watch_steps(self) -> None:
        while not self._closed.wait(min(1.0, self._limit_s / 4)):
            first = min(list(self._began.values()), default=time.monotonic())
            if time.monotonic() - first > self._limit_s:
                self._late(f"a step takes more than {self._limit_s:.0f} s")
                return


class DividedGpu(Divided):
    """The device of an instance with workers on GPUs; the host is ahead of all of them."""

    def __init__(
        self,
        leader: GpuPart,
        workers: Processes,
        crew: GpuWorkerGroup,
        *,
        limit_s: float = STEP_S,
        memory: GpuMemory | None = None,
    ) -> None:
        """``leader``: the leader's part. ``limit_s``: how long a step may take. ``memory``: the KV of all workers,
        where other processes read it."""
        self._memory = memory
        self._reports = Reports(workers.connections, self._give_up)
        super().__init__(leader, workers, crew)
        self._part, self._steps_sent = leader, 0
        self._guard = StepGuard(limit_s, self._give_up)
        self._reports.start_listening()

    @property
    def shared_arenas(self) -> Arenas:
        """What peers can read, tier by tier."""
        if self._memory is None:
            return {}
        dram = self._part.shared_dram
        return {Tier.HBM: self._memory} | ({} if dram is None else {Tier.DRAM: dram})

    def execute(self, plan: StepPlan) -> StepFinished:
        """See :meth:`begin_step`."""
        return self.begin_step(plan)()

    def begin_step(self, plan: StepPlan) -> Callable[[], StepFinished]:
        """Begin a step on all workers; what is returned waits until it has finished on all. Both raise
        :class:`WorkersBroken` from the first failure on."""
        if self._crew.broken:
            raise WorkersBroken(self._crew.broken)
        try:
            with self._guard.limit_step():
                waits_for_host = self._part.needs_host(plan)
                self._workers.send_all(self._part.take_sampled(), plan, waits_for_host)
                finish = self._part.begin_part([], plan, waits_for_host)
        except BaseException as error:
            raise self._mark_broken(error) from error
        self._steps_sent += 1
        return partial(self._finish_step, self._steps_sent, finish)

    def _finish_step(self, number: int, finish: Callable[[], StepFinished]) -> StepFinished:
        try:
            with self._guard.limit_step():
                finished = finish()
                if not self._crew.broken:  # else what the device gave may be anything: its waits were called off
                    self._reports.wait_finished(number)
        except BaseException as error:
            raise self._mark_broken(error) from error
        if self._crew.broken:
            raise WorkersBroken(self._crew.broken)
        return finished

    def _give_up(self, why: str) -> None:
        if not self._workers.ending:
            self._crew.mark_broken(why)
            self.report_broken()

    def report_broken(self) -> None:
        """Say so, once. What peers read just now may be of a worker that has ended: no generation has it."""
        if self._memory is not None:
            self._memory.generation = 0
        self._reports.end_waits(self._crew.broken)
        super().report_broken()

    def close(self) -> None:
        """End the workers; release the arenas with the last reference."""
        self._guard.close()
        super().close()
        self._crew.mark_broken("it is closed")  # only so do torch's groups end without waiting for one another


def follow_leader(line: Connection, part: GpuPart, expect_reads: Callable[[], object] = lambda: None) -> None:
    """Do what the leader says, until the line is closed; report each step that has finished here. ``expect_reads``:
    called when peers will read this worker's KV in a moment."""
    running: queue.SimpleQueue[Callable[[], StepFinished] | None] = queue.SimpleQueue()
    finishing = threading.Thread(target=_finish_steps, args=(line, running), name="memserve-finishing", daemon=True)
    finishing.start()
    try:
        while finishing.is_alive():
            try:
                command = pickle.loads(line.recv_bytes())
            except (EOFError, OSError):
                return
            if command:
                running.put(part.begin_part(*command))
            else:
                expect_reads()
    except BaseException:
        disconnect(line)  # the leader hears that at once
        raise
    finally:
        running.put(None)
        finishing.join(STEP_S)


def _finish_steps(line: Connection, running: queue.SimpleQueue[Callable[[], StepFinished] | None]) -> None:
    number = 0
    try:
        while (finish := running.get()) is not None:
            finish()
            number += 1
            line.send_bytes(number.to_bytes(8, "little"))
    except BrokenPipeError:
        return  # the leader has gone
    except Exception:
        log.exception("step %d failed on this worker", number + 1)
        disconnect(line)  # the leader hears that


class GpuPart(GpuDevice):
    """See the module."""

    def __init__(
        self,
        model: LoadedModel,
        config: InstanceConfig,
        gpu: Gpu,
        crew: GpuWorkerGroup,
        forward: Forward,
        *,
        dram: _core.SharedArena | None = None,
        **options: Any,
    ) -> None:
        """``model``: cut, with the geometry of the whole. ``dram``: the second tier of all workers."""
        self._shard, self._dram = shard_of(crew.share, model.geometry), dram
        self._gpu_crew = crew
        super().__init__(
            replace(model, geometry=self._shard.local_geometry), config, gpu, forward, crew=crew, **options
        )

    def _make_arenas(
        self,
        sizes: ArenaSizes,
        *,
        shared: bool,
        lower: _core.LowerPages | None,
    ) -> Any:
        check(lower is None and not shared, "on GPUs KV lies as it was computed, in several memories")
        return GpuArenas(self._gpu, sizes, part=self._shard, dram=self._dram)

    @property
    def hbm(self) -> Tensor:
        """This worker's heads and layers of every block, ``[blocks, bytes]`` uint8."""
        memory: Tensor = self._arenas.hbm
        return memory

    @property
    def shared_dram(self) -> _core.SharedArena | None:
        """The second tier of all workers. None: there is none."""
        return self._dram

    def begin_part(self, sampled: Drawing, plan: StepPlan, waits_for_host: bool) -> Callable[[], StepFinished]:
        """Enqueue this worker's part of a step; what is returned waits for its end. ``sampled``: what the leader
        has drawn in plans that waited for the host, since the last step; for itself nothing."""
        with self._lock:
            for slots, tokens in sampled:
                for slot, length in zip(slots.tolist(), self._slots.lengths[slots].tolist(), strict=True):
                    self._mirror.tokens_changed(slot, length, length + 1)
                self._slots.append_tokens(slots, tokens)
        return self._begin_plan(plan, waits_for_host=waits_for_host)

    def _compute_step(self, plan: StepPlan) -> StepFinished:
        if self._is_leader:
            return super()._compute_step(plan)
        if plan.slots:
            self._compute_logits(plan)
        return StepFinished(plan.step_id, [], 0)

    def _begin_draw(self, logits: Tensor, rows: Int64s, slots: Int64s) -> BegunDraw:
        positions = self._slots.lengths[slots].copy()
        places = self._gpu.send(torch.stack((torch.from_numpy(slots), torch.from_numpy(positions))))
        if self._is_leader:
            draw = super()._begin_draw(logits, rows, slots)
            self._gpu_crew.broadcast_tokens(self._mirror.tokens[places[0], places[1]])
            return draw
        sampled = torch.empty(len(slots), dtype=torch.int32, device=self._mirror.tokens.device)
        self._gpu_crew.broadcast_tokens(sampled)
        self._mirror.write_sampled(places[0], places[1], sampled)
        sound = torch.ones((2, len(slots)), dtype=torch.bool)  # the leader has judged that
        return BegunDraw(slots, positions, self._gpu.fetch_to_host(sampled.long()), sound)

    def _reporting_attention(self, plan: StepPlan, attention: StepAttention) -> StepAttention:
        return attention  # no worker sees when all have written a layer
