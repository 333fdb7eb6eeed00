"""A server of another project as a member of a model's cluster: another memserve, which speaks vLLM's API.

It serves the same weights in float32, so every answer is that of transformers, whichever member gave which part of it.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from memserve.api.http.client import HttpFault
from memserve.fleet.members.host import engine_model
from memserve.fleet.messages import EngineKind, EngineReport, EngineSpec
from served_cluster import Server, eventually
from tiny_models import greedy_answers, prompt, save_folder, tiny_module
from waiting import stop_process

COUNT = 16


def ids(seed: int, length: int) -> list[int]:
    """A prompt."""
    tokens: list[int] = prompt(length, seed).tolist()
    return tokens


class Mixed:
    """``c1``, an instance of ours, and ``e1``, the other server."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.module = tiny_module("llama", 3)
        self.folder = save_folder(self.module, folder / "tiny")
        (self.folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
        self.engine = Server(self.folder, "--colocated", "1")
        engine = EngineSpec(EngineKind.VLLM, self.engine.url.removesuffix("/v1"), model="tiny").text
        self.server = Server(self.folder, "--colocated", "1", "--engine", engine, "--policy", "least-load", *flags)

    def engine_port(self) -> str:
        return self.engine.url.rpartition(":")[2].removesuffix("/v1")

    def complete(self, tokens: Sequence[int], **more: Any) -> dict[str, Any]:
        """The answer, whole, with its story."""
        body = {"prompt": list(tokens), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True} | more
        body |= {"return_token_ids": True, "explain": True}
        reply = httpx.post(f"{self.server.url}/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def check(self, prompts: Sequence[Sequence[int]]) -> set[str]:
        """All ``prompts`` at once are answered as transformers does. Returns which members did."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(self.complete, prompts))
        given = [answer["choices"][0]["token_ids"] for answer in answers]
        with torch.inference_mode():
            assert given == greedy_answers(self.module, prompts, COUNT, given)
        return {route_of(answer) for answer in answers}

    def stop(self) -> None:
        for server in (self.server, self.engine):
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(30)


def route_of(answer: dict[str, Any]) -> str:
    """The member that gave it."""
    story = {fact["fact"]: fact["value"] for fact in answer["memserve"]["story"]}
    return str(story["route"])


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    world = Mixed(tmp_path)
    try:
        eventually(lambda: world.server.members() == {"c1", "e1"})
        yield world
    finally:
        world.stop()


def test_instances_and_engines_answer_alike(mixed: Mixed) -> None:
    assert mixed.check([ids(number, 20 + number) for number in range(12)]) == {"c1", "e1"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        both = list(pool.map(lambda _: mixed.complete(ids(40, 30), logprobs=3, n=2), range(8)))
    assert {route_of(answer) for answer in both} == {"c1", "e1"}
    for answer in both:
        first, *_ = both
        assert [c["token_ids"] for c in answer["choices"]] == [c["token_ids"] for c in first["choices"]]
        for choice, same in zip(answer["choices"], first["choices"], strict=True):
            assert choice["logprobs"]["tokens"] == same["logprobs"]["tokens"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(same["logprobs"]["token_logprobs"], abs=1e-4)


def test_what_needs_an_instance_goes_to_one(mixed: Mixed) -> None:
    def beams(number: int) -> str:
        return route_of(mixed.complete(ids(number, 12), use_beam_search=True, n=2))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(beams, range(6))) == {"c1"}
        scored = pool.map(lambda number: mixed.complete(ids(number, 12), echo=True, logprobs=1), range(6))
        assert {route_of(answer) for answer in scored} == {"c1"}


def test_a_killed_engine_loses_nothing_and_returns(mixed: Mixed) -> None:
    port = mixed.engine_port()
    body = {"prompt": ids(7, 24), "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(ids_of_stream, mixed.server.url, body | {"prompt": ids(n, 24)}) for n in range(8)]
        eventually(lambda: mixed.server.gauge("router_requests_live") == 8)
        for pid in (mixed.engine.process.pid, *mixed.engine.children().values()):
            os.kill(pid, signal.SIGKILL)
        mixed.engine.process.wait(30)
        answers = [stream.result(120) for stream in streams]
    with torch.inference_mode():
        assert answers == greedy_answers(mixed.module, [ids(n, 24) for n in range(8)], 200, answers)
    eventually(lambda: mixed.server.members() == {"c1"})
    mixed.engine = Server(mixed.folder, "--colocated", "1", "--port", port)
    eventually(lambda: mixed.server.members() == {"c1", "e1"})
    assert mixed.check([ids(50 + number, 20) for number in range(12)]) == {"c1", "e1"}


def ids_of_stream(url: str, body: dict[str, Any]) -> list[int]:
    """Token ids of a streamed completion."""
    ids: list[int] = []
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice["token_ids"] or ()
    return ids


def test_an_engine_alone_serves_all_of_the_api(mixed: Mixed) -> None:
    stop_process(mixed.server.children()["c1"])
    eventually(lambda: mixed.server.members() == {"e1"})
    assert mixed.check([ids(number, 16) for number in range(4)]) == {"e1"}
    key = {"Idempotency-Key": "a key", "content-type": "application/json"}
    body = {"prompt": ids(9, 12), "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    replies = [httpx.post(f"{mixed.server.url}/completions", json=body, headers=key, timeout=120) for _ in range(2)]
    texts = {reply.raise_for_status().json()["choices"][0]["text"] for reply in replies}
    assert len(texts) == 1, "the second is the first one's answer"
    responses = mixed.server.client.responses
    first = responses.create(model="tiny", input="a b c", max_output_tokens=8)
    again = responses.create(model="tiny", input="d", max_output_tokens=8, previous_response_id=first.id)
    assert again.previous_response_id == first.id and again.output_text
    whole = mixed.complete(ids(3, 12))["choices"][0]["text"]
    cut = mixed.complete(ids(3, 12), stop=[whole[3:6]])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole.partition(whole[3:6])[0], "stop")


def test_every_router_sends_requests_there(tmp_path: Path) -> None:
    world = Mixed(tmp_path, "--routers", "2")
    try:
        eventually(lambda: world.server.members() == {"c1", "e1"})
        for turn in range(3):  # each request has a connection of its own: the kernel chooses a router
            assert world.check([ids(100 * turn + number, 20) for number in range(12)]) == {"c1", "e1"}
        os.kill(world.server.children()["router-2"], signal.SIGKILL)
        eventually(lambda: world.server.children().get("router-2"))
        os.kill(world.server.children()["e1"], signal.SIGKILL)
        eventually(lambda: world.server.members() == {"c1"})
        eventually(lambda: world.server.members() == {"c1", "e1"})
        assert world.check([ids(900 + number, 20) for number in range(12)]) == {"c1", "e1"}
    finally:
        world.stop()


def test_engine_names_are_the_same_or_the_only_one() -> None:
    spec = EngineSpec(EngineKind.VLLM, "http://h:1", model="tiny")
    assert engine_model(EngineReport({"other": "w", "tiny": "v"}), spec) == "tiny"
    assert engine_model(EngineReport({"other": "other", "adapter": "other"}), spec) == "other"
    with pytest.raises(HttpFault, match="it serves a, b, and not 'tiny'"):
        engine_model(EngineReport({"a": "a", "b": "b"}), spec)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folders = [save_folder(tiny_module("llama", 3), tmp_path / name) for name in ("tiny", "odd")]
    tokenizer = json.loads((folders[1] / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"w0": 1, "w1": 0}
    for token in tokenizer["added_tokens"]:
        token["id"] = tokenizer["model"]["vocab"][token["content"]]
    (folders[1] / "tokenizer.json").write_text(json.dumps(tokenizer))
    engine = Server(folders[1], "--colocated", "1")
    log = tmp_path / "log"
    try:
        with log.open("w") as stderr:
            spec = EngineSpec(EngineKind.VLLM, engine.url.removesuffix("/v1"), model="tiny").text
            server = Server(folders[0], "--colocated", "1", "--engine", spec, stderr=stderr)
            try:
                eventually(lambda: "has another tokenizer" in log.read_text())
                assert server.members() == {"c1"}
            finally:
                server.process.kill()
                server.process.wait(30)
    finally:
        engine.process.kill()
        engine.process.wait(30)
