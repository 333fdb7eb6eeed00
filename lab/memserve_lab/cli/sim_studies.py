"""``memserve sim thrash``: more conversations than fit into memory, without and with admission and a store.

``memserve sim agents``: agents whose sessions do not all fit, and what is kept of them while their tools run.

``memserve sim layerkv``: LayerKV's figures from the production scheduler.

``memserve sim memserve``: MemServe's figures from the production machines.

``memserve sim paging``: KV memory in blocks beside memory that is reserved, PagedAttention's comparison.

``memserve sim routers``: the router beside single policies and other projects' rules, on traces.

``memserve sim ratios``: what others have published, in settings of like shape.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Admission
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.cli import flags as opt
from memserve_lab.cli.bench_load import Data, Folder, command, existing, parse_rates, run_study
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


PAPER_MACHINE = Wanted(model="llama-2-13b", device="h800x2", block_tokens=16)


@opt.grouped
def memserve(
    *,
    figures: Annotated[str, typer.Option(help="What to run: 8, 12, 14, goodput.")] = "8,12,14,goodput",
    workloads: Annotated[
        str, typer.Option(help="Of figure 8 and of goodput: chat, documents, react, uniform, long.")
    ] = "chat,documents,react",
    settings: Annotated[
        str, typer.Option(help="Settings, e.g. 3PD/prefill-first,3PD/chunk-512,1P2D-CC. Empty: those of each figure.")
    ] = "",
    wanted: Annotated[Wanted, opt.Only("model", "device", "profile", "kv_blocks", "block_tokens")] = PAPER_MACHINE,
    step_ms: Annotated[
        float | None, typer.Option(min=0, help="Milliseconds of a step beside computing. None: the device's.")
    ] = None,
    rates: Annotated[
        str, typer.Option(help="Requests a second for each instance. Empty: those of each workload.")
    ] = "",
    share_ratios: Annotated[str, typer.Option(help="Of figure 14: how often each session comes.")] = "1,2,4",
    slo_ttft_ms: Annotated[float, typer.Option("--slo-ttft-ms", min=1, help="Objective: time to first token.")] = 500,
    slo_tpots_ms: Annotated[
        str, typer.Option("--slo-tpots-ms", help="Objectives of goodput: time of a token; one search for each.")
    ] = "10,15,25,50",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds for which requests arrive at each point.")] = 40,
    data: Data = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    out: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """MemServe's evaluation: disaggregation and caching, transfer modes, policies, and rates within objectives.

    Rates are per instance. The baseline, ``prefill-first``, makes steps as vLLM 0.4.0 did.
    """
    from memserve_lab.bench.settings import parse_numbers
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.evaluations.memserve import MemservePlan, contender
    from memserve_lab.experiments.evaluations.memserve_report import (
        MemserveResults,
        MemserveStudy,
        figures_named,
        workloads_named,
    )
    from memserve_lab.sim.hardware import with_step_ns

    plain = wanted.make_machine()
    machine = plain if step_ms is None else with_step_ns(plain, round(step_ms * NS_PER_MS))
    plan = MemservePlan(
        machine,
        figures_named(figures),
        workloads_named(workloads),
        tuple(contender(name.strip()) for name in settings.split(",") if name.strip()),
        parse_rates(rates) if rates else (),
        parse_numbers(share_ratios, "--share-ratios", "share ratios", 1.0),
        tuple(ms * NS_PER_MS / NS_PER_S for ms in parse_numbers(slo_tpots_ms, "--slo-tpots-ms", "objectives", 0.1)),
        slo_ttft_ms * NS_PER_MS / NS_PER_S,
        seconds,
        seed,
        existing(data),
    )
    study = MemserveStudy(plan, MemserveResults(command=command(), machine={"simulated": f"each: {machine.name}"}))
    run_study(study, RunFolder(out), as_json=as_json)


SLIDES_MACHINE = Wanted(model="opt-13b", device="a100-40gb", block_tokens=16, kv_blocks=991)
"""13 GB of KV: a third of the device, as the slides say."""


@opt.grouped
def paging(
    *,
    workloads: Annotated[str, typer.Option(help="Lengths of requests: sharegpt, alpaca.")] = "sharegpt,alpaca",
    ways: Annotated[str, typer.Option(help="static batches, max, pow2, oracle, blocks; empty: all of them.")] = "",
    wanted: Annotated[Wanted, opt.Only("model", "device", "profile", "kv_blocks", "block_tokens")] = SLIDES_MACHINE,
    requests: Annotated[
        int, typer.Option(min=20, help="Requests of each run, and ten times as many short ones.")
    ] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    out: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """Share of KV memory that holds tokens, sequences at once and throughput: blocks beside reserved pieces.

    PagedAttention's comparison: what Orca and FasterTransformer reserve, in the scheduler that serves.
    """
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.evaluations.paging import LENGTHS, WAYS, PagingPlan, PagingResults, PagingStudy

    names = tuple(dict.fromkeys(name.strip() for name in workloads.split(",")))
    way_names = tuple(dict.fromkeys(way.strip() for way in ways.split(",") if way.strip())) or WAYS
    for name, choices in (*((name, LENGTHS) for name in names), *((way, WAYS) for way in way_names)):
        if name not in choices:
            raise UserError(f"unknown {name!r}", hint=f"some of {', '.join(choices)}")
    machine = wanted.make_machine()
    plan = PagingPlan(machine, names, way_names, requests, seed)
    results = PagingResults(command=command(), machine={"simulated": f"one instance, {machine.name}"})
    run_study(PagingStudy(plan, results), RunFolder(out), as_json=as_json)


TRACES = "conversation,synthetic,toolagent,agentic"


def routers(
    *,
    traces: Annotated[
        str, typer.Option(help="conversation, synthetic, toolagent, agentic; azure-conv, azure-code, servegen.")
    ] = TRACES,
    policies: Annotated[
        str, typer.Option(help="Of least-load, session, prompt-tree, dynamo, llm-d, cost (empty: these).")
    ] = "",
    load: Annotated[float, typer.Option(min=0.01, help="Times the speed at which each trace is played.")] = 1.0,
    data: Data = None,
    out: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """Time to the first token by routing rule, on real traces: ours beside single policies, Dynamo's and llm-d's.

    Each rule with prefixes that instances take from each other, and without. A trace that --data lacks is left out,
    with the reason.
    """
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.evaluations.routers import (
        CASES,
        POLICIES,
        RouterPlan,
        RouterResults,
        RouterStudy,
    )

    names = tuple(dict.fromkeys(name.strip() for name in traces.split(",")))
    rules = tuple(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip())) or POLICIES
    for name, choices in (*((name, tuple(CASES)) for name in names), *((rule, POLICIES) for rule in rules)):
        if name not in choices:
            raise UserError(f"unknown {name!r}", hint=f"some of {', '.join(choices)}")
    results = RouterResults(command=command(), machine={"simulated": "six instances, their rooflines"})
    run_study(RouterStudy(RouterPlan(names, rules, existing(data), load), results), RunFolder(out), as_json=as_json)


def ratios(
    *,
    cases: Annotated[str, typer.Option(help="precise, store.")] = "precise,store",
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second of precise.")] = 18.0,
    users: Annotated[int, typer.Option(min=2, help="Agents at a time, of store.")] = 24,
    share: Annotated[float, typer.Option(min=0.01, help="Of their sessions whose KV fits into HBM.")] = 0.25,
    turns: Annotated[int, typer.Option(min=1, help="Median turns of a session.")] = 12,
    first_tokens: Annotated[int, typer.Option(min=16, help="Median tokens of a session's first prompt.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    out: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """Ratios that others have published: precise routing (llm-d), and a store for agents (vLLM with Mooncake)."""
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.evaluations.ratios import CASES, RatioPlan, RatioResults, RatioStudy

    names = tuple(dict.fromkeys(name.strip() for name in cases.split(",")))
    if unknown := [name for name in names if name not in CASES]:
        raise UserError(f"unknown case {unknown[0]!r}", hint=f"some of {', '.join(CASES)}")
    plan = RatioPlan(names, rate, users, share, turns, first_tokens, seed)
    results = RatioResults(command=command(), machine={"simulated": "instances of h100, their rooflines"})
    run_study(RatioStudy(plan, results), RunFolder(out), as_json=as_json)
