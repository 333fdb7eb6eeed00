"""The disks of a store: admission to them, reads from them, and what a lost one means. A machine without IO.

Values go to disks by their keys, in proportion to the disks' sizes. All disks are asked for a key, so what an earlier
set of disks was given is still found. A lost disk is lost cache, and nothing else.

::

    disks.write(...), disks.read(...), disks.handle(DiskDone), disks.tick(now)
        -> take_actions() for the host (store/host/disks.py), take_outcomes() for the owner
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from memserve._core import Frequency, SegmentLog
from memserve.base.errors import check
from memserve.store.disks.disk import Disk
from memserve.store.disks.events import DiskAction, DiskDone, DiskOutcome, DisksConfig, Verified
from memserve.store.disks.jobs import DiskContext, Verification, WriteBudget, record_bytes

__all__ = ["DiskRecord", "Disks", "DisksConfig"]


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """A record that is found: bytes of its payload, its owner's tag, its checksum, bytes of its name."""

    length: int
    scope: int
    seal: int
    name_bytes: int


class Disks:
    """Several segment logs, striped by key. Keys have 16 bytes; times are nanoseconds on one clock."""

    def __init__(self, logs: Sequence[SegmentLog], config: DisksConfig | None = None) -> None:
        """``logs``: formatted or recovered; none: nothing is ever here or wanted."""
        self.config = config or DisksConfig()
        self._shared = DiskContext(self.config, WriteBudget(self.config.writes_per_day_bytes), max(1, len(logs)))
        self._disks = [Disk(number, log, self._shared) for number, log in enumerate(logs)]
        self._frequency = Frequency(self.config.frequency_keys)
        self._reads: dict[int, Disk] = {}
        self._next_id = 1
        self._verification: Verification | None = None
        self._live: list[Disk] = []
        self._ends: list[int] = []
        self._find_live()

    # -- what is here

    @property
    def has_disks(self) -> bool:
        """Whether there is a disk that is not lost."""
        return bool(self._live)

    def __contains__(self, key: bytes) -> bool:
        return any(disk.log is not None and key in disk.log for disk in self._live)

    def __len__(self) -> int:
        return sum(len(log) for log in self._live_logs())

    def all_keys(self) -> bytes:
        """All of them, one behind the other, in no order."""
        return b"".join(log.keys() for log in self._live_logs())

    def find_record(self, key: bytes) -> DiskRecord | None:
        """What is known of a value without reading it. No hit."""
        for log in self._live_logs():
            record = log.look(key)
            if record is not None:
                return DiskRecord(record.length, record.scope, record.seal, record.name_bytes)
        return None

    def touch_values(self, keys: bytes) -> None:
        """Values were used elsewhere: as a hit of each, they stay when the oldest are given up."""
        for log in self._live_logs():
            log.touch(keys)

    # -- writing

    def wants_value(self, key: bytes, nbytes: int, now_ns: int, *, bypass: bool = False) -> bool:
        """Whether a value should be written. Counts as one request of this key: call it whenever the value was put or
        asked for.

        Admitted are keys that were asked for before; all keys with ``bypass``, with ``admission="all"``, and while
        there is space on the disk that nothing lies on. The day's budget and back pressure hold for all of them.
        """
        was_requested = self._frequency.note(key) > 0
        disk = self._disk_for(key)
        if disk is None or key in self or self._is_writing(key):
            return False
        if not self._has_room(disk, nbytes, now_ns, name_bytes=0):
            return False
        if was_requested or bypass or self.config.admission == "all" or disk.has_unused_space:
            return True
        self._shared.counters.refused_seldom += 1
        return False

    def write_value(
        self, key: bytes, offset: int, length: int, now_ns: int, *, scope: int = 0, seal: int = 0, name: bytes = b""
    ) -> bool:
        """Begin to write the extent at ``offset``. False: not taken. True: the extent stays as it is, and referenced,
        until ``Written``.

        ``seal``: :func:`memserve._core.seal_ranges` of the ``length`` bytes; 0 for an empty value. ``name``: at most
        1,024 bytes that come back with each read. A key that is here is not written again: ``remove`` it before.
        """
        disk = self._disk_for(key)
        if disk is None or key in self or self._is_writing(key):
            return False
        if not self._has_room(disk, length, now_ns, name_bytes=len(name)):
            return False
        if not disk.write_record(key, offset, length, now_ns, scope, seal, name):
            self._shared.counters.refused_room += 1
            return False
        return True

    def _is_writing(self, key: bytes) -> bool:
        # Also on a lost disk: an extent has one end at a time.
        return any(disk.is_writing(key) for disk in self._disks)

    def _has_room(self, disk: Disk, nbytes: int, now_ns: int, name_bytes: int) -> bool:
        counters = self._shared.counters
        if disk.log is None or nbytes > disk.log.record_bytes_max:
            counters.refused_room += 1
        elif disk.is_busy:
            counters.refused_busy += 1
        elif not self._shared.budget.allows_bytes(record_bytes(nbytes, name_bytes), now_ns):
            counters.refused_budget += 1
        else:
            return True
        return False

    # -- reading

    def read_value(self, key: bytes, offset: int, now_ns: int, deadline_ns: int | None = None) -> int | None:
        """Begin to read a value into the extent at ``offset``; returns the read's id. None: it is not here, or too
        much is under way, or the disk is late with another read.

        ``ReadEnded`` follows by ``deadline_ns`` at the latest; the extent must stay referenced until the device is
        done with it (``ReadEnded.extent_free``, or ``ExtentFree``). Reading counts as a hit.
        """
        disk = next((disk for disk in self._live if disk.log is not None and key in disk.log), None)
        if disk is None:
            return None
        read_id = self._next_id
        deadline_ns = now_ns + self.config.read_deadline_ns if deadline_ns is None else deadline_ns
        if not disk.read_record(read_id, key, offset, now_ns, deadline_ns):
            return None
        self._next_id += 1
        return read_id

    # -- forgetting

    def remove_value(self, key: bytes, now_ns: int = 0) -> bool:
        """Forget a value, also one that is being written. False: there is none. See :attr:`removals_written`."""
        return sum(disk.remove_record(key, now_ns) for disk in self._live) > 0

    def remove_all(self, now_ns: int = 0) -> None:
        """Forget everything, for good once :attr:`is_idle`."""
        for disk in self._live:
            disk.remove_all(now_ns)

    @property
    def removals_written(self) -> bool:
        """A restart knows of all removals, and of all that was dropped for its space."""
        return all(log.removals_written for log in self._live_logs())

    @property
    def removals_wait_for_room(self) -> bool:
        """Some are not written, and will not be until a full disk has room again."""
        return any(disk.is_full and disk.log is not None and not disk.log.removals_written for disk in self._live)

    # -- verification

    def start_verification(self, now_ns: int) -> int:
        """Read every record that is here now and compare it, one at a time on each disk, while callers read only now
        and then; returns the id of the ``Verified`` to come. What does not match is forgotten. One runs at a time: a
        second call returns the id of the first."""
        if self._verification is None:
            self._verification = Verification(self._next_id)
            self._next_id += 1
            for disk in self._live:
                disk.verify_records(self._verification, now_ns)
        verification_id = self._verification.id
        self._end_verification()
        return verification_id

    @property
    def verified_records(self) -> int:
        """Records that the verification under way has compared so far; 0: none is."""
        return self._verification.records if self._verification is not None else 0

    def _end_verification(self) -> None:
        verification = self._verification
        if verification is None or any(disk.is_verifying for disk in self._disks):
            return
        self._verification = None
        keys = b"".join(verification.keys)
        outcome = Verified(
            verification.id,
            verification.records,
            verification.payload_bytes,
            verification.damaged,
            verification.unread,
            keys,
        )
        self._shared.outcomes.append(outcome)

    # -- the host

    def handle(self, event: DiskDone, now_ns: int) -> None:
        """A job has come to its end."""
        disk = self._disks[self._shared.disk_of(event.job)]
        was_live = disk.log is not None
        disk.handle(event, now_ns)
        if was_live and disk.log is None:
            self._find_live()
        self._end_verification()

    def advance_time(self, now_ns: int) -> None:
        """Time has passed: late reads end."""
        for disk in self._disks:
            disk.advance_time(now_ns)
        self._end_verification()

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance_time` has something to do."""
        return min((due_ns for disk in self._disks if (due_ns := disk.next_deadline_ns) is not None), default=None)

    def take_actions(self) -> list[DiskAction]:
        """What the host has to do, in this order."""
        actions, self._shared.actions = self._shared.actions, []
        return actions

    def take_outcomes(self) -> list[DiskOutcome]:
        """What has happened, in this order."""
        outcomes, self._shared.outcomes = self._shared.outcomes, []
        return outcomes

    def close(self, now_ns: int) -> None:
        """An orderly end: footers are written. It is over when :attr:`is_idle`."""
        for disk in self._live:
            disk.close_log(now_ns)

    @property
    def is_idle(self) -> bool:
        """No job is under way."""
        return all(disk.is_idle for disk in self._disks)

    # -- facts

    @property
    def capacity_bytes(self) -> int:
        """Of the disks that are not lost."""
        return sum(disk.disk_bytes for disk in self._live)

    @property
    def nbytes(self) -> int:
        """Memory of indexes and sketch."""
        return sum(log.nbytes for log in self._live_logs()) + self._frequency.nbytes

    @property
    def write_amplification(self) -> float:
        """Bytes that the disks were told to write, for each byte of payload that callers wrote; 0: none."""
        counters = self._shared.counters
        return counters.disk_bytes_written / max(1, counters.payload_bytes_written)

    def counters(self) -> dict[str, int]:
        """:class:`DiskCounters`, and of the logs: ``records`` and ``disks`` now; ``disks_full`` of these;
        ``records_evicted``, ``..._recovered`` and ``..._torn`` since the start, of disks that are not lost."""
        counts = asdict(self._shared.counters)
        counts["records"], counts["disks"] = len(self), len(self._live)
        counts["disks_full"] = sum(disk.is_full for disk in self._live)
        for name in ("records_evicted", "records_recovered", "records_torn"):
            counts[name] = sum(log.counters()[name] for log in self._live_logs())
        return counts

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless counts and references agree."""
        for disk in self._disks:
            disk.check_invariants()
        check(self._live == [disk for disk in self._disks if disk.log is not None], "a lost disk is asked")
        check(self._verification is not None or not any(disk.is_verifying for disk in self._disks), "two verifications")

    # -- disks that are not lost

    def _find_live(self) -> None:
        self._live = [disk for disk in self._disks if disk.log is not None]
        self._ends = list(accumulate(disk.disk_bytes for disk in self._live))

    def _live_logs(self) -> list[SegmentLog]:
        return [disk.log for disk in self._live if disk.log is not None]

    def _disk_for(self, key: bytes) -> Disk | None:
        """The disk that a new value goes to: each has a part of the keys' range as large as itself."""
        if not self._live:
            return None
        position = int.from_bytes(key[:8], "little") * self._ends[-1] >> 64
        return self._live[bisect_right(self._ends, position)]
