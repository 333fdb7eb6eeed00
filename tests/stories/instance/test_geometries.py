"""KV of real models between instances and a store: more layers than blocks, blocks as long as real ones, real bytes.

The device's KV is literal, cell by cell in each layer: a page of another layer, block or sequence is a wrong token.
"""

from __future__ import annotations

from typing import Any

import pytest

from fleet_store import split, with_store
from fleet_world import Fleet, TransferMode, fleet_config, stats, story_of
from geometries import SHAPES
from instance_world import VOCAB, request
from memserve.base.types import KVGeometry, Tier
from memserve.protocol.messages import KvSnapshot, QueryKvEvents
from memserve.protocol.peers import Holder

CONTEXT = 320
PROMPT = [(3 * i + i * i) % VOCAB for i in range(200)]
OTHER = [*PROMPT[7:], *PROMPT[:100]]
SIZES = {"hbm": 24, "context": CONTEXT, "step_tokens": 96, "chunk": 64}


CODED = {f"smollm2 as {kv_dtype}": SHAPES["smollm2"].with_codes(kv_dtype) for kv_dtype in ("int8", "int4")}


@pytest.fixture(params=[*SHAPES, *CODED])
def kv(request: pytest.FixtureRequest) -> KVGeometry:
    return {**SHAPES, **CODED}[request.param].kv


def two_tiers(kv: KVGeometry) -> Any:
    """An instance whose HBM has room for one context and a block, before a second tier."""
    return fleet_config(**{**SIZES, "hbm": CONTEXT // kv.block_tokens + 1, "dram": 40})


def fill(fleet: Fleet) -> None:
    """Compute two prompts at ``p``: the second one pushes the first one down."""
    for name, tokens in (("one", PROMPT), ("other", OTHER)):
        fleet.submit(request(name, tokens, max_tokens=3), "p")
        fleet.run()


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_conversation_is_handed_over_and_returned(kv: KVGeometry, mode: TransferMode) -> None:
    """PD-Caching-3: three turns, whose answers fill blocks of their own."""
    fleet = Fleet(kv, p=fleet_config(**SIZES), d=fleet_config(**SIZES))
    history = PROMPT[:70]
    for turn in range(3):
        job = fleet.submit(
            request(f"t{turn}", history, max_tokens=50, seed=turn), "p", "d", transfer=mode, return_kv=True
        )
        fleet.run()
        history = [*history, *job.got[0], turn % VOCAB]
    assert len(fleet.handed_over) == 3 and not fleet.refused
    sent, kept = stats(fleet, "p"), stats(fleet, "d")
    assert kept.bytes_received == kept.blocks_received * kv.block_bytes > 0
    assert kept.computed_tokens == 3 * 49, "it computes no prompt token"
    assert sent.blocks_come_home > 0 and kept.blocks_reused > 0
    fleet.finish()


def test_a_prefix_is_fetched_from_dram_and_by_store(kv: KVGeometry) -> None:
    """Out of the second tier of an instance, and what came of it out of the store."""
    whole = 192 // kv.block_tokens
    fleet = with_store(geometry=kv, p=two_tiers(kv), d=fleet_config(**SIZES), q=fleet_config(**SIZES))
    fill(fleet)
    assert stats(fleet, "p").dram.blocks_cached > 0 and fleet.members["s"].has(PROMPT[:192]) == whole
    for taker, holder in (("d", "p"), ("q", "s")):
        named = (Holder(fleet.members[holder].peer, 192),)
        job = fleet.submit(request(f"of {holder}", PROMPT[:200], max_tokens=3), taker, holders=named)
        fleet.run()
        assert story_of(job)["fetched_from"] == holder and stats(fleet, taker).fetched_tokens == 192
    fleet.finish()


def test_a_snapshot_names_each_block_of_both_tiers(kv: KVGeometry) -> None:
    """What a router is told that knows nothing: a block is 16 bytes, however many tokens, heads and layers it has."""
    fleet = Fleet(kv, p=two_tiers(kv))
    fill(fleet)
    member = fleet.members["p"]
    member.hear(QueryKvEvents(member.machine.next_event + 1))
    snapshot, pool = member.said[-1], member.machine.pool
    assert isinstance(snapshot, KvSnapshot)
    assert (snapshot.hbm, snapshot.dram) == (pool.cached_identities(Tier.HBM), pool.cached_identities(Tier.DRAM))
    blocks = [name for tokens in (PROMPT, OTHER) for name in split(pool.identities("", tokens))]
    assert snapshot.dram and sorted(split(snapshot.hbm + snapshot.dram)) == sorted(blocks)
    fleet.finish()
