"""Files that are read again when they change: what is noticed, what is refused, and what is said of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from memserve.api.http.errors import ApiError
from memserve.api.http.middleware import KeyRing
from memserve.base.errors import UserError
from memserve.cli.credentials import api_keys, followed_key, metrics_keys
from memserve.system import secrets as private_files
from memserve.system.secrets import Followed, GivenKeys, follow_secret
from secret_steps import put


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "LOOK_S", 0.0)
    for name in ("MEMSERVE_API_KEY", "MEMSERVE_API_KEY_FILE", "MEMSERVE_METRICS_KEY"):
        monkeypatch.delenv(name, raising=False)


def tenants(ring: KeyRing, *keys: str) -> list[str | None]:
    """The tenant of each key; None: it is refused."""
    found: list[str | None] = []
    for key in keys:
        try:
            found.append(ring.tenant_of(f"Bearer {key}"))
        except ApiError as error:
            assert error.status == 401
            found.append(None)
    return found


def test_changed_key_file_replaces_keys_and_keeps_tenants(tmp_path: Path) -> None:
    file = put(tmp_path / "keys", "ada=k-old\nbob=k-bob\n")
    ring = KeyRing(api_keys(["k-word"], file).follow_keys())
    assert tenants(ring, "k-word", "k-old", "k-new", "k-bob") == ["", "ada", None, "bob"]
    put(file, "ada=k-old\nada=k-new\nbob=k-bob\n")
    assert tenants(ring, "k-word", "k-old", "k-new", "k-bob") == ["", "ada", "ada", "bob"]
    put(file, "ada=k-new\n")
    assert tenants(ring, "k-word", "k-old", "k-new", "k-bob") == ["", None, "ada", None]


@pytest.mark.parametrize("wrong", ["", "# none\n", "a b\n", "ada=\n", "k-word\n", "one\none\n", "\x00\n"], ids=repr)
def test_broken_file_keeps_the_keys_and_is_logged_once(
    wrong: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = put(tmp_path / "keys", "ada=k-old\n")
    ring = KeyRing(api_keys(["k-word"], file).follow_keys())
    caplog.clear()
    put(file, wrong)
    for _ in range(3):
        assert tenants(ring, "k-old", "k-word", "") == ["ada", "", None]
        assert not ring.is_open
    assert [record.levelname for record in caplog.records] == ["WARNING"], caplog.text
    assert "stay in use" in caplog.text and "k-old" not in caplog.text and "k-word" not in caplog.text
    put(file, "ada=k-new\n")
    assert tenants(ring, "k-old", "k-new") == [None, "ada"]


def test_a_file_that_is_gone_or_open_to_others_keeps_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = put(tmp_path / "keys", "k-old\n")
    ring = KeyRing(api_keys(None, file).follow_keys())
    file.unlink()
    assert tenants(ring, "k-old") == tenants(ring, "k-old") == [""]
    assert len(caplog.records) == 1 and "cannot read API keys" in caplog.text
    put(file, "k-strange\n")
    file.chmod(0o622)
    assert tenants(ring, "k-old", "k-strange") == ["", None]
    assert "other users may write" in caplog.text
    file.chmod(0o600)
    assert tenants(ring, "k-old", "k-strange") == [None, ""], "as the hint says"


def test_touched_file_is_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = put(tmp_path / "secret", "a secret of the tests\n")
    secret = follow_secret(file)
    file.chmod(0o400)
    assert secret.value() == "a secret of the tests" and not caplog.records
    put(file, "another secret of the tests\n")
    assert secret.value() == "another secret of the tests" and "read again" in caplog.text


def test_fifo_in_place_of_a_file_does_not_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = put(tmp_path / "keys", "k-old\n")
    ring = KeyRing(api_keys(None, file).follow_keys())
    file.unlink()
    os.mkfifo(file, 0o600)
    assert tenants(ring, "k-old") == tenants(ring, "k-old") == [""]
    assert len(caplog.records) == 1 and "is no file any more" in caplog.text
    put(file, "k-new\n")
    assert tenants(ring, "k-old", "k-new") == [None, ""]


def test_file_with_bom_and_crlf_is_read(tmp_path: Path) -> None:
    text = "\ufeffada=k-ada-0123456789\r\nbob=k-bob\r\n"
    file = put(tmp_path / "keys", text)
    assert tenants(KeyRing(api_keys(None, file).follow_keys()), "k-ada-0123456789", "k-bob") == ["ada", "bob"]
    assert follow_secret(put(tmp_path / "secret", "\ufeffa secret of the tests\r\n")).value() == "a secret of the tests"


def test_a_mounted_secret_changes_by_its_symlink(tmp_path: Path) -> None:
    """As Kubernetes does it: the file's name leads through ``..data``, which is replaced."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        put(tmp_path / version / "keys", f"k-{version}\n")
        os.utime(tmp_path / version / "keys", (1, 1))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    ring = KeyRing(api_keys(None, tmp_path / "keys").follow_keys())
    assert tenants(ring, "k-v1", "k-v2") == ["", None]
    (tmp_path / "..tmp").symlink_to("v2")
    (tmp_path / "..tmp").replace(tmp_path / "..data")
    assert tenants(ring, "k-v1", "k-v2") == [None, ""], "size and time of the content are the same"


def test_files_are_looked_at_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "LOOK_S", 3600.0)
    file = put(tmp_path / "keys", "k-old\n")
    ring = KeyRing(api_keys(None, file).follow_keys())
    put(file, "k-new\n")
    assert tenants(ring, "k-old", "k-new") == ["", None]
    monkeypatch.setattr(private_files, "LOOK_S", 0.0)
    assert tenants(ring, "k-old", "k-new") == [None, ""]


def test_a_file_of_one_key_is_followed_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = put(tmp_path / "key", "theirs\n")
    key = followed_key(file)
    put(file, "other\n")
    assert key.value() == "other"
    for wrong in ("", "two words\n", "two\nlines\n"):
        put(file, wrong)
        assert key.value() == "other"
        with pytest.raises(UserError, match="does not hold one key"):
            followed_key(file)
    assert "other" not in caplog.text.replace("other users", "")


def test_keys_of_metrics_have_a_file_too(tmp_path: Path) -> None:
    ring = KeyRing(metrics_keys("k-word", put(tmp_path / "keys", "k-one\nk-two\n")).follow_keys())
    assert tenants(ring, "k-word", "k-one", "k-two", "k-other") == ["", "", "", None]
    assert KeyRing(metrics_keys(None).follow_keys()).is_open
    with pytest.raises(UserError, match="holds no API key"):
        metrics_keys("k-word", put(tmp_path / "keys", "\n"))


def test_child_gets_the_source_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "keys", "k-file\n")
    monkeypatch.chdir(tmp_path)
    told = GivenKeys(("k-word",), Path("keys")).as_payload()
    monkeypatch.chdir("/")
    assert GivenKeys.from_payload(told).read_keys() == ("k-word", "k-file")
    assert not GivenKeys.from_payload(GivenKeys().as_payload()).are_given


@pytest.mark.parametrize(
    "use",
    [
        lambda path: KeyRing(api_keys(None, path).follow_keys()).tenant_of("Bearer one-key-0123456789") == "",
        lambda path: followed_key(path).value() == "one-key-0123456789",
        lambda path: follow_secret(path).value() == "one-key-0123456789",
    ],
)
def test_a_pipe_is_read_once(use: Callable[[Path], bool]) -> None:
    """As a shell gives it: ``--api-key-file <(pass show keys)``."""
    readable, writable = os.pipe()
    os.write(writable, b"one-key-0123456789\n")
    os.close(writable)
    try:
        assert use(Path(f"/dev/fd/{readable}"))
    finally:
        os.close(readable)


def test_parser_may_refuse_a_changed_file(tmp_path: Path) -> None:
    def number(text: str) -> int:
        if not text.isdecimal():
            raise UserError("no number")
        return int(text)

    file = put(tmp_path / "n", "1")
    text = Followed([file], file.read_text, "the number")
    followed = text.derive_value(number)
    put(file, "one")
    assert followed.value() == 1
    put(file, "22")
    assert followed.value() == 22
    assert text.derive_value(number).value() == 22, "what was read before, and it is looked at again"
    with pytest.raises(UserError):
        Followed([put(file, "three")], file.read_text, "the number").derive_value(number)
