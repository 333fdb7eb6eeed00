"""The parts of the instance machine, each next to something simpler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instance_world import VOCAB, World, config, lone_beams, request
from memserve.base.config import PoolConfig
from memserve.base.errors import InvariantError
from memserve.base.layer_kv import WindowPages
from memserve.base.types import FinishReason
from memserve.instance.scheduler.beam import BeamSearch, BeamState
from memserve.instance.scheduler.capacity import chunk_tokens, context_tokens, headroom_blocks, streamed_tokens
from memserve.instance.scheduler.sequence import Group
from memserve.instance.scheduler.state import RankedList
from memserve.kv.costs import PreemptionCosts, PreemptionModel

# -- policy


@given(
    start=st.integers(0, 100),
    remaining=st.integers(1, 100),
    chunk=st.integers(1, 40),
    budget=st.integers(1, 40),
    block=st.integers(1, 9),
)
def test_a_chunk_keeps_its_limits_and_ends_at_a_block_if_it_can(start, remaining, chunk, budget, block):
    """Of all counts that are allowed, the largest that ends the tokens or a block; else the largest."""
    end, most = start + remaining, min(remaining, chunk, budget)
    good = [count for count in range(1, most + 1) if start + count == end or (start + count) % block == 0]
    assert chunk_tokens(start, end, chunk, budget, block) == (good[-1] if good else most)


def test_the_context_is_what_model_and_pool_allow():
    """The last token needs no KV."""
    pool = PoolConfig(10)
    assert context_tokens(1000, pool, 32) == 321 and context_tokens(100, pool, 32) == 100
    apart = PoolConfig(40, windows=WindowPages(64, 2, 32, 32))  # five parts of two blocks
    assert context_tokens(5000, apart, 32) == 30 * 32 + 1
    assert context_tokens(5000, replace(apart, hbm_blocks=9), 32) == 3 * 32 + 1
    pages = apart.windows
    assert pages is not None
    for blocks in range(60):  # as trying each length says
        fitting = [entries for entries in range(60) if pages.blocks_for(entries) <= blocks]
        assert pages.entries_in(blocks) == fitting[-1]


@pytest.mark.parametrize(("hbm", "dram", "layers", "entries"), [
    (16, 120, 5, 30), (16, 20, 5, 20), (40, 1000, 30, 450), (16, 120, 2, 16), (4, 120, 30, 4), (6, 120, 30, 30),
])  # fmt: skip
def test_streamed_context_is_what_dram_and_two_layers_hold(hbm: int, dram: int, layers: int, entries: int) -> None:
    """Two layers at a time in three quarters of HBM; never less than lies whole."""
    assert streamed_tokens(100_000, PoolConfig(hbm, dram), 8, layers) == entries * 8 + 1
    assert streamed_tokens(20, PoolConfig(hbm, dram), 8, layers) == 20


def test_headroom_grows_with_what_decodes():
    """None for an idle instance: a lone request must always get in."""
    assert [headroom_blocks(count) for count in (0, 1, 4, 5, 256)] == [0, 1, 1, 2, 64]


def test_the_prefill_rate_is_learnt_from_prefill_steps_only():
    """First measurement taken as it is, later ones smoothed, decode steps ignored."""
    model = PreemptionModel(PreemptionCosts(prefill_ns_per_token=7))
    model.learn_step(10, 10, 99_000)
    assert model.prefill_ns_per_token == 7
    model.learn_step(100, 0, 100_000)
    assert model.prefill_ns_per_token == 1000
    model.learn_step(100, 0, 180_000)
    assert model.prefill_ns_per_token == 1100
    model.learn_step(100, 0, 0)
    assert model.prefill_ns_per_token == 1100 and model.recompute_ns(3) == 3300


def test_swap_costs_both_ways():
    """Two blocks of 1,000 bytes, out and in, at 1,000 bytes a second: four seconds."""
    model = PreemptionModel(PreemptionCosts(block_bytes=1000, link_bytes_per_s=1000, prefill_ns_per_token=10**9))
    assert model.swap_ns(2) == 4 * 10**9
    assert model.prefers_swap("auto", tokens=5, blocks=2) and not model.prefers_swap("auto", tokens=4, blocks=2)
    assert model.prefers_swap("swap", 0, 99) and not model.prefers_swap("recompute", 99, 0)


# -- the waiting line


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_a_ranked_list_is_a_sorted_list(operations):
    """Adding and removing at random, beside a list that is sorted anew each time."""
    ranked, plain = RankedList(), []
    for arrival, (priority, removes) in enumerate(operations):
        sequence = Group(request(f"r{arrival}", [1], priority=priority), arrival, 1, 0).new_sequence()
        if removes and plain:
            gone = plain.pop(arrival % len(plain))
            ranked.remove(gone)
            assert gone not in ranked
            with pytest.raises(InvariantError, match="not in this list"):
                ranked.remove(gone)
        else:
            ranked.add(sequence)
            plain = sorted([*plain, sequence], key=lambda item: item.rank)
            assert sequence in ranked
        assert list(ranked) == plain and len(ranked) == len(plain)


# -- beams


def test_the_search_stops_when_no_living_beam_can_win():
    """Two hypotheses are finished and both beat the best that lives."""
    search = BeamSearch(2, 1.0, frozenset({9}), 0)
    beams = [BeamState((), (), 0.0, [(9, -0.1), (1, -5.0), (2, -6.0), (3, -7.0)])]
    assert [survivor.token for survivor in search.next_survivors(beams, 10)] == [1, 2]
    beams = [
        BeamState((1,), (-5.0,), -5.0, [(9, -0.1), (4, -1.0), (5, -2.0), (6, -3.0)]),
        BeamState((2,), (-6.0,), -6.0, [(7, -8.0), (8, -9.0), (4, -9.5), (5, -9.9)]),
    ]
    assert search.next_survivors(beams, 10) == []
    assert [hypothesis.tokens for hypothesis in search.finished] == [(9,), (1, 9)]


def test_a_stop_token_outside_the_best_width_does_not_finish():
    """It would have been cut off had it been any other token."""
    search = BeamSearch(1, 1.0, frozenset({9}), 0)
    (survivor,) = search.next_survivors([BeamState((), (), 0.0, [(1, -0.1), (9, -0.2)])], 10)
    assert survivor.token == 1 and search.finished == []


def test_min_tokens_hold_for_beams():
    """A stop token before ``min_tokens`` is a token like any other."""
    search = BeamSearch(1, 1.0, frozenset({9}), 2)
    (survivor,) = search.next_survivors([BeamState((), (), 0.0, [(9, -0.1), (1, -0.2)])], 10)
    assert survivor.token == 9


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 9),
    stops=st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True),
    penalty=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    min_tokens=st.integers(0, 4),
)
def test_beam_search_equals_the_plain_one(prompt, width, max_tokens, stops, penalty, min_tokens):
    """Through the whole machine, all ``width`` results compared."""
    world = World(config(hbm=64, running=8, step_tokens=64, depth=1), 4)
    req = request(
        "a", prompt, max_tokens=max_tokens, n=width, beam_width=width, stops=stops, length_penalty=penalty,
        min_tokens=min_tokens,
    )  # fmt: skip
    world.arrive(req)
    world.drain()
    expected = lone_beams(req, 64)
    assert [tuple(world.got["a", index]) for index in range(len(expected))] == [tokens for tokens, _, _ in expected]
    assert all(world.final["a", index] is expected[index][2] for index in range(len(expected)))
    assert FinishReason.ERROR not in world.final.values()
    world.check_all_ended()


def test_reprs_are_lean():
    """They go into logs and invariant messages."""
    world = World(config(), 4)
    world.arrive(request("a", np.arange(30) % VOCAB))
    for thing in (world.machine, world.machine.state, *world.machine.inflight):
        assert repr(thing).startswith("<") and len(repr(thing)) < 200
