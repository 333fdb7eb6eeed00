"""Instances that leave under load: what their clients notice, when running requests migrate, when they stay, and after
kill -9.

    python bench/migration.py [--model DIR] [--streams 8] [--tokens 800] [--rounds 3] [--ways migrate,stay,kill,upgrade]
                              [--dtype float32] [--json FILE]

``memserve serve`` without instances of its own, and two ``memserve instance --join``; each stream decodes greedily.
Once all have begun:

* *migrate*: SIGTERM to one instance, as ``memserve scale``, a service manager or Kubernetes send it.
* *stay*: the same with ``--migration off``: the instance finishes what it has.
* *kill*: the instance is killed with -9; its requests go on elsewhere from the tokens that clients have.
* *upgrade*: each instance gets a successor, and SIGTERM once that has joined; one after the other.

*gap*: the longest time between two events of one stream, from the signal until ``--watch-s`` behind the end of the
process; *before*: the same until the signal (of *upgrade* with the starts of two processes in it, which take a core).
*computed twice*: tokens of prompts and answers, by ``memserve_router_recomputed_tokens_total``. *left*: time from the
signal to the end of the process. *right*: answers equal to those of a run without signals.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from harness.clients import Answer, greedy, stream
from harness.flags import Commas, options, save
from harness.processes import is_ready, metric_sum, metrics_of, process, wait_until
from harness.prompts import random_tokens
from harness.tables import Table

from ports import free_port

WAIT_S = 120.0
COLUMNS = {
    "way": "{way}", "migrated": "{migrated:.0f}", "computed twice": "{recomputed_tokens:.0f}",
    "gap": "{gap_ms:.0f} ms", "before": "{gap_before_ms:.0f} ms", "left": "{left_s:.2f} s", "right": "{right}",
}  # fmt: skip


@dataclass
class Row:
    """One round of one way."""

    way: str
    migrated: float
    recomputed_tokens: float
    gap_ms: float
    gap_before_ms: float
    left_s: float
    right: str


@dataclass
class Crowd:
    """Streams that began together."""

    url: str
    model: str
    prompts: list[list[int]]
    tokens: int
    begun: threading.Barrier = field(init=False)
    moments: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.moments = [[] for _ in self.prompts]
        self.begun = threading.Barrier(len(self.prompts) + 1)

    def ask(self, place: int) -> Answer:
        """One stream; waits behind its eighth event until all are there."""
        moments = self.moments[place]

        def note(_: Answer) -> None:
            moments.append(time.perf_counter())
            if len(moments) == 8:
                self.begun.wait(WAIT_S)

        body = greedy(self.prompts[place], self.tokens, self.model, ignore_eos=True)
        return stream(self.url, body, on_event=note)

    def longest_gap_ms(self, since_s: float, until_s: float) -> float:
        """Between two events of a stream of which the later one lies in this time."""
        gaps = [
            later - earlier
            for moments in self.moments
            for earlier, later in itertools.pairwise(moments[8:])  # all have waited before
            if since_s < later <= until_s
        ]
        return 1e3 * max(gaps, default=0.0)


class Cluster:
    """A router, and instances that have joined it."""

    def __init__(self, stack: ExitStack, args: Namespace, *flags: str) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memserve-migration-"))
        secret, port = Path(folder) / "secret", free_port()
        secret.write_text(secrets.token_urlsafe(32))
        self._model = ["--dtype", args.dtype, *(("--model", args.model) if args.model else ())]
        cluster = ["--colocated", "0", "--prefill", "0", "--decode", "0", "--cluster-port", str(port)]
        file = ["--cluster-secret-file", str(secret)]
        self._join = ["--join", f"127.0.0.1:{port}", *file, "--kv-memory", args.kv_memory]
        self._stack, self._folder = stack, folder
        self.instances: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"http://127.0.0.1:{(http := free_port())}"
        name = ["--port", str(http), "--served-model-name", "m", "--metadata", "none"]
        self._start("serve", *self._model, *cluster, *file, *name, *flags)
        for number in (1, 2):
            self.add(f"c{number}")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "XDG_STATE_HOME": self._folder}
        return self._stack.enter_context(process([sys.executable, "-m", "memserve", *words], environment=environment))

    def add(self, name: str) -> None:
        """Start an instance, and wait until it takes requests."""
        self.instances[name] = self._start("instance", *self._model, *self._join, "--name", name)
        wait_until(lambda: name in self.members(), f"{name} has joined", WAIT_S, 0.05)

    def members(self) -> set[str]:
        """Those that take requests."""
        metrics = metrics_of(self.url) if is_ready(self.url) else {}
        keys = [key for key, value in metrics.items() if key.startswith("memserve_instance_up{") and value]
        return {name for name in self.instances if any(f'"{name}"' in key for key in keys)}

    def leave(self, name: str, sig: int) -> float:
        """Signal an instance, and wait until its process has ended. Returns the seconds."""
        started = time.perf_counter()
        self.instances[name].send_signal(sig)
        self.instances.pop(name).wait(WAIT_S)
        return time.perf_counter() - started


def measure(way: str, args: Namespace, expected: list[str]) -> Row:
    """One cluster, one crowd."""
    with ExitStack() as stack:
        cluster = Cluster(stack, args, *(("--migration", "off") if way == "stay" else ()))
        pool, rng = stack.enter_context(ThreadPoolExecutor(args.streams)), Random(1)
        prompts = [random_tokens(args.prompt_tokens, rng) for _ in range(args.streams)]
        crowd = Crowd(cluster.url, "m", prompts, args.tokens)
        answers = [pool.submit(partial(crowd.ask, place)) for place in range(args.streams)]
        crowd.begun.wait(WAIT_S)
        time.sleep(args.settle_s)
        gaps_ms, left_s, signalled_s = [0.0], 0.0, 0.0
        for name in {"none": (), "upgrade": ("c1", "c2")}.get(way, ("c2",)):
            if way == "upgrade":
                cluster.add(f"{name}n")
            signalled_s = time.perf_counter()
            left_s += cluster.leave(name, signal.SIGKILL if way == "kill" else signal.SIGTERM)
            time.sleep(args.watch_s)
            gaps_ms.append(crowd.longest_gap_ms(signalled_s, time.perf_counter()))
        before_ms = crowd.longest_gap_ms(0.0, signalled_s)
        texts = [answer.result().checked().text for answer in answers]
        expected[:] = expected or texts
        metrics, right = metrics_of(cluster.url), sum(map(str.__eq__, texts, expected))
        migrated, recomputed = (
            metric_sum(metrics, f"memserve_router_{name}_total") for name in ("migrated", "recomputed_tokens")
        )
        return Row(way, migrated, recomputed, max(gaps_ms), before_ms, left_s, f"{right} of {len(texts)}")


def main() -> None:
    args = options(
        __doc__, model="", streams=8, tokens=800, prompt_tokens=500, rounds=3, kv_memory="256MiB", settle_s=0.5,
        watch_s=8.0, dtype="float32",
        ways=Commas("migrate", "stay", "kill", "upgrade"),
    )  # fmt: skip
    expected: list[str] = []
    measure("none", args, expected)
    rows: list[Row] = []
    table = Table(COLUMNS)
    for _ in range(args.rounds):
        for way in args.ways:
            rows.append(measure(way, args, expected))
            table.show(asdict(rows[-1]))
    medians: dict[str, Any] = {
        way: {
            name: statistics.median(getattr(row, name) for row in rows if row.way == way)
            for name in ("gap_ms", "gap_before_ms", "left_s", "recomputed_tokens", "migrated")
        }
        for way in args.ways
    }
    for way, median in medians.items():
        print(f"{way}: " + ", ".join(f"{name} {value:.1f}" for name, value in median.items()))
    save(args, {"rows": [asdict(row) for row in rows], "medians": medians})


if __name__ == "__main__":
    main()
