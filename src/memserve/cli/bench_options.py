"""Options that the commands of ``memserve bench`` share (level 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memserve.bench.studies import STUDIES

DEFAULT_SETTINGS = "PD,PD-CC,1P1D,1P1D-CC1,1P1D-CC2,1P1D-CC3"
DEFAULT_WORKLOADS = "sharegpt,loogle,react"

Count = int | None
Workloads = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated; `memserve bench workload` knows more.  [default: {DEFAULT_WORKLOADS}]"),
]
Settings = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated: PD-CC, 1P2D, 1P1D-CC2/session/by-layer ...  [default: {DEFAULT_SETTINGS}]"),
]
Studies = Annotated[
    str | None,
    typer.Option(help=f"Any of {', '.join(STUDIES)}. Default: all; settings only where you chose any or --quick."),
]
Instances = Annotated[int, typer.Option(min=1, help="How many a PD without a number has.")]
Servers = Annotated[
    list[str] | None, typer.Option(help="A further setting: NAME=URL of any server that runs; repeatable.")
]
Data = Annotated[Path | None, typer.Option(help="Folder of data sets. Without: made from the seed.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few and short requests, one seed: under three minutes.")]
Seeds = Annotated[Count, typer.Option(min=1, help="So many repetitions, each with its own sample.  [default: 3]")]
Minutes = Annotated[
    float | None, typer.Option(min=0.01, help="Begin no seed that would not end within so long.  [default: 28]")
]
Sessions = Annotated[Count, typer.Option(min=1, help="Sessions of each workload.")]
Rate = Annotated[float | None, typer.Option(min=0.001, help="Requests a second (Poisson).")]
ShareRatio = Annotated[str | None, typer.Option(help="Comma-separated: every session so many times.")]
PromptTokensMax = Annotated[Count, typer.Option(min=16, help="Cut prompts, history included.")]
OutputTokensMax = Annotated[Count, typer.Option(min=1, help="Cut answers.")]
TurnsMax = Annotated[Count, typer.Option(min=1, help="Cut sessions.")]
IgnoreEos = Annotated[bool, typer.Option(help="Every answer has its full length: equal work for all.")]
CacheSalt = Annotated[
    bool, typer.Option(help="No pass finds another's cache: a salt of its own goes with its requests.")
]
ServeFlags = Annotated[str, typer.Option(help="Further flags for every `memserve serve`, in quotes.")]
Folder = Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")]
