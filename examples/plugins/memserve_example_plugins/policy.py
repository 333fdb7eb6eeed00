"""``--policy roomiest-prefix``: the longest cached prefix among instances that have room for the whole request.

An instance without that room has to preempt or to evict what others are about to use; this policy goes there only when
no instance has room.
"""

from collections.abc import Sequence

from memserve.router.placement.candidates import Ask, Candidate, Route, with_decoder


def roomiest_prefix(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], /) -> Route:
    need_tokens = ask.prompt_tokens + ask.sequences * ask.max_tokens

    def choose(candidates: Sequence[Candidate]) -> Candidate:
        roomy = [candidate for candidate in candidates if candidate.room_tokens >= need_tokens]
        return min(roomy or candidates, key=lambda one: (-one.matched_tokens, -one.room_tokens, one.number))

    best = choose(first)
    why = f"{best.name} has {best.matched_tokens} of {ask.prompt_tokens} tokens, and room for {best.room_tokens}"
    return with_decoder(best, why, decoders, choose)
