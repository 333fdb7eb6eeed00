"""Write docs/EVALUATION.md: numbers of papers beside ours, out of result files.

    python scripts/evaluation.py            writes the page
    python scripts/evaluation.py --check    writes nothing; exit with 1 if the page is out of date
    python scripts/evaluation.py --results DIR --page FILE      of other result files, elsewhere

``bench/results/claims.json`` has the rows. What a row says of our own comes from one of two places:

* ``values``: figures out of ``bench/results/NAME.json``, which a study wrote (``results.json`` of its folder); they
  stand for ``{0}``, ``{1}`` ... in ``ours``;
* ``page`` and ``quotes``: a page of the docs, where each of the quotes stands word for word.

A row with neither is not measured, and says so in ``ours``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "EVALUATION.md"
NOT_MEASURED = "not measured"
HEAD = """# Papers beside memserve

Each number of the papers that memserve joins, and of newer work, beside ours: the command that printed it, the machine,
and why it differs. `python scripts/evaluation.py` writes this page from `bench/results/`; a test compares them.
*Simulated* figures are of production machines under virtual time on a roofline of the named device ([what is a
model](guides/SIMULATOR.md#what-is-real-and-what-is-a-model)): they tell settings apart, and are no measurement of that
device. Rows without a figure say *not measured*.
"""


class Figures:
    """Result files, and the values that claims take from them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, Any]] = {}

    def results(self, name: str) -> dict[str, Any]:
        """A result file by its name without ending."""
        if name not in self._files:
            self._files[name] = json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))
        return self._files[name]

    def point(self, name: str, where: dict[str, Any]) -> dict[str, Any]:
        """The one point of a file whose fields have the values of ``where``."""
        results = self.results(name)
        points = [*results.get("points", ()), *results.get("goodputs", ())]
        matches = [point for point in points if all(point.get(key) == value for key, value in where.items())]
        if len(matches) != 1:
            raise SystemExit(f"{name}: {len(matches)} points are {where}")
        return matches[0]

    def value(self, spec: dict[str, Any]) -> str:
        """``field`` of the point ``of``, times ``times``; with ``to``, its change to that point's; as ``form``."""
        name, field = spec["file"], spec["field"]
        number = _field(self.point(name, spec["of"]), field)
        if "to" in spec:
            number = _field(self.point(name, spec["to"]), field) / number - 1
            return f"{number:+.0%}"
        if "over" in spec:
            number /= _field(self.point(name, spec["over"]), field)
        return format(number * spec.get("times", 1), spec.get("form", ".2f"))


def _field(point: dict[str, Any], path: str) -> float:
    value: Any = point
    for part in path.split("."):
        value = value[part]
    return float(value)


def cells_of(claim: dict[str, Any], figures: Figures) -> list[str]:
    """The cells of one row. Ends the script where a quote does not stand in its page."""
    ours = claim["ours"].format(*(figures.value(spec) for spec in claim.get("values", ())))
    source = f"`{claim['command']}`" if claim.get("command") else ""
    if page := claim.get("page"):
        text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
        if missing := [quote for quote in claim["quotes"] if quote not in text]:
            raise SystemExit(f"docs/{page} does not say {missing[0]!r}")
        source = " ".join(filter(None, (source, f"([{Path(page).stem}]({page}))")))
    if not claim.get("values") and not page and NOT_MEASURED not in ours:
        raise SystemExit(f"{claim['claim']}: neither values nor a page")
    return [claim["claim"], claim["published"], ours, source, claim.get("machine", ""), claim.get("why", "")]


def page(results: Path = RESULTS) -> str:
    """The page's text, of a folder of result files."""
    claims = json.loads((results / "claims.json").read_text(encoding="utf-8"))
    figures, lines = Figures(results), [HEAD]
    for section in claims:
        lines.append(f"## {section['title']}\n")
        if about := section.get("about"):
            lines.append(f"{about}\n")
        lines.append("| What | Published | Here | Command | Machine | Why it differs |")
        lines.append("| --- | --- | --- | --- | --- | --- |")
        lines += ["| " + " | ".join(cells_of(claim, figures)) + " |" for claim in section["rows"]]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write the page, or check that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of result files")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    args = parser.parse_args()
    if args.check:
        return int(not args.page.exists() or args.page.read_text(encoding="utf-8") != page(args.results))
    args.page.write_text(page(args.results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
