"""Retained prefixes next to a twin of one dictionary entry a block, under random operations: what leaves, and in which
order, on both tiers. What hangs at blocks beside KV: ``test_snapshots.py``, and ``unit/kv/test_retention.py``.

The twin knows no tree, no heap, no list: it looks through all blocks and all retained prefixes for each block that must
leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from memserve.base.config import PoolConfig
from memserve.base.types import Tier
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import Lease

BLOCK = 2
Path = tuple[int, ...]


@dataclass
class Block:
    tier: Tier
    ages: dict[Tier, int]
    pins: int = 0


@dataclass
class Retained:
    path: Path
    priority: float
    until_ns: int
    made: int
    tenant: str | None
    tiers: set[Tier] = field(default_factory=lambda: {Tier.HBM, Tier.DRAM})

    @property
    def place(self) -> tuple[float, int, int]:
        return self.priority, self.until_ns, self.made


def whole(tokens: list[int]) -> list[Path]:
    return [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


class PlainRetention:
    """All blocks and all names, looked through each time."""

    def __init__(self, hbm: int, dram: int) -> None:
        self.totals = {Tier.HBM: hbm, Tier.DRAM: dram}
        self.blocks: dict[Path, Block] = {}
        self.names: dict[str, Retained] = {}
        self.taken = {Tier.HBM: 0, Tier.DRAM: 0}  # blocks of callers
        self.clock = 0
        self.made = 0

    def free(self, tier: Tier) -> int:
        cached = sum(block.tier == tier for block in self.blocks.values())
        return self.totals[tier] - cached - self.taken[tier]

    def is_held(self, path: Path, tier: Tier) -> bool:
        return any(tier in r.tiers and r.path[: len(path)] == path for r in self.names.values())

    def loose(self, tier: Tier) -> list[Path]:
        """Neither pinned nor held, in the order in which they leave."""
        found = [p for p, b in self.blocks.items() if b.tier == tier and not b.pins and not self.is_held(p, tier)]
        return sorted(found, key=lambda p: (self.blocks[p].ages[tier], -len(p)))

    def touch(self, paths: list[Path]) -> None:
        for path in reversed(paths):
            self.clock += 1
            self.blocks[path].ages = {Tier.HBM: self.clock, Tier.DRAM: self.clock}

    def lowest(self, tier: Tier) -> Retained | None:
        there = [r for r in self.names.values() if (min(r.tiers) == tier)]
        if not there and tier == Tier.DRAM:
            there = [r for r in self.names.values() if len(r.tiers) == 2]
        return min(there, key=lambda r: r.place, default=None)

    def end(self, retained: Retained) -> None:
        self.names = {name: r for name, r in self.names.items() if r is not retained}

    def end_lost(self) -> None:
        for retained in list(self.names.values()):
            if retained.path not in self.blocks:
                self.end(retained)

    def give_up(self, tier: Tier) -> None:
        lowest = self.lowest(tier)
        assert lowest is not None, "counted as evictable, and nothing can be given up"
        if tier == Tier.HBM and self.totals[Tier.DRAM]:
            wanted = sum(self.blocks[p].tier == Tier.HBM for p in whole(list(lowest.path)))
            while True:
                below = [r for r in self.names.values() if r.tiers == {Tier.DRAM}]
                first = min(below, key=lambda r: r.place, default=None)
                if first is None or first.place[:2] >= lowest.place[:2]:
                    break
                if self.free(Tier.DRAM) + len(self.loose(Tier.DRAM)) >= wanted:
                    break
                self.end(first)
        lowest.tiers.discard(tier)
        if not lowest.tiers or (tier == Tier.HBM and not self.totals[Tier.DRAM]):
            self.end(lowest)

    def make_room(self, count: int) -> None:
        while self.free(Tier.HBM) < count:
            loose = self.loose(Tier.HBM)
            if loose:
                self.move_down(loose[0])
            else:
                self.give_up(Tier.HBM)

    def make_room_below(self, count: int) -> None:
        while self.free(Tier.DRAM) < count:
            if loose := self.loose(Tier.DRAM):
                del self.blocks[loose[0]]
                self.end_lost()
            else:
                self.give_up(Tier.DRAM)

    def move_down(self, path: Path) -> None:
        if not self.totals[Tier.DRAM]:
            del self.blocks[path]
        elif self.free(Tier.DRAM) or self.loose(Tier.DRAM):
            if not self.free(Tier.DRAM):
                del self.blocks[self.loose(Tier.DRAM)[0]]
                self.end_lost()
            self.clock += 1
            self.blocks[path].tier, self.blocks[path].ages[Tier.DRAM] = Tier.DRAM, self.clock
        elif self.is_held(path, Tier.DRAM):
            for retained in list(self.names.values()):
                if retained.path[: len(path)] == path:
                    self.end(retained)
        else:
            del self.blocks[path]
        self.end_lost()

    def retain(self, name: str, path: Path, priority: float, until_ns: int, tenant: str | None, tokens_max: int) -> int:
        self.names.pop(name, None)
        self.made += 1
        if not path:
            return 0
        self.names[name] = Retained(path, priority, until_ns, self.made, tenant)
        while True:
            tokens: dict[str, int] = {}
            for retained in self.names.values():
                if retained.tenant is not None:
                    tokens[retained.tenant] = tokens.get(retained.tenant, 0) + len(retained.path)
            if sum(tokens.values()) <= tokens_max:
                return len(path) if name in self.names else 0
            most = max(tokens, key=lambda key: (tokens[key], key == tenant, key))
            self.end(min((r for r in self.names.values() if r.tenant == most), key=lambda r: r.place[:2]))

    def release(self, path: Path) -> int:
        """What only it leads to, with the one path behind it; names that retain that end, unless they part."""
        named = [r for r in self.names.values() if path and r.path[: len(path)] == path]
        longest = max((r.path for r in named), key=len, default=())
        if all(longest[: len(r.path)] == r.path for r in named):
            for retained in named:
                self.end(retained)
        while path:
            longer = [p for p in self.blocks if len(p) == len(path) + BLOCK and p[: len(path)] == path]
            if len(longer) != 1:
                break
            path = longer[0]
        if not path or longer:
            return 0
        freed = []
        for end in range(len(path), 0, -BLOCK):
            prefix = path[:end]
            siblings = [p for p in self.blocks if len(p) == end + BLOCK and p[:end] == prefix]
            is_kept = any(self.is_held(prefix, tier) for tier in (Tier.HBM, Tier.DRAM))
            if self.blocks[prefix].pins or is_kept or len(siblings) > 1:
                break
            freed.append(prefix)
        self.clock += 1
        for prefix in freed:  # those that were released last go first
            self.blocks[prefix].ages = {Tier.HBM: -self.clock, Tier.DRAM: -self.clock}
        return len(freed)


class Rig:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.pool = BlockPool(PoolConfig(random.randint(6, 20), random.choice([0, 0, 4, 12])), BLOCK, "m")
        self.plain = PlainRetention(self.pool.config.hbm_blocks, self.pool.config.dram_blocks)
        self.prompts = [[random.randint(0, 1) for _ in range(6 * BLOCK)] for _ in range(5)]
        self.leases: list[tuple[Lease, list[Path]]] = []
        self.taken: list[list[int]] = []
        self.below: list[int] = []
        self.now = 0

    def matched(self, tokens: list[int]) -> list[Path]:
        found = []
        for path in whole(tokens):
            if path not in self.plain.blocks:
                break
            found.append(path)
        return found

    def available(self, tier: Tier = Tier.HBM) -> int:
        return self.plain.free(tier) + sum(b.tier == tier and not b.pins for b in self.plain.blocks.values())

    def allocate(self, count: int) -> list[int] | None:
        blocks = self.pool.allocate(count)
        assert (blocks is not None) == (count <= self.available())
        if blocks is not None:
            self.plain.make_room(count)
            self.plain.taken[Tier.HBM] += count
        return blocks

    def publish(self, tokens: list[int]) -> None:
        """A sequence begins, and ends at once."""
        path = self.matched(tokens)
        in_hbm = sum(self.plain.blocks[p].tier == Tier.HBM for p in path)
        for prefix in path:
            self.plain.blocks[prefix].pins += 1
        lease = self.pool.acquire("", np.array(tokens, np.int32))
        below = min(len(path) - in_hbm, self.available())
        self.plain.make_room(below)
        for prefix in path[in_hbm : in_hbm + below]:
            self.plain.blocks[prefix].tier = Tier.HBM
        assert len(lease.blocks) == in_hbm + below
        kept = path[: in_hbm + below]
        for prefix in path:
            self.plain.blocks[prefix].pins -= prefix not in kept
        self.plain.touch([prefix for prefix in path if prefix not in kept and not self.plain.blocks[prefix].pins])
        fresh = self.allocate(len(whole(tokens)) - len(kept))
        if fresh is not None:
            self.pool.publish(lease, "", np.array(tokens, np.int32), [*lease.blocks, *fresh], written_by=0)
            for prefix in whole(tokens)[len(kept) :]:
                block = self.plain.blocks.setdefault(prefix, Block(Tier.HBM, {}))
                block.tier = Tier.HBM
                block.pins += 1
            self.plain.taken[Tier.HBM] -= len(fresh)
            kept = whole(tokens)
        self.pool.release([*lease.blocks, *(fresh or [])])
        if self.random.random() < 0.2 and len(self.leases) < 2:
            self.leases.append((lease, kept))
        else:
            self.unpin(lease, kept)

    def unpin(self, lease: Lease, path: list[Path]) -> None:
        self.pool.unpin(lease)
        for prefix in path:
            self.plain.blocks[prefix].pins -= 1
        self.plain.touch([prefix for prefix in path if not self.plain.blocks[prefix].pins])

    def retain(self, tokens: list[int]) -> None:
        name, tenant = f"h{self.random.randint(0, 4)}", self.random.choice([None, "a", "b"])
        priority, until_ns = self.random.choice([0.0, 0.5, 1.0, 3.0]), self.now + self.random.randint(1, 40)
        path = self.matched(tokens)
        tokens_max = self.pool.retained.tokens_max
        wanted = self.plain.retain(name, path[-1] if path else (), priority, until_ns, tenant, tokens_max)
        said = self.pool.retained.retain_prefix(name, "", np.array(tokens, np.int32), until_ns, priority, tenant=tenant)
        assert said == wanted

    def step(self) -> None:
        random, retained = self.random, self.pool.retained
        tokens = random.choice(self.prompts)[: random.choice([3, 7, 12])]
        op = random.choice("pppprrrueaaffxdbg")
        self.now += 1
        if op == "p":
            self.publish(tokens)
        elif op == "r":
            self.retain(tokens)
        elif op == "u" and self.leases:
            self.unpin(*self.leases.pop())
        elif op == "e":
            name = f"h{random.randint(0, 4)}"
            retained.end_retention(name)
            self.plain.names.pop(name, None)
        elif op == "a":
            blocks = self.allocate(random.randint(1, 5))
            self.taken += [blocks] if blocks else []
        elif op == "f" and self.taken:
            blocks = self.taken.pop()
            self.pool.release(blocks)
            self.plain.taken[Tier.HBM] -= len(blocks)
        elif op == "b":
            count = random.randint(1, 3)
            below = self.pool.allocate_dram_ids(count)
            assert (below is not None) == (count <= self.available(Tier.DRAM))
            if below is not None:
                self.plain.make_room_below(count)
                self.plain.taken[Tier.DRAM] += count
                self.below += below.tolist()
        elif op == "g":
            self.pool.release_dram(self.below)
            self.plain.taken[Tier.DRAM], self.below = 0, []
        elif op == "x":
            retained.expire_retained(self.now)
            self.plain.names = {name: r for name, r in self.plain.names.items() if r.until_ns > self.now}
        elif op == "d":
            path = self.matched(tokens)
            assert retained.release_prefix("", np.array(tokens, np.int32)) == self.plain.release(
                path[-1] if path else ()
            )

    def compare(self) -> None:
        pool, plain = self.pool, self.plain
        pool.take_copies()
        pool.check_invariants()
        for prompt in self.prompts:
            path = self.matched(prompt)
            hbm, dram = pool.match_kv_blocks("", np.array(prompt, np.int32))
            assert hbm == sum(plain.blocks[p].tier == Tier.HBM for p in path)
            assert hbm + dram == len(path)
        for name in range(5):
            held = plain.names.get(f"h{name}")
            assert pool.retained.retained_tokens(f"h{name}") == (len(held.path) if held else 0)
        assert pool.available() == self.available()
        assert pool.retained.next_deadline_ns == min((r.until_ns for r in plain.names.values()), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_retained_prefixes_leave_as_a_plain_list_says(seed: int) -> None:
    rig = Rig(Random(seed))
    for _ in range(250):
        rig.step()
        rig.compare()
