"""What the router says about itself: totals, and snapshots for metrics, a dashboard and people."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.base.types import FinishReason, Role
from memserve.protocol.peers import Load, Peer
from memserve.router.placement.reuse_ceiling import PromptTokens


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    requests: int = 0
    requests_finished: int = 0
    requests_rejected: int = 0
    requests_cancelled: int = 0
    requests_expired: int = 0
    """Ended by the cluster at their deadline."""
    requests_failed: int = 0
    """Ended with an error after the last attempt."""
    dispatches: int = 0
    """Attempts sent to instances."""
    resumptions: int = 0
    """Of them: not the request's first."""
    decisions: dict[tuple[str, str], int] = field(default_factory=dict)
    """Dispatches by policy and by what the first instance does for the prompt: ``reuse`` (it has a prefix), ``fetch``
    (another one has more of it) or ``compute``."""
    attempts_failed: dict[str, int] = field(default_factory=dict)
    """Attempts that failed, by cause: ``gone``, ``refused``, ``stalled``, ``lost``, ``contradiction``, ``gap``,
    ``error``."""
    sequences_split: int = 0
    """Attempts that several instances share, because their sequence fits none."""
    outputs_late: int = 0
    """Outputs that were dropped: of attempts that are over, or tokens that the client has already."""
    tokens: int = 0
    """Given to clients."""
    answers_continued: int = 0
    """Clients that asked again for an answer by its key, and got what was known of it."""
    attempts_adopted: int = 0
    """Attempts of an earlier router that went on as this one's."""
    members_joined: int = 0
    members_readopted: int = 0
    """Members of the last router that joined again, with all that they had cached."""
    members_refused: int = 0
    members_died: int = 0
    members_left: int = 0
    expelled: int = 0
    """Messages of unknown or dead incarnations."""
    kv_changes: int = 0
    """KV events applied."""
    kv_gaps: int = 0
    """Times that KV events were missing and asked for."""
    kv_snapshots: int = 0
    matched_tokens: int = 0
    """Sum over dispatches: the prefix that the first instance was believed to have."""
    prompt_tokens: int = 0
    """Sum over dispatches."""
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    """Sequences by finish reason."""


@dataclass(slots=True)
class AdmissionStats:
    """Admission before placement: totals since the start, and in a snapshot gauges of the moment."""

    admitted: int = 0
    released: int = 0
    """Admitted requests that have ended, in whatever way."""
    queued: int = 0
    """Requests that had to wait, those that were rejected later included."""
    waited_ns: int = 0
    """Time that admitted requests waited, in total."""
    rejected: dict[str, int] = field(default_factory=dict)
    """By cause: ``queue`` (too many waited), ``wait`` (for too long), ``memory`` (it would never fit) or ``pressure``
    (evictions were not enough, and no request was running)."""
    evictions: int = 0
    """Finished requests whose counted memory newcomers took (with ``evictions_max``)."""
    active: int = 0
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

    requests_live: int
    requests_unplaced: int
    """Admitted requests that no instance runs."""
    instances: int
    """Members with a model."""
    instances_draining: int
    tree_blocks: int
    tree_bytes: int
    """Host memory of the trees."""
    handles: int
    counters: Counters
    """A copy."""
    admission: AdmissionStats = field(default_factory=AdmissionStats)
    """A copy."""
    stores: int = 0
    """Members that hold KV and run nothing."""
    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)
    """What an unlimited cache would have had of all prompts."""
    tenant_prompt_tokens: dict[str, PromptTokens] = field(default_factory=dict)
    """The same by tenant; of a bounded number of tenants."""
