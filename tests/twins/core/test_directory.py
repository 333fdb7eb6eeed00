"""The global directory against dicts of Counters: random streams of events, every observable compared after each."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve._core import PrefixDirectory, block_identities
from memserve.base.types import Tier

KEY, NAME = bytes(range(16)), b"n" * 16
BLOCK = 4
HBM, DRAM = int(Tier.HBM), int(Tier.DRAM)


def split(identities: bytes) -> list[bytes]:
    return [identities[i : i + 16] for i in range(0, len(identities), 16)]


class Twin:
    """What the directory promises, in the simplest words."""

    def __init__(self) -> None:
        self.real: dict[tuple[int, bytes], Counter[int]] = {}
        self.expires: dict[tuple[int, bytes], int] = {}

    def store(self, holder: int, tier: int, identities: bytes) -> None:
        for block in split(identities):
            self.expires.pop((holder, block), None)
            self.real.setdefault((holder, block), Counter())[tier] += 1

    def move(self, holder: int, tier: int, identities: bytes) -> int:
        unknown = 0
        for block in split(identities):
            self.expires.pop((holder, block), None)
            counts = self.real.setdefault((holder, block), Counter())
            if counts[1 - tier]:
                counts[1 - tier] -= 1
                counts[tier] += 1
            else:
                unknown += 1
                counts[tier] = max(counts[tier], 1)
        return unknown

    def evict(self, holder: int, identities: bytes, tier: int | None = None) -> int:
        unknown = 0
        for block in split(identities):
            counts = self.real.get((holder, block), Counter())
            place = tier if tier is not None else DRAM if counts[DRAM] else HBM
            if not counts[place]:
                unknown += 1
                continue
            counts[place] -= 1
            if not counts.total():
                del self.real[holder, block]
        return unknown

    def clear(self, holder: int) -> None:
        self.real = {at: counts for at, counts in self.real.items() if at[0] != holder}
        self.expires = {at: expires for at, expires in self.expires.items() if at[0] != holder}

    def speculate(self, holder: int, identities: bytes, expires_ns: int) -> None:
        for block in split(identities):
            if (holder, block) not in self.real:
                self.expires[holder, block] = max(expires_ns, self.expires.get((holder, block), expires_ns))

    def expire(self, now_ns: int) -> int:
        due = [at for at, expires in self.expires.items() if expires <= now_ns]
        for at in due:
            del self.expires[at]
        return len(due)

    def holders(self) -> list[int]:
        return sorted({holder for holder, _ in [*self.real, *self.expires]})

    def match(self, identities: bytes) -> list[tuple[int, int, int]]:
        found = []
        for holder in self.holders():
            places = []
            for block in split(identities):
                if (holder, block) not in self.real and (holder, block) not in self.expires:
                    break
                counts = self.real.get((holder, block), Counter({HBM: 1}))
                places.append(HBM if counts[HBM] else DRAM)
            if places:
                found.append((holder, len(places), places.count(DRAM)))
        return found

    def dump(self, holder: int) -> list[tuple[bytes, int, int]]:
        real = [(block, counts[HBM], counts[DRAM]) for (who, block), counts in self.real.items() if who == holder]
        return sorted([*real, *((block, 0, 0) for who, block in self.expires if who == holder)])


def prompts(count: int, blocks: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts that share beginnings of several lengths."""
    random, made = Random(seed), [np.zeros(blocks * BLOCK, np.int32)]
    for i in range(1, count):
        tokens = made[random.randrange(i)].copy()
        tokens[random.randrange(blocks) * BLOCK :] = i
        made.append(tokens)
    return made


def compare(directory: PrefixDirectory, twin: Twin, paths: list[bytes], holders: list[int]) -> None:
    directory.check_invariants()
    assert directory.holders() == twin.holders()
    assert directory.entries == len({block for _, block in [*twin.real, *twin.expires]})
    assert directory.next_expiry_ns == min(twin.expires.values(), default=None)
    for holder in holders:
        dumped = twin.dump(holder)
        assert directory.dump(holder) == dumped
        speculative = sum(hbm + dram == 0 for _, hbm, dram in dumped)
        assert (directory.blocks(holder), directory.speculative_blocks(holder)) == (
            len(dumped) - speculative,
            speculative,
        )
    for path in paths:
        want = twin.match(path)
        assert directory.match(path) == want
        assert directory.match_array(path).tolist() == [list(row) for row in want]
        columns, found = directory.match_columns(path, 65_536)
        assert found == len(want) and columns.shape == (2, 65_536)
        assert [(k, *columns[:, k].tolist()) for k in columns[0].nonzero()[0].tolist()] == want


HOLDERS = [0, 1, 2, 3, 5, 8, 62, 63, 64, 65, 700, 65_535]  # beyond the inline list, around a word's end, the last one
PROMPTS = prompts(6, 5)
PATHS = [block_identities(KEY, NAME, tokens, BLOCK) for tokens in PROMPTS]
holders_ = st.sampled_from(HOLDERS)
runs = st.tuples(st.sampled_from(PATHS), st.integers(0, 5), st.integers(0, 5)).map(
    lambda t: t[0][16 * min(t[1:]) : 16 * max(t[1:])]
)
tiers = st.sampled_from([HBM, DRAM])
operations = st.one_of(
    st.tuples(st.sampled_from(["store", "move"]), holders_, tiers, runs),
    st.tuples(st.just("store"), holders_, tiers, runs.map(lambda run: run + run)),
    st.tuples(st.just("evict"), holders_, runs, st.none() | tiers),
    st.tuples(st.just("speculate"), holders_, runs | runs.map(lambda run: run + run), st.integers(0, 30)),
    st.tuples(st.just("expire"), st.integers(0, 30)),
    st.tuples(st.just("clear"), holders_),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(operations, max_size=60))
def test_random_streams(story: list[tuple]) -> None:
    directory, twin = PrefixDirectory(), Twin()
    for name, *arguments in story:
        assert getattr(directory, name)(*arguments) == getattr(twin, name)(*arguments), (name, arguments)
    compare(directory, twin, PATHS, HOLDERS)


@pytest.mark.parametrize("seed", range(3))
def test_crowds_grow_and_shrink(seed: int) -> None:
    """Blocks held by hundreds: lists become bitsets and lists again, and nothing else changes."""
    random, directory, twin = Random(seed), PrefixDirectory(), Twin()
    holders, now = list(range(0, 400, 1 + seed)), 0
    for turn, crowding in enumerate([0.9, 0.9, 0.2, 0.9, 0.05]):
        for _ in range(400):
            now += 1
            path = random.choice(PATHS)
            first = random.randrange(5)
            run, holder = path[16 * first : 16 * random.randint(first, 5)], random.choice(holders)
            name, *arguments = (
                random.choice(
                    [
                        ("store", holder, random.choice([HBM, DRAM]), path),
                        ("speculate", holder, path, now + random.randrange(300)),
                        ("move", holder, random.choice([HBM, DRAM]), run),
                    ]
                )
                if random.random() < crowding
                else random.choice([("evict", holder, run), ("clear", holder), ("expire", now)])
            )
            assert getattr(directory, name)(*arguments) == getattr(twin, name)(*arguments), (turn, name)
        compare(directory, twin, PATHS, holders[:20])
    for holder in holders:
        directory.clear(holder)
        twin.clear(holder)
    compare(directory, twin, PATHS, holders[:20])
    assert directory.entries == 0


@given(st.integers(0, 5 * BLOCK + 3), st.sampled_from(PROMPTS))
@settings(max_examples=30, deadline=None)
def test_tokens_match_as_their_identities_do(length: int, prompt: np.ndarray) -> None:
    directory = PrefixDirectory()
    for holder, path in enumerate(PATHS):
        directory.store(holder, holder % 2, path)
    tokens = np.resize(prompt, length)
    want = directory.match(block_identities(KEY, NAME, tokens, BLOCK))
    assert directory.match_tokens(KEY, NAME, tokens, BLOCK) == want
    assert directory.match_tokens(KEY, NAME, tokens.tolist(), BLOCK) == want
    assert directory.match_tokens_array(KEY, NAME, tokens, BLOCK).tolist() == [list(row) for row in want]
    assert directory.match_tokens(KEY, b"m" * 16, tokens, BLOCK) == []


def test_match_with_holders_of_every_length_on_both_tiers() -> None:
    """More blocks than one batch of look-ahead, DRAM counts of many bits."""
    tokens = np.arange(300 * BLOCK, dtype=np.int32)
    path = block_identities(KEY, NAME, tokens, BLOCK)
    directory, twin, random = PrefixDirectory(), Twin(), Random(1)
    for holder in range(0, 130, 2):
        cuts = sorted([0, *(random.randint(0, 300) for _ in range(3))])
        for tier, (begin, end) in zip((DRAM, HBM, DRAM), pairwise(cuts), strict=True):
            for to in (directory, twin):
                to.store(holder, tier, path[16 * begin : 16 * end])
    compare(directory, twin, [path, path[16:], path[16 * 299 :], b""], [0, 2, 128])
    assert directory.match_tokens(KEY, NAME, tokens, BLOCK) == twin.match(path)


def test_speculative_entries() -> None:
    directory, (first, second, third) = PrefixDirectory(), PATHS[:3]
    directory.speculate(7, first, 100)
    assert directory.match(first) == [(7, 5, 0)]
    assert (directory.blocks(7), directory.speculative_blocks(7)) == (0, 5)
    directory.store(7, DRAM, first[:32])  # kept
    directory.speculate(7, first, 90)  # an earlier end changes nothing
    directory.speculate(7, first[32:48], 200)  # a later one does
    assert directory.next_expiry_ns == 100
    assert directory.evict(7, first[48:]) == 2  # an eviction tells nothing of a promise
    assert directory.expire(99) == 0
    assert directory.expire(100) == 2
    assert directory.match(first) == [(7, 3, 2)]
    assert directory.expire(1000) == 1
    assert (directory.match(first), directory.next_expiry_ns) == ([(7, 2, 2)], None)
    directory.speculate(7, second + third, 5)
    directory.clear(7)
    assert (directory.entries, directory.next_expiry_ns, directory.expire(10)) == (0, None, 0)
    directory.check_invariants()


def test_memory_is_used_again() -> None:
    """Rounds of other blocks need no more than the first; the entries are given back to the directory."""
    directory, sizes = PrefixDirectory(), []
    for turn in range(4):
        path = block_identities(KEY, NAME, np.full(5000 * BLOCK, turn, np.int32), BLOCK)
        for holder in range(8):
            directory.store(holder, HBM, path)
        sizes.append(directory.nbytes)
        for holder in range(8):
            assert directory.evict(holder, path) == 0
        assert (directory.entries, directory.holders()) == (0, [])
        directory.check_invariants()
    assert sizes[1:] == [sizes[0]] * 3


def test_bad_arguments_change_nothing() -> None:
    directory, path = PrefixDirectory(), PATHS[0]
    directory.store(1, HBM, path)
    wrong = [
        ("store", 1, 2, path), ("store", -1, HBM, path), ("store", 65_536, HBM, path), ("store", 1, HBM, path[1:]),
        ("evict", 1, path[:15]), ("evict", 1, path, 2), ("move", 1, -1, path), ("clear", -1), ("match", b"x"),
        ("speculate", 1, b"x", 0), ("blocks", 65_536), ("match_tokens", KEY, b"", [1], 1),
        ("match_tokens", b"", NAME, [1], 1), ("match_tokens", KEY, NAME, [1], 0),
    ]  # fmt: skip
    for name, *arguments in wrong:
        with pytest.raises(ValueError, match=r"holder|tier|identities|16 bytes|block_tokens"):
            getattr(directory, name)(*arguments)
    assert directory.dump(1) == sorted((block, 1, 0) for block in split(path))
    directory.check_invariants()
