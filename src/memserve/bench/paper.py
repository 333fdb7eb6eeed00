"""What MemServe's section 8 reports, and the same changes and orders of ours beside it (level 4)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memserve.bench import metrics
from memserve.bench.load.record import RequestRecord
from memserve.bench.results import QUANTITIES, STATISTICS, Compared, Found, Results

DISAGGREGATION, CACHING, POLICY = "disaggregation", "caching", "prompt tree over session"

PAPER: dict[tuple[str, str], dict[str, float]] = {
    ("chat", DISAGGREGATION): {"jct mean": -0.30, "jct p99": -0.42},
    ("chat", CACHING): {"jct mean": -0.17, "jct p99": -0.29, "ttft mean": -0.58, "ttft p99": -0.45},
    ("documents", DISAGGREGATION): {"jct mean": -0.103, "jct p99": -0.108},
    ("documents", CACHING): {"jct mean": -0.269, "jct p99": -0.225, "ttft mean": -0.562, "ttft p99": -0.452},
    ("react", DISAGGREGATION): {"jct mean": -0.408, "jct p99": -0.531},
    ("react", CACHING): {"jct mean": -0.267, "jct p99": -0.214, "ttft mean": -0.785, "ttft p99": -0.849},
    ("documents", POLICY): {"ttft p99": -0.59},
}
"""Workload and step -> change of each quantity (8.3, 8.4): ShareGPT is chat (1P2D over PD, 1P2D-CC over 1P2D), LooGLE
documents. Llama2-13B, TP 2, on eight H800."""

JUDGED = {DISAGGREGATION: "jct mean", CACHING: "ttft mean", POLICY: "ttft p99"}
"""What a step is for."""

_SPLIT = re.compile(r"(\d+)P(\d+)D")


@dataclass(frozen=True, slots=True)
class Step:
    """From one setting to another on one workload."""

    workload: str
    name: str
    before: Found
    after: Found
    changes: dict[str, float]
    """``ttft mean`` -> for example -0.5: half of it is gone."""
    paper: dict[str, float]

    @property
    def judged(self) -> str:
        """The quantity that the step is for."""
        return JUDGED[self.name]


def steps(results: Results) -> Iterator[Step]:
    """Every step of the paper's that ``results`` has both sides of, and caching of colocated instances."""
    for before in results.found:
        for after in results.found:
            name = _step(before.setting, after.setting) if before.workload == after.workload else None
            if name is not None:
                kind = kind_and_ratio(before.workload)[0]
                paper = PAPER.get((kind, name), {}) if name != CACHING or _SPLIT.match(before.setting) else {}
                yield Step(before.workload, name, before, after, _changes(before, after), paper)


def kind_and_ratio(workload: str) -> tuple[str, float | None]:
    """``documents x2`` -> documents, 2."""
    match = re.fullmatch(r"(.*) x([\d.]+)", workload)
    return (match[1], float(match[2])) if match else (workload, None)


def _step(before: str, after: str) -> str | None:
    same, split = re.fullmatch(r"(\d+)PD", before), _SPLIT.fullmatch(after)
    if same and split and int(same[1]) == int(split[1]) + int(split[2]):
        return DISAGGREGATION  # at equal instance count
    if after in (f"{before}-CC", f"{before}-CC3"):
        return CACHING
    if before.endswith("/session") and after == before.removesuffix("session") + "prompt-tree":
        return POLICY
    return None


def value_of(found: Found, name: str) -> float | None:
    """``"ttft mean"`` of a setting, in seconds; ``None`` where nobody was answered."""
    quantity, statistic = name.split()
    spread = getattr(found.figures, f"{quantity}_s")
    return None if spread is None else float(getattr(spread, statistic))


def _changes(before: Found, after: Found) -> dict[str, float]:
    changes = {}
    for quantity in QUANTITIES:
        for statistic in STATISTICS:
            name = f"{quantity} {statistic}"
            was, now = value_of(before, name), value_of(after, name)
            if was is not None and now is not None and was > 0:
                changes[name] = now / was - 1
    return changes


@dataclass(frozen=True, slots=True)
class Ranking:
    """Settings in the order in which the paper has them, best first, on one workload."""

    workload: str
    judged: str
    members: tuple[Found, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """The judged quantity of each, in seconds."""
        return tuple(value_of(found, self.judged) or 0.0 for found in self.members)

    @property
    def holds(self) -> bool:
        """Whether ours come in the same order."""
        return all(better < worse for better, worse in pairwise(self.values))


ORDERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ttft mean", ("-CC3", "-CC2", "-CC1")),
    ("jct mean", ("-CC3", "-CC2", "-CC1")),
    ("ttft p99", ("/prompt-tree", "/session", "/least-load")),
)
"""What is judged, and the endings of the settings' names, best first (8.3: caching levels; 8.4: policies)."""


def rankings(results: Results) -> Iterator[Ranking]:
    """Every order of the paper's of which ``results`` has two members at least."""
    for judged, endings in ORDERS:
        groups: dict[tuple[str, str], dict[str, Found]] = {}
        for found in results.found:
            for ending in endings:
                if found.setting.endswith(ending) and value_of(found, judged) is not None:
                    stem = found.setting.removesuffix(ending)
                    groups.setdefault((found.workload, stem), {})[ending] = found
        for (workload, _), members in groups.items():
            if len(members) > 1:
                yield Ranking(workload, judged, tuple(members[ending] for ending in endings if ending in members))


def compare(results: Results, records: Sequence[RequestRecord]) -> Results:
    """``results`` with the confidence intervals of every step, and of the best against the worst of every order."""
    groups = metrics.by_setting(records)
    wanted = [(step.workload, step.before.setting, step.after.setting, step.judged) for step in steps(results)]
    wanted += [(r.workload, r.members[-1].setting, r.members[0].setting, r.judged) for r in rankings(results)]
    compared = []
    for workload, before, after, name in dict.fromkeys(wanted):
        quantity, statistic = name.split()
        change = _change(results, workload, before, after, name)
        if change is not None:
            pair = (groups[workload, before], groups[workload, after])
            interval = metrics.paired(*pair, QUANTITIES[quantity], STATISTICS[statistic])
            compared.append(Compared(workload, before, after, name, change, interval))
    return replace(results, compared=tuple(compared))


def _change(results: Results, workload: str, before: str, after: str, name: str) -> float | None:
    values = {found.setting: value_of(found, name) for found in results.found if found.workload == workload}
    was, now = values[before], values[after]
    return now / was - 1 if was and now is not None else None
