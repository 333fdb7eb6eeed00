"""A command as a child of ``memserve serve``: what it is told at the start, and how it tells its last error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from memserve.cli import options as opt
from memserve.errors import UserError
from memserve.runtime.private_files import Secret, follow_secret
from memserve.runtime.process import die_with, ignore_terminal


@dataclass(frozen=True, slots=True)
class Child:
    """What the parent has said."""

    secret: Secret
    host: str
    """The router's, which is this one."""
    outlive: Path | None
    """The parent's state folder, by which the next router finds this process. None: it dies with its parent."""
    greeting: Mapping[str, Any]
    """All of it."""


@contextmanager
def child_of_serve(join: str, name: str, log_level: str) -> Iterator[Child]:
    """The secret comes through stdin; a :class:`UserError` inside goes to stdout, and ends the process."""
    last_words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library must not be taken for that error
    line = sys.stdin.readline()
    if not line:
        raise typer.Exit(1)  # the parent has ended: nothing reads a last error
    greeting = json.loads(line)
    try:
        ignore_terminal()
        outlive = Path(greeting["folder"]) if "folder" in greeting else None
        if outlive is None:
            die_with(greeting["parent_pid"])
        opt.set_up_logging(log_level, name)
        host, _ = opt.split_address(join, "--join")
        yield Child(_secret(greeting), host, outlive, greeting)
    except UserError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), file=last_words, flush=True)
        raise typer.Exit(1) from None


def _secret(greeting: Mapping[str, Any]) -> Secret:
    """Where the parent has it from a file, the child follows that."""
    file = greeting.get("secret_file")
    return follow_secret(Path(file)) if file else str(greeting["secret"])
