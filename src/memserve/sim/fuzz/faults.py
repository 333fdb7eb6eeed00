"""What goes wrong in a cluster world, and how it is put right again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from memserve.cluster.events import InstanceDrained
from memserve.sim.fuzz.scenario import MS, Fault
from memserve.sim.fuzz.truth import require

if TYPE_CHECKING:
    from memserve.sim.fuzz.instances import FuzzedInstance
    from memserve.sim.fuzz.world import World


def strike(world: World, fault: Fault) -> None:
    """Do the damage now, and undo it when its time is over."""
    world.referee.excused = True
    world.happened[fault.kind] += 1
    world.say(f"FAULT {fault}")
    undo = _KINDS[fault.kind](world, fault, world.instances[fault.place], Random(fault.seed))
    if undo is not None:
        world.clock.after(fault.for_ns, undo)


def heal_all(world: World) -> None:
    """Whatever is still broken works again. (Every fault has ended by its own time; this is the safety net's check.)"""
    for node in world.instances:
        if node.draining:
            continue  # it starts again when it has left
        require(node.alive and not node.paused, f"{node.peer.name} was not put right")
        node.fails_next_step = False
    whole = world.network.loss < 1e-9 and not any(world.network.cut.values())
    require(whole, "the network was not put right")


def _kill(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None] | None:
    if not node.alive:
        return None
    node.kill()

    def again() -> None:
        if not node.alive:
            world.say(f"{node.peer.name} starts again")
            node.boot()

    return again


def _flap(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """It dies and is there again, under the same name, before anybody has noticed."""
    if node.alive:
        node.kill()
        node.boot()


def _pause(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None] | None:
    if not node.alive:
        return None
    node.pause()
    life = node.life

    def resume() -> None:
        if node.life == life:
            world.say(f"{node.peer.name} goes on")
            node.resume()

    return resume


def _router_pause(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None]:
    """The router itself is stopped: it must not take everybody else to be dead."""
    world.router.pause()
    world.router_slept_ns += fault.for_ns
    life = world.router.life

    def resume() -> None:
        if world.router.life == life:
            world.router.resume()

    return resume


def _router_restart(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    world.router_dies()


def _partition(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None]:
    name, mode, both_ways = node.peer.name, random.choice(["lose", "hold"]), random.random() < 0.7
    others = [other.peer.name for other in world.instances if other is not node]
    if fault.other == -2:
        ends = [world.router.peer.name]
    elif fault.other == -1 or world.instances[fault.other] is node:
        ends = [*others, world.router.peer.name]
    else:
        ends = [world.instances[fault.other].peer.name]
    ways = [way for end in ends for way in world.network.part(name, end, mode, both_ways)]
    return lambda: world.network.heal(ways, mode)


def _corrupt(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None]:
    node.corrupting += 1

    def stop() -> None:
        node.corrupting -= 1

    return stop


def _lose(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None]:
    share = random.choice([0.02, 0.1, 0.4])
    world.network.loss += share

    def stop() -> None:
        world.network.loss = max(0.0, world.network.loss - share)

    return stop


def _repeat(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None]:
    """The mailbox drops what comes twice; the machines would not mind."""
    share = random.choice([0.05, 0.3])
    world.network.repeats += share

    def stop() -> None:
        world.network.repeats = max(0.0, world.network.repeats - share)

    return stop


def _delay(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None]:
    extra = random.choice([5, 50, 400]) * MS
    world.network.extra_ns += extra

    def stop() -> None:
        world.network.extra_ns -= extra

    return stop


def _device(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    node.fails_next_step = True


def _slow_link(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Callable[[], None]:
    factor = random.choice([10, 60])
    node.slowness *= factor

    def stop() -> None:
        node.slowness //= factor

    return stop


def _drain(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """The operator takes it out of service; when it has left, another process takes its name."""
    world.router.post(InstanceDrained(node.peer.name))


_KINDS: dict[str, Callable[..., Callable[[], None] | None]] = {
    "kill": _kill,
    "flap": _flap,
    "pause": _pause,
    "partition": _partition,
    "corrupt": _corrupt,
    "lose": _lose,
    "repeat": _repeat,
    "delay": _delay,
    "device": _device,
    "slow-link": _slow_link,
    "drain": _drain,
    "router-pause": _router_pause,
    "router-restart": _router_restart,
}
