"""``memserve bench pool``: MemPool's calls, its index and its block aggregation (figures 9, 10, 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from memserve.base.config import EngineOptions
from memserve.base.errors import UserError
from memserve.base.options import with_values
from memserve.base.types import KVGeometry
from memserve.base.units import KIB, MIB, NS_PER_MS, NS_PER_US, human_bytes
from memserve.host.profile import NETWORK_ENVIRONMENT, StepProfiler, open_profiler
from memserve_lab.bench.report_writer import Cell, Drawing, Table, draw_intervals, draw_line, finish, plain_log_axis
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.experiments.pool_calls import (
    BY_PAGE,
    RATIOS,
    TRANSFER,
    WITH_INSERT,
    CallPoint,
    measure_accounts,
    measure_peers,
    measure_swaps,
    open_peers,
)
from memserve_lab.experiments.pool_index import IndexPoint, race
from memserve_lab.experiments.pool_moves import (
    CALL_EACH,
    ONE_CALL,
    Move,
    Pair,
    bytes_needed,
    measure_moves,
    open_mover,
    works_of,
)
from memserve_lab.workloads.statistics import Spread, spread_of

LINKS: dict[str, tuple[str, dict[str, str]]] = {
    "shared memory": ("shm", {}),
    "NIXL": ("nixl", {}),
    "NIXL over TCP": ("nixl", NETWORK_ENVIRONMENT),
}
"""Name -> link and environment. NIXL on one host lets the kernel copy; over TCP it stands for two hosts."""
STEP_TOKENS = 4096
"""The longest prompt whose forward is timed, in one step."""
PAPER_BLOCK_NS = 800
"""Time per block of the memory calls in MemServe's figure 9."""
PAPER_INSERT_MS = 0.7
"""Longest time to insert a prompt of 4,096 tokens (section 8.4)."""
BARS = "bars: P10 to P90"
FRESH_OR_WHOLE = {"insert": 0.0, "delete": 0.0, "match": 1.0, WITH_INSERT: 0.0}
"""In plots over blocks, calls that use an index are drawn at this cached ratio."""
ACCOUNTS = ("alloc_mem", "free_mem", "insert", "match", "delete")
SWAPS = ("swap_in", "swap_out")


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How much to measure."""

    blocks: tuple[int, ...]
    """Blocks of a call; the cached ratio is varied at the largest, but at most at a prompt of 4,096 tokens."""
    prompt_tokens: tuple[int, ...]
    """Prompt lengths at which the indexes are compared, and the model's forward is timed if it fits."""
    tree_prompts: int
    rounds: int
    """Rounds of accounting calls and of the index comparison; calls that move bytes are repeated ``copy_rounds``
    times."""
    copy_rounds: int
    sweep_bytes: int


FULL = PoolPlan((1, 4, 16, 64, 128), (512, 1024, 2048, 4096, 8192, 16384, 32768), 100, 200, 12, 64 * MIB)
QUICK = PoolPlan((1, 8, 64), (512, 2048, 8192), 20, 40, 3, 16 * MIB)


@dataclass(frozen=True, slots=True)
class ForwardPoint:
    """The model's part of a prefill without cache (figure 10)."""

    prompt_tokens: int
    spent_ns: Spread


@dataclass(slots=True, kw_only=True)
class PoolResults(StudyResults):
    """Lists grow as the run goes."""

    geometry: KVGeometry = field(default_factory=lambda: KVGeometry(1, 1, 1, 1, "bfloat16"))
    tree_prompts: int = 0
    """Prompts of 4,096 tokens that the index holds beside the measured ones."""
    calls: list[CallPoint] = field(default_factory=list)
    index: list[IndexPoint] = field(default_factory=list)
    forward: list[ForwardPoint] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model, for titles."""
        return ", ".join(self.models)

    @property
    def is_empty(self) -> bool:
        return not self.calls


# -- plots


def by_blocks(calls: Iterable[CallPoint], call: str, link: str = "") -> dict[int, Spread]:
    """Number of blocks -> time of ``call``."""
    ratio = FRESH_OR_WHOLE.get(call)
    spent_by_blocks = {p.blocks: p.spent_ns for p in calls if (p.call, p.link, p.cached_ratio) == (call, link, ratio)}
    return dict(sorted(spent_by_blocks.items()))


def by_ratio(calls: Iterable[CallPoint], call: str, link: str = "") -> dict[float, Spread]:
    """Cached ratio -> time of ``call``, at the number of blocks that has all ratios."""
    points = [p for p in calls if (p.call, p.link) == (call, link) and p.cached_ratio is not None]
    varied = {p.blocks for p in points if p.cached_ratio not in (None, 0.0, 1.0)}
    spent_by_ratio = {p.cached_ratio: p.spent_ns for p in points if p.blocks in varied and p.cached_ratio is not None}
    return dict(sorted(spent_by_ratio.items()))


def ratio_blocks(calls: Iterable[CallPoint]) -> int | None:
    """The number of blocks at which the cached ratio was varied."""
    return next((p.blocks for p in calls if p.cached_ratio in RATIOS[1:-1]), None)


def links_of(calls: Iterable[CallPoint]) -> list[str]:
    """Links between processes, in the order of measuring."""
    return [link for link in dict.fromkeys(p.link for p in calls) if link]


def _calls(pyplot: Any, results: PoolResults) -> Any | None:
    calls = results.calls
    if not calls:
        return None
    figure, ((accounts, ratios), (moving, fresh)) = pyplot.subplots(2, 2, figsize=(15, 9), layout="constrained")
    for number, call in enumerate(ACCOUNTS):
        draw_line(accounts, by_blocks(calls, call), call, NS_PER_US, color=f"C{number}")
        draw_line(ratios, by_ratio(calls, call), call, NS_PER_US, color=f"C{number}")
    for number, call in enumerate(SWAPS):
        draw_line(moving, by_blocks(calls, call), call, NS_PER_MS, color=f"C{number}", marker="s")
    for number, link in enumerate(links_of(calls), len(SWAPS)):
        for call, style in ((TRANSFER, "-"), (BY_PAGE, "--"), (WITH_INSERT, ":")):
            draw_line(moving, by_blocks(calls, call, link), f"{call}, {link}", NS_PER_MS, color=f"C{number}", ls=style)
        draw_line(fresh, by_ratio(calls, WITH_INSERT, link), link, NS_PER_MS, color=f"C{number}")
    tokens = (ratio_blocks(calls) or 0) * results.geometry.block_tokens
    accounts.set(title="Calls that only do accounting", ylabel="time of a call (µs)", ylim=(0, None))
    ratios.set(title=f"Calls of the index, a prompt of {tokens:,} tokens", ylabel="time of a call (µs)", ylim=(0, None))
    moving.set(title="Calls that move bytes", ylabel="time of a call (ms)", yscale="log")
    fresh.set(
        title=f"transfer_with_insert, a prompt of {tokens:,} tokens", ylabel="time of a call (ms)", ylim=(0, None)
    )
    for axes in (accounts, moving):
        axes.set(xlabel=f"blocks of {results.geometry.block_tokens} tokens", xscale="log")
        plain_log_axis(axes.xaxis, sorted({point.blocks for point in calls}))
    plain_log_axis(moving.yaxis)
    ratios.set_xlabel("cached ratio (share of the prompt that the index has)")
    fresh.set_xlabel("cached ratio at the receiver: what it has is not moved")
    finish((accounts, ratios, moving, fresh))
    figure.suptitle(f"MemPool's calls, {results.model}; {BARS}")
    return figure


def _index(pyplot: Any, results: PoolResults) -> Any | None:
    if not results.index:
        return None
    names = list(dict.fromkeys(point.index for point in results.index))
    ratios = [point for point in results.index if point.cached_ratio > 0]
    figure, (lengths, shares, prefill) = pyplot.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    forward = {point.prompt_tokens: point.spent_ns.p50 for point in results.forward}
    for name in names:
        cold = {p.prompt_tokens: p.check_ns for p in results.index if (p.index, p.cached_ratio) == (name, 0.0)}
        draw_line(lengths, cold, name, NS_PER_US)
        middle = {p.cached_ratio: p for p in results.index if ratios and p.prompt_tokens == ratios[0].prompt_tokens and
                  p.index == name}  # fmt: skip
        draw_line(shares, {place: middle[place].check_ns for place in sorted(middle)}, name, NS_PER_US)
        part = {t: 100 * spent.p50 / (spent.p50 + forward[t]) for t, spent in cold.items() if t in forward}
        prefill.plot(list(part), list(part.values()), marker="o", markersize=4, label=name)
    lengths.set(title="Nothing cached", xlabel="prompt (tokens)", ylabel="check index: match and insert (µs)")
    lengths.set(xscale="log", yscale="log")
    plain_log_axis(lengths.xaxis, sorted({point.prompt_tokens for point in results.index}))
    tokens = ratios[0].prompt_tokens if ratios else 0
    shares.set(
        title=f"A prompt of {tokens:,} tokens", xlabel="cached ratio", ylabel="match and insert (µs)", yscale="log"
    )
    prefill.set(title=f"Share of the prefill of {results.model}", xlabel="prompt (tokens)", yscale="log")
    prefill.set_ylabel("check index, % of check index + forward")
    prefill.set_xscale("log")
    plain_log_axis(prefill.xaxis, sorted(forward))
    for axes in (lengths, shares, prefill):
        axes.grid(alpha=0.3)
        plain_log_axis(axes.yaxis)
    figure.legend(*lengths.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), title="index")
    figure.suptitle(f"Radix index beside dictionaries of hashes, {results.tree_prompts} other prompts cached; {BARS}")
    return figure


def _moves(pyplot: Any, results: PoolResults) -> Any | None:
    if not results.moves:
        return None
    figure, (layouts, sizes) = pyplot.subplots(1, 2, figsize=(16, 5.2), layout="constrained")
    movers = list(dict.fromkeys(move.mover for move in results.moves))
    for number, mover in enumerate(movers):
        for calls, style in ((ONE_CALL, "-"), (CALL_EACH, "--")):
            moves = [move for move in results.moves if (move.mover, move.calls) == (mover, calls) and move.layout]
            times = {f"{move.layout}\n{move.pieces} x {_size(move.piece_bytes)}": move.spent_ns for move in moves}
            draw_line(layouts, times, f"{mover}, {calls}", NS_PER_MS, color=f"C{number}", ls=style)
        swept = [move for move in results.moves if move.mover == mover and not move.layout]
        rates = {move.piece_bytes / KIB: (move.gb_per_s, move.total_bytes / move.spent_ns.p90,
                 move.total_bytes / move.spent_ns.p10) for move in swept}  # fmt: skip
        draw_intervals(sizes, rates, mover, 1, color=f"C{number}")
    layouts.set(title="KV of a prompt of 2,048 tokens", ylabel="time (ms)", xlabel="pieces of the KV", yscale="log")
    sizes.set(title="Bandwidth by the size of pieces", xlabel="piece (KiB)", ylabel="GB/s", xscale="log", yscale="log")
    plain_log_axis(sizes.xaxis, sorted({move.piece_bytes // KIB for move in results.moves if not move.layout}))
    plain_log_axis(layouts.yaxis)
    plain_log_axis(sizes.yaxis)
    finish((layouts, sizes))
    figure.suptitle(f"Aggregated and discrete blocks between two processes, {results.model}; {BARS}")
    return figure


def _size(count: int) -> str:
    return f"{count / KIB:.0f} KiB"


DRAWINGS = {
    "figure-9": Drawing("Calls of the memory pool (the form of MemServe's figure 9).", _calls),
    "figure-10": Drawing("The index, and its share of a prefill (figure 10).", _index),
    "figure-11": Drawing("Aggregated and discrete blocks between two processes (figure 11).", _moves),
}


# -- the study


class PoolStudy(Study[PoolResults]):
    """Measures calls, indexes and moves."""

    title = "memserve bench pool"
    drawings = DRAWINGS

    def __init__(self, plan: PoolPlan, options: EngineOptions, results: PoolResults) -> None:
        super().__init__(results)
        self._plan, self._options = plan, options
        results.tree_prompts = plan.tree_prompts

    def fill_results(self, tell: Tell) -> None:
        plan, results = self._plan, self.results
        with ExitStack() as stack:
            tell("loading the model ...")
            model, _, profiler = open_profiler(
                with_values(self._options, {("scheduler", "max_step_tokens"): STEP_TOKENS})
            )
            stack.callback(profiler.close)
            results.models, results.geometry = [model.name], model.geometry
            block_tokens = model.geometry.block_tokens
            varied = min(max(plan.blocks), max(1, STEP_TOKENS // block_tokens))  # blocks whose cached ratio is varied
            tell("calls that only do accounting (figure 9)")
            results.calls += measure_accounts(block_tokens, plan.blocks, varied, plan.tree_prompts, plan.rounds)
            tell("swaps (figure 9)")
            results.calls += measure_swaps(results.geometry, plan.blocks, plan.copy_rounds)
            tell("indexes (figure 10)")
            middle = plan.prompt_tokens[len(plan.prompt_tokens) // 2]
            works = [(tokens, 0.0) for tokens in plan.prompt_tokens] + [(middle, r) for r in RATIOS if r]
            results.index += race(block_tokens, works, plan.tree_prompts, plan.rounds)
            tell("the model's forward (figure 10)")
            results.forward += _forwards(plan, profiler)
        tell("calls between two processes (figure 9)")
        with ExitStack() as stack:
            pairs = _open_all(lambda link, environment: open_peers(
                results.geometry, link, max(plan.blocks), environment), results, stack)  # fmt: skip
            results.calls += measure_peers(pairs, plan.blocks, varied, plan.copy_rounds)
        tell("aggregated against discrete (figure 11)")
        moved = works_of(results.geometry, plan.sweep_bytes)
        with ExitStack() as stack:
            pairs = _open_all(lambda link, environment: open_mover(
                results.geometry, link, bytes_needed(moved), environment), results, stack)  # fmt: skip
            results.moves.extend(measure_moves(pairs, moved, plan.copy_rounds))

    def terminal_lines(self) -> Iterator[str]:
        yield from self.results.notes

    def head_lines(self) -> Iterator[str]:
        geometry = self.results.geometry
        yield f"* a block is {geometry.block_tokens} tokens in {geometry.dtype}, {geometry.num_layers} layers,"
        yield f"  {human_bytes(geometry.block_bytes)}"
        yield f"* {self.results.tree_prompts} other prompts of 4,096 tokens are in the index"
        yield "* medians; P10 to P90 in brackets"

    def make_tables(self) -> Iterator[Table]:
        results = self.results
        about = """
MemServe section 8.4 (Llama2-13B, eight H800, blocks of 16 tokens). The machines differ: only the shape compares."""
        claims = [*_call_claims(results), *_index_claims(results), *_move_claims(results)]
        yield Table("Beside the paper", ("figure", "what", "paper", "here"), claims, about)
        rows: list[list[Cell]] = []
        for point in results.calls:
            ratio = "" if point.cached_ratio is None else f"{point.cached_ratio:g}"
            times = point.spent_ns.format_in_units(NS_PER_US, 1)
            rows.append([f"`{point.call}`", point.link, point.blocks, ratio, times, point.spent_ns.count])
        names = ("call", "to another process by", "blocks", "cached ratio", "µs", "times")
        yield Table("Calls (figure 9)", names, rows)
        yield from _index_tables(results)
        about = f"""
*{ONE_CALL}*: all pieces in one request; *{CALL_EACH}*: as a library without lists of pieces needs. The paper tunes
NCCL's communicators beside it; these links have none."""
        rows = [
            [move.mover, move.calls, move.layout, move.pieces, human_bytes(move.piece_bytes),
             move.spent_ns.format_in_units(NS_PER_MS, 2), f"{move.gb_per_s:.2f}"] for move in results.moves
        ]  # fmt: skip
        columns = ("by", "calls", "layout", "pieces", "each", "ms", "GB/s")
        yield Table("Between processes (figure 11)", columns, rows, about)


def _forwards(plan: PoolPlan, profiler: StepProfiler) -> Iterator[ForwardPoint]:
    lengths = [tokens for tokens in plan.prompt_tokens if tokens <= STEP_TOKENS and profiler.fits_pool(1, tokens)]
    for tokens in lengths:
        times = [profiler.prefill_ns(tokens, 0) for _ in range(max(1, plan.copy_rounds // 4) + 1)]
        yield ForwardPoint(tokens, spread_of(times[1:]))


def _open_all(
    open_pair: Callable[[str, dict[str, str]], Pair], results: PoolResults, stack: ExitStack
) -> dict[str, Pair]:
    """The links that work here; the others are noted."""
    pairs = {}
    for name, (link, environment) in LINKS.items():
        try:
            pair = pairs[name] = open_pair(link, environment)
        except UserError as error:
            if (note := f"{name} was left out: {error}") not in results.notes:
                results.notes.append(note)
        else:
            stack.callback(pair.close)
    return pairs


def _call_claims(results: PoolResults) -> Iterator[list[str]]:
    calls = results.calls
    if not calls:
        return
    for call in ("alloc_mem", "free_mem"):
        times = by_blocks(calls, call)
        count = max(times)
        figure_text = f"{times[count].p50 / count:.0f} ns ({times[count].p50 / NS_PER_US:.1f} µs for {count})"
        yield ["9", f"`{call}`, a block", f"about {PAPER_BLOCK_NS} ns", figure_text]
    tokens = (ratio_blocks(calls) or 0) * results.geometry.block_tokens
    for call in ("insert", "match"):
        times_by = by_ratio(calls, call)
        if times_by:
            worst = max(spent.p50 for spent in times_by.values())
            best = min(spent.p50 for spent in times_by.values())
            paper = f"at most {PAPER_INSERT_MS} ms" if call == "insert" else "mostly flat over the cached ratio"
            figure_text = f"{best / NS_PER_US:.1f} to {worst / NS_PER_US:.1f} µs over all cached ratios"
            yield ["9", f"`{call}`, a prompt of {tokens} tokens", paper, figure_text]


def _index_claims(results: PoolResults) -> Iterator[list[str]]:
    forward = {point.prompt_tokens: point.spent_ns.p50 for point in results.forward}
    cold = [point for point in results.index if point.cached_ratio == 0 and point.prompt_tokens in forward]
    if not cold:
        return
    longest = max(point.prompt_tokens for point in cold)
    papers = {"radix": "minimal overhead", "hash of prefixes": "huge overhead as the prompt grows", "hash chain": ""}
    for point in cold:
        if point.prompt_tokens == longest:
            share = point.check_ns.p50 / (point.check_ns.p50 + forward[longest])
            figure_text = f"{point.check_ns.p50 / NS_PER_US:.0f} µs, {100 * share:.2g} % of the prefill"
            yield ["10", f"{point.index}, a prompt of {longest} tokens", papers.get(point.index, ""), figure_text]
    tokens = max(point.prompt_tokens for point in results.index)
    times = {p.index: p.check_ns.p50 for p in results.index if (p.prompt_tokens, p.cached_ratio) == (tokens, 0.0)}
    times_text = ", ".join(f"{name} {ns / NS_PER_US:,.0f} µs" for name, ns in times.items())
    yield ["10", f"all, a prompt of {tokens} tokens", "", times_text]


def _move_claims(results: PoolResults) -> Iterator[list[str]]:
    groups: dict[tuple[str, str], list[float]] = {}
    for move in results.moves:
        if move.layout:
            groups.setdefault((move.mover, move.calls), []).append(move.spent_ns.p50)
    for (mover, calls), times in groups.items():
        if len(times) == 3:
            figure_text = (
                f"{times[1] / times[0]:.1f} times (a layer of a block), {times[2] / times[0]:.1f} (K and V apart)"
            )
            paper = "by a large margin" if calls == CALL_EACH else ""
            yield ["11", f"{mover}, {calls}: aggregated is faster", paper, figure_text]


def _index_tables(results: PoolResults) -> Iterator[Table]:
    about = """
*hash chain*: a dictionary keyed by the hash of a block's tokens and the key before; *hash of prefixes*: by the hash of
all tokens up to the block's end, as in vLLM at the time of the paper. Neither compares tokens."""
    rows: list[list[Cell]] = [
        [point.index, point.prompt_tokens, f"{point.cached_ratio:g}",
         *(f"{spent_ns.p50 / NS_PER_US:.1f}" for spent_ns in (point.match_ns, point.insert_ns, point.check_ns))]
        for point in results.index
    ]  # fmt: skip
    columns = ("index", "prompt tokens", "cached ratio", "match (µs)", "insert (µs)", "both (µs)")
    yield Table("Index (figure 10)", columns, rows, about)
    rows = [
        [point.prompt_tokens, f"{point.spent_ns.p50 / NS_PER_MS:.1f}", point.spent_ns.count]
        for point in results.forward
    ]
    yield Table("", ("prompt tokens", "forward (ms)", "times"), rows)
