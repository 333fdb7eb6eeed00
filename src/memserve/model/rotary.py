"""Rotary embeddings: what moves keys to other positions, and frequencies that depend on a sequence's length (longrope,
dynamic NTK).

transformers takes the latter from the longest position of the *call*: right for one sequence in one piece, wrong for a
batch, and different with every way of cutting a prompt into chunks. Here each token has the length that decides for it,
and carries it beside its position, so that a step may mix sequences of any length
(:class:`memserve.base.types.PositionRegimes` says which length that is, and keeps KV of different regimes apart).
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memserve.base.types import PositionRegimes

log = logging.getLogger(__name__)

LENGTH_SHIFT = 32
"""A position is in the lower bits of what the forward is given, the token's deciding length above them."""
_POSITION_MASK = (1 << LENGTH_SHIFT) - 1
_TOLERANCE = 1e-4  # of cosines and sines against transformers' own, in float32


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """Elements ``first + i`` and ``first + pairs + i`` of a key (``neighbours``: ``first + 2 i`` and the next one) turn
    by ``frequencies[layer, i]`` a position."""

    frequencies: Tensor
    """``[layers, pairs]`` float64, radians; zeros in layers without positions."""
    first: int = 0
    neighbours: bool = False

    def parts_of(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Views of both elements of all pairs; ``keys [layers, heads, head_dim, ...]``."""
        pairs, first = self.frequencies.shape[1], self.first
        if self.neighbours:
            return keys[:, :, first : first + 2 * pairs : 2], keys[:, :, first + 1 : first + 2 * pairs : 2]
        return keys[:, :, first : first + pairs], keys[:, :, first + pairs : first + 2 * pairs]

    def rotate_keys(self, keys: Tensor, shift: int) -> None:
        """Move ``keys [layers, heads, head_dim, tokens]`` by ``shift`` positions, in place."""
        if not shift or not self.frequencies.shape[1]:
            return
        angles = (self.frequencies * shift).to(keys.device)[:, None, :, None]
        cosines, sines = angles.cos().float(), angles.sin().float()
        real, imaginary = self.parts_of(keys)
        turned = real * cosines - imaginary * sines, imaginary * cosines + real * sines  # float32
        real.copy_(turned[0])
        imaginary.copy_(turned[1])


class LengthRotary(nn.Module):
    """In the place of a family's rotary embedding: ``(x, positions [1, T]) -> cos, sin [1, T, D]``."""

    def __init__(self, rotary: Any) -> None:
        """``rotary``: transformers' module, of rope type longrope or dynamic."""
        super().__init__()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = rotary.config
        self.is_dynamic = rotary.rope_type != "longrope"
        make = ROPE_INIT_FUNCTIONS[rotary.rope_type]
        device = rotary.inv_freq.device
        self.original_tokens = original_tokens(config, rotary.rope_type)
        short, self.scaling = make(config, device, seq_len=self.original_tokens)
        self.short: Tensor
        self.long: Tensor
        self.register_buffer("short", short.float(), persistent=False)
        if self.is_dynamic:
            parameters = config.rope_parameters
            self.base, self.factor = float(parameters["rope_theta"]), float(parameters["factor"])
            self.dim = 2 * len(short)
            exponents = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device).float() / self.dim
            self.register_buffer("long", exponents, persistent=False)
        else:
            long, _ = make(config, device, seq_len=self.original_tokens + 1)
            self.register_buffer("long", long.float(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See the class; ``x``: any tensor of the result's dtype."""
        positions, lengths = position_ids & _POSITION_MASK, position_ids >> LENGTH_SHIFT
        is_long = (lengths > self.original_tokens)[..., None]
        frequencies = torch.where(is_long, self._long_frequencies(lengths), self.short)
        angles = positions[..., None].float() * frequencies
        doubled = torch.cat((angles, angles), dim=-1)
        return (doubled.cos() * self.scaling).to(x.dtype), (doubled.sin() * self.scaling).to(x.dtype)

    def _long_frequencies(self, lengths: Tensor) -> Tensor:
        """Frequencies ``[..., D / 2]`` beyond the original length."""
        if not self.is_dynamic:
            return self.long
        stretch = self.factor * lengths.double() / self.original_tokens - (self.factor - 1)
        bases = self.base * stretch.clamp(min=1.0) ** (self.dim / (self.dim - 2))
        return 1.0 / (bases.float()[..., None] ** self.long)


def original_tokens(config: Any, rope_type: str) -> int:
    """Up to so many tokens positions are those of pretraining."""
    if rope_type == "longrope":
        return int(config.rope_parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings)


def length_rotaries(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """``(parent, name, rotary)`` of each rotary embedding of ``module`` that depends on lengths."""
    children = ((parent, name, child) for parent in module.modules() for name, child in parent.named_children())
    return [(*place, child) for *place, child in children if depends_on_length(child)]  # type: ignore[misc]  # mypy sees an iterable


def depends_on_length(rotary: Any) -> bool:
    """Whether a module is a rotary embedding whose frequencies change with the length of what it is given."""
    kinds = getattr(rotary, "rope_type", "")
    rope_types = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in rope_types)


def install_length_rotaries(module: nn.Module) -> PositionRegimes | None:
    """Replace every such embedding of ``module`` by one that takes lengths by token. None: one is of a form that is not
    known, and the model is right up to its original length alone."""
    rotaries = length_rotaries(module)
    try:
        replaced = [(parent, name, LengthRotary(rotary)) for parent, name, rotary in rotaries]
        is_known = all(_agrees(ours, rotaries[index][2]) for index, (_, _, ours) in enumerate(replaced))
    except Exception as error:  # another form than the usual: by layer, with other parameters
        log.info("a rotary embedding of another form: %s", error)
        is_known = False
    if (
        not rotaries
        or not is_known
        or len({(replacement.original_tokens, replacement.is_dynamic) for _, _, replacement in replaced}) != 1
    ):
        return None
    for parent, name, ours in replaced:
        setattr(parent, name, ours)
    return PositionRegimes(ours.original_tokens, by_length=ours.is_dynamic)


def _agrees(ours: LengthRotary, original: Any) -> bool:
    """Whether both give the same on either side of the original length, and far beyond."""
    x = torch.zeros(1, device=ours.short.device)
    for length in (ours.original_tokens, ours.original_tokens + 1, 3 * ours.original_tokens):
        positions = torch.tensor([[0, 1, length // 2, length - 1]], device=x.device)
        fresh = copy.deepcopy(original)  # it remembers the longest call
        for actual, expected in zip(ours(x, positions + (length << LENGTH_SHIFT)), fresh(x, positions), strict=True):
            if actual.shape != expected.shape or float((actual - expected).abs().max()) > _TOLERANCE:
                return False
    return True
