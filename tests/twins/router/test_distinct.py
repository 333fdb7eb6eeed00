"""The sketch of different blocks beside a set, and beside the exact ceiling of a recorded trace."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from memserve.base.errors import InvariantError
from memserve.router.placement.reuse_ceiling import IDENTITY_BYTES, REGISTERS, TENANTS_MAX, DistinctBlocks, ReuseCeiling


def identity(name: object) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=IDENTITY_BYTES).digest()


def identities(names: Iterable[object]) -> bytes:
    return b"".join(map(identity, names))


class Twin:
    """The sketch as it is described, an identity at a time."""

    def __init__(self) -> None:
        self.registers, self.total, self.chance = [0] * REGISTERS, 0.0, 1.0

    def add(self, batch: bytes, counted: int) -> float:
        new = 0.0
        for place in range(len(batch) // IDENTITY_BYTES):
            low, high = np.frombuffer(batch, "<u8", 2, place * IDENTITY_BYTES).tolist()
            register, rank = high % REGISTERS, 33 - (low >> 32).bit_length()
            known = self.registers[register]
            if rank > known:
                new += 1.0 / self.chance if place < counted else 0.0
                self.total += 1.0 / self.chance
                self.chance -= (2.0**-known - 2.0**-rank) / REGISTERS
                self.registers[register] = rank
        return new


@pytest.mark.parametrize("seed", range(3))
def test_the_sketch_is_as_described(seed: int) -> None:
    rng, sketch, twin = np.random.default_rng(seed), DistinctBlocks(), Twin()
    pool = rng.bytes(4_000 * IDENTITY_BYTES)
    for _ in range(60):
        first, count = int(rng.integers(0, 3_900)), int(rng.integers(1, 300))
        batch = pool[first * IDENTITY_BYTES : (first + count) * IDENTITY_BYTES]
        counted = int(rng.integers(0, 400))
        assert sketch.add_identities(batch, counted) == pytest.approx(twin.add(batch, counted), rel=1e-9, abs=1e-9)
        assert sketch.total == twin.total and sketch._chance == twin.chance
    assert sketch._registers.tolist() == twin.registers
    sketch.check_invariants()


@pytest.mark.parametrize("seed", range(3))
def test_sketch_counts_like_a_set(seed: int) -> None:
    rng, sketch, twin = np.random.default_rng(seed), DistinctBlocks(), set()
    for _ in range(300):
        batch = [f"{seed}-{number}" for number in rng.integers(0, 60_000, rng.integers(0, 500))]
        new = sketch.add_identities(identities(batch))
        fresh = set(batch) - twin
        twin |= fresh
        assert abs(new - len(fresh)) <= 10 + 0.35 * len(fresh), "each batch roughly"
        assert abs(sketch.total - len(twin)) <= 10 + 0.02 * len(twin), "the sum closely"
    sketch.check_invariants()


def test_known_identities_are_never_new() -> None:
    sketch, batch = DistinctBlocks(), identities(range(5_000))
    assert (
        sketch.add_identities(batch) > 4_900
        and sketch.add_identities(batch) == 0.0
        and sketch.add_identities(b"") == 0.0
    )


def test_sketch_is_accurate_with_all_registers_in_use() -> None:
    sketch, rng, count = DistinctBlocks(), np.random.default_rng(1), 20 * REGISTERS
    sketch.add_identities(rng.bytes(count * IDENTITY_BYTES))
    assert abs(sketch.total - count) < 0.02 * count
    assert sketch.nbytes <= 1 << 20
    sketch.check_invariants()


def test_extreme_identities_are_ranked_without_rounding() -> None:
    sketch = DistinctBlocks()
    for first in (b"\x00" * 8, b"\xff" * 8, b"\x00" * 7 + b"\x01", b"\xff" * 4 + b"\x00" * 4):
        sketch.add_identities(first + b"\x07" + b"\x00" * 7)
        sketch.check_invariants()
    assert sketch._registers[7] == 33 and np.count_nonzero(sketch._registers) == 1


@pytest.mark.parametrize("count", [0, 1, 100, 20 * REGISTERS])
@pytest.mark.parametrize("place", [0, 13, REGISTERS - 1])
def test_a_broken_sketch_is_noticed(count: int, place: int) -> None:
    """Whichever register it is, and however many are in use."""
    sketch = DistinctBlocks()
    sketch.add_identities(np.random.default_rng(2).bytes(count * IDENTITY_BYTES))
    sketch.check_invariants()
    sketch._registers[place] += 1
    with pytest.raises(InvariantError, match="changes a register"):
        sketch.check_invariants()


def test_a_sketch_that_counts_too_few_is_noticed() -> None:
    sketch = DistinctBlocks()
    sketch.add_identities(identities(range(100)))
    sketch.total = np.count_nonzero(sketch._registers) - 1.0
    with pytest.raises(InvariantError, match="registers are in use"):
        sketch.check_invariants()


def test_answers_count_as_known_tokens_not_as_prompts() -> None:
    ceiling = ReuseCeiling()
    ceiling.count_prompt("ada", identities(range(100)), 1001, 10)
    ceiling.count_answer("ada", identities(range(100, 150)))
    ceiling.count_prompt("ada", identities(range(160)), 1600, 10)
    count = ceiling.counts_by_tenant()["ada"]
    exact = 1001 + 10 * 9 + 10
    assert count.total == 2601 and abs(count.new - exact) < 30 and abs(count.attainable - 1500 / 2601) < 0.02
    ceiling.count_prompt("ada", identities(range(160)), 1601, 10)
    assert ceiling.counts_by_tenant()["ada"].new == count.new + 1, (
        "the last block was learnt, though it could not be reused"
    )
    ceiling.check_invariants()


def test_tenants_have_separate_sketches_within_a_bound() -> None:
    ceiling = ReuseCeiling()
    for number in range(TENANTS_MAX + 20):
        ceiling.count_prompt(f"t{number}", identities(f"{number}-{block}" for block in range(10)), 1001, 100)
        ceiling.count_prompt(f"t{number}", identities(f"{number}-{block}" for block in range(10)), 1001, 100)
    assert len(ceiling.counts_by_tenant()) == TENANTS_MAX
    assert all(abs(count.attainable - 0.5) < 0.01 for count in ceiling.counts_by_tenant().values())
    whole = ceiling.total_counts()
    assert whole.total == 2002 * (TENANTS_MAX + 20) and abs(whole.attainable - 0.5) < 0.01
    ceiling.check_invariants()


def test_nothing_seen_has_no_ceiling() -> None:
    assert ReuseCeiling().total_counts().attainable == 0.0 and ReuseCeiling().counts_by_tenant() == {}


def test_the_ceiling_of_a_recorded_half_hour(data_sets: Path) -> None:
    """``pytest --data-sets DIR``: within 2 % of the exact one."""
    trace = data_sets / "traces" / "mooncake_conversation_0-30min.jsonl.gz"
    if not trace.is_file():
        pytest.skip(f"{trace.name} is not among the data sets")
    ceiling, seen, new, known = ReuseCeiling(), 0, 0, set()
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            hashes = json.loads(line)["hash_ids"]
            tokens = 512 * len(hashes) + 1  # every block whole
            ceiling.count_prompt("", identities(hashes), tokens, 512)
            seen, new = seen + tokens, new + 512 * len(set(hashes) - known) + 1
            known |= set(hashes)
    exact, estimate = 1 - new / seen, ceiling.total_counts().attainable
    assert ceiling.total_counts().total == seen and abs(estimate - exact) <= 0.02 * exact
