"""What the machine remembers of a plan until the device reports on it (level 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.instance.actions import StepPlan
from memserve.instance.sequence import Sequence


@dataclass(slots=True)
class Outstanding:
    """A plan under way: to whom its results belong."""

    step_id: int
    plan: StepPlan
    #: who gets the sampled tokens: ``plan.sample_slots`` flattened, as sequences
    targets: list[Sequence] = field(default_factory=list)
    #: sequences with a row that samples nothing
    chunks: list[Sequence] = field(default_factory=list)
    #: row -> (sequence, first position), for prompt logprobs
    prompt_rows: dict[int, tuple[Sequence, int]] = field(default_factory=dict)
    prefill_tokens: int = 0
    #: pairs of a prefill token and one that it attends to: what its attention costs
    prefill_pairs: int = 0
    decode_rows: int = 0
    #: an earlier plan failed: whatever the device says of this one is dropped
    void: bool = False

    def by_slot(self) -> dict[int, Sequence]:
        """Slot -> the sequence that had a row or a draw there in this plan, whatever has become of it since."""
        plan = self.plan
        drawn = (slot for slots in plan.sample_slots for slot in slots)
        silent = (slot for slot, slots in zip(plan.slots, plan.sample_slots, strict=True) if not slots)
        return dict(zip(drawn, self.targets, strict=True)) | dict(zip(silent, self.chunks, strict=True))

    def __repr__(self) -> str:
        state = " void" if self.void else ""
        return f"<Outstanding {self.step_id}{state} targets={len(self.targets)} chunks={len(self.chunks)}>"
