"""``Idempotency-Key`` and ``Last-Event-ID`` over HTTP: what an engine is asked, and the events of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from fake_engine import FakeEngine
from memserve.api.http.limits import TENANT_KEY
from memserve.api.openai.response.idempotency import key_of, split_tokens
from memserve.base.types import FinishReason, TokenLogprobs, TokenOutput

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 12, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        yield world


def post(world: World, body: dict, key: str | None = "k", last: str | None = None, path: str = "completions"):
    headers = {"Idempotency-Key": key} if key is not None else {}
    headers |= {"Last-Event-ID": last} if last is not None else {}
    return httpx.post(f"{world.url}/v1/{path}", json=body, headers=headers, timeout=30)


def events(text: str) -> list[tuple[str, str]]:
    """Ids and data of a stream."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = re.sub(r'"created":\d+', "", lines["data"])  # told by a router alone
        found.append((lines.get("id", ""), data))
    return found


def test_equal_keyed_requests_share_seed_digest_and_response_id(world: World) -> None:
    first, again = post(world, BODY), post(world, BODY)
    one, two = world.engine.submitted[-2:]
    assert (one.key, one.asked, one.sampling.seed) == (two.key, two.asked, two.sampling.seed) and one.key
    assert one.request_id != two.request_id, "connections have names of their own"
    assert first.json()["id"] == again.json()["id"] and first.json()["id"].startswith("cmpl-")
    assert post(world, BODY, key='"k"').json()["id"] == first.json()["id"], "quoted, as the draft has it"
    other_body, other_key = post(world, BODY | {"top_p": 0.9}), post(world, BODY, key="other")
    three, four = world.engine.submitted[-2:]
    assert three.key == one.key and three.asked != one.asked and four.key != one.key
    assert len({first.json()["id"], other_body.json()["id"], other_key.json()["id"]}) == 3
    assert post(world, BODY | {"seed": 7}).status_code == 200
    assert world.engine.submitted[-1].sampling.seed == 7
    post(world, BODY, key=None)
    assert world.engine.submitted[-1].key == ""


def test_idempotency_keys_are_per_tenant(world: World) -> None:
    post(world, BODY)
    ours = world.engine.submitted[-1].key
    scope = {"type": "http", "headers": [(b"idempotency-key", b"k")]}
    names = [key_of(scope | {TENANT_KEY: tenant}, "cmpl-", b"{}").name for tenant in ("", "a", "b")]
    assert len(set(names)) == 3 and f"{names[0]}-0" == ours


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": ["or"]}, {"stream_options": {"include_usage": True}}])
def test_keyed_stream_resumes_after_any_event(world: World, path: str, more: dict) -> None:
    body = (BODY if path == "completions" else CHAT) | {"stream": True} | more
    whole = events(post(world, body, path=path).text)
    assert whole[-1] == ("", "[DONE]")
    if "n" not in more:
        numbers = [number for number, _ in whole[:-1] if "." not in number]
        assert numbers == [str(place) for place in range(1, len(numbers) + 1)]
    assert len({number for number, _ in whole}) == len(whole)
    for place in {0, 1, len(whole) // 2, len(whole) - 2}:
        rest = events(post(world, body, last=whole[place][0], path=path).text)
        if "n" in more:  # its two sequences may come in another order
            assert sorted(data for _, data in rest) == sorted(data for _, data in whole[place + 1 :])
        else:
            assert rest == whole[place + 1 :]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
def test_event_id_beyond_the_end_is_refused(world: World, more: dict) -> None:
    """To a client that names one, an empty stream would look like the end of its answer."""
    body = BODY | {"stream": True} | more
    *_, (last, _), _ = events(post(world, body).text)
    assert [data for _, data in events(post(world, body, last=last).text)] == ["[DONE]"]
    head, dot, tail = last.rpartition(".")
    behind = post(world, body, last=f"{head}{dot}{int(tail) + 1}")
    assert behind.status_code == 400 and "behind the end" in behind.json()["error"]["message"]
    if "n" in more:  # there are events of the other sequence
        *others, (_, error), _ = events(post(world, body, last=f"0.{int(tail) + 1}").text)
        assert len(others) == int(head) and "behind the end" in error


def test_a_stream_without_a_key_has_no_ids(world: World) -> None:
    assert {number for number, _ in events(post(world, BODY | {"stream": True}, key=None).text)} == {""}


@pytest.mark.parametrize(
    ("key", "last", "body", "says"),
    [
        ("", None, {}, "1 to 255 printable"),
        ("x" * 256, None, {}, "1 to 255 printable"),
        ("a\tb", None, {}, "1 to 255 printable"),
        (None, "3", {"stream": True}, "needs an Idempotency-Key"),
        ("k", "3", {}, "is for streams"),
        ("k", "x", {"stream": True}, "not the id of an event"),
        ("k", "1.2.3", {"stream": True}, "not the id of an event"),
        ("k", "-1", {"stream": True}, "not the id of an event"),
    ],
)
def test_headers_that_make_no_sense_are_refused(world: World, key, last, body, says: str) -> None:
    response = post(world, BODY | body, key=key, last=last)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


def test_the_events_of_a_stream_are_those_of_single_tokens() -> None:
    entries = tuple(TokenLogprobs(token, -1.0) for token in (1, 2, 3))
    output = TokenOutput("r", 0, (1, 2, 3), entries, FinishReason.LENGTH, cached_tokens=5, story=(("a", 1),), offset=4)
    parts = list(split_tokens(output))
    assert [(p.tokens, p.offset, p.finish_reason) for p in parts] == [
        ((1,), 4, None),
        ((2,), 5, None),
        ((3,), 6, FinishReason.LENGTH),
    ]
    assert [p.logprobs for p in parts] == [entries[:1], entries[1:2], entries[2:]]
    assert [p.cached_tokens for p in parts] == [5, 0, 0] and json.dumps([p.story for p in parts[1:]]) == "[[], []]"
