"""A router in front of scripted engines: on a thread of this process, or as a process."""

from __future__ import annotations

import contextlib
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from memserve.api.http.middleware import KeyRing
from memserve.api.http.server import DrainedApp, Server, bind
from memserve.api.http.tls import Tls
from memserve.base.config import ClusterConfig
from memserve.fleet.app import create_fleet_app
from memserve.fleet.host import FleetHost
from memserve.fleet.messages import EngineSpec, read_engine
from ports import free_port
from scripted_engine import MODEL, ScriptedEngine

STEADY_S = 20.0
"""No wait of these tests is longer."""


@dataclass
class FleetServer:
    """The router's address, its machine's host, and a client."""

    url: str
    host: FleetHost
    server: Server
    picker: str = ""
    """HOST:PORT of its endpoint picker; empty: it has none."""

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """A request for an answer."""
        body = {"model": MODEL, "prompt": "hi", **fields}
        return httpx.post(self.url + path, json=body, timeout=STEADY_S)

    def get(self, path: str) -> httpx.Response:
        """A page."""
        return httpx.get(self.url + path, timeout=STEADY_S)


def spec_of(engine: ScriptedEngine, **more: str) -> EngineSpec:
    """The option that names ``engine``."""
    return read_engine(",".join([f"vllm={engine.url}", *(f"{name}={value}" for name, value in more.items())]))


@contextlib.contextmanager
def fleet_server(
    specs: list[EngineSpec], config: ClusterConfig | None = None, engine_key: Any = None, *,
    picks: bool = False, tls: Tls | None = None, **options: Any,
) -> Iterator[FleetServer]:  # fmt: skip
    """Serve; afterwards the machine must hold no request. ``picks``: gateways may ask it where requests go, with
    ``tls`` in a channel of its own."""
    host = FleetHost(specs, config or ClusterConfig(), engine_key=engine_key)
    app: DrainedApp = create_fleet_app(host, **options)
    port = free_port() if picks else 0
    if picks:
        app = _with_picker(app, host, port, tls, options)
    ready = threading.Event()
    with bind("127.0.0.1", 0) as listener:
        server = Server(app, drain_s=5.0, on_ready=ready.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        assert ready.wait(STEADY_S)
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield FleetServer(url, host, server, f"127.0.0.1:{port}" if picks else "")
        finally:
            server.should_exit = True
            thread.join(STEADY_S)
            assert not thread.is_alive()
    assert host.requests_open == 0
    host.machine.check_invariants()


def _with_picker(app: DrainedApp, host: FleetHost, port: int, tls: Tls | None, options: dict[str, Any]) -> DrainedApp:
    from memserve.fleet.gateway.picker import Picker
    from memserve.fleet.gateway.server import PickerAddress, PickerServer, WithPicker

    picker = Picker(host, app.state.edge, KeyRing(options.get("api_keys", ())), options.get("silence_s", STEADY_S))
    return WithPicker(app, PickerServer(picker, PickerAddress("127.0.0.1", port, tls), 5.0))


WAIT_S = 60.0


class FleetProcess:
    """``memserve serve --engine`` in a process of its own."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "memserve", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and select.select([self.process.stdout], [], [], WAIT_S)[0]
        line = self.process.stdout.readline()
        found = re.search(r"http://[^ ]+(?=/v1)", line)
        assert found is not None, line
        self.url = found[0]

    def post(self, key: str = "none", **fields: object) -> httpx.Response:
        body = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 2, **fields}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)

    def sample(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text
        return sum(float(value) for value in re.findall(rf"^memserve_{name}(?:{{.*}})? (.+)$", page, re.M))

    def __enter__(self) -> FleetProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0
