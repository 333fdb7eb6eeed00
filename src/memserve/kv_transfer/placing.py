"""Where an import goes: the own cache first, then new blocks (level 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memserve.errors import check
from memserve.kv_transfer.arrival import Import, Placement, malformed
from memserve.kv_transfer.barriers import Barriers
from memserve.kv_transfer.context import TransferContext
from memserve.kv_transfer.remote_allocation import Remote
from memserve.mempool.pool import Lease
from memserve.messages import Offer
from memserve.types import Tier


@dataclass(frozen=True, slots=True)
class Never:
    """No place, however long it waits."""

    reason: str


def objection(context: TransferContext, offer: Offer) -> str | None:
    """What forbids to take an offer, whoever it is from and whatever room there is; ``None`` = nothing."""
    pool = context.pool
    reason = malformed(offer, pool.block_tokens, {tier: context.blocks_total(tier) for tier in (Tier.HBM, Tier.DRAM)})
    if reason is not None:
        return reason
    if offer.identity != pool.identity(offer.tenant, offer.tokens):
        return "another identity: namespace, key, tenant or tokens differ"
    if offer.insert and offer.request is None and not pool.config.caching:
        return "nothing is cached here"
    return None


def place(
    context: TransferContext, remote: Remote, barriers: Barriers, imported: Import, headroom_blocks: int
) -> Placement | Never | None:
    """A place for an import to which there was no objection; ``None`` = no room now, and nothing is held.

    A handoff and an insertion begin at the first token: what the own cache has is pinned and referenced, the rest is
    allocated, or is ``dst_blocks``. A raw transfer has no use for the cache.
    """
    offer, pool = imported.offer, context.pool
    reason = context.misfit(imported.sender) or remote.refusal(imported.sender, offer.dst_tier, offer.dst_blocks)
    if reason is not None:
        return Never(reason)
    if offer.request is None and not offer.insert:
        return _extend(context, barriers, imported, Lease(), offer.first_block, headroom_blocks)
    reach = offer.first_block if offer.dst_blocks else imported.end_block
    reusable = offer.tokens[: reach * pool.block_tokens if imported.uses_index else 0]
    in_hbm, in_dram = pool.match_blocks(offer.tenant, reusable)
    if in_hbm + in_dram < offer.first_block:
        return Never(f"of the {offer.first_block} blocks before the offer {in_hbm + in_dram} are cached here")
    allocates = offer.dst_tier == Tier.HBM and not offer.dst_blocks
    if allocates and imported.end_block - in_hbm + headroom_blocks > pool.available():
        return None  # without having touched anything: this is asked on every event while there is no room
    lease = pool.acquire(offer.tenant, reusable)
    if len(lease.blocks) >= offer.first_block:
        placed = _extend(context, barriers, imported, lease, 0, headroom_blocks)
        if placed is not None:
            return placed
    give_up(context, lease)  # no room to bring up from DRAM what comes before the offer, or for the rest of it
    return None


def give_up(context: TransferContext, lease: Lease) -> None:
    """Unpin a prefix and drop the references that came with it."""
    context.pool.unpin(lease)
    context.pool.release(lease.blocks)


def _extend(
    context: TransferContext, barriers: Barriers, imported: Import, lease: Lease, base: int, headroom_blocks: int
) -> Placement | None:
    """The lease's blocks, which are block ``base`` and following, and new ones up to the import's end."""
    tier = imported.offer.dst_tier
    count = imported.end_block - base - len(lease.blocks)
    if imported.offer.dst_blocks:
        new = list(imported.offer.dst_blocks)
        check(len(new) == count, f"{imported!r}: {len(new)} destinations for {count} blocks")
        context.retain(tier, new)
    else:
        got = context.allocate(tier, count, headroom_blocks)
        if got is None:
            return None
        new = got
    pages = (count, context.geometry.num_layers)
    return Placement(
        base=base,
        lease=lease,
        blocks=lease.blocks + new,
        tier=tier,
        fence=barriers.safe_to_overwrite(tier, new),  # behind the allocation: it may have recorded copies
        announced=np.zeros(pages, dtype=np.bool_),
        arrived=np.zeros(pages, dtype=np.bool_),
    )
