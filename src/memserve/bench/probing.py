"""Tries rates on running servers: the doing half of the capacity search (level 4)."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from memserve.bench.capacity import Capacity, Probe, judge, search
from memserve.bench.catalogue import Arrivals, Recipe, build
from memserve.bench.load.client import Target
from memserve.bench.load.driver import Driver, Labels, drive
from memserve.bench.load.progress import Progress
from memserve.bench.load.prompts import Manner
from memserve.bench.load.record import RecordWriter
from memserve.bench.metrics import Slo
from memserve.bench.servers import Servers
from memserve.bench.settings import Setting
from memserve.workloads.tokens import Meter
from memserve.workloads.words import Workload

SAMPLE_SESSIONS = 20
SALT_BYTES = 6
NO_MODEL = Manner("")
OVERTIME = 3.0
"""A probe is given up so many times ``probe_s`` after its last arrival: its queue did not drain."""


@dataclass(frozen=True, slots=True)
class Search:
    """What to search with. Every rate gets a sample of its own, so none finds the cache of the one before."""

    recipe: Recipe
    slo: Slo
    violations_max: float = 0.01
    start: float = 1.0
    precision: float = 0.1
    probe_s: float = 30.0
    """How long requests come at each rate."""
    serve_flags: tuple[str, ...] = ()
    manner: Manner = NO_MODEL
    """Its model is the server's."""
    meter: Meter | None = None


def search_capacity(plan: Search, setting: Setting, writer: RecordWriter, say: Callable[[str], None]) -> Capacity:
    """The capacity of one setting, on one server from the first rate to the last."""
    seeds, salt = itertools.count(plan.recipe.seed), secrets.token_hex(SALT_BYTES)
    ended: list[str] = []
    with Servers(plan.serve_flags, say) as servers:
        address = servers.address(setting)

        def try_rate(rate: float) -> Probe | None:
            seed = next(seeds)
            workload = workload_at(plan, rate, seed)
            progress = Progress(workload.request_count, f"{setting.name} at {rate:.2f}/s")
            labels = Labels(setting.name, f"{plan.recipe.kind} at {rate:.3f}/s", seed)
            manner = replace(plan.manner, model=address.model, salt=f"{salt}-{seed}-")
            limit_s = last_due_s(workload) + OVERTIME * plan.probe_s
            run = drive(
                lambda: Driver(
                    workload, Target(address.url), manner,
                    writer=writer, progress=progress, labels=labels, limit_s=limit_s,
                )
            )  # fmt: skip
            if run.partial is not None and not run.partial.startswith("time is up"):
                ended.append(run.partial)
                return None
            probe = judge(rate, run.records, plan.slo, plan.violations_max)
            if run.partial is not None:
                probe = replace(probe, borne=False, why=f"the queue did not drain in {limit_s:.0f} s")
            say(f"{setting.name} at {rate:.2f}/s: {'borne' if probe.borne else probe.why}")
            return probe

        lowest = 1 / plan.probe_s  # where less than a request comes, nothing queues
        found = search(setting.name, try_rate, start=plan.start, precision=plan.precision, lowest=lowest)
        return replace(found, partial=ended[0]) if ended else found


def last_due_s(workload: Workload) -> float:
    """When the last request is due; at low rates later than ``probe_s``, for some requests there must be."""
    return max(turn.due_s or 0.0 for session in workload.sessions for turn in session.turns)


def workload_at(plan: Search, rate: float, seed: int) -> Workload:
    """About ``probe_s`` seconds of requests at ``rate``."""
    sample = build(replace(plan.recipe, sessions=SAMPLE_SESSIONS, seed=seed), plan.meter)
    turns_mean = sample.request_count / len(sample.sessions)
    sessions = max(2, math.ceil(rate * plan.probe_s / turns_mean))
    timed = replace(plan.recipe, sessions=sessions, seed=seed, arrivals=Arrivals.POISSON, requests_per_s=rate)
    return build(timed, plan.meter)
