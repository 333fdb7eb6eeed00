"""MemServe's section 8 beside our results: what agrees, what does not, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memserve_lab.bench import metrics
from memserve_lab.bench.load.prompts import RequestRecord
from memserve_lab.bench.metrics import Figures
from memserve_lab.bench.report_writer import MS, Cell, Table
from memserve_lab.bench.results import QUANTITIES, STATISTICS, Compared, Found, Results

DISAGGREGATION, CACHING, POLICY = "disaggregation", "caching", "prompt tree over session"
LEVELS, TRANSFER, POLICIES = "levels", "transfer", "policies"

PAPER: dict[tuple[str, str], dict[str, float]] = {
    ("chat", DISAGGREGATION): {"jct mean": -0.30, "jct p99": -0.42},
    ("chat", CACHING): {"jct mean": -0.17, "jct p99": -0.29, "ttft mean": -0.58, "ttft p99": -0.45},
    ("documents", DISAGGREGATION): {"jct mean": -0.103, "jct p99": -0.108},
    ("documents", CACHING): {"jct mean": -0.269, "jct p99": -0.225, "ttft mean": -0.562, "ttft p99": -0.452},
    ("react", DISAGGREGATION): {"jct mean": -0.408, "jct p99": -0.531},
    ("react", CACHING): {"jct mean": -0.267, "jct p99": -0.214, "ttft mean": -0.785, "ttft p99": -0.849},
    ("documents", POLICY): {"ttft p99": -0.59},
}
"""Workload and step -> change of each quantity (8.3, 8.4): ShareGPT is chat (1P2D over PD, 1P2D-CC over 1P2D), LooGLE
documents. Llama2-13B, TP 2, on eight H800."""
JUDGED = {DISAGGREGATION: "jct mean", CACHING: "ttft mean", POLICY: "ttft p99"}
"""Step -> the quantity that the step is meant to improve."""
ORDERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (LEVELS, "ttft mean", ("-CC3", "-CC2", "-CC1")),
    (LEVELS, "jct mean", ("-CC3", "-CC2", "-CC1")),
    (TRANSFER, "jct mean", ("/by-request-agg", "/by-layer", "/by-request")),
    (POLICIES, "ttft p99", ("/prompt-tree", "/session", "/least-load")),
)
"""Name, compared quantity, and suffixes of the settings' names, best first (5.1, 8.3: caching levels; figure 12:
transfer, of which the paper only says that the first is best; figure 14: policies)."""
TOLD = ("ttft mean", "ttft p99", "jct mean", "jct p99", "tpot mean", "tpot p99")
_SPLIT = re.compile(r"(\d+)P(\d+)D")

CHANGES_ABOUT = """
Changes from one setting to another; in brackets the paper's (Llama2-13B, eight H800: every instance has GPUs of its
own; here all instances share the cores named above). In words: the change of the quantity that the step is meant to
improve, with its 95 % confidence interval (bootstrap over pairs of equal sessions)."""
ONE_SEED = """
There is one seed, so one pass each: the machine's own variation is part of the change, and in no interval."""
SHARED_CORES = """
Why disaggregation differs here: prefill and decode instances compete for the cores that the colocated ones had, so
prefills still delay decoding; only some of the instances compute prompts, each with its share of the cores; and each
prompt's KV is handed over. In the paper every instance has its own GPUs."""
LEVELS_ABOUT = """
The milestones of the paper's section 5.1, which has no figure for them: level 3 below 2 below 1. Level 2 saves the
transfer of blocks that the decode instance has, on one host a copy of memory; level 3 saves the prefill of answers
that the decode instance computed."""
TRANSFER_ABOUT = """
The paper, for prompts of 1,024 and answers of 32 tokens: aggregated blocks beat whole requests in small pieces and
layer by layer; at low load layer by layer is quickest (5.2). Here a block of all layers is contiguous in memory, so
by-request-agg moves one piece per block, the other modes one per layer of a block."""
POLICIES_ABOUT = """
The paper: in P99 TTFT, prompt tree is below session, and session below least load, the more so the more sessions share
(-59 % for the prompt tree over session). Here an instance that lacks a prefix may also fetch its KV from another one,
and does if fetching is cheaper than computing: the more a policy scatters shared prefixes, the more is fetched, and the
less the policies differ. No policy saves the first prefill of a document, which is the P99 of few requests."""


# -- steps: from one setting to another


@dataclass(frozen=True, slots=True)
class Step:
    """The change from one setting to another on one workload."""

    name: str
    before: Found
    after: Found
    changes: dict[str, float]
    """``ttft mean`` -> for example -0.5: halved."""
    paper: dict[str, float]

    @property
    def judged(self) -> str:
        """The quantity that the step is meant to improve."""
        return JUDGED[self.name]


def steps(results: Results) -> Iterator[Step]:
    """The paper's steps for which ``results`` has both settings, and caching of colocated instances."""
    for before in results.found:
        for after in results.found:
            name = _step(before.setting, after.setting) if before.workload == after.workload else None
            if name is not None:
                has_figure = name != CACHING or _SPLIT.match(before.setting)
                paper = PAPER.get((before.label.kind, name), {}) if has_figure else {}
                changes = {name: _change(before, after, name) for name in TOLD}
                changes_known = {name: change for name, change in changes.items() if change is not None}
                yield Step(name, before, after, changes_known, paper)


def _step(before: str, after: str) -> str | None:
    same, split = re.fullmatch(r"(\d+)PD", before), _SPLIT.fullmatch(after)
    if same and split and int(same[1]) == int(split[1]) + int(split[2]):
        return DISAGGREGATION  # at equal instance count
    if after in (f"{before}-CC", f"{before}-CC3"):
        return CACHING
    if before.endswith("/session") and after == before.removesuffix("session") + "prompt-tree":
        return POLICY
    return None


def _change(before: Found, after: Found, name: str) -> float | None:
    was, now = before.value_of(name), after.value_of(name)
    return now / was - 1 if was and now is not None else None


# -- orders: several settings, best first


@dataclass(frozen=True, slots=True)
class Ranking:
    """Settings in the paper's order, best first, on one workload."""

    name: str
    judged: str
    members: tuple[Found, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """The compared quantity of each setting, in seconds."""
        return tuple(row.value_of(self.judged) or 0.0 for row in self.members)

    @property
    def holds(self) -> bool:
        """Whether our values are in the paper's order."""
        first, *later_values = self.values
        if self.name == TRANSFER:
            return all(first < value for value in later_values)
        return all(better < worse for better, worse in pairwise(self.values))


def rankings(results: Results) -> Iterator[Ranking]:
    """The paper's orders for which ``results`` has at least two settings."""
    for name, judged, endings in ORDERS:
        groups: dict[tuple[str, str], dict[str, Found]] = {}
        for row in results.found:
            for ending in endings:
                if row.setting.endswith(ending) and row.value_of(judged) is not None:
                    stem = row.setting.removesuffix(ending)
                    groups.setdefault((row.workload, stem), {})[ending] = row
        for members in groups.values():
            if len(members) > 1:
                yield Ranking(name, judged, tuple(members[ending] for ending in endings if ending in members))


def compare(results: Results, records: Sequence[RequestRecord]) -> None:
    """Add the confidence interval of every step, and of best against worst in every order."""
    groups = metrics.by_setting(records)
    pairs = [(step.before, step.after, step.judged) for step in steps(results)]
    pairs += [(ranking.members[-1], ranking.members[0], ranking.judged) for ranking in rankings(results)]
    for before, after, name in pairs:
        quantity, statistic = name.split()
        change = _change(before, after, name)
        if change is not None and _pair(results, before, after, name) is None:
            pair = (groups[before.workload, before.setting], groups[before.workload, after.setting])
            interval = metrics.paired(*pair, QUANTITIES[quantity], STATISTICS[statistic])
            comparison = Compared(before.workload, before.setting, after.setting, name, change, interval)
            results.compared.append(comparison)


def _pair(results: Results, before: Found, after: Found, name: str) -> Compared | None:
    key = (before.workload, before.setting, after.setting, name)
    return next(
        (
            comparison
            for comparison in results.compared
            if (comparison.workload, comparison.before, comparison.after, comparison.name) == key
        ),
        None,
    )


# -- in words


def beside_the_paper(results: Results) -> Iterator[Table]:
    """Sections of the report; none if the paper compares no two of the settings."""
    steps_found, orders = list(steps(results)), list(rankings(results))
    if steps_found:
        yield _changes(results, steps_found)
    by_name = {name: [ranking for ranking in orders if ranking.name == name] for name in (LEVELS, TRANSFER, POLICIES)}
    for workload in dict.fromkeys(ranking.members[0].workload for ranking in by_name[LEVELS]):
        yield _levels(results, [ranking for ranking in by_name[LEVELS] if ranking.members[0].workload == workload])
    columns = ("JCT mean (ms)", "JCT P99", "TTFT mean", "TTFT P99", "TPOT mean")
    names = ("jct mean", "jct p99", "ttft mean", "ttft p99", "tpot mean")
    title = "Transfer modes over the request rate (figure 12)"
    yield _order_table(results, by_name[TRANSFER], title, TRANSFER_ABOUT, columns, names)
    title, two = "Policies over the share ratio (figure 14)", ("TTFT P99 (ms)", "TTFT mean")
    yield _order_table(results, by_name[POLICIES], title, POLICIES_ABOUT, two, ("ttft p99", "ttft mean"))


def _changes(results: Results, steps_found: Sequence[Step]) -> Table:
    rows: list[list[Cell]] = []
    for step in steps_found:
        cells = []
        for name in TOLD:
            change_text = f"{step.changes[name]:+.0%}" if name in step.changes else ""
            cells.append(change_text + (f" ({step.paper[name]:+.1%})" if name in step.paper else ""))
        path = f"{step.name}: {step.before.setting} to {step.after.setting}"
        pair = _pair(results, step.before, step.after, step.judged)
        rows.append([step.before.workload, path, *cells, verdict(step, pair)])
    about = CHANGES_ABOUT + (ONE_SEED if len({load_pass.seed for load_pass in results.passes}) < 2 else "")
    below = SHARED_CORES if any(step.name == DISAGGREGATION for step in steps_found) else ""
    columns = ["workload", "step", *map(titled, TOLD), "in words"]
    return Table("Beside the paper", columns, rows, about, below)


def titled(name: str) -> str:
    """``ttft p99`` -> ``TTFT P99``."""
    quantity, statistic = name.split()
    return f"{quantity.upper()} {statistic.replace('p99', 'P99')}"


def verdict(step: Step, pair: Compared | None) -> str:
    """Whether the step has the effect that the paper reports; if not, why."""
    if pair is None:
        return "not compared: no request was answered"
    title = f"{titled(step.judged)} {told(pair)}"
    if not pair.is_told_apart:
        return f"{title}: within noise; {_why(step)}"
    return f"{title}: falls, as the paper says" if pair.change < 0 else f"{title}: rises; {_why(step)}"


def told(pair: Compared) -> str:
    """``-57 % (-70 % to -41 %)``."""
    if pair.interval is None:
        return f"{pair.change:+.0%}"
    low, high = pair.interval
    return f"{pair.change:+.0%} ({low:+.0%} to {high:+.0%})"


def _why(step: Step) -> str:
    after = step.after.figures
    if step.name == DISAGGREGATION:
        return "see below"
    if step.name == POLICY and step.after.label.ratio == 1:
        return "each session occurs once, and its own instance has all of its cached prefix"
    prompt_tokens = after.prompt_tokens / max(1, after.requests - after.failed)
    cached = f"{after.cached_share:.0%} of them cached (before: {step.before.figures.cached_share:.0%})"
    return f"{after.requests} requests, prompts of {prompt_tokens:.0f} tokens on average, {cached}"


def in_words(results: Results, order: Ranking) -> str:
    """Whether an order holds: the settings, best first in the paper, and our values."""
    names = ", ".join(row.setting for row in order.members)
    values = ", ".join(f"{MS * value:.0f}" for value in order.values)
    holds = "the paper's order" if order.holds else "another order"
    pair = _pair(results, order.members[-1], order.members[0], order.judged)
    if pair is not None:
        holds += f"; first over last {told(pair)}" + ("" if pair.is_told_apart else ", within noise")
    return f"{titled(order.judged)} of {names}: {values} ms ({holds})"


def _levels(results: Results, orders: Sequence[Ranking]) -> Table:
    """One workload's caching levels, turn by turn."""
    members = orders[0].members
    turns = sorted({turn for row in members for turn in row.turns})
    rows = [[row.setting, *(_two(row.turns.get(turn)) for turn in turns)] for row in members]
    columns = ["setting", *(f"turn {turn + 1}: TTFT, JCT (ms)" for turn in turns)]
    sentences = "; ".join(in_words(results, order) for order in orders)
    return Table(
        f"Caching levels over turns: {members[0].workload}", columns, rows, LEVELS_ABOUT, f"{sentences}.", level=3
    )


def _two(figures: Figures | None) -> str:
    if figures is None or figures.ttft_s is None or figures.jct_s is None:
        return ""
    return f"{MS * figures.ttft_s.mean:.0f}, {MS * figures.jct_s.mean:.0f}"


def _order_table(
    results: Results, orders: Sequence[Ranking], title: str, about: str, columns: Sequence[str], names: Sequence[str]
) -> Table:
    """The settings of all ``orders``, one row each, and the verdicts below."""
    rows: list[list[Cell]] = []
    for order in orders:
        for row in order.members:
            times = (f"{MS * (row.value_of(name) or 0):.0f}" for name in names)
            shares = (f"{row.figures.cached_share:.0%}", f"{row.figures.fetched_share:.0%}")
            rows.append([order.members[0].workload, row.setting, *times, *shares])
    below = "\n".join(f"* {order.members[0].workload}: {in_words(results, order)}" for order in orders)
    columns = ("workload", "setting", *columns, "prompt tokens cached", "fetched")
    return Table(title, columns, rows, about, below, level=3)
