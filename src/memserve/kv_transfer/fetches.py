"""KV that peers were asked for, until they offer it (level 1)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memserve.errors import check
from memserve.kv_transfer.arrival import Fetching
from memserve.kv_transfer.context import Deadlines, Place, TransferContext, is_gone
from memserve.kv_transfer.outcomes import FetchEnded
from memserve.kv_transfer.placing import give_up
from memserve.messages import Fetch, Offer, Peer, Release
from memserve.types import Tier, TokenArray


class Fetches:
    """Fetches without an offer yet. With its offer a fetch becomes an import, which answers for it then."""

    def __init__(self, context: TransferContext, deadlines: Deadlines) -> None:
        self._context = context
        self._deadlines = deadlines
        self.open: dict[str, Fetching] = {}

    def ask(self, holder: Peer, tenant: str, tokens: TokenArray, blocks: tuple[int, int], deadline_ns: int) -> str:
        """Ask for blocks ``[begin, end)`` of ``tokens``; what is cached before them is pinned."""
        context, block_tokens = self._context, self._context.pool.block_tokens
        check(0 <= blocks[0] < blocks[1] <= len(tokens) // block_tokens, f"no blocks {blocks} to fetch")
        tokens = tokens[: blocks[1] * block_tokens]
        lease = context.pool.acquire(tenant, tokens[: blocks[0] * block_tokens])
        fetching = Fetching(context.new_transfer_id(), holder, tenant, tokens, blocks[0], deadline_ns, lease)
        self.open[fetching.transfer_id] = fetching
        self._deadlines.add(fetching)
        context.counters.fetches += 1
        context.send(holder, Fetch(fetching.transfer_id, tenant, tokens, *blocks))
        return fetching.transfer_id

    def may_answer(self, sender: Peer, offer: Offer) -> bool:
        """Whether an offer answers nothing that was asked of somebody else, or is wanted no longer (it is sent back
        then)."""
        fetching = self.open.get(offer.transfer_id)
        if fetching is None and self._context.is_mine(offer.transfer_id):
            self._context.send(sender, Release(offer.transfer_id, False, "no longer wanted"))
            return False
        return fetching is None or fetching.holder == sender

    def claim(self, transfer_id: str) -> Fetching | None:
        """The fetch that an offer answers: from now on it is the import's."""
        fetching = self.open.pop(transfer_id, None)
        if fetching is not None:
            fetching.over = True  # the import has its deadline and its lease now
        return fetching

    def give_up(self, transfer_id: str) -> None:
        """Nobody waits for it any more."""
        if transfer_id in self.open:
            self._end(self.open[transfer_id])

    def withdrawn(self, sender: Peer, transfer_id: str, reason: str) -> None:
        """The holder has nothing of it."""
        fetching = self.open.get(transfer_id)
        if fetching is not None and fetching.holder == sender:
            self._fail(fetching, reason)

    def expire(self, fetching: Fetching) -> None:
        """No offer came in time."""
        self._context.counters.fetch_timeouts += 1
        self._fail(fetching, "no offer in time")

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """``peer`` will not answer."""
        for fetching in [asked for asked in self.open.values() if is_gone(asked.holder, peer)]:
            self._fail(fetching, reason)

    def fail_all(self, reason: str) -> None:
        """All end."""
        for fetching in list(self.open.values()):
            self._fail(fetching, reason)

    def drop_all(self) -> None:
        """All end without a word."""
        for fetching in list(self.open.values()):
            self._end(fetching)

    def _fail(self, fetching: Fetching, reason: str) -> None:
        self._end(fetching)
        self._context.outcomes.append(FetchEnded(fetching.transfer_id, False, 0, reason))

    def _end(self, fetching: Fetching) -> None:
        del self.open[fetching.transfer_id]
        fetching.over = True
        give_up(self._context, fetching.lease)

    def references(self) -> Counter[Place]:
        """Every reference that fetches hold."""
        return Counter((Tier.HBM, block) for asked in self.open.values() for block in asked.lease.blocks)


def answers(offer: Offer, fetching: Fetching) -> bool:
    """Whether the offer is about what was asked for: a part of it will do."""
    asked = fetching.tokens[: len(offer.tokens)]
    return (
        (offer.tenant, offer.first_block) == (fetching.tenant, fetching.first_block)
        and offer.insert
        and offer.request is None
        and not offer.dst_blocks
        and bool(np.array_equal(offer.tokens, asked))
    )
