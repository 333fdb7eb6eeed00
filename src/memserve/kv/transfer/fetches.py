"""What was asked for: prefixes of peers, until they offer them, and pages of the host, until it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memserve.base.errors import check
from memserve.base.fairness import FairQueue
from memserve.base.types import Tier, TokenArray, TransferMode, tenant_of
from memserve.kv.state_snapshot import Lease
from memserve.kv.store_shares import KEY_BYTES
from memserve.kv.transfer.context import Deadlines, Place, TransferContext, is_gone
from memserve.kv.transfer.events import CancelPulls, FetchEnded, PagesPulled, PullPages
from memserve.kv.transfer.imports import Fetching, Import, ImportPlacement, give_up_lease
from memserve.protocol.messages import Fetch, Offer, Release
from memserve.protocol.peers import Peer


class PendingFetches:
    """Fetches without an offer yet. With its offer a fetch becomes an import, which answers for it then."""

    def __init__(self, context: TransferContext, deadlines: Deadlines) -> None:
        self._context = context
        self._deadlines = deadlines
        self.open: dict[str, Fetching] = {}

    def start_fetch(
        self, holder: Peer, tenant: str, tokens: TokenArray, blocks: tuple[int, int], now_ns: int, deadline_ns: int,
        state_blocks: int, *, is_trial: bool = False,
    ) -> str:  # fmt: skip
        """Ask for blocks ``[begin, end)`` of ``tokens``, and for the state behind them in ``state_blocks`` more; what
        is cached before them is pinned."""
        context, block_tokens = self._context, self._context.pool.block_tokens
        check(0 <= blocks[0] < blocks[1] <= len(tokens) // block_tokens, f"no blocks {blocks} to fetch")
        tokens = tokens[: blocks[1] * block_tokens]
        lease = context.pool.acquire_kv(tenant, tokens[: blocks[0] * block_tokens])
        fetching = Fetching(
            context.new_transfer_id(), holder, tenant, tokens, blocks[0], deadline_ns, lease, state_blocks
        )
        self.open[fetching.transfer_id] = fetching
        self._deadlines.add(fetching)
        context.counters.fetches += 1
        part_blocks = context.pool.part_blocks if state_blocks else 0
        fetch = Fetch(
            fetching.transfer_id, tenant, tokens, *blocks, deadline_ns - now_ns, state_blocks, part_blocks,
            is_trial=is_trial,
        )  # fmt: skip
        context.send(holder, fetch)
        return fetching.transfer_id

    def start_named(self, holder: Peer, tenant: str, identities: bytes, now_ns: int, deadline_ns: int) -> str:
        """Ask ``holder``, a store, for blocks by their ``identities``: they are delivered to the owner, not cached."""
        context = self._context
        tokens, lease = np.empty(0, np.int32), Lease()
        fetching = Fetching(context.new_transfer_id(), holder, tenant, tokens, 0, deadline_ns, lease)
        fetching.identities = identities
        self.open[fetching.transfer_id] = fetching
        self._deadlines.add(fetching)
        context.counters.fetches += 1
        end, wait_ns = len(identities) // KEY_BYTES, deadline_ns - now_ns
        context.send(holder, Fetch(fetching.transfer_id, tenant, tokens, 0, end, wait_ns, identities=identities))
        return fetching.transfer_id

    def may_answer(self, sender: Peer, offer: Offer) -> bool:
        """False: the offer is sent back, because the fetch that it answers has ended, or ignored, because another peer
        was asked."""
        fetching = self.open.get(offer.transfer_id)
        if fetching is None and self._context.is_mine(offer.transfer_id):
            self._context.send(sender, Release(offer.transfer_id, False, "no longer wanted"))
            return False
        return fetching is None or fetching.holder == sender

    def claim_fetch(self, transfer_id: str) -> Fetching | None:
        """Take out the fetch that an offer answers, for its import. None: the offer answers no fetch."""
        fetching = self.open.pop(transfer_id, None)
        if fetching is not None:
            fetching.over = True  # the import has the deadline and the lease now
        return fetching

    def give_up(self, transfer_id: str) -> None:
        """End a fetch without an outcome. Ignored when it has ended."""
        if transfer_id in self.open:
            self._end_fetch(self.open[transfer_id])

    def on_withdrawn(self, sender: Peer, transfer_id: str, reason: str) -> None:
        """The holder has none of the blocks."""
        fetching = self.open.get(transfer_id)
        if fetching is not None and fetching.holder == sender:
            self._fail_fetch(fetching, reason)

    def expire_fetch(self, fetching: Fetching) -> None:
        """No offer came in time."""
        self._context.counters.fetch_timeouts += 1
        self._fail_fetch(fetching, "no offer in time")

    def peer_removed(self, peer: Peer, reason: str) -> None:
        """``peer`` will not answer."""
        for fetching in [pending for pending in self.open.values() if is_gone(pending.holder, peer)]:
            self._fail_fetch(fetching, reason)

    def fail_all(self, reason: str) -> None:
        """End every fetch, each with an outcome."""
        for fetching in list(self.open.values()):
            self._fail_fetch(fetching, reason)

    def drop_all(self) -> None:
        """End every fetch, silently."""
        for fetching in list(self.open.values()):
            self._end_fetch(fetching)

    def _fail_fetch(self, fetching: Fetching, reason: str) -> None:
        self._end_fetch(fetching)
        self._context.outcomes.append(FetchEnded(fetching.transfer_id, False, 0, reason))

    def _end_fetch(self, fetching: Fetching) -> None:
        del self.open[fetching.transfer_id]
        fetching.over = True
        give_up_lease(self._context, fetching.lease)


def answers_fetch(offer: Offer, fetching: Fetching) -> bool:
    """Whether the offer brings the blocks that were asked for, or the first of them."""
    if fetching.identities or offer.identities:
        return (
            fetching.identities.startswith(offer.identities)
            and len(offer.identities) == KEY_BYTES * (len(offer.blocks) + len(offer.dram_blocks))
            and (offer.tenant, offer.first_block, offer.state_blocks) == (fetching.tenant, 0, 0)
            and (offer.dst_tier, offer.dst_blocks, offer.request, offer.insert) == (Tier.HBM, (), None, False)
        )
    expected_tokens = fetching.tokens[: len(offer.tokens)]
    return (
        (offer.tenant, offer.first_block, bool(offer.state_blocks))
        == (fetching.tenant, fetching.first_block, bool(fetching.state_blocks))
        and offer.insert
        and offer.request is None
        and not offer.dst_blocks
        and bool(np.array_equal(offer.tokens, expected_tokens))
    )


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Pages of an import that may be copied as soon as a job is free."""

    imported: Import
    placement: ImportPlacement
    first_row: int
    """The first row of ``placed.announced`` that it brings: a row for each source block."""
    src_tier: Tier
    src_blocks: Sequence[int]
    first_layer: int
    end_layer: int
    checksums: tuple[int, ...]
    sealed_ns: int
    """What the sender took for these."""

    @property
    def end_row(self) -> int:
        """Behind the last row."""
        return self.first_row + len(self.src_blocks)

    @property
    def page_count(self) -> int:
        """How many pages it copies."""
        return len(self.src_blocks) * (self.end_layer - self.first_layer)


class Pulls:
    """A queue in front of the host, which gets ``pulls_in_flight`` jobs at once. Tenants take turns, by pages.

    A job holds a reference on each block that it writes to, from the action to ``PagesPulled``. So an import may end at
    any moment and give back its blocks: those that the host still writes to are free only when it has stopped.
    """

    def __init__(self, context: TransferContext) -> None:
        self._context = context
        self._queue: FairQueue[tuple[str, Pull]] = FairQueue()  # with its key there
        self._added = 0
        self._under_way: dict[int, tuple[Pull, PullPages]] = {}  # by job

    def enqueue_pull(self, pull: Pull) -> None:
        """Enqueue a pull whose source is ready and whose destination nothing else touches."""
        self._added += 1
        key = str(self._added)
        self._queue.push(tenant_of(pull.imported.offer.tenant), key, (key, pull), pull.page_count)

    def start(self) -> None:
        """Give jobs to the host, as many as it may have."""
        while len(self._under_way) < self._context.config.pulls_in_flight and (first := self._queue.head()) is not None:
            key, pull = first
            if pull.imported.over:
                self._queue.remove(key)  # without counting it in its tenant's turns
            else:
                self._queue.pop()
                self._start_pull(pull)

    def _start_pull(self, pull: Pull) -> None:
        placement = pull.placement
        job = PullPages(
            job_id=self._context.new_job_id(),
            peer=pull.imported.sender,
            src_tier=pull.src_tier,
            src_blocks=tuple(pull.src_blocks),
            dst_tier=placement.tier,
            dst_blocks=tuple(placement.target_blocks[pull.first_row : pull.end_row]),
            first_layer=pull.first_layer,
            end_layer=pull.end_layer,
            checksums=pull.checksums,
            by_page=pull.imported.offer.mode != TransferMode.BY_REQUEST_AGG,
            sealed_ns=pull.sealed_ns,
        )
        self._context.retain(job.dst_tier, job.dst_blocks)
        self._under_way[job.job_id] = pull, job
        self._context.counters.pulls += 1
        self._context.actions.append(job)

    def on_pull_ended(self, event: PagesPulled) -> Pull:
        """The host is done with a job; its import may have ended meanwhile."""
        check(event.job_id in self._under_way, f"job {event.job_id} pulls nothing")
        pull, job = self._under_way.pop(event.job_id)
        self._context.release(job.dst_tier, job.dst_blocks)
        counters = self._context.counters
        counters.pulled_bytes += event.pulled_bytes
        counters.pulled_dram_bytes += event.pulled_bytes if job.src_tier == Tier.DRAM else 0
        counters.pulled_saved_bytes += event.saved_bytes
        counters.pulled_codec_ns += event.codec_ns
        counters.pulls_failed += bool(event.error)
        counters.mismatches += event.mismatches
        return pull

    def cancel_from(self, removed_peer: Peer) -> None:
        """Pulls from ``removed_peer`` that the host has not begun need not begin."""
        peers = {job.peer: None for _, job in self._under_way.values() if is_gone(job.peer, removed_peer)}
        self._context.actions += [CancelPulls(peer) for peer in peers]

    def list_references(self) -> list[Place]:
        """Every reference that jobs hold."""
        return [(job.dst_tier, block) for _, job in self._under_way.values() for block in job.dst_blocks]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the queue contradicts itself."""
        check(len(self._under_way) <= self._context.config.pulls_in_flight, "more pulls at once than may be")
        self._queue.check_invariants()
        limit = self._context.config.pulls_in_flight
        check(not self._queue or len(self._under_way) == limit, "a pull waits although the host has room for it")
