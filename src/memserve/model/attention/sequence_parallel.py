"""Attention over a context that lies on several instances, or that comes from them layer by layer.

The instance that computes a part of a sequence sends the queries of each layer to the holders of the earlier parts, of
which each answers with its own attention and the statistics of its softmax; meanwhile it computes its own part, and
merges. Tokens of earlier parts come before all queries, so nothing is masked there.

Of a prompt in stripes the KV itself comes, into blocks of the own sequence: a layer attends as ever, once it is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from memserve.model.attention.context import StepAttention, StepRows
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

    def send_query(self, segment: Segment, query: Query) -> int:
        """Send a query; returns its number. Does not wait."""

    def receive_answer(self, number: int, outputs: Tensor, statistics: Tensor) -> None:
        """Wait for the answer to a query, and put it there: see :data:`Parts`. Raises :class:`SegmentLostError`."""

    def close(self) -> None:
        """Give the lines back."""


class HeldKv:
    """The segments that this instance keeps, for queries. Thread-safe."""

    def __init__(self, base: int, geometry: KVGeometry) -> None:
        """``base``: address of the arena."""
        self._base, self._geometry = base, geometry
        self._segments: dict[str, tuple[NDArray[np.int32], int]] = {}
        self._lock = threading.Lock()
        #: queries answered
        self.answered = 0

    def hold_segment(self, name: str, blocks: Sequence[int], tokens: int) -> None:
        """Answer queries about ``name``: its ``tokens`` lie in ``blocks``."""
        with self._lock:
            self._segments[name] = np.array([blocks], np.int32), tokens

    def drop_segment(self, name: str) -> None:
        """Its blocks may be written when this returns. Queries under way get no answer."""
        with self._lock:
            self._segments.pop(name, None)

    def answer_query(self, query: Query) -> Parts | None:
        """What the queries find here. None: the segment is not here, or was dropped meanwhile.

        Raises ``ValueError`` for a query that does not fit the model.
        """
        segment = self._segments.get(query.name)
        if segment is None:
            return None
        table, tokens = segment
        count = len(query.q)
        ends, contexts = np.array([0, count], np.int32), np.array([tokens], np.int32)
        rows = StepRows(table, np.zeros(1, np.int32), ends, contexts)
        attention = KernelAttention(self._base, self._geometry, self._geometry.num_kv_heads, rows, behind=True)
        q = query.q.transpose(0, 1)[None]
        parts = attention.run_attention_part(query.layer, q, None, scale=query.scale, softcap=query.softcap)
        with self._lock:
            if self._segments.get(query.name) is not segment:
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
        attention: KernelAttention,
        lines: SegmentLines,
        rows: Sequence[SpannedRow],
        lost: Callable[[int, str], None],
    ) -> None:
        """``lost``: a slot has no answer, and why; its row goes on without meaning."""
        self._attention, self._lines, self._on_lost = attention, lines, lost
        self._rows = list(rows)

    def run_attention(
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
        chunk: int = 0,
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        if window or chunk or sinks is not None:
            raise UserError("a model with windows or sinks does not run in parts", hint="use --sequence-parallel off")
        query_numbers = {row.slot: self._send_queries(row, layer, q, scale, softcap) for row in self._rows}
        outputs, statistics = self._attention.run_attention_part(layer, q, (k, v), scale=scale, softcap=softcap)
        for row in self._rows.copy():
            try:
                self._merge_parts(row, query_numbers[row.slot], outputs, statistics)
            except SegmentLostError as error:
                self._rows.remove(row)
                self._on_lost(row.slot, str(error))
        return outputs[None].to(q.dtype)

    def _send_queries(self, row: SpannedRow, layer: int, q: Tensor, scale: float, softcap: float) -> list[int]:
        row_queries = q[0, :, row.first : row.end].transpose(0, 1).contiguous()
        query = Query(row.before.name, layer, row_queries, scale, softcap)
        return [self._lines.send_query(segment, query) for segment in row.before.segments]

    def _merge_parts(self, row: SpannedRow, query_numbers: list[int], outputs: Tensor, statistics: Tensor) -> None:
        """Put together what all parts found, in the order of the sequence."""
        row_outputs = outputs[row.first : row.end]
        count, heads, dim = row_outputs.shape
        parts = row_outputs.new_empty((len(query_numbers) + 1, count, heads, dim))
        weights = row_outputs.new_empty((len(query_numbers) + 1, count, heads))
        for place, number in enumerate(query_numbers):
            self._lines.receive_answer(number, parts[place], weights[place])
        parts[-1], weights[-1] = row_outputs, statistics[row.first : row.end]
        outputs[row.first : row.end] = merge_parts(parts, weights)


GATE_S = 20.0
"""How long a layer may be on its way. What comes from an instance that has died is given up long before."""


class LayerGates:
    """Up to which layer the KV before some rows has come (:class:`~memserve.instance.events.MoveGate`). The device's
    thread waits, another one moves them."""

    def __init__(self, wait_s: float = GATE_S) -> None:
        self._wait_s = wait_s
        self._moved = threading.Condition()
        self._layers: dict[int, int | None] = {}  # of gates whose plans have not ended
        self._ended = 0  # gates up to this one have ended; later ones have higher numbers
        #: time in which steps stood still
        self.waited_ns = 0

    def move_gate(self, gate: int, layers: int | None) -> None:
        """Rows behind ``gate`` may read so many layers. None: they never can read more."""
        with self._moved:
            if gate > self._ended:
                self._layers[gate] = layers
                self._moved.notify_all()

    def wait_for_layer(self, gate: int, layer: int) -> None:
        """Until ``layer`` may be read. Raises :class:`SegmentLostError` when it will not come, or not in time."""
        with self._moved:
            if self._may_read(gate, layer):
                return
            began_ns = time.monotonic_ns()
            came = self._moved.wait_for(
                lambda: self._layers.get(gate, 0) is None or self._may_read(gate, layer), self._wait_s
            )
            self.waited_ns += time.monotonic_ns() - began_ns
            if not self._may_read(gate, layer):
                raise SegmentLostError(f"layer {layer} {'will not come' if came else 'has not come in time'}")

    def end_gates(self, gates: Iterable[int]) -> None:
        """The plan with ``gates`` has ended."""
        with self._moved:
            for gate in gates:
                self._layers.pop(gate, None)
                self._ended = max(self._ended, gate)

    def _may_read(self, gate: int, layer: int) -> bool:
        layers = self._layers.get(gate, 0)
        return layers is not None and layer < layers


class GatedAttention:
    """A step's attention of which some rows read KV that is still coming."""

    def __init__(
        self, attention: StepAttention, gates: LayerGates, by_slot: Mapping[int, int], lost: Callable[[int, str], None]
    ) -> None:
        """``by_slot``: the gate of each row that has one. ``lost``: what a slot waits for does not come, and why; its
        row goes on without meaning."""
        self._attention, self._gates, self._on_lost = attention, gates, lost
        self._by_slot = dict(by_slot)

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        for slot, gate in list(self._by_slot.items()):
            try:
                self._gates.wait_for_layer(gate, layer)
            except SegmentLostError as error:
                del self._by_slot[slot]
                self._on_lost(slot, str(error))
        return self._attention.run_attention(layer, q, k, v, **options)


def merge_parts(outputs: Tensor, statistics: Tensor) -> Tensor:
    """Attention to a whole context ``[tokens, heads, dim]`` of that to its parts: ``outputs [parts, tokens, heads,
    dim]`` and ``statistics [parts, tokens, heads]``, all float32."""
    dim, merged = outputs.shape[3], torch.empty(outputs.shape[1:])
    flat = outputs.view(len(outputs), -1, dim).numpy(), statistics.view(len(outputs), -1).numpy()
    _kernels().merge_parts(*flat, merged.view(-1, dim).numpy())
    return merged


def _kernels() -> Any:
    from memserve import _kernels

    return _kernels
