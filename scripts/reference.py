"""Writes ``docs/REFERENCE.md`` from the code: ``python scripts/reference.py [--check]``.

The commands come from the typer app, the options from the config classes and the docstring below each field: an
option is declared and described once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import typer.main

from memserve import config, types
from memserve.cli.main import app
from memserve.units import human_bytes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "REFERENCE.md"
HEAD = """# Reference

Written by `make docs` from the code; do not edit. A test says when it is out of date.
"""


def field_docs(cls: type) -> dict[str, str]:
    """The text behind each field: the string below it, or the comment beside it."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines, found = source.splitlines(), {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        comment = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
        found[node.target.id] = comment.group(1) if comment else ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found[node.target.id] = " ".join(after.value.value.split())
    return found


def default_of(field: dataclasses.Field[Any] | msgspec.structs.FieldInfo) -> str:
    """A field's default as a reader wants to see it."""
    nothing = (dataclasses.MISSING, msgspec.NODEFAULT)
    if field.default not in nothing:
        if field.name.endswith("_bytes") and field.default:
            return human_bytes(field.default)
        return f"`{field.default!r}`"
    if field.default_factory not in nothing:
        return f"`{field.default_factory.__name__}()`" if isinstance(field.default_factory, type) else "computed"
    return "required"


def cells(*values: str) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"


def class_section(cls: Any) -> list[str]:
    """A dataclass or struct: its docstring and its fields."""
    docs, types_of = field_docs(cls), cls.__annotations__
    fields = msgspec.structs.fields(cls) if issubclass(cls, msgspec.Struct) else dataclasses.fields(cls)
    rows = [cells(f"`{f.name}`", f"`{types_of[f.name]}`", default_of(f), docs[f.name]) for f in fields]
    text = inspect.cleandoc(cls.__doc__ or "")
    table = "\n".join(["| field | type | default | |", "| --- | --- | --- | --- |", *rows])
    return [f"### {cls.__name__}", text, table]


def option_rows(command: Any) -> list[str]:
    """The arguments and options of one command."""
    rows = []
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        spelling = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            spelling = f"`{parameter.name.upper()}`"
        default = parameter.default() if callable(parameter.default) else parameter.default
        shown = "" if default in (None, "", ()) or "UNSET" in repr(default) else f"`{default}`"
        rows.append(cells(spelling, shown, getattr(parameter, "help", None) or ""))
    return rows


def command_sections(command: Any, name: str) -> list[str]:
    """A command and its subcommands."""
    text = inspect.cleandoc(command.help or "")
    sections = [f"### `{name}`", text] if name.count(" ") else []
    if rows := option_rows(command):
        sections.append("\n".join(["| option | default | |", "| --- | --- | --- |", *rows]))
    for child, its_command in getattr(command, "commands", {}).items():
        sections += command_sections(its_command, f"{name} {child}")
    return sections


def page() -> str:
    """The whole page."""
    options = [
        config.EngineOptions, config.InstanceConfig, config.PoolConfig, config.SchedulerConfig, config.ExchangeConfig,
        config.ClusterConfig, config.AdmissionConfig, config.EdgeConfig,
    ]  # fmt: skip
    options += [types.Request, types.SamplingParams, types.StopParams, types.KVGeometry]
    sections = [HEAD.strip(), "## Commands", *command_sections(typer.main.get_command(app), "memserve")]
    sections += ["## Options and words", *(part for cls in options for part in class_section(cls))]
    text = "\n\n".join(section for section in sections if section) + "\n"
    return text.replace("``", "`")  # docstrings are written in reStructuredText


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is out of date")
    args = parser.parse_args()
    new = page()
    if args.check:
        return int(not PAGE.exists() or PAGE.read_text() != new)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
