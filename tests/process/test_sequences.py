"""Prompts that fit no instance, served by three of four together, token for token as one engine does."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from memserve import LLM
from served_cluster import GREEDY, WAIT_S, Server, eventually
from tiny_models import prompt, save_folder, tiny_module
from waiting import stop_process

PROMPT_TOKENS, ANSWER_TOKENS = 230, 20
KV = str(3 * 12_288)
"""Three blocks: 96 tokens of an instance, where the prompt alone has 230."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    "penalties": {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, "--colocated", "4", "--sequence-parallel", "3", "--kv-memory", KV)
    yield server
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[str, int], str]:
    """By one engine with room for all of it."""
    with LLM(str(folder), dtype="float32", kv_memory="4MiB", threads=1) as one:
        return {
            (kind, seed): one.generate(tokens(seed), max_tokens=ANSWER_TOKENS, ignore_eos=True, **options)[0].text
            for kind, options in KINDS.items()
            for seed in range(6)
        }


def tokens(seed: int) -> list[int]:
    return [int(token) for token in prompt(PROMPT_TOKENS, 100 + seed)]


def complete(server: Server, kind: str, seed: int) -> str:
    options = dict(KINDS[kind])
    extra = {"ignore_eos": True}
    if "repetition_penalty" in options:
        extra["repetition_penalty"] = options.pop("repetition_penalty")
    answer = server.client.completions.create(
        model="tiny", prompt=tokens(seed), max_tokens=ANSWER_TOKENS, extra_body=extra, **options
    )
    return answer.choices[0].text


@pytest.mark.parametrize("kind", KINDS)
def test_three_instances_answer_as_one_large_one(server: Server, expected: dict[Any, str], kind: str) -> None:
    assert complete(server, kind, 0) == expected[kind, 0]


def places(server: Server) -> list[str]:
    """The instances that share a sequence of an idle cluster, in the order of their parts."""
    body = {"model": "tiny", "prompt": tokens(5), "max_tokens": 2, "temperature": 0, "explain": True}
    server.fresh_metrics()  # heartbeats have said that all are idle, before and after
    told = httpx.post(f"{server.url}/completions", json=body, timeout=WAIT_S).text
    server.fresh_metrics()
    return re.findall(r"(c\d): (?:tokens|from)", told)


def test_shared_sequence_is_explained_and_counted(server: Server) -> None:
    before = split(server)
    names = places(server)
    assert len(set(names)) == 3 and set(names) < {"c1", "c2", "c3", "c4"}
    assert split(server) == before + 1


def split(server: Server) -> int:
    page = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
    return int(float(re.search(r"^memserve_router_sequences_split_total (.+)$", page, re.M)[1]))


def test_ordinary_requests_run_beside_a_long_one(server: Server, folder: Path) -> None:
    """They fit the instance that no part lies at, and those with parts when these have ended."""
    short = [int(token) for token in prompt(40, 1)]
    with ThreadPoolExecutor(8) as pool:
        long = pool.submit(complete, server, "greedy", 1)
        many = [pool.submit(server.complete, short, 8) for _ in range(7)]
        answers = {one.result() for one in many}
        assert len(answers) == 1 and long.result()


@pytest.mark.parametrize("at", [0, 1])
def test_segment_holder_killed_during_prefill(server: Server, expected: dict[Any, str], at: int) -> None:
    """It stands still before its part arrives, and dies before it has computed any of that."""
    eventually(lambda: len(server.members()) == 4)
    holder, before = server.children()[places(server)[at]], split(server)
    stop_process(holder)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, server, "drawn", 2 + at)
        eventually(lambda: split(server) == before + 1)
        assert not answer.done()
        os.kill(holder, signal.SIGKILL)
        assert answer.result() == expected["drawn", 2 + at]


def test_segment_holder_killed_during_decode(server: Server, expected: dict[Any, str]) -> None:
    eventually(lambda: len(server.members()) == 4)
    holder, before = server.children()[places(server)[0]], split(server)
    stream = server.client.completions.create(prompt=tokens(4), max_tokens=ANSWER_TOKENS, stream=True, **GREEDY)
    chunks = iter(stream)
    text = next(chunks).choices[0].text
    stop_process(holder)
    os.kill(holder, signal.SIGKILL)
    read = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert text + "".join(read) == expected["greedy", 4]
    assert split(server) == before + 2


def test_prompt_too_long_for_all_instances_is_rejected(server: Server) -> None:
    body = {"model": "tiny", "prompt": tokens(0) + tokens(1), "max_tokens": 2}
    answer = httpx.post(f"{server.url}/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400 and "256 tokens" in answer.text
