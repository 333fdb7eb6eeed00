"""Units in one place (level 0): every quantity in memserve carries its unit in its name."""

from __future__ import annotations

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
