"""From a graph to one flat Python function (level 3).

A graph interpreter spends microseconds a node on looking things up. The function written here holds every operation,
constant and argument in a variable of its own and forgets each value after its last use, so a step costs what its
operations cost. It is Python that one could have written by hand: see :attr:`Program.source`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from memserve.model.capture import fused

_LITERALS = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Program:
    """A compiled graph: ``run(*inputs)`` in the order of its placeholders."""

    run: Callable[..., Tensor]
    source: str


class Names:
    """Objects that the function refers to, each under one short name."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self.rename: dict[fx.Node, str] = {}  # values that are not variables of their node's name
        self._known: dict[int, str] = {}

    def of(self, thing: Any, prefix: str) -> str:
        """The name of ``thing``, one that begins with ``prefix`` if it is new."""
        if id(thing) not in self._known:
            self._known[id(thing)] = f"{prefix}{len(self._known)}"
            self.namespace[self._known[id(thing)]] = thing
        return self._known[id(thing)]


def emit(graph: fx.Graph) -> Program:
    """Compile ``graph``; its nodes run in their order."""
    names = Names()
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    dies_at = _last_uses(graph)
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"{node.name} = {call_text(node, names)}")
        elif node.op == "get_attr":
            names.namespace[node.name] = node.meta["value"]
        elif node.op == "output":
            lines.append(f"return {value_text(node.args[0], names)}")
        if dies_at[node] and node.op != "output":
            lines.append(" = ".join(dead.name for dead in dies_at[node]) + " = None")
    source = f"def step({', '.join(inputs)}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<captured forward>", "exec"), names.namespace)
    return Program(names.namespace["step"], source)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the computed values that nobody reads after it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    dies_at: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.users:
            dies_at[max(node.users, key=order.__getitem__)].append(node)
    return dies_at


def call_text(node: fx.Node, names: Names) -> str:
    """The call that a node stands for."""
    if node.target is fused.linear:
        return f"{names.of(node.args[1], 'linear')}({value_text(node.args[0], names)})"
    positional = [value_text(arg, names) for arg in node.args]
    named = [f"{key}={value_text(arg, names)}" for key, arg in node.kwargs.items()]
    return f"{names.of(node.target, 'op')}({', '.join(positional + named)})"


def value_text(arg: Any, names: Names) -> str:
    """An argument: a variable, a literal, a container of both, or an object under a name."""
    if isinstance(arg, fx.Node):
        return names.rename.get(arg, arg.name)
    if isinstance(arg, list | tuple):
        inner = ", ".join(value_text(part, names) for part in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner},)"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{key!r}: {value_text(value, names)}" for key, value in arg.items()) + "}"
    if type(arg) in _LITERALS and arg == arg and arg not in (float("inf"), float("-inf")):
        return repr(arg)
    return names.of(arg, "arg")
