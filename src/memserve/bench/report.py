"""``report.md``: what was measured, for people (level 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from memserve.bench import plots
from memserve.bench.comparison import beside_the_paper
from memserve.bench.metrics import Spread
from memserve.bench.results import RECORDS, RESULTS, Found, Results
from memserve.bench.text import describe_slo, table_row

REPORT = "report.md"
CAPTIONS = {
    "workloads": "What was sent (the form of MemServe's figure 7).",
    "settings": "Settings side by side (the form of figure 8).",
    "turns": "Over the turns of a session (the form of figure 12).",
    "share-ratio": "Over the share ratio (the form of figure 14).",
}


def write_report(results: Results, folder: Path) -> None:
    """Write ``report.md`` and the plots into ``folder``; without matplotlib the report says so."""
    drawn = plots.draw_all(results, folder) if plots.can_draw() else None
    (folder / REPORT).write_text("\n".join(_page(results, drawn)) + "\n", encoding="utf-8")


def _page(results: Results, drawn: Sequence[str] | None) -> Iterator[str]:
    yield "# memserve bench"
    yield ""
    if results.partial is not None:
        yield f"**Partial:** {results.partial}. What follows is what was measured until then.\n"
    yield from _circumstances(results)
    if drawn is None:
        yield "\nNo plots: matplotlib is not installed (`pip install 'memserve[bench]'`).\n"
    for name in drawn or ():
        yield f"\n![{CAPTIONS[name]}]({name}.png)\n\n{CAPTIONS[name]} [SVG]({name}.svg)"
    for workload in dict.fromkeys(found.workload for found in results.found):
        yield from _table(workload, [found for found in results.found if found.workload == workload], results)
    yield from beside_the_paper(results)
    yield from _passes(results)
    yield f"\nEvery request is in `{RECORDS}`, every figure in `{RESULTS}`."


def _circumstances(results: Results) -> Iterator[str]:
    machine = results.machine
    yield f"* {', '.join(results.models)}" if results.models else "* nothing was served"
    yield f"* `{results.command}`, memserve {results.version}"
    if machine.get("simulated"):
        yield f"* simulated: {machine['simulated']}"
    else:
        yield f"* {machine.get('processor')}, {machine.get('cores')} cores; {machine.get('system')}"
        yield f"* load average at the end: {', '.join(map(str, machine.get('load_average', ())))}"
    yield f"* SLO: {describe_slo(results.slo)}"
    yield "* latency counts from the moment at which the workload wanted the request sent"
    for note in results.notes:
        yield f"* {note}"


def _table(workload: str, members: Sequence[Found], results: Results) -> Iterator[str]:
    yield f"\n## {workload}\n"
    columns = ["setting", "requests", "failed", "TTFT mean", "P50", "P99", "TPOT mean", "P99", "JCT mean", "P99"]
    columns += ["tokens/s", "goodput /s", "SLO missed", "cached", "fetched", "client late P50"]
    yield table_row(columns)
    yield table_row(["---"] * len(columns))
    for found in members:
        f = found.figures
        cells = [found.setting, str(f.requests), str(f.failed), *_ms(f.ttft_s, "mean", "p50", "p99")]
        cells += [*_ms(f.tpot_s, "mean", "p99"), *_ms(f.jct_s, "mean", "p99"), f"{f.output_tokens_per_s:.1f}"]
        cells += [
            f"{f.goodput_per_s:.2f}",
            f"{f.slo_violations:.0%}",
            f"{f.cached_share:.0%}",
            f"{f.fetched_share:.0%}",
            *_ms(f.late_s, "p50"),
        ]
        yield table_row(cells)
    yield "\nTimes in milliseconds; cached, fetched: shares of the prompt tokens, as the server says; fetched: of the"
    yield "cached ones, those that another instance had and gave."
    for found in members:
        if found.figures.errors:
            told = ", ".join(f"{count} {what}" for what, count in found.figures.errors.items())
            yield f"\n{found.setting}: {told}."


def _ms(spread: Spread | None, *names: str) -> list[str]:
    return [f"{1e3 * getattr(spread, name):.1f}" if spread is not None else "" for name in names]


def _passes(results: Results) -> Iterator[str]:
    yield "\n## Passes\n"
    yield table_row(["workload", "setting", "seed", "planned requests", "seconds", ""])
    yield table_row(["---"] * 6)
    for one in results.passes:
        cells = (one.workload, one.setting, str(one.seed), str(one.planned), f"{one.wall_s:.1f}", one.partial or "")
        yield table_row(cells)
