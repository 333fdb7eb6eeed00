"""Thoughts of models, and what no model here gives: the official client against a real server with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from api_world import MODEL, TinyModel, World, encode, running_server, says, tiny_tokenizer
from fake_engine import FakeEngine
from memserve.api.http.config import ApiConfig
from memserve.base.errors import UserError

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% if begin %}<think>\n{% endif %}{% endif %}"
)
SAID = "<think>\nParis or Rome?\n</think>\n\nParis."


class Thinker(TinyModel):
    """Its chat template knows thoughts."""

    template = TEMPLATE

    @property
    def tokenizer(self) -> Any:
        tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer().backend_tokenizer)
        tokenizer.chat_template = self.template
        return tokenizer


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    engine = FakeEngine(says(SAID))
    with running_server(engine, Thinker()) as world:
        yield world
    engine.close()


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[openai.OpenAI]:
    with world.client() as client:
        yield client


def test_thoughts_are_reported_apart_from_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Paris.", "Paris or Rome?")
    thoughts = answer.usage.completion_tokens_details.reasoning_tokens
    assert len(encode("Paris or Rome?")) <= thoughts < answer.usage.completion_tokens - len(encode("Paris."))


@pytest.mark.parametrize("logprobs", [False, True])
def test_stream_sends_reasoning_before_the_answer(client: openai.OpenAI, logprobs: bool) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, logprobs=logprobs)
    chunks = [chunk.choices[0] for chunk in stream]
    kinds = [name for one in chunks for name in ("reasoning_content", "content") if getattr(one.delta, name, None)]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"reasoning_content", "content"}
    assert "".join(getattr(one.delta, "reasoning_content", None) or "" for one in chunks) == "Paris or Rome?"
    assert "".join(one.delta.content or "" for one in chunks) == "Paris."
    assert chunks[-1].finish_reason == "stop"
    entries = [entry.token for one in chunks if one.logprobs for entry in one.logprobs.content]
    assert "".join(entries).startswith(SAID) if logprobs else not entries


def test_thoughts_may_begin_in_the_prompt() -> None:
    engine = FakeEngine(says("Paris or Rome?\n</think>\n\nParis."))
    with running_server(engine, Thinker()) as world, world.client() as client:
        extra = {"chat_template_kwargs": {"begin": True}}
        message = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra).choices[0].message
        assert (message.content, message.reasoning_content) == ("Paris.", "Paris or Rome?")
        cut = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra, max_tokens=4).choices[0]
        assert cut.finish_reason == "length" and not cut.message.content and cut.message.reasoning_content
    engine.close()


def test_thoughts_of_earlier_answers_reach_the_template(world: World, client: openai.OpenAI) -> None:
    past = {"role": "assistant", "content": "Rome.", "reasoning_content": "Hm."}
    client.chat.completions.create(model=MODEL, messages=[*HELLO, past, *HELLO])
    asked = world.engine.submitted[-1].prompt.tolist()
    assert "<think>Hm.</think>Rome." in tiny_tokenizer().decode(asked)


def test_an_effort_is_a_variable_of_the_template(world: World, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort="high")
    assert "effort high" in tiny_tokenizer().decode(world.engine.submitted[-1].prompt.tolist())


def test_a_server_can_leave_thoughts_in_the_text() -> None:
    engine = FakeEngine(says(SAID))
    with running_server(engine, Thinker(), config=ApiConfig(reasoning_parser="none")) as world:
        message = world.client().chat.completions.create(model=MODEL, messages=HELLO).choices[0].message
        assert message.content == SAID and not hasattr(message, "reasoning_content")
    engine.close()
    with pytest.raises(UserError, match="unknown reasoning parser 'deepseek'"):
        ApiConfig(reasoning_parser="deepseek")


def test_responses_have_an_item_of_reasoning(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hello")
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.content[0].text == "Paris or Rome?"
    assert message.type == "message" and answer.output_text == "Paris."
    assert answer.usage.output_tokens_details.reasoning_tokens >= len(encode("Paris or Rome?"))
    again = client.responses.create(model=MODEL, input="hello", previous_response_id=answer.id)
    assert again.output_text == "Paris."
    events = list(client.responses.create(model=MODEL, input="hello", stream=True))
    told = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(told) == "Paris or Rome?"
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


# -- what is refused


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "Vision"),
        ({"type": "video_url", "video_url": {"url": "http://127.0.0.1/x"}}, "Vision"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "Audio"),
        ({"type": "file", "file": {"file_id": "f"}}, "Reading files"),
    ],
)
def test_non_text_content_is_refused_by_name(client: openai.OpenAI, part: dict[str, Any], names: str) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert refused.value.code == "unsupported_parameter" and refused.value.param == "messages[0].content[1]"
    assert names in refused.value.message


def test_images_in_responses_are_refused(client: openai.OpenAI) -> None:
    content: list[Any] = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    with pytest.raises(openai.BadRequestError, match="Vision"):
        client.responses.create(model=MODEL, input=[{"role": "user", "content": content}])


def test_paths_of_openai_that_no_model_answers_say_why(world: World, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no embeddings") as refused:
        client.embeddings.create(model=MODEL, input="hello")
    assert refused.value.code == "not_served"
    for path in ("audio/speech", "images/generations", "moderations", "threads/t/runs"):
        answer = httpx.post(f"{world.url}/v1/{path}", json={})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_served", path
    unknown = httpx.post(f"{world.url}/v1/embedding", json={})
    assert unknown.json()["error"]["code"] == "unknown_url"


def test_thoughts_are_blocks_of_a_message(world: World) -> None:
    import anthropic  # 2 s of CPU, which each worker would spend when it collects

    with anthropic.Anthropic(api_key="unused", base_url=world.url, max_retries=0) as client:
        whole = client.messages.create(model=MODEL, max_tokens=99, messages=HELLO, thinking={"type": "adaptive"})
        with client.messages.stream(model=MODEL, max_tokens=99, messages=HELLO) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            thoughts, answer = message.content
            assert isinstance(thoughts, anthropic.types.ThinkingBlock) and thoughts.signature
            assert (thoughts.thinking, answer.to_dict()["text"]) == ("Paris or Rome?", "Paris.")
            assert message.usage.output_tokens_details is not None
            assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
        client.messages.create(
            model=MODEL, max_tokens=9, messages=[*HELLO, {"role": "assistant", "content": whole.content}, *HELLO]
        )
    prompt = str(tiny_tokenizer().decode(world.engine.submitted[-1].prompt.tolist()))
    assert "<think>Paris or Rome?</think>Paris.<|end|>" in prompt


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [(None, "off"), ({"type": "disabled"}, "off"), ({"type": "enabled", "budget_tokens": 1024}, "on")],
)
def test_a_template_is_told_whether_to_think(thinking: Any, shown: str) -> None:
    class Told(Thinker):
        template = "{{ 'on' if enable_thinking else 'off' }}{% for m in messages %}{{ m.content }}{% endfor %}"

    import anthropic

    engine = FakeEngine(says("x"))
    fields = {} if thinking is None else {"thinking": thinking}
    with running_server(engine, Told()) as world:
        with anthropic.Anthropic(api_key="unused", base_url=world.url, max_retries=0) as client:
            client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, **fields)
        assert str(tiny_tokenizer().decode(engine.submitted[-1].prompt.tolist())).startswith(shown)
    engine.close()
