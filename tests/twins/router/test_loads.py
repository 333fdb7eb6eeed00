"""The router's books of work against a list of what was sent and what was said."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.types import Role
from memserve.protocol.peers import Load
from memserve.router.members.loads import Charge, LoadTable, Work

MEMBERS = 20  # more than there is room for at first
works = st.builds(Work, *[st.integers(0, 5000)] * 3)
numbers = st.integers(0, MEMBERS - 1)
steps = st.one_of(
    st.tuples(st.just("charge"), numbers, works),
    st.tuples(st.just("discharge"), numbers, st.integers(0, 10)),
    st.tuples(st.just("beat"), numbers, works),
    st.tuples(st.just("leave"), numbers, st.none()),
)


@dataclass
class Twin:
    """One member: what was sent and has not ended, before its last heartbeat and since."""

    before: list[Charge] = field(default_factory=list)
    since: list[Charge] = field(default_factory=list)
    reported: Work = field(default_factory=Work)

    def own(self) -> Work:
        return total([*self.before, *self.since])

    def known(self) -> Work:
        return larger(self.own(), added(self.reported, total(self.since)))

    def end(self, charge: Charge) -> None:
        if charge in self.since:
            self.since.remove(charge)
        else:
            self.before.remove(charge)
            self.reported = Work(*[max(0, a - b) for a, b in zip(self.reported, charge.work, strict=True)])


def added(one: Work, other: Work) -> Work:
    return Work(*[a + b for a, b in zip(one, other, strict=True)])


def larger(one: Work, other: Work) -> Work:
    return Work(*map(max, one, other))


def total(charges: list[Charge]) -> Work:
    work = Work()
    for charge in charges:
        work = added(work, charge.work)
    return work


@settings(max_examples=150)
@given(st.lists(steps, max_size=60))
def test_loads_are_what_was_sent_and_what_was_said(taken: list[tuple[str, int, object]]) -> None:
    table, twins = LoadTable(), defaultdict[int, Twin](Twin)
    present: set[int] = set()
    for what, number, value in taken:
        if number not in present:
            table.add_member(number, Role.COLOCATED, 1000, 10)
            present.add(number)
        twin = twins[number]
        match what, value:
            case "charge", Work():
                twin.since.append(table.charge_work(number, value))
            case "discharge", int():
                charges = [*twin.before, *twin.since]
                if charges:
                    charge = charges[value % len(charges)]
                    table.discharge_work(charge)
                    twin.end(charge)
            case "beat", Work():
                load = Load(
                    prefill_tokens_queued=value.prefill_tokens,
                    sequences_running=value.sequences,
                    context_tokens_running=value.context_tokens,
                    hbm_blocks_available=value.sequences,
                )
                table.apply_heartbeat(number, load)
                assert table.room_blocks[number] == value.sequences
                twin.before, twin.since, twin.reported = twin.before + twin.since, [], value
            case _:
                for charge in [*twin.before, *twin.since]:
                    table.discharge_work(charge)
                table.remove_member(number)
                present.remove(number)
                twins[number] = Twin()
        for at in range(len(table)):
            known = twins[at]
            assert table.own_of(at) == known.own()
            assert table.work_of(at) == known.known()
            assert tuple(table.tables[2, :, at]) == total(known.since), "the core reads it, too"
            room = 32 * table.room_blocks[at] - (known.known().context_tokens - known.reported.context_tokens)
            assert table.room_tokens(np.array([at]), 32).tolist() == [table.room_tokens_of(at, 32)] == [room]
