"""Four instances on one store beside four with private caches of the same memory altogether, under multi-turn chats.

    python bench/store_pool.py [--rounds 3] [--quick] [--model M] [--out FILE]

Settings, which take turns in every round with the same chats (new ones in every round):

    private, in turn    four servers that know nothing of each other; each request goes to the next one
    private, sticky     the same four servers; each chat stays at one of them
    store, least-load   one server of four instances and a store; requests go where there is least work
    peers, cost         one server of four instances, which lend each other their KV; no store
    store, cost         the same with a store

Memory: a private instance, and one without a store, has in ``--kv-memory`` what the others have there and in their
share of the store together. On a CPU all of it is ordinary memory, so this is the best that a private cache can do.
One thread an instance. All servers run during the whole run, and one of them is loaded at a time.

Printed for each setting: the share of prompt tokens that were cached, of what a cache that forgets nothing would have
(*ceiling*), requests per second, the time of a request at the median, and where the KV came from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from chat_load import Chat, Load, Pass, Shape, first, in_turn, sticky
from served import Served, end_in_order, serving

MIB = 1 << 20
QUICK = ("private, in turn", "store, least-load", "store, cost")


@dataclass(frozen=True)
class Setting:
    """A way to run four instances."""

    name: str
    kind: str
    """``private``, ``peers`` or ``store``."""
    route: Callable[[int, Chat, int], int]
    """From the number of servers, the chat and the number of the request to a server's position."""
    policy: str = ""


SETTINGS = (
    Setting("private, in turn", "private", in_turn),
    Setting("private, sticky", "private", sticky),
    Setting("store, least-load", "store", first, "least-load"),
    Setting("peers, cost", "peers", first, "cost"),
    Setting("store, cost", "store", first, "cost"),
)


def start(stack: ExitStack, setting: Setting, args: argparse.Namespace) -> list[Served]:
    """The servers of one setting."""
    common = ["--threads", "1", "--served-model-name", "x", "--max-model-len", str(args.context)]
    common += ["--model", args.model] if args.model else []
    alone = f"{args.kv_mib + args.store_mib // args.instances}MiB"
    if setting.kind == "private":
        words = [*common, "--in-process", "--kv-memory", alone]
        with ThreadPoolExecutor() as threads:  # a start is mostly one thread
            starting = [serving(*words) for _ in range(args.instances)]
            servers = list(threads.map(lambda one: one.__enter__(), starting))
        for one in starting:
            stack.push(one)
        return servers
    words = [*common, "--colocated", str(args.instances), "--metadata", "none", "--policy", setting.policy]
    if setting.kind == "peers":
        words += ["--kv-memory", alone]
    else:
        words += ["--kv-memory", f"{args.kv_mib}MiB", "--store-dram", f"{args.store_mib}MiB"]
    return [stack.enter_context(serving(*words))]


def origins(servers: list[Served]) -> dict[str, float]:
    """Counters of where KV came from, summed over instances and servers."""
    names = ("fetched_tokens", "store_tokens", "store_fetches_failed", "store_blocks_offered", "store_blocks_taken",
             "store_blocks_failed", "store_blocks_dropped")  # fmt: skip
    found = dict.fromkeys(names, 0.0)
    for server in servers:
        for key, value in server.metrics().items():
            name = key.split("{")[0].removeprefix("memserve_instance_").removesuffix("_total")
            if name in found:
                found[name] += value
    return found


def row(setting: Setting, passes: list[Pass], base: list[Pass], where: dict[str, float]) -> dict[str, Any]:
    """The figures of one setting; ``base``: the passes that it is compared with, round by round."""
    return {
        "setting": setting.name,
        "hit_rate": median(one.hit_rate for one in passes),
        "ceiling": median(one.ceiling for one in passes),
        "requests_per_s": median(one.rate for one in passes),
        "rate_ratio": median(one.rate / other.rate for one, other in zip(passes, base, strict=True)),
        "request_s": median(time_s for one in passes for time_s in one.times_s),
        "passes": [(one.hit_rate, one.rate) for one in passes],
        "origins": where,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(f"{'setting':20} {'hits':>6} {'ceiling':>8} {'requests/s':>11} {'beside the first':>17} {'request':>9}")
    for one in rows:
        print(
            f"{one['setting']:20} {one['hit_rate']:6.1%} {one['ceiling']:8.1%} {one['requests_per_s']:11.2f} "
            f"{one['rate_ratio']:16.2f}x {one['request_s']:7.2f} s"
        )
    for one in rows:
        parts = ", ".join(f"{name} {count:,.0f}" for name, count in one["origins"].items() if count)
        print(f"{one['setting']}: {parts or 'nothing fetched'}")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one run."""
    shape = Shape(args.turns, args.first_words, args.turn_words, args.answer_tokens)
    settings = [setting for setting in SETTINGS if setting.name in args.settings]
    print(f"{args.chats} chats of up to about {shape.longest_tokens} tokens, {args.clients} at once", flush=True)
    passes: dict[str, list[Pass]] = {setting.name: [] for setting in settings}
    with ExitStack() as stack:
        shared: dict[str, list[Served]] = {}  # both kinds of private settings have the same servers
        for setting in settings:
            key = setting.kind + setting.policy
            if key not in shared:
                shared[key] = start(stack, setting, args)
        for turn in range(args.rounds):
            for setting in settings if turn % 2 == 0 else reversed(settings):
                # private settings share servers: other seeds, or the second would find the chats of the first
                seed = 2 * (args.seed + turn) + (setting.route is sticky)
                urls = [server.url for server in shared[setting.kind + setting.policy]]
                route = partial(setting.route, args.instances)
                load = Load(shape, args.chats, args.clients, seed)
                found = load.run(urls, route, requests=args.requests, warm=args.warm)
                passes[setting.name].append(found)
                print(f"round {turn + 1}: {setting.name}: {found.hit_rate:.1%}, {found.rate:.2f}/s", flush=True)
        base = passes[settings[0].name]
        return [
            row(setting, passes[setting.name], base, origins(shared[setting.kind + setting.policy]))
            for setting in settings
        ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[setting.name for setting in SETTINGS])
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    parser.add_argument("--requests", type=int, default=64, help="that count, in each pass")
    parser.add_argument("--warm", type=int, default=32, help="before them")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first-words", type=int, default=300)
    parser.add_argument("--turn-words", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--kv-mib", type=int, default=56, help="of an instance beside a store")
    parser.add_argument("--store-mib", type=int, default=384, help="of the store")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--model", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round of three settings")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests, args.warm, args.settings = 1, 40, 24, list(QUICK)
    end_in_order()
    rows = measure(args)
    show(rows)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
