"""What each generator makes of its records, and how close the built-in ones come to their models."""

from __future__ import annotations

import numpy as np
import pytest

from memserve_lab.workloads import builtin
from memserve_lab.workloads.records import (
    Blocks,
    Call,
    CallLog,
    Chat,
    Client,
    Conversation,
    Document,
    Episode,
    History,
    LengthLog,
    Lengths,
    Message,
    Quantiles,
    Question,
    Span,
    Step,
    Text,
    Window,
)
from memserve_lab.workloads.sessions import (
    ANSWER_TOKENS_DEFAULT,
    STOP,
    Layout,
    chat_workload,
    document_workload,
    exchanges,
    group_workload,
    react_workload,
)
from memserve_lab.workloads.statistics import measure
from memserve_lab.workloads.traces import from_windows, replay, replay_calls, replay_sessions


def talk(roles: str) -> tuple[Message, ...]:
    """Messages by initials: ``sua`` is system, user, assistant."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return tuple(Message(names[role], f"{role}{n}") for n, role in enumerate(roles))


# -- chats


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("uaua", ["u0>a1", "u2>a3"]),
        ("sua", ["s0u1>a2"]),
        ("uuau", ["u0u1>a2", "u3>None"]),
        ("aua", ["a0u1>a2"]),
        ("uaaua", ["u0>a1", "a2u3>a4"]),
        ("s", []),
        ("sa", []),
        ("", []),
    ],
)
def test_turns_end_where_the_assistant_answers(roles: str, turns: list[str]) -> None:
    found = ["".join(m.content for m in asked) + f">{answer}" for asked, answer in exchanges(talk(roles))]
    assert found == turns


def test_chat_replays_user_turns_and_records_answers() -> None:
    chats = chat_workload(
        [Conversation("c", talk("suau"), group="tree"), Conversation("silent", talk("sa"))], source="t"
    )
    (session,) = chats.sessions
    assert (session.history, session.group) == (History.CLOSED, "tree")
    said = [message.role for turn in session.turns if isinstance(turn.says, Chat) for message in turn.says.messages]
    assert "assistant" not in said, "the answers in the history are the model's own"
    assert [turn.answer for turn in session.turns] == ["a2", None]
    assert [turn.output_tokens_max for turn in session.turns] == [1, ANSWER_TOKENS_DEFAULT]
    assert "1 conversations" in chats.notes[0]


# -- documents


@pytest.mark.parametrize("layout", Layout)
def test_every_question_stands_behind_the_same_head(layout: Layout) -> None:
    document = Document("d", "word " * 500, tuple(Question(f"why {n}?", "because") for n in range(9)))
    made = document_workload([document], source="t", document_tokens=100, questions=5, layout=layout)
    (session,) = made.sessions
    assert (len(session.turns), session.history) == (5, History.GIVEN)
    measured = measure(made, block_tokens=4)
    assert (measured.blocks_seen[1:] >= 25).all(), "the head is shared"
    assert (measured.prompt_tokens < 120).all(), "and nothing else of the document is there"


# -- agents


EPISODE = Episode("e", "Who?", (Step("look", "Search[x]", "found"), Step("done", "Finish[y]", "right")))
EXAMPLES = "Solve it.\nQuestion: 1\nThought 1: a\nQuestion: 2\nThought 1: b\nQuestion: 3\nThought 1: c\n"


def test_agent_continues_from_the_model_output() -> None:
    made = react_workload([EPISODE], EXAMPLES, source="t", seed=0, shots=2)
    first, second = made.sessions[0].turns
    assert isinstance(first.says, Text) and isinstance(second.says, Text)
    assert first.says.text == (
        "Solve it.\nQuestion: 1\nThought 1: a\nQuestion: 2\nThought 1: b\nQuestion: Who?\nThought 1:"
    )
    assert first.answer == " look\nAction 1: Search[x]"
    assert second.says.text == "\nObservation 1: found\nThought 2:"
    assert first.stop == STOP
    whole = "".join(t.says.text + (t.answer or "") for t in (first, second) if isinstance(t.says, Text))
    assert whole.endswith(
        "Thought 1: look\nAction 1: Search[x]\nObservation 1: found\nThought 2: done\nAction 2: Finish[y]"
    )


def test_more_agents_than_episodes_ask_new_questions() -> None:
    made = react_workload([EPISODE], EXAMPLES, source="t", seed=0, sessions=4, more_questions=["What?", "Why?"])
    asked = [turn.text.rsplit("Question: ")[-1] for s in made.sessions if isinstance(turn := s.turns[0].says, Text)]
    assert asked == [f"{question}\nThought 1:" for question in ("Who?", "What?", "Why?", "What?")]
    assert len({session.session_id for session in made.sessions}) == 4


# -- groups


def test_a_group_shares_its_head_and_nothing_else() -> None:
    made = group_workload(seed=1, groups=6, users=4, prefix_tokens=320, question_tokens=40)
    assert len(made.sessions) == 24
    assert {session.group for session in made.sessions} == {f"group-{n}" for n in range(6)}
    measured, first = measure(made), set()
    for session, seen in zip(made.sessions, measured.blocks_seen.tolist(), strict=True):
        assert seen >= 20 if session.group in first else seen <= 1
        assert seen <= 22, "questions are each user's own"
        first.add(session.group)


# -- traces


def test_rows_without_blocks_share_nothing() -> None:
    made = replay([Lengths(7.5, 100, 0), Lengths(5.0, 100, 3)], kind="t", source="t", block_tokens=16)
    assert [session.arrival_s for session in made.sessions] == [2.5, 0.0], "times count from the first"
    assert [session.turns[0].output_tokens_max for session in made.sessions] == [1, 3]
    assert measure(made).blocks_seen.tolist() == [0, 0]


def test_local_identities_never_meet_but_a_sub_agents_do() -> None:
    rows = (Lengths(0, 128, 1, (Span(0, 128),)), Lengths(9, 200, 1, (Span(0, 192),), think_s=2.0))
    logs = [LengthLog("one", rows), LengthLog("two", rows), LengthLog("one/agent", rows[:1], parent="one")]
    made = replay_sessions(logs, kind="t", source="t", block_tokens=64)
    assert measure(made).blocks_seen.tolist() == [0, 2, 0, 2, 2]
    assert [session.group for session in made.sessions] == ["one", "two", "one"]
    first, second = made.sessions[0].turns
    assert isinstance(second.says, Blocks) and second.says.tokens == 200, "tokens behind the last full block count"
    assert (first.think_s, second.think_s) == (0.0, 2.0)


def test_calls_are_whole_prompts() -> None:
    log = CallLog("a", (Call("hello", "12345"), Call(""), Call("hello12345 more")))
    made = replay_calls([log, CallLog("empty", (Call(""),))], kind="t", source="t")
    (session,) = made.sessions
    assert [turn.says for turn in session.turns] == [Text("hello"), Text("hello12345 more")]
    assert [turn.output_tokens_max for turn in session.turns] == [2, ANSWER_TOKENS_DEFAULT]
    assert session.history is History.GIVEN


@pytest.mark.parametrize(("family", "shape"), [("Gamma", 0.5), ("Gamma", 2.0), ("Weibull", 0.7)])
def test_client_windows_give_their_rate_burstiness_and_lengths(family: str, shape: float) -> None:
    lengths = Quantiles(0, tuple(range(100, 201)), (5.0, 5.0, 5.0))
    windows = (Window(0, 5.0, family, shape), Window(600, 0.0, family, shape), Window(1200, 2.0, family, shape))
    client = Client("c", windows, (lengths,))
    made = from_windows([client], source="t", seed=3, duration_s=1800)
    times = np.array([session.arrival_s for session in made.sessions])
    assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < 1800
    assert [int(((times >= a) & (times < a + 600)).sum()) for a in (0, 600, 1200)] == [
        pytest.approx(3000, rel=0.12), 0, pytest.approx(1200, rel=0.15),
    ]  # fmt: skip
    gaps = np.diff(times[times < 600])
    expected = {("Gamma", 0.5): 1.41, ("Gamma", 2.0): 0.71, ("Weibull", 0.7): 1.46}[family, shape]
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.12)
    measured = measure(made)
    assert measured.prompt_tokens.min() >= 100 and measured.prompt_tokens.max() <= 200
    assert measured.prompt_tokens.mean() == pytest.approx(150, rel=0.03)
    assert set(measured.output_tokens.tolist()) == {5}


def test_half_the_rate_gives_half_the_requests() -> None:
    client = Client("c", (Window(0, 4.0, "Gamma", 1.0),), (Quantiles(0, (9.0,), (9.0,)),))
    whole, half = (from_windows([client], source="t", seed=1, rate_factor=f).request_count for f in (1.0, 0.5))
    assert half == pytest.approx(whole / 2, rel=0.1)


# -- records from a seed


def test_built_in_traces_look_like_mooncakes_conversation_trace() -> None:
    """Mean input 12,870, mean output 346, 0.341 of blocks shared, every prompt with the system block."""
    rows = builtin.trace_rows(0, 1500)
    measured = measure(replay(rows, kind="t", source="t", block_tokens=512))
    assert measured.prompt_tokens.mean() == pytest.approx(12_870, rel=0.15)
    assert measured.output_tokens.mean() == pytest.approx(346, rel=0.1)
    assert measured.shared_share == pytest.approx(0.341, abs=0.06)
    assert (measured.blocks_seen[1:] >= 1).all()
    assert all(row.spans and row.spans[0].first == 0 for row in rows)
    assert sum(row.input_tokens for row in rows) == measured.prompt_tokens.sum()
