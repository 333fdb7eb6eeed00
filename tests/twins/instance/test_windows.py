"""Random lives of an instance whose windows' KV lies apart: no row reads a part that is not of its tokens."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from instance_lives import SharingLife, live_busily
from instance_world import World, config
from memserve.base.errors import InvariantError
from memserve.base.layer_kv import WindowPages
from memserve.instance.scheduler.windows import WindowsApart
from memserve.kv.windows import WindowCache
from memserve_lab.sim.reference.oracle import Violation

BLOCK = 4


def windowed(window, part_blocks, *, step_tokens=16, chunk=8, reads_chunk=0, **sizes):
    """An instance with parts of so many blocks; ``reads_chunk``: of layers that read one, which need no window."""
    pages = WindowPages(window, part_blocks, BLOCK, min(step_tokens, chunk), reads_chunk)
    return config(context=48, step_tokens=step_tokens, chunk=chunk, windows=pages, **sizes)


class WindowedLife(SharingLife):
    """Arrivals, cancellations, stops, pins, steps and failures in any order, on tiny pools."""

    @initialize(
        hbm=st.integers(12, 60),
        reach=st.tuples(st.integers(1, 21), st.just(0)) | st.tuples(st.sampled_from([0, 0, 3, 9]), st.integers(1, 21)),
        part_blocks=st.integers(1, 3),
        caching=st.sampled_from([True, True, True, False]),
        running=st.integers(1, 8),
        step_tokens=st.integers(1, 24),
        chunk=st.integers(1, 12),
        depth=st.integers(1, 3),
        late=st.booleans(),
        draft_tokens=st.sampled_from([0, 1, 3, 8]),
    )
    def begin(self, reach, part_blocks, late, **sizes):
        self.world = World(windowed(reach[0], part_blocks, reads_chunk=reach[1], **sizes), BLOCK, twin=False)
        self.start_late_masks(late)


EXAMPLES = int(os.environ.get("MEMSERVE_TEST_EXAMPLES", "100"))
WindowedLife.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWindowedLife = WindowedLife.TestCase


def busy_life(seed, *, hbm=40, window=9, chunk=0):
    """On memory for a few of its requests."""
    return live_busily(World(windowed(window, 2, reads_chunk=chunk, hbm=hbm, running=4), BLOCK, twin=False), seed)


def test_a_busy_life_passes_and_shares_parts():
    worlds = [busy_life(seed) for seed in range(3)] + [busy_life(seed, window=0, chunk=10) for seed in range(3)]
    reports = [world.machine.pool.report().windows for world in worlds]
    assert all(report.passed > 50 and report.given_up > 10 for report in reports)
    assert all(world.machine.stats().cached_tokens > 100 for world in worlds)


def _passed_too_early(monkeypatch):
    monkeypatch.setattr(WindowPages, "kept_from", lambda self, tokens: max(0, tokens - 1) // self.block_tokens)


def _resumed_over_holes(monkeypatch):
    monkeypatch.setattr(WindowCache, "count_resumable", lambda self, blocks: len(blocks))


def _outlived_by_parts(monkeypatch):
    monkeypatch.setattr(WindowCache, "on_evicted", lambda self, evicted: None)


def _window_one_short(monkeypatch):
    first_entry = WindowPages.first_entry
    monkeypatch.setattr(WindowPages, "first_entry", lambda self, tokens: first_entry(self, tokens + self.block_tokens))


def _shared_when_written(monkeypatch):
    make_private = WindowsApart.make_private

    def make_private_without_a_copy(self, sequence, entry, *, copies):
        return make_private(self, sequence, entry, copies=False)

    monkeypatch.setattr(WindowsApart, "make_private", make_private_without_a_copy)


def _unknown_to_the_device(monkeypatch):
    monkeypatch.setattr(WindowsApart, "finish_plan", lambda self, plan: None)


@pytest.mark.parametrize(
    "plant",
    [
        _passed_too_early,
        _resumed_over_holes,
        _outlived_by_parts,
        _window_one_short,
        _shared_when_written,
        _unknown_to_the_device,
    ],
)
def test_planted_faults_are_noticed(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((Violation, InvariantError, AssertionError, KeyError)):
        for seed in range(10):
            busy_life(seed)
