"""Choosing by load (level 1): what every routing policy falls back on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memserve.policy.candidates import Ask, Candidate, Route
from memserve.types import Role

OVERLOAD_FACTOR = 2
OVERLOAD_TOKENS = 8192
"""An instance is overloaded with more than ``OVERLOAD_FACTOR`` times the work of the least loaded, and this much."""


def load_rank(ask: Ask, candidate: Candidate) -> tuple[int, bool, int]:
    """Less work first; ties go to an instance that knows the session, then to the lowest number."""
    return candidate.work_tokens, candidate.number not in ask.favourites, candidate.number


def least_loaded(ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
    """The first by :func:`load_rank`; there must be one."""
    return min(candidates, key=lambda c: load_rank(ask, c))


def is_overloaded(candidate: Candidate, least: Candidate) -> bool:
    """Whether ``candidate`` has so much more to do than the least loaded one that its cache cannot make up for it."""
    return candidate.work_tokens > OVERLOAD_FACTOR * least.work_tokens + OVERLOAD_TOKENS


def with_decoder(
    first: Candidate, why: str, decoders: Sequence[Candidate], choose: Callable[[Sequence[Candidate]], Candidate]
) -> Route:
    """The whole route once ``first`` is chosen: where it only prefills, ``choose`` picks who decodes."""
    if first.role is not Role.PREFILL or not decoders:
        return Route(first, None, why)
    decoder = choose(decoders)
    return Route(first, decoder, f"{why}; decodes at {decoder.name}, {decoder.work_tokens} tokens of work")
