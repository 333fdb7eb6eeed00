"""Figures 9, 10 and 11 of MemServe, drawn from what was measured (level 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memserve.bench.pool.calls import RATIOS
from memserve.bench.pool.peers import BY_PAGE, TRANSFER, WITH_INSERT
from memserve.bench.pool.results import CALL_EACH, ONE_CALL, CallPoint, PoolResults
from memserve.bench.sheet import Spent, draw_line, legend_beside, plain_log_axis
from memserve.units import KIB, NS_PER_MS, NS_PER_US

BARS = "bars: 10th to 90th percentile"
CAPTIONS = {
    "figure-9": "Calls of the memory pool (the form of MemServe's figure 9).",
    "figure-10": "The index, and its share of a prefill (figure 10).",
    "figure-11": "Aggregated and discrete blocks between two processes (figure 11).",
}
FRESH_OR_WHOLE = {"insert": 0.0, "delete": 0.0, "match": 1.0, WITH_INSERT: 0.0}
"""By blocks, calls that know an index are drawn at this cached ratio; the others have none."""
ACCOUNTS = ("alloc_mem", "free_mem", "insert", "match", "delete")
SWAPS = ("swap_in", "swap_out")
Drawing = Callable[[Any, PoolResults], Any | None]


def by_blocks(calls: Iterable[CallPoint], call: str, link: str = "") -> dict[int, Spent]:
    """Blocks -> time of ``call``."""
    ratio = FRESH_OR_WHOLE.get(call)
    found = {p.blocks: p.spent for p in calls if (p.call, p.link, p.cached_ratio) == (call, link, ratio)}
    return dict(sorted(found.items()))


def by_ratio(calls: Iterable[CallPoint], call: str, link: str = "") -> dict[float, Spent]:
    """Cached ratio -> time of ``call``, at the number of blocks that has all ratios."""
    mine = [p for p in calls if (p.call, p.link) == (call, link) and p.cached_ratio is not None]
    varied = {p.blocks for p in mine if p.cached_ratio not in (None, 0.0, 1.0)}
    found = {p.cached_ratio: p.spent for p in mine if p.blocks in varied and p.cached_ratio is not None}
    return dict(sorted(found.items()))


def ratio_blocks(calls: Iterable[CallPoint]) -> int | None:
    """The number of blocks at which the cached ratio was varied."""
    return next((p.blocks for p in calls if p.cached_ratio in RATIOS[1:-1]), None)


def links_of(calls: Iterable[CallPoint]) -> list[str]:
    """Links between processes, in the order in which they were measured."""
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
    accounts.set(title="Calls that keep accounts", ylabel="time of a call (µs)", ylim=(0, None))
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
    _finish((accounts, ratios, moving, fresh))
    figure.suptitle(f"MemPool's calls, {results.model}; {BARS}")
    return figure


def _index(pyplot: Any, results: PoolResults) -> Any | None:
    if not results.index:
        return None
    names = list(dict.fromkeys(point.index for point in results.index))
    ratios = [point for point in results.index if point.cached_ratio > 0]
    figure, (lengths, shares, prefill) = pyplot.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    forward = {point.prompt_tokens: point.spent.median_ns for point in results.forward}
    for name in names:
        cold = {p.prompt_tokens: p.check for p in results.index if (p.index, p.cached_ratio) == (name, 0.0)}
        draw_line(lengths, cold, name, NS_PER_US)
        middle = {p.cached_ratio: p for p in results.index if ratios and p.prompt_tokens == ratios[0].prompt_tokens and
                  p.index == name}  # fmt: skip
        draw_line(shares, {at: middle[at].check for at in sorted(middle)}, name, NS_PER_US)
        part = {t: 100 * spent.median_ns / (spent.median_ns + forward[t]) for t, spent in cold.items() if t in forward}
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
            mine = [move for move in results.moves if (move.mover, move.calls) == (mover, calls) and move.layout]
            times = {f"{move.layout}\n{move.pieces} x {_size(move.piece_bytes)}": move.spent for move in mine}
            draw_line(layouts, times, f"{mover}, {calls}", NS_PER_MS, color=f"C{number}", ls=style)
        swept = [move for move in results.moves if move.mover == mover and not move.layout]
        rates = [move.gb_per_s for move in swept]
        below = [move.gb_per_s - move.total_bytes / move.spent.high_ns for move in swept]
        above = [move.total_bytes / move.spent.low_ns - move.gb_per_s for move in swept]
        look = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2, "color": f"C{number}"}
        sizes.errorbar([move.piece_bytes / KIB for move in swept], rates, [below, above], label=mover, **look)
    layouts.set(title="KV of a prompt of 2,048 tokens", ylabel="time (ms)", xlabel="pieces of the KV", yscale="log")
    sizes.set(title="Bandwidth by the size of pieces", xlabel="piece (KiB)", ylabel="GB/s", xscale="log", yscale="log")
    plain_log_axis(sizes.xaxis, sorted({move.piece_bytes // KIB for move in results.moves if not move.layout}))
    plain_log_axis(layouts.yaxis)
    plain_log_axis(sizes.yaxis)
    _finish((layouts, sizes))
    figure.suptitle(f"Aggregated and discrete blocks between two processes, {results.model}; {BARS}")
    return figure


def _size(count: int) -> str:
    return f"{count / KIB:.0f} KiB"


def _finish(panels: Iterable[Any]) -> None:
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            legend_beside(axes)


DRAWINGS: dict[str, Drawing] = {"figure-9": _calls, "figure-10": _index, "figure-11": _moves}
