"""What ``--metadata`` names, opened, and the thread that keeps there what a router must remember.

Records that an action waits for (``keep``) are written and synced at once; while that lasts more of them gather, and
share the next sync. Notes are written as soon as the thread has time, which is enough to outlive ``kill -9``, and
synced with the next record that is waited for, at the latest after ``NOTES_SYNC_S``.

Text that was deleted (documents, pinned prefixes) or has no time left leaves the journal after ``ERASE_S`` at the
latest: a checkpoint takes the journal's place.

When the medium fails (disk full, etcd without a quorum) the router goes on: what waits is released and told that it is
not durable, one line is logged, and a whole checkpoint is tried every ``REPAIR_S`` until one gets through. Until then
records change the state in memory and are written nowhere, so an outage of any length costs no memory beyond that
state.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memserve.base.errors import UserError
from memserve.journal.etcd import EtcdAccess, EtcdMedium
from memserve.journal.folder import JOURNAL, MODELS, SECRET, FileMedium, StateFolder, default_folder
from memserve.journal.store import Medium, MediumFailed, Store
from memserve.protocol.peers import Peer
from memserve.protocol.records import AnyRecord, RecoveredState
from memserve.system.secrets import Followed, follow_secret

log = logging.getLogger(__name__)

NOTES_SYNC_S = 1.0
REPAIR_S = 5.0
ERASE_S = 60.0
_BATCH_RECORDS = 4096

_LOSS_HINT = (
    "restore a backup of it; or move it away (etcd: delete it), and documents, pinned prefixes, sessions and members"
    " that it names are forgotten; or start without it: --metadata none"
)

OnKept = Callable[[bool], None]
"""Called from the keeper's thread: whether the records are durable."""


@dataclass(frozen=True, slots=True)
class _Item:
    records: Sequence[AnyRecord]
    then: OnKept | None


@dataclass(frozen=True, slots=True)
class Durability:
    """How safe is what a router must remember."""

    is_kept: bool = False
    """Records reach the medium. False: there is none, or it fails; a router that is killed now forgets."""
    lag_ns: int = 0
    """Age of the oldest record that is not durable yet. 0: all are."""
    failures: int = 0
    """Writes and syncs that failed since the start."""


class MetaKeeper:
    """Keeps records on a medium. Thread-safe; nothing but :meth:`close` blocks."""

    def __init__(
        self,
        medium: Medium,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Read what is on ``medium``. Raises :class:`UserError` when it cannot be read, or is damaged."""
        self.clock_offset_ns = wall_ns() - time.monotonic_ns()
        """Nanoseconds since 1970, minus the machine's clock."""
        try:
            self._store = Store(medium)
        except MediumFailed as error:
            medium.close()
            raise UserError(f"the metadata cannot be used: {error}", hint="--metadata none", param="metadata") from None
        except UserError as error:
            medium.close()
            raise UserError(f"{medium.name}: {error.message}", hint=_LOSS_HINT, param="metadata") from None
        if self._store.torn_bytes:
            log.warning("the last write to the metadata did not get through: %d bytes dropped", self._store.torn_bytes)
        if self._store.is_broken:
            log.error("metadata writes failing: %s takes nothing more", medium.name)
        self.recovered_state: RecoveredState = self._store.state.recovered_state(self.clock_offset_ns)
        """What the last router knew."""
        self._lock = threading.Lock()
        self._unsafe_since_ns: int | None = None
        """When the oldest record came that is not durable. None: all are."""
        self._failures = 0
        self._inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._wall_ns = wall_ns
        self._synced_s = time.monotonic()
        self._repair_s = self._synced_s + (REPAIR_S if self._store.is_broken else 0.0)
        self._deleted_s: float | None = None
        self._thread = threading.Thread(target=self._run_writer, name="memserve-meta", daemon=True)
        self._thread.start()

    def write_durably(self, records: Sequence[AnyRecord], then: OnKept) -> None:
        """Make ``records`` durable, then call ``then``."""
        self._enqueue_item(_Item(records, then))

    def note(self, records: Sequence[AnyRecord]) -> None:
        """Make ``records`` durable some time."""
        self._enqueue_item(_Item(records, None))

    def durability(self) -> Durability:
        """How safe the records are now. Any thread may ask."""
        with self._lock:
            since_ns = self._unsafe_since_ns
        lag_ns = time.monotonic_ns() - since_ns if since_ns is not None else 0
        return Durability(self._thread.is_alive() and not self._store.is_broken, lag_ns, self._failures)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, and end."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._store.close()

    def _enqueue_item(self, item: _Item) -> None:
        with self._lock:
            if self._unsafe_since_ns is None:
                self._unsafe_since_ns = time.monotonic_ns()
        self._inbox.put(item)

    # -- the thread

    def _run_writer(self) -> None:
        is_open = True
        while is_open:
            items, is_open = self._gather_items()
            self._write_items(items)
            # whatever happened above: an action that waits must be released, or its request would hang
            waiting = [item.then for item in items if item.then is not None]
            if waiting or not is_open or time.monotonic() - self._synced_s >= NOTES_SYNC_S:
                durable = self._sync_store()
                for then in waiting:
                    then(durable)
            self._erase_deleted(0.0 if not is_open else ERASE_S)

    def _gather_items(self) -> tuple[list[_Item], bool]:
        """All that is there; waits for the first, but not longer than notes may be unsynced."""
        items: list[_Item] = []
        try:
            item = self._inbox.get(timeout=NOTES_SYNC_S)
            while item is not None:
                items.append(item)
                # a bound, so that the first of them is not kept waiting by a stream of others
                if len(items) >= _BATCH_RECORDS:
                    return items, True
                item = self._inbox.get_nowait()
        except queue.Empty:
            return items, True
        return items, False

    def _write_items(self, items: list[_Item]) -> None:
        records: list[Any] = []
        for item in items:
            records += item.records
        if self._store.is_broken and time.monotonic() >= self._repair_s:
            self._attempt_write(self._store.write_checkpoint)
            if not self._store.is_broken:
                log.warning("metadata writes resumed")
        if records:
            self._attempt_write(lambda: self._store.write_records(records))

    def _sync_store(self) -> bool:
        self._synced_s = time.monotonic()
        # taken before the sync: a record that comes during it is not covered by it
        began_ns, was_all = time.monotonic_ns(), self._inbox.empty()
        durable = not self._store.is_broken and self._attempt_write(self._store.sync)
        with self._lock:
            if durable and self._unsafe_since_ns is not None:
                # else the oldest unsafe record came after the sync began; that moment is the safe side
                self._unsafe_since_ns = None if was_all and self._inbox.empty() else began_ns
        return durable

    def _erase_deleted(self, patience_s: float) -> None:
        """Replace a journal that has held deleted text for ``patience_s``. One that is broken is replaced anyway."""
        self._store.forget_expired(self._wall_ns())
        if not self._store.holds_deleted or self._store.is_broken:
            self._deleted_s = None
            return
        if self._deleted_s is None:
            self._deleted_s = time.monotonic()
        if time.monotonic() - self._deleted_s >= patience_s:
            self._attempt_write(self._store.write_checkpoint)

    def _attempt_write(self, call: Callable[[], None]) -> bool:
        """Whether ``call`` came through. It raises nothing: actions that wait for it are released in any case."""
        was_broken = self._store.is_broken
        try:
            call()
            return True
        except MediumFailed as error:
            if not was_broken:
                log.error("metadata writes failing: %s", error)
        except Exception:
            log.exception("metadata writes failing")
            # what it raised is not known to be harmless: only a whole checkpoint proves the medium again
            self._store.is_broken = True
        self._failures += 1
        self._repair_s = time.monotonic() + REPAIR_S
        return False


log = logging.getLogger(__name__)

NONE, AUTO, ETCD = "none", "auto", "etcd://"


@dataclass(frozen=True, slots=True)
class MetadataPlace:
    """What ``--metadata`` says."""

    folder: Path | None = None
    """Where this host keeps its state. None: nothing outlives the router's process here."""
    etcd: tuple[str, ...] = ()
    """``host:port`` of etcd's members. Empty: the journal lies in ``folder``."""
    cluster: str = "default"
    """The cluster's name in etcd."""
    is_wish: bool = False
    """True: the folder is a default, and a server starts without it where it cannot be used."""
    access: EtcdAccess = field(default_factory=EtcdAccess)
    """TLS and the user for etcd."""

    def for_model(self, name: str) -> MetadataPlace:
        """Of one of several models; ``name`` can be a folder's."""
        folder = None if self.folder is None else self.folder / MODELS / name
        return replace(self, folder=folder, cluster=f"{self.cluster}.{name}")


def metadata_place(text: str, port: int, access: EtcdAccess | None = None) -> MetadataPlace:
    """What ``--metadata TEXT`` means for a server at HTTP port ``port`` (0: another one at each start), with what
    ``--metadata-credentials`` names. Raises :class:`UserError`."""
    own_folder = default_folder(port) if port else None
    if access is not None and not text.startswith(ETCD):
        hint = "--metadata etcd://10.0.0.1:2379, or leave the credentials out"
        raise UserError("credentials for etcd, and no etcd", hint=hint, param="metadata_credentials")
    if text == NONE:
        return MetadataPlace()
    if text == AUTO:
        return MetadataPlace(own_folder, is_wish=True)
    if text.startswith(ETCD):
        members, _, name = text.removeprefix(ETCD).partition("/")
        hosts = tuple(host for host in members.split(",") if host)
        if "@" in members:
            hint = "put user and password in a file: --metadata-credentials FILE"
            raise UserError("--metadata must not hold a password: command lines are public", hint=hint)
        if not hosts:
            raise UserError(f"{text} names no host", hint="--metadata etcd://10.0.0.1:2379", param="metadata")
        return MetadataPlace(own_folder, hosts, name.strip("/") or "default", True, access or EtcdAccess())
    if "://" in text:
        hint = "give a folder, etcd://HOST:PORT, or none"
        raise UserError(f"unknown metadata store {text}", hint=hint, param="metadata")
    return MetadataPlace(Path(text).expanduser().absolute())


@dataclass(frozen=True, slots=True)
class Metadata:
    """Open metadata."""

    folder: Path | None
    keeper: MetaKeeper | None
    """None: nothing is kept."""
    secret: Followed[str] | None
    """The cluster's secret that the folder holds. None: there is no folder."""

    @property
    def recovered_state(self) -> RecoveredState:
        """What the last router knew."""
        return self.keeper.recovered_state if self.keeper is not None else RecoveredState()

    def next_router(self, name: str, generation: int) -> Peer:
        """The name of the next router: of ``generation``, or of one more than the last router's, where the clock stands
        behind that."""
        last = self.recovered_state.router
        # members follow the higher generation: a clock that was set back must not make the new router the older one
        return Peer(name, max(generation, last.generation + 1) if last is not None else generation)


@contextmanager
def open_metadata(
    place: MetadataPlace, print_line: Callable[[str], None], secret: str | None = None
) -> Iterator[Metadata]:
    """Open it; with etcd, wait until no other router is active. The keeper is the router's to close. ``secret``: of a
    cluster that this folder, where it has none, belongs to. None: any.

    Raises :class:`UserError` when it cannot be used.
    """
    with ExitStack() as stack:
        folder = _state_folder(place, print_line)
        if folder is not None:
            stack.callback(folder.close)
        keeper = None
        if place.etcd:
            keeper = MetaKeeper(_elected_medium(place, print_line))
        elif folder is not None:
            keeper = _file_keeper(folder)
        if folder is None:
            yield Metadata(None, keeper, None)
        else:
            folder.read_or_create_secret(secret)  # makes it
            yield Metadata(folder.path, keeper, follow_secret(folder.path / SECRET))


@contextmanager
def open_folder(place: MetadataPlace, print_line: Callable[[str], None]) -> Iterator[Metadata]:
    """The folder of ``place`` alone, with the cluster's secret: routers of several models have theirs below it. Raises
    :class:`UserError` when it cannot be used."""
    folder = _state_folder(place, print_line)
    if folder is None:
        yield Metadata(None, None, None)
        return
    try:
        folder.read_or_create_secret(None)
        yield Metadata(folder.path, None, follow_secret(folder.path / SECRET))
    finally:
        folder.close()


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


def _state_folder(place: MetadataPlace, print_line: Callable[[str], None]) -> StateFolder | None:
    if place.folder is None:
        return None
    try:
        return StateFolder(place.folder)
    except UserError as error:
        if not place.is_wish:
            raise
        print_line(f"instances will end with this process: {error.message}")
        return None


def _elected_medium(place: MetadataPlace, print_line: Callable[[str], None]) -> Medium:
    medium = EtcdMedium(place.etcd, place.cluster, place.access)
    own_name = f"{socket.gethostname()}:{os.getpid()}"
    try:
        medium.await_election(
            own_name, lambda active: print_line(f"standing by: {active} is the active router ..."), _end_now
        )
    except MediumFailed as error:
        raise UserError(f"the election failed: {error}", hint="is etcd well?", param="metadata") from None
    return medium


def _end_now() -> None:
    """End as if killed: another router is active, and the instances, which follow that one now, live on."""
    log.error("another router has taken this one's place: it ends")
    logging.shutdown()
    os._exit(1)
