"""What an instance tells about itself (level 2): counters, state, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memserve.types import FinishReason

if TYPE_CHECKING:
    from memserve.mempool.events import PoolReport


@dataclass(slots=True)
class Counters:
    """Running totals since the instance was made."""

    steps: int = 0
    steps_failed: int = 0
    rows_failed: int = 0
    requests: int = 0
    requests_rejected: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0  # of those
    generated_tokens: int = 0
    prefill_tokens: int = 0  # computed
    decode_tokens: int = 0  # computed
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of those, not computed
    dropped_tokens: int = 0  # sampled after the sequence had ended (stop tokens are seen one step late)
    preempted_by_swap: int = 0
    preempted_by_recompute: int = 0
    preempted_for_slots: int = 0  # of both: for a slot that another tenant was due
    standstills: int = 0  # times that everything was preempted because nothing could move
    prefix_holds: int = 0  # admissions put off because the same prefix was being computed
    device_ns: int = 0
    queued_ns: int = 0  # sum over admitted requests of the time until they were first scheduled
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})

    def count_finish(self, reason: FinishReason) -> None:
        """One more sequence ended for ``reason``."""
        self.finished[reason.value] += 1


@dataclass(frozen=True, slots=True)
class RequestStory:
    """Why a live request took the time that it takes."""

    request_id: str
    arrived_ns: int
    admitted_ns: int | None
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    held_steps: int
    sequences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """How the HBM blocks of running sequences are used (P4).

    A sequence's *internal fragmentation* is the part of its blocks that no token of it will fill: less than one block.
    """

    pool: PoolReport
    sequences: int  # that hold HBM blocks
    block_tokens: int
    blocks_held: int  # distinct
    tokens_held: int  # token states in them
    fragmentation_tokens_total: int
    fragmentation_tokens_max: int  # of one sequence: below block_tokens

    @property
    def token_states_share(self) -> float:
        """Share of the held memory that is token states (1.0 when nothing is held)."""
        capacity = self.blocks_held * self.block_tokens
        return self.tokens_held / capacity if capacity else 1.0
