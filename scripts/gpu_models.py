"""Steps of models of real size with random weights: against what memory and arithmetic of the device allow, and against
transformers. Parts of ``scripts/gpu_check.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_attention import milliseconds
from gpu_bytes import copy_gb_s
from gpu_report import Row, need_device

CONTEXT, VOCAB = 1024, 128_256
ROWS = (1, 32)
BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of Llama's family."""

    name: str
    hidden: int
    columns: int
    layers: int
    tied: bool
    is_judged: bool

    def build(self) -> Any:
        """With random weights, as the loader would give it."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        from memserve.model.attention.context import ATTENTION_NAME, register_attention
        from memserve.model.loading.loader import LoadedModel
        from memserve.model.loading.probe import probe_model

        register_attention()
        config = LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.columns, num_hidden_layers=self.layers,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=VOCAB, max_position_embeddings=8192,
            tie_word_embeddings=self.tied,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
        torch.set_default_dtype(torch.float32)
        module.requires_grad_(False)
        geometry, _ = probe_model(module, "bfloat16", BLOCK_TOKENS)
        device, dtype = torch.device("cuda"), torch.bfloat16
        return LoadedModel(module, None, geometry, "random", self.name, 8192, VOCAB, (2,), False, device, dtype)

    def read_bytes(self, module: Any) -> int:
        """Bytes of weights that a step reads."""
        whole = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        return whole if self.tied else whole - VOCAB * self.hidden * 2  # a few rows of the embedding


ONE_B = Shape("1B", 2048, 8192, 16, tied=True, is_judged=False)
EIGHT_B = Shape("8B", 4096, 14336, 32, tied=False, is_judged=True)


def one_b() -> Iterator[Row]:
    """A model of 1B."""
    return steps(ONE_B)


def eight_b() -> Iterator[Row]:
    """A model of 8B: its figures have targets."""
    return steps(EIGHT_B)


def steps(shape: Shape) -> Iterator[Row]:
    """Prefill, decode kernel by kernel and with graphs, then the same by transformers alone."""
    need_device()
    from memserve.config import InstanceConfig, PoolConfig, SchedulerConfig
    from memserve.model.forward import EagerForward
    from memserve.model.gpu import Cuda
    from memserve.model.gpu_device import GpuDevice

    model = shape.build()
    weights = shape.read_bytes(model.module)
    config = InstanceConfig(8192, pool=PoolConfig(2048), scheduler=SchedulerConfig(max_running=max(ROWS)))
    device = GpuDevice(model, config, Cuda(model.device), EagerForward(model.module))
    x, w = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    peak_tflops = 2 * 8192**3 / milliseconds(lambda: x @ w) / 1e9
    ours: dict[str, float] = {"prefill": _prefill_ms(device)}
    flops = CONTEXT * weights  # two operations for each weight, of two bytes
    share = flops / ours["prefill"] / 1e9 / peak_tflops
    prefill: Row = {"what": f"prefill of {CONTEXT} tokens", "share": share, "ms": ours["prefill"]}
    prefill["peak_tflops"] = peak_tflops
    yield prefill | ({"target": f"prefill of an {shape.name}"} if shape.is_judged else {})
    for graphs in (False, True):
        if graphs:
            device.capture()
            yield {"what": "graphs", "ok": bool(device.graph_sizes), "rows": device.graph_sizes}
        for rows in ROWS:
            ms = ours[f"decode of {rows}"] = _decode_ms(device, rows)
            device._slots.lengths[:rows] = CONTEXT + 1
            moved = weights + rows * CONTEXT * model.geometry.token_bytes
            how = "graphs" if graphs else "kernel by kernel"
            row: Row = {"what": f"decode of {rows}, {how}", "share": moved / ms / 1e6 / copy_gb_s(), "ms": ms}
            counted = f"{rows} sequence{'s' if rows > 1 else ''}"
            is_judged = graphs and shape.is_judged
            yield row | ({"target": f"decode of an {shape.name}, {counted}"} if is_judged else {})
    device.close()
    module = model.module
    del model, device  # and with them its KV
    torch.cuda.empty_cache()
    for name, ms in _of_transformers(module).items():
        yield {"what": f"{name}, by transformers", "ms": ms, "times_as_long": ms / ours[name]}


def _prefill_ms(device: Any) -> float:
    """Of one prompt, which each slot gets in turn: the median."""
    from memserve.instance.events import OpenSequence, StepPlan
    from memserve.types import SamplingParams, StopParams

    took, blocks = [], CONTEXT // BLOCK_TOKENS + 8
    for slot in range(max(ROWS)):
        own = list(range(slot * blocks, (slot + 1) * blocks))
        tokens = np.full(CONTEXT, 7, np.int32)
        opened = OpenSequence(slot, tokens, CONTEXT, 0, SamplingParams(temperature=0), own, stop=StopParams())
        rows_of: Any = {"slots": [slot], "starts": [0], "counts": [CONTEXT], "sample_slots": [(slot,)]}
        took.append(device.execute(StepPlan(slot, open=[opened], **rows_of)).device_ns / 1e6)
    return float(np.median(took))


def _decode_ms(device: Any, rows: int, count: int = 44) -> float:
    """Of a step, two plans in flight."""
    from memserve.instance.events import StepPlan

    begun: list[Callable[[], object]] = []
    began = 0.0
    for step in range(count):
        if step == 4:
            began = time.perf_counter()
        plan = StepPlan(
            1000 + step, slots=list(range(rows)), starts=[CONTEXT + step] * rows, counts=[1] * rows,
            sample_slots=[(slot,) for slot in range(rows)], decodes=rows,
        )  # fmt: skip
        begun.append(device.begin_step(plan))
        if len(begun) > 1:
            begun.pop(0)()
    begun.pop()()
    return (time.perf_counter() - began) * 1e3 / (count - 4)


def _of_transformers(module: Any, count: int = 20) -> dict[str, float]:
    """Milliseconds of the same work by the module alone, with torch's attention and transformers' own cache."""
    from transformers import DynamicCache

    module.set_attn_implementation("sdpa")
    found: dict[str, float] = {}
    with torch.inference_mode():
        for rows in ROWS:
            ids = torch.full((rows, CONTEXT), 7, device="cuda")
            if rows == 1:
                found["prefill"] = milliseconds(
                    lambda ids=ids: module(ids, past_key_values=DynamicCache(), logits_to_keep=1), 8
                )
            cache = DynamicCache()
            token = module(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            for step in range(count + 4):
                if step == 4:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                token = module(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            torch.cuda.synchronize()
            found[f"decode of {rows}"] = (time.perf_counter() - began) * 1e3 / count
            del cache
    return found
