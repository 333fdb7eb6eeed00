"""Secrets of an operator: where they may come from, what is refused, and that no process shows them to others."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from memserve.base.errors import UserError
from memserve.cli.credentials import api_keys, read_secret
from memserve.cli.main import run
from process_tree import processes_below
from served_cluster import Server
from tiny_models import save_folder, tiny_module

pytestmark = pytest.mark.usefixtures("executed_processes")

KEYS = ("in-a-file-0123456789", "in-a-variable-0123456789")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMSERVE_API_KEY", "MEMSERVE_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def private(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    path.chmod(0o600)
    return path


def test_keys_of_all_places_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = private(tmp_path / "keys", "# tenants\n\nteam-a=ka\n  kb  \r\n# c=kc\n#d\n")
    assert api_keys(None, None).read_keys() == ()
    assert api_keys(None, file).read_keys() == ("team-a=ka", "kb")
    assert api_keys(["x"], file).read_keys() == ("x", "team-a=ka", "kb")
    monkeypatch.setenv("MEMSERVE_API_KEY", "v w=x")
    monkeypatch.setenv("MEMSERVE_API_KEY_FILE", str(file))
    assert api_keys(None, None).read_keys() == ("v", "w=x", "team-a=ka", "kb")
    assert not [name for name in os.environ if name.startswith("MEMSERVE_API_KEY")]  # children inherit none
    monkeypatch.setenv("MEMSERVE_API_KEY", "v")
    assert api_keys(["x"], None).read_keys() == ("x",)  # as with other options, the command line comes first


@pytest.mark.parametrize("value", ["", " ", "\n"])
@pytest.mark.parametrize("name", ["MEMSERVE_API_KEY", "MEMSERVE_API_KEY_FILE"])
def test_an_empty_variable_does_not_open_the_server(name: str, value: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("memserve.cli.cluster.serve.run_server", lambda *_: pytest.fail("it would serve without a key"))
    monkeypatch.setenv(name, value)
    assert run(["serve"]) == 1
    said = capsys.readouterr().err
    assert f"error: {name} is empty" in said and "hint:" in said


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "holds no API key"),
        (b"\n# team-a=k\n\n", "holds no API key"),
        (b"k1\nk2 # mine\n", "line 2 of .* is not an API key"),
        (b"\xff\xfe\x00k", "it is not text"),
        (b"k" * (1 << 20) + b"kk", "larger than 1 MiB"),
    ],
)
def test_invalid_key_file_is_refused_without_echoing_content(data: bytes, match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match) as caught:
        api_keys(None, private(tmp_path / "keys", data))
    assert caught.value.hint and "mine" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="cannot read API keys in"):
            api_keys(None, path)


@pytest.mark.parametrize("read", [lambda path: api_keys(None, path), read_secret])
def test_files_of_secrets_are_for_their_owner_alone(read, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = private(tmp_path / "secret", "0123456789abcdef")
    read(file)
    assert not caplog.records
    file.chmod(0o640)
    read(file)
    assert "other users may read" in caplog.text and "0123456789" not in caplog.text
    file.chmod(0o620)
    with pytest.raises(UserError, match="other users may write") as caught:
        read(file)
    assert "chmod 600" in caught.value.hint


def test_a_binary_cluster_secret_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the cluster secret in .*: it is not text") as caught:
        read_secret(private(tmp_path / "secret", bytes(range(256))))
    assert "base64" in caught.value.hint


def test_key_on_the_command_line_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        api_keys(["sk-very-secret"], None)
    assert "--api-key-file" in caplog.text and "sk-very-secret" not in caplog.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


def test_no_process_of_a_cluster_shows_keys_to_others(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Command lines of all, and environments of all but the router's own start, which only its user can read."""
    monkeypatch.setenv("MEMSERVE_API_KEY", KEYS[1])
    file, secret = private(tmp_path / "keys", f"team-a={KEYS[0]}\n"), "a-cluster-secret-0123456789"
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    private(state / "secret", secret)
    server = Server(model, "--api-key-file", str(file), "--metadata", str(state))
    try:
        pids = processes_below(server.process.pid)
        assert len(pids) >= 2
        for pid in pids:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != server.process.pid:
                shown += Path(f"/proc/{pid}/environ").read_bytes()
            assert not [word for word in (*KEYS, secret) if word.encode() in shown]
        url = f"{server.url}/models"
        assert httpx.get(url).status_code == 401
        for key in KEYS:
            assert httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code == 200
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_the_environment_of_later_children_has_no_keys(tmp_path: Path) -> None:
    """Whatever starts a process after the options are read (a conversion, for one)."""
    code = (
        "import os, subprocess\nfrom memserve.cli.credentials import api_keys\n"
        "assert api_keys(None, None).read_keys()\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)"
    )
    environment = {**os.environ, "MEMSERVE_API_KEY": KEYS[1]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "PATH=" in done.stdout and KEYS[1] not in done.stdout
