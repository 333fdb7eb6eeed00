"""Bursts: requests that are all due at once, as in llm-serving-cache's validation.

========== ============================================================================
cold       all requests have one prompt, which the server has not seen before
warm       the cold burst again
shared     all begin with three quarters of that prompt, and end differently
unrelated  each has a prompt of its own
========== ============================================================================

``memserve bench concurrency``: latency, throughput and rejections of bursts, with and without a limit.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memserve.base.units import NS_PER_S
from memserve_lab.bench import metrics
from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import Labels, LoadRun, send
from memserve_lab.bench.load.prompts import Manner, Outcome, RecordWriter, RequestRecord
from memserve_lab.bench.metrics import Timing, timing
from memserve_lab.bench.report_writer import MS, Drawing, Table, draw_intervals, finish, in_ms
from memserve_lab.bench.report_writer import Cell as TableCell
from memserve_lab.bench.servers import Address, Servers
from memserve_lab.bench.settings import Setting
from memserve_lab.bench.study import RECORDS, RunFolder, Study, StudyResults, Tell
from memserve_lab.workloads.arrivals import draws, prose
from memserve_lab.workloads.records import Session, Text, Turn, Workload
from memserve_lab.workloads.statistics import Spread, spread

SCENARIOS = ("cold", "warm", "shared", "unrelated")
SHARED_SHARE = 0.75
SALT_BYTES = 6
REFUSED_STATUS = (429, 503)
"""HTTP statuses of a request that was not admitted."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An admission limit."""

    active_max: int
    queue: int = 0
    """Requests that may wait for admission."""

    @property
    def flags(self) -> tuple[str, ...]:
        """For ``memserve serve``."""
        flags = {"--admission": "bounded", "--max-active": self.active_max, "--admission-queue": self.queue}
        return tuple(str(part) for pair in flags.items() for part in pair)

    @property
    def text(self) -> str:
        """In words."""
        return f"at most {self.active_max} active requests, {self.queue or 'none'} may wait"


def contenders_of(setting: Setting, limit: Limit | None, other_settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """``setting`` without and with ``limit``, then ``others`` unchanged."""
    own_settings = [Setting(f"{setting.name}, no limit" if limit else setting.name, setting.flags, setting.instances)]
    if limit is not None:
        name = f"{setting.name}, limit {limit.active_max}"
        own_settings.append(Setting(name, (*setting.flags, *limit.flags), setting.instances))
    return (*own_settings, *other_settings)


@dataclass(frozen=True, slots=True)
class BurstPlan:
    """Bursts and their contenders."""

    contenders: tuple[Setting, ...]
    concurrencies: tuple[int, ...]
    repetitions: int
    prompt_words: int
    output_tokens: int
    serve_flags: tuple[str, ...] = ()
    ignore_eos: bool = True
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Story:
    """One burst of each scenario; equal arguments give equal prompts."""

    concurrency: int
    prompt_words: int
    """Every word is at least one token."""
    output_tokens: int
    seed: int
    turn: int
    """Number of the repetition: each has its own prompts."""

    def make_bursts(self) -> dict[str, Workload]:
        """Scenario -> requests that are all due at once, in the order of sending."""
        first = self._make_prose(self.prompt_words, "first")
        head_words = round(self.prompt_words * SHARED_SHARE)
        head = " ".join(first.split()[:head_words])
        count = range(self.concurrency)
        texts = {
            "cold": [first] * self.concurrency,
            "warm": [first] * self.concurrency,
            "shared": [f"{head} {self._make_prose(self.prompt_words - head_words, 'end', index)}" for index in count],
            "unrelated": [self._make_prose(self.prompt_words, "own", index) for index in count],
        }
        return {scenario: self._make_burst(scenario, texts[scenario]) for scenario in SCENARIOS}

    def _make_prose(self, words: int, *purpose: str | int) -> str:
        return prose(draws(self.seed, self.turn, self.concurrency, *purpose), words)

    def _make_burst(self, scenario: str, texts: list[str]) -> Workload:
        sessions = []
        for index, text in enumerate(texts):
            turns = (Turn(Text(text), self.output_tokens, due_s=0.0),)
            name = f"{scenario}-{self.turn}-{self.concurrency}-{index}"
            sessions.append(Session(name, turns, group=str(self.concurrency)))
        return Workload(scenario, "built-in", tuple(sessions), self.seed, "all at once")


# -- results


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one scenario at one concurrency on one contender, over all repetitions."""

    contender: str
    scenario: str
    concurrency: int
    repetitions: int
    accepted: int
    rejected: int
    failed: int
    """Requests that broke, timed out, or were refused for another reason than admission."""
    latency_s: Spread | None
    """Of accepted requests, as are the next two."""
    ttft_s: Spread | None
    decode_s: Spread | None
    """From the first token to the end."""
    wall_s: Spread | None
    """Of one burst, from its start to its last answer."""
    requests_per_s: Spread | None
    """Accepted requests a second, burst by burst."""
    rejected_after_s: Spread | None
    cached_share: float
    """Share of the accepted prompts' tokens."""
    intervals: dict[str, tuple[float, float]]
    """``latency p95``, ``rate mean``, ... -> 95 % confidence (bootstrap over repetitions), if there are several."""


def cell_of(contender: str, scenario: str, concurrency: int, bursts: Sequence[Sequence[RequestRecord]]) -> Cell:
    """Sum up ``bursts``: the records of each repetition."""
    records = [record for burst in bursts for record in burst]
    refused = [record for record in records if record.http_status in REFUSED_STATUS]
    accepted = [record for record in records if record.ok]
    felt = [[latency for record in burst if (latency := timing(record)) is not None] for burst in bursts]
    walls_s = [metrics.wall_seconds(burst) for burst in bursts]
    rates = [sum(record.ok for record in burst) / wall for burst, wall in zip(bursts, walls_s, strict=True) if wall]

    def by_burst(value: Callable[[Timing], float]) -> list[list[float]]:
        return [[value(latency) for latency in burst] for burst in felt]

    groups = {
        "latency": by_burst(lambda latency: latency.jct_s), "ttft": by_burst(lambda latency: latency.ttft_s),
        "decode": by_burst(lambda latency: latency.jct_s - latency.ttft_s),
        "wall": [[wall] for wall in walls_s], "rate": [[rate] for rate in rates],
    }  # fmt: skip
    latency_s, ttft_s, decode_s, wall_s, per_s = (spread(itertools.chain(*values)) for values in groups.values())
    statistics = [("latency", "mean"), ("latency", "p95"), ("ttft", "mean"), ("ttft", "p95"), ("rate", "mean")]
    intervals = {
        f"{name} {statistic}": metrics.bootstrap(groups[name], getattr(metrics, statistic))
        for name, statistic in statistics
    }
    waits_s = [((r.end_ns or r.scheduled_ns) - r.scheduled_ns) / NS_PER_S for r in refused]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in accepted)
    return Cell(
        contender, scenario, concurrency, len(bursts), len(accepted), len(refused),
        len(records) - len(accepted) - len(refused), latency_s, ttft_s, decode_s, wall_s, per_s, spread(waits_s),
        sum(record.cached_tokens or 0 for record in accepted) / prompt_tokens if prompt_tokens else 0.0,
        {name: interval for name, interval in intervals.items() if interval is not None},
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class BurstResults(StudyResults):
    """All cells of a run."""

    prompt_words: int
    output_tokens: int
    limit: str = ""
    """The admission limit in words. Empty: no contender has one."""
    prompt_tokens_mean: float = 0.0
    contenders: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.cells

    @property
    def measured(self) -> list[str]:
        """Contenders with a cell."""
        names = {cell.contender for cell in self.cells}
        return [name for name in self.contenders if name in names]


def sum_up(results: BurstResults, records: Sequence[RequestRecord]) -> None:
    """Fill the cells from ``records``, by concurrency and contender. Requests under way when the run ended do not
    count."""
    bursts: dict[tuple[str, str, int], dict[int, list[RequestRecord]]] = {}
    for record in records:
        if record.outcome is not Outcome.STOPPED:
            key = (record.setting, record.workload, int(record.group))
            bursts.setdefault(key, {}).setdefault(record.seed, []).append(record)
    results.cells = [cell_of(*key, list(by_turn.values())) for key, by_turn in bursts.items()]
    results.cells.sort(key=lambda cell: (cell.concurrency, results.contenders.index(cell.contender)))
    counted = spread(record.prompt_tokens for record in records if record.prompt_tokens)
    results.prompt_tokens_mean = counted.mean if counted is not None else 0.0


# -- sending


def send_bursts(plan: BurstPlan, writer: RecordWriter, results: BurstResults, tell: Tell) -> None:
    """Fill ``results``: the contenders take turns at every concurrency, repetition by repetition."""
    records: list[RequestRecord] = []
    results.contenders = [contender.name for contender in plan.contenders]
    try:
        with Servers(plan.serve_flags, tell) as servers:
            try:
                for run in _runs(plan, servers, writer, results, tell):
                    records += run.records
                    if run.partial is not None:
                        results.partial = run.partial
                        return
            finally:
                results.notes += servers.notes
    finally:
        sum_up(results, records)


def _runs(
    plan: BurstPlan, servers: Servers, writer: RecordWriter, results: BurstResults, tell: Tell
) -> Iterator[LoadRun]:
    salt = secrets.token_hex(SALT_BYTES)
    for turn in range(plan.repetitions):
        for number, concurrency in enumerate(plan.concurrencies):
            story = Story(concurrency, plan.prompt_words, plan.output_tokens, plan.seed, turn)
            by = (turn + number) % len(plan.contenders)
            for contender in (*plan.contenders[by:], *plan.contenders[:by]):
                address = servers.address_of(contender, results.contenders)
                if address.model not in results.models:
                    results.models.append(address.model)
                for scenario, burst in story.make_bursts().items():
                    labels = Labels(contender.name, scenario, turn)
                    yield _sent(plan, burst, address, labels, f"{salt}-{turn}-{concurrency}/", writer)
            tell(f"{turn + 1}/{plan.repetitions}: {concurrency} at once")


def _sent(
    plan: BurstPlan, burst: Workload, address: Address, labels: Labels, salt: str, writer: RecordWriter
) -> LoadRun:
    manner = Manner(address.model, ignore_eos=plan.ignore_eos, name_sessions=False, salt=salt)
    return send(burst, Target(address.url, timeout_s=plan.timeout_s), manner, labels, writer=writer)


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
                    line_label = f"{contender}: {statistic.replace('p95', 'P95')}" if len(statistics) > 1 else contender
                    points = {cell.concurrency: _interval(cell, value(cell), name, statistic) for cell in cells}
                    points_measured = {place: point for place, point in points.items() if point is not None}
                    draw_intervals(axes, points_measured, line_label, unit, color=f"C{number}", linestyle=style)
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


def _interval(cell: Cell, values: Spread | None, name: str, statistic: str) -> tuple[float, float, float] | None:
    """Value, low end and high end."""
    if values is None:
        return None
    value: float = getattr(values, statistic)
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
        cell_by_place = {
            place + (number - (len(contenders) - 1) / 2) * width: cells[contender, name]
            for place, name in enumerate(SCENARIOS)
            if (contender, name) in cells
        }
        served = [cell.accepted / cell.repetitions for cell in cell_by_place.values()]
        refused = [cell.rejected / cell.repetitions for cell in cell_by_place.values()]
        counts.bar(list(cell_by_place), served, width, color=f"C{number}", label=f"{contender}: accepted")
        hatched = {"alpha": 0.35, "hatch": "//", "edgecolor": "white", "label": f"{contender}: rejected"}
        counts.bar(list(cell_by_place), refused, width, served, color=f"C{number}", **hatched)
        intervals = {place: _interval(cell, cell.latency_s, "latency", "p95") for place, cell in cell_by_place.items()}
        intervals_known = {place: point for place, point in intervals.items() if point is not None}
        values = [MS * value for value, _, _ in intervals_known.values()]
        tail.bar(list(intervals_known), values, width, color=f"C{number}", label=contender)
        draw_intervals(tail, intervals_known, "", 1 / MS, color="black", linestyle="none", marker="")
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

    def fill_results(self, tell: Tell) -> None:
        send_bursts(self._plan, self._folder.writer, self.results, tell)

    def head_lines(self) -> Iterator[str]:
        results = self.results
        yield f"* prompts of {results.prompt_tokens_mean:.0f} tokens on average, answers of {results.output_tokens}"
        yield "* the requests of a burst are all due at the same moment, and latency counts from it"
        if results.limit:
            yield f"* the limit: {results.limit}; rejections are immediate, and count in no latency"

    def make_tables(self) -> Iterator[Table]:
        yield self._alone_table()
        if len(self.results.measured) > 1:
            yield self._overload_table()
        for scenario in SCENARIOS:
            yield self._scenario_table(scenario)
        yield Table("", about=f"Every request is in `{RECORDS}`.")

    def _alone_table(self) -> Table:
        """One request at a time: where its time goes."""
        rows: list[list[TableCell]] = []
        for cell in self.results.cells:
            if cell.concurrency == 1 and cell.contender == self.results.measured[0]:
                total_ms, prompt_ms = SOURCE_ALONE_MS[cell.scenario]
                times = [*_ms(cell.latency_s, "mean"), *_ms(cell.ttft_s, "mean"), *_ms(cell.decode_s, "mean")]
                rows.append([cell.scenario, *times, f"{cell.cached_share:.0%}", f"{total_ms} / {prompt_ms}"])
        columns = ["burst", "latency (ms)", "to the first token (ms)", "decode (ms)", "cached"]
        return Table("One request at a time", [*columns, f"{SOURCE}: latency / prompt evaluation (ms)"], rows)

    def _overload_table(self) -> Table:
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

    def _scenario_table(self, scenario: str) -> Table:
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
