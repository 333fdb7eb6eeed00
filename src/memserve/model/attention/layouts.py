"""A step's attention to KV of layers that do not all keep the same (:class:`memserve.base.layer_kv.LayerLayout`).

::

    layer           0   1   2   3   4   5        3 and 5 read everything, the others a window
    table 0                     p0      p1       blocks: pages of 3 and 5
    table 1         p0  p1                       first blocks of parts: pages of 0 and 1
    table 2                 p0      p1           second ones: pages of 2 and 4

The kernels know nothing of it: the layers of a run have pages of one shape one after the other, as those of a model
with fewer layers have, and each table belongs to blocks of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import check
from memserve.base.layer_kv import LayerLayout
from memserve.base.types import KVGeometry
from memserve.instance.events import PlaceWindow
from memserve.model.attention.backends import AttentionFactory, TritonAttention, choose_backend
from memserve.model.attention.context import BlockSpan, StepRows

if TYPE_CHECKING:
    from memserve.model.workers.gpu_group import GpuWorkerGroup
    from memserve.model.workers.group import WorkerGroup


class PartTables:
    """Where the parts of each slot lie."""

    def __init__(self, part_blocks: int, slots: int, entries: int) -> None:
        """``entries``: of a slot's table."""
        #: ``[part_blocks, slots, entries]``; what is behind a window is not read
        self.tables: NDArray[np.int32] = np.zeros((part_blocks, slots, entries), np.int32)

    def place_window(self, order: PlaceWindow) -> None:
        """Parts of a slot lie in these blocks from now on. Raises :class:`InvariantError` for half a part, and for
        entries that no table has."""
        part_blocks, _, entries = self.tables.shape
        check(part_blocks > 0, "this model has no windows apart")
        count, rest = divmod(len(order.blocks), part_blocks)
        check(not rest, "slot {} gets {} blocks, which are no whole parts", order.slot, len(order.blocks))
        end = order.first + count
        check(0 <= order.first <= end <= entries, "slot {} has no entries {} to {}", order.slot, order.first, end)
        parts = np.array(order.blocks, np.int32).reshape(count, part_blocks)
        self.tables[:, order.slot, order.first : end] = parts.T


class LayoutPages:
    """The pages of a device, by runs of layers."""

    def __init__(
        self,
        arena: Tensor,
        layout: LayerLayout,
        geometry: KVGeometry,
        parts: PartTables,
        crew: WorkerGroup | GpuWorkerGroup | None = None,
    ) -> None:
        """``arena``: uint8, blocks with ``geometry``; ``parts``: where those of the slots lie."""
        self._parts, self._places = parts, layout.places
        divided = crew if layout.has_one_shape else None  # else workers have layers of their own, and no heads
        self._factories: list[tuple[int, AttentionFactory]] = []
        #: of each run: geometry of its pages, and where they are
        self._spans: list[tuple[KVGeometry, BlockSpan]] = []
        self._arena = arena.view(-1)
        for run in layout.runs:
            heads, head_dim_k, head_dim_v = run.shape
            own = replace(
                geometry, num_layers=len(run.layers), num_kv_heads=heads, head_dim_k=head_dim_k, head_dim_v=head_dim_v
            )
            check(own.page_bytes == run.pages_each * geometry.page_bytes, "layers {} have other pages", run.layers)
            span = BlockSpan(run.first_page * geometry.page_bytes, geometry.block_bytes)
            self._factories.append((run.table, choose_backend(arena, own, divided, span)))
            self._spans.append((own, span))

    def attention_of(self, rows: StepRows) -> LayoutAttention:
        """Of one step; ``rows``: with the table of blocks."""
        tables = (rows, *(replace(rows, tables=table) for table in self._parts.tables))
        return LayoutAttention(self._places, [make(tables[table]) for table, make in self._factories])

    @property
    def has_graphs(self) -> bool:
        """Whether a graph of a GPU can hold decode steps: where all that they read lies in the table of blocks."""
        kinds = [isinstance(make, partial) and make.func is TritonAttention for _, make in self._factories]
        return all(kinds) and not len(self._parts.tables)

    def attention_of_decodes(
        self, tables: Tensor, context_max: int, slots: Tensor, contexts: Tensor
    ) -> LayoutAttention:
        """Of one token of each of ``slots``, known to a GPU alone: see :meth:`TritonAttention.of_decodes`."""
        decodes = tables, slots, contexts, context_max
        of_runs = [TritonAttention.of_decodes(self._arena, own, *decodes, span=span) for own, span in self._spans]
        return LayoutAttention(self._places, of_runs)


class LayoutAttention:
    """A step's attention; see the module."""

    def __init__(self, places: tuple[tuple[int, int], ...], attentions: list[Any]) -> None:
        """``places``: of each layer the number of its run, and its place in that; ``attentions``: of each run."""
        self._places, self._attentions = places, attentions

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`. A layer that reads the KV of
        another one gets that as well, and writes the same once more."""
        run, place = self._places[layer]
        return self._attentions[run].run_attention(place, q, k, v, **options)  # type: ignore[no-any-return]  # of any backend
