"""MemserveConnector whose loads fail at random, for ``bench/vllm_connector.py --only failures``; loaded by vLLM.

Of the blocks that a load has brought, ``SHARE`` are filled with bytes that no KV has, and reported as failed, as if the
store had lost them in between: vLLM has to compute them again, or its answers differ. Every ``LOST_EVERY``th load fails
as a whole.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from itertools import count
from typing import Any

from memserve.integrations.store_cache import Value
from memserve.integrations.vllm.connector import MemserveConnector

SHARE = 0.15
LOST_EVERY = 5
_RUBBISH = 0x7F
"""As float32 or bfloat16 it is about 3e38: no token comes out right that was computed with it."""


class FaultyConnector(MemserveConnector):
    """Everything but loads is as ever."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        for worker in self._worker_sides():
            _break(worker._pool)


def _break(pool: Any) -> None:
    rng, loads, get = random.Random(6), count(1), pool.get

    def failing(values: Sequence[Value]) -> list[bool]:
        results, is_lost = get(values), next(loads) % LOST_EVERY == 0
        for place, value in enumerate(values):
            if is_lost or rng.random() < SHARE:
                results[place] = False
                for address, nbytes in value.pieces:
                    ctypes.memset(address, _RUBBISH, nbytes)
        lost = results.count(False)
        if lost:
            print(f"faulty connector: {lost} of {len(values)} blocks dropped", flush=True)
        return results

    vars(pool)["get"] = failing
