"""Scenarios of recurrent states on a GPU that is made up: see ``tests/unit/model/test_gpu_device.py``, which makes the
driver of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def states_and_their_snapshots(make_driver: Callable[..., Any], family: str = "qwen3_5") -> bool:
    """Prompts in pieces beside decodes, each with its state; a snapshot inside of a row, from which another slot goes
    on, with plans in flight; the host's books say where each state is."""
    from memserve.base.errors import InvariantError
    from memserve.base.states import StatePages
    from memserve.base.units import ceil_div
    from memserve.instance.events import LoadState, StepPlan, TakeSnapshot
    from tiny_models import greedy_tokens, loaded, prompt, sequence, tiny_module

    module, first = tiny_module(family), prompt(75, 1)
    second = np.concatenate([first[:64], prompt(9, 2)])
    expected = greedy_tokens(module, first, 5), greedy_tokens(module, second, 3)
    model = loaded(tiny_module(family))
    count = ceil_div(model.states.nbytes, model.geometry.block_bytes)
    driver = make_driver(family, states=StatePages(model.states.nbytes, count))
    driver.device.capture_graphs()
    assert not driver.device.graph_sizes
    fresh, pages = [LoadState(3, 0)], [*range(30, 30 + count)]
    driver.step([(3, 0, 50, ())], open=[sequence(3, first, [9, 2, 33])], states=fresh)
    got_first = driver.step([(3, 50, 25, (3,))], snapshots=[TakeSnapshot(3, 64, pages)]).tokens
    begun = driver.device.begin_step(StepPlan(9, slots=[3], starts=[75], counts=[1], sample_slots=[(3,)]))
    opened = {"open": [sequence(6, second, [9, 2, 7])], "states": [LoadState(6, 64, pages)]}
    mixed = driver.step([(6, 64, 9, (6,)), (3, 76, 1, (3,))], **opened).tokens
    got_first, got_second = [*got_first, *begun().tokens, mixed[1]], mixed[:1]
    for offset in range(2):
        tokens = driver.step([(3, 77 + offset, 1, (3,)), (6, 73 + offset, 1, (6,))]).tokens
        got_first, got_second = [*got_first, tokens[0]], [*got_second, tokens[1]]
    assert (got_first, got_second) == expected
    try:
        driver.step([(3, 80, 1, (3,))])
    except InvariantError:
        return True
    raise AssertionError("a row begins where its state is not")


def states_on_two_tiers(make_driver: Callable[..., Any]) -> bool:
    """A snapshot goes down while steps go on, and its place is taken by another; a slot goes on from where it lies.
    A sequence leaves with its state, and another slot takes that up. No access that no stream has waited for."""
    from memserve.base.states import StatePages
    from memserve.base.types import CopyBlocks, Tier
    from memserve.base.units import ceil_div
    from memserve.instance.events import LoadState, SaveState, StepPlan, TakeSnapshot
    from tiny_models import greedy_tokens, loaded, prompt, sequence, tiny_module

    module, first = tiny_module("qwen3_5"), prompt(75, 1)
    second = np.concatenate([first[:64], prompt(9, 2)])
    expected = greedy_tokens(module, first, 6), greedy_tokens(module, second, 2)
    model = loaded(tiny_module("qwen3_5"))
    count = ceil_div(model.states.nbytes, model.geometry.block_bytes)
    driver = make_driver("qwen3_5", states=StatePages(model.states.nbytes, count), dram=2 + 2 * count)
    pages, below = [*range(30, 30 + count)], [*range(2, 2 + count)]
    saved = [block + count for block in below]
    fresh = [LoadState(3, 0)]
    driver.step([(3, 0, 50, ())], open=[sequence(3, first, [9, 2, 33])], states=fresh)
    got = driver.step([(3, 50, 25, (3,))], snapshots=[TakeSnapshot(3, 64, pages)]).tokens
    down = CopyBlocks(Tier.HBM, Tier.DRAM, [9, 2, *pages], [0, 1, *below])
    begun = driver.device.begin_step(
        StepPlan(9, slots=[3], starts=[75], counts=[1], sample_slots=[(3,)], copies=[down])
    )
    up = CopyBlocks(Tier.DRAM, Tier.HBM, [0, 1], [40, 41])
    opened = {"open": [sequence(6, second, [40, 41, 7])], "states": [LoadState(6, 64, below, tier=Tier.DRAM)]}
    rows, taken = [(6, 64, 9, (6,)), (3, 76, 1, (3,))], [TakeSnapshot(3, 77, pages)]
    mixed = driver.step(rows, copies=[up], snapshots=taken, **opened).tokens
    assert not set(pages) & driver.device._arenas._leaving.keys(), "it was written before it had been read"
    got, got_second = [*got, *begun().tokens, mixed[1]], mixed[:1]
    got += driver.step([(3, 77, 1, (3,))]).tokens
    got_second += driver.step([(6, 73, 1, (6,))], close=[3], states=[SaveState(3, 78, saved)]).tokens
    known = np.concatenate([first, np.array(got, np.int32)])
    again = {"open": [sequence(1, known, [9, 2, 33])], "states": [LoadState(1, 78, saved, tier=Tier.DRAM)]}
    got += driver.step([(1, 78, 1, (1,))], **again).tokens
    got += driver.step([(1, 79, 1, (1,))]).tokens
    assert (got, got_second) == expected
    assert driver.gpu.accesses > 0
    return True
