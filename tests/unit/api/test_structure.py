"""Which grammar a request asks for, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memserve.api.http.errors import ApiError
from memserve.api.openai.request.prompts import INLINE_BYTES_MAX
from memserve.api.openai.request.schema import ChatBody, body_of
from memserve.api.openai.request.structured_output import structure_of, work_of
from memserve.api.openai.request.tool_calls import call_plan

pytest.importorskip("llguidance", reason="the grammar engine is not installed: make install")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "yes" | "no"'


def asked(**fields: Any) -> str:
    body = body_of({"model": "m", "messages": [], **fields}, ChatBody)
    return structure_of(body, call_plan(body.tools, body.tool_choice))


@pytest.mark.parametrize(
    "outputs",
    [{"choice": ["a", 'b"/']}, {"regex": "a/b\\d+"}, {"json": SCHEMA}, {"json": json.dumps(SCHEMA)}, {"grammar": GBNF},
     {"json_object": True}, {"grammar": 'start: "a" | "b"'}],
)  # fmt: skip
def test_each_kind_becomes_a_grammar(outputs: dict[str, Any]) -> None:
    assert "grammars" in json.loads(asked(structured_outputs=outputs))


def test_formats_of_openai() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert asked(response_format=named) == asked(structured_outputs={"json": SCHEMA})
    assert asked(response_format={"type": "json_object"}) == asked(structured_outputs={"json_object": True})
    assert asked(response_format={"type": "text"}) == asked() == ""


def test_a_forced_call_is_a_grammar_and_a_free_one_is_not() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    assert '"f"' in asked(tools=tools, tool_choice="required") and not asked(tools=tools)


def test_a_schema_is_checked_beside_the_event_loop() -> None:
    """A schema of some kilobytes may take as long as a step: it counts for more than its bytes."""
    for fields in ({"structured_outputs": {"json": SCHEMA}}, {"response_format": {"type": "json_object"}}):
        assert work_of(body_of({"model": "m", "messages": [], **fields}, ChatBody), 1000) > INLINE_BYTES_MAX
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    for choice, is_forced in (("required", True), ("auto", False), ("none", False), (None, False)):
        body = body_of({"model": "m", "messages": [], "tools": tools, "tool_choice": choice}, ChatBody)
        assert (work_of(body, 1000) > INLINE_BYTES_MAX) == is_forced


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"properties": {"a": "b"}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "root ::= unknown"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "start: /["}}, "structured_outputs.grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "use_beam_search"),
        ({"structured_outputs": {"regex": "a" * (1 << 19)}}, "structured_outputs.regex"),
    ],
)
def test_invalid_grammar_is_refused_by_field_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_pattern_that_cannot_be_used_says_why() -> None:
    with pytest.raises(ApiError, match="look-around, including look-ahead and look-behind, is not supported"):
        asked(structured_outputs={"json": {"type": "string", "pattern": "(?=a)b"}})
