"""A router in front of scripted engines, as ``memserve serve --engine`` makes it, on a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from memserve.api.http.server import Server, bind
from memserve.base.config import ClusterConfig
from memserve.fleet.app import create_fleet_app
from memserve.fleet.host import FleetHost
from memserve.fleet.messages import EngineSpec, read_engine
from scripted_engine import MODEL, ScriptedEngine

STEADY_S = 20.0
"""No wait of these tests is longer."""


@dataclass
class FleetServer:
    """The router's address, its machine's host, and a client."""

    url: str
    host: FleetHost
    server: Server

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
    specs: list[EngineSpec], config: ClusterConfig | None = None, engine_key: Any = None, **options: Any
) -> Iterator[FleetServer]:
    """Serve; afterwards the machine must hold no request."""
    host = FleetHost(specs, config or ClusterConfig(), engine_key=engine_key)
    app = create_fleet_app(host, **options)
    ready = threading.Event()
    with bind("127.0.0.1", 0) as listener:
        server = Server(app, drain_s=5.0, on_ready=ready.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        assert ready.wait(STEADY_S)
        try:
            yield FleetServer(f"http://127.0.0.1:{listener.getsockname()[1]}", host, server)
        finally:
            server.should_exit = True
            thread.join(STEADY_S)
            assert not thread.is_alive()
    assert host.requests_open == 0
    host.machine.check_invariants()
