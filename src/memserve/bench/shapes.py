"""What workloads are like, request by request: the data of MemServe's figure 7 (level 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memserve.bench.results import Shape
from memserve.workloads.statistics import Measured, measure
from memserve.workloads.tokens import Meter
from memserve.workloads.words import Workload

BLOCK_TOKENS = 16


def shapes_of(workloads: Mapping[tuple[str, int], Workload], meter: Meter | None = None) -> list[Shape]:
    """A shape a label: ``(label, seed)`` -> workload, those of all seeds together. Seeds share no cache."""
    by_label: dict[str, list[Workload]] = {}
    for (label, _), workload in workloads.items():
        by_label.setdefault(label, []).append(workload)
    return [
        shape_of(label, members[0].source, [measure(one, block_tokens=BLOCK_TOKENS, meter=meter) for one in members])
        for label, members in by_label.items()
    ]


def shape_of(label: str, source: str, parts: Sequence[Measured]) -> Shape:
    """One shape of several measured workloads."""
    columns: list[list[float]] = [[], [], [], [], []]
    for part in parts:
        per_output = part.prompt_tokens / part.output_tokens.clip(min=1)
        shared = part.blocks_seen / part.blocks.clip(min=1)
        found = (part.prompt_tokens, part.output_tokens, per_output, shared, part.turns)
        for column, values in zip(columns, found, strict=True):
            column += [float(value) for value in values]
    prompts, outputs, ratios, shares, turns = columns
    blocks, seen = (sum(int(getattr(part, name).sum()) for part in parts) for name in ("blocks", "blocks_seen"))
    return Shape(label, source, len(prompts), prompts, outputs, ratios, shares, turns, seen / max(1, blocks))
