"""Parts of ``scripts/gpu_check.py`` that go wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator


def good() -> Iterator[dict[str, object]]:
    yield {"what": "one and one", "ok": True, "sum": 2}


def breaks() -> Iterator[dict[str, object]]:
    yield {"what": "before it broke", "ok": True}
    raise ValueError("a part of it | is broken")


def dies() -> Iterator[dict[str, object]]:
    yield {"what": "before it died", "ok": True}
    os.abort()


def hangs() -> Iterator[dict[str, object]]:
    threading.Event().wait()
    yield {}


def fails() -> Iterator[dict[str, object]]:
    yield {"what": "one and two", "ok": False, "sum": 4}
    yield {"what": "32 rows", "target": "attention of a decode", "share": 0.9}
    yield {"what": "64 rows", "target": "attention of a decode", "share": 0.55}
