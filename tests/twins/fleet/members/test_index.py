"""Blocks of an engine of any size, as the router's directory comes to know them: beside a plain set of prefixes."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from memserve import _core
from memserve.base.types import Role, Tier
from memserve.fleet.kv_events import EngineKvFeed, KvEntries
from memserve.fleet.kv_formats import AllBlocksRemoved, BlocksRemoved, BlocksStored, EngineKvEvent
from memserve.fleet.members.index import EngineIndex
from memserve.kv.events import KvFeed
from memserve.kv.identity import DEFAULT_KEY, namespace_id
from memserve.router.placement.prefix_directory import tiers_of

ROOT = namespace_id("", "names")
TOKENS_MAX = 60


class Twin:
    """An engine with blocks of ``size`` tokens, and how many copies of each prefix lie on each tier."""

    def __init__(self, rng: Random, size: int) -> None:
        self._rng, self._size = rng, size
        self.copies: dict[tuple[int, ...], list[int]] = {}

    def event(self) -> EngineKvEvent:
        """Something happens to a few blocks."""
        rng, size = self._rng, self._size
        deed = rng.random()
        if deed < 0.02:
            self.copies.clear()
            return AllBlocksRemoved()
        if deed < 0.4 and self.copies:
            prefix = rng.choice(list(self.copies))
            tier = rng.choice([tier for tier in (0, 1) if self.copies[prefix][tier]])
            self.copies[prefix][tier] -= 1
            if not any(self.copies[prefix]):
                del self.copies[prefix]
            return BlocksRemoved([hash(prefix)], is_lower=bool(tier))
        parent = rng.choice([(), *self.copies])
        parent = parent if len(parent) < TOKENS_MAX else ()
        is_lower = bool(parent) and rng.random() < 0.2
        count = rng.randint(1, 3)
        tokens = tuple(rng.randint(0, 1) for _ in range(count * size))
        prefixes = [parent + tokens[: end * size] for end in range(1, count + 1)]
        for prefix in prefixes:
            self.copies.setdefault(prefix, [0, 0])[is_lower] += 1
        return BlocksStored(
            [hash(prefix) for prefix in prefixes], hash(parent) if parent else None, tokens, size, is_lower
        )

    def entries(self, entry_tokens: int) -> list[Counter[bytes]]:
        """Copies of each of the cluster's blocks, by tier: those that end in a block of the engine's."""
        counts: list[Counter[bytes]] = [Counter(), Counter()]
        for prefix, copies in self.copies.items():
            packed = _core.block_identities(DEFAULT_KEY, ROOT, np.array(prefix, np.int32), entry_tokens)
            first = (len(prefix) - self._size) // entry_tokens
            for at in range(first, len(packed) // 16):
                for tier in (0, 1):
                    counts[tier][packed[16 * at : 16 * at + 16]] += copies[tier]
        return [Counter({identity: count for identity, count in tier.items() if count}) for tier in counts]


@pytest.mark.parametrize(("size", "entry_tokens"), [(4, 4), (8, 4), (4, 8), (6, 4), (4, 6), (1, 4), (12, 5)])
def test_a_router_knows_blocks_of_any_size(size: int, entry_tokens: int) -> None:
    rng = Random(size * 100 + entry_tokens)
    twin, index = Twin(rng, size), EngineIndex()
    feed = EngineKvFeed(KvEntries(0, index, DEFAULT_KEY, lambda _: ROOT, entry_tokens), True)
    news, directory = KvFeed(index, 1 << 16), _core.PrefixDirectory()
    upper, _ = tiers_of(Role.ENGINE)
    for step in range(400):
        feed._apply_event(twin.event())
        index.check_invariants()
        changes = news.take_changes()
        for change in changes.changes if changes is not None else ():
            if change.kind == "evicted":
                assert directory.evict(0, change.identities) == 0
            elif change.kind == "moved":
                assert directory.move(0, change.tier - upper, change.identities) == 0
            else:
                directory.store(0, change.tier - upper, change.identities)
        expected = twin.entries(entry_tokens)
        present = {identity: (bool(above), bool(below)) for identity, above, below in directory.dump(0)}
        names = expected[0].keys() | expected[1].keys()
        assert present == {name: (expected[0][name] > 0, expected[1][name] > 0) for name in names}, step
        if step % 40 == 0:
            for tier, kind in enumerate((Tier.HBM, Tier.DRAM)):
                packed = index.cached_identities(kind)
                counted = Counter(packed[at : at + 16] for at in range(0, len(packed), 16))
                assert counted == expected[tier]
