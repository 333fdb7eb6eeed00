"""Multi-head latent attention: bytes of a token, and steps with latents in pages beside expanded KV and transformers.

    python bench/latents.py [--dtype float32] [--rounds 9] [--layers 4] [--shape v2-lite]

The bytes are of the configurations that transformers has for DeepSeek V2 and V3. The steps are of a random model with
layers of the shape of DeepSeek-V2-Lite or V3, but dense MLPs: captured with latents in its pages, captured with
expanded keys and values, and transformers' own module with SDPA and its cache (which keeps latents too, and expands
them in each step). Decode steps of several sequences, a prompt, and a chunk behind a cached prefix. Contenders take
turns; figures are medians of the CPU time of one thread (``OMP_NUM_THREADS=1``), with the median of the rounds' ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness.flags import options, save
from harness.rounds import Samples, turns
from harness.steps import BLOCK_TOKENS, paged_step, random_module, some_ids
from harness.tables import show
from torch import Tensor

from memserve.base.types import KVGeometry
from memserve.model.attention.context import step_attention
from memserve.model.capture.forward import capture_forward, release_weights
from memserve.model.loading.probe import probe_model
from memserve.system.memory import geometry_from_config

VOCAB, CONTEXT_MAX = 1024, 8192
SHAPES = {
    "v2-lite": {"hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": None, "intermediate_size": 2816},
    "v3": {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "intermediate_size": 2048},
}
"""MLPs have about as many values as one token uses of the experts of V2-Lite, or less (V3)."""
CASES = {  # sequences, new tokens of each, context behind them
    "decode 1 of 512": (1, 1, 512),
    "decode 1 of 4096": (1, 1, 4096),
    "decode 8 of 512": (8, 1, 512),
    "decode 8 of 2048": (8, 1, 2048),
    "prompt of 512": (1, 512, 512),
    "64 behind 2048": (1, 64, 2112),
}


def token_bytes() -> list[dict[str, Any]]:
    """Of configurations alone: KV of a token as latents, and expanded."""
    import transformers

    rows = []
    for name in ("DeepseekV2Config", "DeepseekV3Config"):
        config = getattr(transformers, name)()
        latent = geometry_from_config(config.to_dict(), 32)
        heads, key = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        expanded = KVGeometry(config.num_hidden_layers, heads, key, config.v_head_dim, "bfloat16", 32)
        for geometry in (latent, expanded):
            times = expanded.token_bytes / geometry.token_bytes
            rows.append({"config": name, "bytes": geometry.token_bytes, "formula": geometry.token_formula, "x": times})
    return rows


def random_model(shape: str, layers: int, dtype: str) -> Any:
    """A random DeepSeek V2 without experts."""
    import transformers

    sizes = SHAPES[shape] | {"num_hidden_layers": layers, "first_k_dense_replace": layers}
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = transformers.DeepseekV2Config(vocab_size=VOCAB, max_position_embeddings=CONTEXT_MAX, **sizes, **latents)
    return random_module(config, dtype)


class Ours:
    """A captured forward over an arena of its own."""

    def __init__(self, module: Any, dtype: str, *, keep_latents: bool) -> None:
        self.geometry, _ = probe_model(module, dtype, BLOCK_TOKENS, keep_latents=keep_latents)
        forward = capture_forward(module)
        if forward is None:
            raise SystemExit("this model cannot be captured")
        release_weights(module)
        self._forward = forward

    def prepare(self, sequences: int, count: int, context: int) -> Callable[[], Tensor]:
        """A step over zeros."""
        paged = paged_step(self.geometry, VOCAB, sequences, count, context)

        def step() -> Tensor:
            with step_attention(paged.attention()):
                return self._forward(paged.ids, paged.positions, paged.last)

        return step


class Transformers:
    """The module itself, with SDPA and its own cache."""

    def __init__(self, module: Any) -> None:
        module.set_attn_implementation("sdpa")
        self._module = module

    def prepare(self, sequences: int, count: int, context: int) -> Callable[[], Tensor]:
        """A step behind a cache of random latents, which it leaves as it was."""
        from transformers import DynamicCache

        config, before = self._module.config, context - count
        cache, dtype = DynamicCache(config=config), self._module.dtype
        if before:
            for layer in range(config.num_hidden_layers):
                latents, rotary = (
                    torch.randn((sequences, 1, before, dim)).to(dtype)
                    for dim in (config.kv_lora_rank, config.qk_rope_head_dim)
                )
                cache.update(latents, rotary, layer)
        ids = some_ids(sequences * count, VOCAB).view(sequences, count)
        positions = torch.arange(before, context).repeat(sequences, 1)

        def step() -> Tensor:
            with torch.inference_mode():
                out = self._module(
                    input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
            cache.crop(-count)
            logits: Tensor = out.logits
            return logits

        return step


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main() -> None:
    args = options(
        __doc__, dtype="float32", rounds=9, layers=4, shape=("v2-lite", "of layers", tuple(SHAPES))
    )  # fmt: skip
    sizes = token_bytes()
    show(sizes, {"config": "{config}", "KV": "{formula}", "bytes a token": "{bytes:,}", "share": "1/{x:.1f}"})
    torch.set_num_threads(1)
    build = partial(random_model, args.shape, args.layers, args.dtype)
    contenders: dict[str, Any] = {
        "latents": Ours(build(), args.dtype, keep_latents=True),
        "expanded": Ours(build(), args.dtype, keep_latents=False),
        "transformers": Transformers(build()),
    }
    print(f"\n{args.layers} layers of {args.shape}, {args.dtype}, one thread, milliseconds of CPU: medians")
    times, rows = Samples(), []
    for case, shape in CASES.items():
        steps = {name: contender.prepare(*shape) for name, contender in contenders.items()}
        for number, name in turns(args.rounds, steps, warm=2):
            spent_s = cpu_seconds(steps[name])
            times[case, name] += [1e3 * spent_s] if number >= 0 else []
        row: dict[str, Any] = {"step": case} | {name: times.median((case, name)) for name in steps}
        rows.append(row | {f"x {name}": times.ratio((case, name), (case, "latents")) for name in steps})
    columns = {"step": "{step}", **{name: f"{{{name}:.1f}}" for name in contenders}}
    columns |= {f"{name} / latents": f"{{x {name}:.2f}}" for name in ("expanded", "transformers")}
    show(rows, columns)
    save(args, [*sizes, *rows])


if __name__ == "__main__":
    main()
