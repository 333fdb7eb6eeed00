"""What dispatches and answers leave behind in counters, in the reuse that would be possible, and in the metadata."""

from __future__ import annotations

from memserve.cluster.outbox import Outbox
from memserve.cluster.placement import Placement, Placer
from memserve.cluster.prefix_map import RecentPrompts
from memserve.cluster.report import Counters
from memserve.cluster.requests import RequestState
from memserve.cluster.trees import IDENTITY_BYTES
from memserve.config import ClusterConfig
from memserve.metadata import EntryUsed
from memserve.policy.distinct import ReuseCeiling


class Tallies:
    """Counts; decides nothing."""

    __slots__ = ("_config", "_counters", "_outbox", "_placer", "ceiling", "recent_prompts")

    def __init__(self, config: ClusterConfig, placer: Placer, outbox: Outbox, counters: Counters) -> None:
        self._config, self._placer, self._outbox, self._counters = config, placer, outbox, counters
        self.ceiling, self.recent_prompts = ReuseCeiling(), RecentPrompts()

    def dispatched(self, req: RequestState, chosen: Placement, now: int) -> None:
        """An attempt of ``req`` is dispatched."""
        self._count_dispatch(req, chosen)
        self._count_prompt(req, chosen, now)
        self._note_use(req, chosen, now)

    def _count_dispatch(self, req: RequestState, chosen: Placement) -> None:
        counters = self._counters
        counters.dispatches += 1
        counters.resumptions += bool(req.past)
        counters.prompt_tokens += chosen.prompt_tokens
        counters.matched_tokens += chosen.route.first.matched_tokens
        way = "fetch" if chosen.holders else "reuse" if chosen.route.first.matched_tokens else "compute"
        decision = (self._config.policy, way)
        counters.decisions[decision] = counters.decisions.get(decision, 0) + 1

    def _count_prompt(self, req: RequestState, chosen: Placement, now: int) -> None:
        """Each prompt counts once, whatever becomes of its attempts."""
        if req.identities and not req.past:
            tenant, block_tokens = req.request.tenant, chosen.first.info.geometry.block_tokens
            self.ceiling.prompt(tenant, req.identities, len(req.request.prompt), block_tokens)
            self.recent_prompts.note(tenant, req.identities, now)

    def _note_use(self, req: RequestState, chosen: Placement, now: int) -> None:
        """The deepest block of the prefix that is reused stands for all of them."""
        blocks = chosen.route.first.matched_tokens // chosen.first.info.geometry.block_tokens
        if blocks and req.identities and self._outbox.remembers:
            end = blocks * IDENTITY_BYTES
            self._outbox.note(EntryUsed(chosen.first.peer, req.identities[end - IDENTITY_BYTES : end], now))

    def answered(self, req: RequestState) -> None:
        """The next prompt of a conversation begins with this one and its answer."""
        for tokens in req.emitted if req.identities is not None else ():
            blocks = self._placer.answer_identities(req, tokens)
            if blocks:
                self.ceiling.answer(req.request.tenant, blocks)
