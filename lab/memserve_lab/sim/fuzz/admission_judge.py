"""What admission may do: limits that seeds draw, and a judge that keeps an account of its own.

The judge hears what the router hears and sees its answers. From those it knows which requests there are and since when;
it asks the router only which of them wait. So it can say whether a request was rejected, or still waits, for a valid
reason.

Whether there is room for a request, by a rough estimate without a ledger, names, or shared blocks.

Every request is taken to need all that it could ever need, pins to be as long as requested, and every prefix that may
be fetched to be lent by all instances that have it: what fits then surely fits. A prompt that is larger than any
instance surely does not fit. Between the two only the router's ledger can decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from msgspec import structs

from memserve.base.config import AdmissionConfig
from memserve.base.types import Admission, Request, Role
from memserve.base.units import NS_PER_S, ceil_div
from memserve.protocol.admission import AdmissionGrant, AdmissionGrants, AdmissionRequest, AdmissionRequests
from memserve.protocol.events import Send
from memserve.protocol.messages import Dispatch
from memserve.protocol.peers import Peer
from memserve.router.admission.controller import AdmissionController
from memserve.router.admission.ledger import IDENTITY_BYTES
from memserve.router.admission.needs import cost_tokens, tokens_needed
from memserve.router.events import (
    ClusterAction,
    EmitTokens,
    MessageArrived,
    RejectRequest,
    RequestArrived,
    RequestCancelled,
    StateRecovered,
)
from memserve.router.machine import Cluster
from memserve.router.members.registry import Member, MemberState
from memserve.router.placement.routing import teams
from memserve.router.requests.requests import RequestState
from memserve_lab.sim.reference.oracle import require


def fits_surely(
    cluster: Cluster, request: Request, *, empty: bool = False, ended: Iterable[Request], recovered: Mapping[Peer, int]
) -> bool:
    """Whether each team that ``request`` needs has a member with room for it; ``empty``: without other requests and
    pins. ``ended``: requests whose memory counts everywhere as if they still ran there. ``recovered``: further blocks
    that count, in the instance's own block size."""
    sides = _sides(cluster, len(request.prompt))
    live = cluster._lifecycle.requests.by_id | cluster._lifecycle.remote_requests.by_id
    requests = [] if empty else list(live.values())
    cached_blocks = sum(_all_of(cluster, request_ended) for request_ended in ended)
    paired = len(sides) > 1
    for side in sides:
        decodes = {m: m.info.role is not Role.PREFILL or not paired for m in side}  # a colocated one does in any team
        need = {m: cached_blocks + _most(cluster, request, 0, decodes=decodes[m]) for m in side}
        blocks_taken = {m: _used(cluster, requests, m) + (0 if empty else _claimed(cluster, requests, m)) for m in side}
        blocks_recovered = {
            m: recovered.get(m.peer, 0) * ceil_div(m.info.geometry.block_tokens, _unit(cluster)) for m in side
        }
        if not any(_total(cluster, m) - blocks_taken[m] - blocks_recovered[m] >= need[m] for m in side):
            return False
    return bool(sides)


def is_too_large(cluster: Cluster, request: Request) -> bool:
    """Whether some team has no member that could hold the prompt alone."""
    sides = _sides(cluster, len(request.prompt)) or _sides(cluster, 0)
    need = ceil_div(len(request.prompt), _unit(cluster))
    return any(all(need > _total(cluster, member) for member in side) for side in sides)


def _sides(cluster: Cluster, prompt_tokens: int) -> list[Sequence[Member]]:
    """Members that compute such prompts, and, where those hand over, members that decode."""
    members = [m for m in cluster._registry if m.state is MemberState.LIVE and m.info.context_tokens > prompt_tokens]
    roles = teams({member.info.role for member in members})
    return [[member for member in members if member.info.role in team] for team in roles if team]


def _unit(cluster: Cluster) -> int:
    geometry = cluster._registry.geometry
    return cluster.config.admission.unit_tokens or (geometry.block_tokens if geometry is not None else 1)


def _state(cluster: Cluster) -> int:
    """Blocks of a recurrent state that goes with KV."""
    registry = cluster._registry
    block_tokens = registry.geometry.block_tokens if registry.geometry is not None else 1
    return ceil_div(registry.behind_kv.most_blocks * block_tokens, _unit(cluster))


def _total(cluster: Cluster, member: Member) -> int:
    return member.info.hbm_blocks * member.info.geometry.block_tokens // _unit(cluster)


def _most(cluster: Cluster, request: Request, generated: int, *, decodes: bool) -> int:
    """Blocks that it may need, if sequences share nothing."""
    prompt, own_tokens = tokens_needed(request, cluster.config.admission.output_tokens_max, generated)
    if not decodes:
        return ceil_div(prompt + generated, _unit(cluster)) + _state(cluster)
    return max(request.n, request.beam_width) * ceil_div(prompt + own_tokens, _unit(cluster)) + _state(cluster)


def _all_of(cluster: Cluster, request: Request) -> int:
    """Blocks that it may have held at its end."""
    tokens = len(request.prompt) + request.stop.max_tokens
    return max(request.n, request.beam_width) * ceil_div(tokens, _unit(cluster)) + _state(cluster)


def _claimed(cluster: Cluster, requests: Sequence[RequestState], member: Member) -> int:
    """Blocks that are pinned there, and blocks that may be lent from there."""
    prefixes = [handle.tokens for handle in cluster.handles() if handle.peer == member.peer]
    for attempt in [req.attempt for req in requests if req.attempt is not None]:
        prefixes += [holder.prefix_tokens for holder in attempt.holders if holder.peer == member.peer]
    return sum(ceil_div(tokens, _unit(cluster)) + _state(cluster) for tokens in prefixes)


def _used(cluster: Cluster, requests: Sequence[RequestState], member: Member) -> int:
    """Blocks of all requests that run there. A decode instance may hold a prompt twice, if another request brings
    it."""
    used = 0
    for req in requests:
        attempt, generated = req.attempt, max(len(tokens) for tokens in req.emitted)
        if attempt is not None and member in attempt.involved:
            paired = attempt.decode_at is not None
            used += _most(cluster, req.request, generated, decodes=not paired or member is attempt.decode_at)
            if member is attempt.decode_at and cluster.config.admission.mode == Admission.CACHE:
                used += ceil_div(len(req.request.prompt), _unit(cluster))
    return used


CAUSES = {
    "most allowed": "queue",
    "others are before it": "queue",
    "enough free KV memory": "queue",
    "has just started": "queue",
    "wait for the owner": "queue",
    "not admitted within": "wait",
    "and no request is running": "pressure",
    "no instance has more than": "memory",
}
"""Words of a rejection, and its cause. Later ones are more specific: the last match counts."""


def draw_gate(random: Random) -> AdmissionConfig:
    """Any admission: narrow limits, so that they matter; patience from a moment to longer than any scenario."""
    mode = random.choice([Admission.BOUNDED, Admission.BOUNDED, Admission.MEMORY, Admission.CACHE])
    active_max = random.choice([1, 1, 2, 4])
    evictions = mode != Admission.BOUNDED and random.random() < 0.4
    return AdmissionConfig(
        mode,
        active_max if mode == Admission.BOUNDED else random.choice([None, None, active_max]),
        waiting_max=random.choice([0, 1, 2, 4, 1000]),
        wait_ns=random.choice([NS_PER_S // 50, NS_PER_S // 2, 5 * NS_PER_S, 3600 * NS_PER_S]),
        output_tokens_max=random.choice([0, 8, 256]),
        unit_tokens=random.choice([None, 2, 8]) if mode == Admission.MEMORY else None,
        evictions_max=random.choice([0, 1, 1000]) if evictions else None,
        weights=random.choice([(), (("other", 2),), (("other", 3),)]),
    )


def draw_kept_ns(random: Random) -> int:
    """How long KV of ended requests counts: shorter than any scenario, or until its end."""
    return random.choice([NS_PER_S // 5, 5 * NS_PER_S, 20 * NS_PER_S])


def remote_name(follower: Peer, number: int) -> str:
    """That of a follower's request at the owner."""
    return f"{follower.name}.{follower.generation}/{number}"


def cause_of(action: RejectRequest) -> str:
    """Why admission has rejected a request; "": it was rejected elsewhere, for another reason."""
    causes = [cause for words, cause in CAUSES.items() if words in action.reason]
    return causes[-1] if causes else ""


@dataclass
class Waiter:
    """A request of which the router has heard, and which has not ended."""

    request: Request
    arrived_ns: int
    reader: str
    """The connection that gets the answer; empty: none, and its client may ask again with the key."""
    waits: bool = True
    returns: bool = False
    """A remote request that was admitted once, and is to be admitted again before all that wait."""
    left: int = 0
    """How often it may have left KV where it no longer runs: failed attempts, a prompt handed over."""
    ended: set[int] = field(default_factory=set)


class Before(NamedTuple):
    """Requests present when an event came, including those that came with it."""

    waited: dict[str, Waiter]
    ran: list[str]
    let_in: bool
    """The event admitted a request: fewer wait than before."""
    at_once: bool
    """Several requests came, or the time ended in which none is admitted: how many waited when one of them was rejected
    is not known."""
    returned: int
    """Requests of an expelled follower that the event has let in again, before all that wait."""


def _told_to_followers(actions: Sequence[ClusterAction]) -> list[tuple[str, AdmissionGrant]]:
    """What was decided for remote requests, by the names that they have at the owner."""
    return [
        (remote_name(action.to, grant.number), grant)
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, AdmissionGrants)
        for grant in action.message.grants
    ]


class AdmissionChecker:
    """Watches one router after the other. It knows which instances are members, and nothing of tokens."""

    def __init__(self) -> None:
        #: rejected requests, and why
        self.refused: dict[str, str] = {}
        #: rejected requests, and after how many seconds they may retry
        self.told: dict[str, float] = {}
        self._reasons: set[str] = set()
        """Those that the owner has given to followers."""
        self._cluster: Cluster | None = None
        self._config = AdmissionConfig()
        self._here: dict[str, Waiter] = {}
        self._served: dict[tuple[str, str], int] = {}
        """Tokens admitted for the first tenant while the second one waited, since both wait."""
        self._cost_most = 0
        self._was_closed = False
        #: (time, request) of ended requests, once for each time that they may have left KV behind
        self._gone: list[tuple[int, Request]] = []
        #: blocks that an earlier router's requests may have left at each member, and since when this router knows of
        #: them
        self._recovered: tuple[int, dict[Peer, int]] = 0, {}

    def judge_event(self, cluster: Cluster, event: object, actions: Sequence[ClusterAction], now_ns: int) -> None:
        """``cluster`` has handled ``event`` at ``now_ns``, by its own clock."""
        if cluster is not self._cluster:
            self._cluster, self._config, self._here, self._served = cluster, cluster.config.admission, {}, {}
            self._gone, self._recovered = [], (0, {})
        if isinstance(event, StateRecovered):
            self._recovered = now_ns, {m.info.peer: len(m.hbm) // IDENTITY_BYTES for m in event.recovered.members}
        members, was_closed = self._here, self._was_closed
        self._was_closed = cluster._lifecycle.admission.is_closed
        asks = self._note_event(event, now_ns)
        before_opening = was_closed and not cluster._lifecycle.admission.is_closed
        at_once = before_opening or asks > 1
        read = {waiter.reader: name for name, waiter in members.items()}
        waited = {name: waiter for name, waiter in members.items() if waiter.waits}
        returning = [waiter for waiter in members.values() if waiter.returns]
        ran = [name for name, waiter in members.items() if not (waiter.waits or waiter.returns)]
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Dispatch):
                waiter = members.get(action.message.request.request_id.rpartition("#")[0])
                if waiter is not None:  # it may be admitted, and end, in one event
                    waiter.waits = False
        messages = _told_to_followers(actions)
        for name, grant in messages:
            if name in members and not grant.cause:
                members[name].waits = members[name].returns = False
        for action in actions:
            self._note_ends(action, read, now_ns)
        admission = cluster._lifecycle.admission
        assert isinstance(admission, AdmissionController)
        live = cluster._lifecycle.requests.by_id | cluster._lifecycle.remote_requests.by_id
        for name, waiter in list(members.items()):
            req = live.get(name)
            if req is None:
                require(not waiter.reader, f"{name} has ended, and its client was not told")
                self._note_end(name, now_ns)
                continue
            attempt = req.attempt
            handed_over = attempt is not None and attempt.first not in attempt.involved
            waiter.waits, waiter.left = waiter.waits and admission.is_waiting(req), len(req.past) + handed_over
            waiter.returns = req in admission._returning
        let_in = [name for name in waited if name in members and not members[name].waits]
        before = Before(waited, ran, bool(let_in), at_once, sum(not waiter.returns for waiter in returning))
        for action in actions:
            if isinstance(action, RejectRequest) and (cause := cause_of(action)):
                self.refused[action.request_id] = cause
                if action.retry_after_s is not None:
                    self.told[action.request_id] = action.retry_after_s
                name = read.get(action.request_id, action.request_id)
                self._judge_refusal(cluster, name, action, cause, before, now_ns)
        for name, grant in messages:
            if grant.cause:
                late = RejectRequest(name, grant.reason, grant.retry_after_s, grant.cause in ("wait", "pressure"))
                require(cause_of(late) == grant.cause, f"{name}: {grant}")
                self._reasons.add(grant.reason)
                self._judge_refusal(cluster, name, late, grant.cause, before, now_ns)
        self._judge_waiting(cluster, now_ns)
        self._judge_turns([waited[name].request for name in let_in])

    def _note_event(self, event: object, now_ns: int) -> int:
        """Returns how many requests a follower has asked for at once."""
        if isinstance(event, RequestArrived):
            self._note_arrival(event.request, now_ns)
        elif isinstance(event, MessageArrived) and isinstance(event.message, AdmissionRequests):
            for ask in event.message.asks:
                self._remote_arrives(remote_name(event.sender, ask.number), ask, now_ns)
            return len(event.message.asks)
        elif isinstance(event, RequestCancelled):
            self._goes_on_unread(event.request_id)
        return 0

    def follower_said(self, actions: Sequence[object]) -> None:
        """A follower rejects what the owner has rejected; or what it has not answered, by the words of the follower."""
        for action in actions:
            if not isinstance(action, RejectRequest) or not (cause := cause_of(action)):
                continue
            its_own = "wait for the owner" in action.reason or "the owner, which decides that" in action.reason
            require(its_own or action.reason in self._reasons, f"the owner has not said {action}")
            require(action.overloaded == (cause in ("wait", "pressure")), f"{action} is not the right answer")
            self.refused[action.request_id] = cause
            if action.retry_after_s is not None:
                self.told[action.request_id] = action.retry_after_s

    def _note_arrival(self, request: Request, now_ns: int) -> None:
        """A request, or another connection for one that is there already. An answer that is complete is a request that
        ends with the event that brings it."""
        for waiter in self._here.values():
            if request.key and waiter.request.key == request.key:
                waiter.reader = request.request_id
                return
        self._here[request.request_id] = Waiter(request, now_ns, request.request_id)
        self._cost_most = max(self._cost_most, self._cost_tokens(request))

    def _remote_arrives(self, name: str, ask: AdmissionRequest, now_ns: int) -> None:
        """A follower asks for a request, or asks again."""
        if name not in self._here:
            is_new = not (ask.is_admitted or ask.returns)
            request = structs.replace(ask.request, request_id=name, key="")
            self._here[name] = Waiter(request, now_ns, "", waits=is_new, returns=ask.returns and not ask.is_admitted)
            self._cost_most = max(self._cost_most, self._cost_tokens(request))

    def _goes_on_unread(self, connection: str) -> None:
        """A connection is closed: a request with a key goes on without, unless it still waits; others end."""
        for waiter in self._here.values():
            if waiter.reader == connection and waiter.request.key and not waiter.waits:
                waiter.reader = ""

    def _note_ends(self, action: ClusterAction, read: Mapping[str, str], now_ns: int) -> None:
        """``read``: which request each connection reads. A connection that reads none concerns no request."""
        if isinstance(action, RejectRequest):
            self._note_end(read.get(action.request_id, ""), now_ns)
        elif isinstance(action, EmitTokens):
            for output in action.outputs:
                name = read.get(output.request_id, "")
                waiter = self._here.get(name)
                if waiter is not None and output.finish_reason is not None:
                    waiter.ended.add(output.index)
                    if len(waiter.ended) == waiter.request.n:
                        self._note_end(name, now_ns)

    def _note_end(self, name: str, now_ns: int) -> None:
        waiter = self._here.pop(name, None)
        if waiter is not None and not waiter.waits:
            self._gone += [(now_ns, waiter.request)] * (waiter.left + 1)

    def _ended_requests(self, now_ns: int) -> list[Request]:
        """Requests that have ended, or now run elsewhere, and may still count."""
        if self._config.evictions_max is None:
            return []
        self._gone = [
            (ended_ns, request) for ended_ns, request in self._gone if now_ns - ended_ns < self._config.kept_ns
        ]
        moved = [waiter.request for waiter in self._here.values() for _ in range(waiter.left)]
        return [request for _, request in self._gone] + moved

    def _room_terms(self, now_ns: int) -> dict[str, Any]:
        """What else counts when looking for room for a request."""
        at_ns, blocks = self._recovered
        counts = self._config.evictions_max is not None and now_ns - at_ns < self._config.kept_ns
        return {"ended": self._ended_requests(now_ns), "recovered": blocks if counts else {}}

    # -- rejected requests

    def _judge_refusal(
        self, cluster: Cluster, name: str, action: RejectRequest, cause: str, before: Before, now_ns: int
    ) -> None:
        config = self._config
        require(name in before.waited, f"{name}: rejected after it was admitted: {action.reason}")
        require(action.overloaded == (cause in ("wait", "pressure")), f"{name}: {action} is not the right answer")
        waiter = before.waited[name]
        if cause == "memory":
            require(action.retry_after_s is None, f"{name}: it could never run, and is to retry: {action}")
            require(is_too_large(cluster, waiter.request), f"{name} is not too large: {action.reason}")
            return
        require(1.0 <= (action.retry_after_s or 0.0) <= 60.0, f"{name}: {action}")
        if cause == "wait":
            spent_ns = now_ns - waiter.arrived_ns
            require(spent_ns >= config.wait_ns, f"{name} waited {spent_ns} ns only: {action.reason}")
        elif cause == "pressure":
            still = [rank for rank in before.ran if rank in self._here]
            require(not still, f"{name}: {still} run, and would have made room: {action.reason}")
            fits = fits_surely(cluster, waiter.request, empty=True, **self._room_terms(now_ns))
            require(not fits, f"{name} fits: {action.reason}")
        else:
            self._judge_crowd(name, action, before)

    def _judge_crowd(self, name: str, action: RejectRequest, before: Before) -> None:
        config, waiting = self._config, len(before.waited)
        require(waiting > config.waiting_max, f"{name}: {waiting} wait: {action.reason}")
        if config.mode == Admission.BOUNDED:
            crowd, room = waiting + len(before.ran) + before.returned, config.waiting_max + (config.active_max or 0)
            require(crowd > room, f"{name}: {crowd} are there, and there is room for {room}: {action.reason}")
        if not (before.let_in or before.at_once):
            self._judge_victim(before.waited[name].request.tenant, before.waited)

    def _judge_victim(self, victim: str, waited: dict[str, Waiter]) -> None:
        """The tenant with the longest line loses a request."""
        weights, lines = dict(self._config.weights), dict[str, int]()
        for waiter in waited.values():
            lines[waiter.request.tenant] = lines.get(waiter.request.tenant, 0) + 1
        for tenant, line in lines.items():
            fair = lines[victim] * weights.get(tenant, 1) >= line * weights.get(victim, 1)
            require(fair, f"{victim!r} loses a request, and {tenant!r} has more: {lines}, weights {weights}")

    # -- waiting requests

    def _judge_waiting(self, cluster: Cluster, now_ns: int) -> None:
        """No request waits without a reason, for too long, or in too long a queue."""
        config, members = self._config, self._here
        admission = cluster._lifecycle.admission
        waiting = [name for name, waiter in members.items() if waiter.waits]
        returning = sum(waiter.returns for waiter in members.values())
        active = len(members) - len(waiting) - returning
        require(config.active_max is None or active <= config.active_max, f"{active} are active: {config}")
        require(admission.is_closed or len(waiting) <= config.waiting_max, f"{waiting} wait: {config}")
        if not waiting:
            return
        spent_ns = now_ns - min(members[name].arrived_ns for name in waiting)
        require(spent_ns < config.wait_ns, f"{waiting}: the first waits for {spent_ns} ns: {config}")
        if admission.is_closed:
            return
        require(active > 0, f"{waiting} wait, and none is active: {config}")
        if active == config.active_max or returning:
            return
        require(config.mode != Admission.BOUNDED, f"{waiting} wait, and only {active} are active: {config}")
        assert isinstance(admission, AdmissionController)
        head = admission._queue.head()
        if head is not None:
            fits = fits_surely(cluster, head.request, **self._room_terms(now_ns))
            require(not fits, f"{head.request_id} waits, and there is room for it")

    def _judge_turns(self, let_in: list[Request]) -> None:
        """While two tenants wait, their service per weight differs by at most one request of each.

        If one event admits two requests, their order is not known: then the count starts over.
        """
        weights = dict(self._config.weights)
        waiting = {waiter.request.tenant for waiter in self._here.values() if waiter.waits}
        self._served = {pair: served for pair, served in self._served.items() if waiting.issuperset(pair)}
        if len(let_in) != 1 or let_in[0].tenant not in waiting:
            self._served = self._served if not let_in else {}
            return
        tenant, tokens = let_in[0].tenant, self._cost_tokens(let_in[0])
        for rival in sorted(waiting - {tenant}):
            self._served[tenant, rival] = self._served.get((tenant, rival), 0) + tokens
            mine_weight, other_weight = weights.get(tenant, 1), weights.get(rival, 1)
            ahead = self._served[tenant, rival] / mine_weight - self._served.get((rival, tenant), 0) / other_weight
            most = self._cost_most / mine_weight + self._cost_most / other_weight
            require(ahead <= most, f"{tenant!r} is {ahead} tokens ahead of {rival!r}, {most} are fair")

    def _cost_tokens(self, request: Request) -> int:
        return cost_tokens(request, self._config.output_tokens_max)
