"""What the cluster can say about itself: frozen snapshots for metrics, a dashboard and people (level 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.messages import Load, Peer
from memserve.types import FinishReason, Role


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
    """Attempts that came to nothing, by cause: ``gone``, ``refused``, ``stalled``, ``contradiction``, ``gap``,
    ``error``."""
    outputs_late: int = 0
    """Dropped: of attempts that nobody waits for any more, or tokens that the client has already."""
    tokens: int = 0
    """Given to clients."""
    members_joined: int = 0
    members_readopted: int = 0
    """Of the last router: they answered the call, with all that they had cached."""
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
class GateStats:
    """The gate before placement: totals since the start, and gauges of the moment in a copy."""

    admitted: int = 0
    """Requests that were let in."""
    left: int = 0
    """Of them: ended, in whatever way."""
    queued: int = 0
    """Requests that had to wait, whatever became of them."""
    waited_ns: int = 0
    """Time that those waited that were let in, in total."""
    rejected: dict[str, int] = field(default_factory=dict)
    """By cause: ``queue`` (too many waited), ``wait`` (for too long), ``memory`` (it would never fit) or ``pressure``
    (evictions were not enough, and nobody was left to wait for)."""
    evictions: int = 0
    """Ended requests whose memory newcomers took (with ``evictions_max``)."""
    active: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    """By tenant."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One member."""

    peer: Peer
    role: Role
    state: str
    """``live`` or ``draining``."""
    address: str
    host_id: str
    load: Load
    """As the last heartbeat said."""
    stats: bytes
    """The engine's statistics of the last heartbeat that carried them (msgpack), or ``b""``."""
    heard_ns: int
    """When it was last heard of."""
    joined_ns: int
    requests: int
    """Requests that it is involved in."""
    prefill_tokens: int
    """Uncomputed prompt tokens, as the router takes it: the heartbeat's and what was sent since."""
    context_tokens: int
    """Tokens in the contexts of sequences that decode there, likewise."""
    hbm_blocks: int
    dram_blocks: int
    tree_blocks: int
    """Cached blocks that the router knows of, those that it only expects included."""
    next_event: int
    """Number of the next KV event to be applied."""
    events_aside: int
    """Batches of KV events that wait for an earlier one."""


@dataclass(frozen=True, slots=True)
class AttemptStory:
    """One try to run a request."""

    attempt_id: str
    first: Peer
    """Who computes the prompt."""
    decode_at: Peer | None
    """Who decodes, when that is another one."""
    holders: tuple[Peer, ...]
    dispatched_ns: int
    why: str
    """The policy's reason."""
    ended: str = ""
    """Why it came to nothing; empty while it lasts."""


@dataclass(frozen=True, slots=True)
class RouteStory:
    """What was decided for a live request, and why."""

    request_id: str
    arrived_ns: int
    emitted_tokens: tuple[int, ...]
    """For each sequence: how many tokens the client has."""
    ended: tuple[int, ...]
    """Sequences that have ended."""
    attempts: tuple[AttemptStory, ...]


@dataclass(frozen=True, slots=True)
class HandleView:
    """A named, pinned prefix."""

    handle: str
    tenant: str
    tokens: int
    """Asked for."""
    pinned_tokens: int | None
    """As the instance said; ``None`` = it has not answered yet."""
    peer: Peer | None
    """Where it lies; ``None`` = nobody has it."""
    expires_ns: int


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """Gauges of the moment, and totals."""

    requests_live: int
    requests_unplaced: int
    """Of them: let in, but no instance could take them so far."""
    instances: int
    instances_draining: int
    tree_blocks: int
    tree_bytes: int
    """Host memory of the trees."""
    handles: int
    counters: Counters
    """A copy."""
    gate: GateStats = field(default_factory=GateStats)
    """A copy."""
