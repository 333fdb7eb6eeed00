"""What the two machines of an instance hear and say: events in the past tense, actions in the imperative.

``machine.Instance`` runs requests; ``member.MemberMachine`` joins the cluster. Words that they share with the router's
machine are in ``serving``, jobs on pages in ``kv_transfer.events``, those of grammars in ``grammar_events``.

What an instance asks of its host for the grammars of answers, and what the host answers.

The host builds grammars and computes masks where they can be stopped (:mod:`memserve.model.grammar.processes`); a
simulator answers when it likes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memserve.base.types import ClockTicked, CopyBlocks, SamplingParams, StopParams, Tier, TokenArray, TokenLogprobs
from memserve.kv.contents import MoveTokens
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.protocol.events import (
    EmitTokens,
    MessageArrived,
    PrefixPinned,
    PrefixUnpinned,
    RejectRequest,
    RequestArrived,
    RequestCancelled,
    Send,
    SequenceStopped,
    ToolCalled,
)
from memserve.protocol.kv_hints import KvHinted
from memserve.protocol.messages import AdapterFiles, AdaptersHeld, HoldAdapters, Segment

GRAMMAR_FAILED = "the form that is asked of the answer is more than the grammar engine takes"
"""The beginning of a row's reason when its own grammar cannot be followed, or of a request's."""


@dataclass(frozen=True, slots=True)
class BuildGrammar:
    """Build a grammar beside the steps, and answer with ``GrammarBuilt``. Then slots may be opened with it."""

    job_id: int
    grammar: str


@dataclass(frozen=True, slots=True)
class ForgetGrammar:
    """No request has this grammar any more, whether it is built or still being built: stop what works on it."""

    job_id: int
    grammar: str


@dataclass(frozen=True, slots=True)
class AwaitMask:
    """Answer with ``MaskComputed`` as soon as it is known what may come next in a slot with a late draw."""

    job_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class GrammarBuilt:
    """The answer to ``BuildGrammar``."""

    job_id: int
    error: str = ""
    """Why there is no such grammar. Empty: it is there."""


@dataclass(frozen=True, slots=True)
class MaskComputed:
    """The answer to ``AwaitMask``: the next draw of the slot is not late, unless the slot has been given to another
    sequence."""

    job_id: int


# -- what the device is asked for


@dataclass(frozen=True, slots=True)
class Before:
    """What comes before a part of a sequence."""

    name: str  # of the sequence at the holders of its other parts
    tokens: TokenArray
    segments: tuple[Segment, ...]  # the KV of all those tokens


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Bind a device slot to a sequence: its tokens so far, its sampling, its block table."""

    slot: int
    tokens: TokenArray  # every token known so far: prompt, then generated
    prompt_tokens: int  # how many of them are the prompt
    index: int  # which of the request's sequences: part of the sampling key
    sampling: SamplingParams
    blocks: list[int]  # HBM block ids, in order
    beam_candidates: int = 0  # > 0: report this many candidates at every sampled position instead of drawing
    stop: StopParams = field(default_factory=StopParams)  # the device never draws a stop token before ``min_tokens``
    before: Before | None = None  # the sequence is a part: rows count from its first token. None: it is whole
    adapter: str = ""  # digest of the LoRA adapter that computes its rows; empty: none
    grammar_job: int = 0  # the ``BuildGrammar`` that built ``sampling.grammar``; 0: it has none


@dataclass(frozen=True, slots=True)
class LateDraw:
    """Draw the token of a slot whose mask was late (``StepFinished.late``), from the logits that the device has kept.
    Tokens behind the ``known`` ones have no meaning: they are forgotten before anything is computed."""

    slot: int
    known_tokens: int  # tokens of the sequence


@dataclass(frozen=True, slots=True)
class PlaceByLayer:
    """From now on some entries of a slot's table lie by layer: all of their layers in DRAM, and those that are *kept*
    in HBM as well. The others pass through HBM, one after the other, each time that the slot has a row.

    A *frame* is an HBM block with pages of a single layer: entry ``first + i`` has page ``i % num_layers`` of frame
    ``i // num_layers``. What a row computes of these entries is in DRAM, and in kept frames, when its plan is over;
    entries behind it have no content yet.
    """

    slot: int
    first: int  # entry of the table
    dram_blocks: list[int]  # whole, one an entry
    resident_layers: dict[int, list[int]]  # layer -> its frames
    staging: tuple[list[int], list[int]]  # frames that the other layers pass through, by turns


@dataclass(frozen=True, slots=True)
class MovePages:
    """Copy pages that earlier plans have written, beside the plan's rows: all is done when the plan is. A page has the
    number ``block * num_layers + layer``."""

    src_tier: Tier
    dst_tier: Tier
    src: list[int]
    dst: list[int]


@dataclass(frozen=True, slots=True)
class LoadState:
    """The recurrent state of a slot becomes another one: that of no token, a snapshot, or what another slot has now."""

    slot: int
    tokens: int
    """Behind how many tokens of a sequence: the slot's next row begins there."""
    pages: list[int] = field(default_factory=list)
    """Of a snapshot. Empty: it is another slot's, or there are no tokens."""
    from_slot: int | None = None
    tier: Tier = Tier.HBM
    """Where its pages lie: in DRAM they are blocks."""


@dataclass(frozen=True, slots=True)
class SaveState:
    """``dram_blocks`` get the recurrent state that a slot has, behind ``tokens`` of a sequence that leaves it."""

    slot: int
    tokens: int
    dram_blocks: list[int]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """When the slot's row has computed its tokens, ``pages`` have the recurrent state as it was behind ``tokens`` of
    them, counted from the first of the sequence. A row may go on beyond."""

    slot: int
    tokens: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class PlaceWindow:
    """From now on KV of the layers that read a window, where it lies apart, has these HBM blocks: ``part_blocks`` for
    each entry of the slot's table from ``first`` on. What lay at these entries before, and at earlier ones, stays the
    machine's: a row reads no entry behind its window."""

    slot: int
    first: int
    blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """One device step. The device executes plans strictly in the order in which it gets them.

    Order inside a plan: ``reset_slots``, ``close``, then ``states`` and ``copies`` in order, then ``token_moves``,
    ``open``, ``grow``, ``replace``, ``windows``, ``place``, then the rows are computed as one batch, then ``snapshots``
    are written and tokens sampled.
    The device keeps, for each slot, a token buffer: a sampled token is written behind the slot's last token on the
    device, so a later plan may name its position before any host has seen it. Row ``r`` computes tokens
    ``[starts[r], starts[r] + counts[r])`` of slot ``slots[r]``: it writes their K and V to the slot's block table and
    attends to positions ``<= own position``. Several rows may be of one slot, in the order of their tokens: a layer
    attends when the KV of all rows is written.
    """

    step_id: int
    close: list[int] = field(default_factory=list)  # slots
    copies: list[CopyBlocks] = field(default_factory=list)
    token_moves: list[MoveTokens] = field(default_factory=list)
    open: list[OpenSequence] = field(default_factory=list)
    grow: list[tuple[int, list[int]]] = field(default_factory=list)  # (slot, block ids appended to its table)
    replace: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, table position, new block id)
    windows: list[PlaceWindow] = field(default_factory=list)
    place: list[PlaceByLayer] = field(default_factory=list)
    moves: list[MovePages] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # one for each row
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample_slots: list[tuple[int, ...]] = field(default_factory=list)
    """For each row, the slots that draw a token from its last logits. ``()``: none, a prefill chunk. ``(slot,)``: the
    usual case. Several: parallel sampling, by sequences forked from the row's prompt."""
    decodes: int = 0
    """N: the first N rows are decodes, each of which computes the last known token and draws one. Decodes may stand
    behind them, too."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Row -> tokens that may follow its first one, one by one. Such a row has one token more than drafts; its slot
    draws behind each, as far as what was drawn is what the next draft says. They are the last rows of the plan."""
    late_draws: list[LateDraw] = field(default_factory=list)
    """Draws without a row, behind those of rows without drafts."""
    prompt_logprob_rows: list[int] = field(default_factory=list)
    states: list[LoadState | SaveState] = field(default_factory=list)
    """Of models with a recurrent state: a slot has one from its first order here on, open or not."""
    snapshots: list[TakeSnapshot] = field(default_factory=list)
    reset_slots: bool = False  # an earlier plan failed: before all else, forget every slot
    gates: dict[int, int] = field(default_factory=dict)
    """Slot -> the gate of its row: KV before it comes layer by layer. A layer attends when the gate is open for it."""
    report_layers: int = 0
    """N: report each Nth layer as soon as K and V up to it are written for all rows (``LayerFinished``), where the
    forward can; the end of the step reports all layers in any case. 0: report none."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.counts)

    @property
    def drawing_slots(self) -> list[int]:
        """The slots that draw, in the order of ``StepFinished.tokens``: of rows without drafts, late ones, of rows with
        drafts."""
        plain = self.sample_slots[: len(self.sample_slots) - len(self.drafts)]
        drafted = self.sample_slots[len(plain) :]
        late = [draw.slot for draw in self.late_draws]
        return [slot for slots in plain for slot in slots] + late + [slot for slots in drafted for slot in slots]

    def with_draws(self, slots: Iterable[int]) -> set[int]:
        """``slots``, and those that draw from their rows: forks, whose first logits are those of another's prompt."""
        rows = set(slots)
        return rows.union(*(draws for slot, draws in zip(self.slots, self.sample_slots, strict=True) if slot in rows))

    @property
    def gives_tokens(self) -> bool:
        """Whether it computes or draws anything."""
        return bool(self.slots or self.late_draws)


@dataclass(frozen=True, slots=True)
class RunStep:
    """Give ``plan`` to the device (after all earlier ones)."""

    plan: StepPlan


# -- parts of longer sequences


@dataclass(frozen=True, slots=True)
class HoldSegment:
    """From now on answer queries about a part of the sequence ``name``: its KV is complete."""

    name: str
    blocks: list[int]  # HBM block ids, in order
    tokens: int


@dataclass(frozen=True, slots=True)
class DropSegment:
    """Answer no more queries about ``name``, before any further plan: its blocks may be written again."""

    name: str


@dataclass(frozen=True, slots=True)
class MoveGate:
    """The row of a gate (``StepPlan.gates``) may read the first ``layers`` layers of all KV before it. None: it never
    can; it fails alone. It comes behind the plan, and a gate begins with none."""

    gate: int
    layers: int | None


# -- adapters


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Have a LoRA adapter ready beside the steps; answered by :class:`AdapterLoaded`."""

    files: AdapterFiles


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """No row of any further plan has this adapter: forget it."""

    digest: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """The device has the adapter from now on; ``error``: why it cannot have it, or empty."""

    digest: str
    error: str = ""


# -- what the device answers


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A slot could not draw, by its own fault: its sequence ends, and no other one notices.

    The row was computed nevertheless, so KV that its plan publishes is that of its tokens.
    """

    reason: str  # for the client
    kv_is_suspect: bool = False
    """True: the model gave no numbers for this row; KV that it has read or written may be the reason."""


NO_TOKEN_LEFT = "penalties, biases and min_tokens leave no token that could come next"
"""Reason of a row when its own request made every token impossible."""


@dataclass(slots=True)
class LinkUse:
    """What the link between HBM and DRAM has carried for KV that lies by layer, and how long steps waited for it."""

    up_bytes: int = 0
    """From DRAM to HBM."""
    down_bytes: int = 0
    """From HBM to DRAM."""
    busy_ns: int = 0
    """Time of all copies, both directions."""
    waited_ns: int = 0
    """Time in which a step stood still for a copy."""

    def add(self, use: LinkUse) -> None:
        """Count what ``use`` has counted."""
        self.up_bytes += use.up_bytes
        self.down_bytes += use.down_bytes
        self.busy_ns += use.busy_ns
        self.waited_ns += use.waited_ns

    @property
    def hidden_share(self) -> float:
        """Share of the copies' time (0 to 1) for which no step stood still."""
        return 1.0 - min(1.0, self.waited_ns / self.busy_ns) if self.busy_ns else 1.0


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The device executed a plan."""

    step_id: int
    tokens: list[int]  # sampled tokens, one for each of plan.draws
    device_ns: int  # time that the device worked on this plan
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # position in ``tokens`` -> logprobs
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)  # row -> per token
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Beam rows: position in ``tokens`` -> the best ``beam_candidates`` (token, logprob), best first."""
    accepted_drafts: dict[int, list[int]] = field(default_factory=dict)
    """Slot of a row with drafts -> what it has drawn behind its token in ``tokens``: one for each draft that was right,
    up to the first that was not."""
    failed: dict[int, RowFailed] = field(default_factory=dict)
    """Slots with a row or a draw in the plan that failed alone. A failed draw has a token in ``tokens``, too, any one:
    the device has written it behind the slot's last one, so that a plan under way may name its position."""
    late: frozenset[int] = frozenset()
    """Slots that have drawn nothing, because the mask of their grammar was not there in time: the token in ``tokens``
    has no meaning, and neither have those of later plans for the slot, which count as late, until one has a
    ``LateDraw``."""
    link: LinkUse | None = None
    """What the step used. None: nothing lies by layer."""
    copies_ns: int = 0
    """Of ``device_ns``: before the rows, for ``plan.copies``. 0: there were none, or they are not timed."""
    hidden: dict[int, bytes] = field(default_factory=dict)
    """Of a model that embeds: row -> the hidden state of its last token, or for a prompt of which all tokens are
    reported the sum over those of the row; float32."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The device could not execute a plan: none of its results can be relied upon."""

    step_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class LayerFinished:
    """The device has written K and V of one layer for all rows of a plan with ``report_layers``."""

    step_id: int
    layer: int


Event = (
    RequestArrived
    | RequestCancelled
    | SequenceStopped
    | ToolCalled
    | StepFinished
    | StepFailed
    | ClockTicked
    | MessageArrived
    | LayerFinished
    | GrammarBuilt
    | MaskComputed
    | AdapterLoaded
    | HoldAdapters
    | PagesSealed
    | PagesPulled
    | PrefixPinned
    | PrefixUnpinned
    | KvHinted
)
Action = (
    RunStep | EmitTokens | RejectRequest | Send | SealPages | PullPages | CancelPulls | BuildGrammar | ForgetGrammar
    | AwaitMask | HoldSegment | DropSegment | MoveGate | LoadAdapter | DropAdapter | AdaptersHeld
)  # fmt: skip
