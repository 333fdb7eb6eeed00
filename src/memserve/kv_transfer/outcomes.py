"""What an :class:`Exchange` tells its owner: outcomes, and what it has counted (level 1)."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.mempool.pool import Lease
from memserve.messages import Offer, Peer
from memserve.types import Tier


@dataclass(frozen=True, slots=True)
class HandoffOffered:
    """Another instance prefills ``offer.request`` for this one. Unless it is given up (:meth:`Exchange.give_up`),
    exactly one :class:`HandoffArrived` or :class:`HandoffFailed` follows, before the lease's end at the latest."""

    transfer_id: str
    sender: Peer
    offer: Offer


@dataclass(frozen=True, slots=True)
class HandoffArrived:
    """The KV of all of ``offer.tokens`` is here, every page with the checksum that its owner computed."""

    transfer_id: str
    sender: Peer
    offer: Offer
    blocks: list[int]
    """HBM blocks of ``offer.tokens`` in order, the last maybe partly filled. One reference each is the receiver's now:
    end it by ``pool.release``. Whole ones may be shared with the index; a partly filled one is private."""
    lease: Lease | None
    """The pin on the whole blocks, which are in the index: the receiver's now, end it by ``pool.unpin``. Its ``blocks``
    are the first of ``blocks``: not further references. ``None`` = the request may not use the cache. An empty one =
    nothing is cached here."""
    first_tokens: tuple[tuple[int, ...], ...]
    ended: tuple[int, ...]
    pulled_blocks: int
    """Blocks of which pages were pulled."""
    reused_blocks: int
    """Blocks that were here already."""


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The KV will not come; nothing of it is held any more."""

    transfer_id: str
    sender: Peer
    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """What was asked for by :meth:`Exchange.fetch` is in the index, or will not come."""

    transfer_id: str
    ok: bool
    tokens: int
    """Tokens of the prefix that the fetch left in the index, from the prompt's start (0 unless ``ok``). Nothing is
    pinned."""
    reason: str
    pulled_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Inserted:
    """Blocks that a peer sent of its own accord (a return, ``transfer_with_insert``) are in the index, unpinned."""

    transfer_id: str
    sender: Peer
    offer: Offer
    tokens: int
    pulled_blocks: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """A raw ``transfer`` is complete: ``blocks[i]`` holds what the sender's ``offer.blocks[i]`` held.

    They lie on ``offer.dst_tier``; one reference each is the receiver's now, also where the sender had chosen the
    blocks (``offer.dst_blocks``, from its ``Alloc``).
    """

    transfer_id: str
    sender: Peer
    offer: Offer
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Released:
    """An own offer has ended without the owner's doing: its references are gone."""

    transfer_id: str
    to: Peer
    used: bool
    """Whether the taker has the blocks; false also when its lease ended or the peer died."""
    reason: str


@dataclass(frozen=True, slots=True)
class RemoteAllocated:
    """The answer to :meth:`Exchange.allocate_at`; ``None`` = no room there, or no answer in time."""

    call_id: str
    peer: Peer
    tier: Tier
    blocks: tuple[int, ...] | None


Outcome = (
    HandoffOffered
    | HandoffArrived
    | HandoffFailed
    | FetchEnded
    | Inserted
    | Delivered
    | Released
    | RemoteAllocated
)  # fmt: skip


@dataclass(slots=True)
class ExchangeCounters:
    """Totals since the start."""

    offers: int = 0
    """Own offers made, answers to fetches included."""
    released: int = 0
    """Of them: taken."""
    refused: int = 0
    """Of them: released without having been used."""
    expired: int = 0
    """Of them: the lease ended, or the peer died, before a release came."""
    withdrawn: int = 0
    """Of them: taken back."""
    sealed_pages: int = 0
    imports: int = 0
    """Offers of others that were heard, answers to fetches included."""
    imports_done: int = 0
    imports_refused: int = 0
    """Of them: another namespace, geometry or identity, or nothing that could be used here."""
    imports_failed: int = 0
    """Of them: withdrawn, expired, peer gone, pull failed."""
    imports_given_up: int = 0
    """Of them: by the own side."""
    pulls: int = 0
    pulls_failed: int = 0
    """Peer or link gone, or a checksum that differed."""
    mismatches: int = 0
    """Of them: a checksum that differed."""
    pulled_bytes: int = 0
    pulled_dram_bytes: int = 0
    """Of them: out of the owner's DRAM."""
    pulled_blocks: int = 0
    """Blocks that completed imports pulled."""
    reused_blocks: int = 0
    """Blocks of completed imports that were here already."""
    fetches: int = 0
    fetch_timeouts: int = 0
    fetched_blocks: int = 0
    remote_allocations: int = 0
    """Blocks allocated here for peers."""
