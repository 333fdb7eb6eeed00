"""Runs batches: each request goes through the API's own application, as if a client had sent it, behind all others.

A tenant's batches run one after the other; :data:`RUNNING_MAX` tenants' at once, one request of each in turn, as far
as the :class:`BatchPace` allows. What a batch has answered is on disk (``answers.py``), so a new server goes on where
the last one ended, however it ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from memserve.api.batches.answers import SYNC_S, AnswerFiles, encode_answer, encode_missed, line_id
from memserve.api.batches.batch import (
    BatchCause,
    BatchStatus,
    InputError,
    InputLine,
    InputPlan,
    RequestBatch,
    RequestCounts,
    RequestLine,
    read_plan,
)
from memserve.api.batches.files import FileStore, StoredFile, load_records, save_record
from memserve.api.batches.pace import BatchPace
from memserve.api.http.errors import ApiError, echo
from memserve.api.http.limits import TENANT_KEY
from memserve.api.http.request import REQUEST_ID_KEY, new_id
from memserve.base.types import DEFERRABLE_PRIORITY

log = logging.getLogger(__name__)

RUNNING_MAX = 8
"""Batches that run at once; of each, the places of its lines are in memory."""
KEPT_MAX = 1000
"""Batches of one tenant that have ended and are remembered."""
OPEN_MAX = 100
"""Batches of one tenant that have not ended."""
TRIES_MAX = 5
"""How often a request is tried that fails by the server's fault."""
_PAUSE_S, _PAUSE_MAX_S = 0.25, 8.0
"""Before a refused request is tried again: at first, and at most."""
_LOOK_S = 1.0
_REFUSED = (429, 503)


@dataclass(slots=True)
class _Run:
    """A batch that has not ended."""

    batch: RequestBatch
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    stop_cause: BatchCause | None = None
    """Why it answers no more requests; None with :attr:`stopped`: the server ends."""
    answers: AnswerFiles | None = None
    in_flight: set[asyncio.Task[None]] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    disk_error: str = ""

    def stop(self, cause: BatchCause | None) -> None:
        """Answer no more requests."""
        if not self.stopped.is_set():
            self.stop_cause = cause
            self.stopped.set()


class BatchRunner:
    """All batches of a server. Lives in the event loop; files are read and synced in other threads."""

    def __init__(
        self,
        folder: Path,
        files: FileStore,
        app: ASGIApp,
        count_waiting: Callable[[], int],
        body_bytes_max: int,
    ) -> None:
        """``app`` answers the requests. ``count_waiting``: requests that wait in front of instances; it may wait, and
        raise. Raises :class:`OSError` where the folder cannot be used."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._files, self._app = folder, files, app
        self._count_waiting, self._body_bytes_max = count_waiting, body_bytes_max
        self._batches = {record.batch_id: record for record in load_records(folder, RequestBatch)}
        self._runs: dict[str, _Run] = {}  # those that have not ended, oldest first
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._reading = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._is_closing = False
        files.is_needed = self.uses_file
        self.pace = BatchPace()
        self.results: Counter[str] = Counter()
        """Requests by how they ended, since the start of the server."""

    def start(self) -> None:
        """Go on with what has not ended. Called in the event loop."""
        open_batches = [batch for batch in self._batches.values() if not batch.is_ended]
        self._files.drop_remains({name for b in open_batches for name in (b.output_file_id, b.error_file_id)})
        for batch in sorted(open_batches, key=_age):
            self._open_run(batch)
        self._watch = asyncio.create_task(self._watch_load())
        self._begin_next()

    async def stop(self) -> None:
        """End what runs; a later server goes on with it."""
        self._is_closing = True
        if self._watch is not None:
            self._watch.cancel()
        runs = list(self._runs.values())
        for run in runs:
            run.stop(None)
            if run.timer is not None:
                run.timer.cancel()
        self._wake_waiters()
        await asyncio.gather(*[run.task for run in runs if run.task is not None], return_exceptions=True)

    # -- for the routes

    async def create_batch(self, batch: RequestBatch) -> RequestBatch:
        """Take in a new batch. Raises :class:`ApiError` 429 where the tenant has too many."""
        if sum(run.batch.tenant == batch.tenant for run in self._runs.values()) >= OPEN_MAX:
            message = f"{OPEN_MAX} batches of this key have not ended: wait for one of them"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")
        ended_batches = [old for old in self.list_batches(batch.tenant) if old.is_ended]
        for old in ended_batches[: max(0, len(ended_batches) - KEPT_MAX + 1)]:
            self._path_of(old).unlink(missing_ok=True)
            del self._batches[old.batch_id]
        await asyncio.to_thread(save_record, self._path_of(batch), batch)
        self._batches[batch.batch_id] = batch
        self._open_run(batch)
        self._begin_next()
        return batch

    def get_batch(self, tenant: str, batch_id: str) -> RequestBatch:
        """The tenant's batch. Raises :class:`ApiError` 404; other tenants' batches do not exist for it."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise ApiError(404, f"No such batch: {echo(batch_id)}", param="batch_id", code="batch_not_found")
        return batch

    def list_batches(self, tenant: str) -> list[RequestBatch]:
        """The tenant's batches, oldest first."""
        return sorted((batch for batch in self._batches.values() if batch.tenant == tenant), key=_age)

    def card(self, batch: RequestBatch) -> dict[str, Any]:
        """The batch as it is now."""
        return batch.card(self._counts(batch))

    async def cancel_batch(self, tenant: str, batch_id: str) -> RequestBatch:
        """Answer no more of its requests. Raises :class:`ApiError` 404, and 409 for a batch that has ended."""
        batch = self.get_batch(tenant, batch_id)
        if batch.status is BatchStatus.CANCELLING:
            return batch
        run = self._runs.get(batch_id)
        if run is None or batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            message = f"Cannot cancel a batch with status '{batch.status.value}'."
            raise ApiError(409, message, code="batch_not_cancellable")
        self._stop_run(run, BatchCause.CANCEL_REQUESTED)
        await self._move_run(run, BatchCause.CANCEL_REQUESTED)
        return run.batch

    def uses_file(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads or writes it."""
        return any(
            file_id in (run.batch.input_file_id, run.batch.output_file_id, run.batch.error_file_id)
            for run in self._runs.values()
            if not run.batch.is_ended
        )

    def count_by_status(self) -> Counter[str]:
        """Batches that are remembered."""
        return Counter(batch.status.value for batch in self._batches.values())

    def count_waiting(self) -> int:
        """Requests of open batches that have no answer and do not run."""
        counts = [self._counts(run.batch) for run in self._runs.values()]
        return max(0, sum(c.total - c.completed - c.failed for c in counts) - self.pace.in_flight)

    def note_interactive(self, queue_ns: int | None, to_first_token_ns: int) -> None:
        """A request of no batch has its first token."""
        self.pace.note_interactive(queue_ns, to_first_token_ns, time.monotonic_ns())

    def _counts(self, batch: RequestBatch) -> RequestCounts:
        run = self._runs.get(batch.batch_id)
        answers = None if run is None else run.answers
        return batch.counts if answers is None else answers.counts(batch.counts.total)

    # -- which batches run

    def _open_run(self, batch: RequestBatch) -> None:
        run = self._runs[batch.batch_id] = _Run(batch)
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            seconds = max(0.0, batch.expires_s - time.time())
            loop = asyncio.get_running_loop()
            run.timer = loop.call_later(seconds, self._stop_run, run, BatchCause.WINDOW_PASSED)
        else:  # it only has to be ended
            run.stop(None)

    def _stop_run(self, run: _Run, cause: BatchCause) -> None:
        run.stop(cause)
        self._wake_waiters()
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin batches as far as there are places; those that only have to be ended need none."""
        for run in () if self._is_closing else self._runs.values():
            if run.task is None and (run.stopped.is_set() or self._may_begin(run)):
                run.task = asyncio.create_task(self._run_batch(run))

    def _may_begin(self, run: _Run) -> bool:
        tenants = [begun_run.batch.tenant for begun_run in self._runs.values() if begun_run.task is not None]
        return len(tenants) < RUNNING_MAX and run.batch.tenant not in tenants

    async def _run_batch(self, run: _Run) -> None:
        try:
            await self._pass_statuses(run)
        except OSError as error:
            log.error("%s ends: %s", run.batch.batch_id, error)
            await self._end_broken(run, error.strerror or str(error))
        except Exception:
            log.exception("%s ends", run.batch.batch_id)
            await self._end_broken(run, "the server failed while working on it")
        finally:
            if run.answers is not None:
                run.answers.close()
            del self._runs[run.batch.batch_id]
            if run.timer is not None:
                run.timer.cancel()
            self._begin_next()

    async def _pass_statuses(self, run: _Run) -> None:
        plan = await self._read_plan(run)
        if run.batch.status is BatchStatus.VALIDATING and plan is not None:
            if plan.errors:
                await self._move_run(run, BatchCause.INPUT_REFUSED, errors=tuple(plan.errors))
                return
            await self._move_run(run, BatchCause.INPUT_ACCEPTED, counts=RequestCounts(len(plan.lines)))
        run.answers = await asyncio.to_thread(
            AnswerFiles, *(self._files.path_of(name) for name in (run.batch.output_file_id, run.batch.error_file_id))
        )
        if run.batch.status is BatchStatus.IN_PROGRESS and plan is not None:
            await self._answer_lines(run, run.answers, plan)
        await self._end_answered(run, run.answers, plan)

    async def _read_plan(self, run: _Run) -> InputPlan | None:
        """The lines of the input. None: none of them is to be answered."""
        if run.batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            return None
        path, batch = self._files.path_of(run.batch.input_file_id), run.batch
        async with self._reading:  # one at a time: it takes memory and the interpreter
            return await asyncio.to_thread(read_plan, path, batch.endpoint, self._body_bytes_max)

    # -- requests

    async def _answer_lines(self, run: _Run, answers: AnswerFiles, plan: InputPlan) -> None:
        is_over = asyncio.Event()
        syncing = asyncio.create_task(_sync_often(answers, is_over))
        try:
            for line in plan.lines:
                if answers.is_answered(line.number):
                    continue
                request = self._read_line(run.batch, line)
                body = _body_of(request)
                if not await self._take_place(run):
                    break
                task = asyncio.create_task(self._answer_line(run, answers, line.number, request, body))
                run.in_flight.add(task)
                task.add_done_callback(run.in_flight.discard)
        except BaseException:
            run.stop(BatchCause.DISK_FAILED)
            raise
        finally:
            while run.in_flight:
                await asyncio.wait(run.in_flight)
            is_over.set()
            await syncing

    async def _take_place(self, run: _Run) -> bool:
        """Wait until one more request may run. False: the batch answers no more of them."""
        while not run.stopped.is_set():
            if self.pace.has_room:
                self.pace.begin_request()
                return True
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return False

    def _wake_waiters(self) -> None:
        """Let all of them look again, in their order."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def _answer_line(
        self, run: _Run, answers: AnswerFiles, number: int, request: RequestLine, body: bytes
    ) -> None:
        """Answer one request, which has a place."""
        try:
            reply = await self._ask_until_answered(run, request.url, body)
            if reply is not None:
                name = line_id(run.batch.batch_id, number)
                line = encode_answer(name, request.custom_id, *reply)
                self._append_answer(run, answers, number, line, is_error=not 200 <= reply[0] < 300)
        except Exception as error:
            log.exception("%s: line %d", run.batch.batch_id, number)
            run.disk_error = run.disk_error or str(error)
            self._stop_run(run, BatchCause.DISK_FAILED)

    def _append_answer(self, run: _Run, answers: AnswerFiles, number: int, line: bytes, *, is_error: bool) -> None:
        if not self._files.has_room(run.batch.tenant, answers.nbytes + len(line)):
            raise OSError("the files of this key have no room left (--file-storage): delete some")
        answers.append_answer(number, line, is_error=is_error)
        self.results["failed" if is_error else "completed"] += 1

    async def _ask_until_answered(self, run: _Run, path: str, body: bytes) -> tuple[int, str, bytes] | None:
        """Status, id and body of the answer. None: the batch stopped before there was one."""
        tries, pause_s = 0, _PAUSE_S
        while True:
            answer_id, status, answer = f"req-{new_id()}", 0, b""
            try:
                status, answer = await self._ask(run, path, body, answer_id)
            finally:
                is_refused = status in _REFUSED
                self.pace.end_request(is_refused=is_refused, now_ns=time.monotonic_ns())
                self._wake_waiters()
            tries += status == 500
            if not (status == 0 or is_refused or (status == 500 and tries < TRIES_MAX)):
                return status, answer_id, answer
            if await _is_set_within(run.stopped, pause_s) or not await self._take_place(run):
                return None
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _ask(self, run: _Run, path: str, body: bytes, answer_id: str) -> tuple[int, bytes]:
        """Status and body of the application's answer. 0: it was not waited for."""
        scope: Scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", TENANT_KEY: run.batch.tenant,
            "headers": [(b"content-type", b"application/json")], REQUEST_ID_KEY: answer_id, "client": None,
        }  # fmt: skip
        pieces: list[bytes] = []
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status = 0

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await run.stopped.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(pieces)

    def _read_line(self, batch: RequestBatch, line: InputLine) -> RequestLine:
        fd = os.open(self._files.path_of(batch.input_file_id), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return msgspec.json.decode(os.pread(fd, line.nbytes, line.offset), type=RequestLine)
        finally:
            os.close(fd)

    async def _watch_load(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if any(run.in_flight for run in self._runs.values()):
                try:
                    self.pace.note_waiting(await asyncio.to_thread(self._count_waiting))
                except Exception as error:  # the engine is busy, or ends: what it refuses is told apart
                    log.debug("requests that wait are not known: %s", error)
                self._wake_waiters()

    # -- the end

    async def _end_answered(self, run: _Run, answers: AnswerFiles, plan: InputPlan | None) -> None:
        """After the last answer, or where there shall be no more."""
        status = run.batch.status
        if status is BatchStatus.IN_PROGRESS:
            if run.stop_cause is BatchCause.DISK_FAILED:
                await self._end_broken(run, run.disk_error)
                return
            if run.stop_cause is BatchCause.WINDOW_PASSED:
                await self._end_expired(run, answers, plan or InputPlan())
                return
            if run.stopped.is_set():
                return  # the server ends
            await self._move_run(run, BatchCause.ALL_ANSWERED, counts=answers.counts(run.batch.counts.total))
        if run.batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            counts = answers.counts(run.batch.counts.total)
            await self._move_run(run, BatchCause.FILES_KEPT, counts=counts, kept_file_ids=await self._keep_files(run))

    async def _end_expired(self, run: _Run, answers: AnswerFiles, plan: InputPlan) -> None:
        # tens of thousands of lines: written in the loop they would hold up every client
        self.results["expired"] += await asyncio.to_thread(self._append_missed, run.batch, answers, plan)
        counts = answers.counts(run.batch.counts.total)
        await self._move_run(run, BatchCause.WINDOW_PASSED, counts=counts, kept_file_ids=await self._keep_files(run))

    def _append_missed(self, batch: RequestBatch, answers: AnswerFiles, plan: InputPlan) -> int:
        """A line for each request without an answer; returns how many there were."""
        message = "This request could not be executed before the completion window expired."
        missed_lines = [line for line in plan.lines if not answers.is_answered(line.number)]
        for line in missed_lines:
            custom_id = self._read_line(batch, line).custom_id
            missed = encode_missed(line_id(batch.batch_id, line.number), custom_id, "batch_expired", message)
            answers.append_answer(line.number, missed, is_error=True)
        return len(missed_lines)

    async def _end_broken(self, run: _Run, why: str) -> None:
        """The disk failed: what was written before is kept."""
        if run.batch.is_ended:
            return
        try:
            file_ids = await self._keep_files(run)
            changes = {"errors": (InputError("server_error", why),), "kept_file_ids": file_ids}
            await self._move_run(run, BatchCause.DISK_FAILED, counts=self._counts(run.batch), **changes)
        except OSError as error:  # a later server tries again
            log.error("%s cannot be ended: %s", run.batch.batch_id, error)

    async def _keep_files(self, run: _Run) -> tuple[str, ...]:
        """Name the files with answers, which are whole; returns their ids."""
        if run.answers is None:
            return ()
        await asyncio.to_thread(run.answers.sync)
        batch, now_s = run.batch, int(time.time())
        expires_s = None if batch.output_expires_after_s is None else now_s + batch.output_expires_after_s
        for path, nbytes in run.answers.written:
            kind = "output" if path.name == batch.output_file_id else "error"
            filename = f"{batch.batch_id}_{kind}.jsonl"
            await self._files.adopt_file(
                StoredFile(path.name, batch.tenant, filename, "batch_output", nbytes, now_s, expires_s)
            )
        return tuple(path.name for path, _ in run.answers.written)

    async def _move_run(self, run: _Run, cause: BatchCause, **changes: Any) -> None:
        """Change the status, in memory at once, and on disk before this returns."""
        run.batch = self._batches[run.batch.batch_id] = run.batch.moved(cause, time.time(), **changes)
        async with run.saving:  # the last one wins
            await asyncio.to_thread(save_record, self._path_of(run.batch), run.batch)

    def _path_of(self, batch: RequestBatch) -> Path:
        return self._folder / f"{batch.batch_id}.json"


def _age(batch: RequestBatch) -> tuple[int, str]:
    return batch.created_s, batch.batch_id


def _body_of(request: RequestLine) -> bytes:
    """The body of a request, behind all others."""
    fields = {**request.body, "priority": DEFERRABLE_PRIORITY}
    if request.url == "/v1/responses":
        fields.setdefault("store", False)
    return msgspec.json.encode(fields)


async def _sync_often(answers: AnswerFiles, is_over: asyncio.Event) -> None:
    while not await _is_set_within(is_over, SYNC_S):
        await asyncio.to_thread(answers.sync)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
