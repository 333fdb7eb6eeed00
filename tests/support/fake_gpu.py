"""A model of a GPU's streams, on a CPU: work is done at once, but what no event orders is an error.

Every stream has a vector clock, every mark the clock of its stream. An access to memory must come behind the last write
of it, and a write behind all reads, by those clocks: not by luck. What is fetched holds no values before a mark behind
it is past. While a graph is captured, reading a value on the host is an error, as on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fake_driver import device_zeros
from memserve.model.attention import triton_attention
from memserve.model.attention.context import StepRows
from memserve.model.attention.reference import ReferenceAttention, reference_pages

UNIT_BYTES = 64
NOT_THERE = -77


class RaceError(AssertionError):
    """An access that no event orders."""


class FakeMark:
    def __init__(self, gpu: FakeGpu, clock: dict[int, int]) -> None:
        self._gpu, self.clock = gpu, clock

    def wait(self) -> None:
        self._gpu.host_learns(self.clock)

    def is_past(self) -> bool:
        """Only what the host has waited for is: the latest that it may be."""
        return all(self._gpu.host.get(stream, 0) >= time for stream, time in self.clock.items())

    def ns_since(self, earlier: Any) -> int:
        assert self.is_past() and earlier.is_past(), "the time of what is not past"
        return 1000


class FakeStream:
    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self._gpu, self.number = gpu, number
        self.clock: dict[int, int] = {}

    def step(self) -> None:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1

    def record_mark(self, *, timed: bool = False) -> FakeMark:
        self.step()
        return FakeMark(self._gpu, dict(self.clock))

    def wait_for(self, mark: FakeMark) -> None:
        for stream, time in mark.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def copy_blocks(self, target: Tensor, source: Tensor, dst: list[int], src: list[int]) -> None:
        for to, came_from in zip(dst, src, strict=True):
            self._gpu.access(self, source[came_from], writes=False)
            self._gpu.access(self, target[to], writes=True)
            target[to] = source[came_from]

    def copy_pages(self, target: Tensor, source: Tensor, dst: Tensor, src: Tensor) -> None:
        self.copy_blocks(target, source, dst.tolist(), src.tolist())

    @contextmanager
    def use(self) -> Iterator[None]:
        outer, self._gpu.used = self._gpu.used, self
        try:
            yield
        finally:
            self._gpu.used = outer

    def wait(self) -> None:
        self.record_mark().wait()


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


class FakeGraph:
    def __init__(self, run: Callable[[], Any], made: Tensor) -> None:
        self._run, self._made = run, made
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            self._made.copy_(self._run())


class FakeGpu:
    """See :class:`memserve.model.gpu.streams.Gpu`."""

    def __init__(self) -> None:
        self.host: dict[int, int] = {}
        self._streams = 0
        self.compute = self.new_stream()
        self.used: FakeStream = self.compute
        self._written: dict[int, tuple[int, int]] = {}  # unit -> (stream, time)
        self._read: dict[int, dict[int, int]] = {}
        self._coming: list[tuple[dict[int, int], Tensor, Tensor]] = []
        self.graphs: list[FakeGraph] = []
        self.accesses = 0
        self._lock = threading.RLock()  # one thread begins plans, another one finishes them

    def new_stream(self, *, urgent: bool = False) -> FakeStream:
        self._streams += 1
        return FakeStream(self, self._streams)

    def current_stream(self) -> FakeStream:
        return self.used

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return device_zeros(*shape, dtype=dtype)

    def pin_memory(self, tensor: Tensor) -> None:
        """Nothing to do."""

    def send(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def fetch_to_host(self, tensor: Tensor) -> Tensor:
        landing = torch.full_like(tensor, NOT_THERE)
        with self._lock:
            self.used.step()
            self._coming.append((dict(self.used.clock), landing, tensor.clone()))
        return landing

    def capture_graph(self, run: Callable[[], Tensor]) -> tuple[FakeGraph, Tensor]:
        run()  # once: nothing is compiled here
        with _NoHostReads():
            made = run()
        self.graphs.append(FakeGraph(run, made))
        return self.graphs[-1], made

    def free_bytes(self) -> int:
        return 1 << 30

    def host_learns(self, clock: dict[int, int]) -> None:
        with self._lock, torch.inference_mode():
            for stream, time in clock.items():
                self.host[stream] = max(self.host.get(stream, 0), time)
            coming = self._coming
            self._coming = [one for one in coming if not self._is_past(one[0])]
            for at, landing, values in coming:
                if self._is_past(at):
                    landing.copy_(values)

    def host_reads(self, memory: Tensor) -> None:
        """The host, or a process that it has told, reads contiguous ``memory`` of its own now."""
        for unit in _units(memory):
            writer, written = self._written.get(unit, (0, 0))
            if self.host.get(writer, 0) < written:
                raise RaceError(f"the host reads what stream {writer} writes, and has not waited for it")

    def host_writes(self, memory: Tensor) -> None:
        """The same for what it writes: no stream may still read it, either."""
        self.host_reads(memory)
        for unit in _units(memory):
            for reader, read in self._read.get(unit, {}).items():
                if self.host.get(reader, 0) < read:
                    raise RaceError(f"the host writes what stream {reader} reads, and has not waited for it")

    def _is_past(self, clock: dict[int, int]) -> bool:
        return all(self.host.get(stream, 0) >= time for stream, time in clock.items())

    def access(self, stream: FakeStream, memory: Tensor, *, writes: bool) -> None:
        """``stream`` touches contiguous ``memory`` now."""
        stream.step()
        time = stream.clock[stream.number]
        for unit in _units(memory):
            self.accesses += 1
            writer, written = self._written.get(unit, (stream.number, 0))
            if stream.clock.get(writer, 0) < written:
                raise RaceError(f"stream {stream.number} touches what stream {writer} writes, and does not wait for it")
            if not writes:
                self._read.setdefault(unit, {})[stream.number] = time
                continue
            for reader, read in self._read.pop(unit, {}).items():
                if stream.clock.get(reader, 0) < read:
                    raise RaceError(f"stream {stream.number} writes what stream {reader} reads, and does not wait")
            self._written[unit] = (stream.number, time)


def _units(memory: Tensor) -> range:
    first = memory.data_ptr()
    return range(first // UNIT_BYTES, -(-(first + memory.numel() * memory.element_size()) // UNIT_BYTES))


# -- attention: Triton's interpreter takes a third of a second for each layer of a step

_with_kernels = triton_attention.attend
_interpreting = threading.Lock()


def _one_at_a_time(*args: Any) -> None:
    """Triton's interpreter has one grid for all threads."""
    with _interpreting:
        _with_kernels(*args)


def _by_reference(
    batch: triton_attention.TritonBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *how: Any
) -> None:
    """What the kernels are to compute out of the same batch, by their oracle. As for them, the memory does not end with
    the arena: padding of graphs is written behind it."""
    scale, window, softcap, sinks, _, chunk = how
    arena = batch.arena.view(torch.uint8)
    memory = torch.empty(0, dtype=torch.uint8).set_(arena.untyped_storage())[arena.storage_offset() :]
    stride, size = batch.shape_constants()["STRIDE"] * batch.arena.element_size(), batch.geometry.block_bytes
    blocks = memory.as_strided(((len(memory) - size) // stride + 1, size), (stride, 1), memory.storage_offset())
    pages = reference_pages(blocks, batch.geometry)
    rows = StepRows(*(part.numpy() for part in (batch.tables, batch.table_rows, batch.q_starts, batch.contexts)))
    by_head = (x.transpose(0, 1)[None] for x in (q, k, v))
    attention = ReferenceAttention(pages, rows)
    reach = {"window": window, "chunk": chunk}
    out.copy_(attention.run_attention(layer, *by_head, scale=scale, softcap=softcap, sinks=sinks, **reach)[0])


def attend_with_kernels(interpreted: bool) -> None:
    """From now on in this process. False: by their oracle, where a scenario is about the order of what happens, and
    not about what the kernels make of a batch."""
    triton_attention.attend = _one_at_a_time if interpreted else _by_reference


# -- forwards


def capture_as_on_gpu(module: Any) -> Any:
    """The captured forward of ``module`` as on a GPU; of quantised weights few rows are multiplied by our kernels."""
    from memserve.model.capture import forward as capture
    from memserve.model.gpu.quantised import few_rows_stored, one_row_stored
    from memserve.model.linears import ROW_BUCKETS
    from memserve.model.quantised import StoredLinear

    capture._TRIALS = ((1, 1), (5, 2))
    torch.Tensor.is_cuda = property(lambda _: True)  # what the passes ask
    try:
        captured = capture.capture_forward(module)
    finally:
        del torch.Tensor.is_cuda
    assert captured is not None
    for layer in captured._linears:
        if isinstance(layer, StoredLinear):
            for rows in ROW_BUCKETS:
                kernel = one_row_stored if rows == 1 else few_rows_stored
                layer.use_kernel(rows, partial(kernel, options=LARGE_PIECES))
    return captured


LARGE_PIECES = {"OUTPUTS": 64, "UNITS": 16, "num_warps": 4}
"""Of kernels of quantised weights: an interpreted program takes its time whatever its size."""


def write_large_pieces() -> None:
    """From now on in this process, the same of those that write numbers."""
    from memserve.model.gpu import quantised

    quantised._WRITES = {"ROWS": 64, "UNITS": 32, "num_warps": 4}


# -- several of them


class OrderError(AssertionError):
    """Workers call different operations, which would let real ones wait for ever."""


class FakeWorld:
    """Where the workers of an instance meet, each a thread with a :class:`FakeGpu`."""

    def __init__(self, wait_s: float = 60.0) -> None:
        self.wait_s = wait_s
        self.changed = threading.Condition()
        self.broken = ""
        self.rounds: dict[tuple[tuple[int, ...], int], dict[int, tuple[Any, Tensor]]] = {}
        self.log: list[tuple[int, tuple[int, ...], Any]] = []

    def end(self, why: str) -> None:
        with self.changed:
            self.broken = self.broken or why
            self.changed.notify_all()


class FakeCommunicator:
    """See :class:`memserve.model.workers.gpu_group.Communicator`: operations in another order, of another shape, or
    outside of the computing stream are errors."""

    def __init__(self, world: FakeWorld, ranks: tuple[int, ...], rank: int, gpu: FakeGpu) -> None:
        self._world, self._ranks, self._rank, self._gpu = world, ranks, rank, gpu
        self._turn = 0

    def all_reduce(self, x: Tensor) -> None:
        parts = self._meet("all_reduce", x)
        x.copy_(sum(parts[1:], parts[0]))

    def broadcast(self, x: Tensor, source: int) -> None:
        x.copy_(self._meet(("broadcast", source), x)[source])

    def gather(self, x: Tensor) -> list[Tensor]:
        found = self._meet("gather", x)
        return found if self._rank == self._ranks[0] else []

    def abort(self) -> None:
        self._world.end("aborted")

    def _meet(self, operation: Any, x: Tensor) -> list[Tensor]:
        if self._gpu.used is not self._gpu.compute:
            raise RaceError(f"{operation} outside of the computing stream")
        assert x.is_contiguous()
        world, what = self._world, (operation, tuple(x.shape), x.dtype)
        key = self._ranks, self._turn
        self._turn += 1
        with world.changed:
            here = world.rounds.setdefault(key, {})
            here[self._rank] = what, x.clone()
            world.log.append((self._rank, self._ranks, operation))
            if len(here) == len(self._ranks):
                world.changed.notify_all()
            else:
                met = world.changed.wait_for(lambda: len(here) == len(self._ranks) or world.broken, world.wait_s)
                if not met:
                    world.broken = f"worker {self._rank} waits for others in {what} of {self._ranks}"
                    world.changed.notify_all()
            if len(here) < len(self._ranks):
                raise OrderError(world.broken)
            if any(other != what for other, _ in here.values()):
                world.broken = f"the workers {self._ranks} do {[other for other, _ in here.values()]}"
                world.changed.notify_all()
                raise OrderError(world.broken)
            return [here[rank][1] for rank in self._ranks]
