"""What the machine knows of a request and of each of its sequences (level 2).

Tokens of a sequence, by what has happened to them::

    |<------------- prompt ------------>|<----- out ----->|<- inflight ->|
    |                                   |  known to us    | on the device|
    |<--------------- computed (KV written by plans already made) --->|1|
    |<-- published --->|
    |<------------------- writable_until ... may be written without asking the pool -------->|

``computed <= length`` always; a sequence that decodes has ``computed == length - 1``.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from memserve import _core
from memserve.instance.beam import BeamSearch
from memserve.types import FinishReason, Request, TokenArray, TokenLogprobs, TokenOutput

if TYPE_CHECKING:
    from memserve.instance.orders import Orders
    from memserve.mempool.pool import Lease

Rank = tuple[int, int, int, int]
"""(urgency, priority, arrival, index): total order; of one tenant's sequences the smaller runs first."""


Fact = tuple[str, str | int | float]
"""One line of a request's story."""


class Phase(enum.Enum):
    """Where a sequence is. The comment says which container holds all and only such sequences."""

    EXPECTED = "expected"  # nowhere; holds nothing: KV for it is on its way from another instance
    LANDED = "landed"  # Roster.landed; holds HBM blocks that came from another instance, and waits for a slot
    WAITING = "waiting"  # Roster.waiting; holds no slot and no HBM block (maybe DRAM blocks)
    WORKING = "working"  # Roster.working; has known tokens to compute
    DECODING = "decoding"  # Roster.decoding; computes one token, known or not, each step
    IDLE = "idle"  # Roster.idle; nothing to schedule: every token is under way, or a beam waits for the others
    PARKED = "parked"  # as IDLE, but preempted: holds no slot and no HBM block
    FINISHED = "finished"  # nowhere; results still under way are dropped


class Group:
    """A request and what its sequences share."""

    __slots__ = (
        "admitted_ns",
        "arrival",
        "arrived_ns",
        "beam",
        "cached_tokens",
        "facts",
        "forks_pending",
        "held_steps",
        "isolation",
        "max_tokens",
        "muted",
        "next_index",
        "orders",
        "preemptions",
        "prompt_logprobs",
        "request",
        "reserved_slots",
        "sequences",
        "stops",
        "tenant",
        "tokens_here",
    )

    def __init__(self, request: Request, arrival: int, max_tokens: int, now: int) -> None:
        self.request = request
        self.tenant, self.isolation = request.tenant, request.isolation
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.stops = frozenset(request.stop.stop_token_ids)
        self.arrived_ns = now
        self.admitted_ns: int | None = None
        self.preemptions = 0
        self.cached_tokens = 0
        #: times that admission waited because the next blocks were just being computed by another sequence
        self.held_steps = 0
        #: sequences that still have to be forked from the first one, when the prompt is done
        self.forks_pending = max(request.n, request.beam_width) - 1
        #: slots kept for those
        self.reserved_slots: list[int] = []
        #: all and only unfinished sequences, by index; beams: best first
        self.sequences: dict[int, Sequence] = {}
        self.next_index = 0
        width = request.beam_width
        self.beam = BeamSearch(width, request.length_penalty, self.stops, request.stop.min_tokens) if width else None
        #: entry ``i`` belongs to prompt token ``i``; the first has none
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if request.sampling.prompt_logprobs:
            self.prompt_logprobs = [None] * len(request.prompt)
        #: what the cluster wants beside running it; ``None`` = a request of the own process
        self.orders: Orders | None = None
        #: sequences draw their tokens here up to so many; then another instance goes on. ``None`` = to the end
        self.tokens_here: int | None = None
        #: what it draws is not for the client (a beam's prompt, whose choice is the decode instance's)
        self.muted = False
        #: what was done for it and why, for the story of its next output
        self.facts: list[Fact] = []

    def new_sequence(self) -> Sequence:
        """Add a sequence with the next free index."""
        sequence = Sequence(self, self.next_index)
        self.sequences[self.next_index] = sequence
        self.next_index += 1
        return sequence

    def take_facts(self) -> tuple[Fact, ...]:
        """The facts since the last output that told them."""
        if not self.facts:
            return ()
        told, self.facts = tuple(self.facts), []
        return told

    @property
    def queue_ns(self) -> int | None:
        """Time from arrival to the first step that computed any of the prompt."""
        return None if self.admitted_ns is None else self.admitted_ns - self.arrived_ns

    def __repr__(self) -> str:
        return f"<Group {self.request.request_id} {list(self.sequences.values())}>"


class Sequence(_core.SequenceRow):
    """One line of tokens with its blocks. What every step touches of it lies in the base, where C++ finds it."""

    phase: Phase  # of the base, as are all that are not listed here

    __slots__ = (
        "blocks",
        "candidates",
        "cumulative_logprob",
        "dram_blocks",
        "failures",
        "group",
        "index",
        "lease",
        "logprobs",
        "max_tokens",
        "min_tokens",
        "opened",
        "published",
        "rank",
        "request_id",
        "slot",
    )

    def __init__(self, group: Group, index: int) -> None:
        request = group.request
        self.group = group
        self.request_id = request.request_id
        self.index = index
        self.rank: Rank = (request.urgency, request.priority, group.arrival, index)
        self.prompt_tokens = len(request.prompt)
        self.max_tokens = group.max_tokens
        self.min_tokens = request.stop.min_tokens
        self.stops = group.stops
        self.phase = Phase.WAITING
        self.out: list[int] = []
        #: of those, the first so many have been told, the others are held (``Instance.tell``); 0 = each is told at once
        self.told = 0
        self.inflight = 0
        #: samples that may still be scheduled
        self.left = max(1, group.max_tokens) if group.tokens_here is None else group.tokens_here
        self.computed = 0
        self.published = 0
        self.writable_until = 0
        #: HBM blocks, in order; one pool reference each
        self.blocks: list[int] = []
        #: DRAM blocks while swapped out
        self.dram_blocks: list[int] = []
        self.lease: Lease | None = None
        self.slot: int | None = None
        #: ``(slot,)``, ready for ``StepPlan.sample_slots``
        self.draw: tuple[int, ...] = ()
        #: whether the device knows the slot as this sequence, up to the last plan made
        self.opened = False
        self.scheduled_step = 0
        self.failures = 0
        # beam search only
        self.candidates: list[tuple[int, float]] | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[float] = []

    @property
    def known(self) -> int:
        """Tokens whose value the machine knows."""
        return self.prompt_tokens + len(self.out)

    @property
    def length(self) -> int:
        """Tokens including those that plans under way will sample."""
        return self.prompt_tokens + len(self.out) + self.inflight

    @property
    def draws_left(self) -> int:
        """Tokens that it may still draw here, without those under way."""
        limit = self.group.tokens_here
        return (max(1, self.max_tokens) if limit is None else limit) - len(self.out) - self.inflight

    @property
    def known_ending(self) -> FinishReason | None:
        """Whether the tokens known so far are already all that it may have."""
        if self.out and self.out[-1] in self.stops and len(self.out) >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if 0 < self.max_tokens <= len(self.out) else None

    def known_tokens(self) -> TokenArray:
        """Prompt and generated tokens, shape ``[known]``, int32."""
        if not self.out:
            return self.group.request.prompt
        return np.concatenate((self.group.request.prompt, np.asarray(self.out, dtype=np.int32)))

    @property
    def holds_tokens(self) -> bool:
        """Whether there are tokens that it has not told."""
        return 0 < self.told < len(self.out)

    def news(self) -> TokenOutput:
        """The tokens that were held, and nothing else; now they are told."""
        told, self.told = self.told, len(self.out)
        return TokenOutput(self.request_id, self.index, tuple(self.out[told:]), offset=told)

    def ending(self, reason: FinishReason, error: str = "") -> TokenOutput:
        """The final output of a sequence that ends without another token (beams have emitted none)."""
        emitted = 0 if self.group.beam is not None else len(self.out)
        held = tuple(self.out[self.told :]) if self.told else ()
        offset, story = emitted - len(held), self.group.take_facts()
        return TokenOutput(
            self.request_id, self.index, held, finish_reason=reason, error=error, offset=offset, story=story
        )

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id}/{self.index} {self.phase.value} slot={self.slot}"
            f" {self.prompt_tokens}+{len(self.out)}+{self.inflight} computed={self.computed} blocks={len(self.blocks)}>"
        )
