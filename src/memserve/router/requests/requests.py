"""A client's request as the router sees it: its phase, what the client has, and the attempt that is under way.

An attempt has an id of its own, unique in the life of the router, so that whatever is still said about an old one is
known by it.

A sequence in parts on several instances: what the instance with each part is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from msgspec import structs

from memserve.base.config import ClusterConfig
from memserve.base.errors import check
from memserve.base.state_table import Transitions
from memserve.base.types import (
    Caching,
    FinishReason,
    Request,
    SamplingParams,
    StopParams,
    TokenArray,
    TokenOutput,
    adapter_of,
    salt_of,
)
from memserve.base.units import NS_PER_MS
from memserve.protocol.messages import Dispatch, Segment, Span, Stripe
from memserve.protocol.peers import Holder, Peer
from memserve.router.admission.needs import MemoryNeed
from memserve.router.members.loads import Charge
from memserve.router.members.registry import Member, Registry
from memserve.router.placement.candidates import IN_BLOCKS, Route, TransferChoice


class Part(NamedTuple):
    """Tokens ``[first, end)`` of a prompt. The member with the last part also generates."""

    member: Member
    first: int
    end: int


Parts = tuple[Part, ...]


def dispatch_for(parts: Parts, place: int, whole: Dispatch) -> Dispatch:
    """What the member of part ``place`` is told, where ``whole`` is the order for a member that would do all."""
    part, prompt = parts[place], whole.request.prompt
    segments = tuple(Segment(p.member.peer, p.member.info.segments_at, p.end - p.first) for p in parts[:place])
    holds = place < len(parts) - 1
    request = structs.replace(
        whole.request,
        prompt=prompt[part.first : part.end],
        salt=_salt(whole.request.salt, prompt[: part.first]),
        slo_ttft_ns=None,  # it is not the first token of this part that the client waits for
    )
    room = min(p.member.info.sequence_tokens for p in parts) - len(prompt)
    stop = structs.replace(request.stop, max_tokens=min(request.stop.max_tokens, room))
    request = structs.replace(request, stop=stop)
    if holds:
        request = _silent(request)
        whole = structs.replace(whole, generated=(), ended=())
    span = Span(prompt[: part.first], segments, holds)
    return structs.replace(whole, request=request, decode_at=None, holders=(), return_kv=False, span=span)


def stripes_for(parts: Parts, member: Member, whole: Dispatch) -> Dispatch:
    """What ``member`` is told, which has some of the stripes ``parts``: its prompt ends with the last of its own."""
    stripes = tuple(Stripe(part.member.peer, part.end - part.first) for part in parts)
    end, request = max(part.end for part in parts if part.member is member), whole.request
    holds = parts[-1].member is not member
    if holds:
        request = _silent(structs.replace(request, prompt=request.prompt[:end], slo_ttft_ns=None))
    return structs.replace(whole, request=request, span=Span(whole.request.prompt[:0], (), holds, stripes))


def _silent(request: Request) -> Request:
    """A prompt, and a draw that no client gets."""
    return structs.replace(
        request, n=1, sampling=SamplingParams(temperature=0.0), stop=StopParams(max_tokens=2), slo_tpot_ns=None
    )


def _salt(salt: str, before: TokenArray) -> str:
    """KV of a part is that of its tokens behind those ``before``: of others' only with the same ones."""
    if not len(before):
        return salt
    digest = hashlib.blake2b(salt.encode() + b"\0" + before.tobytes(), digest_size=16).hexdigest()
    return salt_of(digest, adapter_of(salt))


def describe_places(parts: Parts) -> str:
    """The parts, for people."""
    texts = [f"{part.member.name}: tokens {part.first} to {part.end}" for part in parts[:-1]]
    return ", ".join([*texts, f"{parts[-1].member.name}: from {parts[-1].first} on"])


def describe_stripes(parts: Parts) -> str:
    """Whose stripes lie where, for people."""
    by_name: dict[str, list[str]] = {}
    for part in parts:
        by_name.setdefault(part.member.name, []).append(f"{part.first} to {part.end}")
    return "; ".join([f"{name}: tokens {', '.join(bounds)}" for name, bounds in sorted(by_name.items())])


_STALL_DOUBLINGS_MAX = 6


class RequestPhase(Enum):
    """Where a request stands."""

    QUEUED = auto()  # waits for admission
    UNPLACED = auto()  # admitted; no instance runs it
    PREFILLING = auto()  # dispatched; no output has come
    DECODING = auto()  # its prompt is computed; of a pair both instances must live on
    HANDED_OVER = auto()  # the decode instance has all that it needs
    FINISHED = auto()
    REJECTED = auto()


class RequestCause(Enum):
    """Why a request changes its phase."""

    ADMITTED = auto()
    DISPATCHED = auto()
    PREFILLED = auto()  # its first output, or word of the handover
    HANDED_OVER = auto()
    MIGRATES = auto()  # the instance that runs it is to hand it to another one
    ATTEMPT_FAILED = auto()  # refused, stalled, lost, contradictory, or its instance is gone
    FINISHED = auto()  # every sequence has ended: completed, cancelled, past its deadline, or failed
    REJECTED = auto()


REQUEST_PHASES = Transitions(
    "A request at the router",
    RequestPhase.QUEUED,
    {
        (RequestPhase.QUEUED, RequestCause.ADMITTED): RequestPhase.UNPLACED,
        (RequestPhase.QUEUED, RequestCause.REJECTED): RequestPhase.REJECTED,
        (RequestPhase.QUEUED, RequestCause.FINISHED): RequestPhase.FINISHED,
        (RequestPhase.UNPLACED, RequestCause.DISPATCHED): RequestPhase.PREFILLING,
        (RequestPhase.UNPLACED, RequestCause.REJECTED): RequestPhase.REJECTED,
        (RequestPhase.UNPLACED, RequestCause.FINISHED): RequestPhase.FINISHED,
        (RequestPhase.PREFILLING, RequestCause.PREFILLED): RequestPhase.DECODING,
        (RequestPhase.PREFILLING, RequestCause.ATTEMPT_FAILED): RequestPhase.UNPLACED,
        (RequestPhase.PREFILLING, RequestCause.FINISHED): RequestPhase.FINISHED,
        (RequestPhase.DECODING, RequestCause.HANDED_OVER): RequestPhase.HANDED_OVER,
        (RequestPhase.DECODING, RequestCause.ATTEMPT_FAILED): RequestPhase.UNPLACED,
        (RequestPhase.DECODING, RequestCause.FINISHED): RequestPhase.FINISHED,
        (RequestPhase.HANDED_OVER, RequestCause.MIGRATES): RequestPhase.DECODING,
        (RequestPhase.HANDED_OVER, RequestCause.ATTEMPT_FAILED): RequestPhase.UNPLACED,
        (RequestPhase.HANDED_OVER, RequestCause.FINISHED): RequestPhase.FINISHED,
    },
)
"""A failed attempt is followed by another one, with the tokens that the client has."""


@dataclass(frozen=True, slots=True)
class AttemptStory:
    """One attempt, for people."""

    attempt_id: str
    first: Peer
    """Computes the prompt."""
    decode_at: Peer | None
    """Decodes; ``None``: the first instance does."""
    holders: tuple[Peer, ...]
    dispatched_ns: int
    why: str
    """The policy's reason."""
    failure: str = ""
    """Why it failed; empty while it lasts."""


@dataclass(frozen=True, slots=True)
class RouteStory:
    """What was decided for a live request, and why."""

    request_id: str
    arrived_ns: int
    emitted_tokens: tuple[int, ...]
    """For each sequence the number of tokens that the client has."""
    ended_sequences: tuple[int, ...]
    """Sequences that have ended."""
    attempts: tuple[AttemptStory, ...]


@dataclass(slots=True, eq=False)
class Attempt:
    """One try to run a request: which instances were asked, and what came of it so far."""

    attempt_id: str
    number: int
    """Attempts of the router count from 1: a higher number is younger."""
    first: Member
    """Computes the prompt, or goes on from an earlier instance."""
    decode_at: Member | None
    """Decodes, or will; ``None``: ``first`` does."""
    holders: tuple[Holder, ...]
    route: Route
    dispatched_ns: int
    news_ns: int
    involved: list[Member]
    """All and only the members that fail it when they die."""
    charges: list[Charge]
    """Work not yet discharged; while the request is prefilling, the prompt's first, of each that has some of it."""
    early: list[TokenOutput] = field(default_factory=list)
    """Outputs behind tokens that have not come, in order of arrival: two members may speak, on two ways."""
    gap_ns: int | None = None
    """Since when there are any."""
    parts: Parts = ()
    """Of a sequence that instances share, or have shared; empty: one instance has all of it."""
    part: int = 0
    """The last one that was dispatched."""
    striped: bool = False
    """``parts`` are stripes, all dispatched at once; ``first`` has the last, and all when the prompt is computed."""
    is_shared: bool = False
    """Whether it takes all instances of ``parts`` to go on."""
    known_tokens: int | None = None
    """Tokens of prompts that wait at ``first``, as far as is known. None: it is to run there however many wait."""
    transfer: TransferChoice = IN_BLOCKS
    handed_over_ns: int | None = None
    """When ``decode_at`` said that it has the KV. None: it has not."""
    earlier_peers: tuple[Peer, ...] = ()
    """Instances before ``first``: their last words may still come."""

    def is_from(self, peer: Peer) -> bool:
        """Whether ``peer`` may speak for it: a prefill instance's last words may come after its part has ended."""
        if self.is_shared:
            return any(peer == part.member.peer for part in self.parts[: self.part + 1])
        return (
            peer == self.first.peer
            or (self.decode_at is not None and peer == self.decode_at.peer)
            or peer in self.earlier_peers
        )

    @property
    def runs_at(self) -> Member:
        """The instance that has the request now, as far as is known."""
        return self.decode_at if self.decode_at is not None and self.first not in self.involved else self.first

    def is_with(self, member: Member) -> bool:
        """Whether ``member``, which is involved, must know it: the decode instance does from the handover on."""
        if self.is_shared:
            return any(part.member is member for part in self.parts[: self.part + 1])
        return self.first is member or self.first not in self.involved

    @property
    def holder(self) -> Member | None:
        """The member that is computing a part for others. None: none is, the last part is under way, or all of it."""
        return self.parts[self.part].member if self.is_shared and self.part < len(self.parts) - 1 else None

    def is_generated_by(self, member: Member) -> bool:
        """Whether clients get what ``member`` draws."""
        return not self.is_shared or self.parts[-1].member is member

    def make_story(self, failure: str) -> AttemptStory:
        """What is kept of it."""
        return AttemptStory(
            self.attempt_id,
            self.first.peer,
            self.decode_at.peer if self.decode_at is not None else None,
            tuple(holder.peer for holder in self.holders),
            self.dispatched_ns,
            self.route.reason,
            failure,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """One request."""

    request: Request
    arrived_ns: int
    request_id: str = field(init=False)
    """The client's name for it."""
    emitted: list[list[int]] = field(init=False)
    """For each sequence the tokens that the client has."""
    finished: list[FinishReason | None] = field(init=False)
    """For each sequence why it ended; ``None``: it goes on."""
    introduced: list[bool] = field(init=False)
    """For each sequence whether the client has had its first output, with all that only comes once."""
    phase: RequestPhase = REQUEST_PHASES.initial
    identities: bytes | None = None
    """Of the prompt's whole blocks; ``None``: not known yet, or nothing of it may be cached."""
    need: MemoryNeed | None = None
    """What it needs, with memory-aware admission (``cluster.memory``)."""
    attempt: Attempt | None = None
    tries: int = 0
    """Attempts that count against ``attempts_max``."""
    stalls: int = 0
    deaths: int = 0
    """Instances that have died while they had it."""
    avoid: dict[Peer, float | None] = field(default_factory=dict)
    """Instances to avoid, with a retry-after in seconds. ``None``: it can never run there. 0: an attempt failed
    there."""
    refusal: str = ""
    """The reason that an instance gave last for refusing it."""
    unplaced_ns: int | None = None
    """Since when no instance could take it; until news come."""
    parts: Parts = ()
    """Those of its last attempt, if instances shared it."""
    stale_retries: int = 0
    """Attempts that came to an instance behind many tokens of others' requests, and were not run."""
    is_stopped: bool = False
    """The client ended a sequence: instances may not have heard of it."""
    past: list[AttemptStory] = field(default_factory=list)
    """Attempts that have failed."""
    is_remote: bool = False
    """A follower's, of which this router keeps the ledger alone (``router/admission/remote_requests.py``)."""

    def __post_init__(self) -> None:
        self.request_id, n = self.request.request_id, self.request.n
        self.emitted, self.finished, self.introduced = [[] for _ in range(n)], [None] * n, [False] * n

    def change_phase(self, cause: RequestCause) -> None:
        """To the next phase. Raises :class:`InvariantError` for an illegal move."""
        self.phase = REQUEST_PHASES.next_phase(self.phase, cause)

    @property
    def has_begun(self) -> bool:
        """Whether the client has got anything: then it cannot be rejected any more."""
        return True in self.introduced or any(self.finished)

    @property
    def unfinished(self) -> Iterator[int]:
        """Sequences that go on."""
        return (index for index, reason in enumerate(self.finished) if reason is None)

    def make_dispatch(
        self, attempt: Attempt, to: Member, config: ClusterConfig, outputs: tuple[TokenOutput, ...], now_ns: int
    ) -> Dispatch:
        """What ``to`` is told: the first instance, one that has stripes, or the one that computes the present part.
        ``outputs``: what the client was, of a request with a key."""
        request = self.request
        generated: tuple[tuple[int, ...], ...] = ()
        ended_sequences: tuple[int, ...] = ()
        if request.beam_width == 0 and self.has_begun:
            generated = tuple(tuple(tokens) for tokens in self.emitted)
            ended_sequences = tuple(index for index, reason in enumerate(self.finished) if reason is not None)
        plain = request.n == 1 and request.beam_width == 0 and request.use_cache
        returns_kv = config.caching is Caching.PD_CACHING_3 and attempt.decode_at is not None
        deadline_ns = request.deadline_ns
        dispatch = Dispatch(
            structs.replace(request, request_id=attempt.attempt_id, deadline_ns=None),
            deadline_in_ns=None if deadline_ns is None else max(0, deadline_ns - now_ns),
            generated=generated,
            ended=ended_sequences,
            decode_at=attempt.decode_at.peer if attempt.decode_at is not None else None,
            transfer=attempt.transfer.mode,
            holders=attempt.holders,
            return_kv=returns_kv and plain and attempt.first.info.caching,
            told=outputs if generated else (),
            known_tokens=attempt.known_tokens,
        )
        if attempt.striped:
            return stripes_for(attempt.parts, to, dispatch)
        return dispatch_for(attempt.parts, attempt.part, dispatch) if attempt.parts else dispatch

    def stalled_after_ns(self, config: ClusterConfig) -> int:
        """Longer each time: a long queue looks like a stalled instance, and must not be started over for ever."""
        return config.stalled_after_ns << min(self.stalls, _STALL_DOUBLINGS_MAX)

    def routing_story(self) -> tuple[tuple[str, str | int | float], ...]:
        """What the router decided, and what went wrong, for the client (``TokenOutput.story``)."""
        attempt = self.attempt
        if attempt is None:
            return (("attempts", len(self.past)), ("last_failure", self.past[-1].failure)) if self.past else ()
        places = attempt.first.name + (f" to {attempt.decode_at.name}" if attempt.decode_at is not None else "")
        if attempt.parts:
            places = " and ".join(dict.fromkeys(part.member.name for part in attempt.parts))
        story: tuple[tuple[str, str | int | float], ...]
        story = ("route", places), ("route_why", attempt.route.reason), ("attempts", len(self.past) + 1)
        if attempt.striped:
            story = *story, ("stripes", describe_stripes(attempt.parts))
        elif attempt.parts:
            story = *story, ("segments", describe_places(attempt.parts))
        if attempt.transfer.reason:
            story = *story, ("transfer", attempt.transfer.mode.value), ("transfer_why", attempt.transfer.reason)
        moments = ("route_ms", attempt.dispatched_ns), ("handed_over_ms", attempt.handed_over_ns)
        return *story, *(
            (name, round((moment_ns - self.arrived_ns) / NS_PER_MS, 3))
            for name, moment_ns in moments
            if moment_ns is not None
        )

    def make_story(self) -> RouteStory:
        """All attempts and what the client has, for people."""
        current = (self.attempt.make_story(""),) if self.attempt is not None else ()
        ended_sequences = tuple(index for index, reason in enumerate(self.finished) if reason is not None)
        counts = tuple(len(tokens) for tokens in self.emitted)
        return RouteStory(self.request_id, self.arrived_ns, counts, ended_sequences, (*self.past, *current))


class RequestTable:
    """All and only the requests that have not ended, in order of arrival, and their attempts by id."""

    def __init__(self, mark: str = "") -> None:
        """``mark``: of this router, in the names of its attempts: no other has it."""
        self._numbers, self._mark = 0, mark
        self.by_id: dict[str, RequestState] = {}
        self.by_attempt: dict[str, RequestState] = {}
        #: requests without an attempt, queued ones included, in the order in which they arrived or lost it
        self.unplaced: dict[str, RequestState] = {}

    def next_number(self) -> int:
        """That of a new attempt."""
        self._numbers += 1
        return self._numbers

    def attempt_name(self, req: RequestState, number: int) -> str:
        """That of attempt ``number`` of this router."""
        return f"{req.request_id}#{self._mark}{number}"

    def add_request(self, req: RequestState) -> None:
        """A new request, queued."""
        check(req.request_id not in self.by_id, "{} is known", req.request_id)
        self.by_id[req.request_id] = self.unplaced[req.request_id] = req

    def start_attempt(self, req: RequestState, attempt: Attempt) -> None:
        """``attempt`` is under way for ``req``."""
        req.change_phase(RequestCause.DISPATCHED)
        del self.unplaced[req.request_id]
        req.attempt, req.parts = attempt, () if attempt.striped else attempt.parts
        self.by_attempt[attempt.attempt_id] = req
        for member in attempt.involved:
            member.attempts[attempt.attempt_id] = None

    def hand_over(self, req: RequestState, attempt: Attempt) -> None:
        """The instance that computed the prompt no longer matters."""
        req.change_phase(RequestCause.HANDED_OVER)
        attempt.involved.remove(attempt.first)
        del attempt.first.attempts[attempt.attempt_id]

    def end_sharing(self, attempt: Attempt) -> list[Member]:
        """The first instance has all KV of a striped prompt. Returns the others, which no longer matter."""
        others, attempt.involved, attempt.is_shared = attempt.involved[1:], attempt.involved[:1], False
        for member in others:
            del member.attempts[attempt.attempt_id]
        return others

    def start_migration(self, req: RequestState, attempt: Attempt, target: Member) -> None:
        """The instance that runs ``attempt`` is to hand it to ``target``."""
        if req.phase is RequestPhase.HANDED_OVER:
            req.change_phase(RequestCause.MIGRATES)
            attempt.earlier_peers = (*attempt.earlier_peers, attempt.first.peer)
            attempt.first = attempt.runs_at
        attempt.decode_at = target
        attempt.involved.append(target)
        target.attempts[attempt.attempt_id] = None

    def end_migration(self, attempt: Attempt, target: Member) -> None:
        """It stays where it is."""
        attempt.decode_at = None
        attempt.involved.remove(target)
        del target.attempts[attempt.attempt_id]

    def fail_attempt(self, req: RequestState, attempt: Attempt) -> None:
        """``req`` has lost its attempt."""
        req.change_phase(RequestCause.ATTEMPT_FAILED)
        self._detach_attempt(req, attempt)
        self.unplaced[req.request_id] = req

    def remove_request(self, req: RequestState, cause: RequestCause) -> None:
        """``req`` was rejected, or has finished."""
        req.change_phase(cause)
        if req.attempt is not None:
            self._detach_attempt(req, req.attempt)
        else:
            del self.unplaced[req.request_id]
        del self.by_id[req.request_id]

    def _detach_attempt(self, req: RequestState, attempt: Attempt) -> None:
        for member in attempt.involved:
            del member.attempts[attempt.attempt_id]
        del self.by_attempt[attempt.attempt_id]
        req.attempt = None

    def check_invariants(self, registry: Registry) -> None:
        """Raise :class:`InvariantError` unless requests, attempts and members agree on what runs where."""
        for request_id, req in self.by_id.items():
            check(req.request_id == request_id, "{} is listed as {}", req.request_id, request_id)
            check(not all(req.finished), "{} has ended and is still here", request_id)
            is_unplaced = req.phase in (RequestPhase.QUEUED, RequestPhase.UNPLACED)
            check(is_unplaced == (req.attempt is None), "{} is {}: {}", request_id, req.phase, req.attempt)
            check(
                is_unplaced == (self.unplaced.get(request_id) is req), "{} is {}, listed wrongly", request_id, req.phase
            )
            if req.attempt is not None:
                check(self.by_attempt.get(req.attempt.attempt_id) is req, "{}: its attempt is not listed", request_id)
                _check_attempt(req, req.attempt, registry)
        check(all(request_id in self.by_id for request_id in self.unplaced), "a request is unplaced, but unknown")
        check(len(self.by_attempt) == len(self.by_id) - len(self.unplaced), "attempts without a request are listed")
        for member in registry:
            for attempt_id in member.attempts:
                attempt = self.by_attempt[attempt_id].attempt
                check(
                    attempt is not None and member in attempt.involved, "{} is not involved in {}", member, attempt_id
                )


def _check_attempt(req: RequestState, attempt: Attempt, registry: Registry) -> None:
    name = attempt.attempt_id
    for member in attempt.involved:
        check(registry.get(member.peer) is member, "{} depends on {}, which is gone", name, member)
        check(name in member.attempts, "{} does not know that {} depends on it", member, name)
    check(attempt.involved, "{} depends on no instance", name)
    has_left = attempt.first not in attempt.involved
    check(
        has_left == (req.phase is RequestPhase.HANDED_OVER), "{} is {}, and depends on wrong instances", name, req.phase
    )
    computing = len(attempt.involved) if attempt.striped else 1
    charges = 1 + computing * (req.phase is RequestPhase.PREFILLING)
    check(len(attempt.charges) == charges, "{} is {}, and charged {}", name, req.phase, attempt.charges)
    check(bool(attempt.early) == (attempt.gap_ns is not None), "{}: a gap without end", name)
    for output in attempt.early:
        check(output.offset > len(req.emitted[output.index]), "{}: {} could be delivered", name, output)
