"""The documentation is complete because these tests say so."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from memserve.base import config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]
REFERENCE = ROOT / "docs" / "reference" / "REFERENCE.md"


@pytest.fixture(scope="module")
def reference() -> types.ModuleType:
    """``scripts/reference.py`` as a module."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_up_to_date(reference: types.ModuleType) -> None:
    assert reference.PAGE.read_text() == reference.page(), "run `make docs`"
    assert reference.HTTP_PAGE.read_text() == reference.http_page(), "run `make docs`"


def test_page_of_papers_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("evaluation", ROOT / "scripts" / "evaluation.py")
    assert spec is not None and spec.loader is not None
    evaluation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evaluation)
    assert evaluation.PAGE.read_text() == evaluation.page(), "run `python scripts/evaluation.py`"
    assert sum(file.stat().st_size for file in evaluation.RESULTS.iterdir()) < 1 << 20


def test_leaderboard_is_what_its_script_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "leaderboard.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run `python scripts/leaderboard.py`"


@pytest.mark.parametrize(("name", "count"), [("ROWS", 30), ("ANTHROPIC_ROWS", 15)])
def test_each_row_of_a_reference_names_a_test(reference: types.ModuleType, name: str, count: int) -> None:
    rows = getattr(reference.openai_rows, name)
    assert len({row.what for row in rows}) == len(rows) > count
    for row in rows:
        file, _, name = row.test.partition("::")
        defined = re.findall(r"^(?:async )?def (test_\w+)\(", (ROOT / "tests" / file).read_text(), re.M)
        assert name in defined, f"{row.what}: no test {row.test}"


def test_every_config_field_is_described(reference: types.ModuleType) -> None:
    page = reference.page()
    classes = [c for c in vars(config).values() if dataclasses.is_dataclass(c) and c.__module__ == config.__name__]
    assert len(classes) >= 4
    for cls in classes:
        docs = reference.field_docs(cls)
        for field in dataclasses.fields(cls):
            assert docs[field.name], f"{cls.__name__}.{field.name}: say what it means in a string below it"
            assert f"`{field.name}`" in page, f"{cls.__name__} is missing in scripts/reference.py"


def test_every_command_and_option_has_a_help_text(reference: types.ModuleType) -> None:
    def walk(command: Any, name: str) -> list[str]:
        silent = [] if command.help else [name]
        silent += [f"{name} {p.opts[0]}" for p in command.params if not getattr(p, "help", "argument")]
        for child, below in getattr(command, "commands", {}).items():
            silent += walk(below, f"{name} {child}")
        return silent

    app = reference.typer.main.get_command(reference.command_line())
    assert not walk(app, "memserve"), "give these a help text"
    assert {"serve", "chat", "doctor", "bench"} <= set(app.commands)


README_LINES_MAX = 130


def test_readme_fits_a_screen_or_three() -> None:
    lines = (ROOT / "README.md").read_text().count("\n")
    assert lines <= README_LINES_MAX, "README.md is what a stranger opens: the rest belongs to docs/guides/USING.md"


def test_usage_page_names_every_command(reference: types.ModuleType) -> None:
    page = (ROOT / "docs" / "guides" / "USING.md").read_text()
    for name in reference.typer.main.get_command(reference.command_line()).commands:
        assert f"memserve {name}" in page or f"make {name}" in page, f"USING.md does not mention `memserve {name}`"


def test_changelog_has_the_current_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings and headings[0] in ("Unreleased", version.group(1)), "a change is written down where users look"
    assert version.group(1) in headings


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are made of them where it is shown."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)", without_code(page))
    targets = [((page.parent / link).resolve() if link else page, anchor) for link, anchor in links]
    assert not [(target.name, anchor) for target, anchor in targets if anchor not in anchors(target)]


def test_every_page_is_listed() -> None:
    """`docs/README.md` says what is where."""
    index = ROOT / "docs" / "README.md"
    pages = {str(page.relative_to(index.parent)) for page in PAGES if page.is_relative_to(index.parent)} - {index.name}
    assert pages == {link for link in re.findall(r"\]\(([^)#]+)\)", index.read_text()) if not link.startswith("..")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = without_code(page)
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    files = re.findall(r"`((?:src|tests|docs|bench|scripts)/[\w./-]+\.\w+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in files if not (ROOT / name).exists()]
    assert not missing, "these are gone: correct the page"


def test_make_help_names_every_target_of_the_readme() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name} names targets that do not exist"


def test_architecture_gives_every_dependency_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["project"]["dependencies"] + project["build-system"]["requires"]
    listed += [name for extra in project["project"]["optional-dependencies"].values() for name in extra]
    table = (ROOT / "docs" / "ARCHITECTURE.md").read_text().split("## What we depend on")[1]
    names = {re.split(r"[ <>=;\[]", requirement)[0] for requirement in listed} - {"memserve-lab"}
    for name in names:
        assert name.removeprefix("pytest-") in table, f"docs/ARCHITECTURE.md: one line that says why {name} is needed"


OPERATED = ("guides/OPERATIONS.md", "concepts/SECURITY.md")
"""Pages whose commands, metrics and log lines operators rely on."""


@pytest.mark.parametrize("name", OPERATED)
def test_options_and_metrics_that_a_page_names_exist(name: str) -> None:
    text, known = (ROOT / "docs" / name).read_text(), REFERENCE.read_text()
    said = re.findall(r"`[^`\n]*`", text) + re.findall(r"^.*memserve (?:serve|bench|sim).*$", text, re.MULTILINE)
    own = [span for span in said if "systemctl" not in span and "useradd" not in span]
    options = {option for span in own for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)}
    metrics = set(re.findall(r"\bmemserve_\w+", text))
    assert options and metrics
    assert not [option for option in options if f"`{option}`" not in known], "no command has these options"
    assert not [metric for metric in metrics if f"`{metric}`" not in known], "/metrics does not show these"


def test_log_lines_that_operators_are_told_of_are_logged() -> None:
    """In the table of lines, capitals and dots stand for what differs from line to line."""
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    logs = (ROOT / "docs" / "guides" / "OPERATIONS.md").read_text().split("## Logs")[1].split("\n## ")[0]
    lines = [line for row in re.findall(r"^\| (`.*?) \|", logs, re.MULTILINE) for line in re.findall(r"`([^`]+)`", row)]
    assert len(lines) > 10
    for line in lines:
        parts = [part.strip(" :;,") for part in re.split(r"\b[A-Z]+\b|\.\.\.", line)]
        missing = [part for part in parts if len(part) > 3 and part not in source]
        assert any(len(part) > 3 for part in parts) and not missing, f"{line}: nothing logs {missing}"


def test_words_of_the_glossary_are_sorted_and_in_use() -> None:
    """A word is in use where the sources have it in any spelling: `block table`, `block_tables`, `BlockTable`."""

    def bare(text: str) -> str:
        return re.sub(r"[^a-z]", "", text.lower())

    sources = bare(
        "".join(
            path.read_text()
            for folder in ("src", "lab")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".h", ".cpp")
        )
    )
    entries = re.findall(r"^\| (.+?) \| .+ \|$", (ROOT / "docs" / "GLOSSARY.md").read_text(), re.MULTILINE)[2:]
    assert len(entries) > 60 and entries == sorted(entries, key=str.lower)
    words = [word for entry in entries for word in re.sub(r" \(.*\)", "", entry).split(", ")]
    assert not [word for word in words if bare(word) not in sources], "no source has these words any more"


def symbols(path: Path) -> set[str]:
    """Classes, functions and methods of a module: ``Class``, ``function``, ``Class.method``."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, kinds):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in ast.walk(node) if isinstance(inner, kinds)}
    return found


def test_tour_names_existing_files_and_tests() -> None:
    """Behind a file of Python the symbols that the tour names of it; tests as ``file::name``."""
    tour = (ROOT / "docs" / "TOUR.md").read_text()
    stops = re.findall(r"^## \d+\. .+?(?=^## )", tour, re.MULTILINE | re.DOTALL)
    assert 10 <= len(stops) <= 12, "one file a stop, and a newcomer has an hour"
    for stop in stops:
        read = re.search(r"^\*\*Read\*\* (.+?)$\n\n", stop, re.MULTILINE | re.DOTALL)
        assert read is not None and "**Try**" in stop, stop.split("\n")[0]
        named = re.findall(
            r"`((?:src/memserve|lab/memserve_lab)/[\w/]+\.py)`((?:,? (?:and )?`[A-Za-z_][\w.]*`)+)",
            read[1].replace("\n", " "),
        )
        assert len(named) == 1, read[0]
        for file, names in named:
            gone = set(re.findall(r"`([^`]+)`", names)) - symbols(ROOT / file)
            assert not gone, f"docs/TOUR.md: {file} has no {gone}"
    for file, test in re.findall(r"`?(tests/[\w/]+\.py)::(\w+)", tour):
        assert test in symbols(ROOT / file), f"docs/TOUR.md: {file} has no {test}"


def test_the_site_has_every_page() -> None:
    def pages(entries: Any) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries.values() if isinstance(entries, dict) else entries
        return [page for value in values for page in pages(value)]

    docs = ROOT / "docs"
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in PAGES if page.is_relative_to(docs))


def test_links_that_leave_the_site_are_names() -> None:
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "scripts" / "site_links.py")
    assert spec is not None and spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    text = "[a](STORE.md#b) [c](../concepts/STORE.md) [d](../../bench/x.py) [bench/README.md](../../bench/README.md)"
    assert site.without_outside_links(f"{text}\n```\n[d](../../e)\n```", "guides/VLLM.md") == (
        "[a](STORE.md#b) [c](../concepts/STORE.md) d (`bench/x.py`) bench/README.md\n```\n[d](../../e)\n```"
    )
    for page in PAGES:  # links of the repository lead to these anchors: see `anchors`
        headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
        assert {site.anchor(heading, "-") for heading in headings} == anchors(page)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "guides" / "OPERATIONS" / "index.html").exists()
