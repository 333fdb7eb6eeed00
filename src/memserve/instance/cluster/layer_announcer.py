"""What a plan under way computes for peers, announced to them layer by layer (MemServe 5.2).

::

    plan made       add_blocks      the blocks of its rows, by offer
    LayerFinished   layer_finished  pages of each Nth layer
    StepFinished    step_finished   pages of all layers that were not announced

The device need not report layers: then all pages are announced with the step's end.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.instance.events import StepPlan
from memserve.kv.transfer.exchange import Exchange


@dataclass(slots=True)
class _Computed:
    """Blocks of an offer that a plan computes."""

    offer_id: str
    first_block: int
    end_block: int
    every: int
    last_waits: bool
    next_layer: int = 0


class LayerAnnouncer:
    """All blocks that plans under way compute for offers."""

    def __init__(self, exchange: Exchange, num_layers: int) -> None:
        self._exchange, self._num_layers = exchange, num_layers
        self._by_step: dict[int, list[_Computed]] = {}

    def add_blocks(
        self, plan: StepPlan, offer_id: str, blocks: tuple[int, int], *, every: int = 1, last_waits: bool = True
    ) -> None:
        """``plan``, which has just been made, computes blocks ``[first, end)`` of an offer. ``every``: announce so many
        layers at once. ``last_waits``: the last ones with the step's end, so that no offer is complete whose row may
        still fail."""
        plan.report_layers = min(plan.report_layers or every, every)
        self._by_step.setdefault(plan.step_id, []).append(_Computed(offer_id, *blocks, every, last_waits))

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of the plan."""
        end_layer = layer + 1
        for part in self._by_step.get(step_id, ()):
            waits = part.last_waits and end_layer == self._num_layers
            if end_layer - part.next_layer >= part.every and not waits:
                self._announce(part, end_layer)

    def step_finished(self, step_id: int) -> None:
        """All layers of the plan are written, reported or not."""
        for part in self._by_step.pop(step_id, ()):
            if part.next_layer < self._num_layers:
                self._announce(part, self._num_layers)

    def clear(self) -> None:
        """No plan under way computes anything of use."""
        self._by_step.clear()

    def _announce(self, part: _Computed, end_layer: int) -> None:
        self._exchange.announce_computed(
            part.offer_id, part.first_block, part.end_block, part.next_layer, end_layer, fence=0
        )
        part.next_layer = end_layer
