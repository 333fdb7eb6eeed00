"""Fetch or recompute: asking other instances for a prefix before a request is admitted.

A request with holders is WAITING_FOR_REMOTE_KV until it is decided that its KV is computed here, or the KV is in the
index, or the wait is over; then it waits for admission like any other, and finds in the index what has come.

How quickly the disks of one store give what an instance asks of them: learned from its own fetches.

A store tells what its disks cost, or nothing; a disk that others use too, or that fails, is slower than that. So each
fetch that was read from disks is compared with what was expected::

    it came whole    -> half of the difference is learned, as a factor
    a part was late  -> the disks are so slow: learned at once
    nothing came     -> the disks are at least so slow; how slow is *unknown* until something has come

Disks that are too slow, or of unknown speed, are not asked any more, and nothing would be learned of them. Then a few
blocks are read now and then that no request waits for (a *trial fetch*): the first time that nothing came, at once, so
the first encounter with a slow disk costs one wait and no second, longer one. One quick trial proves nothing of disks
that stand still now and then: only after several in a row less is expected, and each time that it was wrong the next
trial comes later.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, TokenArray
from memserve.base.units import NS_PER_MS, NS_PER_S, ceil_div
from memserve.instance.scheduler.sequence import Cause, Group
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.costs import CopyCurve, CostModel
from memserve.kv.reuse import FetchChoice, Prefix, plan_fetches
from memserve.kv.store_shares import KEY_BYTES
from memserve.kv.transfer.events import FetchEnded
from memserve.kv.transfer.exchange import Exchange
from memserve.kv.transfer.spread import SpreadPrefix
from memserve.protocol.kv_hints import HintAction, KvHint
from memserve.protocol.peers import Holder, PeerInfo

TRIAL_AFTER_NS = 5 * NS_PER_S
"""How long nothing was learned of slow disks before a trial fetch."""
TRIAL_AFTER_MAX_NS = 160 * NS_PER_S
TRIAL_BLOCKS = 8
GOOD_IN_A_ROW = 3
"""Fetches that came in time before slow disks count as less slow."""
TRUSTED_AFTER = 32
"""Fetches in a row after which disks count as if they had never been late."""
_SLOW = 1.5
_SCALE_MIN, _SCALE_MAX = 0.1, 1e4
_LATE = 2.0
"""What did not come at all takes at least twice as long as it was waited for."""


@dataclass(slots=True)
class ReadSpeed:
    """Of the disks of one store."""

    reported_curve: CopyCurve
    """What reading takes, as the store says, or by default."""
    scale: float = 1.0
    """How many times longer it takes."""
    learned_ns: int = 0
    """When a fetch, or a trial, was last begun or has ended."""
    trial_after_ns: int = TRIAL_AFTER_NS
    """How long nothing was learned before the next trial: twice as long with each time that the disks were late."""
    good: int = 0
    """Fetches in a row that came in time."""
    is_unknown: bool = False
    """Nothing has come since nothing came in time: ``scale`` is the least that reading takes."""
    hurries: bool = False
    """The next trial is due at once."""
    hurried_ns: int = -(1 << 62)
    """When it was last due at once: at most once in ``trial_after_ns``."""

    @property
    def expected_curve(self) -> CopyCurve:
        """What reading takes now; of unknown disks, more than any request waits for."""
        reported, scale = self.reported_curve, _SCALE_MAX if self.is_unknown else self.scale
        return CopyCurve(reported.start_ns * scale, reported.piece_ns * scale, reported.byte_ns * scale)

    def on_arrived(self, told_ns: int, spent_ns: int, now_ns: int) -> None:
        """All that was asked for came; it took ``spent_ns``, and ``told_ns`` by the told curve."""
        self.learned_ns = now_ns
        self.good += 1
        if self.good >= TRUSTED_AFTER:
            self.trial_after_ns = TRIAL_AFTER_NS
        ratio = _bounded(spent_ns / max(1, told_ns))
        if self.is_unknown:  # the first measurement since; the scale was only a bound
            self.is_unknown = self.hurries = False
            self.scale = max(self.scale, ratio)
        elif ratio > self.scale or self.scale <= _SLOW or self.good >= GOOD_IN_A_ROW:
            self.scale = _bounded((self.scale * ratio) ** 0.5)

    def on_late(self, told_ns: int, spent_ns: int, now_ns: int, *, is_part: bool, was_read: bool = False) -> None:
        """After ``spent_ns`` less had come than was asked for: a part, which takes ``told_ns`` by the told curve, or
        nothing of what takes so long. ``was_read``: nothing came, but the store had read it, and moving it was late."""
        self.learned_ns = now_ns
        if 0 < self.good < TRUSTED_AFTER:
            self.trial_after_ns = min(TRIAL_AFTER_MAX_NS, 2 * self.trial_after_ns)
        self.good = 0
        ratio = spent_ns / max(1, told_ns) * (1.0 if is_part else _LATE)
        self.scale = _bounded(max(self.scale, ratio))
        if is_part:
            self.is_unknown = self.hurries = False
        elif not self.is_unknown and not was_read and ratio > _SLOW:
            self.is_unknown, self.hurries = True, now_ns - self.hurried_ns >= self.trial_after_ns
            self.hurried_ns = now_ns if self.hurries else self.hurried_ns

    def wants_trial(self, now_ns: int) -> bool:
        """Whether to look if the disks are still slow."""
        return self.scale > _SLOW and (self.hurries or now_ns - self.learned_ns >= self.trial_after_ns)

    def on_trial_started(self, now_ns: int) -> None:
        """A few blocks are asked for that no request waits for."""
        self.learned_ns, self.hurries = now_ns, False


def _bounded(scale: float) -> float:
    return min(_SCALE_MAX, max(_SCALE_MIN, scale))


GATHER_NS = NS_PER_MS
"""Requests that come to a busy instance within this time are decided together: they share the link and the device."""
LINK_TRIAL_BLOCKS = (8, 2, 16)
"""Of the first fetches over a link of which nothing is known: their sizes differ, so that a curve follows from them."""
_LOOKS_AHEAD = 16  # of a line that a request waits behind


@dataclass(frozen=True, slots=True)
class _Flight:
    """A fetch that is under way."""

    holder: Holder
    begins_ns: int
    """When the link is expected to be free for it."""
    link_ns: int
    """How long it is expected to be busy with it."""
    first_block: int
    end_block: int
    near: bool
    """Whether the pages come over no network."""
    asked_ns: int

    @property
    def ends_ns(self) -> int:
        return self.begins_ns + self.link_ns


class Fetches:
    """All requests that may get a prefix from elsewhere."""

    def __init__(self, state: SchedulerState, exchange: Exchange, geometry: KVGeometry, wait_max_ns: int) -> None:
        self._state = state
        self._exchange = exchange
        self._geometry = geometry
        self._wait_max_ns = wait_max_ns
        #: requests whose holders have not been asked yet, in order of arrival
        self.undecided: list[Group] = []
        #: when they are decided; None: there are none, or those before them in line come first
        self.decide_at_ns: int | None = None
        #: fetch id -> the request that waits for it, and the holder that was asked
        self.pending: dict[str, tuple[Group, Holder]] = {}
        #: by fetch id
        self._flights: dict[str, _Flight] = {}
        #: fetch ids of those that no request waits for
        self._trials: set[str] = set()
        #: by fetch id, what was asked for before any request came
        self._prefetches: dict[str, KvHint] = {}
        #: prefetches that gave way to a request; the link empties the list
        self.given_up: list[KvHint] = []
        self._tried = 0  # links that were tried
        #: names of peers with pages that come over a network
        self.far: dict[str, bool] = {}
        #: by the names of stores
        self._disks: dict[str, ReadSpeed] = {}
        self.fetched_tokens = 0
        #: of them: out of a store, and out of one that had some of the prefix on its disks
        self.fetched_store_tokens = self.fetched_ssd_tokens = 0
        #: fetches from a store that brought nothing: late, gone, or damaged
        self.store_failures = 0

    def stores_changed(self, stores: Iterable[PeerInfo]) -> None:
        """All stores among the members. What was learned of one stays while it says the same."""
        known_speeds, self._disks = self._disks, {}
        for info in stores:
            name, reported = info.peer.name, _disk_of(info)
            self._disks[name] = (
                known_speeds[name]
                if name in known_speeds and known_speeds[name].reported_curve == reported
                else ReadSpeed(reported)
            )

    def start_fetch(self, group: Group, now_ns: int) -> None:
        """A new request with holders, WAITING_FOR_REMOTE_KV: it goes on at once where nothing can be fetched."""
        request, remote = group.request, group.remote
        shares = self._state.memory.pool.config.caching and self._exchange.shares_kv
        if remote is None or not shares or not request.use_cache or group.prompt_logprobs is not None:
            self._admit_group(group)
            return
        if any(
            holder.disk_tokens for holder in remote.holders
        ):  # less of the prompt, out of memory, may be there sooner
            remote.holders.sort(key=lambda holder: self._expected_ns(group, holder))
        else:
            remote.holders.sort(key=lambda holder: -holder.prefix_tokens)  # stable: the router's order decides ties
        remote.fetch_until_ns = now_ns + self._wait_max_ns
        if len(self._state.groups) == 1:  # nothing else to share with
            self._decide_fetches([group], now_ns)
            return
        self.undecided.append(group)
        if self.decide_at_ns is None:
            self.decide_at_ns = now_ns + GATHER_NS

    def start_prefetch(self, hint: KvHint, now_ns: int) -> bool:
        """Ask for a prefix that no request waits for, of the holder with most of it, as far as that costs nothing that
        is pinned or retained. False: no holder has more than there is here, or there is no room."""
        pool = self._state.memory.pool
        if hint.action != HintAction.PREFETCH or not (pool.config.caching and self._exchange.shares_kv):
            return False
        hbm, dram = pool.match_blocks(hint.tenant, hint.tokens)
        spare = pool.retained.spare_blocks(kept=hbm) - dram - pool.state_blocks
        holder = max(hint.holders, key=lambda holder: (holder.prefix_tokens, -holder.disk_tokens), default=None)
        if holder is None:
            return False
        size = self._geometry.block_tokens
        end = min(min(holder.prefix_tokens, len(hint.tokens)) // size, hbm + dram + max(0, spare))
        if end <= hbm + dram or self._is_cut(holder, end):
            return False
        begin, deadline_ns = (hbm + dram) * size, now_ns + self._wait_max_ns
        fetch_id = self._send_fetch(
            hint.tenant, hint.tokens[: end * size], holder, begin, now_ns, deadline_ns, link_ns=0
        )
        self._prefetches[fetch_id] = hint
        return True

    def tokens_to_compute(self) -> int:
        """Tokens of prompts that wait for a prefix from elsewhere, and that are computed here in any case."""
        size, flights = self._geometry.block_tokens, self._flights
        pending_tokens = sum(
            len(group.request.prompt) - flights[name].end_block * size for name, (group, _) in self.pending.items()
        )
        return pending_tokens + sum(len(group.request.prompt) for group in self.undecided)

    def decide_gathered(self, now_ns: int) -> None:
        """Decide for the requests that have gathered, if it is time, as far as there is memory for what they get."""
        if not self.undecided or (self.decide_at_ns is not None and now_ns < self.decide_at_ns):
            return
        self.decide_at_ns = None
        near = self._groups_due()
        for group in near:
            self.undecided.remove(group)
            if group.remote is not None:
                group.remote.fetch_until_ns = now_ns + self._wait_max_ns
        self._decide_fetches(near, now_ns)

    def _groups_due(self) -> list[Group]:
        """The requests to decide for now. What is fetched long before the request has its turn is evicted again: so
        there must be room for it beside what is being fetched and beside the requests before it in its tenant's line.
        The first one is decided in any case."""
        room = self._state.memory.pool.available() - sum(self._blocks_of(group) for group, _ in self.pending.values())
        near: list[Group] = []
        blocked_tenants: set[str] = set()  # tenants: those behind it in its line wait, too
        for group in self.undecided:
            line = self._state.waiting.line_of(group.tenant)[:_LOOKS_AHEAD]
            earlier = sum(
                self._blocks_of(sequence.group) for sequence in line if sequence.group.arrival < group.arrival
            )
            needs, is_first = self._blocks_of(group), not (near or self.pending or earlier)
            if group.tenant in blocked_tenants or not (is_first or earlier + needs <= room):
                blocked_tenants.add(group.tenant)
            else:
                near.append(group)
                room -= needs
        return near

    def _blocks_of(self, group: Group) -> int:
        return ceil_div(len(group.request.prompt), self._geometry.block_tokens)

    def _decide_fetches(self, groups: list[Group], now_ns: int) -> None:
        """Each of ``groups`` asks the first of its holders that is worth the wait, or is computed here."""
        while groups:
            asks = [
                (group, *holder_prefix)
                for group in groups
                if (holder_prefix := self._next_holder(group, now_ns)) is not None
            ]
            if not asks:
                return
            groups = []
            for (group, holder, prefix), choice in zip(asks, self._plan_fetches(asks, now_ns), strict=True):
                group.facts.append(("fetch_decision", choice.reason))
                if choice.tokens:
                    self._fetch_for_group(group, holder, prefix.own_tokens, choice, now_ns)
                else:
                    self._start_trial(group, holder, prefix, now_ns)
                    groups.append(group)  # its next holder may be nearer

    def _next_holder(self, group: Group, now_ns: int) -> tuple[Holder, Prefix] | None:
        """The next holder with more than there is here, and where the prefix lies. Without one the request goes on."""
        remote, tokens, block_tokens = group.remote, _tokens_of(group), self._geometry.block_tokens
        reusable = self._state.memory.reusable_tokens(tokens)
        hbm, dram = self._state.memory.pool.match_blocks(group.isolation, reusable)
        own_tokens, hbm_blocks = (hbm + dram) * block_tokens, self._state.memory.pool.config.hbm_blocks
        while remote is not None and remote.holders and now_ns < remote.fetch_until_ns:
            holder = remote.holders.pop(0)
            most = min(min(holder.prefix_tokens, len(reusable)) // block_tokens, hbm_blocks)  # all of it comes to HBM
            blocks = most - hbm - dram
            if blocks > 0 and not self._is_cut(holder, most):
                near = self._is_near(holder)
                dram_tokens, remote_tokens = dram * block_tokens, blocks * block_tokens
                after_ns = self._plans_ns(blocks)
                on_disk = min(holder.disk_tokens, remote_tokens)
                speed = self._disks.get(holder.peer.name)
                disk = speed.expected_curve if speed is not None else None
                own_hbm, link = own_tokens - dram_tokens, self._state.costs.links.curve_from(holder.peer.name, near)
                present_tokens, state_bytes = self._beside_states(group, reusable, own_tokens)
                prefix = Prefix(
                    len(tokens), own_hbm, dram_tokens, remote_tokens, near, after_ns, on_disk, disk, link,
                    min(present_tokens, remote_tokens), state_bytes,
                )  # fmt: skip
                return holder, prefix
        self._admit_group(group)
        return None

    def _is_cut(self, holder: Holder, end_block: int) -> bool:
        """Whether several stores have a state or a window behind what ``holder`` names, and none before
        ``end_block``."""
        return bool(holder.places and self._state.memory.pool.state_blocks) and (
            end_block * self._geometry.block_tokens < holder.prefix_tokens
        )

    def _beside_states(self, group: Group, reusable: TokenArray, own_tokens: int) -> tuple[int, int]:
        """Tokens behind ``own_tokens`` with KV here and no state or window to go on from; bytes of what is lacking."""
        pool, geometry = self._state.memory.pool, self._geometry
        states, windows = pool.config.states, pool.config.windows
        if states is None and windows is None:
            return 0, 0
        beside_bytes = states.state_bytes if states is not None else pool.state_blocks * geometry.block_bytes
        return pool.match_kv(group.isolation, reusable) - own_tokens, beside_bytes

    def _expected_ns(self, group: Group, holder: Holder) -> int:
        """Until the prompt is computed behind what ``holder`` has, without what is before it."""
        costs, geometry = self._state.costs.model, self._geometry
        total = len(_tokens_of(group))
        prefix_tokens = min(holder.prefix_tokens, total - 1)
        link = costs.link_curve(self._is_near(holder))
        speed = self._disks.get(holder.peer.name)
        disk = speed.expected_curve if speed is not None else costs.disk
        moved_ns = link.kv_ns(prefix_tokens, geometry.block_tokens, geometry.token_bytes)
        read_ns = disk.kv_ns(min(holder.disk_tokens, prefix_tokens), geometry.block_tokens, geometry.token_bytes)
        return moved_ns + read_ns + costs.prefill_ns(total - prefix_tokens, prefix_tokens)

    def _plan_fetches(self, asks: Items[tuple[Group, Holder, Prefix]], now_ns: int) -> list[FetchChoice]:
        learnt = self._state.costs
        return plan_fetches(
            learnt.model,
            self._geometry,
            [prefix for _, _, prefix in asks],
            queue_ns=learnt.queue_ns(self._state.prefill_tokens_queued()),
            waits_max_ns=[group.remote.fetch_until_ns - now_ns if group.remote else 0 for group, _, _ in asks],
            link_busy_ns=self._link_busy_ns(now_ns),
        )

    def _fetch_for_group(self, group: Group, holder: Holder, own_tokens: int, choice: FetchChoice, now_ns: int) -> None:
        remote, end = group.remote, own_tokens + choice.tokens
        if remote is None:
            return
        tokens, deadline_ns = _tokens_of(group)[:end], now_ns + choice.wait_ns
        if holder.places and self._state.memory.pool.state_blocks:  # KV may be here that lacks a state behind it
            own_tokens = self._state.memory.pool.match_kv(group.isolation, tokens)
        remote.fetch_id = self._send_fetch(
            group.isolation, tokens, holder, own_tokens, now_ns, deadline_ns, link_ns=choice.link_ns
        )
        self.pending[remote.fetch_id] = (group, holder)

    def _send_fetch(
        self, isolation: str, tokens: TokenArray, holder: Holder, begin: int, now_ns: int, deadline_ns: int,
        *, link_ns: int, is_trial: bool = False,
    ) -> str:  # fmt: skip
        """Ask for ``tokens`` from ``begin`` on, whole blocks."""
        first_block, end_block = begin // self._geometry.block_tokens, len(tokens) // self._geometry.block_tokens
        near = self._is_near(holder)
        flight = _Flight(holder, now_ns + self._link_busy_ns(now_ns), link_ns, first_block, end_block, near, now_ns)
        if holder.places:
            pool = self._state.memory.pool
            identities = pool.identities(isolation, tokens)
            behind = b"" if is_trial or self._is_cut(holder, end_block) else pool.names_behind(identities)
            identities, count = identities[first_block * KEY_BYTES :] + behind, len(behind) // KEY_BYTES
            wanted = slice(first_block, end_block + count)
            spread = SpreadPrefix(holder.stores, holder.places[wanted], identities, holder.spares[wanted], count)
            fetch_id = self._exchange.fetch_spread(spread, isolation, tokens, first_block, now_ns, deadline_ns)
        else:
            fetch_id = self._exchange.fetch_blocks(
                holder.peer, isolation, tokens, first_block, end_block, now_ns, deadline_ns,
                is_trial=is_trial,
            )  # fmt: skip
        self._flights[fetch_id] = flight
        return fetch_id

    def _is_near(self, holder: Holder) -> bool:
        """Whether no page of what ``holder`` has comes over a network."""
        return not any(self.far.get(peer.name, False) for peer in holder.stores or (holder.peer,))

    def _link_busy_ns(self, now_ns: int) -> int:
        """Until the link is free, as far as is known."""
        return max(0, max((flight.ends_ns for flight in self._flights.values()), default=0) - now_ns)

    def _start_trial(self, group: Group, holder: Holder, prefix: Prefix, now_ns: int) -> None:
        """The prefix is computed. If that is because the holder's disks were slow, or because nothing is known of the
        link to it: look what they take, with a few blocks that the request does not wait for."""
        speed, blocks = self._disks.get(holder.peer.name), TRIAL_BLOCKS
        if self._trials:
            return
        if prefix.disk_tokens:
            if speed is None or not speed.wants_trial(now_ns):
                return
            speed.on_trial_started(now_ns)
        elif self._state.costs.is_measured or self._state.costs.links.is_known(prefix.same_host):
            return
        else:
            self._tried = self._tried % len(LINK_TRIAL_BLOCKS) + 1
            blocks = LINK_TRIAL_BLOCKS[self._tried - 1]
        end = prefix.own_tokens + min(blocks * self._geometry.block_tokens, prefix.remote_tokens)
        deadline_ns = now_ns + self._wait_max_ns
        tokens = _tokens_of(group)[:end]
        self._trials.add(
            self._send_fetch(
                group.isolation, tokens, holder, prefix.own_tokens, now_ns, deadline_ns, link_ns=0, is_trial=True
            )
        )

    def _plans_ns(self, blocks: int) -> int:
        """Time until ``blocks`` free blocks may be pulled into: steps under way may still use them."""
        plans = self._exchange.plans_before_pull(blocks)
        if not plans:
            return 0
        decoding = self._state.decoding.items
        context = sum([sequence.computed for sequence in decoding])
        return plans * self._state.costs.model.decode_step_ns(len(decoding), context)

    def _admit_group(self, group: Group) -> None:
        for sequence in group.sequences.values():
            self._state.move(sequence, Cause.FETCH_ENDED)

    def on_fetch_ended(self, outcome: FetchEnded, now_ns: int) -> KvHint | None:
        """The KV is in the index, or will not come; then the next holder may be asked. Returns the hint that asked for
        it, whose rest is to be done here. None: it was a request, or a trial."""
        flight = self._flights.pop(outcome.transfer_id)
        self._learn_read_speed(flight, outcome, now_ns)
        if outcome.transfer_id in self._trials:
            self._trials.remove(outcome.transfer_id)
        elif outcome.transfer_id not in self._prefetches:
            self._end_request_fetch(flight, outcome, now_ns)
        return self._prefetches.pop(outcome.transfer_id, None)

    def _end_request_fetch(self, flight: _Flight, outcome: FetchEnded, now_ns: int) -> None:
        group, holder = self.pending.pop(outcome.transfer_id)
        remote = group.remote
        if remote is None:
            return
        remote.fetch_id = None
        spans_ns = ("fetch_after_ms", flight.asked_ns - group.arrived_ns), ("fetch_ms", now_ns - flight.asked_ns)
        group.facts += [(name, round(span_ns / NS_PER_MS, 3)) for name, span_ns in spans_ns]
        if outcome.ok:
            tokens = outcome.pulled_blocks * self._geometry.block_tokens
            self.fetched_tokens += tokens
            tier = holder.tier.name.lower()
            if holder.peer.name in self._disks:
                self.fetched_store_tokens += tokens
                self.fetched_ssd_tokens += tokens if holder.disk_tokens else 0
                tier = "ssd" if holder.disk_tokens else "store"
            if outcome.tokens < flight.end_block * self._geometry.block_tokens:
                group.facts.append(("fetch_cut", f"{_names_of(holder)}: {outcome.reason or 'it gave less'}"))
            if outcome.has_state:
                group.facts.append(("fetched_state_bytes", self._exchange.state_bytes))
            group.facts += [("fetched_tokens", tokens), ("fetched_from", _names_of(holder)), ("fetched_tier", tier)]
            self._admit_group(group)
        else:
            self.store_failures += holder.peer.name in self._disks
            group.facts.append(("fetch_failed", f"{_names_of(holder)}: {outcome.reason}"))
            self._decide_fetches([group], now_ns)

    def _learn_read_speed(self, flight: _Flight, outcome: FetchEnded, now_ns: int) -> None:
        """What reading has taken, without waiting for the link and without the link itself."""
        speed = self._disks.get(flight.holder.peer.name)
        if speed is None or not flight.holder.disk_tokens or flight.first_block == flight.end_block:
            return
        block_tokens, token_bytes = self._geometry.block_tokens, self._geometry.token_bytes
        wanted_tokens = (flight.end_block - flight.first_block) * block_tokens
        got_tokens = outcome.tokens - flight.first_block * block_tokens if outcome.ok else 0
        link = self._state.costs.links.curve_from(flight.holder.peer.name, flight.near)
        spent_ns = (
            now_ns - flight.begins_ns - link.kv_ns(outcome.pulled_blocks * block_tokens, block_tokens, token_bytes)
        )
        told_ns = speed.reported_curve.kv_ns(got_tokens or wanted_tokens, block_tokens, token_bytes)
        if got_tokens >= wanted_tokens:  # also where a part was computed here before it came
            speed.on_arrived(told_ns, spent_ns, now_ns)
        else:
            speed.on_late(told_ns, spent_ns, now_ns, is_part=got_tokens > 0, was_read=outcome.was_offered)

    def continue_without(self, group: Group) -> None:
        """All fetches are about to end silently (:meth:`clear`): ``group`` computes what it waits for."""
        remote = group.remote
        if remote is None or not (group in self.undecided or remote.fetch_id is not None):
            return
        if group in self.undecided:
            self.undecided.remove(group)
            self.decide_at_ns = self.decide_at_ns if self.undecided else None
        remote.fetch_id = None
        self._admit_group(group)

    @property
    def trial_ids(self) -> frozenset[str]:
        """Ids of the fetches that no request waits for: no router counts their blocks."""
        return frozenset(self._trials) | self._prefetches.keys()

    def give_up_trials(self) -> bool:
        """A request needs the blocks that trials and prefetches write to. False: there are none."""
        given_up = self.trial_ids
        for fetch_id in sorted(given_up):
            self._exchange.give_up(fetch_id, "the blocks are needed")
            del self._flights[fetch_id]
        self.given_up += self._prefetches.values()
        self._trials.clear()
        self._prefetches.clear()
        return bool(given_up)

    def clear(self) -> None:
        """All fetches have ended silently: requests of an earlier life, and trials."""
        self._flights.clear()
        self._trials.clear()
        self._prefetches.clear()
        self.pending.clear()

    def on_request_ended(self, group: Group) -> None:
        """The request has ended."""
        if group in self.undecided:
            self.undecided.remove(group)
            self.decide_at_ns = self.decide_at_ns if self.undecided else None
        remote = group.remote
        if remote is not None and remote.fetch_id is not None:
            self._exchange.give_up(remote.fetch_id, "the request has ended")
            del self.pending[remote.fetch_id], self._flights[remote.fetch_id]
            remote.fetch_id = None


def _disk_of(store: PeerInfo) -> CopyCurve:
    """As the store has measured it; else the default."""
    try:
        return CostModel.from_json(store.costs).disk if store.costs else CostModel().disk
    except UserError:  # of another version
        return CostModel().disk


def _tokens_of(group: Group) -> TokenArray:
    """What is to be computed: a resumed sequence's own tokens included."""
    sequences = list(group.sequences.values())
    return sequences[0].known_tokens() if len(sequences) == 1 else group.request.prompt


def _names_of(holder: Holder) -> str:
    """Of the stores over which the prefix is spread, or of the one peer that has it."""
    return ", ".join(peer.name for peer in holder.stores) or holder.peer.name
