"""A request, its sequences, and the phases that they pass through.

Tokens of a sequence, by what has happened to them::

    |<------------- prompt ------------>|<----- out ----->|<- inflight ->|
    |                                   |  known to us    | on the device|
    |<--------------- computed (KV written by plans already made) --->|1|
    |<-- published --->|
    |<------------------- writable_until ... may be written without asking the pool -------->|

``computed <= length`` always; a sequence that decodes has ``computed == length - 1``.

What other processes have to do with a request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.state_table import Transitions
from memserve.base.types import (
    DEFERRABLE_PRIORITY,
    FinishReason,
    Request,
    TokenArray,
    TokenLogprobs,
    TokenOutput,
    TransferMode,
)
from memserve.instance.scheduler.beam import BeamSearch
from memserve.protocol.messages import Span
from memserve.protocol.peers import Holder, Peer

if TYPE_CHECKING:
    from memserve.instance.layerwise.state import LayeredKV
    from memserve.instance.scheduler.stripes import StripedPrompt
    from memserve.instance.speculation.drafts import Pace
    from memserve.kv.contents import InexactKv
    from memserve.kv.state_snapshot import Lease


@dataclass(slots=True)
class RemoteState:
    """What other processes have to do with a request. At most one of ``fetch_id``, ``import_id`` and ``offer_id`` is
    set: a request moves one way at a time."""

    decode_at: Peer | None = None
    """The instance that goes on after the first token, or the next one. None: this one."""
    mode: TransferMode = TransferMode.BY_REQUEST_AGG
    return_kv: bool = False
    """The decode instance sends back the KV of what it generates."""
    deadline_ns: int | None = None
    original: Request | None = None
    """A beam search to be handed over: the request that the decode instance gets. A substitute runs here and draws
    nothing of use."""
    holders: list[Holder] = field(default_factory=list)
    """Instances that may be asked for the prefix, best first."""
    fetch_id: str | None = None
    """The fetch that the request waits for."""
    fetch_until_ns: int = 0
    """When the request waits for no further holder."""
    import_id: str | None = None
    """The handoff that brings the request here."""
    offer_id: str | None = None
    """The handoff by which the request leaves."""
    offered_blocks: int = 0
    """Blocks of that offer."""
    named_blocks: int = 0
    """Of them: named as computed, or about to be, layer by layer."""
    home: Peer | None = None
    """The instance that gets the generated KV back."""
    home_tokens: int = 0
    """Tokens whose KV ``home`` has."""
    stopped: list[int] = field(default_factory=list)
    """Sequences with a stop string that was found before they came here."""
    migrates: bool = False
    """It leaves, or is being copied so that it can, although it was to be decoded here."""


Rank = tuple[int, int, int, int, int]
"""(urgency, priority, arrival, index): total order; of one tenant's sequences the smaller runs first."""


SequenceKey = tuple[int, int]
"""(arrival, index) of a sequence."""


Fact = tuple[str, str | int | float]
"""One line of a request's story."""


class Phase(enum.Enum):
    """Where a sequence is. The comments name the container in ``SchedulerState`` that holds all and only these."""

    NEW = "new"  # no container: made, and not enqueued yet
    WAITING_FOR_REMOTE_KV = "waiting for remote KV"  # no container, no blocks: another instance sends KV for it
    REMOTE_KV_READY = "remote KV ready"  # remote_kv_ready: holds HBM blocks that came from there, waits for a slot
    WAITING_FOR_GRAMMAR = "waiting for its grammar"  # no container: holds no slot and no HBM block, as one that waits
    WAITING = "waiting"  # waiting: holds no slot and no HBM block (maybe DRAM blocks)
    PARKED = "parked"  # parked: has told tokens, its KV is in DRAM; prompts need not wait behind it
    PREFILLING = "prefilling"  # prefilling: has known tokens to compute
    DECODING = "decoding"  # decoding: computes one token, known or not, each step
    IDLE = "idle"  # idle: nothing to schedule: tokens or drafts are under way, a mask is late, a beam waits for others
    PREEMPTED = "preempted"  # no container: holds no slot and no HBM block; resumed when all its tokens are known
    FINISHED = "finished"  # no container: tokens still under way are dropped


class Cause(enum.Enum):
    """Why a sequence changes its phase."""

    ENQUEUED = enum.auto()
    REMOTE_KV_EXPECTED = enum.auto()
    REMOTE_KV_ARRIVED = enum.auto()
    FETCH_ENDED = enum.auto()
    """The prefix is in the index, or will not come."""
    GRAMMAR_EXPECTED = enum.auto()
    """Its grammar is being built: it is not to be admitted yet."""
    GRAMMAR_BUILT = enum.auto()
    ADMITTED = enum.auto()
    PROMPT_SCHEDULED = enum.auto()
    """Every known token has a row, and the sequence draws on."""
    ALL_SCHEDULED = enum.auto()
    """The last token that may be drawn here, or the next candidates of a beam, are under way."""
    BEAM_FORKED = enum.auto()
    BEAM_EXTENDED = enum.auto()
    AWAITS_TOKENS = enum.auto()
    """Drafts are to be compared with tokens under way, or its mask is late: it has no further row until that is
    known."""
    TOKENS_KNOWN = enum.auto()
    HANDOFF_ABANDONED = enum.auto()
    """The request decodes where it was prefilled."""
    PREEMPTED = enum.auto()
    PARKED = enum.auto()
    """It waits for room with its KV in DRAM, where KV may lie by layer."""
    RESUMED = enum.auto()
    FINISHED = enum.auto()


_HOLDING = Phase.REMOTE_KV_READY, Phase.PREFILLING, Phase.DECODING, Phase.IDLE

SEQUENCE = Transitions(
    "Sequence",
    Phase.NEW,
    {
        (Phase.NEW, Cause.ENQUEUED): Phase.WAITING,
        (Phase.NEW, Cause.REMOTE_KV_EXPECTED): Phase.WAITING_FOR_REMOTE_KV,
        (Phase.NEW, Cause.REMOTE_KV_ARRIVED): Phase.REMOTE_KV_READY,
        (Phase.NEW, Cause.PROMPT_SCHEDULED): Phase.DECODING,
        (Phase.NEW, Cause.ALL_SCHEDULED): Phase.IDLE,
        (Phase.NEW, Cause.BEAM_FORKED): Phase.IDLE,
        (Phase.NEW, Cause.PREEMPTED): Phase.PREEMPTED,
        (Phase.WAITING_FOR_REMOTE_KV, Cause.FETCH_ENDED): Phase.WAITING,
        (Phase.WAITING_FOR_REMOTE_KV, Cause.REMOTE_KV_ARRIVED): Phase.REMOTE_KV_READY,
        (Phase.WAITING_FOR_REMOTE_KV, Cause.PARKED): Phase.PARKED,
        (Phase.WAITING, Cause.GRAMMAR_EXPECTED): Phase.WAITING_FOR_GRAMMAR,
        (Phase.WAITING_FOR_GRAMMAR, Cause.GRAMMAR_BUILT): Phase.WAITING,
        (Phase.REMOTE_KV_READY, Cause.ADMITTED): Phase.PREFILLING,
        (Phase.WAITING, Cause.ADMITTED): Phase.PREFILLING,
        (Phase.PREFILLING, Cause.PROMPT_SCHEDULED): Phase.DECODING,
        (Phase.PREFILLING, Cause.ALL_SCHEDULED): Phase.IDLE,
        (Phase.DECODING, Cause.ALL_SCHEDULED): Phase.IDLE,
        (Phase.DECODING, Cause.AWAITS_TOKENS): Phase.IDLE,
        (Phase.IDLE, Cause.TOKENS_KNOWN): Phase.DECODING,
        (Phase.IDLE, Cause.BEAM_EXTENDED): Phase.PREFILLING,
        (Phase.IDLE, Cause.HANDOFF_ABANDONED): Phase.DECODING,
        (Phase.PREEMPTED, Cause.PARKED): Phase.PARKED,
        (Phase.PREEMPTED, Cause.RESUMED): Phase.WAITING,
        (Phase.PARKED, Cause.ADMITTED): Phase.PREFILLING,
        **{(phase, Cause.PREEMPTED): Phase.PREEMPTED for phase in (*_HOLDING, Phase.PARKED)},
        **{(phase, Cause.FINISHED): Phase.FINISHED for phase in Phase if phase not in (Phase.NEW, Phase.FINISHED)},
    },
)
"""Every move of a sequence. ``SchedulerState.move`` refuses all others."""


@dataclass(slots=True)
class LateMask:
    """Of a sequence that has drawn nothing because its mask was not there."""

    job_id: int
    since_ns: int
    until_ns: int
    is_there: bool = False


class Group:
    """A request and what its sequences share."""

    __slots__ = (
        "admitted_ns",
        "arrival",
        "arrived_ns",
        "beam",
        "begun",
        "cached_tokens",
        "facts",
        "forks_pending",
        "held_steps",
        "hidden",
        "inexact_tokens",
        "isolation",
        "masks_ns",
        "max_tokens",
        "muted",
        "next_index",
        "preemptions",
        "prompt_logprobs",
        "ranked_arrival",
        "remote",
        "request",
        "reserved_slots",
        "sequences",
        "shared_tokens",
        "span",
        "stops",
        "tenant",
        "tokens_here",
        "tool",
    )

    def __init__(self, request: Request, arrival: int, max_tokens: int, now_ns: int) -> None:
        self.request = request
        self.tenant, self.isolation = request.tenant, request.isolation
        self.arrival = arrival
        #: where it stands among requests of equal priority: its own arrival, or an earlier one
        self.ranked_arrival = arrival
        #: arrival of the session's first request, as far as it is known
        self.begun = arrival
        #: tokens of the session that were cached when it began. None: this is its first request
        self.shared_tokens: int | None = None
        #: the tool that its answer calls, as far as the edge has read it
        self.tool = ""
        self.max_tokens = max_tokens
        self.stops = frozenset(request.stop.stop_token_ids)
        self.arrived_ns = now_ns
        self.admitted_ns: int | None = None
        self.preemptions = 0
        self.cached_tokens = 0
        #: prompt tokens with KV that was computed behind other tokens
        self.inexact_tokens = 0
        #: how long its sequences have waited for masks of its grammar
        self.masks_ns = 0
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
        #: of a model that embeds: the hidden state of the prompt's last token, or the sum over all so far
        self.hidden: NDArray[np.float32] | None = None
        #: the part of a longer sequence that it is. None: it is whole
        self.span: Span | None = None
        #: None: a request of the own process
        self.remote: RemoteState | None = None
        #: N: its sequences draw N tokens here, then another instance decodes. None: they draw all here
        self.tokens_here: int | None = None
        #: the client gets nothing of what it draws: the substitute of a beam search, which the decode instance begins
        self.muted = False
        #: what was done for the request and why, for the story in its next output
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
        facts, self.facts = tuple(self.facts), []
        return facts

    @property
    def is_leaving(self) -> bool:
        """Whether another instance is to go on with it, and reads its blocks, or will."""
        return self.tokens_here is not None or (self.remote is not None and self.remote.migrates)

    @property
    def wanted_grammar(self) -> tuple[str, str]:
        """Its tenant and grammar; an empty grammar: it has none."""
        return self.tenant, self.request.sampling.grammar

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
        "awaits_tokens",
        "blocks",
        "candidates",
        "cumulative_logprob",
        "dram_blocks",
        "expected_tokens",
        "failures",
        "group",
        "index",
        "inexact",
        "late",
        "layered",
        "lease",
        "logprobs",
        "max_tokens",
        "min_tokens",
        "opened",
        "pace",
        "parked_ns",
        "parked_since_ns",
        "published",
        "rank",
        "request_id",
        "resumed",
        "since_ns",
        "since_tokens",
        "slot",
        "striped",
    )

    def __init__(self, group: Group, index: int) -> None:
        request = group.request
        self.group = group
        self.request_id = request.request_id
        self.index = index
        self.rank: Rank = (request.urgency, request.priority, group.ranked_arrival, group.arrival, index)
        self.prompt_tokens = len(request.prompt)
        self.max_tokens = group.max_tokens
        self.min_tokens = request.stop.min_tokens
        self.stops = group.stops
        self.phase = SEQUENCE.initial
        self.out: list[int] = []
        #: those of ``out`` that were drawn behind other KV than what is here: by another instance, or before it was
        #: dropped
        self.resumed = 0
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
        #: what lies by layer. None: every block is whole
        self.layered: LayeredKV | None = None
        self.lease: Lease | None = None
        #: KV that was computed behind other tokens. None: all is its own, or of its prefix
        self.inexact: InexactKv | None = None
        #: parts of its prompt that other instances compute meanwhile. None: all is computed here
        self.striped: StripedPrompt | None = None
        self.slot: int | None = None
        #: ``(slot,)``, ready for ``StepPlan.sample_slots``
        self.draw: tuple[int, ...] = ()
        #: whether the device knows the slot as this sequence, up to the last plan made
        self.opened = False
        self.scheduled_step = 0
        self.failures = 0
        #: None: it does not wait for a mask of its grammar
        self.late: LateMask | None = None
        # speculation only
        #: whether it is idle until its tokens under way are known
        self.awaits_tokens = False
        #: None: it has not been looked at
        self.pace: Pace | None = None
        # scheduling by objectives only
        #: when its first token here was told, and how many it had then. None: none was
        self.since_ns: int | None = None
        self.since_tokens = 0
        #: how long it has been parked since then, without the time since it was parked last
        self.parked_ns = self.parked_since_ns = 0
        #: tokens that it is expected to have at least, the last time that was asked
        self.expected_tokens = 0
        # beam search only
        self.candidates: list[tuple[int, float]] | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[float] = []

    @property
    def key(self) -> SequenceKey:
        """No other sequence of the instance has it, not even later: ``id`` comes again once a sequence has gone."""
        return self.group.arrival, self.index

    @property
    def table_entries(self) -> int:
        """Entries of its block table."""
        return len(self.blocks) if self.layered is None else len(self.blocks) + len(self.layered.dram_blocks)

    @property
    def is_overtaking(self) -> bool:
        """Whether its prompt is computed although it has no room whole: by its turn it would wait."""
        return self.layered is not None and not self.out

    @property
    def is_deferrable(self) -> bool:
        """Whether it runs behind all others."""
        return self.rank[1] == DEFERRABLE_PRIORITY

    @property
    def blocks_held(self) -> int:
        """HBM blocks, whole ones and frames."""
        return len(self.blocks) if self.layered is None else len(self.blocks) + len(self.layered.hbm_frames)

    @property
    def known_length(self) -> int:
        """Tokens with a value that the machine knows."""
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

    @property
    def wanted_grammar(self) -> tuple[str, str]:
        """Tenant and grammar (empty: none) of its request."""
        return self.group.wanted_grammar

    def known_tokens(self) -> TokenArray:
        """Prompt and generated tokens, shape ``[known]``, int32."""
        if not self.out:
            return self.group.request.prompt
        return np.concatenate((self.group.request.prompt, np.asarray(self.out, dtype=np.int32)))

    def final_output(self, reason: FinishReason, error: str = "") -> TokenOutput:
        """The final output of a sequence that ends without another token (beams have emitted none)."""
        emitted = 0 if self.group.beam is not None else len(self.out)
        story = self.group.take_facts()
        return TokenOutput(
            self.request_id, self.index, (), finish_reason=reason, error=error, offset=emitted, story=story
        )

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id}/{self.index} {self.phase.value} slot={self.slot}"
            f" {self.prompt_tokens}+{len(self.out)}+{self.inflight} computed={self.computed} blocks={len(self.blocks)}>"
        )


def is_held_segment(sequence: Sequence) -> bool:
    """Whether it is a part of a longer sequence, computed, which other instances ask about."""
    span = sequence.group.span
    return span is not None and span.holds and sequence.phase is Phase.IDLE
