"""``memserve doctor``: what is missing on this machine, and how to mend it (level 4)."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from typing import Annotated

import typer

from memserve.cli import checks
from memserve.cli import options as opt
from memserve.cli.checks import Finding, Status
from memserve.config import DEFAULT_MODEL

_MARKS = {Status.OK: ("ok  ", "green"), Status.WARN: ("warn", "yellow"), Status.FAIL: ("FAIL", "red")}


def doctor(
    model: opt.Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address that serve would listen on.")] = opt.DEFAULT_HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port that serve would listen on.")] = opt.DEFAULT_PORT,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine, the model and the installation. Ends with 1 when something essential is missing."""
    findings = list(examine(model, host, port))
    worst = Status.FAIL if any(finding.status is Status.FAIL for finding in findings) else Status.OK
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": worst is Status.OK, "checks": listed}, indent=1))
    else:
        for finding in findings:
            _print(finding)
        ready = f"ready to serve: {_serve_command(model, findings)}"
        typer.echo(ready if worst is Status.OK else "not ready: mend what says FAIL")
    if worst is Status.FAIL:
        raise typer.Exit(1)


def examine(model: str, host: str, port: int) -> Iterator[Finding]:
    """Everything, in the order of the report."""
    yield from checks.check_python()
    yield from checks.check_native()
    yield from checks.check_packages()
    yield from checks.check_torch()
    yield from checks.check_machine()
    yield from checks.check_model(model)
    yield from checks.check_memory_bound(model)
    yield from checks.check_port(host, port)
    yield from checks.check_extras()


def _serve_command(model: str, findings: list[Finding]) -> str:
    """What to type next: with the model that was asked for, and a free port when the usual one is taken."""
    taken = any(finding.name == "port" and finding.status is not Status.OK for finding in findings)
    command = "memserve serve" + (f" --model {shlex.quote(model)}" if model != DEFAULT_MODEL else "")
    return command + (" --port 0" if taken else "")


def _print(finding: Finding) -> None:
    mark, color = _MARKS[finding.status]
    typer.echo(f"{typer.style(mark, fg=color)}  {finding.name:<18} {finding.detail}")
    if finding.hint and finding.status is not Status.OK:
        typer.echo(f"      hint: {finding.hint}")
