"""Which sessions' KV is kept between their turns, and which turns wait for it.

An agent's answer ends in a tool call, and its next request goes on from there. Where more sessions are live than fit,
the order of last use gives up each of them shortly before it returns, and every turn is computed anew. Two rules keep
a part of them instead of cycling through all:

*Which KV goes.* What an answer leaves is retained (``kv/retention.py``) by what it saves in a second of each of its
blocks: the time to compute it again, times the worth of waiting for the session (``forecasts.py``). Of those that save
about as much, the session that began later goes first. KV that no next turn is expected for goes before all of them.

*Which turn waits.* A turn whose KV is here runs at once. One that would take room from others is admitted as long as
the work that it causes (its own prompt, what it displaces, as likely as that is back within a turn) delays all that
run together by less than half of what a turn takes; else it waits until a session ends, or until it has waited four
times as long as it would delay the others. Where nothing runs it waits only while a kept session is about to come back,
and never longer than that work; nowhere longer than ``WAIT_MAX_NS``. So there is always progress, and a bound.

::

    a turn ends -> Absence -> a request goes on from it: the gap is learnt, its KV stays until it is admitted
                     |------> not for half an hour: it did not come back
                     '------> given up for room, the least saving first; its gap is learnt all the same

*Never worse.* What the order of last use would have had is counted beside what was had: by the blocks of the sessions
that were used since. Where that is more, the policy is off for a while, and the cache is as without it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.base.errors import check
from memserve.base.types import TokenArray
from memserve.base.units import NS_PER_MS, NS_PER_S, ceil_div
from memserve.instance.returns.forecasts import ReturnForecasts
from memserve.instance.scheduler.capacity import headroom_blocks
from memserve.kv.store_shares import KEY_BYTES

if TYPE_CHECKING:
    from memserve.instance.scheduler.sequence import Group, Sequence
    from memserve.instance.scheduler.state import SchedulerState

HORIZON_NS = 1800 * NS_PER_S
"""After this long a session has not come back."""
ABSENCES_MAX = 4096
"""Sessions whose return is waited for; beyond, the first of them counts as not come back."""
RANK_NS = 100 * NS_PER_MS
"""Priorities are as old as that at most; with many absences they may be older."""
FORCED_PART = 4
"""A turn that has waited for long is admitted in any case: so rarely that the delays which it causes are at most one
part in so many of the time."""
CAUSED_WEIGHT = 2
"""Work that admitting a turn causes counts so many times: what it displaces displaces others in turn."""
SOON_SHARE = 0.5
"""Where nothing runs, a turn waits for a session that is expected back within this share of the work it would cause."""
WAIT_MAX_NS = 90 * NS_PER_S
"""No turn waits longer, whatever it displaces."""
GROWTH_TURNS = 8
"""Turns of the kept sessions for whose growth a turn that would begin beside them leaves room."""
KEPT_CHANCE = 0.25
"""A session that is less likely to come back is not waited for."""
RECHECK_NS = 25 * NS_PER_MS
"""A turn that waits is looked at again after this long."""
SENIORITY_NS = 60 * NS_PER_S
"""A session's turn comes before requests that arrived at most so much earlier: else sessions that wait for their first
turn, and have nothing to lose, come between the turns of those that have."""
TURN_NS = 10 * NS_PER_S
"""What a turn takes with its gap, before any was seen."""
JUDGED_RETURNS = 64
"""Returns over which the policy is compared with the order of last use."""
OFF_RETURNS = 256
"""Returns for which the policy is off where that was better; twice as many the next time."""
WORSE_SHARE = 0.98
"""It is worse when it had less than this share of what the order of last use would have had."""


Place = tuple[str, bytes, int]
"""A cached prefix: isolation, identity of its last block, its blocks."""


@dataclass(slots=True, eq=False)
class Absence:
    """A session between the end of an answer and the request that goes on from it."""

    arrival: int
    """Of the request that left it."""
    places: tuple[Place, ...]
    """Of what it left, and of its prompt alone: clients write an answer again in words of their own."""
    tenant: str
    tool: str
    begun: int
    """Arrival of the session's first request."""
    tokens: int
    own_tokens: int
    """Of them: not of a prefix that was cached when the session began."""
    prompt_tokens: int
    since_ns: int
    drawn_tokens: int
    """Of its answer."""
    answer_ns: int
    """What the answer took, as steps go when nothing else is computed."""
    saved: float = 0.0
    """Time that keeping it saves, by nanosecond and block, when it was ranked last."""
    chance: float = 1.0
    near_chance: float = 1.0
    """That it comes back within the time of a turn, roughly: lower for calls that are overdue."""
    has_returned: bool = False
    """Its next request waits for admission."""

    @property
    def handle(self) -> str:
        """Its name among retained prefixes."""
        return f"turn {self.arrival}"


@dataclass(slots=True)
class Delay:
    """A turn that waits for room which is kept for others."""

    since_ns: int
    check_ns: int
    blocks: int
    """Of its prompt: in the order of last use it would have them by now."""


class ReturnPolicy:
    """The policy of one instance, which runs prompts and answers itself."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pool = state.memory.pool
        self._block_tokens = state.memory.block_tokens
        self.forecasts = ReturnForecasts()
        #: by arrival, in the order of their beginnings: the order of last use, too
        self._absences: OrderedDict[int, Absence] = OrderedDict()
        #: of several with one prompt, the last
        self._at_place: dict[Place, Absence] = {}
        #: by isolation: how many places have so many blocks
        self._lengths: dict[str, dict[int, int]] = {}
        #: retained ones by arrival, lowest priority first since they were ranked last
        self._kept: dict[int, Absence] = {}
        #: those whose next request has come, by its id
        self._returned: dict[str, Absence] = {}
        self._delays: dict[str, Delay] = {}
        #: when the requests of the last time arrived
        self._arrivals: deque[tuple[int, int]] = deque(maxlen=ABSENCES_MAX)
        self._ranked_ns = self._averaged_ns = self._forced_ns = 0
        #: when something ran last, and when a turn that waits while nothing runs is looked at again
        self._ran_ns, self._did_run = 0, False
        self._recheck_ns: int | None = None
        #: running sequences, averaged over a turn
        self._running = 0.0
        #: a turn with its gap and without waiting, averaged
        self._turn_ns = float(TURN_NS)
        #: by how much a turn makes a session longer, averaged
        self._growth_tokens = 0.0
        #: tokens that returning sessions had, and would have had in the order of last use
        self._had_tokens = self._lru_tokens = 0.0
        self._judged = 0
        self._off_returns, self._next_off = 0, OFF_RETURNS
        self._pool.retained.on_giving_up = self.rank_absences

    @property
    def is_on(self) -> bool:
        """Whether it decides; else it only learns."""
        return not self._off_returns

    @property
    def kept_prefixes(self) -> int:
        """Sessions whose KV is here still, and waits for them."""
        retained = self._pool.retained
        return sum(retained.retained_tokens(absence.handle) > 0 for absence in self._kept.values())

    @property
    def next_check_ns(self) -> int | None:
        """When a turn that waits while nothing runs is looked at again. None: there is none."""
        return self._recheck_ns if self._delays else None

    # -- a session's way

    def on_request_opened(self, group: Group) -> None:
        """A request has come; before it has sequences."""
        arrivals, now_ns = self._arrivals, self._state.now
        arrivals.append((now_ns, group.arrival))
        while now_ns - arrivals[0][0] > SENIORITY_NS:
            arrivals.popleft()
        match = self._find_absence(group)
        if match is None:
            return
        absence, common_tokens = match
        counters = self._state.counters
        gap_ns = now_ns - absence.since_ns
        self.forecasts.learn_gap(absence.tenant, absence.tool, gap_ns)
        self._turn_ns += (gap_ns + absence.answer_ns - self._turn_ns) / JUDGED_RETURNS
        grown_tokens = len(group.request.prompt) - absence.tokens + absence.drawn_tokens
        self._growth_tokens += (grown_tokens - self._growth_tokens) / JUDGED_RETURNS
        if self.is_on and absence.tool:
            group.begun = absence.begun
            group.ranked_arrival = max(absence.begun, arrivals[0][1])
        group.shared_tokens = absence.tokens - absence.own_tokens
        absence.tokens, absence.own_tokens = common_tokens, max(1, common_tokens - group.shared_tokens)
        had_tokens = min(common_tokens, self._pool.match(group.isolation, group.request.prompt))
        counters.returned_turns += 1
        counters.kept_turns += had_tokens == absence.tokens
        self._judge_return(absence, had_tokens)
        self._forget_absence(absence)
        if absence.arrival in self._kept:
            absence.has_returned = True
            self._returned[group.request.request_id] = absence
            self._pool.retained.change_priority(absence.handle, 1.0)
            expected = f"{absence.tool or 'no tool'}, back after {gap_ns / NS_PER_S:.3g} s"
            group.facts.append(("kept_for_return", f"{absence.tokens} tokens: {expected}"))

    def on_admitted(self, group: Group) -> None:
        """The request has its blocks."""
        request_id = group.request.request_id
        delay = self._delays.get(request_id)
        if delay is not None:
            self._state.counters.delayed_turns += 1
            waited_ms = (self._state.now - delay.since_ns) // NS_PER_MS
            group.facts.append(("waited_for_kept_prefixes_ms", waited_ms))
        if group.shared_tokens is None:
            group.shared_tokens = group.cached_tokens
        self.on_request_ended(request_id)

    def on_request_ended(self, request_id: str) -> None:
        """It waits no more: it was admitted, or has ended."""
        self._delays.pop(request_id, None)
        absence = self._returned.pop(request_id, None)
        if absence is not None:
            self._end_retention(absence)

    def on_answer_left(self, group: Group, tokens: TokenArray, drawn: int) -> None:
        """An answer of ``drawn`` tokens has ended, and what was computed of ``tokens`` is cached."""
        request = group.request
        cached = self._pool.match(group.isolation, tokens) if request.use_cache else 0
        # less than what other sessions begin with: whose next turn that is cannot be told
        if cached <= (group.shared_tokens or 0) or request.n > 1 or request.beam_width or request.is_deferrable:
            return
        now_ns, tokens = self._state.now, tokens[:cached]
        places = self._places_of(group, tokens)
        if (earlier := self._at_place.get(places[0])) is not None and earlier.places[0] == places[0]:
            self._forget_absence(earlier)
            self._end_retention(earlier)
        rows = max(1, len(self._state.decoding.items))
        absence = self._absences[group.arrival] = Absence(
            group.arrival, places, group.tenant, group.tool, group.begun, cached, cached - (group.shared_tokens or 0),
            len(request.prompt), now_ns, drawn, drawn * self._state.costs.model.decode_step_ns(rows, rows * cached),
        )  # fmt: skip
        for place in places:
            self._leave_place(place)
            self._at_place[place] = absence
            lengths = self._lengths.setdefault(group.isolation, {})
            lengths[place[2]] = lengths.get(place[2], 0) + 1
        if self.is_on and self.retain_answer(absence, tokens):
            self._kept[absence.arrival] = absence
        self._expire_absences()

    def retain_answer(self, absence: Absence, tokens: TokenArray) -> int:
        """Keep what an answer left, as long as nothing that saves more needs the room. Returns its tokens; 0: the
        session is not expected back, and what it left is like any other entry of the cache."""
        self._rank_absence(absence)
        # after an answer without a call the next turn may be minutes away, and new prompts would wait meanwhile
        if not absence.tool or absence.chance < KEPT_CHANCE:
            return 0
        until_ns, priority = absence.since_ns + HORIZON_NS, self._priority_of(absence)
        return self._pool.retained.retain_prefix(absence.handle, absence.places[0][0], tokens, until_ns, priority)

    def _places_of(self, group: Group, tokens: TokenArray) -> tuple[Place, ...]:
        """Of ``tokens``, which are cached, and of the blocks of its prompt that no other session begins with."""
        identities, blocks = self._pool.identities(group.isolation, tokens), len(tokens) // self._block_tokens
        prompt_blocks = min(len(group.request.prompt) // self._block_tokens, blocks)
        if prompt_blocks * self._block_tokens <= (group.shared_tokens or 0):
            prompt_blocks = blocks
        ends = dict.fromkeys((blocks, prompt_blocks))
        return tuple((group.isolation, identities[KEY_BYTES * (end - 1) : KEY_BYTES * end], end) for end in ends)

    def _find_absence(self, group: Group) -> tuple[Absence, int] | None:
        """The longest one that the request goes on from, and how many tokens of it."""
        request = group.request
        lengths = self._lengths.get(group.isolation)
        if not lengths or not request.use_cache:
            return None
        identities = self._pool.identities(group.isolation, request.prompt)
        whole_blocks = len(request.prompt) // self._block_tokens
        for blocks in sorted((length for length in lengths if length <= whole_blocks), reverse=True):
            identity = identities[KEY_BYTES * (blocks - 1) : KEY_BYTES * blocks]
            absence = self._at_place.get((group.isolation, identity, blocks))
            # a prompt that is sent again is no next turn
            if absence is not None and len(request.prompt) > absence.prompt_tokens:
                return absence, blocks * self._block_tokens
        return None

    def _expire_absences(self) -> None:
        while self._absences:
            first = next(iter(self._absences.values()))
            if len(self._absences) <= ABSENCES_MAX and self._state.now - first.since_ns < HORIZON_NS:
                return
            self.forecasts.learn_gap(first.tenant, first.tool, None)
            self._forget_absence(first)
            self._end_retention(first)

    def _forget_absence(self, absence: Absence) -> None:
        del self._absences[absence.arrival]
        for place in absence.places:
            if self._at_place.get(place) is absence:
                self._leave_place(place)

    def _leave_place(self, place: Place) -> None:
        """It leads to no absence, if it did."""
        if self._at_place.pop(place, None) is None:
            return
        isolation, _, blocks = place
        lengths = self._lengths[isolation]
        lengths[blocks] -= 1
        if not lengths[blocks]:
            del lengths[blocks]
            if not lengths:
                del self._lengths[isolation]

    def _end_retention(self, absence: Absence) -> None:
        if self._kept.pop(absence.arrival, None) is not None:
            self._pool.retained.end_retention(absence.handle)

    # -- which KV goes

    def rank_absences(self) -> None:
        """Room is needed: say anew which of the kept goes first."""
        now_ns = self._state.now
        if now_ns - self._ranked_ns < RANK_NS + len(self._kept) * NS_PER_MS // 4 and self._ranked_ns:
            return
        self._ranked_ns = now_ns
        retained = self._pool.retained
        kept_absences = [absence for absence in self._kept.values() if retained.retained_tokens(absence.handle)]
        for absence in kept_absences:
            if not absence.has_returned:
                self._rank_absence(absence)
                retained.change_priority(absence.handle, self._priority_of(absence))
        kept_absences.sort(key=lambda absence: (absence.has_returned, self._priority_of(absence)))
        self._kept = {absence.arrival: absence for absence in kept_absences}

    def _rank_absence(self, absence: Absence) -> None:
        waited_ns = self._state.now - absence.since_ns
        forecast = self.forecasts.forecast_return(absence.tenant, absence.tool, waited_ns)
        absence.chance = forecast.chance
        absence.near_chance = min(forecast.chance, forecast.worth * self._turn_ns)
        absence.saved = forecast.worth * self._reload_ns(absence) * self._block_tokens / absence.own_tokens

    def _priority_of(self, absence: Absence) -> float:
        """Between 0 and 1: by powers of two of what it saves, and among equals the session that began later first."""
        power = min(63.0, max(-64.0, float(round(math.log2(max(absence.saved, 2.0**-64))))))
        return (power + 64 + 1 / (2 + absence.begun)) / 128

    def _reload_ns(self, absence: Absence) -> int:
        """What it takes to have its KV again."""
        costs = self._state.costs
        recompute_ns = costs.model.prefill_ns(absence.own_tokens, absence.tokens - absence.own_tokens)
        if not self._pool.config.dram_blocks:
            return recompute_ns
        return min(recompute_ns, costs.swap_ns(absence.own_tokens // self._block_tokens))

    # -- which turn waits

    def average_running(self) -> None:
        """A plan is made: count what runs."""
        state, now_ns = self._state, self._state.now
        running = len(state.prefilling.items) + len(state.decoding.items)
        share = min(1.0, (now_ns - self._averaged_ns) / self._turn_ns)
        self._running += (running - self._running) * share
        self._averaged_ns = now_ns
        runs = running > 0 or bool(state.idle.items)
        if runs or self._did_run:
            self._ran_ns = now_ns
        self._did_run, self._recheck_ns = runs, None

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether ``sequence``, which waits for admission, leaves the room to sessions for which it is kept."""
        state, request = self._state, sequence.group.request
        if not (self._kept and self.is_on) or sequence.out or sequence.dram_blocks:
            return False
        if request.slo_ttft_ns is not None or state.memory.needs_more_than_blocks:
            return False
        now_ns, delay = state.now, self._delays.get(request.request_id)
        if not self._did_run:
            self._recheck_ns = now_ns + RECHECK_NS
        if delay is not None and now_ns < delay.check_ns:
            return True
        caused_ns = self._caused_ns(sequence)
        delayed = self._running + 1  # what is displaced, too; turns that wait lack room, not computing
        if CAUSED_WEIGHT * caused_ns * delayed <= self._turn_ns:
            return False
        if not self._did_run:
            idle_ns = now_ns - self._ran_ns
            if idle_ns >= caused_ns or self._expected_return_ns() > SOON_SHARE * caused_ns:
                return False
        if delay is None:
            delay = self._delays[request.request_id] = Delay(
                now_ns, now_ns, sequence.prompt_tokens // self._block_tokens
            )
        if now_ns - delay.since_ns >= WAIT_MAX_NS:
            return False
        if FORCED_PART * caused_ns * delayed < now_ns - max(delay.since_ns, self._forced_ns):
            self._forced_ns = now_ns
            return False
        delay.check_ns = now_ns + RECHECK_NS
        return True

    def _expected_return_ns(self) -> float:
        """From now until the first of the kept sessions comes back: each at a constant rate, by the median of the rest
        of its gap."""
        rate = 0.0
        for absence in self._kept.values():
            if not absence.has_returned:
                waited_ns = self._state.now - absence.since_ns
                forecast = self.forecasts.forecast_return(absence.tenant, absence.tool, waited_ns)
                rate += forecast.chance / max(1, forecast.wait_ns)
        return 1 / rate if rate else math.inf

    def _caused_ns(self, sequence: Sequence) -> float:
        """Work that admitting ``sequence`` causes, where it takes room that is kept for its tenant: its prompt, for its
        KV will have to go as well, and what is displaced of sessions that began earlier. 0: it takes none."""
        state, group, tokens = self._state, sequence.group, sequence.known_tokens()
        matched = self._pool.match(group.isolation, tokens)
        own_absence = self._returned.get(group.request.request_id)
        if own_absence is not None and matched >= own_absence.tokens:
            return 0.0
        needed_blocks = ceil_div(len(tokens) - matched, self._block_tokens) + headroom_blocks(len(state.decoding))
        growing = sum(not absence.has_returned for absence in self._kept.values())
        needed_blocks += int(GROWTH_TURNS * growing * self._growth_tokens) // self._block_tokens
        lacking = needed_blocks - self._pool.retained.room_beside(needed_blocks)
        if lacking <= 0:
            return 0.0
        self.rank_absences()
        caused_ns = 0.0
        for absence in self._kept.values():
            if lacking <= 0:
                break
            if absence is own_absence:
                continue
            own_blocks = max(1, absence.own_tokens // self._block_tokens)
            if absence.tenant == group.tenant:
                caused_ns = caused_ns or float(state.costs.model.prefill_ns(len(tokens) - matched, matched))
                if absence.begun < group.begun:
                    chance = 1.0 if absence.has_returned else absence.near_chance
                    caused_ns += chance * self._reload_ns(absence) * min(1.0, lacking / own_blocks)
            lacking -= own_blocks
        return caused_ns

    # -- never worse

    def _judge_return(self, absence: Absence, had_tokens: int) -> None:
        """Compare with the order of last use: it would have what fits beside all that was used since."""
        if self._off_returns:
            self._off_returns -= 1
            return
        config, since_blocks = self._pool.config, 0
        room_blocks = config.hbm_blocks + config.dram_blocks
        for later in reversed(self._absences.values()):
            if later is absence or since_blocks >= room_blocks:
                break
            since_blocks += later.own_tokens // self._block_tokens
        running = [*self._state.prefilling.items, *self._state.decoding.items, *self._state.idle.items]
        room_blocks -= since_blocks + sum([sequence.blocks_held for sequence in running])
        room_blocks -= sum([delay.blocks for delay in self._delays.values()])
        lru_tokens = min(absence.tokens, max(0, room_blocks * self._block_tokens))
        self._had_tokens += had_tokens
        self._lru_tokens += lru_tokens
        self._judged += 1
        if self._judged >= JUDGED_RETURNS:
            if self._had_tokens < WORSE_SHARE * self._lru_tokens:
                self._turn_off()
            elif self._next_off > OFF_RETURNS:
                self._next_off //= 2
            self._had_tokens = self._lru_tokens = 0.0
            self._judged = 0

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books contradict each other."""
        lengths: dict[str, dict[int, int]] = {}
        for place, absence in self._at_place.items():
            check(
                place in absence.places and self._absences.get(absence.arrival) is absence, "a place is of no absence"
            )
            of_isolation = lengths.setdefault(place[0], {})
            of_isolation[place[2]] = of_isolation.get(place[2], 0) + 1
        check(lengths == self._lengths, "absences were counted wrongly")
        kept_absences = [absence for absence in self._kept.values() if not absence.has_returned]
        check(
            all(self._absences.get(absence.arrival) is absence for absence in kept_absences),
            "what is kept is of no absence",
        )
        returned = [absence for absence in self._kept.values() if absence.has_returned]
        check(len(returned) <= len(self._returned), "a turn that has come back is not waited for")
        open_requests = self._state.groups
        check(all(name in open_requests for name in (*self._returned, *self._delays)), "a request that ended waits")

    def _turn_off(self) -> None:
        self._off_returns, self._next_off = self._next_off, min(2 * self._next_off, 64 * OFF_RETURNS)
        self._state.counters.retention_off += 1
        for absence in list(self._kept.values()):
            self._end_retention(absence)
        self._returned.clear()
        self._delays.clear()
