"""A grammar that admits everything, and whose masks come when a test says so; and what a device makes of that."""

from __future__ import annotations

from typing import Any

import numpy as np

from memserve.base.types import SamplingParams
from memserve.instance.events import LateDraw
from tiny_models import VOCAB, Driver, greedy_tokens, prompt, sequence, tiny_module


class LateGrammar:
    """In the place of a device's grammars."""

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self.late: set[int] = set()
        self.tokens: list[int] = []

    def __contains__(self, slot: int) -> bool:
        return slot in self.slots

    def __bool__(self) -> bool:
        return bool(self.slots)

    def open_slot(self, slot: int, job_id: int, tokens: list[int]) -> None:
        self.slots.add(slot)

    def close_slot(self, slot: int) -> None:
        self.slots.discard(slot)

    def take_token(self, slot: int, token: int) -> None:
        self.tokens.append(token)

    def flush_tokens(self) -> None:
        """Nothing is sent."""

    def next_mask(self, slot: int) -> np.ndarray | None:
        return None if slot in self.late else np.ones(VOCAB, np.bool_)

    def end_processes(self) -> None:
        """Nothing runs."""


def check_late_draws(driver: Driver | Any, family: str = "llama", **first: Any) -> bool:
    """A slot whose masks are late beside one without a grammar: both draw what they would have drawn without that, in a
    plan with other rows and in one without any. ``first``: what else is in the first plan."""
    module = tiny_module(family)
    ruled, plain = prompt(40, 7), prompt(33, 8)
    expected = greedy_tokens(module, ruled, 6), greedy_tokens(module, plain, 5)
    grammar = driver.device._slots.grammars = driver.device.grammars = LateGrammar()
    opened = [sequence(2, ruled, [4, 5], SamplingParams(temperature=0, grammar="any")), sequence(5, plain, [6, 7])]
    assert driver.step([(2, 0, 40, (2,)), (5, 0, 33, (5,))], open=opened, **first).tokens == [
        expected[0][0],
        expected[1][0],
    ]
    grammar.late = {2}
    for behind in range(2):  # the second plan was made before it was known that the first one's draw is late
        late = driver.step([(2, 40 + behind, 1, (2,)), (5, 33 + behind, 1, (5,))])
        assert late.late == {2} and not late.failed and late.tokens[1] == expected[1][1 + behind]
    grammar.late = set()
    there = driver.step([(5, 35, 1, (5,))], late_draws=[LateDraw(2, 41)])
    assert there.tokens == [expected[1][3], expected[0][1]] and not there.late
    assert driver.step([(2, 41, 1, (2,)), (5, 36, 1, (5,))]).tokens == [expected[0][2], expected[1][4]]
    grammar.late = {2}
    assert driver.step([(2, 42, 1, (2,))]).late == {2}
    assert driver.step(late_draws=[LateDraw(2, 43)]).late == {2}  # the host was told too early
    grammar.late = set()
    assert driver.step(late_draws=[LateDraw(2, 43)]).tokens == [expected[0][3]]
    assert driver.decode(2, 43, 2) == expected[0][4:6]
    assert grammar.tokens == expected[0]
    return True
