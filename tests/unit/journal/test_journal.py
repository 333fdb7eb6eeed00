"""Records, the state that they make, their journal, and what power failures and rotten disks do to it."""

from __future__ import annotations

import random
from struct import pack_into
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.errors import UserError
from memserve.base.types import Tier
from memserve.base.units import NS_PER_S
from memserve.journal.state import GONE_MAX, Entries, MemberPage, MetadataState
from memserve.journal.store import JournalWriter, MediumFailed, Store, read_journal, records_of
from memserve.protocol.messages import KvChange
from memserve.protocol.peers import Peer
from memserve.protocol.records import AnyRecord, EntriesKept, HandlePinned, MemberEntered, MemberGone, RouterStarted
from memserve_lab.sim.faulty_medium import FaultyMedium
from meta_records import Drawn, StateTwin, info


def entries_of(page: MemberPage) -> dict[bytes, dict[str, Any]]:
    """Stamps, read as their picture in ``journal/state.py`` says."""
    seconds, entries = (1 << 31) - 1, page.entries
    return {
        name: {
            "tier": Tier.DRAM if stamp >> 63 else Tier.HBM,
            "created": stamp >> 32 & seconds,
            "used": stamp & seconds,
            "hits": entries.hits.get(name, 0),
        }
        for name, stamp in entries.stamps.items()
    }


def view_of(state: MetadataState | StateTwin) -> dict[str, Any]:
    """All that can be seen of either."""
    if isinstance(state, StateTwin):
        members = [(p["info"], p["draining"], p["next"], p["entries"]) for p in state.members.values()]
        return {
            "router": state.router,
            "members": members,
            "gone": state.gone,
            **state.kept,
            "order": [*state.kept["session"]],
        }
    state.check_invariants()
    members = []
    for page in state.members.values():
        members.append((page.info, page.is_draining, page.entries.next_event, entries_of(page)))
    return {
        "router": state.router,
        "members": members,
        "gone": list(state._dead_peers),
        "session": {key: record.peers for key, record in state.sessions.items()},
        "handle": {key: (record.tokens, record.expires_ns) for key, record in state.handles.items()},
        "document": {key: (record.body, record.expires_unix_ns) for key, record in state.documents.items()},
        "adapter": {name: (record.folder, record.digest) for name, record in state.adapters.items()},
        "order": list(state.sessions),
    }


def folded(records: list[AnyRecord]) -> dict[str, Any]:
    state = MetadataState()
    state.apply(records)
    return view_of(state)


@given(st.integers(0, 2**32), st.integers(1, 120))
@settings(max_examples=80, deadline=None)
def test_state_equals_its_twin_and_its_checkpoint(seed: int, count: int) -> None:
    drawn, state, twin = Drawn(seed), MetadataState(), StateTwin()
    for _ in range(count):
        record = drawn.record()
        state.apply([record])
        twin.apply(record)
        assert view_of(state) == view_of(twin)
    assert folded(list(state.checkpoint_records())) == view_of(twin)


def test_recovered_state_uses_new_clock_and_tiers() -> None:
    drawn, state = Drawn(5), MetadataState()
    while not (state.handles and state.entries > 4):
        state.apply([drawn.record()])
    given_to = state.recovered_state(1000)
    assert given_to.entries == state.entries and given_to.router == state.router
    assert [pin.expires_ns + 1000 for pin in given_to.handles] == [pin.expires_ns for pin in state.handles.values()]
    for page, member in zip(state.members.values(), given_to.members, strict=True):
        known = list(entries_of(page).values())
        assert len(member.hbm) == 16 * sum(entry["tier"] is Tier.HBM for entry in known)
        assert len(member.dram) == 16 * sum(entry["tier"] is Tier.DRAM for entry in known)
        used = sorted(entry["used"] * NS_PER_S - 1000 for entry in known if entry["tier"] is Tier.HBM)
        assert [used_ns for used_ns, blocks in member.used for _ in range(blocks)] == used


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_times_and_uses_of_what_was_cached_outlive_the_router(seed: int) -> None:
    """Through the journal, and through a checkpoint."""
    drawn, twin, medium = Drawn(seed), StateTwin(), FaultyMedium()
    store = Store(medium)
    for _ in range(200):
        record = drawn.record()
        store.write_records([record])
        twin.apply(record)
    store.sync()
    after_replay = Store(medium).state
    store.write_checkpoint()
    after_checkpoint = Store(medium).state
    assert view_of(after_replay) == view_of(after_checkpoint) == view_of(twin)
    assert after_replay.recovered_state(0) == after_checkpoint.recovered_state(0)


def test_eviction_order_is_by_last_use_then_count_then_age() -> None:
    entries, (a, b, c, d) = Entries(), (bytes([number]) * 16 for number in range(4))
    for first, (name, created_s) in enumerate([(a, 5), (b, 7), (c, 6), (d, 6)]):
        entries.apply_changes(first, (KvChange("stored", Tier.HBM, name),), created_s * NS_PER_S)
    for name, used_s in ((a, 8), (a, 9), (b, 9), (c, 9), (d, 9)):
        entries.note_use(name, used_s * NS_PER_S)
    assert entries.by_use() == [(9, 2), (9, 1), (9, 1)]  # c and d are older than b; a was used twice
    entries.note_use(b, 10 * NS_PER_S)
    entries.apply_changes(4, (KvChange("moved", Tier.DRAM, c),), 10 * NS_PER_S)
    assert entries.by_use() == [(9, 1), (9, 1), (10, 1)]


def test_a_checkpoint_of_an_older_memserve_without_hits_is_read() -> None:
    state, peer = MetadataState(), Peer("a", 1)
    state.apply([MemberEntered(info(peer), 0), EntriesKept(peer, 3, b"x" * 16, bytes(8))])
    body = msgspec.msgpack.encode([["EntriesKept", ["a", 1], 3, b"y" * 16, bytes(8)]])
    state.apply(records_of(body))
    assert state.members["a"].entries.stamps == {b"y" * 16: 0} and not state.members["a"].entries.hits


def test_incarnations_that_are_gone_stay_gone_as_far_as_is_kept() -> None:
    state = MetadataState()
    state.apply(MemberGone(Peer("a", number)) for number in range(GONE_MAX + 5))
    assert len(state.recovered_state(0).dead_peers) == GONE_MAX


def written(seed: int, frames: int) -> tuple[bytes, list[list[AnyRecord]], list[int]]:
    """A journal, its records by frame, and where its frames end."""
    drawn, writer = Drawn(seed), JournalWriter(7)
    records = [[drawn.record() for _ in range(drawn.rng.randrange(1, 4))] for _ in range(frames)]
    data, ends = writer.encode_checkpoint([]), []
    for batch in records:
        data += writer.encode_frame(batch, len(data))
        ends.append(len(data))
    return data, records, ends


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=60, deadline=None)
def test_any_prefix_of_a_journal_gives_its_whole_frames(seed: int, data: st.DataObject) -> None:
    journal, records, ends = written(seed, 6)
    cut = data.draw(st.integers(len(JournalWriter(0).encode_checkpoint([])), len(journal)))
    reading = read_journal(journal[:cut])
    whole = sum(end <= cut for end in ends)
    assert [records_of(body) for body in reading.bodies] == records[:whole]
    assert reading.good_bytes + reading.torn_bytes == cut and reading.number == 7


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=60, deadline=None)
def test_corrupt_byte_is_an_error_or_costs_the_last_frame(seed: int, data: st.DataObject) -> None:
    journal, records, ends = written(seed, 5)
    at = data.draw(st.integers(0, len(journal) - 1))
    rotten = bytearray(journal)
    rotten[at] ^= data.draw(st.integers(1, 255))
    try:
        reading = read_journal(bytes(rotten))
    except UserError as error:
        assert error.hint
        return
    assert at >= ends[-2], "an acknowledged frame was dropped without a word"
    assert [records_of(body) for body in reading.bodies] == records[:-1]


def test_a_damaged_checkpoint_is_never_taken_for_a_torn_write() -> None:
    drawn = Drawn(3)
    journal = bytearray(JournalWriter(1).encode_checkpoint([[drawn.record() for _ in range(9)]]))
    journal[-3] ^= 1
    with pytest.raises(UserError, match="damaged: bytes"):
        read_journal(bytes(journal))


@pytest.mark.parametrize(("version", "words"), [(0, "it is no longer supported"), (2, "a newer memserve wrote it")])
def test_another_format_is_refused_by_name(version: int, words: str) -> None:
    journal = bytearray(written(1, 2)[0])
    pack_into("<H", journal, 14, version)
    with pytest.raises(UserError, match=words):
        read_journal(bytes(journal))


def test_an_unknown_record_and_a_foreign_file_are_refused() -> None:
    with pytest.raises(UserError, match="does not know"):
        records_of(b"\x91\x92\xa7Strange\x01")
    for data in (b"SQLite format 3\0" + bytes(100), bytes(5000), b"m"):
        with pytest.raises(UserError, match="damaged at its very beginning"):
            read_journal(data)


def acknowledged_and_kept(seed: int, *, fsync_lies: bool = False) -> tuple[int, list[AnyRecord], dict[str, Any]]:
    """A router that writes and is cut off at a random point. Returns how many records were acknowledged, all that were
    written, and what is found afterwards."""
    rng, drawn = random.Random(seed), Drawn(seed)
    medium = FaultyMedium(fsync_lies=fsync_lies)
    store = Store(medium, checkpoint_bytes_min=rng.choice([200, 2000, 1 << 20]))
    records: list[AnyRecord] = []
    acknowledged = 0
    for _ in range(rng.randrange(1, 60)):
        batch = [drawn.record() for _ in range(rng.randrange(1, 4))]
        before = store.checkpoints
        store.write_records(batch)
        records += batch
        if rng.random() < 0.4:
            store.sync()
            acknowledged = len(records)
        elif store.checkpoints > before:
            acknowledged = len(records)
    if rng.random() < 0.8:
        tail = medium.unsafe_bytes
        arrived = rng.randint(0, tail)
        holes = [
            (start, start + rng.randrange(64)) for start in (rng.randint(0, tail) for _ in range(rng.randrange(3)))
        ]
        medium.lose_power(arrived, holes)
    return acknowledged, records, view_of(Store(medium).state)


@pytest.mark.parametrize("block", range(5))
def test_500_kills_with_torn_writes_lose_nothing_acknowledged(block: int) -> None:
    """What is found is what some prefix of the records makes, and it is not shorter than what was acknowledged."""
    for seed in range(block * 100, block * 100 + 100):
        acknowledged, records, found = acknowledged_and_kept(seed)
        lengths = range(acknowledged, len(records) + 1)
        assert any(folded(records[:length]) == found for length in lengths), f"seed {seed}"


def test_disk_lying_about_fsync_is_noticed() -> None:
    """The checker above is able to fail."""
    caught = 0
    for seed in range(60):
        try:
            acknowledged, records, found = acknowledged_and_kept(seed, fsync_lies=True)
        except UserError:  # a later frame vouches for one that is gone
            caught += 1
            continue
        caught += not any(folded(records[:length]) == found for length in range(acknowledged, len(records) + 1))
    assert caught > 10


def test_full_disk_breaks_journal_until_a_checkpoint_succeeds() -> None:
    drawn, medium = Drawn(11), FaultyMedium()
    store = Store(medium)
    records = [drawn.record() for _ in range(30)]
    store.write_records(records[:10])
    store.sync()
    medium.room_bytes = len(medium.load() or b"") + 20
    with pytest.raises(MediumFailed, match="no space"):
        store.write_records(records[10:20])
    assert store.is_broken
    store.write_records(records[20:])  # remembered, not written
    for attempt in (store.sync, store.write_checkpoint):
        with pytest.raises(MediumFailed):
            attempt()
    assert view_of(Store(copy_of(medium)).state) == folded(records[:10])
    medium.room_bytes = None
    store.write_checkpoint()
    assert not store.is_broken and view_of(Store(medium).state) == folded(records)


def test_a_full_disk_with_a_torn_write_is_opened_broken() -> None:
    """What can be read is whole: a router that died while its disk was full starts again."""
    drawn, medium = Drawn(12), FaultyMedium()
    store = Store(medium)
    records = [drawn.record() for _ in range(20)]
    store.write_records(records[:10])
    store.sync()
    torn = FaultyMedium()
    torn.replace(medium.load() + b"\x99" * 7)
    torn.room_bytes = 20
    found = Store(torn)
    assert found.torn_bytes == 7 and found.is_broken and view_of(found.state) == folded(records[:10])
    found.write_records(records[10:])
    with pytest.raises(MediumFailed):
        found.sync()
    torn.room_bytes = None
    found.write_checkpoint()
    assert not found.is_broken and view_of(Store(torn).state) == folded(records)
    empty = FaultyMedium()
    empty.room_bytes = 0
    with pytest.raises(MediumFailed):  # nothing is lost yet: its user hears of it before anything is promised
        Store(empty)


def copy_of(other: FaultyMedium) -> FaultyMedium:  # a copy of its bytes
    copy = FaultyMedium()
    copy.replace(other.load())
    return copy


def test_grown_journal_is_replaced_by_equal_checkpoint() -> None:
    medium = FaultyMedium()
    store, drawn = Store(medium, checkpoint_bytes_min=500), Drawn(2)
    records: list[AnyRecord] = []
    for _ in range(400):
        records.append(drawn.record())
        store.write_records(records[-1:])
    assert store.checkpoints > 2 and store.torn_bytes == 0
    assert view_of(Store(medium).state) == folded(records)
    store.sync()
    syncs = medium.syncs
    store.sync()
    assert medium.syncs == syncs, "nothing new: nothing to wait for"


def test_pins_survive_a_change_of_clocks() -> None:
    state = MetadataState()
    state.apply([RouterStarted(Peer("router", 1), "", 500), HandlePinned("t", "h", b"", 100)])
    state.apply([RouterStarted(Peer("router", 2), "", 90), HandlePinned("t", "g", b"", 100)])
    assert [pin.expires_ns for pin in state.recovered_state(90).handles] == [510, 100]
    assert info(Peer("a", 1)).peer == Peer("a", 1)
