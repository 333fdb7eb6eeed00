"""Random lives of an instance machine: every token as the lone request's, nothing leaked, all deterministic."""

from __future__ import annotations

import os
from random import Random

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from instance_lives import ARRIVALS, FAMILIES, AnyLife
from instance_world import VOCAB, World, config, request
from memserve.instance.scheduler.grammar_waits import MASK_NS
from memserve.kv.costs import PreemptionCosts


class InstanceLife(AnyLife):
    """Arrivals, cancellations, stops, deadlines, steps and failures in any order, on tiny pools."""

    twin = True

    @initialize(
        hbm=st.integers(4, 24),
        dram=st.sampled_from([0, 0, 3, 12]),
        caching=st.booleans(),
        running=st.integers(1, 8),
        step_tokens=st.integers(1, 24),
        chunk=st.integers(1, 12),
        depth=st.integers(1, 3),
        waiting=st.sampled_from([3, 100]),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        block_bytes=st.sampled_from([1, 1 << 30]),
        draft_tokens=st.sampled_from([0, 1, 3, 8]),
        scheduling=st.sampled_from(["fcfs", "fcfs", "prefill-first"]),
        late=st.sampled_from([0.0, 0.3, 0.9]),
    )
    def begin(self, block_bytes, late, **sizes):
        self.world = World(config(context=48, **sizes), 4, self.twin, PreemptionCosts(block_bytes=block_bytes))
        chance = Random(len(sizes))
        self.world.device.mask_is_late = lambda opened: chance.random() < late
        self.count = 0

    @rule(
        **ARRIVALS,
        min_tokens=st.integers(0, 3),
        lifetime=st.sampled_from([None, None, None, 3, 12]),
        penalty=st.sampled_from([0.0, 1.0]),
        grammar=st.sampled_from(["", "", "one", "another"]),
    )
    def arrive(self, family, shared, own, shape, lifetime, penalty, max_tokens, **rest):
        self.count += 1
        n, beam_width = shape
        self.world.arrive(
            request(
                f"r{self.count}",
                FAMILIES[family][:shared] + own,
                max_tokens=max(max_tokens, 1 if beam_width else 0),
                n=n,
                beam_width=beam_width,
                length_penalty=penalty,
                seed=family,
                deadline_ns=None if lifetime is None else self.world.now + lifetime,
                **rest,
            )
        )

    @precondition(lambda self: self.world.builds)
    @rule(error=st.sampled_from(["", "", "", "it is no grammar"]))
    def build(self, error):
        self.world.build(error)

    @precondition(lambda self: self.world.masks)
    @rule()
    def too_slow(self):
        self.world.too_slow(self.world.now + MASK_NS)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_all_ended()


class InstanceLifeOnRealPool(InstanceLife):
    """The same lives on the pool that is shipped."""

    twin = False


class InexactLife(InstanceLifeOnRealPool):
    """Some requests take KV from behind other tokens: all others are served as if none had."""

    @initialize(
        hbm=st.integers(12, 32),
        dram=st.sampled_from([0, 3, 12]),
        running=st.integers(1, 4),
        step_tokens=st.integers(1, 24),
        chunk=st.integers(1, 12),
        depth=st.integers(1, 3),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        block_bytes=st.sampled_from([1, 1 << 30]),
        draft_tokens=st.sampled_from([0, 3]),
        late=st.sampled_from([0.0, 0.3]),
        nonprefix_recompute=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def begin(self, block_bytes, late, **sizes):
        super().begin(block_bytes, late, nonprefix_reuse=True, caching=True, waiting=100, **sizes)

    @rule(
        **(ARRIVALS | {"shape": st.sampled_from([(1, 0), (1, 0), (2, 0)]), "prompt_logprobs": st.just(False)}),
        before=st.integers(0, 5),
        parts=st.permutations(range(3)),
        nonprefix_reuse=st.booleans(),
    )
    def arrive(self, family, shared, own, shape, before, parts, max_tokens, **rest):
        self.count += 1
        n, beam_width = shape
        texts = [FAMILIES[part][:11] for part in parts[: 2 + shared // 20]]
        prompt = [self.count % VOCAB, *range(before), *(token for text in texts for token in text), *own, family]
        max_tokens = max(max_tokens, 1 if beam_width else 0)
        self.world.arrive(
            request(f"r{self.count}", prompt, max_tokens=max_tokens, n=n, beam_width=beam_width, seed=family, **rest)
        )


EXAMPLES = int(os.environ.get("MEMSERVE_TEST_EXAMPLES", "100"))
_SETTINGS = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestInstanceLife = InstanceLife.TestCase
TestInstanceLife.settings = _SETTINGS
TestInstanceLifeOnRealPool = InstanceLifeOnRealPool.TestCase
TestInstanceLifeOnRealPool.settings = _SETTINGS
TestInexactLife = InexactLife.TestCase
TestInexactLife.settings = _SETTINGS


def test_the_oracle_notices_a_wrong_block():
    """The referee must fail when the machine's tables are wrong, else all the above proves nothing."""
    world = World(config(), 4)
    world.arrive(request("a", np.arange(10) % VOCAB, max_tokens=8))
    world.step()
    plan = world.plans[0]
    table = world.device.slots[plan.slots[0]].table
    table[0], table[1] = table[1], table[0]
    try:
        world.drain()
    except AssertionError as wrong:
        assert "instead of" in str(wrong)
    else:
        raise AssertionError("swapped blocks went unnoticed")
