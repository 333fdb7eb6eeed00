"""Processes of two releases in one cluster: each reads what the other one sends.

``release-0.1.json`` has one of every message as release 0.1 sent them, bytes in hexadecimal. It is never written anew:
the next release adds a file of its own (``filled`` and ``encode`` of ``test_wire.py``).
"""

from __future__ import annotations

import json
import typing
from pathlib import Path

import msgspec
import pytest

from memserve.protocol import codec as wire
from memserve.protocol.messages import AnyMessage

RELEASES = sorted(Path(__file__).parent.glob("release-*.json"))
SENT = {
    f"{path.stem}: {name}": bytes.fromhex(sent)
    for path in RELEASES
    for name, sent in json.loads(path.read_text())["messages"].items()
}
NAMES = {kind.__struct_config__.tag for kind in typing.get_args(AnyMessage)}
"""On the wire: those of the first release that had the message, whatever it is called in the code now."""


def begins_with(now: typing.Any, before: typing.Any) -> bool:
    """Whether a reader that expects ``before`` finds it in ``now``: fields behind the last, and keys, may be added."""
    if isinstance(before, list):
        enough = isinstance(now, list) and len(now) >= len(before)
        return enough and all(map(begins_with, now, before))
    if isinstance(before, dict):
        return isinstance(now, dict) and all(key in now and begins_with(now[key], before[key]) for key in before)
    return type(now) is type(before) and now == before


def test_the_protocol_is_that_of_the_release_before() -> None:
    """Another version drops every letter of the older processes: no upgrade host by host."""
    assert RELEASES
    assert all(json.loads(path.read_text())["protocol"] == wire.VERSION for path in RELEASES)


@pytest.mark.parametrize("name", SENT)
def test_messages_of_previous_release_round_trip(name: str) -> None:
    assert name.partition(": ")[2] in NAMES, "older processes still send it"
    again = wire.encode(wire.decode(SENT[name]))
    assert begins_with(msgspec.msgpack.decode(again), msgspec.msgpack.decode(SENT[name]))


def test_a_changed_field_would_be_noticed() -> None:
    assert begins_with([1, {"a": [2], "b": 0}, "new"], [1, {"a": [2]}])
    assert not begins_with([1], [1, 2]) and not begins_with([1, "2"], [1, 2]) and not begins_with({}, {"a": 1})
    assert not begins_with([True], [1])
