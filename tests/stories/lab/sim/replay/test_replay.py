"""Workloads on simulated clusters (``memserve_lab.sim.replay``): nothing is lost, nothing is by chance, times add
up."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.config import ClusterConfig, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import Caching, Role, TransferMode, TransferPolicy
from memserve.base.units import NS_PER_MS
from memserve.cli.main import run
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.hardware import DEVICES, MODELS, Machine, machine
from memserve_lab.sim.replay.scripts import Frame, Script, fast_tokens
from memserve_lab.sim.replay.setup import Fault, Setup, Surroundings, parse_faults, parse_instances
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Blocks, Chat, History, Message, Session, Span, Text, Turn, Workload
from memserve_lab.workloads.tokens import ByteMeter
from places import ROOT, SUPPORT

H100 = machine("llama-3-8b", "h100")
SMALL = dataclasses.replace(H100, hbm_blocks=200, context_tokens=4000)
AROUND = Surroundings(front_ns=0, back_ns=0, message_ns=0)


def blocks_workload(rows: list[tuple[float, int, int, int]], **fields: object) -> Workload:
    """One session a row: due, first block, tokens, output tokens."""
    sessions = tuple(
        Session(f"s{at}", (Turn(Blocks(16, (Span(first, tokens),)), out, due_s=due),), history=History.GIVEN)
        for at, (due, first, tokens, out) in enumerate(rows)
    )
    return Workload("blocks", "test", sessions, **fields)


def chats(count: int, turns: int) -> Workload:
    sessions = tuple(
        Session(
            f"chat-{number}",
            tuple(
                Turn(Chat((Message("user", f"question {turn} of {number}: " + "word " * 40),)), 20, due_s=0.1 * number)
                for turn in range(turns)
            ),
        )
        for number in range(count)
    )
    return Workload("chat", "test", sessions)


def played(setup: Setup, workload: Workload) -> ReplayWorld:
    world = ReplayWorld(setup, workload)
    world.run_workload()
    for node in (world.router, *world.instances):
        node.machine.check_invariants()
    return world


def outcome(world: ReplayWorld) -> list[tuple[object, ...]]:
    """Everything that a client saw."""
    return [
        (s.session, s.turn, s.scheduled_ns, s.prompt_tokens, s.first_ns, list(s.token_ns), s.end_ns, s.cached_tokens,
         s.instance, s.finish, s.error)
        for s in world.clients.served
    ]  # fmt: skip


# -- closed forms


def test_a_lone_request_takes_what_the_curves_say() -> None:
    """Its first token after one step over the prompt; the others a decode step each, context growing by one."""
    setup = Setup({Role.COLOCATED: 1}, dataclasses.replace(H100, roof=None), around=AROUND)
    served = played(setup, blocks_workload([(0.0, 1, 1000, 50)])).clients.served[0]
    costs = H100.costs
    assert served.first_ns == costs.prefill_ns(1000, 0)
    steps = np.diff(np.array(served.token_ns))
    assert steps.tolist() == [costs.decode_step_ns(1, 1000 + number) for number in range(1, 50)]
    assert served.end_ns == served.token_ns[-1] and served.answered


def test_a_cached_prefix_is_not_computed_again() -> None:
    """The whole blocks of the second prompt are there: only what is behind them is paid for."""
    setup = Setup({Role.COLOCATED: 1}, dataclasses.replace(H100, roof=None), around=AROUND)
    rows = [(0.0, 1, 1000, 5), (5.0, 1, 1000, 5)]
    cold, warm = played(setup, blocks_workload(rows)).clients.served
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 992)
    assert warm.first_ns is not None
    assert warm.first_ns - warm.scheduled_ns == H100.costs.prefill_ns(8, 992)


def test_a_handoff_pays_for_its_bytes() -> None:
    """Without caches the second token waits until the KV of the prompt has come: twice as long on half the link."""
    waits = []
    for scale in (1.0, 2.0):
        link = dataclasses.replace(H100.costs.network, byte_ns=H100.costs.network.byte_ns * scale, start_ns=0.0)
        costs = dataclasses.replace(H100.costs, network=link)
        setup = Setup(
            {Role.PREFILL: 1, Role.DECODE: 1}, dataclasses.replace(H100, costs=costs),
            ClusterConfig(Caching.OFF, "cost", TransferPolicy.BY_REQUEST_AGG), around=AROUND,
        )  # fmt: skip
        served = played(setup, blocks_workload([(0.0, 1, 4096, 5)])).clients.served[0]
        waits.append(served.token_ns[1] - served.token_ns[0])
    moved_ns = 4096 * H100.geometry.token_bytes * H100.costs.network.byte_ns
    assert waits[1] - waits[0] == pytest.approx(moved_ns, rel=0.02)


@pytest.mark.parametrize("link_share", [0.5, 3.0])
def test_by_layer_hides_the_transfer_behind_the_prefill(link_share: float) -> None:
    """``link_share``: how long the prompt's KV is on its way, beside the time of its prefill. By request all of it is
    waited for; by layer only what the prefill was too short for, and the last layer."""
    tokens = 4096
    prefill_ns = H100.costs.prefill_ns(tokens, 0)
    byte_ns = link_share * prefill_ns / (tokens * H100.geometry.token_bytes)
    link = dataclasses.replace(H100.costs.network, start_ns=0.0, piece_ns=0.0, byte_ns=byte_ns)
    costs = dataclasses.replace(H100.costs, network=link, report_ns=0.0)
    hardware = dataclasses.replace(H100, roof=None, costs=costs)
    scheduler = SchedulerConfig(8, 8192, 8192)
    waits = {}
    for mode in TransferMode:
        cluster = ClusterConfig(Caching.OFF, "cost", TransferPolicy(mode.value))
        setup = Setup({Role.PREFILL: 1, Role.DECODE: 1}, hardware, cluster, scheduler, AROUND)
        served = played(setup, blocks_workload([(0.0, 1, tokens, 5)])).clients.served[0]
        assert served.first_ns == prefill_ns and served.answered
        waits[mode] = served.token_ns[1] - served.token_ns[0] - H100.costs.decode_step_ns(1, tokens)
    moved_ns = link_share * prefill_ns
    layer_ns = max(moved_ns, prefill_ns) / H100.geometry.num_layers
    expected_ns = max(0.0, moved_ns - prefill_ns) + layer_ns
    for mode in (TransferMode.BY_REQUEST, TransferMode.BY_REQUEST_AGG):
        assert waits[mode] == pytest.approx(moved_ns, rel=0.1)
    assert waits[TransferMode.BY_LAYER] == pytest.approx(expected_ns, abs=2 * layer_ns + 0.05 * moved_ns)


def test_by_layer_is_refused_without_layer_end_reports() -> None:
    with pytest.raises(UserError, match="by-layer") as caught:
        Setup({Role.PREFILL: 1, Role.DECODE: 1}, H100, ClusterConfig(transfer=TransferPolicy.BY_LAYER),
              around=Surroundings(beside=(0.5, 0.5)))  # fmt: skip
    assert "by-request-agg" in (caught.value.hint or "")


def test_two_pulls_share_a_link() -> None:
    """Two handoffs from one instance at once take twice as long as one."""
    from memserve_lab.sim.links import Fabric

    clock, ends = Clock(), {}
    fabric = Fabric(clock)
    fabric.start_flow("a", "b", 1000, lambda: ends.setdefault("first", clock.now))
    clock.call_at(500, fabric.start_flow, "a", "c", 1000, lambda: ends.setdefault("second", clock.now))
    fabric.start_flow("d", "e", 700, lambda: ends.setdefault("alone", clock.now))
    while clock.run_one():
        pass
    assert ends == {"alone": 700, "first": 1500, "second": 2000}


def test_processes_of_one_host_slow_each_other() -> None:
    """Two at half and at a quarter of their speed, each alone at full speed again; four share what two get."""
    from memserve_lab.sim.clock import Clock, Cores

    clock, ends = Clock(), {}
    cores = Cores(clock)
    cores.start_job(1000, 0.5, lambda: ends.setdefault("prefill", clock.now))
    cores.start_job(1000, 0.25, lambda: ends.setdefault("decode", clock.now))
    while clock.run_one():
        pass
    assert ends == {"prefill": 2000, "decode": 2000 + 500}  # the last half of it alone
    for name in range(4):
        cores.start_job(1000, 0.4, lambda name=name: ends.setdefault(name, clock.now))
    while clock.run_one():
        pass
    assert [ends[name] for name in range(4)] == [2500 + 5000] * 4


def test_the_roof_is_the_longer_of_arithmetic_and_memory() -> None:
    roof = H100.roof
    assert roof is not None
    alone, crowd = roof.step_ns(0, 0, 1, 0), roof.step_ns(0, 0, 64, 0)
    assert alone == crowd  # reading the weights hides the arithmetic of a few rows
    assert roof.step_ns(8192, 0, 0, 0) - roof.step_ns(4096, 0, 0, 0) == pytest.approx(
        4096 * roof.token_flops / roof.flops * 1e9, rel=1e-6
    )
    assert roof.step_ns(0, 0, 1, 10_000) > alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_fits_on_enough_devices(model: str, device: str) -> None:
    """Or it is said how many it takes."""
    try:
        found = machine(model, device)
    except UserError as error:
        count = int((error.hint or "").rpartition("x")[2])
        found = machine(model, device, count)
    assert found.hbm_blocks >= 2 and found.costs.prefill_ns(100, 0) > 0


# -- nothing is lost, nothing is by chance

requests = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 40), st.integers(1, 600), st.integers(1, 60)), min_size=1, max_size=12
)


@given(rows=requests, mix=st.sampled_from(["1", "2", "prefill=1,decode=2", "prefill=2,decode=1,colocated=1"]),
       policy=st.sampled_from(["least-load", "session", "prompt-tree", "cost"]), caching=st.sampled_from(list(Caching)),
       blocks=st.integers(30, 200), transfer=st.sampled_from(list(TransferPolicy)),
       tpot_ns=st.none() | st.integers(5, 12).map(lambda ms: ms * NS_PER_MS))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_fast_forward_changes_nothing_that_a_client_sees(rows, mix, policy, caching, blocks, transfer, tpot_ns) -> None:
    """Every request ends with its full length, the same with and without many steps in one go."""
    instance = dataclasses.replace(SMALL, hbm_blocks=blocks)
    setup = Setup(
        parse_instances(mix),
        instance,
        ClusterConfig(caching, policy, transfer),
        SchedulerConfig(8, 256, 128, scheduling="fcfs" if tpot_ns is None else "slo", slo_tpot_ns=tpot_ns),
        Surroundings(),
    )
    workload = blocks_workload(rows)
    skipped = played(setup, workload)
    walked = played(dataclasses.replace(setup, fast_forwards=False), workload)
    assert outcome(skipped) == outcome(walked)
    assert len(skipped.clients.served) == len(rows) == sum(s.answered for s in skipped.clients.served)
    for served, (_, _, tokens, out) in zip(
        sorted(skipped.clients.served, key=lambda s: int(s.session[1:])), rows, strict=True
    ):
        assert (served.prompt_tokens, len(served.token_ns)) == (tokens, out)
        assert list(served.token_ns) == sorted(served.token_ns) and served.end_ns is not None
        assert served.scheduled_ns < served.token_ns[0] and served.token_ns[-1] <= served.end_ns


def test_turns_wait_for_answers_and_contain_them() -> None:
    """Causal order: each prompt is the one before, its answer, and what is new; the KV of all that is still there."""
    world = played(Setup({Role.COLOCATED: 1}, H100), chats(6, 4))
    by_session: dict[str, list] = {}
    for served in world.clients.served:
        by_session.setdefault(served.session, []).append(served)
    for turns in by_session.values():
        assert [served.turn for served in turns] == [0, 1, 2, 3]
        for before, after in itertools.pairwise(turns):
            assert after.scheduled_ns >= before.end_ns
            assert after.prompt_tokens > before.prompt_tokens + 20
            assert after.cached_tokens >= (before.prompt_tokens + 20) // 32 * 32 - 32


def test_a_closed_loop_keeps_its_users_busy_and_no_more() -> None:
    rows = [(0.0, 1 + 50 * at, 200, 10) for at in range(20)]
    served = played(Setup({Role.COLOCATED: 1}, H100), blocks_workload(rows, users=3)).clients.served
    assert len(served) == 20
    for at, one in enumerate(served):
        active = sum(other.scheduled_ns <= one.scheduled_ns < (other.end_ns or 0) for other in served)
        assert active == (3 if at < 19 else 2)  # nobody is left to take the place of the last but one


@pytest.mark.parametrize("kind", ["kill", "pause", "slow"])
def test_faults_lose_no_request(kind: str) -> None:
    """An instance is killed and comes back, sleeps, or is slow: every answer still has its full length."""
    rows = [(0.1 * at, 1 + 40 * at, 300, 40) for at in range(30)]
    healthy = Setup({Role.COLOCATED: 2}, H100)
    faulty = dataclasses.replace(healthy, faults=(Fault(kind, "c0", 1.0, 1.5, 5.0),))
    calm, hurt = (played(setup, blocks_workload(rows)).clients.served for setup in (healthy, faulty))
    assert all(served.answered and len(served.token_ns) == 40 for served in hurt)
    assert sum(s.end_ns - s.scheduled_ns for s in hurt) > sum(s.end_ns - s.scheduled_ns for s in calm)


@given(
    kind=st.sampled_from(["kill", "pause", "slow"]), at_s=st.floats(0.05, 3.5), for_s=st.floats(0.2, 8.0),
    mix=st.sampled_from(["2", "3", "prefill=1,decode=2,colocated=1"]), limit_s=st.none() | st.floats(0.1, 6.0),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_fast_forward_changes_nothing_when_something_goes_wrong(kind, at_s, for_s, mix, limit_s) -> None:
    """What the router has heard of an instance by its death, and what clients have when time is up, is the same though
    tokens are held: answers go on elsewhere from the very token that they had come to."""
    setup = Setup(parse_instances(mix), SMALL, faults=(Fault(kind, "c0", at_s, for_s, 5.0),))
    rows = [(0.1 * at, 1 + 40 * (at % 7), 100 + 20 * at, 40 + 10 * at) for at in range(30)]
    worlds = [
        ReplayWorld(dataclasses.replace(setup, fast_forwards=skips), blocks_workload(rows)) for skips in (True, False)
    ]
    for world in worlds:
        world.run_workload(limit_s)
    assert outcome(worlds[0]) == outcome(worlds[1])


def test_too_long_a_prompt_is_refused() -> None:
    served = played(
        Setup({Role.COLOCATED: 1}, SMALL), blocks_workload([(0.0, 1, 5000, 3), (0.0, 900, 50, 3)])
    ).clients.served
    assert sorted(bool(s.error) for s in served) == [False, True]


STORY = """
import hashlib, test_replay as t
setup = t.Setup(t.parse_instances("prefill=2,decode=2"), t.SMALL, faults=(t.Fault("kill", "p0", 0.5, 1.0),))
world = t.played(setup, t.blocks_workload([(0.03 * at, 1 + at % 5, 100 + 7 * at, 20) for at in range(60)]))
print(hashlib.sha256(repr(t.outcome(world)).encode()).hexdigest(), world.clock.steps)
"""


def test_another_process_and_another_hash_seed_see_the_same() -> None:
    """Down to the nanosecond, faults included."""
    found = []
    here = os.pathsep.join(map(str, (Path(__file__).parent, SUPPORT, ROOT / "src", ROOT / "lab")))
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": here}
        done = subprocess.run(
            [sys.executable, "-c", STORY], check=True, env=environment, capture_output=True, text=True
        )
        found.append(done.stdout)
    assert found[0] == found[1] and len(found[0]) > 64


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 20)), st.integers(0, 9)), max_size=8))
def test_moments_of_a_row_come_as_if_posted_one_by_one(steps) -> None:
    """Rows and single calls, posted at several times: the same calls at the same times in the same order."""

    def order(post: Callable[[Clock, list[int], Callable[..., None]], None]) -> list[tuple[int, ...]]:
        clock, made = Clock(), []
        for nth, (after_ns, row, single) in enumerate(steps):
            clock.run_until(clock.now + after_ns)
            post(
                clock,
                sorted(row),
                lambda *told: made.append((clock.now, *told)) or clock.call_after(1, made.append, (told,)),
            )
            clock.call_at(single, lambda nth=nth: made.append((clock.now, nth)))
        while clock.run_one():
            pass
        return [*made, (clock.steps, clock.now)]

    def one_by_one(clock: Clock, row: list[int], do: Callable[..., None]) -> None:
        for nth, when_ns in enumerate(row):
            clock.call_at(when_ns, do, nth, when_ns)

    def as_row(clock: Clock, row: list[int], do: Callable[..., None]) -> None:
        clock.at_each(((when_ns, (nth, when_ns)) for nth, when_ns in enumerate(row)), do)

    assert order(one_by_one) == order(as_row)


# -- words


def test_replay_run_leaves_no_reference_cycles() -> None:
    """So no collector searches during a run (``cli.sim_results.simulate``), and its memory is that of the living."""
    setup = Setup(parse_instances("prefill=1,decode=1,colocated=1"), SMALL)
    sessions = [(0.02 * at, 1 + at % 7, 300 + at % 11 * 200, 1 + at % 60) for at in range(200)]
    workload = blocks_workload(sessions)
    played(setup, workload)  # all of it: msgspec leaves cycles for each type that it meets first, whatever ran before
    gc.collect()
    gc.disable()
    try:
        world = played(setup, workload)
        assert gc.collect() < 20 < len(world.clients.served), "requests leave something behind"
    finally:
        gc.enable()


def test_equal_blocks_have_equal_tokens_and_others_do_not() -> None:
    one = fast_tokens(Blocks(16, (Span(3, 40), Span(100, 20))))
    assert one.dtype == np.int32 and len(one) == 60 and one.min() >= 0
    assert (fast_tokens(Blocks(16, (Span(3, 32),))) == one[:32]).all()
    assert (fast_tokens(Blocks(16, (Span(100, 16),))) == one[40:56]).all()
    starts = fast_tokens(Blocks(1, (Span(0, 100_000),)))
    assert len(np.unique(starts)) > 99_990


def test_a_frame_is_put_around_every_message() -> None:
    """head, open, content, close, reply; then the answer, close, and the next question."""
    meter = ByteMeter()
    frame = Frame(
        meter.encode_text("HEAD"),
        {"user": meter.encode_text("USER")},
        meter.encode_text("OVER"),
        meter.encode_text("SAYS"),
    )
    turns = tuple(Turn(Chat((Message("user", text),)), 3) for text in ("aaaa", "bbbb"))
    script = Script(Session("s", turns), meter, frame)
    assert script.prompt_of(0).tobytes() == b"HEADUSERaaaaOVERSAYS"
    script.add_answer(meter.encode_text("okok").tolist())
    assert script.prompt_of(1).tobytes() == b"HEADUSERaaaaOVERSAYSokokOVERUSERbbbbOVERSAYS"
    plain = Script(Session("t", (Turn(Text("abcd"), 3), Turn(Text("efgh"), 3))), meter)
    plain.prompt_of(0)
    plain.add_answer(meter.encode_text("1234").tolist())
    assert plain.prompt_of(1).tobytes() == b"abcd1234efgh"


def test_instances_and_faults_are_read() -> None:
    assert parse_instances("prefill=2,decode=6") == {Role.PREFILL: 2, Role.DECODE: 6}
    assert parse_instances("7") == {Role.COLOCATED: 7}
    for wrong in ("prefill", "prefill=x", "store=1", "prefill=1,prefill=2", ""):
        with pytest.raises(UserError):
            parse_instances(wrong)
    faults = parse_faults("kill:c0@60+10, slow:c1@2.5+5x3", {Role.COLOCATED: 2})
    assert faults == (Fault("kill", "c0", 60.0, 10.0, 2.0), Fault("slow", "c1", 2.5, 5.0, 3.0))
    for wrong in ("kill:c5@1+1", "burn:c0@1+1", "kill:c0"):
        with pytest.raises(UserError):
            parse_faults(wrong, {Role.COLOCATED: 2})


# -- the command line


def test_run_writes_what_bench_writes(tmp_path, capsys) -> None:
    """The same files, which the bench's readers read; figures agree with what was printed."""
    from memserve_lab.bench.load.prompts import read_records

    out = tmp_path / "one"
    assert (
        run(["sim", "run", "--workload", "chat", "--sessions", "8", "--rate", "10", "--out", str(out), "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    records = read_records(out / "records.jsonl.gz")
    assert printed["found"][0]["figures"]["requests"] == len(records) > 8
    assert all(record.ok for record in records)
    extras = json.loads((out / "simulation.json").read_text())
    assert (out / "timeline.png").stat().st_size > 10_000
    assert extras[0]["usage"]["devices"] == 2 and extras[0]["timeline"]
    assert "simulated" in (out / "report.md").read_text()


def test_run_trace_lists_arrivals_with_time_and_place(tmp_path, capsys) -> None:
    out = tmp_path / "one"
    run_it = ["sim", "run", "--workload", "chat", "--sessions", "4", "--out", str(out)]
    assert run(run_it) == 0
    told = capsys.readouterr().out
    assert "workload: chat (built-in), 4 sessions" in told and "every session arrives at 0 s" in told
    assert "cluster: prefill=1,decode=1, each llama-3-8b on h100" in told and "nothing measured" in told
    report = (out / "report.md").read_text()
    assert "every session arrives at 0 s" in report and "cores;" not in report, "this machine's processor is no h100"
    assert run(run_it) == 1  # the first run's results stay
    assert "already holds the results of a run" in capsys.readouterr().err
    assert (out / "report.md").read_text() == report
    assert run(["sim", "run", "--workload", "chat", "--sessions", "4", "--rate", "2"]) == 0
    assert "arrives at 0 s" not in capsys.readouterr().out
    assert run(["sim", "run", "--workload", "agentic"]) == 1
    assert "BENCH.md" in capsys.readouterr().err


def test_figures_of_a_simulation_name_the_simulated_machine() -> None:
    from memserve_lab.bench.metrics import Slo
    from memserve_lab.bench.results import sum_up
    from memserve_lab.bench.serve import _subject
    from memserve_lab.bench.study import machine

    results = sum_up([], [], Slo(), "memserve sim run")
    results.machine = {"simulated": "llama-3-8b on h100"}
    assert _subject(results) == "simulated: llama-3-8b on h100"
    results.machine = machine()
    assert machine()["processor"] in _subject(results)


def test_compare_takes_folders_and_settings(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("memserve_lab.bench.report_writer.can_draw", lambda: False)
    out = tmp_path / "one"
    common = ["--workload", "chat", "--sessions", "6", "--rate", "10"]
    assert run(["sim", "run", *common, "--instances", "colocated=2", "--out", str(out)]) == 0
    capsys.readouterr()
    assert run(["sim", "compare", str(out), "colocated=1/session/off", *common]) == 0
    told = capsys.readouterr().out
    assert "TTFT mean (ms)" in told and "cached share" in told
    assert run(["sim", "compare", str(tmp_path), str(out)]) == 1  # no results there


def test_errors_name_what_there_is(capsys) -> None:
    for arguments in (
        ["--device", "h1000"],
        ["--model", "llama-9"],
        ["--instances", "many"],
        ["--model", "llama-3-70b"],
    ):
        assert run(["sim", "run", "--workload", "chat", "--sessions", "1", *arguments]) == 1
        assert "hint:" in capsys.readouterr().err
    assert run(["sim", "--scenario", "nothing"]) == 1


def test_machines_are_frozen_words() -> None:
    assert isinstance(H100, Machine) and H100.costs.prefill_ns(0, 0) == 0
    assert H100.hbm_blocks * H100.geometry.block_bytes < 80e9
    assert H100.costs.decode_step_ns(1, 0) > 2 * NS_PER_MS
