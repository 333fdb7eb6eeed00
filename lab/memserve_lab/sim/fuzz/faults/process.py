"""Processes that die, stop, leave, or have clocks that jump."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Protocol

from memserve.router.events import InstanceDrained
from memserve_lab.sim.engines import EngineNode
from memserve_lab.sim.fuzz.clients import OutputChecker
from memserve_lab.sim.fuzz.instances import FuzzedInstance, FuzzHost
from memserve_lab.sim.fuzz.routers import FuzzedRouter, Routers
from memserve_lab.sim.fuzz.scenario import MS, Fault
from memserve_lab.sim.fuzz.stores import FuzzedStore


class World(FuzzHost, Protocol):
    """A world in which something can go wrong."""

    referee: OutputChecker
    happened: Counter[str]
    """Faults so far, by kind."""
    instances: list[FuzzedInstance]
    stores: list[FuzzedStore]
    engines: list[EngineNode]
    router_slept_ns: int

    @property
    def router(self) -> FuzzedRouter:
        """The owner."""

    @property
    def routers(self) -> Routers:
        """The owner and the followers."""


Undo = Callable[[], None]
Kind = Callable[[World, Fault, FuzzedInstance, Random], Undo | None]
"""Does the damage; returns what undoes it when the fault's time is over."""


def _kill(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    if not node.alive:
        return None
    node.kill_process()

    def again() -> None:
        if not node.alive:
            world.log_line(f"{node.peer.name} starts again")
            node.boot_process()

    return again


def _flap(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """It dies and restarts under the same name, before any other process has noticed."""
    if node.alive:
        node.kill_process()
        node.boot_process()


def _pause(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    if not node.alive:
        return None
    node.pause_process()
    life = node.life

    def resume() -> None:
        if node.life == life:
            world.log_line(f"{node.peer.name} goes on")
            node.resume_process()

    return resume


def _router_pause(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """The router itself is stopped: afterwards it must not take all others to be dead."""
    world.router.pause_process()
    world.router_slept_ns += fault.for_ns
    life = world.router.life

    def resume() -> None:
        if world.router.life == life:
            world.router.resume_process()

    return resume


def _router_restart(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    world.routers.owner_dies()


def _follower_kill(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    """A router that is not the owner dies, and starts again later."""
    follower = world.routers.follower_dies(fault.seed)
    return follower.boot_process if follower is not None else None


def _follower_pause(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    """Such a router is stopped: the owner may take it to be dead meanwhile."""
    followers = world.routers.followers
    if not followers:
        return None
    follower = followers[fault.seed % len(followers)]
    follower.pause_process()
    world.router_slept_ns += fault.for_ns
    life = follower.life

    def resume() -> None:
        if follower.life == life:
            follower.resume_process()

    return resume


def _follower_asks(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    """Such a router is stopped as soon as it has asked for the admission of a request: the answer waits for it."""
    followers = world.routers.followers
    if not followers:
        return None
    follower = followers[fault.seed % len(followers)]
    life, stopped = follower.life, []

    def stop(stops_left: int) -> None:
        if follower.life == life and follower.machine.cluster.stats().admission.waiting:
            follower.pause_process()
            stopped.append(True)
        elif follower.life == life and stops_left:
            world.clock.call_after(MS // 2, stop, stops_left - 1)

    def resume() -> None:
        if stopped and follower.life == life:
            follower.resume_process()

    world.router_slept_ns += fault.for_ns
    stop(2 * 400)
    return resume


def _drain(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """The operator drains it; when it has left, another process takes its name."""
    world.router.submit_event(InstanceDrained(node.peer.name))


def _clock_jump(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """An instance's clock goes forward, as that of a virtual machine that was moved to another host."""
    node.skew_ns += random.choice([5, 120, 1500, 20_000]) * MS


def _router_clock_jump(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """The router's clock goes forward."""
    jump_ns = random.choice([5, 120, 1500, 20_000]) * MS
    world.router.skew_ns += jump_ns
    world.router_slept_ns += jump_ns


def _clock_back(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """It is restarted after its host's wall clock was set back: its generation is an old one."""
    if node.alive:
        node.kill_process()
        node.boot_in_the_past(random.randrange(1_000, 1_000_000))


KINDS: dict[str, Kind] = {
    "kill": _kill,
    "flap": _flap,
    "pause": _pause,
    "drain": _drain,
    "router-pause": _router_pause,
    "follower-kill": _follower_kill,
    "follower-pause": _follower_pause,
    "follower-asks": _follower_asks,
    "router-restart": _router_restart,
    "clock-jump": _clock_jump,
    "router-clock-jump": _router_clock_jump,
    "clock-back": _clock_back,
}
