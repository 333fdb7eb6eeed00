"""Quantised folders of every format that is served, and what transformers answers with the dequantised values."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memserve.model.attention.context import OrderedAttention, step_attention
from memserve.model.capture.forward import CapturedForward, capture_forward
from memserve.model.loading.loader import LoadedModel, load_model
from memserve.model.loading.probe import DenseAttention
from memserve.model.states.memory import LoneSlot
from quantised_folders import Quantise, awq, compressed, fp8, gptq, quantised_folder
from tiny_models import VOCAB, tiny_module

SIZES = {"hidden_size": 64, "intermediate_size": 128}
BY_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
FLOAT8, FLOAT4 = {"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 4, "scale_dtype": torch.uint8}
GROUPS = {"num_bits": 4, "group_size": 32, "strategy": "group"}
CHANNELS = {"num_bits": 8, "strategy": "channel"}
FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "gptq4": gptq(),
    "gptq4_groups_of_64": gptq(size=64),
    "gptq4_order": gptq(order=True),
    "gptq8_v2": gptq(8, version="gptq_v2"),
    "gptq3_order": gptq(3, order=True),
    "gptq2": gptq(2),
    "awq4": awq(),
    "awq8": awq(8),
    "w4a16": compressed(GROUPS),
    "w4a16_asymmetric": compressed(GROUPS | {"symmetric": False}),
    "w8a16": compressed(CHANNELS),
    "w8a8": compressed(CHANNELS, BY_TOKEN),
    "w8a8_asymmetric": compressed(CHANNELS | {"symmetric": False}, BY_TOKEN),
    "w8a8_tensor": compressed({"num_bits": 8, "strategy": "tensor"}, BY_TOKEN),
    "mxfp4": compressed(FLOAT4 | {"strategy": "group", "group_size": 32}),
    "fp8_tensor": compressed(FLOAT8 | {"strategy": "tensor"}, FLOAT8 | {"strategy": "tensor", "dynamic": True}),
    "fp8_channel": compressed(FLOAT8 | {"strategy": "channel"}, FLOAT8 | {"strategy": "token", "dynamic": True}),
    "fp8_block": compressed(
        FLOAT8 | {"strategy": "block", "block_structure": [32, 32]},
        FLOAT8 | {"strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "fp8_scale_inv": fp8(),
    "fp8_one_scale": fp8(None, "weight_scale"),
}
NO_INTEGERS = {name for name in FORMATS if name.startswith("fp8")}
"""Activations meet them as they are."""
FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe", "phi3")
_HEADS = {"mamba_n_heads": 8}
_SIZES_OF: dict[str, dict[str, int]] = {
    "qwen3_moe": {"moe_intermediate_size": 32}, "mamba2": {"num_heads": 8}, "bamba": _HEADS,
    "granitemoehybrid": _HEADS | {"shared_intermediate_size": 64}, "falcon_h1": _HEADS | {"mamba_d_ssm": 128},
    "jamba": {"mamba_dt_rank": 32}, "mamba": {"time_step_rank": 32},
    "qwen3_next": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}  # fmt: skip
"""With weights that are whole groups of inputs."""


def folders_of(family: str, kind: str, folder: Path, **sizes: int) -> tuple[Path, Path]:
    """A tiny model of ``family`` quantised as ``kind``: the folder, and that of the numbers."""
    module = tiny_module(family, **(SIZES | _SIZES_OF.get(family, {}) | sizes))
    return quantised_folder(module, folder, *FORMATS[kind])


def load(folder: Path, dtype: str = "float32", quantization: str = "none") -> LoadedModel:
    """On a CPU."""
    return load_model(str(folder), dtype, "cpu", quantization=quantization)


def captured(model: LoadedModel) -> CapturedForward:
    """The forward of ``model``, which can be captured."""
    forward = capture_forward(model.module)
    assert forward is not None
    return forward


def logits(forward: Any, tokens: int = 40, rows: int = 8, *, model: LoadedModel | None = None) -> Tensor:
    """Of the last ``rows`` tokens; ``model``: of a forward whose layers may have states."""
    ids = (torch.arange(tokens) + 1) * 7919 % VOCAB
    states = LoneSlot(model.states).passed_on(tokens) if model is not None and model.states else nullcontext()
    with step_attention(OrderedAttention(DenseAttention())), states, torch.inference_mode():
        return torch.as_tensor(forward(ids, torch.arange(tokens), torch.arange(tokens - rows, tokens))).float()


def expected_logits(plain: Path, tokens: int = 40, rows: int = 8) -> Tensor:
    """Of transformers, in float32, with the dequantised values."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    ids = (torch.arange(tokens) + 1) * 7919 % VOCAB
    with torch.inference_mode():
        return module(input_ids=ids[None], use_cache=False).logits[0, -rows:]


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square, as a share of the logits' spread."""
    return float((got - want).square().mean().sqrt() / want.std())
