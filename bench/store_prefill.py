"""What offering KV to a store costs: prefill, CPU, and the decode steps of other requests, in turns, in one run.

Two servers stand beside each other with the same model and options; one of them has a store, in memory and on a disk.
Prompts of random tokens, each of them new, go to one and to the other in turn, one at a time, and the order changes
from pair to pair: what else happens on the machine meets both. Every third pair goes to the server without a store
twice: how far its two halves differ is what the measurement itself cannot tell. On a machine that does other things,
look at the CPU time instead: of the instance, and of the store, a prompt.

    busy    as many threads as cores: what the store's side does takes cores from prefill
    free    one thread fewer: a core is free for it

*Stall*: a stream decodes while new prompts are computed on the same instance, and their KV is offered: the time between
two of its tokens, at the mean of all and of the longest tenth, with a store beside without. Its prompts come with the
same pauses at both.

    python bench/store_prefill.py [--tokens 512 2048] [--pairs 40] [--quick] [--model M] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import numpy as np
from served import Served, end_in_order, serving

TIMEOUT_S = 600.0
STATS_S = 3.0
"""Until the next heartbeat with statistics."""
PROMPTS_MAX = 12
"""Prompts beside one stream."""
Sides = dict[str, Served]


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
            if "--name" in words:
                ns = sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
                found[words[words.index("--name") + 1]] = ns / 1e9
    return found


def start(stack: ExitStack, arguments: argparse.Namespace, threads: int) -> tuple[Served, Served]:
    """The server without a store and the one with."""
    common = ["--colocated", "1", "--metadata", "none", "--kv-memory", arguments.kv_memory, "--served-model-name", "x"]
    common += ["--threads", str(threads), *(["--model", arguments.model] if arguments.model else [])]
    disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-prefill-"))
    plain = stack.enter_context(serving(*common))
    disks = [] if arguments.no_disk else ["--ssd", f"{disk}/kv=2GiB"]
    return plain, stack.enter_context(serving(*common, *disks, "--store-dram", "256MiB"))


def measure_prefill(
    sides: Sides, rng: np.random.Generator, count: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """New prompts of ``count`` tokens at both servers."""
    times: dict[str, list[float]] = {"plain": [], "stored": [], "first": [], "second": []}
    spent = dict.fromkeys([*times, "store"], 0.0)
    with httpx.Client() as client:
        for pair in range(-1, arguments.pairs):  # the first one warms up
            names = ["first", "second"] if pair % 3 == 2 and pair > 0 else ["plain", "stored"]
            for name in names if pair % 2 else reversed(names):
                tokens = rng.integers(1000, 40_000, count).tolist()
                before = cpu_s(sides[name])
                first_s = first_token_s(client, sides[name], tokens)
                time.sleep(arguments.pause)  # the store takes what was offered last before the next one is measured
                after = cpu_s(sides[name])
                if pair < 0:
                    continue
                times[name].append(first_s)
                spent[name] += after["c1"] - before["c1"]
                spent["store"] += after.get("s1", 0.0) - before.get("s1", 0.0)
    ratios = [after / before for before, after in zip(times["plain"], times["stored"], strict=True)]
    noise = [after / before for before, after in zip(times["first"], times["second"], strict=True)]
    return {
        "tokens": count,
        "plain_s": median(times["plain"]),
        "stored_s": median(times["stored"]),
        "added_share": median(ratios) - 1.0,
        "noise_share": median(noise) - 1.0 if noise else 0.0,
        "pairs": len(ratios),
        "plain_cpu_s": spent["plain"] / len(ratios),
        "stored_cpu_s": spent["stored"] / len(ratios),
        "store_cpu_s": spent["store"] / len(ratios),
        "added_cpu_share": (spent["stored"] + spent["store"]) / spent["plain"] - 1.0,
        "added_cpu_share_of_the_instance": spent["stored"] / spent["plain"] - 1.0,
        "noise_cpu_share": spent["second"] / spent["first"] - 1.0 if spent["first"] else 0.0,
    }


def gaps_s(server: Served, rng: np.random.Generator, count: int, arguments: argparse.Namespace) -> list[float]:
    """Times between the tokens of one stream, while new prompts of ``count`` tokens are computed beside it."""
    seed = int(rng.integers(1 << 40))
    over = threading.Event()

    def ask() -> None:
        words = np.random.default_rng(seed)
        with httpx.Client() as client:
            for _ in range(PROMPTS_MAX):
                if over.wait(arguments.pause):
                    return
                first_token_s(client, server, words.integers(1000, 40_000, count).tolist())

    body = {"model": "x", "prompt": rng.integers(1000, 40_000, 64).tolist(), "max_tokens": arguments.stream_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    asker, at, found = threading.Thread(target=ask), 0.0, []
    with httpx.Client() as client, client.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S
    ) as lines:  # fmt: skip
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if at:
                found.append(now - at)
            else:
                asker.start()
            at = now
    over.set()
    asker.join()
    return found


def measure_stall(sides: Sides, rng: np.random.Generator, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A stream beside new prompts, at both servers."""
    steps: dict[str, list[tuple[float, float]]] = {"plain": [], "stored": [], "first": [], "second": []}
    for turn in range(arguments.streams):
        for names in (["plain", "stored"], ["first", "second"]):
            for name in names if turn % 2 else reversed(names):
                gaps = sorted(gaps_s(sides[name], rng, count, arguments))
                steps[name].append((mean(gaps), mean(gaps[-len(gaps) // 10 :])))

    def added(before: str, after: str, which: int) -> float:
        pairs = zip(steps[before], steps[after], strict=True)
        return median(two[which] / one[which] for one, two in pairs) - 1.0

    return {
        "plain_step_s": median(one for one, _ in steps["plain"]),
        "added_step_share": added("plain", "stored", 0),
        "noise_step_share": added("first", "second", 0),
        "added_longest_share": added("plain", "stored", 1),
        "noise_longest_share": added("first", "second", 1),
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each number of threads and tokens."""
    rng, records = np.random.default_rng(arguments.seed), []
    cores = len(os.sched_getaffinity(0))
    for mode in arguments.modes:
        threads = cores if mode == "busy" else max(1, cores - 1)
        with ExitStack() as stack:
            plain, stored = start(stack, arguments, threads)
            sides = {"plain": plain, "stored": stored, "first": plain, "second": plain}
            for count in arguments.tokens:
                record = {"mode": mode, "threads": threads, **measure_prefill(sides, rng, count, arguments)}
                if arguments.streams:
                    record |= measure_stall(sides, rng, count, arguments)
                records.append(record)
                print(f"{mode}, {count} tokens: {record['added_share']:+.1%}", flush=True)
            time.sleep(STATS_S)
            found = stored.metrics().items()
            records[-1]["blocks"] = {key: value for key, value in found if "instance_store_blocks" in key}
            for server in (plain, stored):
                server.stop()
    return records


def show(records: list[dict[str, Any]]) -> None:
    """The table: what the store adds; beside it what the measurement cannot tell."""
    columns = (("TTFT", "share"), ("CPU of the instance", "cpu_share"), ("decode step", "step_share"),
               ("longest steps", "longest_share"))  # fmt: skip
    print("cores  tokens   TTFT without " + "".join(f"{name:>29}" for name, _ in columns))
    for record in records:
        line = f"{record['mode']:5} {record['tokens']:7} {record['plain_s'] * 1000:11.1f} ms "
        for _, key in columns:
            mine = record.get("added_cpu_share_of_the_instance" if key == "cpu_share" else f"added_{key}")
            if mine is not None:
                line += f"{mine:+20.1%} ({record[f'noise_{key}']:+.1%})"
        print(line)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--modes", nargs="+", choices=("busy", "free"), default=["busy", "free"])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--streams", type=int, default=5, help="pairs of streams for the stall; 0: none")
    parser.add_argument("--stream-tokens", type=int, default=150)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two prompts")
    parser.add_argument("--kv-memory", default="384MiB")
    parser.add_argument("--model", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-disk", action="store_true", help="the store has memory alone")
    parser.add_argument("--quick", action="store_true", help="9 pairs, one stream")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.streams = 9, 1
    end_in_order()
    records = measure(arguments)
    show(records)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
