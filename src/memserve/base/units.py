"""Units in one place: every quantity in memserve carries its unit in its name."""

from __future__ import annotations

import re

from memserve.base.errors import UserError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def ns_from_s(seconds: float) -> int:
    """Whole nanoseconds in ``seconds``."""
    return round(seconds * NS_PER_S)


def ceil_div(amount: int, unit: int) -> int:
    """Units needed to hold ``amount``: ``ceil(amount / unit)`` in integers."""
    return -(-amount // unit)


def human_bytes(count: int) -> str:
    """``count`` bytes for people, for example ``'1.5 GiB'``."""
    value = float(count)
    for name in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {name}" if name == "B" else f"{value:.1f} {name}"
        value /= 1024
    return f"{value:.1f} TiB"


def flag_bytes(count: int) -> str:
    """The shortest spelling of a size for a command line, for example ``'1.5MiB'``, rounded up: :func:`parse_bytes`
    reads it as at least ``count`` bytes."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, ""))
    unit, name = next((entry for entry in units if count >= entry[0]), units[-1])
    tenths = ceil_div(10 * count, unit)
    return f"{tenths // 10}{name}" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10}{name}"


_SUFFIXES = {"": 1, "b": 1, "k": KIB, "kib": KIB, "kb": 1000, "m": MIB, "mib": MIB, "mb": 1000**2}
_SUFFIXES |= {"g": GIB, "gib": GIB, "gb": 1000**3, "t": GIB << 10, "tib": GIB << 10, "tb": 1000**4}


def parse_bytes(text: str | int) -> int:
    """Bytes meant by ``'512MiB'``, ``'2G'``, ``'1.5 GB'`` or a plain number.

    Raises :class:`UserError` for anything else.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]{1,20})(?:\.([0-9]{1,20}))?\s*([a-z]*)\s*", text.lower())
    if match is None or match[3] not in _SUFFIXES:
        raise UserError(f"cannot read {text!r} as a size", hint="write it like 512MiB or 2GiB")
    places = match[2] or ""
    return ceil_div(int(match[1] + places) * _SUFFIXES[match[3]], 10 ** len(places))  # exact: no float rounds it down
