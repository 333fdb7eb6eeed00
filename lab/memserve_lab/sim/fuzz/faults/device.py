"""Knobs of a node: a fault turns one, and its end turns it back. Faults overlap, so both ends are steps, not values.

Devices that fail, hang or are slow, payloads that are damaged on the way, and the disk of the router.
"""

from __future__ import annotations

from random import Random

from memserve_lab.sim.fuzz.faults.process import Kind, Undo, World
from memserve_lab.sim.fuzz.instances import FuzzedInstance
from memserve_lab.sim.fuzz.scenario import MS, Fault


def raise_by(node: object, knob: str, step: int = 1) -> Undo:
    """Add ``step`` to the attribute ``knob``; what is returned takes it away again."""
    setattr(node, knob, getattr(node, knob) + step)

    def lower() -> None:
        setattr(node, knob, getattr(node, knob) - step)

    return lower


def multiply(node: object, knob: str, factor: int) -> Undo:
    """Multiply the attribute ``knob``, a whole number, by ``factor``; what is returned divides it again."""
    setattr(node, knob, getattr(node, knob) * factor)

    def divide() -> None:
        setattr(node, knob, getattr(node, knob) // factor)

    return divide


def _corrupt(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """Half of the pages that it pulls arrive with a wrong byte."""
    return raise_by(node, "corrupting")


def _device(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    node.fails_next_step = True


def _row(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """In each of the next steps one row fails alone: no other request may notice."""
    node.rows_to_fail += random.choice([1, 1, 2, 5])


def _hang(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """One step takes as long as the fault lasts; the process lives, and sends heartbeats."""
    node.next_step_hangs_ns = fault.for_ns


def _slow_device(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    return multiply(node, "step_slowness", random.choice([5, 40]))


def _slow_link(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    return multiply(node, "pull_slowness", random.choice([10, 60]))


def _slow_tier(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """Each block that moves between the tiers delays the device."""
    return raise_by(node, "copy_ns", random.choice([2, 20, 150]) * MS)


# -- the disk of the router: slow, full, or without the writes that were not yet synced when the power failed


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


KINDS: dict[str, Kind] = {
    "corrupt": _corrupt,
    "device": _device,
    "row": _row,
    "hang": _hang,
    "slow-device": _slow_device,
    "slow-link": _slow_link,
    "slow-tier": _slow_tier,
    "router-power": _router_power,
    "disk-full": _disk_full,
    "slow-disk": _slow_disk,
}
