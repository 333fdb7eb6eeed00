"""From a checked body to engine requests."""

from __future__ import annotations

import hashlib
import os
import random
import re
import time

import msgspec
import numpy as np
from msgspec import structs

from memserve.api.http.errors import bad_request
from memserve.api.openai.documents import document_handle
from memserve.api.openai.interfaces import ServedModel, sampling_params_of
from memserve.api.openai.kv_hints import KvHintsEnvelope
from memserve.api.openai.request.prompts import Prompt, context_exceeded
from memserve.api.openai.request.schema import AnswerBody, ChatBody, CompletionBody, GenerationBody
from memserve.api.openai.request.structured_output import structure_of
from memserve.api.openai.request.tool_calls import CallPlan
from memserve.api.openai.response.reasoning import Thoughts
from memserve.base.errors import UserError
from memserve.base.types import AS_COMPUTED, COARSE_BITS, Request, SamplingParams, StopParams, TokenArray, salt_of
from memserve.base.units import NS_PER_MS, ns_from_s
from memserve.base.validation import check_request
from memserve.model.loading.lora import Adapter

_seeds = random.Random()
_NUMBERS = tuple(  # by one name here and in the engine; those of the body alone, as `n`, are no part of sampling
    name for name in AnswerBody.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in ("seed", "logit_bias")
)  # fmt: skip
os.register_at_fork(after_in_child=_seeds.seed)

SEQUENCES_MAX = 4096
"""Answers one HTTP request may ask for: prompts times ``n``."""

CACHE_KEY_CHARS_MAX = 200
"""A longer ``prompt_cache_key`` is ignored."""

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat's is the server's

ANSWER_VALUES_MAX = 1 << 18
"""Tokens and logprobs of an answer that are kept until they are sent: about 40 MB."""


class KeptPrefix(msgspec.Struct, frozen=True):
    """The first ``tokens`` of a prompt, whose KV is kept from eviction for ``ttl_ns`` after the answer."""

    tokens: int
    ttl_ns: int


class Generation(msgspec.Struct, frozen=True):
    """What one HTTP request asks for, beyond what the engine needs to know; the answer is written by it."""

    requests: list[Request]
    prompts: list[Prompt]
    stops: tuple[str, ...]
    n: int  # answers per prompt
    sample_count: int  # sequences drawn for them, ``best_of >= n``
    logprobs: int | None  # alternatives to report, if asked for
    echo: bool
    generates: bool  # False: ``max_tokens=0``, only the prompt's own text and logprobs are wanted
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    explain: bool
    session_ttl_ns: int | None = None  # how long the session's KV is kept after the answer
    kv_hints: KvHintsEnvelope | None = None  # what to do with its KV when it has ended
    kept_prefixes: tuple[KeptPrefix, ...] = ()  # of the one prompt, shortest first
    prompt_logprobs: bool = False  # reported beside the answer, in vLLM's form
    token_ids: bool = False  # reported
    names_token_ids: bool = False  # logprobs name tokens by their ids
    logprob_token_ids: tuple[int, ...] = ()  # logprobs report these alone
    continuous_usage: bool = False  # each chunk carries the usage
    model: str = ""  # the name that the answer carries, where that is an adapter's
    ignored: tuple[str, ...] = ()  # fields of the request without effect
    calls: CallPlan | None = None  # of a chat with tools
    thoughts: Thoughts = Thoughts.NONE  # of a chat: how its answers begin
    is_keyed: bool = False  # its client may ask for the answer again: see ``memserve.api.openai.response.idempotency``
    last_event: str | None = None  # of a stream that goes on: the id of the last event that the client has


class Caller(msgspec.Struct, frozen=True):
    """The client of a request, and what it asks: its tenant and the adapter decide which KV may be shared."""

    tenant: str
    explain: bool = False
    adapter: Adapter | None = None
    seed: int | None = None  # of draws where the body names none; None: a new one


def plan_completion(
    body: CompletionBody, prompts: list[Prompt], model: ServedModel, caller: Caller, request_id: str
) -> Generation:
    """The engine requests of ``POST /v1/completions``."""
    echo = bool(body.echo)
    if echo and body.truncate_prompt_tokens is not None:
        raise bad_request("echo and truncate_prompt_tokens exclude each other", "truncate_prompt_tokens")
    if body.document is None:
        prompts = [_truncated(prompt, body, model, body.max_tokens) for prompt in prompts]
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not echo:
        raise bad_request("max_tokens must be at least 1 (0 only together with echo)", "max_tokens")
    n = body.n or 1
    sample_count = body.best_of or n
    if sample_count < n:
        raise bad_request(f"best_of ({sample_count}) must not be less than n ({n})", "best_of")
    if sample_count > n and body.stream:
        raise bad_request("best_of greater than n cannot be streamed: the best are known only at the end", "best_of")
    return _plan(
        body, prompts, model, caller, request_id,
        n=n, sample_count=sample_count, max_tokens=max_tokens, echo=echo, logprobs=body.logprobs,
    )  # fmt: skip


def plan_chat(
    body: ChatBody, prompt: Prompt, model: ServedModel, caller: Caller, request_id: str, calls: CallPlan | None = None
) -> Generation:
    """The engine request of ``POST /v1/chat/completions``."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens
    prompt = _truncated(prompt, body, model, max_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    n = body.n or 1
    return _plan(
        body, [prompt], model, caller, request_id,
        n=n, sample_count=n, max_tokens=max_tokens, echo=bool(body.echo), logprobs=logprobs, calls=calls,
    )  # fmt: skip


def _truncated(prompt: Prompt, body: GenerationBody, model: ServedModel, max_tokens: int | None) -> Prompt:
    """Cut to ``truncate_prompt_tokens``."""
    most = body.truncate_prompt_tokens
    if most is None:
        if body.truncation_side is not None:
            raise bad_request("truncation_side needs truncate_prompt_tokens", "truncation_side")
        return prompt
    if most == -1:
        most = max(1, model.max_model_tokens - max(max_tokens or 1, 1))
    if most == 0:
        raise bad_request("truncate_prompt_tokens must leave a token: give at least 1, or -1", "truncate_prompt_tokens")
    if most > model.max_model_tokens:
        message = f"truncate_prompt_tokens ({most}) is more than the context has ({model.max_model_tokens})"
        raise bad_request(message, "truncate_prompt_tokens")
    tokens = prompt.tokens[:most] if body.truncation_side == "right" else prompt.tokens[-most:]
    return structs.replace(prompt, tokens=np.ascontiguousarray(tokens))


def _check_answer_size(requests: list[Request], logprobs: int | None, *, echo: bool, stream: bool) -> None:
    """Bound what is kept until it is sent: of a stream the prompts' logprobs, else the whole answer."""
    alternatives = 0 if logprobs is None else 1 + logprobs
    value_count = 0
    for request in requests:
        value_count += len(request.prompt) * alternatives if echo else 0
        value_count += 0 if stream else request.n * request.stop.max_tokens * (1 + alternatives)
    if value_count > ANSWER_VALUES_MAX:
        way_out = "ask for fewer tokens, answers or logprobs" + ("" if stream else ', or with "stream": true')
        message = f"the answer may have {value_count} tokens and logprobs; the limit is {ANSWER_VALUES_MAX}: {way_out}"
        raise bad_request(message, "max_tokens")


def _why_inexact(model: ServedModel) -> str:
    """What is rounded here, and by which option; empty: nothing."""
    if model.kv_dtype != AS_COMPUTED:
        return f"KV is rounded to {model.kv_dtype} here (--kv-dtype)"
    if model.kv_lower_dtype != AS_COMPUTED:
        return f"KV may be rounded to {model.kv_lower_dtype} here (--kv-lower-dtype)"
    if model.activation_bits == COARSE_BITS:
        return f"activations are rounded to {COARSE_BITS} bits here (not with --quantization none)"
    return ""


def _plan(
    body: GenerationBody, prompts: list[Prompt], model: ServedModel, caller: Caller, request_id: str, *,
    n: int, sample_count: int, max_tokens: int | None, echo: bool, logprobs: int | None, calls: CallPlan | None = None,
) -> Generation:  # fmt: skip
    if body.exact and (reason := _why_inexact(model)):
        raise bad_request(f"{reason}, so no answer is exact: leave out exact, or ask another server", "exact")
    if body.exact and body.nonprefix_reuse:
        raise bad_request("exact and nonprefix_reuse exclude each other", "nonprefix_reuse")
    if body.nonprefix_reuse and body.stream and len(prompts) > 1:  # the header comes before the last of them
        raise bad_request("nonprefix_reuse and a stream of several prompts exclude each other", "nonprefix_reuse")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    _check_logprobs(body, logprobs, generates=max_tokens != 0)
    if len(prompts) * sample_count > SEQUENCES_MAX:
        raise bad_request(f"{len(prompts)} prompts times {sample_count} answers exceed {SEQUENCES_MAX} sequences", "n")
    options = body.stream_options
    echoes_logprobs = echo and logprobs is not None and isinstance(body, CompletionBody)
    sampling = _sampling(
        body, model, caller,
        rank=sample_count > n, logprobs=logprobs, prompt_logprobs=echoes_logprobs, calls=calls,
    )  # fmt: skip
    stops = [_stop(body, model, _answer_tokens(body, prompt, max_tokens, model)) for prompt in prompts]
    requests = _requests(
        body, prompts, stops, sampling, caller, request_id, model,
        sample_count=sample_count, beam_width=_beam_width(body, n),
    )  # fmt: skip
    for request in requests:
        _check(request, model)
    alternatives = max(logprobs or 0, body.prompt_logprobs or 0, len(body.logprob_token_ids or ()))
    answer_alternatives = None if logprobs is None and body.prompt_logprobs is None else alternatives
    _check_answer_size(requests, answer_alternatives, echo=sampling.prompt_logprobs, stream=bool(body.stream))
    return Generation(
        requests=requests,
        prompts=prompts,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        n=n,
        sample_count=sample_count,
        logprobs=logprobs,
        echo=echo,
        generates=max_tokens != 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        explain=caller.explain or bool(body.explain),
        session_ttl_ns=_session_ttl_ns(body),
        kv_hints=body.kv_hints,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        names_token_ids=bool(body.return_tokens_as_token_ids),
        logprob_token_ids=sampling.logprob_token_ids,
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        model=caller.adapter.name if caller.adapter is not None else "",
        calls=calls,
    )


def _requests(
    body: GenerationBody, prompts: list[Prompt], stops: list[StopParams], sampling: SamplingParams, caller: Caller,
    request_id: str, model: ServedModel, *, sample_count: int, beam_width: int,
) -> list[Request]:  # fmt: skip
    """One for each prompt."""
    own_salt, adapter = digest_salt(body.cache_salt), caller.adapter.digest if caller.adapter is not None else ""
    salts = [salt_of(own_salt, adapter, model.position_regimes.regime_of(len(prompt.tokens))) for prompt in prompts]
    deadline_ns = time.monotonic_ns() + ns_from_s(body.timeout_s) if body.timeout_s else None
    return [
        Request(
            request_id=f"{request_id}-{index}",
            prompt=prompt.tokens,
            sampling=sampling,
            stop=stop,
            n=sample_count,
            beam_width=beam_width,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            tenant=caller.tenant,
            priority=body.priority or 0,
            deadline_ns=deadline_ns,
            use_cache=body.use_cache is not False,
            session=_session(body, salt),
            salt=salt,
            slo_ttft_ns=_ns_of_ms(body.slo_ttft_ms),
            slo_tpot_ns=_ns_of_ms(body.slo_tpot_ms),
            nonprefix_reuse=bool(body.nonprefix_reuse),
        )
        for index, (prompt, stop, salt) in enumerate(zip(prompts, stops, salts, strict=True))
    ]


def _check_logprobs(body: GenerationBody, logprobs: int | None, *, generates: bool) -> None:
    """Raises :class:`ApiError` 400 for logprobs that nothing would report."""
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs are reported with the whole answer: not with stream", "prompt_logprobs")
    if not body.logprob_token_ids:
        return
    if logprobs is None:
        raise bad_request("logprob_token_ids needs logprobs", "logprob_token_ids")
    if body.use_beam_search or not generates:
        why = "beam search" if body.use_beam_search else "max_tokens 0"
        raise bad_request(f"logprob_token_ids and {why} exclude each other", "logprob_token_ids")


def _ns_of_ms(ms: float | None) -> int | None:
    return None if ms is None else max(1, round(ms * NS_PER_MS))


def _check(request: Request, model: ServedModel) -> None:
    try:
        check_request(request, model.vocab_size)
    except UserError as error:
        raise bad_request(error.message, error.param) from None


_SESSION = re.compile(r"(?:salted:[0-9a-z-]+:)?session:(.*)", re.DOTALL)


def digest_salt(cache_salt: str | None) -> str:
    """A digest of the salt: of a fixed size, and the client's own text goes no further."""
    if cache_salt is None:
        return ""
    return hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _session(body: GenerationBody, salt: str) -> str:
    """The name by which a cluster keeps requests together: the session's, else the document's, else OpenAI's key."""
    return _salted(_session_name(body), salt)


def session_handle(session: str, salt: str) -> str:
    """The name of a session among the prefixes that are kept; ``salt`` as :func:`salt_of` gives it."""
    return _salted(f"session:{session}", salt)


def _salted(name: str, salt: str) -> str:
    return f"salted:{salt}:{name}" if name and salt else name


def _session_name(body: GenerationBody) -> str:
    if body.session is not None and body.session_id is not None and body.session != body.session_id:
        raise bad_request("session and session_id name one session and must not differ", "session_id")
    session = body.session or body.session_id
    if session is None and body.document is not None:
        return document_handle(body.document)
    if session is None and body.prompt_cache_key and len(body.prompt_cache_key) <= CACHE_KEY_CHARS_MAX:
        return f"key:{body.prompt_cache_key}"
    return "" if session is None else f"session:{session}"


def prefix_handle(tokens: TokenArray, salt: str) -> str:
    """The name under which the KV of a prefix without a name of its own is kept."""
    digest = hashlib.blake2b(salt.encode() + b"\0" + tokens.tobytes(), digest_size=16).hexdigest()
    return f"prefix:{digest}"


def session_of(handle: str) -> str | None:
    """The session's name in the handle of its prefix; ``None``: the prefix is not a session's."""
    match = _SESSION.fullmatch(handle)
    return match.group(1) if match is not None else None


def _session_ttl_ns(body: GenerationBody) -> int | None:
    if body.session_ttl_s is None:
        return None
    if body.session is None and body.session_id is None:
        raise bad_request("session_ttl_s needs a session", "session_ttl_s")
    return ns_from_s(body.session_ttl_s)


def _beam_width(body: GenerationBody, n: int) -> int:
    """0 without beam search; the width defaults to ``n``, as in vLLM."""
    if not body.use_beam_search:
        if body.beam_width is not None or body.length_penalty is not None:
            param = "beam_width" if body.beam_width is not None else "length_penalty"
            raise bad_request(f"{param} needs use_beam_search to be true", param)
        return 0
    width = body.beam_width or n
    if width < n:
        raise bad_request(f"beam_width ({width}) must not be less than n ({n})", "beam_width")
    if isinstance(body, CompletionBody) and body.best_of and body.best_of != n:
        raise bad_request("best_of and use_beam_search exclude each other: set beam_width", "best_of")
    return width


def _answer_tokens(body: GenerationBody, prompt: Prompt, max_tokens: int | None, model: ServedModel) -> int:
    """How many tokens the answer may have. Raises :class:`ApiError` 400 when it does not fit the context."""
    prompt_tokens, limit_tokens = len(prompt.tokens), model.max_model_tokens
    if max_tokens is None:
        if prompt_tokens >= limit_tokens:
            raise context_exceeded(model, f"{prompt_tokens} tokens in the prompt, and an answer needs one")
        room = limit_tokens - prompt_tokens
        return min(room, max(model.default_max_tokens or room, body.min_tokens or 0))
    answer_tokens = max(max_tokens, 1)  # echo alone still computes the prompt, which draws one token
    if prompt_tokens + answer_tokens > limit_tokens:
        total = prompt_tokens + answer_tokens
        raise context_exceeded(
            model, f"{total} tokens ({prompt_tokens} in the prompt, {answer_tokens} in the completion)"
        )
    return answer_tokens


def _stop(body: GenerationBody, model: ServedModel, max_tokens: int) -> StopParams:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})", "min_tokens")
    ends = () if body.ignore_eos else tuple(model.eos_token_ids)
    return StopParams(max_tokens, min_tokens, tuple(dict.fromkeys((*ends, *(body.stop_token_ids or ())))))


def _sampling(
    body: GenerationBody, model: ServedModel, caller: Caller, *,
    rank: bool, logprobs: int | None, prompt_logprobs: bool, calls: CallPlan | None,
) -> SamplingParams:  # fmt: skip
    own_seed = _seeds.getrandbits(63) if caller.seed is None else caller.seed
    return sampling_params_of(
        model,
        {name: getattr(body, name) for name in _NUMBERS},
        seed=own_seed if body.seed is None else body.seed % (1 << 63),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=0 if rank and logprobs is None else logprobs,  # best_of ranks by the drawn tokens' logprobs
        prompt_logprobs=prompt_logprobs or body.prompt_logprobs is not None,
        prompt_top_logprobs=_larger(body.prompt_logprobs, logprobs if prompt_logprobs else None),
        logprob_token_ids=tuple(body.logprob_token_ids or ()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        grammar=structure_of(body, calls),
    )


def _larger(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else max(first, second)


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    bad = [key for key in bias if not (key.isascii() and key.isdecimal() and len(key) <= 10)]
    if bad:
        names = ", ".join(repr(key[:20]) for key in bad[:8])
        raise bad_request(f"logit_bias: not a token id: {names}", "logit_bias")
    return tuple((int(key), value) for key, value in bias.items())
