"""A proxy that passes requests on as they are and notes what was asked and answered; ``field.py`` uses it.

One thing it adds: a stream whose client does not ask for ``usage`` is asked for it, and the client never sees it.

From that come two shares of the prompt tokens of any tool, whatever it reports itself: what the server says was cached
(``usage``), and the *ceiling*, what could have been: whole blocks that an earlier request had as its prefix, in its
prompt or in its answer. At least one token of a prompt is always computed. Requests for one token are how tools fill
caches first: they are noted, and not counted.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0
PASSED_ON = ("content-type", "authorization", "accept")


@dataclass
class Noted:
    """One request for text."""

    body: dict[str, Any]
    answer: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        return (self.body.get("max_tokens") or self.body.get("max_completion_tokens")) != 1

    @property
    def cached_tokens(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def hear(self, raw: bytes) -> None:
        """The whole answer, a stream of events or one object."""
        lines = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")] or [raw]
        for part in map(json.loads, lines):
            self.usage = part.get("usage") or self.usage
            for choice in part.get("choices", []):
                delta = choice.get("delta") or choice.get("message") or {}
                self.answer += choice.get("text") or delta.get("content") or ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _pass_on(self, body: bytes | None) -> None:
        note, withheld = None, False
        if body and self.path.endswith("/completions"):
            note = Noted(json.loads(body))
            self.server.notes.append(note)  # in order of arrival
            withheld = bool(note.body.get("stream")) and not note.body.get("stream_options")
            body = json.dumps({**note.body, "stream_options": {"include_usage": True}}).encode() if withheld else body
        headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED_ON}
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=TIMEOUT_S)
        try:
            upstream.request(self.command, self.path, body, headers)
            answer, data = upstream.getresponse(), bytearray()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type") or "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in _events(answer) if withheld else iter(lambda: answer.read1(1 << 16), b""):
                data += piece
                if not (withheld and b'"choices":[]' in piece.replace(b" ", b"")):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if note is not None and answer.status == 200:
                note.hear(bytes(data))  # before the client knows that it has all
            self.wfile.write(b"0\r\n\r\n")
        finally:
            upstream.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Whole events of a stream, each with the empty line behind it."""
    rest = b""
    while piece := answer.read1(1 << 16):
        *whole, rest = (rest + piece).split(b"\n\n")
        yield from (event + b"\n\n" for event in whole)
    if rest:
        yield rest


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.notes = upstream, list[Noted]()

    def handle_error(self, *_: Any) -> None:
        """A client that has all it wants closes its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()


class Recorder:
    """The proxy in front of one server."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.url = f"http://127.0.0.1:{server.server_address[1]}"

    def take(self) -> list[Noted]:
        """What came since the last call, in order of arrival."""
        notes, self._server.notes = self._server.notes, []
        return notes


@contextmanager
def recording(url: str) -> Iterator[Recorder]:
    """A proxy in front of ``url`` until the block ends."""
    server = _Server(urlsplit(url).netloc)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Recorder(server)
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Shares:
    """Of the prompt tokens of all requests that count."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attainable_tokens: int = 0

    @property
    def hits(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def ceiling(self) -> float:
        return self.attainable_tokens / max(1, self.prompt_tokens)


class Ceiling:
    """A cache that forgets nothing, over tokens as the server makes them."""

    def __init__(self, tokenizer: Any, block_tokens: int = 32) -> None:
        self._tokenizer, self._block_tokens = tokenizer, block_tokens
        self._seen: set[int] = set()

    def shares(self, notes: list[Noted]) -> Shares:
        """Of one run of a tool; what came before is remembered."""
        results = Shares()
        for note in notes:
            tokens = self._tokens(note.body, None)
            blocks = self._blocks(tokens)
            usable = (len(tokens) - 1) // self._block_tokens
            hit = next((place for place, block in enumerate(blocks[:usable]) if block not in self._seen), usable)
            self._seen.update(blocks)
            if note.answer:
                self._seen.update(self._blocks(self._tokens(note.body, note.answer)))
            if note.counts and note.usage:
                results.requests += 1
                results.prompt_tokens += note.usage["prompt_tokens"]
                results.cached_tokens += note.cached_tokens
                results.attainable_tokens += hit * self._block_tokens
        return results

    def _tokens(self, body: dict[str, Any], answer: str | None) -> list[int]:
        if "messages" in body:
            messages = [{"role": item["role"], "content": _text(item["content"])} for item in body["messages"]]
            messages += [{"role": "assistant", "content": answer}] if answer is not None else []
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=answer is None, tokenize=False)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        prompt = body["prompt"]
        token_ids = list(prompt) if isinstance(prompt, list) else list(self._tokenizer(prompt)["input_ids"])
        return token_ids + (list(self._tokenizer(answer)["input_ids"]) if answer else [])

    def _blocks(self, tokens: list[int]) -> list[int]:
        """A chain of hashes: equal numbers mean equal prefixes."""
        chain, results = 0, list[int]()
        for place in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            chain = hash((chain, *tokens[place : place + self._block_tokens]))
            results.append(chain)
        return results


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
