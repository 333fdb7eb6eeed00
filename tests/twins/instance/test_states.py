"""Random lives of an instance with a recurrent state: no slot ever has another state than that of its tokens."""

from __future__ import annotations

import os
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from instance_lives import FAMILIES, SharingLife, live_busily
from instance_world import World, config, request
from memserve.base.errors import InvariantError
from memserve.base.states import StatePages
from memserve.base.types import Tier
from memserve.instance.events import LoadState, SaveState, TakeSnapshot
from memserve.instance.scheduler.batch import BatchBuilder
from memserve.instance.scheduler.states import RecurrentStates
from memserve.kv.snapshots import SnapshotCache
from memserve.kv.state_snapshot import StateSnapshot
from memserve_lab.experiments.state_hits import IntervalPolicy
from memserve_lab.sim.reference.oracle import Violation

PAGES = {
    "one block": StatePages(10, 1, draft_states=5),
    "three blocks": StatePages(30, 3, draft_states=2),
    "a third of a block": StatePages(10, 1, per_block=3, draft_states=8),
}


class StatefulLife(SharingLife):
    """Arrivals, cancellations, stops, pins, steps and failures in any order, on tiny pools."""

    @initialize(
        hbm=st.integers(4, 24),
        dram=st.sampled_from([0, 0, 3, 8, 24]),
        preemption=st.sampled_from(["auto", "swap"]),
        pages=st.sampled_from(sorted(PAGES)),
        caching=st.sampled_from([True, True, True, False]),
        running=st.integers(1, 8),
        step_tokens=st.integers(1, 24),
        chunk=st.integers(1, 12),
        depth=st.integers(1, 3),
        late=st.booleans(),
        interval=st.sampled_from([0, 0, 4, 8]),
        draft_tokens=st.sampled_from([0, 1, 3]),
    )
    def begin(self, pages, late, interval, dram, **sizes):
        sizes["dram"] = dram if PAGES[pages].whole_blocks else 0
        # at an interval there are several snapshots in a row, and in answers
        policy = partial(IntervalPolicy, interval) if interval else None
        self.world = World(config(context=48, states=PAGES[pages], **sizes), 4, twin=False, snapshot_policy=policy)
        self.start_late_masks(late)


EXAMPLES = int(os.environ.get("MEMSERVE_TEST_EXAMPLES", "100"))
StatefulLife.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStatefulLife = StatefulLife.TestCase


def _outlived_by_snapshots(monkeypatch):
    """The KV before them is not held, and goes; they stay."""
    keep = SnapshotCache.keep

    def keep_alone(self, snapshot, *path, hold, owner):
        for tier in (Tier.HBM, Tier.DRAM):
            self._index.unhold(hold, tier)
        keep(self, snapshot, *path, hold=hold, owner=owner)

    monkeypatch.setattr(SnapshotCache, "keep", keep_alone)
    monkeypatch.setattr(SnapshotCache, "on_evicted", lambda self, evicted: None)


def _without_its_state(monkeypatch):
    monkeypatch.setattr(RecurrentStates, "_order", lambda self, order: None)


def _into_pages_given_up(monkeypatch):
    def finish_plan(self, plan):
        plan.states, self._orders = self._orders, []
        plan.snapshots = [TakeSnapshot(slot, tokens, pages) for slot, tokens, pages in self._noted]
        self._taking, self._noted = [], []

    def take(self, sequence, snapshot):
        self._noted = [*getattr(self, "_noted", []), (sequence.slot, snapshot.tokens, list(snapshot.pages))]

    monkeypatch.setattr(RecurrentStates, "_noted", [], raising=False)
    monkeypatch.setattr(RecurrentStates, "finish_plan", finish_plan)
    monkeypatch.setattr(RecurrentStates, "_take", take)


def _of_another_position(monkeypatch):
    take = RecurrentStates._take

    def take_early(self, sequence, snapshot):
        take(self, sequence, snapshot)
        slot, tokens, _ = self._taking[-1]
        self._taking[-1] = slot, max(1, tokens - 1), snapshot

    monkeypatch.setattr(RecurrentStates, "_take", take_early)


def _with_kv_alone(monkeypatch):
    def longest_match(self, identities, tokens):
        return min(self._by_identity.values(), key=lambda snapshot: -snapshot.tokens, default=None)

    monkeypatch.setattr(SnapshotCache, "longest_match", longest_match)


def _forked_before_its_rows(monkeypatch):
    def fork(self, parent, child):
        self._order(LoadState(child.slot, child.computed, from_slot=parent.slot))

    begin = BatchBuilder.finish_plan

    def finish_plan(self):
        begin(self)
        self.plan.states += self.state.memory.states._orders
        self.state.memory.states._orders = []

    monkeypatch.setattr(RecurrentStates, "fork", fork)
    monkeypatch.setattr(BatchBuilder, "finish_plan", finish_plan)


def _read_where_it_is_copied_to(monkeypatch):
    monkeypatch.setattr(StateSnapshot, "source", property(lambda self: (self.tier, self.pages)))


def _saved_behind_the_next_load(monkeypatch):
    swap_out = RecurrentStates.swap_out

    def swap_late(self, sequence, dram_blocks):
        swap_out(self, sequence, dram_blocks)
        self._late = [
            *getattr(self, "_late", []),
            self._orders.pop(next(place for place, order in enumerate(self._orders) if isinstance(order, SaveState))),
        ]

    def finish_plan(self, plan):
        finish(self, plan)
        plan.states += getattr(self, "_late", [])
        self._late = []

    finish = RecurrentStates.finish_plan
    monkeypatch.setattr(RecurrentStates, "_late", [], raising=False)
    monkeypatch.setattr(RecurrentStates, "swap_out", swap_late)
    monkeypatch.setattr(RecurrentStates, "finish_plan", finish_plan)


def busy_life(seed, **more):
    """On memory for a few of its requests."""
    sizes = {"context": 48, "hbm": 12, "running": 4, "states": PAGES["one block"]} | more
    return live_busily(World(config(**sizes), 4, twin=False), seed)


def _saved_with_drafts_under_way(monkeypatch):
    def reserve_below(self, sequence):
        blocks = None if sequence.slot is None else self._pool.allocate_dram_ids(self._pool.state_blocks)
        return None if blocks is None else blocks.tolist()

    monkeypatch.setattr(RecurrentStates, "reserve_below", reserve_below)


def _more_drafts_than_states(monkeypatch):
    room = RecurrentStates.draft_room
    monkeypatch.setattr(RecurrentStates, "draft_room", lambda self, sequence, _: room(self, sequence, -9))


def swapping_life(seed, **more):
    """On memory for a few of its requests, and a second tier for the others."""
    return busy_life(seed, dram=24, hbm=9, preemption="swap", **more)


def test_a_busy_life_goes_on_from_snapshots():
    worlds = [busy_life(seed) for seed in range(3)]
    assert all(world.device.states.loaded > 3 for world in worlds)
    assert sum(world.machine.stats().preemptions_recompute for world in worlds) > 0
    assert sum(world.machine.stats().snapshots_given_up for world in worlds) > 0


def test_a_life_on_two_tiers_swaps_and_loads_from_dram():
    worlds = [swapping_life(seed) for seed in range(3)]
    assert sum(world.machine.stats().preemptions_swap for world in worlds) > 0
    assert sum(world.machine.stats().dram_tokens_reused for world in worlds) > 0
    assert sum(world.device.states.loaded for world in worlds) > 10


def test_a_life_with_drafts_keeps_states_of_right_ones_alone():
    worlds = [swapping_life(seed, draft_tokens=3) for seed in range(4)]
    counters = [world.machine.state.counters for world in worlds]
    drafted, kept = (sum(getattr(c, name) for c in counters) for name in ("drafted_tokens", "kept_tokens"))
    assert 0 < kept < drafted and sum(world.machine.stats().preemptions_swap for world in worlds) > 0


@pytest.mark.parametrize("plant", [_saved_with_drafts_under_way, _more_drafts_than_states])
def test_faults_planted_in_drafts_are_noticed(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((Violation, InvariantError, AssertionError, KeyError)):
        for seed in range(30):
            swapping_life(seed, draft_tokens=3, states=StatePages(10, 1, draft_states=3))


@pytest.mark.parametrize("plant", [_read_where_it_is_copied_to, _saved_behind_the_next_load])
def test_faults_planted_between_the_tiers_are_noticed(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((Violation, InvariantError, AssertionError, KeyError)):
        for seed in range(20):
            swapping_life(seed)


@pytest.mark.parametrize(
    "plant",
    [
        _outlived_by_snapshots,
        _without_its_state,
        _into_pages_given_up,
        _of_another_position,
        _with_kv_alone,
        _forked_before_its_rows,
    ],
)
def test_planted_faults_are_noticed(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((Violation, InvariantError, AssertionError, KeyError)):
        for seed in range(10):
            busy_life(seed)


def test_a_prompt_that_needs_all_memory_takes_its_snapshots_too():
    """Its own snapshot may lie in the last block that it needs: that is read before the block is written."""
    world = World(config(hbm=6, context=30, states=PAGES["one block"]), 4, twin=False)
    world.arrive(request("first", FAMILIES[0][:18], max_tokens=1))
    world.drain()
    world.arrive(request("second", FAMILIES[0][:22], max_tokens=2))
    world.drain()
    world.check_all_ended()
    assert world.device.states.loaded == 1 and not world.machine.stats().snapshots_cached
