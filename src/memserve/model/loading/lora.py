"""LoRA adapters as files: the option ``--lora NAME=FOLDER``, and what may stand in such a folder.

A folder is what PEFT writes: ``adapter_config.json`` and ``adapter_model.safetensors``. Nothing here needs torch,
because a router names adapters, too. What an adapter does to a layer is in :mod:`memserve.model.lora`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from memserve.base.errors import UserError
from memserve.model.loading.sources import refuse_special_files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CHUNK_BYTES = 1 << 20
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "ensure_weight_tying": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "fan_in_fan_out": (False, None),
}
"""What an adapter may say where a plain one says nothing: everything else adds more than what is known here, or was
trained on other weights than the model's (PiSSA, OLoRA)."""

_Rank = Annotated[int, msgspec.Meta(ge=1)]
_Layer = Annotated[int, msgspec.Meta(ge=0)]
_Names = str | list[str]
_Number = TypeVar("_Number", int, float)


class AdapterConfig(msgspec.Struct, frozen=True):
    """What ``adapter_config.json`` says of matrices, with PEFT's defaults. Patterns are regular expressions over dotted
    paths of modules."""

    r: _Rank = 8
    lora_alpha: float = 8
    use_rslora: bool | None = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: _Names | None = None
    exclude_modules: _Names | None = None
    layers_to_transform: _Layer | list[_Layer] | None = None
    layers_pattern: _Names | None = None
    use_dora: bool | None = False
    modules_to_save: list[str] | None = None

    def regex_fields(self) -> Iterator[tuple[str, str]]:
        """Each regular expression, after the field where it stands."""
        for field in ("rank_pattern", "alpha_pattern", "layers_pattern"):
            yield from ((field, pattern) for pattern in _listed(getattr(self, field)))
        for field in ("target_modules", "exclude_modules"):
            if isinstance(pattern := getattr(self, field), str):
                yield field, pattern

    @property
    def rank_max(self) -> int:
        """The largest rank that it says."""
        return max([self.r, *(self.rank_pattern or {}).values()])

    def rank_of(self, path: str) -> int:
        """Columns of ``B`` in the module at ``path``."""
        return _of_pattern(self.rank_pattern, path, self.r)

    def scale_of(self, path: str) -> float:
        """By what ``B A x`` is multiplied in the module at ``path``."""
        rank = self.rank_of(path)
        return _of_pattern(self.alpha_pattern, path, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def leaves_out(self, path: str) -> str | None:
        """The field by which the module at ``path`` has no matrices; ``None``: it may have some."""
        targets, left_out = self.target_modules, self.exclude_modules
        if targets and targets != ALL_LINEAR and not _are_named(targets, path):
            return "target_modules"
        if left_out and _are_named(left_out, path):
            return "exclude_modules"
        layers = self.named_layers()
        return "layers_to_transform" if layers and self.layer_of(path) not in layers else None

    def saves(self, path: str) -> bool:
        """Whether the module at ``path`` has weights of the adapter's own in the place of the model's."""
        return bool(self.modules_to_save) and _are_named(self.modules_to_save or [], path)

    def layer_of(self, path: str) -> int | None:
        """The number of the layer that the module at ``path`` is in."""
        for pattern in _listed(self.layers_pattern) or [r"[^.]*"]:
            if path_match := re.match(rf".*\.{pattern}\.(\d+)\.", path):
                return int(path_match.group(path_match.lastindex or 0))
        return None

    def named_layers(self) -> frozenset[int]:
        """The layers that it names; none: all."""
        return frozenset(_listed(self.layers_to_transform))


ALL_LINEAR = "all-linear"
"""PEFT's word in ``target_modules``."""


def _listed(value: Any) -> list[Any]:
    """A field that may be one, several (of a mapping: its keys) or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, dict)) else [value]


def _of_pattern(values: Mapping[str, _Number] | None, path: str, default: _Number) -> _Number:
    matches = (value for key, value in (values or {}).items() if re.fullmatch(rf"(.*\.)?({key})", path))
    return next(matches, default)


def _are_named(names: _Names, path: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. ``digest`` names its content: two with the same digest compute the same."""

    name: str
    folder: Path
    digest: str
    config: AdapterConfig
    root: str = ""
    """What clients are told of the folder: its name, or as they named it."""


def read_adapters(options: Sequence[str]) -> tuple[Adapter, ...]:
    """The adapters of ``options``, each ``NAME=FOLDER``. Raises :class:`UserError`."""
    adapters = tuple(_read_option(text) for text in options)
    names = [adapter.name.casefold() for adapter in adapters]
    if twice := next((adapter.name for adapter in adapters if names.count(adapter.name.casefold()) > 1), None):
        raise UserError(f"two adapters have the name {twice!r}", hint="give each a name of its own", param="lora")
    return adapters


def _read_option(text: str) -> Adapter:
    name, _, folder = text.partition("=")
    if not name or not folder:
        hint = "use NAME=FOLDER, for example --lora support=/models/support-lora"
        raise UserError(f"--lora got {text[:80]!r}", hint=hint, param="lora")
    return read_adapter(name, Path(folder).expanduser())


def read_adapter(name: str, folder: Path) -> Adapter:
    """The adapter in ``folder``, by ``name``; its matrices are not read yet. Raises :class:`UserError`."""
    try:
        refuse_special_files(folder, "lora")
        fields = msgspec.json.decode((folder / CONFIG).read_bytes())
        digest = _digest(folder, tuple(_identity_of(folder / file) for file in (CONFIG, WEIGHTS)))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{CONFIG} is not JSON"
        hint = f"give a folder that PEFT has written, with {CONFIG} and {WEIGHTS}"
        raise UserError(f"cannot read the adapter {name!r} in {folder}: {reason}", hint=hint, param="lora") from None
    _check_kind(name, fields)
    return Adapter(name, folder, digest, _config(name, fields), folder.name)


@lru_cache(maxsize=256)
def _digest(folder: Path, identities: tuple[object, ...]) -> str:
    """Of both files; ``identities``: read again what was written again."""
    content = hashlib.blake2b(digest_size=16)
    for file in (CONFIG, WEIGHTS):
        content.update(file.encode())
        with (folder / file).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                content.update(chunk)
    return content.hexdigest()


def _identity_of(file: Path) -> object:
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _check_kind(name: str, config: Any) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        hint = "serve a LoRA adapter, or merge this one into its model"
        raise UserError(f"the adapter {name!r} is no LoRA adapter ({kind})", hint=hint, param="lora")
    for field, plain in _PLAIN.items():
        if field in config and config[field] not in plain:
            hint = "merge the adapter into its model (PEFT: merge_and_unload), and serve that"
            message = f"the adapter {name!r} sets {field}={repr(config[field])[:60]}, which cannot be served"
            raise UserError(message, hint=hint, param="lora")


def _config(name: str, fields: dict[str, Any]) -> AdapterConfig:
    try:
        config = msgspec.convert(fields, AdapterConfig)
    except msgspec.ValidationError as error:
        raise _config_error(name, str(error)) from None
    for field, pattern in config.regex_fields():
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise _config_error(
                name, f"{field} has {pattern[:60]!r}, which is no regular expression ({error})"
            ) from None
    return config


def _config_error(name: str, reason: str) -> UserError:
    hint = "restore the file: save the adapter again, or download it again"
    return UserError(f"the adapter {name!r} has a {CONFIG} that cannot be used: {reason}", hint=hint, param="lora")
