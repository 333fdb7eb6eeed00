"""Stories of a store and its clients: values put, read, replaced, deleted; clients that go, lie or ask too much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exchange_world import BLOCK, LEASE_NS
from memserve.base.units import NS_PER_S
from memserve.protocol.member_events import DrainRequested
from memserve.protocol.messages import Expelled, Leave, Refused
from memserve.protocol.peers import Peer
from memserve.protocol.store import (
    StoreCode,
    StoreDelete,
    StoreDone,
    StoreGet,
    StoreHello,
    StoreList,
    StoreLook,
    StorePair,
    StorePurge,
    StorePut,
    StoreStat,
    StoreVerify,
)
from memserve.store.machine.events import StoreConfig
from store_world import Client, StoreWorld, push

DONE, PRESENT, ABSENT, NO_ROOM, TOO_LARGE, LATE, UNREADABLE, BAD_CALL, LATER = (bytes([code]) for code in StoreCode)


@pytest.fixture
def world() -> Iterator[StoreWorld]:
    world = StoreWorld()
    yield world
    world.run()
    world.store.check_empty()
    world.close()


def codes(client: Client, call: int) -> bytes:
    client.world.run()
    answer = client.answers[call]
    assert isinstance(answer, StoreDone)
    return answer.codes


def read(client: Client, name: bytes) -> bytes | None:
    call = client.get(name)
    client.world.run()
    answer = client.answers[call]
    return answer.values[0] if answer.codes == DONE else None


def test_a_value_is_read_as_it_was_put(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    values = {b"empty": b"", b"small": b"x" * 7, b"large": bytes(range(256)) * 9}
    for inline in (False, True):
        assert codes(a, a.put(values, inline=inline)) == DONE * 3
        call = a.get(*values, b"nothing")
        assert codes(a, call) == DONE * 3 + ABSENT
        assert a.answers[call].values == (*values.values(), b"")
        assert a.answers[call].lengths == (0, 7, 256 * 9, 0)


def test_put_replaces_the_previous_value(world) -> None:
    world.open_store(blocks=64, disks=1)
    a = world.client("a")
    for number in range(5):
        assert codes(a, a.put({b"k": b"%d" % number * 500})) == DONE
        assert read(a, b"k") == b"%d" % number * 500
    assert codes(a, a.put({b"k": b"other"}, replace=False)) == PRESENT
    assert read(a, b"k") == b"4" * 500
    world.restart(power=True)
    a.hello()
    world.run()
    assert read(a, b"k") in (None, b"4" * 500)


def test_evicted_value_is_read_from_disk_by_name(world) -> None:
    world.open_store(blocks=16, disks=2)
    a = world.client("a")
    values = {b"name %d" % number: bytes([number]) * 700 for number in range(12)}
    for name, value in values.items():
        assert codes(a, a.put({name: value})) == DONE
    assert world.store.tier.counters()["evicted"] > 0
    for name, value in values.items():
        assert read(a, name) == value
    look = StoreLook(1000, b"".join(a.key(name) for name in [*values, b"?"]))
    a.say(look)
    world.run()
    where = a.answers[1000].where
    assert set(where[:-1]) == {1, 2} and where[-1] == 0


def test_tenants_cannot_access_each_others_values(world) -> None:
    world.open_store(blocks=64, disks=1)
    a, b = world.client("a", "alpha"), world.client("b", "beta")
    codes(a, a.put({b"k": b"secret"}))
    assert read(b, b"k") is None
    assert a.welcome.key != b.welcome.key
    stolen = a.key(b"k")
    b.say(StoreGet(50, stolen, (b"k",), True))
    b.say(StorePut(51, (StorePair(stolen, b"k", 3, data=b"bad"),)))
    b.say(StoreDelete(52, stolen, (b"k",)))
    b.say(StoreLook(53, stolen))
    b.say(StorePurge(54))
    world.run()
    assert [codes(b, call) for call in (50, 51, 52)] == [BAD_CALL] * 3
    assert b.answers[53].where == b"\0" and b.answers[54].count == 0
    assert read(a, b"k") == b"secret"


def test_a_key_with_another_name_is_no_hit(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    codes(a, a.put({b"k": b"value"}))
    a.say(StoreGet(9, a.key(b"k"), (b"another",), True))
    a.say(StoreGet(10, a.key(b"k") * 2, (b"k",), True))
    assert codes(a, 9) == BAD_CALL and codes(a, 10) == BAD_CALL


def test_kv_blocks_are_no_values_of_clients(world) -> None:
    world.open_store(blocks=64)
    p, a = world.instance("p"), world.client("a")
    push(world, p, "t", [1] * BLOCK)
    world.run()
    identity = world.store.identities("t", [1] * BLOCK)[0]
    a.say(StoreGet(9, identity, (b"",), True))
    a.say(StoreDelete(10, identity, (b"",)))
    assert codes(a, 9) == BAD_CALL and codes(a, 10) == BAD_CALL
    assert world.store.check_kv("t", [1] * BLOCK) == 1


def test_put_reports_a_refusal_per_value(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    limit = a.welcome.value_bytes_max
    pairs = (
        StorePair(a.key(b"1"), b"1", limit + 1, 0),
        StorePair(a.key(b"2"), b"2", 10, len(a.arena) - 9),
        StorePair(a.key(b"3"), b"3", 10, data=b"nine byte"),
        StorePair(a.key(b"4"), b"4", 10, 0),
    )
    a.say(StorePut(5, pairs))
    assert codes(a, 5) == TOO_LARGE + UNREADABLE + BAD_CALL + DONE


def test_memory_that_is_all_in_use_has_no_room(world) -> None:
    world.open_store(blocks=16)
    a = world.client("a")
    limit = a.welcome.value_bytes_max
    call = a.put({b"%d" % number: bytes(limit - 1) for number in range(6)})
    assert codes(a, call) == DONE * 4 + NO_ROOM * 2
    assert codes(a, a.put({b"later": bytes(limit - 5)})) == DONE


def test_memory_of_a_client_that_cannot_be_read(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    call = a.put({b"k": b"value"})
    world.deliver(next(iter(world.links)))
    world.store.do_job(world.store.jobs[0], unreadable=True)
    assert codes(a, call) == UNREADABLE and read(a, b"k") is None


def test_a_client_of_another_host_gets_values_in_messages(world) -> None:
    world.open_store(blocks=64)
    world.clients["b"] = b = Client(world, Peer("b", 1))
    b.hello(host_id="another host")
    world.run()
    assert b.welcome.client_path == b.welcome.data_path == ""
    assert codes(b, b.put({b"k": b"value"})) == UNREADABLE
    assert codes(b, b.put({b"k": b"value"}, inline=True)) == DONE
    assert read(b, b"k") == b"value"


def test_long_values_come_in_pieces(world, monkeypatch) -> None:
    monkeypatch.setattr("memserve.store.machine.client_io.INLINE_BYTES_MAX", 1000)
    world.open_store(blocks=64)
    a = world.client("a")
    value = bytes(range(250)) * 9
    codes(a, a.put({b"k": value, b"l": b"short", b"m": b"tiny"}))
    got = b""
    while len(got) < len(value):
        call = a.get(b"k", first_byte=len(got))
        assert codes(a, call) == DONE
        assert len(a.answers[call].values[0]) <= 1000
        got += a.answers[call].values[0]
    assert got == value
    call = a.get(b"l", b"k", b"m")
    assert codes(a, call) == DONE + LATER + DONE
    assert a.answers[call].values == (b"short", b"", b"tiny")


def test_get_at_deadline_returns_values_read_so_far(world) -> None:
    world.open_store(blocks=16, disks=1)
    a = world.client("a")
    for number in range(12):
        codes(a, a.put({b"%d" % number: bytes([number]) * 700}))
    world.store.stalls = True
    names = (b"0", b"11", b"1")  # the second one is in memory, and makes no room for the others
    call = a.get(*names, deadline_in_ns=100)
    world.run()
    assert call not in a.answers
    world.wait(100)
    assert [*codes(a, call)] == [StoreCode.LATE, StoreCode.DONE, StoreCode.LATE]
    world.store.stalls = False
    world.run()
    assert read(a, names[0]) is not None


def test_values_in_memory_make_no_room_for_others_of_their_get(world) -> None:
    world.open_store(blocks=16, disks=1)
    a = world.client("a")
    for number in range(12):
        codes(a, a.put({b"%d" % number: bytes([number]) * 700}))
    in_memory = [number for number in range(12) if a.key(b"%d" % number) in world.store.tier]
    found = codes(a, a.get(*(b"%d" % number for number in range(12))))
    assert 0 < len(in_memory) < 12 and all(found[number] == StoreCode.DONE for number in in_memory)


def test_put_beyond_deadline_is_not_published(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    call = a.put({b"k": b"value"}, deadline_in_ns=10)
    world.deliver(next(iter(world.links)))
    world.now += 10
    world.store.advance()
    while world.links:
        world.step()
    assert codes(a, call) == LATE and read(a, b"k") is None


def test_a_value_deleted_while_it_is_read_does_not_come_back(world) -> None:
    world.open_store(blocks=16, disks=1)
    a = world.client("a")
    codes(a, a.put({b"k": b"v" * 700}))
    for number in range(12):
        codes(a, a.put({b"%d" % number: bytes([number]) * 700}))
    assert a.key(b"k") not in world.store.tier
    world.store.stalls = True
    call = a.get(b"k")
    world.run()
    a.say(StoreDelete(77, a.key(b"k"), (b"k",)))
    world.run()
    assert codes(a, call) == ABSENT and 77 not in a.answers  # a restart would find it
    world.store.stalls = False
    world.run()
    assert codes(a, 77) == DONE and read(a, b"k") is None
    world.restart()
    a.hello()
    world.run()
    assert read(a, b"k") is None


@pytest.mark.parametrize("seed", range(6))  # what is on its way to the disk gets there, or not
def test_a_value_replaced_right_before_a_kill_does_not_come_back(world, seed) -> None:
    world.open_store(blocks=16, disks=1, seed=seed)
    a = world.client("a")
    codes(a, a.put({b"k": b"old" * 200}))
    world.run()
    world.store.stalls = True
    call = a.put({b"k": b"new" * 200})
    world.run()
    assert call not in a.answers
    world.restart()
    a.hello()
    world.run()
    assert read(a, b"k") == b"new" * 200
    for number in range(12):
        codes(a, a.put({b"%d" % number: bytes([number]) * 700}))
    assert read(a, b"k") in (None, b"new" * 200)


def test_a_disk_that_does_not_write_makes_a_deletion_late(world) -> None:
    world.open_store(blocks=64, disks=1)
    a = world.client("a")
    codes(a, a.put({b"k": b"v" * 700}))
    world.store.stalls = True
    a.say(StoreDelete(77, a.key(b"k"), (b"k",)))
    world.run()
    assert 77 not in a.answers
    a.hello()
    world.now += 9 * NS_PER_S
    a.hello()
    world.run()
    world.wait(NS_PER_S)
    assert codes(a, 77) == LATE and read(a, b"k") is None
    world.store.stalls = False


def test_a_value_replaced_while_it_is_read_is_the_new_one(world) -> None:
    world.open_store(blocks=16, disks=1)
    a = world.client("a")
    codes(a, a.put({b"k": b"v" * 700}))
    for number in range(12):
        codes(a, a.put({b"%d" % number: bytes([number]) * 700}))
    world.store.stalls = True
    first = a.get(b"k")
    world.run()
    second = a.put({b"k": b"new"})
    world.run()
    world.store.stalls = False
    assert codes(a, second) == DONE
    assert a.answers[first].values == (b"new",) and read(a, b"k") == b"new"


def test_a_silent_client_is_dropped_with_what_it_asked_for(world) -> None:
    world.open_store(blocks=64)
    a, b = world.client("a"), world.client("b")
    world.now += 6 * NS_PER_S
    b.hello()
    world.run()
    world.now += 5 * NS_PER_S
    world.store.advance()
    assert world.store.machine.counters.clients_dropped == 1
    a.put({b"k": b"value"})
    world.run()
    assert isinstance(a.heard[-1], Expelled)
    before = a.welcome.number
    a.hello()
    world.run()
    assert a.welcome.number != before and codes(a, a.put({b"k": b"value"})) == DONE
    assert read(b, b"k") == b"value"


def test_client_leaving_mid_call_leaves_nothing(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    codes(a, a.put({b"old": b"value"}))
    a.put({b"k": b"value"})
    a.get(b"old")
    while world.links:
        world.step()
    a.say(Leave())
    while world.links:
        world.step()
    world.run()
    world.store.check_empty()
    b = world.client("b")
    assert read(b, b"k") is None and read(b, b"old") == b"value"


def test_more_clients_than_there_may_be_are_refused(world) -> None:
    world.open_store(blocks=64, config=StoreConfig(clients_max=2, calls_max=3))
    a, b, c = (world.client(name) for name in "abc")
    assert isinstance(c.heard[-1], Refused) and c.welcome is None
    a.say(Leave())
    c.hello()
    world.run()
    assert c.welcome is not None
    calls = [b.put({b"%d" % number: b"v"}) for number in range(5)]
    while world.links:
        world.step()
    world.run()
    assert sorted(codes(b, call) for call in calls) == [DONE] * 3 + [NO_ROOM] * 2


def test_a_purge_forgets_the_values_of_one_tenant(world) -> None:
    world.open_store(blocks=64, disks=1, config=StoreConfig(sweep_keys=3))
    a, b, p = world.client("a", "alpha"), world.client("b", "beta"), world.instance("p")
    push(world, p, "t", [1] * BLOCK)
    for number in range(10):
        codes(a, a.put({b"%d" % number: b"value"}))
        codes(b, b.put({b"%d" % number: b"value"}))
    a.say(StorePurge(99))
    world.run()
    while 99 not in a.answers:
        assert world.store.machine.next_deadline_ns <= world.now
        world.store.advance()
        world.run()
    assert a.answers[99].count == 10
    assert read(a, b"3") is None and read(b, b"3") == b"value"
    assert world.store.check_kv("t", [1] * BLOCK) == 1
    b.say(StorePurge(99, everything=True))
    world.run()
    assert b.answers[99].count == 11
    assert read(b, b"3") is None and world.store.check_kv("t", [1] * BLOCK) == 0
    world.restart()
    for client in (a, b):
        client.hello()
        world.run()
        assert read(client, b"3") is None


def test_a_listing_names_everything_once(world) -> None:
    world.open_store(blocks=16, disks=1)
    a, p = world.client("a"), world.instance("p")
    values = {b"%d" % number: bytes([number]) * 700 for number in range(9)}
    for name, value in values.items():
        codes(a, a.put({name: value}))
    push(world, p, "t", [1] * BLOCK)
    world.run()
    entries, after, call = [], 0, 500
    while True:
        call += 1
        a.say(StoreList(call, after, 4, everything=True))
        world.run()
        entries += a.answers[call].entries
        after = a.answers[call].after
        if after == 0:
            break
    keys = [a.key(name) for name in values] + world.store.identities("t", [1] * BLOCK)
    assert sorted(entry.key for entry in entries) == sorted(keys)
    assert {entry.scope for entry in entries} == {0, a.scope}
    assert {entry.length for entry in entries if entry.scope} == {700}


def test_a_verification_finds_damage_in_memory_and_on_disks(world) -> None:
    world.open_store(blocks=32, disks=1)
    a = world.client("a")
    values = {b"%d" % number: bytes([number]) * 700 for number in range(12)}
    for name, value in values.items():
        codes(a, a.put({name: value}))
    key = a.key(b"11")
    place = world.store.tier.find(key, counts=False)
    world.store.tier.release(place.offset)
    world.store.bytes[place.offset] ^= 1
    a.say(StoreVerify(1000))
    world.run()
    for _ in range(100):
        world.wait(20_000_000)
        world.run()
    a.say(StoreVerify(1001, start=False))
    world.run()
    numbers = a.answers[1001].numbers
    assert numbers["verify_running"] == 0 and numbers["verify_damaged"] == 1 and numbers["verify_checked"] > 12
    assert read(a, b"11") == values[b"11"]  # from the disk
    a.say(StoreStat(1002))
    world.run()
    assert a.answers[1002].numbers["damaged"] == 1


def test_adopted_value_is_verified_before_it_is_returned(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    codes(a, a.put({b"good": b"value", b"bad": b"value"}))
    store = world.restart()
    a.hello()
    world.run()
    place = store.tier.find(a.key(b"bad"), counts=False)
    store.tier.release(place.offset)
    store.bytes[place.offset] ^= 1
    assert read(a, b"good") == b"value" and read(a, b"bad") is None
    assert store.machine.counters.damaged == 1


def test_client_with_a_new_hello_starts_over(world) -> None:
    world.open_store(blocks=64)
    a = world.client("a")
    number = a.welcome.number
    a.hello()
    world.run()
    assert a.welcome.number == number
    a.say(StoreHello("tcp://elsewhere:1", a.tenant))
    world.run()
    assert a.welcome.number > number
    world.wait(LEASE_NS)


def test_full_disk_still_serves_reads_and_defers_deletions(world) -> None:
    """One line when it stops being written, one when it is written again."""
    store = world.open_store(blocks=64, disks=1, segments=20, config=StoreConfig(forget_ns=NS_PER_S))
    a = world.client("a")
    values = {b"%d" % n: bytes([n]) * 2000 for n in range(20)}
    for name in list(values)[:10]:
        a.put({name: values[name]})
        world.run()
    assert store.machine.values.disks.counters()["records"] == 10
    store.fails, store.why = True, "ENOSPC"
    for name in list(values)[10:]:
        a.put({name: values[name]})
        world.run()
    assert [notice for notice in store.notices if "has no room" in notice] == store.notices[-1:]
    assert "--ssd number 1 has no room for what is written (ENOSPC)" in store.notices[-1]
    assert a.world.store.machine.clients.collect_numbers()["disk_disks_full"] == 1
    a.say(StoreDelete(777, a.key(b"3"), (b"3",)))
    world.run()
    assert codes(a, 777) == LATE, "a restart would find it, and nobody knows for how long"
    store.fails = False
    kept = [name for name in list(values)[:10] if name != b"3"]
    assert read(a, b"3") is None and all(read(a, name) == values[name] for name in kept)
    for _ in range(10):
        a.hello()
        world.run()
        world.wait(9 * NS_PER_S)
        world.run()
    assert store.notices[-1] == "--ssd number 1 has room again: it is written"
    assert store.machine.values.disks.removals_written and store.machine.values.disks.counters()["disks_full"] == 0


def test_deletion_on_a_full_disk_is_reported_late_immediately(world) -> None:
    store = world.open_store(blocks=64, disks=1, segments=20)
    a = world.client("a")
    a.put({b"name": bytes(2000)})
    world.run()
    store.fails, store.why = True, "ENOSPC"
    a.say(StoreDelete(777, a.key(b"name"), (b"name",)))
    world.run()
    assert store.machine.values.disks.counters()["disks_full"] == 1 and codes(a, 777) == LATE
    assert read(a, b"name") is None


def test_the_end_of_a_store_does_not_wait_for_room(world) -> None:
    store = world.open_store(blocks=64, disks=1, segments=20)
    a = world.client("a")
    store.fails, store.why = True, "EDQUOT"
    for n in range(12):
        a.put({b"%d" % n: bytes(2000)})
        world.run()
    store.tell(DrainRequested(60 * NS_PER_S, "SIGTERM"))
    world.run()
    assert store.ended is not None
