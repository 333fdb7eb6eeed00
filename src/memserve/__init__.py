"""memserve: serves large language models from a cluster with a KV cache that is one elastic memory pool.

The public names are imported when first used, so that ``import memserve`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memserve import _moved

if TYPE_CHECKING:
    from memserve.api.llm import LLM
    from memserve.base.errors import StoreUnavailable, UserError
    from memserve.base.types import SamplingParams
    from memserve.host.pool_peer import PoolPeer
    from memserve.kv.mempool import MemPool
    from memserve.store.client.async_client import AsyncStoreClient
    from memserve.store.client.client import StoreClient

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
    "AsyncStoreClient": "memserve.store.client.async_client",
    "LLM": "memserve.api.llm",
    "MemPool": "memserve.kv.mempool",
    "PoolPeer": "memserve.host.pool_peer",
    "SamplingParams": "memserve.base.types",
    "StoreClient": "memserve.store.client.client",
    "StoreUnavailable": "memserve.base.errors",
    "UserError": "memserve.base.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


_moved.install()
