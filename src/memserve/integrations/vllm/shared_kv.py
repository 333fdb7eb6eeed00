"""KV blocks of instances in a store, as vLLM reads and writes them: the bytes alone, compared with the store's seals.

A value of an engine's own has its checksums behind it; a KV block has none, since instances read blocks in place. Its
seal is in the store's index, and is asked for with the block.

When vLLM's KV is an instance's, and how its blocks are called there: what ``share_with_memserve`` stands on.

Both compute the same numbers from the same weights, but for the last bits of each engine's own kernels. A block may be
exchanged where model, dtype, tokens of a block and the order of its bytes are equal; each of them is checked here, or
is in the block's identity.

Which blocks of which engines are the same: everything that decides what the bytes under a hash of vLLM's mean.

Which of vLLM's groups of KV are kept, and what a prefix needs of each.

Layers of one kind form a group with a block table of its own: full attention beside sliding windows, in most models.
All groups here have blocks of as many tokens, so that one hash names the blocks of all.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.base.units import ceil_div
from memserve.integrations.block_cache import AT_ONCE, BlockCache, drop_views
from memserve.integrations.store_cache import Piece, Value, address_of, copy_pieces, namespace, piece_places
from memserve.integrations.vllm.lookups import RankNames
from memserve.integrations.vllm.memory import BlockLayout
from memserve.kv.identity import namespace_id
from memserve.kv.store_shares import split_keys
from memserve.model.loading.cache import fingerprint
from memserve.protocol.store import KvModel
from memserve.store.client.client import StoreClient
from memserve.store.client.memory import View


@dataclass(frozen=True, slots=True)
class KvBlock(Value):
    """All pages of a block, and nothing behind them."""

    @property
    def stored_bytes(self) -> int:
        """The pages alone."""
        return self.payload_bytes

    def encode_tail(self, seals: NDArray[np.uint64]) -> bytes:
        """None."""
        return b""


class KvNames(RankNames):
    """Blocks by their identities."""

    def name_of(self, block_hash: bytes) -> bytes:
        """The identity itself."""
        return block_hash

    def value_of(self, block_hash: bytes, pieces: Sequence[Piece] | None = None) -> Value:
        """As :meth:`RankNames.value_of`."""
        return KvBlock(block_hash, pieces or [(0, nbytes) for nbytes in self.layout.piece_bytes])


class KvPool(BlockCache):
    """As :class:`BlockCache`, of KV blocks: also those that instances of memserve have computed."""

    def clear(self, *prefixes: bytes) -> bool:
        """Forget all KV blocks. False: the store is away."""
        return self._call_store(lambda client, end_s: client.purge(timeout_s=end_s - time.monotonic()) >= 0, False)

    def _hold_compared(self, client: StoreClient, values: Sequence[Value], views: list[View], end_s: float) -> int:
        if not client.is_mapped:
            return super()._hold_compared(client, values, views, end_s)
        for first in range(0, len(values), AT_ONCE):
            batch = values[first : first + AT_ONCE]
            sealed = client.bring_sealed([block.name for block in batch], timeout_s=max(0.0, end_s - time.monotonic()))
            for index, (value, (length, seal)) in enumerate(zip(batch, sealed, strict=True), first):
                view = client.get_held(value.name) if length == value.stored_bytes else None
                if view is None:
                    return index
                views.append(view)
                if self._checksum_of(view.data) != seal:
                    drop_views([views.pop()])
                    self._delete_damaged(client, [value.name], end_s)
                    return index
        return len(values)

    def _checksum_of(self, data: memoryview) -> int:
        return int(_core.seal_ranges(address_of(data), np.zeros(1, np.int64), len(data), int(self.options.threads))[0])

    def _get_portion(
        self, client: StoreClient, values: Sequence[Value], numbers: list[int], hits: list[bool], end_s: float
    ) -> list[bytes]:
        """Copy, and compare what was copied from: a block stays as it is while it is held."""
        names, damaged, views = [value.name for value in values], list[bytes](), list[View]()
        try:
            left_s = max(0.0, end_s - time.monotonic())
            sealed = client.bring_sealed(names, timeout_s=left_s)
            read = list[tuple[int, Value, memoryview, int | None]]()
            for number, value, (length, seal) in zip(numbers, values, sealed, strict=True):
                if length != value.stored_bytes:
                    continue
                view = client.get_held(value.name)
                if view is not None:
                    views.append(view)
                    read.append((number, value, view.data, seal))
                elif (
                    copy := client.get_copies([value.name], timeout_s=max(0.0, end_s - time.monotonic()))[0]
                ) is not None:
                    read.append((number, value, copy, None))  # it was compared when it came
            moves = [
                (target, source, nbytes)
                for _, value, data, _ in read
                for source, (target, nbytes) in piece_places(value, address_of(data))
            ]
            copy_pieces(moves, int(self.options.threads))
            for number, value, data, expected in read:
                hits[number] = expected is None or self._checksum_of(data) == expected
                if not hits[number]:
                    damaged.append(value.name)
        finally:
            drop_views(views)
        return damaged


_HINT = 'leave "share_with_memserve" out, or change that'
_LAYER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ``kv_connector_extra_config`` says of it."""

    is_on: bool
    tenant: str
    """Of the instances' requests; empty: those without an API key."""
    other_options: dict[str, Any]
    """All other options."""

    @classmethod
    def from_config(cls, extra: Mapping[str, Any]) -> Sharing:
        """Raises :class:`UserError` for values that cannot be."""
        other_options = dict(extra)
        is_on, tenant = other_options.pop("share_with_memserve", False), other_options.pop("memserve_tenant", "")
        if not isinstance(is_on, bool) or not isinstance(tenant, str):
            hint = '"share_with_memserve": true, and a name as "memserve_tenant"'
            raise UserError("sharing is on or off, with one tenant of memserve's", hint=hint)
        return cls(is_on, tenant, other_options)


def is_plain(request: Any) -> bool:
    """Whether its KV follows from its tokens alone: others keep the names that vLLM gives their blocks."""
    more = ("mm_features", "lora_request", "cache_salt", "prompt_embeds")
    return not any(getattr(request, name, None) is not None and len_of(getattr(request, name)) for name in more)


def len_of(value: Any) -> int:
    """1 of what has no length."""
    return len(value) if hasattr(value, "__len__") else 1


def model_of(config: Any, caches: Any) -> KvModel:
    """Whose KV it is, in memserve's words. Raises :class:`UserError` where instances have no such KV.

    ``config``: vLLM's; ``caches``: what it keeps, of one group of layers.
    """
    model, parallel, group = config.model_config, config.parallel_config, caches.kv_cache_groups[0]
    spec, layers = group.kv_cache_spec, len(group.layer_names)
    dtype = str(spec.dtype).removeprefix("torch.")
    folder = Path(str(model.model))
    why_not = {
        f"{len(caches.kv_cache_groups)} groups of KV": len(caches.kv_cache_groups) > 1,
        "weights spread over workers": parallel.world_size > 1,
        f"{type(spec).__name__}": type(spec).__name__ != "FullAttentionSpec",
        "quantized weights": getattr(model, "quantization", None) is not None,
        "overridden configuration": bool(getattr(model, "hf_overrides", None)),
        f"KV as {config.cache_config.cache_dtype}": dtype != str(model.dtype).removeprefix("torch."),
        "layers that are no layers of the model": layers != model.hf_config.get_text_config().num_hidden_layers,
        "positions that depend on a prompt's length": has_regimes(model.hf_config.get_text_config()),
        f"a model that is no folder here ({folder})": not (folder / "config.json").is_file(),
    }
    reasons = [reason for reason, is_so in why_not.items() if is_so]
    if reasons:
        raise UserError(f"memserve's instances have no KV like that: {', '.join(reasons)}", hint=_HINT)
    head_dim_v = getattr(spec, "head_size_v", None) or spec.head_size
    geometry = KVGeometry(layers, spec.num_kv_heads, spec.head_size, head_dim_v, dtype, spec.block_size)
    return KvModel(fingerprint(folder), geometry)


def has_regimes(config: Any) -> bool:
    """Whether a model's positions depend on lengths: instances keep such KV apart by the prompt's, vLLM does not."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [
        scheme for scheme in (scaling, *scaling.values()) if isinstance(scheme, Mapping)
    ]  # of all layers, or by type
    return any((scheme.get("rope_type") or scheme.get("type")) in ("longrope", "dynamic") for scheme in kinds)


def check_layout(caches: Mapping[str, Any], num_blocks: int, geometry: KVGeometry, isa: str) -> None:
    """Raise :class:`UserError` unless vLLM's own operation puts keys and values where instances have them.

    ``caches``: tensors of the layers by name; ``isa``: vLLM's name for the way in which its operation packs them.
    """
    torch, tensors = sys.modules["torch"], list(caches.values())
    numbers = [int(layer_numbers[0]) for name in caches if (layer_numbers := _LAYER.findall(name))]
    if numbers != sorted(set(numbers)) or len(numbers) != len(tensors):
        raise UserError("the layers of vLLM's KV are in an order of their own", hint=_HINT)
    heads, tokens, width = geometry.num_kv_heads, geometry.block_tokens, geometry.head_dim_k
    for tensor in tensors:
        whole = tensor[0].is_contiguous() and tensor[0].numel() * tensor.element_size() == geometry.page_bytes
        if tensor.shape[0] != num_blocks or not whole:
            raise UserError("a page of vLLM's KV is not one piece of memory", hint=_HINT)
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(2, tokens, heads, width, generator=generator).to(tensors[0].dtype)
    page = torch.zeros(1, heads, 2 * tokens, width, dtype=tensors[0].dtype)
    key_cache, value_cache = page.chunk(2, dim=2)
    from vllm import _custom_ops as ops

    ops.cpu_attn_reshape_and_cache(sample[0], sample[1], key_cache, value_cache, torch.arange(tokens), isa)
    expected = torch.stack(
        [sample[0].permute(1, 2, 0).reshape(heads, -1), sample[1].permute(1, 0, 2).reshape(heads, -1)], 1
    )
    if geometry.head_dim_v != width or not torch.equal(page.reshape(heads, 2, -1), expected):
        raise UserError(f"vLLM packs KV for this processor's {isa!r} units, unlike memserve", hint=_HINT)


class Identities:
    """Identities of blocks by request, as far as they are known."""

    def __init__(self, tenant: str, model: KvModel, key: bytes) -> None:
        """``tenant``: of memserve's; ``key``: of the cluster's identities."""
        self._key, self._block_tokens = key, model.geometry.block_tokens
        self._root = namespace_id(tenant, model.namespace, key)
        self._by_request: dict[str, list[bytes]] = {}

    def identities_of(self, request: Any, blocks: int) -> list[bytes]:
        """Of the first ``blocks`` blocks, as many as have all their tokens."""
        identities = self._by_request.setdefault(request.request_id, [])
        size = self._block_tokens
        end = min(blocks, request.num_tokens // size)
        if len(identities) < end:
            tokens = np.array(request.all_token_ids[len(identities) * size : end * size], np.int32)
            packed = _core.block_identities(self._key, identities[-1] if identities else self._root, tokens, size)
            identities += split_keys(packed)
        return identities[:blocks]

    def forget_request(self, request_id: str) -> None:
        """The request is over."""
        self._by_request.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._by_request)


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


def prefix_of(config: Any, user_namespace: str, backends: tuple[str, ...], version: str, layout: BlockLayout) -> bytes:
    """The begin of the names of one worker's values.

    ``config``: vLLM's; ``user_namespace``: what the user adds; ``backends``: names of the attention backends;
    ``version``: of vLLM, whose releases change how a backend packs KV.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return namespace(
        "vllm",
        given=user_namespace,
        version=version,
        weights=weights_fingerprint(str(model.model), getattr(model, "revision", None)),
        model=_model_digest(model),
        dtype=str(model.dtype),
        cache_dtype=str(cache.cache_dtype),
        block_tokens=cache.block_size,
        hashing=str(getattr(cache, "prefix_caching_hash_algo", "")),
        quantization=str(getattr(model, "quantization", None)),
        backends=backends,
        packing=_host_packing(),
        layout=layout.digest.hex(),
        rank=parallel.rank % parallel.world_size,
        ranks=(parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
    )


def weights_fingerprint(model: str, revision: str | None) -> str:
    """Of a model on this host: sizes and samples of its files, wherever they lie. Of any other: name and revision."""
    path = Path(model)
    if path.is_dir():
        files = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    else:
        files = [path] if path.is_file() else []
    if not files:
        return f"{model}@{revision}"
    digest = blake2b(digest_size=16)
    for file in files:
        nbytes = file.stat().st_size
        digest.update(f"{file.name} {nbytes} ".encode())
        with file.open("rb") as opened:
            for number in range(_SAMPLES):
                opened.seek(max(0, nbytes - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _model_digest(model: Any) -> str:
    """Of the configuration that the engine runs with, overrides included; where it was read from does not matter."""
    facts = dict(model.hf_config.to_dict()) if hasattr(model.hf_config, "to_dict") else {}
    for name in ("_name_or_path", "transformers_version"):
        facts.pop(name, None)
    text = json.dumps([facts, str(getattr(model, "hf_overrides", None))], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _host_packing() -> str:
    """On a CPU, matrix units decide how vLLM packs KV."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    return " ".join(flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {flag}" in flags)


_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWED = "SlidingWindowSpec"


def tails_of(groups: Sequence[Any]) -> list[int | None]:
    """For each group: the last blocks of a prefix that it needs, as many as its window reaches; None: all."""
    return [
        ceil_div(group.kv_cache_spec.sliding_window - 1, group.kv_cache_spec.block_size)
        if type(group.kv_cache_spec).__name__ == _WINDOWED
        else None
        for group in groups
    ]


def why_not_kept(config: Any, caches: Any, *, tells_requests: bool) -> str:
    """Why this engine's KV is not kept. Empty: it is.

    ``config``: vLLM's; ``caches``: its KVCacheConfig; ``tells_requests``: vLLM can be told that a request's load
    failed, and not only that of blocks.
    """
    groups = caches.kv_cache_groups if caches is not None else []
    if not groups:
        return "the model has no KV"
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    strange = [kind for kind in kinds if kind not in (*_FULL, _WINDOWED)]
    if strange:
        return _why_unsupported(sorted(set(strange)))
    if _WINDOWED in kinds or len(groups) > 1:
        if not tells_requests:
            return "this vLLM cannot be told that a load failed whose window is then not there (0.30 can)"
        if any(getattr(group, "is_eagle_group", False) for group in groups) and _WINDOWED in kinds:
            return "drafts beside sliding windows look one block further back"
        if not all(getattr(group, "enable_kv_transfer", True) for group in groups):
            return "some groups of the model's KV are not to be copied"
        sizes = sorted({group.kv_cache_spec.block_size for group in groups})
        if len(sizes) > 1:
            return f"groups of KV have blocks of {' and '.join(map(str, sizes))} tokens, so that their hashes differ"
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
        return "decode context parallelism spreads a block over workers"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off, so that blocks have no hashes (--enable-prefix-caching)"
    if groups[0].kv_cache_spec.block_size % hash_tokens_of(config, caches):
        return "blocks do not end where hashes do"
    return ""


def _why_unsupported(kinds: Sequence[str]) -> str:
    if "MambaSpec" in kinds:
        return "a state is all of a prefix and no block of it: vLLM's own copies of states have no hash to be found by"
    return f"KV of {', '.join(kinds)} is not understood"


def hash_tokens_of(config: Any, caches: Any) -> int:
    """Tokens of one of vLLM's block hashes."""
    hash_tokens = getattr(caches, "hash_block_size", None) or getattr(config.cache_config, "hash_block_size", None)
    return int(hash_tokens or caches.kv_cache_groups[0].kv_cache_spec.block_size)
