"""``memserve bench cost``: on a device that takes exactly as long as a planted model says."""

from __future__ import annotations

import itertools
import json
import types
from dataclasses import replace
from pathlib import Path

import pytest

from memserve.base.config import EngineOptions
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.cli.main import run
from memserve.host.profile import StepProfiler, all_rounds, fit_profile, prefill_grid
from memserve.host.profile_file import load_profile
from memserve.instance.events import StepFinished, StepPlan
from memserve.kv.costs import CostModel, Sample, attended_pairs
from memserve_lab.experiments import cost_model as cost_module
from memserve_lab.experiments.cost_model import (
    DRAWINGS,
    FULL,
    CostPlan,
    CostResults,
    CostStudy,
    Foretold,
    Measurement,
    accuracy,
    dealt,
    takeaways,
)
from memserve_lab.workloads.statistics import spread_of
from planted_device import CONFIG, GEOMETRY, PLANTED, PlantedDevice
from tiny_models import VOCAB

MODEL = types.SimpleNamespace(
    geometry=GEOMETRY, device=types.SimpleNamespace(type="cpu"), fingerprint="f", name="planted"
)


class PromptDevice(PlantedDevice):
    """Checks plans as its base does; several prompts in a step, and copies before them, take what they should."""

    def execute(self, plan: StepPlan) -> StepFinished:
        done = super().execute(plan)
        if not any(count > 1 for count in plan.counts):
            return done
        for order in plan.copies:
            assert set(order.dst) <= {block for sequence in plan.open for block in sequence.blocks}
        pairs = sum(attended_pairs(count, start) for count, start in zip(plan.counts, plan.starts, strict=True))
        spent_ns = PLANTED.prefill.batch_ns(sum(plan.counts), pairs) + sum(self._copy(order) for order in plan.copies)
        return replace(done, device_ns=round(spent_ns * self.noise.uniform(0.98, 1.02)))


def profiler_of() -> StepProfiler:
    return StepProfiler(PromptDevice(CONFIG), CONFIG, GEOMETRY.block_tokens, VOCAB)


def measurement() -> Measurement:
    """Everything but the transfers."""
    found = Measurement(GEOMETRY, CONFIG, profiler_of(), 60.0)
    found.measure_prompts()
    found.measure_decodes()
    found.measure_swaps()
    return found


def points_of(costs: CostModel = PLANTED) -> list[Foretold]:
    return list(measurement().held_out(costs))


def transfer(
    geometry: KVGeometry,
    link: str,
    seconds: float,
    environment: dict[str, str],
    counts: tuple[int, ...],
) -> list[Sample]:
    if link != "shm":
        raise UserError(f"{link} is not to be had")
    return [Sample(count * geometry.block_bytes, count, 1000 + 500 * count) for count in counts]


# -- what is held out


def test_correct_model_predicts_unseen_points() -> None:
    points = points_of()
    found = accuracy(points)
    assert list(found)[-3:] == ["decode", "swap_in", "swap_out"]
    assert set(found) >= {"prefill", "prefill from DRAM", "prefill in batches"}
    assert all(one.error.max < 0.03 and abs(one.bias) < 0.02 for one in found.values()), found
    assert {point.batch for point in points if point.curve == "prefill in batches"} == set(FULL.batches)
    below = [point for point in points if point.curve == "prefill from DRAM"]
    assert below and all(0 < point.blocks * GEOMETRY.block_tokens == point.cached < point.tokens for point in below)


def test_nothing_that_is_held_out_was_fitted_to() -> None:
    fitted = set(prefill_grid(profiler_of(), CONFIG.scheduler.max_step_tokens))
    own = measurement()
    alone = [point for point in own.held_out(PLANTED) if point.batch == 1 and point.curve.startswith("prefill")]
    assert alone and not fitted & {(point.tokens - point.cached, point.cached) for point in alone}
    samples = own.measured().samples
    assert {(sample.first, sample.second) for sample in samples["prefill"]} == fitted
    assert {sample.first for sample in samples["decode"]}.isdisjoint((3, 6, 12))
    assert {sample.second for sample in samples["swap_in"]} == {1, 2, 4, 8, 16, 32}


def test_a_machine_that_changes_its_speed_does_so_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round or two everything takes three times as long, fitted and held-out points alike."""
    original, steps = PromptDevice.execute, itertools.count()

    def slowed(self: PromptDevice, plan: StepPlan) -> StepFinished:
        done = original(self, plan)
        return replace(done, device_ns=done.device_ns * (3 if next(steps) > 300 else 1))

    monkeypatch.setattr(PromptDevice, "execute", slowed)
    own = measurement()
    costs = fit_profile(own.measured(), "m", "x").costs
    assert costs.prefill_ns(500) > 1.5 * PLANTED.prefill_ns(500), "it was slow most of the time"
    found = accuracy(list(own.held_out(costs)))
    assert found["prefill"].error.p50 < 0.06 and found["prefill in batches"].error.p50 < 0.06


def test_wrong_model_is_noticed() -> None:
    found = accuracy(points_of(PLANTED.with_prefill_scale(2.0)))
    assert found["prefill"].bias == pytest.approx(1.0, abs=0.03)
    assert found["prefill in batches"].error.p50 == pytest.approx(1.0, abs=0.03)
    assert found["decode"].error.p50 < 0.03, "its own curve"


def test_any_stretch_of_a_round_has_all_sizes() -> None:
    order = dealt(range(70))
    assert sorted(order) == list(range(70))
    assert all(min(order[at : at + 10]) < 10 and max(order[at : at + 10]) >= 60 for at in range(60))


def test_accuracy_by_hand() -> None:
    points = [Foretold("decode", expected, spread_of([90, 100, 120])) for expected in (90, 120, 105)]
    (found,) = accuracy(points).values()
    assert (found.error.count, found.error.p50, found.error.p90) == (3, pytest.approx(0.1), pytest.approx(0.18))
    assert (found.error.max, found.bias) == (pytest.approx(0.2), pytest.approx(0.05))


def test_rounds_keep_every_time() -> None:
    times = iter(range(100))
    assert all_rounds(["a", "b"], lambda point: next(times), 60.0, 2) == {"a": [1, 3], "b": [2, 4]}


def test_conclusions_are_drawn_from_what_was_measured() -> None:
    points = [point for point in points_of() if point.curve.startswith("prefill")]
    assert [row[1] for row in takeaways(points)] == ["yes", "yes", "yes", "yes"]
    flat = spread_of([5e6])
    told = list(takeaways([replace(point, spent_ns=flat) for point in points]))
    assert told[0][2].startswith("TTFT at the largest ratio falls 1.0 times")
    assert told[-1][1] == "no" and "never" in told[-1][2]
    assert list(takeaways([point for point in points if point.cached])) == []


# -- the page and the command


def results_of() -> CostResults:
    results = CostResults(command="memserve bench cost", models=["planted"], block_bytes=GEOMETRY.block_bytes)
    results.points = points_of()
    results.accuracy = accuracy(results.points)
    return results


def test_plots_show_the_fit_beside_the_measured(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib (extra: bench) is not installed")
    results = results_of()
    figure = DRAWINGS["figure-13"].draw(pyplot, results)
    assert figure is not None
    for axes in figure.axes:
        assert axes.get_title() and "cached ratio" in axes.get_xlabel() and axes.get_legend() is not None
        assert all(container.has_yerr for container in axes.containers)
    ttft = figure.axes[0]
    lines = [line for line in ttft.get_lines() if line.get_linestyle() == "-"]
    assert len(lines) == len(ttft.containers) == len({p.tokens for p in results.points if p.curve == "prefill"})
    for line in lines:
        assert list(line.get_ydata()) == sorted(line.get_ydata(), reverse=True)
    pyplot.close(figure)
    CostStudy(CostPlan(1.0, False), EngineOptions(model="planted"), results).write_report(tmp_path)
    for name in DRAWINGS:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / f"{name}.svg").exists()
        assert f"({name}.png)" in (tmp_path / "report.md").read_text()


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command finds a planted model; the second process is a formula."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_module, "open_profiler", lambda options: (MODEL, CONFIG, profiler_of()))
    monkeypatch.setattr("memserve_lab.experiments.cost_model.measure_transfer", transfer)


@pytest.mark.parametrize("save", [True, False])
def test_the_command_writes_the_profile_that_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], save: bool
) -> None:
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)  # drawn by another test
    out = tmp_path / "run"
    assert run(["bench", "cost", "--quick", "--out", str(out), *([] if save else ["--no-save"])]) == 0
    said = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert (
        results["accuracy"]["prefill"]["error"]["p50"] < 0.05
        and results["accuracy"]["same_host"]["error"]["count"] == 5
    )
    assert results["notes"] == ["network was not measured, the default is used: curve is not to be had"]
    costs = load_profile("f", GEOMETRY, "cpu", None)
    assert costs.is_measured is save and (results["saved"] is not None) is save
    if save:
        assert costs.prefill_ns(500, 100) == pytest.approx(PLANTED.prefill_ns(500, 100), rel=0.03)
        assert f"profile: {results['saved']}" in said
    page = (out / "report.md").read_text()
    assert "| prefill |" in page and "a batch costs as much as one prompt of its length | yes" in page
    assert "in HBM: reuse 1024" in page and "matplotlib is not installed" in page


def test_an_interrupted_run_keeps_its_points_and_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Measurement) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurement, "measure_decodes", interrupted)
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)
    assert run(["bench", "cost", "--quick", "--out", str(tmp_path / "run")]) == 1
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["partial"] == "interrupted" and set(results["accuracy"]) == {
        "prefill", "prefill from DRAM", "prefill in batches"
    }  # fmt: skip
    assert "**Partial:** interrupted" in (tmp_path / "run" / "report.md").read_text()
    assert not load_profile("f", GEOMETRY, "cpu", None).is_measured and results["saved"] is None
