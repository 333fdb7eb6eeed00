"""The answers of a batch on disk: a line for each request, in the file of answers or in that of errors.

A request is answered when its line is whole. After a crash the lines that are there say which ones are; what was being
written is cut off, and that request is answered again. So there is never a second line of one request.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from memserve.api.batches.batch import RequestCounts
from memserve.base.errors import check

SYNC_S = 1.0
"""How long a line may wait until it is safe from a power failure; the process may be killed at any time."""


class _AnswerLine(msgspec.Struct):
    """What is read again of a line."""

    id: str
    custom_id: str


def line_id(batch_id: str, number: int) -> str:
    """The ``id`` of the answer to the request in line ``number`` of the input."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def encode_answer(request_id: str, custom_id: str, status: int, answer_id: str, body: bytes) -> bytes:
    """A request that was answered over HTTP, with ``status``."""
    response = {"status_code": status, "request_id": answer_id, "body": msgspec.Raw(body)}
    return _encode_line(request_id, custom_id, response, None)


def encode_missed(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A request without an answer."""
    return _encode_line(request_id, custom_id, None, {"code": code, "message": message})


def _encode_line(request_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    fields = {"id": request_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


class _LineFile:
    """A file that only grows, by whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.nbytes = 0

    def recover_numbers(self) -> list[int]:
        """The numbers of the requests with a whole line; what stands behind those is cut off."""
        numbers = []
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    answer_id = msgspec.json.decode(line, type=_AnswerLine).id
                    numbers.append(int(answer_id.rpartition("_")[2]))
                except (msgspec.MsgspecError, ValueError):
                    break  # pages of it that a power failure has lost
                self.nbytes += len(line)
        os.ftruncate(self._fd, self.nbytes)
        return numbers

    def append_line(self, line: bytes) -> None:
        """Raises :class:`OSError`; then nothing of the line is left."""
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self.nbytes)
            raise
        self.nbytes += len(line)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class AnswerFiles:
    """Both files of one batch, open for writing. Raises :class:`OSError` as files do."""

    def __init__(self, answers: Path, errors: Path) -> None:
        self._answers, self._errors = _LineFile(answers), _LineFile(errors)
        completed, failed = self._answers.recover_numbers(), self._errors.recover_numbers()
        self._answered = {*completed, *failed}
        check(len(self._answered) == len(completed) + len(failed), f"{answers.name}: a request is answered twice")
        self._completed, self._failed = len(completed), len(failed)

    def is_answered(self, number: int) -> bool:
        """Whether there is a line of this request."""
        return number in self._answered

    def append_answer(self, number: int, line: bytes, *, is_error: bool) -> None:
        """Answer a request that has no answer yet."""
        check(number not in self._answered, f"request {number} is answered already")
        (self._errors if is_error else self._answers).append_line(line)
        self._answered.add(number)
        self._completed, self._failed = self._completed + (not is_error), self._failed + is_error

    def counts(self, total: int) -> RequestCounts:
        """Of ``total`` requests."""
        return RequestCounts(total, self._completed, self._failed)

    @property
    def nbytes(self) -> int:
        """Of both files."""
        return self._answers.nbytes + self._errors.nbytes

    @property
    def written(self) -> list[tuple[Path, int]]:
        """Path and bytes of each file that has lines."""
        return [(file.path, file.nbytes) for file in (self._answers, self._errors) if file.nbytes]

    def sync(self) -> None:
        """Make all lines safe from a power failure. For a thread: it waits for the disk."""
        self._answers.sync()
        self._errors.sync()

    def close(self) -> None:
        """Close both, and delete one that is empty."""
        for file in (self._answers, self._errors):
            file.close()
            if not file.nbytes:
                file.path.unlink(missing_ok=True)
