"""A store that dies, is cut off, and whose disks fail, hang, fill up, or hold other bytes than were written."""

from __future__ import annotations

from random import Random

from memserve_lab.sim.fuzz.faults.device import multiply, raise_by
from memserve_lab.sim.fuzz.faults.process import Kind, Undo, World
from memserve_lab.sim.fuzz.instances import FuzzedInstance
from memserve_lab.sim.fuzz.scenario import Fault
from memserve_lab.sim.fuzz.stores import FuzzedStore
from memserve_lab.sim.reference.oracle import Violation


def _store(world: World, fault: Fault) -> FuzzedStore:
    """One of the stores."""
    if not world.stores:
        raise Violation("a store was to be hurt, and there is none")
    return world.stores[fault.seed % len(world.stores)]


def _again(world: World, store: FuzzedStore) -> Undo:
    def again() -> None:
        if not store.alive:
            world.log_line("the store starts again")
            store.boot_process()

    return again


def _kill(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    """Its disks are kept; its memory is adopted by the next process, whole or damaged, or lost."""
    store = _store(world, fault)
    if not store.alive:
        return None
    fate = random.choice(["adopted", "adopted", "damaged", "lost"])
    world.log_line(f"the store is killed, its memory {fate}")
    store.die_with_memory(keeps_memory=fate != "lost")
    if fate == "damaged":
        store.damage_memory(random)
    if random.random() < 0.5:
        store.boot_process()  # before anything has noticed
        return None
    return _again(world, store)


def _power(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    store = _store(world, fault)
    if not store.alive:
        return None
    store.die_with_memory(keeps_memory=False, power=True)
    return _again(world, store)


def _drain(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    _store(world, fault).drain_store(random.choice([0, fault.for_ns]))


def _pause(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    store = _store(world, fault)
    if not store.alive:
        return None
    store.pause_process()
    life = store.life

    def resume() -> None:
        if store.life == life:
            store.resume_process()

    return resume


def _cut(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """From one instance, all of them, or the router."""
    store, mode, both_ways = _store(world, fault), random.choice(["lose", "hold"]), random.random() < 0.7
    instances = [instance.peer.name for instance in world.instances]
    ends = random.choice([[node.peer.name], instances, [world.router.peer.name], [*instances, world.router.peer.name]])
    ways = [way for end in ends for way in world.network.cut_ways(store.peer.name, end, mode, both_ways)]
    return lambda: world.network.heal_ways(ways, mode)


def _corrupt(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """Half of the pages that it pulls come with another byte."""
    return raise_by(_store(world, fault), "corrupting")


def _slow_link(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    return multiply(_store(world, fault), "pull_slowness", random.choice([10, 60]))


def _rot(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> None:
    """Bits on its disks flip: anywhere, or in what is kept there."""
    store, share = _store(world, fault), random.choice([0.0, 0.1, 0.6])
    store.has_damage = True
    for log, disk in zip(store.logs, store.disks, strict=True):
        for _ in range(random.choice([1, 20])):
            disk.flip_bit(random.randrange(8 * disk.nbytes))
        keys = log.keys()
        for key in sorted(keys[offset : offset + 16] for offset in range(0, len(keys), 16)):
            record = log.look(key)
            if record is not None and random.random() < share:
                disk.flip_bit(8 * record.offset + random.randrange(8 * record.length))


def _disk_errors(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """Jobs fail; a write that fails has written some sectors."""
    store, share = _store(world, fault), random.choice([0.1, 0.5, 1.0])
    store.disk_errors += share

    def stop() -> None:
        store.disk_errors = max(0.0, store.disk_errors - share)
        store.disk_errors *= store.disk_errors > 1e-9

    return stop


def _disk_full(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    return raise_by(_store(world, fault), "full_disks")


def _slow_disk(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    return multiply(_store(world, fault), "disk_slowness", random.choice([10, 60]))


def _disk_hang(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """No job ends as long as the fault lasts; then all of them."""
    store = _store(world, fault)
    store.hanging_disks += 1

    def stop() -> None:
        store.hanging_disks -= 1
        if not store.hanging_disks:
            store.submit_disks()

    return stop


KINDS: dict[str, Kind] = {
    "store-kill": _kill,
    "store-power": _power,
    "store-drain": _drain,
    "store-pause": _pause,
    "store-cut": _cut,
    "store-corrupt": _corrupt,
    "store-slow-link": _slow_link,
    "store-rot": _rot,
    "store-disk-errors": _disk_errors,
    "store-disk-full": _disk_full,
    "store-slow-disk": _slow_disk,
    "store-disk-hang": _disk_hang,
}
