"""The state of an answer: the texts of all sequences of a call, and its token counts. What of it is written where:
``formats.py`` (choices), ``responders.py`` (around them)."""

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

    prompt_index: int
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
    call_fields = {"id": call.call_id, "type": "function"} if piece.begins else {}
    function = ({"name": call.name} if piece.begins else {}) | {"arguments": piece.arguments}
    return {"tool_calls": [{"index": call.index, **call_fields, "function": function}]}


_SHOWN = TokenLogprobs(-1, 0.0)
"""Replaces the logprobs of a token that a stream has shown."""


class Account(Struct, frozen=True):
    """What is told of an answer as it is now: counts, times and reasons, without the texts and tokens, which may be
    large. A request makes one when it ends; dictionaries are made of it only for a reader."""

    response_id: str
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    inexact_tokens: int
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

    def as_explanation(self) -> dict[str, Any]:
        """Where the prompt's KV came from, where the time to the first token went, and what was decided and why."""
        first_ns = (self.first_ns or self.started_ns) - self.started_ns
        has_queue_time = self.queue_ns is not None
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            **({"inexact_tokens": self.inexact_tokens} if self.inexact_tokens else {}),
            "computed_tokens": self.prompt_tokens - self.cached_tokens - self.inexact_tokens,
            "queue_ms": round(self.queue_ns / NS_PER_MS, 3) if self.queue_ns is not None else None,
            "prefill_ms": round((first_ns - (self.queue_ns or 0)) / NS_PER_MS, 3) if has_queue_time else None,
            "ttft_ms": round(first_ns / NS_PER_MS, 3),
            "total_ms": round((self.now_ns - self.started_ns) / NS_PER_MS, 3),
            "story": self._story_entries(),
        }

    def _story_entries(self) -> list[dict[str, str | int | float]]:
        """The facts in order; with several prompts each names its prompt."""
        return [
            {**({"prompt": prompt_index} if len(self.stories) > 1 else {}), "fact": name, "value": value}
            for prompt_index, facts in enumerate(self.stories)
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
            self._new_sequence(prompt_index, index, tokenizer)
            for prompt_index in range(len(plan.prompts))
            for index in range(plan.sample_count)
        ]
        self.prompt_logprobs: list[tuple[TokenLogprobs | None, ...] | None] = [None] * len(plan.prompts)
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in plan.prompts)
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None if plan.thoughts is Thoughts.NONE else 0
        self.created_s: int | None = None
        """When the answer was asked for first, in seconds since 1970; ``None``: by this call."""
        self.cached_tokens = 0
        """Prompt tokens with KV from the cache."""
        self.inexact_tokens = 0
        """Prompt tokens with KV that was computed behind other tokens; not among the cached ones."""
        self._has_cached = [False] * len(plan.prompts)  # whether that of each prompt is known
        self._story: list[list[tuple[str, str | int | float]]] = [[] for _ in plan.prompts]
        self._unfinished = len(self.sequences)
        self._is_interactive = not any(request.is_deferrable for request in plan.requests)

    def _new_sequence(self, prompt_index: int, index: int, tokenizer: Tokenizer) -> ReplySequence:
        stop = self.plan.requests[prompt_index].stop
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
        return ReplySequence(prompt_index, index, prompt_index * self.plan.n + index, stream, reader=reader)

    @property
    def response_id(self) -> str:
        """The id that the answer carries; empty for a call without prompts."""
        if not self.plan.requests:
            return ""
        return self.plan.requests[0].request_id.rpartition("-")[0].partition("~")[0]  # behind it: of the connection

    @property
    def is_done(self) -> bool:
        return self._unfinished == 0

    def absorb_output(self, call: StreamCall, prompt_index: int, output: TokenOutput | Rejected) -> Delta | None:
        """Take in one piece of news; ``None`` when it adds nothing.

        Raises :class:`ApiError` when the engine refused or gave up the request.
        """
        if isinstance(output, Rejected):
            self._metrics.rejected.value += 1
            raise rejected(output)
        if error := failure(output):
            raise error
        sequence = self.sequences[prompt_index * self.plan.sample_count + output.index]
        if sequence.stream.finish_reason is not None:
            return None
        self._note_first(prompt_index, output)
        return self._advance_sequence(call, sequence, output)

    def drop_logprobs(self, delta: Delta) -> None:
        """Drop the logprobs of ``delta``, which the stream has shown: a long stream would keep megabytes of them."""
        logprobs = delta.sequence.logprobs
        if logprobs:
            logprobs[delta.first : delta.last] = [_SHOWN] * (delta.last - delta.first)

    def _note_first(self, prompt_index: int, output: TokenOutput) -> None:
        if not self._has_cached[prompt_index] and (output.cached_tokens or output.inexact_tokens):
            self._has_cached[prompt_index] = True  # of its sequences each says so
            self.cached_tokens += output.cached_tokens
            self.inexact_tokens += output.inexact_tokens
        for fact in output.story:
            if fact[0] == "created":
                self.created_s = int(fact[1])
            elif fact not in self._story[prompt_index]:  # facts about the whole request come with each sequence
                self._story[prompt_index].append(fact)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt_index] = output.prompt_logprobs
        if self._first_ns is None:
            self._first_ns = time.monotonic_ns()
            self._queue_ns = output.queue_ns
            if self._is_interactive:
                self._metrics.first_token(self._first_ns - self._started_ns, output.queue_ns)

    def _advance_sequence(self, call: StreamCall, sequence: ReplySequence, output: TokenOutput) -> Delta:
        opens = not sequence.stream.tokens
        before = len(sequence.stream.tokens)
        text_delta = sequence.stream.push_output(output)
        token_count = len(sequence.stream.tokens) - before
        logprobs = output.logprobs[:token_count]
        sequence.logprobs.extend(logprobs)
        sequence.logprob_sum += sum(entry.logprob for entry in logprobs)
        text, pieces = text_delta.text, None
        if (reader := sequence.reader) is not None:
            thinks = reader.is_thinking
            pieces = tuple(
                reader.push_text(text) + (reader.flush_pieces() if text_delta.finish_reason is not None else [])
            )
            text = ""
            if self.reasoning_tokens is not None and (thinks or reader.is_thinking):
                self.reasoning_tokens += token_count
            if self.plan.is_keyed:
                self._name_calls(sequence, pieces)
            for piece in pieces:
                if piece.begins and piece.call is not None:
                    call.note_tool(sequence.prompt_index, piece.call.name)
        if not self.plan.stream:
            sequence.texts += [text] if pieces is None else [piece.content for piece in pieces]
            sequence.thoughts += [piece.reasoning for piece in pieces or ()]
        sequence.cumulative_logprob = output.cumulative_logprob
        first, sequence.shown_tokens = sequence.shown_tokens, sequence.shown_tokens + text_delta.tokens_shown
        self._count_tokens(sequence, token_count, opens)
        if text_delta.stop_found:
            call.stop_sequence(sequence.prompt_index, sequence.index)
        if text_delta.finish_reason is not None:
            self._unfinished -= 1
        return Delta(sequence, text, first, sequence.shown_tokens, text_delta.finish_reason, opens, pieces)

    def _name_calls(self, sequence: ReplySequence, pieces: tuple[CallPiece, ...]) -> None:
        """The same call has the same id in every answer with the key."""
        for call in [piece.call for piece in pieces if piece.begins and piece.call is not None]:
            name = f"{self.response_id} {sequence.choice} {call.index}"
            call.call_id = f"call_{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"

    def _count_tokens(self, sequence: ReplySequence, tokens: int, opens: bool) -> None:
        now_ns = time.monotonic_ns()
        if self.plan.generates:
            self.completion_tokens += tokens
            self._metrics.generated_tokens.value += tokens
            if tokens and not opens and self._is_interactive:
                self._metrics.between_tokens.observe((now_ns - sequence.last_ns) / NS_PER_S / tokens)
        sequence.last_ns = now_ns

    def usage_fields(self, completion_tokens: int | None = None) -> dict[str, Any]:
        """The ``usage`` object, with all tokens so far or with those that were shown."""
        generated_tokens = self.completion_tokens if completion_tokens is None else completion_tokens
        thoughts, inexact = self.reasoning_tokens, self.inexact_tokens
        prompt_details = {"cached_tokens": self.cached_tokens} | ({"inexact_tokens": inexact} if inexact else {})
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated_tokens,
            "total_tokens": self.prompt_tokens + generated_tokens,
            "prompt_tokens_details": prompt_details,
            **({} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}}),
        }

    def record_totals(self) -> None:
        """Enter the call's totals into the metrics."""
        now_ns = time.monotonic_ns()
        self._metrics.prompt_tokens.value += self.prompt_tokens
        self._metrics.cached_tokens.value += self.cached_tokens
        if self.plan.requests:
            self._metrics.count_answer(self.plan.requests[0].tenant, self.prompt_tokens, self.completion_tokens)
        if not self._is_interactive:
            return
        self._metrics.whole_request.observe((now_ns - self._started_ns) / NS_PER_S)
        later = self.completion_tokens - len(self.sequences)
        if self._first_ns is not None and later > 0:
            spent_s = (now_ns - self._first_ns) / NS_PER_S
            self._metrics.per_token.observe(spent_s * len(self.sequences) / later)

    def as_explanation(self) -> dict[str, Any]:
        """As of its :class:`Account`."""
        return self.make_account().as_explanation()

    def make_account(self) -> Account:
        """What is told of it as it is now."""
        return Account(
            self.response_id,
            self.plan.stream,
            self.prompt_tokens,
            self.cached_tokens,
            self.inexact_tokens,
            self.completion_tokens,
            tuple([sequence.stream.finish_reason for sequence in self.sequences]),
            self._started_ns,
            time.monotonic_ns(),
            self._first_ns,
            self._queue_ns,
            self._story,
        )

    def best_sequences(self) -> list[ReplySequence]:
        """The sequences to return, in the order of the response's choices."""
        plan, sequences = self.plan, []
        for prompt_index in range(len(plan.prompts)):
            candidates = self.sequences[prompt_index * plan.sample_count : (prompt_index + 1) * plan.sample_count]
            if plan.sample_count > plan.n:
                candidates = sorted(candidates, key=lambda sequence: -sequence.rank)[: plan.n]
            sequences += candidates
        for choice, sequence in enumerate(sequences):
            sequence.choice = choice
        return sequences


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
