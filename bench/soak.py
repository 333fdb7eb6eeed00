"""Hours of honest load, with attacks beside it: does every request end correctly, and does memory stay constant?

    python bench/soak.py [--minutes 60] [--attacks] [--kills 0] [--json FILE] [--plot FILE] [-- SERVE OPTIONS]

Starts ``memserve serve --prefill 1 --decode 2 --kv-memory 64MiB --dram-memory 128MiB`` with the bundled model in
bfloat16. Twelve clients ask for completions and chats of 100 to 5,000 tokens (requests that cannot fit must be refused
clearly), streamed or whole, ``n`` up to 2, with salts, sessions, documents and logprobs; some leave in the middle of an
answer. Questions whose greedy answers were learned before the load are asked repeatedly. ``--attacks`` adds attackers
with their own key: those of ``hostile.py --requests``. ``--kills N`` kills N instances at random times (their
successors are measured from their own start).

At the end the load drains, and nothing may be left: no block, request, transfer or named prefix. Resident memory is
read from /proc of the router and of each instance. *Steady* is the spread, lowest to highest, of the medians of a
minute in the last half hour (half of a shorter run), as a share of their median. Prints each figure with its target;
the exit status is 1 if any is missed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
from harness.flags import options, save
from harness.processes import resident_bytes
from harness.rounds import median
from harness.served import Served, serving
from harness.tables import show
from hostile_random import give_up_names, target_of
from soak_load import ANSWER_S_MAX, Client, Fixed, Tally, Target

from hostile_storm import Storm, storm

MB = 1_000_000
SERVE = ("--prefill", "1", "--decode", "2", "--kv-memory", "64MiB", "--dram-memory", "128MiB")
KEYS = {"honest": "honest-key", "attack": "attack-key"}
FIELDS = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM")
SAMPLE_S, PAUSE_S = 5.0, 4.0
VOCABULARY = 49_152
IDLE_S_MAX = 180.0
STEADY_SHARE = 0.02
INSTANCE_BYTES_MAX = 1200 * MB
ROUTER_GROWTH_BYTES_MAX = 100 * MB
WINDOW_S_MAX = 1800.0


@dataclass(frozen=True)
class Sample:
    """Memory of one process at one moment, in bytes."""

    at_s: float
    process: str
    """``router``, or an instance's name and pid."""
    held: dict[str, int]


@dataclass(frozen=True)
class Check:
    """One figure and its target."""

    name: str
    figure: str
    target: str
    ok: bool


# -- processes


def processes(served: Served) -> dict[str, int]:
    """The router and the instances: name -> pid."""
    return {"router": served.process.pid, **served.children()}


def read_memory(pid: int) -> dict[str, int]:
    """Memory of a process by field; nothing: it has ended."""
    try:
        return {name: resident_bytes(pid, name) for name in FIELDS}
    except OSError:
        return {}


def sample(served: Served, started: float) -> list[Sample]:
    held = {name if name == "router" else f"{name}:{pid}": read_memory(pid) for name, pid in processes(served).items()}
    return [Sample(time.monotonic() - started, name, fields) for name, fields in held.items() if fields]


async def watch(served: Served, started: float, samples: list[Sample], stop: asyncio.Event) -> None:
    """Sample until ``stop``; print one line per minute."""
    next_line_s = 0
    while not stop.is_set():
        now = sample(served, started)
        samples += now
        if now and now[0].at_s >= next_line_s:
            next_line_s += 60
            line = "  ".join(f"{s.process} {s.held['RssAnon'] / MB:.0f}/{s.held['VmRSS'] / MB:.0f}" for s in now)
            print(f"{now[0].at_s:6.0f} s  anonymous/resident MB: {line}", flush=True)
        await asyncio.sleep(SAMPLE_S)


async def kill(served: Served, minutes: float, kills: int, seed: int, killed: list[str]) -> None:
    """Kill instances in the first half of the run."""
    draw = random.Random(f"kill-{seed}")
    for _ in range(kills):
        await asyncio.sleep(minutes * 60 / 2 / kills * draw.uniform(0.5, 1))
        names = [item for item in processes(served).items() if item[0] != "router"]
        name, pid = draw.choice(names)
        os.kill(pid, signal.SIGKILL)
        killed.append(name)


async def attack(served: Served, results: Storm, clients: int, seed: int, stop: asyncio.Event) -> None:
    """Requests drawn from the grammars of ``hostile.py --requests``, with pauses, until ``stop``."""
    target, first, draw = target_of(served, VOCABULARY), 0, random.Random(f"attack-{seed}")
    while not stop.is_set():
        part = await storm(served.url, target, seed, range(first, first + clients), clients=clients)
        results.statuses.update(part.statuses)
        results.misses += part.misses
        first += clients
        await asyncio.sleep(draw.uniform(0, PAUSE_S))


# -- what is left


async def drained(served: Served) -> dict[str, float]:
    """Wait until nothing is left: pins last until they expire. Returns what remains after that."""
    deadline = time.monotonic() + IDLE_S_MAX
    while (rest := await asyncio.to_thread(served.left)) and time.monotonic() < deadline:
        await asyncio.sleep(1)
    return rest


# -- the run


@dataclass
class Run:
    """The results of a run."""

    tally: Tally
    storm: Storm
    samples: list[Sample]
    killed: list[str]
    rest: dict[str, float]
    files_before: dict[str, int]
    files_after: dict[str, int]
    load_s: float
    down: list[str]


def open_files(served: Served) -> dict[str, int]:
    """Number of open descriptors of each process."""
    return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in processes(served).items()}


async def soak(served: Served, args: Namespace) -> Run:
    """Load, attacks and samples at once; then the drain."""
    tally, attacks, killed, samples = Tally(), Storm(), list[str](), list[Sample]()
    blocks = served.metrics()['memserve_instance_blocks{instance="p1",role="prefill",state="free",tier="hbm"}']
    limits, key = httpx.Limits(max_connections=None), {"authorization": f"Bearer {KEYS['honest']}"}
    async with httpx.AsyncClient(base_url=served.url, timeout=ANSWER_S_MAX, limits=limits, headers=key) as http:
        honest = Target(http, served.model, int(blocks) * 32)
        fixed = Fixed(honest, tally)
        await fixed.learn()
        files_before, started, stop = open_files(served), time.monotonic(), asyncio.Event()
        clients = [Client(honest, tally, number, args.seed).run(stop) for number in range(args.clients)]
        background = [watch(served, started, samples, stop), fixed.run(stop, 20)]
        background += [kill(served, args.minutes, args.kills, args.seed, killed)] if args.kills else []
        if args.attacks:
            background += [attack(served, attacks, args.attackers, args.seed, stop)]
        tasks = [asyncio.ensure_future(work) for work in (*clients, *background)]
        await asyncio.wait(tasks, timeout=args.minutes * 60, return_when=asyncio.FIRST_EXCEPTION)
        stop.set()
        load_s = time.monotonic() - started
        await asyncio.gather(*tasks)
        if args.attacks:
            await asyncio.to_thread(give_up_names, served)
        rest = await drained(served)
        await fixed.check()
    await asyncio.sleep(2)
    down = [] if set(processes(served)) >= {"router", "p1", "d1", "d2"} else ["an instance is gone"]
    return Run(tally, attacks, samples, killed, rest, files_before, open_files(served), load_s, down)


# -- figures


def minutes(samples: list[Sample], name: str, field: str, from_s: float, to_s: float) -> list[float]:
    """The median of each minute of a process."""
    by_minute: dict[int, list[int]] = {}
    for results in samples:
        if results.process == name and from_s <= results.at_s <= to_s:
            by_minute.setdefault(int((results.at_s - from_s) // 60), []).append(results.held[field])
    return [median(values) for values in by_minute.values()]


def memory_checks(run: Run) -> list[Check]:
    """Checks of each process: steady, and within its bound."""
    checks: list[Check] = []
    from_s = run.load_s - min(WINDOW_S_MAX, run.load_s / 2)
    last = {results.process: results for results in run.samples if results.at_s <= run.load_s}
    for name, final in last.items():
        if final.at_s < run.load_s - 3 * SAMPLE_S:
            continue  # it was killed
        steady = minutes(run.samples, name, "VmRSS", from_s, run.load_s)
        spread = (max(steady) - min(steady)) / median(steady)
        text = f"{spread:.1%} of {median(steady) / MB:.0f} MB"
        checks.append(Check(f"{name}: resident memory, spread", text, f"<= {STEADY_SHARE:.0%}", spread <= STEADY_SHARE))
        measurements = [results.held for results in run.samples if results.process == name]
        most = max(measurement["VmRSS"] for measurement in measurements)
        if name != "router":
            limit_text = f"<= {INSTANCE_BYTES_MAX / MB:.0f} MB"
            checks.append(
                Check(f"{name}: resident memory, most", f"{most / MB:.0f} MB", limit_text, most <= INSTANCE_BYTES_MAX)
            )
        else:
            grown = max(measurement["RssAnon"] for measurement in measurements) - measurements[0]["RssAnon"]
            limit_text = f"<= {ROUTER_GROWTH_BYTES_MAX / MB:.0f} MB"
            checks.append(
                Check(
                    "router: RssAnon above start", f"{grown / MB:.0f} MB", limit_text, grown <= ROUTER_GROWTH_BYTES_MAX
                )
            )
    return checks


def tracebacks(errors: str) -> list[str]:
    """Each traceback of the log, whole: from its first line to the error that ended it."""
    results: list[list[str]] = []
    inside = False
    for line in errors.splitlines():
        if "Traceback (most recent call last)" in line:
            inside = True
            results.append([])
        if inside:
            results[-1].append(line)
            inside = line.startswith((" ", "\t")) or "Traceback" in line
    return ["\n".join(lines) for lines in results]


def checks_of(run: Run, errors: str) -> list[Check]:
    tally, grown = run.tally, {}
    for name, count in run.files_after.items():
        if count > run.files_before.get(name, count) + 4:
            grown[name] = count - run.files_before[name]
    ended_count = sum(tally.ended.values())
    broken = Counter(text.splitlines()[-1][:200] for text in tracebacks(errors))
    broken += Counter(line[:200] for line in errors.splitlines() if "InvariantError" in line)
    return [
        Check("honest requests that ended correctly", f"{ended_count}", "> 0", ended_count > 0),
        Check("honest requests that did not", f"{len(tally.misses)}", "0", not tally.misses),
        Check("fixed questions, not answered as before", f"{sum(m.startswith('fixed') for m in tally.misses)} of "
              f"{tally.compared}, {tally.ties} ties", "0", not any(m.startswith("fixed") for m in tally.misses)),
        Check("answers to attacks that may not be", f"{len(run.storm.misses)}", "0", not run.storm.misses),
        Check("left after the load", f"{run.rest or 'nothing'}", "nothing", not run.rest),
        Check("instances", ", ".join(run.down) or "all there", "all there", not run.down),
        Check("descriptors left open", f"{grown or 'none'}", "none", not grown),
        Check("tracebacks in the log", f"{dict(broken) or 'none'}", "none", not broken),
        *memory_checks(run),
    ]  # fmt: skip


def plot(samples: list[Sample], path: Path) -> None:
    """Resident memory over time, one line per process, its anonymous part dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name in dict.fromkeys(results.process for results in samples):
        measurements = [results for results in samples if results.process == name]
        place = [results.at_s / 60 for results in measurements]
        (line,) = axes.plot(place, [results.held["VmRSS"] / MB for results in measurements], label=name)
        axes.plot(
            place, [results.held["RssAnon"] / MB for results in measurements], linestyle="--", color=line.get_color()
        )
    axes.axhline(INSTANCE_BYTES_MAX / MB, color="grey", linewidth=0.8)
    axes.set(
        xlabel="minutes", ylabel="MB resident (dashed: anonymous)", ylim=(0, None), title="memory under mixed load"
    )
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def report(run: Run, checks: list[Check]) -> None:
    print(f"\nended correctly: {dict(run.tally.ended.most_common())}; turned away for a while: {run.tally.turned_away}")
    if run.storm.statuses:
        print(f"attacks were answered {dict(sorted(run.storm.statuses.items()))}")
    for text in [*run.tally.misses[:20], *run.storm.misses[:10]]:
        print(f"MISS  {text}")
    show(({**vars(check), "verdict": "ok" if check.ok else "MISS"} for check in checks),
         ("verdict", "name", "figure", "target"))  # fmt: skip


def main() -> None:
    args = options(
        __doc__, rest="serve", minutes=60.0, clients=12, attacks=False, attackers=2, kills=0, seed=1,
        plot=(Path, "write a PNG of memory over time here"),
    )  # fmt: skip
    keys = [word for name, key in KEYS.items() for word in ("--api-key", f"{name}={key}")]
    with serving(*SERVE, *keys, *args.serve) as served:
        run = asyncio.run(soak(served, args))
        served.stop()
        errors = served.errors.read_text(errors="replace")
    checks = checks_of(run, errors)
    report(run, checks)
    for text in tracebacks(errors)[:10]:
        print(f"\n{text}")
    if args.plot:
        plot(run.samples, args.plot)
    save(args, {"options": vars(args), "checks": checks, "run": run, "tracebacks": tracebacks(errors)})
    raise SystemExit(0 if all(check.ok for check in checks) else 1)


if __name__ == "__main__":
    main()
