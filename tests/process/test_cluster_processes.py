"""``memserve serve`` as people start it: a router and instances in processes of their own, one of which gets killed.

Streams of every kind go on then, for the client, as if nothing had happened. The prompts' KV, the drawing, what is
counted for penalties, logprobs, stop strings, and each of several choices: another instance takes all of it up behind
the last token that the client has. In float32, where that is exact.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from memserve import LLM
from memserve.api.llm import Completion
from served_cluster import GREEDY, WAIT_S, Server, eventually, is_alive
from tiny_models import prompt, save_folder, tiny_module

pytestmark = pytest.mark.usefixtures("executed_processes")

TOKENS = 200
LONG = {"max_tokens": TOKENS, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "seed": 11}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "drawn, with logprobs": {**DRAWN, "logprobs": 2, "top_p": 0.9},
    "a stop string": {**DRAWN, "stop": ["chosen below"]},
    "penalties": {**DRAWN, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "a repetition penalty": {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 1},
    "a bias and a least length": {**DRAWN, "logit_bias": {"2": 100, "9": -100}, "min_tokens": 180, "ignore_eos": False},
    "three choices": {**DRAWN, "n": 3, "logprobs": 0},
}
ENDS_EARLY = ("a stop string", "a bias and a least length")
STOPS_BEHIND = 120
"""The stop string is first found behind so many tokens: by the instance that takes over."""
KILLED_BEHIND = 3
"""Chunks that each client has read when the instance is killed."""


@dataclass
class Choice:
    """What a client has of one choice."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)


def tokens_of(kind: str) -> list[int]:
    """Another prompt for each kind, longer than a block."""
    return [int(token) for token in prompt(40, list(KINDS).index(kind))]


def late_words(text: str) -> str:
    """Two words of ``text`` that stand behind each other late in it, and nowhere before."""
    words = text.split()
    starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))
    pairs = enumerate(" ".join(pair) for pair in itertools.pairwise(words))
    return next(pair for at, pair in pairs if at > STOPS_BEHIND and text.find(pair) == starts[at])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    """One engine in one process, which answers one request after the other."""
    with LLM(str(folder), dtype="float32", kv_memory="4MiB", threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def truth(alone: LLM) -> Callable[[list[int], int], str]:
    """What it answers, greedily."""
    return lambda tokens, count: alone.generate([tokens], temperature=0, max_tokens=count, ignore_eos=True)[0].text


@pytest.fixture(scope="module")
def truths(alone: LLM) -> dict[str, Completion]:
    """What it answers to a request of each kind; fills in the stop string."""
    whole = alone.generate([tokens_of("a stop string")], **DRAWN, **LONG)[0]
    KINDS["a stop string"]["stop"] = [late_words(whole.text)]
    return {kind: alone.generate([tokens_of(kind)], **(LONG | options))[0] for kind, options in KINDS.items()}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, "--prefill", "1", "--decode", "1")
    yield server
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait()


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in prompt(length, seed)]


def test_ready_text_and_command_lines_name_instances(server: Server) -> None:
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


def test_instances_alone_have_torch(server: Server) -> None:
    """A router without it starts in half of the time."""
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in server.children().items()}
    assert all("libtorch" in mapped for mapped in maps.values()), "else nothing is shown"
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


# -- the decode instance is killed


def stream(url: str, kind: str, begun: threading.Barrier) -> dict[int, Choice]:
    """One streamed completion; in its beginning the client waits for all others to have begun as well."""
    body = {"model": "tiny", "prompt": tokens_of(kind), "stream": True, **LONG, **KINDS[kind]}
    choices: dict[int, Choice] = {}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=WAIT_S) as answer:
        assert answer.status_code == 200, answer.read()
        chunks = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        for number, chunk in enumerate(chunks):
            assert "error" not in chunk, chunk
            for said in chunk["choices"]:
                choice = choices.setdefault(said["index"], Choice())
                choice.text += said["text"]
                choice.finish_reason = said["finish_reason"] or choice.finish_reason
                if said.get("logprobs"):
                    choice.logprobs += said["logprobs"]["token_logprobs"]
                    choice.top += said["logprobs"]["top_logprobs"] or []
            if number == KILLED_BEHIND:
                begun.wait(WAIT_S)
    return choices


@pytest.fixture(scope="module")
def told(server: Server, truths: dict[str, Completion]) -> dict[str, dict[int, Choice]]:
    """What each client was told: all at once, and the decode instance is killed when all have begun."""
    begun = threading.Barrier(len(KINDS) + 1)
    pid = server.children()["d1"]
    with ThreadPoolExecutor(len(KINDS)) as crowd:
        answers = {kind: crowd.submit(stream, server.url, kind, begun) for kind in KINDS}
        begun.wait(WAIT_S)
        os.kill(pid, signal.SIGKILL)
        return {kind: answer.result(WAIT_S) for kind, answer in answers.items()}


def resumptions(server: Server) -> int:
    page = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
    return int(float(re.findall(r"^memserve_router_resumptions_total (.+)$", page, re.M)[0]))


def test_all_of_them_went_on_elsewhere(server: Server, told: dict[str, dict[int, Choice]]) -> None:
    eventually(lambda: resumptions(server) >= len(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_goes_on(kind: str, told: dict[str, dict[int, Choice]], truths: dict[str, Completion]) -> None:
    wanted = truths[kind].outputs
    assert sorted(told[kind]) == list(range(len(wanted)))
    for output in wanted:
        choice = told[kind][output.index]
        assert (choice.text, choice.finish_reason) == (output.text, output.finish_reason.value)
        if "logprobs" in KINDS[kind]:  # one a token, none twice, none missing
            assert choice.logprobs == pytest.approx([one.logprob for one in output.logprobs], abs=1e-4)
        if best := KINDS[kind].get("logprobs"):
            for top, one in zip(choice.top, output.logprobs, strict=True):
                assert sorted(top.values())[-best:] == pytest.approx(sorted(dict(one.top).values()), abs=1e-4)


def test_early_endings_come_after_the_kill(truths: dict[str, Completion]) -> None:
    """Else the kinds would not show what they are there for."""
    for kind in ENDS_EARLY:
        (output,) = truths[kind].outputs
        assert output.finish_reason.value == "stop" and STOPS_BEHIND < len(output.text.split()) < TOKENS, kind


def test_new_requests_are_served_by_what_is_left(server: Server, told: object, truth) -> None:
    assert server.complete(tokens(60, 8), 10) == truth(tokens(60, 8), 10)
    eventually(lambda: "d1" in server.children())  # its successor loads


def test_the_end_is_clean(server: Server) -> None:
    before, pids = set(os.listdir("/dev/shm")), list(server.children().values())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == 0
    assert not any(is_alive(pid) for pid in pids)
    eventually(lambda: set(os.listdir("/dev/shm")) <= before)  # other tests have theirs, but not for long
