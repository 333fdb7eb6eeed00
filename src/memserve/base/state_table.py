"""State machines as tables: ``{(phase, cause): next phase}``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Generic, TypeVar

from memserve.base.errors import InvariantError, check

PhaseT = TypeVar("PhaseT", bound=Enum)
CauseT = TypeVar("CauseT", bound=Enum)


class Transitions(Generic[PhaseT, CauseT]):
    """The legal moves of a state machine. Objects keep their phase themselves and ask :meth:`next_phase` for the next
    one.

    ``name`` stands in errors and is the heading of the table in the docs. ``initial`` is the phase of a new object.
    Every value of both enums must occur in the table, and every phase must be reachable from ``initial``: a phase or a
    cause that no move uses is a mistake. A phase without a move out of it is final.
    """

    def __init__(self, name: str, initial: PhaseT, table: Mapping[tuple[PhaseT, CauseT], PhaseT]) -> None:
        self.name, self.initial = name, initial
        self.table = MappingProxyType(dict(table))
        #: the table by the names of its keys: an Enum's own hash is computed in Python
        self._next = {(phase._name_, cause._name_): to for (phase, cause), to in table.items()}
        reached = {initial}
        while more := {to for (phase, _), to in self.table.items() if phase in reached} - reached:
            reached |= more
        unreachable = [phase.name for phase in type(initial) if phase not in reached]
        check(not unreachable, f"{name}: no moves lead to {unreachable}")
        causes = {cause for _, cause in self.table}
        unused = [cause.name for kind in {type(cause) for cause in causes} for cause in kind if cause not in causes]
        check(not unused, f"{name}: no move has a cause of {unused}")

    def next_phase(self, phase: PhaseT, cause: CauseT) -> PhaseT:
        """The phase that follows ``phase`` after ``cause``; :class:`InvariantError` if the table has no such move."""
        to = self._next.get((phase._name_, cause._name_))
        if to is None:
            raise InvariantError(f"{self.name}: {cause.name} is no legal cause in {phase.name}")
        return to

    def allows_move(self, phase: PhaseT, cause: CauseT) -> bool:
        """Whether :meth:`next_phase` accepts this move."""
        return (phase, cause) in self.table

    def is_final(self, phase: PhaseT) -> bool:
        """Whether no move leads out of ``phase``."""
        return all(start is not phase for start, _ in self.table)

    def markdown(self) -> str:
        """The table for the docs: a row for each phase and next phase, with all causes of that move."""
        rows: dict[tuple[PhaseT, PhaseT], list[str]] = {}
        for (phase, cause), to in self.table.items():
            rows.setdefault((phase, to), []).append(_word(cause))
        lines = [f"| {_word(start)} | {', '.join(causes)} | {_word(to)} |" for (start, to), causes in rows.items()]
        final = [_word(phase) for phase in self._all_phases() if self.is_final(phase)]
        ends = f" Final: {', '.join(final)}." if final else ""
        head = f"**{self.name}** begins in {_word(self.initial)}.{ends}"
        return "\n".join([head, "", "| phase | cause | next phase |", "| --- | --- | --- |", *lines])

    def _all_phases(self) -> Iterator[PhaseT]:
        yield from type(self.initial)


def _word(value: Enum) -> str:
    return f"`{value.name.lower()}`"
