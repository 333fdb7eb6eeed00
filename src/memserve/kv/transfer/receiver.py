"""The receiver's side of transfers: from an offer to blocks that may be read.

::

    Offer -> waiting ---a member, its identity checked, room---> placed ---Ready, fence---> pulled ... -> complete
               |  ^                                                 |
               |  +-- no room: tried again, tenants by turns        +--> failed: mismatch, withdrawn, peer gone ...
               +--> refused; also what no request waits for, when it has waited for room a little

Nothing is retried: KV that does not come is computed instead. An import gives back all that it holds when it ends, in
whichever way; a pull under way has references of its own (see ``pulls``).
"""

from __future__ import annotations

from functools import partial

from memserve.base.errors import check
from memserve.base.fairness import FairQueue
from memserve.base.types import Tier, tenant_of
from memserve.kv.transfer.barriers import Barriers
from memserve.kv.transfer.context import Deadlines, PeerStatus, Place, TransferContext, is_gone, runs
from memserve.kv.transfer.events import HandoffOffered, LayersArrived, PagesPulled, StripeOffered
from memserve.kv.transfer.fetches import PendingFetches, Pull, Pulls, answers_fetch
from memserve.kv.transfer.imports import (
    Fetching,
    Import,
    ImportCause,
    ImportPlacement,
    NoPlace,
    RoomWait,
    complete_import,
    end_block_of,
    objection,
    place_import,
    place_stripe,
    release_import,
    report_failure,
)
from memserve.kv.transfer.remote_allocation import RemoteAllocation
from memserve.protocol.messages import Handoff, MoreBlocks, Offer, Ready, Release, Wanted, Withdraw
from memserve.protocol.peers import Peer

_REMEMBERED = 4096
"""Ids of ended transfers that are remembered: a late message about one of them starts nothing anew."""


class Receiver:
    """All offers of peers, and the fetches that wait for one."""

    def __init__(
        self, context: TransferContext, barriers: Barriers, deadlines: Deadlines, remote: RemoteAllocation
    ) -> None:
        self._context = context
        self._barriers = barriers
        self._deadlines = deadlines
        self._remote = remote
        self.pulls = Pulls(context)
        self.fetches = PendingFetches(context, deadlines)
        self.open: dict[str, Import] = {}
        self._waiting: FairQueue[Import] = FairQueue()  # for room
        self._awaiting_member: list[Import] = []  # for news of their sender; some may have ended
        self._awaiting_sequence: dict[str, Import] = {}  # stripes, for blocks of their sequence
        self._ended: dict[str, None] = {}  # ids, oldest first

    # -- what the owner of the blocks says

    def on_offer(self, sender: Peer, offer: Offer, now_ns: int) -> None:
        """A peer offers blocks, perhaps because it was asked for them."""
        transfer_id = offer.transfer_id
        if transfer_id in self._ended:
            # the sender may have missed the first one, and holds blocks until it hears it
            self._context.send(sender, Release(transfer_id, False, "it has ended"))
        if transfer_id in self.open or transfer_id in self._ended or not self.fetches.may_answer(sender, offer):
            return
        imported = self._open_import(sender, offer, self.fetches.claim_fetch(transfer_id), now_ns)
        reason = objection(self._context, offer)
        if imported.fetching is not None and not answers_fetch(offer, imported.fetching):
            reason = "not what was asked for"
        if reason is not None:
            self._refuse_import(imported, reason)
        elif self._context.peers.status_of(sender) is PeerStatus.UNKNOWN:
            # its offer may be quicker than the news that it is a member, which comes by way of the router
            imported.advance_phase(ImportCause.SENDER_UNKNOWN)
            self._awaiting_member = [earlier for earlier in self._awaiting_member if not earlier.over] + [imported]
        else:
            self._wait_for_room(imported, now_ns)

    def _open_import(self, sender: Peer, offer: Offer, fetching: Fetching | None, now_ns: int) -> Import:
        sources = [(offer.tier, block) for block in offer.blocks] + [(Tier.DRAM, block) for block in offer.dram_blocks]
        deadline_ns = now_ns + offer.lease_ns
        if fetching is not None:
            deadline_ns = min(deadline_ns, fetching.deadline_ns)
        end_block = end_block_of(offer, self._context.pool.block_tokens)
        imported = Import(sender, offer, deadline_ns, fetching, end_block, sources)
        self.open[offer.transfer_id] = imported
        self._deadlines.add(imported)
        self._context.counters.imports += 1
        if offer.request is not None:
            self._context.outcomes.append(HandoffOffered(offer.transfer_id, sender, offer))
        return imported

    def on_more_blocks(self, sender: Peer, message: MoreBlocks) -> None:
        """The sender of a handoff has got further blocks."""
        imported = self._import_from(sender, message.transfer_id)
        if imported is None or message.first_block + len(message.blocks) <= imported.sources_end:
            return  # unknown, or heard before
        if message.first_block != imported.sources_end or imported.offer.request is None:
            expected = imported.sources_end
            self._fail_import(imported, f"blocks from {message.first_block}, {expected} expected: a message is lost")
            return
        imported.sources += [(Tier.HBM, block) for block in message.blocks]
        if imported.sources_end > imported.end_block:
            self._fail_import(imported, f"{imported.sources_end} blocks for {len(imported.offer.tokens)} tokens")

    def on_ready(self, sender: Peer, message: Ready) -> None:
        """Pages may be pulled."""
        imported = self._import_from(sender, message.transfer_id)
        if imported is None:
            return
        if not 0 <= message.first_layer < message.end_layer <= self._context.geometry.num_layers:
            self._fail_import(imported, f"layers {message.first_layer} to {message.end_layer}")
        elif _end(message) > imported.sources_end:
            self._fail_import(
                imported, f"block {_end(message) - 1} is ready, its place is not known: a message is lost"
            )
        elif imported.placement is None:
            # pages may be ready before there is a place for them: nothing is asked for twice
            imported.early.append(message)
        else:
            self._announce_pages(imported, message)
            self._complete_if_done(imported)

    def on_handoff(self, sender: Peer, message: Handoff) -> None:
        """The prefill is done; every page has been announced."""
        imported = self._import_from(sender, message.transfer_id)
        if imported is not None and imported.offer.request is not None:
            imported.handoff = message
            self._complete_if_done(imported)

    def on_withdraw(self, sender: Peer, message: Withdraw) -> None:
        """The sender takes its offer back, or has none of the blocks that it was asked for."""
        self.fetches.on_withdrawn(sender, message.transfer_id, message.reason)
        imported = self._import_from(sender, message.transfer_id)
        if imported is not None:
            self._fail_import(imported, f"withdrawn: {message.reason}")

    def _import_from(self, sender: Peer, transfer_id: str) -> Import | None:
        imported = self.open.get(transfer_id)
        return imported if imported is not None and imported.sender == sender else None

    # -- a place

    def peer_joined(self, peer: Peer, now_ns: int) -> None:
        """Offers of ``peer`` may have come before the news that it is a member."""
        for imported in self._awaiting_member:
            if imported.sender.name == peer.name and not imported.over:
                self._wait_for_room(imported, now_ns)
        self._awaiting_member = [imported for imported in self._awaiting_member if imported.sender.name != peer.name]

    def _wait_for_room(self, imported: Import, now_ns: int) -> None:
        imported.advance_phase(ImportCause.SENDER_KNOWN)
        if imported.offer.part_of:
            self._awaiting_sequence[imported.transfer_id] = imported
            self._context.outcomes.append(StripeOffered(imported.transfer_id, imported.sender, imported.offer))
            return
        tenant, blocks = tenant_of(imported.offer.tenant), imported.end_block - imported.offer.first_block
        self._waiting.push(tenant, imported.transfer_id, imported, blocks)
        room_wait_ns = self._context.config.room_wait_ns
        if imported.is_unasked and room_wait_ns:
            self._deadlines.add(RoomWait(imported, now_ns + room_wait_ns))

    def try_waiting(self) -> None:
        """Give places by turns of tenants, as far as there is room. An import that is too big to go first keeps the
        line, until a tenant that got less comes."""
        while (first := self._waiting.head()) is not None and self._try_place(first):
            # a placement that is complete at once has left the line already
            if first.transfer_id in self._waiting:
                self._waiting.pop()

    def place_stripe(self, transfer_id: str, blocks: list[int]) -> None:
        """The sequence of a stripe has blocks: its last ones go into these; the others are cached here."""
        imported = self._awaiting_sequence.pop(transfer_id, None)
        if imported is not None:
            self._take_place(imported, place_stripe(self._context, self._barriers, imported, blocks))

    def _try_place(self, imported: Import) -> bool:
        """False: no room now."""
        placement = place_import(self._context, self._remote, self._barriers, imported)
        if placement is not None:
            self._take_place(imported, placement)
        return placement is not None

    def _take_place(self, imported: Import, placement: ImportPlacement | NoPlace) -> None:
        if isinstance(placement, NoPlace):
            self._refuse_import(imported, placement.reason)
            return
        imported.advance_phase(ImportCause.PLACED)
        imported.placement = placement
        if placement.pull_from > imported.offer.first_block:
            # the sender need not keep, nor announce, what is cached here
            self._context.send(imported.sender, Wanted(imported.transfer_id, placement.pull_from))
        early, imported.early = imported.early, []
        for message in early:
            self._announce_pages(imported, message)
        self._complete_if_done(imported)

    # -- pages

    def _announce_pages(self, imported: Import, ready: Ready) -> None:
        """Pull the pages that ``ready`` names and that are not here."""
        placement = imported.placement
        if imported.over or placement is None:
            return
        first = max(ready.first_block, placement.pull_from)
        end = min(_end(ready), imported.end_block)
        if first >= end:
            return
        row = first - placement.pull_from
        pages = placement.announced[row : row + end - first, ready.first_layer : ready.end_layer]
        if pages.any():
            if not pages.all():
                # a repeated message names the same pages; a mixture is of a sender that has lost count
                self._fail_import(imported, "pages are announced again together with new ones")
            return
        pages[...] = True
        checksums = ready.checksums[first - ready.first_block : end - ready.first_block]
        begin = imported.offer.first_block
        for tier, offset, blocks in runs(imported.sources[first - begin : end - begin]):
            sums, layers = checksums[offset : offset + len(blocks)], (ready.first_layer, ready.end_layer)
            sealed_ns = ready.sealed_ns * len(blocks) // len(ready.checksums)
            pull = Pull(imported, placement, row + offset, tier, blocks, *layers, sums, sealed_ns)
            # the blocks were freed by a plan that may still read them: no byte is written before it has finished
            self._barriers.when_passed(placement.fence, partial(self.pulls.enqueue_pull, pull))

    def pulled(self, event: PagesPulled) -> None:
        """The host is done with a pull."""
        pull = self.pulls.on_pull_ended(event)
        imported = pull.imported
        if imported.over:
            return
        if event.error:
            self._fail_import(imported, f"pull failed: {event.error}")
            return
        # marked only now, when the checksums were right: a page that is announced is not yet one that may be read
        pull.placement.arrived[pull.first_row : pull.end_row, pull.first_layer : pull.end_layer] = True
        self._complete_if_done(imported)
        if imported.offer.part_of and not imported.over and pull.placement.whole_layers > imported.layers_told:
            imported.layers_told = pull.placement.whole_layers
            arrived = LayersArrived(imported.transfer_id, imported.offer, imported.layers_told)
            self._context.outcomes.append(arrived)

    def _complete_if_done(self, imported: Import) -> None:
        """End the import if everything is here, or can never be."""
        placement = imported.placement
        if imported.over or placement is None:
            return
        if imported.offer.request is not None:
            if imported.handoff is None:
                return
            # the sender announces every page before it hands over, and messages keep their order
            if not (placement.announced | placement.arrived).all():
                self._fail_import(imported, "handed over, but not every page was announced: a message is lost")
                return
        if placement.is_complete:
            self._close_import(imported, ImportCause.COMPLETED)
            complete_import(self._context, imported, placement)

    # -- ends

    def give_up(self, transfer_id: str, reason: str) -> None:
        """The owner wants the import or the fetch no longer."""
        self.fetches.give_up(transfer_id)
        imported = self.open.get(transfer_id)
        if imported is not None:
            self._context.counters.imports_given_up += 1
            self._drop_import(imported, ImportCause.GIVEN_UP, Release(transfer_id, False, reason))

    def expire_import(self, imported: Import) -> None:
        """The time is up. Of a fetch, the blocks that have come without a gap are of use."""
        if imported.fetching is None:
            self._fail_import(imported, "the lease has ended")
            return
        self._context.counters.fetch_timeouts += 1
        if imported.placement is not None and imported.placement.unbroken_blocks > 0:
            self._close_import(imported, ImportCause.COMPLETED)
            complete_import(self._context, imported, imported.placement, "a part, in time")
        else:
            self._fail_import(imported, "not in time")

    def end_room_wait(self, wait: RoomWait) -> None:
        """KV that no request waits for has found no room in time."""
        self._refuse_import(wait.imported, "there is no room")

    def peer_removed(self, peer: Peer, reason: str) -> None:
        """Fail all imports and fetches from ``peer``."""
        self.fetches.peer_removed(peer, reason)
        for imported in [imported for imported in self.open.values() if is_gone(imported.sender, peer)]:
            self._fail_import(imported, reason)
        self.pulls.cancel_from(peer)

    def fail_all(self, reason: str) -> None:
        """Fail all imports and fetches."""
        self.fetches.fail_all(reason)
        for imported in list(self.open.values()):
            self._fail_import(imported, reason)

    def drop_all(self) -> None:
        """End everything, silently."""
        self.fetches.drop_all()
        for imported in list(self.open.values()):
            self._drop_import(imported, ImportCause.GIVEN_UP, None)

    def _refuse_import(self, imported: Import, reason: str) -> None:
        self._context.counters.imports_refused += 1
        self._drop_import(imported, ImportCause.REFUSED, Release(imported.transfer_id, False, reason))
        report_failure(self._context, imported, reason)

    def _fail_import(self, imported: Import, reason: str) -> None:
        self._context.counters.imports_failed += 1
        self._drop_import(imported, ImportCause.FAILED, Release(imported.transfer_id, False, reason))
        report_failure(self._context, imported, reason)

    def _drop_import(self, imported: Import, cause: ImportCause, message: Release | None) -> None:
        self._close_import(imported, cause)
        release_import(self._context, imported)
        if message is not None:
            self._context.send(imported.sender, message)

    def _close_import(self, imported: Import, cause: ImportCause) -> None:
        imported.advance_phase(cause)
        del self.open[imported.transfer_id]
        self._waiting.remove(imported.transfer_id)
        self._awaiting_sequence.pop(imported.transfer_id, None)
        self._ended[imported.transfer_id] = None
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    # -- books

    def list_references(self) -> list[Place]:
        """Every reference that imports, fetches and pulls hold."""
        places = self.pulls.list_references()
        leases = [fetching.lease for fetching in self.fetches.open.values()]
        for imported in self.open.values():
            if imported.fetching is not None:
                leases.append(imported.fetching.lease)
            if imported.placement is not None:
                leases.append(imported.placement.lease)
                places += [(imported.placement.tier, block) for block in imported.placement.target_blocks]
        for lease in leases:
            places += [(Tier.HBM, block) for block in lease.blocks]
        return places

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when an import contradicts itself."""
        self.pulls.check_invariants()
        self._waiting.check_invariants()
        lines = {*(waiting.transfer_id for waiting in self._awaiting_member if not waiting.over)}
        for transfer_id, imported in self.open.items():
            placement = imported.placement
            check(transfer_id == imported.transfer_id and not imported.over, "{!r} has ended, and is open", imported)
            in_line = any(transfer_id in line for line in (self._waiting, lines, self._awaiting_sequence))
            check((placement is None) == in_line, "{!r} has no place, or is in line for a second one", imported)
            if placement is not None:
                blocks = imported.end_block - placement.base
                check(
                    len(placement.blocks) == blocks, "{!r}: {} blocks, not {}", imported, len(placement.blocks), blocks
                )
                unannounced = placement.arrived & ~placement.announced
                if imported.offer.state_blocks:  # its last block need not come in full
                    unannounced[-1, self._context.state_layers :] = False
                check(
                    not unannounced.any(),
                    "{!r} has pages that were not announced",
                    imported,
                )
                check(not imported.early, "{!r} has a place, and messages that wait for one", imported)
                complete = placement.is_complete and (imported.offer.request is None or imported.handoff is not None)
                check(not complete, "{!r} is complete, and open", imported)


def _end(ready: Ready) -> int:
    return ready.first_block + len(ready.checksums)
