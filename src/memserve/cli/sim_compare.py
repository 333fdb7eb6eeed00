"""``memserve sim compare``: two results, or two settings, side by side (level 4)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.cli import options as opt
from memserve.cli import sim_options as sim
from memserve.config import POLICIES
from memserve.errors import UserError
from memserve.options import with_values
from memserve.types import Caching, TransferMode

if TYPE_CHECKING:
    from memserve.bench.metrics import Figures, Spread

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
    """Two result folders (of sim or of bench), or two settings on one workload: every figure, and how it changes.

    A setting is INSTANCES, then any of a policy, caching level, transfer mode and device: prefill=1,decode=3/session.
    """
    one, other = (_figures_of(text, workload, wanted) for text in (first, second))
    for name in [name for name in one if name in other] or [""]:
        before = one.get(name) or next(iter(one.values()))
        after = other.get(name) or next(iter(other.values()))
        typer.echo("\n".join(table(name, first, second, before, after)))


def _figures_of(text: str, workload: sim.WorkloadFlags, wanted: sim.Wanted) -> dict[str, Figures]:
    """Workload -> its figures."""
    if Path(text).is_dir():
        return read_figures(Path(text))
    from memserve.bench.catalogue import build
    from memserve.bench.metrics import figures
    from memserve.cli.sim_results import simulate

    chosen = parse_setting(text, wanted)
    made = build(workload.recipe())
    return {made.kind: figures(simulate(chosen.setup(), made, text, made.kind, workload.seed).records)}


def read_figures(folder: Path) -> dict[str, Figures]:
    """Of every workload in a folder of results. Raises :class:`UserError` where there is none."""
    from memserve.bench.load.record import read_records
    from memserve.bench.metrics import by_setting, figures
    from memserve.bench.results import RECORDS

    file = folder / RECORDS
    if not file.is_file():
        raise UserError(f"no {RECORDS} in {folder}", hint="a folder that sim run or bench serve has written with --out")
    grouped = by_setting(read_records(file))
    several = len({setting for _, setting in grouped}) > 1
    return {" ".join(key) if several else key[0]: figures(records) for key, records in grouped.items()}


def parse_setting(text: str, wanted: sim.Wanted) -> sim.Wanted:
    """``INSTANCES/word/word``. Raises :class:`UserError` for a word that means nothing."""
    instances, *words = text.split("/")
    chosen = dataclasses.replace(wanted, instances=instances)
    for word in words:
        if word in POLICIES:
            chosen = with_values(chosen, {("cluster", "policy"): word})
        elif word in list(Caching):
            chosen = with_values(chosen, {("cluster", "caching"): Caching(word)})
        elif word in list(TransferMode):
            chosen = with_values(chosen, {("cluster", "transfer"): TransferMode(word)})
        else:
            chosen = dataclasses.replace(chosen, device=word)
    return chosen


def table(workload: str, first: str, second: str, before: Figures, after: Figures) -> list[str]:
    """Lines for people."""
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
