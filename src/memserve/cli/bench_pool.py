"""``memserve bench pool``: MemPool's calls, its index, and its block aggregation (level 4)."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from memserve.cli import options as opt
from memserve.config import EngineOptions
from memserve.errors import UserError

ON_CPU = EngineOptions(device="cpu")


@opt.grouped
def pool(
    *,
    engine: Annotated[EngineOptions, opt.Only("model", "dtype", "kv_memory_bytes", "block_tokens")] = ON_CPU,
    blocks: Annotated[str | None, typer.Option(help="Comma-separated: blocks of a call.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Comma-separated: lengths at which indexes race.")] = None,
    tree_prompts: Annotated[int | None, typer.Option(min=0, help="Other prompts in the index, 4,096 tokens each.")] = (
        None
    ),
    rounds: Annotated[int | None, typer.Option(min=3, help="Repetitions of calls that move no bytes.")] = None,
    copy_rounds: Annotated[int | None, typer.Option(min=2, help="Repetitions of calls that do.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller: under a minute.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")] = None,
) -> None:
    """Measure MemPool's calls, its index beside hash indexes, and aggregated against discrete transfer."""
    from memserve.runtime.process import set_thread_environment

    set_thread_environment()
    from memserve.bench.campaign import default_folder
    from memserve.bench.pool.report import write_pool
    from memserve.bench.pool.run import FULL, QUICK, empty_results, measure
    from memserve.bench.report import REPORT
    from memserve.bench.results import new_folder

    given = {
        "blocks": _counts(blocks, "--blocks"), "prompt_tokens": _counts(prompt_tokens, "--prompt-tokens"),
        "tree_prompts": tree_prompts, "rounds": rounds, "copy_rounds": copy_rounds,
    }  # fmt: skip
    plan = dataclasses.replace(QUICK if quick else FULL, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]  # the keys are its fields
    results = empty_results(shlex.join(["memserve", *sys.argv[1:]]), plan)
    folder = new_folder(out or default_folder())
    begin = time.monotonic()
    measure(plan, engine, results, lambda line: typer.echo(f"{time.monotonic() - begin:5.1f} s  {line}", err=True))
    write_pool(results, folder)
    for note in results.notes:
        typer.echo(note, err=True)
    typer.echo(f"report: {folder / REPORT}")
    if results.partial is not None:
        raise typer.Exit(1)


def _counts(text: str | None, flag: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise UserError(f"cannot read {text!r} as counts", hint=f"for example {flag} 1,16,128")
    return counts
