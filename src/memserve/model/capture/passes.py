"""Graph passes that replace several operations by one: patterns that modules spell out, and their linears.

Each matcher starts at an operation that only this pattern has (``rsqrt`` for RMSNorm, ``cat`` of a negated half for
rotary embedding), walks to its neighbours, and does nothing when one of them is not as expected. What no matcher
recognises runs as aten: slower, never wrong. Linears that read the same input are joined, and all are packed.

Graph passes that change no result: fold constants, drop copies that copy nothing, share equal work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from memserve.model.capture import operations as fused
from memserve.model.capture.record import attend, size_of, times
from memserve.model.experts import Layer as ExpertLayer
from memserve.model.experts import PackedExperts, pack_experts, run_experts
from memserve.model.linears import JoinedLinear, PackedLinear
from memserve.model.loading.pages import NO_PAGES, WeightPages
from memserve.model.loading.stored import NOT_STORED, StoredWeights
from memserve.model.lora import adapt
from memserve.model.quantised import QuantisedEmbedding, StoredLinear
from memserve.model.states.recurrence import run_operation

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
    """True when the node may be shared, moved or dropped: no mutation, no randomness, no attention, no state."""
    if node.op != "call_function" or node.target in (attend, run_operation):
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
    if calls(node, aten.slice.Tensor) and _takes_all_tokens(node):
        return True
    if calls(node, aten.mul.Tensor) and node.args[1] == 1.0 and type(node.args[1]) in (int, float):
        return same_kind(node, node.args[0])
    if node.target not in _IDENTITY_IF_SAME or not isinstance(source, fx.Node):
        return False
    a, b = value_of(source), value_of(node)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    same_layout = a.shape == b.shape and a.stride() == b.stride()
    return same_layout and a.dtype == b.dtype and a.device == b.device


def _takes_all_tokens(node: Node) -> bool:
    """``x[..., -T:]`` of a dimension of T, as layers with a state cut off what came before their tokens."""
    start, end = (*node.args[2:], None, None)[:2]
    if not calls(start, times) or start.args[1] != -1 or not calls(start.args[0], size_of):
        return False
    is_rest = end is None or (type(end) is int and end >= 1 << 31)
    return is_rest and value_of(node).shape == value_of(node.args[0]).shape


def share_equal_work(graph: fx.Graph) -> None:
    """Pure nodes with the same operation and arguments become one (``cos.unsqueeze(1)`` of every layer)."""
    first_nodes: dict[Any, Node] = {}
    for node in nodes_of(graph):
        if node.op != "call_function" or not is_pure(node) or node.target is size_of:
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        earlier = first_nodes.setdefault(key, node)
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


_KEEPS_NUMBERS = (aten.select.int, aten.view.default, aten.reshape.default, aten.slice.Tensor, aten.unsqueeze.default,
                  aten.index.Tensor, aten.squeeze.dim)  # fmt: skip
_RESHAPES = (aten.view.default, aten.reshape.default)
_POINTWISE = (aten.mul.Tensor, aten.div.Tensor, aten.tanh.default)
_CASTS = {aten.to.dtype, aten.type_as.default, aten._to_copy.default, aten.to.other}


def calls(node: Any, *targets: Any) -> bool:
    """True when ``node`` calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def same_kind(a: Node, b: Node) -> bool:
    """True when both values have one shape and one dtype, so that no broadcast or promotion hides between them."""
    x, y = value_of(a), value_of(b)
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype


def replace(graph: fx.Graph, old: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """Replace ``old`` by a call of ``target`` for all of its users."""
    with graph.inserting_before(old):
        node = graph.call_function(target, args)
    node.meta["value"] = value_of(old)
    old.replace_all_uses_with(node)
    return node


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_factor(product: Node, factor: Node) -> Any:
    a, b = product.args[:2]
    return b if a is factor else a


def match_rms_norms(graph: fx.Graph) -> None:
    """``w * cast(x * rsqrt(mean(x^2) + eps))`` and ``cast(w * x * rsqrt(...))`` become :func:`fused.rms_norm`."""
    for node in nodes_of(graph):
        if calls(node, aten.rsqrt.default) or (calls(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5):
            _match_rms_norm(graph, node)
        elif calls(node, aten.rms_norm.default) and len(node.args) == 4 and None not in node.args:
            x, shape, weight, eps = node.args
            if constant_of(weight) is not None and len(shape) == 1:
                _emit_rms_norm(graph, node, x, weight, eps, round_first=False)
    drop_dead(graph)


def _match_rms_norm(graph: fx.Graph, rsqrt: Node) -> None:
    shifted = rsqrt.args[0]
    if not calls(shifted, aten.add.Tensor) or not isinstance(shifted.args[1], float):
        return
    mean = shifted.args[0]
    if not calls(mean, aten.mean.dim) or list(mean.args[1]) != [-1] or mean.args[2] is not True:
        return
    wide = _squared(mean.args[0])
    normed = _only_user(rsqrt)
    if wide is None or not calls(normed, aten.mul.Tensor) or _other_factor(normed, rsqrt) is not wide:
        return
    x = wide.args[0] if calls(wide, *_CASTS) else wide
    last, weight, round_first = _scaled(normed, value_of(x).dtype)
    if value_of(x).shape != value_of(last).shape and calls(x, *_RESHAPES):
        x = x.args[0]
    if value_of(x).shape != value_of(last).shape:
        return
    if weight is not None and value_of(last).dtype == value_of(x).dtype and value_of(wide).dtype == torch.float32:
        _emit_rms_norm(graph, last, x, weight, shifted.args[1], round_first)


def _squared(node: Any) -> Node | None:
    if calls(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if calls(node, aten.mul.Tensor) and node.args[0] is node.args[1]:
        return node.args[0]
    return node.args[0] if calls(node, aten.square.default) else None


def _scaled(normed: Node, dtype: torch.dtype) -> tuple[Node, Node | None, bool]:
    """What follows the normalised value: (last node of the pattern, weight or None, cast before the weight?).
    ``dtype``: of the value before."""
    round_first, last = False, normed
    user: Node = _only_user(last)
    if calls(user, *_RESHAPES) and value_of(user).shape[-1] == value_of(normed).shape[-1]:
        last, user = user, _only_user(user)  # of groups, of which there is a single one
    if calls(user, *_CASTS):
        round_first, last, user = True, user, _only_user(user)
    if not calls(user, aten.mul.Tensor):
        return last, None, round_first
    weight = _other_factor(user, last)
    if constant_of(weight) is None or weight.meta["value"].shape != value_of(last).shape[-1:]:
        return last, None, round_first
    last, after = user, _only_user(user)
    if not round_first and calls(after, *_CASTS) and value_of(after).dtype == dtype:
        last = after
    return last, weight, round_first


def _emit_rms_norm(graph: fx.Graph, last: Node, x: Any, weight: Any, eps: Any, round_first: bool) -> None:
    wide = add_constant(graph, value_of(weight).float().contiguous())
    replace(graph, last, fused.rms_norm, (x, wide, eps, round_first))


def match_rotary(graph: fx.Graph) -> None:
    """``x * cos + cat(-x[half:], x[:half]) * sin`` becomes :func:`fused.rotary`."""
    for node in nodes_of(graph):
        if calls(node, aten.cat.default):
            _match_rotary(graph, node)
    drop_dead(graph)


def _match_rotary(graph: fx.Graph, cat: Node) -> None:
    parts = cat.args[0]
    by_sine = _only_user(cat)
    if not isinstance(parts, list | tuple) or len(parts) != 2 or not calls(parts[0], aten.neg.default):
        return
    upper, lower = parts[0].args[0], parts[1]
    if not (calls(upper, aten.slice.Tensor) and calls(lower, aten.slice.Tensor) and calls(by_sine, aten.mul.Tensor)):
        return
    x, total = lower.args[0], _only_user(by_sine)
    if upper.args[0] is not x or not calls(total, aten.add.Tensor) or not _halves(x, lower, upper):
        return
    by_cosine, sine = _other_factor(total, by_sine), _other_factor(by_sine, cat)
    if not calls(by_cosine, aten.mul.Tensor) or x not in by_cosine.args:
        return
    cosine = _other_factor(by_cosine, x)
    token_dim = _token_dim(x, cosine, sine)
    if token_dim is not None and same_kind(x, total):
        replace(graph, total, fused.rotary, (x, cosine, sine, token_dim))


def _halves(x: Node, lower: Node, upper: Node) -> bool:
    dims = value_of(x).dim()
    half = value_of(x).shape[-1] // 2

    def bounds(node: Node) -> tuple[Any, ...]:
        dim, start, end = (*node.args[1:], None, None, None)[:3]
        return dim % dims, start or 0, end

    low, high = bounds(lower), bounds(upper)
    return low == (dims - 1, 0, half) and high[:2] == (dims - 1, half) and (high[2] is None or high[2] >= 2 * half)


def _token_dim(x: Node, cosine: Any, sine: Any) -> int | None:
    """1 or 2: where the tokens are in ``x [1, T, H, D]`` or ``[1, H, T, D]``; None when the tables do not fit."""
    if not isinstance(cosine, fx.Node) or not isinstance(sine, fx.Node) or not same_kind(cosine, sine):
        return None
    shape, table = value_of(x).shape, value_of(cosine).shape
    if value_of(x).dim() != 4 or value_of(x).dtype != value_of(cosine).dtype or shape[0] != 1:
        return None
    fits = [dim for dim in (1, 2) if table == (1, *(shape[d] if d == dim else 1 for d in (1, 2)), shape[3])]
    return fits[0] if len(fits) == 1 else None


_GATES = {aten.silu.default: "silu", aten.gelu.default: "gelu"}


def match_gates(graph: fx.Graph) -> None:
    """``act(gate) * up`` becomes :func:`fused.gated` (SiLU, both GELUs)."""
    for node in nodes_of(graph):
        if not calls(node, *_GATES):
            continue
        product = _only_user(node)
        if calls(product, aten.mul.Tensor) and same_kind(node, product):
            gate, up = node.args[0], _other_factor(product, node)
            if isinstance(up, fx.Node) and same_kind(gate, up):
                kind = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else _GATES[node.target]
                replace(graph, product, fused.gated, (gate, up, kind))
    drop_dead(graph)


def match_products(graph: fx.Graph) -> None:
    """What only the CPU's kernel knows becomes :func:`fused.gated` as well: ``sigmoid(gate) * up``, a plain product of
    two values, and a SiLU in float32 that multiplies a 16-bit value before it is rounded."""
    for node in nodes_of(graph):
        if not calls(node, aten.mul.Tensor) or not all(isinstance(factor, fx.Node) for factor in node.args):
            continue
        a, b = node.args
        for gate, up in ((a, b), (b, a)):
            if calls(gate, aten.sigmoid.default) and same_kind(gate.args[0], up) and same_kind(up, node):
                replace(graph, node, fused.gated, (gate.args[0], up, "sigmoid"))
                break
            end: Node = _only_user(node)
            wide: Node = gate.args[0] if calls(gate, aten.silu.default) else None
            if calls(wide, *_CASTS) and calls(end, *_CASTS) and same_kind(wide.args[0], up) and same_kind(up, end):
                replace(graph, end, fused.gated, (wide.args[0], up, "silu_wide"))
                break
        else:
            if same_kind(a, b) and same_kind(b, node) and {a.op, b.op} == {"call_function"} and value_of(a).dim() == 3:
                replace(graph, node, fused.gated, (a, b, "product"))
    drop_dead(graph)


def match_residuals(graph: fx.Graph) -> None:
    """``rms_norm(a + b)`` becomes :func:`fused.add_rms_norm`, which gives the sum and the norm in one pass."""
    for norm in nodes_of(graph):
        if not calls(norm, fused.rms_norm):
            continue
        total = norm.args[0]
        plain = calls(total, aten.add.Tensor) and len(total.args) == 2 and not total.kwargs
        if plain and all(isinstance(a, fx.Node) and same_kind(a, total) for a in total.args):
            _fuse_residual(graph, total, norm)
    drop_dead(graph)


def _fuse_residual(graph: fx.Graph, total: Node, norm: Node) -> None:
    values = (value_of(total), value_of(norm))
    fused_node = replace(graph, total, fused.add_rms_norm, (*total.args, *norm.args[1:]))
    fused_node.meta["value"] = values
    with graph.inserting_after(fused_node):
        second = graph.call_function(fused.item, (fused_node, 1))
        first = graph.call_function(fused.item, (fused_node, 0))
    first.meta["value"], second.meta["value"] = values
    norm.replace_all_uses_with(second)
    fused_node.replace_all_uses_with(first, delete_user_cb=lambda user: user not in (first, second))


# -- linears


def normalise_linears(graph: fx.Graph) -> None:
    """``addmm(b, x, W)`` of ``Conv1D`` families becomes ``linear(x, W^T, b)``."""
    for node in nodes_of(graph):
        if calls(node, aten.addmm.default) and not node.kwargs:
            bias, x, weight = node.args
            if constant_of(bias) is not None and constant_of(weight) is not None:
                turned = add_constant(graph, value_of(weight).t())
                replace(graph, node, aten.linear.default, (x, turned, bias))
    drop_dead(graph)


def widen_logits(graph: fx.Graph) -> None:
    """If the results of a linear are cast to float32 at the end, let it return float32 itself, unrounded.

    Operations between the two (picking rows, a soft cap, a constant factor) are then computed in float32 as well.
    """
    for node in nodes_of(graph):
        if not calls(node, aten.to.dtype) or node.args[1] != torch.float32 or not _ends_the_graph(node):
            continue
        between, source = [], node.args[0]
        while (calls(source, adapt) or (calls(source, *_KEEPS_NUMBERS, *_POINTWISE) and _reads_one(source))) and (
            len(source.users) == 1
        ):
            between.append(source)
            source = source.args[0]
        if calls(source, aten.linear.default) and len(source.users) == 1 and value_of(source).dtype != torch.float32:
            for changed in (*between, source):
                changed.meta["value"] = value_of(changed).float()
            source.meta["wide"] = True
            node.replace_all_uses_with(node.args[0])
    drop_dead(graph)


def _ends_the_graph(node: Node) -> bool:
    return [user.op for user in node.users] == ["output"]


def _reads_one(node: Node) -> bool:
    """Whether the first argument is the only floating-point tensor: no other one can force the model's dtype."""
    operands = [value_of(operand) for operand in node.all_input_nodes if operand is not node.args[0]]
    return not any(isinstance(operand, Tensor) and operand.is_floating_point() for operand in operands)


Packs = dict[tuple[Any, ...], tuple[PackedLinear | JoinedLinear | StoredLinear | PackedExperts, list[Tensor]]]
"""Packed linears and experts by the tensors that they were made of, which are kept: no other may get their
addresses."""


def pack_linears(
    graph: fx.Graph, packs: Packs, pages: WeightPages = NO_PAGES, stored: StoredWeights = NOT_STORED
) -> None:
    """Linears of one input (q, k, v; gate, up) become one linear, with views of its output columns.

    ``packs``: those of other graphs of the same module, which are used again. ``pages``: of its weights, which are
    dropped as they are packed: the largest first, while little is packed. ``stored``: those that stay quantised, which
    are joined as far as their formats go."""
    readers: dict[tuple[Node, bool, bool], list[Node]] = defaultdict(list)
    for node in nodes_of(graph):
        if calls(node, aten.linear.default) and all(constant_of(arg) is not None for arg in _parameters(node)):
            readers[node.args[0], len(_parameters(node)) == 2, "wide" in node.meta].append(node)
    uses = _uses(graph)
    for group in sorted(readers.values(), key=lambda group: -_values_of(group)):
        weights = [value_of(node.args[1]) for node in group]
        first = 0
        for count in stored.parts(weights):
            _pack_group(graph, group[first : first + count], packs, stored)
            first += count
        spare = [weight for weight in weights if pages.is_mapped(weight) or uses[weight.data_ptr()] == 1]
        if len(spare) < len(weights):
            share_tied_embedding(graph)  # it may be all else that reads them
            remaining = _uses(graph)
            spare = [weight for weight in weights if pages.is_mapped(weight) or not remaining[weight.data_ptr()]]
        pages.release_values(*spare)
    drop_dead(graph)


def pack_expert_layers(
    graph: fx.Graph, packs: Packs, pages: WeightPages = NO_PAGES, stored: StoredWeights = NOT_STORED
) -> None:
    """Each expert becomes a layer up and a layer down. The other arguments: see :func:`pack_linears`."""

    def pack(weight: Tensor, bias: Tensor | None) -> ExpertLayer:
        biases = None if bias is None else [bias]
        return stored.layer([weight], biases, wide=False) or PackedLinear([weight.contiguous()], biases)

    for node in nodes_of(graph):
        if calls(node, run_experts):
            module = node.args[3]
            key = (id(module),)
            if key not in packs:
                packs[key] = pack_experts(module, pack), []
                pages.release_values(*(value.detach() for value in module.parameters(recurse=False)))
            replace(graph, node, run_experts, (*node.args[:3], packs[key][0]))
    drop_dead(graph)


def _uses(graph: fx.Graph) -> Counter[int]:
    """How many operations read each constant, by its address."""
    constants = [(constant, node) for node in nodes_of(graph) if (constant := constant_of(node)) is not None]
    return Counter(constant.data_ptr() for constant, node in constants for _ in node.users)


def _values_of(group: list[Node]) -> int:
    """How many values the weights of ``group`` have."""
    return sum(int(value_of(node.args[1]).numel()) for node in group)


def share_tied_embedding(graph: fx.Graph) -> None:
    """If an embedding's table is also a packed linear's weight, read it from there: this saves tens of megabytes."""
    layers = [node.args[1] for node in nodes_of(graph) if calls(node, fused.linear)]
    ours = [layer for layer in layers if isinstance(layer, PackedLinear | StoredLinear)]
    tied = {layer.source: layer for layer in ours if layer.source}
    for node in nodes_of(graph):
        table = constant_of(node.args[0]) if calls(node, aten.embedding.default) else None
        layer = tied.get(table.data_ptr()) if table is not None else None
        if table is None or layer is None or table.shape != layer.shape:
            continue
        blocks = layer.packed_blocks() if isinstance(layer, PackedLinear) else None
        if isinstance(layer, StoredLinear):
            replace(graph, node, fused.embed, (node.args[1], QuantisedEmbedding(layer, table.dtype)))
        elif blocks is not None:
            replace(graph, node, fused.embed, (node.args[1], fused.TiedEmbedding(layer, blocks)))
    drop_dead(graph)


def keep_stored_embeddings(graph: fx.Graph, packs: Packs, stored: StoredWeights) -> None:
    """An embedding whose table stays quantised, and is no linear's weight, reads rows of that."""
    for node in nodes_of(graph):
        table = constant_of(node.args[0]) if calls(node, aten.embedding.default) else None
        if table is None or stored.of(table) is None:
            continue
        layer = (
            packs[_key(False, [table])][0] if _key(False, [table]) in packs else stored.layer([table], None, wide=False)
        )
        if isinstance(layer, StoredLinear):
            packs[_key(False, [table])] = layer, [table]
            replace(graph, node, fused.embed, (node.args[1], QuantisedEmbedding(layer, table.dtype)))
    drop_dead(graph)


def _parameters(node: Node) -> list[Node]:
    """Weight, and bias if there is one."""
    return [arg for arg in node.args[1:] if arg is not None]


def _pack_group(graph: fx.Graph, group: list[Node], packs: Packs, stored: StoredWeights) -> None:
    x = group[0].args[0]  # which may be a linear that was packed meanwhile
    weights: list[Tensor] = [value_of(node.args[1]) for node in group]
    biases = [value_of(node.args[2]) for node in group] if len(_parameters(group[0])) == 2 else None
    sources, wide = [*weights, *(biases or ())], "wide" in group[0].meta
    key = _key(wide, sources)
    if key not in packs:
        kind = JoinedLinear if weights[0].is_cuda else PackedLinear
        packs[key] = stored.layer(weights, biases, wide=wide) or kind(weights, biases, wide=wide), sources
        packs.setdefault(_key(wide, sources), packs[key])  # where joined weights have moved
    layer: Any = packs[key][0]
    with graph.inserting_before(group[0]):
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


def _key(wide: bool, sources: list[Tensor]) -> tuple[Any, ...]:
    return (wide, *((source.data_ptr(), source.shape, source.stride()) for source in sources))
