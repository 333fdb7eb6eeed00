"""``memserve bench pool``: MemPool's calls, its index, and its block aggregation (level 4)."""

from __future__ import annotations

from typing import Annotated

import typer

from memserve.cli import bench_options as by
from memserve.cli import options as opt
from memserve.config import EngineOptions
from memserve.units import parse_bytes


def pool(
    model: opt.Model = opt.DEFAULT_MODEL,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    kv_memory: opt.KvMemory = opt.DEFAULT_KV_MEMORY,
    block_tokens: opt.BlockTokens = opt.DEFAULTS.block_tokens,
    blocks: Annotated[str | None, typer.Option(help="Comma-separated: blocks of a call.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Comma-separated: lengths at which indexes race.")] = None,
    tree_prompts: Annotated[int | None, typer.Option(min=0, help="Other prompts in the index, 4,096 tokens each.")] = (
        None
    ),
    rounds: Annotated[int | None, typer.Option(min=3, help="Repetitions of calls that move no bytes.")] = None,
    copy_rounds: Annotated[int | None, typer.Option(min=2, help="Repetitions of calls that move bytes.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller: under a minute.")] = False,
    out: by.Folder = None,
) -> None:
    """Measure MemPool's calls, its index beside hash indexes, and aggregated against discrete transfer."""
    from memserve.runtime.threads import set_thread_environment

    set_thread_environment()
    from memserve.bench.pool.study import FULL, QUICK, PoolPlan, PoolResults, PoolStudy
    from memserve.bench.study import RunFolder

    plan: PoolPlan = by.chosen(
        QUICK if quick else FULL,
        blocks=by.parse_counts(blocks, "--blocks 1,16,128"),
        prompt_tokens=by.parse_counts(prompt_tokens, "--prompt-tokens 512,2048"),
        tree_prompts=tree_prompts, rounds=rounds, copy_rounds=copy_rounds,
    )  # fmt: skip
    options = EngineOptions(
        model=model, dtype=dtype, device="cpu", kv_memory_bytes=parse_bytes(kv_memory), block_tokens=block_tokens
    )
    by.run_study(PoolStudy(plan, options, PoolResults(command=by.command())), RunFolder(out), timed=True)
