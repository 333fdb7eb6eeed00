"""Options that the commands of ``memserve sim`` share, and what they mean (level 4)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.cli import options as opt
from memserve.config import AdmissionConfig, ClusterConfig
from memserve.errors import UserError
from memserve.units import NS_PER_MS, parse_bytes

if TYPE_CHECKING:
    from memserve.bench.catalogue import Recipe
    from memserve.sim.hardware import Machine
    from memserve.sim.replay.setup import Setup

WorkloadName = Annotated[str, typer.Option(help="A name of `memserve bench workload`, e.g. chat, trace, agentic.")]
Trace = Annotated[Path | None, typer.Option(help="A trace in Mooncake's form, or your own JSONL of sessions.")]
Data = Annotated[Path | None, typer.Option(help="Folder of data sets. Default: workloads made from the seed.")]
Instances = Annotated[str, typer.Option(help="For example prefill=2,decode=6 or colocated=8.")]
ModelName = Annotated[str, typer.Option("--model", help="A model by name, e.g. llama-3-8b.")]
DeviceKind = Annotated[str, typer.Option("--device", help="h100, h200, a100, l40s or cpu; several: h100x4.")]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Output of `memserve profile`, saved or --json: instead of --device.")
]
KvBlocks = Annotated[
    int | None, typer.Option(min=2, help="Blocks of KV in HBM; default: the memory beside the weights.")
]
DramMemory = Annotated[str, typer.Option(help="Second tier of each instance, e.g. 64GiB.")]
Sessions = Annotated[int | None, typer.Option(min=1, help="Sessions: sampled, a trace's first, or generated.")]
Rate = Annotated[float | None, typer.Option(min=0.001, help="Requests a second (Poisson); default: recorded times.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Speed-up of recorded times.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload.")]
Faults = Annotated[str, typer.Option(help="kill:c0@60+10,pause:c1@5+2,slow:c2@20+5x3: at second, for seconds.")]
HeartbeatMs = Annotated[int, typer.Option(min=1, help="Milliseconds between two heartbeats of an instance.")]
Out = Annotated[Path | None, typer.Option(help="Folder for records, results, report, timeline and plots.")]

_CLUSTER = ClusterConfig()


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadFlags:
    """The workload and its arrivals."""

    workload: WorkloadName = "chat"
    trace: Trace = None
    data: Data = None
    sessions: Sessions = None
    rate: Rate = None
    speed: Speed = 1.0
    seed: Seed = 0

    def recipe(self) -> Recipe:
        """Of the workload."""
        from memserve.bench.catalogue import Arrivals, Recipe
        from memserve.bench.settings import kind_of

        kind = "file" if self.trace is not None else kind_of(self.workload)
        arrivals = Arrivals.RECORDED if self.rate is None else Arrivals.POISSON
        return Recipe(
            kind=kind, data=self.data, file=self.trace, sessions=self.sessions, seed=self.seed, arrivals=arrivals,
            requests_per_s=self.rate or 1.0, speed=self.speed,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The cluster that the options say, not looked at yet."""

    instances: Instances = "prefill=1,decode=1"
    model: ModelName = "llama-3-8b"
    device: DeviceKind = "h100"
    profile: ProfileFile = None
    kv_blocks: KvBlocks = None
    dram_memory: DramMemory = "0"
    policy: opt.Policy = _CLUSTER.policy
    caching: opt.CachingLevel = _CLUSTER.caching
    transfer: opt.Transfer = _CLUSTER.transfer
    faults: Faults = ""
    heartbeat_ms: HeartbeatMs = 500

    def setup(self, admission: AdmissionConfig = _CLUSTER.admission) -> Setup:
        """Of the cluster. Raises :class:`UserError` for what cannot be."""
        from memserve.sim.replay.setup import Setup, Surroundings, parse_faults, parse_instances

        instances = parse_instances(self.instances)
        return Setup(
            instances,
            self.machine(),
            ClusterConfig(self.caching, self.policy, self.transfer, admission=admission),
            around=Surroundings(heartbeat_ns=self.heartbeat_ms * NS_PER_MS),
            faults=parse_faults(self.faults, instances),
        )

    def machine(self) -> Machine:
        """What each instance runs on."""
        from memserve.sim.hardware import machine

        dram_bytes = parse_bytes(self.dram_memory)
        if self.profile is not None:
            found = profiled(self.profile, self.model, dram_bytes)
        else:
            kind, _, count = self.device.partition("x")
            if count and not (count.isdecimal() and int(count)):
                raise UserError(f"cannot read {self.device!r} as devices", hint="for example h100 or h100x4")
            found = machine(self.model, kind, int(count or 1), dram_bytes)
        return found if self.kv_blocks is None else dataclasses.replace(found, hbm_blocks=self.kv_blocks)

    def name(self) -> str:
        """The setting in short."""
        parts = [self.instances, self.policy, self.caching.value]
        parts += [self.transfer.value] if self.transfer is not _CLUSTER.transfer else []
        return "/".join(parts) + (f" on {self.device}" if self.profile is None else "")


def profiled(file: Path, model: str, dram_bytes: int) -> Machine:
    """A machine as ``memserve profile`` has measured it. Raises :class:`UserError` for another file."""
    from memserve.policy.costs import CostModel
    from memserve.sim.hardware import MODELS, Machine, find
    from memserve.units import MIB

    try:
        costs = CostModel.from_dict(json.loads(file.read_text())["costs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {file} as a profile: {error}", hint="memserve profile --json > FILE") from None
    shape = find(MODELS, model, "model")
    geometry = shape.geometry(dtype="float32" if "float32" in costs.model else "bfloat16")
    return Machine(
        f"{costs.model} on {costs.machine}", geometry, shape.context_tokens, 384 * MIB // geometry.block_bytes,
        dram_bytes // geometry.block_bytes, costs, measured=True,
    )  # fmt: skip
