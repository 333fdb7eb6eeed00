"""``memserve sim layerkv``: LayerKV's figures from the production scheduler."""

from __future__ import annotations

from typing import Annotated

import typer

from memserve.cli.bench_load import Folder, command, parse_rates, run_study
from memserve.errors import UserError

FIGURES = ("context", "devices", "rate", "stagger", "orbitflow")
DEFAULT_FIGURES = FIGURES[:3]


def layerkv(
    *,
    figures: Annotated[str, typer.Option(help=f"What to sweep: {', '.join(FIGURES)}.")] = ",".join(DEFAULT_FIGURES),
    device: Annotated[str, typer.Option(help="Device of each instance: l20, as in the paper, or h200 ...")] = "l20",
    rates: Annotated[str, typer.Option(help="Requests a second of the sweep of rates.")] = "4,5,5.5,6,7,8,10",
    requests: Annotated[int, typer.Option(min=20, help="Requests of each point; of long prompts a quarter.")] = 400,
    settings: Annotated[str, typer.Option(help="Settings whose names have one of these words. Empty: all.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    out: Folder = None,
) -> None:
    """Time to the first token, throughput and missed objectives by context, devices and rate: LayerKV's evaluation.

    KV by request beside KV by layer, as published and as ``--layerwise prompts-first`` does it, in the scheduler that
    serves.
    """
    from memserve.bench.layerkv import LayerKvResults, Plan, contenders, sweeps_of
    from memserve.bench.layerkv_study import LayerKvStudy
    from memserve.bench.study import RunFolder

    wanted = [name.strip() for name in figures.split(",")]
    if unknown := [name for name in wanted if name not in FIGURES]:
        raise UserError(f"unknown figure {unknown[0]!r}", hint=f"some of {', '.join(FIGURES)}")
    words = [word.strip() for word in settings.split(",") if word.strip()]
    chosen = [one for one in contenders() if not words or any(word in one.name for word in words)]
    if not chosen:
        hint = "words of: " + ", ".join(one.name for one in contenders())
        raise UserError(f"no setting has {settings!r} in its name", hint=hint)
    plan = Plan(sweeps_of(wanted, parse_rates(rates)), tuple(chosen), device, requests, seed)
    results = LayerKvResults(command=command(), machine={"simulated": f"one instance of {device}, its roofline"})
    run_study(LayerKvStudy(plan, results), RunFolder(out))
