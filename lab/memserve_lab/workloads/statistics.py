"""Describes workloads: lengths, turns, shared prefixes (MemServe figure 7); and :class:`Spread`, the one distribution
that every study reports.

Shared prefixes are those of an unlimited cache: a radix tree whose edges are *runs* of consecutive block numbers, as
traces number them. A prompt of a thousand blocks is a handful of runs, and the cost of matching grows with the runs,
not with the blocks. ::

    prompts  0 1 2 3 9     root ──[0 1 2]──┬─[3]──[9]
             0 1 2 7 8                     └─[7 8]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memserve.base.units import ceil_div
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.tokens import Meter, as_blocks, blocks_said

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over requests, sessions or repetitions."""

    count: int
    mean: float
    p10: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    standard_error: float = 0.0
    """Of the mean; 0 for a single value."""

    def format_in_units(self, unit: float, digits: int) -> str:
        """The median, and P10 to P90 in brackets, in units of ``unit``: ``1.2 (1.1 - 1.6)``."""
        low, median, high = (f"{value / unit:.{digits}f}" for value in (self.p10, self.p50, self.p90))
        return f"{median} ({low} - {high})"


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and percentiles (interpolated linearly, as in numpy). None: no values."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    p10, p50, p90, p95, p99 = np.percentile(array, (10, 50, 90, 95, 99)).tolist()
    error = float(array.std(ddof=1)) / array.size**0.5 if array.size > 1 else 0.0
    return Spread(array.size, float(array.mean()), p10, p50, p90, p95, p99, float(array.max()), error)


def spread_of(values: Iterable[float]) -> Spread:
    """:func:`spread` of at least one value."""
    values_spread = spread(values)
    assert values_spread is not None, "at least one value"
    return values_spread


@dataclass(frozen=True, slots=True)
class Measured:
    """One row per request, in the order of the sessions and their turns; all columns int64 ``[requests]``."""

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
    """Measure every request. Text is cut into blocks of ``block_tokens``; traces keep their own block size."""
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
        turns=_spread(measured.turns),
        prompt_tokens=_spread(measured.prompt_tokens),
        output_tokens=_spread(measured.output_tokens),
        prompt_per_output=_spread(measured.prompt_tokens / np.maximum(1, measured.output_tokens)),
        blocks=int(measured.blocks.sum()),
        shared_share=measured.shared_share,
        shared_share_of_request=_spread(measured.blocks_seen / np.maximum(1, measured.blocks)),
        due_last_s=max(due, default=0.0),
        arrivals=workload.arrivals,
        notes=workload.notes,
    )


def _spread(values: NDArray[np.int64] | NDArray[np.float64]) -> Spread:
    return spread(values) or Spread(0, *[0.0] * 7)


@dataclass(slots=True)
class _Run:
    """An edge and the node below it: blocks ``[first, first + count)``, then the runs that followed, by first block."""

    first: int
    count: int
    after: dict[int, _Run] = field(default_factory=dict)


class PrefixTree:
    """All prompts seen so far."""

    def __init__(self) -> None:
        self._root = _Run(0, 0)

    def match_then_insert(self, runs: Iterable[tuple[int, int]]) -> int:
        """Blocks of the longest prefix shared with an earlier prompt. Inserts the prompt."""
        node, matched, is_known = self._root, 0, True
        for first, count in runs:
            while count:
                child = node.after.get(first)
                if child is None:
                    child = node.after[first] = _Run(first, count)
                    is_known = False
                shared = min(count, child.count)
                if shared < child.count:
                    _split(child, shared)
                matched += shared if is_known else 0
                node, first, count = child, first + shared, count - shared
        return matched


def _split(run: _Run, count: int) -> None:
    """Cut an edge after ``count`` blocks: what follows becomes its only child."""
    rest = _Run(run.first + count, run.count - count, run.after)
    run.count, run.after = count, {rest.first: rest}
