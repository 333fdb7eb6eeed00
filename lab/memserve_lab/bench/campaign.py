"""Settings side by side: every workload on every setting, seed by seed.

Passes are interleaved: a workload goes to one setting after the other, in another order for each seed, so that a busy
minute of the machine affects no setting alone. Seeds run round after round: a run that ends early has equal numbers of
passes from all settings, except for the last round.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memserve_lab.bench.catalogue import build
from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import Labels, LoadRun, send
from memserve_lab.bench.load.prompts import VOCAB_SIZE_DEFAULT, Manner, Outcome, RequestRecord
from memserve_lab.bench.results import Label, Pass
from memserve_lab.bench.servers import Address, Servers
from memserve_lab.bench.settings import Comparison, Setting
from memserve_lab.bench.study import RunFolder, Tell
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.tokens import Meter

SALT_BYTES = 6
FAILURES = (Outcome.REFUSED, Outcome.BROKEN, Outcome.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    comparisons: tuple[Comparison, ...]
    seeds: tuple[int, ...] = (0,)
    serve_flags: tuple[str, ...] = ()
    """Flags of every server that the run starts."""
    ignore_eos: bool = True
    vocab_size: int = VOCAB_SIZE_DEFAULT
    timeout_s: float = 600.0
    minutes_max: float | None = None
    """A seed that would not end within this time is not started. None: no limit."""
    meter: Meter | None = None
    """Counts the tokens of texts. None: four bytes a token."""
    salted: bool = True
    """Every pass has its own ``cache_salt``."""


@dataclass(frozen=True, slots=True)
class Order:
    """One planned pass."""

    seed: int
    label: str
    setting: Setting


@dataclass(slots=True)
class Measured:
    """Results, which grow as the plan is carried out."""

    records: list[RequestRecord] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    """The servers' names of what they serve."""


Workloads = dict[tuple[str, int], Workload]
"""``(label, seed)`` -> the workload."""


def build_all(plan: Plan) -> Workloads:
    """Every workload of the plan. Raises :class:`UserError` for data that cannot be read."""
    recipes = [item for comparison in plan.comparisons for item in comparison.recipes.items()]
    return {
        (label, seed): build(replace(recipe, seed=seed), plan.meter) for seed in plan.seeds for label, recipe in recipes
    }


def orders_of(plan: Plan) -> list[Order]:
    """All passes, in order."""
    return [
        Order(seed, label, setting)
        for number, seed in enumerate(plan.seeds)
        for comparison in plan.comparisons
        for label in comparison.recipes
        for setting in _rotated(comparison.settings, number)
    ]


def _rotated(settings: Sequence[Setting], by: int) -> list[Setting]:
    by %= max(1, len(settings))
    return [*settings[by:], *settings[:by]]


def measure(plan: Plan, workloads: Workloads, folder: RunFolder, tell: Tell, measured: Measured) -> None:
    """Carry out the plan; it ends after a pass that ends early.

    Raises :class:`UserError` when a server does not start, and ``KeyboardInterrupt``.
    """
    campaign = _Campaign(plan, workloads, folder, tell, measured)
    with Servers(plan.serve_flags, tell) as servers:
        try:
            campaign.all_passes(servers)
        finally:
            measured.notes += servers.notes


class _Campaign:
    """A plan under way."""

    def __init__(self, plan: Plan, workloads: Workloads, folder: RunFolder, tell: Tell, measured: Measured) -> None:
        self._plan, self._workloads, self._folder, self._tell = plan, workloads, folder, tell
        self._orders, self._measured = orders_of(plan), measured
        self._started = self._round_started = time.monotonic()
        self._round_s_max = self._starting_s = 0.0
        self._salt = secrets.token_hex(SALT_BYTES)

    def all_passes(self, servers: Servers) -> None:
        """Run all passes, until one ends early or time is up."""
        seed = None
        for number, order in enumerate(self._orders):
            if order.seed != seed:
                if seed is not None and self._is_time_up(order.seed, servers.starting_s):
                    return
                seed = order.seed
            if self._one_pass(servers, number, order) is not None:
                return
            servers.end_unneeded([later.setting.name for later in self._orders[number + 1 :]])

    def _is_time_up(self, seed: int, starting_s: float) -> bool:
        """Whether to leave out the round of ``seed``: it would take about as long as the longest round so far, not
        counting the starts of servers."""
        now, minutes_max = time.monotonic(), self._plan.minutes_max
        self._round_s_max = max(self._round_s_max, now - self._round_started - starting_s + self._starting_s)
        self._round_started, self._starting_s = now, starting_s
        if minutes_max is None or now - self._started + self._round_s_max <= 60 * minutes_max:
            return False
        self._measured.notes.append(f"seeds from {seed} on were left out: with them it took over {minutes_max:g} min")
        return True

    def _one_pass(self, servers: Servers, number: int, order: Order) -> str | None:
        """Why the pass ended early. None: the pass is complete."""
        coming = [later.setting.name for later in self._orders[number + 1 :]]
        address = servers.address_of(order.setting, coming)
        workload = self._workloads[order.label, order.seed]
        if order.seed == self._plan.seeds[0]:
            label = Label.parse(order.label)
            name = Label(label.kind, label.ratio)  # a rate changes no note
            self._measured.notes += [f"{name}: {note}" for note in workload.notes]
        if order.setting.base_url is not None:
            self._measured.notes.append(f"{order.setting.name} is a server that ran already, at {address.url}")
        if address.model not in self._measured.models:
            self._measured.models.append(address.model)
        run = self._send_pass(order, workload, address)
        self._measured.records += run.records
        if failed := next((record for record in run.records if record.outcome in FAILURES), None):
            self._measured.notes.append(f"{order.setting.name}, {order.label}: {failed.error}")
        self._measured.passes.append(Pass.of(run, order.label, order.setting.name, order.seed))
        of = f"{number + 1}/{len(self._orders)}"
        self._tell(f"{of} {order.setting.name}, {order.label}, seed {order.seed}: {_told(run)}")
        return run.partial

    def _send_pass(self, order: Order, workload: Workload, address: Address) -> LoadRun:
        plan, name = self._plan, order.setting.name
        label = re.sub(r"[^a-z0-9]", "-", order.label)
        salt = f"{self._salt}-{label}-{order.seed}-" if plan.salted else ""
        manner = Manner(address.model, plan.vocab_size, plan.ignore_eos, salt=salt)
        target, labels = Target(address.url, timeout_s=plan.timeout_s), Labels(name, order.label, order.seed)
        return send(workload, target, manner, labels, writer=self._folder.writer)


def _told(run: LoadRun) -> str:
    answered = sum(record.ok for record in run.records)
    text = f"{answered} of {run.planned} answered in {run.wall_ns / 1e9:.1f} s"
    return text if run.partial is None else f"{text}; {run.partial}"
