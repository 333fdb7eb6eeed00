"""A row that fails alone: planted failures in each stage of a row, on the real device and on the machine beside it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fleet_world import Fleet, fleet_config
from instance_world import PROMPT, World, config, request
from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.errors import InvariantError
from memserve.base.types import FinishReason, Request, SamplingParams, StopParams, TokenOutput
from memserve.host.engine import Engine
from memserve.instance.events import RowFailed
from memserve.instance.machine import Instance
from memserve.model import sampling
from memserve.model.device import ModelDevice
from memserve.model.forward import EagerForward
from memserve.model.slots import SlotTable
from memserve.protocol.events import RequestCancelled
from memserve.protocol.messages import Dispatch, Segment, Span, Tokens
from memserve_lab.sim.reference.device import fail_row
from tiny_models import CONTEXT_TOKENS, GREEDY, Driver, greedy_tokens, loaded, prompt, sequence, tiny_module
from tiny_models import VOCAB as MODEL_VOCAB

WAIT_S = 60
SEED_AT_FAULT = 666
"""The row whose sampling has this seed is the one that fails."""


# -- planted failures, by stage


def raises(*_: object, **__: object) -> Any:
    raise IndexError("planted")


@contextmanager
def opening(patch: pytest.MonkeyPatch) -> Iterator[SamplingParams]:
    """Its parameters cannot be written into the slot."""
    yield SamplingParams(temperature=0.5, top_k=1 << 70, seed=SEED_AT_FAULT)


@contextmanager
def adjusting(patch: pytest.MonkeyPatch) -> Iterator[SamplingParams]:
    original = sampling.adjust_logits

    def adjust(row: Any, tokens: Any, prompt_tokens: int, sampling: SamplingParams, *rest: Any) -> None:
        if sampling.seed == SEED_AT_FAULT:
            raises()
        original(row, tokens, prompt_tokens, sampling, *rest)

    patch.setattr(sampling, "adjust_logits", adjust)
    yield SamplingParams(temperature=0.0, frequency_penalty=0.5, logprobs=1, seed=SEED_AT_FAULT)


def _at_fault(table: SlotTable, slots: Any) -> bool:
    return bool((table.seed[slots] == SEED_AT_FAULT).any())


@contextmanager
def drawing(patch: pytest.MonkeyPatch) -> Iterator[SamplingParams]:
    original = sampling._draw

    def draw(logits: Any, chosen: Any, slots: Any, table: SlotTable, ahead: Any) -> Any:
        return raises() if _at_fault(table, slots) else original(logits, chosen, slots, table, ahead)

    patch.setattr(sampling, "_draw", draw)
    yield SamplingParams(temperature=1.0, seed=SEED_AT_FAULT)


@contextmanager
def reporting(patch: pytest.MonkeyPatch) -> Iterator[SamplingParams]:
    original = sampling._report

    def report(logits: Any, places: Any, slots: Any, table: SlotTable, drawn: Any) -> None:
        if _at_fault(table, slots[places]):
            raises()
        original(logits, places, slots, table, drawn)

    patch.setattr(sampling, "_report", report)
    yield SamplingParams(temperature=0.0, logprobs=2, seed=SEED_AT_FAULT)


@contextmanager
def prompt_reporting(patch: pytest.MonkeyPatch) -> Iterator[SamplingParams]:
    from memserve.model import device

    original = device.report_logprobs

    def report(logits: Any, tokens: Any, top: int) -> Any:
        return raises() if top == 17 else original(logits, tokens, top)

    patch.setattr(device, "report_logprobs", report)
    yield SamplingParams(temperature=0.0, logprobs=17, prompt_logprobs=True, seed=SEED_AT_FAULT)


@contextmanager
def masking(patch: pytest.MonkeyPatch) -> Iterator[SamplingParams]:
    """Nothing is left to draw: each token is forbidden."""
    bias = tuple((token, -3e38) for token in range(MODEL_VOCAB)) * 2
    yield SamplingParams(temperature=0.0, logit_bias=bias, seed=SEED_AT_FAULT)


@contextmanager
def biasing_beyond(patch: pytest.MonkeyPatch) -> Iterator[SamplingParams]:
    """An id that the model does not have: the edges refuse it, the device does not rely on that."""
    yield SamplingParams(temperature=0.0, logit_bias=((MODEL_VOCAB, 1.0),), seed=SEED_AT_FAULT)


STAGES = [opening, adjusting, drawing, reporting, prompt_reporting, masking, biasing_beyond]


# -- the device


class NanForward:
    """Logits of rows with ``POISON`` as last token are no numbers."""

    POISON = 7

    def __init__(self, module: Any, what: float) -> None:
        self._forward, self._what = EagerForward(module), what

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        logits = self._forward(input_ids, positions, logits_rows).clone()
        logits[input_ids[logits_rows] == self.POISON, 5] = self._what
        return logits


@pytest.mark.parametrize("plant", STAGES, ids=lambda plant: plant.__name__)
def test_row_failing_in_any_stage_costs_no_other_row_its_token(
    plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of one step, the one in the middle fails; it is closed as ever, and its slot serves the next."""
    module, tokens = tiny_module("llama"), [prompt(20 + at, at) for at in range(3)]
    expected = [greedy_tokens(module, known, 3) for known in tokens]
    with plant(monkeypatch) as bad:
        driver = Driver(loaded(tiny_module("llama")))
        opened = [sequence(s, tokens[s], [s], bad if s == 1 else GREEDY) for s in range(3)]
        rows = [(s, 0, len(tokens[s]), (s,)) for s in range(3)]
        finished = driver.step(rows, open=opened, prompt_logprob_rows=[1] if bad.prompt_logprobs else [])
        assert list(finished.failed) == [1] and finished.failed[1].reason and len(finished.tokens) == 3
        assert not finished.failed[1].kv_is_suspect and 1 not in finished.prompt_logprobs
        # the machine had made this plan before it heard of that
        later = driver.step([(s, len(tokens[s]), 1, (s,)) for s in range(3)])
        for s in (0, 2):
            assert [finished.tokens[s], later.tokens[s]] == expected[s][:2]
        rows = [(0, len(tokens[0]) + 1, 1, (0,)), (1, 0, len(tokens[1]), (1,))]
        last = driver.step(rows, close=[1], open=[sequence(1, tokens[1], [9])])
        assert last.tokens == [expected[0][2], expected[1][0]] and not last.failed


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY, SamplingParams(seed=3), SamplingParams(logprobs=1, frequency_penalty=0.1),
        SamplingParams(repetition_penalty=1.3), SamplingParams(logit_bias=((5, -100.0), (6, 3e38))),
    ],
)  # fmt: skip
def test_logits_that_are_no_numbers_fail_their_row(what: float, sampling: SamplingParams) -> None:
    model = loaded(tiny_module("llama"))
    driver = Driver(model, forward=NanForward(model.module, what))
    sane, poisoned = prompt(20, 1), np.append(prompt(10, 2), NanForward.POISON).astype(np.int32)
    sane[-1] = 9
    opened = [sequence(0, sane, [0], sampling), sequence(1, poisoned, [1], sampling)]
    finished = driver.step([(0, 0, 20, (0,)), (1, 0, 11, (1,))], open=opened)
    assert list(finished.failed) == [1] and finished.failed[1].kv_is_suspect


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_stop_token_that_is_excluded_hides_no_broken_logit(what: float) -> None:
    """``min_tokens`` overwrites the logit that is no number: the row is the model's fault all the same."""
    model = loaded(tiny_module("llama"))
    driver = Driver(model, forward=NanForward(model.module, what))
    poisoned = np.append(prompt(10, 2), NanForward.POISON).astype(np.int32)
    opened = sequence(0, poisoned, [0], stop=StopParams(9, 2, (5,)))
    finished = driver.step([(0, 0, 11, (0,))], open=[opened])
    assert list(finished.failed) == [0] and finished.failed[0].kv_is_suspect


def test_what_draws_from_a_row_fails_with_it() -> None:
    """Forks draw from another's prompt: where its earlier part is lost, what their first logits say has no meaning."""
    driver, tokens = Driver(loaded(tiny_module("llama"))), prompt(20, 1)
    expected = greedy_tokens(tiny_module("llama"), prompt(9, 2), 1)
    driver.step(open=[sequence(slot, tokens, [0], index=slot) for slot in (0, 1)] + [sequence(2, prompt(9, 2), [1])])
    driver.step([(0, 0, 12, ())])
    driver.device._on_segment_lost(0, "planted")
    finished = driver.step([(0, 12, 8, (0, 1)), (2, 0, 9, (2,))])
    assert set(finished.failed) == {0, 1} and finished.tokens[2:] == expected


def test_prompt_tokens_outside_of_the_vocabulary_fail_their_row() -> None:
    driver, good = Driver(loaded(tiny_module("llama"))), prompt(20, 1)
    for bad in (MODEL_VOCAB, -1, 2**31 - 1):
        broken = np.array([5, bad, 6], np.int32)
        driver.step(open=[sequence(0, good, [0]), sequence(1, broken, [1])])
        finished = driver.step([(0, 0, 20, (0,)), (1, 0, 2, ())])
        assert list(finished.failed) == [1]
        assert finished.tokens == greedy_tokens(tiny_module("llama"), good, 1)
        driver.step(close=[0, 1])


def test_forks_of_a_row_fail_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with drawing(monkeypatch) as bad:
        driver, tokens = Driver(loaded(tiny_module("llama"))), prompt(20, 1)
        opened = [sequence(0, tokens, [0], SamplingParams(seed=1)), sequence(1, tokens, [0], bad, index=1)]
        finished = driver.step([(0, 0, 20, (0, 1))], open=opened)
        assert list(finished.failed) == [1] and len(finished.tokens) == 2


@pytest.mark.parametrize("error", [MemoryError, InvariantError, torch.OutOfMemoryError])
def test_errors_of_the_device_are_not_blamed_on_a_row(error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error("planted")

    monkeypatch.setattr(sampling, "_draw", fails)
    driver = Driver(loaded(tiny_module("llama")))
    with pytest.raises(error):
        driver.step([(0, 0, 20, (0,))], open=[sequence(0, prompt(20, 1), [0], SamplingParams(seed=1))])


# -- a whole engine with the real device: other tenants and their caches


class Client:
    """Asks an engine, and waits for the ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.asked = engine, 0

    def submit(self, tenant: str, tokens: np.ndarray, sampling: SamplingParams = GREEDY, count: int = 6) -> queue.Queue:
        news: queue.Queue = queue.Queue()
        stop = StopParams(max_tokens=count, stop_token_ids=(2,))
        self.asked += 1
        self.engine.submit(Request(f"r{self.asked}", tokens, sampling, stop, tenant=tenant), news.put)
        return news

    @staticmethod
    def collect(news: queue.Queue) -> tuple[list[int], TokenOutput, int]:
        """The tokens, the last output, and how many prompt tokens came from the cache."""
        tokens, cached = [], 0
        while True:
            output = news.get(timeout=WAIT_S)
            tokens += output.tokens
            cached = max(cached, output.cached_tokens)
            if output.finish_reason is not None:
                return tokens, output, cached


@contextmanager
def engine_of(forward: Callable[[Any], Any] | None = None) -> Iterator[tuple[Engine, Instance]]:
    model = loaded(tiny_module("llama"))
    scheduler = SchedulerConfig(max_running=8, max_step_tokens=256, prefill_chunk_tokens=64)
    settings = InstanceConfig(CONTEXT_TOKENS, pool=PoolConfig(64), scheduler=scheduler)  # its ids are not checked
    machine = Instance(settings, model.geometry.block_tokens)
    engine = Engine(machine, ModelDevice(model, settings, forward(model.module) if forward else None))
    try:
        yield engine, machine
    finally:
        engine.close(WAIT_S)
    machine.check_invariants()
    stats = machine.stats()
    assert stats.hbm.blocks_free + stats.hbm.blocks_cached == 64, "a block is lost"


@pytest.mark.parametrize("plant", STAGES, ids=lambda plant: plant.__name__)
def test_failing_row_costs_no_other_tenant_cache_or_answers(
    plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests run; one with a row that fails comes between. Cached tokens are the same before and after."""
    prompts = [prompt(100, seed) for seed in range(4)]
    with plant(monkeypatch) as bad, engine_of() as (engine, _):
        # the machine would refuse what it can see; here the row must fail on the device
        monkeypatch.setattr("memserve.instance.intake.check_request", lambda *_: None)
        client = Client(engine)
        alone = [client.collect(client.submit(f"t{i}", prompts[i], count=40))[0] for i in range(4)]
        before = [client.collect(client.submit(f"t{i}", prompts[i], count=1))[2] for i in range(4)]
        running = [client.submit(f"t{i}", prompts[i], count=40) for i in range(4)]
        failing = [client.submit(f"t{i % 2}", prompts[i % 2], bad) for i in range(6)]
        for news in failing:
            tokens, last, _ = client.collect(news)
            assert last.finish_reason is FinishReason.ERROR and last.error and not tokens
            assert "planted" not in last.error, "what went wrong inside is for the log"
        assert [client.collect(news)[0] for news in running] == alone
        after = [client.collect(client.submit(f"t{i}", prompts[i], count=1))[2] for i in range(4)]
        assert after == before == [96] * 4
        stats = engine.stats().instance
        assert (stats.steps_failed, stats.rows_failed) == (0, 6)


def test_kv_of_non_finite_logits_is_not_reused() -> None:
    """A prefix with logits that were no numbers is computed anew, and every other one is kept."""
    poisoned = np.append(prompt(70, 2), NanForward.POISON).astype(np.int32)
    with engine_of(lambda module: NanForward(module, float("nan"))) as (engine, _):
        client = Client(engine)
        client.collect(client.submit("t", prompt(70, 1), count=1))
        for _ in range(2):
            _, last, cached = client.collect(client.submit("t", poisoned))
            assert last.finish_reason is FinishReason.ERROR and "number" in last.error and not cached
        assert client.collect(client.submit("t", prompt(70, 1), count=1))[2] == 64
        stats = engine.stats().instance
        assert (stats.steps_failed, stats.rows_failed, stats.hbm.blocks_cached) == (0, 2, 2)


# -- the machine


def fail(world: World, name: str, why: RowFailed) -> None:
    """The oldest plan is executed, and the row of ``name`` fails in it."""
    plan = world.plans.popleft()
    event = world.device.run_plan(plan)
    slots = {s: sequence.request_id for s, sequence in world.machine.inflight[0].by_slot().items()}
    fail_row(plan, event, next(s for s, owner in slots.items() if owner == name), why)
    world.failed = True  # an ERROR is to be expected
    world.post(event)


@pytest.mark.parametrize("suspect", [False, True])
@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize(
    "kind", [{}, {"n": 3}, {"beam_width": 2, "n": 2}, {"prompt_logprobs": True}, {"prompt_logprobs": True, "n": 2}]
)
def test_only_the_request_at_fault_ends(kind: dict, step: int, suspect: bool) -> None:
    """Prefill in chunks, forks, beams, pipelined plans: at each step the row of ``bad`` fails in turn."""
    world = World(config(hbm=40))
    world.arrive(request("good", PROMPT[:9], max_tokens=8))
    world.arrive(request("bad", PROMPT[3:22], max_tokens=8, **kind))
    world.arrive(request("other", PROMPT[5:16], max_tokens=8, n=2))
    for _ in range(step):
        world.step()
    while world.plans and "bad" not in {s.request_id for s in world.machine.inflight[0].by_slot().values()}:
        world.step()
    fail(world, "bad", RowFailed("planted", kv_is_suspect=suspect))
    world.drain()
    ends = {key: reason for key, reason in world.final.items() if key[0] != "bad"}
    assert ends and set(ends.values()) == {FinishReason.LENGTH}
    reasons = [reason for (name, _), reason in world.final.items() if name == "bad"]
    assert FinishReason.ERROR in reasons and len(reasons) == kind.get("n", 1)
    if "beam_width" in kind:
        assert set(reasons) == {FinishReason.ERROR}
    assert world.machine.stats().steps_failed == 0 and world.machine.stats().rows_failed == 1
    world.check_all_ended()


def test_a_row_that_the_plan_does_not_have_cannot_fail() -> None:
    world = World(config())
    world.arrive(request("a", PROMPT[:5]))
    event = world.device.run_plan(world.plans.popleft())
    event.failed[5] = RowFailed("nobody's")
    with pytest.raises(InvariantError, match="does not have the rows"):
        world.machine.handle(event, 1)


def test_kv_of_a_cancelled_request_that_gave_no_numbers_goes() -> None:
    """It was cancelled while its last plan ran, and its blocks are cached: the next one computes them all the same."""
    world = World(config(hbm=40, depth=1))
    world.arrive(request("a", PROMPT[:14]))
    while not world.machine.pool.match("", np.asarray(PROMPT[:14], np.int32)):
        world.step()
    plan = world.plans.popleft()
    event = world.device.run_plan(plan)
    world.asked_to_end.add("a")
    world.post(RequestCancelled("a"))
    fail_row(plan, event, plan.slots[0], RowFailed("planted", kv_is_suspect=True))
    world.post(event)
    assert world.machine.pool.match("", np.asarray(PROMPT[:14], np.int32)) == 0
    world.arrive(request("b", PROMPT[:14]))
    world.drain()
    world.check_all_ended()


def test_a_part_computed_again_is_not_trusted_by_its_old_token() -> None:
    """The earlier part lies elsewhere. A token proves that it was read; when a step fails, what is computed again is
    published behind a new token, as the earlier part may be lost by then."""
    fleet = Fleet(a=fleet_config(), p=fleet_config(depth=1))
    tokens, part = np.asarray(PROMPT[:28], np.int32), fleet.members["p"]
    fleet.submit(request("first", PROMPT[:16], max_tokens=1), "a")
    fleet.run()
    lease = fleet.members["a"].machine.pool.acquire("", tokens[:16])
    assert lease is not None and lease.tokens == 16
    cells = fleet.members["a"].device.segment_cells(lease.blocks, 16)
    part.device.segment = lambda segment, name: cells
    span = Span(tokens[:16], (Segment(fleet.members["a"].peer, "", 16),), False)
    part.hear(Dispatch(request("r", PROMPT[16:28], max_tokens=12), span=span))
    group = part.machine.state.groups["r"]

    def published() -> int:
        return part.machine.pool.match(group.isolation, tokens[16:])

    def step() -> None:
        part.post(part.device.run_plan(part.plans.popleft()))

    while not group.sequences[0].out:
        step()
    part.post(part.device.fail_plan(part.plans.popleft(), 0))
    assert part.plans and not published()
    part.device.segment = lambda segment, name: None
    while part.plans:
        step()
    assert not published() and part.machine.is_idle
    fleet.members["a"].machine.pool.unpin(lease)
    fleet.members["a"].machine.pool.release(lease.blocks)


def test_forks_of_a_prompt_whose_part_is_lost_give_no_tokens() -> None:
    """Both answers begin with the same logits, which mean nothing: no token of them makes KV of the part trusted."""
    fleet = Fleet(p=fleet_config())
    tokens, part = np.asarray(PROMPT[:28], np.int32), fleet.members["p"]
    part.device.segment = lambda segment, name: None
    span = Span(tokens[:16], (Segment(part.peer, "", 16),), False)
    part.hear(Dispatch(request("r", PROMPT[16:28], max_tokens=3, n=2), span=span))
    isolation = part.machine.state.groups["r"].isolation
    while part.plans:
        part.post(part.device.run_plan(part.plans.popleft()))
    outputs = [output for message in part.said if isinstance(message, Tokens) for output in message.outputs]
    assert {output.finish_reason for output in outputs} == {FinishReason.ERROR}
    assert not any(output.tokens for output in outputs) and len(outputs) == 2
    assert not part.machine.pool.match(isolation, tokens[16:])


@pytest.mark.parametrize("decode_at", [None, "d"])
def test_in_a_cluster_the_error_goes_to_the_router_once(decode_at: str | None) -> None:
    """Where the row fails, the request ends; no other instance hears of it again."""
    fleet = Fleet(p=fleet_config(), d=fleet_config())
    peer = fleet.members[decode_at].peer if decode_at else None
    member = fleet.members["p"]
    member.hear(Dispatch(request("a", PROMPT[:5]), decode_at=peer))
    plan = member.plans.popleft()
    event = member.device.run_plan(plan)
    fail_row(plan, event, plan.slots[0], RowFailed("planted"))
    member.post(event)
    fleet.run()
    said = [output for message in member.said if isinstance(message, Tokens) for output in message.outputs]
    assert [(output.finish_reason, output.error) for output in said] == [(FinishReason.ERROR, "planted")]
    assert all(other.machine.is_idle for other in fleet.members.values())
    assert not fleet.members["d"].machine.stats().steps
