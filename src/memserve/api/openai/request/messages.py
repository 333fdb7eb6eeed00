"""The messages of a chat: checked, and in the form that chat templates read.

Tools stand where the template has a place for them, else in the system message.
"""

from __future__ import annotations

import json
import re
from typing import Any

from memserve.api.http.errors import bad_request, unsupported
from memserve.api.openai.request.schema import ChatBody
from memserve.api.openai.request.tool_calls import as_instructions, check_tools

Messages = list[dict[str, Any]]
"""As templates read them: ``role`` and ``content`` (a string) in each; tool calls with their arguments as objects."""

MESSAGES_MAX = 10_000
ROLE_CHARS_MAX = 64

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""Fields that templates may read, as they are."""

_IGNORED = ("refusal", "annotations")
_FIELDS = {"role", "content", "tool_calls", "function_call", "audio", *_TEXTS, *_IGNORED}
EXTRA_FIELDS_MAX = 32
"""Further fields of one message: templates may read them."""
_SENSES = {"image": "Vision", "video": "Vision", "audio": "Audio", "file": "Reading files"}
"""What kinds of content ask for, by a part of their names."""
_CALL_FIELDS = {"id", "type", "function", "index"}


def check_messages(messages: Any) -> Messages:
    """``messages`` in the form that templates read. Raises :class:`ApiError` 400 naming the message at fault."""
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must hold at least one message", "messages")
    if len(messages) > MESSAGES_MAX:
        raise bad_request(f"{len(messages)} messages in one request; the limit is {MESSAGES_MAX}", "messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def for_template(messages: Messages, body: ChatBody, template: str) -> tuple[Messages, list[Any] | None]:
    """``messages`` and the tools of ``body``, as this chat template can read them.

    Tool calls become text where the template does not support them, and tools a part of the system message.
    """
    if not _template_reads(template, "tool_calls"):
        messages = [_with_calls_as_text(message) if "tool_calls" in message else message for message in messages]
    tools = check_tools(body.tools)
    if not tools or body.tool_choice == "none":
        return messages, None
    if not _template_reads(template, "tools"):
        return _with_instructions(messages, as_instructions(tools, json.dumps)), None
    return messages, tools


def _with_instructions(messages: Messages, instructions: str) -> Messages:
    """In the system message: the first, or one of its own."""
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def check_rendered(messages: Messages, text: str) -> None:
    """Raises :class:`ApiError` 400 when the template left out a tool's output: the answer would ignore it."""
    for index, message in enumerate(messages):
        content = message["content"].strip()
        if message["role"] == "tool" and content not in text and json.dumps(content)[1:-1] not in text:
            reason = "This model's chat template leaves out messages of role 'tool': use role 'user'"
            raise bad_request(reason, f"messages[{index}]")


def _template_reads(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message["tool_calls"]
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"], *calls] if message["content"] else calls)}


def _check_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"'{path}' must be an object with role and content", path)
    extra = {key: value for key, value in message.items() if key not in _FIELDS and value is not None}
    if len(extra) > EXTRA_FIELDS_MAX:
        raise bad_request(f"'{path}' has {len(extra)} unknown fields; the limit is {EXTRA_FIELDS_MAX}", path)
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= ROLE_CHARS_MAX:
        raise bad_request(f"'{path}.role' must be a text, such as {', '.join(_ROLES)}", f"{path}.role")
    if message.get("audio"):
        raise unsupported(path, "Audio")
    checked: dict[str, Any] = {
        **extra,
        "role": _ROLES.get(role, role),
        "content": _content(message.get("content"), role, f"{path}.content"),
    }
    for name in _TEXTS:
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise bad_request(f"'{path}.{name}' must be a string", f"{path}.{name}")
            checked["reasoning_content" if name == "reasoning" else name] = value
    if calls := _calls(message, role, path):
        checked["tool_calls"] = calls
    return checked


def _calls(message: dict[str, Any], role: str, path: str) -> list[dict[str, Any]]:
    calls, old = message.get("tool_calls"), message.get("function_call")
    if not calls and not old:
        return []
    if role != "assistant":
        raise bad_request(f"'{path}': only the assistant calls tools", path)
    if calls and not isinstance(calls, list):
        raise bad_request(f"'{path}.tool_calls' must be a list", f"{path}.tool_calls")
    if not calls:
        return [_call({"function": old}, f"{path}.function_call")]
    return [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, path: str) -> dict[str, Any]:
    """One call. OpenAI writes its arguments as a string of JSON, templates want them as an object."""
    function = call.get("function") if isinstance(call, dict) and call.get("type") in (None, "function") else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not call.keys() <= _CALL_FIELDS:
        like = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
        raise bad_request(f"'{path}' must be an object like {like}", path)
    if not isinstance(call.get("id"), str | None):
        raise bad_request(f"'{path}.id' must be a string", f"{path}.id")
    function_fields = {"name": function["name"], "arguments": _arguments(function.get("arguments"), path)}
    identified = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identified, "type": "function", "function": function_fields}


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"'{path}.function.arguments' must be a JSON object in a string", path)
    return value


def _content(content: Any, role: str, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise bad_request(f"'{path}' must be a string or a list of text parts", path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f"'{path}' must be an object like {{'type': 'text', 'text': ...}}", path)
    kind = part["type"]
    if kind not in ("text", "refusal"):
        feature = next((f"{name} (content of type {kind!r})" for mark, name in _SENSES.items() if mark in kind), None)
        raise unsupported(path, feature or f"Content of type {kind!r}")
    if not isinstance(part.get(kind), str):
        raise bad_request(f"'{path}.{kind}' must be a string", f"{path}.{kind}")
    text: str = part[kind]
    return text
