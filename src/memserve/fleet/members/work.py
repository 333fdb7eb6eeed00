"""What an engine that is a member has to do: requests of the routers, its calls, and what they take.

A call takes its time from when it is made to its first tokens, and to its last ones. Where nothing else was in the way
of a call, its times show what prompts and answers cost there: routers are told, and place by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memserve.base.config import ExchangeConfig
from memserve.base.types import Request
from memserve.fleet.engines import PROMPT_TOKENS_USUAL
from memserve.fleet.messages import EngineReport, EngineSpec
from memserve.instance.cluster.routers import LinkCounts
from memserve.instance.stats import InstanceStats, TierStats
from memserve.kv.costs import PreemptionCosts, PreemptionModel, attended_pairs
from memserve.protocol.peers import Load


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """What is known of an engine when it becomes a member."""

    spec: EngineSpec
    model: str
    """Its own name of the model."""
    context_tokens: int
    """The longest sequence that it runs."""
    identity_key: bytes
    """Of the cluster."""
    block_tokens: int
    """Of its instances, as this process was told: how much memory the engine has is counted in these."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One sequence of a request."""

    index: int
    tokens: list[int]
    resumed: int = 0
    """Of them, those that were generated elsewhere."""
    call_id: int | None = None
    """Of the call that goes on with it. None: it has ended."""
    asked_ns: int = 0
    is_alone: bool = True
    """The engine had nothing else to do when it was asked: its first token shows what a prompt costs."""
    expected_tokens: int | None = None
    """Of its prompt, what the engine had cached then, by its KV events. None: it publishes none."""
    first_ns: int = 0
    """When its first tokens came; 0: none have."""
    first_changes: int = 0
    """How often calls had begun or ended by then."""
    first_tokens: int = 0
    """How many tokens it had then."""
    cached_tokens: int | None = None
    """Of its prompt, what the engine says that it had cached. None: it has not said."""

    @property
    def has_begun(self) -> bool:
        return self.first_ns > 0


@dataclass(slots=True, eq=False)
class EngineAttempt:
    """A request that has not ended."""

    request: Request
    max_tokens: int
    deadline_ns: int | None
    arrived_ns: int
    sequences: list[EngineSequence] = field(default_factory=list)

    @property
    def open_sequences(self) -> list[EngineSequence]:
        return [sequence for sequence in self.sequences if sequence.call_id is not None]


class EngineWork:
    """All that is under way there."""

    def __init__(self) -> None:
        #: what is known of the engine's speed: at first nothing
        self.costs = PreemptionModel(PreemptionCosts())
        self.attempts: dict[str, EngineAttempt] = {}
        #: by call: what goes on there
        self.calls: dict[int, tuple[EngineAttempt, EngineSequence]] = {}
        self.calls_made = 0
        #: how often calls have begun or ended
        self.changes = 0
        #: totals since the start, by name as of :class:`InstanceStats`
        self.totals: dict[str, Any] = {}

    def count(self, name: str, more: int = 1) -> None:
        """``more`` of what ``name``, a total of :class:`InstanceStats`, counts."""
        self.totals[name] = self.totals.get(name, 0) + more

    def learn_times(self, attempt: EngineAttempt, sequence: EngineSequence, now_ns: int) -> None:
        """A sequence ends: what its prompt and its tokens took, where nothing else was in their way."""
        known_tokens = sequence.cached_tokens if sequence.cached_tokens is not None else sequence.expected_tokens
        if not sequence.has_begun or known_tokens is None:
            return
        prompt = len(attempt.request.prompt)
        fresh, drawn_tokens = prompt - known_tokens, len(sequence.tokens) - sequence.first_tokens
        if sequence.is_alone and fresh > 0:
            pairs = attended_pairs(fresh, prompt - fresh)
            self.costs.learn_step(fresh, 0, sequence.first_ns - sequence.asked_ns, pairs)
        if drawn_tokens > 0 and sequence.first_changes == self.changes:
            of_token_ns = (now_ns - sequence.first_ns) // drawn_tokens
            self.costs.learn_decode(len(self.calls), self.contexts_running(), of_token_ns)

    def contexts_running(self) -> int:
        """Tokens of all sequences that were sent there."""
        return sum(len(attempt.request.prompt) + len(sequence.tokens) for attempt, sequence in self.calls.values())

    def load(self, report: EngineReport, terms: EngineTerms, counts: LinkCounts) -> Load:
        """How busy the engine is: by its own word, and what was sent since."""
        sequences = [sequence for _, sequence in self.calls.values()]
        waiting = [attempt for attempt, sequence in self.calls.values() if not sequence.has_begun]
        running = max(report.running or 0, sum(sequence.has_begun for sequence in sequences))
        context = self.contexts_running()
        used = round(report.kv_usage * report.kv_tokens)
        others_waiting = max(0, report.waiting - len(waiting))
        room_tokens = (report.kv_tokens or terms.context_tokens) - max(used, context)
        return Load(
            requests_waiting=max(report.waiting, len(waiting)),
            sequences_running=running,
            prefill_tokens_queued=sum(len(attempt.request.prompt) for attempt in waiting)
            + others_waiting * PROMPT_TOKENS_USUAL,
            context_tokens_running=max(used, context),
            hbm_blocks_available=max(0, room_tokens // terms.block_tokens),
            dispatches_heard=counts.dispatches_heard,
            answers_told=counts.answers_told,
        )

    def stats(self, report: EngineReport, terms: EngineTerms, counts: LinkCounts) -> InstanceStats:
        """Gauges and totals, as an instance has them."""
        load, blocks = self.load(report, terms, counts), report.kv_tokens // terms.block_tokens
        hbm = TierStats(blocks_total=blocks, blocks_free=min(blocks, load.hbm_blocks_available))
        waiting, running = load.requests_waiting, load.sequences_running
        return InstanceStats(requests_waiting=waiting, sequences_running=running, hbm=hbm, **self.totals)
