"""What layers carry from one token to the next: groups of layers, and the bytes that each takes.

A layer of attention keeps K and V of every token: bytes grow with the sequence, and any prefix of them can be reused. A
layer that reads a *window* needs the last of them alone. A
layer with a recurrent state (Mamba, a gated delta net, a short convolution) keeps a fixed number of bytes for a whole
sequence, which each token changes: it can be reused only where it was copied, at exactly that position. Such a copy
is a *snapshot*. Nothing here is known of families: the probe fills this in from what layers read and write.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import gcd, prod

from memserve.base.errors import UserError
from memserve.base.layer_kv import LayerKv, WindowPages
from memserve.base.types import KVGeometry
from memserve.base.units import ceil_div, flag_bytes, human_bytes

_ALIGN_BYTES = 64
_FORMAT = 1
"""Of the bytes of a state, which stores keep: another one for any change of how parts follow each other."""
_SLOTS_SHARE = 4
"""Of the KV memory, states of running sequences take at most one part in so many, so that prefixes stay cached."""
_ASKED_SHARES = 3
"""And so many of these parts where it is asked for that many sequences: short ones are little but their state."""
_NAMING_SHARE = 1024
"""A block of a model without attention, which only names tokens, takes one part in so many of a snapshot: contexts of
32,000 tokens as much as one snapshot, in blocks of 32."""
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


def naming_geometry(states: StateGeometry, dtype: str, block_tokens: int) -> KVGeometry:
    """Blocks of a model without attention: nothing is read from them, but they lie and move as any others."""
    smallest = KVGeometry(1, 1, 1, 1, dtype, block_tokens)
    dim = max(1, states.nbytes // (_NAMING_SHARE * smallest.block_bytes))
    return replace(smallest, head_dim_k=dim, head_dim_v=dim)


NO_STATE = StateGeometry()
"""Of a model that keeps KV alone."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of thing."""

    kind: str
    """``full``, ``window``, ``chunk``, ``shared`` or ``state``."""
    layers: int
    token_bytes: int
    """For each token; 0: none."""
    sequence_bytes: int
    """For each sequence, whatever its length; 0: none."""
    reach: int = 0
    """How many tokens a layer of kind ``window`` or ``chunk`` reads at most."""

    def __str__(self) -> str:
        if self.kind == "shared":
            return f"{self.layers} layers that read the KV of others"
        size = f"{human_bytes(self.token_bytes)} a token" if self.token_bytes else human_bytes(self.sequence_bytes)
        kind = f"{self.kind} of {self.reach}" if self.reach else self.kind
        return f"{self.layers} layers of kind {kind}: {size}"


def cache_groups(geometry: KVGeometry, layers: Sequence[LayerKv], states: StateGeometry) -> list[CacheGroup]:
    """The groups of a model with these ``layers`` that attend, in order. ``geometry``: of its pages."""
    page = geometry.page_bytes // geometry.block_tokens
    page_elements = gcd(*(layer.elements for layer in layers)) if layers else 1
    kept = Counter(
        ("window" if layer.window else "chunk" if layer.chunk else "full", layer.window or layer.chunk, layer.elements)
        for layer in layers
        if layer.owner is None
    )
    groups = [
        CacheGroup(kind, count, page * (elements // page_elements) * count, 0, reach)
        for (kind, reach, elements), count in sorted(kept.items(), key=lambda group: group[0][1:])
    ]
    if sharing := sum(layer.owner is not None for layer in layers):
        groups.append(CacheGroup("shared", sharing, 0, 0))
    if states:
        state_layers = len({part.layer for part in states.parts})
        groups.append(CacheGroup("state", state_layers, 0, states.nbytes))
    return groups


@dataclass(frozen=True, slots=True)
class StatePages:
    """How snapshots lie. A *page* is a block of the arena that attention reads, or a part of one where a state is
    smaller, so that blocks of KV and snapshots share one memory, and either may have all of it."""

    state_bytes: int
    pages_each: int
    """Pages of one snapshot: the last one need not be full."""
    per_block: int = 1
    """N: a block has N pages of one snapshot each; page ``p`` lies in block ``p // N``."""
    draft_states: int = 0
    """Beside the states of running sequences: those behind the tokens of rows with drafts, until it is known which of
    these are right. 0: there are no drafts."""

    @property
    def whole_blocks(self) -> bool:
        """Whether each snapshot has whole blocks of its own, so that it can go where blocks go."""
        return self.per_block == 1

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
    draft_tokens: int = 0,
    *,
    whole_blocks: bool = False,
    is_asked: bool = False,
) -> DividedMemory:
    """What ``kv_bytes`` hold with at most ``slots`` running sequences; nothing beyond ``kv_bytes`` is ever used.
    ``slot_bytes``: what all workers together have of the state of one; 0: one state. ``draft_tokens``: of one row, for
    at least one of which there are states. ``whole_blocks``: no two snapshots share one. ``is_asked``: so many
    ``slots`` are not the default. Raises :class:`UserError` where that is too little."""
    state_bytes, block_bytes = states.nbytes, geometry.block_bytes
    slot_bytes = slot_bytes or state_bytes
    of_one_row = draft_tokens + 1 if draft_tokens else 0
    most = kv_bytes * (_ASKED_SHARES if is_asked else 1) // _SLOTS_SHARE // slot_bytes
    slots = max(0, min(slots, most - of_one_row))
    drafts = max(of_one_row, min(slots, most - slots)) if draft_tokens else 0
    left = kv_bytes - (slots + drafts) * slot_bytes
    in_block = 1 if whole_blocks else max(1, block_bytes // state_bytes)
    pages = StatePages(state_bytes, ceil_div(state_bytes, block_bytes), in_block, drafts)
    least = _SLOTS_SHARE * ((1 + of_one_row) * slot_bytes + block_bytes * (pages.pages_each + 2))
    if kv_bytes < least:
        raise UserError(
            f"kv memory of {human_bytes(kv_bytes)} is too little for a model whose state takes "
            f"{human_bytes(state_bytes)} a sequence",
            hint=f"give at least --kv-memory {flag_bytes(least)}",
            param="kv_memory",
        )
    return DividedMemory(left // block_bytes, slots, pages)


@dataclass(frozen=True, slots=True)
class BehindKv:
    """What a sequence needs beside the KV of a prefix to go on from it: a snapshot of its recurrent state, or the parts
    of its last window; in blocks like any others."""

    most_blocks: int = 0
    """Of a long prefix. 0: KV is all that it needs."""
    windows: WindowPages | None = None
    """None: a snapshot."""

    @property
    def part_blocks(self) -> int:
        """Of each part of a window; 0: there are none."""
        return 0 if self.windows is None else self.windows.part_blocks

    def count_blocks(self, tokens: int) -> int:
        """Blocks behind a prefix of so many tokens."""
        if self.windows is None:
            return self.most_blocks
        return self.windows.part_blocks * len(self.windows.entries_behind(tokens))


KV_ALONE = BehindKv()
"""Of a model that keeps no state, and the KV of all layers together."""


def behind_kv(states: StatePages | None, windows: WindowPages | None) -> BehindKv:
    """What a pool with such snapshots, or such windows, has behind KV."""
    if windows is not None:  # at the end of a chunk: the most
        tokens = 2 * windows.reach * windows.block_tokens - 1
        return BehindKv(windows.part_blocks * len(windows.entries_behind(tokens)), windows)
    return BehindKv(states.pages_each if states is not None and states.whole_blocks else 0)
