"""The cache folder for converted models (level 3): each entry is built once, appears whole, or not at all.

A build happens in a temporary sibling under a lock (``flock``: freed by the kernel when its holder dies), gets a marker
as its last file, and is renamed into place. An entry without the right marker is a torn or outdated one: built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memserve.errors import UserError
from memserve.units import KIB, MIB

MARKER = "memserve-cache.json"
_HINT = "point MEMSERVE_CACHE_DIR at a folder with room that you may write to"


def cache_root() -> Path:
    """``$MEMSERVE_CACHE_DIR``, else ``$XDG_CACHE_HOME/memserve``, else ``~/.cache/memserve``."""
    if chosen := os.environ.get("MEMSERVE_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "memserve"


def cached_folder(key: str, version: int, build: Callable[[Path], None]) -> Path:
    """The folder ``key`` of the cache, built by ``build(empty_folder)`` unless it is there in this ``version``.

    Raises :class:`UserError` when the cache cannot be written; errors of ``build`` pass through, leaving nothing.
    """
    root = cache_root()
    entry = root / key
    if _is_whole(entry, version):
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            if not _is_whole(entry, version):  # another process may have built it while we waited
                _build(entry, version, build)
    except OSError as error:
        raise UserError(f"cannot write the model cache in {root}: {error.strerror or error}", hint=_HINT) from error
    return entry


def _build(entry: Path, version: int, build: Callable[[Path], None]) -> None:
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a builder that died
    partial.mkdir()
    try:
        build(partial)
        _write_marker(partial / MARKER, version)
        shutil.rmtree(entry, ignore_errors=True)
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_marker(path: Path, version: int) -> None:
    """The marker is synced after everything else, so that it never vouches for data that a crash has lost."""
    for file in path.parent.rglob("*"):
        if file.is_file():
            _sync(file)
    path.write_text(json.dumps({"version": version}))
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_whole(entry: Path, version: int) -> bool:
    try:
        marker = json.loads((entry / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("version") == version


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


def sampled_digest(path: Path) -> bytes:
    """32 bytes that identify a large file in milliseconds: its size, its first MiB, and 64 pieces spread over it.

    The head of a safetensors or GGUF file names every tensor; the pieces tell apart fine-tunes of one model.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=32)
    with path.open("rb") as file:
        digest.update(file.read(MIB))
        for piece in range(64):
            file.seek(size * piece // 64)
            digest.update(file.read(4 * KIB))
    return digest.digest()
