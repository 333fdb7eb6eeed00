"""What the files of a model say before any weight is read: a config, and the headers of safetensors and GGUF files.

Files are untrusted, and so is what libraries make of them: whatever they raise becomes a :class:`UserError`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from struct import unpack
from typing import Any

from memserve.base.errors import UserError

COMPLETE_HINT = "download all of it again, or save it again with save_pretrained(folder)"

_HEADER_BYTES_MAX = 100_000_000
"""What safetensors itself allows."""
_CHARS = 200
_BESIDE = re.compile(
    r"(^|\.)(vision|visual|image|audio|speech|video|multi_modal|multimodal|mm_|embed_vision|embed_audio|mtp)[^.]*\."
)
_SAVED_BUFFERS = re.compile(r"(attn|attention)\.(bias|masked_bias)$|rotary_emb\.inv_freq$|position_ids$")


@contextmanager
def errors_named(failure: str, hint: str) -> Iterator[None]:
    """Whatever a library raises inside becomes a :class:`UserError` that begins with ``failure``. It may be no
    ``Exception``: extensions written in Rust panic with a ``BaseException``."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else "no reason given"
        kind = "" if isinstance(error, (OSError, ValueError, RuntimeError)) else f"{type(error).__name__}: "
        raise UserError(f"{failure}: {kind}{reason}"[: 2 * _CHARS], hint=hint, param="model") from error


def read_header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors. Raises :class:`UserError` for a damaged one."""
    with errors_named(f"{file} is damaged", COMPLETE_HINT), file.open("rb") as opened:
        size, start = file.stat().st_size, opened.read(8)
        header_bytes = unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= header_bytes <= min(size - 8, _HEADER_BYTES_MAX):
            raise ValueError(f"its header should have {header_bytes} bytes, the file has {size}")
        header: dict[str, Any] = json.loads(opened.read(header_bytes))
        places = [entry for key, entry in header.items() if key != "__metadata__"]
        end = max((entry["data_offsets"][1] for entry in places), default=0)
        if min((entry["data_offsets"][0] for entry in places), default=0) < 0 or end != size - 8 - header_bytes:
            raise ValueError(f"its tensors end at byte {end}, its data at {size - 8 - header_bytes}")
        return header


def quantisation_of(folder: Path, name: str) -> dict[str, Any] | None:
    """``quantization_config`` of a model folder; None: its weights are numbers. ``name``: of the model, for errors.
    Raises :class:`UserError`."""
    hint = f"restore {folder / 'config.json'}: download it again"
    with errors_named(f"cannot read config.json of {name}", hint):
        config = json.loads((folder / "config.json").read_bytes())
    if not isinstance(config, dict):
        return None  # the loader refuses it
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for described in (part.get(field) for part in texts for field in ("quantization_config", "compression_config")):
        if isinstance(described, dict):
            return described
        if described is not None:
            message = f"config.json of {name}: quantization_config is {str(described)[:40]!r}, not an object"
            raise UserError(message, hint=hint, param="model")
    return None


def is_beside(name: str) -> bool:
    """Whether a tensor takes no part in text, or is a buffer that older versions saved."""
    return bool(_BESIDE.search(name) or _SAVED_BUFFERS.search(name))


def tensor_sizes(file: Path) -> dict[str, int]:
    """How many values each tensor of a safetensors file has. Raises :class:`UserError` for a damaged one."""
    header = read_header(file)
    with errors_named(f"{file} is damaged", COMPLETE_HINT):
        return {key: math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__"}


@cache
def gguf_reader() -> Any:
    """gguf's class that reads the header of a file, four times as quick: for each token of a vocabulary it makes slices
    of the mapped file, and to make one of ``numpy.memmap`` takes ten times as long as one of an array. Opened as its
    base is: ``(path, mode)``."""
    import numpy as np
    from gguf import GGUFReader

    base: Any = GGUFReader

    class MappedReader(base):  # type: ignore[misc]  # of a package without types
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            plain = self.__dict__.get("plain")
            if plain is None:
                plain = self.plain = self.data.view(np.ndarray)
            kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
            return plain[offset : offset + kind.itemsize * int(count)].view(kind)

    return MappedReader
