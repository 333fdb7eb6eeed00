"""What is found of GPUs, what `--device` means, and how their memory is shared: with a driver that is made up."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.kv_layout import Parallel
from memserve.base.types import Role
from memserve.base.units import GIB, MIB
from memserve.model.gpu.setup import (
    CONTEXT_BYTES,
    GRAPHS_BYTES,
    as_reserved,
    check_gpu_count,
    check_gpu_shares,
    check_pages,
    gpu_kv_bytes,
    on_gpus,
    refuse_on_gpu,
    refuse_without_gpu,
    shares_gpu_kv,
)
from memserve.system import gpus
from memserve.system.gpus import Driver, DriverError, FoundGpu, choose_device, find_gpus, show_first, take_gpu

H100 = FoundGpu("NVIDIA H100", 80 * GIB, (9, 0))
OLD = FoundGpu("Tesla P100", 16 * GIB, (6, 0))


class Library:
    """``libcuda`` with two GPUs; a call whose name is in ``broken`` fails. One process: what it exports it can map."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.mapped, self.entered = broken, 0, 0

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: 3) if name in self.broken else getattr(type(self), f"_{name}").__get__(self)

    def _cuInit(self, flags: int) -> int:
        return 0

    def _cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13010
        return 0

    def _cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    def _cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def _cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H100"
        return 0

    def _cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = 80 * GIB
        return 0

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> int:
        out._obj.value = {75: 9, 76: 0}[attribute]
        return 0

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> int:
        self.entered += 1
        return 0

    def _cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        base._obj.value, size._obj.value = address.value - 4096, 1 << 20
        return 0

    def _cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        handle._obj.reserved = b"\1" * 63  # a base of its own
        return 0

    def _cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: Any) -> int:
        assert ctypes.string_at(ctypes.addressof(handle), 63) == b"\1" * 63 and flags.value == 1
        base._obj.value, self.mapped = 1 << 30, self.mapped + 1
        return 0

    def _cuIpcCloseMemHandle(self, base: Any) -> int:
        assert base.value == 1 << 30
        self.mapped -= 1
        return 0


def test_the_driver_says_what_there_is() -> None:
    gpus, cuda, why = find_gpus(Driver(Library()))
    assert gpus == (H100, H100) and cuda == (13, 1) and why == ""
    assert str(gpus[0]) == "NVIDIA H100 (80.0 GiB, compute capability 9.0)"
    gpus, _, why = find_gpus(Driver(Library("cuDeviceGetName")))
    assert gpus == () and "cuDeviceGetName fails with CUDA's error 3" in why


def test_memory_is_exported_with_its_place_in_the_allocation() -> None:
    library = Library()
    driver = Driver(library)
    exported = driver.export(0x7000_0000)
    assert len(exported) == 72
    address, base = driver.map(exported)
    assert (address, base) == ((1 << 30) + 4096, 1 << 30) and library.mapped == 1 and library.entered == 1
    driver.unmap(base)
    assert library.mapped == 0
    with pytest.raises(DriverError, match="no handle"):
        driver.map(b"x")
    with pytest.raises(DriverError, match="cuIpcGetMemHandle"):
        Driver(Library("cuIpcGetMemHandle")).export(0x7000_0000)


@pytest.mark.parametrize(
    ("asked", "gpus", "torch_for", "count", "said"),
    [
        ("auto", (), None, 0, ""),
        ("auto", (H100,), "13.0", 1, "device: NVIDIA H100 (80.0 GiB, compute capability 9.0); CUDA 13.0"),
        ("cpu", (H100,), "13.0", 0, ""),
        ("auto", (H100,), None, 0, "a build without CUDA beside NVIDIA H100"),
        ("auto", (H100,), "14.0", 0, "torch is built for CUDA 14.0, and the driver of NVIDIA H100"),
        ("auto", (OLD,), "13.0", 0, "older than the kernels (7.5)"),
        ("cuda:1", (H100, H100), "12.8", 1, "NVIDIA H100"),
    ],
)
def test_auto_takes_a_gpu_that_can_be_used_and_says_why_not(
    asked: str, gpus: tuple[FoundGpu, ...], torch_for: str | None, count: int, said: str
) -> None:
    choice = choose_device(asked, gpus, (13, 0), torch_for)
    assert len(choice.gpus) == count and said in choice.why and bool(said) == bool(choice.why)


@pytest.mark.parametrize(
    ("asked", "gpus", "torch_for", "error"),
    [
        ("cuda", (), "13.0", "no usable CUDA device: this machine shows no NVIDIA driver"),
        ("cuda", (H100,), None, "a build without CUDA"),
        ("cuda:2", (H100, H100), "13.0", "cuda:2 is not one of the 2 here"),
        ("gpu", (H100,), "13.0", "unknown device"),
    ],
)
def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_an_error(
    asked: str, gpus: tuple[FoundGpu, ...], torch_for: str | None, error: str
) -> None:
    with pytest.raises(UserError, match=error) as raised:
        choose_device(asked, gpus, (13, 0), torch_for)
    assert raised.value.hint


def test_an_own_gpu_is_device_0_and_the_others_stay_visible() -> None:
    assert show_first(2, {}, 4) == "2,0,1,3"
    assert show_first(1, {"CUDA_VISIBLE_DEVICES": "5,7"}, 2) == "7,5"


def test_instances_of_a_host_share_its_gpus() -> None:
    options = EngineOptions()
    assert on_gpus(options, 0, [1, 1], 0) is options
    one, two = (on_gpus(options, number, [1, 1], 1) for number in range(2))
    assert one == two and one.gpu_memory_share == 0.45 and one.device == "auto"
    apart = [on_gpus(options, number, [1, 1, 1], 2) for number in range(3)]
    assert [each.device for each in apart] == ["cuda:0", "cuda:1", "cuda:0"] and apart[1].gpu_memory_share == 0.45
    assert on_gpus(EngineOptions(kv_memory_bytes=GIB), 0, [1, 1], 1).gpu_memory_share is None
    check_gpu_shares(0.5, [1, 1], 1)
    check_gpu_shares(0.9, [1, 1], 2)
    with pytest.raises(UserError, match=r"2 instances cannot have 0.6 of one GPU each"):
        check_gpu_shares(0.6, [1, 1], 1)


def test_a_gpu_is_taken_before_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads the variable when it starts; where the GPU is not there, nothing has changed."""
    shown: list[str] = []

    def found(driver: Any = None) -> Any:
        shown.append(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        return ((H100, H100), (13, 0), "") if shown[-1].startswith("1,") else ((), (13, 0), "the driver shows no GPU")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "find_gpus", found)
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    with pytest.raises(UserError, match="cuda:3 is not there: the driver shows no GPU"):
        take_gpu("cuda:3")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and take_gpu("auto") == "auto"
    assert take_gpu("cuda:1", 2) == "cuda" and shown[-1].startswith("1,2,0,3,4")
    with pytest.raises(UserError, match="cuda:2 is not one of the 2"):
        show_first(2, {"CUDA_VISIBLE_DEVICES": "5,7"}, 64)


def test_an_instance_of_several_workers_takes_as_many_gpus() -> None:
    options = EngineOptions()
    places = [on_gpus(options, number, [2, 2, 2], 5) for number in range(3)]
    assert [one.device for one in places] == ["cuda:0", "cuda:2", "cuda:0"], "the fifth is left over"
    assert [one.gpu_memory_share for one in places] == [0.45] * 3
    assert on_gpus(options, 0, [2], 2).gpu_memory_share == 0.9
    assert show_first(2, {}, 5, 2) == "2,3,0,1,4"
    assert show_first(1, {"CUDA_VISIBLE_DEVICES": "2,3,0,1,4"}, 5) == "3,2,0,1,4", "worker 1's, as its leader sees them"
    check_gpu_shares(0.5, [2, 2], 2)
    with pytest.raises(UserError, match=r"2 instances cannot have 0\.6 of one GPU each"):
        check_gpu_shares(0.6, [2, 2], 2)
    check_gpu_count(2, 2)
    for workers, count, found in ((4, 2, "2 GPUs are here"), (2, 1, "one GPU is here")):
        said = f"{workers} workers needs {workers} GPUs of this host, and {found}"
        with pytest.raises(UserError, match=said) as raised:
            on_gpus(options, 0, [workers], count)
        assert f"--pipeline-parallel to {count}" in str(raised.value.hint)


def test_instances_of_other_degrees_have_gpus_of_their_own() -> None:
    """Two workers of a decode instance beside one of a prefill instance, where three GPUs have room for both."""
    options = EngineOptions()
    for workers, count, devices, share in (
        ([1, 2], 3, ["cuda:0", "cuda:1"], 0.9),
        ([2, 1], 3, ["cuda:0", "cuda:2"], 0.9),
        ([1, 2], 4, ["cuda:0", "cuda:2"], 0.9),
        ([1, 2], 2, ["cuda:0", "cuda:0"], 0.45),
        ([1, 4, 1], 6, ["cuda:0", "cuda:1", "cuda:5"], 0.9),
    ):
        placed = [on_gpus(options, number, workers, count) for number in range(len(workers))]
        assert [one.device for one in placed] == devices, (workers, count)
        assert {one.gpu_memory_share for one in placed} == {share}
    check_gpu_shares(0.9, [1, 2], 3)
    with pytest.raises(UserError, match=r"2 instances cannot have 0\.9 of one GPU each"):
        check_gpu_shares(0.9, [1, 2], 2)


def test_ray_reserves_a_gpu_for_each_worker() -> None:
    pair = EngineOptions(parallel=Parallel(2))
    own, reserved = as_reserved(EngineOptions(device="cuda", parallel=Parallel(2, 2)), Role.COLOCATED, {"CPU": 1.0})
    assert (own.device, own.gpu_memory_share, reserved) == ("cuda", 0.9, {"CPU": 1.0, "GPU": 4.0})
    own, reserved = as_reserved(pair, Role.COLOCATED, {"GPU": 2.0})
    assert (own.device, reserved) == ("cuda", {"GPU": 2.0}), "auto: what is reserved is used"
    own, reserved = as_reserved(pair, Role.PREFILL, {"CPU": 4.0})
    assert (own.device, own.gpu_memory_share, reserved) == ("cpu", None, {"CPU": 4.0}), "and nothing else"
    half, reserved = as_reserved(EngineOptions(), Role.DECODE, {"CPU": 1.0, "GPU": 0.5})
    assert (half.device, half.gpu_memory_share, reserved["GPU"]) == ("cuda", 0.45, 0.5)
    assert as_reserved(EngineOptions(device="cpu"), Role.DECODE, {"GPU": 3.0})[0].device == "cpu"


@pytest.mark.parametrize(
    ("options", "role", "reserved", "message"),
    [
        (EngineOptions(parallel=Parallel(2)), Role.COLOCATED, {"GPU": 1.0}, "2 workers needs 2 GPUs, and not 1"),
        (EngineOptions(parallel=Parallel(2)), Role.COLOCATED, {"GPU": 4.0}, "2 workers needs 2 GPUs, and not 4"),
        (EngineOptions(), Role.DECODE, {"GPU": 1.5}, "1 worker needs one GPU or a part of it, and not 1.5"),
        (EngineOptions(device="cuda:1"), Role.DECODE, {"GPU": 1.0}, "Ray chooses the GPUs"),
        (EngineOptions(device="gpu"), Role.DECODE, {}, "unknown device"),
        (EngineOptions(gpu_memory_share=0.5), Role.DECODE, {"CPU": 1.0}, "needs a GPU"),
        (EngineOptions(gpu_memory_share=0.9), Role.DECODE, {"GPU": 0.5}, "2 instances cannot have 0.9 of one GPU"),
    ],
)
def test_unsuitable_ray_reservation_is_refused(
    options: EngineOptions, role: Role, reserved: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        as_reserved(options, role, reserved)
    assert raised.value.hint


def test_gpus_that_do_not_reach_each_other_serve_colocated() -> None:
    """Prefill and decode instances would be of no use then."""
    why = "GPU 0 of this instance cannot read the memory of GPU 1: CUDA's error 217"
    for role in (Role.PREFILL, Role.DECODE):
        assert shares_gpu_kv("", role)
        with pytest.raises(UserError, match=r"handed over: GPU 0 .* GPU 1: CUDA's error 217") as raised:
            shares_gpu_kv(why, role)
        assert "--colocated" in str(raised.value.hint)
    assert shares_gpu_kv("", Role.COLOCATED) and not shares_gpu_kv(why, Role.COLOCATED)
    with pytest.raises(UserError, match="whole words of 8 bytes"):
        check_pages(20)


def test_kv_gets_what_weights_and_steps_leave() -> None:
    step, held = GIB, 16 * GIB
    whole = EngineOptions(gpu_memory_share=0.5)
    own = 40 * GIB - held - CONTEXT_BYTES - step - GRAPHS_BYTES
    assert gpu_kv_bytes(whole, 80 * GIB, 60 * GIB, held, step) == own
    assert gpu_kv_bytes(whole, 80 * GIB, 10 * GIB, held, step) == 10 * GIB - step - GRAPHS_BYTES, "another has the rest"
    with pytest.raises(UserError, match="hold weights and steps, and no KV") as raised:
        gpu_kv_bytes(EngineOptions(gpu_memory_share=0.1), 80 * GIB, 60 * GIB, held, step)
    assert "0.22" in str(raised.value.hint)
    assert gpu_kv_bytes(EngineOptions(), 80 * GIB, 60 * GIB, held, step) == 384 * MIB
    with pytest.raises(UserError, match=r"the GPU has .* left for KV"):
        gpu_kv_bytes(EngineOptions(kv_memory_bytes=20 * GIB), 80 * GIB, 10 * GIB, held, step)


def test_options_without_effect_on_the_device_are_refused() -> None:
    with pytest.raises(UserError, match="link of its own"):
        refuse_on_gpu(EngineOptions(scheduler=SchedulerConfig(link_bytes_s=1e9)))
    refuse_on_gpu(EngineOptions())
    with pytest.raises(UserError, match="needs a GPU"):
        refuse_without_gpu(EngineOptions(gpu_memory_share=0.5))
    refuse_without_gpu(EngineOptions())
