"""What a workload is like (level 1): lengths, turns, and how much of it a cache could have (MemServe figure 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memserve.units import ceil_div
from memserve.workloads.prefixes import PrefixTree
from memserve.workloads.recorded import as_blocks, blocks_said
from memserve.workloads.tokens import Meter
from memserve.workloads.words import Workload

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Measured:
    """One row a request, in the order of the sessions and their turns; all columns int64 ``[requests]``."""

    prompt_tokens: Column
    output_tokens: Column
    blocks: Column
    """Blocks of the prompt, a partial one included."""
    blocks_seen: Column
    """Leading blocks that an earlier request had: what an unlimited cache would hold."""
    turns: Column
    """Turns of each session, int64 ``[sessions]``."""

    @property
    def shared_share(self) -> float:
        """Share of all blocks that an unlimited cache would hold."""
        return float(self.blocks_seen.sum() / max(1, self.blocks.sum()))


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in five numbers."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A workload in one table."""

    kind: str
    source: str
    sessions: int
    requests: int
    groups: int
    turns: Spread
    prompt_tokens: Spread
    output_tokens: Spread
    prompt_per_output: Spread
    """Prompt tokens for each generated token."""
    blocks: int
    shared_share: float
    """Share of blocks found in the longest prefix of an earlier request, unlimited cache."""
    shared_share_of_request: Spread
    due_last_s: float
    arrivals: str
    notes: tuple[str, ...]


def measure(workload: Workload, *, block_tokens: int = 16, meter: Meter | None = None) -> Measured:
    """Weigh every request. Text is cut into blocks of ``block_tokens``; traces keep their own block size."""
    tree, rows = PrefixTree(), []
    for session in as_blocks(workload, block_tokens=block_tokens, meter=meter).sessions:
        for turn in session.turns:
            says = blocks_said(turn)
            runs = [(span.first, ceil_div(span.tokens, says.block_tokens)) for span in says.spans]
            blocks = sum(count for _, count in runs)
            rows.append((says.tokens, turn.output_tokens_max, blocks, tree.match_then_insert(runs)))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    turns = np.array([len(session.turns) for session in workload.sessions], dtype=np.int64)
    return Measured(columns[0], columns[1], columns[2], columns[3], turns)


def summarize(workload: Workload, measured: Measured) -> Summary:
    """The table of a measured workload."""
    due = [turn.due_s or 0.0 for session in workload.sessions for turn in session.turns]
    return Summary(
        kind=workload.kind,
        source=workload.source,
        sessions=len(workload.sessions),
        requests=workload.request_count,
        groups=len({session.group for session in workload.sessions}),
        turns=spread(measured.turns),
        prompt_tokens=spread(measured.prompt_tokens),
        output_tokens=spread(measured.output_tokens),
        prompt_per_output=spread(measured.prompt_tokens / np.maximum(1, measured.output_tokens)),
        blocks=int(measured.blocks.sum()),
        shared_share=measured.shared_share,
        shared_share_of_request=spread(measured.blocks_seen / np.maximum(1, measured.blocks)),
        due_last_s=max(due, default=0.0),
        arrivals=workload.arrivals,
        notes=workload.notes,
    )


def spread(values: NDArray[np.int64] | NDArray[np.float64]) -> Spread:
    """Mean, P50, P90, P99 and the largest; zeros where there is nothing."""
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Spread(float(np.mean(values)), p50, p90, p99, float(np.max(values)))
