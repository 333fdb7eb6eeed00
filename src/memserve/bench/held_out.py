"""Measurements for the cost model: the profile's points, and points that are held out of the fit.

Both are measured in the same rounds, small and large ones alternating: if the machine's speed changes meanwhile, the
change affects all sizes of both, and the remaining error is the model's own. None of the held-out points is in the
profile's grid: other prompt lengths, batches, and numbers of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from memserve.config import InstanceConfig
from memserve.errors import UserError
from memserve.policy.costs import CostModel, Sample, attended_pairs
from memserve.runtime import profile
from memserve.runtime.profile import (
    LINKS,
    SAMPLES_MIN,
    SHARES,
    StepProfiler,
    all_rounds,
    measure_transfer,
    prefill_grid,
)
from memserve.runtime.profile_store import Measured
from memserve.types import KVGeometry, Tier
from memserve.workloads.statistics import Spread, spread_of

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
    found = {}
    for curve in dict.fromkeys(point.curve for point in points):
        errors = [point.error for point in points if point.curve == curve]
        found[curve] = Accuracy(spread_of(map(abs, errors)), median(errors))
    return found


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
            if self.profiler.fits(1, new_tokens):
                self.profiler.prefill_ns(new_tokens, 0)
        points = [*self._fitted_prompts(), *(point for point in self._held_out_prompts() if self._fits(point))]
        points.sort(key=lambda point: point.batch * point.new_tokens)
        self._prompts = all_rounds(dealt(points), self._prompt_ns, SHARES["prefill"] * self.seconds, ROUNDS_MAX)

    def measure_decodes(self) -> None:
        """Steps of decoding sequences: ``(batch, tokens attended to by each)``."""
        pairs = [*itertools.product(profile.DECODE_BATCHES, profile.DECODE_CONTEXTS), *_held_out_decodes()]
        points = sorted((pair for pair in pairs if self.profiler.fits(*pair)), key=lambda pair: pair[0] * pair[1])
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
        for curve, found in self._transfers.items():
            samples[curve] = [one for one in found if self._blocks(one) not in COPY_BLOCKS]
        missing = dict(self._missing)
        for curve in SWAPS:
            if len(samples[curve]) < SAMPLES_MIN:
                missing[curve] = "the pool has hardly any second tier"
                del samples[curve]
        return Measured(samples, missing)

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
        for curve, found in self._transfers.items():
            for one in found:
                if (blocks := self._blocks(one)) in COPY_BLOCKS:
                    expected_ns = getattr(costs, curve).ns(one.first, one.second)
                    yield Foretold(curve, expected_ns, spread_of([one.ns]), blocks=blocks, pieces=one.second)

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

    def _fits(self, point: Prompts) -> bool:
        step_tokens = point.batch * point.new_tokens
        within = step_tokens <= self.config.scheduler.step_tokens
        swaps = self._swapped_blocks(point) <= self.config.pool.dram_blocks
        return within and swaps and self.profiler.fits(point.batch, point.tokens)

    def _prompt_ns(self, point: Prompts) -> int:
        return self.profiler.prompts_ns(point.batch, point.new_tokens, point.cached, point.from_dram)

    def _swapped_blocks(self, point: Prompts) -> int:
        return point.cached // self.geometry.block_tokens if point.from_dram else 0

    def _blocks(self, sample: Sample) -> int:
        return sample.first // self.geometry.block_bytes

    def _expected_ns(self, costs: CostModel, point: Prompts) -> int:
        pairs = attended_pairs(point.new_tokens, point.cached)
        blocks = self._swapped_blocks(point)
        swap_ns = costs.swap_in.ns(blocks * self.geometry.block_bytes, blocks)
        return costs.prefill.step(point.batch * point.new_tokens, point.batch * pairs) + swap_ns


def dealt(points: Sequence[Point]) -> list[Point]:
    """Every point once: each :data:`HANDS`-th one first, then those behind them, and so on, so that any stretch of the
    result has all sizes."""
    return [point for hand in range(HANDS) for point in points[hand::HANDS]]


def _held_out_decodes() -> Iterator[tuple[int, int]]:
    return itertools.product(DECODE_BATCHES, DECODE_CONTEXTS)
