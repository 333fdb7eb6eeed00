"""The gate in front of production instances, under every fault: all tokens exact, nothing leaked, every request ends.

No request may be turned away for waiting here, so one that the gate forgot would hang for ever.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from memserve.base.config import AdmissionConfig
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import Admission
from memserve.base.units import NS_PER_S
from memserve.router.machine import Cluster
from memserve.router.report import AdmissionStats
from memserve_lab.sim.fuzz.campaign import setting_of
from memserve_lab.sim.fuzz.scenario import Forced, draw
from memserve_lab.sim.fuzz.world import World

SEEDS = 20


class GatedWorld(World):
    """The world of ``memserve sim fuzz`` with a gate drawn from the seed."""

    def new_cluster(self) -> Cluster:
        random = Random(f"gate {self.scenario.seed}")
        mode = random.choice([Admission.BOUNDED, Admission.MEMORY, Admission.CACHE])
        active_max = random.choice([1, 2, 4])
        gate = AdmissionConfig(
            mode,
            active_max if mode is Admission.BOUNDED else random.choice([None, active_max]),
            waiting_max=1000,
            wait_ns=3600 * NS_PER_S,
            output_tokens_max=random.choice([0, 8, 256]),
            evictions_max=random.choice([None, None, 1000]),
        )
        plain = super().new_cluster()
        config = replace(plain.config, admission=gate, policy=random.choice(list(ROUTING_POLICIES.built_in)))
        return Cluster(config, remembers=self.scenario.remembers)


def lived(seed: int) -> AdmissionStats:
    """One life, to its end; what its last router's gate has counted."""
    world = GatedWorld(draw(seed, setting_of(seed), Forced(routers=1)))  # several have no gate
    try:
        world.run_scenario()
    except Exception as error:
        error.add_note("\n".join([*world.story[-60:], str(world.scenario)]))
        raise
    return world.router.machine.stats().admission


@pytest.fixture(scope="module")
def lives() -> Counter:
    """What happened in all lives together."""
    sums: Counter = Counter()
    for seed in range(SEEDS):
        gate = lived(seed)
        assert gate.admitted == gate.released and not gate.active and not gate.waiting, f"seed {seed}: {gate}"
        sums.update(admitted=gate.admitted, queued=gate.queued, evictions=gate.evictions)
    return sums


@pytest.mark.parametrize("what, at_least", [("admitted", 150), ("queued", 40), ("evictions", 5)])
def test_all_requests_pass_admission_under_faults(lives: Counter, what: str, at_least: int) -> None:
    """Lives in which nothing waits, or nothing has to go, would prove nothing."""
    assert lives[what] >= at_least, lives
