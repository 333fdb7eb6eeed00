"""Stories of several stores as one: prefixes spread over them, and blocks that move when stores come and go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from exchange_world import BLOCK, LEASE_NS, Node, array
from memserve.base.config import ExchangeConfig
from memserve.base.units import NS_PER_S
from memserve.kv.store_shares import NO_SPARE, StoreShares, split_keys
from memserve.kv.transfer.events import FetchEnded
from memserve.kv.transfer.exchange import OfferedBlocks
from memserve.kv.transfer.spread import PATIENCE_SHARE, SpreadPrefix
from memserve.protocol.member_events import DrainRequested
from memserve.protocol.messages import Fetch, Offer, Release
from memserve.protocol.peers import Peer
from memserve.protocol.store import BlocksHeld
from memserve.store.machine.events import MoveConfig, StoreConfig
from store_world import BLOCK_BYTES, StoreNode, StoreWorld, finished_world

BLOCKS = 12
PROMPT = list(range(100, 100 + BLOCKS * BLOCK + 1))
CONFIG = StoreConfig(
    ExchangeConfig(lease_ns=LEASE_NS),
    fetch_deadline_ns=LEASE_NS // 2,
    moves=MoveConfig(bytes_per_s=8 * BLOCK_BYTES, batch_bytes=2 * BLOCK_BYTES, scan_keys=5),
)


@pytest.fixture
def world() -> Iterator[StoreWorld]:
    with finished_world() as world:
        world.open_store(blocks=32, config=CONFIG)
        yield world
        for store in world.stores[1:]:
            store.check_empty()


def put(world: StoreWorld, node: Node, tokens: list[int] = PROMPT, copies: int = 1) -> None:
    """An instance computes a prompt and offers each block to the stores that are to keep it."""
    seq = node.compute("t", tokens)
    whole = len(tokens) // BLOCK
    identities = node.pool.identities("t", array(tokens))
    shares = StoreShares([store.peer.name for store in world.stores], copies)
    owners = shares.owners_of(identities)
    for number, name in enumerate(shares.names):
        own = [index for index in range(whole) if number in owners[index]]
        if own:
            named = b"".join(identities[16 * index : 16 * index + 16] for index in own)
            offered = OfferedBlocks("t", array([]), [seq.blocks[index] for index in own], identities=named)
            offer_id = node.exchange.offer_blocks(store_named(world, name).peer, offered, world.now)
            node.offers[offer_id] = True
            node.exchange.announce_computed(offer_id, 0, len(own))
    node.take([])
    node.end(seq)
    world.run()


def store_named(world: StoreWorld, name: str) -> StoreNode:
    (store,) = [store for store in world.stores if store.peer.name == name]
    return store


def held(world: StoreWorld) -> dict[str, set[int]]:
    """Which blocks of the prompt each store has."""
    blocks = {}
    for store in world.stores:
        identities = store.identities("t", PROMPT)
        blocks[store.peer.name] = {at for at, identity in enumerate(identities) if identity in store.machine.values}
    return blocks


def begin_fetch(
    world: StoreWorld, node: Node, places: dict[str, set[int]], patience: int = LEASE_NS, *, spares: bool = False
) -> str:
    """Ask for the prompt as far as some store has each block; with ``spares`` its second copies are named, too."""
    names, end = list(places), 0
    while end < BLOCKS and any(end in blocks for blocks in places.values()):
        end += 1
    first = node.pool.match("t", array(PROMPT)) // BLOCK
    stores = tuple(store_named(world, name).peer if name in held(world) else Peer(name, 1) for name in names)
    chosen = bytes(next(i for i, name in enumerate(names) if at in places[name]) for at in range(first, end))
    tokens = array(PROMPT[: end * BLOCK])
    identities = node.pool.identities("t", tokens)[16 * first :]
    second = [[i for i, name in enumerate(names) if at in places[name]][1:] for at in range(first, end)]
    spread = SpreadPrefix(stores, chosen, identities, bytes(i[0] if i else NO_SPARE for i in second) if spares else b"")
    fetch_id = node.exchange.fetch_spread(spread, "t", tokens, first, world.now, world.now + patience)
    node.expecting[fetch_id] = "fetch"
    node.take([])
    return fetch_id


def fetched(world: StoreWorld, node: Node, places: dict[str, set[int]] | None = None) -> int:
    """Blocks that a node has after it has asked."""
    begin_fetch(world, node, held(world) if places is None else places)
    world.run()
    node.exchange.check_invariants()
    return node.check_cache("t", PROMPT)


def last_end(node: Node) -> FetchEnded:
    return [outcome for outcome in node.outcomes if isinstance(outcome, FetchEnded)][-1]


def settle(world: StoreWorld, seconds: int = 30) -> None:
    """Time passes, in which blocks may move."""
    for _ in range(4 * seconds):
        world.wait(NS_PER_S // 4)
        world.run()
        for store in world.stores:
            store.machine.check_invariants()


def join(world: StoreWorld, *names: str) -> None:
    for name in names:
        world.open_further(name)
    world.meet()


def test_prefix_comes_from_all_stores_in_one_piece(world) -> None:
    join(world, "t", "u")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    assert set.union(*held(world).values()) == set(range(BLOCKS)) and all(held(world).values())
    assert fetched(world, d) == BLOCKS
    assert last_end(d).ok and last_end(d).pulled_blocks == BLOCKS


def test_own_prefix_is_not_fetched_again(world) -> None:
    join(world, "t")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    d.end(d.compute("t", PROMPT[: 3 * BLOCK]))
    d.finish_plan()
    pulled = d.exchange.counters.pulled_blocks
    assert fetched(world, d) == BLOCKS
    assert d.exchange.counters.pulled_blocks - pulled == BLOCKS - 3


def test_block_that_is_lacking_cuts_the_prefix(world) -> None:
    """What is before it is of use, and blocks behind it are not waited for."""
    join(world, "t", "u")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    places = held(world)
    owner = next(store for store in world.stores if 5 in places[store.peer.name])
    owner.machine.values.forget_value(owner.identities("t", PROMPT)[5], world.now)
    assert fetched(world, d, places) == 5
    assert last_end(d).ok and last_end(d).tokens == 5 * BLOCK


@pytest.mark.parametrize("first", [0, 1])
def test_store_that_dies_cuts_the_prefix(world, first) -> None:
    """While pages are under way: what others have given before its first block is kept."""
    join(world, "t")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    places = held(world)
    begin_fetch(world, d, places)
    world.step() if first else None
    world.store_dies("t")
    world.run()
    cut = min(places["t"])
    assert d.check_cache("t", PROMPT) == cut
    assert last_end(d).ok == (cut > 0)
    d.exchange.check_invariants()


def test_silent_store_cuts_the_prefix_at_the_deadline(world) -> None:
    join(world, "t")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    places = held(world)
    world.further["t"].hear = lambda sender, message: []
    begin_fetch(world, d, places)
    world.run()
    assert not last_end_or_none(d)
    world.wait(LEASE_NS)
    world.run()
    assert d.check_cache("t", PROMPT) == min(places["t"])
    del world.further["t"].hear


def last_end_or_none(node: Node) -> FetchEnded | None:
    ends = [outcome for outcome in node.outcomes if isinstance(outcome, FetchEnded)]
    return ends[-1] if ends else None


def test_fetch_that_is_given_up_leaves_nothing(world) -> None:
    join(world, "t")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    fetch_id = begin_fetch(world, d, held(world))
    world.step()
    d.exchange.give_up(fetch_id, "the request has ended")
    del d.expecting[fetch_id]
    d.take([])
    world.run()
    assert d.check_cache("t", PROMPT) == 0 and not last_end_or_none(d)
    d.exchange.check_invariants()


def test_failed_step_spoils_what_has_come(world) -> None:
    """All of it goes back, and the fetch ends."""
    join(world, "t")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    begin_fetch(world, d, held(world))
    while not any(outcome.blocks for outcome in d.exchange._spread._open.values()):
        assert world.step()
    d.take(d.exchange.everything_failed(world.now))
    world.run()
    assert not last_end(d).ok and d.check_cache("t", PROMPT) == 0
    d.exchange.check_invariants()


def test_damaged_page_cuts_the_prefix(world) -> None:
    join(world, "t")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    places = held(world)
    move, wrong = d.move, []

    def move_wrong(pull, corrupt: bool = False) -> None:
        wrong.append(pull.job.peer.name)
        move(pull, corrupt=len(wrong) == 1)

    d.move = move_wrong
    begin_fetch(world, d, places)
    world.run()
    assert d.check_cache("t", PROMPT) == min(places[wrong[0]])


@pytest.fixture
def copied(world):
    """Three stores with two copies of the prompt, and an instance that has nothing."""
    world.copies = 2
    join(world, "t", "u")
    put(world, world.instance("p"), copies=2)
    return world, world.instance("d"), held(world)


def test_second_copy_takes_the_place_of_a_dead_store(copied) -> None:
    world, d, places = copied
    begin_fetch(world, d, places, spares=True)
    world.step()
    world.store_dies("t")
    world.run()
    assert d.check_cache("t", PROMPT) == BLOCKS and last_end(d).pulled_blocks == BLOCKS


def test_silent_store_is_not_waited_for_where_there_are_copies(copied) -> None:
    """A third of the time; the next fetch asks the others first, until it answers again."""
    world, d, places = copied
    silent = next(name for name in places if min(places[name]) == 0)
    store = store_named(world, silent)
    heard = []
    store.hear = lambda sender, message: heard.append(message) or []
    begin_fetch(world, d, places, spares=True)
    world.run()
    assert last_end_or_none(d) is None
    world.wait(LEASE_NS // PATIENCE_SHARE + 1)
    world.run()
    assert d.check_cache("t", PROMPT) == BLOCKS
    heard.clear()
    e = world.instance("e")
    begin_fetch(world, e, places, spares=True)
    world.run()
    world.wait(LEASE_NS // PATIENCE_SHARE + 1)
    world.run()
    heard.clear()
    e.pool.delete("t", array(PROMPT[:BLOCK]))
    begin_fetch(world, e, places, spares=True)
    world.run()
    assert e.check_cache("t", PROMPT) == BLOCKS and not [said for said in heard if isinstance(said, Fetch)]
    del store.hear


def test_damaged_copy_is_replaced_by_the_other(copied) -> None:
    world, d, places = copied
    move, wrong = d.move, []

    def move_wrong(pull, corrupt: bool = False) -> None:
        wrong.append(pull.job.peer.name)
        move(pull, corrupt=len(wrong) == 1)

    d.move = move_wrong
    begin_fetch(world, d, places, spares=True)
    world.run()
    assert d.check_cache("t", PROMPT) == BLOCKS


def test_two_lost_copies_cut_the_prefix(copied) -> None:
    world, d, places = copied
    for store in world.stores:
        store.machine.values.forget_value(store.identities("t", PROMPT)[4], world.now)
    begin_fetch(world, d, places, spares=True)
    world.run()
    assert d.check_cache("t", PROMPT) == 4


# -- moving


def test_joining_store_is_given_its_share(world) -> None:
    """No other block moves, and none is lost; a store drops what it has given."""
    join(world, "t")
    p, d = world.instance("p"), world.instance("d")
    put(world, p)
    before = held(world)
    join(world, "u")
    settle(world)
    after = held(world)
    owners = StoreShares(("s", "t", "u")).owners_of(b"".join(world.store.identities("t", PROMPT)))[:, 0]
    assert [next(at for at, name in enumerate(("s", "t", "u")) if block in after[name]) for block in range(BLOCKS)] == (
        owners.tolist()
    )
    assert sum(len(blocks) for blocks in after.values()) == BLOCKS and after["u"]
    assert all(after[name] <= before[name] for name in before)
    moved = sum(store.machine.counters.kv_moved for store in world.stores)
    assert moved == sum(store.machine.counters.kv_given_up for store in world.stores) == len(after["u"])
    assert fetched(world, d) == BLOCKS


def test_moves_are_slow_and_small(world) -> None:
    """So many bytes a second, and two blocks at a time."""
    join(world, "t")
    p = world.instance("p")
    for number in range(2):
        put(world, p, [7 + number, *PROMPT[1:]])
    put(world, p)
    join(world, "u")
    counts = []
    for _ in range(8):
        world.run()
        counts.append(sum(store.machine.counters.kv_moved for store in world.stores))
        world.wait(NS_PER_S // 4)
    assert 0 < counts[0] <= 4 and counts[-1] > counts[0]  # two stores, which give two blocks each
    assert all(later - earlier <= 4 for earlier, later in itertools.pairwise(counts))
    settle(world, 5)


def test_second_copy_survives_a_death_and_is_made_again(world) -> None:
    """With two copies nothing is lost, and those that are left have two copies again."""
    world.copies = 2
    join(world, "t", "u")
    p, d = world.instance("p"), world.instance("d")
    put(world, p, copies=2)
    assert sum(len(blocks) for blocks in held(world).values()) == 2 * BLOCKS
    world.store_dies("u")
    assert fetched(world, d) == BLOCKS
    settle(world)
    assert all(blocks == set(range(BLOCKS)) for blocks in held(world).values())


def test_store_that_comes_back_is_caught_up(world) -> None:
    """Empty, it is given what it is to keep; third copies are dropped."""
    world.copies = 2
    join(world, "t", "u")
    p = world.instance("p")
    put(world, p, copies=2)
    before = held(world)
    world.store_dies("u")
    settle(world)
    join(world, "u")
    settle(world)
    assert held(world) == before


def test_block_that_goes_nowhere_stays(world) -> None:
    """What the other store does not take is not dropped, and is tried again, and not for ever."""
    p = world.instance("p")
    put(world, p)
    other = world.open_further("t")
    hear, offers = other.hear, []

    def hear_no_offer(sender, message) -> list:
        if isinstance(message, Offer):
            offers.append(message)
            return []
        return hear(sender, message)

    other.hear = hear_no_offer
    world.meet()
    settle(world, 60)
    del other.hear
    assert held(world)["s"] == set(range(BLOCKS))
    share = sum(StoreShares(("s", "t")).owners_of(b"".join(world.store.identities("t", PROMPT)))[:, 0])
    assert len({identity for offer in offers for identity in split_keys(offer.identities)}) == share
    assert share < sum(len(offer.blocks) for offer in offers) <= share * CONFIG.moves.passes_max
    assert world.store.machine.moves.next_deadline_ns is None


def test_copy_is_dropped_when_all_owners_have_theirs(world) -> None:
    """One of two that are to keep a block has it, and the other takes none: the third copy stays."""
    world.copies = 2
    join(world, "t", "u")
    put(world, world.instance("p"), copies=2)
    world.store_dies("u")
    settle(world)
    other = world.open_further("u")
    hear = other.hear
    other.hear = lambda sender, message: [] if isinstance(message, Offer) else hear(sender, message)
    world.meet()
    settle(world)
    del other.hear
    assert held(world)["s"] == held(world)["t"] == set(range(BLOCKS))


def test_store_without_disks_gives_away_what_it_has_when_it_ends(world) -> None:
    """Before it leaves the cluster; the others have everything then, and it ends no later than it may."""
    join(world, "t", "u")
    put(world, world.instance("p"))
    before, leaving = held(world), world.further["u"]
    leaving.tell(DrainRequested(60 * NS_PER_S))
    for _ in range(40):
        world.run()
        world.wait(NS_PER_S // 4)
    assert leaving.ended is not None
    assert leaving.machine.counters.kv_moved == len(before["u"]) > 2
    world.store_dies("u")
    assert set.union(*held(world).values()) == set(range(BLOCKS))
    assert sum(len(blocks) for blocks in held(world).values()) == BLOCKS


def test_store_that_may_not_wait_ends_at_once(world) -> None:
    join(world, "t", "u")
    put(world, world.instance("p"))
    leaving = world.further["u"]
    leaving.tell(DrainRequested(0))
    world.run()
    assert leaving.ended is not None and not leaving.machine.counters.kv_moved


def lend_often(world: StoreWorld, count: int) -> None:
    """Instances come, fetch the prompt and go."""
    for number in range(count):
        node = world.instance(f"d{number}")
        assert fetched(world, node) == BLOCKS
        world.dies(node.peer.name)


def test_block_that_is_asked_for_often_gets_one_more_copy(world) -> None:
    """At the next store in its line; where there is no other store, nothing is copied."""
    join(world, "t", "u")
    put(world, world.instance("p"))
    lend_often(world, CONFIG.moves.hot_lends - 1)
    settle(world, 5)
    assert sum(len(blocks) for blocks in held(world).values()) == BLOCKS
    lend_often(world, 1)
    settle(world, 5)
    owners = StoreShares(("s", "t", "u"), 2).owners_of(b"".join(world.store.identities("t", PROMPT)))
    copied = sum(len(blocks) for blocks in held(world).values()) - BLOCKS
    # one store has 32 blocks, of which two may get another copy in a window
    assert 0 < copied == sum(store.machine.counters.kv_copied for store in world.stores) <= 2 * 3
    for number, name in enumerate(("s", "t", "u")):
        assert held(world)[name] <= {at for at in range(BLOCKS) if number in owners[at]}
    assert not sum(store.machine.counters.kv_moved for store in world.stores)


def test_second_copy_of_all_is_no_copy_more(world) -> None:
    """Two stores with two copies: there is no next store."""
    world.copies = 2
    join(world, "t")
    put(world, world.instance("p"), copies=2)
    lend_often(world, CONFIG.moves.hot_lends + 2)
    settle(world, 5)
    assert not sum(store.machine.counters.kv_copied for store in world.stores)


def test_late_refusals_change_nothing(world) -> None:
    """The end of no offer, and an answer to no query."""
    put(world, world.instance("p"))
    before = held(world)
    join(world, "t")
    settle(world, 5)
    moved, counters = held(world), [replace(store.machine.counters) for store in world.stores]
    assert moved != before
    world.store.hear(world.further["t"].peer, Release("s/1/99", False, "no"))
    world.store.hear(world.further["t"].peer, BlocksHeld(99, bytes([1])))
    settle(world, 1)
    assert held(world) == moved and [store.machine.counters for store in world.stores] == counters
