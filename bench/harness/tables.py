"""Rows as Markdown: a column is a heading and a format string that takes a row's fields.

::

    show(rows, {"setting": "{setting}", "hits": "{hit_rate:.1%}", "TTFT": "{ttft_s:.2f} s"})

A cell whose field a row does not have, or has as None, is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

Columns = Mapping[str, str]


class Table:
    """Prints its head when it is made, and rows as they come."""

    def __init__(self, columns: Columns | Iterable[str]) -> None:
        """Without format strings a cell is the field of its column's name."""
        self._columns = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
        print(line_of(self._columns))
        print(line_of("---" for _ in self._columns), flush=True)

    def show(self, row: Any) -> None:
        """A mapping, or a dataclass."""
        fields = row if isinstance(row, Mapping) else {**dataclasses.asdict(row), **_properties(row)}
        cells = (_cell(text or name, fields, is_name=text is None) for name, text in self._columns.items())
        print(line_of(cells), flush=True)


def show(rows: Iterable[Any], columns: Columns | Iterable[str]) -> None:
    """All rows at once."""
    table = Table(columns)
    for row in rows:
        table.show(row)


def line_of(cells: Iterable[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def _cell(text: str, fields: Mapping[str, Any], *, is_name: bool) -> str:
    if is_name:
        return str(fields.get(text, ""))
    known_fields = _Known({name: value for name, value in fields.items() if value is not None})
    cell = text.format_map(known_fields)
    return "" if known_fields.misses else cell


class _Known(dict[str, Any]):
    misses = 0

    def __missing__(self, name: str) -> _Nothing:
        self.misses += 1
        return _Nothing()


class _Nothing:
    """Any format, field or item of it is nothing again."""

    def __format__(self, _: str) -> str:
        return ""

    def __getitem__(self, _: object) -> _Nothing:
        return self


def _properties(row: object) -> dict[str, Any]:
    kinds = vars(type(row)).items()
    return {name: getattr(row, name) for name, value in kinds if isinstance(value, property)}
