"""Does the load client measure what the server measures? Its records beside ``/metrics``, after one open-loop run.

    python bench/load_agreement.py [--requests 60] [--rate 1] [--prompt-tokens 512] [--output-tokens 32]

``memserve serve`` with one colocated instance, as a user would start it. Counts must be equal. Times start at the
sending here, and at the request's arrival there; the difference is the kernel and HTTP. The exit status is 1
if anything differs by more than ``--percent``.
"""

from __future__ import annotations

import os
import sys

from harness.flags import options, save
from harness.served import serving
from harness.tables import show

from memserve.base.units import NS_PER_S
from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import Driver, drive
from memserve_lab.bench.load.prompts import Manner, RequestRecord
from memserve_lab.bench.metrics import timing
from memserve_lab.workloads.arrivals import Poisson, by_session
from memserve_lab.workloads.sessions import uniform_workload

COUNTS = {
    "requests": "time_to_first_token_seconds_count",
    "prompt tokens": "prompt_tokens_total",
    "cached tokens": "cached_prompt_tokens_total",
    "generated tokens": "generated_tokens_total",
}
TIMES = {
    "TTFT, mean (ms)": "time_to_first_token_seconds",
    "TPOT, mean (ms)": "time_per_output_token_seconds",
    "whole request, mean (ms)": "request_seconds",
}
MS = 1e3


def ours(records: list[RequestRecord]) -> dict[str, float]:
    """The client's figures, with times from the sending."""
    felt = [item for record in records if (item := timing(record)) is not None]
    late_s = sum((record.sent_ns or 0) - record.scheduled_ns for record in records) / NS_PER_S / len(records)
    paced = [item.tpot_s for item in felt if item.tpot_s is not None]
    return {
        "requests": len(felt),
        "prompt tokens": sum(record.prompt_tokens or 0 for record in records),
        "cached tokens": sum(record.cached_tokens or 0 for record in records),
        "generated tokens": sum(record.output_tokens for record in records),
        "TTFT, mean (ms)": MS * (sum(item.ttft_s for item in felt) / len(felt) - late_s),
        "TPOT, mean (ms)": MS * sum(paced) / len(paced),
        "whole request, mean (ms)": MS * (sum(item.jct_s for item in felt) / len(felt) - late_s),
    }


def theirs(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The server's figures between two readings of its metrics."""

    def grown(name: str) -> float:
        return after[f"memserve_{name}"] - before[f"memserve_{name}"]

    counts = {title: grown(name) for title, name in COUNTS.items()}
    return counts | {title: MS * grown(f"{name}_sum") / grown(f"{name}_count") for title, name in TIMES.items()}


def main() -> int:
    args = options(__doc__, requests=60, rate=1.0, prompt_tokens=512, output_tokens=32, percent=1.0)
    uniform = uniform_workload(
        args.requests, prompt_tokens=args.prompt_tokens, shared_tokens=args.prompt_tokens // 2,
        output_tokens=args.output_tokens,
    )  # fmt: skip
    workload = by_session(uniform, Poisson(args.rate), seed=1)
    with serving("--prefill", "0", "--decode", "0", "--colocated", "1") as server:
        before = server.metrics()
        run = drive(lambda: Driver(workload, Target(server.url), Manner(server.model)))
        after = server.metrics()
        server.stop()
    client, metrics = ours(run.records), theirs(before, after)
    rows = [{"figure": title, "client": value, "server": metrics[title]} for title, value in client.items()]
    for row in rows:
        row["apart"] = 100 * abs(row["client"] / row["server"] - 1) if row["server"] else 0.0
    show(rows, {"figure": "{figure}", "client": "{client:.2f}", "server": "{server:.2f}", "apart": "{apart:.2f} %"})
    worst = max(row["apart"] for row in rows)
    save(args, {"client": client, "server": metrics, "apart_percent_max": worst, "load_average": os.getloadavg()})
    return int(worst > args.percent)


if __name__ == "__main__":
    sys.exit(main())
