"""When a decision has become true in memory: barriers between plans and page jobs.

The device executes plans strictly in order, and everything that it does to memory is part of a plan: rows write K and
V, recorded copies (evictions to DRAM, blocks brought up, copies on write) ride at the head of the next plan. So plans
need no locks: a block that is freed now may be given away now, since its next holder uses it in a later plan.

Pulling and sealing are outside that order. A pull is done by another thread at any time, so a block that was allocated
for it may still be

1. written by a row of a plan under way (of a sequence that has ended since: plans are made ahead of results),
2. read by a row of a plan under way (of such a sequence, or of one whose cached prefix is evicted now),
3. read by a copy: the allocation itself evicted it to DRAM, or brought it up from DRAM, and the copy is in a plan under
   way, or only recorded; or written by one (a copy on write for a sequence that was preempted at once).

All of that was decided before the block was allocated: nothing decided later touches it, since it belongs to the
import. Rows (1, 2) use only blocks on which their sequence holds a reference, and it gives none back while the plan
that is being made has a row of it. So when it lets go of a block, the plans made by then are the last that touch
the block for its sake; and all have let go, or the block could not have been allocated. Copies (3) are in the next plan
after they were recorded. ``kv/block_access.py`` writes down both moments. Hence, right after the allocation,

    ``safe_to_overwrite(blocks)`` = the last plan, under way or to be made next, that touches one of them

and once it has finished, and with it all plans before, the pull is alone with its destination. Mostly there is no such
plan: a block that is free, or cached and unused, was let go of long ago.

The owner of blocks that a peer shall pull asks for less. A reference keeps them from being given away, readers do no
harm, and what is cached never changes; it only has to be there. The index is filled when plans are *made*: then it was
told which plan writes the blocks last. And what was brought up, or went down to DRAM, is written by its copy. Hence

    ``safe_to_read(blocks)`` = the last plan, under way or to be made next, that writes one of these cached blocks

after which they may be sealed and read. Of blocks that are neither cached nor newly allocated (rows of a sequence that
runs, or has just ended) nothing is written down; for those there is

    ``all_settled()`` = the last plan made, + 1 when copies are recorded that no plan carries

after which everything that was decided so far is true. With nothing under way and nothing recorded all three have
passed already, and nothing waits. With copies recorded and no work, no plan would ever come: ``wants_plan`` asks for
one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.kv.block_access import BlockAccessLog
from memserve.kv.transfer.context import Place, TransferPool, runs

Resume = Callable[[], None]
"""Called once a fence has passed."""


class Barriers:
    """What waits for plans to finish, and for which."""

    def __init__(self, pool: TransferPool) -> None:
        """From now on the pool records which plans touch which blocks."""
        self._pool = pool
        self._access = pool.access = BlockAccessLog()
        self._waiting: list[tuple[int, int, Resume]] = []  # heap of (fence, order of arrival, what to do)
        self._order = 0
        self._highest = 0  # of all fences that something waited for

    @property
    def last_made(self) -> int:
        """The last plan made. 0: none."""
        return self._access.last_made

    @property
    def last_finished(self) -> int:
        """The last plan that touches memory no more."""
        return self._access.last_finished

    def all_settled(self) -> int:
        """The plan after which everything decided so far is true in memory."""
        return self.last_made + 1 if self._pool.has_copies else self.last_made

    def safe_to_overwrite(self, tier: Tier, blocks: Sequence[int]) -> int:
        """The plan after which only their new holder touches ``blocks``, which were allocated for it just now."""
        return self._access.last_touch(tier, blocks)

    def safe_to_read(self, places: Sequence[Place]) -> int:
        """The plan after which cached blocks hold what the index says."""
        return max([self._access.last_write(tier, blocks) for tier, _, blocks in runs(places)], default=0)

    def has_passed(self, fence: int) -> bool:
        """Whether plan ``fence`` has finished."""
        return fence <= self.last_finished

    def when_passed(self, fence: int, resume: Resume) -> None:
        """Call ``resume`` once plan ``fence`` has finished: now, when it has."""
        if self.has_passed(fence):
            resume()
            return
        heapq.heappush(self._waiting, (fence, self._order, resume))
        self._order += 1
        self._highest = max(self._highest, fence)

    def plan_made(self, step_id: int) -> None:
        """Plan ``step_id`` carries everything that was recorded."""
        self._access.plan_made(step_id)

    def plan_finished(self, step_id: int) -> None:
        """Plan ``step_id`` and each before it have finished: call what waited for them, in order of their fences."""
        self._access.plan_finished(step_id)
        while self._waiting and self._waiting[0][0] <= step_id:
            heapq.heappop(self._waiting)[2]()

    @property
    def is_holding(self) -> bool:
        """Whether something waits for a plan to finish."""
        return bool(self._waiting)

    @property
    def wants_plan(self) -> bool:
        """Whether something waits for a plan that is not made yet."""
        return self._highest > self.last_made

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when something waits for what has happened."""
        check(
            self.last_finished <= self.last_made,
            "plan {} has finished, {} was the last one made",
            self.last_finished,
            self.last_made,
        )
        for fence, _, resume in self._waiting:
            check(
                not self.has_passed(fence), "{!r} waits for plan {}, {} has finished", resume, fence, self.last_finished
            )
            check(
                fence <= self.last_made + 1,
                "{!r} waits for plan {}, {} was the last one made",
                resume,
                fence,
                self.last_made,
            )
