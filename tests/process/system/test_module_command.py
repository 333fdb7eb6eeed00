"""Child processes import nothing from the folder where the user happens to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import memserve
from memserve.system.process import SAFE_PATH, module_command
from served_cluster import WAIT_S
from tiny_models import save_folder, tiny_module

pytestmark = pytest.mark.usefixtures("executed_processes")

TRAPS = ("h2", "json", "socket", "zmq", "numpy", "uvloop", "llguidance")


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with files that are named as modules, and leave a mark when they are imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in TRAPS:
        mark = str(tmp_path / f"{name}.imported")
        (folder / f"{name}.py").write_text(f"open({mark!r}, 'w').close()\nraise ImportError('a trap')\n")
    return folder


def test_a_child_s_path_has_the_folder_only_where_ours_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/usr/lib", str(tmp_path / "other")])
    assert module_command("a.b", "c") == [sys.executable, SAFE_PATH, "-m", "a.b", "c"]
    assert SAFE_PATH not in module_command("a.b", cwd=str(tmp_path / "other"))
    for own in ("", ".", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [own, "/usr/lib"])
        assert module_command("a.b", "c") == [sys.executable, "-m", "a.b", "c"], "memserve itself may lie there"


def test_every_child_is_started_by_this_command() -> None:
    source = Path(memserve.__file__).parent
    users = {path.name for path in source.rglob("*.py") if "sys.executable" in path.read_text()}
    assert users == {"process.py", "doctor.py"}  # the latter shows it


def test_a_cluster_serves_in_a_folder_full_of_traps(trapped: Path, tmp_path: Path) -> None:
    """A store, an instance, and the process that checks grammars."""
    pytest.importorskip("llguidance", reason="the grammar engine is not installed: make install")
    model = save_folder(tiny_module("llama"), tmp_path / "tiny")
    flags = ["--model", str(model), "--port", "0", "--threads", "1", "--kv-memory", "4MiB", "--colocated", "1"]
    command = [sys.executable, "-P", "-m", "memserve", "serve", *flags, "--store-dram", "16MiB", "--metadata", "none"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=trapped, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ)
    try:
        line = server.stdout.readline()
        assert line.startswith("ready in"), (tmp_path / "log").read_text()
        url = line.split(" at ")[1].strip()
        body = {"model": "tiny", "prompt": "w1", "max_tokens": 4}
        assert httpx.post(f"{url}/completions", json=body, timeout=WAIT_S).status_code == 200
        odd = {"json": {"type": "string", "pattern": "(?=a)b"}}
        refused = httpx.post(f"{url}/completions", json={**body, "structured_outputs": odd}, timeout=WAIT_S)
        assert refused.status_code == 400 and "look-around" in refused.text, refused.text
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert not list(tmp_path.glob("*.imported"))
