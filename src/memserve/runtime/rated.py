"""Log lines that cannot flood the log: one line for what happens again and again, then a count; and one line for each
death, return and refusal of a member."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from memserve.cluster.events import MemberChange, ReportMember
from memserve.types import Role

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Between two lines about one thing."""

KEYS_MAX = 256
"""Things that are told apart; the one that was logged least recently makes room."""

LINES_MAX = 60
"""Lines a minute about all things together."""

_MINUTE_S = 60.0

_NAMES_MAX = 1024
"""Names of which the last end is remembered, for the line about their return."""

_LEVELS = {
    MemberChange.JOINED: logging.INFO,
    MemberChange.LEFT: logging.INFO,
    MemberChange.RETURNED: logging.WARNING,  # beside the line about the death: one without the other alarms
    MemberChange.DIED: logging.WARNING,
    MemberChange.REFUSED: logging.WARNING,
    MemberChange.EXPELLED: logging.WARNING,
    MemberChange.DECLINED: logging.WARNING,
}

_WORDS = {
    MemberChange.JOINED: "joined",
    MemberChange.LEFT: "left",
    MemberChange.RETURNED: "is back",
    MemberChange.DIED: "is dead",
    MemberChange.REFUSED: "may not join",
    MemberChange.EXPELLED: "is told to join again",
    MemberChange.DECLINED: "does not join",
}

_KINDS = {Role.STORE: "store", Role.ROUTER: "router", None: "member"}


class RatedLog:
    """Logs at most one line a thing in ``every_s``, and at most ``LINES_MAX`` a minute altogether; the next line says
    how many were left out. Any thread may log."""

    def __init__(
        self, log: logging.Logger, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._every_s, self._clock = log, every_s, clock
        self._lock = threading.Lock()
        self._last: OrderedDict[Hashable, float] = OrderedDict()
        self._minute_s = clock()
        self._lines = 0
        self._left_out = 0

    def say(self, level: int, thing: Hashable, text: str, *values: object) -> None:
        """Log ``text % values`` about ``thing``, or count it."""
        with self._lock:
            if not self._may_speak(thing):
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text, values = text + " (%d lines like it were left out before)", (*values, left_out)
        self._log.log(level, text, *values)

    def _may_speak(self, thing: Hashable) -> bool:
        now = self._clock()
        if now - self._minute_s >= _MINUTE_S:
            self._minute_s, self._lines = now, 0
        last = self._last.get(thing)
        if (last is not None and now - last < self._every_s) or self._lines >= LINES_MAX:
            return False
        self._lines += 1
        self._last[thing] = now
        self._last.move_to_end(thing)
        if len(self._last) > KEYS_MAX:
            self._last.popitem(last=False)
        return True


class MemberLog:
    """Writes what operators read of a cluster's members. One thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = RatedLog(log, clock=clock)
        self._gone: OrderedDict[str, tuple[float, bool]] = OrderedDict()
        """Name -> when its last incarnation ended, and whether that was its death."""

    def say(self, report: ReportMember) -> None:
        """One line, unless there was one like it just now."""
        change, name, level = report.change, report.peer.name, _LEVELS[report.change]
        why = [report.why] if report.why else []
        if change in (MemberChange.DIED, MemberChange.LEFT):
            self._gone[name] = (self._clock(), change is MemberChange.DIED)
            self._gone.move_to_end(name)
            if len(self._gone) > _NAMES_MAX:
                self._gone.popitem(last=False)
        elif change is MemberChange.RETURNED:
            since_s, has_died = self._gone.pop(name, (None, bool(why)))
            why += [] if since_s is None else [f"after {self._clock() - since_s:.1f} s"]
            level = level if has_died else logging.INFO  # it said goodbye, here or to a router before this one
        # one process that knocks at short intervals under ever new generations has one line, too
        thing = (change, name, report.address)
        place = f" at {report.address}" if report.address else ""
        what = _WORDS[change] + (f": {', '.join(why)}" if why else "")
        kind = _KINDS.get(report.role, "instance")
        self._lines.say(level, thing, "%s %s%s %s", kind, name[:100], place[:200], what[:300])
