"""HTTPS: the official client, clients that speak no TLS or stop halfway, and certificates that change."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from fake_engine import FakeEngine
from memserve.api.http.config import EdgeConfig
from memserve.api.http.tls import Tls
from memserve.base.errors import UserError
from memserve.cli.credentials import tls_of
from memserve.system import secrets as private_files


class Pair:
    """A certificate and its key in two files, which can be replaced."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.renew()

    def renew(self) -> None:
        """Another authority's certificate."""
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("127.0.0.1")
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    @property
    def trusting(self) -> ssl.SSLContext:
        """What a client needs."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.fixture
def world(pair: Pair) -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT)), tls=Tls(pair.cert, pair.key)) as world:
        yield world


def raw(world: World) -> socket.socket:
    address = httpx.URL(world.url)
    return socket.create_connection((address.host, address.port or 443), timeout=20)


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has closed it, which is waited for, and said nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_official_client_streams_over_https(world: World, pair: Pair) -> None:
    with httpx.Client(verify=pair.trusting) as http, world.client(http_client=http) as client:
        whole = client.completions.create(model=MODEL, prompt="hi", max_tokens=100)
        parts = client.completions.create(model=MODEL, prompt="hi", max_tokens=100, stream=True)
        assert whole.choices[0].text == SCRIPT_TEXT
        assert "".join(part.choices[0].text for part in parts if part.choices) == SCRIPT_TEXT


def test_tls_connection_is_reused_and_carries_large_bodies(world: World, pair: Pair) -> None:
    with httpx.Client(verify=pair.trusting, base_url=world.url) as http:
        for length in (1, 1_000, 100_000, 2_000_000):
            answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * length, "max_tokens": 1})
            assert answer.status_code == (200 if length == 1 else 400), answer.text
            assert answer.headers["x-request-id"]


def test_an_early_answer_reaches_a_client_that_still_sends(pair: Pair) -> None:
    limits = EdgeConfig(body_bytes_max=1 << 20)
    with (
        serve(FakeEngine(says(SCRIPT_TEXT)), tls=Tls(pair.cert, pair.key), limits=limits) as world,
        pair.trusting.wrap_socket(raw(world), server_hostname="127.0.0.1") as connection,
    ):
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head.encode() + b"content-length: 3000000\r\n\r\n")
        for _ in range(30):
            connection.sendall(b"x" * 100_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_plaintext_client_is_disconnected_and_others_are_served(world: World, pair: Pair) -> None:
    with raw(world) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP" not in plain.recv(65536)
    assert httpx.get(f"{world.url}/health", verify=pair.trusting).status_code == 200
    assert 'limit="handshake"} 1' in httpx.get(f"{world.url}/metrics", verify=pair.trusting).text


def test_pending_handshake_has_deadline_and_counts_as_connection(pair: Pair) -> None:
    limits = EdgeConfig(header_timeout_s=0.2, connections_max=2)
    with serve(FakeEngine(says(SCRIPT_TEXT)), tls=Tls(pair.cert, pair.key), limits=limits) as world:
        silent = [raw(world) for _ in range(4)]
        for one in silent:  # two make room for others, two are late
            with one:
                assert is_ended(one)
        answer = httpx.get(f"{world.url}/metrics", verify=pair.trusting).text
        assert "memserve_http_connections 1.0" in answer


def test_the_server_ends_while_handshakes_are_under_way(pair: Pair) -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT)), tls=Tls(pair.cert, pair.key), drain_s=0.1) as world:
        silent = raw(world)
    with silent:
        assert is_ended(silent)


def test_a_renewed_certificate_is_used_without_a_restart(
    world: World, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_S", 0.0)
    old = pair.trusting
    assert httpx.get(f"{world.url}/health", verify=old).status_code == 200
    pair.cert.write_text("half a certificate")
    assert httpx.get(f"{world.url}/health", verify=old).status_code == 200, "the last good one"
    pair.renew()
    assert httpx.get(f"{world.url}/health", verify=pair.trusting).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{world.url}/health", verify=old)


def test_files_that_are_no_pair_are_refused_at_the_start(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    for cert, key in ((pair.cert, other), (pair.key, pair.key), (pair.cert, tmp_path), (tmp_path / "none", pair.key)):
        with pytest.raises(UserError):
            tls_of(cert, key)
    for cert, key in ((pair.cert, None), (None, pair.key)):
        with pytest.raises(UserError, match="a certificate and its key"):
            tls_of(cert, key)
    assert tls_of(None, None) is None
