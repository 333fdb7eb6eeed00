"""What recurrent layers compute between their linears, as operations of a captured forward.

transformers writes such a layer as linears, norms and a few functions that have fast implementations elsewhere: a
causal convolution, the gated delta rule, Mamba-2's scan. While a forward is recorded, each of these functions is one
operation (:class:`Convolution`, :class:`DeltaRule`, :class:`Scan`), which computes a whole ragged step natively over
the states of its rows; everything around them is recorded as anywhere else. A function is known by its name and
arguments in the layer's own module, which state it changes by the calls that the layer makes to its cache, and that
all of it computes what the layer does by the comparison of the captured forward with its module. What is not recognised
is refused, and the model's layers run as they are.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memserve import _kernels
from memserve.model.states.layers import PartKey, StateLayer, StateLayers, current_states

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SILU = ("silu", "swish")


class NotRecognised(Exception):
    """A layer computes something that is no operation here; the message says what."""


class StateOperation:
    """One function of one layer. Its part of a state begins ``offset`` bytes behind that, once it is known."""

    def __init__(self, *facts: Any) -> None:
        """``facts``: what two recordings of the same function have in common."""
        self.facts, self.offset = (type(self), *facts), -1
        self.shape: tuple[int, ...] = ()

    def bind_part(self, shape: tuple[int, ...], offset: int) -> None:
        """``shape``: of the part, for one sequence."""
        self.shape, self.offset = shape, offset


class Convolution(StateOperation):
    """A causal convolution over tokens, each channel by itself."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
        """``weight [channels, taps]``, ``bias [channels]``."""
        super().__init__(tuple(weight.shape), bias is None, activation)
        if not 2 <= weight.shape[1] <= _kernels.TAPS_MAX:
            raise NotRecognised(f"a convolution over {weight.shape[1]} tokens")
        if activation is not None and activation not in _SILU:
            raise NotRecognised(f"a convolution with {activation}")
        self._weight = weight.detach().float().t().contiguous().clone()
        self._bias = None if bias is None else bias.detach().float().clone()
        self._has_silu, self.taps = activation is not None, weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """``x [1, T, channels]`` -> the same shape."""
        x = x if x.stride(2) == 1 else x.contiguous()
        y, pieces = torch.empty(x.shape, dtype=x.dtype), current_states().pieces
        taps, channels = self._weight.shape
        _kernels.convolve(
            x.data_ptr(), x.stride(1), self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(),
            y.data_ptr(), channels, taps, self.shape[1], self._has_silu,
            pieces.address, pieces.count, self.offset, DTYPE_CODES[x.dtype],
        )  # fmt: skip
        return pieces.without_surplus(y)


class DeltaRule(StateOperation):
    """The gated delta rule (arXiv:2412.06464), with one state for each value head."""

    def __init__(self, *, normalises: bool) -> None:
        """``normalises``: queries and keys are divided by their length."""
        super().__init__(normalises)
        self._normalises = normalises

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """``q, k [1, T, key heads, key_dim]``, ``v [1, T, heads, value_dim]``, ``decay [1, T, heads]`` float32, ``beta
        [1, T, heads]`` -> ``[1, T, heads, value_dim]``."""
        q, k, v, decay, beta = _dense_heads(q), _dense_heads(k), _dense_heads(v), _dense(decay), _dense(beta)
        y, pieces = torch.empty(v.shape, dtype=q.dtype), current_states().pieces
        _kernels.delta_rule(
            q.data_ptr(), q.stride(1), k.data_ptr(), k.stride(1), v.data_ptr(), v.stride(1),
            decay.data_ptr(), decay.stride(1), beta.data_ptr(), beta.stride(1), y.data_ptr(),
            q.shape[2], v.shape[2], q.shape[3], v.shape[3], self._normalises,
            pieces.address, pieces.count, self.offset, DTYPE_CODES[q.dtype],
        )  # fmt: skip
        return pieces.without_surplus(y)


class Scan(StateOperation):
    """Mamba-2's scan (arXiv:2405.21060)."""

    def __init__(
        self, decay: Tensor, skip: Tensor | None, dt_bias: Tensor | None, limits: tuple[float, float], *, softplus: bool
    ) -> None:
        """``decay, skip, dt_bias [heads]``; ``limits``: of a time step, where several tokens come at once."""
        super().__init__(limits, softplus, skip is None, dt_bias is None)
        self._decay, self._skip, self._dt_bias = (
            None if value is None else value.detach().float().contiguous().clone() for value in (decay, skip, dt_bias)
        )
        self._limits, self._softplus = limits, softplus

    def __call__(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """``x [1, T, heads, head_dim]``, ``dt [1, T, heads]``, ``b, c [1, T, groups, state_size]`` -> ``[1, T, heads,
        head_dim]`` float32."""
        x, dt, b, c = _dense_heads(x), _dense(dt), _dense_heads(b), _dense_heads(c)
        y, pieces = torch.empty(x.shape, dtype=torch.float32), current_states().pieces
        decay, skip, dt_bias = (
            0 if value is None else value.data_ptr() for value in (self._decay, self._skip, self._dt_bias)
        )
        _kernels.scan(
            x.data_ptr(), x.stride(1), dt.data_ptr(), dt.stride(1), b.data_ptr(), b.stride(1), c.data_ptr(),
            c.stride(1), decay, skip, dt_bias, y.data_ptr(), x.shape[2], b.shape[2], x.shape[3], b.shape[3],
            self._softplus, *self._limits, pieces.address, pieces.count, self.offset, DTYPE_CODES[x.dtype],
        )  # fmt: skip
        return pieces.without_surplus(y)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _dense_heads(x: Tensor) -> Tensor:
    is_dense = x.stride(3) == 1 and (x.stride(2) == x.shape[3] or x.shape[2] == 1)
    return x if is_dense else x.contiguous()


def run_operation(operation: Any, *inputs: Tensor) -> Tensor:
    """The node of a graph: what ``operation`` makes of its inputs, with the states of the running step."""
    result: Tensor = operation(*inputs)
    return result


# -- recording


class OperationRecorder(Protocol):
    """What records a forward."""

    def record_operation(self, operation: StateOperation, inputs: tuple[Tensor, ...], shape: Any, dtype: Any) -> Tensor:
        """One node, and a value of that shape."""

    def is_fixed(self, value: Any) -> bool:
        """Whether ``value`` does not depend on the inputs."""


class RecordedStates:
    """A :class:`~memserve.model.states.layers.StepStates` for the recordings of one model, each of a whole sequence."""

    def __init__(self, layers: StateLayers) -> None:
        self._geometry = layers.geometry
        self._operations: dict[tuple[int, int], StateOperation] = {}  # by module, and place in its forward
        self._recorder: OperationRecorder | None = None

    @contextmanager
    def recorded_by(self, recorder: OperationRecorder) -> Iterator[None]:
        """Around one recording."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def run_layer(self, layer: StateLayer, hidden: Tensor, calls: Any) -> Tensor:
        """See :class:`~memserve.model.states.layers.StepStates`. Raises :class:`NotRecognised`."""
        if self._recorder is None:
            raise NotRecognised("states are recorded elsewhere")
        recorded = _RecordedLayer(layer, self._recorder, self._operations)
        with _stand_ins(layer.module, recorded):
            output: Tensor = calls.call_whole(hidden, recorded)
        recorded.bind_parts(self._geometry)
        return output


class _RecordedLayer:
    """Stands in for one layer's cache, in which there is nothing yet, and for its functions."""

    def __init__(
        self, layer: StateLayer, recorder: OperationRecorder, operations: dict[tuple[int, int], StateOperation]
    ) -> None:
        self._layer, self._recorder, self._operations = layer, recorder, operations
        self._calls = 0
        self._convolved: dict[int, PartKey] = {}  # by the id of what is convolved
        self._added: dict[int, StateOperation] = {}  # by the id of the state that its caller gets
        self._alive: list[Any] = []  # ids are theirs
        self._parts: dict[PartKey, StateOperation] = {}

    # the cache

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._convolved[id(conv_states)] = "conv", state_idx
        self._alive.append(conv_states)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        operation = self._added.pop(id(recurrent_states), None)
        if operation is None:
            raise NotRecognised("a state that no operation has made")
        self._bind(("recurrent", state_idx), operation)
        return recurrent_states

    # the functions

    def convolve(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        key = self._convolved.pop(id(hidden_states), None)
        if key is None:
            raise NotRecognised("a convolution of what is not kept")
        self._check_fixed(weight, bias)
        operation = self._operation(Convolution(weight, bias, activation))
        self._bind(key, operation)
        x = hidden_states.transpose(1, 2)
        return self._recorder.record_operation(operation, (x,), x.shape, x.dtype).transpose(1, 2)

    def apply_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool
    ) -> tuple[Tensor, Tensor]:
        if not query.dtype == key.dtype == value.dtype == beta.dtype:
            raise NotRecognised("a delta rule of several dtypes")
        operation = self._operation(DeltaRule(normalises=bool(use_qk_l2norm_in_kernel)))
        inputs = query, key, value, g.float(), beta
        output = self._recorder.record_operation(operation, inputs, value.shape, query.dtype)
        return output, self._state_of(operation)

    def scan(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
        dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], return_final_states: bool,
    ) -> Any:  # fmt: skip
        if not hidden_states.dtype == dt.dtype == B.dtype == C.dtype:
            raise NotRecognised("a scan of several dtypes")
        if any(value is not None and value.dim() != 1 for value in (A, D, dt_bias)):
            raise NotRecognised("a scan whose heads have several factors")
        self._check_fixed(A, D, dt_bias)
        least, most = (float(limit) for limit in dt_limit)
        operation = self._operation(Scan(A, D, dt_bias, (least, most), softplus=bool(dt_softplus)))
        inputs = hidden_states, dt, B, C
        output = self._recorder.record_operation(operation, inputs, hidden_states.shape, torch.float32)
        return (output, self._state_of(operation)) if return_final_states else output

    def bind_parts(self, geometry: Any) -> None:
        """All functions have been called: tell each operation which part of a state is its own."""
        if self._parts.keys() != self._layer.parts.keys():
            raise NotRecognised(f"{type(self._layer.module).__name__} does more with its states than is known here")
        model_dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in self._layer.module.parameters()}
        for key, operation in self._parts.items():
            number = self._layer.parts[key]
            part = geometry.parts[number]
            if part.dtype not in (("float32",) if key[0] == "recurrent" else model_dtypes):
                raise NotRecognised(f"a state of {part.dtype}")
            if isinstance(operation, Convolution) and part.shape[-1] - operation.taps not in (-1, 0):
                raise NotRecognised(f"a convolution that keeps {part.shape[-1]} inputs")
            operation.bind_part(part.shape, geometry.offsets[number])

    def _operation(self, operation: StateOperation) -> StateOperation:
        """The one of the first recording, in later ones."""
        place = id(self._layer.module), self._calls
        self._calls += 1
        first = self._operations.setdefault(place, operation)
        if first.facts != operation.facts:
            raise NotRecognised("the functions of a layer depend on the number of tokens")
        return first

    def _bind(self, key: PartKey, operation: StateOperation) -> None:
        if key in self._parts or key not in self._layer.parts:
            raise NotRecognised("a state that several functions change")
        self._parts[key] = operation

    def _state_of(self, operation: StateOperation) -> Tensor:
        state = torch.empty(0)
        self._added[id(state)] = operation
        self._alive.append(state)
        return state

    def _check_fixed(self, *values: Tensor | None) -> None:
        if not all(value is None or self._recorder.is_fixed(value) for value in values):
            raise NotRecognised("weights that depend on the tokens")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _RecordedLayer.convolve,
    "torch_chunk_gated_delta_rule": _RecordedLayer.apply_delta_rule,
    "mamba2_chunk_scan": _RecordedLayer.scan,
}
"""By their names in transformers' modules; arguments have the names that they have there."""

_recording = threading.Lock()
"""One recording at a time changes what a class's functions are."""
_recorded: ContextVar[_RecordedLayer | None] = ContextVar("recorded_layer", default=None)


@contextmanager
def _stand_ins(module: Any, recorded: _RecordedLayer) -> Iterator[None]:
    """Inside, the functions that the forward of ``module`` finds are those of ``recorded``; in this thread alone."""
    names = inspect.unwrap(type(module).forward).__globals__
    with _recording:
        originals = {name: names[name] for name in _FUNCTIONS if name in names}
        token = _recorded.set(recorded)
        names.update({name: partial(_call_recorded, name, original) for name, original in originals.items()})
        try:
            yield
        finally:
            names.update(originals)
            _recorded.reset(token)


def _call_recorded(name: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    recorded, stand_in = _recorded.get(), _FUNCTIONS[name]
    if recorded is None:  # another thread computes with the same class
        return original(*args, **options)
    bound = inspect.signature(inspect.unwrap(original)).bind(*args, **options)
    bound.apply_defaults()
    wanted = list(inspect.signature(stand_in).parameters)[1:]
    if bound.arguments.get("initial_state") is not None or bound.arguments.get("initial_states") is not None:
        raise NotRecognised(f"{name} goes on from a state")
    if missing := [argument for argument in wanted if argument not in bound.arguments]:
        raise NotRecognised(f"{name} has no {', '.join(missing)}")
    return stand_in(recorded, **{argument: bound.arguments[argument] for argument in wanted})
