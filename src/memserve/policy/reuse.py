"""Whether another instance's KV is worth the wait (level 1)."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.policy.costs import CostModel
from memserve.policy.decision import Prefix, Way
from memserve.types import KVGeometry


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """What to ask another instance for."""

    tokens: int
    """Behind the own prefix, whole blocks; 0 = computing is expected to be quicker."""
    wait_ns: int
    """How long an answer is worth waiting for."""
    reason: str
    """Why, in one line for people."""
    link_ns: int = 0
    """How long the link is expected to be busy with it."""


def worth_fetching(
    costs: CostModel, geometry: KVGeometry, prefix: Prefix, *, queue_ns: int, wait_max_ns: int, before_ns: int = 0
) -> FetchChoice:
    """How much of ``prefix.remote_tokens`` to fetch, and how long to wait for it. ``before_ns``: until the transfer can
    begin: steps under way, what other requests fetch already.

    The wait is bounded by the time that computing the same tokens would take, behind the work that is before them in
    any case: so a holder that never answers at most doubles the time to the first token.
    """
    decision = costs.decide(
        prefix.prompt_tokens,
        prefix.hbm_tokens,
        prefix.dram_tokens,
        prefix.remote_tokens,
        geometry,
        same_host=prefix.same_host,
        queue_ns=queue_ns,
        link_busy_ns=before_ns,
    )
    tokens = decision.tokens(Way.FETCH)
    own = prefix.hbm_tokens + prefix.dram_tokens
    if prefix.prompt_tokens - 1 - own <= tokens < prefix.remote_tokens:
        tokens += 1  # the last token is computed in any case, but its block may come as a whole
    tokens = tokens // geometry.block_tokens * geometry.block_tokens
    if not tokens:
        return FetchChoice(0, 0, decision.reason)
    computing_ns = costs.prefill_ns(tokens, own)
    link_ns = costs.transfer_ns(tokens * geometry.token_bytes, prefix.same_host, tokens // geometry.block_tokens)
    return FetchChoice(tokens, max(1, min(wait_max_ns, queue_ns + computing_ns)), decision.reason, link_ns)
