"""Pull jobs: tenants by turns, so many at once, each with its own hold on its destination (level 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memserve.errors import check
from memserve.kv_transfer.arrival import Import, Placement
from memserve.kv_transfer.context import Place, TransferContext, is_gone
from memserve.kv_transfer.jobs import CancelPulls, PagesPulled, PullPages
from memserve.messages import Peer
from memserve.policy.fairness import FairQueue
from memserve.types import Tier, TransferMode, tenant_of


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Pages of an import that may be copied as soon as a job is free."""

    imported: Import
    placed: Placement
    first_row: int
    """Rows of ``placed.announced`` that this brings: one a source block."""
    src_tier: Tier
    src_blocks: Sequence[int]
    first_layer: int
    end_layer: int
    checksums: tuple[int, ...]

    @property
    def end_row(self) -> int:
        """Behind the last row."""
        return self.first_row + len(self.src_blocks)

    @property
    def pages(self) -> int:
        """How many pages it copies."""
        return len(self.src_blocks) * (self.end_layer - self.first_layer)


class Pulls:
    """A queue in front of the host, which gets ``pulls_in_flight`` jobs at once. Tenants take turns, by pages.

    A job holds a reference on each block that it writes to, from the action to ``PagesPulled``. So an import may end at
    any moment and give back what it holds: what the host still writes to is given away only when it has stopped.
    """

    def __init__(self, context: TransferContext) -> None:
        self._context = context
        self._queue: FairQueue[tuple[str, Pull]] = FairQueue()  # with its key there
        self._added = 0
        self._under_way: dict[int, tuple[Pull, PullPages]] = {}  # by job

    def add(self, pull: Pull) -> None:
        """The source is ready and the destination is nobody else's."""
        self._added += 1
        key = str(self._added)
        self._queue.push(tenant_of(pull.imported.offer.tenant), key, (key, pull), pull.pages)

    def start(self) -> None:
        """Give jobs to the host, as many as it may have."""
        while len(self._under_way) < self._context.config.pulls_in_flight and (first := self._queue.head()) is not None:
            key, pull = first
            if pull.imported.over:
                self._queue.remove(key)  # its tenant does not pay for it
            else:
                self._queue.pop()
                self._start(pull)

    def _start(self, pull: Pull) -> None:
        placed = pull.placed
        job = PullPages(
            job_id=self._context.new_job_id(),
            peer=pull.imported.sender,
            src_tier=pull.src_tier,
            src_blocks=tuple(pull.src_blocks),
            dst_tier=placed.tier,
            dst_blocks=tuple(placed.own[pull.first_row : pull.end_row]),
            first_layer=pull.first_layer,
            end_layer=pull.end_layer,
            checksums=pull.checksums,
            by_page=pull.imported.offer.mode != TransferMode.BY_REQUEST_AGG,
        )
        self._context.retain(job.dst_tier, job.dst_blocks)
        self._under_way[job.job_id] = pull, job
        self._context.counters.pulls += 1
        self._context.actions.append(job)

    def ended(self, event: PagesPulled) -> Pull:
        """The host is done with a job, whether or not anybody still wants what it brought."""
        check(event.job_id in self._under_way, f"job {event.job_id} pulls nothing")
        pull, job = self._under_way.pop(event.job_id)
        self._context.release(job.dst_tier, job.dst_blocks)
        counters = self._context.counters
        counters.pulled_bytes += event.pulled_bytes
        counters.pulled_dram_bytes += event.pulled_bytes if job.src_tier == Tier.DRAM else 0
        counters.pulls_failed += bool(event.error)
        counters.mismatches += event.mismatches
        return pull

    def cancel(self, gone: Peer) -> None:
        """A peer is gone: what the host has not begun need not begin."""
        peers = {job.peer: None for _, job in self._under_way.values() if is_gone(job.peer, gone)}
        self._context.actions += [CancelPulls(peer) for peer in peers]

    def references(self) -> Counter[Place]:
        """Every reference that jobs hold."""
        return Counter((job.dst_tier, block) for _, job in self._under_way.values() for block in job.dst_blocks)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the queue contradicts itself."""
        check(len(self._under_way) <= self._context.config.pulls_in_flight, "more pulls at once than may be")
        self._queue.check_invariants()
        limit = self._context.config.pulls_in_flight
        check(not self._queue or len(self._under_way) == limit, "a pull waits although the host has room for it")
