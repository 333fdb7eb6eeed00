"""All dealings of one pool with the pools of other processes (level 1): offers, pulls, fetches, leases, fences.

Accounting and protocol only: no bytes move here. Messages, sealed and pulled pages go in through :meth:`handle`; what
is to be sent, sealed and pulled comes out of :meth:`take_actions`, what it means for the owner as outcomes.

    event -> exchange.handle(event, now) -> outcomes
             exchange.advance(now)       -> outcomes     on every event: leases, imports that wait for room
             exchange.take_actions()     -> Send | SealPages | PullPages | CancelPulls
"""

from __future__ import annotations

from collections.abc import Sequence

from memserve.config import ExchangeConfig
from memserve.errors import InvariantError
from memserve.mempool.jobs import CancelPulls, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.mempool.outcomes import ExchangeCounters, Outcome
from memserve.mempool.pool import BlockPool
from memserve.messages import Peer, PeerInfo
from memserve.serving import MessageArrived, Send
from memserve.types import KVGeometry, Request, Tier, TokenArray, TransferMode

ExchangeAction = Send | SealPages | PullPages | CancelPulls


class Exchange:
    """Gives blocks of one pool to peers and takes theirs; see the module's picture and CLUSTER notes in ``messages``.

    Every method that may end a transfer returns outcomes. After each call the owner takes the actions.
    """

    def __init__(
        self, pool: BlockPool, geometry: KVGeometry, config: ExchangeConfig, me: Peer, namespace: str | None = None
    ) -> None:
        """``namespace`` and ``geometry`` are those that this process tells in its own ``PeerInfo``: peers with others
        are refused. ``namespace`` ``None`` = the pool's."""
        self.counters = ExchangeCounters()
        self.headroom_blocks = 0
        """HBM blocks that an import leaves available when it allocates; set by the owner as it likes."""

    # -- the owner of blocks

    def offer(
        self,
        to: Peer,
        tenant: str,
        tokens: TokenArray,
        blocks: Sequence[int],
        now: int,
        *,
        tier: Tier = Tier.HBM,
        first_block: int = 0,
        mode: TransferMode = TransferMode.BY_REQUEST_AGG,
        insert: bool = True,
        request: Request | None = None,
        deadline_in_ns: int | None = None,
        return_kv: bool = False,
        private: bytes = b"",
        dst_blocks: Sequence[int] = (),
        dst_tier: Tier = Tier.HBM,
    ) -> str:
        """Offer ``blocks`` (on ``tier``) to ``to``; returns the transfer id.

        ``blocks[i]`` holds, or will hold, block ``first_block + i`` of ``tokens``. The exchange takes a reference of
        its own on each until the taker's ``Release``, the lease's end, :meth:`withdraw` or the peer's death; the
        caller's references stay the caller's. The taker hears of pages by :meth:`computed`.
        """
        raise InvariantError("not built")

    def more_blocks(self, transfer_id: str, blocks: Sequence[int]) -> None:
        """The offer goes on with ``blocks`` behind those that it has (a reference each). Ignored when it has ended."""

    def computed(
        self,
        transfer_id: str,
        first_block: int,
        end_block: int,
        first_layer: int = 0,
        end_layer: int | None = None,
        fence: int | None = None,
    ) -> None:
        """Layers ``[first_layer, end_layer)`` of blocks ``[first_block, end_block)`` (from the prompt's start) hold
        their final bytes once plan ``fence`` has finished: they are sealed then, and the taker told.

        ``fence`` ``None`` = :attr:`fence`, right for what any plan made so far computes or copies; 0 = they are there
        now (that plan, or that layer of it, has finished). ``end_layer`` ``None`` = all. Nobody writes to those pages
        while the offer lives. Each page is named once. Ignored when the offer has ended.
        """

    def hand_off(self, transfer_id: str, first_tokens: tuple[tuple[int, ...], ...], ended: tuple[int, ...]) -> None:
        """The prefill is done, every page of the offer has been named by :meth:`computed`: ``Handoff`` follows the
        last ``Ready``. Ignored when the offer has ended."""

    def withdraw(self, transfer_id: str, reason: str) -> None:
        """Take an offer back. Ignored when it has ended."""

    # -- the taker

    def fetch(
        self,
        holder: Peer,
        tenant: str,
        tokens: TokenArray,
        first_block: int,
        end_block: int,
        now: int,
        deadline_ns: int,
    ) -> str:
        """Ask ``holder`` for the KV of blocks ``[first_block, end_block)`` of ``tokens``; returns the transfer id.

        ``deadline_ns`` is absolute. Blocks before ``first_block`` are in the own index: they are pinned meanwhile. One
        :class:`FetchEnded` follows, at the deadline at the latest, unless it is given up.
        """
        raise InvariantError("not built")

    def give_up(self, transfer_id: str, reason: str) -> None:
        """An import or a fetch is no longer wanted: nothing is held for it any more, no outcome follows. Ignored when
        it has ended."""

    # -- memory at a peer (MemServe Table 1 with an instance id)

    def allocate_at(self, peer: Peer, count: int, tier: Tier, now: int, deadline_ns: int) -> str:
        """Ask ``peer`` for ``count`` blocks; one :class:`RemoteAllocated` follows, at ``deadline_ns`` at the latest."""
        raise InvariantError("not built")

    def free_at(self, call_id: str) -> None:
        """Give back what :meth:`allocate_at` got."""

    # -- both

    def handle(self, event: MessageArrived | PagesSealed | PagesPulled, now: int) -> list[Outcome]:
        """A peer said something, or the host has done what it was asked for. Other messages are ignored."""
        return []

    def advance(self, now: int) -> list[Outcome]:
        """End what has outlived its lease, and let imports go on that wait for room. Cheap when there is nothing: call
        it on every event, behind whatever may have freed blocks."""
        return []

    def plan_made(self, step_id: int) -> None:
        """Plan ``step_id`` has been made, with all copies that the pool had recorded (``pool.take_copies``)."""

    def plan_finished(self, step_id: int, now: int) -> list[Outcome]:
        """Plan ``step_id``, and so each before it, touches no memory any more: it was executed, or it failed."""
        return []

    def everything_failed(self, now: int) -> list[Outcome]:
        """A step failed, no KV can be relied upon: all offers are withdrawn, all imports fail. Afterwards the exchange
        holds no pin: call it before the cache is cleared. Pulls under way keep their blocks until they end."""
        return []

    def reborn(self, me: Peer) -> None:
        """The owner was expelled: everything ends, silently for the owner, and peers are forgotten; from now on it is
        ``me``. Pulls under way keep their blocks until they end."""

    def peer_joined(self, info: PeerInfo, now: int) -> list[Outcome]:
        """``info.peer`` is a member. An older generation of the same name is gone."""
        return []

    def peer_gone(self, peer: Peer, now: int) -> list[Outcome]:
        """``peer`` is dead or has left: everything with it ends."""
        return []

    def take_actions(self) -> list[ExchangeAction]:
        """What the host shall do, in order."""
        return []

    @property
    def fence(self) -> int:
        """The plan that has to finish before everything decided so far is true in memory: the last one made, or the
        next one while copies are recorded that no plan carries yet."""
        return 0

    @property
    def wants_plan(self) -> bool:
        """Something waits for copies that no plan carries yet: make one, be it with nothing but copies."""
        return False

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance` is worth calling; ``None`` = nothing has a deadline."""
        return None

    @property
    def transfers_open(self) -> int:
        """Offers, imports and fetches that have not ended."""
        return 0

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the books do not balance. For tests; slow."""
