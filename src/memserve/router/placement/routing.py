"""Which instance computes a prompt, and which one decodes it: pure functions over a few candidates.

    least-load    fewest tokens of outstanding work
    session       where the session's last request ran, unless that one is overloaded
    prompt-tree   longest cached prefix, unless that one is overloaded (the global prompt trees of MemServe 6)
    affinity      the session's place, else an exact hit, else the longest prefix, else by load
    best-fit      least room left over, ties by load
    cost          shortest expected time to the first token, and what it costs all others (MemServe 5.3)

Each gives its reason in words. Ties go to an instance that knows the session, then to the lowest number.

``cost`` adds up, with each candidate's own profile::

    first     max(prompts before it, fetch) + the next step + swap in + prefill, by the quickest way to get the KV
    others    what computing more of the prompt than the instance with the longest prefix takes from those behind it
    between   transfer of what the decoder lacks, which the decoder pulls
    decoder   the decode steps to come, with the sequences that decode there

What is computed for ``w`` delays by ``w`` each prompt that comes before the queue is empty. While a queue is as long as
it is, as many come in the time that it lasts as are in it (Little's law), so those before a prompt are the estimate of
those behind it. Where memory is full, prompts wait until sequences end, and these end later by what is computed
between their steps: then all sequences there count. Three things follow from what the sum is for:

* What no instance has must be computed by one of them, so it takes nothing that could be spared: ``w`` counts beyond
  the least of all instances. Prompts that nothing is known of go where they are soonest.
* KV that is fetched counts as if it were computed: it takes the room of as much other KV, which is computed again.
* An idle instance has no queue to delay: a prefix that many ask for is soon at several instances.

``_core.cheapest`` computes these sums for all instances of a cluster at once, and chooses as :func:`cost` does.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import astuple
from typing import NamedTuple

from memserve import _core
from memserve.base.plugins import REASON_CHARS_MAX, ROUTING_POLICIES
from memserve.base.types import Role
from memserve.base.units import NS_PER_MS
from memserve.kv.costs import CopyCurve, CostModel
from memserve.router.placement.candidates import (
    Ask,
    Candidate,
    Policy,
    Route,
    least_loaded,
    load_rank,
    not_overloaded,
    with_decoder,
)

DECODE_WINDOW = 16
"""Decode steps that count in a decision. More will follow, but other work may have left by then."""


def teams(present: Container[Role]) -> tuple[tuple[Role, ...], tuple[Role, ...]]:
    """Which roles may compute the prompt, and which may decode for ``prefill`` instances (none: each instance does
    both).

    Pairs need both roles. Without a pair, colocated instances do both; without those too, the instances of the role
    that is left do both: any instance with a model can prefill and decode. Engines do both beside them.
    """
    if Role.PREFILL in present and Role.DECODE in present:
        return (Role.PREFILL, Role.COLOCATED, Role.ENGINE), (Role.DECODE,)
    for alone in (Role.COLOCATED, Role.PREFILL, Role.DECODE):
        if alone in present:
            return (alone, Role.ENGINE), ()
    return (Role.ENGINE,) if Role.ENGINE in present else (), ()


def split(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates that take requests, by :func:`teams`."""
    usable = [c for c in candidates if c.takes_requests]
    first, decoders = teams({c.role for c in usable})
    return [c for c in usable if c.role in first], [c for c in usable if c.role in decoders]


def route(policy: str, ask: Ask, candidates: Sequence[Candidate]) -> Route | None:
    """Decide by ``policy``; ``None``: no candidate takes requests. Raises :class:`UserError` for an unknown policy."""
    first, decoders = split(candidates)
    return policy_named(policy)(ask, first, decoders) if first else None


def least_load(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """Fewest outstanding tokens, for the prompt and for decoding."""
    best = least_loaded(ask, first)
    why = f"least load: {best.name} has {best.work_tokens} tokens of work"
    return with_decoder(best, why, decoders, lambda candidates: least_loaded(ask, candidates))


def session(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """An instance that knows the session, unless it is overloaded; else by load."""

    def choose(candidates: Sequence[Candidate]) -> Candidate:
        least = least_loaded(ask, candidates)
        familiar = [c for c in not_overloaded(candidates, least) if c.number in ask.favourites]
        return least_loaded(ask, familiar) if familiar else least

    best = choose(first)
    if best.number in ask.favourites:
        why = f"session: {best.name} knows it"
    else:
        why = f"session: none that knows it is free enough, {best.name} has {best.work_tokens} tokens of work"
    return with_decoder(best, why, decoders, choose)


def prompt_tree(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """The longest cached prefix among those that are not overloaded; ties by load."""
    best = _longest_prefix(ask, first)
    longest = max(first, key=lambda c: (c.matched_tokens, -c.number))
    why = f"prompt tree: {best.name} has {best.matched_tokens} of {ask.prompt_tokens} tokens"
    if longest.matched_tokens > best.matched_tokens:
        why += f" ({longest.name} has {longest.matched_tokens}, but {longest.work_tokens} tokens of work)"
    return with_decoder(best, why, decoders, lambda candidates: _longest_prefix(ask, candidates))


def _longest_prefix(ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
    fair = not_overloaded(candidates, least_loaded(ask, candidates))
    return min(fair, key=lambda c: (-c.matched_tokens, *load_rank(ask, c)))


def affinity(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """The first rule that has an answer decides, for the prompt and for decoding::

        1  session affinity   the instance that ran the session's last request
        2  exact hit          the instance that has all whole blocks of the prompt
        3  longest prefix     the instance that has most of it
        4  miss               the least loaded instance, whose cache the request itself fills

    An overloaded instance is no answer to 1 to 3: a cache does not make up for a queue of other prompts.
    """
    best, why = _first_rule(ask, first)
    return with_decoder(best, f"affinity: {why}", decoders, lambda candidates: _first_rule(ask, candidates)[0])


def _first_rule(ask: Ask, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    least = least_loaded(ask, candidates)
    familiar = [c for c in not_overloaded(candidates, least) if c.number in ask.favourites]
    if familiar:
        best = least_loaded(ask, familiar)
        return best, f"session: {best.name} knows it"
    best = _longest_prefix(ask, candidates)
    if not best.matched_tokens:
        return least, f"miss: {least.name} has {least.work_tokens} tokens of work, and fills its cache"
    if ask.prompt_tokens - best.matched_tokens < ask.block_tokens:
        return best, f"exact hit: {best.name} has the whole prompt"
    return best, f"longest prefix: {best.name} has {best.matched_tokens} of {ask.prompt_tokens} tokens"


# -- by cost


class FirstCost(NamedTuple):
    """Expected time until an instance has computed the prompt.

    Fetching goes on while other prompts are computed (what is fetched, and where it goes, is mostly older than the
    steps under way: ``kv/transfer/barriers.py``); then the request waits for the next step like any other.
    """

    total_ns: int
    queue_ns: int
    fetch_ns: int
    swap_ns: int
    prefill_ns: int
    reused_tokens: int
    """Tokens that are not computed: own, or fetched."""


def first_cost(ask: Ask, candidate: Candidate) -> FirstCost:
    """The best way for ``candidate`` to get the prompt's KV: recompute, swap in, fetch, each for what lies there."""
    costs = candidate.costs
    prompt, last = ask.prompt_tokens, ask.prompt_tokens - 1  # the last token's logits are always computed
    prompts_ns = _prompts_ns(ask, candidate)
    step_ns = costs.decode_step_ns(candidate.sequences, candidate.context_tokens)  # of the sequences that decode there
    queue_ns = prompts_ns + step_ns
    own_tokens = min(candidate.matched_tokens, last)
    hbm = min(candidate.matched_tokens - candidate.dram_tokens, last)
    prefill_ns = costs.prefill_ns(prompt - hbm, hbm)
    best = FirstCost(queue_ns + prefill_ns, queue_ns, 0, 0, prefill_ns, hbm)
    swap_ns = 0
    if own_tokens > hbm:
        swap_ns = _kv_ns(ask, costs.swap_in, own_tokens - hbm)
        prefill_ns = costs.prefill_ns(prompt - own_tokens, own_tokens)
        best = min(best, FirstCost(queue_ns + swap_ns + prefill_ns, queue_ns, 0, swap_ns, prefill_ns, own_tokens))
    for holding in ask.holdings:
        held_tokens = min(holding.tokens, last)
        if held_tokens > own_tokens and holding.number != candidate.number:
            link = costs.link_curve(_same_host(holding.host_id, candidate.host_id))
            read_ns = _kv_ns(ask, holding.disk, min(holding.disk_tokens, held_tokens - own_tokens))
            fetch_ns = _kv_ns(ask, link, held_tokens - own_tokens + ask.state_blocks * ask.block_tokens) + read_ns
            prefill_ns = costs.prefill_ns(prompt - held_tokens, held_tokens)
            total_ns = max(prompts_ns, fetch_ns) + step_ns + swap_ns + prefill_ns
            best = min(best, FirstCost(total_ns, queue_ns, fetch_ns, swap_ns, prefill_ns, held_tokens))
    return best


def _same_host(first_host: str, second_host: str) -> bool:
    return first_host == second_host and first_host != ""


def _kv_ns(ask: Ask, curve: CopyCurve, tokens: int, block_pieces: int = 1) -> int:
    return curve.kv_ns(tokens, ask.block_tokens, ask.token_bytes, block_pieces)


def _prompts_ns(ask: Ask, candidate: Candidate) -> int:
    """Time of the prompts before this one, taken to be like it."""
    return candidate.prefill_tokens * candidate.costs.prefill_ns(ask.prompt_tokens, 0) // ask.prompt_tokens


def lacking_ns(ask: Ask, candidate: Candidate) -> int:
    """Time to compute what ``candidate`` itself does not have of the prompt."""
    own_tokens = min(candidate.matched_tokens, ask.prompt_tokens - 1)
    return candidate.costs.prefill_ns(ask.prompt_tokens - own_tokens, own_tokens)


def others_ns(ask: Ask, candidate: Candidate, least_ns: int) -> int:
    """Time that others lose there, all together, by what another instance need not compute. ``least_ns``: the least
    :func:`lacking_ns` of all instances that may compute the prompt."""
    spared_ns = max(0, lacking_ns(ask, candidate) - least_ns)
    behind_ns = candidate.prefill_tokens * spared_ns // ask.prompt_tokens  # prompts taken to be like this one
    if _is_full(ask, candidate):  # they wait for those that decode, too
        return max(behind_ns, candidate.sequences * spared_ns)
    return behind_ns


def _is_full(ask: Ask, candidate: Candidate) -> bool:
    return ask.prompt_tokens > candidate.room_tokens


def _decode_ns(ask: Ask, candidate: Candidate) -> int:
    """Time of decoding there: the steps to come, and the wait for memory if there is none."""
    batch = candidate.sequences + ask.sequences
    context_tokens = candidate.context_tokens + ask.sequences * ask.prompt_tokens
    steps = min(DECODE_WINDOW, max(1, ask.max_tokens))
    if _is_full(ask, candidate):
        steps += DECODE_WINDOW  # another sequence must end first
    return steps * candidate.costs.decode_step_ns(batch, context_tokens)


def _decoder_ns(ask: Ask, candidate: Candidate) -> int:
    """Time of decoding there, with what comes before: prompts that the instance computes, and swapping in."""
    swap_ns = _kv_ns(ask, candidate.costs.swap_in, candidate.dram_tokens)
    return _decode_ns(ask, candidate) + _prompts_ns(ask, candidate) + swap_ns


def handoff_ns(ask: Ask, first: Candidate, decoder: Candidate) -> int:
    """Time in which the decoder pulls what it lacks of the prompt, and a state where layers have one."""
    tokens = max(0, ask.prompt_tokens - decoder.matched_tokens) + ask.state_blocks * ask.block_tokens
    return _kv_ns(ask, link_between(first, decoder), tokens, ask.handoff_pieces)


def link_between(first: Candidate, decoder: Candidate) -> CopyCurve:
    """What pulls from ``first`` cost ``decoder``."""
    return decoder.costs.link_curve(_same_host(first.host_id, decoder.host_id))


class Weighed(NamedTuple):
    """One possible decision, with its expected cost."""

    total_ns: int
    first: Candidate
    decode_at: Candidate | None


def weigh(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> list[Weighed]:
    """Every pair, and every candidate that can do both parts alone."""
    ready = [(candidate, _decoder_ns(ask, candidate)) for candidate in decoders]
    least_ns = _least_lacking_ns(ask, first)
    weighed = []
    for candidate in first:
        total_ns = first_cost(ask, candidate).total_ns + others_ns(ask, candidate, least_ns)
        if candidate.role is not Role.PREFILL or not ready:
            weighed.append(Weighed(total_ns + _decode_ns(ask, candidate), candidate, None))
            continue
        for decoder, decode_ns in ready:
            weighed.append(Weighed(total_ns + handoff_ns(ask, candidate, decoder) + decode_ns, candidate, decoder))
    return weighed


def _least_lacking_ns(ask: Ask, first: Sequence[Candidate]) -> int:
    if ask.least_lacking_ns is not None:
        return ask.least_lacking_ns
    return min([lacking_ns(ask, candidate) for candidate in first])


def native_prices(profiles: Iterable[CostModel]) -> _core.RoutingPrices:
    """``profiles`` in the form that ``_core.cheapest`` takes."""
    return _core.RoutingPrices(
        [
            [astuple(curve) for curve in (p.prefill, p.decode, p.swap_in, p.same_host, p.network, p.disk)]
            for p in profiles
        ]
    )


def cost(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """The cheapest of :func:`weigh`. Where there is one way only, as from ``_core.cheapest``, nothing is weighed."""

    def rank(entry: Weighed) -> tuple[int, int, int]:
        decoder = entry.decode_at.number if entry.decode_at else -1
        familiar = (entry.first.number in ask.favourites) + (decoder in ask.favourites)
        return -familiar, entry.first.number, decoder

    best_first, best_decoder = first[0], decoders[0] if decoders and first[0].role is Role.PREFILL else None
    if len(first) > 1 or len(decoders) > 1:
        weighed = weigh(ask, first, decoders)
        least_ns = min([entry.total_ns for entry in weighed])
        _, best_first, best_decoder = min([entry for entry in weighed if entry.total_ns == least_ns], key=rank)
    lost_ns = others_ns(ask, best_first, _least_lacking_ns(ask, first))
    return Route(best_first, best_decoder, _cost_reason(ask, best_first, best_decoder, lost_ns))


_SPENT = "queue", "fetch", "swap in", "prefill", "transfer", "others"


def _cost_reason(ask: Ask, first: Candidate, decoder: Candidate | None, lost_ns: int) -> str:
    _, queue_ns, fetch_ns, swap_ns, prefill_ns, reused_tokens = first_cost(ask, first)
    transfer_ns = 0 if decoder is None else handoff_ns(ask, first, decoder)
    spent_ns = queue_ns, fetch_ns, swap_ns, prefill_ns, transfer_ns, lost_ns
    listed = ", ".join([f"{name} {ns / NS_PER_MS:.1f}" for name, ns in zip(_SPENT, spent_ns, strict=True) if ns])
    places = f"{first.name} to {decoder.name}" if decoder is not None else first.name
    return f"cost: {places} reuses {reused_tokens} of {ask.prompt_tokens} tokens; expected ms: {listed}"


def policy_named(name: str) -> Policy:
    """The policy that ``ROUTING_POLICIES`` has by this name; raises :class:`UserError` where there is none, or where it
    cannot be loaded.

    A plug-in may be wrong: where it raises, or chooses what it was not offered, the request goes by load, and the
    reason says why.
    """
    policy: Policy = ROUTING_POLICIES.load(name)
    return policy if name in ROUTING_POLICIES.built_in else _guarded(name, policy)


def _guarded(name: str, policy: Policy) -> Policy:
    def decide(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
        try:
            decided = policy(ask, first, decoders)
            if decided.first in first and (decided.decode_at is None or decided.decode_at in decoders):
                return decided._replace(reason=f"{name}: {decided.reason}"[:REASON_CHARS_MAX])
            why = "it chose an instance that it was not offered"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        spare = least_load(ask, first, decoders)
        return spare._replace(reason=f"policy {name} failed ({why}); {spare.reason}"[:REASON_CHARS_MAX])

    return decide
