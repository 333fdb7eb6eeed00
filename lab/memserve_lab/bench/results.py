"""Figures of workloads on settings, computed from records: ``results.json`` of ``bench serve``, ``bench
load`` and ``sim run``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memserve.base.units import NS_PER_S
from memserve_lab.bench import metrics
from memserve_lab.bench.load.driver import LoadRun
from memserve_lab.bench.load.prompts import RequestRecord
from memserve_lab.bench.metrics import Figures, Slo, Timing
from memserve_lab.bench.study import StudyResults
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.statistics import Measured, Spread, measure
from memserve_lab.workloads.tokens import Meter

BLOCK_TOKENS = 16
"""Text is split into blocks of this many tokens to count shared prefixes."""
QUANTITIES: dict[str, Callable[[Timing], float | None]] = {
    "ttft": lambda felt: felt.ttft_s,
    "jct": lambda felt: felt.jct_s,
    "tpot": lambda felt: felt.tpot_s,
}
"""Name -> value of a :class:`Timing`: the quantities of MemServe's figure 8."""
STATISTICS: dict[str, metrics.Statistic] = {"mean": metrics.mean, "p99": metrics.p99}
_LABEL = re.compile(r"(.*?)(?: x([\d.]+))?(?: at ([\d.e+-]+)/s)?")


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a workload in records and reports: ``documents x2``, ``chat at 1.5/s``."""

    kind: str
    ratio: float | None = None
    """Share ratio. None: not varied."""
    rate: float | None = None
    """Requests a second. None: not varied."""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" x{self.ratio:g}"
        return self.kind + ratio + ("" if self.rate is None else f" at {self.rate:g}/s")

    @classmethod
    def parse(cls, text: str) -> Label:
        """The inverse of ``str``."""
        match = _LABEL.fullmatch(text)
        assert match is not None, "the kind takes any text"
        kind, ratio, rate = match.groups()
        return cls(kind, *(None if value is None else float(value) for value in (ratio, rate)))


@dataclass(frozen=True, slots=True)
class Pass:
    """One workload, sent once to one setting."""

    workload: str
    setting: str
    seed: int
    planned: int
    wall_s: float
    partial: str | None = None

    @classmethod
    def of(cls, run: LoadRun, workload: str, setting: str, seed: int) -> Pass:
        """The pass of ``run``."""
        return cls(workload, setting, seed, run.planned, run.wall_ns / NS_PER_S, run.partial)


@dataclass(frozen=True, slots=True)
class Found:
    """Figures of one workload on one setting, over all seeds."""

    workload: str
    setting: str
    figures: Figures
    intervals: dict[str, tuple[float, float]]
    """``ttft mean``, ``jct p99``, ...: 95 % confidence intervals in seconds, if there are enough sessions."""
    turns: dict[int, Figures]

    @property
    def label(self) -> Label:
        """The workload, its share ratio and its rate."""
        return Label.parse(self.workload)

    def value_of(self, name: str) -> float | None:
        """``"ttft mean"`` in seconds. None: no request was answered."""
        quantity, statistic = name.split()
        spread = getattr(self.figures, f"{quantity}_s")
        return None if spread is None else float(getattr(spread, statistic))


@dataclass(frozen=True, slots=True)
class Compared:
    """Two settings on one workload, session by session."""

    workload: str
    before: str
    after: str
    name: str
    """Name of the figure, such as ``ttft mean``."""
    change: float
    """Relative: -0.5 is half."""
    interval: tuple[float, float] | None
    """95 % confidence of ``change``, sessions drawn in pairs. None: too few."""

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, slots=True)
class Shape:
    """Distributions of a workload: the data of MemServe's figure 7."""

    workload: str
    source: str
    requests: int
    prompt_tokens: list[float]
    output_tokens: list[float]
    prompt_per_output: list[float]
    shared_share: list[float]
    """Share of each prompt's blocks that an earlier request had."""
    turns: list[float] = field(default_factory=list)
    """One value per session."""
    blocks_shared: float = 0.0
    """Share of all blocks that an earlier request had, as the data's authors count it."""


@dataclass(slots=True, kw_only=True)
class Results(StudyResults):
    """All workloads on all settings."""

    slo: Slo = field(default_factory=Slo)
    passes: list[Pass] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    """The steps and orders of the paper that these results have."""

    @property
    def is_empty(self) -> bool:
        return not self.found

    def add_records(self, records: Sequence[RequestRecord], passes: Sequence[Pass]) -> None:
        """Add the figures of ``records``, by workload and setting, over all seeds."""
        self.passes += passes
        for (workload, setting), members in metrics.by_setting(records).items():
            wall_s = sum(map(metrics.wall_seconds, metrics.by_run(members).values()))
            turns = {turn: metrics.figures(records, slo=self.slo) for turn, records in metrics.by_turn(members).items()}
            figures = metrics.figures(members, slo=self.slo, wall_s=wall_s)
            self.found.append(Found(workload, setting, figures, _intervals_of(members), turns))
        self.partial = self.partial or next(
            (load_pass.partial for load_pass in passes if load_pass.partial is not None), None
        )


def sum_up(
    records: Sequence[RequestRecord], passes: Sequence[Pass], slo: Slo, command: str, notes: Sequence[str] = ()
) -> Results:
    """The results of ``records``."""
    results = Results(command=command, slo=slo, notes=list(dict.fromkeys(notes)))
    results.add_records(records, passes)
    return results


def _intervals_of(records: Sequence[RequestRecord]) -> dict[str, tuple[float, float]]:
    figures_by_label = {
        f"{name} {statistic_name}": metrics.interval(records, value, statistic)
        for name, value in QUANTITIES.items()
        for statistic_name, statistic in STATISTICS.items()
    }
    return {name: interval for name, interval in figures_by_label.items() if interval is not None}


# -- shapes


def shapes_of(workloads: Mapping[tuple[str, int], Workload], meter: Meter | None = None) -> list[Shape]:
    """``(label, seed)`` -> workload: one shape per kind and share ratio, over all seeds. A rate does not change the
    shape: the first one represents all. Seeds share no cache."""
    workloads_by_kind: dict[str, dict[int, Workload]] = {}
    for (text, seed), workload in workloads.items():
        label = Label.parse(text)
        workloads_by_kind.setdefault(str(Label(label.kind, label.ratio)), {}).setdefault(seed, workload)
    return [
        shape_of(name, next(iter(seeds.values())).source, [
            measure(workload, block_tokens=BLOCK_TOKENS, meter=meter) for workload in seeds.values()
        ])
        for name, seeds in workloads_by_kind.items()
    ]  # fmt: skip


def shape_of(label: str, source: str, parts: Sequence[Measured]) -> Shape:
    """The shape of several measured workloads together."""
    columns: list[list[float]] = [[], [], [], [], []]
    for part in parts:
        per_output = part.prompt_tokens / part.output_tokens.clip(min=1)
        shared = part.blocks_seen / part.blocks.clip(min=1)
        values_by_column = (part.prompt_tokens, part.output_tokens, per_output, shared, part.turns)
        for column, values in zip(columns, values_by_column, strict=True):
            column += [float(value) for value in values]
    prompts, outputs, ratios, shares, turns = columns
    blocks, blocks_repeated = (
        sum(int(getattr(part, name).sum()) for part in parts) for name in ("blocks", "blocks_seen")
    )
    return Shape(label, source, len(prompts), prompts, outputs, ratios, shares, turns, blocks_repeated / max(1, blocks))


# -- for a terminal


def describe(results: Results) -> Iterator[str]:
    """Summary lines for the terminal after a run."""
    for row in results.found:
        title = " ".join(name for name in (row.workload, row.setting) if name)
        yield from ([f"== {title}"] if title else [])
        yield from _figures(row.figures)
    if results.partial is not None:
        yield f"partial: {results.partial}"


def _figures(figures: Figures) -> Iterator[str]:
    yield f"{figures.requests} requests in {figures.wall_s:.1f} s, {figures.failed} failed" + "".join(
        f", {count} {error}" for error, count in figures.errors.items()
    )
    for error, reason in figures.reasons.items():
        yield f"  {error}: {reason}"
    yield f"{'ms':<6}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}{'max':>10}"
    for name in ("ttft", "tpot", "itl", "jct", "late"):
        spread: Spread | None = getattr(figures, f"{name}_s")
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            title = name if name == "late" else name.upper()
            yield f"{title:<6}" + "".join(f"{1e3 * value:>10.2f}" for value in values)
    yield (
        f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:.1f} tokens/s, "
        f"goodput {figures.goodput_per_s:.2f}/s, SLO violations {figures.slo_violations:.1%}, "
        f"prompt tokens cached {figures.cached_share:.1%}"
    )


def describe_slo(slo: Slo) -> str:
    """For example ``TTFT <= 500 ms, TPOT <= 50 ms``."""
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "JCT": slo.jct_s}
    limits_text = [f"{name} <= {1e3 * limit:g} ms" for name, limit in limits.items() if limit is not None]
    return ", ".join(limits_text) or "none: every answer is good"
