"""The form that a request asks of its answer, as a grammar (:mod:`memserve.model.grammar.masks` draws by it).

JSON schemas whose objects have no properties but those they name.

A schema that names properties and is silent about others admits any others, and a model that is free to invent some
may never come to an end. So objects of an answer are closed where that cannot make the schema unsatisfiable. What is
written then is valid by the schema as it was given.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from memserve.api.http.errors import bad_request, unsupported
from memserve.api.openai.request.prompts import INLINE_BYTES_MAX
from memserve.api.openai.request.schema import ChatBody, GenerationBody
from memserve.api.openai.request.tool_calls import CallPlan
from memserve.model.grammar.process import GBNF
from memserve.model.grammar.processes import GrammarProcesses

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
    closed_schema = dict(schema)
    for name in _NAMED:
        if isinstance(closed_schema.get(name), dict):
            closed_schema[name] = {key: _closed(part) for key, part in closed_schema[name].items()}
    for name in (*_LISTED, *_SINGLE):
        if name in closed_schema:
            closed_schema[name] = _closed(closed_schema[name])
    properties, required = closed_schema.get("properties"), closed_schema.get("required")
    names_all = isinstance(properties, dict) and properties and not (set(_texts(required)) - properties.keys())
    if names_all and not closed_schema.keys() & _TELLS:
        closed_schema["additionalProperties"] = False
    return closed_schema


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


GRAMMAR_CHARS_MAX = 1 << 18
CHECK_S = 10.0
"""The longest that a check may wait for a processor. Of processor time it gets less: two seconds."""
CHOICES_MAX = 1000
CHECKING_A_SCHEMA = 8
"""How many times longer than tokenizing it takes to check a schema of as many bytes: 2 us a byte, sometimes 10."""
_KINDS = ("choice", "regex", "json", "json_object", "grammar")
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write JSON: with free whitespace a small model may write nothing else."""


def work_of(body: GenerationBody, text_bytes: int) -> int:
    """How much text takes as long to tokenize as planning ``body`` of ``text_bytes``, as far as is known before: a
    grammar is never checked in the event loop."""
    forces_calls = isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto")
    has_structure = forces_calls or body.response_format is not None or body.structured_outputs is not None
    return work_of_form(text_bytes) if has_structure else text_bytes


def work_of_form(text_bytes: int) -> int:
    """As :func:`work_of`, for a body that asks for a form of its answer."""
    return max(text_bytes * CHECKING_A_SCHEMA, INLINE_BYTES_MAX + 1)


def structure_of(body: GenerationBody, calls: CallPlan | None) -> str:
    """The grammar of the answer; empty: it may be anything. Raises :class:`ApiError` 400 naming the field at fault."""
    fields = [name for name in ("structured_outputs", "response_format") if getattr(body, name) is not None]
    forced = calls.answer_schema() if calls is not None else None
    grammar = ""
    for name in fields:
        field_grammar = (
            _outputs_grammar(body.structured_outputs) if name == "structured_outputs" else _format_grammar(body)
        )
        if field_grammar and grammar:
            raise bad_request("structured_outputs and response_format exclude each other", name)
        grammar = field_grammar or grammar
    if forced is not None:
        grammar = json_grammar(forced, "tools", lenient=True)
    if grammar and body.use_beam_search:
        raise bad_request("structured output and use_beam_search exclude each other", "use_beam_search")
    return grammar


def _outputs_grammar(outputs: dict[str, Any] | None) -> str:
    values = {name: value for name, value in (outputs or {}).items() if value is not None and value is not False}
    if unknown := [name for name in values if name not in _KINDS]:
        name = f"structured_outputs.{unknown[0]}"
        raise bad_request(f"Unknown field '{name}'; known are {', '.join(_KINDS)}", name, "unknown_field")
    if len(values) != 1:
        raise bad_request(f"structured_outputs must have one of {', '.join(_KINDS)}", "structured_outputs")
    ((kind, value),) = values.items()
    field = f"structured_outputs.{kind}"
    match kind:
        case "json":
            return json_grammar(_object(value, field), field)
        case "json_object":
            return json_grammar({"type": "object"}, field)
        case "choice":
            return _checked(_choices(value, field), field)
    if not isinstance(value, str) or not value:
        raise bad_request(f"'{field}' must be a text", field, "invalid_value")
    if kind == "regex":
        return _checked(_lark(f"start: {_regex(value)}"), field)
    return _checked(_lark(_from_gbnf(value, field) if "::=" in value else value), field)


def _format_grammar(body: GenerationBody) -> str:
    form = body.response_format or {}
    match form.get("type"):
        case "text":
            return ""
        case "json_object":
            return json_grammar({"type": "object"}, "response_format")
        case "json_schema":
            json_schema = form.get("json_schema")
            schema = json_schema.get("schema") if isinstance(json_schema, dict) else None
            if not isinstance(schema, dict):
                message = "response_format.json_schema must be an object with a schema"
                raise bad_request(message, "response_format.json_schema", "missing_required_parameter")
            return json_grammar(schema, "response_format.json_schema")
    raise bad_request("response_format.type must be text, json_object or json_schema", "response_format")


def json_grammar(schema: dict[str, Any], field: str, *, lenient: bool = False) -> str:
    """The grammar of what ``schema`` admits, its objects closed. ``lenient``: parts that the engine does not know admit
    anything."""
    options = {**_SPACING, **({"lenient": True} if lenient else {})}
    return _checked(json.dumps({"grammars": [{"json_schema": {**closed(schema), "x-guidance": options}}]}), field)


def _object(value: Any, field: str) -> dict[str, Any]:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"'{field}' must be a JSON schema", field, "invalid_value")
    return value


def _choices(value: Any, field: str) -> str:
    is_bounded_list = isinstance(value, list) and 0 < len(value) <= CHOICES_MAX
    if not is_bounded_list or not all(isinstance(text, str) and text for text in value):
        raise bad_request(f"'{field}' must be a list of 1 to {CHOICES_MAX} texts", field, "invalid_value")
    return _lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value))


def _regex(value: str) -> str:
    return "/" + value.replace("\\/", "/").replace("/", "\\/") + "/"


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _from_gbnf(text: str, field: str) -> str:
    _refuse_long(text, field)
    _need_engine(field)
    why, lark = _checks.convert_gbnf(text)
    if why:
        raise bad_request(f"'{field}' is no grammar: {why[:200]}", field, "invalid_value")
    return lark


def _checked(grammar: str, field: str) -> str:
    _refuse_long(grammar, field)
    _need_engine(field)
    try:
        why = _checks.fault(grammar)
    except TimeoutError as error:
        why = str(error)
    if why:
        raise bad_request(f"'{field}' cannot be used: {why[:200]}", field, "invalid_value")
    return grammar


def _refuse_long(grammar: str, field: str) -> None:
    if len(grammar) > GRAMMAR_CHARS_MAX:
        message = f"'{field}' has {len(grammar)} characters; the limit is {GRAMMAR_CHARS_MAX}"
        raise bad_request(message, field, "invalid_value")


def _need_engine(field: str) -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise unsupported(field, "Structured output without the package llguidance (pip install llguidance)")


class _Checks:
    """Checks grammars in processes of their own, as they are built (:mod:`memserve.model.grammar.processes`): whatever
    a client sends, this process neither grows nor stops."""

    def __init__(self) -> None:
        self._processes = GrammarProcesses(None, 1)
        self.fault = lru_cache(256)(self._find_fault)
        """Why a grammar cannot be used; "": it can be."""

    def _find_fault(self, grammar: str) -> str:
        why, process = self._processes.wait_built(grammar, CHECK_S)  # its TimeoutError is not remembered
        process.end_process()
        return why

    def convert_gbnf(self, text: str) -> tuple[str, str]:
        """Why a text in llama.cpp's notation is no grammar, or "", and what it is in Lark's."""
        try:
            why, process = self._processes.wait_built(GBNF + text, CHECK_S)
        except TimeoutError as error:
            return str(error), ""
        lark = "" if why else process.converted_text()
        process.end_process()
        return why, lark


_checks = _Checks()
