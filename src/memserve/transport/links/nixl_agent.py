"""The few calls of NIXL that reading takes, behind one lock."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
from typing import Any

import numpy as np

from memserve.base.errors import UserError
from memserve.transport.network_devices import NET_DEVICES, ucx_devices
from memserve.transport.ports import LinkError, UnreachableError
from memserve.transport.ranges import Ranges

log = logging.getLogger(__name__)

_READING = b"reading"

_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
_DEFAULTS = {
    "NIXL_LOG_LEVEL": "WARN",
    # UCX's module for AWS EFA needs Debian's libefa, and with it a second libnl beside the one in NIXL's wheel: one of
    # the two then crashes when the process ends (NIXL 1.5). With EFA and without the wheel: UCX_MODULES=all.
    "UCX_MODULES": "^efa",
}


def _module() -> str | None:
    return next((name for name in _MODULES if importlib.util.find_spec(name)), None)


def nixl_is_installed() -> bool:
    """Whether :class:`Agent` can be built."""
    return _module() is not None


class Transfer:
    """A READ that was posted. Its memory may be written until :meth:`state` says that it is over."""

    def __init__(self, agent: Agent, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_over(self) -> bool:
        """Looks, and lets NIXL work on it."""
        if self._state == "PROC":
            self._state = self._agent.transfer_state(self._handle)
        return self._state != "PROC"

    @property
    def has_succeeded(self) -> bool:
        """As it was when last looked at."""
        return self._state == "DONE"

    def release_handle(self) -> None:
        """Forget a transfer that is over."""
        self._agent.release_transfer(self._handle)


class Agent:
    """A NIXL agent with the UCX backend and without a thread. Calls are serialized; none of them waits for a peer.

    Raises :class:`UserError` when NIXL is not installed, or does not start.
    """

    def __init__(self, name: str, host: str | None = None) -> None:
        """``host``: the address at which this process listens; ``None``: at all of this machine's."""
        self._lock = threading.Lock()
        self._agent: Any = _new_agent(name, host)

    def export_metadata(self) -> bytes:
        """What peers need to read what is registered so far."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def register_memory(self, address: int, nbytes: int, *, on_gpu: bool = False) -> None:
        """Let peers read, and READs write, these bytes. Raises :class:`LinkError`."""
        with self._lock:
            try:
                self._agent.register_memory([(address, nbytes, 0, "")], _memory_kind(on_gpu))
            except Exception as error:
                raise LinkError(f"NIXL registers no memory: {error}") from error

    def add_peer(self, metadata: bytes) -> str:
        """The name of the peer's agent. Raises :class:`UnreachableError` when the metadata cannot be used."""
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise UnreachableError(f"NIXL refuses the peer's agent: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget the peer's agent. None of its transfers is under way."""
        with self._lock:
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                raise LinkError(f"NIXL keeps the agent {name}: {error}") from error

    def post_read(
        self, name: str, src_address: int, dst_address: int, ranges: Ranges, on_gpu: tuple[bool, bool] = (False, False)
    ) -> Transfer:
        """Post a READ of ``ranges``, relative to the two addresses; its end is announced. ``on_gpu``: whether source
        and destination are memory of a GPU. Raises :class:`LinkError`."""
        with self._lock:
            try:
                kinds = _memory_kind(on_gpu[0]), _memory_kind(on_gpu[1])
                local = self._agent.get_xfer_descs(_descriptors(dst_address, ranges.dst_offsets, ranges), kinds[1])
                remote = self._agent.get_xfer_descs(_descriptors(src_address, ranges.src_offsets, ranges), kinds[0])
                handle = self._agent.initialize_xfer("READ", local, remote, name)
                return Transfer(self, handle, self._agent.transfer(handle, _READING))
            except Exception as error:
                raise LinkError(f"NIXL cannot read: {error}") from error

    def transfer_state(self, handle: Any) -> str:
        """``PROC``, ``DONE`` or ``ERR``."""
        with self._lock:
            try:
                return str(self._agent.check_xfer_state(handle))
            except Exception:
                return "ERR"

    def release_transfer(self, handle: Any) -> None:
        """Give a handle back."""
        with self._lock:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:
                log.info("NIXL keeps a transfer that is over: %s", error)

    def announce_read(self, name: str) -> None:
        """Tell a peer that it is about to be read. Raises :class:`LinkError`."""
        with self._lock:
            try:
                self._agent.send_notif(name, _READING)
            except Exception as error:
                raise LinkError(f"NIXL cannot speak to the peer: {error}") from error

    def poll_notifications(self) -> bool:
        """Let NIXL answer peers that read from us; whether any of them began or ended to. Raises :class:`LinkError`."""
        with self._lock:
            try:
                return bool(self._agent.get_new_notifs())
            except Exception as error:
                raise LinkError(f"NIXL makes no progress: {error}") from error

    def close(self) -> None:
        """No peer reads this process any more, and it reads none."""
        with self._lock:
            self._agent = None


def _new_agent(name: str, host: str | None) -> Any:
    module = _module()
    if module is None:
        raise UserError("the link nixl needs NIXL", hint="pip install 'memserve[nixl]', or use --link shm")
    for option, value in _DEFAULTS.items():
        os.environ.setdefault(option, value)
    devices = ucx_devices(host) if host is not None else None
    if devices is not None:
        os.environ.setdefault(NET_DEVICES, devices)
    elif host is not None and NET_DEVICES not in os.environ:
        log.warning("NIXL listens on every network of this machine: %s names those that it may use", NET_DEVICES)
    try:
        api = importlib.import_module(f"{module}._api")
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except Exception as error:  # NIXL's errors have no base of their own
        raise UserError(f"NIXL does not start: {error}", hint="use --link shm between instances of one host") from error


def _memory_kind(on_gpu: bool) -> str:
    """NIXL's word."""
    return "VRAM" if on_gpu else "DRAM"


def _descriptors(base: int, offsets: np.ndarray[tuple[int], np.dtype[np.int64]], ranges: Ranges) -> Any:
    """NIXL's ``[n, 3]`` uint64: address, bytes, device."""
    descriptors = np.zeros((len(offsets), 3), np.uint64)
    descriptors[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    descriptors[:, 1] = ranges.range_bytes
    return descriptors
