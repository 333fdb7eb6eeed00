"""What the parts of an exchange share: identity, numbers, deadlines, peers, outgoing work.

What an exchange needs of a pool: blocks with references, identities, and a prefix cache, which may hold nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from memserve import _core
from memserve.base.config import ExchangeConfig
from memserve.base.states import StatePages
from memserve.base.types import KVGeometry, Role, Tier, TokenArray
from memserve.kv.block_access import BlockAccessLog
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.events import CancelPulls, ExchangeCounters, Outcome, PullPages, SealPages
from memserve.protocol.events import Send
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer, PeerInfo


class TierSizes(Protocol):
    """The size of a pool, as :class:`memserve.base.config.PoolConfig` has it."""

    @property
    def hbm_blocks(self) -> int:
        """Blocks of HBM; 0: the pool has none."""

    @property
    def dram_blocks(self) -> int:
        """Blocks of DRAM; 0: the pool has none."""

    @property
    def caching(self) -> bool:
        """Whether prefixes are kept."""

    @property
    def shares_dram(self) -> bool:
        """Whether peers may read DRAM, and write to it."""

    @property
    def states(self) -> StatePages | None:
        """How snapshots lie. None: there are none, or it is not known here."""


class TransferPool(Protocol):
    """Blocks of HBM and DRAM that can be lent to peers and filled by them, as :class:`memserve.kv.pool.BlockPool`
    has them."""

    block_tokens: int
    access: BlockAccessLog | None
    """Set by the exchange: which plans touch which blocks."""

    @property
    def config(self) -> TierSizes:
        """Blocks of each tier."""

    @property
    def namespace(self) -> str:
        """Model and weights, dtype and layout."""

    def identity(self, tenant: str, tokens: TokenArray) -> bytes:
        """Identity of the last whole block of ``tokens``, 16 bytes; b"" when there is none."""

    # -- prefix cache

    def match_kv_blocks(self, tenant: str, tokens: TokenArray) -> tuple[int, int]:
        """Blocks of the cached prefix in HBM, and behind them in DRAM, that :meth:`acquire_kv` would find."""

    def acquire(self, tenant: str, tokens: TokenArray) -> Lease:
        """The longest cached prefix that a sequence can go on from, in HBM, pinned, one reference a block."""

    def acquire_kv(self, tenant: str, tokens: TokenArray) -> Lease:
        """The longest cached prefix, whether or not there is a state behind it."""

    def unpin(self, lease: Lease) -> None:
        """End a lease's protection from eviction."""

    def export_blocks(
        self, tenant: str, tokens: TokenArray, first_block: int = 0
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Cached blocks of ``tokens`` from ``first_block`` up to the first gap, where they lie: in HBM, and behind them
        in DRAM; one reference each."""

    def publish(self, lease: Lease, tenant: str, tokens: TokenArray, blocks: Sequence[int], *, written_by: int) -> int:
        """Make HBM blocks reusable; the lease's pin moves to their end. Returns the blocks that the cache took."""

    def insert(self, tenant: str, tokens: TokenArray, blocks: _core.Ids, hbm_blocks: int) -> int:
        """As :meth:`publish` without a lease; ``blocks[:hbm_blocks]`` lie in HBM, the rest in DRAM."""

    # -- recurrent states

    @property
    def state_blocks(self) -> int:
        """Blocks of one snapshot; 0: layers keep KV alone, or what they keep is not known here."""

    @property
    def part_blocks(self) -> int:
        """Of each part of a window, where those are what comes behind KV. 0: they are not, or it is not known here."""

    def blocks_behind(self, tokens: int) -> int:
        """Blocks that come behind the KV of a prefix of so many tokens: of a snapshot, or of a window's parts."""

    def lend_state(self, tenant: str, tokens: TokenArray, blocks: int, part_blocks: int = 0) -> Lease | None:
        """Of the snapshots of so many ``blocks``, the one of the longest prefix of ``tokens``: where it lies, pinned,
        one reference a block; or the parts of a window, of ``part_blocks`` each. None: there is none."""

    def share_loan(self, loan: Lease, blocks: Sequence[int]) -> Lease:
        """What was lent by :meth:`lend_state`, pinned once more, with a reference on each of these of its blocks."""

    def insert_state(self, tenant: str, tokens: TokenArray, blocks: Sequence[int]) -> bool:
        """Cache the snapshot behind ``tokens``, with references of its own."""

    # -- blocks

    def allocate(self, count: int) -> list[int] | None:
        """HBM blocks, one reference each. None: no room."""

    def allocate_dram_ids(self, count: int) -> _core.BlockIds | None:
        """DRAM blocks, one reference each. None: no room."""

    def available(self) -> int:
        """HBM blocks that :meth:`allocate` could give now."""

    @property
    def blocks_free(self) -> int:
        """HBM blocks without a reference, not even of the cache."""

    def retain(self, blocks: Sequence[int]) -> None:
        """One more reference on each HBM block."""

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each HBM block."""

    def retain_dram(self, dram_blocks: Sequence[int]) -> None:
        """One more reference on each DRAM block."""

    def release_dram(self, dram_blocks: Sequence[int]) -> None:
        """One reference less on each DRAM block."""

    def ref_count(self, tier: Tier, block: int) -> int:
        """References on a block."""

    @property
    def has_copies(self) -> bool:
        """Whether copies between blocks are recorded that no plan carries yet."""


ExchangeAction = Send | SealPages | PullPages | CancelPulls

Place = tuple[Tier, int]
"""A block of some pool."""


def runs(places: Sequence[Place]) -> Iterator[tuple[Tier, int, list[int]]]:
    """``(tier, position of the first, blocks)`` of each run of neighbours on one tier."""
    begin = 0
    for tier, run in groupby(places, key=itemgetter(0)):
        blocks = [block for _, block in run]
        yield tier, begin, blocks
        begin += len(blocks)


def is_gone(peer: Peer, removed: Peer) -> bool:
    """Whether the end of ``removed`` is the end of ``peer``, which may be an older generation of it."""
    return peer.name == removed.name and peer.generation <= removed.generation


class Expiring(Protocol):
    """Something with a deadline."""

    deadline_ns: int

    @property
    def over(self) -> bool:
        """Whether it has ended already."""


class Deadlines:
    """Things by their deadlines. Most end long before: these are forgotten once they are half of all."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Expiring]] = []
        self._order = 0
        self._clean_at = 64  # entries

    def add(self, thing: Expiring) -> None:
        """Watch ``thing.deadline_ns``."""
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if not entry[2].over]
            heapq.heapify(self._heap)
            self._clean_at = max(64, 2 * len(self._heap))
        heapq.heappush(self._heap, (thing.deadline_ns, self._order, thing))
        self._order += 1

    def next_ns(self) -> int | None:
        """The first deadline of something that has not ended. None: nothing is watched."""
        heap = self._heap
        while heap and heap[0][2].over:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_ns: int) -> Expiring | None:
        """The next thing whose deadline has come before it ended. None: there is none."""
        first = self.next_ns()
        return heapq.heappop(self._heap)[2] if first is not None and first <= now_ns else None


class PeerStatus(Enum):
    """What is known of a peer."""

    MEMBER = "member"
    UNKNOWN = "unknown"  # news of it may still be on its way
    GONE = "gone"  # dead, or an older generation of a member


class Peers:
    """The members of the cluster, by name, with their generations."""

    def __init__(self) -> None:
        self._members: dict[str, PeerInfo] = {}
        self._gone: dict[str, int] = {}  # name -> the latest generation that is gone

    def add_member(self, info: PeerInfo) -> Peer | None:
        """``info.peer`` is a member now. Returns the older generation of it that ends. A generation older than the one
        known is ignored; one that had left may come back."""
        name, generation = info.peer.name, info.peer.generation
        older = self._members.get(name)
        if self._gone.get(name, -1) > generation or (older is not None and older.peer.generation >= generation):
            return None
        self._gone.pop(name, None)
        self._members[name] = info
        if older is None:
            return None
        self._gone[name] = older.peer.generation
        return older.peer

    def remove_member(self, peer: Peer) -> None:
        """``peer`` and older generations of it are gone."""
        self._gone[peer.name] = max(peer.generation, self._gone.get(peer.name, peer.generation))
        member = self._members.get(peer.name)
        if member is not None and member.peer.generation <= peer.generation:
            del self._members[peer.name]

    def status_of(self, peer: Peer) -> PeerStatus:
        """Whether ``peer``, in this generation, is a member."""
        member = self._members.get(peer.name)
        if member is not None and member.peer.generation >= peer.generation:
            return PeerStatus.MEMBER if member.peer.generation == peer.generation else PeerStatus.GONE
        if self._gone.get(peer.name, -1) >= peer.generation:
            return PeerStatus.GONE
        return PeerStatus.UNKNOWN

    def info_of(self, peer: Peer) -> PeerInfo | None:
        """What a member told of itself when it joined. None: ``peer`` is no member."""
        return self._members[peer.name] if self.status_of(peer) is PeerStatus.MEMBER else None

    def members(self) -> list[Peer]:
        """All members, in the order in which they joined."""
        return [info.peer for info in self._members.values()]

    def forget_all(self) -> None:
        """Every peer is unknown again."""
        self._members.clear()
        self._gone.clear()


@dataclass(frozen=True, slots=True)
class Room:
    """What imports may take."""

    headroom_blocks: int = 0
    """HBM blocks that an import, or an allocation for a peer, leaves available."""
    parked: int | None = None
    """Requests that wait in DRAM for HBM: a handoff that has no room, or would overtake them, waits there too. None:
    handoffs need HBM."""


class TransferContext:
    """Shared by the parts of one exchange."""

    def __init__(
        self, pool: TransferPool, geometry: KVGeometry, config: ExchangeConfig, self_peer: Peer, namespace: str
    ) -> None:
        self.pool = pool
        self.geometry = geometry
        self.config = config
        self.self_peer = self_peer
        self.namespace = namespace
        self.peers = Peers()
        self.counters = ExchangeCounters()
        self.room = Room()
        self.actions: list[ExchangeAction] = []
        self.outcomes: list[Outcome] = []
        #: pages of DRAM have a form that no peer knows: all that comes and goes lies in HBM
        # a state that comes with KV lies in HBM
        self.hbm_only = not pool.config.shares_dram or pool.config.states is not None
        states = pool.config.states
        #: of the last block of a snapshot: the layers whose pages it fills, where that is known
        self.state_layers = geometry.num_layers if states is None else states.layers_of_last(geometry)
        self._transfers = 0
        self._jobs = 0

    def new_transfer_id(self) -> str:
        """Unique in the cluster; :meth:`is_mine` knows it again."""
        self._transfers += 1
        return f"{self.self_peer.name}/{self.self_peer.generation}/{self._transfers}"

    def is_mine(self, transfer_id: str) -> bool:
        """Whether this process, in this generation, made the id."""
        return transfer_id.startswith(f"{self.self_peer.name}/{self.self_peer.generation}/")

    def new_job_id(self) -> int:
        """Unique in this process."""
        self._jobs += 1
        return self._jobs

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Send ``message`` to ``to``."""
        self.actions.append(Send(to, message))

    def incompatibility(self, peer: Peer) -> str | None:
        """Why KV cannot be shared with ``peer``. None: it can."""
        info = self.peers.info_of(peer)
        if not self.config.shares_kv:
            return "no other process can reach the KV here"
        if info is None:
            return f"{peer.name} is not a member"
        if info.role is Role.STORE:
            return (
                None  # it takes the namespace and the geometry of the first offer or fetch, and refuses others itself
            )
        if info.namespace != self.namespace:
            return f"another namespace: {info.namespace!r} is not {self.namespace!r}"
        if info.geometry != self.geometry:
            return f"another geometry: {info.geometry} is not {self.geometry}"
        return None

    def retain(self, tier: Tier, blocks: Sequence[int]) -> None:
        """One more reference on each block of ``tier``."""
        (self.pool.retain if tier == Tier.HBM else self.pool.retain_dram)(blocks)

    def release(self, tier: Tier, blocks: Sequence[int]) -> None:
        """One reference less on each block of ``tier``."""
        (self.pool.release if tier == Tier.HBM else self.pool.release_dram)(blocks)

    def allocate(self, tier: Tier, count: int) -> list[int] | None:
        """``count`` blocks of a tier, a reference each. None: no room beside the headroom of HBM."""
        if count == 0:
            return []
        if tier == Tier.HBM:
            return self.pool.allocate(count) if count + self.room.headroom_blocks <= self.pool.available() else None
        if self.hbm_only:
            return None
        below = self.pool.allocate_dram_ids(count)
        return None if below is None else below.tolist()

    def blocks_total(self, tier: Tier) -> int:
        """Size of a tier, as far as peers may use it."""
        if tier == Tier.HBM:
            return self.pool.config.hbm_blocks
        return 0 if self.hbm_only else self.pool.config.dram_blocks
