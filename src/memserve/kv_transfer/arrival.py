"""One import: what is offered, where it goes, which pages have come (level 1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memserve.kv_transfer.context import Place
from memserve.mempool.pool import Lease
from memserve.messages import Handoff, Offer, Peer, Ready
from memserve.types import Tier, TokenArray
from memserve.units import ceil_div


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
    """The own prefix before ``first_block``, as far as it is cached: pinned, so that what comes finds it."""
    over: bool = False


@dataclass(slots=True, eq=False)
class Placement:
    """Where an import goes. Block ``base + i`` of the tokens is ``blocks[i]``."""

    base: int
    lease: Lease
    """The prefix that was here already: its blocks are the first of ``blocks`` and hold their references."""
    blocks: list[int]
    """Those behind the lease's lie on ``tier``, one reference each."""
    tier: Tier
    fence: int
    """The plan that has to finish before anybody else may write to them."""
    announced: NDArray[np.bool_]
    """``[blocks to pull, layers]``: a ``Ready`` has named the page."""
    arrived: NDArray[np.bool_]
    """The same: the page is here, and its checksum was right."""

    @property
    def pull_from(self) -> int:
        """The first block that has to be pulled, counted from the start of the tokens; they run to the end."""
        return self.base + len(self.lease.blocks)

    @property
    def own(self) -> list[int]:
        """The blocks to pull into."""
        return self.blocks[len(self.lease.blocks) :]

    @property
    def complete(self) -> bool:
        """Every page has come."""
        return bool(self.arrived.all())

    @property
    def unbroken_blocks(self) -> int:
        """Blocks to pull that have come in full, before the first that has not."""
        broken = np.flatnonzero(~self.arrived.all(axis=1))
        return int(broken[0]) if broken.size else self.arrived.shape[0]


@dataclass(slots=True, eq=False)
class Import:
    """An offer of a peer that has not ended."""

    sender: Peer
    offer: Offer
    deadline_ns: int
    fetching: Fetching | None
    end_block: int
    """Behind the last block that is to come; blocks count from the start of the tokens."""
    sources: list[Place]
    """The peer's blocks ``offer.first_block`` and following, as far as it has named them."""
    placed: Placement | None = None
    early: list[Ready] = field(default_factory=list)
    """What was said before there was a place."""
    handoff: Handoff | None = None
    over: bool = False

    @property
    def transfer_id(self) -> str:
        """The offer's."""
        return self.offer.transfer_id

    @property
    def uses_index(self) -> bool:
        """Whether the own index is read and filled."""
        request = self.offer.request
        return self.offer.insert and (request is None or request.use_cache)

    @property
    def sources_end(self) -> int:
        """Behind the last block that the peer has named."""
        return self.offer.first_block + len(self.sources)

    def __repr__(self) -> str:
        kind = "handoff" if self.offer.request is not None else "fetch" if self.fetching is not None else "transfer"
        state = "waiting" if self.placed is None else f"{int(self.placed.arrived.sum())} of {self.placed.arrived.size}"
        return f"<Import {kind} {self.transfer_id} {state}>"


def end_block_of(offer: Offer, block_tokens: int) -> int:
    """Behind the last block that an offer will bring: all of a handoff's tokens, the whole blocks of an insertion, and
    of a raw transfer what it names."""
    named = offer.first_block + len(offer.blocks) + len(offer.dram_blocks)
    if offer.request is not None:
        return ceil_div(len(offer.tokens), block_tokens)
    return min(named, len(offer.tokens) // block_tokens) if offer.insert else named


def malformed(offer: Offer, block_tokens: int, num_blocks: dict[Tier, int]) -> str | None:
    """Why an offer makes no sense, whoever says it; ``None`` when it does. ``num_blocks`` are the own tiers."""
    named, end = len(offer.blocks) + len(offer.dram_blocks), end_block_of(offer, block_tokens)
    if offer.tier not in num_blocks or offer.dst_tier not in num_blocks:
        return "no such tier"
    if offer.request is not None and (offer.dst_blocks or offer.dst_tier != Tier.HBM or not len(offer.tokens)):
        return "a handoff that chooses its place, or is about nothing"
    if offer.request is not None and offer.request.isolation != offer.tenant:
        return "a handoff of one tenant's KV to another one's request"
    if end <= offer.first_block or (offer.request is not None and offer.first_block + named > end):
        return f"blocks from {offer.first_block} of {end}"
    if offer.dst_blocks and len(offer.dst_blocks) != end - offer.first_block:
        return f"{len(offer.dst_blocks)} destinations for {end - offer.first_block} blocks"
    if len(set(offer.dst_blocks)) != len(offer.dst_blocks):
        return "one destination twice"
    if end - offer.first_block > num_blocks[offer.dst_tier]:
        return f"{end - offer.first_block} blocks do not fit here"
    return None
