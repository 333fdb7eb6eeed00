"""``memserve bench layerwise``: KV by request beside KV by layer, on real servers."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from memserve.base.config import DEFAULT_MODEL
from memserve.base.errors import UserError
from memserve.cli import flags as opt
from memserve_lab.cli.bench_load import Folder, ServeFlags, command, parse_counts, parse_rates, run_study

FIGURES = ("context", "rate", "hidden")


def layerwise(
    *,
    model: opt.Model = DEFAULT_MODEL,
    figures: Annotated[str, typer.Option(help="What to measure: context, rate, hidden.")] = ",".join(FIGURES),
    settings: Annotated[str, typer.Option(help="Settings whose names have one of these words. Empty: all.")] = "",
    kv_memory: Annotated[str, typer.Option(help="KV memory of every server: less than the load needs.")] = "96MiB",
    dram_memory: Annotated[str, typer.Option(help="Second tier of every server.")] = "2GiB",
    link_gbps: Annotated[float, typer.Option(min=0.1, help="Rate of the link between them, which is emulated.")] = 16.0,
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts, for the sweep of contexts.")] = (
        "256,512,1024,2048"
    ),
    context_rate: Annotated[float, typer.Option(min=0.01, help="Requests a second of that sweep.")] = 1.0,
    rates: Annotated[str, typer.Option(help="Requests a second, for the sweep of rates.")] = "0.8,1.2,1.6",
    requests: Annotated[int, typer.Option(min=4, help="Requests of each point.")] = 24,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at the median.")] = 160,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; the settings take turns in each.")] = 3,
    slo_ttft_ms: Annotated[float, typer.Option("--slo-ttft-ms", min=1, help="Objective: time to first token.")] = 3000,
    slo_tpot_ms: Annotated[float, typer.Option("--slo-tpot-ms", min=1, help="Objective: time of a token.")] = 200,
    quick: Annotated[bool, typer.Option("--quick", help="One round with few requests: some three minutes.")] = False,
    serve_flags: ServeFlags = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    out: Folder = None,
) -> None:
    """Time to the first token, throughput and missed objectives where KV memory is short: by request and by layer.

    LayerKV's evaluation, scaled to this machine. The link between KV memory and DRAM is emulated.
    """
    from memserve_lab.bench.load.client import require_aiohttp
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.layerwise import (
        BY_LAYER,
        BY_REQUEST,
        LayerwiseResults,
        LayerwiseStudy,
        Plan,
        settings_of,
    )

    require_aiohttp()
    names_wanted = tuple(name.strip() for name in figures.split(","))
    if unknown := [name for name in names_wanted if name not in FIGURES]:
        raise UserError(f"unknown figure {unknown[0]!r}", hint=f"some of {', '.join(FIGURES)}")
    words = [word.strip() for word in settings.split(",") if word.strip()]
    always = (BY_REQUEST, BY_LAYER) if "hidden" in names_wanted else (BY_REQUEST,)
    names = [
        name
        for name in settings_of(slo_ttft_ms / 1000, slo_tpot_ms / 1000)
        if not words or name in always or any(word in name for word in words)
    ]
    flags = ["--model", model, "--kv-memory", kv_memory, "--dram-memory", dram_memory]
    plan = Plan(
        names_wanted, tuple(names), parse_counts(contexts, "--contexts 256,1024") or (), context_rate,
        parse_rates(rates),
        min(requests, 8) if quick else requests, min(answer_tokens, 64) if quick else answer_tokens,
        1 if quick else rounds, (*flags, "--link-gbps", f"{link_gbps:g}", *shlex.split(serve_flags)), link_gbps,
        slo_ttft_ms / 1000, slo_tpot_ms / 1000, seed,
    )  # fmt: skip
    run_study(LayerwiseStudy(plan, LayerwiseResults(command=command())), RunFolder(out), timed=True)
