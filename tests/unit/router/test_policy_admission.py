"""What a request needs, and what it is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_world import a_request
from memserve.base.config import AdmissionConfig
from memserve.base.errors import UserError
from memserve.base.types import Admission, Role
from memserve.base.units import NS_PER_S
from memserve.router.admission.ledger import block_names
from memserve.router.admission.needs import (
    RETRY_MAX_S,
    RETRY_MIN_S,
    Crowd,
    MemoryNeed,
    ServiceTimes,
    cost_tokens,
    prompt_blocks,
    whole_blocks,
)

NOBODY = np.zeros(0, np.int64)


@given(
    st.integers(1, 60), st.integers(0, 40), st.integers(1, 4), st.integers(1, 8), st.integers(0, 20), st.integers(0, 9)
)
def test_the_need_is_what_an_allocator_would_give(prompt, max_tokens, n, unit, counted, generated):
    """The twin writes every token of every sequence into a block; whole blocks of the prompt are shared by all."""
    generated = min(generated, max_tokens)
    request = a_request("r", list(range(1, prompt + 1)), max_tokens=max_tokens, n=n)
    length = prompt + generated + min(max_tokens - generated, counted)
    blocks = set()
    for sequence in range(n):
        for position in range(length):
            block = position // unit
            whole = (block + 1) * unit <= prompt
            blocks.add(("shared", block) if whole and n > 1 else (sequence, block))
    assert whole_blocks(request, counted, unit, generated) == len(blocks)
    alone = {position // unit for position in range(prompt + generated)}
    assert prompt_blocks(request, unit, generated) == len(alone)


@given(st.integers(1, 40), st.integers(1, 8))
def test_names_stand_for_the_prompts_whole_blocks(prompt, unit):
    """At an instance that prefills, and at one that decodes as well; which of them decodes depends on the teams."""
    request = a_request("r", list(range(1, prompt + 1)))
    names = block_names(b"".join(k.to_bytes(16, "big") for k in range(prompt // unit)))
    whole, alone = whole_blocks(request, 4, unit), prompt_blocks(request, unit)
    both = {Role.PREFILL: whole, Role.COLOCATED: whole}
    for teams in ([], [[(Role.PREFILL, NOBODY)]], [[(Role.PREFILL, NOBODY)], [(Role.DECODE, NOBODY)]]):
        need = MemoryNeed(alone, both, names, teams, (0, 0, True))
        assert need.before_handover(Role.COLOCATED).total == whole
        assert need.before_handover(Role.PREFILL).total == (alone if len(teams) == 2 else whole)
        assert need.need_at(Role.PREFILL, decodes=False).names == names and len(names) == prompt // unit


def test_cost_counts_read_and_written_blocks():
    assert cost_tokens(a_request("r", [1] * 10, max_tokens=5), 256) == 15
    assert cost_tokens(a_request("r", [1] * 10, max_tokens=5000, n=2), 256) == 10 + 2 * 256


def test_reasons_say_what_is_in_the_way():
    assert Crowd(3, 3, 1, 5).describe_wait() == "3 requests are active, the most allowed"
    assert Crowd(1, None, 1, 5).describe_wait("no memory") == "no memory"
    assert Crowd(3, 3, 6, 5).describe_wait() == "3 requests are active, the most allowed; 6 wait, at most 5 may"


@given(st.lists(st.integers(1, 10**12), min_size=1), st.integers(0, 1000), st.integers(1, 64))
def test_retry_after_is_within_its_limits(spans, ahead, at_once):
    times = ServiceTimes()
    for span in spans:
        times.add_sample(span)
    assert min(spans) <= times.mean_ns <= max(spans)
    assert RETRY_MIN_S <= times.retry_after_s(ahead, at_once) <= RETRY_MAX_S


def test_retry_after_grows_with_the_queue():
    times = ServiceTimes()
    times.add_sample(4 * NS_PER_S)
    assert [times.retry_after_s(ahead, 3) for ahead in (0, 2, 3, 8, 300)] == [4.0, 4.0, 8.0, 12.0, 60.0]


def test_the_first_samples_count_as_their_mean():
    times = ServiceTimes()
    for seconds in (1, 3):
        times.add_sample(seconds * NS_PER_S)
    assert times.mean_ns == 2 * NS_PER_S


@pytest.mark.parametrize(
    "options",
    [
        {"mode": Admission.BOUNDED},
        {"mode": Admission.MEMORY, "active_max": 0},
        {"wait_ns": 0},
        {"mode": Admission.CACHE, "unit_tokens": 16},
        {"waiting_max": -1},
        {"evictions_max": -1},
    ],
)
def test_invalid_settings_are_refused(options):
    with pytest.raises(UserError):
        AdmissionConfig(**options)
