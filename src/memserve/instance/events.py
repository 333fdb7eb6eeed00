"""What may happen to an instance: events, in the past tense (level 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.types import Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client's request, already tokenized and validated against the model's limits."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away: every sequence of the request ends now."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceStopped:
    """The edge found a stop string in the text of one sequence: it ends with ``FinishReason.STOP``."""

    request_id: str
    index: int


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


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The device could not execute a plan; nothing of it can be relied upon."""

    step_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ClockTicked:
    """Time passed: deadlines are looked at."""


Event = RequestArrived | RequestCancelled | SequenceStopped | StepFinished | StepFailed | ClockTicked
