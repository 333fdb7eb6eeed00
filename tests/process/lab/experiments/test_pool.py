"""``memserve bench pool``: indexes that agree, pieces that are the same for each contender, and the page."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.base.config import EngineOptions
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.cli.main import run
from memserve_lab.experiments import pool_study
from memserve_lab.experiments.pool_calls import CallPoint, Prompts, Times, measure_accounts, measure_swaps
from memserve_lab.experiments.pool_index import IndexPoint, build_indexes, race
from memserve_lab.experiments.pool_moves import CALL_EACH, PROMPT_TOKENS, Move, Pair, works_of
from memserve_lab.experiments.pool_study import DRAWINGS, QUICK, PoolResults, PoolStudy, by_blocks, by_ratio
from memserve_lab.workloads.statistics import spread_of
from pair_sides import own_squares, take_squares
from tiny_models import save_folder, tiny_module

GEOMETRY = KVGeometry(4, 2, 16, 16, "float32", block_tokens=16)
BLOCK = 4
Prompt = list[int]
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=8)


# -- indexes


@given(PROMPTS, PROMPTS)
def test_all_indexes_give_the_same_answers(planted: list[Prompt], asked: list[Prompt]) -> None:
    """Beside them stands the set of all prefixes of whole blocks; two token values make for much in common."""
    indexes = build_indexes(BLOCK, 0, 64, Prompts())
    known: set[tuple[int, ...]] = set()
    for prompt in planted:
        for index in indexes.values():
            index.plant_tokens(np.array(prompt, np.int32))
        known |= {tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    for prompt in asked:
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        cached = sum(prefix in known for prefix in prefixes)
        for name, index in indexes.items():
            index.take_tokens(np.array(prompt, np.int32))
            assert index.match_tokens() == cached, name
            assert index.insert_tokens() == len(prefixes) - cached, name
        known |= set(prefixes)


def test_benchmark_leaves_the_indexes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_indexes(16, 2, 256, Prompts())
    monkeypatch.setattr("memserve_lab.experiments.pool_index.build_indexes", lambda *arguments: built)
    points = list(race(16, [(256, 0.0), (256, 0.5)], 2, 3))
    assert [(p.index, p.cached_ratio, p.check_ns.count) for p in points] == [
        (name, ratio, 3) for ratio in (0.0, 0.5) for name in ("radix", "hash chain", "hash of prefixes")
    ]
    prompts = Prompts(9)  # the race's own
    for _ in range(6):
        prompt = prompts.fresh_prompt(256)
        for index in built.values():
            index.take_tokens(prompt)
            assert index.match_tokens() == 0


def test_prompts_share_exactly_what_they_are_told() -> None:
    prompts = Prompts()
    first = prompts.fresh_prompt(64)
    for shared in (0, 1, 63, 64):
        other = prompts.sharing_prompt(first, shared)
        assert len(other) == 64 and (other[:shared] == first[:shared]).all()
        assert shared == 64 or other[shared] != first[shared]


# -- calls


def test_times_are_summed_up_by_call() -> None:
    times = Times()
    times.add_time(("match", 1, 1.0), 99)
    times.forget_times()
    for spent_ns in (10, 30, 20, 50, 40):
        times.add_time(("match", 1, 1.0), spent_ns)
    assert times(("insert", 2, 0.0), lambda a: a + 1, 4) == 5
    first, second = times.points_in_order("shm")
    assert first == CallPoint("match", 1, 1.0, spread_of([10, 20, 30, 40, 50]), "shm")
    assert (second.call, second.blocks, second.spent_ns.count) == ("insert", 2, 1)


def test_every_call_is_timed_with_every_count_and_ratio() -> None:
    points = measure_accounts(16, (1, 3), 8, tree_prompts=1, rounds=2)
    for call in ("alloc_mem", "free_mem", "insert", "match", "delete"):
        assert {1, 3} <= set(by_blocks(points, call))
    assert list(by_ratio(points, "match")) == list(by_ratio(points, "insert")) == [0.0, 0.25, 0.5, 0.75, 0.9, 1.0]
    assert list(by_ratio(points, "delete")) == [0.0, 0.25, 0.5, 0.75, 0.9]
    assert by_ratio(points, "alloc_mem") == {}
    swaps = measure_swaps(GEOMETRY, (1, 4), rounds=2)
    assert [(p.call, p.blocks, p.spent_ns.count) for p in swaps] == [
        (call, count, 2) for call in ("swap_in", "swap_out") for count in (1, 4)
    ]


# -- pieces


def test_layouts_hold_the_same_bytes_in_other_pieces() -> None:
    works = works_of(GEOMETRY, 1 << 20)
    kv_bytes = PROMPT_TOKENS * GEOMETRY.token_bytes
    layouts = [work for work in works if work.layout]
    assert [work.piece_bytes * work.pieces for work in layouts] == [kv_bytes] * 6
    assert [work.pieces for work in layouts[:3]] == [128, 128 * 4, 128 * 8]
    assert {work.piece_bytes * work.pieces for work in works if not work.layout} == {1 << 20}
    for work in works:
        ranges = work.ranges
        assert sorted(ranges.dst_offsets) == sorted(ranges.src_offsets) == [
            at * work.piece_bytes for at in range(work.pieces)
        ]  # fmt: skip


def test_pair_answers_or_reports_the_error() -> None:
    pair = Pair("squares", own_squares, take_squares, {}, 2)
    try:
        assert pair.ask_taker(1) == 1
        with pytest.raises(UserError, match="squares does not work here: ZeroDivisionError"):
            pair.ask_taker(0)
    finally:
        pair.close()
    with pytest.raises(UserError, match="cubes does not work here: ValueError: too much"):
        Pair("cubes", own_squares, take_squares, {}, 3)


def test_unavailable_links_are_skipped_with_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_study, "LINKS", {"good": ("good", {}), "pigeons": ("pigeon", {})})
    closed: list[str] = []

    class Opened:
        def __init__(self, link: str, environment: dict[str, str]) -> None:
            if link == "pigeon":
                raise UserError("they flew away")

        def close(self) -> None:
            closed.append("good")

    results = PoolResults(geometry=GEOMETRY)
    with ExitStack() as stack:
        for _ in range(2):
            assert list(pool_study._open_all(Opened, results, stack)) == ["good"]
    assert closed == ["good", "good"] and results.notes == ["pigeons was left out: they flew away"]


# -- the page


def some_results() -> PoolResults:
    results = PoolResults(command="memserve bench pool", models=["tiny"], geometry=GEOMETRY, tree_prompts=1)
    spent = spread_of([1000.0, 2000.0, 4000.0])
    results.calls = [CallPoint("match", 8, ratio, spent) for ratio in (0.0, 0.5, 1.0)]
    results.calls += [CallPoint("alloc_mem", 1, None, spent), CallPoint("transfer", 8, None, spent, "shm")]
    results.index = [IndexPoint("radix", 512, ratio, spent, spent, spent) for ratio in (0.0, 0.5)]
    results.moves = [Move("shm", CALL_EACH, "aggregated", 4096, 2, spent), Move("shm", "one call", "", 8192, 2, spent)]
    return results


@pytest.mark.parametrize("name", DRAWINGS)
def test_plots_can_be_read_without_the_text(name: str) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib (extra: bench) is not installed")
    figure = DRAWINGS[name].draw(pyplot, some_results())
    assert figure is not None and figure.get_suptitle()
    for axes in figure.axes:
        assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel()
    drawn = [line for axes in figure.axes for line in axes.containers]
    assert any(container.has_yerr for container in drawn), "error bars"
    assert any(axes.get_legend() for axes in figure.axes) or figure.legends
    pyplot.close(figure)
    assert DRAWINGS[name].draw(pyplot, PoolResults()) is None, "nothing measured, nothing drawn"


def test_the_page_shows_the_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra: bench) is not installed")
    results = some_results()
    results.calls, results.index = [], []  # one plot will do
    PoolStudy(QUICK, EngineOptions(model="tiny"), results).write_report(tmp_path)
    assert "(figure-11.png)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "figure-11.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "figure-11.svg").read_text()
    assert not (tmp_path / "figure-9.png").exists()


def tiny_model(folder: Path) -> list[str]:
    model = save_folder(tiny_module("llama"), folder / "llama")
    return ["--model", str(model), "--dtype", "float32", "--kv-memory", "8MiB", "--blocks", "1,4"]


def test_one_command_measures_all_three_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)  # drawn by other tests
    monkeypatch.setattr(pool_study, "LINKS", {"shared memory": ("shm", dict[str, str]())})
    out = tmp_path / "run"
    sizes = ["--prompt-tokens", "64,128", "--tree-prompts", "1", "--rounds", "3", "--copy-rounds", "2"]
    assert run(["bench", "pool", "--quick", *tiny_model(tmp_path), *sizes, "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert {call["call"] for call in results["calls"]} == {
        "alloc_mem", "free_mem", "insert", "match", "delete", "swap_in", "swap_out",
        "alloc_mem at a peer", "transfer", "transfer, by page", "transfer_with_insert",
    }  # fmt: skip
    assert [point["prompt_tokens"] for point in results["forward"]] == [64, 128]
    assert {point["index"] for point in results["index"]} == {"radix", "hash chain", "hash of prefixes"}
    assert {move["mover"] for move in results["moves"]} == {"memcpy", "shared memory"}
    assert results["partial"] is None and results["notes"] == []
    page = (out / "report.md").read_text()
    assert "matplotlib is not installed" in page and "`alloc_mem`, a block" in page and "aggregated is faster" in page


def test_measurements_are_kept_on_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool_study, "race", interrupted)
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)
    out = tmp_path / "run"
    sizes = ["--tree-prompts", "0", "--rounds", "3", "--copy-rounds", "2", "--out", str(out)]
    assert run(["bench", "pool", "--quick", *tiny_model(tmp_path), *sizes]) == 1
    page = (out / "report.md").read_text()
    assert "**Partial:** interrupted" in page and "`swap_in`" in page and "matplotlib is not installed" in page
    assert json.loads((out / "results.json").read_text())["partial"] == "interrupted"


@pytest.mark.parametrize("counts", ["two", "0,4", ""])
def test_counts_that_are_none_are_refused(counts: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "pool", "--blocks", counts, "--out", str(tmp_path / "run")]) == 1
    assert "--blocks 1,16,128" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
