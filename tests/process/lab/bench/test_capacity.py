"""The capacity search: on servers that are formulas, and on one that really queues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_records import record
from instant_server import Asked, Script, instant_server
from memserve.cli.main import run
from memserve_lab.bench.capacity import Capacity, Probe, Search, backlog, judge, last_due_s, search, workload_at
from memserve_lab.bench.catalogue import Recipe
from memserve_lab.bench.load.prompts import RequestRecord, read_records
from memserve_lab.bench.metrics import Slo, figures
from memserve_lab.workloads.shape import Caps


def queue(rate: float, service_s: float, count: int = 120) -> list[RequestRecord]:
    """One server, even arrivals, one request after the other; the first token comes at the end."""
    records, free_s = [], 0.0
    for number in range(count):
        came_s = number / rate
        free_s = max(free_s, came_s) + service_s
        records.append(record(1e3 * came_s, (1e3 * free_s,), end_ms=1e3 * free_s, session=f"s{number}"))
    return records


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=30))
def test_backlog_counts_earlier_unfinished_requests(times: list[tuple[int, int]]) -> None:
    records = [
        RequestRecord(session="s", turn=0, scheduled_ns=came, end_ns=came + took) for came, took in sorted(times)
    ]
    expected = [
        sum(1 for other in records[:at] if (other.end_ns or 0) > one.scheduled_ns) - sum(
            1 for other in records[at:] if (other.end_ns or 0) <= one.scheduled_ns
        )
        for at, one in enumerate(records)
    ]  # fmt: skip
    assert backlog(records) == expected


def test_a_queue_below_capacity_is_bounded_and_above_is_not() -> None:
    assert judge(9, queue(9, 0.1), Slo(), 0).borne
    probe = judge(12, queue(12, 0.1), Slo(), 0)
    assert not probe.borne and "queue grows" in probe.why and probe.backlog_last > probe.backlog_middle


def test_the_slo_counts_too() -> None:
    assert judge(5, queue(5, 0.1), Slo(ttft_s=0.11), 0).borne
    probe = judge(5, queue(5, 0.1), Slo(ttft_s=0.09), 0.01)
    assert not probe.borne and "miss the SLO" in probe.why
    assert judge(5, queue(5, 0.1), Slo(ttft_s=0.09), 1.0).borne, "all may miss it"


@given(st.floats(0.05, 500), st.floats(0.01, 100), st.sampled_from([0.02, 0.1, 0.3]))
def test_the_search_brackets_the_limit(limit: float, start: float, precision: float) -> None:
    tried: list[float] = []

    def try_rate(rate: float) -> Probe:
        tried.append(rate)
        return Probe(rate, figures([]), 0, 0, rate <= limit, "")

    found = search("s", try_rate, start=start, precision=precision)
    assert found.rate is not None and found.rate <= limit
    assert min(rate for rate in tried if rate > limit) - found.rate <= precision * limit * 1.5
    assert [probe.rate for probe in found.probes] == tried


def test_the_search_finds_the_rate_of_a_queue() -> None:
    found = search("s", lambda rate: judge(rate, queue(rate, 0.1), Slo(ttft_s=0.5), 0.0), start=1, precision=0.05)
    assert found.rate == pytest.approx(10, rel=0.1)


def test_interrupted_search_keeps_its_results() -> None:
    answers = iter([Probe(1, figures([]), 0, 0, True, ""), None])
    found = search("s", lambda rate: next(answers), start=1)
    assert found == Capacity("s", 1, found.probes, "the search was ended early") and len(found.probes) == 1


def test_nothing_is_borne() -> None:
    found = search("s", lambda rate: Probe(rate, figures([]), 0, 0, False, "no"), start=1)
    assert found.rate is None and found.partial is None
    found = search("s", lambda rate: Probe(rate, figures([]), 0, 0, False, "no"), start=1, lowest=0.2)
    assert [probe.rate for probe in found.probes] == [1, 0.5, 0.25]


def test_a_low_rate_has_the_time_that_its_requests_need() -> None:
    """Two sessions at one request in four seconds take longer than a probe of two seconds."""
    plan = Search(Recipe(caps=Caps(turns_max=3)), Slo(), probe_s=2.0)
    workload = workload_at(plan, 0.25, seed=1)
    assert len(workload.sessions) == 2 and last_due_s(workload) > 2.0
    assert last_due_s(workload) == max(turn.due_s or 0 for one in workload.sessions for turn in one.turns)
    fast = workload_at(plan, 50.0, seed=1)
    assert 0.5 < last_due_s(fast) < 6.0, "about as long as a probe"


def test_the_command_draws_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server answers the first two rates that are tried, and refuses every request of the third."""
    pytest.importorskip("matplotlib", reason="matplotlib (extra: bench) is not installed")
    salts: dict[str, None] = {}  # each rate has its own, in the order that they are tried

    def script(asked: Asked) -> Script:
        salts.setdefault(asked.body["cache_salt"])
        return Script(status=429) if list(salts).index(asked.body["cache_salt"]) >= 2 else Script()

    with instant_server(script) as server:
        command = ["bench", "capacity", "--settings", "", "--base-url", f"fake={server.url}", "--out", str(tmp_path)]
        assert run([*command, "--start", "2", "--probe-s", "1", "--precision", "0.5", "--slo-ttft-ms", "60000"]) == 0
    (found,) = json.loads((tmp_path / "results.json").read_text())["found"]
    assert found["setting"] == "fake" and found["rate"] == 4
    assert [(probe["rate"], probe["borne"]) for probe in found["probes"]] == [(2, True), (4, True), (8, False)]
    assert "fake: 4.00 requests/s" in capsys.readouterr().out
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.md").read_text()
    assert "| fake |" in page and "(capacity.png)" in page and "100.0% of the requests miss the SLO" in page
    assert len(read_records(tmp_path / "records.jsonl.gz")) == sum(p["figures"]["requests"] for p in found["probes"])
