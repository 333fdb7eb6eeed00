"""What offering KV to a store costs prefill: the time to the first token with and without one, in turns, in one run.

Two servers stand beside each other with the same model and options; one of them has a store, in memory and on a disk.
Prompts of random tokens, each of them new, go to one and to the other in turn, one at a time, and the order changes
from pair to pair: what else happens on the machine meets both. Every third pair goes to the server without a store
twice: how far its two halves differ is what the measurement itself cannot tell. On a machine that does other things,
look at the CPU time instead: of the instance, and of the store, a prompt.

    python bench/store_prefill.py [--tokens 2048] [--pairs 40] [--model M] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from served import Served, serving

TIMEOUT_S = 600.0
STATS_S = 3.0
"""Until the next heartbeat with statistics."""


def first_token_s(client: httpx.Client, server: Served, tokens: list[int]) -> float:
    """Seconds from the request to the end of an answer of one token."""
    body = {"model": "x", "prompt": tokens, "max_tokens": 1, "temperature": 0}
    begin = time.perf_counter()
    answer = client.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    spent_s = time.perf_counter() - begin
    answer.raise_for_status()
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert not cached, f"{cached} tokens of a new prompt were cached"
    return spent_s


def cpu_s(server: Served) -> dict[str, float]:
    """CPU seconds so far of each child, by name."""
    found = {}
    for children in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if "--name" in words:
                ticks = int(fields[11]) + int(fields[12])
                found[words[words.index("--name") + 1]] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of one run."""
    rng = np.random.default_rng(arguments.seed)
    common = ["--colocated", "1", "--metadata", "none", "--kv-memory", arguments.kv_memory, "--served-model-name", "x"]
    common += ["--model", arguments.model] if arguments.model else []
    times: dict[str, list[float]] = {"plain": [], "stored": [], "first": [], "second": []}
    with ExitStack() as stack:
        disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-prefill-"))
        client = stack.enter_context(httpx.Client())
        plain = stack.enter_context(serving(*common))
        disks = [] if arguments.no_disk else ["--ssd", f"{disk}/kv=2GiB"]
        stored = stack.enter_context(serving(*common, *disks, "--store-dram", "256MiB"))
        sides = {"plain": plain, "stored": stored, "first": plain, "second": plain}
        for server in (plain, stored):
            first_token_s(client, server, rng.integers(1000, 40_000, arguments.tokens).tolist())  # warm
        spent = dict.fromkeys([*times, "store"], 0.0)
        for pair in range(arguments.pairs):
            names = ["first", "second"] if pair % 3 == 2 else ["plain", "stored"]
            for name in names if pair % 2 else reversed(names):
                tokens = rng.integers(1000, 40_000, arguments.tokens).tolist()
                before = cpu_s(sides[name])
                times[name].append(first_token_s(client, sides[name], tokens))
                time.sleep(arguments.pause)  # the store takes what was offered last before the next one is measured
                after = cpu_s(sides[name])
                spent[name] += after["c1"] - before["c1"]
                spent["store"] += after.get("s1", 0.0) - before.get("s1", 0.0)
        time.sleep(STATS_S)
        blocks = {key: value for key, value in stored.metrics().items() if "instance_store_blocks" in key}
        for server in (plain, stored):
            server.stop()
    ratios = [after / before for before, after in zip(times["plain"], times["stored"], strict=True)]
    noise = [after / before for before, after in zip(times["first"], times["second"], strict=True)]
    return {
        "tokens": arguments.tokens,
        "plain_s": median(times["plain"]),
        "stored_s": median(times["stored"]),
        "added_share": median(ratios) - 1.0,
        "noise_share": median(noise) - 1.0,
        "pairs": len(ratios),
        "plain_cpu_s": spent["plain"] / len(ratios),
        "stored_cpu_s": spent["stored"] / len(ratios),
        "store_cpu_s": spent["store"] / len(ratios),
        "added_cpu_share": (spent["stored"] + spent["store"]) / spent["plain"] - 1.0,
        "added_cpu_share_of_the_instance": spent["stored"] / spent["plain"] - 1.0,
        "noise_cpu_share": spent["second"] / spent["first"] - 1.0 if spent["first"] else 0.0,
        "blocks": blocks,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two prompts")
    parser.add_argument("--kv-memory", default="384MiB")
    parser.add_argument("--model", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-disk", action="store_true", help="the store has memory alone")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = measure(arguments)
    print(json.dumps(record, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
