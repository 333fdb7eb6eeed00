"""Work that looks at everything: purges, verification, listings. A bit at a time, so that nothing else waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.protocol.store import StoreCode, StoreDone, StoreEntry, StoreList, StoreListing, StorePurge
from memserve.store.disks.events import Verified
from memserve.store.machine.client_io import Client, DelayedReplies
from memserve.store.machine.events import ExtentsSealed, Jobs, SealExtents, StoreConfig
from memserve.store.machine.values import Values, split

if TYPE_CHECKING:
    from memserve._core import Place


@dataclass(slots=True, eq=False)
class _Purge:
    client: Client
    call: int
    keys: Iterator[bytes]
    gone: int = 0


@dataclass(slots=True)
class _Check:
    """A verification: of the memory by this module, of the disks by ``Disks``."""

    keys: Iterator[bytes]
    memory_running: bool = True
    disks_running: bool = True
    checked: int = 0
    damaged: int = 0
    unread: int = 0


class Sweeps:
    """All of it that is under way."""

    def __init__(self, values: Values, jobs: Jobs, answers: DelayedReplies, config: StoreConfig) -> None:
        self._answers = answers
        self._values = values
        self._jobs = jobs
        self._config = config
        self._purges: deque[_Purge] = deque()
        self._check: _Check | None = None
        self._sealing: tuple[int, bytes, Place] | None = None
        """Job, key and place of the value in memory that is being compared, with a reference."""
        self._now = 0

    # -- purging

    def purge(self, client: Client, message: StorePurge, now_ns: int) -> None:
        """Begin to forget the values of a client's tenant; everything is forgotten at once."""
        if message.everything:
            count = self._values.forget_everything(now_ns)
            self._answer(client, message.call, count, now_ns)
            return
        client.calls.add(message.call)
        self._purges.append(_Purge(client, message.call, iter(self._all_keys())))

    def _answer(self, client: Client, call: int, count: int, now_ns: int) -> None:
        done = StoreDone(call, bytes([StoreCode.DONE]), count=count)
        self._answers.give(client, done, now_ns + self._config.forget_ns)

    def _all_keys(self) -> list[bytes]:
        in_memory = split(self._values.tier.keys())
        known = set(in_memory)
        return in_memory + [key for key in split(self._values.disks.keys()) if key not in known]

    def _go_on(self, purge: _Purge, now_ns: int) -> bool:
        """Whether it has come to its end."""
        for _ in range(self._config.sweep_keys):
            key = next(purge.keys, None)
            if key is None:
                return True
            known = self._values.look(key)
            if known is not None and known.scope == purge.client.scope:
                purge.gone += self._values.forget(key, now_ns)
        return False

    # -- verifying

    def verify(self, start: bool, now_ns: int) -> None:
        """Begin to compare everything, unless that is under way."""
        is_running = self._check is not None and (self._check.memory_running or self._check.disks_running)
        if start and not is_running:
            self._check = _Check(iter(split(self._values.tier.keys())))
            self._values.disks.verify(now_ns)

    def disks_verified(self, outcome: Verified) -> None:
        """The disks are done."""
        if self._check is not None:
            self._check.disks_running = False
            self._check.checked += outcome.records
            self._check.damaged += outcome.damaged
            self._check.unread += outcome.unread

    def _compare_next(self) -> None:
        """One value in memory at a time."""
        check = self._check
        if check is None or self._sealing is not None or not check.memory_running:
            return
        for key in check.keys:
            place = self._values.tier.find(key, counts=False)
            if place is not None:
                self._sealing = (self._jobs.new(), key, place)
                self._jobs.ask(SealExtents(self._sealing[0], ((place.offset, place.length),)))
                return
        check.memory_running = False

    def sealed(self, event: ExtentsSealed) -> bool:
        """A value was compared. False: the job is another part's."""
        if self._sealing is None or self._sealing[0] != event.job:
            return False
        _, key, place = self._sealing
        self._sealing = None
        if self._check is not None:
            self._check.checked += 1
        if event.seals[0] != place.seal:
            self._values.drop_damaged(key, place.offset)
            if self._check is not None:
                self._check.damaged += 1
        elif not place.verified and self._values.is_at(key, place.offset):
            self._values.counters.compared += 1
            self._values.tier.verified(key)
        self._values.tier.release(place.offset)
        self._compare_next()
        return True

    # -- listing

    def listing(self, client: Client, message: StoreList) -> StoreListing:
        """The next entries of a client's listing."""
        if message.after == 0:
            client.listing = self._all_keys()
        entries, at = [], message.after
        for key in client.listing[at : at + message.count]:
            at += 1
            known = self._values.look(key)
            if known is not None and (message.everything or known.scope == client.scope):
                name, where = known.name or b"", self._values.where(key)
                entries.append(StoreEntry(key, name, known.length, known.scope, where))
        if at >= len(client.listing):
            at, client.listing = 0, []
        return StoreListing(message.call, at, tuple(entries))

    # -- time

    def drop(self, client: Client) -> None:
        """The client is gone. A purge that it has begun goes on without it."""
        client.listing = []

    def advance(self, now_ns: int) -> None:
        """Go on by a bit."""
        self._now = now_ns
        self._compare_next()
        if self._purges and self._go_on(self._purges[0], now_ns):
            purge = self._purges.popleft()
            purge.client.calls.discard(purge.call)
            self._answer(purge.client, purge.call, purge.gone, now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """Now, while there is something to go on with."""
        return self._now if self._purges else None

    def numbers(self) -> dict[str, int]:
        """How far the last verification has come."""
        check = self._check
        if check is None:
            return {"verify_running": 0}
        running = check.memory_running or check.disks_running
        checked = check.checked + self._values.disks.verified_records
        return {
            "verify_running": int(running),
            "verify_checked": checked,
            "verify_damaged": check.damaged,
            "verify_unread": check.unread,
        }

    def references(self) -> list[int]:
        """Extents with a reference of a verification."""
        return [] if self._sealing is None else [self._sealing[2].offset]
