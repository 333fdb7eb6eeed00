"""Does a hybrid's prefix cache keep the right snapshots of its states? Token hit rates at equal memory, beside rivals.

    python bench/state_hits.py --data FOLDER [--only NAME ...] [--plot FILE.png] [--out FILE]

The production machines replay each workload (``memserve_lab.experiments.state_hits``), in order of arrival, one request
at a time; nothing is computed, so a hit rate is all that is measured. Policies: memserve's own; a snapshot behind every
block of 32 tokens and LRU, as Marconi's vLLM+ has it; behind every page of an engine whose pages are as large as a
layer's state (vLLM itself); behind prompts and answers, LRU; Marconi, with the best of five ``alpha``, chosen
afterwards; and unlimited memory with a state behind every block. Models, by their proportions: Qwen3-Next, and the one
of Marconi's simulation. Marconi gives 100 chats 1 to 10 GB, and 100 coding agents 40 to 100 GB: here that is 4 to 10 GB
for 10 agents.

* *chats*: 100 conversations of at least five turns. Sessions begin one a second, a turn follows after 10 s (means of
  exponential times).
* *service agents*: tau-bench's airline, 60 sessions, alike. *coding agents*: 10 sessions of mini-SWE-agent, alike.
* *Mooncake*: half an hour of its conversation trace, which names blocks of 512 tokens: the last, partial block of a
  prompt has a name of its own, so no prompt goes on where the one before it ended. Without a snapshot at every block,
  which takes hours to replay. *Mooncake's agents*: 27 s of its trace of tools and agents.

``--dram-gb N`` asks another question, with memserve's policy alone: what a second tier of so many GB adds to each size
of memory.

A workload whose data is not there is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.flags import Commas, options, parts_of, save
from harness.tables import show

from memserve.base.errors import UserError
from memserve_lab.bench.catalogue import Recipe, build
from memserve_lab.experiments.state_hits import (
    ENDS,
    ENGINE_PAGE,
    EVERY_BLOCK,
    MARCONI,
    MARCONI_7B,
    OURS,
    QWEN3_NEXT,
    Asked,
    Hybrid,
    Point,
    arrivals,
    measure_point,
    replay,
    unlimited,
)


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, and the memory that each model has for it, in GB."""

    kind: str
    memory_gb: dict[str, tuple[float, ...]]
    sessions: int | None = None
    turns_min: int = 1
    without: str = ""
    """A policy that is left out: it would take hours."""


MODELS: dict[str, Hybrid] = {model.name: model for model in (QWEN3_NEXT, MARCONI_7B)}
LOADS = {
    "chats": Load("chat", dict.fromkeys(MODELS, (1, 2, 5, 10)), 100, 5),
    "service agents": Load("airline", dict.fromkeys(MODELS, (1, 2, 5, 10))),
    "coding agents": Load("calls-code", dict.fromkeys(MODELS, (1, 2, 4, 10))),
    "Mooncake": Load("trace", {QWEN3_NEXT.name: (100, 400, 1600)}, without=EVERY_BLOCK),
    "Mooncake's agents": Load("toolagent", {QWEN3_NEXT.name: (10, 20, 40)}),
}
SHORT = {"chats": Load("chat", {QWEN3_NEXT.name: (2,)}, 30, 3)}
COLUMNS = {
    "workload": "{workload}", "model": "{model}", "GB": "{memory_gb:g}", OURS: "{ours:.3f}",
    EVERY_BLOCK: "{every_block}", "times that": "{times}", ENGINE_PAGE: "{page:.3f}", ENDS: "{ends:.3f}",
    MARCONI: "{marconi:.3f}", "unlimited": "{unlimited:.3f}", "of unlimited": "{of_unlimited:.2f}",
    "Marconi of it": "{marconi_of_unlimited:.2f}",
}  # fmt: skip


TIER_COLUMNS = {
    "workload": "{workload}", "model": "{model}", "GB": "{memory_gb:g}", "unlimited": "{unlimited:.3f}",
    "one tier": "{one_tier:.3f}",
}  # fmt: skip


def requests_of(load: Load, args: Any) -> list[Asked]:
    """In order of arrival."""
    recipe = Recipe(load.kind, data=args.data, sessions=load.sessions, seed=args.seed, turns_min=load.turns_min)
    return arrivals(build(recipe), sessions_per_s=args.sessions_per_s, think_s=args.think_s, seed=args.seed)


def measure(loads: dict[str, Load], args: Any) -> list[Point]:
    """All points; workloads without data are left out, and named."""
    points = []
    for name, load in loads.items():
        try:
            requests = requests_of(load, args)
        except UserError as error:
            print(f"{name}: left out: {error}", flush=True)
            continue
        ceiling = unlimited(requests)
        tokens = sum(len(asked.prompt) for asked in requests) // len(requests)
        print(f"{name}: {len(requests)} requests of {tokens:,} tokens, {ceiling:.1%} of them seen before", flush=True)
        for model, sizes in load.memory_gb.items():
            for memory_gb in sizes:
                point = measure_point(name, MODELS[model], requests, memory_gb, ceiling, without=load.without)
                points.append(point)
                print(f"  {model}, {memory_gb:g} GB: {points[-1].hits[OURS].rate:.3f}", flush=True)
    return points


def measure_tiers(loads: dict[str, Load], args: Any) -> list[dict[str, Any]]:
    """Rows of the table of two tiers."""
    rows = []
    for name, load in loads.items():
        requests = requests_of(load, args)
        ceiling = unlimited(requests)
        for model, sizes in load.memory_gb.items():
            for memory_gb in sizes:
                rates = [
                    replay(MODELS[model], requests, int(memory_gb * 1e9), None, int(dram_gb * 1e9)).rate
                    for dram_gb in (0, args.dram_gb)
                ]
                row = {"workload": name, "model": model, "memory_gb": memory_gb, "unlimited": ceiling}
                rows.append(row | {"one_tier": rates[0], "two_tiers": rates[1]})
    return rows


def row_of(point: Point) -> dict[str, Any]:
    """The row of a point."""
    rates = {key: point.hits[name].rate for key, name in (
        ("ours", OURS), ("page", ENGINE_PAGE), ("ends", ENDS), ("marconi", MARCONI),
    )}  # fmt: skip
    has_blocks = EVERY_BLOCK in point.hits
    return rates | {
        "every_block": f"{point.hits[EVERY_BLOCK].rate:.3f}" if has_blocks else "",
        "times": f"{point.times_every_block:.1f}x" if has_blocks else "",
        "workload": point.workload, "model": point.model, "memory_gb": point.memory_gb, "unlimited": point.unlimited,
        "of_unlimited": point.of_unlimited(OURS),
        "marconi_of_unlimited": point.of_unlimited(MARCONI), "hits": point.hits,
    }  # fmt: skip


def plot(points: list[Point], path: Path) -> None:
    """Hit rate over memory, a panel for each workload and model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys((point.workload, point.model) for point in points))
    columns = min(4, len(groups))
    rows = -(-len(groups) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    styles = {OURS: "o-", MARCONI: "s-", ENDS: "^-", ENGINE_PAGE: "v--", EVERY_BLOCK: "x--"}
    for axes, group in zip(panels.flat, groups, strict=False):
        line = [point for point in points if (point.workload, point.model) == group]
        sizes = [point.memory_gb for point in line]
        for name, style in styles.items():
            if name in line[0].hits:
                axes.plot(sizes, [100 * point.hits[name].rate for point in line], style, label=name, markersize=4)
        axes.axhline(100 * line[0].unlimited, color="black", linewidth=0.8, linestyle=":", label="unlimited memory")
        axes.set(title=f"{group[0]}, {group[1]}", xscale="log", xlabel="memory [GB]", ylim=(0, None))
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("tokens not computed [%]")
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    args = options(
        __doc__, data=Path, only=Commas(*LOADS), sessions_per_s=(1.0, "sessions that begin in a second"),
        think_s=(10.0, "seconds between the turns of a session, in the mean"), seed=1, plot=Path, quick={},
        dram_gb=(0.0, "of a second tier"),
    )  # fmt: skip
    loads = SHORT if args.quick else parts_of(args.only, LOADS)
    if args.dram_gb:
        rows = measure_tiers(loads, args)
        show(rows, TIER_COLUMNS | {f"and {args.dram_gb:g} GB of DRAM": "{two_tiers:.3f}"})
        save(args, rows)
        return
    points = measure(loads, args)
    show([row_of(point) for point in points], COLUMNS)
    if args.plot is not None and points:
        plot(points, args.plot)
    save(args, [row_of(point) for point in points])


if __name__ == "__main__":
    main()
