"""Sends a workload at the times it asks for.

Open loop: a turn is sent when it is due, even if other sessions are late; only its own session can delay it, because
its prompt contains the previous answer (MemServe 8.2, "causal order"). Closed loop: ``users`` sessions at a time; when
one ends, the next begins. The latency of a request that goes out late still counts from when it was due.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

import msgspec

from memserve.base.units import NS_PER_S, ns_from_s
from memserve_lab.bench.load.client import Client, Clock, Target
from memserve_lab.bench.load.prompts import Dialogue, Manner, Outcome, RecordWriter, RequestRecord
from memserve_lab.workloads.records import History, Session, Workload

BAR_CHARS = 24
EVERY_NS = NS_PER_S // 5


class Progress:
    """One line on stderr, rewritten in place; silent if stderr is no terminal."""

    def __init__(self, planned: int, title: str = "", stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._shows = self._stream.isatty()
        self._planned, self._title = planned, title
        self._ended = self._failed = self._under_way = 0
        self._shown_ns = -EVERY_NS

    def on_sent(self) -> None:
        """One more request is under way."""
        self._under_way += 1

    def on_ended(self, record: RequestRecord, now_ns: int) -> None:
        """One request has ended."""
        self._under_way -= 1
        self._ended += 1
        self._failed += record.outcome is not Outcome.OK
        if self._shows and now_ns - self._shown_ns >= EVERY_NS:
            self._shown_ns = now_ns
            self._stream.write("\r" + self.progress_line(now_ns) + "\x1b[K")
            self._stream.flush()

    def progress_line(self, now_ns: int) -> str:
        """For example ``sharegpt [######........]  120/480  8 under way  12.5 s``."""
        filled = BAR_CHARS * self._ended // max(self._planned, 1)
        bar = "#" * filled + "." * (BAR_CHARS - filled)
        failed = f"  {self._failed} failed" if self._failed else ""
        head = f"{self._title} " if self._title else ""
        seconds = now_ns / NS_PER_S
        return f"{head}[{bar}]  {self._ended}/{self._planned}  {self._under_way} under way{failed}  {seconds:.1f} s"

    def close(self) -> None:
        """Make room for other output."""
        if self._shows:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


LEAD_NS = NS_PER_S // 50
"""A request is encoded this long before it is due, so that encoding does not delay it."""
PREPARED_BYTES_MAX = 1 << 28
"""First turns are encoded before the clock starts, up to this many bytes."""
INTERRUPTED = "interrupted"
"""``partial`` of a run that Ctrl-C or SIGTERM ended."""
PROBES = 4
PROBE_GAP_S = 0.5
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class LoadRun:
    """Records of a run."""

    records: list[RequestRecord] = field(default_factory=list)
    planned: int = 0
    """Requests of the whole workload."""
    wall_ns: int = 0
    partial: str | None = None
    """Why the run ended early. None: the run is complete."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Fields that all records of a run share."""

    setting: str = ""
    workload: str = ""
    seed: int = 0


class Driver:
    """One run. ``stop`` may be called at any time: requests under way are dropped, records of ended ones are kept."""

    def __init__(
        self,
        workload: Workload,
        target: Target,
        manner: Manner,
        *,
        writer: RecordWriter | None = None,
        progress: Progress | None = None,
        labels: Labels | None = None,
        limit_s: float | None = None,
    ) -> None:
        self._workload, self._target, self._manner = workload, target, manner
        self._writer, self._labels, self._limit_s = writer, labels or Labels(), limit_s
        self._progress = progress or Progress(workload.request_count)
        self._run = LoadRun(planned=workload.request_count)
        self._prepared: dict[int, tuple[Dialogue, str, bytes]] = {}
        """Session id -> its dialogue and first request, for exactly the sessions that have not begun yet."""
        self._crew: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[None] | None = None

    async def send_workload(self) -> LoadRun:
        """Send everything and wait for the last answer."""
        self._prepare_bodies()
        self._clock = Clock()
        async with Client(self._target, self._clock) as self._client:
            self._crew = asyncio.create_task(self._send_all())
            try:
                await asyncio.wait([self._crew], timeout=self._limit_s)
                self.stop_early(f"time is up: {self._limit_s} s")
                if self._probe is not None:
                    await self._probe  # the last requests may have failed because the server is gone
            finally:
                await self._end_run()
        return self._run

    def _prepare_bodies(self) -> None:
        total_bytes = 0
        for session in self._workload.sessions:
            dialogue = Dialogue(session, self._manner)
            path, body = dialogue.request_of(0)
            data = _encode(body)
            total_bytes += len(data)
            if total_bytes > PREPARED_BYTES_MAX:
                return
            self._prepared[id(session)] = (dialogue, path, data)

    async def _end_run(self) -> None:
        for task in (self._crew, self._probe):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        self._run.wall_ns = self._clock.now_ns()
        self._progress.close()
        if self._crew is not None and not self._crew.cancelled() and (error := self._crew.exception()):
            raise error

    def stop_early(self, why: str) -> None:
        """End the run early; the first reason is kept."""
        if self._crew is not None and not self._crew.done():
            self._run.partial = self._run.partial or why
            self._crew.cancel()

    async def _send_all(self) -> None:
        sessions = iter(self._workload.sessions)
        async with asyncio.TaskGroup() as group:
            if self._workload.users is None:
                for session in sessions:
                    group.create_task(self._send_session(session))
            else:
                for _ in range(self._workload.users):
                    group.create_task(self._one_after_the_other(sessions))

    async def _one_after_the_other(self, sessions: Iterator[Session]) -> None:
        for session in sessions:
            await self._send_session(session, self._clock.now_ns())

    async def _send_session(self, session: Session, free_ns: int = 0) -> None:
        """Send all turns of a session; ``free_ns``: the earliest start (closed loop)."""
        ready = self._prepared.pop(id(session), None)
        dialogue = ready[0] if ready is not None else Dialogue(session, self._manner)
        for number, turn in enumerate(session.turns):
            think_ns = ns_from_s(turn.think_s) if number else 0
            due_ns = max(ns_from_s(turn.due_s or 0.0), free_ns + think_ns)
            if number == 0 and ready is not None:
                _, path, data = ready
            else:
                await self._sleep_until(due_ns - LEAD_NS)
                path, body = dialogue.request_of(number)
                data = _encode(body)
            await self._sleep_until(due_ns)
            record = self._open_record(session, number, due_ns)
            try:
                dialogue.add_answer(await self._client.send_request(path, data, record))
            finally:
                self._close_record(record)
            ready = None  # its bytes were sent
            free_ns = record.end_ns or due_ns
            if not record.ok and session.history is History.CLOSED:
                return  # the next prompt would contain an answer that is missing

    async def _sleep_until(self, due_ns: int) -> None:
        while (left_ns := due_ns - self._clock.now_ns()) > 0:
            await asyncio.sleep(left_ns / NS_PER_S)

    def _open_record(self, session: Session, number: int, due_ns: int) -> RequestRecord:
        labels = self._labels
        self._progress.on_sent()
        return RequestRecord(
            session=session.session_id, turn=number, group=session.group, setting=labels.setting,
            workload=labels.workload, seed=labels.seed, scheduled_ns=due_ns,
        )  # fmt: skip

    def _close_record(self, record: RequestRecord) -> None:
        self._run.records.append(record)
        if self._writer is not None:
            self._writer.write_record(record)
        self._progress.on_ended(record, self._clock.now_ns())
        if record.outcome is Outcome.BROKEN and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._look_for_server())

    async def _look_for_server(self) -> None:
        for _ in range(PROBES):
            if await self._client.is_alive():
                return
            await asyncio.sleep(PROBE_GAP_S)
        self.stop_early(reason := f"the server at {self._target.base_url} is gone")
        self._run.partial = self._run.partial or reason


def drive(make: Callable[[], Driver]) -> LoadRun:
    """Run a driver to its end; Ctrl-C or SIGTERM stops it and keeps what was measured, a second one interrupts."""

    async def main() -> LoadRun:
        driver = make()
        with _stopped_by_signals(driver), _seldom_collecting():
            return await driver.send_workload()

    return asyncio.run(main())


def send(
    workload: Workload,
    target: Target,
    manner: Manner,
    labels: Labels,
    *,
    writer: RecordWriter | None = None,
    limit_s: float | None = None,
) -> LoadRun:
    """Send ``workload`` to its end or for ``limit_s``, with a line of progress. Signals as in :func:`drive`."""
    progress = Progress(workload.request_count, f"{labels.setting} {labels.workload}".strip())
    return drive(
        lambda: Driver(workload, target, manner, writer=writer, progress=progress, labels=labels, limit_s=limit_s)
    )


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Collect garbage rarely: a full collection over thousands of sessions stops the client for tens of
    milliseconds."""
    thresholds, is_put_aside = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    if not is_put_aside:  # else it is another's to take back, and what is here is small
        gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not is_put_aside:
            gc.unfreeze()


@contextmanager
def _stopped_by_signals(driver: Driver) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    loop = asyncio.get_running_loop()
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)}

    def give_back() -> None:
        for sign, handler in before.items():
            loop.remove_signal_handler(sign)
            signal.signal(sign, handler)

    def on_signal() -> None:
        driver.stop_early(INTERRUPTED)
        give_back()

    for sign in before:
        loop.add_signal_handler(sign, on_signal)
    try:
        yield
    finally:
        give_back()


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise ``KeyboardInterrupt`` as Ctrl-C does: servers are ended, measurements are kept."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
