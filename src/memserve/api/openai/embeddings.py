"""``/v1/embeddings``: OpenAI's, by a model that is served with hidden states in the place of logits.

Prompts run as all others do, in chunks and with cached prefixes; the mean over all tokens needs the state of each, so
there nothing is taken from the cache.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memserve.api.http.errors import ApiError, bad_request
from memserve.api.http.limits import TENANT_KEY, json_body
from memserve.api.http.request import new_id
from memserve.api.openai.endpoints import EndpointParts, addressed
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.request.plan import Caller
from memserve.api.openai.request.prompts import PARSING, Prompt, context_exceeded
from memserve.api.openai.request.schema import ModelName, Priority, TokenCount, parse_body
from memserve.api.openai.response.responders import run_requests, send_json
from memserve.base.types import Pooling, Request, SamplingParams, StopParams, TokenOutput, salt_of
from memserve.base.validation import check_request

GENERATING = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations", "/v1/rerank",
    "/v1/score",
)  # fmt: skip
"""What a model that embeds does not do."""


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/embeddings``."""

    input: Any
    """A text, texts, token ids, or lists of them."""
    model: ModelName | None = None
    """The served model's name. Default: the served model."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the bytes of little-endian float32 in base64. Default: float."""
    dimensions: TokenCount | None = None
    """How many numbers an embedding has, where the model's files allow fewer than all."""
    user: str | None = None
    """Accepted, no effect."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens. Default true."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Read at most this many tokens of each text, the first ones. -1: as many as the context has room for. Default:
    all; more than fit are refused."""
    priority: Priority | None = None
    """Lower runs first."""


class EmbeddingEndpoint:
    """The ASGI application of ``POST /v1/embeddings``."""

    def __init__(self, shared: EndpointParts, names: ModelNames) -> None:
        self._shared, self._names = shared, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared, tenant, pooling = self._shared, scope[TENANT_KEY], self._shared.model.pooling
        if pooling is None:
            message = (
                "This server's model generates text and gives no embeddings: serve a model whose files say how it"
                " embeds, or say it: --pooling last, or mean"
            )
            raise ApiError(404, message, code="not_served")
        workers = shared.encoder.workers
        async with json_body(scope, receive, shared.edge) as data:
            shared.hub.check_busy(tenant, data)
            await workers.wait_turn(tenant)
            body = await workers.run_work(tenant, len(data) // PARSING, lambda: parse_body(data, EmbeddingBody))
            caller = addressed(body.model, self._names, Caller(tenant))
            size = _size_of(body, pooling)
            requests = await workers.run_work(tenant, len(data), lambda: self._requests(body, caller, pooling))
        states = [b""] * len(requests)

        def take_output(place: int, output: TokenOutput) -> None:
            states[place] = states[place] or output.hidden

        await run_requests(shared.hub, requests, receive, take_output)
        prompt_tokens = sum(len(request.prompt) for request in requests)
        shared.metrics.prompt_tokens.value += prompt_tokens
        shared.metrics.count_answer(tenant, prompt_tokens, 0)
        as_base64 = body.encoding_format == "base64"
        answer = await workers.run_work(
            tenant, 4 * size * len(states), lambda: [_encode(state, pooling, size, as_base64) for state in states]
        )
        await send_json(send, 200, msgspec.json.encode(self._answer_fields(answer, prompt_tokens)))

    def _answer_fields(self, embeddings: list[Any], prompt_tokens: int) -> dict[str, Any]:
        data = [{"object": "embedding", "index": place, "embedding": value} for place, value in enumerate(embeddings)]
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        return {"object": "list", "data": data, "model": self._shared.model.name, "usage": usage}

    def _requests(self, body: EmbeddingBody, caller: Caller, pooling: Pooling) -> list[Request]:
        """One for each text. Raises :class:`ApiError` 400 for one that does not fit."""
        encoder, cut = self._shared.encoder, body.truncate_prompt_tokens
        special = body.add_special_tokens is not False
        prompts = encoder.completion_prompts(body.input, add_special_tokens=special, echo=False, is_cut=cut is not None)
        name = f"embd-{new_id()}"
        return [self._request(f"{name}-{place}", prompt, body, caller, pooling) for place, prompt in enumerate(prompts)]

    def _request(self, name: str, prompt: Prompt, body: EmbeddingBody, caller: Caller, pooling: Pooling) -> Request:
        model, cut = self._shared.model, body.truncate_prompt_tokens
        longest = model.max_model_tokens - 1
        tokens = prompt.tokens if cut is None else prompt.tokens[: longest if cut == -1 else cut]
        if len(tokens) > longest:
            raise context_exceeded(model, f"{len(tokens)} tokens in a text, and one that is drawn behind it")
        if not len(tokens):
            raise bad_request("a text without a token has no embedding", "input")
        request = Request(
            name,
            tokens,
            SamplingParams(temperature=0.0, prompt_logprobs=pooling.kind == "mean"),
            StopParams(max_tokens=1),
            tenant=caller.tenant,
            priority=body.priority or 0,
            salt=salt_of("", "", model.position_regimes.regime_of(len(tokens))),
        )
        check_request(request, model.vocab_size)
        return request


def _size_of(body: EmbeddingBody, pooling: Pooling) -> int:
    """Numbers of an embedding. Raises :class:`ApiError` 400 for as many as the model does not give."""
    size = body.dimensions or pooling.size
    allowed = pooling.sizes is not None and (size in pooling.sizes if pooling.sizes else size <= pooling.size)
    if size != pooling.size and not allowed:
        shown = f"{pooling.size}" if pooling.sizes is None else f"{pooling.size}, or one of {list(pooling.sizes)}"
        shown = f"up to {pooling.size}" if pooling.sizes == () else shown
        raise bad_request(f"this model's embeddings have {shown} numbers", "dimensions", "invalid_value")
    return size


def _encode(state: bytes, pooling: Pooling, size: int, as_base64: bool) -> Any:
    values: NDArray[np.float32] = np.frombuffer(state, np.float32)[:size]
    if pooling.normalizes:
        values = values / max(np.linalg.norm(values), np.float32(1e-12))
    return base64.b64encode(values.astype("<f4").tobytes()).decode() if as_base64 else values.tolist()


class _Refusing:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(404, "This server's model gives embeddings: it generates no text", code="not_served")


def without_generation(routes: list[Route]) -> list[Route]:
    """``routes`` of a server whose model embeds: those that generate say so."""
    return [Route(route.path, _Refusing(), methods=["POST"]) if route.path in GENERATING else route for route in routes]
