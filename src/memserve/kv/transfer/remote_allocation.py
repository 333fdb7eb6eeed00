"""Memory at a peer: MemServe's ``alloc_mem`` and ``free_mem`` with an instance id.

Blocks that were allocated here for a peer are held for it until its ``Free``, its end, or the lease's. They are the
only blocks that it may name as the destination of a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memserve.base.types import Tier
from memserve.kv.transfer.context import Deadlines, PeerStatus, Place, TransferContext, is_gone
from memserve.kv.transfer.events import RemoteAllocated
from memserve.protocol.messages import Alloc, Allocated, Free
from memserve.protocol.peers import Peer


@dataclass(slots=True, eq=False)
class Allocation:
    """Own blocks that a peer holds."""

    peer: Peer
    call_id: str
    tier: Tier
    blocks: list[int]
    """A reference each."""
    deadline_ns: int
    over: bool = False


@dataclass(slots=True, eq=False)
class AllocCall:
    """A peer was asked for blocks."""

    peer: Peer
    call_id: str
    tier: Tier
    deadline_ns: int
    over: bool = False
    """The call was answered, or the time for an answer is over."""


class RemoteAllocation:
    """Allocations for peers, and at peers."""

    def __init__(self, context: TransferContext, deadlines: Deadlines) -> None:
        self._context = context
        self._deadlines = deadlines
        #: own blocks that peers hold, by holder and the holder's call id
        self._exported: dict[tuple[Peer, str], Allocation] = {}
        #: calls that wait for an answer
        self._calls: dict[str, AllocCall] = {}
        #: answered calls that were not given back: where the blocks are
        self._borrowed: dict[str, Peer] = {}

    # -- as the owner of memory

    def on_alloc(self, sender: Peer, message: Alloc, now_ns: int) -> None:
        """Allocate for a member. A message heard twice is answered twice alike."""
        context, key = self._context, (sender, message.call_id)
        if key not in self._exported:
            may = context.peers.status_of(sender) is PeerStatus.MEMBER and message.count > 0
            may = may and message.tier in (Tier.HBM, Tier.DRAM)
            blocks = context.allocate(message.tier, message.count) if may else None
            if blocks is None:
                context.send(sender, Allocated(message.call_id, None))
                return
            self._exported[key] = Allocation(sender, message.call_id, message.tier, blocks, now_ns + message.lease_ns)
            self._deadlines.add(self._exported[key])
            context.counters.remote_allocations += len(blocks)
        context.send(sender, Allocated(message.call_id, tuple(self._exported[key].blocks)))

    def on_free(self, sender: Peer, message: Free) -> None:
        """The holder gives an allocation back."""
        allocation = self._exported.get((sender, message.call_id))
        if allocation is not None:
            self.take_back(allocation)

    def take_back(self, allocation: Allocation) -> None:
        """Free an allocation whose lease or holder has ended."""
        del self._exported[allocation.peer, allocation.call_id]
        allocation.over = True
        self._context.release(allocation.tier, allocation.blocks)

    def refusal_for(self, peer: Peer, tier: Tier, blocks: Sequence[int]) -> str | None:
        """Why ``peer`` may not have ``blocks`` written to. None: it may.

        The blocks must have been allocated for ``peer``, and nothing else may refer to them: no transfer that is under
        way (or was given up while the host still writes), not the index (cached blocks never change), and not the
        receiver of an earlier transfer.
        """
        lent = [holding.blocks for holding in self._exported.values() if holding.peer == peer and holding.tier == tier]
        if not set(blocks) <= {block for holding in lent for block in holding}:
            return "destinations that were not allocated for the sender"
        if any(self._context.pool.ref_count(tier, block) > 1 for block in blocks):
            return "destinations that are in use: transferred to before, and not given up"
        return None

    # -- as the one that asks

    def request_blocks(self, peer: Peer, count: int, tier: Tier, deadline_ns: int) -> str:
        """Ask ``peer`` for blocks."""
        call = AllocCall(peer, self._context.new_transfer_id(), tier, deadline_ns)
        self._calls[call.call_id] = call
        self._deadlines.add(call)
        self._context.send(peer, Alloc(call.call_id, count, tier, self._context.config.lease_ns))
        return call.call_id

    def on_allocated(self, sender: Peer, message: Allocated) -> None:
        """An answer. Blocks of a call that has ended go back at once."""
        call = self._calls.get(message.call_id)
        if call is not None and call.peer == sender:
            if message.blocks is not None:
                self._borrowed[call.call_id] = sender
            self._end_call(call, message.blocks)
        elif message.blocks is not None and message.call_id not in self._borrowed:
            self._context.send(sender, Free(message.call_id))

    def give_back(self, call_id: str) -> None:
        """End a call, answered or not."""
        call = self._calls.pop(call_id, None)
        peer = self._borrowed.pop(call_id, None)
        if call is not None:
            call.over, peer = True, call.peer
        if peer is not None:
            self._context.send(peer, Free(call_id))

    def time_out(self, call: AllocCall) -> None:
        """No answer came in time. A late one is answered with ``Free``."""
        self._context.send(call.peer, Free(call.call_id))
        self._end_call(call, None)

    def _end_call(self, call: AllocCall, blocks: tuple[int, ...] | None) -> None:
        del self._calls[call.call_id]
        call.over = True
        self._context.outcomes.append(RemoteAllocated(call.call_id, call.peer, call.tier, blocks))

    # -- ends

    def peer_removed(self, peer: Peer) -> None:
        """Free the blocks that ``peer`` holds here, and forget those that it lent."""
        for allocation in [lent for lent in self._exported.values() if is_gone(lent.peer, peer)]:
            self.take_back(allocation)
        for call in [call for call in self._calls.values() if is_gone(call.peer, peer)]:
            self._end_call(call, None)
        self._borrowed = {call_id: owner for call_id, owner in self._borrowed.items() if not is_gone(owner, peer)}

    def drop_all(self) -> None:
        """End everything, silently."""
        for allocation in list(self._exported.values()):
            self.take_back(allocation)
        for call in self._calls.values():
            call.over = True
        self._calls.clear()
        self._borrowed.clear()

    def list_references(self) -> list[Place]:
        """Every reference that is held for peers."""
        return [(lent.tier, block) for lent in self._exported.values() for block in lent.blocks]
