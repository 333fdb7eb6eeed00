"""Graph pass for the linears: those that read one input become one, all are packed (level 3)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from memserve.model import fused
from memserve.model.fused_linear import PackedLinear
from memserve.model.passes_match import calls, replace
from memserve.model.passes_simplify import Node, add_constant, constant_of, drop_dead, nodes_of, value_of

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


def pack_linears(graph: fx.Graph) -> None:
    """Linears of one input (q, k, v; gate, up) become one, whose output columns are handed out as views."""
    readers: dict[tuple[Node, bool], list[Node]] = defaultdict(list)
    for node in nodes_of(graph):
        if calls(node, aten.linear.default) and all(constant_of(arg) is not None for arg in _parameters(node)):
            readers[node.args[0], len(_parameters(node)) == 2].append(node)
    for (x, _), group in readers.items():
        _pack_group(graph, x, group)
    drop_dead(graph)


def _parameters(node: Node) -> list[Node]:
    """Weight, and bias if there is one."""
    return [arg for arg in node.args[1:] if arg is not None]


def _pack_group(graph: fx.Graph, x: Node, group: list[Node]) -> None:
    weights: list[Tensor] = [value_of(node.args[1]) for node in group]
    biases = [value_of(node.args[2]) for node in group] if len(_parameters(group[0])) == 2 else None
    with graph.inserting_before(group[0]):
        layer: Any = PackedLinear(weights, biases)
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
