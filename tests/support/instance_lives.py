"""What may happen in any life of an instance machine: rules that random lives share."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from instance_world import VOCAB
from memserve.base.types import ClockTicked
from memserve.protocol.events import RequestCancelled, SequenceStopped

FAMILIES = [[(family * 5 + i * i) % VOCAB for i in range(40)] for family in range(3)]
"""Beginnings of prompts."""


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
