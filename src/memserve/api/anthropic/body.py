"""The body of ``POST /v1/messages``, and the chat that it asks for.

Where a block has ``cache_control``, the prompt's KV is kept up to its end. How many tokens that are shows in a second
rendering of the same chat, with a mark at the end of each such block.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType

from memserve.api.http.errors import bad_request, unsupported
from memserve.api.openai.request.schema import (
    AnswerBody,
    ChatBody,
    SessionName,
    StopText,
    TokenCountOrZero,
    Ttl,
    body_of,
)

BREAKPOINTS_MAX = 4
"""Blocks with ``cache_control`` in one request."""
TTLS_S = {"5m": 300.0, "1h": 3600.0}
_MARK = f"mark{secrets.token_hex(16)}x"
MARKS = re.compile(_MARK + "([0-9])x")
"""Stand where kept prefixes end, each with its number: no client can know them."""

Json = dict[str, Any]
Fields = dict[str, Any]


class MessagesBody(AnswerBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = (
        *AnswerBody.NO_EFFECT, "metadata", "container", "context_management", "diagnostics", "inference_geo", "speed",
        "user_profile_id", "workspace_id",
    )  # fmt: skip

    messages: list[Any] | UnsetType = UNSET
    """The conversation: objects with `role` (user, assistant, system) and `content`: a text, or blocks of type `text`,
    `tool_use`, `tool_result`, `thinking`. A last message of the assistant is continued."""
    max_tokens: TokenCountOrZero | None = None
    """Longest answer. Required, except to count tokens. 0: compute the prompt's KV, and answer nothing."""
    system: Any = None
    """What comes before the conversation: a text, or blocks of text."""
    stop_sequences: Annotated[list[StopText], Meta(max_length=32)] | None = None
    """The answer ends before the first of these that appears."""
    tools: list[Any] | None = None
    """Functions of the client's that the model may call: `name`, `description`, `input_schema`. Tools that a server
    runs, and Anthropic's own, are refused."""
    tool_choice: dict[str, Any] | None = None
    """`{"type": ...}`: `auto`, `any`, `none`, or `tool` with its `name`; with `disable_parallel_tool_use` at most one
    call."""
    thinking: dict[str, Any] | None = None
    """`{"type": ...}`: `enabled` or `adaptive`: a model that can, thinks before it answers; `disabled`, the default: it
    does not, where its chat template can tell it so. `budget_tokens` has no effect."""
    output_config: dict[str, Any] | None = None
    """`format`: `{"type": "json_schema", "schema": ...}`: the form of the answer. `effort`: a variable of the chat
    template."""
    cache_control: dict[str, Any] | None = None
    """As in the last block: keep the KV of the whole prompt."""

    # Tolerated: they cannot change the answer here.
    metadata: dict[str, Any] | None = None
    """Accepted, no effect."""
    container: Any = None
    """Accepted, no effect."""
    context_management: Any = None
    """Accepted, no effect: nothing is taken out of the conversation."""
    diagnostics: Any = None
    """Accepted, no effect."""
    inference_geo: str | None = None
    """Accepted, no effect."""
    speed: str | None = None
    """Accepted, no effect."""
    user_profile_id: str | None = None
    """Accepted, no effect."""
    workspace_id: str | None = None
    """Accepted, no effect."""

    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chats."""
    session: SessionName | None = None
    """As in chats."""
    session_ttl_s: Ttl | None = None
    """As in chats."""


_AS_IN_CHATS = (*AnswerBody.__struct_fields__, "chat_template_kwargs", "session", "session_ttl_s")


@dataclass(slots=True)
class Breakpoints:
    """The ends of prefixes that a request asks to keep, in the order of its blocks."""

    is_marking: bool = False
    """Whether texts are to have a mark at these ends."""
    ttls_s: list[float] = field(default_factory=list)

    def end_block(self, block: Json, text: str, path: str) -> str:
        """``text`` of ``block``, with a mark where the block asks for it: before spaces, which templates may strip."""
        if (control := block.get("cache_control")) is None:
            return text
        self.ttls_s.append(_ttl_s(control, f"{path}.cache_control"))
        if len(self.ttls_s) > BREAKPOINTS_MAX:
            message = f"more than {BREAKPOINTS_MAX} blocks have cache_control"
            raise bad_request(message, f"{path}.cache_control")
        end = len(text.rstrip())
        return f"{text[:end]}{_MARK}{len(self.ttls_s) - 1}x{text[end:]}" if self.is_marking else text


def _ttl_s(control: Any, path: str) -> float:
    ttl = control.get("ttl") or "5m" if isinstance(control, dict) and control.get("type") == "ephemeral" else None
    if not isinstance(ttl, str) or ttl not in TTLS_S:
        raise bad_request(f"'{path}' must be an object like {{'type': 'ephemeral', 'ttl': '5m' or '1h'}}", path)
    return TTLS_S[ttl]


def chat_of(body: MessagesBody, model: str, breakpoints: Breakpoints) -> ChatBody:
    """The chat that ``body`` asks for. Raises :class:`ApiError` 400 naming the block at fault."""
    tools = _tools(body.tools, breakpoints)
    messages = [*_system(body.system, breakpoints), *_messages(body.messages, breakpoints)]
    if body.cache_control is not None:  # of all blocks
        breakpoints.ttls_s.append(_ttl_s(body.cache_control, "cache_control"))
    fields: Fields = {name: getattr(body, name) for name in _AS_IN_CHATS if getattr(body, name) is not None}
    fields |= {"model": model, "messages": messages, "tools": tools, "max_completion_tokens": body.max_tokens or 1}
    if body.stop_sequences:
        strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
        fields["stop"] = [*strings, *body.stop_sequences]
    if messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    fields |= _tool_choice(body.tool_choice) | _output_fields(body.output_config or {})
    fields["chat_template_kwargs"] = _thinking(body.thinking) | (body.chat_template_kwargs or {})
    return body_of(fields, ChatBody)


def _tools(tools: list[Any] | None, breakpoints: Breakpoints) -> list[Json] | None:
    functions = []
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise bad_request(f"'{path}' must be an object with name and input_schema", path)
        if tool.get("type") not in (None, "custom"):
            raise unsupported(path, f"A tool of type {str(tool['type'])[:100]!r}")
        name, about, schema = tool.get("name"), tool.get("description") or "", tool.get("input_schema")
        if not isinstance(name, str) or not isinstance(about, str) or not isinstance(schema, dict):
            raise bad_request(f"'{path}' must have a name and an input_schema, a JSON schema", path)
        function: Json = {"name": name, "description": breakpoints.end_block(tool, about, path), "parameters": schema}
        functions.append({"type": "function", "function": function})
    return functions or None


def _tool_choice(choice: dict[str, Any] | None) -> Fields:
    if choice is None:
        return {}
    fields: Fields = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    match choice:
        case {"type": "auto" | "none" as kind}:
            return {**fields, "tool_choice": kind}
        case {"type": "any"}:
            return {**fields, "tool_choice": "required"}
        case {"type": "tool", "name": str(name)}:
            return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}
    raise bad_request("tool_choice.type must be auto, any, none, or tool with its name", "tool_choice")


def _output_fields(config: dict[str, Any]) -> Fields:
    fields: Fields = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
    form = config.get("format")
    if form is None:
        return fields
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise bad_request("output_config.format.type must be json_schema", "output_config.format")
    return {**fields, "response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}


def _thinking(thinking: dict[str, Any] | None) -> Fields:
    """The variables by which templates tell a model to think, or not to."""
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise bad_request("thinking.type must be enabled, adaptive or disabled", "thinking.type")
    thinks = kind in ("enabled", "adaptive")
    return {"enable_thinking": thinks, "thinking": thinks}


def _system(system: Any, breakpoints: Breakpoints) -> list[Json]:
    content = _texts(system, "system", breakpoints, separator="\n\n") if system else ""
    return [{"role": "system", "content": content}] if content else []


def _messages(messages: Any, breakpoints: Breakpoints) -> list[Json]:
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must hold at least one message", "messages", "missing_required_parameter")
    chat: list[Json] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"'{path}.role' must be user, assistant or system", f"{path}.role")
        if role == "system":
            _append(chat, {"role": role, "content": _texts(content, f"{path}.content", breakpoints)})
            continue
        for block, place in _blocks(content, f"{path}.content"):
            for part in _block_messages(role, block, place, breakpoints):
                _append(chat, part)
    if not chat:
        raise bad_request("'messages' have no block that a model could read", "messages")
    return chat


def _append(chat: list[Json], message: Json) -> None:
    """Turns of one role in a row are one turn."""
    last = chat[-1] if chat else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        chat.append(message)
        return
    last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    if "reasoning_content" in message:
        last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]


def _blocks(content: Any, path: str) -> list[tuple[Json, str]]:
    """Each block with its path; a text is one."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)]
    if not isinstance(content, list) or not content:
        raise bad_request(f"'{path}' must be a text or a list of blocks", path)
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise bad_request(f"'{path}[{index}]' must be an object with type", f"{path}[{index}]")
    return [(block, f"{path}[{index}]") for index, block in enumerate(content)]


def _block_messages(role: str, block: Json, path: str, breakpoints: Breakpoints) -> list[Json]:
    kind = block.get("type")
    match role, kind:
        case _, "text":
            return [{"role": role, "content": breakpoints.end_block(block, _string(block, "text", path), path)}]
        case "user", "tool_result":
            return [_tool_result(block, path, breakpoints)]
        case "assistant", "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise bad_request(f"'{path}.input' must be an object", f"{path}.input")
            name = breakpoints.end_block(block, _string(block, "name", path), path)
            call = {"id": _string(block, "id", path), "type": "function"}
            called = {**call, "function": {"name": name, "arguments": arguments}}
            return [{"role": role, "content": "", "tool_calls": [called]}]
        case "assistant", "thinking":
            return [{"role": role, "content": "", "reasoning_content": _string(block, "thinking", path)}]
        case "assistant", "redacted_thinking":
            return []
    raise unsupported(path, f"Content of type {str(kind)[:100]!r} of the {role}")


def _tool_result(block: Json, path: str, breakpoints: Breakpoints) -> Json:
    content = block.get("content")
    text = _texts(content, f"{path}.content", breakpoints) if content else ""
    text = f"Error: {text}" if block.get("is_error") else text
    call_id = _string(block, "tool_use_id", path)
    return {"role": "tool", "tool_call_id": call_id, "content": breakpoints.end_block(block, text, path)}


def _texts(content: Any, path: str, breakpoints: Breakpoints, separator: str = "\n") -> str:
    """The text of ``content`` that may have no other blocks."""
    texts = []
    for block, place in _blocks(content, path):
        if block.get("type") != "text":
            raise unsupported(place, f"Content of type {str(block.get('type'))[:100]!r}")
        texts.append(breakpoints.end_block(block, _string(block, "text", place), place))
    return separator.join(texts)


def _string(block: Json, name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"'{path}.{name}' must be a text", f"{path}.{name}")
    return value
