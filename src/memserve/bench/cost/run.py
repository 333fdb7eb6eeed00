"""All of ``memserve bench cost``: measured points, the fit, the profile's file, the held-out points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memserve.bench.cost.held_out import FULL, Grid, Measurement
from memserve.bench.cost.results import CostResults, accuracy
from memserve.config import EngineOptions
from memserve.runtime.profile import SAMPLES_MIN, fit_profile, open_profiler
from memserve.runtime.profile_store import machine_name, model_name, profile_path, profile_values, save_profile

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CostPlan:
    """How long is measured, and whether the profile is kept."""

    seconds: float
    save: bool
    grid: Grid = FULL


def measure(plan: CostPlan, options: EngineOptions, results: CostResults, tell: Tell) -> None:
    """Fill ``results``. Ctrl-C ends it early and marks them partial: what was measured is fitted, nothing is kept.

    Raises :class:`UserError` for a model that cannot be served, when too little could be measured, and when the profile
    cannot be written.
    """
    tell("loading the model ...")
    model, config, profiler = open_profiler(options)
    geometry, device = model.geometry, model.device.type
    results.model, results.block_bytes = model.name, geometry.block_bytes
    measurement = Measurement(geometry, config, profiler, plan.seconds, plan.grid)
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
    results.notes += [f"{curve} was not measured, its default stays: {why}" for curve, why in measured.missing.items()]
    results.points = list(measurement.held_out(found.costs))
    results.accuracy = accuracy(results.points)
    if plan.save and results.partial is None:
        path = profile_path(*known)
        save_profile(path, results.profile)
        results.saved = str(path)


def _measure_all(measurement: Measurement, tell: Tell) -> None:
    tell("prompts: lengths, cached ratios, places, batches")
    measurement.measure_prompts()
    tell("decode: batches and contexts")
    measurement.measure_decodes()
    tell("swap: between the tiers")
    measurement.measure_swaps()
    tell("transfer: between two processes")
    measurement.measure_transfers()
