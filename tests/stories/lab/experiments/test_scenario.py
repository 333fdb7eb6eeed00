"""The table of llm-serving-cache, figure by figure, and that it is the production machines that make it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from memserve.base.errors import UserError
from memserve.base.types import Tier
from memserve.cli.main import command_line
from memserve_lab.experiments.llm_serving_cache import (
    BLOCK_TOKENS,
    CASES,
    Answer,
    LlmServingCache,
    SourceWorld,
    open_scenario,
    outcome,
    overload,
    play,
)

TABLE = {
    "No cache": (1405, 1405, 0, 0),
    "Prefix reuse": (985, 1405, 50, 0),
    "Exact cache": (205, 205, 100, 0),
    "GPU-aware": (843, 1405, 25, 25),
    "GPU-aware + eviction": (1895, 4205, 25, 0),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_row_is_the_sources(case):
    answers, world = play(case)
    assert outcome(answers) == TABLE[case.name]
    for ask, answer in zip(case.asks, answers, strict=True):
        if answer.rejected:
            continue
        expected = min(ask.cached_tokens, ask.prompt_tokens - 1)  # the last token is always computed
        assert answer.cached_tokens == expected, "what the source takes for granted, the index has found"
        assert answer.latency_ms == 5 + ask.prompt_tokens - ask.cached_tokens + ask.output_tokens
    world.router.machine.check_invariants()
    world.instance.machine.check_invariants()


def test_the_command_prints_it():
    result = CliRunner().invoke(command_line(), ["sim", "--scenario", "llm-serving-cache"])
    lines = result.output.splitlines()
    for name, (mean, p95, hits, rejected) in TABLE.items():
        line = next(line for line in lines if line.startswith(f"{name}  "))
        assert line.split()[-6:] == [str(mean), str(p95), str(hits), "%", str(rejected), "%"]
    assert [line.split()[-4:-2] for line in lines if line.startswith(("no control", "3 active"))] == [
        ["10", "0"],
        ["3", "7"],
    ]


def test_memory_says_no_before_anything_is_sent():
    answers, world = play(CASES[3])
    assert [bool(answer.rejected) for answer in answers] == [False, False, True, False]
    assert answers[2].rejected == "it needs 63 blocks of KV memory, no instance has more than 31"
    assert world.admission().rejected == {"memory": 1} and world.router.machine.stats().counters.dispatches == 3


def test_pressure_evicts_once_for_each_that_needs_it():
    """After each request: how many that had ended have gone; the instance has really lost their blocks."""
    case = CASES[4]
    world = SourceWorld(case)
    for ask in case.before:
        world.wait_for([world.send_request(ask)])
    evicted, cached = [], []
    for ask in case.asks:
        world.wait_for([world.send_request(ask)])
        evicted.append(world.admission().evictions)
        cached.append(next(t for t in world.instance.machine.pool.report().tiers if t.tier is Tier.HBM).blocks_used)
    assert evicted == [0, 0, 1, 2]
    computed = [-(-(ask.prompt_tokens + ask.output_tokens) // BLOCK_TOKENS) for ask in (*case.before, *case.asks)]
    assert max(cached) <= case.units * 160 // BLOCK_TOKENS < sum(computed) - case.asks[1].cached_tokens // BLOCK_TOKENS


def test_without_eviction_the_same_requests_are_rejected():
    """The gate's own doing: where the source's last scenario may not evict, its third request has no room."""
    case = CASES[4]
    answers, _ = play(replace(case, admission=CASES[3].admission))
    assert [bool(answer.rejected) for answer in answers] == [False, False, True, False]
    assert "no instance has enough free KV memory" in answers[2].rejected


def test_three_are_served_quickly_instead_of_ten_slowly():
    everybody, _ = overload(None)
    some, _ = overload(3)
    assert sum(not answer.rejected for answer in everybody) == 10
    assert [bool(answer.rejected) for answer in some] == [False] * 3 + [True] * 7
    assert outcome(some).p95_ms < outcome(everybody).p95_ms / 3
    assert all("3 requests are active, the most allowed" in answer.rejected for answer in some[3:])


def test_means_are_cut_and_count_the_rejected_as_nothing():
    answers = [Answer(1405, 0, ""), Answer(565, 840, ""), Answer(0, 0, "no room"), Answer(1405, 0, "")]
    assert outcome(answers) == (843, 1405, 25, 25)


def test_scenario_is_deterministic():
    def found() -> LlmServingCache:
        study = open_scenario("llm-serving-cache")
        study.run_study(lambda line: None)
        return study

    assert list(found().make_tables()) == list(found().make_tables())


def test_its_tables_can_be_kept(tmp_path):
    out = tmp_path / "tables"
    result = CliRunner().invoke(command_line(), ["sim", "--scenario", "llm-serving-cache", "--out", str(out)])
    assert result.exit_code == 0
    assert "| Exact cache | 205 | 205 | 100 % | 0 % |" in (out / "report.md").read_text()
    assert len(json.loads((out / "results.json").read_text())["cases"]) == len(TABLE)


def test_an_unknown_scenario_is_a_users_error():
    with pytest.raises(UserError, match="unknown scenario") as caught:
        open_scenario("nothing")
    assert "llm-serving-cache" in (caught.value.hint or "")
