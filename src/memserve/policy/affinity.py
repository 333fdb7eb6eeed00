"""Routing in a fixed order (level 1): the first rule that has an answer decides (row C2).

::

    1  session affinity   who ran the session's last request
    2  exact hit          who has all whole blocks of the prompt
    3  longest prefix     who has most of it
    4  miss               who has least to do; its cache is filled by the request itself, so the next one is a hit

Whoever is overloaded has no say in 1 to 3: a cache does not make up for a queue of other prompts. Ties go to less work,
then to the lowest number.
"""

from __future__ import annotations

from collections.abc import Sequence

from memserve.policy.byload import is_overloaded, least_loaded, load_rank, with_decoder
from memserve.policy.candidates import Ask, Candidate, Route, RoutingCosts


def affinity(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """Session, exact hit, longest prefix, least load: in this order, for the prompt and for decoding."""
    chosen, why = choose_in_order(ask, first)
    return with_decoder(chosen, f"affinity: {why}", decoders, lambda some: choose_in_order(ask, some)[0])


def choose_in_order(ask: Ask, some: Sequence[Candidate]) -> tuple[Candidate, str]:
    """Who of ``some`` (at least one), and by which rule."""
    least = least_loaded(ask, some)
    fair = [c for c in some if not is_overloaded(c, least)]
    known = [c for c in fair if c.number in ask.favourites]
    if known:
        chosen = least_loaded(ask, known)
        return chosen, f"session: {chosen.name} knows it"
    chosen = min(fair, key=lambda c: (-c.matched_tokens, *load_rank(ask, c)))
    if not chosen.matched_tokens:
        return least, f"miss: {least.name} has {least.work_tokens} tokens of work, and fills its cache"
    if ask.prompt_tokens - chosen.matched_tokens < ask.block_tokens:
        return chosen, f"exact hit: {chosen.name} has the whole prompt"
    return chosen, f"longest prefix: {chosen.name} has {chosen.matched_tokens} of {ask.prompt_tokens} tokens"
