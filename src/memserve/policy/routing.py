"""Who computes a prompt, and who decodes it (level 1): pure functions over a tuple of candidates.

    least-load    fewest tokens of outstanding work
    session       where the session's last request ran, unless that one is overloaded
    prompt-tree   longest cached prefix, unless that one is overloaded (the global prompt trees of MemServe 6)
    affinity      the session's place, else an exact hit, else the longest prefix, else by load (row C2)
    best-fit      least room left over, ties by load (row C4)
    cost          shortest expected time to the first token, and what decoding there costs everybody

Each gives its reason in words. Ties go to an instance that knows the session, then to the lowest number.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from memserve.policy.affinity import affinity
from memserve.policy.byload import OVERLOAD_FACTOR as OVERLOAD_FACTOR
from memserve.policy.byload import OVERLOAD_TOKENS as OVERLOAD_TOKENS
from memserve.policy.byload import is_overloaded, least_loaded, load_rank, with_decoder
from memserve.policy.candidates import Ask, Candidate, Policy, Route, RoutingCosts
from memserve.policy.ledger import best_fit_route
from memserve.policy.weighing import cost
from memserve.types import Role


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


def least_load(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """Fewest outstanding tokens, for the prompt and for decoding."""
    chosen = least_loaded(ask, first)
    why = f"least load: {chosen.name} has {chosen.work_tokens} tokens of work"
    return with_decoder(chosen, why, decoders, lambda some: least_loaded(ask, some))


def session(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """Where the session is known, while that one is not overloaded; else by load."""

    def choose(some: Sequence[Candidate]) -> Candidate:
        least = least_loaded(ask, some)
        known = [c for c in some if c.number in ask.favourites and not is_overloaded(c, least)]
        return least_loaded(ask, known) if known else least

    chosen = choose(first)
    if chosen.number in ask.favourites:
        why = f"session: {chosen.name} knows it"
    else:
        why = f"session: nobody free enough knows it, {chosen.name} has {chosen.work_tokens} tokens of work"
    return with_decoder(chosen, why, decoders, choose)


def prompt_tree(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """The longest cached prefix among those that are not overloaded; equal ones by load."""

    def choose(some: Sequence[Candidate]) -> Candidate:
        least = least_loaded(ask, some)
        fair = [c for c in some if not is_overloaded(c, least)]
        return min(fair, key=lambda c: (-c.matched_tokens, *load_rank(ask, c)))

    chosen = choose(first)
    longest = max(first, key=lambda c: (c.matched_tokens, -c.number))
    why = f"prompt tree: {chosen.name} has {chosen.matched_tokens} of {ask.prompt_tokens} tokens"
    if longest.matched_tokens > chosen.matched_tokens:
        why += f" ({longest.name} has {longest.matched_tokens}, but {longest.work_tokens} tokens of work)"
    return with_decoder(chosen, why, decoders, choose)


POLICY: dict[str, Policy] = {
    "least-load": least_load,
    "session": session,
    "prompt-tree": prompt_tree,
    "cost": cost,
    "affinity": affinity,
    "best-fit": best_fit_route,
}
"""By the names of ``ClusterConfig.policy``."""
