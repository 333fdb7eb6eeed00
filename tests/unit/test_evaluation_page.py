"""``scripts/evaluation.py``: rows come from result files and from pages that say so, or are called not measured."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def evaluation() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("evaluation", ROOT / "scripts" / "evaluation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def figures(evaluation: types.ModuleType, tmp_path: Path):
    points = [{"setting": "a", "at": 1.0, "s": 2.0, "shares": {"x": 0.25}}, {"setting": "b", "at": 1.0, "s": 1.5}]
    (tmp_path / "run.json").write_text(json.dumps({"points": points}))
    return evaluation.Figures(tmp_path)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"field": "s", "of": {"setting": "a"}}, "2.00"),
        ({"field": "shares.x", "of": {"setting": "a"}, "times": 100, "form": ".1f"}, "25.0"),
        ({"field": "s", "of": {"setting": "a"}, "to": {"setting": "b"}}, "-25%"),
        ({"field": "s", "of": {"setting": "a"}, "over": {"setting": "b"}, "form": ".3f"}, "1.333"),
    ],
)
def test_value_is_read_from_a_result_file(figures, spec: dict, text: str) -> None:
    assert figures.value({"file": "run", **spec}) == text


def test_ambiguous_point_ends_the_script(figures) -> None:
    with pytest.raises(SystemExit, match="2 points"):
        figures.value({"file": "run", "field": "s", "of": {"at": 1.0}})


def test_row_says_where_its_figures_come_from(evaluation, figures) -> None:
    quoted = {"claim": "c", "published": "p", "ours": "3.3 ms", "page": "reference/MEASURED.md", "quotes": ["3.3 ms"]}
    assert evaluation.cells_of(quoted, figures)[3] == "([MEASURED](reference/MEASURED.md))"
    with pytest.raises(SystemExit, match="does not say"):
        evaluation.cells_of({**quoted, "quotes": ["4711 ms"]}, figures)
    with pytest.raises(SystemExit, match="neither values nor a page"):
        evaluation.cells_of({"claim": "c", "published": "p", "ours": "3 ms"}, figures)
    assert evaluation.cells_of({"claim": "c", "published": "p", "ours": "not measured: why"}, figures)[2]
