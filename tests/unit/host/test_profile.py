"""``memserve profile``: plans that a device can execute, fits that find what the device really costs, and its file."""

from __future__ import annotations

import json
import logging
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

import memserve.cli.profile as plot_module
from memserve.base.config import ClusterConfig, InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Role
from memserve.base.units import NS_PER_MS
from memserve.cli.main import run
from memserve.host import profile_file as profile_store
from memserve.host.profile import (
    StepProfiler,
    fit_profile,
    measure_steps,
    measure_transfer,
    prefill_grid,
    timed_rounds,
)
from memserve.host.profile_file import (
    Measured,
    crossover_tokens,
    load_profile,
    model_name,
    profile_path,
    save_profile,
)
from memserve.host.router import RouterEngine
from memserve.kv.costs import CopyCurve, CostModel, PrefillCurve, Sample
from memserve.protocol.messages import Join
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.machine import Cluster
from memserve.transport.outbound import MailboxCounters
from planted_device import CONFIG, GEOMETRY, PLANTED, PlantedDevice
from tiny_models import VOCAB, loaded, tiny_module


def profiler_of(config: InstanceConfig = CONFIG) -> StepProfiler:
    return StepProfiler(PlantedDevice(config), config, GEOMETRY.block_tokens, VOCAB)


def test_profile_measures_device_costs() -> None:
    """From plans that are valid to curves that foretell, through the very code that the command runs."""
    told: list[str] = []
    profiler = profiler_of()
    measured = measure_steps(profiler, CONFIG, GEOMETRY, 60.0, told.append)
    found = fit_profile(measured, "here", "tiny")
    costs = found.costs
    for new, context in ((100, 0), (700, 900), (16, 1900)):
        assert costs.prefill_ns(new, context) == pytest.approx(PLANTED.prefill_ns(new, context), rel=0.03)
    for batch, context in ((1, 500), (12, 6000)):
        assert costs.decode_step_ns(batch, context) == pytest.approx(PLANTED.decode_step_ns(batch, context), rel=0.03)
    for blocks in (1, 30):
        size = blocks * GEOMETRY.block_bytes
        assert costs.swap_in.ns(size, blocks) == pytest.approx(PLANTED.swap_in.ns(size, blocks), rel=0.05)
        assert costs.swap_out.ns(size, blocks) == pytest.approx(PLANTED.swap_out.ns(size, blocks), rel=0.05)
    assert (costs.machine, costs.model, costs.is_measured) == ("here", "tiny", True)
    assert costs.network == CostModel().network  # not measured: the default stays
    assert set(found.quality) == {"prefill", "decode", "swap_in", "swap_out"}
    assert all(quality.worst_error < 0.1 and quality.samples >= 4 for quality in found.quality.values())
    assert len(told) == 3
    profiler.close()
    assert profiler._device.closed


def test_prefill_grid_has_figure_13_points_within_limits() -> None:
    grid = prefill_grid(profiler_of(), CONFIG.scheduler.max_step_tokens)
    assert (1024, 0) in grid and (256, 768) in grid and grid == sorted(grid)
    assert all(new + cached < CONFIG.max_model_tokens and new <= 1024 for new, cached in grid)
    small = replace(CONFIG, pool=PoolConfig(hbm_blocks=20))
    assert max(sum(point) for point in prefill_grid(profiler_of(small), 1024)) == 256


def test_without_a_second_tier_swapping_keeps_its_default() -> None:
    config = replace(CONFIG, pool=PoolConfig(hbm_blocks=400, dram_blocks=2))
    measured = measure_steps(profiler_of(config), config, GEOMETRY, 60.0, lambda line: None)
    assert set(measured.failures) == {"swap_in", "swap_out"}
    assert fit_profile(measured, "m", "x").costs.swap_in == CostModel().swap_in


def test_too_little_to_fit_is_said() -> None:
    with pytest.raises(UserError, match="too few prompts"):
        fit_profile(Measured({"prefill": [Sample(1, 0, 5)] * 4}), "m", "x")


def test_rounds_are_interleaved_and_medians_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr("memserve.host.profile.time.perf_counter", lambda: now.s)
    asked: list[str] = []

    def time_one(point: str) -> int:
        asked.append(point)
        now.s += 1.0
        return 1000 * len(asked)

    assert timed_rounds(["a", "b", "c", "d"], time_one, 100.0) == {"a": 10_000, "b": 11_000, "c": 12_000, "d": 13_000}
    assert asked == ["a", *["a", "b", "c", "d"] * 5]
    asked.clear()
    now.s = 0.0
    assert timed_rounds(["a", "b", "c", "d"], time_one, 6.5) == {"a": 4000, "b": 5000, "c": 5000, "d": 5000} or asked
    assert asked == ["a", "a", "b", "c", "d", "a", "b"]  # the time is over in the second round
    asked.clear()
    now.s = 0.0
    assert set(timed_rounds(["a", "b", "c", "d"], time_one, 0.5)) == {"a", "b", "c"}  # never fewer than three
    assert timed_rounds([], time_one, 1.0) == {}


def test_where_moving_begins_to_pay() -> None:
    costs = CostModel(prefill=PrefillCurve(0, 1000, 0))
    assert crossover_tokens(costs, GEOMETRY, CopyCurve(100_000, 0, 0), 4096) == 112  # 7 blocks: 112 us
    assert crossover_tokens(costs, GEOMETRY, CopyCurve(0, 0, 0), 4096) == 16
    assert crossover_tokens(costs, GEOMETRY, CopyCurve(10**12, 0, 0), 4096) is None


def test_a_real_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model through the real device: valid plans, times that grow with the work."""
    from memserve.model.device import ModelDevice

    monkeypatch.setattr("memserve.host.profile.ROUNDS_MAX", 1)
    model = loaded(tiny_module("llama"))
    config = InstanceConfig(
        max_model_tokens=256,
        pool=PoolConfig(hbm_blocks=48, dram_blocks=16),
        scheduler=SchedulerConfig(max_running=8, max_step_tokens=512),
    )
    profiler = StepProfiler(ModelDevice(model, config), config, model.geometry.block_tokens, model.vocab_size)
    for _ in range(4):  # in one round, what else runs on the machine may hide what a token of a tiny model costs
        measured = measure_steps(profiler, config, model.geometry, 30.0, lambda line: None)
        assert set(measured.samples) == {"prefill", "decode", "swap_in", "swap_out"}
        assert all(sample.ns > 0 for samples in measured.samples.values() for sample in samples)
        assert {sample.first for sample in measured.samples["decode"]} == {1, 2, 4, 8}
        costs = fit_profile(measured, "m", "x").costs
        if 0 < costs.prefill_ns(32) < costs.prefill_ns(200):
            break
    assert 0 < costs.prefill_ns(32) < costs.prefill_ns(200)


def test_two_processes_move_pages_through_shared_memory() -> None:
    samples = measure_transfer(GEOMETRY, "shm", 0.3)
    assert {(s.first // GEOMETRY.block_bytes, s.second // (s.first // GEOMETRY.block_bytes)) for s in samples} >= {
        (1, 1), (1, 4), (8, 1), (8, 4),
    }  # fmt: skip
    assert all(0 < sample.ns < 5_000 * NS_PER_MS for sample in samples)


def test_failing_link_is_reported() -> None:
    with pytest.raises(UserError, match="cannot move pages over carrier-pigeon"):
        measure_transfer(GEOMETRY, "carrier-pigeon", 0.1)
    with pytest.raises(UserError, match="too large"):
        measure_transfer(replace(GEOMETRY, num_layers=100_000), "shm", 0.1)


# -- its file


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_profile_is_found_by_machine_model_and_how_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        ("f1", GEOMETRY, "cpu", None), ("f2", GEOMETRY, "cpu", None), ("f1", GEOMETRY, "cpu", 2),
        ("f1", replace(GEOMETRY, dtype="bfloat16"), "cpu", None),
        ("f1", replace(GEOMETRY, block_tokens=32), "cpu", None),
    ]  # fmt: skip
    paths = [profile_path(*run) for run in runs]
    assert len(set(paths)) == len(runs)
    save_profile(paths[0], {"costs": PLANTED.to_dict()})
    assert load_profile(*runs[0]) == PLANTED
    assert [load_profile(*run) for run in runs[1:]] == [CostModel()] * 4
    monkeypatch.setattr(profile_store, "_processor", lambda: "Another")
    assert load_profile(*runs[0]) == CostModel()
    assert "bfloat16 on cpu, 3 threads, 16 tokens a block" in model_name("f", runs[3][1], "cpu", 3)


def test_the_log_says_where_costs_come_from(caplog: pytest.LogCaptureFixture) -> None:
    path = profile_path("f", GEOMETRY, "cpu", None)
    with caplog.at_level(logging.INFO):
        load_profile("f", GEOMETRY, "cpu", None)
        save_profile(path, {"costs": replace(PLANTED, machine="EPYC").to_dict()})
        load_profile("f", GEOMETRY, "cpu", None)
    assert "memserve profile" in caplog.messages[0] and "measured on EPYC" in caplog.messages[1]


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"costs": 3}', '{"costs": {"version": 99}}', '{"costs": {"version": 1, "prefill": 1}}']
)
def test_a_damaged_profile_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    cache.mkdir()
    profile_path("f", GEOMETRY, "cpu", None).write_text(text)
    assert load_profile("f", GEOMETRY, "cpu", None) == CostModel()
    assert "cannot be used" in caplog.text


def test_unwritable_folder_is_reported(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(UserError, match="cannot write"):
        save_profile(profile_path("f", GEOMETRY, "cpu", None), {})


# -- the command


def test_plot_without_matplotlib_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot_module.importlib.util, "find_spec", lambda name: None)
    assert run(["profile", "--plot", "x.png"]) == 1
    error = capsys.readouterr().err
    assert "--plot needs matplotlib" in error and "loading" not in error


def test_the_command_measures_shows_and_saves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """Everything but the loading of a model and the second process is real."""
    model = types.SimpleNamespace(
        geometry=GEOMETRY, device=types.SimpleNamespace(type="cpu"), fingerprint="f", name="planted"
    )
    monkeypatch.setattr("memserve.host.profile.open_profiler", lambda options: (model, CONFIG, profiler_of()))

    asked: list[str] = []

    def transfer(geometry: KVGeometry, link: str, seconds: float, environment: dict[str, str]) -> list[Sample]:
        asked.append(link)
        if link != "shm":
            raise UserError(f"{link} is not to be had")
        return [Sample(n * 1000, n, 1000 + 500 * n) for n in range(1, 7)]

    monkeypatch.setattr("memserve.host.profile.measure_transfer", transfer)
    others = [0.0]
    monkeypatch.setattr("memserve.system.process.CpuWatch.others_cores", lambda watch: others[0])
    assert run(["profile", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["missing"] == {"network": "curve is not to be had"} and asked == ["shm", "curve"]
    assert values["quality"]["prefill"]["median_error"] < 0.05
    assert values["pays_from_tokens"]["swap-in"] == GEOMETRY.block_tokens
    assert values["decisions"]["in HBM"].startswith("reuse 1024 + recompute 1024: ")
    assert values["decisions"]["in DRAM"].startswith("swap-in 1024 + recompute 1024: ")
    assert values["decisions"]["there, 32 at once"].endswith("share link and device")
    assert [len(sample) for sample in values["samples"]["same_host"]] == [3] * 6
    saved = Path(values["saved"])
    assert saved.parent == cache and load_profile("f", GEOMETRY, "cpu", None).machine == values["machine"]
    saved.unlink()
    others[0] = 1.5
    assert run(["profile"]) == 0
    told = capsys.readouterr()
    assert "other programs use 1.5 of" in told.err and "not saved" in told.out and not saved.exists()
    assert run(["profile", "--even-if-busy"]) == 0
    assert "not to be trusted" in capsys.readouterr().out and saved.exists()
    saved.unlink()
    others[0] = 0.0
    assert run(["profile", "--no-save"]) == 0
    text = capsys.readouterr().out
    assert "per attended pair" in text and "network: curve is not to be had" in text and "conservative default" in text
    assert not saved.exists()


def test_the_plot_has_a_line_and_dots_for_each_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """matplotlib itself is optional: what is asked of it is checked, by its own names."""
    calls: list[tuple[str, tuple, dict]] = []

    class Recorder:
        def __getattr__(self, name: str):
            return lambda *args, **options: calls.append((name, args, options))

    axes, figure = Recorder(), Recorder()
    pyplot = types.SimpleNamespace(subplots=lambda **options: (figure, axes), close=lambda figure: None)
    for name, module in (
        ("matplotlib", types.SimpleNamespace(use=lambda backend: None)),
        ("matplotlib.pyplot", pyplot),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plot_module.importlib.util, "find_spec", lambda name: object())
    measured = measure_steps(profiler_of(), CONFIG, GEOMETRY, 60.0, lambda line: None)
    plot_module.plot_profile(fit_profile(measured, "m", "x"), "title", tmp_path / "x.png")
    lines = [call for call in calls if call[0] == "plot"]
    assert [options["label"] for _, _, options in lines] == [f"{n} tokens" for n in (64, 128, 256, 512, 1024)]
    for _, (ratios, seconds), _ in lines:
        assert ratios[0] == 0.0 and list(seconds) == sorted(seconds, reverse=True)
    dots = [args for name, args, _ in calls if name == "scatter"]
    assert all(set(shares) <= {0.0, 0.25, 0.5, 0.75} | {s for s in shares if 0.89 < s < 0.91} for shares, _ in dots)
    assert calls[-1][:2] == ("savefig", (tmp_path / "x.png",))


# -- who decides by it


class StubMailbox:
    """Hears nothing, says nothing."""

    address = "tcp://127.0.0.1:1"
    counters = MailboxCounters()

    def connect(self, *args) -> None: ...
    def disconnect(self, *args) -> None: ...
    def send(self, *args) -> None: ...
    def close(self) -> None: ...


GOOD, BAD = replace(PLANTED, machine="here"), b'{"version": 99}'


def test_the_router_knows_each_member_by_its_own_profile() -> None:
    """From the mailbox on: unlike machines; one without a profile and one whose profile is not understood take that of
    the last one: by assumed costs they would get no request to learn from."""
    machine, heard = Cluster(ClusterConfig()), []
    router = RouterEngine(machine, lambda on_message: heard.append(on_message) or StubMailbox())
    said = {"p1": GOOD.to_json(), "p2": GOOD.with_prefill_scale(3.0).to_json(), "p3": b"", "p4": BAD}
    try:
        for name, costs in said.items():
            peer = Peer(name, 1)
            heard[0](
                peer,
                Join(PeerInfo(peer, Role.PREFILL, "tcp://127.0.0.1:2", "ns", GEOMETRY, 64, 0, 64, True, costs=costs)),
            )
        assert router.wait_for_members(list(said), 20.0)
        assert router.stats().cluster.instances == 4  # asked behind everything that joining has posted
        members = {member.name: member for member in machine._registry}
        assert [members[name].costs for name in said] == [GOOD, *[GOOD.with_prefill_scale(3.0)] * 3]
        assert [bool(members[name].costs_note) for name in said] == [False, False, False, True]
    finally:
        router.close()
    machine.check_invariants()


def test_a_profile_survives_the_way_to_the_router() -> None:
    assert CostModel.from_json(GOOD.to_json()) == GOOD
    for garbage in (b"", b"{", b"3", BAD):
        with pytest.raises(UserError, match="cost profile"):
            CostModel.from_json(garbage)
