"""Checks everything of memserve that needs a CUDA device, and times it.

    python scripts/gpu_check.py [--report FILE.json] [--only PART ...] [--limit-s 570]

Every part is a process of its own: one that breaks, hangs or loses its device is written down with its error, and the
next one runs. FILE.json, and FILE.md made from it, are written again after every row: no end loses what was found.
Without a CUDA device what can run without one does (kernels interpreted, a tiny model served by the CPU); the rest says
so. Needs torch, triton, transformers and memserve's own dependencies, and no network; what is missing is taken from the
checkout's ``.venv``, and missing native modules are built where there are a compiler, cmake and nanobind.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import IO

from gpu_report import (
    BROKE,
    CODED,
    DONE,
    KINDS,
    NO_DEVICE,
    NOT_RUN,
    RUNNING,
    NotRun,
    Report,
    Row,
    counts,
    figure,
    has_device,
    need_device,
    verdict,
)

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "native": "gpu_check:native", "device": "gpu_check:device",
    "kernels": "gpu_attention:kernels", "engine": "gpu_serving:one_engine", "cluster": "gpu_serving:clusters",
    **{kind: f"gpu_attention:codes:{kind}" for kind in CODED}, "coded": "gpu_serving:coded",
    "graphs": "gpu_serving:graphs", "tiers": "gpu_serving:tiers", "seals": "gpu_bytes:seals",
    **{kind: f"gpu_serving:one_kind:{kind}" for kind in KINDS}, "workers": "gpu_serving:workers",
    "quantised": "gpu_quantised:kernels", "8b": "gpu_models:eight_b", "4bit": "gpu_quantised:four_bits",
    "copies": "gpu_bytes:copies", "pull": "gpu_bytes:pull", "vllm": "gpu_vllm:staged",
    "attention": "gpu_attention:speed", "1b": "gpu_models:one_b", "settings": "gpu_attention:settings",
}  # fmt: skip
"""Module, function and argument of each part, in their order: what is right first, then what is fast."""
FIRST, TIMED = ("native", "device"), ("8b", "4bit", "copies", "pull", "vllm", "attention", "1b", "settings")
"""Parts that run alone: those that all others need, and those that are timed."""
PART_S, LIMIT_S = 180.0, 540.0
JOBS = max(1, (os.cpu_count() or 1) // 2)
"""Parts side by side: each has a process that computes, and compiles kernels."""
LEAST_S = 5.0
"""A part that would have less is not begun."""
ROW = "row "
"""How a part's line begins that is a row."""
ERROR_LINES = 30


# -- two parts that are about the machine alone


def native() -> Iterator[Row]:
    """The native modules, built here if they are missing."""
    modules_missing = [name for name in ("_core", "_kernels") if importlib.util.find_spec(f"memserve.{name}") is None]
    if modules_missing:
        build()
    for name in ("_core", "_kernels"):
        module = import_module(f"memserve.{name}")
        yield {"what": name, "ok": True, "built_now": name in modules_missing, "file": Path(str(module.__file__)).name}


def build() -> None:
    """Build them in place. Raises :class:`RuntimeError` where there is nothing to build with."""
    package = importlib.util.find_spec("cmake")
    carried = Path(str(package.origin)).parent / "data" / "bin" / "cmake" if package else Path()
    cmake = shutil.which("cmake") or (str(carried) if carried.is_file() else None)
    if cmake is None or importlib.util.find_spec("nanobind") is None:
        hint = "carry src/memserve/*.so of the same Python, or the packages cmake and nanobind in .venv"
        raise RuntimeError(f"the native modules are missing, and cmake or nanobind are, too: {hint}")
    folder = str(ROOT / "build" / "gpu_check")
    options = ["-DMEMSERVE_INPLACE=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in ([cmake, "-S", str(ROOT), "-B", folder, *options], [cmake, "--build", folder, "--parallel"]):
        build_run = subprocess.run(command, capture_output=True, text=True)
        if build_run.returncode:
            raise RuntimeError(f"{' '.join(command[:2])} failed:\n{(build_run.stdout + build_run.stderr)[-3000:]}")


def device() -> Iterator[Row]:
    """What was found, and whether processes may share its memory."""
    need_device()
    from gpu_bytes import copy_gb_s

    from memserve.system.gpus import device_here
    from memserve.transport.links.gpu_memory import export_problem

    yield {"what": "copies inside the device", "gb_s": copy_gb_s()}
    yield {"what": "which device memserve takes", "said": device_here("auto").why}
    yield {"what": "whether it can be shared", "said": export_problem() or "yes"}


# -- a part, in a process of its own


def run_here(part: str) -> int:
    """Run one part, given as module and function, and print its rows."""
    try:
        say(where_this_runs())
        if not has_device():
            os.environ["TRITON_INTERPRET"] = "1"
        module, function, *arguments = part.split(":")
        for row in getattr(import_module(module), function)(*arguments):
            say(row)
    except NotRun as error:
        say({"not_run": str(error)})
    except Exception:
        say({"broke": traceback.format_exc()})
    return 0


def say(row: Row) -> None:
    print(ROW + json.dumps(row, default=str), flush=True)


def where_this_runs() -> Row:
    """The device's name and the versions of what runs on it."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    device_name = f"a CPU ({NO_DEVICE})"
    if has_device():
        import torch

        device_name, versions["cuda"] = torch.cuda.get_device_name(), str(torch.version.cuda)
    return {"device": device_name, "versions": versions}


# -- all parts, from outside


def run_part(report: Report, part: str, limit_s: float) -> None:
    """Run one part in a process of its own, for at most ``limit_s``."""
    report.turn(part, RUNNING, "cut off here")
    began = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--part", PARTS[part]]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=environment()
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            status, why = take_rows(report, part, process)
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if late.is_set():
            status, why = BROKE, f"it took more than {limit_s:.0f} s, and was ended"
        elif code:
            errors.seek(0)
            last = "\n".join(errors.read().splitlines()[-ERROR_LINES:])
            status, why = BROKE, f"its process ended with {code}\n{last}"
    report.turn(part, status, why, time.monotonic() - began)
    print(f"{part}: {status} in {time.monotonic() - began:.1f} s{': ' * bool(why)}{why}", flush=True)


def take_rows(report: Report, part: str, process: subprocess.Popen[str]) -> tuple[str, str]:
    """Write down what a part says, line by line; returns how it ended, and why."""
    status, why = DONE, ""
    output: IO[str] | None = process.stdout
    assert output is not None
    for line in output:
        if not line.startswith(ROW):
            continue
        row = json.loads(line.removeprefix(ROW))
        if "broke" in row:
            status, why = BROKE, row["broke"]
        elif "not_run" in row:
            status, why = DONE if report.record["parts"][part]["rows"] else NOT_RUN, row["not_run"]
        else:
            report.add(part, row)
            if "versions" not in row:
                print(
                    f"    {part}:",
                    verdict(row) or "-",
                    "  ".join(f"{key} {figure(row[key])}" for key in row),
                    flush=True,
                )
    return status, why


def environment() -> dict[str, str]:
    """Of a part: this checkout, and behind what is installed, what its ``.venv`` has for the same Python."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    carried = ROOT / ".venv" / "lib" / version / "site-packages"
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", ""), *site_paths(), str(carried)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def site_paths() -> list[str]:
    """Where packages are installed already: these go first."""
    return [path for path in sys.path if path.endswith("-packages")]


def commit() -> str:
    """Of the checkout, and whether it was changed; "unknown" where git is missing."""
    try:
        ask = ["git", "-C", str(ROOT)]
        head = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*ask, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head[:12] + (" with changes" if changed else "")


def main() -> int:
    """Run the parts; the exit status is 1 if one broke, a check failed or a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="write FILE.json and FILE.md")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--jobs", type=int, default=JOBS, help="parts that run side by side where none is timed")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all parts together")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--own-pages", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own_pages:
        from gpu_bytes import own_pages

        own_pages()
        return 0
    if args.part:
        return run_here(args.part)
    began = time.monotonic()
    names = [name for name in PARTS if name in (args.only or PARTS)]
    report = Report(names, commit(), datetime.now(UTC).isoformat(timespec="seconds"), args.report)

    def run(name: str) -> None:
        left_s = args.limit_s - (time.monotonic() - began)
        if left_s < LEAST_S:
            report.turn(name, NOT_RUN, f"the {args.limit_s:.0f} s of all parts were over")
            return
        run_part(report, name, min(PART_S, left_s))
        report.record["seconds"] = time.monotonic() - began

    for name in [name for name in names if name in FIRST]:
        run(name)
    if report.record["parts"].get("native", {}).get("status") != BROKE:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, [name for name in names if name not in FIRST + TIMED]))
        for name in [name for name in names if name in TIMED]:
            run(name)
    report.write()
    number = counts(report.record)
    print(", ".join(f"{count} {word}" for word, count in number.items()))
    return 1 if number["failed"] or number["missed"] or number["broke"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
