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

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from chat_load import Chat, Load, Shape, in_turn, sticky
from rivals import bundled_model
from vllm_servers import ServedStore, Vllm, running

BLOCK_TOKENS = 32
TTFT = "time_to_first_token_seconds"


@dataclass(frozen=True)
class Setting:
    name: str
    servers: str
    """``private`` or ``pool``."""
    route: Callable[[int, Chat, int], int]


SETTINGS = (
    Setting("private, in turn", "private", in_turn),
    Setting("private, sticky", "private", sticky),
    Setting("pool, in turn", "pool", in_turn),
)


@dataclass(frozen=True)
class Found:
    """One pass."""

    hits: float
    ceiling: float
    requests_per_s: float
    ttft_s: float
    request_s: float
    from_store: float
    """Of all prompt tokens."""


def block_bytes(model: str, dtype: str) -> int:
    """Of KV, all layers."""
    config = json.loads((Path(model) / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    element = 4 if dtype == "float32" else 2
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * head * 2 * element * BLOCK_TOKENS)


def servers_of(args: argparse.Namespace, kind: str, store: ServedStore, folder: Path) -> list[Vllm]:
    """Two of a kind."""
    blocks = args.own_blocks + (0 if kind == "pool" else args.store_blocks // 2)
    flags = ("--num-gpu-blocks-override", str(blocks), "--max-num-seqs", str(args.running))
    flags += ("--max-model-len", str(args.context))
    where = (store.address, str(store.secret_file)) if kind == "pool" else ("", "")
    log = folder / f"{kind}.log"
    return [
        Vllm(args.vllm, args.model, *where, cpus, flags, log=log, dtype=args.dtype) for cpus in args.cpus.split("/")
    ]


def measure(setting: Setting, servers: list[Vllm], load: Load, args: argparse.Namespace) -> Found:
    """``args.warm`` requests that do not count, then ``args.requests``."""
    urls, route = [server.url for server in servers], partial(setting.route, len(servers))
    load.run(urls, route, requests=args.warm)
    names = (f"{TTFT}_sum", f"{TTFT}_count", "external_prefix_cache_hits_total", "prompt_tokens_total")
    before = [sum(server.total(name) for server in servers) for name in names]
    seen = load.run(urls, route, requests=args.requests)
    after = [sum(server.total(name) for server in servers) for name in names]
    seconds, count, stored, tokens = (end - begin for begin, end in zip(before, after, strict=True))
    rates = seen.hit_rate, seen.ceiling, seen.rate
    return Found(*rates, seconds / max(1, count), median(seen.times_s), stored / max(1, tokens))


def show(found: dict[str, list[Found]]) -> None:
    """Medians of the rounds."""
    base = next(iter(found.values()))
    print(
        f"{'setting':18} {'hits':>6} {'store':>6} {'ceiling':>8} {'requests/s':>11} {'TTFT':>8} {'request':>9} beside"
    )
    for name, passes in found.items():
        row = {key: median(getattr(one, key) for one in passes) for key in asdict(passes[0])}
        rate = median(one.requests_per_s / other.requests_per_s for one, other in zip(passes, base, strict=True))
        hits = median(one.hits / max(other.hits, 1e-9) for one, other in zip(passes, base, strict=True))
        print(
            f"{name:18} {row['hits']:6.1%} {row['from_store']:6.1%} {row['ceiling']:8.1%} "
            f"{row['requests_per_s']:11.2f} {row['ttft_s']:6.2f} s {row['request_s']:7.2f} s  "
            f"{hits:.1f} x hits, {rate:.2f} x requests/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="python", help="a Python that can import vllm")
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4, help="users that do not think")
    parser.add_argument("--requests", type=int, default=40, help="that count, in each pass")
    parser.add_argument("--warm", type=int, default=24, help="before them")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first-words", type=int, default=1500)
    parser.add_argument("--turn-words", type=int, default=40)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--own-blocks", type=int, default=68, help="of KV, of 32 tokens, of a server beside the store")
    parser.add_argument("--store-blocks", type=int, default=480, help="the store's memory")
    parser.add_argument("--running", type=int, default=1, help="requests that a server computes at once")
    parser.add_argument("--cpus", default="0-1/2-3", help="cores of each server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settings", default=";".join(setting.name for setting in SETTINGS), help="A;B")
    parser.add_argument("--folder", type=Path, help="for logs; default: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.model = args.model or bundled_model(args.dtype)
    shape = Shape(args.turns, args.first_words, args.turn_words, args.answer_tokens)
    nbytes = block_bytes(args.model, args.dtype)
    total = 2 * args.own_blocks + args.store_blocks
    print(f"{args.users} users, {args.at_once} at once, chats of up to about {shape.longest_tokens} tokens; KV memory")
    print(
        f"of {total} blocks ({total * BLOCK_TOKENS:,} tokens, {total * nbytes >> 20} MiB) in every setting", flush=True
    )
    settings = [setting for setting in SETTINGS if setting.name in args.settings.split(";")]
    found: dict[str, list[Found]] = {setting.name: [] for setting in settings}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with ServedStore(folder, dram=f"{args.store_blocks * nbytes >> 10}KiB") as store:
            kinds = dict.fromkeys(setting.servers for setting in settings)
            servers = {kind: servers_of(args, kind, store, folder) for kind in kinds}
            with running(*(one for each in servers.values() for one in each)):
                for turn in range(args.rounds):
                    for at, setting in enumerate(settings if turn % 2 == 0 else settings[::-1]):
                        load = Load(shape, args.users, args.at_once, len(settings) * (args.seed + turn) + at)
                        one = measure(setting, servers[setting.servers], load, args)
                        found[setting.name].append(one)
                        print(f"round {turn + 1}: {setting.name}: {one}", flush=True)
    show(found)
    if args.out is not None:
        record: dict[str, Any] = {name: [asdict(one) for one in passes] for name, passes in found.items()}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
