"""Pages of an engine's beside a real store: host memory, values in it, and damage to what the store keeps."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memserve.integrations.store_cache import Value, name_in
from served_store import ServedStore

PAGE_BYTES = 24_576
OPTIONS = {"timeout_s": 20.0, "staging_bytes": 64 << 20}
"""A busy machine is no reason for a miss."""


def options_of(store: ServedStore, **others: Any) -> dict[str, Any]:
    """As an engine's configuration has them."""
    return {"pool": store.address, "secret_file": str(store.secret_file), **OPTIONS, **others}


def pages(count: int, seed: int = 1, nbytes: int = PAGE_BYTES) -> NDArray[np.uint8]:
    """``[count, nbytes]``, each page another one."""
    return np.random.default_rng(seed).integers(0, 256, (count, nbytes), dtype=np.uint8)


def values_of(memory: NDArray[np.uint8], prefix: bytes, names: list[str] | None = None) -> list[Value]:
    """Each row in two pieces; ``memory`` has to live as long as they are used."""
    half, found = memory.shape[1] // 2, []
    for at, row in enumerate(memory):
        key = names[at] if names else str(at)
        first = row.ctypes.data
        found.append(Value(name_in(prefix, key.encode()), [(first, half), (first + half, memory.shape[1] - half)]))
    return found


def flip_byte(store: ServedStore, needle: bytes) -> int:
    """Damage what the store has in memory: one bit behind each ``needle``; how many there were."""
    flipped = 0
    for path in Path("/dev/shm").glob(f"memserve-store-{store.name[:24]}*"):
        if not path.stat().st_size:
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size) as memory:
            at = memory.find(needle)
            while at >= 0:
                memory[at + len(needle)] ^= 1
                flipped += 1
                at = memory.find(needle, at + 1)
    return flipped
