"""SGLang's direct linker with a store of memserve: KV goes from the store into SGLang's own pools, layer by layer.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "MemserveLinker",
        "linker_module_path": "memserve.integrations.sglang_linker",
        "linker_extra_config": {"pool": "127.0.0.1:7100", "secret_file": "secret"}}'

SGLang computes on whatever its pools hold when a layer fails, and aborts the request afterwards. So what a look-up
promises has been compared with its checksums by then and is held in the store's memory until it has been copied: the
store may end in between. The store has to be on the same host.

Pages of SGLang's own pools as values: where their pieces lie, and copies of one layer of many pages at a time.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from memserve.base.errors import UserError
from memserve.integrations.block_cache import BlockCache, CacheJobs, drop_views
from memserve.integrations.sglang import restorable_ends
from memserve.integrations.store_cache import Piece, PoolOptions, Value, address_of, copy_pieces, name_in, namespace
from memserve.store.client.memory import View


def piece_bytes(entry: Any) -> list[int]:
    """Of a page: one piece for each buffer of each component, as they lie one behind the other in a value."""
    return [nbytes for component in entry.buffer_meta for _, _, nbytes in component]


def is_host(entry: Any) -> bool:
    """Whether this process can address the pool."""
    return all(buffer.device.type == "cpu" for buffer in entry.get_hybrid_pool_buffer())


def load_layer(entry: Any, rows: list[int], views: Sequence[View], layer: int, threads: int) -> None:
    """Copy one layer of the pages in ``views`` to ``rows``. Raises :class:`RuntimeError` for bytes that disagree with
    their checksums."""
    meta = entry.get_prepared_layer_range_meta(rows, layer)
    if meta is None:
        return
    if not is_host(entry):
        _to_device(entry, rows, views, layer)
        return
    moves, expected, numbers = list[tuple[int, int, int]](), list[int](), _piece_numbers(entry)
    for view, targets, sizes, offsets in zip(views, *meta, strict=True):
        base = address_of(view.data)
        seals = np.frombuffer(view.data, "<u8", len(numbers), len(view.data) - 8 * len(numbers))
        moves += [(to, base + offset, nbytes) for to, offset, nbytes in zip(targets, offsets, sizes, strict=True)]
        expected += [int(seals[numbers[offset]]) for offset in offsets]
    if copy_pieces(moves, threads).tolist() != expected:
        raise RuntimeError(f"KV of layer {layer} changed after it was compared")


def pages_of(entry: Any, indices: Any, copies: list[Any]) -> list[list[Piece]]:
    """Where each page lies; of a device's memory in copies, which are added to ``copies`` and must be kept."""
    pieces_per_page = len(piece_bytes(entry))
    if is_host(entry):
        pieces: list[Piece] = list(zip(*entry.get_page_buffer_meta(indices), strict=True))
        return [pieces[index : index + pieces_per_page] for index in range(0, len(pieces), pieces_per_page)]
    pages = []
    for row in entry.prepare_locations(indices):
        page = [_bytes_of(entry, tensor, row).cpu() for component in entry.components for tensor in component]
        copies += page
        pages.append([(tensor.data_ptr(), tensor.numel()) for tensor in page])
    return pages


def _piece_numbers(entry: Any) -> dict[int, int]:
    """Where a piece begins in a value -> its number."""
    return {offset: number for number, offset in enumerate(accumulate(piece_bytes(entry)[:-1], initial=0))}


def _to_device(entry: Any, rows: list[int], views: Sequence[View], layer: int) -> None:
    """Each copy is over when its call returns: SGLang's stream waits for the layer's mark, and for no event."""
    starts = list(_piece_numbers(entry))
    mapped = entry.layer_mapping[layer]
    first = 0
    for component, buffers in zip(entry.buffer_meta, entry.components, strict=True):
        for number in [mapped] if isinstance(mapped, int) else mapped:
            for row, view in zip(rows, views, strict=True):
                source = np.frombuffer(view.data, np.uint8, component[number][2], starts[first + number])
                _bytes_of(entry, buffers[number], row).copy_(torch.from_numpy(source.copy()))
        first += len(buffers)


def _bytes_of(entry: Any, buffer: torch.Tensor, row: int) -> torch.Tensor:
    """A page's piece."""
    return buffer[row : row + entry._row_span].view(-1).view(torch.uint8)


log = logging.getLogger(__name__)

_HELD_MAX = 64
_HELD_S = 30.0
"""A request whose look-up is older, or one of more than so many, may lose what is held for it."""
_WAITING_MAX = 1024


@dataclass(slots=True, eq=False)
class _FoundPrefix:
    """What a look-up has found, by pool and key."""

    keys: list[str]
    until_s: float
    ends: list[int] = field(default_factory=list)
    views: dict[tuple[str, str], View] = field(default_factory=dict)

    def release_views(self) -> None:
        drop_views(list(self.views.values()))
        self.views.clear()


@dataclass(slots=True, eq=False)
class _Load:
    """Of one request: for each pool the rows that are written to, and what is written there."""

    parts: list[tuple[Any, list[int], list[View]]]
    record: _FoundPrefix
    is_lost: bool = False


class MemserveLinker(UnifiedCacheLinker):
    """Loaded by SGLang, in each rank. No call but :meth:`reset` and :meth:`close` waits longer than ``timeout_s``."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None
    ) -> None:
        """Raises :class:`memserve.base.errors.UserError` for a configuration that cannot be."""
        self.forward_stream = forward_stream
        self._options = PoolOptions.from_mapping(extra_config or {})
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._group = resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=params.page_size, params=params, components=components
        )
        self.pools = self._group.entry_map
        if not all(entry.packed for entry in self.pools.values()):
            raise UserError("memserve stores no parts of a page apart", hint="use HiCache's backend for this model")
        self._is_host = all(is_host(entry) for entry in self.pools.values())
        rank, self._ranks = _ranks(params)
        self._is_writer = rank == 0 or not self._group.rank_replicated
        self._prefixes = {
            name: self._make_prefix(entry, server_args, params, kvcache, rank) for name, entry in self.pools.items()
        }
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        self._pool = BlockCache(self._options)
        self._records: OrderedDict[str, _FoundPrefix] = OrderedDict()
        self._queued: dict[str, _Load] = {}
        self._loads, self._offloads = CacheJobs(1, _WAITING_MAX), CacheJobs(1, _WAITING_MAX)
        self._offloaded: deque[bool] = deque()

    def _make_prefix(self, entry: Any, server_args: Any, params: Any, kvcache: Any, rank: int) -> bytes:
        ranks: dict[str, object] = {
            "pp": (params.pp_rank, params.pp_size), "cp": (params.attn_cp_rank, params.attn_cp_size),
        }  # fmt: skip
        if not self._group.rank_replicated:
            ranks["tp"] = (rank, self._ranks)
        buffers = [(str(buffer.dtype), tuple(buffer.shape[1:])) for buffer in entry.get_hybrid_pool_buffer()]
        return namespace(
            "sglang-linker", given=self._options.namespace, model=server_args.model_path, of=str(entry.name.value),
            revision=getattr(server_args, "revision", None), kvcache=type(kvcache).__name__, buffers=buffers,
            layers=sorted(entry.layer_mapping.items()), page_tokens=entry.page_size, **ranks,
        )  # fmt: skip

    # -- look-up

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths in pages that can be loaded. What they need is compared, and held for :meth:`load`."""
        resolved = self._group.resolve_transfers(transfers)
        keys = next((list(transfer.keys) for transfer in transfers if transfer.name == PoolName.KV), [])
        if not resolved or not keys:
            return []
        now_s, record = time.monotonic(), self._records.pop(rid, None)
        if record is not None and (record.keys != keys or record.until_s <= now_s):
            record.release_views()
            record = None
        if record is None:
            record = self._compare_pages(resolved, keys, now_s + _HELD_S)
        self._records[rid] = record
        while len(self._records) > _HELD_MAX or next(iter(self._records.values())).until_s <= now_s:
            self._records.popitem(last=False)[1].release_views()
        return record.ends

    def _compare_pages(self, transfers: Sequence[Any], keys: list[str], until_s: float) -> _FoundPrefix:
        record = _FoundPrefix(keys, until_s)
        ends = set(range(1, len(keys) + 1))
        for transfer in transfers:
            if not ends:
                break
            name, wanted_keys = transfer.name, keys[: max(ends)]
            values = [self._page_value(name, key) for key in wanted_keys]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                views = dict(zip(wanted_keys, self._pool.hold_values(values)[1], strict=False))
            else:
                presence = self._pool.exists([value.name for value in values])
                present_indices = [index for index, is_there in enumerate(presence) if is_there]
                views = {
                    wanted_keys[index]: view
                    for index in present_indices
                    for view in self._pool.hold_values([values[index]])[1]
                }
            record.views.update({(name, key): view for key, view in views.items()})
            ends &= restorable_ends(transfer, [key in views for key in wanted_keys])
        record.ends = sorted(ends)
        return record

    def _page_value(self, name: Any, key: str, pieces: Sequence[Piece] | None = None) -> Value:
        """Without ``pieces``: to compare with."""
        pieces = pieces or [(0, nbytes) for nbytes in piece_bytes(self.pools[name])]
        return Value(name_in(self._prefixes[name], key.encode()), pieces)

    # -- loads

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load of what was looked up. False: it is not held any more, and nothing is loaded.

        Among several ranks all take the same way: there such a load is queued, and fails.
        """
        resolved = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not resolved:
            return False
        if rid in self._queued:
            raise RuntimeError(f"a load of {rid} is queued already")
        record = self._records.pop(rid, None) or _FoundPrefix([], 0.0)
        found_views = [[record.views.get((item.name, key)) for key in item.keys] for item in resolved]
        is_lost = any(view is None for views in found_views for view in views)
        if is_lost and self._ranks == 1:
            record.release_views()
            return False
        parts = []
        for transfer, views in zip(resolved, found_views, strict=True):
            entry = self.pools[transfer.name]
            rows = entry.prepare_locations(transfer.host_indices)
            parts.append((entry, rows, [view for view in views if view is not None]))
        self._queued[rid] = _Load(parts, record, is_lost)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        load = self._queued.pop(rid, None)
        if load is not None:
            load.record.release_views()
        return load is not None

    def start_layer_wise_loading(self) -> int:
        """The number of the batch; -1: nothing is queued."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = int(self.layer_done_counter.update_producer())
        ready = [] if self._is_host else self.record_offload_ready()[:1]
        if not self._loads.start(partial(self._load_layers, index, loads, ready)):
            self.layer_done_counter.fail(index, RuntimeError("too many loads wait"))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def _load_layers(self, index: int, loads: Sequence[_Load], ready: Sequence[Any]) -> None:
        try:
            for event in ready:
                event.synchronize()
            if any(load.is_lost for load in loads):
                raise RuntimeError("what was looked up was held no longer")
            for layer in range(self._group.num_layers):
                for load in loads:
                    for entry, rows, views in load.parts:
                        load_layer(entry, rows, views, layer, int(self._options.threads))
                self.layer_done_counter.complete(index, layer)
        except BaseException as error:
            log.exception("a load from %s failed", self._options.pool)
            self.layer_done_counter.fail(index, error)
        finally:
            for load in loads:
                load.record.release_views()

    # -- offloads

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages for the store; SGLang keeps them as they are until :meth:`pop_completed_offload`."""
        resolved = self._group.resolve_transfers(transfers, allow_partial=True)
        if not resolved:
            return False
        if not self._is_writer:
            self._offloaded.append(True)
            return True
        ready = [] if self._is_host else self.record_offload_ready()
        return self._offloads.start(partial(self._store_pages, resolved, ready))

    def _store_pages(self, transfers: Sequence[Any], ready: Sequence[Any]) -> None:
        stored = False
        try:
            for event in ready:
                event.synchronize()
            copies, values = list[Any](), list[Value]()
            for transfer in transfers:
                pages = pages_of(self.pools[transfer.name], transfer.host_indices, copies)
                keyed_pages = zip(transfer.keys, pages, strict=True)
                values += [self._page_value(transfer.name, key, pieces) for key, pieces in keyed_pages]
            stored = all(self._pool.put_values(values))
        finally:
            self._offloaded.append(stored)

    def num_completed_offloads(self) -> int:
        return len(self._offloaded)

    def pop_completed_offload(self) -> bool:
        return self._offloaded.popleft()

    # -- ends

    def reset(self) -> None:
        """Wait for what is under way, which ends by its deadlines, and forget all of it."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        while self._records:
            self._records.popitem()[1].release_views()
        self._loads.wait_until_idle()
        self._offloads.wait_until_idle()
        self._offloaded.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._loads.close()
        self._offloads.close()
        self._pool.close()


def _ranks(params: Any) -> tuple[int, int]:
    """This rank of tensor parallelism, and how many there are."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
