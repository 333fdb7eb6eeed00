"""Several stores as one: what ``StoreClient("A:7100,B:7100,C:7100")`` is.

Each value lies at the stores that rendezvous hashing names for its key (``kv/store_shares.py``), as KV of instances
does: clients and instances that name the same stores find what the others have put. The stores need not know of each
other::

    put     to the stores that are to keep the value; one that is overwritten is deleted at all others
    get     of the first of them on this host, then of the others, then of the next in the key's line, where the value
            lies if a store has come or gone since; then it is put where it belongs, in the background

A store that does not answer is left out until it does, and is given by and by what it lacks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from memserve.base.errors import StoreUnavailable, UserError
from memserve.base.units import MIB
from memserve.kv.store_shares import KEY_BYTES, StoreShares
from memserve.protocol.store import StoreEntry
from memserve.store.client import arguments
from memserve.store.client.memory import Staged, View
from memserve.store.client.single import TIMEOUT_S, LineOptions, SingleStoreClient

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

SILENT_S = 3.5
"""A store that has said nothing for this long is left out: it answers a hello each second."""
AWAY_S = 1.0
"""For how long a store that has not answered a call is left out."""
REPAIR_BYTES = 64 * MIB
"""Values that wait to be put where they belong; of more, none is added."""
STALE_MAX = 65_536
"""Keys that were overwritten or deleted while a store was away, to be deleted there when it is back."""

Result = TypeVar("Result")


class _Member:
    """One of the stores."""

    def __init__(self, client: SingleStoreClient) -> None:
        self.client = client
        self._away_until_s = 0.0
        #: keys that this client has overwritten or deleted while the store was away
        self.stale: dict[bytes, None] = {}

    @property
    def name(self) -> str:
        """As the store is called; empty: it has never answered."""
        session = self.client.connection.known_session
        return "" if session is None else session.peer.name

    @property
    def is_live(self) -> bool:
        """Whether it is worth asking."""
        now_s, connection = time.monotonic(), self.client.connection
        return bool(self.name) and now_s >= self._away_until_s and now_s - connection.last_seen_s < SILENT_S

    def mark_away(self) -> None:
        """It has not answered a call in time."""
        self._away_until_s = time.monotonic() + AWAY_S

    def remember_stale(self, names: Iterable[bytes]) -> None:
        """Delete these when the store is back."""
        for name in names:
            if len(self.stale) < STALE_MAX:
                self.stale[name] = None


class _Line:
    """The stores that live, in the order in which each key has them."""

    def __init__(self, members: Sequence[_Member], copies: int, names: Sequence[bytes]) -> None:
        by_name = {member.name: member for member in members}
        shares = StoreShares(by_name, copies)
        session = members[0].client.connection.known_session
        keys = session.store_keys(names) if session is not None else bytes(KEY_BYTES * len(names))
        self.members = [by_name[name] for name in shares.names]
        self.copies = min(copies, len(self.members))
        #: by key: indices of ``members``, the first owner first
        self.ranks = shares.rank_stores(keys).tolist()

    def turns_of(self, number: int) -> list[_Member]:
        """Where to look for a key, in order: its owners, those on this host first, then the next in its line."""
        rank = [self.members[index] for index in self.ranks[number][: self.copies + 1]]
        owners = sorted(rank[: self.copies], key=lambda member: not member.client.is_mapped)
        return owners + rank[self.copies :]

    def owners_of(self, number: int) -> list[_Member]:
        """The stores that are to keep a key."""
        return [self.members[index] for index in self.ranks[number][: self.copies]]


class JointStoreClient(SingleStoreClient):
    """A client of several stores as one. Calls are those of a client of one store."""

    def _open(self, address: str, options: LineOptions) -> None:
        addresses = [arguments.checked_address(text.strip()) for text in address.split(",")]
        if len(set(addresses)) < len(addresses):
            raise UserError(f"a store twice in {address!r}", hint="name each store once", param="address")
        self._copies, self._members = options.copies, list[_Member]()
        self._closed = threading.Event()
        self._repairs: queue.SimpleQueue[tuple[_Member, bytes, bytes] | None] = queue.SimpleQueue()
        self._repair_bytes, self._repair_lock = 0, threading.Lock()
        with ExitStack() as stack:
            for place in addresses:
                client = SingleStoreClient.without_waiting(place, options)
                stack.callback(client.close)
                self._members.append(_Member(client))
            stack.pop_all()
        self._repairer = threading.Thread(target=self._run_repairs, name="memserve-store-repairs", daemon=True)
        self._repairer.start()

    def _wait_until_open(self, deadline_s: float) -> None:
        """Until each has answered, or the time is up and one has: one that does not is left out until it does."""
        problem: StoreUnavailable | None = None
        for member in self._members:
            try:
                member.client.connection.wait_for_session(deadline_s)
            except StoreUnavailable as error:
                problem = error
        live_names = [member.name for member in self._members if member.name]
        if problem is not None:
            if not live_names:
                raise problem
            log.warning("%s: it is left out until it answers", problem.message)
        if len(set(live_names)) < len(live_names):
            hint = "give each store another --name: a value's place follows from the names"
            raise UserError(f"stores of one name at {self.address}", hint=hint, param="address")

    # -- values

    def put_many(
        self,
        pairs: Iterable[tuple[bytes, Buffer | Staged]],
        *,
        overwrite: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> list[bool]:
        """See :meth:`SingleStoreClient.put_many`. True: one store, at least, has taken the value."""
        self.check()
        names: list[bytes] = []
        values: list[Buffer | Staged] = []
        for key, value in pairs:
            names.append(arguments.checked_key(key))
            values.append(value)
        deadline_s, accepted = time.monotonic() + timeout_s, [False] * len(names)

        def put_at(member: _Member, numbers: list[int], left_s: float) -> None:
            pairs = [(names[number], _own_memory(member, values[number])) for number in numbers]
            taken = member.client.put_many(pairs, overwrite=overwrite, timeout_s=left_s)
            for number, is_taken in zip(numbers, taken, strict=True):
                accepted[number] |= is_taken

        if overwrite:
            self._forget_elsewhere(names, deadline_s)
        numbers = list(range(len(names)))
        while numbers:
            line = self._line(names, deadline_s)
            owners = [(member, number) for number in numbers for member in line.owners_of(number)]
            failed = set(self._ask_each(owners, put_at, deadline_s))
            numbers = [number for number in numbers if number in failed and not accepted[number]]
        return accepted

    def _forget_elsewhere(self, names: Sequence[bytes], deadline_s: float) -> None:
        """Stores that are not to keep these keys must not have an earlier value; those that are away will be told."""
        line = self._line(names, deadline_s)
        keepers = [line.owners_of(number) for number in range(len(names))]
        pairs = [(member, number) for number, own in enumerate(keepers) for member in line.members if member not in own]
        self._delete_at(names, pairs, deadline_s)
        for member in self._members:
            if member not in line.members:
                member.remember_stale(names)

    def _delete_at(self, names: Sequence[bytes], pairs: list[tuple[_Member, int]], deadline_s: float) -> None:
        def delete_at(member: _Member, numbers: list[int], left_s: float) -> None:
            try:
                member.client.delete([names[number] for number in numbers], timeout_s=left_s)
            except StoreUnavailable:
                member.remember_stale(names[number] for number in numbers)
                raise

        self._ask_each(pairs, delete_at, deadline_s)

    def allocate(self, nbytes: int, *, timeout_s: float = TIMEOUT_S) -> Staged:
        """See :meth:`SingleStoreClient.allocate`. Stores but the first copy what is put out of it."""
        self.check()
        return self._live_members(time.monotonic() + timeout_s)[0].client.allocate(nbytes, timeout_s=timeout_s)

    def get(self, key: bytes, *, timeout_s: float = TIMEOUT_S) -> View | None:
        """See :meth:`SingleStoreClient.get`."""
        self.check()
        names, deadline_s = [arguments.checked_key(key)], time.monotonic() + timeout_s
        views: dict[int, View] = {}

        def get_at(member: _Member, numbers: list[int], left_s: float) -> list[int]:
            view = member.client.get(key, timeout_s=left_s)
            if view is not None:
                views[0] = view
            return [0] if view is None else []

        self._look_in_turns(names, get_at, lambda number: views[number].data, deadline_s)
        return views.get(0)

    def get_held(self, key: bytes) -> View | None:
        """See :meth:`SingleStoreClient.get_held`: of any store on this host."""
        self.check()
        for member in self._members:
            view = member.client.get_held(key) if member.client.is_mapped and not member.stale else None
            if view is not None:
                return view
        return None

    def bring(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[int]:
        """See :meth:`SingleStoreClient.bring`."""
        return [length for length, _ in self._bring(keys, timeout_s, is_sealed=False)]

    def bring_sealed(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[tuple[int, int]]:
        """See :meth:`SingleStoreClient.bring_sealed`."""
        return self._bring(keys, timeout_s, is_sealed=True)

    def _bring(self, keys: Iterable[bytes], timeout_s: float, *, is_sealed: bool) -> list[tuple[int, int]]:
        self.check()
        names, deadline_s = arguments.checked_keys(keys), time.monotonic() + timeout_s
        results = [(-1, 0)] * len(names)

        def bring_at(member: _Member, numbers: list[int], left_s: float) -> list[int]:
            wanted = [names[number] for number in numbers]
            if is_sealed:
                sealed = member.client.bring_sealed(wanted, timeout_s=left_s)
            else:
                sealed = [(length, 0) for length in member.client.bring(wanted, timeout_s=left_s)]
            for number, result in zip(numbers, sealed, strict=True):
                results[number] = max(results[number], result)
            return [number for number in numbers if results[number][0] < 0]

        self._look_in_turns(names, bring_at, None, deadline_s)
        return results

    def get_into(
        self, pairs: Iterable[tuple[bytes, Buffer]], *, threads: int = 1, timeout_s: float = TIMEOUT_S
    ) -> list[int]:
        """See :meth:`SingleStoreClient.get_into`."""
        self.check()
        names, buffers = list[bytes](), list[memoryview]()
        for key, buffer in pairs:
            names.append(arguments.checked_key(key))
            buffers.append(arguments.writable(buffer))
        deadline_s, written = time.monotonic() + timeout_s, [-1] * len(names)

        def get_at(member: _Member, numbers: list[int], left_s: float) -> list[int]:
            wanted = [(names[number], buffers[number]) for number in numbers]
            for number, nbytes in zip(
                numbers, member.client.get_into(wanted, threads=threads, timeout_s=left_s), strict=True
            ):
                written[number] = nbytes
            return [number for number in numbers if written[number] < 0]

        self._look_in_turns(names, get_at, lambda number: buffers[number][: written[number]], deadline_s)
        return written

    def get_copies(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[memoryview | None]:
        """See :meth:`SingleStoreClient.get_copies`."""
        self.check()
        names, deadline_s = arguments.checked_keys(keys), time.monotonic() + timeout_s
        copies: list[memoryview | None] = [None] * len(names)

        def get_at(member: _Member, numbers: list[int], left_s: float) -> list[int]:
            wanted = [names[number] for number in numbers]
            for number, value in zip(numbers, member.client.get_copies(wanted, timeout_s=left_s), strict=True):
                copies[number] = value
            return [number for number in numbers if copies[number] is None]

        self._look_in_turns(names, get_at, lambda number: copies[number] or memoryview(b""), deadline_s)
        return copies

    # -- keys

    def exists(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[bool]:
        """See :meth:`SingleStoreClient.exists`."""
        self.check()
        names, presence = arguments.checked_keys(keys), dict[int, bool]()

        def look_at(member: _Member, numbers: list[int], left_s: float) -> list[int]:
            found = member.client.exists([names[number] for number in numbers], timeout_s=left_s)
            presence.update((number, True) for number, is_there in zip(numbers, found, strict=True) if is_there)
            return [number for number in numbers if number not in presence]

        self._look_in_turns(names, look_at, None, time.monotonic() + timeout_s)
        return [presence.get(number, False) for number in range(len(names))]

    def match_last_index(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> int:
        """See :meth:`SingleStoreClient.match_last_index`."""
        presence = self.exists(keys, timeout_s=timeout_s)
        return (presence.index(False) if False in presence else len(presence)) - 1

    def delete(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> int:
        """See :meth:`SingleStoreClient.delete`: at every store."""
        names, deadline_s = arguments.checked_keys(keys), time.monotonic() + timeout_s
        count = sum(self.exists(names, timeout_s=timeout_s))
        members = self._live_members(deadline_s)
        self._delete_at(names, [(member, number) for member in members for number in range(len(names))], deadline_s)
        for member in self._members:
            if member not in members:
                member.remember_stale(names)
        return count

    def purge(self, *, everything: bool = False, timeout_s: float = TIMEOUT_S) -> int:
        """See :meth:`SingleStoreClient.purge`; how many values there were, each copy counted."""
        return sum(self._call_all(lambda client: client.purge(everything=everything, timeout_s=timeout_s), timeout_s))

    # -- the stores

    @property
    def address(self) -> str:
        """``HOST:PORT`` of each store, with commas between them."""
        return ",".join(member.client.address for member in self._members)

    @property
    def is_mapped(self) -> bool:
        """Whether values are read in the memory of all stores that answer."""
        mapped = [member.client.is_mapped for member in self._members if member.is_live]
        return bool(mapped) and all(mapped)

    @property
    def holds_max(self) -> tuple[int, int] | None:
        """See :meth:`SingleStoreClient.holds_max`: of the store where it is least."""
        limits = [member.client.holds_max for member in self._members if member.is_live]
        known = [limit for limit in limits if limit is not None]
        return (min(count for count, _ in known), min(nbytes for _, nbytes in known)) if known else None

    def value_bytes_max(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """The longest value that each of the stores takes."""
        return min(self._call_all(lambda client: client.value_bytes_max(timeout_s=timeout_s), timeout_s))

    def statistics(self, *, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
        """Sizes and totals of all stores that answer, added up."""
        return _sums(self._call_all(lambda client: client.statistics(timeout_s=timeout_s), timeout_s))

    def entries(self, *, everything: bool = False, timeout_s: float = TIMEOUT_S) -> Iterator[StoreEntry]:
        """See :meth:`SingleStoreClient.entries`: each value once."""
        seen_keys: set[bytes] = set()
        for member in self._live_members(time.monotonic() + timeout_s):
            for entry in member.client.entries(everything=everything, timeout_s=timeout_s):
                if entry.key not in seen_keys:
                    seen_keys.add(entry.key)
                    yield entry

    def verify(self, *, start: bool = True, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
        """See :meth:`SingleStoreClient.verify`: of all stores that answer, added up."""
        return _sums(self._call_all(lambda client: client.verify(start=start, timeout_s=timeout_s), timeout_s))

    def check(self) -> None:
        """See :meth:`SingleStoreClient.check`."""
        for member in self._members:
            member.client.check()

    def close(self) -> None:
        """See :meth:`SingleStoreClient.close`."""
        self._end()

    def _end(self) -> None:
        self._closed.set()
        self._repairs.put(None)
        for member in self._members:
            member.client.close()

    def __repr__(self) -> str:
        return f"<StoreClient {self.address}{' closed' if self._closed.is_set() else ''}>"

    # -- inside

    def _live_members(self, deadline_s: float) -> list[_Member]:
        """The stores that answer; what they must not have any more is deleted there first. Raises
        :class:`StoreUnavailable` when there is none by ``deadline_s``."""
        while True:
            members = [member for member in self._members if member.is_live and self._is_clean(member, deadline_s)]
            if members:
                return members
            if self._closed.wait(min(0.05, max(0.0, deadline_s - time.monotonic()))):
                self.check()
            if time.monotonic() >= deadline_s:
                hint = "are they running? try again, or with a longer timeout_s"
                raise StoreUnavailable(f"no store of {self.address} answers", hint=hint)

    def _is_clean(self, member: _Member, deadline_s: float) -> bool:
        """Whether nothing lies there that this client has replaced while the store was away."""
        stale = list(member.stale)
        try:
            if stale:
                member.client.delete(stale, timeout_s=max(0.0, deadline_s - time.monotonic()) / 2)
        except StoreUnavailable:
            member.mark_away()
            return False
        for name in stale:
            member.stale.pop(name, None)
        return True

    def _line(self, names: Sequence[bytes], deadline_s: float) -> _Line:
        return _Line(self._live_members(deadline_s), self._copies, names)

    def _ask_each(
        self,
        pairs: Iterable[tuple[_Member, int]],
        ask: Callable[[_Member, list[int], float], object],
        deadline_s: float,
    ) -> list[int]:
        """Ask each store for its numbers, in one call. Returns those of stores that did not answer."""
        numbers_by_member: dict[_Member, list[int]] = {}
        for member, number in pairs:
            numbers_by_member.setdefault(member, []).append(number)
        failed: list[int] = []
        for member, numbers in numbers_by_member.items():
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                ask(member, numbers, left_s / 2)  # the rest is for another store
            except StoreUnavailable as error:
                log.debug("%s: another store is asked", error.message)
                member.mark_away()
                failed += numbers
        return failed

    def _look_in_turns(
        self,
        names: Sequence[bytes],
        look: Callable[[_Member, list[int], float], list[int]],
        data_of: Callable[[int], memoryview] | None,
        deadline_s: float,
    ) -> None:
        """``look`` for each key at the stores where it may lie, in turns; it returns those that were not there.
        ``data_of``: the value that was found, for stores that lack it."""
        line = self._line(names, deadline_s)
        turns = [line.turns_of(number) for number in range(len(names))]
        lacking: dict[int, list[_Member]] = {}

        def look_at(member: _Member, numbers: list[int], left_s: float) -> None:
            absent = set(look(member, numbers, left_s))
            for number in numbers:
                if number in absent:
                    lacking.setdefault(number, []).append(member)
                    open_numbers.append(number)
                elif number in lacking and data_of is not None:
                    self._add_repairs(line, number, lacking[number], names[number], data_of(number))

        open_numbers = list(range(len(names)))
        for turn in range(line.copies + 1):
            pairs = [(turns[number][turn], number) for number in open_numbers if turn < len(turns[number])]
            if not pairs:
                return
            open_numbers = []
            open_numbers += self._ask_each(pairs, look_at, deadline_s)

    def _call_all(self, call: Callable[[SingleStoreClient], Result], timeout_s: float) -> list[Result]:
        """What all stores say that answer. Raises :class:`StoreUnavailable` where none does."""
        self.check()
        results: list[Result] = []
        problem: StoreUnavailable | None = None
        for member in self._live_members(time.monotonic() + timeout_s):
            try:
                results.append(call(member.client))
            except StoreUnavailable as error:
                member.mark_away()
                problem = error
        if problem is not None and not results:
            raise problem
        return results

    # -- values that a store lacks

    def _add_repairs(self, line: _Line, number: int, lacking: list[_Member], name: bytes, data: memoryview) -> None:
        for member in line.owners_of(number):
            if member in lacking and self._count_repair(data.nbytes):
                self._repairs.put((member, name, bytes(data)))

    def _count_repair(self, nbytes: int) -> bool:
        """Whether a value may wait beside the others, from whatever thread; then it counts."""
        with self._repair_lock:
            fits = self._repair_bytes + nbytes <= REPAIR_BYTES
            self._repair_bytes += nbytes if fits else 0
            return fits

    def _run_repairs(self) -> None:
        """Put values where they belong, until the client is closed."""
        while (repair := self._repairs.get()) is not None and not self._closed.is_set():
            member, name, value = repair
            try:
                if member.is_live:
                    member.client.put(name, value, overwrite=False, timeout_s=TIMEOUT_S)
            except (UserError, OSError) as error:
                log.debug("%s lacks a value: %s", member.name, error)
            with self._repair_lock:
                self._repair_bytes -= len(value)


def _own_memory(member: _Member, value: Buffer | Staged) -> Buffer | Staged:
    """``value`` as the client of ``member`` can put it."""
    if isinstance(value, Staged) and value.offset_in(member.client.connection.staging) is None:
        return value.data
    return value


def _sums(numbers: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(row.get(name, 0) for row in numbers) for name in numbers[0]} if numbers else {}
