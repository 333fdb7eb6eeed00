"""Requests over HTTP, and what came of them; closed loops. The client shares the machine, so it does little.

Open loops, with arrivals, SLOs and sessions, are those of ``memserve_lab.bench.load``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import httpx

Json = dict[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")
TIMEOUT_S = 600.0
EVENT = "data: {"


@dataclass
class Answer:
    """What one request has brought; times in seconds since it was sent."""

    status: int = 0
    text: str = ""
    tokens: list[Any] = field(default_factory=list)
    """Where they were asked for: ids of ``return_token_ids``, or texts of ``logprobs``."""
    gaps: list[float] = field(default_factory=list)
    """Between the log probabilities of the two best tokens, one for each, where ``logprobs`` were asked for."""
    logprobs: Json = field(default_factory=dict)
    """Of the last part that had any."""
    times_s: list[float] = field(default_factory=list)
    """Of the events with text or tokens, in a stream."""
    total_s: float = 0.0
    usage: Json = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """Of each choice that has come to its end."""
    error: str = ""
    is_whole: bool = False
    """A stream's last event has come."""

    @property
    def first_s(self) -> float:
        """To the first token."""
        return self.times_s[0] if self.times_s else self.total_s

    @property
    def steps_s(self) -> list[float]:
        """Between tokens."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]

    @property
    def finish_reason(self) -> str:
        """Of the first choice."""
        return self.finish_reasons.get(0, "")

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were cached."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def take(self, line: str, now_s: float) -> None:
        """A line of a stream."""
        self.is_whole = self.is_whole or line == "data: [DONE]"
        if line.startswith(EVENT):
            self.read(json.loads(line[6:]), now_s)

    def read(self, part: Json, now_s: float = 0.0) -> None:
        """A part of a stream, or a whole answer."""
        if part.get("error"):
            self.error = self.error or str(part["error"])
            return
        self.usage = part.get("usage") or self.usage
        for choice in part.get("choices", []):
            news = choice.get("delta") or choice.get("message") or choice
            text, tokens = news.get("text") or news.get("content") or "", choice.get("token_ids") or []
            self.text += text
            self.tokens += tokens
            self.logprobs = choice.get("logprobs") or self.logprobs
            self.gaps += _gaps(choice.get("logprobs") or {})
            if choice.get("finish_reason"):
                self.finish_reasons[choice.get("index", 0)] = choice["finish_reason"]
            if text or tokens or (self.finish_reasons and not self.times_s):
                self.times_s.append(now_s)

    def checked(self) -> Answer:
        """Itself. Raises ``RuntimeError`` where the answer is an error, or broke off."""
        if self.status != 200 or self.error or not self.is_whole:
            raise RuntimeError(f"{self.status}: {self.error[:300] or 'the stream broke off'}")
        return self


def _gaps(logprobs: Json) -> list[float]:
    tops = [list(top.values()) for top in logprobs.get("top_logprobs") or []]
    tops += [[item["logprob"] for item in token["top_logprobs"]] for token in logprobs.get("content") or []]
    best = (sorted(top, reverse=True)[:2] for top in tops)
    return [two[0] - two[1] if len(two) > 1 else 0.0 for two in best]


def stream(
    url: str, body: Json, path: str = "/v1/completions", *, client: httpx.Client | None = None,
    headers: dict[str, str] | None = None, timeout: Any = TIMEOUT_S, on_event: Callable[[Answer], object] | None = None,
) -> Answer:  # fmt: skip
    """One streamed request, with usage. What goes wrong stands in the answer. ``on_event`` that returns True leaves."""
    body = {"stream_options": {"include_usage": True}} | body | {"stream": True}
    answer, begin = Answer(), time.perf_counter()
    try:
        with (client or httpx).stream("POST", url + path, json=body, headers=headers, timeout=timeout) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = response.read().decode(errors="replace")
            for line in response.iter_lines() if response.status_code == 200 else ():
                answer.take(line, time.perf_counter() - begin)
                if on_event is not None and line.startswith(EVENT) and on_event(answer):
                    break
    except httpx.HTTPError as error:
        answer.error = repr(error)
    answer.total_s = time.perf_counter() - begin
    return answer


async def astream(client: httpx.AsyncClient, url: str, body: Json, headers: dict[str, str] | None = None) -> Answer:
    """:func:`stream` for many at once."""
    body = {"stream_options": {"include_usage": True}} | body | {"stream": True}
    answer, begin = Answer(), time.perf_counter()
    try:
        async with client.stream("POST", url, json=body, headers=headers) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")
                return answer
            async for line in response.aiter_lines():
                answer.take(line, time.perf_counter() - begin)
    except httpx.HTTPError as error:
        answer.error = repr(error)
    finally:
        answer.total_s = time.perf_counter() - begin
    return answer


def post(url: str, body: Json, path: str = "/v1/completions", *, client: httpx.Client | None = None) -> Answer:
    """One request, answered at once."""
    begin = time.perf_counter()
    response = (client or httpx).post(url + path, json=body, timeout=TIMEOUT_S)
    answer = Answer(response.status_code, total_s=time.perf_counter() - begin)
    if response.status_code == 200:
        answer.read(response.json())
        answer.is_whole = True
    else:
        answer.error = response.text
    return answer


def greedy(prompt: Any, count: int, model: str = "x", **more: Any) -> Json:
    """The body of a completion of exactly ``count`` tokens."""
    return {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True} | more


def completion(url: str, prompt: Any, count: int, *, client: httpx.Client | None = None, **more: Any) -> Answer:
    """It, streamed."""
    return stream(url, greedy(prompt, count, **more), client=client)


def ask_all(ask: Callable[[Item], Result], items: Iterable[Item], clients: int) -> list[Result]:
    """All ``items``, ``clients`` at a time, each client's next as soon as its last has ended."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, items))


@contextmanager
def meanwhile(*works: Callable[[threading.Event], object]) -> Iterator[None]:
    """Each of ``works`` in a thread of its own until the end of the block, when its event is set."""
    over = threading.Event()
    threads = [threading.Thread(target=work, args=(over,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
