"""A world around one instance machine: a literal device, and a referee that knows what every request must get."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np

from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import ClockTicked, FinishReason, KVGeometry, Request, SamplingParams, StopParams, Tier
from memserve.instance.events import (
    AwaitMask,
    BuildGrammar,
    ForgetGrammar,
    GrammarBuilt,
    MaskComputed,
    RowFailed,
    RunStep,
    StepFailed,
)
from memserve.instance.machine import Instance
from memserve.instance.scheduler.sequence import Phase
from memserve.kv.costs import PreemptionCosts
from memserve.kv.pool import BlockPool
from memserve.protocol.events import EmitTokens, RejectRequest, RequestArrived
from memserve_lab.sim.fuzz.scenario_features import foretell
from memserve_lab.sim.reference.device import SymbolicDevice, fail_row
from memserve_lab.sim.reference.memory import SymbolicStates
from memserve_lab.sim.reference.oracle import lone_beams as beams_of
from memserve_lab.sim.reference.oracle import lone_tokens
from pool_twin import TwinPool

VOCAB = 12
LAYERS = 5
PROMPT = [(3 * i + i * i) % VOCAB for i in range(40)]


def request(
    name, prompt, *, max_tokens=5, seed=0, stops=(), min_tokens=0, logprobs=None, prompt_logprobs=False, grammar="",
    **rest,
):  # fmt: skip
    """A request with the parameters that tests care about."""
    return Request(
        name,
        np.asarray(prompt, dtype=np.int32),
        sampling=SamplingParams(seed=seed, logprobs=logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar),
        stop=StopParams(max_tokens, min_tokens, tuple(stops)),
        **rest,
    )


def config(
    *,
    hbm=16,
    dram=0,
    caching=True,
    context=64,
    running=6,
    step_tokens=16,
    chunk=8,
    waiting=100,
    depth=2,
    preemption="auto",
    states=None,
    windows=None,
    **more,
):
    """An instance small enough to think about."""
    return InstanceConfig(
        max_model_tokens=context,
        pool=PoolConfig(hbm, dram, caching, states=states, windows=windows),
        scheduler=SchedulerConfig(running, step_tokens, chunk, waiting, depth, preemption, **more),
    )


def lone_beams(req, context):
    """What a beam search gets when it is alone in the world."""
    return beams_of(req, context, VOCAB)


class World:
    """Posts events, performs actions, and compares every output with what the lone request would get."""

    def __init__(self, cfg, block_tokens=4, twin=True, costs=None, geometry=None, snapshot_policy=None):
        self.snapshot_policy = snapshot_policy  # makes one; None: the product's own
        self.cfg, self.block_tokens, self.twin, self.costs = cfg, block_tokens, twin, costs
        self.geometry = geometry or KVGeometry(LAYERS, 1, 1, 1, "float32", block_tokens)
        self.machine = self.new_machine()
        sizes = block_tokens, cfg.pool.hbm_blocks, cfg.pool.dram_blocks, VOCAB
        layers = 1 if cfg.scheduler.layerwise == "off" else self.geometry.num_layers
        self.device = SymbolicDevice(*sizes, layers=layers)
        if cfg.pool.states is not None:
            self.device.states = SymbolicStates(self.device.kv, cfg.pool.states.per_block, cfg.pool.states.draft_states)
        self.device.windows = cfg.pool.windows
        self.device.token_of = {} if cfg.scheduler.nonprefix_reuse else None
        self.plans, self.builds, self.masks = deque(), deque(), deque()
        self.built = {0}  # jobs
        self.jobs = {}  # job -> grammar
        self.slow = set()  # requests with a mask that has taken too long
        self.requests, self.got, self.final, self.rejected = {}, {}, {}, {}
        self.facts = []  # of all requests
        self.inexact_tokens = {}  # by request
        self.asked_to_end = set()
        self.diary = []
        self.now = 0
        self.failed = False
        #: requests of which a row failed alone, grammars that cannot be built
        self.rows_failed, self.no_grammars = set(), set()
        #: plans that were under way when an earlier one failed
        self.void = set()

    def new_machine(self):
        kind = TwinPool if self.twin else BlockPool
        pool = kind(self.cfg.pool, self.block_tokens, "test")
        machine = Instance(self.cfg, self.block_tokens, self.costs or PreemptionCosts(), pool, geometry=self.geometry)
        foretell(machine, Random(0))
        if self.snapshot_policy is not None:
            pool.snapshots.policy = self.snapshot_policy()
        return machine

    # -- doing

    def post(self, event):
        if isinstance(event, RequestArrived) and event.request.request_id not in self.requests:
            self.requests[event.request.request_id] = event.request
        actions = self.machine.handle(event, self.now)
        self.diary.append((event, self.now, repr(actions)))
        for action in actions:
            if isinstance(action, RunStep):
                assert {opened.grammar_job for opened in action.plan.open} <= self.built
                assert all(bool(opened.grammar_job) == bool(opened.sampling.grammar) for opened in action.plan.open)
                self.plans.append(action.plan)
            elif isinstance(action, BuildGrammar):
                self.builds.append(action)
                self.jobs[action.job_id] = action.grammar
            elif isinstance(action, AwaitMask):
                self.masks.append(action)
            elif isinstance(action, ForgetGrammar):
                self.built.discard(action.job_id)
            elif isinstance(action, EmitTokens):
                for output in action.outputs:
                    self._judge(output)
            elif isinstance(action, RejectRequest):
                assert action.request_id not in self.rejected
                self.rejected[action.request_id] = action
        assert len(self.plans) <= self.cfg.scheduler.steps_in_flight
        for plan in self.plans:
            assert plan.moves or plan.copies or plan.late_draws or plan.num_tokens > 0
            assert plan.num_tokens <= self.cfg.scheduler.max_step_tokens
        self.machine.check_invariants()
        report = self.machine.report()
        ahead = self.machine.state.counters.late_draws > 0  # a block for tokens that were late may be there already
        assert report.fragmentation_tokens_max < self.block_tokens * (2 if ahead else 1)
        return actions

    def arrive(self, req):
        return self.post(RequestArrived(req))

    def step(self):
        """The device finishes its oldest plan."""
        self.now += 1
        plan = self.plans.popleft()
        void = plan.step_id in self.void
        return self.post(self.device.run_void(plan) if void else self.device.run_plan(plan))

    def fail(self, seed=0):
        self.now += 1
        self.failed = True
        plan = self.plans.popleft()
        event = self.device.fail_plan(plan, seed)
        assert isinstance(event, StepFailed)
        self.void.update(later.step_id for later in self.plans)
        return self.post(event)

    def fail_row(self, which, suspect=False):
        """One row of the oldest plan fails alone; returns its request (``None``: the plan has no rows)."""
        if not self.plans[0].slots or self.plans[0].step_id in self.void:
            self.step()
            return None
        self.now += 1
        plan = self.plans.popleft()
        event = self.device.run_plan(plan)
        owners = self.machine.inflight[0].by_slot()
        slot = sorted(owners)[which % len(owners)]
        fail_row(plan, event, slot, RowFailed("planted", kv_is_suspect=suspect))
        if owners[slot].phase is not Phase.FINISHED:
            self.rows_failed.add(owners[slot].request_id)
        steps_failed = self.machine.stats().steps_failed
        self.post(event)
        assert self.machine.stats().steps_failed == steps_failed
        return owners[slot].request_id

    def build(self, error=""):
        """The oldest grammar is built, or cannot be; it may be that no request wants it any more."""
        job = self.builds.popleft()
        if error:
            self.no_grammars.add(job.grammar)
        else:
            self.built.add(job.job_id)
        return self.post(GrammarBuilt(job.job_id, error))

    def mask(self):
        """The mask that is awaited longest is there; it may be that no sequence wants it any more."""
        return self.post(MaskComputed(self.masks.popleft().job_id))

    def too_slow(self, now):
        """Time passes while masks are awaited."""
        waiting = self.machine.state.late_masks.sequences()
        self.slow |= {one.request_id for one in waiting if not one.late.is_there}
        self.now = max(self.now, now)
        return self.post(ClockTicked())

    @property
    def next_check_ns(self):
        """When a turn that waits while nothing runs is looked at again."""
        returns = self.machine.state.returns
        return returns.next_check_ns if returns is not None else None

    def wait(self):
        """Time passes until a turn that waits while nothing runs is looked at again."""
        self.now = max(self.now, self.next_check_ns)
        return self.post(ClockTicked())

    def drain(self, limit=30_000):
        """Run until nothing is under way. Where nine of ten masks are late, dozens of requests take thousands of
        steps."""
        while self.plans or self.builds or self.masks or self.next_check_ns is not None:
            self.step() if self.plans else self.build() if self.builds else self.mask() if self.masks else self.wait()
            limit -= 1
            assert limit, f"no end: {self.machine}"

    # -- judging

    def _judge(self, output):
        key = (output.request_id, output.index)
        assert key not in self.final, f"{key}: an output after the final one"
        assert output.request_id not in self.rejected
        req = self.requests[output.request_id]
        got = self.got.setdefault(key, [])
        self.facts += [name for name, _ in output.story]
        if output.tokens and not got:
            self._judge_first(req, output)
        assert output.offset == (0 if req.beam_width else len(got))
        got.extend(output.tokens)
        if output.finish_reason is not None:
            self.final[key] = output.finish_reason
        if req.beam_width:
            self._judge_beam(req, output)
        else:
            self._judge_tokens(req, key, got, output.finish_reason)

    def _judge_first(self, req, output):
        assert 0 <= output.cached_tokens < len(req.prompt)
        self.inexact_tokens[req.request_id] = output.inexact_tokens
        if not (req.use_cache and self.cfg.pool.caching) or req.sampling.prompt_logprobs:
            assert output.cached_tokens == 0
        if req.sampling.prompt_logprobs:
            wanted = [(int(t), -float(i)) for i, t in enumerate(req.prompt) if i]
            assert output.prompt_logprobs[0] is None
            assert [(e.token, e.logprob) for e in output.prompt_logprobs[1:]] == wanted

    def _judge_tokens(self, req, key, got, reason):
        expected = lone_tokens(req.prompt, len(got), req.sampling.seed, key[1], VOCAB)
        inexact = self.inexact_tokens.get(key[0], 0)
        assert got == expected or inexact, f"{key}: {got} instead of {expected}"
        assert not inexact or req.nonprefix_reuse
        limit = min(req.stop.max_tokens, self.machine.intake.context_of(req) - len(req.prompt))
        stop_at = [i for i, token in enumerate(got, 1) if token in req.stop.stop_token_ids and i >= req.stop.min_tokens]
        assert not stop_at or (stop_at == [len(got)] and reason is FinishReason.STOP)
        assert len(got) <= limit
        if reason is FinishReason.STOP:
            assert stop_at or key in self.asked_to_end
        elif reason is FinishReason.LENGTH:
            assert len(got) == limit
        elif reason is FinishReason.ERROR:
            hopeless = req.request_id in self.rows_failed | self.slow or req.sampling.grammar in self.no_grammars
            assert self.failed or hopeless
        elif reason is FinishReason.CANCELLED:
            assert req.request_id in self.asked_to_end
        elif reason is FinishReason.DEADLINE:
            assert req.deadline_ns <= self.now
        else:
            assert len(got) < limit

    def _judge_beam(self, req, output):
        assert output.finish_reason is not None, "beams are delivered when they are finished"
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            expected = lone_beams(req, self.machine.intake.context_of(req))
            if output.index < len(expected):
                tokens, total, reason = expected[output.index]
                assert output.tokens == tokens
                assert abs(output.cumulative_logprob - total) < 1e-9
                assert output.finish_reason is reason
            else:
                assert output.tokens == ()

    # -- at the end

    def check_all_ended(self):
        """Each request has its endings, nothing is held, and the same diary gives the same actions again."""
        for name, req in self.requests.items():
            finals = sorted(index for owner, index in self.final if owner == name)
            if name in self.rejected:
                assert finals == []
            else:
                assert finals == list(range(req.n)), f"{name}: {finals}"
        self.check_nothing_held()
        if not any(req.beam_width for req in self.requests.values()):
            assert not self.machine.state.counters.standstills, "only beams may block each other"
        twin_machine = self.new_machine()
        for event, now_ns, actions in self.diary:
            assert repr(twin_machine.handle(event, now_ns)) == actions

    def check_nothing_held(self):
        """No block is leaked on any tier, cached ones can all be had."""
        pool = self.machine.pool
        assert pool.available() == self.cfg.pool.hbm_blocks
        pool.clear_cache()
        if self.twin:
            assert len(pool.free[Tier.HBM]) == self.cfg.pool.hbm_blocks
            assert len(pool.free[Tier.DRAM]) == self.cfg.pool.dram_blocks
            return
        for tier in pool.report().tiers:
            assert tier.blocks_free == tier.blocks_total


def building_worlds(request):
    """A fixture: builds worlds on either pool; at the end all must be ended, returned and repeatable."""
    worlds = []

    def build(costs=None, **sizes):
        worlds.append(World(config(**sizes), 4, request.param == "twin", costs))
        return worlds[-1]

    yield build
    for world in worlds:
        world.drain()
        world.check_all_ended()


def rows(plan):
    return list(zip(plan.slots, plan.starts, plan.counts, plan.sample_slots, strict=True))


def plans_of(actions):
    return [action.plan for action in actions if isinstance(action, RunStep)]


def outputs_of(actions):
    return [output for action in actions if isinstance(action, EmitTokens) for output in action.outputs]
