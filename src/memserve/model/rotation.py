"""Keys at other positions than those that they were computed at: the rotation that moves them, found on the model.

A token alone attends to itself, wherever it stands: so in every layer its keys differ between two positions by what the
position does to them, and by nothing else. Computed at many positions, they tell which pairs of elements are rotated,
and how fast: halves or neighbours, all of a head or a part, each layer its own frequencies, scaled or not. No family is
named, and no configuration is read. What is not a rotation (learned positions, say) is refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memserve.base.errors import UserError, check
from memserve.base.types import KVGeometry, Tier
from memserve.kv.contents import MoveTokens
from memserve.model.attention.context import step_attention
from memserve.model.attention.expansions import Expansion
from memserve.model.attention.reference import ReferencePages
from memserve.model.loading.stored import stored_of
from memserve.model.rotary import KeyRotation

if TYPE_CHECKING:
    from memserve.model.loading.loader import LoadedModel

_TOLERANCES = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 3e-2}
"""Of keys against rotated ones, in parts of their length: cosines are rounded to the dtype, too."""
_TOKENS = 8
_CHECKED_POSITIONS = 6
_BLOCKS_AT_ONCE = 16


class TokenMover:
    """Copies KV of single tokens between the blocks of a device, to other positions."""

    def __init__(self, tiers: dict[Tier, Tensor], geometry: KVGeometry, rotation: KeyRotation) -> None:
        """``tiers``: ``[blocks, block_bytes]`` uint8, with KV as it was computed."""
        self._pages = {tier: ReferencePages(arena, geometry) for tier, arena in tiers.items()}
        self._geometry, self._rotation = geometry, rotation

    def move_tokens(self, order: MoveTokens) -> None:
        """Do what ``order`` says; its blocks exist."""
        width, end = self._geometry.block_tokens, order.src_first + order.count
        check(end <= len(order.src) * width, "a source of {} blocks ends before {}", len(order.src), end)
        check(order.dst_first + order.count <= len(order.dst) * width, "a target of {} blocks ends", len(order.dst))
        position = order.dst_first
        for block in range(0, len(order.src), _BLOCKS_AT_ONCE):
            first = max(order.src_first - block * width, 0)
            last = min(end - block * width, _BLOCKS_AT_ONCE * width)
            keys, values = self._read_tokens(order.src_tier, order.src[block : block + _BLOCKS_AT_ONCE], first, last)
            self._rotation.rotate_keys(keys, order.shift)
            self._write_tokens(order.dst, position, keys, values)
            position += last - first

    def _read_tokens(self, tier: Tier, blocks: list[int], first: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies ``[layers, heads, head_dim, tokens]`` and ``[layers, heads, tokens, head_dim]``."""
        pages = self._pages[tier]
        ids = torch.tensor(blocks, device=pages.k.device)
        keys = pages.k[ids].permute(1, 2, 3, 0, 4).flatten(3)[..., first:end].contiguous()
        return keys, pages.v[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[..., first:end, :]

    def _write_tokens(self, blocks: list[int], position: int, keys: Tensor, values: Tensor) -> None:
        pages, width, count = self._pages[Tier.HBM], self._geometry.block_tokens, keys.shape[3]
        written = 0
        while written < count:
            entry, offset = divmod(position + written, width)
            size = min(width - offset, count - written)
            pages.k[blocks[entry]][..., offset : offset + size] = keys[..., written : written + size]
            if not self._geometry.latent:
                pages.v[blocks[entry]][..., offset : offset + size, :] = values[..., written : written + size, :]
            written += size


# -- found on the model


class _LoneTokens:
    """A ``StepAttention`` in which each token attends to itself alone."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def run_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, expansion: Expansion | None = None, **_: Any
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        self.keys.append(k[0].transpose(0, 1).double())
        self.values.append(v[0].transpose(0, 1).double())
        if expansion is not None:
            v = expansion.expand(k)[1]
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()


def find_rotation(model: LoadedModel) -> KeyRotation:
    """What moves the keys of ``model``, whose linears are still plain. Raises :class:`UserError` where nothing does."""
    for applies, reason in (
        (bool(model.states), "the model keeps a recurrent state"),
        (model.layout is not None, "the model's layers keep KV of several shapes, or windows apart"),
        (bool(model.position_regimes.original_tokens), "the model's positions depend on a prompt's length"),
    ):
        if applies:
            raise UserError(reason)
    positions = _positions(model.max_model_tokens)
    keys, values = _keys_at(model, positions)
    if len(keys) != model.geometry.num_layers:
        raise UserError("the model's layers do not attend one after the other")
    tolerance = _TOLERANCES[model.geometry.dtype]
    if max(_relative_error(layer, layer[:1]) for layer in values) > tolerance:
        raise UserError("the model's values depend on positions")
    changes = [_relative_error(layer, layer[:1]) for layer in keys]
    most = changes.index(max(changes))
    form = _find_form(keys[most], positions) if changes[most] > tolerance else KeyRotation(torch.zeros(1, 0).double())
    frequencies = torch.stack([_frequencies(layer, form, positions) for layer in keys])
    rotation = KeyRotation(frequencies, form.first, form.neighbours)
    for number, layer in enumerate(keys):
        if _error_of(layer, _of_layer(rotation, number), positions) > tolerance:
            raise UserError(f"the model's positions do more to keys than rotate them (layer {number})")
    return rotation


def _positions(max_tokens: int) -> list[int]:
    """0, powers of 2, and some more that only check."""
    powers = [2**power for power in range(max(1, max_tokens - 1).bit_length()) if 2**power < max_tokens]
    checked = [max_tokens * (2 * part + 1) // (2 * _CHECKED_POSITIONS) for part in range(_CHECKED_POSITIONS)]
    return [0, *powers, *checked]


def _keys_at(model: LoadedModel, positions: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of some tokens, by layer, ``[positions, tokens, heads, head_dim]`` float64."""
    module, attention = model.module, _LoneTokens()
    ids = torch.arange(1, _TOKENS + 1, device=module.device) * 7919 % model.vocab_size
    places = torch.tensor(positions, device=module.device).repeat_interleave(_TOKENS)
    with step_attention(attention), torch.inference_mode(), stored_of(module).computing_as_stored():
        module(input_ids=ids.repeat(len(positions))[None], position_ids=places[None], use_cache=False)
    shape = len(positions), _TOKENS
    keys, values = ([x.view(*shape, *x.shape[1:]) for x in tensors] for tensors in (attention.keys, attention.values))
    return keys, values


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / actual.norm().clamp(min=1e-30))


def _of_layer(rotation: KeyRotation, layer: int) -> KeyRotation:
    return KeyRotation(rotation.frequencies[layer : layer + 1], rotation.first, rotation.neighbours)


def _find_form(keys: Tensor, positions: list[int]) -> KeyRotation:
    """The form of a rotation that explains ``keys [positions, tokens, heads, head_dim]`` of one layer best."""
    head_dim = keys.shape[3]
    best, least = KeyRotation(torch.zeros(1, 0).double()), math.inf
    for pairs in range(head_dim // 2, 0, -1):
        for first in {0, head_dim - 2 * pairs}:
            for neighbours in (False, True):
                form = KeyRotation(torch.zeros(1, pairs).double(), first, neighbours)
                fitted = KeyRotation(_frequencies(keys, form, positions)[None], first, neighbours)
                error = _error_of(keys, fitted, positions)
                if error < least:
                    best, least = fitted, error
    return best


def _frequencies(keys: Tensor, form: KeyRotation, positions: list[int]) -> Tensor:
    """``[pairs]``: how fast pairs of ``form`` turn in ``keys [positions, tokens, heads, head_dim]``. Each power of 2
    makes known one more digit, and decides how often the next one has gone round."""
    real, imaginary = form.parts_of(keys.flatten(1, 2).transpose(1, 2)[:, None].contiguous())
    turned = torch.complex(real[:, 0], imaginary[:, 0])  # [positions, pairs, tokens * heads]
    angles = (turned * turned[:1].conj()).sum(-1).angle()
    frequencies = torch.zeros(turned.shape[1], dtype=torch.float64, device=keys.device)
    for place, position in enumerate(positions[:-_CHECKED_POSITIONS]):
        if position:
            rounds = ((frequencies * position - angles[place]) / math.tau).round() if position > 1 else 0
            frequencies = (angles[place] + math.tau * rounds) / position
    return frequencies.cpu()


def _error_of(keys: Tensor, rotation: KeyRotation, positions: list[int]) -> float:
    """Of the keys at the first position, moved by ``rotation`` (of one layer) to those that only check."""
    moved_keys = []
    for position in positions[-_CHECKED_POSITIONS:]:
        first = keys[0].permute(1, 2, 0)[None].clone()  # [1, heads, head_dim, tokens]
        real, imaginary = rotation.parts_of(first)
        turn = torch.exp(1j * rotation.frequencies * position).to(keys.device)[:, None, :, None]
        turned = torch.complex(real, imaginary) * turn
        real.copy_(turned.real)
        imaginary.copy_(turned.imag)
        moved_keys.append(first[0].permute(2, 0, 1))
    return _relative_error(keys[-_CHECKED_POSITIONS:], torch.stack(moved_keys))
