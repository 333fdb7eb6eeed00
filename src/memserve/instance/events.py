"""What may happen to an instance: events, in the past tense (level 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.kv_transfer.jobs import PagesPulled, PagesSealed
from memserve.serving import (
    ClockTicked,
    MessageArrived,
    PrefixPinned,
    PrefixUnpinned,
    RequestArrived,
    RequestCancelled,
    SequenceStopped,
)
from memserve.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A slot could not draw, by its own fault: its sequence ends, and nothing else is touched.

    Its row was computed all the same, so KV that its plan publishes is what its tokens say.
    """

    reason: str  # for the client
    kv_is_suspect: bool = False
    """The model gave no numbers for this row: KV that it has read or written may be the reason."""


NO_TOKEN_LEFT = "penalties, biases and min_tokens leave no token that could come next"
"""Reason of a row whose own request made every token impossible."""


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The device executed a plan."""

    step_id: int
    tokens: list[int]  # sampled tokens: plan.sample_slots flattened in order
    device_ns: int  # time that the device worked on this plan
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # position in ``tokens`` -> logprobs
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)  # row -> per token
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Beam rows: position in ``tokens`` -> the best ``beam_candidates`` (token, logprob), best first."""
    failed: dict[int, RowFailed] = field(default_factory=dict)
    """Slots with a row or a draw in the plan that failed alone. At a failed draw's place in ``tokens`` is some token,
    which the device has also written behind the slot's last one, so that a plan under way may name its position."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The device could not execute a plan; nothing of it can be relied upon."""

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
    | StepFinished
    | StepFailed
    | ClockTicked
    | MessageArrived
    | LayerFinished
    | PagesSealed
    | PagesPulled
    | PrefixPinned
    | PrefixUnpinned
)

__all__ = [
    "ClockTicked",
    "Event",
    "LayerFinished",
    "MessageArrived",
    "PagesPulled",
    "PagesSealed",
    "PrefixPinned",
    "PrefixUnpinned",
    "RequestArrived",
    "RequestCancelled",
    "RowFailed",
    "SequenceStopped",
    "StepFailed",
    "StepFinished",
]
