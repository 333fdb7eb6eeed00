"""When vLLM's KV is an instance's, and how its blocks are called there: what ``share_with_memserve`` stands on.

Both compute the same numbers from the same weights, but for the last bits of each engine's own kernels. A block may be
exchanged where model, dtype, tokens of a block and the order of its bytes are equal; each of them is checked here, or
is in the block's identity.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memserve import _core
from memserve.errors import UserError
from memserve.mempool.identity import namespace_id
from memserve.model.loading.cache import fingerprint
from memserve.store_messages import KEY_BYTES, KvModel
from memserve.types import KVGeometry

_HINT = 'leave "share_with_memserve" out, or change that'
_LAYER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ``kv_connector_extra_config`` says of it."""

    is_on: bool
    tenant: str
    """Of the instances' requests; empty: those without an API key."""
    others: dict[str, Any]
    """All other options."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Sharing:
        """Raises :class:`UserError` for values that cannot be."""
        others = dict(extra)
        is_on, tenant = others.pop("share_with_memserve", False), others.pop("memserve_tenant", "")
        if not isinstance(is_on, bool) or not isinstance(tenant, str):
            hint = '"share_with_memserve": true, and a name as "memserve_tenant"'
            raise UserError("sharing is on or off, with one tenant of memserve's", hint=hint)
        return cls(is_on, tenant, others)


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
    kinds = [one for one in (scaling, *scaling.values()) if isinstance(one, Mapping)]  # of all layers, or by type
    return any((one.get("rope_type") or one.get("type")) in ("longrope", "dynamic") for one in kinds)


def check_layout(caches: Mapping[str, Any], num_blocks: int, geometry: KVGeometry, isa: str) -> None:
    """Raise :class:`UserError` unless vLLM's own operation puts keys and values where instances have them.

    ``caches``: tensors of the layers by name; ``isa``: vLLM's name for the way in which its operation packs them.
    """
    torch, tensors = sys.modules["torch"], list(caches.values())
    numbers = [int(found[0]) for name in caches if (found := _LAYER.findall(name))]
    if numbers != sorted(set(numbers)) or len(numbers) != len(tensors):
        raise UserError("the layers of vLLM's KV are in an order of their own", hint=_HINT)
    heads, tokens, width = geometry.num_kv_heads, geometry.block_tokens, geometry.head_dim_k
    for tensor in tensors:
        whole = tensor[0].is_contiguous() and tensor[0].numel() * tensor.element_size() == geometry.page_bytes
        if tensor.shape[0] != num_blocks or not whole:
            raise UserError("a page of vLLM's KV is not one piece of memory", hint=_HINT)
    drawn = torch.Generator().manual_seed(1)
    given = torch.randn(2, tokens, heads, width, generator=drawn).to(tensors[0].dtype)
    page = torch.zeros(1, heads, 2 * tokens, width, dtype=tensors[0].dtype)
    key_cache, value_cache = page.chunk(2, dim=2)
    from vllm import _custom_ops as ops

    ops.cpu_attn_reshape_and_cache(given[0], given[1], key_cache, value_cache, torch.arange(tokens), isa)
    wanted = torch.stack(
        [given[0].permute(1, 2, 0).reshape(heads, -1), given[1].permute(1, 0, 2).reshape(heads, -1)], 1
    )
    if geometry.head_dim_v != width or not torch.equal(page.reshape(heads, 2, -1), wanted):
        raise UserError(f"vLLM packs KV for this processor's {isa!r} units, unlike memserve", hint=_HINT)


class Identities:
    """Identities of blocks by request, as far as they are known."""

    def __init__(self, tenant: str, model: KvModel, key: bytes) -> None:
        """``tenant``: of memserve's; ``key``: of the cluster's identities."""
        self._key, self._block_tokens = key, model.geometry.block_tokens
        self._root = namespace_id(tenant, model.namespace, key)
        self._known: dict[str, list[bytes]] = {}

    def of(self, request: Any, blocks: int) -> list[bytes]:
        """Of the first ``blocks`` blocks, as many as have all their tokens."""
        known = self._known.setdefault(request.request_id, [])
        size = self._block_tokens
        end = min(blocks, request.num_tokens // size)
        if len(known) < end:
            tokens = np.array(request.all_token_ids[len(known) * size : end * size], np.int32)
            packed = _core.block_identities(self._key, known[-1] if known else self._root, tokens, size)
            known += [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        return known[:blocks]

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._known.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._known)
