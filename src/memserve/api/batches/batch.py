"""A batch: what was asked for, where it stands, and the lines of its input in the order in which they are answered."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memserve.api.http.errors import ApiError, bad_request
from memserve.api.openai.request.schema import parse_body
from memserve.base.state_table import Transitions

LINES_MAX = 50_000
"""Requests of one batch, as OpenAI has it. What is remembered of each while a batch runs: 150 bytes."""
ERRORS_MAX = 100
"""Of an input that is refused; no more lines are read then."""
CUSTOM_ID_CHARS_MAX = 512
_LINE_EXTRA_BYTES = 4096
"""A line is as much longer than the body in it, at most."""
_PREFIX_BYTES = tuple(64 << doubling for doubling in range(12))
"""Requests that have these many bytes of their texts in common stand together."""
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_WINDOW_S = {"m": 60, "h": 3600, "d": 86_400}
WINDOW_S_MAX = 30 * 86_400

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""What the requests of a batch may ask."""
_TEXT_FIELDS = ("model", "cache_salt", "document", "tools", "instructions", "messages", "prompt", "input")
"""Of a body: what its KV follows from, in about the order in which it stands in a prompt."""


class BatchStatus(Enum):
    """Where a batch stands, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class BatchCause(Enum):
    """What moves a batch on."""

    INPUT_ACCEPTED = 1
    INPUT_REFUSED = 2
    ALL_ANSWERED = 3
    CANCEL_REQUESTED = 4
    WINDOW_PASSED = 5
    FILES_KEPT = 6
    DISK_FAILED = 7


BATCH_MOVES = Transitions(
    "Batch",
    BatchStatus.VALIDATING,
    {
        (BatchStatus.VALIDATING, BatchCause.INPUT_ACCEPTED): BatchStatus.IN_PROGRESS,
        (BatchStatus.VALIDATING, BatchCause.INPUT_REFUSED): BatchStatus.FAILED,
        (BatchStatus.VALIDATING, BatchCause.CANCEL_REQUESTED): BatchStatus.CANCELLING,
        (BatchStatus.VALIDATING, BatchCause.DISK_FAILED): BatchStatus.FAILED,
        (BatchStatus.IN_PROGRESS, BatchCause.ALL_ANSWERED): BatchStatus.FINALIZING,
        (BatchStatus.IN_PROGRESS, BatchCause.CANCEL_REQUESTED): BatchStatus.CANCELLING,
        (BatchStatus.IN_PROGRESS, BatchCause.WINDOW_PASSED): BatchStatus.EXPIRED,
        (BatchStatus.IN_PROGRESS, BatchCause.DISK_FAILED): BatchStatus.FAILED,
        (BatchStatus.FINALIZING, BatchCause.FILES_KEPT): BatchStatus.COMPLETED,
        (BatchStatus.FINALIZING, BatchCause.DISK_FAILED): BatchStatus.FAILED,
        (BatchStatus.CANCELLING, BatchCause.FILES_KEPT): BatchStatus.CANCELLED,
        (BatchStatus.CANCELLING, BatchCause.DISK_FAILED): BatchStatus.FAILED,
    },
)


class InputError(msgspec.Struct, frozen=True):
    """What is wrong with an input, in OpenAI's form."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class RequestCounts(msgspec.Struct, frozen=True):
    """How many requests a batch has, and how many have which end."""

    total: int = 0
    completed: int = 0
    failed: int = 0


Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/batches``."""

    input_file_id: str
    """A file that was uploaded with the purpose `batch`: a request a line."""
    endpoint: str
    """What each of them asks: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` or `/v1/embeddings`."""
    completion_window: str
    """How long it may take: `24h`, or another number of minutes, hours or days (`90m`, `7d`). Requests without an
    answer by then are expired."""
    metadata: Annotated[Metadata, Meta(max_length=16)] | None = None
    """Up to 16 texts by name, told with the batch."""
    output_expires_after: dict[str, Any] | None = None
    """`{"anchor": "created_at", "seconds": N}`: when the files that it writes are deleted. Default: never."""


class RequestBatch(msgspec.Struct, frozen=True):
    """A batch as it is on disk."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_s: int
    expires_s: int
    output_file_id: str
    """Reserved when the batch is created; there is a file of this name where there is a line in it."""
    error_file_id: str
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    times_s: dict[str, int] = {}
    """Status -> since when."""
    counts: RequestCounts = RequestCounts()
    """As they were when the status changed."""
    kept_file_ids: tuple[str, ...] = ()
    errors: tuple[InputError, ...] = ()

    @property
    def is_ended(self) -> bool:
        """Nothing more happens to it."""
        return BATCH_MOVES.is_final(self.status)

    def moved(self, cause: BatchCause, now_s: float, **changes: Any) -> RequestBatch:
        """After ``cause``, with ``changes``. Raises :class:`InvariantError` for a cause that its status has no move
        for."""
        status = BATCH_MOVES.next_phase(self.status, cause)
        times_s = self.times_s | {status.value: int(now_s)}
        return msgspec.structs.replace(self, status=status, times_s=times_s, **changes)

    def card(self, counts: RequestCounts | None = None) -> dict[str, Any]:
        """As OpenAI's clients read it. ``counts``: as they are now."""
        times_s = {f"{status.value}_at": self.times_s.get(status.value) for status in list(BatchStatus)[1:]}
        errors = {"object": "list", "data": list(self.errors)} if self.errors else None
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            # a name is reserved for each file, and clients are told of those that have a line
            "output_file_id": self.output_file_id if self.output_file_id in self.kept_file_ids else None,
            "error_file_id": self.error_file_id if self.error_file_id in self.kept_file_ids else None,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **times_s,
            "request_counts": counts or self.counts,
            "metadata": self.metadata,
        }


def window_s(text: str) -> int:
    """Seconds of a ``completion_window``. Raises :class:`ApiError` 400."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _WINDOW_S[match[2]] if match else 0
    if not 0 < seconds <= WINDOW_S_MAX:
        message = "completion_window is 24h, or another number of minutes, hours or days up to 30d, such as 90m or 7d"
        raise bad_request(message, "completion_window", "invalid_value")
    return seconds


class InputLine(NamedTuple):
    """One request of a batch: its place in the input, and what it has in common with others."""

    shared: bytes
    """Digests of the beginnings of its text: lines that sort next to each other have as much as possible in common."""
    number: int
    offset: int
    nbytes: int


class RequestLine(msgspec.Struct):
    """What a line of the input says; other fields are ignored, as OpenAI does."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class InputPlan:
    """An input that was read to its end, or until there were too many errors."""

    lines: list[InputLine] = field(default_factory=list)
    """In the order in which they are answered."""
    errors: list[InputError] = field(default_factory=list)
    _custom_ids: set[bytes] = field(default_factory=set)

    def add_line(self, line: bytes, number: int, offset: int, endpoint: str) -> None:
        """Check one line, and take it or say what is wrong."""
        try:
            request = parse_body(line, RequestLine)
        except ApiError as error:
            self._refuse_line(number, "invalid_json_line", error.message, error.param)
            return
        # digests: the ids themselves may be as large as the input
        name = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if error_text := _why_refused(request, endpoint):
            self._refuse_line(number, *error_text)
        elif name in self._custom_ids:
            self._refuse_line(number, "duplicate_custom_id", "The custom_id is that of an earlier line.", "custom_id")
        else:
            self._custom_ids.add(name)
            self.lines.append(InputLine(_shared_prefixes(request.body), number, offset, len(line)))

    def finish_reading(self) -> None:
        """All lines are there: put them into the order in which they are answered."""
        self.lines.sort()
        # needed while lines are read alone, and a plan lives as long as its batch
        self._custom_ids.clear()

    def refuse_input(self, code: str, message: str) -> None:
        """What is wrong with the input as a whole."""
        self.errors.append(InputError(code, message))

    def _refuse_line(self, number: int, code: str, message: str, param: str | None) -> None:
        self.errors.append(InputError(code, message, param, number))


def _why_refused(request: RequestLine, endpoint: str) -> tuple[str, str, str] | None:
    """Code, message and parameter."""
    if not 0 < len(request.custom_id) <= CUSTOM_ID_CHARS_MAX:
        return "invalid_custom_id", f"A custom_id has 1 to {CUSTOM_ID_CHARS_MAX} characters.", "custom_id"
    if request.method != "POST":
        return "invalid_method", "The method of each request must be POST.", "method"
    if request.url != endpoint:
        return "mismatched_url", f"The url of each request must be the batch's endpoint, {endpoint}.", "url"
    for name in ("stream", "background"):
        if request.body.get(name):
            return "invalid_request", f"{name} is not for batches: answers are read when they are whole.", name
    return None


def _shared_prefixes(body: dict[str, Any]) -> bytes:
    text = b"".join(msgspec.json.encode(body[name]) for name in _TEXT_FIELDS if name in body)
    digests = (hashlib.blake2b(text[:size], digest_size=4).digest() for size in _PREFIX_BYTES if len(text) >= size)
    return b"".join(digests)


def _lines_of(path: Path, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line; a longer one is cut behind ``line_bytes_max`` + 1 bytes."""
    with path.open("rb") as file:
        while True:
            offset = file.tell()
            line = file.readline(line_bytes_max + 1)
            if not line:
                return
            yield offset, line
            # what is left of a line that is too long is passed over, a piece at a time
            while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                pass


def read_plan(path: Path, endpoint: str, body_bytes_max: int) -> InputPlan:
    """Read an input. Never more than a line of it is in memory. Raises :class:`OSError`."""
    plan, line_bytes_max, number = InputPlan(), body_bytes_max + _LINE_EXTRA_BYTES, 0
    for number, (offset, line) in enumerate(_lines_of(path, line_bytes_max), 1):
        if number > LINES_MAX:
            plan.refuse_input("too_many_tasks", f"The input has more than {LINES_MAX} lines: split it.")
        elif len(line) > line_bytes_max:
            plan.refuse_input("line_too_long", f"Line {number} is longer than {line_bytes_max} bytes.")
        # an empty line is no request: many programs end a file with one
        elif line.strip():
            plan.add_line(line, number, offset, endpoint)
        if number > LINES_MAX or len(plan.errors) >= ERRORS_MAX:
            break
    if not plan.lines and not plan.errors:
        plan.refuse_input("empty_file", "The input has no requests.")
    plan.finish_reading()
    return plan
