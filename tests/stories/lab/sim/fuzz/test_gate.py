"""The gate in the fuzzed world, and the judge of what it may do: each of its sentences is met by a gate that errs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from memserve.base.fairness import FairQueue
from memserve.base.types import Admission
from memserve.protocol.events import RejectRequest
from memserve.router.admission.controller import AdmissionController
from memserve.router.admission.ledger import BlockLedger
from memserve.router.admission.memory_budget import MemoryBudget
from memserve.router.admission.needs import Crowd
from memserve.router.requests.requests import RequestState
from memserve_lab.sim.fuzz.admission_judge import cause_of
from memserve_lab.sim.fuzz.campaign import judge, parse_setting, play, setting_of
from memserve_lab.sim.fuzz.scenario import draw

FIRST = 500_000
"""Seeds from here on are those of this file."""


def test_admission_scenarios_reach_every_rejection_cause() -> None:
    """Clients are refused for each cause but ``memory``, which takes clients with prompts that are too long."""
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + 60):
        scenario = draw(seed, setting_of(seed, "swarm"))
        if scenario.admission.mode is not Admission.NONE:
            seen.update(play(seed, scenario.setting).count_achievements())
            seen[scenario.admission.mode.value] += 1
    assert min(seen[mode] for mode in ("bounded", "memory", "cache")) >= 2, seen
    assert min(seen[f"refused: {cause}"] for cause in ("queue", "wait", "pressure")) >= 1, seen


def test_without_faults_only_a_gate_may_refuse() -> None:
    gated = [seed for seed in range(30) if draw(seed, setting_of(seed, "healthy")).admission.mode is not Admission.NONE]
    refused = sum(len(play(seed, setting_of(seed, "healthy")).gate_judge.refused) for seed in gated)
    assert len(gated) >= 4 and refused > 0


@pytest.mark.parametrize(
    ("seed", "setting"),
    [(77_001_061, "pd-caching-3/by-request/1P1D1C/swarm"), (91_001_742, "pd-caching-2/by-request/1P1D1C/healthy")],
)
def test_colocated_instance_next_to_pair_needs_room_for_answer(seed: int, setting: str) -> None:
    """The judge took it to need room for the prompt alone: "waits, and there is room for it"."""
    assert judge(seed, parse_setting(setting)).failure == ""


def _half_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    until = AdmissionController.wait_until_ns

    def half(self: AdmissionController, req: RequestState) -> int | None:
        return (ns := until(self, req)) and ns - self._config.wait_ns // 2

    monkeypatch.setattr(AdmissionController, "wait_until_ns", half)


def _endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdmissionController, "reject_timed_out", lambda self, req, now_ns: None)


def _one_place_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crowd, "is_full", property(lambda self: self.active >= max(1, (self.active_max or 99) - 1)))


def _who_leaves_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release = AdmissionController.release_request

    def unnoticed(self: AdmissionController, req: RequestState, now_ns: int) -> None:
        before = self.memory.changed
        release(self, req, now_ns)
        self.memory.changed = before

    monkeypatch.setattr(AdmissionController, "release_request", unnoticed)


def _anybody_loses_his_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "most_crowded", lambda self, _: next((i[3] for i in self._items.values()), None))


def _always_the_same_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FairQueue, "_first_place", lambda self: self._lines[min(self._lines)][0] if self._lines else None
    )
    monkeypatch.setattr(FairQueue, "check_invariants", lambda self: None)


def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBudget, "fits", lambda self, req, **_: not any(m.attempts for m in self._registry))


def _memory_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    free = MemoryBudget._free_attempt
    monkeypatch.setattr(MemoryBudget, "_free_attempt", lambda self, *who, keeps: keeps or free(self, *who, keeps=keeps))
    monkeypatch.setattr(MemoryBudget, "check_invariants", lambda self, requests: None)


def _what_has_ended_counts_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "expire_retired", lambda self, now_ns, kept_ns: 0)


def _pins_never_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBudget, "fits_without_pins", lambda self, req: False)


@pytest.mark.parametrize(
    ("fault", "seed", "says"),
    [
        (_half_the_patience, 11, "waited 10000000 ns only"),
        (_endless_patience, 11, "the first waits for"),
        (_one_place_less, 6, "and only 3 are active"),
        (_who_leaves_wakes_nobody, 1, "wait, and none is active"),
        (_anybody_loses_his_place, 7, "loses a request, and '' has more"),
        (_always_the_same_tenant, 31, "tokens ahead of 'other'"),
        (_one_at_a_time, 11, "waits, and there is room for it"),
        (_memory_is_never_given_back, 8, "fits: no instance has enough free KV memory"),
        (_what_has_ended_counts_for_ever, 24, "later1-0.0 fits: no instance has enough free KV memory"),
        (_pins_never_give_way, 465, " fits: no instance has enough free KV memory"),
    ],
)
def test_faulty_admission_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], seed: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sentence that is there for it, and not without the fault."""
    setting = setting_of(FIRST + seed, "swarm")
    assert not judge(FIRST + seed, setting).failure
    fault(monkeypatch)
    assert says in judge(FIRST + seed, setting).failure


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("8 requests are active, the most allowed; 9 wait, at most 8 may", "queue"),
        ("no instance has enough free KV memory for the next one; 1 wait, at most 0 may", "queue"),
        ("not admitted within 10 s: 8 requests are active, the most allowed", "wait"),
        (
            "no instance has enough free KV memory for the next one, nor by 1 evictions, and no request is running",
            "pressure",
        ),
        ("it needs 9 blocks of KV memory, no instance has more than 8", "memory"),
        ("no instance is ready to take requests", ""),
    ],
)
def test_refusal_has_its_cause(reason: str, cause: str) -> None:
    """As clients read it."""
    assert cause_of(RejectRequest("r", reason, 1.0)) == cause
