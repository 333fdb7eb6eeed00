"""Documents that outlive the router (level 4, row C1): what was acknowledged is there again after a crash."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import numpy as np

from memserve.api.documents import Document, Documents
from memserve.api.errors import ApiError
from memserve.api.messages import Messages
from memserve.api.prompts import Prompt
from memserve.api.served import RememberingEngine, ServingEngine
from memserve.metadata import DocumentDropped, DocumentPut
from memserve.units import ns_from_s


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A document's body in the metadata."""

    endpoint: str
    messages: Messages
    prompt_tokens: bytes
    prompt_text: str | None
    tokens: bytes
    created_s: int
    ttl_s: float


class DocumentMemory:
    """Makes documents durable, and brings back those of the last router. Without metadata it does nothing."""

    def __init__(self, engine: ServingEngine, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._engine = engine if isinstance(engine, RememberingEngine) else None
        self._clock_ns = clock_ns

    def restore(self, documents: Documents) -> None:
        """What the last router knew and has not expired. Their pins are the cluster's affair."""
        if self._engine is None:
            return
        now_ns = self._clock_ns()
        for record in self._engine.documents():
            left_ns = record.expires_unix_ns - now_ns
            if left_ns > 0:
                kept = msgspec.msgpack.decode(record.body, type=_Kept)
                documents.restore(record.tenant, _document(record.document_id, kept), left_ns)
            else:  # nobody waits for that
                self._engine.remember(DocumentDropped(record.tenant, record.document_id))

    async def put(self, tenant: str, document: Document) -> None:
        """Returns when ``document`` is durable. Raises :class:`ApiError` 503 when it cannot be."""
        prompt = document.prompt
        body = _Kept(
            document.endpoint,
            document.messages,
            _bytes_of(prompt),
            prompt.text,
            _bytes_of(Prompt(document.tokens)),
            document.created_s,
            document.ttl_s,
        )
        expires_ns = self._clock_ns() + ns_from_s(document.ttl_s)
        await self._keep(DocumentPut(tenant, document.document_id, msgspec.msgpack.encode(body), expires_ns))

    async def drop(self, tenant: str, document_id: str) -> None:
        """Returns when it is durable that there is no such document. Raises :class:`ApiError` 503."""
        await self._keep(DocumentDropped(tenant, document_id))

    async def _keep(self, record: DocumentPut | DocumentDropped) -> None:
        if self._engine is not None and not await asyncio.wrap_future(self._engine.remember(record)):
            message = "The server cannot remember that now: its metadata cannot be written"
            raise ApiError(503, message, kind="server_error", code="not_durable", headers={"retry-after": "5"})


def _bytes_of(prompt: Prompt) -> bytes:
    return prompt.tokens.astype("<i4", copy=False).tobytes()


def _document(document_id: str, kept: _Kept) -> Document:
    prompt, tokens = (np.frombuffer(data, "<i4").astype(np.int32) for data in (kept.prompt_tokens, kept.tokens))
    return Document(
        document_id,
        kept.endpoint,
        kept.messages,
        Prompt(prompt, kept.prompt_text),
        tokens,
        kept.created_s,
        kept.ttl_s,
    )
