"""What layers carry from one token to the next: groups of layers, and the bytes that each takes.

A layer of attention keeps K and V of every token: bytes grow with the sequence, and any prefix of them can be reused. A
layer that reads a *window* needs the last of them alone. A
layer with a recurrent state (Mamba, a gated delta net, a short convolution) keeps a fixed number of bytes for a whole
sequence, which each token changes: it can be reused only where it was copied, at exactly that position. Such a copy
is a *snapshot*. Nothing here is known of families: the probe fills this in from what layers read and write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.base.units import ceil_div, flag_bytes, human_bytes

_ALIGN_BYTES = 64
_FORMAT = 1
"""Of the bytes of a state, which stores keep: another one for any change of how parts follow each other."""
_SLOTS_SHARE = 4
"""Of the KV memory, states of running sequences take at most one part in so many."""
_IDS_SHARE = 16
"""The same for the blocks of a model without attention, which only give tokens their names."""
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float64": 64}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor that a layer carries."""

    layer: int
    kind: str
    """``conv``: the tail of a convolution; ``recurrent``: what is added up."""
    index: int
    """Of several of its kind in the layer."""
    shape: tuple[int, ...]
    """Of one sequence."""
    dtype: str

    @property
    def nbytes(self) -> int:
        """Without what aligns the next one."""
        return prod(self.shape) * _BITS[self.dtype] // 8


@dataclass(frozen=True)
class StateGeometry:
    """The recurrent state of one sequence: its parts, one after the other in ``nbytes`` bytes."""

    parts: tuple[StatePart, ...] = ()
    attends: bool = True
    """Whether other layers attend. False: blocks hold no KV, they only name tokens."""

    def __bool__(self) -> bool:
        return bool(self.parts)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each part begins, in bytes, and behind the last one where all end: aligned."""
        sizes = [ceil_div(part.nbytes, _ALIGN_BYTES) * _ALIGN_BYTES for part in self.parts]
        return tuple(accumulate(sizes, initial=0))

    @property
    def nbytes(self) -> int:
        """Of a state."""
        return self.offsets[-1]

    @property
    def digest(self) -> str:
        """Names the layout: states of two models with different digests are never exchanged."""
        return hashlib.blake2b(f"{_FORMAT}{self.parts!r}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class StateRun:
    """Bytes of a state that one of several workers has, one after the other in both."""

    own: int
    """Where they begin in the worker's part."""
    whole: int
    """And in the state."""
    nbytes: int


@dataclass(frozen=True)
class StateShare:
    """What one of several workers has of a state. A snapshot has the bytes of all of them in the layout of one worker,
    each once, so that instances of any degree read one another's."""

    held: StateGeometry
    """As many parts as the whole has; those of other workers alone are empty."""
    runs: tuple[StateRun, ...]
    """What it has, in order."""
    written: tuple[StateRun, ...]
    """Of these, what it writes to snapshots: of what several workers have, one writes it."""
    whole_bytes: int
    attending_before: int = 0
    """How many layers attend before those of this worker."""


@dataclass(frozen=True, slots=True)
class StateRange:
    """Rows of a part, along its first dimension, that one worker has."""

    first: int
    count: int
    is_written: bool
    """It writes them to snapshots: of what several workers have, one does."""


def share_state(states: StateGeometry, ranges: Sequence[Sequence[StateRange]]) -> StateShare:
    """The share of a worker that has these ``ranges`` of each part."""
    parts = tuple(
        replace(part, shape=(sum(rows.count for rows in own), *part.shape[1:]))
        for part, own in zip(states.parts, ranges, strict=True)
    )
    held = replace(states, parts=parts)
    runs, written = list[StateRun](), list[StateRun]()
    for number, (part, own) in enumerate(zip(states.parts, ranges, strict=True)):
        row_bytes, place = part.nbytes // part.shape[0], held.offsets[number]
        for rows in own:
            run = StateRun(place, states.offsets[number] + rows.first * row_bytes, rows.count * row_bytes)
            runs.append(run)
            written += [run] * rows.is_written
            place += run.nbytes
    return StateShare(held, tuple(runs), tuple(written), states.nbytes)


NO_STATE = StateGeometry()
"""Of a model that keeps KV alone."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of thing."""

    kind: str
    """``full``, ``window`` or ``state``."""
    layers: int
    token_bytes: int
    """For each token; 0: none."""
    sequence_bytes: int
    """For each sequence, whatever its length; 0: none."""
    window: int = 0
    """How many tokens a layer of kind ``window`` reads."""

    def __str__(self) -> str:
        size = f"{human_bytes(self.token_bytes)} a token" if self.token_bytes else human_bytes(self.sequence_bytes)
        kind = f"window of {self.window}" if self.window else self.kind
        return f"{self.layers} layers of kind {kind}: {size}"


def cache_groups(geometry: KVGeometry, windows: Sequence[int], states: StateGeometry) -> list[CacheGroup]:
    """The groups of a model. ``windows``: of each layer that attends, in order; 0: it reads everything."""
    page = geometry.page_bytes // geometry.block_tokens
    groups = []
    for window in sorted(set(windows)):
        layers = list(windows).count(window)
        groups.append(CacheGroup("window" if window else "full", layers, page * layers, 0, window))
    if states:
        layers = len({part.layer for part in states.parts})
        groups.append(CacheGroup("state", layers, 0, states.nbytes))
    return groups


@dataclass(frozen=True)
class WindowLayers:
    """Layers that read a window, of a model that has others as well: their KV lies apart, where it can go as soon as it
    is behind the window. All pages have one size.

    A block has the pages of the layers that read everything, for some tokens; the other layers' pages for the same
    tokens fill further blocks, a *part*. So there is one memory, and either kind may have all of it.
    """

    window: int
    """How many tokens a layer reads, its own included; of several windows the longest."""
    windowed: tuple[bool, ...]
    """Of each layer that attends, in order, whether it reads a window."""

    @property
    def full_layers(self) -> int:
        """Layers that read everything."""
        return len(self.windowed) - sum(self.windowed)

    @property
    def part_blocks(self) -> int:
        """Blocks of a part."""
        return ceil_div(sum(self.windowed), self.full_layers)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer where its pages lie: the block's number (0: with the layers that read everything; N: the Nth
        of the part), and the page in that."""
        places, counts = [], [0, 0]
        for is_windowed in self.windowed:
            number = counts[is_windowed]
            counts[is_windowed] += 1
            block, page = divmod(number, self.full_layers) if is_windowed else (-1, number)
            places.append((block + 1, page))
        return tuple(places)

    @property
    def digest(self) -> str:
        """Names the layout: KV of two layouts is never exchanged."""
        return hashlib.blake2b(f"{_FORMAT}{self!r}".encode(), digest_size=8).hexdigest()


def windows_apart(windows: Sequence[int], geometry: KVGeometry, states: StateGeometry) -> WindowLayers | None:
    """The layers that read a window, where their KV is worth lying apart. ``windows``: of each layer that attends, in
    order; 0: it reads everything. None: all layers' KV lies together."""
    windowed = tuple(window > 0 for window in windows)
    full_layers = len(windowed) - sum(windowed)
    # with fewer layers of windows than others a part would be mostly empty
    if states or geometry.latent or not full_layers or sum(windowed) < full_layers:
        return None
    return WindowLayers(max(windows), windowed)


@dataclass(frozen=True, slots=True)
class WindowPages:
    """How KV of layers that read a window lies in the pool; an *entry* is the place of a block's tokens in a
    sequence."""

    window: int
    part_blocks: int
    """Blocks of an entry's part."""
    block_tokens: int
    step_tokens: int
    """Of one sequence in one step, at most."""

    def first_entry(self, tokens: int) -> int:
        """The first entry that a row reads which begins behind ``tokens`` tokens."""
        return max(0, tokens - self.window + 1) // self.block_tokens

    def entries_behind(self, tokens: int) -> range:
        """The entries whose parts a sequence needs that goes on behind ``tokens`` tokens, not only whole blocks."""
        return range(self.first_entry(tokens), ceil_div(tokens, self.block_tokens))

    def kept_from(self, tokens: int) -> int:
        """The first entry that a running sequence keeps, which has computed ``tokens``: a block more, since a row may
        be computed again that ran ahead of a late draw."""
        return self.first_entry(max(0, tokens - self.block_tokens))

    @property
    def parts_max(self) -> int:
        """Parts that a running sequence has at most, and one that begins has at once."""
        return ceil_div(self.window + self.step_tokens, self.block_tokens) + 2

    def blocks_for(self, entries: int, parts_held: int = 0) -> int:
        """Blocks of so many new entries, parts included, of a sequence that has ``parts_held`` already, and passes
        those behind its window."""
        return entries + self.part_blocks * min(entries, max(0, self.parts_max - parts_held))

    def entries_in(self, blocks: int) -> int:
        """Entries of the longest sequence that fits into ``blocks``."""
        entries = blocks // (1 + self.part_blocks)
        return entries if entries < self.parts_max else blocks - self.part_blocks * self.parts_max


@dataclass(frozen=True, slots=True)
class StatePages:
    """How snapshots lie. A *page* is a block of the arena that attention reads, or a part of one where a state is
    smaller, so that blocks of KV and snapshots share one memory, and either may have all of it. A model without
    attention has pages of its own."""

    state_bytes: int
    pages_each: int
    """Pages of one snapshot: the last one need not be full."""
    own_pages: int = 0
    """N: there are N pages, each of one whole snapshot, apart from the blocks. 0: pages lie in blocks."""
    per_block: int = 1
    """N: a block has N pages of one snapshot each; page ``p`` lies in block ``p // N``."""

    @property
    def whole_blocks(self) -> bool:
        """Whether each snapshot has whole blocks of its own, so that it can go where blocks go."""
        return not self.own_pages and self.per_block == 1

    def layers_of_last(self, geometry: KVGeometry) -> int:
        """How many layers' pages of its last block a snapshot fills, where it has whole blocks."""
        rest = self.state_bytes - (self.pages_each - 1) * geometry.block_bytes
        return min(geometry.num_layers, ceil_div(rest, geometry.page_bytes))


@dataclass(frozen=True, slots=True)
class DividedMemory:
    """KV memory of a model with a recurrent state."""

    blocks: int
    slots: int
    """Sequences that run at once: each has one state that it changes, in memory of its own."""
    pages: StatePages


def divide_memory(
    geometry: KVGeometry,
    states: StateGeometry,
    kv_bytes: int,
    slots: int,
    slot_bytes: int = 0,
    *,
    whole_blocks: bool = False,
) -> DividedMemory:
    """What ``kv_bytes`` hold with at most ``slots`` running sequences; nothing beyond ``kv_bytes`` is ever used.
    ``slot_bytes``: what all workers together have of the state of one; 0: one state. ``whole_blocks``: no two snapshots
    share one. Raises :class:`UserError` where that is too little."""
    state_bytes, block_bytes = states.nbytes, geometry.block_bytes
    slot_bytes = slot_bytes or state_bytes
    slots = min(slots, kv_bytes // _SLOTS_SHARE // slot_bytes)
    left = kv_bytes - slots * slot_bytes
    if states.attends:
        in_block = 1 if whole_blocks else max(1, block_bytes // state_bytes)
        pages = StatePages(state_bytes, ceil_div(state_bytes, block_bytes), per_block=in_block)
        blocks = left // block_bytes
        least = _SLOTS_SHARE * (slot_bytes + block_bytes * (pages.pages_each + 2))
    else:
        blocks = left // _IDS_SHARE // block_bytes
        pages = StatePages(state_bytes, 1, (left - blocks * block_bytes) // state_bytes)
        least = _SLOTS_SHARE * 2 * max(slot_bytes, _IDS_SHARE * block_bytes)
    if kv_bytes < least:
        raise UserError(
            f"kv memory of {human_bytes(kv_bytes)} is too little for a model whose state takes "
            f"{human_bytes(state_bytes)} a sequence",
            hint=f"give at least --kv-memory {flag_bytes(least)}",
            param="kv_memory",
        )
    return DividedMemory(blocks, slots, pages)
