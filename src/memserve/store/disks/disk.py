"""One disk: what its :class:`memserve._core.SegmentLog` asks for, callers' reads and writes, and moves, as jobs.

::

    write -> place --> WriteExtent --> finish_record --> (sync) --> Written
    write -> EncodeExtent --> place --> WriteRecord --> ... as above, where fewer bytes pay
    read  -> hold ---> ReadExtent ---> compare, let_go -----------> ReadEnded
    move  -> hold ---> ReadRecord ---> compare, let_go, place_moved --> WriteRecord --> finish_record
    check -> hold ---> ReadRecord ---> compare, let_go

A record's segment is held while one of its bytes may be read: it is not written again meanwhile. A disk that fails
``failures_max`` jobs in a row is lost: what was on it is dropped, what is under way ends, and no job follows. One that
has no room is read and not written (``store/disks/disk.py``).

Callers' reads that are under way on one disk, and their deadlines.

A disk whose file system has no room left: it is read as before, and written again when there is room.

::

    writes --ENOSPC, again and again--> full --a write works--> writes
                                         ^  |
                                         +--+ one write at intervals, to see

A file that was taken whole at the start can be refused room all the same: by a quota, by a file system that copies what
it writes, by a volume that promises more than it has. Pages of the log itself that are refused are kept and written
later, so the log does not hear of it: to it the disk is slow. A sync is kept as well: what it makes safe has passed the
page cache, so nothing of it is lost between two tries.
"""

from __future__ import annotations

import heapq
from collections import deque

from memserve._core import Found, SegmentLog
from memserve.base.errors import check
from memserve.store.disks import events as ev
from memserve.store.disks.encoding import ENCODED_BYTES_MIN, EncodedWrites, EncodeStep
from memserve.store.disks.events import PAGE_BYTES, DiskDone, DiskFull, DiskHasRoom
from memserve.store.disks.jobs import (
    CheckStep,
    CommandStep,
    DiskContext,
    MoveRead,
    MoveWrite,
    ReadStep,
    RecordsToCheck,
    Step,
    Verification,
    WriteStep,
    actions_of_move,
    bytes_on_disk,
    name_if_same,
    place_of,
)


class ReadsUnderWay:
    """Reads by their ids. One that is late has ended for its caller; until the device is done it counts here."""

    def __init__(self) -> None:
        self._reads: dict[int, ReadStep] = {}
        self._deadlines: list[tuple[int, int]] = []
        self.late = 0

    def __len__(self) -> int:
        return len(self._reads)

    def add_read(self, step: ReadStep, deadline_ns: int) -> None:
        """A read has begun."""
        self._reads[step.id] = step
        heapq.heappush(self._deadlines, (deadline_ns, step.id))

    def remove_read(self, step: ReadStep) -> None:
        """The device is done with a read."""
        del self._reads[step.id]
        self.late -= step.has_ended

    def take_late(self, now_ns: int) -> list[int]:
        """Ids of reads whose deadline has passed now; they have ended."""
        late: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            step = self._reads.get(heapq.heappop(self._deadlines)[1])
            if step is not None and not step.has_ended:
                step.has_ended = True
                late.append(step.id)
        self.late += len(late)
        return late

    def end_all(self) -> list[int]:
        """Ids of reads that had not ended; they have now."""
        self._deadlines.clear()
        ids = [step.id for step in self._reads.values() if not step.has_ended]
        for step in self._reads.values():
            step.has_ended = True
        self.late = len(self._reads)
        return ids

    @property
    def next_deadline_ns(self) -> int | None:
        """Of the reads that have not ended."""
        while self._deadlines and self._deadlines[0][1] not in self._reads:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def check_invariants(self, steps: list[ReadStep]) -> None:
        """``steps``: those that have a job."""
        check({step.id: step for step in steps} == self._reads, "reads and their jobs differ")
        check(sum(step.has_ended for step in steps) == self.late, "late reads are miscounted")


NO_ROOM = frozenset({"ENOSPC", "EDQUOT"})


class DiskRoom:
    """Of one disk: whether it is written, and which of the log's commands wait for that."""

    def __init__(self, number: int, shared: DiskContext) -> None:
        self._number, self._shared = number, shared
        self.is_full = False
        self._refused = 0  # writes in a row
        self._waiting: deque[CommandStep] = deque()
        self._due: list[CommandStep] = []
        self._retry_at_ns: int | None = None  # None: it is not full, or a try is under way or allowed
        self._may_try = False  # a caller's write may be the next try

    @property
    def takes_writes(self) -> bool:
        """Whether a caller's write may begin."""
        return not self.is_full or self._may_try

    def write_begins(self) -> None:
        """A caller's write begins: on a full disk, as the one that tries."""
        self._may_try = False

    def add_command(self, step: CommandStep) -> None:
        """A command of the log: it is due, or waits for room."""
        if self.is_full:
            self._waiting.append(step)
        else:
            self._due.append(step)

    def on_job_end(self, step: Step, result: DiskDone, now_ns: int) -> bool:
        """Take the end of a job into account. True: there was no room for what it writes; a command of the log is done
        again then, and the log does not hear of it."""
        if not isinstance(step, CommandStep | WriteStep | MoveWrite):
            return False
        is_sync = isinstance(step, CommandStep) and step.data is None
        if result.ok and not is_sync:
            self._on_write_ok()
        elif self.is_full and (is_sync or result.why not in NO_ROOM):
            self._retry_at_ns = now_ns + (
                0 if result.ok else self._shared.config.full_pause_ns
            )  # nothing of room is known
        if result.ok or result.why not in NO_ROOM:
            return False
        self._refused += 1
        if not self.is_full and self._refused >= self._shared.config.failures_max:
            self.is_full = True
            self._shared.counters.disks_filled += 1
            self._shared.outcomes.append(DiskFull(self._number, result.why))
        if self.is_full:
            self._retry_at_ns, self._may_try = now_ns + self._shared.config.full_pause_ns, False
        if isinstance(step, CommandStep):
            self.add_command(step)
        return True

    def _on_write_ok(self) -> None:
        self._refused = 0
        if self.is_full:
            self.is_full, self._may_try, self._retry_at_ns = False, False, None
            self._due += self._waiting
            self._waiting.clear()
            self._shared.outcomes.append(DiskHasRoom(self._number))

    def retry_due(self, now_ns: int) -> None:
        """Try one write when the time has come."""
        if self._retry_at_ns is None or now_ns < self._retry_at_ns:
            return
        self._retry_at_ns = None
        if self._waiting:
            self._due.append(self._waiting.popleft())
        else:
            self._may_try = True

    def take_due(self) -> list[CommandStep]:
        """Commands of the log that are to be begun."""
        due, self._due = self._due, []
        return due

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`retry_due` has something to do."""
        return self._retry_at_ns

    def drop_commands(self) -> None:
        """The disk is lost."""
        self.is_full, self._retry_at_ns = False, None
        self._waiting.clear()
        self._due.clear()


_WRITE, _SYNC, _MOVE = range(3)  # kinds of a log's commands


class Disk:
    """The jobs of one disk. Whatever calls it takes ``DiskContext.actions`` and ``DiskContext.outcomes`` afterwards."""

    def __init__(self, number: int, log: SegmentLog, shared: DiskContext) -> None:
        self.number = number
        self.log: SegmentLog | None = log
        """None: the disk is lost."""
        self.disk_bytes = log.disk_bytes
        self._shared = shared
        self._config = shared.config
        self._counters = shared.counters
        self._jobs: dict[int, Step] = {}
        self._tickets: dict[int, WriteStep | MoveWrite] = {}
        """Without an end; of some the bytes are written already."""
        self._writing: dict[bytes, int] = {}
        """Callers' writes of each key that are without an end."""
        self._reads = ReadsUnderWay()
        self._moves: deque[tuple[int, bytes]] = deque()
        self._moving = 0
        self._failures = 0
        self._room = DiskRoom(number, shared)
        self._encoded_writes = EncodedWrites()
        self._encodes = self._config.kv_codec == "always"
        self._check = RecordsToCheck(self._config.check_pause_ns)
        self.pump_log(0)

    # -- callers

    @property
    def is_busy(self) -> bool:
        """No write is taken: too many are under way, or there is no room."""
        writes = len(self._tickets) + len(self._encoded_writes)
        return writes >= self._config.writes_max or not self._room.takes_writes

    @property
    def is_full(self) -> bool:
        """It is read, and not written."""
        return self._room.is_full

    @property
    def has_unused_space(self) -> bool:
        """There are segments that hold nothing, beside the few that are kept ready."""
        return self.log is not None and self.log.segments_free > 3

    @property
    def is_idle(self) -> bool:
        """Nothing is under way; what waits for room is not."""
        if self._jobs:
            return False
        return self.log is None or self.is_full or (self.log.idle and not len(self._encoded_writes))

    @property
    def is_verifying(self) -> bool:
        """A verification has not come to its end here."""
        return self._check.verification is not None

    def is_writing(self, key: bytes) -> bool:
        """A write of this key has no end yet."""
        return key in self._writing

    def write_record(
        self, key: bytes, extent: int, length: int, now_ns: int, scope: int, seal: int, name: bytes
    ) -> bool:
        """Begin to write a record. False: no segment is ready."""
        log = self.log
        if log is None:
            return False
        write = EncodeStep(key, extent, length, scope, seal, name)
        if self._encodes and length >= ENCODED_BYTES_MIN:
            log.expect_encoded()
            self._encoded_writes.add_write(write)
        elif not self._place_write(log, write, now_ns):
            self.pump_log(now_ns)
            return False
        self._room.write_begins()
        self._writing[key] = self._writing.get(key, 0) + 1
        self._counters.writes += 1
        self._counters.payload_bytes_written += length
        self.pump_log(now_ns)
        return True

    def _place_write(self, log: SegmentLog, write: EncodeStep, now_ns: int) -> bool:
        """Begin to write a value, encoded or not. False: no segment is ready, or the superblock."""
        encoded_bytes = write.encoded_bytes
        if encoded_bytes and not log.takes_encoded:
            return False
        ticket = log.place(write.key, write.length, write.name, write.scope, write.seal, encoded_bytes)
        if ticket is None:
            return False
        inside = SegmentLog.HEAD_BYTES + len(write.name) if ticket.pages == 1 else 0
        head = log.head(ticket.id, write.name, bytes(write.length) if inside else b"")
        self._tickets[ticket.id] = step = WriteStep(ticket.id, write.key)
        to = self._begin_job(step), self.number, ticket.offset, head
        if encoded_bytes:
            self._shared.actions.append(ev.WriteRecord(*to, write.source, encoded_bytes))
            self._counters.values_encoded += 1
            self._counters.encoded_from_bytes += write.length
            self._counters.encoded_to_bytes += (ticket.pages - 1) * PAGE_BYTES
        else:
            self._shared.actions.append(ev.WriteExtent(*to, write.extent, write.length, inside))
        self._shared.charge_bytes(ticket.pages * PAGE_BYTES, now_ns)
        return True

    def _pump_encoded(self, log: SegmentLog, now_ns: int) -> bool:
        """Let values be encoded, and write those that are. False: nothing could be done."""
        writes, progress = self._encoded_writes, False
        while (step := writes.take_due()) is not None:
            progress = True
            if step.is_removed:
                self._write_ended(step.key, False)
                continue
            job = self._begin_job(step)
            writes.on_begin(step, job)
            self._shared.actions.append(ev.EncodeExtent(job, self.number, step.extent, step.length))
        while (encoded := writes.next_encoded) is not None:
            if encoded.is_removed:
                self._drop_encoded(encoded)
                self._write_ended(encoded.key, False)
            elif not self._place_write(log, encoded, now_ns):
                break
            writes.pop_encoded()
            progress = True
        return progress

    def _drop_encoded(self, step: EncodeStep) -> None:
        if step.encoded_bytes:
            self._shared.actions.append(ev.DropRecord(self.number, step.source))

    def read_record(self, read_id: int, key: bytes, extent: int, now_ns: int, deadline_ns: int) -> bool:
        """Begin to read a record that is here. False: too many reads are under way, or one of them is late."""
        if self._reads.late or len(self._reads) >= self._config.reads_max:
            self._counters.reads_refused += 1
            return False
        record = self.log.hold(key) if self.log is not None else None
        if record is None:
            return False
        step = ReadStep(read_id, key, record)
        job = self._begin_job(step)
        offset, inside = place_of(record)
        self._shared.actions.append(
            ev.ReadExtent(job, self.number, offset, extent, record.length, inside, record.encoded_bytes)
        )
        self._reads.add_read(step, deadline_ns)
        self._counters.reads += 1
        return True

    def remove_record(self, key: bytes, now_ns: int) -> bool:
        """Forget a record."""
        if self.log is None or not self.log.remove(key) | self._encoded_writes.remove_value(key):
            return False
        self.pump_log(now_ns)
        return True

    def remove_all(self, now_ns: int) -> None:
        """Forget everything."""
        self.pump_log(now_ns)
        if self.log is not None:
            self._encoded_writes.remove_all()
            self.log.purge()
            self.log.take_evicted()  # the caller knows
            self.pump_log(now_ns)

    def close_log(self, now_ns: int) -> None:
        """Write the open segment's footer: a restart need not read all of it."""
        if self.log is not None:
            self.log.close_open()
            self.pump_log(now_ns)

    # -- what ends

    def handle(self, result: DiskDone, now_ns: int) -> None:
        """A job has come to its end."""
        check(result.job in self._jobs, "no such job is under way")
        step = self._jobs.pop(result.job)
        self._counters.device_errors += not result.ok
        self._note_codec(step, result)
        if self.log is None:
            self._ended_after_loss(step, result)
            return
        had_no_room = self._room.on_job_end(step, result, now_ns)
        if not had_no_room and not isinstance(step, EncodeStep):  # which tells nothing of the device
            self._failures = 0 if result.ok else self._failures + 1
        match step:
            case CommandStep(command) if not had_no_room:
                self.log.finish_command(command, result.ok)
            case WriteStep(ticket) | MoveWrite(ticket):
                self.log.finish_record(ticket, result.ok)
            case EncodeStep():
                self._encoded_writes.on_encoded(result.job, result.encoded_bytes)
            case ReadStep():
                self._on_read_end(self.log, step, result)
            case MoveRead():
                self._move_read(self.log, step, result, now_ns)
            case CheckStep():
                self._on_check_read(self.log, step, result, now_ns)
        self.pump_log(now_ns)
        if self._failures >= self._config.failures_max or self.log.broken:
            self._lose_disk(result.why)

    def _note_codec(self, step: Step, result: DiskDone) -> None:
        self._encodes = result.encodes
        if isinstance(step, EncodeStep):
            self._counters.encode_ns += result.codec_ns
        else:
            self._counters.decode_ns += result.codec_ns
            self._counters.values_decoded += result.codec_ns > 0

    def advance_time(self, now_ns: int) -> None:
        """Time has passed."""
        for read_id in self._reads.take_late(now_ns):
            self._counters.reads_late += 1
            self._shared.outcomes.append(ev.ReadEnded(read_id, False, "late", extent_free=False))
        self._room.retry_due(now_ns)
        if self.log is not None:
            self._begin_due(now_ns)
            self._check_next(self.log, now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance_time` has something to do."""
        times = [self._reads.next_deadline_ns, self._room.next_deadline_ns]
        if self._check.verification is not None and self._check.job is None:
            times.append(self._check.after_ns)
        return min((due_ns for due_ns in times if due_ns is not None), default=None)

    def _on_read_end(self, log: SegmentLog, step: ReadStep, result: DiskDone) -> None:
        self._reads.remove_read(step)
        log.let_go(step.record.segment)
        name = name_if_same(log, step.key, step.record, result)
        if name is None:
            self._forget_record(log, step.key, step.record)
        if step.has_ended:
            self._shared.outcomes.append(ev.ExtentFree(step.id))
        elif name is not None:
            self._counters.reads_ok += 1
            self._counters.read_bytes += step.record.length
            self._shared.outcomes.append(ev.ReadEnded(step.id, True, name=name))
        else:
            self._counters.reads_failed += not result.ok
            self._counters.reads_damaged += result.ok
            self._shared.outcomes.append(
                ev.ReadEnded(step.id, False, "damaged" if result.ok else result.why or "failed")
            )

    def _forget_record(self, log: SegmentLog, key: bytes, record: Found) -> None:
        """The record can't be read, or is not what was written: unless another has taken its place, it goes."""
        current = log.look(key)
        if current is not None and current.head_offset == record.head_offset and log.remove(key):
            self._shared.outcomes.append(ev.Dropped(key))

    # -- moves

    def _start_move(self, log: SegmentLog, now_ns: int) -> None:
        command, key = self._moves.popleft()
        record = log.hold(key, False)
        if record is None or not self._shared.budget.allows_bytes(bytes_on_disk(record), now_ns):
            if record is not None:
                log.let_go(record.segment)
            self._counters.moves_refused += 1
            log.finish_command(command, False)
            return
        self._moving += 1
        job = self._begin_job(MoveRead(command, key, record))
        offset, inside = place_of(record)
        self._shared.actions.append(
            ev.ReadRecord(job, self.number, offset, record.length, inside, True, record.encoded_bytes)
        )

    def _move_read(self, log: SegmentLog, step: MoveRead, result: DiskDone, now_ns: int) -> None:
        log.let_go(step.record.segment)
        name = name_if_same(log, step.key, step.record, result)
        ticket = log.place_moved(step.command, name) if name is not None else None
        if name is None or ticket is None:
            self._moving -= 1
            self._counters.moves_refused += 1
            self._shared.actions.append(ev.DropRecord(self.number, result.job))
            if name is None:
                self._forget_record(log, step.key, step.record)
            log.finish_command(step.command, False)
            return
        move = MoveWrite(ticket.id, step.command)
        self._tickets[ticket.id] = move
        job = self._begin_job(move)
        self._shared.actions += actions_of_move(log, self.number, job, ticket, name, result, step.record)
        self._shared.charge_bytes(ticket.pages * PAGE_BYTES, now_ns)

    # -- verification

    def verify_records(self, verification: Verification, now_ns: int) -> None:
        """Read every record that is here now, one at a time, and compare."""
        if self.log is not None:
            self._check.start_check(verification, self.log, now_ns)
            self._check_next(self.log, now_ns)

    def _check_next(self, log: SegmentLog, now_ns: int) -> None:
        if not self._check.is_due(now_ns, callers_read=bool(self._reads)):
            return
        next_record = self._check.hold_next(log)
        if next_record is None:
            return
        key, record = next_record
        self._check.job = job = self._begin_job(CheckStep(key, record))
        offset, inside = place_of(record)
        self._shared.actions.append(
            ev.ReadRecord(job, self.number, offset, record.length, inside, False, record.encoded_bytes)
        )

    def _on_check_read(self, log: SegmentLog, step: CheckStep, result: DiskDone, now_ns: int) -> None:
        log.let_go(step.record.segment)
        verification = self._check.finish_record(now_ns)
        self._counters.checked += 1
        if name_if_same(log, step.key, step.record, result) is not None:
            verification.note_good(step.record.length)
        else:
            verification.note_bad(step.key, step.record.length, readable=result.ok)
            self._forget_record(log, step.key, step.record)
        self._check_next(log, now_ns)

    # -- the log

    def pump_log(self, now_ns: int) -> None:
        """Take what the log has to say, until it has nothing more."""
        log = self.log
        while log is not None:
            commands, ended_tickets = log.take_commands(), log.take_ended()
            for command, kind, offset, data in commands:
                if kind == _MOVE:
                    self._moves.append((command, data))
                    continue
                self._room.add_command(CommandStep(command, offset, data if kind == _WRITE else None))
            self._begin_due(now_ns)
            for ticket, published in ended_tickets:
                self._ticket_ended(log, ticket, published)
            moved = bool(self._moves) and self._moving < self._config.moves_max and not self.is_full
            if moved:
                self._start_move(log, now_ns)
            encoded = self._pump_encoded(log, now_ns)
            if not (commands or ended_tickets or moved or encoded):
                break
        if log is not None and (evicted := log.take_evicted()):
            self._shared.outcomes.append(ev.Dropped(evicted))

    def _begin_due(self, now_ns: int) -> None:
        for step in self._room.take_due():
            self._shared.actions.append(step.disk_action(self._begin_job(step), self.number))
            self._shared.charge_bytes(len(step.data or b""), now_ns)

    def _ticket_ended(self, log: SegmentLog, ticket: int, published: bool) -> None:
        step = self._tickets.pop(ticket)
        if isinstance(step, WriteStep):
            self._write_ended(step.key, published)
            return
        self._moving -= 1
        self._counters.moves += published
        self._counters.moves_refused += not published
        log.finish_command(step.command, published)

    def _write_ended(self, key: bytes, published: bool) -> None:
        self._writing[key] -= 1
        if self._writing[key] == 0:
            del self._writing[key]
        self._counters.writes_ok += published
        self._counters.writes_failed += not published
        self._shared.outcomes.append(ev.Written(key, published))

    # -- the loss of the disk

    def _lose_disk(self, why: str) -> None:
        log = self.log
        assert log is not None
        keys, self.log = log.keys(), None
        self._counters.disks_lost += 1
        outcomes = self._shared.outcomes
        outcomes.append(ev.DiskLost(self.number, why))
        if keys:
            outcomes.append(ev.Dropped(keys))
        self._shared.actions.append(ev.ForgetDisk(self.number, why))
        for read_id in self._reads.end_all():
            self._counters.reads_failed += 1
            outcomes.append(ev.ReadEnded(read_id, False, "lost", extent_free=False))
        # Of the other writes the device may still read the extents.
        under_way = {step.ticket for step in self._jobs.values() if isinstance(step, WriteStep | MoveWrite)}
        for ticket, step in list(self._tickets.items()):
            if ticket not in under_way:
                del self._tickets[ticket]
                if isinstance(step, WriteStep):
                    self._write_ended(step.key, False)
        for encoded in self._encoded_writes.take_idle():
            self._drop_encoded(encoded)
            self._write_ended(encoded.key, False)
        self._moves.clear()
        self._room.drop_commands()
        self._check.stop_check()

    def _ended_after_loss(self, step: object, result: DiskDone) -> None:
        match step:
            case ReadStep():
                self._reads.remove_read(step)
                self._shared.outcomes.append(ev.ExtentFree(step.id))
            case EncodeStep():
                self._encoded_writes.on_encoded(result.job, result.encoded_bytes)
                self._drop_encoded(self._encoded_writes.pop_encoded())
                self._write_ended(step.key, False)
            case WriteStep(ticket, key):
                del self._tickets[ticket]
                self._write_ended(key, False)
            case MoveWrite(ticket):
                del self._tickets[ticket]
            case MoveRead():
                self._shared.actions.append(ev.DropRecord(self.number, result.job))

    # -- the rest

    def _begin_job(self, step: Step) -> int:
        job = self._shared.next_job(self.number)
        self._jobs[job] = step
        return job

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless counts and references agree."""
        steps = list(self._jobs.values())
        self._reads.check_invariants([step for step in steps if isinstance(step, ReadStep)])
        check(len(self._reads) <= self._config.reads_max, "more reads than allowed")
        writing = sum(isinstance(step, WriteStep) for step in self._tickets.values()) + len(self._encoded_writes)
        self._encoded_writes.check_invariants({job for job, step in self._jobs.items() if isinstance(step, EncodeStep)})
        check(writing == sum(self._writing.values()), "writes are miscounted")
        check(all(count > 0 for count in self._writing.values()), "a key without a write")
        written = {step.ticket for step in steps if isinstance(step, WriteStep | MoveWrite)}
        check(written <= set(self._tickets), "a job writes a record that has ended")
        if self.log is None:
            check(not self._moves and self._check.verification is None, "a lost disk has work")
            return
        moving = sum(isinstance(step, MoveWrite) for step in self._tickets.values())
        moving += sum(isinstance(step, MoveRead) for step in steps)
        check(moving == self._moving <= self._config.moves_max, "moves are miscounted")
        checks = [job for job, step in self._jobs.items() if isinstance(step, CheckStep)]
        check(checks == [job for job in [self._check.job] if job is not None], "a verification's job is lost")
        self.log.check_invariants()
