"""A step's attention where KV of the layers that read a window lies apart (:class:`memserve.base.states.WindowLayers`).

::

    layer           0   1   2   3   4   5        3 and 5 read everything, the others a window
    table 0                     p0      p1       blocks: pages of 3 and 5
    table 1         p0  p1                       first blocks of parts: pages of 0 and 1
    table 2                 p0      p1           second ones: pages of 2 and 4

The kernels know nothing of it: to each table belong blocks of a model that has the layers which read everything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import check
from memserve.base.states import WindowLayers
from memserve.instance.events import PlaceWindow
from memserve.model.attention.backends import AttentionFactory
from memserve.model.attention.context import StepRows


class WindowTables:
    """Where the parts of each slot lie."""

    def __init__(self, layers: WindowLayers, slots: int, entries: int) -> None:
        """``entries``: of a slot's table."""
        self.layers = layers
        #: ``[part_blocks, slots, entries]``; what is behind a window is not read
        self.tables: NDArray[np.int32] = np.zeros((layers.part_blocks, slots, entries), np.int32)

    def place_window(self, order: PlaceWindow) -> None:
        """Parts of a slot lie in these blocks from now on. Raises :class:`InvariantError` for half a part, and for
        entries that no table has."""
        count, rest = divmod(len(order.blocks), len(self.tables))
        check(not rest, "slot {} gets {} blocks, which are no whole parts", order.slot, len(order.blocks))
        end, entries = order.first + count, self.tables.shape[2]
        check(0 <= order.first <= end <= entries, "slot {} has no entries {} to {}", order.slot, order.first, end)
        parts = np.array(order.blocks, np.int32).reshape(count, len(self.tables))
        self.tables[:, order.slot, order.first : order.first + count] = parts.T


class WindowedAttention:
    """A step's attention; see the module."""

    def __init__(self, make: AttentionFactory, tables: WindowTables, rows: StepRows) -> None:
        """``make``: attention to blocks of the layers that read everything; ``rows``: with the table of those."""
        self._places = tables.layers.places
        self._attentions = [make(rows), *(make(replace(rows, tables=table)) for table in tables.tables)]

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        block, page = self._places[layer]
        return self._attentions[block].run_attention(page, q, k, v, **options)
