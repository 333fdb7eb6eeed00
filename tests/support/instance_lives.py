"""What may happen in any life of an instance machine: rules that random lives share."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from instance_world import VOCAB, request
from memserve.base.types import ClockTicked
from memserve.protocol.events import PrefixPinned, PrefixUnpinned, RequestCancelled, SequenceStopped

FAMILIES = [[(family * 5 + i * i) % VOCAB for i in range(40)] for family in range(3)]
"""Beginnings of prompts."""
ARRIVALS = {
    "family": st.integers(0, 2),
    "shared": st.integers(0, 30),
    "own": st.lists(st.integers(0, VOCAB - 1), max_size=6),
    "max_tokens": st.integers(0, 14),
    "shape": st.sampled_from([(1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (1, 2), (2, 3)]),
    "priority": st.integers(0, 2),
    "stops": st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True),
    "use_cache": st.sampled_from([True, True, True, False]),
    "tenant": st.sampled_from(["", "", "other"]),
    "prompt_logprobs": st.sampled_from([False, False, False, True]),
}
"""What the requests of a life are drawn from. ``shape``: sequences, and the width of a beam search."""


class AnyLife(RuleBasedStateMachine):
    """Cancellations, stops, steps, failures and ticks of ``world``, an ``instance_world.World``."""

    def _some_request(self, which):
        names = list(self.world.requests)
        return names[-1 - which % min(len(names), 8)]

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 7))
    def cancel(self, which):
        name = self._some_request(which)
        self.world.asked_to_end.add(name)
        self.world.post(RequestCancelled(name))

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 7), index=st.integers(0, 2))
    def stop(self, which, index):
        name = self._some_request(which)
        self.world.asked_to_end.add((name, index))
        self.world.post(SequenceStopped(name, index))

    @precondition(lambda self: self.world.plans)
    @rule(steps=st.integers(1, 12))
    def steps(self, steps):
        for _ in range(steps):
            if self.world.plans:
                self.world.step()

    @precondition(lambda self: self.world.plans)
    @rule(seed=st.integers(0, 1))
    def fail(self, seed):
        self.world.fail(seed)

    @precondition(lambda self: self.world.plans)
    @rule(which=st.integers(0, 7), suspect=st.booleans())
    def fail_row(self, which, suspect):
        self.world.fail_row(which, suspect)

    @precondition(lambda self: self.world.masks)
    @rule()
    def mask(self):
        self.world.mask()

    @rule(ticks=st.integers(1, 5))
    def tick(self, ticks):
        self.world.now += ticks
        self.world.post(ClockTicked())


class SharingLife(AnyLife):
    """Requests that share beginnings, pins and grammars as well; ``begin`` makes the world."""

    count = 0

    def start_late_masks(self, late):
        """One mask of three is late, or none."""
        moments = iter(range(1 << 30))
        self.world.device.mask_is_late = lambda opened: late and next(moments) % 3 == 0

    @rule(**ARRIVALS, grammar=st.sampled_from(["", "", "one"]))
    def arrive(self, family, shared, own, shape, max_tokens, **rest):
        self.count += 1
        n, beam_width = shape
        max_tokens = max(max_tokens, 1 if beam_width else 0)
        prompt = FAMILIES[family][:shared] + own
        self.world.arrive(
            request(f"r{self.count}", prompt, max_tokens=max_tokens, n=n, beam_width=beam_width, seed=family, **rest)
        )

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 7), handle=st.sampled_from("ab"), ticks=st.integers(1, 20))
    def pin(self, which, handle, ticks):
        prompt = self.world.requests[self._some_request(which)].prompt
        self.world.post(PrefixPinned(handle, "", prompt, ticks))

    @rule(handle=st.sampled_from("ab"))
    def unpin(self, handle):
        self.world.post(PrefixUnpinned(handle, ""))

    @precondition(lambda self: self.world.builds)
    @rule()
    def build(self):
        self.world.build()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            for handle in "ab":
                self.world.post(PrefixUnpinned(handle, ""))
            self.world.check_all_ended()


def live_busily(world, seed):
    """Many requests that share and part, of which some are cancelled, up to the end of all."""
    draws = Random(seed)
    for number in range(60):
        shared, own = draws.randrange(30), [draws.randrange(VOCAB) for _ in range(draws.randrange(6))]
        n, prompt = draws.choice((1, 1, 2)), [*FAMILIES[draws.randrange(2)][:shared], *own]
        if prompt:
            world.arrive(request(f"r{number}", prompt, max_tokens=draws.randrange(1, 14), n=n))
        for _ in range(draws.randrange(8)):
            if world.plans:
                world.step()
    world.drain()
    world.check_all_ended()
    return world
