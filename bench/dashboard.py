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

import argparse
import gzip
import hashlib
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import router_overhead as null

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
VIEWS = ("cluster", "cache", "requests", "trees")
TREES_S, CONNECTIONS, TOKENS, INSTANCES = 2.0, 32, 1024, 8
IDLE_S = 20.0


@contextmanager
def open_page(url: str) -> Iterator[None]:
    """What a page that shows the prefixes asks for, until the end of the block."""
    ended = threading.Event()

    def events() -> None:
        with httpx.stream("GET", f"{url}/ui/events", timeout=30) as answer:
            for _ in answer.iter_bytes():
                if ended.is_set():
                    return

    def trees() -> None:
        while not ended.wait(TREES_S):
            httpx.get(f"{url}/ui/trees", timeout=30)

    threads = [threading.Thread(target=work) for work in (events, trees)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)


@contextmanager
def null_cluster(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """A router on core 0 before null instances on core 1: its address and process id."""
    secret, http, port = secrets.token_urlsafe(32), null.free_port(), null.free_port()
    (folder / "secret").write_text(secret)
    serve = ["serve", "--model", str(model), "--prefill", "0", "--decode", "0", "--colocated", "0", "--port", str(http)]
    serve += ["--cluster-port", str(port), "--cluster-secret-file", str(folder / "secret"), "--metadata", "none"]
    serve += ["--served-model-name", "m"]
    router = subprocess.Popen(["taskset", "-c", "0", sys.executable, "-m", "memserve", *serve])
    script = [sys.executable, null.__file__, "--model", str(model), "--be-instances", str(INSTANCES)]
    environment = {**os.environ, "ROUTER_ADDRESS": f"127.0.0.1:{port}", "ROUTER_SECRET": secret}
    instances = subprocess.Popen(["taskset", "-c", "1", *script], stdin=subprocess.PIPE, env=environment)
    try:
        null._wait_until_ready(f"http://127.0.0.1:{http}")
        yield f"http://127.0.0.1:{http}", router.pid
    finally:
        for process in (instances, router):
            process.terminate()
            process.wait(30)


def measure_router(args: argparse.Namespace) -> None:
    """Interleaved rounds without and with a page."""
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    os.sched_setaffinity(0, {1})  # the page's own work must not take the router's core
    with tempfile.TemporaryDirectory() as name, null_cluster(args.model, Path(name)) as (url, pid):
        script = null.write_load(Path(name), TOKENS, "ids", vocabulary)
        router: null.Router = ("memserve", url, pid)

        def round_of_load() -> dict[str, Any]:
            return null.measure([router], script, CONNECTIONS, args.seconds, 1)[0]

        round_of_load()  # warms
        rounds: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for number in range(args.rounds):
            for is_open in (False, True) if number % 2 else (True, False):
                if is_open:
                    with open_page(url):
                        rounds[True].append(round_of_load())
                else:
                    rounds[False].append(round_of_load())
        alone = statistics.median(page_share(url, pid) for _ in range(5))
    for figure in ("requests_per_s", "router_cpu_us", "p99_ms"):
        without, with_page = ([found[figure] for found in rounds[is_open]] for is_open in (False, True))
        changes = [100 * (b / a - 1) for a, b in zip(without, with_page, strict=True)]
        low, middle, high = statistics.quantiles(changes, n=4)
        print(
            f"{figure}: without {statistics.median(without):,.1f}, with a page {statistics.median(with_page):,.1f}; "
            f"change of a pair {middle:+.2f} % (quartiles {low:+.2f} to {high:+.2f} %, {len(changes)} pairs)"
        )
    print(f"a page without requests: {100 * alone:.2f} % of the router's core")


def page_share(url: str, pid: int) -> float:
    """Of a second, what the router computes more with a page open while no request comes."""

    def of_a_second() -> float:
        began_s, began_cpu_s = time.monotonic(), null.cpu_seconds(pid)
        time.sleep(IDLE_S)
        return (null.cpu_seconds(pid) - began_cpu_s) / (time.monotonic() - began_s)

    without = of_a_second()
    with open_page(url):
        return of_a_second() - without


def measure_leak(args: argparse.Namespace) -> None:
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


def measure_ceiling(args: argparse.Namespace) -> None:
    """The sketch beside the exact count."""
    from memserve.router.placement.reuse_ceiling import IDENTITY_BYTES, ReuseCeiling

    block = 512
    ceiling, seen, new, known, sketch_s = ReuseCeiling(), 0, 0, set(), 0.0
    with gzip.open(args.trace, "rt") as file:
        prompts = [json.loads(line)["hash_ids"] for line in file]
    for hashes in prompts:
        tokens = block * len(hashes) + 1  # every block whole
        names = b"".join(hashlib.blake2b(str(one).encode(), digest_size=IDENTITY_BYTES).digest() for one in hashes)
        started = time.perf_counter()
        ceiling.prompt("", names, tokens, block)
        sketch_s += time.perf_counter() - started
        seen, new = seen + tokens, new + block * len(set(hashes) - known) + 1
        known |= set(hashes)
    exact, estimate = 1 - new / seen, ceiling.whole().attainable
    sizes = sum(sketch.nbytes for sketch, _ in ceiling._tenants.values())
    print(f"{len(known):,} different blocks, {seen:,} prompt tokens")
    print(f"attainable: exact {exact:.4%}, sketch {estimate:.4%}, off by {100 * abs(estimate / exact - 1):.3f} %")
    print(f"{sizes:,} bytes for the tenant; {sketch_s * 1e6 / len(prompts):.0f} us a prompt")


def main() -> int:
    """Measure one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(required=True)
    router = kinds.add_parser("router")
    router.add_argument("--model", type=Path, required=True, help="a model's folder, for its vocabulary")
    router.add_argument("--rounds", type=int, default=20)
    router.add_argument("--seconds", type=float, default=4)
    router.set_defaults(measure=measure_router)
    ceiling = kinds.add_parser("ceiling")
    ceiling.add_argument("--trace", type=Path, required=True)
    ceiling.set_defaults(measure=measure_ceiling)
    leak = kinds.add_parser("leak")
    leak.add_argument("--url", default="http://127.0.0.1:8000")
    leak.add_argument("--minutes", type=float, default=5)
    leak.add_argument("--key", default="")
    leak.set_defaults(measure=measure_leak)
    args = parser.parse_args()
    args.measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
