"""Files of tenants on disk: what a batch reads, and what it writes.

::

    files/file-ID         the bytes
    files/file-ID.json    whose they are, what they are called; a file without this one was never finished
    batches/batch_ID.json a batch (``batch.py``)

A record takes the place of an earlier one as a whole. Everything is readable by the server's user alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from memserve.api.http.errors import ApiError, bad_request, echo
from memserve.api.http.request import new_id
from memserve.base.units import human_bytes

log = logging.getLogger(__name__)

FILES_MAX = 10_000
"""Files of one tenant."""
_RECORD, _UNFINISHED = ".json", ".part"
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class StoredFile(msgspec.Struct, frozen=True):
    """What is known of a file."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    nbytes: int
    created_s: int
    expires_s: int | None = None

    def card(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        expiry = {} if self.expires_s is None else {"expires_at": self.expires_s}
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.nbytes,
            "created_at": self.created_s,
            **expiry,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def save_record(path: Path, record: msgspec.Struct) -> None:
    """Put ``record`` on disk, as a whole and durably. Raises :class:`OSError`."""
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load_records(folder: Path, kind: type[RecordT]) -> list[RecordT]:
    """All records in ``folder``; one that cannot be read is left where it is, with a line in the log."""
    records = []
    for path in sorted(folder.glob(f"*{_RECORD}")):
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except (OSError, msgspec.MsgspecError) as error:
            log.error("%s cannot be read: %s", path, error)
    return records


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How much may be kept."""

    file_bytes_max: int
    """Of one file."""
    tenant_bytes_max: int
    """Of all files of one tenant."""


class FileWriter:
    """A file that is being written. Its bytes count as its tenant's from the first one on."""

    def __init__(self, store: FileStore, file_id: str, tenant: str, file: IO[bytes]) -> None:
        self._store, self._file = store, file
        self.file_id, self.tenant, self.nbytes = file_id, tenant, 0

    async def write_bytes(self, data: bytes) -> None:
        """Append. Raises :class:`ApiError` 413 for too long a file, 400 where the tenant's files have no room left."""
        self._store.check_room(self.tenant, self.nbytes, len(data))
        self.nbytes += len(data)
        await asyncio.to_thread(self._file.write, data)

    async def finish_file(self, filename: str, purpose: str, expires_after_s: int | None = None) -> StoredFile:
        """The file is whole: keep it, durably."""
        await asyncio.to_thread(self._sync_file)
        return await self._store.keep_file(self, filename, purpose, expires_after_s)

    def _sync_file(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon_file(self) -> None:
        """Drop what was written; nothing happens to a finished file."""
        self._file.close()
        self._store.drop_unfinished(self)


class FileStore:
    """The files of all tenants. Lives in the event loop; bytes are written in other threads."""

    def __init__(self, folder: Path, limits: FileLimits) -> None:
        """Raises :class:`OSError` where the folder cannot be used."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self.limits = folder, limits
        self._files = {record.file_id: record for record in load_records(folder, StoredFile)}
        self._writers: dict[str, FileWriter] = {}
        self.is_needed: Callable[[str], bool] = lambda _file_id: False
        """Whether a batch still needs a file: then it does not expire."""
        self._tenant_bytes: dict[str, int] = {}
        for record in self._files.values():
            self._count_bytes(record.tenant, record.nbytes)

    def drop_remains(self, unfinished: Collection[str]) -> None:
        """Delete bytes that no record names: of uploads that broke off. ``unfinished``: files that batches still
        write."""
        for path in self._folder.iterdir():
            file_id = path.name.partition(".")[0]
            if file_id not in self._files and file_id not in unfinished:
                path.unlink(missing_ok=True)

    def begin_file(self, tenant: str) -> FileWriter:
        """A new file. Raises :class:`ApiError` 400 where the tenant has too many."""
        if sum(record.tenant == tenant for record in self._files.values()) >= FILES_MAX:
            raise bad_request(f"There are {FILES_MAX} files already; delete some", code="too_many_files")
        file_id = f"file-{new_id()}"
        file = open(self.path_of(file_id, _UNFINISHED), "wb", opener=_open_private)  # noqa: SIM115  # FileWriter closes it
        writer = self._writers[file_id] = FileWriter(self, file_id, tenant, file)
        return writer

    def path_of(self, file_id: str, suffix: str = "") -> Path:
        """Where the bytes of a file lie; ``file_id`` is one of ours."""
        return self._folder / f"{file_id}{suffix}"

    def check_room(self, tenant: str, nbytes: int, more: int) -> None:
        """Count ``more`` bytes of a file that has ``nbytes``. Raises :class:`ApiError` where that is too much."""
        if nbytes + more > self.limits.file_bytes_max:
            most = human_bytes(self.limits.file_bytes_max)
            message = f"The file is larger than {most}, the most that this server takes (--max-file)"
            raise ApiError(413, message, param="file", code="file_too_large")
        if not self.has_room(tenant, more):
            most = human_bytes(self.limits.tenant_bytes_max)
            message = f"Your files take more than {most} with this one (--file-storage): delete some"
            raise bad_request(message, "file", "file_storage_full")
        self._count_bytes(tenant, more)

    def has_room(self, tenant: str, nbytes: int) -> bool:
        """Whether the tenant's files may have so many bytes more."""
        return self._tenant_bytes.get(tenant, 0) + nbytes <= self.limits.tenant_bytes_max

    async def keep_file(
        self, written: FileWriter, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> StoredFile:
        """Name a file whose bytes are on disk."""
        now_s = int(time.time())
        expires_s = None if expires_after_s is None else now_s + expires_after_s
        record = StoredFile(written.file_id, written.tenant, filename, purpose, written.nbytes, now_s, expires_s)
        self.path_of(written.file_id, _UNFINISHED).rename(self.path_of(written.file_id))
        await self._name_file(record)
        del self._writers[written.file_id]
        return record

    async def adopt_file(self, record: StoredFile) -> None:
        """Name a file that a batch has written at its :meth:`path_of`; again: nothing changes."""
        if record.file_id not in self._files:
            self._count_bytes(record.tenant, record.nbytes)
            await self._name_file(record)

    async def _name_file(self, record: StoredFile) -> None:
        await asyncio.to_thread(save_record, self.path_of(record.file_id, _RECORD), record)
        self._files[record.file_id] = record

    def drop_unfinished(self, written: FileWriter) -> None:
        """Delete what there is of a file that was not kept."""
        if self._writers.pop(written.file_id, None) is not None:
            self._count_bytes(written.tenant, -written.nbytes)
            for suffix in (_UNFINISHED, ""):
                self.path_of(written.file_id, suffix).unlink(missing_ok=True)

    def get_file(self, tenant: str, file_id: str) -> StoredFile:
        """The tenant's file. Raises :class:`ApiError` 404; other tenants' files do not exist for it."""
        self.drop_expired()
        record = self._files.get(file_id)
        if record is None or record.tenant != tenant:
            raise ApiError(404, f"No such File object: {echo(file_id)}", param="id", code="file_not_found")
        return record

    def list_files(self, tenant: str) -> list[StoredFile]:
        """The tenant's files, oldest first."""
        self.drop_expired()
        files = [record for record in self._files.values() if record.tenant == tenant]
        return sorted(files, key=lambda record: (record.created_s, record.file_id))

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Forget the tenant's file. Raises :class:`ApiError` 404."""
        self._drop_file(self.get_file(tenant, file_id))

    def drop_expired(self) -> None:
        """Forget files whose time has passed, unless a batch needs them."""
        now_s = time.time()
        for record in [r for r in self._files.values() if r.expires_s is not None and r.expires_s <= now_s]:
            if not self.is_needed(record.file_id):
                self._drop_file(record)

    def _drop_file(self, record: StoredFile) -> None:
        """The record goes first: bytes without one are dropped at the next start."""
        self.path_of(record.file_id, _RECORD).unlink(missing_ok=True)
        self.path_of(record.file_id).unlink(missing_ok=True)
        del self._files[record.file_id]
        self._count_bytes(record.tenant, -record.nbytes)

    def _count_bytes(self, tenant: str, nbytes: int) -> None:
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + nbytes


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
