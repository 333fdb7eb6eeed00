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

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from harness import end_in_order, metric_sum, options, parts_of, save, show, turns
from harness.chat_load import COLUMNS, SHAPE, Load, Pass, Route, first, in_turn, rows_of, shape_of, sticky
from harness.served import Served, serving

QUICK = ("private, in turn", "store, least-load", "store, cost")


@dataclass(frozen=True)
class Setting:
    """A way to run four instances."""

    kind: str
    """``private``, ``peers`` or ``store``."""
    route: Route
    policy: str = ""


SETTINGS = {
    "private, in turn": Setting("private", in_turn),
    "private, sticky": Setting("private", sticky),
    "store, least-load": Setting("store", first, "least-load"),
    "peers, cost": Setting("peers", first, "cost"),
    "store, cost": Setting("store", first, "cost"),
}


def start(stack: ExitStack, setting: Setting, given: Namespace) -> list[Served]:
    """The servers of one setting."""
    common = ["--threads", "1", "--served-model-name", "x", "--max-model-len", str(given.context)]
    alone = f"{given.kv_mib + given.store_mib // given.instances}MiB"
    if setting.kind == "private":
        flags = [*common, "--in-process", "--kv-memory", alone]
        with ThreadPoolExecutor() as threads:  # a start is mostly one thread
            starting = [serving(*flags, model=given.model) for _ in range(given.instances)]
            servers = list(threads.map(lambda server: server.__enter__(), starting))
        for server in starting:
            stack.push(server)
        return servers
    flags = [*common, "--colocated", str(given.instances), "--metadata", "none", "--policy", setting.policy]
    stored = ["--kv-memory", f"{given.kv_mib}MiB", "--store-dram", f"{given.store_mib}MiB"]
    memory = ["--kv-memory", alone] if setting.kind == "peers" else stored
    return [stack.enter_context(serving(*flags, *memory, model=given.model))]


def origins(servers: list[Served]) -> str:
    """Counters of where KV came from, summed over instances and servers."""
    names = ("fetched_tokens", "store_tokens", "store_fetches_failed", "store_blocks_offered", "store_blocks_taken",
             "store_blocks_failed", "store_blocks_dropped")  # fmt: skip
    pages = [server.metrics() for server in servers]
    counts = {name: sum(metric_sum(page, f"memserve_instance_{name}_total") for page in pages) for name in names}
    return ", ".join(f"{name} {count:,.0f}" for name, count in counts.items() if count) or "nothing fetched"


def measure(given: Namespace) -> list[dict[str, Any]]:
    """The rows of one run."""
    shape, settings = shape_of(given), parts_of(given.settings, SETTINGS)
    print(f"{given.chats} chats of up to about {shape.longest_tokens} tokens, {given.clients} at once", flush=True)
    passes: dict[str, list[Pass]] = {name: [] for name in settings}
    with ExitStack() as stack:
        servers: dict[str, list[Served]] = {}  # both private settings have the same ones
        for setting in settings.values():
            if setting.kind + setting.policy not in servers:
                servers[setting.kind + setting.policy] = start(stack, setting, given)
        for number, name in turns(given.rounds, settings):
            setting = settings[name]
            # private settings share servers: other seeds, or the second would find the chats of the first
            load = Load(shape, given.chats, given.clients, 2 * (given.seed + number) + (setting.route is sticky))
            urls = [server.url for server in servers[setting.kind + setting.policy]]
            seen = load.run(urls, setting.route, requests=given.requests, warm=given.warm)
            passes[name].append(seen)
            print(f"round {number + 1}: {name}: {seen.hit_rate:.1%}, {seen.rate:.2f}/s", flush=True)
        sources = {name: origins(servers[setting.kind + setting.policy]) for name, setting in settings.items()}
    return [row | {"origins": sources[row["setting"]]} for row in rows_of(passes)]


def main() -> None:
    given = options(
        __doc__, settings=list(SETTINGS), instances=4, rounds=3, chats=16, clients=(8, "requests at once"),
        requests=(64, "that count, in each pass"), warm=(32, "before them"), **SHAPE,
        kv_mib=(56, "of an instance beside a store"), store_mib=(384, "of the store"), context=1024, model="", seed=1,
        quick={"rounds": 1, "requests": 40, "warm": 24, "settings": list(QUICK)},
    )  # fmt: skip
    end_in_order()
    rows = measure(given)
    show(rows, COLUMNS | {"where KV came from": "{origins}"})
    save(given, rows)


if __name__ == "__main__":
    main()
