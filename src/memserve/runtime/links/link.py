"""One way to read a peer's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memserve.errors import MemserveError
from memserve.messages import ArenaPlace, Peer, PeerInfo
from memserve.runtime.links.ranges import Ranges, fits
from memserve.types import Tier

Seals = NDArray[np.uint64]
"""A checksum a range."""


class LinkError(MemserveError):
    """Pages could not be read. Nothing writes the destination any more."""


class UnreachableError(LinkError):
    """The peer cannot be read over this link; another one may do."""


class ChecksumError(LinkError):
    """What came is not what its owner had sealed."""

    def __init__(self, wrong: int, blocks: int) -> None:
        super().__init__(f"{wrong} of {blocks} blocks have another checksum than their owner said")
        self.wrong_blocks = wrong


class ArenaMemory(Protocol):
    """An arena of ours, as ``_core.SharedArena`` is."""

    generation: int

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def nbytes(self) -> int:
        """Of all blocks."""

    @property
    def fd(self) -> int:
        """Descriptor of the memory's file."""


Arenas = Mapping[Tier, ArenaMemory]


class PageLink(Protocol):
    """Reads ranges out of peers' arenas into own ones. Thread-safe."""

    name: str
    workers: int
    """How many reads may go on at once."""

    def describe(self, info: PeerInfo) -> PeerInfo:
        """``info`` with what this link needs of it."""

    def reaches(self, info: PeerInfo) -> bool:
        """Whether it is worth trying."""

    def add_peer(self, info: PeerInfo) -> None:
        """Reads from ``info.peer`` may come. Does not block; connects when the first one does."""

    def remove_peer(self, peer: Peer) -> None:
        """No more reads; one that is under way ends soon."""

    def expect_reads(self) -> None:
        """Peers will read our arenas in a moment."""

    def read(self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges) -> Seals:
        """Copy ``ranges``; the checksums of what was written, one a range. Blocks for a bounded time.

        Raises :class:`LinkError`; then, and on return, nothing writes the destination any more.
        """

    def close(self) -> None:
        """Give everything back; no read is under way."""


def place_of(info: PeerInfo, tier: Tier) -> ArenaPlace:
    """Where ``tier`` lies in the peer's memory. Raises :class:`LinkError` when it offers none."""
    for place in info.arenas:
        if place.tier is tier:
            return place
    raise LinkError(f"{info.peer.name} has no {tier.name} that can be read")


def check_ranges(ranges: Ranges, src_bytes: int, dst_bytes: int) -> None:
    """Below, addresses are trusted. Raises :class:`LinkError` for ranges that are not inside both arenas."""
    if not fits(ranges.src_offsets, ranges.range_bytes, src_bytes):
        raise LinkError("a source lies outside of the peer's arena")
    if not fits(ranges.dst_offsets, ranges.range_bytes, dst_bytes):
        raise LinkError("a destination lies outside of the arena")
