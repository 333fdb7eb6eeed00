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

from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.chat_load import SHAPE, Load, shape_of
from harness.flags import options, save
from harness.processes import end_in_order
from harness.rounds import median, turns
from harness.served import Served, serving
from harness.tables import show

TOKEN_BYTES = 23_040
"""KV of a token of the bundled model."""
MIB = 1 << 20


ADMISSION = ("--admission", "cache", "--admission-hold", "--admission-queue", "1000", "--admission-wait")
SETTINGS = ("plain", "admission", "store", "admission, store")
COLUMNS = {
    "setting": "{setting}", "clients": "{clients}", "x fit": "{level}", "hits": "{hit_rate:.1%}",
    "of ceiling": "{of_ceiling:.1%}", "requests/s": "{requests_per_s:.2f}", "of peak": "{of_peak:.1%}",
    "median": "{median_s:.2f} s", "longest": "{longest_s:.2f} s", "refused": "{refused}",
}  # fmt: skip


def start(stack: ExitStack, setting: str, args: Namespace) -> Served:
    """The server of one setting."""
    chat_bytes = (shape_of(args).longest_tokens + 64) * args.token_bytes
    kv_mib = args.fit * chat_bytes // MIB + 1
    flags = ["--colocated", "1", "--metadata", "none", "--served-model-name", "x", "--kv-memory", f"{kv_mib}MiB"]
    flags += [*ADMISSION, str(args.wait)] if "admission" in setting else []
    flags += ["--store-dram", f"{2 * max(args.levels) * kv_mib}MiB"] if "store" in setting else []
    return stack.enter_context(serving(*flags, model=args.model))


def measure(args: Namespace) -> list[dict[str, Any]]:
    """The rows of one run."""
    rows = []
    with ExitStack() as stack:
        servers = {setting: start(stack, setting, args) for setting in args.settings}
        for number, setting in turns(len(args.levels), servers):
            level = args.levels[number]
            clients = level * args.fit
            load = Load(shape_of(args), clients, clients, 1000 * args.seed + level)
            load_pass = load.run_for(servers[setting].url, args.seconds, args.warm)
            rows.append({
                "setting": setting, "level": level, "clients": clients, "requests_per_s": load_pass.rate,
                "hit_rate": load_pass.hit_rate,
                "of_ceiling": load_pass.cached_tokens / max(1, load_pass.reusable_tokens),
                "median_s": median(load_pass.times_s) if load_pass.times_s else None,
                "longest_s": max(load_pass.times_s, default=None), "refused": load_pass.refused,
                "requests": load_pass.requests,
            })  # fmt: skip
            print(f"{clients} clients, {setting}: {load_pass.rate:.2f}/s, {load_pass.hit_rate:.1%}", flush=True)
    for row in rows:
        peak = max(same_setting["requests_per_s"] for same_setting in rows if same_setting["setting"] == row["setting"])
        row["of_peak"] = row["requests_per_s"] / peak if peak else 0.0
    return sorted(rows, key=lambda row: args.settings.index(row["setting"]))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Requests per second and hit rate over the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, sharex=True, figsize=(7, 7), layout="constrained")
    styles = dict(zip(SETTINGS, ("o-", "s-", "o--", "s--"), strict=True))
    levels = sorted({row["level"] for row in rows})
    labels = {"requests_per_s": "requests/s", "hit_rate": "cached share of prompt tokens"}
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for setting in dict.fromkeys(row["setting"] for row in rows):
            figures = [row[name] for row in rows if row["setting"] == setting]
            axes.plot(levels, figures, styles[setting], label=setting)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend()
    panels[1].set_xscale("log", base=2)
    panels[1].set_xticks(levels, [str(level) for level in levels])
    panels[1].set_xlabel("clients / chats that fit in memory")
    figure.savefig(path, dpi=120)


def main() -> None:
    args = options(
        __doc__, settings=list(SETTINGS), levels=[1, 2, 4, 8], fit=(3, "chats that fit in the instance's memory"),
        seconds=(18.0, "that count, at each level and setting"), warm=(8.0, "seconds before them"),
        wait=(120.0, "--admission-wait, seconds"), **SHAPE | {"first_words": 150, "turn_words": 30},
        token_bytes=(TOKEN_BYTES, "KV of one token of --model"), model="", seed=1, plot=Path,
        quick={"levels": [1, 4], "seconds": 10.0, "warm": 4.0},
    )  # fmt: skip
    end_in_order()
    print(f"{args.fit} chats of up to about {shape_of(args).longest_tokens} tokens fit in memory", flush=True)
    rows = measure(args)
    show(rows, COLUMNS)
    if args.plot is not None:
        plot(rows, args.plot)
    save(args, rows)


if __name__ == "__main__":
    main()
