"""What ``memserve serve`` makes of its cluster options, before anything starts."""

from __future__ import annotations

import pytest

from memserve.cli import cluster
from memserve.cli.cluster import ClusterOptions, choose_counts
from memserve.cli.main import app
from memserve.cli.options import engine_flags, split_address
from memserve.config import ClusterConfig, EngineOptions
from memserve.errors import UserError
from memserve.types import Caching, Role


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ((None, None, None), (1, 1, 0)),
        ((2, None, None), (2, 1, 0)),
        ((None, 3, None), (1, 3, 0)),
        ((None, None, 2), (0, 0, 2)),
        ((1, None, 1), (1, 1, 1)),
        ((1, 0, 0), (1, 0, 0)),
    ],
)
def test_a_prefill_and_a_decode_instance_go_together(asked, counts) -> None:
    assert choose_counts(*asked, "cpu") == counts


def test_on_a_gpu_one_instance_does_everything_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_counts(None, None, None, "cuda") == (0, 0, 1)
    assert choose_counts(1, 1, None, "cuda") == (1, 1, 0)
    monkeypatch.setattr(cluster.metadata, "version", lambda name: "2.13.0+cpu")
    assert choose_counts(None, None, None, "auto") == (1, 1, 0)


@pytest.mark.parametrize(
    ("caching", "caches"),
    [
        (Caching.OFF, []),
        (Caching.PD_CACHING_1, [Role.PREFILL, Role.COLOCATED]),
        (Caching.PD_CACHING_2, [Role.PREFILL, Role.DECODE, Role.COLOCATED]),
        (Caching.PD_CACHING_3, [Role.PREFILL, Role.DECODE, Role.COLOCATED]),
    ],
)
def test_who_caches_at_which_level(caching: Caching, caches: list[Role]) -> None:
    options = ClusterOptions(1, 1, 1, ClusterConfig(caching))
    assert [role for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED) if options.caches(role)] == caches
    orders = cluster._orders(EngineOptions(), options, "tcp://127.0.0.1:1", "info")
    assert [order.role for order in orders if "--no-cache" not in order.flags] == caches
    assert [order.name for order in orders] == ["p1", "d1", "c1"]
    for order in orders:
        shown = " ".join(order.command)
        assert f"memserve instance --role {order.role.value} --name {order.name}" in shown and "--link shm" in shown


def test_children_are_given_the_same_engine_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``engine_flags`` writes, ``memserve instance`` must read as the same options."""
    options = EngineOptions(
        model="m", dtype="float16", device="cpu", kv_memory_bytes=5120, dram_memory_bytes=7168, caching=False,
        max_running=3, max_step_tokens=5, prefill_chunk_tokens=4, max_waiting=6, steps_in_flight=1, preemption="swap",
        max_model_tokens=9, block_tokens=16, threads=1,
    )  # fmt: skip
    assert engine_flags(EngineOptions()) == ()
    seen: list[EngineOptions] = []
    monkeypatch.setattr("memserve.cli.instance._run_supervised", lambda options, *rest: seen.append(options))
    app(["instance", "--join", "h:1", "--supervised", *engine_flags(options)], standalone_mode=False)
    assert seen == [options]


@pytest.mark.parametrize("text", ["", "host", "host:", ":5900", "host:port", "host:0", "host:70000"])
def test_addresses_are_checked(text: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        split_address(text, "--join")


def test_addresses_are_read() -> None:
    assert split_address("10.0.0.1:5900", "--join") == ("10.0.0.1", 5900)
    assert split_address("tcp://[::1]:5900", "--join") == ("::1", 5900)
