"""The page of ``memserve bench pool`` (level 4)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from memserve.bench.pool.plots import CAPTIONS, DRAWINGS, by_blocks, by_ratio, ratio_blocks
from memserve.bench.pool.results import CALL_EACH, ONE_CALL, PoolResults
from memserve.bench.sheet import Cell, circumstances, draw_all, picture, table, without_pictures, write_sheet
from memserve.units import NS_PER_MS, NS_PER_US, human_bytes

PAPER_BLOCK_NS = 800
"""A block, in the memory calls of MemServe's figure 9."""
PAPER_INSERT_MS = 0.7
"""Inserting a prompt of 4,096 tokens, at most (section 8.4)."""


def write_pool(results: PoolResults, folder: Path) -> None:
    """Write ``results.json``, ``report.md`` and the plots."""
    drawn = draw_all(DRAWINGS, results, folder)
    write_sheet(folder, results, _page(results, drawn))


def _page(results: PoolResults, drawn: list[str] | None) -> Iterator[str]:
    geometry = results.geometry
    yield "# memserve bench pool\n"
    yield from circumstances(results.command, results.version, results.notes, results.partial)
    yield f"* {results.model} in {geometry.dtype}: a block is {geometry.block_tokens} tokens, {geometry.num_layers}"
    yield f"  layers, {human_bytes(geometry.block_bytes)}"
    yield f"* {results.tree_prompts} other prompts of 4,096 tokens are in the index"
    yield "* medians; from the 10th to the 90th percentile in brackets"
    if drawn is None:
        yield without_pictures()
    for name in drawn or ():
        yield picture(name, CAPTIONS[name])
    yield from _beside_the_paper(results)
    yield from _calls(results)
    yield from _index(results)
    yield from _moves(results)


def _beside_the_paper(results: PoolResults) -> Iterator[str]:
    rows = [*_call_claims(results), *_index_claims(results), *_move_claims(results)]
    if rows:
        yield "\n## Beside the paper\n"
        yield "MemServe section 8.4 (Llama2-13B, eight H800, blocks of 16 tokens); the machines differ, the shape is"
        yield "what can be compared."
        yield from table(["figure", "what", "paper", "here"], rows)


def _call_claims(results: PoolResults) -> Iterator[list[str]]:
    calls = results.calls
    if not calls:
        return
    for call in ("alloc_mem", "free_mem"):
        times = by_blocks(calls, call)
        count = max(times)
        here = f"{times[count].median_ns / count:.0f} ns ({times[count].median_ns / NS_PER_US:.1f} µs for {count})"
        yield ["9", f"`{call}`, a block", f"about {PAPER_BLOCK_NS} ns", here]
    tokens = (ratio_blocks(calls) or 0) * results.geometry.block_tokens
    for call in ("insert", "match"):
        times_by = by_ratio(calls, call)
        if times_by:
            worst = max(spent.median_ns for spent in times_by.values())
            best = min(spent.median_ns for spent in times_by.values())
            paper = f"at most {PAPER_INSERT_MS} ms" if call == "insert" else "mostly flat over the cached ratio"
            here = f"{best / NS_PER_US:.1f} to {worst / NS_PER_US:.1f} µs over all cached ratios"
            yield ["9", f"`{call}`, a prompt of {tokens} tokens", paper, here]


def _index_claims(results: PoolResults) -> Iterator[list[str]]:
    forward = {point.prompt_tokens: point.spent.median_ns for point in results.forward}
    cold = [point for point in results.index if point.cached_ratio == 0 and point.prompt_tokens in forward]
    if not cold:
        return
    longest = max(point.prompt_tokens for point in cold)
    papers = {"radix": "minimal overhead", "hash of prefixes": "huge overhead as the prompt grows", "hash chain": ""}
    for point in cold:
        if point.prompt_tokens == longest:
            share = point.check.median_ns / (point.check.median_ns + forward[longest])
            here = f"{point.check.median_ns / NS_PER_US:.0f} µs, {100 * share:.2g} % of the prefill"
            yield ["10", f"{point.index}, a prompt of {longest} tokens", papers.get(point.index, ""), here]
    tokens = max(point.prompt_tokens for point in results.index)
    times = {p.index: p.check.median_ns for p in results.index if (p.prompt_tokens, p.cached_ratio) == (tokens, 0.0)}
    told = ", ".join(f"{name} {ns / NS_PER_US:,.0f} µs" for name, ns in times.items())
    yield ["10", f"all, a prompt of {tokens} tokens", "", told]


def _move_claims(results: PoolResults) -> Iterator[list[str]]:
    groups: dict[tuple[str, str], list[float]] = {}
    for move in results.moves:
        if move.layout:
            groups.setdefault((move.mover, move.calls), []).append(move.spent.median_ns)
    for (mover, calls), times in groups.items():
        if len(times) == 3:
            here = f"{times[1] / times[0]:.1f} times (a layer of a block), {times[2] / times[0]:.1f} (K and V apart)"
            paper = "by a large margin" if calls == CALL_EACH else ""
            yield ["11", f"{mover}, {calls}: aggregated is faster", paper, here]


def _calls(results: PoolResults) -> Iterator[str]:
    if not results.calls:
        return
    yield "\n## Calls (figure 9)"
    rows: list[list[Cell]] = []
    for point in results.calls:
        ratio = "" if point.cached_ratio is None else f"{point.cached_ratio:g}"
        times = point.spent.told(NS_PER_US, 1)
        rows.append([f"`{point.call}`", point.link, point.blocks, ratio, times, point.spent.count])
    yield from table(["call", "to another process by", "blocks", "cached ratio", "µs", "times"], rows)


def _index(results: PoolResults) -> Iterator[str]:
    if not results.index:
        return
    yield "\n## Index (figure 10)\n"
    yield "*hash chain*: a dictionary keyed by the hash of a block's tokens and the key before; *hash of prefixes*: by"
    yield "the hash of all tokens up to the block's end, as vLLM had it at the time of the paper. Neither compares"
    yield "tokens."
    rows: list[list[Cell]] = [
        [point.index, point.prompt_tokens, f"{point.cached_ratio:g}", *(f"{spent.median_ns / NS_PER_US:.1f}"
         for spent in (point.match, point.insert, point.check))]
        for point in results.index
    ]  # fmt: skip
    yield from table(["index", "prompt tokens", "cached ratio", "match (µs)", "insert (µs)", "both (µs)"], rows)
    forwards: list[list[Cell]] = [
        [point.prompt_tokens, f"{point.spent.median_ns / NS_PER_MS:.1f}", point.spent.count]
        for point in results.forward
    ]
    yield from table(["prompt tokens", "forward (ms)", "times"], forwards)


def _moves(results: PoolResults) -> Iterator[str]:
    if not results.moves:
        return
    yield "\n## Between processes (figure 11)\n"
    yield f"*{ONE_CALL}*: all pieces in one request; *{CALL_EACH}*: as a library without lists of pieces needs it. The"
    yield "paper tunes NCCL's communicators beside it; there is no such thing in these links."
    rows: list[list[Cell]] = []
    for move in results.moves:
        rows.append([move.mover, move.calls, move.layout, move.pieces, human_bytes(move.piece_bytes),
                     move.spent.told(NS_PER_MS, 2), f"{move.gb_per_s:.2f}"])  # fmt: skip
    yield from table(["by", "calls", "layout", "pieces", "each", "ms", "GB/s"], rows)
