"""What each layer that attends keeps of a token, and where in a block it lies.

In most models all layers keep the same, and a block has one page of each, in order: :class:`KVGeometry` says it all. In
others some layers read a *window* of the last tokens or the *chunk* of tokens that they are in, heads are fewer and
wider in some layers (Gemma 4), or layers read the KV of another one (Gemma 3n). A :class:`LayerLayout` has places for
these::

    layer     0      1      2      3      4      5      3 and 5 read everything; the others a window, and keep twice
    block                          p0            p1     as much of a token: two pages each
    part      p0-p1  p0-p1  p0-p1         p0-p1         each in a block of its own here, as a block has two pages

Pages of a model have one size all the same: the largest that all its layers' KV are whole numbers of. So tiers,
transfers and stores move blocks of equal pages, nothing is padded, and there is one memory for all kinds of layers.

Where every layer reads a window, blocks have a few pages of no layer: they name tokens, and parts hang at them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from memserve.base.types import KVGeometry
from memserve.base.units import ceil_div

_FORMAT = 2
"""Of how layers' KV lies: another one for any change of it."""

_NAMING_SHARE = 16
"""Blocks that only name tokens take one of so many pages: what is kept of all tokens for ever, beside how many tables
kernels follow."""
_NAMED_LEAST = 4
"""Pages of a part for each of such a block: of fewer, too much would be kept."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer keeps of a token."""

    heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    """How many tokens it reads, its own included; 0: not the last ones alone."""
    chunk: int = 0
    """It reads the tokens of its own chunk, of so many, up to itself; 0: there are none."""
    owner: int | None = None
    """The layer whose KV it reads; it keeps none. None: its own."""

    @property
    def elements(self) -> int:
        """Of K and V of one token."""
        return self.heads * (self.head_dim_k + self.head_dim_v)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, and elements of a head's K and V."""
        return self.heads, self.head_dim_k, self.head_dim_v

    @property
    def is_local(self) -> bool:
        """Whether it reads no more than some of the last tokens."""
        return self.window > 0 or self.chunk > 0


@dataclass(frozen=True, slots=True)
class PageRun:
    """Layers of one shape, whose pages follow each other in a block."""

    table: int
    """0: the block; N: the Nth of its part."""
    first_page: int
    pages_each: int
    """Pages of a layer."""
    layers: tuple[int, ...]
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class LayerLayout:
    """Where the KV of all layers lies, in a model whose layers do not all keep the same."""

    layers: tuple[LayerKv, ...]
    """All that attend, in order."""
    is_apart: bool = False
    """The pages of layers that read a window or a chunk fill further blocks, a *part*, which can go as soon as it is
    behind. Else all lie in one block."""

    @cached_property
    def page_elements(self) -> int:
        """Elements of one token in a page."""
        return gcd(*(layer.elements for layer in self.layers if layer.owner is None))

    @property
    def has_one_shape(self) -> bool:
        """Whether all pages are of one kind."""
        return len({layer.shape for layer in self.layers}) == 1

    @cached_property
    def block_pages(self) -> int:
        """Pages of a block."""
        pages = [self._pages_of(number) for number in self._kept(is_local=False)]
        return sum(pages) if pages else naming_pages(self.layers)

    @cached_property
    def runs(self) -> tuple[PageRun, ...]:
        """All pages there are. Those of the block come first."""
        runs = self._fill_blocks(self._kept(is_local=False), 0)
        return (*runs, *self._fill_blocks(self._kept(is_local=True), 1)) if self.is_apart else tuple(runs)

    @property
    def part_blocks(self) -> int:
        """Blocks of a part; 0: nothing lies apart."""
        return self.runs[-1].table

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer the number of its run, or of its owner's, and its place in that."""
        own = {layer: (number, place) for number, run in enumerate(self.runs) for place, layer in enumerate(run.layers)}
        return tuple(own[number if layer.owner is None else layer.owner] for number, layer in enumerate(self.layers))

    @property
    def window(self) -> int:
        """The most of the last tokens that a layer with a window reads; 0: none has one."""
        return max(layer.window for layer in self.layers)

    @property
    def chunk(self) -> int:
        """The size of the chunks that layers read; 0: none does."""
        return max(layer.chunk for layer in self.layers)

    @property
    def digest(self) -> str:
        """Names the layout: KV of two layouts is never exchanged."""
        return hashlib.blake2b(f"{_FORMAT}{self!r}".encode(), digest_size=8).hexdigest()

    def block_geometry(self, dtype: str, block_tokens: int) -> KVGeometry:
        """Of a block: of its pages, which are those of no layer where shapes differ."""
        if self.has_one_shape:
            return KVGeometry(self.block_pages, *self.layers[0].shape, dtype, block_tokens)
        half = self.page_elements // 2
        return KVGeometry(self.block_pages, 1, half, self.page_elements - half, dtype, block_tokens)

    def window_pages(self, block_tokens: int, step_tokens: int) -> WindowPages | None:
        """How parts lie in the pool, with so many tokens of a sequence in a step. None: there are none."""
        if not self.is_apart:
            return None
        return WindowPages(self.window, self.part_blocks, block_tokens, step_tokens, self.chunk)

    def __str__(self) -> str:
        kept = Counter(layer.shape for layer in self.layers if layer.owner is None)
        parts = [f"{count} layers x {shape[0]} heads x ({shape[1]} K + {shape[2]} V)" for shape, count in kept.items()]
        sharing = sum(layer.owner is not None for layer in self.layers)
        return " + ".join(parts) + f", which {sharing} more layers read" * (sharing > 0)

    def _kept(self, *, is_local: bool) -> list[int]:
        """Layers with KV of their own in the block, or (``is_local``) in its part."""
        layers = [number for number, layer in enumerate(self.layers) if layer.owner is None]
        return [number for number in layers if (self.is_apart and self.layers[number].is_local) == is_local]

    def _pages_of(self, layer: int) -> int:
        return self.layers[layer].elements // self.page_elements

    def _fill_blocks(self, layers: Sequence[int], table: int) -> list[PageRun]:
        """Runs of ``layers``, in blocks from ``table`` on: those of one shape together, and no page over an end."""
        runs, used, room = list[PageRun](), 0, self.block_pages
        for shape in dict.fromkeys(self.layers[layer].shape for layer in layers):
            left = [layer for layer in layers if self.layers[layer].shape == shape]
            pages = self._pages_of(left[0])
            while left:
                count = min(len(left), (room - used) // pages)
                if count:
                    runs.append(PageRun(table, used, pages, tuple(left[:count]), shape))
                    used, left = used + count * pages, left[count:]
                if left:
                    table, used = table + 1, 0
        return runs


def lay_out(
    layers: Sequence[LayerKv], *, is_apart: bool = False, context_tokens: int | None = None
) -> LayerLayout | None:
    """The layout of a model with these layers. ``is_apart``: windows' and chunks' KV lies apart where that is worth it,
    with contexts of up to ``context_tokens``; None: of any length. None: all layers keep the same, in one block."""
    layout = LayerLayout(tuple(layers), is_apart and _is_worth_a_part(layers, context_tokens))
    has_owners = any(layer.owner is not None for layer in layers)
    return layout if layout.is_apart or has_owners or not layout.has_one_shape else None


def keep_every_layer(layers: Sequence[LayerKv]) -> tuple[LayerKv, ...]:
    """``layers``, each of which keeps what it reads."""
    return tuple(replace(layer, owner=None) for layer in layers)


def naming_pages(layers: Sequence[LayerKv]) -> int:
    """Pages of a block that only names tokens, in a model all of whose ``layers`` are local: any layer fits."""
    own = [layer.elements for layer in layers if layer.owner is None]
    return max(max(own) // gcd(*own), ceil_div(sum(own) // gcd(*own), _NAMING_SHARE))


def _is_worth_a_part(layers: Sequence[LayerKv], context_tokens: int | None) -> bool:
    """Whether layers that read everything have enough KV for a block, and others enough to fill one. Where there are
    none such: whether windows end within a context, and a block that only names tokens is small."""
    local, others = (
        [layer.elements for layer in layers if layer.owner is None and layer.is_local == is_local]
        for is_local in (True, False)
    )
    has_one_chunk = len({layer.chunk for layer in layers if layer.chunk}) <= 1  # borders of several would not meet
    if not local or not has_one_chunk:
        return False
    if not others:
        if context_tokens is not None and max(max(layer.window, layer.chunk) for layer in layers) >= context_tokens:
            return False
        return _NAMED_LEAST * naming_pages(layers) <= sum(local) // gcd(*local)
    return max(local) <= sum(others) <= sum(local)


@dataclass(frozen=True, slots=True)
class WindowPages:
    """How KV of layers that read a window or a chunk lies in the pool; an *entry* is the place of a block's tokens in a
    sequence."""

    window: int
    """0: there are chunks alone."""
    part_blocks: int
    """Blocks of an entry's part."""
    block_tokens: int
    step_tokens: int
    """Of one sequence in one step, at most."""
    chunk: int = 0
    """0: there are windows alone."""

    @property
    def reach(self) -> int:
        """The most tokens that a row reads."""
        return max(self.window, self.chunk)

    def first_token(self, tokens: int) -> int:
        """The first token that a row reads which begins behind ``tokens`` tokens."""
        first = max(0, tokens - self.window + 1) if self.window else tokens
        return min(first, tokens // self.chunk * self.chunk) if self.chunk else first

    def first_entry(self, tokens: int) -> int:
        """The first entry that such a row reads."""
        return self.first_token(tokens) // self.block_tokens

    def first_entries(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """:meth:`first_entry` of each."""
        first = np.maximum(0, tokens - self.window + 1) if self.window else tokens
        first = np.minimum(first, tokens // self.chunk * self.chunk) if self.chunk else first
        return first // self.block_tokens

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
        return ceil_div(self.reach + self.step_tokens, self.block_tokens) + 2

    def blocks_for(self, entries: int, parts_held: int = 0) -> int:
        """Blocks of so many new entries, parts included, of a sequence that has ``parts_held`` already, and passes
        those behind its window."""
        return entries + self.part_blocks * min(entries, max(0, self.parts_max - parts_held))

    def entries_in(self, blocks: int) -> int:
        """Entries of the longest sequence that fits into ``blocks``."""
        entries = blocks // (1 + self.part_blocks)
        return entries if entries < self.parts_max else blocks - self.part_blocks * self.parts_max
