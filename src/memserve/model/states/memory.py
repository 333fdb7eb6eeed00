"""Where recurrent states lie: one of each slot, which its rows change, and snapshots, in pages.

A state is one run of bytes, part after part (:class:`~memserve.base.states.StateGeometry`), so that a snapshot of all
layers is one copy. Each slot knows behind how many tokens its state is; a row that begins elsewhere is an error, and
never a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from memserve import _core
from memserve.base.errors import InvariantError, check
from memserve.base.states import StateGeometry, StatePages, StateShare
from memserve.base.types import Tier
from memserve.base.units import ceil_div
from memserve.instance.events import SaveState, StepPlan
from memserve.model.states.layers import LayerCalls, LayerStates, PartKey, StateLayer, StatePieces, step_states

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from memserve.instance.events import LoadState, TakeSnapshot

    Int64s = NDArray[np.int64]

UNKNOWN = -1


MakePages = Callable[[int, int], torch.Tensor]
"""``(page_bytes, pages)`` -> memory ``[pages, page_bytes]`` uint8."""


CopyRows = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], object]
"""``target[dst[i]] = source[src[i]]`` for rows of bytes: ``(target [n, bytes], source [m, bytes], dst, src)``."""


def state_pages(page_bytes: int, pages: int) -> Tensor:
    """:data:`MakePages` of the host; the kernel gives the memory when it is first touched."""
    return torch.frombuffer(_core.Arena(pages * page_bytes), dtype=torch.uint8).view(pages, page_bytes)


def parts_of(states: Tensor, geometry: StateGeometry) -> list[Tensor]:
    """The parts ``[n, *shape]`` of ``states [n, nbytes]`` uint8, without a copy."""
    parts = []
    for part, offset in zip(geometry.parts, geometry.offsets, strict=False):
        dtype = getattr(torch, part.dtype)
        values = states[:, offset : offset + part.nbytes].view(dtype)
        parts.append(values.view(len(states), *part.shape))
    return parts


class SlotStates:
    """The states of all slots. Used from the device's thread."""

    def __init__(
        self,
        geometry: StateGeometry,
        slots: int,
        pages: Tensor,
        per_block: int = 1,
        dram: Tensor | None = None,
        share: StateShare | None = None,
        make_pages: MakePages = state_pages,
        draft_states: int = 0,
        copy_rows: CopyRows | None = None,
    ) -> None:
        """``pages [pages, page_bytes]`` uint8: where snapshots lie. ``per_block``: or so many in each of these.
        ``dram``: blocks of the second tier, of the same size; plans copy snapshots there. ``share``: of one of several
        workers, which all have these pages and blocks; ``geometry`` is what it has. ``make_pages``: memory where
        ``pages`` are. ``draft_states``: tokens of rows with drafts in a step, at most. ``copy_rows``: from and to
        ``dram``, in order with the steps, where that is memory of another kind."""
        self.geometry, self._share = geometry, share
        #: how many layers attend before those of this worker
        self.attending_before = 0 if share is None else share.attending_before
        self._states = make_pages(geometry.nbytes, slots)
        self._pages, self._per_block, self._dram, self._copy_rows = pages, per_block, dram, copy_rows
        self.parts = parts_of(self._states, geometry)
        #: behind each token of the step's rows with drafts, one row after the other
        self.draft_states = make_pages(geometry.nbytes, draft_states) if draft_states else self._states[:0]
        #: slot -> where its row begins among these, and how many tokens that has, until they are known
        self._drafted: dict[int, tuple[int, int]] = {}
        #: behind how many tokens the state of each slot is; of one with drafts, behind those before its row
        self.tokens: Int64s = np.full(slots, UNKNOWN, np.int64)

    @property
    def device(self) -> torch.device:
        """Where states are."""
        return self._states.device

    def forget_all(self) -> None:
        """After a failed step no slot has a state."""
        self.tokens[:] = UNKNOWN
        self._drafted.clear()

    def keep_drafted(self, rows: dict[int, tuple[int, int]]) -> None:
        """A step has computed rows with drafts, slot -> begin and count among the :attr:`draft_states`."""
        self._drafted = rows

    def settle_drafts(self, slot: int, tokens: int) -> None:
        """Of the row with drafts that ``slot`` had last, the first ``tokens`` are those of its sequence. A slot without
        one: nothing happens."""
        row = self._drafted.pop(slot, None)
        if row is None:
            return
        begin, count = row
        check(1 <= tokens <= count, "slot {} keeps {} of {} tokens", slot, tokens, count)
        self._states[slot] = self.draft_states[begin + tokens - 1]
        self.tokens[slot] += tokens

    def apply_order(self, order: LoadState | SaveState) -> None:
        """Give a slot another state, or save the one that it has, as the plan says."""
        if isinstance(order, SaveState):
            have = int(self.tokens[order.slot])
            check(have == order.tokens, "slot {} is behind {} tokens, not {}", order.slot, have, order.tokens)
            self._copy_pages(self._states[order.slot], self._home(Tier.DRAM), order.dram_blocks, to_pages=True)
            return
        if order.from_slot is not None:
            have = int(self.tokens[order.from_slot])
            check(have == order.tokens, "slot {} is behind {} tokens, not {}", order.from_slot, have, order.tokens)
            self._states[order.slot] = self._states[order.from_slot]
        elif order.pages:
            self._copy_pages(self._states[order.slot], self._home(order.tier), order.pages, to_pages=False)
        else:
            check(order.tokens == 0, "there is no state behind {} tokens without a snapshot", order.tokens)
        self.tokens[order.slot] = order.tokens

    def blocks_of(self, pages: Sequence[int]) -> list[int]:
        """The blocks of HBM that have these pages."""
        return [page // self._per_block for page in pages]

    def _home(self, tier: Tier) -> Tensor:
        home = self._pages if tier == Tier.HBM else self._dram
        if home is None:
            raise InvariantError("a state lies on a tier that there is not")
        return home

    def write_snapshot(self, pages: Sequence[int], state: Tensor) -> None:
        """Copy ``state [nbytes]`` uint8 to ``pages`` of HBM."""
        self._copy_pages(state, self._pages, pages, to_pages=True)

    def of_slot(self, slot: int) -> Tensor:
        """The state of a slot, ``[nbytes]`` uint8, without a copy."""
        return self._states[slot]

    def _copy_pages(self, state: Tensor, home: Tensor, pages: Sequence[int], *, to_pages: bool) -> None:
        if self._share is not None:
            self._copy_runs(self._share, state, home, pages, to_pages=to_pages)
            return
        if self._per_block > 1:
            block, inside = divmod(pages[0], self._per_block)
            check(len(pages) == 1 and 0 <= block < len(home), "a snapshot lies in a page that there is not")
            page = home[block, inside * len(state) : (inside + 1) * len(state)]
            _ = page.copy_(state) if to_pages else state.copy_(page)
            return
        page_bytes = home.shape[1]
        whole, rest = divmod(len(state), page_bytes)
        check(len(pages) == whole + (rest > 0), "a snapshot of {} bytes has {} pages", len(state), len(pages))
        check(min(pages) >= 0 and max(pages) < len(home), "a snapshot lies in pages that there are not")
        if self._copy_rows is not None and home is self._dram:
            full, end = state[: whole * page_bytes].view(whole, page_bytes), state[len(state) - rest :][None]
            for part, places in ((full, list(pages[:whole])), (end, list(pages[whole:]))):
                sides = (home[:, : part.shape[1]], places), (part, list(range(len(places))))
                (target, dst), (source, src) = sides if to_pages else sides[::-1]
                self._copy_rows(target, source, dst, src)
            return
        ids = torch.tensor(pages[:whole], dtype=torch.int64).to(home.device)
        if to_pages:
            home.index_copy_(0, ids, state[: whole * page_bytes].view(whole, page_bytes))
            home[pages[-1], :rest] = state[len(state) - rest :] if rest else state[:0]
        else:
            torch.index_select(home, 0, ids, out=state[: whole * page_bytes].view(whole, page_bytes))
            state[len(state) - rest :] = home[pages[-1], :rest] if rest else state[:0]

    def _copy_runs(
        self, share: StateShare, state: Tensor, home: Tensor, pages: Sequence[int], *, to_pages: bool
    ) -> None:
        """As :meth:`_copy_pages`, of what this worker has; another one may have the bytes beside it."""
        size, own, whole = home.shape[1], state.numpy(), home.numpy()
        if self._per_block > 1:
            block, inside = divmod(pages[0], self._per_block)
            pages, start, needed = [block], inside * share.whole_bytes, 1
        else:
            start, needed = 0, ceil_div(share.whole_bytes, size)
        check(len(pages) == needed, "a snapshot of {} bytes has {} pages", share.whole_bytes, len(pages))
        check(min(pages) >= 0 and max(pages) < len(whole), "a snapshot lies in pages that there are not")
        for run in share.written if to_pages else share.runs:
            place, done = start + run.whole, 0
            while done < run.nbytes:  # a run may go on in the next page
                page, offset = divmod(place + done, size)
                count = min(run.nbytes - done, size - offset)
                page_part, own_part = (
                    whole[pages[page], offset : offset + count],
                    own[run.own + done : run.own + done + count],
                )
                target, source = (page_part, own_part) if to_pages else (own_part, page_part)
                target[:] = source
                done += count


@dataclass(slots=True)
class _Piece:
    """Tokens of one row that a layer computes in one call."""

    begin: int  # in the step
    end: int
    slot: int
    is_fresh: bool
    #: where the state behind it goes, if a snapshot is taken there and the row goes on, or if it is one with drafts
    taken: Tensor | None = None  # [1, nbytes] uint8


@dataclass(slots=True)
class _Rows:
    """Rows of a single token, computed in one call."""

    tokens: Tensor | None = None  # [rows] int64: in the step; None: all that it has
    places: list[int] = field(default_factory=list)  # the same
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    kept: Tensor | None = None  # [kept] int64: rows whose new state counts; None: all


class RaggedStates:
    """One step's rows (a :class:`~memserve.model.states.layers.StepStates`)."""

    def __init__(
        self, memory: SlotStates, plan: StepPlan, rows: tuple[Int64s, Int64s, Int64s], late: Collection[int]
    ) -> None:
        """``rows``: slots, first tokens and counts, each ``[rows]`` int64. ``late``: slots whose rows have no meaning,
        because a draw before them was late: their states stay."""
        self._memory = memory
        slots, starts, self._counts = rows
        self._slots, self._late = slots, late
        #: of rows with drafts: see SlotStates.keep_drafted
        self._drafted: dict[int, tuple[int, int]] = {}
        for row in plan.drafts:
            begin = sum(count for _, count in self._drafted.values())
            self._drafted[int(slots[row])] = begin, int(self._counts[row])
        wrong = np.flatnonzero((memory.tokens[slots] != starts) & ~np.isin(slots, list(late)))
        if len(wrong):
            slot, start = int(slots[wrong[0]]), int(starts[wrong[0]])
            check(False, "slot {} computes from {} on, with a state behind {} tokens", slot, start, memory.tokens[slot])
        ends = dict(zip(slots.tolist(), (starts + self._counts).tolist(), strict=True))
        self._taken: list[tuple[TakeSnapshot, Tensor]] = []  # inside a row, with what was copied
        self._at_end = [
            order for order in plan.snapshots if ends[order.slot] == order.tokens and order.slot not in late
        ]
        inside: dict[int, list[TakeSnapshot]] = {}
        for order in plan.snapshots:
            if order.tokens < ends[order.slot]:
                inside.setdefault(order.slot, []).append(order)
        self._rows, self._pieces = self._divide(slots.tolist(), starts.tolist(), self._counts.tolist(), inside)
        self._table: StatePieces | None = None

    @property
    def pieces(self) -> StatePieces:
        """See :class:`~memserve.model.states.layers.PiecedStates`."""
        if self._table is None:
            self._table = self._make_table()
        return self._table

    def run_layer(self, layer: StateLayer, hidden: Tensor, calls: LayerCalls) -> Tensor:
        """See :class:`~memserve.model.states.layers.StepStates`."""
        rows, output = self._rows, torch.empty(0)
        if rows is not None and not self._pieces:
            output = self._run_rows(layer, hidden.transpose(0, 1), rows, calls).transpose(0, 1)
            return output.contiguous()
        output = torch.empty_like(hidden)
        if rows is not None and rows.tokens is not None:
            inputs = hidden[0].index_select(0, rows.tokens)[:, None]
            output[0].index_copy_(0, rows.tokens, self._run_rows(layer, inputs, rows, calls)[:, 0])
        for piece in self._pieces:
            own = {key: self._memory.parts[part][piece.slot : piece.slot + 1] for key, part in layer.parts.items()}
            if piece.slot in self._late:
                own = {key: part.clone() for key, part in own.items()}
            states, inputs = LayerStates(own, is_fresh=piece.is_fresh), hidden[:, piece.begin : piece.end]
            output[:, piece.begin : piece.end] = calls.call_piece(
                inputs, piece.begin, piece.end, states, is_fresh=piece.is_fresh
            )
            if piece.taken is not None:
                parts_behind = parts_of(piece.taken, self._memory.geometry)
                for key, part in layer.parts.items():
                    parts_behind[part].copy_(own[key])
        return output

    def _make_table(self) -> StatePieces:
        """A state goes from where it lies to where it lies; by way of the snapshot that is taken between two pieces,
        and to a copy that is dropped behind a late draw."""
        memory, late = self._memory, sorted(self._late)
        dropped = torch.empty((len(late), memory.geometry.nbytes), dtype=torch.uint8)
        places = {slot: memory.of_slot(slot).data_ptr() for slot in self._slots.tolist()}
        ends = places | {slot: dropped[number].data_ptr() for number, slot in enumerate(late)}
        rows = []
        if self._rows is not None:
            for token, slot in zip(self._rows.places, self._rows.slots.tolist(), strict=True):
                rows.append((token, token + 1, places[slot], ends[slot], False))
        for piece in self._pieces:
            before = 0 if piece.is_fresh else places[piece.slot]
            behind = ends[piece.slot] if piece.taken is None else piece.taken.data_ptr()
            is_bounded = piece.is_fresh or piece.end - piece.begin > 1
            rows.append((piece.begin, piece.end, before, behind, is_bounded))
            places[piece.slot] = behind
        return StatePieces(rows, int(self._counts.sum()), dropped)

    def finish(self) -> None:
        """The step is computed: slots are behind its tokens, and snapshots are written."""
        for order, state in self._taken:
            self._memory.write_snapshot(order.pages, state)
        for order in self._at_end:
            self._memory.write_snapshot(order.pages, self._memory.of_slot(order.slot))
        unmoved = [*self._late, *self._drafted]
        counts = np.where(np.isin(self._slots, unmoved), 0, self._counts) if unmoved else self._counts
        self._memory.tokens[self._slots] += counts
        self._memory.keep_drafted(self._drafted)

    def _run_rows(self, layer: StateLayer, inputs: Tensor, rows: _Rows, calls: LayerCalls) -> Tensor:
        """``inputs [rows, 1, size]``."""
        own: dict[PartKey, Tensor] = {
            key: self._memory.parts[part].index_select(0, rows.slots) for key, part in layer.parts.items()
        }
        output = calls.call_rows(inputs, rows.tokens if self._pieces else None, LayerStates(own, is_fresh=False))
        for key, part in layer.parts.items():
            if rows.kept is None:
                self._memory.parts[part].index_copy_(0, rows.slots, own[key])
            else:
                self._memory.parts[part].index_copy_(0, rows.slots[rows.kept], own[key][rows.kept])
        return output

    def _divide(
        self, slots: list[int], starts: list[int], counts: list[int], inside: dict[int, list[TakeSnapshot]]
    ) -> tuple[_Rows | None, list[_Piece]]:
        """Rows of one token behind others, all together; of the rest, pieces that end where snapshots are taken, and
        of rows with drafts a piece for each token."""
        single: list[tuple[int, int]] = []
        pieces: list[_Piece] = []
        begin = 0
        for slot, start, count in zip(slots, starts, counts, strict=True):
            if count == 1 and start:
                single.append((begin, slot))
            elif slot in self._drafted:
                states = self._memory.draft_states[self._drafted[slot][0] :]
                pieces += [_Piece(begin + k, begin + k + 1, slot, False, states[k : k + 1]) for k in range(count)]
            else:
                first, place = begin - start, begin
                for order in sorted(inside.get(slot, ()), key=lambda order: order.tokens):
                    state = torch.empty(
                        (1, self._memory.geometry.nbytes), dtype=torch.uint8, device=self._memory.device
                    )
                    self._taken.append((order, state[0]))
                    pieces.append(_Piece(place, first + order.tokens, slot, not start and place == begin, state))
                    place = first + order.tokens
                pieces.append(_Piece(place, begin + count, slot, not start and place == begin))
            begin += count
        if not single:
            return None, pieces
        tokens = [token for token, _ in single]
        device = self._memory.device
        rows = _Rows(torch.tensor(tokens).to(device), tokens, torch.tensor([slot for _, slot in single]).to(device))
        if self._late:
            kept = [row for row, (_, slot) in enumerate(single) if slot not in self._late]
            rows.kept = torch.tensor(kept, dtype=torch.int64).to(device)
        return rows, pieces


class LoneSlot:
    """The state of one sequence that comes in pieces, for a captured forward that is tried."""

    def __init__(self, geometry: StateGeometry) -> None:
        self._memory = SlotStates(geometry, 1, torch.empty((0, 1), dtype=torch.uint8))
        self._memory.tokens[:] = 0

    @contextmanager
    def passed_on(self, count: int) -> Iterator[None]:
        """Around the next ``count`` tokens."""
        rows = np.zeros(1, np.int64), self._memory.tokens.copy(), np.array([count], np.int64)
        states = RaggedStates(self._memory, StepPlan(0), rows, ())
        with step_states(states):
            yield
        states.finish()


def open_states(
    states: StateGeometry,
    lying: StatePages | None,
    slots: int,
    tiers: tuple[Tensor, Tensor],
    share: StateShare | None = None,
    make_pages: MakePages = state_pages,
    copy_rows: CopyRows | None = None,
) -> SlotStates:
    """The states of a device. ``lying``: how snapshots of ``states`` do, in blocks of the ``tiers``, each
    ``[blocks, block_bytes]``. ``share``: of one of several workers. ``make_pages``: memory where the first tier is.
    ``copy_rows``: see :class:`SlotStates`."""
    arena, dram = tiers
    per_block = 1 if lying is None else lying.per_block
    held = states if share is None else share.held
    drafts = 0 if lying is None else lying.draft_states
    return SlotStates(held, slots, arena, per_block, dram, share, make_pages, drafts, copy_rows)
