"""When a decision has become true in memory: fences between plans and page jobs (level 1).

The device executes plans strictly in order, and everything that it does to memory is part of a plan: rows write K and
V, recorded copies (evictions to DRAM, blocks brought up, copies on write) ride at the head of the next plan. So plans
need no locks: a block that is freed now may be given away now, since whoever gets it uses it in a later plan.

Pulling and sealing are outside that order. A pull is done by another thread at any time, so a block that was allocated
for it may still be

1. written by a row of a plan under way (of a sequence that has ended since: plans are made ahead of results),
2. read by a row of a plan under way (the same, or a prefix that was cached and is evicted now),
3. read by a copy: the allocation itself evicted it to DRAM, or brought it up from DRAM, and the copy is in a plan under
   way, or only recorded.

All of that was decided before the block was allocated, so it is in a plan that had been made by then or, for copies
that are recorded only, in the next one: nothing decided later touches the block, since it belongs to the import. Hence

    ``now()`` right after the allocation = the last plan made, + 1 when copies are recorded that no plan carries

and once plan ``now()`` has finished, and with it all plans before, the pull is alone with its destination.

The same number serves the owner of blocks that a peer shall pull: what they hold was, or will be, written by a plan
made by now (a cached prefix may be computed by a plan under way: the index is filled when plans are *made*) or by a
recorded copy (brought up, swapped in). Once plan ``now()`` has finished their bytes are final, and may be sealed and
read. A reference keeps them from being given away meanwhile.

With nothing under way and nothing recorded ``now()`` has passed already, and nobody waits. With copies recorded and no
work, no plan would ever come: ``wants_plan`` asks for one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from memserve.errors import check
from memserve.mempool.pool import BlockPool

Resume = Callable[[], None]
"""What is to be done once a fence has passed."""


class Fences:
    """Plans made and finished, and what waits for them."""

    __slots__ = ("_held", "_highest", "_order", "_pool", "finished", "made")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.made = 0  # the last plan made; 0 = none
        self.finished = 0  # the last plan that touches memory no more
        self._held: list[tuple[int, int, Resume]] = []  # heap of (fence, order of arrival, what to do)
        self._order = 0
        self._highest = 0  # of all fences that something waited for

    def now(self) -> int:
        """The plan after which everything decided so far is true in memory."""
        return self.made + 1 if self._pool.has_copies else self.made

    def passed(self, fence: int) -> bool:
        """Whether plan ``fence`` has finished."""
        return fence <= self.finished

    def when_passed(self, fence: int, resume: Resume) -> None:
        """Do ``resume`` once plan ``fence`` has finished: at once, when it has."""
        if self.passed(fence):
            resume()
            return
        heapq.heappush(self._held, (fence, self._order, resume))
        self._order += 1
        self._highest = max(self._highest, fence)

    def plan_made(self, step_id: int) -> None:
        """Plan ``step_id`` carries everything that was recorded."""
        check(step_id > self.made, f"plan {step_id} was made after plan {self.made}")
        self.made = step_id

    def plan_finished(self, step_id: int) -> None:
        """Plan ``step_id`` and each before it have finished: what waited for that is done, in order of fences."""
        check(self.finished < step_id <= self.made, f"plan {step_id} of {self.finished}..{self.made} has finished")
        self.finished = step_id
        while self._held and self._held[0][0] <= step_id:
            heapq.heappop(self._held)[2]()

    @property
    def holds(self) -> bool:
        """Whether something waits for a plan to finish."""
        return bool(self._held)

    @property
    def wants_plan(self) -> bool:
        """Whether something waits for a plan that nobody has made yet."""
        return self._highest > self.made

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when something waits for what has happened."""
        check(self.finished <= self.made, f"plan {self.finished} has finished, {self.made} was the last one made")
        for fence, _, resume in self._held:
            check(not self.passed(fence), f"{resume!r} waits for plan {fence}, {self.finished} has finished")
            check(fence <= self.made + 1, f"{resume!r} waits for plan {fence}, {self.made} was the last one made")
