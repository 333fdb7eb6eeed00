"""Blocks that no attempt holds and no instance may evict: pinned prefixes, and prefixes that may be fetched."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from memserve.errors import check
from memserve.policy.ledger import IDENTITY_BYTES, BlockLedger, Need


class Reservations:
    """Pins and loans, on top of a ledger.

    A pinned prefix counts with all of its blocks from ``Pin`` on, and with those that the instance has from ``Pinned``
    on, until ``Unpin`` is sent or the instance reports that it has dropped the prefix. A prefix that another instance
    may fetch is lent: from the dispatch of the request that needs it until its prompt is computed, or its attempt has
    ended.

    Blocks have names here, so that a block that is pinned, lent and read by running requests counts once.
    Messages to one instance arrive in order: a request that is dispatched after an ``Unpin`` finds its blocks free.
    """

    __slots__ = ("_ledger", "_lent", "_names", "_pins")

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        #: exactly the pins that hold blocks: node and need
        self._pins: dict[str, tuple[int, Need]] = {}
        #: for each name of their blocks, the number of pins that have it
        self._names: Counter[bytes] = Counter()
        #: for each attempt that may still fetch, the nodes that it may fetch from
        self._lent: dict[str, list[int]] = {}

    def pin(self, name: str, node: int, need: Need) -> None:
        """``name`` holds ``need`` on ``node`` from now on, and nothing else."""
        self.unpin(name)
        if need.total:
            self._pins[name] = node, need
            self._names.update(need.names)
            self._ledger.allocate(_pinned(name), node, need)

    def may_pin(self, name: str, node: int, need: Need) -> bool:
        """:meth:`pin`, if that takes no room from admitted requests. False: there is no room, and nothing was
        changed."""
        before, free_before = self._pins.get(name), self._ledger.blocks_free(node)
        self.pin(name, node, need)
        if self._ledger.blocks_free(node) >= min(0, free_before):
            return True
        self.pin(name, *before) if before is not None else self.unpin(name)
        return False

    def unpin(self, name: str) -> None:
        """``name`` holds nothing; an unknown one is ignored."""
        node, need = self._pins.pop(name, (0, Need(0)))
        if need.total:
            self._ledger.free(_pinned(name), node)
            self._names -= Counter(need.names)

    def pinned_part(self, identities: bytes) -> bytes:
        """The first of ``identities``, as many as are pinned anywhere."""
        starts = range(0, len(identities), IDENTITY_BYTES)
        count = bisect_left(starts, True, key=lambda at: identities[at : at + IDENTITY_BYTES] not in self._names)
        return identities[: count * IDENTITY_BYTES]

    @property
    def has_pins(self) -> bool:
        """Whether anything is pinned."""
        return bool(self._pins)

    def give_way(self, node: int) -> list[str]:
        """Drop pins on ``node`` while more is held there than it has, least recently renewed first; their names."""
        names = [name for name, (at, _) in self._pins.items() if at == node]
        dropped = []
        while names and self._ledger.blocks_free(node) < 0:
            dropped.append(names.pop(0))
            self.unpin(dropped[-1])
        return dropped

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Look at the ledger without pins: instances drop pins rather than stand still."""
        for name, (node, _) in self._pins.items():
            self._ledger.free(_pinned(name), node)
        try:
            yield
        finally:
            for name, (node, need) in self._pins.items():
                self._ledger.allocate(_pinned(name), node, need)

    def lend(self, attempt_id: str, node: int, need: Need) -> None:
        """``attempt_id`` may fetch these blocks from ``node``: meanwhile they cannot be evicted."""
        if need.total:
            self._lent.setdefault(attempt_id, []).append(node)
            self._ledger.allocate(_lent(attempt_id), node, need)

    def returned(self, attempt_id: str) -> bool:
        """``attempt_id`` fetches nothing any more. Returns whether anything was lent to it."""
        nodes = self._lent.pop(attempt_id, ())
        for node in nodes:
            self._ledger.free(_lent(attempt_id), node)
        return bool(nodes)

    def leave(self, node: int) -> None:
        """``node`` is about to leave, with all that is held there."""
        for name in [name for name, (at, _) in self._pins.items() if at == node]:
            self.unpin(name)
        for attempt_id, nodes in self._lent.items():
            if node in nodes:
                nodes.remove(node)
                self._ledger.free(_lent(attempt_id), node)

    def holders(self, node: int) -> set[str]:
        """The ledger's names of what is reserved there."""
        pins = {_pinned(name) for name, (at, _) in self._pins.items() if at == node}
        return pins | {_lent(attempt_id) for attempt_id, nodes in self._lent.items() if node in nodes}

    def check_invariants(self, prefilling: set[str]) -> None:
        """Raise :class:`InvariantError` unless names are counted, and only attempts in prefill may fetch."""
        names = Counter(block for _, need in self._pins.values() for block in need.names)
        check(self._names == names, "pins have {}, counted are {}", names, self._names)
        for attempt_id, nodes in self._lent.items():
            check(attempt_id in prefilling, f"{attempt_id} has computed its prompt, and blocks are lent to it")
            check(len(set(nodes)) == len(nodes), f"{attempt_id} may fetch twice from one of {nodes}")


def _pinned(name: str) -> str:
    """The pin's name in the ledger; names of attempts end with a number, so it differs from all of them."""
    return f"{name} pinned"


def _lent(attempt_id: str) -> str:
    return f"{attempt_id} lent"
