"""Requests that their client may ask for again: ``Idempotency-Key`` and ``Last-Event-ID``.

Equal requests with one key get equal answers: seed, ids and the time of the answer follow from key and body, and a
stream has one event per token. So an event's id is its place in the stream: for each of the choices the number of its
events so far, joined by dots (``17``, with ``n`` 2 ``9.8``); events behind those of all choices have one number more.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs
from starlette.types import Scope

from memserve.api.http.errors import bad_request
from memserve.api.http.limits import TENANT_KEY, header
from memserve.api.openai.request.plan import Generation
from memserve.base.types import TokenOutput

KEY_HEADER = "idempotency-key"
EVENT_HEADER = "last-event-id"
KEY_CHARS_MAX = 255
_EVENT_ID_CHARS_MAX = 16_384


def _digest(*parts: bytes) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


@dataclass(frozen=True, slots=True)
class Key:
    """What identifies one answer."""

    name: str
    """Of the client's key and its tenant: other tenants' keys are others."""
    request_digest: str
    """Of all that was asked with it."""
    created_s: int
    last_event: str | None
    """Id of the last event that the client has; ``None``: it wants the whole answer."""

    @property
    def seed(self) -> int:
        """For requests that name none."""
        return int(_digest(b"seed", self.name.encode(), self.request_digest.encode()), 16) >> 65

    @property
    def response_id(self) -> str:
        """Without the prefix of the endpoint."""
        return _digest(b"id", self.name.encode(), self.request_digest.encode())

    def apply_to(self, plan: Generation) -> Generation:
        """``plan`` with requests that carry the key. Raises :class:`ApiError` 400 for a ``Last-Event-ID`` that is of
        no event of such an answer."""
        if self.last_event is not None and not plan.stream:
            raise bad_request("Last-Event-ID is for streams: leave it out, or ask with stream true", EVENT_HEADER)
        requests = [
            structs.replace(request, key=f"{self.name}-{index}", asked=self.request_digest, created_s=self.created_s)
            for index, request in enumerate(plan.requests)
        ]
        keyed = structs.replace(plan, requests=requests, is_keyed=True, last_event=self.last_event)
        EventIds(keyed)  # a wrong id is refused before anything is computed
        return keyed


def key_of(scope: Scope, endpoint: str, data: bytes) -> Key | None:
    """The key of a request with the body ``data``; ``None``: it has none. Raises :class:`ApiError` 400 for one that is
    no key, and for a ``Last-Event-ID`` without one."""
    value = header(scope, KEY_HEADER.encode())
    if value is None:
        if header(scope, EVENT_HEADER.encode()) is not None:
            raise bad_request(
                "Last-Event-ID needs an Idempotency-Key: only such streams can be continued", EVENT_HEADER
            )
        return None
    text = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    if not 0 < len(text) <= KEY_CHARS_MAX or not text.isascii() or not text.isprintable():
        message = f"an Idempotency-Key has 1 to {KEY_CHARS_MAX} printable ASCII characters: a UUID, for example"
        raise bad_request(message, KEY_HEADER)
    request_digest = _digest(b"asked", endpoint.encode(), data)
    name = _digest(b"key", scope[TENANT_KEY].encode("utf-8", "surrogatepass"), text.encode())
    return Key(name, request_digest, int(time.time()), header(scope, EVENT_HEADER.encode()))


class EventIds:
    """Numbers the events of one stream, and says which the client has had."""

    def __init__(self, plan: Generation) -> None:
        """Raises :class:`ApiError` 400 for a ``Last-Event-ID`` that is not one of such a stream."""
        choices = len(plan.prompts) * plan.n
        self._counts = [0] * (choices + 1)
        self._had = [0] * (choices + 1)
        if plan.last_event is not None:
            self._had = _read(plan.last_event, choices)

    def next_id_line(self, choice: int) -> bytes | None:
        """The line with the id of the next event of ``choice``; -1: of one behind all choices. ``None``: the client has
        it."""
        self._counts[choice] += 1
        if self._counts[choice] <= self._had[choice]:
            return None
        counts = self._counts if self._counts[-1] else self._counts[:-1]
        shown = [max(count, had) for count, had in zip(counts, self._had, strict=False)]
        return b"id: " + ".".join(map(str, shown)).encode() + b"\n"

    def check_end(self) -> None:
        """All events are counted. Raises :class:`ApiError` 400 where the client says that it has had more of them."""
        if any(had > count for had, count in zip(self._had, self._counts, strict=True)):
            raise bad_request("this Last-Event-ID is of an event behind the end of this answer", EVENT_HEADER)


def _read(text: str, choices: int) -> list[int]:
    parts = text.split(".") if len(text) <= _EVENT_ID_CHARS_MAX else []
    if not all(part.isascii() and part.isdecimal() and len(part) <= 9 for part in parts) or not (
        choices <= len(parts) <= choices + 1
    ):
        raise bad_request("this Last-Event-ID is not the id of an event of this answer", EVENT_HEADER)
    return [*map(int, parts), *[0] * (choices + 1 - len(parts))]


def split_tokens(output: TokenOutput) -> Iterator[TokenOutput]:
    """``output`` token by token: however many come together, a stream has the same events."""
    count = len(output.tokens)
    if count <= 1:
        yield output
        return
    for position in range(count):
        first, last = position == 0, position == count - 1
        yield TokenOutput(
            output.request_id,
            output.index,
            output.tokens[position : position + 1],
            logprobs=output.logprobs[position : position + 1],
            finish_reason=output.finish_reason if last else None,
            error=output.error if last else "",
            cached_tokens=output.cached_tokens if first else 0,
            inexact_tokens=output.inexact_tokens if first else 0,
            prompt_logprobs=output.prompt_logprobs if first else None,
            cumulative_logprob=output.cumulative_logprob,
            queue_ns=output.queue_ns if first else None,
            story=output.story if first else (),
            offset=output.offset + position,
        )
