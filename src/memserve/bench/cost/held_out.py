"""Points between those that the curves are fitted to, measured on the same device (level 4).

None of them is in the profile's grid: other prompt lengths, cached ratios, batches, and numbers of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memserve.bench.cost.results import Foretold
from memserve.bench.sheet import Spent
from memserve.config import InstanceConfig
from memserve.errors import UserError
from memserve.policy.costs import CostModel
from memserve.policy.curves import attended_pairs
from memserve.runtime.profile import StepProfiler, all_rounds
from memserve.runtime.profile_transfer import LINKS, measure_transfer
from memserve.types import KVGeometry, Tier

BATCH_PROMPT_TOKENS = 192
"""A batch of 2, 4 or 8 of these has as many tokens as one of the longer prompts."""
DECODE_BATCHES = (3, 6, 12, 24, 48)
DECODE_CONTEXTS = (96, 192, 512, 2048)
COPY_BLOCKS = (3, 6, 12, 24, 48)
SHARES = {"prompts": 0.75, "decode": 0.15, "swap": 0.05, "transfer": 0.05}
"""Of the time that they may take."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How many points are held out."""

    prompt_tokens: tuple[int, ...]
    cached_ratios: tuple[float, ...]
    batches: tuple[int, ...]
    rounds: int
    """At most so many times each."""


FULL = Grid((192, 384, 768, 1536), (0.0, 0.2, 0.4, 0.6, 0.8, 0.95), (2, 4, 8), rounds=9)
QUICK = Grid((192, 768), (0.0, 0.4, 0.8, 0.95), (4,), rounds=3)


@dataclass(frozen=True, slots=True)
class Prompts:
    """A step that computes prompts whose first part is cached."""

    batch: int
    tokens: int
    cached: int
    from_dram: bool


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Measures what the curves of ``costs`` have not seen."""

    costs: CostModel
    geometry: KVGeometry
    config: InstanceConfig
    profiler: StepProfiler
    seconds: float
    grid: Grid = FULL

    def prompts(self) -> Iterator[Foretold]:
        """Figure 13: lengths and cached ratios, from HBM and from DRAM, alone and in batches."""
        points = [point for point in self._prompt_points() if self._fits(point)]
        times = all_rounds(points, self._prompt_ns, SHARES["prompts"] * self.seconds, self.grid.rounds)
        for point, spent_ns in times.items():
            curve = "prefill from DRAM" if point.from_dram else "prefill" if point.batch == 1 else "prefill in batches"
            yield Foretold(
                curve, self._expected_ns(point), Spent.of(spent_ns), point.batch, point.tokens, point.cached,
                point.cached // self.geometry.block_tokens if point.from_dram else 0,
            )  # fmt: skip

    def decodes(self) -> Iterator[Foretold]:
        """Steps of decoding sequences."""
        grid = [(b, c) for b, c in itertools.product(DECODE_BATCHES, DECODE_CONTEXTS) if self.profiler.fits(b, c)]
        grid.sort(key=lambda point: point[0] * point[1])
        times = all_rounds(
            grid, lambda point: self.profiler.decode_ns(*point), SHARES["decode"] * self.seconds, self.grid.rounds
        )
        for (batch, context), spent_ns in times.items():
            expected_ns = self.costs.decode_step_ns(batch, batch * context)
            yield Foretold("decode", expected_ns, Spent.of(spent_ns), batch, context)

    def swaps(self) -> Iterator[Foretold]:
        """Copies between the tiers."""
        limit = min(self.config.pool.hbm_blocks, self.config.pool.dram_blocks)
        counts = [count for count in COPY_BLOCKS if count <= limit]
        for curve, src, dst in (("swap_in", Tier.DRAM, Tier.HBM), ("swap_out", Tier.HBM, Tier.DRAM)):
            times = all_rounds(
                counts, lambda count, src=src, dst=dst: self.profiler.copy_ns(src, dst, count),  # type: ignore[misc]
                SHARES["swap"] * self.seconds / 2, self.grid.rounds,
            )  # fmt: skip
            for count, spent_ns in times.items():
                expected_ns = getattr(self.costs, f"{curve}_ns")(count * self.geometry.block_bytes, count)
                yield Foretold(curve, expected_ns, Spent.of(spent_ns), blocks=count, pieces=count)

    def transfers(self) -> Iterator[Foretold]:
        """Pages between two processes, in whole blocks and page by page; every run of the two gives one median.

        A link that does not work here has no points.
        """
        runs = max(1, min(3, self.grid.rounds // 3))
        for curve, (link, environment) in LINKS.items():
            medians: dict[tuple[int, int], list[int]] = {}
            for _ in range(runs):
                try:
                    seconds = SHARES["transfer"] * self.seconds / runs
                    samples = measure_transfer(self.geometry, link, seconds, environment, COPY_BLOCKS)
                except UserError:
                    break
                for sample in samples:
                    medians.setdefault((sample.first, sample.second), []).append(sample.ns)
            for (size_bytes, pieces), spent_ns in medians.items():
                expected_ns = self.costs.transfer_ns(size_bytes, curve == "same_host", pieces)
                blocks = size_bytes // self.geometry.block_bytes
                yield Foretold(curve, expected_ns, Spent.of(spent_ns), blocks=blocks, pieces=pieces)

    def _prompt_points(self) -> Iterator[Prompts]:
        """Whole blocks are cached, as always; the quick ones first."""
        block = self.geometry.block_tokens
        alone = [(1, tokens) for tokens in self.grid.prompt_tokens]
        points = [
            Prompts(batch, tokens, round(tokens * ratio / block) * block, False)
            for batch, tokens in [*alone, *((batch, BATCH_PROMPT_TOKENS) for batch in self.grid.batches)]
            for ratio in self.grid.cached_ratios
        ]
        points += [replace(point, from_dram=True) for point in points if point.batch == 1 and point.cached]
        known = dict.fromkeys(point for point in points if point.cached < point.tokens)
        yield from sorted(known, key=lambda point: point.batch * (point.tokens - point.cached))

    def _fits(self, point: Prompts) -> bool:
        step_tokens = point.batch * (point.tokens - point.cached)
        dram_blocks = point.cached // self.geometry.block_tokens if point.from_dram else 0
        within = step_tokens <= self.config.scheduler.max_step_tokens and dram_blocks <= self.config.pool.dram_blocks
        return within and self.profiler.fits(point.batch, point.tokens)

    def _prompt_ns(self, point: Prompts) -> int:
        new_tokens = point.tokens - point.cached
        return self.profiler.prompts_ns(point.batch, new_tokens, point.cached, point.from_dram)

    def _expected_ns(self, point: Prompts) -> int:
        new_tokens = point.tokens - point.cached
        pairs = attended_pairs(new_tokens, point.cached)
        prefill_ns = self.costs.prefill.step(point.batch * new_tokens, point.batch * pairs)
        if not point.from_dram:
            return prefill_ns
        blocks = point.cached // self.geometry.block_tokens
        return prefill_ns + self.costs.swap_in_ns(blocks * self.geometry.block_bytes, blocks)
