"""What the smaller benches share: how long a thing took, tables, plots, and the folder they go to (level 4).

Each writes one folder: ``results.json`` (every figure), ``report.md`` (for people), and plots as PNG and SVG.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from memserve.bench import plots
from memserve.bench.report import REPORT
from memserve.bench.results import RESULTS, machine

_Results = TypeVar("_Results")

Cell = str | int | float
LOW_PERCENT, HIGH_PERCENT = 10, 90
"""Error bars reach from the one percentile to the other."""


@dataclass(frozen=True, slots=True)
class Spent:
    """How long a thing took over its repetitions, in ns: median, 10th and 90th percentile."""

    median_ns: float
    low_ns: float
    high_ns: float
    count: int

    @classmethod
    def of(cls, times_ns: Sequence[float]) -> Spent:
        """``times_ns``: at least one."""
        low, median, high = np.percentile(np.asarray(times_ns, dtype=np.float64), (LOW_PERCENT, 50, HIGH_PERCENT))
        return cls(float(median), float(low), float(high), len(times_ns))

    def told(self, unit_ns: int, digits: int) -> str:
        """The median, and in brackets from where to where it goes, in units of ``unit_ns``: ``1.2 (1.1 - 1.6)``."""
        median, low, high = (f"{ns / unit_ns:.{digits}f}" for ns in (self.median_ns, self.low_ns, self.high_ns))
        return f"{median} ({low} - {high})"


def write_sheet(folder: Path, results: object, page: Iterator[str]) -> None:
    """Write ``results.json`` (any struct, with the machine beside it) and ``report.md``."""
    body = {"machine": machine(), **msgspec.to_builtins(results, str_keys=True)}
    (folder / RESULTS).write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1))
    (folder / REPORT).write_text("\n".join(page) + "\n", encoding="utf-8")


def circumstances(command: str, version: str, notes: Sequence[str] = (), partial: str | None = None) -> Iterator[str]:
    """The head of a page: what was run where, and what is to be known about it."""
    if partial is not None:
        yield f"**Partial:** {partial}. What follows is what was measured until then.\n"
    here = machine()
    yield f"* `{command}`, memserve {version}"
    yield f"* {here['processor']}, {here['cores']} cores; {here['system']}"
    yield f"* load average at the end: {', '.join(map(str, here['load_average']))}"
    for note in notes:
        yield f"* {note}"


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    """A Markdown table, with an empty line before it."""
    yield ""
    yield _row(columns)
    yield _row(["---"] * len(columns))
    for row in rows:
        yield _row([str(cell) for cell in row])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def picture(name: str, caption: str) -> str:
    """A plot within a page."""
    return f"\n![{caption}]({name}.png)\n\n{caption} [SVG]({name}.svg)"


def without_pictures() -> str:
    """What a page says instead where matplotlib is missing."""
    return "\nNo plots: matplotlib is not installed (`pip install 'memserve[bench]'`)."


def open_pyplot() -> Any | None:
    """matplotlib's pyplot without a window; ``None`` where it is not installed."""
    if not plots.can_draw():
        return None
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def draw_all(
    drawings: Mapping[str, Callable[[Any, _Results], Any | None]], results: _Results, folder: Path
) -> list[str] | None:
    """Draw what there is, each ``(pyplot, results) -> figure``; names of the plots, ``None`` without matplotlib."""
    pyplot = open_pyplot()
    if pyplot is None:
        return None
    drawn = []
    for name, draw in drawings.items():
        figure = draw(pyplot, results)
        if figure is not None:
            save_figure(pyplot, figure, folder, name)
            drawn.append(name)
    return drawn


def save_figure(pyplot: Any, figure: Any, folder: Path, name: str) -> None:
    """Write ``figure`` in every format, and close it."""
    for ending in plots.FORMATS:
        figure.savefig(folder / f"{name}.{ending}", bbox_inches="tight", dpi=120)
    pyplot.close(figure)


def plain_log_axis(axis: Any, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis (``axes.xaxis`` or ``yaxis``) with numbers as people write them, at ``ticks`` if given."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.12g}"))
    if ticks is not None:
        axis.set_ticks(list(ticks))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(ticker.NullFormatter())


def legend_beside(axes: Any, title: str | None = None) -> None:
    """A legend to the right of ``axes``, where it hides nothing."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), title=title)


def draw_line(axes: Any, points: Mapping[Any, Spent], label: str, unit_ns: float, **style: Any) -> None:
    """Medians over the keys of ``points``, in their order, with error bars; nothing where there are no points."""
    if not points:
        return
    found = list(points.values())
    values = [one.median_ns / unit_ns for one in found]
    below = [(one.median_ns - one.low_ns) / unit_ns for one in found]
    above = [(one.high_ns - one.median_ns) / unit_ns for one in found]
    look = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2} | style
    axes.errorbar(list(points), values, [below, above], label=label, **look)
