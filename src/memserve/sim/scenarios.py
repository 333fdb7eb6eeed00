"""Experiments by name, for ``memserve sim --scenario NAME`` (level 3).

A scenario is a function without arguments that runs and returns a table; it registers itself with :func:`scenario`, and
its module stands in ``MODULES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from memserve.errors import UserError

MODULES: tuple[str, ...] = ("memserve.sim.scenario_llm_cache",)
"""Imported when a scenario is asked for."""


@dataclass(frozen=True, slots=True)
class Table:
    """What a scenario found: one row a case, cells as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


Scenario = Callable[[], tuple[Table, ...]]
SCENARIOS: dict[str, Scenario] = {}
"""Those of the modules imported so far."""


def scenario(name: str) -> Callable[[Scenario], Scenario]:
    """Register the decorated function; its docstring says what it is about."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[name] = function
        return function

    return register


def run_scenario(name: str) -> tuple[Table, ...]:
    """The tables of a scenario. Raises :class:`UserError` for a name that there is not."""
    for module in MODULES:
        importlib.import_module(module)
    if name not in SCENARIOS:
        raise UserError(f"unknown scenario {name!r}", hint=f"one of {', '.join(sorted(SCENARIOS)) or '(none yet)'}")
    return SCENARIOS[name]()


def text_of(table: Table) -> list[str]:
    """A table for people: the first column to the left, the others to the right."""
    widths = [max(len(row[at]) for row in (table.columns, *table.rows)) for at in range(len(table.columns))]
    lines = [table.title]
    for row in (table.columns, *table.rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return [*lines, *table.notes]
