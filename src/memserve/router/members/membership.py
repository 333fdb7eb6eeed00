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
from memserve.base.types import Admission, Role
from memserve.protocol.admission import AdmissionGrants
from memserve.protocol.messages import (
    AnyMessage,
    AttemptsUnknown,
    Drain,
    Expelled,
    Heartbeat,
    HeartbeatAck,
    Join,
    JoinAccepted,
    Leave,
    PeerGone,
    PeerJoined,
    QueryAttempts,
    QueryKvEvents,
    Refused,
    RejoinRequest,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
from memserve.protocol.records import MemberDrained, MemberEntered, MemberGone, RecoveredMember
from memserve.protocol.store import STORE, JoinRequest
from memserve.router.admission.follower import RemoteAdmission
from memserve.router.events import MemberChange
from memserve.router.members.registry import LinkTotals, Member, MemberState, Registry
from memserve.router.outbox import Outbox, Timers
from memserve.router.parts import RouterParts
from memserve.router.report import InstanceView
from memserve.router.requests.lifecycle import Lifecycle

_LATE = 10
"""A message is on its way for less than this part of the time after which a silent member is dead."""


class SilenceWatch:
    """Looks after all members that it was told to :meth:`watch`, until they are gone."""

    __slots__ = ("_dead_after_ns", "_on_dead", "_registry", "_timers", "late_ns")

    def __init__(
        self, registry: Registry, timers: Timers, dead_after_ns: int, on_dead: Callable[[Member, str, int], None]
    ) -> None:
        """``on_dead(member, reason, now_ns)``: for each that is silent for ``dead_after_ns``."""
        self._registry, self._timers, self._dead_after_ns, self._on_dead = registry, timers, dead_after_ns, on_dead
        #: how long what was sent is on its way, at most
        self.late_ns = dead_after_ns // _LATE

    def watch(self, member: Member) -> None:
        """From now_ns on."""
        self._timers.arm(self._noticed_ns(member), self._look, member.peer)

    def _noticed_ns(self, member: Member) -> int:
        return member.heard_ns + self._dead_after_ns - self.late_ns

    def _look(self, peer: Peer, now_ns: int) -> None:
        member = self._registry.get(peer)
        if member is None:
            return
        if self._noticed_ns(member) > now_ns:
            self.watch(member)
        else:
            due_ns = max(member.heard_ns + self._dead_after_ns, now_ns + self.late_ns)
            self._timers.arm(due_ns, self._look_again, (peer, member.heard_ns))

    def _look_again(self, seen: tuple[Peer, int], now_ns: int) -> None:
        peer, heard_ns = seen
        member = self._registry.get(peer)
        if member is None:
            return
        if member.heard_ns > heard_ns:
            self._look(peer, now_ns)
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

    __slots__ = ("_lifecycle", "_outbox")

    def __init__(self, lifecycle: Lifecycle, outbox: Outbox) -> None:
        self._lifecycle, self._outbox = lifecycle, outbox

    def heartbeat(self, member: Member, load: Load) -> None:
        """``load`` came with a heartbeat of ``member``."""
        if load.dispatches_heard is None:
            return
        totals = member.totals
        differs = _differs(totals, load.dispatches_heard, load.answers_told)
        totals.dispatches_before = totals.dispatches
        if differs:
            self._ask(member, [attempt_id for attempt_id in member.attempts if self._is_with(member, attempt_id)])

    def _is_with(self, member: Member, attempt_id: str) -> bool:
        """Whether ``member`` must have the attempt now: the decode instance has it from the handover on."""
        attempt = self._lifecycle.requests.by_attempt[attempt_id].attempt
        return attempt is not None and attempt.is_with(member)

    def _ask(self, member: Member, attempts: list[str]) -> None:
        self._outbox.send(member.peer, QueryAttempts(tuple(attempts), member.totals.dispatches))

    def answer(self, member: Member, message: AttemptsUnknown, now_ns: int) -> None:
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
                self._lifecycle.lost(attempt_id, member, now_ns)
        for other, attempts in decoding.items():
            self._ask(other, attempts)


def _differs(totals: LinkTotals, dispatches_heard: int, answers_told: int) -> bool:
    """Whether something was lost for sure, or is under way for longer than from one heartbeat to the next."""
    known = dispatches_heard + totals.dispatches_lost
    on_time = totals.dispatches_before <= known <= totals.dispatches
    return not on_time or answers_told > totals.answers + totals.answers_lost


class Membership:
    """Keeps registry, trees and loads in step."""

    announces = True
    """Whether members are told of each other, and to drain, from here."""

    __slots__ = (
        "_config", "_counters", "_handles", "_lifecycle", "_loads", "_losses", "_outbox", "_registry",
        "_rejoin_request", "_silence", "_trees",
    )  # fmt: skip

    def __init__(self, parts: RouterParts, lifecycle: Lifecycle) -> None:
        self._config, self._counters, self._lifecycle = parts.config, parts.counters, lifecycle
        tables = parts.tables
        self._registry, self._trees, self._loads = tables.registry, tables.trees, tables.loads
        self._handles, self._outbox = parts.handles, parts.outbox
        dead_after_ns = parts.config.dead_after_ns
        self._silence = SilenceWatch(tables.registry, parts.timers, dead_after_ns, partial(self.gone, died=True))
        self._losses = LossDetector(lifecycle, parts.outbox)
        #: for members of the last router; known to machines that remember
        self._rejoin_request = RejoinRequest("")

    # -- joining

    def join(self, sender: Peer, message: Join, now_ns: int) -> None:
        """A new member, or one that has not heard that it is one."""
        info = message.info
        if info.peer != sender:
            self._refuse(sender, info, f"it speaks for {info.peer.name!r}")
            return
        known = self._registry.get(sender)
        if known is not None:
            known.heard_ns = now_ns
            if known.state is MemberState.REJOINING:
                self._readopt(known, message, now_ns)
            else:
                self._accept(known, message.sent_to)
            return
        newest_dead = self._registry.newest_dead(sender.name)
        if newest_dead is not None and sender.generation <= newest_dead:
            # also one that is older only because its host's clock was set back: peers would take it for a ghost
            newest = self._registry.newest(sender.name)
            self.expel(sender, "this incarnation was taken to be dead", newest, address=info.address)
            return
        reason = self._registry.why_not(info)
        admission = "" if self._config.admission.mode is Admission.NONE else self._config.admission.mode.value
        if info.role is Role.ROUTER and info.admission != admission:
            asked, here = (f"--admission {mode or 'none'}" for mode in (info.admission, admission))
            reason = f"it was started with {asked}, and the owner with {here}"
        if reason is not None and all(member.state is MemberState.REJOINING for member in self._registry):
            for member in list(self._registry):  # recovered members of another model's cluster, none of which answered
                self.gone(member, "a new cluster has begun", now_ns, died=False)
            reason = self._registry.why_not(info)
        if reason is not None:
            self._refuse(sender, info, reason)
            return
        older = self._registry.named(sender.name)
        if older is not None and older.state is not MemberState.REJOINING and older.info.address != info.address:
            since_ns, late_ns = older.contest(sender, now_ns), self._silence.late_ns
            if older.heard_ns > since_ns + late_ns:  # it lives, so this is no restart
                self._refuse(sender, info, older.why_not_its_name)
                return
            if now_ns <= since_ns + 3 * late_ns:
                return  # it asks again
        if older is not None:
            self.gone(older, "it was started anew", now_ns, died=True)
        member = self._enter(message, now_ns)
        if older is not None:
            member.replaces = older.info.address

    def _refuse(self, sender: Peer, info: PeerInfo, reason: str) -> None:
        self._counters.members_refused += 1
        self._outbox.report(MemberChange.REFUSED, sender, info.address, reason, role=info.role)
        self._outbox.send(sender, Refused(reason))

    def _accept(self, member: Member, joined_at: str = "") -> None:
        others = tuple(other.info for other in self._registry if other is not member)
        self._outbox.send(member.peer, JoinAccepted(others, joined_at))

    def _enter(self, message: Join, now_ns: int) -> Member:
        info = message.info
        is_back = self._registry.newest_dead(info.peer.name) is not None
        member = self._register(info, now_ns)
        change = MemberChange.RETURNED if is_back else MemberChange.JOINED
        self._outbox.report(change, info.peer, info.address, member.costs_note, role=info.role)
        self._outbox.remember(MemberEntered(info, now_ns))
        self._counters.members_joined += 1
        self._introduce(member, message.sent_to, now_ns)
        return member

    def _register(self, info: PeerInfo, now_ns: int) -> Member:
        """A row in every table; a timer watches the member from now on."""
        member = self._registry.enter(info, now_ns)
        self._loads.enter(member.number, info.role, info.context_tokens, info.hbm_blocks, info.host_id, member.costs)
        self._trees.enter(member.number, publishes=info.publishes_events, role=info.role)
        self._lifecycle.admission.memory.enter(member)
        self._lifecycle.answers.asks |= info.role is Role.ROUTER
        self._silence.watch(member)
        return member

    def _introduce(self, member: Member, joined_at: str, now_ns: int) -> None:
        """The member hears of all others and they of it; requests that wait may run there."""
        self._accept(member, joined_at)
        self._tell_others(member, PeerJoined(member.info))
        self._lifecycle.place_waiting(now_ns)

    def _tell_others(self, member: Member, message: PeerJoined | PeerGone) -> None:
        for other in self._registry if self.announces else ():
            if other is not member:
                self._outbox.send(other.peer, message)

    # -- members of an earlier router

    def recover(
        self, members: tuple[RecoveredMember, ...], gone: tuple[Peer, ...], address: str, last: int, now_ns: int
    ) -> None:
        """Members of the last router, which had the generation ``last``. Each counts, and gets work, when it has
        answered. ``address``: where they reach this router."""
        self._rejoin_request = RejoinRequest(address, last)
        self._registry.remember_dead(gone)
        for known in members:
            if self._registry.why_not(known.info) is not None:
                continue  # of another model than those before it: it is told when it speaks
            member = self._register(known.info, now_ns)
            member.state, member.drains = MemberState.REJOINING, known.is_draining
            self._loads.close(member.number)
            self._trees.recover(member.number, known.next_event, known.hbm, known.dram, known.ssd)
            self._lifecycle.admission.memory.recover(member, known.used, now_ns)
            if member.has_model:
                self._lifecycle.answers.wait_for(member, now_ns)
            elif member.info.role is Role.ROUTER and self._config.admission.mode is not Admission.NONE:
                self._lifecycle.remote_requests.wait_for(member.peer)
            self.ask_to_rejoin(member)

    def ask_to_rejoin(self, member: Member) -> None:
        """Repeated when the member speaks as if nothing had happened: the request was lost. Until ``Join`` it counts
        as silent."""
        self._outbox.send(member.peer, self._rejoin_request)

    def _readopt(self, member: Member, message: Join, now_ns: int) -> None:
        """The member is back with everything that it had cached: the trees know of that already."""
        info = message.info
        member.introduce(info)
        member.state = MemberState.LIVE
        self._loads.enter(member.number, info.role, info.context_tokens, info.hbm_blocks, info.host_id, member.costs)
        self._lifecycle.admission.memory.reconsider()
        self._counters.members_readopted += 1
        kept = "with the KV that it had cached"
        self._outbox.report(MemberChange.RETURNED, info.peer, info.address, kept, role=info.role)
        self._introduce(member, message.sent_to, now_ns)
        if member.drains:
            self.drain(member)

    # -- heartbeats

    def heartbeat(self, member: Member, message: Heartbeat, now_ns: int) -> None:
        """``member`` lives, and says how busy it is."""
        self.hear_load(member, message.load)
        for other in self._registry.learn_costs(member, message.costs):
            self._loads.set_costs(other.number, other.costs)
        member.stats = message.stats or member.stats
        self.ask(member, self._trees.heartbeat(member.number, message.next_event, now_ns))
        if member.state is MemberState.DRAINING and self.announces:
            self._outbox.send(member.peer, Drain())  # the first one may have been lost
        if message.wants_ack:
            self._outbox.send(member.peer, HeartbeatAck())
        self._compare_members(member, message.members_digest)
        self._losses.heartbeat(member, message.load)

    def hear_load(self, member: Member, load: Load | None) -> None:
        """How busy ``member`` is. None: nothing is said of it."""
        if load is not None:
            member.load = load
            self._loads.heartbeat(member.number, load)

    def ask(self, member: Member, ask: QueryKvEvents | None) -> None:
        """Ask for missing KV events. ``None``: there are none."""
        if ask is not None:
            self._outbox.send(member.peer, ask)

    def answer(self, member: Member, message: AttemptsUnknown, now_ns: int) -> None:
        """``member`` was asked for attempts, and does not have these."""
        self._losses.answer(member, message, now_ns)

    def _compare_members(self, member: Member, digest: int) -> None:
        """An instance that knows other members than there are waits for a lease's end at each handoff to them."""
        differs = digest not in (0, self._registry.members_digest)
        if differs and member.knows_others:
            self._accept(member)
        member.knows_others = differs and not member.knows_others

    # -- going

    def drain(self, member: Member) -> None:
        """``member`` gets nothing new: an operator or the instance itself asked for that."""
        if member.state is MemberState.LIVE:
            member.state = MemberState.DRAINING
            self._outbox.remember(MemberDrained(member.peer))
            self._loads.close(member.number)
            self._lifecycle.admission.memory.reconsider()
            self._outbox.send(member.peer, Drain())

    def gone(self, member: Member, reason: str, now_ns: int, *, died: bool) -> None:
        """``member`` left or died: all others are told, and what depended on it is tried elsewhere."""
        self._outbox.remember(MemberGone(member.peer))
        if died:
            self._counters.members_died += 1
        else:
            self._counters.members_left += 1
        change = MemberChange.DIED if died else MemberChange.LEFT
        self._outbox.report(change, member.peer, member.info.address, reason, role=member.info.role)
        failed = self._lifecycle.abandon_member(member, now_ns, died=died)
        self._registry.leave(member, is_final=self.announces)
        self._loads.leave(member.number)
        self._lifecycle.admission.memory.leave(member)
        self._trees.leave(member.number)
        self._tell_others(member, PeerGone(member.peer, reason))
        self._handles.member_gone(member, now_ns)
        for req in failed:
            self._lifecycle.place(req, now_ns)
        self._lifecycle.answers.has_told(member.peer, now_ns)

    def stranger(self, sender: Peer, message: AnyMessage, now_ns: int) -> Member | None:
        """A process that is no member speaks as if it were one. Returns it if it is one from now on."""
        if not isinstance(message, Leave):
            self.expel(sender, "this incarnation is no member")
        return None

    def expel(self, sender: Peer, reason: str, newest: int = 0, *, address: str = "") -> None:
        """Tell a process that takes itself for a member that it is none. ``address``: of its mailbox, where known."""
        self._counters.expelled += 1
        self._outbox.report(MemberChange.EXPELLED, sender, address, reason)
        self._outbox.send(sender, Expelled(reason, newest))

    # -- looking

    def speak(self, now_ns: int) -> None:
        """Followers hear what was decided in this event."""
        self._lifecycle.remote_requests.speak()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""

    def views(self) -> tuple[InstanceView, ...]:
        """All members in the order in which they joined."""
        return tuple(self._view(member) for member in self._registry)

    def _view(self, member: Member) -> InstanceView:
        feed, work, info = self._trees.feed(member.number), self._loads.work_of(member.number), member.info
        return InstanceView(
            peer=member.peer,
            role=info.role,
            state=member.state.value,
            address=info.address,
            host_id=info.host_id,
            load=member.load,
            stats=member.stats,
            heard_ns=member.heard_ns,
            joined_ns=member.joined_ns,
            requests=len(member.attempts),
            prefill_tokens=work.prefill_tokens,
            context_tokens=work.context_tokens,
            hbm_blocks=info.hbm_blocks,
            dram_blocks=info.dram_blocks,
            tree_blocks=self._trees.blocks(member.number),
            next_event=feed.next_event,
            events_aside=len(feed.aside),
        )


class StoreCalls:
    """Calls the store at intervals, whether it is a member or not: one that has started anew is found again, and one
    that is a member hears that its router lives."""

    __slots__ = ("_address", "_config", "_outbox", "_timers")

    def __init__(self, config: ClusterConfig, timers: Timers, outbox: Outbox) -> None:
        self._config, self._timers, self._outbox = config, timers, outbox
        self._address = ""

    def begin(self, address: str, now_ns: int) -> None:
        """From now on. ``address``: where the store reaches this router."""
        is_first = not self._address
        self._address = address
        if is_first:
            self._call(STORE, now_ns)

    def end(self) -> None:
        """The router ends: the store need not wait until it is taken to be silent, and may join another at once."""
        if self._address:
            self._outbox.send(STORE, Leave())

    def _call(self, store: Peer, now_ns: int) -> None:
        self._outbox.send(store, JoinRequest(self._address))
        self._timers.arm(now_ns + self._config.call_every_ns, self._call, store)

    def declined(self, store: Peer, reason: str) -> None:
        """The store belongs to another router."""
        self._outbox.report(MemberChange.DECLINED, store, "", reason, role=Role.STORE)


ANY_ROUTER = Peer(ROUTER, 0)


class Following(Membership):
    """Keeps registry, trees and loads in step with what the owner says."""

    __slots__ = ("_asking", "_known")

    announces = False

    def __init__(self, parts: RouterParts, lifecycle: Lifecycle, asking: RemoteAdmission | None) -> None:
        """``asking`` None: there is no admission."""
        super().__init__(parts, lifecycle)
        self._asking = asking
        self._known: dict[str, PeerInfo] = {}  # instances and stores that are members, as the owner has said

    # -- what the owner says

    def hear_owner(self, owner: Peer, message: AnyMessage, now_ns: int) -> None:
        """The owner tells of members, or which requests are admitted."""
        match message:
            case AdmissionGrants() if self._asking is not None:
                for rejection in self._asking.hear(owner, message, now_ns):
                    self._lifecycle.arrivals.turn_away(rejection, now_ns)
                self._lifecycle.place_waiting(now_ns)
            case JoinAccepted(peers):
                if self._asking is not None:
                    self._asking.owner_accepts(owner)
                infos = {info.peer.name: info for info in peers if info.role is not Role.ROUTER}
                for name in [name for name, info in self._known.items() if infos.get(name) != info]:
                    self._forget(name, "the owner does not name it any more", now_ns)
                for info in infos.values():
                    self._know(info)
            case PeerJoined(info):
                if info.role is not Role.ROUTER and self._known.get(info.peer.name) != info:
                    self._forget(info.peer.name, "it was started anew", now_ns)
                    self._know(info)
            case PeerGone(peer, reason):
                known = self._known.get(peer.name)
                if known is not None and known.peer == peer:
                    self._forget(peer.name, reason, now_ns)
            case _:
                pass

    def _know(self, info: PeerInfo) -> None:
        self._known[info.peer.name] = info
        if info.role.has_model and self._registry.named(info.peer.name) is None:
            self._registry.awaited[info.peer.name] = None

    def _forget(self, name: str, reason: str, now_ns: int) -> None:
        self._known.pop(name, None)
        self._registry.awaited.pop(name, None)
        member = self._registry.named(name)
        if member is not None:
            self.gone(member, reason, now_ns, died=True)

    # -- what instances and stores say

    def join(self, sender: Peer, message: Join, now_ns: int) -> None:
        """They ask the owner."""

    def stranger(self, sender: Peer, message: AnyMessage, now_ns: int) -> Member | None:
        """The first message of a member, or the first after a silence."""
        info = self._known.get(sender.name)
        if info is None or info.peer != sender or isinstance(message, Leave):
            return None
        if self._registry.why_not(info) is not None:
            return None  # of another model than those heard so far: the owner has let all of those go meanwhile
        member = self._register(info, now_ns)
        self._registry.awaited.pop(member.name, None)
        self._counters.members_joined += 1
        self._lifecycle.place_waiting(now_ns)
        return member

    def drain(self, member: Member) -> None:
        """``member`` takes nothing new: it has said so."""
        if member.state is MemberState.LIVE:
            member.state = MemberState.DRAINING
            self._loads.close(member.number)
            self._lifecycle.admission.memory.reconsider()

    def expel(self, sender: Peer, reason: str, newest: int = 0, *, address: str = "") -> None:
        """A member that makes no sense to this follower is none to it until the owner names it again."""
        self._counters.expelled += 1
        self._known.pop(sender.name, None)
        self._registry.awaited.pop(sender.name, None)

    def all_gone(self, reason: str, now_ns: int) -> None:
        """The owner has taken this follower to be dead: instances have let its attempts go."""
        if self._asking is not None:
            self._asking.expelled()
        for name in list(self._known):
            self._forget(name, reason, now_ns)

    def speak(self, now_ns: int, *, beats: bool = False) -> None:
        """The owner hears of the requests that it admits. ``beats``: a heartbeat goes to it."""
        news = self._asking.news(now_ns, beats=beats) if self._asking is not None else None
        if news is not None:
            self._outbox.send(ANY_ROUTER, news)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a member is not known."""
        for member in self._registry:
            info = self._known.get(member.name)
            known = info is not None and info.peer == member.peer
            check(known, "{} is a member, and the owner has not said so", member)
        awaited = self._known.keys() - {member.name for member in self._registry}
        check(self._registry.awaited.keys() <= awaited, "{} are awaited, not {}", self._registry.awaited, awaited)
