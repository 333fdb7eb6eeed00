"""A cluster in virtual time: the production ``Cluster`` and ``Instance`` machines, null devices, and everything that
can go wrong between them.

    python tests/whole_world.py --seeds 2000              random scenarios of every setting
    python tests/whole_world.py --seed 17 --setting pd-caching-3/by-layer/1P1D/faulty --story

A seed and a setting are a complete bug report. Checkers only watch. First the faults (nothing wrong may happen), then
everything is healed, and everything must end.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter, deque
from itertools import product
from random import Random

import numpy as np

import cluster_faults
from cluster_clients import VOCAB, Ask, Conversation, Referee
from cluster_device import LAYERS, PagedDevice
from cluster_network import Clock, Network
from cluster_nodes import InstanceNode, RouterNode
from cluster_scenario import ALL_MIXES, MS, Scenario, Setting, draw
from memserve.cluster.events import PrefixPinned, PrefixUnpinned
from memserve.cluster.machine import Cluster
from memserve.config import ClusterConfig, ExchangeConfig, InstanceConfig, PoolConfig, SchedulerConfig
from memserve.instance.machine import Instance
from memserve.messages import PeerInfo
from memserve.serving import RequestArrived, RequestCancelled, SequenceStopped
from memserve.types import Caching, KVGeometry, Role, Tier, TokenOutput, TransferMode

BLOCK_TOKENS = 4
NAMESPACE = "world"
SECOND = 1000 * MS


class World:
    """Builds what a scenario says, runs it, and checks it."""

    heartbeat_ns = 150 * MS
    join_again_ns = 300 * MS

    def __init__(self, scenario: Scenario, story_lines: int = 400) -> None:
        self.scenario = scenario
        self.random = Random(f"world {scenario.seed} {scenario.setting}")
        self.clock = Clock()
        self.network = Network(self.clock, self.random, scenario.delay_ns)
        self.network.log = self.say
        self._story: deque[tuple[int, str, object]] = deque(maxlen=story_lines)
        self.geometry = KVGeometry(LAYERS, 1, 1, 1, "float32", BLOCK_TOKENS)
        rooms = [min(scenario.context_tokens, blocks * BLOCK_TOKENS + 1) for blocks in scenario.hbm_blocks]
        self.referee = Referee(rooms, scenario.setting.caching is not Caching.OFF)
        self.links_cut = True
        self.router_slept_ns = 0
        self.happened: Counter[str] = Counter()
        self.router = RouterNode(self)
        self.network.nodes[self.router.peer.name] = self.router
        self.instances: list[InstanceNode] = []
        for place, role in enumerate(ALL_MIXES[scenario.setting.mix]):
            node = InstanceNode(self, f"{role.value[0]}{place}", role, place)
            self.instances.append(node)
            self.network.nodes[node.peer.name] = node
        self.talking = {c.name: c for c in scenario.conversations}
        for conversation in scenario.conversations:
            self.clock.at(100 * MS + conversation.starts_ns, self._starter(conversation))
        for fault in scenario.faults:
            self.clock.at(100 * MS + fault.at_ns, cluster_faults.striker(self, fault))

    # -- what the nodes are made of

    def new_cluster(self) -> Cluster:
        """The production machine of the router."""
        return Cluster(
            ClusterConfig(
                caching=self.scenario.setting.caching,
                policy=self.scenario.policy,
                transfer=self.scenario.setting.transfer,
                dead_after_ns=1 * SECOND,
                stalled_after_ns=4 * SECOND,
                attempts_max=4,
                unplaced_ns=6 * SECOND,
                tree_ttl_ns=20 * SECOND,
                speculative_ttl_ns=1 * SECOND,
            )
        )

    def instance_config(self, node: InstanceNode) -> InstanceConfig:
        """The machine's part of the scenario."""
        scenario = self.scenario
        return InstanceConfig(
            max_model_tokens=scenario.context_tokens,
            namespace=NAMESPACE,
            pool=PoolConfig(
                scenario.hbm_blocks[node.place], scenario.dram_blocks[node.place], caches(scenario.setting, node.role)
            ),
            scheduler=SchedulerConfig(
                scenario.running, scenario.step_tokens, scenario.chunk, 100, scenario.depth, scenario.preemption
            ),
            role=node.role,
            exchange=ExchangeConfig(2 * SECOND, 100 * MS, scenario.pulls_in_flight, scenario.event_capacity),
        )

    def new_instance(self, node: InstanceNode) -> Instance:
        """The production machine."""
        return Instance(self.instance_config(node), BLOCK_TOKENS, me=node.peer, geometry=self.geometry)

    def new_device(self, node: InstanceNode) -> PagedDevice:
        """Its device, whose memory is the instance's arenas."""
        config = self.instance_config(node).pool
        return PagedDevice(BLOCK_TOKENS, config.hbm_blocks, config.dram_blocks, VOCAB)

    def peer_info(self, node: InstanceNode) -> PeerInfo:
        """What an instance tells of itself when it joins."""
        config = self.instance_config(node)
        return PeerInfo(
            node.peer,
            node.role,
            f"virtual://{node.peer.name}",
            NAMESPACE,
            self.geometry,
            config.pool.hbm_blocks,
            config.pool.dram_blocks,
            node.machine.context_tokens,
            config.pool.caching,
            publishes_events=self.scenario.event_capacity > 0,
        )

    # -- clients

    def _starter(self, conversation: Conversation):
        return lambda: self._ask(conversation)

    def _ask(self, conversation: Conversation) -> None:
        now = self.clock.now
        turn = conversation.turns[conversation.done]
        request = self.referee.ask(conversation, now)
        self.say(f"client asks {request.request_id}: {len(request.prompt)} tokens, ", turn)
        if turn.cancel_after_ns is not None:
            self.clock.after(turn.cancel_after_ns, lambda: self._cancel(request.request_id))
        self.router.submit(RequestArrived(request))

    def _cancel(self, request_id: str) -> None:
        ask = self.referee.asks[request_id]
        if not ask.over:
            self.say(f"client cancels {request_id}")
            ask.cancelled = True
            self.router.submit(RequestCancelled(request_id))

    def emitted(self, output: TokenOutput) -> None:
        """The router gives tokens to a client."""
        ask = self.referee.emitted(output, self.clock.now)
        self.say("  -> ", (output.request_id, output.index, output.tokens, output.finish_reason))
        enough = ask.turn.stop_string_after
        plain = not ask.request.beam_width and output.finish_reason is None
        if enough is not None and plain and len(ask.got[output.index]) >= enough and output.index not in ask.stopped:
            ask.stopped.add(output.index)
            self.clock.after(0, lambda: self.router.submit(SequenceStopped(output.request_id, output.index)))
        if ask.over:
            self._next_turn(ask)

    def turned_away(self, request_id: str, reason: str) -> None:
        """The router rejects a request."""
        self.say(f"  -> {request_id} rejected: {reason}")
        self._next_turn(self.referee.rejected(request_id, reason, self.clock.now))

    def router_dies(self) -> None:
        """Whoever waited for it gets an error from the network, and asks something else later."""
        self.router.restart()
        for ask in list(self.referee.asks.values()):
            if not ask.over:
                ask.lost = True
                self._next_turn(ask)

    def _next_turn(self, ask: Ask) -> None:
        conversation = self.talking[ask.request.request_id.partition(".")[0]]
        conversation.context += ask.got.get(0, [])
        conversation.done += 1
        self._pin(conversation)
        if conversation.done < len(conversation.turns):
            self.clock.after(conversation.turns[conversation.done].think_ns, self._starter(conversation))

    def _pin(self, conversation: Conversation) -> None:
        """Name what was said so far, or give the name up."""
        name, tenant = conversation.session, conversation.tenant
        if not name or conversation.pin_ns is None:
            return
        if conversation.done == len(conversation.turns) and conversation.unpin:
            self.clock.after(0, lambda: self.router.submit(PrefixUnpinned(name, tenant)))
        else:
            tokens = np.asarray(conversation.prefix + conversation.context, dtype=np.int32)
            pinned = PrefixPinned(name, tenant, tokens, conversation.pin_ns)
            self.clock.after(0, lambda: self.router.submit(pinned))

    # -- watching

    def handled(self, node: RouterNode | InstanceNode, event: object, actions: list[object]) -> None:
        """A machine has handled an event: it must not contradict itself."""
        node.machine.check_invariants()

    def say(self, line: str, what: object = "") -> None:
        """One line of the story; ``what`` is written out only when somebody reads it."""
        self._story.append((self.clock.now, line, what))

    @property
    def story(self) -> list[str]:
        """The last lines, for people."""
        return [f"{now / MS:10.3f}  {line}{_brief(what)}" for now, line, what in self._story]

    # -- running

    def everyone_is_served(self) -> bool:
        """No client waits, and none will ask."""
        return all(ask.over for ask in self.referee.asks.values()) and all(
            c.done == len(c.turns) for c in self.talking.values()
        )

    def run(self) -> None:
        """Faults, healing, the end, and what must hold then."""
        horizon = 100 * MS + max((fault.at_ns + fault.for_ns for fault in self.scenario.faults), default=0)
        self._run_until(horizon + 1)
        cluster_faults.heal_all(self)
        limit = self.clock.now + 240 * SECOND
        while not self.everyone_is_served():
            if self.clock.now > limit:
                self.referee.check_all_ended(0)
                raise AssertionError("clients wait for their turn for ever")
            assert self.clock.run_one()
        self.referee.check_all_ended(5 * MS + self.router_slept_ns)
        self._run_until(self.clock.now + 6 * SECOND)
        self.check_at_rest()
        self.check_memory_is_whole()

    def _run_until(self, end_ns: int) -> None:
        self.clock.at(end_ns, lambda: None)
        while self.clock.now < end_ns:
            self.clock.run_one()

    def check_at_rest(self) -> None:
        """Nothing is held by anybody, nothing is open, and the router knows exactly who has what."""
        self._check_members()
        for node in self.instances:
            machine, name = node.machine, node.peer.name
            assert not node.plans, f"{name} still computes"
            load = machine.load()
            assert (load.requests_waiting, load.sequences_running) == (0, 0), f"{name} is busy: {machine!r}"
            assert load.transfers_open == 0, f"{name}: {load.transfers_open} transfers are open"
            for report in machine.pool.report().tiers:
                held = report.blocks_used - report.blocks_evictable
                assert held == 0, f"{name}: {held} blocks of {report.tier.name} leaked: {report}"
                assert report.blocks_pinned == 0, f"{name}: {report.blocks_pinned} blocks of {report.tier.name} pinned"
            self._check_tree(node)

    def achievements(self) -> Counter[str]:
        """How often the things happened that a cluster is for."""
        router, done = self.router.machine.stats().counters, Counter[str]()
        done.update(resumed=router.resumptions, gaps=router.kv_gaps, snapshots=router.kv_snapshots)
        done.update(expelled=router.expelled, died=router.members_died, left=router.members_left)
        for node in self.instances:
            link = node.machine._link
            exchange = link.exchange.counters
            done.update(handed_over=link.handoffs.handed_over, taken_over=link.takeovers.taken_over)
            done.update(fetched=link.fetches.fetched_tokens, sent_home=link.blocks_sent_home)
            done.update(came_home=link.blocks_come_home, mismatches=exchange.mismatches)
            done.update(pulled=exchange.pulled_blocks, reused=exchange.reused_blocks, expired=exchange.expired)
            done.update(withdrawn=exchange.withdrawn, failed=link.takeovers.failed)
        return done

    def _check_members(self) -> None:
        members = {view.peer for view in self.router.machine.instances()}
        assert members == {node.peer for node in self.instances}, f"members: {members}"

    def _check_tree(self, node: InstanceNode) -> None:
        """What the router believes of an instance is what its index holds, block by block and tier by tier."""
        if not self.scenario.event_capacity:
            return
        cluster, pool = self.router.machine, node.machine.pool
        number = cluster._registry.get(node.peer).number
        believed = [(bytes(name), hbm, dram) for name, hbm, dram in cluster._trees.directory.dump(number)]
        there: Counter[tuple[bytes, Tier]] = Counter()
        for tier in (Tier.HBM, Tier.DRAM):
            packed = pool.cached_identities(tier)
            there.update((packed[at : at + 16], tier) for at in range(0, len(packed), 16))
        names = sorted({name for name, _ in there})
        truth = [(name, there[name, Tier.HBM], there[name, Tier.DRAM]) for name in names]
        feed = cluster._trees.feed(number)
        assert believed == truth, (
            f"{node.peer.name}: {len(believed)} blocks believed, {len(truth)} there; {feed}, at {pool.next_event};"
            f" too much {[(n.hex()[:8], h, d) for n, h, d in believed if (n, h, d) not in truth]},"
            f" too little {[(n.hex()[:8], h, d) for n, h, d in truth if (n, h, d) not in believed]}"
        )

    def check_memory_is_whole(self) -> None:
        """Once the caches are dropped, every block of every tier is free."""
        for node in self.instances:
            node.machine.pool.clear_cache()
            for report in node.machine.pool.report().tiers:
                assert report.blocks_free == report.blocks_total, f"{node.peer.name}: {report}"


def _brief(what: object) -> str:
    text = what if isinstance(what, str) else repr(what)
    return text if len(text) < 300 else text[:300] + " ..."


def caches(setting: Setting, role: Role) -> bool:
    """Whether an instance of ``role`` keeps KV for reuse (MemServe 5.1)."""
    if role is Role.DECODE:
        return setting.caching in (Caching.PD_CACHING_2, Caching.PD_CACHING_3)
    return setting.caching is not Caching.OFF


def settings_grid(faulty: bool | None = None) -> list[Setting]:
    """Every caching level, transfer mode and mix of roles, healthy and faulty."""
    kinds = [True, False] if faulty is None else [faulty]
    return [Setting(c, t, mix, f) for c, t, mix, f in product(Caching, TransferMode, ALL_MIXES, kinds)]


def play(seed: int, setting: Setting, story_lines: int = 400) -> World:
    """Run one scenario to its end; raises what is wrong with it, with the story."""
    world = World(draw(seed, setting), story_lines)
    try:
        world.run()
    except Exception as error:
        error.add_note("\n".join([*world.story, str(world.scenario)]))
        raise
    return world


def parse_setting(text: str) -> Setting:
    """``pd-caching-3/by-layer/1P1D/faulty``."""
    caching, transfer, mix, kind = text.split("/")
    return Setting(Caching(caching), TransferMode(transfer), mix, kind == "faulty")


def main() -> int:
    """Many seeds; each failure with its seed, the first ones with their story."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="scenarios to run, over all settings")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--setting", type=parse_setting, help="caching/transfer/mix/faulty|healthy")
    parser.add_argument("--healthy", action="store_true", help="no faults")
    parser.add_argument("--story", action="store_true", help="print the story in any case")
    parser.add_argument("--stop", type=int, default=10, help="stop after so many failures")
    options = parser.parse_args()
    grid = [options.setting] if options.setting else settings_grid(False if options.healthy else None)
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    failures: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    started, requests, events = time.monotonic(), 0, 0
    for seed in seeds:
        setting = grid[seed % len(grid)] if options.seed is None or not options.setting else options.setting
        try:
            world = play(seed, setting, 4000)
            requests, events = requests + len(world.referee.asks), events + world.clock.steps
            seen.update(world.happened)
            seen.update(world.achievements())
            if options.story:
                print("\n".join(world.story))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__}: {error}"[:160]
            failures[f"{where.filename.rpartition('/')[2]}:{where.lineno}"] += 1
            print(f"FAIL --seed {seed} --setting {setting}  {where.name}:{where.lineno} {kind}", flush=True)
            if options.story:
                traceback.print_exc()
            if failures.total() >= options.stop:
                break
    spent = time.monotonic() - started
    print(f"{len(seeds)} seeds, {requests} requests, {events} events in {spent:.1f} s; {failures.total()} failures")
    print("  " + ", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    for where, count in failures.most_common():
        print(f"  {count:4d}  {where}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
