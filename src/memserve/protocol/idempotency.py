"""Answers that outlive the connection, and the router, through which they were asked for.

A client that names its request (``Idempotency-Key``) may ask for it again, and gets the same answer, continued. So what
the client was told is kept: by the router for clients that lose their connection, and by the instance that runs the
request for the time when there is another router. A request takes its log along: to the instance that decodes it
(``Handoff.told``), and to the next one where an attempt has failed (``Dispatch.told``). So one instance has all of
it.
"""

from __future__ import annotations

from collections.abc import Iterable

from memserve.base.types import FinishReason, TokenLogprobs, TokenOutput
from memserve.protocol.peers import Message

_ANSWER_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 1000, 40, 150
"""Approximate memory of an answer, of each token, and of each alternative to a token."""

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
"""Endings that belong to an answer; every other one says that there is none."""


class AnswerHeld(Message, frozen=True):
    """What an instance has of one answer."""

    key: str
    asked: str
    attempt_id: str
    runs: bool
    """The attempt goes on there; else ``told`` is all that it has."""
    created_s: int
    told: tuple[TokenOutput, ...]
    """One for each sequence that has begun, from its first token on."""


class AnswersHeld(Message, frozen=True, tag=True):
    """Instance -> router that has accepted it: what it has of answers that clients may ask for again."""

    answers: tuple[AnswerHeld, ...]
    is_last: bool
    """There is no more to be told."""
    key: str = ""
    """The one that the router has asked for (``QueryAnswers``); empty: all that an earlier router has left."""
    refused: str = ""
    """``asked`` of that question, where another request has the key: one that runs there, or whose answer is whole."""


class QueryAnswers(Message, frozen=True, tag="AskAnswers"):
    """Router -> instance: a client asks me for the answer with this key. Tell me what you have of it; an attempt that
    runs there is mine from now on, if it is of the same request."""

    key: str
    asked: str
    """The request, as ``Request.asked``."""


class AnswerTaken(Message, frozen=True, tag=True):
    """Instance -> router whose attempt this was: its client asks another router for the answer, which has it now."""

    request_id: str


class _SequenceLog:
    """What was told of one sequence."""

    __slots__ = ("cached_tokens", "cumulative_logprob", "ended_alone", "first", "logprobs", "reason", "tokens")

    def __init__(self, first: TokenOutput) -> None:
        self.first = first  # with all that only comes once
        self.cached_tokens = 0  # an engine says it with its last output
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.reason: FinishReason | None = None
        self.ended_alone = False  # its ending came behind its last token, not with it
        self.cumulative_logprob: float | None = None

    def outputs_for(self, request_id: str) -> list[TokenOutput]:
        first, alone = self.first, self.ended_alone and bool(self.tokens)
        reason = None if alone else self.reason
        whole = TokenOutput(
            request_id, first.index, tuple(self.tokens), tuple(self.logprobs), reason, self.cached_tokens,
            first.prompt_logprobs, self.cumulative_logprob, first.queue_ns, first.story,
            inexact_tokens=first.inexact_tokens,
        )  # fmt: skip
        end = TokenOutput(request_id, first.index, (), finish_reason=self.reason, offset=len(self.tokens))
        return [whole, end] if alone else [whole]


class AnswerLog:
    """All that was told of one answer, from the first token of each sequence on."""

    __slots__ = ("_sequences", "nbytes")

    def __init__(self, outputs: Iterable[TokenOutput] = ()) -> None:
        self._sequences: dict[int, _SequenceLog] = {}
        #: approximate memory
        self.nbytes = _ANSWER_BYTES
        for output in outputs:
            self.append_output(output)

    def append_output(self, output: TokenOutput) -> int:
        """Append what is new in ``output``. Returns the bytes that it adds. An ending that is none of an answer is left
        out. -1, and nothing is taken: tokens are missing before it."""
        sequence = self._sequences.get(output.index)
        known_tokens = (len(sequence.tokens) if sequence is not None else 0) - output.offset
        if known_tokens < 0:
            return -1
        if sequence is None:
            if not output.tokens and output.finish_reason not in COMPLETE:
                return 0
            sequence = self._sequences[output.index] = _SequenceLog(output)
        if sequence.reason is not None:
            return 0
        sequence.tokens += output.tokens[known_tokens:]
        sequence.logprobs += output.logprobs[known_tokens:]
        sequence.cached_tokens = sequence.cached_tokens or output.cached_tokens
        if output.cumulative_logprob is not None:
            sequence.cumulative_logprob = output.cumulative_logprob
        if output.finish_reason in COMPLETE:
            sequence.reason, sequence.ended_alone = output.finish_reason, known_tokens >= len(output.tokens)
        alternatives = sum(1 + len(entry.top) for entry in output.logprobs[known_tokens:])
        if output is sequence.first:
            alternatives += sum(1 + len(entry.top) for entry in output.prompt_logprobs or () if entry is not None)
        added = _TOKEN_BYTES * max(0, len(output.tokens) - known_tokens) + _LOGPROB_BYTES * alternatives
        self.nbytes += added
        return added

    def outputs_for(self, request_id: str) -> list[TokenOutput]:
        """Everything, as outputs of ``request_id``."""
        return [
            output for index in sorted(self._sequences) for output in self._sequences[index].outputs_for(request_id)
        ]

    def is_complete(self, sequences: int) -> bool:
        """Whether each of so many sequences has its ending."""
        return len(self._sequences) == sequences and all(
            sequence.reason is not None for sequence in self._sequences.values()
        )

    @property
    def token_count(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._sequences.values())

    def __bool__(self) -> bool:
        return bool(self._sequences)
