"""``memserve bench serve``: settings side by side, with a report and plots."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.bench.studies import STUDIES, Size, Study
from memserve.cli import options as opt
from memserve.cli.bench_load import (
    Data,
    Folder,
    Instances,
    ServeFlags,
    Servers,
    SloJct,
    SloTpot,
    SloTtft,
    Timeout,
    VocabSize,
    read_slo,
)
from memserve.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from memserve.bench.campaign import Plan
    from memserve.bench.metrics import Slo


DEFAULT_SETTINGS = "PD,PD-CC,1P1D,1P1D-CC1,1P1D-CC2,1P1D-CC3"
DEFAULT_WORKLOADS = "sharegpt,loogle,react"

Count = int | None
Workloads = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated; `memserve bench workload` lists more.  [default: {DEFAULT_WORKLOADS}]"),
]
Settings = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated: PD-CC, 1P2D, 1P1D-CC2/session/by-layer ...  [default: {DEFAULT_SETTINGS}]"),
]
Studies = Annotated[
    str | None,
    typer.Option(help=f"Any of {', '.join(STUDIES)}. Default: all; settings only where you chose any or --quick."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Few and short requests, one seed: under three minutes.")]
Seeds = Annotated[Count, typer.Option(min=1, help="Repetitions, each with a sample of its own.  [default: 3]")]
Minutes = Annotated[
    float | None, typer.Option(min=0.01, help="Start no repetition that would end later than this.  [default: 28]")
]
Sessions = Annotated[Count, typer.Option(min=1, help="Sessions of each workload.")]
Rate = Annotated[float | None, typer.Option(min=0.001, help="Requests a second (Poisson).")]
ShareRatio = Annotated[str | None, typer.Option(help="Comma-separated: copies of every session.")]
PromptTokensMax = Annotated[Count, typer.Option(min=16, help="Cut prompts, history included.")]
OutputTokensMax = Annotated[Count, typer.Option(min=1, help="Cut answers.")]
TurnsMax = Annotated[Count, typer.Option(min=1, help="Cut sessions.")]
IgnoreEos = Annotated[bool, typer.Option(help="Every answer has its full length: equal work for all.")]
CacheSalt = Annotated[
    bool, typer.Option(help="Send a salt of its own with each pass, so that none finds the cache of another.")
]
QUICK_SETTINGS = "PD,PD-CC,1P1D,1P1D-CC2,1P1D-CC3"
FULL_SEEDS, FULL_MINUTES = 3, 28.0

QUICK = Size(sessions=3, turns_max=3, prompt_tokens_max=1024, output_tokens_max=8, rate=3.0)
FULL = Size(sessions=5, turns_max=4, prompt_tokens_max=1536, output_tokens_max=48, rate=1.5)
"""What two cores and the bundled model sustain; a larger machine needs larger figures."""
TURNS = Size(sessions=4, turns_max=6, prompt_tokens_max=4096, output_tokens_max=96, rate=0.8)
POLICIES = Size(sessions=6, turns_max=2, prompt_tokens_max=1536, output_tokens_max=8, rate=2.5)


def serve(
    workload: Workloads = None,
    settings: Settings = None,
    studies: Studies = None,
    instances: Instances = 2,
    base_url: Servers = None,
    model: opt.Model = DEFAULT_MODEL,
    data: Data = None,
    quick: Quick = False,
    seeds: Seeds = None,
    minutes: Minutes = None,
    sessions: Sessions = None,
    rate: Rate = None,
    share_ratio: ShareRatio = None,
    prompt_tokens_max: PromptTokensMax = None,
    output_tokens_max: OutputTokensMax = None,
    turns_max: TurnsMax = None,
    ignore_eos: IgnoreEos = True,
    cache_salt: CacheSalt = True,
    vocab_size: VocabSize = None,
    serve_flags: ServeFlags = "",
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    timeout_s: Timeout = 600.0,
    out: Folder = None,
) -> None:
    """Measure settings side by side on the same workloads; write results, records, a report and plots."""
    from memserve.bench.campaign import Plan
    from memserve.bench.load.client import require_aiohttp
    from memserve.bench.meters import weighing
    from memserve.bench.settings import named_server

    require_aiohttp()
    given = {
        "sessions": sessions, "turns_max": turns_max, "prompt_tokens_max": prompt_tokens_max,
        "output_tokens_max": output_tokens_max, "rate": rate,
    }  # fmt: skip
    size = dataclasses.replace(QUICK if quick else FULL, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]  # the keys are its fields
    chosen = quick or any(value is not None for value in (workload, settings, share_ratio))
    settings = settings if settings is not None else QUICK_SETTINGS if quick else DEFAULT_SETTINGS
    contenders = ",".join([settings, *map(named_server, base_url or ())])
    names = studies if studies is not None else "settings" if chosen else ",".join(STUDIES)
    meter, own_vocab_size = weighing(model if settings.strip() else None)
    plan = Plan(
        _studies(names, contenders, instances, workload or DEFAULT_WORKLOADS, share_ratio or "1", size, data),
        seeds=tuple(range(seeds or (1 if quick else FULL_SEEDS))),
        serve_flags=("--model", model, *shlex.split(serve_flags)),
        ignore_eos=ignore_eos, vocab_size=vocab_size or own_vocab_size, timeout_s=timeout_s,
        minutes_max=minutes if minutes is not None else FULL_MINUTES, meter=meter, salted=cache_salt,
    )  # fmt: skip
    _run(plan, out, read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms))


def _studies(
    names: str, contenders: str, instances: int, workloads: str, share_ratios: str, size: Size, data: Path | None
) -> tuple[Study, ...]:
    """The options of the command go to the study of settings; the two others are fixed."""
    from memserve.bench.settings import parse_settings
    from memserve.bench.studies import parse_ratios, parse_studies, policies_study, settings_study, turns_study

    settings, ratios = parse_settings(contenders, instances), parse_ratios(share_ratios)
    makers = {
        "settings": lambda: settings_study(settings, workloads, ratios, size, data),
        "turns": lambda: turns_study(TURNS, data),
        "policies": lambda: policies_study(POLICIES, data),
    }
    return tuple(makers[name]() for name in parse_studies(names))


def _run(plan: Plan, out: Path | None, slo: Slo) -> None:
    from memserve.bench.campaign import build_all, default_folder, measure
    from memserve.bench.load.driver import sigterm_interrupts
    from memserve.bench.paper import compare
    from memserve.bench.report import REPORT, write_report
    from memserve.bench.results import RunFolder, sum_up
    from memserve.bench.shapes import shapes_of
    from memserve.bench.text import describe

    workloads = build_all(plan)  # reads the data: its errors are reported before anything is started
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
