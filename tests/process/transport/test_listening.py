"""Where the processes of a cluster listen: at the addresses that they were given, and at no other."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
from pathlib import Path

import pytest

from memserve.cli.cluster.instance import listen_host
from memserve.cli.cluster.members import ClusterOptions
from memserve.protocol.messages import Leave
from memserve.protocol.peers import Peer
from memserve.transport import network_devices as devices
from memserve.transport.links import nixl_agent
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress, address_towards, device_of, own_address, ucx_devices
from memserve.transport.probe import ProbeResult, probe_address
from ports import free_port
from process_tree import processes_below
from served_cluster import Server, eventually, is_alive
from tiny_models import save_folder, tiny_module

NIXL = pytest.mark.skipif(not nixl_agent.nixl_is_installed(), reason="NIXL (extra: nixl) is not installed")
OUTSIDE = next((str(own) for name, own in devices._ipv4_devices() if name != "lo"), None)


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens for TCP connections."""
    sockets = {}
    if not is_alive(pid):
        return set()
    for family, size in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
        for line in Path(f"/proc/{pid}/net/tcp{'6' if size == 16 else ''}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                packed = bytes.fromhex(words[1].split(":")[0])
                swapped = b"".join(packed[at : at + 4][::-1] for at in range(0, size, 4))
                sockets[words[9]] = socket.inet_ntop(family, swapped)
    found = set()
    for fd in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))
        except FileNotFoundError:  # the one that listed them
            continue
        if inode is not None and inode[1] in sockets:
            found.add(sockets[inode[1]])
    return found


def test_socket_listing_sees_listeners() -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("::1", socket.AF_INET6)):
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            assert host not in listening(os.getpid())
            listener.listen()
            assert host in listening(os.getpid())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("host", "link"),
    [
        pytest.param("127.0.0.1", "auto", id="this host alone"),
        pytest.param("127.0.0.1", "nixl", id="this host over NIXL", marks=NIXL),
        pytest.param(
            OUTSIDE, "auto", id="a network",
            marks=pytest.mark.skipif(OUTSIDE is None, reason="this machine has no network but its own"),
        ),
    ],
)  # fmt: skip
def test_a_cluster_listens_where_it_was_told(host: str, link: str, model: Path, tmp_path: Path) -> None:
    """HTTP at ``--host``; the router's door, the instances' and NIXL's at ``--cluster-host``."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    where = ("--cluster-host", host, "--cluster-port", str(free_port()), "--cluster-secret-file", str(secret))
    server = Server(model, *where, "--link", link, "--colocated", "1")
    try:
        eventually(lambda: listening(server.process.pid) == {"127.0.0.1", host} and len(server.children()) == 1)
        # helpers that have only just begun, or end, may have none yet or no longer
        pid = server.process.pid
        eventually(lambda: {address for each in processes_below(pid)[1:] for address in listening(each)} == {host})
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.skipif(OUTSIDE is None, reason="this machine has no network but its own")
def test_instance_listens_at_its_advertised_address() -> None:
    assert listen_host("127.0.0.1") == listen_host("localhost") == "127.0.0.1"
    assert listen_host(OUTSIDE) == OUTSIDE
    assert listen_host("192.0.2.201") == listen_host("no.such.host.invalid") == "0.0.0.0"
    assert listen_host("2001:db8::7") == "::"


def test_nixl_is_told_the_network_device_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("127.0.0.1") == device_of("127.3.2.1") == device_of("::1") == "lo"
    assert ucx_devices("127.0.0.1") == "lo" and ucx_devices("no.such.host.invalid") is None
    assert own_address("localhost") == "127.0.0.1" and device_of("203.0.113.77") is None
    for adapter, device in (("mlx5_1", "lo"), ("mlx5_0", "lo"), ("mlx5_2", "other")):
        (tmp_path / adapter / "device" / "net" / device).mkdir(parents=True)
    monkeypatch.setattr(devices, "_RDMA", tmp_path)
    assert ucx_devices("127.0.0.1") == "lo,mlx5_0:1,mlx5_1:1"


@pytest.mark.parametrize(
    ("named", "host", "rdma"),
    [
        (None, "127.0.0.1", False),  # the adapter is behind another device
        (None, "no.such.host.invalid", True),
        (None, None, True),
        ("lo", None, False),
        ("lo,mlx5_0:1", "127.0.0.1", True),
        ("all", "127.0.0.1", True),
    ],
)
def test_rdma_is_what_ucx_may_use(
    named: str | None, host: str | None, rdma: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0" / "device" / "net" / "other").mkdir(parents=True)
    monkeypatch.setattr(devices, "_RDMA", tmp_path)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", named)
    assert devices.has_rdma(host) is rdma
    (tmp_path / "mlx5_0" / "device" / "net" / "other").rmdir()
    monkeypatch.setattr(devices, "_RDMA", tmp_path / "none")
    assert devices.has_rdma(host) is (named is not None and ":" in named)


@pytest.mark.parametrize(
    ("host", "port", "spans"),
    [("127.0.0.1", 1, False), ("localhost", 1, False), ("10.0.0.1", 1, True), ("10.0.0.1", None, False)],
)
def test_a_cluster_of_this_host_alone_needs_no_network_link(host: str, port: int | None, spans: bool) -> None:
    assert ClusterOptions(host=host, port=port, secret="s" * 32).may_span_hosts is spans


@pytest.mark.skipif(own_address("::1") is None, reason="this machine has no IPv6")
def test_mailboxes_meet_at_ipv6_addresses() -> None:
    heard: queue.SimpleQueue[tuple[Peer, object]] = queue.SimpleQueue()
    me, you = Peer("me", 1), Peer("you", 1)
    mine = ZmqMailbox(me, ListenAddress("a secret of the tests, long enough", "::1"), lambda *letter: None)
    yours = ZmqMailbox(
        you, ListenAddress("a secret of the tests, long enough", "::1"), lambda *letter: heard.put(letter)
    )
    try:
        assert yours.address.startswith("tcp://[::1]:")
        assert probe_address(yours.address, "a secret of the tests, long enough", 10.0) is ProbeResult.ACCEPTED
        mine.connect(you, yours.address)
        mine.send(you, Leave())
        assert heard.get(timeout=30) == (me, Leave())
        assert address_towards("::1") == address_towards("[::1]") == "::1"
    finally:
        mine.close()
        yours.close()
