"""Calls out of the texts that models write, however the texts are cut into pieces."""

from __future__ import annotations

import itertools
import random

import pytest

from memserve.api.http.errors import ApiError
from memserve.api.openai.request.tool_calls import CallPiece, CallPlan, CallReader, as_instructions, call_plan, style_of

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "$defs": {"a": {}}}}},
    {"type": "function", "function": {"name": "time"}},
]
WEATHER = '{"city": "Rome", "days": [1, {"x": "}\\""}]}'
SAID = {
    "hermes": f'Wait.\n<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    '<tool_call>{"name":"time","arguments":{}}</tool_call>',
    "mistral": f'Wait.\n[TOOL_CALLS][{{"name": "weather", "arguments": {WEATHER}}}, '
    '{"name": "time", "arguments": {}}]',
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {WEATHER}}}; {{"name": "time", "parameters": {{}}}}',
    "array": f'[{{"name": "weather", "parameters": {WEATHER}}}, {{"name": "time", "parameters": {{}}}}]',
}


def read(plan: CallPlan, pieces: list[str]) -> tuple[str, list[tuple[str, str]], list[CallPiece]]:
    reader = CallReader(plan)
    told = [*itertools.chain.from_iterable(reader.push_text(piece) for piece in pieces), *reader.flush_pieces()]
    return "".join(piece.content for piece in told), [(call.name, call.arguments) for call in reader.calls], told


@pytest.mark.parametrize("style", SAID)
@pytest.mark.parametrize("seed", range(20))
def test_calls_are_the_same_for_any_way_of_cutting_the_text(style: str, seed: int) -> None:
    text, random_ = SAID[style], random.Random(seed)
    cuts = sorted(random_.sample(range(len(text)), seed * len(text) // 20))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    plan = CallPlan(tuple(TOOLS), forced=style == "array", style=style)
    content, calls, told = read(plan, pieces)
    assert calls == [("weather", WEATHER), ("time", "{}")]
    assert content.strip() == ("Wait." if style in ("hermes", "mistral") else "")
    begun = [piece.call.index for piece in told if piece.begins and piece.call is not None]
    assert begun == [0, 1]
    streamed = ["".join(p.arguments for p in told if p.call is not None and p.call.index == at) for at in begun]
    assert streamed == [WEATHER, "{}"]


def test_newer_mistral_models_write_a_name_before_the_arguments() -> None:
    plan = CallPlan(tuple(TOOLS), style="mistral")
    for between in ("", "[ARGS]"):
        text = f"[TOOL_CALLS]weather{between}{WEATHER}"
        assert read(plan, list(text))[:2] == ("", [("weather", WEATHER)])


@pytest.mark.parametrize("style", ["hermes", "mistral", "llama3"])
@pytest.mark.parametrize("text", ["Rome is hot.", "a < b, and [TOOL", "<tool_ca", " {1, 2}"])
def test_text_without_calls_is_shown_whole(style: str, text: str) -> None:
    content, calls, _ = read(CallPlan(tuple(TOOLS), style=style), list(text))
    assert (content.strip(), calls) == (text.strip(), [])


def test_a_forced_answer_that_was_cut_off_shows_no_piece_of_json() -> None:
    forced = call_plan(TOOLS, "required")
    assert forced is not None and read(forced, ['[{"na'])[:2] == ("", [])


def test_a_named_function_gets_the_whole_text_as_arguments() -> None:
    named = call_plan(TOOLS, {"type": "function", "function": {"name": "weather"}})
    assert named is not None and named.answer_schema() == {"type": "object", "$defs": {"a": {}}}
    assert read(named, list(WEATHER))[:2] == ("", [("weather", WEATHER)])


def test_required_call_schema_has_definitions_at_root() -> None:
    required = call_plan(TOOLS, "required", parallel=False)
    schema = required.answer_schema() if required is not None else None
    assert schema is not None and schema["$defs"] == {"a": {}} and schema["maxItems"] == 1
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [
        {"const": "weather"},
        {"const": "time"},
    ]


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, "required"), ([], {"type": "function", "function": {"name": "weather"}}), (TOOLS, {}), (TOOLS, "must"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}), (TOOLS, 1), (TOOLS, {"type": "function"}),
    ],
)  # fmt: skip
def test_a_choice_that_no_tool_meets_is_refused_by_name(tools: object, choice: object) -> None:
    with pytest.raises(ApiError) as refused:
        call_plan(tools, choice)
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


def test_no_call_is_planned_where_none_is_asked_for() -> None:
    assert call_plan(None, "auto") is None and call_plan(TOOLS, "none") is None
    assert call_plan(TOOLS, None) == CallPlan(tuple(TOOLS))


def test_a_template_says_how_its_model_writes_calls() -> None:
    assert style_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert style_of("{% if role == 'ipython' %}") == "llama3"
    assert style_of("{{ messages }}") == "hermes"
    assert '"weather"' in as_instructions(TOOLS, __import__("json").dumps)
