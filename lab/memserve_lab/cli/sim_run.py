"""``memserve sim run``: a workload on a simulated cluster."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.base.config import ClusterConfig, EngineOptions, MemberConfig, SchedulerConfig
from memserve.base.deployment import ScalingOptions
from memserve.base.errors import UserError
from memserve.base.options import SIZE, option
from memserve.base.types import AS_COMPUTED, KV_DTYPES
from memserve.base.units import NS_PER_MS
from memserve.cli import flags as opt
from memserve_lab.cli.bench_load import SloJct, read_slo
from memserve_lab.cli.sim_store import SimulatedStores, tell_hits, tell_stores
from memserve_lab.sim.hardware import BLOCK_TOKENS
from memserve_lab.sim.replay.lengths import LengthStudy
from memserve_lab.sim.replay.setup import GPU_SCHEDULER

if TYPE_CHECKING:
    from memserve_lab.bench.catalogue import Recipe
    from memserve_lab.cli.sim_results import Simulated
    from memserve_lab.sim.hardware import Machine
    from memserve_lab.sim.replay.setup import Setup
    from memserve_lab.workloads.records import Workload


Out = Annotated[Path | None, typer.Option(help="Folder for records, results, report, timeline and plots.")]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadFlags:
    """The workload: its sessions, and when their requests arrive."""

    workload: str = option("chat")
    """A name of ``memserve bench workload``, e.g. chat, trace, agentic."""
    trace: Path | None = option(None)
    """A trace in Mooncake's form, or your own JSONL of sessions."""
    data: Path | None = option(None)
    """Folder of data sets. None: workloads are made from the seed."""
    sessions: int | None = option(None, least=1)
    """Sessions to sample, generate, or take from a trace. None: all of them."""
    rate: float | None = option(None, least=0.001)
    """Requests per second (Poisson). None: recorded times."""
    speed: float = option(1.0, least=0.001)
    """Speed-up of recorded times."""
    seed: int = option(0, least=0)
    """Seed of the workload."""

    def make_recipe(self) -> Recipe:
        """How the workload is made."""
        from memserve_lab.bench.catalogue import Arrivals, Recipe
        from memserve_lab.bench.settings import kind_of

        kind = "file" if self.trace is not None else kind_of(self.workload)
        arrivals = Arrivals.RECORDED if self.rate is None else Arrivals.POISSON
        return Recipe(
            kind=kind, data=self.data, file=self.trace, sessions=self.sessions, seed=self.seed, arrivals=arrivals,
            requests_per_s=self.rate or 1.0, speed=self.speed,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The simulated cluster as the options describe it; :meth:`make_setup` checks them."""

    instances: str = option("prefill=1,decode=1")
    """Instances of each role, e.g. prefill=2,decode=6 or colocated=8."""
    routers: int = option(1, least=1)
    """Routers, over which connections are spread by chance, from the seed."""
    model: str = option("llama-3-8b")
    """A model by name, e.g. llama-3-8b."""
    device: str = option("h100")
    """Device of each instance: h100, h200, h800, a100, l40s or cpu; several: h100x4."""
    profile: Path | None = option(None)
    """Output of ``memserve profile``, saved or --json. Replaces --device."""
    kv_blocks: int | None = option(None, least=2)
    """Blocks of KV in HBM. None: as many as fit beside the weights."""
    block_tokens: int = option(BLOCK_TOKENS, least=1)
    """Tokens of a block of KV. Larger blocks are quicker to simulate. With --device; a profile has its own."""
    dram_memory_bytes: int = option(0, "--dram-memory", form=SIZE)
    """Second tier of each instance, e.g. 64GiB. 0: no second tier."""
    stores: SimulatedStores = dataclasses.field(default_factory=SimulatedStores)
    """What keeps KV beside the instances."""
    faults: str = option("")
    """KIND:INSTANCE@SECOND+SECONDS, e.g. kill:c0@60+10,pause:c1@5+2,slow:c2@20+5x3 (3 times as slow); of several
    routers all but the first can be killed or paused, e.g. kill:router-2@60+10; stores as well (store0, store1, ...;
    one that was killed comes back empty), and one more may join: join:store4@60."""
    heartbeat_ms: int = option(MemberConfig().beat_ns // NS_PER_MS, least=1)
    """Milliseconds between two heartbeats of an instance."""
    scheduler: SchedulerConfig = GPU_SCHEDULER
    """Batching of each instance."""
    lengths: LengthStudy = dataclasses.field(default_factory=LengthStudy)
    """What objectives know of the lengths of answers."""
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    """The router's options."""
    scaling: ScalingOptions = dataclasses.field(default_factory=ScalingOptions)
    """Which counts follow the load."""

    def make_setup(self) -> Setup:
        """The cluster to simulate. Raises :class:`UserError` for an impossible one."""
        from memserve_lab.sim.replay.setup import Setup, Surroundings, parse_faults, parse_instances

        self.cluster.admission.refuse_idle()
        instances = parse_instances(self.instances)
        return Setup(
            instances,
            self.make_machine(),
            self.cluster,
            self.scheduler,
            around=Surroundings(heartbeat_ns=self.heartbeat_ms * NS_PER_MS),
            faults=parse_faults(self.faults, instances, self.routers, self.stores.count_wanted),
            routers=self.routers,
            stores=self.stores.make_setup(),
            lengths=self.lengths,
            scaling=self.scaling,
        )

    def make_machine(self) -> Machine:
        """The machine of each instance."""
        from memserve_lab.sim.hardware import machine

        if self.profile is not None:
            profile_values = profiled(self.profile, self.model, self.dram_memory_bytes)
        else:
            kind, _, count = self.device.partition("x")
            if count and not (count.isdecimal() and int(count)):
                raise UserError(f"cannot read {self.device!r} as devices", hint="for example h100 or h100x4")
            profile_values = machine(self.model, kind, int(count or 1), self.dram_memory_bytes, self.block_tokens)
        return (
            profile_values if self.kv_blocks is None else dataclasses.replace(profile_values, hbm_blocks=self.kv_blocks)
        )

    def name(self) -> str:
        """The setting in short."""
        parts = [self.instances, self.cluster.policy, self.cluster.caching.value]
        if self.cluster.transfer is not ClusterConfig().transfer:
            parts.append(self.cluster.transfer.value)
        if self.stores.is_wanted:
            parts.append(self.stores.name())
        if self.routers > 1:
            parts.append(f"routers={self.routers}")
        return "/".join(parts) + (f" on {self.device}" if self.profile is None else "")


def profiled(file: Path, model: str, dram_bytes: int) -> Machine:
    """A machine as ``memserve profile`` has measured it. Raises :class:`UserError` for any other file."""
    from memserve.kv.costs import CostModel
    from memserve_lab.sim.hardware import MODELS, Machine, find

    try:
        costs = CostModel.from_dict(json.loads(file.read_text())["costs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {file} as a profile: {error}", hint="memserve profile --json > FILE") from None
    shape = find(MODELS, model, "model")
    plain = shape.geometry(dtype="float32" if "float32" in costs.model else "bfloat16")
    coded = (kv_dtype for kv_dtype in KV_DTYPES if f"KV as {kv_dtype}" in costs.model)
    geometry = dataclasses.replace(plain, kv_dtype=next(coded, AS_COMPUTED))
    hbm_blocks = EngineOptions().kv_memory_bytes // geometry.block_bytes
    return Machine(
        f"{costs.model} on {costs.machine}", geometry, shape.context_tokens, hbm_blocks,
        dram_bytes // geometry.block_bytes, costs, measured=True,
    )  # fmt: skip


@opt.grouped
def run(
    *,
    workload: WorkloadFlags,
    wanted: Annotated[Wanted, opt.Without("weights", "objectives", "told_in")],  # simulated requests have no tenants
    limit_s: Annotated[float | None, typer.Option(min=0.1, help="End after this many seconds of virtual time.")] = None,
    slo_jct_ms: SloJct = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """Replay a workload on a simulated cluster; records, figures and report are those of a measured run."""
    from memserve_lab.bench.catalogue import build
    from memserve_lab.bench.results import describe
    from memserve_lab.cli.sim_results import simulate, summed_up, write_folder

    setup, workload_made = dataclasses.replace(wanted.make_setup(), seed=workload.seed), build(workload.make_recipe())
    head = what_comes(workload_made, wanted, setup.machine)
    for line in () if as_json else head:
        typer.echo(line)
    simulated = simulate(setup, workload_made, wanted.name(), workload_made.kind, workload.seed, limit_s=limit_s)
    aims, command = wanted.scheduler, shlex.join(["memserve", *sys.argv[1:]])
    slo = read_slo(_ms(aims.slo_ttft_ns), _ms(aims.slo_tpot_ns), slo_jct_ms)
    if out is not None:
        results = write_folder(out, [simulated], slo, command, [*head, *workload_made.notes])
    else:
        results = summed_up([simulated], slo, command, [*head, *workload_made.notes])
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(results, str_keys=True)))
        return
    typer.echo("\n".join([*describe(results), *told(simulated)]))
    if out is not None:
        typer.echo(f"report: {out / 'report.md'}")


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / NS_PER_MS


def what_comes(workload: Workload, simulation: Wanted, machine: Machine) -> list[str]:
    """Lines about the workload, its arrivals and the cluster: figures mean nothing without them."""
    due_s = [turn.due_s for session in workload.sessions for turn in session.turns if turn.due_s is not None]
    if not any(due_s):
        arrival_text = "every session arrives at 0 s, the worst case; --rate R sends R requests per second"
    else:
        arrival_text = f"{workload.arrivals}, the last one due at {max(due_s):.0f} s"
    origin = "a measured profile" if machine.measured else "a roofline estimate, nothing measured"
    return [
        f"workload: {workload.kind} ({workload.source}), {len(workload.sessions)} sessions,"
        f" {workload.request_count} requests",
        f"arrivals: {arrival_text}",
        f"cluster: {simulation.instances}, each {machine.name} ({origin})"
        + (f", {simulation.routers} routers" if simulation.routers > 1 else ""),
    ]


def told(simulated: Simulated) -> list[str]:
    """Devices, links and wall time of a simulation."""
    used = simulated.usage
    devices = f"{used.devices} device{'s' if used.devices != 1 else ''}"
    return [
        f"{devices} for {used.simulated_s:.1f} s: {used.device_hours:.3f} device hours, "
        f"{used.busy_share:.0%} busy, {used.tokens_per_device_hour:,.0f} tokens per device hour",
        f"KV moved: {used.pulled_bytes / 1e9:.2f} GB, waits for links {used.link_waits_s:.2f} s",
        *simulated.counts,
        tell_hits(used.hits, sum(record.prompt_tokens or 0 for record in simulated.records)),
        *(tell_stores(used.stores) if used.stores is not None else ()),
        f"simulated in {simulated.wall_s:.2f} s: {simulated.requests_per_wall_s:,.0f} requests per second,"
        f" {simulated.events} events",
    ]
