"""BlockPool next to a twin that keeps one dictionary entry a cached block, under random operations.

The twin knows no tree, no runs, no lists: an entry's age is a number, eviction sorts by it, one block at a time, after
it has weighed the tenants (an order that depends on nodes would need cuts here). Both execute the same operations;
after each, every observable is compared, and the recorded copies are executed on a toy memory whose blocks hold the
name of the prefix that was computed into them: a lease that hands out wrong KV is seen at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memserve.base.config import PoolConfig
from memserve.base.types import Tier, isolation, tenant_of
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import Lease

BLOCK = 2
Prefix = tuple[str, tuple[int, ...]]


@dataclass
class Entry:
    tier: Tier
    block: int | None  # HBM id; the twin does not care which DRAM block it is
    age: int
    pins: int = 0


@dataclass
class Twin:
    hbm_total: int
    dram_total: int
    refs: dict[int, int] = field(default_factory=dict)
    entries: dict[Prefix, Entry] = field(default_factory=dict)
    swapped: int = 0
    clock: int = 0
    entered: int = 0
    #: tenant -> ``entered`` at its last use, the longest ago first
    used: dict[str, int] = field(default_factory=dict)

    def prefixes(self, tenant: str, tokens: list[int]) -> list[Prefix]:
        return [(tenant, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def matched(self, tenant: str, tokens: list[int]) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(tenant, tokens):
            if prefix not in self.entries:
                break
            found.append(prefix)
        return found

    def hbm_free(self) -> int:
        return self.hbm_total - len(self.refs)

    def dram_free(self) -> int:
        return self.dram_total - self.swapped - sum(e.tier == Tier.DRAM for e in self.entries.values())

    def evictable(self, tier: Tier) -> list[Prefix]:
        found = [p for p, e in self.entries.items() if e.tier == tier and not e.pins]
        return sorted(found, key=lambda p: self.entries[p].age)

    def next_evicted(self, tier: Tier) -> Prefix:
        """The oldest of the tenant with the heaviest blocks, twice as much for each turnover since its last use."""
        total = self.hbm_total if tier == Tier.HBM else self.dram_total
        held = Counter(tenant_of(isolation) for (isolation, _), e in self.entries.items() if e.tier == tier)
        found = self.evictable(tier)
        tenants = {tenant_of(isolation) for isolation, _ in found}
        in_order = [tenant for tenant in self.used if tenant in tenants]
        heaviest = max(in_order, key=lambda tenant: held[tenant] << (self.entered - self.used[tenant]) // total)
        return next(prefix for prefix in found if tenant_of(prefix[0]) == heaviest)

    def use(self, isolation: str) -> None:
        tenant = tenant_of(isolation)
        self.used.pop(tenant, None)
        self.used[tenant] = self.entered

    def forget_gone(self) -> None:
        here = {tenant_of(isolation) for isolation, _ in self.entries}
        self.used = {tenant: at for tenant, at in self.used.items() if tenant in here}

    def sole(self) -> int:
        return sum(self.refs[self.entries[p].block] == 1 for p in self.evictable(Tier.HBM))

    def available(self) -> int:
        return self.hbm_free() + self.sole()

    def drop_ref(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]

    def pin(self, path: list[Prefix]) -> None:
        for prefix in path:
            self.entries[prefix].pins += 1

    def unpin(self, path: list[Prefix]) -> None:
        for prefix in reversed(path):
            entry = self.entries[prefix]
            entry.pins -= 1
            if not entry.pins:
                self.clock += 1
                entry.age = self.clock
        if path:
            self.use(path[0][0])

    def make_room(self, count: int) -> bool:
        if count > self.available():
            return False
        while self.hbm_free() < count:
            prefix = self.next_evicted(Tier.HBM)
            entry = self.entries[prefix]
            if self.dram_free() < 1 and self.evictable(Tier.DRAM):
                del self.entries[self.next_evicted(Tier.DRAM)]
            self.drop_ref(entry.block)
            if self.dram_free() < 1:
                del self.entries[prefix]
                continue
            self.clock += 1
            entry.tier, entry.block, entry.age = Tier.DRAM, None, self.clock
        return True

    def take(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks) and not set(blocks) & set(self.refs)
        self.refs.update(dict.fromkeys(blocks, 1))


@dataclass(eq=False)
class Seq:
    tenant: str
    tokens: list[int]
    blocks: list[int]
    lease: Lease
    pinned: list[Prefix]


class Rig:
    """The pool, its twin, and a memory of labels."""

    def __init__(self, hbm: int, dram: int, caching: bool) -> None:
        self.pool = BlockPool(PoolConfig(hbm, dram, caching), BLOCK, "m", event_capacity=10_000)
        self.twin = Twin(hbm, dram)
        self.caching = caching
        self.memory: dict[tuple[Tier, int], object] = {}
        self.seqs: list[Seq] = []
        self.swapped: list[tuple[list[int], list[object]]] = []
        self.known: dict[bytes, Tier] = {}  # what a follower of the events believes
        self.asked: set[Prefix] = set()

    def run_copies(self) -> None:
        for copy in self.pool.take_copies():
            moved = [self.memory[copy.src_tier, b] for b in copy.src]
            assert len(set(copy.dst)) == len(copy.dst)
            if copy.src_tier == copy.dst_tier:
                assert not set(copy.src) & set(copy.dst)
            for block, label in zip(copy.dst, moved, strict=True):
                self.memory[copy.dst_tier, block] = label

    def allocate(self, count: int) -> list[int] | None:
        promised = self.pool.available()
        blocks = self.pool.allocate(count)
        assert (blocks is not None) == self.twin.make_room(count) == (count <= promised)
        if blocks is not None:
            self.twin.take(blocks)
        return blocks

    def start(self, tenant: str, tokens: list[int], publish: bool) -> None:
        array = np.array(tokens, dtype=np.int32)
        path = self.twin.matched(tenant, tokens) if self.caching else []
        self.asked.add((tenant, tuple(tokens)))
        lease = self.pool.acquire(tenant, array)
        path = self.bring_up(path, lease)
        assert lease.tokens == len(lease.blocks) * BLOCK
        self.run_copies()
        fresh = self.allocate(len(tokens) // BLOCK - len(lease.blocks))
        self.run_copies()
        if fresh is None:
            self.finish(Seq(tenant, tokens, lease.blocks, lease, path), False)
            return
        for at, block in enumerate(fresh, start=len(lease.blocks)):
            self.memory[Tier.HBM, block] = (tenant, tuple(tokens[: (at + 1) * BLOCK]))
        seq = Seq(tenant, tokens, lease.blocks + fresh, lease, path)
        self.seqs.append(seq)
        if publish:
            self.publish(seq)

    def bring_up(self, path: list[Prefix], lease: Lease) -> list[Prefix]:
        """The twin's side of ``acquire``; returns the path that stays pinned."""
        twin = self.twin
        twin.pin(path)
        above = [p for p in path if twin.entries[p].tier == Tier.HBM]
        for prefix in above:
            twin.refs[twin.entries[prefix].block] += 1
        below = path[len(above) :]
        count = min(len(below), twin.available()) if below else 0
        assert twin.make_room(count)
        assert len(lease.blocks) == len(above) + count and lease.dram_tokens == count * BLOCK
        assert lease.blocks[: len(above)] == [twin.entries[p].block for p in above]
        brought = lease.blocks[len(above) :]
        twin.take(brought)
        for prefix, block in zip(below, brought, strict=False):
            twin.refs[block] += 1
            twin.entries[prefix].tier, twin.entries[prefix].block = Tier.HBM, block
        kept = path[: len(lease.blocks)]
        if len(kept) < len(path):
            twin.pin(kept)
            twin.unpin(path)
        return kept

    def publish(self, seq: Seq) -> None:
        twin, added = self.twin, 0
        array = np.array(seq.tokens, dtype=np.int32)
        path = twin.prefixes(seq.tenant, seq.tokens) if self.caching else []
        twin.forget_gone()
        if path and tenant_of(seq.tenant) not in twin.used:
            twin.use(seq.tenant)
        for prefix, block in zip(path, seq.blocks, strict=False):
            entry = twin.entries.get(prefix)
            twin.entered += entry is None
            if entry is None or entry.tier == Tier.DRAM:
                twin.entries[prefix] = Entry(Tier.HBM, block, 0, entry.pins if entry else 0)
                twin.refs[block] += 1
                added += 1
        assert self.pool.publish(seq.lease, seq.tenant, array, seq.blocks, written_by=0) == added
        if path:
            twin.pin(path)
            twin.unpin(seq.pinned)
            seq.pinned = path

    def finish(self, seq: Seq, release_first: bool) -> None:
        for step in (0, 1) if release_first else (1, 0):
            if step:
                self.pool.unpin(seq.lease)
                self.twin.unpin(seq.pinned)
            else:
                self.pool.release(seq.blocks)
                for block in seq.blocks:
                    self.twin.drop_ref(block)

    def fork(self, seq: Seq) -> None:
        self.pool.retain(seq.blocks)
        for block in seq.blocks:
            self.twin.refs[block] += 1
        self.seqs.append(Seq(seq.tenant, seq.tokens, list(seq.blocks), Lease(), []))

    def copy_on_write(self, seq: Seq, at: int) -> None:
        old = seq.blocks[at]
        assert self.pool.is_shared(old) == (self.twin.refs[old] > 1)
        fresh = self.pool.copy_block(old)
        assert (fresh is not None) == self.twin.make_room(1)
        if fresh is not None:
            self.twin.take([fresh])
            self.run_copies()
            self.pool.release([old])
            self.twin.drop_ref(old)
            seq.blocks[at] = fresh

    def swap_out(self, seq: Seq) -> None:
        labels = [self.memory[Tier.HBM, b] for b in seq.blocks]
        twin, count = self.twin, len(seq.blocks)
        fits = count <= twin.dram_free() + len(twin.evictable(Tier.DRAM))
        below = self.pool.swap_out(seq.blocks)
        assert (below is not None) == fits
        if below is None:
            return
        while twin.dram_free() < count:
            del twin.entries[twin.next_evicted(Tier.DRAM)]
        twin.swapped += count
        for block in seq.blocks:
            twin.drop_ref(block)
        self.seqs.remove(seq)
        self.finish(Seq(seq.tenant, [], [], seq.lease, seq.pinned), False)
        self.run_copies()
        self.swapped.append((below, labels))

    def swap_in(self, which: int) -> None:
        below, labels = self.swapped[which]
        above = self.pool.swap_in(below)
        assert (above is not None) == self.twin.make_room(len(below))
        if above is None:
            return
        del self.swapped[which]
        self.twin.take(above)
        self.twin.swapped -= len(below)
        self.run_copies()
        assert [self.memory[Tier.HBM, b] for b in above] == labels
        self.pool.release(above)
        for block in above:
            self.twin.drop_ref(block)

    def clear(self) -> None:
        gone = self.twin.evictable(Tier.HBM) + self.twin.evictable(Tier.DRAM)
        assert self.pool.clear_cache() == len(gone)
        for prefix in gone:
            entry = self.twin.entries.pop(prefix)
            if entry.block is not None:
                self.twin.drop_ref(entry.block)

    def compare(self) -> None:
        pool, twin = self.pool, self.twin
        self.run_copies()
        pool.check_invariants()
        assert pool.available() == twin.available()
        hbm, dram = (pool.report().by_tier[tier] for tier in (Tier.HBM, Tier.DRAM))
        assert (hbm.blocks_free, dram.blocks_free) == (twin.hbm_free(), twin.dram_free())
        for tier, report in ((Tier.HBM, hbm), (Tier.DRAM, dram)):
            entries = [e for e in twin.entries.values() if e.tier == tier]
            assert report.blocks_cached == len(entries)
            assert report.blocks_pinned == sum(e.pins > 0 for e in entries)
            assert report.blocks_used == report.blocks_total - report.blocks_free
        assert (hbm.blocks_evictable, dram.blocks_evictable) == (twin.sole(), len(twin.evictable(Tier.DRAM)))
        for tenant, tokens in sorted(self.asked):
            want = len(twin.matched(tenant, list(tokens))) * BLOCK
            assert pool.match(tenant, np.array(tokens, dtype=np.int32)) == want
        for seq in self.seqs:
            for at, block in enumerate(seq.blocks):
                assert self.memory[Tier.HBM, block] == (seq.tenant, tuple(seq.tokens[: (at + 1) * BLOCK]))
        self.follow_events()

    def follow_events(self) -> None:
        for event in self.pool.take_events():
            for identity in event.identities:
                if event.kind == "evicted":
                    assert self.known.pop(identity) == event.tier
                else:
                    assert (identity in self.known) == (event.kind == "moved")
                    self.known[identity] = event.tier
        tiers = sorted(self.known.values())
        assert tiers == sorted(e.tier for e in self.twin.entries.values())


ISOLATIONS = ["a", "b", isolation("b", "salt"), "a", "c", isolation("b", "sugar")]
KINDS = ["start", "start", "start", "grow", "finish", "finish", "fork", "cow", "out", "in", "drop", "clear"]
OPS = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 1000),
    st.lists(st.integers(0, 1), min_size=2, max_size=12),
    st.booleans(),
)


def apply(rig: Rig, op: str, pick: int, tokens: list[int], flag: bool) -> None:
    seqs = rig.seqs
    if op == "start":
        rig.start(ISOLATIONS[pick % len(ISOLATIONS)], tokens[: len(tokens) // BLOCK * BLOCK], flag)
    elif op == "clear":
        rig.clear()
    elif op == "in" and rig.swapped:
        rig.swap_in(pick % len(rig.swapped))
    elif op == "drop" and rig.swapped:
        below, _ = rig.swapped.pop(pick % len(rig.swapped))
        rig.pool.release_dram(below)
        rig.twin.swapped -= len(below)
    elif seqs and op in ("finish", "fork", "cow", "out", "grow"):
        seq = seqs[pick % len(seqs)]
        if op == "finish":
            seqs.remove(seq)
            rig.finish(seq, flag)
        elif op == "fork":
            rig.fork(seq)
        elif op == "cow":
            rig.copy_on_write(seq, pick % len(seq.blocks))
        elif op == "out":
            rig.swap_out(seq)
        elif (fresh := rig.allocate(1)) is not None:
            rig.run_copies()
            seq.tokens = seq.tokens + tokens[:BLOCK]
            seq.blocks += fresh
            rig.memory[Tier.HBM, fresh[0]] = (seq.tenant, tuple(seq.tokens))
            rig.asked.add((seq.tenant, tuple(seq.tokens)))
            if flag:
                rig.publish(seq)


@pytest.mark.parametrize("caching", [True, False])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hbm=st.integers(1, 14), dram=st.integers(0, 10), ops=st.lists(OPS, max_size=40))
def test_pool_equals_its_twin(caching: bool, hbm: int, dram: int, ops: list) -> None:
    rig = Rig(hbm, dram, caching)
    for op in ops:
        apply(rig, *op)
        rig.compare()
    drain(rig)


@pytest.mark.parametrize("seed", range(30))
def test_pool_equals_its_twin_over_a_long_run(seed: int) -> None:
    random = Random(seed)
    rig = Rig(random.randint(1, 20), random.choice([0, 3, 6, 12, 20]), True)
    for _ in range(150):
        kind = random.choice(KINDS if random.random() < 0.1 else KINDS[:-1])  # a cleared cache has no history
        tokens = [random.randrange(2) for _ in range(random.randint(2, 14))]
        apply(rig, kind, random.randrange(1000), tokens, random.random() < 0.7)
        rig.compare()
    drain(rig)


def drain(rig: Rig) -> None:
    """Each holder gives back what it holds: then every block is free."""
    for seq in rig.seqs:
        rig.finish(seq, True)
    for below, _ in rig.swapped:
        rig.pool.release_dram(below)
        rig.twin.swapped -= len(below)
    rig.seqs.clear()
    rig.swapped.clear()
    rig.clear()
    rig.compare()
    assert (
        rig.pool.report().by_tier[Tier.HBM].blocks_free == rig.twin.hbm_total
        and not rig.twin.entries
        and not rig.twin.refs
    )
