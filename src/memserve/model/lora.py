"""LoRA adapters: each row of a step is computed with the adapter of its request, or with none.

``y = W x`` becomes ``y = W x + scale * B (A x)`` in the linears that an adapter names. The base's weights are there
once, whatever the number of adapters. Rows of many adapters share a step: the base's product is one, and each adapter
adds to its own rows. Where it has few of them, as when sequences decode, a kernel adds to the rows of all such adapters
at once, each row by itself; else it is two matrix products an adapter. A step without such rows runs the forward that
knows nothing of adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memserve import _kernels
from memserve.base.errors import UserError
from memserve.model.attention.expansions import is_expanding
from memserve.model.capture.operations import DTYPE_CODES
from memserve.model.linears import in_bucket
from memserve.model.loading.lora import WEIGHTS, Adapter

FEW_ROWS = 16
"""Up to this many rows of one adapter the kernel is quicker than matrix products."""

_KEY = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")

Halves = tuple[Tensor, Tensor]
"""``A [r, k]`` and ``scale * B [n, r]``; once packed both are contiguous, and B is ``[r, n]``."""


class StepAdapters(Protocol):
    """What one step's rows add to linears."""

    def adapt_output(self, y: Tensor, x: Tensor, site: int) -> Tensor:
        """``y [..., n]`` of the base at ``site`` for ``x [..., k]``, with what adapters add; a new tensor. The
        dimensions in front are the batch's tokens."""


class _Context(threading.local):
    adapters: StepAdapters | None = None


_context = _Context()


@contextmanager
def lora_adapters(adapters: StepAdapters | None) -> Iterator[None]:
    """Make ``adapters`` the current step's for this thread; ``None``: no row has one."""
    outer = _context.adapters
    _context.adapters = adapters
    try:
        yield
    finally:
        _context.adapters = outer


@contextmanager
def adapters_of_tokens(tokens: NDArray[np.int64]) -> Iterator[None]:
    """Inside, linears compute these ``tokens [n]`` of the running step alone, in this order."""
    adapters = _context.adapters
    with lora_adapters(adapters.cut_tokens(tokens) if isinstance(adapters, RowsOf) else adapters):
        yield


def has_lora_rows() -> bool:
    """Whether a row of the running step has an adapter."""
    return _context.adapters is not None


def adapt(y: Tensor, x: Tensor, site: int) -> Tensor:
    """What the running step's adapters make of ``y``: see :class:`StepAdapters`. Without any it is ``y`` itself."""
    adapters = _context.adapters
    return y if adapters is None else adapters.adapt_output(y, x, site)


@dataclass(frozen=True, slots=True)
class Packed:
    """An adapter that is ready for steps."""

    halves: Mapping[int, Halves]
    """By site."""
    places: NDArray[np.int64]
    """``[sites, 3]``: addresses of ``A`` and ``B``, and the rank; zeros where it adds nothing."""
    has_kernel: bool
    """Whether the kernel computes it."""


class RowsOf:
    """A step's adapters, and the rows of each."""

    def __init__(
        self,
        parts: Sequence[tuple[Packed, NDArray[np.int64]]] = (),
        tokens: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """``parts``: adapters, each with its rows of the ragged batch, which has ``tokens`` of them."""
        self._parts, self._device = parts, device
        self._cuts: dict[bytes, RowsOf] = {}  # every layer asks for the same
        few = [(packed, rows) for packed, rows in parts if packed.has_kernel and len(rows) <= FEW_ROWS]
        self._many = [
            (packed.halves, None if len(rows) == tokens else torch.from_numpy(rows).to(device))
            for packed, rows in parts
            if not (packed.has_kernel and len(rows) <= FEW_ROWS)
        ]
        self._count = sum(len(rows) for _, rows in few)
        #: what the kernel is told at each site
        self._few: NDArray[np.int64] | None = None
        if few:
            places = [np.repeat(packed.places[:, None], len(rows), axis=1) for packed, rows in few]
            rows = np.concatenate([rows for _, rows in few])
            joined_places = np.concatenate(places, axis=1)
            self._few = np.ascontiguousarray(np.insert(joined_places, 0, rows, axis=2))

    def cut_tokens(self, tokens: NDArray[np.int64]) -> RowsOf:
        """Of a batch that has these ``tokens [n]`` alone, in this order."""
        key = tokens.tobytes()
        if key not in self._cuts:
            parts = [(packed, np.flatnonzero(np.isin(tokens, rows))) for packed, rows in self._parts]
            self._cuts[key] = RowsOf([part for part in parts if len(part[1])], len(tokens), self._device)
        return self._cuts[key]

    def adapt_output(self, y: Tensor, x: Tensor, site: int) -> Tensor:
        """See :class:`StepAdapters`."""
        adapted = y.clone(memory_format=torch.contiguous_format)
        outputs, inputs = adapted.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        for halves, rows in self._many:
            if site not in halves:
                continue
            product = partial(_product, *halves[site])
            if rows is None:
                outputs += in_bucket(inputs, product)
            else:
                outputs.index_add_(0, rows, in_bucket(inputs[rows], product))
        if self._few is not None:
            inputs = inputs.contiguous()
            _kernels.low_rank(
                inputs.data_ptr(), adapted.data_ptr(), self._few[site].ctypes.data, self._count,
                inputs.shape[1], outputs.shape[1], DTYPE_CODES[adapted.dtype],
            )  # fmt: skip
        return adapted


def _product(down: Tensor, up: Tensor, x: Tensor) -> Tensor:
    return nn.functional.linear(x, down) @ up


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

    def __init__(self, module: Any, adapters: Sequence[Adapter], uncalled: Set[int] = frozenset()) -> None:
        """Load them, and put an :class:`AdaptedLinear` around each linear of ``module`` that one of them names.
        ``uncalled``: ids of linears whose weights are used as they are.

        Raises :class:`UserError` for an adapter that does not fit the model."""
        self._uncalled = uncalled
        self._sites: dict[str, int] = {}
        self._halves: dict[str, dict[int, Halves]] = {}
        self._packed: dict[str, Packed] = {}
        for adapter in adapters:
            if adapter.digest not in self._halves:  # two names of the same content are one
                self._halves[adapter.digest] = self._load_adapter(module, adapter)
        #: the adapters themselves, by digest
        self.digests = frozenset(self._halves)
        self._nbytes = 0
        for path, site in self._sites.items():
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, AdaptedLinear(module.get_submodule(path), site))

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        halves = [half for site_pairs in self._halves.values() for pair in site_pairs.values() for half in pair]
        return self._nbytes or sum(half.nbytes for half in halves)

    def cut_site(self, site: int, first: int, count: int, *, columns: bool) -> None:
        """Keep ``count`` outputs at ``site`` from ``first`` on (``columns``: rows of each ``B``), or inputs (columns of
        each ``A``), as the base's linear there is cut: parts of outputs are whole, parts of inputs are to be summed."""
        for site_pairs in self._halves.values():
            if site in site_pairs:
                down, up = site_pairs[site]
                site_pairs[site] = (
                    (down, up[first : first + count]) if columns else (down[:, first : first + count], up)
                )

    def keep_sites(self, sites: Set[int]) -> None:
        """Forget what they add elsewhere: other workers compute that."""
        self._halves = {
            digest: {site: pair for site, pair in site_pairs.items() if site in sites}
            for digest, site_pairs in self._halves.items()
        }

    def move_to(self, device: torch.device) -> None:
        """Bring them to ``device``, before they are packed."""
        for site_pairs in self._halves.values():
            site_pairs.update({site: (down.to(device), up.to(device)) for site, (down, up) in site_pairs.items()})

    def pack_halves(self) -> None:
        """Make them ready for steps; they cannot be cut any more."""
        self._nbytes = self.nbytes
        for digest, site_pairs in self._halves.items():
            halves = {site: (down.contiguous(), up.t().contiguous()) for site, (down, up) in site_pairs.items()}
            places = np.zeros((len(self._sites), 3), np.int64)
            for site, (down, up) in halves.items():
                places[site] = down.data_ptr(), up.data_ptr(), len(down)
            on_cpu = all(down.device.type == "cpu" and down.dtype in DTYPE_CODES for down, _ in halves.values())
            has_kernel = on_cpu and places[:, 2].max(initial=0) <= _kernels.LOW_RANK_MAX
            self._packed[digest] = Packed(halves, places, has_kernel)
        self._halves = {}

    def adapters_of_rows(
        self, digests: Sequence[str], counts: NDArray[np.int64], device: torch.device
    ) -> StepAdapters | None:
        """For a batch of rows with ``digests`` (empty: none), each of ``counts [rows]`` tokens; ``None``: no row has
        one. They are packed (:meth:`pack_halves`)."""
        token_digests = np.repeat(np.array(digests, object), counts)
        used = dict.fromkeys(digest for digest in digests if digest)
        parts = [(self._packed[digest], np.flatnonzero(token_digests == digest)) for digest in used]
        return RowsOf(parts, len(token_digests), device) if parts else None

    def _load_adapter(self, module: Any, adapter: Adapter) -> dict[int, Halves]:
        halves, config = _halves(adapter), adapter.config
        if empty := sorted(config.named_layers() - {config.layer_of(path) for path in halves}):
            raise _unfit(adapter, f"names layer {empty[0]} in layers_to_transform, and has no matrices for it")
        pairs = {}
        for path, (down, up) in halves.items():
            linear = _linear_at(module, path, adapter)
            if id(linear) in self._uncalled:
                raise _unfit(adapter, f"adds to {path}, whose weights the model uses without calling it")
            if field := config.leaves_out(path):
                raise _unfit(adapter, f"has matrices for {path}, which its {field} leaves out")
            rank = down.shape[0]
            if down.shape != (rank, linear.in_features) or up.shape != (linear.out_features, rank) or rank < 1:
                shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
                fits = f"({linear.out_features}, {linear.in_features})"
                raise _unfit(adapter, f"has matrices of {shapes} for {path}, which is {fits}")
            if rank != config.rank_of(path):
                raise _unfit(adapter, f"says rank {config.rank_of(path)} for {path}, and has matrices of rank {rank}")
            scaled = up.float() * config.scale_of(path)
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
    half_pairs: dict[str, list[Tensor | None]] = {}
    for key, tensor in tensors.items():
        half = next((half for half, end in enumerate(_HALVES) if key.endswith(end)), None)
        if half is None or not key.startswith(_KEY) or tensor.dim() != 2:
            raise _unfit(adapter, f"has a tensor that is no half of a linear's pair: {key[:100]}")
        half_pairs.setdefault(key[len(_KEY) : -len(_HALVES[half])], [None, None])[half] = tensor
    pairs = {}
    for path, (down, up) in half_pairs.items():
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
    if is_expanding(module, linear):
        raise _unfit(adapter, f"adds to {path}, which makes keys and values of latents that others share")
    return linear


def _unfit(adapter: Adapter, reason: str) -> UserError:
    hint = "serve it with the model that it was made for, or merge it into that model"
    return UserError(f"the adapter {adapter.name!r} {reason}", hint=hint, param="lora")
