"""Graph passes that move views out of the way: what lies between two fused operations should be nothing but views that
a native program knows (:mod:`memserve.model.capture.storage`).

Modules turn dimensions around, cut values into parts and flatten rows where it suits their author. None of that changes
what a value by value operation computes, so such an operation is applied to the value as it lies, and the view follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memserve.model.capture import operations as fused
from memserve.model.capture.passes import Node, calls, drop_dead, nodes_of, replace, same_kind, value_of
from memserve.model.capture.record import item_of

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default)
_PARTS = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)


def move_views(graph: fx.Graph) -> None:
    """Before operations are fused."""
    move_transposes(graph)
    cut_columns(graph)
    move_transposes(graph)


def cut_columns(graph: fx.Graph) -> None:
    """Parts of the last dimension, or of one that was that before two were swapped, become :func:`fused.columns`."""
    for node in nodes_of(graph):
        if not calls(node, item_of) or not calls(node.args[0], *_PARTS):
            continue
        parts, index = node.args
        source, dims = parts.args[0], value_of(node).dim()
        if any(isinstance(argument, fx.Node) for argument in parts.all_input_nodes[1:]):
            continue  # sizes that depend on the tokens
        dim = (*parts.args[2:], parts.kwargs.get("dim", 0))[0] % dims
        start, width = sum(part.shape[dim] for part in value_of(parts)[:index]), value_of(node).shape[dim]
        swapped = _swapped_dims(source)
        if dim == dims - 1 and swapped is None:
            replace(graph, node, fused.columns, (source, start, width))
        elif swapped == {dim, dims - 1}:
            _turn(graph, node, fused.columns, (source.args[0], start, width), source)
    drop_dead(graph)


def move_transposes(graph: fx.Graph) -> None:
    """Products and sums of swapped values are swapped products and sums; two swaps of the same dimensions are none."""
    for node in nodes_of(graph):
        if calls(node, aten.mul.Tensor, aten.add.Tensor) and len(node.args) == 2:
            a, b = node.args
            swapped = _swapped_dims(a)
            if swapped is not None and swapped == _swapped_dims(b) and same_kind(a, b):
                _turn(graph, node, node.target, (a.args[0], b.args[0]), a)
        inner: Node = node.args[0] if node.args else None
        if calls(node, aten.transpose.int) and _swapped_dims(node) == _swapped_dims(inner):
            node.replace_all_uses_with(inner.args[0])
    drop_dead(graph)


def _swapped_dims(node: Any) -> set[int] | None:
    if not calls(node, aten.transpose.int):
        return None
    dims = value_of(node).dim()
    return {dim % dims for dim in node.args[1:3]}


def _turn(graph: fx.Graph, old: Node, target: Any, args: tuple[Any, ...], swap: Node) -> None:
    """``old`` is what ``target`` makes of ``args``, with the two dimensions of ``swap`` swapped."""
    with graph.inserting_before(old):
        inner = graph.call_function(target, args)
        inner.meta["value"] = value_of(old).transpose(*swap.args[1:3])
    replace(graph, old, aten.transpose.int, (inner, *swap.args[1:3]))


def unflatten_rows(graph: fx.Graph) -> None:
    """Norms and gates of flattened rows are flattened norms and gates: rows of a step come first then."""
    for node in nodes_of(graph):
        if calls(node, fused.rms_norm):
            flat, *rest = node.args
            source = flat.args[0] if calls(flat, *_RESHAPES) else None
            if source is not None and value_of(source).shape[-1] == value_of(flat).shape[-1]:
                with graph.inserting_before(node):
                    inner = graph.call_function(fused.rms_norm, (source, *rest))
                inner.meta["value"] = value_of(source)
                replace(graph, node, aten.reshape.default, (inner, *flat.args[1:]))
        elif calls(node, *_RESHAPES) and calls(node.args[0], *_RESHAPES):
            node.args = (node.args[0].args[0], *node.args[1:])
    for node in nodes_of(graph):
        if not calls(node, *_RESHAPES):
            continue
        gate = node.args[0]
        if calls(gate, fused.gated) and len(gate.users) == 1 and value_of(node).dim() == 3:
            with graph.inserting_before(node):
                flat_factors = [_reshaped(graph, factor, node) for factor in gate.args[:2]]
            replace(graph, node, fused.gated, (*flat_factors, gate.args[2]))
    drop_dead(graph)


def _reshaped(graph: fx.Graph, node: Node, like: Node) -> Node:
    source = node.args[0] if calls(node, *_RESHAPES) else node
    view = graph.call_function(aten.reshape.default, (source, *like.args[1:]))
    view.meta["value"] = value_of(source).reshape(value_of(like).shape)
    return view
