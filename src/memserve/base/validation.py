"""What a request may ask of a model: one check for HTTP, ``memserve.LLM`` and what other processes send.

A token id is checked against the *model's* vocabulary: the tokens that it can read and that it can draw. A tokenizer
may know more of them, or fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from memserve._core import fits_vocabulary
from memserve.base.errors import UserError
from memserve.base.types import Request, SamplingParams, StopParams, TokenArray

_SHOWN_CHARS = 40

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("repetition_penalty", 0.01, 100.0),
)
"""Field of :class:`SamplingParams`, least and greatest value; infinities are never values."""

_numbers_of = attrgetter(*(name for name, _, _ in _RANGES))

_COUNTS = (("n", 0), ("beam_width", 0), ("max_tokens", 0), ("min_tokens", 0), ("top_k", -1))
"""Field of :class:`Request` or of its parts, and least value."""

_POSITIVE = ("top_p",)

_REMEMBERED = 1024
"""Combinations of numbers that were found to be in range: most requests repeat an earlier one's."""


def token_array(ids: Iterable[Any], vocab_size: int, param: str = "prompt") -> TokenArray:
    """``ids`` as int32 ``[n]``. Raises :class:`UserError` unless each is an integer in ``[0, vocab_size)``.

    Arrays are used without a copy; ``True`` is not a token id.
    """
    if not isinstance(ids, np.ndarray):
        items = list(ids)
        kinds = set(map(type, items))
        odd = next((kind for kind in kinds if kind is bool or not issubclass(kind, (int, np.integer))), None)
        if odd is not None:
            raise UserError(f"a token id must be an integer, got {odd.__name__}", param=param)
        try:
            ids = np.fromiter(items, np.int64, len(items))  # a third of what a list costs np.array
        except OverflowError:
            raise _foreign(next(item for item in items if not 0 <= item < vocab_size), vocab_size, param) from None
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise UserError(f"token ids must be one row of integers, got {ids.dtype} of shape {ids.shape}", param=param)
    check_tokens(ids, vocab_size, param)
    return np.ascontiguousarray(ids, dtype=np.int32)


def check_tokens(tokens: np.ndarray, vocab_size: int, param: str = "prompt") -> None:
    """Raise :class:`UserError` unless each of ``tokens [n]``, integers, is in ``[0, vocab_size)``."""
    if not len(tokens):
        return
    if tokens.dtype == np.int32 and tokens.ndim == 1:
        fits = fits_vocabulary(tokens, min(vocab_size, 1 << 31))
    else:
        fits = tokens.min() >= 0 and tokens.max() < vocab_size
    if not fits:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)]
        raise _foreign(bad[0], vocab_size, param)


def check_request(request: Request, vocab_size: int) -> None:
    """Raise :class:`UserError`, with the field at fault as ``param``, unless a model of ``vocab_size`` can run it.

    Lengths are not checked: what fits depends on where the request runs.
    """
    if type(request.sampling) is not SamplingParams or type(request.stop) is not StopParams:
        actual = f"{type(request.sampling).__name__} and {type(request.stop).__name__}"
        raise UserError(f"a request must have SamplingParams and StopParams, got {actual}", param="sampling")
    if request.prompt.dtype != np.int32 or request.prompt.ndim != 1:
        actual = f"{request.prompt.dtype} of shape {request.prompt.shape}"
        raise UserError(f"a prompt must be one row of int32, got {actual}", param="prompt")
    check_tokens(request.prompt, vocab_size)
    sampling, stop = request.sampling, request.stop
    if stop.stop_token_ids:
        _check_ids(stop.stop_token_ids, vocab_size, "stop_token_ids")
    counts = (request.n, request.beam_width, stop.max_tokens, stop.min_tokens, sampling.top_k, sampling.logprobs)
    numbers = _numbers_of(sampling)
    try:
        _check_counts(*counts, request.length_penalty)
        _check_numbers(*numbers)
    except TypeError:  # a value that cannot be hashed
        _check_counts.__wrapped__(*counts, request.length_penalty)
        _check_numbers.__wrapped__(*numbers)
    if not _is_integer(sampling.seed):
        raise UserError(f"seed must be an integer, got {_shown(sampling.seed)}", param="seed")
    for name in ("logprob_token_ids", "allowed_token_ids"):
        if ids := getattr(sampling, name):
            _check_ids(ids, vocab_size, name)
    if sampling.logit_bias:
        _check_ids([token for token, _ in sampling.logit_bias], vocab_size, "logit_bias")
        for _, bias in sampling.logit_bias:
            _number("logit_bias", bias)


@lru_cache(_REMEMBERED, typed=True)
def _check_counts(*values: Any) -> None:
    """``values``: those of ``_COUNTS``, then ``logprobs`` and ``length_penalty``."""
    *counts, logprobs, length_penalty = values
    limits = [(name, value, least) for (name, least), value in zip(_COUNTS, counts, strict=True)]
    if logprobs is not None:
        limits.append(("logprobs", logprobs, 0))
    for name, value, least in limits:
        if not _is_integer(value) or not least <= value < 1 << 63:
            raise UserError(f"{name} must be an integer of at least {least}, got {_shown(value)}", param=name)
    _number("length_penalty", length_penalty)


@lru_cache(_REMEMBERED, typed=True)
def _check_numbers(*values: Any) -> None:
    """``values``: those of ``_RANGES``."""
    for (name, least, most), number in zip(_RANGES, values, strict=True):
        value = _number(name, number)
        if not least <= value <= most or (value == 0.0 and name in _POSITIVE):
            above = "more than 0" if name in _POSITIVE else f"at least {least:g}"
            below = f" and at most {most:g}" if most < math.inf else ""
            raise UserError(f"{name} must be {above}{below}, got {_shown(value)}", param=name)


def _check_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token in ids:
        if not _is_integer(token):
            raise UserError(f"{param}: a token id must be an integer, got {type(token).__name__}", param=param)
        if not 0 <= token < vocab_size:
            raise _foreign(token, vocab_size, param)


def _number(name: str, value: Any) -> float:
    """``value``, if it is a finite number."""
    if isinstance(value, (float, np.floating)) and math.isfinite(value):
        return float(value)
    if _is_integer(value) and abs(value) < 1 << 63:
        return float(value)
    raise UserError(f"{name} must be a finite number, got {_shown(value)}", param=name)


def _is_integer(value: Any) -> bool:
    return type(value) is int or isinstance(value, np.integer)


def _foreign(token: Any, vocab_size: int, param: str) -> UserError:
    message = f"{param}: token id {_shown(int(token))} is out of vocabulary [0, {vocab_size})"
    return UserError(message, param=param)


def _shown(value: Any) -> str:
    """``value`` for a message. Long integers are not written out: Python refuses to, and they tell nothing."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an integer of more than 64 bits"
    return repr(value)[:_SHOWN_CHARS]
