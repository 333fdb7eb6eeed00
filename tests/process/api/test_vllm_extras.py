"""Fields of requests that clients of vLLM send, with the official client against a real server with a fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import raw_http
from api_world import (
    CONTEXT_TOKENS,
    EOS,
    MODEL,
    SCRIPT_TEXT,
    TinyModel,
    World,
    encode,
    running_server,
    says,
    serve,
    tiny_tokenizer,
)
from fake_engine import FakeEngine
from memserve import __version__
from memserve.api.http.config import ApiConfig
from memserve.api.openai.request.prompts import TEXT_BYTES_MAX
from memserve.base.errors import UserError

HELLO = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT)), further_names=["second"]) as world:
        yield world


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[openai.OpenAI]:
    with world.client() as client:
        yield client


def roomy(engine: FakeEngine) -> Any:
    """A server with a context that has room for tools."""
    return running_server(engine, TinyModel(max_model_tokens=1024))


JSON = {"content-type": "application/json"}


def post(world: World, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{world.url}{path}", json={"model": MODEL, **fields}, timeout=30)


def test_probes_find_the_pages_that_vllm_has(world: World) -> None:
    assert httpx.get(f"{world.url}/version").json() == {"version": __version__}
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{world.url}/ping").json()["status"] == "ok"
    assert httpx.get(f"{world.url}/load").json() == {"server_load": 0}


def test_the_load_counts_requests_and_has_the_key_of_metrics() -> None:
    engine, key = FakeEngine(says(SCRIPT_TEXT), step_s=None), {"authorization": "Bearer operator-0123456789"}
    body = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
    with serve(engine, metrics_keys=["operator-0123456789"]) as world, raw_http.connect(world.url) as connection:
        connection.sendall(raw_http.post("/v1/completions", body))
        assert engine.wait_until(lambda: len(engine.submitted) == 1)
        assert httpx.get(f"{world.url}/load").status_code == 401
        assert httpx.get(f"{world.url}/load", headers=key).json() == {"server_load": 1}
        for _ in range(3):
            engine.step()
        assert raw_http.Answers(connection).next()[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/version", "/openapi.json"])
def test_a_slash_at_the_end_of_a_path_changes_nothing(world: World, path: str) -> None:
    plain, slashed = (httpx.get(f"{world.url}{path}{end}") for end in ("", "/"))
    assert slashed.status_code == plain.status_code == 200
    assert slashed.headers["content-type"] == plain.headers["content-type"]


def test_generating_routes_take_a_slash_at_their_end(world: World) -> None:
    assert post(world, "/v1/chat/completions/", messages=HELLO).status_code == 200
    assert post(world, "/v1/completions/", prompt="hello").status_code == 200
    assert post(world, "/tokenize/", prompt="hello").status_code == 200
    assert post(world, "/v1/nothing/", prompt="hello").status_code == 404


def test_keys_are_asked_for_behind_a_slash_as_well() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT)), api_keys=["key-0123456789abcdef"]) as world:
        assert httpx.get(f"{world.url}/tokenizer_info").status_code == 401
        for path in ("/v1/models/", "/tokenize/", "/v1/completions/", "/v1/messages/"):
            assert httpx.post(f"{world.url}{path}", json={}).status_code == 401, path


@pytest.mark.parametrize("root", ["", "/root"])
def test_browser_is_redirected_to_the_dashboard(root: str) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    with serve(FakeEngine(says(SCRIPT_TEXT)), config=ApiConfig(root_path=root)) as world:
        for path in ("/", "/ui/"):
            page = httpx.get(f"{world.url}{root}{path}", headers=browser, follow_redirects=True)
            assert str(page.url) == f"{world.url}{root}/ui" and page.headers["content-type"].startswith("text/html")
        assert httpx.get(f"{world.url}{root}/").json()["error"]["code"] == "unknown_url", "a program finds no page"


@pytest.mark.parametrize("left_out", [{}, {"model": None}])
def test_a_request_need_not_name_the_one_model(world: World, left_out: dict[str, None]) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "hello"},
        "/v1/responses": {"input": "hello"},
        "/invocations": {"messages": HELLO},
    }
    for path, body in bodies.items():
        answer = httpx.post(f"{world.url}{path}", json={**body, **left_out}, timeout=30)
        assert answer.status_code == 200 and answer.json()["model"] == MODEL, answer.text


def test_a_verbosity_is_accepted_and_an_unknown_one_refused(world: World) -> None:
    for level in ("low", "medium", "high", None):
        answer = post(world, "/v1/chat/completions", messages=HELLO, verbosity=level)
        assert answer.status_code == 200
        assert answer.headers.get("x-memserve-ignored") == (None if level is None else "verbosity")
    refused = post(world, "/v1/chat/completions", messages=HELLO, verbosity="chatty")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "verbosity"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}), ("/v1/completions", {"prompt": [5, 6]}),
        ("/v1/chat/completions", {"messages": HELLO}), ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
    ],
)  # fmt: skip
def test_fields_that_promise_nothing_are_named_in_a_header(world: World, path: str, body: dict[str, Any]) -> None:
    answer = post(world, path, **body, user="me", store=True, metadata={"a": "b"}, service_tier="auto", bad_words=[])
    names = answer.headers["x-memserve-ignored"].split(", ")
    assert answer.status_code == 200 and sorted(names) == ["bad_words", "metadata", "service_tier", "store", "user"]
    assert "x-memserve-ignored" not in post(world, path, **body).headers


def test_tokenizer_info_has_special_tokens_and_template(world: World) -> None:
    info = httpx.get(f"{world.url}/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("<|end|>", None, CONTEXT_TOKENS)
    assert info["chat_template"] == tiny_tokenizer().chat_template


def test_token_ids_are_returned_on_request_and_null_otherwise(client: openai.OpenAI) -> None:
    asked = {"return_token_ids": True}
    text = client.completions.create(model=MODEL, prompt="hello", max_tokens=99, extra_body=asked).choices[0]
    assert (text.prompt_token_ids, text.token_ids) == (encode("hello"), [*encode(SCRIPT_TEXT), EOS])
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=asked)
    assert chat.choices[0].token_ids == [*encode(SCRIPT_TEXT), EOS] and chat.prompt_token_ids
    plain = client.completions.create(model=MODEL, prompt="hello", max_tokens=2).choices[0]
    assert (plain.prompt_token_ids, plain.token_ids, plain.prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", [SCRIPT_TEXT[2:4], SCRIPT_TEXT[-2:], SCRIPT_TEXT[3]])
def test_streamed_token_ids_at_stop_string_equal_whole_answer(world: World, path: str, stop: str) -> None:
    asked = {"prompt": "hello"} if path == "/v1/completions" else {"messages": HELLO}
    asked |= {"stop": stop, "return_token_ids": True, "max_tokens": 50}
    whole = post(world, path, **asked).json()["choices"][0]
    assert whole["finish_reason"] == "stop" and len(whole["token_ids"]) > 1
    lines = post(world, path, **asked, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or ()] == whole["token_ids"]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_reports_each_token_id_once(client: openai.OpenAI, logprobs: bool) -> None:
    more = {"logprobs": True} if logprobs else {}
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, extra_body={"return_token_ids": True}, **more
    )
    first, *rest = list(stream)
    assert first.prompt_token_ids and all("prompt_token_ids" not in chunk.model_dump() for chunk in rest)
    ids = [token for chunk in rest for token in chunk.choices[0].model_dump().get("token_ids") or []]
    assert ids == [*encode(SCRIPT_TEXT), EOS]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == SCRIPT_TEXT


def test_usage_in_each_chunk_counts_what_was_shown(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for made in (
        client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, stream_options=options),
        client.completions.create(model=MODEL, prompt="hi", max_tokens=9, stream=True, stream_options=options),
    ):
        counts = [chunk.usage.completion_tokens for chunk in made]
        assert counts == sorted(counts) and counts[-1] == counts[-2] > 0


def test_the_finish_reason_comes_with_the_last_text(world: World, client: openai.OpenAI) -> None:
    stream = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=2))
    assert stream[-1].choices[0].finish_reason == "length" and stream[-1].choices[0].delta.content


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-2, None)), ("right", slice(0, 2)), (None, slice(-2, None))])
def test_a_prompt_is_cut_on_the_side_that_was_named(world: World, side: str | None, kept: slice) -> None:
    asked = {"truncate_prompt_tokens": 2} | ({"truncation_side": side} if side else {})
    assert post(world, "/v1/completions", prompt=encode("hello world"), max_tokens=1, **asked).status_code == 200
    assert world.engine.submitted[-1].prompt.tolist() == encode("hello world")[kept]


def test_vllm_fields_reach_the_engine(world: World) -> None:
    asked = {"logprobs": 3, "logprob_token_ids": [5, 6], "allowed_token_ids": [7], "prompt_logprobs": 2}
    assert post(world, "/v1/completions", prompt="hello", max_tokens=1, **asked).status_code == 200
    sampling = world.engine.submitted[-1].sampling
    assert (sampling.logprob_token_ids, sampling.allowed_token_ids) == ((5, 6), (7,))
    assert (sampling.prompt_logprobs, sampling.prompt_top_logprobs) == (True, 2)


def test_logprobs_of_the_prompt_are_reported_by_token_id(world: World, client: openai.OpenAI) -> None:
    text = client.completions.create(
        model=MODEL, prompt=["hello world", "hi"], max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    first, *rest = text.choices[0].prompt_logprobs
    assert first is None and len(rest) == len(encode("hello world")) - 1 and len(text.choices[1].prompt_logprobs)
    for token, entry in zip(encode("hello world")[1:], rest, strict=True):
        assert entry[str(token)]["logprob"] <= 0 and {"rank", "decoded_token"} <= entry[str(token)].keys()
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"prompt_logprobs": 0})
    assert chat.prompt_logprobs[0] is None and chat.usage is not None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_named_tokens_are_reported_with_the_drawn_one(world: World) -> None:
    asked = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "logprob_token_ids": [5, 6]}
    entry = post(world, "/v1/chat/completions", **asked, return_tokens_as_token_ids=True).json()["choices"][0]
    (token,) = entry["logprobs"]["content"]
    assert token["token"] == f"token_id:{encode(SCRIPT_TEXT)[0]}"
    assert token["token"] in [other["token"] for other in token["top_logprobs"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": 1, "use_beam_search": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [1 << 30], "logprobs": 1}, "logprob_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1 << 30]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": CONTEXT_TOKENS + 1}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "middle"}, "truncation_side"),
        ({"wow": 1}, "wow"),
    ],
)
def test_bad_input_is_refused_by_its_name(world: World, fields: dict[str, Any], param: str) -> None:
    answer = post(world, "/v1/completions", prompt="hello", **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_all_bad_keys_of_a_bias_are_named(world: World) -> None:
    message = post(world, "/v1/completions", prompt="x", logit_bias={"bad1": 1, "5": 1, "bad2": 1}).json()["error"]
    assert "bad1" in message["message"] and "bad2" in message["message"]


def test_fields_of_vllm_without_effect_are_named_in_a_header() -> None:
    asked = {"prompt": "hi", "max_tokens": 2, "vllm_xargs": {}, "kv_transfer_params": {"a": 1}}
    with serve(FakeEngine(says("x"))) as world:
        assert "x-memserve-ignored" not in post(world, "/v1/completions", prompt="hi").headers
        for more in ({}, {"stream": True}):
            answer = post(world, "/v1/completions", **asked, **more)
            assert answer.status_code == 200
            assert answer.headers["x-memserve-ignored"] == "vllm_xargs, kv_transfer_params"
        assert post(world, "/v1/completions", **asked, prompt_embeds="x").status_code == 400
    with serve(FakeEngine(says("x")), config=ApiConfig(lenient=True)) as world:
        answer = post(world, "/v1/completions", prompt="hi", wow=1, max_tokens="many")
        assert answer.json()["error"]["param"] == "max_tokens"
        assert post(world, "/v1/completions", prompt="hi", wow=1).headers["x-memserve-ignored"] == "wow"


def test_all_names_are_served_and_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL, "second"]
    assert client.completions.create(model="second", prompt="x", max_tokens=1).model == MODEL


def test_invocations_are_chats_or_completions(world: World) -> None:
    assert post(world, "/invocations", messages=HELLO).json()["object"] == "chat.completion"
    assert post(world, "/invocations", prompt="hello").json()["object"] == "text_completion"
    assert post(world, "/invocations", messages=HELLO, stream=True).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_text_too_long_to_tokenize_is_refused(world: World, field: str) -> None:
    text = "ab " * (TEXT_BYTES_MAX // 3 + 1)
    value = text if field == "prompt" else [{"role": "user", "content": text}]
    answer = post(world, "/tokenize", **{field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert "send it in parts" in answer.json()["error"]["message"]
    assert post(world, "/tokenize", prompt=text[:600]).json()["count"] > 100


def test_routes_outside_of_v1_need_a_key_too() -> None:
    with serve(FakeEngine(says("x")), api_keys=["secret"], config=ApiConfig(root_path="/llm")) as world:
        for path in ("/invocations", "/tokenize", "/detokenize", "/llm/v1/completions", "/v1/responses"):
            assert post(world, path, prompt="hi").status_code == 401
        with openai.OpenAI(base_url=f"{world.url}/llm/v1", api_key="secret", max_retries=0) as client:
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_texts_become_tokens_and_tokens_texts(world: World) -> None:
    made = post(world, "/tokenize", prompt="hello world", return_token_strs=True).json()
    assert made["tokens"] == encode("hello world") and made["count"] == len(made["token_strs"])
    assert made["max_model_len"] == CONTEXT_TOKENS
    assert post(world, "/detokenize", tokens=made["tokens"]).json() == {"prompt": "hello world"}
    chat = post(world, "/tokenize", messages=HELLO).json()["tokens"]
    assert "hello" in tiny_tokenizer().decode(chat) and len(chat) > len(encode("hello"))
    for path, fields, param in (
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/detokenize", {"tokens": [1 << 30]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ):  # fmt: skip
        answer = post(world, path, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert post(world, "/tokenize", prompt="x").status_code == 200
    assert httpx.post(f"{world.url}/tokenize", json={"model": "other", "prompt": "x"}).status_code == 404


def test_messages_may_have_other_roles_and_fields(world: World) -> None:
    odd = [{"role": "my-role", "content": "hello", "extra": "0"}]
    assert post(world, "/v1/chat/completions", messages=odd).status_code == 200
    assert "my-role" in tiny_tokenizer().decode(world.engine.submitted[-1].prompt.tolist())
    many = [{"role": "user", "content": "x", **{f"f{at}": 1 for at in range(40)}}]
    assert post(world, "/v1/chat/completions", messages=many).json()["error"]["param"] == "messages[0]"


def test_a_chat_echoes_the_message_that_it_continues(world: World) -> None:
    said = [*HELLO, {"role": "assistant", "content": "I say"}]
    asked = {"messages": said, "continue_final_message": True, "echo": True}
    whole = post(world, "/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]
    assert whole == "I say" + SCRIPT_TEXT


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_are_parsed_whole_and_streamed(choice: str) -> None:
    text = CALL if choice == "auto" else '[{"name": "weather", "parameters": {"city": "Rome"}}]'
    asked = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
    with roomy(FakeEngine(says(text))) as world, world.client() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == ""
        (call,) = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        calls = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
        assert calls[0].function.name == "weather" and calls[0].id and not any(part.id for part in calls[1:])
        assert "".join(part.function.arguments for part in calls) == '{"city": "Rome"}'
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
        assert bool(world.engine.submitted[-1].sampling.grammar) == (choice == "required")


def test_the_parser_must_be_known_and_the_root_a_path() -> None:
    for wrong in ({"tool_call_parser": "gpt"}, {"root_path": "llm"}, {"root_path": "/a b"}):
        with pytest.raises(UserError):
            ApiConfig(**wrong)
    assert TinyModel().name == MODEL


def test_invalid_json_after_unknown_field_is_refused() -> None:
    with serve(FakeEngine(says("x")), config=ApiConfig(lenient=True)) as world:
        for end in (b"null", b"}", b"\xff"):
            body = b'{"model": "m", "wow": [null]}' + end
            answer = httpx.post(f"{world.url}/v1/completions", content=body, headers=JSON, timeout=30)
            assert answer.status_code == 400
            assert "not valid" in answer.json()["error"]["message"]


def test_number_out_of_range_after_unknown_field_is_refused() -> None:
    with serve(FakeEngine(says("x")), config=ApiConfig(lenient=True)) as world:
        for number in (b"1e400", b"1" * 5000):
            body = b'{"model": "tiny", "no_such_field": 1, "prompt": "x", "other": [' + number + b"]}"
            response = httpx.post(f"{world.url}/v1/completions", content=body, headers=JSON, timeout=30)
            assert response.status_code == 400, response.text
            assert "out of range" in response.json()["error"]["message"]
