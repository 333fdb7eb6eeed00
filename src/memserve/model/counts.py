"""Layers that count the tokens before them by transformers' cache, and not by positions (Llama 4's temperatures).

A step has tokens of many sequences and no such cache. So a model whose layers ask gets one that keeps nothing, and
answers with a number for each token of the step: its position less its place.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ARGUMENT = "past_key_values"
_ATTRIBUTE = "memserve_counts"


class CountingCache:
    """Stands for transformers' cache: keeps no KV, and knows how many tokens came before."""

    def __init__(self, positions: Tensor) -> None:
        """``positions [1, T]``: of the tokens that are computed."""
        self._positions = positions
        #: layers that have asked
        self.asked: set[int] = set()

    def get_seq_length(self, layer_idx: int | None = None, **_: Any) -> Tensor | int:
        """To a layer, of each of its tokens in a row, ``[T]``; to the model, of the first one."""
        if layer_idx is None:
            return 0
        self.asked.add(layer_idx)
        return self._positions[0] - torch.arange(self._positions.shape[1], device=self._positions.device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any) -> tuple[Tensor, Tensor]:
        """What a layer gives: attention adds what came before."""
        return key_states, value_states


def find_counting(module: Any, ids: Tensor) -> bool:
    """Whether layers of ``module`` count by the cache; ``ids [tokens]``: some tokens, which are computed if there are
    layers that may."""
    if not any(map(_may_count, module.modules())):
        return False
    cache = CountingCache(torch.arange(len(ids), device=ids.device)[None])
    try:
        _forward_counting(module.forward, cache, input_ids=ids[None], position_ids=cache._positions, use_cache=False)
    except Exception as error:  # it asks its cache for more, in whatever way: then the comparison in pieces decides
        log.info("layers that ask their cache for its length do not take ours: %s", error)
        return False
    return bool(cache.asked)


def _may_count(part: Any) -> bool:
    """Whether a layer's forward, and not only the model's, names what answers."""
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    return hasattr(part, "layer_idx") and code is not None and CountingCache.get_seq_length.__name__ in code.co_names


def install_counting(module: Any) -> None:
    """From now on the layers of ``module`` know the positions that it is given."""
    setattr(module, _ATTRIBUTE, True)
    module.forward = _counting(module.forward)


def is_counting(module: Any) -> bool:
    """Whether :func:`install_counting` was called."""
    return bool(getattr(module, _ATTRIBUTE, False))


def _counting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_counting(*args: Any, position_ids: Tensor | None = None, **options: Any) -> Any:
        if position_ids is None or options.get(_ARGUMENT) is not None:
            return forward(*args, position_ids=position_ids, **options)
        return _forward_counting(forward, CountingCache(position_ids), *args, position_ids=position_ids, **options)

    return forward_counting


def _forward_counting(forward: Callable[..., Any], cache: CountingCache, *args: Any, **options: Any) -> Any:
    return forward(*args, **(options | {_ARGUMENT: cache}))
