"""A simulated run with the records of a measured one, and with what only a simulation knows."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from memserve.base.types import Role
from memserve.base.units import human_bytes
from memserve.cli.output import progress_bar
from memserve_lab.bench.load.prompts import Outcome, RequestRecord
from memserve_lab.bench.metrics import Slo
from memserve_lab.bench.report_writer import Cell, Drawing, Table
from memserve_lab.bench.results import Pass, Results, sum_up
from memserve_lab.bench.serve import ServeReport
from memserve_lab.bench.study import RunFolder
from memserve_lab.sim.replay.clients import MakeScript, Served
from memserve_lab.sim.replay.scripts import Script
from memserve_lab.sim.replay.setup import Setup
from memserve_lab.sim.replay.stores import StoreUsage
from memserve_lab.sim.replay.timeline import Look, padded
from memserve_lab.sim.replay.world import ReplayWorld, Usage, usage
from memserve_lab.workloads.records import Workload

SIMULATION = "simulation.json"
TIMELINE = "timeline"
HTTP_OK, HTTP_BUSY, HTTP_BAD = 200, 429, 400


@dataclass(frozen=True, slots=True)
class Simulated:
    """One workload on one simulated cluster."""

    setting: str
    machine: str
    records: list[RequestRecord]
    done: Pass
    usage: Usage
    looks: list[Look]
    instances: tuple[str, ...]
    wall_s: float
    """How long the simulation took."""
    events: int
    counts: Sequence[str] = ()
    """When the count of a role changed, and why."""

    @property
    def requests_per_wall_s(self) -> float:
        return len(self.records) / self.wall_s if self.wall_s else 0.0


def simulate(
    setup: Setup,
    workload: Workload,
    setting: str,
    label: str,
    seed: int = 0,
    make_script: MakeScript = Script,
    limit_s: float | None = None,
) -> Simulated:
    """Run ``workload`` on ``setup`` to its end, or for ``limit_s`` of virtual time."""
    gc.collect()  # the last run's world
    gc.disable()  # millions of events leave no reference cycles: a collection would only traverse the living world
    started = time.perf_counter()
    try:
        world = ReplayWorld(setup, workload, make_script)
        with progress_bar(f"simulating {setting}", workload.request_count, lambda: world.clients.answered):
            world.run_workload(limit_s)
    finally:
        gc.enable()
    wall_s = time.perf_counter() - started
    records = [record_of(served, setting, label, seed) for served in world.clients.served]
    partial = None if world.clients.done else f"time is up: {limit_s} s"
    load_pass = Pass(label, setting, seed, workload.request_count, world.elapsed_s, partial)
    names = tuple(node.peer.name for node in world.instances)
    looks = padded(world.timeline.looks, len(names))
    counts = [f"{at_s:.0f} s: {order.text}" for at_s, order in world.scaling.decisions] if world.scaling else []
    return Simulated(
        setting, setup.machine.name, records, load_pass, usage(world), looks, names, wall_s, world.clock.steps, counts
    )


def record_of(served: Served, setting: str, workload: str, seed: int) -> RequestRecord:
    """The record of one request, as ``memserve bench`` would have written it."""
    if served.answered:
        outcome, status = Outcome.OK, HTTP_OK
    elif served.end_ns is None:
        outcome, status = Outcome.STOPPED, None
    elif served.is_cut_off:
        outcome, status = Outcome.BROKEN, None
    else:
        outcome, status = Outcome.REFUSED, HTTP_BAD if served.retry_after_s is None else HTTP_BUSY
    return RequestRecord(
        session=served.session, turn=served.turn, group=served.group, setting=setting, workload=workload, seed=seed,
        scheduled_ns=served.scheduled_ns, sent_ns=served.scheduled_ns, first_ns=served.first_ns,
        token_ns=served.token_ns.tolist(), end_ns=served.end_ns, output_tokens=len(served.token_ns),
        prompt_tokens=served.prompt_tokens, cached_tokens=served.cached_tokens, instance=served.instance,
        http_status=status, outcome=outcome, error=served.error or (served.finish if not served.answered else ""),
    )  # fmt: skip


class SimulatedReport(ServeReport):
    """The report of measured runs, with what the simulation used, and a timeline of each run."""

    title = "memserve sim run"

    def __init__(self, results: Results, runs: Sequence[Simulated]) -> None:
        super().__init__(results)
        self._runs = runs
        lines = {
            TIMELINE if len(runs) == 1 else f"{TIMELINE}-{number}": Drawing(run.setting, _timeline_of(run))
            for number, run in enumerate(runs, 1)
        }
        self.drawings = {**ServeReport.drawings, **lines}

    def make_tables(self) -> Iterator[Table]:
        yield from super().make_tables()
        rows: list[list[Cell]] = [
            [run.setting, run.usage.devices, f"{run.usage.device_hours:.3f}", f"{run.usage.busy_share:.0%}",
             f"{run.usage.tokens_per_device_hour:,.0f}", f"{run.usage.pulled_bytes / 1e9:.1f} GB",
             f"{run.usage.simulated_s:.1f}", f"{run.wall_s:.1f}"] for run in self._runs
        ]  # fmt: skip
        columns = ("setting", "devices", "device hours", "busy", "tokens per device hour", "KV moved", "virtual s")
        yield Table("Simulation", (*columns, "wall s"), rows)
        tiers = ("HBM", "DRAM", "other instances", "store", "SSD")
        hits: list[list[Cell]] = [[run.setting, *map(int, dataclasses.astuple(run.usage.hits))] for run in self._runs]
        yield Table("Hit tokens by tier", ("setting", *tiers), hits)
        yield Table(
            "Stores",
            _STORE_COLUMNS,
            [_store_row(run.setting, run.usage.stores) for run in self._runs if run.usage.stores is not None],
        )


_STORE_COLUMNS = (
    "setting", "blocks taken", "blocks lent", "SSD written", "write amplification", "busiest day", "budget a day",
    "SSD read", "reads late", "reads refused", "SSD busy",
)  # fmt: skip


def _store_row(setting: str, used: StoreUsage) -> list[Cell]:
    return [
        setting, used.blocks_stored, used.blocks_lent, human_bytes(used.written_bytes),
        f"{used.write_amplification:.3f}", human_bytes(used.busiest_day_bytes),
        human_bytes(used.writes_per_day_bytes) if used.writes_per_day_bytes else "no limit",
        human_bytes(used.read_bytes), used.reads_late, used.reads_refused, f"{used.busy_share:.0%}",
    ]  # fmt: skip


def write_folder(path: Path, runs: Sequence[Simulated], slo: Slo, command: str, notes: Sequence[str]) -> Results:
    """``records.jsonl.gz``, ``results.json``, ``report.md``, ``simulation.json`` and the plots."""
    with RunFolder(path) as folder:
        for run in runs:
            for record in run.records:
                folder.writer.write_record(record)
    results = summed_up(runs, slo, command, notes)
    SimulatedReport(results, runs).write_report(path)
    extras = [_extras(run) for run in runs]
    (path / SIMULATION).write_bytes(msgspec.json.format(msgspec.json.encode(extras), indent=1))
    return results


def summed_up(runs: Sequence[Simulated], slo: Slo, command: str, notes: Sequence[str]) -> Results:
    """The figures of all runs."""
    records = [record for run in runs for record in run.records]
    lines = [f"**simulated**: {run.setting}, {run.machine}" for run in runs]
    results = sum_up(records, [run.done for run in runs], slo, command, [*lines, *notes])
    results.machine = {"simulated": ", ".join(dict.fromkeys(run.machine for run in runs))}
    return results


def _extras(run: Simulated) -> dict[str, Any]:
    return {
        "setting": run.setting,
        "machine": run.machine,
        "usage": dataclasses.asdict(run.usage),
        "wall_s": run.wall_s,
        "events": run.events,
        "instances": run.instances,
        "timeline": [dataclasses.asdict(look) for look in run.looks],
    }


ROWS: tuple[tuple[str, Callable[[Look], Sequence[float]]], ...] = (
    ("requests waiting", lambda look: look.waiting),
    ("sequences running", lambda look: look.running),
    ("HBM holding KV (share)", lambda look: look.blocks_used),
    ("device busy (share)", lambda look: look.busy),
)
LINES_MAX = 8
ROLE_OF_LETTER = {role.value[0]: role.value for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED)}
"""By the first letter of an instance's name."""


def _timeline_of(run: Simulated) -> Callable[[Any, Any], Any]:
    return lambda pyplot, _: draw_timeline(pyplot, run)


def draw_timeline(pyplot: Any, run: Simulated) -> Any:
    """One line per instance; of many instances the mean and the range of each role."""
    figure, column = pyplot.subplots(len(ROWS), 1, figsize=(10, 9), sharex=True, layout="constrained")
    at_s = [look.at_s for look in run.looks]
    roles: dict[str, list[int]] = {}
    for place, name in enumerate(run.instances):
        roles.setdefault(ROLE_OF_LETTER[name[0]], []).append(place)
    for axes, (label, read) in zip(column, ROWS, strict=True):
        rows = [read(look) for look in run.looks]
        if len(run.instances) <= LINES_MAX:
            for place, name in enumerate(run.instances):
                axes.plot(at_s, [row[place] for row in rows], label=name, linewidth=1)
        else:
            for role, places in roles.items():
                columns = [[row[place] for place in places] for row in rows]
                line = axes.plot(at_s, [sum(values) / len(values) for values in columns], label=f"{role}: mean, range")
                low, high = [min(values) for values in columns], [max(values) for values in columns]
                axes.fill_between(at_s, low, high, alpha=0.15, color=line[0].get_color())
        axes.set(ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    column[0].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), title="instance")
    column[-1].set_xlabel("virtual time (s)")
    figure.suptitle(f"{run.setting}\n{run.machine}")
    return figure
