"""What scheduling by objectives loses with wrong predictions of the lengths of answers, in virtual time.

    python bench/slo_noise.py --data DATA [--seeds 5] [--requests 600] [--points conv,conv-200,code,trace] [--json FILE]

One simulated instance, requests of a real trace with its lengths, Poisson arrivals. Of each rate: the share of
requests that miss an objective (first token, or time per token) in order of arrival (fcfs), and by objectives with
what production learns (learnt), with an oracle, with an oracle that is wrong by a lognormal factor, and with two
predictors that are always wrong: one more token, and to the end of the context. Seeds change arrivals and errors; all
contenders get the same arrivals. Behind ``±``: the standard error of the mean difference to fcfs, and ``!`` where a
contender is worse by more than two of them. DATA is a folder of data sets; a trace that is not there is left out.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import stdev
from typing import NamedTuple

from harness.flags import Commas, options, parts_of, save
from harness.rounds import mean as fmean
from harness.tables import Table

from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import NS_PER_MS
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.bench.metrics import Slo, figures
from memserve_lab.cli.sim_results import simulate
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.lengths import LengthStudy
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup
from memserve_lab.workloads.records import Workload


class Point(NamedTuple):
    """A workload, a device, objectives, and rates from those that fcfs carries to those that nothing does."""

    kind: str
    device: str
    step_tokens: int
    ttft_ms: int
    tpot_ms: int
    rates: tuple[float, ...]


POINTS = {
    "conv": Point("azure-conv", "l40s", 8192, 3000, 80, (4, 5, 5.5, 6, 7)),
    "conv-200": Point("azure-conv", "l40s", 8192, 3000, 200, (6, 7)),
    "code": Point("azure-code", "l40s", 8192, 3000, 200, (2, 3, 4, 5)),
    "trace": Point("trace", "a100", 8192, 8000, 100, (0.15, 0.2, 0.3)),
}
CONTENDERS: dict[str, LengthStudy | None] = {
    "fcfs": None,
    "learnt": LengthStudy(),
    "oracle": LengthStudy("oracle"),
    "oracle, sigma 0.5": LengthStudy("oracle", 0.5),
    "oracle, sigma 1": LengthStudy("oracle", 1.0),
    "oracle, sigma 2": LengthStudy("oracle", 2.0),
    "shortest": LengthStudy("shortest"),
    "longest": LengthStudy("longest"),
}


def violations(point: Point, workload: Workload, study: LengthStudy | None, seed: int) -> float:
    """Share of the requests that miss an objective."""
    scheduler = dataclasses.replace(
        GPU_SCHEDULER,
        max_step_tokens=point.step_tokens,
        scheduling="fcfs" if study is None else "slo",
        slo_ttft_ns=point.ttft_ms * NS_PER_MS,
        slo_tpot_ns=point.tpot_ms * NS_PER_MS,
    )
    lengths = dataclasses.replace(study or LengthStudy(), length_seed=seed)
    instance = machine("llama-3-8b", point.device)
    setup = Setup({Role.COLOCATED: 1}, instance, ClusterConfig(policy="least-load"), scheduler, lengths=lengths)
    simulated = simulate(setup, workload, "", workload.kind, seed)
    return figures(simulated.records, slo=Slo(ttft_s=point.ttft_ms / 1e3, tpot_s=point.tpot_ms / 1e3)).slo_violations


def measure(point: Point, rate: float, data: Path, requests: int, seeds: int) -> dict[str, list[float]]:
    """Of every contender: the share of violations, seed by seed."""
    results: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for seed in range(seeds):
        workload = build(
            Recipe(point.kind, data, sessions=requests, seed=seed, arrivals=Arrivals.POISSON, requests_per_s=rate)
        )
        for name, study in CONTENDERS.items():
            results[name].append(violations(point, workload, study, seed))
    return results


def cell(values: list[float], base: list[float]) -> str:
    """The mean in per cent, and the standard error of its difference to ``base``."""
    differences = [value - base_value for value, base_value in zip(values, base, strict=True)]
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    worse = "!" if fmean(differences) > max(2 * error, 1e-9) else ""
    return f"{100 * fmean(values):.1f}" + (f" ± {100 * error:.1f}{worse}" if values is not base else "")


def main() -> None:
    args = options(
        __doc__, required="data", data=Path, seeds=5, requests=600, points=Commas(*POINTS),
        rates=("", "instead of a point's own"),
    )  # fmt: skip
    everything = {}
    for name, point in parts_of(args.points, POINTS).items():
        print(
            f"\n{point.kind}, Llama-3-8B on one {point.device}, {args.requests} requests, {args.seeds} seeds: "
            f"requests (%) that miss TTFT {point.ttft_ms / 1e3:g} s or TPOT {point.tpot_ms} ms\n"
        )
        table = Table(["requests/s", *CONTENDERS])
        for rate in [float(rate) for rate in args.rates.split(",") if rate] or point.rates:
            try:
                results = measure(point, rate, args.data, args.requests, args.seeds)
            except UserError as error:
                print(f"left out: {error}")
                break
            everything[f"{name} {rate}"] = results
            cells = {contender: cell(values, results["fcfs"]) for contender, values in results.items()}
            table.show({"requests/s": f"{rate:g}", **cells})
    save(args, everything)


if __name__ == "__main__":
    main()
