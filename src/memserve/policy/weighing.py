"""Routing by cost (level 1): the expected time to the first token at each candidate, and what decoding there costs all.

first     max(prompts before it, fetch) + the next step + swap in + prefill, by the best way to get the prompt's KV
between   transfer of what the decoder lacks
decoder   the steps to come, with what decodes there already

``_core.cheapest`` does these sums for all instances of a cluster at once: what it finds is what :func:`cost` would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memserve import _core
from memserve.policy.candidates import Ask, Candidate, Route, RoutingCosts
from memserve.policy.costs import CostModel
from memserve.types import Role
from memserve.units import NS_PER_MS

DECODE_WINDOW = 16
"""Decode steps that count in a decision. More of them are to come, but work may leave by then."""


class FirstCost(NamedTuple):
    """Expected time until an instance has computed the prompt. Fetching goes on while other prompts are computed (what
    is fetched, and where it goes, is mostly older than the steps under way: ``mempool/fences``); whose KV has come then
    waits for the next step like any other."""

    total_ns: int
    queue_ns: int
    fetch_ns: int
    swap_ns: int
    prefill_ns: int
    reused_tokens: int
    """Not computed: own, or fetched."""


def first_cost(ask: Ask, candidate: Candidate, costs: RoutingCosts) -> FirstCost:
    """The best way for ``candidate`` to get the prompt's KV: recompute, swap in, fetch, each for what lies there."""
    prompt, last = ask.prompt_tokens, ask.prompt_tokens - 1  # the last token's logits are always computed
    prompts_ns = _prompts_ns(ask, candidate, costs)
    step_ns = costs.decode_step_ns(candidate.sequences, candidate.context_tokens)  # of those that decode there
    queue_ns = prompts_ns + step_ns
    own = min(candidate.matched_tokens, last)
    hbm = min(candidate.matched_tokens - candidate.dram_tokens, last)
    prefill_ns = costs.prefill_ns(prompt - hbm, hbm)
    best = FirstCost(queue_ns + prefill_ns, queue_ns, 0, 0, prefill_ns, hbm)
    swap_ns = 0
    if own > hbm:
        swap_ns = costs.swap_in_ns((own - hbm) * ask.token_bytes)
        prefill_ns = costs.prefill_ns(prompt - own, own)
        best = min(best, FirstCost(queue_ns + swap_ns + prefill_ns, queue_ns, 0, swap_ns, prefill_ns, own))
    for holding in ask.holdings:
        there = min(holding.tokens, last)
        if there > own and holding.number != candidate.number:
            same_host = _same_host(holding.host_id, candidate.host_id)
            fetch_ns = costs.transfer_ns((there - own) * ask.token_bytes, same_host)
            prefill_ns = costs.prefill_ns(prompt - there, there)
            total_ns = max(prompts_ns, fetch_ns) + step_ns + swap_ns + prefill_ns
            best = min(best, FirstCost(total_ns, queue_ns, fetch_ns, swap_ns, prefill_ns, there))
    return best


def _same_host(one: str, other: str) -> bool:
    return one == other and one != ""


def _prompts_ns(ask: Ask, candidate: Candidate, costs: RoutingCosts) -> int:
    """The prompts before this one, as if they were like it."""
    return candidate.prefill_tokens * costs.prefill_ns(ask.prompt_tokens, 0) // ask.prompt_tokens


def decode_cost_ns(ask: Ask, candidate: Candidate, costs: RoutingCosts) -> int:
    """What decoding there costs: the steps to come, and waiting for memory when it has none."""
    batch = candidate.sequences + ask.sequences
    step_ns = costs.decode_step_ns(batch, candidate.context_tokens + ask.sequences * ask.prompt_tokens)
    steps = min(DECODE_WINDOW, max(1, ask.max_tokens))
    if ask.prompt_tokens > candidate.room_tokens:
        steps += DECODE_WINDOW  # somebody has to end first
    return steps * step_ns


def _decoder_ns(ask: Ask, candidate: Candidate, costs: RoutingCosts) -> int:
    """Decoding there, with what is before it: prompts that it computes, and swapping in."""
    decode_ns = decode_cost_ns(ask, candidate, costs) + _prompts_ns(ask, candidate, costs)
    if candidate.dram_tokens:
        decode_ns += costs.swap_in_ns(candidate.dram_tokens * ask.token_bytes)
    return decode_ns


class Weighed(NamedTuple):
    """One of the possible decisions, with what it is expected to cost."""

    total_ns: int
    first: Candidate
    decode_at: Candidate | None
    first_cost: FirstCost
    transfer_ns: int


def weigh(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> list[Weighed]:
    """Every pair, and everyone who would do all of it alone."""
    ready = [(candidate, _decoder_ns(ask, candidate, costs)) for candidate in decoders]
    weighed = []
    for candidate in first:
        cost = first_cost(ask, candidate, costs)
        total_ns = cost.total_ns
        if candidate.role is not Role.PREFILL or not ready:
            weighed.append(Weighed(total_ns + decode_cost_ns(ask, candidate, costs), candidate, None, cost, 0))
            continue
        for decoder, decode_ns in ready:
            lacking_bytes = max(0, ask.prompt_tokens - decoder.matched_tokens) * ask.token_bytes
            transfer_ns = costs.transfer_ns(lacking_bytes, _same_host(candidate.host_id, decoder.host_id))
            weighed.append(Weighed(total_ns + transfer_ns + decode_ns, candidate, decoder, cost, transfer_ns))
    return weighed


def native_prices(costs: CostModel) -> _core.RoutingPrices:
    """``costs`` as ``_core.cheapest`` wants them."""
    prefill, decode = costs.prefill, costs.decode
    copies = [(copy.start_ns, copy.piece_ns, copy.byte_ns) for copy in (costs.swap_in, costs.same_host, costs.network)]
    return _core.RoutingPrices(
        (prefill.step_ns, prefill.token_ns, prefill.pair_ns),
        (decode.step_ns, decode.row_ns, decode.context_ns),
        *copies,
    )


def cost(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
    """The least of what :func:`weigh` says."""

    def rank(entry: Weighed) -> tuple[int, int, int]:
        decoder = entry.decode_at.number if entry.decode_at else -1
        known = (entry.first.number in ask.favourites) + (decoder in ask.favourites)
        return -known, entry.first.number, decoder

    weighed = weigh(ask, first, decoders, costs)
    least_ns = min([entry.total_ns for entry in weighed])
    best = min([entry for entry in weighed if entry.total_ns == least_ns], key=rank)
    return Route(best.first, best.decode_at, _cost_reason(ask, best))


def _cost_reason(ask: Ask, best: Weighed) -> str:
    _, queue_ns, fetch_ns, swap_ns, prefill_ns, reused_tokens = best.first_cost
    spent = (("queue", queue_ns), ("fetch", fetch_ns), ("swap in", swap_ns), ("prefill", prefill_ns))
    listed = ", ".join([f"{name} {ns / NS_PER_MS:.1f}" for name, ns in (*spent, ("transfer", best.transfer_ns)) if ns])
    where = f"{best.first.name} to {best.decode_at.name}" if best.decode_at else best.first.name
    return f"cost: {where} reuses {reused_tokens} of {ask.prompt_tokens} tokens; expected ms: {listed}"
