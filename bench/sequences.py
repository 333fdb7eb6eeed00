"""A context on several instances, beside the same on one that holds all of it: the same tokens, and what that costs.

    PYTHONPATH=tests/support python bench/sequences.py [--instances 3] [--prompts 4] [--kill] [--json FILE]

Each is a ``memserve serve`` of its own with the bundled model in float32, one after the other: first one instance with
room for everything, then ``--instances``, each of which holds its share of a prompt. Prompts are pieces of this
project's pages. Printed: whether the greedy answers are equal, the seconds to the first token, the milliseconds a
token behind it, and what the exchange adds for each token and layer. ``--kill``: then one of the holders is killed
(SIGKILL) while prompts are computed, and once while tokens are drawn; the answers must be equal again.
``--round-trips``: only what a layer of a step waits for one holder, in another process of this host.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import torch

from memserve.base.types import KVGeometry
from memserve.model.attention.query_server import SegmentServer, ZmqSegmentLines
from memserve.model.attention.sequence_parallel import HeldKv, Query
from memserve.protocol.messages import Segment
from memserve.protocol.peers import Peer
from served_cluster import Server, eventually

SECRET = "a secret for this measurement"
MODEL, LAYERS, BLOCK_BYTES = "smollm2-135m-instruct", 30, 30 * 3 * 32 * 128 * 4
NEW_TOKENS = 48
DOCS = Path(__file__).resolve().parent.parent / "docs"


def texts(count: int) -> list[str]:
    """Pieces of the pages, each longer than any prompt here."""
    whole = "\n".join(path.read_text() for path in sorted(DOCS.glob("concepts/*.md")))
    step = len(whole) // count
    return [whole[place * step :][:30_000] for place in range(count)]


class Timed:
    """An answer as it streams, in a thread of its own."""

    def __init__(self, server: Server, text: str, prompt_tokens: int, new_tokens: int = NEW_TOKENS) -> None:
        self.pieces: list[str] = []
        self.at_s: list[float] = []
        more = {"ignore_eos": True, "truncate_prompt_tokens": prompt_tokens}
        self.begun_s = time.perf_counter()
        self._stream = server.client.with_options(timeout=900).completions.create(
            model=MODEL, prompt=text, max_tokens=new_tokens, temperature=0, stream=True, extra_body=more
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for chunk in self._stream:
            if chunk.choices:
                self.pieces.append(chunk.choices[0].text)
                self.at_s.append(time.perf_counter())

    def text(self) -> str:
        self._thread.join()
        return "".join(self.pieces)

    @property
    def first_s(self) -> float:
        return self.at_s[0] - self.begun_s

    @property
    def token_ms(self) -> float:
        return (self.at_s[-1] - self.at_s[0]) / (NEW_TOKENS - 1) * 1e3


def measured(server: Server, prompts: list[str], prompt_tokens: int) -> dict[str, Any]:
    Timed(server, prompts[0], 64).text()  # everything has run once
    answers = [Timed(server, text, prompt_tokens) for text in prompts[:1]]
    found = [answers[0].text()]
    for text in prompts[1:]:
        answers.append(Timed(server, text, prompt_tokens))
        found.append(answers[-1].text())
    first, each = ([getattr(a, name) for a in answers] for name in ("first_s", "token_ms"))
    return {"texts": found, "first_s": statistics.median(first), "token_ms": statistics.median(each)}


def killed(server: Server, prompts: list[str], prompt_tokens: int, instances: int, expected: list[str]) -> list[bool]:
    """Whether the answers are right when the holder of the first part dies, while prompts are computed and after."""
    right = []
    for text, want, behind in zip(prompts, expected, (0, 8), strict=False):
        eventually(lambda: len(server.members()) == instances)
        holder = first_holder(server, prompt_tokens)
        answer = Timed(server, text, prompt_tokens)
        eventually(lambda answer=answer, behind=behind: len(answer.pieces) >= behind)
        time.sleep(0.0 if behind else answer_share(prompt_tokens))
        os.kill(server.children()[holder], signal.SIGKILL)
        right.append(answer.text() == want)
        print(f"killed behind {behind} tokens: {'the same' if right[-1] else 'ANOTHER'} answer", flush=True)
    return right


def first_holder(server: Server, prompt_tokens: int) -> str:
    """Which instance gets the first part of a prompt now, by a prompt that nothing else uses."""
    body = {"model": MODEL, "prompt": [7] * prompt_tokens, "max_tokens": 1, "explain": True}
    told = httpx.post(f"{server.url}/completions", json=body, timeout=600).text
    return re.search(r"(\w+): tokens 0 to", told)[1]


def answer_share(prompt_tokens: int) -> float:
    """Seconds after which a part of such a prompt is being computed."""
    return prompt_tokens / 2000


def hold(tokens: int, pipe: Connection) -> None:
    """A process that keeps a segment of one layer of the bundled model, of zeros."""
    geometry = KVGeometry(1, 3, 64, 64, "float32")
    arena = torch.zeros(tokens // 32 * geometry.block_bytes, dtype=torch.uint8)
    held = HeldKv(arena.data_ptr(), geometry)
    held.hold("x", list(range(tokens // 32)), tokens)
    torch.set_num_threads(1)
    server = SegmentServer(SECRET, "127.0.0.1", "float32", held.attend)
    pipe.send(server.address)
    pipe.recv()
    server.close()


def round_trips(tokens: int) -> None:
    """What one layer waits for one holder of ``tokens``: queries out, attention there, outputs and statistics back."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=hold, args=(tokens, theirs))
    process.start()
    segment, lines = Segment(Peer("i", 1), ours.recv(), tokens), ZmqSegmentLines(SECRET)
    for rows in (1, 8, 512):
        query = Query("x", 0, torch.zeros((rows, 9, 64)), 0.125, 0.0)
        outputs, sums, took_us = torch.empty((rows, 9, 64)), torch.empty((rows, 9)), []
        for _ in range(1000 if rows < 512 else 100):
            begun_ns = time.perf_counter_ns()
            lines.answer(lines.ask(segment, query), outputs, sums)
            took_us.append((time.perf_counter_ns() - begun_ns) / 1e3)
        tenth, half = sorted(took_us)[len(took_us) // 10], statistics.median(took_us)
        print(f"{rows} rows, a segment of {tokens} tokens: {tenth:.0f} us, the 10th percentile; {half:.0f} the median")
    lines.close()
    ours.send(None)
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=20, help="KV blocks of 32 tokens of each instance")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--round-trips", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.round_trips:
        round_trips(options.blocks * 32)
        return
    prompt_tokens = options.instances * options.blocks * 32 - 2 * NEW_TOKENS
    prompts = texts(options.prompts)
    common = ("--threads", str(options.threads))
    large = options.instances * options.blocks * BLOCK_BYTES
    shares = {
        "one": (*common, "--kv-memory", str(large)),
        "shared": (*common, "--colocated", str(options.instances), "--kv-memory", str(options.blocks * BLOCK_BYTES)),
    }
    found: dict[str, Any] = {}
    for name, flags in shares.items():
        server = Server(Path(MODEL), *flags)
        try:
            found[name] = measured(server, prompts, prompt_tokens)
            if name == "shared" and options.kill:
                wants = found["one"]["texts"]
                found["kills"] = killed(server, prompts, prompt_tokens, options.instances, wants)
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(60)
    one, shared = found["one"], found["shared"]
    equal = sum(a == b for a, b in zip(one["texts"], shared["texts"], strict=True))
    added_ms = shared["token_ms"] - one["token_ms"]
    print(f"prompts of {prompt_tokens} tokens on instances of {options.blocks * 32}: {equal} of {len(prompts)} equal")
    for name in shares:
        print(f"{name}: {found[name]['first_s']:.2f} s to the first token, {found[name]['token_ms']:.1f} ms a token")
    print(f"added: {added_ms:.1f} ms a token, {added_ms / LAYERS * 1e3:.0f} us a token and layer")
    if options.json:
        options.json.write_text(json.dumps(found | {"equal": equal, "added_ms": added_ms}, indent=1))


if __name__ == "__main__":
    main()
