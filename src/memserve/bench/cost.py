"""``memserve bench cost``: the cost model beside measurements that it was not fitted to (MemServe figure 13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memserve.bench.held_out import FULL, Accuracy, Foretold, Grid, Measurement, accuracy
from memserve.bench.report_writer import Cell, Drawing, Table, draw_line, legend_beside, plain_log_axis
from memserve.bench.study import Study, StudyResults, Tell
from memserve.config import EngineOptions
from memserve.runtime.profile import SAMPLES_MIN, fit_profile, open_profiler
from memserve.runtime.profile_store import machine_name, model_name, profile_path, profile_values, save_profile
from memserve.units import NS_PER_MS

BARS = "dots: measured, not fitted to (bars: P10 to P90); lines: the cost model"
LIMIT_PERCENT = 60
"""Larger errors are drawn at the edge."""


@dataclass(frozen=True, slots=True)
class CostPlan:
    """How long to measure, and whether to keep the profile."""

    seconds: float
    save: bool
    grid: Grid = FULL


@dataclass(slots=True, kw_only=True)
class CostResults(StudyResults):
    """All points, and the profile that was fitted."""

    profile: dict[str, Any] = field(default_factory=dict)
    """As ``memserve profile`` writes it: samples, coefficients, their quality."""
    points: list[Foretold] = field(default_factory=list)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    saved: str | None = None
    """The file that ``serve`` and ``instance`` read the profile from. None: not kept."""
    block_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.points


def _figure_13(pyplot: Any, results: CostResults) -> Any | None:
    by_curve = {curve: [point for point in results.points if point.curve == curve] for curve in TTFT_TITLES}
    if not by_curve["prefill"]:
        return None
    figure, row = pyplot.subplots(1, 3, figsize=(16, 5), sharey=True, layout="constrained")
    for axes, (curve, points) in zip(row, by_curve.items(), strict=True):
        batches = curve == "prefill in batches"
        groups = _grouped(points, _batch if batches else _tokens)
        for number, (key, members) in enumerate(groups.items()):
            label = f"{key} prompts at once" if batches else f"{key:,} tokens"
            _line(axes, {point.cached_ratio: point for point in members}, label, f"C{number}")
        tokens = f" of {points[0].tokens} tokens" if batches and points else ""
        axes.set(title=TTFT_TITLES[curve] + tokens, xlabel="cached ratio (share of each prompt)", yscale="log")
        axes.set_xlim(-0.03, 1.0)
        axes.grid(alpha=0.3)
        if groups:
            axes.legend(fontsize=8, loc="lower left")
    row[0].set_ylabel("time to first token (ms)")
    plain_log_axis(row[0].yaxis)
    figure.suptitle(f"What caching saves, {', '.join(results.models)}; {BARS}", fontsize=11)
    return figure


TTFT_TITLES = {
    "prefill": "Cached KV lies in HBM, one prompt",
    "prefill from DRAM": "Cached KV lies in DRAM: swapped in first",
    "prefill in batches": "Cached KV lies in HBM, prompts",
}


def _curves(pyplot: Any, results: CostResults) -> Any | None:
    decodes = [point for point in results.points if point.curve == "decode"]
    moves = [point for point in results.points if point.blocks and point.curve in MOVES]
    if not decodes and not moves:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(16, 5), layout="constrained")
    for number, (context, members) in enumerate(sorted(_grouped(decodes, _tokens).items())):
        _line(left, {point.batch: point for point in sorted(members, key=_batch)}, f"{context:,}", f"C{number}")
    left.set(title="A step of decoding", xlabel="sequences in the step", ylabel="time (ms)", ylim=(0, None))
    if decodes:
        legend_beside(left, "tokens attended\nto by each")
    for number, (curve, name) in enumerate(MOVES.items()):
        groups = _grouped([point for point in moves if point.curve == curve], lambda point: point.pieces > point.blocks)
        for by_page, members in groups.items():
            label = f"{name}, by page" if by_page else name
            ordered = {point.blocks: point for point in sorted(members, key=lambda point: point.blocks)}
            _line(right, ordered, label, f"C{number}", "--" if by_page else "-")
    size = results.block_bytes / 1e3
    right.set(title=f"Moving blocks of {size:,.0f} kB", xlabel="blocks", ylabel="time (ms)", xscale="log", yscale="log")
    if moves:
        plain_log_axis(right.xaxis, sorted({point.blocks for point in moves}))
        plain_log_axis(right.yaxis)
        legend_beside(right)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"The other curves, {', '.join(results.models)}; {BARS}", fontsize=11)
    return figure


MOVES = {
    "swap_in": "swap in",
    "swap_out": "swap out",
    "same_host": "another process",
    "network": "another host (NIXL over TCP)",
}


def _batch(point: Foretold) -> int:
    return point.batch


def _tokens(point: Foretold) -> int:
    return point.tokens


def _errors(pyplot: Any, results: CostResults) -> Any | None:
    if not results.points:
        return None
    curves = list(results.accuracy)
    figure, axes = pyplot.subplots(figsize=(11, 0.7 * len(curves) + 2), layout="constrained")
    for row, curve in enumerate(curves):
        errors = [100 * point.error for point in results.points if point.curve == curve]
        shown = [max(-LIMIT_PERCENT, min(LIMIT_PERCENT, error)) for error in errors]
        spread = [row + 0.25 * (at / max(1, len(shown) - 1) - 0.5) for at in range(len(shown))]
        axes.scatter(shown, spread, s=14, alpha=0.6, color=f"C{row}", label=None if row else "a point")
        found = results.accuracy[curve]
        axes.plot(100 * found.bias, row, marker="|", markersize=22, markeredgewidth=2, color="black",
                  linestyle="none", label=None if row else "median")  # fmt: skip
    names = [f"{curve}\n(median error {100 * results.accuracy[curve].error.p50:.1f} %)" for curve in curves]
    axes.set_yticks(range(len(curves)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linewidth=1)
    axes.set(xlabel="error of the cost model (% of the measured time; above 0: it overestimates)", ylabel="curve")
    edge = LIMIT_PERCENT * 1.03
    axes.set(title=f"Points that the curves were not fitted to, {', '.join(results.models)}", xlim=(-edge, edge))
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _grouped(points: Sequence[Foretold], key: Callable[[Foretold], Any]) -> dict[Any, list[Foretold]]:
    groups: dict[Any, list[Foretold]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return dict(sorted(groups.items()))


def _line(axes: Any, points: Mapping[Any, Foretold], label: str, color: str, style: str = "-") -> None:
    """Measured dots and the fitted line between them."""
    points = dict(sorted(points.items()))
    draw_line(
        axes, {at: point.spent_ns for at, point in points.items()}, label, NS_PER_MS, color=color, linestyle="none"
    )
    axes.plot(list(points), [point.expected_ns / NS_PER_MS for point in points.values()], style, color=color, lw=1.2)


DRAWINGS = {
    "figure-13": Drawing("Time to the first token over the cached ratio (figure 13).", _figure_13),
    "curves": Drawing("The other curves: decoding, and moving blocks.", _curves),
    "errors": Drawing("Errors of the cost model at the held-out points.", _errors),
}


class CostStudy(Study[CostResults]):
    """Measured points, the fit, the profile's file, the held-out points."""

    title = "memserve bench cost"
    drawings = DRAWINGS

    def __init__(self, plan: CostPlan, options: EngineOptions, results: CostResults) -> None:
        super().__init__(results)
        self._plan, self._options = plan, options

    def measure(self, tell: Tell) -> None:
        """After Ctrl-C, fit the samples measured so far, and keep no profile.

        Raises :class:`UserError` for a model that cannot be served, when too little could be measured, and when the
        profile cannot be written.
        """
        tell("loading the model ...")
        results, options = self.results, self._options
        model, config, profiler = open_profiler(options)
        geometry, device = model.geometry, model.device.type
        results.models, results.block_bytes = [model.name], geometry.block_bytes
        measurement = Measurement(geometry, config, profiler, self._plan.seconds, self._plan.grid)
        try:
            _measure_all(measurement, tell)
        except KeyboardInterrupt:
            results.partial = "interrupted"
        finally:
            profiler.close()
        measured = measurement.measured()
        if results.partial is not None and len(measured.samples["prefill"]) < SAMPLES_MIN:
            return
        known = (model.fingerprint, geometry, device, options.threads)
        found = fit_profile(measured, machine_name(device), f"{model.name}: {model_name(*known)}")
        results.profile = profile_values(found, geometry)
        results.notes += [f"{curve} was not measured, the default is used: {why}"
                          for curve, why in measured.missing.items()]  # fmt: skip
        results.points = list(measurement.held_out(found.costs))
        results.accuracy = accuracy(results.points)
        if self._plan.save and results.partial is None:
            path = profile_path(*known)
            save_profile(path, results.profile)
            results.saved = str(path)

    def told(self) -> Iterator[str]:
        for curve, found in self.results.accuracy.items():
            errors = f"off by {found.error.p50:.1%}, worst {found.error.max:.1%}"
            yield f"{curve:<20}{found.error.count:>4} points, {errors}"
        if self.results.saved is not None:
            yield f"profile: {self.results.saved}"

    def head(self) -> Iterator[str]:
        if self.results.profile:
            yield f"* {self.results.profile['model']}"
        kept = f"kept in `{self.results.saved}`, where `serve` and `instance` read it"
        yield f"* the profile is {kept if self.results.saved else 'not kept'}"
        yield "* medians; the curves were fitted to none of the points below; both were measured in the same rounds"

    def tables(self) -> Iterator[Table]:
        results = self.results
        yield self._accuracy()
        about = "What MemServe's section 8.4 takes from its figure 13 (Llama2-13B, H800), and what was measured here."
        yield Table("Beside the paper", ("the paper", "holds", "here"), list(takeaways(results.points)), about)
        if results.profile:
            yield Table("What follows", about="\n".join(self._pays()))
        rows: list[list[Cell]] = []
        for point in results.points:
            ratio = f"{point.cached_ratio:.2f}" if point.cached else ""
            times, expected = point.spent_ns.told(NS_PER_MS, 2), f"{point.expected_ns / NS_PER_MS:.2f}"
            rows.append([point.curve, point.batch, point.tokens or "", ratio, point.blocks or "", point.pieces or "",
                         times, expected, f"{point.error:+.1%}", point.spent_ns.count])  # fmt: skip
        columns = ["curve", "batch", "tokens", "cached ratio", "blocks", "pieces", "measured (ms)", "model (ms)"]
        yield Table("Every point", [*columns, "error", "times"], rows)

    def _accuracy(self) -> Table:
        about = """
Errors as shares of the measured time; the bias is signed (above 0: the curve overestimates). The last
column is the profile's own: a third of its points left out, three times over."""
        rows: list[list[Cell]] = []
        quality = self.results.profile.get("quality", {})
        for curve, found in self.results.accuracy.items():
            own = quality.get(curve)
            told = f"{own['median_error']:.1%} of {own['samples']}" if own is not None else ""
            shares = (f"{share:.1%}" for share in (found.error.p50, found.error.p90, found.error.max))
            rows.append([curve, found.error.count, *shares, f"{found.bias:+.1%}", told])
        columns = ("curve", "points", "median", "P90", "worst", "bias", "in the profile")
        return Table("How well the curves predict", columns, rows, about)

    def _pays(self) -> Iterator[str]:
        yield "Moving a cached prefix is quicker than computing it again:\n"
        for way, tokens in self.results.profile["pays_from_tokens"].items():
            yield f"* {way}: {'never' if tokens is None else f'from {tokens} tokens on'}"
        yield "\nA prompt of 2,048 tokens whose first half lies\n"
        for where, reason in self.results.profile["decisions"].items():
            yield f"* {where}: {reason}"


def _measure_all(measurement: Measurement, tell: Tell) -> None:
    tell("prompts: lengths, cached ratios, places, batches")
    measurement.measure_prompts()
    tell("decode: batches and contexts")
    measurement.measure_decodes()
    tell("swap: between the tiers")
    measurement.measure_swaps()
    tell("transfer: between two processes")
    measurement.measure_transfers()


def takeaways(points: list[Foretold]) -> Iterator[list[str]]:
    """The paper's four conclusions: the claim, whether it holds for the measured points, and the figures."""
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
        yield ["a batch costs as much as one prompt of its length", _yes(close), told]
    if dram:
        pays = [f"{_pays_from(ratios, alone[tokens][0.0])} at {tokens}" for tokens, ratios in dram.items()]
        holds = all("never" not in told for told in pays)
        yield ["reuse from DRAM pays from some cached ratio on", _yes(holds), ", ".join(pays)]


def _by_length(points: list[Foretold], curve: str) -> dict[int, dict[float, float]]:
    """Prompt tokens -> cached ratio -> measured ns."""
    found: dict[int, dict[float, float]] = {}
    for point in points:
        if point.curve == curve:
            found.setdefault(point.tokens, {})[point.cached_ratio] = point.spent_ns.p50
    return {tokens: dict(sorted(ratios.items())) for tokens, ratios in sorted(found.items())}


def _falls(ratios: dict[float, float]) -> bool:
    """Whether the time falls from each ratio to the next, up to 5 % of noise."""
    times = list(ratios.values())
    return all(after < 1.05 * before for before, after in itertools.pairwise(times))


def _batches_and_lengths(points: list[Foretold], alone: dict[int, dict[float, float]]) -> Iterator[tuple[str, float]]:
    """Without cache: a batch compared with one prompt of as many tokens."""
    for point in points:
        tokens = point.batch * point.tokens
        if point.curve == "prefill in batches" and not point.cached and tokens in alone:
            yield f"{point.batch} x {point.tokens}", point.spent_ns.p50 / alone[tokens][0.0]


def _pays_from(ratios: dict[float, float], recompute_ns: float) -> str:
    return next((f"from {ratio:.2g}" for ratio, ns in ratios.items() if ns < recompute_ns), "never")


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
