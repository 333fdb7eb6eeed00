"""Handing requests over to another instance after their prefill, or when they migrate: the side that they leave.

::

    admitted     offer(blocks)                    as soon as its first row is in a plan
    each plan    computed(blocks of the row)      named now, sealed when the plan (or the layer of it) has finished
    last token   hand_off(tokens drawn)           the sequences leave; the offer holds their blocks until ``Release``

One that decodes is offered with its last row, or behind it where tokens were under way that the offer must name.

When an offer fails before that, the request decodes here. When the request is preempted, or a step fails, the offer is
withdrawn, and a new one made when the request is admitted again.
"""

from __future__ import annotations

from memserve.base.errors import check
from memserve.base.types import Tier, TokenArray, TransferMode
from memserve.base.units import NS_PER_S, ceil_div
from memserve.instance.cluster.idempotency import ReplayBuffer
from memserve.instance.cluster.layer_announcer import LayerAnnouncer
from memserve.instance.cluster.routers import Routers
from memserve.instance.events import StepPlan
from memserve.instance.intake import RequestIntake
from memserve.instance.scheduler.sequence import Cause, Group, Phase, RemoteState, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.transfer.context import Place
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.peers import Peer

_ARRIVAL_NS = 2 * NS_PER_S
"""A request that migrates with all of its KV runs nowhere until it has arrived: after this long it is tried again from
its tokens."""


class HandoffSender:
    """All requests that leave after their first token, and the offers of those that have left."""

    def __init__(
        self,
        state: SchedulerState,
        intake: RequestIntake,
        exchange: Exchange,
        replay_buffer: ReplayBuffer,
        routers: Routers,
        num_layers: int,
    ) -> None:
        self._state, self._replay_buffer, self._routers = state, replay_buffer, routers
        self._intake = intake
        self._exchange = exchange
        self._announcer = LayerAnnouncer(exchange, num_layers)
        #: all and only the live requests with ``tokens_here``, by id
        self.leaving: dict[str, Group] = {}
        #: open offers of requests that have left: offer id -> request id
        self.departed: dict[str, str] = {}
        #: requests that were to migrate and go on here, and why, for their routers
        self.stayed: list[tuple[str, str]] = []
        self.handed_over = 0
        #: of them: computed by layer
        self.by_layer = 0
        #: of them: requests that had been decoded here
        self.migrated = 0

    # -- coming

    def prepare_handoff(self, group: Group, known_tokens: int, resumed: bool) -> None:
        """Let ``group`` leave after its next token, if a further one follows and its sequences still share a prompt.

        ``known_tokens``: those generated before. Sequences of a resumed request with ``n > 1`` have parted: they stay.
        """
        remote = group.remote
        if remote is None or remote.decode_at is None:
            return
        if group.max_tokens - known_tokens <= 1 or (resumed and group.request.n > 1):
            self._mark_staying(group, remote, "nothing to gain")
            return
        if remote.original is not None:
            group.muted, group.forks_pending = True, 0
        group.tokens_here = known_tokens + 1
        self.leaving[group.request.request_id] = group
        group.facts += [("decode_at", remote.decode_at.name), ("handoff_mode", remote.mode.value)]

    def let_migrate(self, group: Group, to: Peer) -> None:
        """Let ``group``, of one sequence, go on at ``to`` after the next token that it draws here."""
        remote, sequence = group.remote, next(iter(group.sequences.values()))
        if remote is None:
            return
        remote.decode_at, remote.mode, remote.return_kv, remote.migrates = to, TransferMode.BY_REQUEST_AGG, False, True
        group.tokens_here = len(sequence.out) + sequence.inflight + 1
        sequence.left = sequence.draws_left
        self.leaving[group.request.request_id] = group
        group.facts.append(("migrates_to", to.name))

    # -- while it is computed

    def on_plan_made(self, plan: StepPlan, now_ns: int) -> None:
        """``plan`` has been made: offer what it admitted, name what it computes."""
        for sequence in (*self._state.prefilling.items, *self._state.idle.items):
            group, remote = sequence.group, sequence.group.remote
            if group.tokens_here is None or remote is None or remote.decode_at is None:
                continue  # it stays, or is kept here for others
            if sequence.scheduled_step != plan.step_id:
                continue
            if sequence.computed > sequence.known_length:
                continue  # it has a row for a token that is under way: it is offered when that is known
            if sequence is next(iter(group.sequences.values())):  # it computes the prompt for all
                start = plan.starts[plan.slots.index(sequence.slot)]  # type: ignore[arg-type]  # a sequence with a row has a slot
                if remote.offer_id is None:
                    self._offer_group(group, remote, sequence, sequence.known_tokens(), start, now_ns)
                    self._announce_earlier(remote, sequence, start // self._state.memory.block_tokens, plan)
                self._announce_blocks(remote, sequence, plan)

    def _offer_group(
        self, group: Group, remote: RemoteState, sequence: Sequence, tokens: TokenArray, start: int, now_ns: int
    ) -> None:
        """Offer the KV of ``tokens``, the first of ``sequence``, of which those from ``start`` on are not computed. The
        offer has every block that ``sequence`` has of them, however they lie."""
        request, end_block = remote.original or group.request, ceil_div(len(tokens), self._state.memory.block_tokens)
        by_layer = sequence.layered
        blocks = sequence.blocks[: end_block if by_layer is None else min(end_block, by_layer.first)]
        dram_blocks = [] if by_layer is None else by_layer.dram_blocks[: max(0, end_block - by_layer.first)]
        terms = OfferTerms(
            mode=remote.mode,
            insert=request.use_cache,
            request=request,
            deadline_in_ns=None if remote.deadline_ns is None else max(1, remote.deadline_ns - now_ns),
            return_kv=remote.return_kv,
            router=self._routers.follower_of(group.request.request_id),
            lease_ns=_ARRIVAL_NS if remote.migrates and len(tokens) - start <= 1 else 0,
            migrates=remote.migrates,
        )
        remote.offer_id = self._exchange.offer_blocks(
            remote.decode_at,  # type: ignore[arg-type]  # a request that leaves has a destination
            OfferedBlocks(request.isolation, tokens, blocks, dram_blocks=dram_blocks),
            now_ns,
            terms,
        )
        remote.offered_blocks, remote.named_blocks = len(blocks) + len(dram_blocks), 0
        # an offer names HBM before DRAM: what is whole behind entries in DRAM follows
        self._extend_offer(remote, sequence, end_block)

    def _announce_earlier(self, remote: RemoteState, sequence: Sequence, end_block: int, plan: StepPlan) -> None:
        """Blocks before the row: from the cache, computed or copied by plans made so far; where the request migrates,
        also from rows of its own, which may be under way."""
        if end_block:
            cached = places_of(sequence)[:end_block]
            fence = plan.step_id if remote.migrates else self._exchange.fence_of_cached(cached)
            self._exchange.announce_computed(remote.offer_id or "", 0, end_block, fence=fence)
            remote.named_blocks = end_block

    def _announce_blocks(self, remote: RemoteState, sequence: Sequence, plan: StepPlan) -> None:
        """Whole blocks up to the row's end; the last one as well when the prompt ends."""
        offer_id, block_tokens = remote.offer_id or "", self._state.memory.block_tokens
        self._extend_offer(remote, sequence, ceil_div(sequence.known_length, block_tokens))
        end = sequence.computed
        end_block = ceil_div(end, block_tokens) if end == sequence.known_length else end // block_tokens
        if end_block <= remote.named_blocks:
            return
        memory = self._state.memory
        if remote.mode is TransferMode.BY_LAYER and sequence.layered is None and memory.pool.config.page_is_layer:
            self._announcer.add_blocks(plan, offer_id, (remote.named_blocks, end_block), last_waits=False)
        else:
            self._exchange.announce_computed(offer_id, remote.named_blocks, end_block, fence=plan.step_id)
        remote.named_blocks = end_block
        if end == sequence.known_length:
            self._announce_rest(remote, sequence, plan.step_id)

    def _extend_offer(self, remote: RemoteState, sequence: Sequence, end_block: int) -> None:
        """Offer the entries that ``sequence`` has got since, up to ``end_block``."""
        count = min(sequence.table_entries, end_block) - remote.offered_blocks
        if count > 0:
            place = len(sequence.blocks) - (sequence.table_entries - remote.offered_blocks)
            self._exchange.more_blocks(remote.offer_id or "", sequence.blocks[place : place + count])
            remote.offered_blocks += count

    def _offer_drawn(self, group: Group, remote: RemoteState) -> None:
        """All that a request needs which has drawn its last token here. No plan under way touches any of it, unless
        some lies by layer: then it may just be on its way to DRAM."""
        sequence = next(iter(group.sequences.values()))
        tokens = sequence.known_tokens()[: sequence.computed]
        self._offer_group(group, remote, sequence, tokens, len(tokens), self._state.now)
        end_block, fence = ceil_div(len(tokens), self._state.memory.block_tokens), 0
        if sequence.layered is not None:
            fence = self._exchange.fence
        self._exchange.announce_computed(remote.offer_id or "", 0, end_block, fence=fence)
        remote.named_blocks = end_block
        self._announce_rest(remote, sequence, fence)

    def _announce_rest(self, remote: RemoteState, sequence: Sequence, fence: int) -> None:
        """What follows the last block of KV: it is there once plan ``fence`` has finished."""
        memory = self._state.memory
        if memory.states.has_states:
            self._announce_state(remote, sequence, remote.named_blocks, fence)
        if memory.windows.has_windows:
            self._announce_window(remote.offer_id or "", sequence, remote.named_blocks, fence)

    def _announce_state(self, remote: RemoteState, sequence: Sequence, end_block: int, fence: int) -> None:
        """The state behind all known tokens follows their KV, or the request stays."""
        states, offer_id = self._state.memory.states, remote.offer_id or ""
        check(remote.offered_blocks == end_block, "{} offers blocks behind its tokens", sequence)
        snapshot = states.take_for_peer(sequence)
        if snapshot is None:
            self._exchange.withdraw_offer(offer_id, "no room for the state")
            remote.offer_id = None
            self.continue_here(sequence.group, "no room for the state")
            return
        self._exchange.more_blocks(offer_id, snapshot.pages)
        self._exchange.announce_state(offer_id, end_block, fence=fence)
        states.forget(snapshot)  # the offer holds its blocks

    def _announce_window(self, offer_id: str, sequence: Sequence, end_block: int, fence: int) -> None:
        """The parts of the last window follow the KV of the other layers."""
        loan = self._state.memory.windows.lend(sequence, sequence.computed)
        check(loan is not None, "{} lacks a part of its window", sequence)
        if loan is not None and loan.blocks:
            self._exchange.more_blocks(offer_id, loan.blocks, loan)
            self._state.memory.pool.release(loan.blocks)  # the offer has its own
            self._exchange.announce_state(offer_id, end_block, fence=fence)

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of the plan."""
        self._announcer.layer_finished(step_id, layer)

    def step_finished(self, step_id: int) -> None:
        """All layers are written, reported or not. Hand over the requests whose tokens are known."""
        self._announcer.step_finished(step_id)
        drawn_groups = {id(s.group): s.group for s in self._state.idle.items if s.group.tokens_here is not None}
        for group in drawn_groups.values():
            if not group.forks_pending and all(self._is_done(sequence) for sequence in group.sequences.values()):
                self._hand_over(group)

    # -- leaving

    @staticmethod
    def _is_done(sequence: Sequence) -> bool:
        return sequence.phase is Phase.IDLE and not sequence.inflight and sequence.late is None

    def _hand_over(self, group: Group) -> None:
        """Let a request leave, each of whose sequences has its first token, or has ended with it."""
        remote, request, live = group.remote, group.request, group.sequences
        if remote is not None and remote.migrates and remote.offer_id is None:
            self._offer_drawn(group, remote)
        if remote is None or remote.offer_id is None:
            return
        offer_id, remote.offer_id = remote.offer_id, None
        if group.muted:
            self._exchange.hand_off(offer_id, (), ())
        else:
            tokens = tuple(tuple(live[index].out) if index in live else () for index in range(request.n))
            emitted_outputs = self._replay_buffer.outputs_of(request.request_id, self._state.outputs)
            self._exchange.hand_off(
                offer_id, tokens, tuple(i for i in range(request.n) if i not in live), emitted_outputs
            )
        self.departed[offer_id] = request.request_id
        self.handed_over += 1
        self.migrated += remote.migrates
        self.by_layer += any(sequence.layered is not None for sequence in live.values())
        self._state.drop_group(group)

    def on_preempted(self, group: Group) -> None:
        """The request was preempted, or its KV was lost: it is offered anew when it is admitted again, if its sequences
        have not parted."""
        remote = group.remote
        if remote is None or self.leaving.get(group.request.request_id) is not group:
            return
        if remote.offer_id is not None:
            self._exchange.withdraw_offer(remote.offer_id, "preempted")
            remote.offer_id = None
        sequences = list(group.sequences.values())
        drawn_tokens = len(sequences[0].out) + sequences[0].inflight
        parted = len(sequences) > 1 or (group.request.n > 1 and not group.forks_pending and not group.muted)
        if parted or (group.muted and drawn_tokens) or group.max_tokens - drawn_tokens <= 1:
            self.continue_here(group, "preempted")
        else:
            group.tokens_here = drawn_tokens + 1

    def continue_here(self, group: Group, why: str) -> None:
        """No instance takes the request over: it is decoded here."""
        remote = group.remote
        if remote is None:
            return
        self._mark_staying(group, remote, why)
        if group.muted:
            self._restart_beam_search(group, remote)
            return
        for sequence in group.sequences.values():
            sequence.left = sequence.draws_left
            if sequence.phase is Phase.IDLE and sequence.left and sequence.late is None:
                self._state.move(sequence, Cause.HANDOFF_ABANDONED)

    def _mark_staying(self, group: Group, remote: RemoteState, why: str) -> None:
        if remote.migrates:
            remote.migrates = False
            self.stayed.append((group.request.request_id, why))
        remote.decode_at, group.tokens_here = None, None
        self.leaving.pop(group.request.request_id, None)
        group.facts.append(("handoff_not_made", why))

    def _restart_beam_search(self, group: Group, remote: RemoteState) -> None:
        """A beam search that stays begins in the place of its substitute; its prompt is in the cache."""
        if remote.original is None:
            return
        original, remote.original = remote.original, None
        group.remote = None
        self._state.drop_group(group)
        again = self._intake.open_group(original, group.arrived_ns, remote.deadline_ns)
        again.remote, again.facts = remote, group.facts
        self._intake.enqueue_group(again, Cause.ENQUEUED)

    # -- endings

    def on_request_ended(self, group: Group) -> None:
        """The request has ended here, or has left: its offer is withdrawn unless it has been handed off."""
        name, remote = group.request.request_id, group.remote
        if self.leaving.get(name) is group:
            del self.leaving[name]
        if remote is not None and remote.offer_id is not None:
            self._exchange.withdraw_offer(remote.offer_id, "the request has ended")
            remote.offer_id = None

    def cancel_request(self, request_id: str) -> None:
        """The client went away: withdraw the offer of a request that has left."""
        for offer_id in [offer for offer, name in self.departed.items() if name == request_id]:
            del self.departed[offer_id]
            self._exchange.withdraw_offer(offer_id, "cancelled")

    def on_released(self, offer_id: str, used: bool, reason: str) -> str | None:
        """The offer has ended. Returns the id of a request that has left and that no instance has taken over."""
        name = self.departed.pop(offer_id, None)
        if name is not None:
            return None if used else name
        for group in list(self.leaving.values()):
            if group.remote is not None and group.remote.offer_id == offer_id:
                group.remote.offer_id = None
                self.continue_here(group, reason)
        return None

    def kv_lost(self) -> None:
        """A step failed, and with it every offer."""
        self._announcer.clear()
        for group in self.leaving.values():
            if group.remote is not None:
                group.remote.offer_id = None

    def start_over(self) -> None:
        """After a failed step, when sequences were reset: requests that are still here are offered anew."""
        for group in list(self.leaving.values()):
            self.on_preempted(group)

    def clear(self) -> None:
        """The instance was expelled: requests that have left are forgotten, too."""
        self.departed.clear()
        self._announcer.clear()


def places_of(sequence: Sequence) -> list[Place]:
    """Where the blocks of ``sequence`` lie whole, in order."""
    by_layer = sequence.layered
    blocks = sequence.blocks if by_layer is None else sequence.blocks[: by_layer.first]
    below = [] if by_layer is None else by_layer.dram_blocks
    return [(Tier.HBM, block) for block in blocks] + [(Tier.DRAM, block) for block in below]
