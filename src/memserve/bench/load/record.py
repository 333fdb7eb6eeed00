"""One record per request, and the file to which they are written during the run.

All times are nanoseconds since the run began, on one monotonic clock. **Latency counts from** ``scheduled_ns``, the
moment at which the workload wanted the request to be sent: a client that falls behind cannot hide a slow server
(coordinated omission). ``sent_ns - scheduled_ns`` is the client's own lateness.
"""

from __future__ import annotations

import enum
import gzip
import zlib
from pathlib import Path

import msgspec

from memserve.errors import UserError

FLUSH_BYTES = 1 << 15
COMPRESSION = 1  # fast, because it runs between requests


class Outcome(enum.StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"  # the server said no, with an HTTP status or an error inside the stream
    BROKEN = "broken"  # no connection, or it ended too early
    TIMEOUT = "timeout"  # the client gave up
    STOPPED = "stopped"  # the run was ended while the request was under way


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What happened to one request."""

    session: str
    turn: int
    group: str = ""
    setting: str = ""
    workload: str = ""
    seed: int = 0
    scheduled_ns: int
    sent_ns: int | None = None
    first_ns: int | None = None
    """The first chunk with text arrived."""
    token_ns: list[int] = []
    """Arrival of every chunk with text: one a token on most servers, several tokens when they came together."""
    end_ns: int | None = None
    output_tokens: int = 0
    """The server's count; the number of chunks if it gives none."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    fetched_tokens: int = 0
    """Cached tokens that came from another instance, if the server says so."""
    instance: str = ""
    """The instances that computed the answer, if the server says so: ``p1 to d1``."""
    http_status: int | None = None
    outcome: Outcome = Outcome.STOPPED
    error: str = ""

    @property
    def ok(self) -> bool:
        """The request was answered to its end."""
        return self.outcome is Outcome.OK


class RecordWriter:
    """``records.jsonl.gz``. Flushed records can be read even when the process is killed."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}", hint="name another folder with --out") from None
        self._deflate = zlib.compressobj(COMPRESSION, wbits=31)  # 31: gzip framing
        self._encoder = msgspec.json.Encoder()
        self._waiting = bytearray()

    def write(self, record: RequestRecord) -> None:
        """Append one record."""
        self._waiting += self._encoder.encode(record) + b"\n"
        if len(self._waiting) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pass all records to the operating system, in a readable form."""
        self._file.write(self._deflate.compress(bytes(self._waiting)) + self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()
        self._waiting.clear()

    def close(self) -> None:
        """Close the file."""
        self.flush()
        self._file.write(self._deflate.flush())
        self._file.close()


def read_records(path: Path) -> list[RequestRecord]:
    """The records of a file. If its writer was killed: the whole lines.

    Raises :class:`UserError` for a file that holds something else.
    """
    decoder = msgspec.json.Decoder(RequestRecord)
    records: list[RequestRecord] = []
    try:
        for line in _whole_lines(path):
            records.append(decoder.decode(line))
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path}, line {len(records) + 1}: {error}", hint="records.jsonl.gz holds one request a line"
        ) from None
    except (OSError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}", hint="it is written by memserve bench") from None
    return records


def _whole_lines(path: Path) -> list[bytes]:
    data = bytearray()
    with gzip.open(path, "rb") as file:
        try:
            while piece := file.read1(1 << 20):
                data += piece
        except EOFError:  # the writer was killed: keep what it had flushed
            pass
    return bytes(data).split(b"\n")[:-1]
