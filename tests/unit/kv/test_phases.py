"""Phases of sequences, imports and exports: legal moves are made, all others are refused and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.config import PoolConfig
from memserve.base.errors import InvariantError
from memserve.base.types import Request, Tier
from memserve.instance.scheduler.memory import SequenceMemory
from memserve.instance.scheduler.sequence import SEQUENCE, Cause, Group, Phase, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.costs import PreemptionCosts, PreemptionModel
from memserve.kv.pool import BlockPool
from memserve.kv.transfer.imports import IMPORT, Import, ImportCause, ImportPhase
from memserve.kv.transfer.sender import EXPORT, Export, ExportCause, ExportPhase
from memserve.protocol.messages import Offer
from memserve.protocol.peers import Peer

LISTED = (Phase.REMOTE_KV_READY, Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.IDLE)
"""Phases that have a container."""


def new_state() -> SchedulerState:
    memory = SequenceMemory(BlockPool(PoolConfig(8), 4, "test"), 4, PreemptionModel(PreemptionCosts()))
    return SchedulerState(memory, 4, "auto")


def containers(state: SchedulerState, sequence: Sequence) -> list[Phase]:
    """The phases whose containers list ``sequence``."""
    listed = (state.remote_kv_ready, state.waiting, state.prefilling, state.decoding, state.idle)
    return [phase for phase, container in zip(LISTED, listed, strict=True) if sequence in container]


def bring(state: SchedulerState, phase: Phase) -> Sequence:
    """A sequence that came to ``phase`` by a shortest way through the table."""
    ways: dict[Phase, list[Cause]] = {Phase.NEW: []}
    while phase not in ways:
        ways = {to: [*ways[at], cause] for (at, cause), to in SEQUENCE.table.items() if at in ways} | ways
    group = Group(Request("r", np.arange(3, dtype=np.int32)), 0, 5, 0)
    state.open_group(group)
    sequence = group.new_sequence()
    for cause in ways[phase]:
        state.move(sequence, cause)
    return sequence


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("cause", Cause)
def test_a_sequence_moves_by_the_table_or_not_at_all(phase, cause) -> None:
    """A legal move takes it from one container to the other; an illegal one leaves phase, containers and count."""
    state = new_state()
    sequence = bring(state, phase)
    holding = [phase] if phase in LISTED else []
    assert sequence.phase is phase and containers(state, sequence) == holding
    assert state.sequences == (phase not in (Phase.NEW, Phase.FINISHED))
    if SEQUENCE.allows_move(phase, cause):
        state.move(sequence, cause)
        after = SEQUENCE.table[phase, cause]
        assert sequence.phase is after
        assert containers(state, sequence) == ([after] if after in LISTED else [])
        assert state.sequences == (after is not Phase.FINISHED)
    else:
        with pytest.raises(InvariantError, match=f"Sequence: {cause.name} is no legal cause in {phase.name}"):
            state.move(sequence, cause)
        assert sequence.phase is phase and containers(state, sequence) == holding
        assert state.sequences == (phase not in (Phase.NEW, Phase.FINISHED))


def test_illegal_phase_moves_raise() -> None:
    state = new_state()
    sequence = bring(state, Phase.WAITING)
    with pytest.raises(InvariantError, match="PREEMPTED is no legal cause in WAITING"):
        state.preempt_sequence(sequence)
    state.move(sequence, Cause.FINISHED)
    with pytest.raises(InvariantError, match="ADMITTED is no legal cause in FINISHED"):
        state.move(sequence, Cause.ADMITTED)


PEER = Peer("p", 1)


def new_import() -> Import:
    offer = Offer(
        transfer_id="x", tenant="", tokens=np.arange(4, dtype=np.int32), identity=b"", tier=Tier.HBM, first_block=0,
        blocks=(1,), lease_ns=10,
    )  # fmt: skip
    return Import(PEER, offer, 10, None, 1, [(Tier.HBM, 1)])


@pytest.mark.parametrize(
    ("table", "make", "phases", "causes"),
    [
        (IMPORT, new_import, ImportPhase, ImportCause),
        (EXPORT, lambda: Export("x", PEER, 0, [], 10), ExportPhase, ExportCause),
    ],
)
def test_a_transfer_moves_by_its_table_or_not_at_all(table, make, phases, causes) -> None:
    for phase in phases:
        for cause in causes:
            transfer = make()
            transfer.phase = phase
            if table.allows_move(phase, cause):
                transfer.advance_phase(cause)
                assert transfer.phase is table.table[phase, cause]
            else:
                with pytest.raises(InvariantError, match=f"{cause.name} is no legal cause in {phase.name}"):
                    transfer.advance_phase(cause)
                assert transfer.phase is phase
            assert transfer.over == table.is_final(transfer.phase)
