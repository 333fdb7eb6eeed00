"""Where the processes of ``memserve serve`` run: on this host, or placed by Ray; options, each declared once.

The store of ``memserve serve``, started beside its instances or already running; adapters that come and go while it
serves: options, each declared once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from memserve.base.errors import UserError
from memserve.base.options import MANY, SECONDS, SIZE, Form, check_ranges, option, options_of, read_folder
from memserve.base.plugins import STORE_BACKENDS
from memserve.base.types import Role
from memserve.base.units import GIB, NS_PER_S, flag_bytes

INSTANCES_MAX = 64
"""Of a role, on one command line."""


class Place(StrEnum):
    """What starts instances and stores."""

    LOCAL = "local"
    RAY = "ray"


class Range(NamedTuple):
    """Counts that are allowed, both included."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """How many instances there are of a role, where the load decides."""

    scale: tuple[str, ...] = option((), "--scale", form=MANY)
    """ROLE=LEAST..MOST,...: as many instances of this role as the load asks for, for example prefill=1..3,decode=1..2;
    at first those of --prefill, --decode and --colocated. Repeatable."""
    up_ns: int = option(5 * NS_PER_S, "--scale-up-after", form=SECONDS, least=0.1)
    """With --scale: seconds that there must have been too much to do before another instance is started."""
    down_ns: int = option(60 * NS_PER_S, "--scale-down-after", form=SECONDS, least=0.1)
    """With --scale: seconds that fewer instances must have been enough before one is drained."""
    told_in: str = option("", "--scale-file")
    """With --scale: a file for each decision, as JSON, for what starts the instances instead of this command. Empty:
    this command starts and drains them."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.by_role() and self.told_in:
            raise UserError("--scale-file tells decisions of --scale", hint="add --scale prefill=1..3", param="scale")

    def by_role(self) -> dict[Role, Range]:
        """The counts that are allowed. Raises :class:`UserError` for a text that is malformed."""
        ranges: dict[Role, Range] = {}
        for part in (part for text in self.scale for part in text.split(",")):
            match = _RANGE.fullmatch(part.strip())
            role, counts = (match[1], Range(int(match[2]), int(match[3]))) if match else ("", Range(0, 0))
            if not role or role in ranges or not 1 <= counts.least <= counts.most <= INSTANCES_MAX:
                hint = "for example --scale prefill=1..3,decode=1..2; each role once, from 1 on"
                raise UserError(f"cannot read --scale {part!r}", hint=hint, param="scale")
            ranges[Role(role)] = counts
        return ranges

    def initial_count(self, role: Role, count: int | None) -> int | None:
        """Instances of ``role`` to begin with, where ``count`` are asked for; None: not said. Raises
        :class:`UserError` for a count that is not allowed."""
        allowed = self.by_role().get(role)
        if allowed is None or count is None:
            return count if allowed is None else allowed.least
        if not allowed.least <= count <= allowed.most:
            message = f"--{role.value} {count} is not in --scale {role.value}={allowed.least}..{allowed.most}"
            raise UserError(message, hint="begin with a count that is allowed", param=role.value)
        return count


_CLUSTER = re.compile(r"[A-Za-z0-9._-]{0,60}")
_RANGE = re.compile(r"(prefill|decode|colocated)=(\d{1,3})\.\.(\d{1,3})")


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Where the processes of a cluster run."""

    on: Place = option(Place.LOCAL)
    """``local``: the router starts its instances on this host; ``ray``: Ray places router, instances and stores on its
    nodes, and starts them again."""
    address: str | None = option(None)
    """With --on ray: HOST:PORT of the Ray cluster. None: RAY_ADDRESS, else a Ray of this host alone."""
    resources: tuple[str, ...] = option((), "--ray-resources", form=MANY)
    """With --on ray: ROLE=NAME:AMOUNT,...: what Ray reserves for each process of a role, for example
    decode=CPU:4,GPU:1; where it is not named, CPU:1. An instance computes on GPUs that are reserved for it, one for
    each of its workers; --device cuda reserves them. Repeatable, one role each."""
    cluster: str = option("", "--ray-cluster")
    """With --on ray: the name of this cluster, where several run on one Ray: `memserve scale --ray-cluster NAME`."""
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    """How many instances there are."""

    def __post_init__(self) -> None:
        if self.on is Place.LOCAL and (self.address is not None or self.resources or self.cluster):
            raise UserError("--address, --ray-resources and --ray-cluster are Ray's", hint="add --on ray", param="on")
        if not _CLUSTER.fullmatch(self.cluster):
            hint = "letters, digits, dots and dashes, 60 at most"
            raise UserError(f"{self.cluster[:100]!r} is no name of a cluster", hint=hint, param="ray_cluster")
        if self.on is Place.RAY and self.scaling.told_in:
            raise UserError("Ray carries out the decisions of --scale", hint="leave out --scale-file", param="on")
        self.by_role()

    @property
    def remote_place(self) -> Place | None:
        """None: nothing but this host is asked for."""
        return self.on if self.on is not Place.LOCAL else None

    @property
    def used_option(self) -> object | None:
        """None: no option here is used."""
        return self.remote_place or self.scaling.scale or None

    def by_role(self) -> dict[str, dict[str, float]]:
        """What Ray reserves, by role. Raises :class:`UserError` for a text that is malformed."""
        amounts_by_role: dict[str, dict[str, float]] = {role.value: {"CPU": 1.0} for role in Role}
        for text in self.resources:
            role, _, parts = text.partition("=")
            pairs = [part.partition(":") for part in parts.split(",")]
            try:
                amounts = {name: float(amount) for name, _, amount in pairs}
            except ValueError:
                amounts = {}
            if role not in amounts_by_role or not amounts or "" in amounts or min(amounts.values()) <= 0:
                hint = "for example --ray-resources decode=CPU:4,GPU:1"
                raise UserError(f"cannot read --ray-resources {text!r}", hint=hint, param="ray_resources")
            amounts_by_role[role] = amounts
        return amounts_by_role


@dataclass(frozen=True, slots=True)
class Followers:
    """How the routers beside the owner are started on this host."""

    flags: tuple[str, ...] = ()
    """Of ``memserve router``, but for the owner's address."""
    keys: Mapping[str, object] = field(default_factory=dict, repr=False)
    """What no command line may show."""
    on_start: Callable[[], None] = lambda: None
    """Called before any is started, when the folder of the metadata is this process's."""
    drain_s: float = 0.0
    """How long one may take to finish what its clients wait for."""


SYNCS = ("none", "segment", "always")
ADMISSIONS = ("second-hit", "all")
DRAM_BYTES = GIB


OWN_BACKEND = "file"


def backend_of(folder: str) -> tuple[str, str]:
    """Store backend and location of what ``--ssd`` names: ``NAME://LOCATION``, or a folder."""
    name, separator, location = folder.partition("://")
    return (name, location) if separator and "/" not in name else (OWN_BACKEND, folder)


def read_folders(texts: list[str]) -> tuple[tuple[str, int], ...]:
    """Folders and sizes of texts ``DIR=20GiB``. Raises :class:`UserError` for anything else."""
    folders: dict[str, int] = {}
    for text in texts:
        folder, size = read_folder(text, "--ssd")
        STORE_BACKENDS.check_name(backend_of(folder)[0])
        if folder in folders:
            raise UserError(f"--ssd names {folder} twice", hint="one folder a disk", param="ssd")
        folders[folder] = size
    return tuple(folders.items())


_FOLDERS = Form(
    list[str], read_folders, lambda folders: [f"{folder}={flag_bytes(size)}" for folder, size in folders] or None
)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """A process of this host that keeps KV in memory and on disks, for all instances, through every restart."""

    folders: tuple[tuple[str, int], ...] = option((), "--ssd", form=_FOLDERS)
    """DIR=20GiB: start a store that also keeps KV in a file of this size in folder DIR. It outlives every process.
    Repeatable, one folder a disk. NAME://LOCATION=20GiB: where a plug-in puts it (`memserve doctor` lists them)."""
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
    (--cluster-secret-file), and start none. It goes on when this server ends. Several, with commas between them, are as
    one: each keeps its share. None: no such store."""

    def __post_init__(self) -> None:
        for name, value, choices in (("sync", self.sync, SYNCS), ("admission", self.admission, ADMISSIONS)):
            if value not in choices:
                hint = f"use one of {', '.join(choices)}"
                raise UserError(f"unknown --ssd-{name} {value!r}", hint=hint, param=f"ssd_{name}")
        if self.at is not None and self.is_wanted:
            hint = f"leave out --store, or give {self._requesting_flag} to the `memserve store` that runs there"
            raise UserError(
                f"--store names a store that runs, and {self._requesting_flag} starts one", hint=hint, param="store"
            )
        if len(set(self.addresses)) < len(self.addresses) or "" in self.addresses:
            hint = "name each store once: --store HOST:PORT,HOST:PORT"
            raise UserError(f"cannot read --store {self.at!r}", hint=hint, param="store")
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
    def addresses(self) -> tuple[str, ...]:
        """Of the stores that run already, as they were named."""
        return () if self.at is None else tuple(address.strip() for address in self.at.split(","))

    @property
    def _requesting_flag(self) -> str:
        """The option that asks for a store."""
        if self.folders:
            return "--ssd"
        if self.dram_bytes is not None:
            return "--store-dram"
        return "--store-listen" if self.address is not None else "--store"

    @property
    def memory_bytes(self) -> int:
        return DRAM_BYTES if self.dram_bytes is None else self.dram_bytes

    @property
    def store_flags(self) -> tuple[str, ...]:
        """Of ``memserve store``."""
        words = ["--dram", str(self.memory_bytes), "--ssd-sync", self.sync, "--ssd-admission", self.admission]
        for folder, size in self.folders:
            words += ["--ssd", f"{folder}={size}"]
        if self.writes_per_day_bytes:
            words += ["--ssd-writes-per-day", str(self.writes_per_day_bytes)]
        if self.address is not None:
            words += ["--listen", self.address]
        return tuple(words)

    def refuse_options(self, instead: str) -> None:
        """Raise :class:`UserError` when a store is wanted where there can be none."""
        if self.is_used:
            raise UserError(f"{self._requesting_flag} {_ALONE}", hint=instead, param="ssd")


_ALONE = "needs a cluster: a store is a process of its own beside the instances"


def refuse_store(keywords: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for a keyword that is an option of a store: one engine alone has none."""
    for store_option in options_of(StoreOptions):
        name = store_option.flag.removeprefix("--").replace("-", "_")
        if keywords.get(name) is not None:
            raise UserError(
                f"{name} {_ALONE}", hint=f"use a server: memserve serve {store_option.flag} ...", param=name
            )


@dataclass(frozen=True, slots=True)
class LoraUpdates:
    """LoRA adapters that are loaded and unloaded while an engine serves."""

    lora_folder: str = option("")
    """Adapters in folders below this one may be loaded and unloaded while it serves (``/v1/load_lora_adapter``). Every
    instance reads them there. Empty: adapters are those of ``--lora``."""
    max_loras: int = option(8, least=1, vllm="max_cpu_loras")
    """How many of different content, for which memory is kept, and for one more."""
    max_lora_rank: int = option(64, least=1, vllm="max_lora_rank")
    """The largest rank of those."""

    def __post_init__(self) -> None:
        check_ranges(self)


NO_UPDATES = LoraUpdates()
"""Adapters are those of the start."""
