"""Sends the bursts: every contender takes its turn at every concurrency, repetition by repetition (level 4)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memserve.bench.concurrency.results import ConcurrencyResults, sum_up
from memserve.bench.concurrency.story import Story
from memserve.bench.load.client import Target
from memserve.bench.load.driver import INTERRUPTED, Driver, Labels, LoadRun, drive
from memserve.bench.load.progress import Progress
from memserve.bench.load.prompts import Manner
from memserve.bench.load.record import RecordWriter, RequestRecord
from memserve.bench.servers import Address, Servers
from memserve.bench.settings import Setting
from memserve.errors import UserError
from memserve.workloads.words import Workload

SALT_BYTES = 6
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Limit:
    """An admission limit (row C6)."""

    active_max: int
    queue: int = 0
    """Requests that may wait before it."""

    @property
    def flags(self) -> tuple[str, ...]:
        """What says so to ``memserve serve``."""
        asked = {"--admission": "bounded", "--max-active": self.active_max, "--admission-queue": self.queue}
        return tuple(str(part) for pair in asked.items() for part in pair)

    @property
    def text(self) -> str:
        """In words."""
        waiting = f", {self.queue} may wait" if self.queue else ", nobody waits"
        return f"at most {self.active_max} active requests{waiting}"


@dataclass(frozen=True, slots=True)
class ConcurrencyPlan:
    """What is sent to whom."""

    contenders: tuple[Setting, ...]
    concurrencies: tuple[int, ...]
    repetitions: int
    prompt_words: int
    output_tokens: int
    serve_flags: tuple[str, ...] = ()
    ignore_eos: bool = True
    seed: int = 0
    timeout_s: float = 600.0


def contenders_of(setting: Setting, limit: Limit | None, others: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """``setting`` without and with ``limit``, and ``others`` as they are."""
    own = [Setting(f"{setting.name}, no limit" if limit else setting.name, setting.flags, setting.instances)]
    if limit is not None:
        name = f"{setting.name}, limit {limit.active_max}"
        own.append(Setting(name, (*setting.flags, *limit.flags), setting.instances))
    return (*own, *others)


def measure(plan: ConcurrencyPlan, writer: RecordWriter, results: ConcurrencyResults, say: Say) -> None:
    """Fill ``results``; when it ends early (Ctrl-C, a server that dies) they are marked partial.

    Raises :class:`UserError` when nothing was measured at all.
    """
    records: list[RequestRecord] = []
    results.contenders = [contender.name for contender in plan.contenders]
    try:
        with Servers(plan.serve_flags, say) as servers:
            for run in _runs(plan, servers, writer, results, say):
                records += run.records
                if run.partial is not None:
                    results.partial = run.partial
                    break
            results.notes += servers.notes
    except KeyboardInterrupt:
        results.partial = INTERRUPTED
    except UserError as error:
        if not records:
            raise
        results.partial = str(error)
    sum_up(results, records)


def _runs(
    plan: ConcurrencyPlan, servers: Servers, writer: RecordWriter, results: ConcurrencyResults, say: Say
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
            say(f"{turn + 1}/{plan.repetitions}: {concurrency} at once")


def _sent(
    plan: ConcurrencyPlan, burst: Workload, address: Address, labels: Labels, salt: str, writer: RecordWriter
) -> LoadRun:
    manner = Manner(address.model, ignore_eos=plan.ignore_eos, name_sessions=False, salt=salt)
    progress = Progress(burst.request_count, f"{labels.setting} {labels.workload}")
    target = Target(address.url, timeout_s=plan.timeout_s)
    return drive(lambda: Driver(burst, target, manner, writer=writer, progress=progress, labels=labels))
