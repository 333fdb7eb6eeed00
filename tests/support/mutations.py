"""Bytes and JSON that went wrong, drawn from a seed: what a bad disk, a careless hand or a stranger makes of a file."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "\ud800", "9" * 400, [], [[]], {}, {"a": 1}, [1, "b", None], "../../etc/passwd",
)  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """``data`` with bytes flipped, overwritten, cut off, repeated or put in; JSON may get odd values instead."""
    if rng.random() < 0.6 and _is_json(data):
        return mutated_json(data, rng)
    kind = rng.choice(["flip", "zero", "cut", "empty", "insert", "remove", "swap", "append"])
    out = bytearray(data)
    at = rng.randrange(len(out)) if out else 0
    some = rng.choice([1, 2, 4, 16, 200])
    match kind:
        case "flip":
            for _ in range(some):
                if out:
                    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        case "zero":
            out[at : at + some] = bytes(len(out[at : at + some]))
        case "cut":
            del out[at:]
        case "empty":
            out.clear()
        case "insert":
            out[at:at] = rng.randbytes(some)
        case "remove":
            del out[at : at + some]
        case "swap":
            out[at : at + some] = rng.randbytes(len(out[at : at + some]))
        case "append":
            out += rng.randbytes(some)
    return bytes(out)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON text in which one to three values are odd, are gone, or have another name."""
    value = json.loads(data)
    for _ in range(rng.randrange(1, 4)):
        places = list(_places(value))
        if not places:
            return json.dumps(rng.choice(ODD_VALUES)).encode()
        container, key = rng.choice(places)
        match rng.choice(["odd", "odd", "odd", "gone", "renamed", "nested"]):
            case "odd":
                container[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            case "gone":
                del container[key]
            case "renamed" if isinstance(container, dict):
                container[f"{key}_"] = container.pop(key)
            case _:
                container[key] = [container[key]]
    return json.dumps(value).encode()


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), (dict, list))
    except ValueError:
        return False


def _places(value: Any) -> Any:
    """``(container, key)`` of every value in a JSON value."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
