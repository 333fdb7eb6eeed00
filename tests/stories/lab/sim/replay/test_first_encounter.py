"""A disk that becomes slow, and tells nothing of it, costs next to nothing when it is met first; a healthy one is used.

A small model on a processor, and documents that lie on the store's disk alone: prompts of half a document and as many
new tokens, by two clients at a time, as ``bench/store_load.py`` at 1:1.
"""

from __future__ import annotations

import pytest

from memserve.base.config import ClusterConfig, SchedulerConfig
from memserve.base.types import Caching, KVGeometry, Role
from memserve.base.units import GIB, MIB, NS_PER_MS, NS_PER_S
from memserve.kv.costs import CostModel, DecodeCurve, PrefillCurve
from memserve_lab.sim.hardware import Machine
from memserve_lab.sim.replay.setup import Setup, StoreSetup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.sim.timed_disk import DISKS, DiskModel
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload

COSTS = CostModel(
    prefill=PrefillCurve(5.0 * NS_PER_MS, 800_000.0, 50.0), decode=DecodeCurve(20.0 * NS_PER_MS, 2e6, 50.0), machine="m"
)
MACHINE = Machine("cpu", KVGeometry(30, 3, 64, 64, "bfloat16", 32), 8192, 91, 0, COSTS)
HEALTHY = DISKS["virtual"]
LATENCY_NS = 20 * NS_PER_MS
SLOW = DiskModel("slow", 12e6, 12e6, LATENCY_NS, LATENCY_NS, LATENCY_NS, "throttled")
NO_WORD = DiskModel("no word", 0.5e9, 0.5e9, 2 * NS_PER_MS, NS_PER_MS, NS_PER_MS, "as a store that says nothing")
DOCUMENTS = [1 + 1000 * number for number in range(12)]
ASKED_S, ROUNDS = 100.0, 2


def workload() -> Workload:
    def turn(*spans: Span, answer: int, due_s: float | None) -> Turn:
        return Turn(Blocks(16, spans), answer, due_s=due_s)

    sessions = [
        Session(f"fill {at}", (turn(Span(first, 1024), answer=1, due_s=3.0 * at),), history=History.GIVEN)
        for at, first in enumerate(DOCUMENTS)
    ]
    new = 1_000_000
    for number in range(ROUNDS):
        for client in range(2):
            turns = []
            for first in DOCUMENTS[client::2]:
                new += 1000
                due_s = None if turns else ASKED_S + 60 * number
                turns.append(turn(Span(first, 512), Span(new, 512), answer=4, due_s=due_s))
            sessions.append(Session(f"round {number} {client}", tuple(turns), history=History.GIVEN))
    return Workload("blocks", "test", tuple(sessions))


def rounds(told: DiskModel | None, really: DiskModel | None) -> tuple[list[float], int]:
    """Seconds of each round, and cached tokens in all. ``told``: what the store says of its disk; None: no cache."""
    stores = StoreSetup(64 * MIB, (2 * GIB,), model=told) if told is not None else None
    cluster = ClusterConfig() if stores else ClusterConfig(caching=Caching.OFF)
    world = ReplayWorld(
        Setup({Role.COLOCATED: 1}, MACHINE, cluster=cluster, scheduler=SchedulerConfig(), stores=stores), workload()
    )

    def becomes_what_it_is() -> None:
        for disk in world.stores[0].disks:
            disk.model = really

    if really is not None:
        world.clock.call_at(round((ASKED_S - 5) * NS_PER_S), becomes_what_it_is)
    world.run_workload()
    seconds = []
    for number in range(ROUNDS):
        served = [one for one in world.clients.served if one.session.startswith(f"round {number}")]
        assert len(served) == len(DOCUMENTS) and all(one.answered for one in served)
        ended_ns = max(one.end_ns or 0 for one in served)
        seconds.append((ended_ns - min(one.scheduled_ns for one in served)) / NS_PER_S)
    return seconds, sum(one.cached_tokens for one in world.clients.served)


@pytest.mark.parametrize("told", [HEALTHY, NO_WORD], ids=["measured", "no word"])
def test_first_use_of_a_slow_disk_costs_less_than_two_percent(told: DiskModel) -> None:
    none, _ = rounds(None, None)
    slow, cached = rounds(told, SLOW)
    assert cached == 0, "it is too slow for anything"
    assert all(mine <= 1.02 * other for mine, other in zip(slow, none, strict=True)), (slow, none)
    healthy, cached = rounds(told, HEALTHY)
    assert cached > len(DOCUMENTS) * ROUNDS * 200, "a fetch whose pages came late is no reason to give the disk up"
    assert sum(healthy) < 0.85 * sum(none)


def test_a_store_that_says_nothing_is_taken_for_such_a_disk() -> None:
    default = CostModel().disk
    assert NO_WORD.curve.start_ns == default.start_ns
    assert NO_WORD.curve.byte_ns == pytest.approx(default.byte_ns, rel=0.1)
