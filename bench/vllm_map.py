"""What a vLLM server's prefix cache really holds: its own map from block hashes to blocks, on a socket.

Loaded inside vLLM as a plug-in (``vllm.general_plugins``): it remembers the block pool when vLLM makes one, and changes
nothing. Each connection to the Unix socket ``$VLLM_MAP_SOCKET`` gets one JSON list of ``[hash, group, copies]``; hashes
are written as KV events name them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any


def register() -> None:
    """The plug-in's entry point."""
    from vllm.v1.core.block_pool import BlockPool

    if hasattr(BlockPool, "map_is_shown"):
        return
    make, BlockPool.map_is_shown = BlockPool.__init__, True

    def make_and_show(pool: Any, *args: Any, **kwargs: Any) -> None:
        make(pool, *args, **kwargs)
        threading.Thread(target=show, args=(pool, os.environ["VLLM_MAP_SOCKET"]), daemon=True).start()

    BlockPool.__init__ = make_and_show


def rows(pool: Any) -> list[tuple[int | str, int, int]]:
    """The pool's map now."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

    results = []
    for key, blocks in pool.cached_block_hash_to_block._cache.copy().items():
        item = maybe_convert_block_hash(get_block_hash(key))
        copies = len(blocks) if isinstance(blocks, dict) else 1
        results.append((item if isinstance(item, int) else item.hex(), get_group_id(key), copies))
    return results


def show(pool: Any, path: str) -> None:
    """Answer each connection."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(json.dumps(rows(pool)).encode())
