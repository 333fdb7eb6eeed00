"""Layers that keep latents: what makes keys and values of them, and how such a layer reaches a step's attention.

In multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) a token leaves one latent and one rotary key, which
all heads share; a linear (``kv_b_proj``) makes the rest of each head's key, and its value:

    key of head h    = [ W_K,h latent | rotary key ]        value of head h = W_V,h latent

Attention is then computed in one of two ways, which give the same up to rounding. *Expanded*: make keys and values of
the context, and attend as everywhere. *Absorbed*: multiply the queries by W_K instead, attend to the latents themselves
(one KV head, whose values begin its keys), and multiply what comes out by W_V. Nothing of the context is expanded then,
but a product of a query and a key has the length of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memserve.base.errors import check
from memserve.model.attention.context import EXPANSION_ATTRIBUTE, is_in_step

if TYPE_CHECKING:
    from memserve.model.loading.stored import StoredWeights


class Expansion:
    """The linear that makes keys and values of one layer's latents.

    As long as a model is loaded and compared, the weights are those of the linear, whatever they are at that moment;
    once :meth:`own_weights` has copied them, the linear is not needed any more.
    """

    def __init__(self, linear: nn.Linear, heads: int, key_dim: int, latent_dim: int) -> None:
        """``linear``: ``[latent_dim] -> [heads * (key_dim + value_dim)]`` without a bias; ``key_dim``: without the
        rotary part."""
        self.heads, self.key_dim, self.latent_dim = heads, key_dim, latent_dim
        self.value_dim = linear.out_features // heads - key_dim
        self._linear: nn.Linear | None = linear
        self._owned: tuple[Tensor, Tensor] | None = None

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """``W_K [heads, key_dim, latent_dim]`` and ``W_V [heads, value_dim, latent_dim]``."""
        if self._owned is not None:
            return self._owned
        check(self._linear is not None, "the linear goes when its weights are owned")
        assert self._linear is not None  # for types
        whole = self._linear.weight.detach().view(self.heads, -1, self.latent_dim)
        key, value = whole.split_with_sizes([self.key_dim, self.value_dim], dim=1)
        return key, value

    def of_heads(self, linear: nn.Linear, heads: int) -> Expansion:
        """The same of some heads alone, whose weights ``linear`` has."""
        return Expansion(linear, heads, self.key_dim, self.latent_dim)

    def is_of(self, linear: nn.Module) -> bool:
        """Whether ``linear`` has the weights."""
        return linear is self._linear

    def own_weights(self) -> None:
        """Copy the weights; from now on they do not change with the linear's."""
        if self._owned is None:
            key, value = self.weights
            self._owned = key.contiguous().clone(), value.contiguous().clone()

    def forget_linear(self) -> None:
        """Own the weights alone."""
        self.own_weights()
        self._linear = None

    @staticmethod
    def join_latents(latents: Tensor, rotary: Tensor) -> Tensor:
        """What pages keep: ``[1, 1, T, latent_dim]`` and ``[1, 1, T, rotary]``, the second behind the first."""
        return torch.cat((latents, rotary), dim=3)

    def absorb_queries(self, q: Tensor) -> Tensor:
        """``q [1, heads, T, key_dim + rotary]`` -> ``[1, heads, T, latent_dim + rotary]``, for attention to latents."""
        plain, rotary = q[0].split_with_sizes([self.key_dim, q.shape[3] - self.key_dim], dim=2)
        return torch.cat((torch.bmm(plain, self.weights[0]), rotary), dim=2)[None]

    def values_of(self, mixed: Tensor) -> Tensor:
        """``[1, T, heads, latent_dim]``, of attention to latents -> ``[1, T, heads, value_dim]``, contiguous."""
        by_head = torch.bmm(mixed[0].transpose(0, 1), self.weights[1].transpose(1, 2))
        return by_head.transpose(0, 1).contiguous()[None]

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """``latents [1, 1, T, latent_dim + rotary]`` -> keys ``[1, heads, T, key_dim + rotary]`` and values
        ``[1, heads, T, value_dim]``."""
        plain, rotary = latents.split_with_sizes([self.latent_dim, latents.shape[3] - self.latent_dim], dim=3)
        keys, values = (plain @ weight.transpose(1, 2) for weight in self.weights)
        return torch.cat((keys, rotary.expand(1, self.heads, -1, -1)), dim=3), values


def install_expansion(layer: Any, expansion: Expansion) -> None:
    """From now on ``layer``, a module with transformers' ``expand_kv``, hands its latents to a step's attention as they
    are. Outside a step it computes as it always did."""
    original: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = layer.expand_kv

    def expand_kv(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        return (latents, rotary) if is_in_step() else original(latents, rotary)

    layer.expand_kv = expand_kv
    setattr(layer, EXPANSION_ATTRIBUTE, expansion)


def expanding_layers(module: Any) -> list[Any]:
    """The modules of ``module`` with :func:`install_expansion`, in order."""
    return [part for part in module.modules() if hasattr(part, EXPANSION_ATTRIBUTE)]


def copy_expansions(module: Any, stored: StoredWeights) -> None:
    """Copy what expands latents in ``module``. ``stored``: its weights that stay quantised; these are copied as
    numbers."""
    with stored.computing_as_stored():
        for layer in expanding_layers(module):
            getattr(layer, EXPANSION_ATTRIBUTE).own_weights()


def own_expansions(module: Any, stored: StoredWeights) -> None:
    """As :func:`copy_expansions`, and leave out the linears: nothing calls them in a step. Outside of steps ``module``
    cannot compute any more."""
    copy_expansions(module, stored)
    for layer in expanding_layers(module):
        expansion: Expansion = getattr(layer, EXPANSION_ATTRIBUTE)
        for name, child in list(layer.named_children()):
            if expansion.is_of(child):
                setattr(layer, name, nn.Identity())
        expansion.forget_linear()


def is_expanding(module: Any, linear: nn.Linear) -> bool:
    """Whether ``linear`` expands the latents of a layer of ``module``: nothing calls it in a step."""
    return any(getattr(layer, EXPANSION_ATTRIBUTE).is_of(linear) for layer in expanding_layers(module))
