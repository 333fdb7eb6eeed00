"""What ``memserve serve`` makes of its cluster options, before anything starts."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from cluster_world import BLOCK, info
from memserve.api.http.config import ApiConfig, EdgeConfig, ServerConfig
from memserve.base.config import AdmissionConfig, ClusterConfig, EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.kv_layout import Parallel
from memserve.base.options import command_line_of
from memserve.base.types import Admission, Caching, Role
from memserve.base.units import GIB
from memserve.cli.cluster import members as cluster
from memserve.cli.cluster import topology as shape_module
from memserve.cli.cluster.http import followers_at
from memserve.cli.cluster.members import ClusterOptions
from memserve.cli.cluster.topology import choose_counts, follow_context, room_text, shape_text
from memserve.cli.flags import HttpOptions
from memserve.cli.main import command_line
from memserve.instance.scheduler.capacity import Hardware, Shape, choose_shape
from memserve.model.loading.card import Context, ModelCard
from memserve.model.loading.sources import weight_bytes
from memserve.system import memory
from memserve.system.gpus import DeviceChoice, FoundGpu
from memserve.system.secrets import GivenKeys
from memserve.transport.network_devices import split_address


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ((2, None, None), (2, 1, 0)),
        ((None, 3, None), (1, 3, 0)),
        ((None, None, 2), (0, 0, 2)),
        ((1, None, 1), (1, 1, 1)),
        ((1, 0, 0), (1, 0, 0)),
    ],
)
def test_a_prefill_and_a_decode_instance_go_together(asked, counts) -> None:
    assert choose_counts(*asked, EngineOptions()) == Shape(*counts)


def test_default_shape_suits_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    here = EngineOptions(model=str(tmp_path), device="cpu")
    for cores, memory_bytes, apart in ((2, 64 * GIB, False), (16, 64 * GIB, True), (16, 2 * GIB, False)):
        monkeypatch.setattr(shape_module, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(shape_module, "available_memory_bytes", lambda size=memory_bytes: size)
        shape = choose_counts(None, None, None, here)
        assert (shape.prefill, shape.decode, shape.colocated) == ((1, 1, 0) if apart else (0, 0, 1))
        other = "--colocated 1" if apart else "--prefill 1 --decode 1"
        assert shape_text(shape).endswith(f"({shape.reason}); for the other shape: {other}")
    assert choose_counts(1, 1, None, EngineOptions(device="cuda")) == Shape(1, 1, 0)
    monkeypatch.setattr(
        shape_module, "device_here", lambda device: DeviceChoice((FoundGpu("H100", GIB, (9, 0)),) * 5, "")
    )
    for workers, count in ((1, 5), (2, 2), (8, 1)):  # the last is refused where it is started
        shape = choose_counts(None, None, None, EngineOptions(parallel=Parallel(workers)))
        assert (shape.prefill, shape.decode, shape.colocated) == (0, 0, count)
    assert shape_text(Shape(1, 1, 0)) == ""


@pytest.mark.parametrize(
    ("machine", "instance", "counts"),
    [
        (Hardware(8, 4 * GIB), GIB, (1, 1, 0)),
        (Hardware(8, 4 * GIB), 2 * GIB, (1, 1, 0)),
        (Hardware(8, 4 * GIB), 2 * GIB + 1, (0, 0, 1)),
        (Hardware(7, 400 * GIB), GIB, (0, 0, 1)),
        (Hardware(1, None), GIB, (0, 0, 1)),
        (Hardware(64, None), GIB, (0, 0, 1)),
        (Hardware(64, 400 * GIB), None, (0, 0, 1)),
        (Hardware(64, 400 * GIB, gpus=1), GIB, (0, 0, 1)),
        (Hardware(64, 400 * GIB, gpus=4), GIB, (0, 0, 4)),
    ],
)
def test_prefill_and_decode_go_apart_where_there_is_room(machine: Hardware, instance: int | None, counts) -> None:
    shape = choose_shape(machine, instance)
    assert (shape.prefill, shape.decode, shape.colocated) == counts and shape.reason


def test_weights_are_weighed_where_they_lie(tmp_path: Path) -> None:
    assert weight_bytes(str(tmp_path)) is None and weight_bytes("some/where") is None
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    assert weight_bytes(str(tmp_path)) == 10
    (tmp_path / "one.gguf").write_bytes(bytes(3))
    assert weight_bytes(str(tmp_path / "one.gguf")) == 12


def test_a_share_of_the_processors_time_counts_as_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert memory.usable_cores() == 16
    for said, cores in (("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16)):
        (tmp_path / "cpu.max").write_text(said + "\n")
        assert memory.usable_cores() == cores


def test_the_start_says_what_fits() -> None:
    assert room_text(17_472, 8192, 64) == (
        "memory: 17,472 tokens of KV, contexts up to 8,192: about 17 clients at once with 1,000 tokens each"
    )
    assert room_text(1_000_000, 8192, 64).endswith("about 64 clients at once with 1,000 tokens each")
    assert room_text(96, 97, 64).endswith("about 1 client at once with 97 tokens each")


@pytest.mark.parametrize(
    ("caching", "caches"),
    [
        (Caching.OFF, []),
        (Caching.PD_CACHING_1, [Role.PREFILL, Role.COLOCATED]),
        (Caching.PD_CACHING_2, [Role.PREFILL, Role.DECODE, Role.COLOCATED]),
        (Caching.PD_CACHING_3, [Role.PREFILL, Role.DECODE, Role.COLOCATED]),
    ],
)
def test_roles_with_cache_per_caching_level(caching: Caching, caches: list[Role]) -> None:
    options = ClusterOptions(1, 1, 1, ClusterConfig(caching))
    assert [role for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED) if options.role_caches(role)] == caches
    orders = cluster._orders(EngineOptions(), options, "tcp://127.0.0.1:1", "info")
    assert [order.role for order in orders if "--no-cache" not in order.flags] == caches
    assert [order.name for order in orders] == ["p1", "d1", "c1"]
    for order in orders:
        shown = " ".join(order.command_line)
        assert f"memserve instance --role {order.role.value} --name {order.name}" in shown and "--link shm" in shown


def test_children_are_given_the_same_engine_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``command_line_of`` writes, ``memserve instance`` must read as the same options."""
    options = EngineOptions(
        model="m", dtype="float16", device="cpu", kv_memory_bytes=5120, dram_memory_bytes=7168, caching=False,
        scheduler=SchedulerConfig(3, 5, 4, 6, 1, "swap"), max_model_tokens=9, block_tokens=16, threads=1,
    )  # fmt: skip
    assert command_line_of(EngineOptions()) == ()
    seen: list[EngineOptions] = []
    monkeypatch.setattr("memserve.cli.cluster.instance._run_supervised", lambda options, *rest: seen.append(options))
    command_line()(["instance", "--join", "h:1", "--supervised", *command_line_of(options)], standalone_mode=False)
    assert seen == [options]


def test_routers_of_a_server_are_given_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches take no value: ``--lenient``, ``--no-generation-config``."""
    http = HttpOptions(
        ServerConfig("10.0.0.1", 8001, ("a", "b"), False, 7, 3.5, "error"), GivenKeys(), GivenKeys(), None,
        EdgeConfig(connections_max=9), ApiConfig(True, "/llm", "hermes", "none", True, True),
    )  # fmt: skip
    admission = AdmissionConfig(Admission.CACHE, hold=True, priority_across_tenants=True)
    with socket.create_server(("127.0.0.1", 0)) as shared, socket.create_server(("127.0.0.1", 0)) as own:
        ports = [listener.getsockname()[1] for listener in (shared, own)]
        followers = followers_at([shared, own], http, EngineOptions(model="m"), ClusterConfig(admission=admission))
    calls: list[Any] = []
    monkeypatch.setattr("memserve.cli.cluster.router._run_supervised", lambda *arguments: calls.append(arguments))
    command_line()(["router", "--join", "h:1", "--supervised", *followers.flags], standalone_mode=False)
    models, _, _, cluster_config, read_http, _, owner_url = calls[0]
    read = read_http(GivenKeys(), GivenKeys())
    assert [model.engine for model in models] == [EngineOptions(model="m")]
    assert cluster_config.admission == admission
    assert read == dataclasses.replace(http, server=dataclasses.replace(http.server, port=ports[0]))
    assert owner_url.endswith(f":{ports[1]}")


@pytest.mark.parametrize("text", ["", "host", "host:", ":5900", "host:port", "host:0", "host:70000"])
def test_addresses_are_checked(text: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        split_address(text, "--join")


def test_addresses_are_read() -> None:
    assert split_address("10.0.0.1:5900", "--join") == ("10.0.0.1", 5900)
    assert split_address("tcp://[::1]:5900", "--join") == ("::1", 5900)


def test_model_context_follows_joint_context_of_members() -> None:
    """It grows when another joins, and stays when one is gone: the next process of its name is on its way."""

    def member(name: str, tokens: int) -> object:
        card = ModelCard("tiny", tokens, 100, (2,), {}, "", f"{tokens} fit").encode()
        rest = {"model_card": card, "segments_at": "tcp://there:1", "sequence_tokens": 250}
        return structs.replace(info(name, Role.COLOCATED), context_tokens=tokens, **rest)

    members = {"a": member("a", 20 * BLOCK + 1), "s": info("s", Role.STORE)}
    engine = SimpleNamespace(members=lambda: members, on_joined=None)
    model = SimpleNamespace(context=Context(20 * BLOCK + 1, "81 fit"))
    follow_context(engine, model, 3)
    assert model.context == Context(81, "81 fit")
    for name, served in (("b", (161, "81 fit")), ("c", (241, "81 fit")), ("d", (241, "81 fit"))):
        members[name] = member(name, 20 * BLOCK + 1)
        engine.on_joined()
        assert model.context == Context(*served)
    members.clear()
    engine.on_joined()
    members["a"] = structs.replace(member("a", 500), model_card=b"of another release")
    engine.on_joined()
    assert model.context == Context(241, "81 fit")
    members["a"] = member("a", 500)
    engine.on_joined()
    assert model.context == Context(500, "500 fit")
