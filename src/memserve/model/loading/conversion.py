"""Converts a GGUF file to Hugging Face folders, weight by weight; runs in a process of its own.

:func:`convert` writes two, with all numbers. :func:`describe_stored` writes one in which the matrices that the file
holds quantised are holes of a sparse file, and says where in the GGUF file they lie: nothing large is read or written.

transformers puts each weight into the module as soon as it has it. There it is taken, written to both folders, and
replaced by nothing: so one weight at a time is in memory, not the model. For most architectures transformers reads the
whole file before it fills the module; where it makes each weight of one tensor (:data:`_PLAIN`), or a stack of experts
of two (:data:`_STACKED`), that is put off until the weight is needed. Of others float32 weights are in memory once.

Writes a safetensors file tensor by tensor: a conversion never holds more of a model than one of its tensors.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memserve import _kernels
from memserve.base.errors import UserError, check
from memserve.model.loading.cache import STORED, whole_digest
from memserve.model.loading.checkpoint import is_finite, load_module
from memserve.model.loading.formats.headers import gguf_reader
from memserve.model.loading.skeleton import build_skeleton
from memserve.model.loading.sources import EXACT, ROUNDED
from memserve.model.quantised import FORMATS, QuantisedLinear, QuantisedWeight
from memserve.system.imports import leave_compiler_out

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_NAMES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip
_ENTRY_BYTES = 512
"""Room in the header for a tensor: names have about 60 characters."""
_ALIGNED_BYTES = 64
_ROWS_AT_ONCE = 4096


class SafetensorsWriter:
    """A safetensors file that is complete once the block ends without an error; else it is not readable.

    The header comes first in the file and is known last: room for ``tensors`` entries is left for it, and what is not
    needed is blanks, as the format allows."""

    def __init__(self, path: Path, tensors: int) -> None:
        self._room_bytes = -(-(8 + _ENTRY_BYTES * (tensors + 1)) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        self._file = path.open("wb")
        self._file.seek(self._room_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._write_header()
        finally:
            self._file.close()

    def leave_hole(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Add a tensor of zeros, for which a file system with sparse files takes no room."""
        size = dtype.itemsize * math.prod(shape)
        self._file.seek(size, os.SEEK_CUR)
        self._add_entry(name, shape, dtype, size)
        self._file.truncate()

    def write(self, name: str, value: Tensor) -> None:
        """Add ``value``, of any shape, on a CPU. Raises ``OSError``, and :class:`UserError` for a dtype that the format
        does not know."""
        import torch

        flat = value.detach().contiguous().reshape(-1)
        size = flat.numel() * flat.element_size()
        self._add_entry(name, value.shape, value.dtype, size)
        if size:
            self._file.write(flat.view(torch.uint8).numpy().data)

    def _add_entry(self, name: str, shape: Sequence[int], dtype: torch.dtype, size: int) -> None:
        check(name not in self._entries, "a tensor is written once")
        code = _NAMES.get(str(dtype))
        if code is None:
            raise UserError(f"{name} has the dtype {dtype}, which safetensors files do not hold")
        self._entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [self._end, self._end + size]}
        self._end += size

    def _write_header(self) -> None:
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        room = self._room_bytes - 8
        if len(header) > room:
            raise UserError(f"the names of {len(self._entries)} tensors take {len(header)} bytes, more than {room}")
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))


_WEIGHTS = "model.safetensors"
_NO_WAITING_READS = "HF_DEACTIVATE_ASYNC_LOAD"
"""In the environment: transformers reads a weight when it needs it, instead of all of them as quickly as it can."""


_PLAIN = ("TensorProcessor", "LlamaTensorProcessor", "NemotronTensorProcessor", "BloomTensorProcessor",
          "Gemma2TensorProcessor", "Lfm2TensorProcessor", "MambaTensorProcessor")  # fmt: skip
"""What transformers calls its conversions of a tensor that keep its name and need no other tensor."""
_STACKED = ("Qwen2MoeTensorProcessor",)
"""And those that do so but for experts: their gates and their ups become one stack ``[experts, 2 n, k]``."""
_STACKS = re.compile(r"(.*\.ffn_(gate|up|down)_exps)\.weight")


class _Folders:
    """Both folders while weights are written to them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._writers: dict[str, SafetensorsWriter] = {}
        self._written: set[str] = set()
        self.odd = ""  # a weight that is not finite

    def take_weight(self, module: Any, name: str) -> None:
        """Write the weight ``name`` of ``module``, and free it."""
        value = _value_of(module, name)
        if value is not None and not value.is_meta:
            self._write_value(module, name, value.detach())
            value.data = value.new_zeros(()).expand(value.shape)

    def take_rest(self, module: Any) -> None:
        """Write what transformers did not put in itself: buffers that the module computes."""
        for name, value in module.state_dict().items():
            self._write_value(module, name, value)

    def _write_value(self, module: Any, name: str, value: Tensor) -> None:
        import torch

        tied = module.config.get_text_config().tie_word_embeddings
        if name in self._written or (tied and name == "lm_head.weight"):
            return
        if not self._writers:
            count = len(module.state_dict())
            for kind in (EXACT, ROUNDED):
                writer = SafetensorsWriter(self._folder / kind / _WEIGHTS, count)
                self._writers[kind] = self._stack.enter_context(writer)
        self._written.add(name)
        if value.is_floating_point() and not is_finite(value):
            self.odd = self.odd or name
        for kind, writer in self._writers.items():
            writer.write(name, value.to(getattr(torch, kind)) if value.is_floating_point() else value)


def convert(path: Path, folder: Path) -> None:
    """Write ``folder/float32`` and ``folder/bfloat16`` from the GGUF file ``path``. Raises :class:`UserError`."""
    import torch

    _know_expert_sizes()
    exact, rounded = folder / EXACT, folder / ROUNDED
    exact.mkdir()
    rounded.mkdir()
    with ExitStack() as stack, _read_once():
        folders = _Folders(folder, stack)
        with _each_weight(folders.take_weight), _read_late():
            model = load_module(path.parent, path.name, torch.float32, path.name)
        folders.take_rest(model)
        if folders.odd:
            raise UserError(f"{path.name} has weights that are not finite (NaN or infinite): {folders.odd}")
        _write_beside(exact, model, path)
    shutil.copytree(exact, rounded, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    _write_config(exact, model, EXACT)
    _write_config(rounded, model, ROUNDED)


def describe_stored(path: Path, folder: Path) -> None:
    """Write ``folder`` with all of the GGUF file ``path`` but its quantised matrices, and :data:`STORED`:
    ``{"sha256": of the file, "weights": {parameter: [format, n, k, offset, order]}, "orders": [...], "stacks":
    {parameter: [experts, [[format, n, k, offset], ...]]}}``, ``order`` an index of ``orders``, or null for the file's
    own (:meth:`memserve.model.quantised.QuantisedWeight.of_blocks`); of a stack, the tensors of which each expert has a
    part. A model that cannot be described so has ``{"refused": reason}`` alone. Raises :class:`UserError` for a damaged
    file.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    _know_expert_sizes()
    with _read_once():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)

        def build() -> Any:
            with torch.device("meta"):
                return auto_model.from_config(config)

        module = build_skeleton(build)
        weights = _late_weights(_parsed(path), path, module)
        reason = "its weights are not each of one tensor"
        if weights is not None:
            reason = _write_stored(module, weights, path, folder)
        if reason:
            (folder / STORED).write_text(json.dumps({"refused": reason}))
            return
        _write_beside(folder, module, path)
    _write_config(folder, module, ROUNDED)


def _know_expert_sizes() -> None:
    """transformers takes defaults for the inner sizes of experts, whatever the file says."""
    from transformers.integrations import ggml

    place: Any = ggml
    for kind, fields in place.GGUF_CONFIG_MAPPING.items():
        if kind.endswith("_moe"):
            fields.setdefault("expert_feed_forward_length", "moe_intermediate_size")
            fields.setdefault("expert_shared_feed_forward_length", "shared_expert_intermediate_size")


def _parsed(path: Path) -> dict[str, Any]:
    """What transformers reads of a GGUF file beside its weights."""
    from transformers import modeling_gguf_pytorch_utils

    place: Any = modeling_gguf_pytorch_utils
    return dict(place.load_gguf_checkpoint(path))


def _write_stored(module: Any, parsed: dict[str, Any], path: Path, folder: Path) -> str:
    """Write weights, holes and :data:`STORED`; why that cannot be, if it cannot."""
    import torch

    late: dict[str, _LateWeight] = parsed["tensors"]
    state, tied = module.state_dict(), module.config.get_text_config().tie_word_embeddings
    names = [name for name in state if not (tied and name == "lm_head.weight")]
    absent = [name for name in names if name not in late]
    if absent:
        return f"{absent[0]} is no tensor of the file"
    described: dict[str, list[Any]] = {}
    stacks: dict[str, list[Any]] = {}
    orders: list[list[int]] = []
    with SafetensorsWriter(folder / _WEIGHTS, len(names)) as writer:
        for name in names:
            if stack := _described_stack(late[name], name, tuple(state[name].shape)):
                stacks[name] = stack
                writer.leave_hole(name, state[name].shape, torch.bfloat16)
                continue
            is_matrix = late[name].is_quantised() and late[name].shape == tuple(state[name].shape)
            order = late[name].row_order() if is_matrix else None
            if order is not None:
                late[name].check_finite(name)
                is_same = order == list(range(len(order)))
                if not is_same and order not in orders:
                    orders.append(order)
                described[name] = [*late[name].place(), None if is_same else orders.index(order)]
                writer.leave_hole(name, late[name].shape, torch.bfloat16)
                continue
            value = late[name].read()
            if not is_finite(value):
                raise UserError(f"the weights of {name} are not finite (NaN or infinite)")
            writer.write(name, value.to(torch.bfloat16))
    if not described and not stacks:
        return "it holds no quantised matrices"
    description = {"sha256": whole_digest(path).hex(), "weights": described, "orders": orders, "stacks": stacks}
    (folder / STORED).write_text(json.dumps(description))
    return ""


def _described_stack(late: _LateWeight, name: str, shape: tuple[int, ...]) -> list[Any]:
    """What :data:`STORED` says of a stack of experts; nothing: it is none, or none that the kernels can have. Raises
    :class:`UserError` for numbers that are not finite."""
    if not isinstance(late, _LateStack) or late.shape != shape:
        return []
    places = late.places()
    if not places:
        return []
    late.check_finite(name)
    return [shape[0], places]


def _write_beside(folder: Path, module: Any, path: Path) -> None:
    """Tokenizer and generation config."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(folder)
    module.generation_config.save_pretrained(folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Inside, a GGUF file is parsed once, however often transformers asks: with a large vocabulary that takes seconds.
    For a process of ours alone."""
    import gguf

    place: Any = gguf
    reader = place.GGUFReader
    parse = lru_cache(gguf_reader())
    place.GGUFReader = lambda path, mode="r": parse(str(path), mode)
    try:
        yield
    finally:
        place.GGUFReader = reader


@contextmanager
def _each_weight(take: Callable[[Any, str], None]) -> Iterator[None]:
    """Inside, ``take(module, name)`` is called for each weight that transformers has put into a module. For a process
    of ours alone. Where transformers does it in another way, nothing is called."""
    from transformers import core_model_loading

    place: Any = core_model_loading
    put = getattr(place, "set_param_for_module", None)
    if put is None:
        yield
        return

    def put_and_take(module: Any, name: str, *rest: Any, **options: Any) -> Any:
        result = put(module, name, *rest, **options)
        take(module, name)
        return result

    place.set_param_for_module = put_and_take
    try:
        yield
    finally:
        place.set_param_for_module = put


@dataclass(frozen=True, slots=True)
class _LateWeight:
    """A weight of a GGUF file, read when transformers takes it, as it takes a slice of a file of another kind."""

    read: Callable[[], Tensor]
    shape: tuple[int, ...]
    tensor: Any  # gguf's, mapped
    reorder: Callable[[Any], Any]  # what transformers does with its numbers

    def is_quantised(self) -> bool:
        """Whether it is a matrix in a format of the kernels."""
        return len(self.shape) == 2 and self.tensor.tensor_type.name in FORMATS

    def check_finite(self, name: str) -> None:
        """Raise :class:`UserError` for a quantised matrix with a number that is NaN or infinite."""
        import torch

        blocks = torch.from_numpy(self.tensor.data)
        for part in torch.split(blocks, _ROWS_AT_ONCE):
            weight = QuantisedWeight.of_blocks(self.tensor.tensor_type.name, part, self.shape[1])
            if not is_finite(QuantisedLinear([weight]).dequantised(torch.bfloat16)):
                raise UserError(f"the weights of {name} are not finite (NaN or infinite)")

    def row_order(self) -> list[int] | None:
        """Which row of the tensor each row of the weight is; None: it is no matrix of the same rows."""
        import numpy as np

        rows = self.shape[0] if len(self.shape) == 2 else 0
        numbered = np.repeat(np.arange(rows, dtype=np.float64)[:, None], 2, axis=1)
        try:
            order = self.reorder(numbered)
        except (ValueError, IndexError):  # of numbers that it does not know
            return None
        if order.shape != numbered.shape or not (order[:, 0] == order[:, 1]).all():
            return None
        return [int(row) for row in order[:, 0]] if set(order[:, 0]) == set(range(rows)) else None

    def place(self) -> tuple[str, int, int, int]:
        """Format, outputs, inputs, and where the tensor's blocks begin in the file."""
        return self.tensor.tensor_type.name, self.shape[0], self.shape[1], int(self.tensor.data_offset)

    def __getitem__(self, _: object) -> Tensor:
        return self.read()

    def is_floating_point(self) -> bool:
        """As a tensor: what is read of such a file is float32."""
        return True


@dataclass(frozen=True, slots=True)
class _LateStack(_LateWeight):
    """Experts of a GGUF file: ``tensor`` are the tensors ``[experts, n, k]`` of which each has a part."""

    def is_quantised(self) -> bool:
        """It is no matrix."""
        return False

    def row_order(self) -> list[int] | None:
        """It has no rows."""
        return None

    def places(self) -> list[list[Any]]:
        """Format, outputs, inputs and where it begins in the file, of each part; nothing: the kernels cannot have
        them."""
        kinds = {part.tensor_type.name for part in self.tensor}
        sizes = [[int(size) for size in part.shape] for part in self.tensor]  # [k, n, experts]
        if len(kinds) > 1 or not kinds <= set(FORMATS) or any(n % _kernels.QUANTISED_STRIP for _, n, _ in sizes[:-1]):
            return []
        [kind] = kinds
        offsets = [int(part.data_offset) for part in self.tensor]
        return [[kind, n, k, offset] for (k, n, _), offset in zip(sizes, offsets, strict=True)]

    def check_finite(self, name: str) -> None:
        """As of a matrix."""
        import torch

        for part in self.tensor:
            k, n, experts = (int(size) for size in part.shape)
            for blocks in torch.from_numpy(part.data).view(experts, n, -1):
                weight = QuantisedWeight.of_blocks(part.tensor_type.name, blocks.contiguous(), k)
                if not is_finite(QuantisedLinear([weight]).dequantised(torch.bfloat16)):
                    raise UserError(f"the weights of {name} are not finite (NaN or infinite)")


@contextmanager
def _read_late() -> Iterator[None]:
    """Inside, transformers gets the weights of a GGUF file as :class:`_LateWeight`, where they are plain. For a process
    of ours alone."""
    from transformers import modeling_gguf_pytorch_utils

    place: Any = modeling_gguf_pytorch_utils
    load = getattr(place, "load_gguf_checkpoint", None)
    if load is None:
        yield
        return

    def load_late(path: Any, return_tensors: bool = False, model_to_load: Any = None, **options: Any) -> Any:
        late = _late_weights(load(path), path, model_to_load) if return_tensors else None
        return late or load(path, return_tensors=return_tensors, model_to_load=model_to_load, **options)

    place.load_gguf_checkpoint = load_late
    try:
        yield
    finally:
        place.load_gguf_checkpoint = load


def tensor_names(reader: Any, module: Any, config: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """Which parameter of ``module`` each tensor of a GGUF file is, by their names, and transformers' processor of them.
    ``reader``: gguf's, of the file."""
    from transformers import modeling_gguf_pytorch_utils

    place: Any = modeling_gguf_pytorch_utils
    field = reader.get_field("general.architecture")
    kind = place.TENSOR_PROCESSORS.get(str(field.contents()) if field else "", place.TensorProcessor)
    processor = kind(config=config)
    return place.get_gguf_hf_weights_map(module, processor), processor


def _late_weights(parsed: dict[str, Any], path: Any, module: Any) -> dict[str, Any] | None:
    """What transformers' function returns with tensors, all of them late; None: they are not plain."""
    import gguf
    import numpy as np
    import torch

    reader = gguf.GGUFReader(path)
    names, processor = tensor_names(reader, module, parsed.get("config", {}))
    if type(processor).__name__ not in (*_PLAIN, *_STACKED):
        return None

    mapped: Any = reader.data

    def reorder(tensor: Any, weights: Any) -> Any:
        context = {"tensor_key_mapping": names, "parsed_parameters": parsed}
        return processor.process(weights=weights, name=tensor.name, **context).weights

    def read(tensor: Any) -> Tensor:
        weights = reorder(tensor, gguf.dequantize(tensor.data, tensor.tensor_type))
        value = torch.from_numpy(weights if weights.flags.writeable else np.copy(weights))
        mapped._mmap.madvise(mmap.MADV_DONTNEED)  # what was read of the file is no longer needed
        return value

    def read_stack(parts: list[Any]) -> Tensor:
        numbers = [torch.from_numpy(gguf.dequantize(part.data, part.tensor_type)) for part in parts]
        mapped._mmap.madvise(mmap.MADV_DONTNEED)
        return torch.cat(numbers, dim=1)

    late: dict[str, _LateWeight] = {
        names[tensor.name]: _LateWeight(
            partial(read, tensor), tuple(int(size) for size in tensor.shape[::-1]), tensor, partial(reorder, tensor)
        )
        for tensor in reader.tensors
        if tensor.name in names and not _STACKS.fullmatch(tensor.name)
    }
    for name, parts in _stacks_of(reader.tensors, names).items():
        experts, n, k = (int(size) for size in parts[0].shape[::-1])
        late[name] = _LateStack(partial(read_stack, parts), (experts, n * len(parts), k), parts, lambda value: value)
    return parsed | {"tensors": late}


def _stacks_of(tensors: Any, names: dict[str, str]) -> dict[str, list[Any]]:
    """The tensors of which each stack of experts consists, gates first."""
    stacks: dict[str, list[Any]] = {}
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.name)):  # gate comes before up
        match = _STACKS.fullmatch(tensor.name)
        if match and match[1] in names:
            stacks.setdefault(names[match[1]], []).append(tensor)
    return stacks


def _value_of(module: Any, name: str) -> Tensor | None:
    parent, _, attribute = name.rpartition(".")
    value: Tensor | None = getattr(module.get_submodule(parent), attribute, None)
    return value


def _write_config(folder: Path, model: Any, dtype: str) -> None:
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # these weights are plain
    config.pop("_name_or_path", None)
    config |= {"dtype": dtype, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))


def main() -> None:
    """``python -m memserve.model.loading.conversion FILE FOLDER [stored]``."""
    os.environ[_NO_WAITING_READS] = "1"
    gc.disable()  # what torch and transformers make stays, and no weight lies in a cycle
    leave_compiler_out("cpu")
    write = describe_stored if sys.argv[3:] == ["stored"] else convert
    try:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except UserError as refused:
        sys.exit(refused.message)


if __name__ == "__main__":
    main()
