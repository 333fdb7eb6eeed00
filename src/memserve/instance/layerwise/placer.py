"""KV by layer: a sequence that does not fit in HBM runs with some of its layers there.

Its entries lie by layer (see ``events.PlaceByLayer``): those of a prompt are computed there, layer by layer, and need
room for two layers at a time; blocks that answers fill, or that were whole before, leave for DRAM beside the next
plan's rows::

    entries     | cached, whole | by layer: in DRAM, kept layers in frames too | whole: being written |
    held by     | blocks[:first]| dram_blocks                  kept, staging   | blocks[first:]       |

DRAM has all of it, so a kept layer can be given up at no cost, and what the sequence leaves in the prefix cache are
ordinary DRAM blocks.

A prompt that has no room whole is computed by layer, and its client has the first token. What steps would have to wait
for is *parked* then: it gives up HBM, and goes on, whole or by layer, when there is room. So requests wait behind their
first token instead of before it, in the same order, and memory that comes free is for those that are parked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING

from memserve.base.errors import check
from memserve.base.types import Tier, TokenArray
from memserve.base.units import NS_PER_MS, ceil_div
from memserve.instance.events import LinkUse, PlaceByLayer, StepPlan
from memserve.instance.layerwise.budget import (
    CHUNK_BLOCKS,
    LayerBudget,
    LayeredView,
    LayerPolicy,
    Overtaking,
    forecast_blocks,
    layer_order,
    least_kept_layers,
)
from memserve.instance.layerwise.copies import LayerMoves, SwapIns
from memserve.instance.layerwise.placement import WholeBlocks
from memserve.instance.layerwise.state import LayeredKV, LayerReport
from memserve.instance.scheduler.sequence import Phase

if TYPE_CHECKING:
    from memserve.base.config import SchedulerConfig
    from memserve.instance.scheduler.sequence import Sequence
    from memserve.kv.costs import PreemptionModel
    from memserve.kv.pool import BlockPool

_RESERVE_SHARE = 16  # of HBM: 1 / this, at most
_FORECAST_STAGES = 8  # blocks that each sequence fills meanwhile
_IDLE_SHARE = 4  # 1 / this of HBM lies idle: rather than leave that to what may come, let a parked sequence have it
_SPILL_BLOCKS = 4  # HBM with which a sequence can still send something down: frames for it, and what rows fill
_RESUMES_SHARE = 3, 4  # of what the link carries may be read back once a sequence resumes: else it is parked again


class LayerPlacer(WholeBlocks):
    """Admits by layer what does not fit whole, moves pages with each plan, and says what is parked."""

    is_by_layer = True

    def __init__(
        self, pool: BlockPool, budget: LayerBudget, scheduler: SchedulerConfig, costs: PreemptionModel
    ) -> None:
        super().__init__(pool)
        block_tokens = pool.block_tokens
        self._budget = budget
        self.policy = LayerPolicy.from_name(scheduler.layerwise)
        self._costs = costs
        self._chunk_max = ceil_div(scheduler.chunk_tokens, block_tokens)  # blocks of one sequence in a plan
        self._steps_in_flight = scheduler.steps_in_flight
        #: those that lie by layer, in order of admission
        self.sequences: list[Sequence] = []
        self.swap_ins = SwapIns(pool, budget.num_layers)
        self._moves = LayerMoves(pool, budget.num_layers, block_tokens)
        self._plan: StepPlan | None = None  # that is being made
        self._wanted = 0  # blocks that a prompt needs which could begin by layer, and lacks
        self._usual = 0  # blocks that the last one needed
        self.admitted = self.converted = self.parked = self.resumed = 0
        self.link = LinkUse()
        self._balance_ns = 0  # what steps computed, less what they waited for layers; 0: nothing is owed to others
        self.overtaking = Overtaking(block_tokens, costs.model.free_tokens)
        #: tokens that a sequence is expected to draw yet
        self.tokens_left: Callable[[Sequence], int] = lambda sequence: sequence.draws_left

    @property
    def is_busy(self) -> bool:
        """Whether anything lies by layer, or comes up."""
        return bool(self.swap_ins or self._offloaded())

    @property
    def parks(self) -> bool:
        """As its policy has it."""
        return self.policy.parks

    @property
    def num_layers(self) -> int:
        """Layers of the model: pages of a block."""
        return self._budget.num_layers

    @property
    def link_bytes_s(self) -> float:
        """What the link between HBM and DRAM carries, as far as is known."""
        return self._budget.link_bytes_s

    @property
    def _window_blocks(self) -> int:
        """Blocks that a sequence has whole until they have moved: what plans under way, and the next one, compute."""
        return (1 + self._steps_in_flight) * min(CHUNK_BLOCKS, self._chunk_max) + 1

    # -- coming

    def swap_in(self, sequence: Sequence) -> bool:
        """Bring the blocks of a parked sequence up, whole, beside the plan that is being made. False: no room."""
        check(self._plan is not None, "blocks come up, and no plan is being made")
        return self._plan is not None and self.swap_ins.start_swap_in(sequence)

    def arrives(self, sequence: Sequence) -> bool:
        """Whether its blocks come up beside the rows of others: it has none yet."""
        return self.swap_ins.is_arriving(sequence)

    def may_offload(self, sequence: Sequence) -> bool:
        """One line of tokens, of which only tokens are reported; where others cannot read DRAM, one that stays."""
        group, remote = sequence.group, sequence.group.remote
        leaves = group.tokens_here is not None or (remote is not None and (remote.home is not None or remote.return_kv))
        if leaves and not self._pool.config.shares_dram:
            return False
        return group.beam is None and group.request.n == 1 and group.prompt_logprobs is None and not group.muted

    def attach_by_layer(self, sequence: Sequence, headroom: int, *, reads_cache: bool, crowded: bool) -> bool:
        """Let a waiting sequence begin that has no room whole. False: it cannot, or that would not help. ``crowded``:
        others are parked; what it takes whole would be theirs."""
        pool, token_count = self._pool, sequence.known_length
        complete, entries = token_count // self._block_tokens, ceil_div(token_count + 1, self._block_tokens)
        if sequence.dram_blocks or not self.may_offload(sequence) or complete > pool.available(Tier.DRAM):
            return False
        streams = self.outgrows_hbm(sequence, token_count)
        waits = self.piece_tokens(sequence) > self._chunk_max * self._block_tokens
        if waits and not (streams or self.policy.forecasts):
            return False  # reading back would take longer than computing
        least_layers = self._least_kept(token_count, complete) if self.policy.forecasts and not streams else 0
        needed = (2 + least_layers) * ceil_div(complete, self.num_layers) + entries - complete + headroom
        if needed >= entries + headroom and not crowded:
            return False
        self._wanted = needed
        if not self.evict_layers(needed):
            return False
        self._wanted, self._usual = 0, needed
        reusable = sequence.known_tokens()[: token_count - 1 if reads_cache else 0]
        hbm, dram = [ids.tolist() for ids in pool.export_blocks(sequence.group.isolation, reusable)]
        if streams and needed > pool.available():  # its cached blocks are in the way of its layers
            hbm, dram = self._send_down(hbm, dram)
        first, cached = len(hbm), len(hbm) + len(dram)
        fresh = pool.allocate_dram_ids(complete - cached)
        fits = fresh is not None and needed <= pool.available()
        frames = self._allocate_staging(complete - first) if fits else None
        if fresh is None or frames is None:
            pool.release(hbm)
            pool.release_dram(dram)
            pool.release_dram(fresh if fresh is not None else ())
            return False
        sequence.blocks = hbm
        dram_blocks = [*dram, *fresh.tolist()]
        resident = self._first_resident(sequence, least_layers, complete - first) if cached == first else {}
        sequence.layered = LayeredKV(first, cached, 0, dram_blocks, resident, frames, streams=streams)
        sequence.computed, sequence.writable_until = cached * self._block_tokens, complete * self._block_tokens
        self._start_offload(sequence, ("begins_by_layer", f"{needed} of {entries} blocks"))
        self.admitted += 1
        return True

    def _least_kept(self, tokens: int, blocks: int) -> int:
        """Layers that a prompt keeps at least while it is computed, where the policy is the published one."""
        prefill_ns = self._costs.model.prefill.ns(tokens, 0)
        return least_kept_layers(self.num_layers, prefill_ns, self._budget.link_ns(blocks))

    def _first_resident(self, sequence: Sequence, count: int, entries: int) -> dict[int, list[int]]:
        """Frames of the ``count`` layers of a prompt that is about to be computed, as many as there is room for."""
        layers, resident = self._order_of(sequence)[:count], dict[int, list[int]]()
        for layer in layers:
            frames = self._pool.allocate(ceil_div(entries, self.num_layers))
            if frames is None:
                break
            resident[layer] = frames
        return resident

    def _order_of(self, sequence: Sequence) -> list[int]:
        return layer_order(self.num_layers, sequence.group.arrival if self.policy.is_staggered else 0)

    def _send_down(self, hbm: list[int], dram: list[int]) -> tuple[list[int], list[int]]:
        """Blocks of a cached prefix, in HBM and behind it in DRAM: all in DRAM, where that has room."""
        below = self._pool.swap_out(hbm)
        return ([], [*below, *dram]) if below is not None else (hbm, dram)

    def outgrows_hbm(self, sequence: Sequence, tokens: int) -> bool:
        """Whether so many tokens of ``sequence`` have no room whole, even if all others but those that stream were
        gone."""
        streaming = sum(2 * len(kv.staging[0]) for neighbour, kv in self._streaming() if neighbour is not sequence)
        return ceil_div(tokens, self._block_tokens) > self._pool.config.hbm_blocks - streaming

    def _streaming(self) -> list[tuple[Sequence, LayeredKV]]:
        return [(sequence, kv) for sequence, kv in self._offloaded() if kv.streams]

    def least_piece(self, sequence: Sequence) -> int:
        """Each piece of a prompt that lies by layer reads back those before it."""
        if sequence.layered is None:
            return self._block_tokens
        return min(self.piece_tokens(sequence), sequence.known_length - sequence.computed)

    def piece_tokens(self, sequence: Sequence) -> int:
        """The least piece of its prompt whose computing hides reading back, were it to lie by layer."""
        entries = ceil_div(sequence.known_length + 1, self._block_tokens)
        block_ns = self._costs.model.prefill.token_ns * self._block_tokens if self._costs.samples else 0.0
        return min(self._budget.chunk_blocks(entries, block_ns), entries) * self._block_tokens

    def overtaking_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens of ``budget`` for the next piece of a prompt without room, which reads back what is before it."""
        token_ns, entries = self._costs.model.prefill.token_ns, sequence.computed // self._block_tokens
        link_ns = self._budget.link_ns(entries)
        least = min(
            int((link_ns - self._costs.decode_ns) / max(1.0, token_ns)), sequence.known_length - sequence.computed
        )
        return self.overtaking.limit_tokens(budget, least)

    def note_rows(self, sequence: Sequence, start: int, end: int) -> None:
        """The plan that is being made computes tokens ``[start, end)`` of ``sequence``."""
        kv, access = sequence.layered, self._pool.access
        if sequence.is_overtaking:
            self.overtaking.add_tokens(end - start)
        if kv is not None and access is not None:
            first, last = start // self._block_tokens - kv.first, ceil_div(end, self._block_tokens) - kv.first
            access.on_copies_recorded(Tier.HBM, (), Tier.DRAM, kv.dram_blocks[max(0, first) : max(0, last)])

    def resume_by_layer(self, sequence: Sequence, headroom: int) -> bool:
        """Let a sequence that was swapped out go on with all of its layers in DRAM: one that is parked, if steps read
        them back without waiting, and any that can lie in no other way. False: it shall not, or has no room."""
        pool, has_prompt = self._pool, sequence.computed >= sequence.known_length - 1
        complete = (sequence.computed if has_prompt else sequence.known_length) // self._block_tokens
        dram, tail = sequence.dram_blocks[:complete], sequence.dram_blocks[complete:]
        needed = 2 * ceil_div(complete, self.num_layers) + 1 + headroom
        pages = self._pages_read_back() + complete * self.num_layers
        if not complete or not self.may_offload(sequence) or needed > pool.available():
            return False
        streams = self.outgrows_hbm(sequence, sequence.known_length)
        allowed = pages * _RESUMES_SHARE[1] // _RESUMES_SHARE[0]
        if not streams and not (has_prompt and self._budget.allows_pages(allowed, self._costs.decode_ns)):
            return False
        fresh = pool.allocate_dram_ids(complete - len(dram))
        frames = self._allocate_staging(complete) if fresh is not None else None
        blocks = pool.swap_in(tail) if frames is not None else None
        if fresh is None or frames is None or blocks is None:
            pool.release([*frames[0], *frames[1]] if frames is not None else [])
            pool.release_dram(fresh if fresh is not None else ())
            return False
        sequence.blocks, sequence.dram_blocks = blocks, []
        sequence.layered = LayeredKV(0, 0, 0, [*dram, *fresh.tolist()], {}, frames, streams=streams)
        sequence.writable_until = (complete + len(blocks)) * self._block_tokens
        self._start_offload(sequence, ("resumes_by_layer", f"{complete} blocks"))
        self.resumed += 1
        return True

    def _allocate_staging(self, entries: int) -> tuple[list[int], list[int]] | None:
        frame_count = ceil_div(entries, self.num_layers)
        frames = self._pool.allocate(2 * frame_count)
        return (frames[:frame_count], frames[frame_count:]) if frames is not None else None

    def _start_offload(self, sequence: Sequence, fact: tuple[str, str]) -> None:
        # preempted by the plan that is being made, and admitted again by it: it is listed still
        self.sequences = [candidate for candidate in self.sequences if candidate is not sequence]
        self.sequences.append(sequence)
        sequence.group.facts.append(fact)

    def blocks_to_reserve(self, blocks: int) -> int:
        """HBM blocks to leave to prompts where a parked sequence, which needs ``blocks``, may go on: what the next one
        lacks or, if none waits and not much lies idle, a little, so that it need not wait for an end."""
        total = self._pool.config.hbm_blocks
        little = min(self._usual, total // _RESERVE_SHARE) if self._pool.available() < total // _IDLE_SHARE else 0
        return max(0, min(max(self._wanted, little), total - blocks))

    def convert_running(self, running: Many[Sequence], head: Sequence) -> None:
        """``head`` waits for room: let the latest of ``running`` that may lie by layer do so from now on."""
        pool, layers = self._pool, self.num_layers
        if any(kv.moving is not None for _, kv in self._offloaded()):
            return  # room is on its way
        pages = self._pages_read_back()
        if self.may_offload(head) and not self.outgrows_hbm(head, head.known_length):
            pages += ceil_div(head.known_length + 1, self._block_tokens) * layers
        for sequence in sorted(running, key=lambda sequence: sequence.rank, reverse=True):
            entries = len(sequence.blocks)
            if sequence.layered is not None or not self.may_offload(sequence) or self.arrives(sequence):
                continue
            if sequence.group.is_leaving or entries < 2 * self._window_blocks:
                continue  # it is offered where it lies, or too short
            fits = 2 * ceil_div(entries, layers) <= pool.available() and entries <= pool.available(Tier.DRAM)
            if fits and self._budget.allows_pages(pages + entries * layers, self._costs.decode_ns):
                self._convert_sequence(sequence)
                return

    def _convert_sequence(self, sequence: Sequence) -> None:
        chunk_tokens = min(CHUNK_BLOCKS, self._chunk_max) * self._block_tokens
        sequence.layered = LayeredKV(0, sequence.published // self._block_tokens, chunk_tokens)
        if sequence.lease is not None:
            self._pool.unpin(sequence.lease)
        sequence.lease, sequence.published = None, 0
        self._start_offload(sequence, ("goes_on_by_layer", f"{len(sequence.blocks)} blocks"))
        self.converted += 1

    # -- running

    def begin_plan(self, plan: StepPlan, *, beside: bool) -> None:
        """``plan`` is begun: what the last one has moved is where it should be. ``beside``: others decode in it, and
        shall not wait for what comes up."""
        self._plan, self._wanted, self.needs_dram = plan, 0, False
        self.overtaking.begin_plan(beside=beside and self.policy.bounds_delays)
        pages_max = self._budget.pages_max(self._costs.decode_ns)
        self.swap_ins.continue_copies(plan, pages_max // self.num_layers if beside else None)
        self.sequences = [sequence for sequence in self.sequences if sequence.layered is not None]
        for sequence, kv in self._offloaded():
            if kv.moving is not None:
                self._moves.finish_copies(sequence, kv, kv.moving)
            kv.streams = kv.streams or self.outgrows_hbm(sequence, sequence.known_length)

    def sequences_to_park(self, decoding: Many[Sequence]) -> list[Sequence]:
        """Those of ``decoding`` that give up HBM before the plan that is being made, as the policy has it; and those
        that lie whole and have no room for their next token: they go on by layer."""
        offloaded = sorted(self._offloaded(), key=lambda lying: lying[0].rank, reverse=True)
        offloaded = [(sequence, kv) for sequence, kv in offloaded if not kv.streams]  # parked, they would wait for ever
        lying, step_ns = [self._policy_view(*pair) for pair in offloaded], self._costs.decode_ns
        indices = self.policy.indices_to_park(lying, self._budget, step_ns, self._pool.blocks_free)
        parked = [offloaded[index][0] for index in indices] + [
            sequence
            for sequence in decoding
            if sequence.layered is None and sequence.computed >= sequence.writable_until
            and self.may_offload(sequence) and self.outgrows_hbm(sequence, sequence.computed + 1)
        ]  # fmt: skip
        self.parked += len(parked)
        return parked

    def sequences_at_rest(self, decoding: Many[Sequence]) -> Many[Sequence]:
        """Those that stream have a row in half of the time, where others decode: these wait for their layers, too."""
        streaming = [sequence for sequence in decoding if sequence.layered is not None and sequence.layered.streams]
        if len(streaming) in (0, len(decoding)):
            self._balance_ns = 0
        return streaming if self._balance_ns < 0 else ()

    def _policy_view(self, sequence: Sequence, kv: LayeredKV) -> LayeredView:
        decodes = sequence.phase is Phase.DECODING
        settled = (
            bool(kv.dram_blocks) and self._moves.complete_blocks(sequence, kv) <= 1
        )  # else the most of it still moves
        return LayeredView(
            sequence.group.arrival, len(kv.dram_blocks), len(kv.resident_layers), decodes, decodes and settled
        )

    def up_again(self, prefilling: Iterable[Sequence]) -> Many[Sequence]:
        """They lack their last known token alone, and get a row whatever prompts may have."""
        return [
            sequence
            for sequence in prefilling
            if sequence.out and sequence.computed == sequence.known_length - 1 and sequence.group.beam is None
            and not self.arrives(sequence)
        ]  # fmt: skip

    def move(self, plan: StepPlan, decoding: Many[Sequence], *, keeps: bool) -> None:
        """Before the rows of ``plan``: what is complete moves. ``keeps``: free HBM may be used to keep layers."""
        if self.policy.forecasts and self._evict_by_forecast(decoding):
            keeps = False
        for sequence, kv in self._offloaded():
            most = self.policy.kept_most(sequence.group.arrival, self.num_layers)
            while len(kv.resident_layers) > most and self._may_evict(kv):
                self._evict_last_layer(kv)
            if kv.moving is not None or self._moves.spill_blocks(plan, sequence, kv, self.evict_layer):
                continue
            complete = self._moves.complete_blocks(sequence, kv)
            little = self._pool.available() < _SPILL_BLOCKS
            if kv.streams and little and complete > self._pool.available(Tier.DRAM):
                self.needs_dram = True
            if not keeps:
                continue
            room = self._window_blocks + 2 * len(kv.staging[0])
            if complete >= 0 and self._pool.blocks_free >= room:
                self._add_resident_layer(plan, sequence, kv)

    def _add_resident_layer(self, plan: StepPlan, sequence: Sequence, kv: LayeredKV) -> None:
        if len(kv.resident_layers) < self.policy.kept_most(sequence.group.arrival, self.num_layers):
            order = self._order_of(sequence)
            self._moves.make_resident(plan, kv, next(layer for layer in order if layer not in kv.resident_layers))

    def _evict_by_forecast(self, decoding: Many[Sequence]) -> bool:
        """LayerKV: if free blocks are expected to be few, the latest requests give up the layers that they kept at
        least, then all. Returns whether that is expected."""
        size, total = self._block_tokens, self._pool.config.hbm_blocks
        ends = [(self.tokens_left(sequence) // size, sequence.blocks_held) for sequence in decoding]
        lacking = total // _RESERVE_SHARE - min(forecast_blocks(self._pool.available(), ends, _FORECAST_STAGES))
        is_short, goal_blocks = lacking > 0, self._pool.available() + lacking
        for takes_all in (False, True):
            for sequence, kv in reversed(self._offloaded()):
                count = len(kv.resident_layers)
                if not takes_all:
                    count = min(count, self._least_kept(sequence.prompt_tokens, len(kv.dram_blocks)))
                for _ in range(count if self._may_evict(kv) else 0):
                    if self._pool.available() < goal_blocks:
                        self._evict_last_layer(kv)
        return is_short

    def place_layers(self, plan: StepPlan) -> None:
        """Behind the rows of a plan: tell the device where everything lies."""
        self._plan = None
        self.swap_ins.on_plan_made()
        for sequence, kv in self._offloaded():
            if kv.changed and sequence.opened and sequence.slot is not None:
                kv.changed = False
                if kv.dram_blocks:
                    resident = {layer: list(frames) for layer, frames in kv.resident_layers.items()}
                    staging = list(kv.staging[0]), list(kv.staging[1])
                    order = PlaceByLayer(sequence.slot, kv.first, list(kv.dram_blocks), resident, staging)
                    plan.place.append(order)

    def on_step_finished(self, link: LinkUse, step_ns: int) -> None:
        """A step of ``step_ns`` has used the link: all that lie by layer have waited as long as it has."""
        self.link.add(link)
        self._balance_ns = min(0, self._balance_ns + step_ns - 2 * link.waited_ns)
        self._budget.link.learn_copies(link.up_bytes + link.down_bytes, link.busy_ns)
        for _, kv in self._offloaded():
            kv.waited_ns += link.waited_ns

    def report_placement(self, sequence: Sequence) -> None:
        """``sequence`` lies by layer no more, or ends: say how it lay, for its client."""
        if (kv := sequence.layered) is not None:
            resident = f"{len(kv.resident_layers)} of {self.num_layers} layers in HBM"
            waited = f"waited {kv.waited_ns / NS_PER_MS:.1f} ms for the others"
            sequence.group.facts.append(("by_layer", f"{resident}, {waited}"))

    def _offloaded(self) -> list[tuple[Sequence, LayeredKV]]:
        return [(sequence, kv) for sequence in self.sequences if (kv := sequence.layered) is not None]

    def _pages_read_back(self) -> int:
        """By steps, for sequences that could wait for room instead."""
        offloaded = self._offloaded()
        decoding = [kv for sequence, kv in offloaded if sequence.phase is Phase.DECODING and not kv.streams]
        return sum(kv.passing_pages(self.num_layers) for kv in decoding)

    def evict_layer(self) -> bool:
        """Give up one kept layer, of the latest request that keeps one. False: none does."""
        for sequence in reversed(self.sequences):
            if (kv := sequence.layered) is not None and kv.resident_layers and self._may_evict(kv):
                self._evict_last_layer(kv)
                return True
        return False

    def _evict_last_layer(self, kv: LayeredKV) -> None:
        layer = next(reversed(kv.resident_layers))
        self._pool.release(kv.resident_layers.pop(layer))
        if kv.moving is not None:
            self._pool.release(kv.moving.frames.pop(layer, []))
        kv.changed = True

    def _may_evict(self, kv: LayeredKV) -> bool:
        return kv.moving is None or kv.moving.plan is not self._plan

    def evict_layers(self, needed: int) -> bool:
        """Give up kept layers until ``needed`` blocks are available. False: that would not do, and none is given up."""
        kvs = [kv for sequence in self.sequences if (kv := sequence.layered) is not None and self._may_evict(kv)]
        resident_frames = sum(len(frames) for kv in kvs for frames in kv.resident_layers.values())
        if needed > self._pool.available() + resident_frames:
            return False
        while needed > self._pool.available() and self.evict_layer():
            pass
        return needed <= self._pool.available()

    # -- going

    def is_in_dram(self, sequence: Sequence) -> bool:
        """Whether DRAM has nearly all of its KV already."""
        return sequence.layered is not None or self.arrives(sequence)

    def to_dram(self, sequence: Sequence) -> list[int] | None:
        """Give up all HBM of ``sequence``, which lies by layer or is about to come up, for blocks of DRAM. None: DRAM
        has no room for what is not there, and nothing has changed."""
        if self.arrives(sequence):
            return self.swap_ins.cancel_swap_in(sequence)
        kv = sequence.layered
        check(kv is not None, "{} does not lie by layer", sequence)
        if kv is None:
            return None
        if kv.moving is not None and kv.moving.plan is self._plan:
            self._moves.cancel_copies(kv, kv.moving)
        elif kv.moving is not None:
            self._moves.finish_copies(sequence, kv, kv.moving)
        computed = ceil_div(sequence.computed, self._block_tokens)
        by_layer = max(0, min(computed - kv.first, len(kv.dram_blocks)))
        whole = sequence.blocks[: computed - by_layer]
        below = self._pool.swap_out(whole) if whole else []
        if below is None:
            return None
        self._pool.release(sequence.blocks[len(whole) :])
        self._pool.release(kv.hbm_frames)
        self._pool.release_dram(kv.dram_blocks[by_layer:])
        self.report_placement(sequence)
        sequence.layered = None
        return [*below[: kv.first], *kv.dram_blocks[:by_layer], *below[kv.first :]]

    def detach_sequence(self, sequence: Sequence, *, publishes: bool) -> TokenArray | None:
        """Leave what lies in DRAM to the prefix cache, if ``publishes``, and give up everything but whole blocks.
        Returns the tokens that the cache has got."""
        self.swap_ins.forget_sequence(sequence)
        kv, pool, tokens = sequence.layered, self._pool, None
        if kv is None:
            return None
        if kv.moving is not None and kv.moving.plan is self._plan:
            self._moves.cancel_copies(kv, kv.moving)
        if publishes and kv.dram_blocks:
            count = len(kv.dram_blocks) + min(0, self._moves.complete_blocks(sequence, kv))
            tokens = sequence.known_tokens()[: (kv.first + count) * self._block_tokens]
            blocks = [*sequence.blocks[: kv.first], *kv.dram_blocks[:count]]
            pool.insert(sequence.group.isolation, tokens, blocks, kv.first)
        pool.release_dram([*kv.dram_blocks, *(kv.moving.dram_blocks if kv.moving is not None else ())])
        pool.release(kv.hbm_frames)
        sequence.layered = None
        return tokens

    # -- what there is

    def report(self, parked: int) -> LayerReport:
        """In pages, and totals."""
        kvs, unit = [kv for _, kv in self._offloaded()], self.num_layers
        return LayerReport(
            sequences=len(kvs),
            parked=parked,
            dram_pages=unit * sum(len(kv.dram_blocks) for kv in kvs),
            kept_pages=unit * sum(len(frames) for kv in kvs for frames in kv.resident_layers.values()),
            staging_pages=unit * sum(len(frames) for kv in kvs for frames in kv.staging),
            moving_pages=unit * sum(len(kv.moving.dram_blocks) + len(kv.moving.hbm_frames) for kv in kvs if kv.moving),
            begun=self.admitted,
            converted=self.converted,
            parkings=self.parked,
            resumed=self.resumed,
            link=replace(self.link),
        )

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Each of ``sequences`` that lies by layer is listed, once."""
        listed = Counter(id(sequence) for sequence in self.sequences)
        lying = {id(sequence) for sequence in sequences if sequence.layered is not None}
        check(listed.keys() >= lying, "one that lies by layer is not listed")
        check(all(count == 1 for count in listed.values()), "a sequence is listed twice among those that lie by layer")
        self.swap_ins.check_invariants()
