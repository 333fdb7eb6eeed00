"""KV of vLLM's on a CUDA device through the connector's pinned memory, without vLLM; of ``scripts/gpu_check.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from gpu_attention import milliseconds
from gpu_report import Row, need_device

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 32, 256, 8, 16, 256
"""An 8B's: blocks of 16 tokens, 64 KiB of each layer, 2 MiB of all."""
MOVED = 128
"""Blocks of a prompt of 2,048 tokens: 256 MiB."""


def staged() -> Iterator[Row]:
    """Blocks out of the device's memory and into it, layer by layer beside a computing stream that writes them."""
    need_device()
    from memserve.integrations.vllm.device_memory import DeviceMemory
    from memserve.model.gpu.streams import Cuda

    gpu = Cuda(torch.device("cuda"))
    caches = {
        f"layers.{layer}": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16, device="cuda")
        for layer in range(LAYERS)
    }
    nbytes = LAYERS * HEADS * TOKENS * CONTENT * 2
    memory = DeviceMemory(caches, BLOCKS, gpu, 2 * MOVED * nbytes)
    far = torch.empty(MOVED * nbytes, dtype=torch.uint8).pin_memory()
    near = torch.empty(MOVED * nbytes, dtype=torch.uint8, device="cuda")
    ways = {"down": (far, near), "up": (near, far)}
    limits = {name: far.numel() / milliseconds(lambda pair=pair: pair[0].copy_(pair[1], non_blocking=True), 6) / 1e6
              for name, pair in ways.items()}  # fmt: skip
    saves, loads = memory.saving.take_slots(MOVED), memory.loading.take_slots(MOVED)
    together, scattered = list(range(MOVED)), torch.randperm(BLOCKS)[:MOVED].tolist()
    for order, ids in (("side by side", together), ("scattered", scattered)):
        yield from _there_and_back(memory, caches, saves, loads, ids, order)
        down = _seconds(lambda ids=ids: _saved(memory, saves, ids).wait())
        yield _rate(f"vLLM's blocks {order}, down", MOVED * nbytes, down, limits["down"])
        behind = gpu.current_stream().record_mark()
        up = _seconds(lambda ids=ids, behind=behind: memory.load_blocks(loads, ids, behind).last.wait())
        yield _rate(f"vLLM's blocks {order}, up", MOVED * nbytes, up, limits["up"])
    yield from _beside_compute(memory, saves, together)


def _saved(memory: Any, slots: list[int], ids: list[int]) -> Any:
    for numbers in memory.layers.values():
        memory.stage(numbers, slots, ids)
    return memory.mark_staged()


def _there_and_back(
    memory: Any, caches: dict[str, torch.Tensor], saves: list[int], loads: list[int], ids: list[int], order: str
) -> Iterator[Row]:
    """Each layer is written while copies of others run, copied, overwritten at once, and brought back."""
    expected = {
        name: torch.randint(-999, 999, (len(ids), *cache.shape[1:])).to(cache) for name, cache in caches.items()
    }
    torch.cuda.synchronize()
    for name, numbers in memory.layers.items():
        caches[name][ids] = expected[name]
        memory.stage(numbers, saves, ids)
    mark = memory.mark_staged()
    for cache in caches.values():
        cache[ids] = -1.0  # vLLM has given the blocks to others
    mark.wait()
    for region in memory._regions:
        region[loads] = region[saves]
    landing = memory.load_blocks(loads, ids, memory.gpu.current_stream().mark())
    memory.gpu.current_stream().wait_for(landing.shared)
    right = True
    for name, cache in caches.items():
        memory.gpu.current_stream().wait_for(landing.layers[name])
        right = right and torch.equal(cache[ids], expected[name])
    yield {"what": f"vLLM's blocks {order} come back", "ok": right}


def _beside_compute(memory: Any, slots: list[int], ids: list[int]) -> Iterator[Row]:
    """What a forward is slowed down by: products of an 8B's size in each layer, with its copy behind and without."""
    rows, weights = (torch.randn(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (2048, 53_248))

    def forward(copies: bool) -> None:
        for numbers in memory.layers.values():
            torch.mm(rows, weights.T)
            if copies:
                memory.stage(numbers, slots, ids)
        if copies:
            memory.mark_staged()

    ratios = []
    for _ in range(8):  # in turn
        plain, with_copies = (_milliseconds(lambda copies=copies: forward(copies)) for copies in (False, True))
        ratios.append(with_copies / plain)
    middle = sorted(ratios)
    yield {"what": "a prefill of 2,048 tokens with copies by layer, beside one without (1.01 at most)",
           "ratio": (middle[3] + middle[4]) / 2, "least": middle[0], "most": middle[-1]}  # fmt: skip


def _milliseconds(run: Callable[[], object]) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    marks[0].record()
    run()
    marks[1].record()
    torch.cuda.synchronize()
    return sum(begin.elapsed_time(end) for begin, end in pairwise(marks))


def _seconds(run: Callable[[], object]) -> float:
    times_s = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - began)
    return min(times_s)


def _rate(title: str, nbytes: int, seconds: float, limit: float) -> Row:
    return {"what": title, "gb_s": nbytes / seconds / 1e9, "share": nbytes / seconds / 1e9 / limit}
