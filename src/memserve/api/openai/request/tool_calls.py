"""Calls out of what a model writes, piece by piece.

    text -> CallReader -> content that is shown, calls that begin, and pieces of their arguments

A mark that may be the beginning of a call is held back until it is one or is not. Arguments are passed on as they come:
they are the model's own text, cut out of the call around it.

Which calls a request asks for: tools and ``tool_choice``, checked.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

from memserve.api.http.errors import bad_request

TOOLS_MAX, CALLS_MAX = 128, 16


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What an answer's calls may be."""

    tools: tuple[dict[str, Any], ...]
    """As OpenAI has them: each with a ``function``."""
    forced: bool = False
    """The answer is calls and nothing else: ``required``, or a named function."""
    function_name: str = ""
    """The one function that is called; the answer is its arguments. Empty: the model chooses."""
    parallel: bool = True
    style: str = "hermes"
    """How the model writes calls (:data:`memserve.api.openai.request.tool_calls.STYLES`)."""

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of a forced answer; ``None``: it is not forced."""
        if not self.forced:
            return None
        defs: dict[str, Any] = {}
        calls = []
        for tool in self.tools:
            name, parameters = tool["function"]["name"], dict(tool["function"].get("parameters") or {"type": "object"})
            defs |= parameters.pop("$defs", {})  # references name the root
            if name == self.function_name:
                return parameters | ({"$defs": defs} if defs else {})
            fields = {"name": {"const": name}, "parameters": parameters}
            closed = {"required": ["name", "parameters"], "additionalProperties": False}
            calls.append({"type": "object", "properties": fields, **closed})
        most = CALLS_MAX if self.parallel else 1
        listed = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
        return listed | ({"$defs": defs} if defs else {})


def check_tools(tools: Any) -> list[Any]:
    """The tools of a request. Raises :class:`ApiError` 400 for what is no list of functions."""
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise bad_request(f"'tools' must be a list of at most {TOOLS_MAX} functions", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"'tools[{index}]' must be an object like {{'type': 'function', 'function': {{'name': ...}}}}"
            raise bad_request(message, f"tools[{index}]")
        if not isinstance(function.get("parameters") or {}, dict):
            raise bad_request(f"'tools[{index}].function.parameters' must be a JSON schema", f"tools[{index}]")
    return tools


def call_plan(tools: Any, choice: Any, *, parallel: bool = True, style: str = "hermes") -> CallPlan | None:
    """``None``: the answer has no calls. Raises :class:`ApiError` 400 for a choice that no tool meets."""
    checked = tuple(check_tools(tools))
    if choice is None or choice in ("none", "auto"):
        return CallPlan(checked, parallel=parallel, style=style) if checked and choice != "none" else None
    if not checked:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if choice == "required":
        return CallPlan(checked, forced=True, parallel=parallel, style="array")
    name = _named_function(choice)
    if name not in [tool["function"]["name"] for tool in checked]:
        raise bad_request(f"tool_choice: no tool is named {name[:100]!r}", "tool_choice")
    return CallPlan(checked, forced=True, function_name=name, parallel=False, style="named")


def _named_function(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        like = '{"type": "function", "function": {"name": ...}}'
        raise bad_request(f"tool_choice must be none, auto, required, or an object like {like}", "tool_choice")
    return name


def style_of(template: str) -> str:
    """How a model with this chat template writes calls: named by the marks in it."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or "ipython" in template:
        return "llama3"
    return "hermes"


def as_instructions(tools: list[Any], dumps: Any) -> str:
    """The tools as a text for models whose chat template has no place for them, in Hermes' form."""
    listed = "\n".join(dumps(tool) for tool in tools)
    return (
        "You may call one or more functions to answer. These are their signatures:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "For each call, write a JSON object with name and arguments within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
    )


@dataclass(frozen=True, slots=True)
class Style:
    """How a family of models writes calls."""

    begin: tuple[str, ...]
    """Marks before calls; the text before the first is content."""
    end: str = ""
    """The mark after which content goes on. Empty: none does."""
    only_first: bool = False
    """A mark counts at the very beginning of the text alone."""
    keeps_mark: bool = False
    """The mark is a part of the call."""


STYLES = {
    "hermes": Style(("<tool_call>",), "</tool_call>"),
    "qwen": Style(("<tool_call>",), "</tool_call>"),
    "mistral": Style(("[TOOL_CALLS]",)),
    "llama3": Style(("<|python_tag|>", "{"), only_first=True, keeps_mark=True),
    "array": Style(("",)),
}
"""By the names of ``--tool-call-parser``; ``array``: what a grammar forces upon any model."""

_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_BARE_HEAD = re.compile(r"([\w.-]+)(?:\[ARGS\])?\s*(?=\{)")
"""Of newer Mistral models: a name before its arguments."""
_BETWEEN = " \t\r\n,;[]"
HEAD_CHARS_MAX = 2000
"""What is no call by then is content."""


@dataclass(slots=True)
class ToolCall:
    """One call: known by its name, and complete when the text has gone on."""

    index: int
    name: str
    arguments: str = ""
    call_id: str = ""

    def __post_init__(self) -> None:
        self.call_id = self.call_id or f"call_{uuid.uuid4().hex[:24]}"

    def as_json(self) -> dict[str, Any]:
        """As OpenAI writes it in a whole answer."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallPiece:
    """News: content, or thoughts, or arguments of a call, with its beginning if it begins here."""

    content: str = ""
    call: ToolCall | None = None
    begins: bool = False
    arguments: str = ""
    reasoning: str = ""


class _Value:
    """Finds the end of one JSON value in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find_end(self, text: str) -> int | None:
        """How much of ``text`` still belongs to the value; ``None``: all of it, and perhaps more."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if not self._depth:
                        return index + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if not self._depth:
                    return index  # of the object around a bare value
                self._depth -= 1
                if not self._depth:
                    return index + 1
            elif not self._depth and char == ",":
                return index
        return None


class CallReader:
    """Reads the text of one sequence. :attr:`calls` are those that have begun."""

    def __init__(self, plan: CallPlan) -> None:
        self._plan = plan
        self._style = STYLES.get(plan.style)
        self.calls: list[ToolCall] = []
        self._text = ""  # held back
        self._within = plan.style == "array"
        self._value: _Value | None = None  # of arguments
        self._opening = True  # no content, no mark yet
        self._wrapped = False  # the arguments stand in an object that ends after them

    def push_text(self, text: str) -> list[CallPiece]:
        """What ``text`` adds."""
        if self._style is None:  # the whole answer is one call's arguments
            return self._take_bare_arguments(text)
        self._text += text
        pieces: list[CallPiece] = []
        while self._take_next(pieces):
            pass
        return pieces

    def flush_pieces(self) -> list[CallPiece]:
        """What was held back is content, except where calls are forced."""
        rest, self._text = self._text, ""
        if not rest or self._plan.forced or self._value is not None or (self._within and not rest.strip(_BETWEEN)):
            return []
        return [CallPiece(rest)]

    def _take_bare_arguments(self, text: str) -> list[CallPiece]:
        if not text:
            return []
        begins = not self.calls
        if begins:
            if not (text := text.lstrip()):
                return []
            self.calls.append(ToolCall(0, self._plan.function_name))
        self.calls[0].arguments += text
        return [CallPiece(call=self.calls[0], begins=begins, arguments=text)]

    def _take_next(self, pieces: list[CallPiece]) -> bool:
        """Take something off the held text; False: more of it must come first."""
        if self._value is not None:
            return self._take_arguments(pieces)
        return self._take_call(pieces) if self._within else self._take_content(pieces)

    def _take_content(self, pieces: list[CallPiece]) -> bool:
        style = self._style
        assert style is not None
        if style.only_first:
            stripped = self._text.lstrip()
            if self._opening and any(mark.startswith(stripped[: len(mark)]) for mark in style.begin):
                mark = next((mark for mark in style.begin if stripped.startswith(mark)), None)
                if mark is None:
                    return False
                self._text = stripped.removeprefix("<|python_tag|>")
                self._within, self._opening = True, False
                return True
            self._opening = self._opening and not stripped
            return self._show_content(pieces, len(self._text))
        (mark,) = style.begin
        offset = self._text.find(mark)
        if offset >= 0:
            self._show_content(pieces, offset)
            self._text, self._within = self._text[len(mark) :], True
            return True
        pending_chars = next(
            (n for n in range(min(len(mark) - 1, len(self._text)), 0, -1) if self._text.endswith(mark[:n])), 0
        )
        return self._show_content(pieces, len(self._text) - pending_chars)

    def _show_content(self, pieces: list[CallPiece], chars: int) -> bool:
        shown, self._text = self._text[:chars], self._text[chars:]
        if self.calls and not shown.strip():  # a line between calls
            return False
        if shown:
            pieces.append(CallPiece(shown))
        return False

    def _take_call(self, pieces: list[CallPiece]) -> bool:
        style = self._style
        assert style is not None
        self._text = self._text.lstrip(_BETWEEN + ("}" if self._wrapped else ""))
        if not self._text:
            return False
        if style.end:
            if self._text.startswith(style.end):
                self._text, self._within, self._wrapped = self._text[len(style.end) :], False, False
                return True
            if style.end.startswith(self._text):
                return False
        head = _HEAD.match(self._text)
        bare = None if head or self._plan.style != "mistral" else _BARE_HEAD.match(self._text)
        match = head or bare
        if match is None:
            if len(self._text) > HEAD_CHARS_MAX and not self._plan.forced:
                pieces.append(CallPiece(self._text))
                self._text, self._within = "", False
            return False
        name = json.loads(f'"{match.group(1)}"') if head else match.group(1)
        self._text, self._value, self._wrapped = self._text[match.end() :], _Value(), head is not None
        self.calls.append(ToolCall(len(self.calls), name))
        pieces.append(CallPiece(call=self.calls[-1], begins=True))
        return True

    def _take_arguments(self, pieces: list[CallPiece]) -> bool:
        assert self._value is not None
        if not self.calls[-1].arguments:
            self._text = self._text.lstrip()
        if not self._text:
            return False
        end = self._value.find_end(self._text)
        arguments, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
        if arguments:
            self.calls[-1].arguments += arguments
            pieces.append(CallPiece(call=self.calls[-1], arguments=arguments))
        if end is not None:
            self._value = None
        return end is not None
