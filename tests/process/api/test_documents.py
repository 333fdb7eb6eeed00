"""Named prefixes over HTTP: documents and sessions, computed once, pinned, hit, and visible to their tenant alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_world import CONTEXT_TOKENS, MODEL, SCRIPT_TEXT, TinyModel, World, encode, running_server, says, serve
from fake_engine import BLOCK_TOKENS, FakeEngine, PinningFake
from memserve.api.http.errors import ApiError
from memserve.api.openai.documents import DOCUMENTS_MAX, Document, Documents, prepare_document
from memserve.api.openai.interfaces import PinningEngine
from memserve.api.openai.prefixes import PIN_ANSWER_S
from memserve.api.openai.request.messages import check_messages
from memserve.api.openai.request.prompts import Prompt, PromptEncoder
from memserve.api.openai.request.schema import ChatBody, DocumentBody
from memserve.base.config import InstanceConfig, PoolConfig
from memserve.base.units import NS_PER_S, ns_from_s
from memserve.host.engine import Engine
from memserve.instance.events import StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.transport.ports import Device as DevicePort
from memserve_lab.sim.reference.device import SymbolicDevice

TEXT = "The capital of France is hello hello."
ASK = [{"role": "user", "content": "Where?"}]


@pytest.fixture
def world() -> Iterator[World]:
    with serve(PinningFake(says(SCRIPT_TEXT))) as world:
        yield world


class Caller:
    """One tenant's HTTP client."""

    def __init__(self, world: World, key: str = "k") -> None:
        self._http = httpx.Client(base_url=f"{world.url}/v1", headers={"authorization": f"Bearer {key}"}, timeout=30)

    def __call__(self, method: str, path: str, **body) -> httpx.Response:
        return self._http.request(method, path, json=body or None)

    def put(self, name: str, **body) -> httpx.Response:
        return self("PUT", f"/documents/{name}", **body)

    def chat(self, **body) -> httpx.Response:
        return self("POST", "/chat/completions", **{"model": MODEL, "messages": ASK, **body})

    def complete(self, **body) -> httpx.Response:
        return self("POST", "/completions", **{"model": MODEL, "prompt": " is", **body})


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


def test_the_life_of_a_document(world: World) -> None:
    call = Caller(world)
    first = call.put("manual", text=TEXT, ttl_s=60)
    assert first.status_code == 201
    card = first.json()
    tokens, ttl_ns = world.engine.pins["", "document:manual"]
    assert ttl_ns == ns_from_s(60 + PIN_ANSWER_S)  # its time counts from the answer
    assert card == card | {"id": "manual", "object": "document", "endpoint": "chat", "ttl_s": 60, "cached_tokens": 0}
    assert card["tokens"] == len(tokens) and card["pinned_tokens"] == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    assert card["expires_in_s"] == 60
    assert 0 < call("GET", "/documents/manual").json()["expires_in_s"] <= 60
    warm = world.engine.submitted[-1]
    assert (warm.prompt.tolist(), warm.stop.max_tokens, warm.session) == (tokens, 1, "document:manual")

    again = call.put("manual", text=TEXT)
    assert (again.status_code, again.json()["ttl_s"]) == (200, 3600)
    assert again.json()["cached_tokens"] == (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    assert call("GET", "/documents/manual").json()["tokens"] == len(tokens)
    call.put("other", text="hello")
    assert [card["id"] for card in call("GET", "/documents").json()["data"]] == ["manual", "other"]

    assert call("DELETE", "/documents/manual").json()["deleted"] is True
    assert world.engine.unpinned == [("", "document:manual")]
    for response in (call("GET", "/documents/manual"), call("DELETE", "/documents/manual")):
        assert error_of(response) == (404, "document", "document_not_found")
    assert [card["id"] for card in call("GET", "/documents").json()["data"]] == ["other"]


def test_chat_after_a_document_hits_its_pinned_prefix(world: World) -> None:
    call = Caller(world)
    call.put("d", text=TEXT)
    pinned, _ = world.engine.pins["", "document:d"]
    answer = call.chat(document="d").json()
    request = world.engine.submitted[-1]
    assert request.prompt.tolist()[: len(pinned)] == pinned
    assert request.session == "document:d"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= (len(pinned) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    call.chat(messages=[{"role": "system", "content": TEXT}, *ASK])
    assert world.engine.submitted[-1].prompt.tolist() == request.prompt.tolist()  # a system message, nothing else


def test_the_system_message_of_a_chat_joins_the_document(world: World) -> None:
    call = Caller(world)
    call.put("d", text=TEXT)
    pinned, _ = world.engine.pins["", "document:d"]
    call.chat(document="d", messages=[{"role": "system", "content": "Be brief."}, *ASK])
    one_system = encode(
        f"<|start|>system\n{TEXT}\n\nBe brief.<|end|>\n<|start|>user\nWhere?<|end|>\n<|start|>assistant\n"
    )
    assert world.engine.submitted[-1].prompt.tolist() == one_system
    assert one_system[: len(pinned)] == pinned and len(pinned) >= len(encode(f"<|start|>system\n{TEXT}")) - 1


def test_a_conversation_as_a_document(world: World) -> None:
    call = Caller(world)
    turns = [*ASK, {"role": "assistant", "content": "Paris"}]
    assert call.put("turns", messages=turns).status_code == 201
    pinned, _ = world.engine.pins["", "document:turns"]
    rendered = "<|start|>user\nWhere?<|end|>\n<|start|>assistant\nParis<|end|>\n"
    assert pinned == encode(rendered + "<|start|>user\n")  # whatever comes next begins like this
    call.chat(document="turns", messages=[{"role": "user", "content": "Sure?"}])
    assert world.engine.submitted[-1].prompt.tolist()[: len(pinned)] == pinned
    call.put("turns", messages=turns, endpoint="completions")
    call.complete(document="turns")
    assert world.engine.submitted[-1].prompt.tolist() == [*encode(rendered), *encode(" is")]


def test_a_document_is_for_one_endpoint(world: World) -> None:
    """Its form for the other one is not computed: a request would pay for the document and find nothing of it."""
    call = Caller(world)
    call.put("chats", text=TEXT)
    call.put("texts", text=TEXT, endpoint="completions")
    asked = len(world.engine.submitted)
    for refused, own, other in (
        (call.complete(document="chats"), "chat", "completions"),
        (call.chat(document="texts"), "completions", "chat"),
    ):
        assert error_of(refused) == (400, "document", None)
        message = refused.json()["error"]["message"]
        assert f"is for {own}:" in message and f'"endpoint": "{other}"' in message
    assert len(world.engine.submitted) == asked
    assert call.chat(document="chats").status_code == call.complete(document="texts").status_code == 200


def test_completion_after_a_document(world: World) -> None:
    call = Caller(world)
    assert call.put("d", text=TEXT, endpoint="completions").json()["endpoint"] == "completions"
    assert world.engine.pins["", "document:d"][0] == encode(TEXT)
    answer = call.complete(document="d", prompt=[" is", " of"], echo=True, max_tokens=0).json()
    assert [choice["text"] for choice in answer["choices"]] == [f"{TEXT} is", f"{TEXT} of"]
    prompts = [request.prompt.tolist() for request in world.engine.submitted[-2:]]
    assert prompts == [[*encode(TEXT), *encode(" is")], [*encode(TEXT), *encode(" of")]]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 2 * (len(encode(TEXT)) // BLOCK_TOKENS * BLOCK_TOKENS)
    call.complete(document="d", prompt=encode(" is"))
    assert world.engine.submitted[-1].prompt.tolist() == prompts[0]


def test_tenants_never_see_each_others_documents() -> None:
    with serve(PinningFake(says(SCRIPT_TEXT)), api_keys=["ada=a1", "bob=b2"]) as world:
        ada, bob = Caller(world, "a1"), Caller(world, "b2")
        ada.put("d", text=TEXT)
        for response in (bob("GET", "/documents/d"), bob("DELETE", "/documents/d"), bob.chat(document="d"),
                         bob.complete(document="d")):  # fmt: skip
            assert error_of(response) == (404, "document", "document_not_found")
        assert bob("GET", "/documents").json()["data"] == []
        assert bob.put("d", text="Bob's own text").json()["cached_tokens"] == 0
        assert set(world.engine.pins) == {("ada", "document:d"), ("bob", "document:d")}
        assert ada("GET", "/documents/d").json()["tokens"] != bob("GET", "/documents/d").json()["tokens"]
        assert {request.tenant for request in world.engine.submitted} == {"ada", "bob"}
        bob("DELETE", "/documents/d")
        assert set(world.engine.pins) == {("ada", "document:d")}
        assert Caller(world, "wrong").put("d", text="x").status_code == 401


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("d", {}, "text"),
        ("d", {"text": "a", "messages": ASK}, "text"),
        ("d", {"text": ""}, "text"),
        ("d", {"messages": []}, "messages"),
        ("d", {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ("d", {"text": "a", "ttl_s": 0}, "ttl_s"),
        ("d", {"text": "a", "ttl_s": 1e9}, "ttl_s"),
        ("d", {"text": "a", "endpoint": "audio"}, "endpoint"),
        ("d", {"text": "a", "ttl": 5}, "ttl"),
        ("-d", {"text": "a"}, "id"),
        ("d%0A", {"text": "a"}, "id"),
        ("d" * 129, {"text": "a"}, "id"),
    ],
)  # fmt: skip
def test_invalid_document_is_refused_with_the_cause(world: World, name: str, body: dict, param: str) -> None:
    response = Caller(world).put(name, **body) if body else httpx.put(f"{world.url}/v1/documents/{name}", json={})
    assert error_of(response)[:2] == (400, param)
    assert world.engine.submitted == [] and world.engine.pins == {}


def test_a_document_that_fits_no_request_is_refused(world: World) -> None:
    response = Caller(world).put("d", text="x" * CONTEXT_TOKENS)
    assert error_of(response) == (400, None, "context_length_exceeded")
    assert world.engine.submitted == []


def test_requests_at_fault(world: World) -> None:
    call = Caller(world)
    call.put("d", text=TEXT)
    assert error_of(call.chat(document="e")) == (404, "document", "document_not_found")
    assert error_of(call.chat(document="d", cache_salt="s"))[:2] == (400, "cache_salt")
    assert error_of(call.chat(session="a", session_id="b"))[:2] == (400, "session_id")
    assert error_of(call.chat(session=""))[:2] == (400, "session")
    assert error_of(call.chat(session_ttl_s=5))[:2] == (400, "session_ttl_s")
    call.put("d", text=TEXT, endpoint="completions")
    long = call.complete(document="d", prompt="x" * (CONTEXT_TOKENS - 20))
    assert error_of(long)[2] == "context_length_exceeded"


def test_refused_document_is_not_stored() -> None:
    with serve(PinningFake(says(SCRIPT_TEXT), max_requests=0)) as world:
        call = Caller(world)
        assert call.put("d", text=TEXT).status_code == 429
        assert call("GET", "/documents/d").status_code == 404
        assert world.engine.pins == {}


def test_client_disconnect_cancels_document_upload() -> None:
    with serve(PinningFake(says(SCRIPT_TEXT), step_s=None)) as world:
        with pytest.raises(httpx.ReadTimeout):
            httpx.put(f"{world.url}/v1/documents/d", json={"text": TEXT}, timeout=0.5)
        assert world.engine.wait_until(lambda: len(world.engine.cancelled) == 1)
        assert world.engine.cancelled == [world.engine.submitted[0].request_id]
        assert Caller(world)("GET", "/documents").json()["data"] == [] and world.engine.pins == {}


def test_engine_without_pins_still_stores_documents() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        call = Caller(world)
        assert call.put("d", text=TEXT).json()["pinned_tokens"] is None
        assert call.chat(document="d").status_code == 200
        assert call("GET", "/documents/d").json()["pinned_tokens"] is None
        assert call("DELETE", "/documents/d").status_code == 200


def test_unresponsive_engine_does_not_block_documents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memserve.api.openai.prefixes.PIN_ANSWER_S", 0.05)
    world.engine.silent = True
    card = Caller(world).put("d", text=TEXT, ttl_s=5).json()
    assert card["pinned_tokens"] is None
    assert card["expires_in_s"] == 5, "a document's time counts from the answer"


def test_a_document_expires(world: World) -> None:
    call = Caller(world)
    assert call.put("d", text=TEXT, ttl_s=1e-6).status_code == 201
    assert call("GET", "/documents/d").status_code == 404
    assert call.chat(document="d").status_code == 404
    assert call("GET", "/documents").json()["data"] == []


def test_sessions_reach_the_engine(world: World) -> None:
    call = Caller(world)
    call.put("d", text=TEXT)
    for body, name in (
        ({"session": "s"}, "session:s"),
        ({"session_id": "s"}, "session:s"),
        ({"session": "s", "session_id": "s", "document": "d"}, "session:s"),
        ({"session": "document:d"}, "session:document:d"),
        ({"prompt_cache_key": "k"}, "key:k"),
        ({"prompt_cache_key": "k", "session": "s"}, "session:s"),
        ({"prompt_cache_key": "k", "document": "d"}, "document:d"),
        ({"prompt_cache_key": "k" * 201}, ""),
        ({}, ""),
    ):
        assert call.chat(**body).status_code == 200
        assert world.engine.submitted[-1].session == name


@pytest.mark.parametrize("stream", [False, True])
def test_session_kv_is_pinned_after_the_answer(world: World, stream: bool) -> None:
    call = Caller(world)
    response = call.chat(session="s", session_ttl_s=30, stream=stream)
    assert response.status_code == 200
    assert world.engine.wait_until(lambda: ("", "session:s") in world.engine.pins)
    tokens, ttl_ns = world.engine.pins["", "session:s"]
    assert tokens == [*world.engine.submitted[-1].prompt.tolist(), *world.engine.script(None, 0)]
    assert ttl_ns == 30 * NS_PER_S
    call.chat(session="two", session_ttl_s=30, n=2)
    assert world.engine.wait_until(lambda: ("", "session:two") in world.engine.pins)
    assert world.engine.pins["", "session:two"][0] == world.engine.submitted[-1].prompt.tolist()


def test_sessions_are_listed_and_ended_by_their_tenant_alone() -> None:
    with serve(PinningFake(says(SCRIPT_TEXT)), api_keys=["ada=a1", "bob=b2"]) as world:
        ada, bob = Caller(world, "a1"), Caller(world, "b2")

        def kept(call: Caller) -> list[str]:
            return [card["id"] for card in call("GET", "/sessions").json()["data"]]

        def keep(call: Caller, name: str, **more) -> None:
            before = len(world.engine.pins)
            assert call.chat(session=name, session_ttl_s=30, **more).status_code == 200
            assert world.engine.wait_until(lambda: len(world.engine.pins) > before)

        ada.put("d", text=TEXT)
        assert kept(ada) == []
        for name in ("one", "a/b c?"):
            keep(ada, name)
        keep(ada, "one", cache_salt="s")
        ada.chat(session="not kept")
        keep(bob, "one")
        assert kept(ada) == ["one", "a/b c?", "one"] and kept(bob) == ["one"]
        card = bob("GET", "/sessions").json()["data"][0]
        tokens, _ = world.engine.pins["bob", "session:one"]
        assert card["object"] == "session" and card["pinned_tokens"] == len(tokens) and 0 < card["expires_in_s"] <= 30

        assert error_of(bob("DELETE", "/sessions/a%2Fb%20c%3F")) == (404, "name", "session_not_found")
        assert ada("DELETE", "/sessions/a%2Fb%20c%3F").json() == {
            "id": "a/b c?", "object": "session.deleted", "deleted": True,
        }  # fmt: skip
        assert ada("DELETE", "/sessions/one").status_code == 200
        assert kept(ada) == [] and kept(bob) == ["one"]
        assert set(world.engine.pins) == {("ada", "document:d"), ("bob", "session:one")}
        for name in ("one", "d", "document:d"):
            assert error_of(ada("DELETE", f"/sessions/{name}")) == (404, "name", "session_not_found")
        world.engine.silent = True
        assert error_of(ada("GET", "/sessions")) == (503, None, "overloaded")


def test_engine_without_pins_keeps_no_sessions() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        call = Caller(world)
        call.chat(session="s", session_ttl_s=30)
        assert call("GET", "/sessions").json() == {"object": "list", "data": []}
        assert call("DELETE", "/sessions/s").status_code == 404


# -- the store


def document(name: str, ttl_s: float = 1.0) -> Document:
    prompt = Prompt(np.arange(3, dtype=np.int32), "abc")
    return Document(name, "chat", [], prompt, prompt.tokens, 0, ttl_s)


def test_document_store_expires_entries_and_has_a_limit() -> None:
    now = SimpleNamespace(ns=0)
    documents = Documents(lambda: now.ns)
    for at in range(DOCUMENTS_MAX):
        documents.put_document("t", document(f"d{at}", ttl_s=1.0 + at))
    with pytest.raises(ApiError, match="delete one"):
        documents.put_document("t", document("more"))
    documents.put_document("t", document("d5"))  # renewing is not one more
    documents.put_document("u", document("more"))  # and others have their own limit
    now.ns = NS_PER_S - 1
    assert documents.get_document("t", "d0").document_id == "d0"
    now.ns = NS_PER_S
    for gone in ("d0", "d5"):
        with pytest.raises(ApiError, match="no document"):
            documents.get_document("t", gone)
    assert len(documents.list_documents("t")) == DOCUMENTS_MAX - 2 and documents.list_documents("u") == []


def test_document_expiry_starts_at_acknowledgement() -> None:
    now = SimpleNamespace(ns=0)
    documents = Documents(lambda: now.ns)
    kept = documents.put_document("t", document("d", ttl_s=1.0), grace_s=2.0)
    now.ns = 3 * NS_PER_S - 1
    documents.restart_ttl("t", kept)
    now.ns += NS_PER_S - 1
    assert documents.expires_in_s(documents.get_document("t", "d")) == 1e-9
    newer = documents.put_document("t", document("d", ttl_s=1.0))
    documents.restart_ttl("t", kept)  # it was replaced meanwhile
    assert documents.get_document("t", "d") is newer
    documents.delete_document("t", "d")
    documents.restart_ttl("t", newer)
    assert not documents.has_document("t", "d")


ENCODER = PromptEncoder(TinyModel(max_model_tokens=4096))
words = st.text(st.sampled_from("ab Thé\n9東"), min_size=1, max_size=20)
turn = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), words
)
chat = st.lists(turn, min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(text=words, turns=chat, system=st.none() | words, as_messages=st.none() | chat)
def test_pinned_prefix_begins_every_conversation(
    text: str, turns: list[dict[str, str]], system: str | None, as_messages: list[dict[str, str]] | None
) -> None:
    body = DocumentBody(messages=as_messages) if as_messages else DocumentBody(text=text)
    put = prepare_document(body, "d", ENCODER, TinyModel(max_model_tokens=4096))
    asked = check_messages([*([{"role": "system", "content": system}] if system else []), *turns])
    if as_messages and system:
        asked = asked[1:]  # a system message behind a conversation is the template's to judge
    if as_messages:
        asked = [{"role": "user", "content": "Z"}, *asked]
    prompt = ENCODER.chat_prompt(ChatBody(model=MODEL), put.before_messages(asked))
    shared = len(put.tokens) - 1  # the last token may join what follows
    assert prompt.tokens.tolist()[:shared] == put.tokens.tolist()[:shared]
    assert len(put.tokens) >= len(put.prompt.tokens) // 2


# -- with a real engine


class SymbolicDevice(SymbolicDevice, DevicePort):
    """As a port of the engine."""

    def execute(self, plan: StepPlan) -> StepFinished:
        finished = self.run_plan(plan)
        assert isinstance(finished, StepFinished)
        return finished

    def close(self) -> None: ...


def test_documents_and_sessions_survive_cache_pressure() -> None:
    """A machine of 64 blocks; other chats use all of them several times over; only pins keep a prefix."""
    block, blocks = 4, 64
    machine = Instance(InstanceConfig(CONTEXT_TOKENS, pool=PoolConfig(hbm_blocks=blocks)), block)
    engine = Engine(machine, SymbolicDevice(block, blocks, 0, vocab=100))
    assert isinstance(engine, PinningEngine)

    def cached(response: httpx.Response) -> int:
        assert response.status_code == 200
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def press(call: Caller) -> None:
        for at in range(4):
            call.chat(messages=[{"role": "user", "content": f"{at}" * 120}], max_tokens=1)

    try:
        with running_server(engine, TinyModel()) as world:
            call = Caller(world)
            card = call.put("d", text=TEXT).json()
            assert card["pinned_tokens"] == card["tokens"] // block * block > 0
            session = {"session": "s", "session_ttl_s": 60, "max_tokens": 8}
            first = [{"role": "user", "content": "Who are you, and why are you here?"}]
            call.chat(messages=first, **session)
            press(call)
            assert cached(call.chat(document="d", max_tokens=1)) >= card["pinned_tokens"]
            assert cached(call.chat(messages=first, **session)) >= len(encode(first[0]["content"])) // block * block
            (kept,) = call("GET", "/sessions").json()["data"]
            assert kept["id"] == "s" and kept["pinned_tokens"] > 0 and 0 < kept["expires_in_s"] <= 60
            call("DELETE", "/documents/d")
            call("DELETE", "/sessions/s")
            assert call("GET", "/sessions").json()["data"] == []
            press(call)
            assert cached(call.chat(messages=[{"role": "system", "content": TEXT}, *ASK], max_tokens=1)) == 0
            assert cached(call.chat(messages=first, max_tokens=1)) < len(encode(first[0]["content"])) // block * block
    finally:
        engine.close()
    machine.check_invariants()
