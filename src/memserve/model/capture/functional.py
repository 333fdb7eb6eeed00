"""Writes into values become new values, so that a graph can be rewritten like any other.

Modules write in place where it reads well: a router scatters into a mask, a rotary embedding copies the positions of
one axis over another's. Which values share memory is known from the recording, whose tensors are still there. Such a
write becomes a value of its own, carried back through the views that it went through (``slice_scatter``), and what
reads this memory later reads that. Where views are not understood, the write stays, and with it the graph as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from memserve.model.capture.passes import Node, calls, nodes_of, value_of

aten = torch.ops.aten

_SAME = (aten.detach.default, aten.alias.default)
_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""How a new value of a view becomes one of what it is a view of."""
_VIEWS = (*_SAME, *_SCATTERS, aten.view.default, aten.transpose.int, aten.unsqueeze.default, aten.expand.default,
          aten.permute.default, aten.squeeze.dim, aten.reshape.default, aten.to.dtype,
          aten.contiguous.default)  # fmt: skip
"""Views, where they share memory, that are made anew of a new value by the same arguments."""


def drop_writes(graph: fx.Graph) -> None:
    """Replace each write in place that is understood."""
    for node in nodes_of(graph):
        if _writes(node):
            _drop_write(graph, node)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _drop_write(graph: fx.Graph, write: Node) -> None:
    written: Node = write.args[0]
    memory = _memory_of(written)
    pure = None if memory is None else _pure_value(write)
    if pure is None:
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    aliases = [node for node in order if node is not write and _memory_of(node) == memory]
    if any(_writes(alias) and order[alias] < order[write] for alias in aliases):
        return  # this memory is not understood
    way, later, ways = _way_to(written), {}, []
    for alias in aliases:
        readers = [user for user in alias.users if order[user] > order[write]]
        known = _way_to(alias)
        if readers and not _writes(known[-1]):  # else it is of what the next write makes
            later[alias] = readers
            ways.append(known)
    base = way[-1]
    is_known = all(calls(view, *_SAME, *_SCATTERS) for view in way[:-1]) and all(
        calls(view, *_VIEWS) for known in ways for view in known[:-1]
    )
    own = [base, *(alias for alias in aliases if alias.op != "call_function")]
    if not is_known or any(known[-1] is not base for known in ways) or any(map(_is_lasting, own)):
        return
    with graph.inserting_before(write):
        value: Any = graph.call_function(*pure)
        value.meta["value"] = value_of(written)
        whole = value
        for view in way[:-1]:
            if view.target in _SCATTERS:
                source = view.args[0]
                whole = graph.call_function(_SCATTERS[view.target], (source, whole, *view.args[1:]), view.kwargs)
                whole.meta["value"] = value_of(source)
        for alias, known in [*zip(later, ways, strict=True), (write, way)]:
            again = whole
            for view in reversed(known[:-1]):
                again = graph.call_function(view.target, (again, *view.args[1:]), view.kwargs)
                again.meta["value"] = value_of(view)
            for reader in later.get(alias, list(write.users)):
                reader.replace_input_with(alias, again)
    graph.erase_node(write)


def _memory_of(node: Node) -> int | None:
    """What tells apart the memory of values; None: it has none."""
    value = value_of(node)
    address = value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0
    return address or None


def _way_to(node: Node) -> list[Node]:
    """``node``, what it is a view of, and so on to a value of its own."""
    way, memory = [node], _memory_of(node)
    while way[-1].args and isinstance(way[-1].args[0], fx.Node) and calls(way[-1], *_VIEWS):
        if _memory_of(way[-1].args[0]) != memory:
            break
        way.append(way[-1].args[0])
    return way


def _is_lasting(node: Node) -> bool:
    """Whether a write would outlive the step, or be taken for a part of a constant."""
    return node.op != "call_function" or (
        bool(node.all_input_nodes) and all(origin.op == "get_attr" for origin in node.all_input_nodes)
    )


def _pure_value(write: Node) -> tuple[Any, Any, Any] | None:
    """The operation that makes the new value, with its arguments. None: there is none of the same shape and dtype."""
    written = value_of(write.args[0])
    if calls(write, aten.copy_.default):
        source = write.args[1]
        value = value_of(source) if isinstance(source, fx.Node) else None
        alike = isinstance(value, Tensor) and _alike(value, written)
        return (aten.clone.default, (source,), {}) if alike else None  # what is copied may change later
    name = write.target._schema.name.removeprefix("aten::").removesuffix("_")
    pure = getattr(getattr(aten, name, None), write.target._overloadname, None)
    infos = [argument.alias_info for argument in write.target._schema.arguments]
    writes = [info is not None and info.is_write for info in infos]
    if pure is None or pure._schema.is_mutable or not writes[0] or any(writes[1:]):
        return None
    try:
        with torch.inference_mode():
            value = pure(*map_aggregate(write.args, _recorded), **map_aggregate(write.kwargs, _recorded))
    except Exception:  # whatever it is that this operation cannot do with them
        return None
    return (pure, write.args, write.kwargs) if isinstance(value, Tensor) and _alike(value, written) else None


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _recorded(argument: Any) -> Any:
    return value_of(argument) if isinstance(argument, fx.Node) else argument
