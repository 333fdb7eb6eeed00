"""How much KV may lie by layer: what decoding has to read back in each step must fit the link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from memserve.base.units import NS_PER_MS, NS_PER_S

CHUNK_BLOCKS = 8
"""The most that one plan computes behind entries that lie by layer: blocks are whole there until they have moved, those
of some plans at once."""
_BESIDE = 2  # 1 / this of the link's time is for what steps read back
TPOT_NS = 200 * NS_PER_MS
"""Time that a token may take where no objective is set: the one of LayerKV's evaluation."""
_PRIOR_NS = 100 * NS_PER_MS
"""A measured curve weighs as much as so much copying."""
_KEPT_SHARE = 7, 8  # of earlier copies with each step that copies
_DELAY_SHARE = 25  # 1 / this of their time is what answers may be put off by prompts that overtake
_LIVED_MAX_NS = 1000 * NS_PER_S
"""Time of requests after which what was counted weighs half."""


class LinkRate:
    """Bytes a second that the link between HBM and DRAM carries one way: what the swap curve says, then what copies
    took, the latest most. Each copy weighs as much as it took, so many small ones say little."""

    __slots__ = ("_copied_bytes", "_spent_ns")

    def __init__(self, bytes_s: float, *, is_measured: bool = True) -> None:
        """``bytes_s`` above 0. ``is_measured``: else the first copy replaces it."""
        self._spent_ns = float(_PRIOR_NS if is_measured else 1)
        self._copied_bytes = bytes_s * self._spent_ns / NS_PER_S

    @property
    def bytes_s(self) -> float:
        """What it carries now."""
        return self._copied_bytes / self._spent_ns * NS_PER_S

    def learn_copies(self, copied_bytes: int, spent_ns: int) -> None:
        """The copies of a step took ``spent_ns`` altogether."""
        if copied_bytes > 0 and spent_ns > 0:
            share = _KEPT_SHARE[0] / _KEPT_SHARE[1]
            self._copied_bytes = self._copied_bytes * share + copied_bytes
            self._spent_ns = self._spent_ns * share + spent_ns


class Overtaking:
    """How many tokens of prompts without room a step computes beside answers.

    Such a prompt has its first token early and is swapped out behind it; by request it would have been computed when
    others had ended. So what computing it takes puts off those that wait for memory. That is counted, as it was
    measured, against the time of all requests: up to a twenty-fifth of it, whole steps may be filled with prompts.
    Beyond that they get what steps have free: reading the weights for a few rows leaves time to compute some tokens
    more, and how many is learnt from how much longer steps took with them.
    """

    def __init__(self, block_tokens: int, free_tokens: int) -> None:
        """``free_tokens``: what a step is expected to compute beside decodes in no more time."""
        self._block_tokens = block_tokens
        self.free_tokens = float(max(block_tokens, free_tokens))
        self._delayed_ns = self._lived_ns = 0
        #: what the plan that is being made may still compute. None: as much as fits
        self.left_tokens: int | None = None

    def begin_plan(self, *, beside: bool) -> None:
        """A plan is begun; ``beside``: others decode in it."""
        within = self._delayed_ns * _DELAY_SHARE <= self._lived_ns
        size = self._block_tokens
        self.left_tokens = None if within or not beside else round(self.free_tokens) // size * size

    def add_tokens(self, tokens: int) -> None:
        """The plan computes ``tokens`` of a prompt without room."""
        if self.left_tokens is not None:
            self.left_tokens = max(0, self.left_tokens - tokens)

    def limit_tokens(self, budget: int, least: int) -> int:
        """Tokens of ``budget`` for the next piece of such a prompt; 0: it waits. A piece is ``least`` tokens long, or
        reading back what is before it would take longer than computing."""
        if self.left_tokens is None or budget <= 0:
            return budget
        return min(budget, max(self.left_tokens, least)) if self.left_tokens else 0

    def pass_time(self, step_ns: int, requests: int) -> None:
        """A step took ``step_ns``, and ``requests`` were there."""
        self._lived_ns += step_ns * requests
        if self._lived_ns > _LIVED_MAX_NS:
            self._lived_ns, self._delayed_ns = self._lived_ns // 2, self._delayed_ns // 2

    def learn_delay(self, tokens: int, more_ns: int, alone_ns: float, put_off: int) -> None:
        """A step with decodes took ``more_ns`` longer for ``tokens`` of such prompts, which take ``alone_ns`` by their
        curve, and ``put_off`` requests wait longer for that."""
        self._delayed_ns += max(0, more_ns) * put_off
        if not self.free_tokens / 2 <= tokens <= 2 * self.free_tokens or alone_ns <= 0:
            return  # a piece of another size
        share = more_ns / alone_ns
        if share < 1 / 4 and tokens >= self.free_tokens - self._block_tokens:
            self.free_tokens *= 9 / 8
        elif share > 1 / 2:
            self.free_tokens = max(float(self._block_tokens), self.free_tokens * 7 / 8)


@dataclass(frozen=True, slots=True)
class LayerBudget:
    """The constraint that binds when layers lie elsewhere: the bytes that a step reads back fit the link within the
    time that a token may take::

        sum over requests: passing layers * tokens * bytes a layer's token  <=  link * time a token may take
    """

    num_layers: int
    page_bytes: int
    """Of one layer's page."""
    link: LinkRate
    tpot_ns: int
    """Time that a token may take."""

    @property
    def link_bytes_s(self) -> float:
        """What the link carries in a second."""
        return self.link.bytes_s

    def link_ns(self, entries: int) -> int:
        """Time to read back all layers of ``entries`` blocks."""
        return round(entries * self.num_layers * self.page_bytes / self.link_bytes_s * NS_PER_S)

    def pages_max(self, step_ns: int = 0) -> int:
        """Pages that the link carries within the time of a token; if a step's time ``step_ns`` is known (not 0), within
        a part of it: then steps do not wait for the link, and what leaves and comes has the rest."""
        beside_ns = min(step_ns // _BESIDE, self.tpot_ns) if step_ns else self.tpot_ns
        return int(self.link_bytes_s * beside_ns / NS_PER_S / self.page_bytes)

    def allows_pages(self, pages: int, step_ns: int = 0) -> bool:
        """Whether steps may read back so many; ``step_ns`` as for :meth:`pages_max`."""
        return pages <= self.pages_max(step_ns)

    def chunk_blocks(self, entries: int, block_ns: float) -> int:
        """The least piece of a prompt that hides the reading back of what lies before it (LayerKV, equations 3 and 4,
        where a prompt is computed in pieces): at most ``entries`` blocks pass for each. ``block_ns``: time to compute
        the tokens of a block; 0: not known."""
        return max(1, math.ceil(self.link_ns(entries) / block_ns) if block_ns else 0)


class LayeredView(NamedTuple):
    """What a policy sees of one sequence that lies by layer."""

    number: int
    """Of the request, in order of arrival."""
    entries: int
    """Blocks that lie by layer."""
    resident_layers: int
    """Layers of them that are in HBM."""
    decodes: bool
    """Each step reads back what is not kept."""
    may_park: bool
    """False: the most of it still moves, or it does not decode."""


@dataclass(frozen=True)
class LayerPolicy:
    """How sequences that lie by layer share HBM and the link. The default is what ``auto`` means; studies compare it
    with those of others."""

    kept_max: int | None = None
    """Layers that a sequence may keep. None: as many as there is room for."""
    is_staggered: bool = True
    """Sequences keep other layers than their neighbours. False: all the same ones."""
    parks: bool = True
    """What steps would have to wait for is parked. False: every step reads everything back, and waits."""
    bounds_delays: bool = True
    """Prompts that overtake others put them off by little (:class:`Overtaking`). False: they fill every step."""
    forecasts: bool = False
    """As LayerKV: a prompt keeps the least layers that hide sending the others away (:func:`least_kept_layers`), and
    kept ones go as soon as free blocks are expected to be few (:func:`forecast_blocks`). False: they go when memory is
    wanted."""

    def indices_to_park(
        self, lying: Sequence[LayeredView], budget: LayerBudget, step_ns: int, free_blocks: int
    ) -> list[int]:
        """Which of ``lying``, the latest first, are parked: as many as read back more than the link carries. Called
        before each plan; ``free_blocks``: HBM in which layers may be kept. Returns indexes."""
        parked: list[int] = []
        if not self.parks:
            return parked
        pages = [candidate.entries * (budget.num_layers - candidate.resident_layers) for candidate in lying]
        over = sum(count for count, candidate in zip(pages, lying, strict=True) if candidate.decodes)
        over -= budget.pages_max(step_ns)
        for index, candidate in enumerate(lying):
            if over <= 0:
                break
            if candidate.may_park:
                over -= pages[index]
                parked.append(index)
        return parked

    def kept_most(self, number: int, num_layers: int) -> int:
        """Layers that request ``number`` may keep."""
        return num_layers if self.kept_max is None else self.kept_max

    @staticmethod
    def from_name(name: str) -> LayerPolicy:
        """``prompts-first``: as ``auto``, but that first tokens come before all; ``layerkv``: LayerKV as published;
        ``layerkv-staggered``: but that requests keep other layers than their neighbours. From OrbitFlow's comparison:
        ``next-layer`` keeps none, the next one comes while one is computed; ``static-N`` keeps N layers, whatever
        happens."""
        if name in ("auto", "prompts-first"):
            return LayerPolicy(bounds_delays=name == "auto")
        kind, _, count = name.partition("-")
        published = kind == "layerkv"
        kept_max = {"layerkv": None, "next": 0}.get(kind, int(count) if count.isdecimal() else 0)
        is_staggered = count == "staggered"
        return LayerPolicy(kept_max, is_staggered, parks=False, bounds_delays=False, forecasts=published)


def least_kept_layers(num_layers: int, prefill_ns: int, offload_ns: int) -> int:
    """LayerKV's x: of ``num_layers``, the least to keep so that sending the others away takes no longer than computing
    the prompt. ``prefill_ns``: its equation 3; ``offload_ns``: equation 4, of all layers."""
    return math.ceil(num_layers * (1 - prefill_ns / offload_ns)) if offload_ns > prefill_ns else 0


def forecast_blocks(free_blocks: int, sequences: Sequence[tuple[int, int]], stages: int) -> list[int]:
    """LayerKV's equation 5: blocks that are free at the beginning of each of the next ``stages``, in each of which a
    sequence fills a block. ``sequences``: the stage, from 0, at whose end each is expected to end, and its blocks."""
    forecast = []
    for stage in range(stages):
        forecast.append(free_blocks)
        released = sum(blocks + stage + 1 for end, blocks in sequences if end == stage)
        allocated = sum(end >= stage for end, _ in sequences)
        free_blocks += released - allocated
    return forecast


def layer_order(num_layers: int, number: int) -> list[int]:
    """In which order request ``number`` keeps layers: each next one lies in the middle of the largest gap, and requests
    in a row begin at other layers. A permutation of all layers."""
    return [(layer + number) % num_layers for layer in _evenly(num_layers)]


@lru_cache(maxsize=8)
def _evenly(num_layers: int) -> tuple[int, ...]:
    order = [0]
    while len(order) < num_layers:
        chosen_layers = sorted(order)
        gap, after = max((end - begin, -begin) for begin, end in pairwise([*chosen_layers, num_layers]))
        order.append(gap // 2 - after)
    return tuple(order)
