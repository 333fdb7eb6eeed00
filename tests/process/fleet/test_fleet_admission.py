"""One admission for several routers of the same engines: the limit, a router that is killed, the end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from fleet_server import WAIT_S, FleetProcess
from ports import listening_sockets
from process_tree import named_children
from scripted_engine import Asked, ScriptedEngine, scripted_engines, well
from waiting import eventually

TRIES = 60
"""Of placing a request at the further router: the kernel gives each connection to either of two."""


class HoldingEngine:
    """Answers a prompt when it is released."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.url = engine.url
        self.started: list[str] = []
        self.released: set[str] = set()
        self.is_open = threading.Event()
        self.running = self.peak = 0
        engine.script = self.answer

    async def answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        prompt = asked.fields["prompt"]
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.started.append(prompt)
        while not (prompt in self.released or self.is_open.is_set()):
            await asyncio.sleep(0.005)
        self.running -= 1
        await well(asked, writer)


@pytest.fixture
def engine() -> Iterator[HoldingEngine]:
    with scripted_engines(1) as (scripted,):
        holding = HoldingEngine(scripted)
        yield holding
        holding.is_open.set()


class TwoRouters(FleetProcess):
    """An owner, which has an address of its own, and one further router."""

    def __init__(self, engine: HoldingEngine, active_max: int) -> None:
        limits = ("--admission", "bounded", "--max-active", str(active_max), "--admission-wait", "60")
        super().__init__("--engine", f"vllm={engine.url}", "--routers", "2", *limits)
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if "routers; engines join" in line)
        self.owner_url = re.findall(r"http://\S+", line)[0]
        self.engine, self.pool = engine, ThreadPoolExecutor(16)
        eventually(self.all_listen)

    def all_listen(self) -> bool:
        return listening_sockets(self.url) == 2 and "router-2" in named_children(self.process.pid)

    def post_later(self, prompt: str, url: str = "") -> Future[int]:
        """The answer's status, when it comes; 0: the connection broke."""

        def post() -> int:
            body = {"model": "scripted", "prompt": prompt}
            try:
                return httpx.post(f"{url or self.url}/v1/completions", json=body, timeout=WAIT_S).status_code
            except httpx.TransportError:
                return 0

        return self.pool.submit(post)

    def owner_metric(self, name: str) -> float:
        page = httpx.get(f"{self.owner_url}/metrics", timeout=WAIT_S).text
        return sum(float(value) for value in re.findall(rf"^memserve_{name}(?:{{.*}})? (.+)$", page, re.M))

    def queued(self) -> float:
        """How many have waited for admission so far, wherever they came."""
        return self.owner_metric("admission_queued_total")

    def hold_at_further_router(self, name: str) -> Future[int]:
        """A request that the engine holds, and that came by the further router."""
        for number in range(TRIES):
            prompt = f"{name}-{number}"
            answer = self.post_later(prompt)
            eventually(lambda prompt=prompt: prompt in self.engine.started)
            if not self.owner_metric("fleet_requests_open"):
                return answer
            self.engine.released.add(prompt)
            assert answer.result(WAIT_S) == 200
        raise AssertionError("no request came to the further router")


def test_no_more_run_than_may_whichever_router_is_asked(engine: HoldingEngine) -> None:
    with TwoRouters(engine, active_max=3) as server:
        answers = [server.post_later(f"r{number}") for number in range(16)]
        eventually(lambda: engine.running == 3 and server.queued() == 13)
        assert server.owner_metric("admission_active") == 3 and server.owner_metric("admission_waiting") == 13
        engine.is_open.set()
        assert [answer.result(WAIT_S) for answer in answers] == [200] * 16
        assert engine.peak == 3
        assert server.owner_metric("admission_admitted_total") == 16, "those of the further router are counted, too"


def test_a_killed_router_frees_what_it_had_admitted(engine: HoldingEngine) -> None:
    with TwoRouters(engine, active_max=2) as server:
        lost = [server.hold_at_further_router(name) for name in ("a", "b")]
        waiting = [server.post_later(name, server.owner_url) for name in ("c", "d")]
        eventually(lambda: server.queued() == 2)
        assert not {"c", "d"} & set(engine.started)
        os.kill(named_children(server.process.pid)["router-2"], signal.SIGKILL)
        eventually(lambda: {"c", "d"} <= set(engine.started))
        assert [answer.result(WAIT_S) for answer in lost] == [0, 0]
        engine.is_open.set()
        assert [answer.result(WAIT_S) for answer in waiting] == [200, 200]
        eventually(server.all_listen)
        engine.is_open.clear()
        held = server.hold_at_further_router("e")  # the one that came in its place asks as well
        engine.is_open.set()
        assert held.result(WAIT_S) == 200
        eventually(lambda: server.owner_metric("admission_active") == 0)


def test_requests_that_wait_are_answered_before_the_end(engine: HoldingEngine) -> None:
    with TwoRouters(engine, active_max=1) as server:
        answers = [server.hold_at_further_router("a")]
        answers += [server.post_later(f"r{number}") for number in range(8)]
        eventually(lambda: server.queued() == 8)
        server.process.terminate()
        eventually(lambda: listening_sockets(server.url) == 0)
        engine.is_open.set()
        assert [answer.result(WAIT_S) for answer in answers] == [200] * 9
