"""What :class:`memserve.LLM` gives back, and a call of it while its sequences run.

``memserve.LLM``: a model in this process, without a server.
"""

from __future__ import annotations

import itertools
import math
import queue
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from msgspec import structs
from tokenizers import Tokenizer

from memserve.api.http.errors import ApiError
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.request.messages import check_messages
from memserve.api.openai.request.plan import Caller, Generation, plan_chat, plan_completion
from memserve.api.openai.request.prompts import Prompt as EncodedPrompt
from memserve.api.openai.request.prompts import PromptEncoder
from memserve.api.openai.request.schema import ChatBody, CompletionBody, body_of
from memserve.api.openai.response.detokenizer import Stops, TextStream
from memserve.base.config import DEFAULT_MODEL, EngineOptions
from memserve.base.deployment import refuse_store
from memserve.base.errors import UserError
from memserve.base.options import from_keywords, unknown_name
from memserve.base.types import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from memserve.host.build import build_engine
from memserve.host.engine import Engine, Refusal, Rejected
from memserve.host.stats import EngineStats
from memserve.model.loading.lora import Adapter, read_adapter, read_adapters
from memserve.protocol.messages import AdapterFiles
from memserve.system.memory import no_collections

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
    inexact_tokens: int = 0
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


class LlmCall:
    """Collects what the engine thread delivers until every sequence has ended.

    A full queue is no error here: a rejected request is submitted again once another of this call ends, or soon.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, plans: Sequence[Generation]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._skip_special_tokens = all(plan.skip_special_tokens for plan in plans)
        self._stops = Stops(plans[0].stops) if plans and plans[0].stops else None
        self._outputs: queue.SimpleQueue[tuple[int, TokenOutput | Rejected]] = queue.SimpleQueue()
        self._results: dict[str, Completion] = {}
        self._requests: dict[str, Request] = {}
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._waiting: deque[str] = deque()
        self._running = 0

    def add_request(self, request: Request) -> None:
        """One request, to be run by :meth:`wait_for_results`."""
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

    def wait_for_results(self, on_progress: Callable[[], None] | None) -> list[Completion]:
        """Run everything to its end. Whatever is raised, Ctrl-C included, cancels what still runs."""
        try:
            self._submit_waiting()
            while self._running or self._waiting:
                try:
                    self._take_output(*self._outputs.get(timeout=None if self._running else BUSY_WAIT_S))
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
            self._engine.submit(request, lambda update: self._outputs.put((time.perf_counter_ns(), update)))

    def _take_output(self, received_ns: int, update: TokenOutput | Rejected) -> None:
        if isinstance(update, Rejected):
            self._handle_rejection(update)
            return
        result = self._results[update.request_id]
        if not result.first_token_ns:
            result.first_token_ns = received_ns
        result.finished_ns = received_ns
        result.cached_tokens = max(result.cached_tokens, update.cached_tokens)
        result.inexact_tokens = max(result.inexact_tokens, update.inexact_tokens)
        output = result.outputs[update.index]
        if output.finish_reason is None:
            self._extend_output(output, update)
        if update.finish_reason is not None:
            self._running -= 1
            if not self._running:
                self._submit_waiting()

    def _handle_rejection(self, rejection: Rejected) -> None:
        if rejection.refusal is Refusal.CLOSING:
            raise UserError("this LLM was closed, or its engine broke", hint="the log says why; make another one")
        if rejection.retry_after_s is None:
            raise UserError(f"the engine rejected a prompt: {rejection.reason}")
        self._running -= self._requests[rejection.request_id].n
        self._waiting.append(rejection.request_id)

    def _extend_output(self, output: Generated, update: TokenOutput) -> None:
        delta = self._texts[update.request_id, update.index].push_output(update)
        output.tokens.extend(update.tokens)
        output.logprobs.extend(update.logprobs)
        output.cumulative_logprob = update.cumulative_logprob
        output.text += delta.text
        output.finish_reason, output.error = delta.finish_reason, update.error
        if delta.stop_found:
            self._engine.stop_sequence(update.request_id, update.index)


ELSEWHERE = ("logit_bias", "prompt_logprobs", "prompt_top_logprobs", "grammar")
"""Fields of ``SamplingParams`` that the HTTP API does not have, or has in another form."""

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class SamplingOptions(TypedDict, total=False):
    """Keywords of :meth:`LLM.generate` and :meth:`LLM.chat`: the fields of the HTTP API, with its ranges and defaults.

    If left out, ``temperature``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` are what the model's
    ``generation_config.json`` recommends, and ``seed`` is 0, so that a call repeats exactly.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    logprobs: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    n: int
    beam_width: int
    length_penalty: float
    priority: int
    timeout_s: float
    slo_ttft_ms: float
    slo_tpot_ms: float
    use_cache: bool
    exact: bool
    nonprefix_reuse: bool
    cache_salt: str
    adapter: str


class ChatOptions(SamplingOptions, total=False):
    """Keywords of :meth:`LLM.chat` only."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]


class LLM:
    """Loads a model and generates, in process, with the engine and the checks of ``memserve serve``.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0).text)

    ``options`` are those of ``memserve serve``, named as the fields of :class:`memserve.base.config.EngineOptions` and
    its scheduler (``max_running=8``), as the flags (``kv_memory="512MiB"``), or as in vLLM (``max_num_seqs=8``). None:
    the default. Raises :class:`UserError` on anything that cannot be served. Every method may be called from any
    thread. Memory and threads are given back by :meth:`close`, at the end of ``with``, or when the object is collected.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        refuse_store(options)
        engine_options = from_keywords(EngineOptions(model=model), options)
        with no_collections():
            self._engine, self.model = build_engine(engine_options)
        self._names = ModelNames(self.model.name, adapters=read_adapters(engine_options.lora))
        self._free = weakref.finalize(self, self._engine.close)
        self._encoder = PromptEncoder(self.model)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | None = None,
        *,
        tenant: str = "",
        on_progress: Callable[[], None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Generate for every prompt (text, or token ids), all batched together; answers in the prompts' order.

        ``options``: see :class:`SamplingOptions`; ``sampling`` replaces all of them up to ``logprobs``. Without
        ``max_tokens`` an answer has at most 16 tokens. ``beam_width`` above 0 is a beam search. ``on_progress`` is
        called in this thread after each new output. ``adapter``: the name of a LoRA adapter.
        Raises :class:`UserError`, before anything is computed, when one of the prompts or options is wrong, for example
        a prompt that is longer than the context.
        """
        self._require_open()
        fields, caller = self._request_fields(options, sampling, SamplingOptions, tenant)
        with _user_errors():
            body = body_of({"model": self.model.name, "prompt": "", **fields}, CompletionBody)
            plans = [
                plan_completion(body, self._encode_prompt(prompt), self.model, caller, self._new_id())
                for prompt in _as_list(prompts)
            ]
        return self._run_plans(plans, sampling, on_progress)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        tenant: str = "",
        on_progress: Callable[[], None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """Answer a conversation, with the model's chat template; otherwise as :meth:`generate`.

        Without ``max_tokens`` an answer has at most 1,024 tokens, or as many as the context has room for.
        """
        self._require_open()
        fields, caller = self._request_fields(options, sampling, ChatOptions, tenant)
        if (alternatives := fields.pop("logprobs", None)) is not None:
            fields |= {"logprobs": True, "top_logprobs": alternatives}
        with _user_errors():
            body = body_of({"model": self.model.name, "messages": _plain(messages), **fields}, ChatBody)
            prompt = self._encoder.chat_prompt(body, check_messages(body.messages))
            plan = plan_chat(body, prompt, self.model, caller, self._new_id())
        return self._run_plans([plan], sampling, on_progress)[0]

    def load_adapter(self, name: str, folder: str) -> None:
        """Have the LoRA adapter in ``folder`` ready as ``adapter=name``; where that name leads elsewhere, it leads here
        from then on. Needs ``LLM(lora_folder=...)``. Raises :class:`UserError`."""
        self._require_open()
        adapter = read_adapter(name, Path(folder))
        if self._names.is_model(name):
            raise UserError(f"{name!r} is a name of the model itself", hint="use another one", param="adapter")
        answer = self._engine.load_adapter(AdapterFiles(name, folder, adapter.digest)).result()
        if answer.error:
            raise UserError(answer.error, param="adapter")
        self._names.put_adapter(adapter)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that was loaded so; what runs with it goes on. Raises :class:`UserError`."""
        self._require_open()
        adapter = self._find_adapter(name)
        self._names.remove_adapter(adapter)
        self._engine.unload_adapter(adapter.name).result()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, as the model was trained to see them."""
        return list(self._encoder.tokenizer.encode(text).ids)

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        self._require_open()
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine and give its memory back; calls in other threads end with an error. May be called twice."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _request_fields(
        self, options: Mapping[str, Any], sampling: SamplingParams | None, kind: type, tenant: str
    ) -> tuple[dict[str, Any], Caller]:
        """The fields of the HTTP API that a caller asks for, and the caller itself."""
        fields, caller = _fields(options, sampling, kind), _caller(tenant)
        name = fields.pop("adapter", None)
        if name is None:
            return fields, caller
        return fields, structs.replace(caller, adapter=self._find_adapter(str(name)))

    def _find_adapter(self, name: str) -> Adapter:
        adapter = self._names.find_adapter(name)
        if adapter is None:
            hint = "LLM(lora=['NAME=FOLDER'])"
            raise UserError(f"no adapter is named {name[:80]!r}", hint=hint, param="adapter")
        return adapter

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _encode_prompt(self, prompt: Prompt) -> list[EncodedPrompt]:
        tokens = prompt if isinstance(prompt, str) else _plain(prompt)
        return self._encoder.completion_prompts(tokens, add_special_tokens=True, echo=False)

    def _require_open(self) -> None:
        if not self._free.alive:
            raise UserError("this LLM is closed", hint="make another one")

    def _run_plans(
        self, plans: Sequence[Generation], sampling: SamplingParams | None, on_progress: Callable[[], None] | None
    ) -> list[Completion]:
        call = LlmCall(self._engine, self._encoder.tokenizer, plans)
        for plan in plans:
            (request,) = plan.requests
            if sampling is not None and (more := {name: getattr(sampling, name) for name in ELSEWHERE[1:]}):
                request = structs.replace(request, sampling=structs.replace(request.sampling, **more))
            call.add_request(request)
        return call.wait_for_results(on_progress)


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, becomes a list of one. Raises :class:`UserError` for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise UserError(f"prompts of type {type(prompts).__name__}", hint="give a text, token ids, or a list of those")
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], (int, np.integer)) else items


def _caller(tenant: str) -> Caller:
    if not isinstance(tenant, str):
        raise UserError(f"tenant must be a text, got {type(tenant).__name__}", param="tenant")
    return Caller(tenant)


def _fields(options: Mapping[str, Any], sampling: SamplingParams | None, kind: type) -> dict[str, Any]:
    """The fields of the HTTP API that a caller asks for. Raises :class:`UserError` for any other."""
    known_names = (
        kind.__annotations__ if kind is SamplingOptions else SamplingOptions.__annotations__ | kind.__annotations__
    )
    if unknown := [name for name in options if name not in known_names]:
        raise unknown_name(unknown[0], known_names)
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise UserError(
            f"sampling is a {type(sampling).__name__}", hint="give keywords (temperature=0) or SamplingParams(...)"
        )
    fields = {name: _plain(value) for name, value in options.items() if value is not None}
    if sampling is not None:
        sampling_fields = {name: value for name, value in structs.asdict(sampling).items() if name not in ELSEWHERE}
        if twice := sorted({*sampling_fields, *ELSEWHERE} & fields.keys()):
            raise UserError(f"{twice[0]} is given twice", hint="as a keyword or in sampling, not both", param=twice[0])
        fields |= {name: _plain(value) for name, value in sampling_fields.items() if value not in (None, ())}
        fields["logit_bias"] = _bias_of(sampling)
    fields.setdefault("seed", 0)
    if fields.get("beam_width"):
        fields["use_beam_search"] = True
    else:
        fields.pop("beam_width", None)
        fields.pop("length_penalty", None)
    return fields


def _bias_of(sampling: SamplingParams) -> dict[str, float]:
    """``logit_bias`` may be a mapping or a sequence of pairs."""
    try:
        return {str(token): _plain(bias) for token, bias in dict(sampling.logit_bias).items()}
    except (TypeError, ValueError):
        raise UserError("logit_bias must be a mapping", hint="for example {1234: -100}", param="logit_bias") from None


def _plain(value: Any) -> Any:
    """``value`` in JSON's types: converts numpy's numbers and arrays, tuples and mappings."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"cannot sample with {value}", hint="give a finite number")
    return value


@contextmanager
def _user_errors() -> Iterator[None]:
    """Errors that the HTTP API would answer with a status become :class:`UserError`."""
    try:
        yield
    except ApiError as error:
        raise UserError(error.message, param=error.param) from None
