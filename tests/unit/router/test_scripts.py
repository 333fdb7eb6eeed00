"""The router's machine as a play: what it hears, and everything it wants done about it. ``r#1`` is request ``r``, first
attempt; ``r 3:[9]`` is token 9 as the fourth of its answer."""

from __future__ import annotations

from msgspec import structs

from cluster_world import a_request, info
from golden import Script, brief
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission, FinishReason, Role, TokenOutput
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import (
    AnyMessage,
    HandedOver,
    Heartbeat,
    Join,
    Leave,
    MigrationRefused,
    Refused,
    RequestRefused,
    Tokens,
)
from memserve.protocol.peers import Load, Peer
from memserve.router.events import (
    InstanceDied,
    InstanceDrained,
    RequestArrived,
    RequestCancelled,
    RouterEnds,
    StoreNamed,
)
from memserve.router.machine import Cluster

P, D, E = (info(name, role) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)))
C, F, S = info("c", Role.COLOCATED), info("f", Role.COLOCATED), info("s", Role.STORE)
PROMPT = range(10)


class Router(Script):
    """A cluster machine with members that have joined."""

    def __init__(self, *members, **admission) -> None:
        config = AdmissionConfig(**admission) if admission else AdmissionConfig()
        super().__init__(Cluster(ClusterConfig(policy="least-load", admission=config)))
        for member in members:
            self.machine.handle(MessageArrived(member.peer, Join(member)), 0)

    def hears(self, ms: float, sender: Peer, message: AnyMessage, *wanted: str) -> None:
        self.at(ms, MessageArrived(sender, message), *wanted)

    def asked(self, ms: float, name: str, *wanted: str, max_tokens: int = 4) -> None:
        """A client sends request ``name``."""
        self.at(ms, RequestArrived(a_request(name, PROMPT, max_tokens=max_tokens)), *wanted)


def tokens(attempt: str, offset: int, *new: int, last: bool = False) -> Tokens:
    """An instance says: behind ``offset`` tokens of the answer come these."""
    return Tokens((TokenOutput(attempt, 0, new, finish_reason=FinishReason.LENGTH if last else None, offset=offset),))


def test_members_join_and_hear_of_each_other() -> None:
    it = Router()
    it.hears(0, P.peer, Join(P), "Send(p, JoinAccepted)", "ReportMember(JOINED, p, tcp://p, prefill)")
    told = "Send(d, JoinAccepted p)", "Send(p, PeerJoined d)"
    it.hears(1, D.peer, Join(D), *told, "ReportMember(JOINED, d, tcp://d, decode)")


CALLS = "Send(store, JoinRequest tcp://router)"


def test_store_call_is_repeated_and_may_be_declined() -> None:
    """Whether it is a member or not. One that belongs to another router is not told to join again."""
    it = Router()
    it.at(0, StoreNamed("tcp://router"), CALLS)
    it.later(999)
    it.later(1000, CALLS)
    why = "s belongs to the router at b"
    it.hears(1001, S.peer, Refused(why), f"ReportMember(DECLINED, s, {why}, store)")
    it.hears(1002, S.peer, Join(S), "Send(s, JoinAccepted)", "ReportMember(JOINED, s, tcp://s, store)")
    it.later(2000, CALLS)
    left = "ReportMember(DECLINED, s, it has left, store)", "ReportMember(LEFT, s, tcp://s, it has left, store)"
    it.hears(2001, S.peer, Refused("it has left"), *left)
    it.at(2002, StoreNamed("tcp://elsewhere"))
    it.later(3000, "Send(store, JoinRequest tcp://elsewhere)")


def test_called_store_is_notified_of_router_shutdown() -> None:
    it = Router(S)
    it.at(0, StoreNamed("tcp://router"), CALLS)
    it.at(5, RouterEnds(), "Send(store, Leave)")
    alone = Router(S)
    alone.at(5, RouterEnds())


def test_admitted_placed_and_answered() -> None:
    """One active request is allowed, and one may wait: the third is told so, the second's turn comes."""
    it = Router(C, mode=Admission.BOUNDED, active_max=1, waiting_max=1)
    it.asked(1, "a", "Send(c, Dispatch a#1)")
    it.asked(2, "b")
    it.asked(3, "x", "RejectRequest(x, try again)")
    it.hears(4, C.peer, tokens("a#1", 0, 7), "EmitTokens(a 0:[7])")
    ended = "EmitTokens(a 1:[8 9 1] LENGTH)"
    it.hears(5, C.peer, tokens("a#1", 1, 8, 9, 1, last=True), ended, "Send(c, Dispatch b#2)")


def test_a_handoff() -> None:
    """The first token comes from the prefill instance, the others from the decode instance; the client sees one
    answer."""
    it = Router(P, D)
    it.asked(1, "r", "Send(p, Dispatch r#1, decode at d)")
    it.hears(2, P.peer, tokens("r#1", 0, 7), "EmitTokens(r 0:[7])")
    it.hears(3, D.peer, HandedOver("r#1"))
    it.hears(4, D.peer, tokens("r#1", 1, 8, 9), "EmitTokens(r 1:[8 9])")
    it.hears(5, D.peer, tokens("r#1", 3, 1, last=True), "EmitTokens(r 3:[1] LENGTH)")


def test_tokens_that_overtake_others_wait_for_them() -> None:
    it = Router(P, D)
    it.asked(1, "r", "Send(p, Dispatch r#1, decode at d)")
    it.hears(2, D.peer, tokens("r#1", 1, 8))
    it.hears(3, P.peer, tokens("r#1", 0, 7), "EmitTokens(r 0:[7]; r 1:[8])")
    it.hears(4, P.peer, tokens("r#1", 0, 7))


def test_an_instance_dies_and_another_one_goes_on() -> None:
    """The client has two tokens: the second attempt begins behind them, and what the dead one still says is void."""
    it = Router(P, D, E)
    it.asked(1, "r", "Send(p, Dispatch r#1, decode at d)")
    it.hears(2, P.peer, tokens("r#1", 0, 7), "EmitTokens(r 0:[7])")
    it.hears(3, D.peer, HandedOver("r#1"))
    it.hears(4, D.peer, tokens("r#1", 1, 8), "EmitTokens(r 1:[8])")
    why = "its process was ended by signal 9"
    all_hear = f"Send(p, PeerGone d, {why})", f"Send(e, PeerGone d, {why})"
    again = "Send(p, Dispatch r#2, decode at e, behind [7 8])"
    died = f"ReportMember(DIED, d, tcp://d, {why}, decode)"
    it.at(5, InstanceDied("d", "was ended by signal 9"), *all_hear, again, died)
    no_member = "Send(d, Expelled this incarnation is no member)"
    told = "ReportMember(EXPELLED, d, this incarnation is no member)"
    it.hears(6, D.peer, tokens("r#1", 2, 9), no_member, told)
    it.hears(7, P.peer, tokens("r#2", 2, 9), "EmitTokens(r 2:[9])")
    it.hears(8, E.peer, tokens("r#2", 3, 1, last=True), "EmitTokens(r 3:[1] LENGTH)")


def test_grammar_request_is_not_retried_after_two_deaths() -> None:
    """One death is chance. A request without a grammar goes on."""
    third = info("e", Role.COLOCATED)
    for grammar, ended in (("json", True), ("", False)):
        it = Router(C, F, third)
        request = a_request("r", PROMPT, max_tokens=4)
        request = structs.replace(request, sampling=structs.replace(request.sampling, grammar=grammar))
        it.machine.handle(RequestArrived(request), 0)
        assert "Send(f, Dispatch r#2)" in map(brief, it.machine.handle(InstanceDied("c", "was killed"), 1))
        last = list(map(brief, it.machine.handle(InstanceDied("f", "was killed"), 2)))
        assert ("EmitTokens(r 0:[] ERROR)" in last) == ended
        assert ("Send(e, Dispatch r#3)" in last) != ended


def test_a_silent_instance_is_taken_to_be_dead() -> None:
    it = Router(C, F)
    it.asked(1, "r", "Send(c, Dispatch r#1)")
    it.hears(4000, F.peer, Heartbeat(Load()))
    it.later(4500)
    it.later(4999)
    why = "nothing was heard of it for 5.0 s"
    gone = f"Send(f, PeerGone c, {why})", "Send(f, Dispatch r#2)", f"ReportMember(DIED, c, tcp://c, {why}, colocated)"
    it.later(5000, *gone)
    no_member = "Send(c, Expelled this incarnation is no member)"
    told = "ReportMember(EXPELLED, c, this incarnation is no member)"
    it.hears(6000, C.peer, Heartbeat(Load()), no_member, told)


def test_stopped_router_processes_queued_messages() -> None:
    """Nothing was read while it stood still, and no tick came: what was sent is heard within half a second."""
    it = Router(C, F)
    it.asked(1, "r", "Send(c, Dispatch r#1)")
    it.later(4400)
    it.later(5300)
    it.hears(5301, C.peer, Heartbeat(Load()))
    it.hears(5302, F.peer, Heartbeat(Load()))
    it.later(5800)
    it.hears(9000, F.peer, Heartbeat(Load()))
    it.later(9801)
    it.later(10300)
    why = "nothing was heard of it for 5.0 s"
    gone = f"Send(f, PeerGone c, {why})", "Send(f, Dispatch r#2)", f"ReportMember(DIED, c, tcp://c, {why}, colocated)"
    it.later(10301, *gone)


def test_refused_request_is_placed_elsewhere() -> None:
    it = Router(C, F)
    it.asked(1, "r", "Send(c, Dispatch r#1)")
    it.hears(2, C.peer, RequestRefused("r#1", "no room", 1.0), "Send(f, Dispatch r#2, fetch from c)")
    it.hears(3, F.peer, RequestRefused("r#2", "no room", 1.0), "RejectRequest(r, try again)")


def test_client_disconnect() -> None:
    it = Router(P, D)
    it.asked(1, "r", "Send(p, Dispatch r#1, decode at d)")
    it.hears(2, P.peer, tokens("r#1", 0, 7), "EmitTokens(r 0:[7])")
    ended = "EmitTokens(r 1:[] CANCELLED)"
    it.at(3, RequestCancelled("r"), ended, "Send(p, Cancel r#1)", "Send(d, Cancel r#1)")
    it.hears(4, D.peer, tokens("r#1", 1, 8), "Send(d, Cancel r#1)")


def test_an_instance_is_drained() -> None:
    """What it has is to go elsewhere, or is finished; what comes goes elsewhere, and may fetch the prefix that it
    has."""
    it = Router(C, F)
    it.asked(1, "r", "Send(c, Dispatch r#1)")
    it.at(2, InstanceDrained("c"), "Send(c, Drain)", "Send(c, Migrate r#1, f)")
    it.hears(2.5, C.peer, MigrationRefused("r#1", "it is about to end"))
    it.asked(3, "s", "Send(f, Dispatch s#2, fetch from c)")
    it.hears(4, C.peer, tokens("r#1", 0, 7, 8, 9, 1, last=True), "EmitTokens(r 0:[7 8 9 1] LENGTH)")
    it.hears(5, C.peer, Leave(), "Send(f, PeerGone c, it left)", "ReportMember(LEFT, c, tcp://c, it left, colocated)")
