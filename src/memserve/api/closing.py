"""JSON schemas whose objects have no properties but those they name.

A schema that names properties and is silent about others admits any others, and a model that is free to invent some
may never come to an end. So objects of an answer are closed where that cannot make the schema unsatisfiable. What is
written then is valid by the schema as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_JOINS = {"allOf", "if", "not", "dependentSchemas", "unevaluatedProperties"}
_JOINS_PROPERTIES = {"anyOf", "oneOf", "$ref"}
_TELLS = {"additionalProperties", "patternProperties", "propertyNames", "minProperties"}
"""With these an object says itself which others it may have, or needs some."""


def closed(schema: Schema) -> Schema:
    """``schema`` with its objects closed; ``schema`` itself where parts of it are joined: a closed part would refuse
    what the others ask for."""
    return schema if any(map(_is_joined, _nodes(schema))) else _closed(schema)


def _is_joined(node: Schema) -> bool:
    return bool(node.keys() & _JOINS) or ("properties" in node and bool(node.keys() & _JOINS_PROPERTIES))


def _parts(node: Schema) -> Iterator[Any]:
    for name in _NAMED:
        if isinstance(node.get(name), dict):
            yield from node[name].values()
    for name in _LISTED:
        if isinstance(node.get(name), list):
            yield from node[name]
    for name in _SINGLE:
        part = node.get(name)
        yield from part if isinstance(part, list) else [part]


def _nodes(schema: Any) -> Iterator[Schema]:
    if isinstance(schema, dict):
        yield schema
        for part in _parts(schema):
            yield from _nodes(part)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in _NAMED:
        if isinstance(made.get(name), dict):
            made[name] = {key: _closed(part) for key, part in made[name].items()}
    for name in (*_LISTED, *_SINGLE):
        if name in made:
            made[name] = _closed(made[name])
    properties, required = made.get("properties"), made.get("required")
    names_all = isinstance(properties, dict) and properties and not (set(_texts(required)) - properties.keys())
    if names_all and not made.keys() & _TELLS:
        made["additionalProperties"] = False
    return made


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
