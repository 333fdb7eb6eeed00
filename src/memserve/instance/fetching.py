"""Asking other instances for a prefix before a request is admitted (level 2).

The request is WAITING_FOR_REMOTE_KV until the KV is in the index, or the wait is over; then it waits for admission
like any other, and finds in the index what has come.
"""

from __future__ import annotations

from memserve.instance.scheduler_state import SchedulerState
from memserve.instance.sequence import Cause, Group, RemoteState
from memserve.kv_transfer.events import FetchEnded
from memserve.kv_transfer.exchange import Exchange
from memserve.messages import Holder
from memserve.policy.decision import Prefix
from memserve.policy.reuse import FetchChoice, worth_fetching
from memserve.types import KVGeometry, TokenArray


class Fetches:
    """All requests that wait for a prefix from elsewhere."""

    __slots__ = ("_exchange", "_geometry", "_link_ns", "_state", "_wait_max_ns", "asked", "far", "fetched_tokens")

    def __init__(self, state: SchedulerState, exchange: Exchange, geometry: KVGeometry, wait_max_ns: int) -> None:
        self._state = state
        self._exchange = exchange
        self._geometry = geometry
        self._wait_max_ns = wait_max_ns
        #: fetch id -> the request that waits for it, and the holder that was asked
        self.asked: dict[str, tuple[Group, Holder]] = {}
        #: fetch id -> how long the link is expected to be busy with it: concurrent fetches share the link
        self._link_ns: dict[str, int] = {}
        #: names of peers whose pages come over a network
        self.far: dict[str, bool] = {}
        self.fetched_tokens = 0

    def begin(self, group: Group, tokens: TokenArray, now: int) -> bool:
        """Ask the best holder of ``tokens`` if that pays; whether the request has to wait."""
        request, remote = group.request, group.remote
        if remote is None or not remote.holders or not request.use_cache or group.prompt_logprobs is not None:
            return False
        if not (self._state.memory.pool.config.caching and self._exchange.shares_kv):
            return False
        remote.holders.sort(key=lambda holder: -holder.prefix_tokens)  # stable: the router's order decides ties
        remote.fetch_until_ns = now + self._wait_max_ns
        return self._ask(group, remote, tokens, now)

    def _ask(self, group: Group, remote: RemoteState, tokens: TokenArray, now: int) -> bool:
        """Ask the first of the remaining holders that has enough to offer."""
        isolation, block_tokens = group.isolation, self._geometry.block_tokens
        own = self._state.memory.pool.match(isolation, tokens)
        while remote.holders and now < remote.fetch_until_ns:
            holder = remote.holders.pop(0)
            theirs = min(holder.prefix_tokens, len(tokens)) // block_tokens * block_tokens
            if theirs <= own:
                continue
            choice = self._choose(len(tokens), own, theirs - own, holder.peer.name, remote.fetch_until_ns - now)
            group.facts.append(("fetch_decision", choice.reason))
            if not choice.tokens:
                continue
            end = own + choice.tokens
            remote.fetch_id = self._exchange.fetch(
                holder.peer,
                isolation,
                tokens[:end],
                own // block_tokens,
                end // block_tokens,
                now,
                now + choice.wait_ns,
            )
            self.asked[remote.fetch_id] = (group, holder)
            self._link_ns[remote.fetch_id] = choice.link_ns
            return True
        return False

    def _choose(self, known: int, own: int, remote: int, holder: str, wait_max_ns: int) -> FetchChoice:
        learnt = self._state.costs
        prefix = Prefix(known, own, 0, remote, same_host=not self.far.get(holder, False))
        queue_ns = learnt.queue_ns(self._state.prefill_tokens_queued())
        before_ns = max(self._plans_ns(remote // self._geometry.block_tokens), sum(self._link_ns.values()))
        return worth_fetching(
            learnt.model, self._geometry, prefix, queue_ns=queue_ns, wait_max_ns=wait_max_ns, before_ns=before_ns
        )

    def _plans_ns(self, blocks: int) -> int:
        """How long the steps take that have to end before ``blocks`` new blocks may be pulled into."""
        plans = self._exchange.plans_before_pull(blocks)
        if not plans:
            return 0
        decoding = self._state.decoding.items
        context = sum([sequence.computed for sequence in decoding])
        return plans * self._state.costs.model.decode_step_ns(len(decoding), context)

    def ended(self, outcome: FetchEnded, now: int) -> None:
        """The KV is in the index, or will not come; then the next holder may be asked."""
        group, holder = self.asked.pop(outcome.transfer_id)
        del self._link_ns[outcome.transfer_id]
        remote = group.remote
        if remote is None:
            return
        remote.fetch_id = None
        if outcome.ok:
            tokens = outcome.pulled_blocks * self._geometry.block_tokens
            self.fetched_tokens += tokens
            group.facts += [("fetched_tokens", tokens), ("fetched_from", holder.peer.name)]
        else:
            group.facts.append(("fetch_failed", f"{holder.peer.name}: {outcome.reason}"))
            if self._ask(group, remote, next(iter(group.sequences.values())).known_tokens(), now):
                return
        for sequence in group.sequences.values():
            self._state.move(sequence, Cause.FETCH_ENDED)

    def given_up(self, group: Group) -> None:
        """The request has ended."""
        remote = group.remote
        if remote is not None and remote.fetch_id is not None:
            self._exchange.give_up(remote.fetch_id, "the request has ended")
            del self.asked[remote.fetch_id], self._link_ns[remote.fetch_id]
            remote.fetch_id = None
