"""Bursts: requests that are all due at once, as in llm-serving-cache's validation.

========== ============================================================================
cold       all requests have one prompt, which the server has not seen before
warm       the cold burst again
shared     all begin with three quarters of that prompt, and end differently
unrelated  each has a prompt of its own
========== ============================================================================
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memserve.bench import metrics
from memserve.bench.load.client import Target
from memserve.bench.load.driver import Labels, LoadRun, send
from memserve.bench.load.prompts import Manner
from memserve.bench.load.record import Outcome, RecordWriter, RequestRecord
from memserve.bench.metrics import Timing, timing
from memserve.bench.servers import Address, Servers
from memserve.bench.settings import Setting
from memserve.bench.study import StudyResults, Tell
from memserve.units import NS_PER_S
from memserve.workloads.draws import draws, prose
from memserve.workloads.statistics import Spread, spread
from memserve.workloads.words import Session, Text, Turn, Workload

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
        asked = {"--admission": "bounded", "--max-active": self.active_max, "--admission-queue": self.queue}
        return tuple(str(part) for pair in asked.items() for part in pair)

    @property
    def text(self) -> str:
        """In words."""
        return f"at most {self.active_max} active requests, {self.queue or 'none'} may wait"


def contenders_of(setting: Setting, limit: Limit | None, others: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """``setting`` without and with ``limit``, then ``others`` unchanged."""
    own = [Setting(f"{setting.name}, no limit" if limit else setting.name, setting.flags, setting.instances)]
    if limit is not None:
        name = f"{setting.name}, limit {limit.active_max}"
        own.append(Setting(name, (*setting.flags, *limit.flags), setting.instances))
    return (*own, *others)


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

    def bursts(self) -> dict[str, Workload]:
        """Scenario -> requests that are all due at once, in the order of sending."""
        first = self._prose(self.prompt_words, "first")
        head_words = round(self.prompt_words * SHARED_SHARE)
        head = " ".join(first.split()[:head_words])
        count = range(self.concurrency)
        texts = {
            "cold": [first] * self.concurrency,
            "warm": [first] * self.concurrency,
            "shared": [f"{head} {self._prose(self.prompt_words - head_words, 'end', at)}" for at in count],
            "unrelated": [self._prose(self.prompt_words, "own", at) for at in count],
        }
        return {scenario: self._burst(scenario, texts[scenario]) for scenario in SCENARIOS}

    def _prose(self, words: int, *purpose: str | int) -> str:
        return prose(draws(self.seed, self.turn, self.concurrency, *purpose), words)

    def _burst(self, scenario: str, texts: list[str]) -> Workload:
        sessions = []
        for at, text in enumerate(texts):
            turns = (Turn(Text(text), self.output_tokens, due_s=0.0),)
            name = f"{scenario}-{self.turn}-{self.concurrency}-{at}"
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
    felt = [[one for record in burst if (one := timing(record)) is not None] for burst in bursts]
    walls_s = [metrics.wall_seconds(burst) for burst in bursts]
    rates = [sum(record.ok for record in burst) / wall for burst, wall in zip(bursts, walls_s, strict=True) if wall]

    def by_burst(value: Callable[[Timing], float]) -> list[list[float]]:
        return [[value(one) for one in burst] for burst in felt]

    groups = {
        "latency": by_burst(lambda one: one.jct_s), "ttft": by_burst(lambda one: one.ttft_s),
        "decode": by_burst(lambda one: one.jct_s - one.ttft_s),
        "wall": [[wall] for wall in walls_s], "rate": [[rate] for rate in rates],
    }  # fmt: skip
    latency_s, ttft_s, decode_s, wall_s, per_s = (spread(itertools.chain(*values)) for values in groups.values())
    wanted = [("latency", "mean"), ("latency", "p95"), ("ttft", "mean"), ("ttft", "p95"), ("rate", "mean")]
    found = {f"{name} {one}": metrics.bootstrap(groups[name], getattr(metrics, one)) for name, one in wanted}
    waits_s = [((r.end_ns or r.scheduled_ns) - r.scheduled_ns) / NS_PER_S for r in refused]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in accepted)
    return Cell(
        contender, scenario, concurrency, len(bursts), len(accepted), len(refused),
        len(records) - len(accepted) - len(refused), latency_s, ttft_s, decode_s, wall_s, per_s, spread(waits_s),
        sum(record.cached_tokens or 0 for record in accepted) / prompt_tokens if prompt_tokens else 0.0,
        {name: interval for name, interval in found.items() if interval is not None},
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
                address = servers.address(contender, results.contenders)
                if address.model not in results.models:
                    results.models.append(address.model)
                for scenario, burst in story.bursts().items():
                    labels = Labels(contender.name, scenario, turn)
                    yield _sent(plan, burst, address, labels, f"{salt}-{turn}-{concurrency}/", writer)
            tell(f"{turn + 1}/{plan.repetitions}: {concurrency} at once")


def _sent(
    plan: BurstPlan, burst: Workload, address: Address, labels: Labels, salt: str, writer: RecordWriter
) -> LoadRun:
    manner = Manner(address.model, ignore_eos=plan.ignore_eos, name_sessions=False, salt=salt)
    return send(burst, Target(address.url, timeout_s=plan.timeout_s), manner, labels, writer=writer)
