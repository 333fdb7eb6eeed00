"""``memserve serve --engine`` in front of two vLLM servers on the CPU, beside other ways to use the same servers.

::

    python bench/fleet.py --vllm PYTHON [--only trace,chats,directory] [--routers PYTHON] [--trace FILE] [--passes 1]

PYTHON can import vllm (its CPU build); the servers are started here. ``--routers``: a Python that can import
``sglang_router`` and ``vllm_router``; without it they are left out. Parts:

* *trace*: whole conversations of a Mooncake trace, lengths divided by 16, times compressed to ``--rate``;
* *chats*: ``--chats`` chats of ``--turns`` turns, ``--clients`` requests at a time;
* *directory*: is the fleet's directory what the servers hold (``fleet_directory.py``): ``--rounds``, ``--restarts``.

All ways get the same requests, in turn, each with empty caches and a new router. Shown: time to the first token; the
share of prompt tokens that servers had cached, by their own usage; and what a single cache would have had at best.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet_directory import check
from fleet_load import Load, Tally, Where, ceilings, questions, run_chats, run_trace, trace
from fleet_servers import MODEL, EventServer, ours, running, theirs
from rivals import bundled_model

from memserve_lab.workloads.statistics import spread_of

RIVALS = ("sglang-router:cache_aware", "vllm-router:cache_aware", "vllm-router:kv_aware")
TOKENS_MAX = 4096


@contextmanager
def way(name: str, servers: list[EventServer], args: Namespace, folder: Path) -> Iterator[Where]:
    """The servers behind this router, or none."""
    log = folder / f"{name.replace(':', '-').replace(' ', '-')}.log"
    if name in ("round robin", "least load"):
        yield Where([server.url for server in servers], least_load=name == "least load")
    elif name == "memserve":
        with ours([server.option for server in servers], args.policy, log) as url:
            yield Where([url])
    else:
        with theirs(name, args.routers, servers, log) as url:
            yield Where([url])


def compare(title: str, load: Load, servers: list[EventServer], args: Namespace, folder: Path) -> dict[str, Tally]:
    """Every pass of ``load`` with every way, and one row for each."""
    names = ["round robin", "least load", "memserve", *(RIVALS if args.routers else ())]
    tallies = {name: Tally() for name in names}
    for number in range(args.passes):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for server in servers:
                server.forget()
            try:
                with way(name, servers, args, folder) as where:
                    asyncio.run(load(where, args.seed + number, tallies[name]))
            except SystemExit as error:
                print(f"{name}: {error}", flush=True)
    print(f"\n## {title}\n\n| way | requests | errors | TTFT mean (ms) | p50 | p99 | cached | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, tally in tallies.items():
        if not tally.ttft_s:
            continue
        seen, share = spread_of(tally.ttft_s), tally.cached_tokens / max(1, tally.prompt_tokens)
        shown = " | ".join(f"{1000 * value:.0f}" for value in (seen.mean, seen.p50, seen.p99))
        print(f"| {name} | {len(tally.ttft_s)} | {tally.errors} | {shown} | {share:.1%} | {tally.seconds:.0f} |")
    return tallies


def compare_trace(servers: list[EventServer], args: Namespace, folder: Path) -> None:
    """On a trace."""
    passes = [
        trace(args.trace, args.requests, args.rate, TOKENS_MAX, args.seed + number) for number in range(args.passes)
    ]

    async def load(where: Where, seed: int, tally: Tally) -> None:
        await run_trace(where, MODEL, passes[seed - args.seed], tally)

    title = f"{args.trace.name.partition('.')[0]}: {sum(map(len, passes))} requests, {args.rate:g}/s"
    compare(title, load, servers, args, folder)
    shares = [ceilings(calls, args.blocks * len(servers)) for calls in passes]
    unlimited, both = (sum(column) / len(shares) for column in zip(*shares, strict=True))
    print(f"\nAt best: {both:.1%} with one cache of {args.blocks * len(servers)} blocks, {unlimited:.1%} with any.")


def compare_chats(servers: list[EventServer], args: Namespace, folder: Path) -> None:
    """On chats."""

    async def load(where: Where, seed: int, tally: Tally) -> None:
        await run_chats(where, MODEL, questions(seed, args.chats, args.turns, args.words), args.clients, tally)

    title = f"{args.chats} chats of {args.turns} turns, {args.clients} at a time"
    tallies = compare(title, load, servers, args, folder)
    best = max(tally.attainable_tokens / max(1, tally.prompt_tokens) for tally in tallies.values())
    print(f"\nAt best: {best:.1%}, with all earlier turns cached.")


def arguments() -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="a Python that can import vllm")
    parser.add_argument("--routers", help="a Python that can import sglang_router and vllm_router")
    parser.add_argument("--only", default="trace,chats,directory")
    parser.add_argument("--trace", type=Path, default=None, help="a Mooncake trace, .jsonl.gz")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--rate", type=float, default=1.2, help="requests a second of the trace")
    parser.add_argument("--folder", type=Path, help="for logs; default: a temporary one")
    sizes = [("requests", 120), ("blocks", 512), ("chats", 16), ("turns", 6), ("words", 150), ("clients", 6)]
    for name, default in [*sizes, ("passes", 1), ("rounds", 100), ("restarts", 6), ("seed", 1)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    """Measure, and print one table for each part."""
    args = arguments()
    parts, model = args.only.split(","), bundled_model("bfloat16")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if "trace" in parts and args.trace is None:
            print("trace: left out, no --trace")
            parts.remove("trace")
        if {"trace", "chats"} & set(parts):
            flags = ("--num-gpu-blocks-override", str(args.blocks), "--max-model-len", str(TOKENS_MAX))
            flags += ("--dtype", "bfloat16", "--max-num-seqs", "16")
            servers = [EventServer(args.vllm, model, folder, number, flags) for number in range(2)]
            with running(servers):
                if "trace" in parts:
                    compare_trace(servers, args, folder)
                if "chats" in parts:
                    compare_chats(servers, args, folder)
        if "directory" in parts:
            check(args.vllm, model, folder, args.rounds, args.restarts, args.seed)


if __name__ == "__main__":
    main()
