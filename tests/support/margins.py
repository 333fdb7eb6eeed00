"""How clearly a model decides for the tokens of an answer, and whether the rounding of float32 can change them.

Two computations in float32 that take the rows of a step or the pieces of a prompt in another order differ in the last
bits of their logits. Where two tokens are about as probable, or the number that draws lies at the border between two,
either is right. Tests that compare answers need some without such a place: ``AnswerCheck`` tells which those are, with
the model in transformers in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memserve.model.sampling import uniforms

Floats = NDArray[np.float64]

ROUNDINGS = 8.0
"""A margin is wide when it has so many times what float32 rounds in transformers: other kernels round otherwise."""


def token_margins(logits: Floats, tokens: Sequence[int], temperature: float, seed: int = 0) -> Floats:
    """For each of the ``tokens [n]`` of an answer, drawn from ``logits [n, vocab]``: how far the nearest decision for
    another token is away. Greedy: in logits, from the best other one. Drawn: in log-odds, from the drawn number to the
    nearest border between tokens. Below zero: these logits give another token."""
    rows, chosen = np.arange(len(tokens)), np.asarray(tokens)
    if temperature == 0:
        others = logits.copy()
        others[rows, chosen] = -np.inf
        return np.asarray(logits[rows, chosen] - others.max(-1))
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    ends = weights.cumsum(-1) / weights.sum(-1, keepdims=True)
    ends[:, -1] = 1.0
    begins = np.where(chosen > 0, ends[rows, chosen - 1], 0.0)
    drawn = _log_odds(uniforms(np.full(len(rows), seed, np.uint64), np.zeros_like(rows), rows))
    return np.asarray(np.minimum(drawn - _log_odds(begins), _log_odds(ends[rows, chosen]) - drawn))


def _log_odds(mass: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(mass) - np.log1p(-mass))


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one answer."""

    margin: float
    """The smallest of its tokens."""
    rounding: float
    """By how much its margins differ at most between float32 and float64."""

    @property
    def is_right(self) -> bool:
        """Whether the oracle gives these tokens, but for what rounding decides."""
        return self.margin > -ROUNDINGS * self.rounding

    @property
    def is_decided(self) -> bool:
        """Whether rounding decides none of them."""
        return self.margin > ROUNDINGS * self.rounding


class AnswerCheck:
    """Judges answers with ``module``, a model of transformers in float32."""

    def __init__(self, module: Any) -> None:
        self._single, self._double = module, copy.deepcopy(module).double()
        if hasattr(self._double, "set_experts_implementation"):  # the grouped product knows no float64
            self._double.set_experts_implementation("eager")

    def judge(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float, seed: int = 0) -> Verdict:
        """An answer's ``tokens`` to ``prompt``."""
        single, double = (
            token_margins(self._logits(module, prompt, tokens), tokens, temperature, seed)
            for module in (self._single, self._double)
        )
        return Verdict(float(double.min()), float(np.abs(single - double).max()))

    @staticmethod
    def _logits(module: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Floats:
        """``[len(tokens), vocab]``: what each token of the answer is drawn from."""
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return np.asarray(logits.double().numpy())
