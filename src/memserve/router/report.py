"""What the router says about itself: totals, and snapshots for metrics, a dashboard and people."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.base.metrics import counter, gauge
from memserve.base.types import FinishReason, Role
from memserve.protocol.peers import Load, Peer
from memserve.router.placement.reuse_ceiling import PromptTokens


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    requests: int = counter("router_requests", "Requests that reached the router")
    requests_finished: int = 0
    requests_rejected: int = 0
    requests_cancelled: int = 0
    requests_expired: int = 0
    """Ended by the cluster at their deadline."""
    requests_failed: int = counter("router_requests_failed", "Requests that ended with an error after the last attempt")
    dispatches: int = counter("router_dispatches", "Attempts to run a request that were sent to instances")
    resumptions: int = counter(
        "router_resumptions", "Attempts sent to instances after an earlier attempt of the same request had failed"
    )
    decisions: dict[tuple[str, str], int] = field(default_factory=dict)
    """Dispatches by policy and by what the first instance does for the prompt: ``reuse`` (it has a prefix), ``fetch``
    (another one has more of it) or ``compute``."""
    transfers_chosen: dict[str, int] = field(default_factory=dict)
    """Handoffs whose mode ``--transfer auto`` has chosen, by mode."""
    attempts_failed: dict[str, int] = field(default_factory=dict)
    """Attempts that failed, by cause: ``gone``, ``refused``, ``stalled``, ``lost``, ``contradiction``, ``gap``,
    ``error``."""
    recomputed_tokens: int = counter(
        "router_recomputed_tokens",
        "Tokens of prompts and answers that a failed attempt had computed and the next one computes again",
    )
    migrations: int = counter("router_migrations", "Running requests that instances were asked to hand to another one")
    migrated: int = counter("router_migrated", "Running requests that went on at another instance with their KV")
    prompts_striped: int = counter(
        "router_prompts_striped", "Attempts with a prompt that several instances compute at once"
    )
    sequences_split: int = counter("router_sequences_split", "Attempts with a sequence that several instances share")
    """Because it fits none of them."""
    outputs_late: int = counter(
        "router_late_outputs",
        "Outputs of instances that were dropped because their request had ended or had them already",
    )
    tokens: int = 0
    """Given to clients."""
    answers_continued: int = 0
    """Clients that asked again for an answer by its key, and got what was known of it."""
    attempts_adopted: int = 0
    """Attempts of an earlier router that went on as this one's."""
    members_joined: int = counter("router_members_joined", "Incarnations of instances that joined as new members")
    members_readopted: int = counter(
        "router_members_readopted", "Instances of an earlier router that came back with their cache"
    )
    members_refused: int = counter("router_members_refused", "Times that a join was refused, for the reason in the log")
    members_died: int = counter(
        "router_members_died", "Members that died: their process ended, they fell silent, or were replaced"
    )
    members_left: int = counter("router_members_left", "Members that left gracefully")
    expelled: int = counter(
        "router_members_expelled", "Messages of processes that are not members, but behaved as such"
    )
    kv_changes: int = counter(
        "router_kv_changes", "KV events of instances that were applied to the router's prefix trees"
    )
    kv_gaps: int = counter("router_kv_gaps", "Times that KV events of an instance were missing and were requested")
    kv_snapshots: int = 0
    matched_tokens: int = counter(
        "router_matched_tokens", "Prompt tokens dispatched to an instance that was believed to have their KV"
    )
    prompt_tokens: int = counter("router_prompt_tokens", "Prompt tokens of all attempts sent to instances")
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    """Sequences by finish reason."""


@dataclass(slots=True)
class AdmissionStats:
    """Admission before placement: totals since the start, and in a snapshot gauges of the moment."""

    admitted: int = counter("admission_admitted", "Requests that were admitted before placement")
    released: int = 0
    """Admitted requests that have ended, in whatever way."""
    queued: int = counter("admission_queued", "Requests that waited for admission, including requests rejected later")
    waited_ns: int = counter(
        "admission_waited_seconds", "Seconds that requests waited before they were admitted, added up"
    )
    rejected: dict[str, int] = field(default_factory=dict)
    """By cause: ``queue`` (too many waited), ``wait`` (for too long), ``memory`` (it would never fit), ``pressure``
    (evictions were not enough, and no request was running) or ``rule`` (a plug-in said so)."""
    rule_failures: int = counter(
        "admission_rule_failures",
        "Times that a plug-in's admission controller failed, and the other limits judged alone",
    )
    evictions: int = counter(
        "admission_evictions", "Finished requests whose counted memory went to newly admitted requests"
    )
    """With ``evictions_max``."""
    active: int = gauge("admission_active", "Admitted requests that have not ended")
    waiting: dict[str, int] = field(default_factory=dict)
    """By tenant."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One member."""

    peer: Peer
    role: Role
    state: str
    """``live``, ``draining`` or ``rejoining``."""
    address: str
    host_id: str
    load: Load
    """As the last heartbeat said."""
    stats: bytes
    """The engine's statistics of the last heartbeat that carried them (msgpack), or ``b""``."""
    last_seen_ns: int
    """When it was last heard of."""
    joined_ns: int
    requests: int
    """Requests that depend on it."""
    prefill_tokens: int
    """Uncomputed prompt tokens: those of the last heartbeat, and those sent since."""
    context_tokens: int
    """Tokens in the contexts of sequences that decode there, counted alike."""
    hbm_blocks: int
    dram_blocks: int
    tree_blocks: int
    """Cached blocks that the router knows of, expected ones included."""
    next_event: int
    """Number of the next KV event to be applied."""
    events_aside: int
    """Batches of KV events that wait for an earlier one."""


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """Gauges of the moment, and totals."""

    requests_live: int = gauge("router_requests_live", "Requests that the router has and that have not ended")
    requests_unplaced: int = gauge("router_requests_unplaced", "Requests admitted that no instance could take so far")
    instances: int = gauge("router_instances", "Instances that are members of the cluster")
    instances_draining: int = gauge(
        "router_instances_draining", "Instances that finish what they have and take nothing new"
    )
    tree_blocks: int = gauge("router_tree_blocks", "Cached KV blocks that the router knows of, over all instances")
    tree_bytes: int = gauge("router_tree_bytes", "Host memory of the router's prefix trees in bytes")
    handles: int = gauge("router_handles", "Named prefixes (documents and sessions) that the router keeps pinned")
    counters: Counters = field(default_factory=Counters)
    """A copy."""
    admission: AdmissionStats = field(default_factory=AdmissionStats)
    """A copy."""
    stores: int = 0
    """Members that hold KV and run nothing."""
    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)
    """What an unlimited cache would have had of all prompts."""
    tenant_prompt_tokens: dict[str, PromptTokens] = field(default_factory=dict)
    """The same by tenant; of a bounded number of tenants."""
    tenant_retained_tokens: dict[str, int] = field(default_factory=dict)
    """What instances said last that they retain of named prefixes."""
