"""Scheduling by objectives with right and wrong predictions of an answer's length (``sim/replay/lengths``)."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest

from memserve.base.config import ClusterConfig, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.cli.main import run
from memserve.instance.scheduler.sequence import Sequence
from memserve.instance.scheduler.slo import Prediction
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.lengths import LengthStudy, StudiedObjectives, error_of
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload

L40S = machine("llama-3-8b", "l40s")
TTFT_NS, TPOT_NS = 3 * NS_PER_S, 80 * NS_PER_MS
BY_OBJECTIVES = dataclasses.replace(GPU_SCHEDULER, scheduling="slo", slo_tpot_ns=TPOT_NS, slo_ttft_ns=TTFT_NS)
STUDIES = [LengthStudy(), LengthStudy("oracle"), LengthStudy("oracle", 2.0), *map(LengthStudy, ("shortest", "longest"))]


def crowd(seed: int, rate: float, requests: int = 140) -> Workload:
    """Prompts and answers as spread as those of a chat service; nothing is shared."""
    random, due_s, sessions = Random(seed), 0.0, []
    for number in range(requests):
        due_s += random.expovariate(rate)
        prompt = min(6000, 1 + int(random.lognormvariate(6.6, 1.0)))
        turn = Turn(Blocks(16, (Span(1000 * number, prompt),)), 2 + int(random.lognormvariate(5.0, 0.7)), due_s=due_s)
        sessions.append(Session(f"s{number}", (turn,), history=History.GIVEN))
    return Workload("crowd", "test", tuple(sessions))


def played(workload: Workload, scheduler: SchedulerConfig, study: LengthStudy) -> ReplayWorld:
    setup = Setup({Role.COLOCATED: 1}, L40S, ClusterConfig(policy="least-load"), scheduler, lengths=study)
    world = ReplayWorld(setup, workload)
    world.run_workload()
    world.instances[0].machine.check_invariants()
    return world


def missed(world: ReplayWorld) -> int:
    """Requests that miss an objective."""
    late = 0
    for served in world.clients.served:
        times = served.token_ns
        slow = times[-1] - times[0] > TPOT_NS * (len(times) - 1)
        late += slow or times[0] - served.scheduled_ns > TTFT_NS
    return late


@pytest.mark.parametrize("rate", [6.0, 8.0])
def test_length_predictions_miss_no_more_objectives_than_fcfs(rate: float) -> None:
    workload = crowd(seed=3, rate=rate)
    in_order = missed(played(workload, dataclasses.replace(BY_OBJECTIVES, scheduling="fcfs"), LengthStudy()))
    by_study = {study: missed(played(workload, BY_OBJECTIVES, study)) for study in STUDIES}
    assert max(by_study.values()) <= in_order, by_study
    if rate == 6.0:
        assert by_study[LengthStudy("oracle")] < in_order / 2 and by_study[LengthStudy()] < in_order / 2


def test_expected_length_per_predictor() -> None:
    """Of 40 tokens, 10 of which are told, where 4,000 have room."""

    def expected(predictor: str, told: int = 10) -> int:
        return LengthStudy(predictor).expected_length("7", told, 40, 4000)

    assert (expected("oracle"), expected("shortest"), expected("longest")) == (40, 11, 4000)
    assert expected("oracle", 39) == 40 and expected("longest", 4000) == 4001


def test_errors_are_lognormal_and_the_same_each_time() -> None:
    logs = [math.log(error_of(str(number), 1.5, 1)) for number in range(2000)]
    spread = math.sqrt(sum(log * log for log in logs) / len(logs))
    assert abs(sum(logs) / len(logs)) < 0.1 and spread == pytest.approx(1.5, rel=0.05)
    error_of.cache_clear()
    assert math.log(error_of("0", 1.5, 1)) == logs[0] != math.log(error_of("0", 1.5, 2))
    assert error_of("0", 0.0, 1) == 1.0


def test_the_learnt_predictor_does_not_know_the_recorded_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed request asks for as many tokens as were recorded; in production it asks for more."""
    beyond, expected = [], StudiedObjectives.expected

    def watched(self: StudiedObjectives, sequence: Sequence) -> Prediction:
        said = expected(self, sequence)
        beyond.append(said.lower > sequence.max_tokens)
        return said

    monkeypatch.setattr(StudiedObjectives, "expected", watched)
    played(crowd(seed=5, rate=6.0, requests=100), BY_OBJECTIVES, LengthStudy())
    assert 0 < sum(beyond) < len(beyond) / 2


@pytest.mark.parametrize(
    ("flags", "about"),
    [
        (("guessed",), "unknown predictor 'guessed'"),
        (("learnt", 0.5), "the learnt predictor takes no noise"),
        (("oracle", -1.0), "length_noise must be at least"),
    ],
)
def test_invalid_settings_are_refused(flags: tuple[object, ...], about: str) -> None:
    with pytest.raises(UserError, match=about):
        LengthStudy(*flags)


def test_flags_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "sim run --workload chat --sessions 4 --rate 5 --instances colocated=1 --scheduling slo --slo-tpot-ms 50"
    study = "--length-predictor oracle --length-noise 1.5 --length-seed 3"
    assert run([*words.split(), *study.split()]) == 0
    assert run([*words.split(), "--length-noise", "1"]) == 1
    assert "--length-predictor oracle" in capsys.readouterr().err
    for command in ("serve", "instance"):
        assert run([command, "--length-predictor", "oracle"]) == 2, "of the simulator only"
