"""``memserve sim fuzz``: random clusters with faults, from seeds."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.base.errors import UserError
from memserve.cli.output import progress_bar

if TYPE_CHECKING:
    from memserve_lab.sim.fuzz.scenario import Forced, Setting

FAILURES_MAX = 10
"""Failures after which a campaign stops."""


def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="Scenarios to run, over all settings.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    weather: Annotated[str, typer.Option(help="Scenarios to run: healthy, faulty or swarm. Default: all.")] = "",
    layerwise: Annotated[str, typer.Option(help="KV by layer: auto or off in all scenarios. Default: in some.")] = "",
    groups: Annotated[
        str, typer.Option(help="Models that keep states, or windows apart, in all scenarios. Default: in some.")
    ] = "",
    routers: Annotated[
        int | None,
        typer.Option(min=1, max=3, help="Routers at once, where scenarios allow several. Default: several in some."),
    ] = None,
    plant: Annotated[str, typer.Option(help="Remove this safeguard of the product: a check must notice.")] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Run the scenario of this seed only.")] = None,
    setting: Annotated[str, typer.Option(help="With --seed: caching/transfer/mix/healthy|faulty|swarm.")] = "",
    story: Annotated[bool, typer.Option("--story", help="With --seed: print what happened, step by step.")] = False,
    log: Annotated[
        Path | None, typer.Option(help="With --seed: file for every event and action, byte for byte.")
    ] = None,
) -> None:
    """Run random clusters under virtual time, with faults: no invariant may break, and every request must end."""
    from memserve_lab.sim.fuzz.campaign import parse_setting, setting_of
    from memserve_lab.sim.fuzz.scenario import WEATHERS, Forced
    from memserve_lab.sim.fuzz.scenario_features import GROUPS, LAYERWISE

    choices = ("weather", weather, WEATHERS), ("layerwise mode", layerwise, LAYERWISE), ("groups", groups, GROUPS)
    for name, value, allowed in choices:
        if value and value not in allowed:
            raise UserError(f"unknown {name} {value!r}", hint=f"use one of {', '.join(allowed)}")
    if groups and layerwise == "auto":
        raise UserError("models with states or windows apart have no KV by layer", hint="leave out --layerwise")
    forced = Forced(layerwise or None, routers, groups or None)
    if seed is not None:
        fuzz_setting = parse_setting(setting) if setting else setting_of(seed, weather or None)
        failed = _replay(seed, fuzz_setting, plant or None, forced, story, log)
    elif setting or story or log is not None:
        raise UserError("--setting, --story and --log belong to --seed", hint="memserve sim fuzz --seed 17 --story")
    else:
        failed = _campaign(range(first, first + seeds), weather, plant, forced, jobs)
    if failed:
        raise typer.Exit(1)


def _replay(seed: int, setting: Setting, plant: str | None, forced: Forced, story: bool, log: Path | None) -> bool:
    """Run one scenario again. Returns whether it fails."""
    from memserve_lab.sim.fuzz.campaign import judge

    judged = partial(judge, seed, setting, plant=plant, forced=forced, keep_story=story)
    if log is None:
        verdict = judged()
    else:
        with log.open("w", encoding="utf-8", newline="\n") as out:
            verdict = judged(log=out.write)
    for line in verdict.story:
        typer.echo(line)
    if verdict.failure:
        typer.echo(f"FAIL {verdict.where}: {verdict.failure}")
        return True
    typer.echo(f"seed {seed} is fine: {verdict.requests} requests, {verdict.steps} steps, {verdict.setting}")
    return False


def _campaign(seeds: range, weather: str, plant: str, forced: Forced, jobs: int) -> bool:
    """Run many scenarios. Returns whether any fails."""
    from memserve_lab.sim.fuzz.campaign import run_campaign

    started, seeds_done, requests, steps, failures = time.perf_counter(), 0, 0, 0, 0
    happened: Counter[str] = Counter()
    with progress_bar("seeds", len(seeds), lambda: seeds_done):
        for verdict in run_campaign(seeds, weather=weather or None, plant=plant or None, forced=forced, jobs=jobs):
            seeds_done, requests, steps = seeds_done + 1, requests + verdict.requests, steps + verdict.steps
            happened += verdict.happened
            if verdict.failure:
                failures += 1
                more = forced.flags() + (f" --plant {plant}" if plant else "")
                typer.echo(f"FAIL {verdict.where}: {verdict.failure}")
                typer.echo(f"     memserve sim fuzz --seed {verdict.seed} --setting {verdict.setting}{more} --story")
            if failures >= FAILURES_MAX:
                break
    spent_s = time.perf_counter() - started
    typer.echo(
        f"{seeds_done:,} seeds, {requests:,} requests, {steps:,} steps in {spent_s:.1f} s"
        f" ({seeds_done / spent_s * 3600:,.0f} seeds an hour): {failures} failed"
    )
    typer.echo("  " + ", ".join(f"{name} {count:,}" for name, count in sorted(happened.items())))
    return failures > 0
