"""The load client against a server that answers as a test tells it to."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from instant_server import MODEL, Asked, InstantServer, Script, instant_server
from memserve.base.errors import UserError
from memserve.base.units import NS_PER_MS, NS_PER_S, ns_from_s
from memserve.cli.main import run as run_cli
from memserve_lab.bench.load.client import EventReader, Target, first_model
from memserve_lab.bench.load.driver import Driver, Labels, LoadRun, Progress, _seldom_collecting, drive
from memserve_lab.bench.load.prompts import Manner, Outcome, RecordWriter, RequestRecord, read_records
from memserve_lab.workloads.arrivals import Constant, by_session, closed_loop
from memserve_lab.workloads.records import Chat, History, Message, Session, Text, Turn, Workload
from memserve_lab.workloads.sessions import uniform_workload


def load(server: InstantServer, workload: Workload, manner: Manner | None = None, **options: object) -> LoadRun:
    target = Target(server.url, timeout_s=options.pop("timeout_s", 20.0))
    return drive(lambda: Driver(workload, target, manner or Manner(MODEL), **options))


def chats(*turns: Turn, history: History = History.CLOSED, sessions: int = 1) -> Workload:
    made = tuple(Session(f"s{number}", turns, "g", history) for number in range(sessions))
    return Workload("test", "here", made)


def says(text: str, **fields: object) -> Turn:
    return Turn(Chat((Message("user", text),)), 8, **fields)


# -- one request


@pytest.mark.parametrize("cut", [None, 1, 7])
def test_a_record_tells_everything(cut: int | None) -> None:
    with instant_server(lambda asked: Script(cut=cut)) as server:
        run = load(server, chats(says("Hello")), labels=Labels("mine", "w", 3))
    (record,) = run.records
    assert (record.session, record.turn, record.group) == ("s0", 0, "g")
    assert (record.setting, record.workload, record.seed) == ("mine", "w", 3)
    assert record.ok and record.http_status == 200 and record.error == ""
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 4, 3)
    assert record.instance == "p1 to d1"
    assert len(record.token_ns) == 3, "neither the role nor the end is a token"
    assert record.sent_ns is not None and record.first_ns is not None and record.end_ns is not None
    times = [record.scheduled_ns, record.sent_ns, record.first_ns, *record.token_ns, record.end_ns]
    assert times == sorted(times) and record.first_ns == record.token_ns[0]
    assert run.partial is None and run.wall_ns >= record.end_ns


def test_frozen_gc_objects_stay_frozen() -> None:
    gc.freeze()
    with _seldom_collecting():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with _seldom_collecting():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as it was (conftest.py)


def test_tokens_are_timed_as_they_come() -> None:
    """None before it was sent; and of some requests, for a busy machine reads late, each after its own pause."""
    pauses_s = [0.05, 0.1, 0.02]
    with instant_server(lambda asked: Script(pauses_s=pauses_s)) as server:
        records = [record for _ in range(5) for record in load(server, chats(says("Hello"))).records]
    sent_ms = list(accumulate(1000 * pause for pause in pauses_s))
    for record in records:
        told_ms = [(ns - record.scheduled_ns) / NS_PER_MS for ns in record.token_ns]
        assert record.first_ns == record.token_ns[0]
        assert all(told >= sent for told, sent in zip(told_ms, sent_ms, strict=True))
    gaps_ms = [[(after - before) / NS_PER_MS for before, after in pairwise(one.token_ns)] for one in records]
    assert any(95 <= first < 150 and 15 <= second < 70 for first, second in gaps_ms), gaps_ms


def test_chunks_count_where_the_server_does_not() -> None:
    with instant_server(lambda asked: Script(usage=None)) as server:
        (record,) = load(server, chats(says("Hello"))).records
    assert record.output_tokens == 3 and record.prompt_tokens is None and record.cached_tokens is None


def test_an_answer_without_text_has_a_first_moment() -> None:
    with instant_server(lambda asked: Script(pieces=[])) as server:
        (record,) = load(server, chats(says("Hello"))).records
    assert record.ok and record.first_ns is not None and record.token_ns == []


@pytest.mark.parametrize(
    ("script", "outcome", "status", "error"),
    [
        (Script(status=429, error="too many"), Outcome.REFUSED, 429, "too many"),
        (Script(error="lost"), Outcome.REFUSED, 200, "lost"),
        (Script(breaks_after=1), Outcome.BROKEN, 200, ""),
        (Script(pauses_s=[30]), Outcome.TIMEOUT, 200, "0.3 s"),
    ],
)
def test_failures_are_outcomes(script: Script, outcome: Outcome, status: int, error: str) -> None:
    with instant_server(lambda asked: script) as server:
        run = load(server, chats(says("Hello"), says("more")), timeout_s=0.3)
    (record,) = run.records
    assert (record.outcome, record.http_status) == (outcome, status)
    assert error in record.error and record.end_ns is not None
    assert run.partial is None, "the server still answers"


def test_request_fields_on_the_wire() -> None:
    with instant_server() as server:
        manner = Manner(MODEL, ignore_eos=True, extra={"top_k": 1})
        drive(lambda: Driver(chats(says("Hi", stop=("\n",))), Target(server.url + "/v1/", api_key="key"), manner))
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer key" and asked.headers["x-memserve-explain"] == "1"
    assert asked.body == {
        "model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "stop": ["\n"], "ignore_eos": True,
        "prompt_cache_key": "s0", "top_k": 1,
    }  # fmt: skip


def test_events_survive_every_cut() -> None:
    data = (
        b'event: x\r\ndata: {"choices":[{"text":"a\\u00e9"}]}\r\n\r\n: ping\n\ndata:{"choices":[]}\n\ndata: [DONE]\n\n'
    )
    whole = EventReader()
    expected = list(whole.read_events(data))
    assert [choice.news for event in expected for choice in event.choices] == ["aé"] and len(expected) == 2
    for at in range(len(data)):
        reader = EventReader()
        assert [*reader.read_events(data[:at]), *reader.read_events(data[at:])] == expected and reader.done


# -- sessions


def test_history_holds_the_answers_of_this_server() -> None:
    with instant_server() as server:
        load(server, chats(says("a"), says("b", answer="a recording, not sent")))
    first, second = (asked.body["messages"] for asked in server.asked)
    assert first == [{"role": "user", "content": "a"}]
    said = {"role": "assistant", "content": "One two three"}
    assert second == [*first, said, {"role": "user", "content": "b"}]


def test_given_prompts_are_sent_as_they_are() -> None:
    with instant_server() as server:
        load(server, chats(says("a"), says("b"), history=History.GIVEN))
    assert [asked.body["messages"][0]["content"] for asked in server.asked] == ["a", "b"]


def test_text_grows_by_answers_too() -> None:
    with instant_server() as server:
        load(server, chats(Turn(Text("Q1:"), 4), Turn(Text("\nQ2:"), 4)))
    assert [asked.body["prompt"] for asked in server.asked] == ["Q1:", "Q1:One two three\nQ2:"]
    assert all(asked.path == "/v1/completions" for asked in server.asked)


def test_lengths_become_token_ids() -> None:
    with instant_server() as server:
        load(server, uniform_workload(4, prompt_tokens=40, shared_tokens=25, output_tokens=5), Manner(MODEL, 500))
    prompts = [asked.body["prompt"] for asked in server.asked]
    assert all(len(prompt) == 40 and max(prompt) < 500 for prompt in prompts)
    assert len({tuple(prompt[:25]) for prompt in prompts}) == 1
    assert len({tuple(prompt[25:]) for prompt in prompts}) == 4
    assert all(asked.body["ignore_eos"] and asked.body["max_tokens"] == 5 for asked in server.asked)


def test_the_next_turn_waits_for_the_answer_and_the_thought() -> None:
    with instant_server(lambda asked: Script(pauses_s=[0.1, 0, 0])) as server:
        first, second = load(server, chats(says("a"), says("b", think_s=0.05))).records
    assert first.end_ns is not None and second.sent_ns is not None
    assert second.scheduled_ns == first.end_ns + 50 * NS_PER_MS
    assert second.sent_ns >= second.scheduled_ns


def test_a_turn_is_not_sent_before_it_is_due() -> None:
    with instant_server() as server:
        first, second = load(server, chats(says("a", due_s=0.05), says("b", due_s=0.2))).records
    assert (first.scheduled_ns, second.scheduled_ns) == (ns_from_s(0.05), ns_from_s(0.2))
    assert first.sent_ns is not None and first.sent_ns >= first.scheduled_ns


def test_a_failed_turn_ends_a_session_that_needs_its_answer() -> None:
    def script(asked: Asked) -> Script:
        return Script(status=500) if asked.body["messages"][-1]["content"] == "b" else Script()

    for history, sent in ((History.CLOSED, 2), (History.GIVEN, 3)):
        with instant_server(script) as server:
            run = load(server, chats(says("a"), says("b"), says("c"), history=history))
        assert len(run.records) == sent and run.planned == 3


# -- open and closed loop


def test_open_loop_does_not_wait_for_answers() -> None:
    """No answer before the last request came: a client that waits for one would hang here until its timeout."""
    count = 20

    def script(asked: Asked) -> Script:
        return Script(pauses_s=[0.0 if len(server.asked) >= count else 0.4, 0, 0])

    workload = by_session(
        uniform_workload(count, prompt_tokens=4, shared_tokens=0, output_tokens=3), Constant(200), seed=1
    )
    with instant_server(script) as server:
        run = load(server, workload)
    sent = [record.sent_ns for record in run.records]
    ends = [record.end_ns for record in run.records if record.end_ns is not None]
    assert len(server.asked) == count and max(s for s in sent if s is not None) < sorted(ends)[1]


def test_latency_counts_from_the_schedule() -> None:
    """The client stands still for a while, as under a crowd: what was due meanwhile counts as late."""

    class Stuck(Progress):
        def on_sent(self) -> None:
            super().on_sent()
            if self._under_way == 1 and not self._ended:
                threading.Event().wait(0.3)

    workload = by_session(uniform_workload(5, prompt_tokens=4, shared_tokens=0, output_tokens=3), Constant(100), seed=1)
    with instant_server() as server:
        run = load(server, workload, progress=Stuck(5))
    records = sorted(run.records, key=lambda record: record.scheduled_ns)
    assert [record.scheduled_ns for record in records] == [ns_from_s(0.01 * number) for number in range(1, 6)]
    assert all((record.sent_ns or 0) - record.scheduled_ns > 200 * NS_PER_MS for record in records)


def test_closed_loop_keeps_its_number() -> None:
    under_way: list[int] = []

    class Counting(Progress):
        def on_sent(self) -> None:
            super().on_sent()
            under_way.append(self._under_way)

    workload = closed_loop(uniform_workload(12, prompt_tokens=4, shared_tokens=0, output_tokens=3), users=3)
    with instant_server(lambda asked: Script(pauses_s=[0.01, 0, 0])) as server:
        run = load(server, workload, progress=Counting(12))
    assert len(run.records) == 12 and max(under_way) == 3
    assert all((record.sent_ns or 0) - record.scheduled_ns < NS_PER_S for record in run.records)


# -- ends


def test_measurements_are_kept_when_the_server_dies(tmp_path: Path) -> None:
    def script(asked: Asked) -> Script:
        if len(server.asked) == 6:
            server.close()
        return Script()

    workload = by_session(
        uniform_workload(4000, prompt_tokens=4, shared_tokens=0, output_tokens=3), Constant(50), seed=1
    )
    writer = RecordWriter(tmp_path / "records.jsonl.gz")
    with instant_server(script) as server:
        run = load(server, workload, writer=writer)
    writer.close()
    assert run.partial is not None and "is gone" in run.partial and run.planned == 4000
    assert sum(record.ok for record in run.records) >= 4
    assert any(record.outcome is Outcome.BROKEN for record in run.records)
    assert read_records(tmp_path / "records.jsonl.gz") == run.records


def test_time_is_up() -> None:
    with instant_server(lambda asked: Script(pauses_s=[0, 30, 0])) as server:
        run = load(server, chats(says("a")), limit_s=0.3)
    (record,) = run.records
    assert record.outcome is Outcome.STOPPED and len(record.token_ns) == 1
    assert run.partial is not None and "time is up" in run.partial


def test_run_that_ended_in_time_is_complete() -> None:
    with instant_server() as server:
        assert load(server, chats(says("a")), limit_s=20).partial is None


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    def script(asked: Asked) -> Script:
        if len(server.asked) == 5:
            os.kill(child.pid, signal.SIGINT)
        return Script()

    out = tmp_path / "run"
    with instant_server(script) as server:
        command = [sys.executable, "-m", "memserve", "bench", "load", "--base-url", server.url]
        child = subprocess.Popen(
            [*command, "--rate", "20", "--requests", "5000", "--out", str(out)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        printed, errors = child.communicate(timeout=60)
    said = [line for line in errors.splitlines() if not line.startswith("warning: the machine is busy: other programs")]
    assert child.returncode == 1 and said == []
    assert "partial: interrupted" in printed
    results = json.loads((out / "results.json").read_text())
    assert results["partial"] == "interrupted" and results["passes"][0]["planned"] == 5000
    assert sum(record.ok for record in read_records(out / "records.jsonl.gz")) >= 4


# -- files and words


def a_record(number: int) -> RequestRecord:
    return RequestRecord(session=f"s{number}", turn=0, scheduled_ns=number, token_ns=[1, 2], outcome=Outcome.OK)


def test_records_can_be_read_before_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    writer = RecordWriter(path)
    for number in range(2000):
        writer.write_record(a_record(number))
    found = read_records(path)
    assert 500 < len(found) < 2000, "the tail waits for the next flush"
    assert found == [a_record(number) for number in range(len(found))]
    writer.close()
    assert read_records(path) == [a_record(number) for number in range(2000)]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert read_records(path) == [a_record(number) for number in range(len(read_records(path)))]


@pytest.mark.parametrize(("data", "line"), [(b'{"session": 1}\n', "line 1"), (b"no json\n", "line 1")])
def test_files_of_something_else_are_refused(tmp_path: Path, data: bytes, line: str) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(data))
    with pytest.raises(UserError, match=line):
        read_records(path)
    path.write_bytes(data)
    with pytest.raises(UserError, match="cannot read"):
        read_records(path)


def test_progress_is_for_terminals_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shows in ((Terminal(), True), (io.StringIO(), False)):
        progress = Progress(4, "chat", stream)
        progress.on_sent()
        progress.on_ended(a_record(1), 3 * NS_PER_S)
        progress.close()
        assert ("1/4  0 under way  3.0 s" in stream.getvalue()) is shows
        assert bool(stream.getvalue()) is shows


def test_the_first_model_is_asked_for() -> None:
    with instant_server() as server:
        assert first_model(Target(server.url)) == MODEL
    with pytest.raises(UserError, match="cannot be reached"):
        first_model(Target(server.url))


@pytest.fixture
def server() -> Iterator[InstantServer]:
    with instant_server() as server:
        yield server


def test_command_prints_client_latencies(
    server: InstantServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["bench", "load", "--base-url", server.url, "--users", "2", "--requests", "10", "--out"]
    assert run_cli([*command, str(tmp_path / "first")]) == 0
    printed = capsys.readouterr().out
    assert "10 requests in" in printed and "TTFT" in printed and "cached 57.1%" in printed
    assert run_cli([*command, str(tmp_path / "second"), "--json", "--slo-ttft-ms", "0"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["found"]
    assert found["figures"]["requests"] == 10 and found["figures"]["slo_violations"] == 1
    assert set(found["intervals"]) == {f"{q} {s}" for q in ("ttft", "jct", "tpot") for s in ("mean", "p99")}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "give either --rate or --users"),
        (["--rate", "1", "--users", "1"], "give either --rate or --users"),
        (["--users", "1", "--shared-tokens", "500"], "cannot share 500"),
        (["--users", "1", "--base-url", "http://127.0.0.1:9"], "cannot be reached"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], error: str) -> None:
    assert run_cli(["bench", "load", *arguments]) == 1
    assert error in capsys.readouterr().err
