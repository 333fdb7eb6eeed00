"""Tokens to text: equal to decoding the whole, wherever tokens break characters and stop strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_world import EOS, SCRIPT_TEXT, encode, tiny_tokenizer
from memserve._core import StopFinder, StopStrings
from memserve.api.openai.response.detokenizer import PENDING_TOKENS_MAX, Detokenizer, Stops, TextStream
from memserve.base.types import FinishReason, TokenOutput

TOKENIZER = tiny_tokenizer().backend_tokenizer
VOCAB = TOKENIZER.get_vocab_size()
TEXTS = st.text(alphabet=st.sampled_from("ab cé東😀\n"), max_size=30)


def simple_stop(text: str, stops: list[str]) -> str | None:
    """The twin: read character by character; at the first end of a stop string cut where the longest one began."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


STOPS = st.lists(st.text(alphabet="abé東", min_size=1, max_size=5), max_size=5)


@st.composite
def overlapping_stops(draw: st.DrawFn) -> list[str]:
    """Stop strings that are beginnings, ends, repetitions and pieces of one another."""
    stops = draw(STOPS)
    for _ in range(draw(st.integers(0, 4)) if stops else 0):
        whole = draw(st.sampled_from(stops)) * draw(st.integers(1, 3))
        first = draw(st.integers(0, len(whole) - 1))
        stops.append(whole[first : draw(st.integers(first + 1, len(whole)))])
    return stops


@given(st.text(alphabet="abé東", max_size=40), overlapping_stops(), st.lists(st.integers(0, 99)))
def test_stop_finder_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopFinder(StopStrings(stops))
    shown = ""
    for piece in pieces(text, cuts):
        shown += finder.push(piece) + finder.push("")
        assert simple_stop(text, stops) is not None or text.startswith(shown)
    held = finder.finish()
    expected = simple_stop(text, stops)
    assert finder.found == (expected is not None)
    assert shown + held == (text if expected is None else expected)
    assert finder.push("more") == ("" if finder.found else "more")
    if not finder.found:  # what is held is the longest end that begins a stop string, and no character more
        ends = [text[at:] for at in range(len(text) + 1)]
        assert held == next(end for end in ends if not end or any(stop.startswith(end) for stop in stops))


@given(st.text(alphabet="abc", max_size=40), overlapping_stops(), st.integers(0, 40), st.lists(st.integers(1, 5)))
def test_stop_strings_begin_after_the_first_tokens(text: str, stops: list[str], first: int, cuts: list[int]) -> None:
    """Whatever ``min_tokens`` is: text of the first tokens is shown, and begins no stop string."""
    stops = [stop for stop in stops if stop.isascii()] or ["ab"]
    stream = TextStream(TOKENIZER, stops=Stops(stops), min_tokens=first)
    shown, tokens = "", encode(text)
    assert len(tokens) == len(text)
    for size in [*cuts, *[1] * len(tokens)]:
        now, tokens = tokens[:size], tokens[size:]
        shown += stream.push_output(TokenOutput("r", 0, tuple(now))).text
    shown += stream.push_output(TokenOutput("r", 0, (), finish_reason=FinishReason.LENGTH)).text
    expected = simple_stop(text[first:], stops)
    assert shown == (text if expected is None else text[:first] + expected)
    assert (stream.finish_reason is FinishReason.STOP) == (expected is not None)
    if expected is None:
        assert stream.stop_string is None
    else:  # the first that ends there begins where the text was cut
        rest = text[first + len(expected) :]
        assert stream.stop_string == min((stop for stop in stops if rest.startswith(stop)), key=len)


@pytest.mark.parametrize("text", ["a" * 5000, "ab" * 2500, "a" * 998 + "c" * 4002])
@pytest.mark.parametrize("count", [1, 20])
def test_the_cost_of_text_does_not_depend_on_the_stop_strings(text: str, count: int) -> None:
    """The worst of stop strings: long, alike, and nearly there all the time."""
    stops = StopStrings(["a" * 998 + chr(ord("d") + at) for at in range(count)])
    assert len(stops) == 999 + count
    finder = StopFinder(stops)
    before = 0
    for character in text:
        finder.push(character)
        before, fresh = finder.steps, finder.steps - before
        assert fresh <= 1000  # of one character: what may have been saved up
    assert finder.steps <= 2 * len(text)


def test_a_stop_string_that_no_text_can_hold_never_matches() -> None:
    finder = StopFinder(StopStrings(["\ud800", "b"]))
    assert finder.push("a東b") == "a東" and finder.found
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_stop_automaton_is_lazy_and_shared_by_sequences() -> None:
    stops = Stops(["Paris"])
    streams = [TextStream(TOKENIZER, stops=stops) for _ in range(64)]
    assert stops._automaton is None
    for stream in streams:
        assert "".join(feed(stream, encode(SCRIPT_TEXT))) == SCRIPT_TEXT.split("Paris")[0]
    automaton = stops._automaton
    assert automaton is not None and stops.new_finder() is not stops.new_finder() and stops._automaton is automaton
    assert Stops([]).new_finder() is None


def test_stop_finder_shows_text_as_soon_as_it_is_no_stop_string() -> None:
    finder = StopFinder(StopStrings(["END"]))
    assert [finder.push(piece) for piece in ("a E", "N", "x", "E", "ND tail", "more")] == ["a ", "", "ENx", "", "", ""]
    assert finder.found


@given(TEXTS)
def test_detokenizer_equals_decoding_the_whole(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    shown = "".join(detokenizer.push_token(token) for token in encode(text)) + detokenizer.flush_text()
    assert shown == text


@given(st.lists(st.integers(0, VOCAB - 1), max_size=60))
def test_detokenizer_emits_whole_characters_and_loses_nothing(tokens: list[int]) -> None:
    """Any tokens, also bytes that are no UTF-8: what is shown agrees with the whole but for replacement marks."""
    detokenizer = Detokenizer(TOKENIZER)
    shown = "".join(detokenizer.push_token(token) for token in tokens) + detokenizer.flush_text()
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert shown.replace("\ufffd", "") == whole.replace("\ufffd", "") or "\ufffd" in shown
    if "\ufffd" not in whole:
        assert shown == whole


def test_detokenizer_does_not_hoard_invalid_bytes() -> None:
    lone = TOKENIZER.token_to_id("ł")  # byte 0xff stands behind no character
    detokenizer = Detokenizer(TOKENIZER)
    assert TOKENIZER.decode([lone]) == "\ufffd"
    shown = "".join(detokenizer.push_token(lone) for _ in range(1000))
    assert len(shown) >= 1000 - PENDING_TOKENS_MAX - 1
    assert len(shown + detokenizer.flush_text()) == 1000


def test_hidden_tokens_cost_nothing_and_show_on_request() -> None:
    hidden, visible = Detokenizer(TOKENIZER), Detokenizer(TOKENIZER, skip_special_tokens=False)
    tokens = [*encode("a"), EOS, *encode("b")]
    assert "".join(map(hidden.push_token, tokens)) == "ab"
    assert "".join(map(visible.push_token, tokens)) == "a<|end|>b"
    for _ in range(10_000):
        hidden.push_token(EOS)
    assert not hidden._pending


def feed(stream: TextStream, tokens: list[int], finish: FinishReason = FinishReason.LENGTH) -> list[str]:
    deltas = []
    for at, token in enumerate(tokens):
        last = at == len(tokens) - 1
        deltas.append(stream.push_output(TokenOutput("r", 0, (token,), finish_reason=finish if last else None)))
    return [delta.text for delta in deltas]


@pytest.mark.parametrize("stop", ["France", "is P", "東京", "😀", "e aus", "ü", "!", "The"])
def test_text_stream_stops_before_the_stop_string(stop: str) -> None:
    stream = TextStream(TOKENIZER, stops=Stops([stop]))
    tokens = encode(SCRIPT_TEXT)
    shown, stopped_at = "", None
    for at, token in enumerate(tokens):
        delta = stream.push_output(TokenOutput("r", 0, (token,)))
        shown += delta.text
        if delta.stop_found:
            assert stopped_at is None
            stopped_at = at
    assert shown == SCRIPT_TEXT.split(stop)[0]
    assert stopped_at is not None and stream.finish_reason is FinishReason.STOP
    assert stop in TOKENIZER.decode(tokens[: stopped_at + 1]) and stop not in TOKENIZER.decode(tokens[:stopped_at])


def test_every_token_is_shown_once_and_only_before_the_stop() -> None:
    stream = TextStream(TOKENIZER, stops=Stops(["Paris"]))
    shown = sum(stream.push_output(TokenOutput("r", 0, (token,))).tokens_shown for token in encode(SCRIPT_TEXT))
    assert TOKENIZER.decode(stream.tokens[:shown]) == SCRIPT_TEXT.split("Paris")[0]


def test_a_stop_token_is_no_text() -> None:
    comma = encode("x")[-1]
    stream = TextStream(TOKENIZER, stop_token_ids=[comma])
    assert "".join(feed(stream, [*encode("ab"), comma], FinishReason.STOP)) == "ab"
    again = TextStream(TOKENIZER, stop_token_ids=[comma])
    assert "".join(feed(again, [*encode("ab"), comma], FinishReason.LENGTH)) == "abx"


def test_min_tokens_hides_stop_strings() -> None:
    stream = TextStream(TOKENIZER, stops=Stops(["a"]), min_tokens=2)
    a = encode("a")[0]
    assert "".join(feed(stream, [a, a, a, a])) == "aa"
    assert len(stream.tokens) == 3


def test_an_unfinished_character_shows_at_the_end() -> None:
    stream = TextStream(TOKENIZER)
    tokens = encode("a😀")[:-1]
    assert len(encode("😀")) > 1
    texts = feed(stream, tokens)
    assert texts[0] == "a" and texts[-1].endswith("\ufffd")


@pytest.mark.parametrize(("first", "reason"), [(50, FinishReason.LENGTH), (0, FinishReason.STOP)])
def test_min_tokens_cover_an_unfinished_character(first: int, reason: FinishReason) -> None:
    stream = TextStream(TOKENIZER, stops=Stops(["\ufffd"]), min_tokens=first)
    texts = feed(stream, encode("a😀")[:-1])
    assert stream.finish_reason is reason
    assert "".join(texts).endswith("\ufffd") == (first > 0)


def test_several_tokens_at_once_and_nothing_after_the_stop() -> None:
    stream = TextStream(TOKENIZER, stops=Stops(["is"]))
    delta = stream.push_output(TokenOutput("r", 0, tuple(encode(SCRIPT_TEXT)), finish_reason=FinishReason.LENGTH))
    assert delta.text == "The capital of France " and not delta.stop_found
    assert delta.finish_reason is FinishReason.STOP
    assert stream.push_output(TokenOutput("r", 0, (1,))).text == ""


def test_detokenizer_starts_anew_when_the_library_gives_up() -> None:
    """Some decoders change earlier text under a later token; tokenizers then raises instead of answering."""

    class Fails:
        def step(self, tokenizer: object, token: int) -> str:
            raise Exception("Invalid prefix encountered while decoding stream.")

    detokenizer = Detokenizer(TOKENIZER)
    tokens = encode(SCRIPT_TEXT)
    shown = "".join(map(detokenizer.push_token, tokens[:3]))
    detokenizer._stream = Fails()
    shown += "".join(map(detokenizer.push_token, tokens[3:])) + detokenizer.flush_text()
    assert shown == SCRIPT_TEXT
