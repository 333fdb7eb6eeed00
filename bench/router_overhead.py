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

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from harness.flags import Commas, options, save
from harness.instant import json_response, serve_instantly
from harness.processes import process, resident_bytes
from harness.rounds import medians, turns
from harness.routers import (
    Router,
    memserve_router,
    need_wrk,
    on_core,
    rival_router,
    run_wrk,
    vocabulary_of,
    wait_until_ready,
    write_load,
)
from harness.tables import Table

from ports import free_port

ROUTER_CORE, LOAD_CORE = 0, 1


class NullInstance:
    """A member of the cluster that answers every request with one token, from the mailbox's own thread."""

    def __init__(self, name: str, router: str, secret: str, card: bytes, context_tokens: int) -> None:
        from memserve.base.types import KVGeometry, Role
        from memserve.protocol.messages import Heartbeat, Join
        from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
        from memserve.transport.mailbox import ZmqMailbox
        from memserve.transport.network_devices import ListenAddress

        self_peer = Peer(name, time.time_ns())
        self._router = Peer(ROUTER, 0)
        self._mailbox = ZmqMailbox(self_peer, ListenAddress(secret), self._hear)
        geometry = KVGeometry(num_layers=30, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16")
        info = PeerInfo(
            self_peer, Role.COLOCATED, self._mailbox.address, "null", geometry, 4096, 0, context_tokens, True,
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
    """The other process: ``count`` null instances, until it is ended."""
    from memserve.model.loading.card import ModelCard

    config = json.loads((model / "config.json").read_text())
    context = int(config["max_position_embeddings"])
    card = ModelCard(model.name, context, int(config["vocab_size"]), (0,), {}, "TokenizersBackend").encode()
    router, secret = f"tcp://{os.environ['ROUTER_ADDRESS']}", os.environ["ROUTER_SECRET"]
    instances = [NullInstance(f"null-{number}", router, secret, card, context) for number in range(count)]
    threading.Event().wait()
    del instances


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


def respond(path: bytes) -> bytes:
    """What a null server says."""
    return json_response(_FIXED.get(path) or _FIXED.get(b"/get_" + path[1:]) or _COMPLETION)


COLUMNS = {
    "tokens": "{tokens}", "prompt": "{prompt}", "connections": "{connections}", "router": "{router}",
    "requests/s": "{requests_per_s:,.1f}", "p50, ms": "{p50_ms:.2f}", "p99, ms": "{p99_ms:.2f}",
    "router CPU, us": "{router_cpu_us:.0f}", "router, MB": "{router_mb:.0f}", "bad": "{bad:.0f}",
}  # fmt: skip


def measure(routers: list[Router], script: Path, connections: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds of one case, in each of which the routers take turns."""
    runs: dict[Router, list[dict[str, Any]]] = {router: [] for router in routers}
    for _, router in turns(rounds, routers):
        runs[router].append(run_wrk(router.url, script, connections, seconds, [router.pid], LOAD_CORE))
    memory = {router: resident_bytes(router.pid) / (1 << 20) for router in routers}
    return [{"router": router.name, "router_mb": memory[router], **medians(rows)} for router, rows in runs.items()]


@contextmanager
def null_router(model: Path, folder: Path, instances: int, *flags: str) -> Iterator[Router]:
    """The router on its core, in front of null instances on the other."""
    command = [*on_core(LOAD_CORE), sys.executable, __file__, "--model", str(model), "--be-instances", str(instances)]
    with memserve_router(str(model), folder, *flags, core=ROUTER_CORE) as router:
        environment = {**os.environ, "ROUTER_ADDRESS": router.cluster, "ROUTER_SECRET": router.secret}
        with process(command, environment=environment):
            wait_until_ready(router.url)
            yield router


@contextmanager
def null_rival(name: str, python: str, servers: int, folder: Path) -> Iterator[Router]:
    """A rival on that core, in front of null servers of its own."""
    ports = [free_port() for _ in range(servers)]
    command = [*on_core(LOAD_CORE), sys.executable, __file__, "--model", "."]
    urls, log = [f"http://127.0.0.1:{port}" for port in ports], folder / f"{name.partition(':')[0]}.log"
    with (
        process([*command, "--be-servers", ",".join(map(str, ports))]),
        rival_router(name, python, urls, log, core=ROUTER_CORE) as router,
    ):
        yield router


def main() -> None:
    args = options(
        __doc__, required="model", hidden="be_instances be_servers",
        model=(Path, "a model's folder, for its tokenizer and vocabulary"), instances=8, seconds=5.0, rounds=3,
        connections=Commas(1, 32), tokens=Commas(1024, 8192),
        prompts=(Commas("ids", "text"), "how prompts go: ids, text, chats"), policy="cost",
        rivals=("", "sglang-router and vllm-router, each with :POLICY"),
        rivals_python=(sys.executable, "the Python of the environment that has them"), be_instances=0, be_servers="",
    )  # fmt: skip
    if args.be_instances:
        return be_instances(args.model, args.be_instances)
    if args.be_servers:
        return serve_instantly(respond, [int(port) for port in args.be_servers.split(",")])
    need_wrk()
    table, rows = Table(COLUMNS), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        routers = [
            stack.enter_context(null_router(args.model, folder, args.instances, "--policy", args.policy)),
            *(
                stack.enter_context(null_rival(name, args.rivals_python, args.instances, folder))
                for name in filter(None, args.rivals.split(","))
            ),
        ]
        for tokens, kind in product(args.tokens, args.prompts):
            script = write_load(folder, tokens, kind, vocabulary_of(args.model))
            for connections in args.connections:
                case = {"tokens": tokens, "prompt": kind, "connections": connections}
                for results in measure(routers, script, connections, args.seconds, args.rounds):
                    rows.append(case | results)
                    table.show(rows[-1])
    save(args, rows)
    return None


if __name__ == "__main__":
    sys.exit(main())
