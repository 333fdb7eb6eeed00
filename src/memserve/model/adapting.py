"""LoRA adapters: each row of a step is computed with the adapter of its request, or with none.

``y = W x`` becomes ``y = W x + scale * B (A x)`` in the linears that an adapter names. The base's weights are there
once, whatever the number of adapters. Rows of many adapters share a step: the base's product is one, and each adapter
adds to its own rows. A step without such rows runs the forward that knows nothing of adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memserve.errors import UserError
from memserve.model.linears import PackedLinear
from memserve.model.loading.adapter import WEIGHTS, Adapter

_KEY = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")

Halves = tuple[Tensor, Tensor]
"""``A [r, k]`` and ``scale * B [n, r]``."""
Pair = tuple[PackedLinear, PackedLinear]
"""Both, packed."""


class StepAdapters(Protocol):
    """What one step's rows add to linears."""

    def adapt(self, y: Tensor, x: Tensor, site: int) -> Tensor:
        """``y [..., n]`` of the base at ``site`` for ``x [..., k]``, with what adapters add; a new tensor. The
        dimensions in front are the batch's tokens."""


class _Context(threading.local):
    adapters: StepAdapters | None = None


_context = _Context()


@contextmanager
def adapting(adapters: StepAdapters | None) -> Iterator[None]:
    """Make ``adapters`` the current step's for this thread; ``None``: no row has one."""
    outer = _context.adapters
    _context.adapters = adapters
    try:
        yield
    finally:
        _context.adapters = outer


def are_adapting() -> bool:
    """Whether a row of the running step has an adapter."""
    return _context.adapters is not None


def adapt(y: Tensor, x: Tensor, site: int) -> Tensor:
    """What the running step's adapters make of ``y``: see :class:`StepAdapters`. Without any it is ``y`` itself."""
    adapters = _context.adapters
    return y if adapters is None else adapters.adapt(y, x, site)


class RowsOf:
    """A step's adapters, and the rows of each."""

    def __init__(self, parts: Sequence[tuple[Mapping[int, Pair], Tensor | None]] = ()) -> None:
        """``parts``: an adapter's pairs by site, and its rows of the ragged batch, int64; ``None``: all rows."""
        self._parts = parts

    def adapt(self, y: Tensor, x: Tensor, site: int) -> Tensor:
        """See :class:`StepAdapters`."""
        adapted = y.clone(memory_format=torch.contiguous_format)
        outputs, inputs = adapted.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        for pairs, rows in self._parts:
            if (pair := pairs.get(site)) is None:
                continue
            down, up = pair
            if rows is None:
                outputs += up(down(inputs))
            else:
                outputs.index_add_(0, rows, up(down(inputs[rows])))
        return adapted


class AdaptedLinear(nn.Module):
    """A linear of the base that adapters add to."""

    def __init__(self, linear: nn.Linear, site: int) -> None:
        super().__init__()
        self.linear, self.site = linear, site
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """The base's, for code that asks."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """The base's, for code that asks."""
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        return adapt(self.linear(x), x, self.site)


class Adapters:
    """The adapters of a loaded model, by digest."""

    def __init__(self, module: Any, adapters: Sequence[Adapter]) -> None:
        """Load them, and put an :class:`AdaptedLinear` around each linear of ``module`` that one of them names.

        Raises :class:`UserError` for an adapter that does not fit the model."""
        self._sites: dict[str, int] = {}
        self._halves: dict[str, dict[int, Halves]] = {}
        self._pairs: dict[str, dict[int, Pair]] = {}
        for adapter in adapters:
            if adapter.digest not in self._halves:  # two names of the same content are one
                self._halves[adapter.digest] = self._load(module, adapter)
        #: the adapters themselves, by digest
        self.digests = frozenset(self._halves)
        self._nbytes = 0
        for path, site in self._sites.items():
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, AdaptedLinear(module.get_submodule(path), site))

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        halves = [half for mine in self._halves.values() for pair in mine.values() for half in pair]
        return self._nbytes or sum(half.nbytes for half in halves)

    def cut(self, site: int, first: int, count: int, *, columns: bool) -> None:
        """Keep ``count`` outputs at ``site`` from ``first`` on (``columns``: rows of each ``B``), or inputs (columns of
        each ``A``), as the base's linear there is cut: parts of outputs are whole, parts of inputs are to be summed."""
        for mine in self._halves.values():
            if site in mine:
                down, up = mine[site]
                mine[site] = (down, up[first : first + count]) if columns else (down[:, first : first + count], up)

    def keep(self, sites: Set[int]) -> None:
        """Forget what they add elsewhere: other workers compute that."""
        self._halves = {
            digest: {site: pair for site, pair in mine.items() if site in sites}
            for digest, mine in self._halves.items()
        }

    def move(self, device: torch.device) -> None:
        """Bring them to ``device``, before they are packed."""
        for mine in self._halves.values():
            mine.update({site: (down.to(device), up.to(device)) for site, (down, up) in mine.items()})

    def pack(self) -> None:
        """Make them ready for steps; they cannot be cut any more."""
        self._nbytes = self.nbytes
        for digest, mine in self._halves.items():
            self._pairs[digest] = {
                site: (PackedLinear([down.contiguous()], None), PackedLinear([up.contiguous()], None))
                for site, (down, up) in mine.items()
            }
        self._halves = {}

    def rows(self, digests: Sequence[str], counts: NDArray[np.int64], device: torch.device) -> StepAdapters | None:
        """For a batch of rows with ``digests`` (empty: none), each of ``counts [rows]`` tokens; ``None``: no row has
        one. They are packed (:meth:`pack`)."""
        own = np.repeat(np.array(digests, object), counts)
        parts: list[tuple[Mapping[int, Pair], Tensor | None]] = []
        for digest in dict.fromkeys(digest for digest in digests if digest):
            mine = own == digest
            where = None if mine.all() else torch.from_numpy(np.flatnonzero(mine)).to(device)
            parts.append((self._pairs[digest], where))
        return RowsOf(parts) if parts else None

    def _load(self, module: Any, adapter: Adapter) -> dict[int, Halves]:
        halves = _halves(adapter)
        pairs = {}
        for path, (down, up) in halves.items():
            linear = _linear_at(module, path, adapter)
            rank = down.shape[0]
            if down.shape != (rank, linear.in_features) or up.shape != (linear.out_features, rank) or rank < 1:
                shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
                fits = f"({linear.out_features}, {linear.in_features})"
                raise _unfit(adapter, f"has matrices of {shapes} for {path}, which is {fits}")
            scaled = up.float() * adapter.scale(path, rank)
            if not (torch.isfinite(down).all() and torch.isfinite(scaled).all()):
                raise _unfit(adapter, f"has weights for {path} that are not finite")
            place = linear.weight.device, linear.weight.dtype
            pairs[self._sites.setdefault(path, len(self._sites))] = down.to(*place), scaled.to(*place)
        return pairs


def _halves(adapter: Adapter) -> dict[str, Halves]:
    """Path of a module -> its two matrices, as they are in the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(adapter.folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _unfit(adapter, f"has a {WEIGHTS} that cannot be read ({str(error)[:80]})") from None
    found: dict[str, list[Tensor | None]] = {}
    for key, tensor in tensors.items():
        half = next((half for half, end in enumerate(_HALVES) if key.endswith(end)), None)
        if half is None or not key.startswith(_KEY) or tensor.dim() != 2:
            raise _unfit(adapter, f"has a tensor that is no half of a linear's pair: {key[:100]}")
        found.setdefault(key[len(_KEY) : -len(_HALVES[half])], [None, None])[half] = tensor
    pairs = {}
    for path, (down, up) in found.items():
        if down is None or up is None:
            raise _unfit(adapter, f"has one of two matrices for {path}")
        pairs[path] = (down, up)
    if not pairs:
        raise _unfit(adapter, "has no matrices")
    return pairs


def _linear_at(module: Any, path: str, adapter: Adapter) -> nn.Linear:
    try:
        linear = module.get_submodule(path)
    except AttributeError:
        raise _unfit(adapter, f"names {path}, which this model does not have") from None
    if type(linear) is not nn.Linear or linear is module.get_output_embeddings():
        raise _unfit(adapter, f"names {path}, which is no linear inside of a layer")
    return linear


def _unfit(adapter: Adapter, what: str) -> UserError:
    hint = "serve it with the model that it was made for, or merge it into that model"
    return UserError(f"the adapter {adapter.name!r} {what}", hint=hint, param="lora")
