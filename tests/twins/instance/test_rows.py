"""The native loops over sequences (``_core.SequenceRow``), beside loops in Python."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve import _core
from memserve.instance.scheduler.sequence import Phase

NUMBERS = ("prompt_tokens", "computed", "inflight", "left", "scheduled_step", "writable_until")
OBJECTS = ("phase", "out", "draw", "stops")


class Row(_core.SequenceRow):
    """As ``Sequence``, a Python class on the native one; with a name."""

    __slots__ = ("__weakref__", "name")


class Twin:
    """The same fields, and the loops in plain words."""


def take_tokens(rows, tokens: list[int]) -> list[int]:
    return _core.take_tokens(rows, tokens, Phase.DECODING, Phase.FINISHED)


def fields(row) -> tuple[object, ...]:
    """Everything that can be seen of it."""
    return (row.name, *(getattr(row, field) for field in (*NUMBERS, *OBJECTS)))


def same(rows: list[Row], twins: list[Twin]) -> bool:
    return [fields(row) for row in rows] == [fields(twin) for twin in twins]


def names(rows) -> list[int]:
    return [row.name for row in rows]


def make(kind: type, name: int, state: tuple) -> Row | Twin:
    """A row in ``state``; its lists are its own."""
    prompt, out, ahead, inflight, left, room, phase, stops = state
    row = kind()
    row.name, row.prompt_tokens, row.out, row.inflight, row.left = name, prompt, list(out), inflight, left
    row.computed, row.scheduled_step = max(0, prompt + len(out) - ahead), 0
    row.writable_until, row.phase, row.stops = row.computed + room, phase, frozenset(stops)
    row.draw = (name,)
    return row


def plan(twins: list[Twin], step_id: int) -> tuple[list[int], list[int], list[tuple[int, ...]], list[Twin]]:
    starts = [twin.computed for twin in twins]
    for twin in twins:
        twin.computed += 1
        twin.inflight += 1
        twin.left -= 1
        twin.scheduled_step = step_id
    return starts, [twin.draw[0] for twin in twins], [twin.draw for twin in twins], [t for t in twins if t.left == 0]


def take(twins: list[Twin], tokens: list[int]) -> list[int]:
    special = []
    for place, (twin, token) in enumerate(zip(twins, tokens, strict=True)):
        if twin.phase is not Phase.FINISHED:
            twin.out.append(token)
            twin.inflight -= 1
        if twin.phase is not Phase.DECODING or len(twin.out) < 2 or token in twin.stops:
            special.append(place)
    return special


STATES = st.tuples(
    st.integers(1, 10**12),
    st.lists(st.integers(0, 2**31), max_size=5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.sampled_from([Phase.DECODING, Phase.DECODING, Phase.DECODING, Phase.IDLE, Phase.FINISHED]),
    st.lists(st.integers(0, 9), max_size=2),
)


@given(
    states=st.lists(STATES, max_size=12),
    operations=st.lists(
        st.tuples(st.sampled_from(["plan", "take", "room", "count"]), st.integers(0, 9) | st.integers(0, 2**40)),
        max_size=8,
    ),
)
def test_row_loops_equal_their_twins(states, operations) -> None:
    """Any fleet, any order of calls: what is returned, and every field of every sequence, is the same."""
    rows = [make(Row, 1000 + name, state) for name, state in enumerate(states)]
    twins = [make(Twin, 1000 + name, state) for name, state in enumerate(states)]
    assert same(rows, twins)
    for operation, number in operations:
        if operation == "plan":
            starts, slots, draws, ended = _core.plan_decodes(rows, number)
            expected = plan(twins, number)
            assert (starts, slots, draws, names(ended)) == (*expected[:3], names(expected[3]))
        elif operation == "take":
            tokens = [number + place for place in range(len(rows))]
            assert take_tokens(rows, tokens) == take(twins, tokens)
        elif operation == "room":
            needy = [twin.name for twin in twins if twin.computed >= twin.writable_until]
            assert names(_core.out_of_room(rows)) == needy
        else:
            known = [twin.prompt_tokens + len(twin.out) for twin in twins]
            all_of_them = sum(known) + sum(twin.inflight for twin in twins)
            assert _core.count_tokens(rows) == (all_of_them, sum(known) - sum(twin.computed for twin in twins))
        assert same(rows, twins)


def ready(name: int = 1000) -> Row:
    return make(Row, name, (5, [7], 1, 0, 3, 4, Phase.DECODING, []))


CALLS = [
    lambda rows: _core.plan_decodes(rows, 1),
    lambda rows: take_tokens(rows, [1] * len(rows)),
    lambda rows: _core.out_of_room(rows),
    lambda rows: _core.count_tokens(rows),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("damage", ["another type", "nothing set", "out", "draw", "stops", "no list"])
def test_invalid_row_is_refused_before_any_change(call, damage) -> None:
    """Also when the rows before it are fine."""
    good, bad = ready(), ready(2000)
    before = fields(good)
    if damage in ("out", "draw", "stops"):
        setattr(bad, damage, {1: 2})
    rows = [good, {"another type": Twin(), "nothing set": Row()}.get(damage, bad)]
    with pytest.raises(TypeError):
        call(tuple(rows) if damage == "no list" else rows)
    assert fields(good) == before


def test_a_draw_for_others_and_a_missing_token_change_nothing() -> None:
    """Rows that decode have one slot; a step says one token for each row."""
    good, forked = ready(), ready(2000)
    forked.draw = (1, 2)
    before = fields(good), fields(forked)
    with pytest.raises(ValueError, match="its own slot"):
        _core.plan_decodes([good, forked], 1)
    with pytest.raises(ValueError, match="one token"):
        take_tokens([good, forked], [1])
    assert (fields(good), fields(forked)) == before


def test_fields_are_plain_attributes() -> None:
    """Objects that are not set are missing; numbers are 64 bits wide and always there."""
    row = Row()
    assert [getattr(row, field) for field in NUMBERS] == [0] * len(NUMBERS)
    for field in OBJECTS:
        assert not hasattr(row, field)
    row.left = -(2**63)
    assert row.left == -(2**63)
    with pytest.raises(OverflowError):
        row.left = 2**63
    with pytest.raises(TypeError):
        row.left = "3"
    with pytest.raises(AttributeError):
        row.other = 1  # no dictionary: a misspelt field is found


def test_every_reference_is_given_back() -> None:
    """Of tokens, slots, draws and rows; a row that refers to itself is garbage like any other."""
    row, slot, token = ready(), 10**9, 10**9 + 1
    row.draw, row.stops = (slot,), frozenset()
    things = (row, slot, token, row.draw, row.out, row.stops)
    before = [sys.getrefcount(thing) for thing in things]
    for step in range(100):
        row.left = 1
        _core.plan_decodes([row], step)
        assert take_tokens([row], [token]) == []
        row.computed = row.writable_until
        assert _core.out_of_room([row]) == [row]
        _core.count_tokens([row])
    assert row.out == [7, *[token] * 100]
    row.out.clear()
    after = [sys.getrefcount(thing) for thing in things]
    assert after == before
    watch = weakref.ref(row)
    row.phase = [row]
    del row, things
    gc.collect()
    assert watch() is None
