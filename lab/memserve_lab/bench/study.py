"""One experiment: settings -> runs -> tables, plots and JSON in one folder.

::

    measure(tell)  ──▶  results  ──▶  tables()    report.md, or a terminal
                                 ├─▶  drawings    NAME.png, NAME.svg
                                 └─▶              results.json

A study implements measuring, tables and plots; this module runs it, ends it early and writes the folder.
"""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from memserve import __version__
from memserve.base.errors import UserError
from memserve_lab.bench.load.driver import INTERRUPTED, sigterm_interrupts
from memserve_lab.bench.load.prompts import RecordWriter
from memserve_lab.bench.report_writer import NO_PLOTS, Drawing, Table, draw_all, picture

RECORDS, RESULTS, REPORT = "records.jsonl.gz", "results.json", "report.md"
Tell = Callable[[str], None]
"""Takes one line of progress."""


@dataclass(slots=True, kw_only=True)
class StudyResults:
    """Fields of ``results.json`` common to all studies."""

    command: str = ""
    models: list[str] = field(default_factory=list)
    """Served models, by the servers' own names."""
    notes: list[str] = field(default_factory=list)
    partial: str | None = None
    """Why the run ended early. None: the run is complete."""
    machine: dict[str, Any] = field(default_factory=dict)
    """The machine of the run. Empty: this machine."""
    version: str = __version__

    @property
    def is_empty(self) -> bool:
        """Nothing was measured: an error then ends the command without a partial report."""
        return False


Results = TypeVar("Results", bound=StudyResults)


class Study(ABC, Generic[Results]):
    """One experiment (see the module). ``results`` grow while :meth:`fill_results` runs."""

    title: ClassVar[str]
    draws_requests: ClassVar[bool] = False
    """Measured by the load client, which draws a line of its own while it sends."""
    drawings: Mapping[str, Drawing] = MappingProxyType({})
    """File name without ending -> plot, in the report's order."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @abstractmethod
    def fill_results(self, tell: Tell) -> None:
        """Fill ``results``; they are kept when ``KeyboardInterrupt`` or :class:`UserError` ends it early."""

    @abstractmethod
    def make_tables(self) -> Iterator[Table]:
        """Sections of the report, after the plots."""

    def head_lines(self) -> Iterator[str]:
        """Further bullets of the report's head."""
        yield from ()

    def terminal_lines(self) -> Iterator[str]:
        """Lines for the terminal after a run."""
        yield from ()

    def run_study(self, tell: Tell) -> None:
        """Measure. Ctrl-C, SIGTERM, or an error after the first measurement marks the results partial.

        Raises :class:`UserError` when nothing was measured.
        """
        try:
            with sigterm_interrupts():
                self.fill_results(tell)
        except KeyboardInterrupt:
            self.results.partial = INTERRUPTED
        except UserError as error:
            if self.results.is_empty:
                raise
            self.results.partial = str(error)

    def write_report(self, folder: Path) -> None:
        """Write ``results.json``, ``report.md`` and the plots."""
        write_json(self.results, folder)
        pictures = draw_all(self.drawings, self.results, folder)
        (folder / REPORT).write_text("\n".join(self._report_lines(pictures)) + "\n", encoding="utf-8")

    def _report_lines(self, pictures: list[str] | None) -> Iterator[str]:
        results, machine = self.results, self.results.machine
        yield f"# {self.title}\n"
        if results.partial is not None:
            yield f"**Partial:** {results.partial}. The figures below were measured before that.\n"
        if results.models:
            yield f"* {', '.join(results.models)}"
        yield f"* `{results.command}`, memserve {results.version}"
        if machine.get("simulated"):
            yield f"* simulated: {machine['simulated']}"
        else:
            yield f"* {machine['processor']}, {machine['cores']} cores; {machine['system']}"
            yield f"* load average at the end: {', '.join(map(str, machine['load_average']))}"
        yield from self.head_lines()
        yield from (f"* {note}" for note in results.notes)
        if pictures is None:
            yield NO_PLOTS
        yield from (picture(name, self.drawings[name].caption) for name in pictures or ())
        for table in self.make_tables():
            yield from table.markdown_lines()


def write_json(results: StudyResults, folder: Path) -> None:
    """Write ``results.json``, with the machine."""
    results.machine = results.machine or machine()
    data = msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(results, str_keys=True)), indent=1)
    (folder / RESULTS).write_bytes(data)


def machine() -> dict[str, Any]:
    """This machine: results of different machines are not comparable."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


class RunFolder:
    """The folder of one run; a context manager that closes the records.

    Raises :class:`UserError` if the folder cannot be made or already holds a run.
    """

    def __init__(self, path: Path | None = None) -> None:
        """``path``: None: ``bench-1``, ``bench-2``, ..., the first that does not exist."""
        self.path = path or _default_folder()
        self._writer: RecordWriter | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot make {self.path}: {error.strerror}"
            raise UserError(message, hint="name another folder with --out") from None
        if any((self.path / name).exists() for name in (RECORDS, RESULTS)):
            message = f"{self.path} already holds the results of a run"
            raise UserError(message, hint="name another folder with --out, or remove it")

    @property
    def writer(self) -> RecordWriter:
        """Writes records as they arrive; the file is created on first use."""
        if self._writer is None:
            self._writer = RecordWriter(self.path / RECORDS)
        return self._writer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _default_folder() -> Path:
    number = 1
    while (path := Path(f"bench-{number}")).exists():
        number += 1
    return path
