"""Which requests hold which memory, and who has room for one more (level 1, row C4).

A node is an instance, by its number. Memory is counted in blocks, as allocators give it out, so a request needs
``ceil(kv size / block size)`` of them. Best fit chooses the node with the least left over: large holes stay for large
requests.

Blocks may have names (their identities). Requests that hold a block of the same name on a node share it, so it is
counted once there: what a request will really need after prefix reuse.

As a routing policy it goes by the room that candidates have; with memory-aware admission the ledger says which.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memserve.errors import check
from memserve.policy.candidates import Ask, Candidate, Route, load_rank, with_decoder
from memserve.units import ceil_div

Ints = NDArray[np.int64]


def required_blocks(kv_size: int, block_size: int) -> int:
    """Blocks that hold ``kv_size``, in the unit of ``block_size`` (bytes, MB or tokens)."""
    return ceil_div(kv_size, block_size)


class Need(NamedTuple):
    """What a request holds while it runs."""

    blocks: int
    """That nobody else can have: computed anew, or not whole."""
    names: tuple[bytes, ...] = ()
    """Whole blocks known by name, that it shares with whoever holds them too. A chain: each name stands for all before
    it as well, so whoever holds one holds those before it."""

    @property
    def total(self) -> int:
        """Blocks that it needs where nothing is shared."""
        return self.blocks + len(self.names)


def best_fit(nodes: Ints, blocks_left: Ints, load: Ints) -> Ints:
    """The one of ``nodes`` with the least left over; ties go to less load, then to the lower number. Empty = nobody has
    room. Shapes ``[n]``; ``blocks_left``: free ones once the request has its own, negative where it does not fit."""
    fitting = np.flatnonzero(blocks_left >= 0)
    order = np.lexsort((nodes[fitting], load[fitting], blocks_left[fitting]))
    return nodes[fitting[order[:1]]]


def best_fit_route(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    """The least room left over, for the prompt and for decoding; whoever has most of it when none has enough."""

    def left(candidate: Candidate) -> int:
        return candidate.room_tokens - ask.prompt_tokens

    def choose(some: Sequence[Candidate]) -> Candidate:
        fitting = [c for c in some if left(c) >= 0]
        if not fitting:
            return min(some, key=lambda c: (-left(c), *load_rank(ask, c)))
        return min(fitting, key=lambda c: (left(c), *load_rank(ask, c)))

    chosen = choose(first)
    why = f"best fit: {chosen.name} has room for {chosen.room_tokens} tokens, {left(chosen)} left over"
    return with_decoder(chosen, why, decoders, choose)


@dataclass(slots=True)
class _Node:
    needs: dict[str, Need] = field(default_factory=dict)
    """All and only the requests that hold blocks here, in order of allocation."""
    shared: Counter[bytes] = field(default_factory=Counter)
    """For each name how many of them hold it."""

    def known(self, names: tuple[bytes, ...]) -> int:
        """How many of ``names``, a chain, somebody holds here: found by halving."""
        return bisect_left(names, True, key=lambda name: name not in self.shared)


class BlockLedger:
    """Requests to blocks, by node. It counts blocks; which ones they are is the instance's affair.

    A node may be taken beyond its total: whoever was let in once is not thrown out when its work moves. Nodes are small
    numbers, so that what is free stands in one array.
    """

    __slots__ = ("_free", "_nodes", "_roots", "_total")

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._total: Ints = np.zeros(8, np.int64)
        self._free: Ints = np.zeros(8, np.int64)
        #: for each name that begins a chain, the nodes that have it
        self._roots: dict[bytes, dict[int, None]] = {}

    def enter(self, node: int, blocks_total: int) -> None:
        """A new node with nothing on it."""
        check(node not in self._nodes, f"node {node} is known")
        while node >= len(self._total):
            self._total, self._free = (np.concatenate((row, np.zeros_like(row))) for row in (self._total, self._free))
        self._nodes[node] = _Node()
        self._total[node] = self._free[node] = blocks_total

    def leave(self, node: int) -> None:
        """The node is gone, and all that was on it."""
        for request_id in self.holders(node):
            self.free(request_id, node)
        del self._nodes[node]

    def allocate(self, request_id: str, node: int, need: Need) -> None:
        """``request_id`` has what it needs on ``node``. It must have nothing there yet."""
        books = self._nodes[node]
        check(request_id not in books.needs, f"{request_id} holds blocks on node {node} already")
        self._free[node] -= need.total - books.known(need.names)
        books.needs[request_id] = need
        books.shared.update(need.names)
        if need.names:
            self._roots.setdefault(need.names[0], {})[node] = None

    def free(self, request_id: str, node: int) -> int:
        """Give back exactly what it was given there. Returns the blocks that are free now; the rest is shared."""
        books = self._nodes[node]
        need = books.needs.pop(request_id)
        freed = need.blocks
        for name in need.names:
            books.shared[name] -= 1
            if not books.shared[name]:
                del books.shared[name]
                freed += 1
        if need.names and need.names[0] not in books.shared:
            nodes = self._roots[need.names[0]]
            del nodes[node]
            if not nodes:
                del self._roots[need.names[0]]
        self._free[node] += freed
        return freed

    def holders(self, node: int) -> Sequence[str]:
        """Requests that hold blocks there, in order of allocation."""
        return list(self._nodes[node].needs)

    def needs(self, node: int, request_id: str) -> Need | None:
        """What a request holds there; ``None`` = nothing, or the node is gone."""
        books = self._nodes.get(node)
        return books.needs.get(request_id) if books is not None else None

    def sharers(self, node: int, name: bytes) -> int:
        """How many requests hold the block of this name there."""
        return self._nodes[node].shared[name]

    def known(self, node: int, names: tuple[bytes, ...]) -> int:
        """How many of ``names``, a chain, somebody holds there: the first ones."""
        return self._nodes[node].known(names)

    def blocks_total(self, nodes: Ints) -> Ints:
        """All blocks of each node."""
        return self._total[nodes]

    def blocks_free(self, node: int) -> int:
        """Blocks that nobody holds; negative when more was moved there than fits."""
        return int(self._free[node])

    def blocks_left(self, nodes: Ints, need: Need) -> Ints:
        """What would be free on each of ``nodes`` (ascending) with ``need`` allocated; negative = there is no room."""
        left: Ints = self._free[nodes] - need.total
        for node in self._roots.get(need.names[0], ()) if need.names else ():
            at = int(nodes.searchsorted(node))
            if at < len(nodes) and nodes[at] == node:
                left[at] += self._nodes[node].known(need.names)
        return left

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree."""
        for node, books in self._nodes.items():
            names = Counter(name for need in books.needs.values() for name in need.names)
            check(books.shared == names, f"node {node}: names are held {books.shared}, not {names}")
            taken = sum(need.blocks for need in books.needs.values()) + len(names)
            free = int(self._total[node]) - taken
            check(self.blocks_free(node) == free, f"node {node}: {self.blocks_free(node)} blocks are free, not {free}")
            roots = {need.names[0] for need in books.needs.values() if need.names}
            listed = {name for name, nodes in self._roots.items() if node in nodes}
            check(roots == listed, f"node {node}: chains begin with {roots}, listed are {listed}")

    def __repr__(self) -> str:
        nodes = ", ".join(f"{n}: {self.blocks_free(n)}/{self._total[n]} free" for n in self._nodes)
        return f"<BlockLedger {nodes}>"
