"""Named prefixes of a tenant: texts and conversations that many requests begin with.

Where the engine keeps records, an acknowledged document is durable: it survives a crash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from memserve.api.http.errors import ApiError, bad_request
from memserve.api.openai.interfaces import RememberingEngine, ServedModel, ServingEngine
from memserve.api.openai.request.control_tokens import OF_CONTENT
from memserve.api.openai.request.messages import Messages, check_messages
from memserve.api.openai.request.prompts import Prompt, PromptEncoder, common_tokens, context_exceeded
from memserve.api.openai.request.schema import DocumentBody
from memserve.base.errors import UserError
from memserve.base.types import TokenArray
from memserve.base.units import NS_PER_S, ns_from_s
from memserve.base.validation import check_tokens
from memserve.protocol.records import DocumentDropped, DocumentPut

TTL_S = 3600.0
DOCUMENTS_MAX = 1024
"""Documents of one tenant."""

REPEATED_TOKENS_MAX = 1 << 20
"""Tokens that a document may add to all prompts of one request together."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document, ready to stand before a prompt or a conversation."""

    document_id: str
    endpoint: str
    """``chat`` or ``completions``: the requests that may begin with it. Only its tokens for them are cached."""
    messages: Messages
    """What a conversation begins with; a text is a system message."""
    prompt: Prompt
    """What a completion's prompt begins with."""
    tokens: TokenArray
    """The tokens that all such conversations (or prompts) begin with: those that are pinned."""
    created_s: int
    ttl_s: float
    expires_ns: int = 0
    adapter: str = ""
    """Digest of the adapter that computes it; empty: none."""
    model: str = ""
    """The name by which that was asked for."""

    @property
    def handle(self) -> str:
        """Name of the document in the engine, unique within the tenant."""
        return document_handle(self.document_id)

    def before_prompts(self, prompts: list[Prompt]) -> list[Prompt]:
        """Each of ``prompts`` behind this document. Raises :class:`ApiError` 400 for too many of them."""
        if len(prompts) * len(self.prompt.tokens) > REPEATED_TOKENS_MAX:
            most = REPEATED_TOKENS_MAX // len(self.prompt.tokens)
            raise bad_request(f"{len(prompts)} prompts behind a document of this length; the limit is {most}", "prompt")
        return [self.before_prompt(prompt) for prompt in prompts]

    def before_prompt(self, prompt: Prompt) -> Prompt:
        """``prompt`` behind this document. Tokens are joined, not texts, so the pinned ones match whatever follows."""
        text = None if prompt.text is None or self.prompt.text is None else self.prompt.text + prompt.text
        return Prompt(np.concatenate((self.prompt.tokens, prompt.tokens)), text)

    def before_messages(self, messages: Messages) -> Messages:
        """A conversation behind this document.

        Templates allow one system message, the first: when both sides have one, the conversation's is appended to it.
        """
        document_messages, chat_messages = list(self.messages), list(messages)
        if (
            len(document_messages) == 1
            and document_messages[0]["role"] == "system"
            and chat_messages
            and chat_messages[0]["role"] == "system"
        ):
            document_messages = [_joined(document_messages[0], chat_messages.pop(0)["content"])]
        return document_messages + chat_messages


def document_handle(document_id: str) -> str:
    """A document's name in the engine. Sessions have another prefix: a client's session is never a document."""
    return f"document:{document_id}"


class Documents:
    """All documents by tenant and name. Lives in the event loop; an access forgets what has expired."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._documents: dict[str, dict[str, Document]] = {}

    def put_document(self, tenant: str, document: Document, grace_s: float = 0.0) -> Document:
        """Keep ``document`` for its TTL and ``grace_s``. Raises :class:`ApiError` 400 when there are too many."""
        owned = self._live_documents(tenant)
        if document.document_id not in owned and len(owned) >= DOCUMENTS_MAX:
            raise bad_request(f"There are {len(owned)} documents already; delete one", code="too_many_documents")
        stored_document = replace(document, expires_ns=self._clock_ns() + ns_from_s(document.ttl_s + grace_s))
        owned[document.document_id] = stored_document
        return stored_document

    def restart_ttl(self, tenant: str, document: Document) -> None:
        """Restart the document's TTL now, unless the document was deleted or replaced meanwhile."""
        owned = self._documents.get(tenant, {})
        if owned.get(document.document_id) is document:
            owned[document.document_id] = replace(document, expires_ns=self._clock_ns() + ns_from_s(document.ttl_s))

    def restore_document(self, tenant: str, document: Document, remaining_ns: int) -> None:
        """Keep a document of an earlier server for the ``remaining_ns`` that remain of its TTL."""
        stored_document = replace(document, expires_ns=self._clock_ns() + remaining_ns)
        self._documents.setdefault(tenant, {})[document.document_id] = stored_document

    def get_document(self, tenant: str, document_id: str) -> Document:
        """The tenant's document. Raises :class:`ApiError` 404; other tenants' documents do not exist for it."""
        document = self._live_documents(tenant).get(document_id)
        if document is None:
            message = f"There is no document {document_id[:200]!r}: it was never put, was deleted, or has expired"
            raise ApiError(404, message, param="document", code="document_not_found")
        return document

    def has_document(self, tenant: str, document_id: str) -> bool:
        """Whether the tenant has such a document."""
        return document_id in self._live_documents(tenant)

    def delete_document(self, tenant: str, document_id: str) -> Document:
        """Forget the tenant's document. Raises :class:`ApiError` 404."""
        document = self.get_document(tenant, document_id)
        del self._documents[tenant][document_id]
        return document

    def list_documents(self, tenant: str) -> list[Document]:
        """The tenant's documents, oldest first."""
        return list(self._live_documents(tenant).values())

    def expires_in_s(self, document: Document) -> float:
        """Seconds until the document expires."""
        return max(0.0, (document.expires_ns - self._clock_ns()) / NS_PER_S)

    def _live_documents(self, tenant: str) -> dict[str, Document]:
        now_ns = self._clock_ns()
        owned = self._documents.setdefault(tenant, {})  # bounded: one entry for each API key
        for document_id in [name for name, document in owned.items() if document.expires_ns <= now_ns]:
            del owned[document_id]
        return owned


def prepare_document(body: DocumentBody, document_id: str, encoder: PromptEncoder, model: ServedModel) -> Document:
    """The document that a body describes. Raises :class:`ApiError` 400 for a malformed or too long one."""
    if (body.text is None) == (body.messages is None):
        raise bad_request("a document has either 'text' or 'messages'", "text")
    messages = _messages_of(body)
    endpoint = body.endpoint or ("chat" if body.messages is not None or encoder.has_chat_template else "completions")
    if body.text is None:
        rendered = encoder.messages_prompt(messages, add_generation_prompt=False)
        prompt = Prompt(rendered.tokens, rendered.text)
    else:
        prompt = encoder.document_prompt(body.text)
    tokens = _common_prefix(messages, encoder) if endpoint == "chat" else prompt.tokens
    for ids in (tokens, prompt.tokens):
        _check_tokens(ids, encoder.vocab_size)
    if max(len(tokens), len(prompt.tokens)) + 2 > model.max_model_tokens:
        raise context_exceeded(model, f"{len(tokens)} tokens in the document, a prompt and an answer")
    ttl_s = TTL_S if body.ttl_s is None else body.ttl_s
    return Document(document_id, endpoint, messages, prompt, tokens, int(time.time()), ttl_s)


def _check_tokens(tokens: TokenArray, vocab_size: int) -> None:
    try:
        check_tokens(tokens, vocab_size, "text")
    except UserError as error:
        raise bad_request(error.message, error.param) from None


def _messages_of(body: DocumentBody) -> Messages:
    if body.messages is not None:
        return check_messages(body.messages)
    if not body.text:
        raise bad_request("'text' must not be empty", "text")
    return [{"role": "system", "content": body.text, OF_CONTENT: True}]


def _common_prefix(messages: Messages, encoder: PromptEncoder) -> TokenArray:
    """The tokens that all conversations beginning with ``messages`` share: two that differ right after are compared.

    This assumes nothing about the template, nor about how the tokenizer joins text at the boundary.
    """
    question = {"role": "user", "content": "A"}
    first = [*messages, question]
    second: Messages = [*messages, {**question, "content": "9"}]
    if len(messages) == 1 and messages[0]["role"] == "system":  # a system message of the request joins it
        second = [_joined(messages[0], "9"), question]
    first_tokens = encoder.messages_prompt(first).tokens
    second_tokens = encoder.messages_prompt(second).tokens
    return first_tokens[: common_tokens(first_tokens, second_tokens)]


def _joined(message: dict[str, Any], more: str) -> dict[str, Any]:
    return {**message, "content": f"{message['content']}\n\n{more}"}


class _StoredDocument(msgspec.Struct, frozen=True, array_like=True):
    """A document's body in the metadata."""

    endpoint: str
    messages: Messages
    prompt_tokens: bytes
    prompt_text: str | None
    tokens: bytes
    created_s: int
    ttl_s: float
    adapter: str = ""
    model: str = ""


class DocumentMemory:
    """Makes documents durable, and restores those of the last router. Without metadata it does nothing."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine if isinstance(engine, RememberingEngine) else None

    def restore_documents(self, documents: Documents) -> None:
        """Restore the last router's documents that have not expired. The cluster restores their pins."""
        if self._engine is None:
            return
        now_ns = time.time_ns()
        for record in self._engine.stored_documents():
            remaining_ns = record.expires_unix_ns - now_ns
            if remaining_ns > 0:
                body = msgspec.msgpack.decode(record.body, type=_StoredDocument)
                documents.restore_document(record.tenant, _document(record.document_id, body), remaining_ns)
            else:  # no need to wait until this is durable
                self._engine.write_record(DocumentDropped(record.tenant, record.document_id))

    async def store_document(self, tenant: str, document: Document) -> None:
        """Returns when ``document`` is durable. Raises :class:`ApiError` 503 when it cannot be."""
        prompt = document.prompt
        body = _StoredDocument(
            document.endpoint,
            document.messages,
            _bytes_of(prompt),
            prompt.text,
            _bytes_of(Prompt(document.tokens)),
            document.created_s,
            document.ttl_s,
            document.adapter,
            document.model,
        )
        expires_ns = time.time_ns() + ns_from_s(document.ttl_s)
        await self._write_record(DocumentPut(tenant, document.document_id, msgspec.msgpack.encode(body), expires_ns))

    async def drop_document(self, tenant: str, document_id: str) -> None:
        """Returns when the removal is durable. Raises :class:`ApiError` 503 when it cannot be."""
        await self._write_record(DocumentDropped(tenant, document_id))

    async def _write_record(self, record: DocumentPut | DocumentDropped) -> None:
        if self._engine is not None and not await asyncio.wrap_future(self._engine.write_record(record)):
            message = "The server cannot write its metadata now, so the change is not durable: try again"
            raise ApiError(503, message, kind="server_error", code="not_durable", headers={"retry-after": "5"})


def _bytes_of(prompt: Prompt) -> bytes:
    return prompt.tokens.astype("<i4", copy=False).tobytes()


def _document(document_id: str, body: _StoredDocument) -> Document:
    prompt, tokens = (np.frombuffer(data, "<i4").astype(np.int32) for data in (body.prompt_tokens, body.tokens))
    return Document(
        document_id, body.endpoint, body.messages, Prompt(prompt, body.prompt_text), tokens, body.created_s,
        body.ttl_s, adapter=body.adapter, model=body.model,
    )  # fmt: skip
