"""The figures of MemServe's evaluation, drawn from results: PNG and SVG (level 4).

matplotlib is optional (extra ``bench``); whoever has results can draw them later.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memserve.bench.metrics import Figures
from memserve.bench.paper import kind_and_ratio
from memserve.bench.results import Found, Results, Shape

FORMATS = ("png", "svg")
MS = 1e3
QUANTITIES = {
    "ttft": "time to first token (ms)",
    "jct": "job completion time (ms)",
    "tpot": "time per output token (ms)",
}
TURN_REQUESTS_MIN = 3
"""A turn that fewer requests reached is not drawn: it would be an anecdote."""

Drawing = Callable[[Any, Results], Any | None]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_all(results: Results, folder: Path) -> list[str]:
    """Write every figure that ``results`` suffices for; their names without ending, in the report's order."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # no window
    pyplot = importlib.import_module("matplotlib.pyplot")
    drawn = []
    for name, draw in DRAWINGS.items():
        figure = draw(pyplot, results)
        if figure is not None:
            for ending in FORMATS:
                figure.savefig(folder / f"{name}.{ending}", bbox_inches="tight", dpi=120)
            pyplot.close(figure)
            drawn.append(name)
    return drawn


def _workloads(pyplot: Any, results: Results) -> Any | None:
    """Figure 7: what the workloads are like."""
    shapes = list({shape.workload: shape for shape in results.shapes}.values())
    if not shapes:
        return None
    columns: list[tuple[str, Callable[[Shape], Sequence[float]], bool]] = [
        ("prompt (tokens)", lambda s: s.prompt_tokens, True),
        ("answer, at most (tokens)", lambda s: s.output_tokens, False),
        ("prompt tokens per answer token", lambda s: s.prompt_per_output, True),
        ("shared prefix (share of the prompt)", lambda s: s.shared_share, False),
    ]
    figure, row = pyplot.subplots(1, 4, figsize=(15, 4.2), sharey=True, layout="constrained")
    for axes, (label, column, logarithmic) in zip(row, columns, strict=True):
        for shape in shapes:
            axes.ecdf(column(shape), label=f"{shape.workload} ({shape.requests} requests)")
        axes.set(xlabel=label, xscale="log" if logarithmic else "linear")
        axes.grid(alpha=0.3)
    row[0].set_ylabel("share of requests up to here")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle("Workloads: lengths and shared prefixes")
    return figure


def _bars(pyplot: Any, results: Results) -> Any | None:
    """Figure 8: TTFT, JCT and TPOT of every setting on every workload, mean and P99."""
    workloads = list(dict.fromkeys(found.workload for found in results.found))
    if not workloads:
        return None
    settings = list(dict.fromkeys(found.setting for found in results.found))
    size = (max(4.0, 0.75 * len(settings) + 1.5) * 3, 3.2 * len(workloads) + 0.8)
    figure, grid = pyplot.subplots(len(workloads), 3, figsize=size, squeeze=False, layout="constrained")
    for row, workload in zip(grid, workloads, strict=True):
        members = {found.setting: found for found in results.found if found.workload == workload}
        for axes, (quantity, label) in zip(row, QUANTITIES.items(), strict=True):
            for place, setting in enumerate(settings):
                if setting in members:
                    _pair_of_bars(axes, place, members[setting], quantity)
            axes.set_xticks(range(len(settings)), settings, rotation=30, ha="right", fontsize=9)
            axes.set(title=workload, ylabel=label)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color="C0"), pyplot.Rectangle((0, 0), 1, 1, color="C1")]
    title = "Settings at equal work; lines: 95 % confidence (bootstrap over sessions)"
    figure.legend(handles, ["mean", "P99"], loc="outside lower center", ncols=2)
    figure.suptitle(title)
    return figure


def _pair_of_bars(axes: Any, place: int, found: Found, quantity: str) -> None:
    spread = getattr(found.figures, f"{quantity}_s")
    if spread is None:
        return
    for offset, statistic, color in ((-0.2, "mean", "C0"), (0.2, "p99", "C1")):
        value = getattr(spread, statistic) * MS
        axes.bar(place + offset, value, width=0.38, color=color)
        if (interval := found.intervals.get(f"{quantity} {statistic}")) is not None:
            below, above = max(0.0, value - interval[0] * MS), max(0.0, interval[1] * MS - value)
            axes.errorbar(place + offset, value, [[below], [above]], color="black", capsize=3, linewidth=1)


def _turns(pyplot: Any, results: Results) -> Any | None:
    """Figure 12's form: over the turns of a session."""
    workloads = [w for w in dict.fromkeys(found.workload for found in results.found) if _has_turns(results, w)]
    if not workloads:
        return None
    figure, grid = pyplot.subplots(
        len(workloads), 2, figsize=(12, 3.4 * len(workloads) + 0.6), squeeze=False, layout="constrained"
    )
    for row, workload in zip(grid, workloads, strict=True):
        members = [found for found in results.found if found.workload == workload]
        for axes, quantity in zip(row, ("ttft", "jct"), strict=True):
            for found in members:
                _line_over_turns(axes, found, quantity)
            axes.set(
                title=workload, xlabel="turn of the session", ylabel=f"mean {QUANTITIES[quantity]}", ylim=(0, None)
            )
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        row[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), title="setting")
    figure.suptitle("Over the turns of a session; bars: standard error of the mean")
    return figure


def _has_turns(results: Results, workload: str) -> bool:
    return any(len(_turns_of(found)) > 1 for found in results.found if found.workload == workload)


def _turns_of(found: Found) -> dict[int, Figures]:
    return {turn: figures for turn, figures in found.turns.items() if figures.requests >= TURN_REQUESTS_MIN}


def _line_over_turns(axes: Any, found: Found, quantity: str) -> None:
    turns = {t: s for t, f in _turns_of(found).items() if (s := getattr(f, f"{quantity}_s")) is not None}
    values = [spread.mean * MS for spread in turns.values()]
    errors = [spread.standard_error * MS for spread in turns.values()]
    axes.errorbar(
        [turn + 1 for turn in turns], values, errors, marker="o", markersize=4, capsize=3, label=found.setting
    )


def _share_ratio(pyplot: Any, results: Results) -> Any | None:
    """Figure 14: settings (policies) over the share ratio."""
    ratios: dict[str, set[float]] = {}
    for found in results.found:
        kind, ratio = kind_and_ratio(found.workload)
        if ratio is not None:
            ratios.setdefault(kind, set()).add(ratio)
    kinds = [kind for kind, known in ratios.items() if len(known) > 1]
    if not kinds:
        return None
    figure, grid = pyplot.subplots(len(kinds), 2, figsize=(11, 3.8 * len(kinds)), squeeze=False, layout="constrained")
    for row, kind in zip(grid, kinds, strict=True):
        for axes, statistic in zip(row, ("mean", "p99"), strict=True):
            for setting in dict.fromkeys(found.setting for found in results.found):
                _line_over_ratios(axes, results, kind, setting, statistic)
            name = "P99" if statistic == "p99" else statistic
            axes.set(title=kind, xlabel="share ratio", ylabel=f"{name} {QUANTITIES['ttft']}", ylim=(0, None))
            axes.grid(alpha=0.3)
        row[1].legend(fontsize=8, title="setting")
    figure.suptitle("Over the share ratio; bars: 95 % confidence (bootstrap over sessions)")
    return figure


def _line_over_ratios(axes: Any, results: Results, kind: str, setting: str, statistic: str) -> None:
    points = []
    for found in results.found:
        own_kind, ratio = kind_and_ratio(found.workload)
        if own_kind == kind and found.setting == setting and ratio is not None and found.figures.ttft_s is not None:
            value = getattr(found.figures.ttft_s, statistic)
            low, high = found.intervals.get(f"ttft {statistic}", (value, value))
            points.append((ratio, value * MS, max(0.0, value - low) * MS, max(0.0, high - value) * MS))
    if points:
        at, values, below, above = zip(*sorted(points), strict=True)
        axes.errorbar(at, values, [below, above], marker="o", markersize=4, capsize=3, label=setting)


DRAWINGS: dict[str, Drawing] = {
    "workloads": _workloads,
    "settings": _bars,
    "turns": _turns,
    "share-ratio": _share_ratio,
}
"""File name -> figures 7, 8, 12 and 14."""
