"""The cost of the load client itself: open loop against a server that answers at once.

    python bench/load_client.py [--rates 500,1000,2000] [--seconds 5] [--rounds 3] [--json FILE]

The server is a separate process that answers every request with a canned stream of four tokens; client and server
get a core each. *first* and *late* count from the scheduled arrival: the client's own part, plus the loopback and the
server's few microseconds for *first*. Rates take turns inside each round; figures are medians over the rounds.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
from multiprocessing.connection import Connection

from harness.flags import Commas, options, save
from harness.instant import serve_instantly
from harness.rounds import medians, turns
from harness.tables import show

from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import Driver, drive
from memserve_lab.bench.load.prompts import Manner
from memserve_lab.bench.metrics import figures
from memserve_lab.workloads.arrivals import Constant, by_session
from memserve_lab.workloads.sessions import uniform_workload

TOKENS, PROMPT_TOKENS = 4, 200


def event(body: str) -> bytes:
    """One server-sent event as a chunk of HTTP/1.1."""
    data = b"data: " + body.encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = event('{"id":"x","object":"text_completion","choices":[{"index":0,"text":" a","finish_reason":null}]}')
USAGE = event('{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (PROMPT_TOKENS, TOKENS))  # noqa: UP031  # the text has braces of its own
ANSWER = HEAD + TOKEN * TOKENS + USAGE + event("[DONE]") + b"0\r\n\r\n"


def serve(line: Connection, core: int) -> None:
    """A process: tells its port, and answers."""
    os.sched_setaffinity(0, {core})
    serve_instantly(lambda path: ANSWER, on_listen=line.send)


def measure(url: str, rate: float, seconds: float) -> dict[str, float]:
    """One run at one rate."""
    uniform = uniform_workload(
        round(rate * seconds), prompt_tokens=PROMPT_TOKENS, shared_tokens=0, output_tokens=TOKENS
    )
    workload = by_session(uniform, Constant(rate), seed=1)
    cpu_s = time.process_time()
    run = drive(lambda: Driver(workload, Target(url), Manner("m")))
    cpu_s = time.process_time() - cpu_s
    results = figures(run.records)
    assert results.ttft_s is not None and results.late_s is not None and results.failed == 0, results.errors
    return {
        "requests/s": results.requests_per_s,
        "first P50, ms": results.ttft_s.p50 * 1e3,
        "first P99, ms": results.ttft_s.p99 * 1e3,
        "late P50, ms": results.late_s.p50 * 1e3,
        "late P99, ms": results.late_s.p99 * 1e3,
        "CPU a request, us": cpu_s * 1e6 / results.requests,
    }


def main() -> None:
    args = options(__doc__, rates=Commas(500.0, 1000.0, 2000.0), seconds=5.0, rounds=3)
    cores = sorted(os.sched_getaffinity(0))
    ours, far_end = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(far_end, cores[-1]), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    os.sched_setaffinity(0, {cores[0]})
    rows: dict[float, list[dict[str, float]]] = {rate: [] for rate in args.rates}
    for _, rate in turns(args.rounds, args.rates):
        rows[rate].append(measure(url, rate, args.seconds))
    server.terminate()
    results = {rate: medians(figures) for rate, figures in rows.items()}
    names = {name: f"{{{name}:.2f}}" for name in next(iter(results.values()))}
    show(({"rate": rate} | row for rate, row in results.items()), {"rate, 1/s": "{rate:.0f}"} | names)
    save(args, {"load_average": os.getloadavg(), "medians": results})


if __name__ == "__main__":
    main()
