"""``bench/leaderboard.py`` and ``scripts/leaderboard.py``: turns, what is left of a run, figures of tools, the page."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import types
from pathlib import Path

import pytest
from harness import contenders, tools

ROOT = Path(__file__).resolve().parent.parent.parent


def module(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_" + Path(path).parent.name, ROOT / path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look themselves up there
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def bench() -> types.ModuleType:
    return module("bench/leaderboard.py")


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    return module("scripts/leaderboard.py")


def run(round: int, server: str, **figures: object) -> dict:
    return {"round": round, "load": "plain/chat/aiperf", "server": server, "command": "aiperf profile", "others": 0.0,
            **figures}  # fmt: skip


def record(*rows: dict, **more: object) -> dict:
    loads = {"plain/chat/aiperf": {"about": "8 chats", "is_timed": False}}
    return {"machine": "2 cores", "rounds": 3, "note": "", "tools": {"aiperf": "0.13.0"}, "absent": {}, "missing": {},
            "servers": {}, "loads": loads, "rows": list(rows), **more}  # fmt: skip


def test_each_load_begins_with_another_server(bench: types.ModuleType) -> None:
    loads = list(bench.LOADS[:3])
    order = list(bench.turns_of(argparse.Namespace(rounds=2), loads, ["a", "b", "c"]))
    assert len(order) == len({(turn.round, turn.load.key, turn.server) for turn in order}) == 18
    firsts = [turn.server for turn in order[::3]]
    assert firsts == ["a", "b", "c", "b", "c", "a"]


def test_a_stopped_run_goes_on_where_it_was(bench: types.ModuleType) -> None:
    load = bench.LOADS[0]
    planned = [bench.Turn(number, load, server) for number in (0, 1) for server in ("a", "b")]
    rows = [
        {"round": 0, "load": load.key, "server": "a", "ttft_ms": 1.0},
        {"round": 0, "load": load.key, "server": "b", "failed": "it died"},
    ]
    left = bench.left({"rows": rows}, iter(planned))
    assert [(turn.round, turn.server) for turn in left] == [(0, "b"), (1, "a"), (1, "b")]


def test_other_settings_are_not_mixed(bench: types.ModuleType, tmp_path: Path) -> None:
    args = argparse.Namespace(
        json=tmp_path / "board.json", dtype="bfloat16", eager=False, serve=[], seed=1, note="", fresh=False, rounds=3,
        tool_cpus=1, context=4096,
    )  # fmt: skip
    first = bench.opened(args, list(bench.LOADS))
    first["rows"].append({"round": 0})
    bench.write(args, first)
    assert bench.opened(args, list(bench.LOADS))["rows"] == [{"round": 0}]
    args.eager = True
    other = bench.opened(args, list(bench.LOADS))
    assert other["rows"] == [] and other["settings"]["eager"]
    assert json.loads((tmp_path / "board.old").read_text())["rows"] == [{"round": 0}]


def test_fresh_run_forgets_the_one_before(bench: types.ModuleType, tmp_path: Path) -> None:
    place = {"json": tmp_path / "board.json", "dtype": "bfloat16", "eager": False, "serve": [], "seed": 1, "note": ""}
    args = argparse.Namespace(**place, fresh=False, rounds=3, tool_cpus=1, context=4096)
    bench.write(args, bench.opened(args, []) | {"rows": [{"round": 0}]})
    args.fresh = True
    assert bench.opened(args, [])["rows"] == []


def test_each_load_has_a_tool_and_a_key_of_its_own(bench: types.ModuleType, tmp_path: Path) -> None:
    assert len({load.key for load in bench.LOADS}) == len(bench.LOADS)
    for load in bench.LOADS:
        one, other = (load.words(tools.Target("http://x:1", "m", tmp_path, seed)) for seed in (1, 2))
        assert one != other, f"{load.key} has the same prompts in each round"
        assert any("http://x:1" in word for word in one)


def test_record_names_no_folder_of_this_machine(bench: types.ModuleType, tmp_path: Path) -> None:
    said = f"a {tmp_path}/venv/bin/python: in {tmp_path}/y/z.py, 3/4"
    assert bench.without_folders(said) == "a python: in z.py, 3/4"
    model = bench.Model(str(tmp_path / "model"), str(tmp_path / "plain.gguf"))
    about = {"version": "1", "command": f"serve --model {model.folder}, -m plain.gguf --model {model.gguf}"}
    command = bench.about_of(bench.Contender("vLLM", "http://x", about, 1), model)["command"]
    assert command == "serve --model MODEL, -m MODEL.gguf --model MODEL.gguf"


def test_tools_say_the_same_figures(tmp_path: Path) -> None:
    served = {"completed": 4, "request_throughput": 2.0, "mean_ttft_ms": 30.0, "mean_tpot_ms": 5.0}
    (tmp_path / "answer.json").write_text(json.dumps({}) + "\n" + json.dumps(served))
    expected = {"done": 4, "requests_per_s": 2.0, "ttft_ms": 30.0, "tpot_ms": 5.0}
    assert tools.of_serving(tmp_path) == expected
    results = {"successful_requests": 4, "elapsed_time": 2.0, "mean_ttft_ms": 30.0, "mean_decode_speed": 200.0}
    (tmp_path / "bench_summary.json").write_text(json.dumps({"results": results}))
    assert tools.of_lmcache(tmp_path) == expected
    exported = {"request_count": 4, "request_throughput": 2.0, "time_to_first_token": 30.0, "inter_token_latency": 5.0}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps({k: {"avg": v} for k, v in exported.items()}))
    assert tools.of_aiperf(tmp_path) == expected
    means = {name: {"successful": {"mean": value}} for name, value in
             {"time_to_first_token_ms": 30.0, "inter_token_latency_ms": 5.0}.items()}  # fmt: skip
    totals = {"request_totals": {"successful": 4, "errored": 0}}
    (tmp_path / "answer.json").write_text(json.dumps({"benchmarks": [{"duration": 2.0, "metrics": means | totals}]}))
    assert tools.of_guidellm(tmp_path) == expected


def test_a_tool_whose_requests_failed_has_no_figures(tmp_path: Path) -> None:
    script = "import pathlib; pathlib.Path('answer.json').write_text('{}')"
    tool = tools.Tool("t", "pip", ("-c", script), tools.of_serving, ())
    with pytest.raises(RuntimeError, match="wrote no figures"):
        tool.run(sys.executable, [], tmp_path)
    with pytest.raises(RuntimeError, match="ended with 3"):
        tools.Tool("t", "pip", ("-c", "raise SystemExit(3)"), tools.of_serving, ()).run(sys.executable, [], tmp_path)


def test_first_has_the_best_median_of_its_row(script: types.ModuleType) -> None:
    runs = [run(0, "memserve", requests_per_s=9.0, ttft_ms=10.0), run(1, "memserve", requests_per_s=1.0, ttft_ms=12.0)]
    runs += [run(2, "memserve", requests_per_s=3.0, ttft_ms=11.0), run(0, "vLLM", requests_per_s=4.0, ttft_ms=20.0)]
    text = script.page(record(*runs), {})
    assert "memserve is first in 1 of 2 rows (50%)" in text
    assert "| chat | aiperf | requests/s | 3.00 (1.00 to 9.00) | **4.00** |  | vLLM |" in text
    assert "| **11.0** (10.0 to 12.0) | 20.0 |  | memserve |" in text
    assert "requests/s: vLLM is 1.33 times as good. Not explained yet" in text


def test_lost_row_has_its_reason(script: types.ModuleType) -> None:
    runs = [run(0, "memserve", ttft_ms=10.0), run(0, "vLLM", ttft_ms=5.0)]
    text = script.page(record(*runs), {"plain/chat/aiperf/ttft_ms": "it computes in larger pieces."})
    assert "vLLM is 2.00 times as good. It computes in larger pieces." in text


def test_page_says_that_the_machine_was_busy(script: types.ModuleType) -> None:
    runs = [run(0, name, ttft_ms=1.0, others=0.4) for name in ("memserve", "vLLM")]
    assert "not quiet" in script.page(record(*runs), {})
    assert "not quiet" not in script.page(record(*(entry | {"others": 0.01} for entry in runs)), {})


def test_page_without_runs_says_why(script: types.ModuleType) -> None:
    assert script.page(record(note="Not on a quiet machine yet."), {}).endswith("\nNot on a quiet machine yet.\n")
    assert "rows" not in script.page(record(), {}).removeprefix(script.HEAD)


def test_failed_runs_stand_on_the_page(script: types.ModuleType) -> None:
    runs = [run(0, "memserve", ttft_ms=1.0), run(0, "vLLM", failed="Traceback\nValueError: a | b")]
    text = script.page(record(*runs), {})
    assert "* plain/chat/aiperf, vLLM, round 1: all: ValueError: a / b" in text
    assert "first in 0 of 0 rows." in text  # one server alone makes no row


def test_page_says_how_many_requests_failed(script: types.ModuleType) -> None:
    runs = [run(0, "memserve", ttft_ms=1.0, done=24), run(0, "vLLM", ttft_ms=1.0, done=22)]
    loads = {"plain/chat/aiperf": {"about": "", "is_timed": False, "requests": 24}}
    text = script.page(record(*runs, loads=loads), {})
    assert "* plain/chat/aiperf, vLLM, round 1: 2 of 24 requests; figures are of the others" in text
    assert "aiperf, memserve, round" not in text


def test_rate_of_requests_by_the_clock_is_no_row(script: types.ModuleType) -> None:
    runs = [run(0, name, ttft_ms=1.0, requests_per_s=1.5) for name in ("memserve", "vLLM")]
    timed = {"plain/chat/aiperf": {"about": "", "is_timed": True}}
    assert [row.field for row in script.rows_of(record(*runs, loads=timed))] == ["ttft_ms"]


@pytest.fixture(scope="module")
def short() -> types.ModuleType:
    return module("bench/short.py")


def steps_of(short: types.ModuleType, results: Path) -> list:
    args = argparse.Namespace(minutes=13.0, tools=Path("tools"), vllm="", llama_server="")
    return list(short.steps(args, results))


def test_short_studies_have_their_commands(short: types.ModuleType, tmp_path: Path) -> None:
    simulated = [step for step in steps_of(short, tmp_path) if step.is_simulated]
    assert [step.result for step in simulated] == list(short.STUDIES)
    for step in simulated:
        assert step.title.startswith("memserve sim ") and step.command[-4:-1] == [step.command[-4], "--json", "--out"]


def test_output_of_a_study_becomes_its_result(short: types.ModuleType, tmp_path: Path) -> None:
    simulated = short.Step(
        "memserve sim x", [sys.executable, "-c", "print('{\"points\": [1]}')"], "x", is_simulated=True
    )
    assert short.run_step(simulated, tmp_path) == ""
    assert json.loads((tmp_path / "x.json").read_text()) == {"points": [1], "command": "memserve sim x"}
    engine = short.Step("the engine", [sys.executable, "-c", 'print(\'{"model": 1}\\n{"name": 2}\')'], "engine")
    assert short.run_step(engine, tmp_path) == ""
    assert json.loads((tmp_path / "engine.json").read_text())["points"] == [{"name": 2}]


def test_what_fails_or_comes_late_is_left_out(short: types.ModuleType, tmp_path: Path) -> None:
    fails = short.Step("one", [sys.executable, "-c", "raise SystemExit(2)"], "one", is_written=True)
    silent = short.Step("two", [sys.executable, "-c", "print('no JSON')"], "two", is_simulated=True)
    reasons = short.run_all([fails, silent], tmp_path, time.monotonic(), 5.0)
    assert reasons[0] == "one: ended with 2" and reasons[1].startswith("two: printed no result")
    assert short.run_all([fails], tmp_path, time.monotonic() - 61, 1.0) == ["one: the time is over"]
    assert not list(tmp_path.iterdir())


def test_signal_while_a_server_starts_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def starting(code: object) -> object:
        def start(*_: object) -> object:
            raise SystemExit(code)

        return {"memserve": start}, {}

    args, model = argparse.Namespace(), contenders.Model("folder", "file")
    monkeypatch.setattr(contenders, "contenders", lambda *_: starting("it ended: no memory"))
    with contenders.started(args, model, tmp_path) as (ready, reasons):
        assert (ready, reasons) == ({}, {"memserve": "does not start: it ended: no memory"})
    monkeypatch.setattr(contenders, "contenders", lambda *_: starting(1))
    with pytest.raises(SystemExit), contenders.started(args, model, tmp_path):
        pass
