"""Pins and loans against a twin of sets: any order of operations, all that the ledger says of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memserve.router.admission.ledger import BlockLedger, Need, Reservations

TOTAL = 10
NODES = (0, 1)
CHAINS = st.tuples(st.integers(0, 1), st.integers(0, 6)).map(
    lambda chain: tuple(bytes([chain[0], length]) * 8 for length in range(chain[1]))
)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["pin", "may_pin"]), st.sampled_from("abc"), st.sampled_from(NODES), CHAINS),
    st.tuples(st.just("unpin"), st.sampled_from("abc")),
    st.tuples(st.just("lend"), st.sampled_from("xy"), st.sampled_from(NODES), CHAINS),
    st.tuples(st.just("returned"), st.sampled_from("xy")),
    st.tuples(st.sampled_from(["leave", "give_way"]), st.sampled_from(NODES)),
)


class Twin:
    """Which instances have which blocks where."""

    def __init__(self) -> None:
        self.pins: dict[str, tuple[int, tuple[bytes, ...]]] = {}
        self.loans: dict[tuple[str, int], tuple[bytes, ...]] = {}

    def free(self, node: int, *, lifted: bool = False) -> int:
        blocks = {name for at, names in self.pins.values() if at == node and not lifted for name in names}
        return TOTAL - len(blocks | {name for (_, at), names in self.loans.items() if at == node for name in names})

    def pin(self, name: str, node: int, names: tuple[bytes, ...]) -> None:
        self.pins.pop(name, None)
        if names:
            self.pins[name] = node, names

    def may_pin(self, name: str, node: int, names: tuple[bytes, ...]) -> bool:
        before, free_before = self.pins.get(name), self.free(node)
        self.pin(name, node, names)
        fits = self.free(node) >= min(0, free_before)
        if not fits:
            self.pin(name, *(before or (node, ())))
        return fits

    def give_way(self, node: int) -> list[str]:
        gone = []
        for name in [name for name, (at, _) in self.pins.items() if at == node]:
            if self.free(node) >= 0:
                break
            gone.append(name)
            del self.pins[name]
        return gone


def play(reservations: Reservations, twin: Twin, step: tuple) -> None:
    what, *rest = step
    if what == "pin":
        reservations.pin(rest[0], rest[1], Need(0, rest[2]))
        twin.pin(*rest)
    elif what == "may_pin":
        assert reservations.may_pin(rest[0], rest[1], Need(0, rest[2])) == twin.may_pin(*rest)
    elif what == "unpin":
        reservations.unpin(*rest)
        twin.pins.pop(rest[0], None)
    elif what == "lend" and (rest[0], rest[1]) not in twin.loans and rest[2]:
        reservations.export_blocks(rest[0], rest[1], Need(0, rest[2]))
        twin.loans[rest[0], rest[1]] = rest[2]
    elif what == "returned":
        theirs = [key for key in twin.loans if key[0] == rest[0]]
        assert reservations.end_exports(rest[0]) == bool(theirs)
        for key in theirs:
            del twin.loans[key]
    elif what == "give_way":
        assert reservations.evict_pins(*rest) == twin.give_way(*rest)
    elif what == "leave":
        reservations.remove_node(*rest)
        twin.pins = {name: pin for name, pin in twin.pins.items() if pin[0] != rest[0]}
        twin.loans = {key: names for key, names in twin.loans.items() if key[1] != rest[0]}


@given(st.lists(STEPS, max_size=30), CHAINS)
def test_claims_are_sets_of_blocks(steps, asked):
    ledger, twin = BlockLedger(), Twin()
    for node in NODES:
        ledger.add_node(node, TOTAL)
    reservations = Reservations(ledger)
    for step in steps:
        play(reservations, twin, step)
        reservations.check_invariants({"x", "y"})
        ledger.check_invariants()
        assert [ledger.blocks_free(node) for node in NODES] == [twin.free(node) for node in NODES]
        with reservations.without_pins():
            assert [ledger.blocks_free(node) for node in NODES] == [twin.free(node, lifted=True) for node in NODES]
        pinned = {name for _, names in twin.pins.values() for name in names}
        assert reservations.pinned_prefix(b"".join(asked)) == b"".join(name for name in asked if name in pinned)
        assert reservations.has_pins == bool(twin.pins)
        for node in NODES:
            assert reservations.holders_of(node) == set(ledger.holders_of(node))
