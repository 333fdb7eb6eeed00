"""A cluster that a seed decides: the production machines, devices with literal KV, and all that can go wrong."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import cast

import numpy as np

from memserve.base.config import ExchangeConfig, InstanceConfig, MemberConfig, PoolConfig, SchedulerConfig
from memserve.base.types import Admission, Caching, KVGeometry, TokenOutput
from memserve.base.units import ns_from_s
from memserve.instance.cluster import store_offers
from memserve.instance.machine import Instance
from memserve.kv.costs import CopyCurve, CostModel, PreemptionCosts
from memserve.protocol.events import MessageArrived, RequestArrived, RequestCancelled, SequenceStopped
from memserve.protocol.kv_hints import HintAction, KvHinted
from memserve.protocol.messages import Heartbeat, RequestRefused
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.events import ClusterAction, PrefixPinned, PrefixUnpinned
from memserve.router.follower import Follower
from memserve.router.machine import Cluster
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.engines import EngineNode
from memserve_lab.sim.fuzz import checks, faults
from memserve_lab.sim.fuzz import checks as store_checks
from memserve_lab.sim.fuzz.admission_judge import AdmissionChecker
from memserve_lab.sim.fuzz.clients import VOCAB, Ask, Conversation, OutputChecker, Turn
from memserve_lab.sim.fuzz.instances import FaultyPort, FuzzedDevice, FuzzedInstance, cells_of
from memserve_lab.sim.fuzz.keyed import KeyedClients, client_of
from memserve_lab.sim.fuzz.network import FaultyNetwork
from memserve_lab.sim.fuzz.routers import (
    ANSWER_NS,
    FuzzedRouter,
    Routers,
    check_dispatches,
    check_stalls,
    cluster_config,
    new_follower,
)
from memserve_lab.sim.fuzz.scenario import BLOCK_TOKENS, LEASE_NS, MS, NAMESPACE, Scenario
from memserve_lab.sim.fuzz.scenario_features import STRIPED_COSTS, draft_tokens, foretell
from memserve_lab.sim.fuzz.stores import FuzzedStore
from memserve_lab.sim.nodes import ROUTER_ADDRESS, FollowerNode, InstanceNode, RouterNode
from memserve_lab.sim.process import Process
from memserve_lab.sim.reference.device import LAYERS, OracleDevice
from memserve_lab.sim.reference.memory import SymbolicStates
from memserve_lab.sim.reference.oracle import Violation, require
from memserve_lab.sim.timed_disk import StoreNode

SECOND = 1000 * MS
STANDBY_ADDRESS = "virtual://standby"
PROFILES = (
    None,
    CostModel(machine="quick", swap_in=CopyCurve(50.0 * MS, 0.0, 0.0)),
    CostModel(machine="slow").with_prefill_scale(20.0),
)
"""Profiles of the instances, in turn: different machines, one with a slow second tier, some without measurements."""
STEPS_MAX = 200_000
"""Scenarios have some thousands of events. One with this many never ends."""


class World:
    """Builds what a scenario says, runs it, and checks it. Checkers only watch."""

    member_config = MemberConfig(150 * MS, asks_after_ns=300 * MS, silent_after_ns=1200 * MS, turn_ns=400 * MS)
    tells = True

    def __init__(self, scenario: Scenario, story_lines: int = 400, log: Callable[[str], object] | None = None) -> None:
        """``story_lines``: how many of the last events are kept for reading. ``log`` gets a line for
        every event of every machine, with its actions: equal seeds give equal bytes."""
        self.scenario = scenario
        self.router_addresses = (ROUTER_ADDRESS, STANDBY_ADDRESS)[: scenario.routers]
        self.random = Random(f"world {scenario.seed} {scenario.setting}")
        self.clock = Clock()
        self.network = FaultyNetwork(self.clock, self.random, scenario.delay_ns)
        self.network.log = self.log_line
        self._log = log
        self._story: deque[tuple[int, str, object]] = deque(maxlen=story_lines)
        by_layer_setup = scenario.layered or scenario.striped
        layers = LAYERS if by_layer_setup is None else by_layer_setup.layers
        self.geometry = KVGeometry(layers, 1, 1, 1, "float32", BLOCK_TOKENS)
        pools = [PoolConfig(blocks, windows=scenario.windows) for blocks in scenario.hbm_blocks]
        rooms = [min(scenario.context_tokens, pool.tokens_in(BLOCK_TOKENS) + 1) for pool in pools]
        rooms += [scenario.context_tokens] * (scenario.shared is not None)
        rooms += [setup.context_tokens for setup in scenario.engines]
        by_layer, whole = scenario.layered is not None, max(rooms)
        rooms = [scenario.context_tokens] if by_layer else rooms  # what has no room whole streams
        grammars = Random(f"lark/{scenario.seed}")
        has_grammars = grammars.random() < 0.12
        caches = scenario.setting.caching is not Caching.OFF
        self.referee = OutputChecker(rooms, caches, grammars if has_grammars else None, whole=whole)
        self.referee.dispatched_twice = self.network.dispatched_twice
        self.gate_judge = AdmissionChecker()
        self.links_cut = True
        self.router_slept_ns = 0
        """How much later than the deadline, by its own clock, the router may notice that it has passed."""
        self.happened: Counter[str] = Counter()
        self.stalled: Counter[Peer] = Counter()
        self.keyed = KeyedClients(self)
        self.router = FuzzedRouter(self)
        self.network.nodes[self.router.peer.name] = self.router
        self.routers = Routers(self)
        self.instances: list[FuzzedInstance] = []
        for place, role in enumerate(scenario.roles):
            node = FuzzedInstance(self, f"{role.value[0]}{place}", role, place)
            self.instances.append(node)
            self.network.nodes[node.peer.name] = node
        setup = scenario.store
        self.stores = [FuzzedStore(self, setup, number) for number in range(setup.count)] if setup is not None else []
        self.network.nodes |= {store.peer.name: store for store in self.stores}
        self.engines = [
            EngineNode(self, f"e{number}", setup, BLOCK_TOKENS) for number, setup in enumerate(scenario.engines)
        ]
        self.network.nodes |= {engine.peer.name: engine for engine in self.engines}
        self.talking = {c.name: c for c in scenario.conversations}
        for conversation in scenario.conversations:
            self.clock.call_at(100 * MS + conversation.starts_ns, self._ask_turn, conversation)
        for fault in scenario.faults:
            self.clock.call_at(100 * MS + fault.at_ns, faults.strike, self, fault)

    # -- parts of the nodes

    def new_cluster(self) -> Cluster:
        """The production machine of the router."""
        return Cluster(cluster_config(self.scenario), remembers=self.scenario.remembers)

    def new_follower(self, node: FollowerNode) -> Follower:
        """The production machine of a router that is not the owner."""
        return new_follower(self.scenario, node, self.router_addresses, self.member_config)

    def instance_config(self, node: InstanceNode) -> InstanceConfig:
        """The configuration of an instance machine in this scenario."""
        scenario = self.scenario
        return InstanceConfig(
            max_model_tokens=scenario.context_tokens,
            namespace=NAMESPACE,
            pool=PoolConfig(
                scenario.hbm_blocks[node.place],
                scenario.dram_blocks[node.place],
                scenario.setting.caches_kv(node.role),
                states=scenario.states,
                windows=scenario.windows,
            ),
            scheduler=SchedulerConfig(
                scenario.running,
                scenario.step_tokens,
                scenario.chunk,
                100,
                scenario.depth,
                scenario.preemption,
                "fcfs" if scenario.slo_tpot_ns is None else "slo",
                scenario.slo_tpot_ns,
                layerwise="off" if scenario.layered is None else "auto",
                link_bytes_s=None if scenario.layered is None else scenario.layered.link_bytes_s,
                draft_tokens=draft_tokens(scenario.seed),
            ),
            role=node.role,
            exchange=ExchangeConfig(
                LEASE_NS, 100 * MS, scenario.pulls_in_flight, scenario.event_capacity, kept_answer_ns=ANSWER_NS
            ),
        )

    def new_instance(self, node: InstanceNode) -> Instance:
        """The production machine."""
        costs = PreemptionCosts(self.geometry.block_bytes, profile=self._profile_of(node))
        config = self.instance_config(node)
        instance = Instance(config, BLOCK_TOKENS, costs, self_peer=node.peer, geometry=self.geometry)
        foretell(instance, self.random)
        return instance

    def new_device(self, node: InstanceNode) -> FuzzedDevice:
        """Its device, with the instance's arenas as memory."""
        config = self.instance_config(node).pool
        blocks = config.hbm_blocks, config.dram_blocks
        memory = OracleDevice(BLOCK_TOKENS, *blocks, VOCAB, layers=self.geometry.num_layers)
        if config.states is not None:
            memory.states = SymbolicStates(memory.kv, draft_states=config.states.draft_states)
        memory.windows = config.windows
        memory.segment = lambda segment, name: cells_of(self.instances, segment, name)
        return FuzzedDevice(_fuzzed(node), memory)

    def new_port(self, node: InstanceNode) -> FaultyPort:
        """Its way to the pages of others."""
        return FaultyPort(_fuzzed(node))

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
            costs=profile.to_json() if (profile := self._profile_of(node)) is not None else b"",
            segments_at="" if self.scenario.shared is None else f"virtual://{node.peer.name}",
            sequence_tokens=self.scenario.context_tokens,
            state_blocks=node.machine.pool.state_blocks,
            windows=node.machine.pool.config.windows,
            reports_layers=config.pool.page_is_layer,
            step_tokens=config.scheduler.step_tokens,
            computes_stripes=self.scenario.striped is not None,
        )

    def _profile_of(self, node: InstanceNode) -> CostModel | None:
        store = self.scenario.store
        if self.scenario.striped is not None:
            return STRIPED_COSTS
        if self.scenario.chooses_transfer:
            # a block takes as long as computing its tokens: what is best depends on the prompt, and on what waits
            link = CopyCurve(0.2 * MS, 0.0, MS / self.geometry.block_bytes)
            return CostModel(machine="near", same_host=link, network=link)
        return PROFILES[node.place % len(PROFILES)] if store is None or store.costs is None else store.costs

    # -- clients

    def _ask_turn(self, conversation: Conversation) -> None:
        turn = conversation.turns[conversation.done]
        name = f"{conversation.name}.{conversation.done}"
        request = self.keyed.name_request(self.referee.new_request(conversation, self.routers.next_for(name).now))
        self.log_line(f"client asks {request.request_id}: {len(request.prompt)} tokens, ", turn)
        if turn.cancel_after_ns is not None:
            self.clock.call_after(turn.cancel_after_ns, self._cancel_request, request.request_id)
        self.routers.submit_event(RequestArrived(request))

    def _cancel_request(self, request_id: str) -> None:
        ask = self.referee.asks[request_id]
        if not ask.over:
            self.log_line(f"client cancels {request_id}")
            ask.cancelled = True
            self.routers.submit_event(RequestCancelled(request_id))

    def on_output(self, output: TokenOutput) -> None:
        """The router gives tokens to a client."""
        self.log_line("  -> ", (output.request_id, output.index, output.tokens, output.finish_reason))
        for_client = self.keyed.on_received(output)
        if for_client is None:
            return
        now = self.routers.router_of(output.request_id).now
        ask, name, output = self.referee.check_output(for_client, now), output.request_id, for_client
        enough = ask.turn.stop_string_after
        plain = not ask.request.beam_width and output.finish_reason is None
        if enough is not None and plain and len(ask.got[output.index]) >= enough and output.index not in ask.stopped:
            ask.stopped.add(output.index)
            self.clock.call_after(0, self._submit_event, SequenceStopped(name, output.index))
        if ask.over:
            self.next_turn(ask)

    def row_fails(self, node: FuzzedInstance, attempt_id: str, index: int) -> None:
        """A row of an attempt fails, and with it that sequence of the client's request."""
        self.log_line(f"{node.peer.name}: a row of {attempt_id}/{index} fails")
        self.referee.row_failed(client_of(attempt_id), self.routers.attempts_of(attempt_id))

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        """The router rejects a request."""
        self.log_line(f"  -> {request_id} rejected: {reason}")
        by_gate = request_id in self.gate_judge.refused
        name = self.keyed.turned_away(request_id, reason)
        if name is None:
            return
        now = self.routers.router_of(request_id).now
        self.next_turn(self.referee.check_rejection(name, reason, now, by_gate=by_gate))

    def _submit_event(self, event: object) -> None:
        self.routers.submit_event(event)

    def next_turn(self, ask: Ask) -> None:
        """A client waits for nothing more, and asks something else later."""
        conversation = self.talking[ask.request.request_id.partition(".")[0]]
        conversation.context += ask.got.get(0, [])
        conversation.done += 1
        self._pin_conversation(conversation)
        for store in self.stores:
            store.turn_ends(self.instances)
        if conversation.done < len(conversation.turns):
            self.clock.call_after(conversation.turns[conversation.done].think_ns, self._ask_turn, conversation)

    def _pin_conversation(self, conversation: Conversation) -> None:
        """Pin the conversation so far under its name, or give the name up."""
        name, tenant = conversation.session, conversation.tenant
        if not name or conversation.pin_ns is None:
            return
        if conversation.done == len(conversation.turns) and conversation.unpin:
            self.clock.call_after(0, self._submit_event, PrefixUnpinned(name, tenant))
        else:
            tokens = np.asarray(conversation.prefix + conversation.context, dtype=np.int32)
            priority = float(conversation.done) if conversation.done % 2 else None
            pin = PrefixPinned(name, tenant, tokens, conversation.pin_ns, conversation.salt, priority)
            self.clock.call_after(0, self._submit_event, pin)
            self._hint_conversation(conversation)

    def _hint_conversation(self, conversation: Conversation) -> None:
        """While the client thinks its KV goes down and comes up, or to another instance; or it is released."""
        actions = HintAction.DEMOTE, HintAction.PREFETCH, HintAction.SHARE, HintAction.RELEASE
        action = actions[conversation.done % len(actions)]
        name, destination = conversation.session, self.instances[-1].peer.name if self.instances else ""
        hint_id = f"{conversation.tenant}/{name}/{conversation.done}"
        hint = KvHinted(hint_id, action, conversation.tenant, name, None, conversation.salt, destination)
        self.clock.call_after(1, self._submit_event, hint)

    # -- watching

    def on_handled(self, node: Process, event: object, actions: Sequence[object]) -> None:
        """A machine has handled an event: check its invariants and its actions."""
        if self._log is not None:
            self._log(f"{self.clock.now} {node.peer.name}.{node.peer.generation} {event!r} -> {actions!r}\n")
        if isinstance(node, (InstanceNode, RouterNode, FollowerNode, StoreNode, EngineNode)):
            node.machine.check_invariants()
        if isinstance(event, MessageArrived) and isinstance(event.message, RequestRefused):
            self.referee.attempt_refused(client_of(event.message.request_id))
        if isinstance(node, (RouterNode, FollowerNode)):
            check_stalls(self, node, actions)
        if isinstance(node, FollowerNode):
            check_dispatches(self, node, actions)
            self.gate_judge.follower_said(actions)
        if isinstance(node, RouterNode) and node.machine.config.admission.mode != Admission.NONE:
            self.gate_judge.judge_event(node.machine, event, cast("Sequence[ClusterAction]", actions), node.now)

    def log_line(self, line: str, detail: object = "") -> None:
        """One line of the story; ``what`` is written out only when it is read."""
        if not isinstance(detail, Heartbeat):  # heartbeats would drown everything else
            self._story.append((self.clock.now, line, detail))

    @property
    def story(self) -> list[str]:
        """The last lines, for people."""
        return [f"{now / MS:10.3f}  {line}{_brief(detail)}" for now, line, detail in self._story]

    # -- running

    def everyone_is_served(self) -> bool:
        """No client waits, and none will ask."""
        return all(ask.over for ask in self.referee.asks.values()) and all(
            c.done == len(c.turns) for c in self.talking.values()
        )

    def run_scenario(self) -> None:
        """Run faults, healing and the end, then check what must hold."""
        self._run_until(100 * MS + max((fault.at_ns + fault.for_ns for fault in self.scenario.faults), default=0) + 1)
        faults.heal_all(self)
        limit_ns = self.clock.now + 240 * SECOND
        self._run_while(lambda: not self.everyone_is_served(), limit_ns)
        self.referee.check_all_ended(5 * MS + self.router_slept_ns)
        self.referee.check_starvation()
        require(self.everyone_is_served(), "clients wait for their turn for ever")
        self._come_to_rest()
        self.check_at_rest()
        self._ask_once_more()
        checks.check_memory_is_whole(self.instances)
        for store in self.stores:
            store_checks.check_store_memory_is_whole(store)

    def _ask_once_more(self) -> None:
        """All is healed: a client that asks now is served without excuses, before any lease can end. A client that the
        gate rejects retries when told to, with all others that were rejected; some are admitted each time, or once the
        KV of ended requests is let go."""
        self.referee.excused = self.keyed.are_more = False
        is_open = self.scenario.admission.mode == Admission.NONE
        patience_ns = LEASE_NS * 9 // 10 if is_open else 30 * SECOND  # they may be admitted one by one
        lengths = [9] * 2 * len(self.instances) + [self.scenario.context_tokens - 8] * (not is_open)
        waiting: Iterable[list[int]] = ([self.random.randrange(VOCAB) for _ in range(length)] for length in lengths)
        for turn in range(2 * len(lengths) + 2):
            asks = {}
            for number, prefix in enumerate(waiting):
                name = f"later{turn}-{number}"
                asks[name] = prefix
                self.talking[name] = Conversation(name, "", "", prefix, [Turn([1], 0, max_tokens=4)], 0)
                self._ask_turn(self.talking[name])
            self._run_while(lambda: not self.everyone_is_served(), self.clock.now + patience_ns)
            require(self.everyone_is_served(), "the cluster was healed, and does not serve")
            refused = {name: reason for name in asks if (reason := self.gate_judge.told.get(f"{name}.0")) is not None}
            if not refused:
                break
            waiting = [asks[name] for name in refused]
            self._run_until(self.clock.now + ns_from_s(max(refused.values())))
        require(not refused, f"the cluster was healed, and its gate never lets in what fits: {refused}")
        self._run_until(self.clock.now + 6 * SECOND)  # a store may not know the process that offers it blocks
        self._end_transfers()
        self.check_at_rest()

    def _come_to_rest(self) -> None:
        """Leases end, messages arrive; a step that hangs ends and is reported. Names that were given while the router's
        clock was ahead live longer."""
        self._run_until(self.clock.now + 6 * SECOND)
        if self.router.machine.handles():
            self._run_while(lambda: bool(self.router.machine.handles()), self.clock.now + 60 * SECOND)
            self._run_until(self.clock.now + 1 * SECOND)
        if any(node.plans for node in self.instances):
            self._run_while(lambda: any(node.plans for node in self.instances), self.clock.now + 60 * SECOND)
            self._run_until(self.clock.now + 3 * SECOND)
        self._end_transfers()

    def _end_transfers(self) -> None:
        """Offers of which the other side does not know end with their leases, which are longer where plans were long,
        or where none has ended yet. Stores may still look where their blocks belong."""
        if self._has_transfers():
            ends_ns = store_offers.LEASE_NS + 2 * store_offers.FIRST_PLAN_NS
            self._run_while(self._has_transfers, self.clock.now + ends_ns)
            self._run_until(self.clock.now + 1 * SECOND)

    def _has_transfers(self) -> bool:
        links = (node.machine.link for node in self.instances)
        exchanges = [link.exchange for link in links if link is not None]
        exchanges += [store.machine.kv.exchange for store in self.stores]
        return any(e.transfers_open for e in exchanges) or any(s.machine.moves.is_at_work for s in self.stores)

    def _run_until(self, end_ns: int) -> None:
        self._run_while(lambda: True, end_ns)
        self.clock.run_until(end_ns)

    def _run_while(self, condition: Callable[[], bool], end_ns: int) -> None:
        """Let things happen, at most until ``end_ns``."""
        clock = self.clock
        while condition() and (next_ns := clock.next_ns) is not None and next_ns <= end_ns:
            clock.run_one()
            if clock.steps > STEPS_MAX:
                raise Violation(f"{STEPS_MAX} things have happened, and there is no end")

    def check_at_rest(self) -> None:
        """Nothing is held, nothing is open, and the router knows where everything lies."""
        has_events, nodes = self.scenario.event_capacity > 0, [*self.stores, *self.routers.followers, *self.engines]
        checks.check_at_rest(self.router.machine, self.instances, nodes, has_events)
        self.routers.check_at_rest(has_events)
        for engine in self.engines:
            checks.check_engine_at_rest(self.router.machine, engine)
        for store in self.stores:
            store_checks.check_stores_at_rest(self.router.machine, store)
            store_checks.check_contents(store, self.instances[0].machine.pool, self.referee)
        self.keyed.check_at_rest(self.instances)
        for node in self.instances:
            failed, name = node.machine.stats().steps_failed, node.peer.name
            require(node.has_failed or not failed, f"{name}: {failed} steps failed, though its device did not")

    def count_achievements(self) -> Counter[str]:
        """Counts of the features that the scenario exercised."""
        counts = checks.achievements(self.router.machine, remembers=self.scenario.remembers)
        counts.update(f"refused: {cause}" for cause in self.gate_judge.refused.values())
        owner = self.router.machine.stats().counters
        counts.update({f"transfers chosen: {mode}": count for mode, count in owner.transfers_chosen.items()})
        for store in self.stores:
            counts.update(store.count_achievements())
        for achievements in (self.keyed.count_achievements(), self.routers.count_achievements()):
            counts.update(achievements)
        if self.engines:
            counts["engine: answers"] = sum(engine.answers for engine in self.engines)
        for node in self.instances:
            counts.update(node.count_achievements())
        return counts


def _fuzzed(node: InstanceNode) -> FuzzedInstance:
    require(isinstance(node, FuzzedInstance), "this world has fuzzed instances only")
    return node  # type: ignore[return-value]  # as was just required


def _brief(detail: object) -> str:
    text = detail if isinstance(detail, str) else repr(detail)
    return text if len(text) < 300 else text[:300] + " ..."
