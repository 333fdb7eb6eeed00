"""Routing rules of other projects as policies: the simulator compares rules and nothing else.

They are written from their documentation. All see the exact prefixes that our router sees, and loads as fresh as ours
(:class:`RuledWorld`).

======= ====================================================================================================
dynamo  the least of prefill blocks (waiting there, and of this prompt what is not cached) and decode blocks
llm-d   the most of 3 x prefix + 2 x memory + 2 x queue, each from 0 to 1 (the weights of its guides)
======= ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memserve.base.errors import UserError
from memserve.base.units import ceil_div
from memserve.router.machine import Cluster
from memserve.router.placement.candidates import Ask, Candidate, Policy, Route, with_decoder
from memserve.router.placement.placer import ALL_OF
from memserve_lab.sim.replay.setup import Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Workload

OVERLAP_WEIGHT = 1.0
"""Dynamo's default weight of prefill blocks."""
PREFIX_WEIGHT, MEMORY_WEIGHT, QUEUE_WEIGHT = 3.0, 2.0, 2.0


def dynamo(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """NVIDIA Dynamo's KV router at temperature 0: ``overlap weight * prefill blocks + decode blocks``, the least."""

    def cost_of(candidate: Candidate) -> tuple[float, int]:
        uncached_tokens = max(0, ask.prompt_tokens - candidate.matched_tokens)
        prefill = ceil_div(candidate.prefill_tokens + uncached_tokens, ask.block_tokens)
        decode = ceil_div(candidate.context_tokens + ask.prompt_tokens, ask.block_tokens)
        return OVERLAP_WEIGHT * prefill + decode, candidate.number

    return _route(first, decoders, lambda candidates: min(candidates, key=cost_of))


def llm_d(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """llm-d's precise prefix scorer, with those of memory and of the queue: the highest sum.

    The queue counts requests that wait there, which a router knows here as uncomputed prompt tokens.
    """

    def choose(candidates: Sequence[Candidate]) -> Candidate:
        longest = max(candidate.matched_tokens for candidate in candidates)
        queues = [candidate.prefill_tokens for candidate in candidates]
        least, most = min(queues), max(queues)

        def score_of(candidate: Candidate) -> tuple[float, int]:
            prefix = candidate.matched_tokens / longest if longest else 0.0
            used_tokens = candidate.context_tokens
            memory = 1 - used_tokens / max(1, used_tokens + candidate.room_tokens)
            queue = (most - candidate.prefill_tokens) / (most - least) if most > least else 1.0
            return PREFIX_WEIGHT * prefix + MEMORY_WEIGHT * memory + QUEUE_WEIGHT * queue, -candidate.number

        return max(candidates, key=score_of)

    return _route(first, decoders, choose)


def _route(
    first: Sequence[Candidate], decoders: Sequence[Candidate], choose: Callable[[Sequence[Candidate]], Candidate]
) -> Route:
    best = choose(first)
    return with_decoder(best, f"{best.name} has {best.matched_tokens} tokens of the prompt", decoders, choose)


RULES: dict[str, Policy] = {"dynamo": dynamo, "llm-d": llm_d}


class RuledWorld(ReplayWorld):
    """A world whose router chooses by a rule that no configuration names, or names no holder of a prefix."""

    def __init__(self, setup: Setup, workload: Workload, rule: Policy | None = None, fetches: bool = True) -> None:
        """``rule``: None: the policy of ``setup``. ``fetches``: instances may take prefixes from each other. Raises
        :class:`UserError` where there are more instances than a rule would be shown."""
        if rule is not None and max(setup.instances.values()) > ALL_OF:
            raise UserError(f"rules of others see {ALL_OF} instances at most", hint=f"--instances {ALL_OF}")
        self._rule, self._fetches = rule, fetches
        super().__init__(setup, workload)

    def new_cluster(self) -> Cluster:
        cluster = super().new_cluster()
        placer = cluster._placer
        if self._rule is not None:
            placer._decide = self._rule
        if not self._fetches:
            placer._longest_holders = lambda matches: []  # type: ignore[method-assign]  # no configuration turns fetches off: this placer's only
        return cluster
