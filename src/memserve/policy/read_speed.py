"""How quickly the disks of one store give what an instance asks of them: learned from its own fetches.

A store tells what its disks cost, or nothing; a disk that others use too, or that fails, is slower than that. So each
fetch that was read from disks is compared with what was expected::

    it came whole    -> half of the difference is learned, as a factor
    a part was late  -> the disks are so slow: learned at once
    nothing came     -> the disks are at least so slow; how slow is *unknown* until something has come

Disks that are too slow, or of unknown speed, are not asked any more, and nothing would be learned of them. Then a few
blocks are read now and then that no request waits for (a *trial fetch*): the first time that nothing came, at once, so
the first encounter with a slow disk costs one wait and no second, longer one. One quick trial proves nothing of disks
that stand still now and then: only after several in a row less is expected, and each time that it was wrong the next
trial comes later.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.policy.costs import CopyCurve
from memserve.units import NS_PER_S

TRIAL_AFTER_NS = 5 * NS_PER_S
"""How long nothing was learned of slow disks before a trial fetch."""
TRIAL_AFTER_MAX_NS = 160 * NS_PER_S
TRIAL_BLOCKS = 8
GOOD_IN_A_ROW = 3
"""Fetches that came in time before slow disks count as less slow."""
TRUSTED_AFTER = 32
"""Fetches in a row after which disks count as if they had never been late."""
_SLOW = 1.5
_SCALE_MIN, _SCALE_MAX = 0.1, 1e4
_LATE = 2.0
"""What did not come at all takes at least twice as long as it was waited for."""


@dataclass(slots=True)
class ReadSpeed:
    """Of the disks of one store."""

    told: CopyCurve
    """What reading takes, as the store says, or by default."""
    scale: float = 1.0
    """How many times longer it takes."""
    learned_ns: int = 0
    """When a fetch, or a trial, was last begun or has ended."""
    trial_after_ns: int = TRIAL_AFTER_NS
    """How long nothing was learned before the next trial: twice as long with each time that the disks were late."""
    good: int = 0
    """Fetches in a row that came in time."""
    is_unknown: bool = False
    """Nothing has come since nothing came in time: ``scale`` is the least that reading takes."""
    hurries: bool = False
    """The next trial is due at once."""
    hurried_ns: int = -(1 << 62)
    """When it was last due at once: at most once in ``trial_after_ns``."""

    @property
    def curve(self) -> CopyCurve:
        """What reading takes now; of unknown disks, more than any request waits for."""
        told, scale = self.told, _SCALE_MAX if self.is_unknown else self.scale
        return CopyCurve(told.start_ns * scale, told.piece_ns * scale, told.byte_ns * scale)

    def came(self, told_ns: int, spent_ns: int, now: int) -> None:
        """All that was asked for came; it took ``spent_ns``, and ``told_ns`` by the told curve."""
        self.learned_ns = now
        self.good += 1
        if self.good >= TRUSTED_AFTER:
            self.trial_after_ns = TRIAL_AFTER_NS
        ratio = _bounded(spent_ns / max(1, told_ns))
        if self.is_unknown:  # the first measurement since; the scale was only a bound
            self.is_unknown = self.hurries = False
            self.scale = max(self.scale, ratio)
        elif ratio > self.scale or self.scale <= _SLOW or self.good >= GOOD_IN_A_ROW:
            self.scale = _bounded((self.scale * ratio) ** 0.5)

    def was_late(self, told_ns: int, spent_ns: int, now: int, *, is_part: bool, was_read: bool = False) -> None:
        """After ``spent_ns`` less had come than was asked for: a part, which takes ``told_ns`` by the told curve, or
        nothing of what takes so long. ``was_read``: nothing came, but the store had read it, and moving it was late."""
        self.learned_ns = now
        if 0 < self.good < TRUSTED_AFTER:
            self.trial_after_ns = min(TRIAL_AFTER_MAX_NS, 2 * self.trial_after_ns)
        self.good = 0
        ratio = spent_ns / max(1, told_ns) * (1.0 if is_part else _LATE)
        self.scale = _bounded(max(self.scale, ratio))
        if is_part:
            self.is_unknown = self.hurries = False
        elif not self.is_unknown and not was_read and ratio > _SLOW:
            self.is_unknown, self.hurries = True, now - self.hurried_ns >= self.trial_after_ns
            self.hurried_ns = now if self.hurries else self.hurried_ns

    def wants_trial(self, now: int) -> bool:
        """Whether to look if the disks are still slow."""
        return self.scale > _SLOW and (self.hurries or now - self.learned_ns >= self.trial_after_ns)

    def trial_begins(self, now: int) -> None:
        """A few blocks are asked for that no request waits for."""
        self.learned_ns, self.hurries = now, False


def _bounded(scale: float) -> float:
    return min(_SCALE_MAX, max(_SCALE_MIN, scale))
