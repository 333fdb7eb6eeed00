"""Two models behind one HTTP front, with engines that say what model they are."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from api_world import TinyModel, says
from fake_engine import FakeEngine
from memserve.api.app import create_app
from memserve.api.front import ModelAdmin, ModelFront, ServerKeys
from memserve.api.http.config import EdgeConfig
from memserve.api.http.limits import Edge
from memserve.api.http.server import Server, bind
from memserve.api.metrics.http import ApiMetrics
from memserve.api.model_table import ModelPart, ModelTable
from memserve.api.sleeping import ModelSleep
from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.fleet.app import RelayedFleet, create_fleet_app, without_admission
from memserve.fleet.host import FleetHost
from memserve.fleet.messages import EngineSpec
from memserve.system.secrets import Followed

QUESTION = [{"role": "user", "content": "hello"}]


class AddedModels:
    """Starts models that say their names; and keeps a record of how instances of ``two`` were started and ended."""

    def __init__(self, edge: Edge, engines: dict[str, FakeEngine]) -> None:
        self._edge, self._engines = edge, engines
        self.closed: list[str] = []
        self.instances: list[bool] = []

    def open_model(self, text: str) -> ModelPart:
        name, equals, _ = text.partition("=")
        if not equals:
            raise UserError(f"cannot read {text!r}")
        engine = self._engines[name] = FakeEngine(says(f"I am {name}"))
        return ModelPart(name, create_app(engine, TinyModel(name), edge=self._edge), source=text)

    def close_model(self, name: str) -> None:
        self.closed.append(name)


@dataclasses.dataclass
class Front:
    url: str
    engines: dict[str, FakeEngine]
    front: ModelFront
    server: Server
    host: AddedModels
    relayed: RelayedFleet | None = None

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def ask(self, **fields: Any) -> str:
        return self.post("/v1/chat/completions", {"messages": QUESTION} | fields).json()["choices"][0]["message"][
            "content"
        ]


def relayed_fleet(specs: Sequence[EngineSpec], edge: Edge, engines_key: str, **options: Any) -> RelayedFleet:
    """Engines of other projects beside the models. ``engines_key``: they come and go with it; empty: they do not."""
    host = FleetHost(specs, without_admission(ClusterConfig()))
    keys = {name: options[name] for name in ("api_keys", "metrics_keys") if name in options}
    return RelayedFleet(host, create_fleet_app(host, edge=edge, engines_key=engines_key or None, **keys))


@contextmanager
def running_front(
    folder: Path | None = None, limits: EdgeConfig | None = None, admin_key: str = "",
    specs: Sequence[EngineSpec] | None = None, engines_key: str = "", **options: Any,
) -> Iterator[Front]:  # fmt: skip
    """Models ``one`` and ``two`` that say their names; afterwards nothing may be left in their engines. ``admin_key``:
    further ones come and go, from a :class:`AddedModels`. ``specs``: with engines of other projects beside them."""
    limits, texts = limits or EdgeConfig(), {"one": "I am the first", "two": "I am the second"}
    edge = Edge(limits, ApiMetrics())
    engines = {name: FakeEngine(says(text)) for name, text in texts.items()}
    parts = [
        ModelPart(
            name, create_app(engine, TinyModel(name), aliases=[f"org/{name}"], limits=limits, edge=edge, **options)
        )
        for name, engine in engines.items()
    ]
    host = AddedModels(edge, engines)
    parts[1] = dataclasses.replace(parts[1], sleep=ModelSleep("two", None, host.instances.append))
    admin = ModelAdmin(host, Followed.of_constant(admin_key)) if admin_key else None
    keys = ServerKeys(options.get("api_keys", ()), options.get("metrics_keys", ()))
    relayed = None if specs is None else relayed_fleet(specs, edge, engines_key, **options)
    table, config = ModelTable(parts, relayed), options.get("config")
    front = ModelFront(table, edge, keys=keys, config=config, batches_folder=folder, admin=admin)
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(front, drain_s=5.0, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with ExitStack() as stack:
        stack.callback(lambda: [engine.close() for engine in engines.values()])
        assert ready.wait(20)
        try:
            yield Front(url, engines, front, server, host, relayed)
        finally:
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive() and server._hub.calls_open == 0
        assert edge.bodies.reserved_bytes == 0
        assert all(engine.requests_outstanding == 0 for engine in engines.values())
        if relayed is not None:
            assert relayed.host.requests_open == 0
            relayed.host.machine.check_invariants()
