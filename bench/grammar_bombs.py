"""Grammars made to hurt: what they get, what they leave, and what other clients notice.

    .venv/bin/python bench/grammar_bombs.py [--only NAME ...] [--settle-s 60] [-- OPTIONS OF SERVE]

Starts ``memserve serve`` with the keys of three tenants. One sends the bombs, each by itself and then all at once, each
by one of ``structured_outputs``, ``response_format`` and the parameters of a tool that must be called; another asks for
one of two words by ``choice`` every quarter of a second; the third one reads a plain stream. Printed for each bomb:

* answer: the status, its code, and after how many seconds
* choices: the slowest and the median answer by ``choice`` meanwhile, and how many were not right
* gap: the longest three and the median times between two tokens of the plain stream meanwhile; without a bomb: beside a
  plain request of the bomb's tenant of as many tokens
* memory: the most of all processes meanwhile, beside that of before: resident, and of grammars' processes the
  proportional set size (they share the vocabulary)

and at last the memory after ``--settle-s``, and whether the processes of the start are there at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from served import Served, end_in_order, serving

Json = dict[str, Any]
TENANTS = ("bombs", "choices", "plain")
TOKENS = 400
ANSWER_S = 60.0

BOMBS: dict[str, Json] = {
    "multipleOf": {"structured_outputs": {"json": {"type": "integer", "multipleOf": 99999989}}},
    "multipleOf of a tool": {
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {"n": {"type": "integer", "multipleOf": 99999989}}, "required": ["n"]}}}
        ],
        "tool_choice": "required",
    },
    "pattern": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "string", "pattern": "(a|aa|aaa){1,3000}b"}}}},
    "ambiguous 1": {"structured_outputs": {"grammar": 'start: x\nx: x x x | x x | "a"i | "b" | ""'}},
    "ambiguous 2": {"structured_outputs": {"grammar": 'start: x\nx: x x | "a" | "b"'}},
    "regex of states": {"structured_outputs": {"regex": "[ab]*a[ab]{400}(.*c.{300}){40}"}},
    "intersection": {"structured_outputs": {"grammar": "start: A\nA: " + " & ".join(
        f"/(.*[a-{letter}].*){{{40 + at}}}/" for at, letter in enumerate("bcdefghijk"))}},
    "tower of multiples": {"structured_outputs": {"json": {"type": "array", "prefixItems": [
        {"type": "integer", "multipleOf": 1000003 + 2 * at} for at in range(20)], "minItems": 20}}},
}  # fmt: skip


class Client:
    """Requests of one tenant."""

    def __init__(self, served: Served, tenant: str) -> None:
        self.url, self.model = served.url, served.model
        self.http = httpx.Client(timeout=ANSWER_S, headers={"Authorization": f"Bearer {tenant}-key"})

    def ask(self, fields: Json, *, tokens: int = TOKENS) -> httpx.Response:
        messages = [{"role": "user", "content": "a b a b"}]
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 1, "seed": 1, **fields}
        return self.http.post(f"{self.url}/v1/chat/completions", json=body)


class Choices(threading.Thread):
    """Asks for one of two words every quarter of a second."""

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._client, self._ended = Client(served, "choices"), threading.Event()
        self.seconds: list[float] = []
        self.wrong = 0

    def run(self) -> None:
        while not self._ended.wait(0.25):
            begun = time.perf_counter()
            answer = self._client.ask({"structured_outputs": {"choice": ["yes", "no"]}}, tokens=4)
            self.seconds.append(time.perf_counter() - begun)
            text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else ""
            self.wrong += text not in ("yes", "no")

    def end(self) -> None:
        self._ended.set()
        self.join()


class Plain(threading.Thread):
    """Reads plain streams, one after the other."""

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._client, self._ended = Client(served, "plain"), threading.Event()
        self.gaps_s: list[float] = []

    def run(self) -> None:
        body = {
            "model": self._client.model, "prompt": "Once upon a time", "max_tokens": 1000, "stream": True,
            "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        while not self._ended.is_set():
            last = None
            with self._client.http.stream("POST", f"{self._client.url}/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        self.gaps_s += [now - last] if last is not None else []
                        last = now
                    if self._ended.is_set():
                        break

    def end(self) -> None:
        self._ended.set()
        self.join()


class Memory(threading.Thread):
    """Reads the memory of all processes of the server, five times a second."""

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._root, self._ended = served.process.pid, threading.Event()
        self.most_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self.most_bytes = max(self.most_bytes, self.bytes())

    def bytes(self) -> int:
        return sum(map(_bytes_of, descendants(self._root)))

    def end(self) -> None:
        self._ended.set()
        self.join()


def is_of_grammars(pid: int) -> bool:
    """Whether a process builds grammars, or has ended and is not forgotten yet (it has no command any more)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return not command or b"grammar_process" in command
    except OSError:
        return True


def _bytes_of(pid: int) -> int:
    name, field = ("smaps_rollup", "Pss:") if is_of_grammars(pid) else ("status", "VmRSS:")
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def descendants(root: int) -> list[int]:
    """The processes below ``root``, and itself."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


@contextlib.contextmanager
def watched(served: Served) -> Iterator[tuple[Choices, Plain, Memory]]:
    watchers = Choices(served), Plain(served), Memory(served)
    for watcher in watchers:
        watcher.start()
    time.sleep(1.5)
    watchers[1].gaps_s.clear()
    try:
        yield watchers
    finally:
        for watcher in watchers:
            watcher.end()


def sizes(served: Served) -> str:
    """What the sources have resident, and what a grammar has for itself while it is used."""
    letters = {"structured_outputs": {"regex": "[a-z ]{600}"}}
    client = threading.Thread(target=Client(served, "choices").ask, args=(letters,))
    client.start()
    time.sleep(1.0)
    found = []
    for pid in filter(is_of_grammars, descendants(served.process.pid)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kib = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
            own = kib["Private_Clean:"] + kib["Private_Dirty:"]
            found.append(f"{kib['Rss:'] / 1024:.0f} MiB, {own / 1024:.1f} for itself")
    client.join()
    return f"processes of grammars: {'; '.join(found)}"


def drop(served: Served, bombs: list[Json], tokens: int = TOKENS) -> tuple[list[str], Choices, Plain, Memory, int]:
    answers: list[str] = [""] * len(bombs)

    def ask(at: int) -> None:
        begun = time.perf_counter()
        answer = Client(served, "bombs").ask(bombs[at], tokens=tokens)
        told = answer.json().get("error", {})
        answers[at] = f"{answer.status_code} {told.get('code') or ''} {time.perf_counter() - begun:.1f} s"

    with watched(served) as (choices, plain, memory):
        before = memory.bytes()
        clients = [threading.Thread(target=ask, args=(at,)) for at in range(len(bombs))]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        time.sleep(1.0)
    return answers, choices, plain, memory, before


def row(name: str, served: Served, bombs: list[Json], tokens: int = TOKENS) -> None:
    answers, choices, plain, memory, before = drop(served, bombs, tokens)
    gaps = [1e3 * gap for gap in plain.gaps_s]
    cells = [
        name,
        "; ".join(answers),
        f"{max(choices.seconds):.2f} / {statistics.median(choices.seconds):.2f} s, {choices.wrong} wrong",
        " ".join(f"{gap:.0f}" for gap in sorted(gaps)[-3:][::-1]) + f" / {statistics.median(gaps):.1f} ms",
        f"{memory.most_bytes / 2**20:.0f} / {before / 2**20:.0f} MiB",
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(BOMBS), choices=list(BOMBS))
    parser.add_argument("--settle-s", type=float, default=60.0)
    parser.add_argument("serve", nargs="*", help="options of memserve serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{tenant}={tenant}-key\n" for tenant in TENANTS))
        flags = ["--api-key-file", str(keys), "--metadata", "none", *options.serve]
        with serving(*flags) as served:
            Client(served, "choices").ask({"structured_outputs": {"choice": ["yes", "no"]}}, tokens=4)
            memory = Memory(served)
            before = memory.bytes()
            processes = {pid for pid in descendants(served.process.pid) if not is_of_grammars(pid)}
            print(sizes(served))
            print("| bomb | answer | choices: slowest / median | gap: longest three / median | memory: most / before |")
            print("| --- | --- | --- | --- | --- |")
            for tokens in (4, TOKENS):
                row(f"none: a plain request of {tokens} tokens", served, [{"ignore_eos": True}], tokens)
            for name in options.only:
                row(name, served, [BOMBS[name]])
            row("all at once", served, [BOMBS[name] for name in options.only])
            many = [{"type": "integer", "multipleOf": 99999989 + 2 * at} for at in range(10)]
            row("ten multiples", served, [{"structured_outputs": {"json": schema}} for schema in many])
            time.sleep(options.settle_s)
            after = memory.bytes()
            died = processes - set(descendants(served.process.pid))
            print(f"memory {options.settle_s:.0f} s later: {after / 2**20:.0f} MiB, {(after - before) / 2**20:+.0f}")
            print(f"processes of the start that have ended: {len(died)}; left: {json.dumps(served.left())}")


if __name__ == "__main__":
    main()
