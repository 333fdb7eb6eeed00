"""Measures what things cost on this machine, and fits the curves (level 3, row M11; MemServe 5.3).

Steps are timed on the real device with exactly the rows that are asked for: so many tokens behind so many cached ones,
so many sequences with such contexts. What the cached KV contains does not matter to the time, so it is not computed
first, and a minute is enough.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memserve.config import EngineOptions, InstanceConfig
from memserve.errors import UserError
from memserve.instance.events import OpenSequence, StepPlan
from memserve.policy.costs import CostModel
from memserve.policy.fit import Quality, Sample, fit_copy, fit_decode, fit_held_out, fit_prefill
from memserve.runtime.build import build_parts
from memserve.runtime.ports import Device
from memserve.types import CopyBlocks, KVGeometry, SamplingParams, Tier
from memserve.units import ceil_div

if TYPE_CHECKING:
    from memserve.model.loading.loader import LoadedModel

CACHED_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
DECODE_CONTEXTS = (64, 128, 256, 1024, 4096)
COPY_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS_MAX = 5
SAMPLES_MIN = 5
"""With fewer a curve cannot be fitted to two thirds of them and tried on the rest."""
SHARES = {"prefill": 0.55, "decode": 0.25, "swap": 0.1, "transfer": 0.1}
"""Of the time that a profile may take."""

Point = TypeVar("Point", bound=Hashable)
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples by curve: ``prefill``, ``decode``, ``swap_in``, ``swap_out``, ``same_host``, ``network``."""

    samples: Mapping[str, Sequence[Sample]]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Curves that could not be measured, and why."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The fitted model, and how well its curves foretell samples that they were not fitted to."""

    costs: CostModel
    quality: Mapping[str, Quality]
    measured: Measured


class StepProfiler:
    """Times single steps of one device, which nobody else uses meanwhile."""

    def __init__(self, device: Device, config: InstanceConfig, block_tokens: int, vocab_size: int) -> None:
        self._device = device
        self._config = config
        self._block_tokens = block_tokens
        self._rng = np.random.default_rng(7)
        self._vocab_size = vocab_size
        self._step_ids = itertools.count(1)

    def fits(self, batch: int, tokens: int) -> bool:
        """Whether ``batch`` sequences of ``tokens`` each can be in the pool at once."""
        config = self._config
        blocks = batch * ceil_div(tokens + 1, self._block_tokens)
        within = tokens < config.max_model_tokens and batch <= config.scheduler.max_running
        return within and blocks <= config.pool.hbm_blocks

    def prefill_ns(self, new_tokens: int, context_tokens: int) -> int:
        """One step that computes ``new_tokens`` behind ``context_tokens``, and draws one token."""
        return self.prompts_ns(1, new_tokens, context_tokens)

    def prompts_ns(self, batch: int, new_tokens: int, context_tokens: int, from_dram: bool = False) -> int:
        """One step that computes ``new_tokens`` of each of ``batch`` prompts behind ``context_tokens`` each.

        ``from_dram``: the whole blocks of the contexts are brought up from DRAM in the same step, before it computes.
        """
        return self._run(batch, context_tokens + new_tokens, new_tokens, context_tokens if from_dram else 0)

    def decode_ns(self, batch: int, context_tokens: int) -> int:
        """One step of ``batch`` sequences that attend to ``context_tokens`` each."""
        return self._run(batch, context_tokens, 1)

    def copy_ns(self, src: Tier, dst: Tier, blocks: int) -> int:
        """Copying ``blocks`` blocks between tiers: every other one, as after some time in service."""
        limit = min(self._config.pool.hbm_blocks, self._config.pool.dram_blocks)
        places = [(2 * at) % limit + (2 * at) // limit for at in range(blocks)]
        plan = StepPlan(next(self._step_ids), copies=[CopyBlocks(src, dst, places, places[::-1])])
        return self._device.execute(plan).device_ns

    def close(self) -> None:
        """Give the device back."""
        self._device.close()

    def _run(self, batch: int, tokens: int, new_tokens: int, dram_tokens: int = 0) -> int:
        plan = StepPlan(next(self._step_ids))
        blocks = ceil_div(tokens + 1, self._block_tokens)
        if swapped := dram_tokens // self._block_tokens:
            above = [slot * blocks + at for slot in range(batch) for at in range(swapped)]
            plan.copies.append(CopyBlocks(Tier.DRAM, Tier.HBM, list(range(len(above))), above))
        for slot in range(batch):
            ids = self._rng.integers(self._vocab_size // 100, self._vocab_size, tokens, dtype=np.int32)
            own = list(range(slot * blocks, (slot + 1) * blocks))
            plan.open.append(OpenSequence(slot, ids, tokens, 0, SamplingParams(temperature=0.0), own))
            plan.slots.append(slot)
            plan.starts.append(tokens - new_tokens)
            plan.counts.append(new_tokens)
            plan.sample_slots.append((slot,))
        spent_ns = self._device.execute(plan).device_ns
        self._device.execute(StepPlan(next(self._step_ids), close=list(range(batch))))
        return spent_ns


def open_profiler(options: EngineOptions) -> tuple[LoadedModel, InstanceConfig, StepProfiler]:
    """Load the model and make a device of it, as an engine has it. Imports torch, so it takes seconds.

    Raises :class:`UserError` as :func:`memserve.runtime.build.build_parts`.
    """
    parts = build_parts(options)
    model = parts.model
    profiler = StepProfiler(parts.device, parts.config, model.geometry.block_tokens, model.vocab_size)
    return model, parts.config, profiler


def measure_steps(
    profiler: StepProfiler, config: InstanceConfig, geometry: KVGeometry, seconds: float, tell: Tell
) -> Measured:
    """Samples of prefill, decode and swap, in about ``seconds``."""
    for new_tokens in (8, 64, 256):  # threads, kernels, first-touch memory
        if profiler.fits(1, new_tokens):
            profiler.prefill_ns(new_tokens, 0)
    samples: dict[str, Sequence[Sample]] = {}
    tell("prefill: prompt lengths and cached ratios")
    samples["prefill"] = _prefill_samples(profiler, config.scheduler.max_step_tokens, SHARES["prefill"] * seconds)
    tell("decode: batches and contexts")
    samples["decode"] = _decode_samples(profiler, SHARES["decode"] * seconds)
    blocks = [count for count in COPY_BLOCKS if count <= min(config.pool.hbm_blocks, config.pool.dram_blocks)]
    if len(blocks) < SAMPLES_MIN:
        return Measured(samples, dict.fromkeys(("swap_in", "swap_out"), "the pool has hardly any second tier"))
    tell("swap: between the tiers")
    for curve, src, dst in (("swap_in", Tier.DRAM, Tier.HBM), ("swap_out", Tier.HBM, Tier.DRAM)):
        times = timed_rounds(blocks, partial(profiler.copy_ns, src, dst), SHARES["swap"] * seconds / 2)
        samples[curve] = [Sample(count * geometry.block_bytes, count, ns) for count, ns in times.items()]
    return Measured(samples)


def _prefill_samples(profiler: StepProfiler, step_tokens: int, seconds: float) -> list[Sample]:
    grid = prefill_grid(profiler, step_tokens)
    times = timed_rounds(grid, lambda point: profiler.prefill_ns(*point), seconds)
    return [Sample(new, context, ns) for (new, context), ns in times.items()]


def _decode_samples(profiler: StepProfiler, seconds: float) -> list[Sample]:
    grid = [(b, c) for b in DECODE_BATCHES for c in DECODE_CONTEXTS if profiler.fits(b, c)]
    grid.sort(key=lambda point: point[0] * point[1])
    times = timed_rounds(grid, lambda point: profiler.decode_ns(*point), seconds)
    return [Sample(batch, batch * context, ns) for (batch, context), ns in times.items()]


def prefill_grid(profiler: StepProfiler, step_tokens: int) -> list[tuple[int, int]]:
    """Pairs of (new tokens, cached tokens): figure 13's prompt lengths and cached ratios, the quick ones first."""
    points = []
    for length, ratio in itertools.product(PROMPT_TOKENS, CACHED_RATIOS):
        cached = round(length * ratio)
        if length - cached <= step_tokens and profiler.fits(1, length):
            points.append((length - cached, cached))
    return sorted(points)


def timed_rounds(points: Sequence[Point], time_one: Callable[[Point], int], seconds: float) -> dict[Point, int]:
    """The median time of each point: see :func:`all_rounds`."""
    return {point: round(median(spent)) for point, spent in all_rounds(points, time_one, seconds).items()}


def all_rounds(
    points: Sequence[Point], time_one: Callable[[Point], int], seconds: float, rounds: int | None = None
) -> dict[Point, list[int]]:
    """The times of each point in as many rounds as ``seconds`` allow (at most ``rounds``); interleaved, so that a slow
    moment of the machine does not fall on one point alone.

    The first point of all is thrown away once: it pays for what is only done once. When not even the first round fits,
    its last points are left out.
    """
    if not points:
        return {}
    deadline = time.perf_counter() + seconds
    time_one(points[0])
    times: dict[Point, list[int]] = {}
    for turn in range(rounds or ROUNDS_MAX):
        for point in points:
            if time.perf_counter() > deadline and (turn > 0 or len(times) >= 3):
                return times
            times.setdefault(point, []).append(time_one(point))
    return times


def fit_profile(measured: Measured, machine: str, model: str) -> Profile:
    """The cost model through the samples; what was not measured keeps its conservative default.

    Raises :class:`UserError` when there is too little to fit.
    """
    if len(measured.samples.get("prefill", ())) < SAMPLES_MIN:
        raise UserError("too few prompts could be measured", hint="give it more --seconds, or --kv-memory")
    fits: dict[str, Callable[[Sequence[Sample]], Any]] = {"prefill": fit_prefill, "decode": fit_decode}
    curves: dict[str, Any] = {}
    quality: dict[str, Quality] = {}
    for name, samples in measured.samples.items():
        if len(samples) >= SAMPLES_MIN:
            curves[name], quality[name] = fit_held_out(samples, fits.get(name, fit_copy))
    return Profile(CostModel(**curves, machine=machine, model=model), quality, measured)


def crossover_tokens(
    costs: CostModel, geometry: KVGeometry, move_ns: Callable[[int, int], int], limit: int
) -> int | None:
    """The shortest cached prefix, in whole blocks, that is quicker moved by ``move_ns(bytes, blocks)`` than computed
    again; ``None`` when there is none below ``limit`` tokens."""
    for blocks in range(1, limit // geometry.block_tokens + 1):
        tokens = blocks * geometry.block_tokens
        saved_ns = costs.prefill_ns(tokens + 1, 0) - costs.prefill_ns(1, tokens)
        if move_ns(blocks * geometry.block_bytes, blocks) < saved_ns:
            return tokens
    return None
