"""The files of a cluster whose secret changes: what they hold at each step, and how an operator replaces one."""

from __future__ import annotations

from pathlib import Path

OLD, NEW = "the old secret of the tests", "the new secret of the tests"
STEPS = (f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\nkv={OLD}\n", f"{NEW}\nkv={OLD}\n")


def put(path: Path, text: str) -> Path:
    """Replace the file at once, as ``mv`` does."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.chmod(0o600)
    draft.replace(path)
    return path
