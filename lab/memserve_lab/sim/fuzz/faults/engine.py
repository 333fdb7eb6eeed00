"""A server of another project that dies or breaks answers off, and the process that is a member for it."""

from __future__ import annotations

from random import Random

from memserve_lab.sim.engines import EngineNode
from memserve_lab.sim.fuzz.faults.process import Kind, Undo, World
from memserve_lab.sim.fuzz.instances import FuzzedInstance
from memserve_lab.sim.fuzz.scenario import Fault
from memserve_lab.sim.reference.oracle import Violation


def _engine(world: World, fault: Fault) -> EngineNode:
    """One of them."""
    if not world.engines:
        raise Violation("an engine was to be hurt, and there is none")
    return world.engines[fault.seed % len(world.engines)]


def _down(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    engine = _engine(world, fault)
    if not engine.is_up:
        return None
    engine.kill_server()
    if random.random() < 0.3:
        engine.start_server()  # before anything has looked
        return None
    return engine.start_server


def _break(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    _engine(world, fault).break_calls()


def _kill(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    engine = _engine(world, fault)
    if not engine.alive:
        return None
    engine.kill_process()

    def again() -> None:
        if not engine.alive:
            engine.boot_process()

    return again


def _pause(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    engine = _engine(world, fault)
    engine.pause_process()
    life = engine.life

    def again() -> None:
        if engine.life == life:
            engine.resume_process()

    return again


KINDS: dict[str, Kind] = {
    "engine-down": _down,
    "engine-break": _break,
    "engine-kill": _kill,
    "engine-pause": _pause,
}
