"""``memserve bench serve``: settings side by side, with a report and plots (level 4)."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.bench.studies import STUDIES, Size, Study
from memserve.cli import options as opt
from memserve.cli.load import SloJct, SloTpot, SloTtft, Timeout, VocabSize, read_slo

if TYPE_CHECKING:
    from memserve.bench.campaign import Plan
    from memserve.bench.metrics import Slo

SETTINGS = "PD,PD-CC,1P1D,1P1D-CC1,1P1D-CC2,1P1D-CC3"
QUICK_SETTINGS = "PD,PD-CC,1P1D,1P1D-CC2,1P1D-CC3"
WORKLOADS = "sharegpt,loogle,react"
FULL_SEEDS, FULL_MINUTES = 3, 28.0

QUICK = Size(sessions=3, turns_max=3, prompt_tokens_max=1024, output_tokens_max=8, rate=3.0)
FULL = Size(sessions=5, turns_max=4, prompt_tokens_max=1536, output_tokens_max=48, rate=1.5)
"""What two cores and the bundled model can bear; a larger machine wants larger figures."""
TURNS = Size(sessions=4, turns_max=6, prompt_tokens_max=4096, output_tokens_max=96, rate=0.8)
POLICIES = Size(sessions=6, turns_max=2, prompt_tokens_max=1536, output_tokens_max=8, rate=2.5)


def serve(
    workload: Annotated[
        str | None, typer.Option(help=f"Comma-separated; `memserve bench workload` knows more.  [default: {WORKLOADS}]")
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated: PD-CC, 1P2D, 1P1D-CC2/session/by-layer ...  [default: {SETTINGS}]"),
    ] = None,
    studies: Annotated[
        str | None,
        typer.Option(help=f"Any of {', '.join(STUDIES)}. Default: all; settings only where you chose any or --quick."),
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="How many a PD without a number has.")] = 2,
    base_url: Annotated[
        list[str] | None, typer.Option(help="A further setting: NAME=URL of any server that runs; repeatable.")
    ] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets. Without: made from the seed.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and short requests, one seed: under three minutes.")] = (
        False
    ),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="So many repetitions, each with its own sample.  [default: 3]")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Begin no seed that would not end within so long.  [default: 28]")
    ] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Sessions of each workload.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests a second (Poisson).")] = None,
    share_ratio: Annotated[str | None, typer.Option(help="Comma-separated: every session so many times.")] = None,
    prompt_tokens_max: Annotated[int | None, typer.Option(min=16, help="Cut prompts, history included.")] = None,
    output_tokens_max: Annotated[int | None, typer.Option(min=1, help="Cut answers.")] = None,
    turns_max: Annotated[int | None, typer.Option(min=1, help="Cut sessions.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Every answer has its full length: equal work for all.")] = True,
    cache_salt: Annotated[
        bool, typer.Option(help="No pass finds another's cache: a salt of its own goes with its requests.")
    ] = True,
    vocab_size: VocabSize = None,
    serve_flags: Annotated[str, typer.Option(help="Further flags for every `memserve serve`, in quotes.")] = "",
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    timeout_s: Timeout = 600.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")] = None,
) -> None:
    """Measure settings side by side on the same workloads; write results, records, a report and plots."""
    from memserve.bench.campaign import Plan
    from memserve.bench.load.client import require_aiohttp
    from memserve.bench.meters import weighing
    from memserve.bench.settings import named_server
    from memserve.bench.studies import parse_ratios, parse_studies

    require_aiohttp()
    given = {
        "sessions": sessions, "turns_max": turns_max, "prompt_tokens_max": prompt_tokens_max,
        "output_tokens_max": output_tokens_max, "rate": rate,
    }  # fmt: skip
    sized = {name: value for name, value in given.items() if value is not None}
    chosen = quick or any(value is not None for value in (workload, settings, share_ratio))
    names = parse_studies(studies if studies is not None else "settings" if chosen else ",".join(STUDIES))
    settings = settings if settings is not None else QUICK_SETTINGS if quick else SETTINGS
    contenders = ",".join([settings, *map(named_server, base_url or ())])
    meter, own_vocab_size = weighing(model if settings.strip() else None)
    plan = Plan(
        studies=_studies(
            names, contenders, instances, workload or WORKLOADS, parse_ratios(share_ratio or "1"), quick, sized, data
        ),
        seeds=tuple(range(seeds or (1 if quick else FULL_SEEDS))),
        serve_flags=("--model", model, *shlex.split(serve_flags)),
        ignore_eos=ignore_eos,
        vocab_size=vocab_size or own_vocab_size,
        timeout_s=timeout_s,
        minutes_max=minutes if minutes is not None else FULL_MINUTES,
        meter=meter,
        salted=cache_salt,
    )
    _run(plan, out, read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms))


def _studies(
    names: tuple[str, ...], contenders: str, instances: int, workloads: str, ratios: tuple[float, ...], quick: bool,
    sized: dict[str, float], data: Path | None,
) -> tuple[Study, ...]:  # fmt: skip
    """What the user chose goes to the study of settings; the two others are what they are."""
    from memserve.bench.settings import parse_settings
    from memserve.bench.studies import policies_study, settings_study, turns_study

    size = dataclasses.replace(QUICK if quick else FULL, **sized)  # type: ignore[arg-type]
    makers = {
        "settings": lambda: settings_study(parse_settings(contenders, instances), workloads, ratios, size, data),
        "turns": lambda: turns_study(TURNS, data),
        "policies": lambda: policies_study(POLICIES, data),
    }
    return tuple(makers[name]() for name in names)


def _run(plan: Plan, out: Path | None, slo: Slo) -> None:
    from memserve.bench.campaign import build_all, default_folder, measure
    from memserve.bench.load.driver import sigterm_interrupts
    from memserve.bench.paper import compare
    from memserve.bench.report import REPORT, write_report
    from memserve.bench.results import RunFolder, sum_up
    from memserve.bench.shapes import shapes_of
    from memserve.bench.text import describe

    workloads = build_all(plan)  # reads the data: what is wrong with it is said before anything is started
    shapes = shapes_of(workloads, plan.meter)
    folder = RunFolder(out or default_folder())
    with sigterm_interrupts():
        measured = measure(plan, workloads, folder, lambda line: typer.echo(line, err=True))
    results = sum_up(
        measured.records, measured.passes, slo,
        shlex.join(["memserve", *sys.argv[1:]]), measured.notes, shapes, measured.stopped,
    )  # fmt: skip
    results = compare(dataclasses.replace(results, models=tuple(measured.models)), measured.records)
    folder.finish(results)
    write_report(results, folder.path)
    typer.echo("\n".join(describe(results)))
    typer.echo(f"report: {folder.path / REPORT}")
    if measured.partial is not None:
        raise typer.Exit(1)
