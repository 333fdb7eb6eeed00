"""Routers under load: ``memserve serve`` without instances of its own, the field's routers, and wrk before them."""

from __future__ import annotations

import json
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.processes import is_ready, process, process_cpu_s, wait_until, without_path
from harness.prompts import words
from ports import free_port

GROUPS, PER_GROUP = 64, 8
_SCRIPT = """
local bodies, n, i = {{}}, 0, 0
for line in io.lines("{folder}/bodies.txt") do n = n + 1; bodies[n] = line end
function request()
  i = i + 1
  return wrk.format("POST", "{path}", {{["Content-Type"] = "application/json"}}, bodies[i % n + 1] .. {tail})
end
function done(s, latency, _)
  local bad = s.errors.connect + s.errors.read + s.errors.write + s.errors.status + s.errors.timeout
  io.stderr:write(string.format("%d %d %d %d %d\\n", s.requests, s.duration, latency:percentile(50),
    latency:percentile(99), bad))
end
"""


@dataclass(frozen=True)
class Router:
    """A router that runs."""

    name: str
    url: str
    pid: int
    cluster: str = ""
    """Where instances join."""
    secret: str = ""


@contextmanager
def memserve_router(model: str, folder: Path, *flags: str, core: int | None = None) -> Iterator[Router]:
    """``memserve serve`` without instances, which calls its model ``m``, on ``core``."""
    secret, http, port = secrets.token_urlsafe(32), free_port(), free_port()
    path = folder / f"secret-{port}"
    path.write_text(secret)
    path.chmod(0o600)
    command = [*on_core(core), sys.executable, "-m", "memserve", "serve", "--model", model, "--port", str(http)]
    command += ["--prefill", "0", "--decode", "0", "--colocated", "0", "--cluster-port", str(port)]
    command += ["--cluster-secret-file", str(path), "--metadata", "none", "--served-model-name", "m", *flags]
    with process(command, log=folder / f"router-{port}.log") as child:
        yield Router("memserve", f"http://127.0.0.1:{http}", child.pid, f"127.0.0.1:{port}", secret)


@contextmanager
def fleet_router(engines: Sequence[str], log: Path, *flags: str) -> Iterator[str]:
    """``memserve serve --engine`` in front of servers of others; its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [word for engine in engines for word in ("--engine", engine)]
    with process([sys.executable, "-m", "memserve", "serve", "--port", str(port), *words, *flags], url, log):
        yield url


@contextmanager
def rival_router(
    name: str, python: str, workers: Sequence[str], log: Path, *flags: str, core: int | None = None
) -> Iterator[Router]:
    """``sglang-router`` or ``vllm-router``, with its policy behind a colon, from the environment of ``python``."""
    module, _, policy = name.partition(":")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [*on_core(core), python, "-m", f"{module.replace('-', '_')}.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--worker-urls", *workers]
    command += [*(("--policy", policy) if policy else ()), *flags]
    with process(command, url, log, without_path()) as child:
        yield Router(name, url, child.pid)


def on_core(core: int | None) -> list[str]:
    """What a command begins with."""
    return [] if core is None else ["taskset", "-c", str(core)]


def wait_until_ready(url: str) -> None:
    """The router there, or the instances behind it."""
    wait_until(lambda: is_ready(url), f"the router at {url} is ready", 120.0, 0.2)


def need_wrk() -> None:
    """Ends the script where it is not installed."""
    if not shutil.which("wrk"):
        print("skipped: wrk is not installed (Debian: apt install wrk)")
        sys.exit(0)


def vocabulary_of(model: Path) -> int:
    """Of a model's folder."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def write_load(folder: Path, tokens: int, kind: str, vocabulary: int) -> Path:
    """A wrk script that posts the prompts in turn, each with its own tail. ``kind``: ``ids``, ``text`` or ``chats``."""
    rng, as_ids = random.Random(1), kind == "ids"

    def piece(count: int) -> str:
        if as_ids:
            return "".join(f"{rng.randrange(3, vocabulary)}," for _ in range(count))
        return " " + words(count, rng)

    def chat() -> Iterator[str]:
        """One conversation's requests: each has all earlier turns, and ``tokens`` at the end."""
        turns = ""
        for _ in range(PER_GROUP):
            question, answer = (piece(tokens // (2 * PER_GROUP)) for _ in range(2))
            yield f'{{"model":"m","max_tokens":1,"messages":[{turns}{{"role":"user","content":"{question}'
            turns += f'{{"role":"user","content":"{question}"}},{{"role":"assistant","content":"{answer}"}},'

    def group() -> Iterator[str]:
        """Prompts that share half; their own tails' digits are tokens, too."""
        shared, begin = piece(tokens // 2), '{"model":"m","max_tokens":1,"prompt":' + ("[" if as_ids else '"')
        yield from (begin + shared + piece(tokens // 2 - 12) for _ in range(PER_GROUP))

    bodies = [body for _ in range(GROUPS) for body in (chat() if kind == "chats" else group())]
    (folder / "bodies.txt").write_text("\n".join(bodies))
    tail = '(3 + i % 40000) .. "]}"' if as_ids else '" " .. i .. "\\"' + ("}]}" if kind == "chats" else "}") + '"'
    path = "/v1/chat/completions" if kind == "chats" else "/v1/completions"
    script = folder / "load.lua"
    script.write_text(_SCRIPT.format(folder=folder, path=path, tail=tail))
    return script


def run_wrk(
    url: str, script: Path, connections: int, seconds: float, pids: Sequence[int], core: int | None = None
) -> dict[str, Any]:
    """Requests/s, latencies, failures; CPU time of the routers ``pids``."""
    before_s = sum(map(process_cpu_s, pids))
    command = [*on_core(core), "wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "--timeout", "30s"]
    run = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True, check=True)
    spent_s = sum(map(process_cpu_s, pids)) - before_s
    requests, micros, p50, p99, bad = map(int, run.stderr.split()[-5:])
    return {
        "requests_per_s": requests / micros * 1e6, "p50_ms": p50 / 1e3, "p99_ms": p99 / 1e3, "bad": bad,
        "router_cpu_us": spent_s / max(1, requests) * 1e6, "cores": spent_s / (micros / 1e6),
    }  # fmt: skip
