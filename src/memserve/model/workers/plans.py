"""How the layers of a model are divided among workers: nothing here knows a family.

What transformers' plan says is done. Where there is none, or a model has recurrent states or latents, of which plans
know little, the linears that a module has, by their names, say what it is. The rest is whole:

    style      a worker has                        what comes out
    colwise    some columns                        these columns
    packed     some columns of each of two halves  these columns of both
    rowwise    some rows                           the sum over the workers
    (none)     everything                          the same, on every worker
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.model.attention.context import EXPANSION_ATTRIBUTE
from memserve.model.experts import can_cut_experts, experts_of
from memserve.model.lora import AdaptedLinear
from memserve.model.states.layers import states_of

COLUMNS, PACKED, ROWS = "colwise", "packed", "rowwise"
_SIMPLE = (COLUMNS, ROWS)
_WHOLE = ("replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input", "mla_kv_a_proj")
"""Of a plan: what comes in and what comes out is whole, so the linear may be."""
_OF_EXPERTS = ("packed_colwise", "moe_tp_experts")
_OF_HEADS = "local_params"
"""Of a plan: weights of an attention itself, one for each of its heads."""
HEAD_WEIGHTS = "sinks"
"""Their name."""

_ATTENDING = (
    {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS},
    {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "out_proj": ROWS},
)
_EXPANDING = (
    {"q_b_proj": COLUMNS, "kv_b_proj": COLUMNS, "o_proj": ROWS},
    {"q_proj": COLUMNS, "kv_b_proj": COLUMNS, "o_proj": ROWS},
)
_MLPS = (
    {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS},
    {"up_proj": COLUMNS, "down_proj": ROWS},
    {"w1": COLUMNS, "w3": COLUMNS, "w2": ROWS},
    {"input_linear": PACKED, "output_linear": ROWS},
)
"""What modules are made of, where no plan says how to divide them: as plans say it of others."""

DIVISION_HINT = "use --tensor-parallel 1; --pipeline-parallel needs no plan"

AnyLinear = nn.Linear | AdaptedLinear


@dataclass(slots=True)
class LayerPlan:
    """Of one layer: what is not in it is whole on every worker."""

    styles: dict[str, str] = field(default_factory=dict)
    """By a linear's name."""
    experts: list[str] = field(default_factory=list)
    """Names of the modules of experts that are cut."""


@dataclass(frozen=True, slots=True)
class Division:
    """Of a model."""

    layers: nn.ModuleList
    plans: tuple[LayerPlan, ...]
    divides_heads: bool
    """KV heads are divided. False: every worker has all of them."""
    is_planned: bool
    """All is cut as transformers' plan says. False: what the workers compute is to be compared."""


def plan_division(module: Any, geometry: KVGeometry, *, only_stages: bool = False) -> Division:
    """How ``module``, which keeps KV of ``geometry``, is divided. ``only_stages``: its layers are not. Raises
    :class:`UserError` for a model whose plan asks for more than can be cut."""
    layers = _layers_of(module)
    is_usual = not states_of(module) and not geometry.latent and not _feeds_layers(module, layers)
    if only_stages:
        return Division(layers, tuple(LayerPlan() for _ in layers), not geometry.latent, is_usual)
    styles = _styles_of(module, layers)
    # what belongs to recurrent states is cut elsewhere, and what layers share would be cut by each of them
    apart = {id(part) for layer in states_of(module).layers for part in layer.module.modules()}
    uses = Counter(id(part) for layer in layers for part in layer.modules())
    apart |= {part for part, count in uses.items() if count > 1}
    by_names = not is_usual or not styles
    plans = tuple(_plan_layer(layer, styles, apart, by_names=by_names) for layer in layers)
    attending = [_attending_parts(layer, plan) for layer, plan in zip(layers, plans, strict=True)]
    divides_heads = not geometry.latent and sum(map(len, attending)) == geometry.num_layers
    if not geometry.latent and not divides_heads:
        for names, plan in zip(attending, plans, strict=True):
            plan.styles = {name: style for name, style in plan.styles.items() if name.rpartition(".")[0] not in names}
    if not any(plan.styles or plan.experts for plan in plans) and is_usual:
        why = f"its plan leaves out {', '.join(linears_of(layers[0]))}" if styles else "transformers has no plan for it"
        raise refuse_division(module, why)
    is_plain = is_usual and divides_heads and bool(styles) and not any(experts_of(layer) for layer in layers)
    is_plain &= not any(hasattr(part, HEAD_WEIGHTS) for part in layers.modules())
    for layer, plan, names in zip(layers, plans, attending, strict=True):
        is_plain &= linears_of(layer).keys() == plan.styles.keys()
        is_plain &= all(f"{name}.k_proj" in plan.styles for name in names)
    return Division(layers, plans, divides_heads, is_plain)


def _feeds_layers(module: Any, layers: nn.ModuleList) -> bool:
    """Whether linears beside the layers compute more for these than the hidden states which stages hand on (Gemma 3n's
    inputs of each layer). Then workers are compared."""
    inside = {id(part) for part in (*layers.modules(), module.get_output_embeddings())}
    return any(isinstance(part, AnyLinear) and id(part) not in inside for part in module.modules())


def refuse_division(module: Any, why: str) -> UserError:
    """The error of a model that cannot be divided."""
    return UserError(f"a {module.config.model_type} model cannot be divided among workers: {why}", hint=DIVISION_HINT)


def linears_of(layer: Any) -> dict[str, AnyLinear]:
    """Linears by name: those that adapters add to, and the others."""
    parts = dict(layer.named_modules())
    adapted = {f"{name}.linear" for name, part in parts.items() if isinstance(part, AdaptedLinear)}
    return {
        name: part
        for name, part in parts.items()
        if isinstance(part, (nn.Linear, AdaptedLinear)) and name not in adapted
    }


def _layers_of(module: Any) -> nn.ModuleList:
    """The list of as many layers as the model has; lists inside of layers may be as long."""
    text = module.config.get_text_config()
    counts = {text.num_hidden_layers, getattr(text, "num_layers", text.num_hidden_layers)}  # LongCat attends twice each
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    outer = [part for name, part in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    found = [part for part in outer if len(part) in counts]
    if len(found) != 1:
        raise refuse_division(module, "its layers are not one list")
    return found[0]


def _styles_of(module: Any, layers: nn.ModuleList) -> dict[str, str]:
    """Style by the name of a part inside a layer, as transformers' plan has it."""
    plan = dict(getattr(module, "tp_plan", None) or {})
    prefix = next(name for name, part in module.named_modules() if part is layers) + ".*."
    styles = {name.removeprefix(prefix): style for name, style in plan.items() if name.startswith(prefix)}
    known = (*_SIMPLE, *_WHOLE, *_OF_EXPERTS, _OF_HEADS)
    unknown = sorted({style for name, style in styles.items() if style not in known and ".experts" not in f".{name}"})
    if unknown:
        raise refuse_division(module, f"its plan asks for {', '.join(unknown)}")
    return styles


def _plan_layer(layer: Any, styles: dict[str, str], apart: Collection[int], *, by_names: bool) -> LayerPlan:
    """``apart``: ids of modules that are not for this plan. ``by_names``: where the plan says nothing, names do."""
    plan, parts = LayerPlan(), dict(layer.named_modules())
    families: dict[str, set[str]] = {}
    for name in linears_of(layer):
        parent, _, attribute = name.rpartition(".")
        if id(parts[parent]) not in apart:
            families.setdefault(parent, set()).add(attribute)
    for parent, attributes in families.items():
        own = {name: _style_of(styles, f"{parent}.{name}".lstrip(".")) for name in attributes}
        if by_names and not any(own.values()):
            own = _styles_by_names(parts[parent], attributes)
        elif by_names and not {COLUMNS, ROWS} <= set(own.values()):
            own = dict.fromkeys(own, "")  # both or none: what is cut is put together again
        plan.styles |= {
            f"{parent}.{name}".lstrip("."): style for name, style in own.items() if style in (*_SIMPLE, PACKED)
        }
    names = {id(part): name for name, part in parts.items()}
    plan.experts = [
        names[id(part)]
        for part in experts_of(layer)
        if id(part) not in apart and can_cut_experts(part) and not _asks_for_more(styles, names[id(part)])
    ]
    return plan


def _style_of(styles: dict[str, str], name: str) -> str:
    return next((style for pattern, style in styles.items() if fnmatch.fnmatchcase(name, pattern)), "")


def _asks_for_more(styles: dict[str, str], experts: str) -> bool:
    """Whether the plan has a part of these experts that cannot be cut: then they are whole."""
    own = {style for name, style in styles.items() if name.startswith(experts)}
    return not own <= {*_SIMPLE, *_OF_EXPERTS}


def _styles_by_names(part: Any, attributes: set[str]) -> dict[str, str]:
    gates = {"g_proj": COLUMNS} if "g_proj" in attributes else {}  # of heads
    attending = _EXPANDING if hasattr(part, EXPANSION_ATTRIBUTE) else _ATTENDING
    for names in (*(names | gates for names in attending), *_MLPS):
        if names.keys() <= attributes:
            return names
    return {}


def _attending_parts(layer: Any, plan: LayerPlan) -> set[str]:
    """The names of what attends in ``layer``, as far as it is cut: it has a linear of keys, or one for all three, and
    then it knows the number of its layer."""
    parents = {name.rpartition(".")[0] for name, style in plan.styles.items() if style == COLUMNS}
    return {name for name in parents if is_attending(layer.get_submodule(name))}


def is_attending(part: Any) -> bool:
    """Whether a part whose linears are cut attends to keys and values."""
    return hasattr(part, "k_proj") or (hasattr(part, "layer_idx") and not hasattr(part, EXPANSION_ATTRIBUTE))
