"""LoRA adapters as files: the option ``--lora NAME=FOLDER``, and what may stand in such a folder.

A folder is what PEFT writes: ``adapter_config.json`` and ``adapter_model.safetensors``. Nothing here needs torch,
because a router names adapters, too. What an adapter does to a layer is in :mod:`memserve.model.lora`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from memserve.base.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CHUNK_BYTES = 1 << 20
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "fan_in_fan_out": (False, None),
}
"""What an adapter may say where a plain one says nothing: everything else adds more than two small matrices."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. ``digest`` names its content: two with the same digest compute the same."""

    name: str
    folder: Path
    digest: str
    config: Mapping[str, Any]

    def scale(self, path: str, rank: int) -> float:
        """By what ``B A x`` is multiplied in the module at ``path`` (dotted), with matrices of ``rank``."""
        alphas = self.config.get("alpha_pattern") or {}
        own = next((alpha for key, alpha in alphas.items() if re.fullmatch(rf"(.*\.)?({key})", path)), None)
        alpha = float(self.config.get("lora_alpha", rank) if own is None else own)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def read_adapters(options: Sequence[str]) -> tuple[Adapter, ...]:
    """The adapters of ``options``, each ``NAME=FOLDER``. Raises :class:`UserError`."""
    adapters = tuple(_read(text) for text in options)
    names = [adapter.name.casefold() for adapter in adapters]
    if twice := next((adapter.name for adapter in adapters if names.count(adapter.name.casefold()) > 1), None):
        raise UserError(f"two adapters have the name {twice!r}", hint="give each a name of its own", param="lora")
    return adapters


def _read(text: str) -> Adapter:
    name, _, folder = text.partition("=")
    if not name or not folder:
        hint = "use NAME=FOLDER, for example --lora support=/models/support-lora"
        raise UserError(f"--lora got {text[:80]!r}", hint=hint, param="lora")
    place = Path(folder).expanduser()
    try:
        config = json.loads((place / CONFIG).read_bytes())
        digest = _digest(place, (place / WEIGHTS).stat().st_mtime_ns)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        hint = f"give a folder that PEFT has written, with {CONFIG} and {WEIGHTS}"
        raise UserError(f"cannot read the adapter {name!r} in {folder}: {reason}", hint=hint, param="lora") from None
    _check(name, config)
    return Adapter(name, place, digest, config)


@lru_cache(maxsize=256)
def _digest(folder: Path, changed_ns: int) -> str:
    """Of both files; ``changed_ns``: read again what was written again."""
    content = hashlib.blake2b(digest_size=16)
    for file in (CONFIG, WEIGHTS):
        content.update(file.encode())
        with (folder / file).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                content.update(chunk)
    return content.hexdigest()


def _check(name: str, config: Any) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        hint = "serve a LoRA adapter, or merge this one into its model"
        raise UserError(f"the adapter {name!r} is no LoRA adapter ({kind})", hint=hint, param="lora")
    for field, plain in _PLAIN.items():
        if field in config and config[field] not in plain:
            hint = "merge the adapter into its model (PEFT: merge_and_unload), and serve that"
            message = f"the adapter {name!r} sets {field} to {str(config[field])[:60]}, which cannot be served"
            raise UserError(message, hint=hint, param="lora")
