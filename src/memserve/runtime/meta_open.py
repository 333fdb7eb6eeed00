"""Opens what ``--metadata`` names (level 3): nothing, a folder, or etcd."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from memserve.errors import UserError
from memserve.messages import Peer
from memserve.meta.medium import Medium, MediumFailed
from memserve.metadata import RecoveredState
from memserve.runtime.meta_file import JOURNAL, FileMedium
from memserve.runtime.meta_keeper import MetaKeeper
from memserve.runtime.meta_state import StateFolder, default_folder

log = logging.getLogger(__name__)

NONE, AUTO, ETCD = "none", "auto", "etcd://"


@dataclass(frozen=True, slots=True)
class MetadataPlace:
    """What ``--metadata`` says."""

    folder: Path | None = None
    """State of this host; ``None``: nothing outlives the router's process here."""
    etcd: tuple[str, ...] = ()
    """``host:port`` of etcd's members; empty: the journal lies in ``folder``."""
    cluster: str = "default"
    """Its name in etcd."""
    is_wish: bool = False
    """Nobody has asked for the folder: without it, things go on as they can."""


def metadata_place(text: str, port: int) -> MetadataPlace:
    """What ``--metadata TEXT`` means for a server at HTTP port ``port``; 0: it will have another one each time. Raises
    :class:`UserError`."""
    own = default_folder(port) if port else None
    if text == NONE:
        return MetadataPlace()
    if text == AUTO:
        return MetadataPlace(own, is_wish=True)
    if text.startswith(ETCD):
        members, _, name = text.removeprefix(ETCD).partition("/")
        hosts = tuple(host for host in members.split(",") if host)
        if "@" in members:
            hint = "this memserve speaks to etcd without credentials: let etcd admit this host's network alone"
            raise UserError("--metadata must not hold a password: command lines are public", hint=hint)
        if not hosts:
            raise UserError(f"{text} names no host", hint="--metadata etcd://10.0.0.1:2379", param="metadata")
        return MetadataPlace(own, hosts, name.strip("/") or "default", is_wish=True)
    if "://" in text:
        hint = "give a folder, etcd://HOST:PORT, or none"
        raise UserError(f"unknown metadata store {text}", hint=hint, param="metadata")
    return MetadataPlace(Path(text).expanduser().absolute())


@dataclass(frozen=True, slots=True)
class Metadata:
    """Open metadata."""

    folder: Path | None
    keeper: MetaKeeper | None
    """``None``: nothing is recovered."""
    secret: str | None
    """The cluster's, from the folder."""

    @property
    def recovered(self) -> RecoveredState:
        """What the last router knew."""
        return self.keeper.recovered if self.keeper is not None else RecoveredState()

    def router(self, name: str, generation: int) -> Peer:
        """The name of the next router: of ``generation``, or one more than the last, whatever the clock says."""
        last = self.recovered.router
        return Peer(name, max(generation, last.generation + 1) if last is not None else generation)


@contextmanager
def open_metadata(place: MetadataPlace, say: Callable[[str], None]) -> Iterator[Metadata]:
    """Open it; with etcd, wait until no other router is active. The keeper is the router's to close.

    Raises :class:`UserError` when it cannot be used.
    """
    with ExitStack() as stack:
        folder = _state_folder(place, say)
        if folder is not None:
            stack.callback(folder.close)
        keeper = None
        if place.etcd:
            keeper = MetaKeeper(_elected(place, say))
        elif folder is not None:
            keeper = _file_keeper(folder)
        yield Metadata(folder.path, keeper, folder.secret()) if folder is not None else Metadata(None, keeper, None)


def _file_keeper(folder: StateFolder) -> MetaKeeper:
    if folder.was_used and not (folder.path / JOURNAL).exists():
        log.error(
            "there is no %s, though a router has used this folder: documents, pinned prefixes, sessions and members"
            " that it knew are forgotten (etcd may have them: was it started with --metadata etcd://...?)",
            folder.path / JOURNAL,
        )
    try:
        return MetaKeeper(FileMedium(folder.path))
    except MediumFailed as error:
        hint = "give a folder, --metadata PATH, or none"
        raise UserError(f"cannot keep metadata in {folder.path}: {error}", hint=hint, param="metadata") from None


def _state_folder(place: MetadataPlace, say: Callable[[str], None]) -> StateFolder | None:
    if place.folder is None:
        return None
    try:
        return StateFolder(place.folder)
    except UserError as error:
        if not place.is_wish:
            raise
        say(f"instances will end with this process: {error.message}")
        return None


def _elected(place: MetadataPlace, say: Callable[[str], None]) -> Medium:
    from memserve.runtime.meta_etcd import EtcdMedium

    medium = EtcdMedium(place.etcd, place.cluster)
    me = f"{socket.gethostname()}:{os.getpid()}"
    try:
        medium.elect(me, lambda active: say(f"standing by: {active} is the active router ..."), _end_now)
    except MediumFailed as error:
        raise UserError(f"the election failed: {error}", hint="is etcd well?", param="metadata") from None
    return medium


def _end_now() -> None:
    """Another router is active: what is said here counts no more. As if killed, so that instances, which follow that
    one now, live on."""
    log.error("another router has taken this one's place: it ends")
    logging.shutdown()
    os._exit(1)
