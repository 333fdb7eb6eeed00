"""The example package of plug-ins, installed as users install it: each of the four does its work in real processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_server import FleetProcess
from kv_publisher import Publisher
from places import ROOT
from scripted_engine import Asked, ScriptedEngine, scripted_engines, well
from served_store import ServedStore
from waiting import eventually
from written_plugins import write_plugins

WAIT_S = 60.0
BLOCK = 4
PROMPT = list(range(1, 1 + 8 * BLOCK))
NAMES = {"roomiest-prefix", "tenant-share", "trtllm-json", "chunks"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("plugins")
    source = shutil.copytree(ROOT / "examples" / "plugins", folder / "source")  # what is built leaves files there
    words = ["install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([sys.executable, "-m", "pip", *words, str(folder / "site"), str(source)], check=True)
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


def memserve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memserve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def plugin_checks() -> list[dict[str, str]]:
    told = json.loads(memserve("doctor", "--json").stdout)
    return [check for check in told["checks"] if check["name"] == "plug-in"]


def test_doctor_lists_plugins_with_their_versions(installed: Path) -> None:
    checks = plugin_checks()
    assert {check["detail"].partition(":")[0] for check in checks} == NAMES
    assert all(check["status"] == "ok" and "memserve-example-plugins 1.0" in check["detail"] for check in checks)


def test_doctor_says_what_is_wrong_with_a_plugin(installed: Path, tmp_path: Path, monkeypatch) -> None:
    bad = tmp_path / "bad"
    write_plugins(bad, "bad_ones", "import no_such_module", {"memserve.routing_policies": ["cost", "broken"]})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(bad), str(installed)]))
    details = [check["detail"] for check in plugin_checks() if check["status"] == "warn"]
    assert len(details) == 2 and all("bad_ones 1.5" in detail for detail in details)
    assert any("memserve's own policy 'cost' is used" in detail for detail in details)
    assert any("No module named 'no_such_module'" in detail for detail in details)
    refused = memserve("serve", "--policy", "broken", "--engine", "vllm=http://127.0.0.1:1")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "'broken' (bad_ones:broken of bad_ones 1.5) cannot be loaded: No module named" in refused.stderr


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


def stored(first: int, last: int) -> bytes:
    """As TensorRT-LLM tells of these blocks of the prompt."""
    blocks = [
        {"block_hash": 100 + at, "cache_level": 0, "tokens": [{"token_id": t} for t in PROMPT[at * BLOCK :][:BLOCK]]}
        for at in range(first, last)
    ]
    event = {"type": "stored", "parent_hash": 99 + first if first else None, "blocks": blocks}
    return json.dumps([{"event_id": 1, "attention_dp_rank": None, "data": event}]).encode()


def test_prompts_follow_events_in_the_plugins_format(installed: Path, engines: list[ScriptedEngine]) -> None:
    publisher = Publisher()
    first, second = engines
    first.tokens = second.tokens = lambda fields: PROMPT
    told = f"vllm={second.url},events={publisher.events},replay={publisher.replay},format=trtllm-json"
    try:
        with FleetProcess("--engine", f"vllm={first.url}", "--engine", told, "--policy", "roomiest-prefix") as router:
            publisher.publish(stored(0, 5))
            publisher.publish(stored(5, 8))
            eventually(lambda: router.sample("fleet_cached_blocks") == 8)
            for _ in range(3):
                assert router.post(prompt=PROMPT).status_code == 200
            assert (len(first.asked), len(second.asked)) == (0, 3)
            publisher.publish(b"[{}]")  # a format that fails: the engine's blocks are forgotten, nothing else
            eventually(lambda: router.sample("fleet_cached_blocks") == 0)
            assert router.post(prompt=PROMPT).status_code == 200
    finally:
        publisher.close()


def test_a_tenants_share_holds_up_no_other_tenant(
    installed: Path, engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a=key-of-a\nb=key-of-b\n")
    keys.chmod(0o600)
    through = threading.Event()

    async def script(asked: Asked, writer) -> None:
        while asked.fields["user"] == "slow" and not through.is_set():
            await asyncio.sleep(0.01)
        await well(asked, writer)

    engines[0].script = script
    flags = ("--engine", f"vllm={engines[0].url}", "--api-key-file", str(keys))
    with (
        FleetProcess(*flags, "--admission", "tenant-share:requests=1,tokens=100") as router,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        held = pool.submit(router.post, "key-of-a", user="slow")
        eventually(lambda: router.sample("admission_active") == 1)
        waits = pool.submit(router.post, "key-of-a", user="quick")
        eventually(lambda: router.sample("admission_queued_total") == 1)
        assert router.post("key-of-b", user="quick").status_code == 200
        assert not waits.done()
        too_long = router.post("key-of-b", prompt="x" * 2000)
        assert too_long.status_code == 400 and "beyond your share of 100" in too_long.text
        through.set()
        assert held.result(WAIT_S).status_code == waits.result(WAIT_S).status_code == 200


def test_values_outlive_a_store_in_the_plugins_backend(installed: Path, tmp_path: Path) -> None:
    values = {f"key {number}".encode(): os.urandom(200_000) for number in range(40)}
    disk = ("--ssd", f"chunks://{tmp_path / 'kv'}=64MiB", "--ssd-admission", "all")
    with ServedStore(tmp_path, *disk, dram="8MiB") as store:
        with store.client() as client:
            for key, value in values.items():
                assert client.put(key, value)
            store.process.terminate()
            store.process.wait(WAIT_S)
        chunks = list((tmp_path / "kv").glob("chunk-*"))
        assert sum(chunk.stat().st_size for chunk in chunks) >= sum(map(len, values.values()))
        store.restart()
        with store.client() as client:
            found = [bytes(view) for key in values if (view := client.get(key)) is not None]
    assert found == list(values.values())
    again = memserve("store", "--listen", "127.0.0.1:7999", "--ssd", "chunks:///proc/nowhere=64MiB",
                     "--cluster-secret-file", str(tmp_path / "secret"))  # fmt: skip
    assert again.returncode == 1 and "store backend 'chunks' cannot open chunks:///proc/nowhere" in again.stderr


def test_the_simulator_takes_a_policy_by_name(installed: Path) -> None:
    words = ("sim", "run", "--sessions", "4", "--instances", "colocated=2", "--json")
    ended = memserve(*words, "--policy", "roomiest-prefix")
    assert ended.returncode == 0, ended.stderr
    refused = memserve(*words, "--policy", "roomiest")
    assert refused.returncode == 1 and "roomiest-prefix" in refused.stderr
