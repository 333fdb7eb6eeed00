"""Two models in one server beside each alone: hit rates, and right answers while every kind of process is killed.

    python bench/several_models.py [--seconds 300] [--vllm PYTHON] [--json FILE]

``one`` is the bundled model, ``two`` a random Llama of other sizes behind prefill and decode, both in float32 with a
store. Sessions whose prompts grow turn by turn are asked, first of each model alone, then of both at once in one server
of two routers: what of the prompts came from KV, and whether each answer is the one that its model gave alone. Then the
same sessions are asked again and again for ``--seconds``, while each process in turn is killed with -9: instances,
stores, the follower, the owner, which is started anew. Clients try a request again that was cut off or refused. With
``--vllm``, a vLLM server of ``one``'s weights is a member beside its instance, and is killed as well.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from harness.engines import EventServer, running
from harness.flags import HELP, options, save
from harness.processes import wait_until
from harness.served import bundled_model
from harness.tables import show
from load_memory import write_random_model

from memserve.base.config import DEFAULT_MODEL
from ports import free_port

SIZES = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 32000,
}  # fmt: skip
"""Of ``two``: blocks of other bytes than the bundled model's."""
FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-memory", "192MiB", "--store-dram", "1GiB")
SESSIONS, TURNS, SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS, CLIENTS = 24, 4, 160, 96, 6, 4
KINDS = ("one-c1", "two-p1", "router-2", "two-d1", "one-s1", "owner", "two-s1")
"""Processes, in the order in which they are killed."""
START_S, TRIES, PAUSE_S, KILL_EVERY_S = 120.0, 60, 0.5, 12.0

Prompt = tuple[int, ...]


def sessions_of(seed: int) -> list[list[Prompt]]:
    """Each a list of growing prompts; a quarter of them share their first tokens."""
    rng = random.Random(seed)
    systems = [[rng.randrange(5, 900) for _ in range(SYSTEM_TOKENS)] for _ in range(4)]
    sessions = []
    for number in range(SESSIONS):
        tokens, prompts = list(systems[number % 4]), []
        for _ in range(TURNS):
            tokens += [rng.randrange(5, 900) for _ in range(TURN_TOKENS)]
            prompts.append(tuple(tokens))
        sessions.append(prompts)
    return sessions


@dataclass
class Tally:
    """What the requests of one model came to."""

    requests: int = 0
    wrong: int = 0
    failed: int = 0
    """Not answered after all tries."""
    tries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that came from KV."""
        return self.cached_tokens / max(1, self.prompt_tokens)


class RunningModels:
    """A ``memserve serve`` that can be killed and started anew at its port."""

    def __init__(self, models: list[str], folder: Path, *flags: str, engine: EventServer | None = None) -> None:
        """``engine``: a member beside the instance of ``one``, whose cache is empty from now on."""
        self._engine = engine
        if engine is not None:
            engine.forget()
            flags += ("--engine", f"{engine.option},model=one")
        self._state, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        words = [word for model in models for word in ("--model", model)]
        state = ("--metadata", str(folder), "--port", str(self._port))
        self._command = [sys.executable, "-m", "memserve", "serve", *words, *FLAGS, *state, *flags]
        self.start()

    def start(self) -> None:
        """Returns when it is ready."""
        self._state.mkdir(exist_ok=True)
        log = self._state / "log"
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=stderr)
        wait_until(lambda: self.process.poll() is not None or self._is_well(), "the server is ready", START_S)
        if self.process.poll() is not None:
            raise SystemExit(f"the server ended with {self.process.returncode}: {log.read_text()[-2000:]}")

    def _is_well(self) -> bool:
        with suppress(httpx.HTTPError):
            is_there = self._engine is None or 'instance="one-e1"' in httpx.get(f"{self.url}/metrics", timeout=5).text
            return is_there and httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

    def pids(self) -> dict[str, int]:
        """Of instances, stores and further routers."""
        files = self._state.glob("models/*/children.json")
        written = [child for file in files for child in json.loads(file.read_text()).items()]
        return {name: child["pid"] for name, child in written}

    def kill(self, name: str) -> None:
        """SIGKILL; ``owner``: the server itself, which is started anew, as ``vllm`` is while others are killed."""
        if name == "vllm" and self._engine is not None:
            self._engine.kill()
            threading.Thread(target=self._engine.start).start()
        elif name == "owner":
            self.process.kill()
            self.process.wait()
            self.start()
        else:
            with suppress(ProcessLookupError, KeyError):
                os.kill(self.pids()[name], signal.SIGKILL)

    def end(self) -> None:
        """In order."""
        self.process.terminate()
        self.process.wait(60)


def ask(url: str, model: str, prompt: Prompt, tally: Tally) -> tuple[int, ...] | None:
    """The answer; None: there is none after all tries."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    for attempt in range(TRIES):
        with suppress(httpx.HTTPError):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            if answer.status_code == 200:
                reply = answer.json()
                with tally.lock:
                    tally.requests, tally.tries = tally.requests + 1, tally.tries + attempt
                    tally.prompt_tokens += reply["usage"]["prompt_tokens"]
                    tally.cached_tokens += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                return tuple(reply["choices"][0]["token_ids"]) if reply["model"] == model else ()
        time.sleep(PAUSE_S)
    with tally.lock:
        tally.requests, tally.failed = tally.requests + 1, tally.failed + 1
    return None


def run_sessions(
    url: str, model: str, sessions: list[list[Prompt]], answers: dict[Prompt, tuple[int, ...]], tally: Tally
) -> None:
    """Ask all, some sessions at a time; answers that are known are compared, others are kept."""

    def run_one(prompts: list[Prompt]) -> None:
        for prompt in prompts:
            answer = ask(url, model, prompt, tally)
            if answer is not None and answers.setdefault(prompt, answer) != answer:
                with tally.lock:
                    tally.wrong += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(run_one, sessions))


def run_side_by_side(*works: Callable[[], object]) -> None:
    """All at once, to their ends."""
    with ThreadPoolExecutor(len(works)) as pool:
        for work in [pool.submit(work) for work in works]:
            work.result()


@contextmanager
def killing(server: RunningModels, names: list[str], kills: list[str]) -> Iterator[None]:
    """Inside, one process after the other is killed."""
    stop = threading.Event()

    def run_killer() -> None:
        while not stop.wait(KILL_EVERY_S):
            kills.append(names[len(kills) % len(names)])
            server.kill(kills[-1])

    thread = threading.Thread(target=run_killer)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> None:
    args = options(__doc__, seconds=300.0, vllm=("", HELP["vllm"]))
    with tempfile.TemporaryDirectory(prefix="several-models-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        two = write_random_model(folder / "two", SIZES)
        models = {"one": f"one={DEFAULT_MODEL},colocated=1", "two": f"two={two},prefill=1,decode=1"}
        sessions = sessions_of(1)
        answers: dict[str, dict[Prompt, tuple[int, ...]]] = {name: {} for name in models}
        rows, rates, engines, kinds = [], {}, dict[str, EventServer](), [*KINDS]
        if args.vllm:
            engines["one"] = EventServer(args.vllm, bundled_model("float32"), folder=folder, name="one")
            stack.enter_context(running(engines["one"]))
            kinds += ["one-e1", "vllm"]

        def show_row(phase: str, name: str, tally: Tally) -> None:
            rows.append({
                "phase": phase, "model": name, "requests": tally.requests, "wrong": tally.wrong,
                "failed": tally.failed, "tried again": tally.tries, "hit_rate": tally.hit_rate,
            })  # fmt: skip

        for name, text in models.items():
            server, tally = RunningModels([text], folder / f"alone-{name}", engine=engines.get(name)), Tally()
            run_sessions(server.url, name, sessions, answers[name], tally)
            server.end()
            rates[name] = tally.hit_rate
            show_row("alone", name, tally)
        server = RunningModels([*models.values()], folder / "both", "--routers", "2", engine=engines.get("one"))
        stack.callback(server.end)
        tallies = {name: Tally() for name in models}

        def run_both() -> None:
            works = [
                lambda name=name: run_sessions(server.url, name, sessions, answers[name], tallies[name])
                for name in models
            ]
            run_side_by_side(*works)

        run_both()
        for name, tally in tallies.items():
            show_row("together", name, tally)
        tallies = {name: Tally() for name in models}
        kills: list[str] = []
        until = time.monotonic() + args.seconds
        with killing(server, kinds, kills):
            while time.monotonic() < until:
                run_both()
        for name, tally in tallies.items():
            show_row(f"{len(kills)} kills", name, tally)
    show(rows, {
        **{key: f"{{{key}}}" for key in ("phase", "model", "requests", "wrong", "failed", "tried again")},
        "hit rate": "{hit_rate:.3f}",
    })  # fmt: skip
    save(args, rows)


if __name__ == "__main__":
    main()
