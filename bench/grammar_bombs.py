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

import contextlib
import json
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from harness.clients import Answer, Json, ask_all, greedy, meanwhile, stream
from harness.flags import options, parts_of, save
from harness.processes import end_in_order
from harness.rounds import median
from harness.served import Served, serving
from harness.tables import Table

from process_tree import processes_below

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
        f"/(.*[a-{letter}].*){{{40 + number}}}/" for number, letter in enumerate("bcdefghijk"))}},
    "tower of multiples": {"structured_outputs": {"json": {"type": "array", "prefixItems": [
        {"type": "integer", "multipleOf": 1000003 + 2 * number} for number in range(20)], "minItems": 20}}},
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


@dataclass
class Watch:
    """What others notice, while one tenant sends bombs."""

    served: Served
    choices_s: list[float] = field(default_factory=list)
    wrong: int = 0
    gaps_s: list[float] = field(default_factory=list)
    most_bytes: int = 0

    def ask_choices(self, over: threading.Event) -> None:
        """For one of two words every quarter of a second."""
        client = Client(self.served, "choices")
        while not over.wait(0.25):
            begin_s = time.perf_counter()
            answer = client.ask({"structured_outputs": {"choice": ["yes", "no"]}}, tokens=4)
            self.choices_s.append(time.perf_counter() - begin_s)
            text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else ""
            self.wrong += text not in ("yes", "no")

    def read_streams(self, over: threading.Event) -> None:
        """Plain ones, one after the other."""
        client, body = Client(self.served, "plain"), greedy("Once upon a time", 1000, self.served.model)

        def note(answer: Answer) -> bool:
            self.gaps_s += answer.steps_s[-1:]
            return over.is_set()

        while not over.is_set():
            stream(self.served.url, body, client=client.http, on_event=note)

    def read_memory(self, over: threading.Event) -> None:
        """Of all processes of the server, five times a second."""
        while not over.wait(0.2):
            self.most_bytes = max(self.most_bytes, bytes_of(self.served))


def is_of_grammars(pid: int) -> bool:
    """Whether a process builds grammars, or has ended and is not forgotten yet (it has no command any more)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return not command or b"grammar_process" in command
    except OSError:
        return True


def bytes_of(served: Served) -> int:
    """Of all processes of the server."""
    return sum(_bytes_of(pid) for pid in processes_below(served.process.pid))


def _bytes_of(pid: int) -> int:
    name, name_of_field = ("smaps_rollup", "Pss:") if is_of_grammars(pid) else ("status", "VmRSS:")
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name_of_field))


def sizes(served: Served) -> str:
    """What the sources have resident, and what a grammar has for itself while it is used."""
    letters = {"structured_outputs": {"regex": "[a-z ]{600}"}}
    with meanwhile(lambda _: Client(served, "choices").ask(letters)):
        time.sleep(1.0)
        texts = []
        for pid in filter(is_of_grammars, processes_below(served.process.pid)):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                kib = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
                own_kib = kib["Private_Clean:"] + kib["Private_Dirty:"]
                texts.append(f"{kib['Rss:'] / 1024:.0f} MiB, {own_kib / 1024:.1f} for itself")
    return f"processes of grammars: {'; '.join(texts)}"


def drop(name: str, served: Served, bombs: list[Json], tokens: int = TOKENS) -> Json:
    """All ``bombs`` at once; a row of the table."""

    def ask(bomb: Json) -> str:
        begin_s = time.perf_counter()
        answer = clients.pop().ask(bomb, tokens=tokens)
        code = answer.json().get("error", {}).get("code") or ""
        return f"{answer.status_code} {code} {time.perf_counter() - begin_s:.1f} s"

    watch = Watch(served)
    clients = [Client(served, "bombs") for _ in bombs]  # made before: that takes this process's time
    with meanwhile(watch.ask_choices, watch.read_streams, watch.read_memory):
        time.sleep(1.5)
        watch.gaps_s.clear()
        before = bytes_of(served)
        answers = ask_all(ask, bombs, len(bombs))
        time.sleep(1.0)
    gaps_ms = sorted(1e3 * gap for gap in watch.gaps_s)
    return {
        "bomb": name, "answer": "; ".join(answers), "choices_s": max(watch.choices_s), "wrong": watch.wrong,
        "choices_p50_s": median(watch.choices_s), "gap_ms": median(gaps_ms),
        "longest": " ".join(f"{gap:.0f}" for gap in gaps_ms[-3:][::-1]),
        "most_mib": watch.most_bytes / 2**20, "before_mib": before / 2**20,
    }  # fmt: skip


COLUMNS = {
    "bomb": "{bomb}", "answer": "{answer}",
    "choices: slowest / median": "{choices_s:.2f} / {choices_p50_s:.2f} s, {wrong} wrong",
    "gap: longest three / median": "{longest} / {gap_ms:.1f} ms",
    "memory: most / before": "{most_mib:.0f} / {before_mib:.0f} MiB",
}  # fmt: skip


def measure(served: Served, names: list[str], settle_s: float) -> list[Json]:
    """Each bomb by itself, then all at once."""
    Client(served, "choices").ask({"structured_outputs": {"choice": ["yes", "no"]}}, tokens=4)
    before = bytes_of(served)
    processes = {pid for pid in processes_below(served.process.pid) if not is_of_grammars(pid)}
    print(sizes(served))
    many = [{"type": "integer", "multipleOf": 99999989 + 2 * place} for place in range(10)]
    cases: list[tuple[str, list[Json], int]] = [
        (f"none: a plain request of {tokens} tokens", [{"ignore_eos": True}], tokens) for tokens in (4, TOKENS)
    ]
    cases += [(name, [BOMBS[name]], TOKENS) for name in names]
    cases.append(("all at once", [BOMBS[name] for name in names], TOKENS))
    cases.append(("ten multiples", [{"structured_outputs": {"json": schema}} for schema in many], TOKENS))
    rows, table = [], Table(COLUMNS)
    for case in cases:
        rows.append(drop(case[0], served, *case[1:]))
        table.show(rows[-1])
    time.sleep(settle_s)
    after = bytes_of(served)
    died = processes - set(processes_below(served.process.pid))
    print(f"memory {settle_s:.0f} s later: {after / 2**20:.0f} MiB, {(after - before) / 2**20:+.0f}")
    print(f"processes of the start that have ended: {len(died)}; left: {json.dumps(served.left())}")
    return rows


def main() -> None:
    end_in_order()
    args = options(__doc__, rest="serve", only=(list(BOMBS), "names of bombs"), settle_s=60.0)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{tenant}={tenant}-key\n" for tenant in TENANTS))
        with serving("--api-key-file", str(keys), "--metadata", "none", *args.serve) as served:
            save(args, measure(served, list(parts_of(args.only, BOMBS)), args.settle_s))


if __name__ == "__main__":
    main()
