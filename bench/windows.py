"""Bytes of a sequence by configuration, of windows, states and latents; and KV of windows of a real model, apart beside
together.

    python bench/windows.py [--model FOLDER] [--tokens 8192] [--rounds 3] [--vllm PYTHON]

The first table is of published configurations, in bfloat16: what one sequence of so many tokens holds while it decodes
(`WindowPages`, the rule of the scheduler), beside KV of all layers kept for all tokens, and beside the formula: every
layer that reads everything for each token, every other layer for its window or, at most, its chunk. ``--vllm``: what
vLLM's own functions (`get_kv_cache_groups`, `max_memory_usage_bytes`) say that such a request takes at most, with as
many tokens in a step.

The second is of published configurations with a recurrent state or latents: bytes, and sequences that fit into 40 GiB,
alone and with what the next request can go on from (one snapshot; vLLM's ``mamba_cache_mode`` ``align``, the one that
its prefix caching has). vLLM's pages are all as large as a layer's state, in steps of 16 tokens, as its platforms align
them.

The third is of ``--model``, measured in one process each, in turns: the blocks that are held while it decodes behind
a prompt of so many tokens, without a cache, and the time of a token and of the prompt (medians).
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from harness.flags import options, save
from harness.tables import show

from memserve import LLM
from memserve.base.layer_kv import LayerKv, LayerLayout, WindowPages, keep_every_layer, lay_out
from memserve.base.states import NO_STATE, StateGeometry, StatePart, divide_memory
from memserve.base.types import KVGeometry, SamplingParams
from memserve.base.units import GIB, ceil_div

STEP_TOKENS = 512
ANSWER_TOKENS = 64


@dataclass(frozen=True)
class Configuration:
    """The KV of a published model; ``period`` N: each Nth layer reads everything."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    window: int
    period: int
    whole: tuple[int, int] | None = None
    """Heads and their size of layers that read everything; None: as of the others."""
    sharing: int = 0
    """So many layers, the last ones, read the KV of the last one of their kind before them."""
    chunk: int = 0
    """In place of a window."""

    @property
    def kept(self) -> list[LayerKv]:
        """What the layers keep."""
        heads, dim = self.whole or (self.kv_heads, self.head_dim)
        local = LayerKv(self.kv_heads, self.head_dim, self.head_dim, self.window, self.chunk)
        kinds = [LayerKv(heads, dim, dim) if (layer + 1) % self.period == 0 else local for layer in range(self.layers)]
        own = self.layers - self.sharing
        owners = {kind: own - 1 - kinds[:own][::-1].index(kind) for kind in set(kinds)}
        return kinds[:own] + [replace(kind, owner=owners[kind]) for kind in kinds[own:]]


CONFIGURATIONS = (
    Configuration("Gemma 3 270M", 18, 1, 256, 512, 6),
    Configuration("Gemma 3 4B", 34, 4, 256, 1024, 6),
    Configuration("Gemma 3 12B", 48, 8, 256, 1024, 6),
    Configuration("Gemma 3 27B", 62, 16, 128, 1024, 6),
    Configuration("Gemma 2 9B", 42, 8, 256, 4096, 2),
    Configuration("Gemma 4 E2B", 35, 1, 256, 512, 5, (1, 512), 20),
    Configuration("Gemma 4 E4B", 42, 2, 256, 512, 6, (2, 512), 18),
    Configuration("Gemma 4 26B-A4B", 30, 8, 256, 1024, 6, (2, 512)),
    Configuration("Gemma 4 31B", 60, 16, 256, 1024, 6, (4, 512)),
    Configuration("Llama 4 Scout", 48, 8, 128, 0, 4, chunk=8192),
    Configuration("gpt-oss-20b", 24, 8, 64, 128, 2),
    Configuration("gpt-oss-120b", 36, 8, 64, 128, 2),
    Configuration("OLMo 3 32B", 64, 8, 128, 4096, 4),
)


@dataclass(frozen=True)
class FixedConfiguration:
    """A published model whose layers that attend all keep the same."""

    name: str
    geometry: KVGeometry
    states: StateGeometry = NO_STATE
    state_layers: int = 0


def _delta_net(layers: int) -> StateGeometry:
    """Of each layer: a convolution over 8,192 channels, kernel 4, of which transformers keeps all four columns and vLLM
    three, and 32 heads of 128 x 128."""
    parts = [
        (
            StatePart(layer, "conv", 0, (8192, 4), "bfloat16"),
            StatePart(layer, "recurrent", 1, (32, 128, 128), "float32"),
        )
        for layer in range(layers)
    ]
    return StateGeometry(tuple(part for of_layer in parts for part in of_layer))


FIXED_CONFIGURATIONS = (
    FixedConfiguration("Qwen3-Next 80B-A3B", KVGeometry(12, 2, 256, 256, "bfloat16", 32), _delta_net(36), 36),
    FixedConfiguration("DeepSeek V3", KVGeometry(61, 1, 576, 512, "bfloat16", 32, latent=True)),
)

VLLM = """
import json, sys, types, torch
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
asked, rows = json.loads(sys.stdin.read()), []

def configure(shape):
    config = VllmConfig()
    config.scheduler_config.max_num_batched_tokens = shape["step"]
    config.cache_config.kv_cache_layout = "NHD"
    config.model_config = types.SimpleNamespace(max_model_len=shape["tokens"])
    return config

for shape in asked["fixed"]:
    config = configure(shape)
    mode = config.cache_config.mamba_cache_mode = shape["mode"]
    kind = MLAAttentionSpec if shape["latent"] else FullAttentionSpec
    common = dict(num_kv_heads=shape["heads"], head_size=shape["dim"], dtype=torch.bfloat16)
    state = dict(shapes=tuple(tuple(size) for size in shape["state"]), dtypes=(torch.bfloat16, torch.float32))
    block = 16
    if shape["state_layers"]:
        step = kind(block_size=16, **common).page_size_bytes
        block = 16 * -(-MambaSpec(block_size=-1, **state).page_size_bytes // step)
    page = kind(block_size=block, **common).page_size_bytes
    specs = {f"layers.{layer}": kind(block_size=block, **common) for layer in range(shape["layers"])}
    for layer in range(shape["state_layers"]):
        specs[f"states.{layer}"] = MambaSpec(
            block_size=block if mode == "align" else shape["tokens"], page_size_padded=page, mamba_cache_mode=mode,
            **state)
    groups = utils.get_kv_cache_groups(config, specs)
    rows.append(utils._max_memory_usage_bytes_from_groups(config, groups))
for shape in asked["configurations"]:
    config, specs = configure(shape), {}
    for layer, (heads, dim, window, chunk, keeps) in enumerate(shape["layers"]):
        common = dict(block_size=16, num_kv_heads=heads, head_size=dim, dtype=torch.bfloat16)
        kind, reach = FullAttentionSpec, {}
        if window:
            kind, reach = SlidingWindowSpec, {"sliding_window": window}
        if chunk:
            kind, reach = ChunkedLocalAttentionSpec, {"attention_chunk_size": chunk}
        if keeps:
            specs[f"layers.{layer}"] = kind(**reach, **common)
    groups = utils.get_kv_cache_groups(config, specs)
    rows.append(utils._max_memory_usage_bytes_from_groups(config, groups))
print(json.dumps(rows))
"""


def sequence_bytes(shape: Configuration, tokens: int) -> dict[str, Any]:
    """Of one sequence that decodes behind so many tokens."""
    kept = shape.kept
    layout, together = lay_out(kept, is_apart=True), LayerLayout(tuple(keep_every_layer(kept)))
    if layout is None or not layout.is_apart:
        raise SystemExit(f"the layers of {shape.name} do not lie apart")
    pages = WindowPages(layout.window, layout.part_blocks, 32, STEP_TOKENS, layout.chunk)
    entries = ceil_div(tokens, 32)
    parts = entries - pages.kept_from(tokens)
    reads = [min(tokens, layer.window or layer.chunk or tokens) for layer in kept]
    formula = 2 * sum(layer.elements * count for layer, count in zip(kept, reads, strict=True) if layer.owner is None)
    held = layout.block_geometry("bfloat16", 32).block_bytes * (entries + layout.part_blocks * parts)
    whole = together.block_geometry("bfloat16", 32).block_bytes * entries
    return {
        "model": shape.name, "tokens": tokens, "formula": formula / tokens, "apart": held / tokens,
        "together": whole / tokens, "over": held / formula, "saves": whole / held, "fit": int(40 * GIB // held),
        "fit_together": int(40 * GIB // whole),
    }  # fmt: skip


def fixed_bytes(shape: FixedConfiguration, tokens: int, *, is_kept: bool) -> dict[str, Any]:
    """Of one sequence of ``shape`` that decodes behind so many tokens. ``is_kept``: and of a snapshot behind its
    prompt."""
    block_bytes, entries = shape.geometry.block_bytes, ceil_div(tokens, shape.geometry.block_tokens)
    formula = entries * block_bytes + shape.states.nbytes * (1 + is_kept)
    blocks, fits = entries, 40 * GIB // (entries * block_bytes)
    held = entries * block_bytes
    if shape.states:
        by_slots = [
            divide_memory(shape.geometry, shape.states, 40 * GIB, slots, is_asked=True) for slots in range(1, 512)
        ]
        blocks += by_slots[0].pages.pages_each * is_kept
        fits = max(min(divided.slots, divided.blocks // blocks) for divided in by_slots)
        held = blocks * block_bytes + shape.states.nbytes
    return {
        "model": shape.name, "tokens": tokens, "kept": "kept" if is_kept else "", "formula": formula / tokens,
        "held": held / tokens, "fit": fits,
    }  # fmt: skip


def ask_vllm(python: str, rows: list[dict[str, Any]], fixed_rows: list[dict[str, Any]]) -> None:
    """Add what vLLM counts for each row."""
    fixed = {shape.name: shape for shape in FIXED_CONFIGURATIONS}
    fixed_shapes = [
        {"layers": (shape := fixed[row["model"]]).geometry.num_layers, "heads": shape.geometry.num_kv_heads,
         "dim": shape.geometry.head_dim_k, "latent": shape.geometry.latent, "state_layers": shape.state_layers,
         "state": [(8192, 3), (32, 128, 128)], "mode": "align" if row["kept"] else "none",
         "tokens": row["tokens"], "step": STEP_TOKENS}
        for row in fixed_rows
    ]  # fmt: skip
    by_name = {shape.name: shape for shape in CONFIGURATIONS}
    shapes = [
        {"layers": [(layer.heads, layer.head_dim_k, layer.window, layer.chunk, layer.owner is None)
                    for layer in by_name[row["model"]].kept], "tokens": row["tokens"], "step": STEP_TOKENS}
        for row in rows
    ]  # fmt: skip
    command = [python, "-c", VLLM]
    asked = json.dumps({"fixed": fixed_shapes, "configurations": shapes})
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    for row, nbytes in zip([*fixed_rows, *rows], json.loads(done.stdout.splitlines()[-1]), strict=True):
        row["vllm"], row["vllm_fit"] = nbytes / row["tokens"], 40 * GIB // nbytes


class Held:
    """The blocks that are held while an engine decodes behind a prompt."""

    def __init__(self, llm: LLM, prompt_tokens: int) -> None:
        self._llm, self._ends, self.blocks, self._thread = llm, False, list[int](), threading.Thread(target=self._watch)
        self._from = llm.stats().instance.computed_tokens + prompt_tokens + 8  # a few steps later spare parts are back
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends:
            stats = self._llm.stats().instance
            if stats.computed_tokens >= self._from and stats.sequences_running:
                self.blocks.append(stats.hbm.blocks_total - stats.hbm.blocks_free)
            time.sleep(0.005)  # a sample, not a wait

    def close(self) -> None:
        self._ends = True
        self._thread.join()


def measure(model: str, place: str, tokens: int, kv_memory: str) -> dict[str, Any]:
    """One prompt of so many tokens, and an answer."""
    ids = np.random.default_rng(tokens).integers(100, 1000, tokens).tolist()
    sampling = SamplingParams(temperature=0.0)
    with LLM(model, window_kv=place, kv_memory=kv_memory, enable_prefix_caching=False, threads=1) as llm:
        llm.generate([ids[:64]], sampling, max_tokens=2, ignore_eos=True)  # first touches
        begun_ns = time.perf_counter_ns()
        llm.generate([ids], sampling, max_tokens=1, ignore_eos=True)
        prompt_ns = time.perf_counter_ns() - begun_ns
        held, begun_ns = Held(llm, tokens), time.perf_counter_ns()
        result = llm.generate([ids], sampling, max_tokens=1 + ANSWER_TOKENS, ignore_eos=True)[0]
        spent_ns = time.perf_counter_ns() - begun_ns
        held.close()
        return {
            "place": place, "tokens": tokens, "blocks": median(held.blocks), "context": llm.model.max_model_tokens,
            "block_bytes": llm.model.geometry.block_bytes, "prompt_s": prompt_ns / 1e9,
            "token_ms": (spent_ns - prompt_ns) / ANSWER_TOKENS / 1e6, "answer": list(result.outputs[0].tokens),
        }  # fmt: skip


def main() -> None:
    args = options(__doc__, model=str, tokens=8192, rounds=3, kv_memory="1GiB", vllm=str)
    rows = [sequence_bytes(shape, tokens) for shape in CONFIGURATIONS for tokens in (1024, args.tokens, 32768)]
    fixed_rows = [
        fixed_bytes(shape, tokens, is_kept=is_kept)
        for shape in FIXED_CONFIGURATIONS
        for is_kept in (False, True)[: 1 + bool(shape.states)]
        for tokens in (1024, args.tokens, 32768)
    ]
    if args.vllm:
        ask_vllm(args.vllm, rows, fixed_rows)
    show(rows, {
        "model": "{model}", "tokens": "{tokens:,}", "bytes a token, formula": "{formula:,.0f}", "apart": "{apart:,.0f}",
        "apart / formula": "{over:.2f}", "vLLM, at most": "{vllm:,.0f}", "together": "{together:,.0f}",
        "together / apart": "{saves:.2f}", "fit into 40 GiB apart": "{fit}", "and together": "{fit_together}",
        "and vLLM": "{vllm_fit}",
    })  # fmt: skip
    print()
    show(fixed_rows, {
        "model": "{model}", "tokens": "{tokens:,}", "snapshot": "{kept}", "bytes a token, formula": "{formula:,.0f}",
        "held": "{held:,.0f}", "vLLM, at most": "{vllm:,.0f}", "fit into 40 GiB": "{fit}", "and vLLM": "{vllm_fit}",
    })  # fmt: skip
    measured: list[dict[str, Any]] = []
    if args.model:
        print()
        runs = [
            measure(args.model, place, args.tokens, args.kv_memory)
            for turn in range(args.rounds)
            for place in (("apart", "together") if turn % 2 else ("together", "apart"))
        ]
        if len({tuple(run["answer"]) for run in runs}) != 1:
            raise SystemExit("the answers differ")
        for place in ("together", "apart"):
            mine = [run for run in runs if run["place"] == place]
            row = mine[0] | {name: median(run[name] for run in mine) for name in ("blocks", "prompt_s", "token_ms")}
            row["bytes"] = row["blocks"] * row["block_bytes"] / (args.tokens + ANSWER_TOKENS)
            measured.append(row)
        show(measured, {
            "windows": "{place}", "prompt": "{tokens:,}", "bytes a token held": "{bytes:,.0f}",
            "context in this memory": "{context:,}", "prompt, s": "{prompt_s:.2f}", "ms a token": "{token_ms:.2f}",
        })  # fmt: skip
    save(args, {"configurations": rows, "fixed": fixed_rows, "measured": measured})


if __name__ == "__main__":
    main()
