"""Two vLLM servers on one store beside two with prefix caches of their own, of the same memory altogether.

    python bench/vllm_shared.py --vllm PYTHON [--rounds 2] [--users 8] [--settings "NAME;NAME"] [--out FILE]

PYTHON can import vllm (its CPU build: ``docs/guides/VLLM.md``); memserve is this checkout's. Eight users each have a
chat of several turns, ask one turn after the other, and begin a new chat behind the last. Settings take turns in each
round, each with chats of its own:

    private, in turn    each request goes to the next server, as a load balancer sends it
    private, sticky     the same servers; each chat stays at one of them
    pool, in turn       MemserveConnector on both, one ``memserve store`` on this host

Memory: a private server has for its KV what a server beside the store has, and half of the store. As set, the chats of
all users fit into the store, and not into the memory of one private server; where they fit into that, too, there is
nothing to be had from a pool. All servers run during the whole run and two of them are loaded at a time. ``hits`` is
the share of prompt tokens that vLLM says were cached (its own prefix cache and the store), ``ceiling`` what a cache
that forgets nothing would have had; the time to the first token is the mean of vLLM's own metric.

vLLM's NixlConnector is not among them: it moves the KV of a request whose client names the blocks from one server to
another. These chats, as those of any chat client, name none, and hit what they hit in private caches.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from harness.chat_load import COLUMNS, SHAPE, Load, Pass, in_turn, rows_of, shape_of, sticky
from harness.engines import ServedStore, Vllm, running
from harness.flags import options, parts_of, save, working_folder
from harness.prompts import block_bytes
from harness.rounds import medians, ratio, turns
from harness.served import BLOCK as BLOCK_TOKENS
from harness.served import bundled_model
from harness.tables import show

TTFT = "time_to_first_token_seconds"


def servers_of(args: Namespace, kind: str, store: ServedStore, folder: Path) -> list[Vllm]:
    blocks = args.own_blocks + (0 if kind == "pool" else args.store_blocks // 2)
    flags = ("--num-gpu-blocks-override", str(blocks), "--max-num-seqs", str(args.running))
    flags += ("--max-model-len", str(args.context))
    shared = store if kind == "pool" else None
    log = folder / f"{kind}.log"
    return [Vllm(args.vllm, args.model, shared, log, cpus, flags, dtype=args.dtype) for cpus in args.cpus.split("/")]


SETTINGS = {"private, in turn": in_turn, "private, sticky": sticky, "pool, in turn": in_turn}
COUNTERS = (f"{TTFT}_sum", f"{TTFT}_count", "external_prefix_cache_hits_total", "prompt_tokens_total")
MORE = {"store": "{from_store:.1%}", "TTFT": "{ttft_s:.2f} s", "hits beside": "{hits_ratio:.1f}x"}


def kv_bytes(model: str, dtype: str) -> int:
    """KV of a block of a model's folder."""
    return block_bytes(json.loads((Path(model) / "config.json").read_text()), dtype)


def measure(setting: str, servers: list[Vllm], load: Load, args: Namespace) -> tuple[Pass, dict[str, float]]:
    """``--warm`` requests that do not count, then ``--requests``; and what vLLM says of them."""
    urls, route = [server.url for server in servers], SETTINGS[setting]
    load.run(urls, route, requests=args.warm)
    before = [sum(server.total(name) for server in servers) for name in COUNTERS]
    load_pass = load.run(urls, route, requests=args.requests)
    after = [sum(server.total(name) for server in servers) for name in COUNTERS]
    spent_s, count, stored, tokens = (later - earlier for earlier, later in zip(before, after, strict=True))
    return load_pass, {"ttft_s": spent_s / max(1, count), "from_store": stored / max(1, tokens)}


def measure_all(args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """All settings in turn; a row for each."""
    settings, nbytes = parts_of(args.settings.split(";"), SETTINGS), kv_bytes(args.model, args.dtype)
    passes: dict[str, list[Pass]] = {name: [] for name in settings}
    counted: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    with ServedStore(folder, dram=f"{args.store_blocks * nbytes >> 10}KiB") as store:
        kinds = dict.fromkeys(name.partition(",")[0] for name in settings)
        servers = {kind: servers_of(args, kind, store, folder) for kind in kinds}
        with running(*(server for pair in servers.values() for server in pair)):
            for number, name in turns(args.rounds, settings):
                seed = len(settings) * (args.seed + number) + list(settings).index(name)
                load = Load(shape_of(args), args.users, args.at_once, seed)
                load_pass, counts = measure(name, servers[name.partition(",")[0]], load, args)
                passes[name].append(load_pass)
                counted[name].append(counts)
                print(
                    f"round {number + 1}: {name}: {load_pass.hit_rate:.1%}, {load_pass.rate:.2f}/s, {counts}",
                    flush=True,
                )
    base = [max(load_pass.hit_rate, 1e-9) for load_pass in next(iter(passes.values()))]
    rows = rows_of(passes)
    for row in rows:
        hit_rates = [load_pass.hit_rate for load_pass in passes[row["setting"]]]
        row |= medians(counted[row["setting"]]) | {"hits_ratio": ratio(hit_rates, base)}
    return rows


def main() -> None:
    args = options(
        __doc__, vllm="python", model="", dtype="bfloat16", rounds=2, users=8, at_once=(4, "users that do not think"),
        requests=(40, "that count, in each pass"), warm=(24, "before them"),
        **SHAPE | {"first_words": 1500, "turn_words": 40}, context=2048,
        own_blocks=(68, "of KV, of 32 tokens, of a server beside the store"), store_blocks=(480, "the store's memory"),
        running=(1, "requests that a server computes at once"), cpus=("0-1/2-3", "cores of each server"), seed=1,
        settings=(";".join(SETTINGS), "A;B"), folder=Path,
    )  # fmt: skip
    args.model = args.model or bundled_model(args.dtype)
    total, tokens = 2 * args.own_blocks + args.store_blocks, shape_of(args).longest_tokens
    nbytes = kv_bytes(args.model, args.dtype)
    print(f"{args.users} users, {args.at_once} at once, chats of up to about {tokens} tokens; in every setting KV")
    print(f"memory of {total} blocks ({total * BLOCK_TOKENS:,} tokens, {total * nbytes >> 20} MiB)", flush=True)
    with working_folder(args.folder) as folder:
        rows = measure_all(args, folder)
    show(rows, COLUMNS | MORE)
    save(args, rows)


if __name__ == "__main__":
    main()
