"""A pool with snapshots beside a list of all that was put in: what a match may say, and whose memory is whose."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memserve.base.config import PoolConfig
from memserve.base.states import StatePages
from memserve.base.types import Tier
from memserve.kv.pool import BlockPool

BLOCK = 4
TENANTS = ("", "other")


class SnapshotLife(RuleBasedStateMachine):
    """Blocks and snapshots come, are used, pinned and evicted."""

    @initialize(
        hbm=st.integers(3, 20),
        dram=st.sampled_from([0, 0, 2, 5, 12]),
        pages=st.sampled_from([(10, 1), (10, 3), (10, 1, 4)]),
    )
    def begin(self, hbm, dram, pages):
        self.pages = StatePages(*pages)
        self.hbm, self.dram = hbm, dram if self.pages.whole_blocks else 0
        self.pool = BlockPool(PoolConfig(hbm, self.dram, states=self.pages), BLOCK, "test")
        self.below = []
        self.snapshots = []  # (tenant, tokens, snapshot): all that were ever cached
        self.leases, self.running, self.blocks = [], [], []

    def _kv_tokens(self, tenant, tokens):
        return self.pool.match_kv(tenant, tokens)

    def _brute_match(self, tenant, tokens):
        """Every position from the longest down: KV to there, and a snapshot exactly there."""
        have = self._kv_tokens(tenant, tokens)
        for end in range(len(tokens) // BLOCK * BLOCK, 0, -BLOCK):
            for owner, prefix, snapshot in self.snapshots:
                is_there = snapshot.is_cached and owner == tenant and list(prefix) == list(tokens[:end])
                if end <= have and is_there:
                    return end
        return 0

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.lists(st.integers(0, 1), max_size=20), share=st.booleans())
    def publish(self, tenant, tokens, share):
        tokens = np.array(tokens, np.int32)
        lease = self.pool.acquire(tenant, tokens)
        wanted = len(tokens) // BLOCK - len(lease.blocks)
        fresh = self.pool.allocate(wanted)
        blocks = lease.blocks + (fresh or [])
        if fresh is not None:
            whole = tokens[: len(blocks) * BLOCK]
            self.pool.publish(lease, tenant, whole, blocks, written_by=0)
            if share and len(whole):
                snapshot = self.pool.allocate_snapshot(len(whole))
                if snapshot is not None and self.pool.keep_snapshot(tenant, whole, snapshot):
                    self.snapshots.append((tenant, whole, snapshot))
                elif snapshot is not None:
                    self.running.append(snapshot)
        self.pool.unpin(lease)
        self.pool.release(blocks)

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.lists(st.integers(0, 1), max_size=20))
    def match(self, tenant, tokens):
        tokens = np.array(tokens, np.int32)
        expected = self._brute_match(tenant, tokens)
        assert self.pool.match(tenant, tokens) == expected
        above, below = self.pool.match_blocks(tenant, tokens)
        assert above + below == expected // BLOCK
        room = self.pool.available() - above
        lease = self.pool.acquire(tenant, tokens)
        # what lies in DRAM is cut where HBM has no room for it, at a shorter snapshot
        assert lease.tokens == expected if below <= room else lease.tokens < expected
        assert (lease.snapshot is not None) == (lease.tokens > 0)
        assert lease.snapshot is None or (lease.snapshot.tokens == lease.tokens and lease.snapshot.pages)
        self.leases.append(lease)

    @rule()
    def make_plan(self):
        self.pool.take_copies()

    @rule(count=st.integers(0, 6))
    def allocate_below(self, count):
        before = self.pool.available(Tier.DRAM)
        blocks = self.pool.allocate_dram_ids(count)
        assert (blocks is not None) == (count <= before)
        self.below += blocks or []

    @rule(tier=st.sampled_from([Tier.HBM, Tier.DRAM]))
    def squeeze(self, tier):
        """All that can be had of a tier is wanted, for a moment."""
        if tier is Tier.HBM:
            blocks = self.pool.allocate(self.pool.available())
            assert blocks is not None
            self.pool.release(blocks)
        else:
            blocks = self.pool.allocate_dram_ids(self.pool.available(Tier.DRAM))
            assert blocks is not None
            self.pool.release_dram(blocks)

    @rule()
    def release_below(self):
        self.pool.release_dram(self.below)
        self.below = []

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9), early=st.booleans())
    def release(self, which, early):
        lease = self.leases.pop(which % len(self.leases))
        if early:
            self.pool.snapshots.end_lease(lease)
        self.pool.unpin(lease)
        self.pool.release(lease.blocks)

    @rule(
        tenant=st.sampled_from(TENANTS),
        tokens=st.lists(st.integers(0, 1), max_size=20),
        priority=st.sampled_from([-1.0, 0.0, 1.0]),
        name=st.sampled_from("abc"),
    )
    def retain(self, tenant, tokens, priority, name):
        tokens = np.array(tokens, np.int32)
        expected = self._brute_match(tenant, tokens)
        kept = self.pool.retained.retain_prefix(name, tenant, tokens, 100, priority)
        assert kept == (expected if priority >= 0 else 0) == self.pool.retained.retained_tokens(name)

    @rule(name=st.sampled_from("abc"))
    def end_retention(self, name):
        self.pool.retained.end_retention(name)

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        before = self.pool.available()
        blocks = self.pool.allocate(count)
        assert (blocks is not None) == (count <= before)
        self.blocks += blocks or []

    @rule()
    def release_blocks(self):
        self.pool.release(self.blocks)
        self.blocks = []

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.lists(st.integers(0, 1), max_size=20))
    def delete(self, tenant, tokens):
        self.pool.delete(tenant, np.array(tokens, np.int32))

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.lists(st.integers(0, 1), max_size=20))
    def distrust(self, tenant, tokens):
        tokens = np.array(tokens, np.int32)
        self.pool.forget_snapshots(tenant, tokens)
        assert self.pool.match(tenant, tokens) == 0

    @precondition(lambda self: self.pages.whole_blocks)
    @rule(tenant=st.sampled_from(TENANTS), tokens=st.lists(st.integers(0, 1), max_size=20))
    def lend(self, tenant, tokens):
        """To a peer: its blocks keep their bytes until they are given back, whatever becomes of the snapshot."""
        tokens = np.array(tokens, np.int32)
        expected = self._brute_match(tenant, tokens)
        loan = self.pool.lend_state(tenant, tokens, self.pages.pages_each)
        assert loan.tokens == expected if loan is not None else not expected or self.dram
        assert self.pool.lend_state(tenant, tokens, self.pages.pages_each + 1) is None
        if loan is not None:
            assert len(loan.blocks) == self.pages.pages_each
            self.leases.append(loan)

    @precondition(lambda self: self.pages.whole_blocks)
    @rule(tenant=st.sampled_from(TENANTS), tokens=st.lists(st.integers(0, 1), min_size=BLOCK, max_size=20))
    def receive(self, tenant, tokens):
        """From a peer: it is cached where its KV is, and there is none."""
        tokens = np.array(tokens[: len(tokens) // BLOCK * BLOCK], np.int32)
        blocks = self.pool.allocate(self.pages.pages_each)
        if blocks is None:
            return
        has_kv = self.pool.match_kv_blocks(tenant, tokens)[0] * BLOCK == len(tokens)
        is_new = has_kv and len(tokens) != self._brute_match(tenant, tokens)
        assert self.pool.insert_state(tenant, tokens, blocks) == is_new
        self.pool.release(blocks)
        if is_new:
            lease = self.pool.acquire(tenant, tokens)
            assert lease.snapshot.pages == blocks
            self.snapshots.append((tenant, tokens, lease.snapshot))
            self.leases.append(lease)

    @precondition(lambda self: self.pages.whole_blocks)
    @rule(tokens=st.integers(1, 20), takes=st.booleans())
    def adopt(self, tokens, takes):
        """With a request: anywhere, and nowhere in the cache."""
        blocks = self.pool.allocate(self.pages.pages_each)
        if blocks is None:
            return
        snapshot = self.pool.adopt_snapshot(tokens, blocks)
        if takes:
            self.running.append(snapshot)
        else:
            self.pool.snapshots.forget(snapshot)

    @rule()
    def clear(self):
        self.pool.clear_cache()
        pinned = {id(lease.snapshot) for lease in self.leases if lease.snapshot and lease.snapshot.pages}
        assert len(self.pool.snapshots) == len(pinned)

    @rule()
    def fail(self):
        """A step has failed."""
        self.pool.clear_cache()
        self.pool.snapshots.forget_all(with_pinned=True)
        assert not len(self.pool.snapshots)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        for tenant, prefix, snapshot in self.snapshots:
            assert not snapshot.is_cached or self._kv_tokens(tenant, prefix) == len(prefix)
        live = {id(s) for s in self.running if s.pages} | {id(s) for *_, s in self.snapshots if s.pages}
        assert len(live) == len(self.pool.snapshots)
        held = {*self.blocks, *(block for lease in self.leases for block in lease.blocks)}
        pinned = {id(lease.snapshot) for lease in self.leases if lease.snapshot and lease.snapshot.pages}
        assert self.pool.available() >= self.hbm - len(held) - len(pinned) * self.pages.pages_each

    def teardown(self):
        if hasattr(self, "pool"):
            for lease in self.leases:
                self.pool.unpin(lease)
                self.pool.release(lease.blocks)
            self.pool.release(self.blocks)
            self.pool.release_dram(self.below)
            assert (self.pool.available(), self.pool.available(Tier.DRAM)) == (self.hbm, self.dram)
            self.pool.clear_cache()
            assert all(tier.blocks_free == tier.blocks_total for tier in self.pool.report().tiers)


SnapshotLife.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSnapshotLife = SnapshotLife.TestCase
