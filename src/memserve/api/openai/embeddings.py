"""Embeddings: of OpenAI (``/v1/embeddings``), vLLM (``/pooling``) and Cohere (``/v2/embed``), by a model that is served
with hidden states in the place of logits.

Prompts run as all others do, in chunks and with cached prefixes; the mean over all tokens needs the state of each, so
there nothing is taken from the cache.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from memserve.api.http.errors import ApiError, bad_request
from memserve.api.http.limits import TENANT_KEY, json_body
from memserve.api.http.request import new_id
from memserve.api.openai.endpoints import EndpointParts, InvocationsEndpoint, addressed
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.request.messages import check_messages
from memserve.api.openai.request.plan import Caller
from memserve.api.openai.request.prompts import PARSING, PROMPTS_MAX, context_exceeded
from memserve.api.openai.request.schema import ChatBody, ModelName, Priority, TokenCount, parse_body
from memserve.api.openai.response.responders import run_requests, send_body, send_json
from memserve.base.types import Pooling, Request, SamplingParams, StopParams, TokenArray, TokenOutput, salt_of
from memserve.base.validation import check_request

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""What a model that embeds does not do."""
PADDED_TOKENS_MAX = 1 << 20
"""Of one request whose texts are padded: a few bytes may ask for many tokens."""
Vector = NDArray[np.float32]


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/embeddings``."""

    input: Any = None
    """A text, texts, token ids, or lists of them. This or `messages`."""
    messages: list[Any] | None = None
    """A conversation, through the chat template. This or `input`."""
    model: ModelName | None = None
    """The served model's name. Default: the served model."""
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """Numbers, their bytes in base64, or as the body of the answer: with the rest of the answer in the header
    `metadata` (`bytes`), or without it (`bytes_only`). Default: float."""
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Of numbers as bytes. Default: float32."""
    endianness: Literal["native", "little", "big"] | None = None
    """Of numbers as bytes. Default: the server's."""
    dimensions: TokenCount | None = None
    """How many numbers an embedding has, where the model's files allow fewer than all."""
    use_activation: bool | None = None
    """False: embeddings are not normalised. Default: as the model's files say."""
    user: str | None = None
    """Accepted, no effect."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens. Default: true for a text, false for a conversation."""
    add_generation_prompt: bool | None = None
    """End a conversation with the beginning of an answer. Default false."""
    continue_final_message: bool | None = None
    """Leave the last message open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Read at most this many tokens of each text. -1: as many as the context has room for. Default: all; more than fit
    are refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Which tokens are left out of a text that is cut. Default: right, the last ones."""
    padding: Literal["max_length", "do_not_pad"] | None = None
    """`max_length`: texts are as long as the context, by tokens that stand for nothing."""
    priority: Priority | None = None
    """Lower runs first."""


class PoolingBody(EmbeddingBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /pooling``: as vLLM has it."""

    task: str | None = None
    """`embed`, the default. Others are refused."""


class CohereBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v2/embed``: as Cohere has it."""

    model: ModelName | None = None
    """The served model's name. Default: the served model."""
    texts: Annotated[list[str], Meta(min_length=1, max_length=PROMPTS_MAX)]
    """What is embedded."""
    input_type: str | None = None
    """What the texts are, by a name for which the model's files have what goes before such a text. `search_query` and
    `search_document` are `query` and `document` as well."""
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    """Numbers; a bit for each, as signed or unsigned bytes; float32 in base64. Default: float."""
    output_dimension: TokenCount | None = None
    """How many numbers an embedding has, where the model's files allow fewer than all."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Where a text that is too long is cut; `NONE`: it is refused. Default: END."""
    max_tokens: TokenCount | None = None
    """Read at most this many tokens of each text. Default: as many as the context has room for."""
    priority: Priority | None = None
    """Lower runs first."""


AnyBody = EmbeddingBody | CohereBody


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """What the engine is asked for the embeddings of some texts."""

    requests: list[Request]
    pieces: list[int]
    """How many requests each text is, one after the other: those longer than the context are several."""

    @property
    def prompt_tokens(self) -> int:
        """Of all texts."""
        return sum(len(request.prompt) for request in self.requests)


class Embedder:
    """Token ids to embeddings, by the served model."""

    def __init__(self, shared: EndpointParts) -> None:
        self._shared = shared

    @property
    def pooling(self) -> Pooling:
        """How the served model embeds. Raises :class:`ApiError` 404 for one that does not."""
        if (pooling := self._shared.model.pooling) is None:
            message = (
                "This server's model generates text and gives no embeddings: serve a model whose files say how it"
                " embeds, or say it: --pooling last, or mean"
            )
            raise ApiError(404, message, code="not_served")
        return pooling

    def fit_tokens(self, tokens: Sequence[int] | TokenArray, limit: int | None, side: str | None = None) -> TokenArray:
        """``tokens`` of a text, at most ``limit`` of them (-1: as many as fit, None: all), the last ones where ``side``
        is ``left``. Raises :class:`ApiError` 400 for none, and for more than fit."""
        model = self._shared.model
        longest = self._shared.encoder.text_tokens_max
        if limit is not None and limit > longest:
            message = f"truncate_prompt_tokens value is greater than max_model_len ({longest})."
            raise bad_request(f"{message} Please request a smaller truncation size.", "truncate_prompt_tokens")
        if limit is not None:
            count = min(len(tokens), longest if limit == -1 else limit)
            tokens = tokens[len(tokens) - count :] if side == "left" else tokens[:count]
        if len(tokens) > longest:
            raise context_exceeded(model, f"{len(tokens)} tokens in a text")
        if not len(tokens):
            raise bad_request("a text without a token has no embedding", "input")
        return np.ascontiguousarray(tokens, np.int32)

    def plan_texts(self, texts: list[TokenArray], caller: Caller, priority: int | None) -> EmbeddingPlan:
        """Raises :class:`UserError` for token ids that the model does not have."""
        model, name, keeps_all = self._shared.model, f"embd-{new_id()}", self.pooling.kind == "mean"
        longest = model.max_model_tokens
        pieces = [[tokens[first : first + longest] for first in range(0, len(tokens), longest)] for tokens in texts]
        requests = [
            Request(
                f"{name}-{place}",
                tokens,
                SamplingParams(temperature=0.0, prompt_logprobs=keeps_all),
                StopParams(max_tokens=1),
                tenant=caller.tenant,
                priority=priority or 0,
                salt=salt_of("", "", model.position_regimes.regime_of(len(tokens))),
            )
            for place, tokens in enumerate(chain.from_iterable(pieces))
        ]
        for request in requests:
            check_request(request, model.vocab_size)
        return EmbeddingPlan(requests, list(map(len, pieces)))

    async def run_plan(self, plan: EmbeddingPlan, tenant: str, receive: Receive) -> list[Vector]:
        """The pooled hidden states of each text, float32 ``[pooling.size]``."""
        requests = plan.requests
        states = [b""] * len(requests)

        def take_output(place: int, output: TokenOutput) -> None:
            states[place] = states[place] or output.hidden

        await run_requests(self._shared.hub, requests, receive, take_output)
        self._shared.metrics.prompt_tokens.value += plan.prompt_tokens
        self._shared.metrics.count_answer(tenant, plan.prompt_tokens, 0)
        vectors = iter([np.frombuffer(state, np.float32) for state in states])
        lengths = iter([len(request.prompt) for request in requests])
        return [_weighted_mean(list(islice(vectors, count)), list(islice(lengths, count))) for count in plan.pieces]


def _weighted_mean(vectors: list[Vector], weights: list[int]) -> Vector:
    if len(vectors) == 1:
        return vectors[0]
    mean: Vector = np.average(vectors, axis=0, weights=weights).astype(np.float32)
    return mean


def normalized(values: Vector) -> Vector:
    """``values`` divided by their length."""
    return values / max(np.linalg.norm(values), np.float32(1e-12))


class _Form(Protocol):
    """What one interface asks, and how it is answered."""

    def parse(self, data: bytes) -> AnyBody: ...

    def texts(self, body: Any) -> list[TokenArray]: ...

    def numbers(self, body: Any, pooling: Pooling) -> tuple[int, bool]:
        """How many an embedding has, and whether it is normalised."""

    def answer(self, body: Any, embeddings: list[Vector], prompt_tokens: int) -> tuple[bytes, dict[str, str] | None]:
        """The body of the answer. With headers: it is no JSON."""


class _OpenAIForm:
    def __init__(self, shared: EndpointParts, embedder: Embedder) -> None:
        self._shared, self._embedder = shared, embedder

    def parse(self, data: bytes) -> EmbeddingBody:
        return parse_body(data, EmbeddingBody)

    def numbers(self, body: EmbeddingBody, pooling: Pooling) -> tuple[int, bool]:
        normalizes = pooling.normalizes if body.use_activation is None else body.use_activation
        return _size_of(body.dimensions, pooling), normalizes

    def texts(self, body: EmbeddingBody) -> list[TokenArray]:
        if (body.input is None) == (body.messages is None):
            raise bad_request("give either input or messages", "input", "missing_required_parameter")
        cut, encoder = body.truncate_prompt_tokens, self._shared.encoder
        texts: list[list[int]] | list[TokenArray]
        if body.messages is not None:
            texts = [self._chat_tokens(body, body.messages)]
        else:
            special = body.add_special_tokens is not False
            texts = [
                prompt.tokens
                for prompt in encoder.completion_prompts(
                    body.input, add_special_tokens=special, echo=False, is_cut=cut is not None
                )
            ]
        fitted = [self._embedder.fit_tokens(tokens, cut, body.truncation_side) for tokens in texts]
        return self._padded(fitted) if body.padding == "max_length" else fitted

    def _chat_tokens(self, body: EmbeddingBody, messages: list[Any]) -> list[int]:
        encoder = self._shared.encoder
        chat = ChatBody(
            model=self._shared.model.name,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        text = encoder.chat_text(chat, check_messages(messages))
        return encoder.token_ids(text, add_special_tokens=bool(body.add_special_tokens))

    def _padded(self, texts: list[TokenArray]) -> list[TokenArray]:
        tokenizer, longest = self._shared.model.tokenizer, self._shared.model.max_model_tokens
        if len(texts) * longest > PADDED_TOKENS_MAX:
            most = PADDED_TOKENS_MAX // longest
            raise bad_request(f"{len(texts)} texts padded to {longest} tokens; at most {most} at once", "padding")
        token = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
        return [np.pad(ids, (0, max(0, longest - len(ids))), constant_values=token) for ids in texts]

    def answer(
        self, body: EmbeddingBody, embeddings: list[Vector], prompt_tokens: int
    ) -> tuple[bytes, dict[str, str] | None]:
        form, dtype, order = body.encoding_format or "float", body.embed_dtype or "float32", body.endianness or "native"
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        fields = {"id": self._id(), "created": int(time.time()), "model": self._shared.model.name, "usage": usage}
        if form == "float":
            return self._json(fields, [values.tolist() for values in embeddings]), None
        packed = [pack_numbers(values, dtype, order) for values in embeddings]
        if form == "base64":
            return self._json(fields, [base64.b64encode(values).decode() for values in packed]), None
        if form == "bytes_only":
            return b"".join(packed), {}
        size = len(packed[0])
        data = [
            {
                "index": place, "embed_dtype": dtype, "endianness": order, "start": place * size,
                "end": (place + 1) * size, "shape": [len(embeddings[0])],
            }
            for place in range(len(packed))
        ]  # fmt: skip
        return b"".join(packed), {"metadata": json.dumps({**fields, "data": data})}

    def _json(self, told: dict[str, Any], values: list[Any]) -> bytes:
        data = [self._entry(place, value) for place, value in enumerate(values)]
        return msgspec.json.encode({"object": "list", "data": data, **told})

    def _id(self) -> str:
        return f"embd-{new_id()}"

    def _entry(self, place: int, value: Any) -> dict[str, Any]:
        return {"object": "embedding", "index": place, "embedding": value}


class _PoolingForm(_OpenAIForm):
    def parse(self, data: bytes) -> PoolingBody:
        body = parse_body(data, PoolingBody)
        if body.task not in (None, "embed"):
            message = f"Unsupported task: {body.task!r}. This server's model embeds texts: 'embed'"
            if body.task == "plugin":
                message = "No IOProcessor plugin installed. This server's model embeds texts: 'embed'"
            raise ApiError(400, message, kind="BadRequestError", param="task")  # vLLM's path has vLLM's errors
        return body

    def _id(self) -> str:
        return f"pool-{new_id()}"

    def _entry(self, place: int, value: Any) -> dict[str, Any]:
        return {"object": "pooling", "index": place, "data": value}


class _CohereForm:
    def __init__(self, shared: EndpointParts, embedder: Embedder) -> None:
        self._shared, self._embedder = shared, embedder

    def parse(self, data: bytes) -> CohereBody:
        return parse_body(data, CohereBody)

    def numbers(self, body: CohereBody, pooling: Pooling) -> tuple[int, bool]:
        return _size_of(body.output_dimension, pooling), pooling.normalizes

    def texts(self, body: CohereBody) -> list[TokenArray]:
        first, encoder = self._before_texts(body.input_type), self._shared.encoder
        side = "left" if body.truncate == "START" else "right"
        limit = None if body.truncate == "NONE" else body.max_tokens or -1
        tokens = (encoder.token_ids(first + text, add_special_tokens=True) for text in body.texts)
        texts = [self._embedder.fit_tokens(ids, limit, side) for ids in tokens]
        if body.max_tokens is not None and (longest := max(map(len, texts))) > body.max_tokens:
            message = f"a text has {longest} tokens, and max_tokens is {body.max_tokens}: set truncate to END or START"
            raise bad_request(message, "max_tokens")
        return texts

    def _before_texts(self, kind: str | None) -> str:
        if kind is None:
            return ""
        prompts = dict(self._embedder.pooling.prompts)
        for name in (kind, kind.removeprefix("search_")):
            if name in prompts:
                return prompts[name]
        shown = f"its files name {', '.join(sorted(prompts))}" if prompts else "its files name none"
        raise bad_request(f"Unsupported input_type {kind!r} of this model: {shown}", "input_type", "invalid_value")

    def answer(
        self, body: CohereBody, embeddings: list[Vector], prompt_tokens: int
    ) -> tuple[bytes, dict[str, str] | None]:
        forms: dict[str, Any] = {}
        for kind in dict.fromkeys(body.embedding_types or ["float"]):
            if "binary" in kind and len(embeddings[0]) % 8:
                message = f"embeddings of {len(embeddings[0])} numbers make no whole bytes of bits"
                raise bad_request(message, "embedding_types")
            forms[kind] = [_COHERE_FORMS[kind](values) for values in embeddings]
        units = {"input_tokens": prompt_tokens, "image_tokens": 0}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        fields = {"id": f"embd-{new_id()}", "response_type": "embeddings_by_type"}
        return msgspec.json.encode({**fields, "embeddings": forms, "texts": body.texts, "meta": meta}), None


_COHERE_FORMS: dict[str, Any] = {
    "float": lambda values: values.tolist(),
    "binary": lambda values: (np.packbits(values >= 0).astype(np.int16) - 128).tolist(),
    "ubinary": lambda values: np.packbits(values >= 0).tolist(),
    "base64": lambda values: base64.b64encode(values.astype("<f4").tobytes()).decode(),
}


class _EmbeddingEndpoint:
    """The ASGI application of one path."""

    def __init__(self, shared: EndpointParts, names: ModelNames, form: _Form, embedder: Embedder) -> None:
        self._shared, self._names, self._form, self._embedder = shared, names, form, embedder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared, tenant, form, embedder = self._shared, scope[TENANT_KEY], self._form, self._embedder
        pooling = embedder.pooling
        workers = shared.encoder.workers
        async with json_body(scope, receive, shared.edge) as data:
            shared.hub.check_busy(tenant, data)
            await workers.wait_turn(tenant)
            body = await workers.run_work(tenant, len(data) // PARSING, lambda: form.parse(data))
            caller = addressed(body.model, self._names, Caller(tenant))
            size, normalizes = form.numbers(body, pooling)

            def planned() -> EmbeddingPlan:
                return embedder.plan_texts(form.texts(body), caller, body.priority)

            plan = await shared.encoder.run_work(tenant, len(data), data, planned)
        states = await embedder.run_plan(plan, tenant, receive)

        def answered() -> tuple[bytes, dict[str, str] | None]:
            embeddings = [normalized(values[:size]) if normalizes else values[:size] for values in states]
            return form.answer(body, embeddings, plan.prompt_tokens)

        answer, headers = await workers.run_work(tenant, 4 * size * len(states), answered)
        if headers is None:
            await send_json(send, 200, answer)
        else:
            await send_body(send, 200, answer, b"application/octet-stream", headers)


def embedding_routes(shared: EndpointParts, names: ModelNames, embedder: Embedder) -> list[Route]:
    """All paths."""
    of_model = shared, embedder
    forms: dict[str, _Form] = {
        "/v1/embeddings": _OpenAIForm(*of_model),
        "/pooling": _PoolingForm(*of_model),
        "/v2/embed": _CohereForm(*of_model),
    }
    return [
        Route(path, _EmbeddingEndpoint(shared, names, form, embedder), methods=["POST"]) for path, form in forms.items()
    ]


def _size_of(dimensions: int | None, pooling: Pooling) -> int:
    """Numbers of an embedding. Raises :class:`ApiError` 400 for as many as the model does not give."""
    size = dimensions or pooling.size
    allowed = pooling.sizes is not None and (size in pooling.sizes if pooling.sizes else size <= pooling.size)
    if size != pooling.size and not allowed:
        shown = f"{pooling.size}" if pooling.sizes is None else f"{pooling.size}, or one of {list(pooling.sizes)}"
        shown = f"up to {pooling.size}" if pooling.sizes == () else shown
        raise bad_request(f"this model's embeddings have {shown} numbers", "dimensions", "invalid_value")
    return size


def pack_numbers(values: Vector, dtype: str, endianness: str) -> bytes:
    """``values`` as numbers of ``dtype`` (as vLLM names them), rounded to the nearest; ``endianness``: little, big or
    native."""
    if dtype in ("float32", "float16"):
        numbers = values.astype(dtype)
    elif dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        numbers = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        numbers = _nearest_codes(values, *_FP8[dtype])
    swaps = endianness not in ("native", sys.byteorder)
    return (numbers.byteswap() if swaps else numbers).tobytes()


_FP8 = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}
"""Bits of the fraction, the exponent's bias, and the code of the largest number."""


def _nearest_codes(values: Vector, fraction_bits: int, bias: int, largest: int) -> NDArray[np.uint8]:
    """Of ``values``, whose absolute values are at most the largest one; of two as near the even code."""
    table = _magnitudes(fraction_bits, bias, largest)
    sizes = np.abs(values)
    above = np.clip(np.searchsorted(table, sizes), 1, largest)
    below = above - 1
    distance = (table[above] - sizes) - (sizes - table[below])
    takes_below = (distance > 0) | ((distance == 0) & (below % 2 == 0))
    return np.where(takes_below, below, above).astype(np.uint8) | (np.signbit(values) << 7).astype(np.uint8)


@cache
def _magnitudes(fraction_bits: int, bias: int, largest: int) -> Vector:
    """The numbers of the codes from 0 to ``largest``."""
    codes = np.arange(largest + 1)
    exponents, fractions = codes >> fraction_bits, codes & ((1 << fraction_bits) - 1)
    small = exponents == 0
    significands = (fractions + np.where(small, 0, 1 << fraction_bits)) / float(1 << fraction_bits)
    sizes: Vector = np.ldexp(significands, np.where(small, 1, exponents) - bias).astype(np.float32)
    return sizes


class _Refusing:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(404, "This server's model gives embeddings: it generates no text", code="not_served")


def without_generation(routes: list[Route], shared: EndpointParts) -> list[Route]:
    """``routes`` of a server whose model embeds: those that generate say so, and ``/invocations`` are the others."""
    apps: dict[str, ASGIApp] = {path: _Refusing() for path in GENERATING}
    by_path: dict[str, ASGIApp] = {route.path: route.app for route in routes}
    relevance = {b'"query"': by_path["/v1/rerank"]}
    relevance |= dict.fromkeys((b'"queries"', b'"text_1"', b'"data_1"'), by_path["/v1/score"])
    apps["/invocations"] = InvocationsEndpoint(shared.edge, relevance, by_path["/v1/embeddings"])
    return [Route(route.path, apps.get(route.path, route.app), methods=list(route.methods or ())) for route in routes]
