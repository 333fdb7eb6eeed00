"""``results.json``: everything that a run found, summed up from its records (level 4)."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from memserve import __version__
from memserve.bench import metrics
from memserve.bench.load.driver import LoadRun
from memserve.bench.load.record import RecordWriter, RequestRecord
from memserve.bench.metrics import Figures, Slo, Timing
from memserve.errors import UserError
from memserve.units import NS_PER_S

RECORDS, RESULTS = "records.jsonl.gz", "results.json"

QUANTITIES: dict[str, Callable[[Timing], float | None]] = {
    "ttft": lambda felt: felt.ttft_s,
    "jct": lambda felt: felt.jct_s,
    "tpot": lambda felt: felt.tpot_s,
}
"""Name -> what it reads of a :class:`Timing`: the bars of MemServe's figure 8."""
STATISTICS: dict[str, metrics.Statistic] = {"mean": metrics.mean, "p99": metrics.p99}


@dataclass(frozen=True, slots=True)
class Pass:
    """One workload sent to one setting once."""

    workload: str
    setting: str
    seed: int
    planned: int
    wall_s: float
    partial: str | None = None

    @classmethod
    def of(cls, run: LoadRun, workload: str, setting: str, seed: int) -> Pass:
        """What ``run`` was."""
        return cls(workload, setting, seed, run.planned, run.wall_ns / NS_PER_S, run.partial)


@dataclass(frozen=True, slots=True)
class Found:
    """One workload on one setting, all seeds together."""

    workload: str
    setting: str
    figures: Figures
    intervals: dict[str, tuple[float, float]]
    """``ttft mean``, ``jct p99``, ...: 95 % confidence intervals in seconds, where the sessions suffice for one."""
    turns: dict[int, Figures]


@dataclass(frozen=True, slots=True)
class Compared:
    """Two settings on one workload, session by session."""

    workload: str
    before: str
    after: str
    name: str
    """``ttft mean`` and the like."""
    change: float
    """Relative: -0.5 is half."""
    interval: tuple[float, float] | None
    """95 % confidence of ``change``, sessions drawn in pairs; ``None``: too few."""

    @property
    def is_told_apart(self) -> bool:
        """Whether zero is outside of the interval."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a workload is like: one value a request (MemServe figure 7)."""

    workload: str
    source: str
    requests: int
    prompt_tokens: list[float]
    output_tokens: list[float]
    prompt_per_output: list[float]
    shared_share: list[float]
    """Of its blocks, those that an earlier request had."""
    turns: list[float] = dataclasses.field(default_factory=list)
    """One value a session."""
    blocks_shared: float = 0.0
    """Share of all blocks that an earlier request had, as the data's authors count it."""


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run of the bench."""

    command: str
    slo: Slo
    passes: tuple[Pass, ...]
    found: tuple[Found, ...]
    partial: str | None = None
    """Why it was ended early; ``None``: it is complete."""
    version: str = __version__
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    models: tuple[str, ...] = ()
    """What was served, by the servers' own names."""
    compared: tuple[Compared, ...] = ()
    """The steps and orders of the paper that these results have."""


def sum_up(
    records: Sequence[RequestRecord],
    passes: Sequence[Pass],
    slo: Slo,
    command: str,
    notes: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    stopped: str | None = None,
    simulated: str = "",
) -> Results:
    """The results of ``records``: those of each workload and setting together, whatever the seed.

    ``simulated``: the machines that a simulation stood for; empty: it was measured on this one.
    """
    found = []
    for (workload, setting), members in metrics.by_setting(records).items():
        wall_s = sum(map(metrics.wall_seconds, metrics.by_run(members).values()))
        turns = {turn: metrics.figures(own, slo=slo) for turn, own in metrics.by_turn(members).items()}
        figures = metrics.figures(members, slo=slo, wall_s=wall_s)
        found.append(Found(workload, setting, figures, intervals_of(members), turns))
    partial = next((one.partial for one in passes if one.partial is not None), stopped)
    return Results(
        command, slo, tuple(passes), tuple(found), partial,
        machine={"simulated": simulated} if simulated else machine(),
        notes=tuple(dict.fromkeys(notes)), shapes=tuple(shapes),
    )  # fmt: skip


def intervals_of(records: Sequence[RequestRecord]) -> dict[str, tuple[float, float]]:
    """``"ttft mean"`` -> its confidence interval in seconds, and so on for every quantity and statistic."""
    intervals = {}
    for name, value in QUANTITIES.items():
        for statistic_name, statistic in STATISTICS.items():
            if (found := metrics.interval(records, value, statistic)) is not None:
                intervals[f"{name} {statistic_name}"] = found
    return intervals


def machine() -> dict[str, Any]:
    """What it ran on: figures of two machines are not to be compared by accident."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def new_folder(path: Path) -> Path:
    """``path``, made where it is missing. Raises :class:`UserError` where it cannot be, or holds a run already."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror}", hint="name another folder with --out") from None
    if any((path / name).exists() for name in (RECORDS, RESULTS)):
        raise UserError(
            f"{path} holds the results of a run already", hint="name another folder with --out, or remove it"
        )
    return path


class RunFolder:
    """The folder of one run; records are written as they come.

    Raises :class:`UserError` where it cannot write, and where a run has written before.
    """

    def __init__(self, path: Path) -> None:
        self.path = new_folder(path)
        self.writer = RecordWriter(path / RECORDS)

    def finish(self, results: Results) -> None:
        """Close the records and write ``results.json``."""
        self.writer.close()
        data = msgspec.json.format(msgspec.json.encode(results), indent=1)
        (self.path / RESULTS).write_bytes(data)
