"""What does an open dashboard cost the router, does an open page leak, and is the attainable hit rate right?

    python bench/dashboard.py router --model FOLDER [--rounds 20] [--seconds 4]
    python bench/dashboard.py ceiling --trace FILE.jsonl.gz
    python bench/dashboard.py leak --url http://127.0.0.1:8000 [--minutes 5] [--key KEY]

``router``: the null instances and the load of ``router_overhead.py``, prompts of 1,024 token ids over 32 connections,
in rounds that alternate between no page and one: its stream of events and, every two seconds, its prefixes, as the page
asks for them. Printed: requests/s and CPU of the router a request, medians of the rounds, and the median change of a
pair of rounds with its quartiles; then the CPU that the router takes a second for a page, with all that the load has
left behind to show, while no request comes: a share of a core that noise does not hide. Needs wrk.

``ceiling``: the attainable hit rate of a trace in Mooncake's form, by the router's sketch and by a set of all blocks.

``leak``: opens the page in Chromium on a server that is under load, changes its view every five seconds, and every ten
prints the JavaScript heap after a garbage collection and the number of elements. Needs chromium and chromedriver.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
from harness.clients import meanwhile
from harness.flags import need, options, parts_of, save
from harness.processes import process_cpu_s
from harness.rounds import median, quartiles, ratios, turns
from harness.routers import need_wrk, run_wrk, vocabulary_of, write_load
from harness.tables import show
from router_overhead import LOAD_CORE, null_router

VIEWS = ("cluster", "cache", "requests", "trees")
TREES_S, CONNECTIONS, TOKENS, INSTANCES = 2.0, 32, 1024, 8
IDLE_S = 20.0


@contextmanager
def open_page(url: str) -> Iterator[None]:
    """What a page that shows the prefixes asks for, until the end of the block."""

    def read_events(over: threading.Event) -> None:
        with httpx.stream("GET", f"{url}/ui/events", timeout=30) as answer:
            for _ in answer.iter_bytes():
                if over.is_set():
                    return

    def read_trees(over: threading.Event) -> None:
        while not over.wait(TREES_S):
            httpx.get(f"{url}/ui/trees", timeout=30)

    with meanwhile(read_events, read_trees):
        yield


def measure_router(args: Namespace) -> None:
    """Interleaved rounds without and with a page."""
    need_wrk()
    model = need(args.model, "model's folder")
    os.sched_setaffinity(0, {LOAD_CORE})  # the page's own work must not take the router's core
    rounds: dict[str, list[dict[str, Any]]] = {"alone": [], "page": []}
    with tempfile.TemporaryDirectory() as name, null_router(model, Path(name), INSTANCES) as router:
        script = write_load(Path(name), TOKENS, "ids", vocabulary_of(model))
        for number, kind in turns(args.rounds, rounds, warm=1):
            with open_page(router.url) if kind == "page" else nullcontext():
                row = run_wrk(router.url, script, CONNECTIONS, args.seconds, [router.pid], LOAD_CORE)
            rounds[kind] += [row] if number >= 0 else []
        share = median(page_share(router.url, router.pid) for _ in range(5))
    rows = []
    for figure in ("requests_per_s", "router_cpu_us", "p99_ms"):
        values = {kind: [row[figure] for row in rows] for kind, rows in rounds.items()}
        low, middle, high = (100 * (ratio - 1) for ratio in quartiles(ratios(values["page"], values["alone"])))
        row = {kind: median(figures) for kind, figures in values.items()}
        rows.append({"figure": figure, **row, "low": low, "middle": middle, "high": high})
    show(rows, {"figure": "{figure}", "without": "{alone:,.1f}", "with a page": "{page:,.1f}",
                "change of a pair (quartiles)": "{middle:+.2f} % ({low:+.2f} to {high:+.2f} %)"})  # fmt: skip
    print(f"a page without requests: {100 * share:.2f} % of the router's core")
    save(args, {"rows": rows, "share": share})


def page_share(url: str, pid: int) -> float:
    """Of a second, what the router computes more with a page open while no request comes."""

    def cores() -> float:
        began_s, began_cpu_s = time.monotonic(), process_cpu_s(pid)
        time.sleep(IDLE_S)
        return (process_cpu_s(pid) - began_cpu_s) / (time.monotonic() - began_s)

    without = cores()
    with open_page(url):
        return cores() - without


def measure_leak(args: Namespace) -> None:
    """The heap of an open page."""
    from browser import browsers

    with browsers() as opener:
        browser = opener()
        if args.key:
            browser.open(f"{args.url}/ui")
            browser.until("return document.getElementById('keys').open")
            browser.errors()  # of the refused call
            browser.run("sessionStorage.setItem('memserve-key', arguments[0]); location.reload()", args.key)
        browser.open(f"{args.url}/ui")
        browser.until("return document.getElementById('state').textContent === 'live'")
        load_ms = browser.run("return performance.getEntriesByType('navigation')[0].loadEventEnd")
        print(f"loaded in {load_ms:.0f} ms")
        started, heaps = time.monotonic(), []
        for number, view in enumerate(itertools.cycle(VIEWS)):
            now_s = time.monotonic() - started
            if now_s > 60 * args.minutes:
                break
            browser.run("location.hash = arguments[0]", view)
            time.sleep(5)
            if number % len(VIEWS) in (1, 3):
                used = browser.run("gc(); return performance.memory.usedJSHeapSize") / (1 << 20)
                elements = browser.run("return document.querySelectorAll('*').length")
                heaps.append(used)
                print(f"{now_s:6.0f} s  {view:9} heap {used:6.2f} MiB, {elements} elements", flush=True)
        third = max(1, len(heaps) // 3)
        first, last = statistics.mean(heaps[:third]), statistics.mean(heaps[-third:])
        print(f"heap: mean of the first third {first:.2f} MiB, of the last {last:.2f} MiB; console: {browser.errors()}")


def measure_ceiling(args: Namespace) -> None:
    """The sketch beside the exact count."""
    from memserve.router.placement.reuse_ceiling import IDENTITY_BYTES, ReuseCeiling

    block = 512
    ceiling, tokens_seen, new, identities_known, sketch_s = ReuseCeiling(), 0, 0, set(), 0.0
    with gzip.open(args.trace, "rt") as file:
        prompts = [json.loads(line)["hash_ids"] for line in file]
    for hashes in prompts:
        tokens = block * len(hashes) + 1  # every block whole
        names = b"".join(hashlib.blake2b(str(item).encode(), digest_size=IDENTITY_BYTES).digest() for item in hashes)
        started = time.perf_counter()
        ceiling.count_prompt("", names, tokens, block)
        sketch_s += time.perf_counter() - started
        tokens_seen, new = tokens_seen + tokens, new + block * len(set(hashes) - identities_known) + 1
        identities_known |= set(hashes)
    exact, estimate = 1 - new / tokens_seen, ceiling.total_counts().attainable
    sizes = sum(sketch.nbytes for sketch, _ in ceiling._tenants.values())
    print(f"{len(identities_known):,} different blocks, {tokens_seen:,} prompt tokens")
    print(f"attainable: exact {exact:.4%}, sketch {estimate:.4%}, off by {100 * abs(estimate / exact - 1):.3f} %")
    print(f"{sizes:,} bytes for the tenant; {sketch_s * 1e6 / len(prompts):.0f} us a prompt")


KINDS = {"router": measure_router, "ceiling": measure_ceiling, "leak": measure_leak}


def main() -> None:
    args = options(
        __doc__, rest="kind", model=(Path, "a model's folder, for its vocabulary"), rounds=20, seconds=4.0,
        trace=Path, url="http://127.0.0.1:8000", minutes=5.0, key="",
    )  # fmt: skip
    for kind in parts_of(args.kind, KINDS):
        KINDS[kind](args)


if __name__ == "__main__":
    sys.exit(main())
