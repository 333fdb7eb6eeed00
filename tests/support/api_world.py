"""A served world for tests of the edges: a small real tokenizer, a fake engine, a real server on a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fake_engine import FakeEngine, Script
from memserve.api.app import create_app
from memserve.api.http.server import Server, bind
from memserve.api.http.tls import Tls
from memserve.base.types import NO_REGIMES, Pooling, PositionRegimes

MODEL = "tiny/test-model"
CONTEXT_TOKENS = 256
SCRIPT_TEXT = "The capital of France is Paris. Grüße aus 東京 😀!"

_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse me' %}{{ raise_exception('cannot say that') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


_WORDS = ["The", "Ġof", "Ġis", "Ġcap", "Ġhello", "hello", "ance", "user", "assistant", "Grü"]
"""Merged from left to right, written with the stand-ins for bytes. Everything else stays single bytes."""

_PIECES = ["Ġæ", "Ŀ±ä", "º¬", "ðŁ"]
"""Bytes merged across the borders of the characters of " 東京 😀"."""


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with few merges, so that many characters take several tokens."""
    vocab = {"<|end|>": 0, "<|start|>": 1}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    merges = []
    for word in (*(word.replace("ü", "Ã¼") for word in _WORDS), *_PIECES):
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                merges.append((word[:end], word[end]))
                vocab[word[: end + 1]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|start|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = _TEMPLATE
    return fast


def encode(text: str) -> list[int]:
    return list(tiny_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids)


EOS = tiny_tokenizer().backend_tokenizer.token_to_id("<|end|>")


def says(text: str) -> Script:
    """A script: every sequence says ``text`` and ends."""
    tokens = [*encode(text), EOS]
    return lambda request, index: tokens


@dataclass(frozen=True)
class TinyModel:
    """What the API needs to know of a model."""

    name: str = MODEL
    max_model_tokens: int = CONTEXT_TOKENS
    vocab_size: int = field(default_factory=lambda: tiny_tokenizer().backend_tokenizer.get_vocab_size())
    eos_token_ids: tuple[int, ...] = (EOS,)
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    context_note: str = ""
    default_max_tokens: int | None = None
    kv_tokens: int = 4 * CONTEXT_TOKENS
    kv_dtype: str = "auto"
    kv_lower_dtype: str = "auto"
    quantization: str = "none"
    activation_bits: int = 0
    position_regimes: PositionRegimes = NO_REGIMES
    pooling: Pooling | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tiny_tokenizer()


@dataclass
class World:
    """A running server."""

    engine: FakeEngine
    server: Server
    url: str
    thread: threading.Thread

    def client(self, key: str = "unused", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30, **options)


@contextmanager
def running_server(
    engine: Any, model: Any, *, drain_s: float = 5.0, tls: Tls | None = None, port: int = 0, **options: Any
) -> Iterator[World]:
    """A real uvicorn in a thread, on a free port if none is named; afterwards it is drained and no call may be left
    open."""
    sock = bind("127.0.0.1", port)
    port = sock.getsockname()[1]
    ready = threading.Event()
    server = Server(create_app(engine, model, **options), drain_s=drain_s, on_ready=ready.set, tls=tls)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield World(engine, server, f"http{'s' if tls else ''}://127.0.0.1:{port}", thread)
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
    assert server._hub.calls_open == 0


@contextmanager
def serve(engine: FakeEngine, **options: Any) -> Iterator[World]:
    """A server in front of a fake engine; afterwards nothing may be left in the engine."""
    try:
        with running_server(engine, TinyModel(), **options) as world:
            yield world
        assert engine.wait_until(lambda: engine.requests_outstanding == 0), "requests were left in the engine"
    finally:
        engine.close()
