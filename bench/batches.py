"""Batches: is each request answered once although the server is killed, and what do interactive requests notice?

    python bench/batches.py [--parts kill,ttft] [--requests 10000] [--kills 1] [--model DIR] [--dtype auto]
                            [--rounds 4] [--interactive 100] [--rate 1.0] [--prompt-tokens 128] [--json FILE]

*kill*: a batch of ``--requests`` completions; ``memserve serve`` is killed with -9 when half of them have an answer
(``--kills``: at as many points between its beginning and end) and started again. Every request must have one answer.

*ttft*: interactive requests arrive at random times at ``--rate`` a second, each with a prompt of its own; the same
times and prompts without a batch and with one that runs all the while, in turns. Shown are percentiles of the time to
the first token of all rounds together, and how many requests of the batch were answered meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import httpx
from harness.clients import completion, greedy
from harness.flags import Commas, options, save
from harness.processes import is_ready, process, wait_until
from harness.rounds import turns
from harness.tables import Table

from ports import free_port

WAIT_S = 120.0
PATH = "/v1/completions"
COLUMNS = {
    "side": "{side}", "requests": "{requests}", "p50": "{p50_ms:.0f} ms", "p90": "{p90_ms:.0f} ms",
    "p99": "{p99_ms:.0f} ms", "of the batch": "{answered}",
}  # fmt: skip


class Server:
    """``memserve serve`` with its state, which may be killed and started again."""

    def __init__(self, args: Namespace, folder: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        model = ["--model", args.model] if args.model else []
        words = ["serve", "--port", str(port), "--colocated", "1", "--served-model-name", "x", "--dtype", args.dtype]
        state = ["--metadata", f"{folder}/state", "--kv-memory", args.kv_memory, "--threads", str(args.threads)]
        self._command = [sys.executable, "-m", "memserve", *words, *state, *model]
        self._environment = {**os.environ, "XDG_STATE_HOME": folder}
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Until the block ends."""
        with process(self._command, environment=self._environment) as server:
            wait_until(lambda: is_ready(self.url), "the server is ready", WAIT_S)
            yield server

    def start_batch(self, bodies: list[dict[str, Any]]) -> str:
        """Its id."""
        lines = (
            {"custom_id": f"r{number}", "method": "POST", "url": PATH, "body": body}
            for number, body in enumerate(bodies)
        )
        data = "\n".join(map(json.dumps, lines)).encode()
        form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
        file_id = self.http.post("/v1/files", **form).raise_for_status().json()["id"]
        body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
        return str(self.http.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        """As it is now."""
        card: dict[str, Any] = self.http.get(f"/v1/batches/{batch_id}").raise_for_status().json()
        return card

    def answered(self, batch_id: str) -> int:
        """Requests that have an answer. Ends the script where one has failed."""
        counts = self.batch(batch_id)["request_counts"]
        if counts["failed"]:
            raise SystemExit(f"{counts['failed']} requests of {batch_id} failed")
        return int(counts["completed"])

    def has_status(self, batch_id: str, status: str) -> bool:
        """Whether the batch stands there."""
        return bool(self.batch(batch_id)["status"] == status)

    def wait_for(self, batch_id: str, count: int, patience_s: float) -> None:
        """Until so many of its requests have an answer."""
        wait_until(lambda: self.answered(batch_id) >= count, f"{count} answers", patience_s, 0.1)

    def answers(self, batch_id: str) -> str:
        """The file."""
        file_id = self.batch(batch_id)["output_file_id"]
        return self.http.get(f"/v1/files/{file_id}/content").raise_for_status().text


def tokens_of(args: Namespace, count: int, rng: Random) -> list[int]:
    """Tokens that the model has; the first ones may be special."""
    return [rng.randrange(8, args.vocab_size) for _ in range(count)]


def bodies_of(args: Namespace, count: int) -> list[dict[str, Any]]:
    """Requests of a batch: eight beginnings, and an ending each."""
    rng = Random(7)
    starts = [tokens_of(args, args.batch_tokens, rng) for _ in range(8)]
    prompts = ([*rng.choice(starts), *tokens_of(args, 16, rng)] for _ in range(count))
    return [greedy(prompt, args.batch_answer) for prompt in prompts]


def measure_kills(args: Namespace, folder: str) -> dict[str, Any]:
    """How many requests have how many answers."""
    server, killed_at = Server(args, folder), []
    began_s, batch_id = time.perf_counter(), ""
    for kill in range(1, args.kills + 1):
        with server.running() as child:
            batch_id = batch_id or server.start_batch(bodies_of(args, args.requests))
            server.wait_for(batch_id, args.requests * kill // (args.kills + 1), args.patience_s)
            killed_at.append(server.answered(batch_id))
            child.kill()
            child.wait()
    with server.running():
        server.wait_for(batch_id, args.requests, args.patience_s)
        wait_until(partial(server.has_status, batch_id, "completed"), "the batch ends", WAIT_S)
        lines_of = Counter(json.loads(line)["custom_id"] for line in server.answers(batch_id).splitlines())
    once, lines = sum(lines_of[f"r{number}"] == 1 for number in range(args.requests)), lines_of.total()
    seconds = time.perf_counter() - began_s
    print(f"killed at {killed_at}: {once} of {args.requests} answered once, in {lines} lines; {seconds:.0f} s")
    return {"requests": args.requests, "killed_at": killed_at, "answered_once": once, "lines": lines}


def ask_at_times(server: Server, args: Namespace, seed: int) -> list[float]:
    """Seconds to the first token of requests that arrive at random times."""
    rng, firsts, threads = Random(seed), [0.0] * args.interactive, []

    def ask(number: int, prompt: list[int]) -> None:
        firsts[number] = completion(server.url, prompt, args.answer_tokens).checked().first_s

    due_s = time.perf_counter()
    for number in range(args.interactive):
        due_s += rng.expovariate(args.rate)
        prompt = tokens_of(args, args.prompt_tokens, rng)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        threads.append(threading.Thread(target=ask, args=(number, prompt)))
        threads[-1].start()
    for thread in threads:
        thread.join(WAIT_S)
    return firsts


def measure_ttft(args: Namespace, folder: str) -> dict[str, Any]:
    """Interactive requests beside a batch and without."""
    server = Server(args, folder)
    firsts: dict[str, list[float]] = {"without": [], "with": []}
    answered = 0
    with server.running():
        ask_at_times(server, args, 0)
        for number, side in turns(args.rounds, firsts):
            if side == "without":
                firsts[side] += ask_at_times(server, args, 100 + number)
                continue
            batch_id = server.start_batch(bodies_of(args, 20_000))
            server.wait_for(batch_id, 8, WAIT_S)
            before = server.answered(batch_id)
            firsts[side] += ask_at_times(server, args, 100 + number)
            answered += server.answered(batch_id) - before
            server.http.post(f"/v1/batches/{batch_id}/cancel")
            wait_until(partial(server.has_status, batch_id, "cancelled"), "it is cancelled", WAIT_S)
    table, rows = Table(COLUMNS), {}
    for side, times_s in firsts.items():
        cuts = [1e3 * cut for cut in statistics.quantiles(times_s, n=100)]
        row = {"side": side, "requests": len(times_s), "p50_ms": cuts[49], "p90_ms": cuts[89], "p99_ms": cuts[98]}
        rows[side] = row | {"answered": answered if side == "with" else 0}
        table.show(rows[side])
    ratio = rows["with"]["p99_ms"] / rows["without"]["p99_ms"]
    print(f"p99 with a batch: {ratio:.3f} of without; {answered} requests of batches answered meanwhile")
    return {"rows": rows, "p99_ratio": ratio}


def main() -> None:
    args = options(
        __doc__, parts=Commas("kill", "ttft"), requests=10_000, kills=1, model="", dtype="auto", rounds=4,
        interactive=100, rate=1.0, prompt_tokens=128, answer_tokens=16, batch_tokens=256, batch_answer=16,
        vocab_size=40_000, kv_memory="512MiB", threads=1, patience_s=3600.0,
    )  # fmt: skip
    results: dict[str, Any] = {}
    for part, measure in (("kill", measure_kills), ("ttft", measure_ttft)):
        if part in args.parts:
            with tempfile.TemporaryDirectory(prefix="memserve-batches-") as folder:
                results[part] = measure(args, folder)
    save(args, results)


if __name__ == "__main__":
    main()
