"""What a GPU offers beside tensors: streams, events, graphs, memory that its copies reach.

All code that computes or copies on a GPU goes through :class:`Gpu`; ``Cuda`` is the real one. Work of one stream runs
in order. Nothing else is in order: work of another stream comes later only where it waits for an event that was
recorded behind. The tests put a model of that in the place of ``Cuda`` which finds every read that no event orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from memserve.base.errors import UserError
from memserve.base.units import human_bytes

T = TypeVar("T")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
NS_PER_MS = 1e6


class Mark(Protocol):
    """A place in a stream: CUDA's event."""

    def wait(self) -> None:
        """Let this thread wait until all work before the mark is done."""

    def is_past(self) -> bool:
        """Whether all work before the mark is done."""

    def ns_since(self, earlier: Any) -> int:
        """Time between two marks that are both past and were recorded with ``timed``."""


class Stream(Protocol):
    """Work in order. Calls enqueue it, and do not wait for it."""

    def record_mark(self, *, timed: bool = False) -> Mark:
        """Behind all that was enqueued so far."""

    def wait_for(self, mark: Any) -> None:
        """What is enqueued from now on runs when the work before ``mark`` is done."""

    def copy_blocks(self, target: Tensor, source: Tensor, dst: list[int], src: list[int]) -> None:
        """``target[dst[i]] = source[src[i]]`` for rows of bytes ``[n, bytes]``, by the copy engines."""

    def copy_pages(self, target: Tensor, source: Tensor, dst: Tensor, src: Tensor) -> None:
        """As :meth:`copy_blocks` for many small rows, by a kernel; ``dst``, ``src`` int32 on the host."""

    def use(self) -> AbstractContextManager[None]:
        """What this thread computes inside is enqueued here."""

    def wait(self) -> None:
        """Let this thread wait until all that was enqueued is done."""


class Graph(Protocol):
    """Recorded work that is enqueued at once."""

    def replay(self) -> None:
        """Enqueue it in the stream in use, with what its inputs hold by then."""


class Gpu(Protocol):
    """One device. Its computing stream is used by one thread."""

    compute: Stream

    def new_stream(self, *, urgent: bool = False) -> Stream:
        """A further stream. ``urgent``: its work goes before that of others."""

    def current_stream(self) -> Stream:
        """The stream in use in this thread, also one of another library."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the device."""

    def pin_memory(self, tensor: Tensor) -> None:
        """Let copies reach ``tensor``, which is host memory and lives as long as the device is used."""

    def send(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the device, in the stream in use; does not wait."""

    def fetch_to_host(self, tensor: Tensor) -> Tensor:
        """A tensor of the host that holds ``tensor``'s values once a later mark of the stream in use is past."""

    def capture_graph(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Record what ``run`` enqueues, after it ran twice to get ready. Its results are written by each replay."""

    def free_bytes(self) -> int:
        """Memory of the device that nothing has taken."""


class _CudaMark:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def is_past(self) -> bool:
        return bool(self.event.query())

    def ns_since(self, earlier: _CudaMark) -> int:
        return int(earlier.event.elapsed_time(self.event) * NS_PER_MS)


class _CudaStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def record_mark(self, *, timed: bool = False) -> _CudaMark:
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]  # torch does not type it
        event.record(self._stream)
        return _CudaMark(event)

    def wait_for(self, mark: _CudaMark) -> None:
        self._stream.wait_event(mark.event)

    def copy_blocks(self, target: Tensor, source: Tensor, dst: list[int], src: list[int]) -> None:
        chained = target.data_ptr() == source.data_ptr() and not set(dst).isdisjoint(src)
        pieces = [(*pair, 1) for pair in zip(dst, src, strict=True)] if chained else runs(dst, src)
        with self.use():
            for first_dst, first_src, count in pieces:
                rows = source[first_src : first_src + count]
                target[first_dst : first_dst + count].copy_(rows, non_blocking=True)

    def copy_pages(self, target: Tensor, source: Tensor, dst: Tensor, src: Tensor) -> None:
        from memserve.system.gpu_kernels import copy_rows

        with self.use():
            places = torch.stack((dst, src)).pin_memory().to(torch.device("cuda"), non_blocking=True)
            copy_rows(target, source, places[0], places[1])

    @contextmanager
    def use(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        self._stream.synchronize()


class Cuda:
    """A CUDA device; see :class:`Gpu`."""

    def __init__(self, device: torch.device, share: float | None = None) -> None:
        """``share``: of its memory, what this process may allocate."""
        self.device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch does not type it
        if share is not None:
            torch.cuda.set_per_process_memory_fraction(share, device)
        self.compute: Stream = _CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch does not type it
        self._pool: Any = None

    def new_stream(self, *, urgent: bool = False) -> Stream:
        return _CudaStream(torch.cuda.Stream(self.device, priority=-1 if urgent else 0))  # type: ignore[no-untyped-call]  # torch does not type it

    def current_stream(self) -> Stream:
        return _CudaStream(torch.cuda.current_stream(self.device))

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Gpu`. Raises :class:`UserError` where the device has no room."""
        try:
            memory = torch.zeros(shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            size = human_bytes(torch.Size(shape).numel() * dtype.itemsize)
            raise UserError(
                f"the GPU has no room for {size}; {human_bytes(self.free_bytes())} are free",
                hint="give less with --kv-memory or --gpu-memory-share, or end what else runs on it",
                param="kv_memory",
            ) from error
        torch.cuda.synchronize(self.device)  # other streams use it without waiting for this one
        return memory

    def pin_memory(self, tensor: Tensor) -> None:
        """See :class:`Gpu`. Raises :class:`UserError` where the system refuses."""
        if not tensor.numel():
            return
        status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), _PORTABLE)  # type: ignore[no-untyped-call]  # torch does not type it
        if int(status) != 0:
            hint = "give less with --dram-memory, or raise the limit of locked memory (ulimit -l)"
            size = human_bytes(tensor.numel())
            raise UserError(f"{size} of host memory cannot be pinned ({status})", hint=hint, param="dram_memory")

    def send(self, tensor: Tensor) -> Tensor:
        """See :class:`Gpu`."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def fetch_to_host(self, tensor: Tensor) -> Tensor:
        """See :class:`Gpu`."""
        landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        landing.copy_(tensor, non_blocking=True)
        return landing

    def capture_graph(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """See :class:`Gpu`."""
        with self.compute.use():
            for _ in range(2):  # kernels are compiled, workspaces allocated
                run()
        self.compute.wait()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # graphs never run at once: they share their memory
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph, result

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])


def runs(dst: list[int], src: list[int]) -> Iterator[tuple[int, int, int]]:
    """``(first of dst, first of src, count)`` of pieces in which both count up; order is kept."""
    begin = 0
    for index in range(1, len(dst) + 1):
        if index == len(dst) or dst[index] != dst[index - 1] + 1 or src[index] != src[index - 1] + 1:
            yield dst[begin], src[begin], index - begin
            begin = index


def open_gpu(device: torch.device, share: float | None = None) -> Gpu | None:
    """The GPU behind ``device``; None: it is a CPU."""
    return Cuda(device, share) if device.type == "cuda" else None
