"""Malformed and hostile requests, and what each must be answered with: for the fake engine and for real ones.

``hostile_cases`` yields the table; ``send`` sends one case; ``check_answer`` judges the answer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class HostileCase:
    """One request and the answers that are right for it."""

    name: str
    path: str
    body: bytes
    status: int = 400
    param: str | None = None  # expected ``error.param``
    says: str = ""  # expected inside ``error.message``
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))


def send(client: httpx.Client, case: HostileCase) -> httpx.Response:
    """Send ``case``; large bodies go out in pieces, as from a real client."""
    return client.request(case.method, case.path, content=case.body or None, headers=case.headers)


def check_answer(case: HostileCase, response: httpx.Response) -> None:
    """The status, and an error in OpenAI's form that names what is wrong."""
    assert response.status_code == case.status, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert len(error["message"]) < 2000
    assert isinstance(error["type"], str)
    assert case.says.lower() in error["message"].lower(), error
    if case.param is not None:
        assert (error["param"] or "").split("[")[0] == case.param, error


def hostile_cases(model: str, context_tokens: int, long_text: str) -> Iterator[HostileCase]:
    """The table. ``long_text`` has more tokens than the context, but not many times more."""
    yield from _broken_bodies(model)
    yield from _wrong_values(model)
    yield from _wrong_messages(model)
    yield from _wrong_prompts(model, context_tokens, long_text)
    yield from _unsupported(model)
    yield from _routes(model)


def _completion(model: str, /, **fields: Any) -> bytes:
    return json.dumps({"model": model, "prompt": "hi", "max_tokens": 2, **fields}).encode()


def _chat(model: str, /, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 2, **fields}).encode()


def _broken_bodies(model: str) -> Iterator[HostileCase]:
    name = json.dumps(model).encode()
    raw = {
        "no body": (b"", "empty"),
        "broken JSON": (b'{"model": ', "JSON"),
        "trailing garbage": (_completion(model) + b"}", "JSON"),
        "two documents": (_completion(model) * 2, "JSON"),
        "NaN": (b'{"model": %b, "prompt": "hi", "temperature": NaN}' % name, "JSON"),
        "infinity": (b'{"model": %b, "prompt": "hi", "temperature": Infinity}' % name, "JSON"),
        "number beyond a double": (b'{"model": %b, "prompt": "hi", "temperature": 1e999}' % name, ""),
        "invalid UTF-8": (b'{"model": %b, "prompt": "\xff\xfe"}' % name, "UTF-8"),
        "lone surrogate": (b'{"model": %b, "prompt": "\\ud800"}' % name, ""),
        "an array": (b"[]", "object"),
        "a string": (b'"hello"', "object"),
        "null": (b"null", "object"),
        "nested too deeply": (b'{"model": %b, "prompt": %b}' % (name, b"[" * 100_000), ""),
        "nested in metadata": (b'{"model": %b, "prompt": "x", "metadata": %b}' % (name, b'{"a":' * 100_000), ""),
        "binary": (bytes(range(256)), ""),
        "a byte order mark": (b"\xef\xbb\xbf" + _completion(model), "JSON"),
    }
    for case, (body, says) in raw.items():
        yield HostileCase(case, COMPLETIONS, body, says=says)
    text = {"content-type": "text/plain"}
    yield HostileCase("plain text", COMPLETIONS, _completion(model), 415, says="application/json", headers=text)
    gzip = {**JSON, "content-encoding": "gzip"}
    yield HostileCase("a compressed body", COMPLETIONS, _completion(model), 415, says="gzip", headers=gzip)
    yield HostileCase("100 MB", CHAT, _huge_body(), 413, says="larger")


@functools.cache
def _huge_body() -> bytes:
    """One for all tables."""
    return b'{"a": "' + b"x" * 100_000_000 + b'"}'


def _wrong_values(model: str) -> Iterator[HostileCase]:
    values: list[tuple[str, Any]] = [
        ("max_tokens", -1), ("max_tokens", "many"), ("max_tokens", 1.5), ("max_tokens", True),
        ("max_tokens", 0), ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0),
        ("top_p", 1.1), ("top_k", -2), ("top_k", 10**12), ("min_p", -1), ("n", 0), ("n", -3), ("n", 10**6),
        ("presence_penalty", 3), ("frequency_penalty", -2.5), ("repetition_penalty", 0),
        ("repetition_penalty", 5e-324), ("seed", "x"),
        ("seed", 2**70), ("logprobs", 21), ("logprobs", -1), ("best_of", 0), ("stop", ""), ("stop", ["a"] * 33),
        ("stop", 5), ("stop", "x" * 1001), ("stream", "yes"), ("min_tokens", -1), ("min_tokens", 3),
        ("timeout_s", 0), ("timeout_s", -5), ("priority", 2**40), ("beam_width", 4), ("logit_bias", [1]),
        ("logit_bias", {"hello": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"999999999": 1}),
        ("stop_token_ids", [-1]), ("stream_options", {"include_usage": True}), ("user", 5), ("model", 7),
    ]  # fmt: skip
    for at, (name, value) in enumerate(values):
        yield HostileCase(
            f"{name} {str(value)[:20]} #{at}", COMPLETIONS, _completion(model, **{name: value}), param=name
        )
    body = _completion(model, logit_bias={"1": 101})
    yield HostileCase("a bias out of range", COMPLETIONS, body, says="logit_bias")
    body = _completion(model, n=3, best_of=2)
    yield HostileCase("best_of below n", COMPLETIONS, body, param="best_of")
    body = _completion(model, n=1, best_of=2, stream=True)
    yield HostileCase("best_of streamed", COMPLETIONS, body, param="best_of")
    body = _completion(model, use_beam_search=True, n=4, beam_width=2)
    yield HostileCase("fewer beams than answers", COMPLETIONS, body, param="beam_width")
    body = _completion(model, prompt=["hi"] * 32, n=128, max_tokens=33, logprobs=0)
    yield HostileCase("an answer of 270,336 values", COMPLETIONS, body, param="max_tokens", says='"stream": true')
    body = _completion(model, prompt=["hi"] * 32, n=128, max_tokens=129)
    yield HostileCase("an answer of 528,384 tokens", COMPLETIONS, body, param="max_tokens", says="the limit is 262144")
    body = _completion(model, temprature=1)
    yield HostileCase("a misspelt field", COMPLETIONS, body, param="temprature", says="did you mean 'temperature'")
    yield HostileCase("an invented field", CHAT, _chat(model, wow=1), param="wow", says="unknown field")
    body = _chat(model, stream=True, stream_options={"wow": 1})
    yield HostileCase("an invented nested field", CHAT, body, says="stream_options")
    yield HostileCase("top_logprobs alone", CHAT, _chat(model, top_logprobs=2), param="top_logprobs")
    yield HostileCase("logprobs of the wrong kind", CHAT, _chat(model, logprobs=3), param="logprobs")
    yield HostileCase("a number for a model", COMPLETIONS, b'{"prompt": "hi", "model": 7}', param="model")
    yield HostileCase("another model", COMPLETIONS, _completion("gpt-17"), 404, "model", "does not exist")
    yield HostileCase("another model, chat", CHAT, _chat("../../etc/passwd"), 404, "model", "does not exist")


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def _wrong_messages(model: str) -> Iterator[HostileCase]:
    user = {"role": "user", "content": "hi"}
    messages: dict[str, Any] = {
        "none at all": [],
        "null": None,
        "a string": "hi",
        "no objects": ["hi"],
        "no role": [{"content": "hi"}],
        "a long role": [{"role": "robot" * 100, "content": "hi"}],
        "a role of the wrong type": [{"role": ["user"], "content": "hi"}],
        "no content": [{"role": "user"}],
        "null content": [{"role": "user", "content": None}],
        "content a number": [{"role": "user", "content": 5}],
        "content an empty list": [{"role": "user", "content": []}],
        "content parts without a type": [{"role": "user", "content": [{"text": "hi"}]}],
        "a text part without text": [{"role": "user", "content": [{"type": "text"}]}],
        "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        "a tool's answer that is none": [user, {"role": "tool", "content": 4, "tool_call_id": "1"}],
        "an answer to no name": [user, {"role": "tool", "content": "4", "tool_call_id": 1}],
        "tool calls without a function": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        "tool calls of a user": [{**user, "tool_calls": [_call("{}")]}],
        "tool calls that are no list": [{"role": "assistant", "tool_calls": _call("{}")}],
        "arguments that are no JSON": [{"role": "assistant", "tool_calls": [_call("{")]}],
        "arguments that are no object": [{"role": "assistant", "tool_calls": [_call("[1]")]}],
        "arguments nested too far": [{"role": "assistant", "tool_calls": [_call("[" * 100_000)]}],
        "arguments nested far": [{"role": "assistant", "tool_calls": [_call('{"a":' * 990 + "1" + "}" * 990)]}],
        "reasoning a number": [{"role": "assistant", "content": "", "reasoning_content": 5}],
        "a role that is no text": [{**user, "role": 1}],
        "a bad one behind a good one": [user, {"role": "user", "content": {}}],
    }
    for name, value in messages.items():
        yield HostileCase(f"messages: {name}", CHAT, _chat(model, messages=value), says="messages")
    yield HostileCase("messages missing", CHAT, json.dumps({"model": model}).encode(), says="messages")
    body = _chat(model, chat_template_kwargs={"tokenize": True})
    yield HostileCase("template arguments that clash", CHAT, body, param="messages")


def _wrong_prompts(model: str, context_tokens: int, long_text: str) -> Iterator[HostileCase]:
    numbers = str(context_tokens)
    prompts: dict[str, Any] = {
        "empty": "",
        "an empty list": [],
        "a list with an empty one": [[]],
        "null": None,
        "a number": 5,
        "mixed kinds": ["hi", 5],
        "nested too far": [[[1]]],
        "fractions": [1.5],
        "booleans": [True, False],
        "negative ids": [-1],
        "ids beyond the vocabulary": [1, 10**8],
        "ids beyond 64 bits": [1, 2**70],
        "too many": ["a"] * 2049,
    }
    for name, value in prompts.items():
        yield HostileCase(f"prompt: {name}", COMPLETIONS, _completion(model, prompt=value), says="prompt")
    yield HostileCase("prompt beyond the context", COMPLETIONS, _completion(model, prompt=long_text), says=numbers)
    body = _chat(model, messages=[{"role": "user", "content": long_text}])
    yield HostileCase("chat beyond the context", CHAT, body, says=numbers)
    body = _completion(model, prompt="a b" * 2_000_000)
    yield HostileCase("6 MB of prompt", COMPLETIONS, body, says=numbers)
    body = _completion(model, max_tokens=context_tokens)
    yield HostileCase("answer beyond the context", COMPLETIONS, body, says=f"maximum context length is {numbers}")
    body = _completion(model, max_tokens=10**15)
    yield HostileCase("a huge answer", COMPLETIONS, body, says=numbers)
    body = _chat(model, max_tokens=None, messages=[{"role": "user", "content": long_text}], n=128)
    yield HostileCase("128 answers to too long a chat", CHAT, body, says=numbers)
    yield HostileCase("too many sequences", COMPLETIONS, _completion(model, prompt=["a"] * 100, n=100), param="n")


def _unsupported(model: str) -> Iterator[HostileCase]:
    chat: list[tuple[str, Any]] = [
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {}),
    ]
    for at, (name, value) in enumerate(chat):
        yield HostileCase(
            f"unsupported {name} #{at}", CHAT, _chat(model, **{name: value}), param=name, says="not supported"
        )
    yield HostileCase("unsupported suffix", COMPLETIONS, _completion(model, suffix="x"), 400, "suffix", "not supported")


def _routes(model: str) -> Iterator[HostileCase]:
    yield HostileCase("unknown route", "/v1/nothing", _completion(model), 404, says="unknown request url")
    yield HostileCase("a route for other models", "/v1/embeddings", _completion(model), 404, says="no embeddings")
    yield HostileCase("outside of v1", "/admin", b"", 404, says="unknown", method="GET")
    yield HostileCase("an unknown model's card", "/v1/models/gpt-17", b"", 404, says="does not exist", method="GET")
    yield HostileCase("wrong method", COMPLETIONS, b"", 405, says="GET", method="GET")
    yield HostileCase("deleting models", "/v1/models", b"", 405, says="DELETE", method="DELETE")
    yield HostileCase("dots in the path", "/v1/%2e%2e/health", b"", 404, method="GET")
