"""``memserve serve --ssd``: a conversation outlives every process, and a store that dies costs no answer."""

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

from geometries import SHAPES, Shape
from memserve import LLM
from memserve.base.types import SamplingParams
from served_cluster import WAIT_S, Server, eventually, is_alive
from slow_costs import save_slow_costs
from tiny_models import one_engine, prompt, save_folder, tiny_module

SHAPE = SHAPES["llama3"]
CODED = SHAPE.with_codes("int8")
BLOCK = SHAPE.kv.block_tokens
"""Tokens: the model's context is 256. In float32 a block has 8 MiB."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = save_folder(SHAPE.module(), tmp_path_factory.mktemp("models") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        save_slow_costs(folder, BLOCK, (SHAPE.kv.kv_dtype, CODED.kv.kv_dtype))
        yield folder


@pytest.fixture(scope="module")
def truth(model: Path) -> Iterator[Callable[..., Any]]:
    """What one engine without a cache answers, greedily: to tokens, with a count, by KV of a dtype."""
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "64MiB", "threads": 1, "enable_prefix_caching": False}
    greedy = SamplingParams(temperature=0)
    with ExitStack() as stack:
        llms = {
            kv_dtype: stack.enter_context(LLM(str(model), kv_dtype=kv_dtype, **options))
            for kv_dtype in ("auto", "int8")
        }
        yield lambda tokens, count, kv_dtype="auto": llms[kv_dtype].generate(
            [tokens], greedy, max_tokens=count, ignore_eos=True
        )[0]


class Kept:
    """A ``memserve serve`` whose store and metadata lie in one folder."""

    def __init__(self, model: Path, folder: Path, *shape: str, kv: Shape | None = SHAPE) -> None:
        self._model, self._folder, self._shape = model, folder, shape
        self._memory = kv.memory_flags(512) if kv is not None else ("--kv-memory", "8MiB")
        self.pids: set[int] = set()
        self.server = self.start()

    def start(self) -> Server:
        disks = ("--ssd", f"{self._folder}/ssd=512MiB", "--store-dram", "128MiB", "--ssd-sync", "none")
        where = (*self._memory, "--metadata", str(self._folder / "state"))
        self.server = Server(self._model, *self._shape, *disks, *where)
        self.pids |= {self.server.process.pid, *self.server.children().values()}
        return self.server

    def kill_everything(self) -> None:
        """Router, instances and store, with -9; and their shared memory, as a new start of the machine would."""
        pids = [self.server.process.pid, *self.server.children().values()]
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        memory = {Path(path) for path in re.findall(r"/dev/shm/memserve-store-[\w-]+\.data", maps)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.server.process.wait(60)
        eventually(lambda: not any(is_alive(pid) for pid in self.pids))
        for left in memory:
            for path in left.parent.glob(f"{left.stem}.*"):
                path.unlink()

    def end(self) -> None:
        self.server.process.send_signal(signal.SIGTERM)
        assert self.server.process.wait(60) == 0
        assert not any(is_alive(pid) for pid in self.pids)

    def ask(self, tokens: list[int], count: int) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.server.url}/completions", json=body | {"explain": True}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str, labels: str = "") -> float:
        page = httpx.get(self.server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
        return sum(float(value) for value in re.findall(rf"^memserve_{name}{{.*{labels}.*}} (.+)$", page, re.M))

    def stored_blocks(self) -> float:
        """Blocks that the store has, as the router knows."""
        return self.metric("store_tree_blocks")


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def start(*shape: str, kv: Shape | None = SHAPE, folder: Path = model) -> Kept:
        made.append(Kept(folder, tmp_path, *shape, kv=kv))
        return made[-1]

    yield start
    for each in made:
        for pid in [each.server.process.pid, *each.pids]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in prompt(length, seed)]


PAIR = ("--prefill", "1", "--decode", "1")


@pytest.mark.parametrize(("shape", "kv"), [(("--colocated", "1"), SHAPE), (PAIR, SHAPE), (PAIR, CODED)])
def test_a_conversation_outlives_every_process(kept, truth, shape, kv) -> None:
    """Two turns, kill -9 of everything, and the third turn finds both of them on the disk."""
    running = kept(*shape, kv=kv)
    history, turns = tokens(90, 1), []
    for turn in range(2):
        expected = truth(history, 20, kv.kv.kv_dtype)
        assert running.ask(history, 20)["choices"][0]["text"] == expected.text
        turns.append(len(history))
        history = [*history, *expected.outputs[0].tokens, *tokens(10, 10 + turn)]
    done = (turns[1] + 19) // BLOCK
    eventually(lambda: running.stored_blocks() >= done)
    eventually(lambda: running.metric("store_disk_values") >= done)
    running.kill_everything()
    running.start()
    eventually(lambda: running.stored_blocks() >= done)
    answer = running.ask(history, 20)
    assert answer["choices"][0]["text"] == truth(history, 20, kv.kv.kv_dtype).text
    facts = {fact["fact"]: fact["value"] for fact in answer["memserve"]["story"]}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= done * BLOCK, facts
    assert (facts["fetched_from"], facts["fetched_tier"]) == ("s1", "ssd")
    running.end()


def test_a_store_that_is_killed_costs_no_answer(kept, truth) -> None:
    """It is started again, with what its disk and its shared memory hold."""
    running = kept("--colocated", "1")
    question = tokens(120, 2)
    assert running.ask(question, 20)["choices"][0]["text"] == truth(question, 20).text
    eventually(lambda: running.stored_blocks() >= 120 // BLOCK)
    first = running.server.children()["s1"]
    os.kill(first, signal.SIGKILL)
    other = tokens(120, 3)
    assert running.ask(other, 20)["choices"][0]["text"] == truth(other, 20).text
    eventually(lambda: running.server.children().get("s1", first) != first)
    running.pids |= set(running.server.children().values())
    eventually(lambda: running.stored_blocks() >= 120 // BLOCK)
    longer = [*question, *tokens(10, 4)]
    assert running.ask(longer, 20)["choices"][0]["text"] == truth(longer, 20).text
    running.end()


@pytest.mark.parametrize(
    ("family", "shape"), [("qwen3_5", ("--colocated", "1")), ("qwen3_5", PAIR), ("mamba2", ("--colocated", "1"))]
)
def test_states_outlive_every_process(kept, tmp_path: Path, monkeypatch, family: str, shape) -> None:
    """As above, with a model that has recurrent states: the third turn goes on from KV and state of the second."""
    folder = save_folder(tiny_module(family), tmp_path / "stateful" / "tiny")
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(folder)
    running = kept(*shape, kv=None, folder=folder)
    with one_engine(folder) as complete:
        history = tokens(90, 1)
        for turn in range(2):
            text = complete(history, 34)
            assert running.ask(history, 34)["choices"][0]["text"] == text
            history = [*history, *(int(word[1:]) for word in text.split()), *tokens(10, 10 + turn)]
        text = complete(history, 20)
    eventually(lambda: running.metric("store_disk_values") >= running.stored_blocks() > 6)
    running.kill_everything()
    running.start()
    eventually(lambda: running.stored_blocks() > 6)
    answer = running.ask(history, 20)
    assert answer["choices"][0]["text"] == text
    facts = {fact["fact"]: fact["value"] for fact in answer["memserve"]["story"]}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128, facts
    assert (facts["fetched_from"], facts["fetched_tier"]) == ("s1", "ssd")
    running.end()
