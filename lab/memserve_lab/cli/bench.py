"""``memserve bench``: measurements of this installation; defines ``engine``, ``pool`` and ``cost``."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.base.config import EngineOptions
from memserve.cli import flags as opt
from memserve.cli.profile import PROFILED, ProfiledEngine
from memserve_lab.cli import bench_load, bench_serve, bench_studies
from memserve_lab.cli.bench_workload import workload

if TYPE_CHECKING:
    from memserve_lab.bench.engine import Figure


ON_CPU = EngineOptions(device="cpu")


@opt.grouped
def pool(
    *,
    engine: Annotated[EngineOptions, opt.Only("model", "dtype", "kv_memory_bytes", "block_tokens")] = ON_CPU,
    blocks: Annotated[str | None, typer.Option(help="Comma-separated: blocks per call.")] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(help="Comma-separated: prompt lengths at which indexes are compared.")
    ] = None,
    tree_prompts: Annotated[int | None, typer.Option(min=0, help="Other prompts in the index, 4,096 tokens each.")] = (
        None
    ),
    rounds: Annotated[int | None, typer.Option(min=3, help="Repetitions of calls that move no bytes.")] = None,
    copy_rounds: Annotated[int | None, typer.Option(min=2, help="Repetitions of calls that move bytes.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller measurements: under a minute.")] = False,
    out: bench_load.Folder = None,
) -> None:
    """Measure MemPool's calls, its index beside hash indexes, and aggregated against discrete transfer."""
    from memserve.system.process import set_thread_environment

    set_thread_environment()
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.pool_study import FULL, QUICK, PoolPlan, PoolResults, PoolStudy

    plan: PoolPlan = bench_load.chosen(
        QUICK if quick else FULL,
        blocks=bench_load.parse_counts(blocks, "--blocks 1,16,128"),
        prompt_tokens=bench_load.parse_counts(prompt_tokens, "--prompt-tokens 512,2048"),
        tree_prompts=tree_prompts, rounds=rounds, copy_rounds=copy_rounds,
    )  # fmt: skip
    results = PoolResults(command=bench_load.command())
    bench_load.run_study(PoolStudy(plan, engine, results), RunFolder(out), timed=True)


SECONDS, QUICK_SECONDS = 180.0, 24.0


@opt.grouped
def cost(
    *,
    engine: ProfiledEngine = PROFILED,
    seconds: Annotated[float | None, typer.Option(min=1, help="Approximate seconds to measure.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A less exact fit: under a minute.")] = False,
    save: Annotated[bool, typer.Option(help="Save the profile in the cache folder, for serve and instance.")] = True,
    out: bench_load.Folder = None,
) -> None:
    """Fit the cost model on this machine, and compare it with measurements that it has not seen (figure 13)."""
    from memserve.system.process import set_thread_environment

    set_thread_environment()
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.cost_model import FULL, QUICK, CostPlan, CostResults, CostStudy

    plan = CostPlan(seconds or (QUICK_SECONDS if quick else SECONDS), save, QUICK if quick else FULL)
    results = CostResults(command=bench_load.command())
    bench_load.run_study(CostStudy(plan, engine, results), RunFolder(out), timed=True)


app = typer.Typer(help="Measure memserve on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.command("load")(bench_load.load)
app.command("serve")(bench_serve.serve)
app.command("capacity")(bench_load.capacity)
app.command("pool")(pool)
app.command("cost")(cost)
app.command("concurrency")(bench_studies.concurrency)
app.command("layerwise")(bench_studies.layerwise)


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure memserve on this machine."""
    if context.invoked_subcommand == workload.__name__:
        return  # measures nothing: other programs may run
    from memserve.system.process import busy_note, measure_busy_cores

    if (note := busy_note(measure_busy_cores())) is not None:
        typer.echo(f"warning: {note}", err=True)


app.command()(workload)


@app.command()
@opt.grouped
def engine(
    *,
    options: Annotated[EngineOptions, opt.Only("model", "dtype", "kv_memory_bytes")],
    repeats: Annotated[int, typer.Option(min=1, help="Runs for each figure; medians are printed.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Prefill, decode, TTFT, the scheduler's share of a step, and the memory report."""
    started = time.perf_counter()
    from memserve.system.process import set_thread_environment

    set_thread_environment()
    from memserve.api.llm import LLM
    from memserve.system.process import CpuWatch, busy_note
    from memserve_lab.bench.engine import Figure, bench_engine, describe

    watch = CpuWatch()
    with LLM(options.model, dtype=options.dtype, kv_memory=options.kv_memory_bytes) as llm:
        ready_s = time.perf_counter() - started
        head = {**describe(llm), "ready_s": round(ready_s, 2)}
        typer.echo(json.dumps(head) if as_json else "  ".join(f"{k}={v}" for k, v in head.items()))
        for figure in bench_engine(llm, repeats=repeats):
            _print(figure, as_json)
    if (others_cores := watch.others_cores()) is not None:
        doubt = busy_note(others_cores)
        note = f"not to be trusted: {doubt}" if doubt else ""
        _print(Figure("other programs on this machine", others_cores, "cores", note), as_json)


def _print(figure: Figure, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(figure)))
    else:
        typer.echo(f"{figure.name:<44}{figure.value:>12.2f} {figure.unit:<16}{figure.note}")
