"""How each kind of engine is asked for an answer in tokens, and how its stream is read: for engines that are members.

::

    vllm       POST /v1/completions   token ids in and out (return_token_ids), logprobs by token id
    sglang     POST /generate         input_ids, output_ids
    llamacpp   POST /completion       prompt as ids, tokens (return_tokens)

A request is one call for each of its sequences. What an API has no word for is refused, and runs elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from memserve.api.http.client import HttpFault
from memserve.base.types import VOCAB_MAX, Request, TokenLogprobs
from memserve.base.units import MIB
from memserve.fleet.messages import EngineKind

EVENT_BYTES_MAX = 64 * MIB
"""Of one event of a stream: vLLM's first one repeats the prompt's ids."""
_SEED_MAX = 1 << 31
_encode = msgspec.json.Encoder().encode


class SequenceCall(NamedTuple):
    """What is asked of an engine: to go on with one sequence of a request."""

    request: Request
    sequence_index: int
    """Which of the request's sequences."""
    generated: tuple[int, ...]
    """Its tokens so far: the engine has them as the end of its prompt."""
    max_tokens: int
    """Of the sequence: what is asked for, or what the engine's context has room for."""
    model: str
    """The engine's own name of the model."""

    @property
    def prompt(self) -> list[int]:
        return [*self.request.prompt.tolist(), *self.generated]

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.generated)

    @property
    def tokens_least(self) -> int:
        return max(0, self.request.stop.min_tokens - len(self.generated))

    @property
    def seed(self) -> int:
        """Another one for each sequence and each place where it goes on: the same would draw the same again."""
        return (self.request.sampling.seed * 1_000_003 + self.sequence_index * 8_191 + len(self.generated)) % _SEED_MAX

    @property
    def cache_salt(self) -> str:
        """KV is shared only between calls with the same salt; empty: with all that have none."""
        request = self.request
        alone = f"\x1f{request.request_id}/{self.sequence_index}/{len(self.generated)}"  # no tenant has such a name
        return request.isolation if request.use_cache else alone


class AnswerPiece(NamedTuple):
    """A part of a stream."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    """One a token, if asked for."""
    finish: str = ""
    """``stop`` or ``length``: the sequence has ended, as the engine sees it."""
    cached_tokens: int | None = None
    """Of the prompt, what the engine had cached, where it says so."""


END_OF_STREAM = b""
"""In place of an event: no more will come."""

ReadEvent = Callable[[bytes], AnswerPiece | None]
"""The data of one event of a stream; None: it says nothing of the answer. Raises :class:`HttpFault`."""


class Dialect(Protocol):
    """One kind of engine."""

    path: str
    tokenize_path: str

    def refusal(self, call: SequenceCall) -> str:
        """Why the engine cannot be asked for this; empty: it can."""

    def body(self, call: SequenceCall) -> bytes:
        """The request, as JSON."""

    def reader(self, call: SequenceCall) -> ReadEvent:
        """For the stream that answers it."""

    def tokenize_body(self, text: str, model: str) -> bytes:
        """Asks for the ids of ``text``, in which names of special tokens are those, and nothing is put before it."""


def dialect_of(kind: EngineKind) -> Dialect | None:
    """None: such an engine does not speak in tokens."""
    return _DIALECTS.get(kind)


async def event_data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a stream, without ``[DONE]``. Raises :class:`HttpFault` for what is no such stream."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            for line in event.splitlines():
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield line[5:].strip()
                elif line.startswith(b"error:"):  # llama.cpp's
                    raise HttpFault(f"its stream has an error: {line[6:].strip()[:200].decode('utf-8', 'replace')}")
        if len(buffer) > EVENT_BYTES_MAX:
            raise HttpFault("an event of its stream never ends")
    if buffer.strip():
        raise HttpFault("its stream ended in the middle of an event")


def read_object(data: bytes) -> dict[str, Any]:
    """The object in ``data``. Raises :class:`HttpFault` for none, and for an error."""
    try:
        event: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise HttpFault("an event of its stream is no JSON object") from None
    if event.get("error"):
        raise HttpFault(f"its stream has an error: {str(event['error'])[:200]}")
    return event


def checked_tokens(tokens: Any) -> tuple[int, ...]:
    """``tokens``, if they can be ids. Raises :class:`HttpFault`."""
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < VOCAB_MAX for token in tokens):
        raise HttpFault("it answers without token ids")
    return tuple(tokens)


def _logprob(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else -9999.0


def _sampling_fields(call: SequenceCall) -> dict[str, Any]:
    """What all three call the same."""
    sampling = call.request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def _token_fields(call: SequenceCall) -> dict[str, Any]:
    """What vLLM and SGLang, which has it from vLLM, call the same besides."""
    fields: dict[str, Any] = {
        "repetition_penalty": call.request.sampling.repetition_penalty,
        "stop_token_ids": list(call.request.stop.stop_token_ids),
        "ignore_eos": True,  # those that end it are among the stop tokens
        "skip_special_tokens": False,
    }
    if bias := call.request.sampling.logit_bias:
        fields["logit_bias"] = {str(token): value for token, value in bias}
    return _sampling_fields(call) | fields


class _Vllm:
    path, tokenize_path = "/v1/completions", "/tokenize"

    def refusal(self, call: SequenceCall) -> str:
        return ""

    def body(self, call: SequenceCall) -> bytes:
        sampling = call.request.sampling
        fields: dict[str, Any] = _token_fields(call) | {
            "model": call.model,
            "prompt": call.prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "max_tokens": call.tokens_left,
            "min_tokens": call.tokens_least,
        }
        if sampling.temperature > 0:
            fields["seed"] = call.seed
        if sampling.allowed_token_ids:
            fields["allowed_token_ids"] = list(sampling.allowed_token_ids)
        if sampling.logprobs is not None:
            fields |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
        if call.cache_salt:
            fields["cache_salt"] = call.cache_salt
        return _encode(fields)

    def reader(self, call: SequenceCall) -> ReadEvent:
        alternatives = call.request.sampling.logprobs

        last_piece: AnswerPiece | None = None  # what was cached is said behind it

        def read(data: bytes) -> AnswerPiece | None:
            nonlocal last_piece
            if data == END_OF_STREAM:
                return last_piece
            event = read_object(data)
            choices = event.get("choices") or ()
            if not choices:
                piece, last_piece = last_piece, None
                return piece._replace(cached_tokens=_vllm_cached(event.get("usage"))) if piece is not None else None
            choice = choices[0]
            tokens = checked_tokens(choice.get("token_ids"))
            shown = choice.get("logprobs") if alternatives is not None else None
            logprobs = _vllm_logprobs(tokens, shown, alternatives or 0) if tokens and shown else ()
            piece = AnswerPiece(tokens, logprobs, str(choice.get("finish_reason") or ""))
            if piece.finish:
                last_piece = piece
            return None if piece.finish else piece

        return read

    def tokenize_body(self, text: str, model: str) -> bytes:
        return _encode({"model": model, "prompt": text, "add_special_tokens": False})


def _vllm_cached(usage: Any) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached_tokens = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached_tokens if isinstance(cached_tokens, int) else None


def _vllm_logprobs(tokens: Sequence[int], shown: dict[str, Any], alternatives: int) -> list[TokenLogprobs]:
    """``top_logprobs`` names tokens ``token_id:N``, the drawn one as well where it is none of the best."""
    chosen_logprobs, tops = shown.get("token_logprobs") or (), shown.get("top_logprobs") or [None] * len(tokens)
    if len(chosen_logprobs) != len(tokens) or len(tops) != len(tokens):
        raise HttpFault("it answers without the logprobs that were asked for")
    logprobs = []
    for token, logprob, top in zip(tokens, chosen_logprobs, tops, strict=True):
        pairs = [
            (int(name.rpartition(":")[2]), _logprob(value))
            for name, value in (top or {}).items()
            if name.startswith("token_id:") and name[9:].isdecimal()
        ]
        pairs.sort(key=lambda pair: -pair[1])
        logprobs.append(TokenLogprobs(token, _logprob(logprob), tuple(pairs[:alternatives])))
    return logprobs


class _Sglang:
    path, tokenize_path = "/generate", "/tokenize"

    def refusal(self, call: SequenceCall) -> str:
        return "it does not draw from a list of tokens" if call.request.sampling.allowed_token_ids else ""

    def body(self, call: SequenceCall) -> bytes:
        sampling = call.request.sampling
        parameters: dict[str, Any] = _token_fields(call) | {
            "max_new_tokens": call.tokens_left,
            "min_new_tokens": call.tokens_least,
            "top_k": sampling.top_k or -1,
        }
        fields: dict[str, Any] = {"input_ids": call.prompt, "stream": True, "sampling_params": parameters}
        if sampling.logprobs is not None:
            fields |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.logprobs}
        if call.cache_salt:
            fields["extra_key"] = call.cache_salt
        return _encode(fields)

    def reader(self, call: SequenceCall) -> ReadEvent:
        seen_count = 0
        wants_logprobs = call.request.sampling.logprobs is not None

        def read(data: bytes) -> AnswerPiece | None:
            nonlocal seen_count
            if data == END_OF_STREAM:
                return None
            event = read_object(data)
            info = event.get("meta_info") or {}
            tokens, total = checked_tokens(event.get("output_ids")), info.get("completion_tokens")
            is_whole = not isinstance(total, int) or len(tokens) == total  # of all so far: some releases send the rest
            new_tokens = tokens[seen_count:] if is_whole else tokens
            seen_count += len(new_tokens)
            shown = _sglang_logprobs(info, len(new_tokens)) if wants_logprobs and new_tokens else ()
            reason = info.get("finish_reason")
            finish = str(reason.get("type") or "") if isinstance(reason, dict) else ""
            cached_tokens = info.get("cached_tokens")
            return AnswerPiece(new_tokens, shown, finish, cached_tokens if isinstance(cached_tokens, int) else None)

        return read

    def tokenize_body(self, text: str, model: str) -> bytes:
        return _encode({"model": model, "prompt": text, "add_special_tokens": False})


def _sglang_logprobs(info: dict[str, Any], count: int) -> list[TokenLogprobs]:
    """Of the last ``count`` tokens: ``[logprob, id, text]`` each."""
    entries, tops = info.get("output_token_logprobs") or (), info.get("output_top_logprobs") or ()
    if len(entries) < count:
        raise HttpFault("it answers without the logprobs that were asked for")
    logprobs = []
    for place in range(-count, 0):
        top = tops[place] if len(tops) >= -place else None
        pairs = tuple((int(entry[1]), _logprob(entry[0])) for entry in top or ())
        logprobs.append(TokenLogprobs(int(entries[place][1]), _logprob(entries[place][0]), pairs))
    return logprobs


class _LlamaCpp:
    path, tokenize_path = "/completion", "/tokenize"

    def refusal(self, call: SequenceCall) -> str:
        if call.request.sampling.allowed_token_ids:
            return "it does not draw from a list of tokens"
        return "it knows no least number of tokens" if call.tokens_least else ""

    def body(self, call: SequenceCall) -> bytes:
        request, sampling = call.request, call.request.sampling
        fields: dict[str, Any] = _sampling_fields(call) | {
            "prompt": call.prompt,
            "stream": True,
            "return_tokens": True,
            "n_predict": call.tokens_left,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": -1,  # penalties look at all tokens, as those of the other engines
            "seed": call.seed,
            "ignore_eos": not request.stop.stop_token_ids,  # of the end tokens it knows its own
            # it has no salts: what must not be shared is not kept
            "cache_prompt": not call.cache_salt,
        }
        if sampling.logit_bias:
            fields["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias]
        if sampling.logprobs is not None:
            fields["n_probs"] = max(1, sampling.logprobs)
        return _encode(fields)

    def reader(self, call: SequenceCall) -> ReadEvent:
        alternatives = call.request.sampling.logprobs

        def read(data: bytes) -> AnswerPiece | None:
            if data == END_OF_STREAM:
                return None
            event = read_object(data)
            tokens, shown = checked_tokens(event.get("tokens")), event.get("completion_probabilities") or ()
            logprobs: list[TokenLogprobs] = []
            if alternatives is not None and tokens:
                if len(shown) != len(tokens):
                    raise HttpFault("it answers without the logprobs that were asked for")
                logprobs = [_llama_logprob(entry, alternatives) for entry in shown]
            if not event.get("stop"):
                return AnswerPiece(tokens, logprobs)
            timings = event.get("timings") or {}
            cached_tokens = timings.get("cache_n") if isinstance(timings.get("cache_n"), int) else None
            finish = "length" if event.get("stop_type") == "limit" or event.get("stopped_limit") else "stop"
            return AnswerPiece(tokens, logprobs, finish, cached_tokens)

        return read

    def tokenize_body(self, text: str, model: str) -> bytes:
        return _encode({"content": text, "add_special": False, "parse_special": True})


def _llama_logprob(entry: dict[str, Any], alternatives: int) -> TokenLogprobs:
    top = entry.get("top_logprobs") or ()
    pairs = tuple((int(choice["id"]), _logprob(choice.get("logprob"))) for choice in top)
    return TokenLogprobs(int(entry["id"]), _logprob(entry.get("logprob")), pairs[:alternatives])


_DIALECTS: dict[EngineKind, Dialect] = {
    EngineKind.VLLM: _Vllm(),
    EngineKind.SGLANG: _Sglang(),
    EngineKind.LLAMACPP: _LlamaCpp(),
}
