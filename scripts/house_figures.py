"""What a stranger counts in the house: ``python scripts/house_figures.py``.

Modules and lines of product, lab, tests and scripts; comments; names of methods and variables that say nothing; long
parameter lists. The words that count as pronouns and participles are :data:`PRONOUNS`. Constructors count their
parameters without ``self``; dataclasses have none of their own.
"""

from __future__ import annotations

import ast
import functools
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"product": "src/memserve", "lab": "lab/memserve_lab", "tests": "tests", "bench": "bench", "scripts": "scripts"}
PRONOUNS = frozenset((
    "one", "ones", "some", "other", "others", "all", "each", "both", "any", "none", "mine", "theirs", "his", "own",
    "what", "which", "who", "where", "when", "there", "here", "it", "that", "this", "those", "these", "them",
    "they", "me", "told", "said", "asked", "known", "kept", "held", "found", "made", "wanted", "given", "taken",
    "got", "seen", "heard", "left", "gone", "done", "sent", "drawn", "placed", "named", "chosen", "begun", "ended",
    "awaited", "missing", "at",
))  # fmt: skip
PARAMETERS_MAX = 6


def sources(folder: str) -> list[Path]:
    """Modules with more than a docstring of one line."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a module, itself first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def bindings(path: Path) -> Iterator[str]:
    """Every name that a function, a loop, an assignment or a ``with`` binds."""
    for node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg


def comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


@functools.cache
def figures(folder: str) -> dict[str, str]:
    """Of one part of the house."""
    files = sources(folder)
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    lines = {path: text.count("\n") for path, text in texts.items()}
    names = Counter(name for path in files for name in bindings(path))
    classes = [node for path in files for node in nodes(path) if isinstance(node, ast.ClassDef)]
    methods = [
        node for owner in classes for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    public = [node.name for node in methods if not node.name.startswith("__")]
    long = [
        node
        for node in methods
        if node.name == "__init__"
        and len(node.args.posonlyargs) + len(node.args.args) - 1 + len(node.args.kwonlyargs) > PARAMETERS_MAX
    ]
    sized = sorted(count for count in lines.values() if count > 1)
    written = sum(1 for text in texts.values() for line in text.splitlines() if line.strip())
    total, empty = sum(names.values()), len(files) - len(sized)
    return {
        "modules (and packages without text)": f"{len(sized)} ({empty})",
        "lines": f"{sum(lines.values()):,}",
        "file median / p90 / max": f"{statistics.median(sized):.0f} / {sized[int(0.9 * len(sized))]} / {sized[-1]}",
        "comment lines": f"{sum(map(comment_lines, texts.values())) / written:.1%}",
        "pronouns and participles, of 1,000 bindings": f"{1000 * sum(names[word] for word in PRONOUNS) / total:.1f}",
        "methods of one word": f"{sum('_' not in name.strip('_') for name in public) / max(1, len(public)):.0%}",
        f"constructors with more than {PARAMETERS_MAX} parameters": str(len(long)),
    }


def main() -> None:
    columns = {part: figures(folder) for part, folder in PARTS.items()}
    print("| |", " | ".join(columns), "|")
    print("| --- |", " | ".join("---" for _ in columns), "|")
    for row in next(iter(columns.values())):
        print(f"| {row} |", " | ".join(column[row] for column in columns.values()), "|")


if __name__ == "__main__":
    main()
