"""``memserve serve`` killed with -9 while clients with keys stream, and started again: what they get, at what cost.

    PYTHONPATH=tests/support python tests/support/router_kills.py [--kills 50] [--streams 64] [--tokens 200] [--seed 1]
                                                              [--routers 2]

With ``--routers`` each kill is of one of several routers at one port: of the owner, or of a follower, which the owner
starts again.

Each client asks one question at a time, streamed, with an ``Idempotency-Key``. When its stream breaks it asks again
with the same key and ``Last-Event-ID``, until it has the whole answer. A tiny random model in float32, everything else
as in production. Each answer is compared with what the same server gives to the same question without a key.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from ports import free_port
from served_cluster import Server
from tiny_models import prompt, save_folder, tiny_module

AT_ONCE = 16
PAUSE_S = 0.3
"""Before a client asks again: a router that starts needs the processor more than its clients do."""

SETTLED_S = 10.0
"""For heartbeats to tell that nothing runs any more."""


def long_model(folder: Path) -> Path:
    """A tiny model with room for answers that take a while."""
    module = tiny_module("llama")
    module.config.max_position_embeddings = 4096
    return save_folder(module, folder)


class Killed:
    """A server with metadata that is killed, and started again at the same address of its own metadata."""

    def __init__(self, model: Path | str, state: Path, *flags: str) -> None:
        self._state = state
        self._model, self._flags = model, [*flags, "--metadata", str(state)]
        self.server = Server(model, *self._flags)
        #: of all clients: to make one takes as long as a hundred tokens do
        self.http = httpx.Client(timeout=httpx.Timeout(60, connect=2), limits=httpx.Limits(max_connections=None))

    @property
    def url(self) -> str:
        return self.server.url

    def kill_follower(self, name: str) -> None:
        """SIGKILL to a router that is not the owner; the owner starts it again."""
        children = json.loads((self._state / "children.json").read_text())
        with contextlib.suppress(ProcessLookupError):  # it is dead already, and not started again yet
            os.kill(children[name]["pid"], signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL; the instances live on."""
        self.server.process.kill()
        self.server.process.wait()

    def restart(self) -> None:
        """The same command again; at another port."""
        self.server = Server(self._model, *self._flags)

    def held(self) -> dict[str, float]:
        """What is still held when no client is left (``Server.held``), some seconds later at most."""
        until = time.monotonic() + SETTLED_S
        while self.server.held() and time.monotonic() < until:
            time.sleep(0.2)
        return self.server.held()

    def end(self) -> None:
        """In good order, with all children."""
        self.server.process.terminate()
        assert self.server.process.wait(60) == 0


class Stream:
    """One request with a key, asked for until its answer is whole."""

    def __init__(self, killed: Killed, body: dict, key: str | None = None, *, from_the_beginning: bool = False) -> None:
        self._killed, self._body = killed, body | {"stream": True}
        self._headers = {"Idempotency-Key": key or str(uuid.uuid4())}
        self._from_the_beginning = from_the_beginning
        self.events: list[tuple[str, str]] = []
        self.is_done = False
        self.breaks = 0
        self.refusals: list[str] = []

    def read(self) -> None:
        """Until the answer is whole."""
        while not self.is_done:
            try:
                self._read_once()
            except (httpx.HTTPError, OSError):
                self.breaks += 1
                time.sleep(PAUSE_S)

    def _read_once(self) -> None:
        headers = dict(self._headers)
        if self.events and not self._from_the_beginning:
            headers["Last-Event-ID"] = self.events[-1][0]
        elif self.events:
            self.events.clear()
        url = f"{self._killed.url}/completions"
        with self._killed.http.stream("POST", url, json=self._body, headers=headers) as s:
            if s.status_code != 200:
                self.refusals.append(s.read().decode())
                raise httpx.ReadError(f"status {s.status_code}")
            number = ""
            for line in s.iter_lines():
                if line.startswith("id: "):
                    number = line[4:]
                elif line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data: "):
                    if "error" in json.loads(line[6:]):
                        self.refusals.append(line)
                        raise httpx.ReadError(line)
                    self.events.append((number, line[6:]))

    def texts(self) -> list[str]:
        """By choice."""
        texts: dict[int, str] = {}
        for _, data in self.events:
            for choice in json.loads(data)["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return [texts[index] for index in sorted(texts)]


def question(number: int, count: int, **more: object) -> dict:
    """A body; every second one draws."""
    tokens = [int(token) for token in prompt(40 + number % 50, number)]
    drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"model": "tiny", "prompt": tokens, "max_tokens": count, "ignore_eos": True, **drawn, **more}


def plain(killed: Killed, body: dict) -> list[str]:
    """The undisturbed answer, whole."""
    response = killed.http.post(f"{killed.url}/completions", json=body)
    return [choice["text"] for choice in response.raise_for_status().json()["choices"]]


def plain_answers(killed: Killed, bodies: Iterable[dict]) -> list[list[str]]:
    """All of them, several at once: one by one they take longer than the kills."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda body: plain(killed, body), bodies))


class Crowd:
    """Clients that ask one question after the other until they are told to stop."""

    def __init__(self, killed: Killed, streams: int, count: int) -> None:
        self.killed, self.count = killed, count
        self.answered: list[tuple[dict, Stream]] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(at, streams)) for at in range(streams)]
        for thread in self._threads:
            thread.start()

    def _ask(self, at: int, streams: int) -> None:
        number = at
        while not self._ended.is_set():
            body = question(number, self.count)
            stream = Stream(self.killed, body, from_the_beginning=number % 5 == 0)
            stream.read()
            self.answered.append((body, stream))
            number += streams

    def stop(self) -> None:
        """No new questions; all answers are waited for."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wrong(self) -> list[str]:
        """What is not the undisturbed answer."""
        found = []
        truths = plain_answers(self.killed, (body for body, _ in self.answered))
        for (_, stream), truth in zip(self.answered, truths, strict=True):
            if stream.texts() != truth:
                found.append(f"{stream.texts()} instead of {truth}")
            ids = [number for number, _ in stream.events]
            if ids != [str(place) for place in range(1, len(ids) + 1)]:
                found.append(f"ids {ids}")
        return found


def main() -> None:
    """Run, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--flags", default="--prefill 1 --decode 1")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = long_model(Path(folder) / "tiny")
        flags = options.flags.split()
        if options.routers > 1:
            flags += ["--routers", str(options.routers), "--port", str(free_port())]
        killed = Killed(model, Path(folder) / "state", *flags)
        crowd = Crowd(killed, options.streams, options.tokens)
        for _ in range(options.kills):
            time.sleep(draw.uniform(0.3, 2.0))
            victim = draw.randrange(options.routers)
            if victim:
                killed.kill_follower(f"router-{victim + 1}")
            else:
                killed.kill()
                killed.restart()
        print("all kills are done", flush=True)
        crowd.stop()
        print("all answers are there", flush=True)
        generated = killed.server.counter("generated_tokens")
        given = sum(body["max_tokens"] for body, _ in crowd.answered)
        breaks = sum(stream.breaks for _, stream in crowd.answered)
        wrong = crowd.wrong()
        held = killed.held()
        print(f"{options.kills} kills, {options.streams} streams, {len(crowd.answered)} answers, {breaks} asked again")
        print(f"wrong answers: {len(wrong)} {wrong[:3]}")
        print(f"requests, transfers, blocks in use, pins that are left: {held or 'none'}")
        print(f"tokens generated {generated:,}, given {given:,}: {100 * (generated / given - 1):.2f} % more")
        killed.end()


if __name__ == "__main__":
    main()
