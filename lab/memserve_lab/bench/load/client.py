"""One streamed request over HTTP, timed.

aiohttp, because of measurements: at 2,000 requests/s against a server that answers at once, a request costs about
0.17 ms of CPU with aiohttp; with httpx 6 ms, and even 200 requests/s are too many.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from memserve.base.errors import UserError
from memserve_lab.bench.load.prompts import Outcome, RequestRecord

if TYPE_CHECKING:
    import aiohttp


DONE = b"[DONE]"


class PromptDetails(msgspec.Struct, frozen=True):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    """The new text of a chat chunk; thinking models send part of it as reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk of either endpoint."""

    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None

    @property
    def news(self) -> str:
        """Generated text."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def spoken(self) -> str:
        """The part of the text that belongs in the chat's history, without reasoning."""
        return (self.text if self.delta is None else self.delta.content) or ""


class Chunk(msgspec.Struct, frozen=True):
    """One event; unknown fields are ignored."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    memserve: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class EventReader:
    """Splits a byte stream into events, however the network split it."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False
        """``[DONE]`` was seen."""

    def read_events(self, data: bytes) -> Iterator[Chunk]:
        """The events that ``data`` completes. Raises ``msgspec.DecodeError`` for anything but JSON of this shape."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):  # blank lines, comments (": ping"), event names
                continue
            payload = line[5:].strip()
            if payload == DONE:
                self.done = True
            elif payload:
                yield _decode(payload)


ERROR_CHARS_MAX = 300
CONNECT_S_MAX = 30.0
PROBE_S_MAX = 2.0
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Target:
    """A server."""

    base_url: str
    """With or without the final ``/v1``."""
    api_key: str | None = None
    timeout_s: float | None = None
    """Longest time of a request. None: no limit."""
    headers: dict[str, str] = field(default_factory=dict)

    def url_of(self, path: str) -> str:
        """For example ``http://127.0.0.1:8000/v1/completions``."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/{path}"


class Clock:
    """Nanoseconds since the run began."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns


def require_aiohttp() -> None:
    """Raise :class:`UserError` when the client's library is not installed."""
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError("the load client needs aiohttp, which is not installed", hint="pip install 'memserve[bench]'")


class Client:
    """Connections to one server, as many as there are requests under way. An asynchronous context manager."""

    def __init__(self, target: Target, clock: Clock) -> None:
        require_aiohttp()
        self._target, self._clock = target, clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        headers = {"content-type": "application/json", "x-memserve-explain": "1", **self._target.headers}
        if self._target.api_key is not None:
            headers["authorization"] = f"Bearer {self._target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s, sock_connect=CONNECT_S_MAX),
            headers=headers,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self._http.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client as a context manager"
        return self._session

    async def fetch_model(self) -> str:
        """The first model that the server names. Raises :class:`UserError` when it cannot be asked."""
        import aiohttp

        url = self._target.url_of("models")
        try:
            async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=CONNECT_S_MAX)) as response:
                body = await response.read()
                if response.status == 200:
                    return str(msgspec.json.decode(body)["data"][0]["id"])
                problem = f"answers {response.status} {_shortened(body)}"
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            problem = f"cannot be reached: {error or type(error).__name__}"
        except (msgspec.DecodeError, LookupError, TypeError):
            problem = "does not answer like an OpenAI-compatible server"
        raise UserError(f"{url} {problem}", hint="give the server's address, e.g. --base-url http://127.0.0.1:8000")

    async def is_alive(self) -> bool:
        """Whether a server answers HTTP there."""
        import aiohttp

        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_S_MAX)
            async with self._http.get(self._target.url_of("models"), timeout=timeout):
                return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def send_request(self, path: str, data: bytes, record: RequestRecord) -> str:
        """Send ``data``, fill ``record`` as the answer streams in, and return the answer's text.

        A failure is an outcome of the record, not an exception; a cancelled request's outcome is ``stopped``.
        """
        import aiohttp

        answer = _Answer(record, self._clock)
        record.sent_ns = self._clock.now_ns()
        try:
            async with self._http.post(self._target.url_of(path), data=data) as response:
                record.http_status = response.status
                if response.status != 200:
                    answer.fail_request(Outcome.REFUSED, _shortened(await response.read()))
                else:
                    async for piece in response.content.iter_any():
                        answer.take_bytes(piece)
                    answer.end_answer()
        except TimeoutError:
            answer.fail_request(Outcome.TIMEOUT, f"not complete within {self._target.timeout_s} s")
        except (aiohttp.ClientError, OSError) as error:
            answer.fail_request(Outcome.BROKEN, f"{type(error).__name__}: {error}")
        except (msgspec.DecodeError, ValueError) as error:
            answer.fail_request(Outcome.BROKEN, f"not an event stream of this API: {error}")
        except asyncio.CancelledError:
            answer.fail_request(Outcome.STOPPED, "the run was ended")
            raise
        return answer.text


def first_model(target: Target) -> str:
    """The first model that the server names. Raises :class:`UserError` when the server cannot be asked."""

    async def ask() -> str:
        async with Client(target, Clock()) as client:
            return await client.fetch_model()

    return asyncio.run(ask())


class _Answer:
    """Reads an event stream into a record."""

    def __init__(self, record: RequestRecord, clock: Clock) -> None:
        self._record, self._clock = record, clock
        self._events = EventReader()
        self._spoken: list[str] = []
        self._finished = False
        self._error: Any = None
        record.token_ns = []

    @property
    def text(self) -> str:
        return "".join(self._spoken)

    def take_bytes(self, piece: bytes) -> None:
        """Bytes arrived now."""
        now_ns = self._clock.now_ns()
        for chunk in self._events.read_events(piece):
            self._note_chunk(chunk, now_ns)

    def _note_chunk(self, chunk: Chunk, now_ns: int) -> None:
        record = self._record
        for choice in chunk.choices:
            if choice.news:
                record.token_ns.append(now_ns)
                self._spoken.append(choice.spoken)
            self._finished = self._finished or choice.finish_reason is not None
            if record.first_ns is None and (choice.news or choice.finish_reason):  # an answer without text ends at once
                record.first_ns = now_ns
        if (usage := chunk.usage) is not None:
            record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens or 0
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if chunk.memserve is not None:
            facts = _facts(chunk.memserve)
            record.instance = str(facts.get("route", [""])[-1])
            record.fetched_tokens = sum(count for count in facts.get("fetched_tokens", ()) if isinstance(count, int))
        if chunk.error is not None:
            self._error = chunk.error

    def end_answer(self) -> None:
        """The stream ended, well or not."""
        if self._error is not None:
            self.fail_request(Outcome.REFUSED, _shortened(_encode(self._error)))
        elif not self._finished and not self._events.done:
            self.fail_request(Outcome.BROKEN, "the stream broke off")
        else:
            self._record.end_ns = self._clock.now_ns()
            self._record.outcome = Outcome.OK
            self._record.output_tokens = self._record.output_tokens or len(self._record.token_ns)

    def fail_request(self, outcome: Outcome, error: str) -> None:
        """The request ended without an answer."""
        self._record.end_ns = self._clock.now_ns()
        self._record.outcome, self._record.error = outcome, error[:ERROR_CHARS_MAX]


def _facts(explanation: dict[str, Any]) -> dict[str, list[Any]]:
    """Fact -> its values in the explanation, in order."""
    facts: dict[str, list[Any]] = {}
    for fact in explanation.get("story") or ():
        facts.setdefault(str(fact.get("fact")), []).append(fact.get("value"))
    return facts


def _shortened(body: bytes) -> str:
    return body.decode("utf-8", "replace").strip()[:ERROR_CHARS_MAX]
