"""``memserve serve --engine`` in front of vLLM servers beside round robin over the same ones: multi-turn chats.

::

    python bench/fleet.py --engine vllm=http://127.0.0.1:8101,events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558 \\
        --engine vllm=http://127.0.0.1:8102

The servers run already, with ``--enable-prompt-tokens-details``. Passes take turns, each with chats of its own, so that
none finds what another left. Shown: time to the first token, share of prompt tokens that the engines had cached.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from memserve.fleet.words import read_engine
from memserve.workloads.statistics import spread_of

WORDS = ("river", "stone", "light", "garden", "market", "winter", "engine", "paper", "bridge", "silver", "forest")


class Tally:
    """What one way of routing has shown."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0


async def ask(client: httpx.AsyncClient, url: str, model: str, messages: list[dict[str, str]], tally: Tally) -> str:
    """One turn, streamed."""
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": 24, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    started, first_s, text = time.perf_counter(), None, ""
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"{url}: {event['error']}")
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and first_s is None:
                    first_s = time.perf_counter() - started
                text += piece
            if usage := event.get("usage"):
                tally.prompt_tokens += usage["prompt_tokens"]
                tally.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if first_s is not None:
        tally.ttft_s.append(first_s)
    return text


async def run_pass(urls: list[str], model: str, seed: int, args: argparse.Namespace, tally: Tally) -> None:
    """All chats, ``args.clients`` at a time; requests go over ``urls`` in turns."""
    turn, draw = itertools.cycle(urls), random.Random(seed)
    chats = [[" ".join(draw.choices(WORDS, k=args.words)) for _ in range(args.turns)] for _ in range(args.chats)]
    free = asyncio.Semaphore(args.clients)
    async with httpx.AsyncClient(timeout=300) as client:

        async def chat(questions: list[str], number: int) -> None:
            messages: list[dict[str, str]] = []
            for question in questions:
                messages.append({"role": "user", "content": f"{seed}.{number}: {question}"})
                async with free:
                    answer = await ask(client, next(turn), model, messages, tally)
                messages.append({"role": "assistant", "content": answer})

        await asyncio.gather(*(chat(questions, number) for number, questions in enumerate(chats)))


@contextmanager
def router(engines: list[str], policy: str) -> Iterator[str]:
    """``memserve serve`` on a free port; its address."""
    flags = [word for engine in engines for word in ("--engine", engine)]
    command = [sys.executable, "-m", "memserve", "serve", "--port", "0", "--policy", policy, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        print(ready.strip())
        yield ready.split(" at ")[1].strip().removesuffix("/v1")
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Measure, and print one row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", required=True, help="as memserve serve takes it")
    parser.add_argument("--policy", default="cost")
    for name, default in (("chats", 12), ("turns", 5), ("words", 60), ("clients", 3), ("passes", 2), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    urls = [read_engine(text).url for text in args.engine]
    model = httpx.get(f"{urls[0]}/v1/models", timeout=10).json()["data"][0]["id"]
    with router(args.engine, args.policy) as url:
        ways = {"round robin": urls, f"memserve ({args.policy})": [url]}
        tallies = {name: Tally() for name in ways}
        asyncio.run(
            run_pass(urls, model, 10_000 + args.seed, argparse.Namespace(**{**vars(args), "turns": 1}), Tally())
        )
        for number in range(args.passes):
            for at, (name, where) in enumerate(ways.items()):
                asyncio.run(run_pass(where, model, args.seed + 2 * number + at, args, tallies[name]))
    print("| way | requests | TTFT mean (ms) | p50 | p99 | prompt tokens cached |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, tally in tallies.items():
        seen, share = spread_of(tally.ttft_s), tally.cached_tokens / max(1, tally.prompt_tokens)
        shown = " | ".join(f"{1000 * value:.0f}" for value in (seen.mean, seen.p50, seen.p99))
        print(f"| {name} | {len(tally.ttft_s)} | {shown} | {share:.0%} |")


if __name__ == "__main__":
    main()
