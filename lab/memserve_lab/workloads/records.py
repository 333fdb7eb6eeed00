"""Parsed records: output of the file readers, input of the generators (independent of file formats).

The words of a workload: sessions of turns, each with what is asked and when it is due.

One vocabulary for real text and for traces that hold lengths only, for the load client and for the simulator::

    Workload ── sessions ──▶ Session ── turns ──▶ Turn ── says ──▶ Chat     messages for a chat endpoint
                                                              │    Text     for a completion endpoint
                                                              └─▶  Blocks   token counts and block identities, no text

**Causal order** (MemServe 8.2): turn ``n`` of a session is sent only after the answer to turn ``n - 1`` has ended, and
not before it is due: ``sent = max(turn.due_s, end of the answer before + turn.think_s)``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from memserve.base.errors import check
from memserve.base.units import ceil_div


class History(enum.StrEnum):
    """How a turn's prompt follows from the turns before it."""

    CLOSED = "closed"  # all turns so far, with the answers *this* model gave, then the turn's own text
    GIVEN = "given"  # the turn's own text is the whole prompt: a recording, answers of another model included


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat, with OpenAI's roles (``system``, ``user``, ``assistant``)."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages that a turn adds to its chat (or, :attr:`History.GIVEN`, the whole chat)."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text that a turn adds after the prompt and the answers so far (or the whole prompt)."""

    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """The first ``tokens`` tokens of the consecutive blocks ``first``, ``first + 1``, ...: all full but the last.

    A block's identity stands for its tokens: equal identity, equal tokens. Block ``b`` follows ``b - 1`` in a span only
    because traces number their blocks that way; a span is a short form of a list, nothing else.
    """

    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt of which only the length and the blocks are known. ``tokens_of`` makes token ids of it."""

    block_tokens: int
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return sum(span.tokens for span in self.spans)

    def ids(self) -> Iterator[int]:
        """The identity of every block, in order, a partial one included."""
        for span in self.spans:
            yield from range(span.first, span.first + ceil_div(span.tokens, self.block_tokens))


Says = Chat | Text | Blocks


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: prompt, length of the answer, and time."""

    says: Says
    output_tokens_max: int
    """The answer's length: an upper bound for text; exact for :class:`Blocks` (sent with ``ignore_eos``)."""
    answer: str | None = None
    """The recorded answer, for statistics and simulation. Never sent under a closed history."""
    due_s: float | None = None
    """Earliest sending, in seconds from the workload's start. None: as soon as causal order allows."""
    think_s: float = 0.0
    """Seconds between the end of the answer before and this turn."""
    stop: tuple[str, ...] = ()
    """Stop strings (an agent's step ends before the next observation)."""
    tool: str = ""
    """The tool that the answer calls, for simulation; its result is the next turn. Empty: none."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns in causal order. Sessions are independent of each other."""

    session_id: str
    turns: tuple[Turn, ...]
    group: str = ""
    """A tenant, or the group that shares a system prompt. Empty: no group."""
    history: History = History.CLOSED

    @property
    def arrival_s(self) -> float:
        """When the first turn is due, in seconds from the workload's start (0 when nothing sets it)."""
        return self.turns[0].due_s or 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, and where they come from. The same arguments and seed give an equal workload."""

    kind: str
    source: str
    """Names of data sets, or ``built-in``."""
    sessions: tuple[Session, ...]
    seed: int = 0
    arrivals: str = "as fast as causal order allows"
    """In words: what set :attr:`Turn.due_s`."""
    users: int | None = None
    """Closed loop: N users each take the next session when theirs has ended. None: open loop."""
    notes: tuple[str, ...] = field(default=())
    """Omissions and changes (caps, duplicates), for the report."""

    def __post_init__(self) -> None:
        check(all(session.turns for session in self.sessions), "a session has at least one turn")
        check(self.users is None or self.users > 0, "a closed loop needs a user")

    @property
    def request_count(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


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
