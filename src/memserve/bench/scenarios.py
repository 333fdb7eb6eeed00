"""``memserve sim --scenario NAME``: the tables of published simulations, from the production machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from memserve.bench.report_writer import Table
from memserve.bench.study import Study, StudyResults, Tell
from memserve.errors import UserError
from memserve.sim.scenario_llm_cache import CASES, outcome, overload, play


@dataclass(slots=True, kw_only=True)
class ScenarioResults(StudyResults):
    """Rows as text, one list per table."""

    cases: list[tuple[str, ...]] = field(default_factory=list)
    overload: list[tuple[str, ...]] = field(default_factory=list)


class LlmServingCache(Study[ScenarioResults]):
    """The five scenarios of llm-serving-cache, and its overload case."""

    title = "memserve sim --scenario llm-serving-cache"

    def measure(self, tell: Tell) -> None:
        results = self.results
        for case in CASES:
            answers, world = play(case)
            found = outcome(answers)
            shares = (f"{found.hit_percent} %", f"{found.rejected_percent} %")
            results.cases.append((case.name, str(found.mean_ms), str(found.p95_ms), *shares))
            results.notes += [f"{case.name}: rejected: {answer.rejected}" for answer in answers if answer.rejected]
            if world.admission().evictions:
                results.notes.append(f"{case.name}: {world.admission().evictions} ended requests were evicted")
        for name, active_max in (("no control", None), ("3 active", 3)):
            answers, served_per_s = overload(active_max)
            rejected = sum(bool(answer.rejected) for answer in answers)
            counts = (str(len(answers) - rejected), str(rejected))
            results.overload.append((name, *counts, str(outcome(answers).p95_ms), f"{served_per_s:.2f}"))

    def tables(self) -> Iterator[Table]:
        title = "llm-serving-cache: 5 ms routing, 1 ms a token, 10 tokens a MB, 16 MB a block, 500 MB free"
        columns = ("scenario", "mean (ms)", "p95 (ms)", "hit rate", "rejected")
        yield Table(title, columns, self.results.cases, below="\n".join(self.results.notes))
        columns = ("10 requests at once", "accepted", "rejected", "p95 (ms)", "served/s")
        yield Table("overload: the device computes one token after the other", columns, self.results.overload)


SCENARIOS = {"llm-serving-cache": LlmServingCache}


def open_scenario(name: str, command: str = "") -> LlmServingCache:
    """The study called ``name``, not run yet. Raises :class:`UserError` for an unknown name."""
    if name not in SCENARIOS:
        raise UserError(f"unknown scenario {name!r}", hint=f"one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name](ScenarioResults(command=command, machine={"simulated": "the source's constants"}))
