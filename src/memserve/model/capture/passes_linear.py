"""Graph pass for the linears: those that read one input become one, all are packed (level 3)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from memserve.model.capture import fused
from memserve.model.capture.fused_linear import PackedLinear
from memserve.model.capture.passes_match import calls, replace
from memserve.model.capture.passes_simplify import Node, add_constant, constant_of, drop_dead, nodes_of, value_of

aten = torch.ops.aten


def normalise_linears(graph: fx.Graph) -> None:
    """``addmm(b, x, W)`` of ``Conv1D`` families becomes ``linear(x, W^T, b)``."""
    for node in nodes_of(graph):
        if calls(node, aten.addmm.default) and not node.kwargs:
            bias, x, weight = node.args
            if constant_of(bias) is not None and constant_of(weight) is not None:
                turned = add_constant(graph, value_of(weight).t())
                replace(graph, node, aten.linear.default, (x, turned, bias))
    drop_dead(graph)


_KEEPS_NUMBERS = (aten.select.int, aten.view.default, aten.reshape.default, aten.slice.Tensor, aten.unsqueeze.default,
                  aten.index.Tensor, aten.squeeze.dim)  # fmt: skip
_POINTWISE = (aten.mul.Tensor, aten.div.Tensor, aten.tanh.default)


def widen_logits(graph: fx.Graph) -> None:
    """The linear whose results are turned into float32 at the end gives float32 itself, unrounded.

    What lies between the two (picking rows, a soft cap, a constant factor) is then computed in float32 as well.
    """
    for node in nodes_of(graph):
        if not calls(node, aten.to.dtype) or node.args[1] != torch.float32 or not _ends_the_graph(node):
            continue
        between, at = [], node.args[0]
        while calls(at, *_KEEPS_NUMBERS, *_POINTWISE) and len(at.users) == 1 and _reads_one(at):
            between.append(at)
            at = at.args[0]
        if calls(at, aten.linear.default) and len(at.users) == 1 and value_of(at).dtype != torch.float32:
            for changed in (*between, at):
                changed.meta["value"] = value_of(changed).float()
            at.meta["wide"] = True
            node.replace_all_uses_with(node.args[0])
    drop_dead(graph)


def _ends_the_graph(node: Node) -> bool:
    return [user.op for user in node.users] == ["output"]


def _reads_one(node: Node) -> bool:
    """The first argument is the only one computed in the model's dtype: numbers and sizes do not hold float32 back."""
    others = [value_of(other) for other in node.all_input_nodes if other is not node.args[0]]
    return not any(isinstance(other, Tensor) and other.is_floating_point() for other in others)


def pack_linears(graph: fx.Graph) -> None:
    """Linears of one input (q, k, v; gate, up) become one, whose output columns are handed out as views."""
    readers: dict[tuple[Node, bool, bool], list[Node]] = defaultdict(list)
    for node in nodes_of(graph):
        if calls(node, aten.linear.default) and all(constant_of(arg) is not None for arg in _parameters(node)):
            readers[node.args[0], len(_parameters(node)) == 2, "wide" in node.meta].append(node)
    for (x, _, _), group in readers.items():
        _pack_group(graph, x, group)
    drop_dead(graph)


def share_tied_embedding(graph: fx.Graph) -> None:
    """An embedding whose table is also a packed linear's weight is read from there: tens of megabytes less."""
    layers: list[PackedLinear] = [node.args[1] for node in nodes_of(graph) if calls(node, fused.linear)]
    tied = {layer.source: layer for layer in layers if layer.source}
    for node in nodes_of(graph):
        table = constant_of(node.args[0]) if calls(node, aten.embedding.default) else None
        layer = tied.get(table.data_ptr()) if table is not None else None
        blocks = layer.blocks() if layer is not None else None
        if table is not None and layer is not None and blocks is not None and table.shape == (layer.n, layer.k):
            replace(graph, node, fused.embed, (node.args[1], fused.TiedEmbedding(layer, blocks)))
    drop_dead(graph)


def _parameters(node: Node) -> list[Node]:
    """Weight, and bias if there is one."""
    return [arg for arg in node.args[1:] if arg is not None]


def _pack_group(graph: fx.Graph, x: Node, group: list[Node]) -> None:
    weights: list[Tensor] = [value_of(node.args[1]) for node in group]
    biases = [value_of(node.args[2]) for node in group] if len(_parameters(group[0])) == 2 else None
    with graph.inserting_before(group[0]):
        layer: Any = PackedLinear(weights, biases, wide="wide" in group[0].meta)
        whole = graph.call_function(fused.linear, (x, layer))
    whole.meta["value"] = value_of(group[0]).new_empty(*value_of(group[0]).shape[:-1], sum(w.shape[0] for w in weights))
    start = 0
    for node in group:
        width = value_of(node).shape[-1]
        view = whole if len(group) == 1 else replace(graph, node, fused.columns, (whole, start, width))
        if len(group) == 1:
            node.replace_all_uses_with(whole)
        view.meta["value"] = value_of(node)
        start += width
