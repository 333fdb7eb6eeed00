"""MemPool: MemServe's memory API (Table 1), with real memory behind it and no engine in front.

    pool = MemPool(geometry, hbm_bytes=64 << 20, dram_bytes=256 << 20)
    held = pool.alloc_mem(4)                    # addresses, or None: no room
    pool.view(held[0])[...] = ...               # the block's bytes
    pool.insert(tokens, held)                   # the index takes references of its own
    pool.free_mem(held)                         # the caller's hold is gone; the blocks stay until eviction needs them
    again = pool.match(tokens)                  # back in HBM if they had gone to DRAM; with `tiers`: where they lie
    pool.free_mem(again)

Addresses are small typed values that a remote instance can use later. Inside an instance the pool is
:class:`BlockPool`; this module adds the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count, groupby
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.config import PoolConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Tier, TokenArray
from memserve.base.units import human_bytes
from memserve.kv.events import PoolReport
from memserve.kv.pool import BlockPool


class Address(NamedTuple):
    """One block of one pool."""

    tier: Tier
    block: int
    generation: int = 0  # of the pool that owns the block: a restarted owner has another one


class Addresses(Sequence[Address]):
    """Addresses of blocks in one tier, kept as one native array: a list of a few hundred tuples costs more than a
    whole ``match``."""

    def __init__(self, tier: Tier, blocks: _core.BlockIds, generation: int = 0) -> None:
        self.tier = tier
        self.blocks = blocks
        self.generation = generation

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, index: int) -> Address: ...
    @overload
    def __getitem__(self, index: slice) -> Addresses: ...
    def __getitem__(self, index: int | slice) -> Address | Addresses:
        if isinstance(index, slice):
            return Addresses(self.tier, self.blocks[index], self.generation)
        return Address(self.tier, self.blocks[index], self.generation)

    def __iter__(self) -> Iterator[Address]:
        return (Address(self.tier, block, self.generation) for block in self.blocks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Addresses):
            return NotImplemented
        return (self.tier, self.generation) == (other.tier, other.generation) and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash((self.tier, self.generation, np.asarray(self.blocks).tobytes()))

    def __add__(self, other: Addresses) -> list[Address]:
        return [*self, *other]

    def __repr__(self) -> str:
        return f"Addresses({self.tier.name}, {self.blocks.tolist()})"


AddressList = Addresses | Sequence[Address]
Groups = Sequence[tuple[Tier, _core.BlockIds | Sequence[int]]]

_generations = count(1)
"""Pools of one process have different generations, so that addresses of one are refused by the others."""


def as_tokens(tokens: TokenArray | Sequence[int]) -> TokenArray:
    """``tokens`` as int32 ``[n]``, C-contiguous, without a copy if they are that already.

    Raises :class:`UserError` for anything but one row of integers in ``[0, 2^31)``.
    """
    array = np.asarray(tokens)
    if array.ndim == 1 and not len(array):
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"tokens of shape {array.shape} and type {array.dtype}", hint="give one row of token ids", param="tokens"
        )
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise UserError("a token id outside [0, 2^31)", hint="use the tokenizer's ids", param="tokens")
    return np.ascontiguousarray(array, dtype=np.int32)


class MemPool:
    """Fixed-size blocks of KV cache on two tiers, and an index from token ids to blocks.

    Calls are synchronous: when one returns, its copies are done. Not thread-safe. Every misuse is a
    :class:`UserError` at once, and changes nothing: an address of another pool, a block that is freed twice or used
    after it was freed, a tier that the pool does not have.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        hbm_bytes: int,
        dram_bytes: int = 0,
        tenant: str = "",
        namespace: str = "default",
        generation: int | None = None,
        copy_threads: int = 1,
        new_arena: Callable[[int], _core.Arena | _core.SharedArena] = _core.Arena,
        identity_key: bytes | None = None,
    ) -> None:
        """A pool of as many whole blocks as the bytes hold. Raises :class:`UserError` if that is none.

        ``namespace`` names model and weights; dtype and shapes come from ``geometry``. Pools share KV only where
        ``tenant``, ``namespace`` and ``geometry`` are equal. Addresses carry ``generation``, by default one that no
        other pool of this process has; ``new_arena`` makes the memory of a tier from its bytes
        (:class:`memserve.PoolPeer` lets other processes read it). ``identity_key`` as in :class:`PoolConfig`.
        """
        self.geometry = geometry
        self.tenant = tenant
        self.generation = next(_generations) if generation is None else generation
        self.copy_threads = copy_threads
        block_bytes = geometry.block_bytes
        if hbm_bytes < block_bytes:
            raise UserError(
                f"hbm_bytes={hbm_bytes} holds no block of {human_bytes(block_bytes)}",
                hint=f"give at least {block_bytes} bytes",
                param="hbm_bytes",
            )
        config = PoolConfig(hbm_bytes // block_bytes, dram_bytes // block_bytes, identity_key=identity_key)
        self._pool = BlockPool(config, geometry.block_tokens, f"{namespace}|{geometry!r}")
        self.arenas = {Tier.HBM: new_arena(config.hbm_blocks * block_bytes)}
        if config.dram_blocks:
            self.arenas[Tier.DRAM] = new_arena(config.dram_blocks * block_bytes)
        self._holds = {Tier.HBM: _core.HoldCounts(config.hbm_blocks), Tier.DRAM: _core.HoldCounts(config.dram_blocks)}
        self._bytes = {tier: np.frombuffer(memoryview(arena), np.uint8) for tier, arena in self.arenas.items()}

    # -- memory blocks

    def alloc_mem(self, count: int, tier: Tier = Tier.HBM) -> Addresses | None:
        """``count`` blocks, held by the caller until :meth:`free_mem`. None: no room, nothing changed.

        To make room, cached blocks that no caller holds are evicted, least recently used first: from HBM to DRAM, from
        DRAM for good. A block's contents are undefined.
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
        return None if blocks is None else self.hold_blocks(tier, blocks)

    def free_mem(self, addresses: AddressList) -> None:
        """Give up one hold of the caller on each block; a block without holds is free, or stays cached.

        Raises :class:`UserError`, naming the block, if the caller does not hold one; then nothing is freed.
        """
        groups = self._by_tier(addresses)
        self._give_up_holds(groups)
        for tier, blocks in groups:
            if tier == Tier.HBM:
                self._pool.release(blocks)
            else:
                self._pool.release_dram(blocks)

    def view(self, address: Address) -> NDArray[np.uint8]:
        """The bytes of a block that the caller holds, ``[num_layers, page_bytes]`` uint8, writable, without a copy.

        Valid until the block is freed or swapped: later the view shows another block's bytes.
        """
        self._require_own(address.generation)
        self.require_held([(address.tier, (address.block,))])
        return self.bytes_of(address.tier, address.block)

    # -- index

    def insert(self, tokens: TokenArray | Sequence[int], addresses: AddressList) -> int:
        """Map the whole blocks of ``tokens`` to ``addresses`` (HBM blocks first); returns the blocks taken.

        The index takes references of its own on blocks that it did not have; the caller keeps its holds.
        Raises :class:`UserError` when there are fewer addresses than whole blocks, or an HBM address follows a DRAM
        address.
        """
        tokens, groups = as_tokens(tokens), self._by_tier(addresses)
        self.require_held(groups)
        needed = len(tokens) // self.geometry.block_tokens
        if len(addresses) < needed:
            raise UserError(f"{len(addresses)} addresses for {needed} blocks of tokens", hint="one per whole block")
        if [tier for tier, _ in groups] not in ([], [Tier.HBM], [Tier.DRAM], [Tier.HBM, Tier.DRAM]):
            raise UserError("addresses must be HBM blocks, then DRAM blocks", hint="swap_in the DRAM blocks")
        in_hbm = len(groups[0][1]) if groups and groups[0][0] == Tier.HBM else 0
        if len(groups) == 1:
            return self._pool.insert(self.tenant, tokens, groups[0][1], in_hbm)
        blocks = [block for _, group in groups for block in group]
        return self._pool.insert(self.tenant, tokens, blocks, in_hbm)

    @overload
    def match(self, tokens: TokenArray | Sequence[int], tiers: None = None) -> Addresses: ...
    @overload
    def match(self, tokens: TokenArray | Sequence[int], tiers: Collection[Tier]) -> AddressList: ...
    def match(self, tokens: TokenArray | Sequence[int], tiers: Collection[Tier] | None = None) -> AddressList:
        """Addresses of the longest cached prefix of ``tokens``, held by the caller until :meth:`free_mem`.

        ``tiers``: where the blocks may lie. They are left there, whatever room HBM has: the prefix ends before the
        first block on another tier, and those in HBM are followed by those in DRAM, which :meth:`swap_in` copies up.
        None: all are wanted in HBM. Those that lay in DRAM are copied as far as there is room; the prefix ends where
        there is none. Raises :class:`UserError` for tiers that no pool has.
        """
        if tiers is not None:
            return self._match_in_place(as_tokens(tokens), frozenset(tiers))
        blocks = self._pool.borrow_blocks(self.tenant, as_tokens(tokens))
        self.run_copies()
        return self.hold_blocks(Tier.HBM, blocks)

    def cached_tokens(self, tokens: TokenArray | Sequence[int]) -> int:
        """Length of the cached prefix on any tier, in tokens. Changes nothing and holds nothing."""
        return self._pool.match(self.tenant, as_tokens(tokens))

    def delete(self, tokens: TokenArray | Sequence[int]) -> int:
        """Remove what only ``tokens`` leads to from the index; returns the number of blocks. See
        :meth:`BlockPool.delete`."""
        return self._pool.delete(self.tenant, as_tokens(tokens))

    # -- tiers

    def swap_out(self, num_blocks: int) -> int:
        """Move up to ``num_blocks`` cached blocks that no caller holds from HBM to DRAM; returns how many moved."""
        moved = self._pool.demote_blocks(num_blocks)
        self.run_copies()
        return moved

    def swap_out_blocks(self, addresses: AddressList) -> Addresses | None:
        """Move blocks that the caller holds to DRAM; returns their new addresses. None: no room there."""
        return self._move_held(Tier.HBM, addresses, Tier.DRAM, self._pool.swap_out)

    def swap_in(self, addresses: AddressList) -> Addresses | None:
        """Move DRAM blocks that the caller holds to HBM; returns their new addresses. None: no room there.

        What the index has of blocks from ``match(..., tiers=...)`` stays in DRAM: ``match`` without tiers brings it up.
        """
        return self._move_held(Tier.DRAM, addresses, Tier.HBM, self._pool.swap_in)

    # -- state

    def report(self) -> PoolReport:
        """The state of the memory."""
        return self._pool.report()

    @property
    def pool(self) -> BlockPool:
        """The accounting behind the memory. :meth:`run_copies` executes the copies that it records."""
        return self._pool

    def check_invariants(self) -> None:
        """Raise :class:`memserve.base.errors.InvariantError` if the accounts do not balance."""
        self._pool.check_invariants()

    # -- for the host of this memory

    def bytes_of(self, tier: Tier, block: int) -> NDArray[np.uint8]:
        """As :meth:`view`, for any block of the pool: the exchange seals and fills blocks that no caller holds."""
        block_bytes = self.geometry.block_bytes
        flat: NDArray[np.uint8] = self._bytes[tier][block * block_bytes : (block + 1) * block_bytes]
        return flat.reshape(self.geometry.num_layers, self.geometry.page_bytes)

    def hold_blocks(self, tier: Tier, blocks: _core.BlockIds) -> Addresses:
        """Addresses of distinct ``blocks``; from now on the caller owns one reference on each."""
        self._holds[tier].take(blocks)
        return Addresses(tier, blocks, self.generation)

    def require_held(self, groups: Groups) -> None:
        """Raise as :meth:`_give_up_holds` would, but change nothing."""
        self._give_up_holds(groups)
        for tier, blocks in groups:
            self._holds[tier].take(blocks)

    def run_copies(self) -> None:
        """Execute the copies recorded since the last call; every public call does so before it returns."""
        block_bytes = self.geometry.block_bytes
        for copy in self._pool.take_copies():
            source, target = self.arenas[copy.src_tier], self.arenas[copy.dst_tier]
            _core.copy_blocks(target.address, source.address, block_bytes, copy.src, copy.dst, self.copy_threads)

    # -- inside

    def _match_in_place(self, tokens: TokenArray, tiers: frozenset[Tier]) -> AddressList:
        if not tiers or not tiers <= self._holds.keys():
            named = ", ".join(tier.name for tier in sorted(tiers)) or "none"
            raise UserError(f"blocks are matched in HBM and in DRAM: {named}", hint="name these tiers", param="tiers")
        hbm, dram = self._pool.export_blocks(self.tenant, tokens)
        if len(hbm) and Tier.HBM not in tiers:
            self._pool.release(hbm)
            self._pool.release_dram(dram)
            return []
        if Tier.DRAM not in tiers:
            self._pool.release_dram(dram)
            return self.hold_blocks(Tier.HBM, hbm)
        below = self.hold_blocks(Tier.DRAM, dram)
        return self.hold_blocks(Tier.HBM, hbm) + below if len(hbm) else below

    def _move_held(
        self, src: Tier, addresses: AddressList, dst: Tier, swap: Callable[[list[int]], list[int] | None]
    ) -> Addresses | None:
        """The caller's holds move with the blocks."""
        sources = self._blocks_on(src, addresses)
        self._give_up_holds([(src, sources)])
        blocks = swap(sources)
        self.run_copies()
        if blocks is None:
            self._holds[src].take(sources)
            return None
        return self.hold_blocks(dst, _core.BlockIds(blocks))

    def _give_up_holds(self, groups: Groups) -> None:
        """Give up one hold of the caller for each time that a block is named.

        Raises :class:`UserError`, naming the block, if there is no such hold; then nothing has changed.
        """
        for index, (tier, blocks) in enumerate(groups):
            holds = self._holds.get(tier)
            missing_block = (blocks[0] if len(blocks) else None) if holds is None else holds.give(blocks)
            if missing_block is None:
                continue
            for given_tier, given_blocks in groups[:index]:
                self._holds[given_tier].take(given_blocks)
            total = 0 if holds is None else holds.blocks_total
            why = "already freed, or swapped to another tier" if 0 <= missing_block < total else f"there are {total}"
            raise UserError(
                f"{Tier(tier).name} block {missing_block} is not held by the caller: {why}",
                hint="use addresses from alloc_mem, match or a swap, and free each once",
                param="addresses",
            )

    def _require_own(self, generation: int) -> None:
        if generation != self.generation:
            raise UserError(
                f"an address of generation {generation}, this pool is generation {self.generation}",
                hint="it belongs to another pool, or this pool was restarted: match again",
                param="addresses",
            )

    def _by_tier(self, addresses: AddressList) -> list[tuple[Tier, Sequence[int]]]:
        """Runs of neighbouring addresses on one tier."""
        if isinstance(addresses, Addresses):
            self._require_own(addresses.generation)
            return [(addresses.tier, addresses.blocks)] if len(addresses) else []
        for address in addresses:
            self._require_own(address.generation)
        return [(tier, [a.block for a in run]) for tier, run in groupby(addresses, key=lambda a: a.tier)]

    def _blocks_on(self, tier: Tier, addresses: AddressList) -> list[int]:
        groups = self._by_tier(addresses)
        if any(block_tier != tier for block_tier, _ in groups):
            raise UserError(f"expected addresses in {tier.name} only", hint=f"got {addresses!r}", param="addresses")
        return [block for _, group in groups for block in group]
