"""The time to the first token of one long prompt: cold, from the instance's memory, a store's memory, a store's disk.

    python bench/store_warm.py [--tokens 2048] [--prompts 6] [--rounds 2] [--model M] [--folder DIR] [--out FILE]
        [--codecs none,auto,always]

A server as ``memserve serve --ssd`` starts it, alone on the machine. Prompts of random tokens are asked one at a time:

    cold     never asked before
    HBM      the same prompt again, at once
    DRAM     again, when later prompts have pushed it out of the instance: out of the store's memory
    SSD      again, after kill -9 of router, instance and store, their shared memory gone, and a new start: the disk
             alone has it

The disk is read with O_DIRECT where it can be: no page cache helps. ``--codecs``: values of ``--kv-codec``, in turns,
each with a server and a disk of its own; what of the blocks was written in fewer bytes is said for each.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from argparse import Namespace
from itertools import product
from pathlib import Path

from harness.flags import Commas, options, save
from harness.processes import wait_until
from harness.prompts import documents
from harness.rounds import Samples, turns
from harness.served import BLOCK, Served, Side, serving
from harness.tables import show

from served_cluster import is_alive, unlink_store_memory

KINDS = ("cold", "HBM", "DRAM", "SSD")


def kill_everything(server: Served) -> None:
    """Router, instance and store at once, with the memory that they share."""
    members = server.children()
    unlink_store_memory(members["s1"])
    for pid in (server.process.pid, *members.values()):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    wait_until(lambda: not any(map(is_alive, members.values())), "all have ended", pause_s=0.02)


def measure(args: Namespace) -> Samples:
    spent = Samples()
    for number, codec in turns(args.rounds, args.codecs):
        texts = documents(args.prompts, args.tokens, args.seed + number)
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="memserve-warm-") as home:
            flags = ["--colocated", "1", "--served-model-name", "x", "--kv-memory", args.kv_memory]
            flags += ["--metadata", f"{home}/state", "--ssd", f"{home}/kv=2GiB", "--store-dram", args.store_dram]
            flags += ["--kv-codec", codec]
            with serving(*flags, model=args.model) as server:
                ask_before(Side(f"first, {codec}", server), texts, spent, codec)
                kill_everything(server)
            with serving(*flags, model=args.model) as server:
                ask_after(Side(f"second, {codec}", server), texts, spent, codec)
                server.stop()
    return spent


def ask_before(side: Side, texts: list[list[int]], spent: Samples, codec: str) -> None:
    """Cold, from HBM and from the store's memory."""
    warm_up(side, len(texts[0]))
    for text in texts:
        spent["cold", codec].append(first_s(side, text, 0))
        spent["HBM", codec].append(first_s(side, text, len(text) - BLOCK))
    blocks = blocks_of(texts)
    side.until(lambda: side.total("store_kv_blocks") >= blocks, "all blocks in the store")
    for text in texts:
        spent["DRAM", codec].append(first_s(side, text, len(text) - BLOCK))
    side.until(lambda: side.total("store_disk_values") >= blocks, f"{blocks} blocks on the disk")
    fewer = side.total("store_disk_encoded_value_bytes") - side.total("store_disk_encoded_bytes")
    spent["share", codec].append(1 - fewer / side.total("store_disk_payload_bytes"))


def ask_after(side: Side, texts: list[list[int]], spent: Samples, codec: str) -> None:
    side.until(lambda: side.total("store_tree_blocks") >= blocks_of(texts), "all blocks found again")
    warm_up(side, len(texts[0]))
    for text in texts:
        spent["SSD", codec].append(first_s(side, text, len(text) - BLOCK))


def blocks_of(texts: list[list[int]]) -> int:
    return sum(len(text) // BLOCK for text in texts)


def warm_up(side: Side, tokens: int) -> None:
    """A prompt of this length, so that nothing is done for the first time."""
    side.ask(documents(1, tokens, time.time_ns())[0], 1)


def first_s(side: Side, text: list[int], cached_min: int) -> float:
    """Seconds to the first token; at least ``cached_min`` tokens must have been cached, or none if that is 0."""
    answer = side.ask(text, 1).checked()
    if answer.cached < cached_min or (answer.cached and not cached_min):
        why = {key: value for key, value in side.server.metrics().items() if re.search("store_fetch|store_loads", key)}
        print(f"  {side.name}: {answer.cached} tokens cached, not {cached_min}: {why}")
    return answer.first_s


def main() -> None:
    args = options(
        __doc__, tokens=2048, prompts=(6, "more than fit into the instance's memory"), rounds=2, kv_memory="128MiB",
        store_dram="512MiB", model="", folder=Path, seed=0, codecs=Commas("auto"),
    )  # fmt: skip
    spent = measure(args)
    print(f"TTFT of {args.tokens} tokens, medians of {len(spent['cold', args.codecs[0]])} prompts each:")
    rows = []
    for kind, codec in product(KINDS, args.codecs):
        seconds, middle_s = spent[kind, codec], spent.median((kind, codec))
        times = {"median_s": middle_s, "least_ms": 1e3 * min(seconds), "most_ms": 1e3 * max(seconds)}
        gain, share = spent.median(("cold", codec)) / middle_s, spent.median(("share", codec))
        rows.append({"kind": kind, "codec": codec, "ms": 1e3 * middle_s, "gain": gain, "share": share, **times})
    show(rows, {"from": "{kind}", "--kv-codec": "{codec}", "TTFT": "{ms:.1f} ms",
                "least to most": "{least_ms:.1f} to {most_ms:.1f}", "times cold": "{gain:.1f}",
                "written of the KV": "{share:.0%}"})  # fmt: skip
    save(args, [row | {"seconds": spent[row["kind"], row["codec"]]} for row in rows])


if __name__ == "__main__":
    main()
