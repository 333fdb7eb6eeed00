"""Configuration: frozen, documented once, validated when built (level 0).

Constructors take the sub-config they need, never the whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memserve.errors import UserError
from memserve.types import VOCAB_MAX, Admission, Caching, KVGeometry, RequestLogFormat, Role, TransferMode
from memserve.units import KIB, MIB, NS_PER_S, flag_bytes, human_bytes


def _positive(name: str, value: int, hint: str) -> None:
    if value < 1:
        raise UserError(f"{name} must be at least 1, got {value}", hint=hint, param=name)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The memory of one instance."""

    hbm_blocks: int = 512
    """Blocks in the arena that attention reads."""
    dram_blocks: int = 0
    """Blocks in host memory behind it; 0 = no second tier."""
    caching: bool = True
    """Keep finished prefixes for reuse."""
    identity_key: bytes | None = field(default=None, repr=False)
    """What the identities of cached blocks are keyed with, 16 bytes. None: a public key, for a pool alone."""

    def __post_init__(self) -> None:
        _positive("hbm_blocks", self.hbm_blocks, "give the pool more memory, e.g. --kv-memory 512MiB")
        if self.dram_blocks < 0:
            raise UserError(f"dram_blocks must not be negative, got {self.dram_blocks}", param="dram_blocks")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Iteration-level batching of one instance."""

    max_running: int = 256
    """Sequences that may hold a device slot at once."""
    max_step_tokens: int = 2048
    """Token budget of one step, decodes first."""
    prefill_chunk_tokens: int = 512
    """Largest piece of one prompt computed in one step."""
    max_waiting: int = 4096
    """Requests that may queue; more are rejected with a retry hint."""
    steps_in_flight: int = 2
    """Plans given to the device at once; 2: the next step is planned while one runs, shortly before its end if it is
    long."""
    preemption: str = "auto"
    """``swap``, ``recompute``, or ``auto`` = the cheaper by the measured cost of each."""

    def __post_init__(self) -> None:
        for name in (
            "max_running",
            "max_step_tokens",
            "prefill_chunk_tokens",
            "max_waiting",
            "steps_in_flight",
        ):
            _positive(name, getattr(self, name), f"give a positive number for {name}")
        if self.preemption not in ("auto", "swap", "recompute"):
            raise UserError(
                f"unknown preemption mode {self.preemption!r}",
                hint="use auto, swap or recompute",
                param="preemption",
            )


@dataclass(frozen=True, slots=True)
class ExchangeConfig:
    """How an instance gives KV to others and takes it from them."""

    lease_ns: int = 30 * NS_PER_S
    """An offer that was not released after this long is void: its blocks go back to their owner."""
    fetch_deadline_ns: int = 2 * NS_PER_S
    """Upper bound of the wait for KV that another instance was asked for; then it is computed. The cost model may
    allow less."""
    pulls_in_flight: int = 4
    """Pull jobs given to the host at once."""
    event_capacity: int = 65536
    """KV events kept for a router that missed some; older ones are answered with a snapshot. 0 = no KV events."""
    shares_kv: bool = True
    """False: other processes can neither read nor write the KV here, since it lies in the memory of a GPU."""

    def __post_init__(self) -> None:
        for name in ("lease_ns", "fetch_deadline_ns", "pulls_in_flight"):
            _positive(name, getattr(self, name), f"give a positive number for {name}")


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """Everything the instance machine decides by."""

    max_model_tokens: int
    """The model's context: prompt and generated tokens together."""
    namespace: str = "default"
    """Model and weights fingerprint, dtype and layout: joined with the tenant into the index namespace."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Its memory."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Its batching."""
    role: Role = Role.COLOCATED
    """What it does in a cluster."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """Its dealings with other instances."""
    vocab_size: int = VOCAB_MAX
    """Token ids that the model can read and draw: ``[0, vocab_size)``."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The cluster's gate: who is let in, who waits before it, and who is told to come again (row C6)."""

    mode: Admission = Admission.NONE
    """``none``, ``bounded`` (requests at once), ``memory`` (and blocks) or ``cache`` (blocks, shared ones once)."""
    active_max: int | None = None
    """Requests that are let in at once; ``bounded`` needs it, the others may have it too."""
    waiting_max: int = 64
    """Requests that may wait before the gate, by turns of their tenants; more are rejected at once."""
    wait_ns: int = 10 * NS_PER_S
    """A request that has waited so long is rejected."""
    output_tokens_max: int = 256
    """Of what a request may generate, so many tokens a sequence count as memory that it needs."""
    unit_tokens: int | None = None
    """Memory is counted in blocks of so many tokens; default: the instances' own. Not with ``cache``."""
    evictions_max: int | None = None
    """Default: KV of ended requests is nobody's, instances evict it for newcomers. A number: it counts as taken, and
    one newcomer may take that of so many ended requests, the oldest first (row C5)."""
    kept_ns: int = 60 * NS_PER_S
    """What ended so long ago no longer counts as taken, whatever ``evictions_max`` says."""
    weights: tuple[tuple[str, int], ...] = ()
    """Service that a tenant gets for each unit of others while both wait, before the gate and on instances; 1 for
    tenants that are not named."""
    priority_across_tenants: bool = False
    """False: a request's priority orders the requests of its own tenant. True: those of all tenants, before their
    turns; then any key can delay all others."""

    def __post_init__(self) -> None:
        if self.mode is Admission.BOUNDED and self.active_max is None:
            raise UserError("bounded admission needs to know how many", hint="e.g. --max-active 32", param="max_active")
        if self.active_max is not None:
            _positive("active_max", self.active_max, "let at least one request in: --max-active 1")
        _positive("wait_ns", self.wait_ns, "give a positive time, e.g. --admission-wait 10")
        _positive("kept_ns", self.kept_ns, "give a positive time: what has ended is let go after it")
        if min(self.waiting_max, self.output_tokens_max, self.evictions_max or 0) < 0:
            raise UserError("limits of admission must not be negative", hint="0 = none at all")
        if self.mode is Admission.CACHE and self.unit_tokens is not None:
            raise UserError("cache-aware admission counts the instances' own blocks", param="unit_tokens")
        for tenant, weight in self.weights:
            _positive(f"weight of {tenant!r}", weight, "1 is everybody's; 2 gets twice as much")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Everything that the ``Cluster`` machine decides by."""

    caching: Caching = Caching.PD_CACHING_3
    """Who caches, and what travels (MemServe 5.1)."""
    policy: str = "cost"
    """``least-load``, ``session``, ``prompt-tree``, ``cost`` (weighs prefix, queue, tier and transfer together),
    ``affinity`` (session, exact hit, longest prefix, least load, in this order), ``best-fit`` (least room over)."""
    transfer: TransferMode = TransferMode.BY_REQUEST_AGG
    """How KV goes from prefill to decode."""
    dead_after_ns: int = 5 * NS_PER_S
    """A member that was silent for this long is taken to be dead."""
    stalled_after_ns: int = 60 * NS_PER_S
    """A request without any news for this long, on a member that still beats, is tried elsewhere."""
    attempts_max: int = 4
    """A request is tried on so many instances before it ends with an error."""
    unplaced_ns: int = 30 * NS_PER_S
    """How long a request may wait for an instance that can take it."""
    tree_ttl_ns: int = 600 * NS_PER_S
    """Tree entries that no KV event confirms are forgotten after this long."""
    speculative_ttl_ns: int = 20 * NS_PER_S
    """The same for entries made at dispatch, of instances that do publish events."""
    handle_tokens_max: int = 4 << 20
    """Tokens of all named prefixes (documents, pinned sessions) that are kept, 256 more for each; of more, the tenant
    with most loses its oldest."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """Its gate."""

    def __post_init__(self) -> None:
        _positive("handle_tokens_max", self.handle_tokens_max, "give named prefixes some room")
        if self.policy not in POLICIES:
            raise UserError(f"unknown policy {self.policy!r}", hint=f"use one of {', '.join(POLICIES)}", param="policy")


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """What the clients of the HTTP server may make it hold, and for how long."""

    connections_max: int = 1024
    """Open connections. One more closes the connection that has waited longest for its client, of the address with the
    most connections; it is refused with a 503 when every connection is being answered."""
    connections_per_address_max: int = 0
    """Open connections of one client address; 0: no limit, as behind a proxy all have the same address."""
    head_bytes_max: int = 64 * KIB
    """Request line and headers."""
    url_bytes_max: int = 16 * KIB
    """The URL in the request line."""
    fields_max: int = 128
    """Headers of one request."""
    trailer_bytes_max: int = 16 * KIB
    """What may follow a chunked body; it is read and dropped."""
    body_bytes_max: int = 16 * MIB
    """One request body."""
    body_memory_bytes: int | None = None
    """All request bodies that are being read or parsed. None: four times ``body_bytes_max``."""
    body_memory_per_client_bytes: int | None = None
    """The part of it that one tenant may take, or one address where requests name no tenant. None: half of it."""
    header_timeout_s: float = 10.0
    """From the first byte of a request, or the start of its connection, to the end of its headers."""
    body_timeout_s: float = 60.0
    """From the end of the headers to the end of the body."""
    keep_alive_s: float = 75.0
    """How long a connection may be idle between two requests."""
    write_timeout_s: float = 20.0
    """A client that takes nothing of its answer for this long is cut off, and its request cancelled."""
    stream_buffer_bytes: int = 4 * MIB
    """Output of one stream that its client has not taken yet; more ends the stream with an error."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the API, e.g. ``https://chat.example.com``; ``*``: all. None: no page may."""

    log_requests: RequestLogFormat = RequestLogFormat.NONE
    """One line on stderr for each request below ``/v1/``: ids, tenant, tokens, times, instances; no content, no key."""

    def __post_init__(self) -> None:
        for name in ("connections_max", "head_bytes_max", "url_bytes_max", "fields_max", "trailer_bytes_max",
                     "body_bytes_max", "stream_buffer_bytes"):  # fmt: skip
            _positive(name, getattr(self, name), f"give a positive number for {name}")
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s", "write_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a positive number of seconds", param=name)
        if self.connections_per_address_max < 0:
            raise UserError("connections_per_address_max must not be negative", hint="0: no limit")
        if self.body_share_bytes < self.body_bytes_max:
            raise UserError(
                f"one body of {human_bytes(self.body_bytes_max)} does not fit into the memory that bodies may take",
                hint="raise --body-memory and --body-memory-per-client, or lower --max-body-mib",
                param="body_memory",
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                hint = "give scheme, host and port without a path: --cors-origin https://chat.example.com"
                raise UserError(f"{origin[:200]!r} is no origin", hint=hint, param="cors_origin")

    @property
    def body_total_bytes(self) -> int:
        """All bodies together."""
        return 4 * self.body_bytes_max if self.body_memory_bytes is None else self.body_memory_bytes

    @property
    def body_share_bytes(self) -> int:
        """The bodies of one client; never more than all bodies together."""
        share = self.body_memory_per_client_bytes
        return min(self.body_total_bytes, self.body_total_bytes // 2 if share is None else share)


_ORIGIN = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._~-]+(:[0-9]{1,5})?|[a-z-]+://\[[0-9A-Fa-f:]+\](:[0-9]{1,5})?"
)
"""Scheme, host and port; host names or addresses."""

POLICIES = ("least-load", "session", "prompt-tree", "cost", "affinity", "best-fit")


DEFAULT_MODEL = "smollm2-135m-instruct"
"""The bundled model: found in the installed package, no download."""

STEP_TOKENS_CPU, STEP_TOKENS_GPU = 512, 2048
"""Token budget of a step, where none is given."""

DEFAULT_MAX_TOKENS = 1024
"""Longest answer to a chat that names no ``max_tokens``: a model that repeats itself would fill its whole context."""


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """How an instance keeps in touch with its router."""

    beat_ns: int = NS_PER_S // 2
    """Between two heartbeats, and between two requests to join. A member that is silent for ten is taken to be dead."""
    stats_every: int = 4
    """Every so many heartbeats carry the engine's statistics."""
    asks_after_ns: int = NS_PER_S
    """After so long without a message of the router it is asked for one, where there are several addresses."""
    silent_after_ns: int = 6 * NS_PER_S
    """After so long the router is taken to be gone, and the next address is tried. By then it takes the instance to be
    dead."""
    turn_ns: int = 2 * NS_PER_S
    """How long each further address has to answer."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a person chooses when starting an engine; each field is a flag of ``memserve serve``."""

    model: str = DEFAULT_MODEL
    """A local folder, a hub id, a .gguf file, or the bundled default."""
    dtype: str = "auto"
    """``auto``, ``float32``, ``bfloat16`` or ``float16``, for weights, activations and KV alike."""
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""
    kv_memory_bytes: int = 384 * MIB
    """Size of the arena that attention reads (tier HBM)."""
    dram_memory_bytes: int = 0
    """Size of the second tier (DRAM); evicted prefixes move there instead of being dropped."""
    caching: bool = True
    """Reuse the KV of shared prefixes."""
    max_running: int = 64
    """Sequences computed together."""
    max_step_tokens: int | None = None
    """Token budget of one step; None: 512 on a CPU, where a larger step would keep others waiting for a second, and
    2,048 on a GPU."""
    prefill_chunk_tokens: int | None = None
    """Largest piece of one prompt computed in one step; None: a whole step."""
    max_waiting: int = 4096
    """Requests that may queue."""
    steps_in_flight: int = 2
    """Plans given to the device at once."""
    preemption: str = "auto"
    """``auto``, ``swap`` or ``recompute``."""
    max_model_tokens: int | None = None
    """Context limit; default: the model's own."""
    block_tokens: int = 32
    """Tokens a block."""
    threads: int | None = None
    """CPU threads of the device; default: every core."""

    def instance_config(
        self,
        geometry: KVGeometry,
        model_max_tokens: int,
        namespace: str,
        vocab_size: int = VOCAB_MAX,
        *,
        on_gpu: bool = False,
    ) -> InstanceConfig:
        """The machine's part of these options, for a model with ``geometry`` on a GPU or a CPU.

        Raises :class:`UserError` when the memory holds fewer than two blocks.
        """
        hbm_blocks = self.kv_memory_bytes // geometry.block_bytes
        if hbm_blocks < 2:
            need = flag_bytes(2 * geometry.block_bytes)
            raise UserError(
                f"kv memory of {human_bytes(self.kv_memory_bytes)} holds {hbm_blocks} blocks of this model",
                hint=f"give at least --kv-memory {need}",
                param="kv_memory",
            )
        step_tokens = self.max_step_tokens or (STEP_TOKENS_GPU if on_gpu else STEP_TOKENS_CPU)
        return InstanceConfig(
            max_model_tokens=min(self.max_model_tokens or model_max_tokens, model_max_tokens),
            namespace=namespace,
            pool=PoolConfig(hbm_blocks, self.dram_memory_bytes // geometry.block_bytes, self.caching),
            scheduler=SchedulerConfig(
                max_running=self.max_running,
                max_step_tokens=step_tokens,
                prefill_chunk_tokens=self.prefill_chunk_tokens or step_tokens,
                max_waiting=self.max_waiting,
                steps_in_flight=self.steps_in_flight,
                preemption=self.preemption,
            ),
            vocab_size=vocab_size,
        )
