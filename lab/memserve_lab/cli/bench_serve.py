"""``memserve bench serve``: settings side by side, with a report and plots."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from memserve.base.config import DEFAULT_MODEL
from memserve.cli import flags as opt
from memserve_lab.bench.settings import STUDIES, Comparison, Size
from memserve_lab.cli.bench_load import (
    Data,
    Folder,
    IgnoreEos,
    Instances,
    ServeFlags,
    Servers,
    SloJct,
    SloTpot,
    SloTtft,
    Timeout,
    VocabSize,
    chosen,
    command,
    existing,
    read_slo,
    run_study,
)

DEFAULT_SETTINGS = "PD,PD-CC,1P1D,1P1D-CC"
DEFAULT_WORKLOADS = "sharegpt,loogle,react"

Count = int | None
Workloads = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated; `memserve bench workload` lists them.  [default: {DEFAULT_WORKLOADS}]"),
]
Settings = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated: PD-CC, 1P2D, 1P1D-CC2/session/by-layer ...  [default: {DEFAULT_SETTINGS}]"),
]
Studies = Annotated[
    str | None,
    typer.Option(help=f"Any of {', '.join(STUDIES)}. Default: all; with --quick or a choice of settings: settings."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Few and short requests, one seed: under three minutes.")]
Seeds = Annotated[Count, typer.Option(min=1, help="Repetitions, each with its own sample.  [default: 3]")]
Minutes = Annotated[
    float | None, typer.Option(min=0.01, help="Start no repetition that would end later than this.  [default: 28]")
]
Sessions = Annotated[Count, typer.Option(min=1, help="Sessions of each workload.")]
Rates = Annotated[
    str | None, typer.Option("--rate", help="Requests per second (Poisson); comma-separated: a pass for each.")
]
ShareRatio = Annotated[str | None, typer.Option(help="Copies of every session; comma-separated: a pass for each.")]
PromptTokensMax = Annotated[Count, typer.Option(min=16, help="Cut longer prompts, history included.")]
OutputTokensMax = Annotated[Count, typer.Option(min=1, help="Cut longer answers.")]
TurnsMax = Annotated[Count, typer.Option(min=1, help="Cut sessions with more turns.")]
CacheSalt = Annotated[
    bool, typer.Option(help="Send another cache_salt with each pass, so that no pass reuses another's cache.")
]
QUICK_SETTINGS = "PD,PD-CC,1P1D,1P1D-CC2,1P1D-CC3"
FULL_SEEDS, FULL_MINUTES = 3, 28.0
RATE_MIN = 0.001

QUICK = Size(sessions=3, turns_max=3, prompt_tokens_max=1024, output_tokens_max=8, rates=(3.0,))
FULL = Size(sessions=5, turns_max=4, prompt_tokens_max=1536, output_tokens_max=48, rates=(0.75, 1.5, 3.0))
"""What two cores and the bundled model sustain; a larger machine needs larger values."""
TURNS = Size(sessions=4, turns_max=6, prompt_tokens_max=4096, output_tokens_max=96, rates=(0.8,))
TRANSFER = Size(
    sessions=10, turns_max=1, prompt_tokens_max=1024, output_tokens_max=32, rates=(0.25, 0.5, 0.75, 1.0, 1.25)
)
POLICIES = Size(sessions=6, turns_max=2, prompt_tokens_max=1536, output_tokens_max=8, rates=(2.5,))


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
    rate: Rates = None,
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
    """Measure settings side by side on equal workloads; write results, records, a report and plots."""
    from memserve_lab.bench.campaign import Plan, build_all
    from memserve_lab.bench.load.client import require_aiohttp
    from memserve_lab.bench.load.prompts import weighing
    from memserve_lab.bench.results import Results
    from memserve_lab.bench.serve import ServeStudy
    from memserve_lab.bench.settings import named_server, parse_numbers
    from memserve_lab.bench.study import RunFolder

    require_aiohttp()
    size: Size = chosen(
        QUICK if quick else FULL, sessions=sessions, turns_max=turns_max, prompt_tokens_max=prompt_tokens_max,
        output_tokens_max=output_tokens_max,
        rates=None if rate is None else parse_numbers(rate, "--rate", "rates", RATE_MIN),
    )  # fmt: skip
    narrowed = quick or any(value is not None for value in (workload, settings, share_ratio))
    settings = settings if settings is not None else QUICK_SETTINGS if quick else DEFAULT_SETTINGS
    contenders = ",".join([settings, *map(named_server, base_url or ())])
    names = studies if studies is not None else "settings" if narrowed else ",".join(STUDIES)
    comparisons = _comparisons(
        names, contenders, instances, workload or DEFAULT_WORKLOADS, share_ratio or "1", size, existing(data)
    )
    meter, own_vocab_size = weighing(model if settings.strip() else None)  # may convert the model: wrong usage is over
    plan = Plan(
        comparisons,
        seeds=tuple(range(seeds or (1 if quick else FULL_SEEDS))),
        serve_flags=("--model", model, *shlex.split(serve_flags)),
        ignore_eos=ignore_eos, vocab_size=vocab_size or own_vocab_size, timeout_s=timeout_s,
        minutes_max=minutes if minutes is not None else FULL_MINUTES, meter=meter, salted=cache_salt,
    )  # fmt: skip
    workloads = build_all(plan)  # reads the data: shows errors in it before any server starts
    results, folder = Results(command=command(), slo=read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)), RunFolder(out)
    run_study(ServeStudy(plan, workloads, folder, results), folder)


def _comparisons(
    names: str, contenders: str, instances: int, workloads: str, share_ratios: str, size: Size, data: Path | None
) -> tuple[Comparison, ...]:
    """The user's choices apply to the study of settings; the others are fixed."""
    from memserve_lab.bench import settings as known

    settings_chosen = known.parse_settings(contenders, instances)
    ratios = known.parse_numbers(share_ratios, "--share-ratio", "share ratios", 1)
    makers = {
        "settings": lambda: known.settings_compared(settings_chosen, workloads, ratios, size, data),
        "turns": lambda: known.levels_compared(TURNS, data),
        "transfer": lambda: known.transfer_compared(TRANSFER),
        "policies": lambda: known.policies_compared(POLICIES, data),
    }
    return tuple(makers[name]() for name in known.parse_studies(names))
