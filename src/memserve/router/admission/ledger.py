"""Which requests hold which KV memory, where one more fits best, and what is evicted when it fits nowhere.

A node is an instance, by its number. Memory is counted in blocks, as allocators give it out, so a request needs
``ceil(kv size / block size)`` of them. Best fit chooses the node with the least left over: large holes stay for large
requests.

Blocks may have names (their identities). Requests that hold a block of the same name on a node share it: the block
counts once there, as it will after prefix reuse.

A request that has ended may stay in the ledger as *inactive*: its blocks count as used, and may be evicted::

    no node has room
      -> the blocks of the oldest inactive request are freed, never those of a running one
      -> is there room now?   yes: the request gets the node
                              no:  rejected, and nothing was evicted in vain

Inactive requests are kept for a limited time (:meth:`BlockLedger.expire_retired`). Otherwise blocks that no request
asks for again would block, for ever, a request that needs more than may be evicted for it.

Blocks that no attempt holds and no instance may evict: pinned prefixes, and prefixes that may be fetched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import check
from memserve.base.units import ceil_div
from memserve.router.placement.candidates import Ask, Candidate, Route, load_rank, with_decoder

Ints = NDArray[np.int64]

IDENTITY_BYTES = 16

Entry = tuple[int, str]
"""Age and name of an inactive request; a higher number is younger."""


def required_blocks(kv_size: int, block_size: int) -> int:
    """Blocks that hold ``kv_size``, in the unit of ``block_size`` (bytes, MB or tokens)."""
    return ceil_div(kv_size, block_size)


def block_names(identities: bytes) -> tuple[bytes, ...]:
    """The names of blocks, from their concatenated identities."""
    return tuple(identities[offset : offset + IDENTITY_BYTES] for offset in range(0, len(identities), IDENTITY_BYTES))


class Need(NamedTuple):
    """What a request holds on one node while it runs there."""

    blocks: int
    """Blocks of the request alone: newly computed, or not whole."""
    names: tuple[bytes, ...] = ()
    """Whole blocks known by name, shared with other requests. A chain: each name includes all before it, so a holder of
    one holds those before it."""

    @property
    def total(self) -> int:
        """Blocks needed where nothing is shared."""
        return self.blocks + len(self.names)


class Relief(NamedTuple):
    """The node where room was made, and the requests whose blocks were evicted for it."""

    node: int
    evicted: tuple[str, ...]


def best_fit(nodes: Ints, blocks_left: Ints, load: Ints) -> Ints:
    """The node of ``nodes`` with the least left over; ties go to less load, then to the lower number. Empty: no node
    has room. Shapes ``[n]``; ``blocks_left``: free blocks once the request has its own, negative where it does not
    fit."""
    fitting = np.flatnonzero(blocks_left >= 0)
    order = np.lexsort((nodes[fitting], load[fitting], blocks_left[fitting]))
    return nodes[fitting[order[:1]]]


def best_fit_route(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """The least room left over, for the prompt and for decoding; the most room where no candidate has enough."""

    def tokens_left(candidate: Candidate) -> int:
        return candidate.room_tokens - ask.prompt_tokens

    def choose(candidates: Sequence[Candidate]) -> Candidate:
        fitting = [c for c in candidates if tokens_left(c) >= 0]
        if not fitting:
            return min(candidates, key=lambda c: (-tokens_left(c), *load_rank(ask, c)))
        return min(fitting, key=lambda c: (tokens_left(c), *load_rank(ask, c)))

    best = choose(first)
    why = f"best fit: {best.name} has room for {best.room_tokens} tokens, {tokens_left(best)} left over"
    return with_decoder(best, why, decoders, choose)


@dataclass(slots=True)
class _Node:
    needs: dict[str, Need] = field(default_factory=dict)
    """Exactly the requests that hold blocks here, in order of allocation."""
    shared: Counter[bytes] = field(default_factory=Counter)
    """For each name the number of requests that hold it."""
    inactive: list[Entry] = field(default_factory=list)
    """The requests of ``needs`` that have ended, oldest first."""

    def count_known(self, names: tuple[bytes, ...]) -> int:
        """How many of ``names``, a chain, are held here, by binary search."""
        return bisect_left(names, True, key=lambda name: name not in self.shared)


class BlockLedger:
    """Blocks of requests, by node. It counts blocks; only the instance knows which ones they are.

    A node may be used beyond its total: an admitted request is not rejected when it moves to another node. Nodes are
    small numbers, so that free blocks lie in one array.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._total: Ints = np.zeros(8, np.int64)
        self._free: Ints = np.zeros(8, np.int64)
        #: for each name that begins a chain, the nodes that have it
        self._roots: dict[bytes, dict[int, None]] = {}
        #: (until, node, entry) of inactive requests in the order of their end; may include freed ones
        self._expiring: deque[tuple[int, int, Entry]] = deque()
        #: (node, entry) -> until, of those in ``_expiring`` that shall stay for longer than it says
        self._renewed: dict[tuple[int, Entry], int] = {}
        #: (node, entry) of requests that have ended since the last :meth:`expire_retired`
        self._ended: list[tuple[int, Entry]] = []
        self.evictions = 0

    # -- nodes

    def add_node(self, node: int, blocks_total: int) -> None:
        """A new node with nothing on it."""
        check(node not in self._nodes, f"node {node} is known")
        while node >= len(self._total):
            self._total, self._free = (np.concatenate((row, np.zeros_like(row))) for row in (self._total, self._free))
        self._nodes[node] = _Node()
        self._total[node] = self._free[node] = blocks_total

    def remove_node(self, node: int) -> None:
        """The node is gone, with all that it held."""
        for request_id in self.holders_of(node):
            self.free_blocks(request_id, node)
        del self._nodes[node]

    # -- requests

    def allocate_blocks(self, request_id: str, node: int, need: Need) -> None:
        """``request_id`` holds ``need`` on ``node`` from now on. It must hold nothing there yet."""
        state = self._nodes[node]
        check(request_id not in state.needs, f"{request_id} holds blocks on node {node} already")
        self._free[node] -= need.total - state.count_known(need.names)
        state.needs[request_id] = need
        state.shared.update(need.names)
        if need.names:
            self._roots.setdefault(need.names[0], {})[node] = None

    def free_blocks(self, request_id: str, node: int) -> int:
        """Free what ``request_id`` holds on ``node``. Returns the number of blocks that became free; the rest is
        shared."""
        state = self._nodes[node]
        need = state.needs.pop(request_id)
        if state.inactive:
            state.inactive = [entry for entry in state.inactive if entry[1] != request_id]
        freed = need.blocks
        for name in need.names:
            state.shared[name] -= 1
            if not state.shared[name]:
                del state.shared[name]
                freed += 1
        if need.names and need.names[0] not in state.shared:
            nodes = self._roots[need.names[0]]
            del nodes[node]
            if not nodes:
                del self._roots[need.names[0]]
        self._free[node] += freed
        return freed

    def retire_request(self, request_id: str, node: int, age: int) -> None:
        """``request_id`` has ended: its blocks stay counted, and may be evicted. A higher ``age`` is younger."""
        state = self._nodes[node]
        check(request_id in state.needs, f"{request_id} holds nothing on node {node}")
        insort(state.inactive, (age, request_id))
        self._ended.append((node, (age, request_id)))

    def restore_retired(self, request_id: str, node: int, blocks: int, age: int, until_ns: int) -> None:
        """Add blocks of ended requests that an earlier router knew: inactive, and expiring at ``until_ns``."""
        self.allocate_blocks(request_id, node, Need(blocks))
        insort(self._nodes[node].inactive, (age, request_id))
        self._expiring = deque(sorted([*self._expiring, (until_ns, node, (age, request_id))]))

    # -- eviction

    def expire_retired(self, now_ns: int, kept_ns: int) -> int:
        """Free the blocks of requests that ended at least ``kept_ns`` ago. Returns their number; they do not count as
        evictions.

        Call it with every event: requests that were retired since the last call count as ended ``now_ns``.
        """
        if self._ended:
            self._expiring.extend((now_ns + kept_ns, node, entry) for node, entry in self._ended)
            self._ended.clear()
        expired = 0
        while self._expiring and self._expiring[0][0] <= now_ns:
            _, node, entry = self._expiring.popleft()
            until_ns = self._renewed.pop((node, entry), 0)
            if until_ns > now_ns and self._is_inactive(node, entry):
                insort(self._expiring, (until_ns, node, entry))
            elif self._is_inactive(node, entry):
                self.free_blocks(entry[1], node)
                expired += 1
        return expired

    def extend_expiry(self, need: Need, nodes: Sequence[int], until_ns: int) -> None:
        """Inactive requests whose blocks all are among those of ``need``, which goes on where they ended, expire at
        ``until_ns`` instead, if that is later."""
        for node in nodes:
            for entry in self._continued_entries(need, node):
                self._renewed[node, entry] = max(until_ns, self._renewed.get((node, entry), 0))

    def inherit_blocks(self, need: Need, nodes: Sequence[int]) -> bool:
        """Make room for ``need`` on one of ``nodes`` by freeing inactive requests whose blocks all are among its own:
        it goes on where they ended. False: that is not enough, and nothing was changed."""
        kept_names = set(need.names)
        for node in nodes:
            blocks_short = -int(self.blocks_left(np.array([node]), need)[0])
            before, dropped = self._continued_entries(need, node), Counter[bytes]()
            blocks_short -= sum([self._count_freed(request_id, node, dropped, kept_names) for _, request_id in before])
            if blocks_short <= 0:
                self.free_continued(need, [node])
                return True
        return False

    def free_continued(self, need: Need, nodes: Sequence[int]) -> None:
        """Free inactive requests whose blocks all are among those of ``need``, which is about to be allocated."""
        for node in nodes:
            for _, request_id in self._continued_entries(need, node):
                self.free_blocks(request_id, node)

    def _continued_entries(self, need: Need, node: int) -> list[Entry]:
        """Inactive requests that ended where ``need`` goes on."""
        names, state = set(need.names), self._nodes[node]
        return [entry for entry in state.inactive if (chain := state.needs[entry[1]].names) and chain[-1] in names]

    def evict_for(self, need: Need, nodes: Sequence[int], evictions_max: int) -> Relief | None:
        """Make room for ``need`` on one of ``nodes`` with at most ``evictions_max`` evictions: on the node that needs
        the fewest, among equals the one with the oldest victim. ``None``: no node has enough to evict, and nothing was
        changed."""
        plans = [(len(victims), victims[0][0], node, victims)
                 for node in nodes if (victims := self._pick_victims(need, node, evictions_max))]  # fmt: skip
        if not plans:
            return None
        _, _, node, victims = min(plans)
        for _, request_id in victims:
            self.free_blocks(request_id, node)
        self.evictions += len(victims)
        return Relief(node, tuple(request_id for _, request_id in victims))

    def room_at_ns(self, need: Need, node: int) -> int | None:
        """When ``node`` has room for ``need`` if no other request comes or goes, as inactive ones expire. 0: it has
        room now. ``None``: that is not enough, or :meth:`expire_retired` must be called first."""
        blocks_short = -int(self.blocks_left(np.array([node]), need)[0])
        dropped: Counter[bytes] = Counter()
        kept_names, until_ns = set(need.names), 0
        for end_ns, expiring_node, entry in self._expiring:
            if blocks_short <= 0:
                break
            if expiring_node == node and self._is_inactive(node, entry):
                blocks_short, until_ns = blocks_short - self._count_freed(entry[1], node, dropped, kept_names), end_ns
        return until_ns if blocks_short <= 0 else None

    def _pick_victims(self, need: Need, node: int, evictions_max: int) -> list[Entry]:
        """The oldest inactive requests to evict so that ``need`` fits; empty: ``evictions_max`` are not enough."""
        blocks_short = -int(self.blocks_left(np.array([node]), need)[0])
        victims: list[Entry] = []
        dropped: Counter[bytes] = Counter()
        kept_names = set(need.names)
        for entry in self._nodes[node].inactive:
            if blocks_short <= 0 or len(victims) == evictions_max:
                break
            victims.append(entry)
            blocks_short -= self._count_freed(entry[1], node, dropped, kept_names)
        return victims if blocks_short <= 0 else []

    def _count_freed(self, request_id: str, node: int, dropped: Counter[bytes], kept_names: set[bytes]) -> int:
        """Blocks that one more eviction frees for the new request, without those that it shares."""
        state = self._nodes[node]
        need = state.needs[request_id]
        dropped.update(need.names)
        freed_names = [name for name in need.names if dropped[name] == state.shared[name]]
        return need.blocks + sum(name not in kept_names for name in freed_names)

    def _is_inactive(self, node: int, entry: Entry) -> bool:
        return node in self._nodes and entry in self._nodes[node].inactive

    # -- looking

    def holders_of(self, node: int) -> Sequence[str]:
        """Requests that hold blocks there, in order of allocation."""
        return list(self._nodes[node].needs)

    def inactive_requests(self, node: int) -> Sequence[str]:
        """Requests whose blocks may be evicted there, oldest first."""
        return [request_id for _, request_id in self._nodes[node].inactive]

    def need_of(self, node: int, request_id: str) -> Need | None:
        """What a request holds there; ``None``: nothing, or the node is gone."""
        state = self._nodes.get(node)
        return state.needs.get(request_id) if state is not None else None

    def count_known(self, node: int, names: tuple[bytes, ...]) -> int:
        """How many of ``names``, a chain, are held there; always the first ones."""
        return self._nodes[node].count_known(names)

    def blocks_inactive(self, node: int) -> int:
        """Blocks of inactive requests; one that several share counts for each."""
        state = self._nodes[node]
        return sum([state.needs[request_id].total for _, request_id in state.inactive])

    def blocks_total(self, nodes: Ints) -> Ints:
        """All blocks of each node."""
        return self._total[nodes]

    def blocks_free(self, node: int) -> int:
        """Blocks that no request holds; negative: more was moved there than fits."""
        return int(self._free[node])

    def blocks_left(self, nodes: Ints, need: Need) -> Ints:
        """What would be free on each of ``nodes`` (ascending) with ``need`` allocated; negative: there is no room."""
        counts: Ints = self._free[nodes] - need.total
        for node in self._roots.get(need.names[0], ()) if need.names else ():
            index = int(nodes.searchsorted(node))
            if index < len(nodes) and nodes[index] == node:
                counts[index] += self._nodes[node].count_known(need.names)
        return counts

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if counts, names or the order of inactive requests are wrong."""
        waiting = {(node, entry) for _, node, entry in self._expiring} | set(self._ended)
        for node, state in self._nodes.items():
            names = Counter([name for need in state.needs.values() for name in need.names])
            check(state.shared == names, "node {}: names are held {}, not {}", node, state.shared, names)
            used = sum(need.blocks for need in state.needs.values()) + len(names)
            free = int(self._total[node]) - used
            check(self.blocks_free(node) == free, "node {}: {} blocks are to be free", node, free)
            roots = {need.names[0] for need in state.needs.values() if need.names}
            listed = {name for name, nodes in self._roots.items() if node in nodes}
            check(roots == listed, "node {}: chains begin with {}, listed are {}", node, roots, listed)
            inactive = self.inactive_requests(node)
            check(state.inactive == sorted(state.inactive), "node {}: {} are out of order", node, state.inactive)
            check(len(set(inactive)) == len(inactive), "node {}: twice in {}", node, inactive)
            check(all(request_id in state.needs for request_id in inactive), "node {}: {} hold nothing", node, inactive)
            check(all((node, entry) in waiting for entry in state.inactive), "node {}: an entry never expires", node)

    def __repr__(self) -> str:
        nodes = ", ".join(f"{n}: {self.blocks_free(n)}/{self._total[n]} free" for n in self._nodes)
        return f"<BlockLedger {nodes}>"


class Reservations:
    """Pins and loans, on top of a ledger.

    A pinned prefix counts with all of its blocks from ``Pin`` on, and with those that the instance has from ``Pinned``
    on, until ``Unpin`` is sent or the instance reports that it has dropped the prefix. A prefix that another instance
    may fetch is lent: from the dispatch of the request that needs it until its prompt is computed, or its attempt has
    ended.

    Blocks have names here, so that a block that is pinned, lent and read by running requests counts once.
    Messages to one instance arrive in order: a request that is dispatched after an ``Unpin`` finds its blocks free.
    """

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        #: exactly the pins that hold blocks: node and need
        self._pins: dict[str, tuple[int, Need]] = {}
        #: for each name of their blocks, the number of pins that have it
        self._names: Counter[bytes] = Counter()
        #: for each attempt that may still fetch, the nodes that it may fetch from
        self._exports: dict[str, list[int]] = {}

    def pin(self, name: str, node: int, need: Need) -> None:
        """``name`` holds ``need`` on ``node`` from now on, and nothing else."""
        self.unpin(name)
        if need.total:
            self._pins[name] = node, need
            self._names.update(need.names)
            self._ledger.allocate_blocks(_pin_key(name), node, need)

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
            self._ledger.free_blocks(_pin_key(name), node)
            self._names -= Counter(need.names)

    def pinned_prefix(self, identities: bytes) -> bytes:
        """The first of ``identities``, as many as are pinned anywhere."""
        starts = range(0, len(identities), IDENTITY_BYTES)
        count = bisect_left(
            starts, True, key=lambda offset: identities[offset : offset + IDENTITY_BYTES] not in self._names
        )
        return identities[: count * IDENTITY_BYTES]

    @property
    def has_pins(self) -> bool:
        return bool(self._pins)

    def evict_pins(self, node: int) -> list[str]:
        """Drop pins on ``node`` while more is held there than it has, least recently renewed first; their names."""
        names = [name for name, (pin_node, _) in self._pins.items() if pin_node == node]
        dropped = []
        while names and self._ledger.blocks_free(node) < 0:
            dropped.append(names.pop(0))
            self.unpin(dropped[-1])
        return dropped

    @contextmanager
    def without_pins(self) -> Iterator[None]:
        """Look at the ledger without pins: instances drop pins rather than stand still."""
        for name, (node, _) in self._pins.items():
            self._ledger.free_blocks(_pin_key(name), node)
        try:
            yield
        finally:
            for name, (node, need) in self._pins.items():
                self._ledger.allocate_blocks(_pin_key(name), node, need)

    def export_blocks(self, attempt_id: str, node: int, need: Need) -> None:
        """``attempt_id`` may fetch these blocks from ``node``: meanwhile they cannot be evicted."""
        if need.total:
            self._exports.setdefault(attempt_id, []).append(node)
            self._ledger.allocate_blocks(_export_key(attempt_id), node, need)

    def end_exports(self, attempt_id: str) -> bool:
        """``attempt_id`` fetches nothing any more. Returns whether anything was lent to it."""
        nodes = self._exports.pop(attempt_id, ())
        for node in nodes:
            self._ledger.free_blocks(_export_key(attempt_id), node)
        return bool(nodes)

    def remove_node(self, node: int) -> None:
        """``node`` is about to leave, with all that is held there."""
        for name in [name for name, (pin_node, _) in self._pins.items() if pin_node == node]:
            self.unpin(name)
        for attempt_id, nodes in self._exports.items():
            if node in nodes:
                nodes.remove(node)
                self._ledger.free_blocks(_export_key(attempt_id), node)

    def holders_of(self, node: int) -> set[str]:
        """The ledger's names of what is reserved there."""
        pins = {_pin_key(name) for name, (pin_node, _) in self._pins.items() if pin_node == node}
        return pins | {_export_key(attempt_id) for attempt_id, nodes in self._exports.items() if node in nodes}

    def check_invariants(self, prefilling: set[str]) -> None:
        """Raise :class:`InvariantError` unless names are counted, and only attempts in prefill may fetch."""
        names = Counter(block for _, need in self._pins.values() for block in need.names)
        check(self._names == names, "pins have {}, counted are {}", names, self._names)
        for attempt_id, nodes in self._exports.items():
            check(attempt_id in prefilling, f"{attempt_id} has computed its prompt, and blocks are lent to it")
            check(len(set(nodes)) == len(nodes), f"{attempt_id} may fetch twice from one of {nodes}")


def _pin_key(name: str) -> str:
    """The pin's name in the ledger; names of attempts end with a number, so it differs from all of them."""
    return f"{name} pinned"


def _export_key(attempt_id: str) -> str:
    return f"{attempt_id} lent"
