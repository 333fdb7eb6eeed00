"""Running totals of an instance's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.types import FinishReason


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals since the instance was made."""

    steps: int = 0
    steps_failed: int = 0
    rows_failed: int = 0
    late_draws: int = 0  # put off because a grammar's mask was not there
    requests: int = 0
    requests_rejected: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0  # of those
    generated_tokens: int = 0
    prefill_tokens: int = 0  # computed
    decode_tokens: int = 0  # computed
    drafted_tokens: int = 0  # computed as drafts
    kept_tokens: int = 0  # of those, drawn as well
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of those, not computed
    dropped_tokens: int = 0  # sampled after the sequence had ended (stop tokens are seen one step late)
    preempted_by_swap: int = 0
    preempted_by_recompute: int = 0
    preempted_for_slots: int = 0  # of both: for a slot that another tenant was due
    standstills: int = 0  # times that everything was preempted because nothing could move
    prefix_holds: int = 0  # admissions put off because the prefix was being computed for another sequence
    device_ns: int = 0
    queued_ns: int = 0  # sum over admitted requests of the time until they were first scheduled
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})

    def count_finish(self, reason: FinishReason) -> None:
        """One more sequence ended for ``reason``."""
        self.finished[reason.value] += 1
