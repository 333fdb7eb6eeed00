"""Which calls a request asks for: tools and ``tool_choice``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memserve.api.errors import bad_request

TOOLS_MAX, CALLS_MAX = 128, 16


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What an answer's calls may be."""

    tools: tuple[dict[str, Any], ...]
    """As OpenAI has them: each with a ``function``."""
    forced: bool = False
    """The answer is calls and nothing else: ``required``, or a named function."""
    named: str = ""
    """The one function that is called; the answer is its arguments. Empty: the model chooses."""
    parallel: bool = True
    style: str = "hermes"
    """How the model writes calls (:data:`memserve.api.tools.parse.STYLES`)."""

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of a forced answer; ``None``: it is not forced."""
        if not self.forced:
            return None
        defs: dict[str, Any] = {}
        calls = []
        for tool in self.tools:
            name, parameters = tool["function"]["name"], dict(tool["function"].get("parameters") or {"type": "object"})
            defs |= parameters.pop("$defs", {})  # references name the root
            if name == self.named:
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
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"'tools[{at}]' must be an object like {{'type': 'function', 'function': {{'name': ...}}}}"
            raise bad_request(message, f"tools[{at}]")
        if not isinstance(function.get("parameters") or {}, dict):
            raise bad_request(f"'tools[{at}].function.parameters' must be a JSON schema", f"tools[{at}]")
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
    name = _named(choice)
    if name not in [tool["function"]["name"] for tool in checked]:
        raise bad_request(f"tool_choice: no tool is named {name[:100]!r}", "tool_choice")
    return CallPlan(checked, forced=True, named=name, parallel=False, style="named")


def _named(choice: Any) -> str:
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
