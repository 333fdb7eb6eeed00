"""Cuts a model for one worker, by the plan that transformers gives for it: nothing here knows a family.

Columns of ``q``, ``k``, ``v`` and of the MLP's first linears stay with the heads and columns that a worker has; rows of
the linears behind them too, and their results are summed over the workers. The vocabulary is cut as well: each worker
embeds its own tokens, and computes their logits. Layers of other stages are left out; where they begin and end, hidden
states are handed on. LoRA adapters are cut as the linears that they add to.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from memserve.base.errors import UserError
from memserve.base.kv_layout import COLUMN_UNIT, Share, even
from memserve.base.types import KVGeometry
from memserve.model.lora import AdaptedLinear, Adapters
from memserve.model.workers import group as crew

_HEADS_OF = {"q_proj": "queries", "k_proj": "keys", "v_proj": "values", "o_proj": "queries"}
_SIMPLE = ("colwise", "rowwise")
_FEW = 8
"""Values that stand in for logits: enough to compare forwards by."""

_HARMLESS = ("replicated_with_grad_allreduce",)


def shard(module: Any, share: Share, geometry: KVGeometry, adapters: Adapters | None = None) -> tuple[int, ...]:
    """Leave of ``module`` and its ``adapters`` what ``share`` has; returns how many tokens of the vocabulary each part
    has.

    Raises :class:`UserError` for a model whose plan asks for more than cutting columns and rows.
    """
    text = module.config.get_text_config()
    layers = _layers_of(module, text.num_hidden_layers)
    vocabularies = _cut_vocabulary(module, share)
    if share.parts > 1:
        plan = _plan_of(module, layers)
        for layer in (layers[index] for index in share.own_layers):
            _cut_layer(layer, plan, share, geometry, adapters)
    if share.stages > 1:
        _leave_out(layers, share)
        if not share.is_last_stage:
            module.set_output_embeddings(_NoLogits())
    if adapters is not None:
        adapters.keep_sites({part.site for part in module.modules() if isinstance(part, AdaptedLinear)})
    return vocabularies


def _refuse(module: Any, why: str) -> UserError:
    hint = "use --tensor-parallel 1; --pipeline-parallel needs no plan"
    return UserError(f"a {module.config.model_type} model cannot be divided among workers: {why}", hint=hint)


def _layers_of(module: Any, count: int) -> nn.ModuleList:
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        raise _refuse(module, "its layers are not one list")
    return lists[0]


def _plan_of(module: Any, layers: nn.ModuleList) -> dict[str, str]:
    """Style by a linear's name inside a layer."""
    plan = dict(getattr(module, "tp_plan", None) or {})
    prefix = next(name for name, part in module.named_modules() if part is layers) + ".*."
    styles = {name.removeprefix(prefix): style for name, style in plan.items() if name.startswith(prefix)}
    if not styles:
        raise _refuse(module, "transformers has no plan for it")
    unsupported = sorted({style for style in styles.values() if style not in (*_SIMPLE, *_HARMLESS)})
    if unsupported:
        raise _refuse(module, f"its plan asks for {', '.join(unsupported)}")
    unknown = [name for name in _linears(layers[0]) if _style(styles, name) not in _SIMPLE]
    if unknown:
        raise _refuse(module, f"its plan leaves out {', '.join(unknown)}")
    return styles


def _style(styles: dict[str, str], name: str) -> str:
    return next((style for pattern, style in styles.items() if fnmatch.fnmatchcase(name, pattern)), "")


def _linears(layer: Any) -> dict[str, nn.Linear | AdaptedLinear]:
    """Linears by name: those that adapters add to, and the others."""
    parts = dict(layer.named_modules())
    adapted = {f"{name}.linear" for name, part in parts.items() if isinstance(part, AdaptedLinear)}
    return {
        name: part
        for name, part in parts.items()
        if isinstance(part, (nn.Linear, AdaptedLinear)) and name not in adapted
    }


# -- columns and rows


def _cut_layer(
    layer: Any, styles: dict[str, str], share: Share, geometry: KVGeometry, adapters: Adapters | None
) -> None:
    for name, linear in _linears(layer).items():
        base = linear.linear if isinstance(linear, AdaptedLinear) else linear
        first, count = _range_of(name, base, styles, share, geometry)
        parent, _, attribute = name.rpartition(".")
        columns = _style(styles, name) == "colwise"
        keeps_bias = share.part == 0
        plain = _columns(base, first, count) if columns else _rows(base, first, count, keeps_bias=keeps_bias)
        cut: nn.Module = plain
        if isinstance(linear, AdaptedLinear) and adapters is not None:
            adapters.cut_site(linear.site, first, count, columns=columns)
            cut = AdaptedLinear(plain, linear.site)
        setattr(layer.get_submodule(parent), attribute, cut if columns else _Summed(cut))


def _range_of(name: str, linear: nn.Linear, styles: dict[str, str], share: Share, g: KVGeometry) -> tuple[int, int]:
    """Which columns (or rows, of a ``rowwise`` linear) this worker has: first and count."""
    size = linear.out_features if _style(styles, name) == "colwise" else linear.in_features
    kind = _HEADS_OF.get(name.rpartition(".")[2])
    if kind == "queries" and share.shares_heads:
        of_a_query = size // sum(share.queries)
        return sum(share.queries[: share.part]) * of_a_query, share.queries[share.part] * of_a_query
    if kind is not None:
        of_a_head = size // g.num_kv_heads
        return share.first_head * of_a_head, share.heads[share.part] * of_a_head
    columns = even(size, share.parts, COLUMN_UNIT if size >= 4 * share.parts * COLUMN_UNIT else 1)
    return sum(columns[: share.part]), columns[share.part]


def _columns(linear: nn.Linear, first: int, count: int) -> nn.Linear:
    bias = None if linear.bias is None else linear.bias.detach()[first : first + count]
    return _linear(linear.weight.detach()[first : first + count], bias)


def _rows(linear: nn.Linear, first: int, count: int, *, keeps_bias: bool) -> nn.Linear:
    bias = None if linear.bias is None or not keeps_bias else linear.bias.detach()
    return _linear(linear.weight.detach()[:, first : first + count], bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear


class _Summed(nn.Module):
    """A linear over some of its inputs: the workers' results are summed."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return crew.all_reduce(self.linear(x))


# -- the vocabulary


def _cut_vocabulary(module: Any, share: Share) -> tuple[int, ...]:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise _refuse(module, "its embedding or its head is of an unknown kind")
    counts = even(head.out_features, share.parts, COLUMN_UNIT)
    if share.parts > 1:
        first, count = sum(counts[: share.part]), counts[share.part]
        cut_head = _columns(head, first, count)
        is_tied = embedding.weight.data_ptr() == head.weight.data_ptr()
        rows = cut_head.weight if is_tied else nn.Parameter(
            embedding.weight.detach()[first : first + count].clone(), requires_grad=False
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

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :_FEW]


class _Passing(nn.Module):
    """Stands in for a layer of another stage."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name in ("attention_type", "layer_type"):  # what some models ask their layers for
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _Receiving(_Passing):
    """The last layer before this stage: its result comes from there."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return crew.receive(hidden_states)


class _Sending(_Passing):
    """The first layer behind this stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return crew.send(hidden_states)


def _leave_out(layers: nn.ModuleList, share: Share) -> None:
    stage_layers = share.own_layers
    for index in range(len(layers)):
        if index == stage_layers.start - 1:
            layers[index] = _Receiving(layers[index])
        elif index == stage_layers.stop:
            layers[index] = _Sending(layers[index])
        elif index not in stage_layers:
            layers[index] = _Passing(layers[index])
