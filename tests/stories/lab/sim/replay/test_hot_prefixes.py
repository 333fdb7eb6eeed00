"""What many ask for gets copies on more instances, each fetched, not computed; and none where few do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memserve.base.config import ClusterConfig
from memserve.base.types import Caching, Role
from memserve.router.placement.prefix_directory import PrefixNode
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Setup
from memserve_lab.sim.replay.world import ReplayWorld, usage
from memserve_lab.workloads.shape import Caps

INSTANCES, QUESTIONS = 4, 150
H100 = machine("llama-3-8b", "h100")


def world_asked_at(requests_per_s: float) -> ReplayWorld:
    """A world in which one document was asked about ``QUESTIONS`` times."""
    workload = build(
        Recipe(
            kind="documents", sessions=1, share_ratio=QUESTIONS, document_tokens=16_000, arrivals=Arrivals.POISSON,
            requests_per_s=requests_per_s, caps=Caps(20_000, 64, None),
        )
    )  # fmt: skip
    cluster = ClusterConfig(Caching.PD_CACHING_3, "cost")
    world = ReplayWorld(Setup({Role.COLOCATED: INSTANCES}, H100, cluster), workload)
    world.run_workload()
    return world


def nodes_of(nodes: tuple[PrefixNode, ...]) -> Iterator[PrefixNode]:
    for node in nodes:
        yield node
        yield from nodes_of(node.children)


def document_of(world: ReplayWorld) -> PrefixNode:
    (trees,) = world.router.machine.prefix_trees(None).values()
    return max(nodes_of(trees), key=lambda node: node.uses * node.blocks)


@pytest.mark.parametrize(("requests_per_s", "least", "most"), [(0.5, 1, 1), (2.0, 2, 3), (10.0, INSTANCES, INSTANCES)])
def test_copies_of_a_prefix_grow_with_what_is_asked(requests_per_s: float, least: int, most: int) -> None:
    world = world_asked_at(requests_per_s)
    document = document_of(world)
    assert least <= len(document.holders) <= most
    assert all(held.upper_blocks == document.blocks for held in document.holders)
    copy_bytes = document.blocks * H100.geometry.block_bytes
    fetched = round(usage(world).pulled_bytes / copy_bytes)
    # one that is asked while the first one computes it computes it, too
    assert len(document.holders) - 2 <= fetched < len(document.holders)
