"""The forward port: token ids in, logits out; and the Hugging Face module as it is, with packed linears on a CPU.

Attention goes through the step context. Packing linears is the largest single gain on a CPU: ``F.linear`` reorders the
weight on every call; packed once, a decode step streams it at memory speed (twice as fast at batch 8). The two torch
ops are what Inductor emits. They are private in name, so they are tested first, and a layer stays plain where the test
fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memserve.model import linears
from memserve.model.attention.expansions import own_expansions
from memserve.model.loading.pages import pages_of
from memserve.model.loading.stored import NOT_STORED, stored_of
from memserve.model.states.layers import states_of

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_TRIAL_ROWS = 8


class Forward(Protocol):
    """Computes one ragged batch. The caller has made the step's attention current (``context.attending``)."""

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """``input_ids, positions [T]`` and ``logits_rows [R]``, all int64 -> logits ``[R, vocab]`` float32."""


class EagerForward:
    """The Hugging Face module as it is, with packed linears on a CPU: serves every family that the probe accepts."""

    def __init__(self, module: Any, *, pack: bool = True) -> None:
        """``pack``: false leaves the module untouched, with logits rounded to its dtype."""
        self._module, self._stored = module, stored_of(module)
        self._packs = pack
        self._head: Tensor | None = None
        self.packed_linears = 0
        if pack:
            own_expansions(module, self._stored)
            weight = getattr(module.get_output_embeddings(), "weight", None)  # a stage of a pipeline may have no head
            self._head = None if weight is None else weight.detach()
            widen_head(module)
            self.packed_linears = pack_linears(module)
        self._selects_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """See :class:`Forward`."""
        row_options = {"logits_to_keep": logits_rows} if self._selects_rows else {}
        # without packs it is compared or recorded, and its caller chooses what it computes with
        stored = self._stored if self._packs else NOT_STORED
        with torch.inference_mode(), stored.computing_as_stored(self._head, exact=False):
            out = self._module(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **row_options)
            logits: Tensor = out.logits[0] if self._selects_rows else out.logits[0, logits_rows]
            return logits.float()


# -- packed linears


_ALONE_ATTRIBUTE = "memserve_weights_alone"


def remember_weights_alone(module: Any, names: Sequence[str]) -> None:
    """Linears of ``module`` by these names are never called: their weights are used as they are, and must stay so."""
    setattr(module, _ALONE_ATTRIBUTE, tuple(names))


def weights_alone(module: Any) -> tuple[str, ...]:
    """What :func:`remember_weights_alone` was told."""
    names: tuple[str, ...] = getattr(module, _ALONE_ATTRIBUTE, ())
    return names


def linears_alone(module: Any) -> set[int]:
    """The ids of linears that are never called."""
    parts = dict(module.named_modules())
    return {id(parts[name]) for name in weights_alone(module) if name in parts} | states_of(module).weights_alone


class PackedLayer(nn.Module):
    """``y = x W^T + b`` with ``W`` in oneDNN's own layout, for any number of rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = _pack(linear.weight.detach())
        self.bias = linear.bias
        #: shape and dtype for code that asks; computing with it is an error, not a wrong result
        self.weight = torch.empty_like(linear.weight, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        if x.numel() == 0:  # a step in which no row samples
            return x.new_empty((*x.shape[:-1], self.out_features))
        return linears.in_bucket(x, lambda rows: _linear(rows, self.packed, self.bias))


def pack_linears(module: nn.Module) -> int:
    """Replace every ``nn.Linear`` below ``module`` by a packed one and free its weight; returns how many.

    Nothing is replaced on other devices, for other dtypes, or where the packed result would differ.
    """
    pages, stored, alone = pages_of(module), stored_of(module), linears_alone(module)
    places = [(parent, name) for parent in module.modules() for name, child in parent.named_children()
              if type(child) is nn.Linear and _is_packable(child) and not stored.of(child.weight.detach())
              and id(child) not in alone]  # fmt: skip
    trusted: dict[tuple[Any, ...], bool] = {}
    packed = 0
    for parent, name in places:
        linear = getattr(parent, name)
        replacement = _try_pack(linear, trusted) if type(linear) is nn.Linear else None
        if replacement is not None:
            setattr(parent, name, replacement)
            packed += 1
        if pages.is_mapped(linear.weight):
            pages.release_values(linear.weight)
    own_storage(module)
    return packed


class WideLinear(nn.Module):
    """The output head of a 16-bit model, with float32 logits: see ``PackedLinear`` in ``model/linears.py``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed: linears.PackedLinear | None = None
        if linear.weight.device.type == "cpu":
            biases = None if linear.bias is None else [linear.bias.detach()]
            self._packed = linears.PackedLinear([linear.weight.detach()], biases, wide=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features] -> [..., out_features]`` float32."""
        return linears.wide_linear(x, self.weight, self.bias) if self._packed is None else self._packed(x)


def widen_head(module: Any) -> bool:
    """Let the output head of a 16-bit model return float32 logits; False if it is not a plain 16-bit linear."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if stored_of(module).of(head.weight.detach()) is None:  # else it is so already: see EagerForward
        wide = WideLinear(head)
        wide._forward_hooks = head._forward_hooks  # of adapters with heads of their own
        module.set_output_embeddings(wide)
    return True


def own_storage(module: nn.Module) -> None:
    """Copy every parameter that is left in host memory out of the weights file that it may be mapped from.

    As long as one parameter refers to the mapping, all of it stays resident, the packed weights' originals too.
    """
    pages, stored = pages_of(module), stored_of(module)
    for parameter in module.parameters():
        if parameter.device.type == "cpu" and not stored.has(parameter.detach()):
            mapped, parameter.data = parameter.data, parameter.data.clone()
            if pages.is_mapped(mapped):
                pages.release_values(mapped)
    pages.stop_tracking()


def _is_packable(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.device.type == "cpu" and weight.dtype in _TOLERANCE


def _try_pack(linear: nn.Linear, trusted: dict[tuple[Any, ...], bool]) -> PackedLayer | None:
    """The packed layer, or ``None`` if layers of this shape failed their trial (run once per shape)."""
    kind = (linear.weight.shape, linear.weight.dtype, linear.bias is not None)
    if trusted.get(kind) is False:
        return None
    try:
        packed = PackedLayer(linear)
        if kind not in trusted:
            trusted[kind] = _agrees(packed, linear)
    except (RuntimeError, AttributeError):  # this build of torch has no such op, or not for this dtype
        trusted[kind] = False
    return packed if trusted[kind] else None


def _agrees(packed: PackedLayer, linear: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((_TRIAL_ROWS, linear.in_features), generator=generator).to(linear.weight.dtype)
    with torch.inference_mode():
        expected, actual = F.linear(x, linear.weight, linear.bias).float(), packed(x).float()
    return bool((actual - expected).abs().max() <= _TOLERANCE[linear.weight.dtype] * expected.abs().max())


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TRIAL_ROWS)
    return packed


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y
