"""OpenAI's Responses API, with the official client against a real server with a fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from api_world import MODEL, SCRIPT_TEXT, TinyModel, World, running_server, says, serve, tiny_tokenizer
from fake_engine import FakeEngine
from memserve.api.openai.responses import endpoint
from waiting import eventually

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALLS = (
    'So:<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        yield world


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[openai.OpenAI]:
    with world.client() as client:
        yield client


def prompt_of(world: World) -> str:
    return str(tiny_tokenizer().decode(world.engine.submitted[-1].prompt.tolist()))


def test_response_is_created_stored_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(input="hello", instructions="be short", metadata={"a": "b"})
    assert (made.status, made.output_text, made.model) == ("completed", SCRIPT_TEXT, MODEL)
    assert made.usage is not None and made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert client.responses.retrieve(made.id).output_text == SCRIPT_TEXT
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        client.responses.retrieve(made.id)


def test_unstored_response_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_is_continued_without_its_instructions(world: World, client: openai.OpenAI) -> None:
    first = client.responses.create(input="first words", instructions="told once")
    client.responses.create(input="second words", previous_response_id=first.id)
    prompt = prompt_of(world)
    assert prompt.index("first words") < prompt.index(SCRIPT_TEXT) < prompt.index("second words")
    assert "told once" not in prompt
    one, other = world.engine.submitted[-2:]
    assert one.session == other.session != ""


def test_tenants_do_not_see_each_other_s_responses() -> None:
    with serve(FakeEngine(says("x")), api_keys=["a=one", "b=two"]) as world:
        clients = {name: world.client(key) for name, key in (("one", "one"), ("two", "two"))}
        made = clients["one"].responses.create(input="hello")
        for ask in (clients["two"].responses.retrieve, clients["two"].responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.NotFoundError):
            clients["two"].responses.create(input="hello", previous_response_id=made.id)


def test_items_become_messages(world: World, client: openai.OpenAI) -> None:
    client.responses.create(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "is it hot"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "35 degrees"},
        ]
    )
    prompt = prompt_of(world)
    assert "is it hot" in prompt and '"weather"' in prompt and "35 degrees" in prompt


def stacked(events: list[Any]) -> None:
    """Each part that begins ends, in order, and the numbers rise."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    open_parts = []
    for event in events:
        kind, _, what = event.type.rpartition(".")
        if what == "added":
            open_parts.append(kind)
        elif what == "done" and kind in ("response.output_item", "response.content_part"):
            assert open_parts.pop() == kind
    assert not open_parts


def test_streamed_response_equals_the_whole_response(client: openai.OpenAI) -> None:
    asked = {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 0}
    events = list(client.responses.create(**asked, stream=True))
    stacked(events)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == events[-1].response.output_text == SCRIPT_TEXT
    assert all(event.logprobs for event in deltas) and events[-1].type == "response.completed"
    assert client.responses.retrieve(events[0].response.id).output_text == SCRIPT_TEXT


def test_truncated_answer_is_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(input="hello", max_output_tokens=1)
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(input="hello", max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete"


def test_calls_are_items_whole_and_streamed() -> None:
    with running_server(FakeEngine(says(CALLS)), TinyModel(max_model_tokens=1024)) as world, world.client() as client:
        made = client.responses.create(input="hello", tools=[WEATHER])
        assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
        assert json.loads(made.output[1].arguments) == {"city": "Rome"}
        events = list(client.responses.create(input="hello", tools=[WEATHER], stream=True))
        stacked(events)
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == ['{"city": "Rome"}', "{}"]
        assert [event.output_index for event in done] == [1, 2]


def test_a_response_in_the_background_is_read_later_or_cancelled() -> None:
    engine = FakeEngine(says("word " * 5), step_s=None)
    with serve(engine) as world, world.client() as client:
        made, other = (client.responses.create(input="hello", background=True) for _ in range(2))
        assert made.status == "queued"
        assert engine.wait_until(lambda: engine.requests_outstanding == 2)
        assert client.responses.cancel(other.id).status == "cancelled"
        assert engine.wait_until(lambda: engine.requests_outstanding == 1)
        for _ in range(100):
            engine.step()
            if client.responses.retrieve(made.id).status == "completed":
                break
        assert client.responses.retrieve(made.id).output_text == "word " * 5
        assert client.responses.retrieve(other.id).status == "cancelled"
        assert client.responses.cancel(made.id).status == "completed"


def test_answers_in_the_background_count_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fit as they begin. With their answers, and the messages behind which they go on, the older one goes."""
    with serve(FakeEngine(says("word " * 30))) as world, world.client() as client:

        def read_to_the_end() -> str:
            made = client.responses.create(input="hello", background=True, max_output_tokens=200)
            eventually(lambda: client.responses.retrieve(made.id).status == "completed")
            return made.id

        first = read_to_the_end()
        whole = httpx.get(f"{world.url}/v1/responses/{first}", timeout=30).content
        monkeypatch.setattr(endpoint, "KEPT_BYTES_MAX", 2 * len(whole))
        second = read_to_the_end()
        assert client.responses.retrieve(second).output_text == "word " * 30
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"), ({"input": []}, "input"), ({"input": [{"type": "image"}]}, "input[0]"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "background": True, "stream": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "truncation": "auto"}, "truncation"), ({"input": "x", "include": ["all"]}, "include"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"), ({"input": "x", "wow": 1}, "wow"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_its_name(world: World, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{world.url}/v1/responses", json=fields, timeout=30)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
