"""vLLM with memserve's connector beside vLLM without it: right answers, the first token after a restart, and the cost.

    python bench/vllm_connector.py --vllm PYTHON [--only answers,failures,...] [--prompts 120] [--data FOLDER]
        [--rounds 5]

PYTHON can import vllm (its CPU build: ``docs/guides/VLLM.md``); memserve is this checkout's. Five parts:

* *answers*: two vLLM servers on one store, greedy in float32, compared token by token with one server without a
  connector. KV memory is so small that requests are preempted; between passes vLLM's own cache is emptied, so that
  prompts come from the store. Before one pass bytes of the store's memory are flipped; during one the store is killed
  (SIGKILL) and started again, during one a server, whose requests are then asked of the other. An answer that differs
  where the reference's two best tokens are less than ``TIE`` apart counts as a tie.
* *failures*: two servers whose loads fail at random (``bench/faulty_connector.py``): single blocks of a load, and whole
  loads, with rubbish in vLLM's blocks; compared as above. KV that failed has to be computed again by every request that
  wanted it, also by those that share its blocks.
* *restart*: the time to the first token of a long prompt: never seen, again at once (vLLM's own cache), and after vLLM
  was killed (SIGKILL) and started again (the store).
* *cost*: prompts that are found nowhere, one server without a connector, one with, one whose store was killed (SIGKILL)
  once it had got the first prompt, in turn; the time to the first token, of each further one, and the CPU time of all
  processes of the server: medians of the ratios, prompt by prompt. CPU time hardly notices other programs.
* *calls*: CPU time that vLLM's own threads spend in the connector's calls, without vLLM: a look-up that finds nothing,
  a step that fills no block, a step that fills 64 blocks of SmolLM2-135M in float32; the same once the store was killed
  (SIGKILL), and what all threads together spend in a second on looking for it.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

from harness.chats import opening_ids
from harness.clients import Answer, ask_all
from harness.engines import ServedStore, Vllm, judge, recorded, running
from harness.flags import Commas, parts_of
from harness.processes import wait_until
from harness.prompts import openings, random_tokens, token_prompts
from harness.rounds import Samples, median, spread
from harness.tables import show
from vllm_calls import calls

SMALL = ("--num-gpu-blocks-override", "44", "--max-model-len", "1024", "--max-num-seqs", "8")
"""1,376 tokens of KV, where the four requests that run at once need more: some are preempted."""


def prompts_of(args: Namespace) -> list[list[int]]:
    """Openings of real chats. Without ``--data`` random tokens: each prompt shares 64 to 512 with some others."""
    if args.data:
        return opening_ids(args.data, args.model, args.prompts, 33, 900)
    return openings(args.prompts, Random(1))


# -- answers


METRICS = {"preemptions": "num_preemptions_total", "tokens from the store": "external_prefix_cache_hits_total"}


def compare(
    name: str, servers: list[Vllm], prompts: list[list[int]], right: list[Answer], turn: int, fate: Thread | None = None
) -> dict[str, int]:
    """Ask all prompts, eight at a time, each of the server whose turn it is; what came. ``fate`` is what happens
    meanwhile; then what a server does not answer is asked of the next one, as clients do."""
    counts: Counter[str] = Counter()
    before = {
        (server.url, metric_name): server.metric(metric)
        for server in servers
        for metric_name, metric in METRICS.items()
    }

    def ask(number: int) -> None:
        expected, prompt_number = right[number], number + turn
        try:
            answer = servers[prompt_number % len(servers)].ask(prompts[number], len(expected.tokens))
        except RuntimeError as error:
            if fate is None:
                raise
            print(f"  prompt {number} is asked again: {error}")
            counts["asked again"] += 1
            answer = servers[(prompt_number + 1) % len(servers)].ask(prompts[number], len(expected.tokens))
        judge(f"prompt {number}", answer, expected, counts)
        counts["cached tokens"] += answer.cached

    if fate is not None:
        fate.start()
    ask_all(ask, range(len(prompts)), 8)
    if fate is not None:
        fate.join()
    for server in servers:
        for metric_name, metric in METRICS.items():
            now, earlier = server.metric(metric), before[server.url, metric_name]
            counts[metric_name] += now - earlier if now >= earlier else now  # counted anew since its start
    print(f"  {name}: " + ", ".join(f"{value} {key}" for key, value in counts.items()), flush=True)
    for server in servers:
        server.forget()
    return dict(counts)


def flip_bytes(store: ServedStore, rng: Random, count: int) -> None:
    """Damage values: single bits of the store's memory, wherever it is in use."""
    with store.client() as client:
        used = max(1, client.statistics()["dram_bytes_used"])
    for path in Path("/dev/shm").glob(f"memserve-store-{store.name[:24]}*"):
        nbytes = path.stat().st_size
        if nbytes < 64 << 20:  # the index is not what this is about
            continue
        with path.open("r+b") as file:
            for _ in range(count):
                place = rng.randrange(min(nbytes, used))
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1]))


def reference(args: Namespace, folder: Path, prompts: list[list[int]]) -> list[Answer]:
    """The answers of a server without a connector and with room for all; kept in ``folder``."""
    path = folder / f"reference-{len(prompts)}.json"
    if path.exists():
        return [Answer(**fields) for fields in json.loads(path.read_text())]
    alone = Vllm(args.vllm, args.model, log=folder / "alone.log")
    with running(alone):
        right = ask_all(lambda prompt: alone.ask(prompt, 32), prompts, 4)
    path.write_text(json.dumps([asdict(answer) for answer in right]))
    return right


def pair_of(args: Namespace, folder: Path, store: ServedStore, name: str, **more: Any) -> list[Vllm]:
    """Two servers on one store, with little memory of their own."""
    return [
        Vllm(args.vllm, args.model, store, folder / f"{name}-{number}.log", cpus, SMALL, **more)
        for number, cpus in enumerate(args.cpus.split("/"))
    ]


def die_and_live(after_s: float, die: Callable[[], object], live: Callable[[], object]) -> None:
    time.sleep(after_s)
    die()
    time.sleep(after_s)
    live()


def answers(args: Namespace, folder: Path) -> dict[str, Any]:
    prompts, rng, record = prompts_of(args), Random(2), dict[str, Any]()
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, 32 new ones each")
    right = reference(args, folder, prompts)
    with ServedStore(folder, dram="2GiB") as store:
        servers = pair_of(args, folder, store, "answers")

        def check(name: str, turn: int, fate: Thread | None = None) -> None:
            record[f"{len(record)}: {name}"] = compare(name, servers, prompts, right, turn, fate)

        with running(*servers):
            check("first", 0)
            check("each from the other's", 1)
            flip_bytes(store, rng, 2000)
            check("with damaged values", 0)
            for name, die, live in (
                ("the store", store.kill, store.restart),
                ("a server", servers[1].kill, servers[1].start),
            ):
                killing = Thread(target=die_and_live, args=(args.kill_after_s, die, live))
                check(f"while {name} is killed", 1, killing)
                check("after its restart", 0)
    print("  logs say:", Counter(
        line.split("] ", 1)[-1][:100] for line in log_lines(folder, "*.log")
        if "WARNING" in line and ("no KV from" in line or "disagree" in line)
    ) or "nothing")  # fmt: skip
    return record


def log_lines(folder: Path, pattern: str) -> list[str]:
    """Of all logs of that name."""
    return [line for path in folder.glob(pattern) for line in path.read_text(errors="replace").splitlines()]


# -- failures


def failures(args: Namespace, folder: Path) -> dict[str, Any]:
    prompts, record = prompts_of(args), dict[str, Any]()
    right = reference(args, folder, prompts)
    with ServedStore(folder, dram="2GiB") as store:
        servers = pair_of(args, folder, store, "faulty", connector=("FaultyConnector", "faulty_connector"))
        with running(*servers):
            for turn, name in enumerate(("first", "each from the other's", "and back")):
                record[name] = compare(name, servers, prompts, right, turn)
    lines = [line for line in log_lines(folder, "faulty-*.log") if "blocks dropped" in line]
    record["loads that failed"] = len(lines)
    print(f"  {len(lines)} loads failed, in part or as a whole")
    if not lines:
        raise SystemExit("no load failed: nothing was tested")
    return record


# -- restart


def restart(args: Namespace, folder: Path) -> dict[str, Any]:
    spent, cached = Samples(), list[int]()
    prompts = token_prompts(args.rounds, args.tokens, Random(3))
    with ServedStore(folder, dram="2GiB") as store:
        server = Vllm(args.vllm, args.model, store, folder / "restart.log")
        with running(server):
            server.ask(prompts[0][::-1], 2)
            for prompt in prompts:
                spent["cold"].append(server.ask(prompt, 1).first_s)
                spent["vLLM's own"].append(server.ask(prompt, 1).first_s)
            blocks = len(prompts) * (args.tokens // 32)
            with store.client() as client:  # what was computed last is still on its way
                wait_until(lambda: client.statistics()["dram_values"] >= blocks, "all blocks in the store", 30)
            server.kill()
        with running(server):
            server.ask(prompts[0][::-1], 2)
            for prompt in prompts:
                answer = server.ask(prompt, 1)
                spent["store, after kill -9"].append(answer.first_s)
                cached.append(answer.cached)
    print(f"TTFT of {args.tokens} tokens, medians of {args.rounds}:")
    rows = ({"kind": kind, "ms": 1e3 * median(times), "gain": spent.median("cold") / median(times)}
            for kind, times in spent.items())  # fmt: skip
    show(rows, {"from": "{kind}", "TTFT": "{ms:.1f} ms", "times cold": "{gain:.1f}"})
    print(f"  tokens cached in the first turn after the restart: {sorted(set(cached))}")
    return {"seconds": spent, "cached": cached}


# -- cost


def cost(args: Namespace, folder: Path) -> dict[str, Any]:
    names, rng, beside = ("none", "connector", "dead store"), Random(4), Samples()
    with ServedStore(folder, dram="2GiB") as store, ServedStore(folder, dram="2GiB") as dead:
        servers = {
            name: Vllm(args.vllm, args.model, options_of_setting, folder / f"{name}.log", args.cpus.partition("/")[0])
            for name, options_of_setting in zip(names, (None, store, dead), strict=True)
        }
        with running(*servers.values()):
            for number in range(-1, args.rounds * 3):
                order = rng.sample(names, len(names))
                spent = {name: spent_on(servers[name], random_tokens(512, rng)) for name in order}
                if number < 0:
                    with dead.client() as client:
                        if not client.statistics()["dram_values"]:
                            raise SystemExit("the store that is to die has got nothing")
                    dead.kill()
                    continue
                for name in names[1:]:
                    for case, seconds in spent[name].items():
                        beside[f"{name}, {case}"].append(seconds / spent["none"][case])
    print(f"beside no connector, {args.rounds * 3} prompts of 512 tokens that are found nowhere, 64 new ones each:")
    show(({"what": name, "ratio": spread(values)} for name, values in beside.items()), ("what", "ratio"))
    return beside


def spent_on(server: Vllm, prompt: list[int]) -> dict[str, float]:
    """Seconds of one request."""
    before_s = server.cpu_s()
    answer = server.ask(prompt, 64)
    decode_s = (answer.total_s - answer.first_s) / 63
    return {"TTFT": answer.first_s, "time per token": decode_s, "CPU time": server.cpu_s() - before_s}


PARTS = {"answers": answers, "failures": failures, "restart": restart, "cost": cost, "calls": calls}


def main() -> None:
    def measure(args: Namespace, folder: Path) -> dict[str, Any]:
        record = {}
        for name, part in parts_of(args.only, PARTS).items():
            print(f"\n{name}", flush=True)
            record[name] = part(args, folder)
        return record

    record = recorded(
        __doc__, measure, only=Commas(*PARTS), prompts=120, tokens=1536, rounds=5, kill_after_s=15.0,
        data=(Path, "a folder with real chats for prompts; default: random tokens"),
        cpus=("0-1/2-3", "cores of the first server, and of the second"),
    )  # fmt: skip
    if any("WRONG" in counts for part in record.values() for counts in part.values() if isinstance(counts, dict)):
        raise SystemExit("a wrong answer")


if __name__ == "__main__":
    main()
