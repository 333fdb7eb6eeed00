"""Readers of data files: rows in, the records of ``workloads/records.py`` out.

Every reader takes a path, plain or ``.gz``, and raises :class:`UserError` with file and line for what it can't read.

Rows of data files, read strictly: plain or gzip, JSON lines or CSV; an error names file and line.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO, TypeVar

from memserve.base.errors import UserError
from memserve.base.units import ceil_div
from memserve_lab.workloads.records import (
    Call,
    CallLog,
    Client,
    Conversation,
    Document,
    Episode,
    LengthLog,
    Lengths,
    Message,
    Quantiles,
    Question,
    Span,
    Step,
    Window,
)
from memserve_lab.workloads.tokens import blocks_from_ids

Made = TypeVar("Made")
COUNT_MAX = 1 << 31
NUMBER_MAX = 1e15  # no valid time or length comes near; also excludes infinity and NaN


class BadRow(ValueError):
    """A malformed row; becomes a :class:`UserError` with file and line."""


class Row:
    """A record, with access to fields by name and kind. A field that is missing or of another kind: :class:`BadRow`."""

    def __init__(self, fields: object) -> None:
        if not isinstance(fields, dict):
            raise BadRow(f"an object was expected, not {_short(fields)}")
        self._fields: dict[str, Any] = fields

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._fields.get(name) is not None

    def keys(self) -> str:
        """The field names, for messages."""
        return ", ".join(self._fields) or "none"

    def text(self, name: str, default: str | None = None) -> str:
        """A string; if it is missing: ``default``, if given."""
        value = self._need(name) if default is None or name in self else default
        if not isinstance(value, str):
            raise BadRow(f"'{name}' should be text, not {_short(value)}")
        if not _is_whole_text(value):
            raise BadRow(f"'{name}' contains half a character (a lone surrogate)")
        return value

    def name(self, field: str, default: str) -> str:
        """An identifier: text, or a whole number written out."""
        value = self._fields.get(field)
        return default if value is None else str(value)

    def count(self, name: str) -> int:
        """A whole number, 0 or more."""
        value = self._need(name)
        value = int(value) if isinstance(value, str) and value.isdecimal() else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < COUNT_MAX:
            raise BadRow(f"'{name}' should be a whole number of at least 0, not {_short(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; if it is missing: ``default``, if given."""
        value = self._need(name) if default is None or name in self else default
        if not _is_number(value):
            raise BadRow(f"'{name}' should be a number, not {_short(value)}")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self._need(name)
        if not isinstance(value, list):
            raise BadRow(f"'{name}' should be a list, not {_short(value)}")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers, at least one."""
        values = self.items(name)
        if not values or not all(_is_number(value) for value in values):
            raise BadRow(f"'{name}' should be numbers, not {_short(values)}")
        return tuple(map(float, values))

    def rows(self, name: str) -> list[Row]:
        """A list of objects."""
        return [Row(item) for item in self.items(name)]

    def _need(self, name: str) -> Any:
        if name not in self:
            raise BadRow(f"'{name}' is missing (there: {self.keys()})")
        return self._fields[name]


def _is_whole_text(text: str) -> bool:
    """Whether ``text`` can be sent: JSON may escape what UTF-8 cannot encode."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < NUMBER_MAX


def _short(value: object) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def read_json_lines(path: Path, make: Callable[[Row], Made]) -> list[Made]:
    """``make`` of each line's object; empty lines are skipped. :class:`UserError` names file and line."""

    def parsed(line: str) -> Made | None:
        return make(Row(json.loads(line))) if line.strip() else None

    with _opened(path) as file:
        items = [item for item in _made_of(path, enumerate(file, 1), parsed) if item is not None]
    return _not_empty(path, items)


def read_csv(path: Path, make: Callable[[Row], Made]) -> list[Made]:
    """``make`` of each row; the first line names the fields. :class:`UserError` names file and line."""
    with _opened(path) as file:
        items = list(_made_of(path, enumerate(csv.DictReader(file), 2), lambda fields: make(Row(fields))))
    return _not_empty(path, items)


def _made_of(path: Path, lines: Iterator[tuple[int, Any]], make: Callable[[Any], Made]) -> Iterator[Made]:
    offset = 0
    try:
        for number, line in lines:
            offset = number
            yield make(line)
    except (EOFError, OSError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is damaged after line {offset}: {error}", hint="fetch the file again") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {offset}: not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # BadRow, or a number with too many digits
        raise UserError(f"{path} line {offset}: {error}") from error


def _opened(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _not_empty(path: Path, items: list[Made]) -> list[Made]:
    if not items:
        raise UserError(f"{path} contains no records")
    return items


MOONCAKE_BLOCK_TOKENS = 512
AGENTIC_BLOCK_TOKENS = 64
ROLES = {"human": "user", "gpt": "assistant", "tool": "user", "function": "user", "ai": "assistant", "bot": "assistant"}
"""Other names of OpenAI's roles. A tool's result becomes a user message: recordings do not contain its call."""


def read_conversations(path: Path) -> list[Conversation]:
    """Chats, in any of these forms, one a line:

    ``{"id", "messages": [{role, content}], "contexts"?}``, where contexts are passages behind the last question;
    ``{"id", "conversations": [{from, value}]}`` (ShareGPT); ``{"id", "turns": [text]}`` (questions only);
    ``{"id", "transcript"}`` (``role:`` at the start of lines); ``{"id", "nodes": [{i, parent, role, content}]}`` (a
    tree: one conversation from the root to each leaf).
    """
    return [conversation for conversations in read_json_lines(path, _conversations) for conversation in conversations]


def _conversations(row: Row) -> list[Conversation]:
    name = row.name("id", "chat")
    if "nodes" in row:
        return _tree_paths(row, name)
    if "turns" in row:
        return [Conversation(name, tuple(Message("user", _as_text(turn)) for turn in row.items("turns")))]
    if "transcript" in row:
        return [Conversation(name, tuple(_transcript(row.text("transcript"))))]
    if "conversations" in row:
        words = [_message(item.text("from"), item.text("value", "")) for item in row.rows("conversations")]
    else:
        words = [_message(item.text("role"), item.text("content", "")) for item in row.rows("messages")]
    messages = [message for message in words if message.content]  # a bare tool call has no text
    if row.items("contexts") if "contexts" in row else []:
        messages = _with_passages(messages, row.items("contexts"))
    return [Conversation(name, tuple(messages), group=row.name("group", ""))]


def _message(role: str, content: str) -> Message:
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant"):
        raise BadRow(f"unknown role '{role}': use system, user, assistant or tool")
    return Message(role, content)


def _as_text(value: object) -> str:
    if not isinstance(value, str):
        raise BadRow("text was expected in a list of texts")
    return value


def _with_passages(messages: list[Message], passages: Iterable[object]) -> list[Message]:
    """``messages`` with retrieved passages in front of the last question."""
    last = max((n for n, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None:
        return messages
    text = "\n\n".join(_as_text(passage).strip() for passage in passages)
    question = replace(messages[last], content=f"Passages:\n{text}\n\n{messages[last].content}")
    return [*messages[:last], question, *messages[last + 1 :]]


def _tree_paths(row: Row, name: str) -> list[Conversation]:
    """One conversation from the root to each leaf; a node's parent comes before it, a root's is -1."""
    paths: dict[int, tuple[Message, ...]] = {}
    inner = set()
    for node in row.rows("nodes"):
        parent = int(node.number("parent"))
        if parent >= 0 and parent not in paths:
            raise BadRow(f"node {node.name('i', '?')} comes before its parent {parent}")
        inner.add(parent)
        before = paths[parent] if parent >= 0 else ()
        paths[node.count("i")] = (*before, _message(node.text("role"), node.text("content")))
    return [Conversation(f"{name}/{leaf}", path, group=name) for leaf, path in paths.items() if leaf not in inner]


def _transcript(text: str) -> list[Message]:
    """Plain text with ``role:`` at the start of a line."""
    parts = re.split(r"^(system|user|assistant|tool): ", text, flags=re.MULTILINE)
    messages = [_message(role, words.strip()) for role, words in zip(parts[1::2], parts[2::2], strict=True)]
    return [message for message in messages if message.content not in ("", "None")]


def read_documents(path: Path) -> list[Document]:
    """``{"id", "document", "questions": [{question, answer}]}``, or worked examples ``{"task", "prompt", "questions":
    [{input, target}]}``."""
    return read_json_lines(path, _document)


def _document(row: Row) -> Document:
    if "document" in row:
        questions = [Question(item.text("question"), item.text("answer", "")) for item in row.rows("questions")]
        return Document(row.name("id", "document"), row.text("document"), tuple(questions))
    questions = [Question(item.text("input"), item.text("target", "")) for item in row.rows("questions")]
    return Document(row.name("task", "examples"), row.text("prompt"), tuple(questions))


def read_questions(path: Path) -> list[str]:
    """``{"question"}`` or ``{"claim"}`` of each line."""
    return read_json_lines(path, lambda row: row.text("claim" if "claim" in row else "question"))


def read_examples(path: Path, name: str) -> str:
    """The prompt called ``name`` of ``{"task", "name", "prompt"}`` lines."""
    prompts = dict(read_json_lines(path, lambda row: (row.text("name"), row.text("prompt"))))
    if name not in prompts:
        raise UserError(f"{path} holds no prompt '{name}'", hint=f"it holds {', '.join(prompts)}")
    return prompts[name]


def read_episodes(path: Path) -> list[Episode]:
    """``{"id", "question", "steps": [{thought, action, observation}]}``."""
    return read_json_lines(path, _episode)


def _episode(row: Row) -> Episode:
    steps = [Step(s.text("thought", ""), s.text("action", ""), s.text("observation", "")) for s in row.rows("steps")]
    return Episode(row.name("id", "episode"), row.text("question"), tuple(steps))


def read_call_logs(path: Path) -> list[CallLog]:
    """``{"id", "calls": [{base, keep, append, output}]}``: each prompt is ``keep`` characters of call ``base``'s prompt
    (none where ``base`` is negative) and ``append``."""
    return read_json_lines(path, _call_log)


def _call_log(row: Row) -> CallLog:
    prompts: list[str] = []
    calls = []
    for call in row.rows("calls"):
        base = int(call.number("base"))
        if base >= len(prompts):
            raise BadRow(f"a call's base must be an earlier call, not {base}")
        prompts.append((prompts[base][: call.count("keep")] if base >= 0 else "") + call.text("append"))
        calls.append(Call(prompts[-1], call.text("output", "")))
    return CallLog(row.name("id", "calls"), tuple(calls))


def read_mooncake(path: Path) -> list[Lengths]:
    """``{"timestamp" (ms), "input_length", "output_length", "hash_ids"}``, one id a block of 512 tokens."""
    return read_json_lines(path, mooncake_lengths)


def mooncake_lengths(row: Row) -> Lengths:
    """One row of a Mooncake trace."""
    ids, tokens = row.items("hash_ids"), row.count("input_length")
    if not all(isinstance(block, int) and 0 <= block < 1 << 48 for block in ids):
        raise BadRow("'hash_ids' should be whole numbers of at least 0 and below 2^48")
    if len(ids) != ceil_div(tokens, MOONCAKE_BLOCK_TOKENS):
        raise BadRow(f"{tokens} tokens are not {len(ids)} blocks of {MOONCAKE_BLOCK_TOKENS}")
    blocks = blocks_from_ids(ids, tokens=tokens, block_tokens=MOONCAKE_BLOCK_TOKENS)
    return Lengths(row.number("timestamp") / 1000, tokens, row.count("output_length"), blocks.spans)


def read_azure(path: Path) -> list[Lengths]:
    """CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` (Azure LLM inference trace 2023)."""
    return read_csv(path, _azure_lengths)


def _azure_lengths(row: Row) -> Lengths:
    stamp = row.text("TIMESTAMP")
    try:  # seven decimals: one more than fromisoformat takes in every version
        at_s = datetime.fromisoformat(f"{stamp[:26]}+00:00").timestamp()
    except ValueError as error:
        raise BadRow(f"'TIMESTAMP' should be a time, not {stamp!r}") from error
    return Lengths(at_s, row.count("ContextTokens"), row.count("GeneratedTokens"))


def read_agentic(path: Path) -> list[LengthLog]:
    """``{"id", "block_size", "requests": [{in, out, hash_ranges, think_time, t}]}`` with sub-agents among the requests.

    Ranges name full blocks of 64 tokens; tokens behind them belong to this request alone.
    """
    return [log for logs in read_json_lines(path, _agentic_logs) for log in logs]


def _agentic_logs(row: Row) -> list[LengthLog]:
    if row.count("block_size") != AGENTIC_BLOCK_TOKENS:
        raise BadRow(f"'block_size' should be {AGENTIC_BLOCK_TOKENS}")
    name, requests = row.name("id", "session"), row.rows("requests")
    requests_kept = [request for request in requests if request.text("type", "n") != "subagent"]
    logs = [LengthLog(name, tuple(_agentic_lengths(request) for request in requests_kept))]
    for place, request in enumerate(request for request in requests if request.text("type", "n") == "subagent"):
        rows = tuple(_agentic_lengths(inner) for inner in request.rows("requests"))
        logs.append(LengthLog(f"{name}/agent-{place}", rows, parent=name))
    return [log for log in logs if log.rows]


def _agentic_lengths(row: Row) -> Lengths:
    tokens, spans = row.count("in"), []
    for pair in row.items("hash_ranges"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(end, int) for end in pair)):
            raise BadRow("'hash_ranges' should be pairs of whole numbers")
        if not 0 <= pair[0] <= pair[1] < 1 << 32:
            raise BadRow(f"{pair} is not a range of blocks")
        spans.append(Span(pair[0], (pair[1] - pair[0] + 1) * AGENTIC_BLOCK_TOKENS))
    if sum(span.tokens for span in spans) > tokens:
        spans = _within(spans, tokens)
    return Lengths(row.number("t", 0.0), tokens, row.count("out"), tuple(spans), row.number("think_time", 0.0))


def _within(spans: list[Span], tokens: int) -> list[Span]:
    """Spans cut to ``tokens``: the request names its partial last block as a whole one."""
    excess = sum(span.tokens for span in spans) - tokens
    if excess >= AGENTIC_BLOCK_TOKENS:
        raise BadRow(f"the ranges name {excess} tokens more than the request has")
    return [*spans[:-1], replace(spans[-1], tokens=spans[-1].tokens - excess)]


def read_clients(path: Path) -> list[Client]:
    """``{"client", "windows": [[t, rate, cv, family, a, b]], "lengths": [{t, input_q, output_q}]}`` (ServeGen)."""
    return read_json_lines(path, _client)


def _client(row: Row) -> Client:
    windows = [_window(window) for window in row.items("windows")]
    lengths = [
        Quantiles(item.number("t"), item.numbers("input_q"), item.numbers("output_q")) for item in row.rows("lengths")
    ]
    if not windows or not lengths or any(a.start_s >= b.start_s for a, b in pairwise(windows)):
        raise BadRow("'windows' in order of time and 'lengths' were expected")
    return Client(row.name("client", "client"), tuple(windows), tuple(lengths))


def _window(window: object) -> Window:
    names = ("t", "rate", "cv", "family", "a", "b")
    if not (isinstance(window, list) and len(window) == len(names)):
        raise BadRow(f"a window should be [{', '.join(names)}]")
    row = Row(dict(zip(names, window, strict=True)))
    if "family" not in row or row.number("rate") <= 0:
        return Window(row.number("t"), 0.0, "Gamma", 1.0)  # no request in this window
    family, shape = row.text("family"), row.number("a")
    if family not in ("Gamma", "Weibull"):
        raise BadRow(f"unknown family of gaps '{family}': use Gamma or Weibull")
    if shape <= 0:
        raise BadRow(f"a {family} distribution cannot have shape {shape}")
    return Window(row.number("t"), row.number("rate"), family, shape)
