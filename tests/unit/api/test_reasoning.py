"""Thoughts, content and calls out of the texts that models write, however the texts are cut into pieces."""

from __future__ import annotations

import itertools
import random

import pytest

from memserve.api.openai.request.tool_calls import CallPlan
from memserve.api.openai.response.reasoning import AnswerReader, Thoughts, thoughts_after

TEMPLATE = "{% if thinking %}<think>\n{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = ({"type": "function", "function": {"name": "weather"}},)


def read(thoughts: Thoughts, pieces: list[str], plan: CallPlan | None = None) -> tuple[str, str, list[str]]:
    """Reasoning, content and the arguments of the calls."""
    reader = AnswerReader(thoughts, plan)
    told = [*itertools.chain.from_iterable(reader.push_text(piece) for piece in pieces), *reader.flush_pieces()]
    assert all(bool(piece.content) + bool(piece.reasoning) + (piece.call is not None) == 1 for piece in told)
    said = ("".join(piece.reasoning for piece in told), "".join(piece.content for piece in told))
    return *said, [call.arguments for call in reader.calls]


CASES = [
    (
        Thoughts.POSSIBLE,
        "<think>\nIs 1 < 2?\n\nYes </th>.\n</think>\n\nIt is.\n",
        "Is 1 < 2?\n\nYes </th>.",
        "It is.\n",
    ),
    (Thoughts.POSSIBLE, "\n <think></think>\n\nIt is.", "", "It is."),
    (Thoughts.POSSIBLE, " It is. <think>no</think>", "", " It is. <think>no</think>"),
    (Thoughts.POSSIBLE, "<thin", "", "<thin"),
    (Thoughts.BEGUN, "Hm.\n</think>It is.</think>", "Hm.", "It is.</think>"),
    (Thoughts.BEGUN, "Hm, this takes\nlong </thi", "Hm, this takes\nlong </thi", ""),
    (Thoughts.NONE, " <think>Hm.</think>", "", " <think>Hm.</think>"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1][:20])
@pytest.mark.parametrize("seed", range(10))
def test_reasoning_split_is_independent_of_chunking(case: tuple[Thoughts, str, str, str], seed: int) -> None:
    thoughts, text, reasoning, content = case
    cuts = sorted(random.Random(seed).sample(range(len(text)), seed * len(text) // 10))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(thoughts, pieces) == (reasoning, content, [])
    assert read(thoughts, list(text)) == (reasoning, content, [])


def test_tool_calls_inside_reasoning_are_not_calls() -> None:
    text = f"<think>I might write {CALL}</think>\nWait.\n{CALL}"
    for pieces in ([text], list(text)):
        reasoning, content, calls = read(Thoughts.POSSIBLE, pieces, CallPlan(TOOLS))
        assert reasoning == f"I might write {CALL}" and content.strip() == "Wait." and calls == ['{"city": "Rome"}']


def test_a_stream_tells_thoughts_as_they_come() -> None:
    reader = AnswerReader(Thoughts.BEGUN, None)
    assert [piece.reasoning for word in ("I ", "think ", "so") for piece in reader.push_text(word)] == [
        "I",
        " think",
        " so",
    ]
    assert reader.is_thinking and reader.had_thoughts
    assert [(piece.reasoning, piece.content) for piece in reader.push_text("</think>Yes")] == [("", "Yes")]
    assert not reader.is_thinking and reader.had_thoughts


@pytest.mark.parametrize(
    ("prompt", "parser", "template", "expected"),
    [
        ("<|assistant|>\n<think>\n", "auto", TEMPLATE, Thoughts.BEGUN),
        ("<|assistant|>\n", "auto", TEMPLATE, Thoughts.POSSIBLE),
        ("<|assistant|>\n<think>\n\n</think>\n\n", "auto", TEMPLATE, Thoughts.POSSIBLE),
        ("<|assistant|>\n", "auto", "{{ messages }}", Thoughts.NONE),
        ("<|assistant|>\n", "think", "{{ messages }}", Thoughts.POSSIBLE),
        ("<|assistant|>\n<think>\n", "none", TEMPLATE, Thoughts.NONE),
    ],
)
def test_reasoning_state_after_a_prompt(prompt: str, parser: str, template: str, expected: Thoughts) -> None:
    assert thoughts_after(prompt, parser, template) is expected
