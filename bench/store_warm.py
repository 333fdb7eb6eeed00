"""The time to the first token of one long prompt: cold, from the instance's memory, a store's memory, a store's disk.

    python bench/store_warm.py [--tokens 2048] [--prompts 6] [--rounds 2] [--model M] [--folder DIR] [--out FILE]

A server as ``memserve serve --ssd`` starts it, alone on the machine. Prompts of random tokens are asked one at a time:

    cold     never asked before
    HBM      the same prompt again, at once
    DRAM     again, when later prompts have pushed it out of the instance: out of the store's memory
    SSD      again, after kill -9 of router, instance and store, their shared memory gone, and a new start: the disk
             alone has it

The disk is read with O_DIRECT where it can be: no page cache helps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from served import Served, serving
from store_sides import BLOCK, SUPPORT, TIMEOUT_S, Side, ask, documents

sys.path.insert(0, str(SUPPORT))

from served_cluster import unlink_store_memory

KINDS = ("cold", "HBM", "DRAM", "SSD")


def children(server: Served) -> dict[str, int]:
    """Name -> process id."""
    found = {}
    for tasks in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in map(int, tasks.read_text().split()):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "--name" in words:
                found[words[words.index("--name") + 1]] = pid
    return found


def kill_everything(server: Served) -> None:
    """Router, instance and store at once, with the memory that they share."""
    pids = children(server)
    unlink_store_memory(pids["s1"])
    for pid in (server.process.pid, *pids.values()):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    while any(is_alive(pid) for pid in pids.values()):
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds, by kind."""
    spent: dict[str, list[float]] = defaultdict(list)
    for number in range(arguments.rounds):
        texts = documents(arguments.prompts, arguments.tokens, arguments.seed + number)
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=TIMEOUT_S))
            home = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder, prefix="memserve-warm-"))
            flags = ["--colocated", "1", "--served-model-name", "x", "--kv-memory", arguments.kv_memory]
            flags += ["--metadata", f"{home}/state", "--ssd", f"{home}/kv=2GiB", "--store-dram", arguments.store_dram]
            flags += ["--model", arguments.model] if arguments.model else []
            with serving(*flags) as server:
                before_the_end(Side("first", server), client, texts, spent)
                kill_everything(server)
            with serving(*flags) as server:
                after_it(Side("second", server), client, texts, spent)
                server.stop()
    return spent


def before_the_end(side: Side, client: httpx.Client, texts: list[list[int]], spent: dict[str, list[float]]) -> None:
    """Cold, from HBM and from the store's memory."""
    warm_up(side, client, len(texts[0]))
    for text in texts:
        spent["cold"].append(first(side, client, text, 0))
        spent["HBM"].append(first(side, client, text, len(text) - BLOCK))
    side.until(lambda: side.total("store_kv_blocks") >= whole(texts), "all blocks in the store")
    for text in texts:
        spent["DRAM"].append(first(side, client, text, len(text) - BLOCK))
    side.disk_has(whole(texts))


def after_it(side: Side, client: httpx.Client, texts: list[list[int]], spent: dict[str, list[float]]) -> None:
    """From the disk."""
    side.until(lambda: side.total("store_tree_blocks") >= whole(texts), "all blocks found again")
    warm_up(side, client, len(texts[0]))
    for text in texts:
        spent["SSD"].append(first(side, client, text, len(text) - BLOCK))


def whole(texts: list[list[int]]) -> int:
    """Blocks of all ``texts``."""
    return sum(len(text) // BLOCK for text in texts)


def warm_up(side: Side, client: httpx.Client, tokens: int) -> None:
    """A prompt of this length, so that nothing is done for the first time."""
    ask(client, side.server.url, documents(1, tokens, time.time_ns() % 2**32)[0], 1)


def first(side: Side, client: httpx.Client, text: list[int], cached_min: int) -> float:
    """Seconds to the first token; at least ``cached_min`` tokens must have been cached, or none if that is 0."""
    answer = ask(client, side.server.url, text, 1)
    if answer.error:
        raise SystemExit(f"a request failed: {answer.error}")
    if answer.cached < cached_min or (answer.cached and not cached_min):
        why = {key: value for key, value in side.server.metrics().items() if re.search("store_fetch|store_loads", key)}
        print(f"  {answer.cached} tokens cached, not {cached_min}: {why}")
    return answer.first_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=6, help="more than fit into the instance's memory")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-memory", default="128MiB")
    parser.add_argument("--store-dram", default="512MiB")
    parser.add_argument("--model", default="")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    spent = measure(arguments)
    record: dict[str, Any] = {kind: {"seconds": spent[kind], "median_s": median(spent[kind])} for kind in KINDS}
    cold_s = record["cold"]["median_s"]
    print(f"TTFT of {arguments.tokens} tokens, medians of {len(spent['cold'])} prompts each:")
    for kind in KINDS:
        at = record[kind]["median_s"]
        low, high = min(spent[kind]), max(spent[kind])
        print(f"  {kind:<5} {at * 1e3:8.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f}), {cold_s / at:5.1f} times cold")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
