"""Several instance machines with null devices that can read each other's memory, and a test-written router between.

Everything happens in one order that the test decides: ``step`` does one thing somewhere, ``run`` does all there is.
The referee is ``lone_tokens``: what a request must get when it is alone in the world.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
from msgspec import structs

from instance_world import PROMPT, VOCAB, config, lone_beams
from memserve.base.types import ClockTicked, FinishReason, KVGeometry, Role, Tier, TransferMode
from memserve.base.units import NS_PER_S
from memserve.instance.events import (
    AwaitMask,
    BuildGrammar,
    ForgetGrammar,
    GrammarBuilt,
    LayerFinished,
    MaskComputed,
    MoveGate,
    RunStep,
)
from memserve.instance.machine import Instance
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PullPages, SealPages
from memserve.protocol.events import EmitTokens, MessageArrived, RejectRequest, Send
from memserve.protocol.messages import (
    Cancel,
    Dispatch,
    Expelled,
    HandedOver,
    JoinAccepted,
    Migrate,
    MigrationRefused,
    PeerGone,
    RequestRefused,
    Tokens,
)
from memserve.protocol.peers import ROUTER, Peer, PeerInfo
from memserve_lab.sim.reference.device import OracleDevice
from memserve_lab.sim.reference.memory import SymbolicStates
from memserve_lab.sim.reference.oracle import lone_tokens

BLOCK = 4
LAYERS = 5
GEOMETRY = KVGeometry(LAYERS, 1, 1, 1, "float32", BLOCK)
ROUTER_PEER = Peer(ROUTER, 1)


def fleet_config(**sizes):
    """An instance small enough to think about; caching and tiers as in ``instance_world.config``."""
    return config(**{"hbm": 24, **sizes})


class Member:
    """An instance, its device, its page jobs."""

    runs_requests = True

    def __init__(self, fleet, name, cfg, generation=1):
        self.fleet, self.cfg, self.peer = fleet, cfg, Peer(name, generation)
        kv = self.geometry = fleet.geometry
        self.machine = Instance(cfg, kv.block_tokens, self_peer=self.peer, geometry=kv)
        sizes = kv.block_tokens, cfg.pool.hbm_blocks, cfg.pool.dram_blocks
        self.device = OracleDevice(*sizes, VOCAB, layers=kv.num_layers)
        if cfg.pool.states is not None:
            self.device.states = SymbolicStates(self.device.kv, draft_states=cfg.pool.states.draft_states)
        self.device.windows = cfg.pool.windows
        self.plans, self.jobs, self.builds, self.masks = deque(), deque(), deque(), deque()
        self.built = {0}  # jobs
        chance = Random(name)
        self.device.mask_is_late = lambda opened: chance.random() < 0.4
        self.void, self.layers_told, self.gates = set(), 0, {}
        self.tells_layers = True
        self.corrupt_pulls = 0
        self.said = []  # messages and endings, for tests to look at

    @property
    def info(self):
        pool = self.cfg.pool
        return PeerInfo(
            self.peer, Role.COLOCATED, "", self.cfg.namespace, self.geometry, pool.hbm_blocks, pool.dram_blocks,
            self.machine.context_tokens, pool.caching,
        )  # fmt: skip

    # -- in and out

    def post(self, event):
        actions = self.machine.handle(event, self.fleet.now)
        for action in actions:
            self._perform(action)
        self.machine.check_invariants()
        return actions

    def hear(self, message, sender=ROUTER_PEER):
        return self.post(MessageArrived(sender, message))

    def _perform(self, action):
        if isinstance(action, RunStep):
            assert {opened.grammar_job for opened in action.plan.open} <= self.built
            self.plans.append(action.plan)
        elif isinstance(action, EmitTokens):
            self._say(ROUTER_PEER, Tokens(tuple(action.outputs)))
        elif isinstance(action, RejectRequest):
            self._say(ROUTER_PEER, RequestRefused(action.request_id, action.reason, action.retry_after_s))
        elif isinstance(action, Send):
            self._say(action.to, action.message)
        elif isinstance(action, SealPages | PullPages):
            self.jobs.append(action)
        elif isinstance(action, BuildGrammar):
            self.builds.append(action)
        elif isinstance(action, ForgetGrammar):
            self.built.discard(action.job_id)
        elif isinstance(action, AwaitMask):
            self.masks.append(action)
        elif isinstance(action, MoveGate):
            self.gates[action.gate] = action.layers
        else:
            assert isinstance(action, CancelPulls)

    def _say(self, to, message):
        self.said.append(message)
        self.fleet.send(self.peer, to, message)

    # -- working

    def do_plan(self, fail=None):
        """The device goes on with its oldest plan: one layer of it, or all that is left. ``fail``: a seed."""
        plan = self.plans[0]
        if fail is not None:
            self.plans.popleft()
            self.layers_told = 0
            self.void.update(later.step_id for later in self.plans)
            self.device.abandon_layers(plan)
            return self.post(self.device.fail_plan(plan, fail))
        is_void = plan.step_id in self.void
        has_more = self.layers_told < self.geometry.num_layers
        if (plan.gates or (plan.report_layers and self.tells_layers)) and has_more and not is_void:
            self.device.begin_plan(plan)
            self.device.lose_rows(plan, [slot for slot, gate in plan.gates.items() if self.gates.get(gate, 0) is None])
            self.device.finish_layer(plan, self.layers_told)
            self.layers_told += 1
            tells = plan.report_layers and self.tells_layers
            return self.post(LayerFinished(plan.step_id, self.layers_told - 1)) if tells else []
        self.plans.popleft()
        self.layers_told = 0
        return self.post(self.device.run_void(plan) if is_void else self.device.run_plan(plan))

    @property
    def can_go_on(self):
        """Whether there is a plan, and its next layer need not wait for other instances."""
        plan = self.plans[0] if self.plans else None
        if plan is None or plan.step_id in self.void or self.layers_told == self.geometry.num_layers:
            return plan is not None
        opened = [self.gates.get(gate, 0) for gate in plan.gates.values()]
        return all(layers is None or layers > self.layers_told for layers in opened)

    def stand_still(self):
        """As if nothing could move: everything is taken from all sequences."""
        self.machine.state.preempt_all()
        return self.post(ClockTicked())

    def do_job(self):
        """The data port does its oldest job."""
        job = self.jobs.popleft()
        if isinstance(job, SealPages):
            return self.post(self.device.seal_pages(job))
        source = self.fleet.members.get(job.peer.name)
        if source is None or source.peer != job.peer:
            return self.post(PagesPulled(job.job_id, "no such peer"))
        corrupt, self.corrupt_pulls = self.corrupt_pulls > 0, max(0, self.corrupt_pulls - 1)
        good = [self.device.pull_block(job, i, source.device, corrupt=corrupt) for i in range(len(job.src_blocks))]
        wrong = good.count(False)
        pulled = len(good) * (job.end_layer - job.first_layer) * self.geometry.page_bytes
        return self.post(PagesPulled(job.job_id, "checksum" if wrong else "", pulled, "shm", mismatches=wrong))

    def do_build(self):
        """A grammar is built; it may be that no request wants it any more."""
        job = self.builds.popleft()
        self.built.add(job.job_id)
        return self.post(GrammarBuilt(job.job_id))

    def do_mask(self):
        """A mask is there; it may be that no sequence wants it any more."""
        return self.post(MaskComputed(self.masks.popleft().job_id))

    @property
    def busy(self):
        return bool(self.plans or self.jobs or self.builds or self.masks)

    def check_nothing_held(self):
        """Idle: every block is free but for the cache, and that can be dropped."""
        assert self.machine.is_idle, f"{self.machine} {self.machine.link.exchange.transfers_open}"
        pool = self.machine.pool
        assert pool.available() == self.cfg.pool.hbm_blocks, pool.report()
        pool.clear_cache()
        for tier in pool.report().tiers:
            assert tier.blocks_free == tier.blocks_total, tier


@dataclass
class Job:
    """One client's request as the router sees it."""

    request: object
    orders: dict
    attempt: int = 0
    got: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    final: dict = field(default_factory=dict)
    involved: tuple = ()
    stories: list = field(default_factory=list)
    cached: list = field(default_factory=list)

    @property
    def attempt_id(self):
        return f"{self.request.request_id}#{self.attempt}"

    @property
    def done(self):
        return len(self.final) == self.request.n


class Fleet:
    """Members, the network between them, and a router that only a test could love."""

    def __init__(self, geometry=GEOMETRY, **configs):
        self.now, self.geometry = 0, geometry
        self.acts_max = 6000 * max(1, geometry.block_tokens * geometry.num_layers // (BLOCK * LAYERS))
        self.members, self.generations = {}, {}
        self.wires = {}  # (from, to) -> messages under way, in order
        self.jobs = {}
        self.handed_over = []
        self.refused = []
        self.stayed = []
        self.lose = lambda sender, to, message: False
        for name, cfg in configs.items():
            self.join(name, cfg)
        self.run()

    # -- members

    def join(self, name, cfg):
        self.generations[name] = self.generations.get(name, 0) + 1
        self.members[name] = Member(self, name, cfg, self.generations[name])
        self.welcome_all()

    def welcome_all(self):
        for member in self.members.values():
            infos = tuple(other.info for other in self.members.values() if other is not member)
            self.send(ROUTER_PEER, member.peer, JoinAccepted(infos))

    def kill(self, name):
        """It is dead, and the router tells so; its requests are tried elsewhere."""
        gone = self.members.pop(name)
        for other in self.members.values():
            self.send(ROUTER_PEER, other.peer, PeerGone(gone.peer, "killed"))
        for job in self.jobs.values():
            if not job.done and name in job.involved:
                self.attempt(job)
        return gone

    def expel(self, name):
        """The router takes a living member to be dead; it hears of that, and joins anew."""
        member = self.members[name]
        for other in self.members.values():
            if other is not member:
                self.send(ROUTER_PEER, other.peer, PeerGone(member.peer, "silent"))
        member.hear(Expelled("silent"))
        for wire in [wire for wire in self.wires if member.peer in wire]:
            del self.wires[wire]
        self.generations[name] += 1
        member.peer = Peer(name, self.generations[name])
        member.machine.restart_as(member.peer)
        self.welcome_all()
        for job in self.jobs.values():
            if not job.done and name in job.involved:
                self.attempt(job)

    @property
    def instances(self):
        """Names of the members that run requests."""
        return [name for name, member in self.members.items() if member.runs_requests]

    # -- network

    def send(self, sender, to, message):
        if not self.lose(sender, to, message):
            self.wires.setdefault((sender, to), deque()).append(message)

    def deliver(self, wire):
        sender, to = wire
        message = self.wires[wire].popleft()
        if not self.wires[wire]:
            del self.wires[wire]
        if to == ROUTER_PEER:
            self._hear(sender, message)
        elif to.name in self.members and self.members[to.name].peer == to:
            self.members[to.name].hear(message, sender)

    # -- doing

    def choices(self):
        """Everything that could happen next."""
        choices = [(self.deliver, wire) for wire in self.wires]
        for member in self.members.values():
            choices += [(member.do_plan, None)] if member.can_go_on else []
            choices += [(member.do_job, None)] if member.jobs else []
            choices += [(member.do_build, None)] if member.builds else []
            choices += [(member.do_mask, None)] if member.masks else []
        return choices

    def run(self, until=lambda: False):
        """In turn, until there is nothing to do, or ``until()``."""
        at = 0
        while (choices := self.choices()) and not until():
            do, argument = choices[at % len(choices)]
            do(argument) if argument is not None else do()
            at += 1
            self.now += 1
            assert at < self.acts_max, f"no end: {[member.machine for member in self.members.values()]}"

    def pass_time(self, ns=31 * NS_PER_S):
        """All leases end."""
        self.now += ns
        for member in list(self.members.values()):
            member.post(ClockTicked())
        self.run()

    def finish(self):
        """Run until every request has ended; what stands still is tried elsewhere, as the router's deadlines do."""
        self.run()
        for _ in range(20):
            if all(job.done for job in self.jobs.values()):
                break
            self.pass_time()
            for job in self.jobs.values():
                if not job.done:
                    self.attempt(job)
            self.run()
        for _ in range(3):  # attempts that nobody waits for end one deadline after the other
            self.pass_time(100 * NS_PER_S)
        assert all(job.done for job in self.jobs.values()), [j for j in self.jobs.values() if not j.done]
        for job in self.jobs.values():
            self._judge(job)
        for member in self.members.values():
            member.check_nothing_held()

    # -- router

    def migrate(self, job, target, **terms):
        """Ask the instance that has ``job`` to let ``target`` go on with it."""
        present = [name for name in job.involved if name in self.members]
        holding = [name for name in present if job.attempt_id in self.members[name].machine.state.groups]
        for name in (holding or present)[:1]:
            job.involved = tuple(dict.fromkeys((*job.involved, target)))
            self.send(ROUTER_PEER, self.members[name].peer, Migrate(job.attempt_id, self.members[target].peer, **terms))

    def submit(self, req, first, decode_at=None, **orders):
        """Send a request to ``first``, perhaps to be decoded elsewhere."""
        job = Job(req, {"first": first, "decode_at": decode_at, **orders})
        self.jobs[req.request_id] = job
        self._dispatch(job, first, decode_at)
        return job

    def attempt(self, job):
        """Try again from the tokens that are here, somewhere."""
        for name in job.involved:
            if name in self.members:
                self.send(ROUTER_PEER, self.members[name].peer, Cancel(job.attempt_id))
        job.attempt += 1
        assert job.attempt < 60, f"{job} fails again and again"
        names = self.instances
        first = names[job.attempt % len(names)]
        others = [name for name in names if name != first]
        decode_at = others[job.attempt // 2 % len(others)] if others and job.attempt % 3 else None
        self._dispatch(job, first, decode_at)

    def _dispatch(self, job, first, decode_at):
        req, n = job.request, job.request.n
        job.involved = tuple(filter(None, (first, decode_at)))
        wanted = {key: value for key, value in job.orders.items() if key not in ("first", "decode_at")}
        generated = tuple(tuple(job.got.get(index, ())) for index in range(n)) if not req.beam_width else ()
        order = Dispatch(
            structs.replace(req, request_id=job.attempt_id),
            generated=generated if any(generated) else (),
            ended=tuple(job.final) if any(generated) else (),
            decode_at=self.members[decode_at].peer if decode_at else None,
            **wanted,
        )
        self.send(ROUTER_PEER, self.members[first].peer, order)

    def _hear(self, sender, message):
        if isinstance(message, HandedOver):
            self.handed_over.append(message.request_id)
        elif isinstance(message, MigrationRefused):
            self.stayed.append((message.request_id, message.reason))
        elif isinstance(message, RequestRefused):
            self.refused.append(message)
            job = self._job(message.request_id)
            if job is not None:
                self.attempt(job)
        elif isinstance(message, Tokens):
            for output in message.outputs:
                job = self._job(output.request_id)
                if job is not None:
                    self._take(job, output)

    def _job(self, attempt_id):
        job = self.jobs.get(attempt_id.rpartition("#")[0])
        return job if job is not None and job.attempt_id == attempt_id and not job.done else None

    def _take(self, job, output):
        got = job.got.setdefault(output.index, [])
        if output.index in job.final:
            return
        if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self.attempt(job)
            return
        have = len(got) - output.offset
        if have < 0:
            self.attempt(job)  # something was lost
            return
        new = output.tokens[have:]
        got.extend(new)
        job.logprobs.setdefault(output.index, []).extend(output.logprobs[have:])
        job.stories += [output.story] if output.story else []
        job.cached += [output.cached_tokens] if output.queue_ns is not None else []
        if output.finish_reason is not None:
            job.final[output.index] = output.finish_reason

    def _judge(self, job):
        req = job.request
        context = min(self.members[name].cfg.max_model_tokens for name in self.instances)
        if req.beam_width:
            if FinishReason.DEADLINE in job.final.values():
                return
            expected = lone_beams(req, context)
            assert [tuple(job.got[i]) for i in range(min(req.n, len(expected)))] == [t for t, _, _ in expected]
            return
        for index in range(req.n):
            got = job.got[index]
            assert got == lone_tokens(req.prompt, len(got), req.sampling.seed, index, VOCAB), f"{job}: {index}"
            limit = min(req.stop.max_tokens, context - len(req.prompt))
            stopped = [i for i, t in enumerate(got, 1) if t in req.stop.stop_token_ids and i >= req.stop.min_tokens]
            if job.final[index] is FinishReason.STOP:
                assert stopped == [len(got)]
            elif job.final[index] is FinishReason.LENGTH:
                assert len(got) == limit and stopped in ([], [limit])
            if req.sampling.logprobs is not None:
                assert [entry.token for entry in job.logprobs[index]] == got


def story_of(job):
    """All facts about a job, the last one of a name wins."""
    return dict(fact for story in job.stories for fact in story)


__all__ = ["BLOCK", "Fleet", "Member", "Tier", "TransferMode", "fleet_config", "story_of"]


def pair(p=None, d=None):
    return Fleet(p=fleet_config(**(p or {})), d=fleet_config(**(d or {})))


def computed(fleet, name):
    return fleet.members[name].device.computed_tokens


def stats(fleet, name):
    return fleet.members[name].machine.stats()


def tokens_of(count):
    return np.asarray(PROMPT[:count], np.int32)
