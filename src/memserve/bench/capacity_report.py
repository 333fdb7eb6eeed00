"""The capacity search on paper: ``capacity.json``, a table, and latency over the rate (level 4)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memserve.bench import plots
from memserve.bench.capacity import Capacity
from memserve.bench.probing import Search
from memserve.bench.report import REPORT
from memserve.bench.results import machine
from memserve.bench.text import describe_slo

MS = 1e3


def write_capacity(found: Sequence[Capacity], plan: Search, command: str, folder: Path) -> None:
    """Write ``capacity.json``, ``report.md`` and, with matplotlib, ``capacity.png`` and ``.svg``."""
    title = plan.recipe.kind
    body = {
        "title": title, "command": command, "slo": plan.slo, "violations_max": plan.violations_max,
        "probe_s": plan.probe_s, "machine": machine(), "found": found,
    }  # fmt: skip
    (folder / "capacity.json").write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1))
    if plots.can_draw():
        _draw(found, title, plan, folder)
    (folder / REPORT).write_text("\n".join(_page(found, plan, command, plots.can_draw())) + "\n", encoding="utf-8")


def _page(found: Sequence[Capacity], plan: Search, command: str, drawn: bool) -> Iterator[str]:
    yield f"# Capacity: {plan.recipe.kind}\n"
    partial = next((one for one in found if one.partial is not None), None)
    if partial is not None:
        yield f"**Partial:** {partial.setting}: {partial.partial}. What follows is what was found until then.\n"
    host = machine()
    yield f"* `{command}`"
    yield f"* {host['processor']}, {host['cores']} cores; {host['system']}\n"
    yield f"The largest rate whose queue stays bounded while at most {plan.violations_max:.0%} of the requests miss the"
    yield f"SLO ({describe_slo(plan.slo)}); requests come for {plan.probe_s:g} s at each rate.\n"
    yield "![Latency over the rate](capacity.png)\n" if drawn else "No plot: matplotlib is not installed.\n"
    yield "| setting | capacity (requests/s) | |\n| --- | --- | --- |"
    for one in found:
        yield f"| {one.setting} | {f'{one.rate:.2f}' if one.rate else 'none found'} | {one.partial or ''} |"
    yield "\n| setting | rate | borne | TTFT mean (ms) | P99 | SLO missed | backlog, middle and last third | why not |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for one in found:
        for probe in one.probes:
            spread = probe.figures.ttft_s
            times = (f"{MS * spread.mean:.0f}", f"{MS * spread.p99:.0f}") if spread is not None else ("", "")
            cells = [one.setting, f"{probe.rate:.2f}", "yes" if probe.borne else "no", *times]
            cells += [f"{probe.figures.slo_violations:.1%}", f"{probe.backlog_middle:.1f}, {probe.backlog_last:.1f}"]
            yield "| " + " | ".join([*cells, probe.why]) + " |"


def _draw(found: Sequence[Capacity], title: str, plan: Search, folder: Path) -> None:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # no window
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for number, one in enumerate(found):
        _line(left, right, one, f"C{number}")
    right.axhline(100 * plan.violations_max, color="grey", linestyle=":", label="limit")
    if plan.slo.ttft_s is not None:
        left.axhline(MS * plan.slo.ttft_s, color="grey", linestyle=":", label="limit")
    left.set(xlabel="rate (requests/s)", ylabel="P99 time to first token (ms)", yscale="log")
    right.set(xlabel="rate (requests/s)", ylabel="requests that miss the SLO (%)")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    host = machine()
    where = f"{host['processor']}, {host['cores']} cores"
    figure.suptitle(f"Capacity: {title} on {where}\nfilled: borne, hollow: not, dashed: the largest borne")
    for ending in plots.FORMATS:
        figure.savefig(folder / f"capacity.{ending}", bbox_inches="tight", dpi=120)
    pyplot.close(figure)


def _line(left: Any, right: Any, one: Capacity, color: str) -> None:
    probes = sorted((p for p in one.probes if p.figures.ttft_s is not None), key=lambda probe: probe.rate)
    rates = [probe.rate for probe in probes]
    p99s = [probe.figures.ttft_s.p99 * MS for probe in probes if probe.figures.ttft_s is not None]
    missed = [100 * probe.figures.slo_violations for probe in probes]
    for axes, values in ((left, p99s), (right, missed)):
        axes.plot(rates, values, color=color, linewidth=1, label=one.setting)
        for probe, value in zip(probes, values, strict=True):
            axes.plot(probe.rate, value, marker="o", color=color, fillstyle="full" if probe.borne else "none")
        if one.rate is not None:
            axes.axvline(one.rate, color=color, linestyle="--", alpha=0.6)
