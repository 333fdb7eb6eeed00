"""Is the fleet's directory what the servers hold? The check of ``fleet.py --only directory``.

Between each server and the fleet a relay loses batches of KV events (none, a tenth, half or all of them in a round);
the replay endpoint is the server's own. Rounds send prompts that share documents to servers whose KV memory is far too
small, so that blocks are evicted all the time; some rounds empty a server's cache, some kill a server (SIGKILL) under
load and start it again. After each round, with no request open, the fleet must know exactly what each server's own map
holds (``vllm_map.py``): the same blocks, the same number of copies. Blocks with a salt are no matter of the directory;
which those are is told by a subscriber that loses nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
from fleet_load import MODEL
from harness.clients import ask_all
from harness.engines import EventServer, running
from harness.processes import is_ready
from harness.prompts import random_tokens
from harness.rounds import median
from harness.tables import show

from fleet_server import FleetServer, fleet_server
from memserve.base.config import ClusterConfig
from memserve.fleet.messages import read_engine
from ports import free_port

SETTLE_S = 40.0
"""How long the directory has, after the last answer, to become what the server holds."""
SMALL = ("--num-gpu-blocks-override", "96", "--max-model-len", "1024", "--max-num-seqs", "8")
LOSSES = (0.0, 0.1, 0.5, 1.0)


class Relay:
    """KV events of one server, handed on with losses."""

    def __init__(self, server: EventServer, seed: int) -> None:
        self.loss, self.passed, self.lost, self.private = 0.0, 0, 0, set[int]()
        self.gaps_of_truth, self._last = 0, -1
        self._draw, self._port, self._ends = random.Random(seed), free_port(), threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def option(self) -> str:
        """The server, with this relay for its events."""
        return f"vllm={self._server.url},events=tcp://127.0.0.1:{self._port},replay={self._server.replay}"

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, context.socket(zmq.PUB) as publisher:
            for item in (subscriber, publisher):
                item.setsockopt(zmq.LINGER, 0)
            subscriber.setsockopt(zmq.RCVHWM, 0)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(self._server.events)
            publisher.bind(f"tcp://127.0.0.1:{self._port}")
            while not self._ends.is_set():
                if not subscriber.poll(50):
                    continue
                frames = subscriber.recv_multipart()
                self._look(int.from_bytes(frames[1], "big"), frames[2])
                if self._draw.random() < self.loss:
                    self.lost += 1
                else:
                    self.passed += 1
                    publisher.send_multipart(frames)

    def _look(self, number: int, payload: bytes) -> None:
        """Which blocks have a salt; whether this subscriber itself has missed a batch."""
        if number:
            self.gaps_of_truth += number != self._last + 1
        self._last = number
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] != "BlockStored":
                continue
            keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
            is_private = event["parent_block_hash"] in self.private
            for item, key in zip(event["block_hashes"], keys, strict=True):
                is_private = is_private or bool(key)  # a salt is named with the first block, and holds for all
                if is_private:
                    self.private.add(item)

    def close(self) -> None:
        self._ends.set()
        self._thread.join(10)


@dataclass
class Run:
    """The servers, the fleet, and what was seen."""

    servers: list[EventServer]
    relays: list[Relay]
    fleet: FleetServer
    draw: random.Random
    documents: list[list[int]]
    counts: Counter[str] = field(default_factory=Counter)
    settle_s: list[float] = field(default_factory=list)

    def ask(self, seed: int) -> None:
        """One request of the load; broken answers are counted, and no matter here."""
        draw = random.Random(seed)
        tokens = draw.choice(self.documents) + random_tokens(draw.randrange(1, 120), draw)
        body: dict[str, Any] = {"model": MODEL, "prompt": tokens, "max_tokens": draw.randrange(1, 48)}
        body |= {"temperature": 1.0, "n": draw.choice((1, 1, 1, 2)), "stream": draw.random() < 0.5}
        if draw.random() < 0.1:
            body["cache_salt"] = f"salt {draw.randrange(3)}"
        answer = httpx.post(f"{self.fleet.url}/v1/completions", json=body, timeout=120)
        self.counts["requests"] += 1
        self.counts["broken"] += answer.status_code != 200 or b'"error"' in answer.content

    def load(self, requests: int) -> None:
        """So many requests, eight at a time."""
        ask_all(self.ask, [self.draw.randrange(1 << 40) for _ in range(requests)], 8)

    def restart(self, place: int) -> None:
        """Kill a server under load, and start it again."""
        loading = threading.Thread(target=self.load, args=(12,))
        loading.start()
        time.sleep(0.5)
        self.servers[place].kill()
        loading.join()
        self.servers[place].start()
        deadline = time.monotonic() + 30.0
        while not self.fleet.host.machine.engines()[place].up and time.monotonic() < deadline:
            time.sleep(0.1)
        self.counts["restarts"] += 1

    def difference(self, place: int) -> dict[int, tuple[int, int]]:
        """Blocks of which the fleet knows another number of copies than the server's map has."""
        blocks_known = {
            item: upper for item, (upper, _) in self.fleet.host.machine.kv_counts(self.servers[place].url[7:]).items()
        }
        blocks_held = {
            item: copies
            for item, copies in self.servers[place].held().items()
            if item not in self.relays[place].private
        }
        self.counts[f"blocks held by {place}"] = len(blocks_held)
        return {
            item: (blocks_known.get(item, 0), blocks_held.get(item, 0))
            for item in blocks_known.keys() | blocks_held
            if blocks_known.get(item) != blocks_held.get(item)
        }

    def settle(self) -> dict[int, tuple[int, int]]:
        """What still differs when the time is up; nothing: the directory is right."""
        begin = time.monotonic()
        while True:
            wrong: dict[int, tuple[int, int]] = {}
            for place in range(len(self.servers)):
                try:
                    wrong |= self.difference(place)
                except RuntimeError:  # the fleet's own thread has changed its map meanwhile
                    wrong[-1] = (0, 0)
            if not wrong or time.monotonic() - begin > SETTLE_S:
                self.settle_s.append(time.monotonic() - begin)
                return wrong
            time.sleep(0.2)

    def probe(self) -> None:
        """Prompts one by one: does the server find as much as the fleet said that it would?"""
        for document in self.draw.sample(self.documents, 4):
            tokens = [*document, *random_tokens(1, self.draw)]
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
            headers = {"x-memserve-explain": "1"}
            answer = httpx.post(f"{self.fleet.url}/v1/completions", json=body, headers=headers, timeout=120)
            if answer.status_code != 200:
                self.counts["probes refused"] += 1
                continue
            matched = msgspec.json.decode(answer.headers["x-memserve-explain"])["matched_tokens"]
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.counts["probes"] += 1
            self.counts["probes found as foretold"] += matched == cached
            self.counts["tokens foretold"] += matched
            self.counts["tokens found"] += cached


def rounds(run: Run, count: int, restarts: int) -> int:
    """All rounds; how many ended with a directory that differs."""
    wrong_rounds = 0
    for number in range(count):
        for relay in run.relays:
            relay.loss = run.draw.choice(LOSSES)
        if restarts and number % max(1, count // restarts) == count // restarts - 1:
            run.restart(run.draw.randrange(len(run.servers)))
        elif run.draw.random() < 0.1:
            run.draw.choice(run.servers).forget()
            run.counts["caches emptied"] += 1
        run.load(16)
        wrong = run.settle()
        wrong_rounds += bool(wrong)
        if wrong:
            print(
                f"  round {number}: {len(wrong)} blocks differ (known, held): {dict(list(wrong.items())[:5])}",
                flush=True,
            )
        for relay in run.relays:
            relay.loss = 0.0
        run.probe()
        if number % 10 == 9:
            print(f"  {number + 1} rounds, {wrong_rounds} wrong, {dict(run.counts)}", flush=True)
    return wrong_rounds


def event_server(python: str, model: str, folder: Path, number: int, *flags: str) -> EventServer:
    """One that shows what its cache holds."""
    return EventServer(
        python, model, flags=flags, name=MODEL, dtype="bfloat16", folder=folder, number=number
    )  # fmt: skip


def check(python: str, model: str, folder: Path, count: int, restarts: int, seed: int) -> None:
    """Run it and print what was seen. Raises :class:`SystemExit` when the directory was wrong."""
    servers = [event_server(python, model, folder, number, *SMALL) for number in range(2)]
    with running(*servers):
        relays = [Relay(server, seed + number) for number, server in enumerate(servers)]
        draw = random.Random(seed)
        documents = [random_tokens(draw.choice((40, 64, 200, 320, 512)), draw) for _ in range(24)]
        try:
            with fleet_server([read_engine(relay.option) for relay in relays], ClusterConfig()) as fleet:
                assert all(is_ready(server.url) for server in servers)
                run = Run(servers, relays, fleet, draw, documents)
                wrong = rounds(run, count, restarts)
                views = fleet.host.machine.engines()
        finally:
            for relay in relays:
                relay.close()
    lost, passed = sum(relay.lost for relay in relays), sum(relay.passed for relay in relays)
    report = {
        "rounds": count, "rounds with a wrong directory": wrong, **dict(sorted(run.counts.items())),
        "batches of KV events lost": f"{lost} of {lost + passed}",
        "gaps, times forgotten": f"{sum(v.kv_gaps for v in views)}, {sum(v.kv_forgotten for v in views)}",
        "batches that the check itself missed": sum(relay.gaps_of_truth for relay in relays),
        "seconds until right: median, worst": f"{median(run.settle_s):.1f}, {max(run.settle_s):.1f}",
    }  # fmt: skip
    show(({"what": name, "count": value} for name, value in report.items()), ("what", "count"))
    if wrong:
        raise SystemExit(1)
