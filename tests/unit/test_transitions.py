"""State machines as tables: what a table accepts, refuses, and shows."""

from __future__ import annotations

import enum

import pytest

from memserve.base.errors import InvariantError
from memserve.base.state_table import Transitions


class Phase(enum.Enum):
    QUEUED = 0
    RUNNING = 1
    FINISHED = 2


class Cause(enum.Enum):
    ADMITTED = 0
    STEPPED = 1
    PREEMPTED = 2
    ENDED = 3


TABLE = {
    (Phase.QUEUED, Cause.ADMITTED): Phase.RUNNING,
    (Phase.QUEUED, Cause.ENDED): Phase.FINISHED,
    (Phase.RUNNING, Cause.STEPPED): Phase.RUNNING,
    (Phase.RUNNING, Cause.PREEMPTED): Phase.QUEUED,
    (Phase.RUNNING, Cause.ENDED): Phase.FINISHED,
}
MACHINE = Transitions("Sequence", Phase.QUEUED, TABLE)


def test_moves_outside_the_table_are_refused() -> None:
    for phase in Phase:
        for cause in Cause:
            assert MACHINE.allows_move(phase, cause) == ((phase, cause) in TABLE)
            if (phase, cause) in TABLE:
                assert MACHINE.next_phase(phase, cause) is TABLE[phase, cause]
            else:
                with pytest.raises(InvariantError, match=f"Sequence: {cause.name} is no legal cause in {phase.name}"):
                    MACHINE.next_phase(phase, cause)


def test_a_phase_without_a_way_out_is_final() -> None:
    assert [phase for phase in Phase if MACHINE.is_final(phase)] == [Phase.FINISHED]


def test_unreachable_phase_and_unused_cause_are_refused() -> None:
    with pytest.raises(InvariantError, match=r"no moves lead to \['FINISHED'\]"):
        Transitions("Sequence", Phase.QUEUED, {(Phase.QUEUED, Cause.ADMITTED): Phase.RUNNING})
    lacking = {move: to for move, to in TABLE.items() if move[1] is not Cause.STEPPED}
    with pytest.raises(InvariantError, match=r"no move has a cause of \['STEPPED'\]"):
        Transitions("Sequence", Phase.QUEUED, lacking)


def test_transition_docs_have_one_row_per_move() -> None:
    assert MACHINE.markdown().splitlines() == [
        "**Sequence** begins in `queued`. Final: `finished`.",
        "",
        "| phase | cause | next phase |",
        "| --- | --- | --- |",
        "| `queued` | `admitted` | `running` |",
        "| `queued` | `ended` | `finished` |",
        "| `running` | `stepped` | `running` |",
        "| `running` | `preempted` | `queued` |",
        "| `running` | `ended` | `finished` |",
    ]
