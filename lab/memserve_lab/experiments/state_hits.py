"""Which recurrent states are worth keeping: token hit rates of hybrid models at equal memory, policy by policy.

The production machines replay conversations, agents and traces: the pool, its prefix index and snapshots, and what the
scheduler does about blocks and states of a sequence (``SequenceMemory``), one request at a time, in the order in which
requests arrive. No device and no clock is needed for a hit rate. What differs between rows is one object, the policy
(:class:`~memserve.kv.snapshot_policy.SnapshotPolicy`): where snapshots are taken, and which goes next. Rules that hold
for every policy favour the rivals: KV behind which no snapshot stands goes first, and a snapshot goes without the KV
that others need.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from memserve.base.config import PoolConfig
from memserve.base.errors import InvariantError
from memserve.base.states import StatePages
from memserve.base.types import Request, SamplingParams, StopParams, Tier, TokenArray
from memserve.base.units import NS_PER_S, ceil_div
from memserve.instance.events import StepPlan
from memserve.instance.scheduler.memory import SequenceMemory
from memserve.instance.scheduler.sequence import Group
from memserve.instance.scheduler.sequence import Sequence as ScheduledSequence
from memserve.kv.costs import CostModel, PreemptionCosts, PreemptionModel, PrefillCurve
from memserve.kv.pool import BlockPool
from memserve.kv.snapshot_policy import SnapshotPolicy
from memserve.kv.state_snapshot import PlannedPrompt, StateSnapshot
from memserve_lab.workloads.arrivals import draws
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.tokens import Meter, unrolled

BLOCK_TOKENS = 32
STEP_TOKENS = 8192
"""Of a prompt in one step, as ``GPU_SCHEDULER`` of replays has it."""
DEVICE_FLOPS = 989e12 * 0.55
"""An H100's bf16 peak and the share reached, as the simulator's: policies see ratios of times alone."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A hybrid model by its proportions."""

    name: str
    attention_layers: int
    kv_values: int
    """K and V values of a token and layer that attends."""
    state_layers: int
    state_bytes: int
    """Of a layer: the recurrent state and the convolution's tail."""
    token_flops: float
    """Linear layers and states, for a token."""
    pair_flops: float
    """Attention, for a query and a key, over all layers that attend."""

    @property
    def token_bytes(self) -> int:
        """KV of a token, in 16 bits a value."""
        return 2 * self.kv_values * self.attention_layers

    @property
    def sequence_bytes(self) -> int:
        """Of one snapshot."""
        return self.state_layers * self.state_bytes

    @property
    def costs(self) -> CostModel:
        """What computing takes."""
        per_flop = NS_PER_S / DEVICE_FLOPS
        return CostModel(prefill=PrefillCurve(0.0, self.token_flops * per_flop, self.pair_flops * per_flop))

    @property
    def page_tokens(self) -> int:
        """Tokens of a block of an engine whose pages are all as large as a layer's state (vLLM), in steps of 16."""
        return ceil_div(self.state_bytes, 2 * self.kv_values * 16) * 16

    def pages(self) -> StatePages:
        """How snapshots lie among blocks."""
        block_bytes = BLOCK_TOKENS * self.token_bytes
        return StatePages(self.sequence_bytes, ceil_div(self.sequence_bytes, block_bytes))


QWEN3_NEXT = Hybrid(
    "Qwen3-Next", 12, 2 * 2 * 256, 36, 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2, 2 * 3e9, 4 * 12 * 4096
)
"""``Qwen3NextConfig``: 48 layers, every fourth attends with 2 KV heads of 256 (16 query heads); 32 value heads of
128 x 128 in float32 and a convolution over 8,192 channels, kernel 4, in bfloat16; 3 billion active parameters."""
MARCONI_7B = Hybrid(
    "Marconi's 7B", 4, 2 * 4096, 24, 4096 * 128 * 2 + (2 * 4096 + 2 * 128) * 4 * 2,
    24 * (12 * 4096**2 + 16 * 4096 * 128) + 4 * 8 * 4096**2 + 28 * 16 * 4096**2, 4 * 2 * 4 * 4096,
)  # fmt: skip
"""The model of Marconi's simulation (MLSys 2025, section 5.1 and appendix A): 4 attention layers of 32 heads, 24 SSM
layers of state size 128, 28 MLPs, 4,096 wide, 16 bits everywhere."""


# -- rivals


class LruPolicy:
    """The snapshot that was used longest ago goes first; of those of one prompt the deepest."""

    answer_interval = 0

    def __init__(self) -> None:
        self._clock = 0
        self._line: list[tuple[int, int, int, StateSnapshot]] = []
        self._used: dict[StateSnapshot, tuple[int, int, int]] = {}
        self._order = 0

    def choose_positions(self, prompt: PlannedPrompt) -> Iterable[int]:
        """Its end."""
        self._clock += 1
        return (prompt.last_tokens,) if prompt.last_tokens > prompt.start_tokens else ()

    def on_kept(self, snapshot: StateSnapshot) -> None:
        self._touch(snapshot)

    def on_used(self, snapshot: StateSnapshot) -> None:
        self._touch(snapshot)

    def on_gone(self, snapshot: StateSnapshot, *, evicted: bool) -> None:
        del self._used[snapshot]

    def on_moving(self, snapshot: StateSnapshot) -> None:
        """It is as old there."""

    def on_moved(self, snapshot: StateSnapshot) -> None:
        """It is as old there."""

    def choose_victim(self, owner: bytes, tier: Tier) -> StateSnapshot | None:
        """The oldest, which the heap has first."""
        passed = []
        victim = None
        while self._line and victim is None:
            entry = heapq.heappop(self._line)
            snapshot = entry[-1]
            if self._used.get(snapshot) == entry[:-1]:
                passed.append(entry)
                victim = snapshot if snapshot.tier is tier and snapshot.is_ordinary else None
        for entry in passed:
            heapq.heappush(self._line, entry)
        return victim

    def score_of(self, snapshot: StateSnapshot) -> float:
        """When it was used."""
        return self._used[snapshot][-1]

    def _touch(self, snapshot: StateSnapshot) -> None:
        self._order += 1
        self._used[snapshot] = key = self._clock, -snapshot.tokens, self._order
        heapq.heappush(self._line, (*key, snapshot))


class IntervalPolicy(LruPolicy):
    """A snapshot behind every so many tokens of prompts and answers."""

    def __init__(self, interval: int) -> None:
        super().__init__()
        self.answer_interval = interval

    def choose_positions(self, prompt: PlannedPrompt) -> Iterable[int]:
        """All multiples of the interval."""
        self._clock += 1
        first = prompt.start_tokens // self.answer_interval + 1
        return range(first * self.answer_interval, prompt.last_tokens + 1, self.answer_interval)


class MarconiPolicy:
    """Snapshots where prefixes branch and behind answers; of those with at most one child goes the one with least
    recency + ``alpha`` * FLOPs saved per byte, both scaled to 0..1 over all of them (MLSys 2025, section 4)."""

    answer_interval = 0

    def __init__(self, model: Hybrid, alpha: float) -> None:
        self._model, self._alpha = model, alpha
        self._clock = 0
        self._used: dict[StateSnapshot, int] = {}

    def choose_positions(self, prompt: PlannedPrompt) -> Iterable[int]:
        """Where it branches from what is cached."""
        self._clock += 1
        return (prompt.parting_tokens,) if prompt.parting_tokens else ()

    def on_kept(self, snapshot: StateSnapshot) -> None:
        self._used[snapshot] = self._clock

    def on_used(self, snapshot: StateSnapshot) -> None:
        self._used[snapshot] = self._clock

    def on_gone(self, snapshot: StateSnapshot, *, evicted: bool) -> None:
        del self._used[snapshot]

    def on_moving(self, snapshot: StateSnapshot) -> None:
        """Its score is the same there."""

    def on_moved(self, snapshot: StateSnapshot) -> None:
        """Its score is the same there."""

    def score_of(self, snapshot: StateSnapshot) -> float:
        """Its recency: the paper has one tier, and compares snapshots of that alone."""
        return self._used[snapshot]

    def choose_victim(self, owner: bytes, tier: Tier) -> StateSnapshot | None:
        """The least score of those with at most one child."""
        here = [s for s in self._used if s.tier is tier and s.is_ordinary]
        candidates = [s for s in here if len(s.children) <= 1]
        if not candidates:
            return here[0] if here else None
        ages = np.array([1 + self._clock - self._used[s] for s in candidates], np.float64)
        ends = np.array([s.tokens for s in candidates], np.float64)
        begins = np.array([s.tokens - s.gap_tokens for s in candidates], np.float64)
        model = self._model
        saved = (ends - begins) * model.token_flops + model.pair_flops * (ends**2 - begins**2) / 2
        efficiency = saved / (model.sequence_bytes + ends * model.token_bytes)
        scores = _scaled(1 / ages) + self._alpha * _scaled(efficiency)
        return candidates[int(np.argmin(scores))]


def _scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.ones_like(values)


# -- replay


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, when it arrives."""

    prompt: TokenArray
    answer: TokenArray


def arrivals(
    workload: Workload, *, sessions_per_s: float, think_s: float, seed: int, meter: Meter | None = None
) -> list[Asked]:
    """The requests of a workload in the order of their arrival. Recorded times hold; else sessions begin at Poisson's
    points, and a turn follows the one before it after an exponential time."""
    rng = draws(seed, "state-hits")
    begin_s, timed = 0.0, []
    for number, session in enumerate(workload.sessions):
        begin_s += rng.exponential(1 / sessions_per_s)
        at_s = begin_s
        for place, (turn, request) in enumerate(zip(session.turns, unrolled(session, meter), strict=True)):
            if place:
                at_s += rng.exponential(think_s)
            if turn.due_s is not None:
                at_s = turn.due_s
            timed.append((at_s, number, place, Asked(request.prompt, request.answer)))
    timed.sort(key=lambda entry: entry[:3])
    return [entry[-1] for entry in timed]


@dataclass(frozen=True, slots=True)
class Hits:
    """What one policy saved."""

    prompt_tokens: int
    cached_tokens: int
    """Of them, those that were not computed."""
    saved_share: float
    """Of the time of computing all prompts."""
    skipped: int
    """Requests that do not fit into memory."""
    taken: int
    """Snapshots that were cached."""

    @property
    def rate(self) -> float:
        """Share of prompts' tokens that were not computed."""
        return self.cached_tokens / max(1, self.prompt_tokens)


def replay(
    model: Hybrid, requests: Sequence[Asked], memory_bytes: int, policy: SnapshotPolicy | None, dram_bytes: int = 0
) -> Hits:
    """Through the production machines. ``policy`` None: the product's own, as an instance has it. ``dram_bytes``: of a
    second tier."""
    block_bytes = BLOCK_TOKENS * model.token_bytes
    sizes = PoolConfig(memory_bytes // block_bytes, dram_bytes // block_bytes, states=model.pages())
    pool = BlockPool(sizes, BLOCK_TOKENS, "state-hits")
    costs = PreemptionModel(PreemptionCosts(BLOCK_TOKENS * model.token_bytes, profile=model.costs))
    memory, snapshots = SequenceMemory(pool, BLOCK_TOKENS, costs), pool.snapshots
    if snapshots is None:
        raise InvariantError("a hybrid has snapshots")
    snapshots.policy = policy or snapshots.policy
    prompt_tokens = cached_tokens = skipped = 0
    saved_ns = all_ns = 0
    for number, asked in enumerate(requests):
        hit = _serve(memory, number, asked)
        skipped += hit is None
        prompt_tokens, cached_tokens = prompt_tokens + len(asked.prompt), cached_tokens + (hit or 0)
        all_ns += model.costs.prefill_ns(len(asked.prompt))
        saved_ns += model.costs.prefill_ns(hit) if hit else 0
    pool.check_invariants()
    report = snapshots.report()
    return Hits(prompt_tokens, cached_tokens, saved_ns / max(1, all_ns), skipped, report.cached + report.given_up)


def _serve(memory: SequenceMemory, number: int, asked: Asked) -> int | None:
    """One request from its admission to its end. Returns the tokens that it had not to compute; None: no room."""
    request = Request(
        str(number), asked.prompt, sampling=SamplingParams(), stop=StopParams(max(1, len(asked.answer)), 0, ())
    )
    sequence = ScheduledSequence(Group(request, number, len(asked.answer), 0), 0)
    if not memory.attach(sequence, 0):
        return None
    states, hit = memory.states, sequence.computed
    sequence.slot = 0
    states.begin(sequence)
    while sequence.computed < sequence.prompt_tokens:
        start, end = sequence.computed, min(sequence.prompt_tokens, sequence.computed + STEP_TOKENS)
        sequence.computed = end
        states.note_chunk(sequence, start, end)
        memory.publish(sequence)
        _finish_plan(memory, number)
    sequence.out = asked.answer.tolist()
    length = sequence.known_length
    for end in range(ceil_div(len(asked.prompt), BLOCK_TOKENS) * BLOCK_TOKENS, length, BLOCK_TOKENS):
        if end // BLOCK_TOKENS >= len(sequence.blocks):
            more = memory.pool.allocate(1)
            if more is None:
                break
            memory.append_blocks(sequence, more, 1)
        if end > sequence.computed:
            sequence.computed = end
            states.note_decodes([sequence])
            memory.publish(sequence)
            _finish_plan(memory, number)
    sequence.computed = max(sequence.computed, min(length - 1, len(sequence.blocks) * BLOCK_TOKENS))
    memory.detach(sequence)
    _finish_plan(memory, number)
    return hit


def _finish_plan(memory: SequenceMemory, number: int) -> None:
    memory.states.finish_plan(StepPlan(number))
    memory.pool.take_copies()


def unlimited(requests: Sequence[Asked]) -> float:
    """The hit rate of a cache that forgets nothing, with a state behind every block: of KV alone, in enough memory."""
    blocks = sum(ceil_div(len(asked.prompt) + len(asked.answer), BLOCK_TOKENS) for asked in requests)
    pool = BlockPool(PoolConfig(blocks, 0), BLOCK_TOKENS, "state-hits")
    hit_tokens = prompt_tokens = 0
    for asked in requests:
        tokens = np.concatenate((asked.prompt, asked.answer))[:-1]
        lease = pool.acquire("", asked.prompt[:-1])
        hit_tokens, prompt_tokens = hit_tokens + lease.tokens, prompt_tokens + len(asked.prompt)
        held = lease.blocks + list(pool.allocate(len(tokens) // BLOCK_TOKENS - len(lease.blocks)) or ())
        pool.publish(lease, "", tokens, held, written_by=0)
        pool.release(held)
        pool.unpin(lease)
    return hit_tokens / max(1, prompt_tokens)


# -- the study


@dataclass(frozen=True, slots=True)
class Rival:
    """One row: a policy by name."""

    name: str
    make: Callable[[Hybrid], SnapshotPolicy | None]


ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Of Marconi; the one with most hits counts, chosen afterwards. Its own choice is by a part of the requests."""
OURS, EVERY_BLOCK, ENGINE_PAGE = "memserve", "every block, LRU", "every page, LRU"
ENDS, MARCONI = "ends, LRU", "Marconi"


def rivals() -> list[Rival]:
    """All policies; Marconi once for each of ``ALPHAS``."""
    return [
        Rival(OURS, lambda _: None),
        Rival(EVERY_BLOCK, lambda _: IntervalPolicy(BLOCK_TOKENS)),
        Rival(ENGINE_PAGE, lambda model: IntervalPolicy(ceil_div(model.page_tokens, BLOCK_TOKENS) * BLOCK_TOKENS)),
        Rival(ENDS, lambda _: LruPolicy()),
        *(Rival(MARCONI, partial(MarconiPolicy, alpha=alpha)) for alpha in ALPHAS),
    ]


@dataclass(frozen=True, slots=True)
class Point:
    """One workload on one model with one size of memory."""

    workload: str
    model: str
    memory_gb: float
    unlimited: float
    hits: dict[str, Hits]
    """By the name of the policy."""

    def of_unlimited(self, name: str) -> float:
        """Hit rate, beside that of unlimited memory."""
        return self.hits[name].rate / max(1e-9, self.unlimited)

    @property
    def times_every_block(self) -> float:
        """Hit rate, beside a snapshot at every block."""
        return self.hits[OURS].rate / max(1e-9, self.hits[EVERY_BLOCK].rate)


def measure_point(
    workload: str, model: Hybrid, requests: Sequence[Asked], memory_gb: float, ceiling: float, *, without: str = ""
) -> Point:
    """All policies but that of the name ``without``; of those of one name the one with most hits."""
    hits: dict[str, Hits] = {}
    for rival in (rival for rival in rivals() if rival.name != without):
        measured = replay(model, requests, int(memory_gb * 1e9), rival.make(model))
        if rival.name not in hits or measured.rate > hits[rival.name].rate:
            hits[rival.name] = measured
    return Point(workload, model.name, memory_gb, ceiling, hits)
