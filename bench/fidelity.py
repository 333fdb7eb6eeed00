"""How close the simulator is to the real cluster: the same workloads on both, on this machine, side by side.

    python bench/fidelity.py calibrate --out FOLDER      profile, contention of two instances, overhead of the server
    python bench/fidelity.py real --out FOLDER           three workloads on real clusters
    python bench/fidelity.py table --out FOLDER          the same in the simulator, and its errors

The simulator's inputs are measured with other requests than those that it predicts: the profile of `memserve profile`;
how much slower two processes are that compute at the same time; and, from streams of one length to an idle server, the
time of a request and of a token beside the device.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from harness.flags import options, parts_of
from harness.rounds import median
from harness.tables import show

from memserve.base.config import ClusterConfig, EngineOptions
from memserve.base.types import Caching, Role, TransferPolicy
from memserve.base.units import NS_PER_S
from memserve.kv.costs import DecodeCurve, PrefillCurve
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import Driver, Labels, LoadRun, Progress, drive
from memserve_lab.bench.load.prompts import Manner, RecordWriter, RequestRecord, read_records, weighing
from memserve_lab.bench.metrics import Figures, figures
from memserve_lab.bench.servers import Servers
from memserve_lab.bench.settings import Setting, parse_setting
from memserve_lab.cli.sim_results import simulate
from memserve_lab.cli.sim_run import profiled
from memserve_lab.sim.hardware import Machine
from memserve_lab.sim.replay.scripts import Frame, Script
from memserve_lab.sim.replay.setup import Setup, Surroundings
from memserve_lab.workloads.arrivals import closed_loop
from memserve_lab.workloads.records import Session, Workload
from memserve_lab.workloads.sessions import uniform_workload
from memserve_lab.workloads.shape import Caps
from memserve_lab.workloads.tokens import TokenizerMeter

DTYPE = "bfloat16"
WORKLOADS = ("chat", "documents", "react")
SETTINGS = ("1PD-CC", "1P1D-CC")
CALIBRATION = "calibration.json"
PROFILE = "profile.json"
RECORDS = "real.jsonl.gz"
CONTENTION_S = 3.0
KINDS = ("prefill", "decode")
STREAMS = (1, 6)
STREAM_PROMPT, STREAM_OUTPUT = 64, 40
SERVE_FLAGS = ("--dtype", DTYPE)
OPTIONS = EngineOptions(dtype=DTYPE)
MESSAGE_NS = 300_000
Curve = TypeVar("Curve", PrefillCurve, DecodeCurve)


# -- calibrate


def calibrate(out: Path, seconds: float, model: str) -> None:
    """Write profile and calibration into ``out``."""
    command = [sys.executable, "-m", "memserve", "profile", "--dtype", DTYPE, "--model", model, "--json"]
    profile = subprocess.run([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True).stdout
    (out / PROFILE).write_bytes(profile)
    results = {
        "processes": contention(model),
        "streams": {name: [stream(model, name, users) for users in STREAMS] for name in SETTINGS},
    }
    (out / CALIBRATION).write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


def contention(model: str) -> dict[str, dict[str, float]]:
    """Speed of each kind of step on workers that do not spin, as in instances that share cores, alone and beside
    another process that computes: 1 = as in the profile, and as alone without spinning."""
    spinning, first, second = _process(model, spins=True), _process(model), _process(model)
    passive, beside = {}, {}
    for kind in KINDS:
        passive[kind] = _rates([first], [kind])[0] / _rates([spinning], [kind])[0]
    for kind, rival_kind in (("prefill", "decode"), ("decode", "prefill")):
        beside[kind] = _rates([first, second], [kind, rival_kind])[0] / _rates([first], [kind])[0]
    twice = {kind: _rates([first, second], [kind, kind])[0] / _rates([first], [kind])[0] for kind in KINDS}
    for line in (spinning, first, second):
        line.send(None)
    return {"passive": passive, "beside": beside, "beside_the_same": twice}


def _process(model: str, *, spins: bool = False) -> Connection:
    if not spins:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as runtime/supervisor does
    context = multiprocessing.get_context("spawn")
    own_end, far_end = context.Pipe()
    context.Process(target=_compute, args=(far_end, model), daemon=True).start()
    own_end.recv()
    os.environ.pop("OMP_WAIT_POLICY", None)
    return own_end


def _rates(lines: list[Connection], kinds: list[str]) -> list[float]:
    for line, kind in zip(lines, kinds, strict=True):
        line.send(kind)
    return [line.recv() for line in lines]


def _compute(line: Connection, model: str) -> None:
    """A process that computes steps of one kind for a while, and reports steps per second."""
    from memserve.host.profile import open_profiler

    _, _, profiler = open_profiler(dataclasses.replace(OPTIONS, model=model))
    kinds = {"prefill": lambda: profiler.prefill_ns(512, 0), "decode": lambda: profiler.decode_ns(4, 512)}
    for run in kinds.values():
        run()
    line.send("ready")
    while (kind := line.recv()) is not None:
        begin_s, steps, spent_ns = time.perf_counter(), 0, 0
        while time.perf_counter() - begin_s < CONTENTION_S:
            spent_ns += kinds[kind]()
            steps += 1
        line.send(steps / (spent_ns / NS_PER_S))
    profiler.close()


def stream(model: str, name: str, users: int) -> dict[str, float]:
    """Latencies of requests of one length, ``users`` at a time, on an idle cluster."""
    uniform = uniform_workload(8 * users, prompt_tokens=STREAM_PROMPT, shared_tokens=0, output_tokens=STREAM_OUTPUT)
    with Servers((*SERVE_FLAGS, "--model", model), lambda _: None) as servers:
        run = _drive(servers, parse_setting(name, 1), closed_loop(uniform, users=users), "calibration", None)
    results = figures(run.records)
    assert results.ttft_s is not None and results.tpot_s is not None, "an idle server answers"
    return {"users": users, "ttft_ms": 1e3 * results.ttft_s.p50, "tpot_ms": 1e3 * results.tpot_s.p50}


# -- real


def recipe(kind: str, data: Path | None, rate: float) -> Recipe:
    """The recipe of one workload, small enough for two cores."""
    caps = Caps(1536, 32, 4)
    return Recipe(kind=kind, data=data, sessions=14, caps=caps, arrivals=Arrivals.POISSON, requests_per_s=rate, seed=11)


def measure(out: Path, data: Path | None, rate: float, model: str) -> None:
    """Run all workloads on all settings and write the records."""
    meter, _ = weighing(model)
    writer = RecordWriter(out / RECORDS)
    for name in SETTINGS:
        with Servers((*SERVE_FLAGS, "--model", model), lambda line: print(line, file=sys.stderr)) as servers:
            for kind in WORKLOADS:
                workload = build(recipe(kind, data, rate), meter)
                run = _drive(servers, parse_setting(name, 1), workload, kind, writer)
                print(f"{name} {kind}: {len(run.records)} requests in {run.wall_ns / 1e9:.1f} s", file=sys.stderr)
    writer.close()


def _drive(servers: Servers, setting: Setting, workload: Workload, label: str, writer: RecordWriter | None) -> LoadRun:
    place = servers.address_of(setting)
    manner = Manner(place.model, ignore_eos=True, salt=label)
    progress = Progress(workload.request_count, label)
    labels = Labels(setting.name, label, 0)
    return drive(lambda: Driver(workload, Target(place.url), manner, writer=writer, progress=progress, labels=labels))


# -- the same in virtual time


def machine_of(out: Path, setting: str) -> tuple[Machine, Surroundings]:
    """This machine as measured: the profile, and the times that instances and server add to it."""
    machine = profiled(out / PROFILE, "smollm2-135m", 0)
    calibration = json.loads((out / CALIBRATION).read_text())
    shares = setting != "1PD-CC"
    costs = machine.costs
    if shares:
        passive = calibration["processes"]["passive"]
        costs = dataclasses.replace(
            costs, prefill=_slower(costs.prefill, passive["prefill"]), decode=_slower(costs.decode, passive["decode"])
        )
    item, many = calibration["streams"][setting]
    context = STREAM_PROMPT + STREAM_OUTPUT // 2
    beside = [e["tpot_ms"] * 1e6 - costs.decode_step_ns(e["users"], e["users"] * context) for e in (item, many)]
    row_ns = max(0.0, (beside[1] - beside[0]) / (many["users"] - 1))
    step_ns = max(0.0, costs.decode.step_ns + beside[0] - row_ns)
    decode = dataclasses.replace(costs.decode, step_ns=step_ns, row_ns=costs.decode.row_ns + row_ns)
    front_ns = max(0, round(item["ttft_ms"] * 1e6 - costs.prefill_ns(STREAM_PROMPT, 0)))
    together = calibration["processes"]["beside"]
    around = Surroundings(
        front_ns=front_ns, back_ns=0, message_ns=MESSAGE_NS, instances_per_host=8,
        beside=(together["prefill"], together["decode"]) if shares else None,
    )  # fmt: skip
    print(f"{setting}: beside the device a request costs {front_ns / 1e6:.1f} ms, a step {beside[0] / 1e6:.2f} ms,"
          f" a row of it {row_ns / 1e6:.2f} ms", file=sys.stderr)  # fmt: skip
    return dataclasses.replace(machine, costs=dataclasses.replace(costs, decode=decode)), around


def _slower(curve: Curve, speed: float) -> Curve:
    return dataclasses.replace(curve, **{name: value / speed for name, value in dataclasses.asdict(curve).items()})


def chat_frame(meter: TokenizerMeter) -> Frame:
    """The frame of SmolLM2's chat template around messages (ChatML)."""
    roles = ("system", "user", "assistant")
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return Frame(
        meter.encode_text(f"<|im_start|>system\n{system}<|im_end|>\n"),
        {role: meter.encode_text(f"<|im_start|>{role}\n") for role in roles},
        meter.encode_text("<|im_end|>\n"),
        meter.encode_text("<|im_start|>assistant\n"),
    )


def with_lengths(workload: Workload, records: list[RequestRecord]) -> Workload:
    """Answers as long as the real ones: stop strings end some, and the simulator cannot predict the model's text."""
    lengths = {(record.session, record.turn): record.output_tokens for record in records}
    sessions = []
    for session in workload.sessions:
        turns = [
            dataclasses.replace(
                turn, output_tokens_max=lengths.get((session.session_id, number), turn.output_tokens_max)
            )
            for number, turn in enumerate(session.turns)
        ]
        sessions.append(dataclasses.replace(session, turns=tuple(turns)))
    return dataclasses.replace(workload, sessions=tuple(sessions))


def foretell(out: Path, data: Path | None, rate: float, model: str, real: list[RequestRecord]) -> list[RequestRecord]:
    """The records of the same workloads in the simulator."""
    meter, _ = weighing(model)
    assert meter is not None, "a model was named"
    frame, records = chat_frame(meter), []

    def script(session: Session) -> Script:
        return Script(session, meter, frame)

    for name in SETTINGS:
        machine, around = machine_of(out, name)
        roles = {Role.COLOCATED: 1} if name == "1PD-CC" else {Role.PREFILL: 1, Role.DECODE: 1}
        cluster = ClusterConfig(Caching.PD_CACHING_3, "cost", TransferPolicy.BY_REQUEST_AGG)
        for kind in WORKLOADS:
            setup = Setup(roles, machine, cluster, OPTIONS.scheduler, around)
            observed = [r for r in real if (r.setting, r.workload) == (name, kind)]
            workload = with_lengths(build(recipe(kind, data, rate), meter), observed)
            records += simulate(setup, workload, name, kind, make_script=script).records
    return records


COLUMNS = {"setting": "{setting}", "workload": "{workload}"} | {
    f"{name} ms, {statistic}": f"{{real_{name}_{statistic}:.0f}} / {{foretold_{name}_{statistic}:.0f}}"
    for name in ("ttft", "tpot", "jct") for statistic in ("mean", "p90")
} | {
    "cached": "{real_cached:.0%} / {foretold_cached:.0%}", "prompts": "{real_prompt:.1f} / {foretold_prompt:.1f}",
}  # fmt: skip


def table(out: Path, data: Path | None, rate: float, model: str) -> None:
    """Print real and simulated figures, side by side."""
    real = read_records(out / RECORDS)
    foretold = foretell(out, data, rate, model, real)
    rows = []
    for name, kind in product(SETTINGS, WORKLOADS):
        pair = [_chosen(side_figures, name, kind) for side_figures in (real, foretold)]
        rows.append({"setting": name, "workload": kind, **_row(*pair)})
    show(rows, COLUMNS)
    errors = [error for row in rows for error in row["errors"]]
    shares = max(abs(row["foretold_cached"] - row["real_cached"]) for row in rows)
    print(f"real / simulated. Off by {median(errors):.1%} (median of {len(errors)} times), at worst"
          f" {max(errors):.1%}; cached shares by {shares:.1%} at most")  # fmt: skip
    (out / "fidelity.json").write_text(json.dumps({"median_error": median(errors), "rows": rows}, indent=1))


def _chosen(records: list[RequestRecord], setting: str, workload: str) -> Figures:
    return figures([r for r in records if (r.setting, r.workload) == (setting, workload)])


def _row(real: Figures, foretold: Figures) -> dict[str, Any]:
    """Means and P90s in ms, their relative errors, the hit rates, and the tokens of a prompt."""
    row: dict[str, Any] = {"errors": []}
    for name, statistic in product(("ttft", "tpot", "jct"), ("mean", "p90")):
        measured, simulated = (
            1e3 * getattr(getattr(side_figures, f"{name}_s"), statistic) for side_figures in (real, foretold)
        )
        row |= {f"real_{name}_{statistic}": measured, f"foretold_{name}_{statistic}": simulated}
        row["errors"].append(abs(simulated / measured - 1))
    for side, side_figures in (("real", real), ("foretold", foretold)):
        row |= {
            f"{side}_cached": side_figures.cached_share,
            f"{side}_prompt": side_figures.prompt_tokens / max(1, side_figures.requests),
        }
    return row


def main() -> None:
    parts = {"calibrate", "real", "table"}
    args = options(
        __doc__, rest="part", required="out", out=Path, data=(Path, "folder of data sets; default: made from the seed"),
        model=OPTIONS.model, rate=(1.0, "requests a second"), seconds=(50.0, "time for the profile"),
    )  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["MEMSERVE_CACHE_DIR"] = str((args.out / "cache").resolve())  # so that instances find this profile
    match list(parts_of(args.part, dict.fromkeys(sorted(parts)))):
        case ["calibrate"]:
            calibrate(args.out, args.seconds, args.model)
        case ["real"]:
            measure(args.out, args.data, args.rate, args.model)
        case ["table"]:
            table(args.out, args.data, args.rate, args.model)
        case _:
            raise SystemExit("one of calibrate, real, table")


if __name__ == "__main__":
    main()
