"""Kills and losses of power in the middle of everything, on literal disks: what was published is found, or nothing is.

``--disk-kills N``: how many; each run takes fresh seeds, and names the one that failed.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass

import pytest

from disks_world import DisksWorld, life
from memserve.base.units import NS_PER_MS
from memserve.store.disks import events as ev
from memserve.store.disks.disks import DisksConfig

SYNCS = ("none", "segment", "always")


@dataclass
class Tally:
    kills: int = 0
    wanted: int = 0
    found: int = 0
    filled: int = 0
    encoded: int = 0
    """Values that were written in fewer bytes."""

    @property
    def has_met_all(self) -> bool:
        """Enough full disks, and enough values in fewer bytes."""
        return self.filled > self.kills // 20 and self.encoded > self.kills


def killed_lives(seed: int, kills: int, tally: Tally) -> None:
    """One life with several kills, and what came of each."""
    rng = random.Random(seed)
    pause_ns = rng.choice((1, 20 * NS_PER_MS))
    config = DisksConfig(
        sync=rng.choice(SYNCS), admission="all", writes_max=rng.choice((2, 32)), full_pause_ns=pause_ns,
        kv_codec=rng.choice(("none", "auto", "always")),
    )  # fmt: skip
    world = DisksWorld(rng, config, disks=rng.choice((1, 2, 3)), segments=rng.choice((4, 6, 20)))
    keys = [rng.randbytes(16) for _ in range(rng.choice((5, 40)))]
    for _ in range(kills):
        world.failing = rng.choice((0.0, 0.0, 0.02, 0.1, 0.8))
        fills = rng.random() < 0.3
        for _ in life(world, keys, rng.randrange(50, 600)):
            if fills and rng.random() < 0.02:
                world.is_full = not world.is_full
        lost = any(isinstance(outcome, ev.DiskLost) for outcome in world.outcomes)
        assert not lost or world.failing > 0, "a disk without room is lost"
        tally.filled += world.disks.counters()["disks_filled"]
        tally.encoded += world.disks.counters()["values_encoded"]
        power = rng.random() < 0.5
        promised = not power or config.sync != "none"
        wanted, found = world.restart(power=power)
        tally.kills += 1
        if promised:
            tally.wanted += wanted
            tally.found += found
        verified = world.verify()
        assert not promised or verified.damaged == verified.unread == 0, "what was found is damaged"
        again = world.verify()
        assert again.damaged == again.unread == 0, "what does not match stays"
    world.settle()


def test_synced_values_survive_a_kill(pytestconfig: pytest.Config) -> None:
    tally = Tally()
    kills = pytestconfig.getoption("--disk-kills")
    # some seeds draw no codec, and some no full disk, life after life: more lives are drawn then
    while tally.kills < kills or (tally.kills < 4 * kills and not tally.has_met_all):
        seed = secrets.randbits(32)
        try:
            killed_lives(seed, 6, tally)
        except Exception as error:
            error.add_note(f"killed_lives({seed}, 6, Tally())")
            raise
    assert tally.has_met_all, tally
    assert tally.wanted > tally.kills and tally.found >= 0.99 * tally.wanted, tally
