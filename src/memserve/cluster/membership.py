"""Joining, beating, draining, leaving, dying (level 2), and who has to be told."""

from __future__ import annotations

from memserve.cluster.events import MemberChange
from memserve.cluster.handles import Handles
from memserve.cluster.lifecycle import Lifecycle
from memserve.cluster.loads import LoadTable
from memserve.cluster.outbox import Outbox
from memserve.cluster.reckoning import Reckoner
from memserve.cluster.registry import Member, MemberState, Registry
from memserve.cluster.report import Counters
from memserve.cluster.timers import Timers
from memserve.cluster.trees import Trees
from memserve.config import ClusterConfig
from memserve.messages import (
    AskEvents,
    AttemptsUnknown,
    Drain,
    Expelled,
    Heartbeat,
    HeartbeatAck,
    Join,
    JoinAccepted,
    Peer,
    PeerGone,
    PeerInfo,
    PeerJoined,
    Refused,
    RejoinRequest,
)
from memserve.metadata import MemberDrained, MemberEntered, MemberGone, RecoveredMember


class Membership:
    """Keeps registry, trees and loads in step."""

    __slots__ = (
        "_config",
        "_counters",
        "_handles",
        "_lifecycle",
        "_loads",
        "_outbox",
        "_reckoner",
        "_registry",
        "_timers",
        "_trees",
    )

    def __init__(
        self,
        config: ClusterConfig,
        registry: Registry,
        trees: Trees,
        loads: LoadTable,
        lifecycle: Lifecycle,
        handles: Handles,
        timers: Timers,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._config, self._counters = config, counters
        self._registry, self._trees, self._loads = registry, trees, loads
        self._lifecycle, self._handles = lifecycle, handles
        self._timers, self._outbox = timers, outbox
        self._reckoner = Reckoner(lifecycle, outbox)

    def join(self, sender: Peer, message: Join, now: int) -> None:
        """A new member, or one that has not heard that it is one."""
        info = message.info
        if info.peer != sender:
            self._refuse(sender, info.address, f"it speaks for {info.peer.name!r}")
            return
        known = self._registry.get(sender)
        if known is not None:
            known.heard_ns = now
            if known.state is MemberState.RECALLED:
                self._readopt(known, message, now)
            else:
                self._welcome(known, message.sent_to)
            return
        newest_dead = self._registry.newest_dead(sender.name)
        if newest_dead is not None and sender.generation <= newest_dead:
            # also one that is older only because its host's clock was set back: peers would take it for a ghost
            newest = self._registry.newest(sender.name)
            self.expel(sender, "this incarnation was taken to be dead", newest, address=info.address)
            return
        reason = self._registry.why_not(info)
        if reason is not None and all(member.state is MemberState.RECALLED for member in self._registry):
            for member in list(self._registry):  # nobody is here but shadows of another model's cluster
                self.gone(member, "a new cluster has begun", now, died=False)
            reason = self._registry.why_not(info)
        if reason is not None:
            self._refuse(sender, info.address, reason)
            return
        older = self._registry.named(sender.name)
        if older is not None:
            self.gone(older, "it was started anew", now, died=True)
        self._enter(message, now)

    def _refuse(self, sender: Peer, address: str, reason: str) -> None:
        self._counters.members_refused += 1
        self._outbox.report(MemberChange.REFUSED, sender, address, reason)
        self._outbox.send(sender, Refused(reason))

    def _welcome(self, member: Member, joined_at: str = "") -> None:
        others = tuple(other.info for other in self._registry if other is not member)
        self._outbox.send(member.peer, JoinAccepted(others, joined_at))

    def _enter(self, message: Join, now: int) -> None:
        info = message.info
        is_back = self._registry.newest_dead(info.peer.name) is not None
        member = self._register(info, now)
        self._outbox.report(MemberChange.RETURNED if is_back else MemberChange.JOINED, info.peer, info.address)
        self._outbox.remember(MemberEntered(info, now))
        self._counters.members_joined += 1
        self._introduce(member, message.sent_to, now)

    def _register(self, info: PeerInfo, now: int) -> Member:
        """Into all the books; a timer watches it from now on."""
        member = self._registry.enter(info, now)
        self._loads.enter(member.number, info.role, info.context_tokens, info.hbm_blocks, info.host_id)
        self._trees.enter(member.number, publishes=info.publishes_events)
        self._lifecycle.gate.enter(member)
        self._timers.arm(now + self._config.dead_after_ns, ("member", member.peer))
        return member

    def _introduce(self, member: Member, joined_at: str, now: int) -> None:
        """The member hears of all others and they of it; requests that wait may run there."""
        self._welcome(member, joined_at)
        self._outbox.tell_all((m.peer for m in self._registry if m is not member), PeerJoined(member.info))
        self._lifecycle.place_waiting(now)

    # -- members of an earlier router

    def recall(self, known: RecoveredMember, address: str, now: int) -> None:
        """``known`` was a member of the last router. It counts, and gets work, when it has answered."""
        if self._registry.why_not(known.info) is not None:
            return  # of another model than those before it: it will be told when it speaks
        member = self._register(known.info, now)
        member.state, member.drains = MemberState.RECALLED, known.is_draining
        self._loads.close(member.number)
        self._trees.recall(member.number, known.next_event, known.hbm, known.dram)
        self._outbox.send(member.peer, RejoinRequest(address))

    def call_again(self, member: Member, address: str) -> None:
        """It speaks as if nothing had happened: the call was lost. Its silence goes on until it has understood."""
        self._outbox.send(member.peer, RejoinRequest(address))

    def _readopt(self, member: Member, message: Join, now: int) -> None:
        """It lives, with everything that it had cached: the trees know of that already."""
        info = message.info
        member.info, member.state = info, MemberState.LIVE
        self._loads.enter(member.number, info.role, info.context_tokens, info.hbm_blocks, info.host_id)
        self._lifecycle.gate.reconsider()
        self._counters.members_readopted += 1
        self._outbox.report(MemberChange.RETURNED, info.peer, info.address, "with the KV that it had cached")
        self._introduce(member, message.sent_to, now)
        if member.drains:
            self.drain(member)

    def ask(self, member: Member, ask: AskEvents | None) -> None:
        """Send the question, if there is one."""
        if ask is not None:
            self._outbox.send(member.peer, ask)

    def heartbeat(self, member: Member, message: Heartbeat, now: int) -> None:
        """It lives, and says how busy it is."""
        member.load = message.load
        member.stats = message.stats or member.stats
        self._loads.heartbeat(member.number, message.load)
        self.ask(member, self._trees.heartbeat(member.number, message.next_event, now))
        if member.state is MemberState.DRAINING:
            self._outbox.send(member.peer, Drain())  # the first one may have been lost
        if message.wants_ack:
            self._outbox.send(member.peer, HeartbeatAck())
        self._compare_members(member, message.members_digest)
        self._reckoner.heartbeat(member, message.load)

    def answer(self, member: Member, message: AttemptsUnknown, now: int) -> None:
        """It was asked for attempts, and does not have these."""
        self._reckoner.answer(member, message, now)

    def _compare_members(self, member: Member, digest: int) -> None:
        """Who lacks a member, or takes one that is gone for there, waits for a lease's end at each handoff to it."""
        differs = digest not in (0, self._registry.members_digest)
        if differs and member.knows_others:
            self._welcome(member)
        member.knows_others = differs and not member.knows_others

    def drain(self, member: Member) -> None:
        """It gets nothing new. Asked for by a person, or by the instance itself."""
        if member.state is MemberState.LIVE:
            member.state = MemberState.DRAINING
            self._outbox.remember(MemberDrained(member.peer))
            self._loads.close(member.number)
            self._lifecycle.gate.reconsider()
            self._outbox.send(member.peer, Drain())

    def gone(self, member: Member, reason: str, now: int, *, died: bool) -> None:
        """It left or died: everybody is told, and what depended on it is tried elsewhere."""
        self._outbox.remember(MemberGone(member.peer))
        if died:
            self._counters.members_died += 1
        else:
            self._counters.members_left += 1
        change = MemberChange.DIED if died else MemberChange.LEFT
        self._outbox.report(change, member.peer, member.info.address, reason)
        failed = self._lifecycle.abandon_member(member)
        self._registry.leave(member)
        self._loads.leave(member.number)
        self._lifecycle.gate.leave(member)
        self._trees.leave(member.number)
        self._outbox.tell_all((other.peer for other in self._registry), PeerGone(member.peer, reason))
        self._handles.member_gone(member, now)
        for job in failed:
            self._lifecycle.place(job, now)

    def silent(self, peer: Peer, now: int) -> None:
        """The timer of a member: has it been heard of meanwhile?"""
        member = self._registry.get(peer)
        if member is None:
            return
        due_ns = member.heard_ns + self._config.dead_after_ns
        if due_ns > now:
            self._timers.arm(due_ns, ("member", peer))
        else:
            self.gone(member, f"nothing was heard of it for {(now - member.heard_ns) / 1e9:.1f} s", now, died=True)

    def expel(self, sender: Peer, reason: str, newest: int = 0, *, address: str = "") -> None:
        """Tell a process that takes itself for a member that it is none. ``address``: of its mailbox, where known."""
        self._counters.expelled += 1
        self._outbox.report(MemberChange.EXPELLED, sender, address, reason)
        self._outbox.send(sender, Expelled(reason, newest))
