"""Experts on a CPU: each token's few, as packed linears of their own.

transformers' experts are stacks of weights ``[experts, n, k]`` behind an interface of their own
(``ALL_EXPERTS_FUNCTIONS``); what it does by default reads plain stacks, several times as slowly as a packed linear. The
function registered here sorts the pairs of token and expert by expert, and multiplies the rows of each. A recording
of the forward has it as one node (:func:`run_experts`), whose stacks are packed then (:class:`PackedExperts`); until
then it computes with the module's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

EXPERTS_NAME = "memserve"
"""Of the function in transformers' interface."""

Layer = Callable[[Tensor], Tensor]


class Recorder(Protocol):
    """Stands in for experts while a forward is recorded."""

    def run_experts(self, x: Tensor, index: Tensor, weights: Tensor, module: Any) -> Tensor:
        """See :func:`run_experts`."""


_recorder: ContextVar[Recorder | None] = ContextVar("experts_recorder", default=None)


@contextmanager
def recorded_experts(recorder: Recorder) -> Iterator[None]:
    """Inside, ``recorder`` is called instead of experts."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def use_our_experts(module: Any) -> None:
    """Let the experts of ``module``, on a CPU, be computed here; as long as they are plain stacks of weights."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    parts = experts_of(module)
    if parts and all(part.has_known_shape for part in map(_Stacks, parts)) and module.device.type == "cpu":
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)
        module.set_experts_implementation(EXPERTS_NAME)


def experts_of(module: Any) -> list[Any]:
    """The parts of ``module`` that go through transformers' interface of experts."""
    return [part for part in module.modules() if hasattr(part, "is_transposed") and hasattr(part, "has_gate")]


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if hidden_states.is_cuda:  # a model that was probed on the host
        from transformers.integrations.moe import grouped_mm_experts_forward

        result: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return result
    recorder = _recorder.get()
    run = run_experts if recorder is None else recorder.run_experts
    return run(hidden_states, top_k_index, top_k_weights, module)


class _Stacks:
    """The weights of one module of experts."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.up: Any = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
        self.down: Any = getattr(module, "down_proj", None)
        self._turned = bool(module.is_transposed)

    @property
    def has_known_shape(self) -> bool:
        """Whether both are stacks ``[experts, ...]``, and no expert lives elsewhere."""
        stacks = (self.up, self.down)
        alike = all(isinstance(stack, Tensor) and stack.dim() == 3 for stack in stacks)
        return alike and len(self.up) == len(self.down) and not self._module._is_expert_parallel

    @property
    def inner_dim(self) -> int:
        """Elements between a layer up and a layer down."""
        return int(self.down.shape[1 if self._turned else 2])

    def cut(self, first: int, count: int, *, keeps_bias: bool, take: Take) -> None:
        """Leave ``count`` of the inner elements, from ``first`` on, of all experts."""
        module, name = self._module, "gate_up_proj" if self._module.has_gate else "up_proj"
        columns = torch.arange(first, first + count)
        if module.has_gate:  # of both, which lie one behind the other, or by turns
            gate, up = (columns, columns + self.inner_dim) if module.is_concatenated else (2 * columns, 2 * columns + 1)
            columns = torch.cat((gate, up)) if module.is_concatenated else torch.stack((gate, up), 1).reshape(-1)
        rows, up, down = torch.arange(first, first + count), self.up.detach(), self.down.detach()
        self._replace(name, take(up, 2 if self._turned else 1, columns))
        self._replace("down_proj", take(down, 1 if self._turned else 2, rows))
        if module.has_bias:
            self._replace(f"{name}_bias", getattr(module, f"{name}_bias").detach()[:, columns])
            if not keeps_bias:
                self._replace("down_proj_bias", torch.zeros_like(module.down_proj_bias))

    def _replace(self, name: str, values: Tensor) -> None:
        setattr(self._module, name, torch.nn.Parameter(values, requires_grad=False))

    def matrix(self, stack: Tensor, expert: int) -> Tensor:
        """``[n, k]``"""
        weight = stack[expert]
        return weight.t() if self._turned else weight

    def bias(self, name: str, expert: int) -> Tensor | None:
        """``[n]``, of ``up`` or ``down``."""
        if not self._module.has_bias:
            return None
        full = "down_proj_bias" if name == "down" else "gate_up_proj_bias" if self._module.has_gate else "up_proj_bias"
        bias: Tensor = getattr(self._module, full)[expert]
        return bias


def can_cut_experts(module: Any) -> bool:
    """Whether workers may have some columns of each of the experts of ``module``, and sum their results."""
    return _Stacks(module).has_known_shape and not module.has_post_expert_norm


def inner_dim_of(module: Any) -> int:
    """Of the experts of ``module``: elements between a layer up and a layer down."""
    return _Stacks(module).inner_dim


Take = Callable[[Tensor, int, Tensor], Tensor]
"""``(stack, dimension, places, int64)`` -> these places of the stack, in memory of their own."""


def cut_experts(module: Any, first: int, count: int, *, keeps_bias: bool, take: Take = Tensor.index_select) -> None:
    """Leave of each expert of ``module`` so many of its inner elements, as ``take`` cuts stacks. ``keeps_bias``: of
    results, which one worker adds."""
    _Stacks(module).cut(first, count, keeps_bias=keeps_bias, take=take)


class PackedExperts:
    """A module's experts, each of which has a layer up and a layer down."""

    def __init__(self, module: Any, up: Sequence[Layer], down: Sequence[Layer]) -> None:
        self._module, self._up, self._down = module, up, down

    @property
    def layers(self) -> list[Layer]:
        """All of them."""
        return [*self._up, *self._down]

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See :func:`run_experts`."""
        return _run_layers(self._module, self._up.__getitem__, self._down.__getitem__, x, index, weights)


def pack_experts(module: Any, pack: Callable[[Tensor, Tensor | None], Layer]) -> PackedExperts:
    """The experts of ``module``; ``pack`` makes a layer of a weight ``[n, k]`` and a bias ``[n]``. The stacks are freed
    behind it."""
    stacks = _Stacks(module)

    def packs(name: str, stack: Tensor) -> list[Layer]:
        return [pack(stacks.matrix(stack, expert), stacks.bias(name, expert)) for expert in range(len(stack))]

    return PackedExperts(module, packs("up", stacks.up), packs("down", stacks.down))


def run_experts(x: Tensor, index: Tensor, weights: Tensor, experts: Any) -> Tensor:
    """``x [T, k]``, of each token the numbers ``index [T, E]`` of its experts, int64, and what their results count for,
    ``weights [T, E]`` -> ``[T, k]``. ``experts``: packed, or a module of transformers."""
    if isinstance(experts, PackedExperts):
        return experts(x, index, weights)
    stacks = _Stacks(experts)

    def layer(name: str, stack: Tensor) -> Callable[[int], Layer]:
        def of_expert(expert: int) -> Layer:
            bias = stacks.bias(name, expert)
            return lambda rows: torch.nn.functional.linear(rows, stacks.matrix(stack, expert), bias)

        return of_expert

    return _run_layers(experts, layer("up", stacks.up), layer("down", stacks.down), x, index, weights)


def _run_layers(
    module: Any, up: Callable[[int], Layer], down: Callable[[int], Layer], x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    tokens, each = index.shape
    if not tokens:
        return torch.empty_like(x)
    experts, order = index.reshape(-1).sort()
    counts = experts.bincount().tolist()
    rows = x[order // each]
    inner = _by_expert(rows, counts, up)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    results = _by_expert(inner, counts, down)
    if module.has_post_expert_norm:
        results = module.post_expert_norm(results)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return (results[places].view(tokens, each, -1) * weights[..., None]).sum(1).to(x.dtype)


def _by_expert(rows: Tensor, counts: list[int], layer_of: Callable[[int], Layer]) -> Tensor:
    """``rows`` come in the order of their experts, of which each has ``counts`` of them."""
    parts, first = [], 0
    for expert, count in enumerate(counts):
        if count:
            parts.append(layer_of(expert)(rows[first : first + count]))
            first += count
    return parts[0] if len(parts) == 1 else torch.cat(parts)
