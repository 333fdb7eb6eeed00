"""KV blocks of instances in a store, as vLLM reads and writes them: the bytes alone, compared with the store's seals.

A value of an engine's own has its checksums behind it; a KV block has none, since instances read blocks in place. Its
seal is in the store's index, and is asked for with the block.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.client.store_client import StoreClient
from memserve.client.views import View
from memserve.integrations.block_pool import AT_ONCE, BlockPool, drop
from memserve.integrations.values import Piece, Value, address, copied, places
from memserve.integrations.vllm.lookups import RankNames


@dataclass(frozen=True, slots=True)
class KvBlock(Value):
    """All pages of a block, and nothing behind them."""

    @property
    def stored_bytes(self) -> int:
        """The pages alone."""
        return self.payload_bytes

    def tail(self, seals: NDArray[np.uint64]) -> bytes:
        """None."""
        return b""


class KvNames(RankNames):
    """Blocks by their identities."""

    def name(self, block_hash: bytes) -> bytes:
        """The identity itself."""
        return block_hash

    def value(self, block_hash: bytes, pieces: Sequence[Piece] | None = None) -> Value:
        """As :meth:`RankNames.value`."""
        return KvBlock(block_hash, pieces or [(0, nbytes) for nbytes in self.layout.piece_bytes])


class KvPool(BlockPool):
    """As :class:`BlockPool`, of KV blocks: also those that instances of memserve have computed."""

    def clear(self, *prefixes: bytes) -> bool:
        """Forget all KV blocks. False: the store is away."""
        return self._ask(lambda client, end_s: client.purge(timeout_s=end_s - time.monotonic()) >= 0, False)

    def _hold(self, client: StoreClient, values: Sequence[Value], views: list[View], end_s: float) -> int:
        if not client.is_mapped:
            return super()._hold(client, values, views, end_s)
        for first in range(0, len(values), AT_ONCE):
            some = values[first : first + AT_ONCE]
            sealed = client.bring_sealed([one.name for one in some], timeout_s=max(0.0, end_s - time.monotonic()))
            for at, (value, (length, seal)) in enumerate(zip(some, sealed, strict=True), first):
                view = client.get_held(value.name) if length == value.stored_bytes else None
                if view is None:
                    return at
                views.append(view)
                if self._seal(view.data) != seal:
                    drop([views.pop()])
                    self._forget(client, [value.name], end_s)
                    return at
        return len(values)

    def _seal(self, data: memoryview) -> int:
        return int(_core.seal_ranges(address(data), np.zeros(1, np.int64), len(data), int(self.options.threads))[0])

    def _get_some(
        self, client: StoreClient, values: Sequence[Value], numbers: list[int], found: list[bool], end_s: float
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
                for source, (target, nbytes) in places(value, address(data))
            ]
            copied(moves, int(self.options.threads))
            for number, value, data, wanted in read:
                found[number] = wanted is None or self._seal(data) == wanted
                if not found[number]:
                    damaged.append(value.name)
        finally:
            drop(views)
        return damaged
