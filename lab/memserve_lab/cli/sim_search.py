"""``memserve sim search``: the cheapest cluster that meets an SLO; ``compare``: two results side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.base.errors import UserError
from memserve.base.options import with_values
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import Caching, TransferPolicy
from memserve.cli import flags as opt
from memserve_lab.cli import sim_run as sim
from memserve_lab.cli.bench_load import SloJct, SloTpot, SloTtft, read_slo

if TYPE_CHECKING:
    from memserve_lab.bench.metrics import Figures, Slo
    from memserve_lab.sim.search import Mix, Trial
    from memserve_lab.workloads.records import Workload
    from memserve_lab.workloads.statistics import Spread


A = Annotated[str, typer.Argument(help="A folder with results, or a setting: colocated=8/session/pd-caching-1 ...")]
SPREADS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("JCT", "jct_s"))
STATISTICS = ("mean", "p50", "p90", "p99")
MS = 1e3


@opt.grouped
def compare(
    first: A,
    second: A,
    *,
    workload: sim.WorkloadFlags,
    wanted: Annotated[sim.Wanted, opt.Only("model", "device", "profile", "kv_blocks", "heartbeat_ms")],
) -> None:
    """Compare two result folders (of sim or bench), or two settings on one workload, figure by figure.

    A setting is INSTANCES, then any of a policy, caching level, transfer mode, device and number of routers:
    prefill=1,decode=3/session, colocated=8/routers=2.
    """
    first_figures, second_figures = (_figures_of(text, workload, wanted) for text in (first, second))
    for name in [name for name in first_figures if name in second_figures] or [""]:
        before = first_figures.get(name) or next(iter(first_figures.values()))
        after = second_figures.get(name) or next(iter(second_figures.values()))
        typer.echo("\n".join(table(name, first, second, before, after)))


def _figures_of(text: str, workload: sim.WorkloadFlags, simulation: sim.Wanted) -> dict[str, Figures]:
    """The figures of a result folder, or of a setting that is simulated now, by workload."""
    if Path(text).is_dir():
        return read_figures(Path(text))
    from memserve_lab.bench.catalogue import build
    from memserve_lab.bench.metrics import figures
    from memserve_lab.cli.sim_results import simulate

    simulation_chosen = parse_setting(text, simulation)
    workload_made = build(workload.make_recipe())
    return {
        workload_made.kind: figures(
            simulate(simulation_chosen.make_setup(), workload_made, text, workload_made.kind, workload.seed).records
        )
    }


def read_figures(folder: Path) -> dict[str, Figures]:
    """The figures of every workload in a folder of results. Raises :class:`UserError` where there is none."""
    from memserve_lab.bench.load.prompts import read_records
    from memserve_lab.bench.metrics import by_setting, figures
    from memserve_lab.bench.study import RECORDS

    file = folder / RECORDS
    if not file.is_file():
        raise UserError(f"no {RECORDS} in {folder}", hint="give a folder that sim run or bench serve wrote with --out")
    grouped = by_setting(read_records(file))
    several = len({setting for _, setting in grouped}) > 1
    return {" ".join(key) if several else key[0]: figures(records) for key, records in grouped.items()}


def parse_setting(text: str, simulation: sim.Wanted) -> sim.Wanted:
    """``INSTANCES/word/word``: each word a policy, caching level, transfer mode or ``routers=N``, else a device."""
    instances, *words = text.split("/")
    simulation_chosen = dataclasses.replace(simulation, instances=instances)
    for word in words:
        if word in ROUTING_POLICIES.names():
            simulation_chosen = with_values(simulation_chosen, {("cluster", "policy"): word})
        elif word in list(Caching):
            simulation_chosen = with_values(simulation_chosen, {("cluster", "caching"): Caching(word)})
        elif word in list(TransferPolicy):
            simulation_chosen = with_values(simulation_chosen, {("cluster", "transfer"): TransferPolicy(word)})
        elif (routers := word.removeprefix("routers=")) != word and routers.isdecimal():
            simulation_chosen = dataclasses.replace(simulation_chosen, routers=int(routers))
        else:
            simulation_chosen = dataclasses.replace(simulation_chosen, device=word)
    return simulation_chosen


def table(workload: str, first: str, second: str, before: Figures, after: Figures) -> list[str]:
    """The comparison as lines of text."""
    lines = [f"{workload}: A = {first}, B = {second}", f"{'':<22}{'A':>12}{'B':>12}{'change':>10}"]
    lines.append(_line("requests", before.requests, after.requests, "d"))
    lines.append(_line("failed", before.failed, after.failed, "d"))
    for label, field in SPREADS:
        for statistic in STATISTICS:
            was, is_now = (_ms(getattr(figures, field), statistic) for figures in (before, after))
            lines.append(_line(f"{label} {statistic} (ms)", was, is_now))
    lines.append(_line("output tokens/s", before.output_tokens_per_s, after.output_tokens_per_s))
    lines.append(_line("cached share (%)", 100 * before.cached_share, 100 * after.cached_share))
    return lines


def _ms(spread: Spread | None, statistic: str) -> float:
    return MS * getattr(spread, statistic) if spread is not None else 0.0


def _line(name: str, before: float, after: float, form: str = ".2f") -> str:
    change = f"{after / before - 1:+.1%}" if before else ""
    return f"{name:<22}{before:>12{form}}{after:>12{form}}{change:>10}"


@opt.grouped
def search(
    *,
    workload: sim.WorkloadFlags,
    wanted: Annotated[sim.Wanted, opt.Only("model", "policy", "caching", "heartbeat_ms")],
    devices: Annotated[str, typer.Option(help="Kinds of device to try, comma-separated: h100,a100,h100x2.")] = "h100",
    prices: Annotated[str, typer.Option(help="Price of a device hour, e.g. h100=3,a100=1.5. Default: 1 each.")] = "",
    mixes: Annotated[
        str, typer.Option(help="Mixes of roles: colocated, or prefill to decode, e.g. 1:1.")
    ] = "colocated,1:3,1:1",
    instances_max: Annotated[int, typer.Option(min=1, help="Largest cluster to try.")] = 64,
    violations_max: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that may miss the SLO.")
    ] = 0.01,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find the smallest cluster of each mix and device that meets an SLO, and the cheapest of them."""
    from memserve_lab.bench.catalogue import build
    from memserve_lab.sim.search import cheapest, parse_mixes, smallest

    slo = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)
    if slo == read_slo(None, None, None):
        raise UserError("no SLO is given", hint="for example --slo-ttft-ms 500 --slo-tpot-ms 50")
    workload_made, prices_by_device = build(workload.make_recipe()), read_prices(prices)
    trials: list[tuple[str, Trial | None]] = []
    for kind in (kind.strip() for kind in devices.split(",")):
        for mix in parse_mixes(mixes):
            tried = _Tried(
                dataclasses.replace(wanted, device=kind), mix, workload_made, slo, violations_max, prices_by_device
            )
            best, _ = smallest(tried, mix.least, max(mix.least, instances_max))
            trials.append((f"{mix.name} on {kind}", best))
    best_of_all = cheapest(trials)
    if as_json:
        rows = [{"setting": name, "trial": dataclasses.asdict(t) if t else None} for name, t in trials]
        typer.echo(json.dumps({"cheapest": best_of_all[0] if best_of_all else None, "found": rows}))
    else:
        typer.echo("\n".join(_lines(trials, best_of_all, instances_max)))
    if best_of_all is None:
        raise typer.Exit(1)


class _Tried:
    """Tries clusters of one mix on one kind of device."""

    def __init__(
        self, wanted: sim.Wanted, mix: Mix, made: Workload, slo: Slo, violations_max: float, prices: dict[str, float]
    ) -> None:
        self._wanted, self._mix, self._made = wanted, mix, made
        self._slo, self._violations_max = slo, violations_max
        self._price = prices.get(wanted.device.partition("x")[0], 1.0)

    def __call__(self, size: int) -> Trial:
        from memserve_lab.bench.metrics import figures
        from memserve_lab.cli.sim_results import simulate
        from memserve_lab.sim.search import Trial

        counts = self._mix.instances_of(size)
        text = ",".join(f"{role.value}={count}" for role, count in counts.items())
        setup = dataclasses.replace(self._wanted, instances=text).make_setup()
        simulated = simulate(setup, self._made, text, self._made.kind)
        missed = figures(simulated.records, slo=self._slo).slo_violations
        good = missed <= self._violations_max
        why = "" if good else f"{missed:.1%} of the requests miss the SLO"
        typer.echo(f"{text} on {self._wanted.device}: {why or f'good, {missed:.1%} miss it'}", err=True)
        return Trial(size, good, setup.devices * self._price, why)


def read_prices(text: str) -> dict[str, float]:
    """``h100=3,a100=1.5``. Raises :class:`UserError` for anything else."""
    prices = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, price = part.partition("=")
        try:
            prices[name] = float(price)
        except ValueError:
            raise UserError(f"cannot read {part!r} as a price", hint="for example --prices h100=3,a100=1.5") from None
    return prices


def _lines(trials: list[tuple[str, Trial | None]], best: tuple[str, Trial] | None, instances_max: int) -> list[str]:
    lines = [f"{'setting':<24}{'instances':>10}{'price/hour':>12}"]
    for name, trial in trials:
        if trial is None:
            lines.append(f"{name:<24}{'more than ' + str(instances_max):>22}  (not even {instances_max} meet the SLO)")
        else:
            lines.append(f"{name:<24}{trial.size:>10}{trial.cost:>12.2f}")
    verdict = f"cheapest: {best[0]}, {best[1].size} instances" if best else "none of them meets the SLO"
    return [*lines, verdict]
