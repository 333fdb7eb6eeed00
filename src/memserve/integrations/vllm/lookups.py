"""The scheduler's side of the store: which blocks of a prompt are there, as they were stored, and stay there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from memserve.client.views import View
from memserve.integrations.block_pool import BlockPool, drop
from memserve.integrations.jobs import Jobs
from memserve.integrations.values import Piece, Value, name_in
from memserve.integrations.vllm.memory import BlockLayout

_THREADS = 2
_WAITING_MAX = 256
"""Look-ups under way; further requests compute."""


@dataclass(frozen=True, slots=True)
class RankNames:
    """How the values of one worker are named, and what they look like."""

    prefix: bytes
    layout: BlockLayout

    def name(self, block_hash: bytes) -> bytes:
        """Of a block. vLLM's hash has all tokens up to the block's end, salt, LoRA and images in it."""
        return name_in(self.prefix, block_hash)

    def value(self, block_hash: bytes, pieces: Sequence[Piece] | None = None) -> Value:
        """In these pieces of memory. None: to compare with, its pieces have lengths and no addresses."""
        if pieces is None:
            pieces = [(0, nbytes) for nbytes in self.layout.piece_bytes]
        return Value(self.name(block_hash), pieces, self.layout.digest)


@dataclass(slots=True, eq=False)
class _LookUp:
    blocks: int
    """That are to be held."""
    views: list[View] = field(default_factory=list)
    count: int | None = None
    """None: it is under way."""
    is_forgotten: bool = False


class Lookups:
    """Look-ups by request. A block is there when the values of all workers are."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._ranks: list[RankNames] = []
        self._jobs = Jobs(_THREADS, _WAITING_MAX)
        self._changed = threading.Lock()
        self._open: dict[str, _LookUp] = {}

    def set_ranks(self, ranks: Sequence[RankNames]) -> None:
        """What the workers have said. None are known: nothing is found."""
        self._ranks = list(ranks)

    @property
    def is_known(self) -> bool:
        """Whether the workers have said how they name values."""
        return bool(self._ranks)

    def prefix_at_once(self, hashes: Sequence[bytes]) -> int | None:
        """How many blocks seem to be there, from the first on; None: the store has to be asked."""
        counts = [self.pool.prefix_at_once([rank.name(one) for one in hashes]) for rank in self._ranks]
        known = [count for count in counts if count is not None]
        return min(known, default=0) if len(known) == len(counts) else None

    def missing_at_once(self, hashes: Sequence[bytes]) -> list[bool]:
        """Whether the store lacks a value of a block, as far as is known without asking it."""
        missing = [False] * len(hashes)
        for rank in self._ranks:
            for at, there in enumerate(self.pool.exists_at_once([rank.name(one) for one in hashes])):
                missing[at] = missing[at] or not there
        return missing

    def has_room(self, blocks: int) -> bool:
        """Whether so many can be held beside those of other requests. A request alone always may: it gets what fits."""
        if not self._open:
            return True
        blocks += sum(one.blocks for one in self._open.values())
        sizes = [rank.value(b"").stored_bytes for rank in self._ranks]
        return self.pool.may_hold(blocks * len(sizes), blocks * sum(sizes))

    def begin(self, request_id: str, hashes: Sequence[bytes]) -> bool:
        """Have these blocks held and compared. False: too much is under way."""
        one, values = _LookUp(len(hashes)), [[rank.value(block) for block in hashes] for rank in self._ranks]

        def look() -> None:
            count, views = 0, list[View]()
            try:
                found = [self.pool.hold(of_rank) for of_rank in values]
                count, views = min(count for count, _ in found), [view for _, held in found for view in held]
            finally:
                with self._changed:
                    one.count = count
                    if not one.is_forgotten:
                        one.views, views = views, []
                drop(views)

        self.forget(request_id)
        if not self._jobs.start(look):
            return False
        self._open[request_id] = one
        return True

    def result(self, request_id: str) -> int | None:
        """How many blocks are held, from the first on; None: it is not known yet."""
        return self._open[request_id].count

    def forget(self, request_id: str) -> None:
        """Hold the request's blocks no longer."""
        one = self._open.pop(request_id, None)
        if one is not None:
            with self._changed:
                one.is_forgotten = True
                views, one.views = one.views, []
            drop(views)

    @property
    def held(self) -> int:
        """Requests with look-ups or blocks."""
        return len(self._open)

    def forget_everything(self) -> bool:
        """Forget all values of these workers in the store, too. False: the store was away."""
        return self.pool.clear(*[rank.prefix for rank in self._ranks]) if self._ranks else True

    def close(self) -> None:
        """Give everything back."""
        for request_id in list(self._open):
            self.forget(request_id)
        self._jobs.close()
        self.pool.close()
