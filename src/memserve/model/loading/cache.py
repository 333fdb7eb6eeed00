"""The cache folder for converted models: each entry is built once, appears whole, or not at all.

A build happens in a temporary sibling under a lock (``flock``: freed by the kernel when its holder dies), gets a marker
as its last file, and is renamed into place. An entry without the right marker is torn or outdated, and is built again.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from memserve.base.errors import UserError
from memserve.base.units import NS_PER_S
from memserve.system.process import cache_root

MARKER = "memserve-cache.json"
STORED = "stored.json"
"""In a folder whose quantised matrices stay in their GGUF file: which file that is, and where in it they are."""
log = logging.getLogger(__name__)

_RECENT_NS = 2 * NS_PER_S
_HINT = "set MEMSERVE_CACHE_DIR to a writable folder with enough space"


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


@functools.cache
def _code_digest() -> str:
    """Of all that computes a model: what was found out about one with other code is found out again."""
    package = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted((*(package / "model").rglob("*.py"), *package.glob("_kernels*.so"))):
        digest.update(os.fsencode(file.name) + file.read_bytes())
    digest.update("".join(metadata.version(name) for name in ("torch", "transformers")).encode())
    return digest.hexdigest()


def record_name(kind: str, fingerprint: str, dtype: str) -> str:
    """Of the record of what ``kind`` of check found out about a model on this processor, with this code."""
    from memserve import _kernels  # doctor reads this module where it is not built

    return f"{fingerprint}-{dtype}-{kind}-{_kernels.isa()}-{_code_digest()}"


def record_file(name: str) -> Path:
    """Where :func:`write_record` keeps a record."""
    return cache_root() / "verdicts" / f"{name}.json"


def read_record(name: str) -> dict[str, Any]:
    """What :func:`write_record` kept under ``name``; nothing, if it is not there or damaged."""
    try:
        record = json.loads(record_file(name).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(name: str, record: Mapping[str, Any]) -> None:
    """Keep a small ``record`` of what was found out about a model, if the cache can be written."""
    _write_json(record_file(name), record)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write ``file`` whole, or not at all: what it says is found out again at the next start then."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(value))
        fresh.rename(file)
    except OSError as error:
        log.info("what was found out about a model is not kept, each start finds it out again: %s", error)


def _build(entry: Path, version: int, build: Callable[[Path], None]) -> None:
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a builder that died
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


def fingerprint(folder: Path) -> str:
    """32 hex digits: a hash of every byte of a model folder's config and weights, those that stay in their file too."""
    if stored := _stored_fingerprint(folder):
        return stored
    return _fingerprint(folder, {file: whole_digest(file) for file in folder.glob("*.safetensors")})


def cached_fingerprint(folder: Path) -> str | None:
    """As :func:`fingerprint`, without reading weights; None: they were not read since they changed."""
    if stored := _stored_fingerprint(folder):
        return stored
    digests = {file: _cached_digest(*_digest_place(file.resolve())) for file in folder.glob("*.safetensors")}
    cached_digests = {file: digest for file, digest in digests.items() if digest is not None}
    return _fingerprint(folder, cached_digests) if len(cached_digests) == len(digests) else None


def _stored_fingerprint(folder: Path) -> str:
    """Of a folder of this cache with :data:`STORED`; empty: it is none. Keys and values are rounded otherwise than with
    numbers."""
    if folder.parent != cache_root() or not (folder / STORED).exists():
        return ""
    file_digest = json.loads((folder / STORED).read_text())["sha256"].encode()
    config = (folder / "config.json").read_bytes()
    return hashlib.blake2b(config + file_digest + b" as stored", digest_size=16).hexdigest()


def _fingerprint(folder: Path, digests: dict[Path, bytes]) -> str:
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in sorted(digests):
        digest.update(os.fsencode(file.name) + digests[file])
    return digest.hexdigest()


def _digest_place(path: Path) -> tuple[Path, list[str | int]]:
    """Where the digest of a file is kept, and what of the file must be as it was."""
    now = path.stat()
    digest_file = cache_root() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    return digest_file, [str(path), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def whole_digest(path: Path) -> bytes:
    """SHA-256 of all bytes of a file. It is kept in the cache folder (model folders may be read-only), and used again
    while the file's inode, length and times stay the same.

    The digest of a file that changed a moment ago is not kept: file systems' clocks tick in milliseconds, so a second
    change could go unnoticed. Where the cache folder cannot be written, the digest is computed each time.
    """
    path = path.resolve()
    before = path.stat()
    digest_file, identity = _digest_place(path)
    cached = _cached_digest(digest_file, identity)
    if cached is not None:
        return cached
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    after = path.stat()
    is_same = (after.st_size, after.st_ctime_ns) == (before.st_size, before.st_ctime_ns)
    if is_same and time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _RECENT_NS:
        _write_json(digest_file, {"file": identity, "sha256": digest.hex()})
    return digest


def _cached_digest(digest_file: Path, identity: list[str | int]) -> bytes | None:
    try:
        entry = json.loads(digest_file.read_text())
        digest = bytes.fromhex(entry["sha256"])
        return digest if entry["file"] == identity and len(digest) == 32 else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
