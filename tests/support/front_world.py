"""Two models behind one HTTP front, with engines that say what model they are."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from api_world import TinyModel, says
from fake_engine import FakeEngine
from memserve.api.app import create_app
from memserve.api.front import ModelFront, ModelPart
from memserve.api.http.config import EdgeConfig
from memserve.api.http.limits import Edge
from memserve.api.http.server import Server, bind
from memserve.api.metrics.http import ApiMetrics

QUESTION = [{"role": "user", "content": "hello"}]


@dataclasses.dataclass
class Front:
    url: str
    engines: dict[str, FakeEngine]
    front: ModelFront
    server: Server

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def ask(self, **fields: Any) -> str:
        return self.post("/v1/chat/completions", {"messages": QUESTION} | fields).json()["choices"][0]["message"][
            "content"
        ]


@contextmanager
def running_front(folder: Path | None = None, limits: EdgeConfig | None = None, **options: Any) -> Iterator[Front]:
    """Models ``one`` and ``two`` that say their names; afterwards nothing may be left in their engines."""
    limits, texts = limits or EdgeConfig(), {"one": "I am the first", "two": "I am the second"}
    edge = Edge(limits, ApiMetrics())
    engines = {name: FakeEngine(says(text)) for name, text in texts.items()}
    parts = [
        ModelPart(
            name, create_app(engine, TinyModel(name), aliases=[f"org/{name}"], limits=limits, edge=edge, **options)
        )
        for name, engine in engines.items()
    ]
    front = ModelFront(parts, edge, batches_folder=folder, **options)
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(front, drain_s=5.0, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.close)
        assert ready.wait(20)
        try:
            yield Front(url, engines, front, server)
        finally:
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive() and server._hub.calls_open == 0
        assert edge.bodies.reserved_bytes == 0
        assert all(engine.requests_outstanding == 0 for engine in engines.values())
