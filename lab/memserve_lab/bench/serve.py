"""``memserve bench serve``: settings side by side. ``memserve sim run`` writes the same report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memserve.base.types import TransferPolicy
from memserve_lab.bench.campaign import Measured, Plan, Workloads, measure
from memserve_lab.bench.metrics import Figures
from memserve_lab.bench.report_writer import (
    MS,
    Cell,
    Drawing,
    Table,
    draw_intervals,
    in_ms,
    legend_beside,
    plain_log_axis,
)
from memserve_lab.bench.results import Found, Label, Results, Shape, describe, describe_slo, shapes_of
from memserve_lab.bench.study import RECORDS, RESULTS, RunFolder, Study, Tell
from memserve_lab.experiments.memserve_paper import beside_the_paper, compare

AXES = {"ttft": "time to first token (ms)", "jct": "job completion time (ms)", "tpot": "time per output token (ms)"}
LINE_STYLES = ("-", "--", "-.", ":")
TURN_SHIFT = 0.04
"""Points are shifted sideways, so that error bars do not overlap."""
TURN_REQUESTS_MIN = 3
"""A turn reached by fewer requests is not drawn."""
TRANSFER_MODES = tuple(f"/{mode}" for mode in TransferPolicy)
"""Suffixes of the settings of figure 12."""
CONFIDENCE = "95 % confidence (bootstrap over sessions)"


def _subject(results: Results) -> str:
    """What was measured and where, for titles: plots are viewed without their page."""
    machine = results.machine
    if machine.get("simulated"):
        return f"simulated: {machine['simulated']}"
    machine_text = f"{machine['processor']}, {machine['cores']} cores" if machine.get("processor") else ""
    return " on ".join(part for part in (", ".join(results.models), machine_text) if part)


# -- figure 7: what is sent


def _workloads(pyplot: Any, results: Results) -> Any | None:
    return draw_shapes(pyplot, results.shapes)


def draw_shapes(pyplot: Any, shapes: Sequence[Shape]) -> Any | None:
    """Distributions of lengths, shared prefixes and turns, one line per workload. None: there is no workload."""
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
    """Color and line style of each: ``chat, from here`` and ``chat, from there`` share a color; all others differ."""
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


# -- figures 8 and 12: over the request rate; at one rate, bars


def _end_to_end(pyplot: Any, results: Results) -> Any | None:
    members = [row for row in results.found if not row.setting.endswith(TRANSFER_MODES)]
    return _over_rates(pyplot, results, members, "Settings over the request rate")


def _transfer(pyplot: Any, results: Results) -> Any | None:
    members = [row for row in results.found if row.setting.endswith(TRANSFER_MODES)]
    return _over_rates(pyplot, results, members, "Transfer modes over the request rate")


def _over_rates(pyplot: Any, results: Results, members: Sequence[Found], title: str) -> Any | None:
    """TTFT, JCT and TPOT, mean and P99, one line per setting; a row of panels per workload. None: one rate only."""
    groups: dict[str, list[Found]] = {}
    for entry in members:
        if entry.label.rate is not None:
            groups.setdefault(str(Label(entry.label.kind, entry.label.ratio)), []).append(entry)
    names = [name for name, rows in groups.items() if len({row.label.rate for row in rows}) > 1]
    if not names:
        return None
    size = (19, 3.6 * len(names) + 1.2)
    figure, grid = pyplot.subplots(len(names), 3, figsize=size, squeeze=False, layout="constrained")
    for row, name in zip(grid, names, strict=True):
        members, rates = groups[name], sorted({row.label.rate or 0.0 for row in groups[name]})
        for axes, (quantity, unit) in zip(row, AXES.items(), strict=True):
            for number, setting in enumerate(dict.fromkeys(row.setting for row in members)):
                for statistic, style in (("mean", "-"), ("p99", "--")):
                    row_by_rate = {f.label.rate or 0.0: f for f in members if f.setting == setting}
                    label = f"{setting}: {statistic.replace('p99', 'P99')}"
                    _line(axes, row_by_rate, f"{quantity} {statistic}", label, color=f"C{number}", linestyle=style)
            axes.set(title=name, xlabel="request rate (requests/s, all instances)", ylabel=unit)
            if quantity == "tpot":
                axes.set_ylim(0, None)
            else:  # a growing queue makes times a hundred times longer
                axes.set_yscale("log")
                plain_log_axis(axes.yaxis)
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.grid(alpha=0.3)
        legend_beside(row[2])
    figure.suptitle(f"{title}: {_subject(results)}\nbars: {CONFIDENCE}")
    return figure


def _line(axes: Any, rows_by_place: dict[float, Found], name: str, label: str, **style: Any) -> None:
    """``name`` (``ttft mean``) over the keys of ``found``, with its confidence intervals."""
    points = {}
    for place, row in sorted(rows_by_place.items()):
        value = row.value_of(name)
        if value is not None:
            points[place] = (value, *row.intervals.get(name, (value, value)))
    draw_intervals(axes, points, label, 1 / MS, **style)


def _bars(pyplot: Any, results: Results) -> Any | None:
    """TTFT, JCT and TPOT of every setting on every workload at one rate."""
    workloads = _names(results)
    if not workloads:
        return None
    most = max(len(_members(results, workload)) for workload in workloads)
    size = (max(4.0, 0.75 * most + 1.5) * 3, 3.2 * len(workloads) + 1.0)
    figure, grid = pyplot.subplots(len(workloads), 3, figsize=size, squeeze=False, layout="constrained")
    for row, workload in zip(grid, workloads, strict=True):
        members = _members(results, workload)
        for axes, (quantity, label) in zip(row, AXES.items(), strict=True):
            for place, entry in enumerate(members):
                _pair_of_bars(axes, place, entry, quantity)
            names = [row.setting for row in members]
            axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=9)
            axes.set(title=f"{workload}, {members[0].figures.requests} requests each", ylabel=label)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color="C0"), pyplot.Rectangle((0, 0), 1, 1, color="C1")]
    figure.legend(handles, ["mean", "P99"], loc="outside lower center", ncols=2)
    figure.suptitle(f"Settings side by side: {_subject(results)}\nblack lines: {CONFIDENCE}")
    return figure


def _names(results: Results) -> list[str]:
    """Workloads with one share ratio and one rate."""
    plain = [row.workload for row in results.found if row.label == Label(row.label.kind)]
    return list(dict.fromkeys(plain))


def _members(results: Results, workload: str) -> list[Found]:
    return [row for row in results.found if row.workload == workload]


def _pair_of_bars(axes: Any, place: int, row: Found, quantity: str) -> None:
    for offset, statistic, color in ((-0.2, "mean", "C0"), (0.2, "p99", "C1")):
        value = row.value_of(f"{quantity} {statistic}")
        if value is not None:
            axes.bar(place + offset, value * MS, width=0.38, color=color)
            if (interval := row.intervals.get(f"{quantity} {statistic}")) is not None:
                point = {place + offset: (value, *interval)}
                draw_intervals(axes, point, "", 1 / MS, color="black", marker="", linewidth=1)


# -- over turns, and figure 14


def _turns(pyplot: Any, results: Results) -> Any | None:
    workloads = [w for w in _names(results) if any(len(_turns_of(row)) > 1 for row in _members(results, w))]
    if not workloads:
        return None
    size = (13, 3.6 * len(workloads) + 0.8)
    figure, grid = pyplot.subplots(len(workloads), 2, figsize=size, squeeze=False, layout="constrained")
    for row, workload in zip(grid, workloads, strict=True):
        members = _members(results, workload)
        for axes, quantity in zip(row, ("ttft", "jct"), strict=True):
            for number, entry in enumerate(members):
                _line_over_turns(axes, entry, quantity, TURN_SHIFT * (number - (len(members) - 1) / 2))
            axes.set(title=workload, xlabel="turn of the session", ylabel=f"mean {AXES[quantity]}", ylim=(0, None))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        legend_beside(row[1], "setting")
    figure.suptitle(f"Over the turns of a session: {_subject(results)}\nbars: standard error of the mean")
    return figure


def _turns_of(row: Found) -> dict[int, Figures]:
    return {turn: figures for turn, figures in row.turns.items() if figures.requests >= TURN_REQUESTS_MIN}


def _line_over_turns(axes: Any, row: Found, quantity: str, shift: float) -> None:
    turns = {t: s for t, f in _turns_of(row).items() if (s := getattr(f, f"{quantity}_s")) is not None}
    points = {
        turn + 1 + shift: (s.mean, s.mean - s.standard_error, s.mean + s.standard_error) for turn, s in turns.items()
    }
    draw_intervals(axes, points, row.setting, 1 / MS)


def _share_ratio(pyplot: Any, results: Results) -> Any | None:
    """Settings (policies) over the share ratio."""
    ratios: dict[str, set[float]] = {}
    for entry in results.found:
        label = entry.label
        if label.ratio is not None and label.rate is None:
            ratios.setdefault(label.kind, set()).add(label.ratio)
    kinds = [kind for kind, values in ratios.items() if len(values) > 1]
    if not kinds:
        return None
    figure, grid = pyplot.subplots(len(kinds), 2, figsize=(11, 3.8 * len(kinds)), squeeze=False, layout="constrained")
    for row, kind in zip(grid, kinds, strict=True):
        members = [f for f in results.found if f.label.kind == kind and f.label.ratio and f.label.rate is None]
        for axes, statistic in zip(row, ("mean", "p99"), strict=True):
            for setting in dict.fromkeys(row.setting for row in members):
                row_by_ratio = {f.label.ratio or 0.0: f for f in members if f.setting == setting}
                _line(axes, row_by_ratio, f"ttft {statistic}", setting)
            axes.set(title=kind, xlabel="share ratio (copies of each session)", ylim=(0, None))
            axes.set_ylabel(f"{statistic.replace('p99', 'P99')} {AXES['ttft']}")
            axes.set_xticks(sorted(ratios[kind]))
            axes.grid(alpha=0.3)
        legend_beside(row[1], "setting")
    figure.suptitle(f"Policies over the share ratio: {_subject(results)}\nbars: {CONFIDENCE}")
    return figure


DRAWINGS = {
    "figure-7": Drawing("What was sent (the form of MemServe's figure 7).", _workloads),
    "figure-8": Drawing("Settings over the request rate (the form of figure 8).", _end_to_end),
    "settings": Drawing("Settings at one rate (a column of points of figure 8; `--rate 1,2,4` draws all).", _bars),
    "turns": Drawing("Over the turns of a session (section 5.1; the paper has no figure for it).", _turns),
    "figure-12": Drawing("Transfer modes over the request rate (the form of figure 12).", _transfer),
    "figure-14": Drawing("Over the share ratio (the form of figure 14).", _share_ratio),
}


# -- the report


class ServeReport(Study[Results]):
    """Tables and plots of existing results."""

    title = "memserve bench serve"
    draws_requests = True
    drawings = DRAWINGS

    def fill_results(self, tell: Tell) -> None:
        """There is nothing to measure."""

    def terminal_lines(self) -> Iterator[str]:
        yield from describe(self.results)

    def head_lines(self) -> Iterator[str]:
        yield f"* SLO: {describe_slo(self.results.slo)}"
        yield "* latency counts from the moment at which the request was due"

    def make_tables(self) -> Iterator[Table]:
        groups: dict[str, list[Found]] = {}
        for row in self.results.found:
            groups.setdefault(str(Label(row.label.kind, row.label.ratio)), []).append(row)
        for name, members in groups.items():
            yield _table(name, members)
        yield from beside_the_paper(self.results)
        rows: list[list[Cell]] = [
            [
                load_pass.workload,
                load_pass.setting,
                load_pass.seed,
                load_pass.planned,
                f"{load_pass.wall_s:.1f}",
                load_pass.partial or "",
            ]
            for load_pass in self.results.passes
        ]
        yield Table("Passes", ("workload", "setting", "seed", "planned requests", "seconds", ""), rows)
        yield Table("", about=f"Every request is in `{RECORDS}`, every figure in `{RESULTS}`.")


def _table(name: str, members: Sequence[Found]) -> Table:
    """One workload; a row per setting and rate."""
    names = "setting, rate, requests, failed, TTFT mean, P50, P99, TPOT mean, P99, JCT mean, P99, tokens/s, goodput /s"
    columns = f"{names}, SLO missed, cached, fetched, client late P50".split(", ")
    rows: list[list[Cell]] = []
    below = """
Times in milliseconds; cached, fetched: shares of the prompt tokens, as reported; fetched: of the cached ones,
those that came from another instance."""
    for entry in members:
        f, rate = entry.figures, entry.label.rate
        row: list[Cell] = [entry.setting, "" if rate is None else f"{rate:g}", f.requests, f.failed]
        row += in_ms(f.ttft_s, "mean", "p50", "p99")
        row += [*in_ms(f.tpot_s, "mean", "p99"), *in_ms(f.jct_s, "mean", "p99"), f"{f.output_tokens_per_s:.1f}"]
        row += [f"{f.goodput_per_s:.2f}", f"{f.slo_violations:.0%}", f"{f.cached_share:.0%}", f"{f.fetched_share:.0%}"]
        rows.append([*row, *in_ms(f.late_s, "p50")])
        if f.errors:
            errors_text = ", ".join(f"{count} {error}" for error, count in f.errors.items())
            below += f"\n\n{entry.setting}{'' if rate is None else f' at {rate:g}/s'}: {errors_text}."
    if all(row.label.rate is None for row in members):
        columns, rows = _without(columns, 1), [_without(row, 1) for row in rows]
    return Table(name, columns, rows, below=below)


def _without(cells: list[Any], place: int) -> list[Any]:
    return cells[:place] + cells[place + 1 :]


class ServeStudy(ServeReport):
    """Carries out a plan."""

    def __init__(self, plan: Plan, workloads: Workloads, folder: RunFolder, results: Results) -> None:
        super().__init__(results)
        self._plan, self._workloads, self._folder = plan, workloads, folder

    def fill_results(self, tell: Tell) -> None:
        measured, results = Measured(), self.results
        try:
            measure(self._plan, self._workloads, self._folder, tell, measured)
        finally:
            results.shapes = shapes_of(self._workloads, self._plan.meter)
            results.notes, results.models = list(dict.fromkeys(measured.notes)), measured.models
            results.add_records(measured.records, measured.passes)
            compare(results, measured.records)
