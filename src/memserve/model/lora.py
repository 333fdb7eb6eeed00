"""LoRA adapters: each row of a step is computed with the adapter of its request, or with none.

``y = W x`` becomes ``y = W x + scale * B (A x)`` in the linears that an adapter names. The base's weights are there
once, whatever the number of adapters. Rows of many adapters share a step: the base's product is one, and each adapter
adds to its own rows. Where it has few of them, as when sequences decode, a kernel adds to the rows of all such adapters
at once, each row by itself; else it is two matrix products an adapter. A step without such rows runs the forward that
knows nothing of adapters.

DoRA scales the rows of the sum: ``m / |W + scale * B A|`` times it, where the base's bias stays as it is. An embedding
or a head of an adapter's own (``modules_to_save``) takes the place of the base's for its rows.

With an :class:`AdapterRoom` adapters come and go while the model serves: every linear that one may add to has its place
in the captured forward from the start.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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
from memserve.model.linears import in_bucket, wide_linear
from memserve.model.loading.lora import WEIGHTS, Adapter
from memserve.model.loading.stored import stored_of

FEW_ROWS = 16
"""Up to this many rows of one adapter the kernel is quicker than matrix products."""

_KEY = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")

EMBEDDING, HEAD = -1, -2
"""Sites of a model's embedding and of its head, where an adapter has weights of its own, or none."""
_MAGNITUDE = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
_WHOLE = ".weight"

Index = Tensor | slice


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter makes of a linear's ``y``: ``y * gain + shift + B (A x)``."""

    down: Tensor
    """``A [r, k]``."""
    up: Tensor
    """``B [n, r]`` with all factors; once packed ``[r, n]``, and contiguous."""
    gain: Tensor | None = None
    """``[n]`` float32, of DoRA. None: one."""
    shift: Tensor | None = None
    """``[n]`` float32: what the gain must not take from the base's bias. None: nothing."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that it has."""
        return [tensor for tensor in (self.down, self.up, self.gain, self.shift) if tensor is not None]

    def cut(self, index: Index, *, columns: bool, keeps_bias: bool) -> Change:
        """For a linear with the outputs of ``index`` (``columns``), or with these inputs, whose parts are summed;
        ``keeps_bias``: the part has the base's bias."""
        if columns:
            gain, shift = (None if part is None else part[index] for part in (self.gain, self.shift))
            return Change(self.down, self.up[index], gain, shift)
        return Change(self.down[:, index], self.up, self.gain, self.shift if keeps_bias else None)


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

    changes: Mapping[int, Change]
    """By the number of a site."""
    places: NDArray[np.int64]
    """``[sites, 3]``: addresses of ``A`` and ``B``, and the rank; zeros where it adds nothing."""
    wholes: Mapping[int, Callable[[Tensor], Tensor]]
    """What computes an output with weights of the adapter's own: of an embedding from ids, of a head from rows."""
    has_kernel: bool
    """Whether the kernel computes it."""


class RowsOf:
    """A step's adapters, and the rows of each."""

    def __init__(
        self,
        parts: Sequence[tuple[Packed, NDArray[np.int64]]] = (),
        tokens: int = 0,
        device: torch.device | None = None,
        logits_rows: NDArray[np.int64] | None = None,
    ) -> None:
        """``parts``: adapters, each with its rows of the ragged batch, which has ``tokens`` of them; ``logits_rows``:
        those that have logits. None: a head of an adapter's own sees all rows."""
        self._parts, self._device, self._logits_rows = parts, device, logits_rows
        self._cuts: dict[bytes, RowsOf] = {}  # every layer asks for the same
        few = [(packed, rows) for packed, rows in parts if packed.has_kernel and len(rows) <= FEW_ROWS]
        self._places = [
            (packed, None if len(rows) == tokens else torch.from_numpy(rows).to(device)) for packed, rows in parts
        ]
        self._many = [place for place, (packed, rows) in zip(self._places, parts, strict=True)
                      if not (packed.has_kernel and len(rows) <= FEW_ROWS)]  # fmt: skip
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

    def _of_logits(self) -> RowsOf:
        return self if self._logits_rows is None else self.cut_tokens(self._logits_rows)

    def adapt_output(self, y: Tensor, x: Tensor, site: int) -> Tensor:
        """See :class:`StepAdapters`. At :data:`EMBEDDING` ``x`` are ids ``[...]``."""
        if site < 0:
            return (self._of_logits() if site == HEAD else self)._replace_output(y, x, site)
        adapted = y.clone(memory_format=torch.contiguous_format)
        outputs, inputs = adapted.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        for packed, rows in self._places:
            if site in packed.changes and (gain := packed.changes[site].gain) is not None:
                _scale_rows(outputs, rows, gain, packed.changes[site].shift)
        for packed, rows in self._many:
            if site not in packed.changes:
                continue
            product = partial(_product, packed.changes[site])
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

    def _replace_output(self, y: Tensor, x: Tensor, site: int) -> Tensor:
        """``y`` with the rows of adapters that have weights of their own at ``site`` computed with those."""
        replaced = y.clone(memory_format=torch.contiguous_format)
        outputs = replaced.view(-1, y.shape[-1])
        inputs = x.reshape(-1) if site == EMBEDDING else x.reshape(-1, x.shape[-1])
        for packed, rows in self._places:
            if site not in packed.wholes:
                continue
            if rows is None:
                outputs.copy_(packed.wholes[site](inputs))
            else:
                outputs[rows] = packed.wholes[site](inputs[rows]).to(outputs.dtype)
        return replaced


def _scale_rows(outputs: Tensor, rows: Tensor | None, gain: Tensor, shift: Tensor | None) -> None:
    """``outputs [T, n]`` times ``gain [n]``, plus ``shift``, in ``rows``; None: in all."""
    scaled = (outputs if rows is None else outputs[rows]).float() * gain
    scaled = scaled if shift is None else scaled + shift
    if rows is None:
        outputs.copy_(scaled)
    else:
        outputs[rows] = scaled.to(outputs.dtype)


def _product(change: Change, x: Tensor) -> Tensor:
    return nn.functional.linear(x, change.down) @ change.up


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


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What may be loaded while the model serves."""

    count: int
    """Adapters of different content; one more while one takes the place of another."""
    rank_max: int
    reload: Callable[[], Any]
    """The module again, with the weights that it was loaded with: DoRA is about their lengths."""


@dataclass(frozen=True, slots=True)
class _Site:
    number: int
    inputs: int
    outputs: int
    dtype: torch.dtype


class Adapters:
    """The adapters of a loaded model, by digest."""

    def __init__(
        self, module: Any, adapters: Sequence[Adapter], uncalled: Set[int] = frozenset(),
        room: AdapterRoom | None = None,
    ) -> None:  # fmt: skip
        """Load them, and put an :class:`AdaptedLinear` around each linear of ``module`` that one of them names; with
        ``room`` around each that one may name. ``uncalled``: ids of linears whose weights are used as they are.

        Raises :class:`UserError` for an adapter that does not fit the model."""
        self._uncalled, self._room, self._device = uncalled, room, next(module.parameters()).device
        self._sites: dict[str, _Site] = {}
        #: why nothing can be added at a path
        self._barred: dict[str, str] = {}
        self._wholes, self._is_divided = _whole_parts(module), False
        #: what was asked of parts of whole linears, for adapters that come later
        self._cuts: dict[int, Callable[[Change], Change]] = {}
        self._kept: Set[int] | None = None
        if room is not None:
            for path in [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]:
                self._find_site(module, path)
        self._matrices: dict[str, _Matrices] = {}
        self._packed: dict[str, Packed] = {}
        for adapter in adapters:
            if adapter.digest not in self._matrices:  # two names of the same content are one
                self._matrices[adapter.digest] = self._read_adapter(module, adapter, module)
        #: those of the start, by digest
        self.digests = frozenset(self._matrices)
        #: bytes of those that were loaded since
        self._loaded: dict[str, int] = {}
        self._nbytes = 0
        for path, site in self._sites.items():
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, AdaptedLinear(module.get_submodule(path), site.number))
        for number, whole in self._wholes.items():
            if room is not None or any(number in matrices.wholes for matrices in self._matrices.values()):
                whole.part.register_forward_hook(partial(_adapt_whole, number))

    def __contains__(self, digest: object) -> bool:
        return digest in self._packed or digest in self._matrices

    @property
    def nbytes(self) -> int:
        """Of all of them, and of those for which there is room."""
        return self.room_bytes + (self._nbytes or sum(matrices.nbytes for matrices in self._matrices.values()))

    @property
    def room_bytes(self) -> int:
        """Of all adapters that may be loaded while the model serves."""
        if self._room is None:
            return 0
        of_rank = sum((site.inputs + site.outputs) * site.dtype.itemsize for site in self._sites.values())
        return (self._room.count + 1) * self._room.rank_max * of_rank

    def cut_site(self, site: int, index: Index, *, columns: bool, keeps_bias: bool) -> None:
        """Keep the outputs of ``index`` at ``site`` (``columns``: rows of each ``B``), or inputs (columns of each
        ``A``), as the base's linear there is cut: parts of outputs are whole, parts of inputs are to be summed, and one
        of them ``keeps_bias``."""
        self._cuts[site] = partial(Change.cut, index=index, columns=columns, keeps_bias=keeps_bias)
        for matrices in self._matrices.values():
            if site in matrices.changes:
                matrices.changes[site] = self._cuts[site](matrices.changes[site])

    def keep_sites(self, sites: Set[int]) -> None:
        """Forget what they add elsewhere: other workers compute that."""
        self._kept = sites
        for matrices in self._matrices.values():
            matrices.keep_sites(sites)

    def refuse_wholes(self) -> None:
        """Raise :class:`UserError` for embeddings and heads of an adapter's own, of which workers have parts; also for
        those that are loaded later."""
        self._wholes, self._is_divided = {}, True
        if any(matrices.wholes for matrices in self._matrices.values()):
            hint = "serve it by one worker, or merge the adapter into its model"
            raise UserError(f"an adapter {_NOT_DIVIDED}", hint=hint, param="lora")

    def move_to(self, device: torch.device) -> None:
        """Bring them to ``device``, before they are packed; those that come later as well."""
        self._device = device

    def pack_halves(self) -> None:
        """Make them ready for steps; they cannot be cut any more."""
        self._nbytes = self.nbytes - self.room_bytes
        for digest, matrices in self._matrices.items():
            self._packed[digest] = self._pack(matrices)
        self._matrices = {}

    def prepare_adapter(self, adapter: Adapter) -> Callable[[], None]:
        """Read ``adapter``; what this returns has it ready for all later steps, and is called between two of them, as
        :meth:`drop_adapter` is. Both raise :class:`UserError` where it does not fit the model, or the room."""
        room = self._room
        if room is None:
            hint = "start the server with --lora-folder"
            raise UserError("adapters are loaded at the start alone", hint=hint, param="lora_folder")
        if (rank := adapter.config.rank_max) > room.rank_max:
            raise _unfit(adapter, f"cannot be loaded: LoRA rank {rank} is greater than max_lora_rank {room.rank_max}")
        matrices = self._read_adapter(None, adapter, room.reload() if adapter.config.use_dora else None)
        nbytes = matrices.nbytes
        for site, cut in self._cuts.items():
            if site in matrices.changes:
                matrices.changes[site] = cut(matrices.changes[site])
        if self._kept is not None:
            matrices.keep_sites(self._kept)
        return partial(self._install, adapter.digest, self._pack(matrices), nbytes, room)

    def _install(self, digest: str, packed: Packed, nbytes: int, room: AdapterRoom) -> None:
        if digest in self:
            return
        used_bytes = sum(self._loaded.values())
        if len(self._loaded) > room.count:
            raise _full(f"{len(self._loaded)} adapters are loaded, and there is room for {room.count}")
        if nbytes + used_bytes > self.room_bytes:
            raise _full(f"it has {nbytes >> 20} MiB; of {self.room_bytes >> 20} MiB {used_bytes >> 20} are taken")
        self._loaded[digest], self._packed[digest] = nbytes, packed

    def drop_adapter(self, digest: str) -> None:
        """Forget an adapter that was loaded while the model serves; no row of a later step may have it."""
        if self._loaded.pop(digest, None) is not None:
            del self._packed[digest]

    def adapters_of_rows(
        self, digests: Sequence[str], counts: NDArray[np.int64], device: torch.device,
        logits_rows: NDArray[np.int64] | None = None,
    ) -> StepAdapters | None:  # fmt: skip
        """For a batch of rows with ``digests`` (empty: none), each of ``counts [rows]`` tokens, of which those at
        ``logits_rows`` have logits; ``None``: no row has one. They are packed (:meth:`pack_halves`)."""
        token_digests = np.repeat(np.array(digests, object), counts)
        used = dict.fromkeys(digest for digest in digests if digest)
        parts = [(self._packed[digest], np.flatnonzero(token_digests == digest)) for digest in used]
        return RowsOf(parts, len(token_digests), device, logits_rows) if parts else None

    def _pack(self, matrices: _Matrices) -> Packed:
        changes, places = {}, np.zeros((len(self._sites), 3), np.int64)
        for site, change in matrices.changes.items():
            down, up = change.down.to(self._device).contiguous(), change.up.to(self._device).t().contiguous()
            gain, shift = (None if part is None else part.to(self._device) for part in (change.gain, change.shift))
            changes[site] = Change(down, up, gain, shift)
            places[site] = down.data_ptr(), up.data_ptr(), len(down)
        on_cpu = all(
            change.down.device.type == "cpu" and change.down.dtype in DTYPE_CODES for change in changes.values()
        )
        has_kernel = on_cpu and places[:, 2].max(initial=0) <= _kernels.LOW_RANK_MAX
        wholes = {
            site: _with_weight(self._wholes[site].part, weight.to(self._device))
            for site, weight in matrices.wholes.items()
        }
        return Packed(changes, places, wholes, has_kernel)

    # -- reading

    def _read_adapter(self, module: Any, adapter: Adapter, whole: Any) -> _Matrices:
        """``module``: where sites are still to be found; None: all are known. ``whole``: it with its weights, for
        DoRA."""
        tensors, config = _read_tensors(adapter), adapter.config
        if empty := sorted(config.named_layers() - {config.layer_of(path) for path in tensors.halves}):
            raise _unfit(adapter, f"names layer {empty[0]} in layers_to_transform, and has no matrices for it")
        matrices = _Matrices({}, self._whole_weights(adapter, tensors))
        for path, (down, up) in tensors.halves.items():
            site = self._find_site(module, path)
            if site is None:
                raise _unfit(adapter, self._barred.get(path, f"names {path}, which this model does not have"))
            if field := config.leaves_out(path):
                raise _unfit(adapter, f"has matrices for {path}, which its {field} leaves out")
            rank = down.shape[0]
            if down.shape != (rank, site.inputs) or up.shape != (site.outputs, rank) or rank < 1:
                shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
                raise _unfit(adapter, f"has matrices of {shapes} for {path}, which is ({site.outputs}, {site.inputs})")
            if rank != config.rank_of(path):
                raise _unfit(adapter, f"says rank {config.rank_of(path)} for {path}, and has matrices of rank {rank}")
            change = Change(down.float(), up.float() * config.scale_of(path))
            if config.use_dora:
                change = _with_magnitude(change, tensors.magnitudes.get(path), whole, path, adapter)
            if not all(torch.isfinite(tensor).all() for tensor in change.tensors):
                raise _unfit(adapter, f"has weights for {path} that are not finite")
            halves = change.down.to(site.dtype), change.up.to(site.dtype)
            matrices.changes[site.number] = Change(*halves, change.gain, change.shift)
        return matrices

    def _whole_weights(self, adapter: Adapter, tensors: _AdapterTensors) -> dict[int, Tensor]:
        """Of modules that the adapter has in the place of the model's."""
        sites = {whole.path: site for site, whole in self._wholes.items()}
        for name in adapter.config.modules_to_save or ():
            if not any(path == name or path.endswith(f".{name}") for path in tensors.wholes):
                raise _unfit(adapter, f"names {name} in modules_to_save, and has no weights for it")
        weights = {}
        for path, tensor in tensors.wholes.items():
            if not adapter.config.saves(path):
                raise _unfit(adapter, f"has weights for {path}, which its modules_to_save does not name")
            if path not in sites:
                why = f"{_NOT_DIVIDED}: {path}" if self._is_divided else (
                    f"has weights of its own for {path}: only those of a plain embedding or head are served"
                )  # fmt: skip
                raise _unfit(adapter, why)
            whole = self._wholes[sites[path]]
            if tensor.shape != whole.shape or not torch.isfinite(tensor).all():
                what = "that are not finite" if tensor.shape == whole.shape else f"of {tuple(tensor.shape)}"
                raise _unfit(adapter, f"has weights {what} for {path}, which is {tuple(whole.shape)}")
            weights[sites[path]] = tensor.to(whole.dtype)
        return weights

    def _find_site(self, module: Any, path: str) -> _Site | None:
        if path in self._sites or path in self._barred or module is None:
            return self._sites.get(path)
        try:
            linear = module.get_submodule(path)
        except AttributeError:
            return None
        if type(linear) is not nn.Linear or linear is module.get_output_embeddings():
            self._barred[path] = f"names {path}, which is no linear inside of a layer"
        elif is_expanding(module, linear):
            self._barred[path] = f"adds to {path}, which makes keys and values of latents that others share"
        elif id(linear) in self._uncalled:
            self._barred[path] = f"adds to {path}, whose weights the model uses without calling it"
        else:
            weight = linear.weight
            self._sites[path] = _Site(len(self._sites), linear.in_features, linear.out_features, weight.dtype)
        return self._sites.get(path)


_NOT_DIVIDED = "has an embedding or a head of its own, which several workers do not share yet"


@dataclass(slots=True)
class _Matrices:
    """Of one adapter, before they are packed."""

    changes: dict[int, Change]
    wholes: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        tensors = [tensor for change in self.changes.values() for tensor in change.tensors]
        return sum(tensor.nbytes for tensor in (*tensors, *self.wholes.values()))

    def keep_sites(self, sites: Set[int]) -> None:
        self.changes = {site: change for site, change in self.changes.items() if site in sites}


@dataclass(frozen=True, slots=True)
class _WholePart:
    """What an adapter may have in the place of the model's: a part that goes on without its weight, if need be."""

    path: str
    part: Any
    shape: torch.Size
    dtype: torch.dtype


def _whole_parts(module: Any) -> dict[int, _WholePart]:
    """By site."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    paths = {id(part): path for path, part in module.named_modules()}
    parts = {EMBEDDING: embedding} if isinstance(embedding, nn.Embedding) else {}
    if type(head) is nn.Linear and head.bias is None:
        parts[HEAD] = head
    return {
        site: _WholePart(paths[id(part)], part, part.weight.shape, part.weight.dtype) for site, part in parts.items()
    }


def _adapt_whole(site: int, part: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return adapt(output, inputs[0], site)


def _with_weight(part: Any, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """What computes as ``part``, an embedding or a head, with another ``weight``."""
    if isinstance(part, nn.Embedding):  # of any kind: some multiply what they look up
        embedding = copy.copy(part)
        embedding._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        embedding._forward_hooks = OrderedDict()
        return embedding
    if weight.dtype == torch.float32:
        return partial(nn.functional.linear, weight=weight)
    return partial(wide_linear, weight=weight, bias=None)


def _with_magnitude(change: Change, magnitude: Tensor | None, whole: Any, path: str, adapter: Adapter) -> Change:
    """``change`` with DoRA's gain: rows of ``W + B A`` have the lengths that ``magnitude`` says."""
    if magnitude is None or magnitude.shape != (len(change.up),):
        raise _unfit(adapter, f"has no magnitudes of DoRA for {path}, or others than it has rows")
    linear = whole.get_submodule(path)
    weight = linear.weight.detach()
    if stored_of(whole).of(weight) is not None:
        raise _unfit(adapter, f"uses DoRA, which needs {path} as numbers: use --quantization none")
    weight = weight.float().cpu()
    lengths = torch.linalg.norm(weight + change.up @ change.down, dim=1)
    gain = magnitude.float() / lengths
    shift = None if linear.bias is None else (1 - gain) * linear.bias.detach().float().cpu()
    return Change(change.down, change.up * gain[:, None], gain, shift)


@dataclass(frozen=True, slots=True)
class _AdapterTensors:
    """What is in the file of an adapter, by the path of a module."""

    halves: dict[str, tuple[Tensor, Tensor]]
    magnitudes: dict[str, Tensor]
    wholes: dict[str, Tensor]


def _read_tensors(adapter: Adapter) -> _AdapterTensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(adapter.folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _unfit(adapter, f"has a {WEIGHTS} that cannot be read ({str(error)[:80]})") from None
    pairs: dict[str, list[Tensor | None]] = {}
    read = _AdapterTensors({}, {}, {})
    for key, tensor in tensors.items():
        path = key.removeprefix(_KEY)
        half = next((half for half, end in enumerate(_HALVES) if key.endswith(end)), None)
        magnitude = next((end for end in _MAGNITUDE if key.endswith(end)), "") if adapter.config.use_dora else ""
        if key == path or tensor.dim() != (1 if magnitude else 2):
            raise _unfit(adapter, f"has a tensor that is no half of a linear's pair: {key[:100]}")
        if magnitude:
            read.magnitudes[path.removesuffix(magnitude)] = tensor
        elif half is not None:
            pairs.setdefault(path.removesuffix(_HALVES[half]), [None, None])[half] = tensor
        elif adapter.config.modules_to_save and path.endswith(_WHOLE):
            read.wholes[path.removesuffix(_WHOLE)] = tensor
        else:
            raise _unfit(adapter, f"has a tensor that is no half of a linear's pair: {key[:100]}")
    for path, (down, up) in pairs.items():
        if down is None or up is None:
            raise _unfit(adapter, f"has one of two matrices for {path}")
        read.halves[path] = (down, up)
    if not tensors:
        raise _unfit(adapter, "has no matrices")
    return read


def _full(reason: str) -> UserError:
    hint = "unload another adapter, and wait until its requests have ended, or give more room: --max-loras"
    return UserError(f"there is no room for another adapter: {reason}", hint=hint, param="max_loras")


def _unfit(adapter: Adapter, reason: str) -> UserError:
    hint = "serve it with the model that it was made for, or merge it into that model"
    return UserError(f"the adapter {adapter.name!r} {reason}", hint=hint, param="lora")
