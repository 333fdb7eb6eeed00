"""The page of ``memserve bench concurrency``: the tables of row C8 (level 4)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from memserve.bench.concurrency.plots import CAPTIONS, DRAWINGS, TITLES, contenders_of
from memserve.bench.concurrency.results import Cell, ConcurrencyResults, Estimate
from memserve.bench.concurrency.story import SCENARIOS
from memserve.bench.results import RECORDS
from memserve.bench.sheet import Cell as TableCell
from memserve.bench.sheet import circumstances, draw_all, picture, table, without_pictures, write_sheet

MS = 1e3
SOURCE = "llm-serving-cache (Llama 3.1 8B, Ollama)"
SOURCE_ALONE_MS = {"cold": (8488, 177), "warm": (5520, 47), "shared": (5891, 47), "unrelated": (1891, 163)}
"""Total latency and prompt evaluation of single requests; its unrelated prompt was a shorter one."""
SOURCE_BURSTS_MS = {1: (5771, 5771, 0.17), 3: (10963, 16299, 0.18), 5: (16560, 27744, 0.18), 10: (29040, 53525, 0.19)}
"""Concurrency -> mean latency, P95, requests a second; all ask the same."""
SOURCE_OVERLOAD = (("10", "0", "53525", "0.18"), ("3", "7", "20700", "0.15"))
"""Accepted, rejected, P95 in ms, requests a second: of 10 at once, without a limit and with at most 3 active."""


def write_concurrency(results: ConcurrencyResults, folder: Path) -> None:
    """Write ``results.json``, ``report.md`` and the plots."""
    drawn = draw_all(DRAWINGS, results, folder)
    write_sheet(folder, results, _page(results, drawn))


def _page(results: ConcurrencyResults, drawn: list[str] | None) -> Iterator[str]:
    yield "# memserve bench concurrency\n"
    yield from circumstances(results.command, results.version, results.notes, results.partial)
    yield f"* {', '.join(results.models)}: prompts of {results.prompt_tokens_mean:.0f} tokens on average, answers of"
    yield f"  {results.output_tokens}"
    yield "* the requests of a burst are all due at the same moment, and latency counts from it"
    if results.limit:
        yield f"* the limit: {results.limit}; who is refused is told so at once, and counts in no latency"
    if drawn is None:
        yield without_pictures()
    for name in drawn or ():
        yield picture(name, CAPTIONS[name])
    yield from _alone(results)
    yield from _overload(results)
    for scenario in SCENARIOS:
        yield from _scenario(results, scenario)
    yield f"\nEvery request is in `{RECORDS}`."


def _alone(results: ConcurrencyResults) -> Iterator[str]:
    """One request at a time: where its time goes."""
    cells = [cell for cell in results.cells if cell.concurrency == 1 and cell.contender == contenders_of(results)[0]]
    if not cells:
        return
    yield "\n## One request at a time"
    rows: list[list[TableCell]] = []
    for cell in cells:
        total_ms, prompt_ms = SOURCE_ALONE_MS[cell.scenario]
        decode = f"{MS * cell.decode_mean_s:.0f}" if cell.decode_mean_s is not None else ""
        rows.append([cell.scenario, _ms(cell.latency_mean_s), _ms(cell.ttft_mean_s), decode, f"{cell.cached_share:.0%}",
                     f"{total_ms} / {prompt_ms}"])  # fmt: skip
    columns = ["burst", "latency (ms)", "to the first token (ms)", "decode (ms)", "cached"]
    yield from table([*columns, f"{SOURCE}: latency / prompt evaluation (ms)"], rows)


def _overload(results: ConcurrencyResults) -> Iterator[str]:
    """Without and with the limit, at the largest concurrency."""
    contenders = contenders_of(results)
    if len(contenders) < 2:
        return
    most = max(cell.concurrency for cell in results.cells)
    yield f"\n## Overload: {most} at once"
    rows: list[list[TableCell]] = []
    for cell in results.cells:
        if cell.concurrency == most:
            rows.append([cell.scenario, cell.contender, f"{cell.accepted / cell.repetitions:g}",
                         f"{cell.rejected / cell.repetitions:g}", _ms(cell.latency_p95_s),
                         f"{cell.requests_per_s.value:.2f}"])  # fmt: skip
    for name, cells in zip(("no control", "max active 3"), SOURCE_OVERLOAD, strict=True):
        rows.append(["warm", f"{SOURCE}: {name}, 10 at once", *cells])
    yield from table(["burst", "server", "accepted", "rejected", "P95 latency (ms)", "requests/s"], rows)


def _scenario(results: ConcurrencyResults, scenario: str) -> Iterator[str]:
    cells = [cell for cell in results.cells if cell.scenario == scenario]
    if not cells:
        return
    yield f"\n## {TITLES[scenario].capitalize()}"
    rows = [_row(cell) for cell in cells]
    if scenario == "warm":
        for concurrency, (mean_ms, p95_ms, rate) in SOURCE_BURSTS_MS.items():
            rows.append([concurrency, SOURCE, "", "", mean_ms, p95_ms, "", "", "", f"{rate:.2f}", "", ""])
    columns = ["at once", "server", "accepted", "rejected", "latency mean (ms)", "P95", "TTFT mean", "P95"]
    yield from table([*columns, "burst (ms)", "requests/s", "rejected after (ms)", "cached"], rows)
    failed = sum(cell.failed for cell in cells)
    bursts = max(cell.repetitions for cell in cells)
    yield f"\nCounts are those of {bursts} burst{'s together' if bursts > 1 else ''}" + (
        f"; {failed} requests failed." if failed else "."
    )


def _row(cell: Cell) -> list[TableCell]:
    after = f"{MS * cell.rejected_after_mean_s:.0f}" if cell.rejected_after_mean_s is not None else ""
    return [
        cell.concurrency, cell.contender, cell.accepted, cell.rejected, _ms(cell.latency_mean_s),
        _ms(cell.latency_p95_s), _ms(cell.ttft_mean_s), _ms(cell.ttft_p95_s), _ms(cell.wall_s),
        f"{cell.requests_per_s.value:.2f}", after, f"{cell.cached_share:.0%}",
    ]  # fmt: skip


def _ms(estimate: Estimate | None) -> str:
    return f"{MS * estimate.value:.0f}" if estimate is not None else ""
