"""Random lives of an engine's cache, with batches lost, late and repeated, against a plain count of its blocks."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kv_event_words import BLOCK, batch, removed, stored
from memserve import _core
from memserve.fleet.kv_events import EngineKvFeed, KvEntries
from memserve.kv.identity import DEFAULT_KEY, namespace_id

ROOT = namespace_id("", "m")


class EngineTwin:
    """What the engine has: copies of each block, and the batches that it has published."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.chains = [[draw.randrange(100) for _ in range(BLOCK * 4)] for _ in range(5)]
        self.copies: Counter[tuple[int, int]] = Counter()
        self.batches: list[bytes] = []

    def act(self) -> None:
        """One batch: blocks stored, each behind its parent, or removed."""
        events = []
        for _ in range(self.draw.randrange(1, 4)):
            chain = self.draw.randrange(5)
            depth = next((at for at in range(4) if not self.copies[chain, at]), 4)
            have = [key for key, count in self.copies.items() if count]
            if have and (self.draw.random() < 0.4 or depth == 4):
                key = self.draw.choice(have)
                self.copies[key] -= 1
                events.append(removed([self.name(key)]))
            elif depth < 4 or self.copies[chain, 3]:
                at = min(depth, 3)
                self.copies[chain, at] += 1
                tokens = self.chains[chain][at * BLOCK : (at + 1) * BLOCK]
                events.append(stored([self.name((chain, at))], self.name((chain, at - 1)) if at else None, tokens))
        self.batches.append(batch(*events))

    @staticmethod
    def name(key: tuple[int, int]) -> int:
        """The engine's hash of a block."""
        return 1000 + 10 * key[0] + key[1]

    def expected(self) -> dict[int, tuple[int, int]]:
        """As :meth:`EngineKvFeed.block_counts` must say."""
        return {self.name(key): (count, 0) for key, count in self.copies.items() if count}


@pytest.mark.parametrize("seed", range(40))
def test_with_replays_the_feed_knows_what_the_engine_has(seed: int) -> None:
    draw = random.Random(seed)
    engine, directory = EngineTwin(draw), _core.PrefixDirectory()
    feed = EngineKvFeed(KvEntries(0, directory, DEFAULT_KEY, lambda size: ROOT), True)
    for _ in range(60):
        engine.act()
        if draw.random() < 0.2:
            continue  # lost on its way
        number = len(engine.batches) - 1
        first = feed.on_live_batch(number, engine.batches[-1])
        while first is not None:
            for at in range(first, number + draw.randrange(0, 2)):
                if at == first or draw.random() < 0.8:
                    feed.on_replayed_batch(at, engine.batches[at])
            first = feed.on_replay_ended()
        assert feed.block_counts() == engine.expected()
        for chain, tokens in enumerate(engine.chains):
            packed = _core.block_identities(DEFAULT_KEY, ROOT, np.array(tokens, np.int32), BLOCK)
            depth = next((at for at in range(4) if not engine.copies[chain, at]), 4)
            assert [found[1] for found in directory.match(packed)] == ([depth] if depth else [])
    directory.check_invariants()
    assert feed.forgotten == 0


@pytest.mark.parametrize("seed", range(40))
def test_without_replays_it_never_knows_more_than_the_engine_has(seed: int) -> None:
    draw = random.Random(seed)
    engine = EngineTwin(draw)
    feed = EngineKvFeed(KvEntries(0, _core.PrefixDirectory(), DEFAULT_KEY, lambda size: ROOT), False)
    for _ in range(60):
        engine.act()
        if draw.random() < 0.2:
            continue
        feed.on_live_batch(len(engine.batches) - 1, engine.batches[-1])
        truth = engine.expected()
        assert all(count[0] <= truth.get(name, (0, 0))[0] for name, count in feed.block_counts().items())
