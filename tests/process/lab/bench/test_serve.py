"""Settings side by side: names, what is measured, the report and its plots; servers are fakes but for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_records import record
from instant_server import Asked, InstantServer, Script, instant_server
from memserve.base.errors import UserError
from memserve.cli.main import run
from memserve.model.loading import sources
from memserve_lab.bench import report_writer
from memserve_lab.bench.campaign import Plan, orders_of
from memserve_lab.bench.catalogue import build
from memserve_lab.bench.load.prompts import RequestRecord, read_records
from memserve_lab.bench.metrics import Slo
from memserve_lab.bench.results import Label, Pass, Results, sum_up
from memserve_lab.bench.serve import DRAWINGS, ServeReport
from memserve_lab.bench.servers import furthest, serving
from memserve_lab.bench.settings import (
    Size,
    levels_compared,
    parse_setting,
    parse_settings,
    parse_studies,
    policies_compared,
    settings_compared,
    transfer_compared,
)
from memserve_lab.experiments.memserve_paper import (
    CACHING,
    DISAGGREGATION,
    POLICY,
    beside_the_paper,
    compare,
    rankings,
    steps,
)
from tiny_models import VOCAB, save_folder, tiny_module

SMALL = ["--quick", "--rate", "200", "--sessions", "3", "--turns-max", "2", "--prompt-tokens-max", "200"]

# -- names


@pytest.mark.parametrize(
    ("text", "name", "count", "flags"),
    [
        ("PD", "2PD", 2, "--caching off --colocated 2"),
        ("3PD-CC", "3PD-CC", 3, "--caching pd-caching-3 --colocated 3"),
        ("1P1D", "1P1D", 2, "--caching off --prefill 1 --decode 1"),
        ("2P1D-CC1", "2P1D-CC1", 3, "--caching pd-caching-1 --prefill 2 --decode 1"),
        ("1P2D-CC2/session", "1P2D-CC2/session", 3, "--caching pd-caching-2 --prefill 1 --decode 2 --policy session"),
        ("1P1D/by-layer/cost", "1P1D/by-layer/cost", 2,
         "--caching off --prefill 1 --decode 1 --transfer by-layer --policy cost"),
    ],
)  # fmt: skip
def test_names_say_how_to_serve(text: str, name: str, count: int, flags: str) -> None:
    setting = parse_setting(text, 2)
    assert (setting.name, setting.instances, " ".join(setting.flags)) == (name, count, flags)
    assert setting.base_url is None


def test_another_server_is_a_setting() -> None:
    setting = parse_setting("vllm=http://127.0.0.1:9000", 2)
    assert (setting.name, setting.base_url, setting.flags) == ("vllm", "http://127.0.0.1:9000", ())


@pytest.mark.parametrize("text", ["PDD", "1P", "P1D", "1P1D-CC4", "PD/best", "PD,PD", "2PD,PD", "1p1d"])
def test_names_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_settings(text, 2)


# -- beside the paper


def results_of(*pairs: tuple[str, str, float], turns: int = 1) -> Results:
    """Workload, setting and TTFT in ms: four sessions each, of ``turns`` turns."""
    records: list[RequestRecord] = [
        record(0, (ms + at, ms + at + 30), workload=workload, setting=setting, session=f"s{at}", turn=turn)
        for workload, setting, ms in pairs
        for at in range(4)
        for turn in range(turns)
    ]
    passes = [Pass(workload, setting, 0, 4 * turns, 1.0) for workload, setting, _ in pairs]
    return sum_up(records, passes, Slo(ttft_s=0.1), "a command")


def test_steps_pair_what_the_paper_pairs() -> None:
    settings = ["2PD", "2PD-CC", "1P1D", "1P1D-CC3", "2P1D", "3P1D-CC/session", "3P1D-CC/prompt-tree"]
    found = {
        (s.name, s.before.setting, s.after.setting): s
        for s in steps(results_of(*(("documents", name, 100.0) for name in settings)))
    }
    assert set(found) == {
        (CACHING, "2PD", "2PD-CC"),
        (DISAGGREGATION, "2PD", "1P1D"),  # not 2P1D: it has an instance more
        (CACHING, "1P1D", "1P1D-CC3"),
        (POLICY, "3P1D-CC/session", "3P1D-CC/prompt-tree"),
    }
    assert found[CACHING, "1P1D", "1P1D-CC3"].paper["ttft mean"] == -0.562
    assert found[CACHING, "2PD", "2PD-CC"].paper == {}, "the paper gives no figure for it"
    assert found[POLICY, "3P1D-CC/session", "3P1D-CC/prompt-tree"].paper == {"ttft p99": -0.59}


def test_changes_are_relative() -> None:
    (step,) = steps(results_of(("react", "1P1D", 198.5), ("react", "1P1D-CC", 48.5)))
    assert step.changes["ttft mean"] == pytest.approx(-0.75)
    assert step.changes["tpot mean"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("documents", Label("documents")),
        ("documents x2.5", Label("documents", 2.5)),
        ("long chat at 0.75/s", Label("long chat", None, 0.75)),
        ("documents x2 at 1.5/s", Label("documents", 2.0, 1.5)),
    ],
)
def test_labels_say_what_is_varied(text: str, label: Label) -> None:
    assert Label.parse(text) == label and str(label) == text


def paired(before_ms: list[float], after_ms: list[float], name: str = "1P1D-CC") -> Results:
    """Sessions of one request each, the same ones before and after."""
    records = [
        record(0, (ms, ms + 30), workload="react", setting=setting, session=f"s{at}")
        for setting, times in (("1P1D", before_ms), (name, after_ms))
        for at, ms in enumerate(times)
    ]
    results = sum_up(records, [], Slo(), "a command")
    compare(results, records)
    return results


def page_of(results: Results) -> str:
    return "\n".join(line for table in beside_the_paper(results) for line in table.markdown_lines())


def test_pairs_of_sessions_tell_small_changes_apart() -> None:
    """Sessions differ by far more than the change; session by session it is always the same."""
    (one,) = (c for c in paired([100, 1000, 5000, 9000], [80, 800, 4000, 7200]).compared if c.name == "ttft mean")
    assert one.change == pytest.approx(-0.2) and one.interval == pytest.approx((-0.2, -0.2)) and one.is_told_apart
    (one,) = (c for c in paired([100, 110, 90, 100], [110, 100, 100, 95]).compared if c.name == "ttft mean")
    assert one.interval is not None and one.interval[0] < 0 < one.interval[1] and not one.is_told_apart


@pytest.mark.parametrize(
    ("after_ms", "says"),
    [
        ([50, 500, 2500], "falls, as the paper says"),
        ([150, 1500, 7500], "rises; 3 requests"),
        ([120, 900, 5100], "within noise; 3 requests"),
    ],
)
def test_verdicts(after_ms: list[float], says: str) -> None:
    page = page_of(paired([100, 1000, 5000], after_ms))
    assert says in page and "(-78.5%)" in page, "the paper's own figure stands beside"


def test_disaggregation_that_does_not_pay_says_why() -> None:
    page = page_of(results_of(("react", "2PD", 70.0), ("react", "1P1D", 90.0)))
    assert "see below" in page or "compared" in page
    assert "each with its share of the cores" in page


def test_orders_of_the_paper() -> None:
    levels = [("long chat", "1P1D-CC1", 90.0), ("long chat", "1P1D-CC2", 60.0), ("long chat", "1P1D-CC3", 50.0)]
    policies = [("documents x2", f"3PD-CC/{name}", ms) for name, ms in (("session", 50.0), ("prompt-tree", 70.0))]
    found = {(r.members[0].workload, r.judged): r for r in rankings(results_of(*levels, *policies))}
    assert set(found) == {("long chat", "ttft mean"), ("long chat", "jct mean"), ("documents x2", "ttft p99")}
    caching, policy = found["long chat", "ttft mean"], found["documents x2", "ttft p99"]
    assert [f.setting for f in caching.members] == ["1P1D-CC3", "1P1D-CC2", "1P1D-CC1"] and caching.holds
    assert [f.setting for f in policy.members] == ["3PD-CC/prompt-tree", "3PD-CC/session"] and not policy.holds


def test_ranking_holds_iff_aggregated_transfer_is_best() -> None:
    modes = ["by-request-agg", "by-layer", "by-request"]
    for times, holds in (((50.0, 90.0, 70.0), True), ((50.0, 70.0, 90.0), True), ((60.0, 50.0, 90.0), False)):
        pairs = [("uniform at 2/s", f"1P1D/{mode}", ms) for mode, ms in zip(modes, times, strict=True)]
        (order,) = rankings(results_of(*pairs))
        assert (order.name, order.judged, order.holds) == ("transfer", "jct mean", holds)
    assert "| uniform at 2/s | 1P1D/by-layer | 82 |" in page_of(results_of(*pairs)), "first token, then 30 ms"


# -- the plan


def plan(**fields: object) -> Plan:
    size = Size(sessions=2, turns_max=2, prompt_tokens_max=100, output_tokens_max=4, rates=(5.0,))
    two = parse_settings("a=http://one,b=http://two", 2)
    first = settings_compared(two, "sharegpt,loogle", (1.0,), size, None)
    second = settings_compared(two[:1], "react", (1.0, 2.0), size, None)
    return Plan((first, second), **fields)


def test_passes_are_interleaved_and_every_seed_begins_elsewhere() -> None:
    orders = [(order.seed, order.label, order.setting.name) for order in orders_of(plan(seeds=(0, 1)))]
    assert orders[:6] == [
        (0, "chat", "a"), (0, "chat", "b"), (0, "documents", "a"), (0, "documents", "b"),
        (0, "react x1", "a"), (0, "react x2", "a"),
    ]  # fmt: skip
    assert orders[6:8] == [(1, "chat", "b"), (1, "chat", "a")] and len(orders) == 12


@pytest.mark.parametrize(
    ("names", "coming", "victim"),
    [("ab", "abab", "b"), ("ab", "b", "a"), ("abc", "cab", "b"), ("ab", "", "a"), ("abc", "aabb", "c")],
)
def test_server_with_furthest_next_pass_is_evicted(names: str, coming: str, victim: str) -> None:
    assert furthest(names, coming) == victim


def test_studies_by_name() -> None:
    assert parse_studies("policies, settings") == ("settings", "policies")
    with pytest.raises(UserError, match="unknown study 'poems'"):
        parse_studies("poems")
    size = Size(sessions=3, turns_max=6, prompt_tokens_max=4096, output_tokens_max=96, rates=(0.8,))
    (long,) = levels_compared(size, None).recipes.values()
    assert {len(session.turns) for session in build(long).sessions} == {6}
    study = policies_compared(size, None)
    assert [s.name.rpartition("/")[2] for s in study.settings] == ["least-load", "session", "prompt-tree"]
    assert [len(build(recipe).sessions) for recipe in study.recipes.values()] == [3, 6, 12]
    assert all(s.flags[:6] == ("--caching", "pd-caching-3", "--prefill", "3", "--decode", "1") for s in study.settings)


def test_figure_12_has_one_length_per_rate_and_transfer_mode() -> None:
    size = Size(sessions=8, turns_max=1, prompt_tokens_max=1024, output_tokens_max=32, rates=(0.5, 2.0))
    found = transfer_compared(size)
    assert [s.flags[-1] for s in found.settings] == ["by-layer", "by-request", "by-request-agg", "auto"]
    assert list(found.recipes) == ["uniform at 0.5/s", "uniform at 2/s"]
    for recipe in found.recipes.values():
        workload = build(recipe)
        turns = [turn for session in workload.sessions for turn in session.turns]
        assert len(turns) == 8 and {turn.output_tokens_max for turn in turns} == {32}
        assert {turn.says.tokens for turn in turns} == {1024}
        blocks = [block for turn in turns for block in turn.says.ids()]
        assert len(set(blocks)) == len(blocks), "no prompt shares anything"


def test_labels_name_rates_and_ratios_that_vary() -> None:
    size = Size(sessions=2, turns_max=1, prompt_tokens_max=64, output_tokens_max=2, rates=(1.0, 2.0))
    settings = parse_settings("PD", 2)
    assert list(settings_compared(settings, "sharegpt", (1.0,), size, None).recipes) == ["chat at 1/s", "chat at 2/s"]
    both = settings_compared(settings, "loogle", (1.0, 2.0), size, None).recipes
    assert list(both) == [f"documents x{ratio} at {rate}/s" for ratio in (1, 2) for rate in (1, 2)]
    assert [(recipe.share_ratio, recipe.requests_per_s) for recipe in both.values()] == [(1, 1), (1, 2), (2, 1), (2, 2)]


# -- the report


def test_report_shows_all_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra: bench) is not installed")
    names = [
        ("documents x1", "1P1D", 90.0),
        ("documents x2", "1P1D", 80.0),
        ("chat", "2PD", 70.0),
        ("chat", "2PD-CC", 35.0),
    ]
    ServeReport(results_of(*names, turns=2)).write_report(tmp_path)
    page = (tmp_path / "report.md").read_text()
    for name in ("settings", "turns", "figure-14"):
        assert f"({name}.png)" in page
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    assert "(figure-7.png)" not in page, "the page names a plot that was not drawn"
    assert "| 2PD | 8 | 0 | 71.5 |" in page and "| chat | caching: 2PD to 2PD-CC | -49% |" in page
    assert "TTFT <= 100 ms" in page and "Partial" not in page


def test_bars_are_as_high_as_the_figures() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib (extra: bench) is not installed")
    figure = DRAWINGS["settings"].draw(pyplot, results_of(("chat", "2PD", 70.0), ("chat", "2PD-CC", 35.0)))
    assert figure is not None
    ttft = figure.axes[0]
    assert [bar.get_height() for bar in ttft.patches] == pytest.approx([71.5, 72.97, 36.5, 37.97])
    assert ttft.get_title() == "chat, 4 requests each" and "(ms)" in ttft.get_ylabel()
    assert [tick.get_text() for tick in ttft.get_xticklabels()] == ["2PD", "2PD-CC"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mean", "P99"]
    assert len(ttft.containers) >= 4 + 4, "a bar and an error bar each"
    pyplot.close(figure)


def test_figure_8_has_a_line_over_the_rates_for_every_setting() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib (extra: bench) is not installed")
    settings = [(f"{kind} at {rate}/s", setting, 50.0 * rate) for kind in ("chat", "react") for rate in (1, 2, 4)
                for setting in ("2PD", "1P1D-CC")]  # fmt: skip
    transfers = [(f"uniform at {rate}/s", f"1P1D/{mode}", 50.0 * rate) for rate in (1, 2)
                 for mode in ("by-layer", "by-request", "by-request-agg")]  # fmt: skip
    results = results_of(*settings, *transfers)
    figure = DRAWINGS["figure-8"].draw(pyplot, results)
    assert [axes.get_title() for axes in figure.axes] == ["chat"] * 3 + ["react"] * 3
    ttft = figure.axes[0]
    mean = next(line for line in ttft.get_lines() if line.get_linestyle() == "-")
    assert list(mean.get_xdata()) == [1, 2, 4] and list(mean.get_ydata()) == pytest.approx([51.5, 101.5, 201.5])
    names = [f"{name}: {statistic}" for name in ("2PD", "1P1D-CC") for statistic in ("mean", "P99")]
    assert [text.get_text() for text in figure.axes[2].get_legend().get_texts()] == names
    assert "rate" in ttft.get_xlabel() and "(ms)" in ttft.get_ylabel()
    pyplot.close(figure)
    figure = DRAWINGS["figure-12"].draw(pyplot, results)
    assert [axes.get_title() for axes in figure.axes] == ["uniform"] * 3
    assert len(figure.axes[2].get_legend().get_texts()) == 6
    pyplot.close(figure)
    assert DRAWINGS["settings"].draw(pyplot, results) is None, "bars are for one rate"
    assert DRAWINGS["figure-8"].draw(pyplot, results_of(("chat", "2PD", 70.0))) is None, "lines are for several"


def test_without_matplotlib_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_writer, "can_draw", lambda: False)
    ServeReport(results_of(("chat", "2PD", 70.0))).write_report(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "matplotlib is not installed" in page and ".png" not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "results.json"]


# -- the command


def bench(*arguments: str) -> int:
    return run(["bench", "serve", *SMALL, *arguments])


def at(server: InstantServer, name: str) -> list[str]:
    return ["--base-url", f"{name}={server.url}"]


def test_all_settings_get_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with instant_server() as one, instant_server() as other:
        servers = [*at(one, "one"), *at(other, "other")]
        assert bench("--settings", "", *servers, "--seeds", "2", "--workload", "sharegpt", "--out", str(tmp_path)) == 0
    said = capsys.readouterr()
    assert [line.split(",")[0] for line in said.err.splitlines()] == ["1/4 one", "2/4 other", "3/4 other", "4/4 one"]
    asked = [sorted(json.dumps(a.body, sort_keys=True) for a in server.asked) for server in (one, other)]
    assert asked[0] == asked[1], "warm-up and workloads alike"
    salts = {a.body["cache_salt"] for a in one.asked if "cache_salt" in a.body}
    assert len(salts) == 2, "a salt a pass: none finds the cache of another seed"
    assert all(a.body["prompt_cache_key"].startswith(tuple(salts)) for a in one.asked if "cache_salt" in a.body)
    results = json.loads((tmp_path / "results.json").read_text())
    assert {(p["setting"], p["seed"]) for p in results["passes"]} == {(s, n) for s in ("one", "other") for n in (0, 1)}
    records = read_records(tmp_path / "records.jsonl.gz")
    assert {r.workload for r in records} == {"chat"} and {r.seed for r in records} == {0, 1}
    assert sum(p["planned"] for p in results["passes"]) == len(records)
    assert "(figure-7.png)" in (tmp_path / "report.md").read_text()


def test_several_rates_are_passes_of_one_run(tmp_path: Path) -> None:
    with instant_server() as server:
        sizes = ["--sessions", "3", "--turns-max", "2", "--prompt-tokens-max", "200", "--seeds", "1"]
        command = ["bench", "serve", "--quick", *sizes, "--settings", "", *at(server, "one"), "--workload", "react"]
        assert run([*command, "--rate", "100,400", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [one["workload"] for one in results["passes"]] == ["react at 100/s", "react at 400/s"]
    last_ns = {
        label: max(r.scheduled_ns for r in read_records(tmp_path / "records.jsonl.gz") if r.workload == label)
        for label in ("react at 100/s", "react at 400/s")
    }
    assert last_ns["react at 100/s"] > 2 * last_ns["react at 400/s"]
    page = (tmp_path / "report.md").read_text()
    assert "## react\n" in page and "| one | 100 |" in page and "| one | 400 |" in page


def test_runs_beyond_the_time_limit_are_skipped_and_named(tmp_path: Path) -> None:
    with instant_server(lambda asked: Script(pauses_s=[0.05, 0, 0])) as server:
        command = ["--settings", "", *at(server, "one"), "--workload", "react", "--seeds", "50"]
        assert bench(*command, "--minutes", "0.02", "--out", str(tmp_path)) == 0, "whole rounds: not partial"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["partial"] is None and 1 <= len(results["passes"]) < 50
    assert any("left out" in note for note in results["notes"])


def test_a_server_that_dies_leaves_a_partial_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with instant_server() as one, instant_server() as other:

        def script(asked: Asked) -> Script:
            if len(other.asked) == 7:
                other.close()
            return Script()

        other.script = script
        servers = [*at(one, "one"), *at(other, "other")]
        assert bench("--settings", "", *servers, "--workload", "react", "--sessions", "40", "--out", str(tmp_path)) == 1
    page = (tmp_path / "report.md").read_text()
    assert "**Partial:**" in page and "is gone" in page
    assert "| one |" in page and read_records(tmp_path / "records.jsonl.gz")
    assert json.loads((tmp_path / "results.json").read_text())["partial"] is not None
    assert "partial:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--settings", "1P1P"], "1P1P"),
        (["--workload", "novels"], "novels"),
        (["--share-ratio", "two"], "two"),
        (["--rate", "1,fast"], "1,fast"),
        (["--rate", "0"], "'0'"),
        (["--studies", "poems"], "poems"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--data", "/no/such"], "/no/such"),
    ],
)
def test_wrong_usage_is_said_at_once(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    error: str,
) -> None:
    """Before the bundled model is converted, which may take a minute."""
    monkeypatch.setattr(sources, "converted_folder", lambda path, dtype: pytest.fail("the model is opened"))
    assert bench(*arguments, "--out", str(tmp_path / "run")) == 1
    assert error in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(UserError, match="unknown policy 'best'"), serving(["--policy", "best"]):
        raise AssertionError("it must not get here")


def test_our_own_server_is_started_measured_and_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_folder(tiny_module("llama"), tmp_path / "llama")
    own = f"--settings 1PD-CC --model {folder} --workload trace --prompt-tokens-max 100 --output-tokens-max 3 --seeds 2"
    flags = "--dtype float32 --kv-memory 8MiB"
    command = [*own.split(), "--vocab-size", str(VOCAB), "--serve-flags", flags, "--out", str(tmp_path / "run")]
    assert bench(*command) == 0
    assert capsys.readouterr().err.count("is ready after") == 1, "one start for all seeds"
    (found,) = json.loads((tmp_path / "run" / "results.json").read_text())["found"]
    assert found["setting"] == "1PD-CC" and found["figures"]["failed"] == 0
    records = read_records(tmp_path / "run" / "records.jsonl.gz")
    assert records and all(r.ok and r.cached_tokens is not None and r.instance for r in records)
