"""The page of ``memserve bench cost`` (level 4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from memserve.bench.cost.plots import CAPTIONS, DRAWINGS
from memserve.bench.cost.results import CostResults, Foretold
from memserve.bench.sheet import Cell, circumstances, draw_all, picture, table, without_pictures, write_sheet
from memserve.units import NS_PER_MS


def write_cost(results: CostResults, folder: Path) -> None:
    """Write ``results.json``, ``report.md`` and the plots."""
    drawn = draw_all(DRAWINGS, results, folder)
    write_sheet(folder, results, _page(results, drawn))


def _page(results: CostResults, drawn: list[str] | None) -> Iterator[str]:
    yield "# memserve bench cost\n"
    yield from circumstances(results.command, results.version, results.notes, results.partial)
    if results.profile:
        yield f"* {results.profile['model']}"
    kept = f"kept in `{results.saved}`: `serve` and `instance` read it from there" if results.saved else "not kept"
    yield f"* the profile is {kept}"
    yield "* medians; the points below are none of those that the curves were fitted to, and were measured in the same"
    yield "  rounds as those"
    if drawn is None:
        yield without_pictures()
    for name in drawn or ():
        yield picture(name, CAPTIONS[name])
    yield from _accuracy(results)
    yield from _takeaways(results)
    yield from _pays(results)
    yield from _points(results)


def _accuracy(results: CostResults) -> Iterator[str]:
    yield "\n## How well the curves foretell\n"
    yield "Errors as shares of the measured time; the bias has its sign (above zero: the curve says too much). The last"
    yield "column is the profile's own: a third of its points left out, three times over."
    rows: list[list[Cell]] = []
    quality = results.profile.get("quality", {})
    for curve, found in results.accuracy.items():
        own = quality.get(curve)
        told = f"{own['median_error']:.1%} of {own['samples']}" if own is not None else ""
        shares = (found.median_error, found.p90_error, found.worst_error)
        rows.append([curve, found.points, *(f"{share:.1%}" for share in shares), f"{found.bias:+.1%}", told])
    yield from table(["curve", "points", "median", "P90", "worst", "bias", "in the profile"], rows)


def _takeaways(results: CostResults) -> Iterator[str]:
    rows = list(takeaways(results.points))
    if rows:
        yield "\n## Beside the paper\n"
        yield "What MemServe's section 8.4 takes from its figure 13 (Llama2-13B, H800), and what was measured here."
        yield from table(["the paper", "holds", "here"], rows)


def takeaways(points: list[Foretold]) -> Iterator[list[str]]:
    """The paper's four conclusions: what, whether they hold for the measured points, and the figures."""
    alone = {tokens: ratios for tokens, ratios in _by_length(points, "prefill").items() if 0.0 in ratios}
    dram = {tokens: ratios for tokens, ratios in _by_length(points, "prefill from DRAM").items() if tokens in alone}
    if not alone:
        return
    falls = all(_falls(ratios) for ratios in alone.values())
    most = {tokens: max(ratios) for tokens, ratios in alone.items()}
    gains = ", ".join(f"{alone[t][0.0] / alone[t][most[t]]:.1f} times at {t} tokens" for t in alone)
    yield ["the benefit grows with the cached ratio", _yes(falls), f"TTFT at the largest ratio falls {gains}"]
    saved = {tokens: ratios[0.0] - ratios[most[tokens]] for tokens, ratios in alone.items()}
    told = ", ".join(f"{saved[tokens] / NS_PER_MS:.0f} ms at {tokens}" for tokens in saved)
    grows = list(saved.values()) == sorted(saved.values())
    yield ["at the same ratio, longer prompts gain more", _yes(grows), told]
    same = list(_batches_and_lengths(points, alone))
    if same:
        close = all(abs(share - 1) < 0.35 for _, share in same)
        told = ", ".join(f"{share:.2f} of one prompt as long ({batch})" for batch, share in same)
        yield ["a batch costs as a prompt of its length", _yes(close), told]
    if dram:
        pays = [f"{_pays_from(ratios, alone[tokens][0.0])} at {tokens}" for tokens, ratios in dram.items()]
        holds = all("never" not in told for told in pays)
        yield ["from DRAM it pays from some cached ratio on", _yes(holds), ", ".join(pays)]


def _by_length(points: list[Foretold], curve: str) -> dict[int, dict[float, float]]:
    """Prompt tokens -> cached ratio -> measured ns."""
    found: dict[int, dict[float, float]] = {}
    for point in points:
        if point.curve == curve:
            found.setdefault(point.tokens, {})[point.cached_ratio] = point.spent.median_ns
    return {tokens: dict(sorted(ratios.items())) for tokens, ratios in sorted(found.items())}


def _falls(ratios: dict[float, float]) -> bool:
    """Whether the time falls from each ratio to the next, up to 5 % of noise."""
    times = list(ratios.values())
    return all(after < 1.05 * before for before, after in itertools.pairwise(times))


def _batches_and_lengths(points: list[Foretold], alone: dict[int, dict[float, float]]) -> Iterator[tuple[str, float]]:
    """Without cache: a batch beside one prompt with as many tokens."""
    for point in points:
        tokens = point.batch * point.tokens
        if point.curve == "prefill in batches" and not point.cached and tokens in alone:
            yield f"{point.batch} x {point.tokens}", point.spent.median_ns / alone[tokens][0.0]


def _pays_from(ratios: dict[float, float], recompute_ns: float) -> str:
    return next((f"from {ratio:.2g}" for ratio, ns in ratios.items() if ns < recompute_ns), "never")


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _pays(results: CostResults) -> Iterator[str]:
    if not results.profile:
        return
    yield "\n## What follows\n"
    yield "Moving a cached prefix is quicker than computing it again:\n"
    for way, tokens in results.profile["pays_from_tokens"].items():
        yield f"* {way}: {'never' if tokens is None else f'from {tokens} tokens on'}"
    yield "\nA prompt of 2,048 tokens whose first half lies\n"
    for where, reason in results.profile["decisions"].items():
        yield f"* {where}: {reason}"


def _points(results: CostResults) -> Iterator[str]:
    if not results.points:
        return
    yield "\n## Every point"
    rows: list[list[Cell]] = []
    for point in results.points:
        ratio = f"{point.cached_ratio:.2f}" if point.cached else ""
        times, expected = point.spent.told(NS_PER_MS, 2), f"{point.expected_ns / NS_PER_MS:.2f}"
        rows.append([point.curve, point.batch, point.tokens or "", ratio, point.blocks or "", point.pieces or "",
                     times, expected, f"{point.error:+.1%}", point.spent.count])  # fmt: skip
    columns = ["curve", "batch", "tokens", "cached ratio", "blocks", "pieces", "measured (ms)", "model (ms)", "error"]
    yield from table([*columns, "times"], rows)
