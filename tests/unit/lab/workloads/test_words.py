"""Tokens, prefixes and recorded requests of workloads, each held against something simpler."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.base.errors import InvariantError
from memserve_lab.workloads import builtin
from memserve_lab.workloads.records import Blocks, History, Session, Span, Text, Turn, Workload
from memserve_lab.workloads.sessions import chat_workload
from memserve_lab.workloads.statistics import PrefixTree, measure, spread, spread_of, summarize
from memserve_lab.workloads.tokens import (
    ByteMeter,
    TokenizerMeter,
    as_blocks,
    blocks_from_ids,
    blocks_said,
    runs_of,
    tokens_of,
    unrolled,
)

VOCAB = 49152
ids = st.lists(st.integers(0, 12), max_size=12)


def trace_of(prompts: list[list[int]], block_tokens: int = 4) -> Workload:
    """One session a prompt, all blocks full."""
    sessions = tuple(
        Session(
            f"s{n}",
            (Turn(blocks_from_ids(p, tokens=len(p) * block_tokens, block_tokens=block_tokens), 1),),
            history=History.GIVEN,
        )
        for n, p in enumerate(prompts)
    )
    return Workload("test", "test", sessions)


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix: the twin of the tree's one comparison."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(ids, max_size=12))
def test_the_prefix_tree_finds_the_longest_prefix_of_all_before(prompts: list[list[int]]) -> None:
    tree = PrefixTree()
    for n, prompt in enumerate(prompts):
        expected = max((common(prompt, earlier) for earlier in prompts[:n]), default=0)
        assert tree.match_then_insert(runs_of(prompt)) == expected


@given(ids)
def test_runs_are_a_short_form_of_a_list(prompt: list[int]) -> None:
    runs = list(runs_of(prompt))
    assert [block for first, count in runs for block in range(first, first + count)] == prompt
    assert all(a + count != b for (a, count), (b, _) in pairwise(runs)), "runs are as long as can be"


@given(ids.filter(len), st.integers(1, 4))
def test_blocks_keep_identities_and_length(prompt: list[int], missing: int) -> None:
    tokens = len(prompt) * 4 - missing + 1
    blocks = blocks_from_ids(prompt, tokens=tokens, block_tokens=4)
    assert list(blocks.ids()) == prompt
    assert blocks.tokens == tokens


@given(ids, ids, st.integers(0, 3))
def test_synthesised_tokens_have_the_prefixes_of_their_blocks(a: list[int], b: list[int], seed: int) -> None:
    x, y = (
        tokens_of(blocks_from_ids(p, tokens=len(p) * 4, block_tokens=4), vocab_size=VOCAB, seed=seed) for p in (a, b)
    )
    assert len(x) == len(a) * 4
    assert x.dtype == np.int32 and (len(x) == 0 or (x.min() >= VOCAB // 100 and x.max() < VOCAB))
    assert common(x.tolist(), y.tolist()) // 4 == common(a, b)


def test_another_seed_makes_other_tokens() -> None:
    blocks = Blocks(16, (Span(3, 64),))
    assert (tokens_of(blocks, vocab_size=VOCAB, seed=1) != tokens_of(blocks, vocab_size=VOCAB, seed=2)).mean() > 0.9


@given(st.lists(ids, max_size=8))
def test_the_same_prompts_as_tokens_or_as_blocks_share_the_same(prompts: list[list[int]]) -> None:
    """Two ways to one figure: the trace's own identities, and identities found again in the synthesised tokens."""
    trace = trace_of([p for p in prompts if p])
    as_text = Workload(
        "test", "test", tuple(Session(s.session_id, s.turns, history=History.CLOSED) for s in trace.sessions)
    )
    direct, found_again = measure(trace), measure(as_text, block_tokens=4)
    assert direct.blocks.tolist() == found_again.blocks.tolist()
    assert direct.blocks_seen.tolist() == found_again.blocks_seen.tolist()


@given(st.text(max_size=60), st.integers(0, 20))
def test_byte_meter_cuts_to_its_count(text: str, tokens: int) -> None:
    meter = ByteMeter()
    head = meter.cut_text(text, tokens)
    assert text.encode("utf-8", "surrogatepass").decode("utf-8", "ignore").startswith(head)
    assert len(meter.encode_text(head)) <= tokens
    assert (meter.encode_text(text) >= 0).all()
    assert len(meter.encode_text(text)) == -(-len(text.encode("utf-8", "surrogatepass")) // 4)


def test_the_tokenizer_meter_cuts_at_a_token() -> None:
    words = ["a ", "b ", "c "]
    meter = TokenizerMeter(lambda text: ["abc".index(c) for c in text[::2]], lambda ids: "".join(words[i] for i in ids))
    assert meter.encode_text("a b c ").tolist() == [0, 1, 2]
    assert meter.cut_text("a b c ", 2) == "a b "
    assert meter.cut_text("a b c ", 9) == "a b c "
    assert meter.cut_text("a b c ", 0) == ""


def test_a_long_text_is_cut_without_being_read_whole() -> None:
    seen: list[int] = []

    def encode(text: str) -> list[int]:
        """A token for each 20 characters: longer than anybody expects."""
        seen.append(len(text))
        return list(range(-(-len(text) // 20)))

    meter = TokenizerMeter(encode, lambda ids: "x" * 20 * len(ids))
    assert meter.cut_text("x" * 100_000, 10) == "x" * 200
    assert max(seen) < 1000
    assert meter.cut_text("x" * 90, 10) == "x" * 90


def test_a_closed_history_holds_the_recorded_answers() -> None:
    meter = ByteMeter()
    turns = (Turn(Text("aaaa"), 2, answer="bbbbbbbb"), Turn(Text("cccc"), 1, answer="dddd"))
    first, second = unrolled(Session("s", turns), meter)
    assert first.prompt.tolist() == meter.encode_text("aaaa").tolist()
    assert second.prompt.tolist() == meter.encode_text("aaaabbbbbbbbcccc").tolist()
    assert [first.answer.tolist(), second.answer.tolist()] == [
        meter.encode_text(a).tolist() for a in ("bbbbbbbb", "dddd")
    ]
    assert (first.output_tokens, second.output_tokens) == (2, 1)


def test_a_given_history_holds_nothing_but_the_turn() -> None:
    turns = (Turn(Text("aaaa"), 2, answer="bbbb"), Turn(Text("cccc"), 1))
    _, second = unrolled(Session("s", turns, history=History.GIVEN))
    assert second.prompt.tolist() == ByteMeter().encode_text("cccc").tolist()


def test_an_unrecorded_answer_is_the_sessions_own() -> None:
    turns = (Turn(Text("aaaa"), 8), Turn(Text("cccc"), 1))
    one, other = (list(unrolled(Session(name, turns)))[1].prompt for name in ("one", "other"))
    assert len(one) == 10
    assert common(one.tolist(), other.tolist()) == 1


def test_chat_history_grows_by_each_turn() -> None:
    """In a chat, the blocks seen before are those of the turn before: all full blocks of prompt and answer."""
    chat = chat_workload(builtin.conversations(7, 1), source="test")
    (session,) = chat.sessions
    measured, asked = measure(chat, block_tokens=4), list(unrolled(session))
    for turn in range(1, len(asked)):
        before = len(asked[turn - 1].prompt) // 4
        assert measured.blocks_seen[turn] >= before


def test_without_text_the_weights_stay() -> None:
    chat = chat_workload(builtin.conversations(3, 6), source="test")
    bare = as_blocks(chat, block_tokens=16)
    asked = [request for session in chat.sessions for request in unrolled(session)]
    assert [blocks_said(t).tokens for s in bare.sessions for t in s.turns] == [len(request.prompt) for request in asked]
    assert as_blocks(bare, block_tokens=16) == bare


def test_text_is_not_blocks() -> None:
    with pytest.raises(InvariantError, match="as_blocks"):
        blocks_said(Turn(Text("a"), 1))


def test_a_session_without_turns_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="turn"):
        Workload("test", "test", (Session("s", ()),))


def test_figures_of_a_workload_by_hand() -> None:
    trace = trace_of([[0, 1, 2], [0, 1, 9], [0, 1, 2, 3], [5]])
    measured = measure(trace)
    assert measured.blocks_seen.tolist() == [0, 2, 3, 0]
    summary = summarize(trace, measured)
    assert (summary.blocks, summary.shared_share) == (11, pytest.approx(5 / 11))
    assert summary.prompt_tokens.mean == 11.0
    assert (summary.prompt_tokens.max, summary.turns.p99) == (16, 1)


def test_spread_of_a_hundred_and_of_nothing() -> None:
    hundred = spread_of(np.arange(101))
    assert (hundred.mean, hundred.p10, hundred.p50, hundred.p90, hundred.p95, hundred.p99) == (50, 10, 50, 90, 95, 99)
    assert (hundred.count, hundred.max) == (101, 100) and hundred.format_in_units(10, 1) == "5.0 (1.0 - 9.0)"
    assert spread(()) is None
