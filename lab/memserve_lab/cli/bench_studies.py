"""``memserve bench concurrency``: bursts of requests, with and without an admission limit.

``memserve bench layerwise``: KV by request beside KV by layer, on real servers.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import typer

from memserve.base.config import DEFAULT_MODEL
from memserve.base.errors import UserError
from memserve.cli import flags as opt
from memserve_lab.cli.bench_load import (
    Folder,
    IgnoreEos,
    ServeFlags,
    Timeout,
    chosen,
    command,
    parse_counts,
    parse_rates,
    run_study,
)


@dataclass(frozen=True, slots=True)
class Size:
    """Repetitions of a burst, and the lengths of its requests."""

    repetitions: int
    prompt_words: int
    output_tokens: int


FULL, QUICK = Size(3, 400, 32), Size(1, 120, 8)


def concurrency(
    at_once: Annotated[str, typer.Option("--at-once", help="Comma-separated: requests per burst.")] = "1,3,5,10",
    setting: Annotated[
        str, typer.Option(help="Setting of our server, as in `memserve bench serve`. Empty: none.")
    ] = "1PD-CC",
    max_active: Annotated[
        int, typer.Option(min=0, help="Repeat each burst with at most N active requests. 0: do not repeat.")
    ] = 3,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for admission under the limit.")] = 0,
    base_url: Annotated[list[str] | None, typer.Option(help="A further contender: NAME=URL of any server.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One repetition with short prompts: under a minute.")] = False,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Repetitions of every burst, each with new prompts.")
    ] = None,
    prompt_words: Annotated[
        int | None, typer.Option(min=8, help="Words of every prompt; a word is one token or more.")
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of every answer.")] = None,
    ignore_eos: IgnoreEos = True,
    serve_flags: ServeFlags = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    timeout_s: Timeout = 600.0,
    out: Folder = None,
) -> None:
    """Cold, warm, shared and unrelated bursts of requests, with and without an admission limit."""
    from memserve_lab.bench.load.client import require_aiohttp
    from memserve_lab.bench.settings import named_server, parse_settings
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.bursts import BurstPlan, BurstResults, ConcurrencyStudy, Limit, contenders_of

    require_aiohttp()
    size: Size = chosen(
        QUICK if quick else FULL, repetitions=repetitions, prompt_words=prompt_words, output_tokens=output_tokens
    )
    limit = Limit(max_active, queue) if max_active else None
    other_settings = parse_settings(",".join(map(named_server, base_url or ())), 1)
    own_settings = parse_settings(setting, 1)
    contenders = contenders_of(own_settings[0], limit, other_settings) if own_settings else other_settings
    if not contenders or len(own_settings) > 1:
        raise UserError("give one --setting, or --base-url NAME=URL", hint="for example --setting 1PD-CC")
    plan = BurstPlan(
        contenders, parse_counts(at_once, "--at-once 1,3,5,10") or (), size.repetitions, size.prompt_words,
        size.output_tokens, tuple(shlex.split(serve_flags)), ignore_eos, seed, timeout_s,
    )  # fmt: skip
    results = BurstResults(
        command=command(), prompt_words=size.prompt_words, output_tokens=size.output_tokens,
        limit=limit.text if limit is not None and own_settings else "",
    )  # fmt: skip
    folder = RunFolder(out)
    run_study(ConcurrencyStudy(plan, results, folder), folder)


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
