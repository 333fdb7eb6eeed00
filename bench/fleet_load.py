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

BLOCK = 32
TRACE_BLOCK = 512
"""Tokens behind one hash of a Mooncake trace; here they are :data:`BLOCK`, and all other lengths shrink alike."""
_TEXT = """river stone light garden market winter engine paper bridge silver forest table music letter window summer
doctor teacher history number island mountain village train station animal picture story question answer road city
country school family water fire earth wind money house door floor wall king queen army ship horse bird fish tree leaf
flower seed fruit bread milk salt sugar glass iron gold cotton"""
WORDS = tuple(_TEXT.split())
"""Each is one token of SmolLM2 behind a space. Prompts are text, because some routers take no tokens."""


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
            url = min(self._open, key=lambda one: (self._open[one], one != url))
        self._open[url] += 1
        try:
            yield url
        finally:
            self._open[url] -= 1


@dataclass
class Asked:
    """What one answer was: its text, and its usage."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def ask(client: httpx.AsyncClient, where: Where, path: str, body: dict[str, Any], tally: Tally) -> Asked:
    """One request, streamed; an error is counted."""
    body = {**body, "stream": True, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    answer, first_s, begin = Asked(), None, time.perf_counter()
    try:
        with where.next() as url:
            async with client.stream("POST", url + path, json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    for choice in event["choices"]:
                        piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                        if first_s is None and (piece or choice.get("finish_reason")):
                            first_s = time.perf_counter() - begin
                        answer.text += piece
                    if usage := event.get("usage"):
                        answer.prompt_tokens, answer.completion_tokens = (
                            usage["prompt_tokens"],
                            usage["completion_tokens"],
                        )
                        tally.prompt_tokens += usage["prompt_tokens"]
                        tally.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (httpx.HTTPError, KeyError, json.JSONDecodeError):
        tally.errors += 1
    else:
        tally.ttft_s += [first_s] if first_s is not None else []
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

    def root(one: int) -> int:
        while parent.setdefault(one, one) != one:
            parent[one] = one = parent[parent[one]]
        return one

    for row in rows:
        for block in row["hash_ids"][2:]:
            parent[root(block)] = root(row["hash_ids"][1])
    found: dict[int, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        found.setdefault(root(row["hash_ids"][1]) if len(row["hash_ids"]) > 1 else -number - 1, []).append(row)
    return list(found.values())


def trace(path: Path, requests: int, rate: float, tokens_max: int, seed: int) -> list[Call]:
    """About so many requests: whole conversations, drawn; their times compressed to ``rate`` requests a second."""
    draw = random.Random(seed)
    scale = BLOCK / TRACE_BLOCK
    limit = (tokens_max - 256) / scale
    drawn = [one for one in _conversations(_rows(path)) if all(row["input_length"] < limit for row in one)]
    draw.shuffle(drawn)
    rows: list[dict[str, Any]] = []
    for conversation in drawn:
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


async def run_trace(where: Where, model: str, calls: list[Call], tally: Tally) -> None:
    """Each request at its time."""
    begin = time.perf_counter()
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:

        async def one(call: Call) -> None:
            await asyncio.sleep(max(0.0, call.at_s - (time.perf_counter() - begin)))
            prompt = "".join(f" {word}" for word in call.words)
            body = {"model": model, "prompt": prompt, "max_tokens": call.output_tokens}
            await ask(client, where, "/v1/completions", body, tally)

        await asyncio.gather(*(one(call) for call in calls))
    tally.seconds += time.perf_counter() - begin


def ceilings(calls: list[Call], blocks_total: int) -> tuple[float, float]:
    """Share of prompt tokens that a single cache would have had: one that forgets nothing; one as large as those of all
    servers together, which forgets what was used least recently."""
    return _hit_share(calls, None), _hit_share(calls, blocks_total)


def _hit_share(calls: list[Call], blocks_max: int | None) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for call in calls:
        names, name = [], 0
        for at in range(0, len(call.words) // BLOCK * BLOCK, BLOCK):
            name = hash((name, tuple(call.words[at : at + BLOCK])))
            names.append(name)
        usable = names[: (len(call.words) - 1) // BLOCK]  # one token at least is computed
        hits = len(list(itertools.takewhile(cache.__contains__, usable)))
        found, total = found + hits * BLOCK, total + len(call.words)
        for one in reversed(names):
            cache[one] = None
            cache.move_to_end(one)
        while blocks_max is not None and len(cache) > blocks_max:
            cache.popitem(last=False)
    return found / max(1, total)


# -- chats


def questions(seed: int, chats: int, turns: int, words: int) -> list[list[str]]:
    """What the users say, a list for each chat."""
    draw = random.Random(seed)
    return [
        [f"{seed}.{chat}.{turn}: " + " ".join(draw.choices(WORDS, k=words)) for turn in range(turns)]
        for chat in range(chats)
    ]


async def run_chats(where: Where, model: str, asked: list[list[str]], clients: int, tally: Tally) -> None:
    """All chats, ``clients`` requests at a time; a chat's next question comes behind all that wait."""
    free, begin = asyncio.Semaphore(clients), time.perf_counter()
    async with httpx.AsyncClient(timeout=300) as client:

        async def chat(said: list[str]) -> None:
            messages: list[dict[str, str]] = []
            known = 0
            for question in said:
                messages.append({"role": "user", "content": question})
                body = {"model": model, "messages": messages, "max_tokens": 24}
                async with free:
                    answer = await ask(client, where, "/v1/chat/completions", body, tally)
                tally.attainable_tokens += min(known, answer.prompt_tokens - 1) // BLOCK * BLOCK
                known = answer.prompt_tokens + answer.completion_tokens - 1
                messages.append({"role": "assistant", "content": answer.text})

        await asyncio.gather(*(chat(said) for said in asked))
    tally.seconds += time.perf_counter() - begin


Load = Callable[[Where, int, Tally], Any]
"""One pass with this number: a coroutine."""
