"""The device on a GPU: as :class:`memserve.model.device.ModelDevice`, but that the host is ahead of it.

    begin_step(k)      begin_step(k + 1)                       host: enqueues, waits for nothing
    .... plan k computes ....    .... plan k + 1 computes ....    device: in order
                       finish(plan k)           finish(plan k + 1)    host: reads what was drawn

Plan ``k + 1`` computes tokens that plan ``k`` draws: they stay on the device (:class:`SlotMirror`). A plan that needs
to know them on the host (a grammar, drafts, beams, prompts' logprobs) begins when those before it have finished.

Streams and what orders them: everything of a step is in the computing stream; copies fork from it and join it again
(:mod:`gpu_arena`); pulls of peers' pages are in streams of their own, ordered by the machine, which lets no plan
touch their blocks meanwhile (``kv/transfer/barriers.py``).

Decode steps are CUDA graphs: one for each of a few numbers of rows, captured at the start. A step of one token a row
launches some thousand kernels, each of microseconds: launched one by one, a small batch waits for the host most of the
time. A graph enqueues all of them at once. What changes from step to step is read from memory at fixed places: which
slots, which positions. Tokens and tables are on the device already (:mod:`gpu_slots`); rows that are missing up to the
graph's number are computed for no slot, into a block that no sequence has.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from memserve import _core
from memserve.base.config import InstanceConfig
from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.instance.events import RowFailed, StepFinished, StepPlan
from memserve.model.arena import ArenaSizes
from memserve.model.attention.backends import TritonAttention
from memserve.model.attention.context import ReportingAttention, StepAttention, step_attention
from memserve.model.device import ModelDevice
from memserve.model.forward import Forward
from memserve.model.gpu.arena import CopyTimes, GpuArenas, StreamCopier
from memserve.model.gpu.sampling import BegunDraw, SlotMirror, begin_draw
from memserve.model.gpu.streams import Gpu, Graph, Mark
from memserve.model.loading.loader import LoadedModel
from memserve.model.sampling import Sampled
from memserve.model.slots import Failures, Int64s
from memserve.model.states.memory import CopyRows
from memserve.model.workers.gpu_group import GpuWorkerGroup
from memserve.model.workers.group import collectives
from memserve.protocol.messages import AdapterFiles
from memserve.transport.links.gpu_memory import GpuMemory
from memserve.transport.ports import ArenaMemory, Arenas

Decodes = Callable[[Tensor, Tensor], StepAttention]
"""``(slots [n], contexts [n])``, int32 on the device -> the attention of one token of each."""


def graph_sizes(rows_max: int) -> list[int]:
    """Numbers of rows with a graph of their own: 1, 2, 4, then multiples of 8 up to 64, then of 32."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, rows_max + 32, 32)]
    return [size for size in sizes if size < rows_max] + [rows_max]


@dataclass(frozen=True, slots=True)
class _Captured:
    rows: Tensor
    """``[3, n]`` int64: slots, positions, positions as the forward takes them."""
    numbers: Tensor
    """``[n]`` int64, which the graph reads at each replay: a graph keeps no tensor alive."""
    graph: Graph
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model."""

    def __init__(
        self, gpu: Gpu, forward: Forward, mirror: SlotMirror, attention: Decodes, crew: GpuWorkerGroup | None = None
    ) -> None:
        """``crew``: the workers of the instance, all of which capture the same."""
        self._gpu, self._forward, self._mirror, self._attention = gpu, forward, mirror, attention
        self._crew = crew
        self._captured: dict[int, _Captured] = {}
        #: why there are none; empty: there are
        self.refused = ""

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that have a graph."""
        return sorted(self._captured)

    def capture_all(
        self, rows_max: int, progress: Callable[[int, int], None] = lambda captured_count, of: None
    ) -> None:
        """Capture all, the largest first, whose memory the others share. A model that computes on the host in the
        middle of its forward has none: it runs kernel by kernel. Of several workers all have graphs, or none has."""
        sizes, began_s = graph_sizes(rows_max)[::-1], time.monotonic()
        for captured_count, size in enumerate(sizes):
            progress(captured_count, len(sizes))
            try:
                self._captured[size] = self._capture_size(size)
            except torch.OutOfMemoryError as error:
                self.refused = f"no memory is left for them: {error}"
            except Exception as error:  # whatever the model does that a graph cannot hold
                self.refused = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if self._crew is not None and not self._crew.all_agree(0 if self.refused else 1):
                self.refused = self.refused or "another worker of this instance cannot hold a step in a graph"
            if self.refused:
                log.warning("decode steps run without CUDA graphs: %s", self.refused)
                self._captured.clear()
                return
        progress(len(sizes), len(sizes))
        log.info("%d CUDA graphs of decode steps captured in %.1f s", len(sizes), time.monotonic() - began_s)

    def _capture_size(self, size: int) -> _Captured:
        gpu, mirror = self._gpu, self._mirror
        rows = gpu.zeros(3, size, dtype=torch.int64)
        with gpu.compute.use():
            rows[0] = mirror.padding
            numbers = torch.arange(size, device=rows.device)

        def run() -> Tensor:
            slots, positions, forward_positions = rows[0], rows[1], rows[2]
            attention = self._attention(slots.int(), positions.int() + 1)
            with torch.inference_mode(), step_attention(attention), collectives(self._crew):
                logits = self._forward(mirror.tokens[slots, positions].long(), forward_positions, numbers)
                return logits if self._crew is None else self._crew.gather_logits(logits)

        graph, logits = gpu.capture_graph(run)
        return _Captured(rows, numbers, graph, logits)

    def run_graph(self, slots: Int64s, positions: Int64s) -> Tensor | None:
        """Logits ``[n, vocab]`` of the tokens at ``positions [n]`` of ``slots [n]``, in the stream in use; valid until
        the next call. None: there is no graph for so many."""
        size = next((size for size in self.sizes if size >= len(slots)), 0)
        if not size:
            return None
        captured = self._captured[size]
        padded = np.zeros((3, size), np.int64)
        padded[0] = self._mirror.padding
        padded[:, : len(slots)] = slots, positions, self._mirror.given_positions(slots, positions)
        captured.rows.copy_(self._gpu.send(torch.from_numpy(padded)))
        captured.graph.replay()
        return captured.logits[: len(slots)]


log = logging.getLogger(__name__)

_WAIT_S = 60.0
"""No layer takes so long: its thread has died."""


class _Begun:
    """A plan that the device works on."""

    __slots__ = (
        "began_ns", "draw", "end", "failed", "finished", "lives", "marks", "plan", "times",
    )  # fmt: skip

    def __init__(self, plan: StepPlan) -> None:
        self.plan, self.began_ns = plan, time.perf_counter_ns()
        self.draw: BegunDraw | None = None
        self.failed: Failures = {}
        self.lives: Int64s | None = None
        self.marks: list[Mark] = []
        self.times: CopyTimes | None = None
        #: what the host has worked out already; None: nothing
        self.finished: StepFinished | None = None


class GpuDevice(ModelDevice):
    """A model on a GPU: ``begin_step`` is called from one thread; what it returns there or in another, in order."""

    def __init__(
        self,
        model: LoadedModel,
        config: InstanceConfig,
        gpu: Gpu,
        forward: Forward | None = None,
        *,
        shared: bool = False,
        crew: GpuWorkerGroup | None = None,
    ) -> None:
        """``crew``: see :class:`memserve.model.workers.gpu_steps.GpuPart`."""
        self._gpu = gpu
        self._page_bytes = model.geometry.page_bytes
        self._lock = threading.Lock()  # guards slots, mirror and what is begun
        self._running: deque[_Begun] = deque()
        self._waits_for_host = False  # while a plan is begun that must know what is drawn
        self._last_end_ns = 0
        with gpu.compute.use():
            super().__init__(model, config, forward, shared=shared, crew=crew)
            self._mirror = SlotMirror(gpu, self._slots, self._arenas.scratch_block)
        gpu.compute.wait()
        self._lives: Int64s = np.zeros(len(self._slots.opened), np.int64)  # how often each slot was opened
        self._graphs: DecodeGraphs | None = None
        if self._layout is not None:
            decodes: Decodes = partial(self._layout.attention_of_decodes, self._mirror.tables, config.max_model_tokens)
        else:
            sizes = self._arenas.hbm.view(-1), model.geometry, self._mirror.tables
            first_layer = 0 if crew is None else crew.share.own_layers.start
            decodes = partial(_decodes, *sizes, config.max_model_tokens, first_layer)
        if self._is_triton and self._states is None:  # pieces of rows are called one by one
            self._graphs = DecodeGraphs(gpu, self._forward, self._mirror, decodes, crew)
        self._layers = _LayerWatch(lambda step_id, layer: self.on_layer and self.on_layer(step_id, layer))

    @property
    def _is_triton(self) -> bool:
        if self._layout is not None:
            return self._layout.has_graphs
        return isinstance(self._attention, partial) and self._attention.func is TritonAttention

    def capture_graphs(self, progress: Callable[[int, int], None] = lambda captured_count, of: None) -> None:
        """Capture the graphs of decode steps: before the first plan. ``progress(done, of)``."""
        if self._graphs is not None:
            with self._gpu.compute.use():
                self._graphs.capture_all(len(self._slots.opened), progress)

    def read_adapter(self, files: AdapterFiles) -> Callable[[], None]:
        """See :class:`memserve.transport.ports.Device`."""
        install = super().read_adapter(files)

        def install_in_order() -> None:
            with self._lock, self._gpu.compute.use():
                install()
            self._gpu.compute.wait()

        return install_in_order

    @property
    def graph_sizes(self) -> list[int]:
        """Numbers of rows with a captured graph."""
        return [] if self._graphs is None else self._graphs.sizes

    def _make_arenas(
        self,
        sizes: ArenaSizes,
        *,
        shared: bool,
        lower: _core.LowerPages | None,
    ) -> Any:
        check(lower is None, "on a GPU both tiers keep the same")
        return GpuArenas(self._gpu, sizes, shared=shared)

    def _make_pages(self, page_bytes: int, pages: int) -> Tensor:
        return self._gpu.zeros(pages, page_bytes, dtype=torch.uint8)

    @property
    def _copy_rows(self) -> CopyRows:
        return self._gpu.compute.copy_blocks

    def _make_copier(self, link_bytes_s: float | None) -> Any:
        return StreamCopier(self._gpu, self._arenas, self._page_bytes)

    @property
    def shared_arenas(self) -> Arenas:
        """What peers can read, tier by tier."""
        if not self._arenas.is_shared:
            return {}
        arenas: dict[Tier, ArenaMemory] = {Tier.HBM: GpuMemory(self._arenas.hbm)}
        if self._arenas.shared_dram is not None:
            arenas[Tier.DRAM] = self._arenas.shared_dram
        return arenas

    # -- steps

    def execute(self, plan: StepPlan) -> StepFinished:
        """Begin ``plan`` and finish it."""
        return self.begin_step(plan)()

    def begin_step(self, plan: StepPlan) -> Callable[[], StepFinished]:
        """Enqueue all of ``plan``; what is returned waits for its end. Plans are finished in the order in which they
        are begun."""
        return self._begin_plan(plan, waits_for_host=self.needs_host(plan))

    def _begin_plan(self, plan: StepPlan, *, waits_for_host: bool) -> Callable[[], StepFinished]:
        with self._lock, self._gpu.compute.use(), torch.inference_mode():
            running = _Begun(plan)
            try:
                if waits_for_host:
                    self._catch_up()
                    self._waits_for_host = True
                self._enqueue_plan(running)
            except BaseException:
                self._copier.cancel_copies()  # later plans may use the same pages
                raise
            finally:
                self._waits_for_host = False
            self._running.append(running)
        return partial(self._finish_plan, running)

    def needs_host(self, plan: StepPlan) -> bool:
        """Whether ``plan`` can only begin when what was drawn before is known on the host."""
        if plan.drafts or plan.prompt_logprob_rows or plan.late_draws:
            return True
        opened = {sequence.slot: sequence for sequence in plan.open}
        for slot in (slot for group in plan.sample_slots for slot in group):
            sequence = opened.get(slot)
            if sequence is not None:
                if sequence.beam_candidates or sequence.sampling.grammar:
                    return True
            elif self._slots.beam_candidates[slot] or (self._slots.grammars and slot in self._slots.grammars):
                return True
        return False

    def _enqueue_plan(self, running: _Begun) -> None:
        plan = running.plan
        self._apply_plan(plan)
        self._mirror.send_changes()
        moving = self._start_moves(plan.moves)
        if plan.gives_tokens and self._waits_for_host:
            running.finished = self._compute_step(plan)
        elif plan.slots:
            self._launch_rows(running)
        for copy in moving:
            self._copier.wait_for(copy)
        running.times = self._copier.take_copy_times()
        copied = self._arenas.copies_mark()
        running.marks = [self._gpu.compute.record_mark(), *([] if copied is None else [copied])]

    def _launch_rows(self, running: _Begun) -> None:
        plan = running.plan
        logits, drawing = self._compute_logits(plan)
        running.failed = self._slots.failures_in(plan)
        if not drawing:
            return
        groups = [plan.sample_slots[row] for row in drawing]
        slots = np.array([slot for group in groups for slot in group], np.int64)
        rows = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        running.draw = self._begin_draw(logits, rows, slots)
        running.lives = self._lives[slots].copy()
        self._slots.append_tokens(
            slots, np.zeros(len(slots), np.int64)
        )  # their places; which tokens, the host learns later

    def _begin_draw(self, logits: Tensor, rows: Int64s, slots: Int64s) -> BegunDraw:
        return begin_draw(self._gpu, logits, rows, slots, self._slots, self._mirror)

    def _finish_plan(self, running: _Begun) -> StepFinished:
        for mark in running.marks:
            mark.wait()
        with self._lock:
            while running in self._running:
                self._read_results(self._running.popleft())
        self._layers.wait_reported(running.plan.step_id)
        now_ns = time.perf_counter_ns()
        spent_ns, self._last_end_ns = now_ns - max(running.began_ns, self._last_end_ns), now_ns
        used = None if running.times is None else running.times.link_use()
        return replace(_require_finished(running.finished), device_ns=spent_ns, link=used)

    def _catch_up(self) -> None:
        """Learn what all plans so far have drawn."""
        while self._running:
            running = self._running.popleft()
            running.marks[0].wait()
            self._read_results(running)

    def _read_results(self, running: _Begun) -> None:
        """The host's part of a plan that the device has done; its slots may have other sequences by now."""
        if running.finished is not None:
            return
        sampled = Sampled(np.empty(0, np.int64)) if running.draw is None else running.draw.collect_sampled()
        failed = dict(running.failed)
        for slot, why in sampled.failed.items():
            failed.setdefault(slot, why)
        if running.draw is not None and running.lives is not None:
            slots, positions = running.draw.slots, running.draw.positions
            same = self._lives[slots] == running.lives
            self._slots.tokens[slots[same], positions[same]] = sampled.tokens[same]
        running.finished = StepFinished(
            running.plan.step_id,
            sampled.tokens.tolist(),
            0,
            sampled.logprobs,
            {},
            sampled.candidates,
            accepted_drafts={},
            failed=failed,
        )

    # -- parts of a step, where the device's differ

    def _apply_plan(self, plan: StepPlan) -> None:
        grown = {slot: int(self._slots.table_lengths[slot]) for slot, _ in plan.grow}
        for sequence in plan.open:
            self._lives[sequence.slot] += 1
            grown[sequence.slot] = 0
        super()._apply_plan(plan)
        slots = self._slots
        for sequence in plan.open:
            self._mirror.tokens_changed(sequence.slot, 0, int(slots.lengths[sequence.slot]))
        for slot, first in grown.items():
            self._mirror.table_changed(slot, first, int(slots.table_lengths[slot]))
        for slot, position, _ in plan.replace:
            self._mirror.table_changed(slot, position, position + 1)

    def _compute_logits(self, plan: StepPlan) -> tuple[Tensor, list[int]]:
        if self._graphs is not None and self._fits_a_graph(plan):
            slots, starts = np.array(plan.slots, np.int64), np.array(plan.starts, np.int64)
            self._slots.check_rows(slots, starts, np.ones_like(starts))
            logits = self._graphs.run_graph(slots, starts)
            if logits is not None:
                return logits[:, : self._vocab_size], list(range(len(slots)))
        return super()._compute_logits(plan)

    def _fits_a_graph(self, plan: StepPlan) -> bool:
        """One token of each row, which draws; nothing that is different by row or by layer."""
        usual = not (plan.report_layers or plan.drafts or plan.prompt_logprob_rows)
        if not usual or max(plan.counts) > 1 or not all(plan.sample_slots):
            return False
        apart = self._slots.placed_ranges.keys() | self._slots.adapters.keys()
        return not apart or apart.isdisjoint(plan.slots)

    @property
    def _block_tables(self) -> Any:
        return self._mirror.tables if self._is_triton else self._slots.tables

    def _gather_tokens(self, owners: Int64s, positions: Int64s) -> tuple[Tensor, Tensor]:
        if self._waits_for_host:
            return super()._gather_tokens(owners, positions)
        return self._mirror.gather_inputs(owners, positions)

    def _reporting_attention(self, plan: StepPlan, attention: StepAttention) -> StepAttention:
        """A layer's kernels have not run when its call returns: a thread waits for the mark behind them."""
        if not plan.report_layers or self.on_layer is None:
            return attention
        compute, step_id = self._gpu.compute, plan.step_id
        return ReportingAttention(
            attention,
            lambda layer: self._layers.expect_layer(compute.record_mark(), step_id, layer),
            plan.report_layers,
        )

    def _sample_tokens(self, plan: StepPlan, drawing: list[int], logits: Tensor, failed: Failures) -> Sampled:
        sampled = super()._sample_tokens(plan, drawing, logits, failed)
        if self._crew is None:
            self._sampled.clear()  # no worker follows
        late = {draw.slot for draw in plan.late_draws}
        for slot in late | {slot for row in drawing for slot in plan.sample_slots[row]}:
            length = int(self._slots.lengths[slot])
            self._mirror.tokens_changed(slot, length - 1, length)
        return sampled

    def _verify_drafts(
        self, plan: StepPlan, logits: Tensor, failed: dict[int, RowFailed]
    ) -> tuple[list[int], dict[int, list[int]]]:
        slots = [plan.slots[row] for row in plan.drafts]
        before = {slot: int(self._slots.lengths[slot]) for slot in slots}
        verified = super()._verify_drafts(plan, logits, failed)
        for slot, length in before.items():
            self._mirror.tokens_changed(slot, length, int(self._slots.lengths[slot]))
        return verified

    def _send_to_device(self, values: Int64s) -> Tensor:
        return self._gpu.send(torch.from_numpy(values))

    def close(self) -> None:
        """Wait for the device, and release the arenas (with the last reference to this device)."""
        self._layers.close()
        self._gpu.compute.wait()
        self._graphs = None
        super().close()


def _decodes(
    arena: Tensor, geometry: Any, tables: Tensor, context_max: int, first_layer: int, slots: Tensor, contexts: Tensor
) -> StepAttention:
    return TritonAttention.of_decodes(arena, geometry, tables, slots, contexts, context_max, first_layer)


def _require_finished(finished: StepFinished | None) -> StepFinished:
    check(finished is not None, "a plan is finished that the host has learnt nothing of")
    return cast("StepFinished", finished)


class _LayerWatch:
    """A thread that tells when layers are done."""

    def __init__(self, tell: Callable[[int, int], Any]) -> None:
        self._report = tell
        self._expected: queue.SimpleQueue[tuple[Mark, int, int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open: dict[int, int] = {}  # layers that are not told yet, by step
        self._thread: threading.Thread | None = None

    def expect_layer(self, mark: Mark, step_id: int, layer: int) -> None:
        """Tell of ``layer`` when ``mark`` is past."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._report_layers, name="memserve-layers", daemon=True)
            self._thread.start()
        with self._changed:
            self._open[step_id] = self._open.get(step_id, 0) + 1
        self._expected.put((mark, step_id, layer))

    def wait_reported(self, step_id: int) -> None:
        """All layers of a step that has ended are told."""
        with self._changed:
            all_reported = self._changed.wait_for(lambda: step_id not in self._open, _WAIT_S)
        check(all_reported, "a layer is not told of although its step has ended")

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._expected.put(None)
            self._thread.join(_WAIT_S)

    def _report_layers(self) -> None:
        while (item := self._expected.get()) is not None:
            mark, step_id, layer = item
            try:
                mark.wait()
                self._report(step_id, layer)
            except Exception as error:  # the step itself fails with it
                log.warning("layer %d of step %d is not reported: %s", layer, step_id, error)
            with self._changed:
                self._open[step_id] -= 1
                if not self._open[step_id]:
                    del self._open[step_id]
                self._changed.notify_all()
