"""``memserve bench serve``: settings side by side, with a report and plots (level 4)."""

from __future__ import annotations

import shlex
from pathlib import Path

from memserve.bench.settings import STUDIES, Comparison, Size
from memserve.cli import bench_options as by
from memserve.cli import options as opt
from memserve.cli.load import SloJct, SloTpot, SloTtft, Timeout, VocabSize, read_slo

QUICK_SETTINGS = "PD,PD-CC,1P1D,1P1D-CC2,1P1D-CC3"
FULL_SEEDS, FULL_MINUTES = 3, 28.0
RATE_MIN = 0.001

QUICK = Size(sessions=3, turns_max=3, prompt_tokens_max=1024, output_tokens_max=8, rates=(3.0,))
FULL = Size(sessions=5, turns_max=4, prompt_tokens_max=1536, output_tokens_max=48, rates=(0.75, 1.5, 3.0))
"""What two cores and the bundled model can bear; a larger machine wants larger figures."""
TURNS = Size(sessions=4, turns_max=6, prompt_tokens_max=4096, output_tokens_max=96, rates=(0.8,))
TRANSFER = Size(sessions=10, turns_max=1, prompt_tokens_max=1024, output_tokens_max=32, rates=(0.25, 0.5, 1.0))
POLICIES = Size(sessions=6, turns_max=2, prompt_tokens_max=1536, output_tokens_max=8, rates=(2.5,))


def serve(
    workload: by.Workloads = None,
    settings: by.Settings = None,
    studies: by.Studies = None,
    instances: by.Instances = 2,
    base_url: by.Servers = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    data: by.Data = None,
    quick: by.Quick = False,
    seeds: by.Seeds = None,
    minutes: by.Minutes = None,
    sessions: by.Sessions = None,
    rate: by.Rates = None,
    share_ratio: by.ShareRatio = None,
    prompt_tokens_max: by.PromptTokensMax = None,
    output_tokens_max: by.OutputTokensMax = None,
    turns_max: by.TurnsMax = None,
    ignore_eos: by.IgnoreEos = True,
    cache_salt: by.CacheSalt = True,
    vocab_size: VocabSize = None,
    serve_flags: by.ServeFlags = "",
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    timeout_s: Timeout = 600.0,
    out: by.Folder = None,
) -> None:
    """Measure settings side by side on equal workloads; write results, records, a report and plots."""
    from memserve.bench.campaign import Plan, build_all
    from memserve.bench.load.client import require_aiohttp
    from memserve.bench.load.prompts import weighing
    from memserve.bench.results import Results
    from memserve.bench.serve import ServeStudy
    from memserve.bench.settings import named_server, parse_numbers
    from memserve.bench.study import RunFolder

    require_aiohttp()
    size: Size = by.chosen(
        QUICK if quick else FULL, sessions=sessions, turns_max=turns_max, prompt_tokens_max=prompt_tokens_max,
        output_tokens_max=output_tokens_max,
        rates=None if rate is None else parse_numbers(rate, "--rate", "rates", RATE_MIN),
    )  # fmt: skip
    chosen = quick or any(value is not None for value in (workload, settings, share_ratio))
    settings = settings if settings is not None else QUICK_SETTINGS if quick else by.DEFAULT_SETTINGS
    contenders = ",".join([settings, *map(named_server, base_url or ())])
    names = studies if studies is not None else "settings" if chosen else ",".join(STUDIES)
    meter, own_vocab_size = weighing(model if settings.strip() else None)
    plan = Plan(
        _comparisons(names, contenders, instances, workload or by.DEFAULT_WORKLOADS, share_ratio or "1", size, data),
        seeds=tuple(range(seeds or (1 if quick else FULL_SEEDS))),
        serve_flags=("--model", model, *shlex.split(serve_flags)),
        ignore_eos=ignore_eos, vocab_size=vocab_size or own_vocab_size, timeout_s=timeout_s,
        minutes_max=minutes if minutes is not None else FULL_MINUTES, meter=meter, salted=cache_salt,
    )  # fmt: skip
    workloads = build_all(plan)  # reads the data: errors in it come before any server starts
    slo = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)
    folder = RunFolder(out)
    by.run_study(ServeStudy(plan, workloads, folder, Results(command=by.command(), slo=slo)), folder)


def _comparisons(
    names: str, contenders: str, instances: int, workloads: str, share_ratios: str, size: Size, data: Path | None
) -> tuple[Comparison, ...]:
    """The user's choices apply to the study of settings; the others are fixed."""
    from memserve.bench import settings as known

    chosen = known.parse_settings(contenders, instances)
    ratios = known.parse_numbers(share_ratios, "--share-ratio", "share ratios", 1)
    makers = {
        "settings": lambda: known.settings_compared(chosen, workloads, ratios, size, data),
        "turns": lambda: known.levels_compared(TURNS, data),
        "transfer": lambda: known.transfer_compared(TRANSFER),
        "policies": lambda: known.policies_compared(POLICIES, data),
    }
    return tuple(makers[name]() for name in known.parse_studies(names))
