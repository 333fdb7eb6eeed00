"""``memserve serve`` as people start it: a router and instances in processes of their own, one of which gets killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memserve import LLM
from memserve.types import SamplingParams
from served_cluster import GREEDY, WAIT_S, Server, eventually, is_alive
from tiny_models import prompt, save_folder, tiny_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(folder: Path) -> Iterator[Callable[[list[int], int], str]]:
    """What one engine in one process answers, greedily."""
    with LLM(str(folder), dtype="float32", kv_memory="4MiB", threads=1) as llm:
        yield (
            lambda tokens, count: (
                llm.generate([tokens], SamplingParams(temperature=0), max_tokens=count, ignore_eos=True)[0].text
            )
        )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, "--prefill", "1", "--decode", "1")
    yield server
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait()


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in prompt(length, seed)]


def test_the_instances_are_named_by_the_ready_text_and_by_their_command_lines(server: Server) -> None:
    assert server.lines[0].startswith("ready in ") and server.lines[1].startswith("try: curl ")
    assert "d1 (decode), p1 (prefill); pd-caching-3" in server.lines[2]
    assert set(server.children()) == {"p1", "d1"} == server.members()
    assert server.client.models.list().data[0].id == "tiny"


def test_answers_are_those_of_one_engine_streamed_or_not(server: Server, truth) -> None:
    """Prompts within a block, beyond one, and again from the cache; parallel samples from one prompt."""
    for length in (5, 70, 100, 70):
        expected = truth(tokens(length, length), 40)
        assert server.complete(tokens(length, length), 40) == expected
        chunks = server.client.completions.create(prompt=tokens(length, length), max_tokens=40, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    both = server.client.completions.create(prompt=tokens(50, 9), max_tokens=20, n=2, **GREEDY).choices
    assert [choice.text for choice in both] == [truth(tokens(50, 9), 20)] * 2


def test_the_stream_goes_on_when_the_decode_instance_is_killed(server: Server, truth) -> None:
    chunks = server.client.completions.create(prompt=tokens(40, 7), max_tokens=200, stream=True, **GREEDY)
    pid = server.children()["d1"]
    text = ""
    for number, chunk in enumerate(chunks):
        text += chunk.choices[0].text
        if number == 3:
            os.kill(pid, signal.SIGKILL)
    assert text == truth(tokens(40, 7), 200)
    assert server.complete(tokens(60, 8), 10) == truth(tokens(60, 8), 10)  # with nobody but the prefill instance
    eventually(lambda: server.children().get("d1", pid) != pid)  # its successor loads


def test_the_end_is_clean(server: Server) -> None:
    before, pids = set(os.listdir("/dev/shm")), list(server.children().values())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == 0
    assert not any(is_alive(pid) for pid in pids)
    eventually(lambda: set(os.listdir("/dev/shm")) <= before)  # other tests have theirs, but not for long
