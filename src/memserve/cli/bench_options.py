"""Options that the commands of ``memserve bench`` share, and how a study is run from the command line (level 4)."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.bench.settings import STUDIES
from memserve.errors import UserError

if TYPE_CHECKING:
    from memserve.bench.study import RunFolder, Study

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
Instances = Annotated[int, typer.Option(min=1, help="Instances of a PD without a number.")]
Servers = Annotated[
    list[str] | None, typer.Option(help="A further setting: NAME=URL of any running server; repeatable.")
]
Data = Annotated[Path | None, typer.Option(help="Folder of data sets. Default: workloads made from the seed.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few and short requests, one seed: under three minutes.")]
Seeds = Annotated[Count, typer.Option(min=1, help="Repetitions, each with its own sample.  [default: 3]")]
Minutes = Annotated[
    float | None, typer.Option(min=0.01, help="Skip further seeds that would not end in time.  [default: 28]")
]
Sessions = Annotated[Count, typer.Option(min=1, help="Sessions of each workload.")]
Rates = Annotated[
    str | None, typer.Option("--rate", help="Requests a second (Poisson); comma-separated: a pass for each.")
]
ShareRatio = Annotated[str | None, typer.Option(help="Copies of every session; comma-separated: a pass for each.")]
PromptTokensMax = Annotated[Count, typer.Option(min=16, help="Cut prompts, history included.")]
OutputTokensMax = Annotated[Count, typer.Option(min=1, help="Cut answers.")]
TurnsMax = Annotated[Count, typer.Option(min=1, help="Cut sessions.")]
IgnoreEos = Annotated[bool, typer.Option(help="Answers have their full length: equal work for all settings.")]
CacheSalt = Annotated[
    bool, typer.Option(help="Send each pass with a salt of its own: no pass finds the cache of another.")
]
ServeFlags = Annotated[str, typer.Option(help="Further flags for every `memserve serve`, in quotes.")]
Folder = Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")]


def command() -> str:
    """The command line as typed."""
    return shlex.join(["memserve", *sys.argv[1:]])


def chosen(default: Any, **given: Any) -> Any:
    """``default`` (a dataclass) with the fields that were given."""
    import dataclasses

    return dataclasses.replace(default, **{name: value for name, value in given.items() if value is not None})


def parse_counts(text: str | None, example: str) -> tuple[int, ...] | None:
    """Comma-separated numbers of at least 1, rising, each once. Raises :class:`UserError` with ``example`` as hint."""
    if text is None:
        return None
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise UserError(f"cannot read {text!r} as counts", hint=f"for example {example}")
    return counts


def run_study(study: Study[Any], folder: RunFolder, *, timed: bool = False) -> None:
    """Measure, write the report, and say where it is; exit status 1 when the results are partial.

    ``timed``: progress lines begin with the seconds since the start.
    """
    from memserve.bench.study import REPORT

    begin = time.monotonic()

    def tell(line: str) -> None:
        typer.echo(f"{time.monotonic() - begin:5.1f} s  {line}" if timed else line, err=True)

    with folder:
        study.run(tell)
    study.write(folder.path)
    for line in study.told():
        typer.echo(line)
    typer.echo(f"report: {folder.path / REPORT}")
    if study.results.partial is not None:
        typer.echo(f"partial: {study.results.partial}", err=True)
        raise typer.Exit(1)
