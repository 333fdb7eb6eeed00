"""SGLang's servers with roles behind the router, scripted: both get the request, and meet; failures of either."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fleet_server import fleet_server
from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.units import NS_PER_S
from memserve.fleet.messages import EngineSpec, FleetOptions, read_engine
from memserve.fleet.pairs import paired_body
from scripted_engine import ANSWER, DONE, EVENTS, Asked, Script, ScriptedEngine, scripted_engines, whole
from scripted_pair import Meeting, decode_script, fails_with, own_fields, pair_specs, prefill_script, stays_silent
from waiting import eventually

PORTS = (8998, 9001)


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    """Two that compute prompts, and two that answer."""
    with scripted_engines(4) as started:
        yield started


@pytest.fixture
def meeting(engines: list[ScriptedEngine]) -> Iterator[Meeting]:
    """Where they meet; afterwards the protocol was kept."""
    meeting = Meeting()
    set_scripts(engines, meeting)
    yield meeting
    assert meeting.violations == []


def set_scripts(engines: list[ScriptedEngine], meeting: Meeting, count: int = 1) -> None:
    for engine, port in zip(engines, PORTS, strict=False):
        engine.script = prefill_script(meeting, port, count)
    for engine in engines[2:]:
        engine.script = decode_script(meeting, count)


def specs_of(engines: list[ScriptedEngine]) -> list[EngineSpec]:
    return [read_engine(text) for text in pair_specs(engines, *PORTS)]


def asked_of(engines: list[ScriptedEngine]) -> list[Asked]:
    return [asked for engine in engines for asked in engine.asked]


def test_both_get_the_request_and_one_answers(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    fields = {"prompt": "hi", "max_tokens": 7, "unknown": [1.5], "temperature": 0.5}
    with fleet_server(specs_of(engines)) as server:
        assert server.post(**fields).content == ANSWER
        assert server.post(stream=True, **fields).content == b"".join((*EVENTS, DONE))
        computed, answered = asked_of(engines[:2]), asked_of(engines[2:])
        assert len(computed) == len(answered) == 2
        assert [own_fields(asked) for asked in computed] == [own_fields(asked) for asked in answered]
        assert own_fields(computed[0]) == {"model": "scripted", **fields}
        assert {asked.path for asked in (*computed, *answered)} == {"/v1/completions"}
        views = server.host.machine.engine_views()
        assert sum(view.prefills for view in views[:2]) == 2 and not any(view.failed for view in views)


def test_chats_and_responses_meet_as_well(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with fleet_server(specs_of(engines)) as server:
        assert server.post("/v1/chat/completions", prompt=None, messages=messages).content == ANSWER
        assert server.post("/v1/responses", prompt=None, input="hi").content == ANSWER
        assert {asked.path for asked in asked_of(engines)} == {"/v1/chat/completions", "/v1/responses"}


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompt": ["a", "b", "c"]}, 3), ({"prompt": [[1, 2], [3]]}, 2), ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": "a", "n": 2}, 2), ({"prompt": ["a", "b"], "n": 2}, 4), ({"prompt": ["a"]}, 1),
    ],
)  # fmt: skip
def test_each_sequence_has_a_room_of_its_own(
    engines: list[ScriptedEngine], meeting: Meeting, fields: dict[str, Any], count: int
) -> None:
    set_scripts(engines, meeting, count)
    with fleet_server(specs_of(engines)) as server:
        assert server.post(**fields).content == ANSWER
        assert len(meeting.used_rooms) == count


def test_rooms_are_random_and_never_a_clients(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    """A client that could name them would have one server read another's KV, or go to any address."""
    body = {"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 7}
    headers = {"x-override-bootstrap-host": "evil", "x-override-bootstrap-room": "7"}
    with fleet_server(specs_of(engines)) as server:
        for _ in range(8):
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"model": "scripted", "prompt": "hi", **body}, headers=headers
            )
            assert answer.content == ANSWER
    assert len(meeting.used_rooms) == 8 and max(meeting.used_rooms) > 1 << 56


def test_the_address_of_a_meeting_is_the_servers() -> None:
    for url, host in (("http://10.0.0.1:1", "10.0.0.1"), ("http://[fd00::1]:1", "[fd00::1]"), ("https://a.b:1", "a.b")):
        sent = json.loads(paired_body(b'{"prompt": "x"}', read_engine(f"sglang={url},role=prefill")))
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == (host, 8998)


async def breaks_off(asked: Asked, writer: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")


async def says_garbage(asked: Asked, writer: Any) -> None:
    writer.write(whole(200, b"<html>"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [fails_with(500), fails_with(503), breaks_off])
def test_a_failed_prefill_is_tried_elsewhere(
    engines: list[ScriptedEngine], meeting: Meeting, failing: Script, *, stream: bool
) -> None:
    """At once: the server that would answer waits in a room where nothing comes."""
    engines[0].script = failing
    expected = b"".join((*EVENTS, DONE)) if stream else ANSWER
    with fleet_server(specs_of(engines)) as server:
        for _ in range(4):
            assert server.post(stream=stream).content == expected
        views = server.host.machine.engine_views()
        assert views[0].failed == len(engines[0].asked) > 0 and not any(view.failed for view in views[1:])


@pytest.mark.parametrize("failing", [fails_with(500), fails_with(429), breaks_off, says_garbage])
def test_a_failed_decode_is_tried_elsewhere(engines: list[ScriptedEngine], meeting: Meeting, failing: Script) -> None:
    engines[2].script = failing
    with fleet_server(specs_of(engines)) as server:
        for _ in range(4):
            assert server.post().content == ANSWER
        views = server.host.machine.engine_views()
        assert views[2].failed == len(engines[2].asked) > 0 and not any(view.failed for view in views[:2])


def test_a_closed_port_ends_the_wait_at_once(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    with scripted_engines(1) as (gone,):
        gone.script = prefill_script(meeting, PORTS[0])
        specs = [read_engine(f"sglang={gone.url},role=prefill"), *specs_of(engines)[2:]]
        with fleet_server(specs) as server:
            assert server.post().content == ANSWER
            gone.close()
            answer = server.post()
            assert answer.status_code in (502, 503) and gone.name in answer.json()["error"]["message"]
            assert meeting.unmet <= 1


@pytest.mark.parametrize("failing", [0, 2])
def test_all_fail_with_one_error(engines: list[ScriptedEngine], meeting: Meeting, failing: int) -> None:
    for engine in engines[failing : failing + 2]:
        engine.script = fails_with(500, b"out of order")
    with fleet_server(specs_of(engines)) as server:
        answer = server.post(stream=True)
        assert answer.status_code == 502
        message = answer.json()["error"]["message"]
        assert all(engine.name in message for engine in engines[failing : failing + 2]) and "out of order" in message


@pytest.mark.parametrize("failing", [0, 2])
def test_a_clients_own_error_is_passed_on(engines: list[ScriptedEngine], meeting: Meeting, failing: int) -> None:
    """Whichever of the two says it first."""
    body = b'{"error":{"message":"too long"}}'
    for engine in engines[failing : failing + 2]:
        engine.script = fails_with(400, body)
    with fleet_server(specs_of(engines)) as server:
        answer = server.post()
        assert (answer.status_code, answer.content) == (400, body)
        assert len(asked_of(engines[failing : failing + 2])) == 1


@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_engine_of_a_pair_is_given_up(engines: list[ScriptedEngine], meeting: Meeting, silent: int) -> None:
    with fleet_server(specs_of(engines), ClusterConfig(dead_after_ns=NS_PER_S)) as server:
        engines[silent].script = engines[silent].health = stays_silent
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(server.post())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [answer.content for answer in answers] == [ANSWER] * 4
        assert not server.host.machine.engine_views()[silent].up


def test_a_client_that_leaves_frees_both(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    for engine in engines[:2]:
        engine.script = stays_silent
    with fleet_server(specs_of(engines)) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"model": "scripted", "prompt": "x"}, timeout=0.5)
        eventually(lambda: server.host.requests_open == 0)
        assert not any(view.requests_open for view in server.host.machine.engine_views())
        assert meeting.unmet == 1, "it waited in its room"


def test_a_stream_cut_by_its_decode_ends_with_an_error(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    async def cut(asked: Asked, writer: Any) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%b\r\n" % (len(EVENTS[0]), EVENTS[0]))

    for engine in engines[2:]:
        engine.script = decode_script(meeting, then=cut)
    with fleet_server(specs_of(engines)) as server:
        content = server.post(stream=True).content
        assert content.startswith(EVENTS[0] + b'data: {"error":') and content.endswith(DONE)


def test_a_prefill_that_ends_late_does_not_hold_the_answer(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    """SGLang's answers when the KV is sent, which may be after the first tokens came from the other one."""
    for engine, port in zip(engines, PORTS, strict=False):
        engine.script = prefill_script(meeting, port, then=stays_silent)
    with fleet_server(specs_of(engines)) as server:
        assert server.post().content == ANSWER
        assert sum(view.prefills for view in server.host.machine.engine_views()) == 1


def test_a_slow_prefill_is_waited_for(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    for engine, port in zip(engines, PORTS, strict=False):
        engine.script = prefill_script(meeting, port, delay_s=0.5)
    with fleet_server(specs_of(engines)) as server:
        assert server.post(stream=True).content == b"".join((*EVENTS, DONE))


def test_a_header_names_both(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    with fleet_server(specs_of(engines)) as server:
        body = {"model": "scripted", "prompt": [1, 2, 3]}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-memserve-explain": "1"})
        explained = json.loads(answer.headers["x-memserve-explain"])
        assert explained["computed_by"] in [engine.name for engine in engines[:2]]
        assert explained["engine"] in [engine.name for engine in engines[2:]]
        entry = server.get(f"/ui/requests/{answer.headers['x-request-id']}").json()
        assert entry["instances"] == [explained["computed_by"], explained["engine"]]


def test_a_server_without_a_role_answers_short_prompts(engines: list[ScriptedEngine], meeting: Meeting) -> None:
    with scripted_engines(1) as (single,):
        specs = [*specs_of(engines), read_engine(f"sglang={single.url}")]
        assert len(specs) == 5
        with fleet_server(specs) as server:
            assert server.post().content == ANSWER and len(single.asked) == 1
            assert server.post(prompt=list(range(1, 400))).content == ANSWER
            assert len(single.asked) == 1 and len(asked_of(engines)) == 2


def test_without_a_counterpart_it_says_so(engines: list[ScriptedEngine]) -> None:
    with fleet_server([read_engine(f"sglang={engines[0].url},role=prefill")]) as server:
        answer = server.post()
        assert answer.status_code == 503 and "in a pair alone" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        "sglang=http://a:1,role=decode,bootstrap=1", "vllm=http://a:1,role=prefill,bootstrap=1",
        "sglang=http://a:1,role=prefill,bootstrap=0", "sglang=http://a:1,role=prefill,bootstrap=x",
        "sglang=http://a:1,bootstrap=8998",
    ],
)  # fmt: skip
def test_odd_bootstrap_ports_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        read_engine(text)


def test_roles_need_a_counterpart_of_their_kind() -> None:
    FleetOptions(engines=("sglang=http://a:1,role=prefill", "sglang=http://a:2,role=decode"))
    with pytest.raises(UserError, match="without its counterpart"):
        FleetOptions(engines=("sglang=http://a:1,role=prefill", "vllm=http://a:2,role=decode"))
