"""Write docs/reference/LEADERBOARD.md out of what ``bench/leaderboard.py`` has measured.

    python scripts/leaderboard.py [--results FILE] [--page FILE]
    python scripts/leaderboard.py --check       writes nothing; exit with 1 if the page is out of date

A row is a load with one figure; the cells are medians of the rounds, with the least and the most in brackets. The first
of a row has the best median. Why memserve is not first somewhere stands in ``bench/results/leaderboard-lost.json``, by
the load and the figure; a lost row without a reason says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "leaderboard.json"
REASONS = ROOT / "bench" / "results" / "leaderboard-lost.json"
PAGE = ROOT / "docs" / "reference" / "LEADERBOARD.md"
OURS = "memserve"
SERVERS = (OURS, "vLLM", "llama.cpp")
FIGURES = (  # field, title, whether more is better
    ("requests_per_s", "requests/s", True),
    ("ttft_ms", "TTFT, mean, ms", False),
    ("tpot_ms", "time between tokens, mean, ms", False),
)
BUSY = 0.05
"""Above this share of the machine, what others took stands at the page's head."""
HEAD = """# Leaderboard

The field's own load tools against memserve, vLLM on the CPU and llama.cpp's server, in turn, on one machine. The same
weights for all, answers of the same length, prompts made by the tool from a seed; each server as its authors start it,
4 requests at once, equal room for KV. `make leaderboard` repeats it (`bench/leaderboard.py` says how).
`python scripts/leaderboard.py` writes this page from `bench/results/leaderboard.json`, where each run stands.
"""

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One load and one figure: values of the rounds, by server."""

    load: str
    field: str
    title: str
    is_more_better: bool
    values: dict[str, list[float]]

    @property
    def key(self) -> str:
        """As reasons name it."""
        return f"{self.load}/{self.field}"

    def first(self) -> str:
        """The server with the best median."""
        medians = {server: statistics.median(values) for server, values in self.values.items()}
        return (max if self.is_more_better else min)(medians, key=lambda server: medians[server])

    def cell(self, server: str) -> str:
        """Median, least and most; empty: it has none."""
        if not (values := self.values.get(server)):
            return ""
        text = _number(statistics.median(values))
        spread = f" ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else ""
        return f"**{text}**{spread}" if server == self.first() else text + spread


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rows_of(record: Record) -> list[Row]:
    """In the order of the loads. A row that one server alone has is none."""
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in record["rows"]:
        for field, _, _ in FIGURES:
            if "failed" not in run and run.get(field):
                values[run["load"], field][run["server"]].append(run[field])
    rows = []
    for load, about in record["loads"].items():
        for field, title, is_more_better in FIGURES:
            is_told = not (about["is_timed"] and field == "requests_per_s")
            if is_told and len(values[load, field]) > 1:
                rows.append(Row(load, field, title, is_more_better, dict(values[load, field])))
    return rows


def page(record: Record, reasons: dict[str, str]) -> str:
    """The page's text."""
    rows = rows_of(record)
    if not record["rows"]:
        return f"{HEAD}\n{record['note'] or 'Nothing has been measured yet.'}\n"
    lines = [HEAD, *_circumstances(record, rows), ""]
    for model in dict.fromkeys(load.split("/")[0] for load in record["loads"]):
        of_model = [row for row in rows if row.load.split("/")[0] == model]
        lines += [f"## {model.capitalize()}", "", *_missing(record, model), *_table(of_model)]
    lines += ["## Lost rows", "", *_lost(rows, reasons), "", "## Loads", "", *_loads(record), ""]
    lines += ["## Versions", "", *_versions(record), ""]
    if failed := [run for run in record["rows"] if "failed" in run or _unanswered(record, run)]:
        lines += ["## Requests that failed", "", *(_failure(record, run) for run in failed), ""]
    return "\n".join(lines)


def _circumstances(record: Record, rows: list[Row]) -> Iterator[str]:
    wins = sum(row.first() == OURS for row in rows)
    share = f" ({wins / len(rows):.0%})" if rows else ""
    yield (
        f"**memserve is first in {wins} of {len(rows)} rows{share}.** {record['machine']}{_cores_of_tools(record)}; "
        f"{record['rounds']} rounds."
    )
    others = sorted(run["others"] for run in record["rows"])
    if others and (middle := statistics.median(others)) > BUSY:
        yield ""
        yield (
            f"**The machine was not quiet:** others took {middle:.0%} of it in the median run, {others[-1]:.0%} "
            "at worst. Servers took turns, but not all suffer alike: those whose threads wait for each other do most."
        )
    if record["note"]:
        yield ""
        yield record["note"]


def _cores_of_tools(record: Record) -> str:
    """AIPerf keeps a core busy all the time; that shall be no server's."""
    count = record.get("settings", {}).get("tool_cpus", 0)
    return f", of which tools have {count} and servers the rest" if count else ""


def _missing(record: Record, model: str) -> Iterator[str]:
    for server, reason in record["missing"].get(model, {}).items():
        yield f"* {server}: {reason}"
        yield ""


def _table(rows: list[Row]) -> Iterator[str]:
    yield f"| Workload | Tool | Figure | {' | '.join(SERVERS)} | First |"
    yield "| --- | --- | --- |" + " --- |" * (len(SERVERS) + 1)
    for row in rows:
        _, workload, tool = row.load.split("/")
        cells = [workload, tool, row.title, *(row.cell(server) for server in SERVERS), row.first()]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _lost(rows: list[Row], reasons: dict[str, str]) -> Iterator[str]:
    lost = [row for row in rows if row.first() != OURS]
    if not lost:
        yield "None."
    for row in lost:
        own, best = (statistics.median(row.values.get(name) or [0.0]) for name in (OURS, row.first()))
        ratio = (best / own if row.is_more_better else own / best) if own else float("inf")
        why = reasons.get(row.key, "not explained yet")
        yield f"* {row.load}, {row.title}: {row.first()} is {ratio:.2f} times as good. {why[:1].upper()}{why[1:]}"


def _loads(record: Record) -> Iterator[str]:
    yield "| Load | What it asks | Command |"
    yield "| --- | --- | --- |"
    commands = {run["load"]: run["command"] for run in reversed(record["rows"])}
    for load, about in record["loads"].items():
        if load in commands:
            yield f"| {load} | {about['about']} | `{commands[load]}` |"


def _versions(record: Record) -> Iterator[str]:
    yield "| What | Version | Started by |"
    yield "| --- | --- | --- |"
    for tool, version in record["tools"].items():
        yield f"| {tool} | {version} | |"
    for model, servers in record["servers"].items():
        for server, about in servers.items():
            yield f"| {server}, {model} | {about['version']} | `{about['command']}` |"
    yield ""
    for tool, reason in record["absent"].items():
        yield f"* Left out: {tool}: {reason}."


def _unanswered(record: Record, run: Record) -> int:
    requests = record["loads"][run["load"]].get("requests", 0)
    return max(0, int(requests - run.get("done", requests)))


def _failure(record: Record, run: Record) -> str:
    place = f"* {run['load']}, {run['server']}, round {run['round'] + 1}: "
    if "failed" not in run:
        requests = record["loads"][run["load"]]["requests"]
        return f"{place}{_unanswered(record, run)} of {requests} requests; figures are of the others"
    return place + "all: " + run["failed"].strip().splitlines()[-1][:200].replace("|", "/")


def text_of(results: Path) -> str:
    """The page of a file of results."""
    reasons = json.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else {}
    return page(json.loads(results.read_text(encoding="utf-8")), reasons)


def main() -> int:
    """Write the page, or check that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="what bench/leaderboard.py wrote")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args()
    text = text_of(args.results)
    if args.check:
        return int(not args.page.exists() or args.page.read_text(encoding="utf-8") != text)
    args.page.write_text(text, encoding="utf-8")
    print(f"{args.page} is written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
