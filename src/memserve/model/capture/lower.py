"""Lowering: runs of fused operations become pieces of one native program.

First every node is classified: native operation, view of a native value, or foreign (embedding, attention, whatever
torch must do). Then native values get offsets in the workspace by lifetime, and the operations go into the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from memserve.model.capture import operations as fused
from memserve.model.capture.passes import Node, constant_of, value_of
from memserve.model.capture.record import attend
from memserve.model.capture.storage import Buffer, Dim, External, StoragePlace, dense_place, row_shape
from memserve.model.quantised import QuantisedLinear
from memserve.model.workers import group as crew

aten = torch.ops.aten


@dataclass
class NativeOp:
    """One operation of the program: what it reads and writes, and how to add it (given the address of each place)."""

    node: Node
    reads: list[StoragePlace]
    writes: list[StoragePlace]
    add: Callable[[Any, Callable[[StoragePlace | None], int]], None]


@dataclass
class Lowered:
    """A graph with classified nodes. What is neither an operation of the program nor a view is foreign."""

    dtype: torch.dtype
    order: dict[Node, int]
    ops: dict[Node, NativeOp] = field(default_factory=dict)  # in program order
    places: dict[Node, StoragePlace] = field(
        default_factory=dict
    )  # native values, and views of them and of attention's results
    externals: dict[Node, StoragePlace] = field(default_factory=dict)  # foreign values that native operations may read


class Lowering:
    """Classifies the nodes of a graph. ``sizes``: tokens and logits rows of the recording; ``dtype``: activations'."""

    def __init__(self, graph: fx.Graph, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        self._sizes = sizes
        self._result = Lowered(dtype, {node: i for i, node in enumerate(graph.nodes)})
        self._views: dict[Any, Callable[[Node, StoragePlace], StoragePlace | None]] = {
            fused.columns: self._columns_view,
            aten.view.default: self._reshaped_view,
            aten.reshape.default: self._reshaped_view,
            aten.transpose.int: self._transposed_view,
            aten.unsqueeze.default: self._unsqueezed_view,
        }
        self._natives: dict[Any, Callable[[Node], NativeOp | None]] = {
            fused.linear: self._lower_linear,
            fused.rms_norm: self._lower_rms_norm,
            fused.add_rms_norm: self._lower_add_rms_norm,
            fused.gated: self._lower_gated,
            fused.rotary: self._lower_rotary,
            crew.all_reduce: self._lower_reduce,
        }

    def classify_nodes(self) -> Lowered:
        """Classify every node, in order."""
        for node in self._result.order:
            if node.op == "call_function":
                self._classify_node(node)
        return self._result

    def _classify_node(self, node: Node) -> None:
        places = self._result.places
        if node.target in self._natives:
            op = self._natives[node.target](node)
            if op is not None:
                self._result.ops[node] = op
                if len(op.writes) == 1:
                    places[node] = op.writes[0]
        elif node.target is fused.item and node.args[0] in self._result.ops:
            places[node] = self._result.ops[node.args[0]].writes[node.args[1]]
        elif node.target in self._views:
            source = places.get(node.args[0]) or self._result.externals.get(node.args[0])
            place = None if source is None else self._views[node.target](node, source)
            if place is not None:
                places[node] = place
        elif node.target is attend:
            self._external_place(node)

    def _reshaped_view(self, node: Node, place: StoragePlace) -> StoragePlace | None:
        shape = row_shape(value_of(node), self._sizes)
        return place.view_as(shape[0]) if shape is not None and shape[1] == place.count else None

    def _transposed_view(self, node: Node, place: StoragePlace) -> StoragePlace:
        return place.transposed(*node.args[1:])

    def _columns_view(self, node: Node, place: StoragePlace) -> StoragePlace:
        return place.columns(*node.args[1:])

    def _unsqueezed_view(self, node: Node, place: StoragePlace) -> StoragePlace:
        return place.unsqueezed(node.args[1])

    def _external_place(self, node: Node) -> StoragePlace | None:
        value = value_of(node)
        if not isinstance(value, Tensor) or value.dtype != self._result.dtype:
            return None
        shape = row_shape(value, self._sizes)
        place = None if shape is None else dense_place(External(node), *shape)
        if place is not None:
            self._result.externals[node] = place
        return place

    def _input_place(self, node: Any) -> StoragePlace | None:
        """Where an argument lies: natively, or in a foreign tensor (then it is made dense before the program runs)."""
        if not isinstance(node, fx.Node) or node.op == "get_attr":
            return None
        return self._result.places.get(node) or self._result.externals.get(node) or self._external_place(node)

    def _output_place(self, value: Tensor, like: StoragePlace) -> StoragePlace | None:
        shape = row_shape(value, self._sizes)
        if shape is None or shape[1] != like.count or value.dtype != self._result.dtype:
            return None
        tail = value.shape[len(value.shape) - (len(shape[0]) - shape[0].index(None)) + 1 :]
        return dense_place(Buffer(int(tail.numel())), *shape)

    def _rows_of(self, place: StoragePlace | None, inner: int = 0) -> tuple[Dim, ...] | None:
        """``(rows, [inner,] width)`` if rows come first and the last dimension is dense, else None."""
        core = () if place is None else place.core_dims()
        good = len(core) in (2, 2 + inner) and core[0].size is None and core[-1].stride == 1
        return core if good and None not in [dim.size for dim in core[1:]] else None

    def _lower_linear(self, node: Node) -> NativeOp | None:
        x, layer = self._input_place(node.args[0]), node.args[1]
        rows = self._rows_of(x)
        y = None if x is None else self._output_place(value_of(node), x)
        if x is None or y is None or rows is None or not layer.is_native:
            return None

        def add(program: Any, address_of: Callable[[StoragePlace | None], int]) -> None:
            if isinstance(layer, QuantisedLinear):
                layer.append_to(program, address_of(x), rows[0].stride, address_of(y), self._result.dtype, x.count)
                return
            program.linear(
                address_of(x),
                rows[0].stride,
                *layer.native_weights,
                address_of(y),
                *layer.native_sizes,
                layer.code,
                x.count,
            )

        return NativeOp(node, [x], [y], add)

    def _lower_rms_norm(self, node: Node) -> NativeOp | None:
        return self._lower_norm(node, self._input_place(node.args[0]), None, value_of(node), node.args[1:])

    def _lower_add_rms_norm(self, node: Node) -> NativeOp | None:
        x, residual = (self._input_place(arg) for arg in node.args[:2])
        if residual is None or self._rows_of(residual) is None or x is None or len(x.core_dims()) != 2:
            return None
        if residual.core_dims()[0].stride != residual.core_dims()[1].size:
            return None
        return self._lower_norm(node, x, residual, value_of(node)[0], node.args[2:])

    def _lower_norm(
        self, node: Node, x: StoragePlace | None, residual: StoragePlace | None, value: Tensor, rest: Any
    ) -> NativeOp | None:
        rows, (weight, eps, round_first) = self._rows_of(x, inner=1), rest
        y = None if x is None else self._output_place(value, x)
        total = self._output_place(value, x) if x is not None and residual is not None else None
        gain = constant_of(weight)
        if x is None or y is None or rows is None or gain is None:
            return None
        inner, stride_inner = (rows[1].size, rows[1].stride) if len(rows) == 3 else (1, 0)
        code = fused.DTYPE_CODES[self._result.dtype]

        def add(program: Any, address_of: Callable[[StoragePlace | None], int]) -> None:
            program.rms_norm(
                address_of(x), address_of(residual), address_of(total), address_of(y), gain.data_ptr(), eps,
                round_first,
                inner, rows[0].stride, stride_inner, rows[-1].size, code, x.count,
            )  # fmt: skip

        reads = [x] if residual is None else [x, residual]
        return NativeOp(node, reads, [y] if total is None else [total, y], add)

    def _lower_gated(self, node: Node) -> NativeOp | None:
        gate, up, kind = self._input_place(node.args[0]), self._input_place(node.args[1]), node.args[2]
        gate_rows, up_rows = self._rows_of(gate), self._rows_of(up)
        y = None if gate is None else self._output_place(value_of(node), gate)
        if gate is None or up is None or y is None or gate_rows is None or up_rows is None:
            return None
        code = fused.DTYPE_CODES[self._result.dtype]

        def add(program: Any, address_of: Callable[[StoragePlace | None], int]) -> None:
            program.gated(
                address_of(gate), gate_rows[0].stride, address_of(up), up_rows[0].stride, address_of(y),
                gate_rows[1].size,
                fused.CPU_GATE_CODES[kind], code, gate.count,
            )  # fmt: skip

        return NativeOp(node, [gate, up], [y], add)

    def _lower_reduce(self, node: Node) -> NativeOp | None:
        x = self._input_place(node.args[0])
        rows = self._rows_of(x)
        y = None if x is None else self._output_place(value_of(node), x)
        if x is None or y is None or rows is None or rows[0].stride != rows[1].size:
            return None
        width, code = rows[1].size, fused.DTYPE_CODES[self._result.dtype]

        def add(program: Any, address_of: Callable[[StoragePlace | None], int]) -> None:
            program.reduce(address_of(x), address_of(y), width, code, x.count)

        return NativeOp(node, [x], [y], add)

    def _lower_rotary(self, node: Node) -> NativeOp | None:
        x, cosine, sine = (self._input_place(arg) for arg in node.args[:3])
        token_dim = node.args[3]
        table, sine_table = self._rows_of(cosine), self._rows_of(sine)
        if x is None or cosine is None or sine is None or table is None or x.dims[token_dim].size is not None:
            return None
        tokens, heads, last = x.dims[token_dim], x.dims[3 - token_dim], x.dims[3]
        if last.stride != 1 or x.dims[0].size != 1 or heads.size is None or table != sine_table:
            return None
        y = dense_place(Buffer(heads.size * last.size), (1, None, heads.size, last.size), x.count)
        if y is None:
            return None
        code = fused.DTYPE_CODES[self._result.dtype]

        def add(program: Any, address_of: Callable[[StoragePlace | None], int]) -> None:
            program.rotary(
                address_of(x), tokens.stride, heads.stride, address_of(cosine), address_of(sine), table[0].stride,
                address_of(y),
                heads.size, last.size, code, x.count,
            )  # fmt: skip

        return NativeOp(node, [x, cosine, sine], [y if token_dim == 1 else y.transposed(1, 2)], add)
