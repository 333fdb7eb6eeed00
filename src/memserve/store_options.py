"""The store of ``memserve serve``, started beside its instances or already running: options, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memserve.errors import UserError
from memserve.options import SIZE, Form, option, options_of
from memserve.units import GIB, MIB, flag_bytes, parse_bytes

SYNCS = ("none", "segment", "always")
ADMISSIONS = ("second-hit", "all")
DRAM_BYTES = GIB
FOLDER_BYTES_MIN = 64 * MIB


def read_folders(texts: list[str]) -> tuple[tuple[str, int], ...]:
    """Folders and sizes of texts ``DIR=20GiB``. Raises :class:`UserError` for anything else."""
    folders: dict[str, int] = {}
    for text in texts:
        folder, _, size = text.rpartition("=")
        if not folder or not size:
            hint = "a folder of that disk and a size, for example --ssd /mnt/nvme0/memserve=20GiB"
            raise UserError(f"cannot read --ssd {text!r}", hint=hint, param="ssd")
        if folder in folders:
            raise UserError(f"--ssd names {folder} twice", hint="one folder a disk", param="ssd")
        folders[folder] = parse_bytes(size)
        if folders[folder] < FOLDER_BYTES_MIN:
            hint = f"at least {flag_bytes(FOLDER_BYTES_MIN)}: --ssd {folder}={flag_bytes(FOLDER_BYTES_MIN)}"
            raise UserError(f"--ssd {text} is too small to keep anything", hint=hint, param="ssd")
    return tuple(folders.items())


_FOLDERS = Form(
    list[str], read_folders, lambda folders: [f"{folder}={flag_bytes(size)}" for folder, size in folders] or None
)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """A process of this host that keeps KV in memory and on disks, for all instances, through every restart."""

    folders: tuple[tuple[str, int], ...] = option((), "--ssd", form=_FOLDERS)
    """DIR=20GiB: start a store that also keeps KV in a file of this size in folder DIR. It outlives every process.
    Repeatable, one folder a disk."""
    dram_bytes: int | None = option(None, "--store-dram", form=SIZE)
    """Start a store with this much memory. None: 1GiB, where --ssd or --store-listen asks for a store."""
    address: str | None = option(None, "--store-listen")
    """HOST:PORT: start a store at which clients reach it, too (``memserve.StoreClient``). None: only instances do."""
    sync: str = option("segment", "--ssd-sync")
    """When writes to disks are made safe against a loss of power: ``none``: never; ``segment``: with each segment;
    ``always``: with each block."""
    writes_per_day_bytes: int = option(0, "--ssd-writes-per-day", form=SIZE)
    """At most so much is written to all disks together within 24 hours. 0: no limit."""
    admission: str = option("second-hit", "--ssd-admission")
    """What is written to disks once they have been full: ``second-hit``: what was asked for before; ``all``: everything
    new."""
    at: str | None = option(None, "--store")
    """HOST:PORT: use the store that runs there (``memserve store --listen HOST:PORT``), with its secret
    (--cluster-secret-file), and start none. It goes on when this server ends. None: no such store."""

    def __post_init__(self) -> None:
        for name, value, known in (("sync", self.sync, SYNCS), ("admission", self.admission, ADMISSIONS)):
            if value not in known:
                hint = f"use one of {', '.join(known)}"
                raise UserError(f"unknown --ssd-{name} {value!r}", hint=hint, param=f"ssd_{name}")
        if self.at is not None and self.is_wanted:
            hint = f"leave out --store, or give {self._flag} to the `memserve store` that runs there"
            raise UserError(f"--store names a store that runs, and {self._flag} starts one", hint=hint, param="store")
        idle = StoreOptions.__dataclass_fields__
        if not self.is_wanted:
            hint = "add --ssd DIR=20GiB" if self.at is None else "give it to the `memserve store` that runs there"
            for name, flag in (("sync", "--ssd-sync"), ("writes_per_day_bytes", "--ssd-writes-per-day")):
                if getattr(self, name) != idle[name].default:
                    raise UserError(f"{flag} does nothing without a disk", hint=hint, param="ssd")

    @property
    def is_wanted(self) -> bool:
        """Whether a store is to be started."""
        return bool(self.folders) or self.dram_bytes is not None or self.address is not None

    @property
    def is_used(self) -> bool:
        """Whether there is to be a store, started here or not."""
        return self.is_wanted or self.at is not None

    @property
    def _flag(self) -> str:
        """The option that asks for a store."""
        if self.folders:
            return "--ssd"
        if self.dram_bytes is not None:
            return "--store-dram"
        return "--store-listen" if self.address is not None else "--store"

    @property
    def memory_bytes(self) -> int:
        """Of the store's memory."""
        return DRAM_BYTES if self.dram_bytes is None else self.dram_bytes

    @property
    def flags(self) -> tuple[str, ...]:
        """Of ``memserve store``."""
        words = ["--dram", str(self.memory_bytes), "--ssd-sync", self.sync, "--ssd-admission", self.admission]
        for folder, size in self.folders:
            words += ["--ssd", f"{folder}={size}"]
        if self.writes_per_day_bytes:
            words += ["--ssd-writes-per-day", str(self.writes_per_day_bytes)]
        if self.address is not None:
            words += ["--listen", self.address]
        return tuple(words)

    def refuse(self, instead: str) -> None:
        """Raise :class:`UserError` when a store is wanted where there can be none."""
        if self.is_used:
            raise UserError(f"{self._flag} {_ALONE}", hint=instead, param="ssd")


_ALONE = "needs a cluster: a store is a process of its own beside the instances"


def refuse_store(keywords: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for a keyword that is an option of a store: one engine alone has none."""
    for one in options_of(StoreOptions):
        name = one.flag.removeprefix("--").replace("-", "_")
        if keywords.get(name) is not None:
            raise UserError(f"{name} {_ALONE}", hint=f"use a server: memserve serve {one.flag} ...", param=name)
