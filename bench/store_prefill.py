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

import os
import tempfile
import threading
import time
from argparse import Namespace
from contextlib import ExitStack
from random import Random
from typing import Any

import httpx
from harness.clients import TIMEOUT_S, greedy, meanwhile, post, stream
from harness.options import options, save
from harness.processes import end_in_order
from harness.prompts import random_tokens
from harness.rounds import Samples, mean
from harness.served import STATS_S, Served, serving
from harness.tables import show

PROMPTS_MAX = 12
"""Prompts beside one stream."""
Sides = dict[str, Served]
TIMES = {"plain": "stored", "first": "second"}
"""What is compared: the server without a store with the one that has it, and the first of them with itself."""
COLUMNS = {"cores": "{mode}", "tokens": "{tokens}", "TTFT without": "{plain_ms:.1f} ms"} | {
    name: f"{{added_{key}:+.1%}} ({{noise_{key}:+.1%}})"
    for name, key in (("TTFT", "share"), ("CPU of the instance", "cpu_share"), ("decode step", "step_share"),
                      ("longest steps", "longest_share"))
}  # fmt: skip


def first_token_s(client: httpx.Client, server: Served, tokens: list[int]) -> float:
    """Seconds from the request to the end of an answer of one token."""
    answer = post(server.url, greedy(tokens, 1), client=client).checked()
    assert not answer.cached, f"{answer.cached} tokens of a new prompt were cached"
    return answer.total_s


def start(stack: ExitStack, given: Namespace, threads: int) -> Sides:
    """The server without a store and the one with."""
    common = ["--colocated", "1", "--metadata", "none", "--kv-memory", given.kv_memory, "--served-model-name", "x"]
    common += ["--threads", str(threads)]
    disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-prefill-"))
    plain = stack.enter_context(serving(*common, model=given.model))
    disks = [] if given.no_disk else ["--ssd", f"{disk}/kv=2GiB"]
    stored = stack.enter_context(serving(*common, *disks, "--store-dram", "256MiB", model=given.model))
    return {"plain": plain, "stored": stored, "first": plain, "second": plain}


def measure_prefill(sides: Sides, rng: Random, count: int, given: Namespace) -> dict[str, Any]:
    """New prompts of ``count`` tokens at both servers."""
    times, spent = Samples(), Samples()
    with httpx.Client() as client:
        for pair in range(-1, given.pairs):  # the first one warms up
            names = ("first", "second") if pair % 3 == 2 and pair > 0 else ("plain", "stored")
            for name in names if pair % 2 else reversed(names):
                before = sides[name].children_cpu_s()
                first_s = first_token_s(client, sides[name], random_tokens(count, rng))
                time.sleep(given.pause)  # the store takes what was offered last before the next one is measured
                after = sides[name].children_cpu_s()
                if pair >= 0:
                    times[name].append(first_s)
                    spent[name].append(after["c1"] - before["c1"])
                    spent["store"].append(after.get("s1", 0.0) - before.get("s1", 0.0))
    pairs = len(times["plain"])
    record = {f"{name}_cpu_s": sum(spent[name]) / pairs for name in ("plain", "stored", "store")}
    record |= {f"{name}_ms": 1e3 * times.median(name) for name in ("plain", "stored")}
    return record | {
        "tokens": count,
        "pairs": pairs,
        "added_share": times.ratio("stored", "plain") - 1.0,
        "noise_share": times.ratio("second", "first") - 1.0 if times["first"] else 0.0,
        "added_cpu_share": sum(spent["stored"]) / sum(spent["plain"]) - 1.0,
        "added_cpu_share_with_the_store": (sum(spent["stored"]) + sum(spent["store"])) / sum(spent["plain"]) - 1.0,
        "noise_cpu_share": sum(spent["second"]) / sum(spent["first"]) - 1.0 if spent["first"] else 0.0,
    }


def gaps_s(server: Served, rng: Random, count: int, given: Namespace) -> list[float]:
    """Times between the tokens of one stream, while new prompts of ``count`` tokens are computed beside it."""
    seed, started = rng.randrange(1 << 40), threading.Event()

    def ask(over: threading.Event) -> None:
        own = Random(seed)
        started.wait(TIMEOUT_S)
        with httpx.Client() as client:
            for _ in range(PROMPTS_MAX):
                if over.wait(given.pause):
                    return
                first_token_s(client, server, random_tokens(count, own))

    with meanwhile(ask):
        body = greedy(random_tokens(64, rng), given.stream_tokens)
        return stream(server.url, body, on_event=lambda _: started.set()).checked().steps_s


def measure_stall(sides: Sides, rng: Random, count: int, given: Namespace) -> dict[str, Any]:
    """A stream beside new prompts, at both servers."""
    means, longest = Samples(), Samples()
    for number in range(given.streams):
        for names in TIMES.items():
            for name in names if number % 2 else reversed(names):
                gaps = sorted(gaps_s(sides[name], rng, count, given))
                means[name].append(mean(gaps))
                longest[name].append(mean(gaps[-len(gaps) // 10 :]))
    return {
        "plain_step_s": means.median("plain"),
        "added_step_share": means.ratio("stored", "plain") - 1.0,
        "noise_step_share": means.ratio("second", "first") - 1.0,
        "added_longest_share": longest.ratio("stored", "plain") - 1.0,
        "noise_longest_share": longest.ratio("second", "first") - 1.0,
    }


def measure(given: Namespace) -> list[dict[str, Any]]:
    """A record for each number of threads and tokens."""
    rng, records, cores = Random(given.seed), [], len(os.sched_getaffinity(0))
    for mode in given.modes:
        threads = cores if mode == "busy" else max(1, cores - 1)
        with ExitStack() as stack:
            sides = start(stack, given, threads)
            for count in given.tokens:
                record = {"mode": mode, "threads": threads, **measure_prefill(sides, rng, count, given)}
                records.append(record | (measure_stall(sides, rng, count, given) if given.streams else {}))
                print(f"{mode}, {count} tokens: {record['added_share']:+.1%}", flush=True)
            time.sleep(STATS_S)
            counts = sides["stored"].metrics().items()
            records[-1]["blocks"] = {key: value for key, value in counts if "instance_store_blocks" in key}
            for name in ("plain", "stored"):
                sides[name].stop()
    return records


def main() -> None:
    """Measure; print what the store adds, and beside it what the measurement cannot tell."""
    given = options(
        __doc__, tokens=[512, 2048], modes=["busy", "free"], pairs=40, model="", seed=0, kv_memory="384MiB",
        streams=(5, "pairs of streams for the stall; 0: none"), stream_tokens=150,
        pause=(0.3, "seconds between two prompts"), no_disk=(False, "the store has memory alone"),
        quick={"pairs": 9, "streams": 1},
    )  # fmt: skip
    end_in_order()
    records = measure(given)
    show(records, COLUMNS)
    save(given, records)


if __name__ == "__main__":
    main()
