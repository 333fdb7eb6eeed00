"""Prints the files of ``src/memserve`` that one streamed chat enters in a cluster of one prefill and one decode
instance, in order of first entry, and their number: ``python scripts/request_path.py [--src FOLDER]``.

Starts ``memserve serve --prefill 1 --decode 1`` with a profile function in each of its three processes, sends a request
that is not counted (a warm-up for everything made at first use), watches the idle cluster for a moment, and then
watches one request: from before it is sent until its answer's blocks are back at the prefill instance. A file counts if
a function of it is called that the process does not call while idle: heartbeats and timers do not count, files that a
request shares with them do. Imports do not count, nor does work inside dataclasses, msgspec and the native modules.
``--src``: another source tree, with native modules; further arguments go to ``memserve serve``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

SRC = Path(__file__).resolve().parent.parent / "src"
PROCESSES = ("router", "p1", "d1")
IDLE_S = 3.0
SETTLED_S = 2.0
"""The window stays open for this long after the last byte, while the answer's blocks return to the prefill instance."""
WATCH_S = 0.02

HOOK = """
import json, os, sys, threading, time

folder, package, entered, is_open = os.environ["REQUEST_PATH"], os.environ["REQUEST_PATH_OF"], {}, False

def profile(frame, event, _):
    if is_open and event == "call":
        code = frame.f_code
        if code not in entered and code.co_filename.startswith(package):
            entered[code] = time.monotonic_ns()

def watch():
    global is_open
    threading.setprofile(profile)
    while True:
        time.sleep(WATCH_S)
        wanted = os.path.exists(folder + "/open")
        if wanted and not is_open:
            entered.clear()
        elif is_open and not wanted:
            argv = sys.orig_argv
            process = argv[argv.index("--name") + 1] if "--name" in argv else "router"
            is_open = False
            with open(f"{folder}/{process}.part", "w") as out:
                found = {(code.co_filename[len(package):], code.co_qualname): when for code, when in entered.items()}
                json.dump([[file, name, when] for (file, name), when in found.items()], out)
            os.rename(f"{folder}/{process}.part", f"{folder}/{process}.json")
        is_open = wanted

if "memserve" in sys.orig_argv:
    threading.setprofile(profile)
    threading.Thread(target=watch, daemon=True).start()
    sys.setprofile(profile)
""".replace("WATCH_S", str(WATCH_S))
"""``sitecustomize`` of the processes: records the functions entered while the folder has a file named ``open``."""

Entered = dict[tuple[str, str], int]
"""File and function -> the time of its first entry."""


class Cluster:
    """A ``memserve serve`` of one prefill and one decode instance, each with the hook."""

    def __init__(self, folder: Path, src: Path, arguments: list[str]) -> None:
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join([str(folder / "hook"), str(src)])
        environment = {**os.environ, "PYTHONPATH": path, "REQUEST_PATH": str(folder)}
        environment["REQUEST_PATH_OF"] = str(src / "memserve") + os.sep
        shape = ["--prefill", "1", "--decode", "1", "--port", "0", "--metadata", str(folder / "metadata")]
        command = [sys.executable, "-m", "memserve", "serve", *shape, *arguments]
        self.folder = folder
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if ready_line := re.search(r"(\S+) at (http://\S+)/v1", line):
                self.model, self.address = ready_line[1], urlsplit(ready_line[2]).netloc
                return
        raise SystemExit("memserve serve ended before it was ready")

    def ask(self, text: str) -> int:
        """Streams one chat; returns the number of its chunks."""
        connection = http.client.HTTPConnection(self.address, timeout=120)
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "stream": True}
        body |= {"max_tokens": 80, "ignore_eos": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        chunks = [line for line in answer if line.startswith(b"data: ")]
        connection.close()
        if answer.status != 200 or chunks[-1].strip() != b"data: [DONE]":
            raise SystemExit(f"status {answer.status}: {chunks}")
        return len(chunks)

    def open(self) -> None:
        """Begins to record entered functions."""
        for process in PROCESSES:
            (self.folder / f"{process}.json").unlink(missing_ok=True)
        (self.folder / "open").touch()
        time.sleep(1.0)

    def close(self) -> dict[str, Entered]:
        """The functions that each process entered since ``open``."""
        (self.folder / "open").unlink()
        reports = [self.folder / f"{process}.json" for process in PROCESSES]
        deadline = time.monotonic() + 30
        while not all(report.exists() for report in reports):
            if time.monotonic() > deadline:
                raise SystemExit(f"no report from {[report.stem for report in reports if not report.exists()]}")
            time.sleep(WATCH_S)
        lists = {report.stem: json.loads(report.read_text()) for report in reports}
        return {
            process: {(file, name): entered_ns for file, name, entered_ns in entries}
            for process, entries in lists.items()
        }

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure(src: Path, arguments: list[str]) -> tuple[dict[str, Entered], dict[str, Entered]]:
    """The functions that each process enters in an idle cluster, and while one request is served."""
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(Path(name), src, arguments)
        try:
            cluster.ask("Say how a heron fishes. " * 20)
            time.sleep(SETTLED_S)
            cluster.open()
            time.sleep(IDLE_S)
            idle = cluster.close()
            cluster.open()
            cluster.ask("Tell me of the capital of France, and of its bridges. " * 12)
            time.sleep(SETTLED_S)
            return idle, cluster.close()
        finally:
            cluster.stop()


def request_only(idle: dict[str, Entered], busy: dict[str, Entered]) -> dict[str, Entered]:
    """The functions that a process enters only for a request."""
    return {
        p: {place: entered_ns for place, entered_ns in entries.items() if place not in idle[p]}
        for p, entries in busy.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="further arguments go to memserve serve")
    parser.add_argument("--src", type=Path, default=SRC, help="another source tree, with native modules")
    own_options, arguments = parser.parse_known_args()
    idle, busy = measure(own_options.src.resolve(), arguments)
    entered = request_only(idle, busy)
    first: dict[str, tuple[int, str]] = {}
    for entered_ns, file, function in sorted(
        (entered_ns, *place) for entries in entered.values() for place, entered_ns in entries.items()
    ):
        first.setdefault(file, (entered_ns, function))
    for number, (file, (_, function)) in enumerate(first.items(), 1):
        processes = " ".join(p for p in PROCESSES if any(file == entered_file for entered_file, _ in entered[p]))
        print(f"{number:3} {file:34} {function:46} {processes}")
    packages = Counter(file.split("/")[0] if "/" in file else "words" for file in first)
    lines = sum((own_options.src / "memserve" / file).read_text().count("\n") for file in first)
    print(f"{len(first)} files, {lines:,} lines: " + ", ".join(f"{name} {n}" for name, n in packages.most_common()))
    other_files = {file for entries in busy.values() for file, _ in entries} - set(first)
    print(f"entered meanwhile only for heartbeats and timers: {', '.join(sorted(other_files)) or 'none'}")


if __name__ == "__main__":
    main()
