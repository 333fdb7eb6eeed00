"""The workers of one instance on GPUs, each on one of its own: what :mod:`memserve.model.workers.group` is on a CPU.

    sums of a layer              the workers of a stage
    hidden states                the same part of two stages that follow one another
    logits, a slice each         the last stage -> the leader
    tokens that are drawn        the leader -> all

Every operation is enqueued in the stream in use: the host waits for nothing, and a CUDA graph can hold it. Members of a
group call the same operations in the same order; a worker that called another one would make all of them wait for ever.
So what is computed follows from the plan alone, and from what all workers have been told.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from memserve.base.errors import UserError
from memserve.base.kv_layout import Share
from memserve.system.gpus import GPU_TORCH_HINT

Ranks = tuple[int, ...]


class Communicator(Protocol):
    """Some workers of an instance. Ranks here count its members."""

    def all_reduce(self, x: Tensor) -> None:
        """Make ``x``, contiguous, the sum of every member's. With NCCL all members get the same bits: each element is
        summed once, and passed on."""

    def broadcast(self, x: Tensor, source: int) -> None:
        """Make ``x``, contiguous, that of member ``source``."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """``x`` of every member, equally large, for member 0; for the others nothing."""

    def abort(self) -> None:
        """End every operation, also those that wait for other members. From any thread."""


class TorchCommunicator:
    """Torch's process group: NCCL between GPUs; the tests let gloo compute the same on CPUs."""

    def __init__(self, meeting: Path, ranks: Ranks, rank: int, timeout_s: float, backend: str = "nccl") -> None:
        """``meeting``: a file that all members open, of this instance alone. ``rank``: of this worker in the instance;
        ``timeout_s``: how long a member may let others wait, where the backend watches over that."""
        import torch.distributed

        stores: Any = torch.distributed
        c10d: Any = torch.distributed.distributed_c10d
        self._c10d = c10d
        store = stores.PrefixStore("-".join(map(str, ranks)), stores.FileStore(str(meeting), -1))
        place, limit = (ranks.index(rank), len(ranks)), timedelta(seconds=timeout_s)
        self._size = len(ranks)
        if backend == "nccl":
            if not c10d.is_nccl_available():
                raise UserError("this torch was built without NCCL", hint=GPU_TORCH_HINT, param="tensor")
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout, options.global_ranks_in_group = limit, list(ranks)
            self._group = c10d.ProcessGroupNCCL(store, *place, options)
        else:
            self._group = c10d.ProcessGroupGloo(store, *place, limit)
        self._is_first = place[0] == 0

    def all_reduce(self, x: Tensor) -> None:
        self._wait_work(self._group.allreduce([x], self._new_options("Allreduce")))

    def broadcast(self, x: Tensor, source: int) -> None:
        """See :class:`Communicator`."""
        options = self._new_options("Broadcast")
        options.rootRank, options.rootTensor = source, 0
        self._wait_work(self._group.broadcast([x], options))

    def gather(self, x: Tensor) -> list[Tensor]:
        """See :class:`Communicator`."""
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._is_first else []
        options = self._new_options("Gather")
        options.rootRank = 0
        self._wait_work(self._group.gather([parts] if self._is_first else [], [x], options))
        return parts

    def abort(self) -> None:
        """See :class:`Communicator`."""
        self._group.abort()

    def _new_options(self, operation: str) -> Any:
        options = getattr(self._c10d, f"{operation}Options")()
        options.asyncOp = False  # in the stream in use, not in one of NCCL's own
        return options

    @staticmethod
    def _wait_work(work: Any) -> None:
        if work is not None:  # gloo computes on the host
            work.wait()


class GpuWorkerGroup:
    """One worker's connection to the others; an :class:`memserve.model.workers.group.GroupExchange`."""

    makes_copies = True
    """Every worker makes the copies of its part: each has a memory of its own."""
    waited_ns = 0
    """How long the host has waited for other workers: it does not."""

    def __init__(
        self,
        share: Share,
        vocabularies: tuple[int, ...],
        connect: Callable[[Ranks], Communicator],
        device: torch.device,
    ) -> None:
        """``vocabularies``: tokens whose logits each part has. ``connect`` opens the group of some ranks, this worker's
        among them; all its members do so, at the same time."""
        self.share, self._vocabularies, self._device = share, vocabularies, device
        #: why no further step can be computed; empty: all workers live
        self.broken = ""
        rank, parts, ranks = share.rank, share.parts, share.ranks
        stage = tuple(range(share.stage * parts, (share.stage + 1) * parts))
        last = tuple(range(ranks - parts, ranks))
        before, behind, drawing = (rank - parts, rank), (rank, rank + parts), tuple(sorted({0, *last}))
        whole = tuple(range(ranks))
        rank_sets = {stage, drawing, whole, *([before] * (share.stage > 0)), *([behind] * (not share.is_last_stage))}
        #: in one order of all groups, so that no two workers wait for each other in two of them
        self._groups = {
            members: connect(members) for members in sorted(rank_sets) if rank in members and len(members) > 1
        }
        for group in self._groups.values():
            group.all_reduce(torch.zeros(1, device=device))  # they connect at their first operation: not in a graph
        self._stage, self._whole = self._groups.get(stage), self._groups[whole]
        self._before, self._behind = self._groups.get(before), self._groups.get(behind)
        self._drawing = self._groups.get(drawing)

    @property
    def is_leader(self) -> bool:
        """Whether this worker draws the tokens."""
        return self.share.rank == 0

    def barrier(self) -> None:
        """Nothing is shared that workers would have to meet for: the order of each device's own work is enough."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """See :class:`memserve.model.workers.group.GroupExchange`; ``x`` may be changed."""
        x = x.contiguous()
        if self._stage is not None:
            self._stage.all_reduce(x)
        return x

    def receive(self, x: Tensor) -> Tensor:
        """See :class:`memserve.model.workers.group.GroupExchange`."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        if self._before is not None:
            self._before.broadcast(received, 0)
        return received

    def send(self, x: Tensor) -> Tensor:
        """See :class:`memserve.model.workers.group.GroupExchange`."""
        x = x.contiguous()
        if self._behind is not None:
            self._behind.broadcast(x, 0)
        return x

    def gather_logits(self, logits: Tensor) -> Tensor:
        """The whole logits ``[R, vocab]`` float32 for rank 0; for the others their own."""
        if not len(logits):
            return logits.new_empty((0, sum(self._vocabularies))) if self.is_leader else logits
        if self._drawing is None:
            return logits
        width = max(self._vocabularies)
        if self.share.is_last_stage:
            padded = pad(logits, (0, width - logits.shape[1])).contiguous()
        else:
            padded = logits.new_zeros((len(logits), width))  # its own are not the model's
        slices = self._drawing.gather(padded)
        if not self.is_leader:
            return logits
        slices = slices[-self.share.parts :]  # those of the last stage
        return torch.cat([piece[:, :count] for piece, count in zip(slices, self._vocabularies, strict=True)], 1)

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Make ``drawn [n]`` the leader's, for all workers."""
        self._whole.broadcast(tokens, 0)

    def all_agree(self, value: int) -> bool:
        """Whether all workers say the same small number. Waits for the device."""
        sums = torch.tensor([float(value), float(value) ** 2], device=self._device)
        self._whole.all_reduce(sums)
        first, second = sums.tolist()
        return bool(first == value * self.share.ranks and second == value**2 * self.share.ranks)

    def mark_broken(self, why: str) -> None:
        """No step can be computed any more: all waits of this worker's device end."""
        self.broken = self.broken or why
        for group in self._groups.values():
            group.abort()
