"""GGUF files (level 3): converted once to a Hugging Face folder with the exact dequantised values in float32.

``--dtype float32`` then computes with the same weights as transformers loading the GGUF file itself. A second copy,
already rounded to bfloat16, lets the default start without ever mapping the float32 one. The conversion runs in a
process of its own, which takes its memory with it when it ends.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memserve.errors import UserError
from memserve.model.loading.cache import cached_folder, whole_digest
from memserve.model.loading.checkpoint import errors_named, load_module

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
"""Raise this when a conversion would come out differently: cached ones are then made again."""

CONVERSION_S = 3600
"""Longer, and the file is taken for one that nothing can convert."""
_HINT = "download it again; or convert it to a Hugging Face folder, and serve that"

EXACT, ROUNDED = "float32", "bfloat16"
"""The two folders of a conversion."""


def converted_folder(path: Path, dtype: str) -> Path:
    """The Hugging Face folder for the GGUF file ``path``, converted on first use (a minute for a small model).

    Raises :class:`UserError` when the file is not a GGUF file, or holds something that transformers cannot convert.
    """
    with errors_named(f"cannot read {path}", "is it yours to read?"), path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file", hint="its first four bytes should be 'GGUF'")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
    key = f"{name}-{whole_digest(path).hex()[:16]}"
    entry = cached_folder(key, VERSION, lambda folder: _convert_in_child(path, folder))
    return entry / (ROUNDED if dtype == ROUNDED else EXACT)


def _convert_in_child(path: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "memserve.model.loading.gguf", str(path), str(folder)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CONVERSION_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"cannot convert {path.name}: it took longer than {CONVERSION_S} s", hint=_HINT) from None
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit status {child.returncode}"
        raise UserError(f"cannot convert {path.name}: {reason[:300]}", hint=_HINT)


def convert(path: Path, folder: Path) -> None:
    """Write ``folder/float32`` and ``folder/bfloat16`` from the GGUF file ``path``."""
    import torch
    from transformers import AutoTokenizer

    model = load_module(path.parent, path.name, torch.float32, path.name)
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tied = model.config.get_text_config().tie_word_embeddings
    weights = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}

    exact = folder / EXACT
    exact.mkdir()
    tokenizer.save_pretrained(exact)
    model.generation_config.save_pretrained(exact)
    _write_weights(exact, weights, torch.float32)
    _write_config(exact, model)

    rounded = folder / ROUNDED
    shutil.copytree(exact, rounded, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    _write_weights(rounded, weights, torch.bfloat16)
    _write_config(rounded, model)


def _write_weights(folder: Path, weights: dict[str, Tensor], dtype: Any) -> None:
    from safetensors.torch import save_file

    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous() for name, value in weights.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_config(folder: Path, model: Any) -> None:
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # these weights are plain
    config.pop("_name_or_path", None)
    config |= {"dtype": folder.name, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except UserError as refused:
        sys.exit(refused.message)
