"""``/v1/rerank`` and ``/v1/score``: how relevant documents are to a query, by a model that answers *yes* or *no*, or by
one that embeds.

The template is that of Qwen3-Reranker's card, and so is the score: the probability of *yes* beside *no* as the first
token of the answer. Prompts of one query share their beginning, so it is computed once. Of a model that embeds, the
score is the cosine of the angle between two embeddings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memserve.api.http.errors import ApiError, bad_request
from memserve.api.http.limits import TENANT_KEY, json_body
from memserve.api.http.request import new_id
from memserve.api.openai.embeddings import Embedder, EmbeddingPlan, normalized
from memserve.api.openai.endpoints import EndpointParts, addressed
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.request.plan import Caller
from memserve.api.openai.request.prompts import PARSING, context_exceeded
from memserve.api.openai.request.schema import ModelName, Priority, TokenCount, parse_body
from memserve.api.openai.response.responders import run_requests, send_json
from memserve.base.types import Request, SamplingParams, StopParams, TokenArray, TokenOutput, salt_of
from memserve.base.units import MIB
from memserve.base.validation import check_request

PAIRS_MAX = 1024
"""Documents of one request."""
TEXT_BYTES_MAX = 16 * MIB
"""All pairs of one request together."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_PLACES = ("/rerank", "/v1/rerank", "/v2/rerank")
_SCORE_PLACES = ("/score", "/v1/score")

Texts = Annotated[list[str], Meta(min_length=1, max_length=PAIRS_MAX)]


class RerankBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/rerank``: the bodies of Jina and Cohere."""

    model: ModelName | None = None
    """The served model's name, or an adapter's. Default: the served model."""
    query: str
    """What is looked for."""
    documents: Annotated[list[Any], Meta(min_length=1, max_length=PAIRS_MAX)]
    """Texts, or objects with `text`."""
    top_n: TokenCount | None = None
    """How many results to return, the most relevant ones. Default: all."""
    return_documents: bool | None = None
    """Repeat the documents in the results. Default true."""
    truncate_prompt_tokens: TokenCount | None = None
    """Read at most this many tokens of a query with its document. Default: all; more than fit are refused."""
    instruction: str | None = None
    """What makes a document relevant. Default: the one of the model's card."""
    priority: Priority | None = None
    """Lower runs first."""


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/score``: as vLLM has it. One text and many, or as many of both."""

    model: ModelName | None = None
    """The served model's name, or an adapter's. Default: the served model."""
    text_1: str | Texts | None = None
    """Queries. This or `queries`."""
    text_2: str | Texts | None = None
    """Documents. This or `documents`."""
    queries: str | Texts | None = None
    """Another name of `text_1`."""
    documents: str | Texts | None = None
    """Another name of `text_2`."""
    items: str | Texts | None = None
    """Another name of `text_2`."""
    data_1: str | Texts | None = None
    """Another name of `text_1`."""
    data_2: str | Texts | None = None
    """Another name of `text_2`."""
    truncate_prompt_tokens: TokenCount | None = None
    """Read at most this many tokens of a query with its document. Default: all; more than fit are refused."""
    instruction: str | None = None
    """What makes a document relevant. Default: the one of the model's card."""
    priority: Priority | None = None
    """Lower runs first."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What is to be scored."""

    texts: list[tuple[str, str]]
    """Query and document."""
    body: RerankBody | ScoreBody

    @property
    def distinct_texts(self) -> list[str]:
        """Each once, in order."""
        return list(dict.fromkeys(text for pair in self.texts for text in pair))

    def count_bytes(self) -> int:
        """Of all texts, each query as often as it is read. Raises :class:`ApiError` 400 for too many."""
        nbytes = sum(len(query) + len(document) for query, document in self.texts)
        if nbytes > TEXT_BYTES_MAX:
            raise bad_request(f"{nbytes} characters in all pairs; the limit is {TEXT_BYTES_MAX}: ask for fewer at once")
        return nbytes


def _pairs_of_rerank(data: bytes) -> _Pairs:
    body = parse_body(data, RerankBody)
    texts = [(body.query, _text_of(document, place)) for place, document in enumerate(body.documents)]
    return _Pairs(texts, body)


def _text_of(document: Any, place: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise bad_request(f"documents[{place}] is neither a text nor an object with 'text'", "documents")
    return text


def _pairs_of_score(data: bytes) -> _Pairs:
    body = parse_body(data, ScoreBody)
    queries = body.text_1 or body.queries or body.data_1
    documents = body.text_2 or body.documents or body.items or body.data_2
    if not queries or not documents:
        raise bad_request("give text_1 and text_2", "text_1", "missing_required_parameter")
    first, second = ([side] if isinstance(side, str) else side for side in (queries, documents))
    if len(first) not in (1, len(second)):
        raise bad_request(f"{len(first)} texts and {len(second)}: give one, or as many", "text_1")
    return _Pairs(list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True)), body)


class RelevanceRoutes:
    """All routes of both."""

    def __init__(
        self, shared: EndpointParts, names: ModelNames, reranker: str, aliases: Sequence[str], embedder: Embedder
    ) -> None:
        """``reranker``: as ``--reranker`` says. ``aliases``: further names of the model, which may tell what it is."""
        self._shared, self._names, self._embedder = shared, names, embedder
        known_names = " ".join((shared.model.name, *aliases)).casefold()
        self._is_reranker = reranker == "qwen3" or (reranker == "auto" and "qwen3-reranker" in known_names)
        self._template: tuple[list[int], list[int], tuple[int, int]] | None = None

    def routes(self) -> list[Route]:
        """As the application has them."""
        ranked = _Endpoint(self, _pairs_of_rerank)
        scored = _Endpoint(self, _pairs_of_score)
        of_both = ((_PLACES, ranked), (_SCORE_PLACES, scored))
        return [Route(place, endpoint, methods=["POST"]) for places, endpoint in of_both for place in places]

    async def answer_pairs(self, scope: Scope, receive: Receive, send: Send, parse: Callable[[bytes], _Pairs]) -> None:
        """Score what the body says."""
        shared, tenant, embeds = self._shared, scope[TENANT_KEY], self._shared.model.pooling is not None
        if not embeds:
            self._check_model()
        async with json_body(scope, receive, shared.edge) as data:
            shared.hub.check_busy(tenant, data)
            workers = shared.encoder.workers
            await workers.wait_turn(tenant)
            pairs = await workers.run_work(tenant, len(data) // PARSING, partial(parse, data))
            caller = addressed(pairs.body.model, self._names, Caller(tenant))
            planned = self._plan_embeddings if embeds else self._requests
            plan = await workers.run_work(tenant, pairs.count_bytes(), lambda: planned(pairs, caller))
        if isinstance(plan, EmbeddingPlan):
            prompt_tokens = plan.prompt_tokens
            vectors = await self._embedder.run_plan(plan, tenant, receive)
            scores = _cosines(pairs, list(map(normalized, vectors)))
        else:
            prompt_tokens = sum(len(request.prompt) for request in plan)
            scores = await self._run_requests(plan, receive)
            shared.metrics.prompt_tokens.value += prompt_tokens
            shared.metrics.count_answer(tenant, prompt_tokens, 0)
        model = shared.model.name if caller.adapter is None else caller.adapter.name
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        fields = _ranking(pairs.body, pairs, scores) if isinstance(pairs.body, RerankBody) else _scores(scores)
        await send_json(send, 200, msgspec.json.encode({**fields, "model": model, "usage": usage}))

    def _check_model(self) -> None:
        if not self._is_reranker:
            message = (
                "This server's model gives no relevance: serve a reranker that answers yes or no, such as"
                " Qwen3-Reranker, or say that it is one: --reranker qwen3; or serve a model that embeds"
            )
            raise ApiError(404, message, code="not_served")

    def _plan_embeddings(self, pairs: _Pairs, caller: Caller) -> EmbeddingPlan:
        """Of each text of ``pairs``, however often it is there. Raises :class:`ApiError` 400."""
        encoder, body = self._shared.encoder, pairs.body
        texts = (
            encoder.token_ids(encoder.hide_control_tokens(text), add_special_tokens=True)
            for text in pairs.distinct_texts
        )
        tokens = [self._embedder.fit_tokens(ids, body.truncate_prompt_tokens) for ids in texts]
        return self._embedder.plan_texts(tokens, caller, body.priority)

    def _parts(self) -> tuple[list[int], list[int], tuple[int, int]]:
        """Tokens before a pair, tokens behind it, and those of *yes* and *no*. Raises :class:`ApiError` 404 for a model
        that has no such tokens."""
        if self._template is None:
            encoder = self._shared.encoder
            yes, no = (encoder.tokenizer.token_to_id(word) for word in ("yes", "no"))
            if yes is None or no is None:
                raise ApiError(
                    404, "This server's model has no tokens 'yes' and 'no' to answer with", code="not_served"
                )
            before, behind = (encoder.token_ids(text, add_special_tokens=False) for text in (_PREFIX, _SUFFIX))
            self._template = before, behind, (yes, no)
        return self._template

    def _requests(self, pairs: _Pairs, caller: Caller) -> list[Request]:
        """One for each pair. Raises :class:`ApiError` 400 for one that does not fit."""
        model, body = self._shared.model, pairs.body
        _, _, words = self._parts()
        name, adapter = f"rank-{new_id()}", "" if caller.adapter is None else caller.adapter.digest
        requests = []
        for place, (query, document) in enumerate(pairs.texts):
            prompt = self._prompt(body, query, document)
            if len(prompt) + 1 > model.max_model_tokens:
                raise context_exceeded(model, f"{len(prompt)} tokens in pair {place}, with the template, and an answer")
            request = Request(
                f"{name}-{place}",
                prompt,
                SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=words),
                StopParams(max_tokens=1),
                tenant=caller.tenant,
                priority=body.priority or 0,
                session=name,
                salt=salt_of("", adapter, model.position_regimes.regime_of(len(prompt))),
            )
            check_request(request, model.vocab_size)
            requests.append(request)
        return requests

    def _prompt(self, body: RerankBody | ScoreBody, query: str, document: str) -> TokenArray:
        before, behind, _ = self._parts()
        pair = f"<Instruct>: {body.instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        text = self._shared.encoder.hide_control_tokens(pair)
        tokens = self._shared.encoder.token_ids(text, add_special_tokens=False)
        return np.array([*before, *tokens[: body.truncate_prompt_tokens], *behind], np.int32)

    async def _run_requests(self, requests: list[Request], receive: Receive) -> list[float]:
        """The score of each. Raises :class:`ApiError` for one that the engine refuses or gives up."""
        scores, (yes, no) = [0.0] * len(requests), self._parts()[2]

        def take_output(place: int, output: TokenOutput) -> None:
            if output.logprobs:
                logprobs = dict(output.logprobs[0].top)
                scores[place] = 1.0 / (1.0 + math.exp(min(700.0, logprobs[no] - logprobs[yes])))

        await run_requests(self._shared.hub, requests, receive, take_output)
        return scores


def _cosines(pairs: _Pairs, vectors: list[NDArray[np.float32]]) -> list[float]:
    """Of the angles between both sides; ``vectors``: of all distinct texts, of length 1."""
    by_text = dict(zip(pairs.distinct_texts, vectors, strict=True))
    return [float(by_text[query] @ by_text[document]) for query, document in pairs.texts]


class _Endpoint:
    def __init__(self, routes: RelevanceRoutes, parse: Callable[[bytes], _Pairs]) -> None:
        self._routes, self._parse = routes, parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes.answer_pairs(scope, receive, send, self._parse)


def _ranking(body: RerankBody, pairs: _Pairs, scores: list[float]) -> dict[str, Any]:
    """The most relevant first; of equal ones the earlier."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": pairs.texts[result["index"]][1]}
    return {"id": f"rerank-{new_id()}", "results": results}


def _scores(scores: list[float]) -> dict[str, Any]:
    data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)]
    return {"id": f"score-{new_id()}", "object": "list", "created": int(time.time()), "data": data}
