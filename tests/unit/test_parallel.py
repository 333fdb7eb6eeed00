"""How a model is divided: every head, column and layer once, parts alike."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from memserve.base.errors import UserError
from memserve.base.kv_layout import COLUMN_UNIT, Parallel, even, query_parts, shares
from memserve.base.types import KVGeometry

SMOL = KVGeometry(num_layers=30, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16", block_tokens=32)


@pytest.mark.parametrize("seed", range(200))
def test_parts_are_whole_and_alike(seed: int) -> None:
    rng = random.Random(7300 + seed)
    parts, unit = rng.randrange(1, 9), rng.choice((1, 1, 32, 64))
    count = rng.randrange(parts, 400) * rng.choice((1, unit))
    cut = even(count, parts, unit)
    assert sum(cut) == count and len(cut) == parts and min(cut) >= 0
    assert max(cut) - min(cut[:-1], default=0) <= unit or parts == 1
    assert all(size % unit == 0 for size in cut if size and size is not cut[-1]) or unit == 1 or count % unit


def test_the_mlp_of_smollm2_is_cut_in_the_middle() -> None:
    assert even(1536, 2, COLUMN_UNIT) == (768, 768) and even(1536, 5, COLUMN_UNIT) == (320, 320, 320, 320, 256)


def test_shares_cover_the_model_once() -> None:
    found = shares(Parallel(3, 4), SMOL)
    assert [share.rank for share in found] == list(range(12))
    assert sorted({layer for share in found for layer in share.own_layers}) == list(range(30))
    for stage in range(4):
        own = [share for share in found if share.stage == stage]
        assert [share.first_head for share in own] == [0, 1, 2]
        assert {share.is_last_stage for share in own} == {stage == 3}


@pytest.mark.parametrize(("parallel", "message"), [(Parallel(4, 1), "3 KV heads"), (Parallel(1, 31), "30 layers")])
def test_more_workers_than_parts_are_refused(parallel: Parallel, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        shares(parallel, SMOL)
    assert "use --" in refused.value.hint


def test_query_heads_of_smollm2_make_up_for_its_odd_kv_heads() -> None:
    assert query_parts((2, 1), 9) == (4, 5), "with two products of each head: 12 and 12, and not 16 and 8"
    assert query_parts((1, 1), 6) == () == query_parts((2, 1), 3)
    first, second = shares(Parallel(2), SMOL, 9)
    said = [
        [(one.owner, one.first, one.heads, one.first_query, one.queries) for one in s.head_ranges()]
        for s in (first, second)
    ]
    assert said == [[(0, 1, 1, 3, 1), (0, 0, 1, 0, 3)], [(1, 2, 1, 2, 3), (0, 1, 1, 0, 2)]], "what others read is first"


@pytest.mark.parametrize("seed", range(200))
def test_query_heads_read_their_kv_head_and_parts_are_balanced(seed: int) -> None:
    rng = random.Random(5100 + seed)
    parts = rng.randrange(2, 7)
    heads, group = rng.randrange(parts, 40), rng.randrange(2, 9)
    found = shares(Parallel(parts), replace(SMOL, num_kv_heads=heads), heads * group)
    if heads % parts == 0:
        assert not found[0].shares_heads
        return
    read, before = [], 0
    for share in found:
        ranges = share.head_ranges()
        for one in ranges:
            assert one.queries == one.heads * group or one.heads == 1
            of_query = [one.first + (before + one.first_query + at) // group - (before + one.first_query) // group
                        for at in range(one.queries)]  # fmt: skip
            read += [(before + one.first_query + at, head) for at, head in enumerate(of_query)]
        own = {head for one in ranges if one.owner == share.part for head in range(one.first, one.first + one.heads)}
        assert own == set(range(share.first_head, share.first_head + share.heads[share.part])), "all are written"
        before += share.queries[share.part]
    assert sorted(read) == [(query, query // group) for query in range(heads * group)]
    costs = [share.queries[share.part] + share.heads[share.part] for share in found]
    wholes = [(group + 1) * count for count in found[0].heads]
    assert sum(costs) == sum(wholes) and max(costs) <= max(max(wholes), sum(costs) / parts + 1)


def test_single_worker_is_not_divided() -> None:
    assert Parallel().worker_count == 1 and Parallel().text == ""
    assert Parallel(2, 3).text == "tp2pp3" and Parallel(2, 3).threads_each(4) == 1
    with pytest.raises(UserError, match="at least 1"):
        Parallel(0)
