"""``memserve sim thrash``: more conversations than fit into memory, without and with admission and a store.

``memserve sim agents``: agents whose sessions do not all fit, and what is kept of them while their tools run.

``memserve sim layerkv``: LayerKV's figures from the production scheduler.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Admission
from memserve.base.units import NS_PER_S
from memserve.cli import flags as opt
from memserve_lab.cli.bench_load import Folder, command, parse_rates, run_study
from memserve_lab.cli.sim_run import Wanted

if TYPE_CHECKING:
    from memserve_lab.experiments.thrash import Contender


PATIENT = Wanted(
    "colocated=1",
    kv_blocks=3200,
    cluster=ClusterConfig(admission=AdmissionConfig(waiting_max=4096, wait_ns=60 * NS_PER_S)),
)
"""Clients wait for admission rather than being rejected: what is counted is the work that is done."""
STORE_MULTIPLE = 8
"""Without --store the store's memory holds so many times the KV of all instances: every conversation that is tried."""


@opt.grouped
def thrash(
    *,
    wanted: Annotated[
        Wanted,
        opt.Only(
            "instances",
            "model",
            "device",
            "profile",
            "kv_blocks",
            "block_tokens",
            "dram_memory_bytes",
            "heartbeat_ms",
            "store_bytes",
            "ssd_bytes",
            "store_count",
            "ssd_device",
            "ssd_sync",
            "ssd_writes_per_day_bytes",
            "ssd_admission",
            "policy",
            "caching",
            "waiting_max",
            "wait_ns",
        ),
    ] = PATIENT,
    multiples: Annotated[
        str, typer.Option(help="Clients to try, in multiples of the conversations that fit into HBM.")
    ] = "1,2,3,4,6,8",
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 6,
    first_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a conversation's first prompt.")] = 4000,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each further turn adds.")] = 500,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    warm_s: Annotated[float, typer.Option(min=0, help="Virtual seconds before anything is counted.")] = 40.0,
    measured_s: Annotated[float, typer.Option(min=1, help="Virtual seconds that are counted.")] = 60.0,
    out: Folder = None,
) -> None:
    """Requests a second and hit rate with 1 to 8 times the conversations that fit into memory.

    Four settings: as given, with --admission cache, with a store, with both. Clients ask the next turn as soon as the
    last answer has ended.
    """
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.thrash import Plan, Talk, ThrashResults, ThrashStudy

    talk = Talk(turns, first_tokens, turn_tokens, answer_tokens)
    plan = Plan(contenders_of(wanted), read_multiples(multiples), talk, warm_s, measured_s)
    machine = wanted.make_machine().name
    study = ThrashStudy(plan, ThrashResults(command=command(), machine={"simulated": f"{wanted.instances}, {machine}"}))
    run_study(study, RunFolder(out))


def contenders_of(simulation: Wanted) -> tuple[Contender, ...]:
    """The four settings. The store has the memory that is asked for, or enough for all conversations."""
    from memserve_lab.experiments.thrash import Contender

    plain = dataclasses.replace(simulation, stores=type(simulation.stores)()).make_setup()
    stores = simulation.stores
    if not stores.is_wanted:
        kv_bytes = plain.machine.hbm_blocks * plain.machine.geometry.block_bytes * sum(plain.instances.values())
        stores = dataclasses.replace(stores, store_bytes=STORE_MULTIPLE * kv_bytes)
    admission = dataclasses.replace(plain.cluster.admission, mode=Admission.CACHE)
    gated = dataclasses.replace(plain, cluster=dataclasses.replace(plain.cluster, admission=admission))
    store_setup = stores.make_setup()
    return (
        Contender("as it is", plain),
        Contender("--admission cache", gated),
        Contender("store", dataclasses.replace(plain, stores=store_setup)),
        Contender("store, --admission cache", dataclasses.replace(gated, stores=store_setup)),
    )


def read_multiples(text: str) -> tuple[float, ...]:
    """``1,2,4``, in rising order. Raises :class:`UserError` for anything else."""
    try:
        multiples = sorted({float(part) for part in text.split(",")})
    except ValueError:
        multiples = []
    if not multiples or not 0 < multiples[0] <= multiples[-1] < 1e4:
        raise UserError(f"cannot read {text!r} as multiples", hint="for example --multiples 1,2,4,8")
    return tuple(multiples)


AGENTS = Wanted(model="llama-3-8b", device="h100")
GAPS_DEFAULT = "tools,two-kinds"
SHARES_DEFAULT = "0.25,0.33,0.5"


@opt.grouped
def agents(
    *,
    wanted: Annotated[Wanted, opt.Only("model", "device", "profile", "block_tokens")] = AGENTS,
    gaps: Annotated[str, typer.Option(help="How long tools take: tools, two-kinds, any, against.")] = GAPS_DEFAULT,
    shares: Annotated[str, typer.Option(help="KV memory, as a share of the open sessions' whole KV.")] = SHARES_DEFAULT,
    users: Annotated[int, typer.Option(min=1, help="Sessions that are open at a time.")] = 18,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions in all.")] = 54,
    turns: Annotated[int, typer.Option(min=1, help="Median turns of a session.")] = 12,
    first_tokens: Annotated[int, typer.Option(min=16, help="Median tokens of a session's first prompt.")] = 20_000,
    seeds: Annotated[int, typer.Option(min=1, help="Workloads to average over.")] = 1,
    out: Folder = None,
) -> None:
    """Session times and hit rates of agents, by what is kept of sessions while their tools run.

    Four rules: an unlimited cache, the order of last use, CacheTTL (Continuum, arXiv 2511.02230), and
    --keep-tool-prefixes auto. Gaps by tool, and of two kinds, can be learnt; "any" and "against" cannot.
    """
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.agents import AgentResults, AgentStudy, Plan
    from memserve_lab.workloads.agents import AgentShape

    machine = wanted.make_machine()
    shape = AgentShape(turns=turns, first_tokens=first_tokens)
    names = tuple(name.strip() for name in gaps.split(","))
    plan = Plan(machine, names, read_multiples(shares), shape=shape, users=users, sessions=sessions, seeds=seeds)
    study = AgentStudy(plan, AgentResults(command=command(), machine={"simulated": f"one instance, {machine.name}"}))
    run_study(study, RunFolder(out))


FIGURES = ("context", "devices", "rate", "stagger", "orbitflow")
DEFAULT_FIGURES = FIGURES[:3]


def layerkv(
    *,
    figures: Annotated[str, typer.Option(help=f"What to sweep: {', '.join(FIGURES)}.")] = ",".join(DEFAULT_FIGURES),
    device: Annotated[str, typer.Option(help="Device of each instance: l20, as in the paper, or h200 ...")] = "l20",
    rates: Annotated[str, typer.Option(help="Requests a second of the sweep of rates.")] = "4,5,5.5,6,7,8,10",
    requests: Annotated[int, typer.Option(min=20, help="Requests of each point; of long prompts a quarter.")] = 400,
    settings: Annotated[str, typer.Option(help="Settings whose names have one of these words. Empty: all.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    out: Folder = None,
) -> None:
    """Time to the first token, throughput and missed objectives by context, devices and rate: LayerKV's evaluation.

    KV by request beside KV by layer, as published and as ``--layerwise prompts-first`` does it, in the scheduler that
    serves.
    """
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.layerkv import LayerKvResults, LayerKvStudy, Plan, contenders, sweeps_of

    names = [name.strip() for name in figures.split(",")]
    if unknown := [name for name in names if name not in FIGURES]:
        raise UserError(f"unknown figure {unknown[0]!r}", hint=f"some of {', '.join(FIGURES)}")
    words = [word.strip() for word in settings.split(",") if word.strip()]
    contenders_chosen = [
        contender for contender in contenders() if not words or any(word in contender.name for word in words)
    ]
    if not contenders_chosen:
        hint = "words of: " + ", ".join(contender.name for contender in contenders())
        raise UserError(f"no setting has {settings!r} in its name", hint=hint)
    plan = Plan(sweeps_of(names, parse_rates(rates)), tuple(contenders_chosen), device, requests, seed)
    results = LayerKvResults(command=command(), machine={"simulated": f"one instance of {device}, its roofline"})
    run_study(LayerKvStudy(plan, results), RunFolder(out))
