"""Parts of every report: tables for Markdown and for a terminal, and helpers for plots.

matplotlib is optional (extra ``bench``): without it a report has only its tables, and says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memserve_lab.workloads.statistics import Spread

Cell = str | int | float
FORMATS = ("png", "svg")
MS = 1e3
"""Times are seconds in results, milliseconds in reports and plots."""
NO_PLOTS = "\nNo plots: matplotlib is not installed (`pip install 'memserve[bench]'`).\n"


@dataclass(frozen=True, slots=True)
class Table:
    """One section of a report. No columns: only ``about``."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    about: str = ""
    """Prose between title and rows."""
    below: str = ""
    """Prose behind the rows."""
    level: int = 2
    """Level of the heading."""

    @property
    def is_empty(self) -> bool:
        """Whether it has neither rows nor prose."""
        return not self.rows and (bool(self.columns) or not self.about)

    def markdown_lines(self) -> Iterator[str]:
        """Lines of Markdown; none for an empty table."""
        if self.is_empty:
            return
        if self.title:
            yield f"\n{'#' * self.level} {self.title}"
        if self.about:
            yield f"\n{self.about.strip()}"
        if self.rows:
            yield ""
            yield _row(self.columns)
            yield _row(["---"] * len(self.columns))
            for row in self.rows:
                yield _row([str(cell) for cell in row])
        if self.below:
            yield f"\n{self.below.strip()}"

    def terminal_lines(self) -> Iterator[str]:
        """Lines for a terminal: the first column left-aligned, the others right-aligned."""
        rows = [self.columns, *([str(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield self.title
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            yield "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()
        if self.below:
            yield self.below


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def in_ms(spread: Spread | None, *names: str, digits: int = 1) -> list[str]:
    """Statistics of ``spread`` (seconds) as milliseconds. None: empty cells."""
    return [f"{MS * getattr(spread, name):.{digits}f}" if spread is not None else "" for name in names]


# -- plots


class Drawing(NamedTuple):
    """One plot of a report: ``draw(pyplot, results)`` gives a figure, or None where nothing was measured for it."""

    caption: str
    draw: Callable[[Any, Any], Any | None]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def open_pyplot() -> Any:
    """matplotlib's pyplot without a window."""
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def draw_all(drawings: Mapping[str, Drawing], results: object, folder: Path) -> list[str] | None:
    """Draw all plots that have data; returns their names. None: matplotlib is not installed."""
    if not can_draw():
        return None
    pyplot, pictures = open_pyplot(), []
    for name, drawing in drawings.items():
        figure = drawing.draw(pyplot, results)
        if figure is not None:
            for ending in FORMATS:
                figure.savefig(folder / f"{name}.{ending}", bbox_inches="tight", dpi=120)
                figure.set_layout_engine("none")  # it is laid out once for all formats
            pyplot.close(figure)
            pictures.append(name)
    return pictures


def picture(name: str, caption: str) -> str:
    """Markdown of a plot."""
    return f"\n![{caption}]({name}.png)\n\n{caption} [SVG]({name}.svg)"


def plain_log_axis(axis: Any, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis (``axes.xaxis`` or ``yaxis``) with plain numbers, at ``ticks`` if given."""
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


def finish(panels: Sequence[Any]) -> None:
    """A grid, and a legend beside every panel that has lines."""
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            legend_beside(axes)


def draw_line(axes: Any, points: Mapping[Any, Spread], label: str, unit: float, **style: Any) -> None:
    """Medians over the keys of ``points``, in their order, with bars from P10 to P90. No points: no line."""
    intervals = {place: (values.p50, values.p10, values.p90) for place, values in points.items()}
    draw_intervals(axes, intervals, label, unit, **style)


def draw_intervals(
    axes: Any, points: Mapping[Any, tuple[float, float, float]], label: str, unit: float, **style: Any
) -> None:
    """A line through ``key -> (value, low, high)``, with error bars, in units of ``unit``. No points: no line."""
    if not points:
        return
    values = [value / unit for value, _, _ in points.values()]
    below = [max(0.0, (value - low) / unit) for value, low, _ in points.values()]
    above = [max(0.0, (high - value) / unit) for value, _, high in points.values()]
    look = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2} | style
    axes.errorbar(list(points), values, [below, above], label=label, **look)
