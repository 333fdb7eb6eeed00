"""Scripted servers of SGLang with roles, which check the protocol: which two meet in a room, and what each is sent.

A prefill server that is sent a request "computes" it and opens its rooms at its bootstrap port. A decode server goes to
the rooms that its request names, waits until they are open, and answers: with rooms of another request, or none, it
waits for ever, as the real one does until its own deadline. Whatever breaks the protocol is written down.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from scripted_engine import Asked, Script, ScriptedEngine, well, whole

ROOMS_MAX = 1 << 63
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass
class Meeting:
    """All rooms of a world, by address of the server that computes and number."""

    open_rooms: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    used_rooms: set[int] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    unmet: int = 0
    """Decode servers that wait in a room which is not open."""

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    def keys_of(self, asked: Asked, count: int) -> list[tuple[str, int, int]]:
        """The rooms of a request, checked: single values for one sequence, lists of as many as there are else."""
        fields = asked.fields
        self.check(set(FIELDS) <= fields.keys(), f"{asked.path} has no {FIELDS}")
        hosts, ports, rooms = (fields.get(name) for name in FIELDS)
        if count == 1:
            self.check(isinstance(rooms, int), f"one sequence has one room, not {rooms}")
            hosts, ports, rooms = [hosts], [ports], [rooms]
        good = isinstance(rooms, list) and len(rooms) == len(hosts) == len(ports) == count == len(set(rooms))
        self.check(good, f"{count} sequences have as many rooms of their own, not {rooms}")
        self.check(all(isinstance(room, int) and 0 <= room < ROOMS_MAX for room in rooms), f"{rooms} are no rooms")
        overrides = [name for name in asked.headers if name.startswith("x-override-")]
        self.check(not overrides, f"headers take the request elsewhere: {overrides}")
        return list(zip(hosts, ports, rooms, strict=True))


def prefill_script(meeting: Meeting, port: int, count: int = 1, delay_s: float = 0.0, then: Script = well) -> Script:
    """A server that computes, with this bootstrap port, for ``count`` sequences; it answers with ``then``."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        for host, own_port, room in meeting.keys_of(asked, count):
            meeting.check((host, own_port) == ("127.0.0.1", port), f"{host}:{own_port} is not mine")
            meeting.check(room not in meeting.used_rooms, f"the room {room} was used before")
            meeting.used_rooms.add(room)
            meeting.open_rooms[host, own_port, room] = asked.body
        await then(asked, writer)

    return script


def decode_script(meeting: Meeting, count: int = 1, then: Script = well) -> Script:
    """A server that waits for the KV of all sequences, and answers with ``then``."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        keys = meeting.keys_of(asked, count)
        meeting.unmet += 1
        while any(key not in meeting.open_rooms for key in keys):
            await asyncio.sleep(0.005)
        meeting.unmet -= 1
        for key in keys:
            meeting.check(meeting.open_rooms.pop(key) == asked.body, "both were sent the same")
        await then(asked, writer)

    return script


def pair_specs(engines: list[ScriptedEngine], *ports: int) -> list[str]:
    """``--engine`` of each: the first ones compute, with these bootstrap ports, the others answer."""
    pairs = zip(engines, ports, strict=False)
    computing = [f"sglang={engine.url},role=prefill,bootstrap={port}" for engine, port in pairs]
    return computing + [f"sglang={engine.url},role=decode" for engine in engines[len(ports) :]]


def fails_with(status: int, body: bytes = b'{"error": {"message": "no"}}') -> Script:
    """An answer of this status."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(status, body))

    return script


async def stays_silent(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """No answer."""
    await asyncio.sleep(600)


def own_fields(asked: Asked) -> dict[str, Any]:
    """What the client has sent, without what the router adds."""
    return {name: value for name, value in asked.fields.items() if name not in FIELDS}
