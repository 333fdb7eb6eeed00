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

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from chats import opening_ids
from vllm_calls import calls
from vllm_servers import TIE, Answer, ServedStore, Vllm, recorded, running

VOCAB = 49_000
SMALL = ("--num-gpu-blocks-override", "44", "--max-model-len", "1024", "--max-num-seqs", "8")
"""1,376 tokens of KV, where the four requests that run at once need more: some are preempted."""


def prompts_of(options: Namespace) -> list[list[int]]:
    """Openings of real chats. Without ``--data`` random tokens: each prompt shares 64 to 512 with some others."""
    count = options.prompts
    if options.data:
        return opening_ids(options.data, options.model, count, 33, 900)
    rng = random.Random(1)
    texts = [[rng.randrange(5, VOCAB) for _ in range(rng.choice((64, 200, 320, 512)))] for _ in range(count // 4)]
    return [rng.choice(texts) + [rng.randrange(5, VOCAB) for _ in range(rng.randrange(20, 300))] for _ in range(count)]


# -- answers


def compare(
    name: str, servers: list[Vllm], prompts: list[list[int]], right: list[Answer], turn: int, fate: Thread | None = None
) -> Counter[str]:
    """Ask all prompts, eight at a time, each of the server whose turn it is; what came. ``fate`` is what happens
    meanwhile; then what a server does not answer is asked of the next one, as clients do."""
    counts: Counter[str] = Counter()
    before = [(s.metric("num_preemptions_total"), s.metric("external_prefix_cache_hits_total")) for s in servers]

    def one(number: int) -> None:
        expected, which = right[number], number + turn
        try:
            answer = servers[which % len(servers)].ask(prompts[number], len(expected.tokens))
        except (OSError, HTTPException, RuntimeError) as error:
            if fate is None:
                raise
            print(f"  prompt {number} is asked again: {type(error).__name__}")
            counts["asked again"] += 1
            answer = servers[(which + 1) % len(servers)].ask(prompts[number], len(expected.tokens))
        pairs = zip(answer.tokens, expected.tokens, strict=False)
        at = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if at is None and len(answer.tokens) == len(expected.tokens):
            counts["equal"] += 1
        elif at is not None and expected.gaps[at] < TIE:
            counts["ties"] += 1
        else:
            counts["WRONG"] += 1
            print(f"  WRONG: prompt {number} at token {at}: {answer.tokens} for {expected.tokens}")
        counts["cached tokens"] += answer.cached

    if fate is not None:
        fate.start()
    with ThreadPoolExecutor(8) as asking:
        list(asking.map(one, range(len(prompts))))
    if fate is not None:
        fate.join()
    for server, (preempted, hits) in zip(servers, before, strict=True):
        for what, metric, was in (
            ("preemptions", "num_preemptions_total", preempted),
            ("tokens from the store", "external_prefix_cache_hits_total", hits),
        ):
            now = server.metric(metric)
            counts[what] += now - was if now >= was else now  # counted anew since its start
    print(f"  {name}: " + ", ".join(f"{value} {key}" for key, value in counts.items()), flush=True)
    return counts


def flip_bytes(store: ServedStore, rng: random.Random, count: int) -> None:
    """Damage values: single bits of the store's memory, wherever it is in use."""
    for path in Path("/dev/shm").glob(f"memserve-store-{store.name[:24]}*"):
        nbytes = path.stat().st_size
        if nbytes < 64 << 20:  # the index is not what this is about
            continue
        with path.open("r+b") as file:
            for _ in range(count):
                at = rng.randrange(min(nbytes, store_bytes_used(store)))
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


def store_bytes_used(store: ServedStore) -> int:
    """Of its memory."""
    with store.client() as client:
        return max(1, client.statistics()["dram_bytes_used"])


def reference(options: Namespace, folder: Path, prompts: list[list[int]]) -> list[Answer]:
    """The answers of a server without a connector and with room for all; kept in ``folder``."""
    kept = folder / f"reference-{len(prompts)}.json"
    if kept.exists():
        return [Answer(**one) for one in json.loads(kept.read_text())]
    alone = Vllm(options.vllm, options.model, log=folder / "alone.log")
    with running(alone), ThreadPoolExecutor(4) as asking:
        right = list(asking.map(lambda prompt: alone.ask(prompt, 32), prompts))
    kept.write_text(json.dumps([asdict(one) for one in right]))
    return right


def die_and_live(after_s: float, die: Callable[[], object], live: Callable[[], object]) -> None:
    time.sleep(after_s)
    die()
    time.sleep(after_s)
    live()


def answers(options: Namespace, folder: Path) -> dict[str, Any]:
    prompts, rng = prompts_of(options), random.Random(2)
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, 32 new ones each")
    right = reference(options, folder, prompts)
    record: dict[str, Any] = {}
    with ServedStore(folder, dram="2GiB") as store:
        where = store.address, str(store.secret_file)
        servers = [
            Vllm(options.vllm, options.model, *where, cpus, SMALL, folder / f"{cpus}.log")
            for cpus in options.cpus.split("/")
        ]
        with running(*servers):

            def check(name: str, turn: int, fate: Thread | None = None) -> None:
                record[f"{len(record)}: {name}"] = dict(compare(name, servers, prompts, right, turn, fate))
                for server in servers:
                    server.forget()

            check("first", 0)
            check("each from the other's", 1)
            flip_bytes(store, rng, 2000)
            check("with damaged values", 0)

            for name, die, live in (
                ("the store", store.kill, store.restart),
                ("a server", servers[1].kill, servers[1].start),
            ):
                killing = Thread(target=die_and_live, args=(options.kill_after_s, die, live))
                check(f"while {name} is killed", 1, killing)
                check("after its restart", 0)
    print("  logs say:", Counter(
        line.split("] ", 1)[-1][:100]
        for path in folder.glob("*.log") for line in path.read_text(errors="replace").splitlines()
        if "WARNING" in line and ("no KV from" in line or "disagree" in line)
    ) or "nothing")  # fmt: skip
    return record


# -- failures


def failures(options: Namespace, folder: Path) -> dict[str, Any]:
    prompts = prompts_of(options)
    right = reference(options, folder, prompts)
    record: dict[str, Any] = {}
    with ServedStore(folder, dram="2GiB") as store:
        where = store.address, str(store.secret_file)
        faulty = ("FaultyConnector", "faulty_connector")
        logs = [folder / f"faulty-{number}.log" for number in range(2)]
        servers = [
            Vllm(options.vllm, options.model, *where, cpus, SMALL, log, connector=faulty)
            for cpus, log in zip(options.cpus.split("/"), logs, strict=True)
        ]
        with running(*servers):
            for turn, name in enumerate(("first", "each from the other's", "and back")):
                record[name] = dict(compare(name, servers, prompts, right, turn))
                for server in servers:
                    server.forget()
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if "blocks dropped" in line]
    record["loads that failed"] = len(lines)
    print(f"  {len(lines)} loads failed, in part or as a whole")
    if not lines:
        raise SystemExit("no load failed: nothing was tested")
    return record


# -- restart


def restart(options: Namespace, folder: Path) -> dict[str, Any]:
    spent: dict[str, list[float]] = {"cold": [], "vLLM's own": [], "store, after kill -9": []}
    hits = list[int]()
    with ServedStore(folder, dram="2GiB") as store:
        server = Vllm(options.vllm, options.model, store.address, str(store.secret_file), log=folder / "restart.log")
        rng = random.Random(3)
        prompts = [[rng.randrange(5, VOCAB) for _ in range(options.tokens)] for _ in range(options.rounds)]
        with running(server):
            server.ask(prompts[0][::-1], 2)
            for prompt in prompts:
                spent["cold"].append(server.ask(prompt, 1).first_s)
                spent["vLLM's own"].append(server.ask(prompt, 1).first_s)
            with store.client() as client:  # what was computed last is still on its way
                deadline = time.monotonic() + 30
                while client.statistics()["dram_values"] < len(prompts) * (options.tokens // 32):
                    if time.monotonic() > deadline:
                        raise SystemExit("not all blocks came to the store")
                    time.sleep(0.02)
            server.kill()
        with running(server):
            server.ask(prompts[0][::-1], 2)
            for prompt in prompts:
                answer = server.ask(prompt, 1)
                spent["store, after kill -9"].append(answer.first_s)
                hits.append(answer.cached)
    cold = median(spent["cold"])
    print(f"TTFT of {options.tokens} tokens, medians of {options.rounds}:")
    for kind, times in spent.items():
        print(f"  {kind:<22} {median(times) * 1e3:8.1f} ms, {cold / median(times):5.1f} times cold")
    print(f"  tokens cached in the first turn after the restart: {sorted(set(hits))}")
    return {"seconds": spent, "cached": hits}


# -- cost


def cost(options: Namespace, folder: Path) -> dict[str, Any]:
    names = ("none", "connector", "dead store")
    rng = random.Random(4)
    ratios: dict[str, list[float]] = {}
    with ServedStore(folder, dram="2GiB") as store, ServedStore(folder, dram="2GiB") as dead:
        addresses = dict(zip(names, ("", store.address, dead.address), strict=True))
        cpus = options.cpus.partition("/")[0]
        servers = {
            name: Vllm(options.vllm, options.model, where, str(store.secret_file), cpus, log=folder / f"{name}.log")
            for name, where in addresses.items()
        }
        with running(*servers.values()):
            for number in range(-1, options.rounds * 3):
                order = list(servers)
                rng.shuffle(order)
                spent = {name: spent_on(servers[name], [rng.randrange(5, VOCAB) for _ in range(512)]) for name in order}
                if number < 0:
                    with dead.client() as client:
                        if not client.statistics()["dram_values"]:
                            raise SystemExit("the store that is to die has got nothing")
                    dead.kill()
                    continue
                for name in names[1:]:
                    for what, seconds in spent[name].items():
                        ratios.setdefault(f"{name}, {what}", []).append(seconds / spent["none"][what])
    print(f"beside no connector, {options.rounds * 3} prompts of 512 tokens that are found nowhere, 64 new ones each:")
    for name, found in ratios.items():
        low, high = sorted(found)[len(found) // 4], sorted(found)[-1 - len(found) // 4]
        print(f"  {name:<28} {median(found):.3f} ({low:.3f} to {high:.3f})")
    return ratios


def spent_on(server: Vllm, prompt: list[int]) -> dict[str, float]:
    """Seconds of one request."""
    before_s = server.cpu_s()
    answer = server.ask(prompt, 64)
    decode_s = (answer.total_s - answer.first_s) / 63
    return {"TTFT": answer.first_s, "time per token": decode_s, "CPU time": server.cpu_s() - before_s}


PARTS = {"answers": answers, "failures": failures, "restart": restart, "cost": cost, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--data", type=Path, help="a folder with real chats for prompts; default: random tokens")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpus", default="0-1/2-3", help="cores of the first server, and of the second")
    parser.add_argument("--kill-after-s", type=float, default=15.0)
    recorded(parser, lambda options, folder: {name: PARTS[name](options, folder) for name in options.only.split(",")})


if __name__ == "__main__":
    main()
