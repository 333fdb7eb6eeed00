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
LINE_STYLES = ("-", "--", "-.", ":")
TURN_SHIFT = 0.04
"""Lines stand side by side, so that their error bars can be told from each other."""
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


def _subject(results: Results) -> str:
    """What and where, for the titles: a picture is looked at without its page."""
    machine = results.machine
    if machine.get("simulated"):
        return f"simulated: {machine['simulated']}"
    where = f"{machine['processor']}, {machine['cores']} cores" if machine.get("processor") else ""
    return " on ".join(part for part in (", ".join(results.models), where) if part)


def _workloads(pyplot: Any, results: Results) -> Any | None:
    """Figure 7: what the workloads are like."""
    return draw_shapes(pyplot, list({shape.workload: shape for shape in results.shapes}.values()))


def draw_shapes(pyplot: Any, shapes: Sequence[Shape]) -> Any | None:
    """Distributions of lengths, shared prefixes and turns, a line a workload; ``None`` where there is none."""
    if not shapes:
        return None
    columns: list[tuple[str, str, Callable[[Shape], Sequence[float]], bool]] = [
        ("prompt (tokens)", "requests", lambda s: s.prompt_tokens, True),
        ("answer, at most (tokens)", "requests", lambda s: s.output_tokens, True),
        ("prompt tokens per answer token", "requests", lambda s: s.prompt_per_output, True),
        ("seen before (share of a prompt's blocks)", "requests", lambda s: s.shared_share, False),
        ("turns of a session", "sessions", lambda s: s.turns, False),
    ]
    figure, row = pyplot.subplots(1, len(columns), figsize=(18, 5.0), layout="constrained")
    styles = _styles([shape.workload for shape in shapes])
    for axes, (label, counted, column, logarithmic) in zip(row, columns, strict=True):
        for shape, (color, line) in zip(shapes, styles, strict=True):
            if column(shape):
                axes.ecdf(column(shape), label=_shape_label(shape), color=color, linestyle=line, linewidth=1.8)
        axes.set(xlabel=label, ylabel=f"share of {counted} up to here", xscale="log" if logarithmic else "linear")
        if not logarithmic:
            axes.set_xlim(0, None)
        axes.grid(alpha=0.3)
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle("Workloads: lengths, shared prefixes and turns (cumulative distributions)")
    return figure


def _styles(names: Sequence[str]) -> list[tuple[str, str]]:
    """Color and line of each: ``chat, from here`` and ``chat, from there`` share a color, others share neither."""
    kinds = [name.partition(",")[0] for name in names]
    order = list(dict.fromkeys(kinds))
    places = [kinds[:number].count(kind) if kinds.count(kind) > 1 else order.index(kind)
              for number, kind in enumerate(kinds)]  # fmt: skip
    return [
        (f"C{order.index(kind)}", LINE_STYLES[place % len(LINE_STYLES)])
        for kind, place in zip(kinds, places, strict=True)
    ]


def _shape_label(shape: Shape) -> str:
    return f"{shape.workload} ({shape.requests:,} requests; {shape.blocks_shared:.3f} of all blocks seen before)"


def _bars(pyplot: Any, results: Results) -> Any | None:
    """Figure 8: TTFT, JCT and TPOT of every setting on every workload, mean and P99."""
    workloads = [w for w in _names(results, lambda f: f.workload) if kind_and_ratio(w)[1] is None]
    if not workloads:
        return None
    most = max(len(_members(results, workload)) for workload in workloads)
    size = (max(4.0, 0.75 * most + 1.5) * 3, 3.2 * len(workloads) + 1.0)
    figure, grid = pyplot.subplots(len(workloads), 3, figsize=size, squeeze=False, layout="constrained")
    for row, workload in zip(grid, workloads, strict=True):
        members = _members(results, workload)
        for axes, (quantity, label) in zip(row, QUANTITIES.items(), strict=True):
            for place, found in enumerate(members):
                _pair_of_bars(axes, place, found, quantity)
            names = [found.setting for found in members]
            axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=9)
            axes.set(title=f"{workload}, {members[0].figures.requests} requests each", ylabel=label)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color="C0"), pyplot.Rectangle((0, 0), 1, 1, color="C1")]
    figure.legend(handles, ["mean", "P99"], loc="outside lower center", ncols=2)
    figure.suptitle(
        f"Settings side by side: {_subject(results)}\nblack lines: 95 % confidence (bootstrap over sessions)"
    )
    return figure


def _names(results: Results, name: Callable[[Found], str]) -> list[str]:
    return list(dict.fromkeys(name(found) for found in results.found))


def _members(results: Results, workload: str) -> list[Found]:
    return [found for found in results.found if found.workload == workload]


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
    workloads = [w for w in _names(results, lambda f: f.workload) if _has_turns(results, w)]
    if not workloads:
        return None
    size = (13, 3.6 * len(workloads) + 0.8)
    figure, grid = pyplot.subplots(len(workloads), 2, figsize=size, squeeze=False, layout="constrained")
    for row, workload in zip(grid, workloads, strict=True):
        members = _members(results, workload)
        for axes, quantity in zip(row, ("ttft", "jct"), strict=True):
            for number, found in enumerate(members):
                _line_over_turns(axes, found, quantity, TURN_SHIFT * (number - (len(members) - 1) / 2))
            axes.set(
                title=workload, xlabel="turn of the session", ylabel=f"mean {QUANTITIES[quantity]}", ylim=(0, None)
            )
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        row[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), title="setting")
    figure.suptitle(f"Over the turns of a session: {_subject(results)}\nbars: standard error of the mean")
    return figure


def _has_turns(results: Results, workload: str) -> bool:
    own = kind_and_ratio(workload)[1] is None
    return own and any(len(_turns_of(found)) > 1 for found in _members(results, workload))


def _turns_of(found: Found) -> dict[int, Figures]:
    return {turn: figures for turn, figures in found.turns.items() if figures.requests >= TURN_REQUESTS_MIN}


def _line_over_turns(axes: Any, found: Found, quantity: str, shift: float) -> None:
    turns = {t: s for t, f in _turns_of(found).items() if (s := getattr(f, f"{quantity}_s")) is not None}
    values = [spread.mean * MS for spread in turns.values()]
    errors = [spread.standard_error * MS for spread in turns.values()]
    places = [turn + 1 + shift for turn in turns]
    axes.errorbar(places, values, errors, marker="o", markersize=4, capsize=3, label=found.setting)


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
            for setting in _names(results, lambda f: f.setting):
                _line_over_ratios(axes, results, kind, setting, statistic)
            name = "P99" if statistic == "p99" else statistic
            axes.set(
                title=kind,
                xlabel="share ratio (how often each session is there)",
                ylabel=f"{name} {QUANTITIES['ttft']}",
                ylim=(0, None),
            )
            axes.set_xticks(sorted(ratios[kind]))
            axes.grid(alpha=0.3)
        row[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), title="setting")
    figure.suptitle(
        f"Policies over the share ratio: {_subject(results)}\nbars: 95 % confidence (bootstrap over sessions)"
    )
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
