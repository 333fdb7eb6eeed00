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

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet_directory import check, event_server
from fleet_load import MODEL, Load, Tally, Where, ceilings, questions, run_chats, run_trace, trace
from harness.engines import EventServer, running
from harness.flags import Commas, options, working_folder
from harness.rounds import mean, turns
from harness.routers import fleet_router, rival_router
from harness.served import BLOCK, bundled_model
from harness.tables import Table

from memserve_lab.workloads.statistics import spread_of

RIVALS = ("sglang-router:cache_aware", "vllm-router:cache_aware", "vllm-router:kv_aware")
TOKENS_MAX = 4096
COLUMNS = {
    "way": "{way}", "requests": "{requests}", "errors": "{errors}", "TTFT mean (ms)": "{mean:.0f}", "p50": "{p50:.0f}",
    "p99": "{p99:.0f}", "cached": "{cached:.1%}", "seconds": "{seconds:.0f}",
}  # fmt: skip


@contextmanager
def way(name: str, servers: list[EventServer], args: Namespace, folder: Path) -> Iterator[Where]:
    """The servers behind this router, or none."""
    log, urls = folder / f"{name.replace(':', '-').replace(' ', '-')}.log", [server.url for server in servers]
    if name in ("round robin", "least load"):
        yield Where(urls, least_load=name == "least load")
    elif name == "memserve":
        with fleet_router([server.option for server in servers], log, "--policy", args.policy) as url:
            yield Where([url])
    else:
        flags = ["--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL]
        for server in servers:
            flags += ["--kv-event-source", f"{server.url}={server.events}"]
            flags += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
        with rival_router(name, args.routers, urls, log, *(flags if name.endswith("kv_aware") else ())) as router:
            yield Where([router.url])


def compare(title: str, load: Load, servers: list[EventServer], args: Namespace, folder: Path) -> dict[str, Tally]:
    """Every pass of ``load`` with every way, and one row for each."""
    tallies = {name: Tally() for name in ("round robin", "least load", "memserve", *(RIVALS if args.routers else ()))}
    for number, name in turns(args.passes, tallies):
        for server in servers:
            server.forget()
        try:
            with way(name, servers, args, folder) as place:
                asyncio.run(load(place, args.seed + number, tallies[name]))
        except SystemExit as error:
            print(f"{name}: {error}", flush=True)
    print(f"\n## {title}\n")
    table = Table(COLUMNS)
    for name, tally in tallies.items():
        if tally.ttft_s:
            ttft, share = spread_of(tally.ttft_s), tally.cached_tokens / max(1, tally.prompt_tokens)
            times = {key: 1000 * getattr(ttft, key) for key in ("mean", "p50", "p99")}
            table.show({**vars(tally), "way": name, "requests": len(tally.ttft_s), "cached": share, **times})
    return tallies


def compare_trace(servers: list[EventServer], args: Namespace, folder: Path) -> None:
    passes = [
        trace(args.trace, args.requests, args.rate, TOKENS_MAX, args.seed + number) for number in range(args.passes)
    ]

    async def load(target: Where, seed: int, tally: Tally) -> None:
        await run_trace(target, passes[seed - args.seed], tally)

    title = f"{args.trace.name.partition('.')[0]}: {sum(map(len, passes))} requests, {args.rate:g}/s"
    compare(title, load, servers, args, folder)
    blocks = args.blocks * len(servers)
    unlimited, ceiling_of_both = map(mean, zip(*(ceilings(calls, blocks) for calls in passes), strict=True))
    print(f"\nAt best: {ceiling_of_both:.1%} with one cache of {blocks} blocks, {unlimited:.1%} with any.")


def compare_chats(servers: list[EventServer], args: Namespace, folder: Path) -> None:
    async def load(target: Where, seed: int, tally: Tally) -> None:
        await run_chats(target, questions(seed, args.chats, args.turns, args.words), args.clients, tally)

    title = f"{args.chats} chats of {args.turns} turns, {args.clients} at a time"
    tallies = compare(title, load, servers, args, folder)
    best = max(tally.attainable_tokens / max(1, tally.prompt_tokens) for tally in tallies.values())
    print(f"\nAt best: {best:.1%}, with all earlier turns cached.")


def main() -> None:
    args = options(
        __doc__, required="vllm", vllm=str, routers=(str, "a Python that can import sglang_router and vllm_router"),
        only=Commas("trace", "chats", "directory"), trace=Path, policy="cost", folder=Path,
        rate=(1.2, "requests a second of the trace"), requests=120, blocks=512, chats=16, turns=6, words=150, clients=6,
        passes=1, rounds=100, restarts=6, seed=1,
    )  # fmt: skip
    parts, model = set(args.only), bundled_model("bfloat16")
    if "trace" in parts and args.trace is None:
        print("trace: left out, no --trace")
        parts.remove("trace")
    with working_folder(args.folder) as folder:
        if {"trace", "chats"} & parts:
            flags = ("--num-gpu-blocks-override", str(args.blocks), "--max-model-len", str(TOKENS_MAX))
            servers = [
                event_server(args.vllm, model, folder, number, *flags, "--max-num-seqs", "16") for number in (0, 1)
            ]
            with running(*servers):
                for name, part in {"trace": compare_trace, "chats": compare_chats}.items():
                    if name in parts:
                        part(servers, args, folder)
        if "directory" in parts:
            check(args.vllm, model, folder, args.rounds, args.restarts, args.seed)


if __name__ == "__main__":
    main()
