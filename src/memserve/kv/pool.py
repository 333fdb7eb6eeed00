"""The blocks and the prefix cache of one instance: accounting only, it moves no bytes.

    acquire ------> Lease: cached prefix, pinned, one reference a block for the caller
    allocate -----> blocks with one reference each, for what is not cached
    publish ------> the index takes references of its own and the lease's pin moves down
    unpin, release: the caller is done; cached blocks stay until they are evicted

References: a block of HBM is free, or held by its reference count. The index holds one reference on each block
that it names. Every other reference belongs to a caller of this class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from memserve import _core
from memserve.base.config import PoolConfig
from memserve.base.errors import InvariantError, check
from memserve.base.states import behind_kv
from memserve.base.types import CopyBlocks, Tier, TokenArray, tenant_of
from memserve.kv.block_access import BlockAccessLog, CopyLog
from memserve.kv.events import EventLog, KvEvent, PoolReport, TierReport
from memserve.kv.identity import DEFAULT_KEY, NAMES_MAX, block_identities, names_behind, namespace_id, pack_behind
from memserve.kv.retention import RetainedPrefixes
from memserve.kv.snapshots import SnapshotCache, SnapshotReport
from memserve.kv.state_snapshot import Lease, StateSnapshot
from memserve.kv.windows import WindowCache, WindowPart, WindowReport

_EVICTION_STEP = 8  # blocks given up at once where a part of a window may go with any of them


class BlockPool:
    """Blocks of HBM and DRAM, and the radix index over them."""

    def __init__(
        self, config: PoolConfig, geometry_block_tokens: int, namespace: str, *, event_capacity: int = 0
    ) -> None:
        """``namespace`` names model and weights, dtype and layout. ``event_capacity`` 0: no KV events."""
        self.config = config
        self.block_tokens = geometry_block_tokens
        #: model and weights, dtype and layout
        self.namespace = namespace
        self._key = config.identity_key or DEFAULT_KEY
        self._names: dict[str, bytes] = {}  # isolation -> namespace id
        self._owners: dict[str, bytes] = {}  # isolation -> namespace id of its tenant
        self._hbm = _core.BlockAllocator(config.hbm_blocks)
        self._dram = _core.BlockAllocator(config.dram_blocks)
        self._index = _core.RadixIndex(geometry_block_tokens, self._hbm, self._dram)
        self._copies = CopyLog()
        self._events = EventLog(event_capacity)
        self.snapshots: SnapshotCache | None = None  # None: layers keep KV alone
        if config.states is not None:
            dram = self._dram if config.dram_blocks else None
            self.snapshots = SnapshotCache(config.states, (self._hbm, dram), self, self._index, self.block_tokens)
            self._index.set_demotes_held_only()
        self.windows: WindowCache | None = None  # None: the KV of all layers lies together
        if config.windows is not None:
            check(not config.dram_blocks and config.states is None, "parts lie on one tier, and without states")
            self.windows = WindowCache(config.windows, self._hbm, self.release)
        #: what a peer needs beside the KV of a prefix
        self.behind_kv = behind_kv(config.states, config.windows)
        self.retained = RetainedPrefixes(self, self._index, self._hbm, self._dram)

        #: None unless something other than plans touches blocks (see ``kv_transfer/barriers``)
        self.access: BlockAccessLog | None = None

    def identity(self, tenant: str, tokens: TokenArray) -> bytes:
        """Identity of the last whole block of ``tokens``, 16 bytes; b"": there is none."""
        return self.identities(tenant, tokens)[-16:]

    def identities(self, tenant: str, tokens: TokenArray) -> bytes:
        """Of all whole blocks of ``tokens``, 16 bytes each: it names namespace, tenant, and tokens up to there."""
        return _core.block_identities(self._key, self.namespace_of(tenant), tokens, self.block_tokens)

    def state_identities(self, identity: bytes) -> list[bytes]:
        """Under which stores have the snapshot behind the block of this ``identity``, or its part; one a block."""
        return names_behind([identity], self.part_blocks or self.state_blocks, self.part_blocks, self._key)

    def names_behind(self, identities: bytes) -> bytes:
        """Under which stores have what comes behind the KV of a prefix whose blocks have these ``identities``."""
        return pack_behind(identities, self.behind_kv, self.block_tokens, self._key)

    # -- prefix cache

    def match(self, tenant: str, tokens: TokenArray) -> int:
        """Cached prefix of ``tokens`` in tokens, whole blocks: as far as a sequence can go on from it. Changes nothing,
        not even the order of eviction."""
        if self.snapshots is not None:
            snapshot = self.cached_snapshot(tenant, tokens)
            return snapshot.tokens if snapshot is not None else 0
        return self.match_kv(tenant, tokens) if self.windows is None else self._match_windows(tenant, tokens)

    def match_kv(self, tenant: str, tokens: TokenArray) -> int:
        """As :meth:`match`, for KV alone: a sequence can go on from less where layers keep a recurrent state, too."""
        name = self._names.get(tenant) or self.namespace_of(tenant)
        return self._index.match(name, tokens) if self.config.caching else 0

    def match_blocks(self, tenant: str, tokens: TokenArray) -> tuple[int, int]:
        """Blocks of the cached prefix of ``tokens`` in HBM, and behind them in DRAM. Changes nothing."""
        whole = tokens if self._beside is None else tokens[: self.match(tenant, tokens)]
        return self.match_kv_blocks(tenant, whole)

    def match_kv_blocks(self, tenant: str, tokens: TokenArray) -> tuple[int, int]:
        """As :meth:`match_blocks`, for KV alone."""
        if not self.config.caching:
            return 0, 0
        matched = self._index.match_blocks(self.namespace_of(tenant), tokens)
        return len(matched.hbm), len(matched.dram)

    def cached_continuation(self, tenant: str, tokens: TokenArray, count: int) -> list[int]:
        """Up to ``count`` tokens that followed ``tokens`` in an earlier request. Empty: none did, or not all of
        ``tokens`` are cached. Changes nothing."""
        return self._index.continuation(self.namespace_of(tenant), tokens, count)

    def acquire(self, tenant: str, tokens: TokenArray) -> Lease:
        """The longest cached prefix of ``tokens`` (whole blocks), pinned, with one reference a block for the caller.
        With recurrent states it is the longest that a snapshot stands behind, which is pinned as well; with windows
        apart the longest whose last window is there, which is in use then.

        Blocks in DRAM are copied up as far as HBM has room (which may evict unpinned blocks); the prefix is cut behind
        them.
        """
        if self.snapshots is not None:
            return self._acquire_behind_snapshot(tenant, tokens)
        if self.windows is not None:
            tokens = tokens[: self._match_windows(tenant, tokens)]
        lease = self.acquire_kv(tenant, tokens)
        if self.windows is not None:
            lease.tail = self.windows.tail_of(lease.blocks)
            self.windows.use_parts(lease.tail, is_new_sequence=True)
        return lease

    def _acquire_behind_snapshot(self, tenant: str, tokens: TokenArray) -> Lease:
        snapshots = self._snapshots()
        while (snapshot := self.cached_snapshot(tenant, tokens)) is not None:
            snapshots.pin(snapshot)
            lease = self.acquire_kv(tenant, tokens[: snapshot.tokens])
            if lease.tokens == snapshot.tokens and snapshot.pages:
                lease.snapshot = snapshot
                return lease
            # not all of its KV fits into HBM, or only without it: from the longest one before which it does
            snapshots.unpin(snapshot)
            self.unpin(lease)
            self.release(lease.blocks)
            tokens = tokens[: min(lease.tokens, snapshot.tokens - 1)]
        return Lease()

    def acquire_kv(self, tenant: str, tokens: TokenArray) -> Lease:
        """As :meth:`acquire`, for KV alone."""
        if not self.config.caching:
            return Lease()
        matched = self._index.acquire(self.namespace_of(tenant), tokens)
        lease = Lease(matched.hbm.tolist(), matched.tokens, 0, matched.pin)
        if len(matched.dram):
            self._promote_blocks(lease, len(matched.dram))
        return lease

    def publish(self, lease: Lease, tenant: str, tokens: TokenArray, blocks: Sequence[int], *, written_by: int) -> int:
        """Make the KV of ``tokens`` (whole blocks of it) reusable; ``blocks``, all in HBM, hold it at the latest when
        plan ``written_by`` has finished (0: they do now).

        The index takes a reference on each new block. It keeps a block that it has for these tokens already, unless
        that lies in DRAM: then it takes the caller's and frees its own. The lease's pin moves to the end of ``tokens``.
        Returns the number of blocks that the index took.
        """
        if not self.config.caching or len(tokens) < self.block_tokens:
            return 0
        name = self.namespace_of(tenant)
        inserted = self._index.insert(name, tokens, blocks, pin=True, owner=self._owners[tenant])
        self._index.unpin(lease.pin)
        lease.pin = inserted.pin
        if self.access is not None:  # new blocks come last, except those that were in DRAM
            self.access.on_blocks_filled(
                blocks if len(inserted.adopted_dram) else blocks[len(blocks) - inserted.added :], written_by
            )
        self._log_published(name, tokens, inserted)
        return inserted.added

    def borrow_blocks(self, tenant: str, tokens: TokenArray) -> _core.BlockIds:
        """As :meth:`acquire` without a lease: HBM blocks of the cached prefix, one reference each, nothing pinned.
        Eviction may remove their entries meanwhile; the caller keeps the blocks until ``release``."""
        lease = self.acquire_kv(tenant, tokens)
        self._index.unpin(lease.pin)
        return _core.BlockIds(lease.blocks)

    def export_blocks(
        self, tenant: str, tokens: TokenArray, first_block: int = 0
    ) -> tuple[_core.BlockIds, _core.BlockIds]:
        """Blocks of the cached prefix from ``first_block`` on, where they lie: in HBM, and behind it in DRAM; one
        reference each, nothing pinned.

        Eviction may remove their entries meanwhile; they keep their contents until ``release`` and ``release_dram``.
        """
        if not self.config.caching:
            return _core.BlockIds(), _core.BlockIds()
        matched = self._index.acquire(self.namespace_of(tenant), tokens)
        hbm, dram = matched.hbm[first_block:], matched.dram[max(0, first_block - len(matched.hbm)) :]
        self._dram.retain(dram)
        self._index.unpin(matched.pin)
        self.release(matched.hbm[:first_block])
        return hbm, dram

    def insert(self, tenant: str, tokens: TokenArray, blocks: _core.Ids, hbm_blocks: int) -> int:
        """As :meth:`publish` without a lease; ``blocks[:hbm_blocks]`` lie in HBM, the rest in DRAM."""
        if not self.config.caching:
            return 0
        name = self.namespace_of(tenant)
        inserted = self._index.insert(name, tokens, blocks, hbm_blocks, owner=self._owners[tenant])
        self._log_published(name, tokens, inserted)
        return inserted.added

    def delete(self, tenant: str, tokens: TokenArray) -> int:
        """Remove what only ``tokens`` (whole blocks) leads to from the index; returns the number of blocks.

        That is: every unpinned entry that extends ``tokens``, then the blocks of ``tokens`` from the end upwards as
        far as they are unpinned and lead nowhere else. Removes nothing if ``tokens`` is not cached in full.
        """
        return self._log_eviction(self._index.delete(self.namespace_of(tenant), tokens))

    def demote_blocks(self, count: int) -> int:
        """Move up to ``count`` unpinned cached blocks, in the order of eviction, to DRAM; returns how many moved."""
        count = min(count, self._hbm.blocks_evictable, self._dram.blocks_free + self._dram.blocks_evictable)
        return self._evict_blocks(Tier.HBM, count)[1]

    def demote_path(self, tenant: str, tokens: TokenArray) -> int:
        """Move what only ``tokens`` leads to from HBM to DRAM, if there is room; returns how many blocks moved."""
        evicted = self._index.demote(self.namespace_of(tenant), tokens)
        self._log_eviction(evicted)
        return len(evicted.moved_from)

    def unpin(self, lease: Lease) -> None:
        """End the lease's protection from eviction. Its blocks are returned separately, by :meth:`release`."""
        self._index.unpin(lease.pin)
        lease.pin = 0
        if self.snapshots is not None:
            self.snapshots.end_lease(lease)
        self.release_tail(lease)

    # -- windows apart

    def release_tail(self, lease: Lease) -> None:
        """The lease's last window is not wanted: it may go."""
        tail, lease.tail = lease.tail, []
        if self.windows is not None:
            self.windows.release_parts(tail, is_end=True)

    def anchor_parts(
        self, tenant: str, tokens: TokenArray, first: int, parts: Sequence[WindowPart], *, written_by: int
    ) -> None:
        """Let ``parts`` hang at the cached blocks of ``tokens`` from the ``first`` on, where none do; they have their
        KV when plan ``written_by`` has finished."""
        windows = self.windows
        if windows is None or not parts:
            return
        blocks = self._index.match_blocks(self.namespace_of(tenant), tokens).hbm
        for block, part in zip(blocks[first : first + len(parts)], parts, strict=False):
            if windows.anchor_part(part, block) and self.access is not None:
                self.access.on_blocks_filled(part.blocks, written_by)

    def lend_parts(self, parts: Sequence[WindowPart], tokens: int) -> Lease:
        """The ``parts`` that a sequence needs behind ``tokens`` tokens, for a peer: in use, with a reference on each
        block. Ended by :meth:`unpin` and :meth:`release`."""
        blocks = [block for part in parts for block in part.blocks]
        return self.share_loan(Lease(tokens=tokens, tail=list(parts)), blocks)

    def share_loan(self, loan: Lease, blocks: Sequence[int]) -> Lease:
        """What ``loan`` has of a state or of windows, pinned once more, with a reference on each of ``blocks``."""
        if loan.snapshot is not None:
            self._snapshots().pin(loan.snapshot)
        if self.windows is not None:
            self.windows.use_parts(loan.tail)
        self.retain(blocks)
        return replace(loan, blocks=list(blocks), tail=list(loan.tail))

    def _match_windows(self, tenant: str, tokens: TokenArray) -> int:
        if self.windows is None or not self.config.caching:
            return 0
        matched = self._index.match_blocks(self.namespace_of(tenant), tokens)
        return self.windows.count_resumable(matched.hbm) * self.block_tokens

    # -- snapshots

    def allocate_snapshot(self, tokens: int) -> StateSnapshot | None:
        """Pages for a snapshot behind ``tokens`` tokens, which the caller has until it is cached or forgotten. None: no
        room. Cached blocks may be evicted for it, and snapshots that a longer one stands for."""
        return self._snapshots().allocate(tokens)

    def keep_snapshot(self, tenant: str, tokens: TokenArray, snapshot: StateSnapshot) -> bool:
        """Cache ``snapshot``, which was taken behind ``tokens``. False: there is one, or the index has not all of their
        KV; it stays the caller's."""
        if self.snapshots is None or not snapshot.pages or not self.config.caching:
            return False
        matched = self._index.match_blocks(self.namespace_of(tenant), tokens)
        identities = self.identities(tenant, tokens)
        if len(matched.hbm) * self.block_tokens < len(tokens) or self.snapshots.has(identities):
            return False
        hold = self._index.hold(self.namespace_of(tenant), tokens)
        self.snapshots.keep(snapshot, identities, tokens, hold=hold, owner=self._owners[tenant])
        return True

    @property
    def state_blocks(self) -> int:
        """Blocks that a peer needs beside the KV of a long prefix: of one snapshot, or of a window's parts. 0: none, or
        snapshots do not lie in blocks of their own."""
        return self.behind_kv.most_blocks

    def blocks_behind(self, tokens: int) -> int:
        """As :attr:`state_blocks`, for a prefix of so many tokens."""
        return self.behind_kv.count_blocks(tokens)

    def lend_snapshot(self, tenant: str, snapshot: StateSnapshot) -> Lease | None:
        """The snapshot's blocks for a peer: pinned, with a reference on each, which keeps their bytes even where the
        snapshot is lost meanwhile. Ended by :meth:`unpin` and :meth:`release`. None: it lies in DRAM, and HBM has no
        room for it."""
        check(self.state_blocks, "snapshots here cannot be lent")
        if snapshot.tier is Tier.DRAM and not self._snapshots().move_up(self.namespace_of(tenant), snapshot):
            return None
        return self.share_loan(Lease(tokens=snapshot.tokens, snapshot=snapshot), snapshot.pages)

    @property
    def part_blocks(self) -> int:
        """Blocks of a part of a window. 0: the KV of all layers lies together."""
        return self.behind_kv.part_blocks

    def lend_cached_parts(self, tenant: str, tokens: TokenArray, first: int, count: int) -> tuple[int, Lease] | None:
        """The first run of parts that hang at the cached blocks of ``tokens`` from the ``first`` on, up to ``count``;
        and the block where it begins. None: there is none."""
        if self.windows is None:
            return None
        blocks = self._index.match_blocks(self.namespace_of(tenant), tokens).hbm
        first, parts = self.windows.find_parts(blocks, first, count)
        return (first, self.lend_parts(parts, (first + len(parts)) * self.block_tokens)) if parts else None

    def lend_state(self, tenant: str, tokens: TokenArray, blocks: int, part_blocks: int = 0) -> Lease | None:
        """The longest cached snapshot of a prefix of ``tokens``, as :meth:`lend_snapshot` gives it. None: there is none
        of that many ``blocks``. Where windows lie apart: the parts behind the longest prefix that has them."""
        if self.windows is not None:
            tokens = tokens[: self._match_windows(tenant, tokens)]
            blocks_hbm = self._index.match_blocks(self.namespace_of(tenant), tokens).hbm
            return self.lend_parts(self.windows.tail_of(blocks_hbm), len(tokens)) if len(tokens) else None
        snapshot = self.cached_snapshot(tenant, tokens) if blocks and blocks == self.state_blocks else None
        return None if snapshot is None else self.lend_snapshot(tenant, snapshot)

    def adopt_snapshot(self, tokens: int, blocks: Sequence[int]) -> StateSnapshot:
        """What a peer sent, in ``blocks`` whose references the caller gives up; as :meth:`allocate_snapshot`."""
        return self._snapshots().adopt(tokens, blocks)

    def insert_state(self, tenant: str, tokens: TokenArray, blocks: Sequence[int]) -> bool:
        """Cache the snapshot behind ``tokens`` that lies in ``blocks``, with references of its own. False: there is
        one, or their KV is not here."""
        self.retain(blocks)
        if self.windows is not None:
            parts, first = self.windows.build_parts(blocks), self.windows.pages.first_entry(len(tokens))
            self.anchor_parts(tenant, tokens, first, parts, written_by=0)
            self.windows.release_parts(parts, is_end=True)
            return self._match_windows(tenant, tokens) == len(tokens)
        snapshot = self.adopt_snapshot(len(tokens), blocks)
        if self.keep_snapshot(tenant, tokens, snapshot):
            return True
        return not self._snapshots().forget(snapshot)

    def note_state_access(self, snapshot: StateSnapshot, *, writes: bool) -> None:
        """The next plan reads a snapshot, before its copies, or writes it, behind its rows."""
        if writes and self.snapshots is not None:
            self.snapshots.note_planned(snapshot)
        tier, pages = snapshot.source
        if self.access is None or self.config.states is None or tier is Tier.DRAM:
            return
        blocks = {page // self.config.states.per_block for page in pages}
        (self.access.on_state_written if writes else self.access.on_state_read)(blocks)

    def forget_snapshots(self, tenant: str, tokens: TokenArray) -> None:
        """Give up every snapshot of a prefix of ``tokens``."""
        while (snapshot := self.cached_snapshot(tenant, tokens)) is not None:
            self._snapshots().forget(snapshot)

    def _snapshots(self) -> SnapshotCache:
        check(self.snapshots is not None, "a model without a recurrent state has no snapshots")
        return cast(SnapshotCache, self.snapshots)

    def cached_snapshot(self, tenant: str, tokens: TokenArray) -> StateSnapshot | None:
        """The longest prefix with both: whole blocks of KV, and behind them a snapshot."""
        if self.snapshots is None or not self.snapshots.cached:
            return None
        kv_tokens = tokens[: self.match_kv(tenant, tokens)]
        return self.snapshots.longest_match(self.identities(tenant, kv_tokens), kv_tokens)

    # -- blocks

    def allocate(self, count: int) -> list[int] | None:
        """``count`` HBM blocks with one reference each. None: no room, and nothing changed.

        To make room, unpinned cached blocks are evicted in the index's order (``src/core/radix/index.h``): to DRAM
        while there is room (or can be made by the same rule), else dropped.
        """
        blocks = self.allocate_ids(count)
        return None if blocks is None else blocks.tolist()

    def allocate_ids(self, count: int) -> _core.BlockIds | None:
        """As :meth:`allocate`, without making a Python list."""
        blocks = self._hbm.allocate(count)
        if blocks is not None:
            return blocks
        if self._beside is not None:
            return self._hbm.allocate(count) if count <= self.available() and self.make_room(count) else None
        return self._allocate_evicting(Tier.HBM, self._hbm, count)

    def allocate_dram_ids(self, count: int) -> _core.BlockIds | None:
        """``count`` DRAM blocks with one reference each; cached blocks are evicted to make room. None: no room."""
        if count > self.available(Tier.DRAM):
            return None
        while (blocks := self.allocate_below(count)) is None:
            check(self.snapshots is not None and self.snapshots.give_up_below(), "DRAM has less than it counts")
        return blocks

    def allocate_below(self, count: int) -> _core.BlockIds | None:
        """As :meth:`allocate_dram_ids`, without KV that a snapshot stands behind."""
        return self._allocate_evicting(Tier.DRAM, self._dram, count)

    def _allocate_evicting(self, tier: Tier, blocks: _core.BlockAllocator, count: int) -> _core.BlockIds | None:
        missing_blocks = count - blocks.blocks_free
        if missing_blocks > blocks.blocks_evictable:
            return None
        self._evict_blocks(tier, missing_blocks)
        return blocks.allocate(count)

    def available(self, tier: Tier = Tier.HBM) -> int:
        """Blocks of ``tier`` that can be allocated now: free ones and evictable ones."""
        allocator = self._dram if tier is Tier.DRAM else self._hbm
        return allocator.blocks_free + allocator.blocks_evictable + self._blocks_beside(tier)[1]

    @property
    def blocks_free(self) -> int:
        """HBM blocks without a reference, not even of the cache: allocating them changes nothing else."""
        return self._hbm.blocks_free

    def retain(self, blocks: Sequence[int]) -> None:
        """One more reference on each block."""
        self._hbm.retain(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block; a block without references is free."""
        if self.access is not None:
            self.access.on_blocks_released(blocks)
        self._hbm.release(blocks)

    def retain_dram(self, dram_blocks: Sequence[int]) -> None:
        """One more reference on each DRAM block, until :meth:`release_dram`."""
        self._dram.retain(dram_blocks)

    def ref_count(self, tier: Tier, block: int) -> int:
        """References on a block: the index's and those of callers."""
        return (self._hbm if tier == Tier.HBM else self._dram).ref_count(block)

    def is_shared(self, block: int) -> bool:
        """Whether writing to ``block`` needs a copy first."""
        return self._hbm.ref_count(block) > 1

    def copy_block(self, block: int) -> int | None:
        """A new block with the contents of ``block`` (copy recorded). None: no room. The caller keeps its reference on
        the old block."""
        fresh = self.allocate_ids(1)
        if fresh is None:
            return None
        self.record_copies(Tier.HBM, (block,), Tier.HBM, fresh)
        return fresh[0]

    # -- preemption by swap

    def swap_out(self, blocks: Sequence[int]) -> list[int] | None:
        """Copy ``blocks`` to DRAM (which may evict cached blocks there), and drop the caller's references on
        them. None: no room, nothing changed."""
        below = self.allocate_dram_ids(len(blocks))
        if below is None:
            return None
        self.record_copies(Tier.HBM, blocks, Tier.DRAM, below)
        self._hbm.release(blocks)
        return below.tolist()

    def swap_in(self, dram_blocks: Sequence[int]) -> list[int] | None:
        """Copy ``dram_blocks`` to new HBM blocks (one reference each) and free them. None: no room."""
        above = self.allocate_ids(len(dram_blocks))
        if above is None:
            return None
        self.record_copies(Tier.DRAM, dram_blocks, Tier.HBM, above)
        self._dram.release(dram_blocks)
        return above.tolist()

    def release_dram(self, dram_blocks: Sequence[int]) -> None:
        """Drop one reference on each DRAM block; a block without references is free."""
        self._dram.release(dram_blocks)

    # -- out

    def take_copies(self) -> list[CopyBlocks]:
        """Copies recorded since the last call, in order."""
        if self.snapshots is not None:
            self.snapshots.on_plan_made()
        return self._copies.take_copies() if len(self._copies) else []

    @property
    def has_copies(self) -> bool:
        """Whether there are copies that :meth:`take_copies` has not returned."""
        return len(self._copies) > 0

    def take_events(self) -> list[KvEvent]:
        """KV events since the last call, in order (none when the pool was built without a buffer for them)."""
        return self._events.take_events()

    @property
    def next_event(self) -> int:
        """Number of the next KV event."""
        return self._events.next_number

    def cached_identities(self, tier: Tier) -> bytes:
        """Identities of all blocks that the index holds on ``tier``, 16 bytes each; needs a pool with KV events."""
        return self._events.identities_on(tier)

    def report(self) -> PoolReport:
        """The state of the memory."""
        tiers = self._report_of(Tier.HBM, self._hbm), self._report_of(Tier.DRAM, self._dram)
        snapshots = self.snapshots.report() if self.snapshots is not None else SnapshotReport()
        windows = self.windows.report() if self.windows is not None else WindowReport()
        return PoolReport(tiers, self.block_tokens, len(self._copies), snapshots, windows)

    def _report_of(self, tier: Tier, blocks: _core.BlockAllocator) -> TierReport:
        used, evictable = self._blocks_beside(tier)
        pinned = self._index.blocks_pinned(tier) + used - evictable
        cached = self._index.blocks(tier) + used, pinned, blocks.blocks_evictable + evictable
        sizes = blocks.blocks_total, blocks.blocks_free, blocks.blocks_used
        return TierReport(tier, *sizes, *cached, blocks.pages_free, blocks.pages_stranded)

    def clear_cache(self) -> int:
        """Drop every unpinned entry of the index, and every snapshot that is not; returns how many blocks it named."""
        if self.snapshots is not None:
            self.snapshots.forget_all(with_pinned=False)
        return self._log_eviction(self._index.clear())

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the accounts do not balance."""
        self._hbm.check_invariants()
        self._dram.check_invariants()
        self._index.check_invariants()
        if self._beside is not None:
            self._beside.check_invariants()
        self.retained.check_invariants()

    # -- inside

    def make_room(self, count: int, *, for_snapshot: bool = False) -> bool:
        """Free blocks until there are ``count``: first what is of least use beside blocks; then cached blocks that no
        snapshot holds, in the order of eviction; then cached snapshots, each with the blocks that it alone held; then
        the rest beside blocks, but none of that ``for_snapshot``. False: not so many."""
        hbm, beside = self._hbm, self._beside
        if beside is None:  # blocks alone are evicted one for one
            return False
        while hbm.blocks_free < count and beside.give_up_first():
            pass
        while hbm.blocks_free < count:
            if hbm.blocks_evictable and self._index.evictable(Tier.HBM):
                step = min(count - hbm.blocks_free, hbm.blocks_evictable, _EVICTION_STEP)
                if not self._evict_blocks(Tier.HBM, step)[0] and not beside.give_up_below():
                    break
            elif beside.give_up_cached() or (not for_snapshot and beside.give_up_last()):
                continue
            elif for_snapshot or not self.retained.give_up(Tier.HBM):
                break
        return hbm.blocks_free >= count

    def _blocks_beside(self, tier: Tier) -> tuple[int, int]:
        """Blocks of what the cache has beside the index, and of them those that can be had."""
        if tier is Tier.DRAM:
            return (0, 0) if self.snapshots is None else self.snapshots.dram_blocks()
        beside = self._beside
        return (0, 0) if beside is None else (beside.blocks_used, beside.blocks_evictable)

    @property
    def _beside(self) -> SnapshotCache | WindowCache | None:
        """What lies in blocks beside those of the index."""
        return self.snapshots if self.snapshots is not None else self.windows

    def record_copies(self, src_tier: Tier, src: Sequence[int], dst_tier: Tier, dst: Sequence[int]) -> None:
        """The next plan copies ``src[i]`` to ``dst[i]``, behind its loads of states and before its rows."""
        self._copies.record_copies(src_tier, src, dst_tier, dst)
        if self.access is not None:
            self.access.on_copies_recorded(src_tier, src, dst_tier, dst)

    def namespace_of(self, tenant: str) -> bytes:
        """The root of the index under which an isolation has its KV: 16 bytes."""
        name = self._names.get(tenant)
        if name is None:
            if len(self._names) >= NAMES_MAX:  # salts come and go; names are quick to recompute
                self._names.clear()
                self._owners.clear()
            name = self._names[tenant] = namespace_id(tenant, self.namespace, self._key)
            self._owners[tenant] = namespace_id(tenant_of(tenant), self.namespace, self._key)
        return name

    def _evict_blocks(self, tier: Tier, count: int) -> tuple[int, int]:
        """Free ``count`` blocks of the cache, from HBM down to DRAM where that has room; what is retained goes last.
        Returns how many are free, and how many went down."""
        freed = moved = 0
        while freed < count:
            evicted = self._index.evict(tier, count - freed)
            self._log_eviction(evicted)
            freed, moved = freed + evicted.freed, moved + len(evicted.moved_from)
            if freed < count and (self._beside is not None or not self.retained.give_up(tier)):
                break
        return freed, moved

    def _promote_blocks(self, lease: Lease, dram_blocks: int) -> None:
        above = self.allocate_ids(min(dram_blocks, self.available()))
        if above is None:
            raise InvariantError("the allocator has less room than the count of evictable blocks promised")
        moved = self._index.promote(lease.pin, above)
        lease.pin = moved.pin
        self._hbm.retain(above)
        self.record_copies(Tier.DRAM, moved.left_dram, Tier.HBM, above)
        if self._events.enabled:
            self._events.on_promoted(moved.left_dram, above)
        lease.blocks += above.tolist()
        lease.tokens = len(lease.blocks) * self.block_tokens
        lease.dram_tokens = len(above) * self.block_tokens

    def _log_eviction(self, evicted: _core.Eviction) -> int:
        """Copy and tell what the index has given up; returns how many blocks it dropped."""
        self.record_copies(Tier.HBM, evicted.moved_from, Tier.DRAM, evicted.moved_to)
        if self._beside is not None:
            self._beside.on_evicted(evicted)
        self.retained.on_evicted(evicted)
        if self._events.enabled:
            self._events.on_evicted(evicted.changes)
        return len(evicted.dropped_hbm) + len(evicted.dropped_dram)

    def _log_published(self, name: bytes, tokens: TokenArray, inserted: _core.Insertion) -> None:
        """The index has all of ``tokens`` now: report what is new and what came up from DRAM."""
        if not self._events.enabled:
            return
        adopted = inserted.adopted_dram.tolist()
        if not inserted.added and not adopted:
            return
        matched = self._index.match_blocks(name, tokens)
        hbm, dram = matched.hbm, matched.dram.tolist()
        first = 0 if adopted or dram else len(hbm) - inserted.added  # new blocks come last
        identities = block_identities(name, tokens, self.block_tokens, self._key, first)
        self._events.on_published(hbm[first:].tolist(), dram, identities, adopted)
