"""Workers whose queries read KV heads of one another give together what one worker gives, and write the same pages."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memserve import _core, _kernels
from memserve.base.kv_layout import Parallel, shares
from memserve.base.types import KVGeometry
from memserve.model.attention.backends import KernelAttention, LentHeads, choose_backend
from memserve.model.attention.context import StepRows
from memserve.model.workers.group import WorkerGroup

SLOT_BYTES, BLOCKS = 4096, 24
SHAPES = {"2 of 3": (2, 3, 9), "3 of 8": (3, 8, 32), "2 of 5": (2, 5, 10), "3 of 4": (3, 4, 28)}
STEPS = (([37, 5], [37, 5]), ([1, 40], [38, 45]), ([1, 1], [39, 46]))  # new tokens and contexts of two rows


def attention_of(arena: torch.Tensor, geometry: KVGeometry, crew: WorkerGroup | None) -> Any:
    tables = np.arange(BLOCKS, dtype=np.int32).reshape(2, -1)[::-1].copy()
    factory = choose_backend(arena, geometry, crew)

    def of(counts: list[int], contexts: list[int]) -> Any:
        starts = np.cumsum([0, *counts]).astype(np.int32)
        return factory(StepRows(tables, np.arange(2, dtype=np.int32), starts, np.array(contexts, np.int32)))

    return of


def inputs(heads: int, kv_heads: int, tokens: int, seed: int) -> list[torch.Tensor]:
    """Queries, keys, values, and a sink for each query head."""
    made = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(1, tokens, count, 16, generator=made).transpose(1, 2) for count in (heads, kv_heads, kv_heads)]
    return [*drawn, torch.randn(heads, generator=made)]


def run_all(work: Any, count: int) -> None:
    errors: list[BaseException] = []

    def guarded(at: int) -> None:
        try:
            work(at)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


@pytest.mark.parametrize("options", [{}, {"window": 11}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_workers_together_attend_as_one(shape: str, options: dict[str, Any]) -> None:
    parts, kv_heads, heads = SHAPES[shape]
    geometry = KVGeometry(2, kv_heads, 16, 16, "float32", 16)
    arenas = [torch.zeros(BLOCKS * geometry.block_bytes, dtype=torch.uint8) for _ in range(2)]
    region = _core.SharedArena(_kernels.Collective.region_bytes(parts, SLOT_BYTES))
    crews = [
        WorkerGroup(share, _kernels.Collective(region.address, share.part, parts, SLOT_BYTES, 30.0), None, ())
        for share in shares(Parallel(parts), geometry, heads)
    ]
    alone = attention_of(arenas[0], geometry, None)
    members = [attention_of(arenas[1], geometry, crew) for crew in crews]
    for number, (counts, contexts) in enumerate(STEPS):
        batch = alone(counts, contexts)
        assert isinstance(batch, KernelAttention)
        own = [member(counts, contexts) for member in members]
        assert all(isinstance(one, LentHeads) for one in own)
        for layer in range(2):
            q, k, v, sinks = inputs(heads, kv_heads, sum(counts) + 3, 10 * number + layer)  # 3 rows of padding
            more = {**options, "sinks": sinks} if options.get("sinks") else {**options}
            want = batch.run_attention(layer, q, k, v, scale=0.3, **more)
            got: list[Any] = [None] * parts

            def work(part: int, layer=layer, q=q, k=k, v=v, more=more, own=own, got=got) -> None:
                share = crews[part].share
                first = sum(share.queries[:part])
                mine = slice(first, first + share.queries[part])
                held = slice(share.first_head, share.first_head + share.heads[part])
                some = {**more, "sinks": more["sinks"][mine]} if "sinks" in more else more
                got[part] = own[part].run_attention(layer, q[:, mine], k[:, held], v[:, held], scale=0.3, **some)

            run_all(work, parts)
            assert torch.allclose(torch.cat(got, 2), want, atol=1e-6, rtol=1e-5)
    assert torch.equal(*arenas), "every page is what one worker writes"


def test_borrowed_head_is_read_after_it_is_written() -> None:
    """The borrower comes first, and the lender as late as can be: the borrower waits."""
    geometry = KVGeometry(1, 3, 16, 16, "float32", 16)
    arena = torch.full((BLOCKS * geometry.block_bytes,), 0xFF, dtype=torch.uint8)  # numbers that are none
    region = _core.SharedArena(_kernels.Collective.region_bytes(2, SLOT_BYTES))
    found = shares(Parallel(2), geometry, 9)
    crews = [WorkerGroup(s, _kernels.Collective(region.address, s.part, 2, SLOT_BYTES, 30.0), None, ()) for s in found]
    own = [attention_of(arena, geometry, crew)([20, 20], [20, 20]) for crew in crews]
    q, k, v, _ = inputs(9, 3, 40, 1)
    entered, got = threading.Event(), [torch.empty(0)] * 2
    borrowed = own[1]._await

    def awaiting(owner: int) -> None:
        entered.set()
        borrowed(owner)

    own[1]._await = awaiting

    def work(part: int) -> None:
        if part == 0:
            assert entered.wait(30), "part 1 has done its own and waits"
        queries, heads = ((slice(0, 4), slice(0, 2)), (slice(4, 9), slice(2, 3)))[part]
        got[part] = own[part].run_attention(0, q[:, queries], k[:, heads], v[:, heads], scale=0.3)

    run_all(work, 2)
    assert all(bool(one.isfinite().all()) for one in got)


def test_heads_that_divide_evenly_are_not_lent() -> None:
    geometry = KVGeometry(1, 4, 16, 16, "float32", 16)
    assert not shares(Parallel(2), geometry, 12)[0].shares_heads
    assert not shares(Parallel(2), replace(geometry, num_kv_heads=3), 3)[0].shares_heads
