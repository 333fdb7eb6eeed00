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

from memserve.instance.beam import BeamSearch
from memserve.types import FinishReason, Request, TokenArray, TokenLogprobs, TokenOutput

if TYPE_CHECKING:
    from memserve.mempool.pool import Lease

Rank = tuple[int, int, int]
"""(priority, arrival, index): total order; the smaller runs first and is preempted last."""


class Phase(enum.Enum):
    """Where a sequence is. The comment says which container holds all and only such sequences."""

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
        "forks_pending",
        "held_steps",
        "max_tokens",
        "next_index",
        "preemptions",
        "prompt_logprobs",
        "request",
        "reserved_slots",
        "sequences",
        "stops",
    )

    def __init__(self, request: Request, arrival: int, max_tokens: int, now: int) -> None:
        self.request = request
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

    def new_sequence(self) -> Sequence:
        """Add a sequence with the next free index."""
        sequence = Sequence(self, self.next_index)
        self.sequences[self.next_index] = sequence
        self.next_index += 1
        return sequence

    @property
    def queue_ns(self) -> int | None:
        """Time from arrival to the first step that computed any of the prompt."""
        return None if self.admitted_ns is None else self.admitted_ns - self.arrived_ns

    def __repr__(self) -> str:
        return f"<Group {self.request.request_id} {list(self.sequences.values())}>"


class Sequence:
    """One line of tokens with its blocks."""

    __slots__ = (
        "blocks",
        "candidates",
        "computed",
        "cumulative_logprob",
        "dram_blocks",
        "draw",
        "failures",
        "group",
        "index",
        "inflight",
        "lease",
        "left",
        "logprobs",
        "max_tokens",
        "min_tokens",
        "opened",
        "out",
        "phase",
        "prompt_tokens",
        "published",
        "rank",
        "request_id",
        "scheduled_step",
        "slot",
        "stops",
        "writable_until",
    )

    def __init__(self, group: Group, index: int) -> None:
        request = group.request
        self.group = group
        self.request_id = request.request_id
        self.index = index
        self.rank: Rank = (request.priority, group.arrival, index)
        self.prompt_tokens = len(request.prompt)
        self.max_tokens = group.max_tokens
        self.min_tokens = request.stop.min_tokens
        self.stops = group.stops
        self.phase = Phase.WAITING
        self.out: list[int] = []
        self.inflight = 0
        #: samples that may still be scheduled
        self.left = max(1, group.max_tokens)
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

    def known_tokens(self) -> TokenArray:
        """Prompt and generated tokens, shape ``[known]``, int32."""
        if not self.out:
            return self.group.request.prompt
        return np.concatenate((self.group.request.prompt, np.asarray(self.out, dtype=np.int32)))

    def ending(self, reason: FinishReason) -> TokenOutput:
        """The final output of a sequence that ends without another token (beams have emitted none)."""
        emitted = 0 if self.group.beam is not None else len(self.out)
        return TokenOutput(self.request_id, self.index, (), finish_reason=reason, offset=emitted)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id}/{self.index} {self.phase.value} slot={self.slot}"
            f" {self.prompt_tokens}+{len(self.out)}+{self.inflight} computed={self.computed} blocks={len(self.blocks)}>"
        )
