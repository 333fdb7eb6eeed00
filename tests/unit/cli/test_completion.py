"""Completion in shells: commands, and the options of one command."""

from __future__ import annotations

import os

import pytest

from memserve.cli.main import run


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is offered for the last word of ``line``."""
    for name, value in {
        "_MEMSERVE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))
    }.items():  # fmt: skip
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 0
    return capsys.readouterr().out.split()


def test_commands_and_options_are_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed("memserve se", monkeypatch, capsys) == ["serve"]
    assert {"sim", "store", "serve"} <= set(completed("memserve s", monkeypatch, capsys))
    assert completed("memserve store v", monkeypatch, capsys) == ["verify"]
    assert completed("memserve serve --otlp", monkeypatch, capsys) == ["--otlp-endpoint"]
