"""vLLM with memserve's connector beside vLLM without it: right answers, the first token after a restart, and the cost.

    python bench/vllm_connector.py --vllm PYTHON [--only answers,failures,...] [--prompts 120] [--rounds 5]

PYTHON can import vllm (its CPU build: ``docs/guides/VLLM.md``); memserve is this checkout's. Five parts:

* *answers*: two vLLM servers on one store, greedy in float32, compared token by token with one server without a
  connector. KV memory is so small that requests are preempted; between passes vLLM's own cache is emptied, so that
  prompts come from the store. Before one pass bytes of the store's memory are flipped; during one the store is killed
  (SIGKILL) and started again. An answer that differs where the reference's two best tokens are less than ``TIE`` apart
  counts as a tie.
* *failures*: two servers whose loads fail at random (``bench/faulty_connector.py``): single blocks of a load, and whole
  loads, with rubbish in vLLM's blocks; compared as above. KV that failed has to be computed again by every request that
  wanted it, also by those that share its blocks.
* *restart*: the time to the first token of a long prompt: never seen, again at once (vLLM's own cache), and after vLLM
  was killed (SIGKILL) and started again (the store).
* *cost*: prompts that are found nowhere, one server without a connector, one with, one whose store does not exist, in
  turn; the time to the first token and of each further one, medians of the rounds' ratios.
* *calls*: CPU time that vLLM's own threads spend in the connector's calls, without vLLM: a look-up that finds nothing,
  a step that fills no block, a step that fills 64 blocks of SmolLM2-135M in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rivals import bundled_model

from memserve.integrations.pool import PoolOptions
from memserve.integrations.vllm.block_pool import BlockPool
from memserve.integrations.vllm.lookups import Lookups, RankNames
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.scheduler_side import SchedulerSide
from memserve.integrations.vllm.worker_side import WorkerSide

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from served_store import ServedStore

ROOT = Path(__file__).resolve().parent.parent
START_S = 300.0
ANSWER_S = 300.0
TIE = 1e-3
"""Of log probability."""
VOCAB = 49_000
SMALL = ("--num-gpu-blocks-override", "44", "--max-model-len", "1024", "--max-num-seqs", "8")
"""1,376 tokens of KV, where the four requests that run at once need more: some are preempted."""


@dataclass
class Answer:
    """What one request has brought."""

    tokens: list[int]
    gaps: list[float]
    """Between the two best tokens, one for each."""
    cached: int
    first_s: float
    total_s: float


@dataclass
class Vllm:
    """A server in a process group of its own."""

    python: str
    model: str
    store: str = ""
    secret_file: str = ""
    cpus: str = "0-1"
    flags: tuple[str, ...] = ("--max-model-len", "2048")
    log: Path = field(default_factory=lambda: Path(os.devnull))
    name: str = "x"
    """Under which clients ask for the model."""
    dtype: str = "float32"
    connector: tuple[str, str] = ("MemserveConnector", "memserve.integrations.vllm")
    """Class and module."""

    def start(self) -> Vllm:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--served-model-name", self.name, "--dtype", self.dtype]
        command += ["--block-size", "32"]
        command += ["--enforce-eager", "--enable-prompt-tokens-details", *self.flags]
        if self.store:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        environment = dict(
            os.environ, HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_SERVER_DEV_MODE="1",
            VLLM_CPU_OMP_THREADS_BIND=self.cpus, PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{ROOT / 'bench'}",
            VLLM_NO_USAGE_STATS="1",
        )  # fmt: skip
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM does not start, see {self.log}:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.2)
        return self

    @property
    def transfer(self) -> dict[str, Any]:
        """As the guide has it."""
        where = {"pool": self.store, "secret_file": self.secret_file}
        return {
            "kv_connector": self.connector[0], "kv_connector_module_path": self.connector[1],
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": where,
        }  # fmt: skip

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        """One completion, greedy, streamed."""
        body = {
            "model": self.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin, first_s, found, gaps, cached = time.perf_counter(), 0.0, list[int](), list[float](), 0
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    raise RuntimeError(str(part["error"]))
                for choice in part["choices"]:
                    first_s = first_s or time.perf_counter() - begin
                    found += choice.get("token_ids") or []
                    for top in (choice.get("logprobs") or {}).get("top_logprobs") or []:
                        best = sorted(top.values(), reverse=True)
                        gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
                if part.get("usage"):
                    cached = (part["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(found, gaps, cached, first_s, time.perf_counter() - begin)

    def total(self, name: str) -> float:
        """The sum over all label values."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))

    def metric(self, name: str) -> int:
        """A count, over all label values."""
        return int(self.total(name))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST"), timeout=30
        ).close()

    def kill(self) -> None:
        """All of its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(*servers: Vllm) -> Iterator[None]:
    """Start them side by side, and kill what is left of them at the end."""
    try:
        with ThreadPoolExecutor(len(servers)) as starting:
            list(starting.map(Vllm.start, servers))
        yield
    finally:
        for server in servers:
            if hasattr(server, "process") and server.process.poll() is None:
                server.kill()


def prompts_of(count: int, seed: int) -> list[list[int]]:
    """Random tokens; each shares a document of 64 to 512 tokens with some others."""
    rng = random.Random(seed)
    texts = [[rng.randrange(5, VOCAB) for _ in range(rng.choice((64, 200, 320, 512)))] for _ in range(count // 4)]
    return [rng.choice(texts) + [rng.randrange(5, VOCAB) for _ in range(rng.randrange(20, 300))] for _ in range(count)]


# -- answers


def compare(name: str, servers: list[Vllm], prompts: list[list[int]], right: list[Answer], turn: int) -> Counter[str]:
    """Ask all prompts, eight at a time, each of the server whose turn it is; what came."""
    counts: Counter[str] = Counter()
    before = [(s.metric("num_preemptions_total"), s.metric("external_prefix_cache_hits_total")) for s in servers]

    def one(number: int) -> None:
        answer = servers[(number + turn) % len(servers)].ask(prompts[number], len(right[number].tokens))
        expected = right[number]
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

    with ThreadPoolExecutor(8) as asking:
        list(asking.map(one, range(len(prompts))))
    for server, (preempted, hits) in zip(servers, before, strict=True):
        counts["preemptions"] += server.metric("num_preemptions_total") - preempted
        counts["tokens from the store"] += server.metric("external_prefix_cache_hits_total") - hits
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


def reference(options: argparse.Namespace, folder: Path, prompts: list[list[int]]) -> list[Answer]:
    """The answers of a server without a connector and with room for all; kept in ``folder``."""
    kept = folder / f"reference-{len(prompts)}.json"
    if kept.exists():
        return [Answer(**one) for one in json.loads(kept.read_text())]
    alone = Vllm(options.vllm, options.model, log=folder / "alone.log")
    with running(alone), ThreadPoolExecutor(4) as asking:
        right = list(asking.map(lambda prompt: alone.ask(prompt, 32), prompts))
    kept.write_text(json.dumps([asdict(one) for one in right]))
    return right


def answers(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts, rng = prompts_of(options.prompts, 1), random.Random(2)
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, 32 new ones each")
    right = reference(options, folder, prompts)
    record: dict[str, Any] = {}
    with ServedStore(folder, dram="2GiB") as store:
        where = store.address, str(store.secret_file)
        servers = [
            Vllm(options.vllm, options.model, *where, cpus, SMALL, folder / f"{cpus}.log") for cpus in ("0-1", "2-3")
        ]
        with running(*servers):

            def check(name: str, turn: int) -> None:
                record[name] = dict(compare(name, servers, prompts, right, turn))
                for server in servers:
                    server.forget()

            check("first", 0)
            check("each from the other's", 1)
            flip_bytes(store, rng, 2000)
            check("with damaged values", 0)

            def fate() -> None:
                time.sleep(options.kill_after_s)
                store.kill()
                time.sleep(options.kill_after_s)
                store.restart()

            killer = threading.Thread(target=fate)
            killer.start()
            check("while the store is killed", 1)
            killer.join()
            check("after its restart", 0)
    print("  logs say:", Counter(
        line.split("] ", 1)[-1][:100]
        for path in folder.glob("*.log") for line in path.read_text(errors="replace").splitlines()
        if "WARNING" in line and ("no KV from" in line or "disagree" in line)
    ) or "nothing")  # fmt: skip
    return record


# -- failures


def failures(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts = prompts_of(options.prompts, 1)
    right = reference(options, folder, prompts)
    record: dict[str, Any] = {}
    with ServedStore(folder, dram="2GiB") as store:
        where = store.address, str(store.secret_file)
        faulty = ("FaultyConnector", "faulty_connector")
        logs = [folder / f"faulty-{number}.log" for number in range(2)]
        servers = [
            Vllm(options.vllm, options.model, *where, cpus, SMALL, log, connector=faulty)
            for cpus, log in zip(("0-1", "2-3"), logs, strict=True)
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


def restart(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
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


def cost(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with ServedStore(folder, dram="2GiB") as store, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # a port at which nothing listens
        absent = f"127.0.0.1:{silent.getsockname()[1]}"
        servers = {
            name: Vllm(options.vllm, options.model, where, str(store.secret_file), log=folder / "cost.log")
            for name, where in (("none", ""), ("connector", store.address), ("no store", absent))
        }
        rng = random.Random(4)
        ratios: dict[str, list[float]] = {}
        with running(*servers.values()):
            for number in range(-1, options.rounds * 3):
                order = list(servers)
                rng.shuffle(order)
                times = {}
                for name in order:
                    prompt = [rng.randrange(5, VOCAB) for _ in range(512)]
                    answer = servers[name].ask(prompt, 64)
                    times[name] = (answer.first_s, (answer.total_s - answer.first_s) / 63)
                for name in ("connector", "no store") if number >= 0 else ():
                    for at, what in enumerate(("TTFT", "time per token")):
                        ratios.setdefault(f"{name}, {what}", []).append(times[name][at] / times["none"][at])
    print("beside no connector, prompts of 512 tokens that are found nowhere, 64 new ones:")
    for name, found in ratios.items():
        low, high = sorted(found)[len(found) // 4], sorted(found)[-1 - len(found) // 4]
        print(f"  {name:<28} {median(found):.3f} ({low:.3f} to {high:.3f})")
    return ratios


# -- calls


def calls(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What vLLM's own thread spends in the connector: seconds of CPU time, which other programs do not change."""
    import torch

    blocks, bench_blocks = 160, 64
    caches = {f"layers.{at}": torch.rand(blocks, 3, 32, 128) for at in range(30)}
    record: dict[str, float] = {}
    with ServedStore(folder, dram="4GiB") as store:
        where = PoolOptions.of({"pool": store.address, "secret_file": str(store.secret_file), "timeout_s": 30.0})
        memory = HostMemory(caches, blocks)
        worker = WorkerSide(BlockPool(where), memory, RankNames(b"vllm/bench/", memory.layout))
        lookups = Lookups(BlockPool(where))
        lookups.set_ranks([worker.names])
        side = SchedulerSide(lookups, 32, 1, 10**10)
        state = SimpleNamespace(get_block_ids=lambda request_id: (list(range(1, 65)),))

        def request(name: str) -> Any:
            hashes = [f"{name}/{at}".encode() for at in range(bench_blocks)]
            return SimpleNamespace(
                request_id=name, block_hashes=hashes, num_tokens=bench_blocks * 32 + 5, num_computed_tokens=0
            )

        def timed(name: str, work: Callable[[int], object], times: int) -> None:
            spent = []
            for number in range(times + 2):
                begin = time.thread_time()
                work(number)
                spent.append(time.thread_time() - begin)
            record[name] = median(spent[2:])
            print(f"  {name:<66} {record[name] * 1e6:10.1f} us", flush=True)

        misses = [request(f"miss {number}") for number in range(102)]
        timed("look-up of 2,048 tokens that are nowhere", lambda at: side.matched(misses[at], 0, 0), 100)
        decoding = [request(f"decoding {number}") for number in range(64)]
        for one in decoding:
            side.allocated(one, [], 0)
            side._saved[one.request_id], one.num_computed_tokens = bench_blocks, bench_blocks * 32 + 3
        output = SimpleNamespace(
            num_scheduled_tokens={one.request_id: 1 for one in decoding}, kv_connector_block_state=state
        )
        timed("a step of 64 requests that fill no block", lambda at: side.step(output, 0), 100)
        prompts = [request(f"prompt {number}") for number in range(12)]
        orders = []

        def save(at: int) -> None:
            side.allocated(prompts[at], [], 0)
            scheduled = {prompts[at].request_id: 2048}
            step = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
            orders.append(side.step(step, 0))

        timed("a step that fills 64 blocks: what to save", save, 10)

        def copy(at: int) -> None:
            worker.save(orders[at])
            worker._savers.drain()

        # copies run in two threads, and the other one's time does not count here: wall time beside memcpy
        begin_s = time.perf_counter()
        for at in range(12):
            copy(at)
        record["64 blocks to the store, wall"] = (time.perf_counter() - begin_s) / 12
        timed(
            "a step that fills 64 blocks (84 MiB): the copies, this thread's half",
            lambda at: _collected(worker, orders[at % 12]),
            10,
        )
        waited_ms = record["64 blocks to the store, wall"] * 1e3
        print(f"  {worker._pool.counts['stored']} blocks stored, 64 of them after {waited_ms:.0f} ms")
        worker.close()
        lookups.close()
    return record


def _collected(worker: WorkerSide, orders: Any) -> None:
    values = [value for save in orders.saves for value in worker._values(save)]
    for _, memory in worker._pool.collect(values):
        memory.release()


PARTS = {"answers": answers, "failures": failures, "restart": restart, "cost": cost, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="python", help="a Python that can import vllm")
    parser.add_argument("--model", default="")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kill-after-s", type=float, default=15.0)
    parser.add_argument("--folder", type=Path, help="for logs; default: a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.model = options.model or bundled_model("float32")
    record = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name in options.only.split(","):
            record[name] = PARTS[name](options, folder)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
