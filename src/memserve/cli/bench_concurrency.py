"""``memserve bench concurrency``: bursts of requests, with and without an admission limit."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memserve.cli.bench_load import Timeout
from memserve.errors import UserError


@dataclass(frozen=True, slots=True)
class Size:
    """Repetitions of a burst, and the lengths of its requests."""

    repetitions: int
    prompt_words: int
    output_tokens: int


FULL, QUICK = Size(3, 400, 32), Size(1, 120, 8)


def concurrency(
    at_once: Annotated[str, typer.Option("--at-once", help="Comma-separated: requests of a burst.")] = "1,3,5,10",
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
        int | None, typer.Option(min=8, help="Words of every prompt; a word is a token or more.")
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of every answer.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Every answer has its full length: equal work for all.")] = True,
    serve_flags: Annotated[str, typer.Option(help="Further flags for every `memserve serve`, in quotes.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    timeout_s: Timeout = 600.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")] = None,
) -> None:
    """Cold, warm, shared and unrelated bursts of requests, with and without an admission limit."""
    from memserve.bench.campaign import default_folder
    from memserve.bench.concurrency.report import write_concurrency
    from memserve.bench.concurrency.results import ConcurrencyResults
    from memserve.bench.concurrency.run import ConcurrencyPlan, Limit, contenders_of, measure
    from memserve.bench.load.client import require_aiohttp
    from memserve.bench.report import REPORT
    from memserve.bench.results import RunFolder
    from memserve.bench.settings import named_server, parse_settings

    require_aiohttp()
    given = {"repetitions": repetitions, "prompt_words": prompt_words, "output_tokens": output_tokens}
    size = dataclasses.replace(QUICK if quick else FULL, **{k: v for k, v in given.items() if v is not None})
    limit = Limit(max_active, queue) if max_active else None
    others = parse_settings(",".join(map(named_server, base_url or ())), 1)
    own = parse_settings(setting, 1)
    contenders = contenders_of(own[0], limit, others) if own else others
    if not contenders or len(own) > 1:
        raise UserError("one server of ours, or --base-url NAME=URL", hint="for example --setting 1PD-CC")
    plan = ConcurrencyPlan(
        contenders, _counts(at_once), size.repetitions, size.prompt_words, size.output_tokens,
        tuple(shlex.split(serve_flags)), ignore_eos, seed, timeout_s,
    )  # fmt: skip
    command = shlex.join(["memserve", *sys.argv[1:]])
    told = limit.text if limit is not None and own else ""
    results = ConcurrencyResults(command, size.prompt_words, size.output_tokens, told)
    folder = RunFolder(out or default_folder())
    try:
        measure(plan, folder.writer, results, lambda line: typer.echo(line, err=True))
    finally:
        folder.writer.close()
    write_concurrency(results, folder.path)
    typer.echo(f"report: {folder.path / REPORT}")
    if results.partial is not None:
        typer.echo(f"partial: {results.partial}", err=True)
        raise typer.Exit(1)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise UserError(f"cannot read {text!r} as counts", hint="for example --at-once 1,3,5,10")
    return counts
