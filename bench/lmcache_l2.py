"""memserve's L2 adapter beside LMCache's own, in LMCache's own tool: `lmcache bench l2`.

    python bench/lmcache_l2.py [--python LMCACHE_PYTHON] [--rounds 5] [--quick] [--adapters NAME,NAME] [--json FILE]
    python bench/lmcache_l2.py --python LMCACHE_PYTHON --tests FOLDER

LMCache 0.5.6 need not be in this environment: `--python` names the interpreter of another one, which gets this source
by PYTHONPATH and needs numpy, msgspec and pyzmq for it; a torch for CPUs is enough. Where there is no LMCache, nothing
is measured and the exit status is 0.

Each round runs the tool once for each adapter, one after the other, another one first each time. The tool stores, looks
up and loads with one thread that submits and waits, verifies what came back (`--no-skip-verify`), and reports MB/s. A
figure is the median over rounds of the tool's averages. memserve: a `memserve store` that this script starts, 1 GiB, on
this host; each value is compared with checksums. fs, fs_native: files, in a folder of --folder (default: the temporary
one, so the page cache) and, with (shm), in /dev/shm; raw_block: one file there, past the page cache where it lies on a
disk (O_DIRECT); it needs the package lmcache-rust-raw-block-io. None of them compares anything.

``--tests FOLDER`` runs LMCache's own tests of plugin adapters instead, with memserve's adapter and a store in the place
of their example: FOLDER holds `test_lmc_external_l2_adapter.py` of LMCache's repository, whose packages have no tests.
Its test of eviction is left out: it asserts the example's order and a capacity of 10 KB, where the store has its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.flags import Commas, options, parts_of, save
from harness.rounds import medians, turns
from harness.tables import show

from served_store import ServedStore

SOURCES = ROOT / "src"
TIMEOUT_S = 900
SIZES = ((256, 64), (1024, 32), (4096, 16))
"""KiB of an object, objects a task."""
OPERATIONS = ("store", "load", "lookup")
ADAPTERS = ("memserve", "fs", "fs (shm)", "fs_native", "fs_native (shm)", "raw_block", "raw_block (shm)")
GIB = 1 << 30
EXAMPLE = """
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from memserve.integrations.lmcache import MemserveL2


class InMemoryL2AdapterConfig(L2AdapterConfigBase):
    @classmethod
    def from_dict(cls, given):
        return cls()

    @classmethod
    def help(cls):
        return ""


class InMemoryL2Adapter(MemserveL2):
    def __init__(self, config, l1_memory_desc=None):
        super().__init__({params!r})
"""


def main() -> int:
    args = options(
        __doc__, python=(sys.executable, "interpreter with LMCache"), rounds=5, adapters=Commas(*ADAPTERS),
        folder=(Path, "where the adapters of LMCache keep their files"), quick={"rounds": 1},
        tests=(Path, "folder with LMCache's tests of plugin adapters"),
    )  # fmt: skip
    if packages_missing := absent(args.python):
        print(f"skipped: {packages_missing}")
        return 0
    if args.tests is not None:
        return run_tests(args.python, args.tests)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for size in SIZES[:1] if args.quick else SIZES:
            names = list(parts_of(args.adapters, dict.fromkeys(ADAPTERS)))
            for name, figures in measure(args.python, size, names, args.rounds, Path(disk), Path(memory)).items():
                rows.append({"adapter": name, "kib": size[0], "count": size[1], **figures})
    print(f"{args.rounds} rounds; MB/s, look-ups: thousand keys/s")
    show(rows, {"adapter": "{adapter}", "objects a task": "{count} of {kib} KiB"}
         | {name: f"{{{name}:,.0f}}" for name in OPERATIONS})  # fmt: skip
    save(args, rows)
    return 0


def absent(python: str) -> str | None:
    """Why there is nothing to measure; None: there is."""
    program = "import lmcache.cli.main, memserve.integrations.lmcache"
    run = subprocess.run([python, "-c", program], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    if run.returncode == 0:
        return None
    return f"{python} has no LMCache that can be loaded ({(run.stderr.strip().splitlines() or ['no word'])[-1]})"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCES), "LMCACHE_LOG_LEVEL": "ERROR"}


def measure(
    python: str, size: tuple[int, int], names: list[str], rounds: int, disk: Path, memory: Path
) -> dict[str, dict[str, float]]:
    """Each adapter's figures. Every run of the tool starts with nothing stored."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _, name in turns(rounds, names):
        rows[name].append(once(python, name, size, disk, memory))
    return {name: medians(figures) for name, figures in rows.items()}


def once(python: str, name: str, size: tuple[int, int], disk: Path, memory: Path) -> dict[str, float]:
    if name == "memserve":
        with tempfile.TemporaryDirectory() as folder, ServedStore(Path(folder), dram="1GiB") as store:
            params = {"pool": store.address, "secret_file": str(store.secret_file), "timeout_s": 60}
            return run_tool(python, size, plugin(params), name)
    kind, _, backend = name.partition(" ")
    folder = (memory if backend else disk) / "l2"
    folder.mkdir()
    try:
        place = raw_block(folder, size, bool(backend)) if kind == "raw_block" else {"base_path": str(folder)}
        return run_tool(python, size, {"type": kind, **place}, name)
    finally:
        shutil.rmtree(folder)


def raw_block(folder: Path, size: tuple[int, int], in_memory: bool) -> dict[str, Any]:
    """As large as the store's memory."""
    path = folder / "device"
    with path.open("wb") as file:
        file.truncate(GIB)
    slot = {"slot_bytes": size[0] * 1024 + 4096, "meta_total_bytes": 16 << 20}
    return {"device_path": str(path), "use_odirect": not in_memory, **slot}


def run_tests(python: str, folder: Path) -> int:
    """LMCache's file, which imports its example by name: here that name is memserve's adapter."""
    with tempfile.TemporaryDirectory() as temporary, ServedStore(Path(temporary), dram="256MiB") as store:
        params = {"pool": store.address, "secret_file": str(store.secret_file), "timeout_s": 30}
        (Path(temporary) / "lmc_external_l2_adapter.py").write_text(EXAMPLE.format(params=params))
        paths = {"PYTHONPATH": f"{temporary}:{SOURCES}"}
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not fifo_eviction", str(folder)]
        return subprocess.run(command, env={**environment(), **paths}, timeout=TIMEOUT_S).returncode


def plugin(params: dict[str, Any]) -> dict[str, Any]:
    adapter_options = {"module_path": "memserve.integrations.lmcache", "class_name": "MemserveL2"}
    return {"type": "plugin", **adapter_options, "adapter_params": params}


def run_tool(python: str, size: tuple[int, int], spec: dict[str, Any], name: str) -> dict[str, float]:
    kib, count = size
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [python, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(spec), "--quiet"]
        command += ["--num-keys", str(count), "--data-size-kb", str(kib), "--rounds", "5", "--no-skip-verify"]
        command += ["--l1-align-bytes", "4096"]
        command += ["--lookup-max-hit-rate", "1", "--format", "json", "--output", str(answer)]
        run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        if run.returncode or not answer.is_file():
            raise SystemExit(f"{name}: lmcache bench l2 ended with {run.returncode}\n{run.stderr[-2000:]}")
        metrics = json.loads(answer.read_text())["metrics"]
    results = {item["operation"].lower(): item for key, item in metrics.items() if key.startswith("op_")}
    for operation, item in results.items():
        expected = item.get("expected_hit_keys", item["total_keys"])
        if item["rounds_timed_out"] or item["total_success"] != expected:
            raise SystemExit(f"{name}: {operation} found {item['total_success']} of {expected}")
    figures = {name: item["throughput_avg_mbps"] for name, item in results.items() if name != "lookup"}
    return {**figures, "lookup": results["lookup"]["ops_per_sec_avg"] / 1000}


if __name__ == "__main__":
    sys.exit(main())
