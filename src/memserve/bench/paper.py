"""What MemServe's section 8 reports, and the same changes of ours beside it (level 4)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memserve.bench.results import Found, Results

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


_SPLIT = re.compile(r"(\d+)P(\d+)D")


@dataclass(frozen=True, slots=True)
class Step:
    """From one setting to another on one workload."""

    workload: str
    name: str
    before: str
    after: str
    changes: dict[str, float]
    """``ttft mean`` -> for example -0.5: half of it is gone."""
    paper: dict[str, float]


def steps(results: Results) -> Iterator[Step]:
    """Every step of the paper's that ``results`` has both sides of, and caching of colocated instances."""
    for before in results.found:
        for after in results.found:
            name = _step(before.setting, after.setting) if before.workload == after.workload else None
            if name is not None:
                kind = kind_and_ratio(before.workload)[0]
                paper = PAPER.get((kind, name), {}) if name != CACHING or _SPLIT.match(before.setting) else {}
                yield Step(before.workload, name, before.setting, after.setting, _changes(before, after), paper)


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


def _changes(before: Found, after: Found) -> dict[str, float]:
    changes = {}
    for quantity in ("ttft", "jct", "tpot"):
        old, new = (getattr(found.figures, f"{quantity}_s") for found in (before, after))
        if old is not None and new is not None:
            for statistic in ("mean", "p99"):
                if (was := getattr(old, statistic)) > 0:
                    changes[f"{quantity} {statistic}"] = getattr(new, statistic) / was - 1
    return changes
