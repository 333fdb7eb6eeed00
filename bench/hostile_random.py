"""Part of ``hostile.py``: many random requests, and their cost to a router and another client."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from urllib.parse import quote

import httpx
from harness.clients import Answer, meanwhile, post
from harness.rounds import percentile
from harness.served import Served

from hostile_grammar import Target
from hostile_storm import Storm, storm

ATTACK_KEY, HONEST_KEY, NEIGHBOUR_KEY = "attack-key", "honest-key", "neighbour-key"
KEYS = tuple(
    word
    for tenant, key in (("attack", ATTACK_KEY), ("honest", HONEST_KEY), ("neighbour", NEIGHBOUR_KEY))
    for word in ("--api-key", f"{tenant}={key}")
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PARTS = 20
CALM_REQUESTS = 25
"""Honest requests without the attack, before each part of it: so that both see the same noise of the machine."""
NEIGHBOURS = 4
"""Clients of one more tenant, which uses its half of the server while the honest client is measured beside it."""
PAUSE_S = 0.1
"""Pause between honest requests, as between a person's. Without it the honest client alone keeps the server busy."""

RSS_MIB_MAX, P99_RATIO_MAX = 100.0, 2.0
MISSES_SHOWN = 10
MIB = 1 << 20


@dataclass
class Outcome:
    """All measurements."""

    statuses: Counter[str] = field(default_factory=Counter)
    misses: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    calm_s: list[float] = field(default_factory=list)
    shared_s: list[float] = field(default_factory=list)
    attacked_s: list[float] = field(default_factory=list)
    wrong_answers: list[str] = field(default_factory=list)


class Honest:
    """A client that asks a short question again and again."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._client = httpx.Client(headers={"authorization": f"Bearer {HONEST_KEY}"}, timeout=120)
        self.right = self.ask()[0]

    def ask(self) -> tuple[str, float]:
        """The answer, and the seconds it took."""
        answer = ask(self._served, 8, self._client)
        return answer.text or f"{answer.status}: {answer.error[:200]}", answer.total_s

    def measure(self, outcome: Outcome, times: list[float]) -> None:
        """Ask once, after a pause."""
        time.sleep(PAUSE_S)
        text, spent_s = self.ask()
        times.append(spent_s)
        outcome.rss_bytes.append(self._served.memory_bytes("RssAnon"))
        if text != self.right:
            outcome.wrong_answers.append(text)

    def failed(self) -> dict[str, float]:
        """Counters of steps and rows that failed, on whatever instance."""
        kinds = ("steps_failed_total", "rows_failed_total")
        return {
            name: value for name, value in self._served.metrics().items() if value and any(k in name for k in kinds)
        }


def ask(served: Served, tokens: int, client: httpx.Client | None = None) -> Answer:
    """The greedy answer to an ordinary question."""
    body = {"model": served.model, "messages": QUESTION, "temperature": 0, "max_tokens": tokens}
    return post(served.url, body, "/v1/chat/completions", client=client)


@contextmanager
def neighbour(served: Served) -> Iterator[None]:
    """Another honest tenant meanwhile: prompts of 400 tokens, answers of 40."""

    def work(over: threading.Event, client: int) -> None:
        with httpx.Client(headers={"authorization": f"Bearer {NEIGHBOUR_KEY}"}, timeout=120) as http:
            for number in itertools.count():
                if over.is_set():
                    return
                prompt = f"{client} {number} " + "and " * 400
                body = {"model": served.model, "prompt": prompt, "max_tokens": 40}
                http.post(f"{served.url}/v1/completions", json=body)

    with meanwhile(*(partial(work, client=client) for client in range(NEIGHBOURS))):
        yield


def target_of(served: Served, vocab_size: int) -> Target:
    """The target of the grammars."""
    headers = {"authorization": f"Bearer {ATTACK_KEY}"}
    card = httpx.get(f"{served.url}/v1/models", headers=headers).json()["data"][0]
    return Target(served.model, card["max_model_len"], vocab_size, ATTACK_KEY)


def give_up_names(served: Served) -> None:
    """Delete the documents and sessions that the attack made, as their owner."""
    with httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {ATTACK_KEY}"}, timeout=60) as client:
        for kind in ("documents", "sessions"):
            for item in client.get(f"/v1/{kind}").raise_for_status().json()["data"]:
                client.delete(f"/v1/{kind}/{quote(item['id'], safe='')}")


def _part(url: str, target: Target, seed: int, numbers: range, clients: int) -> Storm:
    import asyncio

    return asyncio.run(storm(url, target, seed, numbers, clients=clients))


def attack_with(served: Served, honest: Honest, target: Target, seed: int, requests: int, clients: int) -> Outcome:
    """Run the attack in parts; before each part the honest client is measured alone and beside another honest tenant,
    during each beside the attack."""
    outcome = Outcome()
    size = -(-requests // PARTS)
    with ProcessPoolExecutor(1, get_context("spawn")) as attackers:
        for first in range(0, requests, size):
            for _ in range(CALM_REQUESTS):
                honest.measure(outcome, outcome.calm_s)
            with neighbour(served):
                for _ in range(CALM_REQUESTS):
                    honest.measure(outcome, outcome.shared_s)
            numbers = range(first, min(first + size, requests))
            part: Future[Storm] = attackers.submit(_part, served.url, target, seed, numbers, clients)
            while not part.done():
                honest.measure(outcome, outcome.attacked_s)
            outcome.statuses += part.result().statuses
            outcome.misses += part.result().misses
            print(f"  {numbers.stop:>7} sent, RssAnon {outcome.rss_bytes[-1] / MIB:.1f} MiB", flush=True)
            for miss in part.result().misses[:MISSES_SHOWN]:
                print(f"  {miss}", flush=True)
    return outcome


def p99(times: list[float]) -> float:
    return percentile(times, 0.99)


def verdicts(outcome: Outcome, honest: Honest) -> dict[str, str | None]:
    """Each requirement, with the reason if it was missed. Prints the figures."""
    start, most, end = outcome.rss_bytes[0], max(outcome.rss_bytes), outcome.rss_bytes[-1]
    grown = (most - start) / MIB
    calm, shared, attacked = p99(outcome.calm_s), p99(outcome.shared_s), p99(outcome.attacked_s)
    print(f"  answers: {dict(outcome.statuses.most_common())}")
    rss = f"{start / MIB:.1f} MiB at the start, {most / MIB:.1f} at most, {end / MIB:.1f} at the end"
    print(f"  RssAnon of the router: {rss}")
    print(
        f"  an honest client's p99: {calm * 1e3:.0f} ms alone ({len(outcome.calm_s)} requests), {attacked * 1e3:.0f} ms"
        f" beside the attack ({len(outcome.attacked_s)}): {attacked / calm:.2f} times"
    )
    print(
        f"  beside another honest tenant: {shared * 1e3:.0f} ms ({len(outcome.shared_s)}), {shared / calm:.2f} times;"
        f" the attack costs {attacked / shared:.2f} times that"
    )
    failed = honest.failed()
    wrong = outcome.wrong_answers
    return {
        "every answer is one that may be": f"{len(outcome.misses)} are not" if outcome.misses else None,
        "no step and no row failed": str(failed) if failed else None,
        f"RssAnon grows by at most {RSS_MIB_MAX:g} MiB": f"{grown:.1f} MiB" if grown > RSS_MIB_MAX else None,
        f"p99 at most {P99_RATIO_MAX:g} times": f"{attacked / calm:.2f}" if attacked > P99_RATIO_MAX * calm else None,
        "honest answers beside it are right": f"{len(wrong)} are not: {wrong[0]!r}" if wrong else None,
        "the answer afterwards is right": None if (text := honest.ask()[0]) == honest.right else repr(text),
    }
