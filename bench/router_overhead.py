"""What does the router cost per request? A whole router over HTTP, in front of instances that answer at once.

    python bench/router_overhead.py --model FOLDER [--instances 8] [--connections 1,32] [--tokens 1024,8192]
    python bench/router_overhead.py --model FOLDER --rivals sglang-router:cache_aware,vllm-router:cache_aware \
        --rivals-python PYTHON      # other routers in the same run, in turn round by round

The router is ``memserve serve`` as users run it, alone; the instances are null engines in one other process, behind
real mailboxes, that answer each request with one token. wrk (which must be installed) makes the load, closed loop, as
in the published figures of other routers: 64 groups of 8 prompts, half of each prompt shared in its group, with its own
tail each time. Prompts go as text, which is tokenized here (the other routers forward text), and as token ids, so that
routing can be separated from tokenizing. ``--prompts chats``: conversations of 8 turns, each request with all earlier
ones and a question of its own. Printed per case: requests/s, median and p99 latency, CPU of the router a
request, its memory; ``bad``: answers other than 200 and broken connections.

Rivals run on the same core, one measured at a time, in front of as many null servers: one process, a protocol of
uvloop that reads a request to its end and writes a fixed answer, 10 us each, on the core of the load. A rival that
refuses token ids shows it in ``bad``. Any router is limited by the other core as well, where load and null engines
take 0.1 to 0.2 ms a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

START_S_MAX = 120.0
GROUPS, PER_GROUP = 64, 8
WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work number night point home water room mother area money
    story fact month study book eye job word business issue side kind head house service friend father power hour game
"""
"""Each is one token, with the blank before it, in English vocabularies."""


class NullInstance:
    """A member of the cluster that answers every request with one token, from the mailbox's own thread."""

    def __init__(self, name: str, router: str, secret: str, card: bytes, context_tokens: int) -> None:
        from memserve.base.types import KVGeometry, Role
        from memserve.protocol.messages import Heartbeat, Join
        from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
        from memserve.transport.mailbox import ZmqMailbox
        from memserve.transport.request_server import ListenAddress

        me = Peer(name, time.time_ns())
        self._router = Peer(ROUTER, 0)
        self._mailbox = ZmqMailbox(me, ListenAddress(secret), self._hear)
        geometry = KVGeometry(num_layers=30, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16")
        info = PeerInfo(
            me, Role.COLOCATED, self._mailbox.address, "null", geometry, 4096, 0, context_tokens, True,
            publishes_events=False, model_card=card,
        )  # fmt: skip
        self._mailbox.connect(self._router, router)
        self._welcomed = threading.Event()

        def beat() -> None:
            while True:
                self._mailbox.send(self._router, Heartbeat(Load()) if self._welcomed.is_set() else Join(info))
                time.sleep(0.5)

        threading.Thread(target=beat, daemon=True).start()

    def _hear(self, sender: Any, message: Any) -> None:
        from memserve.base.types import FinishReason, TokenOutput
        from memserve.protocol.messages import Dispatch, JoinAccepted, Tokens

        if isinstance(message, JoinAccepted):
            self._router = sender
            self._mailbox.connect(sender, self._mailbox_address_of(sender))
            self._welcomed.set()
        elif isinstance(message, Dispatch):
            request = message.request
            output = TokenOutput(request.request_id, 0, (100,), finish_reason=FinishReason.LENGTH)
            self._mailbox.send(sender, Tokens((output,)))

    def _mailbox_address_of(self, sender: Any) -> str:
        return f"tcp://{os.environ['ROUTER_ADDRESS']}"


def be_instances(model: Path, count: int) -> None:
    """The other process: ``count`` null instances, until stdin ends."""
    from memserve.model.loading.card import ModelCard

    config = json.loads((model / "config.json").read_text())
    context = int(config["max_position_embeddings"])
    card = ModelCard(model.name, context, int(config["vocab_size"]), (0,), {}, "TokenizersBackend").encode()
    router, secret = f"tcp://{os.environ['ROUTER_ADDRESS']}", os.environ["ROUTER_SECRET"]
    alive = [NullInstance(f"null-{number}", router, secret, card, context) for number in range(count)]
    sys.stdin.read()
    del alive


_FIXED = {
    b"/v1/models": b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"x","max_model_len":16384}]}',
    b"/health": b"OK",
    b"/version": b'{"version":"0.10.0"}',
    b"/get_server_info": b'{"model_path":"m","served_model_name":"m","tp_size":1,"dp_size":1,"version":"0.5.0"}',
    b"/get_model_info": b'{"model_path":"m","tokenizer_path":"m","is_generation":true}',
}
"""What routers ask servers before they send requests; ``/server_info`` and ``/model_info`` are asked for as well."""
_COMPLETION = (
    b'{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x",'
    b'"finish_reason":"length","logprobs":null}],'
    b'"usage":{"prompt_tokens":1024,"completion_tokens":1,"total_tokens":1025}}'
)


class NullServer(asyncio.Protocol):
    """A server that answers every completion with the same token, as quickly as Python can."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._buffer = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            fields = bytes(self._buffer[:head]).lower()
            words, length = fields.split(b" ", 2), re.search(rb"content-length: *(\d+)", fields)
            if len(words) < 3 or not words[2].startswith(b"http/1.1") or b"transfer-encoding:" in fields:
                self._transport.close()  # a router that tries HTTP/2 first
                return
            end = head + 4 + (int(length.group(1)) if length else 0)
            if len(self._buffer) < end:
                return
            del self._buffer[:end]
            body = _FIXED.get(words[1]) or _FIXED.get(b"/get_" + words[1][1:]) or _COMPLETION
            kind = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(kind % len(body) + body)


def be_servers(ports: list[int]) -> None:
    """Another process: a null server at each of ``ports``, until it is terminated."""
    import uvloop

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(NullServer, "127.0.0.1", port) for port in ports]
        await asyncio.gather(*(server.serve_forever() for server in servers))

    uvloop.run(serve())


def write_load(folder: Path, tokens: int, kind: str, vocabulary: int) -> Path:
    """A wrk script that posts the prompts in turn, each with its own tail. ``kind``: ``ids``, ``text`` or ``chats``."""
    rng, as_ids = random.Random(1), kind == "ids"

    def piece(count: int) -> str:
        if as_ids:
            return "".join(f"{rng.randrange(3, vocabulary)}," for _ in range(count))
        return "".join(f" {word}" for word in rng.choices(WORDS.split(), k=count))

    def chat() -> Iterator[str]:
        """One conversation's requests: each has all earlier turns, and ``tokens`` at the end."""
        turns = ""
        for _ in range(PER_GROUP):
            asked = piece(tokens // (2 * PER_GROUP))
            yield f'{{"model":"m","max_tokens":1,"messages":[{turns}{{"role":"user","content":"{asked}'
            answered = piece(tokens // (2 * PER_GROUP))
            turns += f'{{"role":"user","content":"{asked}"}},{{"role":"assistant","content":"{answered}"}},'

    bodies = [body for _ in range(GROUPS) for body in chat()] if kind == "chats" else []
    for _ in range(GROUPS if kind != "chats" else 0):
        shared = piece(tokens // 2)
        for _ in range(PER_GROUP):
            opened = '{"model":"m","max_tokens":1,"prompt":' + ("[" if as_ids else '"')
            bodies.append(opened + shared + piece(tokens // 2 - 12))  # the tail's digits are tokens, too
    (folder / "bodies.txt").write_text("\n".join(bodies))
    tail = '(3 + i % 40000) .. "]}"' if as_ids else '" " .. i .. "\\"' + ("}]}" if kind == "chats" else "}") + '"'
    path = "/v1/chat/completions" if kind == "chats" else "/v1/completions"
    script = folder / "load.lua"
    script.write_text(f"""
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
""")
    return script


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """Resident memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) / 1024 if found else 0.0


Router = tuple[str, str, int]
"""Name, address, process."""


def one_round(router: Router, script: Path, connections: int, seconds: float) -> tuple[float, ...]:
    """Requests/s, median and 99th percentile in ms, CPU of the router a request in us, failures."""
    _, url, pid = router
    before = cpu_seconds(pid)
    command = ["taskset", "-c", "1", "wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "--timeout", "10s"]
    run = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True, check=True)
    requests, micros, p50, p99, bad = map(int, run.stderr.split()[-5:])
    cpu_us = (cpu_seconds(pid) - before) / max(1, requests) * 1e6
    return requests / micros * 1e6, p50 / 1e3, p99 / 1e3, cpu_us, bad


def measure(routers: list[Router], script: Path, connections: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds of one case, in each of which the routers take turns."""
    runs: dict[Router, list[tuple[float, ...]]] = {router: [] for router in routers}
    for _ in range(rounds):
        for router in routers:
            runs[router].append(one_round(router, script, connections, seconds))
    found = []
    for router, of_router in runs.items():
        rate, p50_ms, p99_ms, cpu_us, bad = (statistics.median(column) for column in zip(*of_router, strict=True))
        found.append({
            "router": router[0], "requests_per_s": round(rate, 1), "p50_ms": round(p50_ms, 2),
            "p99_ms": round(p99_ms, 2), "router_cpu_us": round(cpu_us), "bad": int(bad),
            "router_mb": round(resident_mb(router[2])),
        })  # fmt: skip
    return found


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Start both processes, run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a model's folder, for its tokenizer and vocabulary")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", default="1,32")
    parser.add_argument("--tokens", default="1024,8192")
    parser.add_argument("--prompts", default="ids,text", help="how prompts go: ids, text, chats")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--rivals", default="", help="sglang-router and vllm-router, each with :POLICY")
    parser.add_argument("--rivals-python", default=sys.executable, help="the Python of the environment that has them")
    parser.add_argument("--be-instances", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--be-servers", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be_instances:
        be_instances(args.model, args.be_instances)
        return 0
    if args.be_servers:
        be_servers([int(port) for port in args.be_servers.split(",")])
        return 0
    if not shutil.which("wrk"):
        print("skipped: wrk is not installed (Debian: apt install wrk)")
        return 0
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        folder, secret = Path(name), secrets.token_urlsafe(32)
        (folder / "secret").write_text(secret)
        http, port = free_port(), free_port()
        serve = ["serve", "--model", str(args.model), "--prefill", "0", "--decode", "0", "--colocated", "0"]
        serve += ["--cluster-port", str(port), "--cluster-secret-file", str(folder / "secret"), "--port", str(http)]
        serve += ["--metadata", "none"]
        serve += ["--served-model-name", "m", "--policy", args.policy]
        router = subprocess.Popen(["taskset", "-c", "0", sys.executable, "-m", "memserve", *serve])
        null = [sys.executable, __file__, "--model", str(args.model), "--be-instances", str(args.instances)]
        environment = {**os.environ, "ROUTER_ADDRESS": f"127.0.0.1:{port}", "ROUTER_SECRET": secret}
        instances = subprocess.Popen(["taskset", "-c", "1", *null], stdin=subprocess.PIPE, env=environment)
        routers = [("memserve", f"http://127.0.0.1:{http}", router.pid)]
        processes = [instances, router]
        try:
            wait_until_ready(routers[0][1])
            for rival in filter(None, args.rivals.split(",")):
                routers.append(_start_rival(rival, args.rivals_python, args.instances, folder, processes))
            for tokens in map(int, args.tokens.split(",")):
                for kind in args.prompts.split(","):
                    script = write_load(folder, tokens, kind, vocabulary)
                    for connections in map(int, args.connections.split(",")):
                        case = {"tokens": tokens, "prompt": kind, "connections": connections}
                        for found in measure(routers, script, connections, args.seconds, args.rounds):
                            print(json.dumps(case | found), flush=True)
        finally:
            for process in processes:
                process.terminate()
                process.wait(30)
    return 0


def _start_rival(name: str, python: str, servers: int, folder: Path, processes: list[subprocess.Popen[Any]]) -> Router:
    """``sglang-router`` or ``vllm-router``, with its policy behind a colon, in front of null servers of its own."""
    module, _, policy = name.partition(":")
    ports = [free_port() for _ in range(servers)]
    null = [sys.executable, __file__, "--model", ".", "--be-servers", ",".join(map(str, ports))]
    processes.insert(0, subprocess.Popen(["taskset", "-c", "1", *null]))
    http, metrics = free_port(), free_port()
    command = [python, "-m", f"{module.replace('-', '_')}.launch_router", "--host", "127.0.0.1", "--port", str(http)]
    command += ["--prometheus-port", str(metrics), "--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports)]
    command += ["--policy", policy] if policy else []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / f"{module}.log").open("wb") as log:
        rival = subprocess.Popen(["taskset", "-c", "0", *command], stdout=log, stderr=log, env=environment)
    processes.insert(0, rival)
    url = f"http://127.0.0.1:{http}"
    try:
        wait_until_ready(url)
    except SystemExit:
        raise SystemExit(f"{name} did not become ready: {(folder / f'{module}.log').read_text()[-1000:]}") from None
    return name, url, rival.pid


def wait_until_ready(url: str) -> None:
    """Wait until the router there is. Ends the script when it takes too long."""
    until = time.monotonic() + START_S_MAX
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit("the router did not become ready")


if __name__ == "__main__":
    sys.exit(main())
