"""``memserve bench cost``: the cost model, fitted and tried on what it has not seen (level 4)."""

from __future__ import annotations

from typing import Annotated

import typer

from memserve.cli import bench_options as by
from memserve.cli import options as opt
from memserve.cli.profile import DRAM_BYTES
from memserve.config import EngineOptions
from memserve.units import parse_bytes

SECONDS, QUICK_SECONDS = 180.0, 24.0


def cost(
    model: opt.Model = opt.DEFAULT_MODEL,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    device: opt.DeviceName = opt.DEFAULTS.device,
    kv_memory: opt.KvMemory = opt.DEFAULT_KV_MEMORY,
    threads: opt.Threads = None,
    block_tokens: opt.BlockTokens = opt.DEFAULTS.block_tokens,
    seconds: Annotated[float | None, typer.Option(min=1, help="About how long to measure.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less exact: under a minute.")] = False,
    save: Annotated[bool, typer.Option(help="Keep the profile for serve and instance, in the cache folder.")] = True,
    out: by.Folder = None,
) -> None:
    """Fit the cost model on this machine, and compare it with measurements that it has not seen (figure 13)."""
    from memserve.runtime.threads import set_thread_environment

    set_thread_environment()
    from memserve.bench.cost import CostPlan, CostResults, CostStudy
    from memserve.bench.held_out import FULL, QUICK
    from memserve.bench.study import RunFolder

    options = EngineOptions(
        model=model, dtype=dtype, device=device, kv_memory_bytes=parse_bytes(kv_memory), dram_memory_bytes=DRAM_BYTES,
        threads=threads, block_tokens=block_tokens,
    )  # fmt: skip
    plan = CostPlan(seconds or (QUICK_SECONDS if quick else SECONDS), save, QUICK if quick else FULL)
    by.run_study(CostStudy(plan, options, CostResults(command=by.command())), RunFolder(out), timed=True)
