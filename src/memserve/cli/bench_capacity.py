"""``memserve bench capacity``: the largest rate that settings bear (level 4)."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from memserve.cli import bench_options as by
from memserve.cli import options as opt
from memserve.cli.load import SloJct, SloTpot, VocabSize, read_slo


def capacity(
    workload: Annotated[str, typer.Option(help="One workload; `memserve bench workload` lists them.")] = "sharegpt",
    settings: Annotated[str, typer.Option(help="Comma-separated, as in `memserve bench serve`.")] = "PD,PD-CC,1P1D-CC",
    instances: by.Instances = 2,
    base_url: by.Servers = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    data: by.Data = None,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="Longest time to the first token.")] = 2000.0,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    violations_max: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that may miss the SLO.")
    ] = 0.01,
    start: Annotated[float, typer.Option(min=0.01, help="First rate, in requests a second.")] = 1.0,
    precision: Annotated[float, typer.Option(min=0.001, max=0.5, help="Relative precision of the rate.")] = 0.1,
    probe_s: Annotated[float, typer.Option(min=0.1, help="Seconds of requests at each rate.")] = 30.0,
    prompt_tokens_max: Annotated[int, typer.Option(min=16, help="Cut prompts, history included.")] = 2048,
    output_tokens_max: Annotated[int, typer.Option(min=1, help="Cut answers.")] = 32,
    turns_max: Annotated[int, typer.Option(min=1, help="Cut sessions.")] = 4,
    vocab_size: VocabSize = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first rate's sample; later rates count on.")] = 0,
    serve_flags: by.ServeFlags = "",
    out: by.Folder = None,
) -> None:
    """Search the largest rate with a bounded queue and a kept SLO, setting by setting, by bisection."""
    from memserve.bench.capacity import CapacityStudy, Search, workload_at
    from memserve.bench.catalogue import Recipe
    from memserve.bench.load.client import require_aiohttp
    from memserve.bench.load.prompts import Manner, weighing
    from memserve.bench.settings import kind_of, named_server, parse_settings
    from memserve.bench.study import RunFolder
    from memserve.workloads.shape import Caps

    require_aiohttp()
    contenders = parse_settings(",".join([settings, *map(named_server, base_url or ())]), instances)
    meter, own_vocab_size = weighing(model if settings.strip() else None)
    caps = Caps(prompt_tokens_max, output_tokens_max, turns_max)
    recipe = Recipe(kind=kind_of(workload), data=data, seed=seed, caps=caps)
    slo = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)
    flags = ("--model", model, *shlex.split(serve_flags))
    manner = Manner("", vocab_size or own_vocab_size, ignore_eos=True)
    plan = Search(recipe, slo, violations_max, start, precision, probe_s, flags, manner, meter)
    workload_at(plan, start, seed)  # errors in the data come before any server starts
    folder = RunFolder(out)
    by.run_study(CapacityStudy(plan, contenders, folder, by.command()), folder)
