"""Where a block lies: small typed values that a remote instance can use later (level 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from memserve import _core
from memserve.types import Tier


class Address(NamedTuple):
    """One block of one pool."""

    tier: Tier
    block: int
    generation: int = 0  # of the pool that owns the block: a restarted owner has another one


class Addresses(Sequence[Address]):
    """Addresses of blocks in one tier, kept as one native array: a list of a few hundred tuples costs more than a
    whole ``match``."""

    __slots__ = ("blocks", "generation", "tier")

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
