"""Tiny random models with attention that goes through the step context, for tests of the captured forward."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from memserve.model.attention.context import ATTENTION_NAME, register_attention

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
