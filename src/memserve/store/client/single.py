"""One store, as a client has it: its calls, and what they raise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from memserve.base.errors import StoreUnavailable, UserError
from memserve.base.units import MIB
from memserve.protocol.messages import AnyMessage
from memserve.protocol.store import (
    LIST_MAX,
    KvModel,
    StoreCode,
    StoreDelete,
    StoreDone,
    StoreEntry,
    StoreList,
    StoreListing,
    StoreLook,
    StorePlaces,
    StorePurge,
    StoreStat,
    StoreStatus,
    StoreVerify,
)
from memserve.store.client import arguments
from memserve.store.client.connection import Answer, StoreConnection
from memserve.store.client.get import bring, bring_sealed, fetch_values, get_held_value, get_value, get_values_into
from memserve.store.client.memory import Staged, View
from memserve.store.client.put import Value, put_values

if TYPE_CHECKING:
    from typing_extensions import Buffer

TIMEOUT_S = 5.0
_KEYS_A_CALL = 4096
_LOOKS_A_CALL = 65_536

AnAnswer = TypeVar("AnAnswer", bound=Answer)


@dataclass(frozen=True, slots=True)
class LineOptions:
    """What a client is made with, beside the address: see :class:`SingleStoreClient`."""

    tenant: str
    secret_file: str | os.PathLike[str] | None
    staging_bytes: int
    listen: str | None
    kv: KvModel | None
    copies: int


class SingleStoreClient:
    """A client of one store. What is put under a tenant is found under that tenant alone."""

    def __init__(
        self,
        address: str,
        tenant: str = "default",
        secret_file: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        staging_bytes: int = 256 * MIB,
        listen: str | None = None,
        kv: KvModel | None = None,
        copies: int = 1,
    ) -> None:
        """Find the store that listens at ``address`` (``HOST:PORT``), or several (``HOST:PORT,HOST:PORT``), which are
        as one: each keeps its share.

        ``secret_file``: the cluster's secret; None: the file that ``MEMSERVE_CLUSTER_SECRET_FILE`` names.
        ``staging_bytes``: memory out of which the store pulls what is put; what was never needed is not touched.
        ``listen``: the name of this host at which the store answers, where it is not found by the way to the store.
        ``kv``: for engines that compute KV as memserve's instances do: the values are KV blocks of this model, and keys
        are block identities. ``copies``: in how many of several stores each value is to lie.

        Raises :class:`UserError` for arguments that cannot be, and :class:`memserve.base.errors.StoreUnavailable` when
        no store answers within ``timeout_s``: nothing runs there, or with another secret.
        """
        if copies < 1:
            raise UserError(f"{copies} copies of a value", hint="at least 1", param="copies")
        self._open(address, LineOptions(tenant, secret_file, staging_bytes, listen, kv, copies))
        try:
            self._wait_until_open(time.monotonic() + timeout_s)
        except BaseException:
            self._end()
            raise

    @classmethod
    def without_waiting(cls, address: str, options: LineOptions) -> SingleStoreClient:
        """A client of one store, which need not answer yet. Raises :class:`UserError`."""
        client = object.__new__(SingleStoreClient)
        client._open(address, options)
        return client

    def _open(self, address: str, options: LineOptions) -> None:
        address, tenant, staging_bytes = arguments.checked_address(address), options.tenant, options.staging_bytes
        if len(tenant) > 256:
            raise UserError("a tenant's name has up to 256 characters", hint="take a shorter one", param="tenant")
        if staging_bytes < 1:
            raise UserError(f"staging memory of {staging_bytes} bytes", hint="at least 1", param="staging_bytes")
        secret = arguments.secret_in(options.secret_file)
        #: the line to the store
        self.connection = StoreConnection(
            address, tenant, secret, staging_bytes, options.listen or arguments.own_host(address), options.kv
        )

    def _wait_until_open(self, deadline_s: float) -> None:
        self.connection.wait_for_session(deadline_s)

    def _end(self) -> None:
        self.connection.close()

    # -- values

    def put(self, key: bytes, value: Buffer | Staged, *, overwrite: bool = True, timeout_s: float = TIMEOUT_S) -> bool:
        """Keep a copy of ``value``, any contiguous buffer, under ``key``: 1 to 1,024 bytes.

        False: the store did not take it, since it is too large or there is no room; or ``overwrite`` is False and the
        key has a value. What was taken can be read by every client of the tenant from now on, until the store needs the
        room for others. Raises :class:`UserError` for a key or value that cannot be, and
        :class:`memserve.base.errors.StoreUnavailable`: then the value may be there or not.
        """
        return self.put_many([(key, value)], overwrite=overwrite, timeout_s=timeout_s)[0]

    def put_many(
        self,
        pairs: Iterable[tuple[bytes, Buffer | Staged]],
        *,
        overwrite: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> list[bool]:
        """As :meth:`put` for each pair of key and value, in few messages."""
        self.check()
        names, values = list[bytes](), list[Value]()
        for key, value in pairs:
            names.append(arguments.checked_key(key))
            values.append(value if isinstance(value, Staged) else arguments.readable(value))
        return put_values(self.connection, names, values, overwrite, time.monotonic() + timeout_s)

    def allocate(self, nbytes: int, *, timeout_s: float = TIMEOUT_S) -> Staged:
        """Memory to build a value in: ``put`` takes it from there without another copy. Fill ``data``, put, release.

        Raises :class:`UserError` when it can never have that much, and :class:`memserve.base.errors.StoreUnavailable`
        when others held the memory until the deadline.
        """
        self.check()
        staging = self.connection.staging
        if not 1 <= nbytes <= staging.nbytes:
            message = f"{nbytes} bytes of staging memory of {staging.nbytes}"
            raise UserError(message, hint="StoreClient(..., staging_bytes=N)", param="nbytes")
        offset = staging.take_piece(nbytes, time.monotonic() + timeout_s)
        if offset is None:
            hint = "release what was allocated, or give the client more staging_bytes"
            raise StoreUnavailable("no room in the client's staging memory", hint=hint)
        return Staged(staging, offset, nbytes)

    def get(self, key: bytes, *, timeout_s: float = TIMEOUT_S) -> View | None:
        """The value of ``key``; None: there is none. Use the view in a ``with``, or release it.

        On the store's host it is the store's own memory (``view.in_place``), pinned as long as the view, or anything
        made of its ``data``, lives. From another host, and where this client holds as much as one may (1,024 values, a
        quarter of the store's memory), it is a copy, compared with its seal. Raises
        :class:`memserve.base.errors.StoreUnavailable`.
        """
        self.check()
        return get_value(self.connection, arguments.checked_key(key), time.monotonic() + timeout_s)

    def get_held(self, key: bytes) -> View | None:
        """As :meth:`get`, without a word to the store. None: its memory does not have the value, or is not mapped."""
        self.check()
        return get_held_value(self.connection, arguments.checked_key(key))

    def bring(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Have the store read values from its disks into its memory, side by side; the bytes of each, -1: there is
        none. Raises :class:`memserve.base.errors.StoreUnavailable`, also when they do not fit there in time."""
        self.check()
        return bring(self.connection, arguments.checked_keys(keys), time.monotonic() + timeout_s)[1]

    def bring_sealed(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[tuple[int, int]]:
        """As :meth:`bring`, of KV blocks: the bytes of each, -1: there is none; and its seal, as the store has it."""
        self.check()
        return bring_sealed(self.connection, arguments.checked_keys(keys), time.monotonic() + timeout_s)

    def get_into(
        self, pairs: Iterable[tuple[bytes, Buffer]], *, threads: int = 1, timeout_s: float = TIMEOUT_S
    ) -> list[int]:
        """Copy each key's value to the start of its buffer; the bytes written, -1: there is no such value.

        ``threads`` copy side by side. Raises :class:`UserError` when a buffer cannot be written to, or is too small:
        then nothing was written to any; and :class:`memserve.base.errors.StoreUnavailable`: then they hold anything.
        """
        self.check()
        names, buffers = list[bytes](), list[memoryview]()
        for key, buffer in pairs:
            names.append(arguments.checked_key(key))
            buffers.append(arguments.writable(buffer))
        return get_values_into(self.connection, names, buffers, threads, time.monotonic() + timeout_s)

    def get_copies(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[memoryview | None]:
        """Copies of values, read-only, which come in messages, also on the store's host. None: there is none."""
        self.check()
        return fetch_values(self.connection, arguments.checked_keys(keys), time.monotonic() + timeout_s)

    # -- keys

    def exists(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[bool]:
        """Whether there is a value of each key, in memory or on a disk."""
        self.check()
        return [place > 0 for place in self._locate_keys(arguments.checked_keys(keys), time.monotonic() + timeout_s)]

    def match_last_index(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> int:
        """The index of the last key before the first one without a value; -1: the first one has none.

        For keys that each name a prefix of one text, the longest prefix that is kept.
        """
        self.check()
        names, deadline_s = arguments.checked_keys(keys), time.monotonic() + timeout_s
        session = self.connection.wait_for_session(deadline_s)
        if session.reader is not None:
            return session.reader.prefix(session.store_keys(names)) - 1
        first_absent = self._locate_keys(names, deadline_s).find(b"\0")
        return (len(names) if first_absent < 0 else first_absent) - 1

    def delete(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> int:
        """Forget values; how many there were. Views of them stay as they are until they are released."""
        self.check()
        names, deadline_s, deleted = arguments.checked_keys(keys), time.monotonic() + timeout_s, 0
        for first in range(0, len(names), _KEYS_A_CALL):
            batch = names[first : first + _KEYS_A_CALL]
            answer = self._query_store(deadline_s, partial(self._delete_message, batch, deadline_s), StoreDone)
            deleted += answer.codes.count(StoreCode.DONE)
        return deleted

    def purge(self, *, everything: bool = False, timeout_s: float = TIMEOUT_S) -> int:
        """Forget all values of the tenant; how many there were. ``everything``: of all tenants, and all KV."""
        self.check()
        deadline_s = time.monotonic() + timeout_s
        return self._query_store(deadline_s, partial(StorePurge, everything=everything), StoreDone).count

    # -- the store

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the store."""
        return self.connection.address

    @property
    def is_mapped(self) -> bool:
        """Whether values are read in the store's own memory at this moment."""
        session = self.connection.known_session
        return session is not None and session.reader is not None

    @property
    def holds_max(self) -> tuple[int, int] | None:
        """How many values, and bytes, this client may hold in the store's memory at once. None: it holds none there."""
        session = self.connection.known_session
        reader = None if session is None else session.reader
        return None if reader is None else (reader.values_max, reader.bytes_max)

    def value_bytes_max(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """The longest value that the store takes."""
        self.check()
        return self.connection.wait_for_session(time.monotonic() + timeout_s).welcome.value_bytes_max

    def statistics(self, *, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
        """Sizes and totals of the store by name; the same as ``memserve store stat`` prints."""
        self.check()
        return self._query_store(time.monotonic() + timeout_s, StoreStat, StoreStatus).numbers

    def entries(self, *, everything: bool = False, timeout_s: float = TIMEOUT_S) -> Iterator[StoreEntry]:
        """All values of the tenant, in no order; ``everything``: of all tenants, and KV blocks. The deadline is that of
        each message."""
        after = 0
        while True:
            self.check()
            deadline_s = time.monotonic() + timeout_s
            ask = partial(StoreList, after=after, count=LIST_MAX, everything=everything)
            listing = self._query_store(deadline_s, ask, StoreListing)
            yield from listing.entries
            after = listing.after
            if not after:
                return

    def verify(self, *, start: bool = True, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
        """Have the store read and compare all that it keeps, and drop what is damaged: how far that has come.

        It runs on in the store: ask again with ``start`` False, until ``verify_running`` is 0.
        """
        self.check()
        return self._query_store(time.monotonic() + timeout_s, partial(StoreVerify, start=start), StoreStatus).numbers

    def check(self) -> None:
        """Raise :class:`UserError` when this client was closed, or belongs to the process that was forked."""
        self.connection.check_usable()

    def close(self) -> None:
        """Release all views and leave the store. Arrays that were made of views stay as they are."""
        self.connection.drop_views()
        self.connection.close()

    def __enter__(self) -> SingleStoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreClient {self.connection.address}{' closed' if self.connection.is_closed else ''}>"

    # -- inside

    def _locate_keys(self, names: Sequence[bytes], deadline_s: float) -> bytes:
        """A byte a key: 0 absent, 1 in memory, 2 on a disk."""
        session = self.connection.wait_for_session(deadline_s)
        if session.reader is not None:
            return session.reader.where(session.store_keys(names))
        chunks = []
        for first in range(0, len(names), _LOOKS_A_CALL):
            batch = names[first : first + _LOOKS_A_CALL]
            chunks.append(
                self._query_store(deadline_s, partial(self._look_message, batch, deadline_s), StorePlaces).where
            )
        return b"".join(chunks)

    def _look_message(self, names: Sequence[bytes], deadline_s: float, call: int) -> StoreLook:
        return StoreLook(call, self.connection.wait_for_session(deadline_s).store_keys(names))

    def _delete_message(self, names: Sequence[bytes], deadline_s: float, call: int) -> StoreDelete:
        session = self.connection.wait_for_session(deadline_s)
        return StoreDelete(call, session.store_keys(names), tuple(session.stored_names(names)))

    def _query_store(self, deadline_s: float, ask: Callable[[int], AnyMessage], kind: type[AnAnswer]) -> AnAnswer:
        _, answer = self.connection.call_store(lambda call, left_ns: ask(call), deadline_s)
        if not isinstance(answer, kind):
            message = f"the store at {self.connection.address} answered something else"
            raise StoreUnavailable(message, hint="are both of one version of memserve?")
        return answer
