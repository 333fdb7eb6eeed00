"""The study of ``memserve sim memserve``: its figures one after the other, their tables and plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memserve.base.errors import UserError
from memserve_lab.bench.metrics import Slo
from memserve_lab.bench.report_writer import MS, Cell, Drawing, Table, plain_log_axis
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.experiments.evaluations.memserve import (
    CHAT,
    DOCUMENTS,
    LONG,
    PREFILL_FIRST,
    REACT,
    SHARE_SESSIONS,
    UNIFORM,
    Contender,
    GoodputPoint,
    Load,
    MemservePlan,
    RunPoint,
    contender,
    measure_goodputs,
    measure_point,
)

FIGURES = ("8", "12", "14", "goodput")
SETTINGS = {
    "8": f"3PD/{PREFILL_FIRST},3PD,3PD-CC,1P2D,2P1D,1P2D-CC,2P1D-CC",
    "12": "1P1D/by-layer,1P1D/by-request,1P1D/by-request-agg,1P1D/auto",
    "14": "3P1D-CC/least-load/no-fetch,3P1D-CC/session/no-fetch,3P1D-CC/prompt-tree/no-fetch,3P1D-CC/session,"
    "3P1D-CC/prompt-tree,3P1D-CC/cost",
    "goodput": f"3PD/{PREFILL_FIRST},3PD,3PD/chunk-512,1P2D,2P1D",
}
"""Of each figure, where none are named."""
RATES = {
    CHAT: (4.0, 8.0, 12.0, 16.0), DOCUMENTS: (4.0, 8.0, 12.0, 16.0), REACT: (6.0, 12.0, 18.0, 24.0),
    UNIFORM: (4.0, 8.0, 12.0, 16.0), LONG: (1.0,),
}  # fmt: skip
"""Requests a second for each instance, where none are named."""
SHARE_RATE = 8.0
"""Of figure 14."""
PAPER = {
    "8": "The paper's figure 8, disaggregation over PD, the baseline (vLLM 0.4.0: prefill-first): JCT mean and P99 -30 "
    "and -42 % (chats, 1P2D), -10.3 and -10.8 % (LooGLE), -40.8 and -53.1 % (ReAct). Caching on top: JCT -17 and "
    "-29 %, TTFT -58 and -45 % (chats); -26.9, -22.5, -56.2, -45.2 % (LooGLE); -26.7, -21.4, -78.5, -84.9 % (ReAct).",
    "12": "The paper's figure 12: aggregated blocks are best; layer by layer is quickest at low load (5.2).",
    "14": "The paper's figure 14, P99 TTFT: prompt tree 59 % below session. Its instances fetch no prefix from each "
    "other (no-fetch); ours do.",
    "goodput": "DistServe's capacity: requests a second for each instance with nine of ten within both objectives.",
}


@dataclass(slots=True, kw_only=True)
class MemserveResults(StudyResults):
    """All points."""

    points: list[RunPoint] = field(default_factory=list)
    goodputs: list[GoodputPoint] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.points or self.goodputs)

    def points_of(self, figure: str, workload: str, setting: str = "") -> list[RunPoint]:
        """Those of one figure and workload, of one setting or all."""
        return [
            point
            for point in self.points
            if (point.figure, point.workload) == (figure, workload) and setting in ("", point.setting)
        ]


class MemserveStudy(Study[MemserveResults]):
    """Times by rate and setting, and the rates within objectives."""

    title = "memserve sim memserve"

    def __init__(self, plan: MemservePlan, results: MemserveResults) -> None:
        super().__init__(results)
        self._plan = plan
        self.drawings = dict(self._make_drawings())

    def _make_drawings(self) -> Iterator[tuple[str, Drawing]]:
        for figure, kind in self._parts():
            name = f"figure-{figure}-{kind}"
            if figure == "goodput":
                yield f"goodput-{kind}", Drawing(f"Goodput, {kind}. Simulated.", _draw_goodput(kind))
            else:
                yield name, Drawing(f"Figure {figure}, {kind}. Simulated.", _draw_lines(figure, kind))

    def _parts(self) -> Iterator[tuple[str, str]]:
        """Figures, and the workloads of each."""
        fixed = {"12": (UNIFORM,), "14": (DOCUMENTS,)}
        for figure in self._plan.figures:
            for kind in fixed.get(figure, self._plan.workloads):
                yield figure, kind

    def _settings(self, figure: str) -> Sequence[Contender]:
        return self._plan.settings or [contender(name) for name in SETTINGS[figure].split(",")]

    # -- measuring

    def fill_results(self, tell: Tell) -> None:
        for figure, kind in self._parts():
            for entry in self._settings(figure):
                if figure == "goodput":
                    self._search(kind, entry, tell)
                else:
                    self._sweep(figure, kind, entry, tell)

    def _search(self, kind: str, entry: Contender, tell: Tell) -> None:
        plan = self._plan
        load = Load(kind, plan.seconds, seed=plan.seed, data=plan.data)
        slos = [Slo(plan.ttft_s, tpot_s) for tpot_s in plan.tpots_s]
        for point in measure_goodputs(plan.machine, entry, load, slos, (plan.rates or RATES[kind])[0]):
            self.results.goodputs.append(point)
            tell(f"{kind}, TPOT {MS * point.tpot_s:g} ms, {entry.name}: {point.rate:.2f} requests/s for each instance")

    def _sweep(self, figure: str, kind: str, entry: Contender, tell: Tell) -> None:
        plan, slo = self._plan, Slo(self._plan.ttft_s, max(self._plan.tpots_s, default=None))
        load = Load(kind, plan.seconds, seed=plan.seed, data=plan.data)
        if figure == "14":
            rate = plan.rates[0] if plan.rates else SHARE_RATE
            shared = dataclasses.replace(load, sessions=SHARE_SESSIONS)
            cases = [(ratio, rate, dataclasses.replace(shared, share_ratio=ratio)) for ratio in plan.share_ratios]
        else:
            cases = [(rate, rate, load) for rate in plan.rates or RATES[kind]]
        for place, rate, case in cases:
            point = measure_point(figure, plan.machine, entry, case, place, rate, slo)
            self.results.points.append(point)
            tell(
                f"figure {figure}, {kind} at {place:g}, {entry.name}: JCT {MS * point.jct_mean_s:.0f} ms,"
                f" TTFT {MS * point.ttft_mean_s:.0f} ms"
            )

    # -- tables

    def make_tables(self) -> Iterator[Table]:
        for figure, kind in self._parts():
            if figure == "goodput":
                yield self._goodput_table(kind)
                continue
            yield self._times_table(figure, kind)

    def _times_table(self, figure: str, kind: str) -> Table:
        columns = (
            "share ratio" if figure == "14" else "requests/s an instance", "setting", "JCT mean (ms)", "P99",
            "TTFT mean (ms)", "P99", "TPOT mean (ms)", "P99", "gap P99 (ms)", "cached", "busy", "to the first: JCT",
            "P99", "TTFT", "P99",
        )  # fmt: skip
        rows = [row for point in self.results.points_of(figure, kind) for row in [self._row_of(point)]]
        rows.sort(key=lambda row: float(row[0]))
        title = f"Figure {figure}: {kind} on {self._plan.machine.name} (simulated: a roofline, not measured)"
        return Table(title, columns, rows, about=PAPER[figure])

    def _row_of(self, point: RunPoint) -> list[Cell]:
        first = next(p for p in self.results.points_of(point.figure, point.workload) if p.at == point.at)
        return [
            f"{point.at:g}", point.setting, *(f"{MS * value:.0f}" for value in (
                point.jct_mean_s, point.jct_p99_s, point.ttft_mean_s, point.ttft_p99_s)),
            *(f"{MS * value:.1f}" for value in (point.tpot_mean_s, point.tpot_p99_s, point.gap_p99_s)),
            f"{point.cached_share:.0%}", f"{point.busy_share:.0%}",
            *(f"{getattr(point, name) / getattr(first, name) - 1:+.0%}" for name in (
                "jct_mean_s", "jct_p99_s", "ttft_mean_s", "ttft_p99_s")),
        ]  # fmt: skip

    def _goodput_table(self, kind: str) -> Table:
        points = [point for point in self.results.goodputs if point.workload == kind]
        tpots = list(dict.fromkeys(point.tpot_s for point in points))
        rows: list[list[Cell]] = []
        for name in dict.fromkeys(point.setting for point in points):
            rates = {point.tpot_s: point.rate for point in points if point.setting == name}
            rows.append([name, *(f"{rates[tpot]:.2f}" if tpot in rates else "" for tpot in tpots)])
        title = f"Goodput: {kind} on {self._plan.machine.name}, TTFT {MS * self._plan.ttft_s:g} ms (simulated)"
        return Table(title, ("setting", *(f"TPOT {MS * tpot:g} ms" for tpot in tpots)), rows, about=PAPER["goodput"])

    def terminal_lines(self) -> Iterator[str]:
        for table in self.make_tables():
            yield from table.terminal_lines()


# -- plots


def _draw_lines(figure: str, kind: str) -> Any:
    """JCT, TTFT, and TPOT with the longest gaps, over the axis; dotted: P99."""

    def draw(pyplot: Any, results: MemserveResults) -> Any:
        canvas, panels = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
        columns = (("jct_mean_s", "jct_p99_s"), ("ttft_mean_s", "ttft_p99_s"), ("tpot_mean_s", "gap_p99_s"))
        for number, name in enumerate(dict.fromkeys(point.setting for point in results.points_of(figure, kind))):
            points = sorted(results.points_of(figure, kind, name), key=lambda point: point.at)
            places, color = [point.at for point in points], f"C{number}"
            for axes, (mean, worst) in zip(panels, columns, strict=True):
                values = ([MS * getattr(point, field_name) for point in points] for field_name in (mean, worst))
                axes.plot(places, next(values), marker="o", color=color, label=name)
                axes.plot(places, next(values), linestyle=":", color=color)
        titles = "JCT: mean, P99 dotted (ms)", "TTFT: mean, P99 dotted (ms)", "TPOT mean; P99 gap of tokens dotted (ms)"
        for axes, title in zip(panels, titles, strict=True):
            xlabel = "share ratio" if figure == "14" else "requests/s an instance"
            axes.set(title=title, yscale="log", xlabel=xlabel)
            plain_log_axis(axes.yaxis)
            axes.grid(alpha=0.3)
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
        canvas.suptitle(f"Figure {figure}: {kind}, simulated")
        return canvas

    return draw


def _draw_goodput(kind: str) -> Any:
    def draw(pyplot: Any, results: MemserveResults) -> Any:
        points = [point for point in results.goodputs if point.workload == kind]
        if not points:
            return None
        canvas, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
        for name in dict.fromkeys(point.setting for point in points):
            line = sorted((point.tpot_s, point.rate) for point in points if point.setting == name)
            axes.plot([MS * tpot for tpot, _ in line], [rate for _, rate in line], marker="o", label=name)
        axes.set(xlabel="objective: TPOT (ms)", ylabel="requests/s an instance", ylim=(0, None), xscale="log")
        plain_log_axis(axes.xaxis, sorted({MS * point.tpot_s for point in points}))
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
        canvas.suptitle(f"Goodput: {kind}, nine of ten requests within objectives, simulated")
        return canvas

    return draw


def figures_named(text: str) -> tuple[str, ...]:
    """Comma-separated :data:`FIGURES`. Raises :class:`UserError`."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in FIGURES]:
        raise UserError(f"unknown figure {unknown[0]!r}", hint=f"some of {', '.join(FIGURES)}")
    return names


def workloads_named(text: str) -> tuple[str, ...]:
    """Comma-separated workloads. Raises :class:`UserError`."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in RATES]:
        raise UserError(f"unknown workload {unknown[0]!r}", hint=f"some of {', '.join(RATES)}")
    return names
