"""``memserve.LLM``: a model in this very process, without a server (level 4)."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from memserve.api.served import chosen_sampling
from memserve.config import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, EngineOptions
from memserve.errors import UserError
from memserve.runtime.build import build_engine
from memserve.runtime.engine import Rejected
from memserve.runtime.stats import EngineStats
from memserve.runtime.text import Stops, TextStream
from memserve.types import FinishReason, Request, SamplingParams, StopParams, TokenLogprobs, TokenOutput
from memserve.units import parse_bytes
from memserve.validation import check_request, token_array

Prompt = str | Sequence[int]
Message = dict[str, str]


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
    """With ``finish_reason`` ERROR: what failed, when it was this sequence alone."""


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


class LLM:
    """Loads a model and generates, in process; the same engine as ``memserve serve``.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)

    ``options`` are the fields of :class:`memserve.config.EngineOptions`; ``kv_memory="512MiB"`` and
    ``dram_memory="4GiB"`` are accepted as well. Raises :class:`UserError` on anything that cannot be served.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        kv_memory: str | int | None = None,
        dram_memory: str | int | None = None,
        **options: Any,
    ) -> None:
        if kv_memory is not None:
            options["kv_memory_bytes"] = parse_bytes(kv_memory)
        if dram_memory is not None:
            options["dram_memory_bytes"] = parse_bytes(dram_memory)
        self._engine, self.model = build_engine(EngineOptions(model=model, **options))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = 16,
        min_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        n: int = 1,
        beam_width: int = 0,
        length_penalty: float = 1.0,
        tenant: str = "",
        use_cache: bool = True,
        on_progress: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """Generate for every prompt (text, or token ids), all batched together; answers in the prompts' order.

        ``sampling`` defaults to what the model's authors recommend, with seed 0: a call repeats exactly.
        ``on_progress`` is called in this thread after each piece of news.
        Raises :class:`UserError`, before anything runs, for token ids that the model does not have and for sampling out
        of range; later when the engine rejects a prompt (for example one beyond the context).
        """
        ends = () if ignore_eos else tuple(self.model.eos_token_ids)
        stops = StopParams(max_tokens, min_tokens, (*ends, *stop_token_ids))
        requests = [
            Request(
                request_id=f"llm-{next(self._ids)}",
                prompt=token_array(self._tokens(prompt), self.model.vocab_size),
                sampling=sampling or chosen_sampling(self.model, {}),
                stop=stops,
                n=n,
                beam_width=beam_width,
                length_penalty=length_penalty,
                tenant=tenant,
                use_cache=use_cache,
            )
            for prompt in self._as_list(prompts)
        ]
        for request in requests:
            check_request(request, self.model.vocab_size)
        call = _Call(self, tuple(stop))
        for request in requests:
            call.submit(request)
        return call.wait(on_progress)

    def chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None, **kwargs: Any) -> Completion:
        """Answer a conversation, through the model's chat template; keywords as in :meth:`generate`.

        ``max_tokens`` defaults to 1,024, or what the context has room for."""
        tokens = self.model.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return self.generate([list(tokens)], sampling, **{"max_tokens": DEFAULT_MAX_TOKENS, **kwargs})[0]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, as the model was trained to see them."""
        return list(self.model.tokenizer(text)["input_ids"])

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine and give its memory back. May be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenize(prompt) if isinstance(prompt, str) else prompt

    @staticmethod
    def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
        """One prompt, as text or as token ids, becomes a list of one."""
        if isinstance(prompts, str):
            return [prompts]
        items: list[Any] = list(prompts)
        return [items] if items and isinstance(items[0], (int, np.integer)) else items


class _Call:
    """One call of ``generate``: collects what the engine thread delivers until every sequence has ended."""

    def __init__(self, llm: LLM, stop: tuple[str, ...]) -> None:
        self._engine = llm._engine
        self._tokenizer = llm.model.tokenizer.backend_tokenizer
        self._stops = Stops(stop)
        self._news: queue.SimpleQueue[tuple[int, TokenOutput | Rejected]] = queue.SimpleQueue()
        self._results: dict[str, Completion] = {}
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._running = 0

    def submit(self, request: Request) -> None:
        """Give one request to the engine."""
        outputs = [Generated(index) for index in range(request.n)]
        for index in range(request.n):
            self._texts[request.request_id, index] = TextStream(
                self._tokenizer,
                stops=self._stops,
                stop_token_ids=request.stop.stop_token_ids,
                min_tokens=request.stop.min_tokens,
            )
        result = Completion(request.prompt.tolist(), outputs, submitted_ns=time.perf_counter_ns())
        self._results[request.request_id] = result
        self._running += request.n
        self._engine.submit(request, lambda news: self._news.put((time.perf_counter_ns(), news)))

    def wait(self, on_progress: Callable[[], None] | None) -> list[Completion]:
        """Block until everything has ended. Ctrl-C cancels what still runs."""
        try:
            while self._running:
                self._take(*self._news.get())
                if on_progress is not None:
                    on_progress()
        except BaseException:
            for request_id in self._results:
                self._engine.cancel(request_id)
            raise
        return list(self._results.values())

    def _take(self, when_ns: int, news: TokenOutput | Rejected) -> None:
        if isinstance(news, Rejected):
            raise UserError(f"the engine rejected a prompt: {news.reason}")
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

    def _extend(self, output: Generated, news: TokenOutput) -> None:
        delta = self._texts[news.request_id, news.index].push(news)
        output.tokens.extend(news.tokens)
        output.logprobs.extend(news.logprobs)
        output.cumulative_logprob = news.cumulative_logprob
        output.text += delta.text
        output.finish_reason, output.error = delta.finish_reason, news.error
        if delta.stop_found:
            self._engine.stop_sequence(news.request_id, news.index)
