"""Messages that are cut off, lost, late, early, twice, or broken."""

from __future__ import annotations

from random import Random

from memserve_lab.sim.fuzz.faults.process import Kind, Undo, World
from memserve_lab.sim.fuzz.instances import FuzzedInstance
from memserve_lab.sim.fuzz.network import FaultyNetwork
from memserve_lab.sim.fuzz.scenario import MS, Fault


def _partition(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    name, mode, both_ways = node.peer.name, random.choice(["lose", "hold"]), random.random() < 0.7
    other_names = [instance.peer.name for instance in world.instances if instance is not node]
    other_names += [store.peer.name for store in world.stores]
    if fault.other == -2:
        ends = [world.router.peer.name]
    elif fault.other == -1 or world.instances[fault.other] is node:
        ends = [*other_names, world.router.peer.name]
    else:
        ends = [world.instances[fault.other].peer.name]
    ways = [way for end in ends for way in world.network.cut_ways(name, end, mode, both_ways)]
    return lambda: world.network.heal_ways(ways, mode)


def _follower_cut(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo | None:
    """A router that is not the owner is cut off from the owner, from an instance or a store, or from all."""
    followers = world.routers.followers
    if not followers:
        return None
    name, owner = followers[fault.seed % len(followers)].peer.name, world.router.peer.name
    instances = [instance.peer.name for instance in world.instances]
    mode, both_ways = random.choice(["lose", "hold"]), random.random() < 0.7
    stores = [[store.peer.name] for store in world.stores]
    ends = random.choice([[owner], [owner], [node.peer.name], [owner, *instances], *stores])
    ways = [way for end in ends for way in world.network.cut_ways(name, end, mode, both_ways)]
    return lambda: world.network.heal_ways(ways, mode)


def _share(network: FaultyNetwork, knob: str, share: float) -> Undo:
    """Raise the share of messages that suffer a fault, for a time."""
    setattr(network, knob, getattr(network, knob) + share)
    return lambda: setattr(network, knob, max(0.0, getattr(network, knob) - share))


def _lose(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    return _share(world.network, "loss", random.choice([0.02, 0.1, 0.4]))


def _repeat(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """The mailbox drops repeated messages; the machines would tolerate them."""
    return _share(world.network, "repeats", random.choice([0.05, 0.3]))


def _reorder(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """Messages overtake earlier ones. The mailbox would drop those; the machines tolerate them."""
    return _share(world.network, "overtakes", random.choice([0.02, 0.1, 0.4]))


def _garble(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    """A damaged message fails its authentication (CURVE): it is dropped, and often the connection as well."""
    return _share(world.network, "garbles", random.choice([0.005, 0.03, 0.1]))


def _delay(world: World, fault: Fault, node: FuzzedInstance, random: Random) -> Undo:
    extra_ns = random.choice([5, 50, 400]) * MS
    world.network.extra_ns += extra_ns

    def stop() -> None:
        world.network.extra_ns -= extra_ns

    return stop


KINDS: dict[str, Kind] = {
    "follower-cut": _follower_cut,
    "partition": _partition,
    "lose": _lose,
    "repeat": _repeat,
    "delay": _delay,
    "reorder": _reorder,
    "garble": _garble,
}
