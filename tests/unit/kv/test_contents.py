"""KV found by its tokens: beside a search that looks at everything, and what the pool holds meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.config import PoolConfig
from memserve.base.types import Tier
from memserve.kv.contents import ContentIndex, ContentReuse, InexactKv, keep_all_but_first
from memserve.kv.pool import BlockPool

BLOCK = 4
KEY = b"0123456789abcdef"
ZERO_KEY = bytes(16)
"""Windows with equal sums have equal hashes."""


def array(tokens):
    return np.array(tokens, np.int32)


def naive_runs(sources, tokens, first, end):
    """``(first, source, source_first, count)``, by looking at every block of every source at every position."""
    runs, behind, position = [], first, first
    while position + BLOCK <= end:
        window = list(tokens[position : position + BLOCK])
        places = [
            (number, begin)
            for number, source in enumerate(sources)
            for begin in range(0, len(source) - BLOCK + 1, BLOCK)
            if source[begin : begin + BLOCK] == window
        ]
        if not places:
            position += 1
            continue
        number, begin = places[-1]  # the block that was noted last
        source, before, count = sources[number], 0, BLOCK
        while min(position - before - behind, begin - before) > 0:
            if tokens[position - before - 1] != source[begin - before - 1]:
                break
            before += 1
        while position + count < end and begin + count < len(source):
            if tokens[position + count] != source[begin + count]:
                break
            count += 1
        runs.append((position - before, number, begin - before, before + count))
        behind = position = position + count
    return runs


words = st.sampled_from([[1, 2, 3], [4, 5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6]])
texts = st.lists(words, max_size=6).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, max_size=4), texts, st.integers(0, 6), st.integers(0, 6), st.sampled_from([KEY, ZERO_KEY]))
def test_runs_are_those_of_a_search_through_everything(sources, tokens, skipped, left, key):
    sources = [source[: len(source) // BLOCK * BLOCK] for source in sources]
    index = ContentIndex(BLOCK, 1000, key)
    for number, source in enumerate(sources):
        index.note_published(number, "", array(source), str(number))
    end = len(tokens) - left
    found = index.find_runs("", array(tokens), skipped, end)
    index.check_invariants()
    actual = [(run.first, int(run.source.label), run.source_first, run.count) for run in found]
    if key is KEY:
        assert actual == naive_runs(sources, tokens, skipped, end)
    for first, number, source_first, count in actual:  # a collision hides a window, and never gives other tokens
        assert tokens[first : first + count] == sources[number][source_first : source_first + count]
        assert skipped <= first and first + count <= end


def test_source_that_grows_is_found_up_to_its_end():
    index = ContentIndex(BLOCK, 1000, KEY)
    text = array(range(12))
    index.note_published("a", "", text[:4])
    index.note_published("a", "", text)
    index.note_published("a", "", text[:8])  # preempted, and published again
    (run,) = index.find_runs("", array([50, *range(2, 12), 51]), 0, 12)
    assert (run.first, run.source_first, run.count, run.shift) == (1, 2, 10, -1)
    assert index.tokens == 12


def test_text_of_another_tenant_is_not_found():
    index = ContentIndex(BLOCK, 1000, KEY)
    index.note_published("a", "one", array(range(8)))
    assert index.find_runs("two", array(range(8)), 0, 8) == []
    assert len(index.find_runs("one", array(range(8)), 0, 8)) == 1


def test_oldest_sources_go_beyond_the_limit():
    index = ContentIndex(BLOCK, 20, KEY)
    for number in range(5):
        index.note_published(number, "", array(range(8 * number, 8 * number + 8)))
        index.check_invariants()
    assert index.tokens == 16
    assert not index.find_runs("", array(range(24)), 0, 24)
    assert [run.count for run in index.find_runs("", array(range(24, 40)), 0, 16)] == [8, 8]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 9),
)
def test_chunks_compute_each_position_that_is_not_copied(gaps, begin, chunk):
    kept, position = [], 0
    for gap, length in gaps:
        kept.append((position + gap, position + gap + length))
        position = kept[-1][1]
    end = position + 3
    inexact, computed = InexactKv(kept[0][0], kept), []
    first = begin = min(begin, end - 1)
    while first < end:
        chunk_end = inexact.end_of_chunk(first, end, chunk)
        spans = inexact.spans_to_compute(first, chunk_end)
        assert 0 < sum(b - a for a, b in spans) <= chunk
        computed += [place for a, b in spans for place in range(a, b)]
        first = chunk_end
    inside = {place for a, b in kept for place in range(a, b)}
    assert computed == [place for place in range(begin, end) if place not in inside]


# -- in a pool


def reuse(share=0.25, hbm=16, dram=0, **more):
    pool = BlockPool(PoolConfig(hbm, dram, **more), BLOCK, "test")
    return pool, ContentReuse(pool, KEY, share)


def publish(pool, contents, tokens, name="source"):
    lease, blocks = pool.acquire("", array(tokens)), pool.allocate(len(tokens) // BLOCK)
    pool.publish(lease, "", array(tokens), blocks, written_by=0)
    pool.unpin(lease)
    pool.release(blocks)
    contents.index.note_published(name, "", array(tokens), name)
    return blocks


def test_run_is_copied_from_its_blocks_but_for_its_first_tokens():
    pool, contents = reuse()
    source = publish(pool, contents, range(16))
    own = pool.allocate(5)
    prompt = array([50, 51, 52, *range(2, 15), 53, 54, 55, 56])
    inexact, (run,) = contents.place_runs("b", "", prompt, 0, own)
    (move,) = contents.take_moves()
    assert (move.src, move.src_first, move.dst, move.dst_first) == (source, 2, own[:4], 3)
    assert (move.count, move.shift, move.src_tier) == (13, 1, Tier.HBM)
    assert (inexact.copied, inexact.exact_tokens, inexact.tokens) == ([(7, 16)], 7, 9)
    assert (run.first, run.end) == (3, 16)
    assert contents.take_moves() == []


@pytest.mark.parametrize("way", ["taken", "cancelled"])
def test_sources_stay_until_the_copies_are_in_a_plan(way):
    pool, contents = reuse(hbm=10)
    publish(pool, contents, range(16))
    own = pool.allocate(5)
    assert contents.place_runs("b", "", array([50, *range(16), 51, 52, 53, 54]), 0, own) is not None
    contents.check_invariants({"b"})
    assert pool.available() == 1 and pool.allocate(2) is None
    contents.take_moves() if way == "taken" else contents.cancel_moves("b")
    contents.check_invariants(set())
    assert contents.take_moves() == []
    assert len(pool.allocate(5)) == 5
    pool.check_invariants()


@pytest.mark.parametrize(
    ("lower", "tiers"), [({}, [Tier.DRAM]), ({"lower_dtype": "int8"}, []), ({"ssd_blocks": 8}, [])]
)
def test_blocks_in_dram_are_sources_unless_rounded_or_in_a_file(lower, tiers):
    pool, contents = reuse(hbm=8, dram=8, **lower)
    publish(pool, contents, range(16))
    own = pool.allocate(8)  # moves the cache down
    placed = contents.place_runs("b", "", array([50, *range(16), 51, 52, 53, 54]), 0, own)
    assert (placed is not None) == bool(tiers)
    assert [move.src_tier for move in contents.take_moves()] == tiers


def test_run_ends_where_its_blocks_were_evicted():
    pool, contents = reuse(share=0.0)
    publish(pool, contents, range(16))
    pool.delete("", array(range(16))[: pool.match("", array(range(16)))])
    publish(pool, contents, range(8), "shorter")
    contents.index.note_published("source", "", array(range(16)), "source")
    own, prompt = pool.allocate(6), array([50, *range(16), 51, 52, 53, 54])
    inexact, _ = contents.place_runs("b", "", prompt, 0, own)
    assert inexact.copied == [(1, 9)]
    contents.cancel_moves("b")
    pool.release(own)
    assert pool.available() == 16


def test_little_is_not_worth_it():
    pool, contents = reuse(share=1.0)
    publish(pool, contents, range(16))
    own, before = pool.allocate(6), pool.available()
    assert contents.place_runs("b", "", array([50, *range(16), 51, 52, 53, 54]), 0, own) is None
    assert pool.available() == before and contents.take_moves() == []


def test_share_of_each_run_is_computed_anew():
    index = ContentIndex(BLOCK, 1000, KEY)
    index.note_published("a", "", array(range(20)))
    runs = index.find_runs("", array([50, *range(12), 51, *range(12, 20)]), 0, 22)
    assert [run.count for run in runs] == [12, 8]
    assert keep_all_but_first(runs, 0.25) == [(4, 13), (16, 22)]
    assert keep_all_but_first(runs, 0.0) == [(1, 13), (14, 22)]
    assert keep_all_but_first(runs, 1.0) == []
