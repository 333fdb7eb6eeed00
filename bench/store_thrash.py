"""Is there a thrash cliff? Multi-turn chats from 1 to 8 times as many as fit in memory, all of them at once.

    python bench/store_thrash.py [--quick] [--model M] [--plot FILE.png] [--out FILE]

One instance with memory for ``--fit`` chats at their full length. As many clients as the level says times ``--fit``,
each with a chat of its own: the next question follows the answer at once, a chat that ends is followed by a new one.
Without admission every request is queued in the instance, whose cache has forgotten a chat by its next turn as soon as
there are more chats than fit: that is the cliff. Settings, which take turns at every level: with and without
``--admission cache --admission-hold``, with and without a store (memory for all chats of the highest level).

Printed for each level and setting: the share of prompt tokens that were cached, and of what a cache that forgets
nothing would have; requests per second; the same beside the best level of that setting; the median and the longest
time of a request, waiting included; answers that said to come again.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat_load import Load, Shape
from served import Served, end_in_order, serving

TOKEN_BYTES = 23_040
"""KV of a token of the bundled model."""
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A server."""

    name: str
    admits: bool
    has_store: bool


SETTINGS = (
    Setting("plain", False, False),
    Setting("admission", True, False),
    Setting("store", False, True),
    Setting("admission, store", True, True),
)


def start(stack: ExitStack, setting: Setting, shape: Shape, args: argparse.Namespace) -> Served:
    """The server of one setting."""
    chat_bytes = (shape.longest_tokens + 64) * args.token_bytes
    kv_mib = args.fit * chat_bytes // MIB + 1
    words = ["--colocated", "1", "--metadata", "none", "--served-model-name", "x", "--kv-memory", f"{kv_mib}MiB"]
    words += ["--model", args.model] if args.model else []
    if setting.admits:
        words += [
            "--admission",
            "cache",
            "--admission-hold",
            "--admission-queue",
            "1000",
            "--admission-wait",
            str(args.wait),
        ]
    if setting.has_store:
        words += ["--store-dram", f"{2 * max(args.levels) * kv_mib}MiB"]
    return stack.enter_context(serving(*words))


def measure(args: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """The rows of one run."""
    rows = []
    settings = [setting for setting in SETTINGS if setting.name in args.settings]
    with ExitStack() as stack:
        servers = {setting.name: start(stack, setting, shape, args) for setting in settings}
        for at, level in enumerate(args.levels):
            for setting in settings if at % 2 == 0 else reversed(settings):
                clients = level * args.fit
                load = Load(shape, clients, clients, 1000 * args.seed + level)
                found = load.run_for(servers[setting.name].url, args.seconds, args.warm)
                rows.append(
                    {
                        "setting": setting.name,
                        "level": level,
                        "clients": clients,
                        "requests_per_s": found.rate,
                        "hit_rate": found.hit_rate,
                        "of_ceiling": found.cached_tokens / max(1, found.reusable_tokens),
                        "median_s": sorted(found.times_s)[len(found.times_s) // 2] if found.times_s else None,
                        "longest_s": max(found.times_s, default=None),
                        "refused": found.refused,
                        "requests": found.requests,
                    }
                )
                print(f"{clients} clients, {setting.name}: {found.rate:.2f}/s, {found.hit_rate:.1%}", flush=True)
    for row in rows:
        mine = [other["requests_per_s"] for other in rows if other["setting"] == row["setting"]]
        row["of_peak"] = row["requests_per_s"] / max(mine) if max(mine) else 0.0
    return sorted(rows, key=lambda row: args.settings.index(row["setting"]))


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(
        f"{'setting':18} {'clients':>8} {'x fit':>6} {'hits':>6} {'of ceiling':>11} {'requests/s':>11} {'of peak':>8} "
        f"{'median':>8} {'longest':>9} {'refused':>8}"
    )
    for row in rows:
        print(
            f"{row['setting']:18} {row['clients']:8} {row['level']:6} {row['hit_rate']:6.1%} {row['of_ceiling']:11.1%} "
            f"{row['requests_per_s']:11.2f} {row['of_peak']:8.1%} {row['median_s'] or 0:6.2f} s "
            f"{row['longest_s'] or 0:7.2f} s {row['refused']:8}"
        )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Requests per second and hit rate over the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 7), layout="constrained")
    styles = {"plain": "o-", "admission": "s-", "store": "o--", "admission, store": "s--"}
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        levels = [row["level"] for row in mine]
        above.plot(levels, [row["requests_per_s"] for row in mine], styles[name], label=name)
        below.plot(levels, [row["hit_rate"] for row in mine], styles[name], label=name)
    levels = sorted({row["level"] for row in rows})
    above.set_ylabel("requests/s")
    above.set_ylim(bottom=0)
    above.legend()
    below.set_ylabel("cached share of prompt tokens")
    below.set_ylim(0, 1)
    below.set_xscale("log", base=2)
    below.set_xticks(levels, [str(level) for level in levels])
    below.set_xlabel("clients / chats that fit in memory")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[setting.name for setting in SETTINGS])
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--fit", type=int, default=3, help="chats that fit in the instance's memory")
    parser.add_argument("--seconds", type=float, default=18.0, help="that count, at each level and setting")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds before them")
    parser.add_argument("--wait", type=float, default=120.0, help="--admission-wait, seconds")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first-words", type=int, default=150)
    parser.add_argument("--turn-words", type=int, default=30)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--token-bytes", type=int, default=TOKEN_BYTES, help="KV of one token of --model")
    parser.add_argument("--model", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="levels 1 and 4")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.levels, args.seconds, args.warm = [1, 4], 10.0, 4.0
    end_in_order()
    shape = Shape(args.turns, args.first_words, args.turn_words, args.answer_tokens)
    print(f"{args.fit} chats of up to about {shape.longest_tokens} tokens fit in memory", flush=True)
    rows = measure(args, shape)
    show(rows)
    if args.plot is not None:
        plot(rows, args.plot)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
