"""Configuration: frozen, documented once, validated when built.

What people set is an :func:`option`; the rest has no flag. Constructors take the sub-config they need, never the whole.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from memserve.base.deployment import LoraUpdates
from memserve.base.errors import UserError, check
from memserve.base.kv_layout import Parallel, check_coded, check_kv_dtypes, check_tiers, hbm_blocks, lower_block_bytes
from memserve.base.layer_kv import LayerLayout, WindowPages
from memserve.base.options import (
    GBIT_S,
    GIBIBYTES,
    KV_FOLDER,
    MANY,
    MILLISECONDS,
    NEGATED,
    OBJECTIVES,
    SECONDS,
    SIZE,
    WEIGHTS,
    check_ranges,
    option,
)
from memserve.base.plugins import ADMISSION_CONTROLLERS, ROUTING_POLICIES, split_settings
from memserve.base.states import NO_STATE, StateGeometry, StatePages, divide_memory
from memserve.base.types import (
    AS_COMPUTED,
    VOCAB_MAX,
    Admission,
    Caching,
    KVGeometry,
    Role,
    TransferPolicy,
    check_kv_codec,
)
from memserve.base.units import MIB, NS_PER_MS, NS_PER_S

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The bundled model: found in the installed package, no download."""

STEP_TOKENS_CPU, STEP_TOKENS_GPU = 512, 2048
"""Default token budget of a step. On a CPU a larger step would delay other requests by a second."""

DEFAULT_MAX_TOKENS = 1024
"""Longest answer to a chat that names no ``max_tokens``: a model that repeats itself would fill its whole context."""

DRAIN_S = 20.0
"""How long streams may go on after the first signal."""

PROMPT_LOGPROBS_MAX = 256
"""Prompt tokens of one plan whose logits are wanted: each takes a row of the vocabulary (200 KB, or more)."""


Asked = tuple[tuple[bool, str, str, str], ...]
"""Of options that do not go together with something: whether they are set, what that means, the hint, and a name."""


def _refuse_asked(what: str, asked: Asked) -> None:
    """Raise :class:`UserError` for the first of ``asked`` that is set: ``what`` is not served so."""
    for is_asked, how, hint, param in asked:
        if is_asked:
            raise UserError(f"{what} is not served {how} yet", hint=f"use {hint} with it", param=param)


def _positive(name: str, value: int, hint: str) -> None:
    if value < 1:
        raise UserError(f"{name} must be at least 1, got {value}", hint=hint, param=name)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The memory of one instance, in blocks: what :class:`EngineOptions` says in bytes."""

    hbm_blocks: int = 512
    """Blocks in the arena that attention reads."""
    dram_blocks: int = 0
    """Blocks of the second tier, in host memory. 0: no second tier."""
    caching: bool = True
    """Keep finished prefixes for reuse."""
    identity_key: bytes | None = field(default=None, repr=False)
    """Key of the identities of cached blocks, 16 bytes. None: a public key, for a pool without a cluster."""
    lower_dtype: str = AS_COMPUTED
    """Of values in the second tier (:data:`memserve.base.types.KV_DTYPES`). ``auto``: as in the first."""
    block_bytes_by_tier: tuple[int, int] = (0, 0)
    """Bytes of a block of either tier; 0: not known."""
    states: StatePages | None = None
    """How snapshots of recurrent states lie. None: the model has no such state."""
    windows: WindowPages | None = None
    """How KV of layers that read a window lies. None: with that of all others."""
    layers_alike: bool = True
    """Whether all layers keep the same."""
    ssd_blocks: int = 0
    """The last of ``dram_blocks``: they lie in a file instead."""
    ssd_folder: str = ""
    """Of that file."""

    @property
    def page_is_layer(self) -> bool:
        """Whether page N of a block is that of layer N. Else pages are moved in whole blocks alone."""
        return self.layers_alike and self.windows is None

    @property
    def shares_dram(self) -> bool:
        """Whether others may read what lies below HBM: it lies in memory, as it does in HBM."""
        return self.lower_dtype == AS_COMPUTED and not self.ssd_blocks

    def tokens_in(self, block_tokens: int) -> int:
        """Tokens of the longest sequence that all blocks hold."""
        entries = self.hbm_blocks if self.windows is None else self.windows.entries_in(self.hbm_blocks)
        return entries * block_tokens

    def source_tokens(self, block_tokens: int) -> int:
        """With ``--nonprefix-reuse``: tokens that are looked through for runs, at most. Most sources share blocks with
        others, so they are more than the tiers hold."""
        return 4 * (self.hbm_blocks + self.dram_blocks) * block_tokens

    def with_whole_snapshots(self) -> PoolConfig:
        """Snapshots that lie among blocks have whole ones, so that they can go where blocks go."""
        states = self.states
        return self if states is None else dataclasses.replace(self, states=dataclasses.replace(states, per_block=1))

    def __post_init__(self) -> None:
        _positive("hbm_blocks", self.hbm_blocks, "give the pool more memory, e.g. --kv-memory 512MiB")
        if self.dram_blocks < 0:
            raise UserError(f"dram_blocks must not be negative, got {self.dram_blocks}", param="dram_blocks")


_LAYERWISE = re.compile(r"off|auto|prompts-first|layerkv(-staggered)?|next-layer|static-\d{1,4}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Iteration-level batching of one instance."""

    max_running: int = option(64, least=1, vllm="max_num_seqs")
    """Sequences computed together; each holds a slot of the device."""
    max_step_tokens: int | None = option(None, least=1, vllm="max_num_batched_tokens")
    """Token budget of one step, decodes first. None: 512 on a CPU, 2,048 on a GPU."""
    prefill_chunk_tokens: int | None = option(None, least=1, vllm="long_prefill_token_threshold")
    """Largest piece of one prompt computed in one step. None: a whole step."""
    max_waiting: int = option(4096, least=1)
    """Requests that may queue; more are rejected with 429."""
    steps_in_flight: int = option(2, least=1)
    """Steps given to the device at once. 2: the next step is planned while one runs, shortly before the end of a long
    one."""
    preemption: str = option("auto")
    """What preemption does with the KV of a sequence: ``swap`` moves it to DRAM, ``recompute`` drops it, ``auto`` takes
    the cheaper of the two by measured costs."""
    scheduling: str = option("fcfs")
    """How much of a step waiting prompts get beside requests that decode. ``fcfs``: all that is left of the token
    budget. ``slo``: as much as leaves every decoding request within ``--slo-tpot-ms``, as far as that can be kept
    (LayerKV, Algorithm 1). For studies, ``prefill-first``: whole prompts alone, while decodes wait (vLLM 0.4.0)."""
    slo_tpot_ns: int | None = option(None, "--slo-tpot-ms", form=MILLISECONDS, least=0.01)
    """Milliseconds that a token may take on average, from a request's first token to its last. None: no objective."""
    slo_ttft_ns: int | None = option(None, "--slo-ttft-ms", form=MILLISECONDS, least=0.01)
    """Milliseconds that the first token may take. None: no objective."""
    layerwise: str = option("off")
    """Where prompts lie that have no room whole. ``off``: they wait. ``auto``: they are computed with some layers in KV
    memory and all of them in ``--dram-memory``, and go on so as far as the link carries the others beside the computing
    (and within ``--slo-tpot-ms``); the rest is parked behind its first token until there is room. What puts off answers
    is kept to about a twentieth of their time. ``prompts-first``: the same without that bound. For studies:
    ``layerkv``, ``layerkv-staggered``, ``next-layer``, ``static-N`` (see ``instance/layerwise/budget.py``)."""
    keep_tool_prefixes: str = option("off")
    """Whose KV stays between the turns of sessions where not all of it fits. ``off``: the order of last use. ``auto``:
    what is expected to save most, by when sessions came back after the same tool, and turns wait that would take room
    from earlier sessions for more work than they gain; it turns itself off where the order of last use does better."""
    draft_tokens: int = option(0, "--draft-tokens", least=0, most=64)
    """N: a step also computes up to N tokens that followed the same tokens before, in the sequence or in an earlier
    request of its tenant, and keeps those that are drawn, where that pays. Answers stay the same. 0: no drafts."""
    nonprefix_reuse: bool = option(False, "--nonprefix-reuse")
    """Let requests with ``nonprefix_reuse`` take KV of the same text from behind other text, wherever it stood: they
    are answered sooner, and not exactly. Other requests are served as without it."""
    nonprefix_recompute: float = option(0.15, "--nonprefix-recompute", least=0.0, most=1.0)
    """With ``--nonprefix-reuse``: the share of such a text that is computed anew, where it matters most."""
    link_bytes_s: float | None = option(None, "--link-gbps", form=GBIT_S, least=0.001)
    """Emulate a link of this many gigabits a second between KV memory and DRAM, for studies of ``--layerwise`` on
    machines where both are the same memory. None: as fast as the memory is."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.preemption not in ("auto", "swap", "recompute"):
            hint = "use auto, swap or recompute"
            raise UserError(f"unknown preemption mode {self.preemption!r}", hint=hint, param="preemption")
        if not _LAYERWISE.fullmatch(self.layerwise):
            hint = "use off or auto, or prompts-first"
            raise UserError(f"unknown layerwise mode {self.layerwise!r}", hint=hint, param="layerwise")
        if self.keep_tool_prefixes not in ("auto", "off"):
            hint = "use auto or off"
            raise UserError(
                f"unknown way to keep prefixes {self.keep_tool_prefixes!r}", hint=hint, param="keep_tool_prefixes"
            )
        if self.scheduling not in ("fcfs", "slo", "prefill-first"):
            raise UserError(f"unknown scheduling {self.scheduling!r}", hint="use fcfs or slo", param="scheduling")
        if self.scheduling == "slo" and self.slo_tpot_ns is None:
            hint = "for example --slo-tpot-ms 200"
            raise UserError("scheduling by objectives needs one", hint=hint, param="slo_tpot_ns")

    @property
    def step_tokens(self) -> int:
        """Token budget of one step; the default of a CPU if none is set."""
        return self.max_step_tokens or STEP_TOKENS_CPU

    @property
    def chunk_tokens(self) -> int:
        """Largest piece of one prompt computed in one step."""
        return self.prefill_chunk_tokens or self.step_tokens


@dataclass(frozen=True, slots=True)
class ExchangeConfig:
    """How an instance gives KV to others and takes it from them."""

    lease_ns: int = 30 * NS_PER_S
    """An offer that is not released after this long is void: its blocks go back to their owner."""
    fetch_deadline_ns: int = 2 * NS_PER_S
    """Longest wait for KV that another instance was asked for; then the tokens are computed. The cost model may allow
    less."""
    pulls_in_flight: int = 4
    """Pull jobs given to the host at once."""
    event_capacity: int = 65536
    """KV events kept for a router that missed some; older ones are answered with a snapshot. 0: no KV events."""
    shares_kv: bool = True
    """Other processes can read and write this instance's KV. False: they cannot; it lies in GPU memory that is not
    exported."""
    reports_layers: bool = True
    """The device tells of each layer of a prompt when its KV is written, so that it can be handed over meanwhile."""
    kept_answer_ns: int = 120 * NS_PER_S
    """Answers with an ``Idempotency-Key`` are kept for the next router for this long after their end here."""
    kept_answer_bytes: int = 32 * MIB
    """Memory of all kept answers; above it the oldest are dropped."""
    room_wait_ns: int = 100 * NS_PER_MS
    """KV of a peer that no request here waits for waits so long for room, then it is refused: blocks come free within
    some steps, or not before others have those that the peer holds for it. 0: until the peer's lease ends."""

    def __post_init__(self) -> None:
        for name in ("lease_ns", "fetch_deadline_ns", "pulls_in_flight", "kept_answer_ns"):
            _positive(name, getattr(self, name), f"give a positive number for {name}")


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """Everything that the decisions of the instance machine depend on."""

    max_model_tokens: int
    """The model's context: prompt and generated tokens together."""
    namespace: str = "default"
    """Model and weights fingerprint, dtype and layout: joined with the tenant into the index namespace."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Memory of the instance."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Batching of the instance."""
    role: Role = Role.COLOCATED
    """Role of the instance in a cluster."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """Limits of KV transfers with other instances."""
    vocab_size: int = VOCAB_MAX
    """Token ids that the model can read and draw: ``[0, vocab_size)``."""
    adapters: frozenset[str] = frozenset()
    """Digests of the LoRA adapters that the device has."""
    why_keys_stay: str = ""
    """Why KV cannot be used at other positions than those that it was computed at. Empty: it can."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Admission to the cluster: which requests are admitted, which wait, and which are rejected."""

    mode: str = option(Admission.NONE, "--admission")
    """What limits the requests that are admitted. ``none``: nothing. ``bounded``: their number. ``memory``: also the
    blocks that they need. ``cache``: as ``memory``, and a block that several requests share counts once. NAME, or
    ``NAME:KEY=VALUE,KEY=VALUE``: what a plug-in says (`memserve doctor` lists them)."""
    active_max: int | None = option(None, "--max-active", least=1)
    """Requests admitted at once, over all instances. None: no limit by number; ``bounded`` needs one."""
    waiting_max: int = option(64, "--admission-queue", least=0)
    """Requests that may wait for admission, by turns of their tenants; more are rejected with 429."""
    wait_ns: int = option(10 * NS_PER_S, "--admission-wait", form=SECONDS, least=0.001)
    """Seconds that a request may wait for admission; then it is rejected with 503."""
    output_tokens_max: int = 256
    """Output tokens that count as memory, at most, for each sequence of a request."""
    unit_tokens: int | None = None
    """Memory is counted in blocks of this many tokens. None: the instances' blocks. Not with ``cache``."""
    evictions_max: int | None = option(None, "--admission-evictions", least=0)
    """None: KV of finished requests counts as free. N: it counts as used; admitting one request may evict the KV of at
    most N finished requests, oldest first."""
    hold: bool = option(False, "--admission-hold")
    """With ``cache``: chats that fit in memory keep their KV, and go on before new requests of their tenant."""
    kept_ns: int = 60 * NS_PER_S
    """KV of a request that finished longer ago counts as free, whatever ``evictions_max`` says."""
    weights: tuple[tuple[str, int], ...] = option((), "--tenant-weight", form=WEIGHTS)
    """NAME=2: while several tenants wait, this one gets twice the service of a tenant with weight 1, in admission and
    on instances. Tenants that are not named have weight 1. Repeatable."""
    objectives: tuple[tuple[str, int, int], ...] = option((), "--tenant-slo", form=OBJECTIVES)
    """NAME=3000:200: milliseconds that the first token and each further one may take, for requests of this tenant that
    do not say so themselves (``slo_ttft_ms``, ``slo_tpot_ms``). Either may be left out. Repeatable."""
    priority_across_tenants: bool = option(False)
    """Priorities order the requests of all tenants, before the tenants' turns; any key can then delay all
    others. False: they order the requests of one tenant."""

    def __post_init__(self) -> None:
        ADMISSION_CONTROLLERS.check_name(self.controller[0])
        if self.mode == Admission.BOUNDED and self.active_max is None:
            message, hint = "bounded admission needs a number of requests", "e.g. --max-active 32"
            raise UserError(message, hint=hint, param="max_active")
        check_ranges(self)
        _positive("kept_ns", self.kept_ns, "give a positive time")
        if self.output_tokens_max < 0:
            raise UserError("output_tokens_max must not be negative", param="output_tokens_max")
        if self.hold and (self.mode != Admission.CACHE or self.evictions_max is not None):
            raise UserError("--admission-hold needs --admission cache, without --admission-evictions", param="hold")
        if self.mode == Admission.CACHE and self.unit_tokens is not None:
            raise UserError("cache-aware admission counts in the instances' own blocks", param="unit_tokens")
        for tenant, weight in self.weights:
            _positive(f"weight of {tenant!r}", weight, "1 is every tenant's; 2 gets twice as much")

    @property
    def controller(self) -> tuple[str, dict[str, str]]:
        """Name and settings of the admission controller that ``mode`` names. Raises :class:`UserError`."""
        return split_settings(self.mode, "--admission")

    @property
    def counts_memory(self) -> bool:
        """Whether the blocks that requests need are counted, each of its sequences at one instance."""
        return self.mode in (Admission.MEMORY, Admission.CACHE)

    @property
    def shared_mode(self) -> str:
        """What several routers must agree on. Empty: nothing is limited, and each decides alone."""
        return "" if self.mode == Admission.NONE else str(self.mode)

    def refuse_idle(self) -> None:
        """Raise :class:`UserError` for a limit that does nothing in this mode."""
        limits = {"--max-active": self.active_max, "--admission-evictions": self.evictions_max}
        if self.mode == Admission.NONE and (idle := [flag for flag, value in limits.items() if value is not None]):
            hint = "add --admission bounded, memory or cache"
            raise UserError(f"{idle[0]} does nothing without admission", hint=hint)
        if not self.counts_memory and self.evictions_max is not None:
            raise UserError(f"{self.mode} admission does not look at memory", hint="use --admission memory or cache")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Everything that the decisions of the ``Cluster`` machine depend on."""

    caching: Caching = option(Caching.PD_CACHING_3)
    """Which instances cache KV (MemServe 5.1). ``off``: none. ``pd-caching-1``: prefill instances. ``pd-caching-2``:
    decode instances too. ``pd-caching-3``: both, and generated KV goes back to the prefill instance."""
    policy: str = option("cost")
    """How an instance is chosen for a request: ``least-load``, ``session``, ``prompt-tree``, ``cost`` (weighs prefix,
    queue, tier and transfer together), ``affinity`` (session, exact hit, longest prefix, least load, in this order),
    ``best-fit`` (the least memory left over), or the name of a plug-in (`memserve doctor` lists them)."""
    transfer: TransferPolicy = option(TransferPolicy.BY_REQUEST_AGG)
    """How KV goes from prefill to decode instances: ``by-layer``, while the next layers are computed; ``by-request``,
    behind the prefill, page by page; ``by-request-agg``, behind it, in whole blocks; ``auto``: as is quickest for each
    request, by its size, what waits before it, and measured costs."""
    sequence_parallel: str = option("auto")
    """How many instances may share a sequence: one that fits none of them, or a long prompt, which they compute at once
    where that is quicker. ``auto``: as many as there are. ``off``: none; what fits none is rejected. N: at most N."""
    migration: str = option("drain")
    """When a running request goes on at another instance, with its KV. ``drain``: when its own one drains (SIGTERM,
    ``memserve scale``, an upgrade). ``auto``: also where requests wait for memory and another instance has room.
    ``off``: never; an instance that drains finishes what it has."""
    dead_after_ns: int = 5 * NS_PER_S
    """A member that is silent for this long is taken to be dead."""
    call_every_ns: int = NS_PER_S
    """Between two requests to a store to join (``memserve serve --store``)."""
    store_copies: int = option(1, "--store-copies", least=1)
    """In how many of several stores each block lies. 2: the death of one store costs no hit."""
    stalled_after_ns: int = 60 * NS_PER_S
    """A request without progress for this long, on a member that sends heartbeats, is tried on another instance."""
    attempts_max: int = 4
    """Instances that a request is tried on before it ends with an error."""
    unplaced_ns: int = 30 * NS_PER_S
    """Longest wait of a request for an instance that can take it."""
    tree_ttl_ns: int = 600 * NS_PER_S
    """Tree entries that no KV event confirms are dropped after this long."""
    speculative_ttl_ns: int = 20 * NS_PER_S
    """Tree entries made at dispatch, of instances that publish KV events, are dropped after this long without one."""
    handle_tokens_max: int = 4 << 20
    """Tokens of all named prefixes (documents, pinned sessions, ``cache_control``) together; each counts 256 more.
    Above the limit, the tenant with most tokens loses its oldest prefix."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """Which requests are admitted."""
    answer_ns: int = option(60 * NS_PER_S, "--answer-wait", form=SECONDS, least=0.001)
    """Seconds that a request with an ``Idempotency-Key`` goes on without its client, and that its answer is kept."""
    answer_bytes: int = option(64 * MIB, "--answer-memory", form=SIZE)
    """Memory of the answers that are kept for clients that ask again; above it the oldest are dropped."""

    def __post_init__(self) -> None:
        _positive("handle_tokens_max", self.handle_tokens_max, "give named prefixes some room")
        ROUTING_POLICIES.check_name(self.policy)
        if self.migration not in ("auto", "drain", "off"):
            message = f"requests cannot migrate {self.migration!r}"
            raise UserError(message, hint="use auto, drain or off", param="migration")
        if not re.fullmatch(r"auto|off|[2-9]|[1-9]\d{1,3}", self.sequence_parallel):
            message = f"sequences cannot be shared by {self.sequence_parallel!r} instances"
            raise UserError(message, hint="use auto, off or a number from 2 on", param="sequence_parallel")
        if self.admission.counts_memory and self.sequence_parallel not in ("auto", "off"):
            message = f"admission by {self.admission.mode} counts the memory of one instance for each sequence"
            raise UserError(
                message, hint="use --sequence-parallel off, or --admission bounded", param="sequence_parallel"
            )

    @property
    def sequence_instances_max(self) -> int:
        """The most instances that share a sequence. 1: none is shared."""
        counts = {"auto": 1024, "off": 1}
        return 1 if self.admission.counts_memory else counts.get(self.sequence_parallel) or int(self.sequence_parallel)


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """How an instance keeps in touch with its router."""

    beat_ns: int = NS_PER_S // 2
    """Time between heartbeats, or requests to join. A member that misses ten heartbeats is taken to be dead."""
    stats_every: int = 4
    """Every Nth heartbeat carries the engine's statistics."""
    asks_after_ns: int = NS_PER_S
    """With several addresses of routers: a router that sends nothing for this long is asked for a message."""
    silent_after_ns: int = 6 * NS_PER_S
    """A router that sends nothing for this long is taken to be gone, and the next address is tried. By then the
    router has already taken the instance to be dead."""
    turn_ns: int = 2 * NS_PER_S
    """How long each further address has to answer."""


ROUNDED_KINDS = ("int8", "int4")
"""What the weights of a checkpoint may be rounded to when it is loaded."""
QUANTIZATIONS = ("none", "auto", *ROUNDED_KINDS)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built: flags of ``memserve serve`` and ``memserve instance``, keywords of ``memserve.LLM``."""

    model: str = option(DEFAULT_MODEL)
    """A model folder, a ``.gguf`` file, a hub id, or the bundled default."""
    dtype: str = option("auto")
    """``auto``, ``float32``, ``bfloat16`` or ``float16``, for weights, activations and KV alike."""
    quantization: str = option("auto")
    """How quantised weights, of a ``.gguf`` file or a model folder, are computed with. ``auto``: as they are stored,
    on a CPU with activations rounded to 15 bits, or to 8 where that hardly changes the model's answers (then requests
    with ``exact`` are refused), or not at all with FP8, on a GPU with activations as they are; with ``--dtype
    float32``, on several GPUs and with adapters on a GPU as ``none``. ``none``: as
    numbers of ``--dtype``. ``int8``, ``int4``: as ``auto``, with the weights of a folder that are numbers rounded to
    that first, once."""
    device: str = option("auto")
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto``: a GPU that torch can use, else the CPU."""
    kv_memory_bytes: int = option(384 * MIB, "--kv-memory", form=SIZE, vllm="kv_cache_memory_bytes", vllm_form=SIZE)
    """Memory of the KV cache that attention reads (tier HBM), e.g. 512MiB."""
    dram_memory_bytes: int = option(0, "--dram-memory", form=SIZE, vllm="swap_space", vllm_form=GIBIBYTES)
    """Memory of the second tier (DRAM), e.g. 4GiB: evicted prefixes and preempted sequences move there. 0: none."""
    kv_folder: tuple[str, int] | None = option(None, "--kv-ssd", form=KV_FOLDER)
    """DIR=20GiB: a file of this size in folder DIR goes on where DRAM ends, for this process alone. What shall outlive
    it belongs into a store (``--ssd``). For CPUs. None: the second tier ends with DRAM."""
    kv_dtype: str = option(AS_COMPUTED, vllm="kv_cache_dtype")
    """How KV lies in both tiers. ``auto``: as it was computed. ``int8``, ``fp8`` (e4m3), ``int4``: rounded when it is
    computed, to codes of a byte or half a byte; answers may differ, and requests with ``exact`` are refused."""
    kv_lower_dtype: str = option(AS_COMPUTED)
    """The same for the second tier alone: attention reads KV as it was computed, and what moves to DRAM is rounded on
    its way. ``auto``: as in the first tier."""
    kv_codec: str = option("auto")
    """Whether KV rests on a store's disks, and travels between hosts, in fewer bytes, without losing a bit. ``auto``:
    where it pays, by what disk, link and codec take here; ``none``; ``always``."""
    window_kv: str = option("auto")
    """Where KV of layers lies that read a window of the last tokens, beside layers that read everything. ``apart``: it
    goes as soon as no sequence reads it, and prefixes are reused where their last window is there. ``together``: it
    stays as long as that of the other layers. ``auto``: apart on CPUs, without ``--dram-memory``."""
    gpu_memory_share: float | None = option(None, least=0.01, most=1.0, vllm="gpu_memory_utilization")
    """Share of the GPU's memory for this instance: weights, steps, and what is left of it KV, instead of
    ``--kv-memory``. None: KV gets ``--kv-memory``, and where that is not set either, the instances that
    ``memserve serve`` starts on a GPU share nine tenths of it."""
    caching: bool = option(True, "--no-cache", form=NEGATED, vllm="enable_prefix_caching")
    """Reuse the KV of shared prefixes. False: Do not reuse the KV of shared prefixes."""
    foreign_kv: bool = option(True, "--no-foreign-kv", form=NEGATED)
    """Share KV with engines that ask for it, through a store. False: Share no KV with other engines through a store."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Batching of the engine."""
    parallel: Parallel = field(default_factory=Parallel)
    """Workers of the engine."""
    max_model_tokens: int | None = option(None, least=1, vllm="max_model_len")
    """Context limit: tokens of a prompt and its answer together. None: the model's own."""
    block_tokens: int = option(32, least=1, vllm="block_size")
    """Tokens of one KV block."""
    threads: int | None = option(None, least=1)
    """CPU threads of the device. None: every core."""
    pooling: str = option("auto")
    """Whether the model embeds, for ``/v1/embeddings``, instead of generating. ``auto``: as its files say
    (``modules.json`` of sentence-transformers). ``last``, ``mean``: by the hidden state of a text's last token, or the
    mean over all. ``none``: it generates. On CPUs."""
    lora: tuple[str, ...] = option((), form=MANY, vllm="lora_modules", vllm_form=MANY)
    """A LoRA adapter as NAME=FOLDER; requests name it as their model. May be repeated."""
    lora_updates: LoraUpdates = field(default_factory=LoraUpdates)
    """Adapters that come and go while the engine serves."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.quantization not in QUANTIZATIONS:
            hint = f"use one of {', '.join(QUANTIZATIONS)}"
            raise UserError(f"unknown quantization {self.quantization!r}", hint=hint, param="quantization")
        if self.pooling not in ("auto", "last", "mean", "none"):
            hint = "use auto, last, mean or none"
            raise UserError(f"unknown pooling {self.pooling!r}", hint=hint, param="pooling")
        if self.window_kv not in ("auto", "apart", "together"):
            hint = "use auto, apart or together"
            raise UserError(f"unknown place {self.window_kv!r} of windows' KV", hint=hint, param="window_kv")
        check_kv_dtypes(self.kv_dtype, self.kv_lower_dtype, self.dram_memory_bytes)
        check_kv_codec(self.kv_codec)

    def _check_folder(self, *, on_gpu: bool, rounds: bool) -> None:
        hurdles = (
            (on_gpu, "on a GPU", "--device cpu", "device"),
            (rounds, "with another dtype below HBM", "no --kv-lower-dtype", "kv_lower_dtype"),
            (self.parallel.worker_count > 1, "by several workers", "--tensor-parallel 1", "tensor"),
        )
        _refuse_asked("KV in a file (--kv-ssd)", hurdles if self.kv_folder is not None else ())

    @property
    def lower_bytes(self) -> int:
        """Of both, DRAM and the file behind it."""
        return self.dram_memory_bytes + (self.kv_folder[1] if self.kv_folder is not None else 0)

    @property
    def may_keep_file(self) -> bool:
        """Whether the weights of a ``.gguf`` file may stay in it, as they are."""
        return self.quantization == "auto" and self.dtype in ("auto", "bfloat16")

    def instance_config(
        self,
        geometry: KVGeometry,
        model_max_tokens: int,
        namespace: str,
        vocab_size: int = VOCAB_MAX,
        *,
        on_gpu: bool = False,
        kv_bytes: int | None = None,
        states: StateGeometry = NO_STATE,
        slot_bytes: int = 0,
        layout: LayerLayout | None = None,
    ) -> InstanceConfig:
        """The configuration of the instance machine, for a model with ``geometry`` on a GPU or a CPU. KV that may be
        rounded has a namespace of its own, and so has KV that no other engine shares. ``kv_bytes``: memory for KV,
        where that is not ``kv_memory_bytes``. ``states``: the recurrent state beside it, and ``slot_bytes`` what
        all workers together have of one; 0: as much as one worker. ``layout``: where the KV of layers lies that do not
        all keep the same.

        Raises :class:`UserError` when the memory holds fewer than two blocks.
        """
        check(geometry.kv_dtype == self.kv_dtype, "a geometry of another KV dtype than the options'")
        lower = self.kv_lower_dtype if self.kv_lower_dtype != geometry.kv_dtype else AS_COMPUTED
        check_tiers(self.scheduler.layerwise, lower, self.lower_bytes, on_gpu=on_gpu)
        check_coded(geometry, lower)
        self._check_folder(on_gpu=on_gpu, rounds=lower != AS_COMPUTED)
        rounded = f"|kv {geometry.kv_dtype}" * (geometry.kv_dtype != AS_COMPUTED) + f"|{lower}" * (lower != AS_COMPUTED)
        rounded += "|latents" * geometry.latent
        block_bytes = (geometry.block_bytes, lower_block_bytes(geometry, lower))
        memory_bytes = self.kv_memory_bytes if kv_bytes is None else kv_bytes
        step_tokens = self.scheduler.max_step_tokens or (STEP_TOKENS_GPU if on_gpu else STEP_TOKENS_CPU)
        scheduler = dataclasses.replace(self.scheduler, max_step_tokens=step_tokens)
        pages = None
        if states:
            self.check_states(states, on_gpu=on_gpu)
            sizes = memory_bytes, scheduler.max_running, slot_bytes, scheduler.draft_tokens
            # what moves between tiers are whole blocks
            whole, is_asked = self.dram_memory_bytes > 0, scheduler.max_running != SchedulerConfig().max_running
            divided = divide_memory(geometry, states, *sizes, whole_blocks=whole, is_asked=is_asked)
            scheduler = dataclasses.replace(scheduler, max_running=divided.slots)
            first_blocks, pages, rounded = divided.blocks, divided.pages, f"{rounded}|state {states.digest}"
        else:
            first_blocks = hbm_blocks(geometry, memory_bytes)
        if layout is not None:
            self.check_layout(layout, on_gpu=on_gpu)
            rounded += f"|layers {layout.digest}"
        parts = None if layout is None else layout.window_pages(geometry.block_tokens, scheduler.chunk_tokens)
        ssd_folder, ssd_bytes = self.kv_folder or ("", 0)
        blocks = first_blocks, self.dram_memory_bytes // block_bytes[1] + ssd_bytes // block_bytes[1]
        pool = PoolConfig(
            *blocks, self.caching, lower_dtype=lower, block_bytes_by_tier=block_bytes, states=pages, windows=parts,
            layers_alike=layout is None, ssd_blocks=ssd_bytes // block_bytes[1], ssd_folder=ssd_folder,
        )  # fmt: skip
        return InstanceConfig(
            max_model_tokens=min(self.max_model_tokens or model_max_tokens, model_max_tokens),
            namespace=namespace + rounded + "|own" * (not self.foreign_kv),
            pool=pool,
            scheduler=scheduler,
            vocab_size=vocab_size,
        )

    def for_role(self, role: Role) -> EngineOptions:
        """These options, of an instance with ``role``."""
        return dataclasses.replace(self, parallel=self.parallel.for_role(role))

    def keeps_windows_apart(self, *, on_gpu: bool = False) -> bool:
        """Whether KV of layers that read a window lies apart. Raises :class:`UserError` where it shall and cannot."""
        if self.window_kv == "together":
            return False
        asked = (
            (self.lower_bytes > 0, "with a second tier", "no --dram-memory", "dram_memory"),
            (on_gpu, "on a GPU", "--device cpu", "device"),
            self._by_layer,
        )
        for is_asked, how, hint, param in asked:
            if is_asked and self.window_kv == "apart":
                hint = f"use {hint}, or --window-kv auto"
                raise UserError(f"KV of windows does not lie apart {how} yet", hint=hint, param=param)
            if is_asked:
                return False
        return True

    @property
    def _by_layer(self) -> tuple[bool, str, str, str]:
        return self.scheduler.layerwise != "off", "by layer", "--layerwise off", "layerwise"

    @property
    def shares_layers_kv(self) -> bool:
        """Whether layers that read the KV of another one keep none. Else each has what it reads."""
        return self.scheduler.layerwise == "off" and self.parallel.worker_count == 1

    def check_layout(self, layout: LayerLayout, *, on_gpu: bool) -> None:
        """Raises :class:`UserError` for options that a model whose layers keep KV of several shapes cannot be served
        with: not yet."""
        asked = (
            self._by_layer,
            (self.parallel.tensor > 1, "by several workers", "--tensor-parallel 1", "tensor"),
            (on_gpu and self.parallel.pipeline > 1, "by several GPUs", "--pipeline-parallel 1", "pipeline"),
            (self.kv_lower_dtype != AS_COMPUTED, "with rounded KV", "no --kv-lower-dtype", "kv_lower_dtype"),
            (self.kv_dtype != AS_COMPUTED, "with rounded KV", "no --kv-dtype", "kv_dtype"),
        )
        _refuse_asked("a model whose layers keep KV of several shapes", asked if not layout.has_one_shape else ())

    def check_states(self, states: StateGeometry, *, on_gpu: bool = False) -> None:
        """Raises :class:`UserError` for options that a model with a recurrent state cannot be served with: not yet."""
        has_adapters = bool(self.lora or self.lora_updates.lora_folder)
        asked = (
            self._by_layer,
            (on_gpu and self.scheduler.draft_tokens > 0, "on a GPU with drafts", "no --draft-tokens", "draft_tokens"),
            (on_gpu and self.parallel.worker_count > 1, "by several GPUs", "one GPU", "tensor"),
            (self.kv_lower_dtype != AS_COMPUTED, "with rounded KV", "no --kv-lower-dtype", "kv_lower_dtype"),
            (self.kv_folder is not None, "with KV in a file", "no --kv-ssd", "kv_ssd"),
            (has_adapters and on_gpu, "on a GPU with adapters", "no --lora, no --lora-folder", "lora"),
        )
        _refuse_asked("a model with a recurrent state", asked)
