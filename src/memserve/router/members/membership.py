"""Joining, heartbeats, draining, leaving, dying; and attempts that a member has lost.

Asking a store to join that its operator has started without a word about this router.

Members that are silent are noticed, looked at once more, and then taken to be dead::

    heard ........ 4.5 s: noticed ........ 5 s: still silent --> dead
      ^                                       |
      +------------- heard meanwhile ---------+

Two looks, because the router may have been stopped before the first: what came meanwhile is read only after it.

At a follower the owner decides which members there are, and a follower works with those that it hears::

    owner: JoinAccepted, PeerJoined --> KNOWN --a message of it--> a member here --silence--> KNOWN
                                          |                           |
                                          +------- owner: PeerGone ---+--> gone

A follower admits, expels and introduces no member. A member that it does not hear, though the owner does, gets none
of its requests until it is heard again. What the last owner said holds while there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memserve.base.config import ClusterConfig
from memserve.base.errors import check
from memserve.base.types import Role
from memserve.protocol.admission import AdmissionGrants
from memserve.protocol.messages import (
    AdaptersHeld,
    AdaptersNamed,
    AnyMessage,
    AttemptsUnknown,
    Drain,
    Expelled,
    Heartbeat,
    HeartbeatAck,
    Join,
    JoinAccepted,
    Leave,
    NameAdapters,
    PeerGone,
    PeerJoined,
    QueryAttempts,
    QueryKvEvents,
    Refused,
    RejoinRequest,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
from memserve.protocol.records import MemberDrained, MemberEntered, MemberGone, RecoveredMember
from memserve.protocol.store import JoinRequest
from memserve.router.admission.follower import RemoteAdmission
from memserve.router.events import MemberChange, StoreNamed
from memserve.router.members.adapters import AdapterBook, FollowedNames
from memserve.router.members.registry import LinkTotals, Member, MemberState, Registry
from memserve.router.outbox import Outbox, Timers
from memserve.router.parts import RouterParts
from memserve.router.report import InstanceView
from memserve.router.requests.lifecycle import Lifecycle

_LATE = 10
"""A message is on its way for less than this part of the time after which a silent member is dead."""


class SilenceWatch:
    """Looks after all members that it was told to :meth:`watch_member`, until they are gone."""

    def __init__(
        self, registry: Registry, timers: Timers, dead_after_ns: int, on_dead: Callable[[Member, str, int], None]
    ) -> None:
        """``on_dead(member, reason, now_ns)``: for each that is silent for ``dead_after_ns``."""
        self._registry, self._timers, self._dead_after_ns, self._on_dead = registry, timers, dead_after_ns, on_dead
        #: how long what was sent is on its way, at most
        self.late_ns = dead_after_ns // _LATE

    def watch_member(self, member: Member) -> None:
        """From now_ns on."""
        self._timers.arm(self._suspect_at_ns(member), self._check_silence, member.peer)

    def _suspect_at_ns(self, member: Member) -> int:
        return member.last_seen_ns + self._dead_after_ns - self.late_ns

    def _check_silence(self, peer: Peer, now_ns: int) -> None:
        member = self._registry.get(peer)
        if member is None:
            return
        if self._suspect_at_ns(member) > now_ns:
            self.watch_member(member)
        else:
            due_ns = max(member.last_seen_ns + self._dead_after_ns, now_ns + self.late_ns)
            self._timers.arm(due_ns, self._confirm_silence, (peer, member.last_seen_ns))

    def _confirm_silence(self, observation: tuple[Peer, int], now_ns: int) -> None:
        peer, heard_ns = observation
        member = self._registry.get(peer)
        if member is None:
            return
        if member.last_seen_ns > heard_ns:
            self._check_silence(peer, now_ns)
        else:
            self._on_dead(member, f"nothing was heard of it for {(now_ns - heard_ns) / 1e9:.1f} s", now_ns)


class LossDetector:
    """Notices attempts that their instance does not have, within two heartbeats, and has them placed again.

    A ``Dispatch`` can be lost on a link that stays up (a full queue, a broken connection that comes back at once), and
    so can the last word about a request. Both ends count, and each heartbeat carries the instance's totals::

        dispatches    sent - heard    may be under way; not, if it was sent before the last heartbeat but one
        answers       told - heard    all told before the heartbeat are before it on the link: the rest is lost

    Where totals differ the router asks by name, and only the answer counts: messages of one link come in order, so what
    was dispatched before the question is there when it is heard, and what was said before the answer is heard before
    it. A late heartbeat, or one that repeats an old reading because its engine is busy, costs a question and nothing
    else; a lost question is repeated at the next heartbeat, where totals still differ.

    Of a pair, the prefill instance is asked first. When it no longer has the attempt, the decode instance is asked: it
    has the attempt, or has told its end, or never will.
    """

    def __init__(self, lifecycle: Lifecycle, outbox: Outbox) -> None:
        self._lifecycle, self._outbox = lifecycle, outbox

    def check_heartbeat(self, member: Member, load: Load) -> None:
        """``load`` came with a heartbeat of ``member``."""
        if load.dispatches_heard is None:
            return
        totals = member.totals
        differs = _differs(totals, load.dispatches_heard, load.answers_told)
        totals.dispatches_before = totals.dispatches
        if differs:
            self._query_attempts(
                member, [attempt_id for attempt_id in member.attempts if self._is_with(member, attempt_id)]
            )

    def _is_with(self, member: Member, attempt_id: str) -> bool:
        """Whether ``member`` must have the attempt now: the decode instance has it from the handover on."""
        attempt = self._lifecycle.requests.by_attempt[attempt_id].attempt
        return attempt is not None and attempt.is_with(member)

    def _query_attempts(self, member: Member, attempts: list[str]) -> None:
        self._outbox.send(member.peer, QueryAttempts(tuple(attempts), member.totals.dispatches))

    def on_attempts_unknown(self, member: Member, message: AttemptsUnknown, now_ns: int) -> None:
        """``member`` has said which attempts it does not have. The difference of the totals is explained."""
        totals = member.totals
        totals.dispatches_lost = message.dispatches - message.dispatches_heard
        totals.answers_lost = max(0, message.answers_told - totals.answers)
        decoding: dict[Member, list[str]] = {}
        for attempt_id in message.attempts:
            req = self._lifecycle.requests.by_attempt.get(attempt_id)
            attempt = req.attempt if req is not None else None
            if attempt is None or member not in attempt.involved:
                continue  # it has ended meanwhile, or was handed over
            if attempt.first is member and attempt.decode_at is not None:
                decoding.setdefault(attempt.decode_at, []).append(attempt_id)
            else:
                self._lifecycle.on_attempt_lost(attempt_id, member, now_ns)
        for decoder, attempts in decoding.items():
            self._query_attempts(decoder, attempts)


def _differs(totals: LinkTotals, dispatches_heard: int, answers_told: int) -> bool:
    """Whether something was lost for sure, or is under way for longer than from one heartbeat to the next."""
    dispatches_known = dispatches_heard + totals.dispatches_lost
    on_time = totals.dispatches_before <= dispatches_known <= totals.dispatches
    return not on_time or answers_told > totals.answers + totals.answers_lost


class Membership:
    """Keeps registry, trees and loads in step."""

    announces = True
    """Whether members are told of each other, and to drain, from here."""

    def __init__(self, parts: RouterParts, lifecycle: Lifecycle) -> None:
        self._config, self._counters, self._lifecycle = parts.config, parts.counters, lifecycle
        tables = parts.tables
        self._registry, self._trees, self._loads = tables.registry, tables.trees, tables.loads
        self._named_prefixes, self._hints, self._outbox = parts.named_prefixes, parts.hints, parts.outbox
        dead_after_ns = parts.config.dead_after_ns
        self._silence = SilenceWatch(
            tables.registry, parts.timers, dead_after_ns, partial(self.remove_member, died=True)
        )
        self._losses = LossDetector(lifecycle, parts.outbox)
        self.adapters = AdapterBook(parts, lifecycle.requests)
        #: for members of the last router; known to machines that remember
        self._rejoin_request = RejoinRequest("")

    # -- joining

    def on_join(self, sender: Peer, message: Join, now_ns: int) -> None:
        """A new member, or one that has not heard that it is one."""
        info = message.info
        if info.peer != sender:
            self._refuse_join(sender, info, f"it speaks for {info.peer.name!r}")
            return
        current = self._registry.get(sender)
        if current is not None:
            current.last_seen_ns = now_ns
            if current.state is MemberState.REJOINING:
                self._readopt_member(current, message, now_ns)
            else:
                self._accept_member(current, message.sent_to)
            return
        newest_dead = self._registry.newest_dead_generation(sender.name)
        if newest_dead is not None and sender.generation <= newest_dead:
            # also one that is older only because its host's clock was set back: peers would take it for a ghost
            newest = self._registry.newest_generation(sender.name)
            self.expel_peer(sender, "this incarnation was taken to be dead", newest, address=info.address)
            return
        reason = self._registry.refusal_reason(info)
        admission = self._config.admission.shared_mode
        if info.role is Role.ROUTER and info.admission != admission:
            peer_flag, own_flag = (f"--admission {mode or 'none'}" for mode in (info.admission, admission))
            reason = f"it was started with {peer_flag}, and the owner with {own_flag}"
        if reason is not None and all(member.state is MemberState.REJOINING for member in self._registry):
            for member in list(self._registry):  # recovered members of another model's cluster, none of which answered
                self.remove_member(member, "a new cluster has begun", now_ns, died=False)
            reason = self._registry.refusal_reason(info)
        if reason is not None:
            self._refuse_join(sender, info, reason)
            return
        older = self._registry.member_by_name(sender.name)
        if older is not None and older.state is not MemberState.REJOINING and older.info.address != info.address:
            since_ns, late_ns = older.contest_name(sender, now_ns), self._silence.late_ns
            if older.last_seen_ns > since_ns + late_ns:  # it lives, so this is no restart
                self._refuse_join(sender, info, older.name_conflict)
                return
            if now_ns <= since_ns + 3 * late_ns:
                return  # it asks again
        if older is not None:
            self.remove_member(older, "it was started anew", now_ns, died=True)
        member = self._admit_member(message, now_ns)
        if older is not None:
            member.replaces = older.info.address

    def _refuse_join(self, sender: Peer, info: PeerInfo, reason: str) -> None:
        self._counters.members_refused += 1
        self._outbox.report_member(MemberChange.REFUSED, sender, info.address, reason, role=info.role)
        self._outbox.send(sender, Refused(reason))

    def _accept_member(self, member: Member, joined_at: str = "") -> None:
        is_follower = member.info.role is Role.ROUTER
        others = (entry for entry in self._registry if entry is not member)
        peer_infos = tuple(entry.info for entry in others if not (is_follower and entry.is_hidden))
        self._outbox.send(member.peer, JoinAccepted(peer_infos, joined_at, self._config.store_copies))

    def _admit_member(self, message: Join, now_ns: int) -> Member:
        info = message.info
        is_back = self._registry.newest_dead_generation(info.peer.name) is not None
        member = self._register_member(info, now_ns)
        member.is_hidden = member.lacks_adapters
        change = MemberChange.RETURNED if is_back else MemberChange.JOINED
        self._outbox.report_member(change, info.peer, info.address, member.costs_note, role=info.role)
        self._outbox.record_ahead(MemberEntered(info, now_ns))
        self._counters.members_joined += 1
        self._introduce_member(member, message.sent_to, now_ns)
        return member

    def _register_member(self, info: PeerInfo, now_ns: int) -> Member:
        """A row in every table; a timer watches the member from now on."""
        member = self._registry.add_member(info, now_ns)
        self._loads.add_member(
            member.number, info.role, info.context_tokens, info.hbm_blocks, info.host_id, member.costs
        )
        self._trees.add_member(member.number, publishes=info.publishes_events, role=info.role)
        self._lifecycle.admission.memory.add_instance(member)
        self._lifecycle.answers.queries_instances |= info.role is Role.ROUTER
        self._silence.watch_member(member)
        self.adapters.on_registered(member)
        return member

    def _introduce_member(self, member: Member, joined_at: str, now_ns: int) -> None:
        """The member hears of all others and they of it; requests that wait may run there."""
        self._accept_member(member, joined_at)
        self.adapters.on_introduced(member)
        self._notify_others(member, PeerJoined(member.info))
        self._lifecycle.place_waiting(now_ns)

    def _notify_others(self, member: Member, message: PeerJoined | PeerGone, role: Role | None = None) -> None:
        """``role``: that of the members that are told; None: all. Followers hear of an instance once it has the
        adapters that requests may name."""
        for receiver in self._registry if self.announces else ():
            is_follower = receiver.info.role is Role.ROUTER
            if receiver is member or (role is not None and receiver.info.role is not role):
                continue
            if not (is_follower and member.is_hidden):
                self._outbox.send(receiver.peer, message)

    # -- members of an earlier router

    def recover_members(
        self, members: tuple[RecoveredMember, ...], dead_peers: tuple[Peer, ...], address: str, last: int, now_ns: int
    ) -> None:
        """Members of the last router, which had the generation ``last``. Each counts, and gets work, when it has
        answered. ``address``: where they reach this router."""
        self._rejoin_request = RejoinRequest(address, last)
        self._registry.remember_dead(dead_peers)
        for recovered in members:
            if self._registry.refusal_reason(recovered.info) is not None:
                continue  # of another model than those before it: it is told when it speaks
            member = self._register_member(recovered.info, now_ns)
            member.state, member.drains = MemberState.REJOINING, recovered.is_draining
            self._loads.close_member(member.number)
            self._trees.recover_member(
                member.number, recovered.next_event, recovered.hbm, recovered.dram, recovered.ssd
            )
            self._lifecycle.admission.memory.restore_used(member, recovered.used, now_ns)
            if member.has_model:
                self._lifecycle.answers.wait_for_member(member, now_ns)
            elif member.info.role is Role.ROUTER and self._config.admission.shared_mode:
                self._lifecycle.remote_requests.wait_for_follower(member.peer)
            self.request_rejoin(member)

    def request_rejoin(self, member: Member) -> None:
        """Repeated when the member speaks as if nothing had happened: the request was lost. Until ``Join`` it counts
        as silent."""
        self._outbox.send(member.peer, self._rejoin_request)

    def _readopt_member(self, member: Member, message: Join, now_ns: int) -> None:
        """The member is back with everything that it had cached: the trees know of that already."""
        info = message.info
        member.update_info(info)
        member.state = MemberState.LIVE
        self._loads.add_member(
            member.number, info.role, info.context_tokens, info.hbm_blocks, info.host_id, member.costs
        )
        self.adapters.on_registered(member)
        self._lifecycle.admission.memory.invalidate_needs()
        self._counters.members_readopted += 1
        note = "with the KV that it had cached"
        self._outbox.report_member(MemberChange.RETURNED, info.peer, info.address, note, role=info.role)
        self._introduce_member(member, message.sent_to, now_ns)
        if member.drains:
            self.drain_member(member, now_ns)

    # -- heartbeats

    def on_heartbeat(self, member: Member, message: Heartbeat, now_ns: int) -> None:
        """``member`` lives, and says how busy it is."""
        self.update_load(member, message.load)
        self._lifecycle.migrations.on_load_told(member, now_ns)
        for changed_member in self._registry.learn_costs(member, message.costs):
            self._loads.set_costs(changed_member.number, changed_member.costs)
        member.stats = message.stats or member.stats
        self.query_kv_events(member, self._trees.query_if_behind(member.number, message.next_event, now_ns))
        if member.state is MemberState.DRAINING and self.announces:
            self._outbox.send(member.peer, Drain())  # the first one may have been lost
        if message.wants_ack:
            self._outbox.send(member.peer, HeartbeatAck())
        self.adapters.on_heartbeat(member)
        self._compare_members(member, message.members_digest)
        self._losses.check_heartbeat(member, message.load)

    def on_adapters_held(self, member: Member, message: AdaptersHeld, now_ns: int) -> None:
        """``member`` says which adapters it has; requests may have waited for that."""
        if self.adapters.on_held(member, message, now_ns):
            if member.is_hidden:
                member.is_hidden = False
                self._notify_others(member, PeerJoined(member.info), Role.ROUTER)
            self._lifecycle.admission.memory.invalidate_needs()
            self._lifecycle.place_waiting(now_ns)

    def on_adapters_named(self, member: Member, message: AdaptersNamed, now_ns: int) -> None:
        """``member``, a follower, has the names of adapters that it was told."""
        self.adapters.on_named(member, message, now_ns)

    def update_load(self, member: Member, load: Load | None) -> None:
        """How busy ``member`` is. None: nothing is said of it."""
        if load is not None:
            member.load = load
            self._loads.apply_heartbeat(member.number, load)

    def query_kv_events(self, member: Member, query: QueryKvEvents | None) -> None:
        """Ask for missing KV events. ``None``: there are none."""
        if query is not None:
            self._outbox.send(member.peer, query)

    def on_attempts_unknown(self, member: Member, message: AttemptsUnknown, now_ns: int) -> None:
        """``member`` was asked for attempts, and does not have these."""
        self._losses.on_attempts_unknown(member, message, now_ns)

    def _compare_members(self, member: Member, digest: int) -> None:
        """An instance that knows other members than there are waits for a lease's end at each handoff to them."""
        differs = digest not in (0, self._registry.members_digest)
        if differs and member.knows_others:
            self._accept_member(member)
        # every other heartbeat: its answer may be on its way
        member.knows_others = differs and not member.knows_others

    # -- going

    def drain_member(self, member: Member, now_ns: int) -> None:
        """``member`` gets nothing new: an operator or the instance itself asked for that."""
        if member.state is MemberState.LIVE:
            member.state = MemberState.DRAINING
            self._outbox.record_ahead(MemberDrained(member.peer))
            self._loads.close_member(member.number)
            self._lifecycle.admission.memory.invalidate_needs()
            self._outbox.send(member.peer, Drain())
            self._lifecycle.migrations.on_draining(now_ns)

    def remove_member(self, member: Member, reason: str, now_ns: int, *, died: bool) -> None:
        """``member`` left or died: all others are told, and what depended on it is tried elsewhere."""
        # before others hear of it: a router that starts after a crash must not count on a member that was told to be
        # gone
        self._outbox.record_ahead(MemberGone(member.peer))
        if died:
            self._counters.members_died += 1
        else:
            self._counters.members_left += 1
        change = MemberChange.DIED if died else MemberChange.LEFT
        self._outbox.report_member(change, member.peer, member.info.address, reason, role=member.info.role)
        failed = self._lifecycle.abandon_member(member, now_ns, died=died)
        self._registry.remove_member(member, is_final=self.announces)
        self._loads.remove_member(member.number)
        self._lifecycle.admission.memory.remove_instance(member)
        self._trees.remove_member(member.number)
        self._notify_others(member, PeerGone(member.peer, reason))
        self._named_prefixes.on_member_removed(member, now_ns)
        self._hints.on_member_removed(member)
        self.adapters.on_member_removed(member)
        # only after all tables have forgotten the member: a request must not be placed on it again
        for req in failed:
            self._lifecycle.place_request(req, now_ns)
        self._lifecycle.answers.on_member_reported(member.peer, now_ns)

    def on_unknown_sender(self, sender: Peer, message: AnyMessage, now_ns: int) -> Member | None:
        """A process that is no member speaks as if it were one. Returns it if it is one from now on."""
        if not isinstance(message, Leave):
            self.expel_peer(sender, "this incarnation is no member")
        return None

    def expel_peer(self, sender: Peer, reason: str, newest: int = 0, *, address: str = "") -> None:
        """Tell a process that takes itself for a member that it is none. ``address``: of its mailbox, where known."""
        self._counters.expelled += 1
        self._outbox.report_member(MemberChange.EXPELLED, sender, address, reason)
        self._outbox.send(sender, Expelled(reason, newest))

    # -- looking

    def send_pending(self, now_ns: int) -> None:
        """Followers hear what was decided in this event."""
        self._lifecycle.remote_requests.send_grants()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        self.adapters.check_invariants()

    def member_views(self) -> tuple[InstanceView, ...]:
        """All members in the order in which they joined."""
        return tuple(self._member_view(member) for member in self._registry)

    def _member_view(self, member: Member) -> InstanceView:
        feed, work, info = self._trees.feed_of(member.number), self._loads.work_of(member.number), member.info
        return InstanceView(
            peer=member.peer,
            role=info.role,
            state=member.state.value,
            address=info.address,
            host_id=info.host_id,
            load=member.load,
            stats=member.stats,
            last_seen_ns=member.last_seen_ns,
            joined_ns=member.joined_ns,
            requests=len(member.attempts),
            prefill_tokens=work.prefill_tokens,
            context_tokens=work.context_tokens,
            hbm_blocks=info.hbm_blocks,
            dram_blocks=info.dram_blocks,
            tree_blocks=self._trees.block_count(member.number),
            next_event=feed.next_event,
            events_aside=len(feed.aside),
        )


class StoreCalls:
    """Calls each store that was named at intervals, whether it is a member or not: one that has started anew is found
    again, and one that is a member hears that its router lives."""

    def __init__(self, config: ClusterConfig, timers: Timers, outbox: Outbox) -> None:
        self._config, self._timers, self._outbox = config, timers, outbox
        self._addresses: dict[Peer, str] = {}  # where each store reaches this router

    def start_calls(self, event: StoreNamed, now_ns: int) -> None:
        """From now on."""
        is_first = event.store not in self._addresses
        self._addresses[event.store] = event.address
        if is_first:
            self._call_store(event.store, now_ns)

    def stop_calls(self) -> None:
        """The router ends: no store need wait until it is taken to be silent, and each may join another at once."""
        for store in self._addresses:
            self._outbox.send(store, Leave())

    def _call_store(self, store: Peer, now_ns: int) -> None:
        self._outbox.send(store, JoinRequest(self._addresses[store]))
        self._timers.arm(now_ns + self._config.call_every_ns, self._call_store, store)

    def on_declined(self, store: Peer, reason: str) -> None:
        """The store belongs to another router."""
        self._outbox.report_member(MemberChange.DECLINED, store, "", reason, role=Role.STORE)


ANY_ROUTER = Peer(ROUTER, 0)


class Following(Membership):
    """Keeps registry, trees and loads in step with what the owner says."""

    announces = False

    def __init__(self, parts: RouterParts, lifecycle: Lifecycle, admission: RemoteAdmission | None) -> None:
        """``admission`` None: there is no admission."""
        super().__init__(parts, lifecycle)
        self.adapters = self.names = FollowedNames(parts, lifecycle.requests)
        self._admission = admission
        self._known: dict[str, PeerInfo] = {}  # instances and stores that are members, as the owner has said

    # -- what the owner says

    def on_owner_message(self, owner: Peer, message: AnyMessage, now_ns: int) -> None:
        """The owner tells of members, or which requests are admitted."""
        match message:
            case AdmissionGrants() if self._admission is not None:
                for rejection in self._admission.on_grants(owner, message, now_ns):
                    self._lifecycle.admission_flow.handle_rejection(rejection, now_ns)
                self._lifecycle.place_waiting(now_ns)
            case JoinAccepted(peers):
                if self._admission is not None:
                    self._admission.on_owner_accepts(owner)
                self.names.on_owner_accepts(owner)
                infos = {info.peer.name: info for info in peers if info.role is not Role.ROUTER}
                for name in [name for name, info in self._known.items() if infos.get(name) != info]:
                    self._remove_known(name, "the owner does not name it any more", now_ns)
                for info in infos.values():
                    self._add_known(info)
            case NameAdapters():
                self.names.on_owner_names(owner, message)
            case PeerJoined(info):
                if info.role is not Role.ROUTER and self._known.get(info.peer.name) != info:
                    self._remove_known(info.peer.name, "it was started anew", now_ns)
                    self._add_known(info)
            case PeerGone(peer, reason):
                known_info = self._known.get(peer.name)
                if known_info is not None and known_info.peer == peer:
                    self._remove_known(peer.name, reason, now_ns)
            case _:
                pass

    def _add_known(self, info: PeerInfo) -> None:
        self._known[info.peer.name] = info
        if info.role.has_model and self._registry.member_by_name(info.peer.name) is None:
            self._registry.unheard_members[info.peer.name] = None

    def _remove_known(self, name: str, reason: str, now_ns: int) -> None:
        self._known.pop(name, None)
        self._registry.unheard_members.pop(name, None)
        member = self._registry.member_by_name(name)
        if member is not None:
            self.remove_member(member, reason, now_ns, died=True)

    # -- what instances and stores say

    def on_join(self, sender: Peer, message: Join, now_ns: int) -> None:
        """They ask the owner."""

    def on_unknown_sender(self, sender: Peer, message: AnyMessage, now_ns: int) -> Member | None:
        """The first message of a member, or the first after a silence."""
        info = self._known.get(sender.name)
        if info is None or info.peer != sender or isinstance(message, Leave):
            return None
        if self._registry.refusal_reason(info) is not None:
            return None  # of another model than those heard so far: the owner has let all of those go meanwhile
        member = self._register_member(info, now_ns)
        self._registry.unheard_members.pop(member.name, None)
        self._counters.members_joined += 1
        self._lifecycle.place_waiting(now_ns)
        return member

    def drain_member(self, member: Member, now_ns: int) -> None:
        """``member`` takes nothing new: it has said so."""
        if member.state is MemberState.LIVE:
            member.state = MemberState.DRAINING
            self._loads.close_member(member.number)
            self._lifecycle.admission.memory.invalidate_needs()
            self._lifecycle.migrations.on_draining(now_ns)

    def expel_peer(self, sender: Peer, reason: str, newest: int = 0, *, address: str = "") -> None:
        """A member that makes no sense to this follower is none to it until the owner names it again."""
        self._counters.expelled += 1
        self._known.pop(sender.name, None)
        self._registry.unheard_members.pop(sender.name, None)

    def remove_all(self, reason: str, now_ns: int) -> None:
        """The owner has taken this follower to be dead: instances have let its attempts go."""
        if self._admission is not None:
            self._admission.on_expelled()
        for name in list(self._known):
            self._remove_known(name, reason, now_ns)

    def send_pending(self, now_ns: int, *, beats: bool = False) -> None:
        """The owner hears of the requests that it admits. ``beats``: a heartbeat goes to it."""
        news = self._admission.take_owner_message(now_ns, beats=beats) if self._admission is not None else None
        if news is not None:
            self._outbox.send(ANY_ROUTER, news)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a member is not known."""
        for member in self._registry:
            info = self._known.get(member.name)
            is_known = info is not None and info.peer == member.peer
            check(is_known, "{} is a member, and the owner has not said so", member)
        unheard = self._known.keys() - {member.name for member in self._registry}
        check(
            self._registry.unheard_members.keys() <= unheard,
            "{} are awaited, not {}",
            self._registry.unheard_members,
            unheard,
        )
