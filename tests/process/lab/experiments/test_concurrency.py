"""``memserve bench concurrency``: what is sent, how it is summed up, and the tables; servers are fakes but for one."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_records import record
from instant_server import Asked, InstantServer, Script, instant_server
from memserve.cli.main import run
from memserve_lab.bench.load.prompts import Outcome, RequestRecord, read_records
from memserve_lab.bench.settings import Setting
from memserve_lab.bench.study import RunFolder
from memserve_lab.experiments import bursts
from memserve_lab.experiments.bursts import (
    DRAWINGS,
    SCENARIOS,
    SHARED_SHARE,
    BurstPlan,
    BurstResults,
    Cell,
    ConcurrencyStudy,
    Limit,
    Story,
    cell_of,
    contenders_of,
    sum_up,
)
from memserve_lab.workloads.records import Text, Workload
from tiny_models import save_folder, tiny_module

# -- what is sent


def texts(burst: Workload) -> list[str]:
    found = []
    for session in burst.sessions:
        (turn,) = session.turns
        assert isinstance(turn.says, Text) and turn.due_s == 0
        found.append(turn.says.text)
    return found


@given(st.integers(1, 6), st.integers(8, 60), st.integers(0, 3), st.integers(0, 3))
def test_bursts_have_in_common_what_they_should(concurrency: int, words: int, seed: int, turn: int) -> None:
    story = Story(concurrency, words, 4, seed, turn)
    bursts = {scenario: texts(burst) for scenario, burst in story.make_bursts().items()}
    assert tuple(bursts) == SCENARIOS
    assert bursts["cold"] == bursts["warm"] and len(set(bursts["cold"])) == 1
    first = bursts["cold"][0].split()
    head = round(words * SHARED_SHARE)
    for text in bursts["shared"]:
        assert text.split()[:head] == first[:head] and len(text.split()) == words
    assert all(len(one) == concurrency for one in bursts.values())
    assert {scenario: texts(burst) for scenario, burst in story.make_bursts().items()} == bursts, (
        "a seed fixes everything"
    )


def test_unrelated_and_cold_prompts_share_no_prefix() -> None:
    stories = [Story(count, 40, 4, 0, turn) for count in (3, 5) for turn in (0, 1)]
    prompts = [text for story in stories for text in texts(story.make_bursts()["unrelated"])]
    prompts += [texts(story.make_bursts()["cold"])[0] for story in stories]
    assert len({text[:40] for text in prompts}) == len(prompts)


def test_the_limit_is_said_to_our_own_server_only() -> None:
    own, other = Setting("1PD", ("--colocated", "1"), 1), Setting("vllm", base_url="http://v")
    free, limited, last = contenders_of(own, Limit(3, 2), (other,))
    assert (free.name, free.flags) == ("1PD, no limit", own.flags) and last is other
    assert limited.name == "1PD, limit 3" and limited.flags == (
        "--colocated", "1", "--admission", "bounded", "--max-active", "3", "--admission-queue", "2",
    )  # fmt: skip
    assert contenders_of(own, None, ()) == (own,)


# -- how it is summed up


def burst_of(at: int, seed: int, *latencies_ms: float, refused: int = 0) -> list[RequestRecord]:
    """All come at once; the first token comes after half of the time."""
    labels = {"setting": "one", "workload": "cold", "group": str(at), "seed": seed}
    good = [
        record(1000, (1000 + ms / 2, 1000 + ms), end_ms=1000 + ms, prompt_tokens=100, cached_tokens=25, **labels)
        for ms in latencies_ms
    ]
    no = [
        record(1000, (), end_ms=1010, outcome=Outcome.REFUSED, http_status=429, output_tokens=0, **labels)
        for _ in range(refused)
    ]
    return good + no


def test_a_cell_by_hand() -> None:
    bursts = [burst_of(4, 0, 100, 300, refused=2), burst_of(4, 1, 200, 400, refused=2)]
    bursts[1].append(record(1000, (), end_ms=1500, outcome=Outcome.BROKEN, http_status=None, setting="one"))
    cell = cell_of("one", "cold", 4, bursts)
    assert (cell.accepted, cell.rejected, cell.failed, cell.repetitions) == (4, 4, 1, 2)
    assert cell.latency_s is not None and cell.ttft_s is not None and cell.decode_s is not None
    assert cell.latency_s.mean == pytest.approx(0.25) and cell.ttft_s.mean == pytest.approx(0.125)
    low, high = cell.intervals["latency mean"]
    assert 0.199 < low <= 0.25 <= high < 0.301
    assert cell.latency_s.p95 == pytest.approx(0.385) and cell.decode_s.mean == pytest.approx(0.125)
    assert cell.rejected_after_s is not None and cell.rejected_after_s.mean == pytest.approx(0.01)
    assert cell.wall_s is not None and cell.wall_s.mean == pytest.approx((0.3 + 0.5) / 2)
    assert cell.requests_per_s is not None and cell.requests_per_s.mean == pytest.approx((2 / 0.3 + 2 / 0.5) / 2)
    assert cell.cached_share == 0.25


def test_cell_without_served_requests() -> None:
    cell = cell_of("one", "cold", 2, [burst_of(2, 0, refused=2)])
    assert (cell.accepted, cell.rejected) == (0, 2)
    assert cell.requests_per_s is not None and cell.requests_per_s.mean == 0
    assert cell.latency_s is cell.ttft_s is cell.decode_s is None and cell.cached_share == 0


def test_a_single_burst_has_no_interval() -> None:
    cell = cell_of("one", "cold", 2, [burst_of(2, 0, 100, 300)])
    assert cell.intervals == {} and cell.latency_s is not None and cell.latency_s.mean == pytest.approx(0.2)


def test_requests_that_were_given_up_count_nowhere() -> None:
    results = BurstResults(prompt_words=8, output_tokens=4, contenders=["other", "one"])
    records = burst_of(2, 0, 100) + burst_of(1, 0, 100)
    records.append(record(0, (), end_ms=50, outcome=Outcome.STOPPED, setting="one", workload="cold", group="2"))
    sum_up(results, records)
    assert [(cell.concurrency, cell.accepted, cell.failed) for cell in results.cells] == [(1, 1, 0), (2, 1, 0)]
    assert results.prompt_tokens_mean == 100


# -- the page


def write(results: BurstResults, folder: Path) -> None:
    plan = BurstPlan((), (), 1, 8, 4)
    ConcurrencyStudy(plan, results, RunFolder(folder)).write_report(folder)


def some_results() -> BurstResults:
    results = BurstResults(
        command="a command",
        prompt_words=8,
        output_tokens=4,
        limit="at most 1",
        contenders=["one", "two"],
        models=["tiny"],
    )
    records: list[RequestRecord] = []
    for scenario in SCENARIOS:
        for at in (1, 4):
            for seed in (0, 1):
                for name, refused in (("one", 0), ("two", at - 1)):
                    served = burst_of(at, seed, *(100.0 * (n + 1) + seed for n in range(at - refused)), refused=refused)
                    for one in served:
                        one.workload, one.setting = scenario, name
                    records += served
    sum_up(results, records)
    return results


def test_plots_and_tables_show_every_cell(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib (extra: bench) is not installed")
    results = some_results()
    figure = DRAWINGS["concurrency"].draw(pyplot, results)
    assert figure is not None and len(figure.axes) == 12 and figure.legends
    for axes in figure.axes:
        assert axes.get_xlabel() == "requests at once"
        heights = [value for line in axes.get_lines() for value in line.get_ydata()]
        assert heights and max(heights) <= axes.get_ylim()[1] and axes.get_ylim()[0] == 0
    assert [axes.get_title().split(":")[0] for axes in figure.axes[:4]] == list(SCENARIOS)
    pyplot.close(figure)
    write(results, tmp_path)
    page = (tmp_path / "report.md").read_text()
    for name in DRAWINGS:
        assert f"({name}.png)" in page and (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| 4 | two | ")]
    assert len(rows) == 4 and all(row[2:4] == ["2", "6"] for row in rows), "accepted and rejected, of two bursts"
    assert "| cold | two | 1 | 3 | 101 |" in page and "llm-serving-cache" in page


def test_single_contender_has_no_overload_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)
    results = some_results()
    results.cells = [cell for cell in results.cells if cell.contender == "one"]
    write(results, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "Overload" not in page and "matplotlib is not installed" in page


# -- the command


def bench(folder: Path, *arguments: str) -> int:
    sizes = ["--prompt-words", "12", "--output-tokens", "3", "--repetitions", "2"]
    return run(["bench", "concurrency", *sizes, "--out", str(folder), *arguments])


def cells_of(folder: Path) -> dict[tuple[str, str, int], Cell]:
    found = json.loads((folder / "results.json").read_text())["cells"]
    return {(cell["contender"], cell["scenario"], cell["concurrency"]): cell for cell in found}


def at(server: InstantServer, name: str) -> list[str]:
    return ["--base-url", f"{name}={server.url}"]


def test_any_server_can_be_measured_and_refusals_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second server answers two requests of each burst and refuses the others, as a full one would."""
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)
    lock, seen = threading.Lock(), Counter[tuple[str, str]]()

    def choosy(asked: Asked) -> Script:
        with lock:
            burst = (asked.body.get("cache_salt", ""), asked.body["prompt"][:20])
            seen[burst] += 1
            return Script() if not burst[0] or seen[burst] % 4 in (1, 2) else Script(status=429, error="full")

    with instant_server() as one, instant_server(choosy) as two:
        assert bench(tmp_path, "--setting", "", *at(one, "one"), *at(two, "two"), "--at-once", "4") == 0
        bodies = [asked.body for asked in one.asked if "cache_salt" in asked.body]
    assert len(bodies) == 4 * 4 * 2 and all(body["max_tokens"] == 3 and body["ignore_eos"] for body in bodies)
    assert len({body["cache_salt"] for body in bodies}) == 2, "a repetition finds no cache of another"
    cells = cells_of(tmp_path)
    for scenario in ("cold", "warm"):
        assert (cells["one", scenario, 4]["accepted"], cells["two", scenario, 4]["accepted"]) == (8, 4)
        assert cells["two", scenario, 4]["rejected"] == 4 and cells["two", scenario, 4]["failed"] == 0
        assert cells["one", scenario, 4]["cached_share"] == pytest.approx(4 / 7), "as the server tells"
    assert len(read_records(tmp_path / "records.jsonl.gz")) == 2 * len(bodies)


def test_a_server_that_dies_leaves_a_partial_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)
    with instant_server() as server:

        def script(asked: Asked) -> Script:
            if len(server.asked) == 12:
                server.close()
            return Script()

        server.script = script
        assert bench(tmp_path, "--setting", "", *at(server, "one"), "--at-once", "3") == 1
    assert "is gone" in capsys.readouterr().err
    assert "**Partial:**" in (tmp_path / "report.md").read_text()
    assert cells_of(tmp_path)["one", "cold", 3]["accepted"] == 3


def test_our_own_server_keeps_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one without a limit is left out: starting it is all that it would add."""
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)
    monkeypatch.setattr(bursts, "contenders_of", lambda *them: contenders_of(*them)[1:])
    folder = save_folder(tiny_module("llama"), tmp_path / "llama")
    flags = f"--model {folder} --dtype float32 --kv-memory 8MiB"
    out = tmp_path / "run"
    sizes = ["--prompt-words", "80", "--output-tokens", "24", "--at-once", "1,3"]
    assert bench(out, "--max-active", "1", *sizes, "--serve-flags", flags) == 0
    cells, limited = cells_of(out), "1PD-CC, limit 1"
    for scenario in SCENARIOS:
        assert cells[limited, scenario, 1]["accepted"] == 2 and cells[limited, scenario, 1]["rejected"] == 0
        one = cells[limited, scenario, 3]
        assert one["accepted"] + one["rejected"] == 6 and one["accepted"] >= 2 and one["failed"] == 0
    assert sum(cells[limited, scenario, 3]["rejected"] for scenario in SCENARIOS) > 0
    assert cells[limited, "warm", 1]["latency_s"]["p95"] > 0 and cells[limited, "warm", 1]["repetitions"] == 2


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--at-once", "0,3"], "--at-once 1,3,5,10"),
        (["--setting", ""], "--setting 1PD-CC"),
        (["--setting", "1PD,2PD"], "--setting 1PD-CC"),
        (["--setting", "1PDD"], "NAME=URL"),
    ],
)
def test_wrong_usage_is_said_at_once(
    arguments: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path / "run", *arguments) == 1
    assert hint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
