"""What happens when no node has room (level 1, row C5): evict, retry once, else reject with the reason.

::

    no node has room
      -> the memory of the oldest request that has ended goes, never that of a running one
      -> is there room now?   yes: the request has its node
                              no:  rejected, and nothing was evicted in vain

What has ended is kept for a while only (:meth:`Pressure.let_go`): a cache that nobody came back for would else keep out
for ever whoever needs more than may be evicted for one.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memserve.errors import check
from memserve.policy.bestfit import BlockLedger, Need

Entry = tuple[int, str]
"""Age and name of a request."""


class Relief(NamedTuple):
    """Where room was made, and whose memory it was."""

    node: int
    evicted: tuple[str, ...]


class Pressure:
    """Requests that have ended and whose blocks are kept, on top of a ledger: the first to be allocated is the oldest.

    Entries become stale when their blocks are freed behind our back (the node is gone): they are skipped.
    """

    __slots__ = ("_ages", "_inactive", "_kept", "_ledger", "_retired", "evictions", "stale")

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self._ages = 0
        #: by node: (age, request), oldest first; may name requests that hold nothing any more
        self._inactive: dict[int, list[Entry]] = {}
        #: (until, node, entry) in the order in which they ended; may name such as are gone
        self._kept: deque[tuple[int, int, Entry]] = deque()
        #: (node, entry) of those that have ended since :meth:`let_go` was called last
        self._retired: list[tuple[int, Entry]] = []
        self.evictions = 0
        self.stale = 0

    def age(self) -> int:
        """A number for a request that gets its blocks now: larger ones are younger."""
        self._ages += 1
        return self._ages

    def retire(self, request_id: str, node: int, age: int) -> None:
        """``request_id`` has ended: its blocks are kept, but may be taken."""
        check(self._ledger.needs(node, request_id) is not None, f"{request_id} holds nothing on node {node}")
        insort(self._inactive.setdefault(node, []), (age, request_id))
        self._retired.append((node, (age, request_id)))

    def let_go(self, now: int, kept_ns: int) -> int:
        """Free what ended ``kept_ns`` ago or earlier. Returns how many went; they are no evictions.

        To be called with every event: whoever was retired since the last call counts as ended ``now``.
        """
        self._kept.extend((now + kept_ns, node, entry) for node, entry in self._retired)
        self._retired.clear()
        gone = 0
        while self._kept and self._kept[0][0] <= now:
            _, node, entry = self._kept.popleft()
            if entry in self._fresh(node):
                self._free(node, entry)
                gone += 1
        return gone

    def room_at_ns(self, need: Need, node: int) -> int | None:
        """When ``node`` has room for ``need`` if nobody else comes or goes, as what has ended is let go; 0: it has room
        now; ``None``: that is not enough, or :meth:`let_go` is yet to be called."""
        wanted = -int(self._ledger.blocks_left(np.array([node]), need)[0])
        dropped: Counter[bytes] = Counter()
        kept, fresh, until_ns = set(need.names), set(self._fresh(node)), 0
        for end_ns, at, entry in self._kept:
            if wanted <= 0:
                break
            if at == node and entry in fresh:
                wanted, until_ns = wanted - self._freed(entry[1], node, dropped, kept), end_ns
        return until_ns if wanted <= 0 else None

    def leave(self, node: int) -> None:
        """The node is gone."""
        self._inactive.pop(node, None)

    def relieve(self, need: Need, nodes: Sequence[int], evictions_max: int) -> Relief | None:
        """Make room for ``need`` on one of ``nodes`` by at most ``evictions_max`` evictions; ``None`` = that is not
        enough anywhere, and nothing was changed.

        It is the node where the fewest must go; of those the one with the oldest victim.
        """
        plans = [(len(victims), victims[0][0], node, victims)
                 for node in nodes if (victims := self._victims(need, node, evictions_max))]  # fmt: skip
        if not plans:
            return None
        _, _, node, victims = min(plans)
        for entry in victims:
            self._free(node, entry)
        self.evictions += len(victims)
        return Relief(node, tuple(request_id for _, request_id in victims))

    def _free(self, node: int, entry: Entry) -> None:
        self._inactive[node].remove(entry)
        self._ledger.free(entry[1], node)

    def _victims(self, need: Need, node: int, evictions_max: int) -> list[Entry]:
        """The oldest that must go for ``need`` to fit; empty when so many are not enough."""
        wanted = -int(self._ledger.blocks_left(np.array([node]), need)[0])
        chosen: list[Entry] = []
        dropped: Counter[bytes] = Counter()
        kept = set(need.names)
        for entry in self._fresh(node):
            if wanted <= 0 or len(chosen) == evictions_max:
                break
            chosen.append(entry)
            wanted -= self._freed(entry[1], node, dropped, kept)
        return chosen if wanted <= 0 else []

    def _freed(self, request_id: str, node: int, dropped: Counter[bytes], kept: set[bytes]) -> int:
        """Blocks that become free for the newcomer when this one goes too: not those that it would need itself."""
        need = self._ledger.needs(node, request_id)
        if need is None:
            return 0
        dropped.update(need.names)
        gone = [name for name in need.names if dropped[name] == self._ledger.sharers(node, name)]
        return need.blocks + sum(name not in kept for name in gone)

    def _fresh(self, node: int) -> list[Entry]:
        """The entries of a node, oldest first; stale ones are forgotten."""
        entries = self._inactive.get(node, [])
        fresh = [entry for entry in entries if self._ledger.needs(node, entry[1]) is not None]
        if len(fresh) < len(entries):
            self.stale += len(entries) - len(fresh)
            self._inactive[node] = fresh
        return fresh

    def inactive(self, node: int) -> Sequence[str]:
        """Requests whose blocks may be taken there, oldest first."""
        return [request_id for _, request_id in self._inactive.get(node, [])]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if an entry is listed twice, or out of order."""
        for node, entries in self._inactive.items():
            check(entries == sorted(entries), f"node {node}: {entries} are out of order")
            check(len({request_id for _, request_id in entries}) == len(entries), f"node {node}: twice in {entries}")
            check(node in self._ledger, f"node {node} is gone")
        timed = {entry for _, _, entry in self._kept} | {entry for _, entry in self._retired}
        listed = {entry for entries in self._inactive.values() for entry in entries}
        check(listed <= timed, f"{listed - timed} are kept for ever")
