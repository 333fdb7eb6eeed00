"""``memserve sim --scenario llm-serving-cache``: the table of llm-serving-cache, from the production machines.

The source adds its constants up in a formula. Here its requests go through the ``Cluster`` machine (admission, and
placement by ``affinity``) and an ``Instance`` (index, pool, eviction), and what comes out is timed by a virtual clock
(:mod:`memserve.sim.scenario_llm_cache_world`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memserve.config import AdmissionConfig
from memserve.sim.scenario_llm_cache_world import FREE_UNITS, UNIT_TOKENS, Answer, Ask, Case, SourceWorld
from memserve.sim.scenarios import Table, scenario
from memserve.types import Admission, Caching
from memserve.units import NS_PER_S, ceil_div


def _by_memory(evictions_max: int) -> AdmissionConfig:
    """Memory of a prompt is held until it is evicted; what is generated does not count (the source's model)."""
    return AdmissionConfig(
        Admission.MEMORY, waiting_max=0, output_tokens_max=0, unit_tokens=UNIT_TOKENS, evictions_max=evictions_max
    )


MISS, PREFIX, EXACT = Ask(1200, 200, 0), Ask(1200, 200, 840), Ask(1200, 200, 1200)
INACTIVE = Ask(2000, 1, 0)
CASES = (
    Case("No cache", (MISS,) * 4, caching=Caching.OFF),
    Case("Prefix reuse", (MISS, PREFIX) * 2),
    Case("Exact cache", (EXACT,) * 4, before=(MISS,)),
    Case("GPU-aware", (MISS, PREFIX, Ask(10_000, 200, 0), MISS), admission=_by_memory(0)),
    Case(
        "GPU-aware + eviction", (MISS, PREFIX, Ask(4000, 200, 0), MISS), (INACTIVE,) * 2, admission=_by_memory(1),
        units=FREE_UNITS + 2 * ceil_div(INACTIVE.prompt_tokens, UNIT_TOKENS),
    ),
)  # fmt: skip


class Outcome(NamedTuple):
    """A row's figures, as the source defines them."""

    mean_ms: int
    p95_ms: int
    hit_percent: int
    rejected_percent: int


def outcome(answers: Sequence[Answer]) -> Outcome:
    """The mean is over all requests, cut to whole ms, those rejected counting 0; p95 is over the served ones."""
    served = sorted(answer.latency_ms for answer in answers if not answer.rejected)
    hits = sum(answer.cached_tokens > 0 for answer in answers)
    count = len(answers)
    p95_ms = served[int(0.95 * len(served))] if served else 0
    return Outcome(sum(served) // count, p95_ms, 100 * hits // count, 100 * (count - len(served)) // count)


def play(case: Case) -> tuple[list[Answer], SourceWorld]:
    """One request after the other."""
    world = SourceWorld(case)
    for ask in case.before:
        world.wait_for([world.ask(ask)])
    answers = [world.wait_for([world.ask(ask)])[0] for ask in case.asks]
    return answers, world


def overload(active_max: int | None, at_once: int = 10) -> tuple[list[Answer], float]:
    """So many requests at once, at most ``active_max`` of them let in; the answers, and requests served a second."""
    admission = AdmissionConfig()
    if active_max is not None:
        admission = AdmissionConfig(Admission.BOUNDED, active_max, waiting_max=0)
    world = SourceWorld(Case("overload", (), caching=Caching.OFF, admission=admission, units=10 * FREE_UNITS))
    started_ns = world.clock.now
    answers = world.wait_for([world.ask(MISS) for _ in range(at_once)])
    served = sum(not answer.rejected for answer in answers)
    return answers, served / ((world.clock.now - started_ns) / NS_PER_S)


@scenario("llm-serving-cache")
def llm_serving_cache() -> tuple[Table, ...]:
    """The five scenarios of llm-serving-cache, and its overload case."""
    rows, notes = [], []
    for case in CASES:
        answers, world = play(case)
        found = outcome(answers)
        rows.append((case.name, str(found.mean_ms), str(found.p95_ms), f"{found.hit_percent} %",
                     f"{found.rejected_percent} %"))  # fmt: skip
        notes += [f"{case.name}: rejected: {answer.rejected}" for answer in answers if answer.rejected]
        if world.admission().evictions:
            notes.append(f"{case.name}: {world.admission().evictions} requests that had ended were evicted")
    columns = ("scenario", "mean (ms)", "p95 (ms)", "hit rate", "rejected")
    title = "llm-serving-cache: 5 ms routing, 1 ms a token, 10 tokens a MB, 16 MB a block, 500 MB free"
    return Table(title, columns, tuple(rows), tuple(notes)), _overload_table()


def _overload_table() -> Table:
    rows = []
    for name, active_max in (("no control", None), ("3 active", 3)):
        answers, served_per_s = overload(active_max)
        rejected = sum(bool(answer.rejected) for answer in answers)
        p95_ms = outcome(answers).p95_ms
        rows.append((name, str(len(answers) - rejected), str(rejected), str(p95_ms), f"{served_per_s:.2f}"))
    columns = ("10 requests at once", "accepted", "rejected", "p95 (ms)", "served/s")
    return Table("overload: the device computes one token after the other", columns, tuple(rows))
