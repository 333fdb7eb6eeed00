"""How much KV may lie by layer: what decoding has to read back in each step must fit the link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from memserve.units import NS_PER_MS, NS_PER_S

LINK_BYTES_S = 0.5e9
"""Of a link that was not measured. On a CPU both tiers are the same memory, and what copies takes from what computes:
that much is not felt."""
CHUNK_BLOCKS = 8
"""The most that one plan computes behind entries that lie by layer: blocks are whole there until they have moved, those
of some plans at once."""
_BESIDE = 2  # 1 / this of the link's time is for what steps read back
TPOT_NS = 200 * NS_PER_MS
"""Time that a token may take where no objective is set: the one of LayerKV's evaluation."""


@dataclass(frozen=True, slots=True)
class LayerBudget:
    """The constraint that binds when layers lie elsewhere: the bytes that a step reads back fit the link within the
    time that a token may take::

        sum over requests: passing layers * tokens * bytes a layer's token  <=  link * time a token may take
    """

    num_layers: int
    page_bytes: int
    """Of one layer's page."""
    link_bytes_s: float
    tpot_ns: int
    """Time that a token may take."""

    def pages_max(self, step_ns: int = 0) -> int:
        """Pages that the link carries within the time of a token; if a step's time ``step_ns`` is known (not 0), within
        a part of it: then steps do not wait for the link, and what leaves and comes has the rest."""
        beside_ns = min(step_ns // _BESIDE, self.tpot_ns) if step_ns else self.tpot_ns
        return int(self.link_bytes_s * beside_ns / NS_PER_S / self.page_bytes)

    def allows(self, pages: int, step_ns: int = 0) -> bool:
        """Whether steps may read back so many; ``step_ns`` as for :meth:`pages_max`."""
        return pages <= self.pages_max(step_ns)

    def chunk_blocks(self, entries: int, block_ns: float) -> int:
        """The least piece of a prompt that hides the reading back of what lies before it (LayerKV, equations 3 and 4,
        where a prompt is computed in pieces): at most ``entries`` blocks pass for each. ``block_ns``: time to compute
        the tokens of a block; 0: not known."""
        link_ns = entries * self.num_layers * self.page_bytes / self.link_bytes_s * NS_PER_S
        return max(1, math.ceil(link_ns / block_ns) if block_ns else 0)


class Lying(NamedTuple):
    """What a policy sees of one sequence that lies by layer."""

    number: int
    """Of the request, in order of arrival."""
    entries: int
    """Blocks that lie by layer."""
    kept: int
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

    def to_park(self, lying: Sequence[Lying], budget: LayerBudget, step_ns: int, free_blocks: int) -> list[int]:
        """Which of ``lying``, the latest first, are parked: as many as read back more than the link carries. Called
        before each plan; ``free_blocks``: HBM in which layers may be kept. Returns indexes."""
        parked: list[int] = []
        if not self.parks:
            return parked
        pages = [one.entries * (budget.num_layers - one.kept) for one in lying]
        over = sum(count for count, one in zip(pages, lying, strict=True) if one.decodes)
        over -= budget.pages_max(step_ns)
        for at, one in enumerate(lying):
            if over <= 0:
                break
            if one.may_park:
                over -= pages[at]
                parked.append(at)
        return parked

    def kept_most(self, number: int, num_layers: int) -> int:
        """Layers that request ``number`` may keep."""
        return num_layers if self.kept_max is None else self.kept_max

    @staticmethod
    def named(name: str) -> LayerPolicy:
        """``layerkv``: LayerKV as published; ``layerkv-staggered``: but that requests keep other layers than their
        neighbours. From OrbitFlow's comparison: ``next-layer`` keeps none, the next one comes while one is computed;
        ``static-N`` keeps N layers, whatever happens."""
        if name == "auto":
            return LayerPolicy()
        what, _, count = name.partition("-")
        kept_max = {"layerkv": None, "next": 0}.get(what, int(count) if count.isdecimal() else 0)
        return LayerPolicy(kept_max, is_staggered=count == "staggered", parks=False)


def layer_order(num_layers: int, number: int) -> list[int]:
    """In which order request ``number`` keeps layers: each next one lies in the middle of the largest gap, and requests
    in a row begin at other layers. A permutation of all layers."""
    return [(layer + number) % num_layers for layer in _evenly(num_layers)]


@lru_cache(maxsize=8)
def _evenly(num_layers: int) -> tuple[int, ...]:
    order = [0]
    while len(order) < num_layers:
        some = sorted(order)
        gap, after = max((end - begin, -begin) for begin, end in pairwise([*some, num_layers]))
        order.append(gap // 2 - after)
    return tuple(order)
