"""What the source says about the fields of a class (level 0)."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap


def field_docs(cls: type) -> dict[str, str]:
    """The text of each field: the string below it, or the comment beside it; empty where there is none."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines, found = source.splitlines(), {}
    (definition,) = ast.parse(source).body
    if not isinstance(definition, ast.ClassDef):
        return {}
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        comment = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
        found[node.target.id] = comment.group(1) if comment else ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found[node.target.id] = " ".join(after.value.value.split())
    return found
