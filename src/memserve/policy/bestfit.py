"""Which requests hold which memory, and who has room for one more (level 1, row C4).

A node is an instance, by its number. Memory is counted in blocks, as allocators give it out, so a request needs
``ceil(kv size / block size)`` of them. Best fit chooses the node with the least left over: large holes stay for large
requests.

Blocks may have names (their identities). Requests that hold a block of the same name on a node share it, so it is
counted once there: what a request will really need after prefix reuse.

As a routing policy it goes by the room that candidates have; with memory-aware admission the ledger says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memserve.errors import check
from memserve.policy.byload import load_rank, with_decoder
from memserve.policy.candidates import Ask, Candidate, Route, RoutingCosts
from memserve.units import ceil_div


def required_blocks(kv_size: int, block_size: int) -> int:
    """Blocks that hold ``kv_size``, in the unit of ``block_size`` (bytes, MB or tokens)."""
    return ceil_div(kv_size, block_size)


class Need(NamedTuple):
    """What a request holds while it runs."""

    blocks: int
    """That nobody else can have: computed anew, or not whole."""
    names: tuple[bytes, ...] = ()
    """Whole blocks known by name, that it shares with whoever holds them too."""

    @property
    def total(self) -> int:
        """Blocks that it needs where nothing is shared."""
        return self.blocks + len(self.names)


class Offer(NamedTuple):
    """A node that could take a request."""

    node: int
    blocks_left: int
    """Free ones, once the request has its own."""
    load: int


def best_fit(offers: Iterable[Offer]) -> int | None:
    """The node with the least left over; ties go to less load, then to the lower number. ``None`` = nobody has room."""
    fitting = [offer for offer in offers if offer.blocks_left >= 0]
    return min(fitting, key=lambda o: (o.blocks_left, o.load, o.node)).node if fitting else None


def best_fit_route(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], costs: RoutingCosts) -> Route:
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
    blocks_total: int
    blocks_taken: int = 0
    """Each block once, however many requests share it."""
    needs: dict[str, Need] = field(default_factory=dict)
    """All and only the requests that hold blocks here, in order of allocation."""
    shared: Counter[bytes] = field(default_factory=Counter)
    """For each name how many of them hold it."""

    def missing(self, need: Need) -> int:
        if not need.names:
            return need.blocks
        return need.blocks + sum(name not in self.shared for name in need.names)


class BlockLedger:
    """Requests to blocks, by node. It counts blocks; which ones they are is the instance's affair.

    A node may be taken beyond its total: whoever was let in once is not thrown out when its work moves.
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}

    def enter(self, node: int, blocks_total: int) -> None:
        """A new node with nothing on it."""
        check(node not in self._nodes, f"node {node} is known")
        self._nodes[node] = _Node(blocks_total)

    def leave(self, node: int) -> None:
        """The node is gone, and all that was on it."""
        del self._nodes[node]

    def allocate(self, request_id: str, node: int, need: Need) -> None:
        """``request_id`` has what it needs on ``node``. It must have nothing there yet."""
        books = self._nodes[node]
        check(request_id not in books.needs, f"{request_id} holds blocks on node {node} already")
        books.blocks_taken += books.missing(need)
        books.needs[request_id] = need
        books.shared.update(need.names)

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
        books.blocks_taken -= freed
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

    def blocks_total(self, node: int) -> int:
        """All blocks of a node."""
        return self._nodes[node].blocks_total

    def blocks_free(self, node: int) -> int:
        """Blocks that nobody holds; negative when more was moved there than fits."""
        books = self._nodes[node]
        return books.blocks_total - books.blocks_taken

    def blocks_left(self, node: int, need: Need) -> int:
        """What would be free there with ``need`` allocated; negative = there is no room."""
        return self.blocks_free(node) - self._nodes[node].missing(need)

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree."""
        for node, books in self._nodes.items():
            names = Counter(name for need in books.needs.values() for name in need.names)
            check(books.shared == names, f"node {node}: names are held {books.shared}, not {names}")
            taken = sum(need.blocks for need in books.needs.values()) + len(names)
            check(books.blocks_taken == taken, f"node {node}: {books.blocks_taken} blocks are taken, not {taken}")

    def __repr__(self) -> str:
        nodes = ", ".join(f"{n}: {b.blocks_taken}/{b.blocks_total}" for n, b in self._nodes.items())
        return f"<BlockLedger {nodes}>"
