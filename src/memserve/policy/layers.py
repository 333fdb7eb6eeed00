"""How much KV may lie by layer: what decoding has to read back in each step must fit the link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from memserve.units import NS_PER_MS, NS_PER_S

LINK_BYTES_S = 4e9
"""Of a link that was not measured: host memory that a CPU copies with one thread, or half a PCIe 4 bus."""
CHUNK_BLOCKS = 8
"""The largest piece of a prompt that is computed at a time where it lies by layer: its blocks are whole until they have
moved, those of some steps at once. Each piece reads what is before it back, so short ones cost the link more."""
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

    @property
    def pages_max(self) -> int:
        """Pages that the link carries within the time of a token."""
        return int(self.link_bytes_s * self.tpot_ns / NS_PER_S / self.page_bytes)

    def allows(self, pages: int) -> bool:
        """Whether steps may read back so many."""
        return pages <= self.pages_max


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
