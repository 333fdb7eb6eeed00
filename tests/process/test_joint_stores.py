"""``memserve serve --store A,B,C``: real stores as one; one is killed with -9, costs no hit, and comes back."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from served_cluster import WAIT_S, Server, eventually, is_alive
from served_store import ServedStore
from tiny_models import one_engine, prompt, save_folder, tiny_module

BLOCK = 8
"""Tokens: the model's context is 256."""
LENGTH = 205
SEEDS = range(1, 7)
BLOCKS = len(SEEDS) * (LENGTH // BLOCK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> Iterator[Callable[[list[int], int], str]]:
    with one_engine(model) as answer:
        yield answer


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, ServedStore]]:
    with ExitStack() as stack:
        stores = {}
        for name in "abc":
            (tmp_path / name).mkdir()
            stores[name] = stack.enter_context(ServedStore(tmp_path / name, dram="16MiB"))
        yield stores


class Serving:
    """One ``memserve serve`` after the other, with the same stores."""

    def __init__(self, model: Path, stores: dict[str, ServedStore], copies: int) -> None:
        self._model, self._stores, self._copies = model, stores, copies
        self.pids: set[int] = set()

    def start(self) -> None:
        addresses = ",".join(store.address for store in self._stores.values())
        secret_file = self._stores["a"].secret_file
        named = ("--store", addresses, "--store-copies", str(self._copies), "--cluster-secret-file", str(secret_file))
        self.server = Server(self._model, "--colocated", "1", "--block-tokens", str(BLOCK), *named)
        self.pids |= {self.server.process.pid, *self.server.children().values()}

    def kill_everything(self) -> None:
        for pid in self.pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.server.process.wait(60)
        eventually(lambda: not any(is_alive(pid) for pid in self.pids))

    def ask(self, seed: int) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": tokens(seed), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.server.url}/completions", json=body | {"explain": True}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def blocks_by_store(self) -> dict[str, float]:
        """As the router knows, by the name of the store."""
        page = httpx.get(self.server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
        rows = re.findall(r'^memserve_store_tree_blocks\{.*?"([^"]+)".*\} (.+)$', page, re.M)
        return {name: float(count) for name, count in rows}


def tokens(seed: int) -> list[int]:
    return [int(token) for token in prompt(LENGTH, seed)]


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    return {fact["fact"]: fact["value"] for fact in answer["memserve"]["story"]}


@pytest.fixture
def serving(model: Path, stores: dict[str, ServedStore]) -> Iterator[Serving]:
    serving = Serving(model, stores, copies=2)
    yield serving
    serving.kill_everything()


def test_killed_store_costs_no_hit_and_is_caught_up(serving, stores, truth, tmp_path, monkeypatch) -> None:
    """Of three stores with two copies. What it has lost, memory and all, the others give back."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "first"))
    serving.start()
    for seed in SEEDS:
        assert serving.ask(seed)["choices"][0]["text"] == truth(tokens(seed), 8)
    eventually(lambda: sum(serving.blocks_by_store().values()) >= 2 * BLOCKS)
    counts = serving.blocks_by_store()
    assert len(counts) == 3 and min(counts.values()) > BLOCKS / 3
    serving.kill_everything()

    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "second"))  # the instance knows nothing of its own speed
    serving.start()
    eventually(lambda: sum(serving.blocks_by_store().values()) >= 2 * BLOCKS)
    lost = stores["b"]
    lost.kill()
    for path in Path("/dev/shm").glob(f"memserve-store-{lost.name[:24]}*"):
        path.unlink()
    eventually(lambda: len(serving.blocks_by_store()) == 2)
    for seed in SEEDS:
        answer = serving.ask(seed)
        assert answer["choices"][0]["text"] == truth(tokens(seed), 8)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= LENGTH // BLOCK * BLOCK, facts(answer)
        assert facts(answer)["fetched_tier"] == "store"
    eventually(lambda: all(count >= BLOCKS for count in serving.blocks_by_store().values()))

    lost.restart()
    eventually(lambda: serving.blocks_by_store().get(lost.name, 0) >= counts[lost.name])
    eventually(lambda: sum(serving.blocks_by_store().values()) <= 2.3 * BLOCKS)
