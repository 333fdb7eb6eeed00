"""All of ``memserve bench cost``: profile, held-out points, and the profile's file (level 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memserve.bench.cost.held_out import FULL, Grid, HeldOut
from memserve.bench.cost.results import CostResults, accuracy
from memserve.config import EngineOptions
from memserve.runtime.profile import SHARES, Profile, fit_profile, measure_steps, open_profiler
from memserve.runtime.profile_store import machine_name, model_name, profile_path, save_profile
from memserve.runtime.profile_transfer import with_transfers
from memserve.runtime.profile_values import profile_values

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CostPlan:
    """How long is measured, and whether the profile is kept."""

    seconds: float
    """For the profile, and about as long again for what is held out."""
    save: bool
    grid: Grid = FULL


def measure(plan: CostPlan, options: EngineOptions, results: CostResults, tell: Tell) -> None:
    """Fill ``results``; Ctrl-C ends it early and marks them partial.

    Raises :class:`UserError` for a model that cannot be served, when too little could be measured, and when the profile
    cannot be written.
    """
    try:
        _measure(plan, options, results, tell)
    except KeyboardInterrupt:
        results.partial = "interrupted"
    results.accuracy = accuracy(results.points)


def _measure(plan: CostPlan, options: EngineOptions, results: CostResults, tell: Tell) -> None:
    tell("loading the model ...")
    model, config, profiler = open_profiler(options)
    geometry, device = model.geometry, model.device.type
    results.model, results.block_bytes = model.name, geometry.block_bytes
    try:
        measured = measure_steps(profiler, config, geometry, plan.seconds, tell)
        measured = with_transfers(measured, geometry, SHARES["transfer"] * plan.seconds, tell)
        known = (model.fingerprint, geometry, device, options.threads)
        found = fit_profile(measured, machine_name(device), f"{model.name}: {model_name(*known)}")
        results.profile = profile_values(found, geometry)
        _note_what_is_missing(found, results)
        if plan.save:
            path = profile_path(*known)
            save_profile(path, results.profile)
            results.saved = str(path)
        held_out = HeldOut(found.costs, geometry, config, profiler, plan.seconds, plan.grid)
        for what, points in (
            ("prompts and cached ratios", held_out.prompts),
            ("decode", held_out.decodes),
            ("swap", held_out.swaps),
            ("transfer", held_out.transfers),
        ):
            tell(f"held out: {what}")
            results.points += points()
    finally:
        profiler.close()


def _note_what_is_missing(found: Profile, results: CostResults) -> None:
    results.notes += [
        f"{curve} was not measured, its default stays: {why}" for curve, why in found.measured.missing.items()
    ]
