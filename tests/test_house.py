"""The house rules, as a test. Every message says what to do instead.

Read from the top: budgets, import layers, banned imports, words that leave work open, docstrings, dead files.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
LAB = ROOT / "lab"
TESTS = ROOT / "tests"
PACKAGE = SRC / "memserve"

FILE_LINES_MIN, FILE_LINES_MAX = 60, 650
FLAT_FILES_MAX = 14
"""Of one folder of src, without its ``__init__``."""
SMALL = {"src/memserve/__main__.py", "src/memserve/base/errors.py", "src/memserve/system/triton_bytes.py"}
"""Files with a duty of their own that takes less: an entry point, names that C++ asks for, what Triton compiles."""
FUNCTION_LINES_MAX = 60
TEST_FILE_LINES_MAX = 600
TEST_NAME_CHARS_MAX = 60
TEST_KINDS = ("unit", "twins", "stories", "process")
AT_THE_ROOT = ("test_house.py", "test_docs.py")
NATIVE_FOLDERS = {"core": "memserve._core", "kernels": "memserve._kernels"}

ROOMS = (
    "base", "system", "protocol", "kv", "instance", "router", "journal", "transport", "model", "store", "host", "api",
    "fleet", "cli", "integrations",
)  # fmt: skip
"""Rooms of the product, from the ground up: each may import those before it. ``memserve`` itself and ``__main__`` are
entrances, above all; ``memserve_lab`` is a distribution of its own above the product, which knows nothing of it."""
APART = (
    {"instance", "router"},
    {"store", "router"},
    {"store", "instance"},
    {"instance", "journal"},
)
"""Rooms that never import each other."""

PURE = (
    "base", "protocol", "kv", "instance", "router", "journal.state", "journal.store",
    "store.machine", "store.disks", "fleet.machine", "fleet.messages", "fleet.engines",
)  # fmt: skip
"""Rooms, and parts of rooms, that know no clock, file, socket, thread or device."""
IMPURE = {
    "asyncio", "socket", "time", "datetime", "random", "secrets", "uuid", "threading", "multiprocessing", "concurrent",
    "queue", "subprocess", "os", "pathlib", "io", "shutil", "tempfile", "glob", "mmap", "signal", "selectors",
    "logging", "torch", "transformers", "starlette", "uvicorn", "httpx", "typer", "prometheus_client",
}  # fmt: skip
ONLY_IN = {
    "lmcache": ("integrations",), "sglang": ("integrations",), "vllm": ("integrations",),
    "typer": ("cli",), "starlette": ("api", "fleet"), "uvicorn": ("api", "fleet"), "aiohttp": ("lab",),
}  # fmt: skip
"""Outside packages that one room hides from the rest."""

ENTRY_POINTS = {"memserve.cli.main", "memserve.__main__", "memserve"}
LAB_COMMANDS = {f"memserve_lab.cli.{name}" for name in ("bench", "sim", "ui")}
LOADED_BY_ENGINES = {f"memserve.integrations.{name}" for name in ("lmcache", "ray_serve", "sglang", "vllm_tier")}
"""By name, from an engine's own configuration."""


_SPEC = importlib.util.spec_from_file_location("house_figures", ROOT / "scripts" / "house_figures.py")
assert _SPEC is not None and _SPEC.loader is not None
house_figures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(house_figures)


@functools.cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    root = nodes(path)[0]
    assert isinstance(root, ast.Module)
    return root


def nodes(path: Path) -> tuple[ast.AST, ...]:
    return house_figures.nodes(path)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Millions of nodes, in no circle: the collector would search them again and again, and free none."""
    gc.disable()
    yield
    tree.cache_clear()
    house_figures.nodes.cache_clear()
    gc.enable()


def tracked(*globs: str) -> list[Path]:
    """Files of the project that git does not ignore."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed: it knows the project's files")
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *globs]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in sorted(set(names)) if name and (ROOT / name).is_file()]


SOURCES = sorted(PACKAGE.rglob("*.py"))
LAB_SOURCES = sorted((LAB / "memserve_lab").rglob("*.py"))
NATIVE = sorted(path for path in SRC.rglob("*") if path.suffix in (".cpp", ".h"))


def where(path: Path, line: int | None = None) -> str:
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def module_name(path: Path) -> str:
    parts = path.relative_to(LAB if path.is_relative_to(LAB) else SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room that a module belongs to, or ``lab``; None: an entrance, or a native module."""
    package, _, rest = module.partition(".")
    room = "lab" if package == "memserve_lab" else rest.partition(".")[0]
    return room if room in (*ROOMS, "lab") else None


def height_of(module: str) -> int:
    """How high its room lies; native modules lie on the ground, entrances above all."""
    room = room_of(module)
    if room is None:
        return -1 if module.startswith(("memserve._core", "memserve._kernels")) else len(ROOMS) + 1
    return len(ROOMS) if room == "lab" else ROOMS.index(room)


def is_pure(module: str) -> bool:
    return any(f"{module}.".startswith(f"memserve.{part}.") for part in PURE)


@functools.cache
def imports(path: Path, *, also_for_typing: bool = True) -> list[tuple[int, str]]:
    """``(line, module)`` of every import in a file, those inside functions included."""
    return list(_imports(path, also_for_typing))


def _imports(path: Path, also_for_typing: bool) -> Iterator[tuple[int, str]]:
    typing_only = {
        id(child)
        for node in nodes(path)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in nodes(path):
        if id(node) in typing_only and not also_for_typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module != "memserve":
                yield node.lineno, node.module or ""
            if (node.module or "").split(".")[0] in ("memserve", "memserve_lab"):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def report(problems: list[str], advice: str) -> None:
    assert not problems, f"{advice}\n  " + "\n  ".join(problems)


def test_files_fit_their_budget() -> None:
    sizes = {where(path): text(path).count("\n") for path in [*SOURCES, *LAB_SOURCES, *NATIVE]}
    long = [f"{name} has {lines} lines" for name, lines in sizes.items() if lines > FILE_LINES_MAX]
    report(long, f"No file of src is longer than {FILE_LINES_MAX} lines: give one duty a file of its own.")
    crumbs = [
        f"{name} has {lines} lines"
        for name, lines in sizes.items()
        if name.startswith("src/memserve/") and lines < FILE_LINES_MIN and not name.endswith("__init__.py")
        and name not in SMALL
    ]  # fmt: skip
    report(crumbs, f"A module has {FILE_LINES_MIN} lines at least: it grows, or it goes into the one that uses it.")


def test_folders_are_tables_of_contents() -> None:
    folders = Counter(path.parent for path in [*SOURCES, *LAB_SOURCES] if path.name != "__init__.py")
    full = [f"{where(folder)} has {count} files" for folder, count in folders.items() if count > FLAT_FILES_MAX]
    report(full, f"A folder has at most {FLAT_FILES_MAX} files: name its parts, and give them folders.")
    strangers = sorted({path.relative_to(PACKAGE).parts[0] for path in SOURCES if path.parent != PACKAGE} - set(ROOMS))
    report(strangers, "The rooms stand in ROOMS, with docs/ARCHITECTURE.md: a subject lives in one of them.")


def test_no_public_class_name_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(where(path, node.lineno))
    twice = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    report(twice, "A name that two rooms give to different things says which: ReadSpan, RequestCause.")


def test_functions_fit_their_budget() -> None:
    long = [
        f"{where(path, node.lineno)} {node.name} has {lines} lines"
        for path in [*SOURCES, *LAB_SOURCES]
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    report(long, f"No function is longer than {FUNCTION_LINES_MAX} lines: name its steps and call them.")


def test_test_files_fit_their_budget() -> None:
    long = [
        f"{where(path)} has {lines} lines"
        for path in tracked("tests/*.py")
        if (lines := text(path).count("\n")) > TEST_FILE_LINES_MAX
    ]
    report(long, f"No test file is longer than {TEST_FILE_LINES_MAX} lines: give one subject a file of its own.")


def test_test_names_fit_their_budget() -> None:
    long = [
        f"{where(path, node.lineno)} {node.name} has {len(node.name)} characters"
        for path in tracked("tests/*.py")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > TEST_NAME_CHARS_MAX
    ]
    report(long, f"A test's name has at most {TEST_NAME_CHARS_MAX} characters: what is checked, in the field's words.")


def test_files_that_take_long_are_there() -> None:
    """They begin first, so that no worker is left alone with one at the end."""
    names = re.findall(r'"([^"]+)"', text(TESTS / "conftest.py").partition("LONG = (")[2].partition("\n)")[0])
    report([name for name in names if not (TESTS / f"{name}.py").is_file()], "Name them in tests/conftest.py anew.")


@functools.cache
def concerns(path: Path) -> set[str]:
    """The modules of ours that a test imports, those of the helpers that it imports included."""
    found: set[str] = set()
    for target in {target for _, target in imports(path)}:
        helper = TESTS / "support" / f"{target}.py"
        found |= concerns(helper) if helper.is_file() else {target}
    return {target for target in found if is_ours(target)}


def is_ours(target: str) -> bool:
    return target.split(".")[0] in ("memserve", "memserve_lab")


def misplaced(path: Path) -> str | None:
    """What is wrong with the place of a test file; ``None``: nothing."""
    kind, *folders = path.relative_to(TESTS).parts[:-1] or [None]
    if kind is None:
        return None if path.name in AT_THE_ROOT else f"lies in no folder: {', '.join(TEST_KINDS)}"
    if kind not in TEST_KINDS:
        return "is no test of a kind that has a folder"
    folder = "/".join(folders)
    if folder:
        in_lab = folders[0] == "lab"
        package = NATIVE_FOLDERS.get(
            folder, ".".join(["memserve_lab", *folders[1:]] if in_lab else ["memserve", *folders])
        )
        source = LAB / "memserve_lab" / "/".join(folders[1:]) if in_lab else PACKAGE / folder
        if not source.is_dir() and not (folder in NATIVE_FOLDERS and (SRC / folder).is_dir()):
            return f"lies in a folder that src does not have: {folder}"
        if not any(f"{target}.".startswith(f"{package}.") for target in concerns(path)):
            return f"imports nothing of {package}"
        return None
    own = {room_of(target) or target.split(".")[1] for _, target in imports(path) if is_ours(target) and "." in target}
    # Names of the package itself (`from memserve import LLM`) are a subject, too; commands are how others are called.
    subjects = {name for name in own if name[0].isupper() or name in (*ROOMS, "lab")} - {"cli", "base", "protocol"}
    only = subjects.pop() if len(subjects) == 1 else ""
    is_room = only in (*ROOMS, "lab")
    return f"concerns only {only}: its folder is {kind}/{only}" if is_room else None


def test_test_files_lie_in_the_folder_of_their_subject() -> None:
    problems = [f"{where(p)} {wrong}" for p in tracked("tests/**/test_*.py") if (wrong := misplaced(p))]
    report(problems, "A test file's place is tests/<kind>/<folder of src>/test_<subject>.py (CONTRIBUTING.md).")


def test_arrows_only_point_down() -> None:
    problems = []
    for path in [*SOURCES, *LAB_SOURCES]:
        mine, room = height_of(module_name(path)), room_of(module_name(path))
        for line, target in imports(path):
            if not is_ours(target) or target == "memserve.__version__" or (room == "lab" and target == "memserve"):
                continue
            if target == "memserve" or height_of(target) > mine:
                problems.append(f"{where(path, line)} imports {target}, from above")
            if any(room != room_of(target) and {room, room_of(target)} <= apart for apart in APART):
                problems.append(f"{where(path, line)} imports {target}: these two never import each other")
    report(problems, "Imports point down (ROOMS): pass the object in, post an event, or move the word to a room below.")


def import_graph() -> dict[str, dict[str, int]]:
    """Module of ours -> the modules of ours that it imports, and where; for typing alone and in functions, too."""
    names = {module_name(path) for path in [*SOURCES, *LAB_SOURCES]} - {"memserve"}
    graph: dict[str, dict[str, int]] = {name: {} for name in names}
    for path in [*SOURCES, *LAB_SOURCES]:
        for line, target in imports(path):
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target and module_name(path) in names - {target}:
                graph[module_name(path)].setdefault(target, line)
    return graph


def circles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """Of each module that imports itself by way of others the shortest way round, once a circle."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        ways, seen = [[start]], {start}
        while ways:
            ways = [[*way, target] for way in ways for target in graph[way[-1]]]
            if closed := next((way for way in ways if way[-1] == start), None):
                found.setdefault(frozenset(closed), closed)
                break
            ways = [way for way in ways if way[-1] not in seen and not seen.add(way[-1])]
    return list(found.values())


def test_no_import_goes_round_in_a_circle() -> None:
    graph = import_graph()
    problems = [
        "; ".join(f"{one} (line {graph[one][other]}) -> {other}" for one, other in itertools.pairwise(way))
        for way in circles(graph)
    ]
    advice = "Move the word that both need below both, or say in a Protocol what the lower one needs of the upper one."
    report(problems, advice)


def test_thinking_is_separate_from_doing() -> None:
    problems = [
        f"{where(path, line)} imports {target}"
        for path in SOURCES
        if is_pure(module_name(path))
        for line, target in imports(path)
        if target.split(".")[0] in IMPURE
    ]
    advice = "Pure parts (PURE) know no clock, file, socket, thread or device: return an action, let the host do it; "
    report(problems, advice + "take the time as an argument.")


def test_outside_packages_stay_behind_their_door() -> None:
    problems = [
        f"{where(path, line)} imports {target}: only {' and '.join(ONLY_IN[root])} does"
        for path in [*SOURCES, *LAB_SOURCES]
        for line, target in imports(path)
        if (root := target.split(".")[0]) in ONLY_IN and room_of(module_name(path)) not in (*ONLY_IN[root], "lab")
    ]
    report(problems, "Call our own package that wraps it.")


def test_no_work_is_left_open() -> None:
    open_work = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK|NotImplemented" + r"Error)\b")
    problems = [
        f"{where(path, number)} {line.strip()[:80]}"
        for path in tracked("*.py", "*.cpp", "*.h", "*.md", "*.toml", "*.txt", "Makefile")
        for number, line in enumerate(text(path).splitlines(), 1)
        if open_work.search(line)
    ]
    report(problems, "Finish it, delete it, or open an issue: the tree holds no promises.")


def test_no_path_of_one_machine() -> None:
    machine = re.compile(r"(?<![\w.$])/(home|root|work|Users|tmp/w)/")
    problems = [
        f"{where(path, number)} {line.strip()[:80]}"
        for path in tracked("*.py", "*.cpp", "*.h", "*.md", "*.toml", "*.txt", "*.sh", "Makefile", "CMakeLists.txt")
        if path != Path(__file__)
        for number, line in enumerate(text(path).splitlines(), 1)
        if machine.search(line)
    ]
    report(problems, "Take the path as an argument, or derive it from __file__.")


def public_definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes without a ``_`` before their names, and the methods of classes without bases (an override
    inherits its docstring)."""
    for node in tree(path).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node
        if isinstance(node, ast.ClassDef) and not node.bases:
            members = (m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (m for m in members if not m.name.startswith("_") and not says_all(m))


def says_all(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method is one statement behind a name of several words, as ``forget_request`` or ``is_empty``: a
    docstring could only repeat the two."""
    return "_" in method.name and len(method.body) == 1


def test_public_names_have_docstrings() -> None:
    problems = [
        f"{where(path, node.lineno)} {node.name}"
        for path in [*SOURCES, *LAB_SOURCES]
        if not path.name.startswith("_") or path.name == "__init__.py"
        for node in public_definitions(path)
        if not ast.get_docstring(node)
        and not any("overload" in ast.dump(d) or "setter" in ast.dump(d) for d in node.decorator_list)
    ]
    silent = (path for path in [*SOURCES, *LAB_SOURCES] if text(path).strip() and not ast.get_docstring(tree(path)))
    problems += [f"{where(path)} (the module)" for path in silent]
    report(
        problems,
        "Say what it promises: shapes, dtypes, units, errors. One statement with a name of two words needs none.",
    )


def test_no_dead_files() -> None:
    own = [*SOURCES, *LAB_SOURCES]
    used = {target for path in [*own, *tracked("bench/*.py", "scripts/*.py")] for _, target in imports(path)}
    used |= {f"memserve.{m}" for p in SOURCES for m in re.findall(r"\"memserve\.([\w.]+)\"", text(p))}  # lazy imports
    used |= {name.rpartition(".")[0] for name in used}
    used |= ENTRY_POINTS | LOADED_BY_ENGINES | LAB_COMMANDS
    dead = [where(path) for path in own if path.name != "__init__.py" and module_name(path) not in used]
    report(dead, "Nothing imports it: use it or delete it. A test alone is not a user.")


def test_scripts_import_what_there_is() -> None:
    """No other test starts most of them."""
    problems = []
    for path in tracked("bench/*.py", "scripts/*.py"):
        for line, target in imports(path):
            if target.split(".")[0] in ("memserve", "memserve_lab") and not _is_there(target):
                problems.append(f"{where(path)}:{line}: {target}")
    report(problems, "It is gone: say what took its place, and start the script.")


def _is_there(target: str) -> bool:
    """Whether ``target`` is a module, or what one has."""
    module, _, name = target.rpartition(".")
    try:
        return importlib.util.find_spec(target) is not None or hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("memserve", "memserve_lab"):
            return True  # of an engine that is not installed here
        return importlib.util.find_spec(module) is not None and hasattr(importlib.import_module(module), name)


PERSONS = re.compile(r"\b(who|whoever|whom|nobody|somebody|everybody|someone|everyone)\b", re.IGNORECASE)
QUOTED = ("--kill-whom",)
"""Words of other programs, quoted."""
KNOWN_ELSEWHERE = re.compile(r"\(level \d|\brows? [MCSXP]\d{1,2}\b|\([MCSXP]\d{1,2}\)")


def docstring_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Of a module, its classes and its functions, with their numbers."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is None:
                continue
            first = node.body[0]
            yield from enumerate(text(path).splitlines()[first.lineno - 1 : first.end_lineno], first.lineno)


def worded(*pages: str) -> Iterator[tuple[Path, int, str]]:
    """Every line of the sources and of ``pages``."""
    for path in [*SOURCES, *LAB_SOURCES, *NATIVE, *tracked("src/*.pyi", *pages)]:
        yield from ((path, number, line) for number, line in enumerate(text(path).splitlines(), 1))


def test_processes_and_requests_are_no_persons() -> None:
    places = list(worded("README.md", "CONTRIBUTING.md", "docs/*.md", "bench/*.md"))
    places += [(path, number, line) for path in tracked("tests/*.py") for number, line in docstring_lines(path)]
    problems = [
        f"{where(path, number)} {line.strip()[:100]}"
        for path, number, line in places
        if PERSONS.search(line) and not any(word in line for word in QUOTED)
    ]
    report(problems, "Name the component: the prefill instance, the taker, a client, each member, no request.")


def test_time_arguments_carry_their_unit() -> None:
    problems = [
        f"{where(path, node.lineno)} {node.name}"
        for path in [*SOURCES, *LAB_SOURCES]
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(argument.arg == "now" for argument in (*node.args.args, *node.args.kwonlyargs))
    ]
    report(problems, "The time of an event is now_ns.")


OWN_WORDS = re.compile(
    r"\b(Knock|Doorkeeper|Strangers|Attendant|DialRouter|MeetPeer|PartFromPeer|BecomeNew|Reborn|Guests|Guest[A-Z]\w+"
    r"|AskingController|AskEvents|AskAttempts|AskAnswers|KeptAnswers|Tallies|RouterOrders|RouterNews|StoreLife|Greeter"
    r"|Crew|Referee|GateJudge|LiteralDevice|TruthDevice)\b(?!\")"
)
"""Names that this house had for what the field has a word for. On the wire, in quotes, they stay."""


PRONOUNS_MAX = {"src/memserve": 5, "lab/memserve_lab": 5, "bench": 10, "scripts": 15}
"""Of 1,000 names that are bound."""


def test_names_in_the_product_say_what_they_hold() -> None:
    """Few variables are pronouns or participles, few methods are one word, few constructors take many parameters."""
    for folder, most in PRONOUNS_MAX.items():
        share = float(house_figures.figures(folder)["pronouns and participles, of 1,000 bindings"])
        assert share < most, f"{folder}: {share} of 1,000 names are among {sorted(house_figures.PRONOUNS)}"
    figures = house_figures.figures("src/memserve")
    assert int(figures["methods of one word"].rstrip("%")) < 35, "a method says verb and object"
    assert int(figures["constructors with more than 6 parameters"]) <= 5, "parts that belong together are one object"


def test_things_have_the_names_of_the_field() -> None:
    problems = [
        f"{where(path, number)} {line.strip()[:100]}"
        for path, number, line in worded("docs/*.md", "README.md")
        if OWN_WORDS.search(line) and path.name != "HTTP.md"
    ]
    report(problems, "docs/GLOSSARY.md has the field's word: ProbeResult, ConnectRouter, RemoteRequests, ReplayBuffer.")


def test_sources_do_not_repeat_what_is_known_elsewhere() -> None:
    """The height of a room stands in ``ROOMS``, the requirements in a table of the README."""
    problems = [f"{where(p, n)} {line.strip()[:100]}" for p, n, line in worded() if KNOWN_ELSEWHERE.search(line)]
    report(problems, "Leave it out; or name a paper's section, or the reason.")


def test_skips_give_a_reason() -> None:
    """``skip("why")`` or ``...(reason="why")``; the bare decorators and calls without one are found by their text."""
    bare = re.compile(r"@pytest\.mark\.(skip|xfail)\s*$|pytest\.(mark\.)?(skip|xfail)\(\s*\)")
    problems = []
    for path in tracked("tests/*.py"):
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("skipif", "importorskip", "xfail") and not any(k.arg == "reason" for k in node.keywords):
                problems.append(where(path, node.lineno))
        problems += [where(path, n) for n, line in enumerate(text(path).splitlines(), 1) if bare.search(line)]
    report(problems, "A skipped test says why: reason='...'.")


def test_suppressed_checks_have_a_reason() -> None:
    """mypy looks at src and lab alone: elsewhere nothing has to be kept from it."""
    silenced = re.compile(r"#\s*(type: ignore|noqa)\b(?!.*\s#\s*\w|.*\()")
    problems = [
        f"{where(path, number)} {line.strip()[:80]}"
        for path in tracked("*.py")
        for number, line in enumerate(text(path).splitlines(), 1)
        if silenced.search(line)
        or ("# type: " + "ignore" in line and not (path.is_relative_to(SRC) or path.is_relative_to(LAB)))
    ]
    report(problems, "State the reason behind it: `# noqa: E731  # it reads like a formula`.")


def test_native_code_needs_no_torch_and_no_machine_flags() -> None:
    problems = [
        f"{where(path, number)} {line.strip()[:80]}"
        for path in [*NATIVE, ROOT / "CMakeLists.txt", *(SRC / f / "sources.cmake" for f in ("core", "kernels"))]
        for number, line in enumerate(text(path).splitlines(), 1)
        if re.search(r"#include\s*[<\"](torch|ATen|c10)/|-march=native", line)
    ]
    report(problems, "Take raw pointers instead of torch's types; choose the instruction set at load time.")


def test_git_ignores_what_an_editable_install_builds() -> None:
    """scikit-build configures an editable install in the root of the checkout."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed: it knows what is ignored")
    left = [
        ".ninja_deps", ".ninja_log", ".skbuild-info.json", "CMakeCache.txt", "CMakeFiles/rules.ninja", "CMakeInit.txt",
        "build.ninja", "cmake_install.cmake", "libnanobind-static-abi3-memserve.a",
    ]  # fmt: skip
    run = subprocess.run(["git", "-C", str(ROOT), "check-ignore", "--no-index", *left], capture_output=True, text=True)
    assert run.stdout.split() == left, "name the others in .gitignore"


def test_ruff_is_content() -> None:
    pytest.importorskip("ruff", reason="ruff (extra: lint) is not installed")
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format", "concise", "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"Run `ruff check --fix .`:\n{run.stdout[-3000:]}"
