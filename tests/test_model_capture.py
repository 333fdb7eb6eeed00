"""The captured forward against the module it came from, over several families, and the cases that are refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

from memserve.model import capture, fused
from memserve.model.attention import ATTENTION_NAME, register_attention
from memserve.model.backends import choose_attention
from memserve.model.capture import CapturedForward, capture_forward, release_weights
from memserve.model.capture_record import CaptureRefused
from memserve.model.context import attending
from memserve.model.forward import EagerForward
from memserve.model.probe import DenseAttention
from memserve.types import KVGeometry

VOCAB = 131
LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 512},
    "gpt2": {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "pad_token_id": None},
}


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of the family that attends through the step context; its weights differ from their defaults."""
    register_attention()
    config = CONFIG_MAPPING[family](**{**LLAMA_LIKE, **FAMILIES[family]})
    torch.manual_seed(7)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.requires_grad_(False)


class Steps:
    """A paged arena of its own and ragged steps over it: the same steps for every forward that is compared."""

    def __init__(self, module: Any, dtype: str) -> None:
        attention = DenseAttention()
        ids = torch.arange(3)
        with torch.inference_mode(), attending(attention):
            module(input_ids=ids[None], position_ids=ids[None], use_cache=False)
        first = attention.layers[0]
        self.geometry = KVGeometry(len(attention.layers), first.kv_heads, first.head_dim_k, first.head_dim_v, dtype, 32)
        self.blocks = 12
        self.tables = np.arange(self.blocks, dtype=np.int32).reshape(3, 4)[:, ::-1].copy()

    def run(self, forward: Any) -> list[torch.Tensor]:
        """Three sequences: prompts of 5, 40 and 1 tokens, then a decode, a chunk of 9 and a decode, then decodes."""
        arena = torch.zeros(self.blocks * self.geometry.block_bytes, dtype=torch.uint8)
        attention = choose_attention(arena, self.geometry)
        contexts, results = np.zeros(3, dtype=np.int32), []
        for step, counts in enumerate(([5, 40, 1], [1, 9, 1], [1, 1, 1])):
            contexts = contexts + np.array(counts, dtype=np.int32)
            starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            positions = np.concatenate([np.arange(e - n, e) for e, n in zip(contexts, counts, strict=True)])
            ids = torch.arange(len(positions)) * 37 % VOCAB + step
            with attending(attention(self.tables, np.arange(3, dtype=np.int32), starts, contexts)):
                results.append(forward(ids, torch.as_tensor(positions), torch.as_tensor(starts[1:] - 1).long()))
        return results


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_equals_module(family: str) -> None:
    """Ragged batches with context, float32: prompts, chunks and decodes give the logits of the module."""
    module = tiny(family)
    steps = Steps(module, "float32")
    expected = steps.run(EagerForward(module, pack=False))
    captured = capture_forward(module)
    assert captured is not None
    release_weights(module, captured)
    for got, want in zip(steps.run(captured), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
