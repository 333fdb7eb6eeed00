"""Which layers carry a recurrent state, found from what they read of and write to transformers' cache.

One small forward with a cache: a layer that asks it for a state, or gives it one, is a layer with a state, and what the
cache then holds are its parts. Then each kind of layer is asked twice behind other states: does what it computes depend
on them, for one token and for several? No family is known here by name.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memserve.base.errors import UserError, check
from memserve.base.states import StateGeometry, StatePart
from memserve.model.states.layers import LayerStates, PartKey, StateLayer, StateLayers

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_CALLS = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
HINT = "serve a model whose layers keep their states in transformers' cache (Qwen3-Next, Mamba-2, Jamba, LFM2, ...)"


@dataclass(slots=True)
class _Call:
    """One module's only call in the forward."""

    module: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(slots=True)
class _Watch:
    """What happens to a cache during a forward."""

    cache: Any
    running: list[_Call] = field(default_factory=list)  # modules that have not returned, innermost last
    carriers: dict[int, _Call] = field(default_factory=dict)  # by the module's id, in order
    parts: dict[int, dict[PartKey, int]] = field(default_factory=dict)  # written: by module's id, key -> layer
    called: set[int] = field(default_factory=set)  # ids of all modules
    returning: dict[str, int] = field(default_factory=dict)  # by a module's name, if it returns several values

    def on_call(self, name: str, original: Any, *args: Any, **options: Any) -> Any:
        """Of the cache, by a layer."""
        call = self.running[-1]
        self.carriers.setdefault(id(call.module), call)
        if name.startswith("update"):
            layer = int(options.get("layer_idx", args[1] if len(args) > 1 else -1))
            index = int(options.get("state_idx", args[2] if len(args) > 2 else 0))
            self.parts.setdefault(id(call.module), {})[name.split("_")[1], index] = layer
        return original(*args, **options)

    @contextmanager
    def over(self, module: Any) -> Iterator[None]:
        """Watch ``module`` and all below it."""
        for name in _CALLS:
            setattr(self.cache, name, partial(self.on_call, name, getattr(self.cache, name)))

        def enter(part: Any, args: Any, options: Any) -> None:
            self.called.add(id(part))
            self.running.append(_Call(part, args, options))

        def leave(name: str, part: Any, args: Any, output: Any) -> None:
            self.running.pop()
            if isinstance(output, tuple):
                self.returning[name] = len(output)

        handles = []
        for name, part in module.named_modules():
            handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(part.register_forward_hook(partial(leave, name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def find_states(module: Any, ids: Tensor) -> StateLayers:
    """The layers of ``module`` with a state; ``ids [tokens]``: some tokens. Raises :class:`UserError` for a model with
    states that cannot be carried."""
    cache, argument = _new_cache(module)
    if cache is None or not any(hasattr(layer, "update_recurrent_state") for layer in cache.layers):
        return StateLayers()
    if all(cache.is_linear):  # what asks how many tokens there are gets no answer then
        cache.get_seq_length = lambda *_, **__: 0
        cache.get_mask_sizes = lambda query_length, *_, **__: (query_length, 0)
    family, watch = module.config.model_type, _Watch(cache)
    positions = torch.arange(len(ids), device=ids.device)[None]
    with watch.over(module), torch.inference_mode():
        module(input_ids=ids[None], position_ids=positions, use_cache=True, **{argument: cache})
    layers, parts = [], list[StatePart]()
    for call in watch.carriers.values():
        name = next((name for name, value in call.options.items() if value is cache), None)
        if name is None:
            raise UserError(f"a {family} model cannot be served: its layers get their states unnamed", hint=HINT)
        own: dict[PartKey, int] = {}
        for key, number in watch.parts.get(id(call.module), {}).items():
            tensor = getattr(cache.layers[number], f"{key[0]}_states")[key[1]]
            check(tensor.dtype in _DTYPES, "a state of {}", tensor.dtype)
            own[key] = len(parts)
            parts.append(StatePart(number, *key, tuple(tensor.shape[1:]), _DTYPES[tensor.dtype]))
        layers.append(StateLayer(call.module, name, own))
    if not layers:
        return StateLayers()
    manners: dict[tuple[Any, ...], bool] = {}  # modules of one kind compute alike
    with torch.inference_mode():
        for place, layer in enumerate(layers):
            kind = type(layer.module), tuple(parts[part].shape for part in layer.parts.values())
            if kind not in manners:
                call = watch.carriers[id(layer.module)]
                manners[kind] = _takes_one_by_one(layer, call, [parts[part] for part in layer.parts.values()], family)
            layers[place] = replace(layer, one_by_one=manners[kind])
    inside = [part for layer in layers for part in layer.module.modules() if isinstance(part, nn.Linear)]
    alone = frozenset(id(linear) for linear in inside if id(linear) not in watch.called)
    return StateLayers(StateGeometry(tuple(parts)), tuple(layers), alone, watch.returning)


def _new_cache(module: Any) -> tuple[Any, str]:
    """transformers' cache for ``module``, and the keyword by which its forward takes it. None: it takes none."""
    from transformers import DynamicCache

    parameters = inspect.signature(module.forward).parameters
    argument = next((name for name in ("past_key_values", "cache_params") if name in parameters), "")
    if not argument:
        return None, ""
    try:
        return DynamicCache(config=module.config.get_text_config(decoder=True)), argument
    except Exception as error:  # of a configuration that transformers has no cache for
        log.info("transformers makes no cache for a %s model: %s", module.config.model_type, error)
        return None, ""


def _takes_one_by_one(layer: StateLayer, call: _Call, parts: list[StatePart], family: str) -> bool:
    """Whether ``layer`` ignores a part of its state before several tokens. Raises :class:`UserError` where it does so
    before a single one."""
    several = [_depends_on(layer, call, parts, key, 3) for key in layer.parts]
    single = [_depends_on(layer, call, parts, key, 1) for key in layer.parts]
    if not all(single):
        raise UserError(
            f"a {family} model cannot be served: {type(layer.module).__name__} keeps a state that it does not read",
            hint=HINT,
        )
    return not all(several)


def _depends_on(layer: StateLayer, call: _Call, parts: list[StatePart], key: PartKey, tokens: int) -> bool:
    """Whether ``layer`` computes anything else for ``tokens`` tokens if the part ``key`` before them is another one."""
    inputs: Tensor = call.args[0] if call.args else call.options["hidden_states"]
    options = {name: value for name, value in call.options.items() if name != "hidden_states"}
    outputs = []
    for factor in (1.0, -1.0):
        generator = torch.Generator().manual_seed(5)
        before: dict[PartKey, Tensor] = {}
        for own, part in zip(layer.parts, parts, strict=True):
            values = torch.randn((1, *part.shape), generator=generator) * (factor if own == key else 1.0)
            before[own] = values.to(getattr(torch, part.dtype)).to(inputs.device)
        options[layer.argument] = LayerStates(before, is_fresh=False)
        cut = {name: _first_tokens(value, tokens, inputs.shape[1]) for name, value in options.items()}
        outputs.append(layer.module.forward(inputs[:, :tokens], **cut))
    return not torch.equal(*outputs)


def _first_tokens(value: Any, tokens: int, of: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_first_tokens(inner, tokens, of) for inner in value)
    is_by_token = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, of)
    return value[:, :tokens] if is_by_token else value
