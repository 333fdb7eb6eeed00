"""The owner's side of transfers: offers, seals, leases.

An export holds one reference on each of its blocks, from the offer to the first of: the receiver's ``Release``, the
lease's end, ``withdraw``, the receiver's death. Pages are announced in three steps, each of which may be under way for
several runs of pages at once::

    computed(pages, fence) --plan `fence` has finished--> SealPages --PagesSealed--> Ready (with checksums)
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from memserve.base.errors import check
from memserve.base.state_table import Transitions
from memserve.base.types import Tier, TokenArray
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.barriers import Barriers
from memserve.kv.transfer.context import Deadlines, Place, TransferContext, is_gone, runs
from memserve.kv.transfer.events import PagesSealed, Released, SealPages
from memserve.protocol.messages import Fetch, Handoff, MoreBlocks, Offer, Ready, Release, Wanted, Withdraw
from memserve.protocol.peers import Peer


class ExportPhase(enum.Enum):
    """How far an own offer has come."""

    OFFERED = enum.auto()
    """Blocks and pages are announced."""
    HANDED_OFF = enum.auto()
    """Every page has been named; ``Handoff`` follows the last ``Ready``."""
    ENDED = enum.auto()


class ExportCause(enum.Enum):
    """Why an own offer goes on, or ends."""

    EXTENDED = enum.auto()
    """Further blocks."""
    COMPUTED = enum.auto()
    """Further pages have, or will have, their final bytes."""
    HANDED_OFF = enum.auto()
    RELEASED = enum.auto()
    EXPIRED = enum.auto()
    """The lease has ended, or the peer."""
    WITHDRAWN = enum.auto()


_OPEN = ExportPhase.OFFERED, ExportPhase.HANDED_OFF
_ENDS = ExportCause.RELEASED, ExportCause.EXPIRED, ExportCause.WITHDRAWN

EXPORT = Transitions(
    "Export",
    ExportPhase.OFFERED,
    {
        (ExportPhase.OFFERED, ExportCause.EXTENDED): ExportPhase.OFFERED,
        (ExportPhase.OFFERED, ExportCause.COMPUTED): ExportPhase.OFFERED,
        (ExportPhase.OFFERED, ExportCause.HANDED_OFF): ExportPhase.HANDED_OFF,
        **{(phase, cause): ExportPhase.ENDED for phase in _OPEN for cause in _ENDS},
    },
)


@dataclass(slots=True, eq=False)
class Export:
    """An own offer."""

    transfer_id: str
    to: Peer
    first_block: int
    places: list[Place]
    """Of blocks ``first_block`` and following: one reference each."""
    deadline_ns: int
    wanted_from: int = 0
    """The receiver has the blocks before this one."""
    unannounced: int = 0
    """Runs of pages that were named by ``computed`` and have no ``Ready`` yet."""
    handoff: Handoff | None = None
    """Sent after the last ``Ready``."""
    loan: Lease | None = None
    """Keeps the snapshot that is offered from being given up."""
    is_trial: bool = False
    """The receiver only looks how long it takes: nothing waits for it."""
    phase: ExportPhase = EXPORT.initial

    def advance_phase(self, cause: ExportCause) -> None:
        """Go on, or end. Raises :class:`InvariantError` where ``EXPORT`` has no such move."""
        self.phase = EXPORT.next_phase(self.phase, cause)

    @property
    def over(self) -> bool:
        """Whether the offer has ended."""
        return self.phase is ExportPhase.ENDED

    @property
    def end_block(self) -> int:
        """Behind the last block that the offer has so far."""
        return self.first_block + len(self.places)

    def __repr__(self) -> str:
        return f"<Export {self.transfer_id} to {self.to.name} [{self.first_block}, {self.end_block})>"


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of an export: layers ``[first_layer, end_layer)`` of blocks ``[first_block, end_block)``."""

    export: Export
    first_block: int
    end_block: int
    first_layer: int
    end_layer: int


class Sender:
    """All own offers."""

    def __init__(self, context: TransferContext, barriers: Barriers, deadlines: Deadlines) -> None:
        self._context = context
        self._barriers = barriers
        self._deadlines = deadlines
        self.open: dict[str, Export] = {}
        self._sealing: dict[int, Pages] = {}  # job -> what it seals

    # -- what the owner decides

    def open_export(self, to: Peer, offer: Offer, places: list[Place], now_ns: int, loan: Lease | None = None) -> None:
        """Send ``offer``. The export takes over a reference on each of ``places``, and the pin of ``loan``."""
        context = self._context
        export = Export(offer.transfer_id, to, offer.first_block, places, now_ns + offer.lease_ns, loan=loan)
        self.open[offer.transfer_id] = export
        self._deadlines.add(export)
        context.counters.offers += 1
        context.send(to, offer)

    def extend_export(self, transfer_id: str, blocks: Sequence[int], loan: Lease | None = None) -> None:
        """The owner has got further HBM blocks; ``loan`` keeps them from being given up."""
        export = self.open.get(transfer_id)
        if export is None or not blocks:
            if loan is not None:
                self._context.pool.unpin(loan)
            return
        export.loan = loan if loan is not None else export.loan
        export.advance_phase(ExportCause.EXTENDED)
        self._context.retain(Tier.HBM, blocks)
        self._context.send(export.to, MoreBlocks(transfer_id, export.end_block, tuple(blocks)))
        export.places += [(Tier.HBM, block) for block in blocks]

    def announce_computed(
        self, transfer_id: str, blocks: tuple[int, int], layers: tuple[int, int], fence: int | None = None
    ) -> None:
        """Pages of ``[begin, end)`` blocks and layers are final once plan ``fence`` has finished. None: once everything
        decided so far is true in memory."""
        export = self.open.get(transfer_id)
        if export is None:
            return
        export.advance_phase(ExportCause.COMPUTED)
        check(export.first_block <= blocks[0] <= blocks[1] <= export.end_block, "{!r} has no blocks {}", export, blocks)
        check(0 <= layers[0] <= layers[1] <= self._context.geometry.num_layers, "{!r} has no layers {}", export, layers)
        if blocks[0] == blocks[1] or layers[0] == layers[1]:
            return
        pages = Pages(export, *blocks, *layers)
        export.unannounced += 1
        self._barriers.when_passed(
            self._barriers.all_settled() if fence is None else fence, partial(self._checksum_pages, pages)
        )

    def announce_state(self, transfer_id: str, first_block: int, fence: int | None, layers: int) -> None:
        """The blocks from ``first_block`` on, which hold a recurrent state, are final once plan ``fence`` has finished.
        ``layers``: of the last one, so many layers' pages are of use."""
        export = self.open.get(transfer_id)
        if export is None or export.end_block == first_block:  # a window of one token has nothing behind whole blocks
            return
        last, num_layers = export.end_block - 1, self._context.geometry.num_layers
        self.announce_computed(transfer_id, (first_block, last), (0, num_layers), fence)
        self.announce_computed(transfer_id, (last, last + 1), (0, layers), fence)

    def hand_off(self, handoff: Handoff) -> None:
        """Every page has been named: ``handoff`` follows the last ``Ready``."""
        export = self.open.get(handoff.transfer_id)
        if export is not None:
            export.advance_phase(ExportCause.HANDED_OFF)
            export.handoff = handoff
            self._send_handoff_when_ready(export)

    def withdraw_export(self, transfer_id: str, reason: str) -> None:
        """Take the offer back."""
        export = self.open.get(transfer_id)
        if export is not None:
            self._context.counters.withdrawn += 1
            self._context.send(export.to, Withdraw(transfer_id, reason))
            self._end_export(export, ExportCause.WITHDRAWN)

    def withdraw_trials(self) -> bool:
        """The owner needs the room of blocks that peers read to measure the link. False: there are none."""
        trials = [export.transfer_id for export in self.open.values() if export.is_trial]
        for transfer_id in trials:
            self.withdraw_export(transfer_id, "the room is needed")
        return bool(trials)

    def answer_fetch(self, sender: Peer, fetch: Fetch, now_ns: int) -> None:
        """A peer asks for cached blocks: offer those that are here, on the tier where they lie."""
        context = self._context
        if fetch.transfer_id in self.open:
            return
        reason = "found by its tokens alone" if fetch.identities else context.incompatibility(sender)
        places, loan = self._export_cached(fetch) if reason is None else ([], None)
        if not places:
            context.send(sender, Withdraw(fetch.transfer_id, reason or "not cached here (any more)"))
            return
        end_block = fetch.first_block + len(places)
        tokens = fetch.tokens[: end_block * context.pool.block_tokens]
        if loan is not None:
            places += [(self._state_tier, block) for block in loan.blocks]
        in_hbm = [block for tier, block in places if tier == Tier.HBM]
        in_dram = [block for tier, block in places if tier == Tier.DRAM]
        offer = Offer(
            transfer_id=fetch.transfer_id,
            tenant=fetch.tenant,
            tokens=tokens,
            identity=context.pool.identity(fetch.tenant, tokens),
            tier=Tier.HBM if in_hbm else Tier.DRAM,
            first_block=fetch.first_block,
            blocks=tuple(in_hbm or in_dram),
            lease_ns=context.config.lease_ns,
            dram_blocks=tuple(in_dram if in_hbm else ()),
            state_blocks=0 if loan is None else len(loan.blocks),
        )
        self.open_export(sender, offer, places, now_ns, loan)
        self.open[fetch.transfer_id].is_trial = fetch.is_trial
        layers, fence = context.geometry.num_layers, self._barriers.safe_to_read(places)
        self.announce_computed(fetch.transfer_id, (fetch.first_block, end_block), (0, layers), fence)
        if loan is not None:
            self.announce_state(fetch.transfer_id, end_block, fence, context.state_layers)

    @property
    def _state_tier(self) -> Tier:
        """Where cached snapshots lie: a store has no HBM."""
        return Tier.HBM if self._context.pool.config.hbm_blocks else Tier.DRAM

    def _export_cached(self, fetch: Fetch) -> tuple[list[Place], Lease | None]:
        """The cached ones of the wanted blocks ``[first_block, end_block)``, up to the first gap, a reference each.
        Where a state is wanted, those before the longest that there is, and that; else nothing."""
        context = self._context
        pool, tokens = context.pool, fetch.tokens[: fetch.end_block * context.pool.block_tokens]
        if not fetch.state_blocks:
            return self._export_kv(fetch, tokens), None
        loan = pool.lend_state(fetch.tenant, tokens, fetch.state_blocks, fetch.part_blocks)
        if loan is None:
            return [], None
        end_block = loan.tokens // pool.block_tokens
        places = self._export_kv(fetch, tokens[: loan.tokens]) if end_block > fetch.first_block else []
        if not places or fetch.first_block + len(places) < end_block:  # it was only just there: never without its KV
            for tier, _, blocks in runs([*places, *((self._state_tier, block) for block in loan.blocks)]):
                context.release(tier, blocks)
            pool.unpin(loan)
            return [], None
        return places, loan

    def _export_kv(self, fetch: Fetch, tokens: TokenArray) -> list[Place]:
        context = self._context
        if context.hbm_only:
            return self._export_from_hbm(fetch.tenant, tokens, fetch.first_block)
        hbm, dram = context.pool.export_blocks(fetch.tenant, tokens, fetch.first_block)
        return [(Tier.HBM, block) for block in hbm] + [(Tier.DRAM, block) for block in dram]

    def _export_from_hbm(self, tenant: str, tokens: TokenArray, first_block: int) -> list[Place]:
        """As :meth:`_export_cached`; what lies in DRAM is brought up, into half of the room that there is at most."""
        pool = self._context.pool
        in_hbm, _ = pool.match_kv_blocks(tenant, tokens)
        end_block = in_hbm + pool.available() // 2
        if first_block >= end_block:
            return []
        lease = pool.acquire(tenant, tokens[: end_block * pool.block_tokens])
        pool.unpin(lease)
        pool.release(lease.blocks[:first_block])
        return [(Tier.HBM, block) for block in lease.blocks[first_block:]]

    # -- what the host has done

    def _checksum_pages(self, pages: Pages) -> None:
        """The pages hold their final bytes: have their checksums computed, except of blocks that the receiver has."""
        export = pages.export
        if export.over:
            return
        first = max(pages.first_block, export.wanted_from)
        wanted_places = export.places[first - export.first_block : pages.end_block - export.first_block]
        for tier, position, blocks in runs(wanted_places):
            job_id, begin = self._context.new_job_id(), first + position
            run = Pages(export, begin, begin + len(blocks), pages.first_layer, pages.end_layer)
            self._sealing[job_id] = run
            export.unannounced += 1
            self._context.actions.append(SealPages(job_id, tier, tuple(blocks), pages.first_layer, pages.end_layer))
        export.unannounced -= 1
        self._send_handoff_when_ready(export)

    def on_pages_sealed(self, event: PagesSealed) -> None:
        """Checksums have come: tell the receiver."""
        check(event.job_id in self._sealing, "job {} seals nothing", event.job_id)
        pages = self._sealing.pop(event.job_id)
        export, count = pages.export, pages.end_block - pages.first_block
        check(
            len(event.checksums) == count,
            "job {}: {} checksums of {} blocks",
            event.job_id,
            len(event.checksums),
            count,
        )
        if export.over:
            return
        self._context.counters.sealed_pages += count * (pages.end_layer - pages.first_layer)
        layers, sums = (pages.first_layer, pages.end_layer), event.checksums
        ready = Ready(export.transfer_id, pages.first_block, *layers, sums, event.spent_ns)
        self._context.send(export.to, ready)
        export.unannounced -= 1
        self._send_handoff_when_ready(export)

    def _send_handoff_when_ready(self, export: Export) -> None:
        if export.handoff is not None and export.unannounced == 0:
            self._context.send(export.to, export.handoff)

    # -- what the receiver says, or no longer says

    def on_wanted(self, sender: Peer, message: Wanted) -> None:
        """The receiver has the blocks before ``message.first_block``."""
        export = self.open.get(message.transfer_id)
        if export is not None and export.to == sender:
            export.wanted_from = max(export.wanted_from, message.first_block)

    def on_release(self, sender: Peer, message: Release) -> None:
        """The receiver is done."""
        export = self.open.get(message.transfer_id)
        if export is None or export.to != sender:
            return
        if message.used:
            self._context.counters.released += 1
        else:
            self._context.counters.refused += 1
        self._finish_export(export, ExportCause.RELEASED, message.used, message.reason)

    def expire_export(self, export: Export, reason: str) -> None:
        """The lease or the peer has ended before a ``Release`` came."""
        self._context.counters.expired += 1
        self._finish_export(export, ExportCause.EXPIRED, False, reason)

    def peer_removed(self, peer: Peer, reason: str) -> None:
        """End everything offered to ``peer``."""
        for export in [export for export in self.open.values() if is_gone(export.to, peer)]:
            self.expire_export(export, reason)

    def withdraw_all(self, reason: str) -> None:
        """Take everything back, and report it to the owner."""
        for export in list(self.open.values()):
            self.withdraw_export(export.transfer_id, reason)
            self._context.outcomes.append(Released(export.transfer_id, export.to, False, reason))

    def drop_all(self) -> None:
        """End everything, silently."""
        for export in list(self.open.values()):
            self._end_export(export, ExportCause.WITHDRAWN)

    def _finish_export(self, export: Export, cause: ExportCause, used: bool, reason: str) -> None:
        self._end_export(export, cause)
        self._context.outcomes.append(Released(export.transfer_id, export.to, used, reason))

    def _end_export(self, export: Export, cause: ExportCause) -> None:
        """Release the references. Pages that are being sealed are forgotten: reading a free block does no harm."""
        export.advance_phase(cause)
        del self.open[export.transfer_id]
        for tier, _, blocks in runs(export.places):
            self._context.release(tier, blocks)
        if export.loan is not None:
            self._context.pool.unpin(export.loan)

    # -- books

    def list_references(self) -> list[Place]:
        """Every reference that exports hold."""
        return [place for export in self.open.values() for place in export.places]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when an export contradicts itself."""
        sealing = Counter(id(pages.export) for pages in self._sealing.values() if not pages.export.over)
        for transfer_id, export in self.open.items():
            check(transfer_id == export.transfer_id and not export.over, "{!r} has ended, and is open", export)
            check(export.unannounced >= sealing[id(export)], "{!r} forgot pages that are being sealed", export)
            check(
                export.unannounced > 0 or all(p.export is not export for p in self._sealing.values()),
                "{!r} has announced every page, and seals",
                export,
            )
