"""Rows of data files, read strictly: plain or gzip, JSON lines or CSV; an error names file and line."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from memserve.errors import UserError

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
        made = [item for item in _made_of(path, enumerate(file, 1), parsed) if item is not None]
    return _not_empty(path, made)


def read_csv(path: Path, make: Callable[[Row], Made]) -> list[Made]:
    """``make`` of each row; the first line names the fields. :class:`UserError` names file and line."""
    with _opened(path) as file:
        made = list(_made_of(path, enumerate(csv.DictReader(file), 2), lambda fields: make(Row(fields))))
    return _not_empty(path, made)


def _made_of(path: Path, lines: Iterator[tuple[int, Any]], make: Callable[[Any], Made]) -> Iterator[Made]:
    at = 0
    try:
        for number, line in lines:
            at = number
            yield make(line)
    except (EOFError, OSError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is damaged after line {at}: {error}", hint="fetch the file again") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {at}: not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # BadRow, or a number with too many digits
        raise UserError(f"{path} line {at}: {error}") from error


def _opened(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _not_empty(path: Path, made: list[Made]) -> list[Made]:
    if not made:
        raise UserError(f"{path} contains no records")
    return made
