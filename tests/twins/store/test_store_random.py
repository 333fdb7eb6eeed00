"""Random lives of a store beside a dict: instances offer and fetch, clients put and delete, disks fail, all is killed.

Whatever the order in which messages and jobs end: a reader gets the value that was put last, or none; KV has the bytes
of its tokens (the world compares); no reference is left behind; the router knows what is here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from exchange_world import BLOCK, LEASE_NS
from memserve.protocol.messages import Leave
from memserve.protocol.peers import Peer
from memserve.protocol.store import StoreCode, StoreDelete, StoreDone
from memserve.store.disks.events import DisksConfig
from store_world import Client, StoreWorld, push

NAMES = [b"name %d" % number for number in range(8)]
PROMPTS = [[first] * (2 * BLOCK) + [second] * (2 * BLOCK) + [9] for first in (1, 2, 3) for second in (4, 5)]


@dataclass
class Twin:
    """What a value may be: the last one that was put, and those whose put has no answer yet."""

    now: dict[bytes, bytes | None] = field(default_factory=dict)
    open: dict[tuple[str, int], tuple[bytes, str, bytes | None]] = field(default_factory=dict)
    """Call of a client -> name, what it does, the value."""
    doubtful: dict[bytes, set[bytes | None]] = field(default_factory=dict)
    """Names whose last put or deletion has an uncertain end: all that their value may be."""

    def busy(self, name: bytes) -> bool:
        return any(known == name for known, _, _ in self.open.values())

    def may_be(self, name: bytes) -> set[bytes | None]:
        return {None, self.now.get(name)} | self.doubtful.get(name, set())

    def answered(self, client: Client, call: int, answer: StoreDone) -> None:
        asked = self.open.pop((client.peer.name, call), None)
        if asked is None:
            return
        name, act, value = asked
        code = StoreCode(answer.codes[0])
        if act == "get":
            got = answer.values[0] if code is StoreCode.DONE else None
            assert code in (StoreCode.DONE, StoreCode.ABSENT, StoreCode.LATE, StoreCode.NO_ROOM), code
            assert got in self.may_be(name), f"{name!r} has a value that was not put last"
        elif code is StoreCode.DONE or (act == "delete" and code is StoreCode.ABSENT):
            self.now[name] = value
            self.doubtful.pop(name, None)
        elif code is StoreCode.LATE:
            self.doubtful.setdefault(name, set()).update({value, self.now.get(name)})
        else:
            assert code in (StoreCode.NO_ROOM, StoreCode.UNREADABLE), code

    def forget_calls(self) -> None:
        """The store was killed: what was under way has happened or not."""
        for name, act, value in self.open.values():
            if act != "get":
                self.doubtful.setdefault(name, set()).update({value, self.now.get(name)})
        self.open.clear()


class Life:
    def __init__(self, seed: int, **options) -> None:
        self.rng = random.Random(seed)
        self.world = StoreWorld()
        self.world.open_store(blocks=self.rng.choice((12, 30)), seed=seed, **options)
        self.twin = Twin()
        self.numbers = 0
        for name in "pd":
            self.world.instance(name)
        for name in ("a", "b"):
            self.world.client(name)

    def step(self) -> None:
        world, rng = self.world, self.rng
        act = rng.random()
        if act < 0.55:
            self.work()
        elif act < 0.75:
            self.ask()
        elif act < 0.83:
            self.kv()
        elif act < 0.9:
            world.now += rng.choice((1, LEASE_NS // 10, LEASE_NS))
            for client in world.clients.values():
                client.hello()
            world.wait(1)
        elif act < 0.93:
            world.store.fails, world.store.why = rng.random() < 0.2, rng.choice(("EIO", "ENOSPC"))
        elif act < 0.94:
            name = rng.choice("ab")
            client = world.clients[name]
            if not client.calls or rng.random() < 0.5:
                return
            client.say(Leave())
            world.run()  # else what it asked for last may be done behind what is asked for next
            self.listen()
            self.twin.forget_calls()
            world.clients[name] = fresh = Client(world, Peer(name, client.peer.generation + 1), calls=client.calls)
            fresh.hello()
        elif act < 0.945:
            name = rng.choice("pd")
            world.dies(name)
            world.instance(name)
        elif act < 0.953:
            self.restart()
        self.listen()

    def work(self) -> None:
        """Something that is under way ends: a message, a seal, a pull, a job, in any order but that of a link."""
        world, rng, store = self.world, self.rng, self.world.store
        choices = [("link", link) for link in world.links]
        choices += [("job", job) for job in store.jobs] + [("disk", number) for number in store.disk_jobs]
        choices += [("pull", pull) for pull in store.pulls] + [("seal", job) for job in store.seals]
        if not choices or rng.random() < 0.2:
            world.step()
            return
        kind, what = rng.choice(choices)
        match kind:
            case "link":
                world.deliver(what)
            case "job":
                store.do_job(what, unreadable=rng.random() < 0.02)
            case "disk":
                store.end_disk(what, not (store.fails and rng.random() < 0.5))
            case "pull":
                store.answer(what)
            case "seal":
                store.seal(what)

    def ask(self) -> None:
        rng, client, name = self.rng, self.world.clients[self.rng.choice("ab")], self.rng.choice(NAMES)
        if self.twin.busy(name):
            return
        act = rng.choices(("put", "get", "delete"), (5, 8, 1))[0]
        value = None
        if act == "put":
            self.numbers += 1
            value = b"%d " % self.numbers * rng.choice((0, 1, 30, 150))
            call = client.put({name: value}, inline=True)
        elif act == "get":
            call = client.get(name, deadline_in_ns=rng.choice((LEASE_NS // 4, 10 * LEASE_NS)))
        else:
            client.calls += 1
            call = client.calls
            client.say(StoreDelete(call, client.key(name), (name,)))
        self.twin.open[client.peer.name, call] = (name, act, value)

    def kv(self) -> None:
        world, rng = self.world, self.rng
        node, prompt = world.nodes[rng.choice("pd")], rng.choice(PROMPTS)
        if rng.random() < 0.5:
            push(world, node, rng.choice("tu"), prompt)
        elif node.pool.match("t", prompt) < 4 * BLOCK:
            node.fetch(world.store.peer, "t", prompt, world.now + rng.choice((LEASE_NS // 4, LEASE_NS)))

    def restart(self) -> None:
        self.listen()
        self.twin.forget_calls()
        self.world.store.fails = False
        power = self.rng.random() < 0.3
        self.world.restart(power=power)
        for client in self.world.clients.values():
            client.hello()
        if power:  # what was not synced is lost, and an earlier value is back
            self.twin.now.clear()
            self.twin.doubtful.clear()
            self.twin.open.clear()
            for client in self.world.clients.values():
                self.forget_all(client)

    def forget_all(self, client: Client) -> None:
        """Values of before are of no interest any more: each name is deleted."""
        for name in NAMES:
            client.calls += 1
            client.say(StoreDelete(client.calls, client.key(name), (name,)))
        self.world.run()
        assert client.calls in client.answers, "a deletion is never answered"

    def listen(self) -> None:
        for client in self.world.clients.values():
            for call, answer in list(client.answers.items()):
                if isinstance(answer, StoreDone):
                    self.twin.answered(client, call, answer)
                del client.answers[call]

    def end(self) -> None:
        world = self.world
        world.store.fails = False
        for _ in range(3):
            world.run()
            world.wait(3 * LEASE_NS)
        self.listen()
        world.run()
        world.store.check_empty()
        log = world.store.machine.values.log
        assert world.store.known_to_router() == {identity: log.tier_of(identity) for identity in log.all_identities()}
        for tenant in "tu":
            for prompt in PROMPTS:
                world.store.check_kv(tenant, prompt)
        world.close()


@pytest.mark.parametrize("seed", range(24))
def test_random_lives(seed: int) -> None:
    rng = random.Random(seed)
    config = DisksConfig(sync=rng.choice(("none", "segment", "always")), admission=rng.choice(("all", "second-hit")))
    life = Life(seed, disks=rng.choice((0, 1, 2)), disks_config=config)
    for _ in range(400):
        life.step()
    life.end()
