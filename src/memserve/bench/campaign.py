"""Settings side by side: every workload on every setting, seed by seed.

Passes are interleaved: a workload goes to one setting after the other, each seed in another order, so that a busy
minute of the machine hits no setting alone; seeds come round after round, so that whoever ends the run early has equal
numbers of passes from all settings but the last round's.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from memserve.bench.catalogue import build
from memserve.bench.load.client import Target
from memserve.bench.load.driver import INTERRUPTED, Driver, Labels, LoadRun, drive
from memserve.bench.load.progress import Progress
from memserve.bench.load.prompts import VOCAB_SIZE_DEFAULT, Manner
from memserve.bench.load.record import Outcome, RequestRecord
from memserve.bench.results import Pass, RunFolder
from memserve.bench.servers import Address, Servers
from memserve.bench.settings import Setting
from memserve.bench.studies import Study
from memserve.errors import UserError
from memserve.workloads.tokens import Meter
from memserve.workloads.words import Workload

SALT_BYTES = 6
FAILURES = (Outcome.REFUSED, Outcome.BROKEN, Outcome.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    studies: tuple[Study, ...]
    seeds: tuple[int, ...] = (0,)
    serve_flags: tuple[str, ...] = ()
    """Given to every server of ours."""
    ignore_eos: bool = True
    vocab_size: int = VOCAB_SIZE_DEFAULT
    timeout_s: float = 600.0
    minutes_max: float | None = None
    """No further seed is begun that would not end within so long."""
    meter: Meter | None = None
    """Weighs text; ``None``: four bytes a token."""
    salted: bool = True
    """Every pass has a ``cache_salt`` of its own."""


@dataclass(frozen=True, slots=True)
class Order:
    """One pass to come."""

    seed: int
    label: str
    setting: Setting


@dataclass(slots=True)
class Measured:
    """What was measured so far."""

    records: list[RequestRecord] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    """What the servers call what they serve."""
    stopped: str | None = None
    """Ended between two passes: a server that did not start, or Ctrl-C meanwhile."""

    @property
    def partial(self) -> str | None:
        """Why it ended early."""
        return next((one.partial for one in self.passes if one.partial is not None), self.stopped)


Workloads = dict[tuple[str, int], Workload]
"""``(label, seed)`` -> what is sent."""


def build_all(plan: Plan) -> Workloads:
    """Every workload of the plan. Raises :class:`UserError` for data that cannot be read."""
    recipes = [item for study in plan.studies for item in study.recipes.items()]
    return {
        (label, seed): build(replace(recipe, seed=seed), plan.meter) for seed in plan.seeds for label, recipe in recipes
    }


def orders_of(plan: Plan) -> list[Order]:
    """All passes, in the order in which they are made."""
    return [
        Order(seed, label, setting)
        for number, seed in enumerate(plan.seeds)
        for study in plan.studies
        for label in study.recipes
        for setting in _rotated(study.settings, number)
    ]


def _rotated(settings: Sequence[Setting], by: int) -> list[Setting]:
    by %= max(1, len(settings))
    return [*settings[by:], *settings[:by]]


def measure(plan: Plan, workloads: Workloads, folder: RunFolder, say: Callable[[str], None]) -> Measured:
    """Run the plan; it ends early, and keeps what it has, when it is interrupted or a server dies.

    Raises :class:`UserError` when not even the first server starts.
    """
    return _Campaign(plan, workloads, folder, say).run()


class _Campaign:
    """A plan under way."""

    def __init__(self, plan: Plan, workloads: Workloads, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._plan, self._workloads, self._folder, self._say = plan, workloads, folder, say
        self._orders = orders_of(plan)
        self._measured = Measured()
        self._started = self._round_started = time.monotonic()
        self._round_s_max = self._starting_s = 0.0
        self._salt = secrets.token_hex(SALT_BYTES)

    def run(self) -> Measured:
        measured = self._measured
        try:
            with Servers(self._plan.serve_flags, self._say) as servers:
                try:
                    self._all_passes(servers)
                finally:
                    measured.notes += servers.notes
        except KeyboardInterrupt:
            measured.stopped = INTERRUPTED
        except UserError as error:
            if not measured.records:
                raise
            measured.stopped = str(error)
        return measured

    def _all_passes(self, servers: Servers) -> None:
        seed = None
        for number, order in enumerate(self._orders):
            if order.seed != seed:
                if seed is not None and self._is_time_up(order.seed, servers.starting_s):
                    return
                seed = order.seed
            self._one_pass(servers, number, order)
            if self._measured.partial is not None:
                return
            servers.release([later.setting.name for later in self._orders[number + 1 :]])

    def _is_time_up(self, seed: int, starting_s: float) -> bool:
        """Whether the round of ``seed`` is to be left out: it would take about as long as the longest so far, less the
        starts of servers."""
        now, minutes_max = time.monotonic(), self._plan.minutes_max
        self._round_s_max = max(self._round_s_max, now - self._round_started - starting_s + self._starting_s)
        self._round_started, self._starting_s = now, starting_s
        if minutes_max is None or now - self._started + self._round_s_max <= 60 * minutes_max:
            return False
        self._measured.notes.append(f"seeds from {seed} on were left out: with them it took over {minutes_max:g} min")
        return True

    def _one_pass(self, servers: Servers, number: int, order: Order) -> None:
        coming = [later.setting.name for later in self._orders[number + 1 :]]
        address = servers.address(order.setting, coming)
        workload = self._workloads[order.label, order.seed]
        if order.seed == self._plan.seeds[0]:
            self._measured.notes += [f"{order.label}: {note}" for note in workload.notes]
        if order.setting.base_url is not None:
            self._measured.notes.append(f"{order.setting.name} is a server that ran already, at {address.url}")
        if address.model not in self._measured.models:
            self._measured.models.append(address.model)
        run = self._sent(order, workload, address)
        self._measured.records += run.records
        if failed := next((record for record in run.records if record.outcome in FAILURES), None):
            self._measured.notes.append(f"{order.setting.name}, {order.label}: {failed.error}")
        self._measured.passes.append(Pass.of(run, order.label, order.setting.name, order.seed))
        self._say(
            f"{number + 1}/{len(self._orders)} {order.setting.name}, {order.label}, seed {order.seed}: {_told(run)}"
        )

    def _sent(self, order: Order, workload: Workload, address: Address) -> LoadRun:
        plan, name = self._plan, order.setting.name
        label = re.sub(r"[^a-z0-9]", "-", order.label)
        salt = f"{self._salt}-{label}-{order.seed}-" if plan.salted else ""
        manner = Manner(address.model, plan.vocab_size, plan.ignore_eos, salt=salt)
        progress = Progress(workload.request_count, f"{name} {order.label}")
        target, labels = Target(address.url, timeout_s=plan.timeout_s), Labels(name, order.label, order.seed)
        return drive(
            lambda: Driver(
                workload, target, manner, writer=self._folder.writer, progress=progress, labels=labels
            )
        )  # fmt: skip


def _told(run: LoadRun) -> str:
    answered = sum(record.ok for record in run.records)
    text = f"{answered} of {run.planned} answered in {run.wall_ns / 1e9:.1f} s"
    return text if run.partial is None else f"{text}; {run.partial}"


def default_folder() -> Path:
    """Where results go when nobody says: a folder of the current one that does not exist yet."""
    number = 1
    while (path := Path(f"bench-{number}")).exists():
        number += 1
    return path
