"""The NVIDIA driver, asked without torch: which GPUs there are, whether torch can use them, and memory that processes
share.

A router chooses the shape of its cluster before any process of it has imported torch; so the driver's own library is
asked (``libcuda``), and torch's build is read from its files.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memserve.base.errors import MemserveError, UserError
from memserve.base.units import human_bytes

CAPABILITY_MIN = (7, 5)
"""The oldest GPUs that Triton compiles for."""
DEVICES = re.compile(r"auto|cpu|cuda(:\d{1,2})?")
DEVICES_SAID = "auto, cpu, cuda or cuda:N"
GPU_TORCH_HINT = "make install TORCH=torch==2.13.0"

_LIBRARY = "libcuda.so.1"
_NAME_BYTES, _HANDLE_BYTES = 256, 64
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute
_LAZY_PEER_ACCESS = 1
_PINNED_FOR_ALL = 1 | 2
"""``CU_MEMHOSTREGISTER_PORTABLE`` and ``DEVICEMAP``: for every context, and for kernels."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
GPUS_MAX = 64
"""More than a host has."""


def dotted_version(version: tuple[int, int]) -> str:
    """As people write it."""
    return f"{version[0]}.{version[1]}"


class DriverError(MemserveError):
    """The driver refuses a call."""


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A GPU that this process may use."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} ({human_bytes(self.memory_bytes)}, compute capability {dotted_version(self.capability)})"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What ``--device`` means on this machine."""

    gpus: tuple[FoundGpu, ...]
    """What is computed with; empty: the CPU."""
    why: str
    """What was found, for people; empty: there is nothing to say."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class Driver:
    """The calls of ``libcuda`` that memserve takes. Raises :class:`DriverError` where there is no driver."""

    def __init__(self, library: Any = None) -> None:
        """``library``: in place of the driver's own."""
        try:
            self._lib = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError as error:
            raise DriverError(f"there is no NVIDIA driver: {error}") from error
        self._call_driver("cuInit", 0)
        self._context: Any = None

    @property
    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver runs."""
        number = ctypes.c_int()
        self._call_driver("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def gpus(self) -> tuple[FoundGpu, ...]:
        """The GPUs that this process sees, in CUDA's order."""
        count = ctypes.c_int()
        self._call_driver("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._read_gpu(index) for index in range(count.value))

    def _read_gpu(self, index: int) -> FoundGpu:
        device, name, size = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
        self._call_driver("cuDeviceGet", ctypes.byref(device), index)
        self._call_driver("cuDeviceGetName", name, _NAME_BYTES, device)
        self._call_driver("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        capability = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            number = ctypes.c_int()
            self._call_driver("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
            capability.append(number.value)
        return FoundGpu(name.value.decode(errors="replace"), size.value, (capability[0], capability[1]))

    # -- memory that other processes map, of device 0, in the context that torch uses

    def export(self, address: int) -> bytes:
        """What :meth:`map` takes in another process to see the allocation around ``address``: 72 bytes."""
        self._enter_context()
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle) + (address - base.value).to_bytes(8, "little")

    def map(self, exported: bytes) -> tuple[int, int]:
        """``(address, base)``: where the exported memory is here, and what :meth:`unmap` takes."""
        if len(exported) != _HANDLE_BYTES + 8:
            raise DriverError("what a peer exports is no handle of memory")
        self._enter_context()
        handle, base = _Handle.from_buffer_copy(exported[:_HANDLE_BYTES]), ctypes.c_uint64()
        self._call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return base.value + int.from_bytes(exported[_HANDLE_BYTES:], "little"), base.value

    def unmap(self, base: int) -> None:
        """Give back what :meth:`map` has mapped."""
        self._enter_context()
        self._call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def pin(self, address: int, nbytes: int) -> None:
        """Memory of the host stays where it is, and all devices reach it, until :meth:`unpin`."""
        self._enter_context()
        arguments = ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PINNED_FOR_ALL)
        self._call_driver("cuMemHostRegister_v2", *arguments)

    def unpin(self, address: int) -> None:
        """Memory that was pinned is as other memory again."""
        self._enter_context()
        self._call_driver("cuMemHostUnregister", ctypes.c_uint64(address))

    def _enter_context(self) -> None:
        """Make the device's primary context that of this thread."""
        if self._context is None:
            context = ctypes.c_void_p()
            self._call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
            self._context = context
        self._call_driver("cuCtxSetCurrent", self._context)

    def _call_driver(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise DriverError(f"{name} fails with CUDA's error {status}")


def find_gpus(driver: Driver | None = None) -> tuple[tuple[FoundGpu, ...], tuple[int, int], str]:
    """``(GPUs, the driver's CUDA, why there are none)``. A machine without a driver has no GPU, and no reason."""
    try:
        driver = driver or Driver()
    except DriverError as error:
        return (), (0, 0), f"NVIDIA's driver does not start: {error}" if _has_driver() else ""
    try:
        gpus = driver.gpus()
        return gpus, driver.cuda_version, "" if gpus else f"the driver shows no GPU ({_VISIBLE} may hide them)"
    except DriverError as error:
        return (), (0, 0), f"NVIDIA's driver does not answer: {error}"


def _has_driver() -> bool:
    return Path("/dev/nvidiactl").exists()


def torch_cuda() -> str | None:
    """The CUDA that the installed torch is built for, as ``13.0``; None: it is a build for CPUs, or not there."""
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.origin).parent / "version.py").read_text() if spec is not None and spec.origin else ""
    except OSError:
        return None
    version_match = re.search(r"^cuda[^=]*= *'([0-9.]+)'", text, re.MULTILINE)
    return version_match.group(1) if version_match else None


def check_device_name(device_name: str) -> None:
    """Raise :class:`UserError` for what is no ``--device``."""
    if not DEVICES.fullmatch(device_name):
        raise UserError(f"unknown device {device_name!r}", hint=f"use one of {DEVICES_SAID}", param="device")


def choose_device(
    device_name: str,
    gpus: tuple[FoundGpu, ...],
    driver_cuda: tuple[int, int],
    torch_for: str | None,
    why_none: str = "",
) -> DeviceChoice:
    """What ``--device asked`` means with these GPUs and torch's build. ``auto`` falls back to the CPU and says why.

    Raises :class:`UserError` where a GPU is asked for that cannot be used.
    """
    check_device_name(device_name)
    if device_name == "cpu":
        return DeviceChoice((), "")
    index = int(device_name.partition(":")[2] or 0)
    problem, hint = _why_no_gpu(device_name, index, gpus, driver_cuda, torch_for, why_none)
    if not problem:
        used = gpus if device_name in ("auto", "cuda") else gpus[index : index + 1]
        names = ", ".join(map(str, used))
        return DeviceChoice(used, f"device: {names}; CUDA {torch_for}")
    if device_name != "auto":
        raise UserError(f"there is no usable CUDA device: {problem}", hint=hint, param="device")
    return DeviceChoice((), f"device: the CPU, for {problem} ({hint})" if gpus or why_none else "")


def _why_no_gpu(
    device_name: str,
    index: int,
    gpus: tuple[FoundGpu, ...],
    driver_cuda: tuple[int, int],
    torch_for: str | None,
    why: str,
) -> tuple[str, str]:
    """Why the GPU cannot be used, and what to do about it; empty: it can."""
    if not gpus:
        return why or "this machine shows no NVIDIA driver", "use --device cpu, or install NVIDIA's driver"
    if index >= len(gpus):
        return f"{device_name} is not one of the {len(gpus)} here", f"use cuda:0 to cuda:{len(gpus) - 1}"
    gpu = gpus[index]
    if torch_for is None:
        return f"torch is a build without CUDA beside {gpu}", GPU_TORCH_HINT
    if int(torch_for.partition(".")[0]) > driver_cuda[0]:
        versions = f"torch is built for CUDA {torch_for}, and the driver of {gpu} runs {dotted_version(driver_cuda)}"
        return versions, "update NVIDIA's driver, or install a torch for its CUDA"
    if gpu.capability < CAPABILITY_MIN:
        return f"{gpu} is older than the kernels ({dotted_version(CAPABILITY_MIN)})", "use --device cpu"
    return "", ""


def gpu_count() -> int:
    """GPUs that this process sees."""
    return len(find_gpus()[0])


def device_here(device_name: str) -> DeviceChoice:
    """What ``--device asked`` means on this machine. Raises as :func:`choose_device`."""
    if device_name == "cpu":
        return DeviceChoice((), "")
    gpus, driver_cuda, why = find_gpus()
    return choose_device(device_name, gpus, driver_cuda, torch_cuda(), why)


def show_first(index: int, environment: Mapping[str, str], count: int, own_gpus: int = 1) -> str:
    """``CUDA_VISIBLE_DEVICES`` with ``own_gpus`` GPUs, from ``index`` of ``count`` on, in front: the first is device
    0 then, in every thread, and the others can still be read."""
    shown = [name for name in environment.get(_VISIBLE, "").split(",") if name] or [str(n) for n in range(count)]
    if index >= len(shown):
        text = f"cuda:{index} is not one of the {len(shown)} that {_VISIBLE} shows"
        raise UserError(text, hint=f"use cuda:0 to cuda:{len(shown) - 1}", param="device")
    return ",".join([*shown[index : index + own_gpus], *shown[:index], *shown[index + own_gpus :]])


def take_gpu(device_name: str, own_gpus: int = 1) -> str:
    """For a process of ours, before it imports torch: make ``cuda:N`` its device 0, and the GPUs after it the rest
    of ``own_gpus``. Returns ``cuda``, or ``device_name``. Before this process asks the driver anything: that
    reads which GPUs to show once, when it starts.

    Raises :class:`UserError` for a GPU that is not there."""
    if not re.fullmatch(r"cuda:\d{1,2}", device_name):
        return device_name
    index, before = int(device_name.partition(":")[2]), os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = show_first(index, os.environ, GPUS_MAX, own_gpus)  # the list ends where a GPU is not there
    gpus, driver_cuda, why = find_gpus()
    try:
        choose_device("cuda", gpus, driver_cuda, torch_cuda(), f"{device_name} is not there: {why}" if why else "")
    except UserError:
        os.environ.pop(_VISIBLE) if before is None else os.environ.update({_VISIBLE: before})
        raise
    return "cuda"
