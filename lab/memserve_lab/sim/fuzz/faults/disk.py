"""The disk of the router: slow, full, or without the writes that were not yet synced when the power failed."""

from __future__ import annotations

from random import Random

from memserve_lab.sim.fuzz.faults.device import raise_by
from memserve_lab.sim.fuzz.faults.process import Kind, Undo, World
from memserve_lab.sim.fuzz.instances import FuzzedInstance
from memserve_lab.sim.fuzz.scenario import MS, Fault


def _router_power(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """The router's machine loses power: some of the last writes arrived, in any order."""
    arrived = random.choice([0.0, random.random(), 1.0])
    world.router.lose_power(arrived, (random.random(), random.choice([0.0, random.random()])))
    world.routers.owner_dies()


def _disk_full(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """There is a little room left, then none."""
    medium = world.router.medium
    medium.room_bytes = len(medium.load() or b"") + random.choice([0, 40, 500])

    def stop() -> None:
        medium.room_bytes = None

    return stop


def _slow_disk(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    return raise_by(world.router, "disk_ns", random.choice([3, 30, 300]) * MS)


KINDS: dict[str, Kind] = {"router-power": _router_power, "disk-full": _disk_full, "slow-disk": _slow_disk}
