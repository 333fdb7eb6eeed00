"""Where a process listens, and which network device has an address: a library that listens by device does so where it
was asked."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from struct import pack, unpack_from

import numpy as np

from memserve.base.errors import UserError
from memserve.system.secrets import Secret

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_INTERFACES_MAX = 256
_RDMA = Path("/sys/class/infiniband")
NET_DEVICES = "UCX_NET_DEVICES"
"""The variable that tells UCX which devices it may use, ``eth0`` or ``mlx5_0:1``."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a process of a cluster listens, and what it asks of those that come."""

    secret: Secret
    """The cluster's."""
    host: str = "127.0.0.1"
    advertise: str | None = None
    """The host name by which others reach it; None: ``host``."""
    port: int = 0
    """Of the process's mailbox, 0: any; its other sockets take free ones."""

    @property
    def known_as(self) -> str:
        """The host for others."""
        return self.advertise or self.host


def own_address(host: str) -> str | None:
    """``host`` as an IP address, if it is one of this machine's; ``None``: it is elsewhere, or unknown."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, _, _, _, address in sorted(addresses):  # IPv4 first
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return str(address[0])
    except OSError:
        return None
    return None


def with_port(host: str, port: int | str) -> str:
    """``host:port``; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, flag: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``. Raises :class:`UserError` for anything else."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{flag} must be HOST:PORT, not {text!r}", hint=f"for example {flag} 10.0.0.1:5900")
    return host.strip("[]"), int(port)


def join_addresses(join: str, flag: str = "--join") -> tuple[str, ...]:
    """Where routers may be, ``tcp://host:port`` each: ``HOST:PORT``, several with commas between them."""
    return tuple(f"tcp://{with_port(*split_address(address, flag))}" for address in join.split(","))


def address_towards(host: str) -> str:
    """The address of this machine on the way to ``host``, found without sending anything. Raises :class:`OSError`."""
    addresses = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)
    failed = OSError(f"no way to {host}")
    for family, kind, _, _, address in sorted(addresses):  # IPv4 first
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            failed = error
    raise failed


def device_of(address: str) -> str | None:
    """The network device that has an IP address (``eth0``, ``lo``); ``None``: none of this machine's."""
    ip_address = ipaddress.ip_address(address)
    if ip_address.is_loopback:
        return "lo"
    devices = _ipv4_devices() if ip_address.version == 4 else _ipv6_devices()
    return next((name for name, device_address in devices if device_address == ip_address), None)


def ucx_devices(host: str) -> str | None:
    """What ``UCX_NET_DEVICES`` says to stay at ``host``: its network device, and the RDMA adapters behind that.

    ``None``: ``host`` is no address of this machine (others reach it through a translation of addresses).
    """
    address = own_address(host)
    device = device_of(address) if address is not None else None
    if device is None:
        return None
    adapters = sorted(path.parents[2].name for path in _RDMA.glob(f"*/device/net/{device}"))
    return ",".join([device, *(f"{adapter}:1" for adapter in adapters)])


def has_rdma(host: str | None) -> bool:
    """Whether UCX, listening at ``host``, may use an RDMA adapter: one that ``UCX_NET_DEVICES`` names, else one that
    :func:`ucx_devices` finds; any of this machine where ``host`` is none of its addresses."""
    devices = os.environ.get(NET_DEVICES) or (ucx_devices(host) if host is not None else None)
    if devices is None or devices == "all":
        return any(_RDMA.glob("*"))
    return any(":" in device for device in devices.split(","))


def _ipv4_devices() -> list[tuple[str, ipaddress.IPv4Address]]:
    answers = np.zeros(_IFREQ_BYTES * _INTERFACES_MAX, np.uint8)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        filled = fcntl.ioctl(sock, _SIOCGIFCONF, pack("iL", answers.nbytes, answers.ctypes.data))
    devices = []
    for offset in range(0, unpack_from("i", filled)[0], _IFREQ_BYTES):
        entry = answers[offset : offset + _IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a second address of eth0
        devices.append((name, ipaddress.IPv4Address(entry[20:24])))
    return devices


def _ipv6_devices() -> list[tuple[str, ipaddress.IPv6Address]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    return [(line.split()[5], ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
