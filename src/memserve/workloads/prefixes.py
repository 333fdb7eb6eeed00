"""The longest prefix seen before, in blocks, with a cache that never forgets (level 1).

A radix tree whose edges are *runs* of consecutive block numbers, as traces number them: a prompt of a thousand blocks
is a handful of runs, and matching costs the runs, not the blocks. ::

    prompts  0 1 2 3 9     root ──[0 1 2]──┬─[3]──[9]
             0 1 2 7 8                     └─[7 8]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Run:
    """An edge and the node below it: blocks ``[first, first + count)``, then the runs that followed, by first block."""

    first: int
    count: int
    after: dict[int, _Run] = field(default_factory=dict)


def runs_of(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """``(first, count)`` of each run of consecutive numbers in ``ids``, in order."""
    first = count = 0
    for block in ids:
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count


class PrefixTree:
    """All prompts seen so far."""

    def __init__(self) -> None:
        self._root = _Run(0, 0)

    def match_then_insert(self, runs: Iterable[tuple[int, int]]) -> int:
        """Blocks of the longest prefix that an earlier prompt had; then the prompt is one of the earlier ones."""
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
