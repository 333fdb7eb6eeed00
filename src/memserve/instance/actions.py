"""What an instance asks its host to do: actions, in the imperative (level 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.kv_transfer.jobs import CancelPulls, PullPages, SealPages
from memserve.serving import EmitTokens, RejectRequest, Send
from memserve.types import CopyBlocks, SamplingParams, StopParams, TokenArray


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


@dataclass(slots=True)
class StepPlan:
    """One device step. The device executes plans strictly in the order in which it gets them.

    Order inside a plan: ``reset_slots``, ``close``, then ``copies`` in order, then ``open``, ``grow``, ``replace``,
    then the rows are computed as one batch, then tokens are sampled. The device keeps, for each slot, a token buffer:
    a sampled token is written behind the slot's last token on the device, so a later plan may name its position before
    any host has seen it. Row ``r`` computes tokens ``[starts[r], starts[r] + counts[r])`` of slot ``slots[r]``: it
    writes their K and V to the slot's block table and attends to positions ``<= own position``.
    """

    step_id: int
    close: list[int] = field(default_factory=list)  # slots
    copies: list[CopyBlocks] = field(default_factory=list)
    open: list[OpenSequence] = field(default_factory=list)
    grow: list[tuple[int, list[int]]] = field(default_factory=list)  # (slot, block ids appended to its table)
    replace: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, table position, new block id)
    slots: list[int] = field(default_factory=list)  # one a row
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample_slots: list[tuple[int, ...]] = field(default_factory=list)
    """One a row: the slots that draw a token from this row's last logits. ``()`` = no sampling (a prefill chunk),
    ``(slot,)`` = the usual case, several = parallel sampling: sequences forked from this row's prompt."""
    decodes: int = 0
    """The first so many rows are decodes: each computes one token, the last one known, and draws one. There may be
    more behind them."""
    prompt_logprob_rows: list[int] = field(default_factory=list)
    reset_slots: bool = False  # an earlier plan failed: before all else, forget every slot
    report_layers: bool = False
    """Tell the host about each layer as soon as its K and V are written for all rows (``LayerFinished``), where the
    forward can; the end of the step says it for all layers in any case."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class RunStep:
    """Give ``plan`` to the device (after all earlier ones)."""

    plan: StepPlan


Action = RunStep | EmitTokens | RejectRequest | Send | SealPages | PullPages | CancelPulls

__all__ = [
    "Action",
    "CancelPulls",
    "EmitTokens",
    "OpenSequence",
    "PullPages",
    "RejectRequest",
    "RunStep",
    "SealPages",
    "Send",
    "StepPlan",
]
