"""Texts tokenized piece by piece: the ids are those of the whole text, and what is kept is bounded and owned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from api_world import TinyModel, tiny_tokenizer
from memserve.api.openai.request.prompts import KnownTexts, PromptEncoder, cuts_of
from memserve.api.openai.request.schema import ChatBody

SPECIAL = ("<|end|>", "<|start|>", "<|end|>!", "<|", "\n\n", "é|>")
"""Some begin another, some overlap with another."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MINE = ("tenant", "")


def byte_level(**options: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def tokenizer_of(
    before: pre_tokenizers.PreTokenizer,
    special: Sequence[str | AddedToken] = SPECIAL,
    **model_options: Any,
) -> Tokenizer:
    """The merges of the small tokenizer behind other steps."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    fresh = Tokenizer(models.BPE(vocab=vocab, merges=merges, **model_options))
    fresh.pre_tokenizer, fresh.decoder = before, decoders.ByteLevel()
    fresh.add_special_tokens([AddedToken(t, normalized=False) if isinstance(t, str) else t for t in special])
    return fresh


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(use_regex=False)]
    return pre_tokenizers.Sequence(parts)


EXACT: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: tokenizer_of(byte_level()),
    "split": lambda: tokenizer_of(split(LLAMA3)),
    "digits": lambda: tokenizer_of(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()])),
    "the tests' own": lambda: tiny_tokenizer().backend_tokenizer,
}
KNOWN = {name: KnownTexts(make(), bytes_max=20_000) for name, make in EXACT.items()}
"""Kept from example to example, with room for few pieces: some are known, others were dropped."""

texts = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, " ", "\n", "hello", " hello", "The capital", "12345", "'s", "東京", "😀", "Grüße"]),
        st.text(max_size=6),
    ),
    max_size=24,
).map("".join)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=300, deadline=None)
@given(text=texts)
@example("<|end|>!<|end|>!!")
@example("a<|<|end|>é|>|>\n\n\n")
@example(" <|end|> ")
def test_the_ids_are_those_of_the_whole_text(name: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    known = KNOWN[name]
    plain = known.tokenizer.encode(text, add_special_tokens=False).ids
    for _ in range(2):  # the second time the pieces are known
        pieces = known.tokenize_text(text, MINE)
        assert pieces is None or np.concatenate(pieces).tolist() == plain
        if pieces is None:
            assert not any(token.content in text for token in known.tokenizer.get_added_tokens_decoder().values())
    assert known.cached_bytes <= 20_000


REFUSED: dict[str, Callable[[], Tokenizer]] = {
    "prefix space": lambda: tokenizer_of(byte_level(add_prefix_space=True)),
    "metaspace": lambda: tokenizer_of(pre_tokenizers.Metaspace()),
    "no step before": lambda: Tokenizer(models.BPE()),
    "whitespace": lambda: tokenizer_of(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), byte_level()])),
    "takes space": lambda: tokenizer_of(byte_level(), [AddedToken("<|end|>", lstrip=True, normalized=False)]),
    "a word": lambda: tokenizer_of(byte_level(), [AddedToken("<|end|>", single_word=True, normalized=False)]),
    "normalized": lambda: tokenizer_of(byte_level(), [AddedToken("<|end|>", normalized=True)]),
    "drawn merges": lambda: tokenizer_of(byte_level(), dropout=0.5),
    "nothing added": lambda: tokenizer_of(byte_level(), []),
    "normalizer": lambda: with_normalizer(tokenizer_of(byte_level())),
}


def with_normalizer(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizers_that_may_look_across_pieces_are_left_alone(name: str) -> None:
    tokenizer = REFUSED[name]()
    assert cuts_of(tokenizer) is None
    assert KnownTexts(tokenizer).tokenize_text("hello<|end|>hello", MINE) is None


class Watched:
    """A tokenizer, and the texts that it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.given: list[str] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.given += texts
        return self.tokenizer.encode_batch_fast(texts, **options)


def watched(bytes_max: int = 1 << 20) -> tuple[KnownTexts, Watched]:
    known = KnownTexts(tiny_tokenizer().backend_tokenizer, bytes_max)
    known.tokenizer = watch = Watched(known.tokenizer)
    return known, watch


def test_a_next_turn_is_all_that_is_tokenized() -> None:
    known, watch = watched()
    first = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    known.tokenize_text(first, MINE)
    watch.given.clear()
    known.tokenize_text(f"{first}hello<|end|>\n<|start|>user\nmore<|end|>\n<|start|>assistant\n", MINE)
    assert watch.given == ["assistant\nhello<|end|>", "user\nmore<|end|>", "assistant\n"]


@pytest.mark.parametrize("other", [("another tenant", ""), ("tenant", "a salt")])
def test_text_cache_is_not_shared_between_owners(other: tuple[str, str]) -> None:
    known, watch = watched()
    known.tokenize_text("hi<|end|>", MINE)
    watch.given.clear()
    known.tokenize_text("hi<|end|>", other)
    assert watch.given == ["hi<|end|>", ""]
    watch.given.clear()
    known.tokenize_text("hi<|end|>", MINE)
    assert watch.given == [""]


def test_text_cache_is_bounded_and_skips_large_pieces() -> None:
    known, watch = watched(bytes_max=2000)
    known.tokenize_text("hi<|end|>", MINE)
    known.tokenize_text("x" * 2000 + "<|end|>", MINE)
    watch.given.clear()
    known.tokenize_text("hi<|end|>", MINE)
    assert watch.given == [""], "the large piece has taken no other's place"
    for n in range(100):
        known.tokenize_text(f"{n}<|end|>", MINE)
        assert 0 < known.cached_bytes <= 2000
    known.tokenize_text("hi<|end|>", MINE)
    assert "hi<|end|>" in watch.given


def test_chats_have_the_same_prompts_with_earlier_turns_known() -> None:
    fresh, encoder = PromptEncoder(TinyModel()), PromptEncoder(TinyModel())
    try:
        messages: list[dict[str, Any]] = []
        for turn in range(4):
            messages += [{"role": "user", "content": f"hello {turn}"}]
            body = ChatBody(model="m")
            prompt = encoder.chat_prompt(body, messages, "tenant")
            text = encoder.chat_text(body, messages)
            assert prompt.tokens.dtype == np.int32
            assert prompt.tokens.tolist() == fresh.token_ids(text, add_special_tokens=False)
            messages += [{"role": "assistant", "content": "The capital"}]
    finally:
        fresh.close()
        encoder.close()
