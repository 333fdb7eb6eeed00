"""``memserve sim run``: a workload on a simulated cluster (level 4)."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.cli import options as opt
from memserve.cli import sim_options as sim
from memserve.cli.load import SloJct, SloTpot, SloTtft, read_slo

if TYPE_CHECKING:
    from memserve.cli.sim_results import Simulated
    from memserve.sim.hardware import Machine
    from memserve.workloads.words import Workload


@opt.grouped
def run(
    *,
    workload: sim.WorkloadFlags,
    wanted: Annotated[sim.Wanted, opt.Without("weights")],  # simulated requests have no tenants
    limit_s: Annotated[float | None, typer.Option(min=0.1, help="End after so much virtual time.")] = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    out: sim.Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """Replay a workload on a simulated cluster: the same records, figures and report as a measured one."""
    from memserve.bench.catalogue import build
    from memserve.bench.text import describe
    from memserve.cli.sim_results import simulate, summed_up, write_folder

    setup, made = wanted.setup(), build(workload.recipe())
    head = what_comes(made, wanted, setup.machine)
    for line in () if as_json else head:
        typer.echo(line)
    done = simulate(setup, made, wanted.name(), made.kind, workload.seed, limit_s=limit_s)
    slo, command = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms), shlex.join(["memserve", *sys.argv[1:]])
    if out is not None:
        results = write_folder(out, [done], slo, command, [*head, *made.notes])
    else:
        results = summed_up([done], slo, command, [*head, *made.notes])
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(results, str_keys=True)))
        return
    typer.echo("\n".join([*describe(results), *told(done)]))
    if out is not None:
        typer.echo(f"report: {out / 'report.md'}")


def what_comes(made: Workload, wanted: sim.Wanted, machine: Machine) -> list[str]:
    """What is sent, when, and to what: the figures mean nothing without it."""
    due_s = [turn.due_s for session in made.sessions for turn in session.turns if turn.due_s is not None]
    if not any(due_s):
        when = "every session arrives at 0 s, the worst case; --rate R spreads the requests, R a second"
    else:
        when = f"{made.arrivals}, the last one due at {max(due_s):.0f} s"
    origin = "a measured profile" if machine.measured else "a roofline estimate, nothing measured"
    return [
        f"workload: {made.kind} ({made.source}), {len(made.sessions)} sessions, {made.request_count} requests",
        f"arrivals: {when}",
        f"cluster: {wanted.instances}, each {machine.name} ({origin})",
    ]


def told(done: Simulated) -> list[str]:
    """What a simulation used, and how long it took."""
    used = done.usage
    return [
        f"{used.devices} devices for {used.simulated_s:.1f} s: {used.device_hours:.3f} device hours, "
        f"{used.busy_share:.0%} busy, {used.tokens_per_device_hour:,.0f} tokens a device hour",
        f"KV moved: {used.pulled_bytes / 1e9:.2f} GB, waits for links {used.link_waits_s:.2f} s",
        f"simulated in {done.wall_s:.2f} s: {done.requests_per_wall_s:,.0f} requests a second, {done.events} events",
    ]
