"""Texts tokenized piece by piece: the ids are those of the whole text, and what is kept is bounded and owned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from api_world import TinyModel, tiny_tokenizer
from memserve.api.openai.request.known_texts import PIECE_CHARS, KnownTexts, cuts_of, frame_of, joints_of
from memserve.api.openai.request.prompts import PromptEncoder
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


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def split_by_matches(pattern: str) -> pre_tokenizers.PreTokenizer:
    """As tokenizers are that were made for another library."""
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "removed", True), byte_level(use_regex=False)])


def split_thrice() -> pre_tokenizers.PreTokenizer:
    patterns = (r"\p{N}{1,3}", KANA, DEEPSEEK)
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, byte_level(use_regex=False)])


REAL = [path.read_text() for path in sorted((Path(__file__).parents[3] / "docs").rglob("*.md"))[:12]]


@cache
def trained(pattern: str) -> Tokenizer:
    """With merges of real texts, so that most words are few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split(pattern), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(REAL, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


EXACT: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: tokenizer_of(byte_level()),
    "split": lambda: tokenizer_of(split(LLAMA3)),
    "one digit": lambda: tokenizer_of(split(LLAMA3.replace("{1,3}", ""))),
    "by matches": lambda: tokenizer_of(split_by_matches(O200K)),
    "split thrice": lambda: tokenizer_of(split_thrice()),
    "digits": lambda: tokenizer_of(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()])),
    "trained": lambda: trained(LLAMA3),
    "trained by matches": lambda: trained(O200K),
    "the tests' own": lambda: tiny_tokenizer().backend_tokenizer,
}
KNOWN = {name: KnownTexts(make(), bytes_max=9_000) for name, make in EXACT.items()}
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
    assert known.cached_bytes <= 9_000


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


# -- joints

ODD = (
    *SPECIAL, " ", "  ", "\n", " \n", "\r\n", "\t", "\u00a0", "a", "b c", "Ab c", "don't", "I'LL ", "'re ", "x' ",
    "_a b", "!a b", "12345", " 7", "東京", "你好\uff0c世界。", "\uff0c", "。 ", "😀 ", "Grüße", "a\u0301 b", "\u017f b",
    "\ufb01 b", "\u200d",
)  # fmt: skip


def odd_text(chance: Random) -> str:
    """A piece of a real text with odd things in it, or odd things alone."""
    if chance.random() < 0.5:
        return "".join(chance.choices(ODD, k=chance.randrange(1, 40)))
    page = chance.choice(REAL)
    begin = chance.randrange(len(page))
    text = page[begin : begin + chance.randrange(20, 500)]
    for _ in range(chance.randrange(5)):
        place = chance.randrange(len(text) + 1)
        text = text[:place] + chance.choice(ODD) + text[place:]
    return text


@pytest.mark.parametrize("name", EXACT)
def test_both_sides_of_any_joint_are_tokenized_as_in_the_whole(name: str) -> None:
    tokenizer, chance, joints_seen = EXACT[name](), Random(name), 0
    joints = joints_of(tokenizer)
    assert joints is not None
    for _ in range(150):
        text = odd_text(chance)
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        for joint in joints.finditer(text):
            sides = [text[: joint.start()], text[joint.start() :]]
            joints_seen += 1
            assert [id for side in sides for id in tokenizer.encode(side, add_special_tokens=False).ids] == whole
    assert joints_seen > 1000


@pytest.mark.parametrize("name", EXACT)
def test_texts_that_go_on_have_the_ids_of_whole_texts(name: str) -> None:
    """Each begins as an earlier one did, up to anywhere."""
    known, chance, text, known_count = KnownTexts(EXACT[name]()), Random(name), "", 0
    for _ in range(40):
        text = text[: chance.randrange(len(text) + 1)] + "".join(odd_text(chance) for _ in range(8))
        pieces = known.find_pieces(text, MINE)
        assert pieces is not None and "".join(pieces.texts) == text
        known_count += len(text) - pieces.unknown_chars
        ids = np.concatenate(known.complete_pieces(pieces)).tolist()
        assert ids == known.tokenizer.encode(text, add_special_tokens=False).ids
        again = known.find_pieces(text, MINE)
        assert again is not None and again.unknown_chars == len(again.texts[-1])
    assert known_count > 0


def test_long_text_without_added_tokens_is_known_up_to_its_end() -> None:
    known, watch = watched()
    text = "hello of The capital " * 100
    known.tokenize_text(text, MINE)
    watch.given.clear()
    known.tokenize_text(text + "and more", MINE)
    assert len(watch.given) == 1 and watch.given[0].endswith("and more") and len(watch.given[0]) < 2 * PIECE_CHARS
    assert known.find_pieces(text, ("another tenant", "")).texts == known.find_pieces(text, MINE).texts
    assert known.find_pieces(text, ("another tenant", "")).unknown_chars == len(text)


WITHOUT_JOINTS: dict[str, Callable[[], Tokenizer]] = {
    "two words": lambda: tokenizer_of(split(LLAMA3 + r"|\p{L}+ \p{L}+")),
    "no words": lambda: tokenizer_of(split(r"\p{N}{1,3}")),
    "at spaces": lambda: tokenizer_of(pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), byte_level()])),
    "space before": lambda: tokenizer_of(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "merged_with_next"), byte_level(use_regex=False)])
    ),
    "no regular expression": lambda: tokenizer_of(byte_level(use_regex=False)),
    "token of two words": lambda: tokenizer_of(byte_level(), ["<|end|>", "end of"]),
}


@pytest.mark.parametrize("name", WITHOUT_JOINTS)
def test_no_joint_is_taken_where_words_may_go_on(name: str) -> None:
    tokenizer = WITHOUT_JOINTS[name]()
    assert joints_of(tokenizer) is None
    assert KnownTexts(tokenizer).find_pieces("hello of The capital " * 100, MINE) is None


# -- what stands around a text


def framed(single: str | None) -> Tokenizer:
    tokenizer = tokenizer_of(byte_level())
    if single is not None:
        ids = [(token, tokenizer.token_to_id(token)) for token in ("<|start|>", "<|end|>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


@pytest.mark.parametrize("single", [None, "$A", "<|start|> $A", "<|start|> $A <|end|>", "<|start|> <|start|> $A"])
def test_completions_have_special_tokens_around_known_texts(single: str | None) -> None:
    encoder = PromptEncoder(TinyModel())
    encoder._known_texts = KnownTexts(framed(single))
    try:
        for text in ("hello", "hello of The " * 15, "hello of The " * 15 + "capital", "<|end|>hello"):
            for adds in (True, False):
                whole = encoder._known_texts.tokenizer.encode(text, add_special_tokens=adds).ids
                for _ in range(2):
                    pieces = encoder.find_pieces(text, MINE)
                    (prompt,) = encoder.completion_prompts(
                        text, add_special_tokens=adds, echo=False, owner=MINE, pieces=pieces
                    )
                    assert prompt.tokens.tolist() == whole and prompt.tokens.dtype == np.int32
    finally:
        encoder.close()


def test_text_repeated_in_its_frame_is_not_known() -> None:
    assert frame_of(framed("$A <|end|> $A")) is None


# -- what is kept


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
