"""Graph passes that change no result: fold constants, drop copies that copy nothing, share equal work."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from memserve.model.capture.record import attend, size_of

aten = torch.ops.aten

Node: TypeAlias = Any
"""An ``fx.Node``. The declared type of its arguments is a union of everything, which no walk over a graph can use."""

_IDENTITY_IF_SAME = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten._to_copy.default,
                     aten.contiguous.default, aten.type_as.default, aten.view.default, aten.reshape.default,
                     aten.expand.default}  # fmt: skip
_ALWAYS_IDENTITY = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def nodes_of(graph: fx.Graph) -> list[Node]:
    """A snapshot of the nodes, so that the graph may be rewritten during a walk over them."""
    return list(graph.nodes)


def is_pure(node: Node) -> bool:
    """True when the node may be shared, moved or dropped: no mutation, no randomness, no attention."""
    if node.op != "call_function" or node.target is attend:
        return node.op in ("get_attr", "placeholder")
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return schema is None or not (schema.is_mutable or torch.Tag.nondeterministic_seeded in tags)


def has_mutation(graph: fx.Graph) -> bool:
    """True when some operation writes into one of its inputs: values then alias, and only packing is safe."""
    schemas = (getattr(node.target, "_schema", None) for node in nodes_of(graph) if node.op == "call_function")
    return any(schema is not None and schema.is_mutable for schema in schemas)


def value_of(node: Any) -> Any:
    """The node's value while recording (tensors at the first recording's sizes)."""
    return node.meta.get("value")


def constant_of(node: Any) -> Tensor | None:
    """The tensor behind a constant node, else None."""
    return value_of(node) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def add_constant(graph: fx.Graph, value: Tensor) -> Node:
    """A new constant at the front of the graph."""
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.create_node("get_attr", "folded")
    node.meta["value"] = value
    return node


def fold_constants(graph: fx.Graph) -> None:
    """Replace operations on constants alone by their results (``1 + weight``, ``weight.float()``)."""
    for node in nodes_of(graph):
        inputs = node.all_input_nodes
        constant = bool(inputs) and all(i.op == "get_attr" for i in inputs)
        if node.op == "call_function" and constant and is_pure(node) and isinstance(value_of(node), Tensor):
            node.replace_all_uses_with(add_constant(graph, value_of(node)))


def drop_identities(graph: fx.Graph) -> None:
    """Remove casts to the same dtype, detaches, and reshapes to the same shape."""
    for node in nodes_of(graph):
        if node.op == "call_function" and _is_identity(node):
            node.replace_all_uses_with(node.args[0])


def _is_identity(node: Node) -> bool:
    if node.target in _ALWAYS_IDENTITY:
        return True
    source = node.args[0] if node.args else None
    if node.target not in _IDENTITY_IF_SAME or not isinstance(source, fx.Node):
        return False
    a, b = value_of(source), value_of(node)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    same_layout = a.shape == b.shape and a.stride() == b.stride()
    return same_layout and a.dtype == b.dtype and a.device == b.device


def share_equal_work(graph: fx.Graph) -> None:
    """Pure nodes with the same operation and arguments become one (``cos.unsqueeze(1)`` of every layer)."""
    seen: dict[Any, Node] = {}
    for node in nodes_of(graph):
        if node.op != "call_function" or not is_pure(node) or node.target is size_of:
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        earlier = seen.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)


def drop_dead(graph: fx.Graph) -> None:
    """Remove nodes without users, unless they write or attend."""
    for node in reversed(nodes_of(graph)):
        if node.op in ("call_function", "get_attr") and not node.users and is_pure(node):
            graph.erase_node(node)


def simplify(graph: fx.Graph) -> None:
    """All of the above, for a graph without mutation."""
    drop_identities(graph)
    fold_constants(graph)
    share_equal_work(graph)
    drop_dead(graph)
