"""How a model is divided: every head, column and layer once, parts alike."""

from __future__ import annotations

import random

import pytest

from memserve.errors import UserError
from memserve.parallel import COLUMN_UNIT, Parallel, balanced, even, shares
from memserve.types import KVGeometry

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


@pytest.mark.parametrize("seed", range(200))
def test_columns_make_up_for_heads(seed: int) -> None:
    rng = random.Random(7600 + seed)
    parts = rng.randrange(1, 7)
    heads = even(rng.randrange(parts, 24), parts)
    columns = rng.randrange(parts, 4000)
    head_cost, column_cost = rng.uniform(1, 2000), rng.uniform(1, 30)
    cut = balanced(columns, heads, head_cost, column_cost)
    assert sum(cut) == columns and min(cut) >= 1 and len(cut) == parts
    costs = [own * head_cost + some * column_cost for own, some in zip(heads, cut, strict=True)]
    unit = COLUMN_UNIT if columns >= 4 * parts * COLUMN_UNIT else 1
    fewest = min(cut)
    assert max(costs) - min(costs) <= 2 * unit * column_cost + 1e-6 or fewest <= 2 * unit, (
        "else heads alone are unequal"
    )


def test_smollm2_among_two_is_balanced() -> None:
    first, second = balanced(1536, (2, 1), 576 * 64 * 8, 576 * 3)
    assert (first, second) == (704, 832)


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


def test_one_worker_is_no_division() -> None:
    assert Parallel().workers == 1 and Parallel().text == ""
    assert Parallel(2, 3).text == "tp2pp3" and Parallel(2, 3).threads_each(4) == 1
    with pytest.raises(UserError, match="at least 1"):
        Parallel(0)
