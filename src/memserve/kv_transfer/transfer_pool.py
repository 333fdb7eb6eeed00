"""What an exchange needs of a pool: blocks with references, identities, and a prefix cache, which may hold nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memserve import _core
from memserve.mempool.block_access import BlockAccessLog
from memserve.mempool.pool import Lease
from memserve.types import Tier, TokenArray


class TierSizes(Protocol):
    """The size of a pool, as :class:`memserve.config.PoolConfig` has it."""

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
    def lower_dtype(self) -> str:
        """Of values in DRAM (:data:`memserve.tiers.LOWER_DTYPES`)."""


class TransferPool(Protocol):
    """Blocks of HBM and DRAM that can be lent to peers and filled by them, as :class:`memserve.mempool.pool.BlockPool`
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

    def match_blocks(self, tenant: str, tokens: TokenArray) -> tuple[int, int]:
        """Blocks of the cached prefix in HBM, and behind them in DRAM, that :meth:`acquire` would find."""

    def acquire(self, tenant: str, tokens: TokenArray) -> Lease:
        """The longest cached prefix, in HBM, pinned, one reference a block."""

    def unpin(self, lease: Lease) -> None:
        """End a lease's protection from eviction."""

    def lend(self, tenant: str, tokens: TokenArray, first_block: int = 0) -> tuple[Sequence[int], Sequence[int]]:
        """Cached blocks of ``tokens`` from ``first_block`` up to the first gap, where they lie: in HBM, and behind them
        in DRAM; one reference each."""

    def publish(self, lease: Lease, tenant: str, tokens: TokenArray, blocks: Sequence[int], *, written_by: int) -> int:
        """Make HBM blocks reusable; the lease's pin moves to their end. Returns the blocks that the cache took."""

    def insert(self, tenant: str, tokens: TokenArray, blocks: _core.Ids, hbm_blocks: int) -> int:
        """As :meth:`publish` without a lease; ``blocks[:hbm_blocks]`` lie in HBM, the rest in DRAM."""

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
