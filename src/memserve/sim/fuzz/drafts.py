"""Drafts in a scenario, for those that have them: some that are right, some that are not."""

from __future__ import annotations

from random import Random

from memserve.instance.machine import Instance
from memserve.instance.sequence import Sequence
from memserve.policy.drafts import LEAST, Draft, Price, Worth
from memserve.sim.fuzz.clients import VOCAB
from memserve.sim.fuzz.truth import lone_tokens

DRAFTING_SHARE = 0.3
"""Of all scenarios, those with drafts."""


class Always(Worth):
    """What steps take here says nothing."""

    def pays(self, sequences: int) -> bool:
        return True

    def price(self, sequences: int) -> Price:
        return Price(1e9, 0.0)


def draft_tokens(seed: int) -> int:
    """How many a row may have in the scenario of ``seed``. 0: none."""
    random = Random(f"{seed}/drafts")
    return random.choice([1, 2, 3, 8]) if random.random() < DRAFTING_SHARE else 0


def foretell(instance: Instance, random: Random) -> None:
    """Let an instance with drafts find any: what will be drawn, that with a mistake, what production code finds."""
    speculation = instance.planner.speculation
    if speculation is None:
        return
    look_up, speculation.worth = speculation.look_up, Always()

    def propose(sequence: Sequence, count: int) -> Draft:
        if random.random() < 0.2:
            return look_up(sequence, count)
        sampling = sequence.group.request.sampling
        right = lone_tokens(sequence.known_tokens().tolist(), count, sampling.seed, sequence.index, VOCAB)
        if random.random() < 0.4:
            at = random.randrange(count)
            right[at] = (right[at] + 1) % VOCAB
        return Draft(right[: random.randint(1, count)], LEAST)

    speculation.propose = propose
