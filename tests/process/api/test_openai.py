"""The official client against a real server with a fake engine: shapes, order, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models

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
from memserve.api.openai.interfaces import TokenNames
from memserve.api.openai.response.formats import _TokenColumns
from memserve.base.types import Request, TokenLogprobs

ANSWER_TOKENS = len(encode(SCRIPT_TEXT)) + 1  # the end-of-sequence token counts, as at OpenAI and vLLM
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        yield world


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[openai.OpenAI]:
    with world.client() as client:
        yield client


def last_request(world: World) -> Request:
    return world.engine.submitted[-1]


def events(response: httpx.Response) -> list[dict]:
    """The JSON of a stream's events; it must end with ``[DONE]``."""
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def post_stream(world: World, path: str, **fields) -> list[dict]:
    response = httpx.post(f"{world.url}{path}", json={"model": MODEL, "stream": True, **fields}, timeout=30)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return events(response)


# -- chat


def test_chat(world: World, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert answer.system_fingerprint and answer.created > 1_600_000_000
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", SCRIPT_TEXT, None)
    prompt = encode("<|start|>user\nhello<|end|>\n<|start|>assistant\n")
    assert last_request(world).prompt.tolist() == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == ANSWER_TOKENS
    assert answer.usage.total_tokens == len(prompt) + ANSWER_TOKENS
    assert last_request(world).stop.max_tokens == CONTEXT_TOKENS - len(prompt)


def test_chat_stream_has_openais_order(world: World) -> None:
    chunks = post_stream(world, "/v1/chat/completions", messages=HELLO, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *body, last = chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in body]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == SCRIPT_TEXT
    assert all(delta["content"] and "\ufffd" not in delta["content"] for delta in deltas[1:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in body]
    assert reasons == [None] * (len(body) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in body)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == ANSWER_TOKENS


def test_chat_stream_without_usage_does_not_mention_it(world: World) -> None:
    chunks = post_stream(world, "/v1/chat/completions", messages=HELLO)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


def test_chat_stream_with_the_official_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, n=2)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: SCRIPT_TEXT, 1: SCRIPT_TEXT}


def test_chat_accepts_text_parts_developer_role_resent_answers(world: World, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    client.chat.completions.create(model=MODEL, messages=[*messages, answer.model_dump(), *HELLO])
    text = tiny_tokenizer().backend_tokenizer.decode(last_request(world).prompt.tolist(), skip_special_tokens=False)
    assert text.startswith("<|start|>system\nbe kind<|end|>\n<|start|>user\nhello<|end|>\n<|start|>assistant\nThe")


def test_an_answer_can_be_continued(world: World, client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The cap"}]
    client.chat.completions.create(model=MODEL, messages=messages, extra_body={"continue_final_message": True})
    text = tiny_tokenizer().backend_tokenizer.decode(last_request(world).prompt.tolist(), skip_special_tokens=False)
    assert text.endswith("<|start|>assistant\nThe cap")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(model=MODEL, messages=messages, extra_body=both)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert len(content) == 8 == answer.usage.completion_tokens
    assert (
        b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == answer.choices[0].message.content
    )
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in content)
    assert content[0].top_logprobs[0].token == content[0].token


def test_streamed_logprobs_equal_whole_ones(world: World, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, stop=["東京"])
    chunks = post_stream(world, "/v1/chat/completions", messages=HELLO, logprobs=True, stop=["東京"])
    entries = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert entries == [entry.model_dump() for entry in whole.choices[0].logprobs.content]


def test_a_token_that_is_part_of_a_character_has_exact_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    parts = [entry for entry in answer.choices[0].logprobs.content if entry.token.startswith("bytes:")]
    assert parts and bytes(parts[-1].bytes) in "😀".encode()


# -- completions


def test_completion(world: World, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=5)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert SCRIPT_TEXT.startswith(choice.text) and choice.text
    assert answer.usage.completion_tokens == 5
    client.completions.create(model=MODEL, prompt="hello")
    assert last_request(world).stop.max_tokens == 16


def test_completion_stream(world: World) -> None:
    chunks = post_stream(world, "/v1/completions", prompt="hello", max_tokens=200)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == SCRIPT_TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


@pytest.mark.parametrize("prompt", ["hello", ["hello", "world"], [5, 6, 7], [[5, 6], [7]]], ids=str)
def test_prompt_forms(world: World, client: openai.OpenAI, prompt) -> None:
    before = len(world.engine.submitted)
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=200, n=2)
    requests = world.engine.submitted[before:]
    expected = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    assert [request.prompt.tolist() for request in requests] == [
        encode(one) if isinstance(one, str) else one for one in expected
    ]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert {choice.text for choice in answer.choices} == {SCRIPT_TEXT}
    assert answer.usage.completion_tokens == ANSWER_TOKENS * 2 * len(expected)


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    prompt = "Grüße 東京"
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text.startswith(prompt + "The")
    columns, prompt_tokens = choice.logprobs, len(encode(prompt))
    assert {len(column) for column in columns.model_dump().values()} == {prompt_tokens + 4}
    assert columns.token_logprobs[0] is None and columns.top_logprobs[0] is None
    assert columns.token_logprobs[1] == -0.5 and len(columns.top_logprobs[1]) >= 2
    assert columns.text_offset[0] == 0 and columns.text_offset[prompt_tokens] == len(prompt)
    for at in range(prompt_tokens, prompt_tokens + 3):
        assert choice.text[columns.text_offset[at] :].startswith(columns.tokens[at])


def test_the_chosen_token_stands_first_among_the_alternatives() -> None:
    columns = _TokenColumns(lambda token: (f"t{token}", b""))
    columns.add_token(TokenLogprobs(9, -3.0, ((5, -0.1), (6, -0.2))), 0)
    columns.add_token(TokenLogprobs(6, -0.2, ((5, -0.1), (6, -0.2))), 2)
    told = [list(entry.items()) for entry in json.loads(columns.encode_columns())["top_logprobs"]]
    assert told == [[("t9", -3.0), ("t5", -0.1), ("t6", -0.2)], [("t6", -0.2), ("t5", -0.1)]]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_scores_the_prompt(world: World, stream: bool) -> None:
    fields = {"model": MODEL, "prompt": "hello world", "max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
    response = httpx.post(f"{world.url}/v1/completions", json=fields)
    choice = (events(response) if stream else [response.json()])[0]["choices"][0]
    assert choice["text"] == "hello world" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(encode("hello world"))
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0


def test_echo_of_token_ids_in_a_stream(world: World) -> None:
    chunks = post_stream(world, "/v1/completions", prompt=encode("Grüße"), echo=True, max_tokens=200)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Grüße" + SCRIPT_TEXT


def test_best_of_returns_the_likeliest() -> None:
    texts = ["zero", "one", "two", "three"]
    engine = FakeEngine(lambda request, index: [*encode(texts[index]), EOS])
    engine.logprob_of = [-0.5, -0.9, -0.1, -0.3].__getitem__
    with serve(engine) as world, world.client() as client:
        answer = client.completions.create(model=MODEL, prompt="hello", n=2, best_of=4)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "two"), (1, "three")]
        assert answer.choices[0].logprobs is None
        assert answer.usage.completion_tokens == sum(len(encode(text)) + 1 for text in texts)


# -- stopping


@pytest.mark.parametrize("stop", ["France", ["is P", "zzz"], "東京", "😀", ["ü"], "!"], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_over_token_borders(world: World, client: openai.OpenAI, stop, stream: bool) -> None:
    stopped = len(world.engine.stopped)
    if stream:
        chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stop=stop, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(model=MODEL, messages=HELLO, stop=stop).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert text == SCRIPT_TEXT.split(stop if isinstance(stop, str) else stop[0])[0]
    assert reason == "stop"
    assert len(world.engine.stopped) == stopped + 1, "the engine must be told"


def test_only_the_sequence_with_the_stop_string_ends() -> None:
    texts = ["one two STOP three", "one two three four"]
    tokens = [[*encode(text), EOS] for text in texts]
    with serve(FakeEngine(lambda request, index: tokens[index])) as world, world.client() as client:
        answer = client.completions.create(model=MODEL, prompt="x", n=2, stop="STOP", max_tokens=100)
        assert [choice.text for choice in answer.choices] == ["one two ", texts[1]]


def test_ignore_eos_and_stop_token_ids(world: World, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=100, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 100 and answer.choices[0].text.startswith(SCRIPT_TEXT + "The")
    assert last_request(world).stop.stop_token_ids == ()
    third = encode(SCRIPT_TEXT)[2]
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=100, extra_body={"stop_token_ids": [third]})
    assert SCRIPT_TEXT.startswith(answer.choices[0].text)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 3)


# -- parameters, extensions, accounting


def test_every_parameter_reaches_the_engine(world: World, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=-0.2, seed=-1,
        max_completion_tokens=7, logit_bias={"5": -100}, user="me", n=3, metadata={"a": "b"}, store=False,
        extra_body={"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "priority": -3,
                    "timeout_s": 60, "use_cache": False},
    )  # fmt: skip
    request = last_request(world)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.2, 1.1)
    assert sampling.logit_bias == ((5, -100.0),) and sampling.seed == 2**63 - 1 and sampling.logprobs is None
    assert (request.n, request.priority, request.use_cache, request.beam_width) == (3, -3, False, 0)
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.stop_token_ids) == (7, 2, (EOS,))
    assert request.deadline_ns is not None


def test_generation_defaults_apply_to_unset_sampling_fields() -> None:
    model = TinyModel(generation_defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    engine = FakeEngine(says("x"))
    with running_server(engine, model) as world, world.client() as client:
        client.completions.create(model=MODEL, prompt="hi")
        client.completions.create(model=MODEL, prompt="hi", temperature=0, top_p=0.9, extra_body={"top_k": 0})
    silent, told = (request.sampling for request in engine.submitted)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.repetition_penalty) == (0.6, 1.0, 20, 1.1)
    assert (told.temperature, told.top_p, told.top_k, told.repetition_penalty) == (0.0, 0.9, 0, 1.1)
    engine.close()


def test_a_model_answers_to_its_names_in_any_case() -> None:
    engine = FakeEngine(says("x"))
    aliases = ("./models/Tiny", "loaded-name")
    with running_server(engine, TinyModel(), aliases=aliases) as world, world.client() as client:
        for name in (MODEL, MODEL.upper(), "loaded-NAME", "./models/tiny"):
            assert client.completions.create(model=name, prompt="hi").model == MODEL
        assert [card.id for card in client.models.list()] == [MODEL]
        assert client.models.retrieve("Loaded-Name").id == MODEL
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="tiny", prompt="hi")
    engine.close()


def test_defaults_and_beam_search(world: World, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="x")
    plain = last_request(world)
    client.completions.create(model=MODEL, prompt="x")
    assert plain.sampling.seed != last_request(world).sampling.seed, "without a seed every request draws its own"
    assert plain.deadline_ns is None and plain.use_cache and plain.sampling.temperature == 1.0
    beams = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5}
    client.completions.create(model=MODEL, prompt="x", n=2, extra_body=beams)
    request = last_request(world)
    assert (request.n, request.beam_width, request.length_penalty) == (2, 4, 0.5)


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "a prompt that no other test uses, long enough for several blocks"
    cold = client.completions.create(model=MODEL, prompt=prompt)
    warm = client.completions.create(model=MODEL, prompt=prompt)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    cached = warm.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < warm.usage.prompt_tokens


@pytest.mark.parametrize("how", ["header", "field"])
def test_explain(client: openai.OpenAI, how: str) -> None:
    asks = {"extra_headers": {"X-Memserve-Explain": "1"}} if how == "header" else {"extra_body": {"explain": True}}
    answer = client.completions.create(model=MODEL, prompt=f"explain me this {how}", **asks)
    told = answer.model_extra["memserve"]
    assert told["cached_tokens"] + told["computed_tokens"] == told["prompt_tokens"] == answer.usage.prompt_tokens
    assert told["queue_ms"] == 2.0 and told["total_ms"] >= told["ttft_ms"] > 0
    assert "memserve" not in client.completions.create(model=MODEL, prompt="x").model_extra
    *_, last = client.completions.create(model=MODEL, prompt="x", stream=True, **asks)
    assert last.model_extra["memserve"]["prompt_tokens"] == 1


def test_models_health_and_metrics(world: World, client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert card.id == MODEL and card.object == "model"
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{world.url}/health").json() == {"status": "ok", "model": MODEL}
    client.completions.create(model=MODEL, prompt="count me", max_tokens=4)
    text = httpx.get(f"{world.url}/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures["memserve_generated_tokens_total"]) > 0
    assert float(figures["memserve_time_to_first_token_seconds_count"]) > 0
    assert float(figures["memserve_inter_token_seconds_count"]) > 0
    assert float(figures["memserve_scheduler_time_share"]) == 0.01
    assert float(figures['memserve_pool_blocks{state="used",tier="hbm"}']) == 10
    assert float(figures["memserve_pool_internal_fragmentation_tokens"]) == 14
    assert float(figures["memserve_pool_external_fragmentation_pages"]) == 0
    assert float(figures["memserve_pool_token_state_share"]) == 50 / 64
    assert float(figures['memserve_preemptions_total{kind="swap"}']) == 0
    assert float(figures["memserve_engine_up"]) == 1


def test_an_engine_that_does_not_answer_shows_in_health() -> None:
    engine = FakeEngine(says("x"))
    with serve(engine) as world:
        engine.stats_error = TimeoutError()
        assert httpx.get(f"{world.url}/health").status_code == 503
        assert "memserve_engine_up 0.0" in httpx.get(f"{world.url}/metrics").text


def test_names_of_tokens_with_byte_fallback() -> None:
    """As in Llama 2's tokenizer: spaces are U+2581, bytes without a token of their own are written <0xE6>."""
    vocab = {"<unk>": 0, "\u2581the": 1, "<0xE6>": 2, "<0x41>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    names = TokenNames(tokenizer)
    assert names.name(1) == (" the", b" the")
    assert names.name(2) == ("bytes:\\xe6", b"\xe6")
    assert names.name(3) == ("A", b"A")
    assert names.name(99) == ("", b"")
