"""Options of the test run."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import settings

from forked_processes import executed, fork_processes
from lean_imports import leave_compiler_out
from memserve.system.memory import collect_rarely

# Before torch, here and in all children. Tests that need several threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny, and test processes share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that spins takes a core from another test

settings.register_profile("memserve", deadline=None)  # speed is measured in bench/, never in tests: machines are busy
settings.load_profile("memserve")


_AUTHORITIES = (os.environ.get("SSL_CERT_FILE"), certifi.where())
_new_context = ssl.create_default_context
_context_of = functools.cache(lambda cafile: _new_context(cafile=cafile))


def _default_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, *, cafile: str | None = None, **more: Any
) -> ssl.SSLContext:
    """Every client of httpx reads the certificates of all public authorities anew: 24 ms of CPU, and a test that waits
    asks a server fifty times a second. Here they are read once."""
    if cafile in _AUTHORITIES and purpose is ssl.Purpose.SERVER_AUTH and not more:
        return _context_of(cafile)
    return _new_context(purpose, cafile=cafile, **more)


ssl.create_default_context = _default_context


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--data-sets DIR``: the folder of data sets that some tests hold the readers against; without it they skip.

    ``--matrix-cells N --matrix-seed S --matrix-geometry NAME``: how much of the failure matrix on real processes is
    run, which part, and with whose KV.

    ``--disk-kills N``: how often the store's disks are killed in the middle of everything; 900 take a few minutes.

    ``--store-kills N``: how often real processes beside a store are killed; 100 take ten minutes.
    """
    parser.addoption("--data-sets", type=Path, default=None, help="folder of data sets (traces/, conversations/, ...)")
    parser.addoption("--axe", type=Path, default=None, help="axe.min.js of the npm package axe-core")
    parser.addoption("--matrix-cells", type=int, default=2, help="cells of the failure matrix to run")
    parser.addoption("--matrix-seed", type=int, default=2, help="which ones")
    parser.addoption("--matrix-geometry", default="mqa", help="the model's KV, a name in support/geometries.py")
    parser.addoption("--disk-kills", type=int, default=60, help="kills of the store's literal disks")
    parser.addoption("--store-kills", type=int, default=2, help="kills of real processes beside a store")


def pytest_configure() -> None:
    """Processes of memserve are forked from one that has imported what they need. Ctrl-C and SIGHUP are heard: in the
    background of a shell, or under nohup, a process ignores them, and its children would, too. Garbage is looked
    for as rarely as in processes of ours. At the end torch's objects are not taken apart: a second of CPU in each
    worker."""
    fork_processes()
    collect_rarely()
    atexit.register(gc.freeze)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


# -- garbage: the objects of torch, transformers and the tests themselves stay. To search them all takes a fifth of a
# -- second and more, and every engine that is built has it done


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and made here stays. Torch's compiler is left out as in all processes of ours: 2 s of CPU."""
    gc.disable()
    if not session.config.getoption("numprocesses", None):  # this process collects
        leave_compiler_out()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_searched() -> None:
    """Garbage of the file before is freed; what lives is put aside. A file's own objects are searched as ever."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def executed_processes() -> Iterator[None]:
    """For a file about what only an executed process has: its own imports, its environment in ``/proc``, its whole
    end."""
    with executed():
        yield


@pytest.fixture(scope="session")
def data_sets(pytestconfig: pytest.Config) -> Path:
    """The folder of data sets, or a skip."""
    folder: Path | None = pytestconfig.getoption("--data-sets")
    if folder is None:
        pytest.skip("no --data-sets folder was named")
    return folder


@pytest.fixture(autouse=True)
def a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share the machine. What they print, and whether a profile is saved, must not depend on the others."""
    monkeypatch.setattr("memserve.system.process.CpuWatch.others_cores", lambda watch: None)


# -- several workers (pytest-xdist, `make test`): a file is one's

LONG = (
    "process/model/test_divided",
    "process/transport/test_net_hosts",
    "stories/lab/sim/fuzz/test_whole_world",
    "unit/api/test_model_answers",
    "process/test_windows",
    "unit/model/attention/test_windows_apart",
    "process/test_load_memory",
    "process/journal/test_etcd",
    "unit/model/states/test_served",
    "unit/model/test_stored_cuts",
    "unit/model/loading/formats/test_folders",
    "process/test_latents",
    "twins/instance/test_cluster_random",
    "process/test_routers",
    "stories/lab/sim/fuzz/test_fuzz",
    "unit/model/test_layered",
    "stories/lab/experiments/test_agents",
    "stories/lab/sim/fuzz/test_layered",
    "process/test_store_processes",
    "process/test_cluster_families",
    "unit/model/test_gpu_workers",
    "unit/model/states/test_stored_weights",
    "process/lab/bench/test_serve",
    "process/test_states",
    "stories/lab/sim/replay/test_rates",
    "twins/instance/test_random",
    "twins/instance/test_layered",
    "process/test_keyed_answers",
    "twins/instance/test_states",
    "process/test_failure_matrix",
    "process/lab/bench/test_endings",
    "process/transport/test_named_store",
    "unit/model/attention/test_triton_attention",
    "stories/test_lower_dtype",
    "unit/system/test_lean_torch",
    "unit/model/test_device",
    "unit/model/states/test_divided",
    "unit/test_llm_lossless",
    "process/cli/test_commands",
    "stories/lab/sim/test_gate_pins",
    "process/test_joint_stores",
    "process/test_store_hostile",
    "process/test_layerwise",
    "process/cli/test_doctor_cluster",
    "stories/lab/sim/replay/test_scaling",
    "unit/model/test_sharding",
    "unit/transport/test_gpu_parts",
)
"""Files that take more than half a minute beside four others, the longest first, so that none is left over at the end,
when the other workers have nothing more to do; and one that converts the bundled model where that was never done."""


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def _file(nodeid: str) -> str:
    """The file's path below ``tests``, without its ending."""
    return nodeid.split("::", 1)[0].removeprefix("tests/").removesuffix(".py")


class _FromAnotherFile(pytest.Dir):
    """A folder whose files are imported from another one on in each worker: the first to import a file compiles it for
    all. In the same order at the same time each worker would compile all of them, 6 s of CPU in a new clone."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        children = list(super().collect())
        first = len(children) * WORKER // WORKERS
        return children[first:] + children[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return _FromAnotherFile.from_parent(parent, path=path) if WORKERS > 1 else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The same order in all workers. A file's tests keep theirs."""
    place = {name: at for at, name in enumerate(LONG)}
    if WORKERS > 1:
        items.sort(key=lambda item: _file(item.nodeid))
    items.sort(key=lambda item: place.get(_file(item.nodeid), len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests keep their order and share what its fixtures start."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _file(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Any]]:
    """Builds worlds of the cluster machine; at the end each must be repeatable and hold no work of ended requests."""
    from cluster_world import World

    worlds: list[World] = []

    def build(*instances: Any, **config: Any) -> World:
        worlds.append(World(instances, **config))
        return worlds[-1]

    yield build
    for world in worlds:
        world.check_repeatable()
        if all(client.done for client in world.clients.values()):
            assert world.cluster.stats().requests_live == 0
            loads = world.cluster._loads
            assert not any(any(loads.own_of(number)) for number in range(len(loads)))
