"""Parsed records: output of the file readers, input of the generators (independent of file formats)."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.workloads.words import Message, Span


@dataclass(frozen=True, slots=True)
class Conversation:
    """A recorded chat. Branches of one tree share a ``group``."""

    record_id: str
    messages: tuple[Message, ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the recorded answer where there is one."""

    question: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A long text and questions about it (also: worked examples and the questions that follow them)."""

    record_id: str
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an agent: thought, action, and the observation that follows (ReAct)."""

    thought: str
    action: str
    observation: str


@dataclass(frozen=True, slots=True)
class Episode:
    """An agent's steps to the answer of one question."""

    record_id: str
    question: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it went over the wire: the whole prompt, and the reply where it was recorded."""

    prompt: str
    output: str | None = None


@dataclass(frozen=True, slots=True)
class CallLog:
    """The calls of one agent session, in order."""

    record_id: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """One row of a trace without text. ``spans`` None: the trace has no blocks (Azure)."""

    at_s: float
    input_tokens: int
    output_tokens: int
    spans: tuple[Span, ...] | None = None
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LengthLog:
    """Rows of one session; their block identities are valid inside the session only."""

    record_id: str
    rows: tuple[Lengths, ...]
    parent: str = ""
    """The session of the agent that started this one; empty for a session of its own."""


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals of one client during one window (ServeGen: rate and fitted gaps between arrivals)."""

    start_s: float
    requests_per_s: float
    family: str
    """``Gamma`` or ``Weibull``."""
    shape: float


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Length quantiles, 0 to 100 %, valid from ``start_s`` on."""

    start_s: float
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Client:
    """One client's day (ServeGen)."""

    record_id: str
    windows: tuple[Window, ...]
    lengths: tuple[Quantiles, ...]
