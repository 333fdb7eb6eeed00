"""Text that a client chooses does not stall the event loop: bounded before it is built, and worked on beside the loop.

Nothing here is timed: what is tested is where work is done, in which order, and that it is refused before it is done.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_world import CONTEXT_TOKENS, MODEL, SCRIPT_TEXT, TinyModel, says, serve, tiny_tokenizer
from fake_engine import FakeEngine
from memserve._core import json_shape
from memserve.api.http.errors import ApiError
from memserve.api.openai.documents import REPEATED_TOKENS_MAX, Document
from memserve.api.openai.interfaces import TokenNames
from memserve.api.openai.request import messages, prompts, schema
from memserve.api.openai.request.known_texts import longest_token_bytes
from memserve.api.openai.request.prompts import (
    INLINE_BYTES_MAX,
    SHORT_BYTES_MAX,
    Prompt,
    PromptEncoder,
    TextWorkers,
    calls_bounded,
)
from memserve.api.openai.request.schema import ChatBody, CompletionBody, parse_body
from memserve.api.openai.response import responders as respond

JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\,:[]{}東\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\:,[{東', max_size=5), inner),
    max_leaves=30,
)


def shape_twin(value: Any) -> tuple[int, int, int, int]:
    """Values, containers, depth and longest name; an empty container counts as if something were in it."""
    if not isinstance(value, (list, dict)):
        return 1, 0, 0, 0
    inner = [shape_twin(item) for item in (value.values() if isinstance(value, dict) else value)]
    names = (
        [len(json.dumps(name, ensure_ascii=False).encode()) - 2 for name in value] if isinstance(value, dict) else []
    )
    values, containers, depths, longest = zip(*inner, strict=True) if inner else ((1,), (0,), (0,), (0,))
    return 1 + sum(values), 1 + sum(containers), 1 + max(depths), max(*names, *longest, 0)


@given(JSON, st.sampled_from([None, 1]))
def test_the_shape_of_json_is_what_a_parser_builds(value: Any, indent: int | None) -> None:
    shape = json_shape(json.dumps(value, indent=indent, ensure_ascii=False).encode())
    assert (shape.values, shape.containers, shape.depth, shape.name_bytes) == shape_twin(value)


@given(st.binary(max_size=200) | st.text(alphabet='"\\[]{},:', max_size=100).map(str.encode))
def test_the_shape_of_anything_is_found(data: bytes) -> None:
    assert json_shape(data).containers <= len(data)


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "x", **fields}).encode()


def nested(depth: int) -> bytes:
    """A body with ``depth`` objects in one another."""
    return b'{"model":"x","metadata":' + b'{"a":' * (depth - 1) + b"1" + b"}" * depth


@pytest.mark.parametrize(
    ("body", "says_so"),
    [
        (nested(schema.DEPTH_MAX + 1), f"nested 65 deep; the limit is {schema.DEPTH_MAX}"),
        (completion(**{"a" * 1025: 1}), f"1025 bytes; the limit is {schema.NAME_BYTES_MAX}"),
        (
            completion(messages=[[]] * schema.CONTAINERS_MAX),
            f"arrays and objects; the limit is {schema.CONTAINERS_MAX}",
        ),
        (completion(prompt=[1] * schema.VALUES_MAX), f"values; the limit is {schema.VALUES_MAX}"),
    ],
)
def test_a_body_beyond_a_limit_is_refused_before_it_is_built(
    body: bytes, says_so: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: object, **options: object) -> None:
        raise AssertionError("the body was built")

    monkeypatch.setattr(schema.msgspec.json, "decode", build)
    with pytest.raises(ApiError) as refused:
        parse_body(body, CompletionBody)
    assert refused.value.status == 400 and says_so in refused.value.message


def test_body_within_limits_is_built() -> None:
    with pytest.raises(ApiError, match="expected `str`"):
        parse_body(nested(schema.DEPTH_MAX), CompletionBody)
    with pytest.raises(ApiError, match="Unknown field"):
        parse_body(completion(**{"a" * 1024: 1}), CompletionBody)
    ids = [7] * (schema.VALUES_MAX - 5)
    assert parse_body(completion(prompt=ids), CompletionBody).prompt == ids


def test_validation_error_does_not_scan_long_values() -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(completion(model="m" * 10_000_000), CompletionBody)
    assert refused.value.param == "model" and "4096" in refused.value.message
    with pytest.raises(ApiError) as refused:  # a name that nothing is near to
        parse_body(completion(**{"temperatur" * 100: 1}), CompletionBody)
    assert "did you mean" not in refused.value.message


# -- lines


def test_small_work_runs_inline_and_short_work_passes_long() -> None:
    async def main() -> None:
        workers, go_on, begun = TextWorkers(), threading.Event(), threading.Event()
        here = threading.current_thread()

        def long() -> str:
            begun.set()
            assert go_on.wait(20)
            return threading.current_thread().name

        assert await workers.run_work("a", INLINE_BYTES_MAX, threading.current_thread) is here
        first = [asyncio.create_task(workers.run_work("a", SHORT_BYTES_MAX + 1, long)) for _ in range(3)]
        await asyncio.to_thread(begun.wait, 20)
        short = await workers.run_work("b", SHORT_BYTES_MAX, threading.current_thread)  # while the long ones wait
        assert short is not here and not any(task.done() for task in first)
        go_on.set()
        assert len(set(await asyncio.gather(*first))) == 1, "one thread, however much is long"
        assert short.name not in {task.result() for task in first}
        workers.close()

    asyncio.run(main())


def test_of_a_burst_two_requests_begin_in_each_round_of_the_loop() -> None:
    """Another tenant's request is next but one, and what else the loop has to do is done in between."""

    async def main() -> list[str]:
        workers, order = TextWorkers(), list[str]()

        async def request(tenant: str) -> None:
            await workers.wait_turn(tenant)
            order.append(tenant)
            if tenant == "a" and order.count("a") == 1:
                asyncio.get_running_loop().call_soon(order.append, "another callback")

        await request("alone")
        burst = [asyncio.create_task(request("a")) for _ in range(5)]
        burst += [asyncio.create_task(request("b")), asyncio.create_task(request("left"))]
        await asyncio.sleep(0)
        burst[3].cancel()
        burst[-1].cancel()
        await asyncio.gather(*burst, return_exceptions=True)
        await request("alone")
        workers.close()
        return order

    order = asyncio.run(main())
    assert order[0] == order[-1] == "alone" and order.count("a") == 4 and "left" not in order
    assert order.index("b") <= 4 and order.index("another callback") <= 3, order


def test_of_a_long_burst_no_tenant_is_passed_over() -> None:
    async def main() -> list[str]:
        workers, order = TextWorkers(), list[str]()

        async def request(tenant: str) -> None:
            await workers.wait_turn(tenant)
            order.append(tenant)

        await asyncio.gather(*(request(tenant) for tenant in "aaaaaabbbbbbcccccc"))
        workers.close()
        return order

    order = asyncio.run(main())
    for end in range(3, 16, 3):
        counts = [order[:end].count(tenant) for tenant in "abc"]
        assert max(counts) - min(counts) <= 2, order


def test_text_workers_are_fair_to_tenants_after_cancellation() -> None:
    async def main() -> list[str]:
        workers, done, go_on, begun = TextWorkers(), [], threading.Event(), threading.Event()

        def work(name: str) -> Callable[[], None]:
            def run() -> None:
                begun.set()
                assert go_on.wait(20)
                done.append(name)

            return run

        def enter(tenant: str, name: str) -> asyncio.Task[None]:
            return asyncio.create_task(workers.run_work(tenant, SHORT_BYTES_MAX + 1, work(name)))

        tasks = [enter("a", f"a{at}") for at in range(4)]
        await asyncio.to_thread(begun.wait, 20)
        tasks += [enter("b", "b0"), enter("b", "b1"), enter("c", "c0")]
        await asyncio.sleep(0)
        tasks[2].cancel()  # a2, while it waits
        go_on.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks = [enter("a", "again")]
        await asyncio.gather(*tasks)
        assert not workers._long._waiting._lines and not workers._long._is_busy
        workers.close()
        return done

    assert asyncio.run(main()) == ["a0", "a1", "b0", "c0", "b1", "a3", "again"]


def test_error_frees_the_text_worker() -> None:
    async def main() -> None:
        workers = TextWorkers()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await workers.run_work("a", SHORT_BYTES_MAX, lambda: 1 // 0)
        assert await workers.run_work("a", SHORT_BYTES_MAX, lambda: 5) == 5
        workers.close()

    asyncio.run(main())


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LONG_BODIES: dict[str, tuple[str, Any]] = {
    "text": ("/v1/completions", {"model": MODEL, "prompt": "a" * SHORT_BYTES_MAX}),
    "ids": ("/v1/completions", {"model": MODEL, "prompt": [[5]] * 20_000}),
    "messages": ("/v1/chat/completions", {**CHAT, "messages": [[]] * 30_000}),
    "many messages": ("/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * 5_000}),
    "a field": ("/v1/chat/completions", {**CHAT, "f" * SHORT_BYTES_MAX: 1}),
    "kwargs": ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": [{}] * 30_000}}),
}


@pytest.mark.parametrize("name", LONG_BODIES)
def test_long_body_is_parsed_off_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def noting(module: Any, function: str) -> None:
        real = getattr(module, function)

        def noted(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return real(*args, **options)

        monkeypatch.setattr(module, function, noted)

    noting(schema, "json_shape")
    noting(schema.msgspec.json, "decode")
    noting(PromptEncoder, "_encode")
    noting(PromptEncoder, "_render_template")
    noting(messages, "_check_message")
    path, body = LONG_BODIES[name]
    with serve(FakeEngine(says("x"))) as world:
        httpx.post(f"{world.url}{path}", json=body, timeout=60)
    assert threads and all("texts" in thread for thread in threads)


# -- tokenizing


@given(
    st.lists(st.sampled_from(["The", " of", "hello", "<|end|>", "<|start|>", "é東😀", "\n\n", " ", "\u200d", "a"])),
    st.booleans(),
)
def test_long_and_short_texts_are_tokenized_alike(words: list[str], special: bool) -> None:
    """The call for long texts, which works without the GIL, and the one for short texts."""
    tokenizer, text = tiny_tokenizer().backend_tokenizer, "".join(words)
    (fast,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    slow = tokenizer.encode(text, add_special_tokens=special)
    assert fast.ids == slow.ids and len(fast) == len(slow.ids)


def test_other_threads_go_on_while_a_long_text_is_tokenized() -> None:
    """No thread is made to give up the interpreter here: another one goes on if the call itself lets it."""
    encoder = PromptEncoder(TinyModel(max_model_tokens=1_000_000))
    counted, stop, interval = [0], threading.Event(), sys.getswitchinterval()

    def count() -> None:
        while not stop.wait(0.0001):
            counted[0] += 1

    counter = threading.Thread(target=count)
    sys.setswitchinterval(1000)
    try:
        counter.start()
        before = counted[0]
        encoder._encode("hello of The " * 50_000, False)
        assert counted[0] > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        counter.join()
        encoder.close()


class _NoTokenizer:
    def encode_batch_fast(self, *args: object, **options: object) -> None:
        raise AssertionError("it was tokenized")

    encode = encode_batch_fast


def test_text_beyond_context_is_refused_without_tokenizing() -> None:
    encoder = PromptEncoder(TinyModel())
    longest = longest_token_bytes(tiny_tokenizer().backend_tokenizer)
    assert longest == len("<|start|>") == len("assistant")
    encoder._known_texts.tokenizer = _NoTokenizer()
    for text in ("a" * (CONTEXT_TOKENS * longest + 1), "東" * (CONTEXT_TOKENS * longest // 3 + 1)):
        with pytest.raises(ApiError, match="maximum context length"):
            encoder._encode(text, False)
    with pytest.raises(AssertionError):
        encoder._encode("a" * CONTEXT_TOKENS * longest, False)
    with pytest.raises(ApiError, match="maximum context length"):  # before it is looked at
        encoder._encode([2] * CONTEXT_TOKENS + ["no id"], False)
    encoder.close()


def test_a_long_text_of_too_many_tokens_ends_while_counted() -> None:
    """Where no length of a text says that it cannot fit: a tokenizer would take memory for every token first."""
    encoder = PromptEncoder(TinyModel())
    encoder._known_texts.token_bytes_max = None
    counted: list[int] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: object) -> list[list[int]]:
            counted.append(len(texts[0]))
            return [[0] * len(texts[0])]

    encoder._known_texts.tokenizer = Counting()
    with pytest.raises(ApiError, match=r"maximum context length.*more than 524288 tokens"):
        encoder._encode("a" * (8 << 20), False)
    assert counted == [1 << 18] * 3
    encoder.close()


def test_no_bound_is_claimed_where_a_token_may_be_any_length() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}

    def tokenizer(vocab: dict[str, int] = vocab) -> Tokenizer:
        made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        return made

    assert longest_token_bytes(tokenizer()) == 1
    named = tokenizer()
    named.add_special_tokens([AddedToken("<東>")])
    assert longest_token_bytes(named) == 5
    greedy = tokenizer()
    greedy.add_special_tokens([AddedToken("<a>", lstrip=True)])  # takes all spaces before it
    folded = tokenizer()
    folded.normalizer = normalizers.NFKC()
    removing = tokenizer()
    removing.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    lacking = tokenizer({char: at for at, char in enumerate(sorted(vocab)[1:])})  # a byte without a token is dropped
    for unbounded in (greedy, folded, removing, lacking):
        assert longest_token_bytes(unbounded) is None


# -- chat templates


def chat(**fields: Any) -> ChatBody:
    return parse_body(json.dumps({**CHAT, **fields}).encode(), ChatBody)


class Templated(TinyModel):
    """The tiny model with another chat template."""

    def __init__(self, template: str) -> None:
        super().__init__()
        object.__setattr__(self, "_template", template)

    @property
    def tokenizer(self) -> Any:
        class Tokenizer:
            backend_tokenizer = tiny_tokenizer().backend_tokenizer
            chat_template = self._template

            def apply_chat_template(self, *args: Any, **options: Any) -> Any:
                return tiny_tokenizer().apply_chat_template(*args, **{**options, "chat_template": self.chat_template})

        return Tokenizer()


def refusal(template: str, **fields: Any) -> str:
    encoder = PromptEncoder(Templated(template))
    try:
        with pytest.raises(ApiError) as refused:
            encoder.chat_prompt(chat(**fields), [{"role": "user", "content": "hi"}])
    finally:
        encoder.close()
    assert refused.value.status == 400 and refused.value.param == "messages"
    return refused.value.message


def test_whatever_a_template_raises_is_one_line_of_400() -> None:
    assert "cannot" in refusal("{{ raise_exception('cannot\nsay\nthat') }}")
    assert "\n" not in refusal("{{ raise_exception('cannot\nsay\nthat') }}")
    assert "division" in refusal("{{ 1 / 0 }}")
    assert "multiple values" in refusal("{{ messages }}", chat_template_kwargs={"tokenize": True})
    assert len(refusal("{{ raise_exception(x) }}", chat_template_kwargs={"x": "y" * 5000})) < 300


def test_a_template_that_loops_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TEMPLATE_CALLS_MAX", 10_000)
    loop = "{% for a in range(x) %}{% for b in range(x) %}{{ messages[0]['role'] }}{% endfor %}{% endfor %}"
    assert "too long" in refusal(loop, chat_template_kwargs={"x": 99_999})
    assert sys.getprofile() is None
    assert calls_bounded(10, lambda: len("abc")) == 3


def test_a_deep_value_for_a_template_is_400_over_http() -> None:
    with serve(FakeEngine(says("x"))) as world:
        kwargs: Any = 1
        for _ in range(500):
            kwargs = {"a": kwargs}
        answer = httpx.post(f"{world.url}/v1/chat/completions", json={**CHAT, "chat_template_kwargs": kwargs})
    assert answer.status_code == 400 and "nested 501 deep" in answer.json()["error"]["message"]


def test_a_document_is_not_multiplied_without_bound() -> None:
    tokens = np.zeros(1024, np.int32)
    document = Document("d", "completions", [], Prompt(tokens), tokens, 0, 1.0)
    most = REPEATED_TOKENS_MAX // 1024
    assert len(document.before_prompts([Prompt(tokens[:1])] * most)) == most
    with pytest.raises(ApiError, match=f"the limit is {most}"):
        document.before_prompts([Prompt(tokens[:1])] * (most + 1))


# -- answers


def test_others_go_on_while_a_long_answer_is_written() -> None:
    async def main() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task, parts = asyncio.create_task(other()), []
        await respond.in_slices((b"x" if at % 2 else b"" for at in range(10 * respond.SLICE_PIECES)), parts)
        task.cancel()
        assert turns >= 10 and parts == [b"x"] * (5 * respond.SLICE_PIECES)

    asyncio.run(main())


LOGPROBS = {"logprobs": 5, "echo": True, "max_tokens": 40, "ignore_eos": True, "n": 3, "prompt": "hello of The " * 10}
CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 5, "max_tokens": 40, "ignore_eos": True, "n": 3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"model": MODEL, **LOGPROBS}, {**CHAT, **CHAT_LOGPROBS}], ids=["completions", "chat"])
def test_between_two_pauses_one_token_is_written(
    stream: bool, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens, alternatives and choices: a piece of the answer names the alternatives of one token."""
    named, most, pauses = 0, 0, 0
    name, in_slices = TokenNames.name, respond.in_slices

    def counting(self: TokenNames, token: int) -> Any:
        nonlocal named
        named += 1
        return name(self, token)

    async def watched(pieces: Any, parts: list[bytes]) -> None:
        def watch() -> Any:
            nonlocal named, most, pauses
            for piece in pieces:
                most, named, pauses = max(most, named), 0, pauses + 1
                yield piece

        await in_slices(watch(), parts)

    monkeypatch.setattr(TokenNames, "name", counting)
    monkeypatch.setattr(respond, "in_slices", watched)
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        answer = httpx.post(f"{world.url}{path}", json={**body, "stream": stream}, timeout=30)
    assert answer.status_code == 200
    assert 6 <= most <= 8, "a token, its five alternatives, and itself among them"
    assert pauses > 3 * 40
