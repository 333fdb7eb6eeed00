"""Grammars of requests that run here: which ones the host builds, and which ones it has.

A request waits for its grammar as it waits for KV of another instance: no step is planned with it, and so none waits
for the grammar. A grammar that several requests of a tenant name is built once, and kept until the last of them has
ended. How much of the host a tenant may have at a time is one rule: as much as is still free (:func:`may_have`), so
that no number of grammars of one tenant, however long they take, keeps those of another one waiting.

Sequences whose mask is late: what may come next by their grammar was not known when they were to draw.

Such a sequence skips steps. It stays where it is, with its slot, its blocks, and the logits that the device keeps for
it, until the mask is there, or has taken too long: then its request alone ends.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from memserve.base.errors import check
from memserve.base.units import NS_PER_S
from memserve.instance.events import AwaitMask, BuildGrammar, ForgetGrammar
from memserve.instance.scheduler.sequence import LateMask, Sequence

BUILD_NS = 10 * NS_PER_S
"""The longest that a build may take. The processor time that it may take is less (``model/grammar/process.py``)."""
BUILDS_MAX = 4
"""Builds at a time."""
GRAMMARS_PER_SLOT = 2
"""Grammars that may be built or being built, for each slot of the device. One tenant alone may have half of them."""
Wanted = tuple[str, str]
"""Tenant and grammar."""


def may_have(own_count: int, taken_count: int, limit: int) -> bool:
    """Whether a tenant that has ``own_count`` of ``limit`` places, ``taken_count`` of which are taken, may take another
    one: it may have as many as are free. The first tenant gets half, the next one half of the rest, and the last place
    is for one that has none."""
    return own_count < limit - taken_count


@dataclass(slots=True)
class _Job:
    number: int
    requests: int
    until_ns: int | None = None
    """When requests wait no longer. None: it does not wait for the host, or the host does not build it yet."""
    is_built: bool = False


class GrammarWaits:
    """All grammars of unfinished requests, by tenant and text."""

    def __init__(self, slots: int) -> None:
        self._places = GRAMMARS_PER_SLOT * slots
        self._jobs: dict[Wanted, _Job] = {}
        #: those that the host builds, oldest first
        self._building: dict[Wanted, _Job] = {}
        #: those that it is yet to build, by tenant, oldest first
        self._queues: dict[str, deque[Wanted]] = {}
        #: those that it builds or has built, by tenant
        self._held_counts: Counter[str] = Counter()
        self._numbers = 0
        #: for the host, in order; the machine takes them
        self.commands: list[BuildGrammar | ForgetGrammar] = []

    def on_request_opened(self, grammar: Wanted, now_ns: int) -> None:
        """A request has come; an empty text: it has no grammar."""
        if not grammar[1]:
            return
        if (job := self._jobs.get(grammar)) is not None:
            job.requests += 1
            return
        self._numbers += 1
        self._jobs[grammar] = _Job(self._numbers, 1)
        self._queues.setdefault(grammar[0], deque()).append(grammar)
        self._build_next(now_ns)

    def on_request_ended(self, grammar: Wanted, now_ns: int) -> None:
        """A request has ended."""
        if not grammar[1]:
            return
        job = self._jobs[grammar]
        job.requests -= 1
        if job.requests:
            return
        del self._jobs[grammar]
        tenant = grammar[0]
        queue = self._queues.get(tenant)
        if queue is not None and grammar in queue:
            queue.remove(grammar)
            if not queue:
                del self._queues[tenant]
            return
        self._building.pop(grammar, None)
        self._held_counts[tenant] -= 1
        if not self._held_counts[tenant]:
            del self._held_counts[tenant]
        self.commands.append(ForgetGrammar(job.number, grammar[1]))
        self._build_next(now_ns)

    def _build_next(self, now_ns: int) -> None:
        while (tenant := self._next_tenant()) is not None:
            queue = self._queues[tenant]
            grammar = queue.popleft()
            if not queue:
                del self._queues[tenant]
            job = self._jobs[grammar]
            job.until_ns = now_ns + BUILD_NS
            self._building[grammar] = job
            self._held_counts[tenant] += 1
            self.commands.append(BuildGrammar(job.number, grammar[1]))

    def _next_tenant(self) -> str | None:
        """Of those that may have another build, the one with the fewest; among equals the one that waits longest."""
        builds, held_total = Counter([tenant for tenant, _ in self._building]), self._held_counts.total()
        able = [
            (builds[tenant], self._jobs[queue[0]].number, tenant)
            for tenant, queue in self._queues.items()
            if may_have(builds[tenant], len(self._building), BUILDS_MAX)
            and may_have(self._held_counts[tenant], held_total, self._places)
        ]
        return min(able)[2] if able else None

    def is_awaited(self, grammar: Wanted) -> bool:
        """Whether its requests wait for it."""
        job = self._jobs.get(grammar)
        return job is not None and not job.is_built

    def job_of(self, grammar: Wanted) -> int:
        """The number of the job that has built it; 0: there is no grammar."""
        return self._jobs[grammar].number if grammar[1] else 0

    def on_grammar_built(self, job_id: int, now_ns: int) -> Wanted | None:
        """A job is done. None: no request waits for it any more."""
        for grammar, job in self._building.items():
            if job.number == job_id:
                self._end_build(grammar, now_ns)
                return grammar
        return None

    def expire_builds(self, now_ns: int) -> list[Wanted]:
        """Grammars that have been built for as long as they may; they count as built from now on."""
        late = [
            grammar for grammar, job in self._building.items() if job.until_ns is not None and job.until_ns <= now_ns
        ]
        for grammar in late:
            self._end_build(grammar, now_ns)
        return late

    def _end_build(self, grammar: Wanted, now_ns: int) -> None:
        job = self._building.pop(grammar)
        job.until_ns, job.is_built = None, True
        self._build_next(now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire_builds` is worth calling. None: nothing is being built."""
        return next((job.until_ns for job in self._building.values()), None)

    def take_commands(self) -> list[BuildGrammar | ForgetGrammar]:
        """What the host has to do since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def requests_by_grammar(self) -> dict[Wanted, int]:
        """Requests by grammar, for checks."""
        return {grammar: job.requests for grammar, job in self._jobs.items()}

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` where the books contradict."""
        queued = [grammar for queue in self._queues.values() for grammar in queue]
        apart = len(set(queued)) == len(queued) and not (self._building.keys() & set(queued))
        check(apart and all(self._queues.values()), "a grammar is queued twice, or an empty queue is kept")
        held_counts = Counter([grammar[0] for grammar in self._jobs if grammar not in queued])
        check(
            held_counts == self._held_counts and held_counts.total() <= self._places,
            "grammars are not counted right: {}",
            self._held_counts,
        )
        waiting = {grammar for grammar, job in self._jobs.items() if not job.is_built}
        check(waiting == self._building.keys() | set(queued), "a grammar is neither built nor waits for that")
        check(len(self._building) <= BUILDS_MAX, "too many grammars are being built")


MASK_NS = NS_PER_S
"""The longest that a sequence waits for one mask."""
MASKS_NS = 5 * NS_PER_S
"""The longest that the sequences of one request wait for masks in all of their answers, on average."""


class LateMasks:
    """All sequences that wait for a mask."""

    def __init__(self) -> None:
        self._jobs: dict[int, Sequence] = {}
        self._numbers = 0
        #: for the host; the machine takes them
        self.commands: list[AwaitMask] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add_sequence(self, sequence: Sequence, now_ns: int) -> None:
        """``sequence``, which has a slot, waits from now on."""
        self._numbers += 1
        left_ns = max(0, MASKS_NS * sequence.group.request.n - sequence.group.masks_ns)
        sequence.late = LateMask(self._numbers, now_ns, now_ns + min(MASK_NS, left_ns))
        self._jobs[self._numbers] = sequence
        self.commands.append(AwaitMask(self._numbers, sequence.slot))  # type: ignore[arg-type]  # it has a slot

    def on_mask_computed(self, job_id: int, now_ns: int) -> None:
        """A mask is there; unknown ones are not wanted any more."""
        sequence = self._jobs.get(job_id)
        if sequence is not None and sequence.late is not None and not sequence.late.is_there:
            sequence.late.is_there = True
            sequence.group.masks_ns += now_ns - sequence.late.since_ns

    def due_sequences(self) -> list[Sequence]:
        """Those that may draw in the next plan: no earlier plan has a row of theirs any more."""
        return [
            sequence
            for sequence in self._jobs.values()
            if sequence.late is not None and sequence.late.is_there and not sequence.inflight
        ]

    def drop_sequence(self, sequence: Sequence, now_ns: int) -> None:
        """``sequence`` does not wait any more, if it has waited."""
        if sequence.late is not None:
            self.on_mask_computed(sequence.late.job_id, now_ns)
            del self._jobs[sequence.late.job_id]
            sequence.late = None

    def overdue_sequences(self, now_ns: int) -> list[Sequence]:
        """Those that have waited for as long as they may."""
        waiting = [
            sequence for sequence in self._jobs.values() if sequence.late is not None and not sequence.late.is_there
        ]
        return [sequence for sequence in waiting if sequence.late is not None and sequence.late.until_ns <= now_ns]

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`overdue_sequences` is worth calling. None: nothing waits."""
        waiting = [
            sequence.late.until_ns
            for sequence in self._jobs.values()
            if sequence.late is not None and not sequence.late.is_there
        ]
        return min(waiting, default=None)

    def take_commands(self) -> list[AwaitMask]:
        """What the host has to do since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def sequences(self) -> list[Sequence]:
        """All of them, for checks."""
        return list(self._jobs.values())
