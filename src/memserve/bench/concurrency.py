"""``memserve bench concurrency``: latency, throughput and rejections of bursts, with and without a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memserve.bench.bursts import SCENARIOS, BurstPlan, BurstResults, Cell, send_bursts
from memserve.bench.report_writer import MS, Drawing, Table, draw_intervals, finish, in_ms
from memserve.bench.report_writer import Cell as TableCell
from memserve.bench.study import RECORDS, RunFolder, Study, Tell
from memserve.workloads.statistics import Spread

SOURCE = "llm-serving-cache (Llama 3.1 8B, Ollama)"
SOURCE_ALONE_MS = {"cold": (8488, 177), "warm": (5520, 47), "shared": (5891, 47), "unrelated": (1891, 163)}
"""Total latency and prompt evaluation of single requests; its unrelated prompt was shorter."""
SOURCE_BURSTS_MS = {1: (5771, 5771, 0.17), 3: (10963, 16299, 0.18), 5: (16560, 27744, 0.18), 10: (29040, 53525, 0.19)}
"""Concurrency -> mean latency, P95, requests a second; all requests have one prompt."""
SOURCE_OVERLOAD = (("10", "0", "53525", "0.18"), ("3", "7", "20700", "0.15"))
"""Accepted, rejected, P95 in ms, requests a second: of 10 at once, without a limit and with at most 3 active."""
BARS = "bars: 95 % confidence (bootstrap over repetitions)"
TITLES = {
    "cold": "cold: one prompt for all, never seen before",
    "warm": "warm: the cold burst again",
    "shared": "shared: three quarters in common",
    "unrelated": "unrelated: a prompt each",
}
Panel = tuple[str, Callable[[Cell], Spread | None], str, float, tuple[str, ...]]
PANELS: tuple[Panel, ...] = (
    ("latency (ms)", lambda cell: cell.latency_s, "latency", 1 / MS, ("mean", "p95")),
    ("time to first token (ms)", lambda cell: cell.ttft_s, "ttft", 1 / MS, ("mean", "p95")),
    ("served requests/s", lambda cell: cell.requests_per_s, "rate", 1.0, ("mean",)),
)
"""Label, value, name in ``intervals``, unit, statistics; a row of the first plot each."""


def _concurrency(pyplot: Any, results: BurstResults) -> Any | None:
    if not results.cells:
        return None
    figure, grid = pyplot.subplots(3, 4, figsize=(17, 10.5), sharex=True, sharey="row", layout="constrained")
    for (label, value, name, unit, statistics), row in zip(PANELS, grid, strict=True):
        for scenario, axes in zip(SCENARIOS, row, strict=True):
            for number, contender in enumerate(results.measured):
                cells = [cell for cell in results.cells if (cell.contender, cell.scenario) == (contender, scenario)]
                for statistic, style in zip(statistics, ("-", "--"), strict=False):
                    told = f"{contender}: {statistic.replace('p95', 'P95')}" if len(statistics) > 1 else contender
                    points = {cell.concurrency: _interval(cell, value(cell), name, statistic) for cell in cells}
                    known = {at: point for at, point in points.items() if point is not None}
                    draw_intervals(axes, known, told, unit, color=f"C{number}", linestyle=style)
            axes.grid(alpha=0.3)
            axes.set_xlabel("requests at once")
        row[0].set_ylabel(label)
        row[0].set_ylim(0, None)  # shared by the row, which is only complete now
    for scenario, axes in zip(SCENARIOS, grid[0], strict=True):
        axes.set_title(TITLES[scenario], fontsize=10)
    grid[0][0].set_xticks(sorted({cell.concurrency for cell in results.cells}))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    figure.suptitle(f"Bursts of requests, {', '.join(results.models)}; accepted requests; {BARS}")
    return figure


def _interval(cell: Cell, found: Spread | None, name: str, statistic: str) -> tuple[float, float, float] | None:
    """Value, low end and high end."""
    if found is None:
        return None
    value: float = getattr(found, statistic)
    return (value, *cell.intervals.get(f"{name} {statistic}", (value, value)))


def _overload(pyplot: Any, results: BurstResults) -> Any | None:
    contenders = results.measured
    if len(contenders) < 2:
        return None
    most = max(cell.concurrency for cell in results.cells)
    cells = {(cell.contender, cell.scenario): cell for cell in results.cells if cell.concurrency == most}
    figure, (counts, tail) = pyplot.subplots(1, 2, figsize=(15, 4.8), layout="constrained")
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        mine = {
            at + (number - (len(contenders) - 1) / 2) * width: cells[contender, name]
            for at, name in enumerate(SCENARIOS)
            if (contender, name) in cells
        }
        served = [cell.accepted / cell.repetitions for cell in mine.values()]
        refused = [cell.rejected / cell.repetitions for cell in mine.values()]
        counts.bar(list(mine), served, width, color=f"C{number}", label=f"{contender}: accepted")
        counts.bar(list(mine), refused, width, served, color=f"C{number}", alpha=0.35, hatch="//", edgecolor="white",
                   label=f"{contender}: rejected")  # fmt: skip
        found = {at: _interval(cell, cell.latency_s, "latency", "p95") for at, cell in mine.items()}
        known = {at: point for at, point in found.items() if point is not None}
        values = [MS * value for value, _, _ in known.values()]
        tail.bar(list(known), values, width, color=f"C{number}", label=contender)
        draw_intervals(tail, known, "", 1 / MS, color="black", linestyle="none", marker="")
    counts.set(title=f"Of {most} requests at once", ylabel="requests a burst")
    tail.set(title="Accepted requests", ylabel="P95 latency (ms)")
    for axes in (counts, tail):
        axes.set_xticks(range(len(SCENARIOS)), SCENARIOS)
        axes.set_xlabel("burst")
    finish((counts, tail))
    figure.suptitle(f"Overload, {results.limit or 'no limit'}; {', '.join(results.models)}; {BARS}")
    return figure


DRAWINGS = {
    "concurrency": Drawing("Latency, time to the first token, and throughput over concurrency.", _concurrency),
    "overload": Drawing("Accepted and rejected requests at the largest concurrency, and latency.", _overload),
}


class ConcurrencyStudy(Study[BurstResults]):
    """Bursts of growing size; our server without and with a limit, and other servers unchanged."""

    title = "memserve bench concurrency"
    draws_requests = True
    drawings = DRAWINGS

    def __init__(self, plan: BurstPlan, results: BurstResults, folder: RunFolder) -> None:
        super().__init__(results)
        self._plan, self._folder = plan, folder

    def measure(self, tell: Tell) -> None:
        send_bursts(self._plan, self._folder.writer, self.results, tell)

    def head(self) -> Iterator[str]:
        results = self.results
        yield f"* prompts of {results.prompt_tokens_mean:.0f} tokens on average, answers of {results.output_tokens}"
        yield "* the requests of a burst are all due at the same moment, and latency counts from it"
        if results.limit:
            yield f"* the limit: {results.limit}; rejections are immediate, and count in no latency"

    def tables(self) -> Iterator[Table]:
        yield self._alone()
        if len(self.results.measured) > 1:
            yield self._overload()
        for scenario in SCENARIOS:
            yield self._scenario(scenario)
        yield Table("", about=f"Every request is in `{RECORDS}`.")

    def _alone(self) -> Table:
        """One request at a time: where its time goes."""
        rows: list[list[TableCell]] = []
        for cell in self.results.cells:
            if cell.concurrency == 1 and cell.contender == self.results.measured[0]:
                total_ms, prompt_ms = SOURCE_ALONE_MS[cell.scenario]
                times = [*_ms(cell.latency_s, "mean"), *_ms(cell.ttft_s, "mean"), *_ms(cell.decode_s, "mean")]
                rows.append([cell.scenario, *times, f"{cell.cached_share:.0%}", f"{total_ms} / {prompt_ms}"])
        columns = ["burst", "latency (ms)", "to the first token (ms)", "decode (ms)", "cached"]
        return Table("One request at a time", [*columns, f"{SOURCE}: latency / prompt evaluation (ms)"], rows)

    def _overload(self) -> Table:
        """Without and with the limit, at the largest concurrency."""
        most = max(cell.concurrency for cell in self.results.cells)
        rows: list[list[TableCell]] = [
            [cell.scenario, cell.contender, f"{cell.accepted / cell.repetitions:g}",
             f"{cell.rejected / cell.repetitions:g}", *_ms(cell.latency_s, "p95"), _rate(cell)]
            for cell in self.results.cells if cell.concurrency == most
        ]  # fmt: skip
        for name, cells in zip(("no control", "max active 3"), SOURCE_OVERLOAD, strict=True):
            rows.append(["warm", f"{SOURCE}: {name}, 10 at once", *cells])
        columns = ("burst", "server", "accepted", "rejected", "P95 latency (ms)", "requests/s")
        return Table(f"Overload: {most} at once", columns, rows)

    def _scenario(self, scenario: str) -> Table:
        cells = [cell for cell in self.results.cells if cell.scenario == scenario]
        rows: list[list[TableCell]] = [
            [cell.concurrency, cell.contender, cell.accepted, cell.rejected, *_ms(cell.latency_s, "mean", "p95"),
             *_ms(cell.ttft_s, "mean", "p95"), *_ms(cell.wall_s, "mean"), _rate(cell),
             *_ms(cell.rejected_after_s, "mean"), f"{cell.cached_share:.0%}"]
            for cell in cells
        ]  # fmt: skip
        if scenario == "warm" and rows:
            for concurrency, (mean_ms, p95_ms, rate) in SOURCE_BURSTS_MS.items():
                rows.append([concurrency, SOURCE, "", "", mean_ms, p95_ms, "", "", "", f"{rate:.2f}", "", ""])
        columns = ["at once", "server", "accepted", "rejected", "latency mean (ms)", "P95", "TTFT mean", "P95"]
        columns += ["burst (ms)", "requests/s", "rejected after (ms)", "cached"]
        failed, bursts = sum(cell.failed for cell in cells), max((cell.repetitions for cell in cells), default=0)
        below = f"Counts are those of {bursts} burst{'s together' if bursts > 1 else ''}"
        below += f"; {failed} requests failed." if failed else "."
        return Table(TITLES[scenario].capitalize(), columns, rows, below=below)


def _ms(spread: Spread | None, *names: str) -> list[str]:
    return in_ms(spread, *names, digits=0)


def _rate(cell: Cell) -> str:
    return f"{cell.requests_per_s.mean:.2f}" if cell.requests_per_s is not None else ""
