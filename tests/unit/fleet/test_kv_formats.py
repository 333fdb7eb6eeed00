"""Formats of KV events: what a plug-in's may say, and that a wrong one concerns its own engine alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from memserve import _core
from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.plugins import KV_EVENT_FORMATS
from memserve.base.units import NS_PER_S
from memserve.fleet.kv_events import EngineKvFeed, KvEntries
from memserve.fleet.kv_formats import AllBlocksRemoved, BlocksRemoved, BlocksStored, KvBatch, check_batch
from memserve.fleet.machine import Fleet
from memserve.fleet.messages import EngineAnswered, EngineReport, KvReceived, read_engine
from memserve.kv.identity import DEFAULT_KEY, namespace_id
from written_plugins import plugin_folder, write_plugins

__all__ = ["plugin_folder"]

BLOCK = 4
TOKENS = list(range(1, 1 + 3 * BLOCK))
ROOT = namespace_id("", "m")
MODULE = """
import json
from memserve.fleet.kv_formats import AllBlocksRemoved, BlocksRemoved, BlocksStored, KvBatch

def words(payload):
    events = []
    for word, *rest in json.loads(payload):
        if word == "stored":
            events.append(BlocksStored(*rest))
        elif word == "removed":
            events.append(BlocksRemoved(*rest))
        elif word == "cleared":
            events.append(AllBlocksRemoved())
        else:
            raise LookupError(word)
    return KvBatch(0, events)

def nothing(payload):
    return None
"""


@pytest.fixture(autouse=True)
def installed(plugin_folder: Path) -> None:
    write_plugins(plugin_folder, "written_formats", MODULE, {KV_EVENT_FORMATS.group: ["words", "nothing"]})


def told(*events: object) -> bytes:
    return json.dumps(events).encode()


def cached(feed: EngineKvFeed) -> tuple[int, int]:
    packed = _core.block_identities(DEFAULT_KEY, ROOT, np.array(TOKENS, np.int32), BLOCK)
    found = feed._directory.match(packed)
    return (found[0][1], found[0][2]) if found else (0, 0)


def test_events_of_a_plugin_are_applied() -> None:
    feed = EngineKvFeed(KvEntries(0, _core.PrefixDirectory(), DEFAULT_KEY, lambda size: ROOT), True, "words")
    feed.on_live_batch(
        0, told(["stored", [1, 2], None, TOKENS[:8], BLOCK], ["stored", [3], 2, TOKENS[8:], BLOCK, True])
    )
    assert cached(feed) == (3, 1)
    feed.on_live_batch(1, told(["removed", [3], True]))
    assert cached(feed) == (2, 0)
    feed.on_live_batch(2, told(["cleared"]))
    assert cached(feed) == (0, 0)


@pytest.mark.parametrize("payload", [b"{", told(["unheard of"]), told(["stored", [1], None, TOKENS, BLOCK])])
def test_whatever_a_plugin_raises_is_a_malformed_batch(payload: bytes) -> None:
    feed = EngineKvFeed(KvEntries(0, _core.PrefixDirectory(), DEFAULT_KEY, lambda size: ROOT), True, "words")
    with pytest.raises(ValueError, match=r"^words: "):
        feed.on_live_batch(0, payload)


@pytest.mark.parametrize(
    "event",
    [
        BlocksStored([1], None, TOKENS[:4], 0),
        BlocksStored([1], None, TOKENS[:3], 4),
        BlocksStored(["1"], None, TOKENS[:4], 4),
        BlocksStored([1], "0", TOKENS[:4], 4),
        BlocksStored([1], None, [1, 2, 3, 1 << 31], 4),
        BlocksStored([1], None, [1, 2, 3, -1], 4),
        BlocksRemoved([None]),
        {"type": "stored"},
        None,
    ],
)
def test_events_that_contradict_themselves_are_refused(event: object) -> None:
    with pytest.raises(ValueError):
        check_batch(KvBatch(0, [AllBlocksRemoved(), event]))
    with pytest.raises(ValueError):
        check_batch(KvBatch("0", []))


def test_a_wrong_format_concerns_its_own_engine_alone() -> None:
    names = {"a:1": "words", "b:2": "nothing"}
    specs = [read_engine(f"vllm=http://{name},events=tcp://x:1,format={form}") for name, form in names.items()]
    fleet = Fleet(specs, ClusterConfig())
    for name in names:
        fleet.handle(EngineAnswered(name, EngineReport({"m": "m"})), NS_PER_S)
    payload = told(["stored", [1], None, TOKENS[:4], BLOCK])
    for name in names:
        assert fleet.handle(KvReceived(name, 0, payload), NS_PER_S) == []
    assert (fleet.kv_counts("a:1"), fleet.kv_counts("b:2")) == ({1: (1, 0)}, {})
    fleet.check_invariants()


def test_the_format_is_part_of_the_engines_name() -> None:
    assert read_engine("vllm=http://a:1").events_format == "vllm"
    assert read_engine("sglang=http://a:1").events_format == "sglang"
    assert read_engine("sglang=http://a:1,events=tcp://x:1,format=words").events_format == "words"
    with pytest.raises(UserError, match="only events that an engine publishes"):
        read_engine("vllm=http://a:1,format=words")
    with pytest.raises(UserError, match="unknown format of KV events 'word'") as caught:
        read_engine("vllm=http://a:1,events=tcp://x:1,format=word")
    assert "words" in str(caught.value.hint)
