"""Staging memory beside a simple twin: an array that says for each page which piece has it."""

from __future__ import annotations

import random

import pytest

from memserve.store.client.memory import Staging

PAGES = 24
PAGE = 4096


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_apart_and_come_from_the_bottom(seed: int) -> None:
    draw, staging, pages, taken = random.Random(seed), Staging(PAGES * PAGE, 1), [0] * PAGES, dict[int, int]()
    for step in range(1, 400):
        if taken and draw.random() < 0.5:
            offset = draw.choice(list(taken))
            count = taken.pop(offset)
            staging.return_piece(offset)
            pages[offset // PAGE : offset // PAGE + count] = [0] * count
        else:
            nbytes = draw.randrange(0, 6 * PAGE)
            count = max(1, -(-nbytes // PAGE))
            free = [at for at in range(PAGES - count + 1) if not any(pages[at : at + count])]
            got = staging.take_piece(nbytes, 0.0)
            assert got == (free[0] * PAGE if free else None)
            if got is not None:
                taken[got] = count
                pages[free[0] : free[0] + count] = [step] * count
        staging.check_invariants()
        assert staging.bytes_free == pages.count(0) * PAGE
