"""``memserve serve`` killed with -9 while clients with an ``Idempotency-Key`` stream: started again, it goes on with
their answers, and instances compute nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from router_kills import Crowd, Killed, Stream, long_model, plain, question
from served_cluster import eventually

LONG = 1600


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    folder = tmp_path_factory.mktemp("keyed")
    killed = Killed(long_model(folder / "tiny"), folder / "state", "--prefill", "1", "--decode", "1")
    yield killed
    killed.end()


def while_it_reads(stream: Stream, act: Callable[[], object], events: int = 20) -> None:
    """``act`` in the middle of the stream; then its end is waited for."""
    thread = threading.Thread(target=stream.read)
    thread.start()
    eventually(lambda: len(stream.events) >= events)
    act()
    thread.join(120)
    assert stream.is_done


def generated(killed: Killed) -> int:
    """Tokens that instances have generated, once none has work: a request may outlive the router that sent it."""
    eventually(lambda: not killed.server.held())
    return killed.server.counter("generated_tokens")


def restart(killed: Killed) -> None:
    killed.kill()
    killed.restart()


TWO = {"n": 2, "logprobs": 2, "seed": 5, "temperature": 0.9}


@pytest.mark.parametrize(("more", "from_the_beginning"), [({}, False), (TWO, True)], ids=["one", "two, whole"])
def test_keyed_answer_resumes_at_the_next_router(killed: Killed, more: dict, from_the_beginning: bool) -> None:
    body = question(1, LONG // 2, **more)
    stream = Stream(killed, body, from_the_beginning=from_the_beginning)
    before = generated(killed)
    while_it_reads(stream, lambda: restart(killed))
    assert stream.breaks
    assert generated(killed) - before <= 1.05 * (LONG // 2) * body.get("n", 1)
    assert stream.texts() == plain(killed, body)
    ids = [number for number, _ in stream.events]
    assert len(set(ids)) == len(ids)


def test_keyed_answer_is_replayed_byte_for_byte_or_422(killed: Killed) -> None:
    body, key = question(3, 40), {"Idempotency-Key": "the whole one"}

    def ask(body: dict) -> httpx.Response:
        return httpx.post(f"{killed.url}/completions", json=body, headers=key, timeout=60)

    first = ask(body)
    before = generated(killed)
    assert ask(body).content == first.content
    conflict = ask(body | {"max_tokens": 41})
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (422, "idempotency_key_reused")
    restart(killed)
    assert ask(body).content == first.content, "kept by its instance"
    assert generated(killed) == before


def test_second_connection_takes_over_the_answer(killed: Killed) -> None:
    body = question(5, LONG)
    first, second = Stream(killed, body, "shared"), Stream(killed, body, "shared", from_the_beginning=True)

    def read_until_refused() -> None:
        with pytest.raises(httpx.HTTPError):
            first._read_once()

    thread = threading.Thread(target=read_until_refused)
    thread.start()
    eventually(lambda: len(first.events) >= 20)
    second.read()
    thread.join(60)
    assert "answer_taken_over" in first.refusals[0]
    assert second.texts() == plain(killed, body)


def test_keyed_answers_under_load_recompute_at_most_5_percent(killed: Killed) -> None:
    before = generated(killed)
    crowd = Crowd(killed, 8, 400)
    for kill in (1, 2):
        eventually(lambda kill=kill: len(crowd.answered) >= 4 * kill)
        restart(killed)
    crowd.stop()
    given = sum(body["max_tokens"] for body, _ in crowd.answered)
    assert generated(killed) - before <= 1.05 * given
    assert crowd.wrong() == [] and any(stream.breaks for _, stream in crowd.answered)
    assert killed.held() == {}
