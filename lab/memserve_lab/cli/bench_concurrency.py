"""``memserve bench concurrency``: bursts of requests, with and without an admission limit."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import typer

from memserve.base.errors import UserError
from memserve_lab.cli.bench_load import Folder, IgnoreEos, ServeFlags, Timeout, chosen, command, parse_counts, run_study


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
