"""Loads a checkpoint as a module, completely and exactly, or raises one clear error.

Model files are untrusted, and the libraries that read them fail in many ways: whatever they raise becomes a
:class:`UserError` here. Code in a checkpoint is never run: no pickles (``.bin``) and no modules of its own.

**Tensors.** A model must find each of its tensors, in its shape: transformers would fill a missing one with random
numbers. Not missing: one that is tied to another, and buffers that the model's class computes. A checkpoint must hold
no tensor for which the model has no place: it would mean that ``config.json`` describes another model (fewer layers, no
biases). Not surplus: what the model's class in transformers skips on purpose, masks and rotary frequencies that older
versions saved, and parts that take no part in text: towers and projectors of images and sound, heads that predict
several tokens (:func:`is_beside`). A model of images and text is served for its text, without those.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memserve.base.errors import UserError
from memserve.model.loading.cache import STORED
from memserve.model.loading.formats.headers import COMPLETE_HINT, errors_named, is_beside, tensor_sizes
from memserve.model.loading.pages import LARGE_BYTES, drop_file_pages, remember_pages

if TYPE_CHECKING:
    import torch

    from memserve.model.loading.formats.checkpoint import QuantisedCheckpoint

CONTEXT_TOKENS_MAX = 100_000_000
"""Ten times the longest context that any model was trained for."""
_SIZE_MAX = 1 << 31
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "ffn_dim",
)  # fmt: skip
_CONTEXTS = ("max_position_embeddings", "n_positions")
_TIMES_MAX = 16
"""A checkpoint may be packed (4 bits a value, in words of 32), and tied tensors count twice."""
_ROWS = 4096
_SHOWN = 3
_READING = threading.Lock()
_CHARS = 200

_VERSION_HINT = "use transformers of the version that memserve asks for"


def load_module(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    gguf_file: str | None = None,
    checkpoint: QuantisedCheckpoint | None = None,
) -> Any:
    """The causal language model in ``folder``, with eager attention and all of its tensors; or the one in the GGUF file
    of that name there. ``checkpoint``: gives the weights of the folder if they are quantised; None: all as numbers.
    Raises :class:`UserError`."""
    import transformers
    from transformers.utils import logging

    from memserve.model.loading.skeleton import auto_class, build_skeleton, described_weights, plain_config

    transformers_logging: Any = logging  # transformers types little of this
    auto_model: Any = transformers.AutoModelForCausalLM  # of a GGUF file
    transformers_logging.disable_progress_bar()
    failure = f"transformers cannot load {name} as a causal language model"
    source: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf_file is not None:
        source["gguf_file"] = gguf_file
    else:
        _check_config(folder, name)
        empty: Any = transformers.GenerationConfig
        source["generation_config"] = empty()  # the loader reads the folder's own, and forgives more
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the checks below refuse in one line what it warns about in tables
    quantised: QuantisedCheckpoint | None = None
    try:
        with errors_named(failure, "give a complete model folder with config.json, tokenizer and safetensors weights"):
            if gguf_file is None:
                quantised = _check_files(folder, name, described_weights(folder), checkpoint)
                source["config"] = plain_config(folder)
                auto_model = auto_class(source["config"])
            with _read_and_dropped(dtype, quantised):
                read = partial(
                    auto_model.from_pretrained, folder, dtype=dtype, attn_implementation="eager", use_safetensors=True,
                    output_loading_info=True, ignore_mismatched_sizes=True, **source,
                )  # fmt: skip
                module, info = build_skeleton(read)
    finally:
        transformers_logging.set_verbosity(verbosity)
    _check_tensors(info, name)
    # with STORED the weights are not here, and were looked at when the file was described
    if not (folder / STORED).exists() and not all(is_finite(value) for value in _first_and_last(module)):
        raise UserError(f"{name} has weights that are not finite (NaN or infinite)", hint=COMPLETE_HINT, param="model")
    module.requires_grad_(False)
    _leave_out_images(module)
    if quantised is not None:
        from memserve.model.quantised import mark_quantised

        mark_quantised(module)
    if gguf_file is None:
        remember_pages(module, sorted(folder.glob("*.safetensors")), lambda: load_module(folder, name, dtype))
    return module.train(False)


@contextmanager
def _read_and_dropped(dtype: torch.dtype, quantised: QuantisedCheckpoint | None) -> Iterator[None]:
    """Inside, what transformers reads of a safetensors file in another dtype than ``dtype`` does not stay resident: it
    maps files, and their maps end when all is converted. ``quantised``: whose weights it gets as numbers."""
    from transformers import modeling_utils

    place: Any = modeling_utils
    with _READING:
        opens = getattr(place, "safe_open", None)
        if opens is None:
            if quantised is not None:
                raise UserError(
                    "this version of transformers cannot be given a quantised checkpoint", hint=_VERSION_HINT
                )
            yield
            return
        place.safe_open = lambda file, *args, **how: _Opened(opens(file, *args, **how), Path(file), dtype, quantised)
        try:
            with nullcontext() if quantised is None else _stacks_without_zeros(quantised):
                yield
        finally:
            place.safe_open = opens
            if quantised is not None:
                quantised.check()


@contextmanager
def _stacks_without_zeros(quantised: QuantisedCheckpoint) -> Iterator[None]:
    """Inside, a stack that transformers puts into a module gives back the memory of what was put off: one layer's
    experts have it at a time."""
    from transformers import core_model_loading

    place: Any = core_model_loading
    put = getattr(place, "set_param_for_module", None)
    if put is None:
        yield
        return

    def put_sparsely(module: Any, name: str, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sparse = quantised.without_zeros(value)
        return put(module, name, value if sparse is None else sparse, *rest, **options)

    place.set_param_for_module = put_sparsely
    try:
        yield
    finally:
        place.set_param_for_module = put


class _Opened:
    """A safetensors file as transformers opens it."""

    def __init__(self, file: Any, path: Path, dtype: torch.dtype, quantised: QuantisedCheckpoint | None) -> None:
        self._file, self._path, self._dtype, self._quantised = file, path, dtype, quantised

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Opened:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        """Names of tensors of the model."""
        return list(self._file.keys()) if self._quantised is None else self._quantised.names_in(self._path)

    def get_slice(self, name: str) -> _Slice | _Dequantised:
        """The tensor ``name``, not read yet."""
        if self._quantised is not None and name in self._quantised.tensors:
            return _Dequantised(self._quantised, name, self._dtype)
        return _Slice(self._file.get_slice(name), self._dtype)


class _Slice:
    """A tensor of a safetensors file, read when it is indexed."""

    def __init__(self, inner: Any, dtype: torch.dtype) -> None:
        self._inner, self._dtype = inner, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        value: torch.Tensor = self._inner[index]
        if value.dtype == self._dtype or not value.is_floating_point():
            return value  # it stays mapped
        if value.dim() > 1 and value.numel() * value.element_size() > LARGE_BYTES:
            return _converted(value, self._dtype)
        resident = value.clone()
        drop_file_pages(value)
        return resident


def _converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value``, which is mapped, in ``dtype``; some rows of it at a time are resident. Small tensors are left to
    transformers, which keeps some in float32; a whole copy of a large one could be more than there is room for."""
    import torch

    result = torch.empty(value.shape, dtype=dtype)
    for first in range(0, len(value), _ROWS):
        mapped = value[first : first + _ROWS]
        result[first : first + _ROWS] = mapped
        drop_file_pages(mapped)
    return result


class _Dequantised:
    """A weight of a quantised checkpoint, read and dequantised when it is indexed."""

    def __init__(self, checkpoint: QuantisedCheckpoint, name: str, dtype: torch.dtype) -> None:
        self._checkpoint, self._name, self._dtype = checkpoint, name, dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._checkpoint.numbers(self._name, self._dtype)[index]

    def get_shape(self) -> list[int]:
        """As of a slice of a file."""
        return list(self._checkpoint.tensors[self._name].shape)


def is_finite(value: torch.Tensor) -> bool:
    """Whether no number of ``value`` is NaN or infinite; looked at by parts, because torch copies what it looks at."""
    import torch

    rows = value.reshape(1) if value.dim() == 0 else value
    return all(bool(torch.isfinite(rows[first : first + _ROWS]).all()) for first in range(0, len(rows), _ROWS))


def _first_and_last(module: Any) -> list[Any]:
    """Two tensors, enough to notice a file full of garbage; to check all of them would take seconds."""
    values = [value for value in module.parameters() if value.is_floating_point()]
    return [values[0], values[-1]] if values else []


def _leave_out_images(module: Any) -> None:
    """Take the towers of images and sound out of ``module``, whose text is served: their weights would be packed and
    stay resident, and nothing calls them."""
    import torch

    for parent in (module, *module.children()):
        for name, part in list(parent.named_children()):
            if is_beside(f"{name}.") and any(True for _ in part.parameters()):
                setattr(parent, name, torch.nn.Module())  # which cannot be called


def _check_tensors(info: Any, name: str) -> None:
    """Raises :class:`UserError` for tensors that are missing, have another shape, or have no place."""
    absent = sorted(info["missing_keys"])
    misshapen = sorted(f"{key} ({_shape(file_shape)}, the model has {_shape(model_shape)})"
                       for key, file_shape, model_shape in info["mismatched_keys"])  # fmt: skip
    surplus = sorted(key for key in info["unexpected_keys"] if not is_beside(key))
    for keys, problem, hint in (
        (absent, "tensors are missing", COMPLETE_HINT),
        (misshapen, "tensors have another shape", "config.json and weights must be of the same model"),
        (surplus, "tensors have no place in the model", "config.json and weights must be of the same model"),
    ):
        if keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            shown = ", ".join(key[:_CHARS] for key in keys[:_SHOWN])
            raise UserError(f"{name}: {len(keys)} {problem}: {shown}{more}", hint=hint, param="model")
    if info.get("error_msgs"):
        raise UserError(
            f"{name}: {str(info['error_msgs'][0]).splitlines()[0][:_CHARS]}", hint=COMPLETE_HINT, param="model"
        )


def _shape(size: Any) -> str:
    return "x".join(map(str, size)) or "one number"


# -- before anything is allocated


def _check_config(folder: Path, name: str) -> None:
    """Refuse sizes that no model has: they would cause a division by zero, or fill the memory."""
    hint = f"restore {folder / 'config.json'}: download it again"
    with errors_named(f"cannot read config.json of {name}", hint):
        config = json.loads((folder / "config.json").read_bytes())
    if not isinstance(config, dict):
        raise UserError(f"config.json of {name} is not a JSON object", hint=hint, param="model")
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for key, value in ((key, part.get(key)) for part in texts for key in _SIZES):
        if value is None or isinstance(value, list):  # a list: one of each layer
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            message = f"config.json of {name}: {key} is {str(value)[:40]!r}, not a positive number"
            raise UserError(message, hint=hint, param="model")
        most = CONTEXT_TOKENS_MAX if key in _CONTEXTS else _SIZE_MAX
        if value > most:
            message = f"config.json of {name}: {key} is {str(value)[:40]}, more than any model has (at most {most})"
            raise UserError(message, hint=hint, param="model")


def _check_files(
    folder: Path, name: str, described: int, checkpoint: QuantisedCheckpoint | None
) -> QuantisedCheckpoint | None:
    """Its quantised weights, if it has such: ``checkpoint``, unless that is None. Raises :class:`UserError` when there
    are no safetensors, a file of them is damaged, or they are far too small for the ``described`` values: a config may
    describe a model that would fill the memory before it is noticed."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickled:
            message = f"{name} has its weights in a pickle ({pickled[0]}), which can run any code: it is not read"
            hint = "load it where you trust it, save it with save_pretrained(folder), and serve that folder"
            raise UserError(message, hint=hint, param="model")
        message = f"cannot load {name} as a causal language model: it has no weights, no .safetensors file"
        raise UserError(message, hint=COMPLETE_HINT, param="model")
    from memserve.model.loading.formats.checkpoint import quantised_checkpoint

    quantised = checkpoint or quantised_checkpoint(folder, name)
    sizes = [tensor_sizes(file) for file in files] if quantised is None else [quantised.sizes]
    stored = sum(sum(size.values()) for size in sizes)
    if described > _TIMES_MAX * stored:
        message = f"config.json of {name} describes {described} weights, and its files hold {stored}"
        raise UserError(message, hint="config.json and weights must be of the same model", param="model")
    return quantised


def text_weights(folder: Path) -> tuple[int, int]:
    """How many values the weights in ``folder`` that take part in text have: all, and the largest. Reads no weights.
    Raises :class:`UserError` for a damaged file."""
    from memserve.model.loading.formats.checkpoint import quantised_checkpoint

    quantised = quantised_checkpoint(folder, folder.name)
    files = [quantised.sizes] if quantised is not None else map(tensor_sizes, folder.glob("*.safetensors"))
    with errors_named(f"cannot read the sizes of {folder.name}", COMPLETE_HINT):
        sizes = [size for tensors in files for name, size in tensors.items() if not is_beside(name)]
        return sum(sizes), max(sizes, default=0)
