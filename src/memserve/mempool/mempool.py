"""MemPool: MemServe's memory API (Table 1), with real memory behind it and no engine in front (level 1).

    pool = MemPool(geometry, hbm_bytes=64 << 20, dram_bytes=256 << 20)
    held = pool.alloc_mem(4)                    # addresses, or None: no room
    pool.view(held[0])[...] = ...               # the block's bytes
    pool.insert(tokens, held)                   # the index takes references of its own
    pool.free_mem(held)                         # ours are gone; the blocks stay until eviction needs them
    again = pool.match(tokens)                  # back in HBM if they had gone down to DRAM
    pool.free_mem(again)

What an instance uses inside itself is :class:`BlockPool`; this class adds the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.config import PoolConfig
from memserve.errors import UserError
from memserve.mempool.addresses import Address, Addresses
from memserve.mempool.pool import BlockPool
from memserve.mempool.report import PoolReport
from memserve.types import KVGeometry, Tier, TokenArray
from memserve.units import human_bytes

AddressList = Addresses | Sequence[Address]


class MemPool:
    """Fixed-size blocks of KV cache on two tiers, and an index from token ids to blocks.

    Calls are synchronous: when one returns, the copies that it decided on are done. Not thread-safe.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        hbm_bytes: int,
        dram_bytes: int = 0,
        tenant: str = "",
        namespace: str = "default",
        generation: int = 0,
        copy_threads: int = 1,
        new_arena: Callable[[int], _core.Arena | _core.SharedArena] = _core.Arena,
    ) -> None:
        """Room for as many whole blocks as the bytes hold. Raises :class:`UserError` when that is none.

        ``namespace`` names model and weights; dtype and shapes come from ``geometry``. Pools share KV only where
        ``tenant``, ``namespace`` and ``geometry`` are equal. ``new_arena`` makes the memory of a tier from its bytes
        (:class:`memserve.PoolPeer` lets other processes read it).
        """
        self.geometry = geometry
        self.tenant = tenant
        self.generation = generation
        self.copy_threads = copy_threads
        block_bytes = geometry.block_bytes
        if hbm_bytes < block_bytes:
            raise UserError(
                f"hbm_bytes={hbm_bytes} holds no block of {human_bytes(block_bytes)}",
                hint=f"give at least {block_bytes} bytes",
                param="hbm_bytes",
            )
        config = PoolConfig(hbm_bytes // block_bytes, dram_bytes // block_bytes)
        self._pool = BlockPool(config, geometry.block_tokens, f"{namespace}|{geometry!r}")
        self.arenas = {Tier.HBM: new_arena(config.hbm_blocks * block_bytes)}
        if config.dram_blocks:
            self.arenas[Tier.DRAM] = new_arena(config.dram_blocks * block_bytes)
        self._bytes = {tier: np.frombuffer(memoryview(arena), np.uint8) for tier, arena in self.arenas.items()}

    # -- memory blocks

    def alloc_mem(self, count: int, tier: Tier = Tier.HBM) -> Addresses | None:
        """``count`` blocks, held by the caller until :meth:`free_mem`. ``None`` = no room, nothing changed.

        Cached blocks that nobody holds make room, least recently used first: from HBM they move to DRAM, from DRAM
        they go. Contents are whatever the block had before.
        """
        if count < 0:
            raise UserError(f"cannot allocate {count} blocks", hint="count must not be negative", param="count")
        if tier == Tier.HBM:
            blocks = self._pool.allocate_ids(count)
        elif tier == Tier.DRAM:
            blocks = self._pool.allocate_dram_ids(count)
        else:
            raise UserError(f"this pool has no {tier.name} tier", hint="use HBM or DRAM", param="tier")
        self.run_copies()
        return None if blocks is None else Addresses(tier, blocks, self.generation)

    def free_mem(self, addresses: AddressList) -> None:
        """Give up the caller's hold on blocks; those that nobody holds are free.

        A block that is not held raises :class:`memserve.errors.InvariantError` and names it.
        """
        for tier, blocks in self._by_tier(addresses):
            if tier == Tier.HBM:
                self._pool.release(blocks)
            else:
                self._pool.release_dram(blocks)

    def view(self, address: Address) -> NDArray[np.uint8]:
        """The bytes of a block, ``[num_layers, page_bytes]`` uint8, writable, without a copy."""
        self._require_ours(address.generation)
        block_bytes = self.geometry.block_bytes
        if address.tier not in self._bytes or not 0 <= address.block < self._total(address.tier):
            raise UserError(f"no such block: {address}", hint="use addresses of this pool", param="address")
        start = address.block * block_bytes
        flat: NDArray[np.uint8] = self._bytes[address.tier][start : start + block_bytes]
        return flat.reshape(self.geometry.num_layers, self.geometry.page_bytes)

    # -- index

    def insert(self, tokens: TokenArray, addresses: AddressList) -> int:
        """Map the whole blocks of ``tokens`` to ``addresses`` (HBM blocks first); returns the blocks taken.

        The index takes references of its own on blocks that it did not have; the caller's hold stays the caller's.
        Raises :class:`UserError` when there are fewer addresses than whole blocks, or HBM behind DRAM.
        """
        groups = self._by_tier(addresses)
        needed = len(tokens) // self.geometry.block_tokens
        if len(addresses) < needed:
            raise UserError(f"{len(addresses)} addresses for {needed} blocks of tokens", hint="one a whole block")
        if [tier for tier, _ in groups] not in ([], [Tier.HBM], [Tier.DRAM], [Tier.HBM, Tier.DRAM]):
            raise UserError("addresses must be HBM blocks, then DRAM blocks", hint="swap_in those behind")
        in_hbm = len(groups[0][1]) if groups and groups[0][0] == Tier.HBM else 0
        if len(groups) == 1:
            return self._pool.insert(self.tenant, tokens, groups[0][1], in_hbm)
        blocks = [block for _, group in groups for block in group]
        return self._pool.insert(self.tenant, tokens, blocks, in_hbm)

    def match(self, tokens: TokenArray) -> Addresses:
        """HBM addresses of the longest cached prefix of ``tokens``, held by the caller until :meth:`free_mem`.

        Blocks that lay in DRAM are brought up as far as HBM has room for them; the prefix ends where it has not.
        """
        blocks = self._pool.borrow(self.tenant, tokens)
        self.run_copies()
        return Addresses(Tier.HBM, blocks, self.generation)

    def cached_tokens(self, tokens: TokenArray) -> int:
        """Length of the cached prefix on any tier, in tokens. Changes nothing and holds nothing."""
        return self._pool.match(self.tenant, tokens)

    def delete(self, tokens: TokenArray) -> int:
        """Forget what only ``tokens`` leads to; returns the blocks forgotten. See :meth:`BlockPool.delete`."""
        return self._pool.delete(self.tenant, tokens)

    # -- tiers

    def swap_out(self, num_blocks: int) -> int:
        """Move up to ``num_blocks`` cached blocks that nobody holds from HBM to DRAM; returns how many moved."""
        moved = self._pool.demote(num_blocks)
        self.run_copies()
        return moved

    def swap_out_blocks(self, addresses: AddressList) -> Addresses | None:
        """Move blocks that the caller holds to DRAM; returns their new addresses. ``None`` = no room there."""
        blocks = self._pool.swap_out(self._only(Tier.HBM, addresses))
        self.run_copies()
        return None if blocks is None else Addresses(Tier.DRAM, _core.BlockIds(blocks), self.generation)

    def swap_in(self, addresses: AddressList) -> Addresses | None:
        """Move DRAM blocks that the caller holds to HBM; returns their new addresses. ``None`` = no room there."""
        blocks = self._pool.swap_in(self._only(Tier.DRAM, addresses))
        self.run_copies()
        return None if blocks is None else Addresses(Tier.HBM, _core.BlockIds(blocks), self.generation)

    # -- state

    def report(self) -> PoolReport:
        """The state of the memory (row P4)."""
        return self._pool.report()

    @property
    def pool(self) -> BlockPool:
        """The accounts behind the memory. Copies that it records are done by :meth:`run_copies`."""
        return self._pool

    def check_invariants(self) -> None:
        """Raise :class:`memserve.errors.InvariantError` when the books do not balance."""
        self._pool.check_invariants()

    # -- inside

    def _total(self, tier: Tier) -> int:
        config = self._pool.config
        return config.hbm_blocks if tier == Tier.HBM else config.dram_blocks

    def _require_ours(self, generation: int) -> None:
        if generation != self.generation:
            raise UserError(
                f"an address of generation {generation}, this pool is generation {self.generation}",
                hint="the pool was restarted: match again",
                param="addresses",
            )

    def _by_tier(self, addresses: AddressList) -> list[tuple[Tier, Sequence[int]]]:
        """Runs of neighbouring addresses on one tier."""
        if isinstance(addresses, Addresses):
            self._require_ours(addresses.generation)
            return [(addresses.tier, addresses.blocks)] if len(addresses) else []
        for address in addresses:
            self._require_ours(address.generation)
        return [(tier, [a.block for a in run]) for tier, run in groupby(addresses, key=lambda a: a.tier)]

    def _only(self, tier: Tier, addresses: AddressList) -> Sequence[int]:
        groups = self._by_tier(addresses)
        if any(found != tier for found, _ in groups):
            raise UserError(f"expected addresses in {tier.name} only", hint=f"got {addresses!r}", param="addresses")
        return [block for _, group in groups for block in group]

    def run_copies(self) -> None:
        """Do what the pool has decided since the last call; every public call has done so when it returns."""
        block_bytes = self.geometry.block_bytes
        for copy in self._pool.take_copies():
            source, target = self.arenas[copy.src_tier], self.arenas[copy.dst_tier]
            _core.copy_blocks(target.address, source.address, block_bytes, copy.src, copy.dst, self.copy_threads)
