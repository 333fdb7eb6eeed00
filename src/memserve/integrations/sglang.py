"""A store of memserve behind SGLang's HiCache: `--hicache-storage-backend dynamic`, with this extra configuration:

    {"backend_name": "memserve", "module_path": "memserve.integrations.sglang", "class_name": "MemserveHiCache",
     "interface_v1": 1, "memserve": {"pool": "127.0.0.1:7100", "secret_file": "secret"}}

A page is one value, all its pieces in it: K and V of a page-first layout, a piece of each layer of a layer-first one.
Its name says model, pool, ranks and shape of KV, so that ranks, models and layouts never meet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from memserve.base.errors import UserError
from memserve.integrations.store_cache import EnginePool, Piece, PoolOptions, Value, name_in, namespace

log = logging.getLogger(__name__)

_SHAPE = (
    "layout", "page_size", "logical_page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim",
    "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "dtype", "conv_dtype", "temporal_dtype",
    "indexer_dtype", "item_bytes", "size_per_token",
)  # fmt: skip
"""Attributes of SGLang's host pools that decide what the bytes of a page mean."""
_KV = "kv"
_REPLICATED = ("kv", "indexer", "deepseek_v4")
"""Pools whose pages are equal on all ranks of tensor parallelism where the model's KV is (MLA); others are a rank's."""


class MemserveHiCache(HiCacheStorage):
    """Loaded by SGLang, in each rank. Calls wait at most ``timeout_s`` each; what was not done by then is a miss."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises :class:`memserve.base.errors.UserError` for a configuration that cannot be."""
        extra = storage_config.extra_config or {}
        if storage_config.should_split_heads:
            hint = "leave tp_lcm_size out: engines of one store then have one --tp-size, or do not share KV"
            raise UserError("memserve stores no heads apart", hint=hint, param="tp_lcm_size")
        self._options = PoolOptions.from_mapping(extra.get("memserve") or {})
        self._config = storage_config
        self._by_pieces = bool(extra.get("interface_v1", 0))
        self.registered_pools: dict[str, Any] = {}
        self._prefixes = {_KV: self._make_prefix(_KV, None)}
        self._pool = EnginePool(self._options)
        self.mem_pool_host: Any = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._prefixes[_KV] = self._make_prefix(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if _text(host_pool_name) != _KV:
            self._prefixes[_text(host_pool_name)] = self._make_prefix(_text(host_pool_name), host_pool)

    def _make_prefix(self, pool_name: str, host_pool: Any) -> bytes:
        config = self._config
        ranks: dict[str, object] = {
            "pp": (config.pp_rank, config.pp_size),
            "cp": (config.attn_cp_rank, config.attn_cp_size),
        }
        ranks |= {"dcp": (config.dcp_rank, config.dcp_size, config.logical_page_size)}
        if not (config.is_mla_model and pool_name.startswith(_REPLICATED)):
            ranks |= {"tp": (config.tp_rank, config.tp_size)}
        shape = {name: getattr(host_pool, name, None) for name in _SHAPE}
        shape |= {"pool": type(host_pool).__name__, "pieces": self._by_pieces or pool_name != _KV}
        return namespace(
            "sglang", given=self._options.namespace, model=config.model_name, of=pool_name, **ranks, **shape
        )

    def _value_name(self, pool_name: str, key: str) -> bytes:
        return name_in(self._prefixes[pool_name], key.encode())

    # -- pages where they lie in host memory: v1

    @property
    def _is_logical(self) -> bool:
        """Whether the host pool has no KV of its own, and other pools carry all of it."""
        return self.mem_pool_host is not None and getattr(self.mem_pool_host, "kv_buffer", self) is None

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return len(keys) if self._is_logical else self._pool.match_prefix([self._value_name(_KV, key) for key in keys])

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move_kv(keys, host_indices, self._pool.get_values)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move_kv(keys, host_indices, self._pool.put_values)

    def _move_kv(self, keys: list[str], host_indices: Any, move: Callable[[Sequence[Value]], list[bool]]) -> list[bool]:
        if self._is_logical:
            return [True] * len(keys)
        return move(self._page_values(_KV, self.mem_pool_host, keys, host_indices) or []) or [False] * len(keys)

    def _page_values(
        self, pool_name: str, host_pool: Any, keys: Sequence[str], host_indices: Any
    ) -> list[Value] | None:
        """Each page's value. None: indices and keys do not belong together."""
        page_tokens = getattr(host_pool, "page_size", 1) or 1
        if pool_name == _KV and self._config.dcp_size > 1:
            page_tokens = self._config.logical_page_size
        if host_indices is None or host_indices.numel() != len(keys) * page_tokens:
            log.error("%s: %d pages of %d tokens have other indices", pool_name, len(keys), page_tokens)
            return None
        addresses, lengths = host_pool.get_page_buffer_meta(host_indices)
        pieces: list[Piece] = list(zip(_flat(addresses), _flat(lengths), strict=True))
        pieces_per_page = len(pieces) // max(1, len(keys))
        if pieces_per_page * len(keys) != len(pieces):
            log.error("%s: %d pieces are not of %d pages", pool_name, len(pieces), len(keys))
            return None
        return [
            Value(self._value_name(pool_name, key), pieces[pieces_per_page * number : pieces_per_page * (number + 1)])
            for number, key in enumerate(keys)
        ]

    # -- several pools at once: v2

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        transfers, pages = list(pool_transfers or []), self.batch_exists(keys, extra_info)
        known_transfers = [transfer for transfer in transfers if _text(transfer.name) in self._prefixes]
        presence = self._pool.exists(
            [
                self._value_name(_text(known_transfer.name), key)
                for known_transfer in known_transfers
                for key in keys[:pages]
            ]
        )
        presence_by_pool = {
            _text(known_transfer.name): presence[pages * index : pages * (index + 1)]
            for index, known_transfer in enumerate(known_transfers)
        }
        hits = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in transfers:
            ends = restorable_ends(transfer, presence_by_pool.get(_text(transfer.name), [False] * pages))
            if restorable and ends:
                hits[transfer.name] = max(ends)
            restorable &= ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_pools(transfers, self._pool.get_values)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_pools(transfers, self._pool.put_values)

    def _move_pools(self, transfers: list[Any], move: Callable[[Sequence[Value]], list[bool]]) -> dict[str, list[bool]]:
        """All pools' pages in one call of the store."""
        moved: dict[str, list[bool]] = {}
        values, parts = list[Value](), list[tuple[Any, int]]()
        for transfer in transfers:
            keys, pool = list(transfer.keys or []), self._pool_of(transfer.name)
            moved[transfer.name] = [False] * len(keys)
            pages = (
                self._page_values(_text(transfer.name), pool, keys, transfer.host_indices) if pool is not None else None
            )
            if pages:
                parts.append((transfer.name, len(pages)))
                values += pages
        results, first = move(values), 0
        for name, count in parts:
            moved[name] = results[first : first + count]
            first += count
        return moved

    def _pool_of(self, name: Any) -> Any:
        return self.mem_pool_host if _text(name) == _KV else self.registered_pools.get(name)

    # -- tensors one by one: SGLang's path without interface_v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Each target, filled; None: there is no such page, or its target is no contiguous tensor of the host's."""
        targets = list(target_locations or [None] * len(keys))
        usable = [index for index, target in enumerate(targets) if _is_usable(target)]
        read = self._pool.get_values([self._tensor_value(keys[index], targets[index]) for index in usable])
        filled = {index for index, was_read in zip(usable, read, strict=True) if was_read}
        return [target if index in filled else None for index, target in enumerate(targets)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        if values is None or any(value is None for value in values):
            return False
        tensors = [value.detach().cpu().contiguous() for value in values]
        return all(
            self._pool.put_values([self._tensor_value(key, tensor) for key, tensor in zip(keys, tensors, strict=True)])
        )

    def _tensor_value(self, key: str, tensor: Any) -> Value:
        pieces = [(tensor.data_ptr(), tensor.numel() * tensor.element_size())]
        return Value(self._value_name(_KV, key), pieces, str(tensor.dtype).encode())

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # -- the rest

    def clear(self) -> bool:
        """Forget what this rank has named: its model, ranks and shape of KV."""
        return self._pool.clear(*self._prefixes.values())

    def close(self) -> None:
        """Called by SGLang when it detaches the backend."""
        self._pool.close()


def _text(name: Any) -> str:
    return str(getattr(name, "value", name))


def _flat(nested: Sequence[Any]) -> list[int]:
    return [int(item) for part in nested for item in (part if isinstance(part, Sequence) else [part])]


def _is_usable(target: Any) -> bool:
    return target is not None and target.device.type == "cpu" and target.is_contiguous()


def restorable_ends(transfer: Any, has: Sequence[bool]) -> set[int]:
    """The lengths of prefixes, in pages, for which a pool has what it must."""
    count = len(has)
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, (list(has).index(False) if False in has else count) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or []))
        return {end for end in range(1, count + 1) if all(has[max(0, end - window) : end])}
    raise ValueError(f"pool {transfer.name}: memserve knows no hit policy {transfer.hit_policy}")
