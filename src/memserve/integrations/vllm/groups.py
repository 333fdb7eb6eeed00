"""Which of vLLM's groups of KV are kept, and what a prefix needs of each.

Layers of one kind form a group with a block table of its own: full attention beside sliding windows, in most models.
All groups here have blocks of as many tokens, so that one hash names the blocks of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memserve.units import ceil_div

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
        return _why_strange(sorted(set(strange)))
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


def _why_strange(kinds: Sequence[str]) -> str:
    if "MambaSpec" in kinds:
        return "a state is all of a prefix and no block of it: vLLM's own copies of states have no hash to be found by"
    return f"KV of {', '.join(kinds)} is not understood"


def hash_tokens_of(config: Any, caches: Any) -> int:
    """Tokens of one of vLLM's block hashes."""
    found = getattr(caches, "hash_block_size", None) or getattr(config.cache_config, "hash_block_size", None)
    return int(found or caches.kv_cache_groups[0].kv_cache_spec.block_size)
