"""Objects of schemas are closed where that cannot make a schema unsatisfiable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memserve.api.openai.request.structured_output import closed

AB: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}
SHUT: dict[str, Any] = {**AB, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (AB, SHUT),
        ({"type": "array", "items": AB}, {"type": "array", "items": SHUT}),
        ({"anyOf": [AB, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": AB}}, {"$ref": "#/$defs/x", "$defs": {"x": SHUT}}),
        (
            {"properties": {"allOf": AB, "not": {"type": "string"}}},
            {"properties": {"allOf": SHUT, "not": {"type": "string"}}, "additionalProperties": False},
        ),
        ({"items": [AB, True], "additionalProperties": AB}, {"items": [SHUT, True], "additionalProperties": SHUT}),
    ],
)
def test_objects_that_name_their_properties_are_closed(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(given)
    assert closed(given) == expected and json.dumps(given) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**AB, "required": ["a", "c"]},
        {**AB, "additionalProperties": True},
        {**AB, "additionalProperties": {"type": "string"}},
        {**AB, "minProperties": 3},
        {**AB, "patternProperties": {"^x": {}}},
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"c": {}}}], "$defs": {"x": AB}},
        {**AB, "anyOf": [{"properties": {"c": {"type": "string"}}, "required": ["c"]}]},
        {"properties": {"x": AB, "y": {"$ref": "#/properties/x", "properties": {"c": {}}}}},
        {"if": AB, "then": {"properties": {"c": {}}}},
        {"not": AB},
        {"enum": [{"properties": {"a": 1}}]},
    ],
)
def test_other_objects_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
