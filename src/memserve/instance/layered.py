"""KV by layer: a sequence that does not fit in HBM runs with some of its layers there.

What a plan has computed leaves for DRAM, whole blocks at a time, beside the next plan's rows. From then on its entries
lie by layer (see ``events.PlaceByLayer``)::

    entries     | cached, whole | by layer: in DRAM, kept layers in frames too | whole: being written |
    held by     | blocks[:first]| dram_blocks                  kept, staging   | blocks[first:]       |

DRAM has all of it, so a kept layer can be given up at no cost, and what the sequence leaves in the prefix cache are
ordinary DRAM blocks. Sequences keep other layers than their neighbours, evenly over the depth, so that the link has the
same work before each layer.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from memserve.errors import check
from memserve.instance.events import MovePages, PlaceByLayer, StepPlan
from memserve.instance.layered_kv import LayeredKV, Moving
from memserve.policy.layers import LayerBudget, layer_order
from memserve.types import Tier
from memserve.units import ceil_div

if TYPE_CHECKING:
    from memserve.instance.sequence import Sequence
    from memserve.mempool.pool import BlockPool


class LayerPlacer:
    """Admits by layer what does not fit whole, and moves pages with each plan."""

    __slots__ = (
        "_block_tokens",
        "_budget",
        "_pool",
        "_step_id",
        "_window_blocks",
        "admitted",
        "chunk_tokens",
        "converted",
        "sequences",
    )

    def __init__(
        self, pool: BlockPool, block_tokens: int, budget: LayerBudget, chunk_blocks: int, steps_in_flight: int
    ) -> None:
        """``chunk_blocks``: the most that one plan computes of a sequence that lies by layer."""
        self._pool = pool
        self._block_tokens = block_tokens
        self._budget = budget
        self.chunk_tokens = chunk_blocks * block_tokens
        #: what plans under way compute, and what the next one does
        self._window_blocks = (1 + steps_in_flight) * chunk_blocks + 1
        #: those that lie by layer, in order of admission
        self.sequences: list[Sequence] = []
        self.admitted = 0
        self.converted = 0
        self._step_id = 0  # of the plan that is being made

    @property
    def _layers(self) -> int:
        return self._budget.num_layers

    # -- coming

    def attach(self, sequence: Sequence, headroom: int, *, reads_cache: bool) -> bool:
        """Let a waiting sequence begin that has no room whole. False: it cannot, or that would not help."""
        pool, entries = self._pool, ceil_div(sequence.known + 1, self._block_tokens)
        needed = 2 * ceil_div(entries, self._layers) + self._window_blocks + headroom
        if not _may_lie_by_layer(sequence) or needed >= entries:
            return False
        self.sequences = [other for other in self.sequences if other.layered is not None]
        passing = sum(self._passing_pages(other.layered) for other in self.sequences if other.layered is not None)
        if not self._budget.allows(passing + entries * self._layers) or entries > pool.available(Tier.DRAM):
            return False
        if not self.give_up_kept(needed):
            return False
        cached = sequence.known_tokens()[: sequence.known - 1 if reads_cache else 0]
        hbm, dram = pool.lend(sequence.group.isolation, cached)
        per_layer = ceil_div(len(dram), self._layers)
        frames = pool.allocate(2 * per_layer) if needed <= pool.available() else None
        if frames is None:
            pool.release(hbm)
            pool.release_dram(dram)
            return False
        sequence.blocks = hbm.tolist()
        sequence.layered = LayeredKV(
            len(hbm), len(hbm) + len(dram), dram.tolist(), {}, (frames[:per_layer], frames[per_layer:])
        )
        sequence.computed = sequence.writable_until = (len(hbm) + len(dram)) * self._block_tokens
        self.sequences.append(sequence)
        self.admitted += 1
        sequence.group.facts.append(("begins_by_layer", f"{needed} of {entries} blocks"))
        return True

    def convert(self, running: Many[Sequence], head: Sequence) -> None:
        """``head`` waits for room: let the latest of ``running`` that may lie by layer do so from now on."""
        pool, layers = self._pool, self._layers
        by_layer = [kv for other in self.sequences if (kv := other.layered) is not None]
        if any(kv.moving is not None for kv in by_layer):
            return  # room is on its way
        pages = sum(map(self._passing_pages, by_layer))
        pages += ceil_div(head.known + 1, self._block_tokens) * layers if _may_lie_by_layer(head) else 0
        for sequence in sorted(running, key=lambda sequence: sequence.rank, reverse=True):
            entries = len(sequence.blocks)
            if sequence.layered is not None or not _may_lie_by_layer(sequence) or entries < 2 * self._window_blocks:
                continue
            fits = 2 * ceil_div(entries, layers) <= pool.available() and entries <= pool.available(Tier.DRAM)
            if fits and self._budget.allows(pages + entries * layers):
                self._begin_by_layer(sequence)
                return

    def _begin_by_layer(self, sequence: Sequence) -> None:
        sequence.layered = LayeredKV(0, sequence.published // self._block_tokens)
        if sequence.lease is not None:
            self._pool.unpin(sequence.lease)
        sequence.lease, sequence.published = None, 0
        self.sequences.append(sequence)
        self.converted += 1
        sequence.group.facts.append(("goes_on_by_layer", f"{len(sequence.blocks)} blocks"))

    # -- running

    def advance(self, plan: StepPlan, *, keeps: bool) -> None:
        """Before the rows of a plan: what was moved lies by layer from now on, and what is complete moves. ``keeps``:
        HBM that is free may be used to keep layers."""
        self._step_id = plan.step_id
        self.sequences = [sequence for sequence in self.sequences if sequence.layered is not None]
        for sequence in self.sequences:
            kv = sequence.layered
            if kv is None:
                continue
            if kv.moving is not None:
                self._settle(sequence, kv, kv.moving)
            if kv.moving is None and not self._spill(plan, sequence, kv) and keeps:
                self._keep_more(plan, sequence, kv)

    def place(self, plan: StepPlan) -> None:
        """Behind the rows of a plan: tell the device where everything lies."""
        for sequence in self.sequences:
            kv = sequence.layered
            if kv is not None and kv.changed and sequence.opened and sequence.slot is not None:
                kv.changed = False
                if kv.dram_blocks:
                    kept = {layer: list(frames) for layer, frames in kv.kept.items()}
                    staging = list(kv.staging[0]), list(kv.staging[1])
                    order = PlaceByLayer(sequence.slot, kv.first, list(kv.dram_blocks), kept, staging)
                    plan.place.append(order)

    def make_room(self) -> bool:
        """Give up one kept layer, of the latest request that keeps one. False: none does."""
        for sequence in reversed(self.sequences):
            kv = sequence.layered
            if kv is not None and kv.kept and self._may_give_up(kv):
                layer = next(reversed(kv.kept))
                self._pool.release(kv.kept.pop(layer))
                if kv.moving is not None:
                    self._pool.release(kv.moving.frames.pop(layer, []))
                kv.changed = True
                return True
        return False

    def _may_give_up(self, kv: LayeredKV) -> bool:
        """Whether no copy of the plan that is being made fills frames of it."""
        return kv.moving is None or kv.moving.step_id != self._step_id

    def give_up_kept(self, needed: int) -> bool:
        """Give up kept layers until ``needed`` blocks are available. False: that would not do, and none is given up."""
        kvs = [kv for sequence in self.sequences if (kv := sequence.layered) is not None and self._may_give_up(kv)]
        kept = sum(len(frames) for kv in kvs for frames in kv.kept.values())
        if needed > self._pool.available() + kept:
            return False
        while needed > self._pool.available() and self.make_room():
            pass
        return needed <= self._pool.available()

    def _settle(self, sequence: Sequence, kv: LayeredKV, moving: Moving) -> None:
        """The plan that moves has been made before: to the next one, all is where it should be."""
        if moving.step_id == self._step_id:
            return
        count = len(moving.blocks)
        check(sequence.blocks[kv.first : kv.first + count] == moving.blocks, "blocks that move are not where they were")
        del sequence.blocks[kv.first : kv.first + count]
        self._pool.release(moving.blocks)
        kv.dram_blocks += moving.dram_blocks
        for layer, frames in moving.frames.items():
            kv.kept.setdefault(layer, []).extend(frames)
        for old, new in zip(kv.staging, moving.staging, strict=True):
            old.extend(new)
        kv.moving, kv.changed = None, True

    def _spill(self, plan: StepPlan, sequence: Sequence, kv: LayeredKV) -> bool:
        """Move complete blocks to DRAM. False: there are none, or no room."""
        had = len(kv.dram_blocks)
        count = min(sequence.computed, sequence.known) // self._block_tokens - kv.first - had
        if count <= 0:
            return False
        dram = self._pool.allocate_dram_ids(count)
        if dram is None:
            return False
        more = ceil_div(had + count, self._layers) - len(kv.staging[0])
        frames = self._pool.allocate(more * (2 + len(kv.kept)))
        while frames is None and kv.kept and self.make_room():
            frames = self._pool.allocate(more * (2 + len(kv.kept)))
        if frames is None:
            self._pool.release_dram(dram)
            return False
        taken = iter(frames)
        fresh = [[next(taken) for _ in range(more)] for _ in range(2 + len(kv.kept))]
        blocks = sequence.blocks[kv.first : kv.first + count]
        moving = Moving(
            plan.step_id,
            self._whole(blocks, dram.tolist()),
            blocks=blocks,
            dram_blocks=dram.tolist(),
            frames=dict(zip(kv.kept, fresh[2:], strict=True)),
            staging=(fresh[0], fresh[1]),
        )
        pages = [self._kept_pages([*kv.kept[n], *moving.frames[n]], n, blocks, had) for n in kv.kept]
        if pages:
            src, dst = [page for some, _ in pages for page in some], [page for _, some in pages for page in some]
            moving.kept_order = MovePages(Tier.HBM, Tier.HBM, src, dst)
        self._begin(plan, kv, moving)
        return True

    def _keep_more(self, plan: StepPlan, sequence: Sequence, kv: LayeredKV) -> None:
        """Bring one more layer up, where HBM has blocks that are free."""
        order = layer_order(self._layers, sequence.group.arrival)
        layer = next((layer for layer in order if layer not in kv.kept), None)
        per_layer = len(kv.staging[0])
        if layer is None or not kv.dram_blocks or self._pool.blocks_free < self._window_blocks + 2 * per_layer:
            return
        frames = self._pool.allocate(per_layer)
        if frames is not None:
            src, dst = self._kept_pages(frames, layer, kv.dram_blocks, 0)
            up = MovePages(Tier.DRAM, Tier.HBM, src, dst)
            self._begin(plan, kv, Moving(plan.step_id, up, frames={layer: frames}))

    def _begin(self, plan: StepPlan, kv: LayeredKV, moving: Moving) -> None:
        kv.moving = moving
        plan.moves += [order for order in (moving.order, moving.kept_order) if order is not None]
        if moving.dram_blocks and self._pool.access is not None:
            self._pool.access.copied(Tier.HBM, moving.blocks, Tier.DRAM, moving.dram_blocks)

    def _whole(self, blocks: Many[int], dram_blocks: Many[int]) -> MovePages:
        layers = range(self._layers)
        src = [block * self._layers + layer for block in blocks for layer in layers]
        dst = [block * self._layers + layer for block in dram_blocks for layer in layers]
        return MovePages(Tier.HBM, Tier.DRAM, src, dst)

    def _kept_pages(self, frames: Many[int], layer: int, blocks: Many[int], first: int) -> tuple[list[int], list[int]]:
        """The pages of ``layer`` in ``blocks``, and where those of the entries from ``first`` on lie in ``frames``."""
        src = [block * self._layers + layer for block in blocks]
        entries = range(first, first + len(blocks))
        return src, [frames[at // self._layers] * self._layers + at % self._layers for at in entries]

    def _passing_pages(self, kv: LayeredKV) -> int:
        return len(kv.dram_blocks) * (self._layers - len(kv.kept))

    # -- going

    def withdraw(self, plan: StepPlan, sequence: Sequence) -> None:
        """Take out what ``batch`` moves for a sequence that is about to be preempted: its blocks get other owners."""
        moving = sequence.layered.moving if sequence.layered is not None else None
        if moving is not None and moving.step_id == plan.step_id:
            mine = [id(moving.order), id(moving.kept_order)]
            plan.moves = [order for order in plan.moves if id(order) not in mine]

    def detach(self, sequence: Sequence, *, publishes: bool) -> None:
        """Leave what lies in DRAM to the prefix cache, if ``publishes``, and give up everything but whole blocks."""
        kv, pool = sequence.layered, self._pool
        if kv is None:
            return
        if publishes and kv.dram_blocks:
            entries = kv.first + len(kv.dram_blocks)
            tokens = sequence.known_tokens()[: entries * self._block_tokens]
            pool.insert(sequence.group.isolation, tokens, [*sequence.blocks[: kv.first], *kv.dram_blocks], kv.first)
        pool.release_dram([*kv.dram_blocks, *(kv.moving.dram_blocks if kv.moving is not None else ())])
        pool.release(kv.frames)
        sequence.layered = None


def _may_lie_by_layer(sequence: Sequence) -> bool:
    """One line of tokens that stays here until it ends."""
    group, remote = sequence.group, sequence.group.remote
    plain = group.beam is None and group.request.n == 1 and group.prompt_logprobs is None and not group.muted
    leaves = group.tokens_here is not None or (remote is not None and (remote.home is not None or remote.return_kv))
    return plain and not leaves and not sequence.dram_blocks
