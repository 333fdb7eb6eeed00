"""``/metrics`` as a stranger to the code reads it in a dashboard: each text stands alone, each name is documented."""

from __future__ import annotations

import re
import sys

import pytest

from places import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from reference import metric_families

REFERENCE = ROOT / "docs" / "reference" / "REFERENCE.md"

FAMILIES = {family.name: family for family in metric_families()}

UNITS = {
    "_seconds": r"\bseconds\b",
    "_bytes": r"\b[Bb]ytes\b",
    "_tokens": r"\b[Tt]okens?\b|\bpositions\b",
    "_blocks": r"\bblocks\b",
    "_share": r"\b[Ss]hare\b",
    "_rate": r"\b[Ss]hare\b",
}
"""End of a name -> what its text must say."""

POINTS_ELSEWHERE = r"^(Of them|The same|It|They|Those|These|That|This)\b|\b(it|that|them|those|here|there)\.?$|^of\b"
"""A text that only makes sense below another one."""


@pytest.mark.parametrize("name", FAMILIES)
def test_help_text_is_self_contained(name: str) -> None:
    text = FAMILIES[name].documentation
    assert len(text.split()) >= 3, f"{name}: {text!r} is no sentence"
    assert text[0].isupper() or text[0] == "1", f"{name}: {text!r} begins in the middle"
    assert not re.search(POINTS_ELSEWHERE, text), f"{name}: {text!r} needs another text to be understood"
    if FAMILIES[name].type == "gauge" and text.startswith("1 "):
        assert re.search(r"\b0 (while|if)\b", text), f"{name}: {text!r} does not say what 0 means"
    for end, word in UNITS.items():
        if name.endswith(end):
            assert re.search(word, text, re.I), f"{name}: {text!r} does not say its unit"


def test_no_two_metrics_share_a_text() -> None:
    texts = [family.documentation for family in FAMILIES.values()]
    assert sorted(texts) == sorted(set(texts))


def test_every_metric_is_in_the_reference() -> None:
    page = REFERENCE.read_text()
    for name, family in FAMILIES.items():
        stored = name + ("_total" if family.type == "counter" else "")
        assert f"| `{stored}` | {family.type} | " in page, f"{stored}: run `make docs`"
