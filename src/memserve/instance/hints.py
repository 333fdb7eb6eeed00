"""Hints on KV that are done once: prefetch, demote, share and release, on the pool of one instance.

None of them takes anything from others: a prefetch evicts nothing that is pinned or retained, a demotion and a release
leave what others share, pin or retain. What lies at another instance is fetched first (``cluster/prefix_fetch``).
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.base.types import TokenArray
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.retention import Pins
from memserve.protocol.kv_hints import (
    NOTHING_CACHED,
    UNKNOWN_NAME,
    HintAction,
    HintOutcome,
    HintResult,
    HintResults,
    KvHinted,
    result_for,
)

HAS_STATES = "the model's recurrent states go down with their KV, when room is needed"
NO_DRAM = "there is no DRAM tier (--dram-memory)"
NO_STORE = "there is no store"
IS_KEPT = "others share it, or it is pinned or retained"
NO_ROOM = "there is no room that costs nothing that is pinned or retained"
NEEDED = "a request needed the room"
NO_QUOTA = "the quota for retained prefixes is full, and what it has of this tenant is of higher priority"
ALONE = "there is no other instance"


class HintRunner:
    """Does them; what was asked of this instance itself is answered from :attr:`results`."""

    def __init__(self, state: SchedulerState, pins: Pins) -> None:
        self._memory, self._pins = state.memory, pins
        self.results = HintResults()
        #: copies were recorded that no plan may come for by itself
        self._has_moved = False

    def run_named(self, hint: KvHinted, handle: str, now_ns: int) -> None:
        """A client of this instance asked for it; ``handle`` is its name here, if it has one."""
        tokens = hint.tokens if hint.tokens is not None else self._pins.named_tokens(handle)
        if hint.action is HintAction.RELEASE and hint.handle:
            self._pins.unpin_prefix(handle)
        if tokens is None:
            self.results.put_result(hint.hint_id, HintResult(HintOutcome.MISSING, 0, UNKNOWN_NAME))
            return
        if hint.action is HintAction.RETAIN:
            self.results.put_result(hint.hint_id, self._retain(hint, handle, tokens, now_ns))
            return
        self.results.put_result(hint.hint_id, self.run_action(hint.action, hint.isolation, tokens))

    def _retain(self, hint: KvHinted, handle: str, tokens: TokenArray, now_ns: int) -> HintResult:
        pool, until_ns = self._memory.pool, now_ns + hint.ttl_ns
        tokens_kept = self._pins.pin_prefix(
            handle, hint.isolation, tokens, until_ns, tenant=hint.tenant, priority=hint.priority
        )
        if not tokens_kept:
            has_any = pool.match(hint.isolation, tokens) > 0
            return HintResult(HintOutcome.REJECTED, 0, NO_QUOTA) if has_any else NOTHING_CACHED
        return result_for(tokens_kept, len(tokens) // pool.block_tokens * pool.block_tokens, "no more of it is cached")

    def run_action(self, action: HintAction, isolation: str, tokens: TokenArray) -> HintResult:
        """Do it with the cached prefix of ``tokens``."""
        pool = self._memory.pool
        matched = pool.match_kv(isolation, tokens)
        if not matched:
            return NOTHING_CACHED
        actions: dict[HintAction, Callable[[str, TokenArray], HintResult]] = {
            HintAction.PREFETCH: self._prefetch,
            HintAction.DEMOTE: self._demote,
            HintAction.RELEASE: self._release,
        }
        run = actions.get(action)
        if run is None:
            return HintResult(HintOutcome.REJECTED, 0, ALONE)
        result = run(isolation, tokens[:matched])
        self._has_moved = self._has_moved or pool.has_copies
        return _cut(result, matched, len(tokens) // pool.block_tokens * pool.block_tokens)

    def _prefetch(self, isolation: str, tokens: TokenArray) -> HintResult:
        pool = self._memory.pool
        hbm, dram = pool.match_blocks(isolation, tokens)
        bring = min(dram, pool.retained.spare_blocks(kept=hbm))
        if bring:
            lease = pool.acquire(isolation, tokens[: (hbm + bring) * pool.block_tokens])
            pool.unpin(lease)
            pool.release(lease.blocks)
        return result_for((hbm + bring) * pool.block_tokens, len(tokens), NO_ROOM)

    def _demote(self, isolation: str, tokens: TokenArray) -> HintResult:
        pool = self._memory.pool
        if not pool.config.dram_blocks:
            return HintResult(HintOutcome.REJECTED, 0, NO_DRAM)
        if pool.config.states is not None:
            return HintResult(HintOutcome.REJECTED, 0, HAS_STATES)
        pool.retained.leave_hbm(isolation, tokens)
        pool.demote_path(isolation, tokens)
        _, dram = pool.match_kv_blocks(isolation, tokens)
        return result_for(dram * pool.block_tokens, len(tokens), IS_KEPT)

    def _release(self, isolation: str, tokens: TokenArray) -> HintResult:
        pool = self._memory.pool
        released = pool.retained.release_prefix(isolation, tokens) * pool.block_tokens
        return result_for(min(released, len(tokens)), len(tokens), IS_KEPT)

    def take_moved(self) -> bool:
        """Whether a plan is wanted for copies alone."""
        moved, self._has_moved = self._has_moved and self._memory.pool.has_copies, False
        return moved


def _cut(result: HintResult, matched: int, wanted: int) -> HintResult:
    """What was done for all that is cached is clipped where that is not all that was asked for."""
    if result.outcome is HintOutcome.ACCEPTED and matched < wanted:
        return HintResult(HintOutcome.CLIPPED, result.tokens, f"{matched} of {wanted} tokens are cached")
    return result
