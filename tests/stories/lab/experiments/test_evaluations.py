"""``memserve sim memserve``, ``paging`` and ``routers``: papers' settings on the production machines."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from random import Random
from statistics import mean

import pytest

from memserve.base.errors import UserError
from memserve.cli.main import run
from memserve_lab.bench.metrics import Slo
from memserve_lab.experiments.evaluations.memserve import (
    Load,
    chats,
    contender,
    measure_goodputs,
    measure_point,
)
from memserve_lab.experiments.evaluations.paging import BLOCKS, MAX, STATIC, BuddyMemory, PagingPlan, run_way
from memserve_lab.experiments.evaluations.ratios import groups_workload, precise_world
from memserve_lab.experiments.evaluations.routers import RouterPoint, RouterResults
from memserve_lab.sim.hardware import machine, with_step_ns
from memserve_lab.sim.other_routers import RULES, RuledWorld
from memserve_lab.sim.replay.setup import Setup, parse_instances

H800 = machine("llama-2-13b", "h800", 2, block_tokens=16)
SLO = Slo(0.5, 0.05)


def point(name: str, load: Load, rate: float):
    return measure_point("8", H800, contender(name), load, rate, rate, SLO)


# -- memserve


def test_disaggregation_gains_over_prefill_first_alone() -> None:
    """Beside chunked prefill little of the gain is left: the baseline's decodes wait for whole prompts."""
    load = Load("react", 4.0)
    first, chunked, split = (point(name, load, 20.0) for name in ("3PD/prefill-first", "3PD", "2P1D"))
    assert split.jct_mean_s < 0.9 * first.jct_mean_s and split.tpot_mean_s < 0.9 * first.tpot_mean_s
    assert first.gap_p99_s > 1.4 * chunked.gap_p99_s and first.ttft_mean_s < chunked.ttft_mean_s
    assert (split.jct_mean_s / chunked.jct_mean_s) > (split.jct_mean_s / first.jct_mean_s) + 0.05


def test_caching_shortens_first_tokens_of_documents() -> None:
    plain, cached = (point(name, Load("documents", 4.0), 6.0) for name in ("1P2D", "1P2D-CC"))
    assert plain.cached_share == 0.0 and cached.cached_share > 0.6
    assert cached.ttft_mean_s < 0.6 * plain.ttft_mean_s


def test_prompt_tree_reuses_more_than_sessions_do() -> None:
    load = Load("documents", 8.0, sessions=12, share_ratio=4.0)
    session, tree = (point(f"3P1D-CC/{policy}/no-fetch", load, 8.0) for policy in ("session", "prompt-tree"))
    assert tree.cached_share > session.cached_share + 0.02 and tree.ttft_p99_s <= session.ttft_p99_s


def test_goodput_falls_with_a_tighter_objective() -> None:
    small = machine("llama-3-8b", "h100", block_tokens=64)
    load = Load("long", 4.0)
    loose, tight = measure_goodputs(small, contender("2PD"), load, [Slo(2.0, 0.1), Slo(2.0, 0.012)], 1.0)
    assert loose.rate > tight.rate >= 0 and loose.tried > 1


def test_a_longer_step_makes_decoding_slower() -> None:
    slower = with_step_ns(H800, 15_000_000)
    assert slower.roof is not None and slower.roof.fixed_ns == 15_000_000
    assert slower.costs.decode_step_ns(1, 0) - H800.costs.decode_step_ns(1, 0) == 13_000_000
    with pytest.raises(UserError, match="its own steps"):
        with_step_ns(dataclasses.replace(H800, roof=None), 1)


def test_chats_fit_into_the_context_with_their_histories() -> None:
    for session in chats(200, 3).sessions:
        assert sum(turn.says.tokens + turn.output_tokens_max for turn in session.turns) <= 4000
    assert chats(50, 1) == chats(50, 1) != chats(50, 2)


def test_memserve_command_prints_json_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--figures 8,14,goodput --workloads documents --settings 2PD,1P1D --rates 4 --seconds 3 --share-ratios 1"
    words = f"{flags} --slo-tpots-ms 50 --json --out {tmp_path / 'run'}"
    assert run(["sim", "memserve", *words.split()]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [point["figure"] for point in results["points"]] == ["8", "8", "14", "14"]
    assert [point["setting"] for point in results["goodputs"]] == ["2PD", "1P1D"]
    assert (tmp_path / "run" / "figure-8-documents.png").exists() and (tmp_path / "run" / "report.md").exists()


@pytest.mark.parametrize(
    "flags", ["--figures 9", "--workloads x", "--settings 3XD", "--settings 2PD/chunk-x", "--share-ratios 0.5"]
)
def test_wrong_options_are_refused_with_a_hint(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "memserve", *flags.split()]) == 1
    assert "hint: " in capsys.readouterr().err


# -- paging


def test_buddy_pieces_do_not_overlap_and_all_come_back() -> None:
    random, memory, pieces = Random(1), BuddyMemory(16 * 991), dict[int, int]()
    for _ in range(2000):
        if pieces and random.random() < 0.5:
            memory.free(first := random.choice(list(pieces)))
            del pieces[first]
        elif (tokens := random.randint(1, 2048)) and (place := memory.allocate(tokens)) is not None:
            pieces[place] = tokens
        ends = sorted((first, first + tokens) for first, tokens in pieces.items())
        assert all(end <= later for (_, end), (later, _) in itertools.pairwise(ends))
        assert all(first >= 0 and end <= memory.tokens for first, end in ends)
    for first in list(pieces):
        memory.free(first)
    assert memory.used_tokens == 0 and memory.allocate(8192) is not None


def test_blocks_hold_more_tokens_than_reserved_pieces() -> None:
    small = dataclasses.replace(machine("opt-13b", "a100-40gb", block_tokens=16), hbm_blocks=991)
    plan = PagingPlan(small, ("sharegpt",), requests=110)
    static, longest, blocks = (run_way(plan, "sharegpt", way, 100.0) for way in (STATIC, MAX, BLOCKS))
    shares = [world.mean_shares() for world in (static, longest, blocks)]
    for share in shares:
        assert share.states + share.reserved + share.internal + share.rest == pytest.approx(1)
    assert 0.1 < shares[1].states < 0.35 and shares[1].running <= 7.5
    assert shares[2].states > 0.8 and shares[2].running > 3 * shares[1].running
    assert static.requests_per_s < longest.requests_per_s < blocks.requests_per_s


def test_paging_command_compares_the_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--workloads sharegpt --ways max,blocks --requests 110 --out {tmp_path / 'run'}"
    assert run(["sim", "paging", *words.split()]) == 0
    assert "blocks over it" in capsys.readouterr().out and (tmp_path / "run" / "paging.png").exists()
    assert run(["sim", "paging", "--ways", "slabs"]) == 1


# -- routers


def test_rules_of_others_choose_among_all_instances() -> None:
    load = Load("documents", 4.0).at_rate(12.0)
    hits = {}
    for name, rule in RULES.items():
        world = RuledWorld(Setup(parse_instances("3"), H800), load, rule, fetches=False)
        world.run_workload()
        assert all(served.answered and served.fetched_tokens == 0 for served in world.clients.served)
        assert {served.instance for served in world.clients.served} == {"c0", "c1", "c2"}, name
        hits[name] = sum(served.cached_tokens for served in world.clients.served)
    assert all(hits.values())
    with pytest.raises(UserError, match="see 6 instances"):
        RuledWorld(Setup(parse_instances("7"), H800), load, RULES["dynamo"])


def test_cost_keeps_prefixes_where_instances_are_overrun() -> None:
    """Where each prompt goes where it is soonest, prefixes are computed again and again."""
    workload, ttft_s = groups_workload(18.0, 0, groups=60), {}
    for policy in ("prompt-tree", "cost"):
        world = precise_world(workload, policy, fetches=True)
        world.run_workload()
        ttft_s[policy] = mean((served.first_ns or 0) - served.scheduled_ns for served in world.clients.served)
    assert ttft_s["cost"] < 1.3 * ttft_s["prompt-tree"], "it was twice that"


def test_ratios_compare_with_the_best_of_the_others() -> None:
    def one(policy: str, fetches: bool, ttft_s: float) -> RouterPoint:
        return RouterPoint("t", policy, fetches, 9, ttft_s, 2 * ttft_s, 0, 0, 0, 0)

    points = [
        one("session", False, 2.0),
        one("dynamo", False, 1.0),
        one("dynamo", True, 0.8),
        one("as it is", True, 0.6),
    ]
    points.append(one("cost", False, 0.1))
    ratios = RouterResults(points=points).ratios("t")
    assert ratios["mean, as they are"] == pytest.approx(0.6) and ratios["P99, with our fetches"] == pytest.approx(0.75)


def test_traces_that_are_absent_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "routers", "--traces", "toolagent", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    assert "toolagent left out" in capsys.readouterr().err
    assert run(["sim", "routers", "--traces", "x", "--data", str(tmp_path)]) == 1
