"""Attention over a context that lies on several instances.

The instance that computes a part of a sequence sends the queries of each layer to the holders of the earlier parts, of
which each answers with its own attention and the statistics of its softmax; meanwhile it computes its own part, and
merges. Tokens of earlier parts come before all queries, so nothing is masked there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import MemserveError, UserError
from memserve.base.types import KVGeometry
from memserve.instance.events import Before
from memserve.model.attention.backends import KernelAttention
from memserve.model.attention.context import StepRows
from memserve.protocol.messages import Segment

Parts = tuple[Tensor, Tensor]
"""Outputs ``[tokens, heads, head_dim_v]`` and statistics ``[tokens, heads]``, both float32, of a part of a context."""


class SegmentLostError(MemserveError):
    """A holder does not answer, or has the segment no more."""


@dataclass(frozen=True, slots=True)
class Query:
    """The queries of one layer that ask a holder: ``q [tokens, heads, head_dim_k]``, contiguous."""

    name: str
    layer: int
    q: Tensor
    scale: float
    softcap: float


class SegmentLines(Protocol):
    """The way to holders. Used from the device's thread."""

    def ask(self, segment: Segment, query: Query) -> int:
        """Send a query; returns its number. Does not wait."""

    def answer(self, number: int, outputs: Tensor, statistics: Tensor) -> None:
        """Wait for the answer to a query, and put it there: see :data:`Parts`. Raises :class:`SegmentLostError`."""

    def close(self) -> None:
        """Give the lines back."""


class HeldKv:
    """The segments that this instance keeps, for queries. Thread-safe."""

    def __init__(self, base: int, geometry: KVGeometry) -> None:
        """``base``: address of the arena."""
        self._base, self._geometry = base, geometry
        self._held: dict[str, tuple[NDArray[np.int32], int]] = {}
        self._lock = threading.Lock()
        #: queries answered
        self.answered = 0

    def hold(self, name: str, blocks: Sequence[int], tokens: int) -> None:
        """Answer queries about ``name``: its ``tokens`` lie in ``blocks``."""
        with self._lock:
            self._held[name] = np.array([blocks], np.int32), tokens

    def drop(self, name: str) -> None:
        """Its blocks may be written when this returns. Queries under way get no answer."""
        with self._lock:
            self._held.pop(name, None)

    def attend(self, query: Query) -> Parts | None:
        """What the queries find here. None: the segment is not here, or was dropped meanwhile.

        Raises ``ValueError`` for a query that does not fit the model.
        """
        held = self._held.get(query.name)
        if held is None:
            return None
        table, tokens = held
        count = len(query.q)
        ends, contexts = np.array([0, count], np.int32), np.array([tokens], np.int32)
        rows = StepRows(table, np.zeros(1, np.int32), ends, contexts)
        attention = KernelAttention(self._base, self._geometry, self._geometry.num_kv_heads, rows, behind=True)
        q = query.q.transpose(0, 1)[None]
        parts = attention.attend_part(query.layer, q, None, scale=query.scale, softcap=query.softcap)
        with self._lock:
            if self._held.get(query.name) is not held:
                return None  # what was read may be another sequence's
            self.answered += 1
        return parts


@dataclass(frozen=True, slots=True)
class SpannedRow:
    """A row of a step whose sequence has earlier parts elsewhere: its tokens in the batch."""

    slot: int
    first: int
    end: int
    before: Before


class SpannedAttention:
    """A step's attention of which some rows have earlier parts elsewhere."""

    def __init__(
        self,
        own: KernelAttention,
        lines: SegmentLines,
        rows: Sequence[SpannedRow],
        lost: Callable[[int, str], None],
    ) -> None:
        """``lost``: a slot has no answer, and why; its row goes on without meaning."""
        self._own, self._lines, self._lost = own, lines, lost
        self._rows = list(rows)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.attend`."""
        if window or sinks is not None:
            raise UserError("a model with windows or sinks does not run in parts", hint="use --sequence-parallel off")
        asked = {row.slot: self._ask(row, layer, q, scale, softcap) for row in self._rows}
        outputs, statistics = self._own.attend_part(layer, q, (k, v), scale=scale, softcap=softcap)
        for row in self._rows.copy():
            try:
                self._merge(row, asked[row.slot], outputs, statistics)
            except SegmentLostError as error:
                self._rows.remove(row)
                self._lost(row.slot, str(error))
        return outputs[None].to(q.dtype)

    def _ask(self, row: SpannedRow, layer: int, q: Tensor, scale: float, softcap: float) -> list[int]:
        own = q[0, :, row.first : row.end].transpose(0, 1).contiguous()
        query = Query(row.before.name, layer, own, scale, softcap)
        return [self._lines.ask(segment, query) for segment in row.before.segments]

    def _merge(self, row: SpannedRow, asked: list[int], outputs: Tensor, statistics: Tensor) -> None:
        """Put together what all parts found, in the order of the sequence."""
        own = outputs[row.first : row.end]
        count, heads, dim = own.shape
        found = own.new_empty((len(asked) + 1, count, heads, dim))
        weights = own.new_empty((len(asked) + 1, count, heads))
        for place, number in enumerate(asked):
            self._lines.answer(number, found[place], weights[place])
        found[-1], weights[-1] = own, statistics[row.first : row.end]
        merged = torch.empty((count * heads, dim))
        flat = found.view(len(found), -1, dim).numpy(), weights.view(len(found), -1).numpy()
        _kernels().merge_parts(*flat, merged.numpy())
        outputs[row.first : row.end] = merged.view(count, heads, dim)


def _kernels() -> Any:
    from memserve import _kernels

    return _kernels
