"""Lines of what runs for long, and bars for what takes longer than a moment: these on stderr, where that is a terminal,
and gone when they are done.

Lines of ``memserve doctor``: what was looked at, how bad it is, and what to do.
"""

from __future__ import annotations

import enum
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer

SHOWN_AFTER_S = 1.0
"""What is done before that shows no bar."""
_LOOKS_PER_S = 4
_is_shown = False  # a part of what a bar is shown for shows none of its own


def print_lines(*lines: str, result: bool = False) -> None:
    """Lines for people on stderr; on stdout if they are a ``result``. A process that serves goes on without: the disk
    of its log may be full, and a pipe's reader gone."""
    for line in lines:
        try:
            typer.echo(line, err=not result)
        except OSError:
            nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # what is left would be tried again at the end
            setattr(sys, "stdout" if result else "stderr", nowhere)


@contextmanager
def progress_bar(
    title: str, total: float | None = None, done_count: Callable[[], float] | None = None
) -> Iterator[None]:
    """Show while the block runs: ``title``, for how long, and how much of ``total`` is done (``done_count()``).

    ``total`` without ``done_count``: seconds that it will take. Neither: how much there is to do is not known.
    ``done_count`` is called from another thread. What the block writes to stderr stands above the bar; stdout is not
    touched.
    """
    global _is_shown
    if _is_shown or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table

    begun_s = time.monotonic()

    class Late(Progress):
        def get_renderables(self) -> Iterator[Table]:
            passed_s = time.monotonic() - begun_s
            if passed_s < SHOWN_AFTER_S:
                return
            if total is not None:
                for task in self.tasks:
                    task.completed = min(total, passed_s if done_count is None else done_count())
            yield self.make_tasks_table(self.tasks)

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    bars = Late(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, refresh_per_second=_LOOKS_PER_S
    )
    bars.add_task(title, total=total)
    _is_shown = True
    try:
        with bars:
            yield
    finally:
        _is_shown = False


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
