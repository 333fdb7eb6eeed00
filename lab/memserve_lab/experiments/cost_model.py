"""``memserve bench cost``: the cost model beside measurements that it was not fitted to (MemServe figure 13).

Measurements for the cost model: the profile's points, and points that are held out of the fit.

Both are measured in the same rounds, small and large ones alternating: if the machine's speed changes meanwhile, the
change affects all sizes of both, and the remaining error is the model's own. None of the held-out points is in the
profile's grid: other prompt lengths, batches, and numbers of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

from memserve.base.config import EngineOptions, InstanceConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Tier
from memserve.base.units import NS_PER_MS
from memserve.host import profile
from memserve.host.profile import (
    LINKS,
    SAMPLES_MIN,
    SHARES,
    StepProfiler,
    all_rounds,
    fit_profile,
    measure_transfer,
    open_profiler,
    prefill_grid,
)
from memserve.host.profile_file import Measured, machine_name, model_name, profile_path, profile_values, save_profile
from memserve.kv.costs import CostModel, Sample, attended_pairs
from memserve_lab.bench.report_writer import Cell, Drawing, Table, draw_line, legend_beside, plain_log_axis
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.workloads.statistics import Spread, spread_of

BATCH_PROMPT_TOKENS = 192
"""Prompt lengths of batches: 2, 4 or 8 of them have as many tokens as one of the longer prompts."""
DECODE_BATCHES = (3, 6, 12, 24, 48)
DECODE_CONTEXTS = (96, 192, 512, 2048)
COPY_BLOCKS = (3, 6, 12, 24, 48)
SWAPS = {"swap_in": (Tier.DRAM, Tier.HBM), "swap_out": (Tier.HBM, Tier.DRAM)}
ROUNDS_MAX = 9
HANDS = 7
Point = TypeVar("Point")


@dataclass(frozen=True, slots=True)
class Grid:
    """How many points are held out."""

    prompt_tokens: tuple[int, ...]
    cached_ratios: tuple[float, ...]
    batches: tuple[int, ...]


FULL = Grid((192, 384, 768, 1536), (0.0, 0.25, 0.5, 0.75, 0.95), (2, 4, 8))
QUICK = Grid((192, 768), (0.0, 0.4, 0.8, 0.95), (4,))


@dataclass(frozen=True, slots=True)
class Foretold:
    """One measurement that the curves have not seen, beside their prediction."""

    curve: str
    """``prefill``, ``prefill from DRAM``, ``prefill in batches``, ``decode``, ``swap_in``, ``swap_out``, ``same_host``
    or ``network``."""
    expected_ns: int
    spent_ns: Spread
    batch: int = 1
    tokens: int = 0
    """Tokens of the prompt, or attended to by each sequence."""
    cached: int = 0
    """Cached tokens of the prompt."""
    blocks: int = 0
    """Bytes moved altogether."""
    pieces: int = 0

    @property
    def error(self) -> float:
        """Relative error: above 0, the curve overestimates."""
        return (self.expected_ns - self.spent_ns.p50) / self.spent_ns.p50

    @property
    def cached_ratio(self) -> float:
        """The cached share of the prompt."""
        return self.cached / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of a curve: relative errors, 0.1 = 10 %."""

    error: Spread
    """Absolute values."""
    bias: float
    """The median with its sign: above 0, the curve overestimates."""


def accuracy(points: Sequence[Foretold]) -> dict[str, Accuracy]:
    """Accuracy by curve, in the order of measuring."""
    medians = {}
    for curve in dict.fromkeys(point.curve for point in points):
        errors = [point.error for point in points if point.curve == curve]
        medians[curve] = Accuracy(spread_of(map(abs, errors)), median(errors))
    return medians


@dataclass(frozen=True, slots=True)
class Prompts:
    """A step that computes prompts with a cached first part."""

    batch: int
    tokens: int
    cached: int
    from_dram: bool = False

    @property
    def new_tokens(self) -> int:
        """Tokens computed of each prompt."""
        return self.tokens - self.cached

    @property
    def curve(self) -> str:
        """As :attr:`Foretold.curve`."""
        return "prefill from DRAM" if self.from_dram else "prefill" if self.batch == 1 else "prefill in batches"


@dataclass(slots=True)
class Measurement:
    """Times of one device that is otherwise idle. Call every ``measure_...`` first, then the other methods."""

    geometry: KVGeometry
    config: InstanceConfig
    profiler: StepProfiler
    seconds: float
    """Time for all measurements together, approximately."""
    grid: Grid = FULL
    _prompts: dict[Prompts, list[int]] = field(default_factory=dict)
    _decodes: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _swaps: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    _transfers: dict[str, list[Sample]] = field(default_factory=dict)
    _missing: dict[str, str] = field(default_factory=dict)

    # -- measuring

    def measure_prompts(self) -> None:
        """Figure 13: lengths and cached ratios, from HBM and from DRAM, alone and in batches."""
        for new_tokens in (8, 64, 256):  # threads, kernels, first-touch memory
            if self.profiler.fits_pool(1, new_tokens):
                self.profiler.prefill_ns(new_tokens, 0)
        points = [*self._fitted_prompts(), *(point for point in self._held_out_prompts() if self._fits_pool(point))]
        points.sort(key=lambda point: point.batch * point.new_tokens)
        self._prompts = all_rounds(dealt(points), self._prompt_ns, SHARES["prefill"] * self.seconds, ROUNDS_MAX)

    def measure_decodes(self) -> None:
        """Steps of decoding sequences: ``(batch, tokens attended to by each)``."""
        pairs = [*itertools.product(profile.DECODE_BATCHES, profile.DECODE_CONTEXTS), *_held_out_decodes()]
        points = sorted((pair for pair in pairs if self.profiler.fits_pool(*pair)), key=lambda pair: pair[0] * pair[1])
        self._decodes = all_rounds(
            dealt(points), lambda point: self.profiler.decode_ns(*point), SHARES["decode"] * self.seconds, ROUNDS_MAX
        )

    def measure_swaps(self) -> None:
        """Copies between the tiers."""
        limit = min(self.config.pool.hbm_blocks, self.config.pool.dram_blocks)
        counts = [count for count in sorted({*profile.COPY_BLOCKS, *COPY_BLOCKS}) if count <= limit]
        points = [(curve, count) for count in counts for curve in SWAPS]
        self._swaps = all_rounds(
            points, lambda point: self.profiler.copy_ns(*SWAPS[point[0]], point[1]), SHARES["swap"] * self.seconds,
            ROUNDS_MAX,
        )  # fmt: skip

    def measure_transfers(self) -> None:
        """Pages between two processes, in whole blocks and page by page."""
        counts = tuple(sorted({*profile.COPY_BLOCKS, *COPY_BLOCKS}))
        for curve, (link, environment) in LINKS.items():
            seconds = SHARES["transfer"] * self.seconds / len(LINKS)
            try:
                self._transfers[curve] = measure_transfer(self.geometry, link, seconds, environment, counts)
            except UserError as error:
                self._missing[curve] = str(error)

    # -- results

    def measured(self) -> Measured:
        """The samples for the fit: those of ``memserve profile``."""
        samples = {"prefill": [], "decode": [], **{curve: [] for curve in SWAPS}}  # type: dict[str, list[Sample]]
        for point in self._fitted_prompts():
            if point in self._prompts:
                samples["prefill"].append(Sample(point.new_tokens, point.cached, round(median(self._prompts[point]))))
        held_out = set(_held_out_decodes())
        for (batch, context), spent_ns in self._decodes.items():
            if (batch, context) not in held_out:
                samples["decode"].append(Sample(batch, batch * context, round(median(spent_ns))))
        for (curve, count), spent_ns in self._swaps.items():
            if count not in COPY_BLOCKS:
                samples[curve].append(Sample(count * self.geometry.block_bytes, count, round(median(spent_ns))))
        for curve, copies in self._transfers.items():
            samples[curve] = [
                copy_sample for copy_sample in copies if self._block_count(copy_sample) not in COPY_BLOCKS
            ]
        missing_curves = dict(self._missing)
        for curve in SWAPS:
            if len(samples[curve]) < SAMPLES_MIN:
                missing_curves[curve] = "the pool has hardly any second tier"
                del samples[curve]
        return Measured(samples, missing_curves)

    def held_out(self, costs: CostModel) -> Iterator[Foretold]:
        """The held-out points, beside the times that ``costs`` predicts."""
        fitted = set(self._fitted_prompts())
        for point in [point for point in self._prompts if point not in fitted]:
            blocks = self._swapped_blocks(point)
            spent_ns = spread_of(self._prompts[point])
            expected_ns = self._expected_ns(costs, point)
            yield Foretold(point.curve, expected_ns, spent_ns, point.batch, point.tokens, point.cached, blocks)
        for batch, context in [pair for pair in self._decodes if pair in set(_held_out_decodes())]:
            spent_ns = spread_of(self._decodes[batch, context])
            yield Foretold("decode", costs.decode_step_ns(batch, batch * context), spent_ns, batch, context)
        for curve, count in sorted(pair for pair in self._swaps if pair[1] in COPY_BLOCKS):
            expected_ns = getattr(costs, curve).ns(count * self.geometry.block_bytes, count)
            yield Foretold(curve, expected_ns, spread_of(self._swaps[curve, count]), blocks=count, pieces=count)
        for curve, copies in self._transfers.items():
            for copy_sample in copies:
                if (blocks := self._block_count(copy_sample)) in COPY_BLOCKS:
                    expected_ns = getattr(costs, curve).ns(copy_sample.first, copy_sample.second)
                    yield Foretold(
                        curve, expected_ns, spread_of([copy_sample.ns]), blocks=blocks, pieces=copy_sample.second
                    )

    # -- inside

    def _fitted_prompts(self) -> list[Prompts]:
        grid = prefill_grid(self.profiler, self.config.scheduler.step_tokens)
        return [Prompts(1, new_tokens + cached, cached) for new_tokens, cached in grid]

    def _held_out_prompts(self) -> Iterator[Prompts]:
        """Cached parts are whole blocks, as always."""
        block = self.geometry.block_tokens
        alone = [(1, tokens) for tokens in self.grid.prompt_tokens]
        points = [
            Prompts(batch, tokens, round(tokens * ratio / block) * block)
            for batch, tokens in [*alone, *((batch, BATCH_PROMPT_TOKENS) for batch in self.grid.batches)]
            for ratio in self.grid.cached_ratios
        ]
        points += [replace(point, from_dram=True) for point in points if point.batch == 1 and point.cached]
        yield from dict.fromkeys(point for point in points if point.new_tokens)

    def _fits_pool(self, point: Prompts) -> bool:
        step_tokens = point.batch * point.new_tokens
        within = step_tokens <= self.config.scheduler.step_tokens
        swaps = self._swapped_blocks(point) <= self.config.pool.dram_blocks
        return within and swaps and self.profiler.fits_pool(point.batch, point.tokens)

    def _prompt_ns(self, point: Prompts) -> int:
        return self.profiler.prompts_ns(point.batch, point.new_tokens, point.cached, point.from_dram)

    def _swapped_blocks(self, point: Prompts) -> int:
        return point.cached // self.geometry.block_tokens if point.from_dram else 0

    def _block_count(self, sample: Sample) -> int:
        return sample.first // self.geometry.block_bytes

    def _expected_ns(self, costs: CostModel, point: Prompts) -> int:
        pairs = attended_pairs(point.new_tokens, point.cached)
        blocks = self._swapped_blocks(point)
        swap_ns = costs.swap_in.ns(blocks * self.geometry.block_bytes, blocks)
        return costs.prefill.batch_ns(point.batch * point.new_tokens, point.batch * pairs) + swap_ns


def dealt(points: Sequence[Point]) -> list[Point]:
    """Every point once: each :data:`HANDS`-th one first, then those behind them, and so on, so that any stretch of the
    result has all sizes."""
    return [point for hand in range(HANDS) for point in points[hand::HANDS]]


def _held_out_decodes() -> Iterator[tuple[int, int]]:
    return itertools.product(DECODE_BATCHES, DECODE_CONTEXTS)


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
    figure, (left_axes, right) = pyplot.subplots(1, 2, figsize=(16, 5), layout="constrained")
    for number, (context, members) in enumerate(sorted(_grouped(decodes, _tokens).items())):
        _line(left_axes, {point.batch: point for point in sorted(members, key=_batch)}, f"{context:,}", f"C{number}")
    left_axes.set(title="A step of decoding", xlabel="sequences in the step", ylabel="time (ms)", ylim=(0, None))
    if decodes:
        legend_beside(left_axes, "tokens attended\nto by each")
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
    for axes in (left_axes, right):
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
        spread = [row + 0.25 * (index / max(1, len(shown) - 1) - 0.5) for index in range(len(shown))]
        axes.scatter(shown, spread, s=14, alpha=0.6, color=f"C{row}", label=None if row else "a point")
        accuracy = results.accuracy[curve]
        axes.plot(100 * accuracy.bias, row, marker="|", markersize=22, markeredgewidth=2, color="black",
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
        axes,
        {place: point.spent_ns for place, point in points.items()},
        label,
        NS_PER_MS,
        color=color,
        linestyle="none",
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

    def fill_results(self, tell: Tell) -> None:
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
        model_key = (model.fingerprint, geometry, device, options.threads)
        profile_fitted = fit_profile(measured, machine_name(device), f"{model.name}: {model_name(*model_key)}")
        results.profile = profile_values(profile_fitted, geometry)
        results.notes += [f"{curve} was not measured, the default is used: {why}"
                          for curve, why in measured.failures.items()]  # fmt: skip
        results.points = list(measurement.held_out(profile_fitted.costs))
        results.accuracy = accuracy(results.points)
        if self._plan.save and results.partial is None:
            path = profile_path(*model_key)
            save_profile(path, results.profile)
            results.saved = str(path)

    def terminal_lines(self) -> Iterator[str]:
        for curve, accuracy in self.results.accuracy.items():
            errors = f"off by {accuracy.error.p50:.1%}, worst {accuracy.error.max:.1%}"
            yield f"{curve:<20}{accuracy.error.count:>4} points, {errors}"
        if self.results.saved is not None:
            yield f"profile: {self.results.saved}"

    def head_lines(self) -> Iterator[str]:
        if self.results.profile:
            yield f"* {self.results.profile['model']}"
        saved_text = f"kept in `{self.results.saved}`, where `serve` and `instance` read it"
        yield f"* the profile is {saved_text if self.results.saved else 'not kept'}"
        yield "* medians; the curves were fitted to none of the points below; both were measured in the same rounds"

    def make_tables(self) -> Iterator[Table]:
        results = self.results
        yield self._accuracy_table()
        about = "What MemServe's section 8.4 takes from its figure 13 (Llama2-13B, H800), and what was measured here."
        yield Table("Beside the paper", ("the paper", "holds", "here"), list(takeaways(results.points)), about)
        if results.profile:
            yield Table("What follows", about="\n".join(self._break_evens()))
        rows: list[list[Cell]] = []
        for point in results.points:
            ratio = f"{point.cached_ratio:.2f}" if point.cached else ""
            times, expected = point.spent_ns.format_in_units(NS_PER_MS, 2), f"{point.expected_ns / NS_PER_MS:.2f}"
            rows.append([point.curve, point.batch, point.tokens or "", ratio, point.blocks or "", point.pieces or "",
                         times, expected, f"{point.error:+.1%}", point.spent_ns.count])  # fmt: skip
        columns = ["curve", "batch", "tokens", "cached ratio", "blocks", "pieces", "measured (ms)", "model (ms)"]
        yield Table("Every point", [*columns, "error", "times"], rows)

    def _accuracy_table(self) -> Table:
        about = """
Errors as shares of the measured time; the bias is signed (above 0: the curve overestimates). The last
column is the profile's own: a third of its points left out, three times over."""
        rows: list[list[Cell]] = []
        quality = self.results.profile.get("quality", {})
        for curve, accuracy in self.results.accuracy.items():
            curve_quality = quality.get(curve)
            quality_text = (
                f"{curve_quality['median_error']:.1%} of {curve_quality['samples']}"
                if curve_quality is not None
                else ""
            )
            shares = (f"{share:.1%}" for share in (accuracy.error.p50, accuracy.error.p90, accuracy.error.max))
            rows.append([curve, accuracy.error.count, *shares, f"{accuracy.bias:+.1%}", quality_text])
        columns = ("curve", "points", "median", "P90", "worst", "bias", "in the profile")
        return Table("How well the curves predict", columns, rows, about)

    def _break_evens(self) -> Iterator[str]:
        yield "Moving a cached prefix is quicker than computing it again:\n"
        for way, tokens in self.results.profile["pays_from_tokens"].items():
            yield f"* {way}: {'never' if tokens is None else f'from {tokens} tokens on'}"
        yield "\nA prompt of 2,048 tokens whose first half lies\n"
        for place, reason in self.results.profile["decisions"].items():
            yield f"* {place}: {reason}"


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
    savings_text = ", ".join(f"{saved[tokens] / NS_PER_MS:.0f} ms at {tokens}" for tokens in saved)
    grows = list(saved.values()) == sorted(saved.values())
    yield ["at the same ratio, longer prompts gain more", _yes(grows), savings_text]
    same = list(_batches_and_lengths(points, alone))
    if same:
        close = all(abs(share - 1) < 0.35 for _, share in same)
        savings_text = ", ".join(f"{share:.2f} of one prompt as long ({batch})" for batch, share in same)
        yield ["a batch costs as much as one prompt of its length", _yes(close), savings_text]
    if dram:
        pays = [f"{_pays_from(ratios, alone[tokens][0.0])} at {tokens}" for tokens, ratios in dram.items()]
        holds = all("never" not in savings_text for savings_text in pays)
        yield ["reuse from DRAM pays from some cached ratio on", _yes(holds), ", ".join(pays)]


def _by_length(points: list[Foretold], curve: str) -> dict[int, dict[float, float]]:
    """Prompt tokens -> cached ratio -> measured ns."""
    ratios: dict[int, dict[float, float]] = {}
    for point in points:
        if point.curve == curve:
            ratios.setdefault(point.tokens, {})[point.cached_ratio] = point.spent_ns.p50
    return {tokens: dict(sorted(ratios.items())) for tokens, ratios in sorted(ratios.items())}


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
