"""Work on pages that an exchange asks its host for, and what it tells its owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memserve.base.types import Tier, TokenOutput
from memserve.kv.state_snapshot import Lease
from memserve.protocol.messages import Offer
from memserve.protocol.peers import Peer

Firsts = tuple[tuple[int, ...], ...]
"""For each sequence of a request the tokens that it has had when it is handed over."""

# -- page jobs, and their answers


@dataclass(frozen=True, slots=True)
class SealPages:
    """Compute the checksum of layers ``[first_layer, end_layer)`` of each of these own blocks; ``PagesSealed``."""

    job_id: int
    tier: Tier
    blocks: tuple[int, ...]
    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class PagesSealed:
    """Checksums in the order of ``SealPages.blocks``: of those bytes as they are, unused positions included."""

    job_id: int
    checksums: tuple[int, ...]
    sealed_bytes: int = 0
    spent_ns: int = 0


@dataclass(frozen=True, slots=True)
class PullPages:
    """Copy layers ``[first_layer, end_layer)`` of a peer's blocks into own ones, compare checksums; ``PagesPulled``.

    ``src_blocks[i] -> dst_blocks[i]``. Nothing else reads or writes the destination meanwhile. ``by_page`` moves every
    page on its own, as a layout without aggregation has to (the discrete transfer modes).
    """

    job_id: int
    peer: Peer
    src_tier: Tier
    src_blocks: tuple[int, ...]
    dst_tier: Tier
    dst_blocks: tuple[int, ...]
    first_layer: int
    end_layer: int
    checksums: tuple[int, ...]
    by_page: bool = False
    sealed_ns: int = 0
    """What the peer took for the checksums."""


@dataclass(frozen=True, slots=True)
class CancelPulls:
    """A peer is gone: pulls from it that have not begun need not begin. ``PagesPulled`` answers each of them
    nevertheless: until then its destination may be written."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PagesPulled:
    """A pull has ended: its destination is written no more. Empty ``error``: each page came with its checksum."""

    job_id: int
    error: str = ""
    pulled_bytes: int = 0
    link: str = ""
    """How it came: ``shm`` or ``ipc`` on one host, ``curve`` or ``nixl``."""
    spent_ns: int = 0
    mismatches: int = 0
    """Blocks whose checksum differed; above 0 there is an ``error``."""
    saved_bytes: int = 0
    """So many fewer bytes travelled than were pulled."""
    codec_ns: int = 0
    """What the codec took for that, at both ends."""


PageJob = SealPages | PullPages | CancelPulls


# -- outcomes


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
    """Blocks of ``offer.tokens`` in order, on ``tier``, the last maybe partly filled. The owner has one reference on
    each now, and ends it. Whole blocks may be shared with the index, a partly filled one is private."""
    lease: Lease | None
    """The pin on the whole blocks, which are in the index; the owner ends it by ``pool.unpin``. Its ``blocks`` are the
    first of ``blocks``, without further references. None: the request may not use the cache. An empty lease: nothing is
    cached here."""
    first_tokens: Firsts
    ended_indices: tuple[int, ...]
    pulled_blocks: int
    """Blocks of which pages were pulled."""
    reused_blocks: int
    """Blocks that were here already."""
    tier: Tier = Tier.HBM
    """DRAM: HBM had no room. None of the blocks is in the index."""
    emitted_outputs: tuple[TokenOutput, ...] = ()
    """``Handoff.told``."""
    state: Sequence[int] = ()
    """Blocks with the recurrent state behind all tokens of the offer, where layers have one. The owner has one
    reference on each now."""


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The KV will not come; no block is held for it any more."""

    transfer_id: str
    sender: Peer
    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """The KV asked for by :meth:`Exchange.fetch_blocks` is in the index, or will not come."""

    transfer_id: str
    ok: bool
    tokens: int
    """Tokens of the prefix that the fetch left in the index, unpinned, from the prompt's start. 0 unless ``ok``."""
    reason: str
    pulled_blocks: int = 0
    has_state: bool = False
    """The recurrent state behind these tokens has come as well."""
    was_offered: bool = False
    """The holder had it in memory, in time for its offer, though it may not have come."""


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

    The blocks lie on ``offer.dst_tier``. The owner has one reference on each now, also where the sender had chosen the
    blocks (``offer.dst_blocks``, from its ``Alloc``).
    """

    transfer_id: str
    sender: Peer
    offer: Offer
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StripeOffered:
    """A peer computes blocks of a sequence that is computed here as well (``offer.part_of``). Nothing is pulled before
    :meth:`Exchange.place_stripe`. Unless it is given up, :class:`LayersArrived` with all layers, or :class:`StripeLost`
    follows, before the lease's end at the latest."""

    transfer_id: str
    sender: Peer
    offer: Offer


@dataclass(frozen=True, slots=True)
class LayersArrived:
    """Of a stripe, the pages of the first ``layers`` layers are here, each with the checksum that its owner computed.
    With the last layer the import has ended."""

    transfer_id: str
    offer: Offer
    layers: int


@dataclass(frozen=True, slots=True)
class StripeLost:
    """The rest of a stripe will not come."""

    transfer_id: str
    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """An own offer has ended, not by the owner: its references are released."""

    transfer_id: str
    to: Peer
    used: bool
    """Whether the receiver has the blocks. False also: the lease ended, or the peer died."""
    reason: str


@dataclass(frozen=True, slots=True)
class RemoteAllocated:
    """The answer to :meth:`Exchange.allocate_at`."""

    call_id: str
    peer: Peer
    tier: Tier
    blocks: tuple[int, ...] | None
    """None: the peer has no room, or did not answer in time."""


Outcome = (
    HandoffOffered
    | HandoffArrived
    | HandoffFailed
    | FetchEnded
    | Inserted
    | Delivered
    | StripeOffered
    | LayersArrived
    | StripeLost
    | Released
    | RemoteAllocated
)  # fmt: skip


@dataclass(slots=True)
class ExchangeCounters:
    """Totals since the start."""

    offers: int = 0
    """Own offers made, answers to fetches included."""
    released: int = 0
    """Of them: used by the receiver."""
    refused: int = 0
    """Of them: released without having been used."""
    expired: int = 0
    """Of them: the lease ended, or the peer died, before a ``Release`` came."""
    withdrawn: int = 0
    """Of them: withdrawn by the owner."""
    sealed_pages: int = 0
    imports: int = 0
    """Offers of peers, answers to fetches included."""
    imports_done: int = 0
    imports_refused: int = 0
    """Of them: another namespace, geometry or identity, or of no use here."""
    imports_failed: int = 0
    """Of them: withdrawn, expired, peer gone, pull failed."""
    imports_given_up: int = 0
    """Of them: given up by the owner."""
    pulls: int = 0
    pulls_failed: int = 0
    """Of them: peer or link gone, or a checksum that differed."""
    mismatches: int = 0
    """Of them: a checksum that differed."""
    pulled_bytes: int = 0
    pulled_dram_bytes: int = 0
    """Of them: out of the owner's DRAM."""
    pulled_saved_bytes: int = 0
    """Of them: bytes that did not travel, since what came was encoded."""
    pulled_codec_ns: int = 0
    """Time of the codec for that, at both ends."""
    pulled_blocks: int = 0
    """Blocks that completed imports pulled."""
    reused_blocks: int = 0
    """Blocks of completed imports that were here already."""
    fetches: int = 0
    fetch_timeouts: int = 0
    fetched_blocks: int = 0
    remote_allocations: int = 0
    """Blocks allocated here for peers."""
