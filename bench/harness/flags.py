"""Flags and records of the scripts: :func:`options` reads the command line, :func:`save` writes ``--json``.

A flag is declared by its default, whose type is the flag's: ``rounds=3``, ``quick=False``, ``levels=[1, 2]`` (words
behind it; ``[]``: it may be repeated), ``depths=Commas(1, 8)`` (one word, cut at commas), ``trace=Path`` (a type: none
by default). With a help text it is ``(default, help)``, with choices ``(default, help, choices)``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HELP = {
    "data": "the folder of data sets (docs/guides/BENCH.md)",
    "folder": "where logs, or the disks to measure, are put; default: a temporary folder",
    "model": "a model folder; default: the bundled model",
    "quick": "a short run: does everything work",
    "rounds": "in each of them all contenders take turns",
    "serve": "further options of memserve serve",
    "threads": "of each engine",
    "trace": "a trace in Mooncake's form",
    "vllm": "a Python that can import vllm",
}
"""Of flags that mean the same in all scripts."""


class Commas(tuple):  # a marker; it has no fields
    """The default of a flag whose value is a list in one word."""

    def __new__(cls, *values: Any) -> Commas:
        return super().__new__(cls, values)


def options(
    doc: str | None, *, required: str = "", hidden: str = "", rest: str = "",
    quick: Mapping[str, Any] | None = None, **flags: Any,
) -> argparse.Namespace:  # fmt: skip
    """The command line. ``required`` and ``hidden`` name flags; ``rest`` names the list of all words that are no flag;
    ``quick``: what ``--quick`` sets. ``--json FILE`` is read always, and as ``--out`` too, where that is no flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, flag in flags.items():
        if name == "geometry":
            import geometries

            geometries.add_option(parser, flag)
        else:
            _add(parser, name, flag, required=name in required.split(), hidden=name in hidden.split())
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=HELP["quick"])
    names = ["--json"] if "out" in flags else ["--json", "--out"]
    words = {"nargs": "?", "const": Path("-"), "metavar": "FILE", "help": "write the figures there, or print them"}
    parser.add_argument(*names, type=Path, dest="json", **words)
    if rest:
        parser.add_argument(rest, nargs="*", help=f"{HELP.get(rest, '')}, after --")
    arguments = parser.parse_args()
    if quick is not None and arguments.quick:
        vars(arguments).update(quick)
    return arguments


def _add(parser: argparse.ArgumentParser, name: str, flag: Any, *, required: bool, hidden: bool) -> None:
    default, text, choices = (*flag, None)[:3] if type(flag) is tuple else (flag, HELP.get(name), None)
    more: dict[str, Any] = {"help": argparse.SUPPRESS if hidden else text, "required": required}
    if isinstance(default, bool):
        more |= {"action": "store_true"}
    elif isinstance(default, Commas):
        kind = type(default[0])
        more |= {"type": lambda word: [kind(part) for part in word.split(",") if part], "default": list(default)}
        more["metavar"] = ",".join(map(str, default))
    else:
        kind = (default or [""])[0] if isinstance(default, list) else default
        more |= {"type": kind if isinstance(kind, type) else type(kind), "choices": choices}
        more |= {"nargs": "+", "action": "store" if default else "extend"} if isinstance(default, list) else {}
        more |= {"default": None if isinstance(default, type) else default}
    parser.add_argument(f"--{name.replace('_', '-')}", **more)


def save(arguments: argparse.Namespace, record: Any) -> None:
    """Write ``record``, where ``--json`` was given."""
    if arguments.json is not None:
        text = json.dumps(record, indent=1, default=_plain)
        print(text) if arguments.json == Path("-") else arguments.json.write_text(text + "\n")


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)


def need(path: Path | None, content: str = "data") -> Path:
    """``path``, which must be there; else the script ends, and says what is missing."""
    if path is None or not path.exists():
        print(f"skipped: no {content} at {path}")
        sys.exit(0)
    return path


@contextmanager
def working_folder(path: Path | None) -> Iterator[Path]:
    """``path``, made if need be, or a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="memserve-bench-") as temporary:
        folder = path or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def parts_of(names: list[str], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``parts`` that are named, in its order. Ends the script at a name that is none of them."""
    if unknown := set(names) - set(parts):
        raise SystemExit(f"no {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    return {name: part for name, part in parts.items() if name in names}
