"""The state of an answer: the texts of all sequences of a call, and its token counts."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from msgspec import Struct, field
from tokenizers import Tokenizer

from memserve.api.http.errors import ApiError, deadline_passed, internal, rejected, row_failed, shutting_down
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.request.plan import Generation
from memserve.api.openai.request.tool_calls import CallPiece, ToolCall
from memserve.api.openai.response.detokenizer import Stops, TextStream
from memserve.api.openai.response.reasoning import AnswerReader, Thoughts
from memserve.api.openai.streams import StreamCall
from memserve.base.types import FinishReason, TokenLogprobs, TokenOutput
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.host.engine import Rejected


class ReplySequence(Struct):
    """One sequence: of prompt ``at``, number ``index`` among those drawn from it."""

    at: int
    index: int
    choice: int  # place among the response's choices
    stream: TextStream
    texts: list[str] = field(default_factory=list)  # all that may be shown; empty for a stream
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token of ``stream.tokens``, if requested
    logprob_sum: float = 0.0
    shown_tokens: int = 0
    cumulative_logprob: float | None = None
    last_ns: int = 0
    reader: AnswerReader | None = None  # of a chat with tools or thoughts
    thoughts: list[str] = field(default_factory=list)  # as ``texts``

    @property
    def content(self) -> str:
        """The text so far, without thoughts and calls."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str | None:
        """The thoughts so far; ``None``: there are none."""
        return "".join(self.thoughts) if self.reader is not None and self.reader.had_thoughts else None

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far."""
        return self.reader.calls if self.reader is not None else []

    @property
    def rank(self) -> float:
        """Mean logprob per token: what ``best_of`` ranks by."""
        return self.logprob_sum / max(len(self.logprobs), 1)


class Delta(Struct, frozen=True):
    """News of one sequence, ready to be shown: tokens ``[first, last)`` and the text that came with them."""

    sequence: ReplySequence
    text: str
    first: int
    last: int
    finish_reason: FinishReason | None
    opens: bool
    """The first news of the sequence."""
    pieces: tuple[CallPiece, ...] | None = None
    """Of a chat with tools or thoughts: the text as content, thoughts and calls; ``text`` is then empty."""

    @property
    def deltas(self) -> list[dict[str, Any]]:
        """The ``delta`` objects of a stream for :attr:`pieces`."""
        return [_delta_of(piece) for piece in self.pieces or ()]


def _delta_of(piece: CallPiece) -> dict[str, Any]:
    call = piece.call
    if call is None:
        return {"reasoning_content": piece.reasoning} if piece.reasoning else {"content": piece.content}
    named = {"id": call.call_id, "type": "function"} if piece.begins else {}
    function = ({"name": call.name} if piece.begins else {}) | {"arguments": piece.arguments}
    return {"tool_calls": [{"index": call.index, **named, "function": function}]}


_SHOWN = TokenLogprobs(-1, 0.0)
"""Replaces the logprobs of a token that a stream has shown."""


class Account(Struct, frozen=True):
    """What is told of an answer as it is now: counts, times and reasons, without the texts and tokens, which may be
    large. A request makes one when it ends; dictionaries are made of it only for a reader."""

    response_id: str
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[FinishReason | None, ...]
    """Of each sequence; ``None``: it has none."""
    started_ns: int
    now_ns: int
    first_ns: int | None
    queue_ns: int | None
    stories: list[list[tuple[str, str | int | float]]]
    """The facts of each prompt."""

    @property
    def instances(self) -> list[str]:
        """Names of the instances that worked on it, in order; empty for one engine without a cluster."""
        routes = (str(value) for facts in self.stories for name, value in facts if name == "route")
        return list(dict.fromkeys(name for route in routes for name in route.split(" to ")))

    def explanation(self) -> dict[str, Any]:
        """Where the prompt's KV came from, where the time to the first token went, and what was decided and why."""
        first_ns = (self.first_ns or self.started_ns) - self.started_ns
        known = self.queue_ns is not None
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "queue_ms": round(self.queue_ns / NS_PER_MS, 3) if self.queue_ns is not None else None,
            "prefill_ms": round((first_ns - (self.queue_ns or 0)) / NS_PER_MS, 3) if known else None,
            "ttft_ms": round(first_ns / NS_PER_MS, 3),
            "total_ms": round((self.now_ns - self.started_ns) / NS_PER_MS, 3),
            "story": self._told(),
        }

    def _told(self) -> list[dict[str, str | int | float]]:
        """The facts in order; with several prompts each names its prompt."""
        return [
            {**({"prompt": at} if len(self.stories) > 1 else {}), "fact": name, "value": value}
            for at, facts in enumerate(self.stories)
            for name, value in facts
        ]


class Reply:
    """Absorbs a call's news. All counts are of this call alone."""

    def __init__(self, plan: Generation, tokenizer: Tokenizer, metrics: ApiMetrics) -> None:
        self.plan = plan
        self._metrics = metrics
        self._started_ns = time.monotonic_ns()
        self._first_ns: int | None = None
        self._queue_ns: int | None = None
        self._stops = Stops(plan.stops)
        self.sequences = [
            self._sequence(at, index, tokenizer) for at in range(len(plan.prompts)) for index in range(plan.drawn)
        ]
        self.prompt_logprobs: list[tuple[TokenLogprobs | None, ...] | None] = [None] * len(plan.prompts)
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in plan.prompts)
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None if plan.thoughts is Thoughts.NONE else 0
        self.created_s: int | None = None
        """When the answer was asked for first, in seconds since 1970; ``None``: by this call."""
        self.cached_tokens = 0
        """Prompt tokens with KV from the cache."""
        self._has_cached = [False] * len(plan.prompts)  # whether that of each prompt is known
        self._story: list[list[tuple[str, str | int | float]]] = [[] for _ in plan.prompts]
        self._unfinished = len(self.sequences)

    def _sequence(self, at: int, index: int, tokenizer: Tokenizer) -> ReplySequence:
        stop = self.plan.requests[at].stop
        stream = TextStream(
            tokenizer,
            stops=self._stops,
            stop_token_ids=stop.stop_token_ids,
            min_tokens=stop.min_tokens,
            skip_special_tokens=self.plan.skip_special_tokens,
        )
        plan = self.plan
        reads = plan.calls is not None or plan.thoughts is not Thoughts.NONE
        reader = AnswerReader(plan.thoughts, plan.calls) if reads else None
        return ReplySequence(at, index, at * self.plan.n + index, stream, reader=reader)

    @property
    def response_id(self) -> str:
        """The id that the answer carries; empty for a call without prompts."""
        if not self.plan.requests:
            return ""
        return self.plan.requests[0].request_id.rpartition("-")[0].partition("~")[0]  # behind it: of the connection

    @property
    def done(self) -> bool:
        """Every sequence has ended."""
        return self._unfinished == 0

    def absorb(self, call: StreamCall, at: int, news: TokenOutput | Rejected) -> Delta | None:
        """Take in one piece of news; ``None`` when it adds nothing.

        Raises :class:`ApiError` when the engine refused or gave up the request.
        """
        if isinstance(news, Rejected):
            self._metrics.rejected.value += 1
            raise rejected(news)
        if error := failure(news):
            raise error
        sequence = self.sequences[at * self.plan.drawn + news.index]
        if sequence.stream.finish_reason is not None:
            return None
        self._note_first(at, news)
        return self._advance(call, sequence, news)

    def forget(self, delta: Delta) -> None:
        """Drop the logprobs of ``delta``, which the stream has shown: a long stream would keep megabytes of them."""
        kept = delta.sequence.logprobs
        if kept:
            kept[delta.first : delta.last] = [_SHOWN] * (delta.last - delta.first)

    def _note_first(self, at: int, output: TokenOutput) -> None:
        if not self._has_cached[at]:
            self._has_cached[at] = True
            self.cached_tokens += output.cached_tokens
        for fact in output.story:
            if fact[0] == "created":
                self.created_s = int(fact[1])
            elif fact not in self._story[at]:  # facts about the whole request come with each sequence
                self._story[at].append(fact)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[at] = output.prompt_logprobs
        if self._first_ns is None:
            self._first_ns = time.monotonic_ns()
            self._queue_ns = output.queue_ns
            self._metrics.first_token((self._first_ns - self._started_ns) / NS_PER_S, output.queue_ns)

    def _advance(self, call: StreamCall, sequence: ReplySequence, output: TokenOutput) -> Delta:
        opens = not sequence.stream.tokens
        before = len(sequence.stream.tokens)
        news = sequence.stream.push(output)
        taken = len(sequence.stream.tokens) - before
        logprobs = output.logprobs[:taken]
        sequence.logprobs.extend(logprobs)
        sequence.logprob_sum += sum(entry.logprob for entry in logprobs)
        text, pieces = news.text, None
        if (reader := sequence.reader) is not None:
            thinks = reader.thinks
            pieces = tuple(reader.push(text) + (reader.finish() if news.finish_reason is not None else []))
            text = ""
            if self.reasoning_tokens is not None and (thinks or reader.thinks):
                self.reasoning_tokens += taken
            if self.plan.is_keyed:
                self._name_calls(sequence, pieces)
        if not self.plan.stream:
            sequence.texts += [text] if pieces is None else [piece.content for piece in pieces]
            sequence.thoughts += [piece.reasoning for piece in pieces or ()]
        sequence.cumulative_logprob = output.cumulative_logprob
        first, sequence.shown_tokens = sequence.shown_tokens, sequence.shown_tokens + news.tokens_shown
        self._count(sequence, taken, opens)
        if news.stop_found:
            call.stop_sequence(sequence.at, sequence.index)
        if news.finish_reason is not None:
            self._unfinished -= 1
        return Delta(sequence, text, first, sequence.shown_tokens, news.finish_reason, opens, pieces)

    def _name_calls(self, sequence: ReplySequence, pieces: tuple[CallPiece, ...]) -> None:
        """The same call has the same id in every answer with the key."""
        for call in [piece.call for piece in pieces if piece.begins and piece.call is not None]:
            name = f"{self.response_id} {sequence.choice} {call.index}"
            call.call_id = f"call_{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"

    def _count(self, sequence: ReplySequence, tokens: int, opens: bool) -> None:
        now_ns = time.monotonic_ns()
        if self.plan.generates:
            self.completion_tokens += tokens
            self._metrics.generated_tokens.value += tokens
            if tokens and not opens:
                self._metrics.between_tokens.observe((now_ns - sequence.last_ns) / NS_PER_S / tokens)
        sequence.last_ns = now_ns

    def usage(self, completion_tokens: int | None = None) -> dict[str, Any]:
        """The ``usage`` object, with all tokens so far or with those that were shown."""
        drawn = self.completion_tokens if completion_tokens is None else completion_tokens
        thoughts = self.reasoning_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}}),
        }

    def finished(self) -> None:
        """Enter the call's totals into the metrics."""
        now_ns = time.monotonic_ns()
        self._metrics.prompt_tokens.value += self.prompt_tokens
        self._metrics.cached_tokens.value += self.cached_tokens
        if self.plan.requests:
            self._metrics.answered(self.plan.requests[0].tenant, self.prompt_tokens, self.completion_tokens)
        self._metrics.whole_request.observe((now_ns - self._started_ns) / NS_PER_S)
        later = self.completion_tokens - len(self.sequences)
        if self._first_ns is not None and later > 0:
            spent_s = (now_ns - self._first_ns) / NS_PER_S
            self._metrics.per_token.observe(spent_s * len(self.sequences) / later)

    def explanation(self) -> dict[str, Any]:
        """As of its :class:`Account`."""
        return self.account().explanation()

    def account(self) -> Account:
        """What is told of it as it is now."""
        return Account(
            self.response_id,
            self.plan.stream,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            tuple([sequence.stream.finish_reason for sequence in self.sequences]),
            self._started_ns,
            time.monotonic_ns(),
            self._first_ns,
            self._queue_ns,
            self._story,
        )

    def best(self) -> list[ReplySequence]:
        """The sequences to return, in the order of the response's choices."""
        plan, chosen = self.plan, []
        for at in range(len(plan.prompts)):
            drawn = self.sequences[at * plan.drawn : (at + 1) * plan.drawn]
            if plan.drawn > plan.n:
                drawn = sorted(drawn, key=lambda sequence: -sequence.rank)[: plan.n]
            chosen += drawn
        for choice, sequence in enumerate(chosen):
            sequence.choice = choice
        return chosen


def failure(output: TokenOutput) -> ApiError | None:
    """The error for a sequence that ended without an answer; ``None``: it has one. A cancelled sequence means that the
    server is shutting down: a client that cancels reads no answer."""
    match output.finish_reason:
        case FinishReason.DEADLINE:
            return deadline_passed()
        case FinishReason.ERROR:
            return row_failed(output.error) if output.error else internal()
        case FinishReason.CANCELLED:
            return shutting_down()
    return None
