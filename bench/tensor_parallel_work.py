"""What each worker of a divided instance has to compute, in CPU time: one process, one thread, nothing exchanged.

    python bench/tensor_parallel_work.py [--workers 2] [--model FOLDER] [--dtype float32] [--rounds 6] [--json FILE]
    python bench/tensor_parallel_work.py --family qwen3_5      # or falcon_h1, lfm2, jamba, deepseek_v2: a random model

Three cuts by turns: the whole model; parts that have the queries of their own KV heads; parts as they are served, where
queries make up for KV heads that do not divide evenly. Printed: milliseconds of each part, the medians of the rounds,
and the whole's time for each worker over that of the longest part (1: all workers have as much to do, and nothing is
done twice). CPU time says nothing of waiting and of sums, and can be measured on a machine that does other things, too.
First comes what each has in memory: of the layers' weights, and of the recurrent state of a sequence.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from harness.flags import options, save
from harness.rounds import Samples, turns
from harness.tables import Table

from memserve.base.kv_layout import Parallel, shares
from memserve.model.attention.context import OrderedAttention, StepRows, step_attention
from memserve.model.attention.latents import choose_attention
from memserve.model.capture.forward import best_forward
from memserve.model.loading.loader import DEFAULT_MODEL, load_model
from memserve.model.states.layers import LoneStates, states_of, step_states
from memserve.model.workers.group import collectives
from memserve.model.workers.plans import plan_division
from memserve.model.workers.processes import shares_of
from memserve.model.workers.sharding import shard

CASES = {"decode behind 512 tokens": (1, 513), "prefill of 512": (512, 512), "512 behind 1,536": (512, 2048)}
"""New tokens, and the context that they end."""
DECODES_A_ROUND = 8
ALONE: Any = SimpleNamespace(all_reduce=lambda x: x.clone())
"""In place of the other workers: a sum is read and written, and that is all."""
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 8192, "num_attention_heads": 16}
HEADS = {"num_key_value_heads": 4, "head_dim": 64}
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_ssm": 2048, "mamba_d_state": 128, "mamba_chunk_size": 256}
FAMILIES: dict[str, dict[str, int]] = {
    "qwen3_5": WIDE | HEADS | DELTA,
    "falcon_h1": WIDE | HEADS | MAMBA2,
    "lfm2": WIDE | {"num_key_value_heads": 4},
    "jamba": WIDE | {"num_key_value_heads": 4, "mamba_d_state": 16, "mamba_dt_rank": 64},
    "deepseek_v2": WIDE | {"num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128,
                           "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64, "moe_intermediate_size": 512},
}  # fmt: skip
"""Sizes of the random models: three layers, of which some have a recurrent state."""


class Part:
    """One worker's part of the model, with KV of its own."""

    def __init__(self, args: Namespace, part: int, workers: int, *, lends: bool) -> None:
        model = load_model(args.model, args.dtype, "cpu", threads=1)
        geometry, crew = model.geometry, None
        if workers > 1:
            division = plan_division(model.module, geometry)
            whole, layers = not division.divides_heads, len(division.layers)
            own = shares(Parallel(workers), geometry, whole_heads=whole, layers=layers)
            share = (shares_of(Parallel(workers), model, division) if lends else own)[part]
            shard(model.module, share, geometry)
            crew = SimpleNamespace(
                share=share, stage=SimpleNamespace(announce=lambda: None, await_rank=lambda rank: None)
            )
        self._exchange = None if crew is None else ALONE
        self._states = states_of(model.module).geometry
        self.state_bytes = self._states.nbytes
        heads = {
            id(part.weight) for part in (model.module.get_input_embeddings(), model.module.get_output_embeddings())
        }
        self.weight_bytes = sum(value.nbytes for value in model.module.parameters() if id(value) not in heads)
        self._lone: LoneStates | None = None
        self._forward = best_forward(model.module)
        blocks = max(context for _, context in CASES.values()) // geometry.block_tokens + 1
        self._arena = torch.zeros(blocks * geometry.block_bytes, dtype=torch.uint8)
        self._table = np.arange(blocks, dtype=np.int32)[None]
        self._attention: Any = choose_attention(self._arena, geometry, crew)

    def cpu_ms(self, count: int, context: int) -> float:
        """Of one step."""
        starts, contexts = np.array([0, count], np.int32), np.array([context], np.int32)
        attention = self._attention(StepRows(self._table, np.zeros(1, np.int32), starts, contexts))
        ids, positions = torch.arange(count) % 100 + 7, torch.arange(context - count, context)
        if self._states:
            attention = OrderedAttention(attention)
            if self._lone is None or context == count:
                self._lone = LoneStates(self._states)
        states = step_states(self._lone)
        with torch.inference_mode(), step_attention(attention), states, collectives(self._exchange):
            begin = time.thread_time()
            self._forward(ids, positions, torch.tensor([count - 1]))
            return (time.thread_time() - begin) * 1e3


def main() -> None:
    args = options(__doc__, workers=2, model=DEFAULT_MODEL, family="", dtype="float32", rounds=6)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="memserve-work-") as home:
        if args.family:
            from tiny_models import save_folder, tiny_module

            module = tiny_module(args.family, **FAMILIES[args.family])
            args.model = str(save_folder(module, Path(home) / args.family))
        measure(args)


def measure(args: Namespace) -> None:
    """All cuts of a model by turns."""
    cuts, record = {"own heads": False, "as served": True}, {}
    parts = {("whole", 0): Part(args, 0, 1, lends=False)}
    for cut, lends in cuts.items():
        parts |= {(cut, rank): Part(args, rank, args.workers, lends=lends) for rank in range(args.workers)}
    for (cut, rank), part in parts.items():
        sizes = f"weights of layers {part.weight_bytes / 1e6:.1f} MB, state of a sequence {part.state_bytes:,} bytes"
        print(f"{cut} {rank}: {sizes}")
    table = Table({"step": "{case}", "cut": "{cut}", "whole for each worker": "{each:.1f} ms", "parts": "{text} ms",
                   "evenness": "{evenness:.2f}"})  # fmt: skip
    for case, (count, context) in CASES.items():
        times, rounds = Samples(), args.rounds * (1 if count > 1 else DECODES_A_ROUND)
        for number, key in turns(rounds, parts, warm=1):  # the first is the first use of each shape
            ms = parts[key].cpu_ms(count, context)
            times[key] += [ms] if number >= 0 else []
        cpu_s_each = times.median(("whole", 0)) / args.workers
        record[case] = {"each": cpu_s_each}
        for cut in cuts:
            ms = [times.median((cut, rank)) for rank in range(args.workers)]
            record[case][cut] = {"ms": ms, "evenness": cpu_s_each / max(ms)}
            text = ", ".join(f"{part:.1f}" for part in ms)
            table.show({"case": case, "cut": cut, "each": cpu_s_each, "text": text, **record[case][cut]})
    save(args, record)


if __name__ == "__main__":
    main()
