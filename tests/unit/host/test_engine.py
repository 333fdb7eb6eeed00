"""The engine's threads around a real machine and a device with literal KV."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import FinishReason, Request, SamplingParams, StopParams
from memserve.host.engine import Engine, Refusal, Rejected
from memserve.instance.events import StepFailed
from memserve.instance.machine import Instance
from memserve.system.loop import EngineStopped
from memserve.transport.ports import Device as DevicePort
from memserve_lab.sim.reference.device import SymbolicDevice
from memserve_lab.sim.reference.oracle import lone_tokens

BLOCK = 4
VOCAB = 50
BLOCKS = 40
WAIT_S = 30


class Device(SymbolicDevice, DevicePort):
    """The literal device as a port: may be held at a gate, and fails where it is told to."""

    def __init__(self):
        super().__init__(BLOCK, BLOCKS, 0, vocab=VOCAB)
        self.gate = threading.Event()
        self.gate.set()
        self.fail_steps = 0
        self.void = False  # a step failed, and the plans made before that was known are still coming
        self.closed = False
        self.grammars = {}  # those being built -> what says that one is
        self.jobs = {}  # their numbers
        self.awaited = []  # slots with masks that are late

    def build_grammar(self, job_id, grammar, on_built):
        self.jobs[job_id] = grammar
        self.grammars[grammar] = on_built

    def forget_grammar(self, job_id):
        del self.grammars[self.jobs.pop(job_id)]

    def await_mask(self, slot, on_mask):
        self.awaited.append((slot, on_mask))

    def execute(self, plan):
        assert self.gate.wait(WAIT_S)
        if self.fail_steps:
            self.fail_steps -= 1
            self.void = True
            raise RuntimeError(self.fail_plan(plan, seed=self.fail_steps).reason)
        self.void = self.void and not plan.reset_slots
        finished = self.run_void(plan) if self.void else self.run_plan(plan)
        if isinstance(finished, StepFailed):
            raise RuntimeError(finished.reason)
        return finished

    def close(self):
        self.closed = True


class DeviceAhead(Device):
    """One that the host is ahead of: what is begun is answered later; what fails, fails at once or then."""

    def begin_step(self, plan):
        try:
            finished = self.execute(plan)
        except RuntimeError as error:
            if plan.step_id % 2:
                raise
            return lambda error=error: self._raise(error)
        return lambda: finished

    @staticmethod
    def _raise(error):
        raise error


@pytest.fixture(params=[Device, DeviceAhead])
def device(request):
    return request.param()


@pytest.fixture
def engine(device):
    config = InstanceConfig(
        max_model_tokens=64,
        pool=PoolConfig(hbm_blocks=BLOCKS),
        scheduler=SchedulerConfig(max_running=8, max_step_tokens=64, prefill_chunk_tokens=16),
    )
    machine = Instance(config, BLOCK)
    engine = Engine(machine, device)
    yield engine
    device.gate.set()
    engine.close(WAIT_S)
    assert device.closed and engine.requests_outstanding == 0
    machine.check_invariants()
    assert machine.stats().hbm.blocks_free + machine.stats().hbm.blocks_cached == BLOCKS


def ask(name, prompt, count, n=1, grammar=""):
    return Request(
        name,
        np.array(prompt, np.int32),
        SamplingParams(temperature=0.0, seed=7, grammar=grammar),
        StopParams(max_tokens=count),
        n=n,
        tenant="t",
    )


def collect(news: queue.Queue, n: int = 1):
    """Everything of one request: ``{index: (tokens, finish_reason)}``, or the rejection."""
    tokens = {i: [] for i in range(n)}
    reasons = {}
    while len(reasons) < n:
        item = news.get(timeout=WAIT_S)
        if isinstance(item, Rejected):
            return item
        assert item.index not in reasons, "news of a sequence after its end"
        tokens[item.index] += item.tokens
        if item.finish_reason is not None:
            reasons[item.index] = item.finish_reason
    assert news.empty()
    return {i: (tokens[i], reasons[i]) for i in range(n)}


def submit(engine, request):
    news: queue.Queue = queue.Queue()
    engine.submit(request, news.put)
    return news


def test_requests_from_many_threads_get_what_each_gets_alone(engine):
    """Clients are threads; each must see its own tokens, whatever runs beside it."""
    answers = {}

    def client(k):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, k]
        answers[k] = collect(submit(engine, ask(f"r{k}", prompt, 5 + k, n=2)), n=2)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for k in range(12):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, k]
        for index in range(2):
            want = lone_tokens(prompt, 5 + k, 7, index, VOCAB)
            assert answers[k][index] == (want, FinishReason.LENGTH)
    stats = engine.stats()
    assert stats.steps > 0 and stats.machine_ns > 0 and stats.instance.requests_finished == 12


def test_a_cancelled_request_ends_once_and_gives_its_blocks_back(engine, device):
    device.gate.clear()
    news = submit(engine, ask("gone", range(30), 20))
    engine.cancel("gone")
    engine.cancel("gone")
    engine.cancel("never heard of")
    device.gate.set()
    assert collect(news)[0][1] is FinishReason.CANCELLED


def test_a_step_that_fails_once_is_done_again(engine, device):
    device.fail_steps = 1
    got = collect(submit(engine, ask("again", range(10), 6)))
    assert got[0] == (lone_tokens(range(10), 6, 7, 0, VOCAB), FinishReason.LENGTH)


def test_engine_serves_on_after_persistent_device_failure(engine, device):
    device.fail_steps = 10
    assert collect(submit(engine, ask("bad", range(10), 6)))[0][1] is FinishReason.ERROR
    device.fail_steps = 0
    got = collect(submit(engine, ask("good", range(10), 6)))
    assert got[0] == (lone_tokens(range(10), 6, 7, 0, VOCAB), FinishReason.LENGTH)


def test_raising_sink_affects_no_other_request(engine, caplog):
    def broken(_news):
        raise ValueError("the client's connection is gone")

    engine.submit(ask("broken", range(10), 20), broken)
    got = collect(submit(engine, ask("whole", range(10), 6)))
    assert got[0][0] == lone_tokens(range(10), 6, 7, 0, VOCAB)
    assert "sink of request broken failed" in caplog.text


def test_a_prompt_beyond_the_context_is_rejected_for_good(engine):
    answer = collect(submit(engine, ask("long", [1] * 65, 1)))
    assert isinstance(answer, Rejected) and answer.retry_after_s is None and "65" in answer.reason
    assert answer.refusal is Refusal.IMPOSSIBLE


def test_closing_ends_what_runs_and_refuses_what_comes(engine, device):
    device.gate.clear()
    news = submit(engine, ask("running", range(20), 30))
    closer = threading.Thread(target=engine.close, args=(WAIT_S,))
    closer.start()
    while not engine.closing:
        pass
    late = collect(submit(engine, ask("late", range(4), 1)))
    device.gate.set()
    closer.join(WAIT_S)
    assert collect(news)[0][1] is FinishReason.CANCELLED
    assert isinstance(late, Rejected) and late.retry_after_s and late.refusal is Refusal.CLOSING
    with pytest.raises(EngineStopped):
        engine.stats()


def test_machine_failure_ends_every_request(device, caplog):
    """A bug in the machine must not look like a hang to a client."""

    class Broken:
        next_deadline_ns = None

        def handle(self, event, now):
            raise ZeroDivisionError

    engine = Engine(Broken(), device)
    news = submit(engine, ask("victim", range(20), 30, n=2))
    assert {reason for _, reason in collect(news, n=2).values()} == {FinishReason.ERROR}
    late = collect(submit(engine, ask("late", range(4), 1)))
    assert isinstance(late, Rejected) and late.refusal is Refusal.CLOSING
    with pytest.raises(EngineStopped):  # at once: nobody waits for an answer that cannot come
        engine.stats()
    assert "machine failed" in caplog.text
    engine.close(WAIT_S)
    assert device.closed


def test_a_grammar_that_is_being_built_delays_no_other_request(engine, device):
    """The builder does not come back: requests beside the one that waits for it begin and end."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    bound = submit(engine, ask("bound", prompt, 4, grammar="slow"))
    for k in range(3):
        assert collect(submit(engine, ask(f"free{k}", [*prompt, k], 6)))[0][1] is FinishReason.LENGTH
    assert bound.empty() and list(device.grammars) == ["slow"]
    device.grammars["slow"]("")
    assert collect(bound) == {0: (lone_tokens(prompt, 4, 7, 0, VOCAB), FinishReason.LENGTH)}
    engine.stats()
    assert not device.grammars


def test_a_grammar_that_cannot_be_built_ends_its_own_requests(engine, device):
    bound = [submit(engine, ask(f"bound{k}", [1, 2, k], 4, grammar="wrong")) for k in range(2)]
    free = submit(engine, ask("free", [1, 2, 3], 4))
    engine.stats()
    device.grammars["wrong"]("it has no end")
    for news in bound:
        ending = news.get(timeout=WAIT_S)
        assert ending.finish_reason is FinishReason.ERROR and "it has no end" in ending.error
    assert collect(free)[0][1] is FinishReason.LENGTH
