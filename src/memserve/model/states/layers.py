"""Layers with a recurrent state, run on a ragged batch by transformers' own modules.

Such a module takes a whole batch of equally long pieces, and transformers' cache, from which it gets the states before
its piece and to which it gives those behind it. A step has rows of all lengths, one after the other: so the module is
called once for all rows of a single token, and once for each piece of a longer row, and in place of the cache it gets
the states of just these rows (:class:`LayerStates`). Outside a step the module computes as it always did.

Some modules ignore the state before a piece of several tokens (Mamba's first version, in torch): the probe notices, and
here they get one token after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from memserve.base.errors import InvariantError
from memserve.base.states import NO_STATE, StateGeometry, StateShare
from memserve.model.lora import adapters_of_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_ATTRIBUTE = "memserve_states"

PartKey = tuple[str, int]
"""Kind of a part (:class:`~memserve.base.states.StatePart`), and which of its kind in the layer."""


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A module that carries a state."""

    module: Any
    argument: str
    """The keyword by which it gets its cache."""
    parts: dict[PartKey, int]
    """Its parts, by their number in the geometry."""
    one_by_one: bool = False
    """Behind a state it takes one token at a time."""


@dataclass(frozen=True, slots=True)
class StateLayers:
    """All of a model's, in the order in which they compute."""

    geometry: StateGeometry = NO_STATE
    layers: tuple[StateLayer, ...] = ()
    weights_alone: frozenset[int] = field(default_factory=frozenset)
    """Ids of linears that no layer calls: their weights are used as they are, and must stay so."""
    returning: dict[str, int] = field(default_factory=dict)
    """How many values modules return, by name; those that return one are left out."""
    attending: tuple[int | None, ...] = ()
    """The numbers by which layers attend, in order; a module that does in several of them may have none."""
    share: StateShare | None = None
    """Of one of several workers: ``geometry`` is what it has, as the layers know it. None: it is the whole."""

    def __bool__(self) -> bool:
        return bool(self.layers)


_NONE = StateLayers()


def states_of(module: Any) -> StateLayers:
    """The layers of ``module`` with a state, as :func:`install_states` was told."""
    layers = getattr(module, _ATTRIBUTE, _NONE)
    return layers if isinstance(layers, StateLayers) else _NONE


def keep_share(module: Any, layers: StateLayers) -> None:
    """``layers``: what a worker has of those that are installed."""
    setattr(module, _ATTRIBUTE, layers)


def install_states(module: Any, layers: StateLayers) -> None:
    """From now on these layers of ``module`` compute with the states of the step that runs in their thread."""
    setattr(module, _ATTRIBUTE, layers)
    for layer in layers.layers:
        layer.module.forward = partial(_run_layer, layer, layer.module.forward)


class LayerStates:
    """The states of some sequences in one layer, by the calls of transformers' ``Cache`` that such layers make."""

    def __init__(self, parts: dict[PartKey, Tensor], *, is_fresh: bool) -> None:
        """``parts [sequences, *shape]``, which are changed in place. ``is_fresh``: no token came before; then only what
        is written counts."""
        self._parts = parts
        self._is_fresh = is_fresh

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Inputs of a convolution before this piece, ``[sequences, channels, tokens]``. None: there were none."""
        return None if self._is_fresh else self._parts.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What was added up before this piece, ``[sequences, ...]``. None: nothing was."""
        return None if self._is_fresh else self._parts.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The inputs before and of this piece together, at least as many as are kept."""
        kept = self._parts["conv", state_idx]
        size = kept.shape[-1]
        if not self._is_fresh:
            whole = torch.cat([kept, conv_states], dim=-1)
        else:
            whole = torch.nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        kept.copy_(whole[..., -size:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep what is added up behind this piece."""
        return self._parts["recurrent", state_idx].copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether tokens came before."""
        return not self._is_fresh

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether inputs are kept beyond need."""
        return False


class StatePieces:
    """Which tokens of a step belong to which state, for operations that compute over states where they lie."""

    __slots__ = ("_alive", "_table", "address", "count", "tokens")

    def __init__(self, rows: list[tuple[int, int, int, int, bool]], tokens: int, alive: Any = None) -> None:
        """``rows``: tokens ``[begin, end)`` of the step, addresses of the state before them (0: none) and of the one
        behind them, and whether several tokens come at once: see ``src/kernels/recurrent.h``. ``tokens``: of all;
        ``alive``: what owns the memory."""
        self._table, self._alive = np.array(rows, np.int64).reshape(-1, 5), alive
        self.address, self.count, self.tokens = self._table.ctypes.data, len(rows), tokens

    def without_surplus(self, y: Tensor) -> Tensor:
        """``y [1, T, ...]``, in which tokens that no piece has are zeros from here on."""
        if y.shape[1] > self.tokens:
            y[:, self.tokens :].zero_()
        return y


class StepStates(Protocol):
    """One step's states, seen by one layer after the other in model order."""

    def run_layer(self, layer: StateLayer, hidden: Tensor, calls: LayerCalls) -> Tensor:
        """``hidden [1, T, size]`` -> the same shape, and the states behind the step's tokens."""


class PiecedStates(StepStates, Protocol):
    """One step's states, for layers that are operations of a captured forward."""

    @property
    def pieces(self) -> StatePieces:
        """Of the whole step."""


class _Context(threading.local):
    states: StepStates | None = None


_context = _Context()


@contextmanager
def step_states(states: StepStates | None) -> Iterator[None]:
    """Make ``states`` the current step's for this thread. None: layers compute as they are."""
    outer = _context.states
    _context.states = states
    try:
        yield
    finally:
        _context.states = outer


def current_states() -> PiecedStates:
    """The running step's states. Raises :class:`InvariantError` outside a step."""
    states = _context.states
    if states is None:
        raise InvariantError("a layer with a state computes outside a step")
    return cast("PiecedStates", states)


class LayerCalls:
    """Calls a layer's own forward for some of a step's tokens."""

    def __init__(
        self, layer: StateLayer, forward: Any, args: tuple[Any, ...], options: dict[str, Any], tokens: int
    ) -> None:
        """``args`` and ``options``: what the layer got beside its hidden states, of a step of so many ``tokens``."""
        self._layer, self._forward, self._args, self._options = layer, forward, args, options
        self._tokens = tokens

    def call_rows(self, hidden: Tensor, tokens: Tensor | None, states: LayerStates) -> Tensor:
        """Rows of a single token: ``[rows, 1, size]``. ``tokens [rows]``: where they are in the step; None: they are
        all that it has, in order."""
        numbers = None if tokens is None else tokens.cpu().numpy()
        return self._call(hidden, states, lambda value: _rows_of(value, tokens, self._tokens), numbers)

    def call_piece(self, hidden: Tensor, begin: int, end: int, states: LayerStates, *, is_fresh: bool) -> Tensor:
        """Tokens ``[begin, end)`` of the step, which are one sequence's: ``[1, end - begin, size]``."""
        if not self._layer.one_by_one or is_fresh or end - begin == 1:
            tokens = np.arange(begin, end)
            return self._call(hidden, states, lambda value: _piece_of(value, begin, end, self._tokens), tokens)
        outputs = [
            self.call_piece(hidden[:, place - begin : place - begin + 1], place, place + 1, states, is_fresh=False)
            for place in range(begin, end)
        ]
        return torch.cat(outputs, dim=1)

    def call_whole(self, hidden: Tensor, states: Any) -> Tensor:
        """All tokens of the step as one sequence. ``states``: what the layer gets as its cache."""
        options = self._options | {self._layer.argument: states}
        output: Tensor = self._forward(hidden, *self._args, **options)
        return output

    def _call(
        self, hidden: Tensor, states: LayerStates, cut: Callable[[Any], Any], tokens: NDArray[np.int64] | None
    ) -> Tensor:
        """``tokens``: of the step, by their numbers; None: all."""
        options = {name: cut(value) for name, value in self._options.items()}
        options[self._layer.argument] = states
        with nullcontext() if tokens is None else adapters_of_tokens(tokens):
            output: Tensor = self._forward(hidden, *map(cut, self._args), **options)
        return output


class LoneStates:
    """The states of one sequence that comes in pieces, one after the other."""

    def __init__(self, geometry: StateGeometry, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of all parts; None: each has its own."""
        self._geometry, self._dtype = geometry, dtype
        self._parts: dict[int, Tensor] = {}  # by number, as soon as a layer has computed

    def run_layer(self, layer: StateLayer, hidden: Tensor, calls: LayerCalls) -> Tensor:
        """See :meth:`StepStates.run_layer`: all of ``hidden`` is one piece."""
        is_fresh = not all(number in self._parts for number in layer.parts.values())
        for number in layer.parts.values() if is_fresh else ():
            part = self._geometry.parts[number]
            dtype = self._dtype or getattr(torch, part.dtype)
            self._parts[number] = torch.zeros((1, *part.shape), dtype=dtype, device=hidden.device)
        states = LayerStates({key: self._parts[number] for key, number in layer.parts.items()}, is_fresh=is_fresh)
        return calls.call_piece(hidden, 0, hidden.shape[1], states, is_fresh=is_fresh)

    def copy_states(self) -> LoneStates:
        """The same sequence once more, which goes its own way from here."""
        copy = LoneStates(self._geometry, self._dtype)
        copy._parts = {number: part.clone() for number, part in self._parts.items()}
        return copy


def _run_layer(layer: StateLayer, forward: Any, *args: Any, **options: Any) -> Any:
    """Stands for ``layer.module.forward``."""
    states = _context.states
    if states is None:
        return forward(*args, **options)
    hidden = options.pop("hidden_states") if not args else args[0]
    return states.run_layer(layer, hidden, LayerCalls(layer, forward, args[1:], options, hidden.shape[1]))


def _piece_of(value: Any, begin: int, end: int, tokens: int) -> Any:
    """What belongs to tokens ``[begin, end)`` of a step of an argument beside the hidden states."""
    if isinstance(value, tuple):
        return tuple(_piece_of(inner, begin, end, tokens) for inner in value)
    return value[:, begin:end] if _is_by_token(value, tokens) else value


def _rows_of(value: Any, places: Tensor | None, tokens: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_rows_of(inner, places, tokens) for inner in value)
    if not _is_by_token(value, tokens):
        return value
    rows = value.transpose(0, 1)
    return rows if places is None else rows.index_select(0, places)


def _is_by_token(value: Any, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens)
