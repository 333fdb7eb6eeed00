"""Latency, throughput and rejections over concurrency (level 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memserve.bench.concurrency.results import Cell, ConcurrencyResults, Estimate
from memserve.bench.concurrency.story import SCENARIOS

BARS = "bars: 95 % confidence (bootstrap over repetitions)"
CAPTIONS = {
    "concurrency": "Latency, time to the first token, and throughput over concurrency.",
    "overload": "Who is served and who is refused at the largest concurrency, and what the served ones feel.",
}
TITLES = {
    "cold": "cold: all ask the same, never asked before",
    "warm": "warm: all ask the same again",
    "shared": "shared: three quarters in common",
    "unrelated": "unrelated: each asks its own",
}
MS = 1e3
Drawing = Callable[[Any, ConcurrencyResults], Any | None]


def _concurrency(pyplot: Any, results: ConcurrencyResults) -> Any | None:
    if not results.cells:
        return None
    rows: list[tuple[str, list[tuple[str, str, Callable[[Cell], Estimate | None]]]]] = [
        ("latency (ms)", [("mean", "-", lambda c: c.latency_mean_s), ("P95", "--", lambda c: c.latency_p95_s)]),
        ("time to first token (ms)", [("mean", "-", lambda c: c.ttft_mean_s), ("P95", "--", lambda c: c.ttft_p95_s)]),
        ("served requests/s", [("", "-", lambda c: c.requests_per_s)]),
    ]
    figure, grid = pyplot.subplots(3, 4, figsize=(17, 10.5), sharex=True, sharey="row", layout="constrained")
    for (unit, statistics), row in zip(rows, grid, strict=True):
        for scenario, axes in zip(SCENARIOS, row, strict=True):
            for number, contender in enumerate(contenders_of(results)):
                cells = [cell for cell in results.cells if (cell.contender, cell.scenario) == (contender, scenario)]
                for statistic, style, value in statistics:
                    label = f"{contender}: {statistic}" if statistic else contender
                    _line(axes, cells, value, 1 if "/s" in unit else MS, label, color=f"C{number}", linestyle=style)
            axes.grid(alpha=0.3)
            axes.set_xlabel("requests at once")
        row[0].set_ylabel(unit)
        row[0].set_ylim(0, None)  # shared by the row: only now all of it is there
    for scenario, axes in zip(SCENARIOS, grid[0], strict=True):
        axes.set_title(TITLES[scenario], fontsize=10)
    grid[0][0].set_xticks(sorted({cell.concurrency for cell in results.cells}))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    figure.suptitle(f"Bursts of requests, {', '.join(results.models)}; of those that were served; {BARS}")
    return figure


def _line(
    axes: Any, cells: list[Cell], value: Callable[[Cell], Estimate | None], scale: float, label: str, **look: Any
) -> None:
    found = [(cell.concurrency, estimate) for cell in cells if (estimate := value(cell)) is not None]
    if found:
        values = [scale * one.value for _, one in found]
        below = [scale * (one.value - one.low) for _, one in found]
        above = [scale * (one.high - one.value) for _, one in found]
        errors = [[max(0.0, part) for part in side] for side in (below, above)]
        style = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2, "label": label} | look
        axes.errorbar([at for at, _ in found], values, errors, **style)


def _overload(pyplot: Any, results: ConcurrencyResults) -> Any | None:
    contenders = contenders_of(results)
    if len(contenders) < 2:
        return None
    most = max(cell.concurrency for cell in results.cells)
    cells = {(cell.contender, cell.scenario): cell for cell in results.cells if cell.concurrency == most}
    figure, (counts, tail) = pyplot.subplots(1, 2, figsize=(15, 4.8), layout="constrained")
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        mine = [(at, cells[contender, name]) for at, name in enumerate(SCENARIOS) if (contender, name) in cells]
        places = [at + (number - (len(contenders) - 1) / 2) * width for at, _ in mine]
        served = [cell.accepted / cell.repetitions for _, cell in mine]
        refused = [cell.rejected / cell.repetitions for _, cell in mine]
        counts.bar(places, served, width, color=f"C{number}", label=f"{contender}: served")
        counts.bar(places, refused, width, served, color=f"C{number}", alpha=0.35, hatch="//", edgecolor="white",
                   label=f"{contender}: refused")  # fmt: skip
        known = [
            (place, cell.latency_p95_s) for place, (_, cell) in zip(places, mine, strict=True) if cell.latency_p95_s
        ]
        values = [MS * one.value for _, one in known]
        errors = [[max(0.0, MS * (one.value - one.low)) for _, one in known],
                  [max(0.0, MS * (one.high - one.value)) for _, one in known]]  # fmt: skip
        tail.bar([place for place, _ in known], values, width, yerr=errors, capsize=3, color=f"C{number}",
                 label=contender)  # fmt: skip
    counts.set(title=f"Of {most} requests at once", ylabel="requests a burst")
    tail.set(title="What the served ones feel", ylabel="P95 latency (ms)")
    for axes in (counts, tail):
        axes.set_xticks(range(len(SCENARIOS)), SCENARIOS)
        axes.set_xlabel("burst")
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(f"Overload, {results.limit or 'no limit'}; {', '.join(results.models)}; {BARS}")
    return figure


def contenders_of(results: ConcurrencyResults) -> list[str]:
    """Names of those that were measured."""
    measured = {cell.contender for cell in results.cells}
    return [name for name in results.contenders if name in measured]


DRAWINGS: dict[str, Drawing] = {"concurrency": _concurrency, "overload": _overload}
