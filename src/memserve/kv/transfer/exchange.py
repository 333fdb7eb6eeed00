"""All dealings of one pool with the pools of other processes: offers, pulls, fetches, leases, barriers.

Accounting and protocol only: no bytes move here. Messages, sealed and pulled pages go in through :meth:`handle`; what
is to be sent, sealed and pulled comes out of :meth:`take_actions`, results for the owner as outcomes.

    event -> exchange.handle(event, now_ns) -> outcomes
             exchange.advance(now)       -> outcomes     on every event: leases, imports that wait for room
             exchange.take_actions()     -> Send | SealPages | PullPages | CancelPulls
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memserve.base.config import ExchangeConfig
from memserve.base.errors import check
from memserve.base.types import KVGeometry, Request, Tier, TokenArray, TokenOutput, TransferMode
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.barriers import Barriers
from memserve.kv.transfer.context import (
    Deadlines,
    ExchangeAction,
    PeerStatus,
    Place,
    Room,
    TransferContext,
    TransferPool,
)
from memserve.kv.transfer.events import ExchangeCounters, Firsts, Outcome, PagesPulled, PagesSealed
from memserve.kv.transfer.imports import Fetching, Import, RoomWait
from memserve.kv.transfer.receiver import Receiver
from memserve.kv.transfer.remote_allocation import Allocation, AllocCall, RemoteAllocation
from memserve.kv.transfer.sender import Export, Sender
from memserve.kv.transfer.spread import SpareTurn, SpreadFetches, SpreadPrefix
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import (
    Alloc,
    Allocated,
    Fetch,
    Free,
    Handoff,
    MoreBlocks,
    Offer,
    Ready,
    Release,
    Wanted,
    Withdraw,
)
from memserve.protocol.peers import Peer, PeerInfo


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """``blocks`` on ``tier``, and behind them ``dram_blocks``. ``blocks[i]`` holds, or will hold, block
    ``first_block + i`` of ``tokens``."""

    tenant: str
    tokens: TokenArray
    blocks: Sequence[int]
    tier: Tier = Tier.HBM
    first_block: int = 0
    dram_blocks: Sequence[int] = ()
    state: Lease | None = None
    """The snapshot behind ``tokens``, whole blocks of them; its references and its pin pass to the exchange. With
    ``identities``: what lends ``blocks``, some of its own, and stays the caller's."""
    identities: bytes = b""
    """Of ``blocks`` and ``dram_blocks``, 16 bytes each, in the place of tokens: for one of several stores."""
    before: bytes = b""
    """With these, the identities of blocks that lead to them and are that store's as well."""


@dataclass(frozen=True, slots=True)
class OfferTerms:
    """How the receiver is to take it: the fields of :class:`~memserve.protocol.messages.Offer` with these names.
    ``lease_ns`` 0: as the configuration has it."""

    mode: TransferMode = TransferMode.BY_REQUEST_AGG
    insert: bool = True
    request: Request | None = None
    deadline_in_ns: int | None = None
    return_kv: bool = False
    private: bytes = b""
    dst_blocks: Sequence[int] = ()
    dst_tier: Tier = Tier.HBM
    lease_ns: int = 0
    router: Peer | None = None
    answers: str = ""
    """The transfer id of the fetch that it answers. Empty: none."""
    migrates: bool = False
    layers: tuple[int, int] | None = None
    part_of: str = ""


AS_USUAL = OfferTerms()


class Exchange:
    """Gives blocks of one pool to peers and takes theirs; ``memserve.protocol.messages`` tells the order of the
    messages.

    =====================  ==================================================================================
    ``sender``             own offers: references, seals, ``Ready``, leases
    ``receiver``           offers of others: room, pages, checks; ``imports`` knows how one is placed and how it ends
    ``pulls``              fetches that wait for an offer; jobs for the host, with references on what they write to
    ``spread``             prefixes whose blocks lie in several stores: a fetch of each, put together at the end
    ``remote_allocation``  blocks allocated for peers, and at peers
    ``barriers``           which plan must have finished before blocks are read or written beside plans
    ``context``            what all of these share: pool, peers, configuration, counters, actions
    =====================  ==================================================================================

    Every method that may end a transfer returns outcomes. After each call the owner takes the actions.
    """

    def __init__(
        self,
        pool: TransferPool,
        geometry: KVGeometry,
        config: ExchangeConfig,
        self_peer: Peer,
        namespace: str | None = None,
    ) -> None:
        """``namespace`` and ``geometry`` are those in the own ``PeerInfo``: peers with others are refused.
        ``namespace`` None: the pool's."""
        self.shares_kv = config.shares_kv
        context = TransferContext(pool, geometry, config, self_peer, pool.namespace if namespace is None else namespace)
        self._context = context
        self.namespace = context.namespace
        self.incompatibility = context.incompatibility
        self._barriers, self._deadlines = Barriers(pool), Deadlines()
        self._sender = Sender(context, self._barriers, self._deadlines)
        self._remote = RemoteAllocation(context, self._deadlines)
        self._receiver = Receiver(context, self._barriers, self._deadlines, self._remote)
        self._spread = SpreadFetches(context, self._receiver, self._deadlines)

    # -- the owner of blocks

    def offer_blocks(self, to: Peer, offered: OfferedBlocks, now_ns: int, terms: OfferTerms = AS_USUAL) -> str:
        """Offer blocks to ``to``; returns the transfer id.

        The exchange takes a reference of its own on each until the receiver's ``Release``, the lease's end,
        :meth:`withdraw_offer` or the peer's death; the caller's references stay the caller's.
        :meth:`announce_computed` announces pages to the receiver. With a request the offer is a handoff of all tokens,
        whose blocks may come later (:meth:`more_blocks`).
        """
        context, tokens = self._context, offered.tokens.copy()
        transfer_id, tier, dram_blocks = terms.answers or context.new_transfer_id(), offered.tier, offered.dram_blocks
        loan, blocks, state_blocks = offered.state, list(offered.blocks), 0
        if loan is not None and offered.identities:
            loan = context.pool.share_loan(loan, blocks)
        else:
            context.retain(tier, blocks)
            if loan is not None:
                check(not dram_blocks, "the blocks of a state follow those in HBM")
                state_blocks = len(loan.blocks)
                blocks += loan.blocks
        offer = Offer(
            transfer_id=transfer_id,
            tenant=offered.tenant,
            tokens=tokens,
            identity=context.pool.identity(offered.tenant, tokens),
            tier=tier,
            first_block=offered.first_block,
            blocks=tuple(blocks),
            lease_ns=terms.lease_ns or context.config.lease_ns,
            mode=terms.mode,
            insert=terms.insert,
            request=terms.request,
            deadline_in_ns=terms.deadline_in_ns,
            return_kv=terms.return_kv,
            dst_blocks=tuple(terms.dst_blocks),
            dst_tier=terms.dst_tier,
            private=terms.private,
            dram_blocks=tuple(dram_blocks),
            router=terms.router,
            layers=terms.layers,
            state_blocks=state_blocks if terms.request is None else context.pool.blocks_behind(len(tokens)),
            part_blocks=context.pool.part_blocks if state_blocks else 0,
            identities=offered.identities,
            before=offered.before,
            migrates=terms.migrates,
            part_of=terms.part_of,
        )
        context.retain(Tier.DRAM, dram_blocks)
        places = [(tier, block) for block in blocks] + [(Tier.DRAM, block) for block in dram_blocks]
        self._sender.open_export(to, offer, places, now_ns, loan)
        return transfer_id

    def has_offered(self, transfer_id: str) -> bool:
        """Whether an own offer with this id is open."""
        return transfer_id in self._sender.open

    def more_blocks(self, transfer_id: str, blocks: Sequence[int], loan: Lease | None = None) -> None:
        """Extend a handoff by HBM ``blocks``, with a reference each. Ignored when it has ended. ``loan``: unpinned when
        the offer ends."""
        self._sender.extend_export(transfer_id, blocks, loan)

    def announce_computed(
        self,
        transfer_id: str,
        first_block: int,
        end_block: int,
        first_layer: int = 0,
        end_layer: int | None = None,
        fence: int | None = None,
    ) -> None:
        """Layers ``[first_layer, end_layer)`` of blocks ``[first_block, end_block)`` (from the prompt's start) hold
        their final bytes once plan ``fence`` has finished: then they are sealed and announced to the receiver.

        ``fence`` None: :attr:`fence`, right for what any plan made so far computes or copies. 0: they are there now,
        since the plan, or this layer of it, has finished. ``end_layer`` None: all layers. These pages must not be
        written while the offer lives, and each is named once. Ignored when the offer has ended.
        """
        end_layer = self._context.geometry.num_layers if end_layer is None else end_layer
        self._sender.announce_computed(transfer_id, (first_block, end_block), (first_layer, end_layer), fence)

    def announce_state(
        self, transfer_id: str, first_block: int, fence: int | None = None, *, whole: bool = False
    ) -> None:
        """As :meth:`announce_computed`, for the blocks of the offer from ``first_block`` on, which hold a recurrent
        state. ``whole``: with pages of the last one that the state does not reach."""
        layers = self._context.geometry.num_layers if whole else self._context.state_layers
        self._sender.announce_state(transfer_id, first_block, fence, layers)

    @property
    def state_bytes(self) -> int:
        """What is moved of a recurrent state: whole pages. 0: layers keep KV alone."""
        context, blocks = self._context, self._context.pool.state_blocks
        pages = (blocks - 1) * context.geometry.num_layers + context.state_layers
        return pages * context.geometry.page_bytes if blocks else 0

    def hand_off(
        self,
        transfer_id: str,
        first_tokens: Firsts,
        ended_indices: tuple[int, ...] = (),
        emitted_outputs: tuple[TokenOutput, ...] = (),
    ) -> None:
        """The prefill is done, every page of the offer has been named by :meth:`announce_computed`: ``Handoff``
        follows the last ``Ready``. Ignored when the offer has ended."""
        self._sender.hand_off(Handoff(transfer_id, first_tokens, ended_indices, emitted_outputs))

    def withdraw_offer(self, transfer_id: str, reason: str) -> None:
        """Take an offer back. Ignored when it has ended."""
        self._sender.withdraw_export(transfer_id, reason)

    # -- the receiver of blocks

    def fetch_blocks(
        self,
        holder: Peer,
        tenant: str,
        tokens: TokenArray,
        first_block: int,
        end_block: int,
        now_ns: int,
        deadline_ns: int,
        *,
        is_trial: bool = False,
    ) -> str:
        """Ask ``holder`` for the KV of blocks ``[first_block, end_block)`` of ``tokens``; returns the transfer id.
        Where layers have a state, only as far as a snapshot stands behind it, and that. ``is_trial``: without it, and
        as long as the holder has room to spare, because nothing waits for it.

        ``deadline_ns`` is absolute. Blocks before ``first_block`` are in the own index: they are pinned meanwhile. One
        :class:`FetchEnded` follows, at the deadline at the latest, unless the fetch is given up. Blocks that have come
        by then without a gap are kept.
        """
        blocks = first_block, end_block
        end_tokens = end_block * self._context.pool.block_tokens
        state_blocks = 0 if is_trial else self._context.pool.blocks_behind(end_tokens)
        return self._receiver.fetches.start_fetch(
            holder, tenant, tokens.copy(), blocks, now_ns, max(now_ns, deadline_ns), state_blocks, is_trial=is_trial
        )

    def withdraw_trials(self) -> bool:
        """Take back what peers read to measure the link. False: there is nothing of that kind."""
        return self._sender.withdraw_trials()

    def fetch_spread(
        self, spread: SpreadPrefix, tenant: str, tokens: TokenArray, first_block: int, now_ns: int, deadline_ns: int
    ) -> str:
        """As :meth:`fetch_blocks`, of a prefix whose blocks from ``first_block`` to the end of ``tokens`` lie in
        several stores, as does what comes behind it."""
        return self._spread.start_fetch(spread, tenant, tokens.copy(), first_block, now_ns, max(now_ns, deadline_ns))

    def place_stripe(self, transfer_id: str, blocks: list[int], now_ns: int) -> list[Outcome]:
        """The sequence of a stripe (:class:`StripeOffered`) has blocks here: the stripe's last ones are pulled into
        these, with references of their own; those before them are cached. Ignored when the import has ended."""
        self._receiver.place_stripe(transfer_id, blocks)
        return self._take_outcomes(now_ns)

    def give_up(self, transfer_id: str, reason: str) -> None:
        """End an import or a fetch: nothing is held for it any more, no outcome follows. Ignored when it has ended."""
        if not self._spread.give_up(transfer_id, reason):
            self._receiver.give_up(transfer_id, reason)

    @property
    def room(self) -> Room:
        """What imports may take; set by the owner."""
        return self._context.room

    @room.setter
    def room(self, room: Room) -> None:
        self._context.room = room

    # -- memory at a peer (MemServe Table 1 with an instance id)

    def allocate_at(self, peer: Peer, count: int, tier: Tier, now_ns: int, deadline_ns: int) -> str:
        """Ask ``peer`` for ``count`` blocks; one :class:`RemoteAllocated` follows, at ``deadline_ns`` at the latest."""
        return self._remote.request_blocks(peer, count, tier, max(now_ns, deadline_ns))

    def free_at(self, call_id: str) -> None:
        """Give back what :meth:`allocate_at` got, or is yet to get: then no outcome follows."""
        self._remote.give_back(call_id)

    # -- both

    def handle(self, event: MessageArrived | PagesSealed | PagesPulled, now_ns: int) -> list[Outcome]:
        """A peer said something, or the host has done a job. Messages that are not for an exchange are ignored, and
        those of peers that are gone."""
        if isinstance(event, PagesSealed):
            self._sender.on_pages_sealed(event)
        elif isinstance(event, PagesPulled):
            self._receiver.pulled(event)
        elif self._context.peers.status_of(event.sender) is not PeerStatus.GONE:
            self._on_message(event, now_ns)
        return self._take_outcomes(now_ns)

    def _on_message(self, event: MessageArrived, now_ns: int) -> None:
        sender, message = event.sender, event.message
        match message:
            case Offer():
                self._receiver.on_offer(sender, message, now_ns)
            case MoreBlocks():
                self._receiver.on_more_blocks(sender, message)
            case Ready():
                self._receiver.on_ready(sender, message)
            case Handoff():
                self._receiver.on_handoff(sender, message)
            case Withdraw():
                self._receiver.on_withdraw(sender, message)
            case Wanted():
                self._sender.on_wanted(sender, message)
            case Release():
                self._sender.on_release(sender, message)
            case Fetch():
                self._sender.answer_fetch(sender, message, now_ns)
            case Alloc():
                self._remote.on_alloc(sender, message, now_ns)
            case Allocated():
                self._remote.on_allocated(sender, message)
            case Free():
                self._remote.on_free(sender, message)
            case _:
                pass

    def advance_transfers(self, now_ns: int) -> list[Outcome]:
        """End what has outlived its lease, and let imports go on that wait for room. Cheap when there is none: call it
        on every event, behind all that may have freed blocks."""
        while (thing := self._deadlines.pop_due(now_ns)) is not None:
            match thing:
                case Export():
                    self._sender.expire_export(thing, "the lease has ended")
                case Import():
                    self._receiver.expire_import(thing)
                case RoomWait():
                    self._receiver.end_room_wait(thing)
                case Fetching():
                    self._receiver.fetches.expire_fetch(thing)
                case SpareTurn():
                    self._spread.ask_spares(thing, now_ns)
                case Allocation():
                    self._remote.take_back(thing)
                case AllocCall():
                    self._remote.time_out(thing)
                case _:
                    check(False, f"{thing!r} has a deadline and no way to end")
        return self._take_outcomes(now_ns)

    def plan_made(self, step_id: int) -> None:
        """Plan ``step_id`` has been made, with all copies that the pool had recorded (``pool.take_copies``)."""
        self._barriers.plan_made(step_id)

    def plan_finished(self, step_id: int, now_ns: int) -> list[Outcome]:
        """Plan ``step_id``, and so each before it, touches no memory any more: it was executed, or it failed."""
        self._barriers.plan_finished(step_id)
        return self._take_outcomes(now_ns)

    def everything_failed(self, now_ns: int) -> list[Outcome]:
        """A step failed, no KV can be relied upon: all offers are withdrawn, all imports fail. Afterwards the exchange
        holds no pin: call it before the cache is cleared. Pulls under way keep their blocks until they end, and peers
        the blocks that they allocated here."""
        self._spread.distrust_all()
        self._sender.withdraw_all("a step failed")
        self._receiver.fail_all("a step failed")
        return self._take_outcomes(now_ns)

    def restart_as(self, self_peer: Peer) -> None:
        """The owner was expelled and is ``self_peer`` from now on: all transfers end silently, all peers are
        forgotten. Pulls under way keep their blocks until they end."""
        self._sender.drop_all()
        self._receiver.drop_all()
        self._spread.drop_all()
        self._remote.drop_all()
        self._context.peers.forget_all()
        self._context.self_peer = self_peer

    def peer_joined(self, info: PeerInfo, now_ns: int) -> list[Outcome]:
        """``info.peer`` is a member. An older generation of it is gone."""
        older = self._context.peers.add_member(info)
        if older is not None:
            self._end_peer(older, f"{older.name} has started anew")
        self._receiver.peer_joined(info.peer, now_ns)
        return self._take_outcomes(now_ns)

    def set_members(self, members: Sequence[PeerInfo], now_ns: int) -> list[Outcome]:
        """``members`` are all members: peers that are not among them are gone."""
        own_name, names = self._context.self_peer.name, {info.peer.name for info in members}
        outcomes: list[Outcome] = []
        for peer in self._context.peers.members():
            if peer.name not in names:
                outcomes += self.peer_removed(peer, now_ns)
        for info in members:
            if info.peer.name != own_name:
                outcomes += self.peer_joined(info, now_ns)
        return outcomes

    def peer_removed(self, peer: Peer, now_ns: int) -> list[Outcome]:
        """``peer`` is dead or has left: everything with it ends."""
        self._context.peers.remove_member(peer)
        self._end_peer(peer, f"{peer.name} is gone")
        return self._take_outcomes(now_ns)

    def _end_peer(self, peer: Peer, reason: str) -> None:
        self._sender.peer_removed(peer, reason)
        self._receiver.peer_removed(peer, reason)
        self._remote.peer_removed(peer)

    def _take_outcomes(self, now_ns: int) -> list[Outcome]:
        self._receiver.try_waiting()
        self._receiver.pulls.start()
        outcomes, self._context.outcomes = self._context.outcomes, []
        return self._spread.gather_outcomes(outcomes, now_ns)

    def take_actions(self) -> list[ExchangeAction]:
        """Actions for the host, in order; none of them is returned again."""
        actions, self._context.actions = self._context.actions, []
        return actions

    # -- views

    @property
    def counters(self) -> ExchangeCounters:
        """Totals since the start."""
        return self._context.counters

    @property
    def fence(self) -> int:
        """The plan that has to finish before everything decided so far is true in memory: the last one made, or the
        next one while copies are recorded that no plan carries yet."""
        return self._barriers.all_settled()

    def fence_of_cached(self, places: Sequence[Place]) -> int:
        """The plan that has to finish before cached blocks at ``places`` hold their final bytes: mostly it has."""
        return self._barriers.safe_to_read(places)

    def plans_before_pull(self, blocks: int) -> int:
        """How many plans a pull into ``blocks`` new HBM blocks is expected to wait for. Plans have mostly finished with
        blocks that are free or can be dropped; a block that has to go down to DRAM goes with the next plan."""
        pool = self._context.pool
        under_way = self._barriers.last_made - self._barriers.last_finished
        return under_way + 1 if under_way and pool.config.dram_blocks and blocks > pool.blocks_free else 0

    @property
    def wants_plan(self) -> bool:
        """Whether something waits for copies that no plan carries yet: make one, be it with nothing but copies."""
        return self._barriers.wants_plan

    @property
    def holds_back(self) -> bool:
        """Whether something waits for a plan to finish."""
        return self._barriers.is_holding

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance_transfers` is worth calling. None: nothing has a deadline."""
        return self._deadlines.next_ns()

    @property
    def transfers_open(self) -> int:
        """Offers, imports and fetches that have not ended."""
        return len(self._sender.open) + len(self._receiver.open) + len(self._receiver.fetches.open)

    def references(self) -> Counter[Place]:
        """Every reference that the exchange holds, by block."""
        places = self._receiver.list_references()
        for part in (self._sender, self._spread, self._remote):
            places += part.list_references()
        return Counter(places) if places else Counter()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the books do not balance. For tests; slow."""
        pool = self._context.pool
        for (tier, block), count in self.references().items():
            total_references = pool.ref_count(tier, block)
            check(
                total_references >= count,
                "{} block {}: {} references of the exchange, {} in all",
                tier.name,
                block,
                count,
                total_references,
            )
        self._barriers.check_invariants()
        self._sender.check_invariants()
        self._receiver.check_invariants()
        self._spread.check_invariants()
        check(not self._context.outcomes, "outcomes that were not returned: {}", self._context.outcomes)

    def __repr__(self) -> str:
        exports, imports, fetches = len(self._sender.open), len(self._receiver.open), len(self._receiver.fetches.open)
        return f"<Exchange {self._context.self_peer.name} exports={exports} imports={imports} fetches={fetches}>"
