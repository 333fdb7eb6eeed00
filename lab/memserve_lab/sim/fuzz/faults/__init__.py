"""What goes wrong in a fuzzed world, and how it is repaired."""

from __future__ import annotations

from random import Random

from memserve_lab.sim.fuzz.faults import device, engine, process, store, wire
from memserve_lab.sim.fuzz.faults.process import World
from memserve_lab.sim.fuzz.scenario import ROW, Fault
from memserve_lab.sim.fuzz.scenario_features import STORE_FAULTS
from memserve_lab.sim.reference.oracle import require

KINDS = {**process.KINDS, **wire.KINDS, **device.KINDS, **store.KINDS, **engine.KINDS}


_NO_EXCUSE = {ROW, *STORE_FAULTS, "follower-kill"}
"""A row that fails costs one request; the others cost none: clients of a follower that dies ask another router."""


def strike(world: World, fault: Fault) -> None:
    """Do the damage now, and undo it when its time is over."""
    world.referee.excused |= fault.kind not in _NO_EXCUSE
    world.happened[fault.kind] += 1
    world.log_line(f"FAULT {fault}")
    undo = KINDS[fault.kind](world, fault, world.instances[fault.place], Random(fault.seed))
    if undo is not None:
        world.clock.call_after(fault.for_ns, undo)


def heal_all(world: World) -> None:
    """Repair whatever is still broken. (Every fault has ended by its own time; this is the safety net's check.)"""
    for node in world.instances:
        node.fails_next_step = False
        node.rows_to_fail = 0
        node.next_step_hangs_ns = 0
        if not (node.member.drains or node.set_back):  # else it starts again after it has left, or once it may
            require(node.alive and not node.paused, f"{node.peer.name} was not put right")
        require(node.is_well, f"{node.peer.name} was not put right")
    for member in world.stores:
        require(member.is_well and not member.paused, f"{member.peer.name} was not put right")
    for server in world.engines:
        require(server.alive and server.is_up and not server.paused, f"{server.peer.name} was not put right")
    require(world.router.medium.room_bytes is None and not world.router.disk_ns, "the disk was not put right")
    require(world.network.is_well, "the network was not put right")
