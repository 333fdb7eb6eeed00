"""memserve: serves large language models from a cluster with a KV cache that is one elastic memory pool.

The public names are imported when first used, so that ``import memserve`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memserve.client.async_client import AsyncStoreClient
    from memserve.client.store_client import StoreClient
    from memserve.errors import StoreUnavailable, UserError
    from memserve.llm import LLM
    from memserve.mempool.mempool import MemPool
    from memserve.runtime.pool_peer import PoolPeer
    from memserve.types import SamplingParams

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncStoreClient",
    "MemPool",
    "PoolPeer",
    "SamplingParams",
    "StoreClient",
    "StoreUnavailable",
    "UserError",
    "__version__",
]

_HOMES = {
    "AsyncStoreClient": "memserve.client.async_client",
    "LLM": "memserve.llm",
    "MemPool": "memserve.mempool.mempool",
    "PoolPeer": "memserve.runtime.pool_peer",
    "SamplingParams": "memserve.types",
    "StoreClient": "memserve.client.store_client",
    "StoreUnavailable": "memserve.errors",
    "UserError": "memserve.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
