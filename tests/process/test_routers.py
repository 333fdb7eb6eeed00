"""Several routers at once, as processes: ``memserve serve --routers 2``, and one of them killed under streams."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.served import serving

from memserve import LLM
from memserve.cli.main import run
from ports import free_port, listening_sockets
from router_kills import Stream, long_model, plain_answers, question
from served_cluster import Server, eventually, is_alive
from tiny_models import prompt


class Balanced:
    """A server of two routers at one port: each connection goes to either."""

    def __init__(self, folder: Path, *flags: str) -> None:
        state = folder / "state"
        self.server = Server(long_model(folder / "tiny"), *flags, "--routers", "2", "--metadata", str(state))
        self.url = self.server.url

    @property
    def http(self) -> httpx.Client:
        """With a connection of its own: the kernel chooses the router anew."""
        return httpx.Client(timeout=httpx.Timeout(60, connect=2))

    def follower(self) -> int:
        """Its process id."""
        eventually(lambda: "router-2" in self.server.children())
        return self.server.children()["router-2"]


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory):
    balanced = Balanced(tmp_path_factory.mktemp("routers"), "--prefill", "1", "--decode", "1")
    yield balanced
    children = balanced.server.children()
    balanced.server.process.terminate()
    assert balanced.server.process.wait(60) == 0
    assert not [name for name, pid in children.items() if is_alive(pid)]


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[..., Balanced]]:
    """Starts a server of the test's own with the flags given; it ends with the test, and in order."""
    started: list[Balanced] = []

    def start(*flags: str) -> Balanced:
        started.append(Balanced(tmp_path, *flags))
        return started[-1]

    yield start
    for one in started:
        one.server.process.terminate()
    assert [one.server.process.wait(60) for one in started] == [0] * len(started)


def read_all(streams: Sequence[Stream], meanwhile: Callable[[], object] = lambda: None) -> None:
    """All of them side by side, to their ends; ``meanwhile`` once they are begun."""
    threads = [threading.Thread(target=stream.read) for stream in streams]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join(180)


def killing(follower: int, streams: Sequence[Stream], events: int) -> Callable[[], None]:
    """Kills the follower once the streams have more than so many events together."""

    def kill() -> None:
        eventually(lambda: sum(len(stream.events) for stream in streams) > events)
        os.kill(follower, signal.SIGKILL)

    return kill


def test_both_routers_answer_at_one_port(balanced: Balanced) -> None:
    eventually(lambda: listening_sockets(balanced.url) == 2)
    body = question(2, 20)
    answers = []
    for _ in range(16):  # one of two routers would get all of them in one of 32,768 runs
        with balanced.http as http:
            answer = http.post(f"{balanced.url}/completions", json=body | {"explain": True}).raise_for_status().json()
        answers.append(answer["choices"][0]["text"])
    assert len(set(answers)) == 1


def test_documents_and_sessions_are_answered_by_any_router(balanced: Balanced) -> None:
    eventually(lambda: listening_sockets(balanced.url) == 2)
    text = {"endpoint": "completions", "text": "w1 w2 w3 w4 w5 w6 w7 w8"}
    asked = {"model": "tiny", "prompt": " w9", "max_tokens": 3, "temperature": 0}
    answers: list[str] = []
    for number in range(16):
        with balanced.http as http:
            assert http.put(f"{balanced.url}/documents/d{number % 4}", json=text).status_code in (200, 201)
        with balanced.http as http:
            listed = http.get(f"{balanced.url}/documents").raise_for_status().json()
            assert f"d{number % 4}" in {document["id"] for document in listed["data"]}
        for kept in ({"document": "d0"}, {"session": "s", "session_ttl_s": 60}, {"document": "d0", "stream": True}):
            with balanced.http as http:
                answer = http.post(f"{balanced.url}/completions", json=asked | kept)
                assert answer.status_code == 200, answer.text
                assert not kept.get("stream") or answer.text.rstrip().endswith("data: [DONE]")
            if kept == {"document": "d0"}:
                answers.append(answer.json()["choices"][0]["text"])
    assert len(set(answers)) == 1
    for number in range(4):
        with balanced.http as http:
            assert http.delete(f"{balanced.url}/documents/d{number}").status_code == 200
        with balanced.http as http:
            assert http.get(f"{balanced.url}/documents/d{number}").status_code == 404


def test_stored_responses_are_found_by_any_router() -> None:
    with serving("--routers", "2") as served:
        eventually(lambda: listening_sockets(served.url) == 2)
        last, url = None, f"{served.url}/v1/responses"
        for number in range(12):
            body = {"input": f"Say {number}.", "max_output_tokens": 4, "previous_response_id": last}
            with httpx.Client(timeout=60) as http:
                response = http.post(url, json=body).raise_for_status().json()
            with httpx.Client(timeout=60) as http:
                found = http.get(f"{url}/{response['id']}").raise_for_status().json()
            assert found["output"] == response["output"] and found["previous_response_id"] == last
            last = response["id"]
        with httpx.Client(timeout=60) as http, http.stream("POST", url, json={"input": "Hi", "stream": True}) as events:
            assert "response.completed" in "".join(events.iter_text())


def test_files_and_batches_are_answered_by_any_router(balanced: Balanced) -> None:
    """Each request over a connection of its own: the owner's files, whichever router is asked."""
    eventually(lambda: listening_sockets(balanced.url) == 2)
    body = {"model": "tiny", "prompt": " w9", "max_tokens": 2, "temperature": 0}
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(4)]
    lines = "\n".join(map(json.dumps, rows)).encode()

    def ask(method: str, path: str, **what: Any) -> httpx.Response:
        with balanced.http as http:
            return http.request(method, f"{balanced.url}{path}", **what).raise_for_status()

    def run_batch() -> None:
        file = ask("POST", "/files", files={"file": ("rows.jsonl", lines)}, data={"purpose": "batch"}).json()
        assert ask("GET", f"/files/{file['id']}/content").content == lines
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        place = f"/batches/{ask('POST', '/batches', json=asked).json()['id']}"
        eventually(lambda: ask("GET", place).json()["status"] == "completed")
        answers = ask("GET", f"/files/{ask('GET', place).json()['output_file_id']}/content").text.splitlines()
        assert sorted(json.loads(answer)["custom_id"] for answer in answers) == ["r0", "r1", "r2", "r3"]
        ask("DELETE", f"/files/{file['id']}")

    for _ in range(6):
        run_batch()


def test_messages_are_answered_by_both_routers(tmp_path: Path) -> None:
    """The same key gets the same message from either; prefixes are kept by the owner, and the other says so."""
    kept = [{"type": "text", "text": "Be brief. " * 30, "cache_control": {"type": "ephemeral"}}]
    body = {"max_tokens": 8, "system": kept, "messages": [{"role": "user", "content": "Hello"}]}
    answers, ignored = [], []
    with serving("--routers", "2", "--metadata", str(tmp_path / "state")) as served:
        for _ in range(16):
            with httpx.Client(timeout=60) as http:
                answer = http.post(f"{served.url}/v1/messages", json=body, headers={"idempotency-key": "once"})
            message = answer.raise_for_status().json()
            answers.append((message["id"], message["content"], message["stop_reason"]))
            ignored.append(answer.headers.get("x-memserve-ignored"))
    assert all(told == answers[0] for told in answers) and answers[0][1]
    assert set(ignored) == {None, "cache_control"}


def is_idle(balanced: Balanced) -> bool:
    """Whether nothing is held, as both routers see it."""
    return not any(balanced.server.held() for _ in range(8))


TOKENS = 400
"""Of each answer: a router is killed when the first few of them have arrived."""


def test_a_killed_router_costs_its_clients_nothing(balanced: Balanced) -> None:
    bodies = [question(number, TOKENS) for number in range(12)]
    found = [Stream(balanced, body) for body in bodies]
    truths = plain_answers(balanced, bodies)
    before = balanced.server.counter("generated_tokens")
    eventually(lambda: listening_sockets(balanced.url) == 2)
    read_all(found, killing(balanced.follower(), found, events=200))
    eventually(lambda: listening_sockets(balanced.url) == 2)
    assert [stream.texts() for stream in found] == truths
    assert sum(stream.breaks for stream in found) > 0, "no client was at the router that was killed"
    for stream in found:
        numbers = [number for number, _ in stream.events]
        assert numbers == [str(place) for place in range(1, len(numbers) + 1)]
    eventually(lambda: is_idle(balanced))
    generated = balanced.server.counter("generated_tokens") - before
    assert 12 * TOKENS <= generated <= 12 * TOKENS * 1.05, "answers were computed again"


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    """Three requests may be active at both routers together, and none waits."""
    flags = "--colocated", "1", "--admission", "memory", "--max-active", "3", "--admission-queue", "0"
    gated = Balanced(tmp_path_factory.mktemp("gated"), *flags)
    yield gated
    gated.server.process.terminate()
    assert gated.server.process.wait(60) == 0


class Holder:
    """A stream that takes one of the three places for some seconds, read by a thread of its own."""

    def __init__(self, gated: Balanced, number: int) -> None:
        self.status, self.ended, self.leave = 0, False, threading.Event()
        self._gated, self._body = gated, question(number, 3900, stream=True)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        eventually(lambda: self.status)

    def _read(self) -> None:
        with contextlib.suppress(httpx.TransportError), self._gated.http as http:  # its router may be killed
            self._follow(http)
        self.ended = not self.leave.is_set()
        self.status = self.status or -1

    def _follow(self, http: httpx.Client) -> None:
        with http.stream("POST", f"{self._gated.url}/completions", json=self._body) as answer:
            for _ in answer.iter_lines():
                self.status = answer.status_code
                if self.leave.is_set():
                    return

    def end(self) -> None:
        self.leave.set()
        self._thread.join(60)


def ask(gated: Balanced) -> httpx.Response:
    """By a connection of its own."""
    with gated.http as http:
        return http.post(f"{gated.url}/completions", json=question(9, 5))


def test_admission_counts_the_requests_of_all_routers(gated: Balanced) -> None:
    eventually(lambda: listening_sockets(gated.url) == 2)
    holders = [Holder(gated, number) for number in range(3)]
    answers = [ask(gated) for _ in range(8)]
    were_there = not any(holder.ended for holder in holders)
    for holder in holders:
        holder.end()
    assert were_there and [holder.status for holder in holders] == [200] * 3
    for answer in answers:
        assert answer.status_code == 429, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert "3 requests are active, the most allowed" in answer.json()["error"]["message"]
    eventually(lambda: ask(gated).status_code == 200)


def test_slots_of_a_killed_router_are_freed(gated: Balanced) -> None:
    eventually(lambda: listening_sockets(gated.url) == 2)
    holders = [Holder(gated, number) for number in range(3)]
    os.kill(gated.follower(), signal.SIGKILL)
    for holder in holders:
        holder.end()
    eventually(lambda: listening_sockets(gated.url) == 1)
    eventually(lambda: listening_sockets(gated.url) == 2)
    again = [Holder(gated, number) for number in range(3)]
    for holder in again:
        holder.end()
    assert [holder.status for holder in again] == [200] * 3


LONG = [question(0, 20, prompt=[int(token) for token in prompt(300, seed)]) for seed in range(6)]


def ask_each(balanced: Balanced) -> tuple[list[str], list[str]]:
    """Answers to long prompts, each by a connection of its own, and which member had the prompt's KV."""
    answers, members = [], []
    for body in LONG:
        with balanced.http as http:
            answer = http.post(f"{balanced.url}/completions", json=body | {"explain": True}).raise_for_status().json()
        facts = {fact["fact"]: fact["value"] for fact in answer["memserve"]["story"]}
        answers.append(answer["choices"][0]["text"])
        members.append(facts.get("fetched_from", ""))
    return answers, members


def test_routers_share_store_and_killed_one_leaves_no_references(
    another: Callable[..., Balanced], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance has memory for one of the prompts: what comes again is in the store's memory alone."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))  # no costs of busy times
    flags = "--ssd", f"{tmp_path}/ssd=64MiB", "--store-dram", "16MiB", "--ssd-sync", "none"
    kept = another("--colocated", "1", "--block-tokens", "8", "--kv-memory", str(60 * 3072), *flags)
    eventually(lambda: listening_sockets(kept.url) == 2)
    truths, _ = ask_each(kept)
    asked = [ask_each(kept) for _ in range(3)]
    assert [answers for answers, _ in asked] == [truths] * 3
    fetches = [member for _, members in asked for member in members]
    assert set(fetches) <= {"s1", ""} and fetches.count("s1") >= 12, fetches  # on a busy machine some are computed
    streams = [Stream(kept, body) for body in LONG for _ in range(4)]
    read_all(streams, killing(kept.follower(), streams, events=20))
    assert [stream.texts() for stream in streams] == [[truth] for truth in truths for _ in range(4)]
    assert sum(stream.breaks for stream in streams) > 0, "no client was at the router that was killed"
    eventually(lambda: listening_sockets(kept.url) == 2 and is_idle(kept))
    answers, members = ask_each(kept)
    assert answers == truths and members.count("s1") >= 3, members


def test_routers_share_sequences_and_killed_one_leaves_none(another: Callable[..., Balanced], tmp_path: Path) -> None:
    """Prompts that need all three instances, several at both routers: one at a time has them."""
    shared = another("--colocated", "3", "--kv-memory", str(3 * 12_288))
    bodies = [question(0, 24, prompt=[int(token) for token in prompt(230, seed)]) for seed in range(4)]
    with LLM(str(tmp_path / "tiny"), dtype="float32", kv_memory="4MiB", threads=1) as one:
        greedy = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
        truths = [one.generate(body["prompt"], **greedy)[0].text for body in bodies]
    eventually(lambda: listening_sockets(shared.url) == 2)
    follower = shared.follower()
    for kills in (False, True):
        streams = [Stream(shared, body) for body in bodies for _ in range(2)]
        read_all(streams, *([killing(follower, streams, events=5)] if kills else []))
        assert [stream.texts() for stream in streams] == [[truth] for truth in truths for _ in range(2)]
        assert not kills or sum(stream.breaks for stream in streams) > 0, "no client was at the killed router"
        eventually(lambda: listening_sockets(shared.url) == 2 and is_idle(shared))


def test_second_router_of_a_name_ends_and_the_first_stays(another: Callable[..., Balanced], tmp_path: Path) -> None:
    """A unit that was copied to another host: they would expel each other for ever."""
    secret, port = tmp_path / "secret", free_port()
    secret.write_text("x" * 40)
    secret.chmod(0o600)
    shared = ["--cluster-secret-file", str(secret)]
    another("--colocated", "1", "--cluster-port", str(port), *shared)
    words = ["router", "--join", f"127.0.0.1:{port}", *shared, "--port", "0", "--model", str(tmp_path / "tiny")]
    command = [sys.executable, "-m", "memserve", *words, "--name", "twice"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline().startswith("ready in")
            second = subprocess.run(command, capture_output=True, text=True, timeout=60)
            said = second.stderr
            assert second.returncode == 1 and "cannot both be called 'twice'" in said and "--name" in said
            assert "nanobind" not in said and first.poll() is None
        finally:
            first.terminate()
            first.communicate(timeout=60)


def test_single_router_options_are_refused_with_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--routers", "2", "--in-process"]) == 1
    assert "without a router" in capsys.readouterr().err


def test_a_router_says_which_owner_does_not_answer(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 40)
    secret.chmod(0o600)
    words = ["router", "--join", "127.0.0.1:9", "--cluster-secret-file", str(secret), "--port", "0"]
    process = subprocess.Popen([sys.executable, "-m", "memserve", *words], stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    process.terminate()
    process.wait(30)
    assert "waiting for the owner at 127.0.0.1:9: nothing answers there" in line
