"""A ``memserve serve`` in a process of its own, with what tests ask of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import openai

import waiting
from process_tree import children_of, command_of, named_children
from tiny_models import prompt

WAIT_S = 120.0
HELD = (
    "memserve_instance_blocks", "memserve_instance_requests", "memserve_instance_transfers_open",
    "memserve_router_requests_live", "memserve_router_requests_unplaced", "memserve_router_handles",
)  # fmt: skip
READ_AT = "memserve_instance_read_timestamp_seconds"
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}

WORKER = "memserve.model.workers.processes"
"""What a worker of an instance runs."""


class Server:
    """A ``memserve serve`` and its children."""

    def __init__(self, folder: Path | str, *arguments: str, stderr: IO[str] | None = None) -> None:
        flags = ["--model", str(folder), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1", "--port", "0"]
        command = [sys.executable, "-m", "memserve", "serve", *flags, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.lines = [self.process.stdout.readline() for _ in range(3)]
        self.url = re.search(r"http://[^ ]+/v1", self.lines[0])[0]
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=WAIT_S)

    def children(self) -> dict[str, int]:
        """Name -> process id; one that is only just being started, or has ended, has no name."""
        return named_children(self.process.pid)

    def members(self) -> set[str]:
        """The members that take requests, by the metrics page."""
        page = httpx.get(self.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
        return set(re.findall(r'memserve_instance_up{instance="(\w+)",role="\w+"} 1.0', page))

    def fresh_metrics(self) -> str:
        """The metrics page once each instance has read its counters and its load after the call: all that was answered
        before is in them. Instances tell them once in a second, so an earlier page lacks the last answers."""
        called_at, page = time.time(), ""

        def is_fresh() -> bool:
            nonlocal page
            page = httpx.get(self.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
            read_at = dict(re.findall(rf'^{READ_AT}{{instance="([^"]+)".*}} (.+)$', page, re.M))
            return all(float(read_at.get(name, 0)) > called_at for name in self.instances() | read_at.keys())

        eventually(is_fresh)
        return page

    def counter(self, name: str) -> int:
        """``memserve_instance_<name>_total`` now, summed over the instances."""
        return self.counters(name)[0]

    def counters(self, *names: str) -> list[int]:
        """Several of them at one time."""
        page = self.fresh_metrics()
        found = [re.findall(rf"^memserve_instance_{name}_total{{.*}} (.+)$", page, re.M) for name in names]
        return [sum(int(float(value)) for value in values) for values in found]

    def gauge(self, name: str) -> float:
        """``memserve_<name>``, summed."""
        page = httpx.get(self.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
        return sum(float(value) for value in re.findall(rf"^memserve_{name}(?:{{.*}})? (.+)$", page, re.M))

    def instances(self) -> set[str]:
        """Those of the children that are no routers and no stores."""
        return {name for name in self.children() if re.fullmatch(r"(.*-)?[cdp]\d+", name)}

    def held(self) -> dict[str, float]:
        """What a cluster without requests and documents should not have: live requests, open transfers, blocks in use,
        pinned prefixes; as gauges that are not zero. A router that has only just joined has not been told of the
        instances' blocks: then that stands here."""
        page = httpx.get(self.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
        gauges = re.findall(rf"^({'|'.join(HELD)})({{[^}}]*}})? (.+)$", page, re.M)
        of_blocks = [labels for name, labels, _ in gauges if name == "memserve_instance_blocks"]
        if not any('state="held"' in labels for labels in of_blocks):
            return {"instances that have told of their blocks: none": 1.0}
        return {
            name + labels: float(value)
            for name, labels, value in gauges
            if float(value) and (labels not in of_blocks or 'state="held"' in labels)
        }

    def complete(self, tokens: list[int], count: int) -> str:
        return self.client.completions.create(prompt=tokens, max_tokens=count, **GREEDY).choices[0].text


def eventually(condition: Callable[[], object]) -> None:
    """As processes need it that are just being started."""
    waiting.eventually(condition, WAIT_S)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(pid: int) -> list[int]:
    """The processes of workers that ``pid`` leads."""
    return [child for child in children_of(pid) if WORKER in command_of(child)]


def unlink_store_memory(pid: int) -> None:
    """Shared memory of the store in process ``pid``: when that ends, nothing of it is left, as after a new start of the
    machine."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    for path in map(Path, set(re.findall(r"/dev/shm/memserve-store-[\w-]+\.data", maps))):
        for part in path.parent.glob(f"{path.stem}.*"):
            part.unlink()


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Server]:
    """A server that holds nothing in the end, and ends in order."""
    server = Server(folder, *arguments)
    try:
        yield server
        eventually(lambda: not server.held())
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)


def ask_until_fetched(server: Server, answer_of: Callable[[list[int], int, str], str]) -> int:
    """Ask two colocated instances for prompts that go on where one has KV, while one is busy, until KV was fetched:
    of two idle ones either may take the long answer, and it must be the one with the KV. Every answer must be that of
    ``answer_of(tokens, count, text)``, which may begin with what was said. Returns the tokens that were fetched, of a
    prefix of 96."""
    other, fetched_tokens = prompt(20, 2).tolist(), 0

    def check(tokens: list[int], count: int, text: str) -> None:
        assert text == answer_of(tokens, count, text)

    for seed in range(10, 20):
        first = prompt(100, seed).tolist()
        longer = [*first, *prompt(20, seed + 100).tolist()]
        check(first, 10, server.complete(first, 10))
        busy = iter(server.client.completions.create(prompt=other, max_tokens=230, stream=True, **GREEDY))
        begun = next(busy)
        check(longer, 10, server.complete(longer, 10))
        check(other, 230, "".join(chunk.choices[0].text for chunk in (begun, *busy)))
        fetched_tokens = server.counter("fetched_tokens")
        if fetched_tokens:
            break
    return fetched_tokens
