"""Two models of other geometries behind one router process: each answers for itself, whatever is killed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch

from lora_files import save_adapter
from router_kills import Killed
from served_cluster import Server, eventually, is_alive
from served_store import ServedStore
from tiny_models import greedy_answers, prompt, save_folder, tiny_module

FLAGS = ("--store-dram", "16MiB")
COUNT = 12


class Models:
    """``one``, a Llama in one instance, and ``two``, a Qwen3 with other heads behind prefill and decode."""

    def __init__(self, folder: Path, *flags: str, lora_folder: Path | None = None) -> None:
        self.modules = {"one": tiny_module("llama", 1), "two": tiny_module("qwen3", 2)}
        paths = {name: save_folder(module, folder / name) for name, module in self.modules.items()}
        more = "" if lora_folder is None else f",lora-folder={lora_folder}"
        self.killed = Killed(
            f"one={paths['one']},colocated=1",
            folder / "state",
            "--model", f"two={paths['two']},prefill=1,decode=1,block-tokens=16{more}", *flags,
        )  # fmt: skip
        self.state = folder / "state"

    @property
    def server(self) -> Server:
        return self.killed.server

    def answer(self, name: str, tokens: Sequence[int]) -> list[int]:
        """Of the server: token ids."""
        body = {
            "model": name, "prompt": list(tokens), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = httpx.post(f"{self.server.url}/completions", json=body, timeout=120).raise_for_status().json()
        assert answer["model"] == name
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Both models answer all ``prompts`` at once, as transformers does."""
        asked = [(name, tokens) for tokens in prompts for name in self.modules]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda pair: self.answer(*pair), asked))
        for name, module in self.modules.items():
            given = [ids for (asked_name, _), ids in zip(asked, answers, strict=True) if asked_name == name]
            with torch.inference_mode():
                assert given == greedy_answers(module, prompts, COUNT, given), name

    def pids(self) -> dict[str, int]:
        """Of the members that run, whichever router has started them."""
        files = [self.state / "models" / name / "children.json" for name in self.modules]
        written = [json.loads(file.read_text()) for file in files]
        pids = {name: child["pid"] for children in written for name, child in children.items()}
        return {name: pid for name, pid in pids.items() if is_alive(pid)}

    def pid(self, name: str) -> int:
        eventually(lambda: name in self.pids())
        return self.pids()[name]

    def counter(self, name: str, model: str) -> float:
        """``memserve_instance_<name>_total`` of the model's instances."""
        page = self.server.fresh_metrics()
        pattern = rf'^memserve_instance_{name}_total{{instance="[^"]*",model="{model}".*}} (.+)$'
        return sum(map(float, re.findall(pattern, page, re.M)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(tmp_path_factory.mktemp("models"), *FLAGS)
    yield models
    models.killed.end()


def prompts(seed: int) -> list[list[int]]:
    """The same for both models: their KV must not meet."""
    return [prompt(length, seed + length).tolist() for length in (5, 40, 70, 100)]


def test_each_model_answers_for_itself(models: Models) -> None:
    assert set(models.pids()) == {"one-c1", "one-s1", "two-p1", "two-d1", "two-s1"}
    models.check(prompts(1))
    models.check(prompts(1))
    for name in models.modules:
        assert models.counter("cached_tokens", name) > 100, "the second time, the prompts were cached"


def test_a_killed_instance_costs_no_answer_of_either_model(models: Models) -> None:
    for number, name in enumerate(("one-c1", "two-p1", "two-d1", "two-s1")):
        pid = models.pid(name)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            checking = pool.submit(models.check, prompts(100 * (number + 1)))
            os.kill(pid, signal.SIGKILL)
            checking.result(120)
        eventually(lambda name=name, pid=pid: models.pids().get(name) not in (None, pid))
    models.check(prompts(1))


def test_a_killed_router_finds_the_instances_of_both(models: Models) -> None:
    models.check(prompts(700))
    pids = {name: models.pid(name) for name in ("one-c1", "two-p1", "two-d1")}
    models.killed.kill()
    models.killed.restart()
    assert {name: models.pid(name) for name in pids} == pids, "the same processes"
    models.check(prompts(700))
    assert models.counter("cached_tokens", "one") > 100 and models.counter("cached_tokens", "two") > 100


def test_a_batch_asks_both_models_and_outlives_the_router(models: Models) -> None:
    asked = [
        (name, tokens) for seed in range(30) for tokens in [prompt(20, 5000 + seed).tolist()] for name in models.modules
    ]
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    lines = [
        json.dumps({
            "custom_id": f"{number}", "method": "POST", "url": "/v1/completions",
            "body": {"model": name, "prompt": tokens} | body,
        })
        for number, (name, tokens) in enumerate(asked)
    ]  # fmt: skip
    client = models.server.client
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch_id = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h").id
    eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 5)
    models.killed.kill()
    models.killed.restart()
    client = models.server.client
    eventually(lambda: client.batches.retrieve(batch_id).status == "completed")
    output = client.files.content(client.batches.retrieve(batch_id).output_file_id).text
    answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.splitlines())}
    assert len(answers) == len(asked)
    for name, module in models.modules.items():
        own = [number for number, (asked_name, _) in enumerate(asked) if asked_name == name]
        given = [answers[str(number)]["choices"][0]["token_ids"] for number in own]
        assert given == greedy_answers(module, [asked[number][1] for number in own], 4, given)


def test_an_instance_for_another_model_is_told_what_there_is(models: Models, capfd: pytest.CaptureFixture[str]) -> None:
    from memserve.cli.main import run

    join = next(word for word in _command_of(models.pid("one-c1")) if word.startswith("tcp://"))
    words = ["instance", "--join", join.removeprefix("tcp://"), "--cluster-secret-file", str(models.state / "secret")]
    path = _command_of(models.pid("one-c1"))[_command_of(models.pid("one-c1")).index("--model") + 1].partition("=")[2]
    assert run([*words, "--model", f"three={path}", "--kv-memory", "4MiB", "--threads", "1"]) == 1
    assert "this router serves one, two, not 'three'" in capfd.readouterr().err


def _command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def test_a_model_that_slept_has_its_prefixes_again(tmp_path: Path) -> None:
    """Started with one model and a store of its own; the other one is added, with a store that runs already, sleeps,
    wakes, and outlives the router."""
    modules = {"one": tiny_module("llama", 1), "two": tiny_module("qwen3", 2)}
    paths = {name: save_folder(module, tmp_path / name) for name, module in modules.items()}
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("let-me\n")
    stores = [
        ServedStore(folder, "--model", name) for name in modules if (folder := make_folder(tmp_path / f"{name}-kv"))
    ]
    secret = ("--cluster-secret-file", str(stores[0].secret_file))
    killed = Killed(
        f"one={paths['one']},store={stores[0].address}", tmp_path / "state", "--admin-key-file", str(key), *secret
    )
    try:
        operator = httpx.Client(headers={"authorization": "Bearer let-me"}, timeout=120)

        def models_url() -> str:
            return killed.server.url.removesuffix("/v1") + "/models"

        def check() -> tuple[int, httpx.Response]:
            tokens = prompt(230, 7).tolist()
            body = {"model": "two", "prompt": tokens, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{killed.server.url}/completions", json=body | {"return_token_ids": True}, timeout=120)
            ids = answer.raise_for_status().json()["choices"][0]["token_ids"]
            assert ids == greedy_answers(modules["two"], [tokens], 6, [ids])[0]
            # of its few blocks one is lent to the store at a time, and it sleeps when the store has all
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], answer

        text = f"two={paths['two']},colocated=1,store={stores[1].address},dtype=float32,kv-memory=240KiB,threads=1"
        assert operator.post(models_url(), json={"model": text}).raise_for_status().json()["name"] == "two"
        assert check()[0] == 0
        file = tmp_path / "state" / "models" / "two" / "children.json"
        assert operator.post(f"{models_url()}/two/sleep").raise_for_status().json()["state"] == "asleep"
        assert not json.loads(file.read_text()), "its instance has ended"
        cached_tokens, answer = check()
        assert cached_tokens == 224 and int(answer.headers["x-memserve-wake-ms"]) > 0
        killed.kill()
        killed.restart()
        assert check()[0] == 224
        added = tmp_path / "state" / "added.json"
        added.write_text(json.dumps([*json.loads(added.read_text()), "gone=/nowhere", "three=/x,foo=1"]))
        killed.kill()
        killed.restart()
        assert check()[0] == 224, "models that do not start any more keep none from starting"
        assert operator.delete(f"{models_url()}/two").raise_for_status().json() == {"name": "two", "removed": True}
        assert not any(is_alive(child["pid"]) for child in json.loads(file.read_text()).values())
        assert json.loads(added.read_text()) == ["gone=/nowhere", "three=/x,foo=1"]
    finally:
        killed.end()
        for store in stores:
            store.process.terminate()
            assert store.process.wait(60) == 0


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_two_routers_answer_for_both_models(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapters" / "one", tiny_module("qwen3", 2), ["q_proj"], 1)
    models = Models(tmp_path, "--routers", "2", lora_folder=tmp_path / "adapters")
    try:
        follower = models.pid("router-2")
        eventually(lambda: "router-2" in models.server.children())
        for seed in (1, 2):  # 16 connections, which the kernel spreads over both
            models.check(prompts(3000 + seed))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            checking = pool.submit(models.check, prompts(4000))
            os.kill(follower, signal.SIGKILL)
            error = checking.exception(120)
        assert error is None or isinstance(error, httpx.HTTPError), (
            "answers of the killed router are cut off, not wrong"
        )
        eventually(lambda: models.pids().get("router-2") not in (None, follower))
        models.check(prompts(4000))
        document = {"endpoint": "completions", "text": " ".join(f"w{n}" for n in range(3, 60))}
        for number in range(4):  # whichever router is asked, it is the owner's, and of the model in the address
            url = f"{models.server.url}/documents/d{number}?model=two"
            assert httpx.put(url, json=document, timeout=60).status_code in (200, 201)
            body = {"model": "two", "prompt": " w9", "max_tokens": 4, "document": f"d{number}"}
            assert httpx.post(f"{models.server.url}/completions", json=body, timeout=60).status_code == 200
            assert (
                httpx.post(f"{models.server.url}/completions", json=body | {"model": "one"}, timeout=60).status_code
                == 404
            )
        for number in range(6):  # so is an adapter, which all routers serve then
            loaded = {"lora_name": f"a{number}", "lora_path": "one", "model": "two"}
            assert httpx.post(f"{models.server.url}/load_lora_adapter", json=loaded, timeout=60).status_code == 200
            body = {"model": f"a{number}", "prompt": "w9", "max_tokens": 4}
            answers = [httpx.post(f"{models.server.url}/completions", json=body, timeout=60) for _ in range(4)]
            assert [answer.json().get("model") for answer in answers] == [f"a{number}"] * 4
        wrong = {"lora_name": "b", "lora_path": "one", "model": "one"}
        refused = httpx.post(f"{models.server.url}/load_lora_adapter", json=wrong, timeout=60)
        assert refused.status_code == 404 and "--lora-folder" in refused.text
    finally:
        models.killed.end()
