"""What every instance has cached: the global prompt trees, fed by numbered KV events.

The trees of prefill, decode and colocated instances are one directory, from a block's identity to its holders, so that
one walk matches them all. Each instance numbers the changes of its index. They are applied in order and once; behind a
gap they are kept aside while the missing ones are asked for, and answered by a replay or by a snapshot.

::

    KvEvents(7..9)   expected 7: applied, 10 is next; expected 10: known; expected 5: kept aside, QueryKvEvents(5)
    Heartbeat(12)    expected 10: the tail was lost, QueryKvEvents(10)
    KvSnapshot(12)   replaces all, unless it is older than what was applied

A member has two tiers: an instance HBM and DRAM, a store DRAM and disks. The directory knows them as upper and lower
(its HBM and its DRAM); what lies on both counts as in the upper one.

What is dispatched is expected to be cached soon: it enters with a time to live, so that the next request with that
prompt follows the first one before any event has come.

The prefix trees as a map for people: which prefixes are in use, and which members hold them on which tier.

The directory knows blocks by identity and not what precedes them. The map is therefore drawn from the last prompts: a
radix tree of their blocks, each node a run of blocks that the same prompts share, looked up in the directory. It is
drawn when it is asked for; until then a prompt costs a place in a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from memserve import _core
from memserve.base.config import ClusterConfig
from memserve.base.errors import check
from memserve.base.states import BehindKv
from memserve.base.types import Role, Tier, TokenArray
from memserve.base.units import NS_PER_MS, NS_PER_S, ceil_div
from memserve.kv.events import KvEventKind
from memserve.kv.identity import NAMES_MAX, namespace_id
from memserve.protocol.messages import KvChange, KvEvents, KvSnapshot, QueryKvEvents
from memserve.protocol.peers import Peer
from memserve.protocol.records import EntriesChanged, EntriesReplaced
from memserve.router.members.loads import Ints
from memserve.router.outbox import Timers
from memserve.router.placement.store_union import StoreUnion
from memserve.router.report import Counters

IDENTITY_BYTES = 16
Entries = EntriesChanged | EntriesReplaced
ASK_AGAIN_NS = 500 * NS_PER_MS
"""An unanswered ``QueryKvEvents`` is repeated after this long, with the next thing that the instance says."""
ASIDE_CHANGES_MAX = 16_384
"""Changes of one instance kept aside behind a gap; what is more will be asked for."""


class Matches(NamedTuple):
    """Longest cached prefix of a prompt at each instance."""

    columns: Ints
    """``[2, n]``, by member's number: blocks, and those of them that lie in its lower tier alone."""
    holders: int
    """Members that have any of it."""

    @property
    def blocks(self) -> Ints:
        """``[n]``."""
        blocks: Ints = self.columns[0]
        return blocks


@dataclass(slots=True)
class MemberFeed:
    """The KV events of one incarnation."""

    publishes: bool
    role: Role = Role.COLOCATED
    next_event: int = 0
    """All changes before this one have been applied."""
    aside: dict[int, tuple[KvChange, ...]] = field(default_factory=dict)
    """Batches behind a gap, by their first number."""
    queried_ns: int | None = None

    @property
    def aside_changes(self) -> int:
        return sum(len(changes) for changes in self.aside.values())


def tiers_of(role: Role) -> tuple[Tier, Tier]:
    """The upper and the lower tier of members with this role."""
    return (Tier.DRAM, Tier.SSD) if role is Role.STORE else (Tier.HBM, Tier.DRAM)


def is_sane(update: KvEvents | KvSnapshot, role: Role) -> bool:
    """Whether these can be news of the index of a member with ``role``."""
    if isinstance(update, KvSnapshot):
        runs = {Tier.HBM: update.hbm, Tier.DRAM: update.dram, Tier.SSD: update.ssd}
        return all(len(run) % IDENTITY_BYTES == 0 and (tier in tiers_of(role) or not run) for tier, run in runs.items())
    kinds, tiers = tuple(KvEventKind), tiers_of(role)
    return all(
        change.kind in kinds and len(change.identities) % IDENTITY_BYTES == 0 and change.tier in tiers
        for change in update.changes
    )


class Trees:
    """The directory and the feeds that keep it up to date, by instance number."""

    def __init__(self, config: ClusterConfig, timers: Timers, counters: Counters, key: bytes) -> None:
        self.directory = _core.PrefixDirectory()
        self.stores = StoreUnion(self.directory, key)
        self._timers = timers
        self._expiry_ns: int | None = None  # the first armed timer for what is expected
        self._config = config
        self._counters = counters
        self._key = key
        self._feeds: dict[int, MemberFeed] = {}
        self._names: dict[tuple[str, str], bytes] = {}

    # -- members

    def add_member(self, number: int, *, publishes: bool, role: Role = Role.COLOCATED) -> None:
        """A new member. What it has cached it says itself, or its first heartbeat shows."""
        check(number not in self._feeds, f"instance {number} has a feed already")
        self._feeds[number] = MemberFeed(publishes, role)
        if role is Role.STORE:
            self.stores.add_store(number)

    def recover_member(self, number: int, next_event: int, hbm: bytes, dram: bytes, ssd: bytes = b"") -> None:
        """What the last router knew of a member right before its change ``next_event``; it has just entered."""
        self.stores.replace_holdings(number, lambda: self._store_tiers(number, hbm, dram, ssd))
        self._feeds[number].next_event = next_event

    def _store_tiers(self, number: int, hbm: bytes, dram: bytes, ssd: bytes) -> None:
        by_tier = {Tier.HBM: hbm, Tier.DRAM: dram, Tier.SSD: ssd}
        for place, tier in enumerate(tiers_of(self._feeds[number].role)):
            self.directory.store(number, place, by_tier[tier])

    def remove_member(self, number: int) -> None:
        """A member is gone, with all that it had."""
        if self._feeds.pop(number).role is Role.STORE:
            self.stores.remove_store(number)
        self.directory.clear(number)

    def feed_of(self, number: int) -> MemberFeed:
        """How far a member's events are applied; to look at."""
        return self._feeds[number]

    # -- events

    def apply_events(self, number: int, batch: KvEvents, now_ns: int) -> QueryKvEvents | None:
        """Take a batch into account; ``QueryKvEvents`` when some before it are missing. It must be sane."""
        feed = self._feeds[number]
        if not feed.publishes or batch.first + len(batch.changes) <= feed.next_event:
            return None
        if batch.first > feed.next_event:
            self._put_aside(feed, batch)
            return self._query_events(feed, now_ns)
        self._apply_from(number, feed, batch.first, batch.changes)
        return self._fill_from_aside(number, feed, now_ns)

    def apply_snapshot(self, number: int, snapshot: KvSnapshot, now_ns: int) -> QueryKvEvents | None:
        """Everything that its index holds, right before change ``next_event``. Older than what is known: ignored."""
        feed = self._feeds[number]
        if not feed.publishes or snapshot.next_event < feed.next_event:
            return None
        self._counters.kv_snapshots += 1
        self.stores.replace_holdings(number, partial(self._replace_tiers, number, snapshot))
        feed.next_event, feed.queried_ns = snapshot.next_event, None
        return self._fill_from_aside(number, feed, now_ns)

    def _replace_tiers(self, number: int, snapshot: KvSnapshot) -> None:
        self.directory.clear(number)
        self._store_tiers(number, snapshot.hbm, snapshot.dram, snapshot.ssd)

    def query_if_behind(self, number: int, next_event: int, now_ns: int) -> QueryKvEvents | None:
        """A member has numbered its changes up to ``next_event``: were all of them heard?"""
        feed = self._feeds[number]
        return self._query_events(feed, now_ns) if feed.publishes and next_event > feed.next_event else None

    def make_record(
        self, peer: Peer, number: int, update: KvEvents | KvSnapshot, applied_before: int, now_ns: int
    ) -> Entries:
        """What ``update`` of ``peer`` has changed, now that it is applied; before, changes up to ``applied_before``
        were.

        Mostly that is the news itself. Where it has closed a gap, and changes that waited behind it were applied as
        well, it is everything that the member has.
        """
        next_event = self._feeds[number].next_event
        if (
            isinstance(update, KvEvents)
            and update.first <= applied_before
            and next_event <= update.first + len(update.changes)
        ):
            return EntriesChanged(peer, update.first, update.changes, now_ns)
        if isinstance(update, KvSnapshot) and next_event == update.next_event:
            return EntriesReplaced(peer, next_event, update.hbm, update.dram, now_ns, update.ssd)
        by_tier = dict(zip(tiers_of(self._feeds[number].role), self.holdings_of(number), strict=True))
        hbm, dram, ssd = (by_tier.get(tier, b"") for tier in Tier)
        return EntriesReplaced(peer, next_event, hbm, dram, now_ns, ssd)

    def holdings_of(self, number: int) -> tuple[bytes, bytes]:
        """Identities of all that the member is known to have, in its upper tier and in its lower one alone, 16 bytes
        each."""
        entries = self.directory.dump(number)
        upper = b"".join(identity for identity, above, _ in entries if above)
        return upper, b"".join(identity for identity, above, below in entries if below and not above)

    def _apply_from(self, number: int, feed: MemberFeed, first: int, changes: tuple[KvChange, ...]) -> None:
        for change in changes[feed.next_event - first :]:
            if change.kind == KvEventKind.LOST:
                return  # its own buffer overflowed: this number can only be passed by a snapshot
            self.stores.apply_change(number, change.identities, partial(self._apply_change, number, feed, change))
            feed.next_event += 1
            feed.queried_ns = None  # a gap behind this one is another gap
            self._counters.kv_changes += 1

    def _apply_change(self, number: int, feed: MemberFeed, change: KvChange) -> None:
        if change.kind == KvEventKind.EVICTED:
            self.directory.evict(number, change.identities)
        elif change.kind == KvEventKind.MOVED:
            self.directory.move(number, change.tier - tiers_of(feed.role)[0], change.identities)
        else:
            self.directory.store(number, change.tier - tiers_of(feed.role)[0], change.identities)

    def _put_aside(self, feed: MemberFeed, batch: KvEvents) -> None:
        stored_changes = feed.aside.get(batch.first, ())
        more = len(batch.changes) - len(stored_changes)
        if more > 0 and feed.aside_changes + more <= ASIDE_CHANGES_MAX:
            feed.aside[batch.first] = batch.changes

    def _fill_from_aside(self, number: int, feed: MemberFeed, now_ns: int) -> QueryKvEvents | None:
        """Apply what was kept aside as far as it follows; ask when there is yet another gap."""
        for first in sorted(feed.aside):
            if first > feed.next_event:
                return self._query_events(feed, now_ns)
            changes = feed.aside.pop(first)
            self._apply_from(number, feed, first, changes)
        return None

    def _query_events(self, feed: MemberFeed, now_ns: int) -> QueryKvEvents | None:
        if feed.queried_ns is not None and now_ns - feed.queried_ns < ASK_AGAIN_NS:
            return None
        self._counters.kv_gaps += feed.queried_ns is None
        feed.queried_ns = now_ns
        return QueryKvEvents(feed.next_event)

    # -- prompts

    def prompt_identities(self, tenant: str, fingerprint: str, tokens: TokenArray, block_tokens: int) -> bytes:
        """Identities of the whole blocks of ``tokens``, 16 bytes each, one behind the other."""
        name = self._names.get((tenant, fingerprint))
        if name is None:
            if len(self._names) >= NAMES_MAX:  # salts come and go; a name is quick to compute
                self._names.clear()
            name = self._names[tenant, fingerprint] = namespace_id(tenant, fingerprint, self._key)
        return _core.block_identities(self._key, name, tokens, block_tokens)

    def match_prompt(self, identities: bytes, numbers: int, *, behind: BehindKv | None = None) -> Matches:
        """How much of a prompt each member has; ``numbers``: length of the arrays. ``behind``: several stores are as
        one, for which the first of them stands, as far as they have that behind the KV. None: each on its own."""
        matches = Matches(*self.directory.match_columns(identities, numbers))
        if behind is not None:
            self.stores.join_columns(matches.columns, identities, behind)
        return matches

    def expect_blocks(self, number: int, identities: bytes, now_ns: int, *, by_events: bool = True) -> None:
        """These blocks were sent there to be computed or decoded. ``by_events``: KV events name them so, too."""
        config = self._config
        ttl_ns = config.speculative_ttl_ns if by_events and self._feeds[number].publishes else config.tree_ttl_ns
        self.directory.speculate(number, identities, now_ns + ttl_ns)
        self._wake_for_expiry()

    def expire_expected(self, _: None, now_ns: int) -> None:
        """The timer of all that is expected: forget what was expected and has not been confirmed in time."""
        if self._expiry_ns is not None and self._expiry_ns <= now_ns:
            self._expiry_ns = None
        self.directory.expire(now_ns)
        self._wake_for_expiry()

    def _wake_for_expiry(self) -> None:
        """At whole seconds: nothing depends on the moment. What is expected for a short time, of a member that tells
        what it has, must not wait for what is expected for a long time of one that does not."""
        due_ns = self.directory.next_expiry_ns
        wake_ns = None if due_ns is None else ceil_div(due_ns, NS_PER_S) * NS_PER_S
        if wake_ns is not None and (self._expiry_ns is None or wake_ns < self._expiry_ns):
            self._expiry_ns = wake_ns
            self._timers.arm(wake_ns, self.expire_expected, None)

    def block_count(self, number: int) -> int:
        """Blocks that an instance is taken to have, those that are only expected included."""
        return self.directory.blocks(number) + self.directory.speculative_blocks(number)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the directory names members that are gone, or a gap could be closed."""
        self.directory.check_invariants()
        self.stores.check_invariants()
        unknown_numbers = [holder for holder in self.directory.holders() if holder not in self._feeds]
        check(not unknown_numbers, "the trees name instances that are gone: {}", unknown_numbers)
        for number, feed in self._feeds.items():
            behind = [first for first in feed.aside if first <= feed.next_event]
            check(not behind, "instance {} has events aside that could be applied: {}", number, behind)
            check(feed.aside_changes <= ASIDE_CHANGES_MAX, "instance {} has too many events aside", number)


PROMPTS_MAX = 256
"""Prompts that are remembered."""
BYTES_MAX = 4 << 20
"""And their identities' bytes in total: 262,144 blocks."""


class HeldBlocks(NamedTuple):
    """What one member has of a run of blocks."""

    member: str
    upper_blocks: int
    """On its upper tier: HBM of an instance, memory of a store."""
    lower_blocks: int
    """On its lower tier alone: DRAM of an instance, disks of a store."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of blocks behind its parent's."""

    name: str
    """Of its last block, 16 hexadecimal digits: the same prefix has the same name."""
    blocks: int
    uses: int
    """Prompts, of those that are remembered, that go through all of it."""
    used_ns: int
    """When the last of them was placed."""
    holders: tuple[HeldBlocks, ...]
    children: tuple[PrefixNode, ...]
    """Most used first."""


class _Prompt(NamedTuple):
    tenant: str
    identities: bytes
    placed_ns: int

    def block_at(self, index: int) -> bytes:
        """The identity of block ``index``; ``b""`` behind the end."""
        return self.identities[index * IDENTITY_BYTES : (index + 1) * IDENTITY_BYTES]


Match = Callable[[bytes], Iterable[tuple[str, int, int]]]
"""Identities from the first block on -> member, blocks that it has without a gap, those in its lower tier alone."""


class RecentPrompts:
    """The last prompts that were placed; bounded by number and by bytes."""

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque()
        self._nbytes = 0

    def add_prompt(self, tenant: str, identities: bytes, now_ns: int) -> None:
        """A prompt was placed; ``identities`` of its whole blocks."""
        self._prompts.append(_Prompt(tenant, identities, now_ns))
        self._nbytes += len(identities)
        while len(self._prompts) > PROMPTS_MAX or (self._nbytes > BYTES_MAX and len(self._prompts) > 1):
            self._nbytes -= len(self._prompts.popleft().identities)

    def build_trees(self, tenant: str | None, match: Match) -> dict[str, tuple[PrefixNode, ...]]:
        """By tenant, the most used prefixes first; ``tenant`` None: of all."""
        by_tenant: dict[str, list[_Prompt]] = {}
        for prompt in self._prompts:
            if tenant is None or prompt.tenant == tenant:
                by_tenant.setdefault(prompt.tenant, []).append(prompt)
        return {name: _nodes_below(prompts, 0, match) for name, prompts in by_tenant.items()}


def _nodes_below(prompts: Sequence[_Prompt], depth: int, match: Match) -> tuple[PrefixNode, ...]:
    """The nodes behind ``depth`` blocks that all ``prompts`` share."""
    groups: dict[bytes, list[_Prompt]] = {}
    for prompt in prompts:
        if block := prompt.block_at(depth):
            groups.setdefault(block, []).append(prompt)
    nodes = (_make_node(group, depth, match) for group in groups.values())
    return tuple(sorted(nodes, key=lambda node: (-node.uses, -node.used_ns)))


def _make_node(group: Sequence[_Prompt], depth: int, match: Match) -> PrefixNode:
    end, first = depth + 1, group[0]
    while (block := first.block_at(end)) and all(prompt.block_at(end) == block for prompt in group):
        end += 1
    path = first.identities[: end * IDENTITY_BYTES]
    holders = (_held_blocks(member_match, depth) for member_match in match(path))
    return PrefixNode(
        path[-IDENTITY_BYTES:][:8].hex(),
        end - depth,
        len(group),
        max(prompt.placed_ns for prompt in group),
        tuple(holding for holding in holders if holding.upper_blocks or holding.lower_blocks),
        _nodes_below(group, end, match),
    )


def _held_blocks(member_match: tuple[str, int, int], depth: int) -> HeldBlocks:
    """Of a prefix with ``blocks``, what lies behind ``depth``. What a member has in its lower tier alone is its end:
    blocks leave the upper tier from the leaves."""
    member, blocks, lower = member_match
    behind = max(0, blocks - depth)
    lower = min(lower, behind)
    return HeldBlocks(member, behind - lower, lower)
