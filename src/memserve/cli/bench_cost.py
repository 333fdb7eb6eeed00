"""``memserve bench cost``: the cost model, fitted and tried on what it has not seen (level 4)."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from memserve.cli import options as opt
from memserve.cli.profile import PROFILED, ProfiledEngine

SECONDS, QUICK_SECONDS = 180.0, 24.0


@opt.grouped
def cost(
    *,
    engine: ProfiledEngine = PROFILED,
    seconds: Annotated[float | None, typer.Option(min=1, help="About how long to measure.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less exact: under a minute.")] = False,
    save: Annotated[bool, typer.Option(help="Keep the profile for serve and instance, in the cache folder.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")] = None,
) -> None:
    """Fit the cost model on this machine, and hold it against measurements that it has not seen (figure 13)."""
    from memserve.runtime.process import set_thread_environment

    set_thread_environment()
    from memserve.bench.campaign import default_folder
    from memserve.bench.cost.held_out import FULL, QUICK
    from memserve.bench.cost.report import write_cost
    from memserve.bench.cost.results import CostResults
    from memserve.bench.cost.run import CostPlan, measure
    from memserve.bench.report import REPORT
    from memserve.bench.results import new_folder

    plan = CostPlan(seconds or (QUICK_SECONDS if quick else SECONDS), save, QUICK if quick else FULL)
    results = CostResults(shlex.join(["memserve", *sys.argv[1:]]))
    folder = new_folder(out or default_folder())
    begin = time.monotonic()
    measure(plan, engine, results, lambda line: typer.echo(f"{time.monotonic() - begin:5.1f} s  {line}", err=True))
    write_cost(results, folder)
    for curve, found in results.accuracy.items():
        errors = f"off by {found.median_error:.1%}, worst {found.worst_error:.1%}"
        typer.echo(f"{curve:<20}{found.points:>4} points, {errors}")
    if results.saved is not None:
        typer.echo(f"profile: {results.saved}")
    typer.echo(f"report: {folder / REPORT}")
    if results.partial is not None:
        raise typer.Exit(1)
