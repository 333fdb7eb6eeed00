"""How long a step takes whose KV lies by layer: what the link between HBM and DRAM carries beside the computing.

Computing is spread evenly over the layers. In each direction the link carries one copy after the other::

    up      | layer 0 | layer 1 |    | layer 2 |    | layer 3 |        a layer's pages, of all rows that read it back
    compute           | layer 0 | layer 1 |    | layer 2 |             begins when its pages are there
    down                        | 0 |     | 1 |                        what rows have computed of it

The pages of layer ``l`` may come when layer ``l - 2`` is computed: two buffers. Layer ``l`` may be computed when what
layer ``l - 2`` has left in the buffer is gone. Blocks that move get what is left of the link, and the step ends when
everything has arrived. Rows are taken together: each has two buffers of its own, but their copies use one link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memserve.base.types import KVGeometry, Tier
from memserve.base.units import NS_PER_S, ceil_div
from memserve.instance.events import LinkUse, MovePages, PlaceByLayer, StepPlan


@dataclass(slots=True)
class LinkCounters(LinkUse):
    """Totals since the start; ``waited_ns``: by how much steps took longer than their computing."""

    read_pages: list[int] = field(default_factory=list)
    """Pages that steps have read back, layer by layer."""
    worst_ns: int = 0
    """The longest that one step has waited."""


@dataclass(frozen=True, slots=True)
class _Placed:
    first: int
    count: int
    kept: frozenset[int]


class TimedLink:
    """Where layers lie, and the time of steps that move them."""

    def __init__(self, geometry: KVGeometry, bytes_per_s: float) -> None:
        self.counters = LinkCounters(read_pages=[0] * geometry.num_layers)
        self.used: LinkUse | None = None
        """Of the last step. None: nothing lay by layer."""
        self._layers, self._block_tokens = geometry.num_layers, geometry.block_tokens
        self._page_bytes = geometry.page_bytes
        self._page_ns = geometry.page_bytes / bytes_per_s * NS_PER_S
        self._placed: dict[int, _Placed] = {}  # by slot

    def step_ns(self, plan: StepPlan, computed_ns: float) -> int:
        """How long a step takes whose computing takes ``computed_ns``."""
        self._place_slots(plan)
        self.used = None
        if not plan.moves and not self._placed:
            return round(computed_ns)
        up, down = self._pages_moved(plan)
        counters, spent_ns = self.counters, computed_ns
        if any(up) or down:
            counters.read_pages = [total + pages for total, pages in zip(counters.read_pages, up, strict=True)]
            spent_ns = self._pipelined_ns(up, down, computed_ns / self._layers)
        moved_up, moved_down = _moved(plan.moves, Tier.HBM), _moved(plan.moves, Tier.DRAM)
        pages_up, pages_down = sum(up) + moved_up, down * self._layers + moved_down
        spent_ns = max(spent_ns, pages_up * self._page_ns, pages_down * self._page_ns)
        waited_ns = round(spent_ns - computed_ns)
        self.used = LinkUse(
            pages_up * self._page_bytes,
            pages_down * self._page_bytes,
            round((pages_up + pages_down) * self._page_ns),
            waited_ns,
        )
        counters.add(self.used)
        counters.worst_ns = max(counters.worst_ns, waited_ns)
        return round(spent_ns)

    def _place_slots(self, plan: StepPlan) -> None:
        if plan.reset_slots:
            self._placed.clear()
        for slot in plan.close:
            self._placed.pop(slot, None)
        for order in plan.place:
            self._placed[order.slot] = _of(order)

    def _pages_moved(self, plan: StepPlan) -> tuple[list[int], int]:
        """Pages that the rows read back, layer by layer, and those that they write, of each layer alike."""
        up, down, placed_ranges = [0] * self._layers, 0, self._placed
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True) if placed_ranges else ():
            placed_range = placed_ranges.get(slot)
            if placed_range is None:
                continue
            read = _inside(placed_range, ceil_div(start, self._block_tokens))
            down += _inside(placed_range, ceil_div(start + count, self._block_tokens)) - _inside(
                placed_range, start // self._block_tokens
            )
            if read:
                for layer in range(self._layers):
                    if layer not in placed_range.kept:
                        up[layer] += read
        return up, down

    def _pipelined_ns(self, up: list[int], down: int, layer_ns: float) -> float:
        page_ns, layers = self._page_ns, self._layers
        come = [0.0] * layers  # when its pages are there
        left_s = [0.0] * layers  # when what was computed of it has left
        come[0] = up[0] * page_ns
        if layers > 1:
            come[1] = come[0] + up[1] * page_ns
        up_free, down_free, now = come[min(1, layers - 1)], 0.0, 0.0
        for layer in range(layers):
            now = max(now, come[layer], left_s[layer - 2] if layer >= 2 else 0.0) + layer_ns
            down_free = left_s[layer] = max(down_free, now) + down * page_ns
            if layer + 2 < layers:
                up_free = come[layer + 2] = max(up_free, now) + up[layer + 2] * page_ns
        return max(now, down_free)


def _of(order: PlaceByLayer) -> _Placed:
    return _Placed(order.first, len(order.dram_blocks), frozenset(order.resident_layers))


def _inside(placed_range: _Placed, entry: int) -> int:
    return min(max(0, entry - placed_range.first), placed_range.count)


def _moved(orders: Iterable[MovePages], to: Tier) -> int:
    return sum(len(order.src) for order in orders if order.dst_tier is to and order.src_tier is not to)
