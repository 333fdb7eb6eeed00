"""A load of multi-turn chats for the scripts here: turns of random words, answers of the model under test, in turns.

Each request sends its chat's whole history, as any chat client does. A chat that has had its last turn is followed by a
new one with other words, so that the load does not change while it is measured.

::

    chats      1 2 3 4 ... N     wait in one line for a client; behind its turn a chat goes to the end of the line
    clients    C of them         each asks one turn at a time

``N = C``: no chat ever waits. ``N > C``: the users of the other chats think meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from harness.prompts import words
from harness.rounds import median, medians, ratio

TIMEOUT_S = 600.0
REFUSED = (429, 503)


@dataclass(frozen=True, slots=True)
class Shape:
    """How long chats are; in words, which are about as many tokens."""

    turns: int
    first_words: int
    """Of the first message."""
    turn_words: int
    """Of each further message."""
    answer_tokens: int

    @property
    def longest_tokens(self) -> int:
        """About as many tokens has a chat at its end: about twelve of each message are the template's."""
        words_said = self.first_words + (self.turns - 1) * self.turn_words
        return words_said + self.turns * (self.answer_tokens + 12)


@dataclass(slots=True)
class Chat:
    """One chat and its history so far."""

    number: int
    shape: Shape
    rng: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self) -> list[dict[str, str]]:
        """The history with the next question."""
        count = self.shape.turn_words if self.messages else self.shape.first_words
        self.messages.append({"role": "user", "content": words(count, self.rng)})
        return self.messages

    def answered(self, text: str) -> bool:
        """Whether that was the last turn."""
        self.messages.append({"role": "assistant", "content": text})
        return len(self.messages) >= 2 * self.shape.turns


@dataclass(slots=True)
class Pass:
    """What one pass has seen, from its start until its last request was answered."""

    wall_s: float = 0.0
    requests: int = 0
    refused: int = 0
    """Answers that said to come again; the same request was sent again later."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reusable_tokens: int = 0
    """Of ``prompt_tokens``: those of the same chat's last request and answer, which a cache could have."""
    times_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.wall_s

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that was not computed."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def ceiling(self) -> float:
        """The hit rate of a cache that forgets nothing."""
        return self.reusable_tokens / max(1, self.prompt_tokens)


@dataclass(slots=True)
class _Window:
    """Which answers count: all but the first ``warm``, or those after ``starts_s``."""

    warm: int = 0
    requests: int | None = None
    starts_s: float = field(default_factory=time.perf_counter)
    answered: int = 0

    @property
    def limit(self) -> float:
        """Requests to be sent."""
        return float("inf") if self.requests is None else self.warm + self.requests

    def counts(self, now_s: float) -> bool:
        """Whether an answer that ends now counts; called once for each."""
        self.answered += 1
        if self.requests is not None and self.answered == self.warm:
            self.starts_s = now_s
        return self.answered > self.warm if self.requests is not None else now_s >= self.starts_s


Route = Callable[[int, Chat, int], int]
"""From the number of servers, the chat and the number of the request to a server's position."""
SHAPE = {"turns": 8, "first_words": 300, "turn_words": 60, "answer_tokens": 8}
"""Flags; see :func:`shape_of`."""
COLUMNS = {
    "setting": "{setting}", "hits": "{hit_rate:.1%}", "ceiling": "{ceiling:.1%}", "requests/s": "{rate:.2f}",
    "beside the first": "{rate_ratio:.2f}x", "request": "{request_s:.2f} s",
}  # fmt: skip


def shape_of(arguments: argparse.Namespace) -> Shape:
    """By the flags of ``SHAPE``."""
    return Shape(arguments.turns, arguments.first_words, arguments.turn_words, arguments.answer_tokens)


def rows_of(passes: dict[str, list[Pass]]) -> list[dict[str, Any]]:
    """A row for each setting: medians of its rounds, and requests/s beside the first setting's, round by round."""
    base = [load_pass.rate for load_pass in next(iter(passes.values()))]
    rows = []
    for setting, setting_passes in passes.items():
        fields = medians(
            [
                {name: getattr(load_pass, name) for name in ("hit_rate", "ceiling", "rate")}
                for load_pass in setting_passes
            ]
        )
        fields["request_s"] = median([spent_s for load_pass in setting_passes for spent_s in load_pass.times_s])
        fields["rate_ratio"] = ratio([load_pass.rate for load_pass in setting_passes], base)
        rows.append(
            {
                "setting": setting,
                **fields,
                "passes": [(load_pass.hit_rate, load_pass.rate) for load_pass in setting_passes],
            }
        )
    return rows


class Load:
    """Chats against one server, or against several that know nothing of each other."""

    def __init__(self, shape: Shape, chats: int, clients: int, seed: int) -> None:
        self._shape, self._clients, self._seed, self._made = shape, min(chats, clients), seed, 0
        self._line: deque[Chat] = deque(self._new() for _ in range(chats))
        self._ends: dict[int, int] = {}  # tokens of each chat at the end of its last answer

    def _new(self) -> Chat:
        self._made += 1
        return Chat(self._made, self._shape, random.Random(f"{self._seed} {self._made}"))

    def run(self, urls: list[str], route: Route, *, requests: int, warm: int = 0) -> Pass:
        """``warm`` requests that do not count, then ``requests`` that do."""
        return asyncio.run(self._run(urls, route, Pass(), _Window(warm, requests), None))

    def run_for(self, url: str, seconds: float, warm_s: float) -> Pass:
        """For ``warm_s`` seconds, and for another ``seconds`` that count. What is under way at the end is cancelled."""
        window = _Window(starts_s=time.perf_counter() + warm_s)
        return asyncio.run(self._run([url], first, Pass(), window, warm_s + seconds))

    async def _run(
        self, urls: list[str], route: Route, load_pass: Pass, window: _Window, limit_s: float | None
    ) -> Pass:
        numbers = itertools.count()
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
            loops = [self._client(client, urls, route, numbers, window, load_pass) for _ in range(self._clients)]
            tasks = [asyncio.create_task(work) for work in loops]
            finished, late = await asyncio.wait(tasks, timeout=limit_s)
            load_pass.wall_s = time.perf_counter() - window.starts_s
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for task in finished:
                task.result()  # a client that failed ends the run
        return load_pass

    async def _client(
        self, client: httpx.AsyncClient, urls: list[str], route: Route, numbers: Iterator[int], window: _Window,
        load_pass: Pass,
    ) -> None:  # fmt: skip
        while (number := next(numbers)) < window.limit:
            chat = self._line.popleft()
            begin = time.perf_counter()
            answer = await self._answer(client, urls[route(len(urls), chat, number)], chat, load_pass)
            end = time.perf_counter()
            self._count(chat, answer["usage"], end - begin, load_pass, window.counts(end))
            if chat.answered(answer["choices"][0]["message"]["content"]):
                self._ends.pop(chat.number, None)
                chat = self._new()
            self._line.append(chat)

    async def _answer(self, client: httpx.AsyncClient, url: str, chat: Chat, load_pass: Pass) -> dict[str, Any]:
        body = {"model": "x", "messages": chat.ask(), "max_tokens": chat.shape.answer_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "prompt_cache_key": f"{self._seed}-{chat.number}"}
        while True:
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            if answer.status_code not in REFUSED:
                answer.raise_for_status()
                return dict(answer.json())
            load_pass.refused += 1
            await asyncio.sleep(float(answer.headers.get("retry-after", 1.0)))

    def _count(self, chat: Chat, usage: dict[str, Any], spent_s: float, load_pass: Pass, counts: bool) -> None:
        reusable = self._ends.get(chat.number, 0)
        self._ends[chat.number] = usage["total_tokens"]
        if counts:
            load_pass.requests += 1
            load_pass.prompt_tokens += usage["prompt_tokens"]
            load_pass.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            load_pass.reusable_tokens += reusable
            load_pass.times_s.append(spent_s)


def sticky(servers: int, chat: Chat, number: int) -> int:
    """Each chat at one of the servers."""
    return chat.number % servers


def in_turn(servers: int, chat: Chat, number: int) -> int:
    """Each request at the next server."""
    return number % servers


def first(servers: int, chat: Chat, number: int) -> int:
    """The only server."""
    return 0
