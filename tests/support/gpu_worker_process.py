"""Workers of an instance on GPUs as real processes without any: fake GPUs, attention by its oracle, and gloo in the
place of NCCL."""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import Any

import torch

from fake_gpu import FakeGpu, attend_with_kernels
from gpu_parts import Part, Together, Watched
from lean_imports import interpret_quickly, leave_compiler_out
from memserve.model.capture import forward
from memserve.model.gpu import setup as gpu_build
from memserve.model.gpu import streams as gpu
from memserve.model.gpu.device import GpuDevice
from memserve.model.loading import loader
from memserve.model.workers import gpu_processes as gpu_workers
from memserve.model.workers import gpu_steps as gpu_part
from memserve.model.workers.gpu_group import TorchCommunicator
from memserve.system import gpu_kernels

ROOM_BLOCKS = {0: 40, 1: 20, 2: 37, 3: 50}
"""Blocks that each worker's GPU has room for."""


def install(*, whole: bool = False) -> None:
    """Let this process take what is made up for what a machine with GPUs has. ``whole``: it is an instance, maybe of
    one worker, in a cluster of processes."""
    load, make = loader.load_model, Part.__init__

    def on_host(model: str, dtype: str, device: str, **options: Any) -> Any:
        return load(model, dtype, "cpu", **options)

    def made(self: Any, model: Any, config: Any, own: FakeGpu, crew: Any, *more: Any, **options: Any) -> None:
        crew.gpu = own
        make(self, model, config, own, crew, *more, **options)

    leave_compiler_out()
    interpret_quickly()
    attend_with_kernels(False)
    Part.__init__ = made
    sys.modules["memserve.model.device"].choose_attention = Together._choose
    loader.load_model, gpu.Cuda, gpu_part.GpuPart = on_host, lambda *_: FakeGpu(), Part
    gpu_workers.TorchCommunicator = partial(TorchCommunicator, backend="gloo")
    gpu_workers._blocks_here = lambda share, options, model: ROOM_BLOCKS[share.rank]
    gpu_workers.leave_compiler_out = lambda device: None
    gpu_workers.gpu_count = lambda: 4
    forward.capture_forward = lambda module, fingerprint=None: None  # weights on a GPU are not captured
    gpu_kernels._STRIPES, gpu_kernels._TURNS = 16, 2  # each turn takes the interpreter a millisecond, however small
    if whole:
        gpu.open_gpu = lambda device, share: _the_only()
        gpu_build.kv_bytes_here = lambda options, sizes: options.kv_memory_bytes
        GpuDevice._is_triton = property(lambda self: True)
        sys.modules["memserve.model.device"].choose_attention = _choose
    torch.set_num_threads(1)
    gpu_workers.GpuWorkers.module = "gpu_worker_main"


@cache
def _the_only() -> FakeGpu:
    """Of this process."""
    return FakeGpu()


def _choose(arena: Any, geometry: Any, crew: Any = None) -> Any:
    if crew is not None:
        return Together._choose(arena, geometry, crew)
    return partial(Watched, _the_only(), arena.view(-1), geometry)
