"""Memory that no attempt holds and no instance may evict, as the gate counts it (level 2).

A pinned prefix, from the ``Pin`` on as much of it as there could be, and from ``Pinned`` on as much as there is; until
``Unpin`` is sent or the instance says that it has given it up. And a prefix that another instance may fetch: from the
dispatch of the request that it is for until its prompt is computed, or the attempt is over.

Blocks have their names here, so that what is pinned, lent and read by those who run is counted once. Messages to one
instance come in order: who is dispatched behind an ``Unpin`` finds what was unpinned free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from memserve.errors import check
from memserve.policy.admission import IDENTITY_BYTES
from memserve.policy.bestfit import BlockLedger, Need


class Claims:
    """Pins and loans, on top of a ledger."""

    __slots__ = ("_ledger", "_lent", "_names", "_pins")

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        #: all and only the pins that hold blocks: where, and which
        self._pins: dict[str, tuple[int, Need]] = {}
        #: the names of their blocks, by how many have them
        self._names: Counter[bytes] = Counter()
        #: for each attempt that may still fetch, where from
        self._lent: dict[str, list[int]] = {}

    # -- pins

    def pin(self, name: str, node: int, need: Need) -> None:
        """``name`` holds ``need`` on ``node`` from now on, and nothing else."""
        self.unpin(name)
        if need.total:
            self._pins[name] = node, need
            self._names.update(need.names)
            self._ledger.allocate(_pinned(name), node, need)

    def may_pin(self, name: str, node: int, need: Need) -> bool:
        """The same, if those who were let in keep their room; else nothing changes."""
        before, free_before = self._pins.get(name), self._ledger.blocks_free(node)
        self.pin(name, node, need)
        if self._ledger.blocks_free(node) >= min(0, free_before):
            return True
        self.pin(name, *before) if before is not None else self.unpin(name)
        return False

    def unpin(self, name: str) -> None:
        """It holds nothing; unknown ones are ignored."""
        if name in self._pins:
            node, need = self._pins[name]
            self._ledger.free(_pinned(name), node)
            self._forget(name, need)

    def _forget(self, name: str, need: Need) -> None:
        del self._pins[name]
        for block in need.names:
            self._names[block] -= 1
            if not self._names[block]:
                del self._names[block]

    def pinned_part(self, identities: bytes) -> bytes:
        """The first of ``identities``, as many as are pinned somewhere."""
        starts = range(0, len(identities), IDENTITY_BYTES)
        count = bisect_left(starts, True, key=lambda at: identities[at : at + IDENTITY_BYTES] not in self._names)
        return identities[: count * IDENTITY_BYTES]

    @property
    def has_pins(self) -> bool:
        """Whether anything is pinned."""
        return bool(self._pins)

    def give_way(self, node: int) -> list[str]:
        """Give up pins on ``node`` while more is held there than it has, least recently renewed first; their names."""
        names = [name for name, (at, _) in self._pins.items() if at == node]
        gone = []
        while names and self._ledger.blocks_free(node) < 0:
            gone.append(names.pop(0))
            self.unpin(gone[-1])
        return gone

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For a look at what there is but for the pins: instances give them up before they stand still."""
        for name, (node, _) in self._pins.items():
            self._ledger.free(_pinned(name), node)
        try:
            yield
        finally:
            for name, (node, need) in self._pins.items():
                self._ledger.allocate(_pinned(name), node, need)

    # -- loans

    def lend(self, attempt_id: str, node: int, need: Need) -> None:
        """``attempt_id`` may fetch these blocks from ``node``: meanwhile they cannot be evicted."""
        if need.total:
            self._lent.setdefault(attempt_id, []).append(node)
            self._ledger.allocate(_lent(attempt_id), node, need)

    def returned(self, attempt_id: str) -> bool:
        """It has what it needs, or needs it no more; whether it could have fetched."""
        nodes = self._lent.pop(attempt_id, ())
        for node in nodes:
            self._ledger.free(_lent(attempt_id), node)
        return bool(nodes)

    # -- nodes

    def leave(self, node: int) -> None:
        """The node is about to go, with all that was held there."""
        for name in [name for name, (at, _) in self._pins.items() if at == node]:
            self.unpin(name)
        for attempt_id, nodes in list(self._lent.items()):
            if node in nodes:
                nodes.remove(node)
                self._ledger.free(_lent(attempt_id), node)

    def holders(self, node: int) -> set[str]:
        """Names in the ledger of what is claimed there."""
        pins = {_pinned(name) for name, (at, _) in self._pins.items() if at == node}
        return pins | {_lent(attempt_id) for attempt_id, nodes in self._lent.items() if node in nodes}

    def check_invariants(self, computing: set[str]) -> None:
        """Raise :class:`InvariantError` unless names are counted, and only attempts that compute may fetch."""
        names = Counter(block for _, need in self._pins.values() for block in need.names)
        check(self._names == names, f"pins have {names}, counted are {self._names}")
        for attempt_id, nodes in self._lent.items():
            check(attempt_id in computing, f"{attempt_id} has computed its prompt, and holds what it could fetch")
            check(len(set(nodes)) == len(nodes), f"{attempt_id} may fetch twice from one of {nodes}")


def _pinned(name: str) -> str:
    """In the ledger, where attempts have names that end with a number."""
    return f"{name} pinned"


def _lent(attempt_id: str) -> str:
    return f"{attempt_id} lent"
