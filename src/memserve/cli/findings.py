"""Lines of ``memserve doctor``: what was looked at, how bad it is, and what to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import typer


class Status(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"  # works, but slower or with less
    FAIL = "fail"  # memserve cannot serve


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    detail: str
    hint: str | None = None


_MARKS = {Status.OK: ("ok  ", "green"), Status.WARN: ("warn", "yellow"), Status.FAIL: ("FAIL", "red")}


def print_finding(finding: Finding) -> None:
    """One line, and a second one with what to do."""
    mark, color = _MARKS[finding.status]
    typer.echo(f"{typer.style(mark, fg=color)}  {finding.name:<18} {finding.detail}")
    if finding.hint and finding.status is not Status.OK:
        typer.echo(f"      hint: {finding.hint}")
