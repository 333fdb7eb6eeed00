"""``memserve sim memserve``: MemServe's section 8 with its model on its devices, from the production machines.

A setting has the paper's name (``3PD``, ``1P2D-CC``, ``3P1D-CC/session``: :mod:`memserve_lab.bench.settings`), and may
say how its instances make steps::

    3PD                      prompts fill what decodes leave of a step (chunked prefill), 4,096 tokens a step
    3PD/chunk-512            the same, 512 tokens a step
    3PD/prefill-first        whole prompts alone, while decodes wait: vLLM 0.4.0, the paper's baseline
    3P1D-CC/session/no-fetch instances take no prefix from each other, as in the paper

Rates are per instance, as in the paper: a setting of three instances gets three times as many requests a second. All
settings get the same requests at the same times. ``goodput`` is DistServe's: the largest rate at which nine of ten
requests meet both objectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memserve.base.config import AdmissionConfig, ClusterConfig, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.options import with_values
from memserve.base.types import Caching, TransferPolicy
from memserve.base.units import NS_PER_S
from memserve_lab.bench.capacity import Probe, judge, search
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.bench.load.prompts import RequestRecord
from memserve_lab.bench.metrics import Figures, Slo, figures
from memserve_lab.bench.settings import kind_of, parse_setting
from memserve_lab.cli.sim_results import record_of
from memserve_lab.sim.hardware import Machine
from memserve_lab.sim.other_routers import RuledWorld
from memserve_lab.sim.replay.setup import Setup, parse_instances
from memserve_lab.sim.replay.world import ReplayWorld, usage
from memserve_lab.workloads.arrivals import Poisson, by_request, draws, lognormal_count
from memserve_lab.workloads.records import Blocks, Session, Span, Turn, Workload

STEP_TOKENS = 4096
"""Of one step: vLLM's ``max_num_batched_tokens`` for a model with a context of 4,096."""
PREFILL_FIRST, NO_FETCH, CHUNK = "prefill-first", "no-fetch", "chunk-"
CHAT, DOCUMENTS, REACT, UNIFORM, LONG = "chat", "documents", "react", "uniform", "long"
WORKLOADS = (CHAT, DOCUMENTS, REACT)
TURNS = {DOCUMENTS: 5, REACT: 4, UNIFORM: 1}
"""Requests of a session, about."""
CHAT_CONTEXT = 4000
LONG_TOKENS, LONG_ANSWER = 8000, 200
BLOCK_TOKENS = 16
SHARE_SESSIONS = 80
"""MemServe 8.4: 80 sessions of LooGLE, roughly 250 requests."""
ATTAINED = 0.9
"""Share of requests that meet the objectives at a rate that counts (DistServe)."""
PRECISION = 0.12
"""Relative precision of the rates of ``goodput``."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One setting."""

    name: str
    instances: str
    """As ``--instances`` has it."""
    count: int
    cluster: ClusterConfig
    scheduler: SchedulerConfig
    fetches: bool = True


def contender(name: str) -> Contender:
    """The setting of that name (see the module). Raises :class:`UserError` for an unknown one."""
    words = name.split("/")
    rest = [word for word in words if word not in (PREFILL_FIRST, NO_FETCH) and not word.startswith(CHUNK)]
    setting = parse_setting("/".join(rest), 1)
    flags = dict(zip(setting.flags[::2], setting.flags[1::2], strict=True))
    roles = {"prefill": "--prefill", "decode": "--decode", "colocated": "--colocated"}
    instances = ",".join(f"{role}={flags[flag]}" for role, flag in roles.items() if flag in flags)
    patient = AdmissionConfig(waiting_max=1_000_000, wait_ns=10_000 * NS_PER_S)
    cluster = ClusterConfig(
        Caching(flags["--caching"]), flags.get("--policy", "prompt-tree"), admission=patient,
        stalled_after_ns=100_000 * NS_PER_S,
    )  # fmt: skip
    if "--transfer" in flags:
        cluster = with_values(cluster, {("transfer",): TransferPolicy(flags["--transfer"])})
    return Contender(name, instances, setting.instances, cluster, scheduler_of(words), NO_FETCH not in words)


def scheduler_of(words: Sequence[str]) -> SchedulerConfig:
    """How instances make steps. Raises :class:`UserError` where a chunk has no size."""
    chunk = next((word.removeprefix(CHUNK) for word in words if word.startswith(CHUNK)), str(STEP_TOKENS))
    if not chunk.isdecimal() or not int(chunk):
        raise UserError(f"cannot read {CHUNK}{chunk}", hint=f"for example {CHUNK}512: tokens of a step")
    options = SchedulerConfig(max_running=256, max_step_tokens=int(chunk), max_waiting=1_000_000)
    if PREFILL_FIRST in words:  # vLLM 0.4.0 also made no step before the last one had ended
        return dataclasses.replace(options, scheduling=PREFILL_FIRST, steps_in_flight=1)
    return options


# -- what is sent


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent to each setting."""

    kind: str
    seconds: float
    """How long requests arrive."""
    sessions: int | None = None
    """None: as many as arrive in that time."""
    share_ratio: float = 1.0
    seed: int = 0
    data: Path | None = None

    def _build(self, requests: int) -> Workload:
        """About ``requests`` requests, without times."""
        if self.kind == CHAT:
            return chats(requests, self.seed)
        if self.kind == LONG:
            return long_prompts(requests, self.seed)
        sessions = self.sessions or max(2, requests // TURNS[self.kind])
        recipe = Recipe(
            kind=kind_of(self.kind), data=self.data, sessions=sessions, share_ratio=self.share_ratio, seed=self.seed,
            arrivals=Arrivals.RECORDED,
        )  # fmt: skip
        return build(recipe)

    def at_rate(self, requests_per_s: float) -> Workload:
        """The requests at points of a Poisson process, which any session takes that has one left."""
        workload = self._build(max(8, round(requests_per_s * self.seconds)))
        return by_request(workload, Poisson(requests_per_s), seed=self.seed, overlap=len(workload.sessions))


def chats(requests: int, seed: int) -> Workload:
    """ShareGPT-like: sessions of some turns, questions of 60 and answers of 200 tokens at the median, histories with
    the answers that were given; together as much as the context takes."""
    sessions: list[Session] = []
    count, first = 0, 0
    while count < requests:
        rng, turns, context = draws(seed, "chats", len(sessions)), [], 0
        for _ in range(lognormal_count(rng, median=3, spread=0.7, at_most=12)):
            question = lognormal_count(rng, median=60, spread=1.2, at_most=2000)
            answer = 1 + lognormal_count(rng, median=200, spread=0.9, at_most=1000)
            context += question + answer
            if context > CHAT_CONTEXT:
                break
            turns.append(Turn(Blocks(BLOCK_TOKENS, (Span(first, question),)), answer))
            first += -(-question // BLOCK_TOKENS)
        if turns:
            sessions.append(Session(f"chat-{len(sessions)}", tuple(turns)))
            count += len(turns)
    return Workload(CHAT, "generated, lengths like ShareGPT's", tuple(sessions))


def long_prompts(requests: int, seed: int) -> Workload:
    """Prompts of 8,000 and answers of 200 tokens at the median, which share nothing."""
    sessions, first = [], 0
    for number in range(requests):
        rng = draws(seed, "long", number)
        prompt = lognormal_count(rng, median=LONG_TOKENS, spread=0.5, at_most=6 * LONG_TOKENS)
        answer = 1 + lognormal_count(rng, median=LONG_ANSWER, spread=0.6, at_most=1000)
        sessions.append(Session(f"long-{number}", (Turn(Blocks(BLOCK_TOKENS, (Span(first, prompt),)), answer),)))
        first += -(-prompt // BLOCK_TOKENS)
    return Workload(LONG, "generated", tuple(sessions))


# -- one run


@dataclass(frozen=True, slots=True)
class RunPoint:
    """One setting under one load. Times are seconds."""

    figure: str
    workload: str
    setting: str
    at: float
    """Requests a second for each instance; in figure 14, the share ratio."""
    requests: int
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    gap_p99_s: float
    """Between two tokens."""
    jct_mean_s: float
    jct_p99_s: float
    cached_share: float
    busy_share: float
    attained: float
    """Share of requests that meet the objectives."""


def replay(machine: Machine, entry: Contender, workload: Workload) -> ReplayWorld:
    """A world that has run ``workload``. Raises :class:`UserError` where a request was not answered."""
    setup = Setup(parse_instances(entry.instances), machine, entry.cluster, entry.scheduler)
    world = RuledWorld(setup, workload, fetches=entry.fetches)
    world.run_workload()
    if failed := [served for served in world.clients.served if not served.answered]:
        why = failed[0].error or failed[0].finish
        raise UserError(f"{len(failed)} requests of {entry.name} were not answered: {why}")
    return world


def records_of(world: ReplayWorld, entry: Contender) -> list[RequestRecord]:
    """A record of each request."""
    return [record_of(served, entry.name, "", 0) for served in world.clients.served]


def measure_point(
    figure: str, machine: Machine, entry: Contender, load: Load, place: float, rate: float, slo: Slo
) -> RunPoint:
    """Simulate one setting at ``rate`` requests a second for each instance."""
    world = replay(machine, entry, load.at_rate(rate * entry.count))
    return point_of(
        figure, load.kind, entry, place, figures(records_of(world, entry), slo=slo), usage(world).busy_share
    )


def point_of(figure: str, workload: str, entry: Contender, place: float, summary: Figures, busy: float) -> RunPoint:
    """The figures of one run."""
    ttft, tpot, itl, jct = summary.ttft_s, summary.tpot_s, summary.itl_s, summary.jct_s
    if ttft is None or tpot is None or itl is None or jct is None:
        raise UserError(f"{entry.name} has answered nothing of more than one token", hint="send more requests")
    return RunPoint(
        figure, workload, entry.name, place, summary.requests, ttft.mean, ttft.p99, tpot.mean, tpot.p99, itl.p99,
        jct.mean, jct.p99, summary.cached_share, busy, 1 - summary.slo_violations,
    )  # fmt: skip


# -- goodput


@dataclass(frozen=True, slots=True)
class GoodputPoint:
    """The largest rate of one setting within objectives."""

    workload: str
    setting: str
    tpot_s: float
    """Objective; that of the first token is the run's."""
    rate: float
    """Requests a second for each instance. 0: none was met."""
    tried: int


def measure_goodputs(
    machine: Machine, entry: Contender, load: Load, slos: Sequence[Slo], start: float
) -> list[GoodputPoint]:
    """For each of ``slos``, search the largest rate at which nine of ten requests meet it, and the queue stays bounded.

    What one search has simulated, the next ones use.
    """
    simulated: dict[float, list[RequestRecord]] = {}
    points = []
    for slo in slos:

        def try_rate(rate: float, slo: Slo = slo) -> Probe:
            if rate not in simulated:
                simulated[rate] = records_of(replay(machine, entry, load.at_rate(rate * entry.count)), entry)
            return judge(rate, simulated[rate], slo, 1 - ATTAINED)

        capacity = search(entry.name, try_rate, start=start, precision=PRECISION, lowest=start / 8)
        points.append(
            GoodputPoint(load.kind, entry.name, slo.tpot_s or 0.0, capacity.rate or 0.0, len(capacity.probes))
        )
    return points


@dataclass(frozen=True, slots=True)
class MemservePlan:
    """The options of a run."""

    machine: Machine
    figures: tuple[str, ...]
    workloads: tuple[str, ...]
    settings: tuple[Contender, ...] = ()
    """None: those of each figure."""
    rates: tuple[float, ...] = ()
    """Requests a second for each instance. None: those of each workload."""
    share_ratios: tuple[float, ...] = (1.0, 2.0, 4.0)
    tpots_s: tuple[float, ...] = ()
    """Objectives of ``goodput``."""
    ttft_s: float = 0.5
    """Objective."""
    seconds: float = 40.0
    """How long requests arrive at each point."""
    seed: int = 0
    data: Path | None = field(default=None)
