"""Hints on KV over HTTP: the envelope, its targets, what becomes of each action, and whose it is."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from api_world import CONTEXT_TOKENS, MODEL, SCRIPT_TEXT, TinyModel, World, running_server, says, serve
from fake_engine import PinningFake
from memserve.base.config import InstanceConfig, PoolConfig
from memserve.host.engine import Engine
from memserve.instance.events import StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.transport.ports import Device as DevicePort
from memserve_lab.sim.reference.device import SymbolicDevice

BLOCK, HBM, DRAM = 4, 96, 96
TEXT = "Who are you, and why are you here, and what do you want?"
CHAT = [{"role": "user", "content": TEXT}]


class PortDevice(SymbolicDevice, DevicePort):
    """As a port of the engine."""

    def execute(self, plan: StepPlan) -> StepFinished:
        finished = self.run_plan(plan)
        assert isinstance(finished, StepFinished)
        return finished

    def close(self) -> None: ...


@pytest.fixture
def world() -> Iterator[World]:
    machine = Instance(InstanceConfig(CONTEXT_TOKENS, pool=PoolConfig(HBM, DRAM)), BLOCK)
    engine = Engine(machine, PortDevice(BLOCK, HBM, DRAM, vocab=100))
    try:
        with running_server(engine, TinyModel()) as world:
            yield world
    finally:
        engine.close()
    machine.check_invariants()


class Caller:
    """One tenant's HTTP client."""

    def __init__(self, world: World, key: str = "k") -> None:
        self._http = httpx.Client(base_url=f"{world.url}/v1", headers={"authorization": f"Bearer {key}"}, timeout=30)

    def chat(self, messages=CHAT, **body) -> int:
        """Returns the cached tokens of the prompt."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, **body}
        answer = self._http.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def press(self) -> None:
        for at in range(6):
            self.chat([{"role": "user", "content": f"{at}" * 120}])

    def hint(self, *actions: tuple[str, dict], message_id: str = "m") -> list[tuple[str, str]]:
        """Outcome and reason of each."""
        answer = self._http.post("/kv_hints", json=envelope(*actions, message_id=message_id))
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["object"], body["protocol_version"], body["message_id"]) == ("kv_hints.results", "0.1", message_id)
        return [(result["outcome"], result.get("reason", "")) for result in body["results"]]

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def post(self, path: str, body: object) -> httpx.Response:
        return self._http.post(path, json=body)


def envelope(*actions: tuple[str, dict], message_id: str = "m") -> dict:
    listed = [
        {"action_id": f"a{at}", "action_type": name, "action_version": "1.0", "payload": payload}
        for at, (name, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": message_id, "actions": listed}


def test_a_retained_chat_outlives_pressure_a_released_does_not(world: World) -> None:
    call = Caller(world)
    call.chat()
    call.press()
    call.press()
    assert call.chat() == 0, "the pressure is too low for this test"
    assert call.hint(("kv.retain", {"messages": CHAT, "ttl_s": 60, "priority": 5})) == [("accepted", "")]
    call.press()
    call.press()
    assert call.chat() > 0
    assert call.hint(("kv.release", {"messages": CHAT}))[0][0] in ("accepted", "clipped")
    call.press()
    call.press()
    assert call.chat() == 0


def test_a_prefix_goes_down_and_comes_up(world: World) -> None:
    call = Caller(world)
    call.chat()
    assert call.hint(("kv.demote", {"messages": CHAT}), ("kv.prefetch", {"messages": CHAT})) == [("accepted", "")] * 2
    assert call.chat() > 0


def test_a_session_is_a_target_while_it_has_a_name(world: World) -> None:
    call = Caller(world)
    (unknown,) = call.hint(("kv.demote", {"session": "s"}))
    assert unknown == ("missing", "the name keeps no KV: say which tokens are meant")
    call.chat(session="s", session_ttl_s=60)
    (pinned,) = call.hint(("kv.demote", {"session": "s"}))
    assert pinned[0] == "rejected" and "pinned" in pinned[1]
    assert call.hint(("kv.retain", {"session": "s", "priority": 1}), ("kv.demote", {"session": "s"})) == [
        ("accepted", ""),
        ("accepted", ""),
    ]
    assert [entry["id"] for entry in call.get("/sessions").json()["data"]] == ["s"]
    assert call.hint(("kv.release", {"session": "s"}))[0][0] == "accepted"
    assert call.get("/sessions").json()["data"] == []


def test_openai_clients_give_hints_with_a_request(world: World) -> None:
    """Done when the answer has ended: what becomes of them is asked for by the message's id."""
    hints = envelope(("kv.retain", {"ttl_s": 60, "priority": 2}), ("kv.prefetch", {}), message_id="turn/1")
    client = openai.OpenAI(base_url=f"{world.url}/v1", api_key="k")
    client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4, extra_body={"kv_hints": hints})
    call = Caller(world)
    retained, prefetched = call.get("/kv_hints/turn/1").json()["results"]
    assert retained["outcome"] == "accepted" and retained["tokens"] > 0 and retained["action_id"] == "a0"
    assert prefetched["outcome"] == "rejected" and "before it" in prefetched["reason"]
    call.press()
    call.press()
    assert call.chat() > 0


@pytest.mark.parametrize("path", ["/completions", "/responses", "/messages"])
def test_other_endpoints_take_hints_as_well(world: World, path: str) -> None:
    call = Caller(world)
    body = {"model": MODEL, "kv_hints": envelope(("kv.retain", {}), message_id=path), "max_tokens": 4}
    if path == "/completions":
        body["prompt"] = TEXT
    elif path == "/responses":
        body |= {"input": TEXT, "max_output_tokens": body.pop("max_tokens")}
    else:
        body["messages"] = CHAT
    answer = call.post(path, body)
    assert answer.status_code == 200, answer.text
    (retained,) = call.get(f"/kv_hints/{path}").json()["results"]
    assert retained["outcome"] == "accepted"


@pytest.mark.parametrize(
    ("action", "payload", "reason"),
    [
        ("kv.compress", {"session": "s"}, "is not known"),
        ("kv.retain", {}, "give one of"),
        ("kv.retain", {"session": "s", "prompt": "x"}, "give one of"),
        ("kv.retain", {"session": "s", "ttl_s": -1}, "payload"),
        ("kv.retain", {"session": "s", "colour": 1}, "payload"),
        ("kv.retain", {"document": "none"}, "no document"),
        ("kv.share", {"messages": CHAT, "destination": "c2"}, "no other instance"),
    ],
)
def test_what_cannot_be_done_is_rejected_with_the_reason(world: World, action: str, payload: dict, reason: str) -> None:
    call = Caller(world)
    call.chat()
    ((outcome, said),) = call.hint((action, payload))
    assert outcome == "rejected" and reason in said


def test_too_much_is_clipped(world: World) -> None:
    call = Caller(world)
    call.chat()
    (long, high) = call.hint(
        ("kv.retain", {"messages": CHAT, "ttl_s": 1e6}), ("kv.retain", {"messages": CHAT, "priority": 1e6})
    )
    assert long == ("clipped", "ttl_s is 86400 at most") and high == ("clipped", "priority is 100 at most")


@pytest.mark.parametrize(
    "body",
    [
        {"protocol_version": "9", "message_id": "m", "actions": []},
        {"protocol_version": "0.1", "actions": []},
        {"protocol_version": "0.1", "message_id": "m", "actions": [{"action_id": "a"}]},
        {"protocol_version": "0.1", "message_id": "m", "actions": [], "more": 1},
    ],
)
def test_an_envelope_of_another_form_is_refused(world: World, body: dict) -> None:
    call = Caller(world)
    assert call.post("/kv_hints", body).status_code == 400
    chat = {"model": MODEL, "messages": CHAT, "kv_hints": body}
    assert call.post("/chat/completions", chat).status_code == 400


def test_unknown_messages_are_not_found(world: World) -> None:
    answer = Caller(world).get("/kv_hints/never")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "kv_hints_not_found"


def test_an_engine_without_hints_says_so() -> None:
    with serve(PinningFake(says(SCRIPT_TEXT))) as world:
        call = Caller(world)
        assert call.hint(("kv.retain", {"prompt": TEXT})) == [("rejected", "the engine takes no hints")]
        metrics = httpx.get(f"{world.url}/metrics").text
    assert 'memserve_kv_hints_total{action="retain",outcome="rejected"} 1.0' in metrics
