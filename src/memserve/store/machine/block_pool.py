"""A store's memory as the exchange sees it: one tier of blocks, DRAM, and a cache that is found by identity alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve import _core
from memserve.base.errors import InvariantError
from memserve.base.states import StatePages
from memserve.base.types import Tier, TokenArray
from memserve.kv.block_access import BlockAccessLog
from memserve.kv.identity import NAMES_MAX, names_behind, namespace_id
from memserve.kv.state_snapshot import Lease
from memserve.kv.store_shares import split_keys

if TYPE_CHECKING:
    from memserve._core import MemoryTier

KV_SCOPE = 0
"""The scope of KV blocks; clients' values have others."""


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Blocks of a store's tiers."""

    dram_blocks: int
    hbm_blocks: int = 0
    caching: bool = True
    shares_dram: bool = True
    states: StatePages | None = None


class StorePool:
    """A :class:`memserve.kv.transfer.context.TransferPool` over a memory tier. A block's extent is its number
    times ``block_bytes``."""

    def __init__(self, tier: MemoryTier, block_bytes: int, block_tokens: int, namespace: str, key: bytes) -> None:
        """``key``: of the cluster's identities, 16 bytes."""
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.access: BlockAccessLog | None = None
        self._tier = tier
        self._namespace = namespace
        self._key = key
        self._names: dict[str, bytes] = {}  # isolation -> namespace id
        self._sizes = StoreSizes(tier.blocks_total)

    @property
    def config(self) -> StoreSizes:
        """Blocks of each tier."""
        return self._sizes

    @property
    def namespace(self) -> str:
        """Model and weights, dtype and layout."""
        return self._namespace

    def block_identities(self, tenant: str, tokens: TokenArray) -> list[bytes]:
        """The identity of each whole block of ``tokens``."""
        name = self._names.get(tenant)
        if name is None:
            if len(self._names) >= NAMES_MAX:  # salts come and go; a name is quick to compute
                self._names.clear()
            name = self._names[tenant] = namespace_id(tenant, self._namespace, self._key)
        return split_keys(_core.block_identities(self._key, name, tokens, self.block_tokens))

    def identity(self, tenant: str, tokens: TokenArray) -> bytes:
        """Identity of the last whole block of ``tokens``; b"" when there is none."""
        return next(reversed(self.block_identities(tenant, tokens)), b"")

    # -- the cache, which no plan uses

    def match_kv_blocks(self, tenant: str, tokens: TokenArray) -> tuple[int, int]:
        """Nothing is brought up to where attention could read it."""
        return 0, 0

    def acquire(self, tenant: str, tokens: TokenArray) -> Lease:
        """An empty lease."""
        return Lease()

    acquire_kv = acquire

    def unpin(self, lease: Lease) -> None:
        """Nothing was pinned."""

    def export_blocks(
        self, tenant: str, tokens: TokenArray, first_block: int = 0
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Blocks in memory from ``first_block`` up to the first that is not, or was not compared yet; one reference
        each."""
        blocks: list[int] = []
        for identity in self.block_identities(tenant, tokens)[first_block:]:
            extent = self.hold_block(identity)
            if extent is None:
                break
            blocks.append(extent // self.block_bytes)
        return (), blocks

    def hold_block(self, identity: bytes, *, counts: bool = True) -> int | None:
        """The extent of a KV block, with a reference. None: it is not in memory, or was not compared yet."""
        place = self._tier.find(identity, counts=counts)
        if place is None:
            return None
        if place.verified and place.scope == KV_SCOPE and place.length == self.block_bytes:
            return place.offset
        self._tier.release(place.offset)
        return None

    def publish(self, lease: Lease, tenant: str, tokens: TokenArray, blocks: Sequence[int], *, written_by: int) -> int:
        """Raises :class:`InvariantError`: a store has no HBM."""
        raise InvariantError("a store has no blocks in HBM to publish")

    def insert(self, tenant: str, tokens: TokenArray, blocks: _core.Ids, hbm_blocks: int) -> int:
        """Raises :class:`InvariantError`: a store publishes what was sealed (:class:`KvBlocks`)."""
        raise InvariantError("a store inserts by identity")

    # -- recurrent states

    @property
    def state_blocks(self) -> int:
        """Instances say how many blocks their snapshots have."""
        return 0

    part_blocks = state_blocks

    def blocks_behind(self, tokens: int) -> int:
        """As :attr:`state_blocks`."""
        return 0

    def may_lend(self, blocks: int, part_blocks: int) -> bool:
        """Whether so many ``blocks`` can be what comes behind KV: a peer may say any number."""
        return blocks <= self._sizes.dram_blocks and not (part_blocks and blocks % part_blocks)

    def names_behind(self, identities: Sequence[bytes], blocks: int, part_blocks: int) -> list[bytes]:
        """What comes behind the KV of blocks of these ``identities``: a snapshot in ``blocks``, or the parts of a
        window, of ``part_blocks`` each, in as many blocks at most."""
        return names_behind(identities, blocks, part_blocks, self._key)

    def lend_state(self, tenant: str, tokens: TokenArray, blocks: int, part_blocks: int = 0) -> Lease | None:
        """As far as it is in memory, all of it."""
        identities = self.block_identities(tenant, tokens) if self.may_lend(blocks, part_blocks) else []
        for end in range(len(identities), 0, -1):
            extents: list[int] = []
            names = self.names_behind(identities[:end], blocks, part_blocks)
            for identity in names:
                extent = self.hold_block(identity, counts=False)
                if extent is None:
                    break
                extents.append(extent)
            if len(extents) == len(names):
                return Lease([extent // self.block_bytes for extent in extents], end * self.block_tokens)
            for extent in extents:
                self._tier.release(extent)
        return None

    def share_loan(self, loan: Lease, blocks: Sequence[int]) -> Lease:
        """Raises :class:`InvariantError`: nothing is pinned here."""
        raise InvariantError("a store lends by identity")

    def insert_state(self, tenant: str, tokens: TokenArray, blocks: Sequence[int]) -> bool:
        """Raises :class:`InvariantError`: as :meth:`insert`."""
        raise InvariantError("a store inserts by identity")

    # -- blocks

    def allocate(self, count: int) -> list[int] | None:
        """None: there is no HBM."""
        return None

    def available(self) -> int:
        """No HBM."""
        return 0

    @property
    def blocks_free(self) -> int:
        """No HBM."""
        return 0

    @property
    def has_copies(self) -> bool:
        """Blocks are never copied between tiers beside jobs of the disks."""
        return False

    def allocate_dram_ids(self, count: int) -> _core.BlockIds | None:
        """DRAM blocks, one reference each; others are evicted for them. None: no room."""
        return self._tier.allocate_blocks(count)

    def retain(self, blocks: Sequence[int]) -> None:
        """Only of no blocks: there is no HBM."""
        if len(blocks):
            raise InvariantError("a store has no HBM")

    release = retain

    def retain_dram(self, dram_blocks: Sequence[int]) -> None:
        """One more reference on each block."""
        self._tier.retain_blocks(_core.BlockIds(dram_blocks))

    def release_dram(self, dram_blocks: Sequence[int]) -> None:
        """One reference less on each block."""
        self._tier.release_blocks(_core.BlockIds(dram_blocks))

    def ref_count(self, tier: Tier, block: int) -> int:
        return self._tier.ref_count(block * self.block_bytes) if tier is Tier.DRAM else 0
