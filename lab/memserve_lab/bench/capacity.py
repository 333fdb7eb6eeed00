"""``memserve bench capacity``: by bisection, the largest rate that a setting sustains."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memserve.base.errors import UserError
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import INTERRUPTED, Labels, send
from memserve_lab.bench.load.prompts import Manner, RecordWriter, RequestRecord
from memserve_lab.bench.metrics import Figures, Slo, figures
from memserve_lab.bench.report_writer import MS, Cell, Drawing, Table, in_ms
from memserve_lab.bench.results import Label, describe_slo
from memserve_lab.bench.servers import Servers
from memserve_lab.bench.settings import Setting
from memserve_lab.bench.study import RunFolder, Study, StudyResults, Tell
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.tokens import Meter

GROWTH_MAX, SPARE_REQUESTS = 1.3, 2.0
"""A queue is bounded when its last third is on average at most 1.3 times as long as its middle third, plus 2 requests.
The last third of a queue that grows steadily is 5/3 as long."""
STEPS_MAX = 24
SAMPLE_SESSIONS = 20
SALT_BYTES = 6
NO_MODEL = Manner("")
OVERTIME = 3.0
"""A probe is given up if its queue has not drained within this many times ``probe_s`` after the last arrival."""


@dataclass(frozen=True, slots=True)
class Search:
    """The options of a search. Every rate gets its own sample, so none finds the cache of the rate before."""

    recipe: Recipe
    slo: Slo
    violations_max: float = 0.01
    start: float = 1.0
    precision: float = 0.1
    probe_s: float = 30.0
    """How long requests arrive at each rate."""
    serve_flags: tuple[str, ...] = ()
    manner: Manner = NO_MODEL
    """The meter of the server's model."""
    meter: Meter | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """The trial of one rate."""

    rate: float
    figures: Figures
    backlog_middle: float
    """Requests that had arrived and not ended, on average over the arrivals of the middle third."""
    backlog_last: float
    borne: bool
    why: str
    """Why the rate was not sustained. Empty: it was."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The result of the search of one setting."""

    setting: str
    rate: float | None
    """The largest sustained rate. None: no rate was sustained."""
    probes: tuple[Probe, ...]
    partial: str | None = None


# -- one rate


def judge(rate: float, records: Sequence[RequestRecord], slo: Slo, violations_max: float) -> Probe:
    """Whether ``rate`` was sustained: a bounded backlog, and at most ``violations_max`` of the requests miss
    ``slo``."""
    summary = figures(records, slo=slo)
    middle, last = _thirds(backlog(records))
    why = []
    if last > GROWTH_MAX * middle + SPARE_REQUESTS:
        why.append(f"the queue grows: {middle:.1f}, then {last:.1f} requests")
    if summary.slo_violations > violations_max:
        why.append(f"{summary.slo_violations:.1%} of the requests miss the SLO")
    return Probe(rate, summary, middle, last, not why, "; ".join(why))


def backlog(records: Sequence[RequestRecord]) -> list[int]:
    """For every arrival, in order: the number of earlier requests that have not ended."""
    came = sorted(record.scheduled_ns for record in records)
    end_times_ns = sorted(record.end_ns for record in records if record.end_ns is not None)
    count_ended, counts = 0, []
    for number, now_ns in enumerate(came):
        while count_ended < len(end_times_ns) and end_times_ns[count_ended] <= now_ns:
            count_ended += 1
        counts.append(number - count_ended)
    return counts


def _thirds(counts: Sequence[int]) -> tuple[float, float]:
    """Means of the middle and of the last third."""
    third = max(1, len(counts) // 3)
    middle, last = counts[third : 2 * third], counts[-third:]
    return sum(middle) / max(1, len(middle)), sum(last) / max(1, len(last))


def workload_at(plan: Search, rate: float, seed: int) -> Workload:
    """About ``probe_s`` seconds of requests at ``rate``."""
    sample = build(replace(plan.recipe, sessions=SAMPLE_SESSIONS, seed=seed), plan.meter)
    turns_mean = sample.request_count / len(sample.sessions)
    sessions = max(2, math.ceil(rate * plan.probe_s / turns_mean))
    timed = replace(plan.recipe, sessions=sessions, seed=seed, arrivals=Arrivals.POISSON, requests_per_s=rate)
    return build(timed, plan.meter)


def last_due_s(workload: Workload) -> float:
    """When the last request is due; at low rates later than ``probe_s``, because a workload has at least two
    sessions."""
    return max(turn.due_s or 0.0 for session in workload.sessions for turn in session.turns)


# -- the search


def search(
    setting: str,
    try_rate: Callable[[float], Probe | None],
    *,
    start: float,
    precision: float = 0.1,
    lowest: float = 0.0,
) -> Capacity:
    """Double (or halve) the rate from ``start`` until one is sustained and one is not, then bisect, down to
    ``precision`` of the rate; nothing below ``lowest`` is tried. ``try_rate`` returns None to end the search."""
    probes: list[Probe] = []
    low: float | None = None
    high: float | None = None
    rate = start
    for _ in range(STEPS_MAX):
        probe = try_rate(rate)
        if probe is None:
            return Capacity(setting, low, tuple(probes), "the search was ended early")
        probes.append(probe)
        if probe.borne:
            low = rate if low is None else max(low, rate)
        else:
            high = rate if high is None else min(high, rate)
        if low is not None and high is not None and high - low <= precision * high:
            break
        rate = _next_rate(low, high)
        if rate < lowest:
            break
    return Capacity(setting, low, tuple(probes))


def _next_rate(low: float | None, high: float | None) -> float:
    if low is None:
        assert high is not None, "something was tried"
        return high / 2
    return low * 2 if high is None else (low + high) / 2


def search_capacity(plan: Search, setting: Setting, writer: RecordWriter, tell: Tell) -> Capacity:
    """The capacity of one setting, on one server from the first rate to the last."""
    seeds, salt = itertools.count(plan.recipe.seed), secrets.token_hex(SALT_BYTES)
    notes: list[str] = []
    with Servers(plan.serve_flags, tell) as servers:
        address = servers.address_of(setting)

        def try_rate(rate: float) -> Probe | None:
            seed = next(seeds)
            workload = workload_at(plan, rate, seed)
            labels = Labels(setting.name, str(Label(plan.recipe.kind, rate=rate)), seed)
            manner = replace(plan.manner, model=address.model, salt=f"{salt}-{seed}-")
            limit_s = last_due_s(workload) + OVERTIME * plan.probe_s
            run = send(workload, Target(address.url), manner, labels, writer=writer, limit_s=limit_s)
            if run.partial is not None and not run.partial.startswith("time is up"):
                notes.append(run.partial)
                return None
            probe = judge(rate, run.records, plan.slo, plan.violations_max)
            if run.partial is not None:
                probe = replace(probe, borne=False, why=f"the queue did not drain in {limit_s:.0f} s")
            tell(f"{setting.name} at {rate:.2f}/s: {'sustained' if probe.borne else probe.why}")
            return probe

        lowest = 1 / plan.probe_s  # with less than one request in a probe, nothing queues
        capacity = search(setting.name, try_rate, start=plan.start, precision=plan.precision, lowest=lowest)
        return replace(capacity, partial=notes[0]) if notes else capacity


# -- the study


@dataclass(slots=True, kw_only=True)
class CapacityResults(StudyResults):
    """The searches of all settings."""

    workload: str
    slo: Slo
    violations_max: float
    probe_s: float
    found: list[Capacity] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.found


def _over_rate(pyplot: Any, results: CapacityResults) -> Any:
    figure, (left_axes, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for number, capacity in enumerate(results.found):
        _line(left_axes, right, capacity, f"C{number}")
    right.axhline(100 * results.violations_max, color="grey", linestyle=":", label="limit")
    if results.slo.ttft_s is not None:
        left_axes.axhline(MS * results.slo.ttft_s, color="grey", linestyle=":", label="limit")
    left_axes.set(xlabel="rate (requests/s)", ylabel="P99 time to first token (ms)", yscale="log")
    right.set(xlabel="rate (requests/s)", ylabel="requests that miss the SLO (%)")
    left_axes.yaxis.set_major_formatter("{x:g}")
    left_axes.yaxis.set_minor_formatter("{x:g}")
    for axes in (left_axes, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    machine_text = f"{results.machine['processor']}, {results.machine['cores']} cores"
    figure.suptitle(f"Capacity: {results.workload} on {machine_text}\nfilled: sustained, hollow: not, dashed: largest")
    return figure


def _line(left_axes: Any, right: Any, capacity: Capacity, color: str) -> None:
    probes = sorted((p for p in capacity.probes if p.figures.ttft_s is not None), key=lambda probe: probe.rate)
    rates = [probe.rate for probe in probes]
    p99s = [probe.figures.ttft_s.p99 * MS for probe in probes if probe.figures.ttft_s is not None]
    missed = [100 * probe.figures.slo_violations for probe in probes]
    for axes, values in ((left_axes, p99s), (right, missed)):
        axes.plot(rates, values, color=color, linewidth=1, label=capacity.setting)
        for probe, value in zip(probes, values, strict=True):
            axes.plot(probe.rate, value, marker="o", color=color, fillstyle="full" if probe.borne else "none")
        if capacity.rate is not None:
            axes.axvline(capacity.rate, color=color, linestyle="--", alpha=0.6)


DRAWINGS = {"capacity": Drawing("Latency over the rate.", _over_rate)}


class CapacityStudy(Study[CapacityResults]):
    """Searches the capacity of each setting, until one search is ended early."""

    title = "memserve bench capacity"
    draws_requests = True
    drawings = DRAWINGS

    def __init__(self, plan: Search, settings: Sequence[Setting], folder: RunFolder, command: str = "") -> None:
        kind, probe_s = plan.recipe.kind, plan.probe_s
        results = CapacityResults(
            command=command, workload=kind, slo=plan.slo, violations_max=plan.violations_max, probe_s=probe_s
        )
        super().__init__(results)
        self._plan, self._settings, self._folder = plan, settings, folder

    def fill_results(self, tell: Tell) -> None:
        capacities = self.results.found
        for setting in self._settings:
            try:
                capacities.append(search_capacity(self._plan, setting, self._folder.writer, tell))
            except KeyboardInterrupt:  # while a server starts; during a probe the driver handles it
                capacities.append(Capacity(setting.name, None, (), INTERRUPTED))
            except UserError as error:
                if not capacities:
                    raise
                capacities.append(Capacity(setting.name, None, (), str(error)))
            if (why := capacities[-1].partial) is not None:
                self.results.partial = f"{setting.name}: {why}"
                return

    def terminal_lines(self) -> Iterator[str]:
        for capacity in self.results.found:
            rate = f"{capacity.rate:.2f} requests/s" if capacity.rate is not None else "no rate was sustained"
            yield f"{capacity.setting}: {rate}" + (f" (partial: {capacity.partial})" if capacity.partial else "")

    def head_lines(self) -> Iterator[str]:
        results = self.results
        yield f"* {results.workload}; a rate is sustained if the queue stays bounded and at most"
        yield f"  {results.violations_max:.0%} of the requests miss the SLO ({describe_slo(results.slo)})"
        yield f"* requests arrive for {results.probe_s:g} s at each rate"

    def make_tables(self) -> Iterator[Table]:
        rows: list[list[Cell]] = [
            [capacity.setting, f"{capacity.rate:.2f}" if capacity.rate else "none found", capacity.partial or ""]
            for capacity in self.results.found
        ]
        yield Table("Capacity", ("setting", "largest sustained rate (requests/s)", ""), rows)
        rows = [
            [capacity.setting, f"{probe.rate:.2f}", "yes" if probe.borne else "no",
             *(in_ms(probe.figures.ttft_s, "mean", "p99", digits=0)), f"{probe.figures.slo_violations:.1%}",
             f"{probe.backlog_middle:.1f}, {probe.backlog_last:.1f}", probe.why]
            for capacity in self.results.found for probe in capacity.probes
        ]  # fmt: skip
        columns = ["setting", "rate", "sustained", "TTFT mean (ms)", "P99", "SLO missed", "backlog, middle, last third"]
        yield Table("Rates", [*columns, "why not"], rows)
