"""vLLM's own tests of connectors, run with MemserveConnector beside a real store.

    .venv/bin/python scripts/vllm_suite.py --tests FOLDER --vllm PYTHON [--json FILE] [FILE.py ...]

FOLDER: the folder ``tests`` of vLLM's sources, of the version that PYTHON imports. Where it comes from: ``pip download
--no-deps --no-build-isolation --no-clean --no-binary vllm vllm==VERSION`` unpacks the sources in ``TMPDIR`` and may
fail afterwards. Nothing of it is changed: the files are copied, and their helpers are told to take this connector
wherever they take vLLM's default one. Where a test has KV come from another engine, it is put into the store.

Printed for each test: passed, with the connector in each step; passed with the test's own mock put in its place once
vLLM had made it; passed without one (the test makes none); not applied, and why; FAILED. The exit status is 1 after a
failure, 0 else, also when FOLDER is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNIT = Path("v1/kv_connector/unit")
FILES = (
    "test_kv_connector_lifecycle.py", "test_backwards_compatibility.py", "test_multi_connector.py",
    "test_remote_prefill_lifecycle.py", "test_remote_decode_lifecycle.py", "test_output_aggregator.py",
    "test_cache_pollution_prevention.py", "test_error_propagation.py", "test_hma_auto_config.py",
    "test_kv_load_failure_recovery.py", "test_invalid_blocks_correctness.py", "test_mooncake_store_scheduler.py",
    "test_mooncake_store_worker.py", "test_mooncake_store_layout.py",
)  # fmt: skip
SUITE = "MEMSERVE_VLLM_SUITE"
"""The environment variable that tells the part inside pytest what to use."""
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "ffn_dim": 3072, "word_embed_proj_dim": 768, "vocab_size": 50272,
    "max_position_embeddings": 2048, "torch_dtype": "float16", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
"""The configuration of the model that the tests name; none of them computes with it."""
WAIT_S = 20.0

_GROUPS = "the store's KV for a model with several groups, of which memserve keeps none"
_FREED = "blocks of a request that has ended wait for their reader; memserve has copied them by then, and keeps none"
NOT_APPLIED = {
    "test_remote_prefill_lifecycle.py::test_basic_lifecycle": "half a block is loaded, too; memserve has whole blocks",
    "test_remote_prefill_lifecycle.py::test_no_spurious_prefix_caching": "a request that does not name its sender "
    "must not find its KV; memserve's store is for all requests",
    "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin[different-block-sizes]": (
        _GROUPS
    ),
    "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin[multiple-groups]": _GROUPS,
    "test_remote_prefill_lifecycle.py::test_full_block_prompt": "the whole prompt is loaded, and its last token "
    "computed again; memserve loads whole blocks and leaves at least one token to compute",
    "test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba": "of Nixl and a model with states",
    "test_remote_decode_lifecycle.py::test_basic_lifecycle": _FREED,
    "test_remote_decode_lifecycle.py::test_short_prompt_lifecycle": _FREED,
    "test_remote_decode_lifecycle.py::test_prefix_cache_lifecycle": _FREED,
    "test_remote_decode_lifecycle.py::test_abort_during_kv_transfer": _FREED,
}
REASONS = {
    "a block that the store has lost would end its request": "policy `fail`, which memserve refuses at the start",
    "huggingface": "needs a model that is not here",
    "HFValidationError": "needs a model that is not here",
    "Can't load": "needs a model that is not here",
    "LocalEntryNotFound": "needs a model that is not here",
    "ModuleNotFoundError: No module named 'nixl": "needs nixl",
    "ModuleNotFoundError: No module named 'mooncake": "needs mooncake",
    "NIXL is not available": "needs nixl",
    "fixture 'caplog_vllm' not found": "needs a fixture of vLLM's own conftest",
}
"""Of what an error says: why a test cannot run here."""


# -- within pytest


class Suite:
    """The plugin: helpers of vLLM's tests make this connector, and the store has what others would have sent."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.results: dict[str, list[str]] = {}
        self._made: list[Any] = []
        self._tests = 0
        self._used = False
        """By a step of vLLM's scheduler or worker."""

    def install(self) -> None:
        """Before a test's module takes the helpers."""
        import tests.v1.kv_connector.unit.utils as utils

        from memserve.integrations.vllm import MemserveConnector, register

        register()
        self._config, self._scheduler = utils.create_vllm_config, utils.create_scheduler
        utils.create_vllm_config = self.create_vllm_config
        utils.create_scheduler = self.create_scheduler
        utils.ExampleConnector = self.in_place_of_the_example
        init = MemserveConnector.__init__

        def counted(connector: Any, *positional: Any) -> None:
            init(connector, *positional)
            self._made.append(connector)

        MemserveConnector.__init__ = counted
        for name in ("build_connector_meta", "bind_connector_metadata"):
            setattr(MemserveConnector, name, self._noted(getattr(MemserveConnector, name)))

    def _noted(self, method: Any) -> Any:
        def noted(*positional: Any) -> Any:
            self._used = True
            return method(*positional)

        return noted

    def create_vllm_config(self, *positional: Any, **options: Any) -> Any:
        """vLLM's default connector is Nixl's."""
        options.setdefault("model", self.told["model"])
        if options.get("kv_connector", "NixlConnector") == "NixlConnector":
            options |= {"kv_connector": "MemserveConnector", "kv_role": "kv_both"}
            options["kv_connector_extra_config"] = dict(self.told["options"])
            options.setdefault("kv_load_failure_policy", "recompute")
        return self._config(*positional, **options)

    def in_place_of_the_example(self, config: Any, role: Any, caches: Any) -> Any:
        """For the test that counts the calls of vLLM's example."""
        from memserve.integrations.vllm import MemserveConnector

        config.kv_transfer_config.kv_connector_extra_config = dict(self.told["options"])
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
        return MemserveConnector(config, role, caches)

    def create_scheduler(self, *positional: Any, **options: Any) -> Any:
        """Its connector is told what a worker would tell it, and finds what is sent from elsewhere."""
        from memserve.integrations.vllm import MemserveConnector

        scheduler = self._scheduler(*positional, **options)
        connector = scheduler.connector
        if not isinstance(connector, MemserveConnector) or not connector._scheduler_sides():
            return scheduler
        names = self._greeted(connector)
        add, matched = scheduler.add_request, connector.get_num_new_matched_tokens

        def add_request(request: Any) -> None:
            if (request.kv_transfer_params or {}).get("do_remote_prefill"):
                self._sent(connector, names, request)
            add(request)

        def waited(request: Any, computed: int) -> tuple[int | None, bool]:
            """The tests have one step in which to find KV: the look-up is waited for."""
            end_s = time.monotonic() + WAIT_S
            while (match := matched(request, computed))[0] is None and time.monotonic() < end_s:
                time.sleep(0.001)
            return match

        scheduler.add_request, connector.get_num_new_matched_tokens = add_request, waited
        return scheduler

    def _greeted(self, connector: Any) -> Any:
        import torch

        from memserve.integrations.store_cache import namespace
        from memserve.integrations.vllm.connector import MemserveHandshake
        from memserve.integrations.vllm.lookups import RankNames
        from memserve.integrations.vllm.memory import HostMemory

        layout = HostMemory({"layer": torch.zeros(2, 1, 16, 2)}, 2).layout
        names = RankNames(namespace("vllm", test=self._tests, process=os.getpid()), layout)
        connector.set_xfer_handshake_metadata({0: MemserveHandshake(((names,),))})
        return names

    def _sent(self, connector: Any, names: Any, request: Any) -> None:
        """What the other engine of the test has computed."""
        import numpy as np

        from memserve.integrations.store_cache import Value

        page = np.zeros(names.layout.nbytes, np.uint8)
        pieces = [(page.ctypes.data, page.nbytes)]
        values = [
            Value(names.name(bytes(block_hash)), pieces, names.layout.digest) for block_hash in request.block_hashes
        ]
        assert all(connector._parts[0].pool.put(values)), "the store has not taken what the test needs"

    # -- what came of it

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._tests += 1
        self._made.clear()
        self._used = False
        yield
        for connector in self._made:
            connector.shutdown()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            name = item.nodeid.rpartition("/")[2]
            reason = NOT_APPLIED.get(name) or NOT_APPLIED.get(name.partition("[")[0])
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.results[report.nodeid.rpartition("/")[2]] = _judged(str(report.longrepr))

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.results[name] = ["not applied", why.removeprefix("Skipped: ")]
        elif report.failed:
            self.results.setdefault(name, _judged(str(report.longrepr)))
        elif report.when == "call":
            outcome = "passed" if self._used else "passed, mock" if self._made else "passed without one"
            self.results[name] = [outcome, ""]

    def pytest_sessionfinish(self) -> None:
        Path(self.told["results"]).write_text(json.dumps(self.results))


def _judged(error: str) -> list[str]:
    for mark, reason in REASONS.items():
        if mark in error:
            return ["not applied", reason]
    return ["FAILED", "\n".join(error.splitlines()[-12:])]


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest's: ``-p vllm_suite``."""
    if SUITE in os.environ:
        suite = Suite(json.loads(os.environ[SUITE]))
        suite.install()
        config.pluginmanager.register(suite)


# -- around it


def copied(tests: Path, folder: Path, files: list[str]) -> list[Path]:
    """Packages with the files, and with the helpers that they import."""
    target = folder / "tests" / UNIT
    target.mkdir(parents=True)
    for helper in ("v1/attention/utils.py", "v1/core/utils.py", "utils.py"):
        if (tests / helper).is_file():
            (folder / "tests" / helper).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tests / helper, folder / "tests" / helper)
    for name in ("utils.py", "conftest.py"):
        if (tests / UNIT / name).is_file():
            shutil.copy(tests / UNIT / name, target / name)
    copies = [shutil.copy(tests / UNIT / name, target / name) for name in files if (tests / UNIT / name).is_file()]
    for package in (folder / "tests").rglob("*/"):
        (package / "__init__.py").touch()
    (folder / "tests" / "__init__.py").touch()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cpu_test: of vLLM's\n")
    return [Path(path) for path in copies]


def run(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The results by test."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from served_store import ServedStore

    (folder / "opt").mkdir()
    (folder / "opt" / "config.json").write_text(json.dumps(OPT))
    files = copied(options.tests, folder, options.files or list(FILES))
    results = folder / "results.json"
    with ServedStore(folder, dram="256MiB") as store:
        pool_options = {"pool": store.address, "secret_file": str(store.secret_file), "timeout_s": WAIT_S}
        plan = {"model": str(folder / "opt"), "options": pool_options, "results": str(results)}
        environment = dict(
            os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT / "scripts")]),
        )  # fmt: skip
        environment[SUITE] = json.dumps(plan)
        command = [options.vllm, "-m", "pytest", "-q", "-p", "vllm_suite", "-p", "no:cacheprovider", "--rootdir"]
        command += [str(folder), "-c", str(folder / "pytest.ini"), *map(str, files)]
        log = (folder / "pytest.log").open("w+")
        subprocess.run(command, env=environment, cwd=folder, stdout=log, stderr=log, timeout=options.timeout_s)
    if not results.exists():
        raise SystemExit(f"pytest did not come to its end:\n{(folder / 'pytest.log').read_text()[-3000:]}")
    outcomes: dict[str, list[str]] = json.loads(results.read_text())
    file_names = {file.name for file in files}
    files_missing = {
        name: ["not applied", "this version of vLLM has no such file"] for name in FILES if name not in file_names
    }
    return outcomes | ({} if options.files else files_missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="vLLM's folder of tests")
    parser.add_argument("--vllm", default=sys.executable, help="a Python with vLLM of the same version, and pytest")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("files", nargs="*", help="instead of all of them")
    options = parser.parse_args()
    if not (options.tests / UNIT / "utils.py").is_file():
        print(f"skipped: no {UNIT / 'utils.py'} in {options.tests}; the text of this script says where to get it")
        return
    with tempfile.TemporaryDirectory() as folder:
        results = run(options, Path(folder))
    for name, (outcome, why) in sorted(results.items()):
        print(f"{outcome:<18} {name}" + (f": {why}" if why else ""))
    counts = Counter(outcome for outcome, _ in results.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(1 if counts["FAILED"] else 0)


if __name__ == "__main__":
    main()
