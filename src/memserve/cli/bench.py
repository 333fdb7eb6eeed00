"""``memserve bench``: measurements of this very installation (level 4)."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.cli import bench_capacity, bench_concurrency, bench_cost, bench_pool, bench_serve, load
from memserve.cli import options as opt
from memserve.cli.workload import workload
from memserve.config import EngineOptions

if TYPE_CHECKING:
    from memserve.bench.engine import Figure

app = typer.Typer(help="Measure memserve on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.command("load")(load.load)
app.command("serve")(bench_serve.serve)
app.command("capacity")(bench_capacity.capacity)
app.command("pool")(bench_pool.pool)
app.command("cost")(bench_cost.cost)
app.command("concurrency")(bench_concurrency.concurrency)


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure memserve on this machine."""
    if context.invoked_subcommand == workload.__name__:
        return  # it measures nothing
    from memserve.runtime.process import busy_note, watched

    if (note := busy_note(watched())) is not None:
        typer.echo(f"warning: {note}", err=True)


app.command()(workload)


@app.command()
@opt.grouped
def engine(
    *,
    options: Annotated[EngineOptions, opt.Only("model", "dtype", "kv_memory_bytes")],
    repeats: Annotated[int, typer.Option(min=1, help="Runs a figure; medians are printed.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Prefill, decode, TTFT, the scheduler's share of a step, and the memory report."""
    started = time.perf_counter()
    from memserve.runtime.process import set_thread_environment

    set_thread_environment()
    from memserve.bench.engine import Figure, bench_engine, describe
    from memserve.llm import LLM
    from memserve.runtime.process import CpuWatch, busy_note

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
