"""Who computes a prompt, and who decodes it (level 1): pure functions over a tuple of candidates.

    least-load    fewest tokens of outstanding work
    session       where the session's last request ran, unless that one is overloaded
    prompt-tree   longest cached prefix, unless that one is overloaded (the global prompt trees of MemServe 6)
    cost          shortest expected time to the first token, and what decoding there costs everybody

Each gives its reason in words. Ties go to an instance that knows the session, then to the lowest number.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from memserve.policy.candidates import Ask, Candidate, Policy, Route, RoutingCosts
from memserve.policy.weighing import cost
from memserve.types import Role

OVERLOAD_FACTOR = 2
OVERLOAD_TOKENS = 8192
"""An instance is overloaded with more than ``OVERLOAD_FACTOR`` times the work of the least loaded, and this much."""


def teams(present: Container[Role]) -> tuple[tuple[Role, ...], tuple[Role, ...]]:
    """Which roles may compute the prompt, and which may decode for those of role ``prefill`` (none: each does all).

    Pairs need both roles. Without a pair colocated instances do all of it, and without those whoever is left does: any
    instance with a model can prefill and decode.
    """
    if Role.PREFILL in present and Role.DECODE in present:
        return (Role.PREFILL, Role.COLOCATED), (Role.DECODE,)
    for alone in (Role.COLOCATED, Role.PREFILL, Role.DECODE):
        if alone in present:
            return (alone,), ()
    return (), ()


def split(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Those who take requests, by :func:`teams`."""
    usable = [c for c in candidates if c.takes_requests]
    first, decoders = teams({c.role for c in usable})
    return [c for c in usable if c.role in first], [c for c in usable if c.role in decoders]


def route(policy: str, ask: Ask, candidates: Sequence[Candidate], costs: RoutingCosts) -> Route | None:
    """Decide by ``policy``; ``None`` = no candidate takes requests. A ``KeyError`` for an unknown policy."""
    first, decoders = split(candidates)
    return POLICY[policy](ask, first, decoders, costs) if first else None


# -- by load


def _load_rank(ask: Ask, candidate: Candidate) -> tuple[int, bool, int]:
    return candidate.work_tokens, candidate.number not in ask.favourites, candidate.number


def _least_loaded(ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: _load_rank(ask, c))


def is_overloaded(candidate: Candidate, least: Candidate) -> bool:
    """Whether ``candidate`` has so much more to do than the least loaded one that its cache cannot make up for it."""
    return candidate.work_tokens > OVERLOAD_FACTOR * least.work_tokens + OVERLOAD_TOKENS


def _with_decoder(
    first: Candidate, why: str, decoders: Sequence[Candidate], choose: Callable[[Sequence[Candidate]], Candidate]
) -> Route:
    if first.role is not Role.PREFILL or not decoders:
        return Route(first, None, why)
    decoder = choose(decoders)
    return Route(first, decoder, f"{why}; decodes at {decoder.name}, {decoder.work_tokens} tokens of work")


def least_load(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """Fewest outstanding tokens, for the prompt and for decoding."""
    chosen = _least_loaded(ask, first)
    why = f"least load: {chosen.name} has {chosen.work_tokens} tokens of work"
    return _with_decoder(chosen, why, decoders, lambda some: _least_loaded(ask, some))


def session(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """Where the session is known, while that one is not overloaded; else by load."""

    def choose(some: Sequence[Candidate]) -> Candidate:
        least = _least_loaded(ask, some)
        known = [c for c in some if c.number in ask.favourites and not is_overloaded(c, least)]
        return _least_loaded(ask, known) if known else least

    chosen = choose(first)
    if chosen.number in ask.favourites:
        why = f"session: {chosen.name} knows it"
    else:
        why = f"session: nobody free enough knows it, {chosen.name} has {chosen.work_tokens} tokens of work"
    return _with_decoder(chosen, why, decoders, choose)


def prompt_tree(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """The longest cached prefix among those that are not overloaded; equal ones by load."""

    def choose(some: Sequence[Candidate]) -> Candidate:
        least = _least_loaded(ask, some)
        fair = [c for c in some if not is_overloaded(c, least)]
        return min(fair, key=lambda c: (-c.matched_tokens, *_load_rank(ask, c)))

    chosen = choose(first)
    longest = max(first, key=lambda c: (c.matched_tokens, -c.number))
    why = f"prompt tree: {chosen.name} has {chosen.matched_tokens} of {ask.prompt_tokens} tokens"
    if longest.matched_tokens > chosen.matched_tokens:
        why += f" ({longest.name} has {longest.matched_tokens}, but {longest.work_tokens} tokens of work)"
    return _with_decoder(chosen, why, decoders, choose)


POLICY: dict[str, Policy] = {
    "least-load": least_load,
    "session": session,
    "prompt-tree": prompt_tree,
    "cost": cost,
}
"""By the names of ``ClusterConfig.policy``."""
