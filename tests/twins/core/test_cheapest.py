"""``cheapest`` beside what it stands for: the policy ``cost`` among all instances, in Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve import _core
from memserve.base.types import Role
from memserve.kv.costs import CopyCurve, CostModel, DecodeCurve, PrefillCurve
from memserve.router.placement.candidates import Ask, Candidate, Holding
from memserve.router.placement.routing import DECODE_WINDOW, cost, lacking_ns, native_prices, split

HOSTS = ("", "a", "b", "c")
ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


def random_costs(rng: np.random.Generator, scale: float) -> CostModel:
    """Small whole numbers, so that many sums are equal; scaled by an odd number they need rounding."""
    prefill, decode, swap_in, same_host, network, disk = (rng.integers(0, 4, (6, 3)) * scale).tolist()
    return CostModel(
        PrefillCurve(*prefill), DecodeCurve(*decode), CopyCurve(*swap_in),
        same_host=CopyCurve(*same_host), network=CopyCurve(*network), disk=CopyCurve(*disk),
    )  # fmt: skip


def random_fleet(rng: np.random.Generator, most: int, scale: float) -> tuple[Ask, list[Candidate]]:
    """Candidates with up to ``most`` of each kind of work, so that no part of a sum outweighs the others, and what a
    request needs. Up to three kinds of machines."""
    profiles = [random_costs(rng, scale) for _ in range(int(rng.integers(1, 4)))]
    block_tokens, prompt_blocks = int(rng.integers(1, 4)), int(rng.integers(0, 4))
    prompt = prompt_blocks * block_tokens + int(rng.integers(1, 3))
    weights = rng.dirichlet((1, 1, 1))
    candidates = []
    for number in range(int(rng.integers(1, 10))):
        matched, room = (int(rng.integers(0, blocks + 1)) for blocks in (prompt_blocks, 8))
        context, sent = int(rng.integers(0, most + 1)), int(rng.integers(0, block_tokens))
        candidates.append(
            Candidate(
                number,
                f"i{number}",
                ROLES[rng.choice(3, p=weights)],
                HOSTS[min(int(rng.integers(0, 4)), number)],
                prefill_tokens=int(rng.integers(0, most + 1)),
                sequences=int(rng.integers(0, 4)),
                context_tokens=max(context, sent),
                room_tokens=room * block_tokens - sent,
                matched_tokens=matched * block_tokens,
                dram_tokens=int(rng.integers(0, matched + 1)) * block_tokens,
                costs=profiles[rng.integers(0, len(profiles))],
            )
        )
    holder = candidates[rng.integers(0, len(candidates))]
    on_disk = holder.dram_tokens if rng.random() < 0.5 else 0
    holding = Holding(holder.number, holder.matched_tokens, holder.host_id, on_disk, holder.costs.disk)
    holdings = (holding,) if rng.random() < 0.7 else ()
    favourites = tuple(rng.permutation(10)[: rng.integers(0, 4)].tolist())
    max_tokens, sequences, token_bytes = rng.integers(0, 20), rng.integers(1, 4), rng.integers(0, 4)
    ask = Ask(
        prompt, int(max_tokens), int(sequences), int(token_bytes), favourites, holdings, block_tokens,
        handoff_pieces=int(rng.integers(1, 4)),
        state_blocks=int(rng.choice([0, 0, 1, 30])),
    )  # fmt: skip
    return ask, candidates


def numbers_of(candidates: list[Candidate], role: Role) -> np.ndarray:
    return np.array([c.number for c in candidates if c.role is role], np.int64)


def columns(ask: Ask, candidates: list[Candidate]):
    """As the load table and the trees have them."""
    loads = np.zeros((3, 3, len(candidates)), np.int64)
    for c in candidates:
        loads[0, :, c.number] = c.prefill_tokens, c.sequences, c.context_tokens
        loads[1:, 2, c.number] = c.context_tokens - (waits := -c.room_tokens % ask.block_tokens), waits  # for memory
    room = np.array([-(-c.room_tokens // ask.block_tokens) for c in candidates])
    tiers = [(c.matched_tokens // ask.block_tokens, c.dram_tokens // ask.block_tokens) for c in candidates]
    return loads, room, np.ascontiguousarray(np.array(tiers).T), np.array([HOSTS.index(c.host_id) for c in candidates])


def ask_core(ask: Ask, candidates: list[Candidate]):
    """The question to the core."""
    first, decoders = split(candidates)
    profiles = list(dict.fromkeys(c.costs for c in candidates))
    held = ask.holdings[0] if ask.holdings else Holding(-1, 0)
    return _core.cheapest(
        [(numbers_of(first, role), role is not Role.PREFILL or not decoders) for role in ROLES],
        [numbers_of(decoders, Role.DECODE)] if decoders else [], *columns(ask, candidates), ask.favourites,
        native_prices(profiles), np.array([profiles.index(c.costs) for c in candidates], np.int64),
        (
            ask.prompt_tokens, ask.max_tokens, ask.sequences, ask.token_bytes, ask.block_tokens, ask.handoff_pieces,
            ask.state_blocks,
        ),
        (held.number, held.tokens, held.disk_tokens), DECODE_WINDOW,
    )  # fmt: skip


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 1 << 40), st.sampled_from([1.0, 0.37, 12_345.678]), st.sampled_from([3, 100_000]))
def test_the_pair_is_the_one_that_the_policy_chooses(seed, scale, most):
    rng = np.random.default_rng(seed)
    ask, candidates = random_fleet(rng, most, scale)
    expected = cost(ask, *split(candidates))
    *rows, least_lacking_ns = ask_core(ask, candidates)
    assert least_lacking_ns == min(lacking_ns(ask, candidate) for candidate in split(candidates)[0])
    for row, chosen in zip(rows, (expected.first, expected.decode_at), strict=True):
        assert (row is None) == (chosen is None)
        if chosen is not None:
            number, queue, sequences, context, room, sent, matched, dram = row
            assert (number, queue, sequences, context, room * ask.block_tokens - sent) == (
                chosen.number, chosen.prefill_tokens, chosen.sequences, chosen.context_tokens, chosen.room_tokens
            )  # fmt: skip
            assert matched * ask.block_tokens == chosen.matched_tokens
            assert dram * ask.block_tokens == chosen.dram_tokens


PRICES = native_prices([CostModel()])


def plainly(
    first, decoders=(), hosts=(0, 0, 0), ask=(8, 1, 1, 1, 4, 1, 0), holding=(-1, 0, 0), queues=(0, 0, 0), prices=PRICES,
    profiles=(0, 0, 0),
):  # fmt: skip
    """Three instances, idle but for queues."""
    loads, matches = np.zeros((3, 3, 3), np.int64), np.zeros((2, 3), np.int64)
    loads[0, 0] = queues
    as_array = [np.array(numbers, np.int64) for numbers in (first, decoders)]
    return _core.cheapest(
        [(as_array[0], not len(decoders))], [as_array[1]], loads, np.ones(3, np.int64), matches,
        np.array(hosts, np.int64), (), prices, np.array(profiles, np.int64), ask, holding, 16,
    )  # fmt: skip


def test_the_lowest_number_of_equals():
    assert plainly([1, 2])[0][0] == 1 and plainly([1, 2])[1] is None
    first, decoder, _ = plainly([1, 2], [0])
    assert (first[0], decoder[0]) == (1, 0)


def test_absurd_costs_do_not_overflow():
    absurd = native_prices([CostModel(PrefillCurve(1e300, 1e300, 1e300), DecodeCurve(1e9, 1e9, 1e9))])
    for decoders in ([], [0, 1]):
        assert plainly([1, 2], decoders, queues=(0, 1 << 62, 0), prices=absurd)[0][0] == 2


@pytest.mark.parametrize("bad", [
    {"first": []}, {"first": [3]}, {"first": [-1]}, {"first": [0], "decoders": [3]}, {"first": [0], "hosts": (0, 0)},
    {"first": [0], "hosts": (0, 0, 4)}, {"first": [0], "hosts": (0, -1, 0)}, {"first": [0], "holding": (3, 4, 0)},
    {"first": [0], "ask": (0, 1, 1, 1, 4, 1, 0)}, {"first": [0], "ask": (8, 1, 1, 1, 0, 1, 0)},
    {"first": [0], "profiles": (0, 0)}, {"first": [0], "profiles": (0, 0, 1)}, {"first": [0], "profiles": (0, 0, -1)},
])  # fmt: skip
def test_impossible_questions_are_refused(bad):
    with pytest.raises(ValueError):
        plainly(**bad)
