"""Figure 13 of MemServe, and the other curves of the cost model (level 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memserve.bench.cost.results import CostResults, Foretold
from memserve.bench.sheet import draw_line, legend_beside, plain_log_axis
from memserve.units import NS_PER_MS

BARS = "dots: measured, not fitted to (bars: 10th to 90th percentile); lines: what the cost model says"
CAPTIONS = {
    "figure-13": "Time to the first token over the cached ratio (figure 13).",
    "curves": "The other curves: decoding, and moving blocks.",
    "errors": "How far the cost model is off what it has not seen.",
}
LIMIT_PERCENT = 60
"""Errors beyond it are drawn at the edge."""
Drawing = Callable[[Any, CostResults], Any | None]


def _figure_13(pyplot: Any, results: CostResults) -> Any | None:
    by_curve = {curve: [point for point in results.points if point.curve == curve] for curve in TTFT_TITLES}
    if not by_curve["prefill"]:
        return None
    figure, row = pyplot.subplots(1, 3, figsize=(16, 5), sharey=True, layout="constrained")
    for axes, (curve, points) in zip(row, by_curve.items(), strict=True):
        batches = curve == "prefill in batches"
        groups = _grouped(points, _batch if batches else _tokens)
        for number, (key, members) in enumerate(groups.items()):
            label = f"{key} prompts at once" if batches else f"{key:,} tokens"
            _line(axes, {point.cached_ratio: point for point in members}, label, f"C{number}")
        tokens = f" of {points[0].tokens} tokens" if batches and points else ""
        axes.set(title=TTFT_TITLES[curve] + tokens, xlabel="cached ratio (share of each prompt)", yscale="log")
        axes.set_xlim(-0.03, 1.0)
        axes.grid(alpha=0.3)
        if groups:
            axes.legend(fontsize=8, loc="lower left")
    row[0].set_ylabel("time to first token (ms)")
    plain_log_axis(row[0].yaxis)
    figure.suptitle(f"What caching saves, {results.model}; {BARS}", fontsize=11)
    return figure


TTFT_TITLES = {
    "prefill": "Cached KV lies in HBM, one prompt",
    "prefill from DRAM": "Cached KV lies in DRAM: swapped in first",
    "prefill in batches": "Cached KV lies in HBM, prompts",
}


def _curves(pyplot: Any, results: CostResults) -> Any | None:
    decodes = [point for point in results.points if point.curve == "decode"]
    moves = [point for point in results.points if point.blocks and point.curve in MOVES]
    if not decodes and not moves:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(16, 5), layout="constrained")
    for number, (context, members) in enumerate(sorted(_grouped(decodes, _tokens).items())):
        _line(left, {point.batch: point for point in sorted(members, key=_batch)}, f"{context:,}", f"C{number}")
    left.set(title="A step of decoding", xlabel="sequences in the step", ylabel="time (ms)", ylim=(0, None))
    if decodes:
        legend_beside(left, "tokens attended\nto by each")
    for number, (curve, name) in enumerate(MOVES.items()):
        groups = _grouped([point for point in moves if point.curve == curve], lambda point: point.pieces > point.blocks)
        for by_page, members in groups.items():
            label = f"{name}, by page" if by_page else name
            ordered = {point.blocks: point for point in sorted(members, key=lambda point: point.blocks)}
            _line(right, ordered, label, f"C{number}", "--" if by_page else "-")
    size = results.block_bytes / 1e3
    right.set(title=f"Moving blocks of {size:,.0f} kB", xlabel="blocks", ylabel="time (ms)", xscale="log", yscale="log")
    if moves:
        plain_log_axis(right.xaxis, sorted({point.blocks for point in moves}))
        plain_log_axis(right.yaxis)
        legend_beside(right)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"The other curves, {results.model}; {BARS}", fontsize=11)
    return figure


MOVES = {
    "swap_in": "swap in",
    "swap_out": "swap out",
    "same_host": "another process",
    "network": "another host (NIXL over TCP)",
}


def _batch(point: Foretold) -> int:
    return point.batch


def _tokens(point: Foretold) -> int:
    return point.tokens


def _errors(pyplot: Any, results: CostResults) -> Any | None:
    if not results.points:
        return None
    curves = list(results.accuracy)
    figure, axes = pyplot.subplots(figsize=(11, 0.7 * len(curves) + 2), layout="constrained")
    for row, curve in enumerate(curves):
        errors = [100 * point.error for point in results.points if point.curve == curve]
        shown = [max(-LIMIT_PERCENT, min(LIMIT_PERCENT, error)) for error in errors]
        spread = [row + 0.25 * (at / max(1, len(shown) - 1) - 0.5) for at in range(len(shown))]
        axes.scatter(shown, spread, s=14, alpha=0.6, color=f"C{row}", label=None if row else "a point")
        found = results.accuracy[curve]
        axes.plot(100 * found.bias, row, marker="|", markersize=22, markeredgewidth=2, color="black",
                  linestyle="none", label=None if row else "median")  # fmt: skip
    names = [f"{curve}\n(median error {100 * results.accuracy[curve].median_error:.1f} %)" for curve in curves]
    axes.set_yticks(range(len(curves)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linewidth=1)
    axes.set(xlabel="error of the cost model (% of the measured time; above 0: it says too much)", ylabel="curve")
    edge = LIMIT_PERCENT * 1.03
    axes.set(title=f"Points that the curves were not fitted to, {results.model}", xlim=(-edge, edge))
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _grouped(points: Sequence[Foretold], key: Callable[[Foretold], Any]) -> dict[Any, list[Foretold]]:
    groups: dict[Any, list[Foretold]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return dict(sorted(groups.items()))


def _line(axes: Any, points: Mapping[Any, Foretold], label: str, color: str, style: str = "-") -> None:
    """Measured dots and the fitted line between them."""
    points = dict(sorted(points.items()))
    draw_line(axes, {at: point.spent for at, point in points.items()}, label, NS_PER_MS, color=color, linestyle="none")
    axes.plot(list(points), [point.expected_ns / NS_PER_MS for point in points.values()], style, color=color, lw=1.2)


DRAWINGS: dict[str, Drawing] = {"figure-13": _figure_13, "curves": _curves, "errors": _errors}
