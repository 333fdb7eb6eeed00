"""The device: executes step plans (:class:`memserve.instance.events.StepPlan`) with a real model."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from memserve import _core
from memserve.base.config import InstanceConfig, PoolConfig
from memserve.base.errors import UserError, check
from memserve.base.types import Tier, TokenLogprobs
from memserve.base.units import ceil_div
from memserve.instance.events import MovePages, PlaceByLayer, RowFailed, SaveState, StepFinished, StepPlan
from memserve.kv.contents import MoveTokens
from memserve.model.arena import ArenaSizes, KvArenas, blocks_of, lower_pages
from memserve.model.attention.backends import AttentionFactory, KernelAttention
from memserve.model.attention.context import (
    EXPANSION_ATTRIBUTE,
    AbsentAttention,
    OrderedAttention,
    ReportingAttention,
    StepAttention,
    StepRows,
    step_attention,
)
from memserve.model.attention.expansions import expanding_layers
from memserve.model.attention.latents import choose_attention, find_costs
from memserve.model.attention.layered import LayeredAttention, PlacedRange, Tiers, copies_of
from memserve.model.attention.layouts import LayoutPages, PartTables
from memserve.model.attention.sequence_parallel import (
    GatedAttention,
    HeldKv,
    LayerGates,
    SegmentLines,
    SpannedAttention,
    SpannedRow,
)
from memserve.model.copier import Copy, PageCopier
from memserve.model.forward import EagerForward, Forward
from memserve.model.grammar.masks import Grammars, OnBuilt
from memserve.model.loading.loader import LoadedModel
from memserve.model.loading.lora import read_adapter
from memserve.model.lora import StepAdapters, lora_adapters
from memserve.model.rotary import KeyRotation
from memserve.model.rotation import TokenMover
from memserve.model.sampling import Sampled, report_logprobs, sample, sample_drafts
from memserve.model.slots import NOT_NUMBERS, Failures, Int32s, Int64s, SlotModel, SlotTable, isolate_row
from memserve.model.states.layers import states_of, step_states
from memserve.model.states.memory import CopyRows, RaggedStates, SlotStates, open_states, state_pages
from memserve.model.workers.group import GroupMemory, WorkerGroup, collectives
from memserve.protocol.messages import AdapterFiles
from memserve.system.memory import trim_heap
from memserve.transport.ports import Arenas, Device

if TYPE_CHECKING:
    from memserve.model.workers.gpu_group import GpuWorkerGroup

log = logging.getLogger(__name__)

Drawing = list[tuple[Int64s, Int64s]]
"""In order: slots, and a token for each."""


class ModelDevice(Device):
    """A model, its KV arenas and its slots. Used from one thread."""

    def __init__(
        self,
        model: LoadedModel,
        config: InstanceConfig,
        forward: Forward | None = None,
        attention: AttentionFactory | None = None,
        *,
        shared: bool = False,
        crew: WorkerGroup | GpuWorkerGroup | None = None,
    ) -> None:
        """``forward`` defaults to the module as it is, ``attention`` to the best for the model's device. ``shared``
        puts the KV where other processes of this host can read it. ``crew``: the other workers of the instance."""
        geometry, scheduler, pool = model.geometry, config.scheduler, config.pool
        self._device, self._geometry, self._crew = model.device, geometry, crew
        lower = lower_pages(geometry, pool.lower_dtype)
        sizes = ArenaSizes(
            geometry.block_bytes, pool.hbm_blocks, pool.dram_blocks - pool.ssd_blocks, pool.ssd_blocks, pool.ssd_folder,
            geometry.num_layers,
        )  # fmt: skip
        self._arenas = self._make_arenas(sizes, shared=shared, lower=lower)
        self._sampled: Drawing = []
        # a step under way may sample one token beyond the last that the machine will use
        tokens_max = config.max_model_tokens + scheduler.steps_in_flight
        self._vocab_size, self._embeds = model.vocab_size, model.pooling is not None
        #: None: another worker draws
        words = model.tokenizer, model.vocab_size, model.eos_token_ids
        self.grammars = Grammars(*words, slots=scheduler.max_running) if self._is_leader else None
        self._adapters = model.adapters
        if self._adapters is not None:
            self._adapters.pack_halves()
        known = SlotModel(model.vocab_size, self._adapters or (), model.position_regimes)
        self._slots = SlotTable(scheduler.max_running, tokens_max, geometry.block_tokens, known, self.grammars)
        self._forward = forward or EagerForward(model.module)
        part_blocks = 0 if model.layout is None else model.layout.part_blocks
        self._parts = PartTables(part_blocks, *self._slots.tables.shape)
        #: None: all layers keep the same
        self._layout: LayoutPages | None = None
        self._attention = attention or self._choose_attention(model)
        if geometry.latent and (layers := expanding_layers(model.module)):
            find_costs(geometry, getattr(layers[0], EXPANSION_ATTRIBUTE))  # not in the first request's time
        #: of pages, as blocks of a model with one layer
        self._page_attention = partial(choose_attention, self._arenas.hbm, replace(geometry, num_layers=1), crew)
        addresses = self._arenas.hbm_address, self._arenas.dram.data_ptr()
        self._tiers = Tiers(*addresses, geometry.page_bytes, geometry.num_layers, lower, self._arenas.file)
        self._copier = self._make_copier(scheduler.link_bytes_s)
        self._mover = None if model.rotation is None else self._make_mover(model.rotation)
        #: None: layers keep KV alone
        self._states = self._open_states(model, pool, scheduler.max_running) if model.states else None
        #: of a worker that follows: slots with late draws, as the one that leads knows them
        self._late_elsewhere: frozenset[int] = frozenset()
        #: the segments of longer sequences that are kept here; None: none can be
        is_kernel = isinstance(self._attention, partial) and self._attention.func is KernelAttention
        keeps = is_kernel and crew is None
        self.held_kv: HeldKv | None = HeldKv(self._arenas.hbm_address, geometry) if keeps else None
        #: the way to the other segments; what has come of KV that moves instead
        self.segment_lines: SegmentLines | None = None
        self.gates = LayerGates()
        if gc.isenabled():  # else it is done at the end of the start, once
            gc.collect()  # a load leaves 60 MB in reference cycles (graphs, the tokenizer's files)
            trim_heap()

    def _make_arenas(
        self,
        sizes: ArenaSizes,
        *,
        shared: bool,
        lower: _core.LowerPages | None,
    ) -> Any:
        worker = (0, 1) if self._crew is None else (self._crew.share.rank, self._crew.share.ranks)
        memory = self._crew.memory if isinstance(self._crew, WorkerGroup) else GroupMemory()
        dram = memory.dram if self._is_leader else None
        return KvArenas(sizes, shared=shared, lower=lower, hbm=memory.hbm, dram=dram, worker=worker)

    def _choose_attention(self, model: LoadedModel) -> AttentionFactory:
        if model.states and not model.states.attends:
            return AbsentAttention
        if model.layout is not None:
            layout = LayoutPages(self._arenas.hbm, model.layout, self._geometry, self._parts, self._crew)
            self._layout = layout
            return layout.attention_of
        return choose_attention(self._arenas.hbm, self._geometry, self._crew)

    def _open_states(self, model: LoadedModel, pool: PoolConfig, slots: int) -> SlotStates:
        memory = self._crew.memory if isinstance(self._crew, WorkerGroup) else GroupMemory()
        dram = self._arenas.dram if memory.dram is None else blocks_of(memory.dram, self._geometry.block_bytes)
        tiers, share = (self._arenas.hbm, dram), states_of(model.module).share
        return open_states(model.states, pool.states, slots, tiers, share, self._make_pages, self._copy_rows)

    @property
    def _copy_rows(self) -> CopyRows | None:
        """What copies states to the second tier, and back; None: it is memory like that of states."""
        return None

    def _make_pages(self, page_bytes: int, pages: int) -> Tensor:
        """Memory ``[pages, page_bytes]`` uint8 for states, where the first tier is."""
        return state_pages(page_bytes, pages)

    def _make_mover(self, rotation: KeyRotation) -> TokenMover:
        tiers = {Tier.HBM: self._arenas.hbm}
        if self._arenas.dram.shape[1] == self._geometry.block_bytes:  # else rounded ones are not read in place
            tiers[Tier.DRAM] = self._arenas.dram
        return TokenMover(tiers, self._geometry, rotation)

    def _make_copier(self, link_bytes_s: float | None) -> Any:
        """``link_bytes_s``: emulate a link of this rate for KV that lies by layer."""
        return PageCopier(link_bytes_s)

    @property
    def shared_arenas(self) -> Arenas:
        """What peers can read, tier by tier."""
        shared: Arenas = self._arenas.shared
        return shared

    def execute(self, plan: StepPlan) -> StepFinished:
        """Do the copies, compute the rows, draw the tokens."""
        started_ns = time.perf_counter_ns()
        self._apply_plan(plan)
        finished = StepFinished(plan.step_id, [], 0)
        try:
            moving = self._start_moves(plan.moves)
            if plan.gives_tokens:
                with torch.inference_mode():
                    finished = self._compute_step(plan)
            for copy in moving:
                self._copier.wait_for(copy)
        except BaseException:
            self._copier.cancel_copies()  # later plans may use the same pages
            raise
        finally:
            self.gates.end_gates(plan.gates.values())
        link, copies_ns = self._copier.take_link_use(), self._arenas.take_copied_ns()
        return replace(finished, device_ns=time.perf_counter_ns() - started_ns, link=link, copies_ns=copies_ns)

    def build_grammar(self, job_id: int, grammar: str, on_built: OnBuilt) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        check(self.grammars is not None, "this worker draws no tokens")
        self.grammars.build_grammar(job_id, grammar, on_built)  # type: ignore[union-attr]  # checked in the line before

    def forget_grammar(self, job_id: int) -> None:
        if self.grammars is not None:
            self.grammars.forget_grammar(job_id)

    def await_mask(self, slot: int, on_mask: Callable[[], None]) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        check(self.grammars is not None, "this worker draws no tokens")
        self.grammars.await_mask(slot, on_mask)  # type: ignore[union-attr]  # checked in the line before

    def move_gate(self, gate: int, layers: int | None) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        self.gates.move_gate(gate, layers)

    def read_adapter(self, files: AdapterFiles) -> Callable[[], None]:
        """See :class:`memserve.transport.ports.Device`."""
        if self._adapters is None:
            raise UserError("this instance has no place for adapters", hint="start it with --lora-folder")
        adapter = read_adapter(files.name, Path(files.folder))
        if adapter.digest != files.digest:
            text = f"{files.folder} has other files here than where the adapter {files.name!r} was asked for"
            raise UserError(text, hint="give all hosts the same", param="lora_path")
        prepare = self._adapters.prepare_adapter
        if self._device.type == "cpu" and not adapter.config.use_dora:
            return prepare(adapter)
        # to load the model again sets what all threads share, and a GPU's memory belongs to the order of its steps
        return lambda: prepare(adapter)()

    def drop_adapter(self, digest: str) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        if self._adapters is not None:
            self._adapters.drop_adapter(digest)

    def take_sampled(self) -> Drawing:
        """What was drawn since the last call."""
        sampled, self._sampled = self._sampled, []
        return sampled

    @property
    def late_slots(self) -> frozenset[int]:
        """Slots whose draws were late: of rows behind them no state is kept."""
        return frozenset(self._slots.late)

    def follow_step(self, sampled: Drawing, late: frozenset[int], plan: StepPlan) -> None:
        """This worker's part of a step that another one leads, and what that one has ``sampled`` since the last
        step; ``late``: its :attr:`late_slots` before this one."""
        for slots, tokens in sampled:
            self._slots.append_tokens(slots, tokens)
        if self._states is not None:
            for slot, count in Counter(slot for slots, _ in sampled for slot in slots.tolist()).items():
                self._states.settle_drafts(slot, count)
        is_over = {*plan.close, *(draw.slot for draw in plan.late_draws)}
        self._late_elsewhere = frozenset() if plan.reset_slots else late - is_over
        self._apply_plan(plan)
        if plan.slots:
            with torch.inference_mode():
                self._compute_logits(plan)

    def close(self) -> None:
        """Release the arenas (with the last reference to this device)."""
        self._copier.close()
        if self.grammars is not None:
            self.grammars.end_processes()
        if self.segment_lines is not None:
            self.segment_lines.close()
        self._states = None
        del self._attention, self._page_attention, self._mover, self._arenas, self.held_kv

    def _apply_plan(self, plan: StepPlan) -> None:
        if plan.reset_slots:
            self._slots.close_all()
            if self._states is not None:
                self._states.forget_all()
        for slot in plan.close:
            self._slots.close_slot(slot)
        check(self._states is not None or not plan.states, "this model has no states")
        if self._states is not None:
            if any(isinstance(change, SaveState) or change.tier is Tier.DRAM for change in plan.states):
                self._arenas.will_use_dram()
            for change in plan.states:
                self._states.apply_order(change)
            if any(isinstance(change, SaveState) or change.pages for change in plan.states):
                self._barrier()  # what comes next may write to what another worker still reads, or read what it writes
        for order in plan.copies if self._makes_copies else ():
            self._arenas.copy_blocks(order)
        if plan.copies:
            self._barrier()
        for move in plan.token_moves:
            self._move_tokens(move)
        for sequence in plan.open:
            self._will_use(sequence.blocks)
            self._slots.open_slot(sequence)
        for slot, blocks in plan.grow:
            self._will_use(blocks)
            self._slots.append_blocks(slot, blocks)
        for slot, position, block in plan.replace:
            self._slots.replace_block(slot, position, block)
        for window in plan.windows:
            self._will_use(window.blocks)
            self._parts.place_window(window)
        for placement in plan.place:
            self._place_by_layer(placement)
        self._arenas.prepare_pages(ceil_div(sum(plan.counts), self._slots.block_tokens))
        self._slots.drop_late_tokens(plan.late_draws)

    def _move_tokens(self, move: MoveTokens) -> None:
        check(self._mover is not None, "this model's KV stays at its positions")
        self._arenas.check_blocks(move.src_tier, np.array(move.src, np.int32))
        self._arenas.check_blocks(Tier.HBM, np.array(move.dst, np.int32))
        with torch.inference_mode():
            self._mover.move_tokens(move)  # type: ignore[union-attr]  # checked in the first line

    @property
    def _is_leader(self) -> bool:
        return self._crew is None or self._crew.is_leader  # it draws

    @property
    def _makes_copies(self) -> bool:
        return self._crew is None or self._crew.makes_copies

    def _barrier(self) -> None:
        if self._crew is not None:
            self._crew.barrier()

    def _will_use(self, blocks: Sequence[int]) -> None:
        self._arenas.will_use(blocks)

    def _place_by_layer(self, order: PlaceByLayer) -> None:
        frames = [*order.resident_layers.values(), *order.staging]
        for blocks in frames:
            self._will_use(blocks)
            self._arenas.check_blocks(Tier.HBM, np.array(blocks, np.int32))
        if self._makes_copies:
            self._arenas.check_blocks(Tier.DRAM, np.array(order.dram_blocks, np.int32))
        self._slots.place_by_layer(order.slot, PlacedRange(order, self._tiers))

    def _start_moves(self, orders: list[MovePages]) -> list[Copy]:
        """Begin to copy, a few pages at a time: what a layer waits for goes first."""
        copies = [copy for order in orders for copy in copies_of(order, self._tiers, self._arenas.check_blocks)]
        for copy in copies:
            self._copier.start_copy(copy, urgent=False)
        return copies

    def _compute_step(self, plan: StepPlan) -> StepFinished:
        late = [self._slots.late.pop(draw.slot)[None] for draw in plan.late_draws]
        logits, drawing = self._compute_logits(plan) if plan.slots else (late[0][:0], [])
        failed = self._slots.failures_in(plan)
        verified = len(drawing) + sum([plan.counts[row] for row in plan.drafts])
        hidden = self._hidden_states(plan, drawing, logits, verified) if self._embeds else {}
        prompt_logprobs = {} if self._embeds else self._prompt_logprobs(plan, logits[verified:], failed)
        rows = torch.cat((logits[: len(drawing)], *late)) if late else logits[: len(drawing), : self._vocab_size]
        sampled = self._sample_tokens(plan, drawing, rows, failed)
        tokens = sampled.tokens.tolist()
        accepted: dict[int, list[int]] = {}
        if plan.drafts:
            first, accepted = self._verify_drafts(plan, logits[len(drawing) : verified], failed)
            if self._states is not None:
                for slot, more in accepted.items():
                    self._states.settle_drafts(slot, 1 + len(more))
            tokens += first
        return StepFinished(
            plan.step_id, tokens, 0, sampled.logprobs, prompt_logprobs, sampled.candidates,
            accepted_drafts=accepted, failed=failed, late=sampled.late, hidden=hidden,
        )  # fmt: skip

    @staticmethod
    def _hidden_states(plan: StepPlan, drawing: list[int], states: Tensor, first: int) -> dict[int, bytes]:
        """Row -> the state of the prompt's last token, or the sum over the row's tokens where all are reported.
        ``states``: as of :meth:`_compute_logits`; those of all tokens begin at ``first``."""
        hidden = {row: states[place].numpy().tobytes() for place, row in enumerate(drawing)}
        for row in plan.prompt_logprob_rows:
            count = plan.counts[row]
            hidden[row] = states[first : first + count].sum(0).numpy().tobytes()
            first += count
        return hidden

    def _compute_logits(self, plan: StepPlan) -> tuple[Tensor, list[int]]:
        """``[rows, vocab]`` float32 of the rows that draw one token, whose numbers they are, then of all tokens of rows
        with drafts, then of prompts' tokens."""
        slots, starts = np.array(plan.slots, np.int64), np.array(plan.starts, np.int64)
        starts += self._slots.firsts[slots]
        counts = np.array(plan.counts, np.int64)
        drafted = np.zeros_like(counts)
        for row, tokens in plan.drafts.items():
            drafted[row] = len(tokens)
            self._slots.put_drafts(plan.slots[row], tokens)
        self._slots.check_rows(slots, starts, counts, drafted)
        q_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=q_starts[1:])
        drawing = [row for row, slot_group in enumerate(plan.sample_slots) if slot_group and row not in plan.drafts]
        logits_rows = [q_starts[1:][drawing] - 1]
        whole = [*plan.drafts, *plan.prompt_logprob_rows]
        logits_rows += [np.arange(q_starts[row], q_starts[row + 1]) for row in whole]

        attention = self._attention_of(slots, q_starts, (starts + counts).astype(np.int32))
        rows_of_logits = np.concatenate(logits_rows, dtype=np.int64)
        adapters = self._adapters_of(slots, counts, rows_of_logits)
        seen_attention, states = self._reporting_attention(plan, attention), None
        if plan.gates:
            seen_attention = GatedAttention(seen_attention, self.gates, plan.gates, self._on_segment_lost)
        if self._states is not None:
            late = self._slots.late if self._is_leader else self._late_elsewhere
            for snapshot in plan.snapshots:
                self._will_use(self._states.blocks_of(snapshot.pages))
            states = RaggedStates(self._states, plan, (slots, starts, counts), late)
            seen_attention = OrderedAttention(seen_attention, self._states.attending_before)
        with (
            step_attention(seen_attention),
            step_states(states),
            collectives(self._crew),
            lora_adapters(adapters),
        ):
            logits = self._forward(
                *self._build_inputs(slots, starts, counts, q_starts),
                self._send_to_device(rows_of_logits),
            )
        if isinstance(attention, LayeredAttention):
            attention.wait_for_copies()
        if states is not None:
            states.finish()
            if plan.snapshots:
                self._barrier()  # a snapshot is there when all workers have written what they have of it
        if self._crew is not None:
            logits = self._crew.gather_logits(logits)
        if self._embeds or logits.shape[1] <= self._vocab_size:
            return logits, drawing
        return logits[:, : self._vocab_size], drawing

    def _adapters_of(self, slots: Int64s, counts: Int64s, logits_rows: Int64s) -> StepAdapters | None:
        digests = self._slots.adapters
        if self._adapters is None or not digests:
            return None
        of_slots = [digests.get(slot, "") for slot in slots.tolist()]
        return self._adapters.adapters_of_rows(of_slots, counts, self._device, logits_rows)

    @property
    def _block_tables(self) -> Any:
        """The block tables of all slots, where attention reads them."""
        return self._slots.tables

    def _attention_of(self, slots: Int64s, q_starts: Int32s, contexts: Int32s) -> StepAttention:
        """``contexts``: the tokens of each row up to its last one."""
        contexts -= self._slots.firsts[slots].astype(np.int32)
        if self._slots.before:
            return self._spanned_attention(slots, q_starts, self._attention_of_rows(slots, q_starts, contexts))
        placement = self._slots.placed_ranges
        ranges = (
            {row: placement[slot] for row, slot in enumerate(slots.tolist()) if slot in placement} if placement else {}
        )
        if not ranges:
            return self._attention_of_rows(slots, q_starts, contexts)
        places = [
            placement.first + placement.count for placement in ranges.values()
        ]  # also of what is not computed yet
        entries = max(-(-int(contexts.max()) // self._slots.block_tokens), *places)
        tables = self._slots.tables[slots, :entries]
        rows = StepRows(tables, np.arange(len(tables), dtype=np.int32), q_starts, contexts)
        copier = self._copier if self._makes_copies else None
        return LayeredAttention(self._page_attention(), copier, self._geometry, ranges, rows, self._barrier)

    def _attention_of_rows(self, slots: Int64s, q_starts: Int32s, contexts: Int32s) -> StepAttention:
        """Where all KV lies in whole blocks."""
        rows = StepRows(self._block_tables, slots.astype(np.int32), q_starts, contexts)
        return self._attention(rows)

    def _spanned_attention(self, slots: Int64s, q_starts: Int32s, attention: StepAttention) -> StepAttention:
        """Rows that ask others about earlier parts; not those that have failed."""
        before, ends = self._slots.before, q_starts.tolist()
        rows = [
            SpannedRow(slot, ends[row], ends[row + 1], before[slot])
            for row, slot in enumerate(slots.tolist())
            if slot in before and slot not in self._slots.failed
        ]
        if not rows:
            return attention
        check(
            self.segment_lines is not None and isinstance(attention, KernelAttention), "this device computes no parts"
        )
        return SpannedAttention(attention, self.segment_lines, rows, self._on_segment_lost)  # type: ignore[arg-type]  # checked in the line before

    def _on_segment_lost(self, slot: int, why: str) -> None:
        """A slot cannot read all that is before its row: what it computes has no meaning from there on."""
        log.info("a part of a longer sequence is lost: %s", why)  # also when it has just ended elsewhere
        self._slots.failed.setdefault(slot, RowFailed(""))

    def _reporting_attention(self, plan: StepPlan, attention: StepAttention) -> StepAttention:
        follows, stages = (False, 1) if self._crew is None else (not self._crew.is_leader, self._crew.share.stages)
        if not plan.report_layers or stages > 1:  # no worker sees all layers of stages
            return attention
        if follows:
            return ReportingAttention(attention, lambda layer: None, plan.report_layers, self._barrier)
        if self.on_layer is None:
            return attention
        return ReportingAttention(attention, partial(self.on_layer, plan.step_id), plan.report_layers, self._barrier)

    def _build_inputs(
        self, slots: Int64s, starts: Int64s, counts: Int64s, q_starts: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Token ids and positions of the ragged batch, both ``[T]`` int64."""
        if q_starts[-1] == len(slots):  # decodes only
            return self._gather_tokens(slots, starts)
        owners = np.repeat(slots, counts)
        return self._gather_tokens(owners, np.arange(q_starts[-1]) + np.repeat(starts - q_starts[:-1], counts))

    def _gather_tokens(self, owners: Int64s, positions: Int64s) -> tuple[Tensor, Tensor]:
        """The tokens at ``positions [T]`` of the slots ``owners [T]``, and the positions as the forward takes them."""
        tokens = self._slots.tokens[owners, positions].astype(np.int64)
        return self._send_to_device(tokens), self._send_to_device(self._slots.given_positions(owners, positions))

    def _sample_tokens(self, plan: StepPlan, drawing: list[int], logits: Tensor, failed: Failures) -> Sampled:
        """Sample, and append each token to its slot; a slot that ``failed`` gets one too, because later plans may
        already refer to its position."""
        groups = [plan.sample_slots[row] for row in drawing]
        groups += [(draw.slot,) for draw in plan.late_draws]
        if not groups:
            return Sampled(np.empty(0, np.int64))
        slots = np.array([slot for group in groups for slot in group], np.int64)
        rows = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        sampled = sample(logits, rows, slots, self._slots)
        for slot, why in sampled.failed.items():
            failed.setdefault(slot, why)
        self._slots.append_tokens(slots, sampled.tokens)
        self._sampled.append((slots, sampled.tokens))
        return sampled

    def _verify_drafts(
        self, plan: StepPlan, logits: Tensor, failed: Failures
    ) -> tuple[list[int], dict[int, list[int]]]:
        """Draw in rows with drafts, and append what is drawn: the first token of each row, and by slot those behind."""
        slots = np.array([plan.slots[row] for row in plan.drafts], np.int64)
        sampled, lacking = sample_drafts(logits, slots, list(plan.drafts.values()), self._slots)
        for slot, why in lacking.items():
            failed.setdefault(slot, why)
        self._sampled += self._slots.append_accepted(slots, sampled)
        return [tokens[0] for tokens in sampled], dict(
            zip(slots.tolist(), [tokens[1:] for tokens in sampled], strict=True)
        )

    def _prompt_logprobs(
        self, plan: StepPlan, logits: Tensor, failed: Failures
    ) -> dict[int, list[TokenLogprobs | None]]:
        """Row -> one entry for each token that it computed: the logprobs of the prompt token *after* it.

        ``None`` where the prompt ends. A row with a slot that ``failed``, here or before, has none.
        """
        reports: dict[int, list[TokenLogprobs | None]] = {}
        first = 0
        for row in plan.prompt_logprob_rows:
            slot, start, count = plan.slots[row], plan.starts[row], plan.counts[row]
            prompt_count = max(0, min(count, int(self._slots.prompt_tokens[slot]) - start - 1))
            following = self._slots.tokens[slot, start + 1 : start + 1 + prompt_count].astype(np.int64)
            with isolate_row(failed, slot, "reporting its prompt's logprobs"):
                sampling = self._slots.sampling_of(slot)
                top = (sampling.logprobs or 0) if sampling.prompt_top_logprobs is None else sampling.prompt_top_logprobs
                logprobs = report_logprobs(logits[first : first + prompt_count], self._send_to_device(following), top)
                if any(entry.logprob != entry.logprob for entry in logprobs):
                    failed.setdefault(slot, NOT_NUMBERS)
                reports[row] = [*logprobs, *[None] * (count - prompt_count)]
            first += count
        return {row: entries for row, entries in reports.items() if plan.slots[row] not in failed}

    def _send_to_device(self, values: Int64s) -> Tensor:
        return torch.from_numpy(values)
