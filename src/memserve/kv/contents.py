"""Cached KV by what its tokens are, wherever they stood: for reuse that is no prefix.

::

    cached before    [ system | A A A A | B B B | question 1 ]
    a prompt         [ system | B B B | A A A A | question 2 ]
                              run 1   run 2               each copied, its keys rotated by how far it moves
                              ##      ##                  its first tokens are computed anew: they miss most

A run's KV was computed behind other tokens, so what is made of it is *inexact*. Runs are found by hashes of windows as
long as a block, at any offset of the prompt, among the whole blocks that sequences have published; their tokens are
compared, so that a collision costs time and never gives wrong KV. Where the blocks are now, the prefix index says when
a run is to be used: nothing has to follow their evictions here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import check
from memserve.base.types import Tier, TokenArray

if TYPE_CHECKING:
    from memserve.kv.pool import BlockPool


Positions = tuple[int, int]
"""Those of a prompt from the first to before the second."""


@dataclass(slots=True, eq=False)
class Source:
    """Tokens that one sequence has published, whole blocks."""

    isolation: str
    tokens: TokenArray
    label: str
    """The sequence's request, for people."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` tokens of a prompt from ``first`` on, which are those of ``source`` from ``source_first`` on."""

    first: int
    source_first: int
    count: int
    source: Source

    @property
    def end(self) -> int:
        """Behind its last token in the prompt."""
        return self.first + self.count

    @property
    def shift(self) -> int:
        """By how many positions it moves."""
        return self.first - self.source_first


class ContentIndex:
    """Windows of the tokens of published blocks. Sources that were used least recently go first."""

    def __init__(self, block_tokens: int, tokens_max: int, key: bytes) -> None:
        """``tokens_max``: of all sources together. ``key``: of the hashes, not to be known outside."""
        self._block_tokens, self._tokens_max = block_tokens, tokens_max
        self._factor = np.uint64(int.from_bytes(key[:8], "little") | 1)
        self._sources: OrderedDict[Hashable, Source] = OrderedDict()
        #: isolation -> hash of a block's tokens -> the source that had it last, and the number of the block there
        self._places: dict[str, dict[int, tuple[Source, int]]] = {}
        #: of all sources
        self.tokens = 0

    def note_published(self, name: Hashable, isolation: str, tokens: TokenArray, label: str = "") -> None:
        """The cache has all of ``tokens``, whole blocks, of the sequence ``name``. ``label``: its request."""
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = Source(isolation, tokens[:0], label)
        self._sources.move_to_end(name)
        if len(tokens) <= len(source.tokens):  # it was preempted, and publishes the same again
            return
        first = len(source.tokens) // self._block_tokens
        self.tokens += len(tokens) - len(source.tokens)
        source.tokens = tokens.copy()  # else a whole prompt stays in memory for the first blocks of it
        fresh = tokens[first * self._block_tokens :]
        places = self._places.setdefault(isolation, {})
        for number, code in enumerate(self._hash_windows(fresh)[:: self._block_tokens].tolist(), first):
            places[code] = source, number
        while self.tokens > self._tokens_max and len(self._sources) > 1:
            self._forget_source(next(iter(self._sources)))

    def find_runs(self, isolation: str, tokens: TokenArray, first: int, end: int) -> list[Run]:
        """Runs among the positions ``[first, end)`` of a prompt, in order, from left to right each as long as it is in
        the source that had its first window last."""
        places, width = self._places.get(isolation), self._block_tokens
        if not places or end - first < width:
            return []
        runs: list[Run] = []
        behind = first  # the last run
        for position, code in enumerate(self._hash_windows(tokens[first:end]).tolist(), first):
            if position < behind or code not in places:
                continue
            source, number = places[code]
            begin = number * width
            if np.array_equal(source.tokens[begin : begin + width], tokens[position : position + width]):
                runs.append(_extended(Run(position, begin, width, source), tokens, behind, end))
                behind = runs[-1].end
        return runs

    def forget_blocks(self, run: Run) -> None:
        """The cache has no KV of ``run`` any more."""
        places, width = self._places.get(run.source.isolation, {}), self._block_tokens
        first, end = run.source_first // width, -(-(run.source_first + run.count) // width)
        codes = self._hash_windows(run.source.tokens[first * width : end * width])[::width].tolist()
        for code in codes:
            if code in places and places[code][0] is run.source:
                del places[code]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless the tokens are those of the sources, and places lie in them."""
        check(self.tokens == sum(len(source.tokens) for source in self._sources.values()), "tokens are miscounted")
        alive = {id(source) for source in self._sources.values()}
        for places in self._places.values():
            for source, number in places.values():
                check(id(source) in alive, "a place lies in a source that was forgotten")
                check((number + 1) * self._block_tokens <= len(source.tokens), "a place lies behind its source")

    def _hash_windows(self, tokens: TokenArray) -> NDArray[np.uint64]:
        """Of each window of a block's length in ``tokens``, ``[n - block_tokens + 1]``."""
        count = max(0, len(tokens) - self._block_tokens + 1)
        numbers = tokens.astype(np.uint64) + np.uint64(1)
        codes = np.zeros(count, np.uint64)
        for offset in range(self._block_tokens if count else 0):
            codes = codes * self._factor + numbers[offset : offset + count]
        return codes

    def _forget_source(self, name: Hashable) -> None:
        source = self._sources.pop(name)
        self.tokens -= len(source.tokens)
        places = self._places[source.isolation]
        for code in self._hash_windows(source.tokens)[:: self._block_tokens].tolist():
            if code in places and places[code][0] is source:
                del places[code]
        if not places:
            del self._places[source.isolation]


def _extended(run: Run, tokens: TokenArray, first: int, end: int) -> Run:
    """``run``, as far as its source has the tokens of the positions ``[first, end)`` on either side."""
    source = run.source.tokens
    room = min(run.first - first, run.source_first)
    before = tokens[run.first - room : run.first] != source[run.source_first - room : run.source_first]
    more_before = _count_leading(before[::-1])
    room = min(end - run.end, len(source) - run.source_first - run.count)
    source_end = run.source_first + run.count
    more_behind = _count_leading(tokens[run.end : run.end + room] != source[source_end : source_end + room])
    return replace(
        run,
        first=run.first - more_before,
        source_first=run.source_first - more_before,
        count=run.count + more_before + more_behind,
    )


def _count_leading(differs: NDArray[np.bool_]) -> int:
    """How many come before the first that differs."""
    return int(differs.argmax()) if differs.any() else len(differs)


# -- what of a run is computed anew


def keep_all_but_first(runs: list[Run], share: float) -> list[Positions]:
    """The first tokens of each run are computed anew: they attended least to their own text, and the most to what was
    before it elsewhere (EPIC, arXiv:2410.15332)."""
    spans = [(run.first + ceil(share * run.count), run.end) for run in runs]
    return [span for span in spans if span[0] < span[1]]


@dataclass(frozen=True, slots=True)
class MoveTokens:
    """Copy KV of ``count`` tokens, and rotate their keys by ``shift`` positions. Between plans' copies and their
    rows."""

    src_tier: Tier
    src: list[int]
    """Blocks of the source, in order."""
    src_first: int
    """Offset of the first token in the first of them."""
    dst: list[int]
    """HBM blocks."""
    dst_first: int
    count: int
    shift: int


@dataclass(slots=True, eq=False)
class InexactKv:
    """Of a sequence: whose KV is not all its own."""

    exact_tokens: int
    """Before the first that was copied: KV behind is private to the sequence."""
    copied: list[Positions]
    """Positions whose KV stays as it was copied."""
    tokens: int = 0
    """Of all of them."""

    def is_behind(self, position: int) -> bool:
        """Whether all of it lies before ``position``."""
        return self.copied[-1][1] <= position

    def spans_to_compute(self, first: int, end: int) -> list[Positions]:
        """Positions of ``[first, end)`` whose KV is to be computed, in order."""
        spans: list[Positions] = []
        for copied_first, copied_end in self.copied:
            if first >= end:
                break
            if copied_end > first:
                spans += [(first, min(copied_first, end))] if copied_first > first else []
                first = copied_end
        return [*spans, (first, end)] if first < end else spans

    def end_of_chunk(self, first: int, end: int, count: int) -> int:
        """Behind the last of the next ``count`` positions of ``[first, end)`` that are to be computed."""
        for span_first, span_end in self.spans_to_compute(first, end):
            if count <= span_end - span_first:
                return span_first + count
            count -= span_end - span_first
        return end


# -- for the sequences of an instance

_SHOWN_RUNS = 16


@dataclass(slots=True)
class _Moves:
    """Of one sequence, not in a plan yet, and the references on their sources."""

    orders: list[MoveTokens]
    hbm: list[int]
    dram: list[int]


class ContentReuse:
    """Gives sequences KV of cached blocks that hold the same tokens elsewhere."""

    def __init__(self, pool: BlockPool, key: bytes, share: float) -> None:
        """``share``: of the tokens that are found, how many are computed anew (0 to 1)."""
        self.index = ContentIndex(pool.block_tokens, pool.config.source_tokens(pool.block_tokens), key)
        self._pool, self._share = pool, share
        self._moves: dict[Hashable, _Moves] = {}

    def place_runs(
        self, name: Hashable, isolation: str, tokens: TokenArray, first: int, blocks: Sequence[int]
    ) -> tuple[InexactKv, list[Run]] | None:
        """Let the next plan copy what is cached of ``tokens`` from position ``first`` on to ``blocks``, those of the
        sequence ``name``, which are private from there on. The last tokens, as many as a block has, are always
        computed: the answer begins there. None: nothing is worth it."""
        runs, moves = [], _Moves([], [], [])
        for run in self.index.find_runs(isolation, tokens, first, len(tokens) - self._pool.block_tokens):
            present = self._move_run(run, blocks, moves)
            if present.count < run.count:
                self.index.forget_blocks(run)
            runs += [present] if present.count else []
        spans = keep_all_but_first(runs, self._share)
        copied_tokens = sum([end - begin for begin, end in spans])
        if copied_tokens < self._pool.block_tokens:
            self._release_sources(moves)
            return None
        self._moves[name] = moves
        return InexactKv(spans[0][0], spans, copied_tokens), runs

    def _move_run(self, run: Run, blocks: Sequence[int], moves: _Moves) -> Run:
        """Order the copies of ``run``; returns what of it is still cached."""
        width, pool = self._pool.block_tokens, self._pool
        first_block, offset = divmod(run.source_first, width)
        end_block = -(-(run.source_first + run.count) // width)
        tokens = run.source.tokens[: end_block * width]
        hbm, dram = pool.export_blocks(run.source.isolation, tokens, first_block)
        moves.hbm += hbm.tolist()
        moves.dram += dram.tolist()
        is_readable = pool.config.shares_dram  # else what lies below HBM is rounded, or in a file
        moved = 0
        for tier, sources in ((Tier.HBM, hbm.tolist()), (Tier.DRAM, dram.tolist() if is_readable else [])):
            count = min(len(sources) * width - offset, run.count - moved)
            if count <= 0:
                continue
            position = run.first + moved
            target, target_offset = divmod(position, width)
            targets = list(blocks[target : -(-(position + count) // width)])
            moves.orders.append(MoveTokens(tier, sources, offset, targets, target_offset, count, run.shift))
            moved, offset = moved + count, 0
        return replace(run, count=moved)

    def take_moves(self) -> list[MoveTokens]:
        """What the next plan copies. Its sources may be given up once that plan is made."""
        if not self._moves:
            return []
        orders, access = [], self._pool.access
        for moves in self._moves.values():
            orders += moves.orders
            self._release_sources(moves)
            if access is not None:
                for order in moves.orders:
                    access.on_copies_recorded(order.src_tier, order.src, Tier.HBM, order.dst)
        self._moves.clear()
        return orders

    def cancel_moves(self, name: Hashable) -> None:
        """The sequence ``name`` gives its blocks back, or starts over."""
        moves = self._moves.pop(name, None)
        if moves is not None:
            self._release_sources(moves)

    def _release_sources(self, moves: _Moves) -> None:
        self._pool.release(moves.hbm)
        self._pool.release_dram(moves.dram)

    def check_invariants(self, names: Container[Hashable]) -> None:
        """Raise :class:`InvariantError` unless only sequences of these ``names`` have moves."""
        self.index.check_invariants()
        check(all(name in names for name in self._moves), "moves of a sequence that has no blocks: {}", self._moves)


def describe_runs(runs: list[Run]) -> str:
    """Where each part of a prompt came from, for people."""
    shown = [f"[{run.first}, {run.end}) from {run.source_first} of {run.source.label}" for run in runs[:_SHOWN_RUNS]]
    more = len(runs) - len(shown)
    return ", ".join(shown) + f", and {more} more" * (more > 0)
