"""KV as real models have it, by names that tests and ``bench/`` scripts share.

A model with such KV has random weights, and is small in all that KV does not show: the width of its layers, its
vocabulary, its context. Blocks have the layers, heads and sizes of the model that each name stands for.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memserve.base.types import KVGeometry


@dataclass(frozen=True)
class Shape:
    """The KV of one model in bfloat16, and the family (of ``tiny_models``) of a small model with the same KV."""

    model: str
    kv: KVGeometry
    family: str
    query_heads: int

    def in_dtype(self, dtype: str) -> KVGeometry:
        """The same KV in ``dtype``: tests whose tokens must be exact compute in float32."""
        return replace(self.kv, dtype=dtype)

    def with_codes(self, kv_dtype: str) -> Shape:
        """The same KV kept in ``kv_dtype``."""
        return replace(self, kv=replace(self.kv, kv_dtype=kv_dtype))

    @property
    def sizes(self) -> dict[str, int]:
        """What makes a small model of the family have this KV."""
        if self.kv.latent:
            return {
                "num_hidden_layers": self.kv.num_layers,
                "first_k_dense_replace": self.kv.num_layers - 1,
                "num_attention_heads": self.query_heads,
                "num_key_value_heads": self.query_heads,
                "kv_lora_rank": self.kv.head_dim_v,
                "qk_rope_head_dim": self.kv.head_dim_k - self.kv.head_dim_v,
                "head_dim": self.kv.head_dim_k - self.kv.head_dim_v,
                "hidden_size": 8 * self.query_heads,
            }
        return {
            "num_hidden_layers": self.kv.num_layers,
            "num_key_value_heads": self.kv.num_kv_heads,
            "num_attention_heads": self.query_heads,
            "head_dim": self.kv.head_dim_k,
            "hidden_size": 8 * self.query_heads,
        }

    def memory_flags(self, tokens: int, dram_tokens: int = 0, dtype: str = "float32") -> tuple[str, ...]:
        """Flags of an instance that has memory for so much KV."""
        kv = self.in_dtype(dtype)
        room, dram = (some // kv.block_tokens * kv.block_bytes for some in (tokens, dram_tokens))
        memory = ("--kv-memory", f"{room}B", "--dram-memory", f"{dram}B")
        dtypes = ("--dtype", dtype, "--kv-dtype", kv.kv_dtype)
        return (*dtypes, "--block-tokens", str(kv.block_tokens), *memory)

    def module(self, seed: int = 0) -> Any:
        """A small random model with this KV."""
        from tiny_models import tiny_module  # not before it is needed: scripts that move bytes load no torch

        return tiny_module(self.family, seed, **self.sizes)


@dataclass(frozen=True)
class GroupedShape(Shape):
    """A small model whose layers keep several kinds of things; ``kv`` is as much a token as all of them together take
    behind prompts of some hundred tokens."""

    lies_apart: bool = False
    """KV of windows or chunks does, on one tier."""

    @property
    def sizes(self) -> dict[str, int]:
        """The family's own."""
        return {}


TINY = Shape("no model", KVGeometry(3, 2, 8, 8, "bfloat16", 32), "llama", 4)
"""What tests take whose subject is not KV: blocks of 6 KiB."""
SHAPES: Mapping[str, Shape] = {
    "smollm2": Shape("SmolLM2-135M", KVGeometry(30, 3, 64, 64, "bfloat16", 32), "llama", 6),
    "llama3": Shape("Llama 3 8B", KVGeometry(32, 8, 128, 128, "bfloat16", 32), "llama", 8),
    "mqa": Shape("Gemma 2B", KVGeometry(18, 1, 256, 256, "bfloat16", 32), "gemma", 4),
    "long-blocks": Shape("Llama 3 8B", KVGeometry(32, 8, 128, 128, "bfloat16", 64), "llama", 8),
    "moe": Shape("Qwen3 30B A3B", KVGeometry(48, 4, 128, 128, "bfloat16", 32), "qwen3_moe", 8),
    "windows": Shape("Gemma 2 2B", KVGeometry(26, 4, 256, 256, "bfloat16", 32), "gemma2", 8),
    "latents": Shape("DeepSeek V3", KVGeometry(61, 1, 576, 512, "bfloat16", 32, latent=True), "deepseek_v3", 4),
}
"""The axis ``geometry``. Blocks have 720 KiB, 4 MiB, 576 KiB, 8 MiB, 3 MiB, 3.25 MiB and 2.1 MiB; ``windows`` has a
sliding window in every other layer, ``latents`` one row a token and layer, without V."""
GROUPED_SHAPES: Mapping[str, GroupedShape] = {
    "states": GroupedShape("no model", KVGeometry(3, 2, 16, 16, "bfloat16", 32), "qwen3_5", 4),
    "unequal": GroupedShape("no model", KVGeometry(10, 1, 32, 32, "bfloat16", 32), "gemma4", 4, lies_apart=True),
    "chunks": GroupedShape("no model", KVGeometry(4, 2, 16, 16, "bfloat16", 32), "llama4", 4, lies_apart=True),
}
"""Recurrent states beside KV, layers of two shapes with windows, chunks of 48 tokens."""
CODED_SHAPES = tuple(name for name, shape in SHAPES.items() if not shape.kv.latent)
"""Those whose KV may be rounded."""


def add_option(parser: ArgumentParser, default: str = "smollm2") -> None:
    """``--geometry NAME`` of a script that moves blocks."""
    sizes = ", ".join(f"{name} ({shape.kv.block_bytes >> 10} KiB)" for name, shape in SHAPES.items())
    parser.add_argument("--geometry", choices=SHAPES, default=default, help=f"whose KV blocks: {sizes}")
