"""``memserve sim fuzz``: random clusters with faults, from seeds (level 4)."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from memserve.errors import UserError

_STOP_AFTER = 10


def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="Scenarios to run, over all settings.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one.")] = None,
    setting: Annotated[str, typer.Option(help="With --seed: caching/transfer/mix/faulty|healthy.")] = "",
    story: Annotated[bool, typer.Option("--story", help="With --seed: tell all that happened.")] = False,
) -> None:
    """Run random clusters under virtual time, with faults: nothing wrong may happen, and everything must end."""
    from memserve.sim.fuzz.campaign import Verdict, judge, parse_setting, run_campaign, setting_of

    def complain(verdict: Verdict) -> None:
        typer.echo(f"FAIL {verdict.where}: {verdict.failure}")
        typer.echo(f"     memserve sim fuzz --seed {verdict.seed} --setting {verdict.setting} --story")

    if seed is not None:
        verdict = judge(seed, parse_setting(setting) if setting else setting_of(seed), keep_story=story)
        for line in verdict.story:
            typer.echo(line)
        if verdict.failure:
            complain(verdict)
            raise typer.Exit(1)
        typer.echo(f"seed {seed} is fine: {verdict.requests} requests, {verdict.steps} steps")
        return
    if setting or story:
        raise UserError("--setting and --story belong to --seed", hint="memserve sim fuzz --seed 17 --story")
    started, failed, done, requests = time.perf_counter(), 0, 0, 0
    for verdict in run_campaign(range(first, first + seeds)):
        done, requests, failed = done + 1, requests + verdict.requests, failed + bool(verdict.failure)
        if verdict.failure:
            complain(verdict)
        if failed >= _STOP_AFTER:
            break
    spent_s = time.perf_counter() - started
    rate = f"{done / spent_s * 3600:,.0f} seeds an hour"
    typer.echo(f"{done} seeds, {requests} requests in {spent_s:.1f} s ({rate}); {failed} failed")
    if failed:
        raise typer.Exit(1)
