"""``memserve bench serve``: settings side by side, with a report and plots (level 4)."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.cli.load import SloJct, SloTpot, SloTtft, Timeout, VocabSize, read_slo
from memserve.errors import UserError

if TYPE_CHECKING:
    from memserve.bench.campaign import Plan
    from memserve.bench.catalogue import Recipe

SETTINGS = "PD,PD-CC,1P1D,1P1D-CC1,1P1D-CC2,1P1D-CC3"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is sent."""

    sessions: int
    turns_max: int
    prompt_tokens_max: int
    output_tokens_max: int
    rate: float
    seeds: int


QUICK = Size(sessions=4, turns_max=3, prompt_tokens_max=1536, output_tokens_max=12, rate=2.0, seeds=1)
FULL = Size(sessions=10, turns_max=4, prompt_tokens_max=2048, output_tokens_max=32, rate=2.0, seeds=3)
"""What two cores and the bundled model can bear; a larger machine wants larger figures."""


def serve(
    workload: Annotated[str, typer.Option(help="Comma-separated; `memserve bench workload` knows more.")] = (
        "sharegpt,loogle,react"
    ),
    settings: Annotated[
        str, typer.Option(help="Comma-separated: PD-CC, 1P2D, 1P1D-CC2/session/by-layer ...")
    ] = SETTINGS,
    instances: Annotated[int, typer.Option(min=1, help="How many a PD without a number has.")] = 2,
    base_url: Annotated[list[str] | None, typer.Option(help="A further setting: NAME=URL of any server.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets. Without: made from the seed.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and short requests, one seed: a few minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="So many repetitions, each with its own sample.")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Sessions of each workload.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests a second (Poisson).")] = None,
    share_ratio: Annotated[str, typer.Option(help="Comma-separated: every session so many times.")] = "1",
    prompt_tokens_max: Annotated[int | None, typer.Option(min=16, help="Cut prompts, history included.")] = None,
    output_tokens_max: Annotated[int | None, typer.Option(min=1, help="Cut answers.")] = None,
    turns_max: Annotated[int | None, typer.Option(min=1, help="Cut sessions.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Every answer has its full length: equal work for all.")] = True,
    vocab_size: VocabSize = 32_000,
    serve_flags: Annotated[str, typer.Option(help="Further flags for every `memserve serve`, in quotes.")] = "",
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    timeout_s: Timeout = 600.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")] = None,
) -> None:
    """Measure settings side by side on the same workloads; write results, records, a report and plots."""
    from memserve.bench.campaign import Plan
    from memserve.bench.settings import parse_settings

    given = {
        "sessions": sessions, "turns_max": turns_max, "prompt_tokens_max": prompt_tokens_max,
        "output_tokens_max": output_tokens_max, "rate": rate, "seeds": seeds,
    }  # fmt: skip
    size = dataclasses.replace(QUICK if quick else FULL, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    names = ",".join([settings, *(f"{_named(text)}" for text in base_url or ())])
    plan = Plan(
        settings=parse_settings(names, instances),
        recipes=_recipes(workload, share_ratio, size, data),
        seeds=tuple(range(size.seeds)),
        serve_flags=tuple(shlex.split(serve_flags)),
        ignore_eos=ignore_eos,
        vocab_size=vocab_size,
        timeout_s=timeout_s,
    )
    _run(plan, out, slo_ttft_ms, slo_tpot_ms, slo_jct_ms)


def _named(text: str) -> str:
    """``NAME=URL``; a mere URL is its own name."""
    return text if "=" in text else f"{text.removeprefix('http://')}={text}"


def _recipes(workloads: str, share_ratios: str, size: Size, data: Path | None) -> dict[str, Recipe]:
    from memserve.bench.campaign import kind_of
    from memserve.bench.catalogue import Arrivals, Recipe
    from memserve.workloads.shape import Caps

    caps = Caps(size.prompt_tokens_max, size.output_tokens_max, size.turns_max)
    recipes = {}
    ratios = _numbers(share_ratios)
    for name in (name.strip() for name in workloads.split(",")):
        for ratio in ratios:
            label = kind_of(name) + (f" x{ratio:g}" if len(ratios) > 1 else "")
            recipes[label] = Recipe(
                kind=kind_of(name), data=data, sessions=size.sessions, share_ratio=ratio, caps=caps,
                arrivals=Arrivals.POISSON, requests_per_s=size.rate,
            )  # fmt: skip
    return recipes


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"cannot read {text!r} as share ratios", hint="for example --share-ratio 1,2,4") from None


def _run(plan: Plan, out: Path | None, ttft_ms: float | None, tpot_ms: float | None, jct_ms: float | None) -> None:
    from memserve.bench.campaign import default_folder, measure, shapes_of
    from memserve.bench.load.client import require_aiohttp
    from memserve.bench.report import REPORT, write_report
    from memserve.bench.results import RunFolder, sum_up
    from memserve.bench.text import describe

    require_aiohttp()
    shapes = shapes_of(plan)  # reads the data: what is wrong with it is said before anything is started
    folder = RunFolder(out or default_folder())
    measured = measure(plan, folder, lambda line: typer.echo(line, err=True))
    results = sum_up(
        measured.records, measured.passes, read_slo(ttft_ms, tpot_ms, jct_ms),
        shlex.join(["memserve", *sys.argv[1:]]), measured.notes, shapes, measured.stopped,
    )  # fmt: skip
    folder.finish(results)
    write_report(results, folder.path)
    typer.echo("\n".join(describe(results)))
    typer.echo(f"report: {folder.path / REPORT}")
    if measured.partial is not None:
        raise typer.Exit(1)
