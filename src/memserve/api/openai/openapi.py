"""Tables of operations and of errors, from which ``/openapi.json`` and docs/reference/HTTP.md are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from memserve import __version__
from memserve.api.anthropic.body import MessagesBody
from memserve.api.batches.batch import BatchBody
from memserve.api.openai.adapters import LoadAdapterBody, SageMakerAdapterBody, UnloadAdapterBody
from memserve.api.openai.embeddings import CohereBody, EmbeddingBody, PoolingBody
from memserve.api.openai.kv_hints import KvHintAction, KvHintsEnvelope
from memserve.api.openai.relevance import RerankBody, ScoreBody
from memserve.api.openai.request.schema import ChatBody, CompletionBody, DocumentBody, StreamOptions
from memserve.api.openai.responses.body import ResponsesBody
from memserve.api.openai.tokens import DetokenizeBody, TokenizeBody
from memserve.base.options import field_docs

Json = dict[str, Any]
SCHEMA_PLACE = "#/components/schemas/{name}"
BODIES = (
    CompletionBody, ChatBody, ResponsesBody, MessagesBody, BatchBody, EmbeddingBody, PoolingBody, CohereBody,
    LoadAdapterBody, UnloadAdapterBody, SageMakerAdapterBody,
    RerankBody, ScoreBody, DocumentBody, KvHintsEnvelope, KvHintAction, TokenizeBody, DetokenizeBody, StreamOptions,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """A request that succeeds as it stands, in the order of :data:`OPERATIONS`."""

    title: str
    body: Json | None = None
    path: str = ""
    """Where the operation's path has a parameter: the path with its value."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    about: str
    answers: str
    """Description of a successful answer."""
    body: type[msgspec.Struct] | None = None
    form: tuple[tuple[str, str], ...] = ()
    """Fields of a body that is a form: name and meaning; ``file`` is one."""
    successes: tuple[int, ...] = (200,)
    errors: tuple[int, ...] = ()
    """In addition to those that every operation may answer with."""
    examples: tuple[Example, ...] = ()
    parameters: tuple[tuple[str, str], ...] = ()
    """Parameters of the path: name and meaning."""
    media_type: str = "application/json"


QUESTION = {"role": "user", "content": "What is the capital of France?"}
MODEL = "MODEL"
"""Stands for the served model's name in examples."""


def _question_body(**fields: Any) -> Json:
    """The body of a chat: the usual fields, and ``fields``."""
    return {"model": MODEL, "messages": [QUESTION], "max_tokens": 16, **fields}


_BOOK = {
    "type": "text", "text": "Handbook. Holidays: 30 days. Office hours: 9 to 17.",
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}  # fmt: skip
_GENERATES = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_ANSWER = (
    "`choices` with `text` or `message`, and `finish_reason` (`stop`, `length`, `tool_calls`); `usage` with "
    "`prompt_tokens_details.cached_tokens`: prompt tokens with KV from the cache. With `stream`: server-sent "
    "events, each `data: {...}`, the last `data: [DONE]`; an error after the first token is an event with `error`."
)
_DOCUMENT = (
    "`id`, `endpoint`, `tokens`, `pinned_tokens` (kept from eviction, in whole blocks; `null`: not known yet), "
    "`ttl_s`, `expires_in_s`"
)
_TEXT, _OF_ADAPTERS = "a line that begins with `Success`", (400, 404, 413, 415, 500, 503)
_RESPONSE = (
    "`id`, `status` (`queued`, `in_progress`, `completed`, `incomplete`, `failed`, `cancelled`), `output` (items: "
    "`message`, `function_call`), `usage`, and what was asked"
)
_RESPONSE_ID = (("response_id", "the response's `id`"),)
_RANKING = "`results`, the most relevant first: `index`, `relevance_score`, of a reranker 0 to 1, `document`; `usage`"
_FILE_ID = (("file_id", "the file's `id`"),)
_FILE = "`id`, `filename`, `bytes`, `purpose`, `created_at`, `expires_at`"
_BATCH_ID = (("batch_id", "the batch's `id`"),)
_BATCH = (
    "`id`, `status` (`validating`, `in_progress`, `finalizing`, `completed`, `failed`, `cancelling`, `cancelled`, "
    "`expired`), `request_counts`, `output_file_id`, `error_file_id`, `errors`, and when it had which status"
)
_PAGE = "`data`, `has_more`, `first_id`, `last_id`. Parameters: `limit`, `after`, `order` (`desc`, `asc`)"
_HINT_RESULTS = (
    "`results`, one for each action: `action_id`, `action_type`, `outcome` (`accepted`, `clipped`, `deferred`, "
    "`rejected`, `missing`), `tokens` it was done for, and the `reason` where that is less than all"
)
_DOCUMENT_ID = (("document_id", "1 to 128 letters, digits, or _ . : -"),)

OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", "Answer a conversation, through the model's chat template.", _ANSWER,
        body=ChatBody, errors=_GENERATES,
        examples=(
            Example("A question", _question_body(temperature=0)),
            Example(
                "Streamed, with usage at the end and an explanation of the time to the first token",
                _question_body(stream=True, stream_options={"include_usage": True}, explain=True),
            ),
            Example(
                "A conversation with KV that stays in the cache for ten minutes",
                _question_body(session="support-17", session_ttl_s=600),
            ),
        ),
    ),
    Operation(
        "POST", "/v1/completions", "Continue text or token ids.", _ANSWER, body=CompletionBody, errors=_GENERATES,
        examples=(
            Example("Two prompts", {"model": MODEL, "prompt": ["Once upon a time", "In 1905"], "max_tokens": 8}),
            Example(
                "Log probabilities of the prompt's own tokens",
                {"model": MODEL, "prompt": "The capital of France", "max_tokens": 0, "echo": True, "logprobs": 2},
            ),
        ),
    ),
    Operation(
        "POST", "/v1/responses", "Answer a text or a list of items: OpenAI's Responses API.",
        f"{_RESPONSE}. With `stream`: server-sent events, each with `type`, from `response.created` to "
        "`response.completed` or `response.incomplete`.", body=ResponsesBody, errors=_GENERATES,
        examples=(
            Example("A question", {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 16}),
        ),
    ),
    Operation(
        "GET", "/v1/responses/{response_id}", "A stored response; one in the background as it is now.", _RESPONSE,
        errors=(404,), parameters=_RESPONSE_ID,
    ),
    Operation(
        "DELETE", "/v1/responses/{response_id}", "Forget a response.", "`deleted`: true", errors=(404,),
        parameters=_RESPONSE_ID,
    ),
    Operation(
        "POST", "/v1/responses/{response_id}/cancel", "End a response in the background.", _RESPONSE, errors=(404,),
        parameters=_RESPONSE_ID,
    ),
    Operation(
        "POST", "/v1/messages",
        "Answer a conversation: Anthropic's Messages API, with errors in its form. Where a block has `cache_control` "
        "(`ttl` `5m` or `1h`; 4 blocks a request), the KV of the prompt up to its end is kept from eviction that long "
        "after the answer, as far as there is room for what all tenants keep: a tenant that keeps more than others "
        "loses what it kept first.",
        "`content`: blocks of type `text`, `thinking`, `tool_use`; `stop_reason` (`end_turn`, `max_tokens`, "
        "`stop_sequence`, `tool_use`), `stop_sequence`, `usage`: `cache_read_input_tokens` had KV in the cache, "
        "`cache_creation_input_tokens` are others in front of a kept block's end, `input_tokens` the rest. With "
        "`stream`: server-sent events from `message_start` to `message_stop`.",
        body=MessagesBody, errors=_GENERATES,
        examples=(
            Example("A question", _question_body()),
            Example("A book that stays in the cache for an hour", _question_body(system=[_BOOK])),
        ),
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", "How many tokens the prompt of a message has.", "`input_tokens`",
        body=MessagesBody, errors=_GENERATES,
        examples=(Example("A question", {"model": MODEL, "messages": [QUESTION]}),),
    ),
    Operation(
        "POST", "/v1/embeddings", "The embeddings of texts, by a model that embeds.",
        "`data`: a list with `index` and `embedding`; `usage`", body=EmbeddingBody, errors=_GENERATES,
    ),
    Operation(
        "POST", "/pooling", "The same in vLLM's form: its errors have vLLM's types.",
        "`data`: a list with `index` and `data`; `usage`", body=PoolingBody, errors=_GENERATES,
    ),
    Operation(
        "POST", "/v2/embed", "The same in Cohere's form.",
        "`embeddings`: lists by the names of `embedding_types`; `texts`; `meta.billed_units`", body=CohereBody,
        errors=_GENERATES,
    ),
    *(
        Operation(
            "POST", path, "Rank documents by a query: a reranker, or a model that embeds.", _RANKING, body=RerankBody,
            errors=_GENERATES,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Operation(
            "POST", path,
            "How relevant each text of one side is to that of the other: a reranker, or a model that embeds.",
            "`data`: a list with `index` and `score`, of a reranker 0 to 1; `usage`", body=ScoreBody, errors=_GENERATES,
        )
        for path in ("/v1/score", "/score")
    ),
    Operation(
        "POST", "/v1/files", "Upload a file for batches, as a form (`multipart/form-data`).", _FILE,
        form=(
            ("file", "the file"), ("purpose", "`batch`"),
            ("expires_after[anchor]", "`created_at`, where the file shall be deleted by itself"),
            ("expires_after[seconds]", "how long after that: 3,600 to 2,592,000"),
        ),
        errors=(404, 413, 415, 503),
    ),
    Operation(
        "GET", "/v1/files", "The files of this key, newest first; with `purpose`: those that have it.", _PAGE,
        errors=(404,), examples=(Example("Which there are"),),
    ),
    Operation("GET", "/v1/files/{file_id}", "What is known of a file.", _FILE, errors=(404,), parameters=_FILE_ID),
    Operation(
        "DELETE", "/v1/files/{file_id}", "Delete a file that no open batch needs.", "`deleted`: true", errors=(404,),
        parameters=_FILE_ID,
    ),
    Operation(
        "GET", "/v1/files/{file_id}/content", "The bytes of a file.", "the file", errors=(404,), parameters=_FILE_ID,
        media_type="application/octet-stream",
    ),
    Operation(
        "POST", "/v1/batches",
        "Answer all requests of an uploaded file, a line each, behind all other requests.", _BATCH, body=BatchBody,
        errors=(400, 404, 413, 415, 429, 503),
    ),
    Operation(
        "GET", "/v1/batches", "The batches of this key, newest first.", _PAGE, errors=(404,),
        examples=(Example("Which there are"),),
    ),
    Operation("GET", "/v1/batches/{batch_id}", "A batch as it is now.", _BATCH, errors=(404,), parameters=_BATCH_ID),
    Operation(
        "POST", "/v1/batches/{batch_id}/cancel", "Answer no more of its requests; the answers that it has are kept.",
        _BATCH, errors=(404, 409), parameters=_BATCH_ID,
    ),
    Operation(
        "POST", "/invocations", "A chat or a completion, by the body's fields: what Amazon SageMaker calls.", _ANSWER,
        body=ChatBody, errors=_GENERATES, examples=(Example("A chat", _question_body()),),
    ),
    Operation(
        "POST", "/tokenize", "The token ids of a text, or of a conversation through the chat template.",
        "`tokens`, `count`, `max_model_len`, `token_strs`", body=TokenizeBody, errors=_GENERATES,
        examples=(Example("A text", {"model": MODEL, "prompt": "The capital of France", "return_token_strs": True}),),
    ),
    Operation(
        "POST", "/detokenize", "The text of token ids.", "`prompt`", body=DetokenizeBody, errors=_GENERATES,
        examples=(Example("Three tokens", {"model": MODEL, "tokens": [5, 6, 7]}),),
    ),
    Operation(
        "GET", "/tokenizer_info", "Special tokens and the chat template.",
        "`bos_token`, `eos_token`, `pad_token`, `unk_token`, `chat_template`, `tokenizer_class`, `model_max_length`",
        examples=(Example("Of the served model"),),
    ),
    Operation(
        "POST", "/v1/load_lora_adapter",
        "Load a LoRA adapter (`--lora-folder`), as vLLM's; 200 when all instances have it. Needs an operator's key "
        "(`--metrics-key-file`) where there are such.",
        _TEXT, body=LoadAdapterBody, errors=_OF_ADAPTERS, media_type="text/plain",
    ),
    Operation(
        "POST", "/v1/unload_lora_adapter", "Forget an adapter's name; requests that run with it go on.", _TEXT,
        body=UnloadAdapterBody, errors=_OF_ADAPTERS, media_type="text/plain",
    ),
    Operation(
        "POST", "/adapters", "As `/v1/load_lora_adapter`: what Amazon SageMaker calls.", _TEXT,
        body=SageMakerAdapterBody, errors=_OF_ADAPTERS, media_type="text/plain",
    ),
    Operation(
        "DELETE", "/adapters/{name}", "As `/v1/unload_lora_adapter`.", _TEXT, errors=_OF_ADAPTERS,
        parameters=(("name", "the adapter's name"),), media_type="text/plain",
    ),
    Operation(
        "PUT", "/v1/documents/{document_id}",
        "Compute a text or the beginning of a conversation once, and keep its KV; 201 when it is new.", _DOCUMENT,
        body=DocumentBody, successes=(200, 201), errors=_GENERATES, parameters=_DOCUMENT_ID,
        examples=(
            Example(
                "A handbook that chats begin with",
                {"text": "Handbook. Holidays: 30 days. Office hours: 9 to 17.", "ttl_s": 3600, "endpoint": "chat"},
                "/v1/documents/handbook",
            ),
        ),
    ),
    Operation("GET", "/v1/documents", "The documents of this key, oldest first.", "`data`: a list of documents"),
    Operation(
        "GET", "/v1/documents/{document_id}", "One document.", _DOCUMENT, errors=(404,), parameters=_DOCUMENT_ID,
        examples=(Example("The handbook", path="/v1/documents/handbook"),),
    ),
    Operation(
        "DELETE", "/v1/documents/{document_id}", "Forget a document; its KV may be evicted from now on.",
        "`deleted`: true", errors=(404,), parameters=_DOCUMENT_ID,
        examples=(Example("The handbook", path="/v1/documents/handbook"),),
    ),
    Operation(
        "GET", "/v1/sessions",
        "The sessions of this key with kept KV (`session_ttl_s`), least recently used first. Sessions of one name "
        "with different `cache_salt` are listed each.",
        "`data`: a list with `id`, `pinned_tokens` (kept from eviction, in whole blocks; `null`: not known yet), "
        "`expires_in_s`",
        errors=(503,), examples=(Example("What is kept"),),
    ),
    Operation(
        "DELETE", "/v1/sessions/{name}",
        "End a session: its KV may be evicted from now on. New requests may reuse its name.", "`deleted`: true",
        errors=(404, 503), parameters=(("name", "the session's name; slashes need no escape"),),
    ),
    Operation(
        "POST", "/v1/kv_hints",
        "Say what to do with cached KV, in the words of vLLM's proposals: `kv.retain` (evict it last, for `ttl_s`, the "
        "lowest `priority` first), `kv.prefetch` (bring it up to HBM), `kv.demote` (to DRAM, now), `kv.share` (copy it "
        "to a `destination`: an instance, or `store`), `kv.release` (end its names, evict it first). A `payload` has "
        "one target: `session`, `document`, `prompt`, `tokens`, or `messages` (with `tools`); with `cache_salt` where "
        "requests have one.",
        _HINT_RESULTS, body=KvHintsEnvelope, errors=_GENERATES,
        examples=(
            Example(
                "While a tool runs",
                {
                    "protocol_version": "0.1", "message_id": "turn-17",
                    "actions": [
                        {
                            "action_id": "keep", "action_type": "kv.retain", "action_version": "1.0",
                            "payload": {"messages": [{"role": "user", "content": "Hi"}], "ttl_s": 60, "priority": 5},
                        }
                    ],
                },
            ),
        ),
    ),
    Operation(
        "GET", "/v1/kv_hints/{message_id}", "What became of the hints of a call, or of a request's `kv_hints`.",
        _HINT_RESULTS, errors=(404, 503), parameters=(("message_id", "that of the envelope"),),
        examples=(Example("The one above", path="/v1/kv_hints/turn-17"),),
    ),
    Operation(
        "GET", "/v1/models", "The served model.",
        "`data`: one entry with `id` and `max_model_len`, the longest prompt and answer together, in tokens",
        examples=(Example("What is served"),),
    ),
    Operation(
        "GET", "/v1/models/{name}", "The served model by name; names may contain slashes.", "`id`, `max_model_len`",
        errors=(404,), parameters=(("name", "the model's name or an alias"),),
    ),
    Operation(
        "GET", "/health", "Whether a request could be run now. Needs no key.", "`status`: ok", errors=(503,),
        examples=(Example("Is it up"),),
    ),
    Operation(
        "GET", "/ping", "As `/health`: what Amazon SageMaker asks.", "`status`: ok", errors=(503,),
        examples=(Example("Is it up"),),
    ),
    Operation("POST", "/ping", "As `GET /ping`.", "`status`: ok", errors=(503,)),
    Operation(
        "GET", "/version", "The version of memserve. Needs no key.", "`version`", examples=(Example("Which one"),)
    ),
    Operation(
        "GET", "/load", "How many requests are being answered. Needs the key of `/metrics`, if there is one.",
        "`server_load`", examples=(Example("How busy it is"),),
    ),
    Operation("GET", "/metrics", "Counters and gauges in Prometheus' text form.", "text", media_type="text/plain"),
    Operation(
        "GET", "/ui", "The dashboard, for a browser. Needs no key: the page asks for one.", "a page",
        media_type="text/html",
    ),
    Operation(
        "GET", "/", "Leads a browser (`Accept: text/html`) to the dashboard; others find nothing here.", "a redirect",
        successes=(307,), errors=(404,), media_type="text/html",
    ),
    Operation("GET", "/ui/", "Leads to `/ui`.", "a redirect", successes=(307,), media_type="text/html"),
    Operation(
        "GET", "/ui/{name}", "A file of the dashboard. Needs no key.", "a script, a style or a picture", errors=(404,),
        parameters=(("name", "the file's name"),), media_type="text/javascript",
    ),
    Operation(
        "GET", "/ui/events",
        "What the dashboard shows, about once a second. With the key of `/metrics`: what that page shows, and requests "
        "of all tenants; with an API key: this tenant's requests.",
        "server-sent events, each like the answer of `/ui/snapshot`; the first has `history`, too: `time_ms` and the "
        "`metrics` that charts show, of all members together, of every fifth second of the last ten minutes",
        errors=(429,), media_type="text/event-stream",
    ),
    Operation(
        "GET", "/ui/snapshot", "One such event.",
        "`metrics` (the samples of `/metrics` by name), `members`, `live` and `recent` (requests with `stages` and "
        "`story`; no text), `viewer`",
    ),
    Operation(
        "GET", "/ui/trees", "The prefixes of the last prompts as trees, and which members hold them.",
        "`tenants`: each with `prefixes`; a prefix has `blocks`, `uses`, `holders` (blocks on the upper, and on the "
        "lower tier alone) and `children`; empty with `--in-process`", errors=(503,),
    ),
    Operation(
        "GET", "/ui/requests/{request_id}", "The timeline of one request, in flight or ended lately.",
        "`stages` in milliseconds, `story`: what was decided and why, counts and times", errors=(404,),
        parameters=(("request_id", "the request's `x-request-id`, or the `id` of its answer"),),
    ),
    Operation("GET", "/openapi.json", "This description, as OpenAPI 3.1. Needs no key.", "an OpenAPI document"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Error:
    """One kind of error. The body is ``{"error": {"message", "type", "param", "code"}}``; of ``/v1/messages``
    ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

    status: int
    code: str | None
    when: str


ERRORS = (
    Error(400, "invalid_value", "a field has the wrong type, or is out of range; `param` names it"),
    Error(400, "unknown_field", "a field that is not in the tables below; the message suggests a near name"),
    Error(400, "missing_required_parameter", "a required field is missing"),
    Error(400, "unsupported_parameter", "the field asks for something that memserve does not do"),
    Error(400, "context_length_exceeded", "prompt and answer do not fit into the context; the message names the flag"),
    Error(400, "request_rejected", "the request could never run here"),
    Error(400, "too_many_documents", "this key has as many documents as it may; delete some"),
    Error(400, "too_many_files", "this key has as many files as it may; delete some"),
    Error(400, "file_storage_full", "the files of this key have no room left (`--file-storage`); delete some"),
    Error(400, "file_in_use", "a batch that has not ended reads or writes the file"),
    Error(400, "malformed", "not a valid HTTP request"),
    Error(400, "grammar_too_complex", "a grammar beyond the engine's limits, or too large or slow to follow"),
    Error(400, "no_token_left", "penalties, biases and `min_tokens` exclude every token that could come next"),
    Error(400, None, "anything else that is wrong with the request itself"),
    Error(401, "invalid_api_key", "no key, or a wrong one"),
    Error(403, "engines_are_fixed", "with `--engine`: servers join and leave with `--engine-admin-key-file` only"),
    Error(404, "model_not_found", "another model is served"),
    Error(
        404, "response_not_found", "never stored (`store`: false), deleted, forgotten for newer ones, or another key's"
    ),
    Error(404, "document_not_found", "never put, deleted, expired, or another key's"),
    Error(404, "file_not_found", "never uploaded, deleted, expired, or another key's"),
    Error(404, "batch_not_found", "never created, forgotten for newer ones, or another key's"),
    Error(404, "request_not_found", "not in flight, not among the last that have ended, or another key's"),
    Error(404, "session_not_found", "kept no KV, was ended, has expired, or is another key's"),
    Error(404, "adapter_not_found", "no such folder below that of `--lora-folder`, or no adapter of this name"),
    Error(404, "adapters_are_fixed", "adapters do not come and go without `--lora-folder`"),
    Error(404, "unknown_url", "no such path"),
    Error(
        404,
        "not_served",
        "a path of OpenAI's that is not answered here, such as `/v1/audio`, `/v1/embeddings` where the model "
        "generates, or `/v1/batches` without `--metadata`; the message says why",
    ),
    Error(405, "method_not_allowed", "the path does not support this method"),
    Error(408, "header_timeout", "the headers did not arrive in time"),
    Error(408, "body_timeout", "the body did not arrive in time"),
    Error(408, "client_too_slow", "an event at the end of a stream: the client read it too slowly"),
    Error(409, "answer_taken_over", "another connection with the same `Idempotency-Key` reads this answer now"),
    Error(409, "batch_not_cancellable", "the batch has ended, or has all answers"),
    Error(413, "file_too_large", "the file is larger than `--max-file`"),
    Error(413, "request_too_large", "the body is longer than the limit"),
    Error(415, None, "the body is compressed, or its `Content-Type` is not `application/json`"),
    Error(422, "idempotency_key_reused", "this `Idempotency-Key` was used with another body"),
    Error(429, "rate_limit_exceeded", "too much is waiting already; retry after `Retry-After` seconds"),
    Error(500, "adapter_not_loaded", "no adapter can be made of the folder, or an instance cannot have it; see why"),
    Error(500, "internal_error", "a fault of the server; its log has the details"),
    Error(500, "request_failed", "computing this request failed; sending it again may not help"),
    Error(502, "engine_failed", "with `--engine`: no engine gave an answer; the message names each with its reason"),
    Error(503, "no_engine", "with `--engine`: no engine has answered yet, or none is up; retry"),
    Error(503, "overloaded", "the request waited for too long, or there is no room; retry after `Retry-After` seconds"),
    Error(503, "shutting_down", "the server is shutting down"),
    Error(503, "not_durable", "the document or file could not be made durable; retry"),
    Error(503, "owner_silent", "what the request names is the owner's, which does not answer now; retry"),
    Error(503, "owner_only", "another router answers this, and this one was not told where; ask it there"),
    Error(504, "deadline_exceeded", "`timeout_s` has passed"),
)
_ALWAYS = (400, 401, 405, 500)


@lru_cache(maxsize=1)
def openapi() -> Json:
    """The OpenAPI 3.1 document."""
    _, schemas = msgspec.json.schema_components(BODIES, ref_template=SCHEMA_PLACE)
    for body in BODIES:
        _describe(schemas, body)
    schemas["Error"] = _error_schema()
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "memserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def described_fields(body: type[msgspec.Struct]) -> dict[str, str]:
    """The text of each field, those of its bases first."""
    return {
        name: text
        for cls in reversed(body.__mro__)
        if issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct
        for name, text in field_docs(cls).items()
        if name in body.__struct_fields__
    }


def _describe(schemas: dict[str, Json], body: type[msgspec.Struct]) -> None:
    """Put the fields' texts into the schema, and mark as required what the parser checks after decoding."""
    schema = schemas[body.__name__]
    for name, text in described_fields(body).items():
        schema["properties"][name]["description"] = text
    checked_later = {CompletionBody: "prompt", ChatBody: "messages", MessagesBody: "messages"}
    if body in checked_later:
        schema["required"] = [*schema["required"], checked_later[body]]


def _error_schema() -> Json:
    text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _operation(operation: Operation) -> Json:
    answers: Json = {
        str(status): {"description": operation.answers, "content": _success_content(operation)}
        for status in operation.successes
    }
    for status in sorted({*_ALWAYS, *operation.errors}):
        description = "; ".join(error.when for error in ERRORS if error.status == status)
        content = {"application/json": {"schema": _reference("Error")}}
        answers[str(status)] = {"description": description, "content": content}
    described: Json = {"summary": operation.about, "responses": answers}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": about, "schema": {"type": "string"}}
            for name, about in operation.parameters
        ]
    if operation.form:
        kinds = {"file": {"type": "string", "format": "binary"}}
        fields = {name: kinds.get(name, {"type": "string"}) | {"description": text} for name, text in operation.form}
        schema = {"type": "object", "properties": fields, "required": ["file", "purpose"]}
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    if operation.body is not None:
        json_form: Json = {"schema": _reference(operation.body.__name__)}
        json_form["examples"] = {example.title: {"value": example.body} for example in operation.examples}
        described["requestBody"] = {"required": True, "content": {"application/json": json_form}}
    return described


def _reference(name: str) -> Json:
    return {"$ref": SCHEMA_PLACE.format(name=name)}


def _success_content(operation: Operation) -> Json:
    kind = "object" if operation.media_type == "application/json" else "string"
    content: Json = {operation.media_type: {"schema": {"type": kind}}}
    if operation.body in (ChatBody, CompletionBody, MessagesBody):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content
