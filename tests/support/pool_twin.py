"""A simple stand-in for ``BlockPool`` in tests of instances: same contract, dictionaries only, nothing fast.

It weighs no tenants, and its order of eviction is compared with nothing: that twin is in
``tests/twins/kv/test_pool.py``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from memserve.base.types import CopyBlocks, Tier
from memserve.kv.events import PoolReport, TierReport


@dataclass(eq=False)
class Node:
    key: tuple
    parent: Node | None
    tier: Tier
    block: int
    pins: int = 0
    used: int = 0
    children: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class TwinLease:
    blocks: list[int]
    tokens: int
    dram_tokens: int
    path: list[Node]


class NothingRetained:
    """What instances ask of retained prefixes, where there are none."""

    next_deadline_ns, tokens = None, 0

    def expire_retained(self, now_ns):
        """There are none."""

    def end_retention(self, handle):
        """As above."""

    def retained_tokens(self, handle):
        """As above."""
        return 0

    def prefixes_of(self, tenant):
        """As above."""
        return []

    def retain_prefix(self, *_, **__):
        """Nothing is."""
        return 0


class TwinPool:
    """Blocks and a prefix cache; LRU order is a counter, evictable blocks are found by looking at all."""

    def __init__(self, config, block_tokens, namespace=""):
        self.config, self.block_tokens = config, block_tokens
        self.refs = Counter()
        self.free = {Tier.HBM: list(range(config.hbm_blocks)), Tier.DRAM: list(range(config.dram_blocks))}
        self.swapped = set()
        self.nodes: dict[tuple, Node] = {}
        self.copies: list[CopyBlocks] = []
        self.clock = 0
        self.retained = NothingRetained()

    # -- prefix cache

    def _path(self, tenant, tokens):
        path, values = [], tuple(int(t) for t in tokens)
        if not self.config.caching:
            return path
        for end in range(self.block_tokens, len(values) + 1, self.block_tokens):
            node = self.nodes.get((tenant, values[:end]))
            if node is None:
                break
            path.append(node)
        return path

    def identities(self, tenant, tokens):
        ends = range(self.block_tokens, len(tokens) + 1, self.block_tokens)
        names = [f"{tenant} {[int(token) for token in tokens[:end]]}".encode() for end in ends]
        return b"".join(hashlib.blake2b(name, digest_size=16).digest() for name in names)

    def identity(self, tenant, tokens):
        return self.identities(tenant, tokens)[-16:]

    def match(self, tenant, tokens):
        return len(self._path(tenant, tokens)) * self.block_tokens

    def cached_continuation(self, tenant, tokens, count):
        """Any of those that follow."""
        known = tuple(int(t) for t in tokens)
        whole = len(known) // self.block_tokens * self.block_tokens
        if self.match(tenant, known) < whole:
            return []
        for name, values in self.nodes:
            if name == tenant and len(values) == whole + self.block_tokens and values[: len(known)] == known:
                return list(values[len(known) :][:count])
        return []

    def match_blocks(self, tenant, tokens):
        tiers = [node.tier for node in self._path(tenant, tokens)]
        return tiers.count(Tier.HBM), tiers.count(Tier.DRAM)

    def _pin(self, path):
        self.clock += 1
        for node in path:
            node.pins += 1
            node.used = self.clock

    def acquire(self, tenant, tokens):
        path, blocks, dram = self._path(tenant, tokens), [], 0
        self._pin(path)
        for place, node in enumerate(path):
            if node.tier is Tier.DRAM:
                got = self.allocate(1)
                if got is None:
                    for rest in path[place:]:
                        rest.pins -= 1
                    path = path[:place]
                    break
                self._copy(Tier.DRAM, Tier.HBM, node.block, got[0])
                self.free[Tier.DRAM].append(node.block)
                node.tier, node.block = Tier.HBM, got[0]
                dram += self.block_tokens
            self.refs[node.block] += 1
            blocks.append(node.block)
        return TwinLease(blocks, len(blocks) * self.block_tokens, dram, path)

    def publish(self, lease, tenant, tokens, blocks, *, written_by):
        assert len(tokens) == len(blocks) * self.block_tokens
        if not self.config.caching:
            return 0
        path, added, values, parent = [], 0, tuple(int(t) for t in tokens), None
        for place, block in enumerate(blocks):
            key = (tenant, values[: (place + 1) * self.block_tokens])
            node = self.nodes.get(key)
            if node is None:
                node = self.nodes[key] = Node(key, parent, Tier.HBM, block)
                if parent is not None:
                    parent.children.append(node)
                assert self.refs[block] > 0
                self.refs[block] += 1
                added += 1
            path.append(node)
            parent = node
        self._pin(path)
        for node in lease.path:
            node.pins -= 1
        lease.path = path
        return added

    def unpin(self, lease):
        for node in lease.path:
            node.pins -= 1
            assert node.pins >= 0
        lease.path = None  # a second unpin must fail

    def delete(self, tenant, tokens):
        path = self._path(tenant, tokens)
        if len(path) * self.block_tokens < len(tokens):
            return 0

        def below(node):
            return [node, *(other for child in node.children for other in below(child))]

        before = len(self.nodes)
        for node in [*reversed(below(path[-1])[1:]), *reversed(path)]:
            if not node.pins and not node.children:
                self._drop(node)
        return before - len(self.nodes)

    # -- eviction

    def _evictable(self):
        memo = {}

        def ok(node):
            if id(node) not in memo:
                memo[id(node)] = (
                    node.pins == 0
                    and (node.tier is Tier.DRAM or self.refs[node.block] == 1)
                    and all(ok(child) for child in node.children)
                )
            return memo[id(node)]

        return [node for node in self.nodes.values() if node.tier is Tier.HBM and ok(node)]

    def _drop(self, node):
        for child in list(node.children):
            self._drop(child)
        if node.parent is not None:
            node.parent.children.remove(node)
        del self.nodes[node.key]
        if node.tier is Tier.DRAM:
            self.free[Tier.DRAM].append(node.block)
        else:
            self.release([node.block])

    def _dram_room(self):
        if not self.free[Tier.DRAM]:
            old = [n for n in self.nodes.values() if n.tier is Tier.DRAM and not n.pins and not n.children]
            if old:
                self._drop(min(old, key=lambda n: n.used))
        return bool(self.free[Tier.DRAM])

    def _evict_one(self):
        leaves = [n for n in self._evictable() if all(c.tier is Tier.DRAM for c in n.children)]
        node = min(leaves, key=lambda n: n.used)
        if self._dram_room():
            home = self.free[Tier.DRAM].pop()
            self._copy(Tier.HBM, Tier.DRAM, node.block, home)
            self.release([node.block])
            node.tier, node.block = Tier.DRAM, home
        else:
            self._drop(node)

    def clear_cache(self):
        dropped = 0
        while True:
            idle = [n for n in self.nodes.values() if not n.pins and not n.children]
            if not idle:
                return dropped
            for node in idle:
                self._drop(node)
            dropped += len(idle)

    # -- blocks

    def available(self):
        return len(self.free[Tier.HBM]) + len(self._evictable())

    def allocate(self, count):
        if self.available() < count:
            return None
        while len(self.free[Tier.HBM]) < count:
            self._evict_one()
        got = [self.free[Tier.HBM].pop() for _ in range(count)]
        for block in got:
            assert self.refs[block] == 0
            self.refs[block] = 1
        return got

    def retain(self, blocks):
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} is free"
            self.refs[block] += 1

    def release(self, blocks):
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} freed twice"
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[Tier.HBM].append(block)

    def is_shared(self, block):
        return self.refs[block] > 1

    def _copy(self, src_tier, dst_tier, src, dst):
        self.copies.append(CopyBlocks(src_tier, dst_tier, [src], [dst]))

    def copy_block(self, block):
        got = self.allocate(1)
        if got is None:
            return None
        self._copy(Tier.HBM, Tier.HBM, block, got[0])
        return got[0]

    # -- swap

    def swap_out(self, blocks):
        while len(self.free[Tier.DRAM]) < len(blocks):
            before = len(self.free[Tier.DRAM])
            old = [n for n in self.nodes.values() if n.tier is Tier.DRAM and not n.pins and not n.children]
            if old:
                self._drop(min(old, key=lambda n: n.used))
            if len(self.free[Tier.DRAM]) == before:
                return None
        homes = [self.free[Tier.DRAM].pop() for _ in blocks]
        for block, home in zip(blocks, homes, strict=True):
            self._copy(Tier.HBM, Tier.DRAM, block, home)
        self.swapped.update(homes)
        self.release(blocks)
        return homes

    def swap_in(self, dram_blocks):
        got = self.allocate(len(dram_blocks))
        if got is None:
            return None
        for home, block in zip(dram_blocks, got, strict=True):
            self._copy(Tier.DRAM, Tier.HBM, home, block)
        self.release_dram(dram_blocks)
        return got

    def release_dram(self, dram_blocks):
        for home in dram_blocks:
            self.swapped.remove(home)
            self.free[Tier.DRAM].append(home)

    # -- out

    def take_copies(self):
        copies, self.copies = self.copies, []
        return copies

    def report(self):
        totals = {Tier.HBM: self.config.hbm_blocks, Tier.DRAM: self.config.dram_blocks}
        tiers = []
        for tier, total in totals.items():
            free, here = len(self.free[tier]), [node for node in self.nodes.values() if node.tier is tier]
            pinned = sum(node.pins > 0 for node in here)
            evictable = len(self._evictable()) if tier is Tier.HBM else len(here) - pinned
            tiers.append(TierReport(tier, total, free, total - free, len(here), pinned, evictable))
        return PoolReport(tuple(tiers), self.block_tokens)

    def check_invariants(self):
        for node in self.nodes.values():
            assert node.tier is Tier.DRAM or self.refs[node.block] > 0
            assert node.parent is None or self.nodes[node.parent.key] is node.parent
        held = {node.block for node in self.nodes.values() if node.tier is Tier.DRAM}
        assert sorted([*held, *self.swapped, *self.free[Tier.DRAM]]) == list(range(self.config.dram_blocks))
        used = [block for block, count in self.refs.items() if count]
        assert sorted(used + self.free[Tier.HBM]) == list(range(self.config.hbm_blocks))
