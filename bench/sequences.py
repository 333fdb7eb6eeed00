"""A context on several instances, beside the same on one that holds all of it: the same tokens, and what that costs.

    PYTHONPATH=tests/support python bench/sequences.py [--instances 3] [--prompts 4] [--kill] [--json FILE]

Each is a ``memserve serve`` of its own with the bundled model in float32, one after the other: first one instance with
room for everything, then ``--instances``, each of which holds its share of a prompt. Prompts are pieces of this
project's pages. Printed: whether the greedy answers are equal, the seconds to the first token, the milliseconds a
token behind it, and what the exchange adds for each token and layer. ``--kill``: then one of the holders is killed
(SIGKILL) while prompts are computed, and once while tokens are drawn; the answers must be equal again.
``--round-trips``: only what a layer of a step waits for one holder, in another process of this host. ``--stripes``:
only prompts of 16 steps that several instances compute at once, beside one instance: in the simulator with the rates of
an H100, and in processes here, where all instances share this machine's cores.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import httpx
import torch
from harness import ROOT
from harness.clients import Answer, Json, greedy, meanwhile, stream
from harness.flags import options, save
from harness.processes import end, process_cpu_s
from harness.rounds import median, percentile, seconds
from harness.tables import Table, show

from memserve.base.config import ClusterConfig, SchedulerConfig
from memserve.base.types import KVGeometry, Role
from memserve.model.attention.query_server import SegmentServer, ZmqSegmentLines
from memserve.model.attention.sequence_parallel import HeldKv, Query
from memserve.protocol.messages import Segment
from memserve.protocol.peers import Peer
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload
from memserve_lab.workloads.sessions import uniform_workload
from served_cluster import Server, eventually

SECRET = "a secret for this measurement"
MODEL, LAYERS, BLOCK_BYTES = "smollm2-135m-instruct", 30, 30 * 3 * 32 * 128 * 4
NEW_TOKENS = 48


def texts(count: int) -> list[str]:
    """Pieces of the pages, each longer than any prompt here."""
    whole = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("concepts/*.md")))
    step = len(whole) // count
    return [whole[place * step :][:60_000] for place in range(count)]


def body_of(text: str, prompt_tokens: int) -> Json:
    """A completion whose prompt is cut."""
    return greedy(text, NEW_TOKENS, MODEL, truncate_prompt_tokens=prompt_tokens)


def measure(url: str, prompts: list[str], prompt_tokens: int) -> dict[str, Any]:
    """All of them, one after the other."""
    stream(url, body_of(prompts[0], 64)).checked()  # everything has run once
    answers = [stream(url, body_of(text, prompt_tokens)).checked() for text in prompts]
    token_ms = [1e3 * (answer.times_s[-1] - answer.first_s) / (NEW_TOKENS - 1) for answer in answers]
    return {
        "texts": [answer.text for answer in answers],
        "first_s": median(answer.first_s for answer in answers),
        "token_ms": median(token_ms),
    }


def kill_holders(
    server: Server, url: str, prompts: list[str], prompt_tokens: int, instances: int, expected: list[str]
) -> list[bool]:
    """Whether the answers are right when the holder of the first part dies, while prompts are computed and after."""
    verdicts = []
    for text, right, behind in zip(prompts, expected, (0, 8), strict=False):
        eventually(lambda: len(server.members()) == instances)
        holder = server.children()[first_holder(url, prompt_tokens)]
        answers: list[Answer] = []

        def kill(_: threading.Event, answers: list[Answer] = answers, behind: int = behind, pid: int = holder) -> None:
            eventually(lambda: not behind or (answers and len(answers[0].times_s) >= behind))
            time.sleep(0.0 if behind else prompt_tokens / 2000)  # then a part of the prompt is being computed
            os.kill(pid, signal.SIGKILL)

        with meanwhile(kill):
            answer = stream(url, body_of(text, prompt_tokens), on_event=answers.append)
        verdicts.append(answer.text == right)
        print(f"killed behind {behind} tokens: {'the same' if verdicts[-1] else 'ANOTHER'} answer", flush=True)
    return verdicts


def first_holder(url: str, prompt_tokens: int) -> str:
    """Which instance gets the first part of a prompt now, by a prompt that nothing else uses."""
    body = {"model": MODEL, "prompt": [7] * prompt_tokens, "max_tokens": 1, "explain": True}
    text = httpx.post(f"{url}/v1/completions", json=body, timeout=600).text
    return re.search(r"(\w+): tokens 0 to", text)[1]


def hold(tokens: int, pipe: Connection) -> None:
    """A process that keeps a segment of one layer of the bundled model, of zeros."""
    geometry = KVGeometry(1, 3, 64, 64, "float32")
    arena = torch.zeros(tokens // 32 * geometry.block_bytes, dtype=torch.uint8)
    held_kv = HeldKv(arena.data_ptr(), geometry)
    held_kv.hold_segment("x", list(range(tokens // 32)), tokens)
    torch.set_num_threads(1)
    server = SegmentServer(SECRET, "127.0.0.1", "float32", held_kv.answer_query)
    pipe.send(server.address)
    pipe.recv()
    server.close()


def round_trips(tokens: int) -> list[Json]:
    """What one layer waits for one holder of ``tokens``: queries out, attention there, outputs and statistics back."""
    spawn, table, rows = multiprocessing.get_context("spawn"), Table(TRIPS), []
    ours, far_end = spawn.Pipe()
    process = spawn.Process(target=hold, args=(tokens, far_end))
    process.start()
    segment, lines = Segment(Peer("i", 1), ours.recv(), tokens), ZmqSegmentLines(SECRET)
    for count in (1, 8, 512):
        query = Query("x", 0, torch.zeros((count, 9, 64)), 0.125, 0.0)
        outputs, sums = torch.empty((count, 9, 64)), torch.empty((count, 9))

        def trip(query: Query = query, outputs: torch.Tensor = outputs, sums: torch.Tensor = sums) -> None:
            lines.receive_answer(lines.send_query(segment, query), outputs, sums)

        took_us = [1e6 * seconds(trip) for _ in range(1000 if count < 512 else 100)]
        rows.append({"rows": count, "tokens": tokens, "tenth": percentile(took_us, 0.1), "half": median(took_us)})
        table.show(rows[-1])
    lines.close()
    ours.send(None)
    process.join()
    return rows


TRIPS = {
    "rows": "{rows}", "tokens of a segment": "{tokens}", "10th percentile": "{tenth:.0f} us", "median": "{half:.0f} us"
}  # fmt: skip
SIMULATED = {"instances": "{instances}", "first token": "{first_ms:.0f} ms", "of one instance": "{share:.2f}"}
STRIPED = {
    "": "{name}", "first token": "{first_s:.2f} s", "of one thread": "{share:.2f}", "CPU time": "{cpu_s:.2f} s",
    "prompts in stripes": "{striped}", "equal answers": "{equal}",
}  # fmt: skip
LOADED = {
    "requests a second": "{rate}", "in stripes": "{striped}", "long prompts": "{long_ms:.0f} ms",
    "short": "{short_ms:.0f} ms", "a token": "{token_ms:.1f} ms",
}  # fmt: skip
STEPS, STEP_TOKENS, LONG_FROM = 16, 2048, 12_000


def simulate(workload: Workload, instances: int, sharing: str = "auto") -> ReplayWorld:
    """Llama 3 8B on instances with an H100 each."""
    scheduler = SchedulerConfig(max_running=256, max_step_tokens=STEP_TOKENS)
    model, cluster = machine("llama-3-8b", "h100"), ClusterConfig(sequence_parallel=sharing)
    world = ReplayWorld(Setup({Role.COLOCATED: instances}, model, cluster, scheduler), workload)
    world.run_workload()
    return world


def crowd(rate: float) -> Workload:
    """150 requests, a fifth of which has a long prompt."""
    random, due_s, first, sessions = Random(1), 0.0, 0, []
    for number in range(150):
        due_s += random.expovariate(rate)
        tokens = random.randrange(LONG_FROM, 30_000) if random.random() < 0.2 else random.randrange(200, 2000)
        turn = Turn(Blocks(16, (Span(first, tokens),)), random.randrange(50, 300), due_s=due_s)
        sessions.append(Session(f"s{number}", (turn,), history=History.GIVEN))
        first += tokens // 16 + 2
    return Workload("crowd", "a fifth is long", tuple(sessions))


def simulate_load() -> list[Json]:
    """Mean times on four instances, with and without stripes."""
    table, rows = Table(LOADED), list[Json]()
    for rate, sharing in itertools.product((1, 4, 8, 12), ("off", "auto")):
        world = simulate(crowd(rate), 4, sharing)
        waits_ms: dict[bool, list[float]] = {True: [], False: []}
        for served in world.clients.served:
            waits_ms[served.prompt_tokens >= LONG_FROM].append((served.first_ns - served.scheduled_ns) / 1e6)
        token_ms = [(one.end_ns - one.first_ns) / 1e6 / (len(one.token_ns) - 1) for one in world.clients.served]
        striped = world.router.machine.stats().counters.prompts_striped
        means = {"long_ms": fmean(waits_ms[True]), "short_ms": fmean(waits_ms[False]), "token_ms": fmean(token_ms)}
        rows.append({"rate": rate, "striped": f"{striped} ({sharing})", **means})
        table.show(rows[-1])
    return rows


def simulate_stripes() -> list[Json]:
    """A prompt of 16 steps, alone in the cluster."""
    table, rows = Table(SIMULATED), list[Json]()
    for instances in (1, 2, 4, 8):
        workload = uniform_workload(1, prompt_tokens=STEPS * STEP_TOKENS, output_tokens=NEW_TOKENS)
        first_ms = simulate(workload, instances).clients.served[0].first_ns / 1e6
        alone_ms = rows[0]["first_ms"] if rows else first_ms
        rows.append({"instances": instances, "first_ms": first_ms, "share": first_ms / alone_ms})
        table.show(rows[-1])
    return rows


def measure_stripes(prompts: list[str], step_tokens: int) -> list[Json]:
    """The same here: one instance with a core, one with all cores, and several with a core each."""
    tokens = str(STEPS * step_tokens + 2 * NEW_TOKENS)
    memory = ("--kv-memory", str((STEPS * step_tokens // 32 + 8) * BLOCK_BYTES), "--max-step-tokens", str(step_tokens))
    places = {
        "one, 1 thread": ("--threads", "1"), "one, 2 threads": ("--threads", "2"),
        "two, 1 thread each": ("--threads", "1", "--colocated", "2"),
        "four, 1 thread each": ("--threads", "1", "--colocated", "4"),
    }  # fmt: skip
    table, rows = Table(STRIPED), list[Json]()
    for name, words in places.items():
        server = Server(Path(MODEL), *memory, *words, "--max-model-tokens", tokens)
        url = server.url.removesuffix("/v1")
        try:
            for count in range(6):  # all instances learn what computing and moving cost
                stream(url, body_of(prompts[count % len(prompts)][count * 64 :], 2 * step_tokens)).checked()
            processes = server.children().values()
            began_s, result = sum(map(process_cpu_s, processes)), {"first_s": [], "texts": []}
            for text in prompts:
                answer = stream(url, body_of(text, STEPS * step_tokens) | {"max_tokens": 2}).checked()
                result["first_s"].append(answer.first_s)
                result["texts"].append(answer.text)
            cpu_s = (sum(map(process_cpu_s, processes)) - began_s) / len(prompts)
            result["first_s"] = median(result["first_s"])
            page = httpx.get(f"{url}/metrics", timeout=600).text
        finally:
            end(server.process)
        found = re.search(r"^memserve_router_prompts_striped_total (.+)$", page, re.M)
        first = rows[0] if rows else result
        equal = sum(a == b for a, b in zip(result["texts"], first["texts"], strict=True))
        striped = int(float(found[1])) if found else 0
        share = result["first_s"] / first["first_s"]
        rows.append(result | {"name": name, "share": share, "cpu_s": cpu_s, "equal": equal, "striped": striped})
        table.show(rows[-1])
    return rows


COLUMNS = {"": "{name}", "first token": "{first_s:.2f} s", "a token": "{token_ms:.1f} ms"}


def main() -> None:
    args = options(
        __doc__, instances=3, blocks=(20, "KV blocks of 32 tokens of each instance"), prompts=4, threads=1,
        kill=(False, "kill holders"), round_trips=(False, "only what a layer waits for a holder"),
        stripes=(False, "only prompts that are computed in stripes"), step_tokens=(448, "of a stripe that is measured"),
    )  # fmt: skip
    if args.stripes:
        simulated = {"alone": simulate_stripes(), "loaded": simulate_load()}
        save(args, {"simulated": simulated, "measured": measure_stripes(texts(args.prompts), args.step_tokens)})
        return
    if args.round_trips:
        save(args, round_trips(args.blocks * 32))
        return
    prompt_tokens, prompts = args.instances * args.blocks * 32 - 2 * NEW_TOKENS, texts(args.prompts)
    memory, common = args.blocks * BLOCK_BYTES, ("--threads", str(args.threads))
    flags = {
        "one": (*common, "--kv-memory", str(args.instances * memory)),
        "shared": (*common, "--colocated", str(args.instances), "--kv-memory", str(memory)),
    }
    results: dict[str, Any] = {}
    for name, words in flags.items():
        server = Server(Path(MODEL), *words)
        url = server.url.removesuffix("/v1")
        try:
            results[name] = measure(url, prompts, prompt_tokens)
            if name == "shared" and args.kill:
                right = results["one"]["texts"]
                results["kills"] = kill_holders(server, url, prompts, prompt_tokens, args.instances, right)
        finally:
            end(server.process)
    equal = sum(text == right for text, right in zip(results["shared"]["texts"], results["one"]["texts"], strict=True))
    added_ms = results["shared"]["token_ms"] - results["one"]["token_ms"]
    print(f"prompts of {prompt_tokens} tokens on instances of {args.blocks * 32}: {equal} of {len(prompts)} equal")
    show(({"name": name, **results[name]} for name in flags), COLUMNS)
    print(f"added: {added_ms:.1f} ms a token, {added_ms / LAYERS * 1e3:.0f} us a token and layer")
    save(args, results | {"equal": equal, "added_ms": added_ms})


if __name__ == "__main__":
    main()
