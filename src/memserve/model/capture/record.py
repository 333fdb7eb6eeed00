"""Recording a model's forward as a graph of aten operations.

transformers' modules cost 6 to 8 ms of Python for a step of thirty layers, and hide what could be fused. So the
forward is run twice at load under a dispatch mode that records every operation, at two distinctive sizes. What differs
between the two recordings is a size: an integer that is ``3 * 11`` in one and ``3 * 17`` in the other is ``3 * T``.
Everything else must be equal; otherwise the capture is refused, and the model runs as it is.

In inference mode the dispatcher sees whole operations (``linear``, ``silu``), not their decompositions, and attention
is one opaque node: the recording is short (53 operations per Llama layer) and close to the author's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from memserve.model import lora as adapting
from memserve.model.attention.context import current_attention, step_attention
from memserve.model.experts import recorded_experts, run_experts
from memserve.model.states.layers import step_states
from memserve.model.states.recurrence import RecordedStates, StateOperation, run_operation
from memserve.model.workers import group as crew

aten = torch.ops.aten


class CaptureRefused(Exception):
    """This forward cannot be recorded as one graph; the message says why."""


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, options: dict[str, Any]) -> Tensor:
    """The opaque attention node: ``q [1, H, T, Dk]`` -> ``[1, T, H, Dv]``, by the running step's attention."""
    return current_attention().run_attention(layer, q, k, v, **options)


def size_of(x: Tensor, dim: int) -> int:
    """The graph's source of sizes: ``T`` and ``R`` are read from the inputs once per step."""
    return x.shape[dim]


@dataclass(frozen=True)
class Trace:
    """One recording. ``node.meta["value"]`` is each node's value; constants are ``get_attr`` nodes."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its base
    """Appends each dispatched operation to a graph. Tensors are known by identity and kept alive until the end."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor its constructor
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        self._paused = False
        self._constants = 0
        self._fixed: set[fx.Node] = set()  # they do not depend on the inputs
        self._random = torch.Generator(next(iter(inputs.values())).device).manual_seed(0)
        self.inputs = tuple(self._remember_value(self.graph.placeholder(name), value) for name, value in inputs.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.linear.default and not self.is_fixed(args[0]):
            result = self._fake_linear(*args)
        else:
            result = func(*args, **(kwargs or {}))
        if not self._paused:
            self._record_call(func, args, kwargs or {}, result)
        return result

    def _fake_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Stands in for the product, most of a forward's time: random numbers, because only shapes matter here."""
        return self._random_like((*x.shape[:-1], weight.shape[0]), x)

    def _random_like(self, shape: Sequence[int], x: Tensor) -> Tensor:
        return torch.randn(shape, generator=self._random, device=x.device).to(x.dtype)

    def is_fixed(self, value: Tensor) -> bool:
        node = self._nodes.get(id(value))
        return node is None or node.op == "get_attr" or node in self._fixed

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Stands in for the step's attention: one node, and zeros, because only shapes matter here."""
        self._paused = True
        expansion = options.get("expansion")
        dim = v.shape[3] if expansion is None else expansion.value_dim
        mixed = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dim)
        self._paused = False
        self._record_call(attend, (q, k, v, layer, options), {}, mixed)
        return mixed

    def run_experts(self, x: Tensor, index: Tensor, weights: Tensor, module: Any) -> Tensor:
        """Stands in for experts, as for a product: one node, and random numbers."""
        self._paused = True
        result = self._random_like(x.shape, x)
        self._paused = False
        self._record_call(run_experts, (x, index, weights, module), {}, result)
        return result

    def record_operation(self, operation: StateOperation, inputs: tuple[Tensor, ...], shape: Any, dtype: Any) -> Tensor:
        """Stands in for a function over states, as for a product: one node, and random numbers."""
        self._paused = True
        result = self._random_like(shape, inputs[0]).to(dtype)
        self._paused = False
        self._record_call(run_operation, (operation, *inputs), {}, result)
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        """Stands in for the other workers of the instance, as the next two do: one node, and a value of that shape."""
        return self._record_exchange(crew.all_reduce, x)

    def receive(self, x: Tensor) -> Tensor:
        """See :meth:`all_reduce`."""
        return self._record_exchange(crew.receive, x)

    def send(self, x: Tensor) -> Tensor:
        """See :meth:`all_reduce`."""
        return self._record_exchange(crew.send, x)

    def adapt_output(self, y: Tensor, x: Tensor, site: int) -> Tensor:
        """Stands in for the adapters of a step: one node, which :func:`without_adapters` leaves out."""
        self._paused = True
        result = y.clone()
        self._paused = False
        self._record_call(adapting.adapt, (y, x, site), {}, result)
        return result

    def _record_exchange(self, target: Any, x: Tensor) -> Tensor:
        self._paused = True
        result = x.clone()
        self._paused = False
        self._record_call(target, (x,), {}, result)
        return result

    def node_of(self, value: Any) -> Any:
        """The node that made a tensor; one that no node made is a constant (weight, buffer, lifted number)."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            node = self.graph.create_node("get_attr", f"c{self._constants}")
            self._constants += 1
            self._remember_value(node, value)
        return self._nodes[id(value)]

    def _remember_value(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["value"] = value
        self._nodes[id(value)] = node
        self._alive.append(value)
        return node

    def _record_call(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        node = self._add_call(func, map_aggregate(args, self.node_of), map_aggregate(kwargs, self.node_of))
        node.meta["value"] = result
        if isinstance(result, Tensor):
            self._remember_value(node, result)
        elif isinstance(result, tuple | list) and all(isinstance(part, Tensor) for part in result):
            for index, part in enumerate(result):
                self._remember_value(self._add_call(item_of, (node, index), {}), part)
            self._alive.append(result)
        elif result is not None:
            raise CaptureRefused(f"{func} turns tensor values into Python values, and what follows may depend on them")

    def _add_call(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(func, args, kwargs)
        if all(origin.op == "get_attr" or origin in self._fixed for origin in node.all_input_nodes):
            self._fixed.add(node)
        return node


def item_of(values: tuple[Tensor, ...], index: int) -> Tensor:
    """One of the results of an operation that returns several."""
    return values[index]


def record(forward: Callable[..., Tensor], inputs: dict[str, Tensor], states: RecordedStates | None = None) -> Trace:
    """Run ``forward(**inputs)`` and record it; ``states``: of layers that have some. Raises :class:`CaptureRefused`."""
    with torch.inference_mode():
        recorder = _Recorder(inputs)
        with (
            step_states(states),
            nullcontext() if states is None else states.recorded_by(recorder),
            step_attention(recorder),
            crew.collectives(recorder),
            adapting.lora_adapters(recorder),
            recorded_experts(recorder),
            recorder,
        ):
            result = forward(**inputs)
        recorder.graph.output(recorder.node_of(result))
    return Trace(recorder.graph, recorder.inputs)


def generalise(first: Trace, second: Trace, sizes: dict[tuple[int, int], tuple[fx.Node, int]]) -> fx.Graph:
    """Rewrite ``first`` so that it holds for every size.

    ``sizes`` maps a pair (size in ``first``, size in ``second``) to the input node of ``first`` and its dimension
    which carry that size. Raises :class:`CaptureRefused` where the two recordings differ in anything else.
    """
    twins = dict(zip(second.graph.nodes, first.graph.nodes, strict=False))
    if len(first.graph.nodes) != len(second.graph.nodes):
        raise CaptureRefused("the number of operations depends on the number of tokens")
    with first.graph.inserting_after(first.inputs[-1]):
        carriers = {pair: first.graph.call_function(size_of, origin) for pair, origin in sizes.items()}
    for second_node, node in twins.items():
        if (node.op, node.target) != (second_node.op, second_node.target) or not _same_constant(node, second_node):
            raise CaptureRefused(f"{node} differs between two runs")
        merge = _Merge(first.graph, node, twins, carriers)
        node.args = merge(node.args, second_node.args)
        node.kwargs = merge(node.kwargs, second_node.kwargs)
    first.graph.lint()
    return first.graph


def _same_constant(a: fx.Node, b: fx.Node) -> bool:
    if a.op != "get_attr":
        return True
    x, y = a.meta["value"], b.meta["value"]
    return x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))


class _Merge:
    """Merges the arguments of one operation seen at two sizes."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, twins: dict[fx.Node, fx.Node], carriers: dict[tuple[int, int], fx.Node]
    ) -> None:
        self._graph, self._node, self._twins, self._carriers = graph, node, twins, carriers

    def __call__(self, first: Any, second: Any) -> Any:
        if not isinstance(first, tuple | list | dict):
            return self._merge_leaf(first, second)
        if type(first) is not type(second) or len(first) != len(second):
            raise self._other_form()
        if not (isinstance(first, dict) and isinstance(second, dict)):
            merged = [self(a, b) for a, b in zip(first, second, strict=True)]
            return tuple(merged) if isinstance(first, tuple) else merged
        if first.keys() != second.keys():
            raise self._other_form()
        return {key: self(value, second[key]) for key, value in first.items()}

    def _other_form(self) -> CaptureRefused:
        return CaptureRefused(f"the arguments of {self._node} change their form with the number of tokens")

    def _merge_leaf(self, a: Any, b: Any) -> Any:
        if isinstance(b, fx.Node):
            b = self._twins[b]
        if type(a) is type(b) and (a is b or a == b or a != a):
            return a
        if type(a) is int and type(b) is int:
            for (size, other_size), carrier in self._carriers.items():
                if a % size == 0 and a // size * other_size == b:
                    return self._scale_node(carrier, a // size)
        raise CaptureRefused(f"{self._node} has the argument {a} at one size and {b} at another")

    def _scale_node(self, carrier: fx.Node, factor: int) -> fx.Node:
        if factor == 1:
            return carrier
        with self._graph.inserting_before(self._node):
            return self._graph.call_function(times, (carrier, factor))


def without_adapters(graph: fx.Graph) -> fx.Graph | None:
    """A copy of ``graph`` that knows nothing of adapters; ``None``: ``graph`` itself knows nothing of them."""
    if not any(node.target is adapting.adapt for node in graph.nodes):
        return None
    plain = fx.Graph()
    plain.output(plain.graph_copy(graph, {}))
    for node in list(plain.nodes):
        if node.target is adapting.adapt:
            node.replace_all_uses_with(node.args[0])
            plain.erase_node(node)
    plain.lint()
    return plain


def times(size: int, factor: int) -> int:
    """A size that is a multiple of another one."""
    return size * factor
