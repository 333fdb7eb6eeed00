"""The request body of each turn of a session: the history with this server's answers. And the meter that
counts tokens with the served model's tokenizer.

One record per request, and the file to which they are written during the run.

All times are nanoseconds since the run began, on one monotonic clock. **Latency counts from** ``scheduled_ns``, the
moment at which the workload wanted the request to be sent: a client that falls behind cannot hide a slow server
(coordinated omission). ``sent_ns - scheduled_ns`` is the client's own lateness.
"""

from __future__ import annotations

import enum
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memserve.base.errors import UserError, check
from memserve_lab.workloads.records import Blocks, Chat, History, Session, Text, Turn
from memserve_lab.workloads.tokens import TokenizerMeter, tokens_of

CHAT_PATH, COMPLETION_PATH = "chat/completions", "completions"
VOCAB_SIZE_DEFAULT = 32_000


@dataclass(frozen=True, slots=True)
class Manner:
    """Options of all request bodies of a run."""

    model: str
    vocab_size: int = VOCAB_SIZE_DEFAULT
    """Prompts that are known only by their length use ids below it."""
    ignore_eos: bool = False
    """Every answer runs to its full length, so that all settings do equal work."""
    name_sessions: bool = True
    """Send ``prompt_cache_key``, OpenAI's name for requests that share a prefix."""
    salt: str = ""
    """Sent as ``cache_salt``, if not empty: requests with other salts share no cache with these (memserve, vLLM and
    SGLang know the field), and no session by name. Letters, digits and dashes: vLLM accepts no others."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every body."""


class Dialogue:
    """One session with the answers of this server."""

    def __init__(self, session: Session, manner: Manner) -> None:
        self._session, self._manner = session, manner
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def request_of(self, number: int) -> tuple[str, dict[str, Any]]:
        """Path and body of turn ``number``; turns are asked for in order, each once."""
        turn, manner = self._session.turns[number], self._manner
        path, fields = self._body_of(turn)
        body: dict[str, Any] = {"model": manner.model, **fields, "max_tokens": turn.output_tokens_max}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if turn.stop:
            body["stop"] = list(turn.stop)
        if manner.ignore_eos or isinstance(turn.says, Blocks):
            body["ignore_eos"] = True
        if manner.name_sessions:
            body["prompt_cache_key"] = f"{manner.salt}{self._session.session_id}"
        if manner.salt:
            body["cache_salt"] = manner.salt
        return path, body | manner.extra

    def _body_of(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        closed = self._session.history is History.CLOSED
        match turn.says:
            case Chat(messages):
                chat_messages = [{"role": message.role, "content": message.content} for message in messages]
                self._messages = [*self._messages, *chat_messages] if closed else chat_messages
                return CHAT_PATH, {"messages": self._messages}
            case Text(text):
                self._text = self._text + text if closed else text
                return COMPLETION_PATH, {"prompt": self._text}
            case Blocks() as blocks:
                check(not closed or len(self._session.turns) == 1, "prompts known only by length are given whole")
                return COMPLETION_PATH, {"prompt": tokens_of(blocks, vocab_size=self._manner.vocab_size).tolist()}

    def add_answer(self, text: str) -> None:
        """Remember the answer to the last request."""
        self._messages = [*self._messages, {"role": "assistant", "content": text}]
        self._text += text


TOKENIZER_FILE = "tokenizer.json"


def weighing(model: str | None) -> tuple[TokenizerMeter | None, int]:
    """The meter of ``model`` and the size of its vocabulary. No model: no meter, and the default size.

    ``model``: a folder, a .gguf file, a hub id or the bundled model's name. Loads the tokenizer, not the weights.
    Raises :class:`UserError` if there is none.
    """
    if model is None:
        return None, VOCAB_SIZE_DEFAULT
    from memserve.model.loading.sources import resolve_source

    folder = resolve_source(model, "auto", keep_file=True)
    file = folder.path / TOKENIZER_FILE
    if file.is_file():  # counts as transformers does, without its import of seconds
        return _weighing_by(file)
    from memserve.model.loading.loader import load_tokenizer

    tokenizer = load_tokenizer(folder)

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    return TokenizerMeter(encode, decode), len(tokenizer)


def _weighing_by(file: Path) -> tuple[TokenizerMeter, int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return TokenizerMeter(encode, decode), tokenizer.get_vocab_size()


def model_meter(model: str) -> TokenizerMeter:
    """A meter that counts tokens as ``model`` does. Raises as :func:`weighing` does."""
    meter, _ = weighing(model)
    assert meter is not None
    return meter


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

    def write_record(self, record: RequestRecord) -> None:
        """Append one record."""
        self._waiting += self._encoder.encode(record) + b"\n"
        if len(self._waiting) >= FLUSH_BYTES:
            self.flush_records()

    def flush_records(self) -> None:
        """Pass all records to the operating system, in a readable form."""
        self._file.write(self._deflate.compress(bytes(self._waiting)) + self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()
        self._waiting.clear()

    def close(self) -> None:
        """Close the file."""
        self.flush_records()
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
