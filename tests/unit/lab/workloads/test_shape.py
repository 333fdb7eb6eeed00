"""Times, caps, samples and copies: what they promise for any workload."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.errors import UserError
from memserve_lab.workloads import builtin
from memserve_lab.workloads.arrivals import (
    Bursty,
    Constant,
    Poisson,
    by_request,
    by_session,
    closed_loop,
    draws,
    trace_time,
)
from memserve_lab.workloads.records import Blocks, Chat, History, Workload
from memserve_lab.workloads.sessions import chat_workload, document_workload, react_workload
from memserve_lab.workloads.shape import Caps, capped, leading, sampled, shared, weight, with_block_tokens
from memserve_lab.workloads.statistics import measure
from memserve_lab.workloads.tokens import ByteMeter, unrolled
from memserve_lab.workloads.traces import replay

CHATS = chat_workload(builtin.conversations(1, 30), source="test")
DOCUMENTS = document_workload(builtin.documents(1, 10, words=300), source="test", document_tokens=200)
AGENTS = react_workload(builtin.episodes(1, 12), builtin.examples(1), source="test", seed=1)
TRACE = replay(builtin.trace_rows(1, 60), kind="trace", source="test", block_tokens=512)
ALL = [CHATS, DOCUMENTS, AGENTS, TRACE]

workloads = st.sampled_from(ALL)
seeds = st.integers(0, 1000)


def due_times(workload: Workload) -> list[float | None]:
    return [turn.due_s for session in workload.sessions for turn in session.turns]


# -- times


@pytest.mark.parametrize("process", [Poisson(5.0), Constant(5.0), Bursty(5.0, 3.0)], ids=lambda p: type(p).__name__)
def test_arrivals_come_at_their_rate(process: Poisson | Constant | Bursty) -> None:
    gaps = process.gaps_s(draws(3), 40_000)
    variation = {Poisson: 1.0, Constant: 0.0, Bursty: 3.0}[type(process)]
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.2)


@settings(max_examples=25)
@given(workloads, seeds, st.integers(1, 9))
def test_every_request_has_a_point_of_its_own_in_causal_order(workload: Workload, seed: int, overlap: int) -> None:
    timed = by_request(workload, Poisson(2.0), seed=seed, overlap=overlap)
    points = np.cumsum(Poisson(2.0).gaps_s(draws(seed, "gaps"), workload.request_count)).tolist()
    assert sorted(due_times(timed)) == points
    for session in timed.sessions:
        times = [turn.due_s for turn in session.turns]
        assert times == sorted(times)
    opened = [(session.turns[0].due_s, session.turns[-1].due_s) for session in timed.sessions]
    assert all(sum(first <= at <= last for first, last in opened) <= overlap for at in points)


@settings(max_examples=25)
@given(workloads, seeds)
def test_sessions_start_in_order_and_later_turns_are_causal(workload: Workload, seed: int) -> None:
    timed = by_session(workload, Constant(4.0), seed=seed)
    starts = [session.arrival_s for session in timed.sessions]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(workload.request_count / 4.0), "requests come at the rate that was asked for"
    assert all(turn.due_s is None for session in timed.sessions for turn in session.turns[1:])


def test_sequential_sessions_keep_trace_order() -> None:
    times = due_times(by_request(TRACE, Poisson(2.0), seed=4, overlap=1))
    assert times == sorted(times)


def test_trace_time_runs_faster_by_the_factor() -> None:
    slow, fast = due_times(TRACE), due_times(trace_time(TRACE, speed=4))
    assert fast == pytest.approx([at_s / 4 for at_s in slow])


def test_a_closed_loop_has_users_and_no_times() -> None:
    loop = closed_loop(by_request(CHATS, Poisson(1.0), seed=0), users=3)
    assert loop.users == 3
    assert set(due_times(loop)) == {None}
    assert by_session(loop, Poisson(1.0), seed=0).users is None


def test_impossible_times_are_refused() -> None:
    for wrong in (
        lambda: by_request(CHATS, Poisson(0.0), seed=0),
        lambda: by_session(CHATS, Constant(-1.0), seed=0),
        lambda: trace_time(TRACE, speed=0),
        lambda: closed_loop(CHATS, users=0),
    ):
        with pytest.raises(UserError):
            wrong()


# -- one seed fixes everything


@settings(max_examples=10)
@given(seeds)
def test_equal_seeds_make_equal_workloads_and_others_dont(seed: int) -> None:
    def made(seed: int) -> Workload:
        chats = chat_workload(builtin.conversations(seed, 4), source="test")
        return by_request(shared(sampled(chats, 3, seed=seed), 2, seed=seed), Poisson(1.0), seed=seed)

    assert made(seed) == made(seed)
    assert made(seed) != made(seed + 1)


# -- caps


@settings(max_examples=40)
@given(workloads, st.integers(16, 2000), st.integers(1, 100), st.integers(1, 4))
def test_caps_hold_with_answers_as_long_as_they_may_be(
    workload: Workload, prompt_tokens: int, output_tokens: int, turns: int
) -> None:
    made = capped(workload, Caps(prompt_tokens, output_tokens, turns))
    assert len(made.sessions) == len(workload.sessions), "no session vanishes"
    meter = ByteMeter()
    for session, before in zip(made.sessions, workload.sessions, strict=True):
        assert 1 <= len(session.turns) <= min(turns, len(before.turns))
        history = 0
        for turn in session.turns:
            prompt = history + weight(turn.says, meter)
            assert prompt <= max(prompt_tokens, 24), "24: the frame of a chat of two messages, emptied"
            assert turn.output_tokens_max <= output_tokens
            history = prompt + turn.output_tokens_max if session.history is History.CLOSED else 0
        longest = max(len(asked.prompt) for asked in unrolled(replace(session, turns=session.turns[:1])))
        assert longest <= max(prompt_tokens, 24)


@settings(max_examples=20)
@given(workloads)
def test_wide_caps_change_nothing(workload: Workload) -> None:
    assert capped(workload, Caps(10**7, 10**6, 100)).sessions == workload.sessions


def test_cut_traces_share_the_same_leading_blocks() -> None:
    """A cut keeps the head: of what is left, exactly the blocks that were shared before are shared."""
    cut, whole = measure(capped(TRACE, Caps(prompt_tokens_max=5 * 512))), measure(TRACE)
    assert cut.blocks.tolist() == np.minimum(whole.blocks, 5).tolist()
    assert (cut.blocks_seen >= np.minimum(whole.blocks_seen, cut.blocks) - 1).all()
    full = whole.blocks > 5
    assert cut.blocks_seen[full].tolist() == np.minimum(whole.blocks_seen, 5)[full].tolist()


def test_a_long_document_is_cut_and_its_question_is_not() -> None:
    made = capped(DOCUMENTS, Caps(prompt_tokens_max=120))
    assert made.request_count == DOCUMENTS.request_count, "every question is asked, behind a shorter head"
    for session, before in zip(made.sessions, DOCUMENTS.sessions, strict=True):
        assert isinstance(session.turns[0].says, Chat) and isinstance(before.turns[0].says, Chat)
        head, question = session.turns[0].says.messages
        assert question == before.turns[0].says.messages[1]
        assert before.turns[0].says.messages[0].content.startswith(head.content)
        assert len(head.content) < len(before.turns[0].says.messages[0].content)


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="cap of 0"):
        capped(CHATS, Caps(prompt_tokens_max=0))


@settings(max_examples=20)
@given(st.sampled_from([1, 16, 64, 512]))
def test_smaller_blocks_keep_every_identity(block_tokens: int) -> None:
    small, whole = measure(with_block_tokens(TRACE, block_tokens)), measure(TRACE)
    assert small.blocks.tolist() == whole.blocks.tolist()
    assert small.blocks_seen.tolist() == whole.blocks_seen.tolist()
    says = with_block_tokens(TRACE, block_tokens).sessions[3].turns[0].says
    assert isinstance(says, Blocks) and says.block_tokens == block_tokens
    ratio = small.prompt_tokens.sum() / whole.prompt_tokens.sum()
    assert ratio == pytest.approx(block_tokens / 512, rel=0.05)


# -- samples and copies


@settings(max_examples=30)
@given(workloads, st.floats(1, 4), seeds)
def test_the_share_ratio_copies_so_many_sessions(workload: Workload, ratio: float, seed: int) -> None:
    made = shared(workload, ratio, seed=seed)
    names = [session.session_id for session in made.sessions]
    assert len(set(names)) == len(names) and abs(len(names) - ratio * len(workload.sessions)) <= 1
    copies = Counter(name.split("#")[0] for name in names)
    assert set(copies) == {session.session_id for session in workload.sessions}
    assert set(copies.values()) <= {int(ratio), int(ratio) + 1}
    asked = {session.session_id: session.turns for session in workload.sessions}
    assert all(session.turns == asked[session.session_id.split("#")[0]] for session in made.sessions)


@pytest.mark.parametrize("ratio", [2, 3, 5])
def test_copies_are_found_in_a_cache_that_sees_across_sessions(ratio: int) -> None:
    """Unrelated sessions, each asked ``ratio`` times: all but the first asking is shared."""
    alone = replay(
        [replace(row, spans=None) for row in builtin.trace_rows(2, 80)], kind="t", source="t", block_tokens=16
    )
    assert measure(alone).shared_share == 0
    assert measure(shared(alone, ratio, seed=1)).shared_share == pytest.approx(1 - 1 / ratio)


def test_less_than_once_is_refused() -> None:
    with pytest.raises(UserError, match="share ratio"):
        shared(CHATS, 0.5, seed=0)


@settings(max_examples=20)
@given(workloads, st.integers(1, 80), seeds)
def test_a_sample_keeps_order_and_a_beginning_is_one(workload: Workload, count: int, seed: int) -> None:
    names = [session.session_id for session in workload.sessions]
    chosen = [session.session_id for session in sampled(workload, count, seed=seed).sessions]
    assert len(chosen) == min(count, len(names))
    assert sorted(chosen, key=names.index) == chosen
    assert [session.session_id for session in leading(workload, count).sessions] == names[:count]
