"""Long prompts that two instances compute at once, token for token as one engine does; a member killed meanwhile."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from memserve import LLM
from memserve.system.memory import usable_cores
from served_cluster import WAIT_S, Server, eventually
from slow_costs import STRIPES, save_slow_costs
from tiny_models import prompt, save_folder, tiny_module
from waiting import stop_process

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="instances that share one core compute no stripes")
STEP, PROMPT_TOKENS, ANSWER_TOKENS = 32, 230, 12
FLAGS = {"llama": (), "gemma2": ("--window-kv", "together")}
"""By family; ``test_gates.py`` has more of them. Windows take part where their KV lies with all other."""


def tokens(seed: int) -> list[int]:
    return [int(token) for token in prompt(PROMPT_TOKENS, 300 + seed)]


@contextmanager
def served(family: str, tmp_path: Path) -> Iterator[tuple[Server, list[str]]]:
    """Two instances that believe that computing is slow, and the answers of one engine."""
    folder = save_folder(tiny_module(family), tmp_path / "tiny")
    save_slow_costs(folder, costs=STRIPES)
    with LLM(str(folder), dtype="float32", kv_memory="4MiB", threads=1) as one:
        options = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        expected = [one.generate(tokens(seed), **options)[0].text for seed in range(3)]
    server = Server(folder, "--colocated", "2", "--max-step-tokens", str(STEP), *FLAGS[family])
    try:
        yield server, expected
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)


def complete(server: Server, seed: int) -> dict[str, Any]:
    """An answer, with what the router tells of it."""
    body = {"model": "tiny", "prompt": tokens(seed), "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{server.url}/completions", json=body | {"explain": True}, timeout=WAIT_S)
    return answer.json()


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def striped(server: Server) -> int:
    page = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
    return int(float(re.search(r"^memserve_router_prompts_striped_total (.+)$", page, re.M)[1]))


@pytest.mark.parametrize("family", FLAGS)
def test_two_instances_compute_what_one_does(family: str, tmp_path: Path) -> None:
    with served(family, tmp_path) as (server, expected):
        answer = complete(server, 0)
        assert text(answer) == expected[0] and striped(server) == 1
        told = re.search(r"'stripes', 'value': '([^']+)'", str(answer))[1]
        assert {"c1: tokens", "c2: tokens"} <= set(re.findall(r"c\d: tokens", told)) and f"to {PROMPT_TOKENS}" in told
        assert text(complete(server, 0)) == expected[0], "out of the cache"
        assert server.counter("cached_tokens") >= PROMPT_TOKENS - STEP


@pytest.mark.parametrize("victim", ["runner", "other"])
def test_member_killed_while_the_prompt_is_computed(victim: str, tmp_path: Path) -> None:
    """It stands still before its order comes, and dies before it computes anything: the others wait for its layers."""
    with served("llama", tmp_path) as (server, expected):
        told = re.search(r"'stripes', 'value': '([^']+)'", str(complete(server, 1)))[1]
        runner = re.search(rf"(c\d): [^;]*to {PROMPT_TOKENS}", told)[1]
        server.fresh_metrics()
        name = runner if victim == "runner" else next(iter({"c1", "c2"} - {runner}))
        process, before = server.children()[name], striped(server)
        stop_process(process)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, server, 2)
            eventually(lambda: striped(server) == before + 1)
            assert not answer.done()
            os.kill(process, signal.SIGKILL)
            assert text(answer.result()) == expected[2]
