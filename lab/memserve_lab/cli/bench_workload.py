"""``memserve bench workload``: describes a workload, without sending anything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from memserve.cli.profile import require_matplotlib, save_plot
from memserve_lab.bench.catalogue import BUILT_IN, KINDS, Arrivals, Recipe, build
from memserve_lab.bench.load.prompts import model_meter
from memserve_lab.bench.results import BLOCK_TOKENS, Shape, shape_of
from memserve_lab.bench.settings import kind_of
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.shape import Caps
from memserve_lab.workloads.statistics import Measured, Spread, Summary, measure, summarize
from memserve_lab.workloads.tokens import Meter

Count = int | None


def workload(
    kind: Annotated[str, typer.Option(help=f"Comma-separated; any of {', '.join(KINDS)}.")] = "chat",
    data: Annotated[
        Path | None, typer.Option(help="Folder of data sets. Default: workloads made from the seed.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Your own JSONL, for the kind 'file'.")] = None,
    sessions: Annotated[Count, typer.Option(min=1, help="Sessions to sample, generate, or take from a trace.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    share_ratio: Annotated[float, typer.Option(min=1, help="Copies of every session.")] = 1.0,
    prompt_tokens_max: Annotated[Count, typer.Option(min=1, help="Cut longer prompts, history included.")] = None,
    output_tokens_max: Annotated[Count, typer.Option(min=1, help="Cut longer answers.")] = None,
    turns_max: Annotated[Count, typer.Option(min=1, help="Cut sessions with more turns.")] = None,
    block_tokens: Annotated[Count, typer.Option(min=1, help="Scale a trace's blocks to this size.")] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="How arrival times are made.")] = Arrivals.RECORDED,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    users: Annotated[int, typer.Option(min=1, help="Users of a closed loop.")] = 1,
    speed: Annotated[float, typer.Option(help="Speed-up of recorded times.")] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(help="Count tokens with this model's tokenizer. Default: four bytes of text per token."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the distributions (.png, .svg, .pdf); with --data, beside those of the generated workload."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per workload.")] = False,
) -> None:
    """Describe a workload: lengths, turns and shared prefixes."""
    if plot is not None:
        require_matplotlib()
    meter = model_meter(model) if model is not None else None
    shapes: list[Shape] = []
    for name in map(kind_of, kind.split(",")):
        recipe = Recipe(
            kind=name, data=data, file=file, sessions=sessions, seed=seed, share_ratio=share_ratio,
            caps=Caps(prompt_tokens_max, output_tokens_max, turns_max), block_tokens=block_tokens,
            arrivals=arrivals, requests_per_s=rate, users=users, speed=speed,
        )  # fmt: skip
        workload_made, measured = _measured(recipe, meter)
        summary = summarize(workload_made, measured)
        typer.echo(json.dumps(dataclasses.asdict(summary)) if as_json else "\n".join(_lines(summary)))
        if plot is not None:
            shapes.append(
                shape_of(f"{name}, {workload_made.source}" if data else name, workload_made.source, [measured])
            )
            if data is not None and name in BUILT_IN:
                stand_in, measured = _measured(dataclasses.replace(recipe, data=None), meter)
                shapes.append(shape_of(f"{name}, {stand_in.source}", stand_in.source, [measured]))
    if plot is not None:
        from memserve_lab.bench.serve import draw_shapes

        save_plot(lambda pyplot: draw_shapes(pyplot, shapes), plot)


def _measured(recipe: Recipe, meter: Meter | None) -> tuple[Workload, Measured]:
    workload_made = build(recipe, meter)
    return workload_made, measure(workload_made, block_tokens=recipe.block_tokens or BLOCK_TOKENS, meter=meter)


def _lines(summary: Summary) -> list[str]:
    """The summary as a table."""
    lines = [f"{summary.kind}: {summary.sessions} sessions, {summary.requests} requests, from {summary.source}"]
    lines += [f"arrivals: {summary.arrivals}; the last is due after {summary.due_last_s:.0f} s"]
    lines += [f"note: {note}" for note in summary.notes]
    lines += [f"{'':<28}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}{'max':>10}"]
    lines += [_row("turns of a session", summary.turns, 1), _row("prompt tokens", summary.prompt_tokens)]
    lines += [
        _row("output tokens", summary.output_tokens),
        _row("prompt per output token", summary.prompt_per_output, 1),
    ]
    lines += [_row("shared share of a request", summary.shared_share_of_request, 3)]
    lines += [f"shared prefix, all blocks: {summary.shared_share:.3f} of {summary.blocks:,} (with an unlimited cache)"]
    return lines


def _row(name: str, spread: Spread, digits: int = 0) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return f"{name:<28}" + "".join(f"{value:>10.{digits}f}" for value in values)
