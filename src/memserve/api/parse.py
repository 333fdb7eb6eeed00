"""From body bytes to a checked request body (level 4)."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import msgspec

from memserve._core import json_shape
from memserve.api.errors import ApiError, bad_request, unsupported
from memserve.api.schema import REFUSED, ChatBody, CompletionBody, DocumentBody

DEPTH_MAX = 64
NAME_BYTES_MAX = 1024
CONTAINERS_MAX = 1 << 15
VALUES_MAX = 1 << 18
"""What is built of a body holds the interpreter while it is built: a hundredth of a second at the most."""

_MESSAGE_CHARS_MAX = 2000
_NAME_CHARS_MAX = 64

Body = TypeVar("Body", CompletionBody, ChatBody, DocumentBody)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """``data`` as ``kind``. Raises :class:`ApiError` 400 that names the field at fault."""
    _refuse_shape(data)
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"The request body is not valid UTF-8: {error.reason}") from None
    _refuse_unsupported(body)
    return body


def body_of(fields: dict[str, Any], kind: type[Body]) -> Body:
    """``fields``, of builtin types, as ``kind``: for callers in this process. Raises as :func:`parse_body`."""
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    _refuse_unsupported(body)
    return body


def _refuse_shape(data: bytes) -> None:
    shape = json_shape(data)
    if shape.depth > DEPTH_MAX:
        raise bad_request(f"The request body is nested {shape.depth} deep; the limit is {DEPTH_MAX}")
    if shape.name_bytes > NAME_BYTES_MAX:
        raise bad_request(f"A field's name has {shape.name_bytes} bytes; the limit is {NAME_BYTES_MAX}")
    if shape.containers > CONTAINERS_MAX:
        raise bad_request(f"The request body has {shape.containers} arrays and objects; the limit is {CONTAINERS_MAX}")
    if shape.values > VALUES_MAX:
        raise bad_request(f"The request body has {shape.values} values; the limit is {VALUES_MAX}")


def _explain(message: str, kind: type[Body]) -> ApiError:
    if len(message) > _MESSAGE_CHARS_MAX:  # it repeats a value
        message = message[: _MESSAGE_CHARS_MAX // 2] + " ... " + message[-_MESSAGE_CHARS_MAX // 2 :]
    path = _PATH.search(message)
    param = path.group(1) if path else None
    message = message[: path.start()] if path else message
    if unknown := _UNKNOWN.search(message):
        name = unknown.group(1)
        names = (
            []
            if param or len(name) > _NAME_CHARS_MAX
            else [field for field in kind.__struct_fields__ if field not in REFUSED]
        )
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        full = f"{param}.{name}" if param else name
        return bad_request(f"Unknown field '{full}'{hint}", full, "unknown_field")
    if missing := _MISSING.search(message):
        name = missing.group(1)
        return bad_request(f"The field '{name}' is required", name, "missing_required_parameter")
    where = f"Invalid value for '{param}': " if param else "Invalid request body: "
    return bad_request(where + message[:1].lower() + message[1:], param, "invalid_value")


def _refuse_unsupported(body: Body) -> None:
    for field, (what, harmless) in REFUSED.items():
        value = getattr(body, field, None)
        if value is not None and value not in harmless:
            raise unsupported(field, what)
