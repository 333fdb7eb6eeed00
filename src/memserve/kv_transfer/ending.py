"""What becomes of an import when it ends (level 1). Each function leaves nothing held."""

from __future__ import annotations

from memserve.errors import check
from memserve.kv_transfer.arrival import Import, Placement
from memserve.kv_transfer.context import TransferContext
from memserve.kv_transfer.outcomes import Delivered, FetchEnded, HandoffArrived, HandoffFailed, Inserted
from memserve.kv_transfer.placing import give_up
from memserve.mempool.pool import Lease
from memserve.messages import Handoff, Release
from memserve.types import Tier


def completed(context: TransferContext, imported: Import, placed: Placement, reason: str = "") -> None:
    """Everything that was wanted has come (of a fetch, perhaps only the beginning): whose it is now."""
    counters = context.counters
    pulled = placed.unbroken_blocks
    counters.imports_done += 1
    counters.pulled_blocks += pulled
    counters.reused_blocks += len(placed.lease.blocks)
    context.send(imported.sender, Release(imported.transfer_id))
    if imported.handoff is not None:
        _hand_over(context, imported, placed, imported.handoff)
    elif imported.offer.insert:
        _insert(context, imported, placed, reason)
    else:
        delivered = Delivered(imported.transfer_id, imported.sender, imported.offer, placed.blocks)
        context.outcomes.append(delivered)  # its references are the receiver's


def ended_badly(context: TransferContext, imported: Import, reason: str) -> None:
    """Tell the owner that what it waits for will not come."""
    if imported.offer.request is not None:
        failed = HandoffFailed(imported.transfer_id, imported.sender, imported.offer, reason)
        context.outcomes.append(failed)
    elif imported.fetching is not None:
        context.outcomes.append(FetchEnded(imported.transfer_id, False, 0, reason))


def give_back(context: TransferContext, imported: Import) -> None:
    """Drop every reference and pin of an import; pulls under way keep their own."""
    if imported.fetching is not None:
        give_up(context, imported.fetching.lease)
    if imported.placed is not None:
        own = imported.placed.own
        give_up(context, imported.placed.lease)
        context.release(imported.placed.tier, own)


def _hand_over(context: TransferContext, imported: Import, placed: Placement, handoff: Handoff) -> None:
    """The blocks go to whoever decodes; whole ones into the index, if the request may use it."""
    lease: Lease | None = None
    blocks, pulled, reused = placed.blocks, len(placed.own), len(placed.lease.blocks)
    if imported.uses_index:
        lease, blocks = _share(context, imported, placed)
    outcome = HandoffArrived(
        transfer_id=imported.transfer_id,
        sender=imported.sender,
        offer=imported.offer,
        blocks=blocks,
        lease=lease,
        first_tokens=handoff.first_tokens,
        ended=handoff.ended,
        pulled_blocks=pulled,
        reused_blocks=reused,
    )
    context.outcomes.append(outcome)


def _share(context: TransferContext, imported: Import, placed: Placement) -> tuple[Lease, list[int]]:
    """Publish the whole blocks and take the index's in their stead.

    Mostly they are the same. Where somebody else has brought or computed the same tokens meanwhile, the index keeps
    what it has, and one copy is enough: ours are free.
    """
    offer, pool = imported.offer, context.pool
    whole = len(offer.tokens) // pool.block_tokens
    if not pool.config.caching or whole == 0:
        return placed.lease, placed.blocks
    tokens = offer.tokens[: whole * pool.block_tokens]
    pool.publish(placed.lease, offer.tenant, tokens, placed.blocks[:whole], written_by=0)
    lease = pool.acquire(offer.tenant, tokens)
    check(len(lease.blocks) == whole and not lease.dram_tokens, "what was just published is not all in HBM")
    pool.unpin(placed.lease)
    pool.release(placed.blocks[:whole])
    return lease, lease.blocks + placed.blocks[whole:]


def _insert(context: TransferContext, imported: Import, placed: Placement, reason: str) -> None:
    """The blocks go into the index; nobody holds them otherwise."""
    offer, pulled = imported.offer, placed.unbroken_blocks
    end = placed.pull_from + pulled
    in_hbm = end if placed.tier == Tier.HBM else placed.pull_from
    tokens = offer.tokens[: end * context.pool.block_tokens]
    context.pool.insert(offer.tenant, tokens, placed.blocks[:end], in_hbm)
    give_back(context, imported)
    if imported.fetching is None:
        context.outcomes.append(Inserted(imported.transfer_id, imported.sender, offer, len(tokens), pulled))
    else:
        context.counters.fetched_blocks += pulled
        context.outcomes.append(FetchEnded(imported.transfer_id, True, len(tokens), reason, pulled))
