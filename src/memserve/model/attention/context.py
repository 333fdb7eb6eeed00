"""The step context, and our attention function in transformers' attention interface, which reads it.

Families differ in the keyword arguments that they pass to their attention function; some drop unknown ones. So the
device installs the step's attention here, and the function registered with transformers picks it up. It is kept per
thread: each device has its own thread, so two devices in one process never see each other's step.

The function is called once per layer, in order, after rotary embedding and key/query norms. No mask function is
registered with it: transformers then builds no mask at all ("for TGI/vLLM backends"), and causality, windows and paging
are left to the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from memserve.base.errors import InvariantError, check

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

ATTENTION_NAME = "memserve"
"""Give this as ``attn_implementation`` to ``from_pretrained``."""
CHUNK_ATTRIBUTE = "memserve_chunk"
"""Of a layer that reads the tokens of its chunk alone: how many one has."""
EXPANSION_ATTRIBUTE = "memserve_expansion"
"""Of a layer that keeps latents: its :class:`~memserve.model.attention.expansions.Expansion`."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, and where their KV lies. All arrays are int32."""

    tables: NDArray[np.int32] | Tensor
    """``[slots, max_blocks]``: block ids. A tensor lies on the arena's device already."""
    table_rows: NDArray[np.int32]
    """``[rows]``: which row of ``tables`` belongs to each."""
    q_starts: NDArray[np.int32]
    """``[rows + 1]``: where the queries of each begin, and where those of the last one end."""
    contexts: NDArray[np.int32]
    """``[rows]``: tokens of each sequence after this step."""


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Where in a block the pages of some layers lie, which are not all that it has."""

    first_byte: int
    block_bytes: int


class StepAttention(Protocol):
    """One step's ragged batch, seen by one layer after the other in model order.

    This is the place for everything that happens per layer. Code that loads, saves or places KV by layer wraps a
    ``StepAttention`` in another one, which waits for layer ``l`` before the inner call or sends it afterwards; see
    :class:`ReportingAttention`.
    """

    def run_attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """Write this step's ``k, v`` into the pages of ``layer``, then attend causally over the paged context.

        Shapes: ``q [1, H, T, Dk]``, ``k [1, Hkv, T, Dk]``, ``v [1, Hkv, T, Dv]``, any strides with a dense last
        dimension, dtype of the KV cache; ``sinks`` ``[H]``, any float dtype. Returns ``[1, T, H, Dv]``, contiguous.
        ``T`` may be more than the batch has tokens: the surplus is not written, and its results are zeros.
        ``window`` > 0: attend only to the last ``window`` positions, its own included. ``chunk`` > 0: only to positions
        of its own chunk of so many. ``softcap`` > 0: ``s = softcap * tanh(s / softcap)``. ``sinks``: one more logit per
        head, in the softmax's denominator only.

        Layers that keep latents pass an ``expansion`` as well, of
        :mod:`memserve.model.attention.expansions`, which a step for their pages takes. Then ``k [1, 1, T, Dl + Dr]``
        has latents and rotary keys, ``v [1, 1, T, Dl]`` is their beginning; ``Dk``, ``Dv`` are of queries and results.
        """


class _Context(threading.local):
    attention: StepAttention | None = None


_context = _Context()


@contextmanager
def step_attention(attention: StepAttention) -> Iterator[None]:
    """Make ``attention`` the current step's for this thread."""
    outer = _context.attention
    _context.attention = attention
    try:
        yield
    finally:
        _context.attention = outer


def is_in_step() -> bool:
    """Whether a step runs in this thread."""
    return _context.attention is not None


def current_attention() -> StepAttention:
    """The running step's attention. Raises :class:`InvariantError` outside a step."""
    attention = _context.attention
    if attention is None:
        raise InvariantError("attention was called outside a step: wrap the forward in `attending(...)`")
    return attention


class ReportingAttention:
    """A step's attention that reports when the K and V of a layer are written, so that they can be sent while the next
    layers are computed (MemServe 5.2, by layer). For a CPU, where they are written when ``attend`` returns."""

    def __init__(
        self,
        attention: StepAttention,
        written: Callable[[int], None],
        every: int = 1,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """``every``: tell of each Nth layer; what comes behind the last of them the end of the step tells. ``meet``
        returns when all workers of the instance have written theirs."""
        self._attention = attention
        self._written = written
        self._every = every
        self._barrier = meet

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`StepAttention.run_attention`."""
        mixed = self._attention.run_attention(layer, q, k, v, **options)
        if (layer + 1) % self._every == 0:
            self._barrier()
            self._written(layer)
        return mixed


class OrderedAttention:
    """A step's attention for a model in which not every layer attends, or one module does in several: the first call
    is layer 0's, the next one layer 1's."""

    def __init__(self, attention: StepAttention, first: int = 0) -> None:
        """``first``: the number of the first layer that attends here; those before are another worker's."""
        self._attention = attention
        self._layers = first

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`StepAttention.run_attention`; ``layer`` says nothing."""
        self._layers += 1
        return self._attention.run_attention(self._layers - 1, q, k, v, **options)


class AbsentAttention:
    """A step's attention for a model without layers that attend."""

    def __init__(self, rows: StepRows) -> None:
        """As of other steps."""

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        """Raises :class:`InvariantError`."""
        raise InvariantError(f"layer {layer} attends, and the probe has not seen it")


# -- transformers' interface


def memserve_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: ``query [1, H, T, Dk]`` -> ``([1, T, H, Dv], None)``. A layer that keeps
    latents passes them as ``key``, and its rotary key as ``value``."""
    check(attention_mask is None, "transformers built an attention mask although none is registered for memserve")
    options: dict[str, Any] = {}
    if (expansion := getattr(module, EXPANSION_ATTRIBUTE, None)) is not None:
        latents = key
        key = expansion.join_latents(latents, value)
        value = key[..., : latents.shape[3]]
        options["expansion"] = expansion
    if chunk := getattr(module, CHUNK_ATTRIBUTE, 0):
        options["chunk"] = chunk
    mixed = current_attention().run_attention(
        module.layer_idx,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
        **options,
    )
    return mixed, None


def register_attention() -> None:
    """Make ``attn_implementation="memserve"`` known to transformers (may be called again)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, memserve_attention)
