"""One import: what is offered, the blocks where it goes, the pages that have come, and what it leaves behind.

``receiver`` has all of them and decides; this module knows how a single one is placed and how it ends. Each function
that ends an import leaves nothing held.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import check
from memserve.base.state_table import Transitions
from memserve.base.types import Tier, TokenArray
from memserve.base.units import ceil_div
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.barriers import Barriers
from memserve.kv.transfer.context import Place, TransferContext
from memserve.kv.transfer.events import (
    Delivered,
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    Inserted,
    LayersArrived,
    StripeLost,
)
from memserve.kv.transfer.remote_allocation import RemoteAllocation
from memserve.protocol.messages import Handoff, Offer, Ready, Release
from memserve.protocol.peers import Peer


class ImportPhase(enum.Enum):
    """How far an import has come."""

    OFFERED = enum.auto()
    WAITING_FOR_SENDER = enum.auto()
    """The news that its sender is a member is still on its way."""
    WAITING_FOR_ROOM = enum.auto()
    PULLING = enum.auto()
    """The import has blocks, into which its pages are pulled."""
    ENDED = enum.auto()


class ImportCause(enum.Enum):
    """Why an import goes on, or ends."""

    SENDER_UNKNOWN = enum.auto()
    SENDER_KNOWN = enum.auto()
    PLACED = enum.auto()
    COMPLETED = enum.auto()
    """Everything has come; of a fetch whose time is up, at least its beginning."""
    REFUSED = enum.auto()
    """Another namespace, geometry or identity, or of no use here."""
    FAILED = enum.auto()
    GIVEN_UP = enum.auto()
    """The own side wants it no longer."""


_OPEN = ImportPhase.WAITING_FOR_SENDER, ImportPhase.WAITING_FOR_ROOM, ImportPhase.PULLING

IMPORT = Transitions(
    "Import",
    ImportPhase.OFFERED,
    {
        (ImportPhase.OFFERED, ImportCause.REFUSED): ImportPhase.ENDED,
        (ImportPhase.OFFERED, ImportCause.SENDER_UNKNOWN): ImportPhase.WAITING_FOR_SENDER,
        (ImportPhase.OFFERED, ImportCause.SENDER_KNOWN): ImportPhase.WAITING_FOR_ROOM,
        (ImportPhase.WAITING_FOR_SENDER, ImportCause.SENDER_KNOWN): ImportPhase.WAITING_FOR_ROOM,
        (ImportPhase.WAITING_FOR_ROOM, ImportCause.REFUSED): ImportPhase.ENDED,
        (ImportPhase.WAITING_FOR_ROOM, ImportCause.PLACED): ImportPhase.PULLING,
        (ImportPhase.PULLING, ImportCause.COMPLETED): ImportPhase.ENDED,
        **{(phase, ImportCause.FAILED): ImportPhase.ENDED for phase in _OPEN},
        **{(phase, ImportCause.GIVEN_UP): ImportPhase.ENDED for phase in _OPEN},
    },
)


@dataclass(slots=True, eq=False)
class Fetching:
    """KV that a peer was asked for."""

    transfer_id: str
    holder: Peer
    tenant: str
    tokens: TokenArray
    first_block: int
    deadline_ns: int
    lease: Lease
    """The own prefix before ``first_block``, as far as it is cached: pinned until the fetch ends."""
    state_blocks: int = 0
    """Blocks of the recurrent state that is wanted as well."""
    identities: bytes = b""
    """Of the blocks that are wanted of one of several stores. Empty: those of ``tokens`` are."""
    over: bool = False
    """The fetch has ended, or its import answers for it."""


@dataclass(slots=True, eq=False)
class ImportPlacement:
    """Where an import goes. Block ``base + i`` of the tokens is ``blocks[i]``."""

    base: int
    lease: Lease
    """The prefix that was here already: its blocks are the first of ``blocks`` and hold their references."""
    blocks: list[int]
    """Those behind the lease's lie on ``tier``, one reference each."""
    tier: Tier
    fence: int
    """The plan that has to finish before the blocks behind the lease's may be written."""
    announced: NDArray[np.bool_]
    """``[blocks to pull, layers]``: a ``Ready`` has named the page."""
    arrived: NDArray[np.bool_]
    """``[blocks to pull, layers]``: the page is here, and its checksum was right."""

    @property
    def pull_from(self) -> int:
        """The first block that has to be pulled, counted from the start of the tokens; they run to the end."""
        return self.base + len(self.lease.blocks)

    @property
    def target_blocks(self) -> list[int]:
        """The blocks to pull into."""
        return self.blocks[len(self.lease.blocks) :]

    @property
    def is_complete(self) -> bool:
        return bool(self.arrived.all())

    @property
    def whole_layers(self) -> int:
        """Layers of which all pages have come, before the first of which some have not."""
        broken = np.flatnonzero(~self.arrived.all(axis=0))
        return int(broken[0]) if broken.size else self.arrived.shape[1]

    @property
    def unbroken_blocks(self) -> int:
        """Blocks to pull that have come in full, before the first that has not; those of a state are the last."""
        broken = np.flatnonzero(~self.arrived.all(axis=1))
        return int(broken[0]) if broken.size else self.arrived.shape[0]


@dataclass(slots=True, eq=False)
class Import:
    """An offer of a peer."""

    sender: Peer
    offer: Offer
    deadline_ns: int
    fetching: Fetching | None
    """None: the peer offers without having been asked."""
    end_block: int
    """Behind the last block that is to come; blocks count from the start of the tokens."""
    sources: list[Place]
    """The peer's blocks ``offer.first_block`` and following, as far as it has named them."""
    phase: ImportPhase = IMPORT.initial
    placement: ImportPlacement | None = None
    early: list[Ready] = field(default_factory=list)
    """Pages that were ready before there was a place for them."""
    handoff: Handoff | None = None
    layers_told: int = 0
    """Of a stripe: its owner has heard of so many layers."""

    def advance_phase(self, cause: ImportCause) -> None:
        """Go on, or end. Raises :class:`InvariantError` where ``IMPORT`` has no such move."""
        self.phase = IMPORT.next_phase(self.phase, cause)

    @property
    def over(self) -> bool:
        """Whether the import has ended."""
        return self.phase is ImportPhase.ENDED

    @property
    def transfer_id(self) -> str:
        return self.offer.transfer_id

    @property
    def uses_index(self) -> bool:
        """Whether the own index is read and filled."""
        request = self.offer.request
        return self.offer.insert and (request is None or request.use_cache)

    @property
    def is_unasked(self) -> bool:
        """Whether it is for the own cache, and neither a request nor a caller here waits for it."""
        offer = self.offer
        return offer.insert and offer.request is None and self.fetching is None and not offer.dst_blocks

    @property
    def kv_end(self) -> int:
        """Behind the last block with KV: the rest holds the recurrent state behind all tokens."""
        return self.end_block - self.offer.state_blocks

    @property
    def sources_end(self) -> int:
        """Behind the last block that the peer has named."""
        return self.offer.first_block + len(self.sources)

    def __repr__(self) -> str:
        kind = "handoff" if self.offer.request is not None else "fetch" if self.fetching is not None else "transfer"
        pages = (
            "" if self.placement is None else f" {int(self.placement.arrived.sum())} of {self.placement.arrived.size}"
        )
        return f"<Import {kind} {self.transfer_id} {self.phase.name.lower()}{pages}>"


@dataclass(slots=True, eq=False)
class RoomWait:
    """How long KV may wait for room that no request waits for.

    Its sender holds blocks for it, for whose room handoffs may wait, and the own side holds blocks for those: without
    an end, all of them would wait for each other until a lease ends."""

    imported: Import
    deadline_ns: int

    @property
    def over(self) -> bool:
        """Whether the import has a place, or has ended."""
        return self.imported.phase is not ImportPhase.WAITING_FOR_ROOM


def end_block_of(offer: Offer, block_tokens: int) -> int:
    """Behind the last block that an offer will bring: all of a handoff's tokens, the whole blocks of an insertion, and
    the named blocks of a raw transfer; with those of a state, which count on behind the tokens'."""
    named_end = offer.first_block + len(offer.blocks) + len(offer.dram_blocks)
    if offer.request is not None:
        return ceil_div(len(offer.tokens), block_tokens) + offer.state_blocks
    whole = len(offer.tokens) // block_tokens + offer.state_blocks
    return min(named_end, whole) if offer.insert else named_end


# -- a place: the own cache first, then new blocks


@dataclass(frozen=True, slots=True)
class NoPlace:
    """There will never be a place for the import."""

    reason: str


def objection(context: TransferContext, offer: Offer) -> str | None:
    """Why an offer is not taken from any sender, with any room. None: it may be taken."""
    pool = context.pool
    totals = {tier: context.blocks_total(tier) for tier in (Tier.HBM, Tier.DRAM)}
    in_either = context.room.parked is not None and _is_one_line(offer)
    reason = _malformed(offer, pool.block_tokens, totals, in_either=in_either)
    if reason is not None:
        return reason
    if offer.layers is not None:
        first, end = offer.layers
        if not (offer.dst_blocks and first < end <= context.geometry.num_layers):
            return f"layers {first} to {end} of {context.geometry.num_layers}, into {len(offer.dst_blocks)} blocks"
    if offer.identity != pool.identity(offer.tenant, offer.tokens):
        return "another identity: namespace, key, tenant or tokens differ"
    if offer.insert and offer.request is None and not pool.config.caching:
        return "nothing is cached here"
    if offer.part_of and (offer.insert or offer.request is not None or offer.dst_blocks):
        return "a stripe that goes anywhere but into its sequence"
    return _objection_to_state(offer, pool.blocks_behind(len(offer.tokens)), pool.block_tokens)


def _objection_to_state(offer: Offer, state_blocks: int, block_tokens: int) -> str | None:
    """KV of a handoff is of no use without the state behind it, nor is a state that is not behind it."""
    if offer.request is not None:
        return None if offer.state_blocks == state_blocks else f"a state of {offer.state_blocks} blocks"
    if not (offer.insert and offer.state_blocks):
        return None
    end = offer.first_block + len(offer.blocks) + len(offer.dram_blocks)
    if offer.state_blocks != state_blocks or end * block_tokens != len(offer.tokens) + state_blocks * block_tokens:
        return f"a state of {offer.state_blocks} blocks, not behind the tokens"
    return None


def _malformed(offer: Offer, block_tokens: int, num_blocks: dict[Tier, int], *, in_either: bool) -> str | None:
    """Why an offer contradicts itself or the sizes of the own tiers. None: it does not. ``in_either``: it may go to
    another tier than it asks for."""
    named_count, end = len(offer.blocks) + len(offer.dram_blocks), end_block_of(offer, block_tokens)
    if offer.tier not in num_blocks or offer.dst_tier not in num_blocks:
        return "no such tier"
    if offer.request is not None and (offer.dst_blocks or offer.dst_tier != Tier.HBM or not len(offer.tokens)):
        return "a handoff that names its destination, or has no tokens"
    if offer.request is not None and offer.request.isolation != offer.tenant:
        return "a handoff of one tenant's KV to another one's request"
    if end <= offer.first_block or (offer.request is not None and offer.first_block + named_count > end):
        return f"blocks from {offer.first_block} of {end}"
    if offer.dst_blocks and len(offer.dst_blocks) != end - offer.first_block:
        return f"{len(offer.dst_blocks)} destinations for {end - offer.first_block} blocks"
    if len(set(offer.dst_blocks)) != len(offer.dst_blocks):
        return "one destination twice"
    if end - offer.first_block > (max(num_blocks.values()) if in_either else num_blocks[offer.dst_tier]):
        return f"{end - offer.first_block} blocks do not fit here"
    return None


def place_import(
    context: TransferContext, remote: RemoteAllocation, barriers: Barriers, imported: Import
) -> ImportPlacement | NoPlace | None:
    """A place for an import to which there was no objection. None: no room now, and nothing is held.

    A handoff and an insertion begin at the first token: the cached prefix is pinned and referenced, the rest is
    allocated, or is ``dst_blocks``. A raw transfer has no use for the cache.
    """
    offer, pool = imported.offer, context.pool
    reason = context.incompatibility(imported.sender) or remote.refusal_for(
        imported.sender, offer.dst_tier, offer.dst_blocks
    )
    if reason is not None:
        return NoPlace(reason)
    if offer.request is None and not offer.insert:
        if imported.fetching is not None and len(imported.sources) + context.room.headroom_blocks > pool.available():
            return None
        return _allocate_placement(context, barriers, imported, Lease(), offer.first_block)
    # where the sender names the blocks, what is cached here cannot take their place
    reach = offer.first_block if offer.dst_blocks else imported.kv_end
    reusable = offer.tokens[: reach * pool.block_tokens if imported.uses_index else 0]
    in_hbm, in_dram = pool.match_kv_blocks(offer.tenant, reusable)
    if in_hbm + in_dram < offer.first_block:
        return NoPlace(f"of the {offer.first_block} blocks before the offer {in_hbm + in_dram} are cached here")
    allocates = offer.dst_tier == Tier.HBM and not offer.dst_blocks
    room = context.room
    fits = imported.end_block - in_hbm + room.headroom_blocks <= pool.available()
    if room.parked is not None and (room.parked or not fits) and _is_one_line(offer) and not offer.first_block:
        # without the cached prefix: what is pinned in HBM for a sequence that waits in DRAM is HBM lost
        below = _allocate_placement(context, barriers, imported, Lease(), 0, Tier.DRAM)
        if below is not None:
            return below
    if allocates and not fits:
        return None  # nothing was touched: this is asked on every event while there is no room
    lease = pool.acquire_kv(offer.tenant, reusable)
    if len(lease.blocks) >= offer.first_block:
        placement = _allocate_placement(context, barriers, imported, lease, 0)
        if placement is not None:
            return placement
    give_up_lease(context, lease)  # no room to bring up from DRAM what comes before the offer, or for the rest of it
    return None


def _is_one_line(offer: Offer) -> bool:
    """Whether a handoff goes on as one line of tokens."""
    request = offer.request
    return request is not None and request.n == 1 and not request.beam_width


def give_up_lease(context: TransferContext, lease: Lease) -> None:
    """Unpin a prefix and drop the references that came with it."""
    context.pool.unpin(lease)
    context.pool.release(lease.blocks)


def place_stripe(
    context: TransferContext, barriers: Barriers, imported: Import, blocks: list[int]
) -> ImportPlacement | NoPlace:
    """``blocks`` of the own sequence for the last blocks of a stripe: those before them are cached here."""
    reason = context.incompatibility(imported.sender)
    if reason is not None:
        return NoPlace(reason)
    base = imported.end_block - len(blocks)
    placement = _allocate_placement(context, barriers, imported, Lease(), base, into=blocks)
    return placement if placement is not None else NoPlace("no blocks")


def _allocate_placement(
    context: TransferContext,
    barriers: Barriers,
    imported: Import,
    lease: Lease,
    base: int,
    tier: Tier | None = None,
    into: Sequence[int] = (),
) -> ImportPlacement | None:
    """The lease's blocks, which are block ``base`` and following, and new ones up to the import's end, on ``tier``
    (None: as the offer says), or blocks of others: ``into`` or those that the offer names."""
    tier = imported.offer.dst_tier if tier is None else tier
    count = imported.end_block - base - len(lease.blocks)
    if into or imported.offer.dst_blocks:
        new = list(into or imported.offer.dst_blocks)
        check(len(new) == count, "{!r}: {} destinations for {} blocks", imported, len(new), count)
        context.retain(tier, new)
    else:
        allocated = context.allocate(tier, count)
        if allocated is None:
            return None
        new = allocated
    pages = (count, context.geometry.num_layers)
    placement = ImportPlacement(
        base=base,
        lease=lease,
        blocks=lease.blocks + new,
        tier=tier,
        fence=barriers.safe_to_overwrite(tier, new),  # behind the allocation: it may have recorded copies
        announced=np.zeros(pages, dtype=np.bool_),
        arrived=np.zeros(pages, dtype=np.bool_),
    )
    if imported.offer.state_blocks and (imported.offer.insert or imported.offer.request is not None):
        placement.arrived[-1, context.state_layers :] = True  # the state does not reach them, come or not
    if imported.offer.layers is not None:
        first, end = imported.offer.layers
        for pages_there in (placement.announced, placement.arrived):
            pages_there[:, :first] = pages_there[:, end:] = True
    return placement


# -- the end


def complete_import(context: TransferContext, imported: Import, placement: ImportPlacement, reason: str = "") -> None:
    """Give the blocks that have come to their new holder. Of a fetch they may be the beginning only: ``reason``."""
    counters = context.counters
    counters.imports_done += 1
    counters.pulled_blocks += max(0, min(placement.unbroken_blocks, imported.kv_end - placement.pull_from))
    counters.reused_blocks += len(placement.lease.blocks)
    context.send(imported.sender, Release(imported.transfer_id))
    if imported.handoff is not None:
        _hand_over(context, imported, placement, imported.handoff)
    elif imported.offer.part_of:
        release_import(context, imported)
        context.outcomes.append(LayersArrived(imported.transfer_id, imported.offer, context.geometry.num_layers))
    elif imported.offer.insert:
        _insert(context, imported, placement, reason)
    elif imported.offer.layers is not None:
        release_import(context, imported)  # other layers follow: the blocks are the sender's until it has sent all
    else:
        blocks, whole = placement.blocks, placement.unbroken_blocks
        context.release(placement.tier, blocks[whole:])  # of a fetch whose time is up
        delivered = Delivered(imported.transfer_id, imported.sender, imported.offer, blocks[:whole])
        context.outcomes.append(delivered)  # with the references


def report_failure(context: TransferContext, imported: Import, reason: str) -> None:
    """Tell the owner that the KV which it waits for will not come."""
    if imported.offer.request is not None:
        failed = HandoffFailed(imported.transfer_id, imported.sender, imported.offer, reason)
        context.outcomes.append(failed)
    elif imported.fetching is not None:
        context.outcomes.append(FetchEnded(imported.transfer_id, False, 0, reason, was_offered=True))
    elif imported.offer.part_of:
        context.outcomes.append(StripeLost(imported.transfer_id, imported.offer, reason))


def release_import(context: TransferContext, imported: Import) -> None:
    """Drop every reference and pin of an import; pulls under way keep their own."""
    if imported.fetching is not None:
        give_up_lease(context, imported.fetching.lease)
    if imported.placement is not None:
        target_blocks = imported.placement.target_blocks
        give_up_lease(context, imported.placement.lease)
        context.release(imported.placement.tier, target_blocks)


def _hand_over(context: TransferContext, imported: Import, placement: ImportPlacement, handoff: Handoff) -> None:
    """The blocks go to the sequences that decode; whole ones into the index, if the request may use it."""
    lease: Lease | None = None
    kv_count, reused = imported.kv_end - placement.base, len(placement.lease.blocks)
    blocks, state = placement.blocks[:kv_count], placement.blocks[kv_count:]
    if imported.uses_index and placement.tier is Tier.HBM:
        lease, blocks = _share(context, imported, placement, blocks)
    outcome = HandoffArrived(
        transfer_id=imported.transfer_id,
        sender=imported.sender,
        offer=imported.offer,
        blocks=blocks,
        lease=lease,
        first_tokens=handoff.first_tokens,
        ended_indices=handoff.ended,
        pulled_blocks=kv_count - reused,
        reused_blocks=reused,
        tier=placement.tier,
        state=state,
        emitted_outputs=handoff.told,
    )
    context.outcomes.append(outcome)


def _share(
    context: TransferContext, imported: Import, placement: ImportPlacement, blocks: list[int]
) -> tuple[Lease, list[int]]:
    """Publish the whole ones of ``blocks``, all that there are of the tokens, and take the index's in their stead.

    Mostly these are the blocks just published. Where the index has got the KV of these tokens from elsewhere meanwhile,
    it keeps that, and the blocks of this import are free.
    """
    offer, pool = imported.offer, context.pool
    whole = len(offer.tokens) // pool.block_tokens
    if not pool.config.caching or whole == 0:
        return placement.lease, blocks
    tokens = offer.tokens[: whole * pool.block_tokens]
    # no plan wrote these blocks, so none has to finish before others read them
    pool.publish(placement.lease, offer.tenant, tokens, blocks[:whole], written_by=0)
    lease = pool.acquire_kv(offer.tenant, tokens)
    check(len(lease.blocks) == whole and not lease.dram_tokens, "what was just published is not all in HBM")
    pool.unpin(placement.lease)
    pool.release(blocks[:whole])
    return lease, lease.blocks + blocks[whole:]


def _insert(context: TransferContext, imported: Import, placement: ImportPlacement, reason: str) -> None:
    """The blocks go into the index, which alone holds them, and the state behind them among its snapshots."""
    offer, pulled = imported.offer, min(placement.unbroken_blocks, imported.kv_end - placement.pull_from)
    end = placement.pull_from + pulled
    in_hbm = end if placement.tier == Tier.HBM else placement.pull_from
    tokens = offer.tokens[: end * context.pool.block_tokens]
    # before the references are released: the index must hold the blocks, or they would be free for a moment
    context.pool.insert(offer.tenant, tokens, placement.blocks[: end - placement.base], in_hbm)
    has_state = offer.state_blocks > 0 and placement.is_complete
    if has_state:
        context.pool.insert_state(offer.tenant, tokens, placement.blocks[-offer.state_blocks :])
    release_import(context, imported)
    if imported.fetching is None:
        context.outcomes.append(Inserted(imported.transfer_id, imported.sender, offer, len(tokens), pulled))
    else:
        context.counters.fetched_blocks += pulled
        ended = FetchEnded(imported.transfer_id, True, len(tokens), reason, pulled, has_state)
        context.outcomes.append(ended)
