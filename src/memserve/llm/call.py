"""What :class:`memserve.LLM` gives back, and a call of it while its sequences run."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from memserve.api.plan import Generation
from memserve.errors import UserError
from memserve.runtime.engine import Engine, Refusal, Rejected
from memserve.runtime.text import Stops, TextStream
from memserve.types import FinishReason, Request, TokenLogprobs, TokenOutput

BUSY_WAIT_S = 0.05
"""How long a call without a running request waits before it submits to a full engine again."""


@dataclass(slots=True)
class Generated:
    """One generated sequence."""

    index: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    error: str = ""
    """With ``finish_reason`` ERROR: what failed, if it was this sequence alone."""


@dataclass(slots=True)
class Completion:
    """The answer to one prompt: ``n`` sequences, where its KV came from, and when things happened."""

    prompt_tokens: list[int]
    outputs: list[Generated]
    cached_tokens: int = 0
    submitted_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.outputs[0].text

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token."""
        return (self.first_token_ns - self.submitted_ns) / 1e9


class Call:
    """Collects what the engine thread delivers until every sequence has ended.

    A full queue is no error here: a rejected request is submitted again once another of this call ends, or soon.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, plans: Sequence[Generation]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._skip_special_tokens = all(plan.skip_special_tokens for plan in plans)
        self._stops = Stops(plans[0].stops) if plans and plans[0].stops else None
        self._news: queue.SimpleQueue[tuple[int, TokenOutput | Rejected]] = queue.SimpleQueue()
        self._results: dict[str, Completion] = {}
        self._requests: dict[str, Request] = {}
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._waiting: deque[str] = deque()
        self._running = 0

    def add(self, request: Request) -> None:
        """One request, to be run by :meth:`wait`."""
        name = request.request_id
        for index in range(request.n):
            self._texts[name, index] = TextStream(
                self._tokenizer,
                stops=self._stops,
                stop_token_ids=request.stop.stop_token_ids,
                min_tokens=request.stop.min_tokens,
                skip_special_tokens=self._skip_special_tokens,
            )
        outputs = [Generated(index) for index in range(request.n)]
        self._results[name] = Completion(request.prompt.tolist(), outputs, submitted_ns=time.perf_counter_ns())
        self._requests[name] = request
        self._waiting.append(name)

    def wait(self, on_progress: Callable[[], None] | None) -> list[Completion]:
        """Run everything to its end. Whatever is raised, Ctrl-C included, cancels what still runs."""
        try:
            self._submit_waiting()
            while self._running or self._waiting:
                try:
                    self._take(*self._news.get(timeout=None if self._running else BUSY_WAIT_S))
                except queue.Empty:
                    self._submit_waiting()
                    continue
                if on_progress is not None:
                    on_progress()
        except BaseException:
            for request_id in self._results:
                self._engine.cancel(request_id)
            raise
        return list(self._results.values())

    def _submit_waiting(self) -> None:
        while self._waiting:
            request = self._requests[self._waiting.popleft()]
            self._running += request.n
            self._engine.submit(request, lambda news: self._news.put((time.perf_counter_ns(), news)))

    def _take(self, when_ns: int, news: TokenOutput | Rejected) -> None:
        if isinstance(news, Rejected):
            self._refused(news)
            return
        result = self._results[news.request_id]
        if not result.first_token_ns:
            result.first_token_ns = when_ns
        result.finished_ns = when_ns
        result.cached_tokens = max(result.cached_tokens, news.cached_tokens)
        output = result.outputs[news.index]
        if output.finish_reason is None:
            self._extend(output, news)
        if news.finish_reason is not None:
            self._running -= 1
            if not self._running:
                self._submit_waiting()

    def _refused(self, news: Rejected) -> None:
        if news.refusal is Refusal.CLOSING:
            raise UserError("this LLM was closed, or its engine broke", hint="the log says why; make another one")
        if news.retry_after_s is None:
            raise UserError(f"the engine rejected a prompt: {news.reason}")
        self._running -= self._requests[news.request_id].n
        self._waiting.append(news.request_id)

    def _extend(self, output: Generated, news: TokenOutput) -> None:
        delta = self._texts[news.request_id, news.index].push(news)
        output.tokens.extend(news.tokens)
        output.logprobs.extend(news.logprobs)
        output.cumulative_logprob = news.cumulative_logprob
        output.text += delta.text
        output.finish_reason, output.error = delta.finish_reason, news.error
        if delta.stop_found:
            self._engine.stop_sequence(news.request_id, news.index)
