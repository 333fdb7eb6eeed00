"""KV events of other engines: both encodings, gaps, replays, restarts, tiers, and what is not for every request."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kv_event_words import BLOCK, CLEARED, as_array, batch, removed, stored
from memserve import _core
from memserve.fleet.kv_events import EngineKvFeed, KvEntries
from memserve.kv.identity import DEFAULT_KEY, namespace_id

TOKENS = list(range(1, 1 + 4 * BLOCK))
ROOT = namespace_id("", "m")


def new_feed(*, replays: bool = True) -> EngineKvFeed:
    return EngineKvFeed(KvEntries(0, _core.PrefixDirectory(), DEFAULT_KEY, lambda size: ROOT), replays)


def cached(feed: EngineKvFeed, tokens: list[int] = TOKENS) -> tuple[int, int]:
    """Blocks of the prompt that the directory has, and those in the lower tier alone."""
    packed = _core.block_identities(DEFAULT_KEY, ROOT, np.array(tokens, np.int32), BLOCK)
    found = feed._directory.match(packed)
    return (found[0][1], found[0][2]) if found else (0, 0)


def chain(count: int = 4) -> list[dict[str, Any]]:
    """One event a block."""
    return [stored([at + 1], at or None, TOKENS[at * BLOCK : (at + 1) * BLOCK]) for at in range(count)]


@pytest.mark.parametrize("form", [dict, as_array], ids=["map", "array"])
@pytest.mark.parametrize("named", [lambda one: one, lambda one: b"%032d" % one], ids=["integers", "bytes"])
def test_blocks_come_and_go(form: Any, named: Any) -> None:
    feed = new_feed()
    events = [stored([named(1), named(2)], None, TOKENS[:8]), stored([named(3)], named(2), TOKENS[8:12])]
    assert feed.on_live_batch(0, batch(*(form(event) for event in events))) is None
    assert (cached(feed), feed.block_tokens) == ((3, 0), BLOCK)
    feed.on_live_batch(1, batch(form(removed([named(2)]))))
    assert cached(feed) == (1, 0)
    feed.on_live_batch(2, batch(CLEARED if form is dict else ["AllBlocksCleared"]))
    assert cached(feed) == (0, 0) and feed.block_counts() == {}


def test_each_copy_counts() -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch(*chain(1), *chain(1)))
    feed.on_live_batch(1, batch(removed([1])))
    assert cached(feed) == (1, 0)
    feed.on_live_batch(2, batch(removed([1]), removed([1])))
    assert cached(feed) == (0, 0)


def test_memory_behind_is_the_lower_tier() -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch(*chain(2)))
    feed.on_live_batch(1, batch(stored([2], 1, TOKENS[4:8], medium="CPU"), removed([2])))
    assert cached(feed) == (2, 1)
    feed.on_live_batch(2, batch(removed([2], medium="CPU")))
    assert cached(feed) == (1, 0)


@pytest.mark.parametrize(
    "more",
    [
        {"lora_name": "x"},
        {"lora_id": 1},
        {"extra_keys": [["salt"]]},
        {"cache_salt": "s"},
        {"group_idx": 1},
        {"locality": "REMOTE"},
    ],
    ids=["adapter", "old adapter", "salt", "salt of SGLang", "another group", "remote"],
)
def test_blocks_not_shared_by_all_requests_are_skipped(more: dict[str, Any]) -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch(stored([1], None, TOKENS[:4], **more), stored([2], 1, TOKENS[4:8])))
    assert cached(feed) == (0, 0)


def test_a_last_page_that_is_not_full_is_left_out() -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch(*chain(2), stored([3], 2, TOKENS[8:10], block_size=2)))
    assert (cached(feed), feed.block_tokens) == ((2, 0), BLOCK)


def test_after_a_restart_blocks_may_have_another_size() -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch(*chain(2)))
    feed.on_engine_restarted()
    feed.on_live_batch(0, batch(stored([7], None, TOKENS[:2], block_size=2)))
    assert (feed.block_tokens, feed.block_counts()) == (2, {7: (1, 0)})


def test_a_gap_is_filled_by_a_replay() -> None:
    feed, blocks = new_feed(), chain()
    assert feed.on_live_batch(0, batch(blocks[0])) is None
    assert feed.on_live_batch(3, batch(blocks[3])) == 1
    assert cached(feed) == (1, 0)
    for number in (1, 2, 3):
        feed.on_replayed_batch(number, batch(blocks[number]))
    feed.on_replay_ended()
    assert cached(feed) == (4, 0) and (feed.gaps, feed.forgotten, feed.batches) == (1, 0, 4)
    assert feed.on_live_batch(4, batch(removed([4]))) is None and cached(feed) == (3, 0)


def test_a_gap_that_no_replay_fills_forgets_all() -> None:
    feed, blocks = new_feed(), chain()
    feed.on_live_batch(0, batch(blocks[0]))
    feed.on_live_batch(5, batch(stored([9], None, [7] * BLOCK)))
    feed.on_replay_ended()
    assert cached(feed) == (0, 0) and cached(feed, [7] * BLOCK) == (1, 0) and feed.forgotten == 1
    assert feed.on_live_batch(6, batch(*blocks)) is None and cached(feed) == (4, 0)


def test_a_replay_that_begins_too_late_forgets_what_was_before() -> None:
    feed, blocks = new_feed(), chain()
    feed.on_live_batch(0, batch(blocks[0]))
    assert feed.on_live_batch(9, batch()) == 1
    feed.on_replayed_batch(7, batch(stored([9], None, [7] * BLOCK)))
    feed.on_replayed_batch(8, batch())
    feed.on_replay_ended()
    assert cached(feed) == (0, 0) and cached(feed, [7] * BLOCK) == (1, 0) and feed.next_batch == 10


def test_gap_inside_a_replay_is_requested_again() -> None:
    """vLLM's socket keeps 1,000 messages, and drops what a longer replay has beyond them."""
    feed, blocks = new_feed(), chain()
    feed.on_live_batch(4, batch())
    for number in (0, 2, 3):
        feed.on_replayed_batch(number, batch(blocks[number]))
    assert cached(feed) == (1, 0) and feed.on_replay_ended() == 1
    feed.on_replayed_batch(1, batch(blocks[1]))
    assert cached(feed) == (4, 0) and (feed.on_replay_ended(), feed.forgotten, feed.next_batch) == (None, 0, 5)


def test_a_gap_is_asked_for_once() -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch())
    assert [feed.on_live_batch(number, batch()) for number in (2, 3, 5)] == [1, None, None] and feed.gaps == 1


def test_without_replay_a_gap_forgets_at_once() -> None:
    feed, blocks = new_feed(replays=False), chain()
    assert feed.on_live_batch(4, batch(blocks[0])) is None and cached(feed) == (1, 0) and feed.forgotten == 0
    assert feed.on_live_batch(6, batch(blocks[1])) is None and cached(feed) == (0, 0) and feed.forgotten == 1


def test_a_restart_begins_at_zero() -> None:
    feed, blocks = new_feed(), chain()
    for number, block in enumerate(blocks):
        feed.on_live_batch(number, batch(block))
    assert feed.on_live_batch(0, batch(blocks[0])) is None
    assert cached(feed) == (1, 0) and feed.next_batch == 1


def test_a_live_batch_that_a_replay_has_brought_counts_once() -> None:
    feed, blocks = new_feed(), chain()
    for number, block in enumerate(blocks):
        feed.on_replayed_batch(number, batch(block))
    assert feed.on_live_batch(2, batch(blocks[2])) is None and feed.on_live_batch(3, batch(blocks[3])) is None
    assert feed.block_counts()[4] == (1, 0)


def test_ranks_are_numbered_apart() -> None:
    feed, blocks = new_feed(), chain()
    assert feed.on_live_batch(0, batch(blocks[0], rank=0)) is None
    assert feed.on_live_batch(0, batch(blocks[0], rank=1)) is None
    assert feed.on_live_batch(1, batch(removed([1]), rank=1)) is None
    assert cached(feed) == (1, 0) and feed.forgotten == 0


def test_a_child_of_an_unknown_parent_is_left_out() -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch(stored([2], 1, TOKENS[4:8])))
    assert feed.block_counts() == {} and cached(feed) == (0, 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\x00" * 9, msgspec.msgpack.encode({}), msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, "events"]), msgspec.msgpack.encode([1.0, [], "rank"]),
        batch(7), batch([]), batch({"type": "BlockStored"}), batch(stored(["x"], None, TOKENS[:4])),
        batch(stored([1], None, TOKENS[:5])), batch(stored([1], None, [-1] * 4)),
        batch(stored([1], None, [1 << 40] * 4)),
        batch(stored([1], None, TOKENS[:4], block_size=0)), batch(stored([1], 0.5, TOKENS[:4])),
        batch({"type": "BlockRemoved", "block_hashes": None}),
    ],
)  # fmt: skip
def test_malformed_batches_are_refused(payload: bytes) -> None:
    feed = new_feed()
    with pytest.raises(ValueError):
        feed.on_live_batch(0, payload)


def test_unknown_events_are_passed_over() -> None:
    feed = new_feed()
    feed.on_live_batch(0, batch({"type": "BlockMoved", "x": 1}, *chain(1)))
    assert cached(feed) == (1, 0)
