"""The workers of one instance while a step is computed: what a layer of one needs from the others.

Modules that were cut (:mod:`memserve.model.workers.sharding`) call the functions here; the device installs its crew
around the forward, as it does with the step's attention. Without one, while a forward is captured and compared, nothing
is exchanged: values made up here stand in for those of the others, which is all that a comparison needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memserve import _core, _kernels
from memserve.base.kv_layout import Share
from memserve.model.capture.operations import DTYPE_CODES


class GroupExchange(Protocol):
    """What cut modules call."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the workers of a stage."""

    def receive(self, x: Tensor) -> Tensor:
        """The hidden states that the stage before has sent, in the shape of ``x [1, T, hidden]``."""

    def send(self, x: Tensor) -> Tensor:
        """Give the hidden states to the next stage; returns ``x``."""


class _Current(threading.local):
    exchange: GroupExchange | None = None


_current = _Current()


@contextmanager
def collectives(exchange: GroupExchange | None) -> Iterator[None]:
    """Make ``exchange`` the current one of this thread."""
    outer, _current.exchange = _current.exchange, exchange
    try:
        yield
    finally:
        _current.exchange = outer


def all_reduce(x: Tensor) -> Tensor:
    """See :class:`GroupExchange`."""
    return x + _stand_in(x) if _current.exchange is None else _current.exchange.all_reduce(x)


def receive(x: Tensor) -> Tensor:
    """See :class:`GroupExchange`."""
    return _stand_in(x) if _current.exchange is None else _current.exchange.receive(x)


def send(x: Tensor) -> Tensor:
    """See :class:`GroupExchange`."""
    return x if _current.exchange is None else _current.exchange.send(x)


def _stand_in(x: Tensor) -> Tensor:
    """Values that differ by token and column, in the shape of ``x [1, T, hidden]``; as ``Reduce`` in
    ``src/kernels/fused_program.cpp`` has them."""
    tokens, columns = (torch.arange(size, device=x.device) for size in x.shape[1:])
    places = tokens[:, None] * 7 + columns * 13
    return ((places % 17 - 8).float() / 64).to(x.dtype)[None]


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What all workers of an instance map."""

    hbm: _core.SharedArena | None = None
    """KV of the first tier."""
    dram: _core.SharedArena | None = None
    """The second tier, where all of them copy there: that of recurrent states. Of KV the one that leads copies all."""

    def seal(self) -> None:
        """No other process maps it from now on."""
        for arena in (self.hbm, self.dram):
            if arena is not None:
                arena.seal()


class WorkerGroup:
    """One worker's connection to the others, on a CPU: see :class:`memserve.model.workers.gpu_group.GpuWorkerGroup` for
    GPUs."""

    def __init__(
        self,
        share: Share,
        stage: _kernels.Collective,
        whole: _kernels.Collective,
        vocabularies: tuple[int, ...],
        memory: GroupMemory | None = None,
    ) -> None:
        """``stage``: the workers of its stage; ``whole``: all. ``vocabularies``: tokens whose logits each part has.
        ``memory``: of all workers; None: each has its own."""
        self.share, self.memory = share, memory or GroupMemory()
        self.stage, self.whole = stage, whole
        before = [0] * (share.ranks - share.parts)
        self._widths = [*before, *(4 * count for count in vocabularies)]
        self._vocab_size = sum(vocabularies)
        #: why no further step can be computed; empty: all workers live
        self.broken = ""

    @property
    def is_leader(self) -> bool:
        """Whether this worker draws the tokens."""
        return self.share.rank == 0

    @property
    def makes_copies(self) -> bool:
        """Whether this worker makes the copies: one does, in the memory of all."""
        return self.is_leader

    def barrier(self) -> None:
        """Return when all workers have come here."""
        self.whole.meet()

    @property
    def waited_ns(self) -> int:
        """How long this worker has waited for others so far."""
        return self.stage.waited_ns + self.whole.waited_ns

    def all_reduce(self, x: Tensor) -> Tensor:
        """See :class:`GroupExchange`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self.stage.all_reduce(x.data_ptr(), out.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
        return out

    def receive(self, x: Tensor) -> Tensor:
        """See :class:`GroupExchange`."""
        received = torch.empty(x.shape, dtype=x.dtype)
        for stage in range(self.share.stage):
            self._broadcast_from(received, stage)
        return received

    def send(self, x: Tensor) -> Tensor:
        """See :class:`GroupExchange`."""
        x = x.contiguous()
        self._broadcast_from(x, self.share.stage)
        rest = torch.empty_like(x)
        for stage in range(self.share.stage + 1, self.share.stages - 1):
            self._broadcast_from(rest, stage)
        return x

    def _broadcast_from(self, x: Tensor, stage: int) -> None:
        """All workers take part, each with its own buffer: operations of a collective are the same for all."""
        self.whole.broadcast(x.data_ptr(), x.numel() * x.element_size(), stage * self.share.parts)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """The whole logits ``[R, vocab]`` float32 for rank 0; for the others their own."""
        logits = logits.contiguous()
        whole = logits
        if self.is_leader:
            whole = torch.empty((len(logits), self._vocab_size), dtype=torch.float32)
        if not len(logits):
            if self.share.stages > 1 or self.share.whole_heads:
                self.whole.meet()  # a later stage may still be writing KV, a part with all heads reading it
        else:
            self.whole.gather(logits.data_ptr(), len(logits), self._widths, whole.data_ptr())
        return whole

    def all_agree(self, value: int) -> bool:
        """Whether all workers say the same number, below 2**20."""
        sums = torch.tensor([float(value), float(value) ** 2], dtype=torch.float32)
        out = torch.empty_like(sums)
        self.whole.all_reduce(sums.data_ptr(), out.data_ptr(), 2, 0)
        count = self.share.ranks
        return bool(out[0] == value * count) and bool(out[1] == float(value) ** 2 * count)

    def mark_broken(self, why: str) -> None:
        """No step can be computed any more: all waits of all workers end."""
        self.broken = self.broken or why
        self.stage.abort()
        self.whole.abort()
