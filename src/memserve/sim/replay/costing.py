"""What a simulated run used."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.sim.replay.world import ReplayWorld
from memserve.units import NS_PER_S

S_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a whole run, from the workload's start to its last answer."""

    devices: int
    simulated_s: float
    device_hours: float
    """All devices, for all of the time."""
    busy_share: float
    """Of it, the time that they worked."""
    tokens: int
    """Generated."""
    tokens_per_device_hour: float
    pulled_bytes: int
    """KV that went from instance to instance."""
    link_waits_s: float
    """How much longer that took, all together, because links were shared."""


def usage(world: ReplayWorld) -> Usage:
    """Of ``world``, which has run."""
    elapsed_s, setup = world.elapsed_s, world.setup
    device_hours = setup.devices * elapsed_s / S_PER_HOUR
    busy_s = sum(node.device.busy_ns for node in world.instances) / NS_PER_S
    instances = len(world.instances)
    return Usage(
        setup.devices,
        elapsed_s,
        device_hours,
        busy_s / (instances * elapsed_s) if elapsed_s else 0.0,
        world.clients.tokens,
        world.clients.tokens / device_hours if device_hours else 0.0,
        world.links.pulled_bytes,
        world.links.waited_ns / NS_PER_S,
    )
