"""Which rows of a prompt in stripes are computed here, what they wait for, and when a part of one is given up."""

from __future__ import annotations

import pytest

from instance_world import request
from memserve.base.errors import InvariantError
from memserve.instance.scheduler.sequence import Group, Sequence
from memserve.instance.scheduler.stripes import StripedPrompt, StripeProgress

LAYERS = 3


def sequence_of(tokens: int, computed: int = 0, cached: int = 0) -> Sequence:
    sequence = Sequence(Group(request("r", [1] * tokens), 0, 4, 0), 0)
    sequence.computed, sequence.published = computed, cached
    return sequence


def stripes(*bounds: tuple[int, int, bool]) -> StripedPrompt:
    return StripedPrompt([StripeProgress(*each) for each in bounds], LAYERS)


def next_row(striped: StripedPrompt, sequence: Sequence) -> tuple[int, int] | None:
    return striped.next_row(sequence.computed, sequence.published)


def test_own_first_stripe_waits_for_nothing() -> None:
    striped = stripes((0, 8, True), (8, 16, False), (16, 20, True))
    assert next_row(striped, sequence_of(20)) == (0, 8)
    assert next_row(striped, sequence_of(20, computed=4)) == (4, 8), "the rest of it"
    assert striped.layers_before(0) == striped.layers_before(4) == LAYERS


def test_row_waits_for_the_first_layer_of_all_before_it() -> None:
    striped, sequence = stripes((0, 8, False), (8, 16, False), (16, 20, True)), sequence_of(20)
    assert next_row(striped, sequence) is None
    striped.stripes[1].layers = LAYERS
    assert next_row(striped, sequence) is None, "the stripe before that is still missing"
    striped.stripes[0].layers = 1
    assert next_row(striped, sequence) == (16, 20)
    assert striped.layers_before(16) == 1, "of the others it reads no more than of that one"
    striped.stripes[0].layers = 2
    assert striped.layers_before(16) == 2
    striped.stripes[0].layers = LAYERS
    assert striped.layers_before(16) == LAYERS


def test_cached_stripes_of_others_are_not_awaited() -> None:
    striped = stripes((0, 8, False), (8, 16, False), (16, 20, True))
    assert next_row(striped, sequence_of(20, computed=8, cached=8)) is None
    assert next_row(striped, sequence_of(20, computed=16, cached=16)) == (16, 20)
    assert striped.layers_before(16) == LAYERS
    sequence = sequence_of(20, computed=16)
    assert next_row(striped, sequence) == (16, 20), "although the pin on what is cached was given up since"


def test_nothing_is_computed_behind_a_loss() -> None:
    striped = stripes((0, 8, True), (8, 16, False), (16, 20, True))
    striped.loss = "its instance is gone"
    assert next_row(striped, sequence_of(20)) is None


def test_stripes_of_a_prompt_end_with_an_own_one() -> None:
    with pytest.raises(InvariantError, match="ends with a stripe of others"):
        stripes((0, 8, True), (8, 16, False))
