"""The load of ``fleet.py``: a trace with its block hashes, multi-turn chats; the client; what could be hit at best."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from harness.clients import Answer, astream
from harness.prompts import WORDS, words
from harness.served import BLOCK

MODEL = "fleet"
"""The name under which the servers are asked."""
TRACE_BLOCK = 512
"""Tokens behind one hash of a Mooncake trace; here they are :data:`BLOCK`, and all other lengths shrink alike."""


@dataclass
class Tally:
    """What one way of routing has shown."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attainable_tokens: int = 0
    errors: int = 0
    seconds: float = 0.0


class Where:
    """The servers or the router to which requests go."""

    def __init__(self, urls: list[str], *, least_load: bool = False) -> None:
        self._turn = itertools.cycle(urls)
        self._open = dict.fromkeys(urls, 0)
        self._least_load = least_load

    @contextmanager
    def next(self) -> Iterator[str]:
        """The address for one request, in turns or where the fewest are open."""
        url = next(self._turn)
        if self._least_load:
            url = min(self._open, key=lambda rival: (self._open[rival], rival != url))
        self._open[url] += 1
        try:
            yield url
        finally:
            self._open[url] -= 1


async def ask(client: httpx.AsyncClient, target: Where, path: str, body: dict[str, Any], tally: Tally) -> Answer:
    """One request, streamed; an error is counted."""
    with target.next() as url:
        answer = await astream(client, url + path, {**body, "model": MODEL, "temperature": 0, "ignore_eos": True})
    if answer.status != 200 or answer.error:
        tally.errors += 1
    else:
        tally.ttft_s += answer.times_s[:1]
        tally.prompt_tokens += answer.usage.get("prompt_tokens", 0)
        tally.cached_tokens += answer.cached
    return answer


# -- a trace


@dataclass(frozen=True)
class Call:
    """One request of a trace, scaled."""

    at_s: float
    words: list[str]
    """A token each."""
    output_tokens: int


def _rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _conversations(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows that share a block beyond the first, which all conversations share."""
    parent: dict[int, int] = {}

    def root(item: int) -> int:
        while parent.setdefault(item, item) != item:
            parent[item] = item = parent[parent[item]]
        return item

    for row in rows:
        for block in row["hash_ids"][2:]:
            parent[root(block)] = root(row["hash_ids"][1])
    results: dict[int, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        results.setdefault(root(row["hash_ids"][1]) if len(row["hash_ids"]) > 1 else -number - 1, []).append(row)
    return list(results.values())


def trace(path: Path, requests: int, rate: float, tokens_max: int, seed: int) -> list[Call]:
    """About so many requests: whole conversations, drawn; their times compressed to ``rate`` requests a second."""
    draw = random.Random(seed)
    scale = BLOCK / TRACE_BLOCK
    limit = (tokens_max - 256) / scale
    chats_drawn = [item for item in _conversations(_rows(path)) if all(row["input_length"] < limit for row in item)]
    draw.shuffle(chats_drawn)
    rows: list[dict[str, Any]] = []
    for conversation in chats_drawn:
        if len(rows) >= requests:
            break
        rows += conversation
    rows.sort(key=lambda row: row["timestamp"])
    first, last = rows[0]["timestamp"], rows[-1]["timestamp"]
    pace = len(rows) / rate / max(1, last - first)

    def words(row: dict[str, Any]) -> list[str]:
        blocks = [_block(seed, block) for block in row["hash_ids"]]
        return list(itertools.chain.from_iterable(blocks))[: max(1, round(row["input_length"] * scale))]

    return [
        Call((row["timestamp"] - first) * pace, words(row), max(1, round(row["output_length"] * scale))) for row in rows
    ]


def _block(seed: int, number: int) -> list[str]:
    return random.Random(f"{seed}.{number}").choices(WORDS, k=BLOCK)


async def run_trace(target: Where, calls: list[Call], tally: Tally) -> None:
    """Each request at its time."""
    begin = time.perf_counter()
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:

        async def send(call: Call) -> None:
            await asyncio.sleep(max(0.0, call.at_s - (time.perf_counter() - begin)))
            prompt = "".join(f" {word}" for word in call.words)
            await ask(client, target, "/v1/completions", {"prompt": prompt, "max_tokens": call.output_tokens}, tally)

        await asyncio.gather(*map(send, calls))
    tally.seconds += time.perf_counter() - begin


def ceilings(calls: list[Call], blocks_total: int) -> tuple[float, float]:
    """Share of prompt tokens that a single cache would have had: one that forgets nothing; one as large as those of all
    servers together, which forgets what was used least recently."""
    return _hit_share(calls, None), _hit_share(calls, blocks_total)


def _hit_share(calls: list[Call], blocks_max: int | None) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    results = total = 0
    for call in calls:
        names, name = [], 0
        for place in range(0, len(call.words) // BLOCK * BLOCK, BLOCK):
            name = hash((name, tuple(call.words[place : place + BLOCK])))
            names.append(name)
        usable = names[: (len(call.words) - 1) // BLOCK]  # one token at least is computed
        hits = len(list(itertools.takewhile(cache.__contains__, usable)))
        results, total = results + hits * BLOCK, total + len(call.words)
        for item in reversed(names):
            cache[item] = None
            cache.move_to_end(item)
        while blocks_max is not None and len(cache) > blocks_max:
            cache.popitem(last=False)
    return results / max(1, total)


# -- chats


def questions(seed: int, chats: int, turns: int, count: int) -> list[list[str]]:
    """What the users say, a list for each chat."""
    draw = random.Random(seed)
    return [[f"{seed}.{chat}.{turn}: {words(count, draw)}" for turn in range(turns)] for chat in range(chats)]


async def run_chats(target: Where, chats: list[list[str]], clients: int, tally: Tally) -> None:
    """All chats, ``clients`` requests at a time; a chat's next question comes behind all that wait."""
    free, begin = asyncio.Semaphore(clients), time.perf_counter()
    async with httpx.AsyncClient(timeout=300) as client:

        async def play(chat_questions: list[str]) -> None:
            messages: list[dict[str, str]] = []
            known_tokens = 0
            for question in chat_questions:
                messages.append({"role": "user", "content": question})
                async with free:
                    body = {"messages": messages, "max_tokens": 24}
                    answer = await ask(client, target, "/v1/chat/completions", body, tally)
                prompt_tokens = answer.usage.get("prompt_tokens", 0)
                tally.attainable_tokens += min(known_tokens, prompt_tokens - 1) // BLOCK * BLOCK
                known_tokens = prompt_tokens + answer.usage.get("completion_tokens", 0) - 1
                messages.append({"role": "assistant", "content": answer.text})

        await asyncio.gather(*map(play, chats))
    tally.seconds += time.perf_counter() - begin


Load = Callable[[Where, int, Tally], Any]
"""One pass with this number: a coroutine."""
