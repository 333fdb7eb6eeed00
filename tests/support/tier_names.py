"""Names of memory tiers for tests, and their files."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_numbers = itertools.count()


def new_tier_name() -> str:
    """Of no other test of this host."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def tier_files(name: str) -> list[Path]:
    """What there is of a tier."""
    return sorted(SHARED_MEMORY.glob(f"memserve-store-{name}.*"))


def remove_tier_files(name: str) -> None:
    """What a killed owner left."""
    for path in tier_files(name):
        path.unlink(missing_ok=True)
