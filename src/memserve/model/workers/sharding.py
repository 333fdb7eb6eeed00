"""Cuts a model for one worker, as :mod:`memserve.model.workers.plans` says: nothing here knows a family.

Columns of ``q``, ``k``, ``v`` and of the MLP's first linears stay with the heads and columns that a worker has; rows of
the linears behind them too, and their results are summed over the workers. Of experts each worker has some columns of
every one. The vocabulary is cut as well: each worker embeds its own tokens, and computes their logits. Layers of other
stages are left out; where they begin and end, hidden states are handed on. LoRA adapters are cut as the linears that
they add to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memserve.base.errors import UserError
from memserve.base.kv_layout import COLUMN_UNIT, Share, even
from memserve.base.states import StateRange, StateShare, share_state
from memserve.base.types import KVGeometry
from memserve.model.attention.context import EXPANSION_ATTRIBUTE
from memserve.model.attention.expansions import Expansion
from memserve.model.experts import cut_experts, inner_dim_of
from memserve.model.lora import AdaptedLinear, Adapters
from memserve.model.states.layers import StateLayer, StateLayers, keep_share, states_of
from memserve.model.workers import group as crew
from memserve.model.workers.cuts import WeightCuts
from memserve.model.workers.plans import (
    COLUMNS,
    HEAD_WEIGHTS,
    PACKED,
    LayerPlan,
    is_attending,
    linears_of,
    plan_division,
    refuse_division,
)
from memserve.model.workers.recurrent import LayerCut, SummedLinear, apply_cut, plan_cut

_HEADS_OF = {
    "q_proj": "queries", "k_proj": "keys", "v_proj": "values", "o_proj": "queries", "out_proj": "queries",
    "q_b_proj": "queries", "kv_b_proj": "keys", "g_proj": "queries",
}  # fmt: skip
_FEW = 8
"""Values that stand in for logits: enough to compare forwards by."""


def shard(module: Any, share: Share, geometry: KVGeometry, adapters: Adapters | None = None) -> tuple[int, ...]:
    """Leave of ``module`` and its ``adapters`` what ``share`` has; returns how many tokens of the vocabulary each part
    has.

    Raises :class:`UserError` for a model whose plan asks for more than can be cut.
    """
    division = plan_division(module, geometry, only_stages=share.parts == 1)
    layers, cuts = division.layers, WeightCuts(module)
    vocabularies = _cut_vocabulary(module, share, cuts)
    if states_of(module):
        _cut_states(module, layers, share, cuts)
    for index in share.own_layers:
        _cut_layer(layers[index], division.plans[index], share, geometry, adapters, cuts)
    if share.stages > 1:
        _leave_out(module, layers, share)
        if not share.is_last_stage:
            module.set_output_embeddings(_NoLogits(module.get_output_embeddings()))
    if adapters is not None:
        adapters.refuse_wholes()
        adapters.keep_sites({part.site for part in module.modules() if isinstance(part, AdaptedLinear)})
    cuts.finish(module)
    return vocabularies


# -- columns and rows


def _cut_layer(
    layer: Any, plan: LayerPlan, share: Share, geometry: KVGeometry, adapters: Adapters | None, cuts: WeightCuts
) -> None:
    linears, expanding = linears_of(layer), _expanding_linears(layer, plan)
    for name, style in plan.styles.items():
        linear = linears[name]
        base = linear.linear if isinstance(linear, AdaptedLinear) else linear
        parent, _, attribute = name.rpartition(".")
        unit = cuts.column_unit
        first, count = _range_of(layer.get_submodule(parent), attribute, base, style, share, geometry, unit)
        plain = _cut_linear(base, style, first, count, cuts, keeps_bias=share.part == 0)
        cut: nn.Module = plain
        if isinstance(linear, AdaptedLinear) and adapters is not None:
            index = _packed_columns(base, first, count) if style == PACKED else slice(first, first + count)
            adapters.cut_site(linear.site, index, columns=style in (COLUMNS, PACKED), keeps_bias=share.part == 0)
            cut = AdaptedLinear(plain, linear.site)
        setattr(layer.get_submodule(parent), attribute, cut if style in (COLUMNS, PACKED) else SummedLinear(cut))
        if attribute == "q_proj":
            _cut_head_weights(layer.get_submodule(parent), share)
    for name in expanding:
        _cut_expansion(*name.rpartition(".")[::2], layer, share)
    for name in plan.experts:
        parent, _, attribute = name.rpartition(".")
        experts = layer.get_submodule(name)
        columns = _columns_of(inner_dim_of(experts), share, cuts.column_unit)
        cut_experts(experts, *columns, keeps_bias=share.part == 0, take=cuts.take)
        setattr(layer.get_submodule(parent), attribute, _SummedExperts(experts))


def _range_of(
    parent: Any, name: str, linear: nn.Linear, style: str, share: Share, g: KVGeometry, unit: int
) -> tuple[int, int]:
    """Which columns (or rows, of a ``rowwise`` linear) this worker has: first and count. ``unit``: see
    :func:`_columns_of`."""
    size = linear.in_features if style not in (COLUMNS, PACKED) else linear.out_features
    kind = _HEADS_OF.get(name, "all" if is_attending(parent) else None)  # one linear for all three has heads outermost
    expansion: Expansion | None = getattr(parent, EXPANSION_ATTRIBUTE, None)
    if kind is not None and expansion is not None:  # all heads read the latents: each worker has some of them
        first, count = _heads_of(expansion, share)
        of_a_head = size // expansion.heads
        return first * of_a_head, count * of_a_head
    if kind == "queries" and share.shares_heads:
        of_a_query = size // sum(share.queries)
        return sum(share.queries[: share.part]) * of_a_query, share.queries[share.part] * of_a_query
    if kind is not None:
        of_a_head = size // g.num_kv_heads
        return share.first_head * of_a_head, share.heads[share.part] * of_a_head
    return _columns_of(size // 2 if style == PACKED else size, share, unit)


def _cut_head_weights(part: Any, share: Share) -> None:
    """Of an attention that has a weight for each of its heads."""
    weights = getattr(part, HEAD_WEIGHTS, None)
    if isinstance(weights, nn.Parameter):
        of_a_head = len(weights) // sum(share.heads)
        first, count = share.first_head * of_a_head, share.heads[share.part] * of_a_head
        setattr(part, HEAD_WEIGHTS, nn.Parameter(weights.detach()[first : first + count].clone(), requires_grad=False))


def _columns_of(size: int, share: Share, unit: int) -> tuple[int, int]:
    """First and count, at multiples of ``unit`` where there are enough of them."""
    units = (size_of_unit for size_of_unit in (unit, COLUMN_UNIT) if size >= 4 * share.parts * size_of_unit)
    columns = even(size, share.parts, next(units, 1))
    return sum(columns[: share.part]), columns[share.part]


def _heads_of(expansion: Expansion, share: Share) -> tuple[int, int]:
    """Heads of this worker, of layers that keep latents: first and count. Raises :class:`UserError` where there are too
    few."""
    if share.parts > expansion.heads:
        text = f"{share.parts} workers cannot share the {expansion.heads} heads that read the latents of this model"
        hint = f"use --tensor-parallel 1 to {expansion.heads}; more workers by --pipeline-parallel"
        raise UserError(text, hint=hint, param="tensor")
    heads = even(expansion.heads, share.parts)
    return sum(heads[: share.part]), heads[share.part]


def _expanding_linears(layer: Any, plan: LayerPlan) -> list[str]:
    """Names of the linears that expand latents, of those that are cut."""
    parts = dict(layer.named_modules())
    owners = {name: getattr(parts[name.rpartition(".")[0]], EXPANSION_ATTRIBUTE, None) for name in plan.styles}
    return [name for name, expansion in owners.items() if expansion is not None and expansion.is_of(parts[name])]


def _cut_expansion(parent: str, name: str, layer: Any, share: Share) -> None:
    """Let a part of ``layer`` that keeps latents expand those of its heads alone, once its linears are cut."""
    part = layer.get_submodule(parent)
    expansion: Expansion = getattr(part, EXPANSION_ATTRIBUTE)
    heads = _heads_of(expansion, share)[1]
    setattr(part, EXPANSION_ATTRIBUTE, expansion.of_heads(part.get_submodule(name), heads))


def _cut_linear(
    linear: nn.Linear, style: str, first: int, count: int, cuts: WeightCuts, *, keeps_bias: bool
) -> nn.Linear:
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if style == COLUMNS:
        return _columns(linear, first, count, cuts)
    if style == PACKED:
        columns = _packed_columns(linear, first, count)
        return _linear(cuts.take(weight, 0, columns), None if bias is None else bias[columns])
    return _linear(cuts.take_columns(weight, first, count), bias if keeps_bias else None)


def _packed_columns(linear: nn.Linear, first: int, count: int) -> Tensor:
    """The same columns of both halves of ``linear``."""
    half = linear.out_features // 2
    return torch.cat([torch.arange(begin, begin + count) for begin in (first, half + first)])


def _columns(linear: nn.Linear, first: int, count: int, cuts: WeightCuts) -> nn.Linear:
    bias = None if linear.bias is None else linear.bias.detach()[first : first + count]
    return _linear(cuts.take_rows(linear.weight.detach(), first, count), bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """``weight`` is the linear's own from here on."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear


class _SummedExperts(nn.Module):
    """Experts of which each worker has some columns: their results are summed."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """As that of experts: ``[T, hidden]``."""
        return crew.all_reduce(self.experts(*args, **options)[None])[0]


# -- recurrent states


def share_states(module: Any, layers: nn.ModuleList, share: Share) -> StateShare:
    """What this worker has of the states of ``module``, which is not cut yet: those of its stage, by heads or channels
    where layers can be cut so, else whole."""
    return _share_layers(states_of(module), layers, share)[0]


def _share_layers(
    states: StateLayers, layers: nn.ModuleList, share: Share
) -> tuple[StateShare, list[tuple[StateLayer, LayerCut | None]]]:
    """And the layers of its stage, with what it has of each; None: all."""
    own = {id(part) for index in share.own_layers for part in layers[index].modules()}
    parts = states.geometry.parts
    ranges: list[list[StateRange]] = [[] for _ in parts]
    cuts = list[tuple[StateLayer, LayerCut | None]]()
    for layer in (layer for layer in states.layers if id(layer.module) in own):
        cut = plan_cut(layer, parts, share.part, share.parts) if share.parts > 1 else None
        cuts.append((layer, cut))
        for key, number in layer.parts.items():
            whole = [StateRange(0, parts[number].shape[0], share.part == 0)]
            ranges[number] = whole if cut is None else cut.states[key]
    return share_state(states.geometry, ranges), cuts


def _cut_states(module: Any, layers: nn.ModuleList, share: Share, cuts: WeightCuts) -> None:
    states = states_of(module)
    held, plans = _share_layers(states, layers, share)
    numbers: list[int] = []  # of layers that attend; they matter to stages alone
    if share.stages > 1:
        numbers = sorted({number for number in states.attending if number is not None})
        if numbers != list(states.attending):
            raise refuse_division(module, "one module attends in several of its layers")
    for layer, cut in plans:
        if cut is not None:
            apply_cut(layer.module, cut, share.part, cuts)
    carriers, first = tuple(layer for layer, _ in plans), sum(number < share.own_layers.start for number in numbers)
    held = replace(held, attending_before=first)
    keep_share(module, replace(states, geometry=held.held, layers=carriers, share=held))


# -- the vocabulary


def _cut_vocabulary(module: Any, share: Share, cuts: WeightCuts) -> tuple[int, ...]:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise refuse_division(module, "its embedding or its head is of an unknown kind")
    counts = even(head.out_features, share.parts, COLUMN_UNIT)
    if share.parts > 1:
        first, count = sum(counts[: share.part]), counts[share.part]
        is_tied = embedding.weight.data_ptr() == head.weight.data_ptr()
        cut_head = _columns(head, first, count, cuts)
        rows = cut_head.weight if is_tied else nn.Parameter(
            cuts.take_rows(embedding.weight.detach(), first, count), requires_grad=False
        )  # fmt: skip
        embedding.weight, embedding.padding_idx = rows, None
        module.set_output_embeddings(cut_head)
        if share.stage == 0:
            module.set_input_embeddings(_SomeTokens(embedding, first, count))
    if share.stage > 0:
        module.set_input_embeddings(_NoTokens(head.in_features, head.weight.dtype))
    return counts


class _SomeTokens(nn.Module):
    """An embedding of some of the vocabulary: the other workers have the others."""

    def __init__(self, embedding: nn.Embedding, first: int, count: int) -> None:
        super().__init__()
        self.embedding, self._first, self._count = embedding, first, count

    @property
    def weight(self) -> Tensor:
        """The rows of this worker."""
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        local_ids = ids - self._first
        inside = (local_ids >= 0) & (local_ids < self._count)
        rows = self.embedding(local_ids.clamp(0, self._count - 1))
        return crew.all_reduce(rows * inside[..., None].to(rows.dtype))


# -- stages


class _NoTokens(nn.Module):
    """Stands in for the embedding where hidden states come from the stage before."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.empty((0, hidden), dtype=dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return ids[..., None].to(self.weight.dtype) * self.weight.new_zeros(self.weight.shape[1])


class _NoLogits(nn.Module):
    """Stands in for the head where the next stage computes logits."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor  # some models ask for its dtype
        empty = torch.empty((0, head.in_features), dtype=head.weight.dtype)
        self.register_buffer("weight", empty, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :_FEW]


class _Passing(nn.Module):
    """Stands in for a layer of another stage."""

    def __init__(self, layer: Any, values: int = 0) -> None:
        """``values``: how many the layer returns, hidden states first; 0: these alone, and no tuple."""
        super().__init__()
        self._values = values
        for name in ("attention_type", "layer_type"):  # what some models ask their layers for
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """What the layer would return, with hidden states alone."""
        passed = self._pass_on(hidden_states)
        return (passed, *[None] * (self._values - 1)) if self._values else passed

    def _pass_on(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _Receiving(_Passing):
    """The last layer before this stage: its result comes from there."""

    def _pass_on(self, hidden_states: Tensor) -> Tensor:
        return crew.receive(hidden_states)


class _Sending(_Passing):
    """The first layer behind this stage."""

    def _pass_on(self, hidden_states: Tensor) -> Tensor:
        return crew.send(hidden_states)


def _leave_out(module: Any, layers: nn.ModuleList, share: Share) -> None:
    stage_layers = share.own_layers
    prefix = next(name for name, part in module.named_modules() if part is layers)
    returning = states_of(module).returning
    for index in range(len(layers)):
        if index in stage_layers:
            continue
        kind = {stage_layers.start - 1: _Receiving, stage_layers.stop: _Sending}.get(index, _Passing)
        layers[index] = kind(layers[index], returning.get(f"{prefix}.{index}", 0))
