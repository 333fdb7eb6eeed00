"""Random lives of two to four instances: messages are lost, peers die, are expelled, and fail; every token is right.

PYTHONPATH=tests/support python tests/twins/instance/test_cluster_random.py 17 [18 ...]     these seeds
PYTHONPATH=tests/support python tests/twins/instance/test_cluster_random.py --count 2000    many
PYTHONPATH=tests/support python tests/twins/instance/test_cluster_random.py --store 2000    many beside a store
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from fleet_store import StoreMember
from fleet_world import BLOCK, GEOMETRY, ROUTER_PEER, Fleet, TransferMode, fleet_config
from geometries import SHAPES
from instance_world import VOCAB, request
from memserve.base.config import ExchangeConfig
from memserve.base.layer_kv import WindowPages
from memserve.base.states import StatePages
from memserve.base.types import FinishReason, Tier
from memserve.base.units import NS_PER_S
from memserve.instance.cluster import store_offers
from memserve.protocol.messages import Cancel, Drain, Pin, StopSequence, Unpin
from memserve.protocol.peers import Holder


def family(number, tokens):
    """The beginning of one of three texts."""
    return [(number * 5 + i * i) % VOCAB for i in range(tokens)]


class Life:
    """Everything that a cluster does to instances, in any order, on tiny pools; a seed is a complete bug report. Texts
    grow with the ``geometry``'s blocks."""

    hbm = 12, 30
    """Blocks of an instance, at least and at most."""

    def __init__(self, seed, geometry=GEOMETRY, **fixed):
        self.random = random = Random(seed)
        self.scale = geometry.block_tokens // BLOCK
        common = {
            "dram": random.choice([0, 0, 6, 20]),
            "caching": random.random() < 0.8,
            "running": random.randint(4, 8),
            "step_tokens": random.randint(8, 24) * self.scale,
            "chunk": random.randint(2, 12) * self.scale,
            "depth": random.randint(1, 3),
            "preemption": random.choice(["auto", "swap", "recompute"]),
            "context": 64 * self.scale,
        } | fixed
        exchange = ExchangeConfig(pulls_in_flight=random.randint(1, 3), event_capacity=random.choice([0, 8, 1000]))
        self.configs = {}
        for name in "pdqe"[: random.randint(2, 4)]:
            self.configs[name] = replace(fleet_config(hbm=random.randint(*self.hbm), **common), exchange=exchange)
        self.fleet = Fleet(geometry, **self.configs)
        self.loss = random.choice([0.0, 0.0, 0.02, 0.1])
        self.fleet.lose = lambda sender, to, message: (
            random.random() < self.loss and type(message).__name__ not in ("JoinAccepted", "PeerGone")
        )
        faulty = random.random() < 0.7
        self.rules = [self.submit] * 6 + [self.go_on] * 10 + [self.run_dry, self.cancel, self.pin, self.stop]
        self.rules += [self.try_elsewhere, self.pass_time, self.stand_still]
        self.rules += [self.migrate] * 3
        self.rules += [self.fail_step, self.corrupt, self.kill, self.restart, self.expel, self.drain] if faulty else []
        self.count = 0

    def live(self, steps=60):
        for _ in range(steps):
            self.random.choice(self.rules)()
        self.loss = 0.0
        self.fleet.finish()

    def _member(self):
        return self.fleet.members[self.random.choice(self.fleet.instances)]

    def _job(self):
        unfinished = [job for job in self.fleet.jobs.values() if not job.done]
        return self.random.choice(unfinished) if unfinished else None

    def submit(self):
        """A turn of a conversation, or something new."""
        random, names = self.random, self.fleet.instances
        self.count += 1
        shared, number = random.randint(1, 26) * self.scale, random.randrange(3)
        n, beam_width = random.choice([(1, 0)] * 5 + [(2, 0), (3, 0), (1, 2), (2, 3)])
        req = request(
            f"r{self.count}",
            family(number, shared) + [random.randrange(VOCAB) for _ in range(random.randint(0, 6))],
            max_tokens=random.randint(1, 14) * self.scale,
            seed=number,
            stops=random.choice([(), (), (random.randrange(VOCAB),)]),
            logprobs=random.choice([None, None, 0]),
            n=n,
            beam_width=beam_width,
            use_cache=random.random() < 0.9,
            priority=random.randrange(3),
            grammar=random.choice(["", "", "", "one", "another"]),
        )
        first = random.choice(names)
        others = [name for name in names if name != first]
        decode_at = random.choice([*others, *others, None])
        holders = [self.fleet.members[name].peer for name in random.sample(others, random.randint(0, len(others)))]
        named = [Holder(peer, random.randint(shared // 2, shared)) for peer in holders]
        self.fleet.submit(
            req,
            first,
            decode_at,
            transfer=random.choice(list(TransferMode)),
            return_kv=random.random() < 0.5,
            deadline_in_ns=random.choice([None] * 6 + [random.randint(1, 200)]),
            holders=tuple(named + self.stores(shared)),
        )

    def stores(self, shared):
        """Holders of up to ``shared`` tokens that run nothing."""
        return []

    def go_on(self):
        for _ in range(self.random.randint(1, 60)):
            choices = self.fleet.choices()
            if not choices:
                return
            do, argument = self.random.choice(choices)
            self.fleet.now += 1
            do(argument) if argument is not None else do()

    def run_dry(self):
        self.fleet.run()

    def pass_time(self):
        """A lease and a half, or a moment."""
        self.fleet.pass_time(self.random.choice([1, 3 * NS_PER_S, 45 * NS_PER_S]))

    def fail_step(self):
        member = self._member()
        if member.plans:
            member.do_plan(fail=self.random.randrange(2))

    def stand_still(self):
        self._member().stand_still()

    def corrupt(self):
        self._member().corrupt_pulls = 1

    def kill(self):
        if len(self.fleet.instances) > 1:
            self.fleet.kill(self._member().peer.name)

    def restart(self):
        for name in self.configs:
            if name not in self.fleet.members:
                self.fleet.join(name, self.configs[name])

    def expel(self):
        self.fleet.expel(self._member().peer.name)

    def drain(self):
        """Refuses what is new; a later incarnation takes its place."""
        member = self._member()
        self.fleet.send(ROUTER_PEER, member.peer, Drain())
        self.go_on()
        if member.peer.name in self.fleet.members:
            self.fleet.expel(member.peer.name)

    def try_elsewhere(self):
        """The router takes a request to be stalled."""
        if job := self._job():
            self.fleet.attempt(job)

    def migrate(self):
        """Something is to go on elsewhere: mostly what can."""
        jobs = [job for job in self.fleet.jobs.values() if not job.done]
        able = [job for job in jobs if job.got and job.request.n == 1 and not job.request.beam_width]
        for job in self.random.sample(able or jobs, min(2, len(able or jobs))):
            self.fleet.migrate(job, self._member().peer.name, copies_ahead=self.random.random() < 0.6)
        self.go_on()

    def cancel(self):
        """The client goes away: silence, at once or a little later."""
        if job := self._job():
            del self.fleet.jobs[job.request.request_id]
            self._tell(job, Cancel(job.attempt_id))

    def stop(self):
        """A stop string was found in what the client has of a sequence."""
        job = self._job()
        if job is None or job.request.beam_width:
            return
        index = self.random.randrange(job.request.n)
        if job.got.get(index) and index not in job.final:
            job.final[index] = FinishReason.CANCELLED  # the client waits no more
            self._tell(job, StopSequence(job.attempt_id, index))

    def _tell(self, job, message):
        for name in job.involved:
            if name in self.fleet.members:
                self.fleet.send(ROUTER_PEER, self.fleet.members[name].peer, message)

    def pin(self):
        tokens = request("x", family(self.random.randrange(3), self.random.randint(1, 30) * self.scale)).prompt
        handle, to = f"h{self.random.randrange(3)}", self._member().peer
        pin = Pin(handle, "", tokens, self.random.choice([1, 60]) * NS_PER_S)
        self.fleet.send(ROUTER_PEER, to, self.random.choice([pin, pin, Unpin(handle)]))


SEEDS = int(os.environ.get("MEMSERVE_TEST_EXAMPLES", "48"))


def live_all(make_life, part, parts):
    """Every so many of the seeds; an error names its own."""
    for seed in range(part, SEEDS, parts):
        try:
            make_life(seed).live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("part", range(4))
def test_random_lives(part):
    live_all(Life, part, 4)


class StoreLife(Life):
    """A life with a store, which may die and come back empty."""

    def __init__(self, seed, geometry=GEOMETRY, **fixed):
        super().__init__(seed, geometry, **fixed)
        self.generation = 0
        self.start_store()
        self.rules += [self.kill_store, self.start_store, self.silence, self.forget, self.corrupt_store]

    @property
    def store(self):
        return self.fleet.members.get("s")

    def stores(self, shared):
        if self.store is None or self.random.random() < 0.3:
            return []
        tokens = self.random.randint(shared // 2, shared)
        on_disk = self.random.choice([0, tokens // 2])
        return [Holder(self.store.peer, tokens, Tier.SSD if on_disk else Tier.DRAM, on_disk)]

    def start_store(self):
        if self.store is None:
            self.generation += 1
            self.fleet.members["s"] = StoreMember(self.fleet, generation=self.generation, blocks=400)
            self.fleet.welcome_all()

    def kill_store(self):
        if self.store is not None:
            self.fleet.kill("s")

    def silence(self):
        if self.store is not None:
            self.store.mute = not self.store.mute

    def forget(self):
        """It has evicted something."""
        if self.store is not None and self.store.pool.table:
            identity = self.random.choice(list(self.store.pool.table))
            self.store.pool.release([self.store.pool.table.pop(identity)])

    def corrupt_store(self):
        if self.store is not None:
            self.store.corrupt_pulls = 1

    def live(self, steps=60):
        super().live(steps)
        for name in self.fleet.instances:
            writer = self.fleet.members[name].machine.link.writer
            assert not writer.offers.exported


@pytest.mark.parametrize("name", SHAPES)
def test_random_lives_with_real_geometries(name):
    """Blocks of 32 and 64 tokens, layers by the dozen: one life beside a store, and one without."""
    StoreLife(1, SHAPES[name].kv).live(30)
    Life(2, SHAPES[name].kv).live(30)


@pytest.fixture
def small_groups(monkeypatch):
    """Small blocks leave by layer."""
    monkeypatch.setattr(store_offers, "GROUP_BYTES", 1)


@pytest.mark.parametrize("part", range(2))
def test_random_lives_beside_a_store(part, small_groups):
    """It is slow, silent, forgetful, damaged, killed."""
    live_all(StoreLife, part, 2)


STATES = (StatePages(10, 1), StatePages(300, 2), StatePages(350, 3))
"""Of blocks with 160 bytes in five layers: the last block is full, or a page or two of it are."""


class StateLife(Life):
    """Layers have recurrent states as well."""

    def __init__(self, seed):
        super().__init__(seed, states=STATES[seed % len(STATES)])


class StoredStateLife(StoreLife):
    """The same beside a store."""

    def __init__(self, seed):
        super().__init__(seed, states=STATES[seed % len(STATES)])


def window_pages(seed):
    random = Random(seed)
    window, chunk = random.randint(1, 14), random.choice((0, random.randint(2, 14)))
    return WindowPages(random.choice((0, window)) if chunk else window, seed % 3 + 1, BLOCK, 12, chunk)


class WindowLife(Life):
    """KV of layers that read a window lies apart, on one tier."""

    hbm = 44, 75

    def __init__(self, seed):
        super().__init__(seed, dram=0, windows=window_pages(seed))


class StoredWindowLife(StoreLife):
    """The same beside a store."""

    hbm = 44, 75

    def __init__(self, seed):
        super().__init__(seed, dram=0, windows=window_pages(seed))


@pytest.mark.parametrize("part", range(2))
def test_random_lives_with_windows_apart(part):
    live_all(lambda seed: (StoredWindowLife if seed % 3 else WindowLife)(seed), part, 2)


@pytest.mark.parametrize("part", range(2))
def test_random_lives_with_states(part):
    live_all(lambda seed: (StoredStateLife if seed % 3 else StateLife)(seed), part, 2)


def survey(seeds, kind=Life):
    """What happened in many lives: a test in which nothing happens proves nothing."""
    seen = Counter()
    for seed in seeds:
        life = kind(seed)
        try:
            life.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen["lives"] += 1
        seen["handed_over"] += len(life.fleet.handed_over)
        seen.update(f"refused: {refused.reason[:70]}" for refused in life.fleet.refused)
        for member in (life.fleet.members[name] for name in life.fleet.instances):
            stats = member.machine.stats()
            seen["standstills"] += member.machine.state.counters.standstills
            for name in stats.__slots__:
                if isinstance(getattr(stats, name), int):
                    seen[name] += getattr(stats, name)
        seen.update(f"ended: {reason}" for job in life.fleet.jobs.values() for reason in job.final.values())
        seen["attempts"] += sum(job.attempt + 1 for job in life.fleet.jobs.values())
    for name, count in sorted(seen.items()):
        print(f"{count:8} {name}")


if __name__ == "__main__":
    if sys.argv[1] == "--store":
        store_offers.GROUP_BYTES = 1
        survey(range(int(sys.argv[2])), StoreLife)
    else:
        survey(range(int(sys.argv[2])) if sys.argv[1] == "--count" else map(int, sys.argv[1:]))
