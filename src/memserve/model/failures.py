"""Rows that fail alone (level 3): what one request asks for must not cost others their step.

Anything that is done for one slot on its own behalf runs under :func:`stage` or :func:`each`: opening it, changing its
logits, drawing, reporting. Errors of the device itself, and broken promises of the plan, are not caught: then the step
has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from memserve.errors import InvariantError
from memserve.instance.events import NO_TOKEN_LEFT, RowFailed

log = logging.getLogger(__name__)

Failures = dict[int, RowFailed]
"""Slot -> why it draws no token."""

_OF_THE_STEP = (InvariantError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

NOT_NUMBERS = RowFailed("the model gave no finite number for any next token", kv_is_suspect=True)
"""Not a number or infinity among the logits, or every token impossible, before anything was done to them."""

NOTHING_LEFT = RowFailed(NO_TOKEN_LEFT)
"""The same after they were changed as the request wants it."""


@contextmanager
def stage(failures: Failures, slot: int, what: str) -> Iterator[None]:
    """An error inside is ``slot``'s own."""
    try:
        yield
    except _OF_THE_STEP:
        raise
    except Exception as error:
        log.warning("%s of one row failed: %s: %s", what, type(error).__name__, str(error)[:200])
        failures.setdefault(slot, RowFailed(f"{what} failed ({type(error).__name__})"))


def each(
    failures: Failures, what: str, slots: NDArray[np.int64], work: Callable[[NDArray[np.int64]], None],
    places: NDArray[np.int64],
) -> None:  # fmt: skip
    """``work(places)`` for all at once; when that fails, for each alone, so that only the rows at fault fail.

    ``slots[place]`` is the slot at fault. ``work`` must not mind to be done again.
    """
    try:
        work(places)
    except _OF_THE_STEP:
        raise
    except Exception:
        for at in range(len(places)):
            with stage(failures, int(slots[places[at]]), what):
                work(places[at : at + 1])
