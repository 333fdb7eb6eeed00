"""Where a store runs and what it is given, and what it remembers of the model whose KV it keeps."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memserve.errors import UserError
from memserve.mempool.identity import kv_secret
from memserve.runtime.meta_folder import write_private
from memserve.runtime.private_files import Secret, followed
from memserve.store.disk_config import DisksConfig
from memserve.types import KVGeometry

_MODEL = "memserve-store.json"
_SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class StorePlace:
    """What a store's process is given."""

    name: str
    host: str
    """Where it listens."""
    port: int
    """0: any."""
    dram_bytes: int
    folders: tuple[tuple[Path, int], ...]
    """A folder of each disk, and the bytes that it takes there."""
    disks: DisksConfig
    secret: Secret
    """The cluster's."""
    join: tuple[str, ...] = ()
    """Where the router may be, ``tcp://host:port`` each. Empty: the store serves clients, and waits for a
    router to call it."""
    advertise: str | None = None
    """The host by which others reach it."""
    link: str = "auto"
    drain_s: float = 20.0
    """How long it may write what is in memory alone when it is told to end."""
    health_file: Path | None = None
    """Where it says once a second what it is to its cluster."""

    @property
    def memory_name(self) -> str:
        """Of its shared memory: one store of this name, secret and user finds what it has left."""
        parts = f"{os.getuid()} {self.name} {kv_secret(followed(self.secret).first)}".encode()
        letters = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in self.name[:24])
        return f"{letters}-{hashlib.blake2b(parts, digest_size=8).hexdigest()}"


class StoredModel(msgspec.Struct, frozen=True):
    """Whose KV a store keeps."""

    namespace: str
    geometry: KVGeometry


NO_MODEL = StoredModel("", KVGeometry(1, 1, 16, 16, "float32"))
"""Until a member with a model is seen: blocks of 4 KiB."""


def _path_of(place: StorePlace) -> Path:
    return place.folders[0][0] / _MODEL if place.folders else _SHARED / f"memserve-store-{place.memory_name}.json"


def known_model(place: StorePlace) -> StoredModel:
    """Whose KV the last store here has kept, or ``NO_MODEL``. Raises :class:`UserError` when that cannot be read."""
    path = _path_of(place)
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredModel)
    except FileNotFoundError:
        return NO_MODEL
    except (msgspec.MsgspecError, UserError):
        return NO_MODEL  # the next member says it again
    except OSError as error:
        hint = "give a folder that this user may read and write"
        raise UserError(f"cannot read {path}: {error.strerror}", hint=hint, param="ssd") from None


def remember_model(place: StorePlace, model: StoredModel) -> None:
    """For the next start. Raises :class:`UserError` when it cannot be written."""
    path = _path_of(place)
    try:
        write_private(path, msgspec.json.encode(model).decode())
    except OSError as error:
        hint = "give a folder that this user may write"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint, param="ssd") from None


def forget_model(place: StorePlace) -> None:
    """At an orderly end without disks: nothing is left that it could describe."""
    if not place.folders:
        _path_of(place).unlink(missing_ok=True)
