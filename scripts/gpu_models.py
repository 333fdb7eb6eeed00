"""Steps of models of real size with random weights: against what memory and arithmetic of the device allow, and against
transformers. Parts of ``scripts/gpu_check.py``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_attention import milliseconds
from gpu_bytes import copy_gb_s
from gpu_report import TARGETS, Row, need_device

CONTEXT, PROMPT, VOCAB = 1024, 2048, 128_256
ROWS = (1, 8, 32, 128)
ROWS_OF_TRANSFORMERS = (1, 32)
BLOCK_TOKENS = 32
ROOM_BLOCKS = 8
"""For the tokens that a sequence gets after its prompt."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of Llama's family."""

    name: str
    hidden: int
    columns: int
    layers: int
    tied: bool

    def build(self) -> Any:
        """With random weights, as the loader would give it."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        from memserve.model.loading.loader import LoadedModel
        from memserve.model.loading.probe import probe_model

        config = LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.columns, num_hidden_layers=self.layers,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=VOCAB, max_position_embeddings=8192,
            tie_word_embeddings=self.tied,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        torch.set_default_dtype(torch.float32)
        module.requires_grad_(False)
        geometry, _ = probe_model(module, "bfloat16", BLOCK_TOKENS)
        device, dtype = torch.device("cuda"), torch.bfloat16
        return LoadedModel(module, None, geometry, "random", self.name, 8192, VOCAB, (2,), False, device, dtype)

    def read_bytes(self, module: Any) -> int:
        """Bytes of weights that a step reads."""
        from memserve.model.loading.stored import stored_of

        stored = stored_of(module)
        whole = sum(stored.packed_bytes(value.detach()) or value.numel() * value.element_size()
                    for value in module.parameters())  # fmt: skip
        return whole if self.tied else whole - VOCAB * self.hidden * 2  # a few rows of the embedding


ONE_B = Shape("1B", 2048, 8192, 16, tied=True)
EIGHT_B = Shape("8B", 4096, 14336, 32, tied=False)


def one_b() -> Iterator[Row]:
    """A model of 1B."""
    return steps(ONE_B)


def eight_b() -> Iterator[Row]:
    """A model of 8B: its figures have targets."""
    return steps(EIGHT_B)


def steps(shape: Shape, change: Callable[[Any], None] | None = None) -> Iterator[Row]:
    """The same work by transformers alone, then prefill, and decode kernel by kernel and with graphs. ``change``: gives
    the module other weights, with which transformers alone does not compute."""
    need_device()
    from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
    from memserve.model.capture.forward import best_forward
    from memserve.model.gpu.device import GpuDevice
    from memserve.model.gpu.streams import Cuda

    model = shape.build()
    count = shape.read_bytes(model.module) / 2
    rival_ms = _of_transformers(model.module) if change is None else {}
    if change is not None:
        change(model.module)
    weights = shape.read_bytes(model.module)
    blocks = max(ROWS) * (CONTEXT // BLOCK_TOKENS + ROOM_BLOCKS)
    config = InstanceConfig(8192, pool=PoolConfig(blocks), scheduler=SchedulerConfig(max_running=max(ROWS)))
    began, before = time.perf_counter(), torch.cuda.memory_allocated()
    forward = best_forward(model.module)
    memory = {
        "before_gb": before,
        "after_gb": torch.cuda.memory_allocated(),
        "peak_gb": torch.cuda.max_memory_allocated(),
    }
    row = {"what": "forward", "kind": type(forward).__name__, "operations": getattr(forward, "operations", 0)}
    yield row | {"s": time.perf_counter() - began} | {name: nbytes / 1e9 for name, nbytes in memory.items()}
    yield from _linears(forward)
    device = GpuDevice(model, config, Cuda(model.device), forward)
    x, w = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    peak_tflops = 2 * 8192**3 / milliseconds(lambda: x @ w) / 1e9
    ms = _prefill_ms(device, PROMPT, min(6, max(ROWS)))
    share = 2 * PROMPT * count / ms / 1e9 / peak_tflops  # two operations for each weight
    prefill: Row = {"what": f"prefill of {PROMPT} tokens", "share": share, "ms": ms, "peak_tflops": peak_tflops}
    if rival_ms:
        prefill["times_as_fast_as_transformers"] = rival_ms["prefill"] / ms
    yield _judged(prefill, f"prefill of an {shape.name}")
    _prefill_ms(device, CONTEXT, max(ROWS))
    for graphs in (False, True):
        if graphs:
            began = time.perf_counter()
            device.capture_graphs()
            yield {"what": "graphs", "ok": bool(device.graph_sizes), "rows": device.graph_sizes,
                   "s": time.perf_counter() - began}  # fmt: skip
        for rows in ROWS if graphs else ROWS[:1]:
            ms = _decode_ms(device, rows)
            device._slots.lengths[:rows] = CONTEXT + 1
            moved = weights + rows * CONTEXT * model.geometry.token_bytes
            how = "graphs" if graphs else "kernel by kernel"
            row: Row = {"what": f"decode of {rows}, {how}", "share": moved / ms / 1e6 / copy_gb_s(), "ms": ms}
            if graphs and rival_ms and rows in ROWS_OF_TRANSFORMERS:
                row["times_as_fast_as_transformers"] = rival_ms[f"decode of {rows}"] / ms
            counted = f"{rows} sequence{'s' if rows > 1 else ''}"
            yield _judged(row, f"decode of an {shape.name}, {counted}") if graphs else row
    device.close()


def _judged(row: Row, target: str) -> Row:
    return row | ({"target": target} if target in TARGETS else {})


def _linears(forward: Any) -> Iterator[Row]:
    """How fast linears of each shape stream their weights on the device: as they compute, and by the library."""
    from memserve.model.gpu.linears import graph_seconds
    from memserve.model.linears import JoinedLinear

    shapes: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for layer in (module for module in getattr(forward, "_linears", ()) if isinstance(module, JoinedLinear)):
        shapes[tuple(layer.weight.shape)].append(layer)
    for (outputs, inputs), layers in shapes.items():
        layers_timed = layers[: max(1, (1 << 29) // layers[0].weight.nbytes)]
        row: Row = {"what": f"linears of {inputs} to {outputs}"}
        for rows in (1, 8, 32, 64):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            for prefix, how in (("", "__call__"), ("library_", "compute_plain")):
                seconds = graph_seconds([partial(getattr(layer, how), x) for layer in layers_timed]) / len(layers_timed)
                row[f"{prefix}{rows}"] = layers[0].weight.nbytes / seconds / 1e9 / copy_gb_s()
        yield row


def _prefill_ms(device: Any, count: int, slots: int) -> float:
    """Of one prompt of ``count`` tokens, which each of ``slots`` gets in turn: the median."""
    from memserve.base.types import SamplingParams, StopParams
    from memserve.instance.events import OpenSequence, StepPlan

    took, blocks = [], count // BLOCK_TOKENS + ROOM_BLOCKS
    device.execute(StepPlan(0, reset_slots=True))
    for slot in range(slots):
        block_ids = list(range(slot * blocks, (slot + 1) * blocks))
        tokens = np.full(count, 7, np.int32)
        opened = OpenSequence(slot, tokens, count, 0, SamplingParams(temperature=0), block_ids, stop=StopParams())
        rows_of: Any = {"slots": [slot], "starts": [0], "counts": [count], "sample_slots": [(slot,)]}
        took.append(device.execute(StepPlan(slot, open=[opened], **rows_of)).device_ns / 1e6)
    return float(np.median(took))


def _decode_ms(device: Any, rows: int, count: int = 44) -> float:
    """Of a step, two plans in flight."""
    from memserve.instance.events import StepPlan

    steps_begun: list[Callable[[], object]] = []
    began = 0.0
    for step in range(count):
        if step == 4:
            began = time.perf_counter()
        plan = StepPlan(
            1000 + step, slots=list(range(rows)), starts=[CONTEXT + step] * rows, counts=[1] * rows,
            sample_slots=[(slot,) for slot in range(rows)], decodes=rows,
        )  # fmt: skip
        steps_begun.append(device.begin_step(plan))
        if len(steps_begun) > 1:
            steps_begun.pop(0)()
    steps_begun.pop()()
    return (time.perf_counter() - began) * 1e3 / (count - 4)


def _of_transformers(module: Any, count: int = 20) -> dict[str, float]:
    """Milliseconds of the same work by the module alone, with torch's attention and transformers' own cache."""
    from transformers import DynamicCache

    ours = module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    times_ms: dict[str, float] = {}
    with torch.inference_mode():
        prompt = torch.full((1, PROMPT), 7, device="cuda")
        times_ms["prefill"] = milliseconds(lambda: module(prompt, past_key_values=DynamicCache(), logits_to_keep=1), 5)
        for rows in ROWS_OF_TRANSFORMERS:
            cache = DynamicCache()
            ids = torch.full((rows, CONTEXT), 7, device="cuda")
            token = module(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            for step in range(count + 4):
                if step == 4:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                token = module(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            torch.cuda.synchronize()
            times_ms[f"decode of {rows}"] = (time.perf_counter() - began) * 1e3 / count
            del cache
    module.set_attn_implementation(ours)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return times_ms
