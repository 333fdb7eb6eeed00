"""The honest clients of ``soak.py``: their requests, and whether the answers were right."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from harness.clients import Answer, astream

ANSWER_S_MAX = 300.0
TURNED_AWAY_MAX = 60
"""A client that gets 429 retries this often, after the time in ``Retry-After``."""
RETRY_S_MAX = 5.0
PROMPT_TOKENS = (100, 5000)
SESSION_TOKENS_MAX = 1500
TOKEN_IDS = (1000, 40000)
TIE_LOGPROB = 0.35
"""A greedy answer may differ where its two best logprobs were this close: kernels change with the rows of a step, and
bfloat16 rounds to eight bits. Such differences are counted, never hidden."""
QUESTIONS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
)


@dataclass
class Tally:
    """The results so far."""

    ended: Counter[str] = field(default_factory=Counter)
    misses: list[str] = field(default_factory=list)
    turned_away: int = 0
    ties: int = 0
    compared: int = 0

    def miss(self, kind: str, text: str) -> None:
        """One request that did not end as it should have."""
        self.misses.append(f"{kind}: {text[:300]}")


@dataclass(frozen=True)
class Target:
    """The server under load, by a client that has its address and the key."""

    http: httpx.AsyncClient
    model: str
    fits_tokens: int
    """Tokens that the pool of one instance holds."""


async def call(target: Target, tally: Tally, path: str, body: Any, method: str = "POST") -> Answer:
    """Send one request, and retry when the server answers 429."""
    answer = Answer()
    for _ in range(TURNED_AWAY_MAX):
        if body and body.get("stream"):
            answer, retry_s = await astream(target.http, path, body), RETRY_S_MAX / 2
        else:
            response = await target.http.request(method, path, json=body)
            answer, retry_s = Answer(response.status_code), float(response.headers.get("retry-after", "1"))
            answer.is_whole = response.status_code < 300
            answer.read(response.json() if response.content else {})
        if answer.status != 429:
            return answer
        tally.turned_away += 1
        await asyncio.sleep(min(retry_s, RETRY_S_MAX))
    return answer


class Client:
    """One honest client: asks, judges the answer, asks again. All that it draws comes from its own seed."""

    def __init__(self, target: Target, tally: Tally, number: int, seed: int) -> None:
        self._target, self._tally, self._number = target, tally, number
        self._draw = random.Random(f"{seed}-{number}")
        self._shared = [self._tokens(200 + 100 * i, random.Random(i)) for i in range(6)]
        self._session: list[int] = []
        self._sessions = 0

    async def run(self, stop: asyncio.Event) -> None:
        kinds = [self._completion] * 6 + [self._chat, self._leave, self._leave, self._converse, self._converse]
        kinds += [self._document]
        while not stop.is_set():
            kind = self._draw.choice(kinds)
            name = kind.__name__.lstrip("_")
            try:
                await kind(name)
            except (httpx.HTTPError, ValueError) as error:
                self._tally.miss(name, f"{type(error).__name__}: {error}")

    def _tokens(self, count: int, draw: random.Random | None = None) -> list[int]:
        draw = draw or self._draw
        return [draw.randrange(*TOKEN_IDS) for _ in range(count)]

    def _prompt(self) -> list[int]:
        """A prompt of any length, short ones more often; half of them share a prefix with others."""
        low, high = PROMPT_TOKENS
        count = int(math.exp(self._draw.uniform(math.log(low), math.log(high))))
        shared = self._draw.choice(self._shared) if self._draw.random() < 0.5 else []
        return [*shared, *self._tokens(max(1, count - len(shared)))][:count]

    def _body(self, prompt: Any) -> dict[str, Any]:
        draw = self._draw
        body = {"model": self._target.model, "prompt": prompt, "max_tokens": draw.randint(1, 48)}
        body |= {"n": draw.choice((1, 1, 2)), "temperature": draw.choice((0, 0.7, 1.0)), "stream": draw.random() < 0.5}
        body["ignore_eos"] = draw.random() < 0.5
        if draw.random() < 0.2:
            body["cache_salt"] = f"salt-{self._number}-{draw.randrange(10**9)}"
        if draw.random() < 0.1:
            body["logprobs"] = draw.randint(0, 5)
        return body

    async def _completion(self, kind: str) -> None:
        body = self._body(self._prompt())
        self._judge(kind, body, await call(self._target, self._tally, "/v1/completions", body))

    async def _chat(self, kind: str) -> None:
        words = " ".join(
            self._draw.choice(("one", "two", "three", "red", "blue")) for _ in range(self._draw.randint(20, 900))
        )
        body = self._body(None) | {"messages": [{"role": "user", "content": words}]}
        body = {name: value for name, value in body.items() if name not in ("prompt", "logprobs")}
        self._judge(kind, body, await call(self._target, self._tally, "/v1/chat/completions", body))

    async def _converse(self, kind: str) -> None:
        """One more turn of a session whose KV is kept for a while."""
        if len(self._session) > SESSION_TOKENS_MAX or not self._session:
            self._session, self._sessions = [], self._sessions + 1
        self._session += self._tokens(self._draw.randint(50, 300))
        body = self._body(self._session) | {"n": 1}
        body |= {"session": f"c{self._number}-{self._sessions}", "session_ttl_s": self._draw.randint(1, 20)}
        body.pop("cache_salt", None)
        self._judge(kind, body, await call(self._target, self._tally, "/v1/completions", body))

    async def _document(self, kind: str) -> None:
        """Put a document, send one request that begins with it, and in two of three cases delete it."""
        name, is_kept = f"d{self._number}-{self._draw.randrange(10**9)}", self._draw.random() < 0.33
        text = " ".join(
            self._draw.choice(("north", "south", "east", "west")) for _ in range(self._draw.randint(50, 600))
        )
        put = {"text": text, "ttl_s": 60 if is_kept else 600, "endpoint": "completions"}
        document = await call(self._target, self._tally, f"/v1/documents/{name}", put, "PUT")
        if document.status != 201:
            self._tally.miss(kind, f"PUT gave {document.status}: {document.error}")
            return
        body = self._body("Which way?") | {"document": name}
        body.pop("cache_salt", None)
        self._judge(kind, body, await call(self._target, self._tally, "/v1/completions", body))
        if not is_kept:
            document = await call(self._target, self._tally, f"/v1/documents/{name}", None, "DELETE")
            if document.status != 200:
                self._tally.miss(kind, f"DELETE gave {document.status}: {document.error}")

    async def _leave(self, kind: str) -> None:
        """Ask, and disconnect in the middle of the answer."""
        body = self._body(self._prompt()) | {"max_tokens": 200, "ignore_eos": True}
        patience_s, leaves_at = self._draw.choice((0.05, 0.5, 2.0, 5.0)), self._draw.randint(1, 20)
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(patience_s),
                self._target.http.stream("POST", "/v1/completions", json=body) as response,
            ):
                if response.status_code >= 500:
                    self._tally.miss(kind, f"{response.status_code}: {(await response.aread())[:200]!r}")
                async for _ in response.aiter_lines():
                    leaves_at -= 1
                    if leaves_at <= 0:
                        break
        self._tally.ended["left"] += 1

    def _judge(self, kind: str, body: dict[str, Any], answer: Answer) -> None:
        """200 and complete if the request fits, 400 if it never could; in between either is right."""
        prompt = body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else 0
        fits, never = count + body["max_tokens"] + 64 <= self._target.fits_tokens, count >= self._target.fits_tokens
        if answer.status == 400 and not fits:
            self._tally.ended["refused, too long"] += 1
            return
        ends = list(answer.finish_reasons.values())
        is_whole = answer.is_whole and len(ends) == body["n"] and all(end in ("length", "stop") for end in ends)
        if answer.status != 200 or never or not is_whole:
            self._tally.miss(kind, f"{count} tokens, {answer.status}, {ends}: {answer.error}")
            return
        exact = body["max_tokens"] * body["n"]
        tokens = answer.usage.get("completion_tokens", exact)
        if fits and body["ignore_eos"] and tokens != exact:
            self._tally.miss(kind, f"{tokens} tokens instead of {exact}")
            return
        self._tally.ended[f"{kind}, {'streamed' if body['stream'] else 'whole'}"] += 1


Known = dict[str, tuple[list[str], list[dict[str, float]]]]


class Fixed:
    """Questions whose greedy answers were learned before the load."""

    def __init__(self, target: Target, tally: Tally) -> None:
        self._target, self._tally = target, tally
        self.known: Known = {}

    async def learn(self) -> None:
        """Ask each question of an idle server."""
        for question in QUESTIONS:
            if (results := await self._ask(question)) is not None:
                self.known[question] = results

    async def run(self, stop: asyncio.Event, pause_s: float) -> None:
        """Ask all of them again and again, until ``stop``."""
        while not stop.is_set():
            await self.check()
            await asyncio.sleep(pause_s)

    async def check(self) -> None:
        """Ask each again. The first token that differs must have been a tie."""
        for question, (tokens, best) in self.known.items():
            results = await self._ask(question)
            if results is None:
                continue
            self._tally.compared += 1
            differs = next(
                (i for i, pair in enumerate(zip(tokens, results[0], strict=False)) if pair[0] != pair[1]), None
            )
            if differs is None:
                continue
            ranked = sorted(best[differs].values(), reverse=True)
            if (
                results[0][differs] in best[differs]
                and len(ranked) > 1
                and ranked[0] - best[differs][results[0][differs]] <= TIE_LOGPROB
            ):
                self._tally.ties += 1
            else:
                self._tally.miss("fixed", f"{question!r} became {''.join(results[0])!r}, was {''.join(tokens)!r}")

    async def _ask(self, question: str) -> tuple[list[str], list[dict[str, float]]] | None:
        body = {"model": self._target.model, "prompt": question, "max_tokens": 16, "temperature": 0, "logprobs": 3}
        try:
            answer = await call(self._target, self._tally, "/v1/completions", body)
        except httpx.HTTPError as error:
            self._tally.miss("fixed", f"{type(error).__name__}: {error}")
            return None
        if answer.status != 200:
            self._tally.miss("fixed", f"{answer.status}: {answer.error}")
            return None
        return answer.logprobs["tokens"], answer.logprobs["top_logprobs"]
