"""Compiles a graph to a step: one flat Python function, or one that runs natively between its foreign operations.

A graph interpreter spends microseconds per node on looking things up. The function written here holds every operation,
constant and argument in a variable of its own and drops each value after its last use, so a step costs what its
operations cost. It reads like Python written by hand: see :attr:`Program.source`.

The native step is equally flat; it calls ``run(begin, end, ...)`` where the plain one calls operations. Native values
that torch must see (attention's queries, keys, values) are views of the workspace, made once for each number of rows
and kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from memserve import _kernels
from memserve.base.errors import check
from memserve.model.capture import operations as fused
from memserve.model.capture.lower import Lowered
from memserve.model.capture.passes import Node
from memserve.model.capture.record import attend
from memserve.model.capture.storage import TOKENS, Buffer, External, StoragePlace, Workspace
from memserve.model.lora import adapt
from memserve.model.states.recurrence import run_operation

_LITERALS = (int, float, bool, str, type(None))
_ALWAYS = 1 << 60  # a value that torch may keep a view of: its room is never reused
_VIEW_SETS_MAX = 64  # (tokens, logits rows) with kept views; making them costs about a hundred microseconds


@dataclass(frozen=True)
class Program:
    """A compiled graph: ``run(*inputs)`` in the order of its placeholders."""

    run: Callable[..., Tensor]
    source: str


class Names:
    """Objects that the function refers to, each under one short name."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self.rename: dict[fx.Node, str] = {}  # values that are not in a variable with their node's name
        self._names: dict[int, str] = {}

    def name_of(self, thing: Any, prefix: str) -> str:
        """The name of ``thing``; a new name begins with ``prefix``."""
        if id(thing) not in self._names:
            self._names[id(thing)] = f"{prefix}{len(self._names)}"
            self.namespace[self._names[id(thing)]] = thing
        return self._names[id(thing)]


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
    """For each node, the computed values that no later node reads."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    dies_at: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.users:
            dies_at[max(node.users, key=order.__getitem__)].append(node)
    return dies_at


def call_text(node: fx.Node, names: Names) -> str:
    """The call that a node stands for."""
    if node.target is fused.linear:
        return f"{names.name_of(node.args[1], 'linear')}({value_text(node.args[0], names)})"
    positional = [value_text(arg, names) for arg in node.args]
    if node.target is run_operation:
        return f"{positional[0]}({', '.join(positional[1:])})"
    keywords = [f"{key}={value_text(arg, names)}" for key, arg in node.kwargs.items()]
    return f"{names.name_of(node.target, 'op')}({', '.join(positional + keywords)})"


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
    return names.name_of(arg, "arg")


# -- native steps


class NativeStep:
    """``step(input_ids, positions, logits_rows)`` for up to ``rows_max`` tokens and logits rows."""

    def __init__(self, graph: fx.Graph, lowered: Lowered, rows_max: int) -> None:
        self.rows_max = rows_max
        self.operations = len(lowered.ops)
        workspace = Workspace(rows_max)
        _find_lifetimes(lowered)
        _assign_room(lowered, workspace)
        self._workspace = torch.empty(workspace.elements, dtype=lowered.dtype)
        self._program = _kernels.Program()
        writer = _Writer(graph, lowered, self._program, self._workspace)
        self._step, self.source = writer.write_step()
        self._viewed = writer.viewed
        self._alive = lowered  # the program knows weights by address only
        self._views: dict[tuple[int, int], list[Tensor]] = {}

    def use_collective(self, collective: _kernels.Collective) -> None:
        """Take sums over the workers of ``collective`` from now on."""
        self._program.join(collective)

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """See :class:`memserve.model.forward.Forward`; the result may lie in the workspace until the next step."""
        sizes = (input_ids.shape[0], logits_rows.shape[0])
        views = self._views.get(sizes)
        if views is None:
            if len(self._views) >= _VIEW_SETS_MAX:
                self._views.clear()
            views = [place.as_tensor(self._workspace, sizes[place.count != TOKENS]) for place in self._viewed]
            self._views[sizes] = views
        self._program.start(*sizes)
        logits: Tensor = self._step(views, input_ids, positions, logits_rows)
        inside = logits.untyped_storage().data_ptr() == self._workspace.data_ptr()
        return logits.clone() if inside else logits


def _find_lifetimes(lowered: Lowered) -> None:
    for node, now in lowered.order.items():
        if node in lowered.ops:
            places, last = lowered.ops[node].reads, now
        elif node in lowered.places:
            continue  # a view reads nothing by itself
        else:
            places = [lowered.places[i] for i in node.all_input_nodes if i in lowered.places]
            # these keep no view of what they read
            last = now if node.target in (attend, adapt, run_operation) else _ALWAYS
        for place in places:
            if isinstance(place.buffer, Buffer):
                place.buffer.last_read = max(place.buffer.last_read, last)


def _assign_room(lowered: Lowered, workspace: Workspace) -> None:
    for node, now in lowered.order.items():
        if node in lowered.ops:
            for place in lowered.ops[node].writes:
                workspace.assign_room(place.buffer)
        workspace.release_dead(now)


class _Writer:
    """Writes the function and fills the program, in the graph's order."""

    def __init__(self, graph: fx.Graph, lowered: Lowered, program: Any, workspace: Tensor) -> None:
        self._graph, self._lowered, self._program = graph, lowered, program
        self._base, self._item_bytes = workspace.data_ptr(), workspace.element_size()
        self._names = Names()
        self._names.namespace["run"] = program.run
        self._lines: list[tuple[str, list[Node]]] = []  # text, foreign values that it reads
        self._externals: list[External] = []
        self._written = 0  # operations of the program that have been run so far
        self._announced = 0  # externals with an address that the program has
        self._torch_views: set[Node] = set()
        self.viewed: list[StoragePlace] = []

    def write_step(self) -> tuple[Callable[..., Tensor], str]:
        """The compiled function ``step(views, *inputs)`` and its text."""
        inputs = [node.name for node in self._graph.nodes if node.op == "placeholder"]
        for node in self._lowered.order:
            if node.op == "get_attr":
                self._names.namespace[node.name] = node.meta["value"]
            elif node in self._lowered.ops:
                self._lowered.ops[node].add(self._program, self._address_of)
            elif node.op == "output" or (node.op == "call_function" and node not in self._lowered.places):
                self._write_foreign(node)
        text = "".join(f"    {line}\n" for line in self._with_deletions())
        source = f"def step(views, {', '.join(inputs)}):\n{text}"
        exec(compile(source, "<captured forward>", "exec"), self._names.namespace)
        return self._names.namespace["step"], source

    def _address_of(self, place: StoragePlace | None) -> int:
        if place is None:
            return 0
        if isinstance(place.buffer, Buffer):
            return int(self._base + (place.buffer.offset + place.offset) * self._item_bytes)
        check(place.offset == 0, "a part of a foreign tensor cannot be read natively")
        if place.buffer.index < 0:
            place.buffer.index = len(self._externals)
            self._externals.append(place.buffer)
        return -1 - int(place.buffer.index)

    def _write_foreign(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if any(i in self._lowered.places and isinstance(self._lowered.places[i].buffer, Buffer) for i in inputs):
            self._write_run()
        for source in inputs:
            self._make_torch_view(source)
        reads = [i for i in inputs if i not in self._names.rename]
        text = f"return {value_text(node.args[0], self._names)}" if node.op == "output" else ""
        self._lines.append((text or f"{node.name} = {call_text(node, self._names)}", reads))

    def _make_torch_view(self, node: Node) -> None:
        """Make sure that a foreign operation finds ``node``: native values in ``views``, foreign views by torch."""
        place = self._lowered.places.get(node)
        if place is None or node in self._names.rename or node in self._torch_views:
            return
        if isinstance(place.buffer, Buffer):
            self._names.rename[node] = f"views[{len(self.viewed)}]"
            self.viewed.append(place)
        else:
            self._torch_views.add(node)
            self._write_foreign(node)

    def _write_run(self) -> None:
        """Run the operations added since the last run."""
        end = len(self._program)
        if end == self._written:
            return
        new = self._externals[self._announced :]
        for external in new:
            self._lines.append((f"{external.node.name} = {external.node.name}.contiguous()", []))
        addresses = ", ".join(f"{external.node.name}.data_ptr()" for external in new)
        read = {place.buffer for op in self._ops_between(self._written, end) for place in op.reads}
        nodes = [buffer.node for buffer in read if isinstance(buffer, External)]
        self._lines.append((f"run({self._written}, {end}, {self._announced}, [{addresses}])", nodes))
        self._written, self._announced = end, len(self._externals)

    def _ops_between(self, begin: int, end: int) -> list[Any]:
        return list(self._lowered.ops.values())[begin:end]

    def _with_deletions(self) -> list[str]:
        """The lines, each followed by the deletion of the foreign values that no later line reads."""
        last = {node: i for i, (_, reads) in enumerate(self._lines) for node in reads}
        dies: dict[int, list[str]] = defaultdict(list)
        for node, line in last.items():
            if node.op == "call_function":
                dies[line].append(node.name)
        lines: list[str] = []
        for i, (text, _) in enumerate(self._lines):
            lines.append(text)
            if dies[i] and not text.startswith("return"):
                lines.append(" = ".join(sorted(dies[i])) + " = None")
        return lines
