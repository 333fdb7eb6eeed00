"""Models that sleep, come and go behind two routers: any of them answers alike, and no request is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from ports import listening_sockets
from router_kills import Killed
from served_cluster import eventually
from tiny_models import greedy_answers, prompt, save_folder, tiny_module

TIMES = 16
"""Connections, which the kernel spreads over both routers."""
COUNT = 6


class TwoRouters:
    """``one``, for which both routers place requests; ``two``, which may sleep; ``three``, which may be added."""

    def __init__(self, folder: Path, *, is_sleeper_first: bool = False) -> None:
        self.modules = {
            "one": tiny_module("llama", 1),
            "two": tiny_module("qwen3", 2),
            "three": tiny_module("llama", 3),
        }
        self.paths = {name: save_folder(module, folder / name) for name, module in self.modules.items()}
        key = folder / "key"
        key.touch(0o600)
        key.write_text("let-me\n")
        texts = [f"one={self.paths['one']},colocated=1", f"two={self.paths['two']},colocated=1,sleep-after=3600"]
        first, second = reversed(texts) if is_sleeper_first else texts
        flags = ("--model", second, "--routers", "2", "--admin-key-file", str(key))
        self.killed = Killed(first, folder / "state", *flags)
        eventually(self.are_both_there)

    @property
    def url(self) -> str:
        return self.killed.server.url

    def are_both_there(self) -> bool:
        return listening_sockets(self.url) == 2 and "router-2" in self.killed.server.children()

    def ask(self, name: str, tokens: Sequence[int] = (5, 6, 7)) -> httpx.Response:
        body = {"model": name, "prompt": list(tokens), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/completions", json=body | {"return_token_ids": True}, timeout=120)

    def check(self, name: str, seed: int) -> list[httpx.Response]:
        """Both routers answer, as transformers does."""
        prompts = [prompt(20, seed + number).tolist() for number in range(TIMES)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda tokens: self.ask(name, tokens), prompts))
        given = [answer.raise_for_status().json()["choices"][0]["token_ids"] for answer in answers]
        with torch.inference_mode():
            assert given == greedy_answers(self.modules[name], prompts, COUNT, given)
        return answers

    def operate(self, method: str, path: str = "", body: object = None) -> httpx.Response:
        url, headers = f"{self.url.removesuffix('/v1')}/models{path}", {"authorization": "Bearer let-me"}
        return httpx.request(method, url, json=body, headers=headers, timeout=120)

    def listed(self) -> set[tuple[str, ...]]:
        """What ``/v1/models`` says, of both routers."""
        pages = [httpx.get(f"{self.url}/models", timeout=60).raise_for_status().json() for _ in range(TIMES)]
        return {tuple(card["id"] for card in page["data"]) for page in pages}


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRouters]:
    started = TwoRouters(tmp_path_factory.mktemp("models"))
    yield started
    started.killed.end()


def test_a_model_that_sleeps_wakes_whichever_router_is_asked(routers: TwoRouters) -> None:
    routers.check("one", 100)
    for number in range(4):
        assert routers.operate("POST", "/two/sleep").raise_for_status().json()["state"] == "asleep"
        answers = routers.check("two", 200 + TIMES * number)
        assert any(int(answer.headers.get("x-memserve-wake-ms", 0)) > 0 for answer in answers)
    assert routers.listed() == {("one", "two")}


def test_no_request_is_lost_while_a_model_falls_asleep(routers: TwoRouters) -> None:
    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(routers.ask, "two") for _ in range(60)]
        slept = 0
        while not all(answer.done() for answer in asking) or not slept:
            answer = routers.operate("POST", "/two/sleep")
            assert answer.status_code in (200, 409), answer.text
            slept += answer.status_code == 200
    assert {answer.result().status_code for answer in asking} == {200}
    routers.check("two", 300)


def test_models_come_and_go_at_any_router(routers: TwoRouters) -> None:
    text = f"three={routers.paths['three']},colocated=1,dtype=float32,kv-memory=4MiB,threads=1"
    for _ in range(2):
        assert {routers.ask("three").status_code for _ in range(TIMES)} == {404}
        assert routers.operate("POST", body={"model": text}).raise_for_status().json()["name"] == "three"
        assert routers.listed() == {("one", "two", "three")}
        routers.check("three", 400)
        states = [routers.operate("GET").raise_for_status().json()["models"] for _ in range(TIMES)]
        assert {tuple(state["name"] for state in page) for page in states} == {("one", "two", "three")}
        assert routers.operate("DELETE", "/three").raise_for_status().json()["removed"]
        assert routers.listed() == {("one", "two")}
    unknown = routers.ask("no-such-model")
    assert unknown.status_code == 404 and "one, two" in unknown.text


def test_a_model_of_all_routers_neither_goes_nor_sleeps(routers: TwoRouters) -> None:
    for method, path in (("DELETE", "/one"), ("POST", "/one/sleep")):
        refused = [routers.operate(method, path) for _ in range(4)]
        assert {answer.status_code for answer in refused} == {409}
        assert "sleep-after" in refused[0].text
    wrong_key = {"authorization": "Bearer wrong"}
    url = f"{routers.url.removesuffix('/v1')}/models/two"
    assert {httpx.delete(url, headers=wrong_key, timeout=60).status_code for _ in range(TIMES)} == {401}
    routers.check("one", 500)


def test_a_router_that_is_killed_comes_back_while_a_model_sleeps(routers: TwoRouters) -> None:
    assert routers.operate("POST", "/two/sleep").raise_for_status().json()["state"] == "asleep"
    pid = routers.killed.server.children()["router-2"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: routers.killed.server.children().get("router-2", pid) != pid and routers.are_both_there())
    assert routers.operate("GET").json()["models"][1]["state"] == "asleep", "it needs no instance of it to start"
    routers.check("one", 600)
    routers.check("two", 600)


def test_without_an_owner_its_models_are_told_to_be_away(routers: TwoRouters) -> None:
    routers.killed.kill()
    assert listening_sockets(routers.url) == 1
    away = routers.ask("two")
    assert away.status_code == 503 and "retry-after" in away.headers and "`two`" in away.text
    assert routers.ask("one").status_code == 200
    routers.killed.restart()
    eventually(routers.are_both_there)
    routers.check("two", 700)


def test_a_first_model_that_sleeps_is_asked_without_a_name(tmp_path: Path) -> None:
    routers = TwoRouters(tmp_path, is_sleeper_first=True)
    try:
        assert routers.operate("POST", "/two/sleep").raise_for_status().json()["state"] == "asleep"
        body = {"prompt": [5, 6, 7], "max_tokens": 2}
        answers = [httpx.post(f"{routers.url}/completions", json=body, timeout=120) for _ in range(TIMES)]
        assert {answer.raise_for_status().json()["model"] for answer in answers} == {"two"}
        assert routers.listed() == {("two", "one")}
        routers.check("one", 800)
    finally:
        routers.killed.end()
