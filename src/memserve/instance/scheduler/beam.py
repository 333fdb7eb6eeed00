"""Beam search: which hypotheses live on. Pure bookkeeping over tokens and logprobs.

As in transformers' ``generate`` with ``early_stopping=False``: of all continuations of all beams the best
``candidates_wanted`` (``2 * width``, with one stop token) by summed logprob are looked at, best first. One that ends
in a stop token becomes a finished hypothesis if it is among the first ``width`` of them; the others live on until
``width`` do. The search ends when the length is exhausted, when nothing lives, or when ``width`` hypotheses are
finished and the best living beam, scored at its present length, is not better than the worst of them. Score = summed
logprob / generated tokens ** length_penalty, stop token included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

from memserve.base.types import FinishReason

Candidates = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished line of tokens (generated ones only)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cumulative_logprob: float
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Survivor:
    """A continuation that lives on: beam ``parent`` extended by ``token``."""

    parent: int
    token: int
    logprob: float
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class BeamState:
    """A living beam as the search sees it."""

    tokens: Many[int]
    logprobs: Many[float]
    cumulative_logprob: float
    candidates: Candidates


class BeamSearch:
    """The finished hypotheses of one request, and the rule that makes the next generation of beams."""

    __slots__ = ("finished", "length_penalty", "min_tokens", "stops", "width")

    def __init__(self, width: int, length_penalty: float, stops: frozenset[int], min_tokens: int) -> None:
        self.width = width
        self.length_penalty = length_penalty
        self.stops = stops
        self.min_tokens = min_tokens
        #: best first, at most ``width``
        self.finished: list[Hypothesis] = []

    @property
    def candidates_wanted(self) -> int:
        """Enough that ``width`` beams live on even if every beam's best continuations are all the stop tokens."""
        return self.width * max(2, 1 + len(self.stops))

    def next_survivors(self, beams: Many[BeamState], tokens_max: int) -> list[Survivor]:
        """The next generation, best first; empty when the search is over (``finished`` then has the result)."""
        ranked = self._rank_continuations(beams)[: self.candidates_wanted]
        survivors: list[Survivor] = []
        for place, survivor in enumerate(ranked):
            beam = beams[survivor.parent]
            if survivor.token in self.stops and len(beam.tokens) + 1 >= self.min_tokens:
                if place < self.width:
                    self._finish_beam(beam, survivor, FinishReason.STOP)
            elif len(survivors) < self.width:
                survivors.append(survivor)
        length = len(beams[0].tokens) + 1
        if length >= tokens_max:
            for survivor in survivors:
                self._finish_beam(beams[survivor.parent], survivor, FinishReason.LENGTH)
            return []
        return [] if survivors and self._is_settled(survivors[0], length) else survivors

    def _rank_continuations(self, beams: Many[BeamState]) -> list[Survivor]:
        """All continuations, best first; ties by beam, then by the candidate's place."""
        everything = [
            Survivor(parent, token, logprob, beam.cumulative_logprob + logprob)
            for parent, beam in enumerate(beams)
            for token, logprob in beam.candidates
        ]
        everything.sort(key=lambda survivor: -survivor.cumulative_logprob)  # stable
        return everything

    def _length_score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self.length_penalty)

    def _is_settled(self, best: Survivor, length: int) -> bool:
        if len(self.finished) < self.width:
            return False
        return self._length_score(best.cumulative_logprob, length) <= self.finished[-1].score

    def _finish_beam(self, beam: BeamState, last: Survivor, reason: FinishReason) -> None:
        score = self._length_score(last.cumulative_logprob, len(beam.tokens) + 1)
        self.finished.append(
            Hypothesis(
                tokens=(*beam.tokens, last.token),
                logprobs=(*beam.logprobs, last.logprob),
                cumulative_logprob=last.cumulative_logprob,
                score=score,
                reason=reason,
            )
        )
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier wins a tie
        del self.finished[self.width :]
