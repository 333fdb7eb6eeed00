"""Options that several commands share: one flag a field of :class:`EngineOptions` (level 4)."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from memserve.cli.logs import LOG_LEVELS
from memserve.config import DEFAULT_MODEL as DEFAULT_MODEL
from memserve.config import POLICIES, AdmissionConfig, EdgeConfig, EngineOptions
from memserve.errors import UserError
from memserve.types import Admission, Caching, RequestLogFormat, TransferMode
from memserve.units import MIB, NS_PER_S, human_bytes, ns_from_s, parse_bytes

DEFAULTS = EngineOptions()
DEFAULT_KV_MEMORY = human_bytes(DEFAULTS.kv_memory_bytes).replace(".0 ", "")

Model = Annotated[str, typer.Option(help="A model folder, a .gguf file, a hub id, or the bundled default.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16: weights, activations and KV.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
KvMemory = Annotated[str, typer.Option(help="Memory for KV that attention reads, e.g. 512MiB.")]
DramMemory = Annotated[str, typer.Option(help="Second tier behind it: evicted prefixes move here, e.g. 4GiB.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Do not reuse the KV of shared prefixes.")]
MaxRunning = Annotated[int, typer.Option(min=1, help="Sequences computed together.")]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Requests that may queue; more get 429.")]
MaxStepTokens = Annotated[
    int | None, typer.Option(min=1, help="Token budget of one step; default: 512 on a CPU, 2048 on a GPU.")
]
PrefillChunk = Annotated[
    int | None, typer.Option(min=1, help="Largest piece of one prompt in one step; default: a whole step.")
]
Preemption = Annotated[str, typer.Option(help="auto, swap or recompute: what happens when memory runs out.")]
MaxModelTokens = Annotated[int | None, typer.Option(min=1, help="Context limit; default: the model's own.")]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens a block of KV holds.")]
StepsInFlight = Annotated[int, typer.Option(min=1, help="Steps given to the device at once; 2 hides the scheduler.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of the device; default: every core.")]
TenantWeights = Annotated[
    list[str] | None,
    typer.Option("--tenant-weight", help="NAME=2: this tenant gets twice the service of others, when many wait."),
]
PriorityAcross = Annotated[
    bool, typer.Option(help="A request's priority counts among all tenants, not only among its own tenant's requests.")
]
GenerationConfig = Annotated[
    bool, typer.Option(help="Take defaults of sampling from the model's generation_config.json.")
]
Count = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="Instances of this role on this host; default: what suits the machine."),
]
CachingLevel = Annotated[
    Caching,
    typer.Option(help="Who caches KV: nobody; 1: prefill instances; 2: decode too; 3: and generated KV goes back."),
]
Policy = Annotated[str, typer.Option(help=f"Who gets a request: {', '.join(POLICIES)}.")]
Transfer = Annotated[TransferMode, typer.Option(help="How KV goes from prefill to decode instances.")]
AdmissionMode = Annotated[
    Admission,
    typer.Option(
        "--admission",
        help="Who is let in: none (everybody), bounded (--max-active), memory (and blocks), cache (shared ones once).",
    ),
]
MaxActive = Annotated[int | None, typer.Option(min=1, help="Requests let in at once, over all instances.")]
AdmissionQueue = Annotated[int, typer.Option(min=0, help="Requests that may wait to be let in; more get 429.")]
AdmissionWait = Annotated[float, typer.Option(min=0.001, help="Seconds that they may wait; then they get 503.")]
AdmissionEvictions = Annotated[
    int | None,
    typer.Option(min=0, help="KV of ended requests counts as taken; one request may take that of so many."),
]
_GATE = AdmissionConfig()


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFlags:
    """What each engine of ``serve`` and ``instance`` is like."""

    model: Model = DEFAULT_MODEL
    dtype: Dtype = DEFAULTS.dtype
    device: DeviceName = DEFAULTS.device
    kv_memory: KvMemory = DEFAULT_KV_MEMORY
    dram_memory: DramMemory = "0"
    no_cache: NoCache = False
    max_running: MaxRunning = DEFAULTS.max_running
    max_waiting: MaxWaiting = DEFAULTS.max_waiting
    max_step_tokens: MaxStepTokens = DEFAULTS.max_step_tokens
    prefill_chunk_tokens: PrefillChunk = DEFAULTS.prefill_chunk_tokens
    preemption: Preemption = DEFAULTS.preemption
    max_model_tokens: MaxModelTokens = None
    threads: Threads = None
    block_tokens: BlockTokens = DEFAULTS.block_tokens
    steps_in_flight: StepsInFlight = DEFAULTS.steps_in_flight

    def options(self) -> EngineOptions:
        """In the units of the engine. Raises :class:`UserError` for sizes that are none."""
        given = dataclasses.asdict(self)
        kv_memory, dram_memory, no_cache = (given.pop(name) for name in ("kv_memory", "dram_memory", "no_cache"))
        kv_bytes, dram_bytes = parse_bytes(kv_memory), parse_bytes(dram_memory)
        return EngineOptions(**given, kv_memory_bytes=kv_bytes, dram_memory_bytes=dram_bytes, caching=not no_cache)


@dataclasses.dataclass(frozen=True, slots=True)
class GateFlags:
    """Who is let in, of ``serve`` and ``sim run``."""

    admission: AdmissionMode = _GATE.mode
    max_active: MaxActive = None
    admission_queue: AdmissionQueue = _GATE.waiting_max
    admission_wait: AdmissionWait = _GATE.wait_ns / NS_PER_S
    admission_evictions: AdmissionEvictions = None
    priority_across_tenants: PriorityAcross = False

    def config(self, tenant_weights: list[str] | None = None) -> AdmissionConfig:
        """The gate that these options say. Raises :class:`UserError` for options that would do nothing."""
        config = admission_config(
            self.admission, self.max_active, self.admission_queue, self.admission_wait, self.admission_evictions,
            tenant_weights,
        )  # fmt: skip
        return dataclasses.replace(config, priority_across_tenants=self.priority_across_tenants)


_EDGE = EdgeConfig()


@dataclasses.dataclass(frozen=True, slots=True)
class EdgeFlags:
    """What clients of the HTTP server may make it hold, and for how long: :class:`EdgeConfig`."""

    max_connections: Annotated[
        int, typer.Option(min=1, help="Open connections; one more takes the place of one that waits for its client.")
    ] = _EDGE.connections_max
    max_connections_per_address: Annotated[
        int, typer.Option(min=0, help="Of one client address; 0: no limit (behind a proxy all have one address).")
    ] = _EDGE.connections_per_address_max
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = (
        _EDGE.body_bytes_max // MIB
    )
    body_memory: Annotated[
        str | None, typer.Option(help="Memory for all bodies being read, e.g. 64MiB; default: four of the largest.")
    ] = None
    body_memory_per_client: Annotated[
        str | None, typer.Option(help="The part of it that one tenant or address may take; default: half.")
    ] = None
    header_timeout_s: Annotated[float, typer.Option(help="Time for the headers of a request.")] = _EDGE.header_timeout_s
    body_timeout_s: Annotated[float, typer.Option(help="Time for the body of a request.")] = _EDGE.body_timeout_s
    keep_alive_s: Annotated[float, typer.Option(help="Time between two requests of a connection.")] = _EDGE.keep_alive_s
    write_timeout_s: Annotated[
        float, typer.Option(help="A client that takes nothing of its answer for so long is cut off.")
    ] = _EDGE.write_timeout_s
    stream_buffer: Annotated[
        str, typer.Option(help="Output of one stream that its client has not taken; more ends the stream.")
    ] = human_bytes(_EDGE.stream_buffer_bytes).replace(".0 ", "")
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose web pages may use the API, e.g. https://chat.example.com; *: all; repeatable."),
    ] = None

    log_requests: Annotated[
        RequestLogFormat, typer.Option(help="Log a line for each request, without its content: name=value, or JSON.")
    ] = _EDGE.log_requests

    def config(self) -> EdgeConfig:
        """The limits that these options say. Raises :class:`UserError` for those that exclude each other."""
        memory, share = self.body_memory, self.body_memory_per_client
        return EdgeConfig(
            connections_max=self.max_connections,
            connections_per_address_max=self.max_connections_per_address,
            body_bytes_max=self.max_body_mib * MIB,
            body_memory_bytes=None if memory is None else parse_bytes(memory),
            body_memory_per_client_bytes=None if share is None else parse_bytes(share),
            header_timeout_s=self.header_timeout_s,
            body_timeout_s=self.body_timeout_s,
            keep_alive_s=self.keep_alive_s,
            write_timeout_s=self.write_timeout_s,
            stream_buffer_bytes=parse_bytes(self.stream_buffer),
            cors_origins=tuple(self.cors_origin or ()),
            log_requests=self.log_requests,
        )


LogLevel = Annotated[str, typer.Option(help=", ".join(LOG_LEVELS))]
ClusterHost = Annotated[str, typer.Option(help="Address by which other hosts reach this one: router and instances.")]
ClusterPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Let instances of other hosts join at this port.")
]
Metadata = Annotated[
    str,
    typer.Option(help="What outlives a killed router: a folder, etcd://HOST:PORT, none; auto: a folder of the --port."),
]
Link = Annotated[str, typer.Option(help="How KV moves: auto, shm (same host) or nixl.")]

_FLAGS = {
    "kv_memory_bytes": "--kv-memory",
    "dram_memory_bytes": "--dram-memory",
    "caching": "--no-cache",
}
"""Flags that are not named as their field."""


def engine_flags(options: EngineOptions) -> tuple[str, ...]:
    """The command line that says ``options``: for processes that shall have the same."""
    flags: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        flags.append(_FLAGS.get(field.name) or "--" + field.name.replace("_", "-"))
        if not isinstance(value, bool):
            flags.append(str(value))
    return tuple(flags)


def admission_config(
    mode: Admission,
    max_active: int | None,
    queue: int,
    wait_s: float,
    evictions: int | None,
    tenant_weights: list[str] | None = None,
) -> AdmissionConfig:
    """The gate that these options say. Raises :class:`UserError` for options that would do nothing."""
    given = {"--max-active": max_active, "--admission-evictions": evictions}
    idle = [flag for flag, value in given.items() if value is not None and mode is Admission.NONE]
    if idle:
        raise UserError(f"{idle[0]} does nothing without admission", hint="add --admission bounded, memory or cache")
    if mode is Admission.BOUNDED and evictions is not None:
        raise UserError("bounded admission does not look at memory", hint="use --admission memory or cache")
    weights = tuple(_weight(text) for text in tenant_weights or ())
    return AdmissionConfig(mode, max_active, queue, ns_from_s(wait_s), evictions_max=evictions, weights=weights)


def _weight(text: str) -> tuple[str, int]:
    """``NAME=2``. Raises :class:`UserError` for anything else."""
    name, _, weight = text.rpartition("=")
    if not name or not weight.isdecimal():
        raise UserError(f"cannot read {text!r} as a tenant's weight", hint="for example --tenant-weight team-a=3")
    return name, int(weight)


def split_address(text: str, flag: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``. Raises :class:`UserError` for anything else."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{flag} wants HOST:PORT, got {text!r}", hint=f"for example {flag} 10.0.0.1:5900")
    return host.strip("[]"), int(port)
