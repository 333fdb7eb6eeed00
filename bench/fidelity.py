"""How near the simulator comes to the real cluster: the same workloads on both, on this machine, side by side.

    python bench/fidelity.py calibrate --out FOLDER      profile, contention of two instances, overhead of the server
    python bench/fidelity.py real --out FOLDER           three workloads on real clusters
    python bench/fidelity.py table --out FOLDER          the same in the simulator, and how far off it is

What the simulator is given was measured with other requests than those that it foretells: the profile of `memserve
profile`; how much slower two processes compute that do so at once; and, from streams of one length to an idle server,
what a request and a token cost beside the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median

from memserve.bench.catalogue import Arrivals, Recipe, build
from memserve.bench.load.client import Target
from memserve.bench.load.driver import Driver, Labels, LoadRun, drive
from memserve.bench.load.progress import Progress
from memserve.bench.load.prompts import Manner
from memserve.bench.load.record import RecordWriter, RequestRecord, read_records
from memserve.bench.load.synthetic import uniform_workload
from memserve.bench.meters import weighing
from memserve.bench.metrics import Figures, figures
from memserve.bench.servers import Servers
from memserve.bench.settings import Setting, parse_setting
from memserve.cli.sim_options import profiled
from memserve.cli.sim_results import simulate
from memserve.config import ClusterConfig, EngineOptions, SchedulerConfig
from memserve.sim.hardware import Machine
from memserve.sim.replay.scripts import Frame, Script
from memserve.sim.replay.setup import Setup, Surroundings
from memserve.types import Caching, Role, TransferMode
from memserve.units import MIB, NS_PER_S
from memserve.workloads.arrivals import closed_loop
from memserve.workloads.shape import Caps
from memserve.workloads.tokens import TokenizerMeter
from memserve.workloads.words import Session, Workload

DTYPE = "bfloat16"
WORKLOADS = ("chat", "documents", "react")
SETTINGS = ("1PD-CC", "1P1D-CC")
CALIBRATION = "calibration.json"
PROFILE = "profile.json"
RECORDS = "real.jsonl.gz"
CONTENTION_S = 4.0
STREAMS = (1, 8)
SERVE_FLAGS = ("--dtype", DTYPE)
OPTIONS = EngineOptions(dtype=DTYPE)
MESSAGE_NS = 300_000


# -- calibrate


def calibrate(out: Path, seconds: float, model: str) -> None:
    """Write profile and calibration into ``out``."""
    command = [sys.executable, "-m", "memserve", "profile", "--dtype", DTYPE, "--model", model, "--json"]
    profile = subprocess.run([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True).stdout
    (out / PROFILE).write_bytes(profile)
    found = {"host_speeds": contention(model), "streams": [stream(model, users) for users in STREAMS]}
    (out / CALIBRATION).write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


def contention(model: str) -> list[float]:
    """How fast each of two processes computes that do so at once, 1 = as alone: mean over kinds of steps."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for _ in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=_compute, args=(theirs, model), daemon=True)
        process.start()
        lines.append(mine)
        processes.append(process)
    for line in lines:
        line.recv()
    ratios = []
    for kinds in (("prefill", "prefill"), ("prefill", "decode"), ("decode", "decode")):
        alone = [_rates([line], [kind])[0] for line, kind in zip(lines, kinds, strict=True)]
        both = _rates(lines, kinds)
        ratios += [together / by_itself for together, by_itself in zip(both, alone, strict=True)]
    for line in lines:
        line.send(None)
    for process in processes:
        process.join()
    print("speeds beside another:", [round(ratio, 3) for ratio in ratios], file=sys.stderr)
    return [1.0, round(mean(ratios), 3)]


def _rates(lines: list[Connection], kinds: tuple[str, ...] | list[str]) -> list[float]:
    for line, kind in zip(lines, kinds, strict=True):
        line.send(kind)
    return [line.recv() for line in lines]


def _compute(line: Connection, model: str) -> None:
    """A process that computes steps of a kind for a while, and tells how many a second."""
    from memserve.runtime.profile import open_profiler

    _, _, profiler = open_profiler(dataclasses.replace(OPTIONS, model=model))
    kinds = {"prefill": lambda: profiler.prefill_ns(512, 0), "decode": lambda: profiler.decode_ns(4, 512)}
    for run in kinds.values():
        run()
    line.send("ready")
    while (kind := line.recv()) is not None:
        begun, steps, spent_ns = time.perf_counter(), 0, 0
        while time.perf_counter() - begun < CONTENTION_S:
            spent_ns += kinds[kind]()
            steps += 1
        line.send(steps / (spent_ns / NS_PER_S))
    profiler.close()


def stream(model: str, users: int) -> dict[str, float]:
    """What requests of one length feel, ``users`` at a time, on one colocated instance."""
    workload = closed_loop(
        uniform_workload(10 * users, prompt_tokens=64, shared_tokens=0, output_tokens=48), users=users
    )
    with Servers((*SERVE_FLAGS, "--model", model), lambda _: None) as servers:
        run = _drive(servers, parse_setting("1PD", 1), workload, "calibration", None)
    found = figures(run.records)
    assert found.ttft_s is not None and found.tpot_s is not None, "an idle server answers"
    return {"users": users, "ttft_ms": 1e3 * found.ttft_s.p50, "tpot_ms": 1e3 * found.tpot_s.p50}


# -- real


def recipe(kind: str, data: Path | None, rate: float) -> Recipe:
    """Of one workload, small enough for two cores."""
    caps = Caps(1536, 32, 4)
    return Recipe(kind=kind, data=data, sessions=14, caps=caps, arrivals=Arrivals.POISSON, requests_per_s=rate, seed=11)


def measure(out: Path, data: Path | None, rate: float, model: str) -> None:
    """All workloads on all settings; writes the records."""
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
    place = servers.address(setting)
    manner = Manner(place.model, ignore_eos=True, salt=label)
    progress = Progress(workload.request_count, label)
    labels = Labels(setting.name, label, 0)
    return drive(lambda: Driver(workload, Target(place.url), manner, writer=writer, progress=progress, labels=labels))


# -- the same in virtual time


def machine_of(out: Path) -> tuple[Machine, Surroundings]:
    """This machine as it was measured: the profile, and what the server added to it."""
    machine = profiled(out / PROFILE, "smollm2-135m", 0)
    machine = dataclasses.replace(machine, hbm_blocks=384 * MIB // machine.geometry.block_bytes)
    known = json.loads((out / CALIBRATION).read_text())
    one, many = known["streams"]
    users, costs = many["users"], machine.costs
    context = 64 + 24
    beside = [
        entry["tpot_ms"] * 1e6 - costs.decode_step_ns(entry["users"], entry["users"] * context) for entry in (one, many)
    ]
    row_ns = (beside[1] - beside[0]) / (users - 1)
    decode = dataclasses.replace(
        costs.decode, step_ns=max(0.0, costs.decode.step_ns + beside[0] - row_ns), row_ns=costs.decode.row_ns + row_ns
    )
    front_ns = max(0, round(one["ttft_ms"] * 1e6 - costs.prefill_ns(64, 0)))
    around = Surroundings(
        front_ns=front_ns, back_ns=0, message_ns=MESSAGE_NS, instances_per_host=8,
        host_speeds=tuple(known["host_speeds"]),
    )  # fmt: skip
    print(
        f"a request costs {front_ns / 1e6:.1f} ms, a step {beside[0] / 1e6:.2f} ms beside the device", file=sys.stderr
    )
    return dataclasses.replace(machine, costs=dataclasses.replace(costs, decode=decode)), around


def chat_frame(meter: TokenizerMeter) -> Frame:
    """What SmolLM2's chat template puts around messages (ChatML)."""
    roles = ("system", "user", "assistant")
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return Frame(
        meter.encode(f"<|im_start|>system\n{system}<|im_end|>\n"),
        {role: meter.encode(f"<|im_start|>{role}\n") for role in roles},
        meter.encode("<|im_end|>\n"),
        meter.encode("<|im_start|>assistant\n"),
    )


def foretell(out: Path, data: Path | None, rate: float, model: str) -> list[RequestRecord]:
    """The records of the same workloads in the simulator."""
    meter, _ = weighing(model)
    assert meter is not None, "a model was named"
    machine, around = machine_of(out)
    frame, records = chat_frame(meter), []
    scheduler = SchedulerConfig(
        OPTIONS.max_running, OPTIONS.max_step_tokens, OPTIONS.prefill_chunk_tokens, OPTIONS.max_waiting,
        OPTIONS.steps_in_flight,
    )  # fmt: skip

    def script(session: Session) -> Script:
        return Script(session, meter, frame)

    for name in SETTINGS:
        roles = {Role.COLOCATED: 1} if name == "1PD-CC" else {Role.PREFILL: 1, Role.DECODE: 1}
        cluster = ClusterConfig(Caching.PD_CACHING_3, "cost", TransferMode.BY_REQUEST_AGG)
        for kind in WORKLOADS:
            setup = Setup(roles, machine, cluster, scheduler, around)
            workload = build(recipe(kind, data, rate), meter)
            records += simulate(setup, workload, name, kind, make_script=script).records
    return records


def table(out: Path, data: Path | None, rate: float, model: str) -> None:
    """Both, side by side."""
    real, foretold = read_records(out / RECORDS), foretell(out, data, rate, model)
    errors: list[float] = []
    rows = []
    print(
        f"{'':<20}{'':<10}" + "".join(f"{title:>25}" for title in ("TTFT ms", "TPOT ms", "JCT ms")) + f"{'cached':>16}"
    )
    for name in SETTINGS:
        for kind in WORKLOADS:
            pair = [_chosen(some, name, kind) for some in (real, foretold)]
            line, wrong = _row(*pair)
            errors += wrong
            rows.append({"setting": name, "workload": kind, "errors": wrong})
            prompts = [found.prompt_tokens / max(1, found.requests) for found in pair]
            print(f"{name + ' ' + kind:<30}{line}   prompts {prompts[0]:.1f} | {prompts[1]:.1f}")
    print(f"real | simulated (mean, P90); median error {median(errors):.1%}, of {len(errors)}; worst {max(errors):.1%}")
    (out / "fidelity.json").write_text(json.dumps({"median_error": median(errors), "rows": rows}, indent=1))


def _chosen(records: list[RequestRecord], setting: str, workload: str) -> Figures:
    return figures([r for r in records if (r.setting, r.workload) == (setting, workload)])


def _row(real: Figures, foretold: Figures) -> tuple[str, list[float]]:
    """Cells, and relative errors of means and P90s; of the hit rate the difference."""
    cells, errors = [], []
    for field in ("ttft_s", "tpot_s", "jct_s"):
        one, other = getattr(real, field), getattr(foretold, field)
        for statistic in ("mean", "p90"):
            measured, simulated = 1e3 * getattr(one, statistic), 1e3 * getattr(other, statistic)
            errors.append(abs(simulated / measured - 1))
            cells.append(f"{measured:>6.0f}|{simulated:<5.0f}")
    errors.append(abs(foretold.cached_share - real.cached_share))
    cells.append(f"  {real.cached_share:.0%}|{foretold.cached_share:.0%}")
    return " ".join(cells), errors


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("calibrate", "real", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder of data sets; without: made from the seed")
    parser.add_argument("--model", default=OPTIONS.model)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=50.0, help="for the profile")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["MEMSERVE_CACHE_DIR"] = str((given.out / "cache").resolve())  # instances find this very profile
    match given.part:
        case "calibrate":
            calibrate(given.out, given.seconds, given.model)
        case "real":
            measure(given.out, given.data, given.rate, given.model)
        case _:
            table(given.out, given.data, given.rate, given.model)


if __name__ == "__main__":
    main()
